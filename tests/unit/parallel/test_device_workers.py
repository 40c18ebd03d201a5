"""Workers of the devices of one forward: one thread in turns does what threads do, and says where it cannot."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.parallel.local import device_workers
from devicebridge.parallel.local.device_workers import DeviceWorkers, make_workers, suspended_frames
from devicebridge.parallel.local.exchange import Exchange
from devicebridge.parallel.local.thread_pool import ThreadPool

pytestmark = pytest.mark.usefixtures("no_thread_left")
CPU = torch.device("cpu")
with_greenlets = pytest.mark.skipif(device_workers.greenlet is None, reason="greenlet is not installed")
WAYS = [pytest.param(True, marks=with_greenlets, id="in turns"), pytest.param(False, id="threads")]


def _make(size: int, *, in_turns: bool = True) -> DeviceWorkers:
    return make_workers(ThreadPool(), [CPU] * size, in_turns=in_turns)


def _exchange(workers: DeviceWorkers, size: int) -> Exchange:
    return Exchange(size, lambda tensors, rank, arrivals: tensors, workers.queue)


def _together(workers: DeviceWorkers, size: int, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) for every device: its result, or its error."""
    results = [workers.queue() for _ in range(size)]

    def run(rank: int) -> None:
        with workers.here(rank):
            try:
                results[rank].put(work(rank))
            except BaseException as error:
                results[rank].put(error)

    for rank in range(1, size):
        workers.start(rank, lambda rank=rank: run(rank))  # type: ignore[misc]
    try:
        try:
            results[0].put(work(0))
        except Exception as error:
            results[0].put(error)
        return [result.get() for result in results]
    finally:
        workers.join()


@pytest.mark.parametrize("in_turns", WAYS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_everyone_gets_the_parts_of_all_and_knows_who_it_is(size, in_turns) -> None:
    workers = _make(size, in_turns=in_turns)
    exchange, threads = _exchange(workers, size), set()

    def work(rank: int) -> list[list[float]]:
        threads.add(threading.get_ident())
        found = []
        for number in range(20):
            found.append(
                [float(each) for each in exchange.all(rank, f"at {number}", torch.tensor(10.0 * number + rank))]
            )
            assert workers.rank() == rank
        return found

    expected = [[10.0 * number + rank for rank in range(size)] for number in range(20)]
    assert _together(workers, size, work) == [expected] * size
    assert workers.rank() == 0 and len(threads) == (1 if in_turns else size)


@pytest.mark.parametrize("in_turns", WAYS)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_error_of_one_ends_all(failing, in_turns) -> None:
    workers = _make(3, in_turns=in_turns)
    exchange = _exchange(workers, 3)

    def work(rank: int) -> None:
        exchange.all(rank, "a", torch.zeros(1))
        if rank == failing:
            exchange.abort(MemoryError("card full"))
        exchange.all(rank, "b", torch.zeros(1))

    assert {str(error) for error in _together(workers, 3, work)} == {"card full"}


@with_greenlets
def test_every_device_is_the_current_one_at_each_of_its_turns(monkeypatch) -> None:
    card = SimpleNamespace(now=0)
    card.current_device, card.set_device = lambda: card.now, lambda index: setattr(card, "now", index)

    @contextlib.contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        before, card.now = card.now, device.index
        yield
        card.now = before

    monkeypatch.setattr(device_workers, "device_module", lambda device: card)
    monkeypatch.setattr(device_workers, "current_device", current_device)
    workers = make_workers(ThreadPool(), [torch.device("cuda", rank) for rank in range(3)], in_turns=True)
    exchange, seen = _exchange(workers, 3), []

    def work(rank: int) -> None:
        for number in range(4):
            seen.append((rank, card.now))
            if (rank, number) == (0, 2):
                card.now = 7  # what home's own code chose
            exchange.all(rank, "a", torch.zeros(1))
        assert card.now == (7 if rank == 0 else rank)

    assert _together(workers, 3, work) == [None] * 3
    assert {(rank, now) for rank, now in seen if now != 7} == {(0, 0), (1, 1), (2, 2)} and card.now == 7


def _modes() -> dict[str, Callable[[], Any]]:
    return {
        "grad": torch.no_grad if torch.is_grad_enabled() else torch.enable_grad,
        "inference": torch.inference_mode,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "function": lambda: torch.device("meta"),
    }


@with_greenlets
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", list(_modes()))
def test_a_mode_that_would_reach_another_device_is_refused(name, rank) -> None:
    before, workers = torch.is_grad_enabled(), _make(2)
    exchange = _exchange(workers, 2)

    def work(here: int) -> None:
        try:
            with _modes()[name]() if here == rank else contextlib.nullcontext():
                exchange.all(here, "a", torch.zeros(1, device="cpu"))
                exchange.all(here, "b", torch.zeros(1, device="cpu"))
        except RuntimeError as error:
            exchange.abort(error)
            raise

    found = _together(workers, 2, work)
    assert all("changes torch's grad mode, autocast or another mode" in str(error) for error in found), found
    assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (before, False)


@with_greenlets
def test_the_modes_in_which_a_block_begins_are_everyones() -> None:
    workers = _make(2)
    exchange, seen, begun, ended = _exchange(workers, 2), [], workers.queue(), workers.queue()

    def work(rank: int) -> None:
        for is_grad in (True, False):
            with torch.set_grad_enabled(is_grad) if rank == 0 else contextlib.nullcontext():
                if rank == 0:
                    workers.begin_block()
                exchange.all(rank, "a", torch.zeros(1))
                seen.append((rank, torch.is_grad_enabled()))
                exchange.all(rank, "b", torch.zeros(1))
                if rank == 0:
                    ended.get()
                else:
                    ended.put(None)
                    begun.get()
            if rank == 0:
                workers.begin_block()
                begun.put(None)

    assert _together(workers, 2, work) == [None, None]
    assert set(seen) == {(0, True), (1, True), (0, False), (1, False)}


@with_greenlets
def test_devices_that_wait_for_each_other_are_an_error() -> None:
    workers = _make(3)
    queue = workers.queue()
    for rank in (1, 2):
        workers.start(rank, queue.get)
    with pytest.raises(RuntimeError, match="the devices wait for each other"):
        queue.get()
    workers.join()


@with_greenlets
def test_work_that_catches_everything_is_ended_all_the_same() -> None:
    workers, queue, caught = _make(2), None, []
    queue = workers.queue()

    def stubborn() -> None:
        while len(caught) < 2:
            try:
                queue.get()
            except BaseException as error:
                caught.append(type(error).__name__)

    workers.start(1, stubborn)
    with pytest.raises(RuntimeError, match="wait for each other"):
        queue.get()
    workers.join()
    assert caught == ["GreenletExit", "GreenletExit"]


@with_greenlets
def test_work_is_done_in_the_context_of_who_asks() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the prompt's")
    workers, seen = _make(2), []
    queue = workers.queue()

    def work() -> None:
        seen.append(variable.get())
        variable.set("its own")
        queue.put(None)

    workers.start(1, work)
    queue.get()
    workers.join()
    assert seen == ["the prompt's"] and variable.get() == "the prompt's"


@with_greenlets
def test_nothing_is_held_when_all_have_ended() -> None:
    class Thing:
        pass

    thing = Thing()
    gone = weakref.ref(thing)
    workers = _make(2)
    gc.disable()
    try:
        assert _together(workers, 2, lambda rank, thing=thing: None) == [None, None]
        del thing
        assert gone() is None and not suspended_frames(threading.get_ident())
    finally:
        gc.enable()


def test_without_greenlets_there_is_a_thread_per_device(monkeypatch) -> None:
    monkeypatch.setattr(device_workers, "greenlet", None)
    workers, seen = _make(3), []
    _together(workers, 3, lambda rank: seen.append(threading.get_ident()))
    assert len(seen) == 3 and seen.count(threading.get_ident()) == 1
