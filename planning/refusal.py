"""What is missing where no setting of a job fits its cards, and the changes that were computed to be enough."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from ..config.model import holds_copies, shares_rows
from .question import OFFLOADS, STRATEGIES, Question, Setting, is_open
from .search import Found, Terms, each_card, find_cut, fit

# What is tried.
_CARD_SIZES_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)
_RESOLUTIONS = tuple(range(8192, 255, -64))
_RANKS = (64, 32, 16, 8, 4)
_SECONDS = (480, 240, 120, 60, 30, 15)
_MOST_CHANGES = 3


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
    """As find_cut; each card alone where each has a copy of the model. Of tokens alone its blocks may stream."""
    if not holds_copies(setting.strategy):
        return find_cut(question, setting, terms)
    plain = terms if shares_rows(setting.strategy) else replace(terms, streams="none")
    return each_card(question, setting, lambda card, each: find_cut(card, each, plain))


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
    """Smaller resolutions, shorter clips or sounds, and lower ranks, the largest first."""
    space, variant, now = question.space, question.model.variant, question.space.resolution
    latent, sides = question.model.family.latent_of(variant), [n for n in _RESOLUTIONS if n < now]
    buckets = {n: tuple(max(64, side * n // now // 64 * 64) for side in question.bucket) for n in sides}
    shortest = 1 if variant.condition == "none" else 2
    lengths = [n for n in range(question.frames - 1, shortest - 1, -1) if latent.is_length(n)]
    ranks = [rank for rank in _RANKS if rank < space.lora.rank]
    smaller = [_Change(f"data.resolutions = [{n}]", {"resolution": n}, {"bucket": each}) for n, each in buckets.items()]
    if rows := latent.audio_rows:
        squares = {n: round(math.sqrt(n * latent.sound_rate * rows)) for n in _SECONDS}
        now = question.bucket[0]
        smaller = [_Change(f"data.seconds = {n}", others={"bucket": (k, k)}) for n, k in squares.items() if 0 < k < now]
    return [
        smaller,
        [_Change(f"data.frames = [{each}]", others={"frames": each}) for each in lengths],
        [_Change(f"lora.rank = {rank}", {"lora": replace(space.lora, rank=rank)}) for rank in ranks],
    ]
