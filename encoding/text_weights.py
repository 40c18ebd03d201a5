"""A text encoder's weights, each read straight to its device, or layer by layer in every pass. On request linears are
rounded to 8 bits (quantization/frozen_linear.py) as they are read, which buys room, not speed; files that are in 8 bits
already are refused: their scales have no one layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from ..checkpoints.header import EIGHT_BIT_TYPES, TORCH_TYPES, TensorRecord, read_header, read_weight_map
from ..checkpoints.load import find_owner, put_tensor
from ..checkpoints.model_files import first
from ..checkpoints.weight_file import read_records
from ..families.spec import TextEncoderSpec
from ..parallel.devices import synchronize
from ..parallel.offload.copies import PinnedBuffer, Slot, Slots, SlotTensor, lay_out
from ..patches.hooks import HookSet, map_tensors
from ..patches.lora import matches_any
from ..quantization.frozen_linear import FrozenLinear8
from ..quantization.kernel_choice import has_float8

TextScheme = Literal["none", "fp8", "int8"]
Sources = Mapping[str, TensorRecord]  # by name in the model

_CLIP_PREFIX = "text_model."
_EMBEDDING = "embed_tokens.weight"
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


def find_sources(model: nn.Module, folder: Path) -> Sources:
    """Where the tensors of an empty encoder are, of tied ones only one; their prefix depends on what wraps it, and on
    the version that saved it. Raises: ValueError naming a file or tensor that is missing, of another shape, of an
    unknown type or in 8 bits."""
    index = folder / "model.safetensors.index.json"
    files = sorted(set(read_weight_map(index).values())) if index.is_file() else ["model.safetensors"]
    if lost := [file for file in files if not (folder / file).is_file()]:
        raise ValueError(f"{folder} lacks {first(lost)}; download them too, for other weight formats are not read")
    records = {name: record for file in files for name, record in read_header(folder / file).records().items()}
    tensors, ties = model.state_dict(), tied_names(model)
    prefixes = {"", _CLIP_PREFIX, *(key.removesuffix(_EMBEDDING) for key in records if key.endswith(_EMBEDDING))}
    spellings = [{name: prefix + name for name in tensors} for prefix in sorted(prefixes)]
    spellings.append({name: name.removeprefix(_CLIP_PREFIX) for name in tensors})
    found = max(({name: records[key] for name, key in each.items() if key in records} for each in spellings), key=len)
    for tied, twin in ties.items():
        if tied in found:
            found.pop(twin, None)
    given = found.keys() | {name for pair in ties.items() for name in pair if found.keys() & pair}
    if missing := sorted(tensors.keys() - given):
        raise ValueError(f"{folder} lacks weights of the {type(model).__name__} its config describes: {first(missing)}")
    for name, record in found.items():
        if record.dtype not in TORCH_TYPES:
            raise ValueError(f"{record.file} has {record.key} of type {record.dtype}, which nobody reads; {WHAT_WORKS}")
        if record.dtype in (*EIGHT_BIT_TYPES, "U8"):
            raise ValueError(f"{record.file} is in 8 bits already ({record.key} is {record.dtype}); {WHAT_WORKS}")
        if record.shape != (shape := tuple(tensors[name].shape)):
            raise ValueError(
                f"{record.file} does not fit {folder / 'config.json'}: {record.key} is {list(record.shape)} and should "
                f"be {list(shape)}; use the folder published with the model"
            )
    return found


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of one tensor, such as T5's two of its embedding, of which files hold either or both. transformers before 5
    does not say the twin, which for encoders is the embedding of the input."""
    declared: Any = getattr(model, "_tied_weights_keys", None) or {}
    if not isinstance(declared, Mapping):
        embedding = model.get_input_embeddings()  # type: ignore[operator]
        twin = next(name for name, module in model.named_modules() if module is embedding)
        declared = dict.fromkeys(declared, f"{twin}.weight")
    names = model.state_dict().keys()
    return {tied: twin for tied, twin in declared.items() if tied != twin and tied in names and twin in names}


# --- reading ---------------------------------------------------------------------------------------------------------


def read_weights(model: nn.Module, sources: Sources, storage: Storage) -> None:
    """Fill an empty model; without a scheme weights on the CPU stay mapped from their file. Raises: as check_scheme."""
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
    """The type each tensor is held in unless rounded: float32 of what the class wants so, by from_pretrained's rule."""
    wanted: list[str] = []
    if dtype == torch.float16:
        wanted += getattr(model, "_keep_in_fp32_modules", None) or ()
    if dtype in (torch.float16, torch.bfloat16):
        wanted += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return {name: dtype if set(wanted).isdisjoint(name.split(".")) else torch.float32 for name in names}


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """fqn and layers of an encoder: its largest list. Raises: ValueError for a model without one."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers; it cannot be a text encoder")
    name = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return name, lists[name]


# --- weights larger than the card they are used on: docs/decisions/0008-blocks-from-host-memory.md --------------------
# Layers pass through two slots; the next is read and copied while one computes. Inside a layer captions go one by one,
# so that results are bitwise those of one caption alone. No pass mixes captions with padding and without: those without
# need no mask, and another kernel may compute their attention.


class StreamedLayers:
    """The layers of an empty encoder on their way through its device; the rest is filled, and there for good."""

    def __init__(self, model: nn.Module, sources: Sources, storage: Storage, captions_per_pass: int) -> None:
        assert storage.scheme == "none" and captions_per_pass > 0, (storage, captions_per_pass)
        self.captions_per_pass = captions_per_pass
        self._device = storage.device
        prefix, modules = layer_list(model)
        rest = {name: source for name, source in sources.items() if not name.startswith(f"{prefix}.")}
        read_weights(model, rest, storage)
        dtypes = weight_dtypes(model, sources.keys() - rest.keys(), storage.dtype)
        self._layers: list[tuple[Sources, list[SlotTensor], int]] = []  # their tensors, and bytes of a buffer for them
        for index in range(len(modules)):
            own = {name: source for name, source in sources.items() if name.startswith(f"{prefix}.{index}.")}
            owners = [find_owner(model, name) for name in own]
            absent = [getattr(owner, leaf) for owner, leaf in owners]
            pieces, size = lay_out((tensor.shape, dtypes[name]) for tensor, name in zip(absent, own, strict=True))
            found = zip(owners, absent, pieces, strict=True)
            tensors = [SlotTensor(owner, leaf, tensor, piece) for (owner, leaf), tensor, piece in found]
            self._layers.append((own, tensors, size))
        self._stamps = {source.file: _stamp(source.file) for source in sources.values()}
        largest = max(size for *_, size in self._layers)
        self.slots = Slots([tensors for _, tensors, _ in self._layers], largest, storage.device)
        self.buffer = PinnedBuffer(largest, storage.device)
        self._finished: list[Any] = []  # outputs of the layer that is computing, one per caption but the last
        self._hooks = HookSet()
        for index, module in enumerate(modules):
            self._hooks.before(module, partial(self._before, index))
            self._hooks.after(module, partial(self._after, index), also_on_error=True)

    def close(self) -> None:
        """Wait for what is under way and give all buffers back; the layers are empty afterwards. Again: a no-op."""
        self._hooks.remove()
        synchronize([self._device])
        self.buffer.close()
        self.slots.close()

    def _before(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if index == 0:
            self.slots.clear()
        self.slots.bind(self.slots.find(index) or self._send(index))
        self._finished = []
        batch = (args[0] if args else kwargs["hidden_states"]).shape[0]
        for position in range(batch - 1):  # the last goes through the call that this precedes
            item_args, item_kwargs = _caption(args, kwargs, position, batch)
            self._finished.append(module.forward(*item_args, **item_kwargs))
        return _caption(args, kwargs, batch - 1, batch)

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        slot = self.slots.find(index)
        if slot is not None:
            self.slots.unbind(slot)
        outputs, self._finished = [*self._finished, output], []
        if output is None:  # its forward raised
            return None
        if index + 1 < len(self._layers):  # while the device computes what was queued here
            self._send(index + 1)
        return _joined(outputs)

    def _send(self, index: int) -> Slot:
        """Read a layer, when the buffer is free, and queue its copy to the device. Raises: ValueError naming a file
        that was changed since the beginning: its cache entries have their names by now."""
        sources, tensors, size = self._layers[index]
        if changed := [file for source in sources.values() if _stamp(file := source.file) != self._stamps[file]]:
            raise ValueError(f"{changed[0]} was changed while captions were encoded; let it be whole and start again")
        pieces = {name: tensor.piece for name, tensor in zip(sources, tensors, strict=True)}
        if self.buffer.used is not None:
            self.buffer.used.synchronize()
        for name, found in read_records(sources):
            assert found.shape == pieces[name].shape, name  # find_sources has looked
            pieces[name].view(self.buffer.tensor).copy_(found)
        slot = self.slots.slots[index % len(self.slots.slots)]
        self.slots.load(slot, index, self.buffer.tensor[:size])
        self.buffer.used = slot.arrival
        return slot


def _stamp(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns


def _caption(
    args: tuple[Any, ...], kwargs: dict[str, Any], position: int, batch: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """One caption of a layer's arguments: of every tensor its part of the batch's dim, which of shared ones is 1."""

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        is_batched = batch > 1 and tensor.ndim > 1 and tensor.shape[0] == batch
        return tensor.narrow(0, position, 1) if is_batched else tensor

    return map_tensors(args, pick), map_tensors(kwargs, pick)


def _joined(outputs: Sequence[Any]) -> Any:
    """The batch's output from those of single captions, each a tensor or a tuple of tensors and others."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):  # more than one caption: an argument that we did not take apart
        assert all(len(output) == 1 for output in outputs), f"a layer mixed captions: {[*map(len, outputs)]} for one"
        return torch.cat(list(outputs))
    if isinstance(first, tuple):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    return first
