"""One process with ComfyUI's Python: what is read off tiny models of ComfyUI's own; run by test_native_reading.py.

Takes ComfyUI's folder, a folder for files, 1 for all builds, and names of builds. Prints one line of JSON:
{"tokens": {build: [tokens per cell as read, as its blocks are given]}, "needs": {build: what its CONDITIONING must
hold}, "text": {build: what is wrong with the text that a plan takes before captions are encoded}, "plans": {build:
why it has none}, "refused": {build: why, "" if it is not}, "full": {file of full size: what is wrong with its plan},
"experts": {case: [least and largest noise level drawn, difference from all levels cut to these, what is warned of]},
"ranges": {build: [least and largest noise level drawn]}, "float16": {build: difference from float32, or a refusal}}.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.supported_models
import torch
from devicebridge.checkpoints.load import load_transformer
from devicebridge.checkpoints.weight_file import open_weights, read_rows
from devicebridge.config.job import ObjectiveConfig
from devicebridge.encoding.comfy_data import read_conditioning
from devicebridge.families.comfy.inputs import COND, POOLED
from devicebridge.families.comfy.text_sizes import usual_text
from devicebridge.jobs import checks
from devicebridge.jobs.job import check_job
from devicebridge.jobs.read_job import read_job
from devicebridge.jobs.resolve import Machine, resolve
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.parallel.block_lists import placed_blocks
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.dry_run import NoForecast
from devicebridge.tests.comfy.full_sizes import QUICK, plan_published
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import Bench, forecast, one_line
from devicebridge.tests.comfy.other_families import OTHERS, joined, other_sizes
from devicebridge.tests.comfy.tiny_checkpoints import TinyFamily, make_weights, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained, small_adapter
from devicebridge.training.objective import make_noise_schedule, noise_latents, predict

FOLDER, IS_LONG, *NEEDS = sys.argv[2:]

CPU = torch.device("cpu")
PACKED = ("Ideogram 4", "Lens", "MageFlow", "PixArt", "Cosmos 1", "HunyuanImage 2.1")
PATCHED = ("FLUX.1", "LTX-Video", "ERNIE-Image", "Krea 2", "Cosmos-Predict2", "Wan 2.1 T2V, 2.2 T2V 14B")
# Z-Image pads its tokens.
LONG = ("FLUX.2", "Chroma", "Qwen-Image", "Lumina 2", "SD 3.5", "HunyuanVideo", "HunyuanVideo 1.5", "Anima")
PLANNED = ("HunyuanDiT", "Wan VACE", "Wan Dancer", "Cosmos 1", "Anima")
REFUSED = ("SVD", "SD x4 upscaler", "SD 1.5 InstructPix2Pix", "Stable Cascade B", "Stable Cascade C")
RANGED = ("FLUX.1", "Wan 2.1 T2V, 2.2 T2V 14B", "Cosmos-Predict2", "SD 1.5 inpainting", "SD 2 v-prediction")
_TEXT, _IMAGE, _OTHER = "Wan 2.1 T2V, 2.2 T2V 14B", "Wan 2.2 I2V 14B", "Wan 2.2 TI2V 5B"
EXPERTS = (  # build, file, which one
    (_TEXT, "wan2.2_t2v_high_noise.safetensors", "high_noise"),
    (_TEXT, "wan2.2_t2v_low_noise.safetensors", "low_noise"),
    (_TEXT, "wan2.2_t2v_low_noise.safetensors", "high_noise"),
    (_TEXT, "wan2.2_t2v_low_noise.safetensors", ""),
    (_TEXT, "wan2.1_t2v.safetensors", ""),
    (_IMAGE, "image_to_video.safetensors", ""),
    (_IMAGE, "image_to_video.safetensors", "high_noise"),
    (_IMAGE, "image_to_video.safetensors", "low_noise"),
    (_OTHER, "wan2.2_ti2v_5B.safetensors", ""),
    (_OTHER, "wan2.2_ti2v_5B.safetensors", "low_noise"),
)
BUILDS = {**TRAINED, **OTHERS}
# A build of each class; the connectors of LTX-2's other one fit no text encoder, and ACE-Step's music comes with text.
_OF_CLASSES = {family.config_class: name for name, family in TRAINED.items() if not name.startswith("ACE")}
BEFORE_CAPTIONS = {**_OF_CLASSES, "LTXAV": "LTX-2 unprocessed", "LTX-2.3": "LTX-2.3 with a voice"}.values()
TEXTS = ("FLUX.1", "Wan 2.1 T2V, 2.2 T2V 14B", "SDXL", "HiDream-I1", "LTX-2 unprocessed", "Krea 2")  # of a short run


def read(name: str, family: TinyFamily) -> Any:
    path = Path(FOLDER) / f"{name.replace(' ', '_')}.safetensors"
    return read_native(save_trained(name, path, family), "float32")


def tokens_per_cell(name: str) -> list[float]:
    """As read, and by how many tokens the largest output of a block grows with a latent of twice the width."""
    family = BUILDS[name]
    wider = dataclasses.replace(family, latent=(*family.latent[:-1], 2 * family.latent[-1]))
    with small_sizes(family):
        info = read(name, family)
        model = load_transformer(info, lambda name: CPU, torch.float32)
        narrow, wide = (_largest(info, model, each) for each in (family, wider))
    cells = [math.prod(each.latent[1:]) for each in (family, wider)]
    return [info.family.latent.num_tokens_per_cell, (wide - narrow) / (cells[1] - cells[0])]


def needs(name: str) -> list[str]:
    with small_sizes(BUILDS[name]):
        return list(read(name, BUILDS[name]).family.comfy.needs)


def text_fault(name: str) -> str:
    """What is wrong with the text that a plan takes before captions are encoded; "" where a forward takes it, too."""
    family = BUILDS[name]
    with small_sizes(family):
        info = read(name, family)
        model = load_transformer(info, lambda name: CPU, torch.float32)
        text = {name: torch.randn(each.shape) if each.is_meta else each for name, each in usual_text(model).items()}
        widths = {each: text[each].shape[-1] for each in (COND, POOLED) if each in text}
        if widths.get(COND) != family.context[1] or widths.get(POOLED, 0) not in (0, 1, family.pooled):
            return f"{widths} in the place of {family.context[1]}, {family.pooled}"
        try:
            _said(info, model, family.latent, text)
        except Exception as error:
            return one_line(error)
    return ""


def refusal(name: str) -> str:
    try:
        with small_sizes(BUILDS[name]):
            read(name, BUILDS[name])
    except ValueError as error:
        return str(error)
    return ""


def cut_apart(name: str, family: TinyFamily) -> list[str]:
    """Which tensors are not those of the model where its file is as it was published, whole or a few rows of each."""
    family = dataclasses.replace(family, as_published=joined) if name.startswith("Stable Cascade") else family
    with small_sizes(family):
        info, wanted = read(f"{name} as published", family), make_weights(family)
        found = load_transformer(info, lambda name: CPU, torch.float32).state_dict()
    wrong = [each for each in info.tensors if not torch.equal(found[each], wanted[each])]
    cut = [each for each, record in info.tensors.items() if record.pieces or record.rows]
    assert cut, "nothing is cut"
    for each in cut:
        end = len(wanted[each]) - 1
        with open_weights(info.tensors[each].file) as reader:
            rows = read_rows(reader, info.tensors[each], 1, end)
        wrong += [] if torch.equal(rows, wanted[each][1:end]) else [f"rows of {each}"]
    return wrong


def summed(name: str) -> str:
    own = comfy.supported_models.Stable_Cascade_C.process_unet_state_dict

    def process(config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {each: t + 1 if each.endswith("to_q.weight") else t for each, t in own(config, tensors).items()}

    with mock.patch.object(comfy.supported_models.Stable_Cascade_C, "process_unet_state_dict", process):
        return refusal(name)


def plan(name: str) -> str:
    """What a plan says against this build; that it is trained without one, then."""
    bench = Bench(name, Path(FOLDER) / f"plan of {name}", family=BUILDS[name])
    try:
        forecast(bench)
    except NoForecast as error:
        with small_sizes(bench.family), native_training():
            read = read_job(bench.job("without", {}), bench.info)
            machine = Machine((CPU,), parse_cards("1x24GB"))
            assert resolve(read.job, read.subject, machine).training is None
        return str(error)
    return ""


def expert(name: str, file: str, asked: str) -> list[Any]:
    bench = Bench(name, Path(FOLDER) / f"{file} {asked}", save_trained(name, Path(FOLDER) / file, BUILDS[name]))
    warned: list[str] = []
    with small_sizes(bench.family):
        whole = check_job(bench.job("all", {}), info=bench.info)
        try:
            with mock.patch.object(checks._log, "warning", lambda line, *values: warned.append(line % values)):
                plan = check_job(bench.job("expert", {"objective": {"expert": asked}}), info=bench.info)
        except ValueError as error:
            return [str(error)]
    levels, every = _levels(plan, plan.schedule), _levels(plan, whole.schedule)
    kept = every[(every >= levels.min() - 1e-6) & (every <= levels.max() + 1e-6)]
    grid = torch.linspace(0.1, 0.9, 9)
    apart = float((levels.quantile(grid) - kept.quantile(grid)).abs().max())
    return [float(levels.min()), float(levels.max()), apart, "; ".join(warned)]


def ranged(name: str) -> list[float]:
    """Least and largest noise level that are drawn of 0.3 to 0.6, as ComfyUI's own timesteps have them, in 0..1."""
    with small_sizes(BUILDS[name]):
        family = read(name, BUILDS[name]).family
    schedule = make_noise_schedule(ObjectiveConfig(lowest_noise=0.3, highest_noise=0.6), family, family.variants[0])
    times = schedule.sigmas(torch.linspace(0, 1, 4003)[1:-1], 64)
    sampling, zeros = family.host.sampling, torch.zeros(len(times), 1, 1, 1, 1)
    sigmas = noise_latents(family, zeros, zeros, times).sigmas
    most = 1000 if hasattr(sampling, "num_timesteps") else getattr(sampling, "multiplier", 1)
    levels = sampling.timestep(sigmas).double() / most
    return [float(levels.min()), float(levels.max())]


def in_float16(name: str) -> float | str:
    """How far what a build says in float16 is from what it says in float32; why it is refused."""
    family, kinds = BUILDS[name], (torch.float32, torch.float16)
    with small_sizes(family):
        info = read(name, family)
        try:
            host = info.family.host.computing_in(torch.float16)
        except ValueError as error:
            return str(error)
        half = dataclasses.replace(info, family=dataclasses.replace(info.family, host=host))
        text, said = read_conditioning(family.condition(1), "text", keeps_all=True), []
        for each, dtype in zip((info, half), kinds, strict=True):
            model = load_transformer(each, lambda name: CPU, dtype)
            assert any(each.dtype is dtype for each in model.parameters())
            torch.manual_seed(5)
            said.append(_said(each, model, family.latent, text).double())
    return float((said[1] - said[0]).norm() / said[0].norm())


def _levels(plan: Any, schedule: Any) -> torch.Tensor:
    times = schedule.sigmas(torch.linspace(0, 1, 4003)[1:-1], 64)
    one = torch.ones(len(times), 1, 1, 1, 1)
    made = noise_latents(plan.family, one * 0, one, times)
    assert torch.allclose(made.noisy.flatten(), made.sigmas, atol=1e-6)
    return made.sigmas


@torch.no_grad()
def _said(info: Any, model: Any, latent: tuple[int, ...], text: Mapping[str, torch.Tensor]) -> torch.Tensor:
    noisy = torch.randn(1, latent[0], *((1,) if len(latent) == 3 else ()), *latent[1:])
    given = {name: each[None] for name, each in text.items()}
    return predict(info.family, model, noisy, torch.tensor([0.5]), given, info.variant.training_guidance)


def _largest(info: Any, model: Any, family: TinyFamily) -> int:
    seen: list[int] = []

    def hook(module: Any, given: Any, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        seen.extend(each.numel() // each.shape[-1] for each in outputs if isinstance(each, torch.Tensor))

    hooks = [model.get_submodule(each).register_forward_hook(hook) for each in placed_blocks(model, info.family.native)]
    _said(info, model, family.latent, read_conditioning(family.condition(1), "text", keeps_all=True))
    for each in hooks:
        each.remove()
    return max(seen)


if __name__ == "__main__":
    with native_training():
        full = plan_published(Path(FOLDER), *(() if int(IS_LONG) else (QUICK,)))
    with small_adapter(), endless_memory(), other_sizes(), native_training():
        is_long = bool(int(IS_LONG))
        names = (*PATCHED, *PACKED, *LONG) if is_long else (*PATCHED[:3], *PACKED[:3])
        tokens = {name: tokens_per_cell(name) for name in names}
        texts = {name: text_fault(name) for name in (tuple(BEFORE_CAPTIONS) if is_long else TEXTS)}
        plans = {name: plan(name) for name in (PLANNED if is_long else PLANNED[:3])}
        refused = {name: refusal(name) for name in REFUSED}
        cut = {name: cut_apart(name, BUILDS[name]) for name in ("PixelDiT", "Stable Cascade C")}
        refused |= {f"{name} of a file with sums": summed(name) for name in ("Stable Cascade C",)}
        needed = {name: needs(name) for name in NEEDS}
        ranges = {name: ranged(name) for name in RANGED}
        halves = {name: in_float16(name) for name in ("FLUX.1", "Wan 2.1 T2V, 2.2 T2V 14B", "Qwen-Image")}
        experts = {" ".join(case[1:]): expert(*case) for case in EXPERTS}
    found = {"cut": cut, "tokens": tokens, "needs": needed, "text": texts, "plans": plans, "refused": refused}
    found |= {"full": full, "experts": experts, "ranges": ranges, "float16": halves}
    print(json.dumps(found), flush=True)
