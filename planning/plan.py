"""The plan of a job: what was found to be fastest; or why nothing fits, and which changes would make it fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..config.model import divides_blocks, has_stages, holds_copies
from ..parallel.placement import Placement
from .cards import Card
from .memory import DeviceForecast
from .question import OFFLOADS, STRATEGIES, Question, SearchSpace, Setting, is_open, strategies_on, why_not_shared
from .search import HOST_GAIN, Found, find_fastest, fit, is_possible, needed_at_least

_SEVERAL = 4  # micro-batches that a hint speaks of
_CARD_SIZES_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)
_RESOLUTIONS = tuple(range(8192, 255, -64))
_RANKS = (64, 32, 16, 8, 4)
_MOST_CHANGES = 3


class Alternative(NamedTuple):
    """A setting that was looked at; times_longer than the chosen one, None if it does not fit."""

    setting: Setting
    times_longer: float | None
    is_streaming: bool


@dataclass(frozen=True)
class TrainingPlan:
    """How a job is best run.

    Args:
        space: what it was chosen from.
        devices: in execution order.
        host_bytes, offloaded_inputs: host memory at most, and the share of block inputs.
        step_s: of a step at this size, seconds of cards of speed 1.
        notes: settings without effect, and what would use the cards better.
        warning: why it may not fit after all, where the user has vouched for it; "" otherwise.
        bucket, frames, unit: (height, width) and video frames that were planned for, and what sides are counted in.
        variant: name of the model.
    """

    space: SearchSpace
    cards: tuple[Card, ...]
    placement: Placement
    setting: Setting
    devices: tuple[DeviceForecast, ...]
    host_bytes: int
    offloaded_inputs: int
    step_s: float
    notes: tuple[str, ...]
    alternatives: tuple[Alternative, ...]
    warning: str
    bucket: tuple[int, int]
    frames: int
    unit: str
    variant: str

    @property
    def uncheckpointed(self) -> tuple[int, ...]:
        """Per device, blocks without activation checkpointing."""
        return tuple(device.num_uncheckpointed for device in self.devices)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Per device, blocks that stream from host memory."""
        return tuple(device.num_offloaded for device in self.devices)


def plan_training(question: Question) -> TrainingPlan:
    """The fastest way to run a job on its cards that fits.

    Raises: ValueError if none does; it says what each card lacks and which changes would do.
    """
    found, looked_at = find_fastest(question)
    if found is None:
        raise ValueError(_describe_refusal(question))
    devices = tuple(stage.forecast for stage in found.stages)
    over = [
        f"{card.name} {device.needed / 1e9:.2f} GB of {card.usable_bytes / 1e9:.2f} GB"
        for card, device in zip(question.cards, devices, strict=True)
        if device.needed > card.usable_bytes
    ]
    return TrainingPlan(
        space=question.space,
        cards=question.cards,
        placement=_place(question, found),
        setting=found.setting,
        devices=devices,
        host_bytes=found.host_bytes,
        offloaded_inputs=found.offloaded_inputs,
        step_s=found.time,
        notes=tuple(_notes(question, found)),
        alternatives=tuple(
            Alternative(setting, None if other is None else other.time / found.time, bool(other and other.is_streaming))
            for setting, other in looked_at
        ),
        warning=f"the forecast exceeds what is free ({', '.join(over)}), and memory_limit_gb says to try" * bool(over),
        bucket=question.bucket,
        frames=question.frames,
        unit=question.unit,
        variant=question.model.variant.name,
    )


def _place(question: Question, found: Found) -> Placement:
    names, cards = question.model.names, tuple(card.device for card in question.cards)
    whole = (cards[0],) * len(names)
    if found.setting.holds_copies:
        return Placement(names, whole, cards[0], replicas=cards)
    if found.setting.divides_blocks:
        shares = question.given_shares
        return Placement(names, whole, cards[0], shards=cards, shares=shares if len({*shares}) > 1 else ())
    devices = [device for device, stage in zip(cards, found.stages, strict=True) for _ in range(stage.plan.num_blocks)]
    return Placement(names, tuple(devices), cards[0])


def _notes(question: Question, found: Found) -> Iterator[str]:
    """Which settings of the user have no effect, and what several micro-batches would gain where a step of one keeps
    one card busy."""
    space, chosen, devices = question.space, found.setting.strategy, [card.device for card in question.cards]
    wanted = space.strategies[0]
    if not is_open(space.strategies) and wanted not in ("none", chosen):
        yield f'parallel.strategy = "{wanted}": without effect, {why_not_shared(wanted, space.accumulation, devices)}'
    if space.ahead > 1 and not has_stages(chosen):
        yield f"parallel.microbatches_ahead = {space.ahead}: without effect, only a pipeline runs ahead"
    several = replace(space, accumulation=_SEVERAL)
    if space.accumulation > 1 or divides_blocks(chosen) or "pipeline" not in strategies_on(several, devices):
        return
    filled = fit(replace(question, space=several), replace(found.setting, strategy="pipeline", ahead=0))
    if filled is not None and HOST_GAIN * filled.time <= _SEVERAL * found.time:
        yield (
            f"one card works at a time; with train.gradient_accumulation_steps = {_SEVERAL} all do, and {_SEVERAL} "
            f"batches take at most {filled.time / found.time:.1f} times as long as this step"
        )


# ---- where nothing fits


def _describe_refusal(question: Question) -> str:
    """What is needed against what is there, and the changes that were computed to be enough."""
    best, space = needed_at_least(question), question.space
    if best is None:
        return (
            f"no cut of {len(question.model.names)} blocks over {len(question.cards)} cards has "
            f"split.blocks_without_checkpointing = {list(space.uncheckpointed)} and split.offloaded_blocks = "
            f"{list(space.offloaded)}: a card needs a block for each that it keeps or streams; give smaller numbers, "
            "or leave them out"
        )
    frames = f", {question.frames} frames" if question.frames > 1 else ""
    lines = [
        f"does not fit: at {question.bucket[1]}x{question.bucket[0]} {question.unit}{frames}, batch "
        f"{space.batch_size}, rank {space.lora.rank}, {best.setting.describe()} the best cut needs"
    ]
    for card, stage in zip(question.cards, best.stages, strict=True):
        needed, there = stage.forecast.needed, card.usable_bytes
        verdict = f"{(needed - there) / 1e9:.2f} GB are missing" if needed > there else "fits"
        away = f" ({stage.plan.num_offloaded} in host memory)" if stage.plan.num_offloaded else ""
        lines.append(
            f"  {card.name}: {stage.forecast.num_blocks} blocks{away}, {needed / 1e9:.2f} GB of {there / 1e9:.2f} GB, "
            f"{verdict} (weights {stage.forecast.weights / 1e9:.2f} GB)"
        )
    free = (question.host_bytes or 0) / 1e9
    if not best.can_pin(question.host_bytes):
        pinned = best.offloaded_inputs / 1e9
        lines.append(f"  host memory: {pinned:.1f} GB would be pinned for block inputs, {free:.1f} GB are free")
    elif not best.fits_host(question.host_bytes):
        host = best.host_bytes / 1e9
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
    changed = question
    for change in (*single, *(ladder[-1] for ladder in sizes if ladder)):
        texts, changed = [*texts, change.text], change.of(changed)
        if len(texts) > 1 and is_possible(changed):
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
        added = replace(last, device=device, total_bytes=int(size_gb * 1e9), usable_bytes=int(size_gb * 1e9))
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
    if all(holds_copies(each) or divides_blocks(each) for each in space.strategies):
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
    space, variant = question.space, question.model.variant
    stride, now = question.model.family.latent_of(variant).frame_stride, space.resolution
    buckets = {
        side: tuple(max(64, each * side // now // 64 * 64) for each in question.bucket)
        for side in _RESOLUTIONS
        if side < now
    }
    lengths = range(question.frames - stride, 0 if variant.condition == "none" else stride, -stride)
    ranks = [rank for rank in _RANKS if rank < space.lora.rank]
    return [
        [_Change(f"data.resolutions = [{n}]", {"resolution": n}, {"bucket": each}) for n, each in buckets.items()],
        [_Change(f"data.frames = [{each}]", others={"frames": each}) for each in lengths],
        [_Change(f"lora.rank = {rank}", {"lora": replace(space.lora, rank=rank)}) for rank in ranks],
    ]
