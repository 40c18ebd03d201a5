"""Pictures that models of ComfyUI's own classes draw while they train, beside those of a KSampler's own code with the
stock MODEL, CLIP and VAE; cases of test_native_pictures.py."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import comfy.sample
import comfy.sd
import node_helpers
import torch
from devicebridge.events import EventLog
from devicebridge.jobs.encode_job import ComfyEncoders, cache_job
from devicebridge.jobs.job import check_job, run_job
from devicebridge.nodes.host.native import files
from devicebridge.nodes.host.native.model import native_training
from devicebridge.nodes.host.native.source import read_native
from devicebridge.sampling.draw import Decoder
from devicebridge.system.stopping import never
from devicebridge.tests.comfy.cases import FOLDER, case_of
from devicebridge.tests.comfy.native_forwards import endless_memory
from devicebridge.tests.comfy.native_steps import cards_of
from devicebridge.tests.comfy.stock_encoders import make_vae, make_video_vae
from devicebridge.tests.comfy.tiny_checkpoints import native_job, small_sizes
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained
from PIL import Image

from nodes import VAEDecode

PROMPTS, SEED, TRAIN_STEPS = ("a cat", "a dog, asleep"), 5, 2
CLIP, VAE = f"comfyui 0 CLIP {'a' * 64}", f"comfyui 0 VAE {'b' * 64}"
# Name -> a KSampler's cfg, guidance of FluxGuidance if there is one, scheduler and steps; what a job says of them.
ASKED: dict[str, tuple[float, float | None, str, int, dict[str, Any]]] = {
    "FLUX.2": (1.0, None, "simple", 3, {"steps": 3}), "FLUX.1": (1.0, 3.5, "simple", 3, {"steps": 3, "guidance": 3.5}),
    "Wan 2.1 T2V, 2.2 T2V 14B": (4.0, None, "simple", 3, {"steps": 3, "frames": 5}),
    "SD 1.5": (7.0, None, "normal", 20, {}), "SDXL": (7.0, None, "normal", 20, {}),
    "SDXL v-prediction": (2.5, None, "normal", 4, {"steps": 4, "guidance": 2.5}),
    "Cosmos-Predict2": (4.0, None, "simple", 3, {"steps": 3}),
    "HunyuanVideo": (1.0, None, "simple", 3, {"steps": 3, "frames": 5}),
    "LTX-2 without sound": (4.0, None, "simple", 3, {"steps": 3, "frames": 9}),
}  # fmt: skip


class _CellsAsPixels:
    """Stands for LTX-2's VAE, whose sizes are fixed: three channels of a latent cell, as large as its pixels."""

    latent_dim, vae_dtype, device = 3, torch.float32, torch.device("cpu")

    def memory_used_decode(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return 0

    def model_size(self) -> int:
        return 0

    def throw_exception_if_invalid(self) -> None:
        pass

    def decode(self, samples: torch.Tensor) -> torch.Tensor:
        frames = [0, *(1 + index // 8 for index in range(8 * (samples.shape[2] - 1)))]
        pixels = samples[:, :3, frames].repeat_interleave(32, -1).repeat_interleave(32, -2).sigmoid()
        return pixels.movedim(1, -1)


class Bench:
    def __init__(self, name: str, family: Any, folder: Path) -> None:
        self.name, self.family, self.folder = name, family, folder
        (folder / "images").mkdir(parents=True)
        with small_sizes(family):
            self.path = save_trained(name, folder / "model.safetensors", family)
            self.info = read_native(self.path, "float32")
        self.side = self.info.family.latent.spatial_stride * family.latent[-1]
        for index in range(2):
            Image.new("RGB", (self.side, self.side), (90 * index, 10, 200)).save(folder / "images" / f"{index}.png")
            (folder / "images" / f"{index}.txt").write_text(f"caption {index}", encoding="utf-8")

    def text(self, caption: str) -> Any:
        return self.family.condition(sum(caption.encode()) % 1000)

    def encoders(self) -> ComfyEncoders:
        def encode(pixels: torch.Tensor) -> torch.Tensor:
            channels, *frames, height, width = self.family.latent
            shape = (1, channels, *[1] * len(frames), height, width)
            return torch.randn(shape, generator=torch.Generator().manual_seed(int(pixels.sum())))

        clip = SimpleNamespace(fingerprint=CLIP, encode=self.text, release=lambda: None)
        vae = SimpleNamespace(fingerprint=VAE, encode=encode, release=lambda: None, takes_clips=True)
        return ComfyEncoders(clip, vae)  # type: ignore[arg-type]

    def vae(self) -> Any:
        channels = self.family.latent[0]
        if len(self.family.latent) == 4 and channels == 128:
            return _CellsAsPixels()
        if len(self.family.latent) == 4:
            return make_video_vae()
        return make_vae("flux2_native") if channels == 128 else make_vae("flux1", channels=channels)

    def job(self, name: str, sections: Mapping[str, Any]) -> Any:
        asked = {"prompts": list(PROMPTS), "every_steps": 0, "seed": SEED, **ASKED[self.name][4]}
        sections = {"samples": {**asked, "vae": str(self.path)}, **sections}
        own = {
            "lora": {"rank": 2, "alpha": 2.0, "dropout": 0.3}, "optimizer": {"learning_rate": 0.02},
            "cache": {"folder": str(self.folder / "cache"), "text_source": CLIP, "latent_source": VAE},
            "data": {"resolutions": [self.side], "folders": [{"path": str(self.folder / "images")}]},
        }  # fmt: skip
        return native_job(self.path, self.folder / name, {**own, **sections}, steps=TRAIN_STEPS)

    def run(self, name: str, sections: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """The result of a job; of each time when it drew latents and pixels of every prompt."""
        job, drawn = self.job(name, sections), []
        plain = Decoder.decode

        def remember(decoder: Decoder, latents: Any) -> Iterator[torch.Tensor]:
            pixels = list(plain(decoder, latents))
            drawn.append((list(latents), pixels))
            yield from pixels

        with small_sizes(self.family), native_training(), endless_memory(), cards_of(job), ExitStack() as stack:
            stack.enter_context(mock.patch.object(Decoder, "decode", remember))
            stack.enter_context(mock.patch.object(files, "load_vae", lambda path: self.vae()))
            cache_job(check_job(job, info=self.info, is_to_train=False), EventLog(None), never, self.encoders())
            return run_job(job, info=self.info), drawn

    @torch.inference_mode()
    def stock(self, lora: Mapping[str, torch.Tensor] | None, prompt: str, shape: torch.Size) -> torch.Tensor:
        cfg, guidance, scheduler, steps, _ = ASKED[self.name]
        with small_sizes(self.family):
            model = comfy.sd.load_diffusion_model(str(self.path))
        if lora is not None:
            model, _ = comfy.sd.load_lora_for_models(model, None, dict(lora), 1.0, 0)
        positive, negative = self.text(prompt), self.text("")
        if guidance is not None:
            positive = node_helpers.conditioning_set_values(positive, {"guidance": guidance})
        empty = torch.zeros(shape if len(self.family.latent) == 4 else (*shape[:2], *shape[3:]))
        noise = comfy.sample.prepare_noise(empty, SEED)
        return comfy.sample.sample(
            model, noise, steps, cfg, "euler", scheduler, positive, negative, empty, disable_pbar=True, seed=SEED
        )


def _distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@torch.inference_mode()
def _shown(vae: Any, samples: torch.Tensor) -> torch.Tensor:
    """As VAE Decode and Save Image make it."""
    (images,) = VAEDecode().decode(vae, {"samples": samples})
    return (images * 255).clamp(0, 255).to(torch.uint8)


@case_of(*ASKED)
def pictures(name: str) -> None:
    """Latents before the first step, without a LoRA, and after the last, with the one that was written, of two prompts.
    The LoRA's file is the same without pictures."""
    bench = Bench(name, TRAINED[name], FOLDER / name.replace("/", "-"))
    result, ((before, _), (after, pixels)) = bench.run("run", {})
    silent, _ = bench.run("silent", {"samples": {}})
    ending = "webp" if "frames" in ASKED[name][4] else "png"
    files = [f"{step:06d}_{index}.{ending}" for step in (0, TRAIN_STEPS) for index in range(len(PROMPTS))]
    assert sorted(path.name for path in (bench.folder / "run" / "samples").iterdir()) == files
    assert result.lora_path.read_bytes() == silent.lora_path.read_bytes()
    assert _distance(after[0], before[0]) > 1e-3 and _distance(after[0], after[1]) > 5e-4
    form = bench.info.family.host._form  # type: ignore[union-attr]
    for latents, lora in ((before, None), (after, result.lora)):
        for index, (prompt, ours) in enumerate(zip(PROMPTS, latents, strict=True)):
            theirs = bench.stock(lora, prompt, ours.shape)
            assert _distance(form.process_out(ours.view(theirs.shape)), theirs) < 1e-4
            if lora is not None:
                shown, own = _shown(bench.vae(), theirs), pixels[index]
                assert own.shape == shown.shape and int((own.int() - shown.int()).abs().max()) <= 1
                assert int(shown.max()) - int(shown.min()) > 20
