"""Very many prompts in one process: each output has the bits of the first of its kind, and nothing grows.

A prompt is a plain or a split MODEL of one of two families, with or without a LoRA and CFG, its nodes cached or run
anew, and now and then a card is cleared in between. scripts/soak.py asks for a thousand.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import torch
from devicebridge.tests.comfy.split_cases import CPU, split
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, live_bytes

FAMILIES = ("flux1", "wan")
_MOST_GROWTH_BYTES = 32 << 20
_WARM_UP = 50  # of a hundred prompts, before what is held is counted: memory fills up slowly


def run_prompts(host: Host, number: int, seed: int) -> dict[str, Any]:
    """What was found: how many outputs differ, and what the process held after the first half and at the end."""
    draw, models, firsts = random.Random(seed), {}, {}
    different, before = 0, {}
    for index in range(number):
        kind = draw.choice(FAMILIES), draw.random() < 0.3, draw.random() < 0.5, draw.choice((1.0, 4.0))
        if kind not in models or draw.random() < 0.2:
            models[kind] = _model(host, *kind[:3])
        output = host.sample(models[kind], kind[0], cfg=kind[3], steps=2)
        different += not torch.equal(firsts.setdefault(kind, output), output)
        if draw.random() < 0.05:
            draw.choice((host.unload_all, lambda: host.free(OTHER), lambda: host.free(HOME)))()
        if index == max(1, number * _WARM_UP // 100):
            before = _held()
    models.clear()
    after = _held()
    host.unload_all()
    gc.collect()
    return {"different": different, "before": before, "after": after, "left": live_bytes(HOME) + live_bytes(OTHER)}


def faults_of(found: dict[str, Any]) -> list[str]:
    """What grew or differed; [] for nothing."""
    before, after = found["before"], found["after"]
    faults = [
        f"{name} were {before[name]}, now {after[name]}" for name in ("threads", "files") if after[name] > before[name]
    ]
    if after["bytes"] > before["bytes"] + _MOST_GROWTH_BYTES:
        faults.append(f"{before['bytes'] >> 20} MiB of memory were used, now {after['bytes'] >> 20}")
    if found["different"] or found["left"]:
        faults.append(f"{found['different']} outputs differ, {found['left']} bytes are left on cards")
    return faults


def _model(host: Host, name: str, is_plain: bool, has_lora: bool) -> Any:
    model = host.load(name, load_device=CPU) if is_plain else split(host.load(name))
    return host.lora(model, name) if has_lora else model


def _held() -> dict[str, int]:
    import psutil

    gc.collect()
    used = psutil.Process().memory_info().rss
    return {"threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")), "bytes": used}
