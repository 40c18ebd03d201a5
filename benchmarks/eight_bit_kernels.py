"""What 8-bit compute gives per linear: forward, grad_input and rounding, every scheme against bf16 in the same run.

    python benchmarks/eight_bit_kernels.py [--out results.json] [--rows 64 512 1536 4608 16384] [--budget-s 200]

The linears of FLUX.2 (a single block's fused projections, qkv, attention output) and of Wan 14B at full size, with
random weights; no checkpoint is needed. Every cell times all candidates in turns, call by call, each after the caches
were swept, so that clocks and neighbours affect all alike; medians are reported. Before that each candidate's output is
compared with float32 on the same card. Prints ratios first, then JSON unless --out takes it. One GPU, under four
minutes on an H200, much of it compiling and tuning Triton kernels. Cells that the budget leaves no time for are named
and left out.
"""

from __future__ import annotations

import argparse
import json
import math
import runpy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.quantization import eight_bit_kernels as kernels  # noqa: E402
from devicebridge.quantization.eight_bit import grad_input8, linear8, quantize_rows  # noqa: E402
from devicebridge.quantization.frozen_linear import ROUNDED, FrozenLinear8  # noqa: E402
from devicebridge.quantization.kernel_choice import (  # noqa: E402
    KernelChoice,
    choose_kernels,
    using_kernels,
)
from provenance import describe_run, print_or_write  # noqa: E402
from torch import nn  # noqa: E402

DEVICE = torch.device("cuda:0")
# name -> (in_features, out_features)
SHAPES = {
    "flux2 to_qkv_mlp_proj": (6144, 55296),
    "flux2 to_out": (24576, 6144),
    "flux2 qkv": (6144, 18432),
    "flux2 attention out": (6144, 6144),
    "wan attention": (5120, 5120),
    "wan ffn in": (5120, 13824),
    "wan ffn out": (13824, 5120),
}
FLUX2_SINGLE_BLOCK = ("flux2 to_qkv_mlp_proj", "flux2 to_out")
CHECKED_ROWS = 1536
SCHEME_OPTIONS = {
    "fp8-compute": ("fp8-compute", 0),
    "int8-compute": ("int8-compute", 0),
    "int8-compute rotated": ("int8-compute", 64),
}
COMPUTE = {scheme: dtype for scheme, dtype in ROUNDED.items() if scheme.endswith("-compute")}
Candidates = dict[str, Callable[[], Any]]


def make_layers(num_in: int, num_out: int) -> dict[str, nn.Module]:
    """The same random weights as bf16, torchao's weight-only float8, and ours."""
    torch.manual_seed(num_in + num_out)
    plain = nn.Linear(num_in, num_out, bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    plain.weight.normal_(0, 0.02)
    layers: dict[str, nn.Module] = {"bf16": plain, "fp8 weight-only": _weight_only(plain)}
    for name, (scheme, rotation) in SCHEME_OPTIONS.items():
        layers[name] = FrozenLinear8.from_linear(plain, scheme, rotation=rotation)
    return layers


def _weight_only(plain: nn.Linear) -> nn.Module:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    holder = nn.Sequential(nn.Linear(plain.in_features, plain.out_features, bias=False, device="meta"))
    holder[0].weight = nn.Parameter(plain.weight.clone(), requires_grad=False)
    quantize_(holder, Float8WeightOnlyConfig(set_inductor_config=False))
    return holder


def make_rows(rows: int, width: int, size: float, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16, generator=generator) * size


def choices(scheme: str) -> dict[str, KernelChoice]:
    """Every way this card could compute a scheme; "chosen" is what a layer does by itself."""
    chosen = choose_kernels(DEVICE, ROUNDED[scheme])  # type: ignore[index]
    ways = {"chosen": chosen}
    has_triton = not kernels.fault(DEVICE)
    if has_triton:
        ways["triton / triton"] = KernelChoice("triton", "triton", True)
        ways["vendor / transpose"] = KernelChoice("vendor", "transpose", True)
        if scheme == "fp8-compute":
            ways["unit / transpose"] = KernelChoice("unit", "transpose", True)
    ways["vendor / dequantize"] = KernelChoice("vendor", "dequantize", has_triton)
    return ways


def forward_candidates(layers: dict[str, nn.Module], x: torch.Tensor) -> Candidates:
    found: Candidates = {name: lambda layer=layer: layer(x) for name, layer in layers.items()}  # type: ignore[misc]
    for scheme in COMPUTE:
        layer: Any = layers[scheme]
        for way, choice in choices(scheme).items():
            if way != "chosen" and choice.grad_input != "dequantize":
                found[f"{scheme}, {choice.forward}"] = _chosen(choice, linear8, x, layer, None)
    found |= _float8_sums(layers["fp8-compute"], x)
    return found


def _chosen(
    choice: KernelChoice, compute: Callable[..., Any], rows: torch.Tensor, layer: Any, *bias: None
) -> Callable[[], Any]:
    """linear8 or grad_input8 with these kernels, unrotated."""
    of = {layer.weight.dtype: choice}

    def run() -> Any:
        with using_kernels(of):
            return compute(rows, layer.weight, layer.scale, *bias, None)

    return run


def _float8_sums(layer: Any, x: torch.Tensor) -> Candidates:
    """The vendor's float8 product with its two ways to add up; rounding x is left out."""
    a, a_scale = _quantize(x, torch.float8_e4m3fn)

    def multiply(is_fast: bool) -> torch.Tensor:
        return torch._scaled_mm(
            a,
            layer.weight.t(),
            scale_a=a_scale,
            scale_b=layer.scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=is_fast,
        )

    return {f"_scaled_mm alone, use_fast_accum={flag}": lambda flag=flag: multiply(flag) for flag in (True, False)}  # type: ignore[misc]


def grad_candidates(layers: dict[str, nn.Module], x: torch.Tensor, grad: torch.Tensor) -> Candidates:
    x = x.detach().requires_grad_(True)
    found: Candidates = {}
    for name, layer in layers.items():
        out = layer(x)
        found[name] = lambda out=out: torch.autograd.grad(out, x, grad, retain_graph=True)[0]  # type: ignore[misc]
    for scheme in COMPUTE:
        layer8: Any = layers[scheme]
        for way, choice in choices(scheme).items():
            if way != "chosen" and choice.forward != "unit":
                found[f"{scheme}, {choice.grad_input}"] = _chosen(choice, grad_input8, grad, layer8)
    return found


def rounding_candidates(layers: dict[str, nn.Module], x: torch.Tensor, grad: torch.Tensor) -> Candidates:
    """Rounding rows of x and of grad (the folded scale included); "copy" reads and writes as many rows in bf16."""
    rotated: Any = layers["int8-compute rotated"]
    scale = rotated.scale.view(-1)
    found: Candidates = {"x copy": x.clone, "grad copy": grad.clone}
    for name, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        found[f"x {name}"] = lambda dtype=dtype: _quantize(x, dtype)  # type: ignore[misc]
        found[f"grad {name}"] = lambda dtype=dtype: _quantize(grad, dtype, multiplier=scale)  # type: ignore[misc]
    found["x int8 rotated"] = lambda: _quantize(x, torch.int8, rotation=rotated.rotation)
    found["x int8, plain torch"] = lambda: quantize_rows(x, torch.int8)
    return found


def _quantize(x: torch.Tensor, dtype: torch.dtype, **first: Any) -> tuple[torch.Tensor, torch.Tensor]:
    quantize = quantize_rows if kernels.fault(DEVICE) else kernels.quantize_rows
    return quantize(x, dtype, **first)


class Clock:
    """Times candidates in turns; every call after a sweep that evicts the caches and lets the host run ahead."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.sweep = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)  # 0.25 ms of an H200's memory

    def time(self, candidates: Candidates) -> dict[str, float]:
        """Milliseconds per call, median, by name; the first call of each, which tunes, is not counted."""
        for call in candidates.values():
            call()
            call()
        spans: dict[str, list[Any]] = {name: [] for name in candidates}
        for _ in range(self.rounds):
            for name, call in candidates.items():
                self.sweep.zero_()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                call()
                end.record()
                spans[name].append((start, end))
        torch.cuda.synchronize()
        return {name: round(statistics.median(a.elapsed_time(b) for a, b in pairs), 4) for name, pairs in spans.items()}


def check(layers: dict[str, nn.Module], x: torch.Tensor, grad: torch.Tensor) -> dict[str, dict[str, float]]:
    """Signal to noise in dB against float32 products of the unrounded weights."""
    plain: Any = layers["bf16"]
    weight = plain.weight.float()
    with torch.no_grad():
        exact = x.float() @ weight.t()
        output = {name: decibels(exact, call()) for name, call in forward_candidates(layers, x).items()}
        exact = grad.float() @ weight
    found = {name: decibels(exact, call()) for name, call in grad_candidates(layers, x, grad).items()}
    return {"output_db": output, "grad_input_db": found}


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    noise = (found.float() - exact).square().sum(dtype=torch.float64)
    return round(10 * math.log10((exact.square().sum(dtype=torch.float64) / noise).item()), 2)


def measure(rows: list[int], rounds: int, budget_s: float) -> dict[str, Any]:
    """All shapes and row counts -> cells, noise per shape, and what was left out."""
    clock, start = Clock(rounds), time.perf_counter()
    cells: list[dict[str, Any]] = []
    noise: dict[str, Any] = {}
    left_out: list[str] = []
    for name, (num_in, num_out) in SHAPES.items():
        layers = make_layers(num_in, num_out)
        x, grad = make_rows(CHECKED_ROWS, num_in, 1.0, 1), make_rows(CHECKED_ROWS, num_out, 1e-3, 2)
        noise[name] = check(layers, x, grad)
        for num_rows in rows:
            if time.perf_counter() - start > budget_s:
                left_out.append(f"{name}, {num_rows} rows")
                continue
            x, grad = make_rows(num_rows, num_in, 1.0, 1), make_rows(num_rows, num_out, 1e-3, 2)
            with torch.no_grad():
                forward = clock.time(forward_candidates(layers, x))
                rounding = clock.time(rounding_candidates(layers, x, grad))
            cell = {"linear": name, "in": num_in, "out": num_out, "rows": num_rows, "forward_ms": forward}
            cell["grad_input_ms"] = clock.time(grad_candidates(layers, x, grad))
            cell["rounding_ms"] = rounding
            cells.append(cell)
    return {"cells": cells, "noise": noise, "left_out": left_out, "elapsed_s": round(time.perf_counter() - start, 1)}


def summarize(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """bf16's time over each scheme's, larger is faster; training is two forwards (checkpointing) and a backward."""
    ratios: dict[str, Any] = {}
    for cell in cells:
        per_way = {
            way: {name: round(cell[way]["bf16"] / ms, 3) for name, ms in cell[way].items() if name != "bf16"}
            for way in ("forward_ms", "grad_input_ms")
        }
        step = {name: 2 * ms + cell["grad_input_ms"][name] for name, ms in _schemes(cell["forward_ms"])}
        ratios[f"{cell['linear']}, {cell['rows']} rows"] = {
            "training": {name: round(step["bf16"] / ms, 3) for name, ms in step.items()},
            "forward": per_way["forward_ms"],
            "grad_input": per_way["grad_input_ms"],
        }
    return {"flux2_single_block_training": _single_block(cells), "per_linear": ratios}


def _schemes(times: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, times[name]) for name in ("bf16", "fp8 weight-only", *SCHEME_OPTIONS)]


def _single_block(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Both linears of a FLUX.2 single block together, two forwards and a backward, per row count."""
    found = {}
    for rows in sorted({cell["rows"] for cell in cells}):
        pair = [cell for cell in cells if cell["rows"] == rows and cell["linear"] in FLUX2_SINGLE_BLOCK]
        if len(pair) == len(FLUX2_SINGLE_BLOCK):
            total = {
                name: sum(2 * cell["forward_ms"][name] + cell["grad_input_ms"][name] for cell in pair)
                for name, _ in _schemes(pair[0]["forward_ms"])
            }
            found[f"{rows} rows"] = {name: round(total["bf16"] / ms, 3) for name, ms in total.items()}
    return found


def tuned_tiles() -> dict[str, str]:
    """What the tuner picked so far in this process, by row class, I, J and types."""
    cache = {} if kernels.fault(DEVICE) else kernels._tuned_matmul(DEVICE).cache
    return {f"{DEVICE} {key}": str(config) for key, config in cache.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 1536, 4608, 16384])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget-s", type=float, default=200.0, help="no new cell is begun after this many seconds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = measure(options.rows, options.rounds, options.budget_s)
    report = {"bf16_time_over_scheme": summarize(found["cells"]), **found}
    report["setup"] = {
        "plans": {scheme: str(choose_kernels(DEVICE, dtype)) for scheme, dtype in COMPUTE.items()},
        "triton_fault": kernels.fault(DEVICE),
        "tiles": tuned_tiles(),
        "rounds": options.rounds,
        **describe_run("triton", "torchao"),
    }
    print(json.dumps(report["bf16_time_over_scheme"]["flux2_single_block_training"], indent=2))
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
