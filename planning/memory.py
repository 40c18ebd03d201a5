"""How much memory every card will take: the largest sum over the moments of a step, added up from its blocks' costs.

Of offloaded inputs (parallel/offload/activations.py) those of NUM_WAITING blocks and of the block at work are on the
card; in its backward one more that arrives, and NUM_WAITING only of other micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from ..config.job import OptimizerConfig
from ..config.model import Strategy, has_stages
from ..parallel.local.workers import num_held
from ..parallel.offload.activations import NUM_WAITING
from ..parallel.offload.copies import NUM_SLOTS
from ..parallel.placement import spread_offloaded
from ..training.optimizer import make_optimizer
from .costs import BlockCost, StepCost

# What rounding a layer to 8 bits takes beside it: copies of 16 bytes per weight, but only some rows at a time.
ROUNDING_BYTES, ROUNDING_COPIES = 500_000_000, 8


class Optimizer(NamedTuple):
    """Bytes per trained value: state, and temporaries of a step."""

    state: float
    step: float


class Backend(NamedTuple):
    """What one kind of device adds to the bytes of tensors."""

    workspace: int = 2 * 32 * 2**20  # cuBLAS, per thread that runs forwards or backwards: 32 MiB on Hopper, else 8
    fragmentation: float = 0.10  # of activations and temporaries: a guess on the safe side
    context: int = 500_000_000  # the driver's own, once CUDA has started; read off nvidia-smi, differs by card


@dataclass(frozen=True)
class StagePlan:
    """Blocks [start, end) as the stage of one device; the last ones are without activation checkpointing."""

    stage: int
    num_stages: int
    start: int
    end: int
    num_uncheckpointed: int = 0
    num_offloaded: int = 0

    @property
    def num_blocks(self) -> int:
        return self.end - self.start

    @property
    def first_spared(self) -> int:
        """The first block whose activations are not computed again."""
        return self.end - self.num_uncheckpointed


@dataclass(frozen=True)
class Moment:
    """What a device holds besides weights, LoRA and optimizer, of all micro-batches; checkpoints: block inputs and
    constants. kept: activations of the blocks that keep them. moving: what it needs besides."""

    moment: str
    checkpoints: int
    kept: int
    moving: int
    gradients: int
    has_lora: bool = field(default=True, kw_only=True)

    @property
    def total(self) -> int:
        return self.checkpoints + self.kept + self.moving + self.gradients


@dataclass(frozen=True, kw_only=True)
class DeviceForecast(StagePlan, Moment):
    """Bytes on the device of a stage at its peak, the moment. streamed: of its blocks in host memory, which are copied
    to it in every pass. weights: base weights, of blocks that stream two slots alone. overhead: reserved and not
    allocated. usable: of the card's memory. time: seconds of a micro-batch."""

    device: str
    held: int
    streamed: int
    weights: int
    lora: int
    optimizer: int
    workspace: int
    overhead: int
    context: int
    usable: int = 0
    time: float = 0.0

    @property
    def allocated(self) -> int:
        """As torch.cuda.max_memory_allocated."""
        return self.weights + self.lora + self.optimizer + self.total + self.workspace

    @property
    def reserved(self) -> int:
        """As torch.cuda.max_memory_reserved."""
        return self.allocated + self.overhead

    @property
    def needed(self) -> int:
        """Of the card's memory."""
        return self.reserved + self.context

    @property
    def share(self) -> float:
        """Of the card's memory, that is needed."""
        return self.needed / max(1, self.usable)


@dataclass(frozen=True)
class Forecaster:
    """Adds up for any cut of one model. strategy: of one copy of it. offload_from: inputs of recomputed blocks of at
    least so many bytes are in host memory; None for none. largest_layer: bytes of the widest one that is rounded on
    load, 0 for none. picture: what a step of one sample picture costs, where its forward takes more than training's."""

    cost: StepCost
    optimizer: Optimizer
    strategy: Strategy = "none"
    accumulation: int = 1
    ahead: int = 0
    offload_from: int | None = None
    backend: Backend = Backend()
    largest_layer: int = 0
    picture: StepCost | None = None

    def held(self, stage: int, num_stages: int) -> int:
        """Micro-batches whose activations a stage holds at once."""
        return num_held(num_stages, self.accumulation, self.ahead)[stage] if has_stages(self.strategy) else 1

    def _has_tail(self, plan: StagePlan) -> bool:
        """Whether a stage has the layers behind the blocks and the loss."""
        return plan.stage == (plan.num_stages - 1 if has_stages(self.strategy) else 0)

    @cached_property
    def _sums(self) -> dict[str, list[int]]:
        """Of the blocks before each index."""
        names = ("weights", "lora", "num_trained", "inputs", "kept")
        blocks = self.cost.blocks
        sums = {name: list(accumulate((getattr(block, name) for block in blocks), initial=0)) for name in names}
        return sums | {"leaving": list(accumulate(map(self._leaving, blocks), initial=0))}

    def _between(self, name: str, start: int, end: int) -> int:
        return self._sums[name][end] - self._sums[name][start]

    def _leaving(self, block: BlockCost) -> int:
        """Bytes of a block's inputs that go to the host while it waits for its backward."""
        limit = self.offload_from
        return 0 if limit is None else sum(size for size in block.input_sizes if size >= limit)

    def leaving(self, plan: StagePlan) -> int:
        """Bytes that leave a stage's device per micro-batch, and come back."""
        return self._between("leaving", plan.start, plan.first_spared)

    def _away(self, plan: StagePlan, end: int, num_near: int) -> int:
        """Of the inputs of blocks up to `end`, and of all of other micro-batches: what is not on the card; those of
        num_near blocks are, which are taken for the largest."""
        if self.offload_from is None:
            return 0
        others = self.held(plan.stage, plan.num_stages) - 1
        leaving = self._between("leaving", plan.start, min(end, plan.first_spared)) + others * self.leaving(plan)
        largest = max(map(self._leaving, self.cost.blocks[plan.start : plan.first_spared]), default=0)
        return max(0, leaving - num_near * largest)

    def device(self, name: str, plan: StagePlan) -> DeviceForecast:
        """What the device of a stage will hold."""
        found = self.cost
        weights = self._between("weights", plan.start, plan.end) - self.saved_bytes(plan)
        lora, trained = self._between("lora", plan.start, plan.end), self._between("num_trained", plan.start, plan.end)
        if plan.stage == 0:
            weights += found.outer_weights - found.tail_weights
            lora, trained = lora + found.outer_lora, trained + found.outer_trained
        if self._has_tail(plan):
            weights += found.tail_weights
        state = int(trained * self.optimizer.state)
        moment = max(self._moments(plan, lora, trained), key=lambda each: each.total + each.has_lora * (lora + state))
        return DeviceForecast(
            **vars(plan),
            **vars(moment),
            device=name,
            held=self.held(plan.stage, plan.num_stages),
            streamed=sum(self._streamed(plan)),
            weights=weights,
            lora=lora * moment.has_lora,
            optimizer=state * moment.has_lora,
            workspace=self.backend.workspace,
            overhead=int(moment.total * self.backend.fragmentation),
            context=self.backend.context,
        )

    def _streamed(self, plan: StagePlan) -> list[int]:
        """Bytes of each streaming block that rest in host memory."""
        chosen = spread_offloaded(plan.num_blocks, plan.num_uncheckpointed, plan.num_offloaded)
        return [self.cost.blocks[plan.start + index].streaming for index in chosen]

    def saved_bytes(self, plan: StagePlan) -> int:
        """By how much the card's weights are less for blocks that stream: these, less the slots."""
        away = self._streamed(plan)
        return sum(away) - min(NUM_SLOTS, len(away)) * max(away, default=0)

    @property
    def loading_bytes(self) -> int:
        """Host memory for one layer, or block, on its way from the file."""
        return max(self.largest_layer, max(block.weights for block in self.cost.blocks))

    def offloaded_inputs(self, plans: Sequence[StagePlan]) -> int:
        """Pinned host memory for the inputs of all micro-batches held."""
        return sum(self.held(plan.stage, plan.num_stages) * self.leaving(plan) for plan in plans)

    @cached_property
    def _run_starts(self) -> list[int]:
        """Where a run of blocks of one kind begins."""
        blocks = self.cost.blocks
        return [i for i in range(len(blocks)) if i == 0 or blocks[i] is not blocks[i - 1]]

    def _ends_of_runs(self, start: int, end: int, first_spared: int) -> list[int]:
        """First and last block of every run of blocks that are alike, along which all sums grow or fall evenly."""
        first = () if self.offload_from is None else range(start + 1, start + 3 + NUM_WAITING)
        bounds = {start, end, *(at for at in (*self._run_starts, first_spared, *first) if start < at < end)}
        return sorted({*(bounds - {end}), *(at - 1 for at in bounds - {start})})

    def _constants(self, cost: StepCost, plan: StagePlan) -> int:
        """Modulation, rotary tables and the like, once per device whatever the number of blocks that read them."""
        named: dict[int, int] = {}
        for index in self._ends_of_runs(plan.start, plan.end, plan.start):
            named.update(cost.blocks[index].constants)
        return sum(named.values())

    def _moments(self, plan: StagePlan, lora: int, trained: int) -> Iterator[Moment]:
        found, picture = self.cost, self.picture
        start, end, first_spared = plan.start, plan.end, plan.first_spared
        is_first, is_last = plan.stage == 0, self._has_tail(plan)
        constants, gradients = self._constants(found, plan), lora if self.accumulation > 1 else 0  # of earlier ones
        others = self.held(plan.stage, plan.num_stages) - 1
        all_inputs, all_kept = self._between("inputs", start, end), self._between("kept", first_spared, end)
        before = constants + others * (all_inputs + constants)
        front = max(0, found.front - constants - found.blocks[0].inputs) if is_first else 0
        for index in self._ends_of_runs(start, end, first_spared):
            block, is_kept = found.blocks[index], index >= first_spared
            inputs = before + self._between("inputs", start, index + 1)
            at_work = (0, 0) if is_kept else (1, 2 if others else 2 - NUM_WAITING)
            in_forward, in_backward = (inputs - self._away(plan, index + 1, NUM_WAITING + near) for near in at_work)
            kept = others * all_kept + self._between("kept", min(first_spared, index), index)
            later = 0 if gradients else self._between("lora", index + 1, end)
            forward = front + (block.forward_kept if is_kept else block.forward)
            yield Moment(f"forward of {found.names[index]}", in_forward, kept, forward, gradients)
            backward = block.backward if is_kept else block.recompute
            yield Moment(f"backward of {found.names[index]}", in_backward, kept, backward, gradients + later)
        if is_last:
            tail = front + found.blocks[-1].outputs + found.tail
            inputs = before + all_inputs - self._away(plan, end, NUM_WAITING)
            yield Moment("last layers and loss", inputs, (others + 1) * all_kept, tail, gradients)
        yield Moment("optimizer step", 0, 0, int(trained * self.optimizer.step), lora)
        if picture is not None:  # while it is drawn: constants, and the inputs and the forward of one block
            held = max(self._constants(picture, plan), picture.front - picture.blocks[0].inputs if is_first else 0)
            blocks = (picture.blocks[index] for index in self._ends_of_runs(start, end, end))
            drawing = [block.inputs + block.forward for block in blocks]
            drawing += [picture.blocks[-1].outputs + picture.tail] * is_last
            yield Moment("sample picture", 0, 0, held + max(drawing), 0)
        if self.largest_layer:
            copies = min(ROUNDING_BYTES, ROUNDING_COPIES * self.largest_layer)
            yield Moment("loading", 0, 0, self.largest_layer + copies, 0, has_lora=False)


def optimizer_bytes(config: OptimizerConfig, lora_dtype: str, *, ema: bool = False) -> Optimizer:
    """What an optimizer holds per trained value; an unknown one is measured. ema: an average is kept, in float32."""
    size, moments = getattr(torch, lora_dtype).itemsize, 2 + bool(config.options.get("amsgrad"))
    if config.name == "adamw":
        found = Optimizer(moments * size, size)  # torch takes the root of all second moments of a card at once
    elif config.name == "adamw8bit":
        found = Optimizer(state=2 * (1 + 4 / 256), step=0.0)  # two moments, a float32 per 256 values; one by one
    else:
        with torch.inference_mode(False), torch.enable_grad():
            parameter = nn.Parameter(torch.ones(64, 64, dtype=getattr(torch, lora_dtype)))
            parameter.grad = torch.zeros_like(parameter)
            optimizer = make_optimizer([parameter], config)
            optimizer.step()
            held = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        found = Optimizer(sum(value.numel() * value.element_size() for value in held) / parameter.numel(), size)
    return Optimizer(found.state + 4 * ema, found.step)
