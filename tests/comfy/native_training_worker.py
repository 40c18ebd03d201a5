"""One process with ComfyUI's Python: trains tiny models of ComfyUI's own classes; run by test_native_training.py.

Takes ComfyUI's folder, a folder for files, and names of trained_families.TRAINED and other_families.ROWS, or none for
all. "derived NAME" is such a model of a class whose tokens nobody described, trained by tokens alone. Prints a line of
JSON per name: {"name", "class", "seconds", "steps": {step: {"fault": "" or why not, figures}}}, or {"name", "missing":
class of comfy.supported_models}.
"""

import gc
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.supported_models
from devicebridge.families.comfy import token_plans
from devicebridge.families.comfy.token_plans import plan_of
from devicebridge.nodes.host.split.examine import examine
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import STEPS, Bench, one_line, prove, steps_of
from devicebridge.tests.comfy.other_families import BUILDS, other_sizes
from devicebridge.tests.comfy.tiny_checkpoints import small_sizes
from devicebridge.tests.comfy.trained_families import save_trained, small_adapter

FOLDER, *NAMES = sys.argv[2:]


def derived(name: str) -> dict[str, Any]:
    folder, kept = Path(FOLDER) / f"derived-{name.replace('/', '-')}", {"DEVICEBRIDGE_CACHE": f"{FOLDER}/kept"}
    with (
        small_adapter(), endless_memory(), other_sizes(), mock.patch.dict("os.environ", kept),
        mock.patch.dict(token_plans.TOKEN_PLANS, clear=True),
    ):  # fmt: skip
        file = save_trained(name, folder.with_suffix(".safetensors"), BUILDS[name])
        with small_sizes(BUILDS[name]):
            said = examine(file)
        bench = Bench(name, folder, file=file, family=BUILDS[name])
        assert plan_of(bench.info.family.native) is not None, said
        found = prove(name, {"tokens": STEPS["tokens"]}, bench)
    return {"name": f"derived {name}", "class": bench.info.family.transformer_class, "steps": found, "said": said}


def proved(name: str) -> dict[str, Any]:
    if not hasattr(comfy.supported_models, BUILDS[name].config_class):
        return {"name": name, "missing": BUILDS[name].config_class}
    begin = time.process_time()
    with small_adapter(), endless_memory(), other_sizes():
        try:
            bench = Bench(name, Path(FOLDER) / name.replace("/", "-"), family=BUILDS[name])
        except Exception as error:
            return {"name": name, "class": "", "seconds": 0.0, "steps": {s: {"fault": one_line(error)} for s in STEPS}}
        found = prove(name, steps_of(name), bench)
    seconds = round(time.process_time() - begin, 1)
    return {"name": name, "class": bench.info.family.transformer_class, "seconds": seconds, "steps": found}


if __name__ == "__main__":
    gc.freeze()  # jobs collect garbage often, and the libraries' objects are none
    warnings.simplefilter("ignore")
    for each in NAMES or BUILDS:
        of_class = each.removeprefix("derived ")
        print(json.dumps(proved(each) if of_class == each else derived(of_class)), flush=True)
