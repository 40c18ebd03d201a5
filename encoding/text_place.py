"""Where a text encoder runs: `cpu`, `cuda:1`, `stream` or `stream:cuda:1` (text_weights.py), `auto` or `auto:cuda:1`,
which takes the emptiest card that holds all of it, else streams through it, else the CPU; with a scheme nothing is
streamed. The forecast is arithmetic on the encoder's config, and errs upwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from ..config.setting import requested
from ..families.spec import TextEncoderSpec
from ..parallel.devices import CPU, available_devices, find_device, free_bytes
from ..parallel.offload.copies import NUM_SLOTS, lay_out
from .text_encoder import make_empty_encoder
from .text_weights import (
    WHAT_WORKS,
    TextScheme,
    applied_scheme,
    check_scheme,
    is_rounded,
    layer_list,
    tied_names,
    weight_dtypes,
)

_MARGIN_BYTES = 512 * 2**20  # of a card: libraries' workspaces and what the allocator cannot use
_USABLE = 0.9  # of what is free on a card
_MOST_CAPTIONS = 128  # per pass: more hides no more reading, and Cancel waits for the pass
_STATES_PER_CAPTION = 4  # a layer's input and output, the concatenated batch, and what a norm makes of it


Mode = Literal["resident", "stream"] | None  # None is still to be chosen


@dataclass(frozen=True)
class TextPlace:
    """Where one encoder will run, why, and how many captions a pass of its layers takes; 0 if it is there whole."""

    device: torch.device
    reason: str
    captions_per_pass: int = 0

    def __str__(self) -> str:
        passes = f"is streamed through {self.device}, {self.captions_per_pass} captions per pass"
        return f"{passes if self.captions_per_pass else f'runs on {self.device}'}: {self.reason}"


@dataclass(frozen=True)
class EncoderSize:
    """What an encoder takes, in bytes."""

    whole: int  # all weights as they are held
    rest: int  # weights outside the layers, which stay on the card of a streamed encoder
    layer: int  # the largest layer's buffer
    working: int  # inside a layer, for one caption
    caption: int  # between layers, for each caption of a pass

    @property
    def resident_bytes(self) -> int:
        """On a device that holds all of it."""
        return self.whole + self.working + self.caption

    def streamed_bytes(self, num_captions: int = 1) -> int:
        """On a card it is streamed through."""
        return self.rest + NUM_SLOTS * self.layer + self.working + num_captions * self.caption


def parse_text_device(setting: str | torch.device) -> tuple[Mode, torch.device | None]:
    """cache.text_device and its device, None while that is open. Raises: ValueError naming the setting."""
    name = str(setting).strip()
    mode, _, device_name = name.partition(":")
    wanted = requested(mode)
    is_resident = wanted not in ("stream", None)
    try:
        device = find_device(name if is_resident else device_name) if is_resident or device_name else None
    except ValueError as error:
        raise ValueError(f"cache.text_device = {name!r}: {error}") from error
    if is_resident:
        return "resident", device
    if device == CPU:
        raise ValueError(f'cache.text_device = "{name}": {mode} is for GPUs; use "{mode}:cuda:0", "{mode}" or "cpu"')
    return "stream" if wanted else None, device


def text_device_on(setting: str, device: str) -> str:
    """The same setting, confined to one device: the setting of one of several processes."""
    mode, _ = parse_text_device(setting)
    return device if mode == "resident" or device == "cpu" else f"{mode or 'auto'}:{device}"


def check_text_device(
    setting: str | torch.device, specs: Sequence[TextEncoderSpec], folder: str | Path, quantize: TextScheme = "none"
) -> None:
    """Refuse early what planning or loading would, but for memory and the folder's content. Raises: ValueError as
    parse_text_device and check_scheme; for a stream without a card or of 8-bit weights, and a single file."""
    mode, device = parse_text_device(setting)
    device = _emptiest_card(device) if mode == "stream" else device
    if Path(folder).is_file():
        raise ValueError(
            f"text encoders were given as {folder}, a single file without config and tokenizer; give a diffusers model "
            f"folder that has them. For the encoder in it: {WHAT_WORKS}"
        )
    for scheme in (applied_scheme(spec, quantize) for spec in specs):
        check_scheme(scheme, device or CPU)
        if mode == "stream":
            _refuse_streamed(scheme)


def plan_text_place(
    setting: str | torch.device,
    spec: TextEncoderSpec,
    folder: str | Path,
    dtype: torch.dtype,
    quantize: TextScheme = "none",
    window_bytes: int = 0,
) -> TextPlace:
    """Decide where one encoder runs, from sizes and free memory; a device that is named is taken. window_bytes: the
    most a streamed encoder may take on its card; 0 for what is free less a margin. Raises: ValueError for what has no
    room."""
    (mode, named), scheme = parse_text_device(setting), applied_scheme(spec, quantize)
    if mode == "resident":
        assert named is not None
        return TextPlace(named, "as requested")
    is_auto = mode is None
    if is_auto and named is None and not available_devices():
        return TextPlace(CPU, "there is no GPU")
    size, card = forecast_size(spec, folder, dtype, scheme), _emptiest_card(named)
    usable, streamed = _usable_bytes(card), size.streamed_bytes()
    # The window alone decides where torch cannot tell what is free.
    room = window_bytes if free_bytes(card) is None else min(window_bytes or usable, usable)
    limit = max(usable, room) if is_auto else room  # whatever the window, which limits what is streamed
    if size.resident_bytes <= limit:
        return TextPlace(card, f"all of it takes {_gb(size.resident_bytes)}, and there is room for {_gb(limit)}")
    whole = f"it takes {_gb(size.resident_bytes)}, and {card} has room for {_gb(limit)}"
    if is_auto and scheme != "none":
        return TextPlace(CPU, f"{whole}; 8-bit weights are not streamed")
    if is_auto and streamed > room:
        return TextPlace(CPU, f"{whole}; even streamed it takes {_gb(streamed)}")
    _refuse_streamed(scheme)
    if streamed > room:
        raise ValueError(
            f"streaming this text encoder through {card} takes {_gb(streamed)} (two layers, the embedding and one "
            f"caption), and there is room for {_gb(room)} (what is free less a margin, or cache.text_window_gb if that "
            'is less); use another card, a larger window, or "cpu"'
        )
    return TextPlace(card, whole, min(_MOST_CAPTIONS, 1 + (room - streamed) // max(1, size.caption)))


def _refuse_streamed(scheme: TextScheme) -> None:
    if scheme != "none":
        raise ValueError(
            f'cache.text_quantize = "{scheme}" was requested with a streamed text encoder, whose layers are on the '
            'card only while they compute and need not be small; use "none", or name a card that holds the whole '
            "encoder in 8 bits"
        )


def _emptiest_card(named: torch.device | None) -> torch.device:
    cards = available_devices() if named is None else [named]
    if not cards:
        raise ValueError('cache.text_device = "stream": there is no GPU here to stream through; use "cpu"')
    return max(cards, key=_usable_bytes)


def _usable_bytes(card: torch.device) -> int:
    """What is free less a margin; 0 where torch cannot tell."""
    return max(0, int(_USABLE * (free_bytes(card) or 0)) - _MARGIN_BYTES)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


# --- forecast --------------------------------------------------------------------------------------------------------


def forecast_size(
    spec: TextEncoderSpec, folder: str | Path, dtype: torch.dtype, scheme: TextScheme = "none"
) -> EncoderSize:
    """What this encoder takes, from its config. Raises: ValueError as make_empty_encoder."""
    model = make_empty_encoder(spec, Path(folder))
    prefix, layers = layer_list(model)
    named = dict(model.named_parameters())
    for tied in tied_names(model):  # which count once
        named.pop(tied, None)
    types = weight_dtypes(model, named, dtype)
    held = {name: parameter.numel() * types[name].itemsize for name, parameter in named.items()}
    for fqn, module in model.named_modules() if scheme != "none" else ():
        if is_rounded(module, fqn, spec.keep_full_precision):  # values in 8 bits, and a scale per row
            held[f"{fqn}.weight"] = module.weight.numel() + 5 * module.weight.shape[0]
    buffers, tensors = [], model.state_dict().items()
    for index in range(len(layers)):
        shapes = {name: tensor.shape for name, tensor in tensors if name.startswith(f"{prefix}.{index}.")}
        dtypes = weight_dtypes(model, shapes, dtype)
        buffers.append(lay_out((shape, dtypes[name]) for name, shape in shapes.items())[1])
    num_heads = _config_number(model, "num_attention_heads", "num_heads")
    width = _config_number(model, "hidden_size", "d_model")
    states = spec.max_length * width * dtype.itemsize
    # T5 hands its table of relative positions from layer to layer, with a row for every head.
    tables = 1 + (num_heads if spec.kind == "last_hidden_state" else 0)
    # What all linears of a layer give, the widest twice; attention's scores and softmax, in float32; 8 bits written out
    linears = [module for module in layers[0].modules() if isinstance(module, nn.Linear)]
    widths = [linear.out_features for linear in linears]
    unpacked = 0 if scheme == "none" else max(linear.weight.numel() for linear in linears) * dtype.itemsize
    scores = num_heads * spec.max_length**2 * (4 + 2 * dtype.itemsize)
    return EncoderSize(
        whole=sum(held.values()),
        rest=sum(num_bytes for name, num_bytes in held.items() if not name.startswith(f"{prefix}.")),
        layer=max(buffers),
        working=spec.max_length * dtype.itemsize * (sum(widths) + max(widths)) + scores + unpacked,
        caption=states * (_STATES_PER_CAPTION + len(spec.layers)) + tables * spec.max_length**2 * dtype.itemsize,
    )


def _config_number(model: nn.Module, *names: str) -> int:
    """The first of these that the model's config has; families of models call one thing differently."""
    found = [value for name in names if (value := getattr(model.config, name, None))]
    assert found, f"{type(model.config).__name__} has none of {', '.join(names)}"
    return int(found[0])
