"""One process with ComfyUI's Python: what the settings of Train LoRA (simple) take of published models on two cards.

Takes ComfyUI's folder and a folder for files. Prints a line of JSON per family: {"family", "kind", "verdicts": of each
quality on two cards of 24 GiB, "hours": {cards: of a whole run of normal quality}, "weights_gb"}. A UNet has no
forecast.
"""

import json
import math
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHECKOUT, FOLDER = sys.argv[1:]
sys.path[0] = CHECKOUT
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import comfy.supported_models  # noqa: E402
import torch  # noqa: E402
from devicebridge.checkpoints.checkpoint import CheckpointInfo  # noqa: E402
from devicebridge.config.job import ModelConfig, make_job  # noqa: E402
from devicebridge.jobs.job import plan_job  # noqa: E402
from devicebridge.nodes.host.native.model import native_training  # noqa: E402
from devicebridge.nodes.load import recognised  # noqa: E402
from devicebridge.nodes.simple import SETTINGS, kind_of  # noqa: E402
from devicebridge.planning.cards import parse_cards  # noqa: E402
from devicebridge.planning.dry_run import NoForecast  # noqa: E402
from devicebridge.planning.plan import describe_verdict, step_seconds  # noqa: E402
from devicebridge.tests.comfy.full_sizes import _FILES, _write_sparse  # noqa: E402

FAMILIES = {"FLUX.2": "FLUX.2", "Z-Image": "Z-Image", "Qwen-Image": "Qwen-Image", "Wan": "Wan 2.1, 2.2 14B"}
CARDS = ("2x3090", "2x4090")
FAMILIES |= {"SDXL": "SDXL"}  # by the names of full_sizes.py
NAMED = {"text_source": f"comfyui 0.33.0 CLIP {'a' * 64}", "latent_source": f"comfyui 0.33.0 VAE {'a' * 64}"}


def recognised_as(name: str) -> tuple[ModelConfig, CheckpointInfo]:
    """What Load Model for Training makes of a published file, of which there is the header."""
    config_class, unet_config, *_ = _FILES[name]
    config = getattr(comfy.supported_models, config_class)(dict(unet_config))
    model = config.get_model({}, "", device=torch.device("meta")).diffusion_model
    path = Path(FOLDER) / f"{config_class}.safetensors"
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


def judge(family: str, name: str) -> dict[str, Any]:
    config, info = recognised_as(name)
    kind = kind_of(info)
    found: dict[str, Any] = {
        "family": family, "kind": kind, "is_native": bool(config.family), "verdicts": [], "hours": {},
    }  # fmt: skip
    found["weights_gb"] = 2e-9 * sum(math.prod(each.shape) for each in info.tensors.values())
    quick, normal, thorough = SETTINGS[kind]
    try:
        found["verdicts"] = [describe_verdict(next(plans(config, info, each)))[0] for each in (quick, normal, thorough)]
        _, *others = plans(config, info, normal)
    except NoForecast:
        found["hours"] = {cards: _hours_said(config, info, normal, cards) for cards in CARDS}
        return found
    found["hours"] = {
        cards: normal.steps * step_seconds(plan)[0] / 3600 for cards, plan in zip(CARDS, others, strict=True)
    }
    return found


def _hours_said(config: ModelConfig, info: CheckpointInfo, settings: Any, cards: str) -> float:
    try:
        next(plans(config, info, settings, (cards,)))
    except NoForecast as error:
        hours, minutes = re.search(r"steps about (?:(\d+) h )?(\d+) min", error.time).groups()
        return int(hours or 0) + int(minutes) / 60
    raise AssertionError("there is a forecast")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with native_training():
        for family, name in FAMILIES.items():
            print(json.dumps(judge(family, name)), flush=True)
