"""Nodes for tests of training on ComfyUI's own encoders, in a running server: tiny ones, their results kept in files.
ComfyUI loads this folder as a custom node pack of its own."""

import contextlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(os.path.realpath(__file__)).parents[3]


_shortened, _made_small = contextlib.ExitStack(), contextlib.ExitStack()


def _load_pack() -> None:
    runpy.run_path(str(_ROOT / "bootstrap.py"))["load_pack"]()


def _modules(ending: str) -> list[Any]:
    """Those of all loaded packs: ComfyUI loads ours under a name of its own."""
    return [module for name, module in list(sys.modules.items()) if name.endswith(ending)]


class ShortTexts:
    """Has training pad texts to few tokens from now on, as tiny_pipeline.short_texts does, or to the published ones."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"is_on": ("BOOLEAN", {"default": True})}}

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    RETURN_TYPES = ()
    FUNCTION = "switch"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def switch(self, is_on: bool) -> dict[str, Any]:
        _load_pack()
        from devicebridge.tests.tiny_pipeline import short_texts

        _shortened.close()
        for module in _modules(".families.registry") if is_on else ():
            _shortened.enter_context(short_texts(module.FAMILIES))
        return {}


class TinyEncoders:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required = {"family": ("STRING", {}), "seed": ("INT", {"default": 0})}
        sizes = {"channels": ("INT", {"default": 4}), "width": ("INT", {"default": 16})}
        return {"required": required, "optional": {**sizes, "vae": ("STRING", {"default": ""})}}

    RETURN_TYPES = ("CLIP", "VAE")
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, family: str, seed: int, channels: int = 4, width: int = 16, vae: str = "") -> tuple[Any, Any]:
        _load_pack()
        from devicebridge.tests.comfy.stock_encoders import make_clip, make_vae, make_video_vae

        clip = None if family == "wan" else make_clip(family, seed, width)
        return clip, make_video_vae(seed) if "wan" in (family, vae) else make_vae(vae or family, seed, channels)


class SmallModel:
    """Writes a tiny model of tiny_checkpoints.py. From now on ComfyUI takes its sizes for those of its class, and
    Train LoRA (simple) trains few small steps. A family "" has the latter alone."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"family": ("STRING", {}), "file": ("STRING", {}), "unet_config": ("STRING", {})}}

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    RETURN_TYPES = ()
    FUNCTION = "make"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def make(self, family: str, file: str, unet_config: str) -> dict[str, Any]:
        import dataclasses
        import json
        from unittest import mock

        _load_pack()
        from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, save_checkpoint, small_sizes

        _made_small.close()
        for module in _modules(".nodes.simple"):
            small = (module._Settings(2, 64, 2, 1e-2, 1),) * 3
            settings = dict.fromkeys(module.SETTINGS, small)
            _made_small.enter_context(mock.patch.object(module, "SETTINGS", settings))
        if family:
            tiny = FAMILIES[family]
            tiny = dataclasses.replace(tiny, unet_config={**tiny.unet_config, **json.loads(unet_config)})
            _made_small.enter_context(small_sizes(tiny))
            save_checkpoint(tiny, Path(file))
        return {}


class KeepTensors:
    """Writes what it is given to a safetensors file, under the names that ComfyUI has for it."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"path": ("STRING", {})},
            "optional": {"conditioning": ("CONDITIONING",), "latent": ("LATENT",)},
        }

    RETURN_TYPES = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def keep(self, path: str, conditioning: Any = None, latent: Any = None) -> dict[str, Any]:
        from safetensors.torch import save_file

        tensors = {"samples": latent["samples"]} if latent else {}
        if conditioning:
            states, options = conditioning[0]
            tensors["cond"] = states
            if options.get("pooled_output") is not None:
                tensors["pooled_output"] = options["pooled_output"]
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
        return {}


class Caption:
    """A captioning node: tells the colour of an image, and in a file that it was asked."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",), "told": ("STRING", {})}}

    RETURN_TYPES = ("STRING",)
    FUNCTION = "tell"
    CATEGORY = "test"

    def tell(self, image: Any, told: str) -> tuple[str]:
        colour = ("red", "green", "blue")[int(image.mean(dim=(0, 1, 2)).argmax())]
        with open(told, "a", encoding="utf-8") as file:
            file.write(f"{tuple(image.shape)} {colour}\n")
        return (f"a {colour} picture",)


NODE_CLASS_MAPPINGS = {
    "TestTinyEncoders": TinyEncoders, "TestSmallModel": SmallModel, "TestKeepTensors": KeepTensors,
    "TestShortTexts": ShortTexts, "TestCaption": Caption,
}  # fmt: skip
