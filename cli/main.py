"""The `devicebridge` command: its parser. What trains and encodes is imported when a command needs it."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ..system.import_faults import import_fault
from ..system.stopping import STOPPED
from ..system.telling import LOUD, SaidLogs, printable, safe_output, say
from ..version import VERSION
from .lora import add_lora_tools


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 2 for a problem the user can mend, said in one message, 130 for a Ctrl-C."""
    safe_output()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end = arguments.index("--") if "run" in arguments and "--" in arguments else len(arguments)
    options = _make_parser().parse_args(arguments[:end])
    options.server_flags = arguments[end + 1 :]
    options.arguments = arguments
    set_up_logging(is_verbose=options.verbose)
    try:
        return options.command(options)
    except Exception as error:
        fault = import_fault(error)
        if options.verbose or not fault and not isinstance(error, (ValueError, RuntimeError, OSError)):
            raise
        say(f"devicebridge: {fault or error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # one more, while Python ends, would print a traceback
        say("devicebridge: interrupted", sys.stderr)
        return STOPPED


def set_up_logging(*, is_verbose: bool = False) -> None:
    """Show the pack's warnings, or all it logs. To be called before anything that trains is imported."""
    if not is_verbose:
        os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")  # read when it is imported, later
    level = logging.INFO if is_verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", handlers=[SaidLogs()])
    if not is_verbose:
        for name in LOUD:
            logging.getLogger(name).setLevel(logging.ERROR)


_SCHEMES = ("none", "fp8", "int8", "fp8-compute", "int8-compute", "stored", "auto")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _make_parser() -> argparse.ArgumentParser:
    about = "Train and run diffusion models over several GPUs."
    parser: argparse.ArgumentParser = _Parser(prog="devicebridge", description=about)
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    flag: dict[str, Any] = {"action": "store_true"}
    gone: dict[str, Any] = {"help": argparse.SUPPRESS}
    python: dict[str, Any] = {"type": Path, "help": "the Python that runs ComfyUI; found by itself otherwise"}

    def new(name: str, run: Callable[[argparse.Namespace], int], help: str, more: str = "") -> argparse.ArgumentParser:
        """A command. help: in the list of commands, and in its own behind which more stands."""
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}. {more}".strip())
        command.set_defaults(command=run)
        return command

    command = new("train", _command("jobs", "train"), "train a LoRA from a TOML job file", "Ctrl-C saves everything.")
    add = command.add_argument
    add("job", type=Path, help="job file (TOML)")
    add("--nproc", type=int, metavar="PROCESSES", help="train in so many processes, which share this machine's devices")
    add("--host-share", type=int, default=1, **gone)  # jobs that share host memory
    add = command.add_mutually_exclusive_group().add_argument
    add("--resume", **flag, help="continue from the newest checkpoint of the job's folder, as it began")
    changed: dict[str, Any] = {"action": "store_const", "const": "continue", "dest": "resume"}
    add("--continue", **changed, help="the same with settings, images or cards that were changed since, which it names")

    what = "check a job file, its model and its images without loading weights"
    new("check", _command("jobs", "check"), what).add_argument("job", type=Path, help="job file (TOML)")

    more = "Reads headers and images only; with --model none of them. Exit code 2 if nothing fits."
    add = new("plan", _command("plan", "plan"), "say what a job will take of every card", more).add_argument
    add("job", type=Path, nargs="?", help="job file; may be left out with --model")
    add("--model", default="", metavar="VARIANT", help="a published model, such as flux2-dev, in place of the job's")
    sizes = 'in place of this machine\'s: "24GB,12GB", "2x24GiB", "2x3090"; with relative speeds "2x24GB@1,12GB@0.5"'
    add("--cards", "--card", metavar="SIZES", help=sizes)
    add("--resolution", type=int, metavar="PIXELS", help="in place of the job's, or of images that are not there")
    add("--frames", type=int, metavar="NUMBER", help="in place of the job's data.frames")
    add("--quantize", choices=_SCHEMES, help="in place of the job's model.quantize")
    add("--sample", metavar="SIZE", help="plan sampling with --model, not a training: 1024x1024, or a clip 832x480x33")
    add("--json", **flag, help="print as JSON")

    more = "Several may run at once for one cache, on other devices too, and share the work. What is done stays."
    command = new("cache", _command("cache", "cache"), "compute a job's captions and latents only", more)
    add = command.add_argument
    add("job", type=Path, nargs="+", help="job file; several are done one after the other")
    add("--only", choices=["captions", "latents", "conditions"], help="leave the other parts alone")
    add("--device", help="device of text encoders and VAE, in place of the job's")
    add = command.add_mutually_exclusive_group().add_argument
    add("--verify", **flag, help="name missing and damaged entries, delete the damaged; exit code 1 if there were any")
    add("--prune", **flag, help="delete from the cache folders what no sample of any of these jobs needs")

    what = "show the trainings of a ComfyUI, and its queue of those in the background"
    add = new("jobs", _command("queue", "jobs"), what).add_argument
    add("folder", type=Path, nargs="?", help="folder of the runs, output/devicebridge of a ComfyUI; found otherwise")
    add("--user-directory", type=Path, metavar="FOLDER", help="of that ComfyUI; user beside output otherwise")
    add("--stop", metavar="RUN", help="have a run end its step, save, and stop")
    add("--all", **flag, help="show all runs, not the newest 200 and those under way")
    add("--json", **flag, help="print as JSON")

    more = "Flags for ComfyUI's server stand behind --, as in: devicebridge run workflow.json -- --lowvram"
    add = new("run", _run, "run a ComfyUI workflow file without its window, by comfy-cli", more).add_argument
    add("workflow", type=Path, help="JSON file of a workflow: as ComfyUI saves it, or its API form (Export (API))")
    value = "replace an input, such as DeviceBridgeTrainLora.steps=500; a node by its number, type or title; repeatable"
    add("--set", action="append", default=[], metavar="NODE.INPUT=VALUE", help=value)
    add("--base-directory", type=Path, help="where models, input and output are, if not ComfyUI's folder")
    add("--comfyui", type=Path, help="ComfyUI's folder; found by itself otherwise")
    add("--python", **python)
    add("--timeout", type=float, default=None, metavar="SECONDS", help="give up after this long")

    add = new("doctor", _doctor, "show devices, versions, and what will work here").add_argument
    add("--bench", **flag, help="measure GPUs, links and blocks of three models in a minute, as a row of a table")
    add("--json", nargs="?", const="-", metavar="FILE", help="print as JSON, or write it to a file")
    add("--python", **python)

    more = "It derives them, proves them by small pictures, and prints rows of families/comfy; splits then take these."
    what = "show where the blocks and tokens of a model's class are"
    add = new("examine", _command("native", "examine"), what, more).add_argument
    add("file", type=Path, help="file of a diffusion model")
    add("--python", **python)

    more = "Of ai-toolkit, diffusion-pipe, kohya's scripts, musubi-tuner, OneTrainer or SimpleTuner. It lists the rest."
    add = new("convert", _command("convert", "convert"), "make a job file of another trainer's", more).add_argument
    add("file", type=Path, help="the job or dataset file, or a folder with kohya's folders (10_name)")
    add("--output", "-o", type=Path, metavar="JOB", help="write the job there; printed otherwise")
    add("--model", type=Path, help="the model's file or folder, in place of what the file names")

    what = "inspect, convert, scale, merge, extract and resize LoRA files"
    tools = commands.add_parser("lora", help=what, description="They work a layer at a time, and write over no file.")
    add_lora_tools(tools)
    return parser


def _command(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """A function of a module of this folder, which is imported when it is called."""
    return lambda options: getattr(importlib.import_module(f".{module}", __package__), name)(options)


def _run(options: argparse.Namespace) -> int:
    from ..headless.run import parse_setting, run_workflow

    result = run_workflow(
        options.workflow,
        comfyui=options.comfyui,
        timeout_s=options.timeout,
        on_progress=say,
        base=options.base_directory,
        server_arguments=options.server_flags,
        values=dict(map(parse_setting, options.set)),
        python=options.python,
    )
    for path in result.outputs:
        say(str(path))
    if result.message:
        say(result.message, sys.stderr)
    if result.log:
        say(f"ComfyUI's log: {result.log}", sys.stderr)
    return result.exit_code


def _doctor(options: argparse.Namespace) -> int:
    from . import bench, doctor

    if options.bench:
        from .native import need_comfyui

        need_comfyui("--bench measures in ComfyUI's sampler", options.arguments, options.python)
    facts = bench.collect() if options.bench else doctor.collect(options.python)
    report = bench.report if options.bench else doctor.report
    say(json.dumps(facts, indent=2) if options.json == "-" else report(facts))
    if options.json and options.json != "-":  # behind the report, which takes a minute and would be lost
        Path(options.json).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
