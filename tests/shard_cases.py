"""A tiny model divided among devices, ready to train; on emulated cards and on real ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from devicebridge.parallel.local import shards
from devicebridge.parallel.local.block_split import apply_block_split
from devicebridge.parallel.local.lora_slices import LoraSlices
from devicebridge.parallel.local.shard_trees import ShardTrees
from devicebridge.parallel.local.slices import Slice
from devicebridge.parallel.local.tensor_training import DividedModel, TensorTraining
from devicebridge.parallel.placement import Placement, block_names
from devicebridge.quantization.quantize import Quantizer, QuantizeSettings
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import LoraHandle, apply_lora
from torch import nn


def deal_out_layers(
    model: nn.Module,
    family: ModelFamily,
    cards: Sequence[torch.device],
    settings: QuantizeSettings | None = None,
    shares: Sequence[int] = (),
) -> tuple[nn.Module, ShardTrees]:
    """A whole model on the CPU dealt out as the loader does it -> what is left of the whole, and the trees."""
    names = block_names(model, family)

    def owner_of(name: str) -> torch.device:
        block = ".".join(name.split(".")[:2])
        return cards[names.index(block) % len(cards)] if block in names else cards[0]

    quantizer = None if settings is None else Quantizer(family, settings)
    empty = copy.deepcopy(model)
    for module in empty.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[leaf] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    trees = ShardTrees(family, cards, owner_of, shares)
    layers = [name for name, module in model.named_modules() if any(p is not None for p in module._parameters.values())]
    trees.begin(empty, layers)
    for layer in layers:
        module = empty.get_submodule(layer)
        for leaf, parameter in model.get_submodule(layer)._parameters.items():
            if parameter is not None:
                placed = parameter.detach().to(owner_of(layer), copy=True)
                module._parameters[leaf] = nn.Parameter(placed, requires_grad=False)
        if quantizer is not None:
            done = quantizer.finish(layer, module)
            if done is not module:
                empty.set_submodule(layer, done)
        trees.finish(layer)
    for name, buffer in list(empty.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        empty.get_submodule(owner)._buffers[leaf] = buffer.to(cards[0])
    if quantizer is not None:
        quantizer.close(empty)
    trees.close(next(model.parameters()).dtype)
    return empty, trees


def make_divided(
    name: str,
    cards: Sequence[torch.device],
    *,
    scheme: str | None = None,
    rotation: int = 64,
    checkpointing: bool = True,
    kept: int = 0,
    offload: bool = False,
    changes: Mapping[str, Any] | None = None,
    targets: tuple[str, ...] = (),
    shares: Sequence[int] = (),
) -> tuple[TensorTraining, LoraHandle]:
    """A family's tiny model, each block divided, with a LoRA that is not zero."""
    family = FAMILIES[name]
    model = TINY[name].make_model(seed=0, **(changes or {}))
    settings = None if scheme is None else QuantizeSettings(scheme, rotation)  # type: ignore[arg-type]
    whole, trees = deal_out_layers(model, family, cards, settings, shares)
    lora = LoraSettings(rank=2, alpha=3, targets=targets)
    handle = apply_lora(whole, family, lora, seed=1)
    fill(handle)
    own = []
    for tree, card in zip(trees.trees, cards, strict=True):
        split = apply_block_split(
            tree, family, Placement(names := block_names(tree, family), (card,) * len(names), card)
        )
        own.append(apply_lora(tree, family, lora, seed=1).parameters())
        tree.train()
        if checkpointing:
            tree.enable_gradient_checkpointing(split.checkpoint)  # type: ignore[operator]
            split.keep_activations([kept])
            if offload:
                split.offload_inputs(min_bytes=1)
    divided = DividedModel(trees.trees, cards, trees.shards)
    return TensorTraining(divided, LoraSlices(handle.parameters(), own, trees.slices)), handle


@contextlib.contextmanager
def cut_as_one(linear: str) -> Iterator[list[tuple[Slice, Slice]]]:
    """Inside, a packed linear is divided as if it were one part: each of two devices alike gets as many features as it
    should, but all in a row. Yields which slices were replaced, and by what."""
    cut, replaced = shards._cut, []

    def cut_in_a_row(shard: Any, module: nn.Module, name: str, part: Slice, make: shards.Cut) -> None:
        if name.rpartition(".")[0] == linear:
            length = sum(last - first for first, last in part.ranges)
            start = 0 if part.ranges[0][0] == 0 else length
            wrong = Slice(part.dim, ((start, start + length),))
            replaced.append((part, wrong))
            part = wrong
        cut(shard, module, name, part, make)

    with mock.patch.object(shards, "_cut", cut_in_a_row):
        yield replaced


def fill(handle: LoraHandle) -> None:
    """Values of a LoRA that is not zero, the same wherever it is."""
    for parameter in handle.parameters().values():
        generator = torch.Generator().manual_seed(parameter.numel())
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1))
