"""Several devices compute each block of one forward together, every device with its part of the weights.

The model's own forward runs once, at home, on home's part of each block. A hook on the block hands the same arguments
to a worker per further device, which runs that device's part. Inside the block the parts meet behind row-parallel
linears (shards.py): each device copies the others' partial sums and adds all of them in the order of ranks. So every
device has the same bits, and the block's output. The next block finds it there, if it is handed the very tensor that
this block returned, unchanged. Everything else is copied from home.

So the code between two blocks, and whatever other people hang into it, sees ordinary tensors of one device. Outputs
have a version also in inference mode: a residual added in place makes the other devices' copies out of date.

The workers (device_workers.py) are greenlets of home's thread, or threads, and live as long as one forward. A device's
error ends the meeting of all, and the forward with that error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...patches.hooks import map_tensors
from ..staged_copies import StagedCopies, go_through_host
from ..transfer import Arrivals, copy_to, versioned
from .bridge import Bridge
from .device_workers import make_workers
from .exchange import Exchange, TokenChunks, summed
from .shards import BlockShard, Meeting, norm_eps, norm_ratio, sum_of_squares

# Between devices of one kind the outputs of a block are the same bits; different kinds round differently. A partial sum
# that nobody added is as large as the output itself.
_TOLERANCE = 0.02
_OPTIONS = "transformer_options"


class TensorParallel(Bridge):
    """Runs the forwards of a model whose blocks are divided among devices; see the module's docstring.

    Args:
        devices: home first.
        shards: home's part of each block, in execution order -> the parts of the other devices, in their order.
        passed_by, per_device: as of Bridge; the other devices get a copy of a dict.
    Raises: ValueError if there is no block.
    """

    in_turns = True  # one thread for all devices, where greenlets are to be had; else a thread per device

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
        self._run: _Run | None = None
        self._checked: set[nn.Module] = set()
        self.chunks: TokenChunks | None = None  # of row-parallel layers; None computes each at once
        if go_through_host(devices):
            self.side_streams, self.chunks = StagedCopies(), TokenChunks()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return self._ranks

    def attach(self) -> None:
        if self._hooks:
            return
        for block, (own, others) in self._shards.items():
            self._hooks.before(block, functools.partial(self._enter, block))
            self._hooks.after(block, self._leave, also_on_error=True)
            for rank, shard in enumerate((own, *others)):
                for meeting in shard.meetings:
                    if self.chunks is not None and shard.is_sum_alone(meeting):
                        self._hooks.before(meeting.module, functools.partial(self._begin, rank, meeting))
                    self._hooks.after(meeting.module, functools.partial(self._meet, rank, meeting))
                for hook in shard.arguments:
                    self._hooks.before(hook.module, hook)

    def end(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()
        super().end()

    def remove(self) -> None:
        self._checked.clear()
        super().remove()

    # ---- a block

    def _enter(
        self, block: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self.is_running:
            raise RuntimeError(
                "a block of a model that several devices compute together was called outside the model's forward; "
                "use the model with whole blocks on each device (way 'blocks')"
            )
        copies = self._local.copies
        if self.trust == "nobody" and copies is not None:
            copies.clear()
        if self._run is None:
            self._run = _Run(self)
        others = enumerate(self._shards[block][1], start=1)
        calls = [(rank, (shard.block, *self._run.given(rank, args, kwargs))) for rank, shard in others]
        self._run.workers.begin_block()
        self._run.current = block  # before any device begins, and after what may run out of memory
        for rank, call in calls:
            self._run.calls[rank].put(call)
        return args, kwargs

    def give(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for one of the other devices: what it has of it already, or a copy of its own."""
        device, copies = self._ranks[rank], self._local.copies
        if tensor.device.type == "cpu" and tensor.ndim == 0 and device.type != "cpu":
            return tensor
        assert copies is not None, "a forward is running"
        copy = copies.find(tensor, rank)
        if copy is None:
            with versioned():
                made = tensor.clone() if tensor.device == device else copy_to(tensor, device)
            copy = copies.keep(tensor, rank, made)
        return copy

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        run = self._run
        if run is None or run.current is None:
            return None
        block = run.current
        if output is None:  # its forward raised
            run.exchange.abort(RuntimeError("the block failed on another device"))
        else:
            run.exchange.finish(0)
        others = run.results()
        run.current = None  # the other devices may have been behind
        if output is None:
            return None
        error = run.exchange.error  # the first one: what the others raised may follow from it
        if error is not None:
            del others
            try:
                raise error
            finally:
                del error  # or its traceback would keep this frame, and this frame the error
        found = [_tensors_in(each) for each in (output, *others)]
        if len({tuple(tensor.shape for tensor in each) for each in found}) != 1:
            raise RuntimeError(
                f"{type(block).__name__} returned different tensors on {', '.join(map(str, self._ranks))}"
            )
        if block not in self._checked:
            self._check(block, found)
            self._checked.add(block)
        new = {id(own): _with_version(own) for own in found[0]}
        for rank, tensors in enumerate(found[1:], start=1):
            for own, other in zip(found[0], tensors, strict=True):
                self._local.copies.keep(new[id(own)], rank, other)  # type: ignore[union-attr]
        return map_tensors(output, lambda tensor: new[id(tensor)])

    def _check(self, block: nn.Module, found: Sequence[Sequence[torch.Tensor]]) -> None:
        """Raises: RuntimeError if the devices did not compute the same, as where a partial sum was not added up."""
        for rank, tensors in enumerate(found[1:], start=1):
            for own, other in zip(found[0], tensors, strict=True):
                a, b = own.float(), copy_to(other, self.home).float()
                difference = float((a - b).nan_to_num().norm() / a.nan_to_num().norm().clamp_min(1e-20))
                if difference > _TOLERANCE:
                    raise RuntimeError(
                        f"{type(block).__name__} computed something else on {self._ranks[rank]} than on {self.home} "
                        f"(by {difference:.3g}); another node may have changed layers inside it. Use way 'blocks'"
                    )

    # ---- inside a block

    @property
    def current_block(self) -> nn.Module | None:
        """Home's part of the block that is being computed; None between blocks."""
        return None if self._run is None else self._run.current

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

    def send_part(self, tensor: torch.Tensor, rank: int, arrivals: Arrivals) -> torch.Tensor:
        """The tensor for another device, which it may use after settle(arrivals)."""
        device = self._ranks[rank]
        return tensor if tensor.device == device else self.side_streams.copy(tensor, device, arrivals)

    def _begin(
        self, rank: int, meeting: Meeting, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All but the last chunk of a layer; its own forward computes the last one."""
        run = self._run
        if run is None or run.current is None or kwargs or self.chunks is None:  # _meet says what is wrong
            return args, kwargs
        return self.chunks.bring_first(run.exchange, rank, meeting.name, module, args), kwargs

    def _meet(
        self, rank: int, meeting: Meeting, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        run = self._run
        if run is None or run.current is None:
            raise RuntimeError(
                f"{meeting.name} of a block that several devices compute together was called outside its block; use "
                "the model with whole blocks on each device (way 'blocks')"
            )
        if meeting.how == "norm":
            return self._corrected(run, rank, meeting, args[0], output)
        if meeting.how == "join":
            return torch.cat(run.exchange.all(rank, meeting.name, output), dim=-1)
        if meeting.how == "first":
            return map_tensors(output, lambda tensor: run.exchange.all(rank, meeting.name, tensor)[0])
        run.exchange.bring(rank, meeting.name, output)
        return summed(run.exchange.collect(rank, meeting.name))

    def _corrected(self, run: _Run, rank: int, meeting: Meeting, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """What an RMS norm of these features returned, normalised by the features of all devices instead."""
        sums = sum_of_squares(x)
        total = run.exchange.sum(rank, meeting.name, sums)
        eps = norm_eps(meeting.module, x.dtype)
        return output.mul_(norm_ratio(sums, total, x.shape[-1], meeting.width, eps))


class _Run:
    """The workers of one forward."""

    def __init__(self, owner: TensorParallel) -> None:
        devices, self._owner = owner.devices, owner
        self.workers = make_workers(owner.pool, devices, in_turns=owner.in_turns)
        self.exchange = Exchange(len(devices), owner.send_part, self.workers.queue)
        self.current: nn.Module | None = None  # the block that is being computed
        self.brought: list[Any] = [None] * len(devices)  # to something that is computed at home, and what came of it
        self.calls = [self.workers.queue() for _ in devices]
        self._results = [self.workers.queue() for _ in devices]
        self._give = [functools.partial(owner.give, rank) for rank in range(len(devices))]
        self._known: list[dict[Any, tuple[Any, Any]]] = [
            {} for _ in devices
        ]  # by argument: a value, and what it is there
        self._shared: dict[tuple[int, str], Any] = {}  # the objects of per_device
        try:
            for rank in range(1, len(devices)):
                self.workers.start(rank, functools.partial(self._serve, rank))
        except BaseException:
            self.close()
            raise

    def given(self, rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The arguments for another device. It gets dicts of its own: a block may write into those it is handed."""
        if self._owner.trust != "model":  # other people's code may have written into what is known
            self._known[rank].clear()
        named = {name: self._on(rank, name, value) for name, value in kwargs.items() if name != _OPTIONS}
        for name in self._owner.per_device:
            if name in kwargs:
                named[name] = self._shared.setdefault((rank, name), type(kwargs[name])())
        options = kwargs.get(_OPTIONS)
        if isinstance(options, dict):
            named[_OPTIONS] = {name: self._on(rank, (_OPTIONS, name), value) for name, value in options.items()}
        return tuple(self._on(rank, index, value) for index, value in enumerate(args)), named

    def _on(self, rank: int, key: Any, value: Any) -> Any:
        """The value of an argument on another device. A tuple is looked through once for all blocks that are given the
        same one, as modulation is: looking takes as long as a small block."""
        if type(value) is not tuple:
            return map_tensors(value, self._give[rank])
        known = self._known[rank].get(key)
        if known is None or known[0] is not value:
            known = self._known[rank][key] = value, map_tensors(value, self._give[rank])
        return known[1]

    def results(self) -> list[Any]:
        """What the other devices computed, by rank; None of one that failed, whose error the exchange knows."""
        return [results.get() for results in self._results[1:]]

    def close(self) -> None:
        """End the workers, also in the middle of a block."""
        if self.current is not None:
            self.exchange.abort(RuntimeError("the forward was ended"))
        for calls in self.calls[1:]:
            calls.put(None)
        self.workers.join()
        self.exchange.forget()
        self._results.clear()

    def _serve(self, rank: int) -> None:
        """Compute block after block, up to the first error."""
        try:
            with self.workers.here(rank):
                while (call := self.calls[rank].get()) is not None:
                    block, args, kwargs = call
                    output = block(*args, **kwargs)
                    self.exchange.finish(rank)
                    self._results[rank].put(output)
                    del call, block, args, kwargs, output
        except BaseException as error:
            self.exchange.abort(error)
            self._results[rank].put(None)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(value, note)
    return found


def _with_version(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or where it has no version another one over the same memory that has."""
    if not tensor.is_inference():
        return tensor
    with versioned():
        if type(tensor) is not torch.Tensor:
            return tensor.clone()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload,no-any-return]
