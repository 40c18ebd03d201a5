"""A model cut down to two blocks of every kind, and one training step of it: what dry runs go by."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import put_tensor
from ..config.job import LoraSettings
from ..families.comfy.inputs import STREAM, VOICE, option_path, stream_shapes
from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from ..parallel.local.block_collectives import attach_collectives
from ..parallel.local.shard_trees import shares_in
from ..parallel.local.shards import BlockShard, divide_block, find_plan
from ..parallel.placement import block_names
from ..quantization.quantize import Quantizer, QuantizeSettings, Stored8
from ..training.adapter import apply_lora, find_targets
from ..training.objective import predict, prediction_loss

META = torch.device("meta")
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim")  # what transformer configs call the width of the text states
_POOLED_WIDTHS = ("pooled_projection_dim",)


# What code that was not written for tensors without data may raise.
_BY_FOREIGN_CODE = (TypeError, AttributeError, LookupError, RuntimeError, AssertionError)


class NoForecast(ValueError):
    """Nobody can tell what a step of this model holds; it can be trained all the same."""

    def __init__(self, title: str, reason: str) -> None:
        super().__init__(f"there is no forecast for {title}: {reason}; it is trained split by size")
        self.reason = reason


@dataclass(frozen=True, eq=False)
class SampleText:
    """What one of ComfyUI's own models is given beside the noise, of one sample: of a job what takes the most.

    Streams of latents after the first are in it by their sides, as STREAM has them.
    """

    tensors: Mapping[str, torch.Tensor]

    @functools.cached_property
    def without_streams(self) -> SampleText:
        """The same for latents of one stream, as pictures between steps are."""
        return SampleText({name: each for name, each in self.tensors.items() if not name.startswith(STREAM)})

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class Work:
    """What a step computes; dtype is of frozen weights and computation.

    shares: of devices that compute each block together; what is run is that of the last one. (1,) is one device alone.
    text: None where the model's description says how large it is.
    """

    latent_shape: tuple[int, int, int, int]  # of one sample. [C, F, H, W]
    batch_size: int
    dtype: torch.dtype
    quantize: QuantizeSettings | None
    lora: LoraSettings
    shares: tuple[int, ...] = (1,)
    text: SampleText | None = None

    @property
    def num_devices(self) -> int:
        """That compute each block together."""
        return len(self.shares)

    @property
    def streams(self) -> list[tuple[int, ...]]:
        """Shapes of what the latents of one sample are packed of; [] for one stream."""
        others = stream_shapes({} if self.text is None else {n: each[None] for n, each in self.text.tensors.items()})
        return [self.latent_shape, *others] if others else []

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Of a batch's latents, as training has them."""
        sides = (1, 1, 1, sum(map(prod, self.streams))) if self.streams else self.latent_shape
        return self.batch_size, *sides


def voice_as_sound(family: ModelFamily, work: Work) -> Work:
    """For what runs without numbers, by which LTX-2 places a reference of sound: as much more sound of its own."""
    tensors = {} if work.text is None else work.text.tensors
    voices = [name for name in tensors if option_path(name)[:1] == (VOICE,)]
    if not voices or family.comfy is None or not family.comfy.sound:
        return work
    channels, bins = family.comfy.sound
    own = tensors.get(f"{STREAM}1", torch.empty(0, channels, 0, bins))
    longer = torch.empty(0, channels, own.shape[2] + max(len(tensors[name]) for name in voices), bins)
    others = {name: each for name, each in tensors.items() if name not in voices}
    return replace(work, text=SampleText({**others, f"{STREAM}1": longer}))


@dataclass
class ShortModel:
    """Every kind of block twice, the second time with an input that carries gradients.

    Of one of ComfyUI's own models the first two of a kind, for its blocks need not take what they return.
    """

    model: nn.Module
    names: tuple[str, ...]
    kind_of: list[int]  # by block of the whole model
    kinds: list[str] = field(default_factory=list)  # fqn of the first block of each kind
    modules: list[nn.Module] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # the kind of each block that a forward calls, in order

    def is_last(self, call: int) -> bool:
        """Whether this call, counted from 0, is the last one of its kind: the one to look at."""
        return self.calls[call] not in self.calls[call + 1 :]


def shorten(model: nn.Module, family: ModelFamily, work: Work) -> ShortModel:
    """Cut a model down, with its linears quantized and LoRA attached as a job would; parameters stay on meta."""
    names = block_names(model, family)
    targets = set(find_targets(model, family, work.lora))
    quantizer = None if work.quantize is None else Quantizer(family, work.quantize)
    known: dict[Any, int] = {}
    sample = ShortModel(model, names, [])
    for name in names:
        block = model.get_submodule(name)
        kind = name.rpartition(".")[0], _signature(name, block, targets, quantizer)
        if kind not in known:
            known[kind] = len(known)
            sample.kinds.append(name)
            sample.modules.append(block)
        sample.kind_of.append(known[kind])
    renamed = _keep_kinds(sample, family) if family.native is None else _keep_first_two(sample, family)
    _make_trainable(model, family, work, renamed, targets)
    return sample


def _make_trainable(
    model: nn.Module, family: ModelFamily, work: Work, renamed: Mapping[str, str], targets: Collection[str]
) -> None:
    """Quantize a model's linears and attach a LoRA as a job would; parameters stay on meta.

    Args:
        renamed: what its blocks are called in the whole model, where they have other names.
        targets: linears that LoRA adapts, by their names in the whole model.
    """
    quantizer = None if work.quantize is None else Quantizer(family, work.quantize)
    _cast(model, work.dtype)
    shards = _divide(model, renamed, family, work.shares) if work.num_devices > 1 else {}
    if quantizer is not None:
        for fqn, module in list(model.named_modules()):
            whole = _whole_name(fqn, renamed)
            if isinstance(module, nn.Linear) and quantizer.is_wanted(whole, module):
                stored = _empty_weight(module, quantizer.settings)
                model.set_submodule(fqn, quantizer.take(whole, module, stored, module.weight.dtype))
    short = tuple(fqn for fqn, _ in model.named_modules() if _whole_name(fqn, renamed) in targets)
    apply_lora(model, family, replace(work.lora, targets=short, layers=""), seed=0)
    if shards:
        parts = _OwnParts(work.num_devices, shards)
        attach_collectives(shards, work.num_devices - 1, lambda: parts)


def _divide(
    model: nn.Module, blocks: Iterable[str], family: ModelFamily, shares: Sequence[int]
) -> dict[str, BlockShard]:
    """Leave of these blocks what the last of several devices computes."""
    shards = {}
    for name in blocks:
        block = model.get_submodule(name)
        plan, found = find_plan(family.tensor, block), shares_in(block, family, shares)
        assert plan is not None, "shares_in has looked"
        shards[name] = divide_block(block, plan, found, len(shares) - 1, lambda weight, part: part.copied(weight))
    return shards


class _OwnParts:
    """A device that meets nobody: what others would bring are tensors of the right size."""

    def __init__(self, num_devices: int, shards: Mapping[str, BlockShard]) -> None:
        self._num_others = num_devices - 1
        self._widths = {
            f"{name}.{meeting.name}": meeting.width
            for name, shard in shards.items()
            for meeting in shard.meetings
            if meeting.how == "join"
        }

    def all_gather(self, rank: int, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        if name in self._widths:
            return [tensor.new_empty(*tensor.shape[:-1], self._widths[name] - tensor.shape[-1]), tensor]
        return [*(torch.empty_like(tensor) for _ in range(self._num_others)), tensor]

    def all_reduce(self, rank: int, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, self.all_gather(rank, name, tensor))


def _empty_weight(linear: nn.Linear, settings: QuantizeSettings) -> Stored8:
    """As if a file had it in 8 bits already: rounding nothing takes longer than the rest of a dry run."""
    values = torch.empty(linear.weight.shape, dtype=settings.stored_dtype, device=META)
    scale = torch.empty((linear.out_features, 1), dtype=torch.float32, device=META)
    return Stored8(values, scale, settings.rotation_of(linear.in_features))


def _signature(name: str, block: nn.Module, targets: set[str], quantizer: Quantizer | None) -> Any:
    """Equal for blocks that cost alike."""
    shapes = tuple((leaf, tuple(tensor.shape)) for leaf, tensor in block.named_parameters())
    adapted = tuple(leaf for leaf, _ in block.named_modules() if f"{name}.{leaf}" in targets)
    rounded = ()
    if quantizer is not None:
        rounded = tuple(leaf for leaf, m in block.named_modules() if quantizer.is_wanted(f"{name}.{leaf}", m))
    return type(block), shapes, adapted, rounded


def _keep_kinds(sample: ShortModel, family: ModelFamily) -> dict[str, str]:
    """Cut the block lists down to two entries per kind; returns new fqn -> fqn in the whole model."""
    renamed: dict[str, str] = {}
    for block_list in family.block_lists:
        mine = [i for i, name in enumerate(sample.kinds) if name.rpartition(".")[0] == block_list.name]
        renamed |= {f"{block_list.name}.{2 * order}": sample.kinds[i] for order, i in enumerate(mine)}
        twice = [sample.modules[i] for i in mine for _ in range(2)]
        setattr(sample.model, block_list.name, nn.ModuleList(twice))
        sample.calls += [i for i in mine for _ in range(2)]
    return renamed


def _keep_first_two(sample: ShortModel, family: ModelFamily) -> dict[str, str]:
    """The same for one of ComfyUI's own models: of each kind the first two blocks, or the only one."""
    renamed: dict[str, str] = {}
    for block_list in family.block_lists:
        kept: list[str] = []
        for name, kind in zip(sample.names, sample.kind_of, strict=True):
            if name.rpartition(".")[0] == block_list.name and sample.calls.count(kind) < 2:
                kept.append(name)
                sample.calls.append(kind)
        blocks = [sample.model.get_submodule(name) for name in kept]
        if isinstance(getattr(sample.model, block_list.name), nn.ModuleDict):
            keys = [name.rpartition(".")[2] for name in kept]
            setattr(sample.model, block_list.name, nn.ModuleDict(dict(zip(keys, blocks, strict=True))))
            renamed |= {name: name for name in kept}
        else:
            setattr(sample.model, block_list.name, nn.ModuleList(blocks))
            renamed |= {f"{block_list.name}.{order}": name for order, name in enumerate(kept)}
    return renamed


def _whole_name(fqn: str, renamed: Mapping[str, str]) -> str:
    block = ".".join(fqn.split(".")[:2])
    return renamed[block] + fqn.removeprefix(block) if block in renamed else fqn


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As loading does: the model's type, but float32 where the class keeps it."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in list(model.named_parameters()):
        wanted = dtype if kept.isdisjoint((name, *name.split("."))) else torch.float32
        put_tensor(model, name, torch.empty(parameter.shape, dtype=wanted, device=META))


# ---- the step


def step_on_meta(model: Any, info: CheckpointInfo, variant: Variant, work: Work, latents: torch.Tensor) -> None:
    """A micro-batch as Trainer computes it, of a model without numbers. What is not needed any more is let go at once,
    as there: dry runs count what is alive.

    Raises: NoForecast where one of ComfyUI's classes cannot do that: it reads numbers, or counts its blocks.
    """
    family = info.family
    try:
        prediction = predict(
            family,
            model,
            latents.to(torch.float32 if family.host else work.dtype, copy=True),
            torch.full((work.batch_size,), 0.5, device=latents.device),
            _make_given(info, variant, work, latents),
            variant.training_guidance,
        )
        loss = prediction_loss(prediction, latents.clone())
        del prediction
        loss.backward()
    except _BY_FOREIGN_CODE as error:
        if family.host is None:
            raise
        said = f"its forward does not run without numbers, or without all blocks ({type(error).__name__}: {error})"
        raise NoForecast(family.title, said) from error


def _make_given(info: CheckpointInfo, variant: Variant, work: Work, latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Text and conditions of the sizes that training has."""
    batch, device = work.batch_size, latents.device
    if info.family.host is not None:
        given = info.family.host.example(batch, device, None if work.text is None else work.text.tensors)
        return given | {f"{STREAM}{n}": latents.new_empty(batch, 0, *each) for n, each in enumerate(work.streams)}
    text = {
        encoder.output: torch.randn(batch, *text_shape(encoder, info.config), dtype=work.dtype, device=device)
        for encoder in variant.text_encoders
    }
    return {**text, **_make_conditions(variant, info.config, latents, work.dtype)}


def _make_conditions(
    variant: Variant, config: Mapping[str, Any], latents: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """What an image-to-video variant is given besides text."""
    batch, channels, *sides = latents.shape
    if variant.condition == "first_frame":
        size = batch, config["in_channels"] - channels, *sides
        return {"image_condition": latents.new_empty(size, dtype=dtype)}
    return {"first_latents": latents[:, :, :1].to(dtype, copy=True)} if variant.condition == "first_latents" else {}


def text_shape(encoder: TextEncoderSpec, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of one sample's states, from what the transformer's config says of their width. [S, D] or [D]

    Raises: ValueError for a config that says nothing.
    """
    keys = _POOLED_WIDTHS if encoder.kind == "pooled" else _TEXT_WIDTHS
    width = next((config[key] for key in keys if config.get(key)), None)
    if width is None:
        raise ValueError(
            f"the transformer's config names no width for {encoder.output}; one of {', '.join(keys)} was expected. "
            "Add the key's name to planning/short_model.py"
        )
    return (width,) if encoder.kind == "pooled" else (encoder.max_length, width)
