"""Sizes in a model's config.json, before a model is made from them.

A config decides how many layers are made and how large they are, so a damaged or hostile one takes all memory or never
ends. The bounds are far above every published model; what is within them is compared with the weights afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Ending of a key -> the most it may say; the first that fits counts.
_BOUNDS = (
    (re.compile(r"(layers|layers_per_block|num_res_blocks|depth|num_blocks)$"), 1_000),
    (re.compile(r"seq_len$"), 1_000_000),  # of tables that are computed when the model is made
    (re.compile(r"theta$"), 10**12),  # the period of positions; nothing is as large as it
    (re.compile(r""), 20_000_000),  # dims, words, positions
)
_MOST_VALUES = 10_000  # of a list


def refuse_absurd_sizes(file: Path, config: Mapping[str, Any]) -> None:
    """Raises: ValueError naming the file, the key and what is found, for a size no model has."""
    for key, value in _numbers(config):
        most = next(most for ending, most in _BOUNDS if ending.search(key))
        if abs(value) > most:
            raise ValueError(
                f"{file} says {key} = {value}, and no model has more than {most}; download it again, or give another "
                "model"
            )


def _numbers(values: Any, key: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _numbers(value, f"{key}.{name}" if key else str(name))
    elif isinstance(values, list):
        yield f"length of {key}", len(values) if len(values) > _MOST_VALUES else 0
        for value in values[:_MOST_VALUES]:
            yield from _numbers(value, key)
    elif isinstance(values, int) and not isinstance(values, bool):
        yield key, values
