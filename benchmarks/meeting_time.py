"""What the host takes to have several devices compute each block together: a thread per device, or one in turns.

    python benchmarks/meeting_time.py [--family flux2 wan] [--devices cpu cpu] [--rounds 20] [--out results.json]
    ~/ComfyUI/.venv/bin/python benchmarks/meeting_time.py --family qwen comfy_flux2 --against ../before --turns 5

Models with as many blocks as the published ones and toy widths, whose kernels take next to no time: a forward takes
what the host takes to launch it. `qwen` and `comfy_...` are ComfyUI's classes and need its Python (COMFYUI_PATH names
its folder), the others are those of diffusers. A device may be named several times. On the CPU the toy kernels are in
the figures, and threads may compute at once; on one core (taskset -c 0) they cannot. Alone, in turns and with threads
alternate, forward by forward. Milliseconds per forward, the median and the least; and microseconds per meeting, of the
least: what is left of a forward beyond one alone on every device, over the number of exchanges. `cpu` is the time of
this process, which others on the machine change less. In turns and with threads must give the same bits.

What is counted of one forward in turns, of all devices: letters (what one device hands another at a meeting), copies
(tensors in them), torch's operations and Python's calls, these two beyond a forward alone on every device.

`--against FOLDER` has another checkout of the pack take turns with this one, a process for each turn, and reports the
medians over the turns of both.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import runpy
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHECKOUT = Path(sys.argv[sys.argv.index("--checkout") + 1]) if "--checkout" in sys.argv else ROOT
runpy.run_path(str(CHECKOUT / "bootstrap.py"))["load_pack"]()

import greenlet  # noqa: E402
import torch  # noqa: E402
from devicebridge.families.registry import FAMILIES  # noqa: E402
from devicebridge.headless.comfyui import find_comfyui  # noqa: E402
from devicebridge.parallel.devices import synchronize  # noqa: E402
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of  # noqa: E402
from devicebridge.parallel.local.tensor_parallel import TensorParallel  # noqa: E402
from devicebridge.parallel.placement import block_names  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from devicebridge.tests.toy import TINY  # noqa: E402
from provenance import describe_run, print_or_write, say  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

PUBLISHED: Mapping[str, dict[str, Any]] = {  # FLUX.1-dev, FLUX.2-dev, Wan 14B
    "flux1": {"num_layers": 19, "num_single_layers": 38},
    "flux2": {"num_layers": 8, "num_single_layers": 48},
    "wan": {"num_layers": 40},
}
COMFY: Mapping[str, tuple[str, dict[str, Any]]] = {  # the tiny build's name, and how it differs
    "qwen": ("QWEN", {"num_layers": 60}),
    "comfy_flux1": ("FLUX_1", {"depth": 19, "depth_single_blocks": 38}),
    "comfy_flux2": ("FLUX_2", {"depth": 8, "depth_single_blocks": 48}),
    "comfy_wan": ("WAN", {"num_layers": 40, "model_type": "t2v", "in_dim_ref_conv": None}),
}
_EXTRAS = ("control", "ref_latents", "ref_latents_method", "attention_mask", "clip_fea", "reference_latent")
_OPTIONS = {"cond_or_uncond": [0, 1], "uuids": [1, 2], "patches": {}, "patches_replace": {}, "wrappers": {}}


@dataclass(frozen=True)
class Subject:
    """A model, and one forward of it."""

    model: torch.nn.Module
    blocks: Sequence[str]
    plans: tuple[Any, ...]
    inputs: Mapping[str, Any]
    passed_by: Sequence[str] = ()

    def run(self) -> torch.Tensor:
        output = self.model(**self.inputs)
        return output if isinstance(output, torch.Tensor) else output[0]


def make_subject(name: str, device: torch.device) -> Subject:
    if name in PUBLISHED:
        model, family = TINY[name].make_model(0, **PUBLISHED[name]), FAMILIES[name]
        inputs = {**TINY[name].make_inputs(batch=1), "return_dict": False}
        subject = Subject(model, block_names(model, family), family.tensor, inputs)
    else:
        subject = _comfy_subject(name)
    inputs = map_tensors(dict(subject.inputs), lambda tensor: tensor.to(device))
    return replace(subject, model=subject.model.to(device), inputs=inputs)


def _comfy_subject(name: str) -> Subject:
    from devicebridge.families.comfy.registry import find_native
    from devicebridge.parallel.block_lists import execution_order
    from devicebridge.tests.comfy import native_cases

    build, changes = COMFY[name]
    case = getattr(native_cases, build)
    case = replace(case, config={**case.config, **changes})
    model, row = case.build(), find_native(case.model_class)
    inputs = {key: value for key, value in case.inputs().items() if key not in _EXTRAS}
    inputs["transformer_options"] = {**_OPTIONS, "sigmas": torch.tensor([0.5])}
    return Subject(model, execution_order(model, row), row.tensor, inputs, row.passed_by)


def divide(name: str, model: torch.nn.Module, devices: Sequence[torch.device]) -> tuple[TensorParallel, int]:
    """The blocks of one of diffusers' models divided among the devices, in place, and the number of meetings."""
    family = FAMILIES[name]
    return divide_blocks(model, block_names(model, family), family.tensor, devices)


def divide_blocks(
    model: torch.nn.Module,
    names: Sequence[str],
    plans: tuple[Any, ...],
    devices: Sequence[torch.device],
    passed_by: Sequence[str] = (),
) -> tuple[TensorParallel, int]:
    shards, num_meetings = {}, 0
    for block_name in names:
        block = model.get_submodule(block_name)
        plan = find_plan(plans, block)
        assert plan is not None, "a described family"
        shares = shares_of(block, plan, (1.0,) * len(devices))
        wholes = [block, *(copy.deepcopy(block) for _ in devices[1:])]
        own, *others = [
            divide_block(whole, plan, shares, rank, lambda weight, part: part.copied(weight))
            for rank, whole in enumerate(wholes)
        ]
        for shard, device in zip((own, *others), devices, strict=True):
            shard.block.to(device)
        shards[own.block] = (own, others)
        num_meetings += len(own.meetings)
    parallel = TensorParallel(devices, shards, passed_by=passed_by)
    parallel.attach()
    return parallel, num_meetings


def measure(name: str, devices: Sequence[torch.device], rounds: int) -> dict[str, Any]:
    whole = make_subject(name, devices[0])
    divided = replace(whole, model=copy.deepcopy(whole.model))
    parallel, num_meetings = divide_blocks(divided.model, whole.blocks, whole.plans, devices, whole.passed_by)
    found: dict[str, list[float]] = {"alone": [], "in_turns": [], "threads": []}
    of_process: dict[str, list[float]] = {way: [] for way in found}
    outputs: dict[str, torch.Tensor] = {}

    def run(way: str) -> None:
        parallel.in_turns = way == "in_turns"
        with torch.inference_mode():
            if way == "alone":
                outputs[way] = whole.run()
            else:
                with parallel.forward():
                    outputs[way] = divided.run()

    for index in range(rounds + 2):
        for way, seconds in found.items():
            took, computed = seconds_of(lambda way=way: run(way), devices)  # type: ignore[misc]
            if index > 1:
                seconds.append(took)
                of_process[way].append(computed)
    cpu = {way: min(seconds) for way, seconds in of_process.items()}
    least = {way: min(seconds) for way, seconds in found.items()}  # what others compute on the machine is not in it
    difference = (outputs["in_turns"] - outputs["alone"]).norm() / outputs["alone"].norm()
    beyond = {way: least[way] - len(devices) * least["alone"] for way in ("in_turns", "threads")}
    return {
        "meetings": num_meetings,
        "counted": count(parallel, run, len(devices)),
        "ms_per_forward": {way: round(1e3 * statistics.median(seconds), 2) for way, seconds in found.items()},
        "least_ms_per_forward": {way: round(1e3 * seconds, 2) for way, seconds in least.items()},
        "ms_beyond_alone": {way: round(1e3 * seconds, 2) for way, seconds in beyond.items()},
        "least_cpu_ms_per_forward": {way: round(1e3 * seconds, 2) for way, seconds in cpu.items()},
        "cpu_ms_beyond_alone": round(1e3 * (cpu["in_turns"] - len(devices) * cpu["alone"]), 2),
        "us_per_meeting": {way: round(1e6 * seconds / num_meetings, 1) for way, seconds in beyond.items()},
        "threads_over_in_turns": round(least["threads"] / least["in_turns"], 2),
        "same_bits": torch.equal(outputs["in_turns"], outputs["threads"]),
        "relative_error": float(difference),
    }


def count(parallel: TensorParallel, run: Callable[[str], None], num_devices: int) -> dict[str, int]:
    """What one forward in turns takes; see the module's docstring."""
    letters: list[int] = []
    name = next(each for each in ("send_parts", "send_part") if hasattr(parallel, each))  # as older checkouts have it
    send = getattr(parallel, name)

    def counted(sent: Any, *args: Any) -> Any:
        letters.append(1 if isinstance(sent, torch.Tensor) else len(sent))
        return send(sent, *args)

    setattr(parallel, name, counted)
    try:
        run("in_turns")
    finally:
        delattr(parallel, name)
    found = {"letters": len(letters), "copies": sum(letters)}
    for what, counting in (("operations", _operations), ("python_calls", _python_calls)):
        numbers = {}
        for way in ("alone", "in_turns"):
            with counting() as counts:
                run(way)
            numbers[way] = counts.total()
        found[f"{what}_beyond_alone"] = numbers["in_turns"] - num_devices * numbers["alone"]
    return found


@contextmanager
def _operations() -> Iterator[collections.Counter[str]]:
    counts: collections.Counter[str] = collections.Counter()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Counted():
        yield counts


@contextmanager
def _python_calls() -> Iterator[collections.Counter[str]]:
    """Calls of functions that are written in Python and in C, by this thread, whichever device it computes for."""
    counts: collections.Counter[str] = collections.Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        counts[event] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield counts
    finally:
        sys.setprofile(before)


def seconds_of(work: Callable[[], None], devices: Sequence[torch.device]) -> tuple[float, float]:
    """On the clock, and of this process."""
    start, computed = time.perf_counter(), time.process_time()
    work()
    synchronize(devices)
    return time.perf_counter() - start, time.process_time() - computed


def round_trip_us(start: Callable[[int], Callable[[], object]], number: int = 2000) -> float:
    """To hand something to somebody else and get it back."""
    there_and_back = start(number)
    begin = time.perf_counter()
    for _ in range(number):
        there_and_back()
    return 1e6 * (time.perf_counter() - begin) / number


def _threads(number: int) -> Callable[[], object]:
    there: SimpleQueue[int] = SimpleQueue()
    back: SimpleQueue[int] = SimpleQueue()

    def other() -> None:
        for _ in range(number):
            back.put(there.get())

    threading.Thread(target=other, daemon=True).start()
    return lambda: (there.put(0), back.get())


def _turns(number: int) -> Callable[[], object]:
    home = greenlet.getcurrent()

    def other() -> None:
        while True:
            home.switch()

    return greenlet.greenlet(other).switch


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both checkouts in turns, a process for each turn: the medians over the turns."""
    checkouts = {"before": options.against.resolve(), "now": ROOT}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for turn in range(options.turns):
        for name, folder in checkouts.items():
            with tempfile.TemporaryDirectory() as place:
                out = Path(place) / "turn.json"
                command = [sys.executable, __file__, "--checkout", str(folder), "--out", str(out)]
                command += ["--family", *options.family, "--devices", *options.devices]
                subprocess.run([*command, "--rounds", str(options.rounds)], check=True)
                turns[name].append(json.loads(out.read_text(encoding="utf-8")))
        say(f"turn {turn + 1} of {options.turns}")
    return {
        family: {name: _median([each[family] for each in found]) for name, found in turns.items()}
        for family in options.family
    }


def _median(values: Sequence[Any]) -> Any:
    """Of numbers; of dicts each entry's."""
    if isinstance(values[0], dict):
        return {key: _median([value[key] for value in values]) for key in values[0]}
    return all(values) if isinstance(values[0], bool) else round(statistics.median(values), 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=list(PUBLISHED), choices=[*PUBLISHED, *COMFY])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--against", type=Path, help="another checkout of the pack, which takes turns with this one")
    parser.add_argument("--turns", type=int, default=5, help="of each checkout")
    parser.add_argument("--checkout", type=Path, help="measure the pack of this folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = [torch.device(name) for name in options.devices]
    report: dict[str, Any] = {"setup": describe_run("greenlet"), "devices": options.devices}
    if options.against is not None:
        print_or_write(report | compare(options), options.out)
        return
    if set(options.family) & set(COMFY):
        sys.path.insert(0, str(find_comfyui().folder))
        sys.argv = sys.argv[:1]
        from comfy.cli_args import args

        args.cpu = devices[0].type == "cpu"
    torch.set_num_threads(1)  # toy products are no work to share out
    report["round_trip_us"] = {
        "threads": round(round_trip_us(_threads), 1),
        "greenlets": round(round_trip_us(_turns), 1),
    }
    for name in options.family:
        report[name] = measure(name, devices, options.rounds)
        say(f"{name}: {report[name]}")
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
