"""`devicebridge cache`: filling, verifying and pruning the caches of jobs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..config.job import load_job
from ..encoding.text_place import text_device_on
from ..events import EventLog
from ..jobs.checked_job import JobPlan
from ..jobs.encode_job import CACHE_PARTS, CachePart, ComfyEncoders, fill_cache, prune_caches, verify_cache
from ..system.stopping import STOPPED, Requests, Stopped, stop_on_signal
from ..system.telling import say
from .jobs import Terminal, each_model
from .native import enter, with_encoders


def cache(options: argparse.Namespace) -> int:
    if options.prune and options.only:
        raise ValueError("--prune looks at all parts together; leave out --only")
    if options.device and (options.prune or options.verify):
        raise ValueError("--device is for computing; leave it out with --verify and --prune, which load nothing")
    # both experts of a pair need the same captions and latents
    whole = enter([load_job(path) for path in options.job], options.arguments)
    jobs = {str(path): each_model(job)[0][1] for path, job in zip(options.job, whole, strict=True)}
    for path, job in jobs.items() if options.device else ():
        text_device = text_device_on(job.cache.text_device, options.device)
        jobs[path] = replace(job, cache=replace(job.cache, text_device=text_device, vae_device=options.device))
    parts = (options.only,) if options.only else CACHE_PARTS
    with ExitStack() as stack:
        plans, encoders = {}, {}
        for path, job in jobs.items():
            plans[path], encoders[path] = stack.enter_context(with_encoders(job))
        if options.verify:
            num_problems = 0
            for name, plan in plans.items():
                lines, num_unsound = verify_cache(plan, parts)
                num_problems += num_unsound
                say("\n".join(lines))
                if num_unsound:
                    say(f"`devicebridge cache {name}` computes what is missing or damaged")
            return int(num_problems > 0)
        if not options.prune:
            return _fill(plans, encoders, parts)
        for report in prune_caches(plans, parts):
            say(report)
    return 0


def _fill(plans: Mapping[str, JobPlan], encoders: Mapping[str, ComfyEncoders], parts: Sequence[CachePart]) -> int:
    requests = [Requests(Path(plan.job.output.folder)) for plan in plans.values()]
    for each in requests:
        each.take("stop")  # of a run before
    with stop_on_signal() as stop:

        def should_stop() -> bool:
            return stop() or any(each.is_asked("stop") for each in requests)

        for path, plan in plans.items():
            with EventLog(Path(plan.job.output.folder), Terminal()) as events:
                try:
                    for part in parts:
                        fill_cache(plan, part, events, should_stop, encoders[path])
                except Stopped as stopped:
                    say(str(stopped))
                    return STOPPED
    return 0
