"""Seconds per sample of LoRA training on models that ComfyUI builds, on one GPU, and what the parts of that path cost.

    python benchmarks/native_training.py --comfyui ~/ComfyUI [--subject flux2 z_image sdxl qwen_image] [--budget-s 400]
                                         [--out results.json] [--tiny]

Random weights in published sizes (random_reader.py): a file in --folder has their names and shapes, and the pack reads
it as a user's. FLUX.2 has half of its blocks, so that two models fit. Ways of a subject take turns, step by step:

- "native": ComfyUI's own class, every block recomputed, its samples in memory.
- "native, files read ahead": the same with its samples in the cache, as trainings read them.
- "native, files read when needed": the same without reading ahead.
- "without the guard": the same blocks as they are, not watched for what they write in place
  (parallel/offload/recompute.py); only where such a block can be computed again at all.
- "diffusers": the pack's own family with the same sizes, its samples in memory; FLUX.2 alone.
- "native, compiled" and "diffusers, compiled": the same two with blocks compiled for this shape.

"forward_ms" is one block's forward with the guard and without, timed in turns where whole steps cannot be.
bf16, LoRA rank 16, batch 1, 512 x 512 pixels, one micro-batch a step. "forecast" is the planner's peak of allocated
memory of the native job, over torch.cuda.max_memory_allocated. --tiny: the builds of the tests, on the CPU.

With `--cards 2` each subject is whole and lies over so many cards. "usual split" takes one microbatch after the other
through them; "pipeline" has them follow each other, --microbatches a step. Seconds per sample, and of each card the
peak, forecast and measured. `--card-gb 24` leaves a job so much of each card, lets the planner choose what to recompute
and to stream, and compares its forecast with torch's own counters; the base is 8-bit then (--quantize):
    python benchmarks/native_training.py --cards 2 --subject sdxl z_image qwen_image flux2
    python benchmarks/native_training.py --cards 2 --card-gb 24 --subject qwen_image flux2
    python benchmarks/native_training.py --cards 2 --card-gb 24 --subject minimax_h3 --quantize int8-compute

`--together tokens` compares one microbatch on one card with the same on all of them, step by step in turns: the model
in 8 bits on every card, its rows shared out. Besides seconds and peaks it tells how far loss and gradients are apart.
Each model takes two steps and then --rounds of them, and says after every part what it took. `activations_gb` is a
step's peak above what lay on a card before it. --links simulates slower ones, GB/s each way (slow_link.py). --losses
trains so many steps on one card, together, and on one card from another start of the LoRA, and compares the losses:
    python benchmarks/native_training.py --cards 2 --together tokens --subject wan --rounds 2 --budget-s 150
    python benchmarks/native_training.py --cards 2 --together tokens --subject wan_4_blocks --losses 100
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI"))
    parser.add_argument("--subject", nargs="+", default=["flux2", "z_image", "sdxl"])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "native_training")
    parser.add_argument("--ways", nargs="+", help="these and native alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cards", type=int, default=1)
    parser.add_argument("--card-gb", type=float, help="GB that a job may take of each card")
    parser.add_argument("--quantize", default="fp8-compute", help="of the base, with --card-gb and --together")
    parser.add_argument("--together", nargs="+", choices=["tokens"], help="strategies against one card")
    parser.add_argument("--links", nargs="+", type=float, default=[], help="GB/s of slower links, with --together")
    parser.add_argument("--losses", type=int, default=0, help="steps whose losses are compared, with --together")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=400.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, where times mean nothing")
    return parser.parse_args()


OPTIONS = parse()
sys.path.insert(0, str(Path(OPTIONS.comfyui).expanduser()))
sys.argv = ["main.py", *(["--cpu"] if OPTIONS.tiny else []), "--disable-dynamic-vram"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import runpy  # noqa: E402

import cuda_malloc  # noqa: E402, F401

runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import dataclasses  # noqa: E402
import functools  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext  # noqa: E402
from typing import Any  # noqa: E402

import comfy.supported_models  # noqa: E402
import comfyui_version  # noqa: E402
import torch  # noqa: E402
from card_limit import limited  # noqa: E402
from devicebridge.config.job import make_job  # noqa: E402
from devicebridge.data.samples import Batch  # noqa: E402
from devicebridge.encoding.comfy_data import read_pairs, save_encoded  # noqa: E402
from devicebridge.encoding.store import CacheStore  # noqa: E402
from devicebridge.events import EventLog, first_line  # noqa: E402
from devicebridge.jobs.encode_job import cache_job  # noqa: E402
from devicebridge.jobs.job import build_trainer, check_job  # noqa: E402
from devicebridge.nodes.host.native.model import native_training  # noqa: E402
from devicebridge.nodes.host.native.source import read_native  # noqa: E402
from devicebridge.parallel.devices import CPU, memory_in_use, reset_peaks, synchronize  # noqa: E402
from devicebridge.parallel.offload.recompute import InPlaceGuard, put_back, taken_out  # noqa: E402
from devicebridge.parallel.runner import Runner  # noqa: E402
from devicebridge.patches.attention import sound_attention  # noqa: E402
from devicebridge.patches.compile_blocks import CompiledBlocks, apply_compile  # noqa: E402
from devicebridge.planning.plan import TrainingPlan  # noqa: E402
from devicebridge.tests.comfy.full_sizes import _H3_PRUNED, SDXL, Z_IMAGE  # noqa: E402
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, TinyFamily, small_sizes  # noqa: E402
from devicebridge.tests.emulated import on_cpu  # noqa: E402
from devicebridge.training.batches import CachedSamples  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from random_checkpoint import write_hollow  # noqa: E402
from random_job import (  # noqa: E402
    TINY_CONFIG,
    MemoryStore,
    attach_lora,
    make_config,
    make_picture_samples,
    make_random_job,
    make_random_model,
    make_trainer,
    plan_devices,
)
from random_reader import random_weights  # noqa: E402
from slow_link import SlowLink, link_name  # noqa: E402

DEVICE = torch.device("cpu" if OPTIONS.tiny else "cuda:0")
DTYPE = "float32" if OPTIONS.tiny else "bfloat16"
KIND = "lazy" if OPTIONS.tiny else "cuda"
CARDS = tuple(torch.device(KIND, index) for index in range(OPTIONS.cards)) if OPTIONS.cards > 1 else (DEVICE,)
_FEWEST = 4  # rounds, the first two of which warm up, however little time is left
_NUM_LAYERS = ("num_layers", "num_single_layers")
_FLUX2 = {
    **{"image_model": "flux2", "in_channels": 128, "out_channels": 128, "context_in_dim": 15360, "hidden_size": 6144},
    **{"mlp_ratio": 3.0, "num_heads": 48, "depth": 4, "depth_single_blocks": 24, "axes_dim": [32, 32, 32, 32]},
    **{"theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": True, "txt_ids_dims": [3]},
    **{"yak_mlp": False},
    **{"global_modulation": True, "mlp_silu_act": True, "ops_bias": False, "vec_in_dim": None, "txt_norm": False},
}
_SDXL = {**SDXL, "num_head_channels": 64, "num_heads": -1}
_QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}


WHOLE_FLUX2 = TinyFamily("Flux2", {**_FLUX2, "depth": 8, "depth_single_blocks": 48}, (128, 32, 32), (512, 15360), ())
_WAN_14B = {**FAMILIES["wan"].unet_config, "dim": 5120, "num_heads": 40, "ffn_dim": 13824, "num_layers": 40}
SUBJECTS = {
    "flux2": TinyFamily("Flux2", _FLUX2, (128, 32, 32), (512, 15360), ()),
    "z_image": TinyFamily("ZImage", Z_IMAGE, (16, 64, 64), (512, 2560), ()),
    "sdxl": TinyFamily("SDXL", _SDXL, (4, 64, 64), (77, 2048), (), pooled=1280),
    "qwen_image": TinyFamily("QwenImage", _QWEN, (16, 1, 64, 64), (512, 3584), ()),
    "wan": TinyFamily("WAN21_T2V", _WAN_14B, (16, 13, 60, 104), (512, 4096), ()),  # 832x480, 49 frames
    "wan_4_blocks": TinyFamily("WAN21_T2V", {**_WAN_14B, "num_layers": 4}, (16, 5, 60, 104), (512, 4096), ()),  # 17
    "minimax_h3": TinyFamily("MiniMaxH3", _H3_PRUNED, (24, 7, 30, 30), (512, 5120), ()),  # 480x480, 22 frames
}


def write_model(subject: TinyFamily, path: Path) -> float:
    """A hollow file; random_weights fills what is read of it. GB of the weights."""
    config = getattr(comfy.supported_models, subject.config_class)(dict(subject.unet_config))
    empty = config.get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
    return write_hollow(path, {name: tuple(like.shape) for name, like in empty.items()}) / 1e9


def encode(subject: TinyFamily, folder: Path) -> Path:
    """One sample as core's lists would be cached: only with one, the next batch of each way is what it read ahead."""
    latents = {"samples": torch.randn(1, *subject.latent, generator=torch.Generator().manual_seed(1))}
    return save_encoded(read_pairs([latents], [subject.condition(1)]), CacheStore(folder / "cache"))


@contextmanager
def native_trainer(subject: TinyFamily, path: Path, **sections: Any) -> Iterator[tuple[Trainer, TrainingPlan | None]]:
    """A job on the file, ready for its first step, and its plan. sections: of the job, beside what all jobs have."""
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "family": "comfyui", "dtype": DTYPE},
        "split": {"devices": [str(DEVICE)], "blocks_without_checkpointing": [0]},
        "lora": {"rank": 16, "alpha": 16.0},
        "data": {"encoded": str(encode(subject, path.parent))},
        "train": {"steps": 1000},
        "output": {"folder": str(path.parent / "run"), "tensorboard": False},
    }
    job = make_job({key: settings.get(key, {}) | sections.get(key, {}) for key in settings | sections})
    with small_sizes(subject), native_training(), ExitStack() as cleanup:
        info = read_native(path, DTYPE)
        start = time.perf_counter()
        in_host = OPTIONS.tiny or OPTIONS.card_gb  # a card that is full has no room for them
        cleanup.enter_context(random_weights(info, CPU if in_host else CARDS[0]))
        plan = check_job(job, info=info)
        events = cleanup.enter_context(EventLog(Path(job.output.folder)))
        planned = time.perf_counter()
        trainer = build_trainer(plan, {}, cache_job(plan, events), events, cleanup)
        say(f"planned in {planned - start:.1f} s, loaded in {time.perf_counter() - planned:.1f} s")
        yield trainer, plan.training


class _WhenNeeded(CachedSamples):
    """Reads files when their batch is loaded."""

    def read_ahead(self, batch: Batch) -> None:
        pass


def sources(trainer: Trainer) -> dict[str, CachedSamples]:
    """Where a step's samples come from, by the name of the way."""
    data = trainer.train_data
    parts = {each.name: getattr(data, each.name) for each in dataclasses.fields(data)}
    entries = {key: data.store.get(key) or {} for key in sorted(data.keys())}
    return {
        "native": CachedSamples(**{**parts, "store": MemoryStore(entries), "read": {}}),
        "native, files read ahead": CachedSamples(**{**parts, "read": {}}),
        "native, files read when needed": _WhenNeeded(**{**parts, "read": {}}),
    }


def _reading(trainer: Trainer, data: CachedSamples) -> float:
    trainer.train_data = data
    return timed(trainer)


def timed(trainer: Trainer) -> float:
    synchronize(CARDS)
    start = time.perf_counter()
    trainer.train_step(1e-5)
    synchronize(CARDS)
    trainer.step += 1
    return time.perf_counter() - start


@contextmanager
def unguarded(trainer: Trainer) -> Iterator[None]:
    """Blocks with their own forwards."""
    model, _ = trainer.runner.replica_for(0)
    guards = {module: module.forward for module in model.modules() if isinstance(module.forward, InPlaceGuard)}
    for module in guards:
        del module.forward
    try:
        yield
    finally:
        for module, guard in guards.items():
            module.forward = guard


def forward_cost(trainer: Trainer, rounds: int) -> dict[str, Any]:
    """Milliseconds of a block's forward with gradients, of each class of block: [with the guard, without, calls].

    Medians of calls in turns with the arguments that a step gives. calls: in one step, recomputation included.
    """
    model, _ = trainer.runner.replica_for(0)
    guards = [module.forward for module in model.modules() if isinstance(module.forward, InPlaceGuard)]
    calls: dict[str, list[tuple[InPlaceGuard, Any, Any]]] = {}

    def note(guard: InPlaceGuard) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tensors, frame = taken_out((args, kwargs), guard.passed_by)
            seen = calls.setdefault(type(guard.block).__name__, [])
            seen.append((guard, None, None) if seen else (guard, [_copy(each) for each in tensors], frame))
            return guard(*args, **kwargs)

        return forward

    for guard in guards:
        guard.block.forward = note(guard)
    try:
        timed(trainer)
    finally:
        for guard in guards:
            guard.block.forward = guard
    found = {}
    for name, seen in calls.items():
        guard, tensors, frame = seen[0]
        ways = guard, functools.partial(type(guard.block).forward, guard.block)
        pairs = [[_forward_ms(way, tensors, frame, guard.passed_by) for way in ways] for _ in range(rounds)]
        found[name] = [*(statistics.median(each) for each in zip(*pairs[1:], strict=True)), len(seen)]
    return found


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _forward_ms(way: Any, tensors: list[torch.Tensor], frame: Any, passed_by: tuple[str, ...]) -> float:
    """Of one call whose arguments are its own, no leaves of the graph."""
    args, kwargs = put_back(frame, [tensor.clone() for tensor in tensors], passed_by)
    with torch.enable_grad(), sound_attention():
        synchronize(CARDS)
        start = time.perf_counter()
        output = way(*args, **kwargs)
        synchronize(CARDS)
        taken = time.perf_counter() - start
        del output
    return 1000 * taken


def measure(name: str) -> dict[str, Any]:
    """One subject, all ways in turns."""
    subject = FAMILIES[name] if OPTIONS.tiny else SUBJECTS[name]
    path = OPTIONS.folder / name / "model.safetensors"
    found: dict[str, Any] = {"file_gb": write_model(subject, path), "ratios": {}}
    times: dict[str, list[float]] = {}
    try:
        with native_trainer(subject, path) as (trainer, plan), ExitStack() as cleanup:
            forecast = max((each.allocated for each in plan.devices), default=0) if plan is not None else 0
            path.unlink()
            say(f"{name}: loaded")
            peak = 1e9 * max(_peaks(lambda: timed(trainer)), default=0.0)
            found |= {"peak_gb": peak / 1e9, "forecast_gb": forecast / 1e9, "lora_parameters": _num_trained(trainer)}
            found["ratios"]["forecast over measured peak"] = forecast / peak if peak and forecast else None
            found["forward_ms"] = forward_cost(trainer, 4 * OPTIONS.rounds)
            ways = {way: functools.partial(_reading, trainer, data) for way, data in sources(trainer).items()}
            ways["without the guard"] = lambda: _without(trainer)
            if name == "flux2" and (OPTIONS.ways is None or any(way.startswith("diffusers") for way in OPTIONS.ways)):
                own = _diffusers(subject, cleanup)
                found["lora_parameters_diffusers"] = _num_trained(own)
                ways["diffusers"] = lambda: timed(own)
                _add_compiled(ways, "diffusers", own, cleanup)
            _add_compiled(ways, "native", trainer, cleanup)
            _take_turns(ways, times, found)
    finally:
        path.unlink(missing_ok=True)
    found["seconds per sample"] = {way: statistics.median(each) for way, each in times.items()}
    found["all seconds"] = times
    for way, each in times.items():
        if way != "native":
            found["ratios"][f"native over {way}"] = statistics.median(
                own / other for own, other in zip(times["native"], each, strict=True)
            )
    return found


# ---- over several cards


def measure_on_cards(name: str) -> dict[str, Any]:
    """One subject over all cards, its ways in turns."""
    subject = FAMILIES[name] if OPTIONS.tiny else SUBJECTS[name] if name != "flux2" else WHOLE_FLUX2
    path = OPTIONS.folder / name / "model.safetensors"
    found: dict[str, Any] = {"file_gb": write_model(subject, path), "ratios": {}}
    capped = OPTIONS.card_gb is not None
    sections: dict[str, dict[str, Any]] = {
        "split": {"devices": list(map(str, CARDS)), "blocks_without_checkpointing": [0] * len(CARDS)},
        "parallel": {"strategy": "pipeline"},
        "train": {"steps": 1000, "gradient_accumulation_steps": OPTIONS.microbatches},
    }
    if capped:
        sections["split"]["blocks_without_checkpointing"] = []
        sections["model"] = {"quantize": OPTIONS.quantize}
    try:
        with _emulation(), ExitStack() as cleanup:
            for card in CARDS if capped else ():
                cleanup.enter_context(limited(card, OPTIONS.card_gb * 1e9))
            trainer, plan = cleanup.enter_context(native_trainer(subject, path, **sections))
            say(f"{name}: loaded")
            found |= _peaks_beside_forecast(trainer, plan)
            say(f"{name}: {found}")  # the rest may not end in time
            model, main_device = trainer.runner.replica_for(0)
            runners = {"usual split": Runner(model, main_device), "pipeline": trainer.runner}
            ways = {way: functools.partial(_run_by, trainer, runner) for way, runner in runners.items()}
            if capped:  # the plan is the pipeline's
                del ways["usual split"]
            times: dict[str, list[float]] = {}
            for number in range(OPTIONS.rounds + 1):
                for way in ways:
                    taken = ways[way]()
                    times.setdefault(way, []).extend([taken] if number else [])  # the first warms up
    finally:
        path.unlink(missing_ok=True)
    found["seconds per sample"] = {way: statistics.median(each) for way, each in times.items() if each}
    found["all seconds"] = times
    for way, each in found["seconds per sample"].items():
        if usual := found["seconds per sample"].get("usual split"):
            found["ratios"][f"usual split over {way}"] = usual / each
    return found


def _emulation() -> AbstractContextManager[None]:
    if not OPTIONS.tiny:
        return nullcontext()
    from devicebridge.tests.comfy.native_steps import cards_of

    return cards_of(make_random_job(split={"devices": list(map(str, CARDS))}))


def _peaks_beside_forecast(trainer: Trainer, plan: TrainingPlan | None, *, is_warm: bool = False) -> dict[str, Any]:
    """Of each card: GB in the second step at most, and what was forecast. is_warm: whether the first was taken."""
    seen = _held_and_peaks(lambda: timed(trainer), is_warm=is_warm)
    peaks = [peak for _, peak in seen]
    forecasts = [each.allocated / 1e9 for each in plan.devices] if plan is not None else []
    over = [forecast / peak for forecast, peak in zip(forecasts, peaks, strict=False)]
    chosen = plan.setting if plan is not None else None
    activations = [peak - held for held, peak in seen]
    return {
        **{"peak_gb": peaks, "forecast_gb": forecasts, "forecast over peak": over},
        **{"activations_gb": activations, "plan": str(chosen)},
    }


def _run_by(trainer: Trainer, runner: Runner) -> float:
    trainer.runner = runner
    return timed(trainer) / trainer.job.train.gradient_accumulation_steps


def measure_together(name: str) -> dict[str, Any]:
    """One microbatch on one card, and on all of them together, in turns."""
    subject = FAMILIES[name] if OPTIONS.tiny else SUBJECTS[name]
    path = OPTIONS.folder / name / "model.safetensors"
    found: dict[str, Any] = {"file_gb": write_model(subject, path), "ratios": {}}
    model = {} if OPTIONS.tiny else {"quantize": OPTIONS.quantize}
    split = {"devices": [str(CARDS[0])], "blocks_without_checkpointing": [0]}
    on_all = {"devices": list(map(str, CARDS)), "blocks_without_checkpointing": [0] * len(CARDS)}
    times: dict[str, list[float]] = {}
    try:
        with _emulation(), ExitStack() as cleanup:
            alone, plan = cleanup.enter_context(native_trainer(subject, path, model=model, split=split))
            wanted_loss, wanted = _loss_and_gradient(alone)
            say(f"{name}: the first step on one card, its kernels chosen")
            found["one card"] = _peaks_beside_forecast(alone, plan, is_warm=True)
            ways = {"one card": functools.partial(timed, alone)}
            for strategy in OPTIONS.together:
                sections = {"model": model, "split": on_all}
                trainer, (loss, gradient) = _together(strategy, subject, path, sections, cleanup, found)
                found[strategy]["loss apart"] = abs(loss / wanted_loss - 1)
                found[strategy]["gradient apart"] = float((gradient - wanted).norm() / wanted.norm())
                say(f"{name}: {found}")  # the rest may not end in time
                link = SlowLink(CARDS)
                link.calibrate()
                trainer.runner.model._side_streams = link
                for gb_per_s in (0.0, *OPTIONS.links):
                    way = f"{strategy}@{link_name(gb_per_s)}" if gb_per_s else strategy
                    ways[way] = functools.partial(_over_link, trainer, link, gb_per_s, way, found)
            for number in range(OPTIONS.rounds):  # all have taken two steps
                if number and elapsed_s() > OPTIONS.budget_s:
                    break
                for way in ways:
                    times.setdefault(way, []).append(ways[way]())
                say(f"{name}: { ({way: round(each[-1], 3) for way, each in times.items()}) } s")
    finally:
        path.unlink(missing_ok=True)
    found["all seconds"] = times
    for way, each in times.items():
        pairs = zip(times["one card"], each, strict=True)
        found["ratios"][f"one card over {way}"] = statistics.median(one / other for one, other in pairs)
    return found


def _loss_and_gradient(trainer: Trainer) -> tuple[float, torch.Tensor]:
    """Of the first step, which is not taken."""
    loss = sum(float(each) for each in trainer.accumulate(1))
    trained = list(trainer.lora.parameters().values())
    gradient = torch.cat([_on_host(each) for each in trained])
    for each in trained:
        each.grad = None
    return loss, gradient


def _on_host(parameter: torch.Tensor) -> torch.Tensor:
    grad = parameter.grad
    return torch.zeros(parameter.numel()) if grad is None else on_cpu(grad).cpu().float().flatten()


def _together(
    strategy: str,
    subject: TinyFamily,
    path: Path,
    sections: dict[str, Any],
    cleanup: ExitStack,
    found: dict[str, Any],
) -> tuple[Trainer, tuple[float, torch.Tensor]]:
    """One microbatch a step, which all cards compute together, beside another model; and its first step."""
    own = {**sections, "parallel": {"strategy": strategy}}
    before = [each["allocated"] for each in memory_in_use(CARDS).values()]
    trainer, plan = cleanup.enter_context(native_trainer(subject, path, **own))
    first = _loss_and_gradient(trainer)
    peaks = _peaks_beside_forecast(trainer, plan, is_warm=True)
    peaks["peak_gb"] = [peak - there for peak, there in zip(peaks["peak_gb"], before, strict=True)]
    found[strategy] = {key: peaks[key] for key in ("peak_gb", "forecast_gb", "activations_gb")}
    whole = max(found["one card"]["activations_gb"], default=0.0)
    found[strategy]["activations over one card"] = [each / whole for each in peaks["activations_gb"]]
    return trainer, first


def _over_link(trainer: Trainer, link: SlowLink, gb_per_s: float, way: str, found: dict[str, Any]) -> float:
    """Seconds of a step with what travels as slow as that."""
    link.gb_per_s = gb_per_s
    try:
        return timed(trainer)
    finally:
        link.gb_per_s, seen = 0.0, link.seen_gb_per_s() if gb_per_s else {}
        found.setdefault("link_gb_per_s", {})[way] = seen


def measure_losses(name: str) -> dict[str, Any]:
    """The losses of so many steps, and how far those of each way are from one card's, of their mean."""
    subject = FAMILIES["wan"] if OPTIONS.tiny else SUBJECTS[name]
    path = OPTIONS.folder / name / "model.safetensors"
    found: dict[str, Any] = {"file_gb": write_model(subject, path)}
    losses: dict[str, torch.Tensor] = {}
    try:
        for way in ("one card", "one card again", *OPTIONS.together, "one card, another LoRA"):
            devices = CARDS if way in OPTIONS.together else CARDS[:1]
            sections: dict[str, dict[str, Any]] = {
                "model": {} if OPTIONS.tiny else {"quantize": OPTIONS.quantize},
                "split": {"devices": list(map(str, devices)), "blocks_without_checkpointing": [0] * len(devices)},
                "parallel": {"strategy": way} if way in OPTIONS.together else {},
            }
            with _emulation(), native_trainer(subject, path, **sections) as (trainer, _):
                if way.endswith("another LoRA"):
                    _start_elsewhere(trainer)
                losses[way] = torch.tensor([_loss_of_step(trainer) for _ in range(OPTIONS.losses)]).double()
            say(f"{name}: {way}: {losses[way][:10].mean():.5f}, at the end {losses[way][-10:].mean():.5f}")
    finally:
        path.unlink(missing_ok=True)
    one = losses["one card"]
    found["losses"] = {way: each.tolist() for way, each in losses.items()}
    found["apart"] = {
        way: {
            "step by step": float((each - one).abs().mean() / one.mean()),
            "mean of all": float(each.mean() / one.mean() - 1),
            "mean of the last ten": float(each[-10:].mean() / one[-10:].mean() - 1),
        }
        for way, each in losses.items()
    }
    return found


def _start_elsewhere(trainer: Trainer) -> None:
    """A LoRA drawn alike, of other numbers: what it multiplies first has its columns in another order."""
    with torch.no_grad():
        for parameter in trainer.lora.parameters().values():
            parameter.copy_(parameter.flip(-1))


def _loss_of_step(trainer: Trainer) -> float:
    loss = trainer.train_step(2e-4)
    trainer.step += 1
    return loss


def _add_compiled(ways: dict[str, Callable[[], float]], way: str, trainer: Trainer, cleanup: ExitStack) -> None:
    """A way more, with this trainer's blocks compiled; in the others they are not."""
    handle = apply_compile(trainer.runner.replica_for(0)[0], trainer.objective.family)
    cleanup.callback(handle.remove)
    own = ways[way]
    for name, run in list(ways.items()):
        ways[name] = functools.partial(_uncompiled, handle, run)
    ways[f"{way}, compiled"] = own


def _uncompiled(handle: CompiledBlocks, run: Callable[[], float]) -> float:
    with handle.paused():
        return run()


def _num_trained(trainer: Trainer) -> int:
    return sum(each.numel() for each in trainer.lora.parameters().values())


def _take_turns(ways: dict[str, Callable[[], float]], times: dict[str, list[float]], found: dict[str, Any]) -> None:
    ways = {way: run for way, run in ways.items() if way in ("native", *(OPTIONS.ways or ways))}
    for number in range(OPTIONS.rounds + 2):  # the first two warm up
        if number > _FEWEST and elapsed_s() > OPTIONS.budget_s:
            break
        for way in list(ways):
            reset_peaks(CARDS)
            before = memory_in_use(CARDS)
            try:
                taken = ways[way]()
            except (RuntimeError, ValueError) as error:
                found.setdefault("cannot", {})[way] = first_line(error)
                del ways[way]
                times.pop(way, None)
                continue
            if number == 0:
                say(f"{way}: the first step took {taken:.1f} s")
            if number > 1:
                times.setdefault(way, []).append(taken)
            taken_gb = [each["peak"] - before[card]["allocated"] for card, each in memory_in_use(CARDS).items()]
            found.setdefault("gb_of_a_step", {})[way] = max(taken_gb, default=0.0)


def _peaks(step: Callable[[], float], *, is_warm: bool = False) -> list[float]:
    """GB of each card that the second step takes at most; [] on the CPU."""
    return [peak for _, peak in _held_and_peaks(step, is_warm=is_warm)]


def _held_and_peaks(step: Callable[[], float], *, is_warm: bool) -> list[tuple[float, float]]:
    """GB of each card before the second step, and at most in it."""
    if not is_warm:
        step()
    reset_peaks(CARDS)
    held = [each["allocated"] for each in memory_in_use(CARDS).values()]
    step()
    return [(before, each["peak"]) for before, each in zip(held, memory_in_use(CARDS).values(), strict=True)]


def _without(trainer: Trainer) -> float:
    with unguarded(trainer):
        return timed(trainer)


def _diffusers(subject: TinyFamily, cleanup: ExitStack) -> Trainer:
    """The pack's own FLUX.2 with as many blocks, on the same card."""
    changes = TINY_CONFIG if OPTIONS.tiny else {}
    layers = (subject.unet_config["depth"], subject.unet_config["depth_single_blocks"])
    config = make_config(layers, **{name: each for name, each in changes.items() if name not in _NUM_LAYERS})
    built = make_random_model(config, plan_devices(config, [DEVICE]), "bf16")
    cleanup.callback(built.split.remove)
    job = make_random_job(lora={"rank": 16, "alpha": 16.0}, model={"path": "random weights", "dtype": "bfloat16"})
    samples = make_picture_samples(config, 64 if OPTIONS.tiny else 512, is_tiny=OPTIONS.tiny)
    return make_trainer(built, attach_lora(built, job), job, samples)


def main() -> None:
    report: dict[str, Any] = {
        **describe_run("diffusers", "peft", "transformers"),
        "comfyui": comfyui_version.__version__,
        "subjects": {},
    }
    for name in OPTIONS.subject:
        if elapsed_s() > OPTIONS.budget_s:
            say(f"{name}: no time left")
            continue
        try:
            together = measure_losses if OPTIONS.losses else measure_together
            ways = together if OPTIONS.together else measure if OPTIONS.cards == 1 else measure_on_cards
            report["subjects"][name] = ways(name)
        except Exception as error:
            traceback.print_exc()
            report["subjects"][name] = {"failed": first_line(error)}
        say(f"{name}: {report['subjects'][name]}")
        write_json(report, OPTIONS.out)
    print_or_write(report, OPTIONS.out)


if __name__ == "__main__":
    main()
