"""When a rank counts as hung: by what it does, by how long that took before, and by signs of life."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from devicebridge.parallel.ranks import signs as signs_module
from devicebridge.parallel.ranks import watch as module
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.parallel.ranks.signs import LONGEST_S, Signs
from devicebridge.parallel.ranks.watch import Watch
from devicebridge.system.launched import note_parent, parent_at_start
from devicebridge.system.processes import cpu_seconds

LIMIT_S = 20.0


class _Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Iterator[_Clock]:
    clock = _Clock()
    with mock.patch.object(module.time, "monotonic", clock):
        yield clock


@pytest.fixture
def watch(clock: _Clock) -> Watch:
    """Whose threads have ended: a test looks itself."""
    watch = Watch(LIMIT_S)
    watch.close()
    return watch


def _take(watch: Watch, clock: _Clock, seconds: float, kind: str = "this step", sizes: Any = (64,)) -> None:
    with watch.doing(kind, sizes):
        clock.now += seconds


def _verdict(watch: Watch, clock: _Clock, after_s: float) -> str:
    """What is said of the work in hand after so many seconds more, looked at once a second; "" for nothing."""
    work, end = watch._work, clock.now + after_s
    assert work is not None
    for second in range(int(after_s) + 1):
        if found := watch._overdue(work, clock.now + second):
            return found
    return watch._overdue(work, end)


def test_work_that_was_done_twice_may_take_the_limit_beyond_three_of_the_longest(watch: Watch, clock: _Clock) -> None:
    _take(watch, clock, 100.0)  # the first time chooses kernels, and counts for nothing
    _take(watch, clock, 4.0)
    with watch.doing("this step", (64,)):
        assert not _verdict(watch, clock, LIMIT_S + 12 - 1)
        assert _verdict(watch, clock, LIMIT_S + 12 + 1) == "this step has not ended in the 32 s that it may take"


@pytest.mark.parametrize("sizes", [(96,), (64, 96)])
def test_a_size_that_comes_for_the_first_or_second_time_is_no_hang(sizes: Any, watch: Watch, clock: _Clock) -> None:
    """It compiles, or is larger."""
    for _ in range(3):
        _take(watch, clock, 4.0)
    for _ in range(2):
        moving = iter(range(10**6))
        with watch.doing("this step", sizes), mock.patch.object(watch, "_movement", lambda: next(moving)):  # noqa: B023
            assert not _verdict(watch, clock, 2 * LONGEST_S)
            clock.now += 60.0
    with watch.doing("this step", sizes):
        assert not _verdict(watch, clock, LIMIT_S + 3 * 60 - 1)
        assert _verdict(watch, clock, LIMIT_S + 3 * 60 + 1)


def test_work_of_unknown_length_hangs_when_nothing_moves(watch: Watch, clock: _Clock) -> None:
    with mock.patch.object(watch, "_movement", lambda: "here"):
        assert not _verdict(watch, clock, LONGEST_S - 1)
        assert _verdict(watch, clock, LONGEST_S + 5).startswith("its work has not moved for 18")


def test_what_moves_is_the_place_in_the_code_and_what_is_read_from_a_disk(watch: Watch) -> None:
    found = []
    for read in (1, 1, 2):
        with mock.patch.object(module, "_bytes_read", lambda: read):  # noqa: B023
            found.append(watch._movement())
    assert found[0] == found[1] != found[2]
    with mock.patch.object(module, "_bytes_read", lambda: 1):
        assert watch._movement() != found[1]  # another line


def test_each_kind_has_a_limit_of_its_own(watch: Watch, clock: _Clock) -> None:
    for _ in range(2):
        _take(watch, clock, 4.0)
        _take(watch, clock, 60.0, "a save", (None,))
    with watch.doing("a save"):
        assert not _verdict(watch, clock, LIMIT_S + 179)
        assert "a save has not ended" in _verdict(watch, clock, LIMIT_S + 181)


def test_who_waits_for_others_has_no_limit_and_all_of_its_time_afterwards(watch: Watch, clock: _Clock) -> None:
    for _ in range(3):
        _take(watch, clock, 4.0)
    with watch.doing("this step", (64,)):
        with watch.waiting():
            clock.now += 10**6
            assert watch._work is None
        assert not _verdict(watch, clock, LIMIT_S + 11)
        clock.now += 20
        watch.alive()
        assert not _verdict(watch, clock, LIMIT_S + 11)


@pytest.mark.parametrize("who", ["this rank", "another one"])
def test_no_rank_hangs_while_one_compiles(who: str, watch: Watch, clock: _Clock) -> None:
    """A text of another length makes a new graph, and nobody knows that before."""
    for _ in range(3):
        _take(watch, clock, 4.0)
    signs = mock.Mock(is_another_compiling=who == "another one")
    compiling = mock.patch.object(watch, "_is_compiling", lambda: who == "this rank")
    with watch.doing("this step", (64,)), compiling, mock.patch.object(watch, "_signs", signs):
        assert not _verdict(watch, clock, LIMIT_S + 100)


def test_torchs_compiler_is_seen_on_the_stack() -> None:
    import torch

    found = []

    def make(graph: Any, inputs: Any) -> Any:
        found.append(watch._is_compiling())
        return graph.forward

    watch = Watch(LIMIT_S)
    watch.close()
    compiled = torch.compile(lambda x: x + 1, backend=make)
    compiled(torch.zeros(2))
    assert found == [True] and not watch._is_compiling()


# ---- signs of life


def _signs(count: int = 2) -> list[Signs]:
    store = dist.HashStore()
    found = [Signs(store, RankPlace(rank, count, rank, count)) for rank in range(count)]
    for each in found:
        each.give(10.0)
    return found


@mock.patch.object(signs_module, "cpu_seconds", lambda pid: 0.0)
def test_a_rank_is_silent_when_its_own_patience_has_run_out() -> None:
    first, second, third = _signs(3)
    assert first.look(2.0) == []
    for _ in range(5):
        second.give(10.0)
        third.give(10.0 if first.look(2.0) else 100.0)  # in a phase of long calls
    assert first.look(2.0) == []
    second.give(10.0, is_compiling=True)
    assert first.look(2.0) == [] and first.is_another_compiling
    second.give(10.0)
    assert first.look(2.0) == [] and not first.is_another_compiling
    assert [first.look(6.0), first.look(6.0)] == [[], [1]]
    assert first.look(90.0) == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_a_silent_process_of_this_machine_is_lost_when_it_computes_no_more() -> None:
    """A compiler may keep Python's lock for minutes, and nobody can give a sign meanwhile."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        first, second = _signs()
        with mock.patch("os.getpid", lambda: child.pid):
            second.give(10.0)
        assert first.look(2.0) == []
        for _ in range(3):
            began = cpu_seconds(child.pid)
            while cpu_seconds(child.pid) < began + 0.4:
                time.sleep(0.02)
            assert first.look(6.0) == []
        child.send_signal(signal.SIGSTOP)
        first.look(6.0)  # it may have worked until it was stopped
        assert first.look(11.0) == [1]
    finally:
        child.kill()
        child.wait()
    assert cpu_seconds(child.pid) == 0.0


def test_a_silent_process_that_computes_for_ever_is_lost_after_half_an_hour() -> None:
    """Threads of a library may do so while the one that trains hangs."""
    first, second = _signs()
    second.give(10.0)
    seconds = itertools.count(step=100.0)
    with mock.patch.object(signs_module, "cpu_seconds", lambda pid: next(seconds)):
        assert first.look(2.0) == []
        assert [first.look(LONGEST_S / 2), first.look(LONGEST_S / 2), first.look(2.0)] == [[], [], [1]]


@pytest.mark.parametrize("is_compiling", [False, True])
@pytest.mark.parametrize("num_local", [1, 2])
def test_a_silent_rank_of_another_machine_has_half_an_hour_if_it_compiles(num_local: int, is_compiling: bool) -> None:
    """Of one on this machine it is known whether it computes."""
    store = dist.HashStore()
    first, second = (Signs(store, RankPlace(rank, 2, rank % num_local, num_local)) for rank in range(2))
    second.give(10.0, is_compiling=is_compiling)
    with mock.patch.object(signs_module, "cpu_seconds", lambda pid: 0.0):
        assert first.look(2.0) == []
        assert first.look(11.0) == ([] if is_compiling and num_local == 1 else [1])
        assert first.look(LONGEST_S) == [1]


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_a_stopped_process_of_this_machine_tells_where_it_is_and_is_killed() -> None:
    code = "import faulthandler, signal; faulthandler.register(signal.SIGUSR2)\n"
    code += "def wait_for_ever():\n    print('here', flush=True)\n    while True: signal.pause()\nwait_for_ever()"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "here\n"
    first, second, third = _signs(3)
    with mock.patch("os.getpid", lambda: child.pid):
        second.give(10.0)
    first.look(2.0), third.look(2.0)
    assert first.gone() == []
    child.send_signal(signal.SIGSTOP)
    third.end_here([1])  # the first rank does it
    assert child.poll() is None
    first.end_here([1])
    _, errors = child.communicate(timeout=20)
    assert child.returncode == -signal.SIGKILL and "in wait_for_ever" in errors
    assert first.gone() == [1]


def test_who_started_a_process_is_known_after_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEVICEBRIDGE_PARENT", raising=False)
    for now in (77, 1):  # then by the program that goes on in its place
        with mock.patch("os.getppid", lambda: now):  # noqa: B023
            note_parent()
            assert parent_at_start() == 77
    monkeypatch.setenv("DEVICEBRIDGE_PARENT", f"{os.getpid() + 1} 77")  # of the process that started this one
    assert parent_at_start() == os.getppid()
