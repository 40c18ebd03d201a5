"""Which calls of a divided model's blocks each device computes for its own pictures alone; see whole_blocks.py."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...patches.hooks import map_tensors, tensors_reached
from ..transfer import Arrivals, SideStreams, Versioned, copy_to, hold_sources, settle, with_version
from .bridge import Copies, Place
from .divided_graphs import Addresses, Call, DividedGraphs, arguments_of, options_of
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
    """Calls of a block that were compared with all devices together; one of each forward.

    Args: keys: of the calls. reads: the options that the block looked up, and their keys. trees: as it returns
    them, without numbers. num_left: forwards for which it is still to be compared.
    """

    keys: Sequence[Any]
    reads: Sequence[Mapping[Any, Any]]
    trees: Sequence[Any]
    num_left: int


@dataclass(eq=False)
class Own:
    """A forward's call of a block whose pictures devices compute alone.

    Args:
        block: home's part. call: as the model makes it, at home. key: of its devices and arguments.
        copies: of the forward. ranks: of the devices. number: of pictures, as many for each of these.
        calls: of each device. outputs: of each. tree: as a block returns them. joined: the tensors of all, at home.
        form: of calls that are to be compared.
    """

    block: nn.Module
    call: Call
    key: Any
    ranks: Sequence[int]
    number: int
    copies: Copies
    calls: list[Call] = field(default_factory=list)
    outputs: Sequence[Any] = ()
    tree: Any = None
    joined: Sequence[torch.Tensor] = ()
    form: _Form | None = None

    def place(self, rank: int) -> Place:
        """Where copies of a tensor's rows are that this device computes."""
        return "pictures", rank, len(self.ranks)

    @property
    def num_each(self) -> int:
        """Pictures of each device."""
        return self.number // len(self.ranks)


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

    def prepared(
        self,
        block: nn.Module,
        call: Call,
        *,
        copies: Copies,
        given: Callable[[int, Any, Any], Call],
        ranks: Sequence[int],
    ) -> Own | None:
        """What these devices are to compute of a forward's call of a block; None if they are not to.

        Args:
            copies: of the forward. given: makes a call's arguments for another device.
        """
        if self.fault:
            return None
        pictures = self._wholes.pictures(block, call)
        first = self._wholes.first(block, pictures)
        number = 0 if first is None else self._wholes.num_pictures(first, pictures, len(ranks))
        if first is None or not number or _num_tokens(first) < len(ranks) * self.least_tokens:
            return None
        try:
            own = Own(block, call, (ranks, key_of(arguments_of(call))), ranks, number, copies)
        except Unlike:
            return None
        try:
            own.calls = self._calls(own, pictures, given)
        except _ERRORS as error:
            is_known = any(own.key in form.keys for form in self._forms.get(block, ()))
            if is_known and not isinstance(error, torch.OutOfMemoryError):
                raise
            self._give_up(block, error)
            return None
        return own

    def compute(self, owns: Sequence[Own], *, is_replayed: bool) -> bool:
        """Compute calls of one block, one of each forward, in the order of their devices.

        Args: is_replayed: whether CUDA graphs may be, where all devices have pictures.
        Returns: whether that was done; else what the calls were given is as it was.
        """
        block, calls = owns[0].block, [call for own in owns for call in own.calls]
        if self.fault or len({(own.block, _dtype_of(own.calls)) for own in owns}) > 1:
            return False
        keys = [own.key for own in owns]
        forms = (form for form in self._forms.get(block, ()) if form.keys == keys)
        known = next((form for form in forms if _read_alike(form, owns)), None)
        try:
            if known is None:
                form, outputs = self._first_outputs(block, owns)
            else:
                form, outputs = known, self._known_outputs(block, owns, calls, is_replayed=is_replayed)
            for own, tree, of_devices in zip(owns, form.trees, _by_forward(owns, outputs), strict=True):
                own.tree, own.outputs = tree, of_devices
                own.form = form if known is None else None
                own.joined = self._joined(own)
        except _ERRORS as error:
            if known is not None and not isinstance(error, torch.OutOfMemoryError):
                raise
            self._give_up(block, error)
            for own in owns:
                own.copies.forget(own.call)  # a device's rows may have been written to
            return False
        return True

    def result(self, own: Own, together: Callable[[], Any]) -> Any:
        """What a block returns at home of a forward's call that was computed.

        Args: together: what all devices compute together of this call; the first call of a form is compared with it.
        """
        if own.form is not None:
            before = [tensor.clone() for tensor in tensors_reached(arguments_of(own.call))]
            all_together = together()  # which may write into the call's tensors
            fault = _difference(own.joined, tensors_reached(all_together), before)
            fault = fault or _other_tree(own.tree, all_together)
            if fault:
                self._give_up(own.block, RuntimeError(fault))
                return all_together
            own.form.num_left -= 1
            if not own.form.num_left:
                self._forms[own.block] = [*self._forms.get(own.block, ()), own.form][-_MOST_FORMS:]
        self.num_calls += 1
        return self._handed_on(own)

    def _calls(self, own: Own, pictures: Mapping[str, Any], given: Callable[[int, Any, Any], Call]) -> list[Call]:
        """Of each of its devices, with that one's pictures."""
        block = own.block
        bare = self._wholes.with_arguments(block, dict.fromkeys(pictures), own.call)
        found = []
        for index, rank in enumerate(own.ranks):
            rows = functools.partial(self._rows, own, index)
            mine = {name: map_tensors(value, rows) for name, value in pictures.items()}
            found.append(self._wholes.with_arguments(block, mine, given(rank, *bare) if rank else bare))
        return found

    def _rows(self, own: Own, index: int, tensor: torch.Tensor) -> torch.Tensor:
        """Those of a device's pictures in memory of its own, on the device; all of a tensor that has one for all."""
        rank = own.ranks[index]
        place, device = own.place(rank), self._devices[rank]
        known = own.copies.find(tensor, place)
        if known is None:
            each, is_cut = own.num_each, len(tensor) == own.number
            rows = tensor.narrow(0, index * each, each) if is_cut else tensor
            with Versioned():
                known = rows.clone() if rows.device == device else copy_to(rows, device)
            own.copies.keep(tensor, place, known)
        return known

    def _first_outputs(self, block: nn.Module, owns: Sequence[Own]) -> tuple[_Form, Sequence[Any]]:
        """Compute calls that are to be compared; it leaves what they are given as it was.

        Raises: RuntimeError if the block does something that depends on all pictures, or that the others would miss.
        """
        calls, watched = [], []
        for own in owns:
            with Versioned():
                own.calls = [map_tensors(each, torch.clone) for each in own.calls]
            watched.append(WatchedOptions(options_of(own.calls[0])))
            calls += [_with_options(own.calls[0], watched[-1]), *own.calls[1:]]
        given = [tensors_reached(call) for own in owns for call in own.calls]
        versions = [[tensor._version for tensor in tensors] for tensors in given]
        found = self._launched(block, owns, calls)
        returned = [tensors_reached(output) for output in found]
        for tensors, before, outputs in zip(given, versions, returned, strict=True):
            for tensor, version in zip(tensors, before, strict=True):
                if tensor._version != version and not any(tensor is each for each in outputs):
                    raise RuntimeError("it writes into what it is given, and does not return it")
        reads = [keys_read([options]) for options in watched]
        told = [name for name in _OF_PICTURES if any(name in read for read in reads)]
        if told:
            raise RuntimeError(f"it reads {told[0]!r} of the {OPTIONS}, which has something for each picture")
        trees = [_without_numbers(of_devices[0]) for of_devices in _by_forward(owns, found)]
        return _Form([own.key for own in owns], reads, trees, len(owns)), found

    def _launched(self, block: nn.Module, owns: Sequence[Own], calls: Sequence[Call]) -> Sequence[Any]:
        dtype = _dtype_of(calls)
        self._wholes.make_ready(block, dtype)
        return self._wholes.outputs(block, calls, dtype, [rank for own in owns for rank in own.ranks])

    def _known_outputs(
        self, block: nn.Module, owns: Sequence[Own], calls: Sequence[Call], *, is_replayed: bool
    ) -> Sequence[Any]:
        graphs, dtype = self.graphs, _dtype_of(calls)
        if graphs is None or graphs.fault or not is_replayed or len(calls) < len(self._devices):
            return self._launched(block, owns, calls)
        if self._wholes.begins_with(block):
            self._outputs(graphs, self._wholes.beginning, [((dtype,), {})] * len(self._devices), (0,), dtype)
        return self._outputs(graphs, block, calls, [own.ranks[0] for own in owns], dtype)

    def _outputs(
        self,
        graphs: DividedGraphs,
        block: nn.Module,
        calls: Sequence[Call],
        firsts: Sequence[int],
        dtype: torch.dtype,
    ) -> Sequence[Any]:
        """Args: firsts: numbers of the calls with which those of each forward begin."""
        waits = self._wholes.make_ready(block, dtype)
        proof = functools.partial(self._proof, block, dtype)
        replays = graphs.num_replays
        compute = functools.partial(self._wholes.outputs, block, dtype=dtype, ranks=range(len(self._devices)))
        parts = self._wholes.parts(block)
        outputs = graphs.outputs(parts, calls, compute, compute, firsts=firsts, waits=waits, proof=proof)
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

    def _joined(self, own: Own) -> list[torch.Tensor]:
        """All pictures of each tensor that a block returns, at home.

        Raises: RuntimeError if a device did not return a row for each of its pictures.
        """
        found = [tensors_reached(output) for output in own.outputs]
        if any(not tensor.ndim or len(tensor) != own.num_each for tensors in found for tensor in tensors):
            raise RuntimeError("it does not return a row for each picture")
        arrivals: Arrivals = {}
        home, at_home = self._devices[0], []
        for rank, tensors in zip(own.ranks, found, strict=True):
            is_there = self._devices[rank] == home
            at_home.append(tensors if is_there else self._side_streams.copies(tensors, home, arrivals))
        hold_sources(arrivals)
        settle(arrivals, home)
        with Versioned():
            return [torch.cat(list(rows)) for rows in zip(*at_home, strict=True)]

    def _handed_on(self, own: Own) -> Any:
        """What the block returns at home, where what it wrote to has all pictures. Every device has its own rows for
        the next block."""
        joined, given, rows = list(own.joined), tensors_reached(own.call), tensors_reached(own.calls[0])
        for number, output in enumerate(tensors_reached(own.outputs[0])):
            index = next((index for index, each in enumerate(rows) if output is each), None)
            if index is not None:
                given[index].copy_(joined[number])
                own.copies.forget(given[index])  # in inference mode no version tells that it was written to
                with Versioned():
                    joined[number] = with_version(given[index])
        for rank, tree in zip(own.ranks, own.outputs, strict=True):
            for whole, tensor in zip(joined, tensors_reached(tree), strict=True):
                own.copies.keep(whole, own.place(rank), tensor)
        left = iter(joined)
        return map_tensors(own.tree, lambda _: next(left))

    def _give_up(self, block: nn.Module, error: Exception) -> None:
        self.release()
        self._has_no_room = isinstance(error, torch.OutOfMemoryError)
        self.fault = f"{type(block).__name__}: {error}".partition("\n")[0]
        _log.warning("each card computes a part of all pictures, not its own pictures: %s", self.fault)
        _log.debug("the reason", exc_info=error)


def _by_forward(owns: Sequence[Own], outputs: Sequence[Any]) -> list[list[Any]]:
    """What the devices of each return."""
    left = iter(outputs)
    return [[next(left) for _ in own.ranks] for own in owns]


def _without_numbers(tree: Any) -> Any:
    return map_tensors(tree, lambda _: torch.empty(0, device="meta"))


def _other_tree(own: Any, together: Any) -> str:
    """What differs beside the numbers in tensors, if anything does."""
    try:
        is_same = key_of(own) == key_of(_without_numbers(together))
    except Unlike:
        is_same = False
    return "" if is_same else "it returns something else beside tensors"


def _read_alike(form: _Form, owns: Sequence[Own]) -> bool:
    return all(reads_alike(read, options_of(own.call)) for read, own in zip(form.reads, owns, strict=True))


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
