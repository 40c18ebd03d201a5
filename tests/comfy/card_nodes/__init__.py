"""Nodes for tests of the split nodes in a running server: emulated cards on and off, a text condition from a seed.

ComfyUI loads this folder as a custom node pack of its own. The emulation belongs to the thread that runs prompts, so it
can only be entered by a node; a graph turns it on before the loader and off behind the sampler.
"""

import contextlib
import os
import runpy
from pathlib import Path
from typing import Any

_ROOT = Path(os.path.realpath(__file__)).parents[3]
_entered = contextlib.ExitStack()


class CardsOn:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"devices": ("STRING", {"default": "lazy:0,lazy:1"})}}

    RETURN_TYPES = ("COMBO",)
    FUNCTION = "enter"
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def enter(self, devices: str) -> tuple[str]:
        runpy.run_path(str(_ROOT / "bootstrap.py"))["load_pack"]()
        from devicebridge.tests.comfy.split_host import emulated_machine

        _entered.close()
        _entered.enter_context(emulated_machine())
        return (devices,)


class CardsOff:
    """Passes a latent on; models are unloaded first, as nobody could afterwards."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}, "optional": {"samples": ("LATENT",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "leave"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def leave(self, samples: Any = None) -> tuple[Any]:
        import comfy.model_management

        comfy.model_management.unload_all_models()
        _entered.close()
        return (samples,)


class TestCondition:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"family": ("STRING", {}), "seed": ("INT", {"default": 1})}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "make"
    CATEGORY = "test"

    def make(self, family: str, seed: int) -> tuple[Any]:
        runpy.run_path(str(_ROOT / "bootstrap.py"))["load_pack"]()
        from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

        return (FAMILIES[family].condition(seed),)


class Text:
    """A text that is there when another node has run."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"text": ("STRING", {})}, "optional": {"after": ("*",)}}

    RETURN_TYPES = ("STRING",)
    FUNCTION = "give"
    OUTPUT_NODE = True
    CATEGORY = "test"

    def give(self, text: str, after: Any = None) -> dict[str, Any]:
        return {"ui": {"text": [text]}, "result": (text,)}


NODE_CLASS_MAPPINGS = {
    "TestText": Text,
    "UnetLoaderGGUFMultiGPU": Text,  # as ComfyUI-MultiGPU has it: nothing may stand in for it
    "TestCardsOn": CardsOn,
    "TestCardsOff": CardsOff,
    "TestCondition": TestCondition,
}
