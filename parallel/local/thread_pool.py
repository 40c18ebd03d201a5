"""Threads that are kept from one run to the next.

Libraries plan kernels for every thread anew: cuDNN takes 35 ms on an H200 to plan attention in a thread that has not
called it before (docs/internals/experiments.md), longer than a microbatch may take. So a thread that has done its task
waits for the next one, holding nothing, and ends when its pool is no longer needed. They are daemons, unlike those of
concurrent.futures: the process may exit while one sleeps or works.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

Tasks = SimpleQueue["Task | None"]  # None ends a thread
_IDLE = "devicebridge-idle"


class ThreadPool:
    """As many threads as there are tasks at once; they end when this is collected."""

    def __init__(self) -> None:
        self._idle = _Idle()
        weakref.finalize(self, self._idle.dismiss).atexit = False

    def task(self, name: str, work: Callable[..., None], *args: Any) -> Task:
        """work(*args) for one of the threads, in the context of the thread that asks; not begun."""
        return Task(name, partial(contextvars.copy_context().run, work, *args), self._idle)


class Task:
    """Work for a thread, to be started once; as a threading.Thread is."""

    def __init__(self, name: str, call: Callable[[], None], idle: _Idle) -> None:
        self.is_started = False
        self._name, self._call, self._idle = name, call, idle
        self._owner: dict[str, str] = {}  # who came first: a thread to do it, or who withdraws it
        self._done = threading.Event()

    def start(self) -> None:
        """Raises: RuntimeError if no thread can be had. Whether a thread has it after any error, withdraw tells."""
        self._idle.give(self)
        self.is_started = True

    def withdraw(self) -> bool:
        """Whether no thread does it or will; one that does must be waited for."""
        return self._owner.setdefault("it", "withdrawn") == "withdrawn"

    def join(self) -> None:
        """Wait until the thread has let go of it."""
        # With a limit: an interrupt just before a wait, or on Windows during one, is noticed when the wait ends.
        while not self._done.wait(timeout=0.2):
            pass

    def run(self) -> None:
        """In this thread."""
        threading.current_thread().name = self._name
        try:
            if self._owner.setdefault("it", "begun") == "begun":
                self._call()
        finally:
            del self._call

    def finish(self) -> None:
        """The thread holds nothing of it any more."""
        self._done.set()


class _Idle:
    """The threads of a pool that have nothing to do, the last one to have become idle at the end.

    Without locks: the collector may dismiss them in the middle of anything that Python does.
    """

    def __init__(self) -> None:
        self._queues: deque[Tasks] = deque()
        self._is_dismissed = False

    def give(self, task: Task) -> None:
        try:
            tasks = self._queues.pop()
        except IndexError:
            tasks = SimpleQueue()
            tasks.put(task)  # first: an interrupt may come in between
            threading.Thread(target=_serve, args=(tasks, self), name=_IDLE, daemon=True).start()
            return
        tasks.put(task)

    def take_back(self, tasks: Tasks) -> None:
        """The thread with this queue waits for more."""
        self._queues.append(tasks)
        if self._is_dismissed:
            self.dismiss()

    def dismiss(self) -> None:
        self._is_dismissed = True
        with contextlib.suppress(IndexError):
            while True:
                self._queues.pop().put(None)


def _serve(tasks: Tasks, idle: _Idle) -> None:
    while (task := tasks.get()) is not None:
        try:
            task.run()
        except BaseException:  # as threading.Thread does
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        threading.current_thread().name = _IDLE
        idle.take_back(tasks)
        task.finish()
        del task
