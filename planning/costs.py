"""What one training step keeps in memory and computes, piece by piece, by sizes: one block of every kind runs forwards
and backwards on meta, through the code that will train, and embedders and tail once around them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import make_empty_transformer
from ..families.spec import ModelFamily, Variant, longest_text
from ..families.token_plan import Place, segments
from ..parallel.block_lists import parts_of_tail
from ..parallel.local.collectives import Collective
from ..parallel.local.tokens import OneDeviceError, Rows, TokenParallel
from ..parallel.offload.recompute import BlockCall, HandOut, module_of
from ..parallel.offload.weights import host_bytes_of
from ..parallel.placement import block_flops, block_names, blocks_with_lists
from ..patches.hooks import tensors_reached
from .dry_run import META, Kernels, MemoryMeter, ShortModel, Work, as_on_card, shorten, step_on_meta, with_sound
from .times import key_bytes, keys_of


@dataclass(frozen=True)
class BlockCost:
    """Bytes of one block; activations are those of one micro-batch, peaks are above its inputs.

    Args:
        weights: base weights and buffers. num_trained: values in lora. inputs: the sum of input_sizes.
        constants: what it reads besides, by a name that is the same for the same tensor.
        kept: what its backward needs beyond inputs, if it is not recomputed.
        forward, forward_kept: peak of a forward that keeps nothing, or everything.
        recompute, backward: peak of a backward with its recomputation, or alone, `kept` included.
        staying: the share of weights that is on the card even where the block streams from host memory.
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
class StepCost:
    """What every block, in execution order, and the embedders and tail outside them cost. [num_blocks]
    tail_weights: the share of outer_weights that the tail has. front: what is alive when the first block is called.
    tail: peak of tail, loss and their backward; above the last block's output. is_whole: whether cards that share out
    rows compute such a sample whole, each."""

    names: tuple[str, ...]
    blocks: tuple[BlockCost, ...]
    outer_weights: int
    tail_weights: int
    outer_lora: int
    outer_trained: int
    front: int
    tail: int
    is_whole: bool = False


class ModelCosts:
    """What a model costs, by sizes without weights. Each dry run is made once."""

    def __init__(self, info: CheckpointInfo, variant: Variant, model: nn.Module | None = None) -> None:
        self.info, self.variant, self.family = info, variant, info.family
        self._model = make_empty_transformer(info) if model is None else model
        self.names = block_names(self._model, self.family)
        self._known: dict[Any, Any] = {}

    def dry_run(self, work: Work, kernels: Kernels) -> StepCost:
        """What a step of this work holds."""
        key = work, repr(kernels)
        if key not in self._known:
            with torch.inference_mode(False):  # ComfyUI runs nodes in it, and such tensors pass no gradients
                model = make_empty_transformer(self.info)
            self._known[key] = dry_run_step(model, self.info, self.variant, work, kernels)
        return self._known[key]

    def block_flops(self, bucket: tuple[int, int], frames: int) -> list[float]:
        """Operations of each block's forward for one sample. [num_blocks]"""
        key = "flops", bucket, frames
        if key not in self._known:
            blocks, counts = blocks_with_lists(self._model, self.family), self._num_tokens(bucket, frames)
            self._known[key] = [block_flops(*each, *counts) for each in blocks]
        return self._known[key]

    def key_bytes(self, bucket: tuple[int, int], frames: int, element_size: int) -> list[float]:
        """Of the keys and values of all rows of one sample, of a model that has a token plan. [num_blocks]"""
        key = "keys", bucket, frames, element_size
        if key not in self._known:
            keys = keys_of(self.names, self.family.token_plan).values()
            self._known[key] = [
                key_bytes(block, of_block, side, self._num_tokens(bucket, frames), element_size)
                for of_block, (block, side) in zip(keys, blocks_with_lists(self._model, self.family), strict=True)
            ]
        return self._known[key]  # type: ignore[no-any-return]

    def _num_tokens(self, bucket: tuple[int, int], frames: int) -> tuple[int, int]:
        return self.family.latent_of(self.variant).num_tokens(*bucket, frames), longest_text(self.variant)

    @functools.cached_property
    def largest_linear(self) -> int:
        """Weights of the largest linear."""
        return max(module.weight.numel() for module in self._model.modules() if isinstance(module, nn.Linear))


def latent_shape_of(
    info: CheckpointInfo, variant: Variant, bucket: tuple[int, int], frames: int
) -> tuple[int, int, int, int]:
    """Of one sample of height and width in pixels and video frames. [C, F, H, W]"""
    latent = info.family.latent_of(variant)
    height, width = (side // latent.spatial_stride for side in bucket)
    published = variant.transformer_config["in_channels"]  # a model of its own size may have another VAE
    channels = latent.channels * info.config.get("in_channels", published) // published
    if rows := latent.audio_rows:
        return channels, 1, rows, max(1, height * width // rows)
    return channels, latent.num_latent_frames(frames), height, width


def dry_run_step(model: nn.Module, info: CheckpointInfo, variant: Variant, work: Work, kernels: Kernels) -> StepCost:
    """Count what a step of this work holds. The model is on meta; it is cut down and cannot be used afterwards.
    Raises: ValueError for LoRA targets that match nothing; NoForecast for a class of ComfyUI's that does not run so."""
    with torch.inference_mode(False), torch.enable_grad():
        work = with_sound(info.family, work)
        short = shorten(model, info.family, work)
        short.model.train()

        def measured(sharing: AbstractContextManager[None]) -> _Run:
            run = _Run(short, MemoryMeter(kernels.rounding))
            latents = torch.empty(work.batch_shape, device=META)  # in host memory while training
            run.meter.ignore([*short.model.parameters(), *short.model.buffers(), latents])
            with sharing, as_on_card(kernels), run.meter:
                short.model.enable_gradient_checkpointing(run.measure)  # type: ignore[operator]
                step_on_meta(short.model, info, variant, work, latents)
            return run

        try:
            run = measured(sharing_rows(work, short.model, info.family))  # hooks that checkpointing goes around
            is_whole = False
        except OneDeviceError:
            run, is_whole = measured(contextlib.nullcontext()), True
        lists = {block_list.name for block_list in info.family.block_lists}
        outer = [_sizes_of(module) for name, module in short.model.named_children() if name not in lists]
        own = [*short.model.parameters(recurse=False), *short.model.buffers(recurse=False)]
        modules, parameters = parts_of_tail(short.model, info.family)
        return StepCost(
            names=short.names,
            blocks=tuple(run.kinds[kind] for kind in short.kind_of),
            outer_weights=sum(each.nbytes for each in own) + sum(weights for weights, _, _ in outer),
            tail_weights=sum(_sizes_of(module)[0] for module in modules) + sum(each.nbytes for each in parameters),
            outer_lora=sum(lora for _, lora, _ in outer),
            outer_trained=sum(num_trained for _, _, num_trained in outer),
            front=run.front,
            tail=run.meter.peak - run.tail_base,
            is_whole=is_whole,
        )


@contextlib.contextmanager
def sharing_rows(work: Work, model: nn.Module, family: ModelFamily) -> Iterator[None]:
    """Inside, a forward is that of the first of the devices that share out the rows of each sample."""
    if not (shares := work.row_shares):
        yield
        return
    plan = family.token_plan
    assert plan is not None, "others are refused"
    parallel = TokenParallel([model], [META], plan, shares)
    parallel.attach()
    now = (work.latent_shape[1] == 1 and plan.one_frame) or plan
    with parallel.on(_LoneRows(0, now, shares, _LoneGroup(len(shares), lambda tensors, rank, arrivals: ()))):
        yield


class _LoneGroup(Collective):
    """The collectives of a rank that waits for nobody; `_LoneRows.join` sees to the right size."""

    def take(self, rank: int, name: str, own: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        return [own] * self.size


class _LoneRows(Rows):
    """The rows of a rank without others: what those would send is memory of the right size."""

    def gather(self, tensor: torch.Tensor, place: Place, name: str, own: Sequence[str] = ()) -> torch.Tensor:
        if not self.knows(place.axis):
            return tensor
        is_own = {each: each in (*own, *self.plan.whole) for each in segments(place.axis)}
        length = sum(self.share(each)[1] if own else self.lengths[each] for each, own in is_own.items())
        behind = tensor.ndim - 1 - place.dim % tensor.ndim
        return F.pad(tensor, (0, 0) * behind + (0, length - tensor.shape[place.dim]))

    def share(self, segment: str, rank: int | None = None) -> tuple[int, int]:
        """Of no rank in particular: as many rows as one with a share like the first may have."""
        if rank is not None:
            return super().share(segment, rank)
        alike = (each for each, share in enumerate(self._shares) if share == self._shares[0])
        return 0, max(super(_LoneRows, self).share(segment, each)[1] for each in alike)

    def join(self, found: Sequence[torch.Tensor], place: Place) -> torch.Tensor:
        return self.gather(found[self.rank], place, "")


class _Run:
    """Takes gradient checkpointing's place and measures the last call of every kind, whose input carries gradients."""

    def __init__(self, short: ShortModel, meter: MemoryMeter) -> None:
        self.short, self.meter = short, meter
        self.kinds: dict[int, BlockCost] = {}
        self.front = self.tail_base = 0
        self._num_calls = 0
        self._before: list[torch.Tensor] = []  # what the call before was given
        self._constants: dict[int, torch.Tensor] = {}  # held, so that an id is not given twice

    def measure(self, block: nn.Module | BlockCall, *args: Any) -> Any:
        """The block's outputs, without a history; they are no leaves, for some classes add to them in place."""
        if self._num_calls == 0:
            self.front = self.meter.live
        kind = self.short.calls[self._num_calls]
        if kind not in self.short.calls[self._num_calls + 1 :]:
            if isinstance(block, BlockCall):
                with torch.no_grad():
                    block(*args)  # what its in-place guard has to learn of such a call, no later one does again
            before, given = {id(tensor) for tensor in self._before}, tensors_reached(args)
            constants = {id(tensor): tensor for tensor in given if id(tensor) in before}
            self._constants |= constants
            sizes = {name: self.meter.size(tensor) for name, tensor in constants.items()}
            streams = [tensor for tensor in given if id(tensor) not in before]
            self.kinds[kind] = _dry_run_block(self.meter, block, args, sizes, streams)
        self._before = tensors_reached(args)
        self._num_calls += 1
        with torch.no_grad():
            outputs = block(*args)
        flat, spec = tree_flatten(outputs)
        where = [index for index, each in enumerate(flat) if isinstance(each, torch.Tensor)]
        fresh = _Fresh.apply(torch.empty(0, device=META, requires_grad=True), *(flat[index] for index in where))
        for index, each in zip(where, fresh, strict=True):
            flat[index] = each
        outputs = tree_unflatten(flat, spec)
        if self._num_calls == len(self.short.calls):
            self._before.clear()
            self.tail_base = self.meter.start()
        return outputs


class _Fresh(torch.autograd.Function):
    """The same numbers, without a history and with a gradient that goes nowhere."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, *(None for _ in grads)


def _dry_run_block(
    meter: MemoryMeter,
    block: nn.Module | BlockCall,
    args: Any,
    constants: Mapping[int, int],
    streams: list[torch.Tensor],
) -> BlockCost:
    """Of a block, as training calls it; constants as in BlockCost, streams are its inputs."""
    # LoRA on what makes the modulation gives that a history that all blocks share; this backward is the block's alone.
    args = tree_map_only(torch.Tensor, lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad), args)
    base = meter.start()
    with torch.no_grad():
        outputs = block(*args)
    forward, size = meter.peak - base, meter.live - base
    gradient = sum(meter.size(tensor) for tensor in tensors_reached(outputs))
    del outputs

    def trained(is_held: bool) -> tuple[int, int, int]:
        """Peak of the forward, what it keeps, and peak of the backward; is_held: its gradient all the while."""
        meter.start()
        outputs = tensors_reached(block(*args))
        top = meter.peak - base
        grads = [torch.empty_like(tensor) for tensor in outputs]
        seed = HandOut.apply(list(grads) if is_held else grads, *outputs)
        del outputs
        kept = meter.live - base - gradient
        meter.start()
        seed.backward()
        for tensor in (*tensors_reached(args), *block.parameters()):
            tensor.grad = None
        return top, kept, meter.peak - base

    forward_kept, kept, backward = trained(False)
    held = trained(True)[2]  # as parallel/offload/recompute.py holds it meanwhile
    weights, lora, num_trained = _sizes_of(module_of(block))
    input_sizes = tuple(map(meter.size, streams))
    return BlockCost(
        weights=weights,
        lora=lora,
        num_trained=num_trained,
        inputs=sum(input_sizes),
        constants=constants,
        outputs=size,
        kept=kept,
        forward=forward,
        forward_kept=forward_kept,
        recompute=max(forward_kept + gradient, held),
        backward=backward,
        input_sizes=input_sizes,
        staying=weights - host_bytes_of(module_of(block)),
    )


def _sizes_of(module: nn.Module) -> tuple[int, int, int]:
    """Bytes of base weights and buffers, and of LoRA; values that are trained."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    lora = sum(parameter.nbytes for parameter in trained)
    held = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    return held - lora, lora, sum(parameter.numel() for parameter in trained)
