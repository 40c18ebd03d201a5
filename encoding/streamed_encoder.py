"""A text encoder larger than the card it runs on: its layers pass through two slots there, one after the other.

The next layer is read and copied while one computes, so a pass over B captions takes the longer of reading all layers
and computing B. Files are read anew for every pass, through one pinned buffer: what memory has room for is in the
system's file cache.

Inside a layer captions go one by one, each as a batch of one. So every matrix product has the shape it has where the
encoder is resident. Results are bitwise those of one caption alone, and the cache's keys need not know about passes.
One pass must not mix captions with padding and captions without: these need no mask, and another kernel may compute
their attention. Why 8-bit weights are not streamed: docs/decisions/0008-blocks-from-host-memory.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..checkpoints.load import find_owner
from ..checkpoints.weight_file import read_records
from ..parallel.devices import synchronize
from ..parallel.offload.copies import PinnedBuffer, Slot, Slots, SlotTensor, lay_out
from ..patches.hooks import HookSet, map_tensors
from .text_weights import Sources, Storage, layer_list, read_weights, weight_dtypes


@dataclass(frozen=True)
class _Layer:
    """A layer's tensors by name, where each lies, and the size of a buffer for them."""

    tensors: Mapping[str, SlotTensor]
    sources: Sources
    num_bytes: int


class StreamedLayers:
    """The layers of an empty encoder on their way through its device; the rest is filled, and there for good. Raises:
    ValueError as read_weights."""

    def __init__(self, model: nn.Module, sources: Sources, storage: Storage, captions_per_pass: int) -> None:
        assert storage.scheme == "none" and captions_per_pass > 0, (storage, captions_per_pass)
        self.captions_per_pass = captions_per_pass
        self._device = storage.device
        prefix, modules = layer_list(model)
        rest = {name: source for name, source in sources.items() if not name.startswith(f"{prefix}.")}
        read_weights(model, rest, storage)
        dtypes = weight_dtypes(model, sources.keys() - rest.keys(), storage.dtype)
        self._layers: list[_Layer] = []
        for index in range(len(modules)):
            own = {name: source for name, source in sources.items() if name.startswith(f"{prefix}.{index}.")}
            owners = [find_owner(model, name) for name in own]
            absent = [getattr(owner, leaf) for owner, leaf in owners]
            pieces, size = lay_out((tensor.shape, dtypes[name]) for tensor, name in zip(absent, own, strict=True))
            found = zip(owners, absent, pieces, strict=True)
            tensors = [SlotTensor(owner, leaf, tensor, piece) for (owner, leaf), tensor, piece in found]
            self._layers.append(_Layer(dict(zip(own, tensors, strict=True)), own, size))
        largest = max(layer.num_bytes for layer in self._layers)
        self.slots = Slots([list(layer.tensors.values()) for layer in self._layers], largest, storage.device)
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
        """Read a layer, which waits for the last copy out of the buffer, and queue its copy to the device."""
        layer = self._layers[index]
        if self.buffer.used is not None:
            self.buffer.used.synchronize()
        for name, found in read_records(layer.sources):
            piece = layer.tensors[name].piece
            assert found.shape == piece.shape, name  # refuse_other_shapes has looked
            piece.view(self.buffer.tensor).copy_(found)
        slot = self.slots.slots[index % len(self.slots.slots)]
        self.slots.load(slot, index, self.buffer.tensor[: layer.num_bytes])
        self.buffer.used = slot.arrival
        return slot


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
