"""Which calls of a divided model's blocks each device computes for its own pictures alone; see whole_blocks.py."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...patches.hooks import map_tensors, tensors_reached
from ..transfer import Arrivals, SideStreams, Versioned, copy_to, settle, with_version
from .bridge import Copies
from .divided_graphs import Addresses, DividedGraphs, relative_difference
from .graph_recorder import CardsRecorder
from .recorded_calls import OPTIONS, WatchedOptions
from .whole_blocks import Call, WholeBlocks, replaced

_log = logging.getLogger(__name__)
_OF_PICTURES = ("cond_or_uncond", "uuids", "sigmas")
_TOLERANCE = 0.02  # of a block's output against that of all devices together, which round elsewhere


class Pictures:
    """Args: side_streams: on which pictures come home. least_tokens: that a device must compute at a time; for fewer,
    the weights would take longer than the activations that devices exchange otherwise."""

    def __init__(
        self, devices: Sequence[torch.device], wholes: WholeBlocks, side_streams: SideStreams, least_tokens: int = 0
    ) -> None:
        self._devices, self._wholes, self._side_streams = tuple(devices), wholes, side_streams
        self.least_tokens = least_tokens
        self.graphs: DividedGraphs | None = None
        self.fault = ""  # why none is computed any more
        self.num_calls = 0
        # Of blocks that were compared: numbers of outputs that are tensors which the block was given, and theirs.
        self._written: dict[nn.Module, list[tuple[int, int]]] = {}

    def replay(self, addresses: Addresses) -> None:
        """Have blocks replayed as CUDA graphs. A graph reads the weights of the block behind its own."""

        def behind(part: nn.Module, device: torch.device) -> tuple[int, ...] | None:
            found = self._wholes.part_behind(part)
            return () if found is None else addresses(found, device)

        recorder = functools.partial(CardsRecorder, self._devices, self._wholes.side_streams)
        self.graphs = DividedGraphs(self._devices, recorder, behind)

    def forget(self) -> None:
        """A forward begins or is over."""
        self._wholes.forget()
        if self.graphs is not None:
            self.graphs.forget()

    def release(self) -> None:
        """Give back the memory that is kept between forwards."""
        self._wholes.release()
        if self.graphs is not None:
            self.graphs.release()

    def check_again(self) -> None:
        """Compare each block with that of all devices together once more."""
        self._written.clear()

    def outputs(
        self,
        block: nn.Module,
        call: Call,
        *,
        copies: Copies,
        given: Callable[[int, Any, Any], Call],
        together: Callable[[], Any],
        is_replayed: bool,
    ) -> Any:
        """What a block returns at home; None for a call that all devices are to compute together.

        Args:
            copies: of the forward. given: makes a call's arguments for another device.
            together: what all devices compute together of this call.
            is_replayed: whether CUDA graphs may be.
        """
        number = 0 if self.fault else self._wholes.num_pictures(block, call)
        if not number or self._num_tokens(block, call) < self.least_tokens:
            return None
        is_new = block not in self._written
        try:
            calls = self._calls(block, number, call, copies, given)
            if is_new:  # it may be computed once more, and what it writes to is not known
                with Versioned():
                    calls = [map_tensors(each, torch.clone) for each in calls]
            dtype = self._wholes.first(block, call).dtype
            self._make_ready(block, dtype)
            compute = functools.partial(self._wholes.outputs, block, dtype=dtype)
            if is_new:
                versions = [tensor._version for tensor in tensors_reached(calls)]
                options = WatchedOptions(calls[0][1].get(OPTIONS) or {})
                outputs: Sequence[Any] = compute([_with_options(calls[0], options), *calls[1:]])
                written = _written(calls, versions, outputs)
                _check_options(options)
            elif self.graphs is not None and is_replayed and not self.graphs.fault:
                outputs = self.graphs.outputs(self._wholes.parts(block), calls, compute, compute)
                self._wholes.was_replayed(block)
            else:
                outputs = compute(calls)
            joined = self._joined(outputs, number)
            if is_new:
                _compare(joined, tensors_reached(together()))
                self._written[block] = written
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            if not is_new and not isinstance(error, _NoRoom):
                raise
            self._give_up(block, error)
            return None
        self.num_calls += 1
        return self._handed_on(joined, outputs, tensors_reached(call), self._written[block], copies)

    def _make_ready(self, block: nn.Module, dtype: torch.dtype) -> None:
        try:
            self._wholes.make_ready(block, dtype)
        except torch.OutOfMemoryError as error:
            raise _NoRoom(f"no room for two whole blocks: {error}") from error

    def _num_tokens(self, block: nn.Module, call: Call) -> int:
        """That each device computes, of the first tensor with pictures."""
        first = self._wholes.first(block, call)
        return first.numel() // max(1, first.shape[-1]) // len(self._devices)

    def _calls(
        self, block: nn.Module, number: int, call: Call, copies: Copies, given: Callable[[int, Any, Any], Call]
    ) -> list[Call]:
        pictures = self._wholes.pictures(block, call)
        bare = replaced(block, dict.fromkeys(pictures), call)
        found = []
        for rank in range(len(self._devices)):
            rows = functools.partial(self._rows, rank, number, copies)
            own = {name: map_tensors(value, rows) for name, value in pictures.items()}
            found.append(replaced(block, own, given(rank, *bare) if rank else bare))
        return found

    def _rows(self, rank: int, number: int, copies: Copies, tensor: torch.Tensor) -> torch.Tensor:
        """Those of a device's pictures, on the device; all of a tensor that has one for all pictures."""
        place = "pictures", rank
        known = copies.find(tensor, place)
        if known is None:
            each = number // len(self._devices)
            rows = tensor.narrow(0, rank * each, each) if len(tensor) == number else tensor
            with Versioned():
                known = rows.clone() if rows.device == self._devices[rank] else copy_to(rows, self._devices[rank])
            copies.keep(tensor, place, known)
        return known

    def _joined(self, outputs: Sequence[Any], number: int) -> list[torch.Tensor]:
        """All pictures of each tensor that a block returns, at home.

        Raises: RuntimeError if a device did not return a row for each of its pictures.
        """
        found, each = [tensors_reached(output) for output in outputs], number // len(self._devices)
        if any(not tensor.ndim or len(tensor) != each for tensors in found for tensor in tensors):
            raise RuntimeError("it does not return a row for each picture")
        arrivals: Arrivals = {}
        home, *others = self._devices
        at_home = [found[0]]
        for device, tensors in zip(others, found[1:], strict=True):
            at_home.append(tensors if device == home else self._side_streams.copies(tensors, home, arrivals))
        settle(arrivals, home)
        with Versioned():
            return [torch.cat(list(rows)) for rows in zip(*at_home, strict=True)]

    def _handed_on(
        self,
        joined: list[torch.Tensor],
        outputs: Sequence[Any],
        given: Sequence[torch.Tensor],
        written: Sequence[tuple[int, int]],
        copies: Copies,
    ) -> Any:
        """What the block returns at home. Every device has its own rows for the next block.

        Args: given: the tensors in home's call; what the block writes to is returned, and has all pictures.
        """
        for output, number in written:
            given[number].copy_(joined[output])
            copies.forget(given[number])  # in inference mode no version tells that it was written to
            with Versioned():
                joined[output] = with_version(given[number])
        for rank, tree in enumerate(outputs):
            for whole, rows in zip(joined, tensors_reached(tree), strict=True):
                copies.keep(whole, ("pictures", rank), rows)
        left = iter(joined)
        return map_tensors(outputs[0], lambda _: next(left))

    def _give_up(self, block: nn.Module, error: Exception) -> None:
        self.release()
        self.fault = f"{type(block).__name__}: {error}".partition("\n")[0]
        _log.warning("each card computes a part of all pictures, not its own pictures: %s", self.fault)
        _log.debug("the reason", exc_info=error)


class _NoRoom(RuntimeError):
    pass


def _with_options(call: Call, options: WatchedOptions) -> Call:
    return (call[0], {**call[1], OPTIONS: options}) if OPTIONS in call[1] else call


def _check_options(options: WatchedOptions) -> None:
    """Raises: RuntimeError if a block read options that may differ between pictures; it is given those of all."""
    for name in sorted(options.read, key=str):
        value = dict.get(options, name)
        if name in _OF_PICTURES or tensors_reached(value):
            raise RuntimeError(f"it reads {name!r} of the {OPTIONS}, which may differ between pictures")


def _written(calls: Sequence[Call], versions: Sequence[int], outputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Which outputs are tensors that a block was given and wrote to: their number, and that in the call.

    Raises: RuntimeError if it writes to something else, where the other pictures would miss it.
    """
    after = [tensor._version for tensor in tensors_reached(calls)]
    given, found = tensors_reached(calls[0]), tensors_reached(outputs[0])
    changed = {index for index in range(len(given)) if after[index] != versions[index]}
    pairs = [
        (number, index) for number, output in enumerate(found) for index, each in enumerate(given) if output is each
    ]
    if changed != {index for _, index in pairs}:
        raise RuntimeError("it writes into what it is given, and does not return it")
    return pairs


def _compare(own: Sequence[torch.Tensor], together: Sequence[torch.Tensor]) -> None:
    """Raises: RuntimeError if they differ by more than rounding."""
    if [each.shape for each in own] != [each.shape for each in together]:
        raise RuntimeError("it returns other shapes")
    difference = max((relative_difference(*pair) for pair in zip(together, own, strict=True)), default=0.0)
    if difference > _TOLERANCE:
        raise RuntimeError(f"it computes something else, by {difference:.3g}")
