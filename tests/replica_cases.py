"""Copies of a tiny model on several devices, and micro-batches for them; on emulated cards and on real ones."""

from collections.abc import Sequence
from typing import Any

import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from devicebridge.parallel.local.data_parallel import Replica, copy_model
from devicebridge.parallel.placement import Placement, block_names
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from torch import nn


def quantized(model: nn.Module, family: ModelFamily, scheme: Any) -> nn.Module:
    """The model with its linears rounded."""
    apply_quantization(model, family, QuantizeSettings(scheme))
    return model


def make_replica(
    model: Any, name: str, card: torch.device, *, dropout: float = 0.0, kept: int = 0, checkpointing: bool = True,
    seed: int = 1,
) -> Replica:  # fmt: skip
    family = FAMILIES[name]
    placement = Placement(names := block_names(model, family), (card,) * len(names), card)
    split = apply_block_split(model, family, placement)
    lora = apply_lora(model, family, LoraSettings(rank=2, alpha=3, dropout=dropout), seed=seed)
    with torch.no_grad():
        for parameter in lora.parameters().values():
            generator = torch.Generator().manual_seed(parameter.numel() + seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1))
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing(split.checkpoint)
        split.keep_activations([kept])
    return Replica(model, card, tuple(lora.parameters().values()))


def make_replicas(
    name: str, cards: Sequence[torch.device], scheme: str | None = None, **settings: Any
) -> list[Replica]:
    model = TINY[name].make_model(seed=0)
    if scheme is not None:
        model = quantized(model, FAMILIES[name], scheme)
    model = model.to(cards[0])
    models = [model, *(copy_model(model, card) for card in cards[1:])]
    return [make_replica(each, name, card, **settings) for each, card in zip(models, cards, strict=True)]
