"""What the planner is asked: a model, a search space, cards and a size of data; and what follows from them alone.

A Question is frozen, so whatever it has computed stays true. Another job, other cards or another size is another
Question; they share the ModelCosts, which runs each dry run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch
from torch import nn

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import make_empty_transformer
from ..config.job import OptimizerConfig
from ..config.model import Strategy, divides_blocks, has_stages, holds_copies
from ..families.spec import ModelFamily, Variant, longest_text
from ..families.tensor_plan import proportional
from ..parallel.local.data_parallel import num_dealt
from ..parallel.local.shard_trees import division_fault
from ..parallel.offload.activations import MIN_BYTES
from ..parallel.placement import block_names, check_one_each, estimate_block_flops, plan_manual
from ..quantization.kernel_choice import device_kernels
from ..quantization.quantize import BEST_FIRST, QuantizeSettings, Scheme, check_packages, refusal
from ..training.optimizer import make_optimizer
from .block_times import ASSUMED_LINK_BYTES_PER_S, SCHEME_TIMES, BlockTimes, FlopTimes
from .cards import Card
from .divided_times import DividedTimes, count_exchanges, exchanged_bytes, undivided_shares
from .dry_run import StepCost, dry_run_step
from .dry_run_block import BlockCost
from .forecast import CONTEXT_BYTES, Backend, Forecaster, Optimizer, StepSettings
from .meter import UNSEEN_CARD, Kernels
from .short_model import SampleText, Work
from .space import SearchSpace, Setting, is_open, strategies_on


class ModelCosts:
    """What a model costs, by sizes without weights."""

    def __init__(self, info: CheckpointInfo, variant: Variant, model: nn.Module | None = None) -> None:
        self.info, self.variant = info, variant
        self.family: ModelFamily = info.family
        self._model = make_empty_transformer(info) if model is None else model
        self.names = block_names(self._model, self.family)
        self._known: dict[tuple[Work, str], StepCost] = {}
        self._division_faults: dict[tuple[tuple[int, ...], QuantizeSettings | None], str] = {}

    def dry_run(self, work: Work, kernels: Kernels) -> StepCost:
        """What a step of this work holds."""
        key = work, repr(kernels)
        if key not in self._known and work.num_devices > 1:
            alone = self.dry_run(replace(work, shares=(1,)), kernels)
            self._known[key] = _with_whole_lora(self._run(work, kernels), alone, work.num_devices)
        elif key not in self._known:
            self._known[key] = self._run(work, kernels)
        return self._known[key]

    def _run(self, work: Work, kernels: Kernels) -> StepCost:
        with torch.inference_mode(False):  # ComfyUI runs nodes in it, and such tensors pass no gradients
            model = make_empty_transformer(self.info)
        return dry_run_step(model, self.info, self.variant, work, kernels)

    def division_fault(self, shares: tuple[int, ...], quantize: QuantizeSettings | None) -> str:
        """Why the blocks cannot be divided in these shares; "" if they can."""
        key = shares, quantize
        if key not in self._division_faults:
            self._division_faults[key] = division_fault(self._model, self.family, shares, quantize)
        return self._division_faults[key]

    @cached_property
    def num_exchanges(self) -> list[int]:
        """Of each block's forward, where devices compute it together. [num_blocks]"""
        return count_exchanges(self._model, self.family)

    def exchanged(self, bucket: tuple[int, int], frames: int, element_size: int) -> list[float]:
        """Bytes of partial sums of each block's forward for one sample, where devices compute it together.
        [num_blocks]"""
        num_image = self.family.latent_of(self.variant).num_tokens(*bucket, frames)
        num_text = longest_text(self.variant)
        return exchanged_bytes(self._model, self.family, num_image, num_text, element_size)

    def undivided(self, bucket: tuple[int, int], frames: int) -> list[float]:
        """Share of each block that devices compute whole, where they compute it together. [num_blocks]"""
        num_image = self.family.latent_of(self.variant).num_tokens(*bucket, frames)
        return undivided_shares(self._model, self.family, num_image, longest_text(self.variant))

    def block_flops(self, bucket: tuple[int, int], frames: int) -> list[float]:
        """Operations of each block's forward for one sample. [num_blocks]"""
        num_image = self.family.latent_of(self.variant).num_tokens(*bucket, frames)
        num_text = longest_text(self.variant)
        return estimate_block_flops(self._model, self.family, num_image, num_text)

    @cached_property
    def largest_linear(self) -> int:
        """Weights of the largest linear."""
        return max(module.weight.numel() for module in self._model.modules() if isinstance(module, nn.Linear))

    def latent_shape(self, bucket: tuple[int, int], frames: int) -> tuple[int, int, int, int]:
        """Of one sample. [C, F, H, W]"""
        return latent_shape_of(self.info, self.variant, bucket, frames)


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
    return channels, 1 + (frames - 1) // latent.frame_stride, height, width


@dataclass(frozen=True)
class Question:
    """How a job would best use its cards.

    Args:
        cards: no more than the model has blocks.
        bucket: (height, width) of the largest samples, in pixels; of audio a square of latent cells. frames: video
            frames.
        given_times: None takes operations.
        link: bytes per second from pinned host memory to a card, and about as many back.
        cuts: first block of each further card, where a resumed run must cut as before.
        host_bytes: free host memory; None where that is not known, as for cards that are elsewhere.
        replica: which copy of the model is asked for, on a card of its own.
        share: of cards that compute each block together the last one's, which is asked for; (1,) is one card alone.
        given_shares: of a run that is resumed, of every card; () leaves them open.
        picture: height, width and frames of the sample pictures that the first copy draws between steps, if any.
        text: of one of ComfyUI's own models, what it is given of the longest caption, where that is known.
    """

    model: ModelCosts
    space: SearchSpace
    cards: tuple[Card, ...]
    bucket: tuple[int, int]
    frames: int = 1
    given_times: BlockTimes | None = None
    link: float = ASSUMED_LINK_BYTES_PER_S
    cuts: tuple[int, ...] | None = None
    host_bytes: int | None = None
    replica: int | None = None
    share: tuple[int, ...] = (1,)
    given_shares: tuple[int, ...] = ()
    picture: tuple[int, int, int] | None = None
    text: SampleText | None = None

    @property
    def unit(self) -> str:
        """What the bucket is counted in."""
        return "latent cells" if self.model.family.latent_of(self.model.variant).audio_rows else "pixels"

    def changed(self, **changes: Any) -> Question:
        """Another question of the same model. Times are of this one and left out; what fits does not depend on them."""
        other = replace(self, given_times=None, **changes)
        return other if len(other.cards) == len(self.cards) else replace(other, cuts=None, given_shares=())

    def alone(self, index: int) -> Question:
        """For one card that holds a copy of the whole model: its share of the micro-batches and of host memory."""
        share = num_dealt(self.space.accumulation, len(self.cards))[index]
        one = self._of_one(index, accumulation=max(1, share))  # an idle card is planned all the same
        return replace(one, given_times=self.times, replica=index, picture=None if index else self.picture)

    def divided(self, index: int, shares: Sequence[int], fewest: int | None = None) -> Question:
        """For one card that computes its share of every block: all micro-batches, and its part of host memory.

        Args:
            shares: of every card. What one takes depends on its own, so the others' are taken for alike.
            fewest: how many blocks keep their activations; None leaves that as it is.
        """
        changes = {} if fewest is None else {"uncheckpointed": (fewest,)}
        others = proportional(sum(shares) - shares[index], [1.0] * (len(shares) - 1))
        unit = gcd(shares[index], *others)
        one = replace(self._of_one(index, **changes), share=tuple(each // unit for each in (*others, shares[index])))
        exchanged = self.model.exchanged(self.bucket, self.frames, self.space.dtype.itemsize)
        times = DividedTimes(
            self.times,
            self.cards,
            shares,
            [self.space.batch_size * each for each in exchanged],
            self.model.undivided(self.bucket, self.frames),
            self.model.num_exchanges,
        )
        return replace(one, given_times=times)

    def _of_one(self, index: int, **changes: Any) -> Question:
        """For one card by itself, with its own settings and its share of host memory."""
        self.check_counts()
        space, mine = self.space, slice(index, index + 1)
        given = {
            "strategies": ("none",),
            "split_at": (),
            "uncheckpointed": space.uncheckpointed[mine],
            "offloaded": space.offloaded[mine],
            "memory_limit_gb": space.memory_limit_gb[mine],
        }
        free = None if self.host_bytes is None else self.host_bytes // len(self.cards)
        own = replace(space, **{**given, **changes})
        return replace(self, space=own, cards=self.cards[mine], cuts=None, host_bytes=free)

    def check_counts(self) -> None:
        """Raises: ValueError for settings per device that are not as many as there are cards."""
        space, names = self.space, [card.name for card in self.cards]
        check_one_each("split.memory_limit_gb", space.memory_limit_gb, names)
        check_one_each("split.blocks_without_checkpointing", space.uncheckpointed, names)
        check_one_each("split.offloaded_blocks", space.offloaded, names)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the user cuts, ends included; () where the planner does."""
        names, split_at = self.model.names, self.space.split_at
        if self.cuts is not None:
            return 0, *self.cuts, len(names)
        if not split_at:
            return ()
        plan_manual(names, [card.device for card in self.cards], split_at)  # refuses wrong cuts
        return 0, *split_at, len(names)

    # ---- candidates

    def settings(self) -> list[Setting]:
        """Every candidate that these cards can do."""
        space = self.space
        ahead = sorted({space.ahead, 0}, reverse=True) if is_open(space.strategies) else [space.ahead]
        return [
            Setting(scheme, optimizer, strategy, each, offloads)
            for scheme in self._schemes()
            for optimizer in space.optimizers
            for strategy in self._strategies()
            if not divides_blocks(strategy) or not self._division_fault(scheme)
            for each in (ahead if has_stages(strategy) else [0])
            for offloads in (space.offloads if space.is_checkpointing else (False,))
        ]

    def _schemes(self) -> Sequence[str]:
        if not is_open(self.space.schemes):
            self._check_able(self.space.schemes)
            return self.space.schemes
        able = self.able_schemes
        faster = [scheme for scheme in able if SCHEME_TIMES[scheme] < 1]
        return ["none", *(faster or able)]  # a scheme that only stores is slower; for cards without 8-bit products

    def _check_able(self, asked: Sequence[str]) -> None:
        """Raises: ValueError for a scheme that was asked for and that a card cannot multiply in."""
        for scheme, card in itertools.product(BEST_FIRST, self.cards):
            if scheme not in asked or scheme not in card.refuses:
                continue
            if card.has_context and (why := refusal(QuantizeSettings(scheme), [each.device for each in self.cards])):
                raise ValueError(why)
            kind, works = f" ({card.kind.name})" if card.kind else "", next(iter(self.able_schemes), "none")
            raise ValueError(
                f"{scheme} was asked for, but {card.name}{kind} has no products in it; use {works} instead"
            )

    def _strategies(self) -> Sequence[Strategy]:
        possible = strategies_on(self.space, [card.device for card in self.cards])
        if is_open(possible) and (self.bounds or any(self.space.offloaded)):
            # A given cut asks for a split, and only a split streams.
            return [each for each in possible if not holds_copies(each)]
        return possible

    def _division_fault(self, scheme: str) -> str:
        """Why these cards cannot compute each block together in this scheme; "" if they can."""
        shares = self.given_shares or (1,) * len(self.cards)
        return self.model.division_fault(shares, self.work(scheme).quantize)

    @property
    def able_schemes(self) -> list[Scheme]:
        """8-bit schemes that every card and the packages installed here can do, the fastest first."""
        refused = frozenset().union(*(card.refuses for card in self.cards))
        return [scheme for scheme in BEST_FIRST if scheme not in refused and _has_packages(scheme)]

    @property
    def may_stream(self) -> bool:
        """Whether it is the planner's to say which blocks stream from host memory."""
        is_split = self.replica is None and len(self.share) == 1
        return self.space.is_checkpointing and not self.space.offloaded and is_split

    @property
    def most(self) -> float:
        """Share of a card that may be needed; with memory_limit_gb the user says what fits."""
        return float("inf") if self.space.memory_limit_gb else 1.0

    # ---- seconds and bytes

    @cached_property
    def times(self) -> BlockTimes:
        """By operations, unless they were given."""
        if self.given_times is not None:
            return self.given_times
        flops = self.model.block_flops(self.bucket, self.frames)
        return FlopTimes([self.space.batch_size * each for each in flops])

    def recomputed_s(self, blocks: Iterable[int], card: Card, scheme: str) -> float:
        """Seconds of a micro-batch through these blocks: forward, forward again, and backward."""
        times = (self.times.of(block, card, scheme) for block in blocks)
        return sum(2 * forward + backward for forward, backward in times)

    def work(self, scheme: str) -> Work:
        """What a micro-batch computes."""
        space = self.space
        return Work(
            latent_shape=self.model.latent_shape(self.bucket, self.frames),
            batch_size=space.batch_size,
            dtype=space.dtype,
            quantize=None if scheme == "none" else QuantizeSettings(scheme, space.rotation),  # type: ignore[arg-type]
            lora=space.lora,
            shares=self.share,
            text=self.text,
        )

    def step_settings(self, setting: Setting) -> StepSettings:
        space = self.space
        return StepSettings(
            strategy=setting.strategy,
            accumulation=space.accumulation,
            ahead=setting.ahead,
            offload_from=MIN_BYTES if setting.offloads else None,
        )

    def forecaster(self, setting: Setting) -> Forecaster:
        """Adds up what any cut needs."""
        has_context = all(card.has_context for card in self.cards)
        return Forecaster(
            self._cost(setting.scheme),
            self._optimizer(setting.optimizer),
            self.step_settings(setting),
            backend=Backend(context=0 if has_context else CONTEXT_BYTES),
            largest_layer=0 if setting.scheme == "none" else self.model.largest_linear * self.space.dtype.itemsize,
            picture=self._picture_cost(setting.scheme),
        )

    def _cost(self, scheme: str) -> StepCost:
        """What a step costs."""
        return self.model.dry_run(self.work(scheme), self._kernels(scheme))

    def _picture_cost(self, scheme: str) -> StepCost | None:
        """Of drawing a sample picture; None where a forward of training takes as much."""
        if self.picture is None:
            return None
        *bucket, frames = self.picture
        shape, work = self.model.latent_shape((bucket[0], bucket[1]), frames), self.work(scheme)
        if prod(shape) <= work.batch_size * prod(work.latent_shape):
            return None
        text = None if work.text is None else work.text.without_streams
        alone = replace(work, latent_shape=shape, batch_size=1, text=text)
        return self.model.dry_run(alone, self._kernels(scheme))

    def _kernels(self, scheme: str) -> Kernels:
        """Those of the first card; only 8-bit products ask a card for what it has, which compiles a kernel there."""
        first = self.cards[0]
        if first.eight_bit is None and first.has_context and scheme.endswith("-compute"):
            return Kernels(device_kernels(first.device))
        return Kernels(first.eight_bit or UNSEEN_CARD)

    def _optimizer(self, name: str) -> Optimizer:
        """With data parallel its state is on the first card. All hold a flat copy of the gradients for a moment, when
        no activations are left."""
        whole = optimizer_bytes(name, self.space.lora.dtype, kahan=self.space.kahan, ema=self.space.has_ema)
        if self.replica is None:
            return whole
        flat = float(getattr(torch, self.space.lora.dtype).itemsize)
        return Optimizer(whole.state, max(whole.step, flat)) if self.replica == 0 else Optimizer(0.0, flat)


def _with_whole_lora(share: StepCost, whole: StepCost, num_devices: int) -> StepCost:
    """The cost of one of several devices that compute blocks together. Beside the slices of the LoRA that it computes
    with it owns some of the whole LoRA's parameters, with their optimizer state: as many as every other."""
    known: dict[int, BlockCost] = {}
    for mine, all_of_it in zip(share.blocks, whole.blocks, strict=True):
        lora, num_trained = mine.lora + all_of_it.lora // num_devices, all_of_it.num_trained // num_devices
        known.setdefault(id(mine), replace(mine, lora=lora, num_trained=num_trained))
    blocks = tuple(known[id(each)] for each in share.blocks)
    return replace(share, blocks=blocks, home_lora=2 * share.home_lora)


def _has_packages(scheme: Scheme) -> bool:
    try:
        check_packages(QuantizeSettings(scheme))
    except RuntimeError:
        return False
    return True


def optimizer_bytes(name: str, lora_dtype: str, *, kahan: bool = False, ema: bool = False) -> Optimizer:
    """What an optimizer holds per trained value: state between steps, and temporaries of a step.

    Of an optimizer that this pack does not know, the state is measured on a small parameter.

    Args:
        kahan: whether what rounding leaves is kept in bfloat16, and a step has the weights and gradients in float32.
        ema: whether an average of the weights is kept, in float32.
    """
    if ema:
        plain = optimizer_bytes(name, lora_dtype, kahan=kahan)
        return Optimizer(plain.state + 4, plain.step)
    if kahan:
        plain = optimizer_bytes(name, "float32")
        return Optimizer(plain.state + 2, plain.step + 8)
    size = getattr(torch, lora_dtype).itemsize
    if name == "adamw":
        return Optimizer(state=2 * size, step=size)  # torch takes the root of all second moments of a card at once
    if name == "adamw8bit":
        return Optimizer(state=2 * (1 + 4 / 256), step=0.0)  # two moments, a float32 per 256 values; one by one
    return Optimizer(state=_measured_state(name, lora_dtype), step=size)


def _measured_state(name: str, lora_dtype: str) -> float:
    with torch.inference_mode(False), torch.enable_grad():
        parameter = nn.Parameter(torch.ones(64, 64, dtype=getattr(torch, lora_dtype)))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = make_optimizer([parameter], OptimizerConfig(name=name))
        optimizer.step()
        assert isinstance(optimizer, torch.optim.Optimizer)
        held = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in held) / parameter.numel()
