"""What one training step keeps in memory, piece by piece, measured on tensors without data: no card, no weights.

One block of every kind runs forwards and backwards on meta, through the code that will train: diffusers' blocks, PEFT's
layers and our fused ones, quantized linears. A dispatch mode sees every operation and counts the bytes of the storages
that somebody still holds, views once. Embedders and tail run once around them. Blocks of one kind cost alike, so that a
plan for 56 blocks takes the time of two; forecast.py adds up.

On meta some operations take another way than on a card, and are led back:
- attention: torch's plain way would keep the probabilities [B, N, S, S]. Cards keep the output and a float32 per head
  and token; their backward holds a float32 copy of the query's gradient meanwhile, which no operation shows.
- rms_norm: one kernel that keeps its input and a float32 per row, where torch has it.
- 8-bit products: the kernels of the card that is planned for; they allocate on meta and launch nothing.
CPU and emulated cards take the plain way, so that a forecast for them can be compared with what they really hold.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

from ..config.job import LoraSettings
from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from ..parallel.offload.recompute import HandOut
from ..parallel.offload.weights import host_bytes_of
from ..parallel.placement import block_names
from ..patches.hooks import tensors_of
from ..patches.lora import resolve_targets
from ..quantization.kernel_choice import DeviceKernels, KernelChoice, using_kernels
from ..quantization.quantize import Quantizer, QuantizeSettings, Stored8, replace_module
from ..quantization.wrapped import plain_parts, tensor_bytes
from ..training.adapter import apply_lora
from ..training.objective import flow_matching_loss

META = torch.device("meta")
CARD_ROUNDING = 512  # bytes; torch's allocator for CUDA gives out multiples of it
_TEXT_WIDTHS = ("joint_attention_dim", "text_dim")  # what transformer configs call the width of the text states
_POOLED_WIDTHS = ("pooled_projection_dim",)

# The kernels of a card nobody has seen: those of data-centre chips, which transpose a slice of the weight. Others do
# without the slice, so this is the higher of the two.
UNSEEN_CARD = DeviceKernels(
    {
        torch.float8_e4m3fn: KernelChoice("vendor", "transpose", has_triton=True),
        torch.int8: KernelChoice("triton", "transpose", has_triton=True),
    }
)


@dataclass(frozen=True)
class Kernels:
    """Which way operations take: a card's fused attention and norms, or torch's plain ones; and 8-bit products."""

    eight_bit: DeviceKernels = UNSEEN_CARD
    has_fused: bool = True
    rounding: int = CARD_ROUNDING


@dataclass(frozen=True)
class Work:
    """What a step computes.

    Args:
        latent_shape: of one sample. [C, F, H, W]
        batch_size: samples of a micro-batch.
        dtype: of frozen weights and computation.
        quantize: None where nothing is.
    """

    latent_shape: tuple[int, int, int, int]
    batch_size: int
    dtype: torch.dtype
    quantize: QuantizeSettings | None
    lora: LoraSettings


@dataclass(frozen=True)
class BlockCost:
    """Bytes of one block; activations are those of one micro-batch.

    Args:
        weights: base weights and buffers. lora: trained weights. num_trained: values in them.
        inputs: what the block before made for it; kept for its recomputation. outputs: what it makes.
        constants: what it reads besides, by a name that is the same for the same tensor.
        kept: what its backward needs beyond inputs, if it is not recomputed.
        forward, forward_kept: peak of a forward that keeps nothing, or everything; above its inputs.
        recompute: peak of recomputation and backward, gradient of its output included; above its inputs.
        backward: peak of the backward alone, `kept` included; above its inputs.
        staying: the share of weights that is on the card even where the block streams from host memory.
        input_sizes: what `inputs` is the sum of.
    """

    weights: int
    lora: int
    num_trained: int
    inputs: int
    constants: Mapping[int, int]
    outputs: int
    kept: int
    forward: int
    forward_kept: int
    recompute: int
    backward: int
    input_sizes: tuple[int, ...] = ()
    staying: int = 0

    @property
    def streaming(self) -> int:
        """What rests in host memory where the block streams from there, and passes through a slot."""
        return self.weights - self.staying


@dataclass(frozen=True)
class Rehearsal:
    """What every block and the rest of a model cost.

    Args:
        names, blocks: in execution order. [num_blocks]
        home: weights, buffers and LoRA outside the blocks: embedders and tail.
        tail_weights: the share of them that the tail has.
        front: what is alive when the first block is called; its inputs and constants included.
        first_inputs: of the first block.
        tail: peak of tail, loss and their backward; above the last block's output.
    """

    names: tuple[str, ...]
    blocks: tuple[BlockCost, ...]
    home_weights: int
    tail_weights: int
    home_lora: int
    home_trained: int
    front: int
    first_inputs: int
    tail: int


class MemoryMeter(TorchDispatchMode):
    """Counts bytes of the storages that operations make and somebody still holds; `live` now, `peak` since start().

    Args:
        rounding: every storage counts as a multiple of so many bytes.
    """

    def __init__(self, rounding: int = CARD_ROUNDING) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._rounding = rounding
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def start(self) -> int:
        """Measure the peak from here; returns what is alive."""
        self.peak = self.live
        return self.live

    def rounded(self, size: int) -> int:
        """What a storage of so many bytes counts."""
        return -(-size // self._rounding) * self._rounding

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Never count these, nor views of them: weights."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_is_wrapper(value) for value in tree_leaves((args, kwargs))):
            return NotImplemented  # a quantized tensor: its own dispatch comes back with what it is made of
        out = func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and not _is_wrapper(value):
                storage = value.untyped_storage()
                self._add(storage, self.rounded(storage.nbytes()))
        self.peak = max(self.peak, self.live + _hidden_bytes(func, args))
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


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


_ATTENTION_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}


def _hidden_bytes(func: Any, args: Any) -> int:
    """What an operation holds while it runs and no operation shows: attention sums the query's gradient in float32."""
    return 4 * args[1].numel() if func in _ATTENTION_BACKWARDS else 0


class _AsOnCards(TorchFunctionMode):
    """Leads attention and norms on meta to what cards run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.rms_norm and _HAS_FUSED_NORM:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


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


_HAS_FUSED_NORM = hasattr(torch.ops.aten, "_fused_rms_norm_backward")


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


# ---- a model of one block of every kind


@dataclass
class ShortModel:
    """Every kind of block twice, the second time with an input that carries gradients."""

    model: nn.Module
    names: tuple[str, ...]
    kind_of: list[int]  # by block of the whole model
    kinds: list[str] = field(default_factory=list)  # fqn of the first block of each kind
    modules: list[nn.Module] = field(default_factory=list)


def rehearse_training(
    model: nn.Module, family: ModelFamily, variant: Variant, config: Mapping[str, Any], work: Work, kernels: Kernels
) -> Rehearsal:
    """Count what a step of this model and work holds.

    Args:
        model: the transformer on meta, frozen or not; it is cut down and cannot be used afterwards.
        config: keyword arguments of its class.
    Raises: ValueError for LoRA targets that match nothing; RuntimeError for a scheme whose package is missing.
    """
    with torch.inference_mode(False), torch.enable_grad():
        sample = shorten(model, family, work)
        run = _Run(sample, MemoryMeter(kernels.rounding))
        latents = torch.empty(work.batch_size, *work.latent_shape, device=META)  # in host memory while training
        run.meter.ignore([*_plain_tensors(sample.model), latents])
        sample.model.train()
        sample.model.enable_gradient_checkpointing(run.measure)  # type: ignore[operator]
        with _as_kernels(kernels), run.meter:
            _step(run, family, variant, config, work, latents)
        return _collect(sample, family, run)


@contextlib.contextmanager
def _as_kernels(kernels: Kernels) -> Iterator[None]:
    fused: AbstractContextManager[Any] = _AsOnCards() if kernels.has_fused else contextlib.nullcontext()
    with using_kernels(kernels.eight_bit), fused:
        yield


def shorten(model: nn.Module, family: ModelFamily, work: Work) -> ShortModel:
    """Cut a model down, with its linears quantized and LoRA attached as a job would; parameters stay on meta."""
    names = block_names(model, family)
    targets = set(resolve_targets(model, work.lora.targets or family.lora_targets))
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
    renamed = _keep_kinds(sample, family)
    _cast(model, work.dtype)
    if quantizer is not None:
        for fqn, module in list(model.named_modules()):
            whole = _whole_name(fqn, renamed)
            if isinstance(module, nn.Linear) and quantizer.is_wanted(whole, module):
                stored = _empty_weight(module, quantizer.settings)
                replace_module(model, fqn, quantizer.take(whole, module, stored, module.weight.dtype))
    short = tuple(fqn for fqn, _ in model.named_modules() if _whole_name(fqn, renamed) in targets)
    apply_lora(model, family, replace(work.lora, targets=short), seed=0)
    return sample


def _empty_weight(linear: nn.Linear, settings: QuantizeSettings) -> Stored8:
    """As if a file had it in 8 bits already: rounding nothing takes longer than the rest of a rehearsal."""
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
    return renamed


def _whole_name(fqn: str, renamed: Mapping[str, str]) -> str:
    block = ".".join(fqn.split(".")[:2])
    return renamed[block] + fqn.removeprefix(block) if block in renamed else fqn


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """As loading does: the model's type, but float32 where the class keeps it."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in list(model.named_parameters()):
        wanted = dtype if kept.isdisjoint(name.split(".")) else torch.float32
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty(parameter.shape, dtype=wanted, device=META)
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(empty, requires_grad=False)


def _plain_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers; for those made of others, their parts."""
    return [part for tensor in (*module.parameters(), *module.buffers()) for part in plain_parts(tensor)]


# ---- the step


@dataclass(frozen=True)
class _Activations:
    """Of one kind of block; see BlockCost."""

    inputs: int
    constants: Mapping[int, int]
    outputs: int
    kept: int
    forward: int
    forward_kept: int
    recompute: int
    backward: int
    input_sizes: tuple[int, ...]


class _Run:
    """Takes gradient checkpointing's place and measures every second call, whose input carries gradients."""

    def __init__(self, sample: ShortModel, meter: MemoryMeter) -> None:
        self.meter = meter
        self.activations: list[_Activations] = []
        self.front = self.tail_base = 0
        self.sample = sample
        self._num_calls = 0
        self._before: list[torch.Tensor] = []  # what the call before was given
        self._constants: list[torch.Tensor] = []  # held, so that a name is not given twice

    def measure(self, block: nn.Module, *args: Any) -> Any:
        """The block's outputs as fresh tensors that need gradients: nothing before this block is remembered."""
        if self._num_calls == 0:
            self.front = self.meter.live
        if self._num_calls % 2:
            self.activations.append(self._measure(block, args))
        self._before = tensors_of(args)
        self._num_calls += 1
        with torch.no_grad():
            outputs = block(*args)
        outputs = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().requires_grad_(), outputs)
        if self._num_calls == 2 * len(self.sample.kinds):
            self._before.clear()
            self.tail_base = self.meter.start()
        return outputs

    def _measure(self, block: nn.Module, args: Any) -> _Activations:
        constants = {id(tensor) for tensor in self._before} & {id(tensor) for tensor in tensors_of(args)}
        streams = [tensor for tensor in tensors_of(args) if id(tensor) not in constants]
        shared = {self._name_of(t): self._size(t) for t in tensors_of(args) if id(t) in constants}
        args = tree_map_only(torch.Tensor, _without_history, args)
        base = self.meter.start()
        with torch.no_grad():
            outputs = block(*args)
        forward, size = self.meter.peak - base, self.meter.live - base
        grads = [torch.empty_like(tensor) for tensor in tensors_of(outputs)]
        del outputs
        gradient = self.meter.live - base
        self.meter.start()
        seed = HandOut.apply(grads, *tensors_of(block(*args)))
        top = self.meter.peak - base
        kept = self.meter.live - base - gradient
        self.meter.start()
        seed.backward()
        backward = self.meter.peak - base
        _forget_gradients(block, args)
        recomputed = max(top, self._peak_with_gradients_held(block, args) - base)
        _forget_gradients(block, args)
        return _Activations(
            inputs=sum(map(self._size, streams)),
            constants=shared,
            outputs=size,
            kept=kept,
            forward=forward,
            forward_kept=top - gradient,
            recompute=recomputed,
            backward=backward,
            input_sizes=tuple(map(self._size, streams)),
        )

    def _peak_with_gradients_held(self, block: nn.Module, args: Any) -> int:
        """Of the backward; parallel/offload/recompute.py was handed the gradients of the outputs and holds them."""
        outputs = tensors_of(block(*args))
        grads = [torch.empty_like(tensor) for tensor in outputs]
        seed = HandOut.apply(list(grads), *outputs)
        del outputs
        self.meter.start()
        seed.backward()
        return self.meter.peak

    def _name_of(self, tensor: torch.Tensor) -> int:
        known = next((number for number, other in enumerate(self._constants) if other is tensor), None)
        if known is None:
            self._constants.append(tensor)
        return len(self._constants) - 1 if known is None else known

    def _size(self, tensor: torch.Tensor) -> int:
        return self.meter.rounded(tensor.numel() * tensor.element_size())


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """For a backward of its own; LoRA on what makes the modulation gives that a history that all blocks share."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _forget_gradients(block: nn.Module, args: Any) -> None:
    for tensor in (*tensors_of(args), *block.parameters()):
        tensor.grad = None


def _step(
    run: _Run, family: ModelFamily, variant: Variant, config: Mapping[str, Any], work: Work, latents: torch.Tensor
) -> None:
    """As Trainer does it."""
    text = {
        encoder.output: torch.empty(work.batch_size, *text_shape(encoder, config), dtype=work.dtype, device=META)
        for encoder in variant.text_encoders
    }
    noisy, sigmas = torch.empty_like(latents, dtype=work.dtype), torch.empty(work.batch_size, device=META)
    conditions = make_conditions(variant, config, noisy)
    inputs = family.make_inputs(noisy, sigmas, {**text, **conditions}, variant.training_guidance)
    del noisy, text, conditions
    output = run.sample.model(**inputs, return_dict=False)[0]
    del inputs
    prediction = family.read_prediction(output, latents)
    loss = flow_matching_loss(prediction, latents.clone(), latents.clone())
    del output, prediction
    loss.backward()


def make_conditions(variant: Variant, config: Mapping[str, Any], noisy: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an image-to-video variant is given besides text."""
    batch, channels, frames, height, width = noisy.shape
    if variant.condition == "first_frame":
        return {"image_condition": noisy.new_empty(batch, config["in_channels"] - channels, frames, height, width)}
    return {"first_latents": noisy[:, :, :1]} if variant.condition == "first_latents" else {}


def text_shape(encoder: TextEncoderSpec, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Of one sample's states, from what the transformer's config says of their width. [S, D] or [D]

    Raises: ValueError for a config that says nothing.
    """
    keys = _POOLED_WIDTHS if encoder.kind == "pooled" else _TEXT_WIDTHS
    width = next((config[key] for key in keys if config.get(key)), None)
    if width is None:
        raise ValueError(
            f"the transformer's config names no width for {encoder.output}; one of {', '.join(keys)} was expected. "
            "Add the key's name to planning/dry_run.py"
        )
    return (width,) if encoder.kind == "pooled" else (encoder.max_length, width)


# ---- what was found


def _collect(sample: ShortModel, family: ModelFamily, run: _Run) -> Rehearsal:
    kinds = [_cost(module, found) for module, found in zip(sample.modules, run.activations, strict=True)]
    first = run.activations[0]
    home = [module for name, module in sample.model.named_children() if not _is_list(name, family)]
    tail = [sample.model.get_submodule(name) for name in family.tail]
    own = [*sample.model.parameters(recurse=False), *sample.model.buffers(recurse=False)]
    own_bytes = sum(map(tensor_bytes, own))
    return Rehearsal(
        names=sample.names,
        blocks=tuple(kinds[kind] for kind in sample.kind_of),
        home_weights=own_bytes + sum(_sizes(module)[0] for module in home),
        tail_weights=sum(_sizes(module)[0] for module in tail),
        home_lora=sum(_sizes(module)[1] for module in home),
        home_trained=sum(_num_trained(module) for module in home),
        front=run.front,
        first_inputs=first.inputs,
        tail=run.meter.peak - run.tail_base,
    )


def _is_list(name: str, family: ModelFamily) -> bool:
    return any(block_list.name == name for block_list in family.block_lists)


def _cost(module: nn.Module, found: _Activations) -> BlockCost:
    weights, lora = _sizes(module)
    trained = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    return BlockCost(
        weights=weights,
        lora=lora,
        num_trained=sum(trained),
        inputs=found.inputs,
        constants=found.constants,
        outputs=found.outputs,
        kept=found.kept,
        forward=found.forward,
        forward_kept=found.forward_kept,
        recompute=found.recompute,
        backward=found.backward,
        staying=weights - host_bytes_of(module),
        input_sizes=found.input_sizes,
    )


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Bytes of base weights and buffers, and of LoRA."""
    lora = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    held = sum(part.numel() * part.element_size() for part in _plain_tensors(module))
    return held - lora, lora


def _num_trained(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
