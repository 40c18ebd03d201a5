"""Run the type checker on the backend rooms, under the pack's import name whatever its folder is called.

mypy finds a package by its folder's name, so it looks at a temporary folder in which `devicebridge` points here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    "checkpoints",
    "cli",
    "config",
    "data",
    "encoding",
    "families",
    "headless",
    "jobs",
    "nodes",
    "parallel",
    "patches",
    "planning",
    "quantization",
    "runs",
    "sampling",
    "system",
    "training",
)
FILES = ("assembly.py", "compat.py", "events.py")


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "devicebridge"
        link.symlink_to(ROOT, target_is_directory=True)
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--no-namespace-packages"]
        command += [f"devicebridge/{name}" for name in (*ROOMS, *FILES) if (ROOT / name).exists()]
        return subprocess.run(command, cwd=folder, env={**os.environ, "MYPYPATH": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
