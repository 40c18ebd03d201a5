"""A job on several processes (ranks): which part each does, and what only the first one does.

Each rank resolves the job for its own devices, as if it were alone with its share of the microbatches. What must not
differ between ranks is decided by the first. Everything that a run leaves on the disk is written by the first rank, and
what it reads from there (a checkpoint to resume) it hands to the others: they need no run folder.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config.job import JobConfig
from ..config.model import SplitConfig, Strategy, shards_weights
from ..config.open import asked
from ..encoding.encode import Stopped
from ..parallel.devices import free_bytes
from ..parallel.ranks.group import Ranks, joined
from ..parallel.ranks.place import RankPlace, own_devices
from ..planning.cards import Card, cards_of
from ..planning.dry_run import NoForecast
from ..planning.plan import TrainingPlan
from ..system.files import tensors_as_bytes
from ..system.requests import Requests
from ..training.state import TrainingState
from .place_by_size import Subject
from .resolve import Machine, Resolution, find_machine, resolve
from .resume import find_state
from .run_lock import run_lock
from .shared_weights import UNLIMITED_GB, plan_shared, shared_weights

_log = logging.getLogger(__name__)
T = TypeVar("T")
_FREE_SHARE = 0.9  # as for one process: the rest is a first guess at activations, LoRA and optimizer


@contextmanager
def open_ranks(job: JobConfig, place: RankPlace, own_stop: Callable[[], bool]) -> Iterator[Ranks]:
    """The ranks of a job while they are connected.

    Raises: ValueError for a job that several processes cannot train, or devices that they cannot share out.
    """
    if job.model.second_expert:
        raise ValueError(
            f"model.second_expert names {job.model.second_expert}, and several processes train one model; remove it "
            "and train one expert after the other, or start without parallel.processes, --nproc and torchrun"
        )
    if job.lora.text_encoder:
        raise ValueError(
            "lora.text_encoder trains in one process, for each would need the text encoders; start without "
            "parallel.processes, --nproc and torchrun, or remove it"
        )
    devices = own_devices(find_machine(job.split.devices).devices, place)
    with joined(place, devices, job.parallel.timeout_s, own_stop) as ranks:
        yield ranks


# ---- how it is trained


def resolve_here(
    job: JobConfig,
    subject: Subject,
    ranks: Ranks,
    host_share: int,
    earlier: Mapping[str, Any] | None,
    *,
    is_to_train: bool = True,
) -> Resolution:
    """See resolve; of several ranks for this one's devices, and then the strategy may be fsdp or hsdp, too.

    Args:
        earlier: facts of the checkpoint that is resumed, where its placement stays.
    """
    strategy = job.parallel.asked
    if not ranks.is_launched:
        if shards_weights(strategy) and not is_to_train:  # nothing is placed
            job = replace(job, parallel=replace(job.parallel, strategy="auto"))
        elif shards_weights(strategy):
            raise ValueError(_why_not_alone(strategy, job.parallel.processes))
        return resolve(job, subject, find_machine(job.split.devices, host_share), earlier, is_to_train=is_to_train)
    count = job.train.gradient_accumulation_steps
    if ranks.is_first and count % ranks.count:
        _log.warning(
            "train.gradient_accumulation_steps = %d is no multiple of %d processes, so some wait for others in every "
            "step",
            count,
            ranks.count,
        )
    decided = ranks.together(lambda: _decide(job, subject, ranks, host_share) if ranks.is_first else None)
    chosen = ranks.from_first(lambda: decided)
    assert chosen is not None
    pinned = replace(
        job,
        model=replace(job.model, quantize=chosen["quantize"]),
        optimizer=replace(job.optimizer, name=chosen["optimizer"]),
    )
    resolved = ranks.together(lambda: _resolve_as(chosen["strategy"], pinned, subject, ranks, host_share))
    if not is_to_train or not shards_weights(chosen["strategy"]):
        return resolved
    return _with_kept_blocks(resolved, subject, ranks, chosen["strategy"])


def _with_kept_blocks(resolved: Resolution, subject: Subject, ranks: Ranks, strategy: Strategy) -> Resolution:
    """With the forecast of the first rank, which also says how many blocks keep their activations where that is left
    open: on all ranks as many as on the smallest card; all ranks."""
    cards = ranks.together(lambda: cards_of(ranks.devices))
    rooms = ranks.gather(None if cards is None else cards[0].usable_bytes)
    if None in rooms:
        return resolved
    own = _of_one_rank(resolved.job, ranks, strategy)

    def plan() -> TrainingPlan | None:
        assert cards is not None
        smallest = replace(cards[0], usable_bytes=min(rooms))
        return _plan_shared(own, subject, smallest, shard_degree(own, strategy, ranks))

    training = ranks.together(lambda: plan() if ranks.is_first else None)
    kept = ranks.from_first(lambda: [] if training is None else list(training.uncheckpointed))
    execution = resolved.execution
    if execution.gradient_checkpointing and not execution.kept_blocks:
        execution = replace(execution, kept_blocks=tuple(kept))
    return replace(resolved, execution=execution, training=training)


def _plan_shared(job: JobConfig, subject: Subject, card: Card, degree: int) -> TrainingPlan | None:
    """See plan_shared; None where nobody can forecast the model."""
    try:
        found = plan_shared(job, subject, card, degree)
    except NoForecast as error:
        _log.warning("every block is recomputed unless the job says otherwise, without a forecast: %s", error.reason)
        return None
    if found.warning:
        _log.warning("%s", found.warning)
    _log.info("the last %d blocks keep their activations", *found.uncheckpointed)
    return found


def _why_not_alone(strategy: Strategy | None, processes: int) -> str:
    """Why one process does not share weights; processes: that the job asks for."""
    if processes > 1:
        return (
            f'parallel.strategy = "{strategy}" shares the weights among parallel.processes = {processes} processes, '
            'and this is one by itself; start the job with "devicebridge train", which starts them'
        )
    return (
        f'parallel.strategy = "{strategy}" needs several processes; set parallel.processes to 2 or more, start the job '
        'with --nproc or torchrun, or set it to "auto"'
    )


def _decide(job: JobConfig, subject: Subject, ranks: Ranks, host_share: int) -> dict[str, Any]:
    """What has to be alike on all ranks: the strategy between them, scheme and optimizer."""
    strategy = job.parallel.asked
    try:
        resolved = _resolve_as(strategy, job, subject, ranks, host_share)
    except ValueError as error:
        if strategy is not None or ranks.count == 1 or _why_not_sharded(job, ranks):
            raise
        _log.warning("the weights are shared out among the processes (fsdp), for one device is not enough: %s", error)
        strategy = "fsdp"
        resolved = _resolve_as(strategy, job, subject, ranks, host_share)
    return {
        "strategy": strategy,
        "quantize": resolved.job.model.quantize,
        "optimizer": resolved.job.optimizer.name,
    }


def _resolve_as(
    strategy: Strategy | None, job: JobConfig, subject: Subject, ranks: Ranks, host_share: int
) -> Resolution:
    """The job of one rank, with the settings of the whole job put back."""
    share = host_share * ranks.place.num_local
    is_sharded = shards_weights(strategy)
    machine = Machine(ranks.devices, host_share=share, is_planned=not is_sharded)
    own = _of_one_rank(job, ranks, strategy)
    if is_sharded:
        if fault := _why_not_sharded(job, ranks):
            raise ValueError(f'parallel.strategy = "{strategy}" was asked for, but {fault}')
        _check_room(own, subject, ranks, shard_degree(job, strategy, ranks))
    found = resolve(own, subject, machine)
    execution = found.execution
    if is_sharded:
        assert strategy is not None
        execution = replace(execution, strategy=strategy)
    whole = replace(found.job, split=job.split, train=job.train, parallel=job.parallel)
    return replace(found, job=whole, execution=execution)


def _of_one_rank(job: JobConfig, ranks: Ranks, strategy: Strategy | None) -> JobConfig:
    """The job as one rank with its devices would do it alone."""
    is_sharded, is_alone = shards_weights(strategy), len(ranks.devices) == 1
    split = _own_split(job.split, ranks)
    if is_sharded:
        split = replace(split, memory_limit_gb=UNLIMITED_GB)
    inside: Any = job.parallel.strategy if strategy is None else strategy
    if is_sharded or (is_alone and strategy is not None):
        inside = "none"  # what one device does
    accumulation = -(-job.train.gradient_accumulation_steps // ranks.count)
    return replace(
        job,
        split=split,
        train=replace(job.train, gradient_accumulation_steps=accumulation),
        parallel=replace(job.parallel, strategy=inside),
    )


def _own_split(split: SplitConfig, ranks: Ranks) -> SplitConfig:
    """Values per device that are given for all devices of the machine, for this rank's alone."""
    count, place = len(ranks.devices), ranks.place
    mine = slice(place.local_rank * count, (place.local_rank + 1) * count)
    names = ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks")
    values = {name: getattr(split, name) for name in names}
    of_all = {name: each[mine] for name, each in values.items() if len(each) == count * place.num_local}
    return replace(split, devices=tuple(map(str, ranks.devices)), **of_all)


def _why_not_sharded(job: JobConfig, ranks: Ranks) -> str:
    """What keeps processes from sharing the weights, and what would work; "" if nothing does."""
    scheme = asked(job.model.quantize)
    faults = {
        f"each process has {len(ranks.devices)} devices; start one process per device": len(ranks.devices) != 1,
        f'model.quantize = "{scheme}" makes tensors of torchao, which cannot be cut; use "{scheme}-compute"': (
            scheme in ("fp8", "int8")
        ),
        "lora.dora = true asks for norms of whole weights; set it to false": job.lora.dora,
        'train.offload_activations = "on" is for blocks that stay on their device; set it to "off"': (
            asked(job.train.offload_activations) == "on"
        ),
        "split.offloaded_blocks asks for blocks that stream from host memory; remove it": any(
            job.split.offloaded_blocks
        ),
    }
    return next((text for text, is_so in faults.items() if is_so), "")


def shard_degree(job: JobConfig, strategy: Strategy | None, ranks: Ranks) -> int:
    """How many ranks share one copy of the weights.

    Raises: ValueError for a number that does not divide theirs.
    """
    if strategy != "hsdp":
        return ranks.count
    degree = job.parallel.shard_degree or ranks.place.num_local
    if ranks.count % degree:
        raise ValueError(
            f"parallel.shard_degree = {degree} does not divide the {ranks.count} processes of this job; give a "
            "divisor, or leave it out for those of a machine"
        )
    return degree


def _check_room(job: JobConfig, subject: Subject, ranks: Ranks, degree: int) -> None:
    """Raises: ValueError if this rank's device cannot hold its share of the weights and what is gathered at a time."""
    scheme = asked(job.model.quantize) or "none"
    needed = shared_weights(replace(job, model=replace(job.model, quantize=scheme)), subject).held(degree)
    free = free_bytes(ranks.devices[0])
    if free is not None and needed > _FREE_SHARE * free:
        raise ValueError(
            f"the weights take {needed / 1e9:.1f} GB of {ranks.devices[0]} where {degree} processes share them, and "
            f'{free / 1e9:.1f} GB are free; start more processes, or use model.quantize = "int8-compute"'
        )


# ---- what the first rank does


@contextmanager
def held_folder(folder: Path, ranks: Ranks) -> Iterator[None]:
    """The run folder, locked by the first rank. Raises: as run_lock."""
    with ExitStack() as stack:

        def take() -> None:
            if ranks.is_first:
                stack.enter_context(run_lock(folder))
                Requests(folder).clear()  # of a run that was killed

        ranks.together(take)
        yield


def state_for_all(job: JobConfig, ranks: Ranks, *, resume: bool) -> TrainingState | None:
    """What the first rank finds to resume, on every rank; random states are the first one's alone. See find_state."""
    found = ranks.together(lambda: find_state(job, resume=resume) if ranks.is_first else None)
    if not ranks.from_first(lambda: found is not None):
        return None
    facts = ranks.from_first(lambda: _described(found))
    adapter = ranks.share(b"" if found is None else tensors_as_bytes(found.adapter))
    optimizer = ranks.share(b"" if found is None else tensors_as_bytes(found.optimizer[0]))
    if found is not None:
        return found
    from safetensors.torch import load

    return TrainingState(
        facts["step"], load(adapter), (load(optimizer), facts["optimizer"]), {}, facts["facts"], Path(facts["path"])
    )


def _described(state: TrainingState | None) -> dict[str, Any]:
    assert state is not None
    return json.loads(  # type: ignore[no-any-return]
        json.dumps({"step": state.step, "optimizer": state.optimizer[1], "facts": state.facts, "path": str(state.path)})
    )


def unless_stopped(ranks: Ranks, work: Callable[[], T]) -> T:
    """What work returns on each rank, if none was asked to stop meanwhile; all ranks.

    Raises: Stopped on every rank; else as Ranks.together.
    """
    stops: list[Stopped] = []

    def attempt() -> T | None:
        try:
            return work()
        except Stopped as stopped:
            stops.append(stopped)
            return None

    found = ranks.together(attempt)
    if ranks.any(bool(stops)):
        raise stops[0] if stops else Stopped("the job was asked to stop")
    return found  # type: ignore[return-value]


def is_placed_anew(state: TrainingState, ranks: Ranks) -> bool:
    """Whether a resumed run gives the model other devices: if it or the run before is of several processes."""
    return ranks.is_launched or bool(state.facts.get("ranks"))


def rank_facts(ranks: Ranks) -> dict[str, Any]:
    """What a checkpoint keeps of how many processes trained; {} for one that nobody launched."""
    return {"ranks": ranks.count} if ranks.is_launched else {}


def device_names(ranks: Ranks, own: tuple[str, ...]) -> tuple[str, ...]:
    """The devices of all ranks, for the record of the run."""
    return tuple(dict.fromkeys(name for each in ranks.gather(list(own)) for name in each))


def mesh_of(job: JobConfig, strategy: Strategy, ranks: Ranks) -> Any:
    """The DeviceMesh over which weights are sharded, and for hsdp copied."""
    from torch.distributed.device_mesh import init_device_mesh

    degree = shard_degree(job, strategy, ranks)
    kind = torch.device(ranks.devices[0]).type
    if degree == ranks.count:
        return init_device_mesh(kind, (ranks.count,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (ranks.count // degree, degree), mesh_dim_names=("replicate", "shard"))
