"""Seconds per sample of LoRA training on models that ComfyUI builds, on one GPU, and what the parts of that path cost.

    python benchmarks/native_training.py --comfyui ~/ComfyUI [--subject flux2 z_image sdxl qwen_image] [--budget-s 400]
                                         [--out results.json] [--tiny]

Random weights in published sizes, written to --folder as one file each, which the pack then reads as it reads a user's.
FLUX.2 has half of its blocks, so that its file and two models fit. Ways of a subject take turns, step by step:

- "native": ComfyUI's own class, every block recomputed.
- "without the guard": the same blocks as they are, not watched for what they write in place; times
  alone mean something, and only where such a block can be computed again at all.
- "diffusers": the pack's own family with the same sizes; FLUX.2 alone.

bf16, LoRA rank 16, batch 1, 512 x 512 pixels, one micro-batch a step. Ratios come first. "forecast" is the planner's
peak of the native job's card over the measured one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", default=os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI"))
    parser.add_argument("--subject", nargs="+", default=["flux2", "z_image", "sdxl"])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/native_training"))
    parser.add_argument("--rounds", type=int, default=5)
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

import statistics  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Callable, Iterator, Mapping  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import comfy.supported_models  # noqa: E402
import comfyui_version  # noqa: E402
import torch  # noqa: E402
from devicebridge.config.job import make_job  # noqa: E402
from devicebridge.encoding.comfy_data import read_pairs  # noqa: E402
from devicebridge.encoding.encoded import save_encoded  # noqa: E402
from devicebridge.encoding.store import CacheStore  # noqa: E402
from devicebridge.events import EventLog, first_line  # noqa: E402
from devicebridge.jobs.build import build_trainer  # noqa: E402
from devicebridge.jobs.encode_job import cache_job  # noqa: E402
from devicebridge.jobs.job import check_job  # noqa: E402
from devicebridge.nodes.host.native.context import native_training  # noqa: E402
from devicebridge.nodes.host.native.source import read_native  # noqa: E402
from devicebridge.parallel.offload.in_place import InPlaceGuard  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from provenance import describe_run, elapsed_s, print_or_write, say, write_json  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

DEVICE = torch.device("cpu" if OPTIONS.tiny else "cuda:0")
_FLUX2 = {
    **{"image_model": "flux2", "in_channels": 128, "out_channels": 128, "context_in_dim": 15360, "hidden_size": 6144},
    **{"mlp_ratio": 3.0, "num_heads": 48, "depth": 4, "depth_single_blocks": 24, "axes_dim": [32, 32, 32, 32]},
    **{
        "theta": 2000,
        "patch_size": 1,
        "qkv_bias": False,
        "guidance_embed": True,
        "txt_ids_dims": [3],
        "yak_mlp": False,
    },
    **{"global_modulation": True, "mlp_silu_act": True, "ops_bias": False, "vec_in_dim": None, "txt_norm": False},
}
_Z_IMAGE = {
    **{"image_model": "lumina2", "patch_size": 2, "in_channels": 16, "qk_norm": True, "dim": 3840, "n_layers": 30},
    **{"cap_feat_dim": 2560, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]},
    **{"rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0},
    **{"pad_tokens_multiple": 32},
}
_SDXL = {
    **{"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "use_checkpoint": False},
    **{"use_spatial_transformer": True, "legacy": False, "use_temporal_resblock": False, "num_res_blocks": [2, 2, 2]},
    **{"use_temporal_attention": False, "channel_mult": [1, 2, 4], "transformer_depth": [0, 0, 2, 2, 10, 10]},
    **{"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10},
    **{"use_linear_in_transformer": True, "context_dim": 2048, "num_classes": "sequential", "adm_in_channels": 2816},
    **{"num_head_channels": 64, "num_heads": -1},
}
_QWEN = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60}


@dataclass(frozen=True)
class Subject:
    """A published architecture. latent: without the batch; text: tokens and width; tiny: what is smaller in --tiny."""

    config_class: str
    unet_config: Mapping[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    pooled: int = 0
    tiny: Mapping[str, Any] = ()  # type: ignore[assignment]


SUBJECTS = {
    "flux2": Subject(
        "Flux2",
        _FLUX2,
        (128, 32, 32),
        (512, 15360),
        tiny={"hidden_size": 256, "num_heads": 2, "depth_single_blocks": 4},
    ),
    "z_image": Subject("ZImage", _Z_IMAGE, (16, 64, 64), (512, 2560), tiny={"n_layers": 2}),
    "sdxl": Subject("SDXL", _SDXL, (4, 64, 64), (77, 2048), pooled=1280),
    "qwen_image": Subject("QwenImage", _QWEN, (16, 1, 64, 64), (512, 3584), tiny={"num_layers": 2}),
}


def write_model(subject: Subject, path: Path) -> None:
    """Random bf16 weights as one file; norms are around one."""
    changes = dict(subject.tiny) if OPTIONS.tiny else {}
    config = getattr(comfy.supported_models, subject.config_class)({**subject.unet_config, **changes})
    empty = config.get_model({}, "", device=torch.device("meta")).diffusion_model.state_dict()
    generator, weights = torch.Generator(DEVICE).manual_seed(0), {}
    for name, like in empty.items():
        drawn = torch.empty(like.shape, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02, generator=generator)
        weights[name] = (drawn + 1 if like.ndim == 1 and name.endswith(("weight", "scale")) else drawn).cpu()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, path)


def encode(subject: Subject, folder: Path) -> Path:
    """Two samples as core's lists would be cached."""
    generator = torch.Generator().manual_seed(1)
    latents = [{"samples": torch.randn(1, *subject.latent, generator=generator)} for _ in range(2)]
    options = {"pooled_output": torch.randn(1, subject.pooled, generator=generator)} if subject.pooled else {}
    conds = [[[torch.randn(1, *subject.text, generator=generator), dict(options)]] for _ in range(2)]
    return save_encoded(read_pairs(latents, conds), CacheStore(folder / "cache"))


@contextmanager
def native_trainer(subject: Subject, path: Path) -> Iterator[tuple[Trainer, int]]:
    """A job on the file, ready for its first step; and the planner's peak in bytes, 0 without one."""
    job = make_job(
        {
            "model": {"path": str(path), "family": "comfyui", "dtype": "bfloat16"},
            "split": {"devices": [str(DEVICE)]},
            "lora": {"rank": 16},
            "data": {"encoded": str(encode(subject, path.parent))},
            "train": {"steps": 1000},
            "output": {"folder": str(path.parent / "run"), "tensorboard": False},
        }
    )
    with native_training(), ExitStack() as cleanup:
        info = read_native(path, "bfloat16")
        plan = check_job(job, info=info)
        events = cleanup.enter_context(EventLog(Path(job.output.folder)))
        trainer = build_trainer(plan, {}, cache_job(plan, events), events, cleanup)
        devices = plan.training.devices if plan.training is not None else ()
        yield trainer, max((each.peak_bytes for each in devices), default=0)


def timed(trainer: Trainer) -> float:
    _synchronize()
    start = time.perf_counter()
    trainer.train_step(1e-5)
    _synchronize()
    trainer.step += 1
    return time.perf_counter() - start


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


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


def measure(name: str) -> dict[str, Any]:
    """One subject, all ways in turns."""
    subject, path = SUBJECTS[name], OPTIONS.folder / name / "model.safetensors"
    write_model(subject, path)
    say(f"{name}: {path.stat().st_size / 1e9:.1f} GB written")
    found: dict[str, Any] = {"ratios": {}, "parameters_gb": path.stat().st_size / 1e9}
    times: dict[str, list[float]] = {}
    try:
        with native_trainer(subject, path) as (trainer, forecast), ExitStack() as cleanup:
            say(f"{name}: loaded")
            ways: dict[str, Callable[[], float]] = {"native": lambda: timed(trainer)}
            peak = _peak(ways["native"])
            found |= {"peak_gb": peak / 1e9, "forecast_gb": forecast / 1e9}
            found["ratios"]["forecast over measured peak"] = forecast / peak if peak and forecast else None
            ways["without the guard"] = lambda: _without(trainer)
            if name == "flux2" and not OPTIONS.tiny:
                ways["diffusers"] = _diffusers(cleanup)
            _take_turns(ways, times, found)
    finally:
        path.unlink(missing_ok=True)
    found["seconds per sample"] = {way: statistics.median(each) for way, each in times.items()}
    for way, each in times.items():
        if way != "native":
            found["ratios"][f"native over {way}"] = statistics.median(
                own / other for own, other in zip(times["native"], each, strict=True)
            )
    return found


def _take_turns(ways: dict[str, Callable[[], float]], times: dict[str, list[float]], found: dict[str, Any]) -> None:
    for number in range(OPTIONS.rounds + 1):  # the first is a warm-up
        for way in list(ways):
            try:
                taken = ways[way]()
            except (RuntimeError, ValueError) as error:
                found.setdefault("cannot", {})[way] = first_line(error)
                del ways[way]
                times.pop(way, None)
                continue
            if number:
                times.setdefault(way, []).append(taken)


def _peak(step: Callable[[], float]) -> int:
    """Bytes that the second step takes at most; 0 on the CPU."""
    step()
    if DEVICE.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(DEVICE)
    step()
    return torch.cuda.max_memory_allocated(DEVICE)


def _without(trainer: Trainer) -> float:
    with unguarded(trainer):
        return timed(trainer)


def _diffusers(cleanup: ExitStack) -> Callable[[], float]:
    """The pack's own FLUX.2 with as many blocks, on the same card."""
    from random_job import (
        attach_lora,
        make_config,
        make_picture_samples,
        make_random_job,
        make_random_model,
        make_trainer,
        plan_devices,
    )

    config = make_config((4, 24))
    built = make_random_model(config, plan_devices(config, [DEVICE]), "bf16")
    job = make_random_job(lora={"rank": 16, "alpha": 16}, model={"path": "random weights", "dtype": "bfloat16"})
    trainer = make_trainer(built, attach_lora(built, job), job, make_picture_samples(config, 512, is_tiny=False))
    cleanup.callback(built.split.remove)
    return lambda: timed(trainer)


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
            report["subjects"][name] = measure(name)
        except Exception as error:
            traceback.print_exc()
            report["subjects"][name] = {"failed": first_line(error)}
        say(f"{name}: {report['subjects'][name]}")
        write_json(report, OPTIONS.out)
    print_or_write(report, OPTIONS.out)


if __name__ == "__main__":
    main()
