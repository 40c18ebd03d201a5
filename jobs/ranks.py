"""A job on several processes (ranks): what all of them compare, and what only the first one does.

What must not differ between ranks is decided by the first. Everything that a run leaves on the disk is written by the
first rank, and what it reads from there (a checkpoint to resume) it hands to the others: they need no run folder. How
each rank trains its share is in rank_plans.py.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..config.job import JobConfig, Resume, shared_settings
from ..encoding.encode import Stopped
from ..parallel.ranks.group import Ranks, joined
from ..parallel.ranks.place import RankPlace, own_devices
from ..runs.record import run_lock
from ..system.files import tensors_as_bytes
from ..system.stopping import Requests
from ..training.batches import CachedSamples
from ..training.state import TrainingState
from ..version import VERSION
from .read_job import ReadJob
from .resolve import find_machine
from .resume import find_state, go_on

T = TypeVar("T")
Data = tuple[CachedSamples, CachedSamples | None]
_FILES = {"model": "the weights at model.path", "start": "the LoRA layers at lora.start_from"}
_LONGEST = 80  # characters of a value


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


def refuse_other_jobs(job: JobConfig, identity: Mapping[str, Any], ranks: Ranks, *, is_new: bool) -> None:
    """Ranks that differ in settings, model or beginning would add up gradients of different models; all ranks.

    Args:
        job: as this rank was given it. identity: see find_identity.
        is_new: whether nothing is resumed; a resumed run does not read the LoRA that it began with.
    Raises: ValueError on the first rank, and RankFailed on the others, naming what differs and on which ranks.
    """
    names = ["model", *["start"] * is_new]
    own = {**shared_settings(job), "version of DeviceBridge": VERSION, **{name: identity[name] for name in names}}
    given = ranks.gather([f"rank {ranks.place.rank} ({platform.node()})", own])

    def refuse() -> None:
        if ranks.is_first and (differing := list(differing_ranks(given))):
            lines = "\n".join(f"  {line}" for line in differing)
            raise ValueError(
                f"the processes of this job were not given the same training:\n{lines}\n"
                "Give all machines the same job file, model and LoRA to start from"
            )

    ranks.together(refuse)


def differing_ranks(given: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A line for everything in which ranks differ, with the first rank of each kind.

    Args:
        given: where each rank is, and its settings.
    """
    for name in sorted({name for _, own in given for name in own}):
        kinds: dict[str, str] = {}
        for where, own in given:
            value = own.get(name)
            kinds.setdefault(repr(value[0] if isinstance(value, list) and len(value) == 1 else value), where)
        if len(kinds) < 2:
            continue
        first, *others = kinds.values()
        if name in _FILES:
            yield f"{name}: {_FILES[name]} are not on {', '.join(others)} what they are on {first}"
        else:
            yield f"{name}: {', '.join(f'{value[:_LONGEST]} on {where}' for value, where in kinds.items())}"


# ---- what the first rank does


@contextmanager
def locked_folder(folder: Path, ranks: Ranks) -> Iterator[None]:
    """The run folder, locked by the first rank. Raises: as run_lock."""
    with ExitStack() as stack:

        def take() -> None:
            if ranks.is_first:
                stack.enter_context(run_lock(folder))
                Requests(folder).clear()  # of a run that was killed

        ranks.together(take)
        yield


def state_for_all(job: JobConfig, ranks: Ranks, *, resume: Resume) -> TrainingState | None:
    """What the first rank finds to resume, on every rank; random states are the first one's alone. See find_state."""
    found = ranks.together(lambda: find_state(job, resume=resume) if ranks.is_first else None)
    if not ranks.from_first(lambda: found is not None):
        return None
    described: dict[str, Any] = {}
    if found is not None:
        kept = {"step": found.step, "optimizer": found.optimizer[1], "facts": found.facts, "path": str(found.path)}
        described = json.loads(json.dumps(kept))
    facts = ranks.from_first(lambda: described)
    adapter = ranks.share(b"" if found is None else tensors_as_bytes(found.adapter))
    optimizer = ranks.share(b"" if found is None else tensors_as_bytes(found.optimizer[0]))
    if found is not None:
        return found
    from safetensors.torch import load

    return TrainingState(
        facts["step"], load(adapter), (load(optimizer), facts["optimizer"]), {}, facts["facts"], Path(facts["path"])
    )


def facts_for_all(
    read: ReadJob, identity: dict[str, Any], state: TrainingState, ranks: Ranks, *, resume: Resume
) -> dict[str, Any]:
    """What the first rank finds that a run goes on from, on every rank: others have paths of their own. See go_on."""
    work = partial(go_on, read, identity, state, resume=resume, is_placed_anew=is_placed_anew(state, ranks))
    found: dict[str, Any] = ranks.together(work if ranks.is_first else dict)
    return ranks.from_first(lambda: found)


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


# ---- captions and latents


def cached_once(is_encoded: bool, ranks: Ranks, work: Callable[[], Data]) -> Data:
    """What work returns on each rank; all ranks.

    The first rank of each machine computes what its cache lacks, and the others then read. Machines that have the same
    folder share the work, as any processes that fill one store do.

    Args:
        is_encoded: whether there is nothing to compute.
        work: fills the cache, and reads what is there.
    Raises: as unless_stopped; ValueError where ranks have other samples.
    """
    is_early = is_encoded or ranks.place.local_rank == 0
    early = unless_stopped(ranks, lambda: work() if is_early else None)
    late = unless_stopped(ranks, lambda: None if is_early else work())
    found = early if is_early else late
    assert found is not None
    order = ranks.together(lambda: order_of(found))
    first = ranks.from_first(lambda: order)

    def refuse() -> None:
        if order != first:
            raise ValueError(
                "this rank and the first one do not have the same samples: an image is missing here or there, or "
                "captions, masks, references, loss weights or encoders differ; give all machines the same files and "
                "job file"
            )

    ranks.together(refuse)
    return found


def order_of(data: Iterable[CachedSamples | None]) -> str:
    """A hash of what each sample is trained on, in order; ranks that differ in it would train some samples twice and
    others never, or on other references, masks and weights.

    Raises: OSError if a mask has gone.
    """
    trained = [each.trained_on(index) for each in data if each is not None for index in range(len(each.samples))]
    return hashlib.sha256(repr(trained).encode()).hexdigest()
