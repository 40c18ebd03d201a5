"""Which setting is the fastest that fits (plan_training.py makes the plan of it).

Searched are the candidates of the space, and for each of them the cut and the blocks without activation checkpointing
(cuts.py). What the user has set is only checked. Where a setting does not fit, as few blocks as it takes stream from
host memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ..parallel.local.data_parallel import num_dealt
from .cuts import HEADROOM, Found, Terms, find_cut
from .question import Question
from .space import Setting, is_open

# How many times faster a setting must be for blocks, and again for block inputs, to wait in host memory where something
# fits without: how far copies are hidden is an estimate.
HOST_GAIN = 1.1

Looked = list[tuple[Setting, Found | None]]  # every setting that was looked at


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
        if (those := [found for found in fitting if found.must_stream == must_stream])
    ]
    return min(best, key=lambda found: _weighed(question, found), default=None), looked_at


def _look(question: Question, most: float) -> Looked:
    """Every setting worth looking at. Copies of the model need more than a split: where nothing fits they are looked at
    only if the user names them."""
    looked_at: Looked = []
    resident: set[Setting] = set()
    best = math.inf
    for setting in question.settings():
        if _chose_offload(question, setting) and replace(setting, offloads=False) in resident:
            continue
        if most > 1 and setting.holds_copies and is_open(question.space.strategies):
            continue
        found = fit(question, setting, most, best)
        looked_at.append((setting, found))
        if found is not None and not found.is_streaming:
            resident.add(setting)
        best = min(best, math.inf if found is None else _weighed(question, found))
    return looked_at


def _chose_offload(question: Question, setting: Setting) -> bool:
    """Whether offloading of block inputs is ours to choose, and chosen."""
    return setting.offloads and is_open(question.space.offloads)


def _weighed(question: Question, found: Found) -> float:
    waiting = _chose_offload(question, found.setting), found.is_streaming and question.may_stream
    return found.time * HOST_GAIN ** sum(waiting)


def fit(question: Question, setting: Setting, most: float = 1.0, best: float = math.inf) -> Found | None:
    """The best cut for a setting, None if none fits: with headroom and blocks without activation checkpointing if
    possible, else as tight as it gets, else, or where that is worth it, with blocks that stream from host memory.

    most: see Terms. best: time of what was found before, weighed; blocks need not stream for a slower one.
    """
    if setting.holds_copies:
        return _each_alone(question, setting, lambda alone, each: fit(alone, each, most))
    if setting.divides_blocks:
        return _together(question, setting, lambda share, each: fit(share, each, most))
    found = find_cut(question, setting, Terms(1 - HEADROOM, spares=True)) if most <= 1 else None
    found = found or find_cut(question, setting, Terms(most))
    if found is None:
        return _streaming(question, setting, min(most, 1 - HEADROOM)) or _streaming(question, setting, most)
    if not found.fits_host(question.host_bytes):
        return None
    return found if found.is_streaming or most > 1 else _faster_streaming(question, found, best)


def _each_alone(
    question: Question, setting: Setting, find: Callable[[Question, Setting], Found | None]
) -> Found | None:
    """Data parallel: what is found for every card alone, together; None if one of them cannot hold the model."""
    plain, found = replace(setting, strategy="none", ahead=0), []
    for index in range(len(question.cards)):
        one = find(question.alone(index), plain)
        if one is None:
            return None
        found.append(one)
    dealt = num_dealt(question.space.accumulation, len(question.cards))
    return replace(
        found[0],
        setting=setting,
        stages=tuple(one.stages[0] for one in found),
        time=max(one.time for one, count in zip(found, dealt, strict=True) if count),
        offloaded_inputs=sum(one.offloaded_inputs for one in found),
    )


def _together(question: Question, setting: Setting, find: Callable[[Question, Setting], Found | None]) -> Found | None:
    """Tensor parallel: what is found for every card's share of the blocks, together; None if one cannot hold it.

    Shares are even, or those of the run that is resumed.
    """
    return _in_shares(question, setting, find, question.given_shares or (1,) * len(question.cards))


def _in_shares(
    question: Question,
    setting: Setting,
    find: Callable[[Question, Setting], Found | None],
    shares: tuple[int, ...],
) -> Found | None:
    """Cards meet inside the blocks, so all of them recompute the same ones."""
    plain, count = replace(setting, strategy="none", ahead=0), len(question.cards)
    found = [find(question.divided(index, shares), plain) for index in range(count)]
    kept = {one.stages[0].plan.num_uncheckpointed for one in found if one is not None}
    if None not in found and len(kept) > 1:
        found = [find(question.divided(index, shares, min(kept)), plain) for index in range(count)]
    fitting = [one for one in found if one is not None]
    if len(fitting) < count:
        return None
    return replace(
        fitting[0],
        setting=setting,
        stages=tuple(one.stages[0] for one in fitting),
        time=max(one.time for one in fitting),
        offloaded_inputs=sum(one.offloaded_inputs for one in fitting),
    )


def _cut(question: Question, setting: Setting, terms: Terms) -> Found | None:
    """As find_cut; each card alone where the setting is data or tensor parallel, whose blocks never stream."""
    if setting.holds_copies:
        return _each_alone(question, setting, lambda alone, each: find_cut(alone, each, replace(terms, streams="none")))
    if setting.divides_blocks:
        plain = replace(terms, streams="none")
        return _together(question, setting, lambda share, each: find_cut(share, each, plain))
    return find_cut(question, setting, terms)


def _streaming(question: Question, setting: Setting, most: float) -> Found | None:
    """With as few blocks in host memory as it takes; the fastest cut, else the one that takes least of the host."""
    if not question.may_stream:
        return None
    found = _cut(question, setting, Terms(most, streams="needed"))
    if found is None or found.fits_host(question.host_bytes):
        return found
    found = _cut(question, setting, Terms(most, streams="needed", least="host bytes"))
    return found if found is None or found.fits_host(question.host_bytes) else None


def _faster_streaming(question: Question, resident: Found, best: float) -> Found:
    """The same setting with blocks that stream from host memory, where that is worth it; else what is given.

    So it is where the fastest of several cards is too small for the blocks that it should compute.
    """
    setting = resident.setting
    if not question.may_stream or min(resident.time, best) <= HOST_GAIN * _least_time(question, setting):
        return resident  # whatever the cut
    found = _streaming(question, setting, 1 - HEADROOM)
    if found is None or resident.time <= HOST_GAIN * found.time:
        return resident
    return replace(found, resident_time=resident.time)


def _least_time(question: Question, setting: Setting) -> float:
    """No step with every block recomputed is shorter: the fastest card computes all, or all cards share evenly."""
    blocks = range(len(question.model.names))
    whole = [question.recomputed_s(blocks, card, setting.scheme) for card in question.cards]
    shortest = min(whole) if setting.strategy == "none" else 1 / sum(1 / each for each in whole)
    return question.space.accumulation * shortest


# ---- where nothing may fit


def is_possible(question: Question) -> bool:
    """Whether anything fits."""
    return any(_is_possible_with(question, setting) for setting in _leanest(question))


def _is_possible_with(question: Question, setting: Setting) -> bool:
    found = _cut(question, setting, Terms(question.most))
    if found is None:
        return _streaming(question, setting, question.most) is not None
    return found.fits_host(question.host_bytes)


def without_limits(question: Question) -> list[Found]:
    """What every setting would need of its cards at least, with as many blocks in host memory as may be."""
    terms = Terms(math.inf, has_limits=False, streams="all" if question.may_stream else "none")
    return [found for setting in _leanest(question) if (found := _cut(question, setting, terms))]


def _leanest(question: Question) -> list[Setting]:
    """The settings that may need the least: where offloading is ours to choose, those without need more."""
    every = question.settings()
    return [each for each in every if each.offloads] or every if question.host_bytes is None else every


def but_for_the_host(question: Question) -> Found | None:
    """What would fit the cards and takes least of the host, which may be more than it has; None if nothing does."""
    if not question.may_stream:
        return None
    terms = Terms(question.most, streams="needed", least="host bytes")
    found = [each for setting in question.settings() if (each := _cut(question, setting, terms))]
    return min(found, key=lambda each: each.host_bytes, default=None)
