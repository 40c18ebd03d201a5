"""The runs that a job may have had before: which one it means, where that stands, and what it has left."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.fingerprint import file_fingerprint
from ..checkpoints.header import read_file_header
from ..checkpoints.weight_file import load_tensors
from ..config.job import JobConfig, Resume, differing_keys, job_to_dict, make_job
from ..config.model import holds_copies
from ..config.setting import requested
from ..data.samples import dataset_fingerprint
from ..encoding.key import settings_fingerprint
from ..parallel.placement import Placement
from ..quantization.quantize import ROUNDINGS
from ..runs.record import read_record
from ..system.stopping import never
from ..training.loop import checkpoint_folder
from ..training.state import (
    DamagedCheckpoint,
    TrainingState,
    change_facts,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    sweep_checkpoints,
)
from .checked_job import ReadJob
from .lora_output import describe_kind
from .read_job import read_job
from .resolve import find_machine, other_cards

_log = logging.getLogger(__name__)
_AGAIN = "delete it, and the run writes it again"
_MAX_LINES = 5  # of what differs, in a note

_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0)]


class _Facts(pydantic.BaseModel, strict=True):
    """What a state says beside its tensors, as far as it is read: people can edit it. Later versions added the last."""

    config: dict[str, Any]
    order: dict[Literal["epoch", "index"], _Count] = pydantic.Field(min_length=2)
    losses: list[_Number]
    evaluations: dict[Annotated[str, pydantic.Field(pattern="^[0-9]+$")], _Number]
    dataset: str
    evaluation: str
    model: list[str]
    placement: list[str]
    start: str = ""
    replicas: list[str] = []
    row_shares: list[Annotated[_Number, pydantic.Field(gt=0)]] = []
    loss_scale: Annotated[list[_Number], pydantic.Field(min_length=2, max_length=2)] = [1.0, 0]
    what: list[str] = []
    rounding: dict[str, int] = {}


_IDENTITY = {
    "dataset": "data: images, captions or masks have changed",
    "evaluation": "evaluation: images, captions or masks have changed",
    "model": "model: the weights in the file have changed",
}


@dataclass(frozen=True)
class TrainingResult:
    """How a job ended."""

    status: str  # "finished", or "stopped" before its last step
    step: int = 0  # optimizer steps done
    lora_path: Path | None = None  # None if the job was stopped before training began
    lora: dict[str, torch.Tensor] = field(default_factory=dict)  # the tensors of that file, on the CPU
    losses: list[float] = field(default_factory=list)  # of every step, resumed ones included
    eval_before: float | None = None  # evaluation loss before the first step, None without a folder
    eval_after: float | None = None  # after the last step done
    checkpoint: Path | None = None  # the newest full state, to resume from
    resume_hint: str = ""  # how to resume; "" when finished
    memory: tuple[str, ...] = ()  # forecast against measured, a line per card; () where nothing was forecast
    pace: str = ""  # the same of a step


def find_state(job: JobConfig, *, resume: Resume) -> TrainingState | None:
    """The newest whole checkpoint of the job's folder if it is to be resumed, None for a fresh start.
    Raises: ValueError if none of its checkpoints is whole, or a fresh start would mix with those of another run."""
    folder = checkpoint_folder(job)
    sweep_checkpoints(folder)
    if resume:
        state = load_newest(folder, check_facts)
        if state is None:
            _log.warning("there is no checkpoint in %s yet; the job starts from its first step", folder)
        return state
    if found := list_checkpoints(folder):
        found_there = f"{folder} holds the checkpoints of an earlier run, up to {found[-1].name}"
        raise ValueError(f"{found_there}; resume it, continue it with other settings, or choose another output.folder")
    return None


def check_facts(state: TrainingState) -> None:
    """Raises: DamagedCheckpoint for a state that no run can continue from."""
    try:
        facts = _Facts.model_validate(state.facts)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise DamagedCheckpoint(f"{state.path} is damaged: {place}: {first['msg']}") from error
    if len(facts.losses) != state.step:
        raise DamagedCheckpoint(f"{state.path} has {len(facts.losses)} losses of {state.step} steps")


def as_decided(job: JobConfig, state: TrainingState) -> JobConfig:
    """The job with what "auto" became when the run began: memory that is free today must not change it."""
    old = job_of(state)
    quantize = requested(job.model.quantize) or old.model.quantize
    name = requested(job.optimizer.name) or old.optimizer.name
    return replace(job, model=replace(job.model, quantize=quantize), optimizer=replace(job.optimizer, name=name))


def find_identity(read: ReadJob) -> dict[str, Any]:
    """Plain facts that a resumed run must share with the one it continues, beyond the config; reads every image."""
    of_encoded = [[sample.latents_key, *sample.text_keys[0]] for sample in read.encoded]
    start = read.job.lora.start_from
    return {
        "dataset": settings_fingerprint(of_encoded) if of_encoded else dataset_fingerprint(read.samples),
        "evaluation": dataset_fingerprint(read.eval_samples) if read.eval_samples else "",
        "model": [file_fingerprint(file) for file in read.info.files],
        "start": file_fingerprint(start) if start and Path(start).is_file() else "",  # a resumed run does not read it
        "rounding": dict(ROUNDINGS),
    }


def placement_facts(placement: Placement) -> dict[str, Any]:
    """The device of every block, and of every replica, as a checkpoint keeps them."""
    return {
        "placement": [str(device) for device in placement.devices],
        "replicas": [str(device) for device in placement.replicas],
        "row_shares": list(placement.row_shares),
    }


# ---- a run that goes on with other settings, or on other cards

_FIXED = ("model", "model.family", "model.variant", "model.second_expert")  # and what the LoRA is
_DECIDE_ORDER = {"data", "train.batch_size", "train.seed"}  # "data": what its folders hold
_DECIDE_STATE = {"optimizer.name", "optimizer.options"}
_NOWHERE: dict[str, Any] = {"placement": [], "replicas": [], "row_shares": []}


def go_on(
    read: ReadJob, identity: dict[str, Any], state: TrainingState, *, resume: Resume, is_placed_anew: bool
) -> dict[str, Any]:
    """The facts that a run goes on from; "what" in them says what is other than before, a line each.
    Until a run that went on with other settings has saved a step, its checkpoint is that of both, the old one and the
    new: whose settings these are goes on. "continue" takes what differs, and writes it beside the checkpoint, for a
    crash before the next one. True takes other cards alone, where they give the same bits.
    Raises: ValueError naming what differs and cannot, before weights are loaded."""
    if resume == "continue" and state.step > read.job.train.steps:
        done = f"{state.path} has done {state.step}"
        raise ValueError(f"train.steps = {read.job.train.steps}, but {done}; raise it to go on")

    def differing(each: TrainingState, *, is_anew: bool = is_placed_anew) -> list[str]:
        found = differences(read.job, identity, each, is_placed_anew=is_anew)
        return found if is_anew else [*found, *other_cards(read.job, each.facts)]

    own = replace(state, facts=state.own)
    if all(map(differing, (state, own))):
        if resume == "continue":
            return _changed(read.job, identity, own, differing(own, is_anew=False)).facts
    elif state.own and differing(state):
        state = change_facts(own, {})
    moved = []  # a line for everything that has its blocks on other cards than before
    if not is_placed_anew and _keeps_bits(read, state):
        split = (line for line in differing_keys(job_of(state), read.job) if line.startswith("split."))
        moved = [*split, *other_cards(read.job, state.facts)]
    if others := differing(state, is_anew=is_placed_anew or bool(moved)):
        found = f"{state.path} was made with other settings, so continuing it would not be the same run:"
        helps = "Set them back to resume, take --continue in place of --resume to go on with them, or start anew with"
        raise ValueError("\n".join([found, *(f"  {line}" for line in others), f"{helps} another output.folder"]))
    if not moved:
        return state.facts
    what = [f"{line} (the LoRA stays the same, bit for bit, on cards of one kind)" for line in moved]
    return state.facts | _NOWHERE | {"is_one_model": True, "what": [*state.facts.get("what", ()), *what]}


def _keeps_bits(read: ReadJob, state: TrainingState) -> bool:
    """Whether a run has the same bits wherever its blocks lie: of one model, which draws nothing on its cards, all of
    one type. Gradients of layers outside its blocks, which several blocks read, would be added up in another order."""
    job, facts = read.job, state.facts
    blocks = tuple(f"{each.name}." for each in read.info.family.block_lists)
    draws = bool(job.lora.dropout) or any("stochastic" in name for name in job.optimizer.options)
    has_copies = bool(facts.get("replicas")) or holds_copies(job.parallel.requested or "none")
    types = {str(name).partition(":")[0] for name in facts["placement"]}
    types |= {device.type for device in find_machine(job.split.devices).devices}
    return len(types) == 1 and not (draws or has_copies) and all(name.startswith(blocks) for name in read.targets)


def _changed(job: JobConfig, identity: dict[str, Any], own: TrainingState, differing: list[str]) -> TrainingState:
    """The state with the job's settings, data and cards in place of its own, also on disk."""
    lines = {line.partition(":")[0]: line for line in differing}
    is_fixed = {key: key in _FIXED or key.startswith("lora.") and key != "lora.dropout" for key in lines}
    if fixed := [f"  {line}" for key, line in lines.items() if is_fixed[key]]:
        found = f"{own.path} cannot go on with these settings, which decide what its LoRA is:"
        helps = "Set them back, or start anew with another output.folder (lora.start_from takes a LoRA file)"
        raise ValueError("\n".join([found, *fixed, helps]))
    facts: dict[str, Any] = {}
    for key in lines.keys() & _DECIDE_STATE:
        lines[key] += "; the optimizer's state begins anew"
    for key in lines:
        if key.startswith("split.") or key in ("cards", "parallel.strategy"):
            lines[key] += "; the last bits of sums may be others"
    if redrawn := next((key for key in lines if key in _DECIDE_ORDER), ""):
        lines[redrawn] += f"; the order of pictures is drawn anew from step {own.step + 1} on"
        facts["order"] = {"epoch": own.facts["order"]["epoch"] + 1, "index": 0}
    if any(key.partition(".")[0] in ("evaluation", "objective", "model") for key in lines):
        facts["evaluations"] = {}
    facts |= {"config": job_to_dict(job), **identity, **_NOWHERE, "what": list(lines.values())}
    facts["keeps_optimizer"] = not lines.keys() & _DECIDE_STATE
    return change_facts(own, facts)


def differences(
    job: JobConfig, identity: dict[str, Any], state: TrainingState, *, is_placed_anew: bool = False
) -> list[str]:
    """A line for everything in which a job is another one than that of this state; [] for the same."""
    old, decided = job_of(state), as_decided(job, state)
    differing = differing_keys(replace(old, split=decided.split) if is_placed_anew else old, decided)
    scheme, roundings = decided.model.quantize, (state.facts.get("rounding", {}), ROUNDINGS)
    if scheme == old.model.quantize and len({each.get(scheme, 1) for each in roundings}) > 1:
        differing.append(f"model.quantize: {scheme} rounded otherwise when the run began")
    return differing + [what for name, what in _IDENTITY.items() if state.facts.get(name) != identity[name]]


def job_of(state: TrainingState) -> JobConfig:
    """The job that made a checkpoint, without the LoRA's name, which may be refused today.
    Raises: ValueError naming the checkpoint if it cannot be read."""
    values = state.facts["config"]
    if isinstance(output := values.get("output"), dict):
        values = values | {"output": {key: value for key, value in output.items() if key != "name"}}
    try:
        return make_job(values)
    except ValueError as error:
        raise ValueError(f"{state.path} holds a job that cannot be read: {error}") from error


# ---- which run a job means: a graph is queued again and again, and changed it means another run, numbered


@dataclass(frozen=True)
class NextRun:
    """What to do for a job, with the folder and the name of its run. finished: where there is nothing left to do. note:
    what a user should know of the choice; "" for a first run."""

    job: JobConfig
    resume: Resume
    finished: TrainingResult | None = None
    note: str = ""


def next_run(
    job: JobConfig,
    *,
    resume: Resume | None,
    info: CheckpointInfo | None = None,
    should_stop: Callable[[], bool] = never,
) -> NextRun:
    """The run that a job means, among those in its folder and in the numbered ones beside it; no weights are read.
    resume: go on with the newest run that has these settings; the number of steps may differ. "continue" goes on with
    the newest of all if none has them. None goes on with one that has them all and was stopped, and else starts anew.
    Raises: ValueError for a run with these very settings that was stopped, unless resume is on, or that is under way;
    Stopped when should_stop() became true while images were looked at."""
    earlier, free = _earlier(job)
    if not earlier:
        return NextRun(free, resume or False)
    identity = find_identity(read_job(job, info, should_stop=should_stop))
    known, same = [], []
    for each in reversed(earlier):
        try:
            state = load_checkpoint(list_checkpoints(checkpoint_folder(each))[-1])
            check_facts(state)
            job_of(state)
        except ValueError:  # no run to go on with, and resume says why
            continue
        began, begins = state.facts.get("start"), identity["start"]
        other = ["the LoRA file of lora.start_from"] if began and begins and began != begins else []
        differing = differences(each, identity, state) + other
        was, now = job_of(state).train.steps, each.train.steps
        steps = [f"train.steps: {was} -> {now}"] if was != now else []
        known.append((each, list(dict.fromkeys([*steps, *differing]))))
        if not differing and (not steps or resume and now >= state.step):  # a resumed run may do more than was set then
            same.append((each, state))
    begun = next((each for each, state in same if state.step < each.train.steps), None)
    if resume and begun is not None:
        return _resumed(job, begun, resume)
    if resume and not same:
        lines = known[0][1] if resume == "continue" and known and known[0][0] is earlier[-1] else []
        return _resumed(job, earlier[-1], resume, lines)
    if not same:
        return NextRun(free, resume=False, note=_describe_new(free, known))
    each, state = same[0]
    if state.step >= each.train.steps:
        return _finished(each, state)
    if resume is None:
        return NextRun(each, resume=True)
    found = f"{each.output.folder} holds a run with these settings that was stopped after step {state.step} of"
    helps = "turn on resume to go on from there, or change output.name to start anew"
    raise ValueError(f"{found} {each.train.steps}; {helps}")


def _resumed(job: JobConfig, run: JobConfig, resume: Resume, changes: Sequence[str] = ()) -> NextRun:
    """A numbered run is named, as a user asked for the name without a number."""
    is_other, name = run.output.folder != job.output.folder, Path(run.output.folder).name
    named = [f"This goes on with the run {name}{', with changes:' if changes else '.'}"] if is_other or changes else []
    return NextRun(run, resume=resume, note="\n".join([*named, *changes]))


def _earlier(job: JobConfig) -> tuple[list[JobConfig], JobConfig]:
    """The job in every folder that holds a run, and in the first that does not."""
    found: list[JobConfig] = []
    for number in count(1):
        behind = f"_{number}" if number > 1 else ""
        folder, name = f"{job.output.folder}{behind}", f"{job.output.name}{behind}"
        each = replace(job, output=replace(job.output, folder=folder, name=name))
        record = read_record(Path(folder))
        is_under_way = record is not None and record.state == "running"
        if record is not None and is_under_way and record.job == json.loads(json.dumps(job_to_dict(each))):
            helps = "wait for its end, stop it in the sidebar's tab DeviceBridge, or change output.name for another"
            raise ValueError(f"{folder} holds a run with these settings that is under way; {helps}")
        if list_checkpoints(checkpoint_folder(each)):
            found.append(each)
        elif not is_under_way:
            return found, each
    raise AssertionError("numbers do not end")


def _finished(job: JobConfig, state: TrainingState) -> NextRun:
    """Its result, from the disk; a LoRA file that is gone, of another type, or older than the last checkpoint (written
    by an earlier stop, then), is written by a resumed run."""
    path = Path(job.output.folder) / job.output.file_name
    if path.is_file():
        with open(path, "rb") as stream:
            kind = read_file_header(stream, _AGAIN).metadata.get("devicebridge_file", "")
        saved = 0 if state.path is None else (state.path / "state.json").stat().st_mtime_ns
        if kind == describe_kind(job.output) and path.stat().st_mtime_ns >= saved:
            note = "Finished before: nothing was trained."
            return NextRun(job, resume=False, finished=read_result(path, state), note=note)
    return NextRun(job, resume=True)


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


def _describe_new(job: JobConfig, known: list[tuple[JobConfig, list[str]]]) -> str:
    """What is new, against the run that is most alike."""
    text = [f"This run is {job.output.name}: settings or images differ from the runs before it."]
    if known:
        other, lines = min(known, key=lambda pair: len(pair[1]))
        more = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
        text += [f"Against {other.output.name}:", *lines[:_MAX_LINES], *more]
    return "\n".join(text)
