"""A text encoder larger than the card it runs on: its layers pass through two slots there, one after the other.

The next layer is copied while one computes, so a pass over B captions takes max(copying all layers, computing B).

Inside a layer captions go one by one, each as a batch of one. So every matrix product has the shape it has where the
encoder is resident. Results are bitwise those of one caption alone, and the cache's keys need not know about passes.
One pass must not mix captions with padding and captions without: these need no mask, and another kernel may compute
their attention.

A layer's tensors lie in one pinned buffer as the card wants them. Where memory allows, every layer keeps its buffer and
files are read once. Else two buffers take turns, and a thread reads the files again for every pass. It waits for the
last copy out of a buffer before it writes the buffer anew. Reasons, and why 8-bit weights are not streamed:
docs/decisions/0008-blocks-from-host-memory.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..checkpoints.load import find_owner
from ..checkpoints.weight_file import read_records
from ..parallel.devices import synchronize
from ..parallel.offload.copies import NUM_SLOTS, PinnedBuffer, Slot, Slots, SlotTensor, lay_out
from ..patches.hooks import HookSet, map_tensors
from .text_weights import Sources, Storage, layer_list, read_weights, weight_dtypes


@dataclass(frozen=True)
class StreamPlan:
    """How an encoder passes through its card."""

    captions_per_pass: int
    keeps_host_copy: bool = True  # whether all layers stay in host memory, or are read from the files for each pass

    def __post_init__(self) -> None:
        assert self.captions_per_pass > 0, self


@dataclass(frozen=True)
class _Layer:
    """A layer's tensors by name, where each lies, and the size of a buffer for them."""

    tensors: Mapping[str, SlotTensor]
    sources: Sources
    num_bytes: int


def stream_weights(model: nn.Module, sources: Sources, storage: Storage, plan: StreamPlan) -> StreamedLayers:
    """Fill an empty model: its layers stream, and the rest (embeddings, last norm) is on the device for good.

    Returns: what holds the layers; close it before the model is dropped.
    Raises: ValueError as read_weights does.
    """
    assert storage.scheme == "none", "8-bit weights are not streamed"
    prefix, modules = layer_list(model)
    rest = {name: source for name, source in sources.items() if not name.startswith(f"{prefix}.")}
    streamed = {name: source for name, source in sources.items() if name not in rest}
    read_weights(model, rest, storage)
    dtypes = weight_dtypes(model, streamed, storage.dtype)
    layers = []
    for index in range(len(modules)):
        names = [name for name in streamed if name.startswith(f"{prefix}.{index}.")]
        owners = [find_owner(model, name) for name in names]
        absent = [getattr(owner, leaf) for owner, leaf in owners]
        pieces, size = lay_out((tensor.shape, dtypes[name]) for tensor, name in zip(absent, names, strict=True))
        tensors = {
            name: SlotTensor(owner, leaf, tensor, piece)
            for name, (owner, leaf), tensor, piece in zip(names, owners, absent, pieces, strict=True)
        }
        layers.append(_Layer(tensors, {name: streamed[name] for name in names}, size))
    return StreamedLayers(modules, layers, storage.device, plan)


class StreamedLayers:
    """The layers of one encoder on their way through its device: modules, called in order in every forward, and what
    each of them has."""

    def __init__(
        self, modules: nn.ModuleList, layers: Sequence[_Layer], device: torch.device, plan: StreamPlan
    ) -> None:
        self.plan = plan
        self._device = device
        self._layers = layers
        largest = max(layer.num_bytes for layer in layers)
        self._slots = Slots([list(layer.tensors.values()) for layer in layers], largest, device)
        self._host = _HostLayers(layers, plan.keeps_host_copy, device)
        self._finished: list[Any] = []  # outputs of the layer that is computing, one per caption but the last
        self._hooks = HookSet()
        for index, module in enumerate(modules):
            self._hooks.before(module, partial(self._before, index))
            self._hooks.after(module, partial(self._after, index), also_on_error=True)

    @property
    def num_copies(self) -> int:
        """Layers that were copied to the device so far."""
        return self._slots.num_copies

    @property
    def host_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer in list(self._host.buffers.values()))

    def close(self) -> None:
        """Wait for what is under way and give all buffers back; the layers are empty afterwards. Again: a no-op."""
        self._hooks.remove()
        synchronize([self._device])
        self._host.close()
        self._slots.close()

    def _before(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if index == 0:
            self._slots.clear()
            self._host.restart()
        slot = self._send(index)
        if index + 1 < len(self._layers) and self._host.is_ready(index + 1):
            self._send(index + 1)  # else it is sent later, while what was queued here still computes
        self._slots.bind(slot)
        self._finished = []
        batch = (args[0] if args else kwargs["hidden_states"]).shape[0]
        for position in range(batch - 1):  # the last goes through the call that this precedes
            item_args, item_kwargs = _caption(args, kwargs, position, batch)
            self._finished.append(module.forward(*item_args, **item_kwargs))
        return _caption(args, kwargs, batch - 1, batch)

    def _after(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        slot = self._slots.find(index)
        if slot is not None:
            self._slots.unbind(slot)
        outputs, self._finished = [*self._finished, output], []
        return None if output is None else _joined(outputs)  # None: its forward raised

    def _send(self, index: int) -> Slot:
        """Queue the copy of a layer unless it was; waits until it has been read, and not until it is copied."""
        sent = self._slots.find(index)
        if sent is not None:
            return sent
        slot = self._slots.slots[index % len(self._slots.slots)]
        buffer = self._host.get(index)
        self._slots.load(slot, index, buffer.tensor[: self._layers[index].num_bytes])
        buffer.used = slot.arrival
        self._host.release(index)
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


class _HostLayers:
    """Layers in host memory, read by a thread of its own before they are needed: into a buffer each, which keeps
    them, or into NUM_SLOTS that take turns."""

    def __init__(self, layers: Sequence[_Layer], keeps: bool, device: torch.device) -> None:
        self._layers, self._keeps, self._device = layers, keeps, device
        sizes = [layer.num_bytes for layer in layers]
        self._sizes = sizes if keeps else [max(sizes)] * NUM_SLOTS
        self.buffers: dict[int, PinnedBuffer] = {}
        self._reads: dict[int, Future[PinnedBuffer]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="text-encoder-layers")
        self._request(0)

    def _request(self, index: int) -> None:
        """Have a layer read unless it is, or is being read."""
        if index < len(self._layers) and index not in self._reads:
            self._reads[index] = self._reader.submit(self._read, index)

    def is_ready(self, index: int) -> bool:
        """Whether get() would return at once."""
        return index in self._reads and self._reads[index].done()

    def get(self, index: int) -> PinnedBuffer:
        """The layer's bytes; waits until they are read. Raises: what reading raised."""
        self._request(index)
        return self._reads[index].result()

    def release(self, index: int) -> None:
        """The layer's copy to the device is queued; the next but one is read."""
        if not self._keeps:
            del self._reads[index]
        self._request(index + NUM_SLOTS)

    def restart(self) -> None:
        """Read the first layers; forget reads that failed, and those that a broken pass left in buffers of another
        order."""
        for index, read in list(self._reads.items()):
            failed = read.done() and read.exception() is not None
            if failed or (index >= NUM_SLOTS and not self._keeps):
                read.exception()
                del self._reads[index]
        for index in range(NUM_SLOTS):
            self._request(index)

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._reads.clear()
        for buffer in self.buffers.values():
            buffer.close()
        self.buffers.clear()

    def _read(self, index: int) -> PinnedBuffer:
        number, layer = index % len(self._sizes), self._layers[index]
        if number not in self.buffers:
            self.buffers[number] = PinnedBuffer(self._sizes[number], self._device)
        buffer = self.buffers[number]
        if not self._keeps and buffer.used is not None:
            buffer.used.synchronize()
        for name, found in read_records(layer.sources):
            piece = layer.tensors[name].piece
            assert found.shape == piece.shape, name  # refuse_other_shapes has looked
            piece.view(buffer.tensor).copy_(found)
        return buffer
