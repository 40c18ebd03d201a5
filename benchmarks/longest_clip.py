"""Frames of the longest clip that LoRA training fits, by forecast: on one card, and on cards that share out its tokens.

    python benchmarks/longest_clip.py --comfyui ~/ComfyUI [--cards 24GB 2x24GB] [--size 480 832] [--out results.json]

Wan 14B of ComfyUI's class in published sizes (a hollow file has their names), LoRA rank 16, batch 1, one micro-batch a
step. No card is used. Each row is the best that the planner finds: of one card "none", of several "tokens" and "auto".
Block inputs wait in host memory where that helps ("with host memory"), or stay on the card.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import tempfile
from bisect import bisect_left
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI"))
    parser.add_argument("--cards", nargs="+", default=["24GB", "2x24GB"])
    parser.add_argument("--size", nargs=2, type=int, default=(480, 832), help="height and width")
    parser.add_argument("--quantize", nargs="+", default=["fp8-compute"])
    parser.add_argument("--strategies", nargs="+", default=["none", "tokens", "auto"])
    parser.add_argument("--frames", type=int, help="the plan of such a clip, in the place of the longest")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


OPTIONS = parse()
sys.path.insert(0, str(Path(OPTIONS.comfyui).expanduser()))
sys.argv = ["main.py", "--cpu"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import dataclasses  # noqa: E402
from typing import Any  # noqa: E402

import comfy.supported_models  # noqa: E402
import torch  # noqa: E402
from devicebridge.checkpoints.checkpoint import CheckpointInfo  # noqa: E402
from devicebridge.config.job import make_job  # noqa: E402
from devicebridge.families.comfy.inputs import COND  # noqa: E402
from devicebridge.jobs.resolve import why_no_stages  # noqa: E402
from devicebridge.nodes.host.native.model import native_training  # noqa: E402
from devicebridge.nodes.host.native.source import read_native  # noqa: E402
from devicebridge.planning.cards import parse_cards  # noqa: E402
from devicebridge.planning.costs import ModelCosts  # noqa: E402
from devicebridge.planning.dry_run import SampleText  # noqa: E402
from devicebridge.planning.plan import describe_plan, plan_training  # noqa: E402
from devicebridge.planning.question import Question  # noqa: E402
from devicebridge.planning.search import is_possible  # noqa: E402
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, TinyFamily, small_sizes  # noqa: E402
from provenance import print_or_write, say  # noqa: E402
from random_checkpoint import write_hollow  # noqa: E402

_WAN_14B = {**FAMILIES["wan"].unet_config, "dim": 5120, "num_heads": 40, "ffn_dim": 13824, "num_layers": 40}
WAN = TinyFamily("WAN21_T2V", _WAN_14B, (16, 13, 60, 104), (512, 4096), ())
_MOST_STRIDES = 512  # of a clip: two minutes of Wan


def longest_clip(question: Question) -> int:
    """Frames of the longest clip that fits the cards at the question's height and width; 0 if none does."""
    stride = question.model.family.latent_of(question.model.variant).frame_stride
    lengths = range(1, stride * _MOST_STRIDES + 2, stride)
    index = bisect_left(lengths, True, key=lambda frames: not is_possible(question.changed(frames=frames)))
    return lengths[index - 1] if index else 0


def question_of(info: CheckpointInfo, costs: ModelCosts, cards: str, scheme: str, strategy: str) -> Question:
    job = make_job(
        {
            "model": {"path": "wan", "family": "comfyui", "dtype": "bfloat16", "quantize": scheme},
            "data": {"folders": [{"path": "clips"}]},
            "lora": {"rank": 16, "alpha": 16.0},
            "train": {"steps": 1},
            "parallel": {"strategy": strategy},
            "output": {"folder": "run"},
        }
    )
    without = frozenset({"pipeline"} if why_no_stages(info.family.native, costs._model) else ())
    text = SampleText({COND: torch.zeros(WAN.context)})
    size = tuple(OPTIONS.size)
    return Question(costs, job, tuple(parse_cards(cards)), size, OPTIONS.frames or 1, text=text, without=without)


def rows(info: CheckpointInfo, costs: ModelCosts) -> list[dict[str, Any]]:
    found = []
    for cards in OPTIONS.cards:
        for scheme in OPTIONS.quantize:
            for strategy in OPTIONS.strategies:
                question = question_of(info, costs, cards, scheme, strategy)
                if strategy == "tokens" and len(question.cards) < 2:
                    continue
                if OPTIONS.frames:
                    say(f"{cards}, {scheme}, {strategy}\n{describe_plan(plan_training(question))}")
                    continue
                train = dataclasses.replace(question.job.train, offload_activations="off")
                kept = dataclasses.replace(question, job=dataclasses.replace(question.job, train=train))
                row = {"cards": cards, "quantize": scheme, "strategy": strategy, "frames": longest_clip(kept)}
                row["with host memory"] = longest_clip(question)
                say(str(row))
                found.append(row)
    return found


def main() -> None:
    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    config = getattr(comfy.supported_models, WAN.config_class)(dict(WAN.unet_config))
    empty = config.get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
    try:
        write_hollow(path, {name: tuple(like.shape) for name, like in empty.items()})
        with small_sizes(WAN), native_training():
            info = read_native(path, "bfloat16")
            assert info.variant is not None
            report = {"is_forecast": True, "size": list(OPTIONS.size)}
            print_or_write({**report, "longest": rows(info, ModelCosts(info, info.variant))}, OPTIONS.out)
    finally:
        path.unlink(missing_ok=True)
        path.parent.rmdir()


if __name__ == "__main__":
    main()
