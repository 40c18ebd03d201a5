"""Threads that are kept: reused, in the asker's context, holding nothing, and gone with their pool."""

import contextvars
import gc
import threading
import weakref

import pytest
from devicebridge.parallel.local.workers import ThreadPool

pytestmark = pytest.mark.usefixtures("no_thread_left")


def _run(pool, work, *args):
    task = pool.task("some-work", work, *args)
    task.start()
    task.join()


def test_one_thread_does_one_thing_after_another():
    pool, seen = ThreadPool(), []
    for _ in range(3):
        _run(pool, lambda: seen.append((threading.get_ident(), threading.current_thread().name)))
    assert len(set(seen)) == 1 and seen[0][1] == "some-work" and seen[0][0] != threading.get_ident()


def test_work_runs_in_the_context_of_who_asks():
    pool, variable, seen = ThreadPool(), contextvars.ContextVar("variable"), []
    for value in (1, 2):
        variable.set(value)
        task = pool.task("some-work", lambda: seen.append(variable.get()))
        variable.set(0)
        task.start()
        task.join()
    assert seen == [1, 2]


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


def test_after_an_interrupt_a_task_that_has_begun_is_waited_for(monkeypatch):
    """It may come right after it was handed over."""
    pool, seen, has_begun, go = ThreadPool(), [], threading.Event(), threading.Event()
    give = type(pool._idle).give

    def interrupted(self, task):
        give(self, task)
        has_begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(pool._idle), "give", interrupted)
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
