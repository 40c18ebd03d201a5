"""Seconds per sample of LoRA training over two GPUs: one GPU, the usual split, and the pack's pipeline, in one run.

    python benchmarks/train_step.py [--out results.json] [--subject flux2-512 flux2-1024 flux1-512 wan-480]
                                    [--scheme bf16 fp8 fp8-compute int8-compute] [--budget-s 500] [--tiny]

Full-size models with random weights; no checkpoint is needed. All contestants of a section take turns, step by step.

- "one GPU": all blocks on cuda:0, micro-batches one after the other, every block recomputed.
- "usual split": what a split by hooks usually is: blocks cut at the middle of the last list, every foreign block moves
  all of its arguments, PEFT's LoRA, torch's gradient checkpointing of every block, one micro-batch in flight; 8-bit
  sections hold its weights in torchao's weight-only float8. It does without cuDNN's attention, as the pack's training
  (patches/attention.py): FLUX.1 would end with it.
- "pipeline m": the pack: cut by time, LoRA computed with its base, its recomputation; m micro-batches per step. "keep":
  as many blocks keep their activations as fit --card-gb per card (found by trying); "compiled": blocks compiled;
  "offloaded": block inputs wait in pinned host memory (host_gb). For
  that, beside the same without:
      --subject wan-480 --scheme bf16 --ways "pipeline 8" "pipeline 8, offloaded" --rounds 2 --warm-up 1
- "replicas m": the pack with a copy of the model on each card, m micro-batches per step dealt out; only if --ways names
  it, for the copies must fit beside the others: --subject flux1-512 --ways "usual split" "pipeline 8" "replicas 8".

A step is the pack's own loop: noise, copies from pinned memory, forward, loss, backward, clipping, AdamW; LoRA in
bfloat16, rank 32, batch 1, text at full length. Seconds are per sample: a step's divided by its micro-batches. Busy is
the share of a step in which a card runs kernels, from one step under torch.profiler, of the ways in --busy. Ratios come
first; results are written after each section. --tiny runs the same on emulated cards, where times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import runpy
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.events import first_line  # noqa: E402
from devicebridge.families.registry import find_family  # noqa: E402
from devicebridge.families.spec import ModelFamily, Variant  # noqa: E402
from devicebridge.parallel.devices import synchronize  # noqa: E402
from devicebridge.parallel.local.data_parallel import DataParallel, Replica  # noqa: E402
from devicebridge.parallel.local.pipeline import Pipeline  # noqa: E402
from devicebridge.parallel.offload.activations import MIN_BYTES, ActivationOffload  # noqa: E402
from devicebridge.parallel.placement import Placement, block_flops, block_names, blocks_with_lists, plan_placement  # noqa: E402
from devicebridge.parallel.runner import Runner  # noqa: E402
from devicebridge.patches.compile_blocks import apply_compile, remove_compiled  # noqa: E402
from devicebridge.patches.hooks import map_tensors  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from eight_bit_training import emulation  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_job import (  # noqa: E402
    SCHEMES,
    TINY_CONFIG,
    RandomModel,
    attach_lora,
    demand_right_gradients,
    make_empty,
    make_random_job,
    make_random_model,
    make_samples,
    make_trainer,
    take_devices,
)

NUM_TEXT_TOKENS = 512


@dataclass(frozen=True)
class Subject:
    """What is trained: latent is [C, F, H, W] of one sample; text (S, D) of each text tensor, S 0 for pooled ones."""

    family: str
    variant: str
    latent: tuple[int, int, int, int]
    text: dict[str, tuple[int, int]]


SUBJECTS = {
    "flux2-512": Subject("flux2", "flux2-dev", (128, 1, 32, 32), {"prompt_embeds": (512, 15360)}),
    "flux2-1024": Subject("flux2", "flux2-dev", (128, 1, 64, 64), {"prompt_embeds": (512, 15360)}),
    "flux1-512": Subject(
        "flux1", "flux1-dev", (16, 1, 64, 64), {"prompt_embeds": (512, 4096), "pooled_prompt_embeds": (0, 768)}
    ),
    "wan-480": Subject(
        "wan", "wan2.1-t2v-14b", (16, 13, 60, 104), {"prompt_embeds": (512, 4096)}
    ),  # 480x832, 49 frames
}


@dataclass(frozen=True)
class Way:
    """One way to train.

    Args:
        num_batches: micro-batches of a step.
        kind: None for one in flight.
        keep: whether as many blocks as fit keep their activations.
        any_size: compiled for any number of tokens, as jobs of several sizes are.
        offloads: whether block inputs wait in host memory.
    """

    name: str
    num_batches: int
    kind: Literal["1f1b", "replicas"] | None = None
    keep: bool = False
    compiled: bool = False
    any_size: bool = False
    offloads: bool = False


ONE_GPU, USUAL = Way("one GPU", 4), Way("usual split", 4)
OURS = [
    Way("split, one in flight", 4),
    Way("pipeline 8", 8, "1f1b"),
    Way("pipeline 16", 16, "1f1b"),
    Way("split, one in flight, offloaded", 4, offloads=True),
    Way("pipeline 8, offloaded", 8, "1f1b", offloads=True),
    Way("pipeline 8, keep", 8, "1f1b", keep=True),
    Way("pipeline 8, compiled", 8, "1f1b", compiled=True),
    Way("pipeline 8, compiled for any size", 8, "1f1b", compiled=True, any_size=True),
    Way("pipeline 8, compiled, keep", 8, "1f1b", keep=True, compiled=True),
    Way("pipeline 16, compiled, keep", 16, "1f1b", keep=True, compiled=True),
]
COPIES = [
    Way("replicas 8", 8, "replicas"),
    Way("replicas 8, keep", 8, "replicas", keep=True),
    Way("replicas 8, compiled", 8, "replicas", compiled=True),
    Way("replicas 8, compiled, keep", 8, "replicas", keep=True, compiled=True),
]


# ---- models


def cut_by_time(config: dict[str, Any], subject: Subject, devices: Sequence[torch.device]) -> Placement:
    """Blocks to devices by estimated compute, the tail on the last one."""
    family, variant = _described(subject)
    model = make_empty(config, family)
    names = block_names(model, family)
    tokens = int(_cells(subject) * family.latent_of(variant).num_tokens_per_cell)
    cost = [block_flops(*each, tokens, NUM_TEXT_TOKENS) for each in blocks_with_lists(model, family)]
    return replace(plan_placement(names, devices, block_cost=cost), tail=tuple(family.tail))


def cut_in_the_middle(config: dict[str, Any], subject: Subject, devices: Sequence[torch.device]) -> Placement:
    """The later half of the last block list on the second device, as usual."""
    family, _ = _described(subject)
    model = make_empty(config, family)
    names = block_names(model, family)
    last = len(model.get_submodule(family.block_lists[-1].name))
    first = len(names) - last + last // 2
    placed = tuple(devices[0] if index < first else devices[1] for index in range(len(names)))
    return Placement(names, placed, devices[0])


def split_as_usual(built: RandomModel) -> None:
    """Hooks that move everything a foreign block is called with, and what the tail is called with back."""
    built.split.remove()  # ours; the blocks stay where they were made

    def move_to(device: torch.device) -> Callable[..., Any]:
        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if tensor.device == device else tensor.to(device)

        return lambda module, args, kwargs: (map_tensors(args, move), map_tensors(kwargs, move))

    placement = built.split.placement
    for name, device in zip(placement.blocks, placement.devices, strict=True):
        if device != placement.main_device:
            block = built.model.get_submodule(name)
            block.register_forward_pre_hook(move_to(device), with_kwargs=True)
    built.model.get_submodule(placement.blocks[-1]).register_forward_hook(
        lambda module, args, output: map_tensors(output, lambda tensor: tensor.to(placement.main_device))
    )


def _described(subject: Subject) -> tuple[ModelFamily, Variant]:
    family = find_family(subject.family)
    return family, family.variant(subject.variant)


def _cells(subject: Subject) -> int:
    _, frames, height, width = subject.latent
    return frames * height * width


@dataclass
class Contestant:
    """A model, or several copies of it, that is trained in one or several ways."""

    built: RandomModel
    trainer: Trainer
    job: Any
    copies: tuple[RandomModel, ...] = ()  # on further devices
    data_parallel: DataParallel | None = None
    compiled: list[Any] = field(default_factory=list)  # handles, and for any size or not
    any_size: bool = False
    offload: ActivationOffload | None = None  # with the host memory it took, for the next turn

    @property
    def models(self) -> tuple[RandomModel, ...]:
        return (self.built, *self.copies)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return tuple(dict.fromkeys(device for each in self.models for device in each.devices))

    @property
    def num_blocks(self) -> list[int]:
        """Per device."""
        placed = [device for each in self.models for device in each.split.placement.devices]
        return [placed.count(device) for device in self.devices]

    def keep_activations(self, kept: Sequence[int]) -> None:
        """So many blocks of each device; [] for none."""
        kept = kept or [0] * len(self.devices)
        for index, each in enumerate(self.models):
            each.split.keep_activations(kept if not self.copies else kept[index : index + 1])

    def compile(self, is_on: bool, any_size: bool) -> None:
        """Compile the blocks of every copy, or give them their own forwards back."""
        if self.compiled and (not is_on or self.any_size != any_size):
            remove_compiled(self.compiled)
            self.compiled = []
        if is_on and not self.compiled:
            self.compiled = [apply_compile(each.model, each.family, is_dynamic=any_size) for each in self.models]
            self.any_size = any_size


def make_contestant_job(options: argparse.Namespace) -> Any:
    rank = 4 if options.tiny else 32
    return make_random_job(
        lora={"rank": rank, "alpha": rank, "dtype": "float32" if options.tiny else "bfloat16"},
        model={"path": "random weights", "dtype": "bfloat16"},
    )


def make_contestant(
    options: argparse.Namespace,
    subject: Subject,
    config: dict[str, Any],
    placement: Placement,
    scheme: str,
    *,
    usual: bool,
) -> Contestant:
    family, variant = _described(subject)
    built = make_random_model(config, placement, scheme, family=family)
    job = make_contestant_job(options)
    lora = attach_lora(built, job, is_fused=not usual)
    if usual:
        if len(placement.used_devices) > 1:
            split_as_usual(built)
        built.model.enable_gradient_checkpointing()
    trainer = make_trainer(built, lora, job, _make_data(subject, options.tiny), variant=variant)
    return Contestant(built, trainer, job)


def make_replicas(
    options: argparse.Namespace, subject: Subject, config: dict[str, Any], placement: Placement, scheme: str
) -> Contestant:
    """A copy of the model on every device, the same weights drawn anew on each."""
    first, *others = (
        make_contestant(options, subject, config, placement.on(device), scheme, usual=False)
        for device in options.devices
    )
    trained = [Replica(e.built.model, e.built.devices[0], tuple(e.trainer._parameters)) for e in (first, *others)]
    return replace(first, copies=tuple(each.built for each in others), data_parallel=DataParallel(trained))


def _make_data(subject: Subject, is_tiny: bool) -> Any:
    family, variant = _described(subject)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, *subject.latent, generator=generator)
    text = {
        name: torch.randn(*((2, length, width) if length else (2, width)), generator=generator).bfloat16()
        for name, (length, width) in subject.text.items()
    }
    return make_samples(latents, text, family, variant)


# ---- steps


def _runner_of(each: Contestant, way: Way) -> Runner:
    model, split = each.built.model, each.built.split
    if way.kind == "replicas":
        assert each.data_parallel is not None
        return each.data_parallel
    return Runner(model, split.main_device) if way.kind is None else Pipeline(model, split.bridge)


@contextlib.contextmanager
def trained(each: Contestant, way: Way, kept: Sequence[int]) -> Iterator[Trainer]:
    """The contestant's trainer, set for this way."""
    trainer = each.trainer
    trainer.job = replace(each.job, train=replace(each.job.train, gradient_accumulation_steps=way.num_batches))
    trainer.runner = _runner_of(each, way)
    if way.kind == "replicas":
        trainer.runner.sync()  # a way with the first copy alone may have come before
    if way.name not in (USUAL.name, ONE_GPU.name):
        each.keep_activations(kept)
        each.compile(way.compiled, way.any_size)
        if way.offloads and each.offload is None:
            least = MIN_BYTES if each.devices[0].type == "cuda" else 1
            each.offload = ActivationOffload(each.devices, min_bytes=least)
        each.built.split.offload = each.offload if way.offloads else None
        trainer.compiled = tuple(each.compiled) if way.compiled else ()
    yield trainer


def timed_step(each: Contestant, way: Way, kept: Sequence[int]) -> tuple[float, float]:
    """Seconds per sample of one step, and its loss."""
    with trained(each, way, kept) as trainer:
        synchronize(each.devices)
        start = time.perf_counter()
        loss = trainer.train_step(1e-5)
        synchronize(each.devices)
        trainer.step += 1
        return (time.perf_counter() - start) / way.num_batches, loss


def find_kept(each: Contestant, way: Way, card_gb: float) -> list[int]:
    """How many blocks of each card may keep their activations, from the peaks of two steps; a third checks it."""
    counts = each.num_blocks
    if each.devices[0].type != "cuda":
        return [count // 2 for count in counts]
    none, few = ([0] * len(counts), [2] * len(counts))
    base, some = (_peaks(each, way, kept) for kept in (none, few))
    kept = []
    for count, start, end in zip(counts, base, some, strict=True):
        per_block = max((end - start) / 2, 1e6)
        kept.append(int(min(count, max(0, (card_gb * 1e9 - start) // per_block))))
    while max(_peaks(each, way, kept)) > card_gb * 1e9:
        kept = [max(0, count - 2) for count in kept]
    return kept


def _peaks(each: Contestant, way: Way, kept: Sequence[int]) -> list[int]:
    """Bytes this contestant needs per card in a step, as if it were alone."""
    return step_with_peaks(each, way, kept)[2]


def step_with_peaks(each: Contestant, way: Way, kept: Sequence[int]) -> tuple[float, float, list[int]]:
    """As timed_step, and the bytes that this contestant needs per card, as if it were alone; [] without GPUs."""
    if each.devices[0].type != "cuda":
        return *timed_step(each, way, kept), []
    others = [_allocated(device) - _own(each, device) for device in each.devices]
    for device in each.devices:
        torch.cuda.reset_peak_memory_stats(device)
    seconds, loss = timed_step(each, way, kept)
    peaks = [torch.cuda.max_memory_allocated(device) for device in each.devices]
    return seconds, loss, [peak - other for peak, other in zip(peaks, others, strict=True)]


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _own(each: Contestant, device: torch.device) -> int:
    """What the contestant holds between steps: weights, LoRA and optimizer state."""
    held = [tensor for built in each.models for tensor in (*built.model.parameters(), *built.model.buffers())]
    state = each.trainer._optimizer.state.values()
    held += [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor) and value.ndim]
    return sum(
        t.untyped_storage().nbytes() if not hasattr(t, "qdata") else _bytes(t) for t in held if t.device == device
    )


def _bytes(tensor: Any) -> int:
    names, _ = tensor.__tensor_flatten__()
    return sum(getattr(tensor, name).untyped_storage().nbytes() for name in names)


def busy_shares(each: Contestant, way: Way, kept: Sequence[int]) -> dict[str, float]:
    """Share of one step in which each card runs kernels; {} without GPUs."""
    seconds, busy = busy_seconds(each, way, kept)
    return {card: round(found / seconds, 3) for card, found in busy.items()}


def busy_seconds(each: Contestant, way: Way, kept: Sequence[int]) -> tuple[float, dict[str, float]]:
    """Seconds per sample of one step under the profiler, and in how many of them each card runs kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if each.devices[0].type != "cuda":
        return timed_step(each, way, kept)[0], {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        seconds = timed_step(each, way, kept)[0]
    spans: dict[int, list[tuple[float, float]]] = {}
    for event in found.events():
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            spans.setdefault(event.device_index, []).append((event.time_range.start, event.time_range.end))
    per_sample = {index: _covered(times) / 1e6 / way.num_batches for index, times in sorted(spans.items())}
    return seconds, {f"cuda:{index}": busy for index, busy in per_sample.items()}


def _covered(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def measure(options: argparse.Namespace, entries: list[tuple[Contestant, Way]]) -> dict[str, Any]:
    """Every way in turns -> seconds, peaks, losses and busy shares."""
    kept: dict[str, list[int]] = {}
    found: dict[str, dict[str, Any]] = {}
    for each, way in list(entries):
        start = time.perf_counter()
        try:
            with trained(each, way, []) as trainer:
                demand_right_gradients(trainer)
            for _ in range(options.warm_up):
                timed_step(each, way, [])
            kept[way.name] = find_kept(each, way, options.card_gb) if way.keep else []
        except RuntimeError as error:  # one way that fails is a result, too
            found[way.name] = {"error": first_line(error)}
            say(f"{way.name}: {traceback.format_exc()[-1500:]}")
            entries.remove((each, way))
            each.compile(is_on=False, any_size=False)  # what was compiled may be given up
            continue
        found[way.name] = {"warm_up_s": round(time.perf_counter() - start, 1), "seconds": [], "losses": []}
        say(f"{way.name}: warm, {found[way.name]['warm_up_s']} s, kept {kept[way.name]}")
    for _ in range(options.rounds):
        for each, way in entries:
            seconds, loss, peaks = step_with_peaks(each, way, kept[way.name])
            found[way.name]["peak_gb"] = [round(peak / 1e9, 2) for peak in peaks]
            found[way.name]["seconds"].append(seconds)
            found[way.name]["losses"].append(round(loss, 5))
    for each, way in entries:
        row = found[way.name]
        row["s_per_sample"] = round(statistics.median(row["seconds"]), 4)
        row["s_per_sample_min_max"] = [round(min(row["seconds"]), 4), round(max(row.pop("seconds")), 4)]
        row["kept_blocks"] = kept[way.name]
        if way.offloads and each.offload is not None:
            row["host_gb"] = round(each.offload.host_bytes / 1e9, 3)
        row["busy"] = busy_shares(each, way, kept[way.name]) if way.name in options.busy else {}
    usual = found.get(USUAL.name, {}).get("s_per_sample")
    for name, row in found.items():
        if usual and "s_per_sample" in row:
            row["times_faster_than_the_usual_split"] = round(usual / row["s_per_sample"], 3)
        say(f"{name}: {row}")
    return found


def measure_alone(options: argparse.Namespace, make: Callable[[], Contestant], ways: Sequence[Way]) -> dict[str, Any]:
    each = make()
    try:
        return measure(options, [(each, way) for way in ways])
    finally:
        del each
        release()


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_tiny(subject: Subject) -> tuple[Subject, dict[str, Any]]:
    """The same kind of model in a size for the CPU; FLUX.2 in one that all schemes can do."""
    family, variant = _described(subject)
    if subject.family == "flux2":
        small = replace(subject, latent=(16, 1, 4, 4), text={"prompt_embeds": (8, 32)})
        return small, dict(variant.transformer_config) | TINY_CONFIG
    from devicebridge.tests.toy import TINY

    row = TINY[subject.family]
    text = {name: (shape[0], shape[1]) if len(shape) > 1 else (0, shape[0]) for name, shape in row.text_shapes.items()}
    return replace(subject, latent=row.latent_shape, text=text), dict(row.transformer_config)


def in_size(subject: Subject, *, is_tiny: bool) -> tuple[Subject, dict[str, Any]]:
    """The subject and its model's config, at full size or tiny."""
    if is_tiny:
        return make_tiny(subject)
    _, variant = _described(subject)
    return subject, dict(variant.transformer_config)


def run_section(options: argparse.Namespace, name: str, scheme: str) -> dict[str, Any]:
    """One subject and scheme: the usual split (bf16, or weight-only float8 beside 8 bits) against ours."""
    subject, config = in_size(SUBJECTS[name], is_tiny=options.tiny)
    devices = options.devices

    def contestant(placement: Placement, base: str, usual: bool) -> Contestant:
        return make_contestant(options, subject, config, placement, base, usual=usual)

    placement = cut_by_time(config, subject, devices)
    mine = [way for way in OURS if way.name in options.ways]
    ours = contestant(placement, scheme, False) if mine else None
    entries = [(ours, way) for way in mine if ours is not None]
    ways = [way for way in COPIES if way.name in options.ways]
    if ways:
        copied = make_replicas(options, subject, config, placement, scheme)
        entries += [(copied, way) for way in ways]
        del copied
    usual = None
    if "usual split" in options.ways:
        usual = contestant(cut_in_the_middle(config, subject, devices), "bf16" if scheme == "bf16" else "fp8", True)
        entries.insert(0, (usual, replace(USUAL, num_batches=options.usual_batches)))
    section: dict[str, Any] = {"placement": placement.describe()}
    eager = [(each, way) for each, way in entries if not way.compiled]
    section["ways"] = measure(options, eager)
    compiled = [(each, way) for each, way in entries if way.compiled]
    if compiled and elapsed_s() < options.budget_s:  # apart, beside the usual split again: blocks compile in place
        again = measure(options, [*(entry for entry in entries if entry[1].name == USUAL.name), *compiled])
        section["ways"] |= {f"{name}, again" if name == USUAL.name else name: row for name, row in again.items()}
    del ours, usual, entries, eager, compiled
    release()
    if "one GPU" in options.ways and elapsed_s() < options.budget_s:
        one = replace(cut_by_time(config, subject, devices[:1]), tail=())
        section["ways"] |= measure_alone(options, lambda: contestant(one, scheme, True), [ONE_GPU])
    return section


def ratios(section: dict[str, Any]) -> dict[str, float]:
    """How many times faster than the usual split in the same turns; one GPU, which ran apart, than the first."""
    found = {name: row.get("times_faster_than_the_usual_split") for name, row in section["ways"].items()}
    one, usual = (section["ways"].get(way.name, {}).get("s_per_sample") for way in (ONE_GPU, USUAL))
    if one and usual:
        found[ONE_GPU.name] = round(usual / one, 3)
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subject", nargs="+", choices=SUBJECTS, default=["flux2-512"])
    parser.add_argument(
        "--scheme", nargs="+", choices=SCHEMES, default=["bf16", "fp8-compute"], help="fp8, int8: torchao's weight-only"
    )
    usual_names = [way.name for way in (ONE_GPU, USUAL, *OURS)]
    names = [*usual_names, *(way.name for way in COPIES)]
    parser.add_argument("--ways", nargs="+", choices=names, default=usual_names)
    parser.add_argument("--busy", nargs="*", choices=names, default=[], help="ways to profile, which takes its time")
    parser.add_argument("--rounds", type=int, default=4, help="measured steps of each way")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each way before; the first may compile")
    parser.add_argument("--usual-batches", type=int, default=USUAL.num_batches, help="micro-batches of the usual split")
    parser.add_argument("--card-gb", type=float, default=80.0, help="what a card may hold where blocks are kept")
    parser.add_argument("--budget-s", type=float, default=480.0, help="no section is begun after this many seconds")
    parser.add_argument("--tiny", action="store_true", help="toy shapes on emulated cards")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.devices = take_devices(parser, 2, is_tiny=options.tiny)
    if options.tiny:
        options.ways = [name for name in options.ways if "compiled" not in name]
    return options


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"times_faster_than_the_usual_split": {}, "sections": {}, "left_out": []}
    report["setup"] = {
        "weights": "random",
        "rank": 32,
        "batch": 1,
        "card_gb": options.card_gb,
        **describe_run("diffusers", "peft", "torchao", "triton"),
    }
    with emulation(is_on=options.tiny):
        for name in options.subject:
            for scheme in options.scheme:
                key = f"{name}, {scheme}"
                if elapsed_s() > options.budget_s:
                    report["left_out"].append(key)
                    continue
                say(key)
                section = run_section(options, name, scheme)
                report["sections"][key] = section
                report["times_faster_than_the_usual_split"][key] = ratios(section)
                say(f"{key}: {ratios(section)}")
                write_json(report, options.out)
    report["elapsed_s"] = round(elapsed_s(), 1)
    print_or_write(report, options.out)


if __name__ == "__main__":
    main()
