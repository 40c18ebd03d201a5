"""What to say when a job fits its cards in no way: what each lacks, and which changes would do, each computed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from ..config.model import divides_blocks, holds_copies
from .cuts import Found
from .question import Question
from .search import but_for_the_host, is_possible, without_limits
from .space import OFFLOADS, STRATEGIES, is_open

_CARD_SIZES_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)
_RESOLUTIONS = tuple(range(8192, 255, -64))
_RANKS = (64, 32, 16, 8, 4)
_MOST_CHANGES = 3


def describe_refusal(question: Question) -> str:
    """What is needed against what is there, and the changes that were computed to be enough."""
    best = but_for_the_host(question)
    if best is None:
        possible = without_limits(question)
        if not possible:
            return _no_such_cut(question)
        best = min(possible, key=lambda found: max(stage.share for stage in found.stages))
    frames = f", {question.frames} frames" if question.frames > 1 else ""
    lines = [
        f"does not fit: at {question.bucket[1]}x{question.bucket[0]} {question.unit}{frames}, batch "
        f"{question.space.batch_size}, rank {question.space.lora.rank}, {best.setting.describe()} the best cut needs",
        *_what_cards_lack(question, best),
        *_what_the_host_lacks(question, best),
    ]
    if question.space.memory_limit_gb:
        lines.append(f"  memory_limit_gb allows weights of {list(question.space.memory_limit_gb)} GB")
    helps = what_helps(question)
    lines.append("Each of these would make it fit:" if helps else "None of the changes that were tried makes it fit")
    return "\n".join([*lines, *(f"  {line}" for line in helps)])


def _no_such_cut(question: Question) -> str:
    space = question.space
    return (
        f"no cut of {len(question.model.names)} blocks over {len(question.cards)} cards has "
        f"split.blocks_without_checkpointing = {list(space.uncheckpointed)} and "
        f"split.offloaded_blocks = {list(space.offloaded)}: a card needs a "
        "block for each that it keeps or streams; give smaller numbers, or leave them out"
    )


def _what_cards_lack(question: Question, best: Found) -> Iterator[str]:
    for card, stage in zip(question.cards, best.stages, strict=True):
        needed, there = stage.forecast.needed, card.usable_bytes
        verdict = f"{(needed - there) / 1e9:.2f} GB are missing" if needed > there else "fits"
        away = f" ({stage.plan.num_offloaded} in host memory)" if stage.plan.num_offloaded else ""
        yield (
            f"  {card.name}: {stage.forecast.num_blocks} blocks{away}, {needed / 1e9:.2f} GB of {there / 1e9:.2f} GB, "
            f"{verdict} (weights {stage.forecast.weights / 1e9:.2f} GB)"
        )


def _what_the_host_lacks(question: Question, best: Found) -> Iterator[str]:
    free = (question.host_bytes or 0) / 1e9
    if not best.can_pin(question.host_bytes):
        pinned = best.offloaded_inputs / 1e9
        yield f"  host memory: {pinned:.1f} GB would be pinned for block inputs, {free:.1f} GB are free"
    elif not best.fits_host(question.host_bytes):
        yield (f"  host memory: {best.host_bytes / 1e9:.2f} GB, {free:.2f} GB are free, and a tenth is left to others")


# Words for a change, and the question with it.
_Change = tuple[str, Callable[[Question], Question]]


def what_helps(question: Question) -> list[str]:
    """The best three single changes that make the job fit; where there is none, as many at once as it takes."""
    single, sizes = _choices(question), _sizes(question)
    if found := list(islice(_single_changes(question, single, sizes), _MOST_CHANGES)):
        return found
    texts: list[str] = []
    together = question
    for text, change in [*single, *(ladder[-1] for ladder in sizes if ladder)]:
        texts, together = [*texts, text], change(together)
        if len(texts) > 1 and is_possible(together):
            return [" and ".join(texts)]
    return []


def _single_changes(question: Question, single: list[_Change], sizes: list[list[_Change]]) -> Iterator[str]:
    yield from (text for text, change in single if is_possible(change(question)))
    for ladder in sizes:
        index = bisect_left(ladder, True, key=lambda each: is_possible(each[1](question)))
        yield from [ladder[index][0]] if index < len(ladder) else []
    if card := _card_that_helps(question):
        yield card


def _choices(question: Question) -> list[_Change]:
    """Settings that can be changed to one other, the cheapest for the result first."""
    space = question.space
    scheme, count = _smaller_scheme(question), space.batch_size * space.accumulation
    found: list[tuple[bool, str, dict[str, Any]]] = [
        (not space.is_checkpointing, "train.gradient_checkpointing = true", {"is_checkpointing": True}),
        (
            space.is_checkpointing and not is_open(space.offloads),
            'train.offload_activations = "auto"',
            {"offloads": OFFLOADS},
        ),
        (bool(space.uncheckpointed), "split.blocks_without_checkpointing = []", {"uncheckpointed": ()}),
        (bool(space.offloaded), "split.offloaded_blocks = []", {"offloaded": ()}),
        (bool(space.memory_limit_gb), "split.memory_limit_gb = []", {"memory_limit_gb": ()}),
        (bool(space.split_at), 'split.balance = "memory"', {"split_at": ()}),
        (
            all(holds_copies(each) or divides_blocks(each) for each in space.strategies),
            'parallel.strategy = "auto"',
            {"strategies": STRATEGIES},
        ),
        (bool(scheme), f'model.quantize = "{scheme}"', {"schemes": (scheme,)}),
        (space.optimizers == ("adamw",), 'optimizer.name = "adamw8bit"', {"optimizers": ("adamw8bit",)}),
        (
            space.batch_size > 1,
            f"train.batch_size = 1 with accumulation = {count}",
            {"batch_size": 1, "accumulation": count},
        ),
    ]
    return [(text, _setter(values)) for would_change, text, values in found if would_change]


def _setter(values: dict[str, Any]) -> Callable[[Question], Question]:
    return lambda question: question.changed(space=replace(question.space, **values))


def _sizes(question: Question) -> list[list[_Change]]:
    """Smaller resolutions, shorter clips and lower ranks, the largest first."""
    now = question.space.resolution
    return [
        [(f"data.resolutions = [{each}]", _resizer(now, each)) for each in _RESOLUTIONS if each < now],
        [(f"data.frames = [{each}]", _shortener(each)) for each in _shorter(question)],
        [(f"lora.rank = {rank}", _ranker(rank)) for rank in _RANKS if rank < question.space.lora.rank],
    ]


def _shorter(question: Question) -> list[int]:
    """Lengths of clips that the model takes, below the one that was planned for."""
    variant = question.model.variant
    stride = question.model.family.latent_of(variant).frame_stride
    least = 1 if variant.condition == "none" else 1 + stride
    return list(range(question.frames - stride, least - 1, -stride))


def _shortener(wanted: int) -> Callable[[Question], Question]:
    return lambda question: question.changed(frames=wanted)


def _ranker(rank: int) -> Callable[[Question], Question]:
    return lambda question: _setter({"lora": replace(question.space.lora, rank=rank)})(question)


def _resizer(now: int, wanted: int) -> Callable[[Question], Question]:
    def change(question: Question) -> Question:
        height, width = (max(64, side * wanted // now // 64 * 64) for side in question.bucket)
        return question.changed(space=replace(question.space, resolution=wanted), bucket=(height, width))

    return change


def _smaller_scheme(question: Question) -> str | None:
    """The fastest scheme of the cards, if the job has none or one that only stores."""
    schemes = question.space.schemes
    if is_open(schemes) or schemes[0].endswith("-compute"):
        return None
    return next((scheme for scheme in question.able_schemes if scheme != schemes[0]), None)


def _card_that_helps(question: Question) -> str:
    """The smallest further card with which it fits; "" if none does, or settings name a value for each card."""
    space = question.space
    if space.split_at or space.uncheckpointed or space.offloaded or space.memory_limit_gb:
        return ""
    last = question.cards[-1]
    device = torch.device(last.device.type, max(card.device.index or 0 for card in question.cards) + 1)

    def is_enough(size: int) -> bool:
        added = replace(last, device=device, total_bytes=int(size * 1e9), usable_bytes=int(size * 1e9))
        cards = (*question.cards, added)[: len(question.model.names)]
        return is_possible(question.changed(cards=cards))

    index = bisect_left(_CARD_SIZES_GB, True, key=is_enough)
    return f"another card of {_CARD_SIZES_GB[index]} GB" if index < len(_CARD_SIZES_GB) else ""
