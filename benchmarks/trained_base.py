"""A small FLUX.2 that has learnt something and has the outliers of trained models: a base worth rounding.

Random weights would not do: what they compute is of no use to a LoRA, so nothing would be lost by rounding them. Three
steps make a base in half a minute on one GPU:

1. Random weights of unit gain, modulation near the identity, the way out the transpose of the way in, and a few
   channels of the residual stream many times larger than the others, as in trained transformers.
2. Training of all weights by the pack's loop on a few kinds of pictures; a LoRA then learns another kind.
3. Outliers inside the blocks that change nothing but the numbers' sizes: some channels of what the second linear of a
   feed-forward and the attention's output read are multiplied, and the columns that read them divided.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from devicebridge.parallel.devices import release_cached_memory
from devicebridge.training.batches import CachedSamples
from provenance import say
from random_job import (
    Fill,
    make_device_generator,
    make_random_job,
    make_random_model,
    make_samples,
    make_trainer,
    plan_devices,
    run_steps,
)
from torch import nn

RESIDUAL_OUTLIER, INNER_OUTLIER = 20.0, 30.0  # how many times larger the channels are
ONE_OF = 512  # channels of which one is an outlier
NUM_PATTERNS = 8  # dimensions in which the pictures of one kind differ
BASE_KINDS, LORA_KIND = range(1, 5), 9


@dataclass(frozen=True)
class Size:
    """A model and its data. side: latent cells; pretrain_samples: of each kind the base is trained on."""

    config: dict[str, Any]
    rank: int
    side: int
    text_tokens: int
    num_train: int
    num_eval: int
    batch_size: int
    pretrain_samples: int


# ---- pictures


def make_pictures(size: Size, count: int, kinds: Sequence[int]) -> CachedSamples:
    """So many pictures of each kind: sums of a few smooth patterns, in amounts that the caption's states tell.

    A kind has patterns and words of its own.
    """
    pairs = [_make_kind(size, count, kind) for kind in kinds]
    return make_samples(torch.cat([latents for latents, _ in pairs]), torch.cat([text for _, text in pairs]))


def _make_kind(size: Size, count: int, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(kind)
    channels, width = size.config["in_channels"], size.config["joint_attention_dim"]
    coarse = torch.randn(NUM_PATTERNS, channels, 3, 3, generator=generator)
    patterns = nn.functional.interpolate(coarse, (size.side, size.side), mode="bicubic", align_corners=True)
    words = torch.randn(NUM_PATTERNS + 1, size.text_tokens, width, generator=generator)
    amounts = torch.randn(count, NUM_PATTERNS, generator=generator)
    latents = torch.einsum("nk,kchw->nchw", amounts, patterns / patterns.std()) / math.sqrt(NUM_PATTERNS)
    text = torch.einsum("nk,ksd->nsd", amounts, words[:-1]) / math.sqrt(NUM_PATTERNS) + words[-1]
    return latents.unsqueeze(2), text.bfloat16()


def cut_samples(samples: CachedSamples, start: int, end: int) -> CachedSamples:
    """A part of them."""
    return replace(samples, samples=samples.samples[start:end])


# ---- step 1


def fill_trainable(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Values that a training starts well from."""
    if tensor.ndim == 1:
        tensor.fill_(1.0)
    elif name in ("x_embedder.weight", "proj_out.weight"):
        _fill_passage(name, tensor)
    else:
        gain = 0.1 if "modulation" in name or "norm" in name else 1.0
        tensor.normal_(0, gain * tensor.shape[1] ** -0.5, generator=generator)
        if name == "context_embedder.weight":
            tensor[_outliers(tensor.shape[0])] *= RESIDUAL_OUTLIER


def _fill_passage(name: str, tensor: torch.Tensor) -> None:
    width, channels = max(tensor.shape), min(tensor.shape)
    way_in = torch.randn(width, channels, device=tensor.device, generator=make_device_generator(tensor.device, 2))
    way_in *= channels**-0.5
    rows = _outliers(width)
    if name.startswith("x_embedder"):
        way_in[rows] *= RESIDUAL_OUTLIER
        tensor.copy_(way_in)
    else:
        way_in[rows] /= RESIDUAL_OUTLIER
        tensor.copy_(way_in.t() * (channels / width))


def _outliers(count: int) -> torch.Tensor:
    """Which of so many channels stand out; always the same."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))[: math.ceil(count / ONE_OF)]


# ---- step 2


@dataclass(frozen=True)
class _AllParameters:
    """Takes the place of a LoRA where everything is trained."""

    model: nn.Module

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def make_base(size: Size, device: torch.device, steps: int, learning_rate: float) -> dict[str, torch.Tensor]:
    """Weights of a trained base in bf16, by name, on the device."""
    built = make_random_model(size.config, plan_devices(size.config, [device]), "bf16", fill=fill_trainable)
    model = built.model.float().requires_grad_(True)
    model.train()
    job = make_random_job(
        model={"dtype": "float32"},
        train={"steps": steps, "batch_size": 2 * size.batch_size},
        optimizer={"learning_rate": learning_rate},
        schedule={"name": "cosine", "warmup_steps": steps // 15},
    )
    pictures = make_pictures(size, size.pretrain_samples, BASE_KINDS)
    trainer = make_trainer(built, _AllParameters(model), job, pictures)  # type: ignore[arg-type]

    def report(number: int, loss: float) -> None:
        if number % max(1, steps // 8) == 0 or number == steps - 1:
            say(f"base, step {number + 1} of {steps}: loss {loss:.4f}")

    with _tensor_cores():
        run_steps(trainer, report)
    weights = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    del built, model, trainer
    gc.collect()
    release_cached_memory()
    add_inner_outliers(weights)
    return weights


@contextlib.contextmanager
def _tensor_cores() -> Iterator[None]:
    """Let float32 products use tf32 meanwhile."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def fill_from(weights: Mapping[str, torch.Tensor]) -> Fill:
    """Fills a model with these weights."""

    def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.copy_(weights[name])

    return fill


def fill_rounded(weights: Mapping[str, torch.Tensor], num_bits: int) -> Fill:
    """Fills a model with these weights, those of the blocks' linears rounded to few bits with one scale per row."""
    largest = 2 ** (num_bits - 1) - 1

    def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.copy_(weights[name])
        if tensor.ndim == 2 and "transformer_blocks" in name:
            scale = tensor.float().abs().amax(1, keepdim=True) / largest
            tensor.copy_((tensor.float() / scale).round() * scale)

    return fill


# ---- step 3


def add_inner_outliers(weights: Mapping[str, torch.Tensor]) -> None:
    """Multiply a few channels between two linears, and divide the columns that read them, in place.

    Values pass linearly through attention and through the second half of a SwiGLU, so the model computes the same up to
    the rounding of bf16.
    """
    width = weights["x_embedder.weight"].shape[0]
    for name in [name for name in weights if name.endswith(("linear_out.weight", "attn.to_out.weight"))]:
        reader = weights[name]
        writer = weights[name.replace("linear_out", "linear_in").replace("to_out", "to_qkv_mlp_proj")]
        hidden = (writer.shape[0] - (3 * width if "to_out" in name else 0)) // 2
        chosen = _outliers(hidden)
        writer[writer.shape[0] - hidden + chosen] *= INNER_OUTLIER
        reader[:, reader.shape[1] - hidden + chosen] /= INNER_OUTLIER
    values = _outliers(width)
    for name in [name for name in weights if name.endswith("attn.to_qkv_mlp_proj.weight")]:
        weights[name][2 * width + values] *= INNER_OUTLIER
        weights[name.replace("to_qkv_mlp_proj", "to_out")][:, values] /= INNER_OUTLIER
    for name in [name for name in weights if name.endswith("attn.to_v.weight")]:
        for writer_name, reader_name in (("to_v", "to_out.0"), ("add_v_proj", "to_add_out")):
            weights[name.replace("to_v", writer_name)][values] *= INNER_OUTLIER
            weights[name.replace("to_v", reader_name)][:, values] /= INNER_OUTLIER
