"""What `devicebridge plan` is given: a job file, or before there are files a published model by its name.

A plan goes by sizes. A published model's are known by its name, and a dataset matters by its largest sample alone. So
neither 64 GB of weights nor a folder of images has to be there for an answer to "would my cards do it?".
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.checkpoint import CheckpointInfo, make_published_info
from ..config.job import DataConfig, JobConfig, ModelScheme, job_to_dict, load_job, make_job

# Pixels along a square where nobody has said: what image models are published for, and the area of 480x832 for video.
IMAGE_RESOLUTION, VIDEO_RESOLUTION = 1024, 640

_STEPS, _ACCUMULATION = 1500, 4  # of the templates

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanRequest:
    """A job to plan, and what of it is there.

    Args:
        job: with the command's values in place of its own.
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
    """What `devicebridge plan` is given.

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
    try:
        info = make_published_info(model) if model else None
    except ValueError as error:
        raise ValueError(
            f'{error}. Other models are planned from a job file with model.family = "comfyui", when their file is there'
        ) from error
    if path is not None:
        job = load_job(path)
    elif info is not None and info.variant is not None:
        # As the nodes and the template of this model train; required paths name nothing.
        side = VIDEO_RESOLUTION if info.family.latent_of(info.variant).is_video else IMAGE_RESOLUTION
        job = make_job(
            {
                "model": {"path": model, "quantize": "auto"},
                "data": {"folders": [{"path": "squares"}], "resolutions": [side]},
                "train": {"steps": _STEPS, "gradient_accumulation_steps": _ACCUMULATION},
                "output": {"folder": "nowhere"},
            }
        )
    else:
        raise ValueError("there is nothing to plan for; give a job file, or the name of a model: --model flux2-dev")
    if model and job.model.second_expert:
        raise ValueError(
            f"--model {model} stands in place of one model, but the job trains two (model.second_expert = "
            f"{job.model.second_expert!r}); remove model.second_expert to plan one expert alone, or leave out --model "
            "where the files of both are there"
        )
    values = job_to_dict(job)
    if model:
        values["model"] |= {"path": model, "family": "", "variant": model}
    if quantize is not None:
        values["model"]["quantize"] = quantize
    sizes = {"resolutions": resolution, "frames": frames}
    values["data"] |= {name: [size] for name, size in sizes.items() if size is not None}
    job = make_job(values)
    return PlanRequest(job, info, path is not None and _has_data(job.data, resolution))


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
