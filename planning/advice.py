"""What to say when a job fits its cards in no way: what each lacks, and which changes would do, each computed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

import torch

from .planner import Planner

_CARD_SIZES_GB = (8, 10, 12, 16, 20, 24, 32, 40, 48, 80, 96, 141)
_RESOLUTIONS = tuple(range(8192, 255, -64))
_RANKS = (64, 32, 16, 8, 4)
_MOST_CHANGES = 3


def describe_refusal(planner: Planner) -> str:
    """What is needed against what is there, and the changes that were computed to be enough."""
    best = planner.but_for_the_host()
    if best is None:
        possible = planner.without_limits()
        if not possible:  # kept or streamed blocks that no cut has
            split = planner.job.split
            return (
                f"no cut of {len(planner.names)} blocks over {len(planner.cards)} cards has "
                f"split.blocks_without_checkpointing = {list(split.blocks_without_checkpointing)} and "
                f"split.offloaded_blocks = {list(split.offloaded_blocks)}: a card needs a "
                "block for each that it keeps or streams; give smaller numbers, or leave them out"
            )
        best = min(possible, key=lambda found: max(stage.share for stage in found.stages))
    frames = f", {planner.frames} frames" if planner.frames > 1 else ""
    lines = [
        f"the job does not fit its cards at {planner.bucket[1]}x{planner.bucket[0]} pixels{frames}, batch "
        f"{planner.job.train.batch_size}, rank {planner.job.lora.rank}, {best.setting.describe()}; the best cut needs"
    ]
    for card, stage in zip(planner.cards, best.stages, strict=True):
        needed, there = stage.forecast.needed, card.usable_bytes
        verdict = f"{(needed - there) / 1e9:.2f} GB are missing" if needed > there else "fits"
        away = f" ({stage.plan.num_swapped} in host memory)" if stage.plan.num_swapped else ""
        lines.append(
            f"  {card.name}: {stage.forecast.num_blocks} blocks{away}, {needed / 1e9:.2f} GB of {there / 1e9:.2f} GB, "
            f"{verdict} (weights {stage.forecast.weights / 1e9:.2f} GB)"
        )
    if not planner.can_pin(best):
        pinned, free = best.offloaded_bytes / 1e9, (planner.host_bytes or 0) / 1e9
        lines.append(f"  host memory: {pinned:.1f} GB would be pinned for block inputs, {free:.1f} GB are free")
    elif planner.host_bytes is not None and not planner.host_fits(best):
        lines.append(
            f"  host memory: {planner.host_needed(best) / 1e9:.2f} GB, {planner.host_bytes / 1e9:.2f} GB are free, and "
            "a tenth is left to others"
        )
    if planner.job.split.memory_limit_gb:
        lines.append(f"  memory_limit_gb allows weights of {list(planner.job.split.memory_limit_gb)} GB")
    helps = _what_helps(planner)
    lines.append("Each of these would make it fit:" if helps else "None of the changes that were tried makes it fit")
    return "\n".join([*lines, *(f"  {line}" for line in helps)])


# Words for a change, and the planner of the job with it.
_Change = tuple[str, Callable[[Planner], Planner]]


def _what_helps(planner: Planner) -> list[str]:
    """The best three single changes that make the job fit; where there is none, as many at once as it takes."""
    single, sizes = _choices(planner), _sizes(planner)
    if found := list(islice(_single_changes(planner, single, sizes), _MOST_CHANGES)):
        return found
    texts: list[str] = []
    together = planner
    for text, change in [*single, *(ladder[-1] for ladder in sizes if ladder)]:
        texts, together = [*texts, text], change(together)
        if len(texts) > 1 and together.is_possible():
            return [" and ".join(texts)]
    return []


def _single_changes(planner: Planner, single: list[_Change], sizes: list[list[_Change]]) -> Iterator[str]:
    yield from (text for text, change in single if change(planner).is_possible())
    for ladder in sizes:
        index = bisect_left(ladder, True, key=lambda each: each[1](planner).is_possible())
        yield from [ladder[index][0]] if index < len(ladder) else []
    if card := _card_that_helps(planner):
        yield card


def _choices(planner: Planner) -> list[_Change]:
    """Settings that can be changed to one other, the cheapest for the result first."""
    job = planner.job
    scheme, count = _smaller_scheme(planner), job.train.batch_size * job.train.gradient_accumulation_steps
    found: list[tuple[bool, str, str, dict[str, object]]] = [
        (
            not job.train.gradient_checkpointing,
            "gradient_checkpointing = true",
            "train",
            {"gradient_checkpointing": True},
        ),
        (
            job.train.offload_activations != "auto" and job.train.gradient_checkpointing,
            'offload_activations = "auto"',
            "train",
            {"offload_activations": "auto"},
        ),
        (
            bool(job.split.blocks_without_checkpointing),
            "blocks_without_checkpointing = []",
            "split",
            {"blocks_without_checkpointing": ()},
        ),
        (bool(job.split.offloaded_blocks), "offloaded_blocks = []", "split", {"offloaded_blocks": ()}),
        (bool(job.split.memory_limit_gb), "memory_limit_gb = []", "split", {"memory_limit_gb": ()}),
        (job.split.balance == "manual", 'balance = "memory"', "split", {"balance": "memory", "split_at": ()}),
        (job.parallel.strategy == "data", 'strategy = "auto"', "parallel", {"strategy": "auto"}),
        (bool(scheme), f'quantize = "{scheme}"', "model", {"quantize": scheme}),
        (job.optimizer.name == "adamw", 'name = "adamw8bit"', "optimizer", {"name": "adamw8bit"}),
        (
            job.train.batch_size > 1,
            f"batch_size = 1 with gradient_accumulation_steps = {count}",
            "train",
            {"batch_size": 1, "gradient_accumulation_steps": count},
        ),
    ]
    return [(f"{section}.{text}", _setter(section, values)) for is_open, text, section, values in found if is_open]


def _setter(section: str, values: dict[str, object]) -> Callable[[Planner], Planner]:
    def change(planner: Planner) -> Planner:
        part = replace(getattr(planner.job, section), **values)
        return planner.changed(replace(planner.job, **{section: part}), planner.cards, planner.bucket)

    return change


def _sizes(planner: Planner) -> list[list[_Change]]:
    """Smaller resolutions, shorter clips and lower ranks, the largest first."""
    now = max(planner.job.data.resolutions)
    smaller = [each for each in _RESOLUTIONS if each < now]
    ranks = [rank for rank in _RANKS if rank < planner.job.lora.rank]
    return [
        [(f"data.resolutions = [{each}]", _resizer(now, each)) for each in smaller],
        [(f"data.frames = [{each}]", _shortener(each)) for each in _shorter(planner)],
        [(f"lora.rank = {rank}", _setter("lora", {"rank": rank})) for rank in ranks],
    ]


def _shorter(planner: Planner) -> list[int]:
    """Lengths of clips that the model takes, below the one that was planned for."""
    stride = planner.family.latent_of(planner.variant).frame_stride
    least = 1 if planner.variant.condition == "none" else 1 + stride
    return list(range(planner.frames - stride, least - 1, -stride))


def _shortener(wanted: int) -> Callable[[Planner], Planner]:
    def change(planner: Planner) -> Planner:
        job = replace(planner.job, data=replace(planner.job.data, frames=(wanted,)))
        return planner.changed(job, planner.cards, planner.bucket, wanted)

    return change


def _resizer(now: int, wanted: int) -> Callable[[Planner], Planner]:
    def change(planner: Planner) -> Planner:
        job = replace(planner.job, data=replace(planner.job.data, resolutions=(wanted,)))
        height, width = (max(64, side * wanted // now // 64 * 64) for side in planner.bucket)
        return planner.changed(job, planner.cards, (height, width))

    return change


def _smaller_scheme(planner: Planner) -> str | None:
    """The fastest scheme of the cards, if the job has none or one that only stores."""
    if planner.job.model.quantize in ("auto", "fp8-compute", "int8-compute"):
        return None
    return next((scheme for scheme in planner.able_schemes if scheme != planner.job.model.quantize), None)


def _card_that_helps(planner: Planner) -> str:
    """The smallest further card with which it fits; "" if none does, or settings name a value for each card."""
    split = planner.job.split
    if split.split_at or split.blocks_without_checkpointing or split.offloaded_blocks or split.memory_limit_gb:
        return ""
    last = planner.cards[-1]
    device = torch.device(last.device.type, max(card.device.index or 0 for card in planner.cards) + 1)

    def is_enough(size: int) -> bool:
        added = replace(last, device=device, total_bytes=int(size * 1e9), usable_bytes=int(size * 1e9))
        return planner.changed(planner.job, (*planner.cards, added), planner.bucket).is_possible()

    index = bisect_left(_CARD_SIZES_GB, True, key=is_enough)
    return f"another card of {_CARD_SIZES_GB[index]} GB" if index < len(_CARD_SIZES_GB) else ""
