"""What the settings of Train LoRA (simple) take of published models on two cards: forecasts of `devicebridge plan`, for
files of full size without weights. A case of test_simple_training.py."""

import math
import re
from collections.abc import Iterator
from typing import Any

import comfy.supported_models
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.config.job import ModelConfig, make_job
from devicebridge.jobs.job import plan_job
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.load import recognised
from devicebridge.nodes.simple import SETTINGS, kind_of
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.dry_run import NoForecast
from devicebridge.planning.plan import describe_verdict, step_seconds
from devicebridge.tests.comfy.cases import FOLDER, long_case, run_cases
from devicebridge.tests.comfy.full_sizes import _FILES, _write_sparse
from devicebridge.tests.comfy.server import ROOT
from devicebridge.tests.workflows import read_workflow

# By the names of full_sizes.py, and their kinds.
FAMILIES = {
    "FLUX.2": ("FLUX.2", "large image"), "Z-Image": ("Z-Image", "image"), "Qwen-Image": ("Qwen-Image", "large image"),
    "Wan": ("Wan 2.1, 2.2 14B", "video"), "SDXL": ("SDXL", "UNet"),
}  # fmt: skip
CARDS = ("2x3090", "2x4090")
NAMED = {"text_source": f"comfyui 0.33.0 CLIP {'a' * 64}", "latent_source": f"comfyui 0.33.0 VAE {'a' * 64}"}


def recognised_as(name: str) -> tuple[ModelConfig, CheckpointInfo]:
    """What Load Model for Training makes of a published file, of which there is the header."""
    config_class, unet_config, *_ = _FILES[name]
    config = getattr(comfy.supported_models, config_class)(dict(unet_config))
    model = config.get_model({}, "", device=torch.device("meta")).diffusion_model
    path = FOLDER / f"{config_class}.safetensors"
    _write_sparse(path, {name: tuple(each.shape) for name, each in model.state_dict().items()}, ())
    return recognised(path, {})


def plans(config: ModelConfig, info: CheckpointInfo, settings: Any, cards: Any = ("2x24GiB", *CARDS)) -> Iterator[Any]:
    """On two cards of 24 GiB, two 3090 and two 4090; for a video model of its longest clips."""
    frames = info.family.latent.frame_lengths
    job = make_job(
        {
            "model": {"path": config.path, "quantize": "auto", "family": config.family},
            "data": {"folders": [{"path": "squares"}], "resolutions": [settings.resolution], "frames": frames[-1:]},
            "lora": {"rank": settings.rank, "alpha": settings.rank},
            "train": {"steps": settings.steps, "gradient_accumulation_steps": settings.accumulation},
            "cache": NAMED if config.family else {}, "output": {"folder": "nowhere"},
        }
    )  # fmt: skip
    for each in cards:
        yield plan_job(job, parse_cards(each), info=info, has_data=False)


@long_case
def settings_fit_two_cards_of_24_gb_and_templates_say_their_hours() -> None:
    """A UNet has no forecast of memory."""
    for family, (name, kind) in FAMILIES.items():
        config, info = recognised_as(name)
        assert kind_of(info) == kind
        quick, normal, thorough = SETTINGS[kind]
        notes = read_workflow(ROOT / "example_workflows" / f"simple_training_{family}.json")["nodes"]
        (text,) = (node["widgets_values"][0] for node in notes if node["type"] == "MarkdownNote")
        if kind == "UNet":
            size_gb = 2e-9 * sum(math.prod(each.shape) for each in info.tensors.values())
            assert size_gb < 0.9 * 24 and f"{size_gb:.1f} GB" in text
            hours = [_hours_said(config, info, normal, cards) for cards in CARDS]
        else:
            for each in (quick, normal, thorough):
                assert describe_verdict(next(plans(config, info, each)))[0].startswith("fits"), family
            _, *others = plans(config, info, normal)
            hours = [normal.steps * step_seconds(plan)[0] / 3600 for plan in others]
        for cards, each in zip(CARDS, hours, strict=True):
            said = f"{each:.1f}" if each < 10 else f"{each:.0f}"
            assert f"{said} h on two {cards.removeprefix('2x')}" in text, family


def _hours_said(config: ModelConfig, info: CheckpointInfo, settings: Any, cards: str) -> float:
    try:
        next(plans(config, info, settings, (cards,)))
    except NoForecast as error:
        hours, minutes = re.search(r"steps about (?:(\d+) h )?(\d+) min", error.time).groups()
        return int(hours or 0) + int(minutes) / 60
    raise AssertionError("there is a forecast")


if __name__ == "__main__":
    with native_training():
        run_cases()
