"""Whether a LoRA learns the same where several devices compute every block together: losses of 200 steps.

    python benchmarks/divided_loss.py [--steps 200] [--family flux2] [--out results.json]

A tiny model in bfloat16 with random weights, on the CPU, which stands for every rank; a LoRA in float32 learns the
velocities of a few samples by the pack's own runners and AdamW. All runs share model, data, order and noise. "one": one
device. "tensor, 2" and "tensor, 4": blocks divided among so many. What rounding elsewhere does: "one, float32". What
chance does: "one, another order", whose noise and order are others. Of each: the mean loss of the first and the last 20
steps, how far the curve is from that of "one" (the mean over the steps of the difference, relative to the mean loss),
and the loss at 40 fixed noises afterwards.
"""

from __future__ import annotations

import argparse
import math
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.config.job import LoraSettings  # noqa: E402
from devicebridge.families.registry import FAMILIES  # noqa: E402
from devicebridge.parallel.local.lora_slices import LoraSlices  # noqa: E402
from devicebridge.parallel.local.tensor_training import DividedModel, TensorTraining  # noqa: E402
from devicebridge.parallel.runner import MicroBatch, OneModel, PlainAccumulation  # noqa: E402
from devicebridge.tests.shard_cases import deal_out_layers  # noqa: E402
from devicebridge.tests.toy import TINY  # noqa: E402
from devicebridge.training.adapter import LoraHandle, apply_lora  # noqa: E402
from provenance import describe_run, print_or_write, say  # noqa: E402

CPU = torch.device("cpu")
LORA = LoraSettings(rank=4, alpha=4)
NUM_SAMPLES, LEARNING_RATE, FIXED = 4, 1e-3, 40
RUNS: Mapping[str, tuple[int, torch.dtype, int]] = {  # number of devices, type of the weights, seed of the order
    "one": (1, torch.bfloat16, 0),
    "tensor, 2": (2, torch.bfloat16, 0),
    "tensor, 4": (4, torch.bfloat16, 0),
    "one, float32": (1, torch.float32, 0),
    "one, another order": (1, torch.bfloat16, 1),
}


def make_runner(name: str, num_devices: int, dtype: torch.dtype) -> tuple[OneModel, LoraHandle, Any]:
    """Also what is called for a forward."""
    family = FAMILIES[name]
    model = TINY[name].make_model(0).to(torch.bfloat16).to(dtype).requires_grad_(False)  # the same weights for all
    if num_devices == 1:
        handle = apply_lora(model, family, LORA, seed=1)
        return PlainAccumulation(model, CPU), handle, model
    whole, trees = deal_out_layers(model, family, [CPU] * num_devices)
    handle = apply_lora(whole, family, LORA, seed=1)
    own = [apply_lora(tree, family, LORA, seed=1).parameters() for tree in trees.trees]
    divided = DividedModel(trees.trees, [CPU] * num_devices, trees.shards)
    return TensorTraining(divided, LoraSlices(handle.parameters(), own, trees.slices)), handle, divided


def loss_of(name: str, model: Any, index: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Of one sample at one noise."""
    family, tiny = FAMILIES[name], TINY[name]
    draw = torch.Generator().manual_seed(seed)
    latents, sigma = tiny.make_latents(index, 1), torch.rand(1, generator=draw)
    noise = torch.randn(latents.shape, generator=draw)
    mixed = torch.lerp(latents, noise, sigma.view(-1, *[1] * (latents.ndim - 1)))
    inputs = family.make_inputs(mixed, sigma, tiny.make_text(index, 1), tiny.guidance)
    cast = {key: value.to(dtype) if _is_real(value) else value for key, value in inputs.items()}
    found = family.read_prediction(model(**cast, return_dict=False)[0].float(), latents)
    return (found - (noise - latents)).square().mean()


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def train(name: str, steps: int, num_devices: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    runner, lora, model = make_runner(name, num_devices, dtype)
    optimizer = torch.optim.AdamW(lora.parameters().values(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        batch = MicroBatch(
            lambda: None,
            lambda _, step=step: loss_of(name, model, (step + seed) % NUM_SAMPLES, 10_000 * seed + step, dtype),
        )
        losses.append(float(runner.run([batch])[0]))
        optimizer.step()
        optimizer.zero_grad()
        runner.sync()
    with torch.no_grad():
        fixed = [float(loss_of(name, model, i % NUM_SAMPLES, 10**6 + i, dtype)) for i in range(FIXED)]
    return {
        "first_and_last_20": [math.fsum(part) / len(part) for part in (losses[:20], losses[-20:])],
        "fixed_after": math.fsum(fixed) / FIXED,
        "losses": losses,
    }


def curve_difference(found: Sequence[float], base: Sequence[float]) -> float:
    return math.fsum(abs(a - b) for a, b in zip(found, base, strict=True)) / math.fsum(base)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--family", default="flux2", choices=sorted(FAMILIES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"setup": describe_run("diffusers", "peft"), "family": options.family, "runs": {}}
    for name, run in RUNS.items():
        found = report["runs"][name] = train(options.family, options.steps, *run)
        found["curve_from_one"] = curve_difference(found["losses"], report["runs"]["one"]["losses"])
        say(f"{name}: { ({key: value for key, value in found.items() if key != 'losses'}) }")
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
