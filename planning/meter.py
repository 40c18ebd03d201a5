"""Counts what operations hold on tensors without data, and leads them the way that cards go.

On meta some operations take another way than on a card:
- attention: torch's plain way would keep the probabilities [B, N, S, S]. Cards keep the output and a float32 per head
  and token; their backward holds a float32 copy of the query's gradient meanwhile, which no operation shows.
- rms_norm: one kernel that keeps its input and a float32 per row, where torch has it.
- 8-bit products: the kernels of the card that is planned for; they allocate on meta and launch nothing.
CPU and emulated cards take the plain way, so that a forecast for them can be compared with what they really hold.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..parallel.devices import CPU
from ..quantization.kernel_choice import DeviceKernels, KernelChoice, using_kernels

CARD_ROUNDING = 512  # bytes; torch's allocator for CUDA gives out multiples of it

# The kernels of a card nobody has seen: those of data-centre chips, which transpose a slice of the weight. Others do
# without the slice, so this is the higher of the two.
UNSEEN_CARD = DeviceKernels(
    {
        torch.float8_e4m3fn: KernelChoice("vendor", "transpose", has_triton=True),
        torch.int8: KernelChoice("triton", "transpose", has_triton=True),
    }
)


@dataclass(frozen=True)
class Kernels:
    """Which way operations take: a card's fused attention and norms, or torch's plain ones; and 8-bit products."""

    eight_bit: DeviceKernels = UNSEEN_CARD
    has_fused: bool = True
    rounding: int = CARD_ROUNDING


@contextlib.contextmanager
def as_on_card(kernels: Kernels) -> Iterator[None]:
    """Inside, operations on meta go the way of a card's kernels."""
    fused: AbstractContextManager[Any] = _AsOnCards() if kernels.has_fused else contextlib.nullcontext()
    with using_kernels(kernels.eight_bit), fused:
        yield


class MemoryMeter(TorchDispatchMode):
    """Counts bytes of the storages that operations make and somebody still holds; `live` now, `peak` since start().
    Every storage counts as a multiple of `rounding`."""

    def __init__(self, rounding: int = CARD_ROUNDING) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._rounding = rounding
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def start(self) -> int:
        """Measure the peak from here; returns what is alive."""
        self.peak = self.live
        return self.live

    def rounded(self, size: int) -> int:
        """What a storage of so many bytes counts."""
        return -(-size // self._rounding) * self._rounding

    def size(self, tensor: torch.Tensor) -> int:
        """What a storage of this tensor's own would count."""
        return self.rounded(tensor.numel() * tensor.element_size())

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Never count these, nor views of them: weights."""
        for tensor in tensors:
            self._add(tensor.untyped_storage(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_is_wrapper(value) for value in tree_leaves((args, kwargs))):
            return NotImplemented  # a quantized tensor: its own dispatch comes back with what it is made of
        out = _copied_to_host(args[0], kwargs) if _goes_to_host(func, args, kwargs) else func(*args, **kwargs)
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and not _is_wrapper(value):
                storage = value.untyped_storage()
                self._add(storage, self.rounded(storage.nbytes()))
        self.peak = max(self.peak, self.live + _hidden_bytes(func, args))
        return out

    def _add(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = weakref.ref(storage, functools.partial(self._drop, key)), size
        self.live += size
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int, storage: weakref.ref[Any]) -> None:
        self.live -= self._known.pop(key)[1]


def _goes_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    """Some models join what they are given to numbers that are in host memory."""
    return func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == CPU


def _copied_to_host(tensor: torch.Tensor, kwargs: Any) -> torch.Tensor:
    """Zeros, for there is no data."""
    return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


_ATTENTION_BACKWARDS = {
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}


def _hidden_bytes(func: Any, args: Any) -> int:
    """What an operation holds while it runs and no operation shows: attention sums the query's gradient in float32."""
    return 4 * args[1].numel() if func in _ATTENTION_BACKWARDS else 0


class _AsOnCards(TorchFunctionMode):
    """Leads attention and norms on meta to what cards run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.rms_norm and _HAS_FUSED_NORM:
            return _rms_norm(*args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention for 16 bits without a mask, else the memory-efficient kernel; both keep no probabilities."""
    if attn_mask is None and query.dtype in (torch.bfloat16, torch.float16):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    if attn_mask is not None:
        shape = (*query.shape[:-1], key.shape[-2])
        attn_mask = torch.empty_like(attn_mask, dtype=query.dtype).expand(shape)
    return efficient(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


_HAS_FUSED_NORM = hasattr(torch.ops.aten, "_fused_rms_norm_backward")


def _rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != x.dtype:  # torch takes the long way then
        return F.rms_norm(x, list(normalized_shape), weight, eps)
    return _FusedRmsNorm.apply(x, len(normalized_shape))


class _FusedRmsNorm(torch.autograd.Function):
    """What torch's fused kernel allocates and keeps, for a frozen weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, num_dims: int) -> torch.Tensor:
        rows = torch.empty(x.shape[: x.ndim - num_dims], dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, rows)
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.empty_like(grad), None
