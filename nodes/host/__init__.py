"""ComfyUI, the host, as the nodes see it. No other room of the pack imports anything of ComfyUI's.

Only `comfy_api` is imported with this file; schemas are made of it. Functions import the rest themselves, because that
may set up devices. Names from sockets become paths in folders.py; split/ spreads a MODEL over several cards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from comfy_api.v0_0_2 import ComfyExtension as ComfyExtension
from comfy_api.v0_0_2 import io as io

from .comfy_encoders import HostClip as HostClip
from .comfy_encoders import HostVae as HostVae
from .folders import USE_PATH, readable_path
from .folders import find_component as find_component
from .folders import folder_in_input as folder_in_input
from .folders import folder_in_output as folder_in_output

if TYPE_CHECKING:
    import torch


class NodeView:
    """What a running node shows on itself, and whether its user has pressed Cancel.

    Nothing here raises when the user cancels: ComfyUI's own progress bar would, in the middle of a training step.
    """

    def __init__(self, node_id: str | None) -> None:
        from comfy.utils import ProgressBar

        self.node_id = str(node_id) if node_id is not None else ""
        self._bar = ProgressBar(1, node_id=self.node_id or None)

    def show_progress(self, done: int, total: int) -> None:
        from comfy.model_management import InterruptProcessingException, interrupt_current_processing

        try:
            self._bar.update_absolute(done, max(total, 1))
        except InterruptProcessingException:
            interrupt_current_processing(True)  # the bar took the request away; is_cancelled must still see it

    def show_text(self, text: str) -> None:
        """Text on the node, replacing what was there."""
        from server import PromptServer

        if self.node_id:
            PromptServer.instance.send_progress_text(text, self.node_id)

    def is_cancelled(self) -> bool:
        return is_cancelled()


def is_cancelled() -> bool:
    """Whether the user has pressed Cancel and nobody has answered yet."""
    from comfy.model_management import processing_interrupted

    return processing_interrupted()


def cancel() -> NoReturn:
    """End the running prompt the way Cancel does; the queue shows it as interrupted, not as failed."""
    from comfy.model_management import InterruptProcessingException, interrupt_current_processing

    interrupt_current_processing(False)  # answered now; left set, it would stop the next thing that polls
    raise InterruptProcessingException()


def send_event(data: Mapping[str, Any]) -> None:
    """Send plain data to the browser that queued the prompt, as a websocket message of type `devicebridge.event`."""
    from server import PromptServer

    server = PromptServer.instance
    server.send_sync("devicebridge.event", dict(data), server.client_id)


@contextmanager
def training_allowed() -> Iterator[None]:
    """Leave the inference mode that ComfyUI runs every node in; parameters made inside can have gradients."""
    import torch

    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def host_memory_freed() -> Iterator[None]:
    """Take ComfyUI's own models out of device memory; it loads them again when a node needs them."""
    from comfy.model_management import soft_empty_cache, unload_all_models

    unload_all_models()
    soft_empty_cache()
    try:
        yield
    finally:
        soft_empty_cache()


def list_models() -> list[str]:
    """Names of checkpoint files in models/diffusion_models and of model folders in models/diffusers, sorted."""
    checkpoints = [name for name in list_checkpoints() if name.endswith((".safetensors", ".sft"))]
    return checkpoints + sorted(_diffusers_folders())


def list_checkpoints() -> list[str]:
    """Names of all files in models/diffusion_models, sorted."""
    import folder_paths

    return sorted(folder_paths.get_filename_list("diffusion_models"))


def find_checkpoint(name: str) -> Path:
    """The file of a name of list_checkpoints.

    Raises: ValueError if there is no such file.
    """
    import folder_paths

    found = folder_paths.get_full_path("diffusion_models", name)
    if found is None:
        raise ValueError(
            f"{name!r} is not in models/diffusion_models; found there: {', '.join(list_checkpoints()) or 'nothing'}"
        )
    return Path(found)


def list_gpus() -> tuple[torch.device, ...]:
    """Every GPU that ComfyUI may use, its main one first; () on a machine without."""
    import comfy.model_management as management

    devices = dict.fromkeys((management.get_torch_device(), *management.get_all_torch_devices()))
    return tuple(device for device in devices if not management.is_device_cpu(device))


def find_model(name: str, path: str) -> Path:
    """The checkpoint a loader names: an entry of list_models, or a path of the user's own.

    Raises: ValueError if there is no such file or folder, or nodes may not read it.
    """
    import folder_paths

    if name == USE_PATH:
        if not path.strip():
            raise ValueError(
                f"the model is {USE_PATH!r}, but path is empty; give the path of a checkpoint file or model folder"
            )
        return readable_path(path, "model")
    found = folder_paths.get_full_path("diffusion_models", name) or _diffusers_folders().get(name)
    if found is None:
        raise ValueError(
            f"model {name!r} is neither in models/diffusion_models nor in models/diffusers; found there: "
            f"{', '.join(list_models()) or 'nothing'}"
        )
    return Path(found)


def _diffusers_folders() -> dict[str, str]:
    """Name -> path of every folder under models/diffusers that holds a whole diffusers model."""
    import folder_paths

    found: dict[str, str] = {}
    for base in folder_paths.get_folder_paths("diffusers"):
        for folder, subfolders, files in os.walk(base, followlinks=True):
            if "model_index.json" in files:
                found.setdefault(os.path.relpath(folder, base).replace(os.sep, "/"), folder)
                subfolders.clear()
    return found


def output_entry(path: Path) -> dict[str, str] | None:
    """How ComfyUI's history names a file of its output folder; None for a file elsewhere."""
    import folder_paths

    base = Path(folder_paths.get_output_directory())
    if not path.is_relative_to(base):
        return None
    inner = path.relative_to(base)
    return {"filename": inner.name, "subfolder": inner.parent.as_posix().removeprefix("."), "type": "output"}
