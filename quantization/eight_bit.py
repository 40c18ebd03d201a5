"""8-bit products for frozen linears that pass gradients on: 8-bit weights, 8-bit products forwards and backwards.

Legend: M rows (tokens of the whole batch), K in_features, N out_features, B width of a rotated block. A weight W [N, K]
is stored as q in 8 bits with a float32 scale s per output row, W = s * q. Every call rounds rows of x to a with scales
t, and rows of gy * s to h with scales u (s stands on the dim that grad_input contracts):

    forward      y[m, n]  = t_m * s_n * sum_k a[m, k] q[n, k]  + bias_n
    grad_input   gx[m, k] = u_m * sum_n h[m, n] q[n, k]

A row of zeros gives zeros; one with an infinity or NaN gives NaN in that row alone. A weight that is only stored in few
bits is made plain (stored.py) a piece at a time, as is one where size or device rule 8 bits out.

Rows of int8 may be rotated first, which spreads their outliers: x W^T = (x R) (W R)^T. R is block-diagonal with blocks
of B = 16, 64 or 256. Weights are rotated once, x whenever it is rounded, grad_input back; gy is not rotated. CUDA's
rules for shapes are asserted on every device. Why: docs/decisions/0005-eight-bit-linears.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import eight_bit_kernels as kernels
from .eight_bit_kernels import LARGEST, MAX_INT8_TERMS, SMALLEST_AMAX
from .kernel_choice import KernelChoice, kernels_for
from .stored import PACKINGS, ROWS, columns, make_convrot, restore

ROTATIONS = (16, 64, 256)
MAX_PLAIN_ROWS = 16
_MULTIPLE = 16  # of K and N
_WIDEST_BLOCK = max(packed.values for packed in PACKINGS.values())
_SLICE = 2**29  # weights transposed at a time, on cards for data centres alone: 512 MiB
_PIECE = 2**26  # weights dequantized at a time: 128 MiB in bfloat16
# wgmma keeps about 14 bits of a running float8 sum; over n / 32 additions that truncates about n / 2^20 of it, which
# stays below the rounding of float8 itself up to here. Longer sums move to float32 registers on the way.
_MAX_FAST_TERMS = 8192


def quantize_rows(
    x: Tensor, dtype: torch.dtype, *, multiplier: Tensor | None = None, rotation: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """kernels.quantize_rows in plain torch."""
    value = x.float()
    if multiplier is not None:
        value = value * multiplier
    if rotation is not None:
        value = rotate(value, rotation)
    limit = LARGEST[dtype]
    amax = value.abs().amax(1, keepdim=True).clamp(min=SMALLEST_AMAX)  # both keep NaN
    largest = torch.full_like(amax, limit)  # by a number, CUDA would multiply with its rounded inverse
    scale = torch.where(amax.isfinite(), amax / largest, torch.nan)
    value = (value * (largest / amax)).clamp_(-limit, limit)
    value = value.round_() if dtype is torch.int8 else value
    return value.to(dtype, memory_format=torch.contiguous_format), scale


def quantize_weight(weight: Tensor, dtype: torch.dtype, rotation: Tensor | None) -> tuple[Tensor, Tensor]:
    """quantize_rows of some rows at a time. Raises: ValueError for a weight that is not finite."""
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
    height = max(1, _PIECE // 2 // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], height):
        rows = slice(start, start + height)
        values[rows], scale[rows] = quantize_rows(weight[rows], dtype, rotation=rotation)
    if broken := int((~scale.isfinite()).sum()) if scale.device.type != "meta" else 0:
        raise ValueError(
            f"{broken} of {scale.shape[0]} rows of a weight hold infinities or NaN and cannot be rounded to 8 bits; "
            "the checkpoint is damaged, load another"
        )
    return values, scale


def make_rotation(block: int) -> Tensor:
    """Hadamard entries +-1 / sqrt(block), exact in every format, in rows that are signed by the Rudin-Shapiro sequence,
    or a mean would become an outlier. [B, B] Raises: ValueError for a block that is none of ROTATIONS."""
    if block not in ROTATIONS:
        raise ValueError(f"rotation in blocks of {block} was requested; use one of {ROTATIONS}, or 0 for none")
    index = range(block)
    entries = [[(-1.0) ** (((i & j).bit_count()) + (i & (i >> 1)).bit_count()) for j in index] for i in index]
    return torch.tensor(entries) / math.sqrt(block)


def rotation_for(
    in_features: int, device: torch.device, dtype: torch.dtype, block: int, *, is_comfys: bool = False
) -> Tensor | None:
    """The matrix for weights [N, in_features]; None for block 0. dtype: that they are, or will be, stored in.
    is_comfys: by ComfyUI's matrix. Raises: ValueError for float8, and blocks that do not divide in_features."""
    if not block:
        return None
    if is_comfys:
        return make_convrot(block).to(device)
    if dtype is not torch.int8:
        raise ValueError("float8, which gains nothing by it, was requested with a rotation; use 0, or int8-compute")
    if in_features % block:
        fitting = [other for other in ROTATIONS if in_features % other == 0]
        raise ValueError(
            f"rotation in blocks of {block} does not divide {in_features} input features; use one of {[0, *fitting]}"
        )
    return make_rotation(block).to(device)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Multiply every block of B values of the last dim by rotation; in x's dtype. Its transpose rotates back."""
    return (x.reshape(-1, rotation.shape[0]) @ rotation.to(x.dtype)).reshape(x.shape)


def linear8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, rotation: Tensor | None, packing: str = ""
) -> Tensor:
    """x @ (weight * scale).T + bias in 8 bits where size and device allow, else plainly; without autograd.

    Args:
        x: [M, K]    weight: 8-bit, row-major. [N, K]    scale: float32. [N, 1]    bias: [N]    rotation: [B, B]
        packing: as the weight is stored, to be multiplied in x's type; "" for products in 8 bits.
    """
    height = _whole_multiple(_PIECE // x.shape[1])
    slices = [slice(start, start + height) for start in range(0, weight.shape[0], height)]
    if packing:
        return _with_bias([F.linear(x, restore(weight[s], scale[s], rotation, packing, x.dtype)) for s in slices], bias)
    choice = kernels_for(x, weight.dtype)
    if choice.forward == "dequantize" or not _fits(x, weight, terms=weight.shape[1]):
        x = x if rotation is None else rotate(x, rotation)
        return _with_bias([F.linear(x, restore(weight[s], scale[s], None, ROWS, x.dtype)) for s in slices], bias)
    a, a_scale = _quantize(x, weight.dtype, choice, rotation=rotation)
    return _product(a, a_scale, weight.t(), scale, bias, x.dtype, choice)


def _whole_multiple(length: int) -> int:
    """Of a piece's rows or columns, which are the result's columns: CUDA's products take several times as long where
    these begin elsewhere."""
    return max(_MULTIPLE, length // _MULTIPLE * _MULTIPLE)


def _with_bias(pieces: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return _joined(pieces) if bias is None else (_joined(pieces) + bias).to(pieces[0].dtype)


def grad_input8(grad: Tensor, weight: Tensor, scale: Tensor, rotation: Tensor | None, packing: str = "") -> Tensor:
    """grad [M, N] @ (weight * scale), as linear8."""
    # By slices of weight's columns: each gives columns of the result, so no sum is split and rounded between.
    width = _whole_multiple(_PIECE // weight.shape[0])
    if packing:
        block = _WIDEST_BLOCK if rotation is None else max(_WIDEST_BLOCK, rotation.shape[0])
        width, end = max(1, width // block) * block, num_inputs(weight, packing)
        parts = (columns(weight, start, min(start + width, end), packing) for start in range(0, end, width))
        return _joined([grad @ restore(part, scale, rotation, packing, grad.dtype) for part in parts])
    choice = kernels_for(grad, weight.dtype)
    if choice.grad_input == "dequantize" or not _fits(grad, weight, terms=weight.shape[0]):
        starts = range(0, weight.shape[1], width)
        found = _joined([grad @ restore(weight[:, s : s + width], scale, None, ROWS, grad.dtype) for s in starts])
    else:
        h, h_scale = _quantize(grad, weight.dtype, choice, multiplier=scale.view(-1))
        if choice.grad_input == "triton":
            found = kernels.matmul(h, h_scale, weight, grad.dtype)
        else:
            found = _grad_input_by_slices(h, h_scale, weight, grad.dtype, choice)
    return found if rotation is None else rotate(found, rotation.t())


def num_inputs(weight: Tensor, packing: str) -> int:
    """in_features of a stored weight."""
    packed = PACKINGS.get(packing)
    return weight.shape[1] if packed is None else weight.shape[1] // packed.num_bytes * packed.values


def _fits(x: Tensor, weight: Tensor, *, terms: int) -> bool:
    is_whole = all(side % _MULTIPLE == 0 for side in weight.shape)
    is_short = weight.dtype is not torch.int8 or terms <= MAX_INT8_TERMS
    return x.shape[0] > MAX_PLAIN_ROWS and is_whole and is_short and x.dtype is not torch.float64


def _quantize(
    x: Tensor, dtype: torch.dtype, choice: KernelChoice, *, rotation: Tensor | None = None, **first: Any
) -> tuple[Tensor, Tensor]:
    if not choice.has_triton:
        return quantize_rows(x, dtype, rotation=rotation, **first)
    if rotation is not None and not ROTATIONS[0] <= rotation.shape[0] <= kernels.WIDEST_ROTATION:
        x = rotate(x, rotation)
    elif rotation is not None:
        first["rotation"] = rotation
    return kernels.quantize_rows(x if x.stride(1) == 1 else x.contiguous(), dtype, **first)


def _product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, bias: Tensor | None, dtype: Any, choice: KernelChoice
) -> Tensor:
    """kernels.matmul, with the forward's kernels. b: column-major."""
    if choice.forward == "triton":
        return kernels.matmul(a, a_scale, b, dtype, b_scale=b_scale, bias=bias)
    if b_scale is None:
        b_scale = torch.ones((b.shape[1], 1), device=b.device)
    (rows, terms), columns = a.shape, b.shape[1]  # CUDA demands all this, and the CPU does not
    assert rows > MAX_PLAIN_ROWS and terms % _MULTIPLE == 0 and columns % _MULTIPLE == 0, (a.shape, b.shape)
    assert a.is_contiguous() and b.stride(0) == 1 and b.stride(1) >= terms, (a.stride(), b.stride())
    if a.dtype is torch.int8:
        sums = torch._int_mm(a, b)
    elif choice.forward == "unit":
        one = torch.ones((), device=a.device)
        sums = _scaled_product(a, one, b, one, torch.bfloat16)
    else:
        out = _scaled_product(a, a_scale, b, b_scale.t(), dtype)
        return out if bias is None else out.add_(bias)
    if choice.has_triton:
        return kernels.rescale(sums, a_scale, dtype, b_scale, bias)
    out = sums.float().mul_(a_scale).mul_(b_scale.t())
    return (out if bias is None else out.add_(bias)).to(dtype)


def _scaled_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    is_fast = b.shape[0] <= _MAX_FAST_TERMS
    out = torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
    return out.to(dtype)


def _grad_input_by_slices(
    h: Tensor, h_scale: Tensor, weight: Tensor, dtype: torch.dtype, choice: KernelChoice
) -> Tensor:
    """h @ weight * h_scale; a slice of weight's columns at a time is transposed, multiplied and dropped."""
    num_in = weight.shape[1]
    count = math.ceil(weight.numel() / _SLICE)
    width = math.ceil(num_in / count / _MULTIPLE) * _MULTIPLE  # about equal: a narrow rest would idle a large card
    found = []
    for start in range(0, num_in, width):
        piece = weight[:, start : start + width]
        turned = kernels.transpose(piece) if choice.has_triton else piece.t().contiguous()
        found.append(_product(h, h_scale, turned.t(), None, None, dtype, choice))
    return _joined(found)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)  # type: ignore[arg-type]


_library = torch.library.Library("devicebridge", "FRAGMENT")  # torch forgets operators whose library is gone


def _make_op(name: str, compute: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """An operator that torch.compile takes as it is, registered once, however often this file is imported. Not by
    torch.library.custom_op: its Python around every call is for autograd, which never sees these operators."""
    if not hasattr(torch.ops.devicebridge, name):
        schema = torch.library.infer_schema(compute, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"devicebridge::{name}", fake, lib=_library)
    return getattr(torch.ops.devicebridge, name).default


def _fake_grad(grad: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return grad.new_empty((grad.shape[0], num_inputs(weight, others[-1])))


linear8_op = _make_op("linear8", linear8, lambda x, weight, *others: x.new_empty((x.shape[0], weight.shape[0])))
grad_input8_op = _make_op("grad_input8", grad_input8, _fake_grad)
