"""Gradients of cuDNN's attention made right.

Torch keeps the kernel that cuDNN planned for the layouts of q, k and v, and reuses it for every layout of the output's
gradient. A model with two such layouts (FLUX.1, compiled blocks) then gets gradients that are silently wrong, or an
illegal memory access. While a model trains, every gradient is therefore given the layout of the output. A plan that
somebody else in this process left behind can still be wrong. So the first gradient of every plan is compared with the
definition for a few queries, and a wrong one ends the run. Why so: docs/decisions/0009-gradients-of-attention.md.

Shapes: B batch, N heads, S queries, T keys, H head dim.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_HAS_KERNEL = hasattr(torch.ops.aten, "_cudnn_attention_backward")
_OPERATOR = "_scaled_dot_product_cudnn_attention_backward"
_ALIGNED_BYTES = 16  # the kernel reads so many at once
# Of the length of the right one, in bfloat16: a right gradient is off by 0.002 to 0.003, a wrong one by about 1.
_MOST_OFF = 0.1
# What float32 loses where terms cancel, of their sizes' sum; a gradient that is not ten times as long says nothing.
_ROUNDING = 1e-6
_NUM_COMPARED = 8  # queries, of one head

_right_plans: set[Hashable] = set()  # that this process has seen; torch never forgets a plan


@contextlib.contextmanager
def sound_attention() -> Iterator[None]:
    """Inside, gradients of attention are right whatever their layout; afterwards torch is as it was.

    For the whole process, all threads and devices: forwards and backwards must run inside. Inference needs nothing of
    it. Where torch does not offer the kernel by itself, it does without cuDNN's attention meanwhile.

    Raises: RuntimeError, in a backward, if a gradient is wrong all the same.
    """
    with _our_kernel if _HAS_KERNEL else _no_cudnn:
        yield


class _Shared:
    """A setting of the process for several who may come and go in any order: made by the first, undone by the last."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make, self._lock, self._num_inside = make, threading.Lock(), 0
        self._setting = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._setting.enter_context(self._make())
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                self._setting.close()


@contextlib.contextmanager
def _replaced_kernel() -> Iterator[None]:
    _spend_the_warning()
    ours = _register()
    try:
        yield
    finally:
        ours._destroy()


def _register() -> torch.library.Library:
    ours = torch.library.Library("aten", "IMPL")
    ours.impl(_OPERATOR, _backward, "CUDA")
    return ours


@functools.cache
def _spend_the_warning() -> None:
    """Torch warns once per process of a kernel that takes another's place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*overrid")
        _register()._destroy()


@contextlib.contextmanager
def _without_cudnn() -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


_our_kernel, _no_cudnn = _Shared(_replaced_kernel), _Shared(_without_cudnn)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query [B, N, S, H], key and value [B, N, T, H]; grad is that of out, in any layout.

    Args:
        rest: logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p and
            is_causal.
    """
    grad = _in_layout_of(out, grad)
    found = torch.ops.aten._cudnn_attention_backward(grad, query, key, value, out, *rest, scale=scale)
    bias, dropout_p, is_causal = rest[3], rest[8], rest[9]
    # What torch tells plans apart by, and the output's layout. Each thread has plans of its own.
    given = [
        each if each is None else (each.shape, each.stride(), each.dtype, each.device)
        for each in (query, key, value, out, bias)
    ]
    plan = (threading.get_ident(), *given)
    if plan not in _right_plans and not dropout_p and not is_causal:  # what is dropped cannot be told; none is causal
        is_right = _is_right(found[0], grad, query, key, value, out, bias, scale)
        if is_right is False:
            raise RuntimeError(_REFUSAL)
        if is_right:
            _right_plans.add(plan)
    return found


_REFUSAL = (
    "cuDNN's attention gave a wrong gradient: something else in this process has trained a model of the same size "
    "before, and torch keeps what was planned for it. Restart ComfyUI and train first, or train in a process of its "
    "own (devicebridge train)"
)


def _in_layout_of(out: Tensor, grad: Tensor) -> Tensor:
    """The same values, aligned and with the strides of out."""
    is_alike = all(
        size == 1 or one == other for size, one, other in zip(out.shape, out.stride(), grad.stride(), strict=True)
    )
    if is_alike and grad.data_ptr() % _ALIGNED_BYTES == 0:
        return grad.as_strided(out.shape, out.stride())
    return torch.empty_like(out).copy_(grad)


def _is_right(
    found: Tensor,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    bias: Tensor | None,
    scale: float | None,
) -> bool | None:
    """Whether the gradient of some queries is the one by definition, in float32; None if they cannot tell, since it is
    zero, not finite, or what is left where everything cancels. The host waits for it.

    One head in the middle is compared, since at the ends wrong strides may lead to the right numbers; of it the queries
    whose output matters most, since zeros are right whatever is read.
    """
    last, head = query.shape[0] - 1, query.shape[1] // 3
    head_of_key = head * key.shape[1] // query.shape[1]  # several queries' heads may share one
    weight = grad[last, head].float().norm(dim=-1)
    rows = weight.topk(min(_NUM_COMPARED, len(weight))).indices
    q, do, o, dq = (each[last, head, rows].float() for each in (query, grad, out, found))  # [8, H]
    k, v = key[last, head_of_key].float(), value[last, head_of_key].float()  # [T, H]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = factor * (q @ k.T)  # [8, T]
    if bias is not None:
        scores = scores + bias.expand(*query.shape[:3], key.shape[2])[last, head, rows]
    probabilities = scores.softmax(-1)
    expected = factor * (probabilities * (do @ v.T - (do * o).sum(-1, keepdim=True))) @ k
    terms = factor * (probabilities * (do.abs() @ v.abs().T + (do * o).abs().sum(-1, keepdim=True))) @ k.abs()
    length, noise = expected.norm().item(), _ROUNDING * terms.norm().item()
    if not math.isfinite(length) or length <= 10 * noise:
        return None
    return (dq - expected).norm().item() <= _MOST_OFF * length + noise
