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

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Literal, NamedTuple

import torch

from ..config.model import has_stages, holds_copies
from ..parallel.local.data_parallel import num_dealt
from ..parallel.offload.copies import NUM_SLOTS
from .memory import DeviceForecast, Forecaster, StagePlan
from .question import OFFLOADS, STRATEGIES, Question, Setting, is_open

HEADROOM = 0.05  # of a card, left free by what the planner chooses to keep; the forecast may be off by as much
PINNED_SHARE = 0.8  # of free host memory that may be pinned; the system needs some that it can move
HOST_SHARE = 0.9  # of free host memory, for blocks that stream from there: it is pinned and cannot be swapped out
# Of streaming, or of what is computed beside it if that is shorter, this share is not hidden: 0 to 0.45 were measured
# by benchmarks/weight_offload.py on an H200 (docs/internals/experiments.md, 2026-11-22).
UNHIDDEN = 0.3
# How many times faster a setting must be for blocks, and again for block inputs, to wait in host memory where something
# fits without: how far copies are hidden is an estimate.
HOST_GAIN = 1.1

# What is tried where nothing fits.
_CARD_SIZES_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)
_RESOLUTIONS = tuple(range(8192, 255, -64))
_RANKS = (64, 32, 16, 8, 4)
_MOST_CHANGES = 3


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
    def host_bytes(self) -> int:
        """Host memory that it takes: streamed blocks, and one layer on its way from the file or later block inputs."""
        return sum(stage.streamed for stage in self.stages) + max(self.loading, self.offloaded_inputs)

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
    looked at where the same does not fit without, or only with streamed blocks, and has to be worth it.
    """
    looked_at = _look(question, 1.0)
    if question.space.memory_limit_gb and all(found is None for _, found in looked_at):
        looked_at = _look(question, math.inf)  # the user says what fits
    fitting = [found for _, found in looked_at if found is not None]
    best = [
        min(those, key=lambda found: (found.setting.optimizer == "adamw8bit", _weighed(question, found)))
        for must_stream in (False, True)
        if (those := [each for each in fitting if (each.is_streaming and not each.has_resident) == must_stream])
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
        if most > 1 and setting.holds_copies and is_open(question.space.strategies):
            continue
        found = fit(question, setting, most, best)
        looked_at.append((setting, found))
        if found is not None and not found.is_streaming:
            resident.add(setting)
        best = min(best, math.inf if found is None else _weighed(question, found))
    return looked_at


def _weighed(question: Question, found: Found) -> float:
    """Seconds, longer for what waits in host memory by the planner's choice."""
    offloads = found.setting.offloads and is_open(question.space.offloads)
    return found.time * HOST_GAIN ** (offloads + (found.is_streaming and question.may_stream))


def fit(question: Question, setting: Setting, most: float = 1.0, best: float = math.inf) -> Found | None:
    """The best cut for a setting, None if none fits: with headroom and blocks without activation checkpointing if
    possible, else as tight as it gets, else, or where that is worth it, with blocks that stream from host memory.

    most: see Terms. best: time of what was found before, weighed; blocks need not stream for a slower one.
    """
    if setting.holds_copies:
        return _each_card(question, setting, lambda card, each: fit(card, each, most))
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
    whole = [3 * sum(question.seconds(card, setting.scheme)) for card in question.cards]
    shortest = 1 / sum(1 / each for each in whole) if has_stages(setting.strategy) else min(whole)
    if min(found.time, best) <= HOST_GAIN * question.space.accumulation * shortest:
        return found
    faster = _streaming(question, setting, 1 - HEADROOM)
    return found if faster is None or found.time <= HOST_GAIN * faster.time else replace(faster, has_resident=True)


def _each_card(question: Question, setting: Setting, find: _Find) -> Found | None:
    """Data and tokens: what is found for every card alone; None if one of them has no room."""
    plain, count = replace(setting, strategy="none", ahead=0), len(question.cards)
    found = [find(question.of_card(index, setting), plain) for index in range(count)]
    kept = {one.stages[0].plan.num_uncheckpointed for one in found if one is not None}
    if setting.shares_rows and None not in found and len(kept) > 1:  # all cards recompute the same blocks
        found = [find(question.of_card(index, setting, min(kept)), plain) for index in range(count)]
    fitting = [one for one in found if one is not None]
    if len(fitting) < count:
        return None
    microbatches = [1] * count if setting.shares_rows else num_dealt(question.space.accumulation, count)
    return replace(
        fitting[0],
        setting=setting,
        stages=tuple(one.stages[0] for one in fitting),
        time=max(one.time for one, number in zip(fitting, microbatches, strict=True) if number),
        offloaded_inputs=sum(one.offloaded_inputs for one in fitting),
    )


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
        times = (question.seconds(card, setting.scheme) for card in question.cards)
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
        # A micro-batch's forward and backward, and its forward again where blocks are recomputed.
        seconds = self._seconds[plan.stage]
        computing = 2 * (seconds[plan.end] - seconds[plan.start]) + (seconds[plan.first_spared] - seconds[plan.start])
        # Beside the kernels: weights for the forward and once more for the backward, inputs there and back.
        streamed = forecaster.streamed_bytes(plan)
        streaming = 2 * streamed / link
        copying = streaming + 2 * forecaster.leaving(plan) / link
        time = max(computing, copying) + UNHIDDEN * min(computing, streaming)
        return Stage(plan, found, time, found.needed / max(1, card.usable_bytes), streamed)


# ---- where nothing fits


def is_possible(question: Question) -> bool:
    """Whether anything fits."""
    return any(fit(question, setting, question.most, best=0.0) for setting in _leanest(question))


def needed_at_least(question: Question) -> Found | None:
    """What fits the cards and takes least of the host, which may be more than it has. Where nothing fits the cards,
    what needs the smallest share of one, with as many blocks in host memory as may be. None if there is no such cut."""
    if question.may_stream:
        terms = Terms(question.most, streams="needed", least="host bytes")
        if found := [each for setting in question.settings() if (each := _cut(question, setting, terms))]:
            return min(found, key=lambda each: each.host_bytes)
    unlimited = question.changed(space=replace(question.space, memory_limit_gb=()), host_bytes=None)
    terms = Terms(math.inf, streams="all" if question.may_stream else "none")
    found = [each for setting in _leanest(question) if (each := _cut(unlimited, setting, terms))]
    return min(found, key=lambda each: max(stage.share for stage in each.stages), default=None)


def _cut(question: Question, setting: Setting, terms: Terms) -> Found | None:
    """As find_cut; each card alone where each has a copy of the model, whose blocks never stream."""
    if not setting.holds_copies:
        return find_cut(question, setting, terms)
    plain = replace(terms, streams="none")
    return _each_card(question, setting, lambda card, each: find_cut(card, each, plain))


def _leanest(question: Question) -> list[Setting]:
    """The settings that may need the least: where offloading is ours to choose, those without need more."""
    every = question.settings()
    return [each for each in every if each.offloads] or every if question.host_bytes is None else every


def describe_refusal(question: Question) -> str:
    """What is needed against what is there, and the changes that were computed to be enough."""
    best, space, cards = needed_at_least(question), question.space, question.cards
    if best is None:
        given = f"{list(space.uncheckpointed)} and split.offloaded_blocks = {list(space.offloaded)}"
        return (
            f"no cut of {len(question.model.names)} blocks has split.blocks_without_checkpointing = {given}: a card "
            "needs a block for each that it keeps or streams; give smaller numbers, or leave them out"
        )
    frames = f", {question.frames} frames" if question.frames > 1 else ""
    lines = [
        f"does not fit: at {question.bucket[1]}x{question.bucket[0]} {question.unit}{frames}, batch "
        f"{space.batch_size}, rank {space.lora.rank}, {best.setting.describe()} the best cut needs"
    ]
    for card, stage in zip(cards, best.stages, strict=True):
        needed, there, weights = stage.forecast.needed / 1e9, card.usable_bytes / 1e9, stage.forecast.weights / 1e9
        verdict = f"{needed - there:.2f} GB are missing" if needed > there else "fits"
        away = f" ({stage.plan.num_offloaded} in host memory)" if stage.plan.num_offloaded else ""
        what = f"{stage.plan.num_blocks} blocks{away}, {needed:.2f} GB of {there:.2f} GB"
        lines.append(f"  {card.name}: {what}, {verdict} (weights {weights:.2f} GB)")
    pinned, host, free = (size / 1e9 for size in (best.offloaded_inputs, best.host_bytes, question.host_bytes or 0))
    if not best.can_pin(question.host_bytes):
        lines.append(f"  host memory: {pinned:.1f} GB would be pinned for block inputs, {free:.1f} GB are free")
    elif not best.fits_host(question.host_bytes):
        lines.append(f"  host memory: {host:.2f} GB, {free:.2f} GB are free, and a tenth is left to others")
    if space.memory_limit_gb:
        lines.append(f"  memory_limit_gb allows weights of {list(space.memory_limit_gb)} GB")
    helps = what_helps(question)
    lines.append("Each of these would make it fit:" if helps else "None of the changes that were tried makes it fit")
    return "\n".join([*lines, *(f"  {line}" for line in helps)])


class _Change(NamedTuple):
    """Words for a change, and other values of a SearchSpace and a Question with it."""

    text: str
    space: Mapping[str, Any] = {}
    others: Mapping[str, Any] = {}

    def of(self, question: Question) -> Question:
        """The question with it."""
        return question.changed(space=replace(question.space, **self.space), **self.others)


def what_helps(question: Question) -> list[str]:
    """The best three single changes that make the job fit; where there is none, as many at once as it takes."""
    single, sizes = list(_choices(question)), _sizes(question)
    if found := list(islice(_single_changes(question, single, sizes), _MOST_CHANGES)):
        return found
    texts: list[str] = []
    for change in (*single, *(ladder[-1] for ladder in sizes if ladder)):
        texts, question = [*texts, change.text], change.of(question)
        if len(texts) > 1 and is_possible(question):
            return [" and ".join(texts)]
    return []


def _single_changes(question: Question, single: list[_Change], sizes: list[list[_Change]]) -> Iterator[str]:
    yield from (change.text for change in single if is_possible(change.of(question)))
    for ladder in sizes:
        index = bisect_left(ladder, True, key=lambda change: is_possible(change.of(question)))
        yield from [ladder[index].text] if index < len(ladder) else []
    space, last = question.space, question.cards[-1]
    if space.split_at or space.uncheckpointed or space.offloaded or space.memory_limit_gb:
        return  # settings that name a value for each card
    device = torch.device(last.device.type, max(card.device.index or 0 for card in question.cards) + 1)

    def is_enough(size_gb: int) -> bool:
        added = replace(last, device=device, usable_bytes=int(size_gb * 1e9))
        return is_possible(question.changed(cards=(*question.cards, added)[: len(question.model.names)]))

    index = bisect_left(_CARD_SIZES_GB, True, key=is_enough)
    yield from [f"another card of {_CARD_SIZES_GB[index]} GB"] if index < len(_CARD_SIZES_GB) else []


def _choices(question: Question) -> Iterator[_Change]:
    """Settings that can be changed to one other, the cheapest for the result first."""
    space = question.space
    if not space.is_checkpointing:
        yield _Change("train.gradient_checkpointing = true", {"is_checkpointing": True})
    elif not is_open(space.offloads):
        yield _Change('train.offload_activations = "auto"', {"offloads": OFFLOADS})
    if space.uncheckpointed:
        yield _Change("split.blocks_without_checkpointing = []", {"uncheckpointed": ()})
    if space.offloaded:
        yield _Change("split.offloaded_blocks = []", {"offloaded": ()})
    if space.memory_limit_gb:
        yield _Change("split.memory_limit_gb = []", {"memory_limit_gb": ()})
    if space.split_at:
        yield _Change('split.balance = "memory"', {"split_at": ()})
    if all(map(holds_copies, space.strategies)):
        yield _Change('parallel.strategy = "auto"', {"strategies": STRATEGIES})
    if not is_open(space.schemes) and not space.schemes[0].endswith("-compute"):  # none, or one that only stores
        for scheme in [each for each in question.able_schemes if each != space.schemes[0]][:1]:
            yield _Change(f'model.quantize = "{scheme}"', {"schemes": (scheme,)})
    if space.optimizers == ("adamw",):
        yield _Change('optimizer.name = "adamw8bit"', {"optimizers": ("adamw8bit",)})
    if space.batch_size > 1:
        count = space.batch_size * space.accumulation
        yield _Change(f"train.batch_size = 1 with accumulation = {count}", {"batch_size": 1, "accumulation": count})


def _sizes(question: Question) -> list[list[_Change]]:
    """Smaller resolutions, shorter clips and lower ranks, the largest first."""
    space, variant, now = question.space, question.model.variant, question.space.resolution
    stride, sides = question.model.family.latent_of(variant).frame_stride, [n for n in _RESOLUTIONS if n < now]
    buckets = {n: tuple(max(64, side * n // now // 64 * 64) for side in question.bucket) for n in sides}
    lengths = range(question.frames - stride, 0 if variant.condition == "none" else stride, -stride)
    ranks = [rank for rank in _RANKS if rank < space.lora.rank]
    return [
        [_Change(f"data.resolutions = [{n}]", {"resolution": n}, {"bucket": each}) for n, each in buckets.items()],
        [_Change(f"data.frames = [{each}]", others={"frames": each}) for each in lengths],
        [_Change(f"lora.rank = {rank}", {"lora": replace(space.lora, rank=rank)}) for rank in ranks],
    ]
