"""Nodes for tests of the split nodes in a running server: emulated cards on and off, a text condition from a seed.

ComfyUI loads this folder as a custom node pack of its own. The emulation belongs to the thread that runs prompts, so it
can only be entered by a node; a graph turns it on before the loader and off behind the sampler.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

_ROOT = Path(os.path.realpath(__file__)).parents[3]
_entered = contextlib.ExitStack()
_is_on = False
_machines: list[Any] = []  # the one that is emulated
_disarm = contextlib.ExitStack()


class CardsOn:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        keep = ("BOOLEAN", {"default": False})  # an emulation that is on already, with what lies on its cards
        return {"required": {"devices": ("STRING", {"default": "lazy:0,lazy:1"})}, "optional": {"keep": keep}}

    RETURN_TYPES = ("COMBO",)
    FUNCTION = "enter"
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def enter(self, devices: str, keep: bool = False) -> tuple[str]:
        global _is_on
        runpy.run_path(str(_ROOT / "bootstrap.py"))["load_pack"]()
        from devicebridge.tests.comfy.split_host import emulated_machine

        if not (keep and _is_on):
            _entered.close()
            _machines[:] = [_entered.enter_context(emulated_machine())]
            _is_on = True
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
        global _is_on
        import comfy.model_management

        comfy.model_management.unload_all_models()
        _entered.close()
        _is_on = False
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


class FailAt:
    """Has one card of a MODEL with way tensor fail at a meeting of the next sampling; at 0 none does."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        numbers = {"rank": ("INT", {"default": 0}), "at": ("INT", {"default": 0, "max": 10**6})}
        return {"required": {"model": ("MODEL",), **numbers}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "arm"
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def arm(self, model: Any, rank: int, at: int) -> tuple[Any]:
        _disarm.close()
        # ComfyUI loads the pack under a name of its own.
        modules = [module for name, module in sys.modules.items() if name.endswith("parallel.local.exchange")]
        for module in modules if at else ():
            _disarm.enter_context(
                mock.patch.object(module.Exchange, "bring", _failing(module.Exchange.bring, rank, at))
            )
        return (model,)


def _failing(bring: Any, rank: int, at: int) -> Any:
    count = 0

    def fail(exchange: Any, here: int, name: str, tensor: Any) -> None:
        nonlocal count
        count += here == rank
        if here == rank and count == at:
            raise RuntimeError(f"injected at {at} of {rank}")
        bring(exchange, here, name, tensor)

    return fail


class Held:
    """Says what the process holds, and which bits the latents are."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",)}}

    RETURN_TYPES = ()
    FUNCTION = "tell"
    OUTPUT_NODE = True
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def tell(self, samples: Any) -> dict[str, Any]:
        import psutil
        from devicebridge.tests.emulated import on_cpu

        for machine in _machines:
            machine.cards.copies.clear()  # the emulation notes every copy
        gc.collect()
        latents = on_cpu(samples["samples"])
        used = psutil.Process()
        digest = hashlib.sha256(latents.numpy().tobytes()).hexdigest()
        return {"ui": {"digest": [digest], "threads": [used.num_threads()], "bytes": [used.memory_info().rss]}}


NODE_CLASS_MAPPINGS = {
    "TestCardsOn": CardsOn,
    "TestCardsOff": CardsOff,
    "TestCondition": TestCondition,
    "TestFailAt": FailAt,
    "TestHeld": Held,
}
