"""What the planner is given: a model, a job, cards and a size of data; and what follows from them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from ..config.job import DataConfig, JobConfig, SplitConfig
from ..config.model import PER_DEVICE, Strategy, has_stages, holds_copies, shares_rows
from ..config.setting import requested
from ..data.samples import Sample, bucket_step, make_buckets, make_clip_plan
from ..families.spec import LatentSpec, Variant
from ..parallel.local.data_parallel import distributed
from ..parallel.offload.activations import MIN_BYTES
from ..parallel.placement import check_one_each, plan_manual, ratio
from ..quantization.kernel_choice import device_kernels
from ..quantization.quantize import SCHEMES, QuantizeSettings, Scheme, refusal
from .cards import Card, able_schemes
from .costs import ModelCosts, latent_shape_of
from .dry_run import UNSEEN_CARD, Kernels, SampleText, Work
from .memory import Backend, Forecaster, Optimizer, optimizer_bytes
from .times import ASSUMED_FLOPS_PER_S, ASSUMED_LINK_BYTES_PER_S, SCHEME_TIMES

# What auto chooses from, in this order; where nobody plans, it takes the first. The others are by name only.
STRATEGIES: tuple[Strategy, ...] = ("pipeline", "none", "data", "tokens")


class Candidates(NamedTuple):
    """What the planner chooses from. One candidate is the user's choice, several are open."""

    schemes: tuple[str, ...]
    optimizers: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    offloads: tuple[bool, ...]  # whether inputs of recomputed blocks wait in host memory


def candidates(job: JobConfig, without: Collection[Strategy] = ()) -> Candidates:
    """What a job leaves open. without: strategies that are not the planner's to choose; one that is named stays."""
    scheme, optimizer = requested(job.model.quantize), requested(job.optimizer.name)
    strategy, offload = job.parallel.requested, requested(job.train.offload_activations)
    is_compiled = job.train.compile != "off"  # blocks that meet others are not
    known = (each for each in STRATEGIES if not (each in without or is_compiled and shares_rows(each)))
    return Candidates(
        ("none", *SCHEMES) if scheme is None else (scheme,),
        ("adamw", "adamw8bit") if optimizer is None else (optimizer,),
        tuple(n for n in known if all(n in able for _, able in job.limits)) if strategy is None else (strategy,),
        (False, True) if offload is None else (offload == "on",),
    )


@dataclass(frozen=True)
class Setting:
    """One way to run a job; see Forecaster."""

    scheme: str
    optimizer: str
    strategy: Strategy
    ahead: int
    offloads: bool = False  # inputs of recomputed blocks wait in host memory
    row_shares: tuple[float, ...] = ()  # of tokens: relative to each other, one per card

    def describe(self) -> str:
        """ "fp8-compute, pipeline, 1 ahead"."""
        parts = ["weights in full precision" if self.scheme == "none" else self.scheme]
        if self.strategy != "none":
            shares = f" {ratio(self.row_shares)}" if len({*self.row_shares}) > 1 else ""
            parts.append(self.strategy + shares + (f", {self.ahead} ahead" if self.ahead else ""))
        if self.optimizer == "adamw8bit":
            parts.append("adamw8bit")
        if self.offloads:
            parts.append("block inputs in host memory")
        return ", ".join(parts)


def is_open(candidates: Sequence[object]) -> bool:
    """Whether the choice is the planner's."""
    return len(candidates) > 1


def why_not_shared(strategy: Strategy, accumulation: int, devices: Sequence[torch.device]) -> str:
    """What is missing for several devices to share a step; "" if nothing. Threads of the CPU share a generator."""
    kinds = {device.type for device in devices}
    if len(devices) < 2:
        return "there is one card"
    if accumulation < 2 and not shares_rows(strategy):
        return "there is one micro-batch in a step (train.gradient_accumulation_steps)"
    return "the devices are not cards of one kind" if len(kinds) > 1 or "cpu" in kinds else ""


def strategies_on(
    strategies: Sequence[Strategy], accumulation: int, devices: Sequence[torch.device]
) -> tuple[Strategy, ...]:
    """Those that these devices can do; "none" where there is no other."""
    able = (each for each in strategies if each == "none" or not why_not_shared(each, accumulation, devices))
    return tuple(able) or ("none",)


@dataclass(frozen=True)
class Question:
    """How a job would best use its cards.

    Args:
        cards: no more than the model has blocks.
        bucket: (height, width) of the largest samples, in pixels; of audio a square of latent cells.
        link: bytes per second from pinned host memory to a card, and about as many back.
        cuts, kept_shares: first block of each further card, or shares of the tokens, as a resumed run has them.
        without: see candidates.
        host_bytes: free host memory; None where that is not known.
        replica: which copy of the model this is about, on a card of its own.
        row_shares: of copies of the model that share out the rows of each sample, relative to each other; this is about
            the first of them. () if each has samples of its own.
        picture: height, width and frames of the sample pictures that the first copy draws between steps, if any.
        text: of one of ComfyUI's own models, what it is given of the longest caption, where that is known.
    """

    model: ModelCosts
    job: JobConfig
    cards: tuple[Card, ...]
    bucket: tuple[int, int]
    frames: int = 1
    link: float = ASSUMED_LINK_BYTES_PER_S
    cuts: tuple[int, ...] | None = None
    kept_shares: tuple[float, ...] = ()
    without: frozenset[Strategy] = frozenset()
    host_bytes: int | None = None
    replica: int | None = None
    row_shares: tuple[float, ...] = ()
    picture: tuple[int, int, int] | None = None
    text: SampleText | None = None

    @property
    def unit(self) -> str:
        """What the bucket is counted in."""
        return "latent cells" if self.model.family.latent_of(self.model.variant).audio_rows else "pixels"

    @cached_property
    def open(self) -> Candidates:
        return candidates(self.job, self.without)

    @property
    def accumulation(self) -> int:
        return self.job.train.gradient_accumulation_steps

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.job.model.dtype)  # type: ignore[no-any-return]

    @property
    def is_checkpointing(self) -> bool:
        return self.job.train.gradient_checkpointing

    @property
    def passes(self) -> int:
        """Of a micro-batch through the blocks: a forward, a backward, and a forward without the LoRA where one is."""
        return 2 + bool(self.job.objective.masked_prior)

    def changed(self, **changes: Any) -> Question:
        """Another question of the same model."""
        other = replace(self, **changes)
        return other if len(other.cards) == len(self.cards) else replace(other, cuts=None, kept_shares=())

    def of_card(self, index: int, setting: Setting, alike: tuple[int, int] | None = None) -> Question:
        """For one card that has a copy of the model: its micro-batches, settings and part of host memory. alike: how
        many blocks keep their activations, and how many stream; None for as it is."""
        self.check_counts()
        job, split, count, shares = self.job, self.job.split, len(self.cards), setting.row_shares
        mine, accumulation = slice(index, index + 1), self.accumulation
        if not shares:
            accumulation = max(1, len(distributed(accumulation, count)[index]))  # an idle card is planned all the same
        own = SplitConfig(
            memory_limit_gb=split.memory_limit_gb[mine],
            blocks_without_checkpointing=split.blocks_without_checkpointing[mine] if alike is None else alike[:1],
            offloaded_blocks=split.offloaded_blocks[mine] if alike is None else alike[1:],
        )
        train = replace(job.train, gradient_accumulation_steps=accumulation)
        return replace(
            self,
            job=replace(job, split=own, train=train, parallel=replace(job.parallel, strategy="none")),
            cards=self.cards[mine],
            cuts=None,
            host_bytes=None if self.host_bytes is None else self.host_bytes // (1 if shares else count),
            replica=index,
            row_shares=shares[mine] + shares[:index] + shares[index + 1 :],
            picture=None if index and not shares_rows(setting.strategy) else self.picture,
        )

    def check_counts(self) -> None:
        """Raises: ValueError for settings per device that are not as many as there are cards."""
        for name in PER_DEVICE:
            check_one_each(f"split.{name}", getattr(self.job.split, name), [card.name for card in self.cards])

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the user cuts, ends included; () where the planner does."""
        names, split_at = self.model.names, self.job.split.split_at
        if self.cuts is not None:
            return 0, *self.cuts, len(names)
        if not split_at:
            return ()
        plan_manual(names, [card.device for card in self.cards], split_at)  # refuses wrong cuts
        return 0, *split_at, len(names)

    def settings(self) -> list[Setting]:
        """Every candidate that these cards can do."""
        split, most_ahead = self.job.split, self.job.parallel.microbatches_ahead
        ahead = sorted({most_ahead, 0}, reverse=True) if is_open(self.open.strategies) else [most_ahead]
        strategies = strategies_on(self.open.strategies, self.accumulation, [card.device for card in self.cards])
        if is_open(strategies) and (self.bounds or any(split.offloaded_blocks)):
            # A given cut asks for a split, and by its own choice only a split streams.
            strategies = tuple(each for each in strategies if not holds_copies(each))
        is_uneven, native = len({*split.blocks_without_checkpointing}) > 1, self.model.family.native
        has_derived = native is not None and bool(native.derived_rows)  # which a later sample may not have
        if is_open(strategies) and (is_uneven or has_derived or self.model.family.why_no_tokens):
            strategies = tuple(each for each in strategies if not shares_rows(each))
        # By speed in quarters of the slowest card's; equal ones may fit where those do not.
        slowest, equal = min(card.speed for card in self.cards), (1.0,) * len(self.cards)
        by_speed = tuple(round(4 * card.speed / slowest) / 4 for card in self.cards)
        row_shares = (self.kept_shares,) if self.kept_shares else dict.fromkeys((by_speed, equal))
        found = [
            Setting(scheme, optimizer, strategy, each, offloads, shares)
            for scheme in self._schemes()
            for optimizer in self.open.optimizers
            for strategy in strategies
            for each in (ahead if has_stages(strategy) else [0])
            for offloads in (self.open.offloads if self.is_checkpointing else (False,))
            for shares in (row_shares if shares_rows(strategy) else ((),))
        ]
        return sorted(found, key=lambda setting: shares_rows(setting.strategy))  # what the others take is known then

    @property
    def able_schemes(self) -> list[Scheme]:
        """Schemes that these cards can do and that suit the model's file, the best first."""
        return able_schemes(self.cards, self.model.info.quantized_types)

    def _schemes(self) -> Sequence[str]:
        """Raises: ValueError for a scheme that the job names and that a card cannot multiply in."""
        if is_open(self.open.schemes):
            able = self.able_schemes
            faster = [scheme for scheme in able if SCHEME_TIMES[scheme] < 1]
            return ["none", *(faster or able)]  # a scheme that only stores is slower; for cards without 8-bit products
        for scheme, card in itertools.product(SCHEMES, self.cards):
            if scheme not in self.open.schemes or scheme not in card.refuses:
                continue
            if card.has_context and (why := refusal(QuantizeSettings(scheme), [each.device for each in self.cards])):
                raise ValueError(why)
            kind, works = f" ({card.kind.name})" if card.kind else "", next(iter(self.able_schemes), "none")
            raise ValueError(f"{card.name}{kind} has no products in {scheme}; use {works} instead")
        return self.open.schemes

    @property
    def may_stream(self) -> bool:
        """Whether it is the planner's to say which blocks stream from host memory."""
        can_stream = bool(self.row_shares) or self.replica is None
        return self.is_checkpointing and not self.job.split.offloaded_blocks and can_stream

    @property
    def most(self) -> float:
        """Share of a card that may be needed; with memory_limit_gb the user says what fits."""
        return float("inf") if self.job.split.memory_limit_gb else 1.0

    def seconds(self, card: Card, scheme: str, *, is_whole: bool = False) -> list[float]:
        """Of each block's forward of a micro-batch, by operations; its backward takes as long, with frozen weights.
        is_whole: whether every card computes such a sample whole, whose rows it cannot share out."""
        rate = card.speed * ASSUMED_FLOPS_PER_S / SCHEME_TIMES[scheme]
        batch = self.job.train.batch_size
        flops = [batch * each for each in self.model.block_flops(self.bucket, self.frames)]
        if self.row_shares and not is_whole:
            # Keys and values of the other cards' rows come forward, and gradients for those of its own back.
            share = self.row_shares[0] / sum(self.row_shares)
            most = max(1 - share, share * (len(self.row_shares) - 1))
            keys = self.model.key_bytes(self.bucket, self.frames, self.dtype.itemsize)
            scale = card.flops_per_s / (card.speed * ASSUMED_FLOPS_PER_S) or 1.0  # to seconds of a card of speed 1
            coming = scale * batch * most / card.link_bytes_per_s
            return [each * share / rate + sent * coming for each, sent in zip(flops, keys, strict=True)]
        return [each / rate for each in flops]

    def work(self, scheme: str) -> Work:
        """What a micro-batch computes."""
        job = self.job
        return Work(
            latent_shape=latent_shape_of(self.model.info, self.model.variant, self.bucket, self.frames),
            batch_size=job.train.batch_size,
            dtype=self.dtype,
            quantize=None if scheme == "none" else QuantizeSettings(scheme, job.model.rotation),  # type: ignore[arg-type]
            lora=job.lora,
            text=self.text,
            row_shares=self.row_shares,
            has_prior=self.passes > 2,
        )

    def forecaster(self, setting: Setting) -> Forecaster:
        """Adds up what any cut needs."""
        job, has_context = self.job, all(card.has_context for card in self.cards)
        work, picture, first = self.work(setting.scheme), None, self.cards[0]
        is_rounded = setting.scheme not in ("none", "stored")
        # Kernels are those of the first card; only 8-bit products ask it for what it has, which compiles one there.
        is_asked = first.has_context and setting.scheme.endswith("-compute")
        kernels = Kernels(device_kernels(first.device) if is_asked else UNSEEN_CARD)
        cost = self.model.dry_run(work, kernels)
        if self.picture is not None:
            shape = latent_shape_of(self.model.info, self.model.variant, self.picture[:2], self.picture[2])
            if prod(shape) > work.batch_size * prod(work.latent_shape):  # else a forward of training takes as much
                text = None if work.text is None else work.text.without_streams
                picture = self.model.dry_run(
                    replace(work, latent_shape=shape, batch_size=1, text=text, has_prior=False), kernels
                )
        chosen = replace(job.optimizer, name=setting.optimizer)
        optimizer = optimizer_bytes(chosen, job.lora.dtype, ema=bool(job.train.ema_decay))
        if self.replica is not None:
            # With data parallel its state is on the first card. All hold a flat copy of the gradients for a moment,
            # when no activations are left.
            flat, is_first = float(getattr(torch, job.lora.dtype).itemsize), self.replica == 0
            optimizer = Optimizer(optimizer.state, max(optimizer.step, flat)) if is_first else Optimizer(0.0, flat)
        return Forecaster(
            cost,
            optimizer,
            setting.strategy,
            self.accumulation,
            setting.ahead,
            MIN_BYTES if setting.offloads else None,
            backend=Backend(context=0) if has_context else Backend(),
            largest_layer=self.model.largest_linear * self.dtype.itemsize if is_rounded else 0,
            picture=picture,
        )


def make_square(config: DataConfig, variant: Variant, latent: LatentSpec) -> Sample:
    """A square of the largest resolution and length, for a plan before there is a dataset: an image, or for a variant
    that is given the first frame the longest clip. Raises: ValueError for a size that the model does not take."""
    make_clip_plan(config, latent)  # refuses lengths
    needs_clips = variant.condition != "none"
    frames = max(config.frames or (latent.frame_lengths if needs_clips else (1,)))
    if needs_clips and frames == 1:
        raise ValueError(
            f"{variant.name} is given the first frame, so in one frame nothing is left to learn; give --frames "
            f"{max(latent.frame_lengths)}, or another length of {latent.clip_rule}"
        )
    (size,) = make_buckets(config.largest_resolution, bucket_step(config, latent), 1.0)
    return Sample("a square", "", None, size, (0, 0, *size), size, tuple(range(frames)) if frames > 1 else ())
