"""What the bridge costs: LoRA training steps of full-size FLUX.2 on one GPU and split over two, interleaved in one run.

    python benchmarks/bridge_cost.py [--out results.json]

Random weights; no checkpoint is needed. Both models live in memory at once (two GPUs of 140 GB, or fewer --layers) and
take turns step by step, so that clocks and neighbours affect both alike. First, at full width and few layers, the split
must give bitwise the output, loss and LoRA gradients of one GPU. Prints the ratio first, then JSON
unless --out takes it.
"""

from __future__ import annotations

import argparse
import gc
import os
import runpy
import statistics
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the deterministic part; read when CUDA starts

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.config.job import LoraSettings  # noqa: E402
from devicebridge.patches.attention import sound_attention  # noqa: E402
from devicebridge.training.adapter import apply_lora  # noqa: E402
from provenance import describe_run, print_or_write  # noqa: E402
from random_job import (  # noqa: E402
    FAMILY,
    VARIANT,
    fill_normal,
    make_config,
    make_device_generator,
    make_random_model,
    plan_devices,
)

ONE, TWO = [torch.device("cuda:0")], [torch.device("cuda:0"), torch.device("cuda:1")]


def make_model(layers: tuple[int, int], devices: list[torch.device], rank: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """A FLUX.2 transformer with random bf16 weights and a LoRA over these devices -> (model, split, parameters)."""
    config = make_config(layers)
    built = make_random_model(config, plan_devices(config, devices), "bf16", seed=seed)
    lora = apply_lora(built.model, FAMILY, LoraSettings(rank=rank, alpha=rank, dtype="bfloat16"), seed=seed)
    for name, parameter in lora.parameters().items():  # B starts at zero, which would hide a wrong gradient of A
        fill_normal(name, parameter.data, make_device_generator(parameter.device, seed + parameter.numel()))
    built.model.train()
    built.model.enable_gradient_checkpointing(built.split.checkpoint)
    return built.model, built.split, list(lora.parameters().values())


def make_batch(side: int, device: torch.device, seed: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of one 16 * side pixels square sample and its target."""
    g = torch.Generator().manual_seed(seed)
    latents = torch.randn(1, 128, 1, side, side, generator=g).to(device, torch.bfloat16)
    states = torch.randn(1, 512, 15360, generator=g).to(device, torch.bfloat16)
    sigma = torch.rand(1, generator=g).to(device)
    inputs = FAMILY.make_inputs(latents, sigma, {VARIANT.text_encoders[0].output: states}, 1.0)
    return inputs, torch.randn(1, 128, 1, side, side, generator=g).to(device)


def loss_of(model: Any, batch: tuple[dict[str, Any], torch.Tensor]) -> torch.Tensor:
    inputs, target = batch
    prediction = FAMILY.read_prediction(model(**inputs, return_dict=False)[0], target)
    return (prediction.float() - target).square().mean()


def check_equal(rank: int) -> dict[str, Any]:
    """Output, loss and every LoRA gradient at full width, one GPU against two: bitwise.

    The fastest attention backward adds up in no fixed order, so one GPU does not repeat its own gradients; torch's
    deterministic algorithms are asked for here. The comparison of one GPU with itself shows that they are needed.
    """
    free = [_one_and_two(rank, devices)[2] for devices in (ONE, ONE)]
    torch.use_deterministic_algorithms(True)
    one, two = _one_and_two(rank, ONE), _one_and_two(rank, TWO)
    torch.use_deterministic_algorithms(False)
    return {
        "loss_equal": one[0] == two[0],
        "output_bitwise_equal": torch.equal(one[1], two[1]),
        "gradients_bitwise_equal": _count_equal(one[2], two[2]),
        "gradients_of_one_gpu_repeated_without_deterministic_algorithms": _count_equal(*free),
        "gradient_norm": float(sum(g.float().square().sum() for g in one[2]) ** 0.5),
    }


def _count_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> str:
    return f"{sum(torch.equal(x, y) for x, y in zip(a, b, strict=True))} of {len(a)}"


def _one_and_two(rank: int, devices: list[torch.device]) -> tuple[float, torch.Tensor, list[torch.Tensor]]:
    """Loss, output and LoRA gradients of a model of full width and few layers on these devices."""
    model, _, parameters = make_model((2, 4), devices, rank)
    batch = make_batch(32, devices[0], 7)
    loss_of(model, batch).backward()  # the first call of a process may pick other matrix kernels: warm up
    for parameter in parameters:
        parameter.grad = None
    loss = loss_of(model, batch)
    loss.backward()
    with torch.no_grad():
        output = model(**batch[0], return_dict=False)[0]
    return loss.item(), output.cpu(), [parameter.grad.cpu() for parameter in parameters]


def measure(layers: tuple[int, int], side: int, rank: int, rounds: int) -> dict[str, Any]:
    """Seconds per training step, one GPU and split in turns, and GB per card of each."""
    runs = {}
    for name, devices in (("one_gpu", ONE), ("split", TWO)):
        gc.collect()
        torch.cuda.empty_cache()
        before = [torch.cuda.memory_allocated(i) for i in range(2)]
        model, split, parameters = make_model(layers, devices, rank)
        weights = [(torch.cuda.memory_allocated(i) - before[i]) / 1e9 for i in range(2)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-5)
        runs[name] = {"model": model, "optimizer": optimizer, "weights_gb": weights, "times": [], "peak_gb": None}
        runs[name]["placement"] = split.placement.describe()
    for round_index in range(rounds + 1):
        for run in runs.values():
            _step(run, side, round_index, is_warm_up=round_index == 0)
    medians = {name: statistics.median(run["times"]) for name, run in runs.items()}
    report: dict[str, Any] = {"split_over_one_gpu": medians["split"] / medians["one_gpu"]}
    for name, run in runs.items():
        report[name] = {
            "s_per_step_median": medians[name],
            "s_per_step_min_max": [min(run["times"]), max(run["times"])],
            "weights_gb": run["weights_gb"],
            "step_peak_above_resident_gb": run["peak_gb"],
            "placement": run["placement"],
            "last_loss": run["loss"],
        }
    return report


def _step(run: dict[str, Any], side: int, seed: int, *, is_warm_up: bool) -> None:
    batch = make_batch(side, torch.device("cuda:0"), seed)
    for index in range(2):
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
    resident = [torch.cuda.memory_allocated(index) for index in range(2)]
    start = time.perf_counter()
    loss = loss_of(run["model"], batch)
    loss.backward()
    run["optimizer"].step()
    run["optimizer"].zero_grad(set_to_none=True)
    for index in range(2):
        torch.cuda.synchronize(index)
    if not is_warm_up:
        run["times"].append(time.perf_counter() - start)
    run["peak_gb"] = [(torch.cuda.max_memory_allocated(i) - resident[i]) / 1e9 for i in range(2)]
    run["loss"] = loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=(8, 48), help="double and single blocks")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with sound_attention():
        report = {"equality_full_width_2_double_4_single": check_equal(options.rank)}
        report["training_step"] = measure(tuple(options.layers), options.resolution // 16, options.rank, options.rounds)
    report["setup"] = {
        "model": "FLUX.2-dev shape, {} double + {} single blocks, random bf16 weights".format(*options.layers),
        "resolution": options.resolution,
        "batch": 1,
        "rank": options.rank,
        **describe_run("diffusers", "peft"),
    }
    print(f"split / one GPU: {report['training_step']['split_over_one_gpu']:.4f}")
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
