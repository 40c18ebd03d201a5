"""A stand-in for the parts of ComfyUI that the nodes touch, so that they can be tested where no ComfyUI is.

It knows the schema classes we use and refuses any keyword it does not know, as the real ones do. What the nodes do to
the host is recorded on the object that `install` returns.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.tests.comfy_host import allow_folders

_COMMON = {"id", "display_name", "optional", "tooltip", "advanced"}
_WIDGET = _COMMON | {"default"}
_INPUT_OPTIONS = {
    "COMBO": _WIDGET | {"options", "extra_dict"},
    "STRING": _WIDGET | {"multiline", "placeholder", "force_input", "lazy"}, "INT": _WIDGET | {"min", "max", "step"},
    "FLOAT": _WIDGET | {"min", "max", "step", "round"}, "BOOLEAN": _WIDGET,
}  # fmt: skip


class InterruptProcessingException(BaseException):
    """As the host's, not an Exception."""


@dataclass
class FakeHost:
    """What happened to the host, and what it will say."""

    root: Path
    is_interrupted: bool = False
    texts: list[str] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)
    shown: list[tuple[int, int]] = field(default_factory=list)  # of progress, what the window shows: see ProgressBar
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    previews: list[tuple[str, Any, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    gpus: tuple[torch.device, ...] = ()
    folder_names_and_paths: dict[str, tuple[list[str], set[str]]] = field(default_factory=dict)

    def allow(self, *folders: Path) -> None:
        """As a user does who has datasets or models elsewhere."""
        allow_folders(self.root / "user", *folders)


def _option(name: str) -> property:
    return property(lambda self: self.options.get(name), lambda self, value: self.options.update({name: value}))


def _socket_type(io_type: str) -> type:
    class Input:
        tooltip, display_name = _option("tooltip"), _option("display_name")

        def __init__(self, id: str, *positional: Any, **options: Any) -> None:
            unknown = set(options) - _INPUT_OPTIONS.get(io_type, _COMMON)
            assert not unknown, f"{io_type} input {id} has unknown options {unknown}"
            assert not positional
            self.id, self.io_type, self.options = id, io_type, options

    class Output:
        def __init__(
            self, id: str | None = None, display_name: str | None = None, tooltip: str | None = None,
            is_output_list: bool = False,
        ) -> None:  # fmt: skip
            self.id, self.io_type, self.tooltip = id, io_type, tooltip
            self.display_name = display_name or id

    return type(io_type, (), {"Input": Input, "Output": Output, "io_type": io_type})


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    inputs: list[Any]
    outputs: list[Any]
    description: str = ""
    hidden: list[Any] = field(default_factory=list)
    search_aliases: list[str] = field(default_factory=list)
    is_output_node: bool = False
    is_input_list: bool = False
    is_experimental: bool = False


class NodeOutput:
    def __init__(self, *args: Any, ui: dict[str, Any] | None = None) -> None:
        self.args, self.ui = args, ui


class ComfyNode:
    hidden = SimpleNamespace(unique_id="7", prompt=None)

    @classmethod
    def define_schema(cls) -> Schema:
        raise NotImplementedError

    @classmethod
    def execute(cls, **kwargs: Any) -> NodeOutput:
        raise NotImplementedError

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def validate_inputs(cls, **kwargs: Any) -> Any:
        raise NotImplementedError


class ComfyExtension:
    async def get_node_list(self) -> list[type[ComfyNode]]:
        raise NotImplementedError


def install(monkeypatch: pytest.MonkeyPatch, root: Path) -> FakeHost:
    """Put the stand-in into sys.modules until the test ends, with its folders under root; forgets our own nodes."""
    host = FakeHost(root)
    for name in (
        "input", "output", "models/diffusion_models", "models/checkpoints", "models/diffusers", "models/vae",
        "models/text_encoders", "user", "temp", "custom_nodes",
    ):  # fmt: skip
        (root / name).mkdir(parents=True, exist_ok=True)
    host.folder_names_and_paths["custom_nodes"] = ([str(root / "custom_nodes")], set())
    utils, management = {"ProgressBar": _progress_bar(host)}, _model_management(host)
    modules = {
        "comfy_api": {}, "comfy_api.v0_0_2": _api(), "comfy.utils": utils, "comfy.model_management": management,
        "comfy": {}, "comfy_execution": {}, "comfy_execution.graph_utils": {"ExecutionBlocker": ExecutionBlocker},
        "server": {"PromptServer": _prompt_server(host)}, "folder_paths": _folder_paths(host),
    }  # fmt: skip
    for name in [name for name in sys.modules if name.startswith("devicebridge.nodes")]:
        monkeypatch.delitem(sys.modules, name)
    for name, attributes in modules.items():
        monkeypatch.setitem(sys.modules, name, module := ModuleType(name))
        vars(module).update(attributes)
    for part in ("utils", "model_management"):
        setattr(sys.modules["comfy"], part, sys.modules[f"comfy.{part}"])
    return host


def _api() -> dict[str, Any]:
    kinds = {
        "Combo": "COMBO", "String": "STRING", "Int": "INT", "Float": "FLOAT", "Boolean": "BOOLEAN", "AnyType": "*",
        "LoraModel": "LORA_MODEL", "LossMap": "LOSS_MAP", "Model": "MODEL", "Image": "IMAGE", "Clip": "CLIP",
        "ClipVision": "CLIP_VISION", "Vae": "VAE", "Latent": "LATENT", "Conditioning": "CONDITIONING",
    }  # fmt: skip
    own = {"Custom": _socket_type, "Schema": Schema, "NodeOutput": NodeOutput, "ComfyNode": ComfyNode, "Input": object}
    own |= {name: _socket_type(io_type) for name, io_type in kinds.items()}
    io = SimpleNamespace(**own, Hidden=SimpleNamespace(unique_id="UNIQUE_ID", prompt="PROMPT"))
    return {"io": io, "ComfyAPI": object, "ComfyExtension": ComfyExtension}


def _progress_bar(host: FakeHost) -> type:
    class ProgressBar:
        """Raises when the user has cancelled, and forgets the request, as the host's does through its hook; drops what
        is less than it has shown, unless that is the last."""

        def __init__(self, total: int, node_id: str | None = None) -> None:
            self.total = total
            self.most = -1

        def update_absolute(self, value: int, total: int | None = None, preview: Any = None) -> None:
            if host.is_interrupted:
                host.is_interrupted = False
                raise InterruptProcessingException
            host.progress.append((value, total or self.total))
            if value > self.most or value >= (total or self.total):
                self.most = value
                host.shown.append((value, total or self.total))
            if preview is not None:
                host.previews.append(preview)

    return ProgressBar


def _model_management(host: FakeHost) -> dict[str, Any]:
    return {
        "InterruptProcessingException": InterruptProcessingException,
        "interrupt_current_processing": lambda value=True: setattr(host, "is_interrupted", value),
        "processing_interrupted": lambda: host.is_interrupted,
        "unload_all_models": lambda: host.calls.append("unload"),
        "get_torch_device": lambda: host.gpus[0] if host.gpus else torch.device("cpu"),
        "get_all_torch_devices": lambda: list(host.gpus),
        "is_device_cpu": lambda device: device.type == "cpu",
        "soft_empty_cache": lambda: host.calls.append("empty cache"),
    }


@dataclass
class ExecutionBlocker:
    message: str | None


def _prompt_server(host: FakeHost) -> Any:
    def send_progress_text(text: str, node_id: str) -> None:
        host.texts.append(text)

    def send_sync(event: str, data: dict[str, Any], sid: str | None = None) -> None:
        host.messages.append((event, data))

    own = {"client_id": "browser", "send_progress_text": send_progress_text, "send_sync": send_sync}
    return SimpleNamespace(instance=SimpleNamespace(**own))


def _folder_paths(host: FakeHost) -> dict[str, Any]:
    def names(folder_name: str) -> list[str]:
        base = host.root / "models" / folder_name
        return sorted(p.relative_to(base).as_posix() for p in base.rglob("*") if p.is_file() and p.suffix != ".gguf")

    def full_path(folder_name: str, filename: str) -> str | None:
        path = host.root / "models" / folder_name / filename
        return str(path) if path.is_file() else None

    kinds = ("input", "output", "temp", "user")
    return {
        **{f"get_{kind}_directory": lambda kind=kind: str(host.root / kind) for kind in kinds},
        "get_filename_list": names, "get_full_path": full_path,
        "get_folder_paths": lambda folder_name: [str(host.root / "models" / folder_name)],
        "models_dir": str(host.root / "models"), "folder_names_and_paths": host.folder_names_and_paths,
    }  # fmt: skip
