"""Nodes: one stock MODEL over several GPUs, from a MODEL or straight from its file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from . import host
from .fields import AUTO, read_auto, read_list
from .host import io

if TYPE_CHECKING:
    import torch

    from .host.split_model import SplitRequest

_log = logging.getLogger(__name__)


class SplitModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeSplitModel",
            display_name="Split Model Across GPUs",
            category="DeviceBridge/inference",
            description="Puts some of a model's layers on each GPU and hands activations from one to the next, so "
            "that a model too large for one GPU runs without streaming weights. The result is an ordinary MODEL: "
            "samplers, LoRA loaders and ControlNet stay as they are. Put it directly after the loader.",
            search_aliases=["multi gpu", "two gpus", "model parallel", "distorch", "layer split", "pipeline"],
            inputs=[
                io.Model.Input("model", tooltip="Any MODEL whose blocks are known or can be found. It is not changed."),
                *_split_inputs(),
            ],
            outputs=[io.Model.Output("split", display_name="model", tooltip="The same model over several GPUs.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: Any, **settings: Any) -> io.NodeOutput:
        from .host.split_model import describe_split, split_model

        request = _read_request(**settings)
        if request is None:
            return io.NodeOutput(model)
        split = split_model(model, request)
        host.NodeView(cls.hidden.unique_id).show_text(describe_split(split))
        return io.NodeOutput(split)


class LoadDiffusionModelSplit(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeLoadDiffusionModelSplit",
            display_name="Load Diffusion Model Across GPUs",
            category="DeviceBridge/inference",
            description="Loads a diffusion model so that each GPU holds some of its layers; no GPU ever holds the "
            "whole model. The result is an ordinary MODEL.",
            search_aliases=["multi gpu", "two gpus", "model parallel", "unet loader", "split model"],
            inputs=[
                io.Combo.Input(
                    "unet_name",
                    options=host.list_checkpoints(),
                    tooltip="A diffusion model file in models/diffusion_models.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"],
                    default="default",
                    advanced=True,
                    tooltip="Number type of the weights. default keeps what the file holds; the fp8 types halve the "
                    "memory of a 16-bit file at a small loss.",
                ),
                *_split_inputs(),
            ],
            outputs=[io.Model.Output("model", tooltip="The model over several GPUs.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, unet_name: str, weight_dtype: str, **settings: Any) -> io.NodeOutput:
        from .host.split_model import describe_split, load_split_model

        path = host.find_checkpoint(unet_name)
        model = load_split_model(path, weight_dtype, _read_request(**settings))
        host.NodeView(cls.hidden.unique_id).show_text(describe_split(model))
        return io.NodeOutput(model)


def _split_inputs() -> list[Any]:
    return [
        io.String.Input(
            "devices",
            default=AUTO,
            tooltip="GPUs that hold the blocks, in order, such as cuda:0,cuda:1. The first also holds the embeddings, "
            "the last layers and what the sampler works on. auto takes every GPU, and on a machine with one leaves "
            "the model as it is; a device named here must exist.",
        ),
        io.Combo.Input(
            "balance",
            options=["memory", "time", "manual"],
            default="memory",
            tooltip="How the blocks are shared out: by memory, in proportion to what each GPU has; by equal computing "
            "time, best with CFG or batches on equal GPUs; or cut where split_at says.",
        ),
        io.String.Input(
            "split_at",
            default="",
            placeholder="12, 30",
            advanced=True,
            tooltip="Index of the first block of each GPU after the first, counted from 0 over all blocks, such as "
            "12, 30 for three GPUs. Only for balance manual.",
        ),
        io.String.Input(
            "memory_limit_gb",
            default="",
            placeholder="20, 14",
            advanced=True,
            tooltip="Memory the weights may take on each GPU, in decimal GB, such as 20, 14. Empty leaves it to "
            "ComfyUI. Set it when another program needs some of a GPU.",
        ),
        io.Combo.Input(
            "transport",
            options=["auto", "stream", "relay"],
            default="auto",
            advanced=True,
            tooltip="How activations travel. stream: once per GPU border, for models that are known. relay: home after "
            "every block of another GPU, right for every model. auto chooses.",
        ),
        io.Boolean.Input(
            "overlap",
            default=True,
            advanced=True,
            tooltip="Compute cond and uncond, and the pictures of a batch, one after the other but on both GPUs at the "
            "same time. Matters with CFG above 1 or a batch. Like the size of a batch it may change the last bits of a "
            "picture; off computes one batch, GPU after GPU, with the very bits of one GPU.",
        ),
        io.Boolean.Input(
            "offload",
            default=True,
            advanced=True,
            tooltip="Weights beyond a GPU's limit stay in host memory and are streamed at every step. Off refuses a "
            "model that does not fit.",
        ),
        io.Boolean.Input(
            "verify",
            default=False,
            optional=True,
            advanced=True,
            tooltip="Compute the first step of every run twice, the second time without overlap and by relay, and stop "
            "with what differs. For the first run of a new graph; costs one slow step.",
        ),
    ]


def _read_request(
    devices: str,
    balance: str,
    split_at: str,
    memory_limit_gb: str,
    transport: str,
    overlap: bool,
    offload: bool,
    verify: bool = False,
) -> SplitRequest | None:
    """The request, or None where there is one GPU only and the model stays whole."""
    from .host.split_model import SplitRequest

    chosen = _find_devices(devices)
    if len(chosen) < 2 and not read_auto(devices):
        _log.warning("split: this machine has %s; the model stays whole", f"only {chosen[0]}" if chosen else "no GPU")
        return None
    if split_at.strip() and balance != "manual":
        _log.warning("split: split_at %s is ignored with balance %s; it is for manual", split_at.strip(), balance)
    return SplitRequest(
        devices=chosen,
        balance=balance,  # type: ignore[arg-type]
        split_at=read_list(split_at, int, "split_at") if balance == "manual" else (),
        memory_limit_gb=read_list(memory_limit_gb, float, "memory_limit_gb"),
        transport=read_auto(transport) or None,  # type: ignore[arg-type]
        overlap=overlap,
        offload=offload,
        verify=verify,
    )


def _find_devices(text: str) -> tuple[torch.device, ...]:
    """The devices a user named; auto is every GPU of the host's, its main one first."""
    from ..jobs.resolve import find_machine

    names = read_list(read_auto(text), str, "devices")
    return find_machine(names).devices if names else host.list_gpus()
