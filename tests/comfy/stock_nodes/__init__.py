"""Nodes for tests in a running server: emulated cards on and off, tiny models and encoders, results kept in files.

ComfyUI loads this folder as a custom node pack of its own. The emulation belongs to the thread that runs prompts, so it
can only be entered by a node; a graph turns it on before the loader and off behind the sampler.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ROOT = Path(os.path.realpath(__file__)).parents[3]
_emulated, _shortened, _made_small = contextlib.ExitStack(), contextlib.ExitStack(), contextlib.ExitStack()
NODE_CLASS_MAPPINGS: dict[str, type] = {}
_ENDS = ("TestCardsOff", "TestText", "TestShortTexts", "TestSmallModel", "TestKeepTensors")  # may end a graph


def _node(
    *names: str, returns: tuple[str, ...] = (), always: bool = False, optional: tuple[str, ...] = (), **inputs: str
) -> Callable[[Any], Any]:
    """A node around a function. inputs: their types. always: whether it runs in every prompt."""
    kinds = {"required": {name: (kind, {}) for name, kind in inputs.items() if name not in optional}}
    kinds["optional"] = {name: (inputs[name], {}) for name in optional}

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        def with_the_pack(**given: Any) -> Any:
            runpy.run_path(str(_ROOT / "bootstrap.py"))["load_pack"]()
            return run(**given)

        members: dict[str, Any] = {"RETURN_TYPES": returns, "FUNCTION": "run", "CATEGORY": "test"}
        members |= {"INPUT_TYPES": staticmethod(lambda: kinds), "run": staticmethod(with_the_pack)}
        members["OUTPUT_NODE"] = names[0] in _ENDS
        if always:
            members["IS_CHANGED"] = staticmethod(lambda **given: float("nan"))
        NODE_CLASS_MAPPINGS.update({name: type(name, (), members) for name in names})
        return run

    return register


def _modules(ending: str) -> list[Any]:
    """Those of all loaded packs: ComfyUI loads ours under a name of its own."""
    return [module for name, module in list(sys.modules.items()) if name.endswith(ending)]


@_node("TestCardsOn", returns=("COMBO",), always=True, devices="STRING")
def enter(devices: str) -> tuple[str]:
    from devicebridge.tests.comfy.split_host import emulated_machine

    _emulated.close()
    _emulated.enter_context(emulated_machine())
    return (devices,)


@_node("TestCardsOff", returns=("LATENT",), always=True, optional=("samples",), samples="LATENT")
def leave(samples: Any = None) -> tuple[Any]:
    """Passes a latent on; models are unloaded first, as nobody could afterwards."""
    import comfy.model_management

    comfy.model_management.unload_all_models()
    _emulated.close()
    return (samples,)


@_node("TestCondition", returns=("CONDITIONING",), family="STRING", seed="INT")
def condition(family: str, seed: int) -> tuple[Any]:
    from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

    return (FAMILIES[family].condition(seed),)


# The second name is a node's of ComfyUI-MultiGPU: nothing may stand in for it.
@_node("TestText", "UnetLoaderGGUFMultiGPU", returns=("STRING",), optional=("after",), text="STRING", after="*")
def text(text: str, after: Any = None) -> dict[str, Any]:
    """A text that is there when another node has run."""
    return {"ui": {"text": [text]}, "result": (text,)}


@_node("TestShortTexts", always=True, is_on="BOOLEAN")
def switch(is_on: bool) -> dict[str, Any]:
    """Has training pad texts to few tokens from now on, as tiny_pipeline.short_texts does, or to the published ones."""
    from devicebridge.tests.tiny_pipeline import short_texts

    _shortened.close()
    for module in _modules(".families.registry") if is_on else ():
        _shortened.enter_context(short_texts(module.FAMILIES))
    return {}


@_node(
    "TestTinyEncoders", returns=("CLIP", "VAE"), optional=("channels", "width", "vae"), family="STRING", seed="INT",
    channels="INT", width="INT", vae="STRING",
)  # fmt: skip
def encoders(family: str, seed: int, channels: int = 4, width: int = 16, vae: str = "") -> tuple[Any, Any]:
    from devicebridge.tests.comfy.stock_encoders import make_clip, make_vae, make_video_vae

    clip = None if family == "wan" else make_clip(family, seed, width)
    return clip, make_video_vae(seed) if "wan" in (family, vae) else make_vae(vae or family, seed, channels)


@_node("TestSmallModel", always=True, family="STRING", file="STRING", unet_config="STRING")
def small_model(family: str, file: str, unet_config: str) -> dict[str, Any]:
    """Writes a tiny model of tiny_checkpoints.py. From now on ComfyUI takes its sizes for those of its class, and Train
    LoRA (simple) trains few small steps. A family "" has the latter alone."""
    import dataclasses
    import json
    from unittest import mock

    from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, save_checkpoint, small_sizes

    _made_small.close()
    for module in _modules(".nodes.simple"):
        settings = dict.fromkeys(module.SETTINGS, (module._Settings(2, 64, 2, 1e-2, 1),) * 3)
        _made_small.enter_context(mock.patch.object(module, "SETTINGS", settings))
    if family:
        tiny = FAMILIES[family]
        tiny = dataclasses.replace(tiny, unet_config={**tiny.unet_config, **json.loads(unet_config)})
        _made_small.enter_context(small_sizes(tiny))
        save_checkpoint(tiny, Path(file))
    return {}


@_node(
    "TestKeepTensors", optional=("conditioning", "latent"), path="STRING", conditioning="CONDITIONING", latent="LATENT"
)
def keep(path: str, conditioning: Any = None, latent: Any = None) -> dict[str, Any]:
    """Writes what it is given to a safetensors file, under the names that ComfyUI has for it."""
    from safetensors.torch import save_file

    tensors = {"samples": latent["samples"]} if latent else {}
    if conditioning:
        states, options = conditioning[0]
        tensors["cond"] = states
        if options.get("pooled_output") is not None:
            tensors["pooled_output"] = options["pooled_output"]
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path)
    return {}


@_node("TestCaption", returns=("STRING",), image="IMAGE", told="STRING")
def caption(image: Any, told: str) -> tuple[str]:
    """A captioning node: tells the colour of an image, and in a file that it was asked."""
    colour = ("red", "green", "blue")[int(image.mean(dim=(0, 1, 2)).argmax())]
    with open(told, "a", encoding="utf-8") as file:
        file.write(f"{tuple(image.shape)} {colour}\n")
    return (f"a {colour} picture",)
