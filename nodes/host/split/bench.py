"""Blocks of published models, at full width with random weights, in ComfyUI's sampler: on one card, and over all."""

from __future__ import annotations

import importlib
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import comfy.model_management as management
import comfy.ops
import comfy.sample
import comfy.sd
import torch

from ....events import first_line
from ....parallel.devices import available_devices, device_title, synchronize
from ....planning.cards import measure_machine
from .model import split_model
from .plan import SplitRequest

_STEPS = 10  # the last ones count: CUDA graphs, which are recorded after some steps, take part
_BUDGET_S = 40.0  # of all models; what does not fit is left out


class Subject(NamedTuple):
    """A published architecture as ComfyUI's class takes it, with a few blocks, and what its sampler is given."""

    name: str
    num_blocks: str  # that kwargs ask for, in words
    module: str
    class_name: str
    kwargs: Mapping[str, Any]
    latent: tuple[int, ...]  # without the batch
    text: tuple[int, int]  # tokens and their width


_FLUX2: dict[str, Any] = {"in_channels": 128, "out_channels": 128, "vec_in_dim": None, "context_in_dim": 15360}
_FLUX2 |= {"hidden_size": 6144, "mlp_ratio": 3.0, "num_heads": 48, "depth": 1, "depth_single_blocks": 1}
_FLUX2 |= {"axes_dim": [32, 32, 32, 32], "theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": True}
_FLUX2 |= {"txt_ids_dims": [3], "global_modulation": True, "mlp_silu_act": True, "ops_bias": False}
_WAN = {"model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 2}
_QWEN = "comfy.ldm.qwen_image.model"
SUBJECTS = (
    Subject("FLUX.2", "1 + 1", "comfy.ldm.flux.model", "Flux", _FLUX2, (128, 64, 64), (512, 15360)),
    Subject("Qwen-Image", "2", _QWEN, "QwenImageTransformer2DModel", {"num_layers": 2}, (16, 1, 128, 128), (256, 3584)),
    Subject("Wan 14B", "2", "comfy.ldm.wan.model", "WanModel", _WAN, (16, 9, 60, 104), (512, 4096)),
)


def measure() -> dict[str, Any]:
    """What all GPUs can do, as plain values."""
    devices = available_devices()
    found: dict[str, Any] = {"torch": torch.__version__, "cards": list(map(device_title, devices)), "blocks": []}
    if devices:
        speed = measure_machine(devices)
        found |= {"flops_per_s": min(speed.flops_per_s), "bytes_per_s": speed.bytes_per_s}
        with torch.inference_mode():
            found["blocks"] = measure_blocks(devices)
    return found


def measure_blocks(devices: Sequence[torch.device], subjects: Sequence[Subject] = SUBJECTS) -> list[dict[str, Any]]:
    """Seconds of a step of each model on the first card, and over all by tokens and by tensor; "why" says what failed.
    "difference" is that of the last latents from one card's, relative to their norm."""
    found, begin = list[dict[str, Any]](), time.perf_counter()
    ways: tuple[Any, ...] = ("tokens", "tensor") if len(devices) > 1 else ()
    for subject in subjects:
        seconds, difference, why = dict[str, float](), dict[str, float](), dict[str, str]()
        facts = {"seconds": seconds, "why": why, "difference": difference}
        found.append({"model": subject.name, "blocks": subject.num_blocks, **facts})
        try:
            model, expected = _load(subject, devices[0]), None
            for way in ("one card", *ways):
                try:
                    if time.perf_counter() - begin > _BUDGET_S:
                        raise RuntimeError(f"{_BUDGET_S:.0f} s were over")
                    shared = split_model(model, SplitRequest(tuple(devices), way=way)) if way in ways else model
                    latents, seconds[way] = _sample(shared, subject, devices)
                    del shared
                except Exception as error:  # of ComfyUI's code or of a card; the others go on
                    why[way] = first_line(error)
                    continue
                if expected is not None:
                    difference[way] = float((latents - expected).norm() / expected.norm())
                expected = latents if expected is None else expected
        except Exception as error:
            why["all"] = first_line(error)
        model = None
        management.unload_all_models()
        management.soft_empty_cache()
    return found


def _load(subject: Subject, device: torch.device) -> Any:
    """A MODEL as ComfyUI's loader makes it of a file with random weights in bfloat16."""
    kind = getattr(importlib.import_module(subject.module), subject.class_name)
    like = kind(**subject.kwargs, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)
    weights = {}
    for name, each in like.state_dict().items():
        drawn = torch.empty(each.shape, dtype=each.dtype, device=device).normal_(0, 0.02)
        is_norm = each.ndim == 1 and "norm" in name and name.endswith(("weight", "scale"))
        weights[name] = drawn + 1 if is_norm else drawn
    model = comfy.sd.load_diffusion_model_state_dict(weights, model_options={"load_device": device})
    if model is None:
        raise RuntimeError(f"this ComfyUI does not recognise {subject.name}")
    return model


def _sample(model: Any, subject: Subject, devices: Sequence[torch.device]) -> tuple[torch.Tensor, float]:
    """The latents that ComfyUI's sampler makes, on the CPU, and seconds between two steps' calls of the model."""
    marks: list[float] = []

    def mark(*_: Any) -> None:
        synchronize(devices)
        marks.append(time.perf_counter())

    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(1, *subject.latent, generator=generator)
    text = [[torch.randn(1, *subject.text, generator=generator), {"guidance": 4.0}]]
    latents = comfy.sample.sample(
        model, noise, _STEPS, 1.0, "euler", "simple", text, text, torch.zeros_like(noise),
        callback=mark, disable_pbar=True, seed=1,
    )  # fmt: skip
    steps = [after - before for before, after in itertools.pairwise(marks)]
    return latents.float().cpu(), statistics.median(steps[-3:])
