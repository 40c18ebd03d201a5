"""What a layer of a LoRA file changes of a weight, some rows at a time, and the best approximation of a lower rank.

A layer adds D, with the strength in it (patches/lora_linear.py). With a magnitude m the weight W is needed, too:
ComfyUI's dora_scale makes m (W + D) / |W| of it, row by row, PEFT's magnitude m (W + D) / |W + D|.

No matrix [out, in] of more than _HELD numbers is made as a whole. Rows come from a function, which a randomized SVD
(Halko, Martinsson, Tropp, arXiv 0909.4061) calls some ten times for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..families.naming import find_by_diffusers
from ..families.registry import FAMILIES
from ..patches.lora_linear import oft_change
from .checkpoint import read_tensor_records
from .header import FLOAT_TYPES, TensorRecord
from .lora_file import DIFFUSERS, DORA, KOHYA, MAGNITUDE, OFT, ORIGINAL, TITLES, A, B, Layer
from .lora_start import kind_of
from .weight_file import WeightReader, open_weights, read_rows

Rows = Callable[[int, int], Tensor]  # rows start to end of a matrix, float32
Energy = tuple[float, float]  # squared norms, of a matrix and of what is kept of it

_OVERSAMPLED, _ITERATIONS, _SEED = 16, 4, 0  # of the randomized SVD
_CHUNK = 2**23  # numbers that are computed at a time, in whole rows
_HELD = 2**27  # numbers of a matrix that is held whole


def title_of(layer: Mapping[str, object]) -> str:
    kind = kind_of(layer)
    if not needs_weight(layer) or kind == "oft":
        return TITLES[kind]
    return {"lora": "DoRA", "lokr": "DoKr"}.get(kind, f"{TITLES[kind]} with DoRA")


def needs_weight(layer: Mapping[str, object]) -> bool:
    return any(kind in layer for kind in (DORA, MAGNITUDE, OFT))


def added_rows(layer: Layer, start: int, end: int) -> Tensor:
    """Rows of D of any kind but OFT."""
    if A in layer:
        return layer[B][start:end] @ layer[A]
    if "hada_w1_a" in layer:
        one, two = (layer[f"hada_w{n}_a"][start:end] @ layer[f"hada_w{n}_b"] for n in (1, 2))
        return one * two
    first = layer["lokr_w1"]
    second = layer["lokr_w2"] if "lokr_w2" in layer else layer["lokr_w2_a"] @ layer["lokr_w2_b"]
    rows = torch.arange(start, end)
    return (first[rows // len(second)][:, :, None] * second[rows % len(second)][:, None, :]).flatten(1)


def changed_rows(layer: Layer, weight: Rows | None, start: int, end: int) -> Tensor:
    """Rows of what a layer makes of a weight, less that. weight: see needs_weight."""
    if not needs_weight(layer):
        return added_rows(layer, start, end)
    assert weight is not None
    if OFT in layer:
        size = layer[OFT].shape[1]
        low, high = start // size, -(-end // size)  # whole blocks
        blocks = weight(low * size, high * size).unflatten(0, (high - low, size))
        turned = oft_change(layer[OFT][low:high]).mT @ blocks
        return turned.flatten(0, 1)[start - low * size : end - low * size]
    rows = weight(start, end)
    changed = rows + added_rows(layer, start, end)
    magnitude = layer[MAGNITUDE if MAGNITUDE in layer else DORA].reshape(-1, 1)[start:end]
    return changed * (magnitude / (changed if MAGNITUDE in layer else rows).norm(dim=1, keepdim=True)) - rows


def cut_rank(down: Tensor, up: Tensor, rank: int, share: float = 1.0) -> tuple[Tensor, Tensor, Energy]:
    """Of A [R, in] and B [out, R] the best of a lower rank (0: any), and the squared norm before and after."""
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.mT)
    left, values, right = torch.linalg.svd(r_up @ r_down.mT, full_matrices=False)
    energy = float(values.double().square().sum())
    return _factors(q_up @ left, values, right @ q_down.mT, energy, rank or len(values), share)


def low_rank(rows: Rows, shape: tuple[int, int], rank: int, share: float = 1.0) -> tuple[Tensor, Tensor, Energy]:
    """As cut_rank, of a matrix [out, in] by its rows; the same numbers every time."""
    spans = spans_of(*shape)
    if math.prod(shape) <= _HELD:
        whole, spans = torch.cat([rows(*each) for each in spans]), [(0, shape[0])]
        rows = lambda start, end: whole[start:end]  # noqa: E731
    width = min(rank + _OVERSAMPLED, *shape)
    right = torch.randn(shape[1], width, generator=torch.Generator().manual_seed(_SEED))
    left, energy = right, 0.0
    for index in range(_ITERATIONS + 1):
        left = torch.linalg.qr(torch.cat([rows(*each) @ right for each in spans]))[0]
        right, is_last = torch.zeros(shape[1], width), index == _ITERATIONS
        for start, end in spans:
            part = rows(start, end)
            right.addmm_(part.mT, left[start:end])
            energy += float(torch.linalg.vector_norm(part)) ** 2 if is_last else 0.0
        right = right if is_last else torch.linalg.qr(right)[0]
    across, values, inner = torch.linalg.svd(right, full_matrices=False)  # of left^T matrix, transposed
    return _factors(left @ inner.mT, values, across.mT, energy, rank, share)


def spans_of(rows: int, columns: int) -> list[tuple[int, int]]:
    step = max(_CHUNK // columns, 1)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _factors(
    left: Tensor, values: Tensor, right: Tensor, energy: float, rank: int, share: float
) -> tuple[Tensor, Tensor, Energy]:
    kept = values.double().square().cumsum(0)
    enough = int((kept < share * energy).sum()) + 1 if share < 1 else len(values)
    count = min(rank, enough, len(values))
    root = values[:count].sqrt()
    return root[:, None] * right[:count], left[:, :count] * root, (energy, float(kept[count - 1]))


@dataclass(frozen=True)
class Base:
    """The weights of a model's file by the names that layers of LoRA files have, underscores for dots."""

    path: Path
    records: Mapping[str, TensorRecord]
    readers: Mapping[Path, WeightReader]

    def rows_of(self, layer: str, size: tuple[int, int]) -> tuple[Rows, tuple[int, int]]:
        """Rows of the weight that a layer of this name changes, and its size. Raises: ValueError for a layer that is
        not the model's, or of another size."""
        bare = layer
        for prefix in (ORIGINAL, KOHYA, DIFFUSERS, "lycoris_"):
            bare = bare.removeprefix(prefix)
        name, first, count = bare.replace(".", "_"), 0, 0
        stacks = filter(None, (find_by_diffusers(bare, family.renames) for family in FAMILIES.values()))
        for stack in () if name in self.records else stacks:  # a diffusers layer, of which the makers have rows of one
            whole = stack.original.replace(".", "_")
            if whole in self.records and not stack.swap_halves:
                (first, end) = stack.rows(self.records[whole].shape[0])[bare]
                name, count = whole, end - first
                break
        record = self.records.get(name)
        shape = (0, 0) if record is None else (count or record.shape[0], math.prod(record.shape[1:]))
        if record is None or size[0] != shape[0] or size[1] not in (0, shape[1]):
            has = f"it is {shape[0]} by {shape[1]}" if record else "there is none"
            raise ValueError(f"{self.path} is no base of {layer}, {size[0]} by {size[1]}: there {has}; give its model")
        reader = self.readers[record.file]

        def rows(start: int, end: int) -> Tensor:
            found = read_rows(reader, record, first + start, first + end).float().flatten(1)
            reader.release()
            return found

        return rows, shape


@contextmanager
def open_base(path: Path | None) -> Iterator[Base | None]:
    """Raises: ValueError for a file that is no model, or one whose weights are rounded."""
    if path is None:
        yield None
        return
    records, _ = model_records(path)
    with ExitStack() as stack:
        files = {record.file for record in records.values()}
        named = {name.removesuffix(".weight").replace(".", "_"): record for name, record in records.items()}
        yield Base(path, named, {each: stack.enter_context(open_weights(each, is_model=True)) for each in files})


def model_records(path: Path) -> tuple[dict[str, TensorRecord], list[str]]:
    """As read_tensor_records, and others of the file. Raises: ValueError for weights in 8 bits or less."""
    _, headers, records = read_tensor_records(path)
    if rounded := [record for record in records.values() if record.dtype not in FLOAT_TYPES]:
        raise ValueError(
            f"{path} has {rounded[0].key} as {rounded[0].dtype} ({len(rounded)} such tensors), which rounds away much "
            "of what a training changes; give the file in bf16, fp16 or fp32"
        )
    used = {record.key for record in records.values()}
    return records, [key for header in headers for key in header.tensors if key not in used]
