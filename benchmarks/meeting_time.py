"""What the host takes to have several devices compute each block together: a thread per device, or one in turns.

    python benchmarks/meeting_time.py [--family flux2 wan] [--devices cpu cpu] [--rounds 20] [--out results.json]

Models with as many blocks as the published ones and toy widths, whose kernels take next to no time: a forward takes
what the host takes to launch it. A device may be named several times. On the CPU the toy kernels are in the figures,
and threads may compute at once; on one core (taskset -c 0) they cannot. Alone, in turns and with threads alternate,
forward by forward. Milliseconds per forward, the median and the least; and microseconds per meeting, of the least: what
is left of a forward beyond one alone on every device, over the number of exchanges. In turns and with threads must give
the same bits.
"""

from __future__ import annotations

import argparse
import copy
import runpy
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import greenlet  # noqa: E402
import torch  # noqa: E402
from devicebridge.families.registry import FAMILIES  # noqa: E402
from devicebridge.parallel.devices import synchronize  # noqa: E402
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of  # noqa: E402
from devicebridge.parallel.local.tensor_parallel import TensorParallel  # noqa: E402
from devicebridge.parallel.placement import block_names  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from devicebridge.tests.toy import TINY  # noqa: E402
from provenance import describe_run, print_or_write, say  # noqa: E402

PUBLISHED: Mapping[str, dict[str, Any]] = {  # FLUX.1-dev, FLUX.2-dev, Wan 14B
    "flux1": {"num_layers": 19, "num_single_layers": 38},
    "flux2": {"num_layers": 8, "num_single_layers": 48},
    "wan": {"num_layers": 40},
}


def divide(name: str, model: torch.nn.Module, devices: Sequence[torch.device]) -> tuple[TensorParallel, int]:
    """The model's blocks divided among the devices, in place, and the number of meetings of one forward."""
    family, shards, num_meetings = FAMILIES[name], {}, 0
    for block_name in block_names(model, family):
        block = model.get_submodule(block_name)
        plan = find_plan(family.tensor, block)
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
    parallel = TensorParallel(devices, shards)
    parallel.attach()
    return parallel, num_meetings


def measure(name: str, devices: Sequence[torch.device], rounds: int) -> dict[str, Any]:
    whole = TINY[name].make_model(0, **PUBLISHED[name]).to(devices[0])
    divided = copy.deepcopy(whole)
    parallel, num_meetings = divide(name, divided, devices)
    inputs = map_tensors(TINY[name].make_inputs(batch=1), lambda tensor: tensor.to(devices[0]))
    found: dict[str, list[float]] = {"alone": [], "in_turns": [], "threads": []}
    outputs: dict[str, torch.Tensor] = {}

    def run(way: str) -> None:
        parallel.in_turns = way == "in_turns"
        with torch.inference_mode():
            if way == "alone":
                outputs[way] = whole(**inputs, return_dict=False)[0]
            else:
                with parallel.forward():
                    outputs[way] = divided(**inputs, return_dict=False)[0]

    for index in range(rounds + 2):
        for way, seconds in found.items():
            took = seconds_of(lambda way=way: run(way), devices)  # type: ignore[misc]
            seconds += [took] if index > 1 else []
    least = {way: min(seconds) for way, seconds in found.items()}  # what others compute on the machine is not in it
    difference = (outputs["in_turns"] - outputs["alone"]).norm() / outputs["alone"].norm()
    return {
        "meetings": num_meetings,
        "ms_per_forward": {way: round(1e3 * statistics.median(seconds), 2) for way, seconds in found.items()},
        "least_ms_per_forward": {way: round(1e3 * seconds, 2) for way, seconds in least.items()},
        "us_per_meeting": {
            way: round(1e6 * (least[way] - len(devices) * least["alone"]) / num_meetings, 1)
            for way in ("in_turns", "threads")
        },
        "threads_over_in_turns": round(least["threads"] / least["in_turns"], 2),
        "same_bits": torch.equal(outputs["in_turns"], outputs["threads"]),
        "relative_error": float(difference),
    }


def seconds_of(work: Callable[[], None], devices: Sequence[torch.device]) -> float:
    start = time.perf_counter()
    work()
    synchronize(devices)
    return time.perf_counter() - start


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", default=list(PUBLISHED), choices=list(PUBLISHED))
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    devices = [torch.device(name) for name in options.devices]
    torch.set_num_threads(1)  # toy products are no work to share out
    report: dict[str, Any] = {"setup": describe_run("greenlet"), "devices": options.devices}
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
