"""Node: choose a model and the devices that will hold it. Reads the checkpoint's header, no weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from . import host
from .fields import AUTO, make_part, read_auto, read_list
from .host import io
from .types import ModelSocket, TrainingModel

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo
    from ..config.job import SplitConfig

_log = logging.getLogger(__name__)


class LoadModelForTraining(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeLoadModelForTraining",
            display_name="Load Model for Training Across GPUs",
            category="DeviceBridge/training",
            description="Chooses a diffusion transformer and splits its blocks over several GPUs. Only the file's "
            "header is read here; the weights go straight to their GPU when training starts.",
            search_aliases=["flux trainer", "multi gpu training", "split model", "lora training"],
            inputs=[
                io.Combo.Input(
                    "model",
                    options=[host.USE_PATH, *host.list_models()],
                    default=host.USE_PATH,
                    tooltip="A checkpoint in models/diffusion_models (any shard of several) or a model folder in "
                    f"models/diffusers. {host.USE_PATH} takes the path below instead.",
                ),
                io.String.Input(
                    "path",
                    default="",
                    placeholder="/path/to/model",
                    tooltip=f"Full path of a diffusers model folder or a .safetensors file. Matters only while model "
                    f"is {host.USE_PATH}.",
                ),
                io.Combo.Input(
                    "variant",
                    options=[AUTO, *_variants()],
                    default=AUTO,
                    advanced=True,
                    tooltip="Which published model it is. auto recognises it from the file; choose only if that fails "
                    "or the file is of a size of its own.",
                ),
                io.String.Input(
                    "devices",
                    default=AUTO,
                    tooltip="Devices that hold the blocks, in order, such as cuda:0,cuda:1. The first also holds the "
                    "embeddings and the last layers. auto takes every GPU there is, or the CPU, and so works on any "
                    "machine; a device named here must exist.",
                ),
                io.Combo.Input(
                    "balance",
                    options=["bytes", "time", "manual"],
                    default="bytes",
                    tooltip="How the blocks are shared out: equal memory (bytes), equal computing time (time), or cut "
                    "where split_at says (manual). Matters with two or more devices.",
                ),
                io.String.Input(
                    "split_at",
                    default="",
                    placeholder="12, 30",
                    advanced=True,
                    tooltip="Index of the first block of each device after the first, counted from 0 over all blocks, "
                    "such as 12, 30 for three devices. Only for balance manual.",
                ),
                io.String.Input(
                    "memory_limit_gb",
                    default="",
                    placeholder="20, 14",
                    advanced=True,
                    tooltip="Memory the weights may take on each device, in decimal GB, such as 20, 14. Empty takes "
                    "what is free. Set it when another program needs some of a GPU.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=["bfloat16", "float32"],
                    default="bfloat16",
                    advanced=True,
                    tooltip="Number type of the frozen weights and of the computation. float32 takes twice the memory "
                    "and is for comparisons.",
                ),
            ],
            outputs=[ModelSocket.Output("model", tooltip="The model to train, not loaded yet.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: str,
        path: str,
        variant: str,
        devices: str,
        balance: str,
        split_at: str,
        memory_limit_gb: str,
        dtype: str,
    ) -> io.NodeOutput:
        from ..checkpoints.checkpoint import read_checkpoint
        from ..config.job import ModelConfig

        split = _read_split(devices, balance, split_at, memory_limit_gb)
        checkpoint = host.find_model(model, path)
        info = read_checkpoint(checkpoint, variant=read_auto(variant))
        config = make_part(ModelConfig, path=str(checkpoint), variant=read_auto(variant), dtype=dtype)
        host.NodeView(cls.hidden.unique_id).show_text(_describe(info, split))
        return io.NodeOutput(TrainingModel(config, split))


def _variants() -> list[str]:
    from ..families.registry import FAMILIES

    return [variant.name for family in FAMILIES.values() for variant in family.variants]


def _read_split(devices: str, balance: str, split_at: str, memory_limit_gb: str) -> SplitConfig:
    from ..config.job import SplitConfig
    from ..jobs.resolve import find_machine

    names = read_list(read_auto(devices), str, "devices")
    found = find_machine(names).devices
    if not names and found[0].type == "cpu":
        _log.warning("no GPU was found: the model will be trained on the CPU, which takes very long")
    return make_part(
        SplitConfig,
        devices=names,
        balance=balance,
        split_at=read_list(split_at, int, "split_at") if balance == "manual" else (),
        memory_limit_gb=read_list(memory_limit_gb, float, "memory_limit_gb"),
    )


def _describe(info: CheckpointInfo, split: SplitConfig) -> str:
    from ..jobs.resolve import find_machine

    name = info.variant.name if info.variant else f"{info.family.title} of its own size"
    return f"{name}, {len(info.tensors)} tensors, on {', '.join(map(str, find_machine(split.devices).devices))}"
