"""Tools on LoRA files: layers are read and computed in float32 one at a time.

    scale, merge    sums of files times numbers. Of LoRA: A stacked, B side by side, the rank a sum of ranks
    resize          the best approximation of a lower rank (Eckart, Young 1936). Of LoRA by QR and SVD of R x R
    extract         the same of tuned - base, by a randomized SVD

New factors have the strength in B, and an alpha that is their rank. A sum or a lower rank of other kinds is a plain
LoRA of what they change. A convolution is a LoRA of its weight as a matrix [out, in * height * width].
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..families.naming import find_by_diffusers, find_by_original
from ..families.registry import FAMILIES
from ..version import VERSION
from . import lora_change, lora_start
from .header import TensorRecord
from .lora_change import Base, Energy, Rows, needs_weight, title_of
from .lora_file import ALPHA, DIFFUSERS, EXACT, FIRST, KOHYA, ORIGINAL, A, B, Layer
from .lora_start import Names, is_text_layer, layer_size
from .weight_file import WeightReader, open_weights, read_rows, write_tensors

Tensors = Iterator[tuple[str, Tensor]]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_STALE = re.compile(r"ss_network_(dim|alpha)|sshs_.*|modelspec\.hash.*|lora_adapter_metadata|devicebridge_file")


@dataclass(frozen=True)
class LoraFile:
    path: Path
    reader: WeightReader
    names: Mapping[str, Names]  # of each layer's tensors by kind, by the layer's name
    strengths: Mapping[str, float]  # see read_strengths

    def parts(self, layer: str) -> Layer:
        """Its tensors as they are, but A and B as matrices."""
        parts = {kind: self.reader.get_tensor(name) for kind, name in self.names[layer].items()}
        return {kind: each.flatten(1) if kind in (A, B) and each.ndim > 2 else each for kind, each in parts.items()}

    def layer(self, layer: str) -> Layer:
        """The same in float32, with the strength that metadata alone give."""
        own = self.names[layer]
        return {kind: each.float() * self.strengths.get(own[kind], 1) for kind, each in self.parts(layer).items()}

    def cast(self, tensor: Tensor, name: str, kind: str, dtype: torch.dtype | None) -> Tensor:
        """As the file's tensor of this name is, in another type or its own. Raises: ValueError for infinite numbers."""
        own = self.reader.get_tensor(name).dtype
        wanted = torch.float32 if kind == ALPHA else self._wanted(own, None if kind in EXACT else dtype)
        if sides := self.reader.header.tensors[name].shape[2:]:  # of a convolution
            tensor = tensor.reshape(len(tensor), -1, *sides)
        return finite(tensor, wanted, f"{name} of {self.path}")

    def type_of(self, layer: str) -> torch.dtype:
        """Of its matrices."""
        return self.reader.get_tensor(next(n for kind, n in self.names[layer].items() if kind not in EXACT)).dtype

    def with_parts(self, layer: str, parts: Layer, dtype: torch.dtype | None) -> Tensors:
        """A layer's tensors under their names, with others in them; an alpha only where the file has one."""
        own, wanted = self.names[layer], self._wanted(self.type_of(layer), dtype)
        for kind, each in parts.items():
            if kind in own:
                yield own[kind], self.cast(each, own[kind], kind, dtype)
            elif kind != ALPHA:  # a plain LoRA of another kind
                yield f"{layer}.{kind}", finite(each, wanted, f"{layer} of {self.path}")

    @staticmethod
    def _wanted(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
        return dtype or (own if own in DTYPES.values() else torch.bfloat16 if own.itemsize == 1 else torch.float32)


def finite(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Raises: ValueError for infinite numbers."""
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{what} would not be finite as {str(dtype).removeprefix('torch.')}; use --dtype float32")
    return tensor


@contextmanager
def open_lora(path: Path) -> Iterator[LoraFile]:
    """Raises: ValueError naming the file, and the layer or tensor that is of no sound LoRA."""
    with open_weights(path) as reader:
        names, others = lora_start.group_parts(path, reader.header.tensors)
        if others or not names:
            raise ValueError(
                f"{path} has {others[0] if others else 'no tensor'}, and tensors of LoRA, DoRA, LoKr, LoHa and OFT are "
                f"read alone ({len(others)} of {len(reader.header.tensors)} are others); give such a file"
            )
        for layer in names:
            lora_start.refuse_unsound_layer(path, layer, LoraFile(path, reader, names, {}).parts(layer))
            reader.release()
        strengths = lora_start.read_strengths(path, reader.header.metadata, reader.all_tensors(), names)
        yield LoraFile(path, reader, names, strengths)


@dataclass
class Result:
    """Tensors that a tool makes as they are read, and what is known once all of them were."""

    tensors: Tensors
    did: str  # for the metadata
    metadata: Mapping[str, str]
    ranks: dict[str, int] = field(default_factory=dict)  # by layer
    energy: tuple[float, float] = (0.0, 0.0)  # squared norms of what was cut, before and after
    left_out: list[str] = field(default_factory=list)

    def note(self, layer: str, rank: int, energy: tuple[float, float] = (0.0, 0.0)) -> None:
        self.ranks[layer] = rank
        self.energy = self.energy[0] + energy[0], self.energy[1] + energy[1]


def refuse_place(out: Path) -> None:
    """Raises: ValueError for a file that is there already, an input among them, and one of another ending."""
    if out.exists():
        raise ValueError(f"{out} is there already, and nothing is written over; name another file with -o")
    if out.suffix != ".safetensors":
        raise ValueError(f"{out} would be a safetensors file; let its name end in .safetensors")


def write(result: Result, out: Path) -> None:
    """Raises: as refuse_place; ValueError for a result without a tensor; OSError by the disk."""
    refuse_place(out)
    kept = {key: each for key, each in result.metadata.items() if not _STALE.fullmatch(key)}
    did = "; ".join(filter(None, (kept.get("devicebridge_lora"), result.did)))
    head = next(result.tensors, None)
    if head is None:
        raise ValueError(f"{out} is not written: {result.did} changes nothing")
    note = {"format": "pt", "devicebridge_lora": did, "devicebridge_version": VERSION}
    write_tensors(out, itertools.chain((head,), result.tensors), kept | note)


@dataclass(frozen=True)
class Combined:
    rank: int = 0  # 0: as it is
    share: float = 1.0  # of squared norms
    dtype: torch.dtype | None = None
    base: Base | None = None

    @property
    def is_cut(self) -> bool:
        return bool(self.rank) or self.share < 1


def combine(files: Sequence[tuple[LoraFile, float]], goal: Combined) -> Result:
    """The sum of files with weights, each layer cut to a rank or to the fewest that keep a share of its squared norm,
    under the names of the first file with it. One of a single file that is not cut keeps its kind; its alpha takes the
    weight, or else its first matrix.

    Raises: ValueError for files of several models or layouts, and for a rank or a base that is needed and missing.
    """
    sizes = _sizes_of(files, goal)

    def tensors() -> Tensors:
        for layer, size in sizes.items():
            having = [(file, weight, file.layer(layer)) for file, weight in files if layer in file.names]
            (lead, factor, own), energy, type_of = having[0], (0.0, 0.0), goal.dtype
            is_plain = all(title_of(each) == "LoRA" for _, _, each in having)
            if len(having) == 1 and not (goal.is_cut and (not is_plain or goal.share < 1 or goal.rank < len(own[A]))):
                parts = own
                if factor != 1:
                    has_alpha = ALPHA in own and any(kind in own for kind in lora_start.RANKED)
                    kind = ALPHA if has_alpha else next(kind for kind in (B, *FIRST) if kind in own)
                    parts = {**own, kind: own[kind] * factor}
            else:
                weighted = [(lora_start.with_strength(each), weight) for _, weight, each in having]
                if is_plain:
                    down = torch.cat([each[A] for each, _ in weighted])
                    up = torch.cat([each[B] * weight for each, weight in weighted], dim=1)
                    if goal.rank and goal.rank < len(down) or goal.share < 1:
                        down, up, energy = lora_change.cut_rank(down, up, goal.rank, goal.share)
                else:
                    down, up, energy = _cut_sum(layer, size, weighted, goal)
                parts = {A: down, B: up, ALPHA: torch.tensor(float(len(down)))}
                types = {file.type_of(layer) for file, _, _ in having}
                type_of = goal.dtype or (torch.float32 if len(types) > 1 else None)
            result.note(layer, len(parts.get(A, ())), energy)
            yield from lead.with_parts(layer, parts, type_of)
            for file, _ in files:
                file.reader.release()

    said = " + ".join(file.path.name + (f" x {weight:g}" if weight != 1 else "") for file, weight in files)
    cut = (f"rank {goal.rank}" if goal.rank else "", f"{goal.share:g} of energy" if goal.share < 1 else "")
    did = ", ".join(filter(None, (said, *cut)))
    return (result := Result(tensors(), did, files[0][0].reader.header.metadata))


def _cut_sum(
    layer: str, size: tuple[int, int], weighted: Sequence[tuple[Layer, float]], goal: Combined
) -> tuple[Tensor, Tensor, Energy]:
    """The best LoRA of this rank of a weighted sum of layers of any kind."""
    weight: Rows | None = None
    if goal.base is not None and any(needs_weight(each) for each, _ in weighted):
        weight, size = goal.base.rows_of(layer, size)

    def rows(start: int, end: int) -> Tensor:
        found = [factor * lora_change.changed_rows(each, weight, start, end) for each, factor in weighted]
        if not torch.isfinite(total := torch.stack(found).sum(0)).all():
            of = f" with {goal.base.path}, which has rows of zeros there or is another model" if goal.base else ""
            raise ValueError(f"the change of {layer} is not finite{of}; give other files")
        return total

    return lora_change.low_rank(rows, size, goal.rank, goal.share)


def _sizes_of(files: Sequence[tuple[LoraFile, float]], goal: Combined) -> dict[str, tuple[int, int]]:
    sizes: dict[str, tuple[tuple[int, int], Path]] = {}
    prefixes = [{p for p in (DIFFUSERS, KOHYA) for n in file.names if n.startswith(p)} for file, _ in files]
    for (file, weight), own in zip(files, prefixes, strict=True):
        if not math.isfinite(weight) or not weight:
            raise ValueError(f"{file.path} times {weight:g} is no LoRA; give another number")
        if len(own) > 1 and (goal.is_cut or prefixes.count(own) < len(files)):
            raise ValueError(
                f"{file.path} has layers twice, for both loaders; convert it to original before it is cut, or merged "
                "with a file that has them once"
            )
        ours, theirs = ([n for n in names if not is_text_layer(n)] or list(names) for names in (file.names, sizes))
        if theirs and not {*ours} & {*theirs}:
            raise ValueError(
                f"{file.path} has no layer of {files[0][0].path}: one begins with {ours[0]}, the other with "
                f"{theirs[0]}; give LoRAs of one model and layout, as devicebridge lora convert makes them"
            )
        for layer, names in file.names.items():
            size = layer_size(file.parts(layer))
            known, path = sizes.setdefault(layer, (size, file.path))
            if not (lora_start.has_size(known, size) or lora_start.has_size(size, known)):
                raise ValueError(f"{layer} is {known} in {path} and {size} in {file.path}; give LoRAs of one model")
            sizes[layer] = max(known, size), path
            is_added = goal.is_cut or sum(layer in each.names for each, _ in files) > 1
            if (title := title_of(names)) == "LoRA" or not is_added and (weight == 1 or not needs_weight(names)):
                continue
            lacking = [] if goal.rank else ["--rank, the rank of the plain LoRA that is made of it"]
            if needs_weight(names) and goal.base is None:
                lacking.append("--base, the model's file, on whose weights the change depends")
            if lacking:
                tool = "" if is_added else "devicebridge lora merge FILE:NUMBER with "
                raise ValueError(f"{file.path}: {layer} is a {title}; give {tool}{', and '.join(lacking)}")
    return {layer: size for layer, (size, _) in sizes.items()}


def extract(tuned: Path, base: Path, rank: int, dtype: torch.dtype = torch.bfloat16) -> Result:
    """A model less another, layer by layer, at this rank; layers that are alike are left out. Base is rounded to
    tuned's number type first, so that a weight that was not trained gives zeros.

    Raises: ValueError for files that differ in names or shapes, and for rounded weights.
    """
    (ours, outside), (theirs, _) = lora_change.model_records(tuned), lora_change.model_records(base)
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
                rows, columns = _less(readers, record, theirs[name]), math.prod(record.shape[1:])
                if not any(bool(rows(*each).any()) for each in lora_change.spans_of((*record.shape, 1)[0], columns)):
                    continue
                if not _is_layer(name, record):
                    result.left_out.append(name)
                    continue
                layer = (DIFFUSERS if is_diffusers else ORIGINAL) + name.removesuffix(".weight")
                down, up, energy = lora_change.low_rank(rows, (record.shape[0], columns), rank)
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


def _less(readers: Mapping[Path, WeightReader], ours: TensorRecord, theirs: TensorRecord) -> Rows:
    """As a matrix; ValueError for numbers that are not finite."""

    def rows(start: int, end: int) -> Tensor:
        mine, other = (read_rows(readers[each.file], each, start, end) for each in (ours, theirs))
        change = mine.float() - other.to(mine.dtype).float()
        for reader in readers.values():
            reader.release()
        if not torch.isfinite(change).all():
            found = f"{ours.key} is not finite in {ours.file} or {theirs.file}, as {ours.dtype}"
            raise ValueError(f"{found}; give other files")
        return change.flatten(1) if change.ndim > 1 else change

    return rows
