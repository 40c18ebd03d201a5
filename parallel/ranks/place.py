"""Which of a job's processes this one is, as torchrun says in its environment, and which devices are its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..devices import CPU

_log = logging.getLogger(__name__)

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_ALSO = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RankPlace:
    """One process of a job: its rank over all machines and on this one, and how often torchrun has started all anew."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local: int
    num_restarts: int = 0


def find_place(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """Where torchrun has put this process; None if nothing like it started it. Raises: ValueError for numbers that are
    none or contradict each other, and for several machines that torchrun may start anew: their ranks would not know of
    each other's starts."""
    if any(name not in environment for name in (*_NAMES, *_ALSO)):
        return None
    try:
        rank, count, local, num_local = (int(environment[name]) for name in _NAMES)
        restarts, most = (
            int(environment.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS")
        )
    except ValueError as error:
        raise ValueError(f"{', '.join(_NAMES)} in the environment should be whole numbers: {error}") from error
    if not (0 <= rank < count and 0 <= local < num_local <= count):
        raise ValueError(f"the environment says rank {rank} of {count}, on this machine {local} of {num_local}")
    if most and num_local < count:
        raise ValueError(
            f"torchrun may start this job anew up to {most} times, and it runs on several machines, which cannot begin "
            "anew together; leave --max-restarts out, and start the job again with --resume after a failure"
        )
    return RankPlace(rank, count, local, num_local, restarts)


def refuse_other_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Where find_place has found nothing: warn of a part of what torchrun sets, as SLURM or a script for MPI does.
    Raises: ValueError where it speaks of several processes, each of which would train the whole job."""
    found = [f"{name}={environment[name]}" for name in _NAMES if name in environment]
    if not found:
        return
    missing = ", ".join(name for name in (*_NAMES, *_ALSO) if name not in environment)
    text = f"the environment has {', '.join(found)}, but not {missing}, so torchrun has not started this process"
    if environment.get("WORLD_SIZE", "1").strip() not in ("", "0", "1"):
        raise ValueError(
            f"{text}, and each of several would train the whole job; start them with torchrun or --nproc, or unset "
            "these variables to train in one process"
        )
    _log.warning("%s; it trains alone", text)


def own_devices(devices: Sequence[torch.device], place: RankPlace) -> tuple[torch.device, ...]:
    """Those of a machine's devices that are this process's: equal runs, in order; the CPU is everybody's. Raises:
    ValueError if they cannot be shared out evenly."""
    if list(devices) == [CPU]:
        return (CPU,)
    each, left = divmod(len(devices), place.num_local)
    if left or not each:
        raise ValueError(
            f"{place.num_local} processes on this machine share {len(devices)} devices, "
            f"{', '.join(map(str, devices))}; start as many processes as there are devices, or a number that divides "
            "theirs, or name other devices with split.devices"
        )
    return tuple(devices[place.local_rank * each : (place.local_rank + 1) * each])
