"""A transformer read tensor by tensor onto the devices it will live on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..patches.hooks import parameters_on_meta
from ..quantization.quantize import QuantizeSettings, Stored8, is_wanted, round_linear, take_stored
from ..quantization.stored import ROWS
from ..system.stopping import alive
from .checkpoint import CheckpointInfo
from .model_class import described, differences, transformer_class
from .quantized_cache import FOREIGN, keep_quantized, open_cached
from .quantized_files import dequantize, file_format, is_kept, read_scales
from .weight_file import by_file, read_records

if TYPE_CHECKING:
    from ..parallel.offload.weights import WeightOffload

_log = logging.getLogger(__name__)


def make_empty_transformer(info: CheckpointInfo) -> torch.nn.Module:
    """The transformer on meta, buffers included: sizes without weights, for planning."""
    if info.family.host is not None:
        return _with_formats(info.family.host.make(is_empty=True), info)
    with torch.device("meta"):
        return _with_formats(transformer_class(info.family).from_config(dict(info.config)), info)


def make_unfilled_transformer(info: CheckpointInfo) -> torch.nn.Module:
    """With real buffers and tables on the CPU. Raises: ValueError if the file's tensors are not exactly the model's."""
    if info.family.host is not None:
        model = info.family.host.make(is_empty=False)
    else:  # buffers that no file holds (Wan's rotary tables) must be real; they are computed in the constructor
        with parameters_on_meta():
            model = transformer_class(info.family).from_config(dict(info.config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if found := differences(shapes, info.tensors):
        raise ValueError(f"{info.path} does not fit {info.family.title}: {described(found)}")
    return _with_formats(model, info)


def weight_types(model: torch.nn.Module, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """From a tensor's fqn to its type, as diffusers' from_pretrained: dtype, but float32 in what the class names in
    _keep_in_fp32_modules (of Wan: time embedder, norms with weights, modulation tables)."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    # diffusers' own test: a dotted part of the name, not a piece of text
    return lambda name: dtype if kept.isdisjoint((name, *name.split("."))) else torch.float32


def _with_formats(model: torch.nn.Module, info: CheckpointInfo) -> torch.nn.Module:
    """Every linear with the format that its weight has in the file, which forecasts and loading go by."""
    for name, module in model.named_modules():
        record = info.tensors.get(f"{name}.weight")
        if isinstance(module, torch.nn.Linear) and record is not None and (known := file_format(record)) is not None:
            module.file_format = known  # type: ignore[assignment]
    return model


def load_transformer(
    info: CheckpointInfo,
    device_of: Callable[[str], torch.device],
    dtype: torch.dtype,
    settings: QuantizeSettings | None = None,
    layer_store: WeightOffload | None = None,
) -> torch.nn.Module:
    """The transformer with every parameter on its device, frozen and in eval mode.

    One tensor is in host memory at a time, besides what the system keeps of the file. On the CPU too, weights are
    copies, so that a file replaced later changes nothing. A layer is quantized as soon as the last of its own tensors
    is in place, before the next one is read.

    Args:
        device_of: from a parameter's or buffer's fqn to its device.    dtype: of the weights; see weight_types.
        settings: which layers are rounded, or taken over as the file has them; others are dequantized.
        layer_store: gets every layer that is final.
    Raises: ValueError if the file's tensors are not exactly the model's, or its scales are no scales.
    """
    model = make_unfilled_transformer(info)
    _Loader(model, info, device_of, dtype, settings, layer_store).load()
    for name, buffer in list(model.named_buffers()):
        put_tensor(model, name, buffer.to(device_of(name)))
    return model.requires_grad_(False).eval()


def load_through_cache(
    folder: Path | None,
    info: CheckpointInfo,
    device_of: Callable[[str], torch.device],
    dtype: torch.dtype,
    settings: QuantizeSettings | None,
    layer_store: WeightOffload | None = None,
) -> torch.nn.Module:
    """load_transformer; what it rounds comes from the cache, or goes into it. folder: None for no cache."""
    if folder is None or settings is None:
        return load_transformer(info, device_of, dtype, settings, layer_store)
    cached = open_cached(folder, info, settings, dtype)
    if cached is not None:
        try:
            return load_transformer(cached, device_of, dtype, settings, layer_store)
        except FOREIGN as error:  # deleted or damaged since; what is wrong with the checkpoint will be said below
            _log.warning("the quantized weights in %s cannot be read and are rounded again (%s)", folder, error)
    model = load_transformer(info, device_of, dtype, settings, layer_store)
    keep_quantized(folder, info, settings, dtype, model)
    return model


@dataclass
class _Loader:
    model: torch.nn.Module
    info: CheckpointInfo
    device_of: Callable[[str], torch.device]
    dtype: torch.dtype
    settings: QuantizeSettings | None
    layer_store: WeightOffload | None

    def __post_init__(self) -> None:
        self._dtype_of, family = weight_types(self.model, self.dtype), self.info.family
        self._wanted = {n for n, m in self.model.named_modules() if is_wanted(m, n, family, self.settings)}
        self._scales = read_scales(self.info.tensors)
        self._waiting = Counter(name.rpartition(".")[0] for name in self.info.tensors)
        self._taken: dict[str, Stored8] = {}  # weights of layers whose other tensors have not all arrived

    def load(self) -> None:
        if self.layer_store is not None:
            self.layer_store.begin(self.model, self._waiting.keys())
        for file, records in by_file(self.info.tensors).items():
            _log.info("reading %d tensors from %s", len(records), file.name)
            for name, tensor in read_records(records):
                alive()
                self._place(name, tensor)
                del tensor  # before its layer is converted and the next one read: no second copy, here or on its device
                self._finish_layer_of(name)
        if types := self.info.quantized_types:
            found = ", ".join(f"{count} {kind}" for kind, count in types.items())
            num_taken = sum(map(self._is_taken, self._wanted))
            message = "read %s tensors for %s: %d kept as they are, %d dequantized"
            _log.info(message, found, self.info.path, num_taken, sum(types.values()) - num_taken)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        layer, _, leaf = name.rpartition(".")
        device, dtype = self.device_of(name), self._dtype_of(name)
        record = self.info.tensors[name]
        if leaf == "weight" and self._is_taken(layer):
            given = self._scales.get(name, torch.ones(1)).reshape(-1, 1)
            rows = given.expand(tensor.shape[0], 1) if record.packing == ROWS else torch.empty(tensor.shape[0], 0)
            values, scale = tensor.to(device, copy=True), rows.contiguous().to(device, copy=True)
            form = file_format(record)
            assert form is not None
            self._taken[layer] = Stored8(values, scale, form)
        elif record.is_quantized:
            own = None if name not in self._scales else self._scales[name].to(device)
            put_tensor(self.model, name, dequantize(tensor.to(device), own, record, dtype))
        else:
            put_tensor(self.model, name, tensor.to(device, dtype, copy=True))

    def _finish_layer_of(self, name: str) -> None:
        layer = name.rpartition(".")[0]
        self._waiting[layer] -= 1
        if self._waiting[layer]:
            return
        module = self.model.get_submodule(layer)
        if layer in self._wanted:
            assert self.settings is not None and isinstance(module, torch.nn.Linear)
            if (stored := self._taken.pop(layer, None)) is None:
                done = round_linear(module, self.settings)
            else:
                done = take_stored(layer, module, stored, self._dtype_of(f"{layer}.weight"), self.settings)
            self.model.set_submodule(layer, done)
        if self.layer_store is not None:
            self.layer_store.finish(layer)

    def _is_taken(self, layer: str) -> bool:
        """Whether a layer's weight stays as the file has it."""
        if self.settings is None or layer not in self._wanted:
            return False
        return is_kept(self.info.tensors[f"{layer}.weight"], self.settings)


def find_owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has the tensor of this name, and its name there."""
    owner, _, leaf = name.rpartition(".")
    return model.get_submodule(owner), leaf


def put_tensor(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Give a model its tensor of this name, as a frozen parameter or as a buffer."""
    owner, leaf = find_owner(model, name)
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor
