"""Several devices together compute each block of one forward, every device with its part of the weights. A hook on a
block hands the same arguments to a thread per further device. Each device adds the partial sums of all, so all have the
same bits. The next block finds them there, if it is handed the very tensor that this one returned."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from ...patches.hooks import PLAIN, HookSet, map_tensors, tensors_reached
from ..devices import device_title
from ..staged_copies import copies_between
from ..transfer import Send, Versioned, copy_to, current_device, is_everywhere, with_version
from .bridge import Bridge
from .collectives import Collective, Exchange, attach_collectives
from .graph_recorder import graphs_on
from .graphs import OPTIONS, Addresses, Call, Graphs, Work, same_bits
from .shards import BlockShard
from .workers import Task, ThreadPool, ThreadState

_TOLERANCE = 0.02  # of a block's output, between devices of different kinds, which round differently
_WAY_BLOCKS = "use the model with whole blocks on each device (way 'blocks')"


class ForwardWorkers:
    """The ranks of one forward. Rank 0 is the thread that makes this, whose grad mode and the like the others take."""

    def __init__(
        self, pool: ThreadPool, devices: Sequence[torch.device], send: Send, exchange: Exchange = "full"
    ) -> None:
        self._devices, self._state = tuple(devices), ThreadState(devices)
        self.collective = Collective(len(devices), send, exchange)
        self.current: nn.Module | None = None  # the block that is being computed
        # Threads exchange something every 100 microseconds or so: a queue in C costs a tenth of a condition.
        self._work: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in devices]
        self._results: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._tasks: list[Task] = []
        try:
            for rank, device in enumerate(devices[1:], start=1):
                task = pool.task(f"devicebridge-{device}", self._serve, rank)
                task.start()
                self._tasks.append(task)
        except BaseException:
            self.close()
            raise

    def run(self, block: nn.Module, work: Sequence[Work]) -> list[Any]:
        """What every rank's work returns, each computed in its rank's thread, by rank. Raises: the first error of a
        rank, which ends the others' collectives; the workers are of no further use then."""
        self.current = block
        for queue, each in zip(self._work[1:], work[1:], strict=True):
            queue.put(each)
        outputs: list[Any] = []
        failure: BaseException | None = None
        try:
            outputs.append(work[0]())
            self.collective.finish(0)
        except BaseException as raised:
            failure = raised
            self.collective.abort(RuntimeError("the block failed on another device"))
        outputs += [results.get() for results in self._results[1:]]  # None of a rank that failed
        self.current = None
        # The first one: what the others raised may follow from it. Of this rank's own all but another rank's Cancel.
        error = self.collective.error
        error = failure if failure is not None and isinstance(error, Exception) else error
        if error is not None:
            outputs.clear()
            try:
                raise error
            finally:
                del error, failure  # or its traceback would keep this frame, and this frame the error
        return outputs

    def close(self) -> None:
        """End the workers, also in the middle of a block."""
        if self.current is not None:
            self.collective.abort(RuntimeError("the forward was ended"))
        for queue in self._work[1:]:
            queue.put(None)
        for task in self._tasks:
            task.join()
        self.collective.forget()
        self._results.clear()

    def _serve(self, rank: int) -> None:
        """Do work after work, up to the first error."""
        try:
            with self._state.taken_over(), current_device(self._devices[rank]):
                while (work := self._work[rank].get()) is not None:
                    output = work()
                    self.collective.finish(rank)
                    self._results[rank].put(output)
                    del work, output
        except BaseException as error:
            self.collective.abort(error)
            self._results[rank].put(None)


class TensorParallel(Bridge):
    """Runs the forwards of a model whose blocks are divided among devices. Args: shards: the main device's part of each
    block, in execution order -> those of the others, in their order. passed_by, per_device: as of Bridge; the other
    devices get a copy of a dict. addresses: of weights, by which blocks are replayed as CUDA graphs, where these
    devices have such; None launches all."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        shards: Mapping[nn.Module, tuple[BlockShard, Sequence[BlockShard]]],
        *,
        passed_by: Sequence[str] = (),
        per_device: Sequence[str] = (),
        exchange: Exchange = "full",
        addresses: Addresses | None = None,
    ) -> None:
        blocks = dict.fromkeys(shards, devices[0])
        super().__init__(blocks, devices[0], passed_by=passed_by, per_device=per_device)
        self._ranks = tuple(devices)
        self._shards, self._exchange = dict(shards), exchange
        self._run: ForwardWorkers | None = None
        # By rank and argument: a value, and what it is there.
        self._known: list[dict[Any, tuple[Any, Any]]] = [{} for _ in devices]
        self._collectives: list[HookSet] = []
        self._beginning = threading.Lock()
        self._runs_in: threading.Thread | None = None  # the thread of the forward that is running
        self._checked: set[nn.Module] = set()
        self.side_streams = copies_between(devices)
        self.graphs: Graphs | None = None if addresses is None else graphs_on(devices, self.side_streams, addresses)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return self._ranks

    def attach(self) -> None:
        if self._hooks:
            return
        for block in self._shards:
            self._hooks.around(block, functools.partial(self._compute, block))
        for rank in range(len(self._ranks)):
            shards = {str(index): (own, *others)[rank] for index, (own, others) in enumerate(self._shards.values())}
            self._collectives.append(attach_collectives(shards, rank, self._find_group))

    @property
    def hook_ids(self) -> set[int]:
        return super().hook_ids.union(*(hooks.ids for hooks in self._collectives))

    def remove(self) -> None:
        super().remove()
        for hooks in self._collectives:
            hooks.remove()
        self._collectives.clear()

    def _find_group(self) -> Collective:
        if self._run is None or self._run.current is None:
            raise RuntimeError(
                f"a layer of a block that several devices compute was called outside its block; {_WAY_BLOCKS}"
            )
        return self._run.collective

    def begin(self) -> None:
        """Start one forward, with nothing remembered. Raises: RuntimeError if any thread is inside a forward."""
        with self._beginning:
            other, here = self._runs_in, threading.current_thread()
            if other is not None and other is not here and other.is_alive():
                raise RuntimeError(
                    f"another thread ({other.name}) is computing with this model, whose blocks "
                    f"{', '.join(map(str, self._ranks))} compute one forward at a time; wait for it, or {_WAY_BLOCKS}"
                )
            self._runs_in = here
            super().begin()
            self._close_run()
            self._forget()  # a thread that died in its forward has not ended it

    def end(self) -> None:
        if self.is_running:
            self._close_run()
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
        for known in self._known:
            known.clear()
        if self.graphs is not None:
            self.graphs.forget()

    def _compute(
        self, block: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The main device's call of a block, and that of every other device."""
        self.entered.add(block)
        if not self.is_running:
            raise RuntimeError(
                f"a block that several devices compute was called outside the model's forward; {_WAY_BLOCKS}"
            )
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors_reached((args, kwargs))):
            raise RuntimeError(
                f"a gradient through {type(block).__name__} was asked for, which {', '.join(map(str, self._ranks))} "
                f"compute together without one; {_WAY_BLOCKS}"
            )
        if not self.runs_alone:
            self.forget()
        own, others = self._shards[block]
        blocks = [own.block, *(each.block for each in others)]
        parts: list[Callable[..., Any]] = [call, *blocks[1:]]
        calls: list[Call] = [(args, kwargs)]
        calls += (self._arguments_of(rank, args, kwargs) for rank in range(1, len(blocks)))
        run = functools.partial(self._run_on_all, block)
        is_checked = block in self._checked  # the cards have agreed
        if is_checked and self.graphs is not None and self._may_replay(kwargs):
            outputs = self.graphs.outputs(blocks, calls, parts, run)
        else:
            if self.graphs is not None:
                self.graphs.forget()
            outputs = run([functools.partial(part, *a, **k) for part, (a, k) in zip(parts, calls, strict=True)])
        found = [tensors_reached(each) for each in outputs]
        if not is_checked:
            self._check(block, found)
            self._checked.add(block)
        return self._kept(outputs[0], found)

    def _arguments_of(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The arguments for a rank. It gets dicts of its own: a block may write into those it is handed."""
        if not self.runs_alone:  # somebody may have written into earlier arguments since they were looked through
            self._known[rank].clear()
        named = {name: value for name, value in kwargs.items() if name not in self.per_device}
        shared = self._with_own({name: kwargs[name] for name in kwargs.keys() - named.keys()}, rank)
        there = self._on_rank(rank, "", {**dict(enumerate(args)), **named})
        return tuple(there.pop(index) for index in range(len(args))), {**there, **shared}

    def _on_rank(self, rank: int, where: str, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Values on another device. A tuple, and what holds no tensor, is looked through once for all blocks that are
        given the same one: looking takes as long as a small block. Args: where: the dict that they are in."""
        known, there = self._known[rank], {}
        for name, value in values.items():
            if type(value) in PLAIN:
                there[name] = value
            elif name == OPTIONS and isinstance(value, dict):
                there[name] = self._on_rank(rank, OPTIONS, value)
            elif (before := known.get((where, name))) is not None and before[0] is value:
                there[name] = before[1]
            else:
                there[name] = map_tensors(value, functools.partial(self.give, rank))
                if there[name] is value or type(value) is tuple:
                    known[where, name] = value, there[name]
        return there

    def _run_on_all(self, block: nn.Module, work: Sequence[Work]) -> list[Any]:
        """What every rank's work returns. After an error the forward goes on with other workers, if it goes on."""
        if self._run is None:
            send = self.side_streams.to_ranks(self._ranks)
            self._run = ForwardWorkers(self.pool, self._ranks, send, self._exchange)
        try:
            return self._run.run(block, work)
        except BaseException:
            self._close_run()
            raise

    def _close_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _may_replay(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether nothing runs in this call of a block but the model's own code."""
        others = {*self.per_device, *self.passed_by} - {OPTIONS}  # what blocks hand each other themselves
        return self.runs_alone and self.graphs is not None and self.graphs.may_replay and others.isdisjoint(kwargs)

    def give(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for one of the other devices: what it has of it already, or a copy of its own."""
        device, copies = self._ranks[rank], self._local.copies
        if is_everywhere(tensor) and device.type != "cpu":
            return tensor
        assert copies is not None, "a forward is running"
        if (copy := copies.find(tensor, rank)) is not None:
            return copy
        with Versioned():
            made = tensor.clone() if tensor.device == device else copy_to(tensor, device)
        return copies.keep(tensor, rank, made)

    def _kept(self, output: Any, found: Sequence[Sequence[torch.Tensor]]) -> Any:
        """The main device's output with a version, by which the next block finds what the others have of it (found)."""
        copies = self._local.copies
        assert copies is not None, "a forward is running"
        with Versioned():
            new = {id(own): with_version(own) for own in found[0]}
        for rank, tensors in enumerate(found[1:], start=1):
            for own, other in zip(found[0], tensors, strict=True):
                copies.keep(new[id(own)], rank, other)
        return map_tensors(output, lambda tensor: new[id(tensor)])

    def _check(self, block: nn.Module, found: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raises: RuntimeError if devices did not compute the same, on one kind the same bits: a sum may be missing."""
        kinds, shapes = [device_title(device) for device in self._ranks], [[t.shape for t in each] for each in found]
        for rank, tensors in enumerate(found[1:], start=1):
            far = float("inf")
            if shapes[rank] == shapes[0]:
                pairs = zip(found[0], tensors, strict=True)
                far = max((_difference(own, copy_to(other, self.main_device)) for own, other in pairs), default=0.0)
            if far > (0.0 if kinds[rank] == kinds[0] else _TOLERANCE):
                raise RuntimeError(
                    f"{type(block).__name__} computed something else on {self._ranks[rank]} than on {self.main_device} "
                    f"(by {far:.3g}); another node may have changed layers inside it. Use way 'blocks'"
                )


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative to a; 0 for the same bits, where NaN is the same as NaN."""
    if same_bits(a, b):
        return 0.0
    if not bool(((a != a) == (b != b)).all()):
        return float("inf")
    x, y = a.float().nan_to_num(), b.float().nan_to_num()
    return max(float((x - y).norm() / x.norm().clamp_min(1e-20)), 1e-20)
