"""`devicebridge train` and `check`: jobs of one model, or of two experts."""

from __future__ import annotations

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from ..config.job import JobConfig, load_job
from ..config.model import shards_weights
from ..data.samples import describe_samples
from ..events import Event
from ..jobs.in_processes import expert_jobs, num_at_once, run_pair
from ..jobs.job import check_job, run_job
from ..jobs.lora_output import describe_file
from ..jobs.ranks import open_ranks
from ..jobs.resolve import find_machine, preview_model
from ..jobs.resume import TrainingResult
from ..parallel.ranks.group import ALONE
from ..parallel.ranks.place import RankPlace, find_place, refuse_other_launcher
from ..planning.plan import describe_comparison, describe_plan
from ..system.progress import ProgressLine, StepPace, describe_progress
from ..system.stopping import STOPPED, Stopped, find_launch, stop_on_signal
from ..system.telling import say
from .launch import as_rank, launch
from .native import encoded, enter, prepared

_INTERVAL_S = 2.0  # between two lines of one kind of work


def train(options: argparse.Namespace) -> int:
    place, job = find_place(), load_job(options.job)
    count = job.parallel.processes if options.nproc is None else options.nproc
    if place is None and (options.nproc is not None or count > 1):
        enter([job], options.arguments)  # what a mistake in the job makes it say is said once, and here
        return launch(options, count)
    if place is None:
        refuse_other_launcher()
    if job.needs_comfyui and job.model.second_expert:
        raise ValueError(
            'model.family = "comfyui", cache.stock_clip and cache.stock_vae work where one model is trained; remove '
            "model.second_expert, or take the encoders of a diffusers folder"
        )
    (job,) = enter([job], options.arguments)
    if place is not None:
        return as_rank(place, lambda should_stop: _train(options, job, place, should_stop))
    if job.model.second_expert:
        return _train_pair(options, job)
    with stop_on_signal() as stop:
        return _train(options, job, None, stop)


def _train(
    options: argparse.Namespace, job: JobConfig, place: RankPlace | None, should_stop: Callable[[], bool]
) -> int:
    """Train in this process, of several where it has a place, and say how that ended; returns the exit code."""
    is_first = place is None or place.rank == 0
    if not is_first:
        logging.getLogger().setLevel(logging.ERROR)  # the first one's warnings are the others', too
    listener = Terminal() if is_first else None
    with open_ranks(job, place, should_stop) if place else nullcontext(ALONE.stopped_by(should_stop)) as ranks:
        resume = options.resume or ranks.place.num_restarts > 0
        try:
            job = encoded(job, listener, ranks)
        except Stopped as stopped:  # ranks part as after a training
            if place is None:
                say(f"{stopped}: devicebridge train {options.job}")
            return STOPPED
        with prepared(job) as info:
            known = {"info": info, "host_share": options.host_share, "ranks": ranks}
            result = run_job(job, resume=resume, on_event=listener, should_stop=should_stop, **known)
    if not is_first:
        return 0
    if result.step >= job.train.steps and options.resume:
        say(f"complete: {result.step} of {job.train.steps} steps are done")
    _say_made(result)
    if result.status == "stopped":
        say(f"{result.resume_hint}: {again(options, job, place)}")
        return STOPPED
    return 0


def _say_made(result: TrainingResult) -> None:
    if result.eval_before is not None and result.eval_after is not None:
        say(f"evaluation loss: {result.eval_before:.6f} before, {result.eval_after:.6f} after {result.step} steps")
    if result.lora_path is not None:
        say(f"LoRA: {result.lora_path}")


def again(options: argparse.Namespace, job: JobConfig, place: RankPlace | None) -> str:
    """What continues a training that was started so."""
    if place is not None and find_launch() is None:
        return f"the same torchrun command with train {options.job} --resume at its end"
    flag = f" --nproc {place.num_ranks}" if place is not None and place.num_ranks != job.parallel.processes else ""
    return f"devicebridge train {options.job}{flag} --resume"


def _train_pair(options: argparse.Namespace, job: JobConfig) -> int:
    devices = [str(device) for device in find_machine(job.split.devices).devices]
    with stop_on_signal() as stop:
        result = run_pair(job, devices, resume=options.resume, on_event=Terminal(), should_stop=stop)
    for name, expert in result.items():
        say(f"{name}: {expert.step} of {job.train.steps} steps are done")
        _say_made(expert)
    if len(result) < 2 or any(each.status != "finished" for each in result.values()):
        say(f"stopped; what is done is saved: devicebridge train {options.job} --resume")
        return STOPPED
    return 0


def each_model(job: JobConfig, devices: Sequence[str] = ()) -> list[tuple[str, JobConfig, int]]:
    """Every model that a job file trains: its heading, its job, and how many at once. devices: of a pair; () takes
    the job's."""
    if not job.model.second_expert:
        return [("", job, 1)]
    known = list(devices) or [str(device) for device in find_machine(job.split.devices).devices]
    experts = expert_jobs(job, known)
    return [(f"== {name}", each, num_at_once(experts)) for name, each in experts.items()]


def check(options: argparse.Namespace) -> int:
    (whole,) = enter([load_job(options.job)], options.arguments)
    strategy, count = whole.parallel.requested, whole.parallel.processes
    is_shared = count > 1 and shards_weights(strategy)
    for title, job, share in each_model(whole):
        with prepared(job) as info:
            plan = check_job(job, info=info, host_share=share, is_to_train=not is_shared)
            if title:
                say(title)
            say(f"model: {plan.family.title}, {plan.variant.name} ({plan.info.layout} layout)")
            say(f"placement: {plan.placement.describe()}")
            if plan.training is not None:
                say(describe_plan(plan.training, plan.job.train.steps))
            num_clips = sum(bool(sample.frames) for sample in (*plan.samples, *plan.eval_samples))
            of_clips = f"; {num_clips} of them of clips" if num_clips else ""
            kind = "sounds" if plan.family.latent_of(plan.variant).audio_rows else "images"
            say(f"{kind}: {len(plan.training_samples)} for training, {len(plan.eval_samples)} for evaluation{of_clips}")
            if plan.samples:
                say(describe_samples(plan.samples))
            say(f"LoRA file: {describe_file(plan)}")
            say(f"quantize: {preview_model(plan.job.model, plan.job.split.devices, plan.info)}")
        if is_shared:
            say(f"the weights are shared by {count} processes ({strategy}); whether they fit is seen when they start")
    return 0


# ---- a job's events as lines on standard output


class Terminal:
    """Prints a job's events; an object of this class is what `on_event` takes."""

    def __init__(self) -> None:
        self._line = ProgressLine(sys.stdout, say, _INTERVAL_S)
        self._paces: defaultdict[str, StepPace] = defaultdict(StepPace)  # of each of a pair

    def __call__(self, event: Event) -> None:
        values = dict(event.values)
        expert = values.pop("expert", None)  # the one of a pair that says it
        whose = "" if expert is None else f"[{expert}] "
        if event.kind == "progress":
            text = whose + describe_progress(event.step, event.total, **values)
            self._line.show(whose + values["what"], event.step, event.total, text)
        elif event.kind == "step":
            self._paces[whose].update(values["elapsed_s"])
            text = self._paces[whose].describe(event.step, event.total, values["loss"])
            self._line.show(f"{whose}steps", event.step, event.total, whose + text)
        elif line := _describe(event):
            self._line.close()
            say(whose + line)


def _describe(event: Event) -> str:
    values = event.values
    if event.kind == "phase":
        return f"== {values['name']} {values.get('placement', '')}".rstrip()
    if event.kind == "quantized":
        return str(values["summary"])
    if event.kind == "continued":
        return "\n".join([f"goes on after step {event.step} with", *(f"  {line}" for line in values["what"])])
    if event.kind == "eval":
        return f"step {event.step}/{event.total} evaluation loss {values['loss']:.6f}"
    if event.kind == "sample":
        return f"step {event.step}/{event.total} sample {values['file']}: {values['prompt']}"
    if event.kind == "forecast":
        return "\n".join([*describe_comparison(values["devices"]), *filter(None, [values.get("pace", "")])])
    return f"saved {values['path']}" if event.kind == "saved" else ""
