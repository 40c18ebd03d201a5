"""Where a run that is resumed stands: its newest whole checkpoint, and whether that is of this job."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checkpoints.fingerprint import file_fingerprint
from ..config.job import JobConfig, differing_keys, make_job
from ..config.open import asked
from ..data.samples import dataset_fingerprint
from ..encoding.key import settings_fingerprint
from ..parallel.placement import Placement
from ..training.loop import checkpoint_folder
from ..training.state import DamagedCheckpoint, TrainingState, list_checkpoints, load_newest, sweep_checkpoints
from .read_job import ReadJob

_log = logging.getLogger(__name__)

_FACTS: dict[str, type] = {
    "config": dict,
    "order": dict,
    "losses": list,
    "evaluations": dict,
    "dataset": str,
    "evaluation": str,
    "model": list,
    "placement": list,
}
_IDENTITY = {
    "dataset": "data: images, captions or masks have changed",
    "evaluation": "evaluation: images, captions or masks have changed",
    "model": "model: the weights in the file have changed",
}


def find_state(job: JobConfig, *, resume: bool) -> TrainingState | None:
    """The newest whole checkpoint of the job's folder if it is to be resumed, None for a fresh start.

    A run that was killed before its first checkpoint is resumed by starting it again, which gives the same result.

    Raises: ValueError if none of its checkpoints is whole, or if a fresh start would mix with those of an earlier run.
    """
    folder = checkpoint_folder(job)
    sweep_checkpoints(folder)
    if resume:
        state = load_newest(folder, check_facts)
        if state is None:
            _log.warning("there is no checkpoint in %s yet; the job starts from its first step", folder)
        return state
    if found := list_checkpoints(folder):
        raise ValueError(
            f"{folder} holds the checkpoints of an earlier run, up to {found[-1].name}; resume it, or choose another "
            "output.folder"
        )
    return None


def check_facts(state: TrainingState) -> None:
    """Raises: DamagedCheckpoint for a state that no run can continue from."""
    state.expect_facts(_FACTS)
    losses, numbers = state.facts["losses"], (int, float)
    if len(losses) != state.step or not all(type(loss) in numbers for loss in losses):
        raise DamagedCheckpoint(f"{state.path} should hold the losses of {state.step} steps, and holds {len(losses)}")
    order = state.facts["order"]
    if not all(type(order.get(name)) is int for name in ("epoch", "index")):
        raise DamagedCheckpoint(f"{state.path} does not say where the data stands, but {order}")
    for step, loss in state.facts["evaluations"].items():
        if not (step.isdecimal() and type(loss) in numbers):
            raise DamagedCheckpoint(f"{state.path} says {loss!r} of the evaluation after step {step!r}")


def as_decided(job: JobConfig, state: TrainingState) -> JobConfig:
    """The job with what "auto" became when the run began: memory that is free today must not change it."""
    old = job_of(state)
    quantize = asked(job.model.quantize) or old.model.quantize
    name = asked(job.optimizer.name) or old.optimizer.name
    return replace(job, model=replace(job.model, quantize=quantize), optimizer=replace(job.optimizer, name=name))


def find_identity(read: ReadJob) -> dict[str, Any]:
    """Plain facts that a resumed run must share with the one it continues, beyond the config.

    Reads every image and samples of the weights.
    """
    if read.encoded:
        dataset = settings_fingerprint([[sample.latents_key, *sample.text_keys] for sample in read.encoded])
    else:
        dataset = dataset_fingerprint(read.samples)
    return {
        "dataset": dataset,
        "evaluation": dataset_fingerprint(read.eval_samples) if read.eval_samples else "",
        "model": [file_fingerprint(file) for file in read.info.files],
        "start": _fingerprint_of_start(read.job.lora.start_from),
    }


def _fingerprint_of_start(path: str) -> str:
    """Of the LoRA that a run begins with; "" without one, and where it is gone: a resumed run does not read it."""
    return file_fingerprint(path) if path and Path(path).is_file() else ""


def placement_facts(placement: Placement) -> dict[str, list[str] | list[int]]:
    """The device of every block, and of every replica or shard and its share, as a checkpoint keeps them."""
    return {
        "placement": [str(device) for device in placement.devices],
        "replicas": [str(device) for device in placement.replicas],
        "shards": [str(device) for device in placement.shards],
        "shares": list(placement.shares),
    }


def refuse_other_run(
    job: JobConfig, identity: dict[str, Any], state: TrainingState, *, is_placed_anew: bool = False
) -> None:
    """Raises: ValueError if the state was made with other settings, data or weights; names what differs.

    Args:
        is_placed_anew: whether the model may lie on other devices than before.
    """
    if differing := differences(job, identity, state, is_placed_anew=is_placed_anew):
        lines = "\n".join(f"  {line}" for line in differing)
        raise ValueError(
            f"{state.path} was made with other settings, so continuing it would not be the same run:\n{lines}\n"
            "Set them back to resume, or start anew with another output.folder"
        )


def differences(
    job: JobConfig, identity: dict[str, Any], state: TrainingState, *, is_placed_anew: bool = False
) -> list[str]:
    """A line for everything in which a job is another one than that of this state; [] for the same."""
    old, decided = job_of(state), as_decided(job, state)
    differing = differing_keys(replace(old, split=decided.split) if is_placed_anew else old, decided)
    return differing + [what for name, what in _IDENTITY.items() if state.facts.get(name) != identity[name]]


def job_of(state: TrainingState) -> JobConfig:
    """The job that a checkpoint was made by, but for the LoRA's name, which may be one that is refused today.

    Raises: ValueError naming the checkpoint for one that cannot be read.
    """
    values = state.facts["config"]
    if isinstance(output := values.get("output"), dict):
        values = values | {"output": {key: value for key, value in output.items() if key != "name"}}
    try:
        return make_job(values)
    except ValueError as error:
        raise ValueError(f"{state.path} holds a job that cannot be read: {error}") from error
