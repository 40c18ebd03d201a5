"""How well the planner forecasts: FLUX.2 at full width on real cards, forecast against torch's counters, card by card.

    python benchmarks/forecast_accuracy.py [--out results.json] [--blocks 2 6] [--side 512 1024] [--cap-gb 24 12]
    python benchmarks/forecast_accuracy.py --full --scheme fp8-compute --cap-gb 24 24    # all 8 + 48 blocks

Random weights, batch 1, LoRA rank 32 in float32, AdamW, 512 text tokens. Every case is a model of its own: built layer
by layer on its cards as a job does (peak counters start before), then three optimizer steps by the pack's own loop.
What is recomputed: "on" every block, "partly" half of each card's blocks, "off" none, "planned" what the planner
chooses for the cards. max_memory_allocated is compared with `allocated`, max_memory_reserved with `reserved`. --cap-gb
limits what this process may reserve on each card, so that "planned" plans for such cards, with blocks that stream from
host memory if need be, and would run out of memory where it is wrong. --offload lets the inputs of recomputed blocks
wait in host memory; with --strategy pipeline micro-batches (--accumulation) overlap.

--tiny runs the same code with toy shapes on two emulated cards on the CPU, counting live storages, where forecasts have
no allowance for allocators and no fused attention. Results are written after each case.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import runpy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from card_limit import limited  # noqa: E402
from devicebridge.parallel.devices import available_devices, reset_peaks, synchronize  # noqa: E402
from devicebridge.parallel.local.pipeline import Pipeline  # noqa: E402
from devicebridge.parallel.offload.weights import WeightOffload  # noqa: E402
from devicebridge.parallel.placement import place_offloaded  # noqa: E402
from devicebridge.planning import question as question_module  # noqa: E402
from devicebridge.planning.dry_run import Kernels  # noqa: E402
from devicebridge.planning.memory import Backend  # noqa: E402
from devicebridge.planning.plan import TrainingPlan, plan_training  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings, refusal  # noqa: E402
from devicebridge.tests.emulated import CARDS, EmulatedTensor, live_bytes  # noqa: E402
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

NUM_STEPS = 3  # from the second on there is optimizer state
MODES = ("on", "partly", "off", "planned")
PACKAGES = ("diffusers", "peft", "torchao", "triton")


def run_case(options: argparse.Namespace, scheme: str, side: int, mode: str) -> dict[str, Any]:
    """Plan, build, train and compare one case."""
    config = TINY_CONFIG if options.tiny else make_config(options.blocks)
    job = make_job(options, scheme, side, mode)
    try:
        plan = make_plan(options, config, job, side, mode)
    except ValueError as error:
        return {"refused": str(error)}
    if options.strategy != "none":  # the last card has the tail then
        plan = replace(plan, placement=replace(plan.placement, tail=tuple(FAMILY.tail)))
    chosen = replace(job.optimizer, name=plan.setting.optimizer)
    measured = train(options, config, replace(job, optimizer=chosen), plan, side)
    devices = {each.device: compare(each, measured[each.device]) for each in plan.devices}
    return {"placement": plan.placement.describe(), "kept_blocks": list(plan.uncheckpointed)} | {
        "swapped_blocks": list(plan.offloaded),
        "host_gb": round(plan.host_bytes / 1e9, 2),
        "devices": devices,
    }


def make_job(options: argparse.Namespace, scheme: str, side: int, mode: str) -> Any:
    return make_random_job(
        model={"quantize": "none" if scheme == "bf16" else scheme, "dtype": "bfloat16"},
        data={"resolutions": [side]},
        lora={"rank": options.rank, "alpha": float(options.rank), "dtype": "float32"},
        train={
            "steps": NUM_STEPS,
            "gradient_accumulation_steps": options.accumulation,
            "gradient_checkpointing": mode != "off",
            "offload_activations": "on" if options.offload and mode != "off" else "off",
        },
        parallel={"strategy": options.strategy},
        split=limits_of(options, mode),
    )


def limits_of(options: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Nothing streams and everything fits, unless the planner is to choose; or so many blocks of each card stream."""
    count = len(options.devices)
    if mode == "planned":
        return {}
    return {"memory_limit_gb": [1000.0] * count, "offloaded_blocks": options.offloaded or [0] * count}


def make_plan(options: argparse.Namespace, config: Any, job: Any, side: int, mode: str) -> TrainingPlan:
    """The planner's; for "on" and "partly" with the kept blocks fixed and no regard to what fits."""
    info = make_info(config, is_tiny=options.tiny)
    cards = find_cards(options.devices, is_tiny=options.tiny)
    if mode in ("on", "partly"):
        job = replace(job, split=replace(job.split, blocks_without_checkpointing=(0,) * len(cards)))
        plan = plan_training(make_question(job, info, cards, side))
        if mode == "on":
            return plan
        half = tuple(device.num_blocks // 2 for device in plan.devices)
        bounds = [sum(device.num_blocks for device in plan.devices[: i + 1]) for i in range(len(cards) - 1)]
        job = replace(job, split=replace(job.split, blocks_without_checkpointing=half))
        return plan_training(make_question(job, info, cards, side, bounds))
    return plan_training(make_question(job, info, cards, side))


def train(
    options: argparse.Namespace, config: Any, job: Any, plan: TrainingPlan, side: int
) -> dict[str, dict[str, int]]:
    """Build and train on the plan's cards -> bytes at peak by device, {"allocated", "reserved"}."""
    release()
    reset_peaks(options.devices)
    with watched(options) as peaks:
        scheme = "bf16" if plan.setting.scheme == "none" else plan.setting.scheme
        places = place_offloaded(plan.placement, plan.uncheckpointed, plan.offloaded)
        offload = WeightOffload(places) if places else None
        built = make_random_model(config, plan.placement, scheme, offload=offload)
        plain = replace(job.train, gradient_checkpointing=False, offload_activations="off")
        lora = attach_lora(built, replace(job, train=plain))
        if job.train.gradient_checkpointing:
            built.split.keep_activations(plan.uncheckpointed)
            built.model.enable_gradient_checkpointing(built.split.checkpoint)
        if plan.setting.offloads:
            built.split.offload_inputs(min_bytes=question_module.MIN_BYTES)
        if offload is not None:
            offload.attach()
        trainer = make_trainer(built, lora, job, make_picture_samples(config, side, is_tiny=options.tiny))
        if plan.setting.strategy == "pipeline":
            trainer.runner = Pipeline(built.model, built.split.bridge, ahead=plan.setting.ahead)
        for _ in range(NUM_STEPS):
            trainer.train_step(job.optimizer.learning_rate)
            trainer.step += 1
        synchronize(options.devices)
        found = {str(device): peak_of(device, peaks) for device in options.devices}
        built.split.stop_offload()
        if offload is not None:
            offload.remove()
    del trainer, lora, built, offload
    release()
    return found


def peak_of(device: torch.device, peaks: dict[torch.device, int]) -> dict[str, int]:
    if device.type != "cuda":
        return {"allocated": peaks[device], "reserved": peaks[device]}
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


@contextlib.contextmanager
def watched(options: argparse.Namespace) -> Iterator[dict[torch.device, int]]:
    """Peaks of emulated cards, looked for whenever a tensor of some size is made; on real cards nothing is done."""
    peaks = dict.fromkeys(options.devices, 0)
    if not options.tiny:
        yield peaks
        return
    ordinary = EmulatedTensor.__init__

    def made(tensor: EmulatedTensor, data: torch.Tensor, device: torch.device) -> None:
        if data.untyped_storage().nbytes() >= 2**14:
            for card in peaks:
                peaks[card] = max(peaks[card], live_bytes(card))

    EmulatedTensor.__init__ = made  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        EmulatedTensor.__init__ = ordinary  # type: ignore[method-assign]


def compare(forecast: Any, measured: dict[str, int]) -> dict[str, Any]:
    """GB, and by how many percent the forecast is above what was measured."""
    return {
        "blocks": forecast.num_blocks,
        "kept": forecast.num_uncheckpointed,
        "peak_at": forecast.moment,
        "weights_gb": round(forecast.weights / 1e9, 3),
        "forecast_gb": round(forecast.allocated / 1e9, 3),
        "measured_gb": round(measured["allocated"] / 1e9, 3),
        "percent_above": round(100 * (forecast.allocated / measured["allocated"] - 1), 2),
        "forecast_reserved_gb": round(forecast.reserved / 1e9, 3),
        "measured_reserved_gb": round(measured["reserved"] / 1e9, 3),
        "percent_above_reserved": round(100 * (forecast.reserved / measured["reserved"] - 1), 2),
    }


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def machine(options: argparse.Namespace) -> Iterator[None]:
    """Real cards, limited if asked; or emulated ones, and a planner that knows what those do not have."""
    if not options.tiny:
        with contextlib.ExitStack() as limits:
            for device, cap in zip(options.devices, options.cap_gb, strict=bool(options.cap_gb)):
                limits.enter_context(limited(device, cap * 1e9))
            yield
        return
    question_module.Kernels = lambda eight_bit: Kernels(eight_bit, has_fused=False, rounding=1)  # type: ignore[misc,assignment]
    question_module.MIN_BYTES = 2**12
    question_module.Backend = lambda **given: Backend(0, 0.0, 0)  # type: ignore[misc,assignment]
    with emulation(is_on=True):
        yield


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, nargs=2, default=(2, 6), help="double and single blocks")
    parser.add_argument("--full", action="store_true", help="all blocks")
    parser.add_argument("--side", type=int, nargs="+", default=[512, 1024], help="pixels")
    parser.add_argument("--scheme", nargs="+", default=["bf16", "fp8", "fp8-compute", "int8-compute"], choices=SCHEMES)
    parser.add_argument("--checkpointing", nargs="+", default=["on", "partly", "off"], choices=MODES)
    parser.add_argument("--cap-gb", type=float, nargs="+", default=[], help="decimal GB to use of each card")
    parser.add_argument("--cards", type=int, default=0, help="how many GPUs; 0 for up to two, or one per --cap-gb")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument(
        "--offloaded", type=int, nargs="+", default=[], help="blocks of each card that stream, if not planned"
    )
    parser.add_argument("--strategy", choices=["none", "pipeline"], default="none")
    parser.add_argument("--offload", action="store_true", help="block inputs wait in host memory")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    count = options.cards or len(options.cap_gb) or 2
    options.devices = list(CARDS[:2]) if options.tiny else available_devices()[:count]
    if not options.devices or (options.cap_gb and len(options.cap_gb) != len(options.devices)):
        parser.error(f"found {len(options.devices)} GPUs for {count} cards; use --tiny for emulated ones")
    if options.full:
        options.blocks = (VARIANT.transformer_config["num_layers"], VARIANT.transformer_config["num_single_layers"])
    if options.tiny:
        options.side, options.rank = [128], 4
    elif any(mode == "off" for mode in options.checkpointing) and options.full:
        say("all activations of all blocks: this needs about 70 GB beside the weights at 1024 pixels")
    return options


def main() -> None:
    options = parse()
    report: dict[str, Any] = {
        "model": "toy" if options.tiny else "FLUX.2-dev width, {} double + {} single blocks".format(*options.blocks),
        "devices": [str(device) for device in options.devices],
        "cap_gb": options.cap_gb,
        "rank": options.rank,
        "accumulation": options.accumulation,
        "steps": NUM_STEPS,
        **describe_run(*PACKAGES),
        "cases": {},
    }
    with machine(options):
        for scheme in options.scheme:
            reason = "" if scheme == "bf16" else refusal(QuantizeSettings(scheme), options.devices)
            if reason:
                report["cases"][scheme] = {"left_out": reason}
                continue
            for side in options.side:
                for mode in options.checkpointing:
                    name = f"{scheme}, {side} px, checkpointing {mode}"
                    report["cases"][name] = found = run_case(options, scheme, side, mode)
                    say(f"{name}: {summary(found)}")
                    write_json(report, options.out)
    print_or_write(report, options.out)


def summary(found: dict[str, Any]) -> str:
    if "refused" in found:
        return "refused: " + found["refused"].splitlines()[0]
    return ", ".join(
        f"{name} {each['forecast_gb']} GB forecast, {each['measured_gb']} measured ({each['percent_above']:+.1f} %)"
        for name, each in found["devices"].items()
    )


if __name__ == "__main__":
    main()
