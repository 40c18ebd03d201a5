"""Scripts of this folder that ComfyUI's Python runs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from devicebridge.tests.comfy.server import ENVIRONMENT
from devicebridge.tests.comfy_host import comfy_python


def run_worker(name: str, comfyui: Path, *arguments: str | Path, timeout: float = 400) -> list[dict[str, Any]]:
    """The lines of JSON that such a script prints, each an object; the test fails where the script does."""
    command = [comfy_python(comfyui), Path(__file__).with_name(name), comfyui, *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env=environment, check=False, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
