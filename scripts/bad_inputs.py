"""Wrong inputs through the real command: no traceback, no hang, no damage that passes in silence.

The cases are those of tests/bad_inputs.py and its neighbours. Each runs in a fork of this process, in a copy of a tiny
job's folder, with its memory limited. A case that takes more than 10 s runs a second time with a minute of patience,
for the machine may have been busy; late again, it hangs. Prints a table of groups and every case that went wrong; ends
with exit code 1 if any did. Needs os.fork, so no Windows; no GPU.

    scripts/bad_inputs.py --only datasets
"""

from __future__ import annotations

import argparse
import collections
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from soak_lab import fork

if TYPE_CHECKING:
    from devicebridge.tests.bad_inputs import Case

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 10.0
PATIENCE_S = 60.0
MOST_BYTES = 16 << 30  # of address space


@dataclass
class Outcome:
    """What became of a case; fault is "" where it is as it should be."""

    group: str
    name: str
    fault: str
    code: int
    text: str
    took_s: float


def main() -> int:
    arguments = _read_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # threads do not survive a fork
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    with tempfile.TemporaryDirectory(prefix="devicebridge-bad-inputs-") as name:
        os.environ["DEVICEBRIDGE_CACHE"] = str(Path(name) / "user_cache")
        bench = Bench(Path(name))
        outcomes = list(_run_all(bench, arguments))
    _print_table(outcomes)
    return 1 if any(outcome.fault for outcome in outcomes) else 0


def _run_all(bench: Bench, arguments: argparse.Namespace) -> Iterator[Outcome]:
    for case in bench.cases():
        is_wanted = arguments.case in case.name and (not arguments.only or case.group in arguments.only)
        if not is_wanted:
            continue
        outcome = bench.run(case)
        if outcome.fault == "hang":
            outcome = bench.run(case, PATIENCE_S)  # the machine may have been busy
        if outcome.fault:
            print(f"{outcome.fault}: {case.group}: {case.name}\n    {outcome.text[-300:]!r}", flush=True)
        yield outcome


class Bench:
    """The folders that cases are copied from, and what an undisturbed run leaves."""

    def __init__(self, folder: Path) -> None:
        from devicebridge.tests.bad_inputs import LORA, TRAIN, make_base, place_copy

        self.folder, self.place = folder, folder / "place"
        self.bases = {"plain": make_base(folder), "trained": folder / "trained"}
        _import_all(folder / "imports")
        place_copy(self.bases["plain"], self.place)
        child = fork(lambda: _command(self.place, TRAIN), folder / "trained.log")
        assert child.wait() == 0, child.text()
        shutil.copytree(self.place, self.bases["trained"])
        self.lora = (self.bases["trained"] / LORA).read_bytes()

    def cases(self) -> Iterator[Case]:
        from devicebridge.tests import bad_files, bad_inputs

        plain, trained = self.bases.values()
        yield from bad_inputs.job_key_cases()
        yield from bad_inputs.job_file_cases()
        yield from bad_files.json_cases(plain)
        yield from bad_files.weight_cases()
        yield from bad_files.dataset_cases()
        yield from bad_files.checkpoint_cases(trained)
        yield from bad_files.cache_cases(trained)
        yield from bad_files.command_cases()

    def run(self, case: Case, limit_s: float = LIMIT_S) -> Outcome:
        from devicebridge.tests.bad_inputs import LORA, fault_of, place_copy

        log, lora = self.folder / "log", self.place / LORA
        log.unlink(missing_ok=True)
        place_copy(self.bases[case.base], self.place)
        case.spoil(self.place)
        began = time.monotonic()
        child = fork(lambda: _command(self.place, case.commands), log)
        code = child.wait(limit_s)
        took_s, text = time.monotonic() - began, child.text()
        has_same_lora = lora.is_file() and lora.read_bytes() == self.lora
        fault = "hang" if child.is_late else fault_of(case, code, text, has_same_lora=has_same_lora)
        return Outcome(case.group, case.name, fault, code, text[-2000:], round(took_s, 2))


def _command(folder: Path, commands: Sequence[Sequence[str]]) -> int:
    """`devicebridge ARGUMENTS` in that folder, one command after the other until one fails."""
    from devicebridge.cli.main import main as devicebridge

    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.chdir(folder)
    code = 0
    for arguments in commands:
        try:
            code = devicebridge(arguments)
        except SystemExit as end:  # argparse's
            code = int(end.code or 0)
        if code:
            break
    return code


def _import_all(folder: Path) -> None:
    """All that a run imports, so that its forks need not. No gradients here: they start threads."""
    from devicebridge.cli import cache, jobs  # noqa: F401
    from devicebridge.events import EventLog
    from devicebridge.headless import run  # noqa: F401
    from devicebridge.jobs.encode_job import cache_job
    from devicebridge.jobs.job import check_job
    from devicebridge.tests.tiny_pipeline import make_tiny_job

    job = make_tiny_job(folder, output={"folder": str(folder / "run")})
    with EventLog(folder / "events") as events:
        cache_job(check_job(job), events)


def _print_table(outcomes: Sequence[Outcome]) -> None:
    groups = collections.Counter(outcome.group for outcome in outcomes)
    faults = collections.Counter((outcome.group, outcome.fault) for outcome in outcomes if outcome.fault)
    kinds = ("traceback", "raw", "hang", "died", "silent", "unclear", "not repaired", "wrong code")
    print(f"{'group':<16}{'cases':>6}{'refused':>8}" + "".join(f"{kind:>13}" for kind in kinds))
    for group, number in groups.items():
        refused = sum(outcome.code == 2 for outcome in outcomes if outcome.group == group)
        print(f"{group:<16}{number:>6}{refused:>8}" + "".join(f"{faults[group, kind]:>13}" for kind in kinds))
    slowest = max((outcome.took_s for outcome in outcomes), default=0.0)
    print(f"{len(outcomes)} cases, {sum(faults.values())} faults, slowest {slowest:.1f} s")


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="GROUP", help="a group of the table; may be repeated")
    parser.add_argument("--case", default="", metavar="TEXT", help="only cases whose name has this")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
