"""Nodes: choose a model and its devices, and hold its frozen weights in fewer bits. They read headers, no weights."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.job import ModelConfig, SplitConfig
from ..config.setting import requested
from . import host
from .captions import DEFAULT_FOLDER
from .choices import device_options, lists_pass, read_devices
from .host import folders, io
from .saying import said_on_node, training_schema
from .sockets import AUTO, LATER, Socket, read_section
from .types import ModelSocket, TrainingModel

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo

_log = logging.getLogger(__name__)


class LoadModelForTraining(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeLoadModelForTraining",
        search_aliases=["flux trainer", "multi gpu training", "split model", "lora training"],
        inputs=lambda: _inputs(),
        is_named=True,
        outputs=[ModelSocket.Output("model")],
    )
    validate_inputs = lists_pass("devices", "balance")

    @classmethod
    @said_on_node
    def execute(cls, model: str, path: str, stock_model: Any = None, **sockets: Any) -> io.NodeOutput:
        split, devices = _read_split(sockets)
        if stock_model is not None:
            from .host.native.source import path_of_model

            config, info = _native(str(path_of_model(stock_model)), sockets, stock_model)
        else:
            config, info = recognised(folders.find_model(model, path), sockets)
        name = info.variant.name if info.variant else f"{info.family.title} of its own size"
        name = info.family.title if config.family else name
        text = f"{name}, {len(info.tensors)} tensors, on {', '.join(map(str, devices))}"
        host.NodeView(cls.hidden.unique_id).show_text(text)
        return io.NodeOutput(TrainingModel(config, split))


def recognised(checkpoint: Path, sockets: dict[str, Any]) -> tuple[ModelConfig, CheckpointInfo]:
    """A model of the pack's own families, else one that ComfyUI's own code builds.
    Raises: ValueError for what neither knows, saying which socket or node to use instead."""
    from ..checkpoints.checkpoint import OtherModel, read_checkpoint

    config = read_section(ModelConfig, _inputs(), sockets, path=str(checkpoint))
    try:
        return config, read_checkpoint(checkpoint, variant=config.variant)
    except OtherModel as error:
        if config.variant:
            raise ValueError(f"{checkpoint} is no {config.variant}; set variant to {AUTO}") from None
        kind = error.kind
    if checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is a folder, and ComfyUI builds this model from one file; choose that in model")
    try:
        return _native(str(checkpoint), sockets)
    except ValueError as error:
        if not kind:
            raise
        raise ValueError(f"{checkpoint} is {kind}; choose a diffusion model in model") from error


def _native(path: str, sockets: dict[str, Any], like: Any = None) -> tuple[ModelConfig, CheckpointInfo]:
    """A model that ComfyUI's own code will build again for training. like: the MODEL that was loaded from the file."""
    from ..families.registry import COMFYUI

    config = read_section(ModelConfig, _inputs(), sockets, path=path, family=COMFYUI, variant="")
    return config, host.read_native(path, config.dtype, like)


def _inputs() -> list[Socket | io.Input]:
    from ..families.registry import FAMILIES

    variants = [variant.name for family in FAMILIES.values() for variant in family.variants]
    return [
        io.Combo.Input("model", options=[folders.USE_PATH, *folders.list_models()], default=folders.USE_PATH),
        io.String.Input("path", default="", placeholder="/path/to/model"),
        Socket("variant", "model.variant", options=[AUTO, *variants], advanced=True),
        Socket("devices", "split.devices", read=read_devices, default=AUTO, **device_options(AUTO, several=True)),
        Socket("balance", "split.balance", advanced=True),
        Socket("split_at", "split.split_at", placeholder="12, 30", advanced=True),
        Socket("memory_limit_gb", "split.memory_limit_gb", placeholder="20, 14", advanced=True),
        Socket("dtype", "model.dtype", advanced=True),
        io.Model.Input("stock_model", optional=True),
    ]


def _read_split(sockets: dict[str, Any]) -> tuple[SplitConfig, tuple[torch.device, ...]]:
    """The settings, and the devices that they mean."""
    from ..jobs.resolve import find_machine
    from ..parallel.devices import hidden_gpus

    cuts = {} if sockets.get("balance") == "manual" else {"split_at": ()}  # which are left there for another time
    split = read_section(SplitConfig, _inputs(), sockets, **cuts)
    found = find_machine(split.devices).devices
    if found[0].type == "cpu" and not split.devices:
        _log.warning("no GPU was found: the model will be trained on the CPU, which takes very long%s", hidden_gpus())
    elif len(found) == 1 and not split.devices and (hidden := hidden_gpus()):
        _log.warning("one GPU was found, %s%s", found[0], hidden)
    return split, found


_SCHEMES = [AUTO, "fp8-compute", "int8-compute", "fp8", "int8", "none", "stored"]
_QUANTIZE_INPUTS = (
    ModelSocket.Input("model"),
    Socket("quantize", "model.quantize", options=_SCHEMES, default=AUTO),
    Socket("rotation", "model.rotation", **LATER),
    io.Boolean.Input("cache", default=False, **LATER),
)


class Quantize(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeQuantize",
        search_aliases=["fp8", "float8", "int8", "8 bit", "torchao", "gguf"],
        inputs=_QUANTIZE_INPUTS,
        is_named=True,
        outputs=[ModelSocket.Output("quantized"), io.String.Output("report")],
    )

    @classmethod
    @said_on_node
    def execute(cls, model: TrainingModel, **sockets: Any) -> io.NodeOutput:
        from ..checkpoints.checkpoint import read_checkpoint
        from ..jobs.resolve import find_machine, foresee_scheme, preview_model

        own = read_section(ModelConfig, _QUANTIZE_INPUTS, sockets, path=model.model.path)
        folder = folders.folder_in_output(f"{DEFAULT_FOLDER}/quantized", "cache") if sockets.get("cache") else ""
        held = dataclasses.replace(model.model, quantize=own.quantize, rotation=own.rotation)
        config = dataclasses.replace(held, quantized_cache=str(folder))
        with model.prepared() as native:
            info = native or read_checkpoint(config.path, config.family, config.variant)
            scheme = requested(own.quantize) or foresee_scheme(find_machine(model.split.devices), info)
            report = preview_model(dataclasses.replace(config, quantize=scheme), model.split.devices, info)
        if own.quantize != scheme:
            report += f"\nauto: the training's plan decides, and takes {scheme} on these devices if it fits"
        host.NodeView(cls.hidden.unique_id).show_text(report)
        return io.NodeOutput(dataclasses.replace(model, model=config), report, ui={"text": (report,)})
