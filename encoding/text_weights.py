"""A text encoder's weights: which tensors of which files, each read straight to its device, in 8 bits on request.

Quantizing. A linear is rounded to 8 bits (quantization/frozen_linear.py) as soon as its own tensors are there, before
the next is read: one linear at a time is there in full precision beside what stays so. Products are computed in the
encoder's dtype from weights written out anew at every call: this buys room, not speed.

What stays in full precision: embeddings (the tables of relative positions among them), norms and biases, and what the
spec names in keep_full_precision. Every other linear of these encoders is inside a residual block, where its rounding
is one of many small independent errors.

Files whose weights are in 8 bits already are refused: there are several ways to lay their scales out, and none keeps
them under the names and in the folders that the encoders' classes read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from ..checkpoints.header import TensorRecord, read_header, read_weight_map
from ..checkpoints.load import find_owner, put_tensor
from ..checkpoints.model_files import first
from ..checkpoints.weight_file import TORCH_TYPES, read_records
from ..families.spec import TextEncoderSpec
from ..patches.lora import matches_any
from ..quantization.frozen_linear import FrozenLinear8
from ..quantization.kernel_choice import has_float8

TextScheme = Literal["none", "fp8", "int8"]
Sources = Mapping[str, TensorRecord]  # by name in the model

_CLIP_PREFIX = "text_model."
_EMBEDDING = "embed_tokens.weight"
_EIGHT_BIT = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8"})
WHAT_WORKS = (
    'use one in bfloat16, float16 or float32, and cache.text_quantize = "int8" or "fp8" to hold it in 8 bits: it is '
    "rounded as it is read"
)


@dataclass(frozen=True)
class Storage:
    """How an encoder's weights are held."""

    device: torch.device
    dtype: torch.dtype  # of the computation, and of the weights that are not quantized
    scheme: TextScheme = "none"  # what the linears are rounded to
    kept: tuple[str, ...] = ()  # fnmatch patterns of linears that are not


def applied_scheme(spec: TextEncoderSpec, scheme: TextScheme) -> TextScheme:
    """What the scheme means for this encoder: "none" where its family keeps all of it in full precision."""
    return "none" if "*" in spec.keep_full_precision else scheme


def check_scheme(scheme: TextScheme, device: torch.device) -> None:
    """Raises: ValueError if the device has no float8 and the scheme needs it."""
    if scheme == "fp8" and not has_float8(device):
        raise ValueError(
            f'cache.text_quantize = "fp8" was requested, but {device} cannot convert to float8 and back; use "int8" '
            "there, or another cache.text_device"
        )


# --- files -----------------------------------------------------------------------------------------------------------


def weight_records(folder: Path) -> dict[str, TensorRecord]:
    """Every tensor by its name, of the files that the index names or of the one file there is.

    Raises: ValueError if there is neither, or a file of the index is missing, or lacks a tensor.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_weight_map(index)
        if lost := sorted(file for file in set(shards.values()) if not (folder / file).is_file()):
            raise ValueError(f"{folder} lacks {len(lost)} of the encoder's files: {first(lost)}; download them too")
        found = {file: read_header(folder / file).records() for file in set(shards.values())}
        for name, file in shards.items():
            if name not in found[file]:
                raise ValueError(
                    f"{folder / file} lacks {name}, which the index places in it; download the folder again"
                )
        return {name: found[file][name] for name, file in shards.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ValueError(f"{folder} has neither model.safetensors nor its index; other weight formats are not read")
    return read_header(single).records()


def refuse_eight_bit(sources: Sources) -> None:
    """Raises: ValueError naming a tensor in 8 bits or of an unknown type, and what works."""
    for record in sources.values():
        if record.dtype not in TORCH_TYPES:
            raise ValueError(f"{record.file} has {record.key} of type {record.dtype}, which nobody reads; {WHAT_WORKS}")
        if record.dtype in _EIGHT_BIT:
            raise ValueError(f"{record.file} is in 8 bits already ({record.key} is {record.dtype}); {WHAT_WORKS}")


def language_model_sources(model: nn.Module, folder: Path) -> Sources:
    """Where a language model's tensors are, whatever model the files wrap it in.

    What stands before its names depends on that model and on the version that saved it.

    Raises: ValueError if one is missing.
    """
    records, names = weight_records(folder), list(model.state_dict())
    missing = sorted(names)
    for prefix in sorted(key.removesuffix(_EMBEDDING) for key in records if key.endswith(_EMBEDDING)):
        missing = sorted(name for name in names if prefix + name not in records)
        if not missing:
            return {name: records[prefix + name] for name in names}
    raise ValueError(f"{folder} does not hold the language model its config describes; missing {first(missing)}")


def encoder_sources(model: nn.Module, folder: Path) -> Sources:
    """Where the tensors of a model are that was saved under its own names; of tied ones only one is listed.

    transformers 5 leaves out what stood before CLIP's names.

    Raises: ValueError if one is missing.
    """
    records, names = weight_records(folder), dict.fromkeys(model.state_dict())
    for tied, twin in tied_names(model).items():
        names.pop(twin if tied in records else tied, None)
    keys = {}
    for name in names:
        spellings = (name, f"{_CLIP_PREFIX}{name}", name.removeprefix(_CLIP_PREFIX))
        keys[name] = next((key for key in spellings if key in records), "")
    if missing := sorted(name for name, key in keys.items() if not key):
        raise ValueError(f"{folder} lacks weights of its {type(model).__name__}: {first(missing)}")
    return {name: records[key] for name, key in keys.items()}


def refuse_other_shapes(model: nn.Module, sources: Sources, folder: Path) -> None:
    """Compare an empty model with its files' headers: a norm of one number would be spread over all, and say nothing.

    Raises: ValueError naming the file and the tensors that are not as the folder's config.json describes them.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong: dict[Path, list[str]] = {}
    for name, record in sources.items():
        if record.shape != wanted[name] and record.dtype not in _EIGHT_BIT:  # which are refused for that
            said = f"{record.key} is {list(record.shape)} and should be {list(wanted[name])}"
            wrong.setdefault(record.file, []).append(said)
    for file, found in wrong.items():
        raise ValueError(
            f"{file} does not fit {folder / 'config.json'}: {first(found)}; use the folder published with the model"
        )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of one tensor, such as T5's two of its embedding, of which files hold either or both.

    transformers before 5 lists the names without their twin, which for encoders is the embedding of the input.
    """
    declared: Any = getattr(model, "_tied_weights_keys", None) or {}
    if not isinstance(declared, Mapping):
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        twin = next(name for name, module in model.named_modules() if module is embedding)
        declared = dict.fromkeys(declared, f"{twin}.weight")
    names = model.state_dict().keys()
    return {tied: twin for tied, twin in declared.items() if tied != twin and tied in names and twin in names}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_weights(model: nn.Module, sources: Sources, storage: Storage) -> None:
    """Fill an empty model, one tensor after the other; what the files hold besides is not touched.

    Without a scheme, weights on the CPU that need no other type are not copied: the system pages them in from the file.

    Raises: as check_scheme, before anything is read.
    """
    check_scheme(storage.scheme, storage.device)
    waiting = Counter(name.rpartition(".")[0] for name in sources)
    dtypes = weight_dtypes(model, sources, storage.dtype)
    for name, tensor in read_records(sources):
        # A tensor that shares the file's memory would keep the whole file mapped beside the 8-bit weights.
        put_tensor(model, name, tensor.to(storage.device, dtypes[name], copy=storage.scheme != "none"))
        del tensor  # the only reference is the model's, which goes where its module is rounded
        owner = name.rpartition(".")[0]
        waiting[owner] -= 1
        module = model.get_submodule(owner)
        if not waiting[owner] and storage.scheme != "none" and is_rounded(module, owner, storage.kept):
            model.set_submodule(owner, FrozenLinear8.from_linear(module, storage.scheme))
    for tied, twin in tied_names(model).items():
        read, other = (tied, twin) if tied in sources else (twin, tied)
        module, leaf = find_owner(model, other)
        module._parameters[leaf] = model.get_parameter(read)
    for name, buffer in list(model.named_buffers()):
        put_tensor(model, name, buffer.to(storage.device))


def is_rounded(module: nn.Module, fqn: str, kept: Sequence[str]) -> TypeGuard[nn.Linear]:
    """Whether a scheme holds this module in 8 bits."""
    return isinstance(module, nn.Linear) and not matches_any(fqn, kept)


def weight_dtypes(model: nn.Module, names: Iterable[str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The type each tensor is held in where nothing is rounded.

    Some parts the class wants in float32, by from_pretrained's rule: some in float16, some in bfloat16 too. T5's wo is
    one in float16, whose range its activations exceed.
    """
    wanted: list[str] = []
    if dtype == torch.float16:
        wanted += getattr(model, "_keep_in_fp32_modules", None) or ()
    if dtype in (torch.float16, torch.bfloat16):
        wanted += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return {name: dtype if set(wanted).isdisjoint(name.split(".")) else torch.float32 for name in names}


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """fqn and layers of an encoder, in the order they run: its largest list, which holds nearly all of its weights.

    Raises: ValueError for a model without a list of layers.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers; it cannot be a text encoder")
    name = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return name, lists[name]
