"""A LoRA of what a model is more than another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..families.naming import find_by_diffusers, find_by_original
from ..families.registry import FAMILIES
from .header import TensorRecord
from .lora_change import DIFFUSERS, ORIGINAL, low_rank, model_records, spans_of
from .lora_file import ALPHA, A, B
from .lora_tools import Result, Tensors, finite
from .weight_file import WeightReader, open_weights, read_rows


def extract(tuned: Path, base: Path, rank: int, dtype: torch.dtype = torch.bfloat16) -> Result:
    """A model less another, layer by layer, at this rank. Layers that are alike are left out.

    Base is rounded to tuned's number type first, so that a weight that was not trained gives zeros.

    Raises: ValueError for files that differ in names or shapes, and for rounded weights.
    """
    (ours, outside), (theirs, _) = model_records(tuned), model_records(base)
    for name in ours | theirs:
        one, other = (list(of[name].shape) if name in of else "missing" for of in (ours, theirs))
        if one != other:
            raise ValueError(f"{name} is {one} in {tuned} and {other} in {base}; give files of one model and layout")
    layers = [name.removesuffix(".weight") for name, record in ours.items() if _is_layer(name, record)]
    is_diffusers = any(
        all(find_by_diffusers(layer, family.renames) for layer in layers)
        and not all(find_by_original(layer, family.renames) for layer in layers)
        for family in FAMILIES.values()
    )

    def tensors() -> Tensors:
        with ExitStack() as stack:
            files = {record.file for records in (ours, theirs) for record in records.values()}
            readers = {file: stack.enter_context(open_weights(file, is_model=True)) for file in files}
            for name, record in ours.items():
                change = _Change(readers, record, theirs[name])
                if not change.is_any():
                    continue
                if not _is_layer(name, record):
                    result.left_out.append(name)
                    continue
                layer = (DIFFUSERS if is_diffusers else ORIGINAL) + name.removesuffix(".weight")
                down, up, energy = low_rank(change.rows, (record.shape[0], prod(record.shape[1:])), rank)
                result.note(layer, len(down), energy)
                more = (1,) * (len(record.shape) - 2)
                yield f"{layer}.{A}", finite(down.reshape(-1, *record.shape[1:]), dtype, f"{name} of {tuned}")
                yield f"{layer}.{B}", finite(up.reshape(*up.shape, *more), dtype, f"{name} of {tuned}")
                if not is_diffusers:
                    yield f"{layer}.{ALPHA}", torch.tensor(float(len(down)))

    if not is_diffusers and (tuned.is_dir() or "conv_in.weight" in ours):  # a UNet of diffusers
        raise ValueError(f"{tuned} has names that no loader is known to read; give both files as ComfyUI has them")
    return (result := Result(tensors(), f"{tuned.name} - {base.name}, rank {rank}", {}, left_out=outside))


def _is_layer(name: str, record: TensorRecord) -> bool:
    return name.endswith(".weight") and len(record.shape) > 1


class _Change:
    """A tensor less another."""

    def __init__(self, readers: Mapping[Path, WeightReader], ours: TensorRecord, theirs: TensorRecord) -> None:
        self._readers, self._pair = readers, (ours, theirs)

    def rows(self, start: int, end: int) -> Tensor:
        """Ours less theirs, float32, as a matrix. Raises: ValueError for numbers that are not finite."""
        ours, theirs = self._pair
        mine, other = (
            read_rows(self._readers[each.file], each, start, end)
            if each.shape
            else self._readers[each.file].get_tensor(each.key)[None]
            for each in self._pair
        )
        change = mine.float() - other.to(mine.dtype).float()
        for reader in self._readers.values():
            reader.release()
        if not torch.isfinite(change).all():
            found = f"{ours.key} is not finite in {ours.file} or {theirs.file}, as {ours.dtype}"
            raise ValueError(f"{found}; give other files")
        return change.flatten(1) if change.ndim > 1 else change

    def is_any(self) -> bool:
        """Whether they differ."""
        count, *others = (*self._pair[0].shape, 1)
        return any(bool(self.rows(*each).any()) for each in spans_of(count, prod(others)))
