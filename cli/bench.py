"""`devicebridge doctor --bench`: how fast the cards of this machine and their links are, as a row of a table."""

from __future__ import annotations

import json
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

from ..headless import server
from ..system import processes
from ..system.telling import say
from ..version import VERSION

_BLOCKS_TIMEOUT_S = 120.0  # ComfyUI's start and the loading of weights included
HEADER = (
    "| cards | torch, system | link, GB/s: direct, through the host | TFLOP/s: 16 bits, int8, fp8 | "
    "FLUX.2, ms: one card, tokens, tensor | Qwen-Image | Wan 14B |\n|---|---|---|---|---|---|---|"
)
_ISSUES = "https://github.com/devicebridge/ComfyUI-DeviceBridge/issues"
# A path from the root of a file system, up to its last name; no URL, and no "TFLOP/s".
_FOLDERS = re.compile(r"(?<![\w.:/\\~])(?:[A-Za-z]:)?[\\/](?:[^\\/\s'\"]+[\\/])*(?=[^\\/\s])")
_MODELS = ("FLUX.2", "Qwen-Image", "Wan 14B")


def collect(python: Path | None = None) -> dict[str, Any]:
    """Plain values, ready for JSON; what could not be measured is None, or has a reason in "notes".

    They are made to be sent to others, so no folder of this machine is in them.
    """
    facts: dict[str, Any] = {
        "devicebridge": VERSION,
        "system": f"{platform.system()} {platform.release()}",
        "date": time.strftime("%Y-%m-%d"),
        "torch": None,
        "cards": [],
        "links": [],
        "blocks": [],
        "notes": [],
    }
    try:
        import torch
    except (ImportError, OSError) as error:
        facts["notes"].append(f"torch cannot be imported: {_without_folders(str(error))}")
        return facts
    from ..parallel.devices import available_devices, device_title, release_cached_memory, total_bytes

    facts["torch"], devices = torch.__version__, available_devices()
    if not devices:
        facts["notes"].append("no GPU was found, so there is nothing to measure")
        return facts
    with torch.inference_mode():
        for device in devices:
            size = total_bytes(device)
            card = {"name": device_title(device), "gb": None if size is None else round(size / 1e9, 1)}
            facts["cards"].append(card | _products(device, facts["notes"]))
        facts["links"] = [_link(one, other, facts["notes"]) for one, other in combinations(devices, 2)]
    if len(devices) == 1:
        facts["notes"].append("one GPU was found, so there is no link to measure")
    release_cached_memory()
    facts["blocks"] = _measure_blocks(facts["notes"], python)
    return facts


def _products(device: Any, notes: list[str]) -> dict[str, float | None]:
    """Operations per second of large products, by type."""
    import torch

    from ..parallel.exchange_speed import product_speed

    types = {"half": torch.float16, "int8": torch.int8, "float8": torch.float8_e4m3fn}
    return {
        name: _tried(lambda dtype=dtype: product_speed(device, dtype=dtype), f"{name} products on {device}", notes)  # type: ignore[misc]
        for name, dtype in types.items()
    }


def _link(one: Any, other: Any, notes: list[str]) -> dict[str, Any]:
    """Bytes per second each way at once, by the driver's own copies and through pinned host memory."""
    from ..parallel.devices import has_peer_access
    from ..parallel.exchange_speed import exchange_speed
    from ..parallel.staged_copies import StagedCopies
    from ..parallel.transfer import SideStreams

    ways: dict[str, Callable[[], SideStreams]] = {"direct": SideStreams, "host": StagedCopies}
    speeds = {
        name: _tried(lambda make=make: exchange_speed(one, other, make()), f"{name} copies {one}, {other}", notes)  # type: ignore[misc]
        for name, make in ways.items()
    }
    return {"cards": [str(one), str(other)], "has_peer_access": has_peer_access(one, other), **speeds}


def _tried(measure: Callable[[], float], what: str, notes: list[str]) -> float | None:
    try:
        return measure()
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as error:
        notes.append(f"{what}: {_without_folders(str(error).splitlines()[0])}")
        return None


def _measure_blocks(notes: list[str], python: Path | None) -> list[dict[str, Any]]:
    """What nodes/host/split/bench.py finds, in ComfyUI's Python."""
    from ..runs.queue import native_command

    try:
        found = server.find_comfyui(python=python)
    except RuntimeError:
        notes.append("blocks: no ComfyUI was found; set COMFYUI_PATH to its folder")
        return []
    command = [*native_command(found.python, found.folder, found.base), "doctor", "--blocks"]
    told = processes.run(command, timeout_s=_BLOCKS_TIMEOUT_S)
    try:
        blocks: list[dict[str, Any]] = json.loads((told or "").strip().splitlines()[-1])
    except (ValueError, IndexError):
        notes.append(f"blocks: ComfyUI's Python ended early or took more than {_BLOCKS_TIMEOUT_S:.0f} s")
        say(f"devicebridge: {notes[-1]}; see what this says: {' '.join(map(str, command))}", sys.stderr)
        return []
    if not blocks:
        notes.append("blocks: the torch of ComfyUI's Python finds no GPU")
    for each in blocks:
        each["why"] = {way: _without_folders(why) for way, why in each["why"].items()}
    notes += [f"{each['model']}, {way}: {why}" for each in blocks for way, why in each["why"].items()]
    return blocks


def _without_folders(text: str) -> str:
    return _FOLDERS.sub("", text.replace(str(Path.home()), "~"))


def report(facts: dict[str, Any]) -> str:
    """A row of a Markdown table under its header, the notes, and the values."""
    lines = [HEADER, row(facts), ""] if facts["cards"] else []
    lines += [f"note: {each}" for each in facts["notes"]]
    if facts["cards"]:
        lines += ["", f"Send the row and these values in an issue at {_ISSUES}:", json.dumps(facts)]
    return "\n".join(lines)


def row(facts: dict[str, Any]) -> str:
    """Of unlike cards and several links the slowest figure."""
    names = Counter(card["name"].removeprefix("NVIDIA ").removeprefix("GeForce ") for card in facts["cards"])
    cards = ", ".join(f"{number} x {name}" if number > 1 else name for name, number in names.items())
    link = ", ".join(_least([each[way] for each in facts["links"]], 1e9) for way in ("direct", "host"))
    rates = ", ".join(_least([card[kind] for card in facts["cards"]], 1e12) for kind in ("half", "int8", "float8"))
    blocks = {each["model"]: each["seconds"] for each in facts["blocks"]}
    times = [
        ", ".join(_least([blocks.get(name, {}).get(way)], 1e-3) for way in ("one card", "tokens", "tensor"))
        for name in _MODELS
    ]
    return f"| {cards} | {facts['torch']}, {facts['system']} | {link} | {rates} | {' | '.join(times)} |"


def _least(values: list[float | None], unit: float) -> str:
    known = [value / unit for value in values if value is not None]
    return f"{min(known):.3g}" if known else "-"
