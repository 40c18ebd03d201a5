"""Which setting is the fastest that fits, and the best cut of the model over the cards for each setting.

Searched are the candidates of the space, and for each of them the cut and the blocks without activation checkpointing.
What the user has set is only checked. Where a setting does not fit, as few blocks as it takes stream from host memory.

A cut is found by a dynamic programme over (stages used, blocks placed). The time of a step with `a` micro-batches over
stages that take t_k each, in seconds estimated from operations:

    one after the other   a * sum(t)
    in a pipeline         sum(t) + (a - 1) * max(max(t), sum(t) / p)     p micro-batches held by the first stage
    data parallel         max(t_k * micro-batches of card k)             the whole model on each card
    tokens                a * max(t_k)                                   t_k with the card's share of the rows

t_k has the blocks of a stage; embedders, tail, copies between cards and the optimizer are left out. Where blocks stream
from host memory, a stage takes as long as its copies if these take longer than its computation. Without a pipeline the
cut does not change the time while the cards are equally fast; then it evens out memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from ..config.model import has_stages, holds_copies, shares_rows
from ..parallel.local.data_parallel import dealt
from ..parallel.offload.copies import NUM_SLOTS
from .dry_run import NoForecast
from .memory import DeviceForecast, Forecaster, StagePlan
from .question import Question, Setting, is_open
from .times import GAIN

HEADROOM = 0.05  # of a card, left free by what the planner chooses to keep; the forecast may be off by as much
PINNED_SHARE = 0.8  # of free host memory that may be pinned; the system needs some that it can move
HOST_SHARE = 0.9  # of free host memory, for blocks that stream from there: it is pinned and cannot be swapped out
# Of streaming, or of what is computed beside it if that is shorter, this share is not hidden: 0 to 0.45 were measured
# by benchmarks/weight_offload.py on an H200 (docs/internals/experiments.md, 2026-11-22).
UNHIDDEN = 0.3
# How many times faster a setting must be for blocks, and again for block inputs, to wait in host memory where something
# fits without: how far copies are hidden is an estimate.
HOST_GAIN = 1.1


@dataclass(frozen=True)
class Terms:
    """What a cut has to keep to.

    Args:
        most: share of a card that may be needed; inf where the user vouches for what does not fit.
        spares: whether blocks go without activation checkpointing where there is room.
        streams: which blocks stream from host memory where the user has not said.
        least: what a cut is to have least of: seconds, or bytes in host memory.
    """

    most: float
    spares: bool = False
    streams: Literal["none", "needed", "all"] = "none"
    least: Literal["seconds", "host bytes"] = "seconds"


@dataclass(frozen=True)
class Stage:
    """What a card does. share: of its memory, that is needed. streamed: bytes in host memory."""

    plan: StagePlan
    forecast: DeviceForecast
    time: float
    share: float
    streamed: int


@dataclass(frozen=True)
class Found:
    """How a setting would run.

    Args:
        offloaded_inputs: bytes of block inputs in host memory. loading: bytes there while weights are read.
        has_resident: whether this setting fits without blocks in host memory, too, and is slower.
    """

    setting: Setting
    stages: tuple[Stage, ...]
    time: float
    offloaded_inputs: int
    loading: int
    has_resident: bool = False

    @property
    def is_streaming(self) -> bool:
        return any(stage.plan.num_offloaded for stage in self.stages)

    @property
    def must_stream(self) -> bool:
        """Whether it does not fit otherwise."""
        return self.is_streaming and not self.has_resident

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes: streamed blocks, and one layer on its way from the file or later block inputs.

        Cards that share out rows stream the same blocks from one place.
        """
        stages = self.stages[:1] if shares_rows(self.setting.strategy) else self.stages
        return sum(stage.streamed for stage in stages) + max(self.loading, self.offloaded_inputs)

    def can_pin(self, host_bytes: int | None) -> bool:
        """Whether block inputs fit host memory, as far as that is known."""
        return host_bytes is None or self.offloaded_inputs <= PINNED_SHARE * host_bytes

    def fits_host(self, host_bytes: int | None) -> bool:
        """Whether the host has room for what streams from there or waits there."""
        if host_bytes is None or not (self.is_streaming or self.offloaded_inputs):
            return True
        return self.host_bytes <= HOST_SHARE * host_bytes


Looked = list[tuple[Setting, Found | None]]  # every setting that was looked at
_Find = Callable[[Question, Setting], Found | None]


def find_fastest(question: Question) -> tuple[Found | None, Looked]:
    """The fastest setting that fits, None if none does; and everything that was looked at.

    A larger optimizer is preferred to a faster setting: 8-bit state is for what would not fit otherwise. Blocks that
    stream from host memory are for what would be slower otherwise, or not fit at all. Offloading of block inputs is
    looked at where the same does not fit without, or only with streamed blocks, and has to be worth it. Cards share
    out rows by themselves where a step takes clearly less so than in any other way, or no other fits.
    """
    looked_at = _look(question, 1.0)
    if question.space.memory_limit_gb and all(found is None for _, found in looked_at):
        looked_at = _look(question, math.inf)  # the user says what fits
    fitting = [found for _, found in looked_at if found is not None]
    if any(found.setting.optimizer == "adamw" and not found.must_stream for found in fitting):
        fitting = [
            each for each in fitting if each.setting.optimizer != "adamw8bit" or not shares_rows(each.setting.strategy)
        ]
    best = [
        min(those, key=lambda found: (found.setting.optimizer == "adamw8bit", _weighed(question, found)))
        for kind in itertools.product((False, True), repeat=2)
        if (those := [each for each in fitting if (each.must_stream, shares_rows(each.setting.strategy)) == kind])
    ]
    return min(best, key=lambda found: _weighed(question, found), default=None), looked_at


def _look(question: Question, most: float) -> Looked:
    """Every setting worth looking at. Copies of the model need more than a split: where nothing fits they are looked at
    only if the user names them."""
    looked_at: Looked = []
    resident: set[Setting] = set()
    best = math.inf
    for setting in question.settings():
        if setting.offloads and replace(setting, offloads=False) in resident:
            continue
        if most > 1 and holds_copies(setting.strategy) and is_open(question.space.strategies):
            continue
        if _is_ours(question, setting):  # whose dry run takes as long as another: not if no step can be short enough
            alone = ((question.of_card(index, setting), card) for index, card in enumerate(question.cards))
            once = max(sum(each.seconds(card, setting.scheme)) for each, card in alone)
            if 2 * question.space.accumulation * once >= GAIN * best:
                continue
        found = fit(question, setting, most, best)
        looked_at.append((setting, found))
        if found is not None and not found.is_streaming:
            resident.add(setting)
        best = min(best, math.inf if found is None else _weighed(question, found))
    return looked_at


def _is_ours(question: Question, setting: Setting) -> bool:
    """Whether cards would share out rows by the planner's choice."""
    return shares_rows(setting.strategy) and is_open(question.space.strategies)


def _weighed(question: Question, found: Found) -> float:
    """Seconds, longer for what waits in host memory by the planner's choice, or for rows that are shared out so."""
    offloads = found.setting.offloads and is_open(question.space.offloads)
    weight = HOST_GAIN ** (offloads + (found.is_streaming and question.may_stream))
    return found.time * weight / (GAIN if _is_ours(question, found.setting) else 1)


def fit(question: Question, setting: Setting, most: float = 1.0, best: float = math.inf) -> Found | None:
    """The best cut for a setting, None if none fits: with headroom and blocks without activation checkpointing if
    possible, else as tight as it gets, else, or where that is worth it, with blocks that stream from host memory.

    most: see Terms. best: time of what was found before, weighed; blocks need not stream for a slower one.
    """
    if holds_copies(setting.strategy):
        return each_card(question, setting, lambda card, each: fit(card, each, most))
    found = find_cut(question, setting, Terms(1 - HEADROOM, spares=True)) if most <= 1 else None
    found = found or find_cut(question, setting, Terms(most))
    if found is None:
        return _streaming(question, setting, min(most, 1 - HEADROOM)) or _streaming(question, setting, most)
    if not found.fits_host(question.host_bytes):
        return None
    if found.is_streaming or most > 1 or not question.may_stream:
        return found
    # Blocks stream, too, where the fastest of several cards is too small for the blocks that it should compute. No step
    # with every block recomputed is shorter than this: the fastest card computes all, or all cards share evenly.
    whole = [(3 + question.space.has_prior) * sum(question.seconds(card, setting.scheme)) for card in question.cards]
    shortest = 1 / sum(1 / each for each in whole) if has_stages(setting.strategy) else min(whole)
    if min(found.time, best) <= HOST_GAIN * question.space.accumulation * shortest:
        return found
    faster = _streaming(question, setting, 1 - HEADROOM)
    return found if faster is None or found.time <= HOST_GAIN * faster.time else replace(faster, has_resident=True)


def each_card(question: Question, setting: Setting, find: _Find) -> Found | None:
    """Data and tokens: what is found for every card alone; None if one of them has no room, or if nobody asked
    for tokens and rows of such samples cannot be shared out."""
    plain, count = replace(setting, strategy="none", ahead=0), len(question.cards)
    try:
        found = [find(question.of_card(index, setting), plain) for index in range(count)]
    except NoForecast:
        if not _is_ours(question, setting):
            raise
        return None
    plans = [one.stages[0].plan for one in found if one is not None]
    kept, streamed = ([getattr(each, name) for each in plans] for name in ("num_uncheckpointed", "num_offloaded"))
    if shares_rows(setting.strategy) and None not in found and (len({*kept}) > 1 or len({*streamed}) > 1):
        # All cards recompute the same blocks, and the same ones stream.
        alike = min(kept), max(streamed)
        found = [find(question.of_card(index, setting, alike), plain) for index in range(count)]
    fitting = [one for one in found if one is not None]
    if len(fitting) < count:
        return None
    microbatches = (
        [1] * count if shares_rows(setting.strategy) else list(map(len, dealt(question.space.accumulation, count)))
    )
    together = replace(
        fitting[0],
        setting=setting,
        stages=tuple(one.stages[0] for one in fitting),
        time=max(one.time for one, number in zip(fitting, microbatches, strict=True) if number),
        offloaded_inputs=sum(one.offloaded_inputs for one in fitting),
    )
    return together if together.can_pin(question.host_bytes) and together.fits_host(question.host_bytes) else None


def _streaming(question: Question, setting: Setting, most: float) -> Found | None:
    """With as few blocks in host memory as it takes; the fastest cut, else the one that takes least of the host."""
    if not question.may_stream:
        return None
    found = find_cut(question, setting, Terms(most, streams="needed"))
    if found is None or found.fits_host(question.host_bytes):
        return found
    found = find_cut(question, setting, Terms(most, streams="needed", least="host bytes"))
    return found if found is None or found.fits_host(question.host_bytes) else None


# ---- the best cut for one setting


def find_cut(question: Question, setting: Setting, terms: Terms) -> Found | None:
    """The best cut for a setting, the user's where there is one; None if none keeps to the terms.

    Raises: ValueError for settings per device that are not as many as there are cards, and for impossible cuts.
    """
    question.check_counts()
    forecaster = question.forecaster(setting)
    stages = _CutSearch(question, setting, terms, forecaster).best()
    if stages is None:
        return None
    offloaded, count = forecaster.offloaded_inputs([stage.plan for stage in stages]), question.space.accumulation
    times = [stage.time for stage in stages]
    following = sum(times)  # of a further micro-batch
    if has_stages(setting.strategy):
        following = max(max(times), sum(times) / forecaster.held(0, len(times)))
    time = sum(times) + (count - 1) * following
    found = Found(setting, tuple(stages), time, offloaded, forecaster.loading_bytes)
    return found if found.can_pin(question.host_bytes) else None


_Value = tuple[float, float, float]  # of a cut: seconds, bytes that stream, share of the fullest card that is needed


class _CutSearch:
    def __init__(self, question: Question, setting: Setting, terms: Terms, forecaster: Forecaster) -> None:
        self._question, self._terms, self._forecaster = question, terms, forecaster
        space = self._space = question.space
        self._is_by_slowest = has_stages(setting.strategy) or space.is_cut_by_time
        # In steps of about 1e-12 s: sums of such are exact, so that cuts that take equally long have equal times, in
        # whatever order their blocks are added up, and memory decides.
        is_whole = forecaster.cost.is_whole
        times = (question.seconds(card, setting.scheme, is_whole=is_whole) for card in question.cards)
        self._seconds = [list(accumulate((round(s * 2**40) / 2**40 for s in card), initial=0.0)) for card in times]

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
                    if end <= start or (stage := self._stage(index, start, end)) is None:
                        continue
                    time, streamed, share = value
                    time = max(time, stage.time) if self._is_by_slowest else time + stage.time
                    added = time, streamed + stage.streamed, max(share, stage.share)
                    if end not in options or self._order(added) < self._order(options[end][0]):
                        options[end] = added, [*stages, stage]
            best = options
        return best[num_blocks][1] if num_blocks in best else None

    def _order(self, value: _Value) -> _Value:
        time, streamed, share = value
        return (time, streamed, share) if self._terms.least == "seconds" else (streamed, time, share)

    def _stage(self, index: int, start: int, end: int) -> Stage | None:
        """The best that a card can do with these blocks; None if it needs more than it may."""
        space, terms = self._space, self._terms
        given = space.uncheckpointed[index] if space.uncheckpointed else 0 if space.is_checkpointing else end - start
        offloaded = space.offloaded[index] if space.offloaded else 0
        if given + offloaded > end - start:
            return None
        plan = StagePlan(index, len(self._question.cards), start, end, given, offloaded)
        if not space.offloaded and terms.streams != "none":
            return self._streaming(plan)
        found = self._checked(plan)
        if found is None or space.uncheckpointed or not space.is_checkpointing or not terms.spares:
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
        forecaster, most = self._forecaster, plan.num_blocks - plan.num_uncheckpointed
        if self._terms.streams == "all":
            whole = replace(plan, num_offloaded=most)
            return self._checked(whole if forecaster.saved_bytes(whole) > 0 else plan)
        missing = self._missing(plan, forecaster.device("", plan))
        if missing <= 0:
            return self._checked(plan)
        largest = max(block.streaming for block in forecaster.cost.blocks[plan.start : plan.end])
        fewest = NUM_SLOTS + math.ceil(missing / max(1, largest))  # the slots take as much as the first ones free
        for count in range(fewest, most + 1):
            offloaded = replace(plan, num_offloaded=count)
            if forecaster.saved_bytes(offloaded) >= missing and (stage := self._checked(offloaded)) is not None:
                return stage
        return None

    def _missing(self, plan: StagePlan, found: DeviceForecast) -> float:
        """Bytes that a stage needs beyond what it may; at most 0 where it fits."""
        over = [found.needed - self._terms.most * max(1, self._question.cards[plan.stage].usable_bytes)]
        if self._space.memory_limit_gb:
            over.append(found.weights - self._space.memory_limit_gb[plan.stage] * 1e9)
        return max(over)

    def _checked(self, plan: StagePlan) -> Stage | None:
        """The stage, None if it needs more of its card than it may."""
        card, forecaster, link = self._question.cards[plan.stage], self._forecaster, self._question.link
        found = forecaster.device(card.name, plan)
        if self._missing(plan, found) > 0:
            return None
        # A micro-batch's forward and backward, one without the LoRA, and its forward again where blocks are recomputed.
        seconds, passes = self._seconds[plan.stage], 2 + self._space.has_prior
        recomputing = seconds[plan.first_spared] - seconds[plan.start]
        computing = passes * (seconds[plan.end] - seconds[plan.start]) + recomputing
        # Beside the kernels: weights for each forward and once more for the backward, inputs there and back.
        streamed = forecaster.streamed_bytes(plan)
        streaming = passes * streamed / link
        copying = streaming + 2 * forecaster.leaving(plan) / link
        time = max(computing, copying) + UNHIDDEN * min(computing, streaming)
        return Stage(plan, found, time, found.needed / max(1, card.usable_bytes), streamed)
