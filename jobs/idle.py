"""Settings that pass, one by one, and mean nothing, or something else than their user thinks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config.job import JobConfig, job_keys, values_at
from ..runs.folders import NO_RUNS

_OURS = ("output.folder", "cache.folder", "model.quantized_cache")
_FILES_ONLY = ("data.folders.path", "data.folders.references", "evaluation.folder", "evaluation.references")
_REPEATS: tuple[str, ...] = ("data.resolutions", "data.folders.resolutions", "data.frames", "evaluation.quantiles")
_REPEATS += ("data.folders.references", "evaluation.references", "samples.prompts", "cache.stock_clip")


def refuse_repeats(job: JobConfig) -> None:
    """Raises: ValueError for a value that a list has twice, and for a folder named twice with equal settings."""
    for key in _REPEATS:
        for values in values_at(job, key):
            if again := [each for number, each in enumerate(values) if each in values[:number]]:
                raise ValueError(
                    f"{key} has {again[0]!r} twice, which counts it twice or changes nothing; name it once"
                )
    folders = job.data.folders
    if same := [each for number, each in enumerate(folders) if each in folders[:number]]:
        raise ValueError(
            f"the folder {same[0].path} is there twice with the same settings; name it once, with "
            "data.folders.repeats = 2"
        )


def refuse_overlaps(job: JobConfig) -> None:
    """Raises: ValueError where the job would write into a folder that it reads, or over a file that it reads."""
    lora = Path(job.output.folder, job.output.file_name)
    for key, given in _read_places(job):
        if given.is_file() and _place_in(lora, given) is not None:
            raise ValueError(
                f"the LoRA file {lora} would be written over {key}, which is that file; choose another output.name"
            )
        if not given.is_dir():
            continue
        for our_key in _OURS:
            (ours,) = values_at(job, our_key)
            place = _place_in(Path(ours), given) if ours else None
            if place is not None and not (place and key in _FILES_ONLY and _is_no_clip(given, place)):
                raise ValueError(
                    f"{our_key} {ours} lies in {key} {given}, or is that folder, so what is written there would be "
                    "among what is read; choose a folder beside it"
                )
        own = [name for name in sorted(NO_RUNS) if _place_in(given, Path(job.output.folder, name)) is not None]
        if own:
            raise ValueError(
                f"{key} {given} is where output.folder {job.output.folder} keeps its {own[0]}; choose another "
                "output.folder"
            )


def _read_places(job: JobConfig) -> Iterator[tuple[str, Path]]:
    """Files and folders that are read, with their keys."""
    for path, key in job_keys().items():
        for given in values_at(job, path) if key.is_path and path not in _OURS else ():
            yield from ((path, Path(each)) for each in ([given] if isinstance(given, str) else given) if each)


def _place_in(inner: Path, outer: Path) -> str | None:
    """The name of the entry in which a path lies, "" if it is outer itself, and None if it lies elsewhere.

    The path need not be there, whatever links and spellings lead to it.
    """
    if not outer.exists():
        return None
    real = Path(os.path.realpath(inner))
    places = {each: name for each, name in zip((real, *real.parents), ("", *real.parts[:0:-1]), strict=True)}
    return next((name for each, name in places.items() if each.exists() and each.samefile(outer)), None)


def _is_no_clip(folder: Path, name: str) -> bool:
    """Whether a sub-folder of a dataset is not read, as it has no caption beside it."""
    return not any(os.path.lexists(folder / f"{name}{ending}") for ending in (".txt", ".caption"))


# ---- settings without effect ----

_Test = Callable[[JobConfig], bool]
_IMAGES = ("resolutions", "max_aspect_ratio", "bucket_step", "frames", "fps", "window", "trigger_word")
_IDLE: tuple[tuple[Sequence[str], _Test, str], ...] = (
    (("schedule.min_factor",), lambda job: job.schedule.name == "constant", "schedule.name is constant"),
    (
        ("schedule.warmup_steps",),
        lambda job: job.schedule.warmup_steps >= job.train.steps,
        "all of train.steps pass before the full learning rate is reached",
    ),
    (
        ("model.rotation",),
        lambda job: job.model.quantize not in ("int8-compute", "auto"),
        "model.quantize is not int8-compute",
    ),
    (("output.use_ema", "samples.use_ema"), lambda job: not job.train.ema_decay, "train.ema_decay keeps no average"),
    (
        tuple(f"samples.{name}" for name in ("every_steps", "before_first", "seed", "steps", "guidance"))
        + tuple(f"samples.{name}" for name in ("width", "height", "frames", "vae")),
        lambda job: not job.samples.prompts,
        "there are no samples.prompts",
    ),
    (
        ("evaluation.every_steps", "evaluation.quantiles", "evaluation.seed"),
        lambda job: not job.evaluation.folder,
        "there is no evaluation.folder",
    ),
    (
        ("objective.logit_mean", "objective.logit_std"),
        lambda job: job.objective.timestep_sampling not in ("", "logit_normal"),
        "objective.timestep_sampling is not logit_normal",
    ),
    (
        ("objective.sigmoid_scale",),
        lambda job: job.objective.timestep_sampling not in ("", "sigmoid"),
        "objective.timestep_sampling is not sigmoid",
    ),
    (
        ("cache.text_window_gb",),
        lambda job: job.cache.text_device not in ("auto", "stream"),
        "cache.text_device is neither auto nor stream",
    ),
    (("parallel.shard_degree",), lambda job: job.parallel.strategy != "hsdp", "parallel.strategy is not hsdp"),
    (
        ("parallel.microbatches_ahead",),
        lambda job: job.parallel.strategy not in ("auto", "pipeline"),
        "parallel.strategy is not pipeline",
    ),
    (
        ("data.reference_megapixels",),
        lambda job: job.data.condition != "reference",
        "data.condition is not reference",
    ),
    (tuple(f"data.{name}" for name in _IMAGES), lambda job: bool(job.data.encoded), "data.encoded is encoded already"),
)


def describe_idle(job: JobConfig) -> str:
    """What is set and has no effect, with the reasons; "" for nothing."""
    found = []
    for keys, is_idle, why in _IDLE:
        if is_idle(job) and (given := [key for key in keys if values_at(job, key) != [_default(key)]]):
            found.append(f"{', '.join(given)} ({why})")
    return f"without effect, as this job is: {'; '.join(found)}" if found else ""


def _default(key: str) -> Any:
    return job_keys()[key].default
