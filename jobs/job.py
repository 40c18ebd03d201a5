"""A whole job, from its config to a LoRA file: run_job is the way from top to bottom.

What can be refused is refused before weights are loaded. Text encoders and VAE are gone before the transformer comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.checkpoint import CheckpointInfo
from ..config.job import JobConfig, Resume
from ..config.model import shards_weights
from ..encoding.encode import Stopped, never
from ..events import EventLog, Listener
from ..parallel.devices import memory_in_use, own_random_states
from ..parallel.ranks.group import ALONE, Ranks
from ..planning.cards import Card
from ..planning.plan import Comparison, TrainingPlan, compare, describe_comparison, describe_pace
from ..runs.record import Recording, recorded_run
from ..system.stopping import Requests
from ..training.compile_check import check_compiled
from ..training.loop import Trainer, checkpoint_folder
from ..training.objective import make_noise_schedule
from ..training.state import TrainingState, list_checkpoints
from .build import build_trainer
from .checked_job import JobPlan, ReadJob
from .checks import check_places, check_tools, give_cautions, refuse_overlaps, refuse_repeats, refuse_stills
from .encode_job import cache_job, cache_store
from .lora_output import lora_file_tensors, save_lora, warn_of_losses
from .ranks import (
    cached_once,
    facts_for_all,
    is_placed_anew,
    locked_folder,
    refuse_other_jobs,
    resolve_here,
    state_for_all,
    unless_stopped,
)
from .read_job import find_start, read_job, subject_of
from .resolve import Machine, find_machine, in_type_of_cards, plan_on
from .resume import TrainingResult, as_decided, find_identity, placement_facts


def plan_job(
    job: JobConfig,
    cards: Sequence[Card] = (),
    *,
    info: CheckpointInfo | None = None,
    has_data: bool = True,
    host_share: int = 1,
    should_stop: Callable[[], bool] = never,
) -> TrainingPlan:
    """How a job would use these cards, which need not exist; () takes this machine's. Reads headers and images only.

    Args:
        info, has_data: see read_job. host_share: jobs that share this machine's free memory.
    Raises: ValueError for a job that cannot be run as written, that does not fit, or a machine without cards.
    """
    if shards_weights(strategy := job.parallel.requested):
        helps = 'plan with "auto", or start the job: what fits is said before the first step'
        raise ValueError(f'parallel.strategy = "{strategy}" is of several processes, and this plan of one; {helps}')
    read = read_job(job, info, has_data=has_data, should_stop=should_stop)
    if cards:
        return plan_on(read.job, subject_of(read), Machine((), tuple(cards)))
    try:
        machine = find_machine(read.job.split.devices, host_share)
    except ValueError as error:
        raise ValueError(f'{error}. For a plan of cards that are elsewhere, name them: --cards "2x24GB"') from error
    if machine.cards is None:
        raise ValueError('this machine has no card whose memory torch can tell; name some with --cards, as "2x24GB"')
    return plan_on(read.job, subject_of(read), machine)


def check_job(
    job: JobConfig,
    *,
    info: CheckpointInfo | None = None,
    is_to_train: bool = True,
    host_share: int = 1,
    should_stop: Callable[[], bool] = never,
    ranks: Ranks = ALONE,
) -> JobPlan:
    """Everything that can be refused before weights are loaded.

    Args:
        info, host_share, ranks: see run_job.
        is_to_train: False for filling caches, while other processes may use the cards: nothing is forecast then.
    Raises: ValueError; Stopped when should_stop() became true while images are looked at.
    """
    read = read_job(job, info, should_stop=should_stop)
    return _resolve_and_check(read, None, host_share, is_to_train=is_to_train, ranks=ranks)


def _resolve_and_check(
    read: ReadJob,
    earlier: Mapping[str, Any] | None,
    host_share: int,
    *,
    is_to_train: bool = True,
    is_new: bool = True,
    is_changed: bool = False,
    ranks: Ranks = ALONE,
) -> JobPlan:
    """What will run. earlier: facts of the checkpoint that is resumed where it was. is_new: nothing is resumed.
    is_changed: what is resumed has other settings or data now."""
    if is_to_train and (is_new or is_changed):  # a run that was begun goes on as it is
        refuse_repeats(read.job)
        refuse_overlaps(read.job)
    schedule = make_noise_schedule(read.job.objective, read.info.family, read.variant)
    refuse_stills(read)
    resolved = resolve_here(read.job, subject_of(read), ranks, host_share, earlier, is_to_train=is_to_train)
    info, execution = read.info, resolved.execution
    if is_to_train:
        info, execution = in_type_of_cards(resolved, info, ranks)
    plan = JobPlan(
        **{**vars(read), "job": resolved.job, "info": info},
        execution=execution,
        schedule=schedule,
        training=resolved.training,
        start=find_start(read) if is_to_train and is_new else {},
    )
    check_tools(plan)
    if is_to_train:
        warn_of_losses(plan)
        check_places(plan.job)
        give_cautions(plan)
    return plan


def run_job(
    job: JobConfig,
    *,
    info: CheckpointInfo | None = None,
    resume: Resume = False,
    on_event: Listener | None = None,
    should_stop: Callable[[], bool] = never,
    host_share: int = 1,
    ranks: Ranks = ALONE,
) -> TrainingResult:
    """Run a job to its end, or until should_stop() is true between two steps, and save its state, also where it breaks.

    Args:
        info: the job's model, if it was read already, as only ComfyUI can read its own.
        resume: see go_on. host_share: jobs that share the host's free memory.
        ranks: the processes that run this job, each calling this; the first one writes, tells and stops for all.
    Raises: ValueError for a job that cannot be run as written, before weights are loaded; RuntimeError where another
        process runs in its output folder, or for what broke on the way, with what is saved.
    """
    folder, given = Path(job.output.folder), job
    requests = Requests(folder)

    def own_stop() -> bool:
        return should_stop() or requests.is_asked("stop")

    ranks = ranks.stopped_by(own_stop)
    with locked_folder(folder, ranks):
        with ranks.doing(is_long=True):  # encoding has no limit: nobody knows how long a pass of captions takes
            state = state_for_all(job, ranks, resume=resume)
            if state is not None:
                job = as_decided(job, state)
            try:
                read = unless_stopped(ranks, lambda: read_job(job, info, should_stop=own_stop))
            except Stopped as stopped:
                return TrainingResult("stopped", resume_hint=f"{stopped}; start the job again")
            identity = ranks.on_all(lambda: find_identity(read))
            refuse_other_jobs(given, identity, ranks, is_new=state is None)
            begun = {} if state is None else facts_for_all(read, identity, state, ranks, resume=resume)
            state = state and replace(state, facts=begun)
            facts = None if state is None or is_placed_anew(state, ranks) else begun
            new = {"is_new": state is None, "is_changed": "keeps_optimizer" in begun}
            plan = ranks.on_all(lambda: _resolve_and_check(read, facts, host_share, ranks=ranks, **new))
        identity |= placement_facts(plan.placement) | ({"ranks": ranks.count} if ranks.is_launched else {})
        own_devices = list(used_devices(plan.job, plan.placement.used_devices))
        devices = tuple(dict.fromkeys(name for each in ranks.gather(own_devices) for name in each))
        with (
            EventLog(folder if ranks.is_first else None, on_event, tensorboard=job.output.tensorboard) as events,
            recorded_run(folder, given, devices) if ranks.is_first else nullcontext(Recording()) as recording,
        ):
            if what := begun.get("what"):
                events.emit("continued", state.step if state else 0, job.train.steps, what=what)
            result = _train(plan, identity, state, events, ranks)
            recording.status = "finished" if result.status == "finished" else "stopped"
            return result


def used_devices(job: JobConfig, of_blocks: Iterable[torch.device]) -> tuple[str, ...]:
    """Every device that a job was given or names by number: those of its blocks first, then those of its encoders."""
    named = (job.cache.text_device, job.cache.vae_device)
    encoders = (name for name in named if ":" in name)
    return tuple(dict.fromkeys([*map(str, of_blocks), *encoders]))


def _train(
    plan: JobPlan,
    identity: dict[str, Any],
    state: TrainingState | None,
    events: EventLog,
    ranks: Ranks,
) -> TrainingResult:
    """Encode, assemble, train, and write the LoRA file."""
    with cache_store(plan.job).living_run(), ExitStack() as cleanup:
        try:
            data = cached_once(bool(plan.encoded), ranks, lambda: cache_job(plan, events, ranks.is_stop_asked))
        except Stopped:
            hint = "captions and latents done so far are kept; start the job again to continue"
            events.emit("stopped", hint=hint)
            return TrainingResult("stopped", resume_hint=hint)
        cleanup.enter_context(ranks.doing(is_long=True))  # around steps, pictures and saves, which have other limits
        trainer = build_trainer(plan, identity, data, events, cleanup, ranks)
        with own_random_states(trainer.devices, plan.job.train.seed):  # dropout draws from them
            if state is not None:
                trainer.restore(state)
            events.emit("phase", name="training")
            is_finished = trainer.run(ranks.should_stop, check_compiled)
        return _conclude(plan, trainer, is_finished)


def _conclude(plan: JobPlan, trainer: Trainer, is_finished: bool) -> TrainingResult:
    compared: Comparison = {}
    pace, hint, total = "", "", plan.job.train.steps
    if plan.training is not None:
        compared = compare(plan.training.devices, memory_in_use(trainer.devices))
        pace = describe_pace(plan.training, trainer.step_times_s)
        trainer.events.emit("forecast", trainer.step, total, devices=compared, pace=pace)
    path = Path(plan.job.output.folder)
    with trainer.as_written():
        if trainer.ranks.is_first:
            path = save_lora(plan, trainer.lora, path, must_change=is_finished)
        lora = lora_file_tensors(plan, trainer.lora)
    warn_of_losses(plan)
    trainer.events.emit("saved", trainer.step, total, path=str(path))
    if not is_finished:
        hint = f"stopped after step {trainer.step} of {total}; start the same job with resume to continue"
        trainer.events.emit("stopped", trainer.step, total, hint=hint)
    steps = sorted(trainer.evaluations)
    return TrainingResult(
        status="finished" if is_finished else "stopped",
        step=trainer.step,
        lora_path=path,
        lora=lora,
        losses=list(trainer.losses),
        eval_before=trainer.evaluations[steps[0]] if steps else None,
        eval_after=trainer.evaluations.get(trainer.step),
        checkpoint=next(reversed(list_checkpoints(checkpoint_folder(plan.job))), None),
        resume_hint=hint,
        memory=tuple(describe_comparison(compared)),
        pace=pace,
    )
