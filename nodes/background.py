"""A training in a process of its own, as a node starts it; and the cards that such trainings hold."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..config.job import JobConfig
from .host.page import background_queue, cards_of, refuse_cards_of_others, seen_queue
from .host.page import own_command as own_command

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo

_log = logging.getLogger(__name__)


def start(job: JobConfig, info: CheckpointInfo | None, *, is_resumed: bool) -> str:
    """Put the job into the queue, in the place of one of its run that still waits; what to say of it.

    Args:
        info: the job's model, if only ComfyUI can read it; the other process builds it with this ComfyUI's code.
    Raises: ValueError if its run is under way or was started, or for a job that cannot be run as written.
    """
    from ..jobs.read_job import read_job

    read_job(job, info)  # what a look at headers and images refuses is told here, not in a log
    queue = background_queue()
    waiting = {each.run for each in queue.jobs() if each.state == "waiting"}
    queued = queue.add(job, cards_of(job), is_resumed=is_resumed)
    note = "It takes the place of the one that waited under this name.\n" if queued.run in waiting else ""
    queue.tick()
    for each in queue.describe():
        if each["id"] == queued.id and each["why"]:
            return f"{note}{queued.run} waits: {each['why']}"
    return f"{note}{queued.run} trains in the background; see the sidebar's tab DeviceBridge"


def refuse_taken_cards(job: JobConfig) -> None:
    """Raises: RuntimeError if a training in the background uses one of the job's cards."""
    refuse_cards_of_others(cards_of(job))


def remember(job: JobConfig) -> None:
    """What the run of this job is resumed from, though it is no training in the background."""
    try:
        seen_queue().kept.keep(job)
    except (OSError, ValueError) as error:
        _log.warning("the sidebar's tab will ask before it resumes %s: %s", job.output.folder, error)
