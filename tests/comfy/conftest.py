"""One ComfyUI server for all tests of this folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from devicebridge.tests.comfy.server import ENVIRONMENT, Server, start_server
from devicebridge.tests.comfy_host import comfy_python, find_comfyui


@pytest.fixture(scope="session")
def comfyui() -> Path:
    folder = find_comfyui()
    if folder is None:
        pytest.skip("no ComfyUI: set COMFYUI_PATH to its folder, or install it with comfy-cli")
    if comfy_python(folder) is None:
        pytest.skip(f"no Python beside ComfyUI: make {folder}/.venv with its requirements")
    return folder


@pytest.fixture(scope="session")
def server(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(comfyui, tmp_path_factory.mktemp("comfy")) as server:
        yield server


@pytest.fixture
def servers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread here, too, and in the servers that a command starts."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def short_texts_there(server: Server) -> Iterator[None]:
    """For trainings in the server that are about everything but the length of texts."""
    with server.short_texts():
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("needs chromium: install it, or name it in CHROMIUM")
    return found


def names_that_run(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The values of the parameter "name" among the tests of this file that are not skipped."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    run = [item for item in items if "name" in item.callspec.params and not item.get_closest_marker("skip")]
    return tuple(dict.fromkeys(item.callspec.params["name"] for item in run))
