"""comfy-cli: queues a workflow on a server, and what it tells is made into lines for a person."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system import processes
from ..system.stopping import STOPPED
from .comfyui import QUIET, ROOT
from .server import HOST

TIMED_OUT = 124
_SILENCE_TIMEOUT_S = 24 * 3600  # loading a large model says nothing for long
_PROGRESS_INTERVAL_S = 2.0


@dataclass
class ClientRun:
    """One run of a workflow; message says what went wrong."""

    on_progress: Callable[[str], object]
    message: str = ""
    _titles: dict[str, str] = field(default_factory=dict)
    _last_progress_s: float = 0.0

    def run(self, client: Path, workflow: Path, port: int, timeout_s: float | None) -> int:
        """Queue the workflow and follow it; returns comfy-cli's exit code, 124 after timeout_s, 130 on Ctrl-C."""
        command: list[str | Path] = [client, "--skip-prompt", "run", "--json", "--where", "local", "--wait"]
        command += ["--workflow", workflow, "--host", HOST, "--port", str(port), "--timeout", str(_SILENCE_TIMEOUT_S)]
        is_late = threading.Event()
        with processes.start(command, environment=QUIET) as process:

            def give_up() -> None:
                is_late.set()
                process.terminate()

            timer = threading.Timer(threading.TIMEOUT_MAX if timeout_s is None else timeout_s, give_up)
            timer.daemon = True
            timer.start()
            try:
                exit_code = process.each_line(self.read)
            except KeyboardInterrupt:
                self.message = "cancelled"
                return STOPPED
            finally:
                timer.cancel()
        if is_late.is_set():
            self.message = f"cancelled: not done after {timeout_s:.0f} s"
            return TIMED_OUT
        return exit_code

    def read(self, line: str) -> None:
        """One line of comfy-cli's output: an event as JSON, or something else."""
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            return
        kind = event.get("type") if isinstance(event, dict) else None
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


def _describe_error(error: Mapping[str, Any]) -> str:
    """An error of comfy-cli (1.23) or of the server: message, every part, and the hint where it says more."""
    details = error.get("details") or {}
    errors = [entry for entry in details.get("errors") or [] if isinstance(entry, dict)]
    lines = []
    for entry in errors:
        hint = f" ({entry['hint']})" if entry.get("hint") else ""
        lines.append(f"node {entry.get('node_id') or '?'}: {entry.get('message', '')}{hint}")
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


def _node_lines(node: Mapping[str, Any]) -> list[str]:
    """A line per error of a node. The server lists them; earlier versions of comfy-cli gave one with the node."""
    title = str(node.get("class_type") or f"node {node.get('node_id', '?')}")
    found = node.get("errors") if isinstance(node.get("errors"), list) else [node]
    return [
        " ".join([title, *(str(part[key]) for key in ("message", "details") if part.get(key))])
        if isinstance(part, dict)
        else f"{title} {part}"
        for part in found or ()
    ]


def _pack_lines(errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a node of ours is unknown: ComfyUI lacks the pack, or its suggestions show another version of it."""
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
