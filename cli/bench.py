"""`devicebridge doctor --bench`: how fast this machine's cards, links and blocks of models are, as a row of a table."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from ..version import VERSION

HEADER = (
    "| cards | torch, system | link, GB/s | TFLOP/s, 16 bits | FLUX.2, ms: one card, tokens, tensor | Qwen-Image "
    "| Wan 14B |\n|---|---|---|---|---|---|---|"
)
_ISSUES = "https://github.com/devicebridge/ComfyUI-DeviceBridge/issues"
# A path from the root of a file system, up to its last name; no URL, and no "TFLOP/s".
_FOLDERS = re.compile(r"(?<![\w.:/\\~])(?:[A-Za-z]:)?[\\/](?:[^\\/\s'\"]+[\\/])*(?=[^\\/\s])")


def collect() -> dict[str, Any]:
    """What nodes/host/split/bench.py measures in this process, which has ComfyUI, ready for JSON. It is made to be sent
    to others, so no folder of this machine is in it."""
    with contextlib.redirect_stdout(sys.stderr):  # what ComfyUI prints, also as it is imported, is no JSON
        from ..nodes.host.split.bench import measure

        measured = measure()
    for each in measured["blocks"]:
        why = each["why"].items()
        each["why"] = {way: _FOLDERS.sub("", said.replace(str(Path.home()), "~")) for way, said in why}
    system, date = f"{platform.system()} {platform.release()}", time.strftime("%Y-%m-%d")
    return {"devicebridge": VERSION, "system": system, "date": date, **measured}


def report(facts: dict[str, Any]) -> str:
    """A row of a Markdown table under its header, what failed, and the values."""
    if not facts["cards"]:
        return "the torch of ComfyUI's Python finds no GPU, so there is nothing to measure"
    notes = [f"note: {each['model']}, {way}: {why}" for each in facts["blocks"] for way, why in each["why"].items()]
    last = f"Send the row and these values in an issue at {_ISSUES}:"
    return "\n".join([HEADER, row(facts), "", *notes, last, json.dumps(facts)])


def row(facts: dict[str, Any]) -> str:
    """Of unlike cards and several links the slowest figure."""
    names = Counter(name.removeprefix("NVIDIA ").removeprefix("GeForce ") for name in facts["cards"])
    cards = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in names.items())
    blocks = {each["model"]: each["seconds"] for each in facts["blocks"]}
    times = [
        ", ".join(_in_units(blocks.get(name, {}).get(way), 1e-3) for way in ("one card", "tokens", "tensor"))
        for name in ("FLUX.2", "Qwen-Image", "Wan 14B")
    ]
    speeds = f"{_in_units(facts['bytes_per_s'], 1e9)} | {_in_units(facts['flops_per_s'], 1e12)}"
    return f"| {cards} | {facts['torch']}, {facts['system']} | {speeds} | {' | '.join(times)} |"


def _in_units(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3g}"
