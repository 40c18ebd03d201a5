"""One process with ComfyUI's Python, its real code and emulated cards; runs the cases of test_split_model.py by name.

Takes ComfyUI's folder and one for checkpoints. Reads {"case": name} line by line from stdin and answers each with one
line of JSON: {"claims": [[claim, holds, found]], "seconds": s} or {"error": traceback}. {"case": "names"} lists them.
{"case": "history 7"} runs the random history of that seed: {"verdict": text, "steps": [text]}; {"case": "tokens 7"} one
with way tokens. With --gpus behind the folders histories are played on the GPUs there are. " without " and the name of
one of split_guards.GUARDS behind a case takes that guard out. {"case": "prompts 1000 7"} runs so many prompts of
split_prompts.py.

ComfyUI is imported before the pack, so that what the pack does to ComfyUI's own functions shows (see `core_digest`).
"""

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
WATCHED = (
    "controlnet", "hooks", "ldm.modules.attention", "lora", "model_base", "model_management", "model_patcher",
    "model_prefetch", "ops", "patcher_extension", "sample", "sampler_helpers", "samplers", "sd", "utils",
)  # fmt: skip

Digest = dict[str, int]


def main() -> None:
    checkout, folder = Path(sys.argv[1]), Path(sys.argv[2])
    is_emulated = "--gpus" not in sys.argv
    # Standard output for answers only; what anything prints goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _import_comfyui(checkout, is_emulated)
    import torch

    before = core_digest()
    runpy.run_path(str(HERE.parents[1] / "bootstrap.py"))["load_pack"]()
    for path in sorted(HERE.glob("split_cases_*.py")):  # they register themselves
        importlib.import_module(f"devicebridge.tests.comfy.{path.stem}")
    from devicebridge.tests.comfy.split_cases import CASES, Case, run_case
    from devicebridge.tests.comfy.split_fuzz import ground, run_history
    from devicebridge.tests.comfy.split_guards import GUARDS
    from devicebridge.tests.comfy.split_host import Host, emulated_machine, real_gpus
    from devicebridge.tests.comfy.split_prompts import faults_of, run_prompts

    def core_is_untouched(case: Case) -> None:
        changed = sorted(name for name, identity in before.items() if core_digest().get(name) != identity)
        added = sorted(set(core_digest()) - set(before))
        case.check("the same functions and attributes as before the pack came", not changed + added, changed + added)

    gc.collect()
    gc.freeze()  # cases collect garbage, and the libraries' objects are none
    if not is_emulated:  # on a GPU the very first forwards of a process take other kernels, and have other bits
        with real_gpus() as machine, torch.inference_mode():
            run_history(Host(machine, folder), 0, ground(is_emulated))
    for line in sys.stdin:
        name = json.loads(line)["case"]
        if name == "names":
            _answer(answers, {"names": sorted(CASES)})
        elif name.startswith(("history ", "tokens ")):
            kind, seed = name.split()
            with emulated_machine() if is_emulated else real_gpus() as machine, torch.inference_mode():
                host = Host(machine, folder)
                history = run_history(host, int(seed), ground(is_emulated), by_tokens=kind == "tokens")
            _answer(answers, {"verdict": history.verdict, "steps": history.steps})
        elif name.startswith("prompts "):
            _, number, seed = name.split()
            with emulated_machine() as machine, torch.inference_mode():
                found = run_prompts(Host(machine, folder), int(number), int(seed))
            _answer(answers, {**found, "faults": faults_of(found, tuple(found["after"]))})
        elif name == "core":
            case = Case(None)
            core_is_untouched(case)
            _answer(answers, {"claims": case.claims, "seconds": 0})
        else:
            name, _, without = name.partition(" without ")
            with emulated_machine() as machine, GUARDS[without]() if without else contextlib.nullcontext():
                _answer(answers, _timed(lambda: run_case(CASES[name], Host(machine, folder))))  # noqa: B023


def _import_comfyui(checkout: Path, is_emulated: bool) -> None:
    sys.path[0] = str(checkout)  # instead of this folder, whose modules would hide ComfyUI's
    import comfy.cli_args

    comfy.cli_args.args.cpu = is_emulated
    import comfy.sample  # brings the rest

    logging.getLogger().setLevel(logging.INFO)


def core_digest() -> Digest:
    """Which object each function, class and method of ComfyUI's core is."""
    digest: Digest = {}
    for name in WATCHED:
        module = importlib.import_module(f"comfy.{name}")
        for key, value in vars(module).items():
            if isinstance(value, ModuleType) or not callable(value):
                continue
            digest[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == module.__name__:
                digest |= {f"{name}.{key}.{member}": id(object_) for member, object_ in vars(value).items()}
    return digest


def _timed(run: Any) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        answer = {"claims": run()}
    except Exception:  # whatever it is, the test shows it
        answer = {"error": traceback.format_exc()}
    return {**answer, "seconds": round(time.monotonic() - begin, 2)}


def _answer(answers: TextIO, data: dict[str, Any]) -> None:
    answers.write(json.dumps(data) + "\n")


if __name__ == "__main__":
    assert isinstance(sys.stdout, io.TextIOWrapper)
    main()
