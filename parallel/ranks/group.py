"""What the processes of a job (its ranks) say to each other: agree, wait, share, add up. torch.distributed underneath.
Every method that says "all ranks" must be called by all of them, in the same order. Gradients travel through the
backend of their device, everything else through a group of gloo, where a rank may wait for hours."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ...system.stopping import Stopped, never
from ..devices import CPU, device_module, seed_devices
from ..runner import MicroBatch, Runner
from .place import RankPlace
from .watch import Watch

T = TypeVar("T")
_PATIENCE = timedelta(days=7)  # while one rank works and the others wait; torchrun sees a dead one at once
_POLL_S = 0.1  # at most, between two looks at whether the others have come
_TELL_S = 1.0  # of waiting, after which a stop that this process is asked for is passed on
_STOP = "stop"  # in the store: a rank was asked to stop while it waited

ONLY_ONE = RankPlace(0, 1, 0, 1)


class RankLost(RuntimeError):
    """Another rank has ended or hangs."""


class RankFailed(RuntimeError):
    """Another rank has said why it cannot go on; is_refusal if that was a ValueError: what was asked for cannot be."""

    def __init__(self, text: str, *, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


class Ranks:
    """The ranks of a job, as one of them sees them. Args: devices: of this rank, the first for what it exchanges.
    control, watch: the gloo group of all ranks, and what ends this process where it hangs; None for one process. store:
    what ranks can leave for each other."""

    def __init__(
        self,
        place: RankPlace = ONLY_ONE,
        devices: Sequence[torch.device] = (),
        own_stop: Callable[[], bool] = never,
        control: Any = None,
        watch: Watch | None = None,
        store: Any = None,
    ) -> None:
        self.place, self.devices, self.own_stop = place, tuple(devices), own_stop
        self._control, self.watch, self._store = control, watch, store

    def stopped_by(self, own_stop: Callable[[], bool]) -> Ranks:
        return Ranks(self.place, self.devices, own_stop, self._control, self.watch, self._store)

    @property
    def is_launched(self) -> bool:
        """Whether torchrun has started this process, be it the only one."""
        return self._control is not None

    @property
    def count(self) -> int:
        return self.place.num_ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run folder and speaks to the user."""
        return self.place.rank == 0

    def is_stop_asked(self) -> bool:
        """Whether this rank was asked to stop, or another one that waits for it; for work that others wait for."""
        if self._store is None:
            return self.own_stop()
        self.alive()
        with _losses_named(self.watch):
            return self.own_stop() or bool(self._store.check([_STOP]))

    def alive(self) -> None:
        if self.watch is not None:
            self.watch.alive()

    @contextmanager
    def doing(self, *, is_long: bool = False) -> Iterator[None]:
        """Inside, this rank works, alone or with others; see Watch.doing. Raises: RankLost if one does not answer."""
        if self.watch is None:
            yield
            return
        with self.watch.doing(is_long=is_long), _losses_named(self.watch, is_all=False):
            yield

    def any(self, is_so: bool) -> bool:
        """Whether it is so on any rank; all ranks."""
        if self._control is None:
            return is_so
        flag = torch.tensor([int(is_so)], dtype=torch.int32)
        self._finish(lambda: dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control, async_op=True))
        return bool(flag.item())

    def _finish(self, begin: Callable[[], Any]) -> None:
        """What begin starts on all ranks, to its end. Meanwhile Python handles signals, and a stop is passed on."""
        with nullcontext() if self.watch is None else self.watch.waiting(), _losses_named(self.watch):
            work, waited_s, has_told = begin(), 0.0, False
            while not work.is_completed():
                if self.watch is not None and self.watch.lost:
                    raise RuntimeError(self.watch.lost)
                pause_s = min(waited_s / 16 + 1e-4, _POLL_S)  # it is noticed late by a sixteenth of the time at most
                time.sleep(pause_s)
                waited_s += pause_s
                if not has_told and self._store is not None and waited_s > _TELL_S and self.own_stop():
                    self._store.set(_STOP, "1")
                    has_told = True
            work.wait()

    def should_stop(self) -> bool:
        """Whether any rank was asked to stop; all ranks."""
        return self.any(self.own_stop())

    def wait(self) -> None:
        self.any(False)

    def gather(self, value: Any) -> list[Any]:
        """What each rank brought, plain values, by rank; all ranks."""
        if self._control is None:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.place.rank] = len(data)
        self._finish(lambda: dist.all_reduce(sizes, group=self._control, async_op=True))
        mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        mine[: len(data)] = data
        found = [torch.empty_like(mine) for _ in range(self.count)]
        self._finish(lambda: dist.all_gather(found, mine, group=self._control, async_op=True))
        return [json.loads(bytes(each[:size].numpy())) for each, size in zip(found, sizes.tolist(), strict=True)]

    def from_first(self, find: Callable[[], T]) -> T:
        """What the first rank finds, a plain value; all ranks, and only the first calls find."""
        if self._control is None:
            return find()
        return json.loads(self.share(json.dumps(find()).encode() if self.is_first else b""))  # type: ignore[no-any-return]

    def share(self, data: bytes) -> bytes:
        if self._control is None:
            return data
        size = torch.tensor([len(data)], dtype=torch.int64)
        self._finish(lambda: dist.broadcast(size, 0, group=self._control, async_op=True))
        # What is sent may be the state of a run, gigabytes: no further copy of it.
        own = bytearray(data) if self.is_first else bytearray(int(size))
        content = torch.frombuffer(own, dtype=torch.uint8) if own else torch.zeros(0, dtype=torch.uint8)
        self._finish(lambda: dist.broadcast(content, 0, group=self._control, async_op=True))
        return data if self.is_first else bytes(content.numpy())

    def on_all(self, work: Callable[[], T]) -> T:
        """What work returns, if it does on every rank; all ranks. Raises: what it raised; RankFailed with another's."""
        if self._control is None:
            return work()
        try:
            result = work()
        except Exception as error:
            is_another = isinstance(error, RankFailed)  # that one tells it, too
            is_refusal = isinstance(error, ValueError) or getattr(error, "is_refusal", False)
            self.gather([is_another, str(error) or type(error).__name__, is_refusal])
            raise
        answers = self.gather([False, "", False])
        failed = min(((later, rank, *said) for rank, (later, *said) in enumerate(answers) if said[0]), default=None)
        if failed is not None:
            raise RankFailed(f"rank {failed[1]}: {failed[2]}", is_refusal=failed[3])
        return result

    def distributed(
        self, count: int, compute: Callable[[int], list[float]], *, in_lockstep: bool, is_long: bool = False
    ) -> list[list[float]]:
        """compute(index) for so many indices, each by one rank; all ranks. Args: in_lockstep: whether each rank has to
        call compute equally often; what is left over is computed twice. is_long: see Watch.doing."""
        if self._control is None:
            return [compute(index) for index in range(count)]
        found: dict[int, list[float]] = {}
        for first in range(0, count, self.count):
            turn, own = range(first, min(first + self.count, count)), first + self.place.rank
            if own in turn or in_lockstep:
                with self.doing(is_long=is_long):
                    computed = compute(min(own, count - 1))
                found |= {own: computed} if own in turn else {}
        found_by_all = {int(index): value for each in self.gather(found) for index, value in each.items()}
        return [found_by_all[index] for index in range(count)]

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's, the same bits on each; all ranks."""
        if self._control is None:
            return tensor
        is_direct = tensor.device.type in dist.Backend.default_device_backend_map and tensor.device != CPU
        summed = tensor if is_direct else tensor.to(CPU)
        with _losses_named(self.watch):
            dist.all_reduce(summed, group=None if is_direct else self._control)
        return summed.to(tensor.device)


ALONE = Ranks()


@contextmanager
def _losses_named(watch: Watch | None, *, is_all: bool = True) -> Iterator[None]:
    """Raises: RankLost where torch says that a rank does not answer; is_all: nothing else raises RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        of_torch = (dist.DistBackendError, dist.DistNetworkError)  # of NCCL and the store; gloo's has no class
        is_loss = is_all or isinstance(error, of_torch) or "gloo/transport" in str(error)
        if isinstance(error, (RankLost, RankFailed)) or not is_loss:
            raise
        lost = f"another rank has ended or hangs ({str(error).splitlines()[0][:200]})"
        if watch is not None:
            watch.leave()
            lost = watch.lost or lost
        raise RankLost(lost) from error


@contextmanager
def joined(
    place: RankPlace, devices: Sequence[torch.device], timeout_s: float, own_stop: Callable[[], bool]
) -> Iterator[Ranks]:
    """The ranks of a job while they are connected; all ranks. On an error they are not disconnected: others may hang,
    and this process shall end. Raises: Stopped if a rank was asked to stop before all had come."""
    module: Any = device_module(devices[0])
    if module is not None and hasattr(module, "set_device"):
        module.set_device(devices[0])
    watch = Watch(timeout_s, is_first=place.rank == 0)
    try:
        with _losses_named(watch):
            store, rank, count = next(dist.rendezvous("env://"))
            # torchrun keeps the store while it starts all anew, with the addresses of ranks that are gone.
            store = dist.PrefixStore(f"start {place.num_restarts}", store)
            with watch.doing(is_long=True):
                _wait_for_all(dist.PrefixStore("begin", store), count, own_stop)
            backend = dist.Backend.default_device_backend_map.get(devices[0].type, "gloo")
            own = dist.PrefixStore("group", store)  # whose waits are long: the watch ends them
            with watch.doing(is_long=True):
                dist.init_process_group(backend, store=own, rank=rank, world_size=count, timeout=_PATIENCE)
                control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        ranks = Ranks(place, devices, own_stop, control, watch, dist.PrefixStore("job", store))
        watch.listen(dist.PrefixStore("signs", store), place)
        yield ranks
        ranks.wait()
        with watch.doing(is_long=True):
            dist.destroy_process_group()
    finally:
        watch.close()


def _wait_for_all(store: Any, count: int, own_stop: Callable[[], bool]) -> None:
    """Raises: Stopped, on all ranks, if one was asked to stop before all had come."""
    store.add("come", 1)
    outcome = b""
    while not outcome:
        found = _STOP if own_stop() else "all" if int(store.add("come", 0)) == count else ""
        if found:
            outcome = store.compare_set("outcome", "", found)  # or what another rank has found before
        elif store.check(["outcome"]):
            outcome = store.get("outcome")
        else:
            time.sleep(_POLL_S)
    if outcome == _STOP.encode():
        raise Stopped("stopped before all processes of the job had begun; start it again")


# ---- data parallel between processes: each rank computes its share of a step's microbatches, gradients are added up
# once. Gradients and losses of all ranks go through one flat all-reduce, so LoRAs stay equal bit for bit. What is drawn
# on a device (dropout) has its own stream for every microbatch; between runs all have one, for optimizers that draw.


class AcrossRanks(Runner):
    """Ranks may have to compute equally many microbatches (in_lockstep, FSDP). Attributes: rank_losses: of
    the last run, the mean loss of each rank's microbatches, by rank."""

    def __init__(
        self, inner: Runner, parameters: Sequence[nn.Parameter], ranks: Ranks, seed: int, *, in_lockstep: bool
    ) -> None:
        self._inner, self._parameters, self._ranks, self._seed = inner, tuple(parameters), ranks, seed
        self.in_lockstep, self.num_replicas = in_lockstep, inner.num_replicas * ranks.count
        self.rank_losses: list[float] = []
        self._has_own_streams = type(inner) is Runner  # elsewhere microbatches mix on a device

    def replica_for(self, index: int) -> tuple[nn.Module, torch.device]:
        return self._inner.replica_for(index // self._ranks.count)

    def sync(self) -> None:
        self._inner.sync()

    def run(self, microbatches: Sequence[MicroBatch[Any]]) -> list[torch.Tensor]:
        """See Runner; the losses are of all ranks, on the CPU. Raises: RankLost if another rank has ended or hangs."""
        found = self.run_share(microbatches)
        self._ranks.wait()
        all_losses = self._add_up(found, len(microbatches))
        self._draw_from(f"after {microbatches[0].name}")
        shares = [all_losses[rank :: self._ranks.count] for rank in range(self._ranks.count)]
        self.rank_losses = [float(share.mean()) * len(all_losses) for share in shares if len(share)]
        return list(all_losses.unbind())

    def run_share(self, microbatches: Sequence[MicroBatch[Any]]) -> dict[int, float]:
        """Forward and backward of this rank's microbatches alone; their losses by index."""
        rank = self._ranks.place.rank
        own = range(rank, len(microbatches), self._ranks.count)
        with self._ranks.doing(is_long=any([each.is_new() for each in microbatches])):  # on whichever rank
            self._draw_from(f"step {rank} {microbatches[0].name}")
            share = [self._seeded(microbatches[index]) for index in own]
            if self.in_lockstep and len(share) < -(-len(microbatches) // self._ranks.count):
                # once more for nothing, because other ranks wait for this one's share of the weights
                last = self._seeded(microbatches[-1])
                share.append(replace(last, forward=lambda prepared: last.forward(prepared) * 0.0))
            losses = self._inner.run(share)[: len(own)]
            return dict(zip(own, [float(loss) for loss in losses], strict=True))

    def _seeded(self, microbatch: MicroBatch[Any]) -> MicroBatch[Any]:
        def forward(prepared: Any) -> torch.Tensor:
            self._ranks.alive()
            if self._has_own_streams:
                self._draw_from(microbatch.name)
            return microbatch.forward(prepared)

        return replace(microbatch, forward=forward)

    def _draw_from(self, name: str) -> None:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        seed_devices(self._ranks.devices, int.from_bytes(digest[:8], "little") >> 1)

    @torch.no_grad()
    def _add_up(self, losses: dict[int, float], count: int) -> torch.Tensor:
        """Every rank's gradients into ours, in float32; returns the losses of all microbatches. [count]"""
        main_device = self._parameters[0].device
        sizes = [parameter.numel() for parameter in self._parameters]
        flat = torch.zeros(sum(sizes) + len(sizes) + count, device=main_device)
        *parts, present, all_losses = flat.split([*sizes, len(sizes), count])
        for parameter, part in zip(self._parameters, parts, strict=True):
            if parameter.grad is not None:
                part.copy_(parameter.grad.flatten())
        present.copy_(torch.tensor([float(each.grad is not None) for each in self._parameters]))
        all_losses.copy_(torch.tensor([losses.get(index, 0.0) for index in range(count)]))
        summed = self._ranks.add_up(flat)
        *parts, present, all_losses = summed.split([*sizes, len(sizes), count])
        for parameter, part, num in zip(self._parameters, parts, present.tolist(), strict=True):
            gradient = part.view(parameter.shape).to(parameter.device, parameter.dtype)
            parameter.grad = gradient if num else None
        return all_losses.cpu()


def fingerprint(parameters: Sequence[nn.Parameter]) -> str:
    """Of the values of parameters, to tell whether ranks have the same."""
    digest = hashlib.sha256()
    for each in parameters:
        digest.update(each.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
