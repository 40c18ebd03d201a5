"""The one order in which strategies and patches meet a model. Each step says what breaks if it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from .families.spec import ModelFamily
from .loading.checkpoint import CheckpointInfo, load_transformer
from .parallel.block_split import BlockSplit, apply_block_split
from .parallel.placement import Placement
from .patches.fp8 import Fp8Quantizer

# Attaches an adapter in place; training passes its own, so that this room needs nothing below it.
AttachAdapter = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Assembled:
    """A model ready to train. split.remove() takes the bridge off; the blocks stay where the loader put them."""

    model: nn.Module
    split: BlockSplit
    adapter: object


def assemble_for_training(
    info: CheckpointInfo,
    family: ModelFamily,
    placement: Placement,
    *,
    dtype: torch.dtype,
    quantize: str,
    attach_adapter: AttachAdapter,
    gradient_checkpointing: bool,
) -> Assembled:
    """Load a transformer straight onto its devices and make it trainable.

    Args:
        quantize: "none" or "fp8".
        attach_adapter: adds the LoRA in place and returns its handle.
    """
    # 1. Every tensor goes from the file to its device; loading first and splitting later would need one device, or the
    #    host, to hold the whole model. A layer is quantized before the next is read, else the devices would have to
    #    hold the model in full precision first; and before LoRA exists, so that no LoRA weight can be caught by it.
    quantizer = Fp8Quantizer(family) if quantize == "fp8" else None
    model = load_transformer(info, placement.device_of, dtype, quantizer.finish if quantizer else None)
    if quantizer is not None:
        quantizer.close(model)
    # 2. The bridge comes before everything that may call the model or look at devices.
    split = apply_block_split(model, family, placement)
    # 3. LoRA goes onto the final base layers: PEFT picks its layer class, device and dtype from what it finds there.
    adapter = attach_adapter(model)
    # 4. Checkpointing wraps whole blocks, LoRA included, and needs the split to save the right random states.
    model.train()
    if gradient_checkpointing:
        model.enable_gradient_checkpointing(split.checkpoint)  # type: ignore[operator]
    return Assembled(model, split, adapter)
