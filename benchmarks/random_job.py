"""A training job without files: a FLUX.2 of random weights on its devices, samples in memory, a trainer over both.

Everything from the weights on is the pack's own code: placement, quantizing layer by layer, the split, LoRA, objective,
optimizer and loop. Scripts that use this have called load_pack() before they import it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo, make_published_info
from devicebridge.config.job import JobConfig, make_job
from devicebridge.data.samples import BatchOrder, Sample
from devicebridge.encoding.store import CacheStore
from devicebridge.families.registry import find_family
from devicebridge.families.spec import ModelFamily, Variant
from devicebridge.parallel.devices import available_devices
from devicebridge.parallel.local.bridge import BlockSplit
from devicebridge.parallel.offload.weights import WeightOffload
from devicebridge.parallel.placement import Placement, block_names, parameter_bytes, plan_placement
from devicebridge.parallel.runner import Runner
from devicebridge.patches.hooks import parameters_on_meta
from devicebridge.planning.cards import Card, cards_of
from devicebridge.planning.costs import ModelCosts
from devicebridge.planning.question import Question
from devicebridge.quantization.quantize import (
    FileFormat,
    QuantizeSettings,
    Stored8,
    empty_stored,
    is_wanted,
    round_linear,
    take_stored,
)
from devicebridge.quantization.stored import PACKINGS, ROWS
from devicebridge.tests.emulated import CARDS
from devicebridge.training.adapter import LoraHandle, apply_lora
from devicebridge.training.batches import CachedSamples
from devicebridge.training.compile_check import check_compiled, worst_of
from devicebridge.training.loop import Trainer
from devicebridge.training.objective import Objective, make_noise_schedule
from devicebridge.training.optimizer import learning_rate_factor
from peft.tuners.lora import Linear as LoraLinear
from provenance import say
from torch import nn

FAMILY = find_family("flux2")
VARIANT = FAMILY.variant("flux2-dev")
SCHEMES = ("bf16", "fp8", "int8", "fp8-compute", "int8-compute")  # bf16: nothing is quantized
# As files hold them, "stored": of random numbers, since rounding 16 bits to GGUF's blocks is nobody's task here.
STORED = {
    "Q8_0": FileFormat(torch.uint8, 0, False, "Q8_0"),
    "Q4_K": FileFormat(torch.uint8, 0, False, "Q4_K"),
    "int8, rotated": FileFormat(torch.int8, 256, True, ROWS),
    "float8": FileFormat(torch.float8_e4m3fn, 0, False, ROWS),
}
TINY_CONFIG = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 8,
    "joint_attention_dim": 32,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}

# Puts values into the new parameter of this name, in place; the generator is on its device and its own.
Fill = Callable[[str, torch.Tensor, torch.Generator], None]


@dataclass(frozen=True)
class RandomModel:
    """A transformer on its devices, split, frozen, without LoRA."""

    scheme: str
    model: Any
    split: BlockSplit
    family: ModelFamily = FAMILY

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return self.split.placement.used_devices


# ---- model


def make_config(layers: tuple[int, int], **changes: Any) -> dict[str, Any]:
    """FLUX.2-dev with this many double and single blocks."""
    return dict(VARIANT.transformer_config) | {"num_layers": layers[0], "num_single_layers": layers[1]} | changes


def plan_devices(config: Mapping[str, Any], devices: Sequence[torch.device], family: ModelFamily = FAMILY) -> Placement:
    """Blocks to devices by their bytes in bf16: one cut for all schemes, so that their cards can be compared."""
    model = make_empty(config, family)
    names = block_names(model, family)
    sizes, main_device = parameter_bytes(model, names, 2)
    return plan_placement(names, devices, block_cost=sizes, main_cost=main_device)


def make_empty(config: Mapping[str, Any], family: ModelFamily = FAMILY) -> Any:
    """The family's transformer without memory."""
    with torch.device("meta"):
        return getattr(diffusers, family.transformer_class)(**config).to(torch.bfloat16)


def fill_normal(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Normal with a deviation of 0.02; around 1 for the weights of norms."""
    tensor.normal_(0, 0.02, generator=generator)
    if tensor.ndim == 1:
        tensor.add_(1.0)


def make_random_model(
    config: Mapping[str, Any],
    placement: Placement,
    scheme: str,
    *,
    seed: int = 0,
    fill: Fill = fill_normal,
    family: ModelFamily = FAMILY,
    offload: WeightOffload | None = None,
) -> RandomModel:
    """Draw a model layer by layer, then split it.

    Args:
        offload: takes the layers of its blocks to the host as they are done; to be attached when the LoRA is.
    """
    model = draw_model(config, placement.device_of, scheme, seed=seed, fill=fill, family=family, store=offload)
    split = BlockSplit(model.requires_grad_(False), family, placement)
    return RandomModel(scheme, model, split, family)


def draw_model(
    config: Mapping[str, Any],
    device_of: Callable[[str], torch.device],
    scheme: str,
    *,
    seed: int = 0,
    fill: Fill = fill_normal,
    family: ModelFamily = FAMILY,
    store: WeightOffload | None = None,
) -> Any:
    """Draw each layer on its device and quantize it before the next one exists.

    The weights before rounding depend on seed and fill alone, so all schemes round the same model.

    Args:
        store: takes layers as they are done.
    """
    with parameters_on_meta():  # Wan's rotary tables are computed in the constructor
        model = getattr(diffusers, family.transformer_class)(**config)
    of_file = STORED.get(scheme)
    settings = None if scheme == "bf16" else QuantizeSettings("stored" if of_file else scheme)  # type: ignore[arg-type]
    seeds = {name: seed * 100_003 + index for index, (name, _) in enumerate(model.named_parameters())}
    if store is not None:
        store.begin(model, [fqn for fqn, module in model.named_modules() if module._parameters])
    for fqn in [fqn for fqn, _ in model.named_modules()]:  # names: the modules would be held, and their weights
        module = model.get_submodule(fqn)
        if of_file is not None and isinstance(module, nn.Linear):
            module.file_format = of_file  # type: ignore[assignment]
        _materialize(fqn, module, device_of(fqn), seeds, fill)
        if settings is not None and is_wanted(module, fqn, family, settings):
            if of_file is not None:
                done = take_stored(fqn, module, _stored_as(module), torch.bfloat16, settings)
            else:
                done = round_linear(module, settings)
            model.set_submodule(fqn, done)
        if store is not None and any(parameter is not None for parameter in module._parameters.values()):
            store.finish(fqn)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = buffer.to(device_of(name))
    return model


@torch.no_grad()
def _materialize(fqn: str, module: nn.Module, device: torch.device, seeds: Mapping[str, int], fill: Fill) -> None:
    for leaf, parameter in list(module.named_parameters(recurse=False)):
        name = f"{fqn}.{leaf}" if fqn else leaf
        data = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        fill(name, data, make_device_generator(device, seeds[name]))
        module._parameters[leaf] = nn.Parameter(data, requires_grad=False)


def _stored_as(module: nn.Linear) -> Stored8:
    """Random numbers in the place of a linear's weight, as its file_format has them; about as large."""
    found = empty_stored(module, QuantizeSettings("stored"))
    device, like = module.weight.device, found.weight
    bits = torch.randint(0, 256, like.shape, dtype=torch.uint8, device=device)
    if packed := PACKINGS.get(found.form.packing):
        blocks = bits.view(-1, packed.num_bytes)
        for start in packed.halves:
            blocks[:, start : start + 2] = torch.tensor([1e-4], dtype=torch.float16).view(torch.uint8).to(device)
    elif like.dtype is not torch.int8:
        bits &= 0xBF  # no NaN
    return replace(found, weight=bits.view(like.dtype), scale=torch.full(found.scale.shape, 3e-4, device=device))


def make_device_generator(device: torch.device, seed: int) -> torch.Generator:
    """A generator on the device; emulated cards draw on the CPU."""
    return torch.Generator(device if device.type == "cuda" else "cpu").manual_seed(seed)


# ---- what a model holds


def base_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Every tensor the model holds outside LoRA."""
    held = [*model.named_parameters(), *model.named_buffers()]
    return [tensor.detach() for name, tensor in held if "lora_" not in name]


def bytes_per_device(tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Bytes by device name."""
    found: dict[str, int] = {}
    for tensor in tensors:
        found[str(tensor.device)] = found.get(str(tensor.device), 0) + tensor.numel() * tensor.element_size()
    return found


def checksum(tensors: Sequence[torch.Tensor]) -> list[int]:
    """One sum of its bytes per tensor: equal for equal bytes, and changed by any training of the tensor."""
    sums = [tensor.contiguous().view(-1).view(torch.uint8).sum(dtype=torch.int64) for tensor in tensors]
    return [int(value) for value in sums]


# ---- job


def make_random_job(**sections: dict[str, Any]) -> JobConfig:
    """A job whose paths name nothing; sections override its values."""
    values: dict[str, Any] = {
        "model": {"path": "random weights"},
        "data": {"folders": [{"path": "random samples"}]},
        "train": {"steps": 1000},
        "output": {"folder": "nowhere", "tensorboard": False},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return make_job(values)


class MemoryStore(CacheStore):
    """Cached entries that lie in memory."""

    def __init__(self, entries: Mapping[str, dict[str, torch.Tensor]]) -> None:
        super().__init__(Path("memory"))
        self._entries = entries

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        return self._entries.get(key)


def make_samples(
    latents: torch.Tensor,
    text: torch.Tensor | Mapping[str, torch.Tensor],
    family: ModelFamily = FAMILY,
    variant: Variant = VARIANT,
) -> CachedSamples:
    """Samples as the cache would give them, each with a caption of its own.

    Args:
        latents: [N, C, F, H, W], float32.
        text: [N, S, D] for the first encoder, or of every encoder by the name of its output.
    """
    latent = family.latent_of(variant)
    stride = latent.spatial_stride
    bucket = latents.shape[-2] * stride, latents.shape[-1] * stride
    samples = [
        Sample(
            *(f"{i}.png", f"caption {i}", None, bucket, (0, 0, *bucket), bucket),
            latents_key=f"latent {i}",
            text_keys=((f"caption {i}",), ()),
        )
        for i in range(len(latents))
    ]
    entries = {f"latent {index}": {"latents": each} for index, each in enumerate(latents)}
    by_name = text if isinstance(text, Mapping) else {variant.text_encoders[0].output: text}
    entries |= {s.caption: {name: states[i] for name, states in by_name.items()} for i, s in enumerate(samples)}
    return CachedSamples(MemoryStore(entries), samples, False, latent.num_tokens_per_cell)


def num_text_tokens(is_tiny: bool) -> int:
    """Of every caption; FLUX.2's own encoder makes as many, whatever the caption."""
    return 32 if is_tiny else 512


def make_picture_samples(config: Mapping[str, Any], side: int, *, is_tiny: bool) -> CachedSamples:
    """Two random pictures of side x side pixels with random captions, for a FLUX.2 of this config."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, config["in_channels"], 1, side // 16, side // 16, generator=generator)
    text = torch.randn(2, num_text_tokens(is_tiny), config["joint_attention_dim"], generator=generator)
    return make_samples(latents, text.bfloat16())


def make_info(config: Mapping[str, Any], *, is_tiny: bool) -> CheckpointInfo:
    """What a planner knows of a FLUX.2 of this config, without a file."""
    encoders = tuple(replace(each, max_length=num_text_tokens(is_tiny)) for each in VARIANT.text_encoders)
    return replace(make_published_info(VARIANT.name), config=config, variant=replace(VARIANT, text_encoders=encoders))


def make_question(
    job: JobConfig,
    info: CheckpointInfo,
    cards: Sequence[Card],
    side: int,
    cuts: Sequence[int] | None = None,
    costs: ModelCosts | None = None,
) -> Question:
    """What a planner is asked about a job on squares of so many pixels.

    Args:
        costs: of the model, with its dry runs, where several questions share them.
    """
    assert info.variant is not None
    costs, given = costs or ModelCosts(info, info.variant), None if cuts is None else tuple(cuts)
    return Question(costs, job, tuple(cards), (side, side), cuts=given)


def find_cards(devices: Sequence[torch.device], *, is_tiny: bool) -> list[Card]:
    """The devices as a planner sees them; emulated ones have 1 GB each."""
    if is_tiny:
        return [Card(device, 10**9, 10**9, has_context=True) for device in devices]
    cards = cards_of(devices)
    assert cards is not None
    return cards


def take_devices(parser: argparse.ArgumentParser, most: int, *, is_tiny: bool) -> list[torch.device]:
    """As many GPUs as there are, or emulated cards; ends the program where there are not two."""
    devices = list(CARDS[:most]) if is_tiny else available_devices()[:most]
    if len(devices) < 2:
        parser.error(f"this needs two GPUs and found {len(devices)}; --tiny runs on the CPU")
    return devices


def attach_lora(built: RandomModel, job: JobConfig, *, seed: int | None = None, is_fused: bool = True) -> LoraHandle:
    """A fresh LoRA, and the model in training mode with every block checkpointed if the job says so.

    Args:
        seed: of the LoRA alone; None takes the job's.
        is_fused: False leaves every LoRA layer as PEFT computes it.
    """
    lora = apply_lora(built.model, built.family, job.lora, seed=job.train.seed if seed is None else seed)
    if not is_fused:
        for layer in [m for m in built.model.modules() if type(m).__mro__[1] is LoraLinear]:
            layer.__class__ = LoraLinear
    built.model.train()
    if job.train.gradient_checkpointing:
        built.model.enable_gradient_checkpointing(built.split.checkpoint)
    return lora


def make_trainer(
    built: RandomModel,
    lora: LoraHandle,
    job: JobConfig,
    train_data: CachedSamples,
    eval_data: CachedSamples | None = None,
    variant: Variant = VARIANT,
    runner: Runner | None = None,
) -> Trainer:
    """The loop of a job over this model; only train_step and evaluate may be called, for there is nowhere to save."""
    schedule, dtype = make_noise_schedule(job.objective, built.family, variant), getattr(torch, job.model.dtype)
    return Trainer(
        job=job,
        objective=Objective(job.objective, built.family, variant, schedule, dtype, built.devices[0].type == "cuda"),
        runner=runner or Runner(built.model, built.split.main_device),
        lora=lora,
        train_data=train_data,
        eval_data=eval_data,
        order=BatchOrder(train_data.samples, batch_size=job.train.batch_size, seed=job.train.seed, caption_dropout=0.0),
        identity={},
        devices=built.devices,
        events=None,  # type: ignore[arg-type]
        save_lora=_refuse_to_save,
    )


def demand_right_gradients(trainer: Trainer) -> None:
    """Of compiled blocks, if there are any.

    Raises: RuntimeError if they are others than of uncompiled ones: how fast they are means nothing then.
    """
    if trainer.compiled:
        found = check_compiled(trainer)
        if not found or not trainer.compiled:
            raise RuntimeError("compiled blocks were not compared with uncompiled ones, or are wrong: see above")
        say(f"compiled blocks against uncompiled ones: {worst_of(found)}")


def run_steps(trainer: Trainer, on_step: Callable[[int, float], None] = lambda number, loss: None) -> list[float]:
    """All steps of the job at its schedule's learning rate, without saving or evaluating -> loss of each."""
    job, losses = trainer.job, []
    for number in range(job.train.steps):
        factor = learning_rate_factor(job.schedule, number, job.train.steps)
        losses.append(trainer.train_step(job.optimizer.learning_rate * factor))
        trainer.step += 1
        on_step(number, losses[-1])
    return losses


def _refuse_to_save(path: Path) -> Path:
    raise RuntimeError(f"a job in memory cannot save to {path}")
