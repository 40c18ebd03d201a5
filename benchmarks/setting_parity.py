"""Whether every setting the planner can choose learns as well: evaluation loss after the same training, over two GPUs.

    python benchmarks/setting_parity.py [--out results.json] [--steps 100] [--tiny]

The base is the one of loss_parity.py (a FLUX.2 of 0.7 billion parameters that has learnt something and has outliers,
trained_base.py); a LoRA learns another kind of pictures by the pack's own loop, four micro-batches of two a step, and
is judged on held-out pictures at fixed timesteps with fixed noise. The reference holds bf16 weights on one GPU, one
micro-batch at a time, every block recomputed. All runs share base, data, order, noise and the LoRA's start. The gap of
a setting is its loss over the reference's; the bar is 0.1 % where weights stay in bf16 and the optimizer is the same,
1 % elsewhere. A run whose LoRA starts elsewhere says what chance alone does; one with a tenth of the learning rate must
be outside the bar, else the comparison could not fail.

--tiny is the same at toy size on emulated cards, without what needs a compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import runpy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.config.job import JobConfig  # noqa: E402
from devicebridge.events import first_line  # noqa: E402
from devicebridge.parallel.devices import release_cached_memory  # noqa: E402
from devicebridge.parallel.local.data_parallel import DataParallel, Replica  # noqa: E402
from devicebridge.parallel.local.pipeline import Pipeline  # noqa: E402
from devicebridge.parallel.placement import place_offloaded  # noqa: E402
from devicebridge.parallel.runner import Runner  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings, refusal  # noqa: E402
from devicebridge.tests.placed import apply_weight_offload, place  # noqa: E402
from devicebridge.training.batches import CachedSamples  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from eight_bit_training import emulation  # noqa: E402
from loss_parity import FULL, TINY  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import (  # noqa: E402
    FAMILY,
    RandomModel,
    attach_lora,
    demand_right_gradients,
    make_random_job,
    make_random_model,
    make_trainer,
    plan_devices,
    run_steps,
    take_devices,
)
from trained_base import LORA_KIND, Size, cut_samples, fill_from, make_base, make_pictures  # noqa: E402

NUM_BATCHES = 4
BAR_PERCENT, SAME_WEIGHTS_BAR_PERCENT = 1.0, 0.1


@dataclass(frozen=True)
class Way:
    """One setting.

    Args:
        num_cards: that hold the blocks.
        kind: schedule of the pipeline, None for one micro-batch at a time. ahead: see plan_order.
        kept_share, swapped_share: of each card's blocks, how many keep their activations, or stream from host memory.
        offloads: whether block inputs wait in host memory.
        rate: times the learning rate. lora_seed: where the LoRA starts.
    """

    name: str
    scheme: str = "bf16"
    num_cards: int = 2
    kind: Literal["1f1b", "replicas"] | None = None
    ahead: int = 0
    kept_share: float = 0.0
    swapped_share: float = 0.0
    offloads: bool = False
    compiled: bool = False
    optimizer: str = "adamw"
    rate: float = 1.0
    lora_seed: int = 0

    @property
    def bar_percent(self) -> float:
        return SAME_WEIGHTS_BAR_PERCENT if (self.scheme, self.optimizer) == ("bf16", "adamw") else BAR_PERCENT


REFERENCE = Way("reference: bf16, one card", num_cards=1)
CHANCE, MUST_DIFFER = Way("another LoRA seed", num_cards=1, lora_seed=1), Way("a tenth of the rate", rate=0.1)
WAYS = (
    REFERENCE,
    Way("bf16, split"),
    Way("bf16, 1f1b", kind="1f1b"),
    Way("bf16, 1f1b, 1 ahead, half kept", kind="1f1b", ahead=1, kept_share=0.5),
    Way("bf16, 1f1b, all kept", kind="1f1b", kept_share=1.0),
    Way("bf16, 1f1b, compiled", kind="1f1b", ahead=1, compiled=True),
    Way("bf16, 1f1b, half streamed", kind="1f1b", swapped_share=0.5),
    Way("bf16, 1f1b, inputs offloaded", kind="1f1b", offloads=True),
    Way("bf16, replicas", kind="replicas"),
    Way("bf16, 1f1b, adamw8bit", kind="1f1b", optimizer="adamw8bit"),
    Way("fp8, 1f1b", "fp8", kind="1f1b"),
    Way("int8, 1f1b", "int8", kind="1f1b"),
    Way("fp8-compute, 1f1b", "fp8-compute", kind="1f1b", ahead=1, kept_share=0.5),
    Way("int8-compute, 1f1b", "int8-compute", kind="1f1b", ahead=1, kept_share=0.5),
    Way("fp8-compute, 1f1b, half streamed", "fp8-compute", kind="1f1b", swapped_share=0.5, offloads=True),
    Way("int8-compute, replicas", "int8-compute", kind="replicas"),
    Way("fp8-compute, 1f1b, compiled, adamw8bit", "fp8-compute", kind="1f1b", compiled=True, optimizer="adamw8bit"),
    CHANCE,
    MUST_DIFFER,
)
CONTROLS = (CHANCE.name, MUST_DIFFER.name)


def train(
    options: argparse.Namespace,
    size: Size,
    way: Way,
    weights: Mapping[str, torch.Tensor],
    train_data: CachedSamples,
    eval_data: CachedSamples,
) -> dict[str, Any]:
    """One run on a fresh model -> evaluation loss before and after, training losses."""
    start = time.perf_counter()
    devices = options.devices[: way.num_cards]
    job = make_random_job(
        lora={"rank": size.rank, "alpha": size.rank, "dtype": "float32"},
        train={
            "steps": options.steps,
            "batch_size": max(1, size.batch_size // NUM_BATCHES),
            "gradient_accumulation_steps": NUM_BATCHES,
        },
        optimizer={"learning_rate": options.learning_rate * way.rate, "name": way.optimizer},
        schedule={"name": "cosine", "warmup_steps": options.steps // 20},
    )
    built, trainer = make_run(options, size, way, job, weights, devices, train_data, eval_data)
    with contextlib.ExitStack() as stack:
        if way.swapped_share:
            placed = built.split.placement
            counts = [int(way.swapped_share * placed.num_blocks_on(device)) for device in built.devices]
            stack.callback(place, built.model, placed)
            stack.callback(apply_weight_offload(built.split, list(place_offloaded(placed, (), counts))).remove)
        if way.offloads:
            built.split.offload_inputs(min_bytes=1)
            stack.callback(built.split.stop_offload)
        if way.compiled:
            trainer.compiled = (apply_compile(built.model, built.family),)
            stack.callback(trainer.compiled[0].remove)
            demand_right_gradients(trainer)
        before = trainer.evaluate()
        losses = run_steps(trainer)
        after = trainer.evaluate()
    del built, trainer
    gc.collect()
    release_cached_memory()
    return {
        "eval_before": before,
        "eval_after": after,
        "losses": [round(loss, 5) for loss in losses],
        "seconds": round(time.perf_counter() - start, 1),
    }


def make_run(
    options: argparse.Namespace,
    size: Size,
    way: Way,
    job: JobConfig,
    weights: Mapping[str, torch.Tensor],
    devices: Sequence[torch.device],
    train_data: CachedSamples,
    eval_data: CachedSamples,
) -> tuple[RandomModel, Trainer]:
    """A fresh model on the way's cards, or one on each of them, and its loop."""
    is_copied = way.kind == "replicas"
    placement = plan_devices(size.config, devices[:1] if is_copied else devices)
    placement = replace(placement, tail=() if way.kind is None or is_copied else tuple(FAMILY.tail))
    placements = [placement.on(device) for device in devices] if is_copied else [placement]
    models = [make_random_model(size.config, each, way.scheme, fill=fill_from(weights)) for each in placements]
    loras = [attach_lora(each, job, seed=way.lora_seed) for each in models]
    for each in models:
        counts = [each.split.placement.num_blocks_on(device) for device in each.devices]
        each.split.keep_activations([round(way.kept_share * count) for count in counts])
    runner: Runner | None = None
    if is_copied:
        runner = DataParallel(
            [
                Replica(each.model, each.devices[0], tuple(lora.parameters().values()))
                for each, lora in zip(models, loras, strict=True)
            ]
        )
    elif way.kind is not None:
        runner = Pipeline(models[0].model, models[0].split.bridge, ahead=way.ahead)
    return models[0], make_trainer(models[0], loras[0], job, train_data, eval_data, runner=runner)


def gap_percent(runs: Mapping[str, dict[str, Any]], name: str) -> float:
    """Evaluation loss after training above the reference's."""
    return round(100 * (runs[name]["eval_after"] / runs[REFERENCE.name]["eval_after"] - 1), 4)


def verdicts(runs: Mapping[str, dict[str, Any]], ways: Sequence[Way]) -> dict[str, dict[str, Any]]:
    """Gap and bar of each setting; controls have no bar."""
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        if way.name in runs and "eval_after" in runs[way.name] and REFERENCE.name in runs:
            gap = gap_percent(runs, way.name)
            found[way.name] = {"gap_percent": gap}
            if way.name not in CONTROLS:
                found[way.name] |= {"bar_percent": way.bar_percent, "within": abs(gap) <= way.bar_percent}
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [way.name for way in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--base-steps", type=int, default=300, help="steps in which the base learns all its weights")
    parser.add_argument("--base-learning-rate", type=float, default=4e-4)
    parser.add_argument("--budget-s", type=float, default=300.0, help="no run is begun after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="toy size on emulated cards")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = take_devices(parser, 2, is_tiny=options.tiny)
    return options


def _reason_against(options: argparse.Namespace, way: Way) -> str:
    if options.tiny and way.compiled:
        return "emulated cards cannot compile"
    if way.scheme == "bf16" or options.tiny:
        return ""
    return refusal(QuantizeSettings(way.scheme), options.devices) or ""  # type: ignore[arg-type]


def main() -> None:
    options = parse()
    size = TINY if options.tiny else FULL
    report: dict[str, Any] = {"gaps": {}, "runs": {}, "left_out": {}}
    report["setup"] = {
        "model": f"FLUX.2, {size.config}",
        "steps": options.steps,
        "micro_batches": NUM_BATCHES,
        "learning_rate": options.learning_rate,
        "ways": {way.name: asdict(way) for way in WAYS},
        **describe_run("diffusers", "peft", "torchao", "triton"),
    }
    base_device = torch.device("cpu") if options.tiny else options.devices[0]
    weights = make_base(size, base_device, options.base_steps, options.base_learning_rate)
    pictures = make_pictures(size, size.num_train + size.num_eval, [LORA_KIND])
    data = cut_samples(pictures, 0, size.num_train), cut_samples(pictures, size.num_train, len(pictures.samples))
    ways = [way for way in WAYS if way.name in options.ways or way == REFERENCE]
    with emulation(is_on=options.tiny):
        for way in ways:
            reason = _reason_against(options, way)
            if reason or elapsed_s() > options.budget_s:
                report["left_out"][way.name] = reason or "no time left"
                continue
            try:
                found = report["runs"][way.name] = train(options, size, way, weights, *data)
            except RuntimeError as error:  # one setting that fails is a result, too
                report["runs"][way.name] = {"error": first_line(error)}
                say(f"{way.name}: {error}")
                continue
            report["gaps"] = verdicts(report["runs"], ways)
            gap = report["gaps"].get(way.name)
            say(f"{way.name}: {found['eval_before']:.5f} -> {found['eval_after']:.5f} in {found['seconds']} s, {gap}")
            write_json(report, options.out)
    print_or_write({**report, "elapsed_s": round(elapsed_s(), 1)}, options.out)
    outside = [name for name, gap in report["gaps"].items() if gap.get("within") is False]
    print(f"outside their bars: {', '.join(outside) or 'none'}; left out: {', '.join(report['left_out']) or 'none'}")


if __name__ == "__main__":
    main()
