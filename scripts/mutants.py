"""Breaks the source in the ways of tests/mutants.toml, one after the other, and expects the named test to turn red.

A mutant is a file, a text that stands there once, what takes its place, and the tests that must fail. It is made in a
copy of the files that git knows, so nothing is changed here. All tests must pass before, or their failing says nothing.
Each run is a fork of this process, which has imported the libraries. Exit code 1 if a mutant survives or its text is
gone: then the entry follows the code. Needs os.fork.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 600
MUTANTS = ROOT / "tests" / "mutants.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="that names of mutants have; left out, all are made")
    parser.add_argument("--quick", action="store_true", help="trust that the tests pass without a mutant")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    mutants = tomllib.loads(MUTANTS.read_text(encoding="utf-8"))["mutant"]
    mutants = [each for each in mutants if all(word in each["name"] for word in options.words)]
    import torch  # noqa: F401 - so that forks have all three

    with tempfile.TemporaryDirectory(prefix="devicebridge-mutants-") as name:
        copy = Path(name) / "pack"
        for path in subprocess.check_output(["git", "-C", str(ROOT), "ls-files"], text=True).splitlines():
            if (ROOT / path).is_file():
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, copy / path)
        if not options.quick and _run(copy, sorted({test for each in mutants for test in each["tests"]}), quiet=False):
            print("these tests fail without a mutant")
            return 1
        survived = [each["name"] for each in mutants if not _is_killed(copy, each)]
    print(f"{len(mutants) - len(survived)} of {len(mutants)} killed" + "".join(f"\nnot killed: {n}" for n in survived))
    return 1 if survived else 0


def _is_killed(copy: Path, mutant: dict[str, list[str] | str]) -> bool:
    file, begin = copy / str(mutant["file"]), time.monotonic()
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    if text.count(str(mutant["old"])) != 1:
        print(f"{mutant['name']}: its text stands {text.count(str(mutant['old']))} times in {mutant['file']}")
        return False
    file.write_text(text.replace(str(mutant["old"]), str(mutant["new"])), encoding="utf-8")
    try:
        code = _run(copy, list(mutant["tests"]))
    finally:
        file.write_text(text, encoding="utf-8")
    verdict = {0: "SURVIVED", 1: "killed", -signal.SIGALRM: "killed: it hangs"}.get(code, f"pytest ended with {code}")
    print(f"{mutant['name']}: {verdict}, {time.monotonic() - begin:.0f} s", flush=True)
    return verdict.startswith("killed")


def _run(copy: Path, tests: list[str], *, quiet: bool = True) -> int:
    """pytest's exit code."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 3
    try:
        import pytest

        sys.dont_write_bytecode = True  # a mutant of the same second and size would be taken for the file before
        signal.alarm(_LIMIT_S)  # a mutant may wait for ever
        os.chdir(copy)
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
