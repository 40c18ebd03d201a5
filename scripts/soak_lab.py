"""For soak.py: a job, commands in forks of this process, and what must be so after each of them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

STEPS = 8
TIMEOUT_S = 120.0
_WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
STEP = re.compile(r"^step (\d+)/\d+ loss", re.MULTILINE)
_SAVED = re.compile(r"^saved .*step-(\d+)$", re.MULTILINE)


@dataclass
class Row:
    """One line of the table; faults are what was lost."""

    check: str
    runs: int = 0
    kills: int = 0
    faults: list[str] = field(default_factory=list)
    skipped: str = ""
    note: str = ""

    def expect(self, is_so: bool, fault: str) -> None:
        if not is_so:
            self.faults.append(fault)


@dataclass
class Child:
    """A command in a fork of this process; log is what it printed."""

    pid: int
    log: Path
    status: int | None = None
    is_late: bool = False

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code, negative where a signal ended it; one that does not end in time is killed, and is_late."""
        end = time.monotonic() + timeout_s
        while not self.is_over():
            if time.monotonic() > end:
                self.is_late = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.01)
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)

    def is_over(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def wait_for(self, pattern: str) -> bool:
        """Whether it printed that before it ended."""
        while not re.search(pattern, self.text(), re.MULTILINE):
            if self.is_over():
                return False
            time.sleep(0.005)
        return True


class Lab:
    """A job, what an undisturbed run of it leaves, and folders for runs that are disturbed."""

    def __init__(self, folder: Path, name: str, seed: int, **sections: Any) -> None:
        from devicebridge.tests.tiny_pipeline import make_tiny_job

        self.folder, self.name, self.sections = folder, name, sections
        self.chance = random.Random(f"{seed} {name}")
        self._num_folders = 0
        train, output = {"steps": STEPS, "batch_size": 2, "seed": 3}, {"save_every_steps": 1}
        values = {"train": train, "output": output, "evaluation": {"folder": ""}, **sections}
        self.job = make_tiny_job(folder, **values)
        straight = self.new_job()
        began = time.monotonic()
        child = self.start(straight, count_writes=True)
        assert child.wait() == 0, child.text()
        self.duration_s = time.monotonic() - began
        self.num_writes = int(re.findall(r"writes: (\d+)", child.text())[-1])
        self.lora = lora_file(straight).read_bytes()
        self.entries = entries(straight)

    def new_job(self, base: Path | None = None, **output: Any) -> Any:
        """The same job with folders of its own for output and cache, below base."""
        self._num_folders += 1
        place = (base or self.folder) / f"{self.name}-{self._num_folders}"
        return replace(
            self.job,
            output=replace(self.job.output, folder=str(place / "run"), **output),
            cache=replace(self.job.cache, folder=str(place / "cache")),
        )

    def start(
        self,
        job: Any,
        *arguments: str,
        command: str = "train",
        is_resumed: bool = True,
        arrange: Callable[[], None] = lambda: None,
        kill_at_write: int = 0,
        count_writes: bool = False,
    ) -> Child:
        """`devicebridge COMMAND job ARGUMENTS`, resuming unless told otherwise."""
        from devicebridge.config.job import save_job

        place = Path(job.output.folder).parent
        file = self.folder / f"{place.name}.toml"
        save_job(job, file)
        log = self.folder / f"{place.name}-{time.monotonic_ns()}.log"
        given = [*arguments, *(["--resume"] if command == "train" and is_resumed else [])]
        writes = _Writes(place, kill_at_write)

        def work() -> int:
            arrange()
            if kill_at_write or count_writes:
                sys.addaudithook(writes)
            code = self._run_command([command, str(file), *given])
            if count_writes:
                print(f"writes: {writes.number}", flush=True)
            return code

        return fork(work, log)

    def _run_command(self, arguments: Sequence[str]) -> int:
        from devicebridge.cli.main import main
        from devicebridge.tests.emulated import emulated_cards

        is_split = any(name.startswith("lazy") for name in self.job.split.devices)
        with emulated_cards() if is_split else contextlib.nullcontext():
            return main(arguments)

    def check_finished(self, job: Any, child: Child, row: Row) -> None:
        """That this run ended well, and left exactly what the undisturbed one left."""
        row.runs += 1
        code, name = child.wait(), child.log.stem
        row.expect(not child.is_late, f"{name}: hung")
        row.expect(code == 0, f"{name}: exit code {code}: {child.text()[-400:]}")
        row.expect(lora_file(job).exists() and lora_file(job).read_bytes() == self.lora, f"{name}: the LoRA is another")
        row.expect(entries(job) == self.entries, f"{name}: the cache is another")
        left = list(Path(job.output.folder).parent.rglob("*.tmp"))  # a claim's file may stay until pruning
        row.expect(not left, f"{name}: left behind {', '.join(path.name for path in left)}")

    def check_ended(self, job: Any, child: Child, row: Row, *codes: int, says: str = "") -> None:
        """That a disturbed run ended as it should, and that all that it called saved is there."""
        row.runs += 1
        code, text, name = child.wait(), child.text(), child.log.stem
        row.expect(not child.is_late, f"{name}: hung")
        row.expect(code in codes, f"{name}: exit code {code}, not {' or '.join(map(str, codes))}: {text[-400:]}")
        row.expect("Traceback" not in text, f"{name}: a traceback: {text[-400:]}")
        row.expect(says in text, f"{name}: does not name {says}: {text[-400:]}")
        done = max([0, *map(int, STEP.findall(text))])
        saved = max([0, *map(int, _SAVED.findall(text))])
        newest = newest_step(job)
        row.expect(newest >= saved, f"{name}: step {saved} was called saved, the newest checkpoint is {newest}")
        if job.output.save_every_steps == 1 and code < 0:
            row.expect(newest >= done - 1, f"{name}: step {done} was done, the newest checkpoint is {newest}")


class _Writes:
    """Counts the operations that change files below a folder, and kills this process at one of them."""

    def __init__(self, folder: Path, kill_at: int) -> None:
        self.folder, self.kill_at, self.number = str(folder), kill_at, 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event in _WRITES or (event == "open" and isinstance(arguments[2], int) and arguments[2] & 3)
        if is_write and self.folder in str(arguments[0]):
            self.number += 1
            if self.number == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def fork(work: Callable[[], int], log: Path) -> Child:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Child(pid, log)
    code = 70
    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        for number in (1, 2):
            os.dup2(file, number)
        code = work()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def lora_file(job: Any) -> Path:
    return Path(job.output.folder) / "lora.safetensors"


def entries(job: Any) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(job.cache.folder).rglob("*.safetensors")}


def newest_step(job: Any) -> int:
    from devicebridge.training.state import list_checkpoints

    found = list_checkpoints(Path(job.output.folder) / "checkpoints")
    return max([0, *(int(path.name.removeprefix("step-")) for path in found)])
