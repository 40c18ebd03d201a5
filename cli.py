"""The `devicebridge` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .version import VERSION

if TYPE_CHECKING:
    from .training.events import Event


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. A problem the user can mend is one message on stderr and code 2."""
    options = _make_parser().parse_args(arguments)
    _set_up_logging(is_verbose=options.verbose)
    try:
        return options.command(options)
    except (ValueError, RuntimeError, OSError) as error:
        if options.verbose:
            raise
        print(f"devicebridge: {error}", file=sys.stderr)
        return 2


def _set_up_logging(*, is_verbose: bool) -> None:
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

    cache = commands.add_parser("cache", help="compute a job's captions and latents only")
    cache.add_argument("job", type=Path)
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
    from .training.config import load_job
    from .training.job import run_job

    job = load_job(options.job)
    with _stop_on_signal() as should_stop:
        result = run_job(job, resume=options.resume, on_event=_print_event, should_stop=should_stop)
    if result.step >= job.train.steps and options.resume:
        print(f"complete: {result.step} of {job.train.steps} steps are done")
    if result.eval_before is not None and result.eval_after is not None:
        print(f"evaluation loss: {result.eval_before:.6f} before, {result.eval_after:.6f} after {result.step} steps")
    if result.lora_path is not None:
        print(f"LoRA: {result.lora_path}")
    if result.status == "stopped":
        print(f"{result.resume_hint}: devicebridge train {options.job} --resume")
        return 130
    return 0


def _check(options: argparse.Namespace) -> int:
    from .training.config import load_job
    from .training.job import check_job
    from .training.quantize_preview import preview_job

    plan = check_job(load_job(options.job))
    print(f"model: {plan.family.title}, {plan.variant.name} ({plan.info.layout} layout)")
    print(f"placement: {plan.placement.describe()}")
    print(f"images: {len(plan.samples)} for training, {len(plan.eval_samples)} for evaluation")
    print(f"quantize: {preview_job(plan.job, plan.info, plan.placement).table()}")
    return 0


def _cache(options: argparse.Namespace) -> int:
    from .caching.encode import Stopped
    from .training.config import load_job
    from .training.events import EventLog
    from .training.job import cache_job, check_job

    plan = check_job(load_job(options.job))
    with _stop_on_signal() as should_stop, EventLog(Path(plan.job.output.folder), _print_event) as events:
        try:
            cache_job(plan, events, should_stop)
        except Stopped:
            print("stopped; what was computed is kept")
            return 130
    return 0


def _run(options: argparse.Namespace) -> int:
    from .headless import run_workflow

    result = run_workflow(options.workflow, comfyui=options.comfyui, timeout_s=options.timeout, on_progress=print)
    for path in result.outputs:
        print(path)
    if result.message:
        print(result.message, file=sys.stderr)
    if result.log:
        print(f"ComfyUI's log: {result.log}", file=sys.stderr)
    return result.exit_code


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import collect, report

    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else report(facts))
    return 0


@contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask for a stop between two steps; a second Ctrl-C interrupts at once."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("stopping; what is done is saved", file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _print_event(event: Event) -> None:
    values = event.values
    if event.kind == "phase":
        print(f"== {values['name']} {values.get('placement', '')}".rstrip(), flush=True)
    elif event.kind == "quantized":
        print(values["summary"], flush=True)
    elif event.kind == "progress":
        print(f"{values['what']} {event.step}/{event.total}", flush=True)
    elif event.kind == "step":
        print(f"step {event.step}/{event.total} loss {values['loss']:.5f} {values['elapsed_s']:.2f} s", flush=True)
    elif event.kind == "eval":
        print(f"step {event.step}/{event.total} evaluation loss {values['loss']:.6f}", flush=True)
    elif event.kind == "saved":
        print(f"saved {values['path']}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
