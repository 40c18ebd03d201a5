"""Tools on LoRA files: scaled, merged, cut to a lower rank, taken from two models, written in another layout.

Layers are read, computed in float32 and written one at a time. A LoRA changes a weight by strength B A, and every tool
says what it makes of that:

    scale      the same times a number
    merge      the sum over files of weight strength B A: A stacked, B side by side, so the rank is the sum of ranks
    resize     the best approximation of a lower rank (Eckart, Young 1936), by QR of B and A^T and an SVD of R x R
    extract    the same of tuned - base, by a randomized SVD (Halko, Martinsson, Tropp, arXiv 0909.4061)
    convert    what lora_file.py writes of it

New factors have the strength in B, and an alpha that is their rank. What metadata say of rank, alpha and hashes of the
tensors is no longer true, and goes.

A DoRA's magnitude depends on the model's weights, and a LoKr has no rank to be cut. Both get new names at most, and all
else is refused, as LoHa and others are. A convolution is a LoRA of its weight as a matrix [out, in * height * width],
as ComfyUI and kohya's scripts have it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..families.naming import Stack, find_by_diffusers, find_by_original, originals_of
from ..families.registry import FAMILIES, find_family
from ..families.spec import ModelFamily
from ..patches.lora import matches_any
from ..version import VERSION
from . import lora_file, lora_start
from .checkpoint import read_tensor_records
from .header import FLOAT_TYPES, TensorRecord
from .lora_file import ALPHA, DORA, LOKR, MAGNITUDE, A, B, Layer, LoraLayout
from .lora_start import LayerNames, Names, is_text_layer, layer_size
from .model_class import Shapes, expected_shapes
from .model_files import first
from .weight_file import WeightReader, open_weights, read_rows, write_tensors

Tensors = Iterator[tuple[str, Tensor]]
FileLayout = Literal["original", "diffusers", "both", "kohya"]
LAYOUTS: tuple[FileLayout, ...] = ("original", "diffusers", "both", "kohya")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_KOHYA = {A: "lora_down.weight", B: "lora_up.weight"}
ORIGINAL, KOHYA, DIFFUSERS = "diffusion_model.", "lora_unet_", "transformer."  # prefixes
_STALE = re.compile(r"ss_network_(dim|alpha)|sshs_.*|modelspec\.hash.*|lora_adapter_metadata|devicebridge_file")
_PAIRS = ((A, B), ("lokr_w2_b", "lokr_w2_a"))
_OVERSAMPLED, _ITERATIONS, _SEED = 16, 4, 0  # of the randomized SVD
_ROWS = 1024  # that are subtracted at a time


@dataclass(frozen=True)
class LoraFile:
    """An open file. names: of each layer's tensors by kind, by the layer's name. strengths: see read_strengths."""

    path: Path
    reader: WeightReader
    names: Mapping[str, Names]
    strengths: Mapping[str, float]

    def parts(self, layer: str) -> Layer:
        """Its tensors as they are, but A and B as matrices."""
        parts = {kind: self.reader.get_tensor(name) for kind, name in self.names[layer].items()}
        return {kind: each.flatten(1) if kind in (A, B) and each.ndim > 2 else each for kind, each in parts.items()}

    def layer(self, layer: str) -> Layer:
        """The same in float32, with the strength that metadata alone give."""
        own = self.names[layer]
        return {kind: each.float() * self.strengths.get(own[kind], 1) for kind, each in self.parts(layer).items()}

    def cast(self, tensor: Tensor, name: str, dtype: torch.dtype | None) -> Tensor:
        """As the file's tensor of this name is, in another type or its own. Raises: ValueError for infinite numbers."""
        own = self.reader.get_tensor(name).dtype
        wanted = dtype or (own if own in DTYPES.values() else torch.bfloat16 if own.itemsize == 1 else torch.float32)
        if sides := self.reader.header.tensors[name].shape[2:]:  # of a convolution
            tensor = tensor.reshape(len(tensor), -1, *sides)
        return _finite(tensor, wanted, f"{name} of {self.path}")

    def with_factors(self, layer: str, down: Tensor, up: Tensor, alpha: Tensor, dtype: torch.dtype | None) -> Tensors:
        """A layer's tensors under their names, with others in them; an alpha only where the file has one."""
        own = self.names[layer]
        yield own[A], self.cast(down, own[A], dtype)
        yield own[B], self.cast(up, own[B], dtype)
        if ALPHA in own:
            yield own[ALPHA], _finite(alpha.reshape(()), torch.float32, f"{own[ALPHA]} of {self.path}")


def _finite(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """In that type."""
    tensor = tensor.to(dtype)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{what} would not be finite as {str(dtype).removeprefix('torch.')}; use --dtype float32")
    return tensor


@contextmanager
def open_lora(path: Path) -> Iterator[LoraFile]:
    """Raises: ValueError naming the file, and the layer or tensor that is of no sound LoRA, DoRA or LoKr."""
    with open_weights(path) as reader:
        names, others = lora_start.group_parts(path, reader.keys())
        if others or not names:
            raise ValueError(
                f"{path} has {others[0] if others else 'no tensor'}, and tensors of LoRA, DoRA and LoKr are read alone "
                f"({len(others)} of {len(reader.keys())} are others); give such a file"
            )
        for layer in names:
            lora_start.refuse_unsound_layer(path, layer, LoraFile(path, reader, names, {}).parts(layer))
            reader.release()
        strengths = lora_start.read_strengths(path, reader.header.metadata, reader.all_tensors(), names)
        yield LoraFile(path, reader, names, strengths)


def kind_of(names: Names) -> str:
    """Of a layer."""
    return "LoKr" if any(kind in names for kind in LOKR) else "DoRA" if DORA in names or MAGNITUDE in names else "LoRA"


def _refuse_kinds(file: LoraFile, done: str) -> None:
    """Raises: ValueError for DoRA and LoKr."""
    for layer, names in file.names.items():
        if (kind := kind_of(names)) != "LoRA":
            raise ValueError(f"{file.path}: {layer} is a {kind}, which cannot be {done}; give a plain LoRA")


# ---- what is written


@dataclass
class Result:
    """Tensors that a tool makes as they are asked for, and what is known once all of them were.

    did: for the metadata. ranks: by layer. energy: squared norms of what was cut, before and after.
    """

    tensors: Tensors
    did: str
    metadata: Mapping[str, str]
    ranks: dict[str, int] = field(default_factory=dict)
    energy: tuple[float, float] = (0.0, 0.0)
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


# ---- scale, merge, resize


def combine(
    files: Sequence[tuple[LoraFile, float]], rank: int = 0, share: float = 1.0, dtype: torch.dtype | None = None
) -> Result:
    """The sum of files with weights, each layer cut to a rank or to the fewest that keep a share of its squared norm.

    A layer has the names of the first file with it. One of a single file that is not cut keeps its matrices where it
    has an alpha, which takes the weight.

    Raises: ValueError for other kinds than LoRA, and for files of several models or layouts.
    """
    sizes: dict[str, tuple[tuple[int, int], Path]] = {}
    for file, weight in files:
        _refuse_kinds(file, "scaled, merged or resized")
        if not math.isfinite(weight) or not weight:
            raise ValueError(f"{file.path} times {weight:g} is no LoRA; give another number")
        if (rank or share < 1) and len({p for p in (DIFFUSERS, KOHYA) for n in file.names if n.startswith(p)}) > 1:
            raise ValueError(f"{file.path} has layers twice, for both loaders; convert it to original before it is cut")
        ours, theirs = ([n for n in names if not is_text_layer(n)] or list(names) for names in (file.names, sizes))
        if theirs and not {*ours} & {*theirs}:
            raise ValueError(
                f"{file.path} has no layer of {files[0][0].path}: one begins with {ours[0]}, the other with "
                f"{theirs[0]}; give LoRAs of one model and layout, as devicebridge lora convert makes them"
            )
        for layer in file.names:
            size = layer_size(file.parts(layer))
            known, path = sizes.setdefault(layer, (size, file.path))
            if known != size:
                raise ValueError(f"{layer} is {known} in {path} and {size} in {file.path}; give LoRAs of one model")

    def tensors() -> Tensors:
        for layer in sizes:
            having = [(file, weight, file.layer(layer)) for file, weight in files if layer in file.names]
            lead, factor, own = having[0]
            down, up, energy = torch.cat([each[A] for _, _, each in having]), own[B], (0.0, 0.0)
            alpha, type_of = own.get(ALPHA, torch.ones(())) * factor, dtype
            if len(having) == 1 and share == 1 and (not rank or rank >= len(down)):
                up = up if ALPHA in own else up * factor
            else:
                up = torch.cat([lora_start.with_strength(each)[B] * weight for _, weight, each in having], dim=1)
                if rank and rank < len(down) or share < 1:
                    down, up, energy = cut_rank(down, up, rank, share)
                alpha = torch.tensor(float(len(down)))
                types = {file.reader.get_tensor(file.names[layer][B]).dtype for file, _, _ in having}
                type_of = dtype or (torch.float32 if len(types) > 1 else None)
            result.note(layer, len(down), energy)
            yield from lead.with_factors(layer, down, up, alpha, type_of)
            for file, _ in files:
                file.reader.release()

    said = " + ".join(file.path.name + (f" x {weight:g}" if weight != 1 else "") for file, weight in files)
    cut = (f"rank {rank}" if rank else "", f"{share:g} of energy" if share < 1 else "")
    did = ", ".join(filter(None, (said, *cut)))
    return (result := Result(tensors(), did, files[0][0].reader.header.metadata))


def cut_rank(down: Tensor, up: Tensor, rank: int, share: float = 1.0) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Of A [R, in] and B [out, R] the best of a lower rank (0 for any), and the squared norm before and after."""
    q_up, r_up = torch.linalg.qr(up)
    q_down, r_down = torch.linalg.qr(down.mT)
    left, values, right = torch.linalg.svd(r_up @ r_down.mT, full_matrices=False)
    return _factors(q_up @ left, values, right @ q_down.mT, rank or len(values), share)


def _factors(
    left: Tensor, values: Tensor, right: Tensor, rank: int, share: float = 1.0
) -> tuple[Tensor, Tensor, tuple[float, float]]:
    energy = values.double().square().cumsum(0)
    enough = int((energy < share * energy[-1]).sum()) + 1 if share < 1 else len(values)
    kept = min(rank, enough, len(values))
    root = values[:kept].sqrt()
    return root[:, None] * right[:kept], left[:, :kept] * root, (float(energy[-1]), float(energy[kept - 1]))


# ---- extract


def extract(tuned: Path, base: Path, rank: int, dtype: torch.dtype = torch.bfloat16) -> Result:
    """A model less another, layer by layer, at this rank. Layers that are alike are left out.

    Base is rounded to tuned's number type first, so that a weight that was not trained gives zeros.

    Raises: ValueError for files that differ in names or shapes, and for rounded weights.
    """
    (ours, outside), (theirs, _) = _model_records(tuned), _model_records(base)
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
                change = _change(readers, record, theirs[name])
                if change is not None and _is_layer(name, record):
                    layer = (DIFFUSERS if is_diffusers else ORIGINAL) + name.removesuffix(".weight")
                    down, up, energy = low_rank(change.flatten(1), rank)
                    result.note(layer, len(down), energy)
                    more = (1,) * (len(record.shape) - 2)
                    yield f"{layer}.{A}", _finite(down.reshape(-1, *record.shape[1:]), dtype, f"{name} of {tuned}")
                    yield f"{layer}.{B}", _finite(up.reshape(*up.shape, *more), dtype, f"{name} of {tuned}")
                    if not is_diffusers:
                        yield f"{layer}.{ALPHA}", torch.tensor(float(len(down)))
                elif change is not None:
                    result.left_out.append(name)
                for reader in readers.values():
                    reader.release()

    if not is_diffusers and (tuned.is_dir() or "conv_in.weight" in ours):  # a UNet of diffusers
        raise ValueError(f"{tuned} has names that no loader is known to read; give both files as ComfyUI has them")
    return (result := Result(tensors(), f"{tuned.name} - {base.name}, rank {rank}", {}, left_out=outside))


def _is_layer(name: str, record: TensorRecord) -> bool:
    return name.endswith(".weight") and len(record.shape) > 1


def _model_records(path: Path) -> tuple[dict[str, TensorRecord], list[str]]:
    """The tensors of a diffusion model by their names in the file, without its prefix, and others of the file.

    Raises: ValueError for weights that are rounded to 8 bits or less.
    """
    _, headers, records = read_tensor_records(path)
    if rounded := [record for record in records.values() if record.dtype not in FLOAT_TYPES]:
        raise ValueError(
            f"{path} has {rounded[0].key} as {rounded[0].dtype} ({len(rounded)} such tensors), which rounds away much "
            "of what a training changes; give the file in bf16, fp16 or fp32"
        )
    used = {record.key for record in records.values()}
    return records, [key for header in headers for key in header.tensors if key not in used]


def _change(readers: Mapping[Path, WeightReader], ours: TensorRecord, theirs: TensorRecord) -> Tensor | None:
    """Ours less theirs, float32, some rows at a time; None if they are alike."""
    change = torch.empty(ours.shape or (1,))
    for start in range(0, len(change), _ROWS):
        end = min(start + _ROWS, len(change))
        mine, other = (
            read_rows(readers[each.file], each, start, end) if each.shape else readers[each.file].get_tensor(each.key)
            for each in (ours, theirs)
        )
        change[start:end] = mine.float() - other.to(mine.dtype).float()
    if not torch.isfinite(change).all():
        raise ValueError(f"{ours.key} is not finite in {ours.file} or {theirs.file}, as {ours.dtype}; give other files")
    return change if change.any() else None


def low_rank(change: Tensor, rank: int) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """As cut_rank, of a matrix [out, in]; the same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        left, values, right = torch.svd_lowrank(change, min(rank + _OVERSAMPLED, *change.shape), niter=_ITERATIONS)
    down, up, (_, kept) = _factors(left, values, right.mT, rank)
    return down, up, (float(torch.linalg.vector_norm(change)) ** 2, kept)


# ---- which model, and convert


@dataclass(frozen=True)
class Model:
    """A family whose names a file has. stacks: what each layer is. variants: those of its sizes."""

    family: ModelFamily
    names: LayerNames
    stacks: Mapping[str, Stack]
    variants: Sequence[str]

    def original(self, layer: str) -> str:
        (name,) = originals_of(self.stacks[layer].members[:1], self.family.renames)
        return name

    def is_original(self, layer: str) -> bool:
        """Whether the file calls it as the makers do."""
        return self.stacks[layer].original == self.original(layer)


def find_models(file: LoraFile, family: str = "") -> list[Model]:
    """The families that have all these layers: those of their sizes, if some are, else by names. Text is left out."""
    sizes = {layer: layer_size(file.parts(layer)) for layer in file.names if not is_text_layer(layer)}
    found = []
    for each in (find_family(family),) if family else FAMILIES.values():
        shapes = {variant.name: expected_shapes(each, variant.transformer_config) for variant in each.variants}
        linears = {n.removesuffix(".weight") for own in shapes.values() for n in own if len(own[n]) == 2}
        names = LayerNames(each, linears)
        stacks = {layer: stack for layer in sizes if (stack := names.find(layer)) is not None}
        if stacks.keys() == sizes.keys() and sizes:
            variants = [name for name, own in shapes.items() if _have_sizes(own, stacks, sizes)]
            found.append(Model(each, names, stacks, variants))
    return [model for model in found if model.variants] or found


def describe_layer(file: LoraFile, layer: str) -> dict[str, Any]:
    """Kind, number type, rank, alpha, strength, size [out, in], Frobenius norm of what it adds before a magnitude."""
    parts, whole, own = file.parts(layer), lora_start.with_strength(file.layer(layer)), file.names[layer]
    pair = next(((whole[down], whole[up]) for down, up in _PAIRS if down in whole), None)
    norms = [whole[kind].norm() for kind in ("lokr_w1", "lokr_w2") if kind in whole]
    if pair is not None:
        norms.append(((pair[0] @ pair[0].mT) * (pair[1].mT @ pair[1])).sum().clamp(min=0).sqrt())
    rank = next((len(parts[kind]) for kind in lora_start.RANKED if kind in parts), None)
    alpha = float(parts[ALPHA]) if ALPHA in parts else None
    return {
        "kind": kind_of(own),
        "type": str(next(each.dtype for kind, each in parts.items() if kind != ALPHA)).removeprefix("torch."),
        "rank": rank,
        "alpha": alpha,
        "strength": (alpha / rank if alpha and rank else 1.0)
        * math.prod(file.strengths.get(n, 1) for n in own.values()),
        "size": layer_size(parts),
        "norm": math.prod(map(float, norms)),
    }


def describe_loaders(file: LoraFile, model: Model) -> dict[str, str]:
    """What ComfyUI 0.33.0 and diffusers 0.42.1 make of a file's layers, as far as is known from their names."""
    family, unread = model.family, []
    for layer, stack in model.stacks.items():
        original, name = stack.original, stack.members[0]
        if model.is_original(layer):
            known = [ORIGINAL + original, KOHYA + original.replace(".", "_")]
        elif family.shared_lora_names == "diffusers" and not matches_any(name, family.unread_lora):
            known = [DIFFUSERS + name, name, *(p + name.replace(".", "_") for p in ("lycoris_", "lora_transformer_"))]
        else:
            known = []
        if layer not in known or MAGNITUDE in file.names[layer] and DORA not in file.names[layer]:
            unread.append(layer)
    members = {name for stack in model.stacks.values() for name in stack.members}
    is_dora = any(kind_of(names) == "DoRA" for names in file.names.values())
    others = "not known here; convert it to diffusers"
    if {DIFFUSERS + name for name in members} <= model.stacks.keys():
        others = "loads all layers"
    elif all(layer == ORIGINAL + stack.original for layer, stack in model.stacks.items()):
        lost = lora_file.what_is_lost(family, sorted(members), "original", is_dora)
        others = lost.get("diffusers", "loads all layers")
    missed = f", not {first(unread)}" if unread else ""
    return {
        "ComfyUI": f"loads {len(model.stacks) - len(unread)} of {len(model.stacks)} layers{missed}",
        "diffusers": others,
    }


def _have_sizes(shapes: Shapes, stacks: Mapping[str, Stack], sizes: Mapping[str, tuple[int, int]]) -> bool:
    for layer, stack in stacks.items():
        members = [shapes.get(f"{member}.weight", (0, 0)) for member in stack.members]
        if sizes[layer] != (sum(rows for rows, *_ in members), members[0][1]):
            return False
    return True


def convert(file: LoraFile, layout: FileLayout, family: str = "", dtype: torch.dtype | None = None) -> Result:
    """The file in another layout. "kohya" is "original" under kohya's names, whose dots are underscores.

    Where only names change, tensors of every kind stay as they are. A family "" is found.

    Raises: ValueError for names that are not known, and for what the layout cannot hold.
    """
    models = find_models(file, family)
    did, layers = f"{file.path.name} converted to {layout}", [each for each in file.names if not is_text_layer(each)]
    alike = [model for model in models if all(map(model.is_original, layers))]
    if layout in ("original", "kohya") and (alike or not models and all(each.startswith(ORIGINAL) for each in layers)):
        named = {each: alike[0].original(each) if alike else each.removeprefix(ORIGINAL) for each in layers}
        return Result(_renamed(file, named, layout, dtype), did, file.reader.header.metadata)
    if len(models) != 1 or not (family or models[0].variants):
        known = ", ".join(each.title for each in FAMILIES.values())
        may_be = f"may be of {' or '.join(each.family.title for each in models)}; name it with --family"
        odd = next(iter(layers or file.names))
        other = f'has {odd}, which is of none of {known}; of other models "original" becomes "kohya" alone'
        raise ValueError(f"{file.path} {may_be if models else other}")
    (model,) = models
    _refuse_kinds(file, f"converted to {layout} from these names")
    if len(layers) < len(file.names):
        raise ValueError(f"{file.path} also changes a text encoder; give a LoRA of the model alone")
    target: LoraLayout = "original" if layout == "kohya" else layout
    lora_file.check_lora_layout(
        model.family, [m for stack in model.stacks.values() for m in stack.members], target, dora=False
    )
    return Result(_rewritten(file, model, target, layout == "kohya", dtype), did, file.reader.header.metadata)


def _renamed(file: LoraFile, named: Mapping[str, str], layout: FileLayout, dtype: torch.dtype | None) -> Tensors:
    for layer, own in file.names.items():
        if MAGNITUDE in own:
            raise ValueError(f"{file.path}: {layer} has a magnitude of PEFT's, which ComfyUI does not read")
        parts = file.layer(layer)
        if A in own and ALPHA not in own:
            parts[ALPHA] = torch.tensor(float(len(parts[A])))
        for kind, each in parts.items():
            new = f"{ORIGINAL}{named[layer]}.{kind}" if layer in named else ""
            name = _in_layout(new, layout) if new else own.get(kind, f"{layer}.{kind}")
            yield name, each if kind == ALPHA else file.cast(each, own[kind], dtype)
        file.reader.release()


def _rewritten(file: LoraFile, model: Model, layout: LoraLayout, is_kohya: bool, dtype: torch.dtype | None) -> Tensors:
    groups: dict[str, list[str]] = {}  # which layers of the file are in one of the makers'
    for layer in model.stacks:
        groups.setdefault(model.original(layer), []).append(layer)
    for layers in groups.values():
        own = {layer: file.layer(layer) for layer in layers}
        placed = lora_start.place_layers(file.path, own, model.family, model.names)
        for parts in placed.values():  # so that what was one layer of the makers' becomes one of the same rank
            parts[A] = next(each[A] for each in placed.values() if torch.equal(each[A], parts[A]))
        trained = {f"{name}.{kind}": each for name, parts in placed.items() for kind, each in parts.items()}
        for name, tensor in lora_file.make_lora_tensors(model.family, layout, trained, trained, 1.0, 1).items():
            each = tensor if name.endswith(f".{ALPHA}") else file.cast(tensor, file.names[layers[0]][B], dtype)
            yield _in_layout(name, "kohya" if is_kohya else layout), each
        file.reader.release()


def _in_layout(name: str, layout: FileLayout) -> str:
    """A tensor's name in "kohya", of that in "original"."""
    part = lora_start.find_part(name) if layout == "kohya" else None
    if part is None:
        return name
    return f"{KOHYA}{part.layer.removeprefix(ORIGINAL).replace('.', '_')}.{_KOHYA.get(part.kind, part.kind)}"
