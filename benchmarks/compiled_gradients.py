"""How far gradients of compiled blocks are from those of uncompiled ones, and both from bf16's, on one card.

    python benchmarks/compiled_gradients.py [--out results.json] [--scheme bf16 int8-compute fp8-compute] [--tiny]

FLUX.2-dev at full size with random weights and a fresh LoRA of rank 32, 512 pixels, 512 text tokens, one micro-batch
as it trains. A difference is |one - other| / |other| of a LoRA tensor's gradient; the largest is shown, how many
tensors point elsewhere, and whether the pack would take the gradients for wrong (training/gradient_check.py).
"uncompiled twice" is what one card differs by from itself. --tiny runs the same at toy size on the CPU, with backend
"aot_eager".
"""

from __future__ import annotations

import argparse
import gc
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.parallel.devices import CPU, available_devices, release_cached_memory  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile  # noqa: E402
from devicebridge.training.gradient_check import Gradients, compare_gradients  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import SCHEMES, VARIANT, plan_devices  # noqa: E402
from train_step import SUBJECTS, make_contestant, make_tiny  # noqa: E402

SUBJECT = "flux2-512"


def measure(options: argparse.Namespace, scheme: str, of_bf16: Gradients | None) -> tuple[dict[str, Any], Gradients]:
    """One scheme -> its comparisons, and its uncompiled gradients."""
    subject, config = SUBJECTS[SUBJECT], dict(VARIANT.transformer_config)
    if options.tiny:
        subject, config = make_tiny(subject)
    each = make_contestant(options, subject, config, plan_devices(config, options.devices), scheme, usual=False)
    names = list(each.trainer.lora.parameters())
    plain, again = each.trainer.gradients_of(), each.trainer.gradients_of()
    handle = apply_compile(each.built.model, each.built.family, **({"backend": "aot_eager"} if options.tiny else {}))
    compiled = each.trainer.gradients_of()
    handle.remove()
    torch._dynamo.reset()
    pairs = {"uncompiled twice": (again, plain), "compiled against uncompiled": (compiled, plain)}
    if of_bf16 is not None:
        pairs |= {"uncompiled against bf16": (plain, of_bf16), "compiled against bf16": (compiled, of_bf16)}
    comparisons = {name: compare_gradients(names, *pair) for name, pair in pairs.items()}
    return {name: asdict(each) for name, each in comparisons.items() if each is not None}, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["bf16", "int8-compute", "fp8-compute"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = [CPU] if options.tiny else available_devices()[:1]
    if not options.devices:
        parser.error("this needs a GPU; --tiny runs on the CPU")
    report: dict[str, Any] = {"differences": {}, **describe_run("diffusers", "peft", "torchao", "triton")}
    of_bf16: Gradients | None = None
    for scheme in options.scheme:
        found, plain = measure(options, scheme, of_bf16)
        of_bf16 = plain if scheme == "bf16" else of_bf16
        report["differences"][scheme] = found
        for name, values in found.items():
            say(f"{scheme}, {name}: {values}")
        write_json(report, options.out)
        gc.collect()
        release_cached_memory()
    print_or_write({**report, "elapsed_s": round(elapsed_s(), 1)}, options.out)


if __name__ == "__main__":
    main()
