"""Cases that ComfyUI's Python runs: functions of a script that fail or pass. case_tests of workers.py makes them tests.

A script takes ComfyUI's folder, one for files, and names of its cases.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(*sys.argv[2:3])  # of a script of cases
IS_LONG = bool(os.environ.get("LONG_TESTS"))
Run = Callable[[], object]
_NAMES, _CASES = sys.argv[3:], dict[str, Run]()


def case(run: Run) -> Run:
    _CASES[run.__name__] = run
    return run


long_case = case


def case_of(*names: str) -> Callable[[Callable[[str], object]], Callable[[str], object]]:
    """A case for each of these names, which the function is given."""

    def register(run: Callable[[str], object]) -> Callable[[str], object]:
        _CASES.update({name: functools.partial(run, name) for name in names})
        return run

    return register


def refusal(act: Callable[[], Any]) -> str:
    """What a ValueError says; "" where there is none."""
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def expect_refusal(act: Callable[[], Any], *words: str) -> None:
    said = refusal(act)
    assert said and not [word for word in words if word not in said], f"{said!r} says not {words}"


def run_cases() -> None:
    """Once; what a script does not run itself fork_host.py runs behind it."""
    torch.set_printoptions(threshold=0, edgeitems=1)
    for name in [name for name in _NAMES if name in _CASES]:
        fault = ""
        try:
            _CASES[name]()
        except Exception as error:
            found = traceback.TracebackException.from_exception(error, capture_locals=True)
            fault = "".join(line[:500] for line in "".join(found.format()).splitlines(keepends=True))
        print(json.dumps({"name": name, "fault": fault}), flush=True)
    _NAMES.clear()
