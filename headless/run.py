"""Running a workflow file without a browser: start the user's ComfyUI, queue the workflow with comfy-cli, stop it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.json_file import read_json_object
from ..system.stopping import STOPPED, interrupt_on_signal
from .client import TIMED_OUT, ClientRun
from .comfyui import find_comfy_cli, find_comfyui
from .server import start_server, tell_lines
from .workflow import read_workflow, set_values


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


def run_workflow(
    workflow: Path,
    *,
    comfyui: Path | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[str], object] = lambda line: None,
    base: Path | None = None,
    server_arguments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run a workflow in its API or its saved form. Ctrl-C, SIGTERM and SIGHUP cancel it once training has saved.

    Args:
        comfyui: ComfyUI's folder; None finds it.
        timeout_s: cancel after this many seconds; None never does.
        on_progress: gets one line at a time.
        base: other place for models, inputs and outputs than ComfyUI's folder.
        server_arguments: added to ComfyUI's own, such as "--cpu".
        values: inputs that are replaced, see set_values.
    Raises: ValueError for a file that is no workflow, or an input that it has not; RuntimeError if ComfyUI or comfy-cli
        is missing or fails.
    """
    check_workflow(workflow)
    with interrupt_on_signal(), tempfile.TemporaryDirectory(prefix="devicebridge-run-") as scratch:
        if values:
            changed = set_values(read_workflow(workflow), values)
            workflow = Path(scratch) / workflow.name
            workflow.write_text(json.dumps(changed), encoding="utf-8")
        installed = find_comfyui(comfyui, base)
        client = find_comfy_cli()
        on_progress(f"starting ComfyUI in {installed.folder}")
        with start_server(installed, Path(scratch), server_arguments) as server:
            server.wait_until_ready()
            run = ClientRun(on_progress)
            with tell_lines(server.log, on_progress):
                exit_code = run.run(client, workflow, server.port, timeout_s)
            if exit_code in {STOPPED, TIMED_OUT}:
                on_progress("cancelling; waiting until the state is saved")
                server.cancel_and_wait()
            outputs = server.find_outputs()
        if exit_code in {0, STOPPED}:
            server.log.unlink(missing_ok=True)
        return RunResult(exit_code, outputs, run.message, server.log if server.log.exists() else None)


def check_workflow(path: Path) -> None:
    """Raises: ValueError for a file that is missing or holds neither form: node id -> node, or "nodes" and "links"."""
    try:
        graph = read_json_object(path, "give a workflow that ComfyUI has saved")
    except FileNotFoundError as error:
        raise ValueError(f"there is no workflow {path}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no workflow: {error}") from error
    is_api_form = graph and all(isinstance(node, dict) and "class_type" in node for node in graph.values())
    if not is_api_form and not isinstance(graph.get("nodes"), list):
        raise ValueError(f"{path} is no workflow: expected ComfyUI's saved or API form")
