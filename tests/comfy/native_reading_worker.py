"""What is read off tiny models of ComfyUI's own; cases of test_native_reading.py."""

import dataclasses
import math
from collections.abc import Mapping
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
from devicebridge.jobs.read_job import read_job, subject_of
from devicebridge.jobs.resolve import Machine, resolve
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.parallel.block_lists import placed_blocks
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.dry_run import NoForecast
from devicebridge.tests.comfy.cases import FOLDER, IS_LONG, case, expect_refusal, refusal, run_cases
from devicebridge.tests.comfy.full_sizes import QUICK, plan_published
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import Bench, forecast
from devicebridge.tests.comfy.other_families import OTHERS, joined, other_sizes
from devicebridge.tests.comfy.tiny_checkpoints import TinyFamily, make_weights, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained, small_adapter
from devicebridge.training.objective import make_noise_schedule, noise_latents, predict

CPU = torch.device("cpu")
PACKED = ("Ideogram 4", "Lens", "MageFlow", "PixArt", "Cosmos 1", "HunyuanImage 2.1")
PATCHED = ("FLUX.1", "LTX-Video", "ERNIE-Image", "Krea 2", "Cosmos-Predict2", "Wan 2.1 T2V, 2.2 T2V 14B")
# Z-Image pads its tokens.
LONG = ("FLUX.2", "Chroma", "Qwen-Image", "Lumina 2", "SD 3.5", "HunyuanVideo", "HunyuanVideo 1.5", "Anima")
PLANNED = ("HunyuanDiT", "Wan VACE", "Wan Dancer", "Cosmos 1", "Anima")
# What the refusal says; () for what is trained.
REFUSED: dict[str, tuple[str, ...]] = {
    "SVD": ("SVD_img2vid is given 4 channels of another picture", "train Wan I2V"),
    "SD x4 upscaler": ("SD_X4Upscaler is given 3 channels of another picture", "draws from text alone"),
    "SD 1.5 InstructPix2Pix": (), "Stable Cascade B": ("stage B draws from what stage C has made", "train stage C"),
    "Stable Cascade C": (),
}  # fmt: skip
_GIVEN, _MASK, _SEEN = "concat_latent_image", "concat_mask", "clip_vision_output"
# As ComfyUI's conditioning nodes for these models give it, but for what its classes do without.
NEEDS = {
    "Cosmos-Predict2 image-to-video": [], "Kandinsky 5": [], "FLUX.1 Fill": [_GIVEN], "HunyuanVideo I2V": [_GIVEN],
    "SkyReels I2V": [_GIVEN], "SD 1.5 inpainting": [_GIVEN, _MASK], "SD 1.5 InstructPix2Pix": [_GIVEN],
    "CogVideoX image-to-video": [_GIVEN], "HunyuanVideo 1.5": [], "Wan 2.1 T2V, 2.2 T2V 14B": [],
    "Wan 2.1 I2V": [_GIVEN, _SEEN], "Wan 2.2 I2V 14B": [_GIVEN], "Wan 2.1 Fun Control": [_GIVEN, _SEEN],
    "Wan 2.2 Fun Control": [_GIVEN], "Wan Dancer": [_GIVEN, _SEEN], "Wan SCAIL": [_SEEN],
}  # fmt: skip
RANGED = ("FLUX.1", "Wan 2.1 T2V, 2.2 T2V 14B", "Cosmos-Predict2", "SD 1.5 inpainting", "SD 2 v-prediction")
_TEXT, _IMAGE, _OTHER = "Wan 2.1 T2V, 2.2 T2V 14B", "Wan 2.2 I2V 14B", "Wan 2.2 TI2V 5B"
_SAYS_NOT = "nothing says which"
# Build, file, which one, least and largest noise level, and what is warned of. Wan's published pairs change at 0.875 of
# the noise, those with an image at 0.9; the model's shift of 8 has no part in it.
EXPERTS = (
    (_TEXT, "wan2.2_t2v_high_noise.safetensors", "high_noise", (0.875, 1.0), ""),
    (_TEXT, "wan2.2_t2v_low_noise.safetensors", "low_noise", (0.0, 0.875), ""),
    (_TEXT, "wan2.2_t2v_low_noise.safetensors", "high_noise", (0.875, 1.0), "seems to be the other one"),
    (_TEXT, "wan2.2_t2v_low_noise.safetensors", "", (0.0, 1.0), _SAYS_NOT),
    (_TEXT, "wan2.1_t2v.safetensors", "", (0.0, 1.0), ""),
    (_IMAGE, "image_to_video.safetensors", "", (0.0, 1.0), _SAYS_NOT),
    (_IMAGE, "image_to_video.safetensors", "high_noise", (0.9, 1.0), ""),
    (_IMAGE, "image_to_video.safetensors", "low_noise", (0.0, 0.9), ""),
    (_OTHER, "wan2.2_ti2v_5B.safetensors", "", (0.0, 1.0), ""),
)
BUILDS = {**TRAINED, **OTHERS}
# A build of each class; the connectors of LTX-2's other one fit no text encoder, and music comes with its text.
_OF_CLASSES = {
    family.config_class: name
    for name, family in TRAINED.items()
    if not (name.startswith("ACE") or family.sound) and hasattr(comfy.supported_models, family.config_class)
}
BEFORE_CAPTIONS = {**_OF_CLASSES, "LTXAV": "LTX-2 unprocessed", "LTX-2.3": "LTX-2.3 with a voice"}.values()
TEXTS = ("FLUX.1", "Wan 2.1 T2V, 2.2 T2V 14B", "SDXL", "HiDream-I1", "LTX-2 unprocessed", "Krea 2")  # of a short run


def read(name: str, family: TinyFamily) -> Any:
    path = FOLDER / f"{name.replace(' ', '_')}.safetensors"
    return read_native(save_trained(name, path, family), "float32")


@case
def as_many_tokens_are_counted_as_blocks_are_given() -> None:
    """As read, and by how many tokens the largest output of a block grows with a latent of twice the width."""
    for name in (*PATCHED, *PACKED, *LONG) if IS_LONG else (*PATCHED[:3], *PACKED[:3]):
        family = BUILDS[name]
        wider = dataclasses.replace(family, latent=(*family.latent[:-1], 2 * family.latent[-1]))
        with small_sizes(family):
            info = read(name, family)
            model = load_transformer(info, lambda name: CPU, torch.float32)
            narrow, wide = (_largest(info, model, each) for each in (family, wider))
        cells = [math.prod(each.latent[1:]) for each in (family, wider)]
        found = (wide - narrow) / (cells[1] - cells[0])
        assert info.family.latent.num_tokens_per_cell == found, name


@case
def a_model_asks_for_what_its_own_code_reads() -> None:
    for name, needs in NEEDS.items():
        with small_sizes(BUILDS[name]):
            assert list(read(name, BUILDS[name]).family.comfy.needs) == needs, name


@case
def a_plan_knows_how_large_a_text_is_before_captions_are_encoded() -> None:
    """A forward takes it, too."""
    for name in BEFORE_CAPTIONS if IS_LONG else TEXTS:
        family = BUILDS[name]
        with small_sizes(family):
            info = read(name, family)
            model = load_transformer(info, lambda name: CPU, torch.float32)
            usual = usual_text(model)
            text = {name: torch.randn(each.shape) if each.is_meta else each for name, each in usual.items()}
            widths = {each: text[each].shape[-1] for each in (COND, POOLED) if each in text}
            assert widths.get(COND) == family.context[1] and widths.get(POOLED, 0) in (0, 1, family.pooled), name
            _said(info, model, family.latent, text)


def _refusal(name: str) -> str:
    with small_sizes(BUILDS[name]):
        return refusal(lambda: read(name, BUILDS[name]))


@case
def what_has_no_data_here_is_refused_by_its_header() -> None:
    for name, words in REFUSED.items():
        said = _refusal(name)
        assert all(word in said for word in words) and bool(said) == bool(words), name
    own = comfy.supported_models.Stable_Cascade_C.process_unet_state_dict

    def process(config: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {each: t + 1 if each.endswith("to_q.weight") else t for each, t in own(config, tensors).items()}

    with mock.patch.object(comfy.supported_models.Stable_Cascade_C, "process_unet_state_dict", process):
        said = _refusal("Stable Cascade C")
    assert "cuts, joins or makes tensors" in said and ".to_q.weight" in said


@case
def what_a_loader_cuts_is_read_as_it_cuts_it() -> None:
    """Files as they were published, whole or a few rows of each tensor."""
    for name in ("PixelDiT", "Stable Cascade C"):
        family = BUILDS[name]
        family = dataclasses.replace(family, as_published=joined) if name.startswith("Stable Cascade") else family
        with small_sizes(family):
            info, wanted = read(f"{name} as published", family), make_weights(family)
            found = load_transformer(info, lambda name: CPU, torch.float32).state_dict()
        assert all(torch.equal(found[each], wanted[each]) for each in info.tensors)
        cut = [each for each, record in info.tensors.items() if record.pieces or record.rows]
        assert cut, "nothing is cut"
        for each in cut:
            end = len(wanted[each]) - 1
            with open_weights(info.tensors[each].file) as reader:
                rows = read_rows(reader, info.tensors[each], 1, end)
            assert torch.equal(rows, wanted[each][1:end]), each


@case
def plans_go_by_what_is_read() -> None:
    """Dancer cuts its music by the sides of a clip. A model that does not run without its skips is planned in words."""
    for name in PLANNED if IS_LONG else PLANNED[:3]:
        bench = Bench(name, FOLDER / f"plan of {name}", family=BUILDS[name])
        if name != "HunyuanDiT":
            forecast(bench)
            continue
        try:
            forecast(bench)
            raise AssertionError("there is a forecast")
        except NoForecast as error:
            said = str(error)
        assert said.startswith("there is no forecast of memory for ComfyUI's HunYuanDiT: its forward does not")
        assert "a step takes about" in said
        with small_sizes(bench.family), native_training():
            job = read_job(bench.job("without", {}), bench.info)
            machine = Machine((CPU,), parse_cards("1x24GB"))
            assert resolve(job.job, subject_of(job), machine).training is None


def _bench(name: str, file: str, asked: str) -> Bench:
    return Bench(name, FOLDER / f"{file} {asked}", save_trained(name, FOLDER / file, BUILDS[name]))


@case
def an_expert_draws_the_noise_levels_of_its_own_as_the_whole_model_would() -> None:
    for name, file, asked, bounds, words in EXPERTS:
        bench, warned = _bench(name, file, asked), list[str]()
        with small_sizes(bench.family):
            whole = check_job(bench.job("all", {}), info=bench.info)
            with mock.patch.object(checks._log, "warning", lambda line, *values: warned.append(line % values)):  # noqa: B023
                plan = check_job(bench.job("expert", {"objective": {"expert": asked}}), info=bench.info)
        levels, every = _levels(plan, plan.schedule), _levels(plan, whole.schedule)
        kept = every[(every >= levels.min() - 1e-6) & (every <= levels.max() + 1e-6)]
        grid = torch.linspace(0.1, 0.9, 9)
        assert _near((float(levels.min()), float(levels.max())), bounds), (file, asked)
        assert float((levels.quantile(grid) - kept.quantile(grid)).abs().max()) < 2e-3, (file, asked)
        said = "; ".join(warned)
        assert (words in said) if words else not said, (file, asked)


@case
def a_model_without_experts_refuses_one() -> None:
    bench = _bench(_OTHER, "wan2.2_ti2v_5B.safetensors", "low_noise")
    job = bench.job("expert", {"objective": {"expert": "low_noise"}})
    with small_sizes(bench.family):
        expect_refusal(
            lambda: check_job(job, info=bench.info),
            'objective.expert = "low_noise" is of Wan 2.2\'s experts',
            "remove the setting",
        )


def _near(found: tuple[float, ...], wanted: tuple[float, ...]) -> bool:
    return all(abs(a - b) < 2e-3 for a, b in zip(found, wanted, strict=True))


@case
def a_range_of_noise_levels_is_the_network_s_own() -> None:
    """Of 0.3 to 0.6, as ComfyUI's own timesteps have them, in 0..1."""
    for name in RANGED:
        with small_sizes(BUILDS[name]):
            family = read(name, BUILDS[name]).family
        asked = ObjectiveConfig(lowest_noise=0.3, highest_noise=0.6)
        schedule = make_noise_schedule(asked, family, family.variants[0])
        times = schedule.sigmas(torch.linspace(0, 1, 4003)[1:-1], 64)
        sampling, zeros = family.host.sampling, torch.zeros(len(times), 1, 1, 1, 1)
        sigmas = noise_latents(family, zeros, zeros, times).sigmas
        most = 1000 if hasattr(sampling, "num_timesteps") else getattr(sampling, "multiplier", 1)
        levels = sampling.timestep(sigmas).double() / most
        assert _near((float(levels.min()), float(levels.max())), (0.3, 0.6)), name


@case
def comfyui_s_own_list_says_which_models_are_computed_in_float16() -> None:
    for name in ("FLUX.1", "Wan 2.1 T2V, 2.2 T2V 14B", "Qwen-Image"):
        family, kinds = BUILDS[name], (torch.float32, torch.float16)
        with small_sizes(family):
            info = read(name, family)
            if name == "Qwen-Image":
                expect_refusal(lambda: info.family.host.computing_in(torch.float16), "QwenImage in torch.float16")  # noqa: B023
                continue
            host = info.family.host.computing_in(torch.float16)
            half = dataclasses.replace(info, family=dataclasses.replace(info.family, host=host))
            text, said = read_conditioning(family.condition(1), "text", keeps_all=True), []
            for each, dtype in zip((info, half), kinds, strict=True):
                model = load_transformer(each, lambda name: CPU, dtype)
                assert any(each.dtype is dtype for each in model.parameters())
                torch.manual_seed(5)
                said.append(_said(each, model, family.latent, text).double())
        assert 1e-6 < float((said[1] - said[0]).norm() / said[0].norm()) < 1e-2, name


@case
def published_models_are_planned_before_captions_are_encoded() -> None:
    """HiDream's experts are chosen by numbers, of which a plan has none, and a UNet's blocks all differ: it says so."""
    full = plan_published(FOLDER, *(() if IS_LONG else (QUICK,)))
    assert len(full) > 1
    without = {name for name in full if name.startswith(("HiDream-I1", "SDXL", "SD 1.5"))}
    assert {name: fault for name, fault in full.items() if fault} == dict.fromkeys(without, "NoForecast")


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
    with small_adapter(), endless_memory(), other_sizes(), native_training():
        run_cases()
