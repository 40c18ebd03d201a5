"""Where "auto" of a job file or a socket ends: behind this a setting has a value, or is None and open."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound=str)


def asked(setting: T) -> T | None:
    """What the user asked for; None where it is left open."""
    return None if setting == "auto" else setting
