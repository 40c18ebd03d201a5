"""Whether the processes of a job were asked for one training: the same settings, the same model, the same beginning.

Each reads the job file and the model of its machine. Ranks that differ in them would add up gradients of different
models, and nothing would tell. Samples are compared later, as entries of the cache (shared_cache.py), and with them the
text encoders and the VAE that made these.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config.job import JobConfig, shared_settings
from ..parallel.ranks.group import Ranks
from ..version import VERSION

_FILES = {"model": "the weights at model.path", "start": "the LoRA layers at lora.start_from"}
_LONGEST = 80  # characters of a value
Told = tuple[str, Mapping[str, Any]]  # where a rank is, and what it was asked for


def refuse_other_jobs(job: JobConfig, identity: Mapping[str, Any], ranks: Ranks, *, is_new: bool) -> None:
    """All ranks.

    Args:
        job: as this rank was given it. identity: see find_identity.
        is_new: whether nothing is resumed; a resumed run does not read the LoRA that it began with.
    Raises: ValueError on the first rank, and RankFailed on the others, naming what differs and on which ranks.
    """
    names = ["model", *["start"] * is_new]
    own = {**shared_settings(job), "version of DeviceBridge": VERSION, **{name: identity[name] for name in names}}
    told = ranks.gather([f"rank {ranks.place.rank} ({platform.node()})", own])
    ranks.together(lambda: _refuse(told) if ranks.is_first else None)


def _refuse(told: Sequence[Told]) -> None:
    if differing := list(differences(told)):
        lines = "\n".join(f"  {line}" for line in differing)
        raise ValueError(
            f"the processes of this job were not asked for the same training:\n{lines}\n"
            "Give all machines the same job file, model and LoRA to start from"
        )


def differences(told: Sequence[Told]) -> Iterator[str]:
    """A line for everything in which ranks differ, with the first rank of each kind."""
    for name in sorted({name for _, own in told for name in own}):
        kinds: dict[str, str] = {}
        for where, own in told:
            kinds.setdefault(_spelt(own.get(name)), where)
        if len(kinds) < 2:
            continue
        first, *others = kinds.values()
        if name in _FILES:
            yield f"{name}: {_FILES[name]} are not on {', '.join(others)} what they are on {first}"
        else:
            yield f"{name}: {', '.join(f'{value[:_LONGEST]} on {where}' for value, where in kinds.items())}"


def _spelt(value: Any) -> str:
    return repr(value[0] if isinstance(value, list) and len(value) == 1 else value)
