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
from .sockets import AUTO, LATER, Socket, read_auto, read_list

if TYPE_CHECKING:
    from .host.split.plan import SplitRequest

_log = logging.getLogger(__name__)
_BALANCES = ("memory", "time", "manual")
_WEIGHTS = ["default", "fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"]
_FIXED = (
    io.Combo.Input("balance", options=list(_BALANCES), default=_BALANCES[0], extra_dict=COMES_AND_GOES),
    Socket("split_at", "split.split_at", placeholder="12, 30", advanced=True),
    io.String.Input("memory_limit_gb", default="", placeholder="20, 14", advanced=True),
    io.Combo.Input("transport", options=["auto", "stream", "relay"], default="auto", advanced=True),
    io.Boolean.Input("overlap", default=True, advanced=True),
    io.Boolean.Input("offload", default=True, advanced=True),
    io.Boolean.Input("verify", default=False, **LATER),
    io.Combo.Input("way", options=["auto", "blocks", "tokens", "tensor"], default="auto", optional=True),
    io.String.Input("shares", default="", placeholder="3:5", **LATER),
    io.Combo.Input("exchange", options=["full", "8-bit"], default="full", **LATER),
)


def _inputs() -> list[Socket | io.Input]:
    devices = io.Combo.Input("devices", default=AUTO, **device_options(AUTO, several=True, has_cpu=False))
    return [devices, *_FIXED]


class _SplitNode(io.ComfyNode):
    validate_inputs = lists_pass("devices", "balance")

    @classmethod
    def shown(cls, model: Any) -> io.NodeOutput:
        from .host.split.model import describe_split

        text, blocks = describe_split(model)
        host.NodeView(cls.hidden.unique_id).show_text(text)
        return io.NodeOutput(model, ui={"blocks": blocks})


class SplitModel(_SplitNode):
    define_schema = schema(
        node_id="DeviceBridgeSplitModel",
        category="advanced/multigpu",
        search_aliases=["multi gpu", "multigpu", "two gpus", "tensor parallel", "distorch2", "layer split"],
        inputs=lambda: [io.Model.Input("model"), *_inputs()],
        outputs=[io.Model.Output("split")],
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
        category="advanced/multigpu",
        search_aliases=["multi gpu", "multigpu", "two gpus", "tensor parallel", "distorch2", "unet loader"],
        inputs=lambda: [
            io.Combo.Input("unet_name", options=folders.list_checkpoints()),
            io.Combo.Input("weight_dtype", options=_WEIGHTS, default=_WEIGHTS[0], advanced=True),
            *_inputs(),
        ],
        outputs=[io.Model.Output("model")],
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
