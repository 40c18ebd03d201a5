"""What one training step keeps in memory, piece by piece, measured on tensors without data: no card, no weights.

One block of every kind runs forwards and backwards on meta, through the code that will train: diffusers' blocks, PEFT's
layers and our fused ones, quantized linears. The meter (meter.py) sees every operation and counts the bytes of the
storages that somebody still holds, views once. Embedders and tail run once around them. Blocks of one kind cost alike,
so that a plan for 56 blocks takes the time of two; forecast.py adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checkpoints.checkpoint import CheckpointInfo
from ..families.spec import ModelFamily, Variant
from ..parallel.block_lists import parts_of_tail
from ..parallel.offload.block_call import BlockCall
from ..patches.hooks import tensors_of
from ..quantization.wrapped import tensor_bytes
from .dry_run_block import BlockCost, dry_run_block, plain_tensors, sizes_of
from .meter import Kernels, MemoryMeter, as_on_card
from .short_model import META, ShortModel, Work, shorten, step_on_meta, voice_as_sound


@dataclass(frozen=True)
class StepCost:
    """What every block and the rest of a model cost.

    Args:
        names, blocks: in execution order. [num_blocks]
        home: weights, buffers and LoRA outside the blocks: embedders and tail.
        tail_weights: the share of them that the tail has.
        front: what is alive when the first block is called; its inputs and constants included.
        first_inputs: of the first block.
        tail: peak of tail, loss and their backward; above the last block's output.
    """

    names: tuple[str, ...]
    blocks: tuple[BlockCost, ...]
    home_weights: int
    tail_weights: int
    home_lora: int
    home_trained: int
    front: int
    first_inputs: int
    tail: int


def dry_run_step(model: nn.Module, info: CheckpointInfo, variant: Variant, work: Work, kernels: Kernels) -> StepCost:
    """Count what a step of this work holds. The model is on meta; it is cut down and cannot be used afterwards.

    Raises: ValueError for LoRA targets that match nothing; RuntimeError for a scheme whose package is missing;
        NoForecast for one of ComfyUI's classes that does not run so.
    """
    with torch.inference_mode(False), torch.enable_grad():
        work = voice_as_sound(info.family, work)
        short = shorten(model, info.family, work)
        run = _Run(short, MemoryMeter(kernels.rounding))
        latents = torch.empty(work.batch_shape, device=META)  # in host memory while training
        run.meter.ignore([*plain_tensors(short.model), latents])
        short.model.train()
        short.model.enable_gradient_checkpointing(run.measure)  # type: ignore[operator]
        with as_on_card(kernels), run.meter:
            step_on_meta(short.model, info, variant, work, latents)
        return _collect(short, info.family, run)


class _Run:
    """Takes gradient checkpointing's place and measures the last call of every kind, whose input carries gradients."""

    def __init__(self, short: ShortModel, meter: MemoryMeter) -> None:
        self.short, self.meter = short, meter
        self.kinds: dict[int, BlockCost] = {}
        self.front = self.tail_base = 0
        self._num_calls = 0
        self._before: list[torch.Tensor] = []  # what the call before was given
        self._constants: list[torch.Tensor] = []  # held, so that a name is not given twice

    def measure(self, block: nn.Module | BlockCall, *args: Any) -> Any:
        """The block's outputs as fresh tensors that need gradients: nothing before this block is remembered. They are
        no leaves, for some classes add to what a block gave, in place."""
        if self._num_calls == 0:
            self.front = self.meter.live
        if self.short.is_last(self._num_calls):
            if isinstance(block, BlockCall):
                with torch.no_grad():
                    block(*args)  # what its in-place guard has to learn of such a call, no later one does again
            constants = {id(tensor) for tensor in self._before} & {id(tensor) for tensor in tensors_of(args)}
            streams = [tensor for tensor in tensors_of(args) if id(tensor) not in constants]
            shared = {self._name_of(t): self.meter.size(t) for t in tensors_of(args) if id(t) in constants}
            kind = self.short.calls[self._num_calls]
            self.kinds[kind] = dry_run_block(self.meter, block, args, shared, streams)
        self._before = tensors_of(args)
        self._num_calls += 1
        with torch.no_grad():
            outputs = block(*args)
        flat, spec = tree_flatten(outputs)
        where = [index for index, each in enumerate(flat) if isinstance(each, torch.Tensor)]
        fresh = _Fresh.apply(torch.empty(0, device=META, requires_grad=True), *(flat[index] for index in where))
        for index, each in zip(where, fresh, strict=True):
            flat[index] = each
        outputs = tree_unflatten(flat, spec)
        if self._num_calls == len(self.short.calls):
            self._before.clear()
            self.tail_base = self.meter.start()
        return outputs

    def _name_of(self, tensor: torch.Tensor) -> int:
        known = next((number for number, other in enumerate(self._constants) if other is tensor), None)
        if known is None:
            self._constants.append(tensor)
        return len(self._constants) - 1 if known is None else known


class _Fresh(torch.autograd.Function):
    """The same numbers, without a history and with a gradient that goes nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, *(None for _ in grads)


def _collect(short: ShortModel, family: ModelFamily, run: _Run) -> StepCost:
    return StepCost(
        names=short.names,
        blocks=tuple(run.kinds[kind] for kind in short.kind_of),
        **_costs_of_home(short.model, family),
        front=run.front,
        first_inputs=run.kinds[0].inputs,
        tail=run.meter.peak - run.tail_base,
    )


def _costs_of_home(model: nn.Module, family: ModelFamily) -> dict[str, int]:
    """What a StepCost says of weights outside the blocks."""
    lists = {block_list.name for block_list in family.block_lists}
    home = [sizes_of(module) for name, module in model.named_children() if name not in lists]
    own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
    modules, parameters = parts_of_tail(model, family)
    return {
        "home_weights": sum(map(tensor_bytes, own)) + sum(each.weights for each in home),
        "tail_weights": sum(sizes_of(module).weights for module in modules) + sum(map(tensor_bytes, parameters)),
        "home_lora": sum(each.lora for each in home),
        "home_trained": sum(each.num_trained for each in home),
    }
