"""A LoRA on CLIP text encoders beside that on the UNet: tiny SD 1.5, SD 2 and SDXL; cases of test_text_encoders.py.

References are ComfyUI's own: the stock CLIP's CONDITIONING, its LoRA loader, the stock MODEL's sampling; for gradients
differences of losses.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import comfy.lora
import comfy.model_management
import comfy.sd
import folder_paths
import torch
from devicebridge.cli.native import encoded
from devicebridge.config.job import JobConfig
from devicebridge.encoding.store import CacheStore
from devicebridge.nodes.captions import CacheCaptionsAndLatents
from devicebridge.nodes.host.native import files
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.nodes.host.native.text import encoded as states_of
from devicebridge.nodes.train import TrainLora
from devicebridge.nodes.types import TrainingDataset, TrainingModel
from devicebridge.parallel.ranks.group import ALONE
from devicebridge.tests.clips import save_image
from devicebridge.tests.comfy import native_steps
from devicebridge.tests.comfy.cases import FOLDER, case_of, expect_refusal
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import CARDS, difference, distance, put_lora, slopes_of, without_lora
from devicebridge.tests.comfy.stock_encoders import make_clip, make_vae
from devicebridge.tests.comfy.tiny_checkpoints import TinyFamily, native_job, save_checkpoint, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, made_of
from devicebridge.tests.comfy_host import allow_folders
from devicebridge.training.loop import Trainer
from devicebridge.training.objective import noise_latents, predict
from safetensors.torch import save_file

import nodes as core

_SDXL = {**TRAINED["SDXL"].unet_config, "adm_in_channels": 32 + 6 * 256}
_SD_2 = {**TRAINED["SD 1.5"].unet_config, "use_linear_in_transformer": True}
# Each with its CLIP and the width of that; CLIP-G is twice as wide.
BUILDS: dict[str, tuple[TinyFamily, str, int]] = {
    "SD 1.5": (TRAINED["SD 1.5"], "sd15", 48),
    "SD 2": (made_of("sdxl", config_class="SD20", unet_config=_SD_2, pooled=0), "sd2", 48),
    "SDXL": (made_of("sdxl", unet_config=_SDXL, pooled=32), "sdxl", 16),
}
CAPTIONS = ("a (red:1.3) house", "two blue boats")
_PLAIN = {"train": {"gradient_checkpointing": False}}
_LORA = {"rank": 2, "alpha": 2.0, "text_encoder": True, "text_encoder_rank": 3}
_RUN = {
    "train": {"steps": 4, "ema_decay": 0.6, "batch_size": 2},
    "optimizer": {"learning_rate": 0.02, "text_encoder_learning_rate": 0.01}, "lora": {**_LORA, "dropout": 0.1},
    "data": {"caption_dropout": 0.3},
}  # fmt: skip


class Bench(native_steps.Bench):
    """One tiny model with its CLIP, and two pictures with captions."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family, self.kind, self.width = BUILDS[name]
        self.folder, self.dtype, self.clip_dtype = folder, "float32", torch.float32
        for index, caption in enumerate(CAPTIONS):
            save_image(folder / "images" / f"{index}.png", seed=index, caption=caption)
        with small_sizes(self.family):
            self.path = folder / "model.safetensors"
            save_checkpoint(self.family, self.path)
            self.info = read_native(self.path, "float32")
        self.clip_file = folder / "clip.safetensors"
        save_file({n: t.contiguous() for n, t in self.clip().cond_stage_model.state_dict().items()}, self.clip_file)

    def clip(self) -> Any:
        made = make_clip(self.kind, width=self.width)
        made.cond_stage_model.to(self.clip_dtype)
        return made

    def job(self, name: str, sections: Mapping[str, Any]) -> JobConfig:
        data = {"resolutions": [64], "folders": [{"path": str(self.folder / "images")}], **sections.get("data", {})}
        cache = {
            "folder": str(self.folder / "cache"), "stock_clip": [str(self.clip_file)],
            "stock_clip_type": "stable_diffusion", "stock_vae": str(self.clip_file),
            "caption_weights": True,  # as core's nodes read them
            **sections.get("cache", {}),
        }  # fmt: skip
        own = {"lora": _LORA, **sections, "data": data, "cache": cache}
        return native_job(self.path, self.folder / name, own, steps=4)

    @contextlib.contextmanager
    def ready(self, job: JobConfig) -> Iterator[JobConfig]:
        """Inside, files are what this bench has, and the captions of the job are in the cache."""
        with (
            mock.patch.object(comfy.sd, "load_clip", lambda *files, **given: self.clip()),
            mock.patch.object(files, "load_vae", lambda path: make_vae("sd")),
            mock.patch("devicebridge.cli.native.prepared", lambda job: contextlib.nullcontext(self.info)),
            small_sizes(self.family),
        ):
            here = replace(job, split=replace(job.split, devices=("cpu",)))
            named = replace(job, cache=encoded(here, lambda event: None, ALONE).cache)
            with native_training(), native_steps.cards_of(job):
                yield named


def other_clip(bench: Bench) -> None:
    other, store = "sdxl" if bench.kind == "sd15" else "sd15", bench.folder / "other cache"
    for lora in (_LORA, {"rank": 2}):  # with text encoders that are trained, and without
        job = bench.job("other", {"cache": {"folder": str(store)}, "lora": lora})
        with mock.patch.object(bench, "kind", other):
            expect_refusal(lambda: bench.ready(job).__enter__(), "cache.stock_clip makes a")  # noqa: B023
        assert not list(CacheStore(store).keys()), "something was encoded before"


def same_as_cached(bench: Bench) -> None:
    """With a LoRA that changes nothing the loss is that of cached states, which ComfyUI's own CLIP has made."""
    cached, _ = bench.first_step("cached", {**_PLAIN, "lora": {"rank": 2, "alpha": 2.0}}, without_lora)
    found, _ = bench.first_step("live", _PLAIN, without_lora)
    assert abs(found / cached - 1) <= 1e-6


def same_in_half(bench: Bench) -> None:
    """Of encoders whose files are in float16, which compute in float32 all the same."""
    with mock.patch.object(bench, "clip_dtype", torch.float16):
        same_as_cached(bench)


def central_differences(bench: Bench) -> None:
    """The slope of the loss along the gradient of each encoder, and of all, is the gradient's length."""
    _, grads = bench.first_step("plain", _PLAIN)
    with bench.trainer("differences", _PLAIN) as trainer:
        slope = slopes_of(trainer)
        parts = {name.split(".")[1] for name in trainer.lora.parameters() if name.startswith("text_encoders.")}
        assert parts == {"sdxl": {"clip_l", "clip_g"}, "sd15": {"clip_l"}, "sd2": {"clip_h"}}[bench.kind]
        for part in (*(f"text_encoders.{each}." for each in parts), ""):
            own = {name: each for name, each in grads.items() if name.startswith(part)}
            length = sum(float(each.double().norm()) ** 2 for each in own.values()) ** 0.5
            assert length > 1e-6, part
            along = {name: each / length for name, each in own.items()}
            assert min(abs(slope(along, size) / length - 1) for size in (3e-2, 1e-2, 3e-3)) <= 5e-3, part


def same_in_other_ways(bench: Bench) -> None:
    """Recomputed, and on two cards. In 8 bits is the diffusion model alone, and the loss close."""
    wanted_loss, wanted = bench.first_step("as it is", _PLAIN)
    for name, sections in {"recompute": {}, "split": {"split": CARDS}}.items():
        loss, found = bench.first_step(name, sections)
        assert abs(loss / wanted_loss - 1) <= 1e-5 and difference(found, wanted) <= 1e-4, name
    with bench.trainer("8 bits", {**_PLAIN, "model": {"quantize": "int8"}}) as trainer:
        model, _ = trainer.runner.replica_for(0)
        rounded = [name for name, each in model.named_modules() if isinstance(each, native_steps.FrozenLinear8)]
        assert rounded and not any(name.startswith("text_encoders.") for name in rounded), rounded[:3]
        assert abs(float(trainer.accumulate(1)[0]) / wanted_loss - 1) < 0.05


def resumed(bench: Bench) -> None:
    """Stopped after two steps of four and continued: the same losses and the same file, bit for bit."""
    whole = bench.run("whole", _RUN)
    native_steps._resumed(bench, "stopped", _RUN, whole)
    first = bench.run("other rate", {**_RUN, "optimizer": {"learning_rate": 0.02}})
    assert first.losses[0] == whole.losses[0] and first.losses[2] != whole.losses[2], "the rate of its own does nothing"


def stock_loader(bench: Bench) -> None:
    """Every key is mapped; the stock CLIP and MODEL with the file say what training says. The run also evaluates and
    draws, both with the encoders that train."""
    pictures = {"prompts": ["a red house"], "steps": 2, "every_steps": 0}
    more = {"samples": pictures, "evaluation": {"folder": str(bench.folder / "images"), "quantiles": [0.5]}}
    result = bench.run("loaded", {**_RUN, "train": {"steps": 4}, **more})
    lora = dict(result.lora)
    assert result.eval_after < result.eval_before, (result.eval_before, result.eval_after)
    assert len(list((bench.folder / "loaded" / "samples").iterdir())) == 2
    with small_sizes(bench.family):
        stock = comfy.sd.load_diffusion_model(str(bench.path))
    clip = bench.clip()
    places = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, comfy.lora.model_lora_keys_unet(stock.model, {}))
    found = comfy.lora.load_lora(dict(lora), places)
    count = sum(name.endswith(("lora_A.weight", "lora_up.weight")) for name in lora)
    assert len(found) == count and {key for each in found.values() for key in each.loaded_keys} == set(lora)
    numbers = {name.split("_text_model")[0] for name in lora if name.startswith("lora_te")}
    assert numbers == ({"lora_te1", "lora_te2"} if bench.kind == "sdxl" else {"lora_te"}), numbers
    patched, with_lora = comfy.sd.load_lora_for_models(stock, clip, lora, 1.0, 1.0)
    (said,) = core.CLIPTextEncode().encode(with_lora, CAPTIONS[0])
    (before,) = core.CLIPTextEncode().encode(bench.clip(), CAPTIONS[0])
    with bench.trainer("after", {**_PLAIN, "lora": _LORA}) as trainer, torch.no_grad():
        _put_file(trainer, lora)
        ours, made, prediction = _said(bench, trainer)
    assert distance(before[0][0], ours["cond"]) > 1e-2 and distance(said[0][0], ours["cond"]) <= 1e-4
    picture = native_steps.said_by_sampling(patched, made, said, bench.family.latent)
    assert distance(picture.view(prediction.shape), prediction) <= 1e-4


def started(bench: Bench) -> None:
    """From a file of both, in two spellings, with another rank and alpha: states and what the model says are those of
    the stock CLIP and MODEL with the file. What the job's LoRA cannot hold is refused, and nothing is left out."""
    lora = dict(bench.run("first", {**_RUN, "train": {"steps": 3}}).lora)
    with small_sizes(bench.family):
        stock = comfy.sd.load_diffusion_model(str(bench.path))
    patched, clip = comfy.sd.load_lora_for_models(stock, bench.clip(), lora, 1.0, 1.0)
    (said,) = core.CLIPTextEncode().encode(clip, CAPTIONS[0])
    larger = {"rank": 5, "alpha": 2.5, "text_encoder": True, "text_encoder_rank": 4}
    for spelling, named in (("kohya", lora), ("diffusers", _as_diffusers(lora))):
        save_file(named, file := bench.folder / f"{spelling}.safetensors")
        sections = {**_PLAIN, "lora": {**larger, "start_from": str(file)}}
        with bench.trainer(f"from {spelling}", sections, is_drawn=False) as trainer, torch.no_grad():
            states, made, prediction = _said(bench, trainer)
        picture = native_steps.said_by_sampling(patched, made, said, bench.family.latent).view(prediction.shape)
        assert max(distance(said[0][0], states["cond"]), distance(picture, prediction)) <= 1e-4, spelling
    first = next(name for name in lora if name.startswith("lora_te"))
    deeper = {name.replace("layers_0_", "layers_31_"): each for name, each in lora.items()}
    save_file(deeper, deep := bench.folder / "deeper.safetensors")
    refused = (
        ({"rank": 5, "start_from": str(file)}, "set lora.text_encoder = true to train them, too"),
        ({**larger, "text_encoder_rank": 2, "start_from": str(file)}, "set lora.text_encoder_rank to 3 or more"),
        ({**larger, "start_from": str(deep)}, "and here is none; give a LoRA of this model"),
    )
    assert first.count("layers_0_") and len(deeper) == len(lora)
    for settings, words in refused:
        asked = {**_PLAIN, "lora": settings}
        expect_refusal(lambda: bench.trainer("refused", asked, is_drawn=False).__enter__(), words)  # noqa: B023


def _as_diffusers(lora: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same file with the layers of text encoders named as diffusers' pipelines name them."""
    renamed = {}
    for name, tensor in lora.items():
        encoder, _, layer = name.partition("_text_model_encoder_layers_")
        if layer:
            index, _, rest = layer.partition("_")
            for linear in ("self_attn_out_proj", *(f"self_attn_{each}_proj" for each in "qkv"), "mlp_fc1", "mlp_fc2"):
                rest = rest.replace(linear, linear.replace("attn_", "attn.").replace("mlp_", "mlp."))
            owner = "text_encoder_2" if encoder == "lora_te2" else "text_encoder"
            name = f"{owner}.text_model.encoder.layers.{index}.{rest}"
        renamed[name] = tensor
    return renamed


def same_from_nodes(bench: Bench) -> None:
    """A graph trains the LoRA of the job file in every bit, also beside pictures; an unknown CLIP is refused."""
    sections = {**_RUN, "samples": {"prompts": ["a blue boat"], "steps": 1, "every_steps": 0}}
    wanted, job = bench.run("job file", sections), bench.job("unused", sections)
    clip = bench.clip()
    loaded = [str(bench.clip_file)], None, comfy.sd.CLIPType.STABLE_DIFFUSION, {}
    clip.patcher.cached_patcher_init = comfy.sd.load_clip_model_patcher, loaded
    folder_paths.set_output_directory(str(bench.folder / "output"))
    folder_paths.set_user_directory(str(bench.folder / "user"))
    (bench.folder / "user").mkdir()
    allow_folders(bench.folder / "user", bench.folder)
    model, dataset = TrainingModel(job.model, job.split), TrainingDataset(job.data, job.evaluation)
    settings = {
        "steps": job.train.steps, "accumulation": 1, "batch_size": job.train.batch_size,
        "ema_decay": job.train.ema_decay, "dropout": job.lora.dropout, "random_seed": job.train.seed,
        "rank": job.lora.rank, "alpha": job.lora.alpha, "learning_rate": job.optimizer.learning_rate,
        "lora_dtype": "float32", "sample_prompts": "a blue boat", "text_encoder": True,
        "text_encoder_rank": job.lora.text_encoder_rank,
        "text_encoder_learning_rate": job.optimizer.text_encoder_learning_rate,
    }  # fmt: skip
    with (
        mock.patch.object(comfy.sd, "load_clip", lambda *files, **given: bench.clip()),
        mock.patch.object(files, "load_vae", lambda path: make_vae("sd")),
        mock.patch.object(files, "path_of_vae", lambda vae: str(bench.clip_file)),
        mock.patch("server.PromptServer.instance", mock.MagicMock(), create=True),
        torch.inference_mode(),  # as ComfyUI runs nodes
        small_sizes(bench.family),
    ):
        stock = {"stock_clip": clip, "stock_vae": make_vae("sd"), "caption_weights": True}
        (cached,) = _run(CacheCaptionsAndLatents, model, dataset, **stock)
        found, losses, *_ = _run(TrainLora, model, cached, resume=False, **settings)
        other = replace(cached, clip_files=())
        expect_refusal(
            lambda: _run(TrainLora, model, other, resume=False, **{**settings, "name": "refused"}),
            "text_encoder trains the CLIP itself, and the file",
        )
    assert losses["loss"] == wanted.losses, (losses, wanted.losses)
    assert found.keys() == wanted.lora.keys() and any(name.startswith("lora_te") for name in found)
    assert all(torch.equal(each, wanted.lora[name]) for name, each in found.items())
    assert len(list((bench.folder / "output" / "devicebridge" / "my_lora" / "samples").iterdir())) == 2


def _run(node: Any, *given: Any, **settings: Any) -> tuple[Any, ...]:
    node.hidden = SimpleNamespace(unique_id="1")
    inputs = [each for each in node.define_schema().inputs if not getattr(each, "optional", False)]
    defaults = {each.id: each.default for each in inputs if getattr(each, "default", None) is not None}
    names = [each.id for each in inputs[: len(given)]]
    return tuple(node.execute(**{**defaults, **dict(zip(names, given, strict=True)), **settings}).args)


def _said(bench: Bench, trainer: Trainer) -> tuple[Mapping[str, torch.Tensor], Any, torch.Tensor]:
    model, main_device = trainer.runner.replica_for(0)
    # Tokens of the first caption.
    data = trainer.train_data
    tokens = replace(data, prompt_keys={"": data.samples[0].text_keys[0]}).text("")
    noise = torch.randn(1, 4, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    made = noise_latents(bench.info.family, torch.zeros_like(noise), noise, torch.tensor([0.6]))
    prediction = predict(bench.info.family, model, made.noisy, made.sigmas, tokens, None)
    return states_of(model.text_encoders, tokens, main_device), made, prediction


def _put_file(trainer: Trainer, lora: Mapping[str, torch.Tensor]) -> None:
    has_both = any(name.startswith("lora_te2") for name in lora)
    number = {"clip_l": "1", "clip_g": "2"} if has_both else {"clip_l": "", "clip_h": ""}

    def source(name: str) -> torch.Tensor:
        if not name.startswith("text_encoders."):
            return lora[f"diffusion_model.{name}"]
        module, kind, _ = name.rsplit(".", 2)
        part, layer = module.removeprefix("text_encoders.").split(".transformer.")
        named = {"lora_A": "lora_down", "lora_B": "lora_up"}[kind]
        return lora[f"lora_te{number[part]}_{layer.replace('.', '_')}.{named}.weight"]

    put_lora(trainer, {name: source(name) for name in trainer.lora.tensors()})


@case_of(*BUILDS)
def text_encoders(name: str) -> None:
    with endless_memory():
        bench = Bench(name, FOLDER / name)
        for step in (
            other_clip, same_as_cached, same_in_half, central_differences, same_in_other_ways, resumed, stock_loader,
            same_from_nodes, started,
        ):  # fmt: skip
            step(bench)
