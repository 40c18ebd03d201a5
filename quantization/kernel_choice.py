"""Which kernels a device multiplies 8-bit matrices with, and which devices have none."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from . import eight_bit_kernels as kernels


@dataclass(frozen=True)
class KernelChoice:
    """Which kernels one device multiplies one 8-bit type with.

    Args:
        forward: "vendor": row-wise _scaled_mm, or _int_mm and a rescaling pass; "unit": _scaled_mm without scales and a
            rescaling pass; "triton": one kernel; "dequantize": no 8-bit product.
        grad_input: "triton": one kernel that reads the weight as it lies; "transpose": the forward's product with one
            transposed slice of the weight after another.
        has_triton: whether rows are rounded, sums rescaled and slices transposed by our kernels.
    """

    forward: Literal["vendor", "unit", "triton", "dequantize"]
    grad_input: Literal["triton", "transpose", "dequantize"]
    has_triton: bool = False


DeviceKernels = Mapping[torch.dtype, KernelChoice]  # what a device multiplies each 8-bit type with
_used: ContextVar[DeviceKernels | None] = ContextVar("8-bit kernels of another device", default=None)


@contextmanager
def using_kernels(of: DeviceKernels) -> Iterator[None]:
    """Inside, in this thread, 8-bit products go as on the device of these kernels, for forecasts on meta."""
    token = _used.set(of)
    try:
        yield
    finally:
        _used.reset(token)


def device_kernels(device: torch.device) -> DeviceKernels:
    return {dtype: choose_kernels(device, dtype) for dtype in kernels.LARGEST}


def kernels_for(tensor: torch.Tensor, dtype: torch.dtype) -> KernelChoice:
    used = _used.get()
    return choose_kernels(tensor.device, dtype) if used is None else used[dtype]


@cache
def choose_kernels(device: torch.device, dtype: torch.dtype) -> KernelChoice:
    """The fastest that the device has."""
    if device.type in ("cpu", "lazy"):  # lazy: torch's name for CPU code run later; the cards of our tests use it
        # up to torch 2.11 at least, the CPU's float8 products know no row-wise scales
        return KernelChoice("vendor" if dtype is torch.int8 else "unit", "transpose")
    if device.type != "cuda" or fault(dtype, device):
        return KernelChoice("dequantize", "dequantize")
    has_rowwise = sys.platform != "win32"  # the Windows builds of torch have no row-wise scales
    forward: Literal["vendor", "unit", "triton"] = "vendor" if dtype is torch.int8 or has_rowwise else "unit"
    if kernels.fault(device):
        return KernelChoice(forward, "dequantize")
    if dtype is torch.int8:
        forward = "triton"  # _int_mm writes int32 sums, to be read and rescaled: 1.4 to 1.9 times slower on an H200
    # Data-centre chips since Hopper multiply bytes only with the contracted dim contiguous: turning the weight round
    # once beats doing so in every tile. The tensor units of others are slow enough to hide it.
    is_data_centre = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return KernelChoice(forward, "transpose" if is_data_centre else "triton", has_triton=True)


def has_float8(device: torch.device) -> bool:
    """Whether values can be rounded to float8 and read again; MPS for one could not."""
    if device.type in ("cuda", "lazy", "meta"):
        return True
    try:
        return torch.ones(1, device=device).to(torch.float8_e4m3fn).to(torch.float32).item() == 1.0
    except (RuntimeError, TypeError, AssertionError):  # not implemented, no such type, or no such device
        return False


def fault(dtype: torch.dtype, device: torch.device) -> str:
    """Why a device has no products of this 8-bit type; "" if it has."""
    if device.type in ("cpu", "lazy"):
        return ""
    if device.type != "cuda":
        return f"{device} has no 8-bit products that this pack knows"
    if torch.version.hip is not None:  # MI300 (gfx942) has float8 of another kind (e4m3fnuz), which e4m3fn does not fit
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        able = ("gfx90a", "gfx94", "gfx95", "gfx11", "gfx12") if dtype is torch.int8 else ("gfx95", "gfx12")
        name = "int8" if dtype is torch.int8 else "float8_e4m3fn"
        return "" if arch.startswith(able) else f"{name} products need {', '.join(able)}, the card is {arch}"
    capability = torch.cuda.get_device_capability(device)
    name, needed = ("int8", (7, 5)) if dtype is torch.int8 else ("float8", (8, 9))
    if capability >= needed:
        return ""
    found, wanted = (".".join(map(str, each)) for each in (capability, needed))
    return f"{name} products need compute capability {wanted} and the card has {found}"
