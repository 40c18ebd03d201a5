"""What 8-bit weights cost and give in training: LoRA steps of full-size FLUX.2, every scheme against bf16 in one run.

    python benchmarks/eight_bit_training.py [--out results.json] [--side 512 1024] [--lora bfloat16 float32-peft]
    python benchmarks/eight_bit_training.py --profile fp8-compute [--side 512]

Random weights; no checkpoint is needed. The models of all schemes stand side by side over two GPUs (one, with half the
depth, where there is only one: 200 GB in bf16 and four 8-bit schemes) and take turns step by step, so that clocks and
neighbours affect all alike. A step is the pack's own: noise, forward with every block checkpointed, loss, backward,
clipping, AdamW. Before the first step the LoRA beside every quantized base must be bitwise the one beside bf16's, and
after the last one every base must be what it was.

--profile runs one step of each named scheme under torch.profiler instead and prints where its time goes. --tiny runs
the same code with toy shapes on emulated cards on the CPU. Ratios come first; results are written after each section.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import runpy
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.parallel.devices import available_devices, synchronize  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings, refusal  # noqa: E402
from devicebridge.tests.emulated import CARDS, emulated_cards, factories_on_cards  # noqa: E402
from devicebridge.training.adapter import LoraHandle  # noqa: E402
from devicebridge.training.batches import CachedSamples  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import (  # noqa: E402
    SCHEMES,
    STORED,
    TINY_CONFIG,
    RandomModel,
    attach_lora,
    base_tensors,
    bytes_per_device,
    checksum,
    make_config,
    make_random_job,
    make_random_model,
    make_samples,
    make_trainer,
    plan_devices,
)

NUM_TEXT_TOKENS = 512
WARM_UP_STEPS = 2
FULL_DEPTH, HALF_DEPTH = (8, 48), (4, 24)
BY_PEFT = "-peft"
LORAS = ("bfloat16", "float32", "bfloat16-peft", "float32-peft")
PACKAGES = ("diffusers", "peft", "torchao", "triton")


@dataclass
class Contestant:
    """One scheme's model and what was seen of it; times and losses of one section at a time."""

    built: RandomModel
    base: list[int]
    facts: dict[str, Any]
    lora: LoraHandle | None = None
    trainer: Trainer | None = None
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_gb: dict[str, float] = field(default_factory=dict)


# ---- building


def build(options: argparse.Namespace, schemes: Sequence[str]) -> dict[str, Contestant]:
    """Every scheme's model, rounded from the same weights and cut at the same block."""
    config = TINY_CONFIG if options.tiny else make_config(options.layers)
    placement = plan_devices(config, options.devices)
    found = {}
    for scheme in schemes:
        start, before = time.perf_counter(), _allocated(options.devices)
        built = make_random_model(config, placement, scheme)
        gc.collect()
        synchronize(options.devices)
        tensors = base_tensors(built.model)
        facts = {
            "weights_gb": _gb(bytes_per_device(tensors)),
            "allocated_gb": _gb({name: size - before[name] for name, size in _allocated(options.devices).items()}),
            "build_s": round(time.perf_counter() - start, 2),
            "placement": built.split.placement.describe(),
        }
        found[scheme] = Contestant(built, checksum(tensors), facts)
        say(f"{scheme}: built in {facts['build_s']} s, {facts['weights_gb']} GB")
    return found


def compare_sizes(contestants: dict[str, Contestant]) -> dict[str, Any]:
    """Weights per scheme, and how many percent they are off from half of bf16's, on each card and in all."""
    sizes = {scheme: each.facts["weights_gb"] for scheme, each in contestants.items()}
    report: dict[str, Any] = {scheme: dict(each.facts) for scheme, each in contestants.items()}
    for scheme, facts in report.items():
        facts["weights_gb_total"] = round(sum(sizes[scheme].values()), 3)
        if scheme != "bf16" and "bf16" in sizes:
            half = {card: size / 2 for card, size in sizes["bf16"].items()}
            total = sum(sizes[scheme].values()) / sum(half.values())
            facts["percent_off_half_of_bf16"] = {
                **{card: round(100 * (size / half[card] - 1), 2) for card, size in sizes[scheme].items()},
                "total": round(100 * (total - 1), 2),
            }
    return report


def _put_plain_linears_back(lora: LoraHandle) -> None:
    for name in lora.targets:
        lora.model.set_submodule(name, lora.model.get_submodule(f"{name}.base_layer"))
    del lora.model.peft_config


def attach_all(contestants: dict[str, Contestant], job: Any, *, is_fused: bool) -> dict[str, Any]:
    """A fresh LoRA on every model; returns how each compares with the one on the first model, before any step."""
    found: dict[str, Any] = {}
    wanted = getattr(torch, job.lora.dtype)
    first: list[torch.Tensor] = []
    for scheme, each in contestants.items():
        if each.lora is not None:
            each.trainer = None
            _put_plain_linears_back(each.lora)
        each.lora = attach_lora(each.built, job, is_fused=is_fused)
        parameters = list(each.lora.parameters().values())
        first = first or parameters
        found[scheme] = {
            "parameters": len(parameters),
            f"{job.lora.dtype}": sum(p.dtype is wanted for p in parameters),
            "require_grad": sum(p.requires_grad for p in parameters),
            f"bitwise_equal_to_{next(iter(contestants))}": sum(
                p.device == q.device and torch.equal(p, q) for p, q in zip(parameters, first, strict=True)
            ),
        }
    return found


def check_bases(contestants: dict[str, Contestant]) -> dict[str, str]:
    """How many base tensors have the bytes they were built with."""
    found = {}
    for scheme, each in contestants.items():
        now = checksum(base_tensors(each.built.model))
        found[scheme] = f"{sum(a == b for a, b in zip(now, each.base, strict=True))} of {len(each.base)}"
    return found


# ---- measuring


def make_data(side: int, *, tiny: bool) -> CachedSamples:
    """Four random samples of side x side pixels with full-length captions."""
    generator = torch.Generator().manual_seed(side)
    channels, width, length = (16, 32, 8) if tiny else (128, 15360, NUM_TEXT_TOKENS)
    cells = side // 16
    latents = torch.randn(4, channels, 1, cells, cells, generator=generator)
    return make_samples(latents, torch.randn(4, length, width, generator=generator).bfloat16())


def measure(
    contestants: dict[str, Contestant], job: Any, side: int, rounds: int, deadline_s: float, *, tiny: bool
) -> dict[str, Any]:
    """Steps of all schemes in turns -> seconds, GB and losses per scheme."""
    data = make_data(side, tiny=tiny)
    for each in contestants.values():
        assert each.lora is not None
        each.trainer = make_trainer(each.built, each.lora, job, data)
        each.seconds, each.losses, each.peak_gb = [], [], {}
    for number in range(WARM_UP_STEPS + rounds):
        if number >= WARM_UP_STEPS + 3 and elapsed_s() > deadline_s:
            break
        for scheme, each in contestants.items():
            seconds = step(each, is_warm_up=number < WARM_UP_STEPS)
            if number < WARM_UP_STEPS:
                say(f"{side} px, LoRA {job.lora.dtype}, {scheme}: warm-up {number + 1}, {seconds:.2f} s")
    return {scheme: summarize(each) for scheme, each in contestants.items()}


def step(each: Contestant, *, is_warm_up: bool) -> float:
    """One optimizer step; its seconds, loss and memory are kept unless it is one to warm up."""
    assert each.trainer is not None
    devices = each.built.devices
    before = _allocated(devices, reset_peak=True)
    synchronize(devices)
    start = time.perf_counter()
    loss = each.trainer.train_step(each.trainer.job.optimizer.learning_rate)
    synchronize(devices)
    seconds = time.perf_counter() - start
    each.trainer.step += 1
    each.losses.append(loss)
    if not is_warm_up:
        each.seconds.append(seconds)
        resident = _resident_bytes(each)
        above = {name: peak - before[name] for name, peak in _peak(devices).items()}
        each.peak_gb = _gb({name: resident.get(name, 0) + extra for name, extra in above.items()})
    return seconds


def _resident_bytes(each: Contestant) -> dict[str, int]:
    """What a scheme would hold between two steps if it were alone: base, LoRA, optimizer state."""
    assert each.lora is not None and each.trainer is not None
    held = base_tensors(each.built.model) + [p.detach() for p in each.lora.parameters().values()]
    state = each.trainer._optimizer.state.values()
    held += [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor) and value.ndim]
    return bytes_per_device(held)


def summarize(each: Contestant) -> dict[str, Any]:
    return {
        "s_per_step_median": round(statistics.median(each.seconds), 4),
        "s_per_step_min_max": [round(min(each.seconds), 4), round(max(each.seconds), 4)],
        "num_steps": len(each.seconds),
        "peak_gb_per_card": each.peak_gb,
        "losses": [round(loss, 5) for loss in each.losses],
    }


def ratios(section: dict[str, Any]) -> dict[str, dict[str, float]]:
    """How many times faster than weight-only fp8 and than bf16; above 1 is faster."""
    times = {scheme: found["s_per_step_median"] for scheme, found in section.items()}
    return {
        scheme: {f"over_{rival}": round(times[rival] / time_s, 3) for rival in ("fp8", "bf16") if rival in times}
        for scheme, time_s in times.items()
    }


def _allocated(devices: Sequence[torch.device], *, reset_peak: bool = False) -> dict[str, int]:
    found = {}
    for device in devices:
        found[str(device)] = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if reset_peak and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
    return found


def _peak(devices: Sequence[torch.device]) -> dict[str, int]:
    return {str(each): torch.cuda.max_memory_allocated(each) if each.type == "cuda" else 0 for each in devices}


def _gb(sizes: dict[str, int]) -> dict[str, float]:
    return {name: round(size / 1e9, 4) for name, size in sizes.items()}


def run_all(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Every LoRA type and resolution in turn, as far as the budget goes."""
    contestants = build(options, options.schemes)
    report["schemes"] = compare_sizes(contestants)
    for lora in options.lora:
        job = _make_job(options, lora)
        lora_key = f"LoRA in {lora}"
        found = attach_all(contestants, job, is_fused=not lora.endswith(BY_PEFT))
        report["lora_before_the_first_step"][lora_key] = found
        say(f"{lora_key} attached: {found}")
        for side in options.side:
            if elapsed_s() > options.budget_s:
                report["left_out"].append(f"{lora_key}, {side} px")
                continue
            section = measure(contestants, job, side, options.rounds, options.budget_s, tiny=options.tiny)
            key = f"{lora_key}, {side} px"
            report["times_faster"][key], report["steps"][key] = ratios(section), section
            write_json(report, options.out)
            say(f"{key}: {report['times_faster'][key]}")
    report["base_tensors_unchanged_after_training"] = check_bases(contestants)


def _make_job(options: argparse.Namespace, lora: str) -> Any:
    rank = 4 if options.tiny else options.rank
    return make_random_job(lora={"rank": rank, "alpha": rank, "dtype": lora.removesuffix(BY_PEFT)})


# ---- profile


def profile(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """One step per scheme and resolution after warming up: time by operation and by kernel."""
    for scheme in options.profile:
        each = build(options, [scheme])[scheme]
        job = _make_job(options, options.lora[0])
        attach_all({scheme: each}, job, is_fused=not options.lora[0].endswith(BY_PEFT))
        for side in options.side:
            assert each.lora is not None
            each.trainer = make_trainer(each.built, each.lora, job, make_data(side, tiny=options.tiny))
            for _ in range(WARM_UP_STEPS):
                step(each, is_warm_up=True)
            unprofiled = step(each, is_warm_up=False)
            key = f"{scheme}, LoRA in {options.lora[0]}, {side} px"
            report["profiles"][key] = profile_step(each) | {"s_per_step_unprofiled": round(unprofiled, 4)}
            print_profile(key, report["profiles"][key])
            write_json(report, options.out)
        del each
        gc.collect()


def profile_step(each: Contestant) -> dict[str, Any]:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    has_cuda = each.built.devices[0].type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]
    with torch.profiler.profile(activities=activities) as found:
        seconds = step(each, is_warm_up=True)
    busy: dict[str, float] = {}
    for event in found.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:  # those enclose kernels
            card = f"cuda:{event.device_index}"
            busy[card] = busy.get(card, 0.0) + event.time_range.elapsed_us() / 1e3
    tables: dict[str, list[dict[str, Any]]] = {"kernels": [], "operations": []}
    for entry in found.key_averages():
        is_kernel = entry.device_type == DeviceType.CUDA
        micros = entry.self_device_time_total if has_cuda else entry.self_cpu_time_total
        if micros > 0 and not entry.is_user_annotation:
            row = {"name": entry.key, "calls": entry.count, "ms": round(micros / 1e3, 3)}
            tables["kernels" if is_kernel else "operations"].append(row)
    for name, rows in tables.items():
        tables[name] = sorted(rows, key=lambda row: -row["ms"])[:40]
    return {"s_per_step_profiled": round(seconds, 4), "busy_ms": {k: round(v, 1) for k, v in busy.items()}, **tables}


def print_profile(title: str, found: dict[str, Any], num_rows: int = 22) -> None:
    total = sum(found["busy_ms"].values()) or sum(row["ms"] for row in found["operations"])
    print(f"\n{title}: {found['s_per_step_unprofiled']} s per step; busy {found['busy_ms']} ms")
    for name in ("operations", "kernels"):
        print(f"  {'ms':>9}  {'%':>5}  {'calls':>6}  {name}")
        for row in found[name][:num_rows]:
            print(f"  {row['ms']:9.2f}  {100 * row['ms'] / total:5.1f}  {row['calls']:6d}  {row['name'][:110]}")


# ---- setting


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="+", choices=(*SCHEMES, *STORED), default=list(SCHEMES))
    parser.add_argument("--side", type=int, nargs="+", default=[512, 1024], help="pixels")
    parser.add_argument("--lora", nargs="+", choices=LORAS, default=LORAS[:2], help="-peft: as PEFT computes it")
    parser.add_argument("--layers", type=int, nargs=2, help="double and single blocks; all, or half on one GPU")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6, help="measured steps of each scheme, after 2 to warm up")
    parser.add_argument("--budget-s", type=float, default=215.0, help="no section is begun after this many seconds")
    parser.add_argument("--profile", nargs="+", choices=(*SCHEMES, *STORED), help="profile these schemes instead")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on emulated cards")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = list(CARDS[:2]) if options.tiny else available_devices()[:2]
    if not options.devices:
        parser.error("this needs one or two GPUs and found none; --tiny runs on the CPU")
    options.layers = tuple(options.layers or (FULL_DEPTH if len(options.devices) == 2 else HALF_DEPTH))
    if options.tiny:
        options.side = [side // 8 for side in options.side]
    return options


def drop_impossible(options: argparse.Namespace) -> dict[str, str]:
    """Take out the schemes these cards cannot compute in; returns the reasons."""
    reasons = {}
    for scheme in SCHEMES[1:]:
        reason = refusal(QuantizeSettings(scheme), options.devices)  # type: ignore[arg-type]
        if reason and scheme in options.schemes:
            options.schemes.remove(scheme)
            reasons[scheme] = reason
    return reasons


@contextlib.contextmanager
def emulation(*, is_on: bool, num_cards: int = 2) -> Iterator[None]:
    if not is_on:
        yield
        return
    import peft.tuners.lora  # noqa: F401  # before the stand-ins are in place, which libraries would keep
    import torchao.quantization  # noqa: F401

    # A parameter of an emulated card keeps its numbers beside it, so a change of type must make a new one.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with emulated_cards(num_cards), factories_on_cards():
        yield


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"times_faster": {}, "lora_before_the_first_step": {}, "steps": {}, "left_out": []}
    if options.profile:
        report = {"profiles": {}}
    report["setup"] = {
        "model": "toy" if options.tiny else "FLUX.2-dev shape, {} double + {} single blocks".format(*options.layers),
        "weights": "random, normal with a deviation of 0.02; one scale per output row; int8-compute rotated by 64",
        "devices": [str(device) for device in options.devices],
        "batch": 1,
        "rank": options.rank,
        "gradient_checkpointing": True,
        "optimizer": "AdamW, in the step",
        "text_tokens": NUM_TEXT_TOKENS,
        "refused": drop_impossible(options),
        **describe_run(*PACKAGES),
    }
    with emulation(is_on=options.tiny):
        (profile if options.profile else run_all)(options, report)
    report["elapsed_s"] = round(elapsed_s(), 1)
    print_or_write(report, options.out)
    if not options.profile:
        print_table(report)


def print_table(report: dict[str, Any]) -> None:
    for key, section in report["steps"].items():
        print(f"\n{key}\n  {'scheme':14} {'s/step':>8} {'x fp8':>7} {'x bf16':>7}  peak GB per card, last loss")
        for scheme, found in section.items():
            faster = report["times_faster"][key][scheme]
            print(
                f"  {scheme:14} {found['s_per_step_median']:8.4f} {faster.get('over_fp8', 0):7.3f} "
                f"{faster.get('over_bf16', 0):7.3f}  {list(found['peak_gb_per_card'].values())} {found['losses'][-1]}"
            )
    for scheme, facts in report["schemes"].items():
        print(f"{scheme}: {facts['weights_gb']} GB, off half of bf16 {facts.get('percent_off_half_of_bf16', '-')} %")
    print(f"base unchanged: {report['base_tensors_unchanged_after_training']}; left out: {report['left_out']}")


if __name__ == "__main__":
    main()
