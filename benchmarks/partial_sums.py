"""How far an output is off where several devices add partial sums in bfloat16, and where they would add float32.

    python benchmarks/partial_sums.py [--family flux2 wan] [--size tiny middle] [--devices 2 4] [--seeds 3] [--out FILE]

Random weights on the CPU, where the ranks share one device. All errors are relative, of the model's output:

- "one": bfloat16 on one device, against float32; what rounding costs anybody.
- "batch": the first sample of a batch of two against itself alone, both on one device; what other kernels change.
- "bf16", "fp32": divided, against one device in bfloat16. A row-parallel linear's outputs are rounded before they are
  added, or are float32 until they have been added.
- "bf16 against float32", "fp32 against float32": divided, against float32.

The float32 outputs of a bfloat16 linear are those of its operands in float32: bfloat16 products are exact there.
"""

from __future__ import annotations

import argparse
import copy
import functools
import runpy
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from devicebridge.tests.toy import TINY  # noqa: E402
from meeting_time import divide  # noqa: E402
from provenance import describe_run, print_or_write, say  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

_HEADS = {"attention_head_dim": 64, "num_attention_heads": 8}
SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"flux1": {}, "flux2": {}, "wan": {}},
    "middle": {
        "flux1": {**_HEADS, "num_layers": 4, "num_single_layers": 8, "axes_dims_rope": (16, 24, 24)},
        "flux2": {**_HEADS, "num_layers": 2, "num_single_layers": 12, "axes_dims_rope": (16, 16, 16, 16)},
        "wan": {**_HEADS, "num_layers": 12, "ffn_dim": 1536},
    },
}


class Float32Out(nn.Module):
    """A linear whose outputs are not rounded to the type of its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.linear.bias is None else self.linear.bias.float()
        return F.linear(x.float(), self.linear.weight.float(), bias)


def divided_output(
    name: str, model: nn.Module, inputs: Mapping[str, Any], num_devices: int, *, is_float32: bool
) -> torch.Tensor:
    divided = copy.deepcopy(model)
    parallel, _ = divide(name, divided, [torch.device("cpu")] * num_devices)
    parallel.remove()
    for own, others in parallel._shards.values():
        for shard in (own, *others):
            for meeting in shard.meetings if is_float32 else ():
                if meeting.how == "sum":
                    assert isinstance(meeting.module, nn.Linear), "no MLP is summed as a whole here"
                    dtype = meeting.module.weight.dtype
                    meeting.module.forward = Float32Out(copy.copy(meeting.module)).forward  # type: ignore[method-assign]
                    meeting.module.rounded = functools.partial(_rounded, dtype)  # type: ignore[assignment]
    parallel.attach()
    for own, others in parallel._shards.values():
        for shard in (own, *others):
            for meeting in shard.meetings:
                if hasattr(meeting.module, "rounded"):
                    meeting.module.register_forward_hook(meeting.module.rounded)  # behind the sum
    with torch.inference_mode(), parallel.forward():
        return divided(**inputs, return_dict=False)[0].float()


def _rounded(dtype: torch.dtype, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(dtype)


def output(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        return model(**inputs, return_dict=False)[0].float()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measure(name: str, size: str, device_counts: Sequence[int], seed: int) -> dict[str, float]:
    model = TINY[name].make_model(seed, **SIZES[size][name])
    half = copy.deepcopy(model).to(torch.bfloat16)
    exact = copy.deepcopy(half).float()  # the same weights
    two = map_tensors(TINY[name].make_inputs(seed, batch=2), _half)
    alone = {key: _first(value) for key, value in two.items()}
    reference = output(exact, map_tensors(alone, _single))
    one = output(half, alone)
    found = {"one": error(one, reference), "batch": error(output(half, two)[: len(one)], one)}
    for count in device_counts:
        for sums, is_float32 in (("bf16", False), ("fp32", True)):
            divided = divided_output(name, half, alone, count, is_float32=is_float32)
            found[f"{count}: {sums}"] = error(divided, one)
            found[f"{count}: {sums} against float32"] = error(divided, reference)
    return found


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _first(value: Any) -> Any:
    """Of a batch of two; what has no batch stays."""
    return value[:1] if isinstance(value, torch.Tensor) and value.ndim and len(value) == 2 else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=list(SIZES["tiny"]), choices=list(SIZES["tiny"]))
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"setup": describe_run()}
    for size in options.size:
        for name in options.family:
            runs = [measure(name, size, options.devices, seed) for seed in range(options.seeds)]
            medians = {key: float(f"{statistics.median(run[key] for run in runs):.3g}") for key in runs[0]}
            report[f"{name}, {size}"] = medians
            say(f"{name}, {size}: {medians}")
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
