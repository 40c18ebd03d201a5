"""FSDP and data parallel of this pack beside torch's own FSDP2 by itself, on the same model and the same cards.

    torchrun --nproc-per-node 2 benchmarks/ranks.py CHECKPOINT [--modes data,fsdp,fsdp_fp8,plain_fsdp] [--size 512]
    torchrun --nproc-per-node 2 benchmarks/ranks.py --layers 8 48   random weights, no file
    torchrun --nproc-per-node 2 benchmarks/ranks.py --tiny          on CPUs, to see that it runs
    torchrun --nproc-per-node 4 benchmarks/ranks.py --middle        host memory while loading a file of 1.5 GB, on CPUs
    torchrun --nproc-per-node 2 benchmarks/ranks.py --layers 1 1 --modes links      bandwidth, for `plan --link`
    python benchmarks/ranks.py --one-card --out ranks.json          what one card can show, in six minutes
    python benchmarks/ranks.py --cards 2 --out ranks.json           how much faster two cards are than one; below

--cards measures one card in one process, and then so many with a process each, on the same model and the same samples
of a step. It begins with the ratios: how many times faster than one card, and the length of the first step's gradient
beside that of one card, which says whether both compute the same. Then come seconds per step and GB of the fullest
card. A mode that fails is told and left out. --budget-s (230) ends it; with --tiny it runs on CPUs.

"plain" modes are diffusers, PEFT and `fully_shard` and nothing of ours, with the same LoRA and sizes; "alone" is our
one process without ranks. One line of JSON per mode from the first rank: seconds per step and sample, GB of each card
at its peak, MB of each process's own host memory (files that are mapped left out) at its peak while loading, and of the
first step the loss and the length of the gradient. Modes of ours have the same weights, so these two tell whether they
agree.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).resolve().parents[1] / "bootstrap.py"))["load_pack"]()

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from devicebridge.assembly import (  # noqa: E402
    ExecutionPlan,
    assemble_for_training,
    assemble_sharded,
)
from devicebridge.checkpoints.checkpoint import read_checkpoint  # noqa: E402
from devicebridge.checkpoints.load import make_empty_transformer  # noqa: E402
from devicebridge.config.job import LoraSettings  # noqa: E402
from devicebridge.parallel.devices import CPU, available_devices, memory_in_use, reset_peaks  # noqa: E402
from devicebridge.parallel.placement import Placement, block_names  # noqa: E402
from devicebridge.parallel.ranks.group import AcrossRanks, joined  # noqa: E402
from devicebridge.parallel.ranks.place import find_place  # noqa: E402
from devicebridge.parallel.runner import MicroBatch, Runner  # noqa: E402
from devicebridge.patches.attention import sound_attention  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings  # noqa: E402
from devicebridge.system.processes import start  # noqa: E402
from devicebridge.tests.tiny_pipeline import save_tiny_pipeline  # noqa: E402
from devicebridge.training.adapter import apply_lora  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_checkpoint import write_diffusers_folder  # noqa: E402
from random_job import FAMILY, make_config  # noqa: E402
from random_reader import random_weights, write_header  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

# Strategy and scheme; with "compile" and "keep" in the name blocks are compiled, and keep their activations.
MODES = {
    "alone": ("none", None),
    "alone_compile": ("none", None),
    "alone_fp8": ("none", "fp8-compute"),
    "alone_fp8_compile": ("none", "fp8-compute"),
    "data": ("none", None),
    "data_compile": ("none", None),
    "data_fp8": ("none", "fp8-compute"),
    "data_fp8_compile": ("none", "fp8-compute"),
    "data_int8": ("none", "int8-compute"),
    "fsdp": ("fsdp", None),
    "fsdp_keep": ("fsdp", None),
    "fsdp_compile": ("fsdp", None),
    "fsdp_fp8": ("fsdp", "fp8-compute"),
    "fsdp_fp8_compile": ("fsdp", "fp8-compute"),
    "fsdp_fp8_keep_compile": ("fsdp", "fp8-compute"),
    "fsdp_int8": ("fsdp", "int8-compute"),
}
PLAIN = ("plain_fsdp", "plain_fsdp_compile", "plain_fsdp_keep", "plain_fsdp_keep_compile")
MIDDLE = make_config((2, 8), num_attention_heads=16)  # a third as wide
HALF = (4, 24)  # of FLUX.2-dev's 8 double and 48 single blocks
# What one card can show: processes, double and single blocks, backend, modes. The most telling come first.
ON_ONE_CARD = (
    (
        1,
        HALF,
        "nccl",
        "alone_fp8,fsdp_fp8,fsdp_fp8_compile,alone_fp8_compile,fsdp,alone,plain_fsdp,fsdp_compile,plain_fsdp_compile",
    ),
    (2, (1, 3), "gloo", "links,data_fp8,fsdp_fp8,fsdp,data"),
)
# What several cards are compared by; compiled modes take as long as all others.
ON_CARDS = "alone,data,fsdp,plain_fsdp,alone_fp8,data_fp8,fsdp_fp8,alone_fp8_compile,data_fp8_compile,fsdp_fp8_compile"
IN_FRONT = ("times_faster_than_one_card", "gradient_over_one_cards", "s_per_step", "peak_gb")
_LAST_S = 75.0  # of the budget, kept for what comes after the first part
Part = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--layers", type=int, nargs=2, help="random weights, and so many double and single blocks")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one-card", action="store_true")
    parser.add_argument("--middle", action="store_true", help="a file of a smaller model, which is only loaded")
    parser.add_argument("--cards", type=int, default=0, help="compare so many cards with one")
    parser.add_argument("--modes", default="", help=f"{', '.join([*MODES, *PLAIN])}, links; left out: all that fit")
    parser.add_argument("--backend", default="", help="gloo lets several processes share a card")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--samples", type=int, default=0, help="of a step, by all cards; left out: one for each card")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--budget-s", type=float, default=0.0, help="of --one-card (360) and of --cards (230)")
    parser.add_argument("--out", type=Path, help="of --one-card and of --cards")
    options = parser.parse_args()
    if options.one_card or options.cards:
        _measure_parts(options, _parts_of_one_card(options) if options.one_card else _parts_of_cards(parser, options))
    else:
        _measure_here(options)


# ---- this very script, started once per part


def _parts_of_one_card(options: argparse.Namespace) -> list[Part]:
    keys = ("processes", "layers", "backend", "modes")
    options.budget_s = options.budget_s or 360.0
    return [dict(zip(keys, part, strict=True)) for part in ON_ONE_CARD]


def _parts_of_cards(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Part]:
    """One process, then one per card, with the same samples of a step; compiled modes come last."""
    found = len(available_devices())
    if found < options.cards and not options.tiny:
        parser.error(f"--cards {options.cards}: this machine has {found}; --tiny runs on CPUs")
    options.samples, options.budget_s = options.samples or options.cards, options.budget_s or 230.0
    asked = (options.modes or ON_CARDS).split(",")
    layers, parts = tuple(options.layers or HALF), list[Part]()
    for is_compiled in (False, True):
        modes = [mode for mode in asked if ("compile" in mode) == is_compiled]
        alone = [mode for mode in modes if mode.startswith("alone")]
        others = [mode for mode in modes if mode not in (*alone, "links")]
        others = ["links", *others] if others and not is_compiled else others
        parts += [_part(1, layers, alone), _part(options.cards, layers, others)]
    return [part for part in parts if part["modes"]]


def _part(count: int, layers: tuple[int, ...], modes: list[str]) -> Part:
    return {"processes": count, "layers": layers, "backend": "nccl", "modes": ",".join(modes)}


def _measure_parts(options: argparse.Namespace, parts: list[Part]) -> None:
    report: dict[str, Any] = {key: {} for key in IN_FRONT if options.cards}
    report |= {**describe_run("diffusers", "peft"), "size": options.size, "samples": options.samples}
    report |= {"is_tiny": options.tiny, "parts": []}
    for index, part in enumerate(parts):
        kept = _LAST_S if options.one_card and index + 1 < len(parts) else 0.0
        part["backend"] = "gloo" if options.tiny else part["backend"]
        report["parts"].append(part)
        part["runs"], part["rows"] = [], {}
        left = part.pop("modes").split(",")
        while left and options.budget_s - elapsed_s() - kept > 0:
            found = _run_part(options, part, ",".join(left), options.budget_s - elapsed_s() - kept)
            rows = found.pop("modes")
            part["rows"] |= rows
            part["runs"].append(found)
            left = [mode for mode in left if mode not in part["rows"]]
            if found["exit_code"] is None:
                break
            if left and not rows:  # nobody could tell
                part["rows"][left.pop(0)] = {"error": f"exit code {found['exit_code']}, see runs"}
        part["modes"] = part.pop("rows")
        part["left_out"] = left
        if options.cards:
            _set_beside_one_card(report)
        write_json(report, options.out)
    print_or_write(report, options.out)


def _set_beside_one_card(report: dict[str, Any]) -> None:
    """Ratios of what there is so far. The model of a plain mode has other weights, and no gradient to compare."""
    rows = {mode: row for part in report["parts"] for mode, row in part["modes"].items() if "s_per_step" in row}
    for mode, row in rows.items():
        report["s_per_step"][mode], report["peak_gb"][mode] = row["s_per_step"], max(row["peak_gb"], default=None)
        one = rows.get("_".join(["alone", *(word for word in ("fp8", "int8", "keep", "compile") if word in mode)]))
        if one is None or mode.startswith("alone"):
            continue
        report["times_faster_than_one_card"][mode] = round(one["s_per_step"] / row["s_per_step"], 3)
        if mode not in PLAIN:
            report["gradient_over_one_cards"][mode] = round(row["first_gradient"] / one["first_gradient"], 6)


def _run_part(options: argparse.Namespace, part: Part, modes: str, left_s: float) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(part["processes"]), str(Path(__file__).resolve()), "--modes", modes]
    command += ["--size", str(options.size), "--steps", str(options.steps), "--rank", str(options.rank)]
    command += ["--samples", str(options.samples)]
    command += ["--tiny"] if options.tiny else ["--layers", *map(str, part["layers"]), "--backend", part["backend"]]
    found: dict[str, Any] = {"modes": {}}
    said: list[str] = []

    def hear(line: str) -> None:
        if line.startswith('{"mode"'):
            row = json.loads(line)
            found["modes"].setdefault(row.pop("mode"), row)  # others of the ranks may tell what followed
            say(line)
        else:
            said.append(line)

    with tempfile.TemporaryFile("w+") as log, start(command, output=log, stop_timeout_s=5.0) as running:
        while running.exit_code is None and left_s > 0:
            time.sleep(1.0)
            left_s -= 1.0
        found["exit_code"] = running.exit_code  # None: it was stopped, for the time was spent
        running.stop()
        log.seek(0)
        for line in log:
            hear(line.rstrip("\n"))
    if found["exit_code"]:
        found["said"] = said[-40:]
    return found


# ---- one rank


def _measure_here(options: argparse.Namespace) -> None:
    place = find_place()
    assert place is not None, "start it with torchrun"
    cards = [CPU] if options.tiny or options.middle else available_devices() or [CPU]
    device = cards[place.local_rank % len(cards)]
    if options.backend:
        dist.Backend.default_device_backend_map[device.type] = options.backend
    with joined(place, (device,), 1800.0, lambda: False) as ranks, tempfile.TemporaryDirectory() as name:
        with ExitStack() as stack:
            if options.tiny:
                folder = ranks.from_first(lambda: str(save_tiny_pipeline(Path(name) / "model", "flux2")))
                options.checkpoint, options.size, options.rank = folder, 64, 4
            elif options.middle:
                options.checkpoint = ranks.from_first(lambda: _write_middle(Path(name)))
                options.rank = 4
            elif options.layers:
                options.checkpoint = name
                write_header(Path(name), FAMILY, make_config(tuple(options.layers)))
                stack.enter_context(random_weights(read_checkpoint(name)))
            stack.enter_context(sound_attention())  # torch keeps cuDNN's plans of one mode for the next
            for mode in (options.modes or ",".join([*MODES, *PLAIN])).split(","):
                _attempt(mode, options, ranks, device)
        ranks.wait()


def _write_middle(folder: Path) -> str:
    write_diffusers_folder(folder, FAMILY, MIDDLE)
    return str(folder)


def _attempt(mode: str, options: argparse.Namespace, ranks: Any, device: torch.device) -> None:
    """A mode that fails is told. Of one process the next one comes; several would wait for each other, and end."""
    try:
        (_measure_links if mode == "links" else _measure)(mode, options, ranks, device)
    except Exception as error:
        print(json.dumps({"mode": mode, "error": f"{type(error).__name__}: {error}"[:2000]}), flush=True)
        if ranks.count > 1:
            raise
        traceback.print_exc()
    gc.collect()
    torch._dynamo.reset()
    if device != CPU:
        torch.accelerator.empty_cache()


def _measure(mode: str, options: argparse.Namespace, ranks: Any, device: torch.device) -> None:
    reset_peaks([device])
    started = time.perf_counter()
    dtype = torch.float32 if device == CPU and not options.middle else torch.bfloat16
    make = _plain if mode in PLAIN else _ours
    with _host_peak() as host_mb:
        model, parameters, step = make(mode, read_checkpoint(options.checkpoint), options, ranks, device, dtype)
    loaded = time.perf_counter()
    if options.middle:
        held = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
        told = {"mode": mode, "held_mb": ranks.gather(round(sum(each.nbytes for each in held) / 1e6))}
        told |= {"host_mb_while_loading": ranks.gather(round(host_mb[0]))}
        if ranks.is_first:
            print(json.dumps(told), flush=True)
        return
    optimizer = torch.optim.AdamW(parameters, lr=1e-5)  # as jobs make it
    first: list[float] = []

    def whole() -> None:
        loss = step()
        if not first:
            norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
            first.extend((float(loss), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
        optimizer.step()
        optimizer.zero_grad()

    seconds = _timed(whole, options.steps, device)
    memory = ranks.gather(memory_in_use([device]))
    told = {
        "mode": mode,
        "s_per_step": round(seconds, 4),
        "s_per_sample": round(seconds / _num_samples(mode, options, ranks), 4),
        "peak_gb": [round(values["peak"], 2) for each in memory for values in each.values()],
        "host_mb_while_loading": ranks.gather(round(host_mb[0])),
        "load_s": round(loaded - started, 1),
        "whole_s": round(time.perf_counter() - started, 1),
        "first_loss": first[0],
        "first_gradient": first[1],
    }
    if ranks.is_first:
        print(json.dumps(told), flush=True)


def _measure_links(mode: str, options: argparse.Namespace, ranks: Any, device: torch.device) -> None:
    """Bytes per second through the slowest link of a ring."""
    share = torch.ones(2**20 if options.tiny else 2**27, dtype=torch.bfloat16, device=device)
    whole, gradients = share.new_empty(ranks.count * len(share)), share.float()
    gather_s = _timed(lambda: dist.all_gather_into_tensor(whole, share), options.steps, device)
    reduce_s = _timed(lambda: dist.all_reduce(gradients), options.steps, device)
    passed = (ranks.count - 1) / ranks.count
    speeds = whole.nbytes * passed / gather_s, 2 * gradients.nbytes * passed / reduce_s
    told = {"mode": mode, "all_gather_gb_per_s": speeds[0] / 1e9, "all_reduce_gb_per_s": speeds[1] / 1e9}
    if ranks.is_first:
        print(json.dumps(told), flush=True)


def _num_samples(mode: str, options: argparse.Namespace, ranks: Any) -> int:
    """Of a step, by all ranks."""
    return options.samples or (1 if mode.startswith("alone") else ranks.count)


@contextmanager
def _host_peak() -> Iterator[list[float]]:
    """Inside, a thread looks at this process's own memory; afterwards MB that it rose by, at most."""
    before, found, is_over = _own_mb(), [0.0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            found[0] = max(found[0], _own_mb() - before)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def _own_mb() -> float:
    """Of this process alone: what the system could not give to others by dropping pages of files."""
    rollup = Path("/proc/self/smaps_rollup")
    for line in rollup.read_text(encoding="ascii").splitlines() if rollup.exists() else ():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024 / 1e6
    found = psutil.Process().memory_info()
    return (found.rss - getattr(found, "shared", 0)) / 1e6


def _timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    times = []
    for index in range(count + 2):
        start = time.perf_counter()
        step()
        if device != CPU:
            torch.accelerator.synchronize(device)
        if index > 1:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _loss(model: nn.Module, info: Any, size: int, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    channels, side = info.config.get("in_channels", 128), size // 16
    tokens, width = side * side, info.config["joint_attention_dim"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    output = model(
        hidden_states=draw(1, tokens, channels),
        encoder_hidden_states=draw(1, 512 if size > 64 else 8, width),
        timestep=torch.full((1,), 0.5, device=device, dtype=dtype),
        guidance=torch.ones(1, device=device, dtype=dtype),
        img_ids=torch.zeros(1, tokens, 4, device=device),
        txt_ids=torch.zeros(1, 512 if size > 64 else 8, 4, device=device),
        return_dict=False,
    )[0]
    return (output.float() - draw(1, tokens, channels).float()).square().mean()


def _ours(
    mode: str, info: Any, options: argparse.Namespace, ranks: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    strategy, scheme = MODES[mode]
    names = block_names(make_empty_transformer(info), info.family)
    plan = ExecutionPlan(
        placement=Placement(names, (device,) * len(names), device),
        dtype=dtype,
        quantize=None if scheme is None else QuantizeSettings(scheme),  # type: ignore[arg-type]
        strategy=strategy,  # type: ignore[arg-type]
        gradient_checkpointing="keep" not in mode,
        compiled_shapes=1 if "compile" in mode else None,
    )

    def attach(model: nn.Module) -> Any:
        kind = "float32" if dtype == torch.float32 else "bfloat16"
        settings = LoraSettings(rank=options.rank, alpha=options.rank, dtype=kind)
        return apply_lora(model, info.family, settings, seed=1)

    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (ranks.count,))
        assembled = assemble_sharded(info, plan, attach, mesh)
    else:
        assembled = assemble_for_training(info, plan, attach)
    model, parameters = assembled.model, list(assembled.adapter.parameters().values())
    runner: Any = Runner(model, device)
    of = _num_samples(mode, options, ranks)
    if not mode.startswith("alone"):
        runner = AcrossRanks(runner, parameters, ranks, 0, in_lockstep=strategy == "fsdp")
    count = [0]

    def step() -> float:
        count[0] += 1
        return float(sum(runner.run([microbatch(index) for index in range(of)])))

    def microbatch(index: int) -> MicroBatch[None]:
        seed = 100 * count[0] + index
        return MicroBatch(
            lambda: None,
            lambda _: _loss(model, info, options.size, device, dtype, seed) / of,
            name=f"{count[0]} {index}",
        )

    return model, parameters, step


def _plain(
    mode: str, info: Any, options: argparse.Namespace, ranks: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """diffusers, PEFT and FSDP2 alone; random weights of the same shapes."""
    import diffusers
    from peft import LoraConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model: Any = getattr(diffusers, info.family.transformer_class).from_config(dict(info.config)).to(dtype)
    model.requires_grad_(False)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".attn." in n]
    model.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=names))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    if "keep" not in mode:
        model.enable_gradient_checkpointing()
    model.train()
    if "compile" in mode:
        model.compile_repeated_blocks()
    mesh = init_device_mesh(device.type, (ranks.count,))
    for name in block_names(model, info.family):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
    parameters = [each for each in model.parameters() if each.requires_grad]
    count = [0]

    def step() -> float:
        count[0] += 1
        losses = []
        for index in range(ranks.place.rank, _num_samples(mode, options, ranks), ranks.count):
            loss = _loss(model, info, options.size, device, dtype, 100 * count[0] + index)
            loss.backward()
            losses.append(loss.detach())
        return float(sum(losses))

    return model, parameters, step


if __name__ == "__main__":
    main()
