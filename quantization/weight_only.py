"""Weight-only 8-bit storage of one frozen linear, through torchao: half of bfloat16's memory, none of its speed.

A weight W [N, K] becomes q = round(W / s) with one float32 scale s per output row: amax / 448 (fp8) or amax / 127.5
(int8). A forward computes x @ W.T with W = q * s in the activations' dtype, so that x and LoRA get gradients. Every
call writes the whole weight out in full precision first.

torchao computes a scale in the weight's type, so the largest value of an int8 row of bfloat16 may err by a whole step.
safetensors cannot write a torchao tensor; `values_and_scale` gives what it is made of. More traps are in
docs/internals/upstream_facts.md, and what rounding loses in docs/decisions/0005-eight-bit-linears.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..patches.lora import is_torchao_tensor
from .eight_bit import refuse_broken_rows

WeightOnlyScheme = Literal["fp8", "int8"]
WEIGHT_ONLY: Mapping[WeightOnlyScheme, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_PIECE = 2**25  # weights rounded at a time: torchao makes up to 13 bytes of copies for each
OLDEST_TORCHAO = "0.18"  # int8 of older ones is another tensor, with other bytes than forecasts count


def import_torchao() -> ModuleType:
    """torchao.quantization; imported here because it takes seconds and most jobs do without.

    Raises: RuntimeError naming the version found and the one needed.
    """
    try:
        found = version("torchao")
        fault = f" and found {found}; pip install -U torchao" if Version(found) < Version(OLDEST_TORCHAO) else ""
    except PackageNotFoundError:
        fault = ", and none is installed; pip install torchao"
    if fault:
        raise RuntimeError(
            f"weight-only fp8 and int8 need torchao {OLDEST_TORCHAO} or newer{fault}, or use "
            'quantize = "fp8-compute" or "none"'
        )
    return importlib.import_module("torchao.quantization")


def convert(linear: nn.Linear, scheme: WeightOnlyScheme) -> nn.Linear:
    """Round and freeze a linear's weight in place, some rows at a time; the bias is untouched. Returns the linear.

    Raises: RuntimeError if torchao is missing, too old, or did not leave the layer as promised; ValueError for a weight
        that is not finite.
    """
    exact = linear.weight.detach()
    height = max(1, _PIECE // exact.shape[1])
    if height >= exact.shape[0]:
        return _convert_whole(linear, scheme)
    values = torch.empty(exact.shape, dtype=WEIGHT_ONLY[scheme], device=exact.device)
    scale = torch.empty((exact.shape[0], 1), dtype=torch.float32, device=exact.device)
    for start in range(0, exact.shape[0], height):
        rows = slice(start, start + height)
        values[rows], scale[rows] = values_and_scale(_convert_whole(_linear_of(exact[rows]), scheme).weight)
    return adopt(linear, scheme, values, scale, exact.dtype)


def _linear_of(weight: Tensor) -> nn.Linear:
    """Around a weight; nn.Linear's own drawing of one would move the process's random numbers."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def _convert_whole(linear: nn.Linear, scheme: WeightOnlyScheme) -> nn.Linear:
    torchao = import_torchao()
    # set_inductor_config would change settings of the whole process; the model is ours, the process is the user's.
    if scheme == "fp8":
        config = torchao.Float8WeightOnlyConfig(weight_dtype=torch.float8_e4m3fn, set_inductor_config=False)
    else:
        config = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    torchao.quantize_(linear, config, filter_fn=lambda candidate, name: candidate is linear)
    vars(linear).pop("extra_repr", None)  # torchao's is bound to the linear, which would wait for the garbage collector
    weight: Any = linear.weight
    if not is_torchao_tensor(weight) or getattr(weight, "qdata", weight).dtype is not WEIGHT_ONLY[scheme]:
        raise RuntimeError(
            f"torchao left a linear without {scheme} values; torchao {version('torchao')} is unknown to this pack, "
            f"use {OLDEST_TORCHAO} or newer"
        )
    refuse_broken_rows(weight.scale)  # an infinity or NaN has made its row's scale one, too
    if scheme == "fp8":
        # Rows of zeros, and float16 rows so small (amax below 1.4e-5) that their scale underflows: torchao 0.14 to 0.18
        # divide 0 by 0 there.
        is_zero = weight.scale == 0  # [N, 1]
        weight.qdata.view(torch.uint8).masked_fill_(is_zero, 0)
        weight.scale.masked_fill_(is_zero, 1.0)
    return linear.requires_grad_(False)


def adopt(linear: nn.Linear, scheme: WeightOnlyScheme, values: Tensor, scale: Tensor, dtype: torch.dtype) -> nn.Linear:
    """Give a linear an 8-bit weight that is there already, in place; inverse of values_and_scale. Returns the linear.

    Args:
        values: of the scheme's type, taken over without a copy. [N, K]
        scale: float32, on the same device. [N, 1]
        dtype: that the forward computes in.
    """
    shape = values.shape
    # torchao's constructors differ between releases; a template of one row knows what other arguments this one takes.
    row = torch.ones((1, shape[1]), dtype=dtype, device="cpu")
    template: Any = _convert_whole(_linear_of(row), scheme).weight
    names, context = template.__tensor_flatten__()
    parts = {"qdata": values, "scale": scale}
    for name in names:
        if name not in parts:  # the zero point of int8, 0 in every row
            parts[name] = torch.zeros_like(getattr(template, name)).to(values.device).expand(shape[0], 1).contiguous()
    weight = type(template).__tensor_unflatten__(parts, context, shape, (shape[1], 1))
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear.requires_grad_(False)


def has_float8(device: torch.device) -> bool:
    """Whether values can be rounded to float8 and read again; torch lists no such thing, and MPS for one could not."""
    if device.type in ("cuda", "lazy", "meta"):
        return True
    try:
        return torch.ones(1, device=device).to(torch.float8_e4m3fn).to(torch.float32).item() == 1.0
    except (RuntimeError, TypeError, AssertionError):  # not implemented, no such type, or no such device
        return False


def values_and_scale(weight: Any) -> tuple[Tensor, Tensor]:
    """The plain tensors of a converted weight, without a copy: 8-bit values [N, K] and float32 scales [N, 1]."""
    return weight.qdata, weight.scale


# ---- tensors that are made of others, as torchao's quantized ones are


def plain_parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of, detached; itself if it is one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from plain_parts(getattr(tensor, name))


def tensor_bytes(tensor: Tensor) -> int:
    """What a tensor takes; for one made of others (values and scales) what its parts take."""
    return sum(part.numel() * part.element_size() for part in plain_parts(tensor))


def rebuilt(tensor: Any, parts: Iterator[Tensor]) -> Tensor:
    """A tensor like this one, made of the next of parts."""
    if not is_traceable_wrapper_subclass(tensor):
        return next(parts)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: rebuilt(getattr(tensor, name), parts) for name in names}
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
