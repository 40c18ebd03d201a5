"""A model whose weights several processes share: FSDP2 over its blocks, each process reading its own rows of the file.
Rows in 8 bits have one scale each, so they have the bits that one process gives them. Reasons:
docs/decisions/0030-several-processes.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...checkpoints.checkpoint import CheckpointInfo
from ...checkpoints.load import make_unfilled_transformer, put_tensor, weight_types
from ...checkpoints.quantized_files import dequantize, is_kept, read_scales
from ...checkpoints.weight_file import WeightReader, by_file, open_weights, read_records, read_rows
from ...quantization.eight_bit import quantize_weight
from ...quantization.frozen_linear import FrozenLinear8
from ...quantization.quantize import QuantizeSettings, empty_stored, is_wanted, take_stored
from ...system.stopping import alive
from ..block_lists import called_modules
from ..offload.activations import ActivationOffload
from ..offload.recompute import BlockCall
from ..placement import block_names

_META = torch.device("meta")


def load_sharded(
    info: CheckpointInfo, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, settings: QuantizeSettings | None
) -> nn.Module:
    """The transformer with this process's rows of every weight, frozen and in eval mode; all ranks. Args: mesh: its
    last dimension shares a copy of the weights. settings: how linears are held; only those that compute in 8 bits.
    Raises: ValueError if the file's tensors are not exactly the model's."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    assert settings is None or settings.is_compute, "others are refused"
    model = make_unfilled_transformer(info)
    for name, buffer in list(model.named_buffers()):
        put_tensor(model, name, buffer.to(device))
    filler = _Filler(model, info, mesh, device, dtype, settings)
    filler.prepare()
    names = block_names(model, info.family)
    for module in (each for name in names for each in called_modules(model, info.family, name)):
        if next(module.parameters(), None) is not None:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if hasattr(model, "preprocess_text_embeds"):  # it uses weights, and is called before a forward
        register_fsdp_forward_method(model, "preprocess_text_embeds")
    filler.fill()
    return model.requires_grad_(False).eval()


class _Filler:
    """Gives an empty model its linears and types, and after it was divided its rows."""

    def __init__(
        self,
        model: nn.Module,
        info: CheckpointInfo,
        mesh: DeviceMesh,
        device: torch.device,
        dtype: torch.dtype,
        settings: QuantizeSettings | None,
    ) -> None:
        self._model, self._info, self._device = model, info, device
        self._settings = settings
        self._group = mesh.get_group(mesh.ndim - 1)
        self._dtype_of = weight_types(model, dtype)
        self._scales = read_scales(info.tensors)
        self._rounded: dict[str, torch.Tensor] = {}  # scales of this process's rows, by linear

    def prepare(self) -> None:
        for name, linear in list(self._model.named_modules()):
            if self._settings is not None and is_wanted(linear, name, self._info.family, self._settings):
                stored, dtype = empty_stored(linear, self._settings), self._dtype_of(f"{name}.weight")
                stored = replace(stored, scale=torch.empty_like(stored.scale, device=self._device))
                self._model.set_submodule(name, take_stored(name, linear, stored, dtype, self._settings))
        for name, parameter in list(self._model.named_parameters()):
            is_rounded = isinstance(self._owner(name), FrozenLinear8) and name.endswith(".weight")
            kind = parameter.dtype if is_rounded else self._dtype_of(name)
            put_tensor(self._model, name, torch.empty(parameter.shape, dtype=kind, device=_META))

    @torch.no_grad()
    def fill(self) -> None:
        """Read this process's rows, a tensor at a time."""
        parameters = dict(self._model.named_parameters())
        for file, records in by_file(self._info.tensors).items():
            with open_weights(file, is_model=True) as reader:
                for name in records:
                    alive()
                    found: Any = parameters.get(name)
                    if found is None:  # a buffer, whole: FSDP divides parameters alone
                        ((_, whole),) = read_records({name: self._info.tensors[name]})
                        put_tensor(self._model, name, whole.to(self._device, self._dtype_of(name), copy=True))
                        continue
                    rows, mesh, placements = self._rows_of(name, found, reader), found.device_mesh, found.placements
                    assert all(isinstance(each, (Shard, Replicate)) for each in placements)
                    like: Any = {"shape": found.shape, "stride": found.stride(), "run_check": False}
                    given = DTensor.from_local(rows, mesh, placements, **like)
                    self._model.load_state_dict({name: given}, strict=False, assign=True)
        size = dist.get_world_size(self._group)
        for name, module in self._model.named_modules():
            if isinstance(module, FrozenLinear8):  # every row's scale, of the rows that the processes hold in order
                own, count = self._rounded.pop(name), module.scale.shape[0]
                padded = own.new_zeros(-(-count // size), 1)
                padded[: len(own)] = own
                parts = [torch.empty_like(padded) for _ in range(size)]
                dist.all_gather(parts, padded, group=self._group)
                module.scale.copy_(torch.cat(parts)[:count])

    def _rows_of(self, name: str, parameter: DTensor, reader: WeightReader) -> torch.Tensor:
        record, linear = self._info.tensors[name], name.rpartition(".")[0]
        mesh, count = parameter.device_mesh, parameter.shape[0]
        each = -(-count // mesh.size(mesh.ndim - 1))  # torch.chunk's, of which the last may be fewer or none
        first = mesh.get_local_rank(mesh.ndim - 1) * each
        start, end = min(first, count), min(first + each, count)
        shape = (end - start, *parameter.shape[1:])
        values = read_rows(reader, record, start, end) if end > start else torch.empty(shape)
        is_linear8 = isinstance(self._owner(name), FrozenLinear8) and name.endswith(".weight")
        scale = self._scales.get(name)
        if scale is not None and scale.numel() > 1:
            scale = scale[start:end]
        if is_linear8 and self._is_taken(linear):
            own = torch.ones(1) if scale is None else scale
            self._rounded[linear] = own.reshape(-1, 1).expand(end - start, 1).to(self._device, copy=True)
            return values.to(self._device, parameter.dtype, copy=True)
        if record.is_quantized:
            moved = None if scale is None else scale.to(self._device)
            exact = dequantize(values.to(self._device), moved, record, self._dtype_of(name))
        else:
            exact = values.to(self._device, self._dtype_of(name), copy=True)
        if not is_linear8:
            return exact
        owner = self._model.get_submodule(linear)
        assert isinstance(owner, FrozenLinear8)
        rounded, self._rounded[linear] = quantize_weight(exact, parameter.dtype, owner.rotation)
        return rounded

    def _is_taken(self, linear: str) -> bool:
        assert self._settings is not None
        return is_kept(self._info.tensors[f"{linear}.weight"], self._settings)

    def _owner(self, name: str) -> nn.Module:
        return self._model.get_submodule(name.rpartition(".")[0])


@contextmanager
def whole_shapes(model: nn.Module) -> Iterator[None]:
    """Inside, divided weights look whole, and hold nothing: PEFT would make a LoRA for the rows that are here."""
    parameters = [(m, n, p) for m in model.modules() for n, p in m._parameters.items()]
    found: list[tuple[nn.Module, str, Any]] = [each for each in parameters if isinstance(each[2], DTensor)]
    try:
        for module, name, parameter in found:
            stand_in = torch.empty((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            module._parameters[name] = nn.Parameter(stand_in, requires_grad=False)
        yield
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter


def checkpointed(
    block: nn.Module | BlockCall, args: tuple[Any, ...], device: torch.device, store: ActivationOffload | None = None
) -> Any:
    """As recompute of recompute.py, by torch's own: FSDP gathers a block for recomputation and backward at once."""
    assert store is None, "inputs of blocks stay on the device here"
    if not torch.is_grad_enabled():
        return block(*args)
    return torch.utils.checkpoint.checkpoint(block.__call__, *args, use_reentrant=False)
