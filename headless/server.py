"""A ComfyUI server of our own: started, asked, interrupted, and stopped with everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..system import processes

HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0  # installs with many custom nodes start slowly
_CANCEL_TIMEOUT_S = 300.0  # a training step has to end and a checkpoint to be written
_POLL_S = 0.25
_LOG_INTERVAL_S = 0.5
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TOLD_LINE = re.compile(r"(?:\[INFO\] )?((?:\[\w+\] )?(?:split|training): .*)")  # behind the level of ComfyUI's log


@dataclass(frozen=True)
class Server:
    process: processes.Running
    port: int
    log: Path

    def ask(self, path: str, data: bytes | None = None) -> bytes:
        """The body of a route; data: of a POST. Raises: OSError while it cannot be reached."""
        request = urllib.request.Request(f"http://{HOST}:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())

    def wait_until_ready(self) -> None:
        """Raises: RuntimeError with the end of the log, if it ends or does not answer in time."""
        end = time.monotonic() + _START_TIMEOUT_S
        while (is_running := self.process.exit_code is None) and time.monotonic() < end:
            with contextlib.suppress(OSError):
                self.ask("/system_stats")
                return
            time.sleep(_POLL_S)
        fault = (
            f"ComfyUI did not answer within {_START_TIMEOUT_S:.0f} s" if is_running else "ComfyUI ended while starting"
        )
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        raise RuntimeError("\n".join([f"{fault}; its log is {self.log}, the last lines:", *lines]))

    def cancel_and_wait(self) -> None:
        """Interrupt what runs and wait until it has saved its state."""
        end = time.monotonic() + _CANCEL_TIMEOUT_S
        with contextlib.suppress(OSError, json.JSONDecodeError):
            self.ask("/interrupt", b"{}")
            while time.monotonic() < end and json.loads(self.ask("/queue"))["queue_running"]:
                time.sleep(_POLL_S)


@contextlib.contextmanager
def start_server(installed: ComfyUI, scratch: Path, arguments: Sequence[str]) -> Iterator[Server]:
    """ComfyUI on a free port, until the block ends. Its log outlives the scratch folder.
    Models, inputs, outputs and other custom nodes are the user's own. The database and the temporary folder are
    separate, so that an open ComfyUI is not disturbed. Where this pack is not among the custom nodes, a model path file
    adds it."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command: list[str | Path] = [installed.python, "main.py", "--listen", HOST, "--port", str(port)]
    command += ["--disable-auto-launch", "--database-url", "sqlite:///:memory:", "--temp-directory", scratch]
    if installed.base != installed.folder:
        (installed.base / "custom_nodes").mkdir(parents=True, exist_ok=True)  # ComfyUI does not start without
        command += ["--base-directory", installed.base]
    if find_pack(installed.base / "custom_nodes") is None:
        custom_nodes = scratch / "custom_nodes"  # alone in a folder of its own
        custom_nodes.mkdir()
        try:
            (custom_nodes / PACK_NAME).symlink_to(ROOT, target_is_directory=True)
        except OSError:  # Windows without the right to make links
            shutil.copytree(ROOT, custom_nodes / PACK_NAME, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests"))
        paths = scratch / "extra_model_paths.yaml"
        paths.write_text(f"{PACK_NAME}:\n  custom_nodes: {json.dumps(str(custom_nodes))}\n", encoding="utf-8")
        command += ["--extra-model-paths-config", paths]
    if "--cpu" not in arguments and not has_accelerator(installed.python):
        command.append("--cpu")
    number, log = tempfile.mkstemp(prefix="devicebridge-comfyui-", suffix=".log")
    with open(number, "wb") as output:
        process = processes.start([*command, *arguments], folder=installed.folder, output=output)
    with process:
        yield Server(process, port, Path(log))


@contextlib.contextmanager
def tell_lines(log: Path, say: Callable[[str], object]) -> Iterator[None]:
    """Inside, a thread passes on what the log says of splits and trainings: comfy-cli is silent while a model loads."""
    is_over = threading.Event()

    def follow() -> None:
        with log.open(encoding="utf-8", errors="replace") as lines:
            unfinished, was_over = "", False
            while not was_over:
                was_over = is_over.wait(_LOG_INTERVAL_S)
                *whole, unfinished = (unfinished + lines.read()).split("\n")
                for line in whole:
                    if found := _TOLD_LINE.match(_COLOUR.sub("", line.rstrip())):
                        say(found[1])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


# ---- what is installed: the user's ComfyUI, its Python, the `comfy` command, and copies of this pack


ROOT = Path(__file__).resolve().parent.parent
PACK_NAME = "devicebridge"
QUIET = {"DO_NOT_TRACK": "1", "COMFY_NO_TELEMETRY": "1"}


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI checkout and the Python it runs with; base is where its models, inputs and outputs lie."""

    folder: Path
    python: Path
    base: Path


def find_comfyui(given: Path | None = None, base: Path | None = None, python: Path | None = None) -> ComfyUI:
    """The user's ComfyUI: as given, else the first of _places. python: that it runs with; None finds it.
    Raises: RuntimeError that says where it was looked for and how to get one."""
    looked = []
    for place in [given] if given else _places():
        if (place / "main.py").is_file() and (place / "comfy").is_dir():
            folder = place.resolve()
            python = python or find_python(folder, base)
            python = Path(shutil.which(str(python)) or python).absolute()  # its links stay: they make the environment
            return ComfyUI(folder, python, (base or folder).resolve())
        looked.append(str(place))
    raise RuntimeError(
        f"no ComfyUI was found (looked in {', '.join(looked)}); name its folder with --comfyui or COMFYUI_PATH, or get "
        "one with `pip install comfy-cli` and `comfy install`, or by cloning https://github.com/comfyanonymous/ComfyUI"
    )


def _places() -> Iterator[Path]:
    """From COMFYUI_PATH, around this pack, as `comfy which` says, which takes seconds, and ~/comfy/ComfyUI."""
    if named := os.environ.get("COMFYUI_PATH"):
        yield Path(named).expanduser()
    if ROOT.parent.name == "custom_nodes":
        yield ROOT.parent.parent
    with contextlib.suppress(RuntimeError, ValueError, LookupError, TypeError):
        command = [str(find_comfy_cli()), "--skip-prompt", "--json", "which"]
        answer = processes.run(command, timeout_s=60, environment=QUIET)
        if place := json.loads(answer or "")["data"]["workspace_path"]:  # else it would be the folder we are in
            yield Path(place)
    yield Path.home() / "comfy" / "ComfyUI"


def find_python(folder: Path, base: Path | None = None) -> Path:
    """The Python of a ComfyUI: as COMFYUI_PYTHON says, its virtual environment's, the portable build's, else this."""
    if os.environ.get("COMFYUI_PYTHON"):
        return Path(os.environ["COMFYUI_PYTHON"]).expanduser()
    inner = [f"{name}/{place}" for name in (".venv", "venv") for place in ("bin/python", "Scripts/python.exe")]
    own = [each / place for each in filter(None, (folder, base)) for place in inner]
    own.append(folder.parent / "python_embeded" / "python.exe")
    return next((path for path in own if path.is_file()), Path(sys.executable))


def has_accelerator(python: Path) -> bool:
    """Whether that Python's torch can use a GPU; without one ComfyUI starts with --cpu only."""
    question = processes.python_command("import torch; print(torch.accelerator.is_available())", python=python)
    return (processes.run(question, timeout_s=120) or "").strip().endswith("True")


def find_comfy_cli() -> Path:
    """The `comfy` command beside this Python, else the one on the path. Raises: RuntimeError where there is none."""
    found = shutil.which("comfy", path=str(Path(sys.executable).parent)) or shutil.which("comfy")
    if found is None:
        raise RuntimeError("workflows are run through comfy-cli, which is not installed: pip install comfy-cli")
    return Path(found)


def find_pack(custom_nodes: Path) -> Path | None:
    """The folder among these custom nodes that holds a copy of this pack; then that copy is the one that runs."""
    for folder in sorted(custom_nodes.iterdir()) if custom_nodes.is_dir() else ():
        project = folder / "pyproject.toml"
        if folder.name.endswith(".disabled"):  # ComfyUI does not load these
            continue
        if folder.resolve() == ROOT:
            return folder
        if project.is_file() and f'name = "{PACK_NAME}"' in project.read_text(encoding="utf-8", errors="replace"):
            return folder
    return None
