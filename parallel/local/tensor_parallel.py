"""Several devices compute each block of one forward together, every device with its part of the weights.

The model's own forward runs once, at home, on home's part of each block. A hook on the block hands the same arguments
to a worker per further device, which runs that device's part. Inside the block the parts meet behind row-parallel
linears (shards.py, meetings.py): each device copies the others' partial sums and adds all of them in the order of
ranks. So every device has the same bits, and the block's output. The next block finds it there, if it is handed the
very tensor that this block returned, unchanged. Everything else is copied from home.

So the code between two blocks, and whatever other people hang into it, sees ordinary tensors of one device. Outputs
have a version also in inference mode: a residual added in place makes the other devices' copies out of date.

The workers (device_workers.py) are greenlets of home's thread, or threads, and live as long as one forward. One forward
runs at a time, whichever thread begins it. A device's error ends the meeting of all, and the forward with that error.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...patches.hooks import map_tensors, tensors_reached
from ..devices import device_title
from ..staged_copies import StagedCopies, copies_between
from ..transfer import Arrivals, Versioned, copy_to, with_version
from .ahead import Groups
from .bridge import Bridge
from .divided_graphs import Addresses, DividedGraphs, same_bits
from .divided_graphs import Call as GivenCall
from .exchange import Tensors, TokenChunks
from .forward_workers import ForwardWorkers
from .graph_recorder import CardsRecorder, can_record
from .meetings import MEETS, Call, Stays
from .recorded_calls import OPTIONS
from .shards import BlockShard, Meeting

# From how large an output on a layer is computed by chunks where cards copy to each other directly. Smaller ones gain
# nothing: a chunk takes the host three more launches on each card (docs/internals/experiments.md).
CHUNKS_FROM_BYTES = 2**26
_TOLERANCE = 0.02  # of a block's output, between devices of different kinds, which round differently


def _lies_on(module: nn.Module, device: torch.device) -> bool:
    return all(parameter.device == device for parameter in module.parameters())


def watching_modes() -> int:
    """How many modes are told of each of torch's functions or operations, such as one that counts them."""
    return int(torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack())


class TensorParallel(Bridge):
    """Runs the forwards of a model whose blocks are divided among devices; see the module's docstring.

    Args:
        devices: home first.
        shards: home's part of each block, in execution order -> the parts of the other devices, in their order.
        passed_by, per_device: as of Bridge; the other devices get a copy of a dict.
    Raises: ValueError if there is no block.
    """

    replays = True  # blocks as CUDA graphs, where that was asked for
    in_turns = True  # one thread for all devices, where greenlets are to be had; else a thread per device
    remembers = True  # what a forward has copied, and blocks as CUDA graphs; else every block is given all anew

    def __init__(
        self,
        devices: Sequence[torch.device],
        shards: Mapping[nn.Module, tuple[BlockShard, Sequence[BlockShard]]],
        *,
        passed_by: Sequence[str] = (),
        per_device: Sequence[str] = (),
    ) -> None:
        blocks = dict.fromkeys(shards, devices[0])
        super().__init__(blocks, devices[0], passed_by=passed_by, per_device=per_device)
        self._ranks = tuple(devices)
        self._shards = dict(shards)
        self.groups = Groups({block: (own, *others) for block, (own, others) in shards.items()})
        self._run: ForwardWorkers | None = None
        self._beginning = threading.Lock()
        self._runs_in: threading.Thread | None = None  # the thread of the forward that is running
        self._checked: set[nn.Module] = set()
        self.graphs: DividedGraphs | None = None
        # Of row-parallel layers; None computes each at once.
        self.chunks: TokenChunks | None = TokenChunks(from_bytes=CHUNKS_FROM_BYTES)
        self.stays: Stays = _lies_on
        self.side_streams = copies_between(devices)
        if isinstance(self.side_streams, StagedCopies):  # the slowest pair is waited for
            self.chunks = TokenChunks()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return self._ranks

    def attach(self) -> None:
        if self._hooks:
            return
        for block, (own, others) in self._shards.items():
            self._hooks.around(block, functools.partial(self._compute, block))
            for rank, shard in enumerate((own, *others)):
                for meeting in shard.meetings:
                    meet = functools.partial(self._meet, MEETS[meeting.how], rank, meeting)
                    self._hooks.around(meeting.module, meet)
                for hook in shard.arguments:
                    self._hooks.before(hook.module, hook)

    def begin(self) -> None:
        """Start one forward of this thread, with nothing remembered.

        Raises: RuntimeError if any thread is inside a forward: the devices meet in one at a time.
        """
        with self._beginning:
            self._claim()
            super().begin()
            self._forget()  # a thread that died in its forward has not ended it
            self._run = None

    def _claim(self) -> None:
        """Keep other threads from computing. Raises: RuntimeError if one does."""
        other = self._runs_in
        if other not in (None, threading.current_thread()) and other.is_alive():  # type: ignore[union-attr]
            raise RuntimeError(
                f"another thread ({other.name}) is computing with this model, whose blocks "  # type: ignore[union-attr]
                f"{', '.join(map(str, self._ranks))} compute together, one forward at a time; wait for it, or use "
                "the model with whole blocks on each device (way 'blocks')"
            )
        self._runs_in = threading.current_thread()

    def replay(self, addresses: Addresses) -> None:
        """Have blocks replayed as CUDA graphs from now on, where these devices have such and copy to each other."""
        if can_record(self._ranks) and self.copies_directly:
            make = functools.partial(CardsRecorder, self._ranks, self.side_streams)
            self.graphs = DividedGraphs(self._ranks, make, addresses)

    @property
    def copies_directly(self) -> bool:
        """Whether no copy between the devices is staged in the host's memory."""
        return not isinstance(self.side_streams, StagedCopies)

    def end(self) -> None:
        if self.is_running:
            run, self._run = self._run, None
            if run is not None:
                run.close()
            self._forget()
        super().end()
        if self._runs_in is threading.current_thread():
            self._runs_in = None

    def check_again(self) -> None:
        """Compare what the devices compute of every block once more: weights or layers are others than they were."""
        self._checked.clear()
        self.release()

    def release(self) -> None:
        """Give back what is kept between forwards for speed alone."""
        if self.graphs is not None:
            self.graphs.release()

    def _forget(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()

    # ---- a block

    def _compute(self, block: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Home's call of a block, and that of every other device."""
        if not self.is_running:
            raise RuntimeError(
                "a block of a model that several devices compute together was called outside the model's forward; "
                "use the model with whole blocks on each device (way 'blocks')"
            )
        copies = self._local.copies
        if not self.knows_all:
            self.forget()
        if self._run is None:
            self._run = ForwardWorkers(self)
        calls = [(args, kwargs), *(self._run.given(rank, args, kwargs) for rank in range(1, len(self._ranks)))]
        own, others = self._shards[block]
        if self.graphs is not None and self._may_replay(kwargs) and block in self._checked:  # the cards have agreed
            parts = [own.block, *(each.block for each in others)]
            compute, alone = (functools.partial(each, block, call) for each in (self._outputs, self._outputs_alone))
            outputs = self.graphs.outputs(parts, calls, compute, alone)
        else:
            if self.graphs is not None:
                self.graphs.forget()
            outputs = self._outputs(block, call, calls)
        found = [tensors_reached(each) for each in outputs]
        if block not in self._checked:
            self._check(block, found)
            self._checked.add(block)
        return self._kept(outputs[0], found)

    @property
    def knows_all(self) -> bool:
        """Whether nothing is changed that was copied, and copies may be used again."""
        return self.runs_alone and self.remembers

    @property
    def _is_replayed(self) -> bool:
        return self.replays and self.in_turns and self.remembers

    def _may_replay(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether nothing runs in this call of a block but the model's own code, in one thread."""
        return self.graphs is not None and not self.graphs.fault and self._is_replayed and self._is_plain(kwargs)

    def _is_plain(self, kwargs: Mapping[str, Any]) -> bool:
        others = {*self.per_device, *self.passed_by} - {OPTIONS}  # what blocks hand each other themselves
        is_plain = self.runs_alone and others.isdisjoint(kwargs) and not watching_modes()
        return is_plain and not torch.is_grad_enabled() and not torch.is_autocast_enabled(self.home.type)

    def _outputs(
        self, block: nn.Module, call: Call, calls: Sequence[GivenCall], *, is_alone: bool = False
    ) -> list[Any]:
        """What each device returns for its call of a block. is_alone: it computes all by itself, nothing ahead."""
        run = self._enter(block, calls, is_alone=is_alone)
        args, kwargs = calls[0]
        try:
            output = call(*args, **kwargs)
            run.meetings.finish(0)
        except BaseException:
            run.exchange.abort(RuntimeError("the block failed on another device"))
            run.results()
            run.current = None
            raise
        others = run.results()
        run.current = None  # the other devices may have been behind
        error = run.exchange.error  # the first one: what the others raised may follow from it
        if error is not None:
            del others
            try:
                raise error
            finally:
                del error  # or its traceback would keep this frame, and this frame the error
        return [output, *others]

    def _outputs_alone(self, block: nn.Module, call: Call, calls: Sequence[GivenCall]) -> list[Any]:
        """As _outputs, whatever was computed ahead; after an error the forward goes on with other workers."""
        try:
            return self._outputs(block, call, calls, is_alone=True)
        except BaseException:
            run, self._run = self._run, None
            if run is not None:
                run.close()
            raise

    def _enter(self, block: nn.Module, calls: Sequence[GivenCall], *, is_alone: bool) -> ForwardWorkers:
        if self._run is None:
            self._run = ForwardWorkers(self)
        run = self._run
        run.workers.begin_block()
        run.meetings.ahead.enter(block, *calls[0], is_watched=is_alone or not self.knows_all)
        run.meetings.is_compared = block not in self._checked
        run.meetings.may_wait = self.runs_alone
        run.current = block  # before any device begins, and after what may run out of memory
        for rank, (shard, call) in enumerate(zip(self._shards[block][1], calls[1:], strict=True), start=1):
            run.calls[rank].put((shard.block, *call))
        return run

    def give(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for one of the other devices: what it has of it already, or a copy of its own."""
        device, copies = self._ranks[rank], self._local.copies
        if tensor.device.type == "cpu" and tensor.ndim == 0 and device.type != "cpu":
            return tensor
        assert copies is not None, "a forward is running"
        copy = copies.find(tensor, rank)
        if copy is None:
            with Versioned():
                made = tensor.clone() if tensor.device == device else copy_to(tensor, device)
            copy = copies.keep(tensor, rank, made)
        return copy

    def _kept(self, output: Any, found: Sequence[Sequence[torch.Tensor]]) -> Any:
        """Home's output with a version, by which the next block finds what the other devices have of it.

        Args:
            found: the tensors in every device's output.
        """
        copies = self._local.copies
        assert copies is not None, "a forward is running"
        with Versioned():
            new = {id(own): with_version(own) for own in found[0]}
        for rank, tensors in enumerate(found[1:], start=1):
            for own, other in zip(found[0], tensors, strict=True):
                copies.keep(new[id(own)], rank, other)
        return map_tensors(output, lambda tensor: new[id(tensor)])

    def _check(self, block: nn.Module, found: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raises: RuntimeError if the devices did not compute the same, as where a partial sum was not added up: the
        same bits on devices of one kind."""
        if len({tuple(tensor.shape for tensor in each) for each in found}) != 1:
            raise RuntimeError(
                f"{type(block).__name__} returned different tensors on {', '.join(map(str, self._ranks))}"
            )
        kinds = [device_title(device) for device in self._ranks]
        for rank, tensors in enumerate(found[1:], start=1):
            bound = 0.0 if kinds[rank] == kinds[0] else _TOLERANCE
            differences = [
                _difference(own, copy_to(other, self.home)) for own, other in zip(found[0], tensors, strict=True)
            ]
            if max(differences, default=0.0) > bound:
                raise RuntimeError(
                    f"{type(block).__name__} computed something else on {self._ranks[rank]} than on {self.home} "
                    f"(by {max(differences):.3g}); another node may have changed layers inside it. Use way 'blocks'"
                )

    # ---- inside a block

    @property
    def current_block(self) -> nn.Module | None:
        """Home's part of the block that is being computed; None between blocks."""
        return None if self._run is None else self._run.current

    def compare_again(self) -> None:
        """Other people's code ran inside this block, and may have written at home to what every device has: what the
        devices compute of the block is compared, however often they agreed without that code."""
        self._checked.discard(self.current_block)  # type: ignore[arg-type]

    def at_home(self, name: str, brought: Any, compute: Callable[[list[Any]], list[Any]]) -> Any:
        """Inside a block, have something computed once, at home, from what all devices bring.

        Args:
            name: of the meeting; the same on every device.
            brought: this device's; its tensors are copied home.
            compute: what all brought, by rank -> what each gets, by rank; home's own is called, by home.
        Returns: this device's, its tensors copied here.
        """
        run = self._run
        assert run is not None, "a block is running"
        rank = run.workers.rank()
        nothing = torch.empty(0, device=self._ranks[rank])
        run.brought[rank] = brought
        run.exchange.all(rank, name, nothing)
        if rank == 0:
            run.brought = compute([map_tensors(each, lambda x: copy_to(x, self.home)) for each in run.brought])
        run.exchange.all(rank, f"{name}, computed", nothing)
        mine, run.brought[rank] = run.brought[rank], None
        return map_tensors(mine, lambda x: copy_to(x, self._ranks[rank]))

    def send_parts(self, tensors: Tensors, rank: int, arrivals: Arrivals) -> Tensors:
        """The tensors of one device for another, which it may use after settle(arrivals)."""
        device = self._ranks[rank]
        return tensors if tensors[0].device == device else self.side_streams.copies(tensors, device, arrivals)

    def _meet(
        self,
        meet: Callable[..., Any],
        rank: int,
        meeting: Meeting,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        run = self._run
        if run is None or run.current is None:
            raise RuntimeError(
                f"{meeting.name} of a block that several devices compute together was called outside its block; use "
                "the model with whole blocks on each device (way 'blocks')"
            )
        return meet(run.meetings, rank, meeting, call, args, kwargs)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to a; 0 for the same bits, where NaN is the same as NaN."""
    if same_bits(a, b):
        return 0.0
    if not bool(((a != a) == (b != b)).all()):
        return float("inf")
    x, y = a.float().nan_to_num(), b.float().nan_to_num()
    return max(float((x - y).norm() / x.norm().clamp_min(1e-20)), 1e-20)
