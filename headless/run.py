"""Running a workflow file without a browser: start the user's ComfyUI, queue the workflow with comfy-cli, stop it.

The server is the user's own: its models, its input and output folders, its other custom nodes. Only the database and
the temporary folder are separate, so that an open ComfyUI is not disturbed. When this pack is not among its custom
nodes it is added for this run through a model path file.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.stopping import STOPPED, interrupt_on_signal

_log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
PACK_NAME = "devicebridge"

_START_TIMEOUT_S = 600.0  # installs with many custom nodes start slowly
_CANCEL_TIMEOUT_S = 300.0  # a training step has to end and a checkpoint to be written
_SILENCE_TIMEOUT_S = 24 * 3600  # loading a large model says nothing for long
_PROGRESS_INTERVAL_S = 2.0
_LOG_INTERVAL_S = 0.5
_TIMED_OUT = 124
_QUIET = {"DO_NOT_TRACK": "1", "COMFY_NO_TELEMETRY": "1"}
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SPLIT_LINE = re.compile(r"(?:\[(\w+)\] )?(split: .*)")  # behind the level tag of ComfyUI's log

Say = Callable[[str], object]


@dataclass(frozen=True)
class ComfyUI:
    """A ComfyUI checkout and the Python it runs with; base is where its models, inputs and outputs lie."""

    folder: Path
    python: Path
    base: Path


@dataclass(frozen=True)
class RunResult:
    """How a workflow ended.

    Args:
        exit_code: comfy-cli's; 124 timed out, 130 cancelled.
        outputs: files written.
        message: what went wrong.
        log: ComfyUI's log, kept where something failed; None after success and after Ctrl-C.
    """

    exit_code: int
    outputs: list[Path]
    message: str
    log: Path | None = None


def _say_nothing(line: str) -> None:
    pass


def run_workflow(
    workflow: Path,
    *,
    comfyui: Path | None = None,
    timeout_s: float | None = None,
    on_progress: Say = _say_nothing,
    values: Mapping[str, Any] | None = None,
    base: Path | None = None,
    server_arguments: Sequence[str] = (),
) -> RunResult:
    """Run a workflow in its API or its saved form. Ctrl-C, SIGTERM and SIGHUP cancel it once training has saved.

    Args:
        comfyui: ComfyUI's folder; None finds it.
        timeout_s: cancel after this many seconds; None never does.
        on_progress: gets one line at a time.
        values: inputs to replace, see set_values.
        base: other place for models, inputs and outputs than ComfyUI's folder.
        server_arguments: added to ComfyUI's own, such as "--cpu".
    Raises: ValueError for a file that is no workflow; RuntimeError if ComfyUI or comfy-cli is missing or fails.
    """
    graph = set_values(read_workflow(workflow), values or {})
    with interrupt_on_signal(), tempfile.TemporaryDirectory(prefix="devicebridge-run-") as scratch:
        installed = find_comfyui(comfyui, base)
        client = find_comfy_cli()
        edited = Path(scratch) / workflow.name
        edited.write_text(json.dumps(graph), encoding="utf-8")
        on_progress(f"starting ComfyUI in {installed.folder}")
        with _start_server(installed, Path(scratch), server_arguments) as server:
            _wait_until_ready(server)
            run = _ClientRun(on_progress)
            with _tell_split_lines(server.log, on_progress):
                exit_code = _run_client(client, edited, server, run, timeout_s)
            if exit_code in {STOPPED, _TIMED_OUT}:
                _cancel_and_wait(server, on_progress)
            outputs = _collect_outputs(server, installed)
        log = server.log
        if exit_code in {0, STOPPED}:
            log.unlink(missing_ok=True)
        return RunResult(exit_code, outputs, run.message, log if log.exists() else None)


# ---- the workflow file ----


def read_workflow(path: Path) -> dict[str, Any]:
    """A workflow in its API form (node id -> node) or as ComfyUI saves it (with "nodes" and "links").

    Raises: ValueError if the file is missing or neither of these.
    """
    try:
        graph = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"there is no workflow {path}") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no workflow: {error}") from error
    is_saved_form = isinstance(graph, dict) and isinstance(graph.get("nodes"), list)
    if not is_saved_form and not _is_api_form(graph):
        raise ValueError(f"{path} is no workflow: expected ComfyUI's saved or API form")
    return graph


def _is_api_form(graph: Any) -> bool:
    nodes = graph.values() if isinstance(graph, dict) else ()
    return bool(nodes) and all(isinstance(node, dict) and "class_type" in node for node in nodes)


def set_values(graph: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a workflow with inputs replaced.

    Args:
        values: "<node id>.<input>" or "<node type>.<input>" -> value; a type stands for every node of that type.
    Raises: ValueError for a name that no node has.
    """
    changed = copy.deepcopy(dict(graph))
    for name, value in values.items():
        node_name, _, input_name = name.rpartition(".")
        nodes = _find_nodes(changed, node_name)
        if not nodes:
            raise ValueError(f"{name}: the workflow has no node {node_name!r}")
        for node in nodes:
            _set_input(node, input_name, value, name)
    return changed


def _find_nodes(graph: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if "nodes" in graph:
        return [node for node in graph["nodes"] if name in {str(node["id"]), node["type"]}]
    return [node for node_id, node in graph.items() if name in {node_id, node["class_type"]}]


def _set_input(node: dict[str, Any], input_name: str, value: Any, name: str) -> None:
    """In the saved form values are a list in the order of the widgets, and beside it, since 2026, a table by name."""
    if "class_type" in node and input_name in node["inputs"]:
        node["inputs"][input_name] = value
        return
    named = node.get("widgets_values_named", {})
    widgets = list(named) or [entry["name"] for entry in node.get("inputs", []) if "widget" in entry]
    values = node.get("widgets_values", [])
    if input_name not in widgets or len(widgets) != len(values):
        raise ValueError(f"{name}: the node has no such input that can be set")
    values[widgets.index(input_name)] = value
    if named:
        named[input_name] = value


# ---- what is installed ----


def find_comfyui(given: Path | None = None, base: Path | None = None) -> ComfyUI:
    """The user's ComfyUI: as given, from COMFYUI_PATH, around this pack, as `comfy which` says, or ~/comfy/ComfyUI.

    Raises: RuntimeError that says where it was looked for and how to get one.
    """
    places = [given] if given else list(_places())
    for place in places:
        if (place / "main.py").is_file() and (place / "comfy").is_dir():
            folder = place.resolve()
            return ComfyUI(folder, find_python(folder), (base or folder).resolve())
    raise RuntimeError(
        f"no ComfyUI was found (looked in {', '.join(map(str, places))}); name its folder with --comfyui or "
        "COMFYUI_PATH, or get one with `pip install comfy-cli` and `comfy install`, or by cloning "
        "https://github.com/comfyanonymous/ComfyUI"
    )


def _places() -> Iterator[Path]:
    if os.environ.get("COMFYUI_PATH"):
        yield Path(os.environ["COMFYUI_PATH"]).expanduser()
    if ROOT.parent.name == "custom_nodes":
        yield ROOT.parent.parent
    told = _ask_comfy_cli()
    if told:
        yield told
    yield Path.home() / "comfy" / "ComfyUI"


def _ask_comfy_cli() -> Path | None:
    client = _comfy_cli()
    if client is None:
        return None
    asked = processes.run([client, "--skip-prompt", "--json", "which"], timeout_s=60, environment=_QUIET)
    if asked is None or asked.exit_code != 0:
        return None
    answer = _read_line(asked.output.strip())
    path = (answer.get("data") or {}).get("workspace_path")
    return Path(path) if path else None


def find_python(folder: Path) -> Path:
    """The Python a ComfyUI folder brings: its virtual environment, the portable build's, else the one running now."""
    candidates = [folder / name / place for name in (".venv", "venv") for place in ("bin/python", "Scripts/python.exe")]
    candidates.append(folder.parent / "python_embeded" / "python.exe")
    return next((path for path in candidates if path.is_file()), Path(sys.executable))


def find_comfy_cli() -> Path:
    """The `comfy` command.

    Raises: RuntimeError that says how to install it.
    """
    client = _comfy_cli()
    if client is None:
        raise RuntimeError("workflows are run through comfy-cli, which is not installed: pip install comfy-cli")
    return client


def _comfy_cli() -> Path | None:
    beside_us = shutil.which("comfy", path=str(Path(sys.executable).parent))
    found = beside_us or shutil.which("comfy")
    return Path(found) if found else None


# ---- the server ----


@dataclass(frozen=True)
class _Server:
    process: processes.Running
    port: int
    log: Path

    def get(self, path: str) -> Any:
        """Parsed JSON of a route.

        Raises: OSError while it cannot be reached.
        """
        with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=10) as answer:
            return json.loads(answer.read())

    def post(self, path: str) -> None:
        request = urllib.request.Request(f"http://{HOST}:{self.port}{path}", data=b"{}", method="POST")
        request.add_header("Content-Type", "application/json")
        urllib.request.urlopen(request, timeout=10).close()

    def last_lines(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-20:])


@contextlib.contextmanager
def _start_server(installed: ComfyUI, scratch: Path, arguments: Sequence[str]) -> Iterator[_Server]:
    """ComfyUI on a free port, stopped with everything it started when the block ends. Its log outlives the scratch."""
    port = _free_port()
    number, name = tempfile.mkstemp(prefix="devicebridge-comfyui-", suffix=".log")
    os.close(number)
    log = Path(name)
    command: list[str | Path] = [installed.python, "main.py", "--listen", HOST, "--port", str(port)]
    command += ["--disable-auto-launch", "--database-url", "sqlite:///:memory:", "--temp-directory", scratch]
    if installed.base != installed.folder:
        (installed.base / "custom_nodes").mkdir(parents=True, exist_ok=True)  # ComfyUI does not start without
        command += ["--base-directory", installed.base]
    pack = find_pack(installed.base / "custom_nodes")
    if pack is not None:
        _log.info("the workflow runs with the copy of the pack in %s", pack)
    else:
        command += ["--extra-model-paths-config", _make_pack_visible(scratch)]
    if "--cpu" not in arguments and not _has_accelerator(installed.python):
        command.append("--cpu")
    with log.open("wb") as output:
        process = processes.start([*command, *arguments], folder=installed.folder, output=output)
        with process:
            yield _Server(process, port, log)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


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


def _make_pack_visible(scratch: Path) -> Path:
    """A model path file that adds this pack, alone in a folder of its own, to ComfyUI's custom nodes."""
    custom_nodes = scratch / "custom_nodes"
    custom_nodes.mkdir()
    try:
        (custom_nodes / PACK_NAME).symlink_to(ROOT, target_is_directory=True)
    except OSError:  # Windows without the right to make links
        shutil.copytree(ROOT, custom_nodes / PACK_NAME, ignore=shutil.ignore_patterns(".*", "__pycache__", "tests"))
    config = scratch / "extra_model_paths.yaml"
    config.write_text(f"{PACK_NAME}:\n  custom_nodes: {json.dumps(str(custom_nodes))}\n", encoding="utf-8")
    return config


def _has_accelerator(python: Path) -> bool:
    """Whether that Python's torch can use a GPU; without one ComfyUI starts with --cpu only."""
    question = "import torch; print(torch.accelerator.is_available())"
    asked = processes.run([python, "-c", question], timeout_s=120)
    return asked is not None and asked.output.strip().endswith("True")


def _wait_until_ready(server: _Server) -> None:
    end = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < end:
        if server.process.exit_code is not None:
            raise RuntimeError(
                f"ComfyUI ended while starting; its log is {server.log}, the last lines:\n{server.last_lines()}"
            )
        try:
            server.get("/system_stats")
            return
        except (OSError, json.JSONDecodeError):
            time.sleep(0.25)
    raise RuntimeError(
        f"ComfyUI did not answer within {_START_TIMEOUT_S:.0f} s; its log is {server.log}, the last lines:\n"
        f"{server.last_lines()}"
    )


def _cancel_and_wait(server: _Server, on_progress: Say) -> None:
    """Interrupt what runs and wait until it has saved its state."""
    on_progress("cancelling; waiting until the state is saved")
    end = time.monotonic() + _CANCEL_TIMEOUT_S
    with contextlib.suppress(OSError, json.JSONDecodeError):
        server.post("/interrupt")
        while time.monotonic() < end and server.get("/queue")["queue_running"]:
            time.sleep(0.25)


def _collect_outputs(server: _Server, installed: ComfyUI) -> list[Path]:
    """Files that finished nodes have announced. The server is ours alone, so all its history is this run."""
    try:
        history = server.get("/history")
    except (OSError, json.JSONDecodeError):
        return []
    items = [
        item
        for prompt in history.values()
        for node_output in prompt.get("outputs", {}).values()
        for entries in node_output.values()
        if isinstance(entries, list)
        for item in entries
        if isinstance(item, dict) and item.get("type") == "output" and "filename" in item
    ]
    paths = [installed.base / "output" / item.get("subfolder", "") / item["filename"] for item in items]
    return list(dict.fromkeys(paths))


@contextlib.contextmanager
def _tell_split_lines(log: Path, say: Say) -> Iterator[None]:
    """Pass on what the server's log says about the split, as it appears: which card gets what, and warnings.

    A thread of its own reads, for comfy-cli is silent while a model loads.
    """
    is_over = threading.Event()

    def follow() -> None:
        with log.open(encoding="utf-8", errors="replace") as lines:
            unfinished = ""
            while True:
                was_over = is_over.wait(_LOG_INTERVAL_S)
                *whole, unfinished = (unfinished + lines.read()).split("\n")
                for told in filter(None, map(_read_split_line, whole)):
                    say(told)
                if was_over:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _read_split_line(line: str) -> str:
    """The part of a log line that begins with "split:", with the level in front where that is not INFO; else ""."""
    found = _SPLIT_LINE.match(_COLOUR.sub("", line.rstrip()))
    if found is None:
        return ""
    level, text = found.groups()
    return text if level in {None, "INFO"} else f"{level}: {text}"


# ---- comfy-cli ----


@dataclass
class _ClientRun:
    """Reads comfy-cli's events, one JSON object per line, and says what a person wants to know."""

    on_progress: Say
    message: str = ""
    _titles: dict[str, str] = field(default_factory=dict)
    _last_progress_s: float = 0.0

    def read(self, line: str) -> None:
        event = _read_line(line)
        kind = event.get("type")
        if kind == "executing":
            self._titles[event["node"]] = event["title"]
            self.on_progress(event["title"])
        elif kind == "progress":
            self._read_progress(event)
        elif kind == "envelope" and event.get("error"):
            self.message = _describe_error(event["error"])

    def _read_progress(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last_progress_s >= _PROGRESS_INTERVAL_S or event["completed"] >= event["total"]:
            self._last_progress_s = now
            title = self._titles.get(event["node"], event["node"])
            self.on_progress(f"{title} {event['completed']}/{event['total']}")


def _read_line(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}


def _describe_error(error: Mapping[str, Any]) -> str:
    """What comfy-cli (1.23) refused or the server answered: message, every error, and the hint where it says more."""
    details = error.get("details") or {}
    errors = [entry for entry in details.get("errors") or [] if isinstance(entry, dict)]
    lines = [f"node {entry.get('node_id') or '?'}: {_with_hint(entry)}" for entry in errors]
    for node in details.get("node_errors") or []:
        lines += _node_lines(node) if isinstance(node, dict) else []
    said = [str(entry["message"]) for entry in errors if entry.get("message")]
    for hint in str(error.get("hint") or "").splitlines():
        is_for_programs = hint.startswith("inspect ")  # points into the JSON, which nobody sees here
        if not is_for_programs and not any(message in hint for message in said):
            lines.append(hint)
    if details.get("body"):
        lines.append(str(details["body"]))
    lines += _pack_lines(errors)
    return "\n".join([str(error.get("message", "the workflow failed")), *lines])


def _with_hint(entry: Mapping[str, Any]) -> str:
    hint = f" ({entry['hint']})" if entry.get("hint") else ""
    return f"{entry.get('message', '')}{hint}"


def _node_lines(node: Mapping[str, Any]) -> list[str]:
    """One line per error of a node: the server lists them, earlier versions of comfy-cli gave one with the node."""
    title = str(node.get("class_type") or f"node {node.get('node_id', '?')}")
    found = node.get("errors") if isinstance(node.get("errors"), list) else [node]
    return [
        " ".join([title, *(str(part[key]) for key in ("message", "details") if part.get(key))])
        if isinstance(part, dict)
        else f"{title} {part}"
        for part in found or ()
    ]


def _pack_lines(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a node of ours is unknown: that ComfyUI lacks the pack, or by its suggestions has another version of it."""
    unknown = [
        entry
        for entry in errors
        if entry.get("code") == "unknown_class_type" and "'DeviceBridge" in str(entry.get("message"))
    ]
    if not unknown:
        return []
    if any(name.startswith("DeviceBridge") for entry in unknown for name in entry.get("suggestions") or ()):
        return [f"The DeviceBridge pack of this ComfyUI has no such node; update it, or mend the name (ours: {ROOT})"]
    return [
        "This ComfyUI does not have the DeviceBridge pack in custom_nodes, or could not import it (ComfyUI's log says "
        f"why); the pack that belongs to this command is {ROOT}"
    ]


def _run_client(client: Path, workflow: Path, server: _Server, run: _ClientRun, timeout_s: float | None) -> int:
    """Queue the workflow and follow it; returns comfy-cli's exit code, 124 after timeout_s, 130 on Ctrl-C."""
    command: list[str | Path] = [
        client,
        "--skip-prompt",
        "run",
        "--json",
        "--where",
        "local",
        "--workflow",
        workflow,
        "--wait",
    ]
    command += ["--host", HOST, "--port", str(server.port), "--timeout", str(_SILENCE_TIMEOUT_S)]
    is_late = threading.Event()
    with processes.start(command, environment=_QUIET) as process:

        def give_up() -> None:
            is_late.set()
            process.terminate()

        timer = threading.Timer(timeout_s, give_up) if timeout_s is not None else None
        if timer:
            timer.daemon = True
            timer.start()
        try:
            exit_code = process.each_line(run.read)
        except KeyboardInterrupt:
            run.message = "cancelled"
            return STOPPED
        finally:
            if timer:
                timer.cancel()
    if is_late.is_set():
        run.message = f"cancelled: not done after {timeout_s:.0f} s"
        return _TIMED_OUT
    return exit_code
