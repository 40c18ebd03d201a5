"""Jobs that need ComfyUI: the command line goes on in a process that has one, and takes model and encoders from it.
Everything here is a no-op for other jobs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import JobConfig
from ..config.model import COMFYUI
from ..events import EventLog, Listener
from ..headless.run import find_comfyui
from ..jobs.checked_job import JobPlan
from ..jobs.encode_job import NO_ENCODERS, ComfyEncoders, cache_job
from ..jobs.job import check_job
from ..jobs.ranks import unless_stopped
from ..parallel.ranks.group import Ranks
from ..runs.queue import is_native_process, native_command
from ..system.processes import go_on_as
from ..system.stopping import never
from ..system.telling import say


def enter(jobs: Sequence[JobConfig], arguments: Sequence[str]) -> list[JobConfig]:
    """The jobs, with paths in the place of names that only ComfyUI knows. Another process may go on with the arguments.
    Raises: ValueError if there is no ComfyUI, or a name is in none of its folders."""
    if not (needing := [job for job in jobs if job.needs_comfyui]):
        return list(jobs)
    why = "cache.stock_clip and stock_vae name encoders that only ComfyUI loads"
    if needing[0].model.family == COMFYUI:
        why = f'model.family = "{COMFYUI}" asks for a model that ComfyUI\'s own code trains'
    need_comfyui(why, arguments)
    from ..nodes.host.native.files import with_files

    return [with_files(job) if job.needs_comfyui else job for job in jobs]


def need_comfyui(why: str, arguments: Sequence[str], python: Path | None = None) -> None:
    """A no-op in a process that has ComfyUI; another does not return, for one that has it goes on in its place.
    Raises: ValueError that says why, if there is no ComfyUI."""
    if not is_native_process():
        try:
            found = find_comfyui(python=python)
        except RuntimeError as error:
            raise ValueError(f"{why}, but {error}") from error
        raise SystemExit(go_on_as([*native_command(found.python, found.folder, found.base), *arguments]))


def examine(options: argparse.Namespace) -> int:
    """`devicebridge examine FILE`: where the blocks and tokens of a model's class are, as rows to be written down.
    Raises: ValueError where there is no ComfyUI, or for another file."""
    arguments = ["examine", str(options.file.absolute())]
    need_comfyui("ComfyUI has the code of such a model", arguments, options.python)
    from ..nodes.host.split.examine import examine as rows_of

    if not options.file.is_file():
        raise ValueError(f"{options.file} is no file; name a .safetensors file of a diffusion model")
    say(rows_of(options.file))
    return 0


def prepared(job: JobConfig) -> AbstractContextManager[CheckpointInfo | None]:
    """Inside, ComfyUI is ready to train its own model, which is given; None for a family that we build."""
    if job.model.family != COMFYUI:
        return nullcontext()
    from ..nodes import host

    return host.native_model(job.model)


@contextmanager
def with_encoders(job: JobConfig, should_stop: Callable[[], bool] = never) -> Iterator[tuple[JobPlan, ComfyEncoders]]:
    """Inside, the encoders that the job, which is checked first, names by files are loaded; its plan's job has their
    names for the cache. Raises: as check_job; ValueError for text encoders that are not the model's."""
    with prepared(job) as info:
        plan = check_job(job, info=info, is_to_train=False, should_stop=should_stop)
    if not job.cache.needs_stock_encoders:
        yield replace(plan, job=job), NO_ENCODERS
        return
    from ..nodes.host.comfy_encoders import release_models
    from ..nodes.host.native.files import load_encoders
    from ..nodes.host.native.text import refuse_other_class

    encoders, model = load_encoders(job), plan.family.host
    if encoders.clip and model and model.text_class:
        refuse_other_class(encoders.clip, model.text_class, is_trained=job.lora.text_encoder)
    try:
        yield replace(plan, job=replace(job, cache=encoders.named_in(job.cache))), encoders
    finally:
        release_models()


def encoded(job: JobConfig, on_event: Listener | None, ranks: Ranks) -> JobConfig:
    """The job with its captions and latents in the cache, where its encoders are files that only ComfyUI loads. The
    first rank of each machine encodes, and the others wait. on_event: None where another process speaks for this one,
    which needs no run folder.
    Raises: as with_encoders, cache_job and unless_stopped; ValueError where machines have other encoders."""

    def by_this_rank() -> JobConfig:
        place = None if on_event is None else Path(job.output.folder)
        with with_encoders(job, ranks.is_stop_asked) as (plan, encoders), EventLog(place, on_event) as events:
            cache_job(plan, events, ranks.is_stop_asked, encoders)
        return plan.job

    if not ranks.any(job.cache.needs_stock_encoders):
        return job
    is_early = ranks.place.local_rank == 0 and job.cache.needs_stock_encoders
    own = unless_stopped(ranks, lambda: by_this_rank() if is_early else job)
    names = ("text_source", "latent_source", "audio_source", "vision_source")
    sources = ranks.from_first(lambda: [getattr(own.cache, name) for name in names])
    if ranks.any(ranks.place.local_rank == 0 and sources != [getattr(own.cache, name) for name in names]):
        raise ValueError("the machines of this job have other text encoders, VAEs or vision models; give all the same")
    return replace(job, cache=replace(job.cache, **dict(zip(names, sources, strict=True))))
