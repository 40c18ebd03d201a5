"""What a job's cache holds and what it should hold: reading it all, and deleting what nobody needs. Loads no weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..encoding.claims import living_keys
from ..encoding.store import CacheStore, State
from .checked_job import JobPlan
from .encode_job import CachePart, cache_entries, cache_store

_MAX_NAMES = 20  # of a kind that a report spells out


@dataclass(frozen=True)
class Verified:
    """A job's entries as they were found.

    Args:
        counts: per part of the cache, entries by state.
        problems: one line per entry that is not whole.
    """

    folder: Path
    counts: Mapping[CachePart, Mapping[State, int]]
    problems: Sequence[str]

    def report(self) -> str:
        """Counts, and the first of the entries that are not whole."""
        lines = [f"cache: {self.folder}"]
        for part, counts in self.counts.items():
            missing, damaged = counts.get("missing", 0), counts.get("damaged", 0)
            lines.append(f"{part}: {counts.get('whole', 0)} entries whole, {missing} missing, {damaged} damaged")
        lines += self.problems[:_MAX_NAMES]
        if len(self.problems) > _MAX_NAMES:
            lines.append(f"and {len(self.problems) - _MAX_NAMES} more")
        return "\n".join(lines)


@dataclass
class Pruned:
    """What pruning one folder did; bytes are those of the deleted files."""

    folder: Path
    kept: int = 0
    spared: int = 0
    deleted: int = 0
    num_bytes: int = 0
    jobs: list[str] = field(default_factory=list)

    def report(self) -> str:
        size = f"{self.num_bytes} bytes ({self.num_bytes / 1e9:.2f} GB)"
        jobs = self.jobs[0] if len(self.jobs) == 1 else f"any of {', '.join(self.jobs)}"
        needed = f"{self.kept} entries that {jobs} may need are kept"
        if self.spared:
            needed += f", and {self.spared} that a run under way may need"
        return f"cache: {self.folder}\n{self.deleted} entries deleted, {size}; {needed}"


def verify_cache(plan: JobPlan, parts: Sequence[CachePart]) -> Verified:
    """Read every entry the job needs and compare checksums; damaged ones are removed for the next run to compute."""
    store = cache_store(plan.job)
    counts: dict[CachePart, Counter[State]] = {part: Counter() for part in parts}
    problems = []
    for part in parts:
        for key, what in cache_entries(plan, part).items():
            state = store.check(key)
            counts[part][state] += 1
            if state != "whole":
                problems.append(f"{state}: {what}" + (f" ({store.path(key)})" if state == "damaged" else ""))
    return Verified(store.folder, counts, problems)


def prune_caches(plans: Mapping[str, JobPlan], parts: Sequence[CachePart]) -> list[Pruned]:
    """Delete from the jobs' folders what neither they nor a run under way needs, and what killed processes have left.

    Args:
        plans: by a name for the report. An entry is needed if any of the jobs needs it.
        parts: all parts of the cache, because an entry's name does not tell which it belongs to.
    Raises: OSError naming the file if one cannot be deleted.
    """
    needed = {key for plan in plans.values() for part in parts for key in cache_entries(plan, part)}
    pruned: dict[Path, Pruned] = {}
    for name, plan in plans.items():
        folder = cache_store(plan.job).folder.resolve()
        pruned.setdefault(folder, Pruned(folder)).jobs.append(name)
    for folder, result in pruned.items():
        store = CacheStore(folder)
        living = living_keys(store)  # before the entries are looked at
        for key in list(store.keys()):
            if key in needed:
                result.kept += 1
            elif living is None or key in living:
                result.spared += 1
            else:
                result.num_bytes += store.remove(key)
                result.deleted += 1
    return list(pruned.values())
