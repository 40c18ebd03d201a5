"""One ComfyUI server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from devicebridge.tests.comfy.server import Server, start_server
from devicebridge.tests.comfy_host import find_comfyui


@pytest.fixture(scope="session")
def comfyui() -> Path:
    return find_comfyui()


@pytest.fixture(scope="session")
def server(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(comfyui, tmp_path_factory.mktemp("comfy")) as server:
        yield server
