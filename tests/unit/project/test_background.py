"""Tests that run in the background, where a shell has them ignore signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CONFTEST = Path(__file__).parents[2] / "conftest.py"
_IGNORED = """
import runpy, signal, subprocess, sys
names = "SIGINT", "SIGTERM", "SIGHUP"
for name in names:
    signal.signal(getattr(signal, name), signal.SIG_IGN)
runpy.run_path(sys.argv[1])
child = "import signal as s, sys; print(*(s.getsignal(getattr(s, each)) is s.SIG_IGN for each in sys.argv[1:]))"
subprocess.run([sys.executable, "-c", child, *names], check=True)
signal.raise_signal(signal.SIGHUP)
signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
def test_what_the_tests_start_obeys_signals_that_they_were_started_without() -> None:
    """The tests themselves outlive the terminal."""
    done = subprocess.run([sys.executable, "-c", _IGNORED, _CONFTEST], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False False\n"
    assert "KeyboardInterrupt" in done.stderr
