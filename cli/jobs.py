"""`devicebridge train`, `check` and `plan`: jobs of one model, or of two experts."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from ..config.job import JobConfig, load_job
from ..config.model import shards_weights
from ..data.samples import describe_samples
from ..encoding.encode import Stopped
from ..jobs.in_processes import expert_jobs, num_at_once, run_pair
from ..jobs.job import check_job, plan_job, run_job
from ..jobs.lora_output import describe_file
from ..jobs.quantize_preview import preview_model
from ..jobs.ranks import open_ranks
from ..jobs.resolve import find_machine
from ..jobs.resume import TrainingResult
from ..parallel.ranks.place import RankPlace, find_place, refuse_other_launcher
from ..planning.cards import cards_of, parse_cards
from ..planning.plan import describe_plan, plan_values
from ..planning.sampling_forecast import SampledModel, forecast_sampling
from ..system.stopping import STOPPED, find_launch, stop_on_signal
from ..system.telling import say
from .launch import as_rank, launch
from .native import encoded, encoded_once, enter, prepared
from .plan_request import PlanRequest, make_request
from .terminal import Terminal


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
        return as_rank(place, lambda should_stop: _train_rank(options, job, place, should_stop))
    if job.model.second_expert:
        return _train_pair(options, job)
    with stop_on_signal() as stop:
        listener = Terminal()
        try:
            job = encoded(job, listener, stop)
        except Stopped as stopped:
            say(f"{stopped}: devicebridge train {options.job}")
            return STOPPED
        with prepared(job) as info:
            known = {"info": info, "host_share": options.host_share}
            result = run_job(job, resume=options.resume, on_event=listener, should_stop=stop, **known)
    return _conclude(options, job, result)


def _train_rank(options: argparse.Namespace, job: JobConfig, place: RankPlace, should_stop: Callable[[], bool]) -> int:
    if place.rank:
        logging.getLogger().setLevel(logging.ERROR)  # the first one's warnings are the others', too
    listener = Terminal() if place.rank == 0 else None
    with open_ranks(job, place, should_stop) as ranks:
        resume = options.resume or ranks.place.num_restarts > 0
        try:
            job = encoded_once(job, listener, ranks)
        except Stopped:
            return STOPPED
        with prepared(job) as info:
            result = run_job(job, info=info, resume=resume, on_event=listener, should_stop=should_stop, ranks=ranks)
    return _conclude(options, job, result, place) if place.rank == 0 else 0


def _conclude(
    options: argparse.Namespace, job: JobConfig, result: TrainingResult, place: RankPlace | None = None
) -> int:
    """Say how a training ended; returns the exit code."""
    if result.step >= job.train.steps and options.resume:
        say(f"complete: {result.step} of {job.train.steps} steps are done")
    if result.eval_before is not None and result.eval_after is not None:
        say(f"evaluation loss: {result.eval_before:.6f} before, {result.eval_after:.6f} after {result.step} steps")
    if result.lora_path is not None:
        say(f"LoRA: {result.lora_path}")
    if result.status == "stopped":
        say(f"{result.resume_hint}: {again(options, job, place)}")
        return STOPPED
    return 0


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
    for name, expert in result.experts.items():
        done = f"{name}: {expert.step} of {job.train.steps} steps are done"
        if expert.eval_before is not None and expert.eval_after is not None:
            done += f", evaluation loss {expert.eval_before:.6f} before, {expert.eval_after:.6f} after"
        say(done)
        if expert.lora_path is not None:
            say(f"LoRA: {expert.lora_path}")
    if not result.is_finished:
        say(f"stopped; what is done is saved: devicebridge train {options.job} --resume")
        return STOPPED
    return 0


def each_model(job: JobConfig, devices: Sequence[str] = ()) -> list[tuple[str, JobConfig, int]]:
    """Every model that a job file trains: its heading, its job, and how many train at the same time.

    Args:
        devices: of a pair of experts; () takes the job's.
    """
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
            say(f"quantize: {preview_model(plan.job.model, plan.job.split.devices, plan.info).table()}")
        if is_shared:
            say(f"the weights are shared by {count} processes ({strategy}); whether they fit is seen when they start")
    return 0


def _plan_sampling(options: argparse.Namespace, asked: PlanRequest) -> int:
    others = [f"--{name}" for name in ("quantize", "resolution", "frames") if getattr(options, name) is not None]
    if asked.info is None or options.job is not None or others:
        found = others[0] if others else "a job file" if options.job is not None else "no model"
        raise ValueError(f"--sample goes with --model and --cards alone, and there is {found}; leave the rest out")
    assert asked.info.variant is not None, "published models are variants"
    if "@" in (options.cards or ""):
        raise ValueError(
            f"--cards {options.cards}: --sample goes by seconds, and speeds behind @ are relative; leave them out, or "
            "name the models, such as 2x3090"
        )
    cards = parse_cards(options.cards) if options.cards else cards_of(find_machine(()).devices)
    if cards is None:
        raise ValueError("this machine has no GPU; name the cards to plan for, such as --cards 2x3090")
    forecast = forecast_sampling(SampledModel.of(asked.info, asked.info.variant), options.sample, cards)
    say(json.dumps(forecast.values(), indent=2) if options.json else forecast.describe())
    return 0


def plan(options: argparse.Namespace) -> int:
    if options.cluster is not None:
        raise ValueError(
            "--nodes, --link and --card-link are gone; plan the cards of one machine with --cards, and choose between "
            "machines by docs/guides/choosing_a_strategy.md"
        )
    if options.calibrate:
        say("--calibrate has no effect: blocks are not timed any more", sys.stderr)
    given = {name: getattr(options, name) for name in ("model", "quantize", "resolution", "frames")}
    asked = make_request(options.job, **given)
    if options.sample is not None:
        return _plan_sampling(options, asked)
    if asked.info is None:
        (job,) = enter([asked.job], options.arguments)
        asked = replace(asked, job=job)
    cards = parse_cards(options.cards) if options.cards else []
    plans = {}
    for title, each, share in each_model(asked.job, [card.name for card in cards]):
        own = [card for card in cards if not title or card.name in each.split.devices]
        with prepared(each) if asked.info is None else nullcontext(asked.info) as info:
            plans[title] = plan_job(each, own, info=info, has_data=asked.has_data, host_share=share)
    if options.json:
        values = {title.removeprefix("== "): plan_values(plan) for title, plan in plans.items()}
        say(json.dumps(values.get("", values), indent=2))
    else:
        told = {title: describe_plan(plan, asked.job.train.steps) for title, plan in plans.items()}
        say("\n\n".join(f"{title}\n{text}".strip() for title, text in told.items()))
    return 0
