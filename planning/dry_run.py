"""A training step on the meta device: the model cut down to two blocks of every kind, and the meter that counts memory.
Attention and norms go the way of cards' kernels; of CPU and emulated cards the plain way, as these really hold."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import put_tensor, weight_types
from ..config.job import LoraSettings
from ..families.comfy.inputs import STREAM, VOICE, option_path, stream_shapes
from ..families.spec import ModelFamily, Variant
from ..parallel.devices import CPU
from ..parallel.local.tokens import OneDeviceError
from ..parallel.placement import block_names
from ..quantization.kernel_choice import DeviceKernels, KernelChoice, using_kernels
from ..quantization.quantize import QuantizeSettings, empty_stored, is_wanted, take_stored
from ..training.adapter import apply_lora, find_targets
from ..training.objective import predict, prediction_loss

META = torch.device("meta")

# What code that was not written for tensors without data may raise.
BY_FOREIGN_CODE = (TypeError, AttributeError, LookupError, RuntimeError, AssertionError)


class NoForecast(ValueError):
    """Nobody can tell what a step of this model holds; it can be trained all the same. time: of the run, if known."""

    def __init__(self, title: str, reason: str, time: str = "") -> None:
        self.reason, self.time = reason, time
        said = f"there is no forecast of memory for {title}: {reason}; it is trained split by size"
        super().__init__("; ".join(filter(None, [said, time])))


@dataclass(frozen=True, eq=False)
class SampleText:
    """What one of ComfyUI's models is given beside the noise, of the sample that takes the most. Streams of latents
    after the first are in it by their sides, as STREAM has them."""

    tensors: Mapping[str, torch.Tensor]

    @functools.cached_property
    def without_streams(self) -> SampleText:
        """The same for latents of one stream, as pictures between steps are."""
        return SampleText({name: each for name, each in self.tensors.items() if not name.startswith(STREAM)})


@dataclass(frozen=True)
class Work:
    """What a step computes; dtype is of frozen weights and computation. text: None where the model's description says
    how large it is. row_shares: of devices that share out the rows of each sample, relative to each other; the first
    one runs. has_prior: whether a prediction of the model without its LoRA is held."""

    latent_shape: tuple[int, int, int, int]  # of one sample. [C, F, H, W]
    batch_size: int
    dtype: torch.dtype
    quantize: QuantizeSettings | None
    lora: LoraSettings
    text: SampleText | None = None
    row_shares: tuple[float, ...] = ()
    has_prior: bool = False

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


def with_sound(family: ModelFamily, work: Work) -> Work:
    """With the sound that the model must be given; a reference of sound is as much more sound of its own."""
    comfy, tensors = family.comfy, {} if work.text is None else work.text.tensors
    if not comfy.sound:
        return work
    voices = [name for name in tensors if option_path(name)[:1] == (VOICE,)]
    own = tensors.get(f"{STREAM}1")
    if own is None and comfy.silence is not None:
        own = torch.empty(0, *comfy.silence(work.latent_shape[1]))
    if voices:
        own = torch.empty(0, *comfy.sound) if own is None else own
        sides = list(own.shape)
        sides[1 + comfy.sound.index(0)] += max(len(tensors[name]) for name in voices)
        own = torch.empty(sides)
    if own is None:
        return work
    others = {name: each for name, each in tensors.items() if name not in voices}
    return replace(work, text=SampleText({**others, f"{STREAM}1": own}))


@dataclass(frozen=True)
class ShortModel:
    """The first two blocks of every kind, the second with an input that carries gradients; or the only one. names and
    kind_of are of all blocks of the whole model, calls is the kind of each block that a forward calls."""

    model: nn.Module
    names: tuple[str, ...]
    kind_of: list[int]
    calls: list[int]


def shorten(model: nn.Module, family: ModelFamily, work: Work) -> ShortModel:
    """Cut a model down, with its linears quantized and LoRA attached as a job would; parameters stay on meta."""
    names = block_names(model, family)
    targets = set(find_targets(model, family, work.lora))
    known: dict[Any, int] = {}  # kinds, by what is equal for blocks of one list that cost alike
    kind_of = []
    for name in names:
        block = model.get_submodule(name)
        inner = [(leaf, f"{name}.{leaf}", module) for leaf, module in block.named_modules()]
        shapes = tuple((leaf, tuple(tensor.shape)) for leaf, tensor in block.named_parameters())
        adapted = tuple(leaf for leaf, fqn, _ in inner if fqn in targets)
        wanted = ((leaf, m) for leaf, fqn, m in inner if is_wanted(m, fqn, family, work.quantize))
        rounded = tuple((leaf, getattr(m, "file_format", None)) for leaf, m in wanted)
        alike = name.rpartition(".")[0], type(block), shapes, adapted, rounded
        kind_of.append(known.setdefault(alike, len(known)))
    calls: list[int] = []
    renamed: dict[str, str] = {}  # new fqn of a block -> fqn in the whole model
    for block_list in family.block_lists:
        kept: dict[str, nn.Module] = {}
        for name, kind in zip(names, kind_of, strict=True):
            if name.rpartition(".")[0] == block_list.name and calls.count(kind) < 2:
                kept[name] = model.get_submodule(name)
                calls.append(kind)
        if isinstance(getattr(model, block_list.name), nn.ModuleDict):
            blocks = {name.rpartition(".")[2]: block for name, block in kept.items()}
            setattr(model, block_list.name, nn.ModuleDict(blocks))
            renamed |= {name: name for name in kept}
        else:
            setattr(model, block_list.name, nn.ModuleList(kept.values()))
            renamed |= {f"{block_list.name}.{order}": name for order, name in enumerate(kept)}

    def whole_name(fqn: str) -> str:
        block = ".".join(fqn.split(".")[:2])
        return renamed[block] + fqn.removeprefix(block) if block in renamed else fqn

    dtype_of = weight_types(model, work.dtype)
    for name, parameter in list(model.named_parameters()):
        put_tensor(model, name, torch.empty(parameter.shape, dtype=dtype_of(name), device=META))
    for fqn, module in list(model.named_modules()):
        if work.quantize is not None and is_wanted(module, whole_name(fqn), family, work.quantize):
            # As if a file had it in 8 bits already: rounding nothing takes longer than the rest of a dry run.
            stored, dtype = empty_stored(module, work.quantize), module.weight.dtype
            model.set_submodule(fqn, take_stored(whole_name(fqn), module, stored, dtype, work.quantize))
    short = tuple(fqn for fqn, _ in model.named_modules() if whole_name(fqn) in targets)
    apply_lora(model, family, replace(work.lora, targets=short, layers=""), seed=0)
    return ShortModel(model, names, kind_of, calls)


def forward_on_meta(model: nn.Module, info: CheckpointInfo, variant: Variant, work: Work) -> tuple[float, int]:
    """Operations and kernels of a micro-batch's forward, of a whole model without numbers. Raises: as step_on_meta."""
    latents = torch.empty(work.batch_shape, device=META)
    with torch.inference_mode(False), torch.no_grad(), as_on_card(Kernels()), WorkMeter() as meter:
        step_on_meta(model, info, variant, work, latents)
    return meter.flops, meter.num_kernels


def step_on_meta(model: Any, info: CheckpointInfo, variant: Variant, work: Work, latents: torch.Tensor) -> None:
    """A micro-batch as Trainer computes it, of a model without numbers; without gradients its forward alone.
    Raises: NoForecast where one of ComfyUI's classes cannot do that: it reads numbers, or counts its blocks."""
    family = info.family
    prior = torch.empty_like(latents) if work.has_prior else None
    try:
        prediction = predict(
            family,
            model,
            latents.to(torch.float32 if family.host else work.dtype, copy=True),
            torch.full((work.batch_size,), 0.5, device=latents.device),
            _make_given(info, variant, work, latents),
            variant.training_guidance,
        )
        if torch.is_grad_enabled():
            loss = prediction_loss(prediction, latents.clone())
            if prior is not None:
                loss = loss + prediction_loss(prediction, prior)
            del prediction
            loss.backward()
    except BY_FOREIGN_CODE as error:
        if family.host is None or isinstance(error, OneDeviceError) or getattr(error, "plan", None):
            raise
        said = f"its forward does not run without numbers, or without all blocks ({type(error).__name__}: {error})"
        raise NoForecast(family.title, said) from error


def _make_given(info: CheckpointInfo, variant: Variant, work: Work, latents: torch.Tensor) -> dict[str, torch.Tensor]:
    """Text and conditions of the sizes that training has."""
    batch = work.batch_size
    states = make_text(info, variant, work.text, work.dtype, latents.device, batch)
    if info.family.host is not None:
        return states | {f"{STREAM}{n}": latents.new_empty(batch, 0, *each) for n, each in enumerate(work.streams)}
    if variant.condition == "first_frame":
        size = batch, info.config["in_channels"] - latents.shape[1], *latents.shape[2:]
        states["image_condition"] = latents.new_empty(size, dtype=work.dtype)
    if variant.condition == "first_latents":
        states["first_latents"] = latents[:, :, :1].to(work.dtype, copy=True)
    return states


def make_text(
    info: CheckpointInfo,
    variant: Variant,
    text: SampleText | None,
    dtype: torch.dtype,
    device: torch.device,
    batch: int = 1,
) -> dict[str, torch.Tensor]:
    """Text of the sizes that training has, by name; text is what one sample has, where that is known."""
    if info.family.host is not None:
        return info.family.host.example(batch, device, None if text is None else text.without_streams.tensors or None)
    comfy, states = info.family.comfy, {}
    for encoder in variant.text_encoders:
        width = info.config[comfy.pooled_width if encoder.kind == "pooled" else comfy.width]
        shape = (batch, width) if encoder.kind == "pooled" else (batch, encoder.max_length, width)
        states[encoder.output] = torch.randn(shape, dtype=dtype, device=device)
    return states


CARD_ROUNDING = 512  # bytes; torch's allocator for CUDA gives out multiples of it

# Of a card nobody has seen: as data-centre chips, which transpose a slice of the weight. Others take less.
UNSEEN_CARD: DeviceKernels = {
    torch.float8_e4m3fn: KernelChoice("vendor", "transpose", has_triton=True),
    torch.int8: KernelChoice("triton", "transpose", has_triton=True),
}


@dataclass(frozen=True)
class Kernels:
    """Which way operations take: a card's fused attention and norms, or torch's plain ones; and 8-bit products."""

    eight_bit: DeviceKernels = field(default_factory=lambda: UNSEEN_CARD)
    has_fused: bool = True
    rounding: int = CARD_ROUNDING


class MemoryMeter(TorchDispatchMode):
    """Bytes of the storages that operations make and somebody holds: `live` now, `peak` since start()."""

    def __init__(self, rounding: int = CARD_ROUNDING) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._rounding = rounding
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def start(self) -> int:
        """Measure the peak from here; returns what is alive."""
        self.peak = self.live
        return self.live

    def _rounded(self, size: int) -> int:
        return -(-size // self._rounding) * self._rounding

    def size(self, tensor: torch.Tensor) -> int:
        """What a storage of this tensor's own would count."""
        return self._rounded(tensor.numel() * tensor.element_size())

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Never count these, nor views of them: weights."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == CPU:
            # Some models join what they are given to numbers that are in host memory. There is no data: zeros.
            out = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        else:
            out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._add(storage, self._rounded(storage.nbytes()))
        # What an operation holds while it runs and does not show: attention sums the query's gradient in float32.
        hidden = 4 * args[1].numel() if func in _ATTENTION_BACKWARDS else 0
        self.peak = max(self.peak, self.live + hidden)
        return out

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, functools.partial(self._drop, key)), size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int, storage: weakref.ref[Any]) -> None:
        self.live -= self._known.pop(key)[1]


class WorkMeter(MemoryMeter):
    """Counts operations and kernels without gradients; with them ComfyUI's blocks only learn what they write into."""

    flops, num_kernels = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not torch.is_grad_enabled() and not func.is_view:
            self.num_kernels += 1
            if (count := flop_registry.get(func._overloadpacket)) is not None:
                self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out


_ATTENTION_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}


@contextlib.contextmanager
def as_on_card(kernels: Kernels) -> Iterator[None]:
    """Inside, operations on meta go the way of a card's kernels."""
    fused: AbstractContextManager[Any] = _AsOnCards() if kernels.has_fused else contextlib.nullcontext()
    with using_kernels(kernels.eight_bit), fused:
        yield


class _AsOnCards(TorchFunctionMode):
    """Leads attention and norms on meta to what cards run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_card: Mapping[Any, Any] = {F.scaled_dot_product_attention: _attention, F.rms_norm: _rms_norm}
        return on_card.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention for 16 bits without a mask, else the memory-efficient kernel; both keep no probabilities."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype).expand(shape)
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != x.dtype:  # torch takes the long way then
        return F.rms_norm(x, list(normalized_shape), weight, eps)
    return _FusedRmsNorm.apply(x, len(normalized_shape))


class _FusedRmsNorm(torch.autograd.Function):
    """What torch's fused kernel allocates and keeps, for a frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_dims: int) -> torch.Tensor:
        rows = torch.empty(x.shape[: x.ndim - num_dims], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, rows)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(grad), None
