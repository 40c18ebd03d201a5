"""A job, a machine and what an earlier run decided, made into an ExecutionPlan: where every "auto" but one ends. Where
the cards' memory is known, the planner chooses; elsewhere "auto" is what every machine can do. A resumed run keeps its
placement: another one would draw dropout elsewhere and sum gradients in another order."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..assembly import ExecutionPlan
from ..checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from ..checkpoints.load import make_empty_transformer, weight_types
from ..config.job import JobConfig, ModelConfig, ModelScheme
from ..config.model import Strategy, has_stages, holds_copies, shares_rows
from ..data.samples import TrainingSample
from ..families.comfy.native import NativeModel
from ..parallel.devices import CPU, device_title, find_device, find_devices, free_bytes, has_bf16, has_fp16
from ..parallel.placement import Placement, parameter_bytes
from ..parallel.ranks.group import Ranks
from ..planning.cards import Card, able_schemes, cards_of
from ..planning.costs import ModelCosts, latent_shape_of
from ..planning.dry_run import NoForecast, Work, forward_on_meta
from ..planning.plan import TrainingPlan, describe_work, plan_training
from ..planning.question import Question, Setting, candidates, is_open, strategies_on
from ..quantization.quantize import describe_quantized, refusal
from .checked_job import Subject, place_by_size

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Machine:
    """What a job may use."""

    devices: tuple[torch.device, ...]  # as the job names them, or all there are, in order
    named: tuple[Card, ...] = ()  # cards that are elsewhere; then there are no devices
    host_share: int = 1  # jobs that share the host's free memory
    is_planned: bool = True  # whether the planner may look at its cards; not where processes share weights
    is_alone: bool = True  # no other process trains the same model

    @functools.cached_property
    def cards(self) -> tuple[Card, ...] | None:
        """The devices with their memory; None where one's is not known, as on a CPU."""
        found = self.named or cards_of(list(self.devices))
        return None if found is None or not self.is_planned else tuple(found)

    @functools.cached_property
    def host_bytes(self) -> int | None:
        """Free host memory that this job may take; None if unknown."""
        free = None if self.named else free_bytes(CPU)
        return None if free is None else free // self.host_share


def find_machine(names: Sequence[str] = (), host_share: int = 1) -> Machine:
    """The devices named, () for every GPU or else the CPU. Raises: ValueError for a name that is no device here."""
    return Machine(tuple(find_devices(names)), host_share=host_share)


@dataclass(frozen=True)
class Resolution:
    """A job with every "auto" answered; training is what the planner chose, None on machines it knows nothing of."""

    job: JobConfig
    execution: ExecutionPlan
    training: TrainingPlan | None


def placement_of(job: JobConfig, facts: Mapping[str, Any]) -> Placement | None:
    """Of a checkpoint: where its run has its blocks, without their names, and its copies of the model. None of training
    by tensor parallel, which is gone: checkpoints hold whole LoRAs, so such a run goes on wherever its model is."""
    if facts.get("shards"):
        text = '%s: this run was trained by tensor parallel, which is gone; it goes on with parallel.strategy = "%s"'
        _log.warning(text, job.output.folder, job.parallel.strategy)
        return None
    if not facts.get("placement"):  # of a run that goes on elsewhere
        return None
    devices, replicas = (tuple(map(find_device, facts.get(key, ()))) for key in ("placement", "replicas"))
    # An earlier version kept whether rows are shared out: equally.
    shares = facts.get("row_shares", [1.0] * len(replicas) if facts.get("shares_rows") else ())
    return Placement(("",) * len(devices), devices, devices[0], replicas=replicas, row_shares=tuple(shares))


def resolve(
    job: JobConfig,
    subject: Subject,
    machine: Machine,
    earlier: Mapping[str, Any] | None = None,
    *,
    is_to_train: bool = True,
) -> Resolution:
    """Settle everything that a job leaves open. earlier: facts of the checkpoint that is resumed. is_to_train: see
    check_job. Raises: ValueError if nothing fits, or the cuts are impossible."""
    before = None if earlier is None else placement_of(job, earlier)
    if earlier is not None and earlier.get("is_one_model") and job.parallel.requested is None:
        is_piped = job.train.gradient_accumulation_steps > 1 and len(machine.devices) > 1
        job = replace(job, parallel=replace(job.parallel, strategy="pipeline" if is_piped else "none"))
    without = _left_out(subject)
    training = _plan_as_before(job, subject, machine, before) if is_to_train else None
    chosen = _first_of(job, machine.devices, without) if training is None else training.setting
    model = replace(job.model, quantize=chosen.scheme)  # type: ignore[arg-type]
    job = replace(job, model=model, optimizer=replace(job.optimizer, name=chosen.optimizer))
    if training is None:
        if shares_rows(chosen.strategy):
            _refuse_without_rows(subject)
        placement = place_by_size(job.model, job.split, subject, machine.devices, strategy=chosen.strategy)
    else:
        placement = training.placement
    if before is not None:
        placement = replace(before, blocks=placement.blocks)
    requested, split = job.parallel.requested, job.split
    if training is None:
        chosen = replace(chosen, strategy=_first_of(job, placement.used_devices, without).strategy)
    strategy = _strategy_of(subject, job, placement, chosen.strategy)
    if strategy == "none" and requested not in (None, "none"):
        also = "" if shares_rows(requested) else "train.gradient_accumulation_steps above 1 and "
        _log.warning('parallel.strategy = "%s" needs %sseveral GPUs of one kind; left out', requested, also)
    tail = tuple(subject.info.family.tail) if has_stages(strategy) else ()
    execution = ExecutionPlan(
        placement=replace(placement, tail=tail),
        dtype=getattr(torch, job.model.dtype),
        quantize=job.model.quantize_settings,
        quantized_cache=Path(job.model.quantized_cache) if job.model.quantized_cache else None,
        strategy=strategy,
        ahead=chosen.ahead if has_stages(strategy) else None,
        gradient_checkpointing=job.train.gradient_checkpointing,
        kept_blocks=split.blocks_without_checkpointing if training is None else training.uncheckpointed,
        offloaded_blocks=split.offloaded_blocks if training is None else training.offloaded,
        offloads=chosen.offloads,
        compiled_shapes=_shapes_to_compile(job, subject, strategy) if is_to_train else None,
    )
    return Resolution(job, execution, training)


def _strategy_of(subject: Subject, job: JobConfig, placement: Placement, chosen: Strategy) -> Strategy:
    """What is chosen, as far as the model can do it. A resumed run's copies stay copies, and one model stays one."""
    native = subject.info.family.native
    if native is not None and native.hooks_children and any(job.split.offloaded_blocks):
        raise ValueError(f"split.offloaded_blocks: {native.class_name} never calls its blocks; leave the setting out")
    if placement.strategy != (chosen if holds_copies(chosen) else None):
        return placement.strategy or "none"
    if has_stages(chosen) and (fault := why_no_stages(native, subject.model)):
        _log.warning("microbatches do not follow each other through the cards: %s", fault)
        return "none"
    return chosen


def in_type_of_cards(resolved: Resolution, info: CheckpointInfo, ranks: Ranks) -> tuple[CheckpointInfo, ExecutionPlan]:
    """The model and its plan in float16 where a card of any rank has no bfloat16; all ranks.
    Raises: ValueError for a model or a card that float16 is not for."""
    execution, settings = resolved.execution, resolved.job
    without = [device for device in execution.placement.used_devices if not has_bf16(device)]
    is_without = ranks.any(bool(without))
    if execution.dtype is not torch.bfloat16 or not is_without:
        return info, execution
    card = f"{without[0]} {device_title(without[0])}".strip() if without else "a card of another process"
    try:
        if any(not has_fp16(device) for device in without):
            raise ValueError("its float16 gives wrong numbers or is slow")
        if settings.lora.dtype == "bfloat16":
            raise ValueError('lora.dtype is "bfloat16", and gradients of float16 need "float32"')
        if info.family.host is not None:
            host = info.family.host.computing_in(torch.float16)
            info = replace(info, family=replace(info.family, host=host))
    except ValueError as error:
        fault = f"{card} does not compute in bfloat16, and float16 is not for this job: {error}"
        helps = 'set model.dtype and lora.dtype to "float32", or take a card that has bfloat16 (RTX 30 or newer)'
        raise ValueError(f"{fault}; {helps}") from error
    _log.warning("%s does not compute in bfloat16: the model is computed in float16, with a scaled loss", card)
    return info, replace(execution, dtype=torch.float16)


def _refuse_without_rows(subject: Subject) -> None:
    """Raises: ValueError if devices cannot compute a microbatch of this model together."""
    family = subject.info.family
    if fault := family.why_no_tokens:
        helps = ', or set it to "auto"' * (family.native is None)
        raise ValueError(f'parallel.strategy = "tokens" was asked for, but {fault}{helps}')


def _first_of(job: JobConfig, devices: Sequence[torch.device], without: Collection[Strategy] = ()) -> Setting:
    """What every machine can do, for where nobody plans."""
    schemes, optimizers, strategies, offloads = candidates(job, without)
    strategy = strategies_on(strategies, job.train.gradient_accumulation_steps, devices)[0]
    return Setting(schemes[0], optimizers[0], strategy, job.parallel.microbatches_ahead, offloads[0])


def other_cards(job: JobConfig, facts: Mapping[str, Any]) -> list[str]:
    """A line for cards of a saved run that are not here, and one if only one of job and run has copies of the model."""

    def is_gone(name: str) -> bool:
        try:
            return not find_device(name)
        except ValueError:
            return True

    placed = dict.fromkeys(map(str, [*facts.get("placement", ()), *facts.get("replicas", ())]))
    gone = ", ".join(filter(is_gone, placed))
    lines = [f"cards: {gone} of the run, not here"] if gone else []
    if not placed or facts.get("shards") or is_open(candidates(job).strategies):
        return lines
    shares = facts.get("row_shares") or facts.get("shares_rows")
    kinds = {"data": "data parallelism", "tokens": "shares of the tokens"}
    found = ("tokens" if shares else "data") if facts.get("replicas") else "none"
    today = _first_of(job, find_machine(job.split.devices).devices).strategy
    before, wanted = (kinds.get(each, "one model over all cards") for each in (found, today))
    return lines + ([f"parallel.strategy: {before} -> {wanted}"] if before != wanted else [])


def _plan_as_before(
    job: JobConfig, subject: Subject, machine: Machine, before: Placement | None
) -> TrainingPlan | None:
    """What the planner chooses, placed as the run that is resumed; None where it does not know a device's memory."""
    cuts: tuple[int, ...] | None = None
    if before is not None:
        machine = replace(machine, devices=before.used_devices)
        if before.strategy is not None:  # which a cut of today's would contradict
            split = replace(job.split, balance="memory", split_at=())
            job = replace(job, parallel=replace(job.parallel, strategy=before.strategy), split=split)
            refuse_block_settings(job)
        else:
            cuts = tuple(i for i in range(1, len(before.devices)) if before.devices[i] != before.devices[i - 1])
    if machine.cards is None:
        return None
    try:
        training = plan_on(job, subject, machine, cuts, () if before is None else before.row_shares)
    except NoForecast as error:
        _log.warning("%s", error)
        return None
    notes = [(logging.WARNING, training.warning), *((logging.INFO, note) for note in training.notes)]
    for level, text in notes:
        if text:
            _log.log(level, "%s", text)
    return training


def plan_on(
    job: JobConfig,
    subject: Subject,
    machine: Machine,
    cuts: tuple[int, ...] | None = None,
    kept_shares: tuple[float, ...] = (),
) -> TrainingPlan:
    """What the planner chooses on a machine whose cards' memory is known; cuts and kept_shares are of a resumed run.
    Raises: ValueError if nothing fits; NoForecast."""
    assert machine.cards is not None
    title = subject.info.family.title
    if fault := why_no_forecast(subject.info.family.native):
        raise NoForecast(title, fault, _time_by_work(job, subject, machine.cards))
    strategy = _first_of(job, [card.device for card in machine.cards]).strategy
    if shares_rows(strategy):
        _refuse_without_rows(subject)
    model = ModelCosts(subject.info, subject.variant, subject.model)
    without = _left_out(subject)
    # With fewer rows than cards, such as of an empty caption, each computes a sample whole: more than is planned here.
    if subject.has_empty_caption or not machine.is_alone or job.parallel.processes > 1:
        without |= {"tokens"}
    question = Question(
        model,
        job,
        machine.cards[: len(model.names)],
        subject.largest[:2],
        subject.largest[2],
        cuts=cuts,
        kept_shares=kept_shares,
        without=without,
        host_bytes=machine.host_bytes,
        picture=subject.picture,
        text=subject.text,
    )
    try:
        found = plan_training(question)
    except NoForecast as error:
        raise NoForecast(title, error.reason, _time_by_work(job, subject, machine.cards)) from None
    return replace(found, notes=(*found.notes, subject.disk_note)) if subject.disk_note else found


def _time_by_work(job: JobConfig, subject: Subject, cards: Sequence[Card]) -> str:
    """What is said of the time of a run whose memory nobody can tell; "" where a forward cannot be counted either."""
    height, width, frames = subject.largest
    shape = latent_shape_of(subject.info, subject.variant, (height, width), frames)
    work = Work(shape, job.train.batch_size, getattr(torch, job.model.dtype), None, job.lora, subject.text)
    in_turn = job.train.gradient_accumulation_steps
    if job.parallel.requested == "data":
        in_turn = math.ceil(in_turn / len(cards))
    try:
        forward = forward_on_meta(subject.model, subject.info, subject.variant, work)
    except NoForecast:
        return ""
    # once more for the backward, and for its recomputation
    return describe_work(cards, forward, (3 + bool(job.objective.masked_prior)) * in_turn, job.train.steps)


def refuse_block_settings(job: JobConfig) -> None:
    """Raises: ValueError for what blocks cannot do, and for two models in one."""
    split, strategy = job.split, job.parallel.requested
    if job.model.second_expert:
        helps = "remove it, or give the job file to `devicebridge train`, which trains both experts"
        raise ValueError(f"model.second_expert names {job.model.second_expert}, and this trains one model; {helps}")
    if strategy and shares_rows(strategy):
        for key in ("blocks_without_checkpointing", "offloaded_blocks"):
            if len(set(counts := list(getattr(split, key)))) > 1:
                fault = f"split.{key} = {counts} differs between devices, which compute each block on all of them"
                helps = f'give each the same number, or set parallel.strategy, which is "{strategy}", to "auto"'
                raise ValueError(f"{fault}; {helps}")
    elif any(split.offloaded_blocks) and strategy and holds_copies(strategy):
        fault = f'parallel.strategy = "{strategy}" puts the whole model on every card; remove one of the two'
        raise ValueError(f"split.offloaded_blocks streams from host memory, and {fault}")
    settings = {"offloaded_blocks": any(split.offloaded_blocks)}
    settings |= {"blocks_without_checkpointing": bool(split.blocks_without_checkpointing)}
    if not job.train.gradient_checkpointing and (key := next((key for key, is_set in settings.items() if is_set), "")):
        fault = f"split.{key} needs blocks that are computed again, and train.gradient_checkpointing = false has none"
        raise ValueError(f"{fault}; remove one of the two")


def sizes_of(samples: Iterable[TrainingSample]) -> frozenset[tuple[int, ...]]:
    """Everything that tells the shapes of their batches apart."""
    return frozenset((*sample.bucket, sample.num_frames, *sample.alike) for sample in samples)


def _shapes_to_compile(job: JobConfig, subject: Subject, strategy: Strategy) -> int | None:
    """Of all batches of a job, at most; None if nothing is compiled."""
    if job.train.compile == "off":
        return None
    why = "devices that compute a block on all of them exchange results in its middle" * shares_rows(strategy)
    if why := why or "torch cannot trace PEFT's DoRA" * job.lora.dora:
        _log.warning("blocks are not compiled: %s", why)
        return None
    sizes = min(job.train.batch_size, 2)  # the last batch of a bucket may be smaller
    alone = subject.alone - subject.train if sizes == 1 else subject.alone
    return len(subject.train) * sizes + len(alone)


def foresee_scheme(machine: Machine, info: CheckpointInfo) -> ModelScheme:
    """What "auto" will most likely be on this machine: none where nothing is planned."""
    return next(iter(able_schemes(machine.cards, info.quantized_types)), "none") if machine.cards else "none"


def preview_model(config: ModelConfig, devices: Sequence[str] = (), info: CheckpointInfo | None = None) -> str:
    """What loading will report of a model, info if it was read already, on these devices, () for all, and what its file
    holds in 8 bits. Raises: ValueError for no such model, or a device that lacks the scheme, naming one that works."""
    settings, used = config.quantize_settings, find_machine(devices).devices
    if settings and (reason := refusal(settings, used)):
        raise ValueError(reason)
    info = info or read_checkpoint(config.path, config.family, config.variant)
    model, dtype = make_empty_transformer(info), getattr(torch, config.dtype)
    _, num_bytes = parameter_bytes(model, (), dtype.itemsize)
    text, num_taken = f"none: all weights in {config.dtype}, {num_bytes / 1e9:.2f} GB", 0
    if settings:
        text, num_taken = describe_quantized(model, info.family, settings, weight_types(model, dtype))
    if again := sum(info.quantized_types.values()) - num_taken:
        types = ", ".join(f"{count} in {name}" for name, count in info.quantized_types.items())
        rounded = ", linears to quantize are rounded again" if settings else ""
        text += f"\nthe file holds quantized tensors ({types}): {again} become {config.dtype}{rounded}"
    return text


def why_no_stages(native: NativeModel | None, model: nn.Module) -> str:
    """Why the cards cannot work on several microbatches at once; "" for nothing."""
    if native is None:
        return ""
    if native.ends_on_main_device:
        return f"{native.class_name} computes with what is on the main device behind its blocks"
    if not native.can_overlap:
        return f"{native.class_name} needs its main device between its blocks"
    known = {*native.front_parameters, *native.tail_parameters}
    # parameters of the model itself, and of modules that hold blocks or parts of the tail
    named = [name.split(".") for name in (*native.block_lists, *native.tail)]
    holders = {".".join(parts[:count]) for parts in named for count in range(len(parts))}
    around = (
        f"{name}.{leaf}" if name else leaf
        for name, module in model.named_modules()
        if name in holders
        for leaf, each in module._parameters.items()
        if each is not None
    )
    if unknown := next((name for name in around if name not in known), ""):
        return f"{native.class_name} has weights of its own ({unknown}) behind its blocks"
    whole: Any = model
    for name in (*native.read_by_tail, *native.tail_arguments):
        if not callable(functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), whole)):
            return f"{native.class_name} has no {name}, by which its last card would get what it computes with"
    return ""


def why_no_forecast(native: NativeModel | None) -> str:
    """Why nobody can tell from sizes what a step of this class holds; "" for nothing."""
    if native is None:
        return ""
    if native.no_forecast:
        return native.no_forecast
    if native.hooks_children:
        return "no two of its blocks are alike"
    is_in_levels = any("." in name for name in native.block_lists)
    return "a dry run cannot leave out blocks of lists inside other lists" if is_in_levels else ""


def _left_out(subject: Subject) -> frozenset[Strategy]:
    """Strategies that such a model cannot do; one that was asked for by name stays, to be answered."""
    return frozenset({"pipeline"} if why_no_stages(subject.info.family.native, subject.model) else ())
