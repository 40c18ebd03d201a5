"""Nodes for tests of the split nodes in a running server: emulated cards on and off, a text condition from a seed.

ComfyUI loads this folder as a custom node pack of its own. The emulation belongs to the thread that runs prompts, so it
can only be entered by a node; a graph turns it on before the loader and off behind the sampler.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_ROOT = Path(os.path.realpath(__file__)).parents[3]
_entered = contextlib.ExitStack()
_is_on = False
_machines: list[Any] = []  # the one that is emulated
_disarm = contextlib.ExitStack()


def _in_packs(name: str) -> list[Any]:
    """This module of the pack, as ComfyUI has loaded it under a name of its own, and as it is imported here."""
    init = str(_ROOT / "__init__.py")
    files = [(each, getattr(module, "__file__", None)) for each, module in sys.modules.items()]
    packs = [each for each, file in files if file is not None and os.path.realpath(file) == init]
    return [importlib.import_module(f"{pack}.{name}") for pack in packs]


@contextlib.contextmanager
def _replayed() -> Iterator[None]:
    """Splits with way tensor made inside are replayed, from a call's second time on; see split_cases_replayed.py."""
    from devicebridge.tests.stand_in_recorder import replaying

    with contextlib.ExitStack() as patches:
        for module in _in_packs("parallel.local.tensor_parallel"):
            patches.enter_context(mock.patch.object(module.TensorParallel, "replay", replaying))
            patches.enter_context(mock.patch.object(module, "watching_modes", lambda: 0))
        for module in _in_packs("parallel.local.graphs"):
            patches.enter_context(mock.patch.object(module, "RECORDED_AFTER", 1))
        yield


class CardsOn:
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        keep = ("BOOLEAN", {"default": False})  # an emulation that is on already, with what lies on its cards
        replays = ("BOOLEAN", {"default": False})  # of what is divided while they are on
        devices = ("STRING", {"default": "lazy:0,lazy:1"})
        return {"required": {"devices": devices}, "optional": {"keep": keep, "replays": replays}}

    RETURN_TYPES = ("COMBO",)
    FUNCTION = "enter"
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def enter(self, devices: str, keep: bool = False, replays: bool = False) -> tuple[str]:
        global _is_on
        runpy.run_path(str(_ROOT / "bootstrap.py"))["load_pack"]()
        from devicebridge.tests.comfy.split_host import emulated_machine

        if not (keep and _is_on):
            _entered.close()
            _machines[:] = [_entered.enter_context(emulated_machine())]
            if replays:
                _entered.enter_context(_replayed())
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
    """Has one card of a MODEL with way tensor fail in the next sampling; at 0 none does.

    place: "meeting": this card, when it sends others something for the at-th time, in blocks that are launched or
    replayed. "replay": the at-th replay. What happens while a block is recorded is not counted: recording is given up
    then, and the prompt goes on.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        numbers = {"rank": ("INT", {"default": 0}), "at": ("INT", {"default": 0, "max": 10**6})}
        return {"required": {"model": ("MODEL",), **numbers, "place": ("STRING", {"default": "meeting"})}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "arm"
    CATEGORY = "test"

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        return float("nan")

    def arm(self, model: Any, rank: int, at: int, place: str) -> tuple[Any]:
        from devicebridge.tests.stand_in_recorder import StandIn

        _disarm.close()
        if at == 0:
            return (model,)
        fault = _Fault(rank, at)
        if place == "replay":
            targets = [(StandIn, "launch", fault.at_replays)]
        else:
            groups = [module.Collective for module in _in_packs("parallel.local.collectives")]
            targets = [(group, "post", fault.at_meetings) for group in groups]
        graphs = [module.Graphs for module in _in_packs("parallel.local.graphs")]
        for cls, name, around in (*targets, *((each, "_record", fault.uncounted) for each in graphs)):
            _disarm.enter_context(mock.patch.object(cls, name, around(getattr(cls, name))))
        return (model,)


class _Fault:
    """What is injected."""

    def __init__(self, rank: int, at: int) -> None:
        self._rank, self._left, self._is_counted = rank, at, True
        self._error = f"injected at {at} of {rank}"

    def _count(self) -> None:
        self._left -= self._is_counted
        if self._is_counted and self._left == 0:
            raise RuntimeError(self._error)

    def at_meetings(self, post: Any) -> Any:
        def fail(group: Any, here: int, *given: Any, **more: Any) -> None:
            if here == self._rank:
                self._count()
            post(group, here, *given, **more)

        return fail

    def at_replays(self, launch: Any) -> Any:
        def fail(recorder: Any, *given: Any) -> None:
            self._count()
            launch(recorder, *given)

        return fail

    def uncounted(self, record: Any) -> Any:
        def recorded(*given: Any) -> Any:
            self._is_counted = False
            try:
                return record(*given)
            finally:
                self._is_counted = True

        return recorded


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
        from devicebridge.tests.emulated import live_tensors, on_cpu

        for machine in _machines:
            machine.cards.copies.clear()  # the emulation notes every copy
        gc.collect()
        latents = on_cpu(samples["samples"])
        used = psutil.Process()
        digest = hashlib.sha256(latents.numpy().tobytes()).hexdigest()
        told = {"digest": digest, "threads": used.num_threads(), "bytes": used.memory_info().rss}
        told |= {"tensors": len(live_tensors()), "hooks": _most_hooks()}
        return {"ui": {name: [each] for name, each in told.items()}}


def _most_hooks() -> int:
    """Of one module of the models that are loaded."""
    import comfy.model_management as management

    models = [loaded.model.model for loaded in management.current_loaded_models if loaded.model is not None]
    modules = [module for model in models for module in model.modules()]
    return max(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)


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
    "TestFailAt": FailAt,
    "TestHeld": Held,
}
