"""Drop-down lists of what this machine has: devices, folders and files. What a workflow saved elsewhere names passes
`validate_inputs`, so that the node can say what would work, and comfy-cli where a list is marked as COMES_AND_GOES."""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import Parameter, Signature
from itertools import combinations
from typing import Any

from . import host
from .host import io
from .sockets import AUTO, read_auto, read_list

NONE = "[none]"
_NAME = re.compile(r"\s*\([^()]*\)")  # what a list shows behind a device
COMES_AND_GOES = {"list_upload": True}  # how comfy-cli knows such a list
# Lists of files, folders and devices. A link may bring their text; web/js/nodes.js lets one be drawn.
TEXT_LINKS = frozenset(
    ("model", "unet_name", "folder", "images", "evaluation_folder", "text_encoders", "text_encoder_2", "vae")
    + ("text_device", "vae_device", "devices", "balance")
)


def device_options(*first: str, several: bool = False, has_cpu: bool = True) -> dict[str, Any]:
    """Options of a drop-down of devices, or of `several`, such as "cuda:0 (NVIDIA GeForce RTX 4090, 24 GB)"."""
    from ..parallel.devices import device_title, total_bytes

    gpus = []
    for device in host.known_gpus():
        total, title = total_bytes(device), re.sub(r"\(R\)|\(TM\)|[(),]", " ", device_title(device))
        size = f", {total / 2**30:.0f} GB" if total else ""
        gpus.append(f"{device} ({' '.join(title.split())}{size})" if title or size else str(device))
    options = [*first, *gpus]
    if several:
        pairs = [list(pair) for pair in combinations(gpus, 2)]
        lists = [*pairs, *(pair[::-1] for pair in pairs if len(gpus) == 2), *([gpus] if len(gpus) > 2 else [])]
        options += [", ".join(each) for each in lists]
    return {"options": options + ["cpu"] * (has_cpu and "cpu" not in options), "extra_dict": COMES_AND_GOES}


def plain_device(text: str) -> str:
    """What a list calls a device, without the card's name; "" for auto."""
    return _NAME.sub("", read_auto(text)).strip()


def read_devices(text: str) -> tuple[str, ...]:
    """Names of devices as torch has them, also of core's "gpu:1" and "0, 1"; () for auto. Raises: ValueError."""
    from ..parallel.devices import find_device

    return tuple(str(find_device(name)) for name in read_list(plain_device(text), str, "devices"))


def file_options(*names: str) -> dict[str, Any]:
    """Options of a drop-down of files or folders. The first is its default, and in brackets stands for none of them."""
    return {"options": list(names or ("",)), "default": (names or ("",))[0], "extra_dict": COMES_AND_GOES}


def read_file(text: str) -> str:
    """The name that was chosen; "" for the first of a list, which stands in brackets."""
    text = text.strip()
    return "" if text.lower() == AUTO or text.startswith("[") and text.endswith("]") else text


def lists_pass(*ids: str) -> Any:
    """The validate_inputs of a node with these lists: what they lack is refused by execute, which says what would work.
    ComfyUI finds their names in the signature. It does not check the links of a node that asks for their types
    (input_types, by input). So this is its own rule, and beside it that a text goes into a list of TEXT_LINKS."""

    def validate_inputs(
        cls: type[io.ComfyNode], input_types: Mapping[str, Any] | None = None, **chosen: Any
    ) -> bool | str:
        wanted = {each.id: str(each.io_type) for each in cls.define_schema().inputs}
        for name, kind in (input_types or {}).items():
            takes = f"{wanted[name]},STRING" if name in TEXT_LINKS else wanted[name]
            if not isinstance(kind, str):  # older nodes give the options of a list
                fits = "COMBO" in takes
            else:
                kinds, taken = set(read_list(kind, str, "type")), set(read_list(takes, str, "type"))
                fits = bool(kinds & taken) or "*" in kinds | taken or kind.startswith("COMFY_MATCHTYPE")
            if not fits:
                return f"{name} takes {wanted[name]}, and {kind} is linked to it"
        return True

    names = (Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ("cls", *ids, "input_types"))
    validate_inputs.__signature__ = Signature([*names])  # type: ignore[attr-defined]
    return classmethod(validate_inputs)
