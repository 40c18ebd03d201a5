"""Running a workflow file without a browser: start the user's ComfyUI, queue the workflow with comfy-cli, stop it."""

from __future__ import annotations

import copy
import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.files import read_json_object
from ..system.progress import NowAndThen
from ..system.stopping import STOPPED, interrupt_on_signal
from .server import HOST, QUIET, ROOT, find_comfy_cli, find_comfyui, start_server, tell_lines

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
            if "class_type" in node and input_name in node["inputs"]:
                node["inputs"][input_name] = value
                continue
            # In the saved form: a list in the order of the widgets, and beside it, since 2026, a table by name.
            named, listed = node.get("widgets_values_named", {}), node.get("widgets_values", [])
            widgets = list(named) or [entry["name"] for entry in node.get("inputs", []) if "widget" in entry]
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
    limit_s, began_s = threading.TIMEOUT_MAX if timeout_s is None else timeout_s, time.monotonic()

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
        timer = threading.Timer(limit_s, process.terminate)
        timer.daemon = True
        timer.start()
        try:
            exit_code = process.each_line(read)
        except KeyboardInterrupt:
            return RunResult(STOPPED, outputs, "cancelled")
        finally:
            timer.cancel()
    if time.monotonic() - began_s >= limit_s:
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
