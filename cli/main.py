"""The `devicebridge` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..system.stopping import STOPPED, say, stop_on_signal
from ..version import VERSION

if TYPE_CHECKING:
    from ..config.job import JobConfig
    from ..events import Event
    from ..jobs.checked_job import JobPlan
    from ..jobs.encode_job import CachePart


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    A problem the user can mend is one message on stderr and code 2; a Ctrl-C that nothing else answers is one line
    and 130.
    """
    options = _make_parser().parse_args(arguments)
    set_up_logging(is_verbose=options.verbose)
    try:
        return options.command(options)
    except (ValueError, RuntimeError, OSError) as error:
        if options.verbose:
            raise
        say(f"devicebridge: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more, while Python ends, would print a traceback
        say("devicebridge: interrupted", sys.stderr)
        return STOPPED


def set_up_logging(*, is_verbose: bool = False) -> None:
    """For a process of our own, before it imports what trains: warnings of ours, and what we say besides if wanted."""
    if not is_verbose:
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")  # read when it is imported, later
    logging.basicConfig(level=logging.INFO if is_verbose else logging.WARNING, format="%(levelname)s %(message)s")
    if not is_verbose:  # torchao and diffusers warn at import of kernels that nobody here asked for
        for name in ("torchao", "torch.utils._pytree", "diffusers"):
            logging.getLogger(name).setLevel(logging.ERROR)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="devicebridge", description="Train and run diffusion models over several GPUs."
    )
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a LoRA from a TOML job file")
    train.add_argument("job", type=Path)
    train.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of the job's folder")
    train.set_defaults(command=_train)

    check = commands.add_parser("check", help="check a job file, its model and its images without loading weights")
    check.add_argument("job", type=Path)
    check.set_defaults(command=_check)

    plan = commands.add_parser(
        "plan",
        help="say what a job will take of every card, and how it would best use them; no weight is loaded",
        description="Forecast the memory of every card and choose cut, kept activations, and what the job leaves to "
        "auto. Reads headers and images only and needs no GPU; with --model neither job file, model nor images are "
        "needed. Exit code 2 if nothing fits, with what would help.",
    )
    plan.add_argument("job", type=Path, nargs="?", help="job file; may be left out with --model")
    plan.add_argument(
        "--model",
        default="",
        metavar="VARIANT",
        help="plan for this published model, such as flux2-dev, in place of the job's; its files need not be there",
    )
    plan.add_argument(
        "--cards",
        metavar="SIZES",
        help='plan for these cards instead of this machine\'s: "24GB,12GB", "2x24GB", or with relative speeds '
        '"2x24GB@1,12GB@0.5"',
    )
    plan.add_argument(
        "--resolution",
        type=int,
        metavar="PIXELS",
        help="in place of the job's resolutions; without a job file, or where its dataset folders are not there, the "
        "side of a square to plan for (without a job file 1024, for models of video 640, unless given)",
    )
    plan.add_argument(
        "--frames",
        type=int,
        metavar="NUMBER",
        help="in place of the job's data.frames; of a square 1, or for models that are given the first frame 33, "
        "unless given",
    )
    plan.add_argument(
        "--quantize",
        choices=("none", "fp8", "int8", "fp8-compute", "int8-compute", "auto"),
        help="in place of the job's model.quantize; without a job file the planner chooses",
    )
    plan.add_argument(
        "--calibrate",
        action="store_true",
        help="time the model's blocks on this machine's cards, unless an earlier job has; takes some seconds",
    )
    plan.add_argument("--json", action="store_true", help="print as JSON")
    plan.set_defaults(command=_plan)

    cache = commands.add_parser(
        "cache",
        help="compute a job's captions and latents only",
        description="Compute a job's captions and latents only. Several of these may run at once for one cache, on "
        "other devices too, and share the work. What is done stays, however it ends.",
    )
    cache.add_argument("job", type=Path, nargs="+", help="job file; several are done one after the other")
    cache.add_argument("--only", choices=["captions", "latents"], help="leave the other part alone")
    cache.add_argument("--device", help="device of text encoders and VAE, in place of the job's")
    mode = cache.add_mutually_exclusive_group()
    mode.add_argument("--regenerate", action="store_true", help="compute everything again, also what is there")
    mode.add_argument(
        "--verify",
        action="store_true",
        help="only check: read every entry that the jobs need and compare checksums; names those that are missing or "
        "damaged, deletes the damaged ones (the next run computes them), and ends with exit code 1 if there were any",
    )
    mode.add_argument(
        "--prune",
        action="store_true",
        help="compute nothing: delete from the jobs' cache folders what no sample of any of these jobs needs",
    )
    cache.set_defaults(command=_cache)

    run = commands.add_parser("run", help="run a ComfyUI workflow file through ComfyUI, without its window")
    run.add_argument(
        "workflow",
        type=Path,
        help="JSON file of a workflow: as ComfyUI saves it, or its API form (Export (API)); needs comfy-cli, "
        "which `pip install -e .[comfy]` brings",
    )
    run.add_argument("--comfyui", type=Path, help="ComfyUI's folder; found by itself otherwise")
    run.add_argument("--timeout", type=float, default=None, metavar="SECONDS", help="give up after this long")
    run.set_defaults(command=_run)

    doctor = commands.add_parser("doctor", help="show devices, versions, and what will work here")
    doctor.add_argument("--json", action="store_true", help="print as JSON")
    doctor.set_defaults(command=_doctor)
    return parser


def _train(options: argparse.Namespace) -> int:
    from ..config.job import load_job
    from ..jobs.job import run_job

    job = load_job(options.job)
    if job.model.second_expert:
        return _train_pair(options, job)
    with stop_on_signal() as stop:
        result = run_job(job, resume=options.resume, on_event=_Terminal(stop.ask), should_stop=stop)
    if result.step >= job.train.steps and options.resume:
        say(f"complete: {result.step} of {job.train.steps} steps are done")
    if result.eval_before is not None and result.eval_after is not None:
        say(f"evaluation loss: {result.eval_before:.6f} before, {result.eval_after:.6f} after {result.step} steps")
    if result.lora_path is not None:
        say(f"LoRA: {result.lora_path}")
    if result.status == "stopped":
        say(f"{result.resume_hint}: devicebridge train {options.job} --resume")
        return STOPPED
    return 0


def _train_pair(options: argparse.Namespace, job: JobConfig) -> int:
    from ..jobs.concurrent import run_pair
    from ..jobs.resolve import find_machine

    devices = [str(device) for device in find_machine(job.split.devices).devices]
    with stop_on_signal() as stop:
        result = run_pair(job, devices, resume=options.resume, on_event=_Terminal(stop.ask), should_stop=stop)
    for name, expert in result.experts.items():
        done = f"{name}: {expert.step} of {job.train.steps} steps are done"
        if expert.eval_before is not None and expert.eval_after is not None:
            done += f", evaluation loss {expert.eval_before:.6f} before, {expert.eval_after:.6f} after"
        say(done)
        if expert.lora_path:
            say(f"LoRA: {expert.lora_path}")
    if not result.is_finished:
        say(f"stopped; what is done is saved: devicebridge train {options.job} --resume")
        return STOPPED
    return 0


def _check(options: argparse.Namespace) -> int:
    from ..config.job import load_job
    from ..jobs.job import check_job

    for title, job, share in _each_model(load_job(options.job)):
        _print_check(title, check_job(job, host_share=share))
    return 0


def _each_model(job: JobConfig, devices: Sequence[str] = ()) -> list[tuple[str, JobConfig, int]]:
    """Heading and job of every model that a job file trains: one, or two experts over these devices, () for all; and
    how many train at the same time."""
    if not job.model.second_expert:
        return [("", job, 1)]
    from ..jobs.experts import are_together, expert_jobs
    from ..jobs.resolve import find_machine

    known = list(devices) or [str(device) for device in find_machine(job.split.devices).devices]
    experts = expert_jobs(job, known)
    share = len(experts) if are_together(experts) else 1
    return [(f"== {expert.name}", expert.job, share) for expert in experts]


def _print_check(title: str, plan: JobPlan) -> None:
    from ..jobs.lora_output import describe_file
    from ..jobs.quantize_preview import preview_job
    from ..planning.report import describe_plan

    if title:
        print(title)
    print(f"model: {plan.family.title}, {plan.variant.name} ({plan.info.layout} layout)")
    print(f"placement: {plan.placement.describe()}")
    if plan.training is not None:
        print(describe_plan(plan.training))
    num_clips = sum(bool(sample.frames) for sample in (*plan.samples, *plan.eval_samples))
    of_clips = f"; {num_clips} of them of clips" if num_clips else ""
    num_training = len(plan.training_samples)
    print(f"images: {num_training} for training, {len(plan.eval_samples)} for evaluation{of_clips}")
    print(f"LoRA file: {describe_file(plan)}")
    print(f"quantize: {preview_job(plan.job, plan.info, plan.placement).table()}")


def _plan(options: argparse.Namespace) -> int:
    from ..jobs.job import plan_job
    from ..planning.cards import parse_cards
    from ..planning.report import describe_plan, plan_values
    from ..planning.request import make_request

    given = {name: getattr(options, name) for name in ("model", "quantize", "resolution", "frames")}
    asked = make_request(options.job, **given)
    cards = parse_cards(options.cards) if options.cards else []
    plans = {}
    for title, each, share in _each_model(asked.job, [card.name for card in cards]):
        own = [card for card in cards if not title or card.name in each.split.devices]
        plans[title] = plan_job(
            each, own, info=asked.info, has_data=asked.has_data, may_measure=options.calibrate, host_share=share
        )
    if options.json:
        values = {title.removeprefix("== "): plan_values(plan) for title, plan in plans.items()}
        print(json.dumps(values.get("", values), indent=2))
    else:
        print("\n\n".join(f"{title}\n{describe_plan(plan)}".strip() for title, plan in plans.items()))
    return 0


def _cache(options: argparse.Namespace) -> int:
    from ..config.job import load_job
    from ..jobs.encode_job import CACHE_PARTS
    from ..jobs.job import check_job

    if options.prune and options.only:
        raise ValueError("--prune looks at captions and latents together; leave out --only")
    if options.device and (options.prune or options.verify):
        raise ValueError("--device is for computing; leave it out with --verify and --prune, which load nothing")
    # both experts of a pair need the same captions and latents
    jobs = {str(path): _on_device(_each_model(load_job(path))[0][1], options.device) for path in options.job}
    plans = {path: check_job(job, is_to_train=False) for path, job in jobs.items()}
    parts = (options.only,) if options.only else CACHE_PARTS
    if options.verify:
        return _verify_caches(plans, parts)
    if options.prune:
        return _prune_caches(plans, parts)
    return _fill_caches(plans, parts, is_anew=options.regenerate)


def _on_device(job: JobConfig, device: str | None) -> JobConfig:
    if not device:
        return job
    from ..encoding.text_place import text_device_on

    return replace(
        job, cache=replace(job.cache, text_device=text_device_on(job.cache.text_device, device), vae_device=device)
    )


def _fill_caches(plans: Mapping[str, JobPlan], parts: Sequence[CachePart], *, is_anew: bool) -> int:
    from ..encoding.encode import NONE_OUTDATED, Stopped
    from ..events import EventLog
    from ..jobs.encode_job import cache_store, fill_captions, fill_latents

    fill = {"captions": fill_captions, "latents": fill_latents}
    stores = [cache_store(plan.job) for plan in plans.values()]
    outdated = {store.folder: store.stamps() for store in stores} if is_anew else {}
    with stop_on_signal() as stop:
        for plan in plans.values():
            stamps = outdated.get(cache_store(plan.job).folder, NONE_OUTDATED)
            with EventLog(Path(plan.job.output.folder), _Terminal(stop.ask)) as events:
                try:
                    for part in parts:
                        fill[part](plan, events, stop, outdated=stamps)
                except Stopped as stopped:
                    say(str(stopped))
                    return STOPPED
    return 0


def _verify_caches(plans: Mapping[str, JobPlan], parts: Sequence[CachePart]) -> int:
    from ..jobs.cache_upkeep import verify_cache

    is_clean = True
    for name, plan in plans.items():
        verified = verify_cache(plan, parts)
        print(verified.report())
        is_clean = is_clean and verified.is_clean
        if not verified.is_clean:
            print(f"`devicebridge cache {name}` computes what is missing or damaged")
    return 0 if is_clean else 1


def _prune_caches(plans: Mapping[str, JobPlan], parts: Sequence[CachePart]) -> int:
    from ..jobs.cache_upkeep import prune_caches

    for pruned in prune_caches(plans, parts):
        print(pruned.report())
    return 0


def _run(options: argparse.Namespace) -> int:
    from ..headless.run import run_workflow

    result = run_workflow(options.workflow, comfyui=options.comfyui, timeout_s=options.timeout, on_progress=say)
    for path in result.outputs:
        say(str(path))
    if result.message:
        say(result.message, sys.stderr)
    if result.log:
        say(f"ComfyUI's log: {result.log}", sys.stderr)
    return result.exit_code


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import collect, report

    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else report(facts))
    return 0


class _Terminal:
    """Prints a job's events; an object of this class is what `on_event` takes.

    In a terminal, progress is one line that is written over; elsewhere a line now and then, so that a log stays short.
    Where nobody can read any more, on_gone is called.
    """

    _INTERVAL_S = 2.0
    _BAR_WIDTH = 24

    def __init__(self, on_gone: Callable[[], None] = lambda: None) -> None:
        self._on_gone = on_gone
        self._is_terminal = sys.stdout.isatty()
        self._is_line_open = False
        self._last_s = 0.0

    def __call__(self, event: Event) -> None:
        if event.kind == "progress":
            self._show_progress(event)
            return
        if line := _describe(event):
            self._end_line()
            self._say(_of_expert(event, line))

    def _show_progress(self, event: Event) -> None:
        line, is_last = _of_expert(event, _describe_progress(event)), event.step == event.total
        now_s = time.monotonic()
        if self._is_terminal:
            filled = self._BAR_WIDTH * event.step // max(1, event.total)
            bar = "#" * filled + "." * (self._BAR_WIDTH - filled)
            self._say(f"\r[{bar}] {line}\033[K", end="")  # the escape clears what a longer line has left
            self._is_line_open = True
            if is_last:
                self._end_line()
        elif is_last or now_s - self._last_s >= self._INTERVAL_S:
            self._last_s = now_s
            self._say(line)

    def _end_line(self) -> None:
        if self._is_line_open:
            self._say("")
        self._is_line_open = False

    def _say(self, line: str, end: str = "\n") -> None:
        if not say(line, end=end):
            self._on_gone()


def _of_expert(event: Event, line: str) -> str:
    """The line, after the name of the one of a pair that says it."""
    expert = event.values.get("expert")
    return line if expert is None else f"[{expert}] {line}"


def _describe_progress(event: Event) -> str:
    from ..system.pace import describe_progress

    values = {name: value for name, value in event.values.items() if name != "expert"}
    return describe_progress(event.step, event.total, **values)


def _describe(event: Event) -> str:
    from ..planning.report import describe_comparison

    values = event.values
    if event.kind == "phase":
        return f"== {values['name']} {values.get('placement', '')}".rstrip()
    if event.kind == "quantized":
        return str(values["summary"])
    if event.kind == "step":
        return f"step {event.step}/{event.total} loss {values['loss']:.5f} {values['elapsed_s']:.2f} s"
    if event.kind == "eval":
        return f"step {event.step}/{event.total} evaluation loss {values['loss']:.6f}"
    if event.kind == "forecast":
        return "\n".join([*describe_comparison(values["devices"]), *filter(None, [values.get("pace", "")])])
    if event.kind == "saved":
        return f"saved {values['path']}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
