"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable
from typing import Any


def until(found: Callable[[], Any], timeout_s: float = 120.0, said: Callable[[], object] = str) -> Any:
    """What is found as soon as there is something. Raises: AssertionError, with what is said, if there never is."""
    end = time.monotonic() + timeout_s
    while not (it := found()):
        assert time.monotonic() < end, said()
        time.sleep(0.05)
    return it
