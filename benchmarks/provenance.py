"""Where a number comes from: cards, versions, date and commit of a run; how far it is; its results as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_STARTED = time.perf_counter()


def describe_run(*packages: str) -> dict[str, Any]:
    """Facts to keep beside every result: {"cards", "versions", "date", "commit"}; packages are named as pip does."""
    return {"cards": cards(), "versions": versions(*packages), "date": time.strftime("%Y-%m-%d"), "commit": commit()}


def cards() -> list[str]:
    """Names of the CUDA devices; ["none"] without one."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] or ["none"]


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, torch (with the CUDA it was built for) and these packages; "none" for one that is missing."""
    import torch
    from devicebridge.system.versions import installed_version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | {name: installed_version(name) or "none" for name in packages}


def commit() -> str:
    """DEVICEBRIDGE_COMMIT, for copies of the repository without .git, else what git says; "unknown" without either."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        found = ""
    return os.environ.get("DEVICEBRIDGE_COMMIT") or found or "unknown"


def write_json(report: Any, path: Path | None) -> None:
    """Write results; called again as they grow, so that an interrupted run leaves what it had. None writes nothing."""
    if path is not None:
        from devicebridge.system.files import write_atomically

        write_atomically(path, f"{json.dumps(report, indent=2)}\n".encode())


def print_or_write(report: Any, path: Path | None) -> None:
    """The end of a run: results to the file if one was named, else to the standard output."""
    write_json(report, path)
    if path is None:
        print(json.dumps(report, indent=2))


def say(text: str) -> None:
    """One line of progress on the standard error, with the seconds since the start."""
    print(f"[{elapsed_s():6.1f} s] {text}", file=sys.stderr, flush=True)


def elapsed_s() -> float:
    """Seconds since the benchmark started."""
    return time.perf_counter() - _STARTED
