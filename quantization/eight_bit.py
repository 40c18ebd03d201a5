"""8-bit compute for frozen linears that pass gradients on: 8-bit weights, 8-bit products forwards and backwards.

Legend: M rows (tokens of the whole batch), K in_features, N out_features, B width of a rotated block.

The equation. A weight W [N, K] is stored as q [N, K] in 8 bits with one float32 scale s per output row, W = s * q. An
input row x_m is rounded to a_m with a scale t_m of its own, measured at every call:

    forward      y[m, n]  = t_m * s_n * sum_k a[m, k] q[n, k]  + bias_n
    grad_input   gx[m, k] = u_m * sum_n h[m, n] q[n, k]        with (h, u) = 8-bit rows of (gy * s)

s_n stands on the dim that grad_input contracts and cannot be pulled out of its sum, so it is multiplied into gy before
gy is rounded. Both products use the same q; there is no gradient of q, and no activation is kept for the backward. What
reaches x and a LoRA beside the layer is the gradient of the linear with weights s * q, up to the rounding of gy.

The formats. Scales put the largest value of a row at 448 (float8_e4m3fn: 3 mantissa bits) or 127 (int8).
- float8 errs in proportion to each value: r = (1/8)^2 / 12 / (3 / (2 ln 2)) = 6.0e-4 of its energy
  (quantization/weight_only.py), so a product of two rounded factors has 2 r: 29.2 dB below the signal, for any sizes
  and any outliers. Measured 28.5: normal values do not fill a binade evenly.
- int8 errs by the same step everywhere: step^2 / 12 with step = amax / 127. A row whose amax is c times its rms loses
  c^2 / (12 * 127^2) of its energy; both factors add up: 10 log10(193548 / (cx^2 + cw^2)) dB. Normal rows of 6144 have c
  near 3.9: 38 dB. Ten decibels better than float8, until an outlier makes c large.
So: int8 for well-behaved rows and cards without float8, float8 where outliers are. For int8 the outliers can be spread:

Rotation (optional). With an orthogonal R, x W^T = (x R) (W R)^T. R is block-diagonal, blocks of B = 16, 64 or 256: a
Hadamard matrix times 1 / sqrt(B), a power of two, so its entries are exact in every format and an outlier's energy is
shared by B values. Its rows carry the signs of the Rudin-Shapiro sequence; without them a mean, which half of all
activation functions have, would itself become an outlier (GELU: 36.6 -> 35.4 dB without the signs, 38.1 with).
Weights are rotated once when rounded, x while it is rounded (B multiplications per value, against N of the product),
grad_input afterwards. The N dim of gy is not rotated; that would take a second rotation of the output. Output, dB,
M = 512, K = 6144, N = 1536, normal weights, B = 64 (float32, CPU):

    input                           int8    int8 rotated    float8    float8 rotated
    normal                          38.0    38.0            28.5      28.5
    6 channels 30 times larger      21.3    35.4            29.0      28.6
    1 channel 100 times larger      16.9    33.0            30.1      28.9
    0.1 % of values 30 times larger 21.2    35.2            29.1      28.5
    GELU of normal                  36.6    38.1            28.6      28.5
    Student t, 3 degrees            25.2    36.7            28.7      28.6

float8 has nothing to gain, so rotation is offered for int8 alone.

Zero, infinity and NaN. A row of zeros has the scale of the smallest amax (1e-30) and gives zeros. A row that holds an
infinity or NaN gives NaN everywhere in that row and nowhere else; a plain linear would give infinities and NaN.

When the plain product is used instead: 16 rows or fewer (the product is bound by reading the weight, and CUDA's int8
refuses them), K or N no multiple of 16 (a rule of float8 on CUDA, and of the kernels here), float64, int8 sums of more
than 133 144 terms, devices without 8-bit products. Then a piece of q at a time becomes a plain weight in x's dtype.

The shapes CUDA accepts are narrower than the CPU's, so they are asserted everywhere and a CPU test finds the fault:
_int_mm: M > 16, K and N multiples of 8; _scaled_mm: K and N multiples of 16, left operand row-major, right operand
column-major, row-wise scales contiguous float32 [M, 1] and [1, N], bfloat16 out.

Chosen not to do: one scale per tensor (an outlier row costs all others); a second, transposed copy of the weight; 8-bit
weight gradients; saving the weight for the backward through save_for_backward, for hooks that move saved tensors to the
host would then move every weight at every call; double backward (refused).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import eight_bit_kernels as kernels
from .eight_bit_kernels import LARGEST, MAX_INT8_TERMS, SMALLEST_AMAX

Scheme = Literal["fp8-compute", "int8-compute"]
SCHEMES: Mapping[Scheme, torch.dtype] = {"fp8-compute": torch.float8_e4m3fn, "int8-compute": torch.int8}
ROTATIONS = (16, 64, 256)
MAX_PLAIN_ROWS = 16
_MULTIPLE = 16  # of K and N
_COMPUTE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_PIECE = 2**26  # weights dequantized at a time: 128 MiB in bfloat16
_SLICE = 2**27  # weights transposed at a time at least: 128 MiB
# wgmma keeps about 14 bits of a running float8 sum; over n / 32 additions that truncates about n / 2^20 of it, which
# stays below the rounding of float8 itself up to here. Longer sums move to float32 registers on the way.
_MAX_FAST_TERMS = 8192


@dataclass(frozen=True)
class Plan:
    """Which kernels one device multiplies one 8-bit type with.

    Args:
        forward: "vendor": row-wise _scaled_mm, or _int_mm and a rescaling pass; "unit": _scaled_mm without scales and a
            rescaling pass; "triton": one kernel; "dequantize": no 8-bit product.
        grad_input: "triton": one kernel that reads the weight as it lies; "transpose": the forward's product with a
            transposed slice of the weight that is dropped at once; "dequantize".
        has_triton: whether rows are rounded, sums rescaled and slices transposed by our kernels.
        widest_rotation: block that our kernel rotates rows with while it rounds them; wider ones go by a matmul before.
    """

    forward: Literal["vendor", "unit", "triton", "dequantize"]
    grad_input: Literal["triton", "transpose", "dequantize"]
    has_triton: bool = False
    widest_rotation: int = kernels.ROTATION_OF_EVERY_CARD


@dataclass(frozen=True)
class KernelsOf:
    """What a card multiplies with, for a rehearsal on meta: its plans by 8-bit type, and the weights of a slice."""

    plans: Mapping[torch.dtype, Plan]
    slice_weights: int = _SLICE


_rehearsed: ContextVar[KernelsOf | None] = ContextVar("rehearsed 8-bit kernels", default=None)


@contextmanager
def rehearse(kernels_of: KernelsOf) -> Iterator[None]:
    """Inside, in this thread, meta tensors take the way that a card's would, so that what it allocates can be counted.

    Elsewhere meta tensors are multiplied with dequantized weights.
    """
    token = _rehearsed.set(kernels_of)
    try:
        yield
    finally:
        _rehearsed.reset(token)


def kernels_of(device: torch.device) -> KernelsOf:
    """What a device that exists here multiplies with, to be rehearsed."""
    return KernelsOf({dtype: plan_for(device, dtype) for dtype in SCHEMES.values()}, _slice_of(device))


def _plan_of(tensor: torch.Tensor, dtype: torch.dtype) -> Plan:
    rehearsed = _rehearsed.get() if tensor.device.type == "meta" else None
    return plan_for(tensor.device, dtype) if rehearsed is None else rehearsed.plans[dtype]


@cache
def plan_for(device: torch.device, dtype: torch.dtype) -> Plan:
    """The fastest kernels for this 8-bit type that the device has; asks the device once."""
    if device.type in ("cpu", "lazy"):  # lazy: torch's name for CPU code run later; the cards of our tests use it
        # up to torch 2.11 at least, the CPU's float8 products know no row-wise scales
        return Plan("vendor" if dtype is torch.int8 else "unit", "transpose")
    if device.type != "cuda" or _fault(dtype, device):
        return Plan("dequantize", "dequantize")
    forward: Literal["vendor", "unit", "triton"] = "vendor" if dtype is torch.int8 or _has_rowwise() else "unit"
    if kernels.fault(device):
        return Plan(forward, "dequantize")
    widest = kernels.ROTATION_OF_EVERY_CARD
    if dtype is torch.int8:
        forward = "triton"  # _int_mm writes int32 sums, to be read and rescaled: 1.4 to 1.9 times slower on an H200
        widest = kernels.widest_rotation(device)
    # Data-centre chips since Hopper multiply bytes only with the contracted dim contiguous: turning the weight round
    # once beats doing so in every tile. The tensor units of others are slow enough to hide it.
    is_data_centre = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return Plan(forward, "transpose" if is_data_centre else "triton", has_triton=True, widest_rotation=widest)


def refusal(scheme: Scheme, device: torch.device) -> str:
    """Why a device does not multiply in this scheme, and which would work there; "" if it does."""
    fault = _fault(SCHEMES[scheme], device)
    if not fault:
        return ""
    works = [other for other, dtype in SCHEMES.items() if other != scheme and not _fault(dtype, device)]
    return f"{scheme} was asked for, but {fault}; use {works[0] if works else 'a weight-only scheme'} there"


def _fault(dtype: torch.dtype, device: torch.device) -> str:
    if device.type in ("cpu", "lazy"):
        return ""
    if device.type != "cuda":
        return f"{device} has no 8-bit products that this pack knows"
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return _amd_fault(dtype, arch)
    return _nvidia_fault(dtype, torch.cuda.get_device_capability(device))


def _nvidia_fault(dtype: torch.dtype, capability: tuple[int, int]) -> str:
    needed = (7, 5) if dtype is torch.int8 else (8, 9)
    if capability >= needed:
        return ""
    name = "int8" if dtype is torch.int8 else "float8"
    return f"{name} products need compute capability {needed[0]}.{needed[1]} and the card has {_dotted(capability)}"


def _amd_fault(dtype: torch.dtype, arch: str) -> str:
    """MI300 (gfx942) has float8 of another kind (e4m3fnuz), which a file in e4m3fn does not fit bit for bit."""
    able = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12") if dtype is torch.int8 else ("gfx95", "gfx12")
    if arch.startswith(able):
        return ""
    return f"{'int8' if dtype is torch.int8 else 'float8_e4m3fn'} products need {', '.join(able)}, the card is {arch}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _has_rowwise() -> bool:
    """Whether this build of torch has float8 products with row-wise scales; the Windows builds have none."""
    return sys.platform != "win32"


def make_rotation(block: int) -> torch.Tensor:
    """Orthogonal matrix of Hadamard entries +-1 / sqrt(block), its rows signed by the Rudin-Shapiro sequence. [B, B]

    Raises: ValueError for a block that is none of ROTATIONS.
    """
    if block not in ROTATIONS:
        raise ValueError(f"rotation in blocks of {block} was asked for; use one of {ROTATIONS}, or 0 for none")
    index = range(block)
    entries = [[(-1.0) ** (((i & j).bit_count()) + (i & (i >> 1)).bit_count()) for j in index] for i in index]
    return torch.tensor(entries) / math.sqrt(block)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Multiply every block of B values of the last dim by rotation; in x's dtype. Its transpose rotates back."""
    return (x.reshape(-1, rotation.shape[0]) @ rotation.to(x.dtype)).reshape(x.shape)


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    multiplier: torch.Tensor | None = None,
    rotation: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to 8 bits with a scale of its own, in plain torch; kernels.quantize_rows does it in one pass.

    Args:
        x: float. [M, K]    multiplier: per column, applied first. [K]    rotation: applied first. [B, B]
    Returns: values [M, K] and float32 scales [M, 1]; a row with an infinity or NaN has the scale NaN.
    """
    value = x.float()
    if multiplier is not None:
        value = value * multiplier
    if rotation is not None:
        value = rotate(value, rotation)
    smallest, limit = _limits(dtype)
    amax = value.abs().amax(1, keepdim=True).clamp(min=smallest)  # both keep NaN
    largest = torch.full_like(amax, limit)  # by a number, CUDA would multiply with its rounded inverse
    scale = torch.where(amax.isfinite(), amax / largest, torch.nan)
    value = (value * (largest / amax)).clamp_(-limit, limit)
    value = value.round_() if dtype is torch.int8 else value
    return value.to(dtype, memory_format=torch.contiguous_format), scale


@torch.compiler.assume_constant_result
def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """Smallest amax of a row and largest value of an 8-bit type. A compiler for which sizes are unknowns takes global
    numbers for unknowns, too, and torch 2.13 then fails in an autograd.Function."""
    return SMALLEST_AMAX, LARGEST[dtype]


def linear8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: torch.Tensor | None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """x @ (weight * scale).T + bias in 8 bits where size and device allow, else plainly; without autograd.

    Args:
        x: [M, K]    weight: 8-bit, row-major. [N, K]    scale: float32. [N, 1]    bias: [N]    rotation: [B, B]
        plan: the device's, if None.
    Returns: [M, N] in x's dtype.
    """
    plan = plan or _plan_of(x, weight.dtype)
    if plan.forward == "dequantize" or not _fits(x, weight, terms=weight.shape[1]):
        return _plain_linear(x if rotation is None else rotate(x, rotation), weight, scale, bias)
    a, a_scale = _quantize(x, weight.dtype, plan, rotation=rotation)
    return _product(a, a_scale, weight.t(), scale, bias, x.dtype, plan)


def grad_input8(
    grad: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    rotation: torch.Tensor | None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """grad @ (weight * scale) in 8 bits where size and device allow, else plainly.

    Args:
        grad: [M, N]    weight: 8-bit, row-major. [N, K]    scale: float32. [N, 1]    rotation: [B, B]
    Returns: [M, K] in grad's dtype.
    """
    plan = plan or _plan_of(grad, weight.dtype)
    if plan.grad_input == "dequantize" or not _fits(grad, weight, terms=weight.shape[0]):
        found = _plain_grad_input(grad, weight, scale)
    else:
        h, h_scale = _quantize(grad, weight.dtype, plan, multiplier=scale.view(-1))
        if plan.grad_input == "triton":
            found = kernels.matmul(h, h_scale, weight, grad.dtype)
        else:
            found = _grad_input_by_slices(h, h_scale, weight, grad.dtype, plan)
    return found if rotation is None else rotate(found, rotation.t())


def _fits(x: torch.Tensor, weight: torch.Tensor, *, terms: int) -> bool:
    return (
        x.shape[0] > MAX_PLAIN_ROWS
        and weight.shape[0] % _MULTIPLE == 0
        and weight.shape[1] % _MULTIPLE == 0
        and x.dtype is not torch.float64
        and (weight.dtype is not torch.int8 or terms <= MAX_INT8_TERMS)
    )


def _quantize(
    x: torch.Tensor, dtype: torch.dtype, plan: Plan, *, rotation: torch.Tensor | None = None, **first: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    if not plan.has_triton:
        return quantize_rows(x, dtype, rotation=rotation, **first)
    widest = plan.widest_rotation if x.element_size() <= 2 else kernels.ROTATION_OF_EVERY_CARD
    if rotation is not None and rotation.shape[0] > widest:
        x = rotate(x, rotation)
    elif rotation is not None:
        first["rotation"] = rotation
    return kernels.quantize_rows(x if x.stride(1) == 1 else x.contiguous(), dtype, **first)


def _product(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    plan: Plan,
) -> torch.Tensor:
    """(a @ b) * a_scale * b_scale.T + bias, as the plan's forward does.

    Args:
        a: 8-bit. [M, I]    a_scale: [M, 1]    b: 8-bit, column-major. [I, J]    b_scale: ones if None. [J, 1]
        bias: [J]
    """
    if plan.forward == "triton":
        return kernels.matmul(a, a_scale, b, dtype, b_scale=b_scale, bias=bias)
    if b_scale is None:
        b_scale = torch.ones((b.shape[1], 1), device=b.device)
    _check_cuda_rules(a, b)
    if a.dtype is torch.int8:
        sums = torch._int_mm(a, b)
    else:
        is_fast = a.shape[1] <= _MAX_FAST_TERMS
        if plan.forward != "unit":
            out = torch._scaled_mm(
                a, b, scale_a=a_scale, scale_b=b_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=is_fast
            )
            out = out.to(dtype)
            return out if bias is None else out.add_(bias)
        one = torch.ones((), device=a.device)
        sums = torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
    if plan.has_triton:
        return kernels.rescale(sums, a_scale, dtype, b_scale, bias)
    out = sums.float().mul_(a_scale).mul_(b_scale.t())
    return (out if bias is None else out.add_(bias)).to(dtype)


def _check_cuda_rules(a: torch.Tensor, b: torch.Tensor) -> None:
    """What CUDA's 8-bit products demand and the CPU's do not."""
    (rows, terms), columns = a.shape, b.shape[1]
    assert rows > MAX_PLAIN_ROWS and terms % _MULTIPLE == 0 and columns % _MULTIPLE == 0, (a.shape, b.shape)
    assert a.is_contiguous() and b.stride(0) == 1 and b.stride(1) >= terms, (a.stride(), b.stride())


def _grad_input_by_slices(
    h: torch.Tensor, h_scale: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, plan: Plan
) -> torch.Tensor:
    """h @ weight * h_scale; a slice of weight's columns at a time is transposed, multiplied and dropped."""
    num_out, num_in = weight.shape
    width = _slice_width(h.device, num_out, num_in)
    found = []
    for start in range(0, num_in, width):
        turned = _turn(weight[:, start : start + width], plan)
        found.append(_product(h, h_scale, turned.t(), None, None, dtype, plan))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _turn(piece: torch.Tensor, plan: Plan) -> torch.Tensor:
    return kernels.transpose(piece) if plan.has_triton else piece.t().contiguous()


@torch.compiler.assume_constant_result
def _slice_width(device: torch.device, num_out: int, num_in: int) -> int:
    """Columns of a weight to transpose at a time; all slices are about equal: a narrow rest would idle a large card."""
    rehearsed = _rehearsed.get() if device.type == "meta" else None
    count = math.ceil(num_out * num_in / (_slice_of(device) if rehearsed is None else rehearsed.slice_weights))
    return math.ceil(num_in / count / _MULTIPLE) * _MULTIPLE


@cache
def _slice_of(device: torch.device) -> int:
    """Weights to transpose at a time: what a card hardly notices, and as few launches as that allows."""
    if device.type != "cuda":
        return _SLICE
    return max(_SLICE, torch.cuda.get_device_properties(device).total_memory // 256)


def _plain_linear(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    height = max(1, _PIECE // weight.shape[1])
    pieces = [
        F.linear(x, _dequantize(weight[start : start + height], scale[start : start + height], x.dtype))
        for start in range(0, weight.shape[0], height)
    ]
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
    return out if bias is None else (out + bias).to(x.dtype)


def _plain_grad_input(grad: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """By slices of weight's columns: each gives columns of the result, so no sum is split and rounded between."""
    width = max(1, _PIECE // weight.shape[0])
    pieces = [
        grad @ _dequantize(weight[:, start : start + width], scale, grad.dtype)
        for start in range(0, weight.shape[1], width)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _dequantize(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight * scale, rounded once: every 8-bit value is exact in dtype and the product is computed in float32."""
    return weight.to(dtype).mul_(scale)


@torch.compiler.assume_constant_result
def _has_rowwise_products(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype is torch.float8_e4m3fn and plan_for(device, dtype) == Plan("vendor", "transpose", has_triton=True)


def _traced_linear8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """linear8 as the compiler sees it: rounding x joins the kernel that made x."""
    a, a_scale = quantize_rows(x, weight.dtype)
    out = _rowwise_product(a, a_scale, weight.t(), scale.t(), x.dtype)
    return out if bias is None else out + bias


def _traced_grad_input8(grad: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """grad_input8 as the compiler sees it: rounding grad joins the kernel that made grad."""
    h, h_scale = quantize_rows(grad, weight.dtype, multiplier=scale.view(-1))
    num_out, num_in = weight.shape
    width = _slice_width(grad.device, num_out, num_in)
    found = []
    for start in range(0, num_in, width):
        turned = _turned_op(weight, start, min(width, num_in - start), h_scale)
        ones = torch.ones((1, turned.shape[0]), device=grad.device)
        found.append(_rowwise_product(h, h_scale, turned.t(), ones, grad.dtype))
    return found[0] if len(found) == 1 else torch.cat(found, 1)


def _rowwise_product(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """In dtype; never by a .to() that has nothing to do: where a traced autograd.Function returns a tensor that it has
    under a second name, compiled code of torch 2.11 replaces its gradient by zeros (docs/internals/
    upstream_facts.md)."""
    is_fast = b.shape[0] <= _MAX_FAST_TERMS  # of a weight: a number, too, where the sizes of activations are symbols
    out = torch._scaled_mm(a, b, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=is_fast)
    return out if dtype is torch.bfloat16 else out.to(dtype)


_library = torch.library.Library("devicebridge", "FRAGMENT")  # torch forgets operators whose library is gone


def _make_op(name: str, compute: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """An operator that torch.compile takes as it is; registered once, however often this file is imported.

    Not by torch.library.custom_op: its Python around every call is for autograd, which never sees these operators.
    """
    if not hasattr(torch.ops.devicebridge, name):
        schema = torch.library.infer_schema(compute, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"devicebridge::{name}", fake, lib=_library)
    return getattr(torch.ops.devicebridge, name).default


# Opaque to torch.compile, which would otherwise trace into the choice of kernels; eager calls do without their cost.
def _linear8_opaque(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    rotation: torch.Tensor | None,
) -> torch.Tensor:
    return linear8(x, weight, scale, bias, rotation)


def _grad_input8_opaque(
    grad: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, rotation: torch.Tensor | None
) -> torch.Tensor:
    return grad_input8(grad, weight, scale, rotation)


# Named as depending on `after`, a result of the backward: else the compiler might move what depends on weights alone
# into the forward and keep it until the backward, a second copy of all weights.
def _turned_opaque(weight: torch.Tensor, start: int, width: int, after: torch.Tensor) -> torch.Tensor:
    return _turn(weight[:, start : start + width], plan_for(weight.device, weight.dtype))


_linear8_op = _make_op(
    "linear8", _linear8_opaque, lambda x, weight, *others: x.new_empty((x.shape[0], weight.shape[0]))
)
_grad_input8_op = _make_op(
    "grad_input8", _grad_input8_opaque, lambda grad, weight, *others: grad.new_empty((grad.shape[0], weight.shape[1]))
)
_turned_op = _make_op(
    "turned", _turned_opaque, lambda weight, start, width, after: weight.new_empty((width, weight.shape[0]))
)


def _grad_input(
    grad: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, rotation: torch.Tensor | None
) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        return grad_input8(grad, weight, scale, rotation)
    if _has_rowwise_products(grad.device, weight.dtype) and _fits(grad, weight, terms=weight.shape[0]):
        return _traced_grad_input8(grad, weight, scale)
    return _grad_input8_op(grad, weight, scale, rotation)


class _Linear8(torch.autograd.Function):
    """linear8 with grad_input8 as its backward; keeps references to the frozen weight and no activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        rotation: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.frozen = weight, scale, rotation
        ctx.version = None if torch.compiler.is_compiling() or weight.is_inference() else weight._version
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not torch.compiler.is_compiling():
            return linear8(x, weight, scale, bias, rotation)
        if _has_rowwise_products(x.device, weight.dtype) and _fits(x, weight, terms=weight.shape[1]):
            return _traced_linear8(x, weight, scale, bias)
        return _linear8_op(x, weight, scale, bias, rotation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x = grad_bias = None
        if ctx.version is not None and ctx.version != ctx.frozen[0]._version:  # as autograd does for what it saved
            raise RuntimeError("a frozen 8-bit weight was changed between a forward and its backward")
        if ctx.needs_input_grad[0]:
            grad_x = _grad_input(grad, *ctx.frozen)
        if ctx.needs_input_grad[3]:
            grad_bias = grad.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return grad_x, None, None, grad_bias, None


class FrozenLinear8(nn.Linear):
    """A frozen linear in 8 bits: takes nn.Linear's place, multiplies in 8 bits and passes gradients to its input.

    An nn.Linear by class, because PEFT, family patterns and hosts find linears that way. PEFT then attaches its plain
    LoRA layer, which takes device and dtype from weight.device and compute_dtype (PEFT 0.19 on; older releases would
    round a LoRA to float8).

    State: weight, float8_e4m3fn or int8, a plain Parameter without gradient [N, K]; scale, float32 buffer [N, 1];
    bias [N]; rotation, float32 buffer [B, B], absent when nothing is rotated, so that a rotated state dict does not fit
    an unrotated layer by accident. `.to(dtype)` changes compute_dtype and bias and leaves the other three as they are.

    Output in x's dtype, under autocast in autocast's, as nn.Linear; float16 may overflow where it would there.

    Args:
        scheme: which 8-bit type.
        compute_dtype: type of what is attached to the layer, a LoRA for one; products follow x.
        rotation: block of the rotation, 0 for none; int8 only.
    """

    scale: torch.Tensor
    rotation: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        *,
        scheme: Scheme,
        compute_dtype: torch.dtype = torch.bfloat16,
        rotation: int = 0,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate and draw a full weight
        _check_rotation(SCHEMES[scheme], in_features, rotation)
        weight = torch.zeros((out_features, in_features), dtype=torch.int8, device=device).view(SCHEMES[scheme])
        matrix = make_rotation(rotation).to(device) if rotation else None
        offset = torch.zeros(out_features, dtype=compute_dtype, device=device) if bias else None
        self._set(weight, torch.ones((out_features, 1), device=device), offset, compute_dtype, matrix)

    @classmethod
    @torch.no_grad()
    def from_linear(cls, linear: nn.Linear, scheme: Scheme, *, rotation: int = 0) -> FrozenLinear8:
        """Round a linear's weight, where it is; the bias stays the same Parameter, frozen. linear is not changed.

        The cost is a pass over the weight with float32 copies of 128 MiB at a time.

        Raises: ValueError for a weight that is 8-bit already or not finite.
        """
        dtype, weight = SCHEMES[scheme], linear.weight
        if weight.dtype not in _COMPUTE_DTYPES:
            raise ValueError(
                f"{scheme} was asked for, but the weight is {weight.dtype}; round a bfloat16, float16 or float32 "
                "weight, or take one with its scale as it is with from_quantized"
            )
        _check_rotation(dtype, linear.in_features, rotation)
        matrix = make_rotation(rotation).to(weight.device) if rotation else None
        values, scale = _quantize_weight(weight, dtype, matrix)
        return cls._make(values, scale, linear.bias, weight.dtype, matrix)

    @classmethod
    @torch.no_grad()
    def from_quantized(
        cls,
        weight: torch.Tensor,
        scale: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        rotation: int = 0,
    ) -> FrozenLinear8:
        """Take an 8-bit weight as a file has it, such as ComfyUI's fp8_scaled; W = weight * scale.

        Args:
            weight: float8_e4m3fn or int8, taken over without a copy if contiguous. [N, K]
            scale: one value for the tensor or one per row.
            rotation: block of the rotation that was applied before weight was rounded; 0 for none.
        Raises: ValueError for another type, a scale of another size, or a rotation that does not fit.
        """
        if weight.dtype not in LARGEST or weight.ndim != 2:
            raise ValueError(
                f"an 8-bit weight was announced and {weight.dtype} {list(weight.shape)} found; float8_e4m3fn and int8 "
                "matrices can be taken over, load others in full precision and round them with from_linear"
            )
        if scale.numel() not in (1, weight.shape[0]):
            raise ValueError(
                f"scale has {scale.numel()} values for a weight of {weight.shape[0]} rows; 1 value or one per row fits"
            )
        _check_rotation(weight.dtype, weight.shape[1], rotation)
        matrix = make_rotation(rotation).to(weight.device) if rotation else None
        rows = scale.detach().to(weight.device, torch.float32).reshape(-1, 1).expand(weight.shape[0], 1).clone()
        return cls._make(weight.detach().contiguous(), rows.contiguous(), bias, compute_dtype, matrix)

    @classmethod
    def _make(cls, *parts: Any) -> FrozenLinear8:
        """Of parts as _set takes them."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._set(*parts)
        return self

    def _set(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        compute_dtype: torch.dtype,
        rotation: torch.Tensor | None,
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.compute_dtype = compute_dtype
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("rotation", rotation)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=False)
            self.bias.requires_grad_(False)

    @property
    def scheme(self) -> Scheme:
        return "int8-compute" if self.weight.dtype is torch.int8 else "fp8-compute"

    @property
    def rotation_block(self) -> int:
        """Width of the blocks the in dim is rotated in, 0 for none."""
        return 0 if self.rotation is None else self.rotation.shape[0]

    @property
    def W_q(self) -> torch.Tensor:
        """The stored weight under the name by which PEFT knows layers that it must dequantize (for DoRA's norms)."""
        return self.weight

    @torch.no_grad()
    def dequantize(self) -> torch.Tensor:
        """The weight the layer computes with, in compute_dtype; the size of the whole unrounded weight. [N, K]"""
        device = self.weight.device  # of a block that streams the weight may rest in host memory, and not the scale
        weight = _dequantize(self.weight, self.scale.to(device), self.compute_dtype)
        return weight if self.rotation is None else rotate(weight, self.rotation.to(device).t())

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's name for it, which callers may use
        """[..., K] -> [..., N]. Raises: RuntimeError if somebody asks for a gradient of the weight."""
        if self.weight.requires_grad:
            raise RuntimeError(
                f"the {self.scheme} weight of a frozen linear was set to require a gradient and has none; call "
                "requires_grad_(False) on the model and train a LoRA on top"
            )
        if is_autocasting(input):
            kind = input.device.type
            with torch.autocast(kind, enabled=False):  # our own sums are float32 and stay so
                return self._multiply(input.to(torch.get_autocast_dtype(kind)))
        return self._multiply(input)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = _Linear8.apply(rows, self.weight, self.scale, self.bias, self.rotation)
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        rotation = f", rotation={self.rotation_block}" if self.rotation_block else ""
        return f"{super().extra_repr()}, scheme={self.scheme}{rotation}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FrozenLinear8:
        """Let `.to`, `.half` and the like move everything, and change the type only of what may change it."""
        kept = [self.weight, self.scale, self.rotation]

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not any(tensor is other for other in kept):
                return fn(tensor)
            after = fn(tensor.new_empty(0))
            return fn(tensor) if after.dtype is tensor.dtype else tensor.to(after.device)

        after = fn(torch.empty(0, dtype=self.compute_dtype, device=self.weight.device))
        if after.dtype in _COMPUTE_DTYPES:
            self.compute_dtype = after.dtype
        return super()._apply(change, recurse)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Refuse a weight of another type: copying it would round it without a scale."""
        wanted = {"weight": self.weight.dtype, "scale": torch.float32}
        for name, dtype in wanted.items():
            found = state_dict.get(prefix + name)
            if found is not None and found.dtype is not dtype:
                args[-1].append(
                    f"{prefix}{name} is {found.dtype} in the state dict and {dtype} in a {self.scheme} layer; load a "
                    "state dict of the same scheme, or load the plain linear and round it with from_linear"
                )
                return
        super()._load_from_state_dict(state_dict, prefix, *args)


def is_autocasting(x: torch.Tensor) -> bool:
    """Whether autocast would change a linear's input; also where the compiler traces."""
    kind = x.device.type
    return kind in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(kind) and x.dtype != torch.float64


def _check_rotation(dtype: torch.dtype, in_features: int, block: int) -> None:
    if block and dtype is not torch.int8:
        raise ValueError("rotation was asked for float8, which gains nothing by it; use rotation 0, or int8-compute")
    if block and in_features % block:
        fitting = [other for other in ROTATIONS if in_features % other == 0]
        raise ValueError(
            f"rotation in blocks of {block} does not divide {in_features} input features; use one of {[0, *fitting]}"
        )


def _quantize_weight(
    weight: torch.Tensor, dtype: torch.dtype, rotation: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
    height = max(1, _PIECE // 2 // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], height):
        rows = slice(start, start + height)
        values[rows], scale[rows] = quantize_rows(weight[rows], dtype, rotation=rotation)
    if weight.device.type != "meta" and not scale.isfinite().all():
        broken = int((~scale.isfinite()).sum())
        raise ValueError(
            f"{broken} of {weight.shape[0]} rows of a weight hold infinities or NaN and cannot be rounded to 8 bits; "
            "the checkpoint is damaged, load another"
        )
    return values, scale


def refuse_merge(model: nn.Module) -> int:
    """Make every LoRA layer around a FrozenLinear8 refuse merge(), in place; returns how many.

    PEFT adds a merged LoRA to the stored values as if they were the weight. For float8, and for int8 by default, torch
    raises an error about types; with safe_merge=True int8 takes it and the model is silently wrong.
    """
    layers = [m for m in model.modules() if isinstance(m._modules.get("base_layer"), FrozenLinear8)]
    for layer in layers:
        layer.merge = _refuse_merge  # type: ignore[assignment]
    return len(layers)


def _refuse_merge(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises: RuntimeError always."""
    raise RuntimeError(
        "asked to merge a LoRA into 8-bit weights, which are coarser than most LoRAs and would round it away; keep the "
        "LoRA beside the model, or merge it into the bfloat16 model before quantizing"
    )
