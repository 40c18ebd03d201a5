"""Weights that are nothing but zeros, as a download into a prepared file leaves them where it broke off."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from .header import TensorRecord
from .weight_file import WeightReader, by_file, open_weights


def find_zero_weights(records: Mapping[str, TensorRecord]) -> list[str]:
    """Names of the matrices that hold zeros only. Of all others three rows are read at most.

    Raises: ValueError naming a file whose weights cannot be read.
    """
    found = []
    for file, inside in by_file(records).items():
        try:
            with open_weights(file) as reader:
                found += [name for name, record in inside.items() if len(record.shape) > 1 and _is_zero(reader, record)]
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} cannot be read ({error}); download it again") from error
    return found


def refuse_zeros(path: Path, records: Mapping[str, TensorRecord]) -> None:
    """Raises: ValueError naming the path if its weights are zeros and nothing else; ends at the first that is not."""
    matrices = {name: record for name, record in records.items() if len(record.shape) > 1}
    if matrices and all(find_zero_weights({name: record}) for name, record in matrices.items()):
        raise ValueError(f"{path} holds nothing but zeros; download it again")


def _is_zero(reader: WeightReader, record: TensorRecord) -> bool:
    tensor = reader.get_slice(record.key)
    first, end = record.rows or (0, tensor.get_shape()[0])
    if any(_has_number(tensor[row : row + 1]) for row in {first, (first + end) // 2, end - 1}):
        return False
    return not any(_has_number(tensor[row : row + 1]) for row in range(first, end))


def _has_number(rows: torch.Tensor) -> bool:
    """By its bytes, which types without arithmetic have too."""
    return bool(rows.contiguous().view(torch.uint8).any())
