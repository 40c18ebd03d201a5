"""Captions and latents of a job on several processes: each is computed once, whoever then needs it.

The first rank fills the cache while the others wait; so do the first ranks of other machines that have the same folder,
and share the work as any processes that fill one store do. Machines with folders of their own then receive what they
lack, as the bytes of the entries' files. So no machine but those has an encoder in memory, and none has one later.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..encoding.claims import Claims
from ..encoding.store import CacheStore
from ..parallel.ranks.group import Ranks
from ..system.stopping import Stopped
from ..training.batches import CachedSamples
from .checked_job import JobPlan
from .encode_job import CACHE_PARTS, cache_entries, cache_store
from .ranks import unless_stopped

_log = logging.getLogger(__name__)
Data = tuple[CachedSamples, CachedSamples | None]
Head = tuple[str, int, str]  # an entry's key, bytes and hash
_PIECE_BYTES = 2**24  # travel at a time


def cached_once(plan: JobPlan, ranks: Ranks, work: Callable[[], Data]) -> Data:
    """What work returns on each rank, while one of them computes what the cache lacks; all ranks.

    Args:
        work: fills the cache, and reads what is there.
    Raises: as unless_stopped; ValueError where machines would compute different entries.
    """
    store = cache_store(plan.job)
    is_early = bool(plan.encoded) or is_to_encode(store, ranks)
    is_spread = not plan.encoded and not _is_one_machine(ranks)
    may_differ = is_spread and not is_early and ranks.place.local_rank == 0
    own: dict[str, str] = {}

    def first_turn() -> Data | None:
        if may_differ:
            own.update(_entries(plan))
        return work() if is_early else None

    early = unless_stopped(ranks, first_turn)
    if is_spread:
        keys = ranks.from_first(lambda: sorted(entries_of(early or ())))
        ranks.together(lambda: _refuse_others(own, keys))
        with ranks.among(ranks.place.local_rank == 0) as machines:
            unless_stopped(ranks, lambda: _copy(store, keys, machines, ranks.is_stop_asked))
    late = unless_stopped(ranks, lambda: None if is_early else work())
    found = early if is_early else late
    assert found is not None
    order = ranks.together(lambda: order_of(found))
    first = ranks.from_first(lambda: order)
    ranks.together(lambda: _refuse_other_order(order, first))
    return found


def is_to_encode(store: CacheStore, ranks: Ranks) -> bool:
    """Whether this rank computes what is missing, before the others look; all ranks."""
    if _is_one_machine(ranks):
        return ranks.is_first
    claim = None
    if ranks.is_first:
        with contextlib.suppress(OSError):  # nobody can write there: what is missing will tell
            claim = Claims(store).take(uuid.uuid4().hex)
    claims = Claims(store)
    name = ranks.from_first(lambda: claim.path.name if claim else "")
    has_same_folder = ranks.together(lambda: name in {each.name for each in claims.folder.glob("*")})
    ranks.wait()
    if claim:
        claim.release()
    return ranks.is_first or (has_same_folder and ranks.place.local_rank == 0)


def entries_of(data: Iterable[CachedSamples | None]) -> set[str]:
    """Every entry that a run reads."""
    return {key for samples in data if samples is not None for key in samples.keys()}  # noqa: SIM118 - no mapping


def order_of(data: Iterable[CachedSamples | None]) -> str:
    """A hash of what each sample is trained on, in order; ranks that differ in it would train some samples twice and
    others never, or on other references, masks and weights.

    Raises: OSError if a mask has gone.
    """
    told = [each.trained_on(index) for each in data if each is not None for index in range(len(each.samples))]
    return hashlib.sha256(repr(told).encode()).hexdigest()


def _refuse_other_order(own: str, first: str) -> None:
    """Raises: ValueError if this rank's samples are not those of the first one."""
    if own != first:
        raise ValueError(
            "this rank and the first one do not have the same samples: an image is missing here or there, or captions, "
            "masks, references, loss weights or encoders differ; give all machines the same files and job file"
        )


def _is_one_machine(ranks: Ranks) -> bool:
    return ranks.count == ranks.place.num_local


def _entries(plan: JobPlan) -> dict[str, str]:
    return {key: what for part in CACHE_PARTS for key, what in cache_entries(plan, part).items()}


def _refuse_others(own: dict[str, str], keys: Sequence[str]) -> None:
    """Raises: ValueError if this machine would compute what the first one does not."""
    others = [own[key] for key in own.keys() - set(keys)]
    if others:
        raise ValueError(
            f"this machine and the first one do not have the same data: {min(others)} is another here, one of "
            f"{len(others)}; give all machines the same images, captions, text encoders and VAE"
        )


# ---- from the first machine to those that lack entries


def _copy(store: CacheStore, keys: Sequence[str], machines: Ranks | None, is_stop_asked: Callable[[], bool]) -> None:
    """Have every one of these entries in the store of each machine.

    Args:
        machines: their first ranks; None on the others, who have nothing to do.
    Raises: Stopped; OSError if an entry cannot be read or written, RankFailed where another machine's cannot.
    """
    if machines is None:
        return
    lacking = machines.together(lambda: {key for key in keys if key not in store})
    wanted = sorted({key for each in machines.gather(sorted(lacking)) for key in each})
    batches, num_bytes = _batches(store, wanted if machines.is_first else ()), 0
    while True:
        if machines.any(is_stop_asked()):
            raise Stopped("stopped while captions and latents travelled to other machines")
        heads, data = machines.together(lambda: next(batches, ([], b"")))
        heads = machines.from_first(lambda: heads)  # noqa: B023 - called at once
        if not heads:
            break
        data = _shared(data, sum(size for _, size, _ in heads), machines)
        machines.together(lambda: _put(store, heads, data, lacking))  # noqa: B023
        num_bytes += len(data)
    if wanted and machines.is_first:
        _log.info("%d cache entries (%d bytes) have travelled to other machines", len(wanted), num_bytes)


def _batches(store: CacheStore, keys: Iterable[str]) -> Iterator[tuple[list[Head], bytes]]:
    """Entries with their bytes in a row, a piece or one entry at a time."""
    heads: list[Head] = []
    found: list[bytes] = []
    for key in keys:
        if store.check(key) != "whole":
            raise OSError(f"cache entry {key} is damaged and was not sent; start the job again to compute it anew")
        data = store.path(key).read_bytes()
        heads.append((key, len(data), hashlib.sha256(data).hexdigest()))
        found.append(data)
        if sum(map(len, found)) >= _PIECE_BYTES:
            yield heads, b"".join(found)
            heads, found = [], []
    if heads:
        yield heads, b"".join(found)


def _shared(data: bytes, size: int, machines: Ranks) -> bytes:
    return b"".join(machines.share(data[at : at + _PIECE_BYTES]) for at in range(0, size, _PIECE_BYTES))


def _put(store: CacheStore, heads: Sequence[Head], data: bytes, lacking: set[str]) -> None:
    at = 0
    for key, size, digest in heads:
        entry, at = data[at : at + size], at + size
        if key not in lacking:
            continue
        if hashlib.sha256(entry).hexdigest() != digest:
            raise OSError(f"cache entry {key} has arrived with other bytes than were sent; start the job again")
        store.put_file(key, entry)
