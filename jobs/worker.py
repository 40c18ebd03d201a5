"""A training in a process of its own: started from a command, told by a job file, heard by lines of JSON.

Every line of standard output that is a JSON object with a "kind" is an event (events.py), or one of

    log      level, message          a warning of the pack
    result   status, step, ...       how it ended (TrainingResult, without its tensors)
    error    message                 why it ended

Whatever else a library prints there is not ours. The worker stops between two steps, and saves, when a file appears
that it was told of, when the process that started it is gone, or on Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..system.import_faults import import_fault
from ..system.processes import python_command
from ..system.stopping import StopRequest, stop_signals
from ..system.telling import safe_output, say

if TYPE_CHECKING:
    from .result import TrainingResult

ROOT = Path(__file__).resolve().parent.parent
_START = (
    "import runpy; runpy.run_path(sys.argv[1])['load_pack'](); "
    "from devicebridge.jobs.worker import main; sys.exit(main(sys.argv[2:]))"
)


def worker_command(
    job: Path, stop_file: Path, *, resume: bool, also_checks: Path | None, host_share: int = 1
) -> list[str | Path]:
    """The command that starts a worker.

    Args:
        also_checks: fill the caches only, after both this and the job have been checked; None trains.
        host_share: trainings that share the host's free memory.
    """
    flags = ["--resume"] * resume + ([] if also_checks is None else ["--fill-caches", str(also_checks)])
    share = ["--host-share", str(host_share)]
    return python_command(_START, ROOT / "bootstrap.py", job, stop_file, *share, *flags)


def main(arguments: Sequence[str]) -> int:
    """Train, or fill the caches; 0, or 2 after an error that was told."""
    safe_output()
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("stop_file", type=Path)
    parser.add_argument("--host-share", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fill-caches", type=Path, metavar="OTHER", help="train nothing; check this job as well")
    options = parser.parse_args(arguments)
    should_stop = _stop_when_told(options.stop_file)
    handler, pack = _Tell(), logging.getLogger("devicebridge")  # not what libraries say at import
    pack.addHandler(handler)
    try:
        found = asdict(_work(options, should_stop))
        tell("result", {**found, "lora_path": str(found["lora_path"] or "")})
    except (ValueError, RuntimeError, OSError) as error:
        tell("error", {"message": import_fault(error) or str(error)})
        return 2
    except Exception as error:  # a mistake of ours, and standard error leads nowhere
        tell("error", {"message": import_fault(error) or traceback.format_exc()})
        return 2
    finally:
        pack.removeHandler(handler)
    return 0


def _work(options: argparse.Namespace, should_stop: Callable[[], bool]) -> TrainingResult:
    from ..config.job import load_job
    from ..encoding.encode import Stopped
    from ..events import EventLog
    from .encode_job import cache_job
    from .job import check_job, run_job
    from .result import TrainingResult

    job = load_job(options.job)
    if options.fill_caches is not None:
        check_job(load_job(options.fill_caches), is_to_train=False)
        with EventLog(Path(job.output.folder), _tell_event) as events:
            try:
                cache_job(check_job(job, is_to_train=False), events, should_stop)
            except Stopped as stopped:
                return TrainingResult("stopped", resume_hint=str(stopped))
        return TrainingResult("finished")
    found = run_job(
        job, resume=options.resume, on_event=_tell_event, should_stop=should_stop, host_share=options.host_share
    )
    return replace(found, lora={}, checkpoint=None)  # the parent reads the file if it wants the tensors


def tell(kind: str, values: Mapping[str, Any], step: int = 0, total: int = 0) -> None:
    """Write one line for the parent. Once it is gone lines go nowhere, so that the training can still stop and save."""
    say(json.dumps({"kind": kind, "step": step, "total": total, "values": dict(values)}))


def _tell_event(event: Any) -> None:
    tell(event.kind, event.values, event.step, event.total)


class _Tell(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tell("log", {"level": record.levelno, "message": record.getMessage()})


def _stop_when_told(stop_file: Path) -> Callable[[], bool]:
    stop = StopRequest()
    for number in stop_signals():
        signal.signal(number, lambda number, frame: stop.ask())
    parent = os.getppid()
    return lambda: stop() or stop_file.exists() or os.getppid() != parent
