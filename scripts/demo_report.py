"""What a demo run learned, as two pictures: its loss, and images before and after with the same noise.

    python scripts/demo_report.py RUN

RUN holds job.toml and what it names. Prints where the LoRA, the loss plot and the pictures are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("MPLBACKEND", "Agg")

import torch
from devicebridge.checkpoints.load import load_transformer
from devicebridge.checkpoints.lora_start import read_start
from devicebridge.cli.main import set_up_logging
from devicebridge.config.job import load_job
from devicebridge.data.video import read_frames
from devicebridge.encoding.sources import FolderTexts, fill
from devicebridge.encoding.vae import load_vae
from devicebridge.families.spec import ModelFamily
from devicebridge.jobs.checked_job import JobPlan
from devicebridge.jobs.encode_job import cache_store
from devicebridge.jobs.job import check_job
from devicebridge.parallel.placement import Placement, block_names, plan_manual
from devicebridge.scripts.demo_pictures import sample_images, save_image_grid, to_images
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.placed import apply_block_split
from torch import nn

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

CPU = torch.device("cpu")
NUM_IMAGES = 6
NUM_STEPS = 30
SEED = 1


# --- loss ------------------------------------------------------------------------------------------------------------


def read_events(file: Path, kind: str) -> list[dict[str, Any]]:
    """The run's events of one kind; of a step done twice, by a resumed run, the later."""
    events = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return list({event["step"]: event for event in events if event["kind"] == kind}.values())


def smooth(values: Sequence[float], keep: float = 0.95) -> list[float]:
    """Exponential moving mean, corrected at its start where few values are known."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(total / weight)
    return smoothed


def plot_loss(events_file: Path, path: Path) -> None:
    """Training loss, the same smoothed, and the evaluation loss over optimizer steps, as PNG."""
    from matplotlib import pyplot

    steps, evaluations = read_events(events_file, "step"), read_events(events_file, "eval")
    numbers, losses = [event["step"] for event in steps], [event["loss"] for event in steps]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(numbers, losses, color="0.8", linewidth=0.8, label="training loss")
    axes.plot(numbers, smooth(losses), color="tab:blue", linewidth=2, label="training loss, smoothed")
    points = [event["step"] for event in evaluations], [event["loss"] for event in evaluations]
    axes.plot(*points, "o-", color="tab:red", label="loss on held-out crops")
    for step, loss in zip(*points, strict=True):
        axes.annotate(f"{loss:.3f}", (step, loss), textcoords="offset points", xytext=(4, 7), color="tab:red")
    axes.set(xlabel="optimizer step", ylabel="loss", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


# --- pictures --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merge_lora(model: nn.Module, family: ModelFamily, file: Path) -> int:
    """Add a LoRA file to the weights of the linears it names, in place; returns how many."""
    linears = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    layers = read_start(file, family, linears)
    for name, layer in layers.items():
        linear = model.get_submodule(name)
        linear.weight += (layer["lora_B.weight"] @ layer["lora_A.weight"]).to(linear.weight)
    return len(layers)


def make_pictures(plan: JobPlan, lora: Path) -> tuple[list[tuple[str, list[PilImage]]], str]:
    """Rows of training images, and of what the model makes of their caption without and with the LoRA; and a line on
    the same over two emulated cards."""
    family, sample = plan.family, plan.samples[0]
    folder = plan.info.pipeline_folder
    assert folder is not None
    vae = load_vae(family, plan.variant, folder, torch.float32)
    shape = family.encode_latents(vae, read_frames(sample.image_request())[None]).shape[1:]
    model = load_transformer(plan.info, lambda name: CPU, torch.float32)
    options = {
        "num_images": NUM_IMAGES,
        "steps": NUM_STEPS,
        "shift_factor": plan.schedule.shift.factor(shape[-1] * shape[-2]),
        "seed": SEED,
        "guidance": plan.variant.training_guidance,
        "home": CPU,
        "dtype": torch.float32,
    }

    def draw() -> list[PilImage]:
        with torch.no_grad():
            latents = sample_images(model, family, read_text(plan, sample.caption), shape, **options)
            return to_images(family.decode_latents(vae, latents))

    photographs = [read_frames(s.image_request())[None] for s in spread(plan.samples, NUM_IMAGES)]
    before = draw()
    merge_lora(model, family, lora)
    rows = [
        ("training images", to_images(torch.cat(photographs))),
        (f'before: "{sample.caption}"', before),
        ("after, same noise", draw()),
    ]
    text, short = read_text(plan, sample.caption), options | {"num_images": 1, "steps": 4}

    def draw_one(home: torch.device) -> torch.Tensor:
        return sample_images(model, family, text, shape, **(short | {"home": home}))

    return rows, split_is_equal(model, family, draw_one)


@torch.no_grad()
def split_is_equal(model: nn.Module, family: ModelFamily, draw: Callable[[torch.device], torch.Tensor]) -> str:
    """Draw with a model on one emulated card, then with half of its blocks on each of two, and say who has what.

    Args:
        draw: latents by the model whose inputs are on this device.
    Raises: RuntimeError if two cards draw other bits than one.
    """
    names, drawn = block_names(model, family), []
    with emulated_cards(2):
        for cards, cuts in ((CARDS[:1], []), (CARDS[:2], [len(names) // 2])):
            plan = plan_manual(names, list(cards), cuts)
            placement = Placement(plan.blocks, plan.devices, plan.main_device, tail=tuple(family.tail))
            split = apply_block_split(model, family, placement)
            drawn.append(draw(CARDS[0]))
            split.remove()
    if not torch.equal(*drawn):
        raise RuntimeError("the model split over two emulated cards draws other bits than on one")
    return f"a picture over two emulated cards ({placement.describe()}): the bits of one card"


def spread(items: Sequence[Any], number: int) -> list[Any]:
    """This many of the items, evenly from the first to the last."""
    last, gaps = len(items) - 1, max(1, number - 1)
    return [items[round(i * last / gaps)] for i in range(number)]


def read_text(plan: JobPlan, caption: str) -> dict[str, torch.Tensor]:
    """The caption's text states from the run's cache, for one image. [1, S, D]"""
    settings = plan.job.cache
    store = cache_store(plan.job)
    folder = Path(settings.text_encoders) if settings.text_encoders else plan.info.pipeline_folder
    assert folder is not None
    dtype = getattr(torch, settings.dtype)
    sources = [FolderTexts(spec, folder, CPU, dtype) for spec in plan.variant.text_encoders]
    entries = [store.get(fill([caption], source, store)[caption]) or {} for source in sources]
    return {name: states[None] for entry in entries for name, states in entry.items()}


def main(run: Path) -> None:
    plan = check_job(load_job(run / "job.toml"))
    folder = Path(plan.job.output.folder)
    lora = folder / f"{plan.job.output.name}.safetensors"
    loss, pictures = run / "loss.png", run / "before_after.png"
    plot_loss(folder / "events.jsonl", loss)
    rows, split = make_pictures(plan, lora)
    save_image_grid(pictures, rows, side=160)
    print(f"the LoRA: {lora}")
    print(f"its loss: {loss}")
    print(split)
    print(f"training images, and pictures without and with it: {pictures}")


if __name__ == "__main__":
    set_up_logging()
    main(Path(sys.argv[1]))
