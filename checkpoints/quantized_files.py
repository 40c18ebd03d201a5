"""Quantized weights as checkpoint files hold them: which tensor is whose scale, and what the numbers mean.

W = q * s, with q in float8 (e4m3fn, e5m2) or int8, and s one number for the tensor or one per row:

    old ComfyUI ("fp8_scaled")    X.weight, X.scale_weight, perhaps X.scale_input; a tensor scaled_fp8 marks the file
    ComfyUI since 2025            X.weight, X.weight_scale, perhaps X.input_scale; X.comfy_quant, a JSON text as bytes,
                                  or _quantization_metadata in the header say {"format": ...} of each layer
    plain casts                   float8 weights, often of norms and biases too, without any scale: s = 1
    GGUF                          X.weight, in blocks with their scales (header.py); nothing else of X

Files are often mixed: a float8 tensor that nothing announces is a plain cast. Scales of activations are not read.
ComfyUI's int8 files may be rotated ("convrot") by another matrix than ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..quantization.quantize import FileFormat, QuantizeSettings, is_taken
from ..quantization.stored import ROWS, make_convrot, restore
from ..system.files import expect, parse_json_object
from .header import FLOAT_TYPES, TORCH_TYPES, TensorRecord
from .model_files import describe_other
from .weight_file import read_records

METADATA_KEY = "_quantization_metadata"
# ComfyUI's name of a format -> type of the weight, as safetensors spells it.
_STORED_TYPES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}
TYPE_NAMES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8 (packed 4-bit)"}

_SCALE = re.compile(r"^(?P<layer>.+)\.(scale_weight|weight_scale)$")
_IGNORED = re.compile(r"(^|\.)(scaled_fp8|comfy_quant|scale_input|input_scale)$")
_NOTE = ".comfy_quant"
# Names that only a format has that is not read; the first match wins.
_OTHER_FORMATS = {
    "nvfp4": r"\.weight_scale_2$",
    "bitsandbytes": r"\.(absmax|quant_map|nested_absmax|quant_state\..+|SCB)$",
    "SVDQuant (Nunchaku)": r"\.(wscales|wtscale|wcscales|smooth_factor|smooth_factor_orig|proj_down)$",
    "GPTQ or AWQ": r"\.(qweight|qzeros|g_idx)$",
    "compressed-tensors": r"\.(weight_packed|weight_shape|weight_zero_point)$",
    "ComfyUI's asym_w4a8_int8": r"\.(weight_s_rel|weight_s_channel|weight_codebook)$",
    "smoothed weights (pre_quant_scale)": r"\.pre_quant_scale$",
    "float8 with a scale per block": r"\.weight_scale_inv$",
}
_WHAT_WORKS = (
    "float8 and int8 with one scale per tensor or per row are read; use such a file, or the bf16 file "
    '(quantize = "fp8" converts it while loading)'
)


@dataclass(frozen=True)
class _LayerFormat:
    name: str  # ComfyUI's, e.g. "float8_e4m3fn"
    convrot: int = 0  # block of ComfyUI's rotation, 0 for none


def _read_formats(
    path: Path, records: Mapping[str, TensorRecord], metadata: Iterable[Mapping[str, str]]
) -> dict[str, _LayerFormat]:
    """By layer, of metadata with or without the model's prefix, and of comfy_quant tensors. Raises: ValueError for a
    note that is no JSON object with a format, or two notes that differ."""
    noted: list[dict[str, Any]] = []
    what = f"{path}: its {METADATA_KEY}"
    for said in (parse_json_object(each[METADATA_KEY], what) for each in metadata if METADATA_KEY in each):
        noted.append(expect(said.get("layers"), dict, f"{what}: layers"))
    formats: dict[str, _LayerFormat] = {}
    for name, record in records.items():
        layer, key = name.removesuffix(".weight"), record.key.removesuffix(".weight")
        for layers in noted if layer != name else ():
            if found := layers.get(key, layers.get(layer)):
                formats[layer] = _parse_format(path, layer, found)
    for name, text in read_records({name: record for name, record in records.items() if name.endswith(_NOTE)}):
        layer = name.removesuffix(_NOTE)
        said = parse_json_object(text.flatten().view(torch.uint8).numpy().tobytes(), f"{path}: {name}")
        note = _parse_format(path, layer, said)
        if formats.setdefault(layer, note) != note:
            raise ValueError(f"{path} says {formats[layer]} of {layer} in its header and {note} in {name}")
    return formats


def _parse_format(path: Path, layer: str, note: Any) -> _LayerFormat:
    if not isinstance(note, dict) or not isinstance(note.get("format"), str):
        raise ValueError(f"{path} says {note!r} of {layer}, which names no format; download it again")
    settings = {**(note["params"] if isinstance(note.get("params"), dict) else {}), **note}
    block = int(settings.get("convrot_groupsize", 256)) if settings.get("convrot") else 0
    return _LayerFormat(note["format"], block)


def pair_scales(
    path: Path, records: Mapping[str, TensorRecord], metadata: Iterable[Mapping[str, str]]
) -> dict[str, TensorRecord]:
    """The model's own tensors, each 8-bit one with its scale and rotation. metadata: of its files. Raises: ValueError
    naming the format, if it is not one that is read, or the tensor that does not fit."""
    formats = _read_formats(path, records, metadata)
    others = [f"in {found.name} ({layer})" for layer, found in formats.items() if found.name not in _STORED_TYPES]
    for what, pattern in _OTHER_FORMATS.items():
        if names := [name for name in records if re.search(pattern, name)]:
            others.append(f"of {what} ({len(names)} tensors, e.g. {names[0]})")
    if others:
        raise ValueError(f"{path} holds quantized weights {others[0]}; {_WHAT_WORKS}")
    own = {n: r for n, r in records.items() if not _SCALE.match(n) and not _IGNORED.search(n)}
    strange = [r for r in own.values() if r.dtype not in FLOAT_TYPES and not r.is_quantized]
    if strange:
        if other := describe_other(own):
            raise ValueError(f"{path} is {other}; give a diffusion transformer")
        kind = TYPE_NAMES.get(strange[0].dtype, strange[0].dtype)
        raise ValueError(
            f"{path} holds quantized weights ({len(strange)} {kind} tensors, e.g. {strange[0].key}); {_WHAT_WORKS}"
        )
    for name, scale in records.items():
        if not (match := _SCALE.match(name)):
            continue
        weight = f"{match['layer']}.weight"
        if weight not in own:
            raise ValueError(f"{path} has the scale {scale.key}, but no {weight} that it belongs to; download it again")
        if (first := own[weight].scale) is not None:
            raise ValueError(
                f"{path} has two scales for {weight}, {first.key} and {scale.key}; which one is meant is not known"
            )
        own[weight] = replace(own[weight], scale=scale)
    for name, record in own.items():
        found = formats.get(name.removesuffix(".weight"))
        for fault in _faults(record, found):
            raise ValueError(f"{path} {fault}; {_WHAT_WORKS}")
        if found:
            own[name] = replace(record, convrot=found.convrot)
    return own


def _faults(record: TensorRecord, found: _LayerFormat | None) -> Iterator[str]:
    """Each looks at what those before it have let pass."""
    key, scale, shape = record.key, record.scale, list(record.shape)
    if record.dtype == "I8" and not (found and scale):
        lacks = "no scale" if found or not scale else "nothing that names its format"
        yield f"holds the int8 tensor {key} and {lacks} for it"
    if found and record.dtype != _STORED_TYPES[found.name]:
        yield f"says that {key} is {found.name}, and it is {TYPE_NAMES.get(record.dtype, record.dtype)}"
    if found and not scale:
        yield f"says that {key} is {found.name}, but has no scale for it"
    block = found.convrot if found else 0
    is_power = block >= 4 and block & (block - 1) == 0 and block.bit_length() % 2 == 1
    if block and (not is_power or len(shape) != 2 or shape[1] % block):
        what = f"{key} {shape} is rotated in blocks of {block}"
        yield f"says that {what}; blocks are powers of 4 that divide the second size"
    if not scale:
        return
    if not record.is_quantized or record.packing != ROWS:
        yield f"has the scale {scale.key}, but {key} is {record.dtype} and not in 8 bits"
    if scale.dtype not in FLOAT_TYPES:
        yield f"holds quantized weights in mxfp8 or another format with scales in {scale.dtype} ({scale.key})"
    rows = (*shape, 1)[0]
    if scale.shape not in ((), (1,), (1, 1), (rows,), (rows, *(1,) * (len(shape) - 1))):
        yield f"has an unknown format: the scale {scale.key} is {list(scale.shape)} for a weight of {shape}"


def file_format(record: TensorRecord) -> FileFormat | None:
    """How a file holds a linear's weight; None for one that is not quantized."""
    if not record.is_quantized or len(record.shape) != 2:
        return None
    return FileFormat(
        TORCH_TYPES[record.dtype], record.convrot or record.rotation, bool(record.convrot), record.packing
    )


def is_kept(record: TensorRecord, settings: QuantizeSettings) -> bool:
    known = file_format(record)
    return known is not None and is_taken(known, settings)


def read_scales(tensors: Mapping[str, TensorRecord]) -> dict[str, torch.Tensor]:
    """The scale of every tensor that has one: float32, on the CPU, [N] or [1]. Raises: ValueError naming a scale with a
    number that is not positive and finite."""
    records = {name: record.scale for name, record in tensors.items() if record.scale is not None}
    scales = {name: scale.float().reshape(-1) for name, scale in read_records(records)}
    for name, scale in scales.items():
        is_good = scale.isfinite() & (scale > 0)
        if not is_good.all():
            raise ValueError(
                f"{records[name].file}: the scale {records[name].key} holds {scale[~is_good][0].item()}; scales are "
                "positive, so the file is damaged, download it again"
            )
    return scales


def dequantize(
    values: torch.Tensor, scale: torch.Tensor | None, record: TensorRecord, dtype: torch.dtype
) -> torch.Tensor:
    """restore (quantization/stored.py) of a record's values: 8-bit, of any shape, or packed rows. scale: float32 [N] or
    [1]; None for 1. Returns: of the record's shape, but for rows that were left out."""
    flat = values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)
    assert not record.rotation, "what the cache holds is taken as it is"
    matrix = make_convrot(record.convrot).to(values.device) if record.convrot else None
    scale = None if scale is None else scale.reshape(-1, 1)
    plain = restore(flat, scale, matrix, record.packing, dtype)
    return plain.reshape(values.shape if record.packing == ROWS else (values.shape[0], *record.shape[1:]))
