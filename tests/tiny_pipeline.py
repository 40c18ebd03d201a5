"""A tiny but complete model folder of every family, a dataset to train on, and a job over both."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import peft
import torch
from devicebridge.config.job import JobConfig, make_job
from devicebridge.data.samples import BatchOrder
from devicebridge.events import Event, EventLog
from devicebridge.families.flux import _SYSTEM_MESSAGE
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from devicebridge.tests.toy import TINY
from devicebridge.tests.toy_encoders import save_tiny_text_encoder
from devicebridge.training.objective import make_generator
from PIL import Image
from safetensors.torch import load_file
from torch import nn

if TYPE_CHECKING:
    from devicebridge.jobs.checked_job import JobPlan
    from devicebridge.jobs.resume import TrainingResult
    from devicebridge.training.batches import LoadedBatch

SHORT_TEXT = 64


@contextlib.contextmanager
def short_texts(families: Mapping[str, ModelFamily] = FAMILIES) -> Iterator[None]:
    """Inside, texts are padded to few tokens: the published 512 take more than half of what a tiny job computes. In
    this process alone; one that pads to 512 trains another LoRA, for FLUX.2 attends to padding."""
    variants = [variant for family in families.values() for variant in family.variants]
    specs = {id(spec): spec for variant in variants for spec in variant.text_encoders}.values()
    published = [spec.max_length for spec in specs]
    for spec in specs:
        object.__setattr__(spec, "max_length", min(SHORT_TEXT, spec.max_length))
    try:
        yield
    finally:
        for spec, length in zip(specs, published, strict=True):
            object.__setattr__(spec, "max_length", length)


def save_tiny_pipeline(folder: Path, family_name: str, seed: int = 0) -> Path:
    """Write a diffusers model folder with random weights; every part is the real class."""
    family, tiny = FAMILIES[family_name], TINY[family_name]
    tiny.make_model(seed, **tiny.encoder_widths).save_pretrained(folder / "transformer")
    tiny.make_vae(seed + 1).save_pretrained(folder / "vae")
    index: dict[str, Any] = {"_class_name": tiny.pipeline_class, "vae": ["diffusers", family.vae_class]}
    index["transformer"] = ["diffusers", family.transformer_class]
    for kind, layers, encoder, tokenizer in tiny.encoders:
        names = {"encoder_name": encoder, "tokenizer_name": tokenizer}
        known = _SYSTEM_MESSAGE if kind == "mistral3" else ""  # else it leaves a short text no room for a caption
        save_tiny_text_encoder(folder, kind, 16, layers, seed + 2, **names, max_length=77, known_text=known)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def save_tiny_dataset(folder: Path, num_images: int = 5, seed: int = 0) -> Path:
    """Write image_N.png with image_N.txt, of two shapes, one with a mask."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for index in range(num_images):
        height, width = (48, 32) if index % 3 == 2 else (40, 40)
        pixels = torch.randint(0, 255, (height, width, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / f"image_{index}.png")
        (folder / f"image_{index}.txt").write_text(f"picture {index}")
    Image.new("L", (40, 40), 128).save(folder / "image_0_mask.png")
    return folder


def encoded_before(tmp_path: Path) -> str:
    """A cache folder for tests that are not about encoding: captions and latents that any of them has made before."""
    return str(tmp_path.parent / "encoded")


def make_tiny_job(folder: Path, family_name: str = "flux2", **sections: dict[str, Any]) -> JobConfig:
    """A job over folder/model and folder/data (made if missing) into folder/run; sections override its values."""
    if not (folder / "model").exists():
        save_tiny_pipeline(folder / "model", family_name)
        save_tiny_dataset(folder / "data")
        save_tiny_dataset(folder / "held_out", num_images=2, seed=9)
    values: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"folders": [{"path": str(folder / "data")}], "resolutions": [32]}, "split": {"devices": ["cpu"]},
        "lora": {"rank": 4, "alpha": 4}, "cache": {"folder": str(folder / "cache"), "dtype": "float32"},
        "optimizer": {"learning_rate": 1e-3}, "train": {"steps": 6, "batch_size": 2, "seed": 3},
        "evaluation": {"folder": str(folder / "held_out"), "quantiles": [0.25, 0.75]},
        "output": {"folder": str(folder / "run"), "save_every_steps": 2, "lora_dtype": "float32", "tensorboard": False},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return make_job(values)


def make_cards_job(folder: Path, run: str, family_name: str = "flux2", **sections: dict[str, Any]) -> JobConfig:
    """A job with dropout over two emulated cards, into folder/run, that saves at its end; sections replace its own."""
    values: dict[str, dict[str, Any]] = {
        "split": {"devices": ["lazy:0", "lazy:1"]}, "cache": {"folder": encoded_before(folder), "vae_device": "cpu"},
        "lora": {"dropout": 0.3}, "output": {"folder": str(folder / run), "save_every_steps": 0},
    }  # fmt: skip
    return make_tiny_job(folder, family_name, **{**values, **sections})


def plain_loss(plan: JobPlan, model: torch.nn.Module, batch: LoadedBatch, generator: torch.Generator) -> torch.Tensor:
    """Of diffusers' class, with nothing of ours but how inputs are named; times by a logit-normal distribution."""
    u = torch.rand(len(batch.latents), generator=generator, dtype=torch.float64)
    noise = torch.randn(batch.latents.shape, generator=generator)
    t = 1 / (1 + torch.exp(-torch.special.ndtri(u)))
    shift = TINY[plan.family.name].shift(batch.num_tokens)
    t = (shift * t / (1 + (shift - 1) * t)).float().view(-1, 1, 1, 1, 1)
    x = (1 - t) * batch.latents + t * noise
    inputs = plan.family.make_inputs(x, t.flatten(), batch.text, plan.variant.training_guidance)
    output = model(**inputs, return_dict=False)[0]
    error = (plan.family.read_prediction(output, batch.latents) - (noise - batch.latents)) ** 2
    weight = torch.ones_like(error) if batch.mask is None else batch.mask.expand_as(error)
    return (error * weight).sum() / weight.sum()


def plain_losses(job: JobConfig, checkpoint: Path | None = None, position: tuple[int, int] = (0, 0)) -> list[float]:
    """A trainer of one page, of diffusers, PEFT and torch: nothing of ours but data order and random numbers.
    checkpoint: whose weights and AdamW's moments it begins with; position: epoch and index in the order of samples."""
    from devicebridge.jobs.encode_job import cache_job
    from devicebridge.jobs.job import check_job

    plan, settings = check_job(job), job.optimizer
    with EventLog(Path(job.output.folder) / "plain") as events:
        data, _ = cache_job(plan, events)
    model = getattr(diffusers, plan.family.transformer_class).from_pretrained(Path(job.model.path) / "transformer")
    model.requires_grad_(False)
    inside = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and "norm" not in name]
    targets = [name for name in inside if "transformer_blocks" in name or name.startswith("blocks.")]
    torch.manual_seed(job.train.seed)
    pattern = "|".join(name.replace(".", r"\.") for name in targets)
    config = peft.LoraConfig(r=job.lora.rank, lora_alpha=job.lora.alpha, target_modules=pattern)
    peft.inject_adapter_in_model(config, model)
    model.train()
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    if checkpoint is not None:
        weights, moments = (load_file(checkpoint / f"{name}.safetensors") for name in ("adapter", "optimizer"))
        for index, (name, each) in enumerate(trained.items()):
            each.data.copy_(weights[name.replace(".default", "")])
            kept = {key: moments[f"state.{index}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
            optimizer.state[each] = {key: tensor.clone() for key, tensor in kept.items()}
    order = BatchOrder(plan.samples, batch_size=job.train.batch_size, seed=job.train.seed)
    order.load_state_dict({"epoch": position[0], "index": position[1]})
    losses, count = [], job.train.gradient_accumulation_steps
    for step in range(0 if checkpoint is None else int(checkpoint.name.removeprefix("step-")), job.train.steps):
        falling = 1 - (step / (job.train.steps - 1)) if job.schedule.name == "linear" else 1.0
        optimizer.param_groups[0]["lr"] = settings.learning_rate * falling
        losses.append(0.0)
        for index in range(count):
            chosen = order.next()
            batch = data.load(chosen.indices, chosen.captions)
            loss = plain_loss(plan, model, batch, make_generator(job.train.seed, "train", step, index)) / count
            loss.backward()
            losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(trained.values(), job.train.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same_run(found: TrainingResult, expected: TrainingResult) -> None:
    """In losses, also of held-out samples, and in the LoRA's file byte for byte."""
    assert found.losses == expected.losses
    assert (found.eval_before, found.eval_after) == (expected.eval_before, expected.eval_after)
    assert found.lora_path is not None and expected.lora_path is not None
    assert found.lora_path.read_bytes() == expected.lora_path.read_bytes()


def run_on_cards(job: JobConfig, cards: int = 3, **arguments: Any) -> TrainingResult:
    """run_job over so many emulated cards."""
    from devicebridge.jobs.job import run_job
    from devicebridge.tests.emulated import emulated_cards

    with emulated_cards(cards):
        return run_job(job, **arguments)


def run_steps(job: JobConfig, count: int = 1, cards: int = 0) -> TrainingResult:
    """Train so many steps of the job and stop; over emulated cards, if any are named."""
    from devicebridge.jobs.job import run_job  # not where a tiny model is all that is wanted

    seen: list[Event] = []
    run = partial(run_on_cards, cards=cards) if cards else run_job
    stopped = run(job, on_event=seen.append, should_stop=lambda: sum(e.kind == "step" for e in seen) >= count)
    assert (stopped.status, stopped.step) == ("stopped", count)
    return stopped
