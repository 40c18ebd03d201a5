"""A job for a pair of experts: two ordinary jobs that share captions and latents, each in a process of its own.

Some models are two transformers, one for the high and one for the low half of the noise (Wan 2.2 A14B). Neither sees
what the other learns. Each job is what a user would write for that expert alone, so its LoRA is the same bytes.
`devicebridge cache` checks both jobs and fills the cache first, and is gone before the models load. This process never
starts CUDA, which would take memory of every card.

LoRA files are named as the published ones of such models: <name>_high_noise.safetensors and
<name>_low_noise.safetensors, each in its own folder below the job's.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoints.checkpoint import read_checkpoint
from ..config.job import JobConfig, save_for_process
from ..encoding.encode import never
from ..events import Event, EventLog, Listener
from ..families.registry import FAMILIES
from ..families.spec import Variant
from ..runs.queue import train_command
from .in_processes import JobProcess, run_all
from .resume import TrainingResult
from .run_lock import run_lock

_MAIN = Path(__file__).resolve().parent.parent / "__main__.py"
_PER_DEVICE = ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks")


@dataclass(frozen=True)
class Expert:
    """One of the two: "high_noise" or "low_noise", and its own job."""

    name: str
    job: JobConfig


def expert_jobs(job: JobConfig, devices: Sequence[str]) -> tuple[Expert, Expert]:
    """The jobs of both experts. High noise comes first and gets the first half of the devices. Reads headers.

    Raises: ValueError for a model that is no half of a pair, for the same expert twice, or settings per device that
        are not as many as there are devices.
    """
    first = read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = first.variant or first.family.variants[0]
    if not variant.partner:
        pairs = [each.name for family in FAMILIES.values() for each in family.variants if each.partner]
        raise ValueError(
            f"model.second_expert names the other expert of a pair, but {job.model.path} is {variant.name}, which is "
            f"whole; remove it, or name with model.variant which it is: {', '.join(pairs)}"
        )
    partner = first.family.variant(variant.partner)
    second = read_checkpoint(job.model.second_expert, first.family.name, partner.name)
    if {file.resolve() for file in first.files} == {file.resolve() for file in second.files}:
        raise ValueError(
            f"model.path {job.model.path} and model.second_expert {job.model.second_expert} are the same files; name "
            "the other expert's, or for both the model folder that holds transformer and transformer_2"
        )
    parts = sorted([(variant, job.model.path), (partner, job.model.second_expert)], key=lambda e: -e[0].sigma_range[1])
    middle = (len(devices) + 1) // 2
    shares = (slice(middle), slice(middle, None)) if len(devices) > 1 else (slice(1), slice(1))
    high, low = (
        _make_expert(job, each, path, devices, share) for (each, path), share in zip(parts, shares, strict=True)
    )
    return high, low


def num_at_once(experts: Sequence[Expert]) -> int:
    """How many of the two are trained at a time: both if they have no device in common."""
    first, second = (set(expert.job.split.devices) for expert in experts)
    return 1 if first & second else 2


def _make_expert(job: JobConfig, variant: Variant, path: str, devices: Sequence[str], share: slice) -> Expert:
    name = "high_noise" if variant.sigma_range[1] == 1.0 else "low_noise"
    folder = Path(job.output.folder)
    for setting in _PER_DEVICE:
        values = getattr(job.split, setting)
        if values and len(values) != len(devices):
            raise ValueError(
                f"split.{setting} has {len(values)} values, but the devices of both experts are "
                f"{', '.join(devices)}; give one each"
            )
    own = {setting: getattr(job.split, setting)[share] for setting in _PER_DEVICE}
    own_job = replace(
        job,
        model=replace(job.model, path=path, second_expert="", variant=variant.name),
        split=replace(job.split, devices=tuple(devices[share]), **own),
        cache=replace(job.cache, folder=job.cache.folder or str(folder / "cache")),
        output=replace(job.output, folder=str(folder / name), name=f"{job.output.name}_{name}"),
    )
    return Expert(name, own_job)


@dataclass(frozen=True)
class PairResult:
    """How both trainings ended, by expert; {} if the job was stopped before they began."""

    experts: Mapping[str, TrainingResult]
    is_finished: bool


def run_pair(
    job: JobConfig,
    devices: Sequence[str],
    *,
    resume: bool = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
) -> PairResult:
    """Train both experts to their end, or until should_stop() is true; then both are saved.

    With one device they follow each other. Where one fails, the other is stopped. Both are resumed together; one that
    is done has nothing left to do.

    Args:
        devices: of both, in order.
        on_event: hears everything; values has the "expert".
    Raises: ValueError for a job that cannot be run as written; RuntimeError naming the expert whose training
        failed, or the process that runs in the same folder.
    """
    folder = Path(job.output.folder)
    with run_lock(folder), tempfile.TemporaryDirectory(prefix="devicebridge-") as private:
        experts = expert_jobs(job, devices)
        at_once = num_at_once(experts)
        files = [_write(expert.job, Path(private)) for expert in experts]
        with EventLog(folder, on_event) as events:

            def process(expert: Expert, file: Path, command: Sequence[str | Path], name: str) -> JobProcess:
                def pass_on(event: Event) -> None:
                    events.emit(event.kind, event.step, event.total, **{**event.values, "expert": name})

                return JobProcess(expert.job, command, file, pass_on, name)

            caches = process(experts[0], files[0], [sys.executable, _MAIN, "cache", *files], "caches")
            share = ["--host-share", str(at_once)]
            trainings = [
                process(each, file, [*train_command(each.job, file, (), resume=resume), *share], each.name)
                for each, file in zip(experts, files, strict=True)
            ]
            done: list[JobProcess] = []
            for at_a_time in [[caches], trainings] if at_once > 1 else [[caches], *([each] for each in trainings)]:
                if not all(each.is_finished for each in done):
                    continue
                run_all(at_a_time, should_stop)
                done += at_a_time
                if failed := next((each for each in at_a_time if each.error), None):
                    steps = {each.name: each.result().step for each in at_a_time if not each.error}
                    saved = (
                        f"; {name} was stopped and saved after step {step}" for name, step in steps.items() if step
                    )
                    raise RuntimeError(f"{failed.name}: {failed.error}{''.join(saved)}")
        return PairResult({each.name: each.result() for each in done[1:]}, all(each.is_finished for each in done))


def _write(job: JobConfig, private: Path) -> Path:
    """The job as a file for its process, and as one in its folder for whoever wants to run it alone.

    No process reads the latter: it may lie where ComfyUI saves what browsers send.
    """
    folder = Path(job.output.folder)
    file = private / folder.name / "job.toml"
    for each in (folder / file.name, file):
        save_for_process(job, each)
    return file
