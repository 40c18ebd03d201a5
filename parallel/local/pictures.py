"""Which calls of a divided model's blocks each device computes for its own pictures alone; see whole_blocks.py."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...patches.hooks import map_tensors, tensors_reached
from ..transfer import Arrivals, SideStreams, Versioned, copy_to, hold_sources, settle, with_version
from .bridge import Copies
from .divided_graphs import Addresses, Call, DividedGraphs, arguments_of
from .graph_recorder import CardsRecorder
from .recorded_calls import OPTIONS, Unlike, WatchedOptions, key_of, keys_read, reads_alike
from .whole_blocks import WholeBlocks

_log = logging.getLogger(__name__)
_OF_PICTURES = ("cond_or_uncond", "uuids")  # options with something for each picture
_MOST_FORMS = 8  # of calls of one block that are remembered
# How far each picture may be from what all devices compute together, which rounds elsewhere: so many last bits of what
# the block adds to it, in float32 a share that order of summation makes, and one of the whole.
_OF_ADDED, _OF_ORDER, _OF_WHOLE = 8.0, 1e-4, 1.0
_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, Unlike)


@dataclass(eq=False)
class _Form:
    """Calls of a block that were compared with all devices together.

    Args: key: of the arguments. read: the options that the block looked up, and their keys.
    """

    key: Any
    read: Mapping[Any, Any]


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
        self._has_no_room = False
        self._forms: dict[nn.Module, list[_Form]] = {}

    def replay(self, addresses: Addresses) -> None:
        """Have blocks replayed as CUDA graphs. A graph reads its own block's gathered weights, and those of the next
        block where they are gathered from."""

        def behind(part: nn.Module, device: torch.device) -> tuple[int, ...] | None:
            next_one = self._wholes.part_behind(part)
            found = () if next_one is None else addresses(next_one, device)
            return None if found is None else (*self._wholes.addresses(part), *found)

        recorder = functools.partial(CardsRecorder, self._devices, self._wholes.side_streams)
        # A device begins the next block while its pictures are still on their way home.
        self.graphs = DividedGraphs(self._devices, recorder, behind, has_streams=True)

    def forget(self) -> None:
        """A forward begins or is over."""
        self._wholes.forget()
        if self.graphs is not None:
            self.graphs.forget()

    def release(self) -> None:
        """Give back the memory that is kept between forwards. Where there was too little, it may be tried again."""
        self._wholes.release()
        if self.graphs is not None:
            self.graphs.release()
        if self._has_no_room:
            self.fault, self._has_no_room = "", False

    def check_again(self) -> None:
        """Compare each block with that of all devices together once more."""
        self._forms.clear()

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
        if self.fault:
            return None
        pictures = self._wholes.pictures(block, call)
        first = self._wholes.first(block, pictures)
        number = 0 if first is None else self._wholes.num_pictures(first, pictures)
        if first is None or not number or _num_tokens(first) < len(self._devices) * self.least_tokens:
            return None
        options = call[1].get(OPTIONS) or {}
        try:
            key = key_of(arguments_of(call))
        except Unlike:
            return None
        form = next((f for f in self._forms.get(block, ()) if f.key == key and reads_alike(f.read, options)), None)
        try:
            own = self._own(block, number, pictures, call, copies, given)
            if form is None:
                found = self._first_outputs(block, own, key)
            else:
                own.outputs = self._known_outputs(block, own.calls, is_replayed=is_replayed)
            own.joined = self._joined(own.outputs, number)
        except _ERRORS as error:
            if form is not None and not isinstance(error, torch.OutOfMemoryError):
                raise
            self._give_up(block, error)
            copies.forget(call)  # a device's rows may have been written to
            return None
        if form is None:
            before = [tensor.clone() for tensor in tensors_reached(arguments_of(call))]
            all_together = together()  # which may write into the call's tensors
            fault = _difference(own.joined, tensors_reached(all_together), before)
            if fault:
                self._give_up(block, RuntimeError(fault))
                return all_together
            self._forms[block] = [*self._forms.get(block, ()), found][-_MOST_FORMS:]
        self.num_calls += 1
        return self._handed_on(own, call, copies)

    def _own(
        self,
        block: nn.Module,
        number: int,
        pictures: Mapping[str, Any],
        call: Call,
        copies: Copies,
        given: Callable[[int, Any, Any], Call],
    ) -> _Own:
        """Every device's call with its own pictures."""
        bare = self._wholes.with_arguments(block, dict.fromkeys(pictures), call)
        found = []
        for rank in range(len(self._devices)):
            rows = functools.partial(self._rows, rank, number, copies)
            mine = {name: map_tensors(value, rows) for name, value in pictures.items()}
            found.append(self._wholes.with_arguments(block, mine, given(rank, *bare) if rank else bare))
        return _Own(found)

    def _rows(self, rank: int, number: int, copies: Copies, tensor: torch.Tensor) -> torch.Tensor:
        """Those of a device's pictures in memory of its own, on the device; all of a tensor that has one for all."""
        place = "pictures", rank
        known = copies.find(tensor, place)
        if known is None:
            each = number // len(self._devices)
            rows = tensor.narrow(0, rank * each, each) if len(tensor) == number else tensor
            with Versioned():
                known = rows.clone() if rows.device == self._devices[rank] else copy_to(rows, self._devices[rank])
            copies.keep(tensor, place, known)
        return known

    def _first_outputs(self, block: nn.Module, own: _Own, key: Any) -> _Form:
        """Compute a call that is to be compared; it leaves what it is given as it was.

        Raises: RuntimeError if the block does something that depends on all pictures, or that the others would miss.
        """
        with Versioned():
            own.calls = [map_tensors(each, torch.clone) for each in own.calls]
        given = [tensors_reached(each) for each in own.calls]
        versions = [[tensor._version for tensor in tensors] for tensors in given]
        options = WatchedOptions(own.calls[0][1].get(OPTIONS) or {})
        first = _with_options(own.calls[0], options)
        own.outputs = self._launched(block, [first, *own.calls[1:]])
        returned = [tensors_reached(each) for each in own.outputs]
        for tensors, before, outputs in zip(given, versions, returned, strict=True):
            for tensor, version in zip(tensors, before, strict=True):
                if tensor._version != version and not any(tensor is each for each in outputs):
                    raise RuntimeError("it writes into what it is given, and does not return it")
        read = keys_read([options])
        told = [name for name in _OF_PICTURES if name in read]
        if told:
            raise RuntimeError(f"it reads {told[0]!r} of the {OPTIONS}, which has something for each picture")
        return _Form(key, read)

    def _launched(self, block: nn.Module, calls: Sequence[Call]) -> Sequence[Any]:
        dtype = _dtype_of(calls)
        self._wholes.make_ready(block, dtype)
        return self._wholes.outputs(block, calls, dtype)

    def _known_outputs(self, block: nn.Module, calls: Sequence[Call], *, is_replayed: bool) -> Sequence[Any]:
        graphs, dtype = self.graphs, _dtype_of(calls)
        if graphs is None or graphs.fault or not is_replayed:
            return self._launched(block, calls)
        if self._wholes.begins_with(block):
            self._outputs(graphs, self._wholes.beginning, [((dtype,), {})] * len(self._devices), dtype)
        return self._outputs(graphs, block, calls, dtype)

    def _outputs(
        self, graphs: DividedGraphs, block: nn.Module, calls: Sequence[Call], dtype: torch.dtype
    ) -> Sequence[Any]:
        waits = self._wholes.make_ready(block, dtype)
        proof = functools.partial(self._proof, block, dtype)
        replays = graphs.num_replays
        compute = functools.partial(self._wholes.outputs, block, dtype=dtype)
        outputs = graphs.outputs(self._wholes.parts(block), calls, compute, compute, waits=waits, proof=proof)
        if graphs.num_replays > replays:
            self._wholes.was_replayed(block)
        return outputs

    @contextmanager
    def _proof(self, block: nn.Module, dtype: torch.dtype) -> Iterator[None]:
        """Raises: RuntimeError if the next block was not gathered inside."""
        self._wholes.blank(block)
        yield
        if not self._wholes.has_gathered(block, dtype):
            self._wholes.forget()
            raise RuntimeError("its graph gathers something else than the next block's weights")

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
        hold_sources(arrivals)
        settle(arrivals, home)
        with Versioned():
            return [torch.cat(list(rows)) for rows in zip(*at_home, strict=True)]

    def _handed_on(self, own: _Own, call: Call, copies: Copies) -> Any:
        """What the block returns at home, where what it wrote to has all pictures. Every device has its own rows for
        the next block."""
        joined, given, rows = list(own.joined), tensors_reached(call), tensors_reached(own.calls[0])
        for number, output in enumerate(tensors_reached(own.outputs[0])):
            index = next((index for index, each in enumerate(rows) if output is each), None)
            if index is not None:
                given[index].copy_(joined[number])
                copies.forget(given[index])  # in inference mode no version tells that it was written to
                with Versioned():
                    joined[number] = with_version(given[index])
        for rank, tree in enumerate(own.outputs):
            for whole, tensor in zip(joined, tensors_reached(tree), strict=True):
                copies.keep(whole, ("pictures", rank), tensor)
        left = iter(joined)
        return map_tensors(own.outputs[0], lambda _: next(left))

    def _give_up(self, block: nn.Module, error: Exception) -> None:
        self.release()
        self._has_no_room = isinstance(error, torch.OutOfMemoryError)
        self.fault = f"{type(block).__name__}: {error}".partition("\n")[0]
        _log.warning("each card computes a part of all pictures, not its own pictures: %s", self.fault)
        _log.debug("the reason", exc_info=error)


@dataclass(eq=False)
class _Own:
    """Args: calls: every device's. outputs: of each. joined: the tensors of all, at home."""

    calls: list[Call]
    outputs: Sequence[Any] = ()
    joined: Sequence[torch.Tensor] = ()


def _dtype_of(calls: Sequence[Call]) -> torch.dtype:
    return tensors_reached(arguments_of(calls[0]))[0].dtype


def _num_tokens(first: torch.Tensor) -> int:
    """Of all pictures. [pictures, ..., features]"""
    return first.numel() // max(1, first.shape[-1])


def _with_options(call: Call, options: WatchedOptions) -> Call:
    return (call[0], {**call[1], OPTIONS: options}) if OPTIONS in call[1] else call


def _difference(own: Sequence[torch.Tensor], together: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> str:
    """How a picture differs by more than rounding; "" if none does. Args: before: what the block was given."""
    if [each.shape for each in own] != [each.shape for each in together]:
        return "it returns other shapes"
    for found, expected in zip(own, together, strict=True):
        if not torch.equal(found.isnan(), expected.isnan()):
            return "it computes NaN elsewhere"
        given = [_numbers(each) for each in before if each.shape == expected.shape]
        last_bit = torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0.0
        found, expected = _numbers(found), _numbers(expected)
        whole = expected.norm(dim=1)
        added = torch.stack([whole, *((expected - each).norm(dim=1) for each in given)]).amin(dim=0)
        bound = max(_OF_ORDER, _OF_ADDED * last_bit) * added + _OF_WHOLE * last_bit * whole
        share = float(((found - expected).norm(dim=1) / bound.clamp_min(1e-30)).max())
        if share > 1.0:
            return f"it computes something else, {share:.3g} times as far off as rounding may be"
    return ""


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """[pictures, numbers of each], without NaN."""
    return tensor.float().nan_to_num().flatten(1)
