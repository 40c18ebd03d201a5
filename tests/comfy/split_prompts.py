"""Very many prompts in one process: each output has the bits of the first of its kind, and nothing grows.

A prompt is a plain MODEL, or one that is split in one of the ways, of one of two families and some size, with no LoRA
or one of some strength, with or without CFG, its nodes cached or run anew. Now and then a card is cleared in between,
and a prompt before it is cancelled, or fails on one card. scripts/soak.py asks for a thousand.
"""

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import comfy.model_management as management
import psutil
import torch
from devicebridge.tests.comfy.split_cases import CPU, split
from devicebridge.tests.comfy.split_cases_tensor import _failing_meeting
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, live_bytes
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES
from devicebridge.tests.emulated import live_tensors

WAYS = ("", "blocks", "tensor", "tokens")  # "": not split
_NAMES = ("flux1_heads", "wan_heads")
_MOST_GROWTH_BYTES = 32 << 20
_WARM_UP = 50  # of a hundred prompts, before what is held is counted: memory fills up slowly
_MEET = ("tensor", "tokens")
# What is held, and how much more of it may be at the end.
_MORE = {"threads": 0, "files": 0, "tensors": 0, "modules": 0, "hooks": 0, "bytes": _MOST_GROWTH_BYTES}
_COUNTED = tuple(name for name in _MORE if name != "bytes")
_ENDS = ("was cancelled", "failed", "ran to its end")  # cards that compute whole conditionings do not meet


class Kind(NamedTuple):
    """What an output depends on. strength: of the LoRA, 0 for none."""

    name: str
    way: str
    strength: float
    cfg: float
    width: int


def run_prompts(host: Host, number: int, seed: int) -> dict[str, Any]:
    """What was found: how many outputs differ, and what the process held after the first half and at the end."""
    draw, models, firsts = random.Random(seed), dict[Kind, Any](), dict[Kind, torch.Tensor]()
    different, before, ended, ways = 0, {}, Counter[str](), Counter[str]()
    for index in range(number):
        kind = _draw(draw)
        made = kind._replace(cfg=1.0, width=0)
        if made not in models or draw.random() < 0.2:
            models[made] = _model(host, kind)
        if draw.random() < 0.2:
            ended[_stopped(host, draw, models[made], kind)] += 1
        output = _sample(host, models[made], kind)
        ways[kind.way or "plain"] += 1
        different += not torch.equal(firsts.setdefault(kind, output), output)
        if draw.random() < 0.05:
            draw.choice((host.unload_all, lambda: host.free(OTHER), lambda: host.free(HOME)))()
        if index == max(1, number * _WARM_UP // 100):
            before = _held(host, models)
    after = _held(host, models)
    left = live_bytes(HOME) + live_bytes(OTHER)
    found = {"different": different, "before": before, "after": after, "left": left, "ended": ended, "ways": ways}
    return {**found, "kinds": len(firsts)}


def faults_of(found: dict[str, Any], kinds: Sequence[str] = _COUNTED) -> list[str]:
    """What grew or differed; [] for nothing. How much memory the process has tells nothing before very many prompts."""
    before, after = found["before"], found["after"]
    faults = [f"{n} were {before[n]}, now {after[n]}" for n in kinds if after[n] > before[n] + _MORE[n]]
    if found["different"] or found["left"]:
        faults.append(f"{found['different']} outputs differ, {found['left']} bytes are left on cards")
    return faults + [f"a prompt {what}" for what in found["ended"] if what not in _ENDS]


def _draw(draw: random.Random) -> Kind:
    strength = draw.choice((0.0, 0.0, 0.6, 1.0))
    return Kind(draw.choice(_NAMES), draw.choice(WAYS), strength, draw.choice((1.0, 4.0)), draw.choice((0, 2)))


def _model(host: Host, kind: Kind) -> Any:
    model = host.load(kind.name, load_device=CPU) if not kind.way else split(host.load(kind.name), way=kind.way)
    return host.lora(model, kind.name, strength=kind.strength) if kind.strength else model


def _sample(host: Host, model: Any, kind: Kind, **more: Any) -> torch.Tensor:
    *others, width = FAMILIES[kind.name].latent
    return host.sample(model, kind.name, cfg=kind.cfg, steps=2, latent=(*others, width + kind.width), **more)


def _stopped(host: Host, draw: random.Random, model: Any, kind: Kind) -> str:
    """How a prompt ended that is cancelled, behind a step or in a collective of one card, or that fails there."""
    cancel, rank = management.InterruptProcessingException(), draw.randrange(2)
    error = draw.choice((cancel, RuntimeError("injected")))

    def press(*args: Any) -> None:
        raise cancel

    try:
        if kind.way in _MEET and draw.random() < 0.7:
            with _failing_meeting(rank, draw.randint(1, 8), error):
                _sample(host, model, kind)
        else:
            _sample(host, model, kind, callback=press)
    except management.InterruptProcessingException:
        return "was cancelled"
    except RuntimeError as raised:
        return "failed" if raised is error else f"ended with {raised}"
    return "ran to its end"


def _held(host: Host, models: dict[Kind, Any]) -> dict[str, int]:
    """The most hooks on a module of these models; and when they are gone: threads, files, tensors, modules, memory."""
    parts = [each.model for model in models.values() for each in (model, *getattr(model, "companions", ()))]
    hooks = max(len(each._forward_hooks) + len(each._forward_pre_hooks) for part in parts for each in part.modules())
    del parts
    models.clear()
    host.unload_all()
    host.machine.cards.copies.clear()  # the emulation notes every copy
    gc.collect()
    end = time.monotonic() + 5
    while any(each.name.startswith("devicebridge") for each in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.05)  # those of a pool that is gone end by themselves
    return {
        "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")), "tensors": len(live_tensors()),
        "modules": sum(issubclass(type(each), torch.nn.Module) for each in gc.get_objects()), "hooks": hooks,
        "bytes": psutil.Process().memory_info().rss,
    }  # fmt: skip
