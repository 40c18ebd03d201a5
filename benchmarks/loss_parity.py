"""Whether a LoRA learns as well on 8-bit weights: evaluation loss after the same training on every scheme and on bf16.

    python benchmarks/loss_parity.py [--out results.json] [--steps 200]

One GPU, under four minutes. The base is a FLUX.2 of 0.7 billion parameters (16 heads of 128 as published, 2 double and
8 single blocks) that was trained for a while on a few kinds of pictures and has outlier channels, see trained_base.py;
the report says how far the inputs of its linears stand out. A LoRA then learns another kind from 32 pictures by the
pack's own loop, and is judged on 8 others at fixed timesteps with fixed noise. All runs share base, data, order and
noise; the LoRA starts alike. The gap of a scheme is its loss above bf16's; the bar is one percent.

Two runs on bf16 say what a gap means: one whose LoRA starts elsewhere, which is what chance alone does, and one whose
weights were rounded to 2 bits, which must be seen.

--tiny is the same at toy size on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import runpy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.parallel.devices import available_devices, release_cached_memory  # noqa: E402
from devicebridge.quantization.quantize import (  # noqa: E402
    QuantizeSettings,
    refusal,
)
from devicebridge.training.batches import CachedSamples  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import (  # noqa: E402
    SCHEMES,
    TINY_CONFIG,
    attach_lora,
    make_config,
    make_random_job,
    make_random_model,
    make_trainer,
    plan_devices,
    run_steps,
)
from torch import nn  # noqa: E402
from trained_base import LORA_KIND, Size, cut_samples, fill_from, fill_rounded, make_base, make_pictures  # noqa: E402

BAR_PERCENT = 1.0
COARSE_BITS = 2
SAME, OTHER_LORA, COARSE = "bf16", "bf16, another LoRA seed", f"bf16, weights rounded to {COARSE_BITS} bits"
RUNS = (SAME, OTHER_LORA, *SCHEMES[1:], COARSE)


# Of 128 channels the base would need thousands of steps to learn what noise is.
FULL_CONFIG = make_config((2, 8), num_attention_heads=16, joint_attention_dim=512, in_channels=16)
FULL = Size(FULL_CONFIG, 16, 16, 64, 32, 8, 4, 64)
TINY = Size(TINY_CONFIG, 4, 4, 8, 8, 2, 2, 4)


@dataclass(frozen=True)
class Training:
    """How base and LoRA are trained; base_steps train all weights."""

    steps: int
    learning_rate: float
    base_steps: int
    base_learning_rate: float
    lora_dtype: str = "float32"


# ---- runs


def compare(
    size: Size,
    device: torch.device,
    training: Training,
    runs: Sequence[str] = RUNS,
    *,
    budget_s: float = math.inf,
    on_run: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Make a base and train a LoRA on it in each of these runs, one after the other.

    Args:
        budget_s: no run is begun when the process is older.
        on_run: gets the report so far after each.
    Returns: "runs" with the losses of each, "gaps" of each to bf16, "left_out", "base_s".
    """
    start = time.perf_counter()
    weights = make_base(size, device, training.base_steps, training.base_learning_rate)
    report: dict[str, Any] = {"gaps": {}, "runs": {}, "left_out": []}
    report["base_s"] = round(time.perf_counter() - start, 1)
    pictures = make_pictures(size, size.num_train + size.num_eval, [LORA_KIND])
    data = cut_samples(pictures, 0, size.num_train), cut_samples(pictures, size.num_train, len(pictures.samples))
    for name in runs:
        if elapsed_s() > budget_s:
            report["left_out"].append(name)
            continue
        found = train(size, device, training, name, weights, *data)
        report["runs"][name] = found
        report["gaps"] = gaps(report["runs"])
        say(f"{name}: {found['eval_before']:.5f} -> {found['eval_after']:.5f} in {found['seconds']} s")
        on_run(report)
    return report


def train(
    size: Size,
    device: torch.device,
    training: Training,
    name: str,
    weights: Mapping[str, torch.Tensor],
    train_data: CachedSamples,
    eval_data: CachedSamples,
) -> dict[str, Any]:
    """One run on a fresh model -> evaluation loss before and after, training losses."""
    start = time.perf_counter()
    job = make_random_job(
        lora={"rank": size.rank, "alpha": size.rank, "dtype": training.lora_dtype},
        train={"steps": training.steps, "batch_size": size.batch_size, "gradient_checkpointing": False},
        optimizer={"learning_rate": training.learning_rate},
        schedule={"name": "cosine", "warmup_steps": training.steps // 20},
    )
    fill = fill_rounded(weights, COARSE_BITS) if name == COARSE else fill_from(weights)
    scheme = name.partition(",")[0]
    built = make_random_model(size.config, plan_devices(size.config, [device]), scheme, fill=fill)
    lora = attach_lora(built, job, seed=1 if name == OTHER_LORA else 0)
    trainer = make_trainer(built, lora, job, train_data, eval_data)
    with crest_factors(built.model, lora.targets) as crests:
        before = trainer.evaluate()
    losses = run_steps(trainer)
    found = {"eval_before": before, "eval_after": trainer.evaluate(), **describe_losses(losses)}
    if scheme == "bf16":
        found["amax_over_rms_of_inputs"] = crests
        found["parameters"] = sum(p.numel() for n, p in built.model.named_parameters() if "lora_" not in n)
    del built, trainer, lora
    gc.collect()
    release_cached_memory()
    return found | {"seconds": round(time.perf_counter() - start, 1)}


def describe_losses(losses: Sequence[float]) -> dict[str, Any]:
    tenth = max(1, len(losses) // 10)
    ends = [round(math.fsum(part) / tenth, 5) for part in (losses[:tenth], losses[-tenth:])]
    return {"train_loss_first_and_last_tenth": ends, "losses": [round(loss, 5) for loss in losses]}


@contextlib.contextmanager
def crest_factors(model: nn.Module, linears: Sequence[str]) -> Iterator[dict[str, float]]:
    """Afterwards: largest value over rms of the rows that enter these linears, median, per layer class."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)

    def note(name: str, rows: torch.Tensor) -> None:
        rows = rows.detach().float().flatten(0, -2)
        alike = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        seen[alike].append((rows.abs().amax(1) / rows.square().mean(1).sqrt()).median())

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
        for name in linears
    ]
    found: dict[str, float] = {}
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found |= {name: round(float(torch.stack(values).median()), 1) for name, values in seen.items()}


def gaps(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Percent above bf16's evaluation loss, and how much of what bf16's LoRA gained was gained."""
    if SAME not in runs:
        return {}
    reference = runs[SAME]
    gain = reference["eval_before"] - reference["eval_after"]
    return {
        name: {
            "gap_percent": round(100 * (found["eval_after"] / reference["eval_after"] - 1), 3),
            "gap_before_training_percent": round(100 * (found["eval_before"] / reference["eval_before"] - 1), 3),
            "gain_kept_percent": round(100 * (reference["eval_before"] - found["eval_after"]) / gain, 2),
        }
        for name, found in runs.items()
        if name != SAME
    }


# ---- setting


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--base-steps", type=int, default=300, help="steps in which the base learns all its weights")
    parser.add_argument("--base-learning-rate", type=float, default=4e-4)
    parser.add_argument("--lora", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--budget-s", type=float, default=200.0, help="no run is begun after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="toy size on the CPU")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    options = parse()
    device = next(iter(available_devices()), torch.device("cpu")) if not options.tiny else torch.device("cpu")
    refused = {s: refusal(QuantizeSettings(s), [device]) for s in SCHEMES[1:]}  # type: ignore[arg-type]
    size = TINY if options.tiny else FULL
    training = Training(
        options.steps, options.learning_rate, options.base_steps, options.base_learning_rate, options.lora
    )
    setup = {
        "model": f"FLUX.2, {size.config}",
        "device": str(device),
        "training": asdict(training),
        "batch": size.batch_size,
        "rank": size.rank,
        "samples": [size.num_train, size.num_eval],
        "bar_percent": BAR_PERCENT,
        "refused": {scheme: reason for scheme, reason in refused.items() if reason},
        **describe_run("diffusers", "peft", "torchao", "triton"),
    }
    report = compare(
        size,
        device,
        training,
        [name for name in options.runs if not refused.get(name)],
        budget_s=options.budget_s,
        on_run=lambda report: write_json({**report, "setup": setup}, options.out),
    )
    print_or_write({**report, "setup": setup, "elapsed_s": round(elapsed_s(), 1)}, options.out)
    print_table(report)


def print_table(report: dict[str, Any]) -> None:
    for name, found in report["runs"].items():
        gap = report["gaps"].get(name, {})
        print(f"{name:32} {found['eval_before']:.5f} -> {found['eval_after']:.5f}  {gap}")
    outside = [n for n, g in report["gaps"].items() if n in SCHEMES and abs(g["gap_percent"]) > BAR_PERCENT]
    print(
        f"outside the bar of {BAR_PERCENT} %: {', '.join(outside) or 'none'}; left out: {report['left_out'] or 'none'}"
    )


if __name__ == "__main__":
    main()
