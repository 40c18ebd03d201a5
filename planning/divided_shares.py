"""How large each card's share of every block is in a training that divides blocks: by what fits its memory.

What a card needs grows evenly with its share, beside what it holds whatever that is: embedders and last layers, inputs
of blocks, its part of the LoRA. Two dry runs say how much that is, and how fast it grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..families.tensor_plan import proportional
from ..parallel.local.fitting_shares import fit_groups, settle_groups
from .cuts import Terms, find_cut
from .forecast import DeviceForecast
from .question import Question
from .space import Setting

_STEPS = (1, 2, 4, 8, 16)  # groups of heads at a time: fewer may cut what int8-compute rotates together
_TRIES = 8  # of neighbouring shares, where forecasts are not on the line; each takes dry runs


def fitting_shares(question: Question, setting: Setting, terms: Terms) -> tuple[int, ...] | None:
    """Groups of heads of each card; None if none fit, or others than even ones cannot be cut.

    Args:
        terms: how much of a card may be needed, and whether the user's limits count. Without limits shares are in
            proportion to what the cards have room for, also where that is not enough.
    """
    return _Search(question, setting, terms).find()


class _Search:
    def __init__(self, question: Question, setting: Setting, terms: Terms) -> None:
        self._question, self._terms = question, terms
        self._quantize = question.work(setting.scheme).quantize
        self._plain = replace(setting, strategy="none", ahead=0)
        self._total, self._count = question.model.num_groups, len(question.cards)

    def find(self) -> tuple[int, ...] | None:
        even = proportional(self._total, [1.0] * self._count)
        if self._forecast(0, even) is None:  # whatever the shares, a setting cannot be kept to
            return None
        at_even = [self._bytes_over(index, even) for index in range(self._count)]
        if self._terms.has_limits and any(sum(missing) > self._slack for missing in zip(*at_even, strict=True)):
            return None
        most = [self._most_groups(index, even, over) for index, over in enumerate(at_even)]
        for step in _STEPS:
            if self._total % step or self._total // step < self._count:
                continue
            units = fit_groups(self._total // step, [each / step for each in most])
            if self._terms.has_limits:
                units = settle_groups(units, [0.0] * self._count, partial(self._over, step), _TRIES)
            shares = tuple(step * each for each in units)
            if not self._question.model.division_fault(shares, self._quantize):
                return shares
        return None

    def _forecast(self, index: int, shares: Sequence[int]) -> DeviceForecast | None:
        """What a card needs at least; None if no setting per card could be kept to."""
        one = self._question.divided(index, tuple(shares))
        found = find_cut(one, self._plain, Terms(math.inf, has_limits=False))
        return None if found is None else found.stages[0].forecast

    def _bytes_over(self, index: int, shares: Sequence[int]) -> list[float]:
        """What a card would need above what it may: of all, and of weights where the user limits them."""
        found = self._forecast(index, shares)
        assert found is not None, "find has looked"
        limits = self._question.space.memory_limit_gb if self._terms.has_limits else ()
        over = [found.needed - self._terms.most * self._question.cards[index].usable_bytes]
        return [*over, found.weights - limits[index] * 1e9] if limits else over

    def _over(self, step: int, units: Sequence[int]) -> list[float]:
        shares = [step * each for each in units]
        return [max(self._bytes_over(index, shares)) for index in range(self._count)]

    @property
    def _slack(self) -> float:
        """Bytes by which all cards together may seem to miss what fits after all: what all need hardly depends on the
        shares, but for the multiples that features are cut at."""
        return 0.01 * sum(card.usable_bytes for card in self._question.cards)

    def _most_groups(self, index: int, even: Sequence[int], at_even: Sequence[float]) -> float:
        """How many groups a card has room for, along the line through an even share and half of it."""
        moved = even[index] // 2
        if not moved:
            return float(even[index])
        less = [*even]
        less[index], less[index - 1] = even[index] - moved, even[index - 1] + moved
        at_less = self._bytes_over(index, less)
        slopes = [max(1.0, (more - fewer) / moved) for more, fewer in zip(at_even, at_less, strict=True)]
        return min(even[index] - over / slope for over, slope in zip(at_even, slopes, strict=True))
