"""A text encoder larger than the card it runs on: its layers pass through two buffers there, one after the other.

The equation. A pass over a batch of B captions takes max(copying all layers once, computing B captions), since the next
layer is copied while one computes. Copying is the same for one caption as for a hundred, so batches make it vanish:
Mistral 3 as FLUX.2-dev uses it has 33 GB in its layers, 1.3 s at 25 GB/s, and a caption takes 17 TFLOP.

Two buffers are enough. The copy into one overlaps the computation with the other; a third would only let copies run
ahead of a computation that they do not wait for. Memory beyond two layers is better spent on more captions per pass.

Bits. Inside a layer captions go one by one, each as a batch of one, so that every matrix product has the shape it has
where the encoder is resident and rounds as it does there. Results are bitwise those of one caption alone, whatever
other captions share the pass, and so the cache's keys need not know about passes. This costs nothing: 512 tokens keep a
card busy. What runs between layers (embedding, rotary frequencies, last norm) sees the batch; it works row by row.
What one pass must not mix is captions with padding and captions without: the attention of the latter needs no mask,
and another kernel may compute it.

On the host. A layer's tensors lie in one buffer as the card wants them, in the computation's types, registered with the
driver so that a copy runs beside everything else (pinned memory of torch's own is rounded up to powers of two, and kept
after it is freed). Where memory allows, every layer keeps its buffer and files are read once. Else two buffers take
turns, and every pass reads the files again, by a thread of its own.

Order on a card, for buffer s and layer k: the side stream waits for `used[s]` (layer k - 2 has computed), copies, and
records `arrived[s]`; the computing stream waits for `arrived[s]`, computes, and records `used[s]`. The thread that
reads waits for `arrived[s]` before it writes the host's buffer s anew.

8-bit weights are not streamed. They would halve the copying, which a batch hides already, and what keeps them small on
a card is that they are resident there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.weight_file import open_weights
from ..parallel.devices import device_module, synchronize
from ..parallel.offload.pinned import PinnedBuffer, aligned
from ..patches.hooks import HookSet, map_tensors
from .text_weights import Sources, Storage, layer_list, read_weights, refuse_eight_bit, weight_dtypes

NUM_BUFFERS = 2


@dataclass(frozen=True)
class StreamPlan:
    """How an encoder passes through its card.

    Args:
        captions_per_pass: captions that share one pass of the layers.
        keeps_host_copy: whether all layers stay in host memory between passes, or are read from the files each time.
    """

    captions_per_pass: int
    keeps_host_copy: bool = True

    def __post_init__(self) -> None:
        assert self.captions_per_pass > 0, self


@dataclass(frozen=True)
class _Piece:
    """One tensor of a layer: where it is in the files, and where in the layer's buffer."""

    owner: nn.Module
    leaf: str
    file: Path
    key: str
    dtype: torch.dtype
    shape: torch.Size
    start: int

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.end].view(self.dtype).view(self.shape)


_Layout = Sequence[_Piece]


def stream_weights(model: nn.Module, sources: Sources, storage: Storage, plan: StreamPlan) -> StreamedLayers:
    """Fill an empty model: its layers stream, and the rest (embeddings, last norm) is on the device for good.

    Returns: what holds the layers; close it before the model is dropped.
    Raises: ValueError as read_weights does.
    """
    assert storage.scheme == "none", "8-bit weights are not streamed"
    prefix, layers = layer_list(model)
    rest = {name: source for name, source in sources.items() if not name.startswith(f"{prefix}.")}
    streamed = {name: source for name, source in sources.items() if name not in rest}
    refuse_eight_bit({key: file for file, key in streamed.values()})
    read_weights(model, rest, storage)
    dtypes = weight_dtypes(model, streamed, storage.dtype)
    layouts = [_lay_out(model, f"{prefix}.{index}.", streamed, dtypes) for index in range(len(layers))]
    return StreamedLayers(layers, layouts, storage.device, plan)


def layer_buffer_bytes(tensors: Iterator[tuple[torch.Size, torch.dtype]]) -> int:
    """Bytes of the buffer that holds these tensors, each at an aligned place."""
    end = 0
    for shape, dtype in tensors:
        end = aligned(end) + shape.numel() * dtype.itemsize
    return end


def _lay_out(model: nn.Module, prefix: str, sources: Sources, dtypes: dict[str, torch.dtype]) -> _Layout:
    pieces, end = [], 0
    for name, (file, key) in sources.items():
        if name.startswith(prefix):
            owner_name, _, leaf = name.rpartition(".")
            owner = model.get_submodule(owner_name)
            piece = _Piece(owner, leaf, file, key, dtypes[name], getattr(owner, leaf).shape, aligned(end))
            end = piece.end
            pieces.append(piece)
    return pieces


class StreamedLayers:
    """The layers of one encoder on their way through its device.

    Args:
        layers: called in their order, all of them in every forward.
        layouts: of each layer.
    """

    def __init__(
        self, layers: nn.ModuleList, layouts: Sequence[_Layout], device: torch.device, plan: StreamPlan
    ) -> None:
        self.plan = plan
        self.num_copies = 0  # of layers to the device
        self._sizes = [max((piece.end for piece in layout), default=0) for layout in layouts]
        largest = max(self._sizes)
        self._device = device
        self._buffers = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self._copier = _make_copier(device)
        self._host = _HostLayers(layouts, self._sizes, plan.keeps_host_copy, device, self._copier.wait_for_copy)
        self._layouts = layouts
        self._empty = [[getattr(piece.owner, piece.leaf) for piece in layout] for layout in layouts]
        self._sent: set[int] = set()
        self._finished: list[Any] = []  # outputs of the layer that is computing, one per caption but the last
        self._hooks = HookSet()
        for index, layer in enumerate(layers):
            self._hooks.before(layer, self._make_before(index))
            self._hooks.after(layer, self._make_after(index), also_on_error=True)
        self._host.request(0)

    @property
    def host_bytes(self) -> int:
        """Bytes of the buffers on the host."""
        return self._host.num_bytes

    def close(self) -> None:
        """Wait for what is under way and give all buffers back; the layers are empty afterwards. Again: a no-op."""
        self._hooks.remove()
        self._copier.close()
        self._host.close()
        self._buffers.clear()

    def _make_before(self, index: int) -> Callable[..., Any]:
        def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if index == 0:
                self._begin_pass()
            self._send(index)
            if self._host.is_ready(index + 1):  # else it is sent later, while what was queued here still computes
                self._send(index + 1)
            self._copier.await_copy(index % NUM_BUFFERS)
            self._bind(index)
            return self._run_all_but_last(layer, args, kwargs)

        return before

    def _make_after(self, index: int) -> Callable[..., Any]:
        def after(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            self._unbind(index)
            self._copier.mark_used(index % NUM_BUFFERS)
            outputs, self._finished = [*self._finished, output], []
            return None if output is None else _joined(outputs)  # None: its forward raised

        return after

    def _begin_pass(self) -> None:
        self._sent.clear()
        self._host.restart()
        for index in range(NUM_BUFFERS):
            self._host.request(index)

    def _send(self, index: int) -> None:
        """Queue the copy of a layer unless it was; waits until it has been read, and not until it is copied."""
        if index in self._sent or index >= len(self._sizes):
            return
        slot, size = index % NUM_BUFFERS, self._sizes[index]
        self._copier.copy(slot, self._buffers[slot][:size], self._host.get(index)[:size])
        self._sent.add(index)
        self.num_copies += 1
        self._host.release(index)
        self._host.request(index + NUM_BUFFERS)

    def _bind(self, index: int) -> None:
        buffer = self._buffers[index % NUM_BUFFERS]
        for piece in self._layouts[index]:
            _put(piece.owner, piece.leaf, piece.view(buffer))

    def _unbind(self, index: int) -> None:
        for piece, empty in zip(self._layouts[index], self._empty[index], strict=True):
            _put(piece.owner, piece.leaf, empty)

    def _run_all_but_last(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Compute every caption but the last, which goes through the call that this precedes."""
        self._finished = []
        batch = _batch_size(args, kwargs)
        for position in range(batch - 1):
            item_args, item_kwargs = _caption(args, kwargs, position, batch)
            self._finished.append(layer.forward(*item_args, **item_kwargs))
        return _caption(args, kwargs, batch - 1, batch)


def _put(owner: nn.Module, leaf: str, tensor: torch.Tensor) -> None:
    if leaf in owner._parameters:
        is_parameter = isinstance(tensor, nn.Parameter)
        owner._parameters[leaf] = tensor if is_parameter else nn.Parameter(tensor, requires_grad=False)  # type: ignore[assignment]
    else:
        owner._buffers[leaf] = tensor


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    states = args[0] if args else kwargs["hidden_states"]
    return states.shape[0]


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


# --- card ------------------------------------------------------------------------------------------------------------


class _PlainCopier:
    """Copies at once; for devices without streams."""

    def copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def await_copy(self, slot: int) -> None:
        """Let what is computed from here on wait for the last copy into this buffer."""

    def mark_used(self, slot: int) -> None:
        """Let later copies into this buffer wait for what was computed until here."""

    def wait_for_copy(self, slot: int) -> None:
        """Block the calling thread until the last copy into this buffer is done."""

    def close(self) -> None:
        """Block until everything is done."""


class _StreamCopier(_PlainCopier):
    """Copies on a side stream, beside what computes on the current one."""

    def __init__(self, device: torch.device) -> None:
        module = device_module(device)
        assert module is not None
        self._device = device
        self._module: Any = module
        self._stream = self._module.Stream(device)
        self._stream.wait_stream(self._module.current_stream(device))  # the buffers may have been another's until now
        self._arrived = [self._module.Event() for _ in range(NUM_BUFFERS)]
        self._used = [self._module.Event() for _ in range(NUM_BUFFERS)]

    def copy(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._module.stream(self._stream):
            self._stream.wait_event(self._used[slot])
            target.copy_(source, non_blocking=True)
            self._arrived[slot].record(self._stream)

    def await_copy(self, slot: int) -> None:
        self._module.current_stream(self._device).wait_event(self._arrived[slot])

    def mark_used(self, slot: int) -> None:
        self._used[slot].record(self._module.current_stream(self._device))

    def wait_for_copy(self, slot: int) -> None:
        self._arrived[slot].synchronize()

    def close(self) -> None:
        synchronize([self._device])


def _make_copier(device: torch.device) -> _PlainCopier:
    return _StreamCopier(device) if hasattr(device_module(device), "Stream") else _PlainCopier()


# --- host ------------------------------------------------------------------------------------------------------------


class _HostLayers:
    """Layers in host memory, each read by a thread of its own before it is asked for.

    Args:
        keeps: a buffer for every layer, filled once; else NUM_BUFFERS that take turns.
        wait_for_copy: blocks until the last copy out of a buffer that takes turns is done.
    """

    def __init__(
        self,
        layouts: Sequence[_Layout],
        sizes: Sequence[int],
        keeps: bool,
        device: torch.device,
        wait_for_copy: Callable[[int], None],
    ) -> None:
        self._layouts, self._keeps, self._device = layouts, keeps, device
        self._wait_for_copy = wait_for_copy
        largest = max(sizes)
        self._sizes = list(sizes) if keeps else [largest] * NUM_BUFFERS
        self._buffers: dict[int, PinnedBuffer] = {}
        self._reads: dict[int, Future[torch.Tensor]] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="text-encoder-layers")

    @property
    def num_bytes(self) -> int:
        return sum(buffer.tensor.nbytes for buffer in list(self._buffers.values()))

    def request(self, index: int) -> None:
        """Have a layer read unless it is, or is being read."""
        if index < len(self._layouts) and index not in self._reads:
            self._reads[index] = self._reader.submit(self._read, index)

    def is_ready(self, index: int) -> bool:
        """Whether get() would return at once."""
        return index in self._reads and self._reads[index].done()

    def get(self, index: int) -> torch.Tensor:
        """The layer's bytes; waits until they are read. Raises: what reading raised."""
        self.request(index)
        return self._reads[index].result()

    def release(self, index: int) -> None:
        """The layer's copy to the device is queued."""
        if not self._keeps:
            del self._reads[index]

    def restart(self) -> None:
        """Forget reads that failed, and those that a pass which broke off has left in buffers of another order."""
        for index, read in list(self._reads.items()):
            failed = read.done() and read.exception() is not None
            if failed or (index >= NUM_BUFFERS and not self._keeps):
                read.exception()
                del self._reads[index]

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._reads.clear()
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()

    def _read(self, index: int) -> torch.Tensor:
        slot = index if self._keeps else index % NUM_BUFFERS
        if slot not in self._buffers:
            self._buffers[slot] = PinnedBuffer(self._sizes[slot], self._device)
        elif not self._keeps:
            self._wait_for_copy(slot)
        target = self._buffers[slot].tensor
        layout = self._layouts[index]
        for file in dict.fromkeys(piece.file for piece in layout):
            with open_weights(file) as reader:
                for piece in layout:
                    if piece.file == file:
                        piece.view(target).copy_(_checked(reader.get_tensor(piece.key), piece))
        return target


def _checked(tensor: torch.Tensor, piece: _Piece) -> torch.Tensor:
    if tensor.shape != piece.shape:
        raise ValueError(
            f"{piece.key} in {piece.file} is {list(tensor.shape)}, and the encoder's config describes "
            f"{list(piece.shape)}; config and weights belong to different models"
        )
    return tensor
