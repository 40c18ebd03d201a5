"""How far an output is off where several devices add partial sums in bfloat16, and where they would add float32.

    python benchmarks/partial_sums.py [--family flux2 wan] [--size tiny middle] [--devices 2 4] [--seeds 3] [--out FILE]
    python benchmarks/partial_sums.py --device cuda --family flux2 wan --size real --devices 2 --seeds 1 [--out FILE]

Random weights; the ranks share one device, for what they compute does not depend on where. Sizes "real" are the widths
and latents of the published models with a quarter of their blocks, so that float32 fits beside bfloat16 on one card.
All errors are relative, of the model's output, and of the latents after 8 Euler steps ("picture"):

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.families.registry import FAMILIES  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from devicebridge.tests.toy import TINY  # noqa: E402
from meeting_time import divide  # noqa: E402
from provenance import describe_run, print_or_write, say  # noqa: E402
from random_job import draw_model  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

_HEADS = {"attention_head_dim": 64, "num_attention_heads": 8}
PICTURE_STEPS = 8
REAL: Mapping[str, tuple[str, Mapping[str, Any], tuple[int, int, int, int]]] = {  # variant, its blocks, latents
    "flux2": ("flux2-dev", {"num_layers": 2, "num_single_layers": 12}, (128, 1, 64, 64)),
    "wan": ("wan2.1-t2v-14b", {"num_layers": 10}, (16, 9, 60, 104)),
}
SIZES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "tiny": {"flux1": {}, "flux2": {}, "wan": {}},
    "middle": {
        "flux1": {**_HEADS, "num_layers": 4, "num_single_layers": 8, "axes_dims_rope": (16, 24, 24)},
        "flux2": {**_HEADS, "num_layers": 2, "num_single_layers": 12, "axes_dims_rope": (16, 16, 16, 16)},
        "wan": {**_HEADS, "num_layers": 12, "ffn_dim": 1536},
    },
}


@dataclass(frozen=True)
class Subject:
    """A model in bfloat16 with what it is given.

    Args:
        noise: of two samples, [2, C, F, H, W]. text: of two samples, by name.
    """

    name: str
    model: nn.Module
    noise: torch.Tensor
    text: Mapping[str, torch.Tensor]
    guidance: float | None

    def inputs(self, noise: torch.Tensor, sigma: float) -> dict[str, Any]:
        """Of the forward, as many samples as there is noise; in the noise's type."""
        batch = len(noise)
        text = {name: each[:batch].to(noise.dtype) for name, each in self.text.items()}
        sigmas = torch.full((batch,), sigma, device=noise.device)
        made = FAMILIES[self.name].make_inputs(noise, sigmas, text, self.guidance)
        return map_tensors(made, lambda tensor: tensor.to(noise.dtype) if tensor.is_floating_point() else tensor)


def make_subject(name: str, size: str, device: torch.device, seed: int) -> Subject:
    tiny = TINY[name]
    if size != "real":
        model = tiny.make_model(seed, **SIZES[size][name]).to(device, torch.bfloat16)
        text = map_tensors(tiny.make_text(seed, batch=2), lambda tensor: tensor.to(device, torch.bfloat16))
        noise = tiny.make_latents(seed, batch=2).to(device, torch.bfloat16)
        return Subject(name, model, noise, text, tiny.guidance)
    variant, blocks, latents = REAL[name]
    config = {**FAMILIES[name].variant(variant).transformer_config, **blocks}
    model, _ = draw_model(config, lambda fqn: device, "bf16", seed=seed, family=FAMILIES[name])
    width = config["joint_attention_dim"] if name == "flux2" else config["text_dim"]
    generator = torch.Generator(device).manual_seed(seed)
    make = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    return Subject(name, model.eval(), make(2, *latents), {"prompt_embeds": make(2, 512, width)}, tiny.guidance)


class Float32Out(nn.Module):
    """A linear whose outputs are not rounded to the type of its weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if x.is_cuda:
            product = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
        else:
            product = F.linear(x.float(), weight.float())
        return product if bias is None else product + bias.float()


@contextmanager
def divided(subject: Subject, num_devices: int, *, is_float32: bool) -> Iterator[Callable[..., torch.Tensor]]:
    """A copy of the model, divided; its forward."""
    model = copy.deepcopy(subject.model)
    device = next(model.parameters()).device
    parallel, _ = divide(subject.name, model, [device] * num_devices)
    parallel.remove()
    met = [
        each.module
        for own, others in parallel._shards.values()
        for shard in (own, *others)
        for each in shard.collectives
        if each.how == "all_reduce" and is_float32
    ]
    for module in met:
        assert isinstance(module, nn.Linear), "no MLP is summed as a whole here"
        module.forward = Float32Out(copy.copy(module)).forward  # type: ignore[method-assign]
    parallel.attach()
    for module in met:
        module.register_forward_hook(functools.partial(_rounded, module.weight.dtype))  # behind the sum

    def forward(**inputs: Any) -> torch.Tensor:
        with parallel.forward():
            return model(**inputs, return_dict=False)[0]

    yield forward
    parallel.remove()


def _rounded(dtype: torch.dtype, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output.to(dtype)


def outputs(subject: Subject, forward: Callable[..., torch.Tensor], noise: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the first sample: the model's output, and the latents after some Euler steps from noise."""
    with torch.inference_mode():
        first = forward(**subject.inputs(noise, 1.0))[:1].float()
        latents = noise
        for step in range(PICTURE_STEPS):
            change = forward(**subject.inputs(latents, 1 - step / PICTURE_STEPS))
            change = change if change.shape == latents.shape else change.transpose(1, 2).reshape(latents.shape)
            latents = latents - change / PICTURE_STEPS
    return {"output": first, "picture": latents[:1].float()}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def measure(name: str, size: str, device: torch.device, device_counts: Sequence[int], seed: int) -> dict[str, float]:
    subject = make_subject(name, size, device, seed)
    exact = copy.deepcopy(subject.model).float()  # the same weights
    alone = subject.noise[:1]
    reference = outputs(subject, _plain(exact), alone.float())
    del exact
    one = outputs(subject, _plain(subject.model), alone)
    again = outputs(subject, _plain(subject.model), alone)
    two = outputs(subject, _plain(subject.model), subject.noise)
    found = _errors("one", one, reference) | _errors("again", again, one) | _errors("batch", two, one)
    for count in device_counts:
        for sums, is_float32 in (("bf16", False), ("fp32", True)):
            with divided(subject, count, is_float32=is_float32) as forward:
                made = outputs(subject, forward, alone)
            found |= _errors(f"{count}: {sums}", made, one)
            found |= _errors(f"{count}: {sums} against float32", made, reference)
    return found


def _plain(model: nn.Module) -> Callable[..., torch.Tensor]:
    def forward(**inputs: Any) -> torch.Tensor:
        return model(**inputs, return_dict=False)[0]

    return forward


def _errors(what: str, made: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {f"{what}, {each}": error(made[each], expected[each]) for each in made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=list(SIZES["tiny"]), choices=list(SIZES["tiny"]))
    parser.add_argument("--size", nargs="+", default=list(SIZES), choices=[*SIZES, "real"])
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"setup": describe_run()}
    for size in options.size:
        for name in options.family:
            runs = [measure(name, size, options.device, options.devices, seed) for seed in range(options.seeds)]
            medians = {key: float(f"{statistics.median(run[key] for run in runs):.3g}") for key in runs[0]}
            report[f"{name}, {size}"] = medians
            say(f"{name}, {size}: {medians}")
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
