"""What a job may do as it is written, and its user hardly meant: one line each, in `check` and when a run begins.

What can be seen of a dataset folder by itself is said where it is read (data.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..checkpoints.zero_weights import find_zero_weights
from ..config.job import OptimizerConfig
from ..data.samples import Sample
from ..data.video import media_fingerprint, sequence_files
from .checked_job import JobPlan

_log = logging.getLogger(__name__)
_MAX_NAMES = 5  # that a line spells out


def give_cautions(plan: JobPlan) -> None:
    """Log a warning for each.

    Raises: ValueError naming a model file that cannot be read.
    """
    lines = [_ignored_rate(plan.job.optimizer), _trained_on(plan), _zero_weights(plan)]
    for line in filter(None, lines):
        _log.warning("%s", line)


def _ignored_rate(optimizer: OptimizerConfig) -> str:
    if "lr" not in optimizer.options:
        return ""
    return (
        f"optimizer.options.lr = {optimizer.options['lr']!r} is ignored: the learning rate is "
        f"optimizer.learning_rate = {optimizer.learning_rate:g}; remove one of the two"
    )


def _trained_on(plan: JobPlan) -> str:
    both = find_common(plan.samples, plan.eval_samples)
    if not both:
        return ""
    num = len({sample.path for sample in plan.eval_samples})
    return (
        f"{len(both)} of {num} evaluation images and clips are trained on as well, so their loss does not tell how the "
        f"LoRA does on others: {_names(both)}; give evaluation.folder a folder of its own"
    )


def find_common(training: Sequence[Sample], evaluation: Sequence[Sample]) -> list[str]:
    """Paths of evaluation whose content is trained on as well; only files of equal sizes are read."""
    known: dict[int, list[str]] = {}
    for path in dict.fromkeys(sample.path for sample in training):
        known.setdefault(_num_bytes(path), []).append(path)
    found = []
    for path in dict.fromkeys(sample.path for sample in evaluation):
        alike = known.get(_num_bytes(path), [])
        if path in alike or alike and media_fingerprint(path) in map(media_fingerprint, alike):
            found.append(path)
    return found


def _num_bytes(path: str) -> int:
    files = sequence_files(Path(path)) if Path(path).is_dir() else [Path(path)]
    return sum(file.stat().st_size for file in files)


def _zero_weights(plan: JobPlan) -> str:
    zeros = find_zero_weights(plan.info.tensors)
    if not zeros:
        return ""
    return (
        f"{len(zeros)} of {len(plan.info.tensors)} weights in {plan.info.path} are all zeros: {_names(zeros)}; "
        "download the model again, unless it was made so"
    )


def _names(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
