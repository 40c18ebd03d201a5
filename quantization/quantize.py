"""8-bit weights for the frozen linears of a model that trains a LoRA: one entry for every scheme.

fp8, int8                    stored in 8 bits, multiplied in full precision (stored.py)
fp8-compute, int8-compute    stored and multiplied in 8 bits, forwards and backwards (eight_bit.py)
stored                       as the file has each layer of the blocks; multiplied in full precision (stored.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import torch
from torch import Tensor, nn

from ..families.spec import ModelFamily
from ..patches.lora import matches_any
from . import kernel_choice
from .eight_bit import ROTATIONS, num_inputs, rotation_for
from .frozen_linear import ROUNDED, FrozenLinear8
from .stored import PACKINGS, ROWS, has_finite_scales

Scheme = Literal["fp8", "int8", "fp8-compute", "int8-compute", "stored"]
SCHEMES: tuple[Scheme, ...] = tuple(ROUNDED)  # that round, the fastest first; the last works wherever torch does
# How a scheme rounds, where that is not as it was at first: raise it when the same weights get other bits.
ROUNDINGS: Mapping[str, int] = {"fp8": 2, "int8": 2}  # torchao was the first
QUANTIZED = "quantized"
KEPT = "kept in full precision"
NOT_LINEAR = "not a linear layer"
# Of a float8, without its sign: the smallest that is no number.
_NAN_BITS = {torch.float8_e4m3fn: 0x7F, torch.float8_e5m2: 0x7C}


@dataclass(frozen=True)
class QuantizeSettings:
    """How frozen linears are stored. rotation: of int8-compute, the widest block (eight_bit.py); a layer takes the
    widest that divides its in_features. 0 for none."""

    scheme: Scheme
    rotation: int = 64

    @property
    def stored_dtype(self) -> torch.dtype:
        assert self.scheme != "stored"
        return ROUNDED[self.scheme]

    @property
    def is_compute(self) -> bool:
        return self.scheme.endswith("-compute")

    def rotation_of(self, in_features: int) -> int:
        """Block that rotates a layer of this width; 0 for none."""
        if self.scheme != "int8-compute":
            return 0
        return max((block for block in ROTATIONS if block <= self.rotation and in_features % block == 0), default=0)


@dataclass(frozen=True)
class FileFormat:
    """How a file holds a linear's weight. On a model's linear it is the attribute file_format."""

    dtype: torch.dtype
    rotation: int = 0  # block of the rotation (eight_bit.py) that the weight was rounded after, 0 for none
    is_comfys: bool = False  # whether that rotation is ComfyUI's
    packing: str = ROWS  # of stored.PACKINGS, or ROWS


@dataclass(frozen=True)
class Stored8:
    """A linear's weight as files hold it: W = weight * scale, its columns rotated back in blocks; or packed."""

    weight: Tensor  # 8-bit [N, K], or packed [N, bytes]; on meta where it comes later
    scale: Tensor  # float32, on the layer's device. [N, 1]; of a packed weight [N, 0]
    form: FileFormat


def is_wanted(
    module: nn.Module, fqn: str, family: ModelFamily, settings: QuantizeSettings | None
) -> TypeGuard[nn.Linear]:
    """Whether a module is to be quantized; settings None quantize nothing."""
    return settings is not None and _treatment(fqn, module, family, settings) == QUANTIZED


def round_linear(module: nn.Linear, settings: QuantizeSettings) -> FrozenLinear8:
    """What takes the place of a linear whose tensors have their final values and places. Raises: ValueError for weights
    that are not finite."""
    block = settings.rotation_of(module.in_features)
    done = FrozenLinear8.from_linear(module, settings.scheme, rotation=block)  # type: ignore[arg-type]
    return done.train(module.training)


def take_stored(
    fqn: str, module: nn.Linear, stored: Stored8, dtype: torch.dtype, settings: QuantizeSettings
) -> FrozenLinear8:
    """What takes the module's place, with a weight that is in 8 bits already, without a copy.

    Args:
        module: its bias stays; its weight is not read and may be on meta.    dtype: that the layer computes in.
    Raises: ValueError for a weight that is not finite.
    """
    form = stored.form
    assert is_taken(form, settings), (fqn, form)
    if stored.weight.device.type != "meta":
        _refuse_unsound(fqn, stored)
    width = num_inputs(stored.weight, form.packing)
    assert (stored.weight.shape[0], width) == (module.out_features, module.in_features), (fqn, stored.weight.shape)
    rotation = rotation_for(width, stored.scale.device, form.dtype, form.rotation, is_comfys=form.is_comfys)
    packing = "" if settings.is_compute else form.packing
    return FrozenLinear8(stored.weight.contiguous(), stored.scale, module.bias, dtype, rotation, packing)


def _refuse_unsound(fqn: str, stored: Stored8) -> None:
    """Raises: ValueError for NaN or infinity among a weight's numbers or scales."""
    if stored.form.packing != ROWS:
        is_sound = has_finite_scales(stored.weight, stored.form.packing)
    else:
        nan = _NAN_BITS.get(stored.weight.dtype, 0x80)
        height = max(1, 2**26 // max(1, stored.weight.shape[1]))
        pieces = stored.weight.view(torch.uint8).split(height) if nan < 0x80 else ()  # int8 has no NaN
        is_sound = not any(((bits & 0x7F) >= nan).any() for bits in pieces)
    if not is_sound:
        raise ValueError(f"the weight of {fqn} holds NaN; the checkpoint is damaged, load another")


def auto_schemes(types: Mapping[str, int], able: Sequence[Scheme]) -> list[Scheme]:
    """What "auto" chooses from beside full precision, the best first: where it can, what rounds nothing again. types:
    how many tensors of the model's file are quantized, by type. able: what devices can do, of SCHEMES, in its order."""
    if not types:
        return list(able)
    most = max(types, key=types.__getitem__)
    if most in PACKINGS:
        return ["stored"]
    faster = [scheme for scheme in able if QuantizeSettings(scheme).is_compute]
    same = [scheme for scheme in faster if f"torch.{most}" == str(QuantizeSettings(scheme).stored_dtype)]
    return [*(same or faster), "stored"]


def refusal(settings: QuantizeSettings, devices: Iterable[torch.device]) -> str:
    """Why one of these devices cannot compute in the scheme, and which scheme would work on all; "" if they can."""
    devices = tuple(devices)
    for device in devices:
        if fault := _device_fault(settings.scheme, device):
            others = [s for s in SCHEMES if not any(_device_fault(s, each) for each in devices)]
            kind = "" if others[0].endswith("-compute") else ", which only stores in 8 bits,"
            return f"{settings.scheme} was requested, but {fault} ({device}); use {others[0]}{kind} instead"
    return ""


def _device_fault(scheme: Scheme, device: torch.device) -> str:
    if scheme.endswith("-compute"):
        return kernel_choice.fault(ROUNDED[scheme], device)  # type: ignore[index]
    return "" if scheme != "fp8" or kernel_choice.has_float8(device) else "there is no float8 to convert to and from"


# Bytes before and after, by what was done (QUANTIZED, KEPT, NOT_LINEAR, also where that is empty) and a module's fqn.
Groups = Mapping[str, Mapping[str, tuple[int, int]]]
DtypeOf = Callable[[str], torch.dtype]  # from a parameter's fqn to the type that it is loaded in


def sort_modules(model: nn.Module, family: ModelFamily, settings: QuantizeSettings, dtype_of: DtypeOf) -> Groups:
    """Modules with weights of their own by what will be done. Works on meta tensors."""
    groups: dict[str, dict[str, tuple[int, int]]] = {QUANTIZED: {}, KEPT: {}, NOT_LINEAR: {}}
    for name, module in model.named_modules():
        own = {fqn: p.numel() * dtype_of(fqn).itemsize for fqn, p in module.named_parameters(name, recurse=False)}
        if not (size := sum(own.values())):
            continue
        reason, after = _treatment(name, module, family, settings), size
        if reason == QUANTIZED:
            assert isinstance(module, nn.Linear)
            stored = empty_stored(module, settings)
            after += stored.weight.nbytes + stored.scale.nbytes + 4 * stored.form.rotation**2 - own[f"{name}.weight"]
        groups[reason][name] = size, after
    return groups


def describe_quantized(
    model: nn.Module, family: ModelFamily, settings: QuantizeSettings, dtype_of: DtypeOf
) -> tuple[str, int]:
    """What loading does to a model's weights, one line with sizes in decimal GB, and how many layers stay as their file
    has them; as sort_modules. Raises: ValueError if the family or the file leaves nothing to quantize."""
    groups = sort_modules(model, family, settings, dtype_of)
    if not groups[QUANTIZED] and settings.scheme == "stored":
        raise ValueError(
            'quantize = "stored" keeps quantized linears as their file has them, and this file has none in its blocks; '
            'use "auto" or "none"'
        )
    if not groups[QUANTIZED]:
        raise ValueError(
            f"{settings.scheme} was requested, but {family.title} keeps every linear of this {type(model).__name__} in "
            'full precision; use quantize = "none"'
        )
    forms = (getattr(model.get_submodule(name), "file_format", None) for name in groups[QUANTIZED])
    num_taken = sum(is_taken(form, settings) for form in forms if form is not None)
    taken = f" ({num_taken} as they were stored)" if num_taken else ""
    sizes = [each for group in groups.values() for each in group.values()]
    before, after = (f"{sum(each) / 1e9:.2f}" for each in zip(*sizes, strict=True))
    skipped = ", ".join(f"{len(group)} {reason}" for reason, group in groups.items() if reason != QUANTIZED)
    done = f"{len(groups[QUANTIZED])} linears to {settings.scheme}{taken}, {before} -> {after} GB"
    return f"{done}; left alone: {skipped}", num_taken


def stored_bytes(
    model: nn.Module, family: ModelFamily, blocks: Sequence[str], dtype: torch.dtype, settings: QuantizeSettings
) -> tuple[list[int], int]:
    """Bytes of each block and of everything else once quantized, where all others are of one type; as sort_modules."""
    sizes = {**dict.fromkeys(blocks, 0), "": 0}
    for group in sort_modules(model, family, settings, lambda name: dtype).values():
        for name, (_, after) in group.items():
            block = ".".join(name.split(".")[:2])
            sizes[block if block in sizes else ""] += after
    return [sizes[each] for each in blocks], sizes[""]


def empty_stored(linear: nn.Linear, settings: QuantizeSettings) -> Stored8:
    """What a linear's weight will be once quantized, on meta."""
    rows, width = linear.out_features, linear.in_features
    form: FileFormat | None = getattr(linear, "file_format", None)
    if form is None or not is_taken(form, settings):
        form = FileFormat(settings.stored_dtype, settings.rotation_of(width))
    packed = PACKINGS.get(form.packing)
    width = width if packed is None else packed.row_bytes(width)
    values = torch.empty((rows, width), dtype=form.dtype, device="meta")
    return Stored8(values, torch.empty((rows, 1 if packed is None else 0), device="meta"), form)


def is_taken(known: FileFormat, settings: QuantizeSettings) -> bool:
    """Whether a linear's weight can stay as its file has it: of any kind where nothing is to be rounded."""
    if settings.scheme == "stored":
        return True
    return known.dtype is settings.stored_dtype and (not known.is_comfys or settings.scheme == "int8-compute")


def full_weight(linear: nn.Module) -> Tensor:
    """The weight a linear computes with, in full precision; of a plain linear the weight itself. [N, K]"""
    return linear.dequantize() if isinstance(linear, FrozenLinear8) else linear.weight  # type: ignore[return-value]


def _treatment(fqn: str, module: nn.Module, family: ModelFamily, settings: QuantizeSettings) -> str:
    if not isinstance(module, nn.Linear):
        return NOT_LINEAR
    if settings.scheme == "stored":
        is_inside = any(fqn.startswith(f"{each.name}.") for each in family.block_lists)
        return QUANTIZED if is_inside and hasattr(module, "file_format") else KEPT
    parts = fqn.split(".")
    lineage = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return KEPT if any(matches_any(name, family.keep_full_precision) for name in lineage) else QUANTIZED
