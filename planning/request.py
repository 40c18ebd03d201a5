"""What a plan is asked for: a job file, or before there are files a published model by its name, and squares of pixels.

A plan goes by sizes. A published model's are known by its name, and a dataset matters by its largest sample alone. So
neither 64 GB of weights nor a folder of images has to be there for an answer to "would my cards do it?".
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from ..checkpoints.checkpoint import CheckpointInfo, make_published_info
from ..config.job import DataConfig, JobConfig, ModelScheme, job_to_dict, load_job, make_job
from ..data.buckets import bucket_step, make_buckets
from ..data.clips import make_clip_plan
from ..data.samples import Sample
from ..families.spec import LatentSpec, Variant

_log = logging.getLogger(__name__)

# Pixels along a square where nobody has said: what image models are published for, and the area of 480x832 for video.
IMAGE_RESOLUTION, VIDEO_RESOLUTION = 1024, 640


@dataclass(frozen=True)
class PlanRequest:
    """A job to plan, and what of it is there.

    Args:
        job: with what was asked for in place of its own settings.
        info: of the published model in place of the job's; None reads the job's files.
        has_data: whether the job's data is read; else the plan is for what make_square makes of its settings.
    """

    job: JobConfig
    info: CheckpointInfo | None = None
    has_data: bool = True


def make_request(
    path: Path | None,
    *,
    model: str = "",
    quantize: ModelScheme | None = None,
    resolution: int | None = None,
    frames: int | None = None,
) -> PlanRequest:
    """What `devicebridge plan` is asked for.

    Args:
        path: job file; None takes the defaults with an open scheme, and needs a model.
        model: published variant in place of the job's. quantize, resolution, frames: in place of the job's settings.
    Raises: ValueError for a variant that is not published, for neither job nor model, a pair of experts with a model,
        or data that is not there and has no resolution to stand in for it.
    """
    if resolution is not None and resolution <= 0:
        raise ValueError(f"--resolution {resolution} is no size; give pixels, such as 1024")
    if frames is not None and frames <= 0:
        raise ValueError(f"--frames {frames} is no length; give frames of a clip, such as 33, or 1 for images")
    info = _published(model) if model else None
    if path is not None:
        job = load_job(path)
    elif info is not None:
        job = _job_of(info)
    else:
        raise ValueError("there is nothing to plan for; give a job file, or the name of a model: --model flux2-dev")
    if model:
        job = _with_model(job, model)
    if quantize is not None:
        job = replace(job, model=replace(job.model, quantize=quantize))
    sizes = {"resolutions": resolution, "frames": frames}
    values = job_to_dict(job)
    values["data"] |= {name: [size] for name, size in sizes.items() if size is not None}
    job = make_job(values)
    return PlanRequest(job, info, path is not None and _has_data(job.data, resolution))


def _published(name: str) -> CheckpointInfo:
    try:
        return make_published_info(name)
    except ValueError as error:
        raise ValueError(
            f'{error}. Other models are planned from a job file with model.family = "comfyui", when their file is there'
        ) from error


def _job_of(info: CheckpointInfo) -> JobConfig:
    """Every setting at its default but the scheme, which is left open; the paths that a job must have name nothing."""
    assert info.variant is not None
    resolution = VIDEO_RESOLUTION if info.family.latent_of(info.variant).is_video else IMAGE_RESOLUTION
    return make_job(
        {
            "model": {"path": info.variant.name, "quantize": "auto"},
            "data": {"folders": [{"path": "squares"}], "resolutions": [resolution]},
            "train": {"steps": 1000},
            "output": {"folder": "nowhere"},
        }
    )


def _with_model(job: JobConfig, name: str) -> JobConfig:
    if job.model.second_expert:
        raise ValueError(
            f"--model {name} stands in place of one model, but the job trains two (model.second_expert = "
            f"{job.model.second_expert!r}); remove model.second_expert to plan one expert alone, or leave out --model "
            "where the files of both are there"
        )
    return replace(job, model=replace(job.model, path=name, family="", variant=name))


def _has_data(data: DataConfig, resolution: int | None) -> bool:
    """Whether any of a job's folders is there; a mistake in one of several paths is for the scan to name.

    Raises: ValueError if none is and there is no resolution to plan for instead.
    """
    if data.encoded or any(Path(folder.path).is_dir() for folder in data.folders):
        return True
    first = data.folders[0].path
    if resolution is None:
        raise ValueError(
            f"the dataset folder {first} does not exist; give a folder of images, or --resolution "
            f"{data.largest_resolution} to plan for a square of so many pixels"
        )
    _log.warning("the dataset folder %s does not exist; the plan is for a square of %d pixels", first, resolution)
    return False


def make_square(config: DataConfig, variant: Variant, latent: LatentSpec) -> Sample:
    """A square sample of the largest resolution and length, for a plan before there is a dataset: without data.frames
    an image, or for a variant that is given the first frame the family's longest clip.

    Raises: ValueError for a resolution or a length that the model does not take.
    """
    make_clip_plan(config, latent)  # refuses lengths
    needs_clips = variant.condition != "none"
    frames = max(config.frames or (latent.frame_lengths if needs_clips else (1,)))
    if needs_clips and frames == 1:
        raise ValueError(
            f"{variant.name} is given the first frame, so in one frame nothing is left to learn; give --frames "
            f"{max(latent.frame_lengths)}, or another length of {latent.frame_stride}n + 1"
        )
    (size,) = make_buckets(config.largest_resolution, bucket_step(config, latent), 1.0)
    return Sample("a square", "", None, size, (0, 0, *size), size, tuple(range(frames)) if frames > 1 else ())
