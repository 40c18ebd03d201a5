"""Whether a loss grows without end: a training that diverges should be seen before its last step.

The loss of single steps jumps with the noise that was drawn, by a factor of ten and more, so means over windows of
steps are compared, each without its highest losses.
"""

from __future__ import annotations

from collections.abc import Sequence

_WINDOW = 50
_NUM_LEFT_OUT = 2
_FACTOR, _FACTOR_BEFORE = 5.0, 3.0  # of the last window, and of the one before it


def describe_growth(losses: Sequence[float]) -> str:
    """A warning after a window of steps whose mean has risen far above the lowest one over two windows; else ""."""
    if len(losses) % _WINDOW or len(losses) < 3 * _WINDOW:
        return ""
    windows = [losses[start : start + _WINDOW] for start in range(0, len(losses), _WINDOW)]
    means = [_mean_without_highest(window) for window in windows]
    lowest = min(range(len(means) - 2), key=means.__getitem__)
    if means[-2] < _FACTOR_BEFORE * means[lowest] or means[-1] < max(means[-2], _FACTOR * means[lowest]):
        return ""
    return (
        f"the loss grows: its mean was {means[lowest]:.3g} over steps {lowest * _WINDOW + 1} to "
        f"{(lowest + 1) * _WINDOW}, and is {means[-1]:.3g} over the last {_WINDOW}. If that goes on, stop and start "
        "anew with a lower optimizer.learning_rate and another output.folder"
    )


def _mean_without_highest(window: Sequence[float]) -> float:
    kept = sorted(window)[:-_NUM_LEFT_OUT]
    return sum(kept) / len(kept)
