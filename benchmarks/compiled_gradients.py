"""How far compiled blocks are from uncompiled ones, and how far the pack lets them be, on one card.

    python benchmarks/compiled_gradients.py [--out results.json] [--scheme bf16 int8-compute fp8-compute] [--tiny]

FLUX.2-dev at full depth and width with random weights and a LoRA of rank 32, 512 pixels, 512 text tokens: the
comparison that every run makes before its first step (training/compile_check.py), for a fresh LoRA and for one whose
second half is not zero. Of every block the tensor (output, gradient of an input or of the LoRA) that rounding explains
least:

- "excess" is its difference over what rounding explains; a run goes on uncompiled where one is above 1.
- "difference" is |compiled - uncompiled| / |uncompiled|.
- "seconds" is what the comparison took, compiling included; the second time it is not.

Largest excess first. --tiny runs the same at toy size on the CPU, with backend "aot_eager".
"""

from __future__ import annotations

import argparse
import gc
import runpy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.parallel.devices import CPU, available_devices, release_cached_memory  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile  # noqa: E402
from devicebridge.training.compile_check import (  # noqa: E402
    BlockDifference,
    check_compiled,
    worst_of,
)
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import SCHEMES, plan_devices  # noqa: E402
from train_step import SUBJECTS, Contestant, in_size, make_contestant  # noqa: E402


def measure(options: argparse.Namespace, scheme: str) -> dict[str, Any]:
    """One scheme -> its comparisons."""
    subject, config = in_size(SUBJECTS["flux2-512"], is_tiny=options.tiny)
    each = make_contestant(options, subject, config, plan_devices(config, options.devices), scheme, usual=False)
    backend = {"backend": "aot_eager"} if options.tiny else {}
    each.compiled = [apply_compile(each.built.model, each.built.family, **backend)]
    found = {"fresh": _compare(each)}
    _train_second_half(each)
    found["trained"] = _compare(each)
    each.compile(is_on=False, any_size=False)
    torch._dynamo.reset()
    return found


def _compare(each: Contestant) -> dict[str, Any]:
    start = time.perf_counter()
    each.trainer.compiled = tuple(each.compiled)
    found = check_compiled(each.trainer)
    return {**_described(found), "is_given_up": not each.trainer.compiled, "seconds": time.perf_counter() - start}


def _described(found: Sequence[BlockDifference]) -> dict[str, Any]:
    if not found:
        return {"num_compared": 0}
    excess, differences = [each.excess for each in found], [each.difference for each in found]
    return {
        "largest_excess": round(max(excess), 4),
        "median_excess": round(statistics.median(excess), 4),
        "largest_difference": round(max(differences), 4),
        "median_difference": round(statistics.median(differences), 4),
        "least_explained": str(worst_of(found)),
        "num_compared": len(found),
    }


@torch.no_grad()
def _train_second_half(each: Contestant) -> None:
    """Give every B of the LoRA values of a trained one's size."""
    for name, parameter in each.trainer.lora.parameters().items():
        if "lora_B" in name:
            parameter.normal_(0, 0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["bf16", "int8-compute", "fp8-compute"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = [CPU] if options.tiny else available_devices()[:1]
    if not options.devices:
        parser.error("this needs a GPU; --tiny runs on the CPU")
    report: dict[str, Any] = {"comparisons": {}, **describe_run("diffusers", "peft", "torchao", "triton")}
    for scheme in options.scheme:
        report["comparisons"][scheme] = measure(options, scheme)
        say(f"{scheme}: {report['comparisons'][scheme]}")
        write_json(report, options.out)
        gc.collect()
        release_cached_memory()
    print_or_write({**report, "elapsed_s": round(elapsed_s(), 1)}, options.out)


if __name__ == "__main__":
    main()
