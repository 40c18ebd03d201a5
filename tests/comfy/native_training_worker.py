"""One process with ComfyUI's Python: trains tiny models of ComfyUI's own classes; run by test_native_training.py.

Takes ComfyUI's folder, a folder for files, and names of trained_families.TRAINED and other_families.ROWS, or none for
all. "derived NAME" is such a model of a class whose tokens nobody described, trained by tokens alone. Prints a line of
JSON per name: {"name", "class", "seconds", "steps": {step: {"fault": "" or why not, figures}}}, or {"name", "missing":
class of comfy.supported_models}.
"""

import dataclasses
import gc
import json
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.model_base
import comfy.model_detection
import comfy.supported_models
from devicebridge.families.comfy import registry
from devicebridge.nodes.host.native.source import read_native
from devicebridge.nodes.host.split.examine import examine
from devicebridge.tests.comfy.cases import refusal
from devicebridge.tests.comfy.derived_classes import UNSEEN
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import STEPS, Bench, one_line, prove, steps_of
from devicebridge.tests.comfy.other_families import BUILDS, other_sizes
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, small_sizes
from devicebridge.tests.comfy.trained_families import save_trained, small_adapter

# Of written rows all steps are proved; these are what depends on where blocks and tokens are.
_AS_FLUX = dataclasses.replace(FAMILIES["flux1"], is_detected=False, is_calm=True)
DERIVED = ("gradients", "split", "pipeline", "tokens", "stock LoRA")
FOLDER, *NAMES = sys.argv[2:]


def derived(name: str) -> dict[str, Any]:
    folder, kept = Path(FOLDER) / f"derived-{name.replace('/', '-')}", {"DEVICEBRIDGE_CACHE": f"{FOLDER}/kept"}
    family, unseen = BUILDS.get(name, _AS_FLUX), UNSEEN.get(name)
    # A class that nobody has seen stands in the place of FLUX.1's.
    made = comfy.model_base.ModelType.FLUX, None, lambda **config: unseen(channels=16, text=48)
    in_its_place = (
        mock.patch.object(comfy.model_base.Flux.__init__, "__defaults__", made),
        mock.patch.object(comfy.model_detection, "detect_unet_config", lambda *names, **more: {}),
    )
    with (
        small_adapter(), endless_memory(), other_sizes(), mock.patch.dict("os.environ", kept), ExitStack() as stack,
        mock.patch.dict(registry._BY_CLASS, clear=True),
    ):  # fmt: skip
        for each in in_its_place if unseen else ():
            stack.enter_context(each)
        file = save_trained(name, folder.with_suffix(".safetensors"), family)
        with small_sizes(family):
            before = refusal(lambda: read_native(file, "float32"))
            said = examine(file)
        bench = Bench(name, folder, file=file, family=family)
        found = prove(name, {step: STEPS[step] for step in DERIVED}, bench)
    return {"name": f"derived {name}", "class": bench.info.family.transformer_class, "steps": found, "said": said} | {
        "before": before, "tail": bench.info.family.native.tail,
    }  # fmt: skip


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
