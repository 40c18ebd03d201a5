"""Nodes: one MODEL over several GPUs, from a MODEL or straight from its file."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from ..parallel.devices import find_device, hidden_gpus
from . import host
from .allocation import read_allocation
from .choices import COMES_AND_GOES, device_options, lists_pass, read_devices
from .host import folders, io
from .saying import said_on_node, schema
from .sockets import AUTO, LATER, Socket, make_inputs, read_auto, read_list

if TYPE_CHECKING:
    from .host.split.plan import SplitRequest

_log = logging.getLogger(__name__)


_BALANCES = ("memory", "time", "manual")
_FIXED = (
    io.Combo.Input(
        "balance",
        options=list(_BALANCES),
        default=_BALANCES[0],
        extra_dict=COMES_AND_GOES,
        tooltip="How the blocks are shared out: by memory, in proportion to what each GPU has; by equal computing "
        "time, best with CFG or batches on equal GPUs; or cut where split_at says. A text linked here may be an "
        "allocation of ComfyUI-MultiGPU, such as cuda:0,10gb;cuda:1,*.",
    ),
    Socket("split_at", "split.split_at", placeholder="12, 30", advanced=True),
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
        tooltip="How activations travel. stream: once per GPU border, for models that are known. relay: to the "
        "first GPU after every block of another GPU, right for every model. auto chooses.",
    ),
    io.Boolean.Input(
        "overlap",
        default=True,
        advanced=True,
        tooltip="Compute cond and uncond, and the pictures of a batch, one after the other but on both GPUs at the "
        "same time. Matters with CFG above 1 or a batch. Like the size of a batch it may change the last bits of a "
        "picture; off computes one batch, GPU after GPU, with the very bits of one GPU. With way tokens each GPU "
        "computes a whole one of them. Way tensor ignores it.",
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
        **LATER,
        tooltip="Compute the first step of every run twice, the second time in the plainest form of the same way, and "
        "stop with what differs. For the first run of a new graph; costs one slow step.",
    ),
    io.Combo.Input(
        "way",
        options=["auto", "blocks", "tokens", "tensor"],
        default="auto",
        optional=True,
        tooltip="blocks: every GPU computes its own blocks, one GPU after the other. tokens: every GPU has the whole "
        "model and computes a part of each picture or clip, over any link, with the sums of one GPU. tensor: all GPUs "
        "compute each block with a part of its weights, faster where they are linked fast (NVLink, PCIe with peer "
        "access). auto takes the one that is forecast to be the fastest.",
    ),
    io.String.Input(
        "shares",
        default="",
        placeholder="3:5",
        **LATER,
        tooltip="With way tokens: how much of each picture each GPU computes, such as 3:5 for a second GPU that is "
        "faster. Empty gives equal shares to GPUs of one kind, and others shares by their measured speed.",
    ),
    io.Combo.Input(
        "exchange",
        options=["full", "8-bit"],
        default="full",
        **LATER,
        tooltip="How GPUs send each other keys and values (way tokens) or partial sums (way tensor). full: as they "
        "are. 8-bit: half as much travels over slow links, and pictures change slightly: less than by 8-bit weights "
        "with way tokens, about as much with way tensor. Way blocks ignores it.",
    ),
)


def _inputs() -> list[Socket | io.Input]:
    """Made anew each time: the list of devices shows what is there now."""
    return [
        io.Combo.Input(
            "devices",
            default=AUTO,
            tooltip="GPUs that hold the blocks, in order. The first also holds the embeddings, the last layers and "
            "what the sampler works on. auto takes every GPU, and on a machine with one leaves the model as it is; a "
            "device named here must exist.",
            **device_options(AUTO, several=True, has_cpu=False),
        ),
        *_FIXED,
    ]


class _SplitNode(io.ComfyNode):
    validate_inputs = lists_pass("devices", "balance")

    @classmethod
    def shown(cls, model: Any) -> io.NodeOutput:
        from .host.split.model import blocks_by_card, describe_split

        host.NodeView(cls.hidden.unique_id).show_text(describe_split(model))
        return io.NodeOutput(model, ui={"blocks": blocks_by_card(model)})


class SplitModel(_SplitNode):
    define_schema = schema(
        node_id="DeviceBridgeSplitModel",
        display_name="Split Model Across GPUs",
        category="advanced/multigpu",
        description="Puts some of a model's layers on each GPU and hands activations from one to the next, so "
        "that a model too large for one GPU runs without streaming weights. The result is an ordinary MODEL: "
        "samplers, LoRA loaders and ControlNet stay as they are. Put it directly after the loader.",
        search_aliases=["multi gpu", "multigpu", "two gpus", "tensor parallel", "distorch2", "layer split"],
        inputs=lambda: [
            io.Model.Input("model", tooltip="Any MODEL whose blocks are known or can be found. It is not changed."),
            *make_inputs(_inputs()),
        ],
        outputs=[io.Model.Output("split", display_name="model", tooltip="The same model over several GPUs.")],
    )

    @classmethod
    @said_on_node
    def execute(cls, model: Any, **sockets: Any) -> io.NodeOutput:
        request = _read_request(sockets)
        if request is None:
            return io.NodeOutput(model)
        from .host.split.model import split_model

        return cls.shown(split_model(model, request))


class LoadDiffusionModelSplit(_SplitNode):
    define_schema = schema(
        node_id="DeviceBridgeLoadDiffusionModelSplit",
        display_name="Load Diffusion Model Across GPUs",
        category="advanced/multigpu",
        description="Loads a diffusion model so that each GPU holds some of its layers; no GPU ever holds the "
        "whole model. The result is an ordinary MODEL.",
        search_aliases=["multi gpu", "multigpu", "two gpus", "tensor parallel", "distorch2", "unet loader"],
        inputs=lambda: [
            io.Combo.Input(
                "unet_name",
                options=folders.list_checkpoints(),
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
            *make_inputs(_inputs()),
        ],
        outputs=[io.Model.Output("model", tooltip="The model over several GPUs.")],
    )

    @classmethod
    @said_on_node
    def execute(cls, unet_name: str, weight_dtype: str, **sockets: Any) -> io.NodeOutput:
        path = folders.find_checkpoint(unet_name)
        from .host.split.model import load_split_model

        return cls.shown(load_split_model(path, weight_dtype, read_place(sockets)))


def read_place(sockets: dict[str, Any]) -> torch.device | SplitRequest | None:
    """The device that holds the whole model, where none other is named; else as _read_request."""
    named, balance = _read_devices(sockets)
    only = {*named, *getattr(balance, "gpus", ())}
    return only.pop() if len(only) == 1 else _read_request(sockets)


def _read_devices(sockets: dict[str, Any]) -> tuple[tuple[torch.device, ...], Any]:
    """The devices that are named, and one of the options of balance or an Allocation. Raises: ValueError for others."""
    named = tuple(map(find_device, read_devices(sockets["devices"])))
    text = str(sockets["balance"]).strip() or _BALANCES[0]  # old workflows have an empty text
    return named, text if text in _BALANCES else read_allocation(text, named or host.list_gpus())


def _read_request(sockets: dict[str, Any]) -> SplitRequest | None:
    """The request, or None where there is one GPU only and the model stays whole."""
    from .host.split.plan import SplitRequest

    named, balance = _read_devices(sockets)
    named = named or getattr(balance, "gpus", ())
    chosen = named or host.list_gpus()
    cuts = read_list(sockets["split_at"], int, "split_at")
    if len(chosen) < 2 and not named:
        found = f"only {chosen[0]}" if chosen else "no GPU"
        _log.warning("split: this machine has %s; the model stays whole%s", found, hidden_gpus())
        return None
    if cuts and balance != "manual":
        text = ", ".join(map(str, cuts))
        _log.warning("split: split_at %s is ignored with balance %s; it is for manual", text, sockets["balance"])
        cuts = ()
    as_given = ("overlap", "offload", "verify", "exchange")
    others: dict[str, Any] = {name: sockets[name] for name in as_given if name in sockets}
    others |= {name: read_auto(sockets.get(name, AUTO)) or None for name in ("transport", "way")}
    others["shares"] = read_list(sockets.get("shares", "").replace(":", ","), float, "shares")
    others["memory_limit_gb"] = read_list(sockets["memory_limit_gb"], float, "memory_limit_gb")
    return SplitRequest(chosen, balance, cuts, **others)
