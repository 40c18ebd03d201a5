"""What a layer of a CLIP text encoder keeps of a caption, where text encoders are trained: a dry run on meta."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from ..config.job import LoraSettings
from ..families.spec import ModelFamily
from ..training.adapter import apply_lora
from .dry_run_block import dry_run_block, plain_tensors
from .meter import Kernels, MemoryMeter, as_on_card

NUM_TOKENS = 77  # of every window of CLIP's
_HEAD_WIDTH = 64


class LayerSize(NamedTuple):
    """Of one layer: its width, that of its MLP, and whether that has OpenAI's quick GELU, as CLIP-L alone."""

    width: int
    inner: int
    is_quick: bool


class KeptOfText(NamedTuple):
    """Bytes from the forward to the backward: inputs of a layer, and what its backward needs beyond these."""

    inputs: int
    kept: int


def kept_of_window(size: LayerSize, lora: LoraSettings, family: ModelFamily) -> KeptOfText:
    """What a layer in float32 with its LoRA keeps of one window.

    Args:
        family: of the diffusion model that the encoders belong to.
    """
    own = replace(lora, rank=lora.text_rank, text_encoder=False, text_encoder_rank=0, layers="", targets=("*",))
    meter, kernels = MemoryMeter(), Kernels()
    with torch.inference_mode(False), torch.enable_grad():
        layer = _Layer(size)
        apply_lora(layer, family, own, seed=0)
        layer.train()
        meter.ignore(plain_tensors(layer))
        with as_on_card(kernels), meter:
            states = torch.empty(1, NUM_TOKENS, size.width, device="meta", requires_grad=True)
            cost = dry_run_block(meter, layer, (states,), {}, [states])
    return KeptOfText(cost.inputs, cost.kept)


class _Layer(nn.Module):
    """One of CLIP's, on meta."""

    def __init__(self, size: LayerSize) -> None:
        super().__init__()
        width, self.is_quick = size.width, size.is_quick
        self.num_heads = max(1, width // _HEAD_WIDTH)
        make = functools.partial(nn.Linear, device="meta")
        self.norm1, self.norm2 = (nn.LayerNorm(width, device="meta") for _ in range(2))
        self.q, self.k, self.v, self.out = (make(width, width) for _ in range(4))
        self.fc1, self.fc2 = make(width, size.inner), make(size.inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._attended(self.norm1(x))
        inner = self.fc1(self.norm2(x))
        inner = inner * torch.sigmoid(1.702 * inner) if self.is_quick else F.gelu(inner)
        return x + self.fc2(inner)

    def _attended(self, x: torch.Tensor) -> torch.Tensor:
        heads = (x.shape[0], x.shape[1], self.num_heads, -1)
        q, k, v = (each(x).view(heads).transpose(1, 2) for each in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))
