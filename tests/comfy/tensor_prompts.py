"""Many prompts in a running ComfyUI that alternate way, LoRA, size and Cancel, and errors on one card now and then.

Each output has the bits of the first of its kind, the prompt after a cancelled or failed one as well. What the process
holds does not grow. Cards are emulated and stay so between prompts, so that models stay loaded as they do for a user.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from devicebridge.tests.comfy.server import ROOT, Finished, Server
from devicebridge.tests.comfy_host import comfy_python

FAMILY = "sd3"  # its file tells that it has several heads
FILE = "tiny_stress.safetensors"
WAYS, SIZES = ("tensor", "blocks", "tokens"), (64, 96)
STRENGTHS = (0.0, 0.0, 0.6, 1.0)  # of the LoRA; 0 for none
MOST_GROWTH_BYTES = 24 << 20
_KNOWN_AFTER = 50  # prompts: of fewer some are of a kind that nothing before was, with more memory than any
_CANCELLED_STEPS = 10_000  # too many to end by themselves
_FAILING_STEPS = 8  # blocks are recorded in the third or fourth
_MAKE = """
import runpy, sys
runpy.run_path(sys.argv[1])["load_pack"]()
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from comfy.cli_args import args
args.cpu = True
import torch
from safetensors.torch import save_file
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights, save_checkpoint
base, family, name = Path(sys.argv[3]), sys.argv[4], sys.argv[5]
save_checkpoint(FAMILIES[family], base / "diffusion_models" / name, torch.float32)
save_file({k: v.contiguous() for k, v in lora_weights(family, 1).items()}, base / "loras" / name)
"""


@dataclass(frozen=True)
class Kind:
    """What a prompt's output depends on."""

    way: str
    strength: float
    size: int
    replays: bool  # of all prompts alike: it is asked for when the cards are turned on


@dataclass
class Found:
    """What happened. faults: what must not have."""

    prompts: int = 0
    cancelled: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # by place; see TestFailAt
    held: list[dict[str, int]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def make_files(server: Server, comfyui: Path) -> None:
    """A tiny checkpoint and a LoRA of it among the server's models."""
    for name in ("diffusion_models", "loras"):
        (server.base / "models" / name).mkdir(parents=True, exist_ok=True)
    arguments = [str(ROOT / "bootstrap.py"), str(comfyui), str(server.base / "models"), FAMILY, FILE]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    python = comfy_python(comfyui)
    subprocess.run([str(python), "-c", _MAKE, *arguments], env=environment, timeout=120, check=True)


def run_tensor_prompts(server: Server, number: int, num_errors: int, seed: int, *, replays: bool) -> Found:
    """Args: num_errors: before so many of these prompts another fails by an injected error, with way tensor or tokens.
    replays: whether tensor's blocks are replayed. Every second error is in a replay then."""
    draw, found, firsts = random.Random(seed), Found(), dict[Kind, str]()
    places = itertools.cycle(("replay", "meeting") if replays else ("meeting",))
    failing = set(draw.sample(range(1, number), num_errors))
    for index, kind in enumerate(_kinds(draw, number, replays)):
        if index in failing:
            _fail(server, draw, kind, found, next(places))
        elif draw.random() < 0.15:
            _cancel(server, draw, kind, found)
        _compare(server, kind, found, firsts)
        found.prompts += 1
    done = server.run({"1": _node("TestCardsOff")})
    if done.status != "success":
        found.faults.append(f"unloading ended with {done.status}: {done.error}")
    found.faults += growth(found.held)
    return found


def _kinds(draw: random.Random, number: int, replays: bool) -> Iterator[Kind]:
    """Way, LoRA and size alternate, each in its own rhythm."""
    for index in range(number):
        yield Kind(WAYS[index % len(WAYS)], draw.choice(STRENGTHS), draw.choice(SIZES), replays)


def growth(held: list[dict[str, int]]) -> list[str]:
    """What the process held more of at the end than when half of the prompts had run; [] for nothing."""
    half, last = len(held) // 2, held[-1]
    before = {name: max(each[name] for each in held[: half + max(1, (len(held) - half) // 2)]) for name in last}
    is_known = len(held) > _KNOWN_AFTER
    names = ("threads", "tensors", "hooks") if is_known else ("threads",)
    faults = [f"{name} were {before[name]}, now {last[name]}" for name in names if last[name] > before[name]]
    if is_known and last["bytes"] > before["bytes"] + MOST_GROWTH_BYTES:
        faults.append(f"{before['bytes'] >> 20} MiB were used, now {last['bytes'] >> 20}")
    return faults


def _compare(server: Server, kind: Kind, found: Found, firsts: dict[Kind, str]) -> None:
    done = server.run(graph(kind))
    if done.status != "success":
        found.faults.append(f"{kind} ended with {done.status}: {done.error}")
        return
    told = done.outputs["held"]
    found.held.append({name: told[name][0] for name in ("threads", "bytes", "tensors", "hooks")})
    if firsts.setdefault(kind, told["digest"][0]) != told["digest"][0]:
        found.faults.append(f"prompt {found.prompts}, {kind}: other bits than the first")


def _cancel(server: Server, draw: random.Random, kind: Kind, found: Found) -> None:
    """At some moment of its sampling, or a little before, where ComfyUI may not hear it."""
    prompt = server.queue(graph(kind, steps=_CANCELLED_STEPS))
    time.sleep(draw.uniform(0.05, 1.0))
    while not server.get(f"/history/{prompt}"):
        server.post("/interrupt", {})
        time.sleep(0.2)
    done = server.wait(prompt)
    found.cancelled += done.status == "interrupted"
    if done.status == "error":
        found.faults.append(f"cancelled, {kind}: {done.error}")


def _fail(server: Server, draw: random.Random, kind: Kind, found: Found, place: str) -> None:
    """One card fails at one of its meetings, or a replay does."""
    rank, at = draw.randrange(2), draw.randint(1, 4 if place == "replay" else 12)
    way = "tensor" if place == "replay" else draw.choice(("tensor", "tokens"))
    done: Finished = server.run(graph(replace(kind, way=way), steps=_FAILING_STEPS, fails_at=(place, rank, at)))
    if done.status == "error" and f"injected at {at} of {rank}" in done.error:
        found.failed[place] += 1
    else:
        found.faults.append(f"{place} {at} of card {rank} was to fail; it ended with {done.status}: {done.error}")


def graph(kind: Kind, steps: int = 2, fails_at: tuple[str, int, int] = ("meeting", 0, 0)) -> dict[str, Any]:
    """fails_at: place, rank and number; see TestFailAt."""
    place, rank, at = fails_at
    nodes = {
        "on": _node("TestCardsOn", devices="lazy:0,lazy:1", keep=True, replays=kind.replays),
        "load": _node("UNETLoader", unet_name=FILE, weight_dtype="default"),
        "lora": _node("LoraLoaderModelOnly", model=["split", 0], lora_name=FILE, strength_model=kind.strength),
        "split": _node(
            "DeviceBridgeSplitModel",
            model=["load", 0],
            devices=["on", 0],
            balance="memory",
            split_at="",
            memory_limit_gb="",
            transport="auto",
            overlap=True,
            offload=True,
            way=kind.way,
        ),
        "positive": _node("TestCondition", family=FAMILY, seed=1),
        "latent": _node("EmptyLatentImage", width=kind.size, height=kind.size, batch_size=1),
        "fail": _node("TestFailAt", model=[_last(kind), 0], rank=rank, at=at, place=place),
        "sample": _node(
            "KSampler",
            model=["fail", 0],
            seed=7,
            steps=steps,
            cfg=1.0,
            sampler_name="euler",
            scheduler="simple",
            positive=["positive", 0],
            negative=["positive", 0],
            latent_image=["latent", 0],
            denoise=1.0,
        ),
        "held": _node("TestHeld", samples=["sample", 0]),
    }
    if not kind.strength:
        del nodes["lora"]
    return nodes


def _last(kind: Kind) -> str:
    return "lora" if kind.strength else "split"


def _node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}
