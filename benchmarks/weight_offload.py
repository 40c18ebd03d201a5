"""Blocks that stream from host memory against resident ones: FLUX.2 at full width on real cards.

    python benchmarks/weight_offload.py [--out results.json] [--blocks 2 10] [--cards 2] [--offloaded 0.5 1.0]
    python benchmarks/weight_offload.py --full --scheme fp8-compute        # all 8 + 48 blocks; 33 GB of host memory

Random weights, batch 1, LoRA rank 32 in float32, AdamW, 512 text tokens, by the pack's own loop. One model per scheme;
its blocks are offloaded and brought back between measurements, so that all ways share weights, LoRA and cards:

    equal          LoRA gradients of a step, bit for bit those of the resident blocks (deterministic algorithms)
    s_per_sample   fastest of --rounds rounds of --steps steps; the ways take turns in every round
    copied_gb      per sample, per card; link_gb_per_s: of a slot's copy alone
    hidden         share of the copies (or of the computation, where that is shorter) that ran beside the other
    peaks          max_memory_allocated of each card against the planner's forecast

--offloaded are shares of each card's blocks. --tiny runs the same code with toy shapes on two emulated cards, where
times mean nothing. Results are written after each scheme.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import runpy
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic algorithms need, before CUDA starts
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.config.job import JobConfig  # noqa: E402
from devicebridge.parallel.devices import available_devices, reset_peaks, synchronize  # noqa: E402
from devicebridge.parallel.local.pipeline import Pipeline  # noqa: E402
from devicebridge.parallel.offload import weights as weights_module  # noqa: E402
from devicebridge.parallel.offload.weights import WeightOffload  # noqa: E402
from devicebridge.parallel.placement import Placement, place_offloaded  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile  # noqa: E402
from devicebridge.planning.plan import TrainingPlan, plan_training  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings, refusal  # noqa: E402
from devicebridge.tests.emulated import CARDS  # noqa: E402
from devicebridge.tests.placed import apply_weight_offload, place  # noqa: E402
from eight_bit_training import emulation  # noqa: E402
from provenance import describe_run, print_or_write, say, write_json  # noqa: E402
from random_job import (  # noqa: E402
    FAMILY,
    SCHEMES,
    TINY_CONFIG,
    VARIANT,
    attach_lora,
    find_cards,
    make_config,
    make_info,
    make_picture_samples,
    make_question,
    make_random_job,
    make_random_model,
    make_trainer,
)

PACKAGES = ("diffusers", "peft", "torchao", "triton")


def run_scheme(options: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """Build one model, check and time every way."""
    config = TINY_CONFIG if options.tiny else make_config(options.blocks)
    job = make_job(options, scheme, None)
    resident = make_plan(options, config, job, None)
    counts = [device.num_blocks for device in resident.devices]
    bounds = [sum(counts[:index]) for index in range(1, len(counts))]
    ways: dict[str, TrainingPlan] = {"resident": resident}
    for share in options.offloaded:
        offloaded = tuple(round(share * count) for count in counts)
        ways[f"offloaded {'+'.join(map(str, offloaded))}"] = make_plan(
            options, config, make_job(options, scheme, offloaded), bounds
        )
    tail = tuple(FAMILY.tail) if options.strategy != "none" else ()
    built = make_random_model(config, replace(resident.placement, tail=tail), scheme)
    lora = attach_lora(built, job)
    built.model.enable_gradient_checkpointing(built.split.checkpoint)
    pipeline = Pipeline(built.model, built.split.bridge) if tail else None
    data = make_picture_samples(config, options.side, is_tiny=options.tiny)
    trainer = make_trainer(built, lora, job, data, runner=pipeline)
    compiled = apply_compile(built.model, FAMILY) if options.compile else None
    report: dict[str, Any] = {"placement": resident.placement.describe(), "ways": {name: {} for name in ways}}
    check_gradients(built.split, trainer, ways, report)
    measure(options, built.split, trainer, ways, report)
    if compiled is not None:
        compiled.remove()
    return report


def make_job(options: argparse.Namespace, scheme: str, offloaded: Sequence[int] | None) -> JobConfig:
    """Every block recomputed, whatever fits."""
    nothing = [0] * len(options.devices)
    return make_random_job(
        model={"quantize": "none" if scheme == "bf16" else scheme, "dtype": "bfloat16"},
        data={"resolutions": [options.side]},
        lora={"rank": options.rank, "alpha": float(options.rank), "dtype": "float32"},
        train={"gradient_accumulation_steps": options.accumulation, "gradient_checkpointing": True},
        parallel={"strategy": options.strategy},
        optimizer={"learning_rate": 1e-6},
        split={
            "memory_limit_gb": [1000.0] * len(nothing),
            "blocks_without_checkpointing": nothing,
            "offloaded_blocks": list(offloaded) if offloaded is not None else nothing,
        },
    )


def make_plan(options: argparse.Namespace, config: Any, job: JobConfig, cuts: Sequence[int] | None) -> TrainingPlan:
    """The planner's; its forecast is what is compared."""
    info = make_info(config, is_tiny=options.tiny)
    cards = find_cards(options.devices, is_tiny=options.tiny)
    return plan_training(make_question(job, info, cards, options.side, cuts))


@contextlib.contextmanager
def offloaded_as(split: Any, plan: TrainingPlan) -> Iterator[WeightOffload | None]:
    """Inside, the plan's blocks stream; None where it has none."""
    placement: Placement = split.placement
    places = place_offloaded(placement, (), plan.offloaded) if any(plan.offloaded) else {}
    offload = apply_weight_offload(split, list(places)) if places else None
    gc.collect()
    try:
        yield offload
    finally:
        if offload is not None:
            offload.remove()
            place(split.model, placement)


# ---- what is measured


def check_gradients(split: Any, trainer: Any, ways: dict[str, TrainingPlan], report: dict[str, Any]) -> None:
    """One step's LoRA gradients each, on the same data and weights."""
    expected: dict[str, torch.Tensor] = {}
    with deterministic():
        for name, plan in ways.items():
            with offloaded_as(split, plan):
                found = gradients(trainer)
            expected = expected or found
            differing = [key for key, gradient in found.items() if not torch.equal(gradient, expected[key])]
            report["ways"][name]["equal"] = not differing
            say(f"{name}: {'gradients are equal' if not differing else f'{len(differing)} gradients differ'}")


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # strictly: with warn_only attention's backward stays as it is
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Of the trainer's next step, which does not happen; on the CPU."""
    with trainer.trial():
        trainer.accumulate(trainer.job.train.gradient_accumulation_steps)
        return {name: host(p.grad) for name, p in trainer.lora.parameters().items() if p.grad is not None}


def host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu")


def measure(
    options: argparse.Namespace, split: Any, trainer: Any, ways: dict[str, TrainingPlan], report: dict[str, Any]
) -> None:
    """Times, copies and peaks; the ways take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    samples = options.steps * trainer.job.train.gradient_accumulation_steps
    for round_number in range(options.rounds):
        for name, plan in ways.items():
            with offloaded_as(split, plan) as offload:
                one_step(trainer)  # fills the slots, makes the optimizer's state
                synchronize(options.devices)
                reset_peaks(options.devices)
                before = [each.slots.num_copies for each in offload._devices] if offload is not None else []
                start = time.perf_counter()
                for _ in range(options.steps):
                    one_step(trainer)
                synchronize(options.devices)
                times[name].append((time.perf_counter() - start) / samples)
                if round_number:
                    continue
                row = report["ways"][name]
                if not options.tiny:
                    row["peaks"] = {each.device: peaks_of(each) for each in plan.devices}
                if offload is not None:
                    copies = [each.slots.num_copies - b for each, b in zip(offload._devices, before, strict=True)]
                    row |= describe_copies(offload, [count / samples for count in copies])
    for name, found in times.items():
        row = report["ways"][name]
        row["s_per_sample"], row["all_s_per_sample"] = round(min(found), 4), [round(each, 4) for each in found]
        if any(row.get("copy_s", {}).values()):
            together = sum if options.strategy == "none" else max  # one card after the other, or all at once
            row["hidden"] = hidden(min(times["resident"]), together(row["copy_s"].values()), min(found))
        say(f"{name}: {row}")


def one_step(trainer: Any) -> None:
    trainer.train_step(trainer.job.optimizer.learning_rate)
    trainer.step += 1


def hidden(computing: float, copying: float, together: float) -> float:
    """1: as long as the longer of the two; 0: one after the other."""
    return round((computing + copying - together) / max(1e-9, min(computing, copying)), 3)


def describe_copies(offload: WeightOffload, copies: Sequence[float]) -> dict[str, Any]:
    """Of a sample, by card; blocks are taken for as large as their mean.

    Args:
        copies: of blocks, per card.
    """
    found: dict[str, Any] = {"host_gb": round(offload.host_bytes / 1e9, 2)}
    found["pinned"] = all(block.host.is_pinned for block in offload._blocks.values())
    found |= {"copies": {}, "copied_gb": {}, "link_gb_per_s": {}, "copy_s": {}}
    for each, count in zip(offload._devices, copies, strict=True):
        sizes = [block.host.tensor.nbytes for block in each.blocks]
        size, link, name = count * sum(sizes) / len(sizes) / 1e9, link_of(each), str(_card_of(each))
        found["copies"][name], found["copied_gb"][name] = round(count, 1), round(size, 3)
        found["link_gb_per_s"][name], found["copy_s"][name] = round(link, 2), round(size / link, 4)
    return found


def _card_of(device: Any) -> torch.device:
    return device.slots.slots[0].buffer.device


def link_of(device: Any) -> float:
    """GB/s of a copy into an ordinary buffer, with nothing beside it."""
    source = device.blocks[0].host.tensor
    target = torch.empty_like(source, device=_card_of(device))
    for _ in range(2):
        synchronize([_card_of(device)])
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize([_card_of(device)])
        elapsed = time.perf_counter() - start
    return source.nbytes / 1e9 / elapsed


def peaks_of(forecast: Any) -> dict[str, float]:
    measured = torch.cuda.max_memory_allocated(torch.device(forecast.device))
    return {
        "forecast_gb": round(forecast.allocated / 1e9, 3),
        "measured_gb": round(measured / 1e9, 3),
        "percent_above": round(100 * (forecast.allocated / measured - 1), 2),
    }


# ---- command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 10), help="double and single blocks")
    parser.add_argument("--full", action="store_true", help="all blocks")
    parser.add_argument("--cards", type=int, default=2, help="how many GPUs at most")
    parser.add_argument("--side", type=int, default=512, help="pixels")
    parser.add_argument("--scheme", nargs="+", default=["bf16", "fp8-compute"], choices=SCHEMES)
    parser.add_argument("--offloaded", type=float, nargs="+", default=[0.5, 1.0], help="shares of each card's blocks")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--strategy", default="none", choices=("none", "pipeline"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    options.devices = list(CARDS[:2]) if options.tiny else available_devices()[: options.cards]
    if not options.devices:
        parser.error("found no GPU; use --tiny for emulated ones")
    if options.strategy != "none" and (len(options.devices) < 2 or options.accumulation < 2):
        parser.error(f"--strategy {options.strategy} needs two cards and --accumulation 2 or more")
    if options.full:
        options.blocks = (VARIANT.transformer_config["num_layers"], VARIANT.transformer_config["num_single_layers"])
    if options.tiny:
        options.side, options.rank, options.steps = 64, 4, 1
        weights_module.SMALLEST_BYTES = 1024
    return options


def main() -> None:
    options = parse()
    report: dict[str, Any] = {
        "model": "toy" if options.tiny else "FLUX.2-dev width, {} double + {} single blocks".format(*options.blocks),
        "devices": [str(device) for device in options.devices],
        "side": options.side,
        "accumulation": options.accumulation,
        "schedule": options.strategy,
        "is_compiled": options.compile,
        **describe_run(*PACKAGES),
        "schemes": {},
    }
    with emulation(is_on=options.tiny):
        for scheme in options.scheme:
            reason = "" if scheme == "bf16" else refusal(QuantizeSettings(scheme), options.devices)
            say(f"{scheme}: {reason or 'building'}")
            report["schemes"][scheme] = {"left_out": reason} if reason else run_scheme(options, scheme)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            write_json(report, options.out)
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
