"""Which run a job belongs to that may have run before: a finished one, one to resume, or a new one beside them.

A graph is queued again and again. Unchanged, it means the LoRA that is there; changed, it means another run, whose
folder and LoRA have a number behind their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.header import read_file_header
from ..checkpoints.weight_file import load_tensors
from ..config.job import JobConfig, job_to_dict
from ..encoding.encode import never
from ..runs.record import RunRecord, read_record
from ..training.loop import checkpoint_folder
from ..training.state import TrainingState, list_checkpoints, load_checkpoint
from .lora_output import describe_kind
from .read_job import read_job
from .result import TrainingResult
from .resume import check_facts, differences, find_identity, job_of

_AGAIN = "delete it, and the run writes it again"
_MAX_LINES = 5  # of what differs, in a note


@dataclass(frozen=True)
class NextRun:
    """What to do for a job.

    Args:
        job: with the folder and the name of its run.
        resume: whether it goes on from its newest checkpoint.
        finished: the result, where there is nothing left to do.
        note: what a user should know of the choice; "" for a first run.
    """

    job: JobConfig
    resume: bool
    finished: TrainingResult | None = None
    note: str = ""


def next_run(
    job: JobConfig,
    *,
    resume: bool,
    info: CheckpointInfo | None = None,
    should_stop: Callable[[], bool] = never,
) -> NextRun:
    """The run that a job means, among those in its folder and in the numbered ones beside it.

    Reads headers and images, and no weights of the model.

    Args:
        resume: go on with the newest run that has these settings; the number of steps may differ.
        info: the job's model, if it was read already.
    Raises: ValueError for a run with these very settings that was stopped, unless resume is on, or that is under way;
        Stopped when should_stop() became true while images were looked at.
    """
    earlier, free = _earlier(job)
    if not earlier:
        return NextRun(free, resume)
    identity = find_identity(read_job(job, info, should_stop=should_stop))
    states = [(each, _newest(each)) for each in reversed(earlier)]
    known = [(each, state, _differing(each, identity, state)) for each, state in states if state is not None]
    same = [(each, state) for each, state, differing in known if not differing and _may_be(each, state, resume)]
    if resume:
        each, state = min(same, key=lambda pair: _is_done(*pair), default=(earlier[-1], None))
        return _finished(each, state) if state is not None and _is_done(each, state) else NextRun(each, resume=True)
    for each, state in same:
        if state.step < each.train.steps:
            raise ValueError(
                f"{each.output.folder} holds a run with these settings that was stopped after step {state.step} of "
                f"{each.train.steps}; turn on resume to go on from there, or change output.name to start anew"
            )
        return _finished(each, state)
    return NextRun(free, resume=False, note=_describe_new(free, known))


def _differing(job: JobConfig, identity: dict[str, Any], state: TrainingState) -> list[str]:
    """As differences; and whether the LoRA that it began with is another file now."""
    began, now = state.facts.get("start"), identity["start"]
    other = ["the LoRA file of lora.start_from"] if began and now and began != now else []
    return differences(job, identity, state) + other


def _running(job: JobConfig) -> RunRecord | None:
    record = read_record(Path(job.output.folder))
    return record if record is not None and record.state == "running" else None


def _refuse_under_way(job: JobConfig, record: RunRecord | None) -> None:
    if record is not None and record.job == json.loads(json.dumps(job_to_dict(job))):
        raise ValueError(
            f"{job.output.folder} holds a run with these settings that is under way; wait for its end, stop it in the "
            "sidebar's tab DeviceBridge, or change output.name for another"
        )


def _earlier(job: JobConfig) -> tuple[list[JobConfig], JobConfig]:
    """The job in every folder that holds a run, and in the first that does not."""
    found: list[JobConfig] = []
    for each in _numbered(job):
        running = _running(each)
        _refuse_under_way(each, running)
        if list_checkpoints(checkpoint_folder(each)):
            found.append(each)
        elif running is None:
            return found, each
    raise AssertionError("numbers do not end")


def _numbered(job: JobConfig) -> Iterator[JobConfig]:
    yield job
    for number in count(2):
        folder, name = f"{job.output.folder}_{number}", f"{job.output.name}_{number}"
        yield replace(job, output=replace(job.output, folder=folder, name=name))


def _newest(job: JobConfig) -> TrainingState | None:
    """None for one that cannot be read: it is no run to go on with, and resume says why."""
    try:
        state = load_checkpoint(list_checkpoints(checkpoint_folder(job))[-1])
        check_facts(state)
        job_of(state)
    except ValueError:
        return None
    return state


def _may_be(job: JobConfig, state: TrainingState, resume: bool) -> bool:
    """Whether the number of steps is the one that was asked for then; a resumed run may do more."""
    asked = job_of(state).train.steps
    return job.train.steps == asked or resume and job.train.steps >= state.step


def _is_done(job: JobConfig, state: TrainingState) -> bool:
    return state.step >= job.train.steps


def _finished(job: JobConfig, state: TrainingState) -> NextRun:
    """Its result, from the disk; where the LoRA file is gone, older or of another type, a resumed run writes it."""
    path = Path(job.output.folder) / job.output.file_name
    if not path.is_file() or _kind_of(path) != describe_kind(job.output) or _is_older(path, state):
        return NextRun(job, resume=True)
    return NextRun(job, resume=False, finished=read_result(path, state), note="Finished before: nothing was trained.")


def _is_older(path: Path, state: TrainingState) -> bool:
    """Whether a file was written before the run's last checkpoint: by an earlier stop, then, and not at the end."""
    return state.path is not None and path.stat().st_mtime_ns < (state.path / "state.json").stat().st_mtime_ns


def _kind_of(path: Path) -> str:
    with open(path, "rb") as stream:
        return read_file_header(stream, _AGAIN).metadata.get("devicebridge_file", "")


def read_result(path: Path, state: TrainingState, status: str = "finished") -> TrainingResult:
    """What a run has left: its LoRA file, and the checkpoint that was saved with it."""
    evaluations = {int(step): loss for step, loss in state.facts["evaluations"].items()}
    return TrainingResult(
        status=status,
        step=state.step,
        lora_path=path,
        lora=load_tensors(path, _AGAIN),
        losses=list(state.facts["losses"]),
        eval_before=evaluations[min(evaluations)] if evaluations else None,
        eval_after=evaluations.get(state.step),
        checkpoint=state.path,
    )


def _describe_new(job: JobConfig, known: list[tuple[JobConfig, TrainingState, list[str]]]) -> str:
    """What is new, against the run that is most alike."""
    told = [f"This run is {job.output.name}: settings or images differ from the runs before it."]
    found = [(each, list(dict.fromkeys([*_other_steps(each, state), *lines]))) for each, state, lines in known]
    if found:
        each, differing = min(found, key=lambda pair: len(pair[1]))
        told += [f"Against {each.output.name}:", *differing[:_MAX_LINES]]
        told += [f"and {len(differing) - _MAX_LINES} more"] if len(differing) > _MAX_LINES else []
    return "\n".join(told)


def _other_steps(job: JobConfig, state: TrainingState) -> list[str]:
    was, now = job_of(state).train.steps, job.train.steps
    return [] if was == now else [f"train.steps: {was} -> {now}"]
