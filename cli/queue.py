"""The command `devicebridge jobs`: what ComfyUI's page shows of trainings, in a terminal."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from ..runs.queue import MEMORY, JobQueue
from ..runs.store import NotThere, RunStore
from ..system.progress import describe_duration
from ..system.telling import say


def jobs(options: argparse.Namespace) -> int:
    folder = options.folder
    if folder is None:
        from ..headless.run import find_comfyui

        folder = find_comfyui().base / "output" / "devicebridge"  # which is not there where nothing has run
    elif not folder.is_dir():
        raise ValueError(f"{folder} is no folder; name the one that holds the runs, output/devicebridge of a ComfyUI")
    folder = folder.absolute()  # not yet without links: ComfyUI's user folder lies beside output, not where that leads
    user = options.user_directory or folder.parent.parent / "user"
    if folder.is_dir() and not user.is_dir():
        say(f"the queue is not shown: there is no folder {user}; name ComfyUI's with --user-directory", sys.stderr)
    store = RunStore(folder.resolve())
    queue = JobQueue(store, user / MEMORY)
    if options.stop:
        try:
            queue.ask(options.stop, "stop")
        except NotThere as error:
            known = ", ".join(store.ids()) or "none"
            raise ValueError(f"there is no run {options.stop!r} in {store.root}; found: {known}") from error
        say(f"{options.stop} ends its step and saves")
        return 0
    runs = store.ids() if options.all else store.shown()
    left_out = len(store.runs) - len(runs)
    values: dict[str, Any] = {
        "runs": [store.summary(run) for run in runs],
        "left_out": left_out,
        "jobs": queue.describe(),
    }
    if options.json:
        say(json.dumps(values, indent=2))
        return 0
    say(f"runs in {store.root}")
    say("\n".join(_describe(run) for run in values["runs"]) or "none")
    if left_out:
        say(f"{left_out} older runs are left out; --all shows them")
    for number, job in enumerate(values["jobs"], 1):
        why = f": {job['why']}" if job["why"] else ""
        say(f"queue {number}. {job['run']}  {job['state']} for {', '.join(job['devices'])}{why}")
    return 0


def _describe(run: dict[str, Any]) -> str:
    line = f"{run['run']}  {run['state']}  step {run['step']}/{run['total']}"
    if run["loss"] is not None:
        line += f"  loss {run['loss']:.5f}"
    if run["step_s"] is not None and run["state"] == "running":
        line += f"  {run['step_s']:.2f} s/step, about {describe_duration(run['left_s'])} left"
    if run["devices"]:
        line += f"  on {', '.join(run['devices'])}"
    line = f"{line}: {run['message'].splitlines()[0]}" if run["message"] else line
    changes = (f"\n  after step {step}: {each}" for step, lines in run["changes"] for each in lines)
    return "".join([line, *changes])
