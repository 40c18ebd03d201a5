"""The dry run of a model whose blocks are all different and whose calls are joined by more than one stream: a UNet.

dry_run.py looks at one block of each kind and takes what a forward holds between two blocks for nothing. A UNet holds
skips there, and their gradients on the way back. So all of it runs once on meta, call by call (its blocks' children are
what is called). Each call is measured alone (dry_run_block.py) and is then a node of a real graph that keeps nothing:
what is alive when the node is called, forwards and backwards, is what the model and autograd themselves hold at home.
relay_forecast.py adds up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from ..checkpoints.checkpoint import CheckpointInfo
from ..families.spec import ModelFamily, Variant
from ..parallel.block_lists import called_modules
from ..parallel.offload.block_call import BlockCall, module_of
from ..parallel.placement import block_names
from ..patches.hooks import tensors_of
from ..training.adapter import find_targets
from .dry_run import StepCost, costs_of_home
from .dry_run_block import BlockCost, dry_run_block, plain_tensors, sizes_of
from .meter import Kernels, MemoryMeter, as_on_card
from .short_model import META, Work, make_trainable, step_on_meta

Storages = Mapping[int, int]  # bytes by a number that stands for one storage


@dataclass(frozen=True)
class CallCost:
    """One call of a module inside a block.

    Args:
        block: index of the block.
        cost: of the call alone, with what only it reads as inputs.
        is_trained: whether autograd goes through it, so that what it reads is kept for its recomputation.
        at_home: storages of what it reads. away: the same as copies on another card.
        shared: which of them other calls read as well.
        before: storages alive at home when it is called, if no call keeps anything. behind: when its backward begins.
        gradient: bytes of its outputs' gradients, which are in `behind`. is_part: whether they are part of a larger
            storage that is held for a skip, too.
        flops: of its forward.
    """

    block: int
    cost: BlockCost
    is_trained: bool
    at_home: Storages
    away: Storages
    before: Storages
    shared: frozenset[int] = frozenset()
    behind: Storages = field(default_factory=dict)
    gradient: int = 0
    is_part: bool = False
    flops: float = 0.0


@dataclass(frozen=True)
class WholeCost(StepCost):
    """What every call and the rest of a model cost; its blocks are sums of their calls.

    Args:
        calls: in execution order. at_end: storages alive at home when the last has returned, its outputs included.
    """

    calls: tuple[CallCost, ...] = ()
    at_end: Storages = field(default_factory=dict)

    @property
    def block_flops(self) -> list[float]:
        """Of each block's forward."""
        flops = [0.0] * len(self.blocks)
        for call in self.calls:
            flops[call.block] += call.flops
        return flops


def dry_run_whole(model: nn.Module, info: CheckpointInfo, variant: Variant, work: Work, kernels: Kernels) -> WholeCost:
    """Count what a step of this work holds. The model is on meta, and cannot be used afterwards.

    Raises: ValueError for LoRA targets that match nothing; RuntimeError for a scheme whose package is missing;
        NoForecast for one of ComfyUI's classes that does not run so.
    """
    family = info.family
    with torch.inference_mode(False), torch.enable_grad():
        make_trainable(model, family, work, {}, set(find_targets(model, family, work.lora)))
        names = block_names(model, family)
        run = _WholeRun(MemoryMeter(kernels.rounding), _blocks_of(model, family, names))
        latents = torch.empty(work.batch_shape, device=META)  # in host memory while training
        run.meter.ignore([*plain_tensors(model), latents])
        model.train()
        model.enable_gradient_checkpointing(run.measure)  # type: ignore[operator]
        with as_on_card(kernels), run.meter:
            step_on_meta(model, info, variant, work, latents)
    calls = _with_shared(run.calls)
    return WholeCost(
        names=names,
        blocks=tuple(_sum([call for call in calls if call.block == index]) for index in range(len(names))),
        **costs_of_home(model, family),
        front=sum(calls[0].before.values()),
        first_inputs=calls[0].cost.inputs,
        tail=run.tail,
        calls=calls,
        at_end=run.at_end,
    )


def _blocks_of(model: nn.Module, family: ModelFamily, names: Sequence[str]) -> dict[nn.Module, int]:
    return {module: index for index, name in enumerate(names) for module in called_modules(model, family, name)}


class _WholeRun:
    """Takes gradient checkpointing's place."""

    def __init__(self, meter: MemoryMeter, blocks: Mapping[nn.Module, int]) -> None:
        self.meter, self._blocks = meter, blocks
        self.calls: list[CallCost] = []
        self.at_end: Storages = {}
        self.tail = self._base = 0
        self._known: dict[Any, tuple[BlockCost, float]] = {}

    def measure(self, block: nn.Module | BlockCall, *args: Any) -> Any:
        """The outputs of a call, which keeps nothing for its backward."""
        tensors, meter = tensors_of(args), self.meter
        module = module_of(block)
        is_trained = any(each.requires_grad for each in (*tensors, *module.parameters()))
        before, number = meter.alive(), len(self.calls)
        anchor = torch.empty(0, device=META, requires_grad=is_trained)
        outputs = _Unkept.apply(self, number, block, args, anchor, *tensors)
        kind = _kind_of(module, args, outputs)
        if kind not in self._known:
            self._known[kind] = _measured(meter, block, args, is_trained)
        cost, flops = self._known[kind]
        away = {number: meter.size(each) for each in tensors for number in meter.storages([each])}
        index = self._blocks[module]
        self.calls.append(CallCost(index, cost, is_trained, meter.storages(tensors), away, before=before, flops=flops))
        self.at_end = meter.alive()
        self._base = meter.start()
        return outputs

    def arrive(self, number: int, grads: Sequence[torch.Tensor | None]) -> None:
        """The backward of a call begins, with these gradients of its outputs."""
        if not any(call.behind for call in self.calls):
            self.tail = self.meter.peak - self._base
        given = [each for each in grads if each is not None]
        size, held = sum(map(self.meter.size, given)), self.meter.storages(given)
        is_part = sum(held.values()) > size
        known = self.calls[number]
        self.calls[number] = replace(known, behind=self.meter.alive(), gradient=size, is_part=is_part)


class _Unkept(torch.autograd.Function):
    """A call whose backward needs nothing and makes gradients of the right size."""

    @staticmethod
    def forward(
        ctx: Any, run: _WholeRun, number: int, block: Any, args: Any, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        ctx.run, ctx.number = run, number
        ctx.set_materialize_grads(False)
        ctx.made = [(tuple(each.shape), each.dtype) for each in tensors]
        return block(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.run.arrive(ctx.number, grads)
        needed = ctx.needs_input_grad[5:]
        made = (
            torch.empty(shape, dtype=dtype, device=META) if is_needed else None
            for is_needed, (shape, dtype) in zip(needed, ctx.made, strict=True)
        )
        return (None, None, None, None, None, *made)


class _Operations(TorchDispatchMode):
    """Counts those of products, attention and convolutions; torch's own counter wants inputs that have a history."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        of = flop_registry.get(func.overloadpacket)
        if of is not None:
            self.count += of(*args, **(kwargs or {}), out_val=out)
        return out


def _kind_of(module: nn.Module, args: Any, outputs: Any) -> Any:
    """Equal for calls that cost alike."""
    parameters = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())
    given = tuple((tuple(each.shape), each.dtype, each.requires_grad) for each in tensors_of((args, outputs)))
    return tuple(map(type, module.modules())), parameters, given


def _measured(meter: MemoryMeter, block: nn.Module | BlockCall, args: Any, is_trained: bool) -> tuple[BlockCost, float]:
    """What a call costs alone, inputs left out, and the operations of its forward."""
    with torch.no_grad(), _Operations() as operations:
        block(*args)
    flops = operations.count
    if is_trained:
        return dry_run_block(meter, block, args, {}, []), flops
    own, base = sizes_of(module_of(block)), meter.start()
    with torch.no_grad():
        outputs = block(*tree_map_only(torch.Tensor, torch.Tensor.detach, args))
    forward, size = meter.peak - base, meter.live - base
    del outputs
    return BlockCost(own.weights, 0, 0, 0, {}, size, 0, forward, forward, 0, 0, staying=own.weights), flops


def _with_shared(calls: Sequence[CallCost]) -> tuple[CallCost, ...]:
    """The calls with what several of them read told from what one reads."""
    readers = Counter(number for call in calls for number in call.at_home)
    many = {number for number, count in readers.items() if count > 1}
    return tuple(_with_inputs(call, many & set(call.at_home)) for call in calls)


def _with_inputs(call: CallCost, shared: set[int]) -> CallCost:
    own = tuple(size for number, size in call.away.items() if number not in shared and call.is_trained)
    constants = {number: call.away[number] for number in shared}
    cost = replace(call.cost, inputs=sum(own), input_sizes=own, constants=constants)
    return replace(call, cost=cost, shared=frozenset(shared))


def _sum(calls: Iterable[CallCost]) -> BlockCost:
    """A block of these calls: its weights, and what its calls keep and read."""
    costs = [call.cost for call in calls]

    def total(name: str) -> int:
        return sum(getattr(cost, name) for cost in costs)

    def most(name: str) -> int:
        return max(getattr(cost, name) for cost in costs)

    return BlockCost(
        weights=total("weights"),
        lora=total("lora"),
        num_trained=total("num_trained"),
        inputs=total("inputs"),
        constants={name: size for cost in costs for name, size in cost.constants.items()},
        outputs=costs[-1].outputs,
        kept=total("kept"),
        forward=most("forward"),
        forward_kept=most("forward_kept"),
        recompute=most("recompute"),
        backward=most("backward"),
        input_sizes=tuple(size for cost in costs for size in cost.input_sizes),
        staying=total("staying"),
    )
