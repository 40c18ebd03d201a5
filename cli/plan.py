"""`devicebridge plan`: what a job, or before there are files a published model, will take of every card, by sizes."""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoints.checkpoint import CheckpointInfo, make_published_info
from ..config.job import DataConfig, JobConfig, ModelScheme, job_to_dict, load_job, make_job
from ..jobs.job import plan_job
from ..jobs.resolve import find_machine
from ..planning.cards import cards_of, parse_cards
from ..planning.plan import describe_plan, plan_values
from ..planning.times import SampledModel, forecast_sampling
from ..system.telling import say
from .jobs import each_model
from .native import enter, prepared

# Pixels along a square where nobody has said: what image models are published for, and the area of 480x832 for video.
_IMAGE_RESOLUTION, _VIDEO_RESOLUTION = 1024, 640
_TRAIN = {"steps": 1500, "gradient_accumulation_steps": 4}  # of the templates

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A job with the command's values. info: of the published model in its place; None reads the job's files.
    has_data: whether the job's data is read; else the plan is for what make_square makes of its settings."""

    job: JobConfig
    info: CheckpointInfo | None
    has_data: bool


def plan(options: argparse.Namespace) -> int:
    given = {name: getattr(options, name) for name in ("model", "quantize", "resolution", "frames")}
    job, known, has_data = make_request(options.job, **given)
    if options.sample is not None:
        return _plan_sampling(options, known)
    if known is None:
        (job,) = enter([job], options.arguments)
    cards = parse_cards(options.cards) if options.cards else []
    plans = {}
    for title, each, share in each_model(job, [card.name for card in cards]):
        own = [card for card in cards if not title or card.name in each.split.devices]
        with prepared(each) if known is None else nullcontext(known) as info:
            plans[title] = plan_job(each, own, info=info, has_data=has_data, host_share=share)
    if options.json:
        values = {title.removeprefix("== "): plan_values(plan) for title, plan in plans.items()}
        say(json.dumps(values.get("", values), indent=2))
    else:
        texts = ((title, describe_plan(plan, job.train.steps)) for title, plan in plans.items())
        say("\n\n".join(f"{title}\n{text}".strip() for title, text in texts))
    return 0


def _plan_sampling(options: argparse.Namespace, info: CheckpointInfo | None) -> int:
    others = [f"--{name}" for name in ("quantize", "resolution", "frames") if getattr(options, name) is not None]
    if info is None or options.job is not None or others:
        found = others[0] if others else "a job file" if options.job is not None else "no model"
        raise ValueError(f"--sample goes with --model and --cards alone, and there is {found}; leave the rest out")
    assert info.variant is not None, "published models are variants"
    if "@" in (options.cards or ""):
        raise ValueError(
            f"--cards {options.cards}: --sample goes by seconds, and speeds behind @ are relative; leave them out, or "
            "name the models, such as 2x3090"
        )
    cards = parse_cards(options.cards) if options.cards else cards_of(find_machine(()).devices)
    if cards is None:
        raise ValueError("this machine has no GPU; name the cards to plan for, such as --cards 2x3090")
    forecast = forecast_sampling(SampledModel.of(info, info.variant), options.sample, cards)
    say(json.dumps(forecast.values(), indent=2) if options.json else forecast.describe())
    return 0


def make_request(
    path: Path | None,
    *,
    model: str = "",
    quantize: ModelScheme | None = None,
    resolution: int | None = None,
    frames: int | None = None,
) -> Request:
    """What is to be planned. path: job file; None takes the defaults with an open scheme, and needs a model, which is a
    published variant. The others take the place of the job's settings.
    Raises: ValueError for another model, for neither job nor model, a pair of experts with a model, or data that is not
    there and has no resolution to stand in for it."""
    info = make_published_info(model) if model else None
    values: dict[str, dict[str, Any]]
    if path is not None:
        values = job_to_dict(load_job(path))
    elif info is not None and info.variant is not None:
        # As the nodes and the template of this model train; required paths name nothing.
        side = _VIDEO_RESOLUTION if info.family.latent_of(info.variant).is_video else _IMAGE_RESOLUTION
        values = {"model": {"quantize": "auto"}, "output": {"folder": "nowhere"}, "train": _TRAIN}
        values["data"] = {"folders": [{"path": "squares"}], "resolutions": [side]}
    else:
        raise ValueError("there is nothing to plan for; give a job file, or the name of a model: --model flux2-dev")
    if model and values["model"].get("second_expert"):
        raise ValueError(
            f"--model {model} stands in place of one model, but the job trains two; remove model.second_expert to plan "
            "one alone, or leave out --model where the files of both are there"
        )
    values["model"] |= {"path": model, "family": "", "variant": model} if model else {}
    values["model"] |= {"quantize": quantize} if quantize is not None else {}
    sizes = {"resolutions": resolution, "frames": frames}
    values["data"] |= {name: [size] for name, size in sizes.items() if size is not None}
    job = make_job(values)
    return Request(job, info, path is not None and _has_data(job.data, resolution))


def _has_data(data: DataConfig, resolution: int | None) -> bool:
    """Whether any of a job's folders is there; a mistake in one of several paths is for the scan to name.
    Raises: ValueError if none is and there is no resolution to plan for instead."""
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
