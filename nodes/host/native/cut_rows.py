"""What ComfyUI's loader makes of a file's tensors: new names, and tensors that are rows of one of the file's.

Nothing says which rows, so the loader is asked, with a random number in the place of each row. Arithmetic would make
other numbers of these, and then nothing is said of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....checkpoints.header import TensorRecord

_Row = tuple[str, int]  # a tensor of the file and a row of it


def follow(config: Any, records: Mapping[str, TensorRecord]) -> dict[str, TensorRecord | None]:
    """The records under the names that the loader gives them; None for what it makes in another way.

    Args:
        config: a model config of ComfyUI's.
    """
    given = {name: torch.empty(record.shape, device="meta") for name, record in records.items()}
    by_id = {id(tensor): records[name] for name, tensor in given.items()}
    made = config.process_unet_state_dict(dict(given))
    found = {name: by_id.get(id(tensor)) for name, tensor in made.items()}
    if None not in found.values():
        return found
    kept = {id(tensor) for tensor in made.values()}
    generator = torch.Generator().manual_seed(1)
    numbered: dict[str, torch.Tensor] = {}  # tensors of as many rows, each one number
    origin: dict[int, _Row] = {}  # the row that each number stands for
    for name, tensor in given.items():
        if tensor.ndim and id(tensor) not in kept:
            numbers = torch.randint(2**62, (len(tensor),), generator=generator)
            numbered[name] = numbers.view(-1, *[1] * (tensor.ndim - 1))
            origin |= {number: (name, row) for row, number in enumerate(numbers.tolist())}
    try:
        again = config.process_unet_state_dict({**given, **numbered})
    except (RuntimeError, TypeError):  # it computes with them
        return found
    for name in [name for name, record in found.items() if record is None]:
        rows = again.get(name)
        listed = [] if rows is None or rows.is_meta else rows.flatten().tolist()
        found[name] = _cut(records, tuple(made[name].shape), [origin.get(number) for number in listed])
    return found


def _cut(
    records: Mapping[str, TensorRecord], shape: tuple[int, ...], rows: Sequence[_Row | None]
) -> TensorRecord | None:
    """The record of these rows; None if they are not rows of one tensor in 16 bits or more."""
    known = [row for row in rows if row is not None]
    if not known or len(known) != len(rows) or len({name for name, _ in known}) > 1:
        return None
    record = records[known[0][0]]
    if record.is_quantized or shape != (len(rows), *record.shape[1:]):
        return None
    runs: list[tuple[int, int]] = []
    for _, row in known:
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return record.cut(*runs[0]) if len(runs) == 1 else replace(record, shape=shape, pieces=tuple(runs))
