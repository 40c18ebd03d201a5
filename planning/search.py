"""Which setting is the fastest that fits, and the best cut of the model over the cards for each; and what is missing.

What the user has set is only checked. The time of a step with `a` micro-batches over stages that take t_k each:

    one after the other   a * sum(t)
    in a pipeline         sum(t) + (a - 1) * max(max(t), sum(t) / p)     p micro-batches held by the first stage
    data parallel         max(t_k * micro-batches of card k)             the whole model on each card
    tokens                a * max(t_k)                                   t_k with the card's share of the rows

Embedders, tail, copies between cards and the optimizer are left out of t_k.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, product
from typing import Any, Literal, NamedTuple

from ..config.job import job_to_dict, make_job
from ..config.model import has_stages, holds_copies, shares_rows
from ..config.training import MOST_MICRO_BATCHES
from ..parallel.local.data_parallel import distributed
from ..parallel.offload.copies import NUM_SLOTS
from ..parallel.placement import find_cuts
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
HOST_GAIN = 1.1  # times faster, for blocks, and again for inputs, to wait in host memory where something fits without
_RESOLUTIONS = tuple(range(8192, 255, -64))
_RANKS = (64, 32, 16, 8, 4)
_SECONDS = (480, 240, 120, 60, 30, 15)


class Terms(NamedTuple):
    """What a cut has to keep to. most: share of a card that may be needed; inf where the user vouches for what does not
    fit. blocks: where the user has not said: some spare activation checkpointing where there is room, or as many as
    needed, or all, stream from host memory. least: what a cut is to have least of."""

    most: float
    blocks: Literal["plain", "spares", "needed", "all"] = "plain"
    least: Literal["seconds", "host bytes"] = "seconds"


@dataclass(frozen=True)
class Found:
    """How a setting would run. devices: of each card, in execution order. step_s: of a step at this size, seconds of
    cards of speed 1. offloaded_inputs, loading: bytes in host memory: of block inputs, and while weights are read.
    has_resident: whether it also fits without blocks in host memory, and is slower."""

    setting: Setting
    devices: tuple[DeviceForecast, ...]
    step_s: float
    offloaded_inputs: int
    loading: int
    has_resident: bool = False

    @property
    def is_streaming(self) -> bool:
        return any(device.num_offloaded for device in self.devices)

    @property
    def must_stream(self) -> bool:
        """Whether it does not fit otherwise."""
        return self.is_streaming and not self.has_resident

    @property
    def host_bytes(self) -> int:
        """Host memory that it takes: streamed blocks, and one layer on its way from the file or later block inputs."""
        held = self.devices[:1] if shares_rows(self.setting.strategy) else self.devices  # which stream from one place
        return sum(device.streamed for device in held) + max(self.loading, self.offloaded_inputs)

    def fits_host(self, free: int | None) -> bool:
        """Whether so many bytes of host memory have room for what streams from there or waits there."""
        if free is None or not (self.is_streaming or self.offloaded_inputs):
            return True
        return self.offloaded_inputs <= PINNED_SHARE * free and self.host_bytes <= HOST_SHARE * free


Looked = list[tuple[Setting, Found | None]]  # every setting that was looked at


def find_fastest(question: Question) -> tuple[Found | None, Looked]:
    """The fastest setting that fits, None if none does; and everything that was looked at. 8-bit optimizer state is for
    what would not fit otherwise; streaming and shared rows by the planner's choice have to be worth it."""
    looked_at = _look(question, 1.0)
    if question.job.split.memory_limit_gb and all(found is None for _, found in looked_at):
        looked_at = _look(question, math.inf)  # the user says what fits
    fitting = [found for _, found in looked_at if found is not None]

    if any(found.setting.optimizer == "adamw" and not found.must_stream for found in fitting):
        fitting = [
            each for each in fitting if each.setting.optimizer != "adamw8bit" or not shares_rows(each.setting.strategy)
        ]
    best = [
        min(those, key=lambda found: (found.setting.optimizer == "adamw8bit", _weighed(question, found)))
        for kind in product((False, True), repeat=2)
        if (those := [each for each in fitting if (each.must_stream, shares_rows(each.setting.strategy)) == kind])
    ]
    return min(best, key=lambda found: _weighed(question, found), default=None), looked_at


def _look(question: Question, most: float) -> Looked:
    """Every setting worth looking at; where nothing fits copies of the model only if the user names them."""
    looked_at, best = Looked(), math.inf
    for setting in question.settings():
        plain = replace(setting, offloads=False)
        if setting.offloads and any(each == plain and found and not found.is_streaming for each, found in looked_at):
            continue
        if most > 1 and holds_copies(setting.strategy) and is_open(question.open.strategies):
            continue
        if _is_ours(question, setting):  # whose dry run takes as long as another: not if no step can be short enough
            alone = ((question.of_card(index, setting), card) for index, card in enumerate(question.cards))
            once = max(sum(each.seconds(card, setting.scheme)) for each, card in alone)
            if 2 * question.accumulation * once >= GAIN * best:
                continue
        found = fit(question, setting, most, best)
        looked_at.append((setting, found))
        best = min(best, math.inf if found is None else _weighed(question, found))
    return looked_at


def _is_ours(question: Question, setting: Setting) -> bool:
    """Whether cards would share out rows by the planner's choice."""
    return shares_rows(setting.strategy) and is_open(question.open.strategies)


def _weighed(question: Question, found: Found) -> float:
    """Seconds, longer for what waits in host memory by the planner's choice, or for rows that are shared out so."""
    offloads = found.setting.offloads and is_open(question.open.offloads)
    weight = HOST_GAIN ** (offloads + (found.is_streaming and question.may_stream))
    return found.step_s * weight / (GAIN if _is_ours(question, found.setting) else 1)


def fit(question: Question, setting: Setting, most: float = 1.0, best: float = math.inf) -> Found | None:
    """The best cut for a setting, None if none fits: with headroom and blocks without activation checkpointing if
    possible, else as tight as it gets, else, or where that is worth it, with blocks that stream from host memory.
    most: see Terms. best: weighed time of what was found before; blocks need not stream for a slower one."""
    if holds_copies(setting.strategy):
        return each_card(question, setting, lambda card, each: fit(card, each, most))
    found = find_cut(question, setting, Terms(1 - HEADROOM, "spares")) if most <= 1 else None
    found = found or find_cut(question, setting, Terms(most))
    if found is None:
        return _streaming(question, setting, min(most, 1 - HEADROOM)) or _streaming(question, setting, most)
    if not found.fits_host(question.host_bytes):
        return None
    if found.is_streaming or most > 1 or not question.may_stream:
        return found
    # Blocks stream, too, where the fastest of several cards is too small for its blocks. No step with every block
    # recomputed is shorter than this: the fastest card computes all, or all cards share evenly.
    whole = [(question.passes + 1) * sum(question.seconds(card, setting.scheme)) for card in question.cards]
    shortest = 1 / sum(1 / each for each in whole) if has_stages(setting.strategy) else min(whole)
    if min(found.step_s, best) <= HOST_GAIN * question.accumulation * shortest:
        return found
    faster = _streaming(question, setting, 1 - HEADROOM)
    return found if faster is None or found.step_s <= HOST_GAIN * faster.step_s else replace(faster, has_resident=True)


def each_card(question: Question, setting: Setting, find: Callable[[Question, Setting], Found | None]) -> Found | None:
    """Data and tokens: what is found for every card alone; None if one has no room, or for rows that nobody requested
    and that cannot be shared out."""
    plain, count = replace(setting, strategy="none", ahead=0), len(question.cards)

    def alone(alike: tuple[int, int] | None = None) -> list[Found] | None:
        found = (find(question.of_card(index, setting, alike), plain) for index in range(count))
        fitting = [each for each in found if each is not None]
        return fitting if len(fitting) == count else None

    try:
        fitting = alone()
    except NoForecast:
        if not _is_ours(question, setting):
            raise
        return None
    plans = [one.devices[0] for one in fitting or ()]
    kept, streamed = ({getattr(each, name) for each in plans} for name in ("num_uncheckpointed", "num_offloaded"))
    if shares_rows(setting.strategy) and (len(kept) > 1 or len(streamed) > 1):
        fitting = alone((min(kept), max(streamed)))  # all recompute the same blocks, and the same ones stream
    if fitting is None:
        return None
    numbers = [1] * count if shares_rows(setting.strategy) else map(len, distributed(question.accumulation, count))
    whole = replace(
        fitting[0],
        setting=setting,
        devices=tuple(one.devices[0] for one in fitting),
        step_s=max(one.step_s for one, number in zip(fitting, numbers, strict=True) if number),
        offloaded_inputs=sum(one.offloaded_inputs for one in fitting),
    )
    return whole if whole.fits_host(question.host_bytes) else None


def _streaming(question: Question, setting: Setting, most: float) -> Found | None:
    """With as few blocks in host memory as it takes; the fastest cut, else the one that takes least of the host."""
    for terms in (Terms(most, "needed"), Terms(most, "needed", "host bytes")) if question.may_stream else ():
        found = find_cut(question, setting, terms)
        if found is None or found.fits_host(question.host_bytes):
            return found
    return None


def find_cut(question: Question, setting: Setting, terms: Terms) -> Found | None:
    """The best cut for a setting, the user's where there is one; None if none keeps to the terms.
    Raises: ValueError for settings per device that are not one per card, and for impossible cuts."""
    question.check_counts()
    forecaster, is_by_time = question.forecaster(setting), terms.least == "seconds"
    is_by_slowest = has_stages(setting.strategy) or question.job.split.balance == "time"

    def cost(stages: Sequence[DeviceForecast]) -> tuple[float, float, float]:
        """Of cuts that are equally good, one that streams least or takes least, then that of the emptiest card."""
        time = (max if is_by_slowest else sum)(stage.time for stage in stages)
        streamed = sum(stage.streamed for stage in stages)
        first = (time, streamed) if is_by_time else (streamed, time)
        return *first, max(stage.share for stage in stages)

    make = _Stages(question, setting, terms, forecaster).make
    stages = find_cuts(len(question.model.names), len(question.cards), make, cost, question.bounds)
    if stages is None:
        return None
    offloaded, times = forecaster.offloaded_inputs(stages), [each.time for each in stages]
    time = following = sum(times)
    if has_stages(setting.strategy):
        following = max(max(times), time / forecaster.held(0, len(times)))  # of a further micro-batch
    time += (question.accumulation - 1) * following
    return Found(setting, tuple(stages), time, offloaded, forecaster.loading_bytes)


class _Stages:
    def __init__(self, question: Question, setting: Setting, terms: Terms, forecaster: Forecaster) -> None:
        self._question, self._terms, self._forecaster, self._split = question, terms, forecaster, question.job.split
        # In steps of about 1e-12 s sums are exact, so cuts that take equally long have equal times, and memory decides.
        whole = forecaster.cost.is_whole
        times = (question.seconds(card, setting.scheme, is_whole=whole) for card in question.cards)
        self._seconds = [list(accumulate((round(s * 2**40) / 2**40 for s in card), initial=0.0)) for card in times]

    def make(self, index: int, start: int, end: int) -> DeviceForecast | None:
        """The best that a card can do with these blocks; None if it needs more than it may."""
        kept, streamed = self._split.blocks_without_checkpointing, self._split.offloaded_blocks
        blocks, is_checkpointing = self._terms.blocks, self._question.is_checkpointing
        given = kept[index] if kept else 0 if is_checkpointing else end - start
        offloaded = streamed[index] if streamed else 0
        if given + offloaded > end - start:
            return None
        plan = StagePlan(index, len(self._question.cards), start, end, given, offloaded)
        if not streamed and blocks in ("needed", "all"):
            return self._streaming(plan)
        found = self._checked(plan)
        if found is None or kept or not is_checkpointing or blocks != "spares":
            return found

        def with_kept(count: int) -> DeviceForecast | None:
            return self._checked(replace(plan, num_uncheckpointed=count))

        counts = range(1, end - start - offloaded + 1)
        return with_kept(bisect_left(counts, True, key=lambda count: with_kept(count) is None))

    def _streaming(self, plan: StagePlan) -> DeviceForecast | None:
        """With as few blocks in host memory as let the stage fit; no activations depend on them. None for none."""
        forecaster, most = self._forecaster, plan.num_blocks - plan.num_uncheckpointed
        if self._terms.blocks == "all":
            whole = replace(plan, num_offloaded=most)
            return self._checked(whole if forecaster.saved_bytes(whole) > 0 else plan)
        missing = self._missing(forecaster.device("", plan))
        if missing <= 0:
            return self._checked(plan)
        largest = max(block.streaming for block in forecaster.cost.blocks[plan.start : plan.end])
        fewest = NUM_SLOTS + math.ceil(missing / max(1, largest))  # the slots take as much as the first ones free
        for count in range(fewest, most + 1):
            offloaded = replace(plan, num_offloaded=count)
            if forecaster.saved_bytes(offloaded) >= missing and (stage := self._checked(offloaded)) is not None:
                return stage
        return None

    def _missing(self, found: DeviceForecast) -> float:
        """Bytes that a stage needs beyond what it may; at most 0 where it fits."""
        over = [found.needed - self._terms.most * max(1, self._question.cards[found.stage].usable_bytes)]
        if self._split.memory_limit_gb:
            over.append(found.weights - self._split.memory_limit_gb[found.stage] * 1e9)
        return max(over)

    def _checked(self, plan: StagePlan) -> DeviceForecast | None:
        """The stage, None if it needs more of its card than it may."""
        card, forecaster, link = self._question.cards[plan.stage], self._forecaster, self._question.link
        found = forecaster.device(card.name, plan)
        if self._missing(found) > 0:
            return None
        # A micro-batch's forward and backward, one without the LoRA, and its forward again where blocks are recomputed.
        seconds, passes = self._seconds[plan.stage], self._question.passes
        recomputing = seconds[plan.first_spared] - seconds[plan.start]
        computing = passes * (seconds[plan.end] - seconds[plan.start]) + recomputing
        # Beside the kernels: weights for each forward and once more for the backward, inputs there and back.
        streaming = passes * found.streamed / link
        copying = streaming + 2 * forecaster.leaving(plan) / link
        time = max(computing, copying) + UNHIDDEN * min(computing, streaming)
        return replace(found, usable=card.usable_bytes, time=time)


# ---- what is missing where nothing fits, and the changes that were computed to be enough


def is_possible(question: Question) -> bool:
    """Whether anything fits."""
    return any(fit(question, setting, question.most, best=0.0) for setting in _leanest(question))


def needed_at_least(question: Question) -> Found | None:
    """What fits the cards and takes least of the host; else what needs the smallest share of a card; None if no cut."""
    if question.may_stream:
        terms = Terms(question.most, "needed", "host bytes")
        if found := [each for setting in question.settings() if (each := _cut(question, setting, terms))]:
            return min(found, key=lambda each: each.host_bytes)
    split = replace(question.job.split, memory_limit_gb=())
    unlimited = question.changed(job=replace(question.job, split=split), host_bytes=None)
    terms = Terms(math.inf, "all" if question.may_stream else "plain")
    found = [each for setting in _leanest(question) if (each := _cut(unlimited, setting, terms))]
    return min(found, key=lambda each: max(device.share for device in each.devices), default=None)


def _cut(question: Question, setting: Setting, terms: Terms) -> Found | None:
    """As find_cut; each card alone where each has a copy of the model. Of tokens alone its blocks may stream."""
    if not holds_copies(setting.strategy):
        return find_cut(question, setting, terms)
    plain = terms if shares_rows(setting.strategy) else terms._replace(blocks="plain")
    return each_card(question, setting, lambda card, each: find_cut(card, each, plain))


def _leanest(question: Question) -> list[Setting]:
    """The settings that may need the least: where offloading is ours to choose, those without need more."""
    every = question.settings()
    return [each for each in every if each.offloads] or every if question.host_bytes is None else every


def describe_refusal(question: Question) -> str:
    """What is needed against what is there, and the changes that would be enough."""
    best, job = needed_at_least(question), question.job
    if best is None:
        kept, streamed = list(job.split.blocks_without_checkpointing), list(job.split.offloaded_blocks)
        given = f"{kept} and split.offloaded_blocks = {streamed}"
        return (
            f"no cut of {len(question.model.names)} blocks has split.blocks_without_checkpointing = {given}: a card "
            "needs a block for each that it keeps or streams; give smaller numbers, or leave them out"
        )
    frames = f", {question.frames} frames" if question.frames > 1 else ""
    lines = [
        f"does not fit: at {question.bucket[1]}x{question.bucket[0]} {question.unit}{frames}, batch "
        f"{job.train.batch_size}, rank {job.lora.rank}, {best.setting.describe()} the best cut needs"
    ]
    for stage in best.devices:
        needed, there, weights = stage.needed / 1e9, stage.usable / 1e9, stage.weights / 1e9
        verdict = f"{needed - there:.2f} GB are missing" if needed > there else "fits"
        away = f" ({stage.num_offloaded} in host memory)" if stage.num_offloaded else ""
        what = f"{stage.num_blocks} blocks{away}, {needed:.2f} GB of {there:.2f} GB"
        lines.append(f"  {stage.device}: {what}, {verdict} (weights {weights:.2f} GB)")
    if not best.fits_host(question.host_bytes):
        sizes = (best.host_bytes, best.offloaded_inputs, question.host_bytes or 0)
        host, pinned, free = (f"{size / 1e9:.2f} GB" for size in sizes)
        lines.append(f"  host memory: {host}, {pinned} of it for block inputs; {free} are free, a part for others")
    if job.split.memory_limit_gb:
        lines.append(f"  memory_limit_gb allows weights of {list(job.split.memory_limit_gb)} GB")
    helps = what_helps(question)
    lines.append("Each of these would make it fit:" if helps else "None of the changes that were tried makes it fit")
    return "\n".join([*lines, *(f"  {line}" for line in helps)])


class _Change(NamedTuple):
    """Other values of keys of a job, and of fields of a Question with them."""

    keys: Mapping[str, Any]
    others: Mapping[str, Any] = {}

    def __str__(self) -> str:
        return " with ".join(f"{key} = {json.dumps(value)}" for key, value in self.keys.items())

    def of(self, question: Question) -> Question:
        """The question with it."""
        values = job_to_dict(question.job)
        for section, _, name in (key.partition(".") for key in self.keys):
            values[section][name] = self.keys[f"{section}.{name}"]
        return question.changed(job=make_job(values), **self.others)


def what_helps(question: Question) -> list[str]:
    """The best three single changes that make the job fit; where there is none, as many at once as it takes."""
    ladders = [*([each] for each in _choices(question)), *filter(None, _sizes(question))]

    def enough() -> Iterator[str]:
        for ladder in ladders:
            index = bisect_left(ladder, True, key=lambda change: is_possible(change.of(question)))
            yield from map(str, ladder[index : index + 1])

    if found := list(islice(enough(), 3)):
        return found
    texts: list[str] = []
    for change in (ladder[-1] for ladder in ladders):
        texts, question = [*texts, str(change)], change.of(question)
        if len(texts) > 1 and is_possible(question):
            return [" and ".join(texts)]
    return []


def _choices(question: Question) -> list[_Change]:
    """Settings that can be changed to one other, the cheapest for the result first."""
    job, split, now = question.job, question.job.split, question.open
    is_eight_bit = is_open(now.schemes) or now.schemes[0].endswith("-compute")  # not none, nor one that only stores
    other = next((each for each in question.able_schemes if each != now.schemes[0]), "")
    count = job.train.batch_size * question.accumulation
    rows: list[tuple[object, dict[str, Any]]] = [
        (not question.is_checkpointing, {"train.gradient_checkpointing": True}),
        (question.is_checkpointing and not is_open(now.offloads), {"train.offload_activations": "auto"}),
        (split.blocks_without_checkpointing, {"split.blocks_without_checkpointing": []}),
        (split.offloaded_blocks, {"split.offloaded_blocks": []}),
        (split.memory_limit_gb, {"split.memory_limit_gb": []}),
        (split.split_at, {"split.balance": "memory", "split.split_at": []}),
        (all(map(holds_copies, now.strategies)), {"parallel.strategy": "auto"}),
        (other and not is_eight_bit, {"model.quantize": other}),
        (now.optimizers == ("adamw",), {"optimizer.name": "adamw8bit"}),
        (
            job.train.batch_size > 1 and count <= MOST_MICRO_BATCHES,
            {"train.batch_size": 1, "train.gradient_accumulation_steps": count},
        ),
    ]
    return [_Change(keys) for is_possible, keys in rows if is_possible]


def _sizes(question: Question) -> list[list[_Change]]:
    """Smaller resolutions, shorter clips or sounds, and lower ranks, the largest first."""
    job, variant, now = question.job, question.model.variant, question.job.data.largest_resolution
    own = max((n for folder in job.data.folders for n in folder.resolutions), default=0)  # which stay as they are
    latent, sides = question.model.family.latent_of(variant), [n for n in _RESOLUTIONS if own <= n < now]
    buckets = {n: tuple(max(64, side * n // now // 64 * 64) for side in question.bucket) for n in sides}
    shortest = 1 if variant.condition == "none" else 2
    lengths = [n for n in range(question.frames - 1, shortest - 1, -1) if latent.is_length(n)]
    smaller = [_Change({"data.resolutions": [n]}, {"bucket": each}) for n, each in buckets.items()]
    if rows := latent.audio_rows:
        squares = {n: round(math.sqrt(n * latent.sound_rate * rows)) for n in _SECONDS}
        now = question.bucket[0]
        smaller = [_Change({"data.seconds": n}, {"bucket": (k, k)}) for n, k in squares.items() if 0 < k < now]
    shorter = [_Change({"data.frames": [each]}, {"frames": each}) for each in lengths]
    ranks = () if job.lora.start_from else _RANKS  # whose file has the rank that it has
    sizes = [] if job.data.encoded else [smaller, shorter]  # what arrived encoded has the sizes that it has
    return [*sizes, [_Change({"lora.rank": rank}) for rank in ranks if rank < job.lora.rank]]
