"""Triton kernels of the 8-bit linears: quantize rows, multiply, transpose, rescale. kernel_choice.py decides when.

Legend: M rows, I the contracted dim, J columns of a product [M, I] @ [I, J]; B width of a rotated block.

Every configuration that the tuner may pick adds the contracted dim in steps of BLOCK_I, so its choice changes no
result. After each step `matmul` moves the sum to float32 registers: wgmma keeps about 14 bits while it adds up float8.

Importing this file is safe without Triton and touches no device. On the CPU the kernels run in Triton's interpreter
(TRITON_INTERPRET=1), which tests use. On meta they allocate as elsewhere and launch nothing, for forecasts of memory.
"""
# ruff: noqa: ANN001, ANN202  (Triton reads annotations of a kernel as its own types)

from __future__ import annotations

import contextlib
import functools
import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

try:
    import triton
    import triton.language as tl
except (ImportError, OSError) as error:  # OSError: a Windows build without its runtime libraries
    triton = None
    _MISSING = f"Triton is not installed ({error})"
else:
    _MISSING = ""

_log = logging.getLogger(__name__)

OLDEST_TRITON = "3.2"
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
WIDEST_ROTATION = 64  # block that every card has the shared memory for; wider ones go by a matmul before
SMALLEST_AMAX = 1e-30  # of a row; keeps both amax / LARGEST and LARGEST / amax normal float32 numbers
MAX_INT8_TERMS = (2**31 - 1) // (127 * 127)  # more products of two int8 could overflow an int32 sum
_BLOCK_I = 128  # the same in every configuration; see above
_COLUMNS_PER_STEP = 4096  # of a row held in registers while it is quantized
_TILE_WIDTH = 64  # of that piece of a row when nothing is rotated
# (BLOCK_M, BLOCK_J, stages, warps). Shared memory is (M + J) * 128 * stages bytes: consumer cards have 99 KB, so each
# height has a configuration that fits there; the tuner passes over those that do not.
_CONFIGS = ((128, 128, 3, 8), (128, 256, 3, 8), (128, 128, 4, 4), (64, 128, 3, 4), (64, 64, 5, 4))
_INTERPRETED_TILE = {"BLOCK_M": 32, "BLOCK_J": 64}
_ROW_CLASSES = (128, 1024)  # the tuner tells only these and more apart, so that changing resolutions do not tune on


def fault(device: torch.device) -> str:
    """Why these kernels do not run on a device; "" if they do. The first call per device launches one: whether Triton
    finds its compiler and the card's driver is written nowhere."""
    if _MISSING:
        return _MISSING
    if Version(triton.__version__) < Version(OLDEST_TRITON):
        return f"Triton {triton.__version__} is older than {OLDEST_TRITON}"
    if is_interpreted():
        return ""
    return _launch_fault(device) if device.type == "cuda" else f"Triton does not run on {device.type}"


def is_interpreted() -> bool:
    """Whether the kernels of this process run in Triton's interpreter, on CPU tensors."""
    return not _MISSING and not isinstance(_matmul_kernel, triton.JITFunction)


@functools.cache
def _launch_fault(device: torch.device) -> str:
    try:
        quantize_rows(torch.ones(1, 64, device=device), torch.int8)
    except Exception as error:  # a probe: whatever a missing compiler or driver raises, the slower kernels answer it
        _log.warning("Triton does not work on %s, slower kernels take over: %s", device, error)
        return f"Triton does not work on {device}: {error}"
    return ""


def quantize_rows(
    x: Tensor, dtype: torch.dtype, *, multiplier: Tensor | None = None, rotation: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round each row of x, multiplied by a vector or rotated in blocks first, to 8 bits with a scale of its own.

    Args:
        x: float, any row stride, contiguous within a row. [M, J]
        multiplier: float32. [J]
        rotation: float32, orthogonal, entries exact in x's dtype; J is a multiple of B, B >= 16. [B, B]
    Returns: values [M, J] and float32 scales [M, 1]; a row with an infinity or NaN has the scale NaN.
    """
    rows, columns = x.shape
    values = torch.empty((rows, columns), dtype=dtype, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if x.device.type == "meta":
        return values, scale
    width = _TILE_WIDTH if rotation is None else rotation.shape[0]
    height = max(16, min(_COLUMNS_PER_STEP, triton.next_power_of_2(columns)) // width)
    with _on(x.device):
        _quantize_kernel[(rows,)](
            x,
            x if multiplier is None else multiplier,
            x if rotation is None else rotation,
            values,
            scale,
            columns,
            x.stride(0),
            LARGEST=LARGEST[dtype],
            SMALLEST=SMALLEST_AMAX,
            HAS_MULTIPLIER=multiplier is not None,
            HAS_ROTATION=rotation is not None,
            HEIGHT=height,
            WIDTH=width,
            num_warps=8,
        )
    return values, scale


def matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    b_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """(a @ b) * a_scale * b_scale + bias of two 8-bit matrices of one dtype.

    Args:
        a: contiguous. [M, I]    a_scale: float32. [M, 1]
        b: one of its strides is 1; I and J are multiples of 16. [I, J]    b_scale, bias: J values each.
    Returns: [M, J] in out_dtype.
    """
    (rows, inner), columns = a.shape, b.shape[1]
    assert a.is_contiguous() and 1 in b.stride() and inner % 16 == 0 and columns % 16 == 0, (a.shape, b.shape)
    assert a.dtype is b.dtype and (a.dtype is not torch.int8 or inner <= MAX_INT8_TERMS), (a.dtype, b.dtype, inner)
    out = torch.empty((rows, columns), dtype=out_dtype, device=a.device)
    if a.device.type == "meta":
        return out

    def grid(tile: dict[str, Any]) -> tuple[int]:
        return (triton.cdiv(rows, tile["BLOCK_M"]) * triton.cdiv(columns, tile["BLOCK_J"]),)

    # the interpreter has no clock to tune by
    kernel, tile = (_matmul_kernel, _INTERPRETED_TILE) if is_interpreted() else (_tuned_matmul(a.device), {})
    with _on(a.device):
        kernel[grid](
            a,
            b,
            out,
            a_scale,
            a_scale if b_scale is None else b_scale,
            a_scale if bias is None else bias,
            rows,
            inner,
            columns,
            *b.stride(),
            next((most for most in _ROW_CLASSES if rows <= most), 0),
            HAS_B_SCALE=b_scale is not None,
            HAS_BIAS=bias is not None,
            IS_INT8=a.dtype is torch.int8,
            IS_EVEN=inner % _BLOCK_I == 0,
            BLOCK_I=_BLOCK_I,
            **tile,
        )
    return out


def rescale(sums: Tensor, a_scale: Tensor, out_dtype: torch.dtype, b_scale: Tensor, bias: Tensor | None) -> Tensor:
    """sums * a_scale * b_scale + bias in one pass. sums: what a plain 8-bit matmul wrote, contiguous. [M, J] a_scale:
    float32. [M, 1]    b_scale, bias: J values each."""
    rows, columns = sums.shape
    out = torch.empty((rows, columns), dtype=out_dtype, device=sums.device)
    if sums.device.type == "meta":
        return out
    block = 1024
    with _on(sums.device):
        _rescale_kernel[(rows, triton.cdiv(columns, block))](
            sums,
            out,
            a_scale,
            b_scale,
            a_scale if bias is None else bias,
            columns,
            HAS_BIAS=bias is not None,
            BLOCK=block,
        )
    return out


def transpose(matrix: Tensor) -> Tensor:
    """A contiguous copy of the transpose of an 8-bit matrix, any strides of which one is 1: [I, J] -> [J, I]."""
    inner, columns = matrix.shape
    out = torch.empty((columns, inner), dtype=torch.int8, device=matrix.device)
    if matrix.device.type == "meta":
        return out.view(matrix.dtype)
    grid = (triton.cdiv(inner, 128), triton.cdiv(columns, 128))
    with _on(matrix.device):
        _transpose_kernel[grid](matrix.view(torch.int8), out, inner, columns, *matrix.stride(), BLOCK=128, num_warps=8)
    return out.view(matrix.dtype)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Make a card the current one: Triton launches on the current card, wherever the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def _tuned_matmul(device: torch.device) -> Any:
    """One per card: what fits and is fastest on one may not even start on another."""
    configs = [
        triton.Config({"BLOCK_M": block_m, "BLOCK_J": block_j}, num_stages=stages, num_warps=warps)
        for block_m, block_j, stages, warps in _CONFIGS
    ]
    do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=20)  # ms
    return triton.autotune(configs, key=["row_class", "inner", "columns"], do_bench=do_bench)(_matmul_kernel)


if triton is not None:

    @triton.jit
    def _row_tile(x, multiplier, turn, offset, columns, HAS_MULTIPLIER: tl.constexpr, HAS_ROTATION: tl.constexpr):
        """A piece of a row as float32, multiplied or rotated. [HEIGHT, WIDTH]"""
        inside = offset < columns
        value = tl.load(x + offset, mask=inside, other=0.0)
        if HAS_ROTATION:
            piece = tl.dot(value, turn.to(value.dtype), input_precision="ieee")
        else:
            piece = value.to(tl.float32)
        if HAS_MULTIPLIER:
            piece = piece * tl.load(multiplier + offset, mask=inside, other=0.0)
        return piece

    @triton.jit
    def _quantize_kernel(
        x,
        multiplier,
        rotation,
        values,
        scale,
        columns,
        row_stride,
        LARGEST: tl.constexpr,
        SMALLEST: tl.constexpr,
        HAS_MULTIPLIER: tl.constexpr,
        HAS_ROTATION: tl.constexpr,
        HEIGHT: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)  # rows * columns may pass 2^31
        x += row * row_stride
        values += row * columns
        lane = tl.arange(0, WIDTH)
        piece = tl.arange(0, HEIGHT)[:, None] * WIDTH + lane[None, :]
        turn = tl.load(rotation + lane[:, None] * WIDTH + lane[None, :]) if HAS_ROTATION else 0.0
        peak = tl.zeros((HEIGHT, WIDTH), dtype=tl.float32)
        is_broken = tl.zeros((HEIGHT, WIDTH), dtype=tl.int32)
        for start in range(0, columns, HEIGHT * WIDTH):
            value = _row_tile(x, multiplier, turn, start + piece, columns, HAS_MULTIPLIER, HAS_ROTATION)
            is_broken |= tl.where(tl.abs(value) < float("inf"), 0, 1)  # a maximum may drop NaN, a comparison does not
            peak = tl.maximum(peak, tl.abs(value))
        amax = tl.maximum(tl.max(tl.max(peak, axis=1), axis=0), SMALLEST)
        has_broken = tl.max(tl.max(is_broken, axis=1), axis=0) > 0
        largest = tl.full((), LARGEST, tl.float32)
        tl.store(scale + row, tl.where(has_broken, float("nan"), tl.div_rn(amax, largest)))
        inverse = tl.div_rn(largest, amax)
        for start in range(0, columns, HEIGHT * WIDTH):  # the second reading comes from the cache
            offset = start + piece
            value = _row_tile(x, multiplier, turn, offset, columns, HAS_MULTIPLIER, HAS_ROTATION) * inverse
            value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST)
            if values.dtype.element_ty == tl.int8:
                value = (value + 12582912.0) - 12582912.0  # 1.5 * 2^23: nearest integer, ties to even, on every backend
            tl.store(values + offset, value.to(values.dtype.element_ty), mask=offset < columns)

    @triton.jit(do_not_specialize=["rows", "row_class"])  # their values change no instruction: do not compile for each
    def _matmul_kernel(
        a,
        b,
        out,
        a_scale,
        b_scale,
        bias,
        rows,
        inner,
        columns,
        stride_bi,
        stride_bj,
        row_class,
        HAS_B_SCALE: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        IS_INT8: tl.constexpr,
        IS_EVEN: tl.constexpr,
        BLOCK_I: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_J: tl.constexpr,
    ):
        # Neighbouring programs take neighbouring rows of the same columns: the weight, which is the larger operand, is
        # read from memory about once and then from the cache.
        row_tiles = tl.cdiv(rows, BLOCK_M)
        column_tiles = tl.cdiv(columns, BLOCK_J)
        group = tl.program_id(0) // (16 * column_tiles)
        height = tl.minimum(row_tiles - group * 16, 16)
        within = tl.program_id(0) % (16 * column_tiles)
        row = (group * 16 + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = (within // height) * BLOCK_J + tl.arange(0, BLOCK_J)
        step = tl.arange(0, BLOCK_I)
        # Beyond the edge rows and columns wrap round instead of being masked: what they compute is not stored. All
        # sizes are multiples of 16, so that a load of 16 bytes never wraps inside.
        wrapped = tl.max_contiguous(tl.multiple_of(column % columns, 16), 16)
        a_at = a + (row % rows).to(tl.int64)[:, None] * inner + step[None, :]
        b_at = b + step.to(tl.int64)[:, None] * stride_bi + wrapped.to(tl.int64)[None, :] * stride_bj
        sums = tl.zeros((BLOCK_M, BLOCK_J), dtype=tl.int32 if IS_INT8 else tl.float32)
        for start in range(0, inner, BLOCK_I):
            if IS_EVEN:
                a_tile, b_tile = tl.load(a_at), tl.load(b_at)
            else:
                has_step = start + step < inner
                a_tile = tl.load(a_at, mask=has_step[None, :], other=0.0)
                b_tile = tl.load(b_at, mask=has_step[:, None], other=0.0)
            if IS_INT8:
                sums = tl.dot(a_tile, b_tile, sums, out_dtype=tl.int32)
            else:
                sums = tl.dot(a_tile, b_tile, sums, max_num_imprecise_acc=BLOCK_I)
            a_at += BLOCK_I
            b_at += BLOCK_I * stride_bi
        result = sums.to(tl.float32) * tl.load(a_scale + row, mask=row < rows, other=0.0)[:, None]
        if HAS_B_SCALE:
            result *= tl.load(b_scale + column, mask=column < columns, other=0.0)[None, :]
        if HAS_BIAS:
            result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        out_at = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _rescale_kernel(sums, out, a_scale, b_scale, bias, columns, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        result = tl.load(sums + row * columns + column, mask=inside, other=0).to(tl.float32) * tl.load(a_scale + row)
        result *= tl.load(b_scale + column, mask=inside, other=0.0)
        if HAS_BIAS:
            result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + row * columns + column, result.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _transpose_kernel(matrix, out, inner, columns, stride_i, stride_j, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        wide_i, wide_j = i.to(tl.int64), j.to(tl.int64)
        inside = (i < inner)[:, None] & (j < columns)[None, :]
        tile = tl.load(matrix + wide_i[:, None] * stride_i + wide_j[None, :] * stride_j, mask=inside, other=0)
        tl.store(out + wide_j[:, None] * inner + wide_i[None, :], tl.trans(tile), mask=tl.trans(inside))
