"""The dry run of one block: forwards and backwards on meta, as training calls it, and the bytes that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..parallel.offload.block_call import BlockCall, module_of
from ..parallel.offload.recompute import HandOut
from ..parallel.offload.weights import host_bytes_of
from ..patches.hooks import tensors_of
from ..quantization.wrapped import plain_parts
from .meter import MemoryMeter


@dataclass(frozen=True)
class BlockCost:
    """Bytes of one block; activations are those of one micro-batch.

    Args:
        weights: base weights and buffers. lora: trained weights. num_trained: values in them.
        inputs: what the block before made for it; kept for its recomputation. outputs: what it makes.
        constants: what it reads besides, by a name that is the same for the same tensor.
        kept: what its backward needs beyond inputs, if it is not recomputed.
        forward, forward_kept: peak of a forward that keeps nothing, or everything; above its inputs.
        recompute: peak of recomputation and backward, gradient of its output included; above its inputs.
        backward: peak of the backward alone, `kept` included; above its inputs.
        staying: the share of weights that is on the card even where the block streams from host memory.
        input_sizes: what `inputs` is the sum of.
    """

    weights: int
    lora: int
    num_trained: int
    inputs: int
    constants: Mapping[int, int]
    outputs: int
    kept: int
    forward: int
    forward_kept: int
    recompute: int
    backward: int
    input_sizes: tuple[int, ...] = ()
    staying: int = 0

    @property
    def streaming(self) -> int:
        """What rests in host memory where the block streams from there, and passes through a slot."""
        return self.weights - self.staying


@dataclass(frozen=True)
class ModuleSizes:
    """Bytes of base weights and buffers, and of LoRA; values that are trained."""

    weights: int
    lora: int
    num_trained: int


def sizes_of(module: nn.Module) -> ModuleSizes:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    lora = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    held = sum(part.numel() * part.element_size() for part in plain_tensors(module))
    return ModuleSizes(held - lora, lora, sum(parameter.numel() for parameter in trained))


def plain_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers; for those made of others, their parts."""
    return [part for tensor in (*module.parameters(), *module.buffers()) for part in plain_parts(tensor)]


def dry_run_block(
    meter: MemoryMeter,
    block: nn.Module | BlockCall,
    args: Any,
    constants: Mapping[int, int],
    streams: list[torch.Tensor],
) -> BlockCost:
    """What a block holds when it is called with these arguments; constants as in BlockCost, streams are its inputs."""
    input_sizes = tuple(map(meter.size, streams))
    args = tree_map_only(torch.Tensor, _without_history, args)
    base = meter.start()
    with torch.no_grad():
        outputs = block(*args)
    forward, size = meter.peak - base, meter.live - base
    grads = [torch.empty_like(tensor) for tensor in tensors_of(outputs)]
    del outputs
    gradient = meter.live - base
    meter.start()
    seed = HandOut.apply(grads, *tensors_of(block(*args)))
    top = meter.peak - base
    kept = meter.live - base - gradient
    meter.start()
    seed.backward()
    backward = meter.peak - base
    _forget_gradients(block, args)
    held = _peak_with_gradients_held(meter, block, args) - base
    _forget_gradients(block, args)
    own = sizes_of(module_of(block))
    return BlockCost(
        weights=own.weights,
        lora=own.lora,
        num_trained=own.num_trained,
        inputs=sum(input_sizes),
        constants=constants,
        outputs=size,
        kept=kept,
        forward=forward,
        forward_kept=top - gradient,
        recompute=max(top, held),
        backward=backward,
        input_sizes=input_sizes,
        staying=own.weights - host_bytes_of(module_of(block)),
    )


def _peak_with_gradients_held(meter: MemoryMeter, block: nn.Module | BlockCall, args: Any) -> int:
    """Of the backward; parallel/offload/recompute.py was handed the gradients of the outputs and holds them."""
    outputs = tensors_of(block(*args))
    grads = [torch.empty_like(tensor) for tensor in outputs]
    seed = HandOut.apply(list(grads), *outputs)
    del outputs
    meter.start()
    seed.backward()
    return meter.peak


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """For a backward of its own; LoRA on what makes the modulation gives that a history that all blocks share."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _forget_gradients(block: nn.Module | BlockCall, args: Any) -> None:
    for tensor in (*tensors_of(args), *block.parameters()):
        tensor.grad = None
