"""ComfyUI, the host, as the nodes see it. No other room imports anything of ComfyUI's. Only `comfy_api` is imported
with this file. Functions import the rest themselves, because that may set up devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from comfy_api.v0_0_2 import ComfyAPI as ComfyAPI
from comfy_api.v0_0_2 import ComfyExtension as ComfyExtension
from comfy_api.v0_0_2 import io as io

from ... import compat
from ...data.image import opened
from .comfy_encoders import release_models

if TYPE_CHECKING:
    from ...checkpoints.checkpoint import CheckpointInfo
    from ...config.model import ModelConfig

_PREVIEW_SIDE = 512  # pixels; ComfyUI sends no more


class NodeView:
    """What a running node shows on itself. Nothing here raises on Cancel, as ComfyUI's progress bar would."""

    footer = ""  # what stands behind every text of the node that runs: its warnings
    _last: tuple[str, str, str] = "", "", ""  # the node that showed text last, what, and its footer then

    def __init__(self, node_id: str | None) -> None:
        self.node_id = str(node_id) if node_id is not None else ""
        self.begin_bar()

    def begin_bar(self) -> None:
        """Progress counts from nothing again: ComfyUI's bar drops values smaller than it has shown."""
        from comfy.utils import ProgressBar

        self._bar = ProgressBar(1, node_id=self.node_id or None)

    def show_picture(self, path: Path, done: int, total: int) -> None:
        """A file as the node's preview, of a clip its first frame; progress as it was. Raises: OSError; ValueError."""
        with opened(path) as picture:
            self.show_progress(done, total, ("JPEG", picture.convert("RGB"), _PREVIEW_SIDE))

    def show_progress(self, done: int, total: int, preview: tuple[str, Any, int] | None = None) -> None:
        from comfy.model_management import InterruptProcessingException, interrupt_current_processing

        try:
            self._bar.update_absolute(done, max(total, 1), preview=preview)
        except InterruptProcessingException:
            interrupt_current_processing(True)  # the bar took the request away; is_cancelled must still see it

    def show_text(self, text: str) -> None:
        from server import PromptServer

        NodeView._last = self.node_id, text, NodeView.footer
        if self.node_id:
            shown = "\n".join(filter(None, [text, NodeView.footer]))
            PromptServer.instance.send_progress_text(shown, self.node_id)

    def show_again(self) -> None:
        """The node's last text, if warnings have come since."""
        node, text, footer = NodeView._last
        if node != self.node_id or footer != NodeView.footer:
            self.show_text(text if node == self.node_id else "")


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


def blocked(count: int) -> list[Any]:
    """Values for so many outputs behind which no node runs, and none fails."""
    from comfy_execution.graph_utils import ExecutionBlocker

    return [ExecutionBlocker(None)] * count


@contextmanager
def training_allowed() -> Iterator[None]:
    """Leave the inference mode that ComfyUI runs every node in; parameters made inside can have gradients."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def read_native(path: str, dtype: str, like: Any = None) -> CheckpointInfo:
    """A file as ComfyUI's model. Raises: ValueError for one that cannot be trained; RuntimeError as compat.check."""
    from .native import source

    compat.check("training")
    return source.read_native(Path(path), dtype, like)


@contextmanager
def native_model(model: ModelConfig, info: CheckpointInfo | None = None) -> Iterator[CheckpointInfo]:
    """Inside, ComfyUI is ready to train its own model, which is given. info: of it, if it was read already."""
    from .native.model import native_training

    with native_training():
        yield info or read_native(model.path, model.dtype)


@contextmanager
def host_memory_freed() -> Iterator[None]:
    """Take ComfyUI's own models out of device memory; it loads them again when a node needs them."""
    from comfy.model_management import soft_empty_cache

    release_models()
    try:
        yield
    finally:
        soft_empty_cache()


def known_gpus() -> tuple[torch.device, ...]:
    """As list_gpus; () before ComfyUI has looked for its devices."""
    return list_gpus() if "comfy.model_management" in sys.modules else ()


def list_gpus() -> tuple[torch.device, ...]:
    """Every GPU that ComfyUI may use, its main one first; () on a machine without."""
    import comfy.model_management as management

    devices = dict.fromkeys((management.get_torch_device(), *management.get_all_torch_devices()))
    return tuple(device for device in devices if not management.is_device_cpu(device))
