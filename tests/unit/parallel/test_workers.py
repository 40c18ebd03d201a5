"""Workers of one run: who is woken, whose error counts, and that each leaves, even one that never began."""

import contextlib
import threading
import time
from functools import partial

import pytest
import torch
from devicebridge.parallel.local import workers as workers_module
from devicebridge.parallel.local.workers import Coordinator, Stopped, ThreadPool

pytestmark = pytest.mark.usefixtures("no_thread_left")
CPU = torch.device("cpu")


def _coordinator():
    return Coordinator(ThreadPool(), [CPU])


def test_each_worker_waits_for_a_condition_of_its_own():
    run, done = _coordinator(), []

    def work(index):
        with run.when(lambda: len(done) == index):
            done.append(index)

    run.run([partial(work, index) for index in reversed(range(5))])
    assert done == list(range(5))


def test_the_first_error_is_raised_and_the_others_are_stopped_where_they_wait():
    run, stopped = _coordinator(), []

    def wait():
        try:
            with run.when(lambda: False):
                pass
        except Stopped:
            stopped.append(1)
            raise ValueError("a consequence") from None

    def fail():
        time.sleep(0.01)
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        run.run([wait, fail, wait])
    assert stopped == [1, 1]


def test_every_worker_leaves_its_policy_also_one_that_comes_when_the_run_has_failed(monkeypatch):
    left, begun, lock = [], [], threading.Lock()
    plain = workers_module.ThreadState.taken_over

    @contextlib.contextmanager
    def late(state):
        if threading.current_thread().name.endswith("-2"):
            time.sleep(0.05)
        with plain(state):
            yield

    def work(index):
        with lock:
            begun.append(index)
        if index == 0:
            raise ZeroDivisionError

    monkeypatch.setattr(workers_module.ThreadState, "taken_over", late)
    with pytest.raises(ZeroDivisionError):
        _coordinator().run([partial(work, index) for index in range(3)], left.append)
    assert sorted(left) == [0, 1, 2] and 2 not in begun


def test_without_a_thread_for_each_none_begins(only_two_threads):
    begun = []
    with pytest.raises(RuntimeError, match="can't start"):
        _coordinator().run([lambda: begun.append(1)] * 4)
    assert begun == []
