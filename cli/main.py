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
from typing import NoReturn

from ..system.import_faults import import_fault
from ..system.stopping import STOPPED, note_parent
from ..system.telling import LOUD, SaidLogs, printable, safe_output, say
from ..version import VERSION
from .lora import add_lora_tools


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code.

    A problem the user can mend is one message on stderr and code 2; a Ctrl-C that nothing else answers is one line
    and 130.
    """
    safe_output()
    note_parent()
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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _make_parser() -> argparse.ArgumentParser:
    about = "Train and run diffusion models over several GPUs."
    parser: argparse.ArgumentParser = _Parser(prog="devicebridge", description=about)
    parser.add_argument("--version", action="version", version=VERSION)
    parser.add_argument("-v", "--verbose", action="store_true", help="log more, and show tracebacks")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    python = "the Python that runs ComfyUI; as COMFYUI_PYTHON says, or found by itself otherwise"

    command = commands.add_parser(
        "train",
        help="train a LoRA from a TOML job file",
        description="Train a LoRA from a TOML job file, as those in examples. Ctrl-C saves; --resume continues.",
    )
    command.add_argument("job", type=Path, help="job file (TOML)")
    resume = command.add_mutually_exclusive_group()
    resume.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint of the job's folder, as it began"
    )
    resume.add_argument(
        "--continue",
        action="store_const",
        const="continue",
        dest="resume",
        help="the same with settings, pictures, captions or cards that were changed since; what changes is said, and "
        "what cannot is refused by name",
    )
    command.add_argument(
        "--nproc",
        type=int,
        metavar="PROCESSES",
        help="train in so many processes of this machine, which share its devices; torchrun is started for it",
    )
    command.add_argument("--host-share", type=int, default=1, help=argparse.SUPPRESS)  # jobs that share host memory
    command.set_defaults(command=_command("jobs", "train"))

    command = commands.add_parser(
        "check",
        help="check a job file, its model and its images without loading weights",
        description="Check a job file, its model and its images, and say what would be trained, without loading "
        "weights.",
    )
    command.add_argument("job", type=Path, help="job file (TOML)")
    command.set_defaults(command=_command("jobs", "check"))

    command = commands.add_parser(
        "plan",
        help="say what a job will take of every card, and how it would best use them; no weight is loaded",
        description="Forecast the memory of every card and choose cut, kept activations, and what the job leaves to "
        "auto. Reads headers and images only and needs no GPU; with --model neither job file, model nor images are "
        "needed. Exit code 2 if nothing fits, with what would help.",
    )
    command.add_argument("job", type=Path, nargs="?", help="job file; may be left out with --model")
    command.add_argument(
        "--model",
        default="",
        metavar="VARIANT",
        help="plan for this published model, such as flux2-dev, in place of the job's; its files need not be there",
    )
    command.add_argument(
        "--cards",
        "--card",
        metavar="SIZES",
        help='plan for these cards instead of this machine\'s: "24GB,12GB", "2x24GiB", "2x3090", or with relative '
        'speeds "2x24GB@1,12GB@0.5"',
    )
    command.add_argument("--nodes", "--link", "--card-link", dest="cluster", help=argparse.SUPPRESS)  # gone
    command.add_argument(
        "--resolution",
        type=int,
        metavar="PIXELS",
        help="in place of the job's resolutions; without a job file, or where its dataset folders are not there, the "
        "side of a square to plan for (without a job file 1024, for models of video 640, unless given)",
    )
    command.add_argument(
        "--frames",
        type=int,
        metavar="NUMBER",
        help="in place of the job's data.frames; of a square 1, or for models that are given the first frame 33, "
        "unless given",
    )
    command.add_argument(
        "--quantize",
        choices=("none", "fp8", "int8", "fp8-compute", "int8-compute", "stored", "auto"),
        help="in place of the job's model.quantize; without a job file the planner chooses",
    )
    command.add_argument(
        "--sample",
        metavar="SIZE",
        help="plan sampling with --model over several cards, not a training: the way that auto of a split takes, and "
        "about how long a step lasts; width x height, such as 1024x1024, for clips with frames, such as 832x480x33",
    )
    command.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)  # without effect
    command.add_argument("--json", action="store_true", help="print as JSON")
    command.set_defaults(command=_command("jobs", "plan"))

    command = commands.add_parser(
        "cache",
        help="compute a job's captions and latents only",
        description="Compute a job's captions and latents only. Several of these may run at once for one cache, on "
        "other devices too, and share the work. What is done stays, however it ends.",
    )
    command.add_argument("job", type=Path, nargs="+", help="job file; several are done one after the other")
    command.add_argument("--only", choices=["captions", "latents", "conditions"], help="leave the other parts alone")
    command.add_argument("--device", help="device of text encoders and VAE, in place of the job's")
    mode = command.add_mutually_exclusive_group()
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
    command.set_defaults(command=_command("cache", "cache"))

    command = commands.add_parser(
        "jobs", help="show the trainings of a ComfyUI, and its queue of those in the background"
    )
    command.add_argument(
        "folder", type=Path, nargs="?", help="the folder of the runs, output/devicebridge of a ComfyUI; found otherwise"
    )
    command.add_argument(
        "--user-directory",
        type=Path,
        metavar="FOLDER",
        help="of that ComfyUI; the folder user beside output otherwise",
    )
    command.add_argument("--stop", metavar="RUN", help="have a run end its step, save, and stop")
    command.add_argument("--all", action="store_true", help="show all runs, not the newest 200 and those under way")
    command.add_argument("--json", action="store_true", help="print as JSON")
    command.set_defaults(command=_command("queue", "jobs"))

    command = commands.add_parser("run", help="run a ComfyUI workflow file through ComfyUI, without its window")
    command.add_argument(
        "workflow",
        type=Path,
        help="JSON file of a workflow: as ComfyUI saves it, or its API form (Export (API)); needs comfy-cli, "
        "which `pip install -e .[comfy]` brings",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NODE.INPUT=VALUE",
        help="replace an input, such as DeviceBridgeTrainLora.steps=500; a node by its number, type or title; may be "
        "given several times",
    )
    command.add_argument(
        "--base-directory", type=Path, help="where models, input and output are, if not ComfyUI's folder"
    )
    command.epilog = "Flags for ComfyUI's server stand behind --, such as: devicebridge run workflow.json -- --lowvram"
    command.add_argument("--comfyui", type=Path, help="ComfyUI's folder; found by itself otherwise")
    command.add_argument("--python", type=Path, help=python)
    command.add_argument("--timeout", type=float, default=None, metavar="SECONDS", help="give up after this long")
    command.set_defaults(command=_run)

    command = commands.add_parser("doctor", help="show devices, versions, and what will work here")
    command.add_argument(
        "--bench",
        action="store_true",
        help="measure, in about a minute, in ComfyUI and without a model file, how fast GPUs and their links are, and "
        "blocks of three models with random weights over them; prints a row for the table in docs/benchmarks.md",
    )
    command.add_argument("--json", nargs="?", const="-", metavar="FILE", help="print as JSON, or write it to a file")
    command.add_argument("--python", type=Path, help=python)
    command.add_argument("--blocks", action="store_true", help=argparse.SUPPRESS)  # in ComfyUI's Python
    command.set_defaults(command=_doctor)

    command = commands.add_parser(
        "examine",
        help="show where the blocks and tokens of a model's class are",
        description="Load a diffusion model, derive where its blocks and tokens are, prove that by small pictures, and "
        "print it as rows of families/comfy. A split by tokens, and a training, then take what was proved.",
    )
    command.add_argument("file", type=Path, help="file of a diffusion model")
    command.add_argument("--python", type=Path, help=python)
    command.set_defaults(command=_command("examine", "examine"))

    command = commands.add_parser(
        "convert",
        help="make a job file of another trainer's",
        description="Make a job file of a job or dataset file of ai-toolkit, diffusion-pipe, kohya's scripts, "
        "musubi-tuner, OneTrainer or SimpleTuner. What has no counterpart is listed with the reason.",
    )
    command.add_argument("file", type=Path, help="the file, or a folder with kohya's folders (10_name)")
    command.add_argument("--output", "-o", type=Path, metavar="JOB", help="write the job there; printed otherwise")
    command.add_argument("--model", type=Path, help="the model's file or folder, in place of what the file names")
    command.set_defaults(command=_command("convert", "convert"))

    command = commands.add_parser(
        "lora",
        help="inspect, convert, scale, merge, extract and resize LoRA files",
        description="Tools on LoRA files. They read and write a layer at a time, and write over no file.",
    )
    add_lora_tools(command)
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
    if options.blocks:
        from ..nodes.host.split.bench import print_blocks

        return print_blocks()
    if options.bench:
        from .bench import collect, report
    else:
        from .doctor import collect, report
    facts = collect(options.python)
    say(json.dumps(facts, indent=2) if options.json == "-" else report(facts))
    if options.json and options.json != "-":  # behind the report, which takes a minute and would be lost
        Path(options.json).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
