"""Running a workflow file without a browser: start the user's ComfyUI, queue the workflow with comfy-cli, and stop all
that was started."""

from __future__ import annotations

import contextlib
import copy
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.files import read_json_object
from ..system.progress import NowAndThen
from ..system.stopping import STOPPED, interrupt_on_signal

HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0  # installs with many custom nodes start slowly
_CANCEL_TIMEOUT_S = 300.0  # a training step has to end and a checkpoint to be written
_POLL_S = 0.25
_LOG_INTERVAL_S = 0.5
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TOLD_LINE = re.compile(r"(?:\[INFO\] )?((?:\[\w+\] )?(?:split|training): .*)")  # behind the level of ComfyUI's log
TIMED_OUT = 124
_SILENCE_TIMEOUT_S = 24 * 3600  # loading a large model says nothing for long
_PROGRESS_INTERVAL_S = 2.0


@dataclass(frozen=True)
class RunResult:
    """How a workflow ended: comfy-cli's exit code (124 timed out, 130 cancelled), files written, what went wrong, and
    ComfyUI's log where something failed."""

    exit_code: int
    outputs: list[Path]
    message: str
    log: Path | None = None


def run_workflow(
    workflow: Path,
    *,
    comfyui: Path | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[str], object] = lambda line: None,
    base: Path | None = None,
    server_arguments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    python: Path | None = None,
) -> RunResult:
    """Run a workflow in its API or its saved form. Ctrl-C, SIGTERM and SIGHUP cancel it once training has saved.
    comfyui, python: ComfyUI's folder, and what it runs with; None finds each. timeout_s: None never cancels.
    on_progress: gets one line at a time. base: other place for models, inputs and outputs than ComfyUI's folder.
    server_arguments: added to ComfyUI's own, such as "--cpu". values: inputs that are replaced, see set_values.
    Raises: ValueError for a file that is no workflow, or an input that it has not; RuntimeError if ComfyUI or comfy-cli
    is missing or fails."""
    graph = read_workflow(workflow)
    with interrupt_on_signal(), tempfile.TemporaryDirectory(prefix="devicebridge-run-") as scratch:
        if values:
            workflow = Path(scratch) / workflow.name
            workflow.write_text(json.dumps(set_values(graph, values)), encoding="utf-8")
        installed = find_comfyui(comfyui, base, python)
        client = find_comfy_cli()
        on_progress(f"starting ComfyUI in {installed.folder}")
        with start_server(installed, Path(scratch), server_arguments) as server:
            server.wait_until_ready()
            with tell_lines(server.log, on_progress):
                result = run_client(client, workflow, server.port, timeout_s, on_progress)
            if result.exit_code in {STOPPED, TIMED_OUT}:
                on_progress("cancelling; waiting until the state is saved")
                server.cancel_and_wait()
        if result.exit_code in {0, STOPPED}:
            server.log.unlink(missing_ok=True)
        outputs = list(dict.fromkeys(installed.base / "output" / each for each in result.outputs))
        return replace(result, outputs=outputs, log=server.log if server.log.exists() else None)


def read_workflow(path: Path) -> dict[str, Any]:
    """The nodes of a workflow file, as they stand there.
    Raises: ValueError for a file that is missing or holds neither form: node id -> node, or "nodes" and "links"."""
    try:
        graph = read_json_object(path, "give a workflow that ComfyUI has saved")
    except FileNotFoundError as error:
        raise ValueError(f"there is no workflow {path}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no workflow: {error}") from error
    is_api_form = graph and all(isinstance(node, dict) and "class_type" in node for node in graph.values())
    if not is_api_form and not isinstance(graph.get("nodes"), list):
        raise ValueError(f"{path} is no workflow: expected ComfyUI's saved or API form")
    return graph


# ---- workflow files, in the form that ComfyUI saves or in its API form, with inputs replaced


def parse_setting(text: str) -> tuple[str, Any]:
    """ "NODE.INPUT=VALUE"; the value is JSON where it can be, else text.
    Raises: ValueError for another form."""
    name, is_set, value = text.partition("=")
    if not is_set or "." not in name:
        raise ValueError(f"--set {text!r} is not NODE.INPUT=VALUE; NODE is a node's number, type or title")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        return name.strip(), value


def set_values(graph: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a workflow with inputs replaced.
    values: "<node>.<input>" -> value; a node by its id, its type or its title. A type stands for every such node.
    Raises: ValueError for a name that no node has."""
    changed = copy.deepcopy(dict(graph))
    if "nodes" in changed:
        there = [((str(node["id"]), node["type"], node.get("title")), node) for node in changed["nodes"]]
    else:
        items = changed.items()
        there = [((key, node["class_type"], node.get("_meta", {}).get("title")), node) for key, node in items]
    for name, value in values.items():
        node_name, _, input_name = name.rpartition(".")
        nodes = [node for names, node in there if node_name in names]
        if not nodes:
            known = ", ".join(dict.fromkeys(str(kind) for (_, kind, _), _ in there))
            raise ValueError(f"{name}: the workflow has no node {node_name!r}; it has {known}")
        for node in nodes:
            inputs: Any = node.get("inputs") or []  # in the API form a table
            if "class_type" in node and input_name in inputs:
                inputs[input_name] = value
                continue
            # In the saved form: a list in the order of the widgets, and beside it, since 2026, a table by name.
            named, listed = node.get("widgets_values_named", {}), node.get("widgets_values", [])
            widgets = list(named) or [each["name"] for each in inputs if not isinstance(each, str) and "widget" in each]
            if input_name not in widgets or len(widgets) != len(listed):
                raise ValueError(f"{name}: the node has no such input that can be set")
            listed[widgets.index(input_name)] = value
            named |= {input_name: value} if named else {}
    return changed


# ---- comfy-cli: queues a workflow on a server, and what it tells is made into lines for a person


def run_client(
    client: Path, workflow: Path, port: int, timeout_s: float | None, on_progress: Callable[[str], object]
) -> RunResult:
    """Queue the workflow and follow it; outputs are below ComfyUI's output folder."""
    command: list[str | Path] = [client, "--skip-prompt", "run", "--json", "--where", "local", "--wait"]
    command += ["--workflow", workflow, "--host", HOST, "--port", str(port), "--timeout", str(_SILENCE_TIMEOUT_S)]
    titles, lines, message = dict[str, str](), NowAndThen(_PROGRESS_INTERVAL_S), ""
    outputs: list[Path] = []
    limit_s, is_late = threading.TIMEOUT_MAX if timeout_s is None else timeout_s, threading.Event()

    def read(line: str) -> None:
        nonlocal message
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            return
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "executing":
            titles[event["node"]] = event["title"]
            on_progress(event["title"])
        elif kind == "progress" and lines.is_due(event["completed"], event["total"]):
            title = titles.get(event["node"], event["node"])
            on_progress(f"{title} {event['completed']}/{event['total']}")
        elif kind == "executed":
            files = (each for each in event["outputs"] if each["type"] == "output")
            outputs.extend(Path(each["subfolder"], each["filename"]) for each in files)
        elif kind == "envelope" and event.get("error"):
            message = _describe_error(event["error"])

    with processes.start(command, environment=QUIET) as process:

        def give_up() -> None:
            is_late.set()
            process.terminate()

        timer = threading.Timer(limit_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            exit_code = process.each_line(read)
        except KeyboardInterrupt:
            return RunResult(STOPPED, outputs, "cancelled")
        finally:
            timer.cancel()
    if is_late.is_set():
        return RunResult(TIMED_OUT, outputs, f"cancelled: not done after {limit_s:.0f} s")
    return RunResult(exit_code, outputs, message)


def _describe_error(error: Mapping[str, Any]) -> str:
    """An error of comfy-cli (1.23) or of the server: message, a line for each part, the hint, and a missing pack."""
    details = error.get("details") or {}
    lines = [str(error.get("message", "the workflow failed"))]
    for entry in (*(details.get("errors") or ()), *(details.get("node_errors") or ())):
        for part in entry.get("errors") or [entry]:
            said = [part.get(key) for key in ("message", "details", "hint")] if isinstance(part, dict) else [part]
            node = f"node {entry.get('node_id') or '?'}", entry.get("class_type")
            lines.append(" ".join(map(str, filter(None, [*node, *said]))))
    hint, body = str(error.get("hint") or ""), str(details.get("body") or "")
    lines += [each for each in (*hint.splitlines(), body) if each and not each.startswith(("inspect ", "node "))]
    texts = map(str, details.get("errors") or ())
    if any("unknown_class_type" in text and "'DeviceBridge" in text for text in texts):
        lines.append(
            "This ComfyUI does not have this node of DeviceBridge: the pack is not in custom_nodes, is older, or could "
            f"not be imported (ComfyUI's log says why); the pack that belongs to this command is {ROOT}"
        )
    return "\n".join(lines)


# ---- a server of our own


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
        f"no ComfyUI was found (looked in {', '.join(looked)}); set COMFYUI_PATH to its folder (run: or --comfyui), or"
        " get one with `pip install comfy-cli` and `comfy install`, or by cloning https://github.com/comfyanonymous/ComfyUI"
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
