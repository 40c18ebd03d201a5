"""Workers of one run: who is woken, whose error counts, and that each leaves, even one that never began."""

import contextlib
import gc
import threading
import time
import weakref
from functools import partial

import pytest
import torch
from devicebridge.parallel.local import workers as workers_module
from devicebridge.parallel.local.interleave import Wholes
from devicebridge.parallel.local.tokens import HERE
from devicebridge.parallel.local.workers import Coordinator, Stopped, Task, ThreadPool

pytestmark = pytest.mark.usefixtures("no_thread_left")
CPU = torch.device("cpu")


def _coordinator():
    return Coordinator(ThreadPool(), [CPU])


def test_the_first_error_is_raised_and_the_others_are_stopped_where_they_wait():
    run, stopped, all_began = _coordinator(), [], threading.Barrier(3)

    def wait():
        all_began.wait()
        try:
            with run.when(lambda: False):
                pass
        except Stopped:
            stopped.append(1)
            raise ValueError("a consequence") from None

    def fail():
        all_began.wait()
        raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        run.run([wait, fail, wait])
    assert stopped == [1, 1]


def test_every_worker_leaves_its_policy_also_one_that_comes_when_the_run_has_failed(monkeypatch):
    run, left, begun = _coordinator(), [], []
    plain = workers_module.ThreadState.taken_over

    @contextlib.contextmanager
    def late(state):
        while threading.current_thread().name.endswith("-2") and not run.is_stopping:
            time.sleep(0.001)
        with plain(state):
            yield

    def work(index):
        begun.append(index)
        if index == 0:
            raise ZeroDivisionError

    monkeypatch.setattr(workers_module.ThreadState, "taken_over", late)
    with pytest.raises(ZeroDivisionError):
        run.run([partial(work, index) for index in range(3)], left.append)
    assert sorted(left) == [0, 1, 2] and 2 not in begun


def test_without_a_thread_for_each_none_begins(only_two_threads):
    begun = []
    with pytest.raises(RuntimeError, match="can't start"):
        _coordinator().run([lambda: begun.append(1)] * 4)
    assert begun == []


def _run(pool, work, *args):
    task = pool.task("some-work", work, *args)
    task.start()
    task.join()


def test_one_thread_does_one_thing_after_another():
    pool, seen = ThreadPool(), []
    for _ in range(3):
        _run(pool, lambda: seen.append((threading.get_ident(), threading.current_thread().name)))
    assert len(set(seen)) == 1 and seen[0][1] == "some-work" and seen[0][0] != threading.get_ident()


def test_nothing_is_held_when_join_returns():
    class Thing:
        pass

    pool, thing = ThreadPool(), Thing()
    watch = weakref.ref(thing)
    task = pool.task("some-work", lambda each: None, thing)
    task.start()
    task.join()
    del thing
    assert watch() is None


def test_threads_end_with_their_crew_even_one_that_is_at_work():
    pool, go, done = ThreadPool(), threading.Event(), []
    task = pool.task("some-work", lambda: (go.wait(10), done.append(threading.current_thread())))
    task.start()
    _run(pool, lambda: done.append(threading.current_thread()))
    del pool
    gc.collect()
    go.set()
    task.join()
    for thread in done:
        thread.join(timeout=10)
    assert len(set(done)) == 2 and not any(thread.is_alive() for thread in done)


def test_a_thread_that_comes_back_while_its_pool_goes_ends_too(monkeypatch):
    pool, has_run, goes, threads, run = ThreadPool(), threading.Event(), threading.Event(), [], Task.run

    class Kept:
        """Of another thread, which is told while the first one comes back."""

        def put(self, nothing):
            goes.set()
            task.done.wait(0.2)

    monkeypatch.setattr(Task, "run", lambda task: (run(task), has_run.set(), goes.wait(0.2)))
    task = pool.task("some-work", lambda: threads.append(threading.current_thread()))
    task.start()
    pool.idle.append(Kept())
    has_run.wait(10)
    del pool
    task.join()
    threads[0].join(timeout=2)
    assert not threads[0].is_alive()


def test_after_an_interrupt_a_task_that_has_begun_is_waited_for(monkeypatch):
    """It may come right after it was handed over."""
    pool, seen, has_begun, go = ThreadPool(), [], threading.Event(), threading.Event()
    give = ThreadPool.give

    def interrupted(self, task):
        give(self, task)
        has_begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPool, "give", interrupted)
    task = pool.task("some-work", lambda: (has_begun.set(), go.wait(10), seen.append(1)))
    with pytest.raises(KeyboardInterrupt):
        task.start()
    assert not task.is_started and not task.withdraw() and not task.withdraw()
    go.set()
    task.join()
    assert seen == [1]


def test_a_task_that_was_withdrawn_never_runs():
    pool, seen = ThreadPool(), []
    task = pool.task("some-work", lambda: seen.append(1))
    assert task.withdraw() and task.withdraw()
    task.start()
    task.join()
    assert seen == []


def test_no_forward_begins_before_all_ranks_have_its_inputs_or_are_done() -> None:
    wholes, seen = Wholes([CPU] * 2), list[tuple[str, int]]()

    def job(num_forwards: int, delay: float) -> None:
        for _ in range(num_forwards):
            threading.Event().wait(delay)
            seen.append(("ready", wholes.rank or 0))
            wholes.barrier()
            seen.append(("begins", wholes.rank or 0))

    wholes.run([lambda: job(3, 0.0), lambda: job(1, 0.05)])
    assert [what for what, _ in seen[:3]] == ["ready", "ready", "begins"]
    assert seen.count(("begins", 0)) == 3


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_rank_ends_the_others_at_their_next_block(error: type[BaseException]) -> None:
    wholes, failed, passed = Wholes([CPU] * 3), threading.Event(), list[str]()

    def at_a_block() -> None:
        failed.wait(10)
        while True:  # the run is told a moment after the job has raised
            HERE.on_block()

    def at_a_meeting() -> None:
        wholes.barrier()
        passed.append("the meeting")

    def fail() -> None:
        failed.set()
        raise error

    with pytest.raises(error):
        wholes.run([at_a_block, at_a_meeting, fail])
    assert not passed
    assert wholes.run([lambda: 1, lambda: 2]) == [1, 2]
