"""Searches how a job may use its cards: the fastest setting whose forecast fits (plan_training.py makes the plan).

Everything comes from sizes: forecast.py says what a setting needs on every card, BlockTimes what a block takes.
Searched are the scheme and the optimizer (where the user left them to us), the schedule and its micro-batches in
flight, the cut, and how many blocks of every card keep their activations. What the user has set is only checked. Where
a setting does not fit, as many blocks as it takes stream from host memory: a stage then takes as long as its copies, if
these take longer than its computation.

The time of a step with `a` micro-batches over stages that take t_k each:

    one after the other   a * sum(t)
    in a pipeline         sum(t) + (a - 1) * max(max(t), sum(t) / p)     p micro-batches held by the first stage
    replicas              max(t_k * micro-batches of card k)             the whole model on each card (plan_replicas.py)

in seconds: measured on the cards (calibration.py) or estimated from operations. t_k has the blocks of a stage, on the
first also the embedders, on the tail's also tail and loss; copies between cards and the optimizer are left out.

Without a pipeline the cut does not change the time while the cards are equally fast; then it evens out memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from ..checkpoints.checkpoint import CheckpointInfo
from ..checkpoints.load import make_empty_transformer
from ..config.job import JobConfig, OptimizerConfig
from ..data.samples import Sample
from ..families.spec import ModelFamily, Variant
from ..parallel.local.data_parallel import num_dealt
from ..parallel.offload.activations import MIN_BYTES
from ..parallel.offload.copies import NUM_SLOTS
from ..parallel.placement import Placement, block_names, check_one_each, estimate_block_flops, plan_manual
from ..quantization.kernel_choice import device_kernels
from ..quantization.quantize import BEST_FIRST, QuantizeSettings, Scheme, check_packages
from ..training.optimizer import make_optimizer
from .block_times import SCHEME_TIMES, BlockTimes, FlopTimes, Timing
from .cards import Card
from .data_parallel import job_of_replica, optimizer_of_replica
from .dry_run import UNSEEN_CARD, Kernels, Rehearsal, Work, rehearse_training
from .forecast import (
    CARD_WORKSPACE_BYTES,
    CONTEXT_BYTES,
    FRAGMENTATION,
    Backend,
    DeviceForecast,
    Forecast,
    Forecaster,
    Optimizer,
    StagePlan,
    StepSettings,
)

_log = logging.getLogger(__name__)

# How many times faster a setting must be for blocks, and again for block inputs, to wait in host memory where something
# fits without: how far copies are hidden is an estimate.
HOST_GAIN = 1.1
PINNED_SHARE = 0.8  # of free host memory that may be pinned; the system needs some that it can move
# Share of streaming, or of what is computed beside it if that is shorter, that is not hidden: 0 to 0.45 were
# measured by benchmarks/weight_offload.py on an H200 (docs/internals/experiments.md, 2026-11-22).
UNHIDDEN = 0.3
HEADROOM = 0.05  # of a card, left free by what the planner chooses to keep; the forecast may be off by as much
HOST_SHARE = 0.9  # of free host memory, for blocks that stream from there: it is pinned and cannot be swapped out


Schedule = Literal["none", "1f1b", "replicas"]
Swaps = Literal["none", "needed", "all"]  # which blocks stream from host memory where the user has not said
Goal = Literal["time", "host"]  # what a cut is to have least of: seconds, or bytes in host memory


@dataclass(frozen=True)
class Setting:
    """One way to run a job; see StepSettings."""

    scheme: str
    optimizer: str
    schedule: Schedule
    ahead: int
    offloads: bool = False  # inputs of recomputed blocks wait in host memory

    def describe(self) -> str:
        """ "fp8-compute, 1f1b, 1 ahead"."""
        parts = ["weights in full precision" if self.scheme == "none" else self.scheme]
        if self.schedule != "none":
            parts.append(self.schedule + (f", {self.ahead} ahead" if self.ahead else ""))
        if self.optimizer == "adamw8bit":
            parts.append("adamw8bit")
        if self.offloads:
            parts.append("block inputs in host memory")
        return ", ".join(parts)


@dataclass(frozen=True)
class Alternative:
    """A setting that was looked at; times_longer than the chosen one, None if it does not fit."""

    setting: Setting
    times_longer: float | None


@dataclass(frozen=True)
class TrainingPlan:
    """What was chosen and why.

    Args:
        job: with every "auto" that the planner answers replaced.
        kept_blocks, swapped_blocks: per device.
        bucket, frames: (height, width) in pixels, and video frames, that were planned for.
        variant: name of the model.
        relative_time: of a step, over the same with every block recomputed, one micro-batch after the other and, for
            replicas, on the first card alone.
        has_graphs: whether kept blocks are counted as replayed CUDA graphs.
        step_s: of a step at this size, seconds. timing: where its times were measured; None for estimates.
        warning: why it may not fit after all, where the user has vouched for it; "" otherwise.
    """

    job: JobConfig
    cards: tuple[Card, ...]
    placement: Placement
    setting: Setting
    kept_blocks: tuple[int, ...]
    swapped_blocks: tuple[int, ...]
    forecast: Forecast
    relative_time: float
    step_s: float
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...] = ()
    hints: tuple[str, ...] = ()
    warning: str = ""
    bucket: tuple[int, int] = (0, 0)
    frames: int = 1
    variant: str = ""
    timing: Timing | None = None
    has_graphs: bool = False


@dataclass(frozen=True)
class Stage:
    """What a card does in a setting that was found."""

    plan: StagePlan
    forecast: DeviceForecast
    time: float
    share: float  # of the card that is needed
    is_waiting: bool  # for copies, which take longer than what it computes
    streamed: int  # bytes in host memory


@dataclass(frozen=True)
class Found:
    """How a setting would run."""

    setting: Setting
    stages: tuple[Stage, ...]
    time: float
    settings: StepSettings
    offloaded_bytes: int
    resident_time: float | None = None  # of what fits with this setting without blocks in host memory, and is slower

    @property
    def is_swapping(self) -> bool:
        return any(stage.plan.num_swapped for stage in self.stages)


def _must_swap(found: Found) -> bool:
    """Whether blocks stream because nothing fits with its setting without."""
    return found.is_swapping and found.resident_time is None


def asked_schedule(job: JobConfig, devices: Sequence[torch.device]) -> Literal["1f1b", "replicas"] | None:
    """The schedule that a job asks for on these devices; None for one micro-batch at a time, "auto" means 1f1b.

    Several micro-batches and several devices of one kind are needed, else there is none whatever is asked for. The CPU
    is left out: its random numbers are drawn from one generator by all threads.
    """
    asked = job.parallel.strategy
    if asked == "none" or why_no_schedule(job, devices):
        return None
    return "replicas" if asked == "data" else "1f1b"


def why_no_schedule(job: JobConfig, devices: Sequence[torch.device]) -> str:
    """What is missing for several devices to share a step; "" if nothing is."""
    kinds = {device.type for device in devices}
    if len(devices) < 2:
        return "there is one card"
    if job.train.gradient_accumulation_steps < 2:
        return "there is one micro-batch in a step (train.gradient_accumulation_steps)"
    return "the devices are not cards of one kind" if len(kinds) > 1 or "cpu" in kinds else ""


def largest_bucket(samples: Sequence[Sample]) -> tuple[int, int, int]:
    """Height and width in pixels and frames of the samples that take the most."""
    return max(((*sample.bucket, sample.num_frames) for sample in samples), key=math.prod)


class Planner:
    """Plans one job for one set of cards; rehearses each scheme once.

    Args:
        info: the checkpoint; only its header was read.
        bucket: (height, width) in pixels of the largest samples. frames: video frames.
        times: () takes operations. cuts: first block of each further card, where a resumed run must cut as before.
        host_bytes: free host memory; None where that is not known, as for cards that are elsewhere.
        graphs_fault: why blocks are not replayed as CUDA graphs though train.cuda_graphs is "auto"; see job_plan.py.
    """

    def __init__(
        self,
        job: JobConfig,
        info: CheckpointInfo,
        variant: Variant,
        cards: Sequence[Card],
        bucket: tuple[int, int],
        *,
        frames: int = 1,
        times: BlockTimes | None = None,
        cuts: Sequence[int] | None = None,
        host_bytes: int | None = None,
        graphs_fault: str = "",
    ) -> None:
        self.graphs_fault = graphs_fault
        self.job, self.info, self.variant = job, info, variant
        self.family: ModelFamily = info.family
        self.names = block_names(self._model, self.family)
        self.cards = tuple(cards[: len(self.names)])
        self.bucket, self.frames, self.host_bytes = bucket, frames, host_bytes
        self._given_times, self._cuts = times, cuts
        self._rehearsals: dict[str, Rehearsal] = {}
        self.replica: int | None = None  # which one this plans for, on a card of its own

    @cached_property
    def _model(self) -> nn.Module:
        """Sizes without weights."""
        return make_empty_transformer(self.info)

    def changed(
        self, job: JobConfig, cards: Sequence[Card], bucket: tuple[int, int], frames: int | None = None
    ) -> Planner:
        """The same for another job, other cards or another size; the cut is the planner's again if they differ."""
        other = copy(self)
        other.job, other.cards, other.bucket = job, tuple(cards[: len(self.names)]), bucket
        other.frames = self.frames if frames is None else frames
        other._cuts = self._cuts if len(cards) == len(self.cards) else None
        other._given_times = None  # they are of this job and these cards; what fits does not depend on them
        for name in ("times", "bounds"):
            other.__dict__.pop(name, None)
        train = replace(job.train, gradient_accumulation_steps=self.job.train.gradient_accumulation_steps)
        has_other_work = replace(job, split=self.job.split, optimizer=self.job.optimizer, train=train) != self.job
        if has_other_work or (bucket, other.frames) != (self.bucket, self.frames):  # of a micro-batch
            other._rehearsals = {}
        return other

    def with_times(self, times: BlockTimes) -> Planner:
        """The same with other times."""
        other = copy(self)
        other._given_times = times
        other.__dict__.pop("times", None)
        return other

    def alone(self, index: int) -> Planner:
        """For the replica of one card: the whole model, and its share of the micro-batches and of host memory."""
        _check_counts(self)
        other = copy(self)
        other.job, other.cards = job_of_replica(self.job, index, len(self.cards)), (self.cards[index],)
        other._given_times, other._cuts, other.replica = self.times, None, index
        other.host_bytes = None if self.host_bytes is None else self.host_bytes // len(self.cards)
        for name in ("times", "bounds"):
            other.__dict__.pop(name, None)
        return other

    # ---- what is known of the job

    @cached_property
    def times(self) -> BlockTimes:
        if self._given_times is not None:
            return self._given_times
        num_image = self.family.latent_of(self.variant).num_tokens(*self.bucket, self.frames)
        num_text = max(encoder.max_length for encoder in self.variant.text_encoders)
        flops = estimate_block_flops(self._model, self.family, num_image, num_text)
        return FlopTimes([self.job.train.batch_size * each for each in flops])

    def work(self, scheme: str) -> Work:
        """What a micro-batch computes."""
        latent = self.family.latent_of(self.variant)
        height, width = (side // latent.spatial_stride for side in self.bucket)
        model = replace(self.job.model, quantize=scheme)  # type: ignore[arg-type]
        frames = 1 + (self.frames - 1) // latent.frame_stride
        published = self.variant.transformer_config["in_channels"]  # a model of its own size may have another VAE
        channels = latent.channels * self.info.config.get("in_channels", published) // published
        return Work(
            latent_shape=(channels, frames, height, width),
            batch_size=self.job.train.batch_size,
            dtype=getattr(torch, model.dtype),
            quantize=model.quantize_settings,
            lora=self.job.lora,
        )

    def _rehearsal(self, scheme: str) -> Rehearsal:
        if scheme not in self._rehearsals:
            with torch.inference_mode(False):  # ComfyUI runs nodes in it, and such tensors pass no gradients
                model = make_empty_transformer(self.info)
            self._rehearsals[scheme] = rehearse_training(
                model, self.family, self.variant, self.info.config, self.work(scheme), self._kernels(scheme)
            )
        return self._rehearsals[scheme]

    def _kernels(self, scheme: str) -> Kernels:
        """Those of the first card; only 8-bit products ask a card for what it has, which compiles a kernel there."""
        first = self.cards[0]
        if first.eight_bit is None and first.has_context and scheme.endswith("-compute"):
            return Kernels(device_kernels(first.device))
        return Kernels(first.eight_bit or UNSEEN_CARD)

    def forecaster(self, setting: Setting, settings: StepSettings) -> Forecaster:
        has_context = all(card.has_context for card in self.cards)
        backend = Backend(CARD_WORKSPACE_BYTES, FRAGMENTATION, 0 if has_context else CONTEXT_BYTES)
        optimizer = optimizer_bytes(setting.optimizer, self.job.lora.dtype)
        return Forecaster(
            self._rehearsal(setting.scheme),
            optimizer if self.replica is None else optimizer_of_replica(optimizer, self.replica, self.job.lora.dtype),
            settings,
            backend=backend,
            largest_layer=0 if setting.scheme == "none" else self._largest_layer,
        )

    @cached_property
    def _largest_layer(self) -> int:
        """A linear in full precision while it is rounded, in bytes."""
        linears = (module for module in self._model.modules() if isinstance(module, nn.Linear))
        return max(module.weight.numel() for module in linears) * getattr(torch, self.job.model.dtype).itemsize

    # ---- the search

    def settings(self) -> Iterator[Setting]:
        """Every setting the user allows."""
        asked = self.job.train.offload_activations
        may = asked != "off" and self.job.train.gradient_checkpointing
        for setting in self._without_offload():
            yield from [setting] if asked != "on" else []
            yield from [replace(setting, offloads=True)] if may else []

    def _without_offload(self) -> Iterator[Setting]:
        job = self.job
        asked = asked_schedule(job, [card.device for card in self.cards])
        schedules: list[Schedule] = ["none" if asked is None else asked]
        if asked is not None and job.parallel.strategy == "auto":
            is_split = self.bounds or any(
                job.split.offloaded_blocks
            )  # a given cut asks for a split, and only it streams
            schedules += ["none"] if is_split else ["none", "replicas"]
        for scheme in self._schemes():
            for optimizer in ["adamw", "adamw8bit"] if job.optimizer.name == "auto" else [job.optimizer.name]:
                for schedule in schedules:
                    is_free = schedule == "1f1b" and job.parallel.strategy == "auto"
                    for ahead in (
                        sorted({job.parallel.microbatches_ahead, 0}, reverse=True)
                        if is_free
                        else [job.parallel.microbatches_ahead]
                    ):
                        yield Setting(scheme, optimizer, schedule, 0 if schedule != "1f1b" else ahead)

    def _schemes(self) -> list[str]:
        if self.job.model.quantize != "auto":
            return [self.job.model.quantize]
        able = self.able_schemes
        faster = [scheme for scheme in able if SCHEME_TIMES[scheme] < 1]
        return ["none", *(faster or able)]  # a scheme that only stores is slower; for cards without 8-bit products

    @property
    def able_schemes(self) -> list[str]:
        """8-bit schemes that every card and the packages installed here can do, the fastest first."""
        refused = frozenset().union(*(card.refuses for card in self.cards))
        return [scheme for scheme in BEST_FIRST if scheme not in refused and _has_packages(scheme)]

    def ends_s(self, plan: StagePlan, scheme: str, settings: StepSettings) -> float:
        """What a stage computes besides its blocks, in seconds of a micro-batch."""
        front, tail = self.times.ends(self.cards[plan.stage], scheme)
        return front * (plan.stage == 0) + tail * (plan.stage == settings.tail_stage(plan.num_stages))

    def recomputed_s(self, blocks: Iterable[int], card: Card, scheme: str) -> float:
        """Seconds of a micro-batch through these blocks: forward, forward again, and backward."""
        times = (self.times.of(block, card, scheme) for block in blocks)
        return sum(2 * forward + backward for forward, backward in times)

    def find(self) -> tuple[Found | None, list[tuple[Setting, Found | None]]]:
        """The fastest setting that fits, None if none does; and everything that was looked at.

        A larger optimizer is preferred to a faster setting: 8-bit state is for what would not fit otherwise. Blocks
        that stream from host memory are for what would be slower otherwise, or not fit at all. Offloading of block
        inputs is looked at where the same does not fit without, or only with streamed blocks, and has to be worth it.
        """
        looked_at = self._look(1.0)
        if self.job.split.memory_limit_gb and all(found is None for _, found in looked_at):
            looked_at = self._look(math.inf)  # the user says what fits
        fitting = [found for _, found in looked_at if found is not None]
        best = [
            min(those, key=lambda found: (found.setting.optimizer == "adamw8bit", self._weighed(found)))
            for is_swapping in (False, True)
            if (those := [found for found in fitting if _must_swap(found) == is_swapping])
        ]
        return min(best, key=self._weighed, default=None), looked_at

    def _look(self, most: float) -> list[tuple[Setting, Found | None]]:
        """Every setting worth looking at; most is the share of a card that may be needed. Copies of the model need more
        than a split: where nothing fits they are looked at only if the user names them."""
        looked_at: list[tuple[Setting, Found | None]] = []
        resident: set[Setting] = set()
        best = math.inf
        for setting in self.settings():
            if self._is_auto(setting) and replace(setting, offloads=False) in resident:
                continue
            if most > 1 and setting.schedule == "replicas" and self.job.parallel.strategy != "data":
                continue
            found = self.fit(setting, most, best)
            looked_at.append((setting, found))
            if found is not None and not found.is_swapping:
                resident.add(setting)
            best = min(best, math.inf if found is None else self._weighed(found))
        return looked_at

    def _is_auto(self, setting: Setting) -> bool:
        """Whether offloading is ours to choose, and chosen."""
        return setting.offloads and self.job.train.offload_activations == "auto"

    def _weighed(self, found: Found) -> float:
        waiting = self._is_auto(found.setting), found.is_swapping and self.may_swap
        return found.time * HOST_GAIN ** sum(waiting)

    def fit(self, setting: Setting, most: float = 1.0, best: float = math.inf) -> Found | None:
        """The best cut for a setting, None if there is none that fits: with some headroom and blocks that keep their
        activations if possible, else as tight as it gets, else, or where that is worth it, with blocks that stream from
        host memory.

        Args:
            most: share of a card that may be needed; inf where the user vouches for what does not fit.
            best: time of what was found before, weighed; blocks need not stream for a slower one.
        """
        if setting.schedule == "replicas":
            return self._each_alone(setting, lambda alone, each: alone.fit(each, most))
        found = self._search(setting, 1 - HEADROOM) if most <= 1 else None
        found = found or self._search(setting, most, keeps=False)
        if found is None:
            return self._swapping(setting, min(most, 1 - HEADROOM)) or self._swapping(setting, most)
        if not self.host_fits(found):
            return None
        return found if found.is_swapping or most > 1 else self._faster_swapping(found, best)

    def _each_alone(self, setting: Setting, find: Callable[[Planner, Setting], Found | None]) -> Found | None:
        """What find finds for every card alone, together; None if one of them cannot hold the model."""
        plain, found = replace(setting, schedule="none", ahead=0), []
        for index in range(len(self.cards)):
            one = find(self.alone(index), plain)
            if one is None:
                return None
            found.append(one)
        dealt = num_dealt(self.job.train.gradient_accumulation_steps, len(self.cards))
        time = max(one.time for one, count in zip(found, dealt, strict=True) if count)
        offloaded = sum(one.offloaded_bytes for one in found)
        stages = tuple(one.stages[0] for one in found)
        return replace(found[0], setting=setting, stages=stages, time=time, offloaded_bytes=offloaded)

    def _faster_swapping(self, resident: Found, best: float) -> Found:
        """The same setting with blocks that stream from host memory, where that is worth it; else what is given.

        So it is where the fastest of several cards is too small for the blocks that it should compute.
        """
        if not self.may_swap or min(resident.time, best) <= HOST_GAIN * self._least_time(resident.setting):
            return resident  # whatever the cut
        found = self._swapping(resident.setting, 1 - HEADROOM)
        if found is None or resident.time <= HOST_GAIN * found.time:
            return resident
        return replace(found, resident_time=resident.time)

    def _least_time(self, setting: Setting) -> float:
        """No step with every block recomputed is shorter: the fastest card computes all, or all cards share evenly."""
        blocks = range(len(self.names))
        whole = [self.recomputed_s(blocks, card, setting.scheme) for card in self.cards]
        shortest = min(whole) if setting.schedule == "none" else 1 / sum(1 / each for each in whole)
        return self.job.train.gradient_accumulation_steps * shortest

    def is_possible(self) -> bool:
        """Whether anything fits."""
        return any(map(self._is_possible_with, self._least()))

    def _is_possible_with(self, setting: Setting) -> bool:
        found = self._search(setting, self._most, keeps=False)
        return self.host_fits(found) if found is not None else self._swapping(setting, self._most) is not None

    def without_limits(self) -> list[Found]:
        """What every setting would need of its cards at least, with as many blocks in host memory as may be."""
        swaps: Swaps = "all" if self.may_swap else "none"
        found = (
            self._search(setting, math.inf, keeps=False, has_limits=False, swaps=swaps) for setting in self._least()
        )
        return [each for each in found if each is not None]

    def _least(self) -> list[Setting]:
        """The settings that may need the least: where offloading is ours to choose, those without need more."""
        every = list(self.settings())
        return [each for each in every if each.offloads] or every if self.host_bytes is None else every

    @property
    def may_swap(self) -> bool:
        """Whether it is the planner's to say which blocks stream from host memory."""
        return self.job.train.gradient_checkpointing and not self.job.split.offloaded_blocks and self.replica is None

    def _swapping(self, setting: Setting, most: float) -> Found | None:
        """With as few blocks in host memory as it takes; the fastest cut, else the one that takes least of the host."""
        if not self.may_swap:
            return None
        for goal in ("time", "host"):
            found = self._search(setting, most, keeps=False, swaps="needed", goal=goal)  # type: ignore[arg-type]
            if found is None or self.host_fits(found):
                return found
        return None

    def host_fits(self, found: Found) -> bool:
        """Whether the host has room for what streams from there or waits there."""
        if self.host_bytes is None or not (found.is_swapping or found.offloaded_bytes):
            return True
        return self.host_needed(found) <= HOST_SHARE * self.host_bytes

    def host_needed(self, found: Found) -> int:
        """Bytes of host memory that a setting takes."""
        forecaster = self.forecaster(found.setting, found.settings)
        return forecaster.host_bytes([stage.plan for stage in found.stages])

    def but_for_the_host(self) -> Found | None:
        """What would fit the cards and takes least of the host, which may be more than it has; None if nothing does."""
        if not self.may_swap:
            return None
        found = [
            self._search(setting, self._most, keeps=False, swaps="needed", goal="host") for setting in self.settings()
        ]
        return min(filter(None, found), key=self.host_needed, default=None)

    @property
    def _most(self) -> float:
        """Share of a card that may be needed; with memory_limit_gb the user says what fits."""
        return math.inf if self.job.split.memory_limit_gb else 1.0

    def _search(
        self,
        setting: Setting,
        most: float,
        *,
        keeps: bool = True,
        has_limits: bool = True,
        swaps: Swaps = "none",
        goal: Goal = "time",
    ) -> Found | None:
        if setting.schedule == "replicas":  # their blocks never stream
            return self._each_alone(
                setting, lambda alone, each: alone._search(each, most, keeps=keeps, has_limits=has_limits)
            )
        job = self.job
        settings = StepSettings(
            schedule=setting.schedule,
            accumulation=job.train.gradient_accumulation_steps,
            ahead=setting.ahead,
            is_checkpointing=job.train.gradient_checkpointing,
            has_graphs=job.train.cuda_graphs == "auto" and not self.graphs_fault,
            offload_from=MIN_BYTES if setting.offloads else None,
        )
        forecaster = self.forecaster(setting, settings)
        search = _Search(
            self, setting, settings, forecaster, most=most, keeps=keeps, has_limits=has_limits, swaps=swaps, goal=goal
        )
        stages = search.fixed(self.bounds) if self.bounds else search.best()
        if stages is None:
            return None
        offloaded = forecaster.offloaded_bytes([stage.plan for stage in stages])
        time = _step_time(settings, [stage.time for stage in stages])
        found = Found(setting, tuple(stages), time, settings, offloaded)
        return found if self.can_pin(found) or not has_limits else None

    def can_pin(self, found: Found) -> bool:
        """Whether what is offloaded fits host memory, as far as that is known."""
        return self.host_bytes is None or found.offloaded_bytes <= PINNED_SHARE * self.host_bytes

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where the user cuts, ends included; () where the planner does."""
        if self._cuts is not None:
            return 0, *self._cuts, len(self.names)
        if self.job.split.balance != "manual":
            return ()
        plan_manual(self.names, [card.device for card in self.cards], self.job.split.split_at)  # refuses wrong cuts
        return 0, *self.job.split.split_at, len(self.names)


def _check_counts(planner: Planner) -> None:
    """Raises: ValueError for settings per device that are not as many as there are cards."""
    for name in ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks"):
        check_one_each(f"split.{name}", getattr(planner.job.split, name), [card.name for card in planner.cards])


def _has_packages(scheme: Scheme) -> bool:
    try:
        check_packages(QuantizeSettings(scheme))
    except RuntimeError:
        return False
    return True


def _step_time(settings: StepSettings, times: Sequence[float]) -> float:
    total, count = sum(times), settings.accumulation
    if settings.schedule == "none":
        return count * total
    return total + (count - 1) * max(max(times), total / settings.held(0, len(times)))


class _Search:
    """Cuts for one setting: a dynamic programme over (stages used, blocks placed)."""

    def __init__(
        self,
        planner: Planner,
        setting: Setting,
        settings: StepSettings,
        forecaster: Forecaster,
        *,
        most: float,
        keeps: bool,
        has_limits: bool,
        swaps: Swaps,
        goal: Goal,
    ) -> None:
        self._planner, self._scheme = planner, setting.scheme
        self._settings, self._forecaster = settings, forecaster
        self._most, self._keeps, self._swaps, self._goal = most, keeps, swaps, goal
        split = planner.job.split
        self._limits = split.memory_limit_gb if has_limits else ()
        _check_counts(planner)
        self._kept, self._swapped = split.blocks_without_checkpointing, split.offloaded_blocks
        blocks = range(len(planner.names))
        self._times = [
            [tuple(map(_summable, planner.times.of(block, card, setting.scheme))) for block in blocks]
            for card in planner.cards
        ]
        self._seconds = [_prefix(sum(each) for each in times) for times in self._times]
        self._again = [_prefix(each[0] for each in times) for times in self._times]
        self._links = [planner.times.link(card) for card in planner.cards]

    def fixed(self, bounds: Sequence[int]) -> list[Stage] | None:
        """The stages of the user's cut, None if one does not fit."""
        stages = []
        for index, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            stage = self._stage(index, start, end)
            if stage is None:
                return None
            stages.append(stage)
        return stages

    def best(self) -> list[Stage] | None:
        """Of the cuts that fit, the one with the shortest step; of equals, the one that streams least; of these, the
        one whose fullest card is emptiest."""
        num_blocks, num_stages = len(self._planner.names), len(self._planner.cards)
        best: dict[int, tuple[_Value, list[Stage]]] = {0: ((0.0, 0.0, 0.0), [])}
        for index in range(num_stages):
            options: dict[int, tuple[_Value, list[Stage]]] = {}
            ends = range(index + 1, num_blocks - (num_stages - 1 - index) + 1)
            for start, (value, stages) in best.items():
                for end in ends if index < num_stages - 1 else (num_blocks,):
                    stage = self._stage(index, start, end) if end > start else None
                    if stage is None:
                        continue
                    added = self._add(value, stage)
                    if end not in options or added < options[end][0]:
                        options[end] = added, [*stages, stage]
            best = options
        return best[num_blocks][1] if num_blocks in best else None

    def _add(self, value: _Value, stage: Stage) -> _Value:
        """Time first, then what streams from host memory, or the other way round where that is the goal; then the
        fullest card."""
        before, streamed = value[:2] if self._goal == "time" else value[1::-1]
        is_slowest = self._settings.schedule != "none" or self._planner.job.split.balance == "time"
        time = max(before, stage.time) if is_slowest else before + stage.time
        streamed += stage.streamed
        share = max(value[2], stage.share)
        return (time, streamed, share) if self._goal == "time" else (streamed, time, share)

    def _stage(self, index: int, start: int, end: int) -> Stage | None:
        plan = StagePlan(index, len(self._planner.cards), start, end)
        given = self._kept[index] if self._kept else 0
        swapped = self._swapped[index] if self._swapped else 0
        if given + swapped > end - start:
            return None
        plan = replace(plan, num_kept=given, num_swapped=swapped)
        if not self._swapped and self._swaps != "none":
            return self._with_swapped(plan)
        if self._kept or not self._settings.is_checkpointing:
            return self._checked(plan)
        found = self._checked(plan)
        if found is None or not self._keeps:
            return found
        low, high = 0, end - start - swapped  # the most blocks that may keep their activations
        while low < high:
            middle = (low + high + 1) // 2
            stage = self._checked(replace(plan, num_kept=middle))
            if stage is None:
                high = middle - 1
            else:
                low, found = middle, stage
        return found

    def _with_swapped(self, plan: StagePlan) -> Stage | None:
        """With as few blocks in host memory as let the stage fit; None if all are not enough.

        Activations do not depend on what is swapped, so bytes that are missing are bytes of weights.
        """
        most = plan.end - plan.start - plan.num_kept
        if self._swaps == "all":
            whole = replace(plan, num_swapped=most)
            return self._checked(whole if self._forecaster.saved_bytes(whole) > 0 else plan)
        missing = self._missing(plan)
        if missing <= 0:
            return self._checked(plan)
        largest = max(block.streaming for block in self._forecaster.rehearsal.blocks[plan.start : plan.end])
        fewest = NUM_SLOTS + math.ceil(missing / max(1, largest))  # the slots take as much as the first ones free
        for count in range(fewest, most + 1):
            swapped = replace(plan, num_swapped=count)
            if self._forecaster.saved_bytes(swapped) >= missing and (stage := self._checked(swapped)) is not None:
                return stage
        return None

    def _missing(self, plan: StagePlan) -> float:
        """Bytes that a stage needs beyond what it may."""
        card = self._planner.cards[plan.stage]
        found = self._forecaster.device(card.name, plan)
        over = [found.needed - self._most * max(1, card.usable_bytes)]
        if self._limits:
            over.append(found.weights - self._limits[plan.stage] * 1e9)
        return max(over)

    def _checked(self, plan: StagePlan) -> Stage | None:
        """The stage, None if it needs more of its card than it may."""
        card = self._planner.cards[plan.stage]
        found = self._forecaster.device(card.name, plan)
        if self._limits and found.weights > self._limits[plan.stage] * 1e9:
            return None
        share = found.needed / max(1, card.usable_bytes)
        if share > self._most:
            return None
        streamed = self._forecaster.streamed_bytes(plan)
        link, computing = self._links[plan.stage], self._time(plan)
        # Beside the kernels: weights for the forward and once more for the backward, inputs there and back.
        streaming = 2 * streamed / link
        copying = streaming + 2 * self._forecaster.offloaded(plan) / link
        time = max(computing, copying) + UNHIDDEN * min(computing, streaming)
        return Stage(plan, found, time, share, 0 < copying >= computing, streamed)

    def _time(self, plan: StagePlan) -> float:
        """A micro-batch's computation: forward, backward, and forward again where blocks are recomputed; embedders and
        tail."""
        seconds, again = self._seconds[plan.stage], self._again[plan.stage]
        time = seconds[plan.end] - seconds[plan.start]
        time += _summable(self._planner.ends_s(plan, self._scheme, self._settings))
        if self._settings.is_checkpointing:
            time += again[plan.end - plan.num_kept] - again[plan.start]
        return time


_Value = tuple[float, float, float]  # what a cut is chosen by, see _add


def _summable(seconds: float) -> float:
    """In steps of about 1e-12 s: sums of such are exact, so that cuts that take equally long have equal times, in
    whatever order their blocks are added up, and memory decides."""
    return round(seconds * 2**40) / 2**40


def _prefix(values: Any) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return sums


def optimizer_bytes(name: str, lora_dtype: str) -> Optimizer:
    """What an optimizer holds per trained value: state between steps, and temporaries of a step.

    Of an optimizer that this pack does not name, the state is measured on a small parameter.
    """
    size = getattr(torch, lora_dtype).itemsize
    if name in ("adamw", "auto"):
        return Optimizer(state=2 * size, step=size)  # torch takes the root of all second moments of a card at once
    if name == "adamw8bit":
        return Optimizer(state=2 * (1 + 4 / 256), step=0.0)  # two moments, a float32 per 256 values; one by one
    return Optimizer(state=_measured_state(name, lora_dtype), step=size)


def _measured_state(name: str, lora_dtype: str) -> float:
    with torch.inference_mode(False), torch.enable_grad():
        parameter = nn.Parameter(torch.zeros(64, 64, dtype=getattr(torch, lora_dtype)))
        parameter.grad = torch.zeros_like(parameter)
        optimizer = make_optimizer([parameter], OptimizerConfig(name=name))
        optimizer.step()
        held = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.element_size() for value in held) / parameter.numel()
