"""The best cut of a model over cards for one setting: a dynamic programme over (stages used, blocks placed).

The time of a step with `a` micro-batches over stages that take t_k each, in seconds estimated from operations:

    one after the other   a * sum(t)
    in a pipeline         sum(t) + (a - 1) * max(max(t), sum(t) / p)     p micro-batches held by the first stage
    data parallel         max(t_k * micro-batches of card k)             the whole model on each card (search.py)

t_k has the blocks of a stage; embedders, tail, copies between cards and the optimizer are left out. Where blocks stream
from host memory, a stage takes as long as its copies if these take longer than its computation. Without a pipeline the
cut does not change the time while the cards are equally fast; then it evens out memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..config.model import Strategy
from ..parallel.offload.copies import NUM_SLOTS
from .forecast import DeviceForecast, StagePlan, StepSettings
from .question import Question
from .space import Setting

HEADROOM = 0.05  # of a card, left free by what the planner chooses to keep; the forecast may be off by as much
PINNED_SHARE = 0.8  # of free host memory that may be pinned; the system needs some that it can move
HOST_SHARE = 0.9  # of free host memory, for blocks that stream from there: it is pinned and cannot be swapped out
# Of streaming, or of what is computed beside it if that is shorter, this share is not hidden: 0 to 0.45 were measured
# by benchmarks/block_swap.py on an H200 (docs/internals/experiments.md, 2026-11-22).
UNHIDDEN = 0.3


@dataclass(frozen=True)
class Terms:
    """What a cut has to keep to.

    Args:
        most: share of a card that may be needed; inf where the user vouches for what does not fit.
        spares: whether blocks go without activation checkpointing where there is room.
        has_limits: False looks for what would be needed, whatever the user and the host allow.
        streams: which blocks stream from host memory where the user has not said.
        least: what a cut is to have least of: seconds, or bytes in host memory.
    """

    most: float
    spares: bool = False
    has_limits: bool = True
    streams: Literal["none", "needed", "all"] = "none"
    least: Literal["seconds", "host bytes"] = "seconds"


@dataclass(frozen=True)
class Stage:
    """What a card does in a setting that was found."""

    plan: StagePlan
    forecast: DeviceForecast
    time: float
    share: float  # of the card that is needed
    is_waiting: bool  # for copies, which take longer than what it computes
    streamed: int  # bytes in host memory

    @property
    def blocks(self) -> range:
        return range(self.plan.start, self.plan.end)


@dataclass(frozen=True)
class Found:
    """How a setting would run.

    Args:
        offloaded_inputs: bytes of block inputs in host memory. loading: bytes there while weights are read.
        resident_time: of what fits with this setting without blocks in host memory, and is slower.
    """

    setting: Setting
    stages: tuple[Stage, ...]
    time: float
    settings: StepSettings
    offloaded_inputs: int
    loading: int
    resident_time: float | None = None

    @property
    def is_streaming(self) -> bool:
        return any(stage.plan.num_offloaded for stage in self.stages)

    @property
    def must_stream(self) -> bool:
        """Whether blocks stream because nothing fits with this setting without."""
        return self.is_streaming and self.resident_time is None

    @property
    def streamed(self) -> int:
        return sum(stage.streamed for stage in self.stages)

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes: streamed blocks, and one layer on its way from the file or later block inputs."""
        return self.streamed + max(self.loading, self.offloaded_inputs)

    def can_pin(self, host_bytes: int | None) -> bool:
        """Whether block inputs fit host memory, as far as that is known."""
        return host_bytes is None or self.offloaded_inputs <= PINNED_SHARE * host_bytes

    def fits_host(self, host_bytes: int | None) -> bool:
        """Whether the host has room for what streams from there or waits there."""
        if host_bytes is None or not (self.is_streaming or self.offloaded_inputs):
            return True
        return self.host_bytes <= HOST_SHARE * host_bytes


def find_cut(question: Question, setting: Setting, terms: Terms) -> Found | None:
    """The best cut for a setting, the user's where there is one; None if none keeps to the terms.

    Raises: ValueError for settings per device that are not as many as there are cards, and for impossible cuts.
    """
    search = _CutSearch(question, setting, terms)
    stages = search.best()
    if stages is None:
        return None
    offloaded = search.forecaster.offloaded_inputs([stage.plan for stage in stages])
    time = _step_time(search.settings, [stage.time for stage in stages])
    found = Found(setting, tuple(stages), time, search.settings, offloaded, search.forecaster.loading_bytes)
    return found if found.can_pin(question.host_bytes) or not terms.has_limits else None


def _step_time(settings: StepSettings, times: Sequence[float]) -> float:
    total, count = sum(times), settings.accumulation
    strategy: Strategy = settings.strategy  # named here: mypy's cache misses a new name behind another module's field
    match strategy:
        case "none":
            return count * total
        case "pipeline":
            return total + (count - 1) * max(max(times), total / settings.held(0, len(times)))
        case "data":
            raise AssertionError("each copy of the model is cut alone, by Question.alone")
        case "tensor":
            raise AssertionError("each card's share of the blocks is planned alone, by Question.divided")
        case "fsdp" | "hsdp":
            raise AssertionError("one card of those that share weights is planned alone, by jobs/shared_weights.py")


_Value = tuple[float, float, float]  # what a cut is chosen by, see _add


class _CutSearch:
    def __init__(self, question: Question, setting: Setting, terms: Terms) -> None:
        self._question, self._terms = question, terms
        self.settings, self.forecaster = question.step_settings(setting), question.forecaster(setting)
        question.check_counts()
        space, cards = question.space, question.cards
        self._limits = space.memory_limit_gb if terms.has_limits else ()
        self._checkpoints, self._uncheckpointed = space.is_checkpointing, space.uncheckpointed
        self._offloaded = space.offloaded
        self._is_by_slowest = setting.has_stages or space.is_cut_by_time
        blocks = range(len(question.model.names))
        times = [
            [tuple(map(_summable, question.times.of(block, card, setting.scheme))) for block in blocks]
            for card in cards
        ]
        self._seconds = [_prefix(sum(each) for each in card) for card in times]
        self._again = [_prefix(each[0] for each in card) for card in times]

    def best(self) -> list[Stage] | None:
        """Of the cuts that fit, the one with the shortest step; of equals, the one that streams least; of these, the
        one whose fullest card is emptiest. Where the user cuts, that one if it fits."""
        bounds = self._question.bounds
        num_blocks, num_stages = len(self._question.model.names), len(self._question.cards)
        best: dict[int, tuple[_Value, list[Stage]]] = {0: ((0.0, 0.0, 0.0), [])}
        for index in range(num_stages):
            options: dict[int, tuple[_Value, list[Stage]]] = {}
            last = num_blocks - (num_stages - 1 - index)
            ends = range(index + 1 if index < num_stages - 1 else last, last + 1)
            for start, (value, stages) in best.items():
                for end in bounds[index + 1 : index + 2] or ends:
                    stage = self._stage(index, start, end) if end > start else None
                    if stage is None:
                        continue
                    added = self._add(value, stage)
                    if end not in options or added < options[end][0]:
                        options[end] = added, [*stages, stage]
            best = options
        return best[num_blocks][1] if num_blocks in best else None

    def _add(self, value: _Value, stage: Stage) -> _Value:
        """Seconds first, then what streams from host memory, or the other way round where that is asked for; then the
        fullest card."""
        is_by_time = self._terms.least == "seconds"
        before, streamed = value[:2] if is_by_time else value[1::-1]
        time = max(before, stage.time) if self._is_by_slowest else before + stage.time
        streamed += stage.streamed
        share = max(value[2], stage.share)
        return (time, streamed, share) if is_by_time else (streamed, time, share)

    def _stage(self, index: int, start: int, end: int) -> Stage | None:
        given = self._uncheckpointed[index] if self._uncheckpointed else 0 if self._checkpoints else end - start
        offloaded = self._offloaded[index] if self._offloaded else 0
        if given + offloaded > end - start:
            return None
        plan = StagePlan(index, len(self._question.cards), start, end, given, offloaded)
        if not self._offloaded and self._terms.streams != "none":
            return self._streaming(plan)
        found = self._checked(plan)
        if found is None or self._uncheckpointed or not self._checkpoints or not self._terms.spares:
            return found
        low, high = 0, end - start - offloaded  # the most blocks that may go without checkpointing
        while low < high:
            middle = (low + high + 1) // 2
            stage = self._checked(replace(plan, num_uncheckpointed=middle))
            if stage is None:
                high = middle - 1
            else:
                low, found = middle, stage
        return found

    def _streaming(self, plan: StagePlan) -> Stage | None:
        """With as few blocks in host memory as let the stage fit; None if all are not enough.

        Activations do not depend on them, so bytes that are missing are bytes of weights.
        """
        most = plan.num_blocks - plan.num_uncheckpointed
        if self._terms.streams == "all":
            whole = replace(plan, num_offloaded=most)
            return self._checked(whole if self.forecaster.saved_bytes(whole) > 0 else plan)
        missing = self._missing(plan)
        if missing <= 0:
            return self._checked(plan)
        largest = max(block.streaming for block in self.forecaster.cost.blocks[plan.start : plan.end])
        fewest = NUM_SLOTS + math.ceil(missing / max(1, largest))  # the slots take as much as the first ones free
        for count in range(fewest, most + 1):
            offloaded = replace(plan, num_offloaded=count)
            if self.forecaster.saved_bytes(offloaded) >= missing and (stage := self._checked(offloaded)) is not None:
                return stage
        return None

    def _missing(self, plan: StagePlan) -> float:
        """Bytes that a stage needs beyond what it may."""
        card = self._question.cards[plan.stage]
        found = self.forecaster.device(card.name, plan)
        over = [found.needed - self._terms.most * max(1, card.usable_bytes)]
        if self._limits:
            over.append(found.weights - self._limits[plan.stage] * 1e9)
        return max(over)

    def _checked(self, plan: StagePlan) -> Stage | None:
        """The stage, None if it needs more of its card than it may."""
        card = self._question.cards[plan.stage]
        found = self.forecaster.device(card.name, plan)
        if self._limits and found.weights > self._limits[plan.stage] * 1e9:
            return None
        share = found.needed / max(1, card.usable_bytes)
        if share > self._terms.most:
            return None
        streamed = self.forecaster.streamed_bytes(plan)
        link, computing = self._question.link, self._time(plan)
        # Beside the kernels: weights for the forward and once more for the backward, inputs there and back.
        streaming = 2 * streamed / link
        copying = streaming + 2 * self.forecaster.leaving(plan) / link
        time = max(computing, copying) + UNHIDDEN * min(computing, streaming)
        return Stage(plan, found, time, share, 0 < copying >= computing, streamed)

    def _time(self, plan: StagePlan) -> float:
        """A micro-batch's computation: forward, backward, and forward again where blocks are recomputed."""
        seconds, again = self._seconds[plan.stage], self._again[plan.stage]
        return seconds[plan.end] - seconds[plan.start] + (again[plan.first_spared] - again[plan.start])


def _summable(seconds: float) -> float:
    """In steps of about 1e-12 s: sums of such are exact, so that cuts that take equally long have equal times, in
    whatever order their blocks are added up, and memory decides."""
    return round(seconds * 2**40) / 2**40


def _prefix(values: Iterable[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums
