"""What bounds a training step: the time a card computes, or the time Python takes to issue it; and what threads cost.

    python benchmarks/host_time.py [--out results.json] [--scheme bf16 fp8-compute] [--layers 8 48] [--graphs] [--tiny]

Kept blocks of FLUX.2-dev with a LoRA, one micro-batch after the other, as a stage of the pack's pipeline has them. Per
scheme, uncompiled and compiled, in milliseconds per block, forward and backward:

- "host": blocks of full structure and toy width (128), whose kernels take next to no time, so that a step takes what
  the host takes to issue it. Alone on one card; on two cards at once from two threads, as the pipeline's stages are;
  from two processes. Threads over alone is the price of Python's lock, processes over alone that of the machine.
- "card": blocks of full width (--wide, few of them) at 512 pixels: seconds of a step in which the card runs kernels,
  from torch.profiler, and the step's own. What no host can beat.
- with --graphs the wide blocks once more, forwards and backwards replayed as CUDA graphs
  (torch.cuda.make_graphed_callables): the card's time without a host.

A pipeline of two equal stages takes, per micro-batch, at least the larger of: card x blocks / 2, and host (threads) x
blocks / 2. Ratios come first. --tiny runs the first part on the CPU, where "card" has no meaning: kernels of toy width
are in its figures.
"""

from __future__ import annotations

import argparse
import multiprocessing
import runpy
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.events import first_line  # noqa: E402
from devicebridge.parallel.devices import CPU, available_devices, release_cached_memory, synchronize  # noqa: E402
from devicebridge.patches.attention import sound_attention  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import SCHEMES, plan_devices  # noqa: E402
from torch import nn  # noqa: E402
from train_step import SUBJECTS, Contestant, Way, busy_seconds, in_size, make_contestant  # noqa: E402

NUM_BATCHES = 4
BLOCKS = ("uncompiled", "compiled")
_MOST_S = 300.0  # for one process to be ready or done; after it all end
Layers = tuple[int, int]


def make_stage(scheme: str, layers: Layers, device: torch.device, *, is_wide: bool, is_compiled: bool) -> Contestant:
    """Blocks that keep their activations, on one device; warm."""
    subject, config = in_size(SUBJECTS["flux2-512"], is_tiny=not is_wide)
    config |= {"num_layers": layers[0], "num_single_layers": layers[1]}
    options = argparse.Namespace(tiny=not is_wide)
    each = make_contestant(options, subject, config, plan_devices(config, [device]), scheme, usual=False)
    each.trainer.job = replace(each.job, train=replace(each.job.train, gradient_accumulation_steps=NUM_BATCHES))
    each.keep_activations([sum(layers)])
    if is_compiled:
        each.compiled = [apply_compile(each.built.model, each.built.family)]
    for _ in range(2):
        _step_s(each)
    return each


def _step_s(each: Contestant) -> float:
    """Seconds per sample of one step."""
    start = time.perf_counter()
    each.trainer.train_step(1e-5)
    synchronize(each.devices)
    return (time.perf_counter() - start) / NUM_BATCHES


def _median_s(each: Contestant, num_steps: int) -> float:
    return statistics.median(_step_s(each) for _ in range(num_steps))


# ---- the host


def measure_host(options: argparse.Namespace, scheme: str, is_compiled: bool) -> dict[str, float]:
    """Milliseconds per block: alone, and the slower of two at once from threads and from processes."""
    devices, num_blocks = options.devices, sum(options.layers)
    stages = [make_stage(scheme, options.layers, d, is_wide=False, is_compiled=is_compiled) for d in devices]
    found = {"alone": _median_s(stages[0], options.rounds)}
    with ThreadPoolExecutor(len(stages)) as threads:
        found["threads"] = max(threads.map(lambda each: _median_s(each, options.rounds), stages))
    del stages
    release_cached_memory()
    found["processes"] = max(_in_processes(scheme, options.layers, devices, is_compiled, options.rounds))
    return {name: round(1e3 * seconds / num_blocks, 3) for name, seconds in found.items()}


def _in_processes(
    scheme: str, layers: Layers, devices: Sequence[torch.device], is_compiled: bool, num_steps: int
) -> list[float]:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(len(devices), timeout=_MOST_S), context.Queue()
    processes = [
        context.Process(target=_in_a_process, args=(scheme, layers, str(each), is_compiled, num_steps, ready, results))
        for each in devices
    ]
    for process in processes:
        process.start()
    try:
        return [results.get(timeout=_MOST_S) for _ in processes]
    finally:
        for process in processes:
            process.join()


def _in_a_process(
    scheme: str, layers: Layers, device: str, is_compiled: bool, num_steps: int, ready: Any, results: Any
) -> None:
    _one_thread_on_the_cpu(torch.device(device))
    each = make_stage(scheme, layers, torch.device(device), is_wide=False, is_compiled=is_compiled)
    ready.wait()
    results.put(_median_s(each, num_steps))
    ready.wait()  # neither ends while the other still measures


def _one_thread_on_the_cpu(device: torch.device) -> None:
    """So that two at once have a core each."""
    if device.type == "cpu":
        torch.set_num_threads(1)


# ---- the card


def measure_card(options: argparse.Namespace, scheme: str, is_compiled: bool) -> dict[str, float | str]:
    """Milliseconds per block of full width: in which the card computes, a step's own, and replayed."""
    num_blocks = sum(options.wide)
    each = make_stage(scheme, options.wide, options.devices[0], is_wide=True, is_compiled=is_compiled)
    found: dict[str, float | str] = {"step": round(1e3 * _median_s(each, options.rounds) / num_blocks, 3)}
    _, busy = busy_seconds(each, Way("split, one in flight", NUM_BATCHES, compiled=is_compiled), [num_blocks])
    found["kernels"] = round(1e3 * sum(busy.values()) / num_blocks, 3)
    if options.graphs:
        try:
            found["replayed"] = round(1e3 * _replayed_s(each, options.rounds) / num_blocks, 3)
        except RuntimeError as error:  # what cannot be captured is a result, too
            found["replayed"] = first_line(error)
    return found


class _OneBlock(nn.Module):
    """A block as a function of its hidden states; everything else it is called with stays as it was once."""

    def __init__(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.block, self.rest = block, args[1:]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.block(hidden, *self.rest)
        return output[-1] if isinstance(output, tuple) else output


def _replayed_s(each: Contestant, num_steps: int) -> float:
    """Seconds of a forward and backward of all blocks, each replayed as two CUDA graphs."""
    blocks = _called_with(each)
    samples = tuple((args[0].detach().clone().requires_grad_(),) for _, args in blocks)
    modules = tuple(_OneBlock(block, args) for block, args in blocks)
    with sound_attention():
        # allowed: the last output of a double block leaves its text's last layers without a gradient
        graphed = torch.cuda.make_graphed_callables(modules, samples, allow_unused_input=True)

        def step() -> float:
            start = time.perf_counter()
            hidden = [sample[0].detach().clone().requires_grad_() for sample in samples]
            outputs = [call(each) for call, each in zip(graphed, hidden, strict=True)]
            for output in reversed(outputs):
                output.sum().backward()
            synchronize(each.devices)
            return time.perf_counter() - start

        step()
        return statistics.median(step() for _ in range(num_steps))


def _called_with(each: Contestant) -> list[tuple[nn.Module, tuple[Any, ...]]]:
    """Every block, and the positional arguments of one call of it."""
    found: dict[nn.Module, tuple[Any, ...]] = {}
    hooks = [
        block.register_forward_pre_hook(lambda module, args: found.update({module: args}))
        for block in each.built.split.bridge.blocks
    ]
    _step_s(each)
    for hook in hooks:
        hook.remove()
    return [(module, map_tensors(args, lambda tensor: tensor.detach())) for module, args in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", nargs="+", choices=SCHEMES, default=["bf16", "fp8-compute"])
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--layers", nargs=2, type=int, default=[4, 24], help="double and single blocks of toy width")
    parser.add_argument("--wide", nargs=2, type=int, default=[1, 6], help="double and single blocks of full width")
    parser.add_argument("--rounds", type=int, default=10, help="measured steps of each")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = [CPU, CPU] if options.tiny else available_devices()[:2]
    if len(options.devices) < 2:
        parser.error("this needs two GPUs; --tiny runs on the CPU")
    _one_thread_on_the_cpu(options.devices[0])
    report: dict[str, Any] = {"threads_over_alone": {}, "ms_per_block": {}}
    report |= {"layers": options.layers, "wide": options.wide, **describe_run("diffusers", "peft", "torchao", "triton")}
    for scheme in options.scheme:
        for is_compiled in [way == "compiled" for way in options.blocks]:
            key = f"{scheme}, {'compiled' if is_compiled else 'uncompiled'}"
            host = measure_host(options, scheme, is_compiled)
            say(f"{key}, host: {host}")
            card = {} if options.tiny else measure_card(options, scheme, is_compiled)
            say(f"{key}, card: {card}")
            report["threads_over_alone"][key] = round(host["threads"] / host["alone"], 2)
            report["ms_per_block"][key] = {"host": host, "card": card}
            write_json(report, options.out)
            torch._dynamo.reset()
            release_cached_memory()
    print_or_write({**report, "elapsed_s": round(elapsed_s(), 1)}, options.out)


if __name__ == "__main__":
    main()
