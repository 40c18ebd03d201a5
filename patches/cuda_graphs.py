"""Blocks that keep their activations, replayed as CUDA graphs: what Python issued once is launched as a whole after.

A block's forward is recorded when it first runs, its backward when its gradient first arrives. Later calls copy their
inputs to where the graph reads them, launch it, and copy its results. Weights are read where they lie, so an optimizer
may change them; if one has moved before a step, all is recorded anew.

Each microbatch in flight on a card has a slot: graphs of its own for every block, which share one pool of memory. The
pool is laid out for the order of recording, all forwards and then all backwards. Any other order is refused.

While a block is recorded it also runs without, and both are compared. Where they differ, or recording fails, the card
records nothing any more, and blocks run as ever. So does a microbatch whose first block is called with other shapes,
without gradients, or under autocast. A later block that deviates has its backward refused. Graphs draw no random
numbers: do not apply them with dropout. Reasons: docs/decisions/0013-graphs-and-threads.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten

from ..quantization.wrapped import plain_parts
from .compile_blocks import Forward
from .cuda_graph_block import GraphedBlock
from .cuda_graph_memory import CardMemory, CudaRecorder, Slot
from .hooks import tensors_of

_log = logging.getLogger(__name__)

_MOST_SLOTS = 16  # micro-batches in flight on one card; more are a sign of forwards without a backward
_CONSTANTS = (bool, int, float, str, torch.dtype, type(None))


class GraphedBlocks:
    """Handle of apply_cuda_graphs.

    Args:
        is_on: whether calls are recorded and replayed from now on.
    """

    def __init__(
        self, blocks: Mapping[nn.Module, torch.device], make_recorder: Callable[[torch.device], CudaRecorder]
    ) -> None:
        self._cards = {device: _Card(device, make_recorder(device)) for device in dict.fromkeys(blocks.values())}
        self._forwards: dict[nn.Module, Forward | None] = {}
        self._addresses: dict[nn.Module, list[tuple[int, bool]]] = {}
        self.is_on = False
        for block, device in blocks.items():
            self._attach(block, self._cards[device])

    @property
    def num_slots(self) -> dict[torch.device, int]:
        """How many micro-batches were in flight at once, at most."""
        return {device: len(card.slots) for device, card in self._cards.items()}

    @property
    def fault(self) -> str:
        """Why nothing is recorded any more; "" while all goes well."""
        return next((card.fault for card in self._cards.values() if card.fault), "")

    def start_step(self) -> None:
        """To be called before every step, while no micro-batch is in flight.

        Forgets recordings that an interrupted step left half way, and all where weights have moved.
        """
        addresses = {
            block: [
                (part.data_ptr(), each.requires_grad)
                for each in (*block.parameters(), *block.buffers())
                for part in plain_parts(each)
            ]
            for block in self._forwards
        }
        has_moved = bool(self._addresses) and addresses != self._addresses
        self._addresses = addresses
        for card in self._cards.values():
            if has_moved:
                card.forget()
            card.start_step()

    def remove(self) -> None:
        """Give every block the forward back that it had and free the recordings; a second call is a no-op."""
        for block, before in self._forwards.items():
            if before is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = before
        self._forwards.clear()
        for card in self._cards.values():
            card.forget()
        self.is_on = False

    def _attach(self, block: nn.Module, card: _Card) -> None:
        plain: Forward = block.forward
        self._forwards[block] = block.__dict__.get("forward")
        card.first = card.first or block

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on or card.fault or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            return card.run(block, plain, args, kwargs)

        block.forward = forward


def cuda_graphs_fault(devices: Iterable[torch.device], *, also_by_driver: bool = False) -> str:
    """Why blocks on these devices cannot be replayed; "" if nothing speaks against it.

    Args:
        also_by_driver: graphs may take the memory of the driver's own allocator, too.
    """
    for device in devices:
        if device.type != "cuda":
            return f"{device} is no CUDA device"
        if torch.version.hip is not None:
            return "nothing is known of graphs on AMD cards"
        if (backend := torch.cuda.get_allocator_backend()) != "native" and not also_by_driver:
            return f"graphs share memory of torch's own allocator, and {backend} is in use"
    return ""


def graph_if_possible(blocks: Mapping[nn.Module, torch.device]) -> GraphedBlocks | None:
    """apply_cuda_graphs, or None and one line in the log that says why not."""
    fault = cuda_graphs_fault(blocks.values()) if blocks else "none of them keeps its activations"
    if fault:
        _log.warning("blocks are not replayed as CUDA graphs: %s", fault)
        return None
    _log.info("%d blocks are recorded in the first step and replayed as CUDA graphs", len(blocks))
    return apply_cuda_graphs(blocks)


def apply_cuda_graphs(
    blocks: Mapping[nn.Module, torch.device], make_recorder: Callable[[torch.device], CudaRecorder] = CudaRecorder
) -> GraphedBlocks:
    """Let these blocks be recorded and replayed while they train, in place, once the handle is switched on.

    Args:
        blocks: with their devices, in execution order. Each is called once per forward; its weights stay where they
            are, and it draws no random numbers. On one device one call at a time runs, micro-batches do not interrupt
            each other's forwards, and the backward goes through the blocks in reverse.
    """
    return GraphedBlocks(blocks, make_recorder)


class _Card(CardMemory):
    """The slots of a device. first: the first of its blocks in execution order."""

    def __init__(self, device: torch.device, recorder: CudaRecorder) -> None:
        super().__init__(device, recorder)
        self.slots: list[Slot] = []
        self.first: nn.Module | None = None
        self._active: Slot | None = None
        self._kinds: dict[nn.Module, Any] = {}
        self._has_said = False

    def start_step(self) -> None:
        if self.fault or not all(slot.is_at_rest for slot in self.slots):
            self.forget()
        self.release()

    def forget(self) -> None:
        """All recordings; none may be in flight."""
        for slot in self.slots:
            slot.calls.clear()  # they refer back to their slot: their memory would wait for the garbage collector
        self.slots.clear()
        self._staged.clear()
        self._active = None

    def run(self, block: nn.Module, plain: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        kind = _kind_of(leaves, spec, self.device)
        is_known = kind is not None and kind == self._kinds.setdefault(block, kind)
        slot = self._slot_for(block) if is_known else None
        if slot is None:
            if not self._has_said:
                self._has_said = True
                _log.info("some calls of blocks on %s cannot be replayed and run as ever", self.device)
            return plain(*args, **kwargs)
        self._active = slot
        tensors = tensors_of(leaves)
        if block not in slot.calls:
            graphs = GraphedBlock(self, slot, block, plain, (args, kwargs))
            if not graphs.record_forward(tensors):
                return plain(*args, **kwargs)
        return slot.calls[block](tensors)

    def _slot_for(self, block: nn.Module) -> Slot | None:
        """The one whose micro-batch is on its way through this card's blocks; for the first block one at rest, else
        another. None where the blocks before this one were not recorded."""
        if block is not self.first:
            return self._active if self._active is not None and self._active.takes(block) else None
        for slot in self.slots:
            if slot.is_at_rest:
                slot.position = 0
                return slot
        if len(self.slots) == _MOST_SLOTS:
            self.give_up(f"more than {_MOST_SLOTS} micro-batches are in flight")
            return None
        self.slots.append(Slot(self.recorder.make_pool()))
        return self.slots[-1]


def _kind_of(leaves: Sequence[Any], spec: TreeSpec, device: torch.device) -> Any:
    """Equal for calls that one recording serves; None for calls that none does."""
    parts: list[Any] = [spec]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if leaf.device != device:
                return None
            parts.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        elif isinstance(leaf, _CONSTANTS):
            parts.append(leaf)
        else:
            return None
    may_cast = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return None if may_cast else parts
