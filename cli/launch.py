"""`devicebridge train --nproc`: a job as several processes of this machine, and what a process does in it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

from ..config.job import Resume, resume_flags
from ..parallel.ranks.group import RankFailed, RankLost
from ..parallel.ranks.place import RankPlace
from ..parallel.ranks.watch import record_error
from ..runs.queue import own_command
from ..system.processes import python_command, start
from ..system.stopping import STOPPED, Launch, Stopped, find_launch, stop_on_signal
from ..system.telling import say

_POLL_S = 0.2
_SAVING_S = 15  # for the other processes to save when one has failed; torchrun then kills them


def launch(options: argparse.Namespace, count: int) -> int:
    """Start torchrun with this very command, once per process, and pass on whoever asks to stop."""
    if count < 1:
        raise ValueError(f"--nproc {count} was asked for; give a number of processes, one per card at most")
    with tempfile.TemporaryDirectory(prefix="devicebridge-") as folder, stop_on_signal() as stop:
        made = Launch(Path(folder))
        environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_SAVING_S), **made.environment}
        if "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // count))
        command = torchrun_command(count, options.job, resume=options.resume, is_verbose=options.verbose)
        sys.stdout.flush()
        with start(command, environment=environment, output=sys.stdout, stop_timeout_s=2 * _SAVING_S) as running:
            while running.exit_code is None:
                if stop():
                    made.ask("stop")
                time.sleep(_POLL_S)
            code = running.exit_code
        return made.code() or code


def torchrun_command(count: int, job: Path, *, resume: Resume, is_verbose: bool = False) -> list[str | Path]:
    """torchrun's module with a rendezvous of its own, whose port is free: two jobs do not meet."""
    flags = ["--nnodes", "1", "--nproc-per-node", str(count), "--rdzv-backend", "c10d", "--rdzv-id", uuid.uuid4().hex]
    flags += ["--rdzv-endpoint", "localhost:0"]
    script = own_command(needs_comfyui=True)[1:]  # of Python
    ours = [*script, *["--verbose"] * is_verbose, "train", str(job), *resume_flags(resume)]
    return python_command("from torch.distributed.run import main; main()", *flags, *ours)


def as_rank(place: RankPlace, train: Callable[[Callable[[], bool]], int]) -> int:
    """Train as one of several processes. One that fails ends here and at once, for others may keep it waiting.
    train: given whether to stop; returns the exit code that the command would have alone.
    Returns: 0, also after a stop: torchrun takes everything else for a failure."""
    known = find_launch()
    with stop_on_signal() as stop:

        def should_stop() -> bool:
            if known is not None and known.is_asked("stop"):
                stop.ask()
            return stop()

        try:
            code = train(should_stop)
        except Stopped as stopped:
            code = STOPPED
            if place.rank == 0:
                say(f"devicebridge: {stopped}")
        except Exception as error:
            is_foreseen = isinstance(error, (ValueError, RuntimeError, OSError))  # as in one process
            # Where a job is refused, the command that started all ends as it would alone: torchrun would add a
            # traceback of its own to every code but 0.
            if known is not None and (isinstance(error, ValueError) or getattr(error, "is_refusal", False)):
                known.say_code(2)
                if not isinstance(error, RankFailed) and known.is_first_to_say(str(error)):
                    say(f"devicebridge: {error}", sys.stderr)
                sys.stdout.flush()
                os._exit(0)
            if not (isinstance(error, RankFailed) and place.rank):  # the rank that it comes from tells it
                say(f"devicebridge: rank {place.rank}: {error}", sys.stderr)
            if not is_foreseen:
                say("".join(traceback.format_exception(error)), sys.stderr)
            if not isinstance(error, (RankFailed, RankLost)):
                record_error(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2 if is_foreseen else 1)
    if known is not None and place.rank == 0:
        known.say_code(code)
    return 0
