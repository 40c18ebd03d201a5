"""A job on several processes (ranks). The first rank writes and reads the run folder, and decides the strategy between
ranks, scheme and optimizer. Each resolves the job for its own devices, as if it were alone with its microbatches."""

from __future__ import annotations

import hashlib
import io
import logging
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config.job import JobConfig, Resume, shared_settings
from ..config.model import PER_DEVICE, Strategy, shards_weights, shares_rows
from ..config.setting import requested
from ..parallel.devices import free_bytes
from ..parallel.ranks.group import Ranks, joined
from ..parallel.ranks.place import RankPlace, own_devices
from ..planning.cards import Card, cards_of
from ..planning.dry_run import NoForecast
from ..planning.plan import TrainingPlan
from ..planning.search import HEADROOM
from ..runs.record import run_lock
from ..system.stopping import Requests, Stopped
from ..training.batches import CachedSamples
from ..training.state import TrainingState
from ..version import VERSION
from .checked_job import ReadJob, Subject, held_bytes
from .resolve import Machine, Resolution, find_machine, plan_on, resolve
from .resume import find_state, go_on

_log = logging.getLogger(__name__)
_FREE_SHARE = 0.9  # as for one process: the rest is a first guess at activations, LoRA and optimizer
UNLIMITED_GB = (100_000.0,)  # for what is not checked by its size
T = TypeVar("T")
Data = tuple[CachedSamples, CachedSamples | None]
_LONGEST = 80  # characters of a value


def open_ranks(job: JobConfig, place: RankPlace, own_stop: Callable[[], bool]) -> AbstractContextManager[Ranks]:
    """The ranks of a job while they are connected.
    Raises: ValueError for a job that several processes cannot train, or devices that they cannot share out."""
    for key, given in (("model.second_expert", job.model.second_expert), ("lora.text_encoder", job.lora.text_encoder)):
        if given:
            helps = "remove it, or start without parallel.processes, --nproc and torchrun"
            raise ValueError(f"{key} = {given!r} is trained in one process; {helps}")
    devices = own_devices(find_machine(job.split.devices).devices, place)
    return joined(place, devices, job.parallel.timeout_s, own_stop)


def refuse_other_jobs(job: JobConfig, identity: Mapping[str, Any], ranks: Ranks, *, is_new: bool) -> None:
    """Ranks that differ in settings, model or beginning would add up gradients of different models; all ranks.
    A resumed run, which is not is_new, does not read the LoRA that it began with.
    Raises: ValueError on the first rank, and RankFailed on the others, naming what differs and on which ranks."""
    files = {"files of the model": identity["model"], "lora.start_from": identity["start"] if is_new else ""}
    own = {**shared_settings(job), "version of DeviceBridge": VERSION, **files}
    given = ranks.gather([f"rank {ranks.place.rank} ({platform.node()})", own])

    def refuse() -> None:
        if ranks.is_first and (differing := list(differing_ranks(given))):
            lines = [f"  {line}" for line in differing]
            helps = "Give all machines the same job file, model and LoRA to start from"
            raise ValueError("\n".join(["the processes of this job differ in their training:", *lines, helps]))

    ranks.on_all(refuse)


def differing_ranks(given: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A line for everything in which ranks differ, with the first rank of each kind; given has place and settings."""
    for name in sorted({name for _, own in given for name in own}):
        kinds: dict[str, str] = {}
        for where, own in given:
            value = own.get(name)
            kinds.setdefault(repr(value[0] if isinstance(value, list) and len(value) == 1 else value), where)
        if len(kinds) > 1:
            yield f"{name}: {', '.join(f'{value[:_LONGEST]} on {where}' for value, where in kinds.items())}"


@contextmanager
def locked_folder(folder: Path, ranks: Ranks) -> Iterator[None]:
    """The run folder, locked by the first rank. Raises: as run_lock."""
    with ExitStack() as stack:

        def take() -> None:
            if ranks.is_first:
                stack.enter_context(run_lock(folder))
                Requests(folder).clear()  # of a run that was killed

        ranks.on_all(take)
        yield


def state_for_all(job: JobConfig, ranks: Ranks, *, resume: Resume) -> TrainingState | None:
    """What the first rank finds to resume, on every rank; random states are the first one's alone. See find_state."""
    found = ranks.on_all(lambda: find_state(job, resume=resume) if ranks.is_first else None)
    if not ranks.is_launched:
        return found
    data = io.BytesIO()
    if ranks.is_first:
        torch.save(found and vars(found) | {"random": {}, "path": str(found.path), "own": {}}, data)
    sent = ranks.share(data.getvalue())
    if ranks.is_first:  # no further copy where it is
        return found
    values = torch.load(io.BytesIO(sent), weights_only=True)
    return values and TrainingState(**values | {"path": Path(values["path"])})


def facts_for_all(
    read: ReadJob, identity: dict[str, Any], state: TrainingState, ranks: Ranks, *, resume: Resume
) -> dict[str, Any]:
    """What the first rank finds that a run goes on from, on every rank: others have paths of their own. See go_on."""
    work = partial(go_on, read, identity, state, resume=resume, is_placed_anew=is_placed_anew(state, ranks))
    found: dict[str, Any] = ranks.on_all(work if ranks.is_first else dict)
    return ranks.from_first(lambda: found)


def unless_stopped(ranks: Ranks, work: Callable[[], T]) -> T:
    """What work returns on each rank, if none was asked to stop meanwhile; all ranks. Raises: Stopped on every rank."""
    stops: list[Stopped] = []

    def attempt() -> T | None:
        try:
            return work()
        except Stopped as stopped:
            stops.append(stopped)
            return None

    found = ranks.on_all(attempt)
    if ranks.any(bool(stops)):
        raise stops[0] if stops else Stopped("the job was asked to stop")
    return found  # type: ignore[return-value]


def is_placed_anew(state: TrainingState, ranks: Ranks) -> bool:
    """Whether a resumed run gives the model other devices: if it or the run before is of several processes."""
    return ranks.is_launched or bool(state.facts.get("ranks"))


def cached_once(is_encoded: bool, ranks: Ranks, work: Callable[[], Data]) -> Data:
    """What work, which fills the cache and reads it, returns on each rank; all ranks.
    The first rank of each machine computes what its cache lacks, if not all is_encoded, and the others then read.
    Raises: as unless_stopped; ValueError where ranks have other samples."""
    is_early = is_encoded or ranks.place.local_rank == 0
    early = unless_stopped(ranks, lambda: work() if is_early else None)
    late = unless_stopped(ranks, lambda: None if is_early else work())
    found = early if is_early else late
    assert found is not None
    order = ranks.on_all(lambda: order_of(found))
    first = ranks.from_first(lambda: order)

    def refuse() -> None:
        if order != first:
            differing = "samples, captions, masks, references, loss weights or encoders"
            helps = "give all machines the same files and job file"
            raise ValueError(f"this rank and the first one do not have the same {differing}; {helps}")

    ranks.on_all(refuse)
    return found


def order_of(data: Iterable[CachedSamples | None]) -> str:
    """A hash of what each sample is trained on, in order. Raises: OSError if a mask has gone."""
    trained = [each.trained_on(index) for each in data if each is not None for index in range(len(each.samples))]
    return hashlib.sha256(repr(trained).encode()).hexdigest()


# Where ranks share the weights (fsdp), the planner plans one card with the whole model, larger by what the others
# hold of it, less one block: FSDP has a third gathered for a moment, and NCCL's buffers are in no forecast.


def share_of(blocks: Sequence[int], rest: int, degree: int) -> tuple[int, int]:
    """Bytes of the frozen weights, which held_bytes gives, and those on a card where so many share them: a share, what
    stays whole, the block at work and the next, gathered ahead."""
    whole = sum(blocks) + rest
    return whole, whole // degree + rest + 2 * max(blocks)


def plan_shared(job: JobConfig, subject: Subject, card: Card, degree: int) -> TrainingPlan:
    """The plan of one card, the smallest; all processes do the same. What does not fit is planned with a warning.
    job: with scheme and optimizer decided, and the microbatches of one process. degree: processes that share one copy
    of the weights. Raises: ValueError for a count of blocks that the model does not have; NoForecast."""
    blocks, rest = held_bytes(job.model, subject)
    whole, share = share_of(blocks, rest, degree)
    elsewhere = whole - share  # negative for a model of few blocks
    split = replace(job.split, devices=(), split_at=(), balance="memory", memory_limit_gb=UNLIMITED_GB)
    split = replace(split, offloaded_blocks=(0,))  # which these strategies do without, as without offloaded activations
    train, parallel = replace(job.train, offload_activations="off"), replace(job.parallel, strategy="none")
    alone = replace(job, split=split, train=train, parallel=parallel)
    more = (elsewhere - max(blocks)) / (1 - HEADROOM)
    larger = replace(card, usable_bytes=int(card.usable_bytes + more))
    found = plan_on(alone, subject, Machine((), (larger,)))
    (stage,) = found.devices
    stage = replace(stage, weights=stage.weights - elsewhere, usable=card.usable_bytes)
    warning = ""
    if stage.needed > stage.usable:
        warning = f"{card.name} needs {stage.needed / 1e9:.1f} GB by the forecast, of {stage.usable / 1e9:.1f} GB"
    return replace(found, question=found.question.changed(cards=(card,)), devices=(stage,), warning=warning)


def resolve_here(
    job: JobConfig,
    subject: Subject,
    ranks: Ranks,
    host_share: int,
    earlier: Mapping[str, Any] | None,
    *,
    is_to_train: bool = True,
) -> Resolution:
    """See resolve; of several ranks for this one's devices, and then the strategy may be fsdp, too."""
    strategy = job.parallel.requested
    if not ranks.is_launched:
        if shards_weights(strategy) and is_to_train:
            count = job.parallel.processes
            helps = 'start the job with "devicebridge train", which starts the parallel.processes of this job'
            if count < 2:
                helps = 'set parallel.processes to 2 or more, start with --nproc or torchrun, or set it to "auto"'
            fault = f'parallel.strategy = "{strategy}" is of several processes, and this is one alone'
            raise ValueError(f"{fault}; {helps}")
        if shards_weights(strategy):  # nothing is placed
            job = replace(job, parallel=replace(job.parallel, strategy="auto"))
        return resolve(job, subject, find_machine(job.split.devices, host_share), earlier, is_to_train=is_to_train)
    if strategy and shares_rows(strategy):
        helps = 'start the job without --nproc and torchrun, or set it to "data"'
        raise ValueError(f'parallel.strategy = "{strategy}" is of one process, and {ranks.count} were started; {helps}')
    if ranks.is_first and (count := job.train.gradient_accumulation_steps) % ranks.count:
        text = "train.gradient_accumulation_steps = %d is no multiple of %d processes: some wait in every step"
        _log.warning(text, count, ranks.count)
    decided = ranks.on_all(lambda: _decide(job, subject, ranks, host_share) if ranks.is_first else None)
    chosen = ranks.from_first(lambda: decided)
    assert chosen is not None
    optimizer = replace(job.optimizer, name=chosen["optimizer"])
    pinned = replace(job, model=replace(job.model, quantize=chosen["quantize"]), optimizer=optimizer)
    resolved = ranks.on_all(lambda: _resolve_as(chosen["strategy"], pinned, subject, ranks, host_share))
    if not is_to_train or not shards_weights(chosen["strategy"]):
        return resolved
    return _with_kept_blocks(resolved, subject, ranks, chosen["strategy"])


def _with_kept_blocks(resolved: Resolution, subject: Subject, ranks: Ranks, strategy: Strategy) -> Resolution:
    """With the forecast of the first rank, which also says how many blocks keep their activations where that is left
    open: on all ranks as many as on the smallest card; all ranks."""
    cards = ranks.on_all(lambda: cards_of(ranks.devices))
    usable_bytes = ranks.gather(None if cards is None else cards[0].usable_bytes)
    if cards is None or None in usable_bytes:
        return resolved
    own, smallest = _of_one_rank(resolved.job, ranks, strategy), replace(cards[0], usable_bytes=min(usable_bytes))

    def plan() -> TrainingPlan | None:
        try:
            found = plan_shared(own, subject, smallest, ranks.count)
        except NoForecast as error:
            _log.warning("every block is recomputed unless the job says otherwise: %s", error.reason)
            return None
        if found.warning:
            _log.warning("%s", found.warning)
        _log.info("the last %d blocks keep their activations", *found.uncheckpointed)
        return found

    training = ranks.on_all(lambda: plan() if ranks.is_first else None)
    kept = ranks.from_first(lambda: [] if training is None else list(training.uncheckpointed))
    execution = resolved.execution
    if execution.gradient_checkpointing and not execution.kept_blocks:
        execution = replace(execution, kept_blocks=tuple(kept))
    return replace(resolved, execution=execution, training=training)


def _decide(job: JobConfig, subject: Subject, ranks: Ranks, host_share: int) -> dict[str, Any]:
    """What has to be alike on all ranks: the strategy between them, scheme and optimizer."""
    strategy = job.parallel.requested
    try:
        resolved = _resolve_as(strategy, job, subject, ranks, host_share)
    except ValueError as error:
        if strategy is not None or ranks.count == 1 or _why_not_sharded(job, ranks):
            raise
        _log.warning("the weights are shared out among the processes (fsdp), for one device is not enough: %s", error)
        strategy = "fsdp"
        resolved = _resolve_as(strategy, job, subject, ranks, host_share)
    found = resolved.job
    return {"strategy": strategy, "quantize": found.model.quantize, "optimizer": found.optimizer.name}


def _resolve_as(
    strategy: Strategy | None, job: JobConfig, subject: Subject, ranks: Ranks, host_share: int
) -> Resolution:
    """The job of one rank, with the settings of the whole job put back."""
    share = host_share * ranks.place.num_local
    is_sharded = shards_weights(strategy)
    machine = Machine(ranks.devices, host_share=share, is_planned=not is_sharded, is_alone=False)
    own = _of_one_rank(job, ranks, strategy)
    if is_sharded:
        if fault := _why_not_sharded(job, ranks):
            raise ValueError(f'parallel.strategy = "{strategy}" was asked for, but {fault}')
        scheme = requested(own.model.quantize) or "none"
        _, needed = share_of(*held_bytes(replace(own.model, quantize=scheme), subject), ranks.count)
        free = free_bytes(ranks.devices[0])
        if free is not None and needed > _FREE_SHARE * free:
            sizes = f"{needed / 1e9:.1f} GB of {ranks.devices[0]}, where {free / 1e9:.1f} GB are free"
            helps = 'start more processes, or use model.quantize = "int8-compute"'
            raise ValueError(f"the weights that {ranks.count} processes share take {sizes}; {helps}")
    found = resolve(own, subject, machine)
    execution = replace(found.execution, strategy=strategy) if strategy and is_sharded else found.execution
    whole = replace(found.job, split=job.split, train=job.train, parallel=job.parallel)
    return replace(found, job=whole, execution=execution)


def _of_one_rank(job: JobConfig, ranks: Ranks, strategy: Strategy | None) -> JobConfig:
    """The job as one rank with its devices would do it alone."""
    is_sharded, is_alone = shards_weights(strategy), len(ranks.devices) == 1
    count, place = len(ranks.devices), ranks.place
    mine = slice(place.local_rank * count, (place.local_rank + 1) * count)
    values = {name: getattr(job.split, name) for name in PER_DEVICE}  # of those for all devices of the machine, its own
    of_all = {name: each[mine] for name, each in values.items() if len(each) == count * place.num_local}
    split = replace(job.split, devices=tuple(map(str, ranks.devices)), **of_all)
    if is_sharded:
        split = replace(split, memory_limit_gb=UNLIMITED_GB)
    inside: Any = job.parallel.strategy if strategy is None else strategy
    if is_sharded or (is_alone and strategy is not None):
        inside = "none"  # what one device does
    accumulation = -(-job.train.gradient_accumulation_steps // ranks.count)
    train = replace(job.train, gradient_accumulation_steps=accumulation)
    return replace(job, split=split, train=train, parallel=replace(job.parallel, strategy=inside))


def _why_not_sharded(job: JobConfig, ranks: Ranks) -> str:
    """What keeps processes from sharing the weights, and what would work; "" if nothing does."""
    scheme, count = requested(job.model.quantize), len(ranks.devices)
    is_cut, moves = scheme not in ("fp8", "int8", "stored"), job.train.offload_activations == "on"
    faults = {
        f"each process has {count} devices; start one process per device": count != 1,
        f'model.quantize = "{scheme}" keeps rows that are not cut; use "int8-compute" or "none"': not is_cut,
        f'torch {torch.__version__} shares no weights in int8; use torch 2.12 or newer, or model.quantize = "none"': (
            scheme == "int8-compute" and torch.__version__ < "2.12"
        ),
        "lora.dora = true asks for norms of whole weights; set it to false": job.lora.dora,
        'train.offload_activations = "on" is for blocks that stay on their device; set it to "off"': moves,
        "split.offloaded_blocks asks for blocks that stream from host memory; remove it": any(
            job.split.offloaded_blocks
        ),
        **{f"{key} is not trained so; remove it": "fsdp" not in known for key, known in job.limits},
    }
    return next((text for text, is_so in faults.items() if is_so), "")
