"""One rank of several, with ComfyUI's Python: tiny models of ComfyUI's own classes, whose weights the ranks share.

torchrun ... native_ranks_worker.py COMFYUI FOLDER STRATEGY NAMES, and in STEPS of the environment which steps, "" for
all. The first rank prints a line of JSON per name of
other_families.BUILDS: {"name", "steps": {step: {"fault": "" or why not, figures}}}. Every step is compared with one
process that has the whole model.
"""

import gc
import json
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

CHECKOUT, FOLDER, STRATEGY, *NAMES = sys.argv[1:]
sys.path[0] = CHECKOUT
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.parallel.devices import CPU  # noqa: E402
from devicebridge.parallel.ranks.group import Ranks, joined  # noqa: E402
from devicebridge.parallel.ranks.place import find_place  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile  # noqa: E402
from devicebridge.patches.lora import is_lora_name  # noqa: E402
from devicebridge.quantization.frozen_linear import FrozenLinear8  # noqa: E402
from devicebridge.tests.comfy.native_forwards import endless_memory  # noqa: E402
from devicebridge.tests.comfy.native_steps import (  # noqa: E402
    TWO,
    Bench,
    Figures,
    difference,
    expect,
    gradients,
    one_line,
    prove,
)
from devicebridge.tests.comfy.other_families import BUILDS, other_sizes  # noqa: E402
from devicebridge.tests.comfy.trained_families import small_adapter  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

SHARED: dict[str, Any] = {"train": TWO, "parallel": {"strategy": STRATEGY}}


def refuse_whole(trainer: Trainer) -> None:
    for name, each in trainer.runner.replica_for(0)[0].named_parameters():
        assert isinstance(each, DTensor) != is_lora_name(name), f"{name} is a {type(each).__name__}"


def same_as(found: Any, wanted: Any) -> Figures:
    expect(abs(found[0] / wanted[0] - 1), 1e-5, "the difference of the loss")
    return {"difference": expect(difference(found[1], wanted[1]), 1e-4, "the difference of the gradients")}


def shared(bench: Bench, ranks: Ranks) -> Figures:
    return same_as(bench.first_step("shared", SHARED, refuse_whole, ranks), bench.accumulated)


def in_8_bits(scheme: str) -> Callable[[Bench, Ranks], Figures]:
    def check(trainer: Trainer) -> None:
        refuse_whole(trainer)
        modules = trainer.runner.replica_for(0)[0].modules()
        assert any(isinstance(each, FrozenLinear8) for each in modules), "no linear is in 8 bits"

    def step(bench: Bench, ranks: Ranks) -> Figures:
        asked = {"model": {"quantize": scheme}}
        wanted = bench.first_step(f"{scheme} alone", {"train": TWO, **asked})
        return same_as(bench.first_step(scheme, {**SHARED, **asked}, check, ranks), wanted)

    return step


def compiled(bench: Bench, ranks: Ranks) -> Figures:
    """Blocks as torch's compiler traces and differentiates them; gathering stays around them."""
    torch._dynamo.reset()
    with bench.trainer("compiled", SHARED, ranks) as trainer, ExitStack() as cleanup:
        model = trainer.runner.replica_for(0)[0]
        handle = apply_compile(model, bench.info.family, is_dynamic=False, backend="aot_eager")
        cleanup.callback(handle.remove)
        loss = sum(float(each) for each in trainer.accumulate(2))
        found, num_graphs = gradients(trainer), handle.num_graphs
        assert num_graphs, "nothing is compiled"
        list(trainer.accumulate(2))
        assert handle.num_graphs == num_graphs, f"{handle.num_graphs - num_graphs} graphs more in the second step"
    wanted = bench.accumulated
    return same_as((loss, {name: each for name, each in found.items() if name in wanted[1] or each.any()}), wanted)


def resumed(bench: Bench, ranks: Ranks) -> Figures:
    train, seen = {"train": {"steps": 3, **TWO}}, []
    wanted = bench.run("alone", train).losses

    def count(event: Any) -> None:
        seen.append(event.kind)

    sections = {**SHARED, **train}
    stopped = bench.run("job", sections, on_event=count, should_stop=lambda: "step" in seen, ranks=ranks)
    assert (stopped.status, stopped.step) == ("stopped", 1), f"{stopped.status} after step {stopped.step}"
    losses = bench.run("job", sections, resume=True, ranks=ranks).losses
    worst = max(abs(found / loss - 1) for found, loss in zip(losses, wanted, strict=True))
    return {"steps": len(losses), "difference": expect(worst, 1e-5, "the difference of the losses")}


STEPS: dict[str, Callable[[Bench, Ranks], Figures]] = {
    "shared": shared, "int8-compute": in_8_bits("int8-compute"), "fp8-compute": in_8_bits("fp8-compute"),
    "compiled": compiled, "resumed": resumed,
}  # fmt: skip


def proved(name: str, ranks: Ranks) -> dict[str, Figures]:
    if not hasattr(comfy.supported_models, BUILDS[name].config_class):
        return {}
    with small_adapter(), endless_memory(), other_sizes():
        folder = Path(FOLDER) / str(ranks.place.rank) / name.replace("/", "-")
        steps = {step: (lambda bench, run=run: run(bench, ranks)) for step, run in STEPS.items()}
        try:
            found = prove(name, steps, Bench(name, folder, family=BUILDS[name]))
        except Exception as error:
            found = {step: {"fault": one_line(error)} for step in STEPS}  # no model was made
    told = ranks.gather(found)
    return {step: next((each[step] for each in told if each[step]["fault"]), found[step]) for step in STEPS}


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()
    warnings.simplefilter("ignore")
    place = find_place()
    assert place is not None
    wanted = os.environ.get("STEPS", "")
    STEPS = {step: run for step, run in STEPS.items() if not wanted or step in wanted}
    with joined(place, (CPU,), 600.0, lambda: False) as ranks:
        for each in NAMES or BUILDS:
            found = proved(each, ranks)
            if ranks.is_first:
                print(json.dumps({"name": each, "steps": found}), flush=True)
