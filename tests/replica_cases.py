"""Copies of a tiny model on several devices, and micro-batches for them; on emulated cards and on real ones."""

from collections.abc import Sequence
from typing import Any

import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.local.data_parallel import Replica, copy_model
from devicebridge.parallel.placement import Placement, block_names
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.tiny_split import random_lora
from devicebridge.tests.toy import TINY


def make_replica(
    model: Any, name: str, card: torch.device, *, dropout: float = 0.0, kept: int = 0, checkpointing: bool = True,
    seed: int = 1,
) -> Replica:  # fmt: skip
    family = FAMILIES[name]
    placement = Placement(names := block_names(model, family), (card,) * len(names), card)
    split = apply_block_split(model, family, placement)
    lora = random_lora(model, family, seed, dropout=dropout)
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
        apply_quantization(model, FAMILIES[name], QuantizeSettings(scheme))  # type: ignore[arg-type]
    model = model.to(cards[0])
    models = [model, *(copy_model(model, card) for card in cards[1:])]
    return [make_replica(each, name, card, **settings) for each, card in zip(models, cards, strict=True)]
