"""Makes the ring attention of diffusers 0.37 to 0.39 right with torch 2.9 and newer ("ROCm LSE fix").

Up to 0.39 torch's version, and not the rank of the log-sum-exp (LSE), decides whether diffusers adds its last dim. The
fix wraps the attention op that a ring function is given, so that the LSE has the rank which the version test expects.
The backward before 0.40 is not fixed. Which release does what: docs/decisions/0003-ring-lse-fix.md.

Legend: B batch, S tokens (local shard), N heads, H head dim.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

from packaging.version import Version
from torch import Tensor

_RIGHT_FROM = "0.40"
_RINGS = ("TemplatedRingAttention", "TemplatedRingAnythingAttention")  # the second since 0.38
_EXCHANGE = "SeqAllToAllDim"

# Class of diffusers whose `apply` is ours now -> ours, and what the class itself had. diffusers' module is one of the
# process, so this is, too.
_replaced: dict[type, tuple[Any, Any]] = {}


def apply_ring_lse_fix() -> str:
    """Make diffusers' ring attention give its LSE the right rank, for the whole process; returns what was done and why.
    A second call changes nothing. A forward that has started keeps the functions it started with. Raises: RuntimeError
    if diffusers is not installed, or has no ring attention that this file knows."""
    try:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the ring LSE fix is for diffusers 0.37 to 0.39, and {error.name} is missing") from error
    found = version("diffusers")
    if Version(found) >= Version(_RIGHT_FROM):
        return f"Not needed: diffusers {found} decides by the rank of the LSE"
    names = [name for name in (*_RINGS, _EXCHANGE) if hasattr(dispatch, name)]
    if _RINGS[0] not in names or _EXCHANGE not in names:
        raise RuntimeError(
            f"the ring LSE fix knows diffusers 0.37 to 0.39, and diffusers {found} has no {_RINGS[0]} and {_EXCHANGE}; "
            f"update diffusers to {_RIGHT_FROM} or newer, where nothing needs fixing"
        )
    if not _replaced:
        owners = [getattr(dispatch, name) for name in names]
        made = [_make_exchange(each) if each.__name__ == _EXCHANGE else _make_ring(each, dispatch) for each in owners]
        for owner, ours in zip(owners, map(staticmethod, made), strict=True):
            _replaced[owner] = ours, vars(owner).get("apply")
            owner.apply = ours
    return f"Active: diffusers {found} decides by torch's version, not by the rank of the LSE, in {', '.join(names)}"


def remove_ring_lse_fix() -> bool:
    """Leave diffusers as it was found; whether there was a fix to remove. Raises: RuntimeError if someone else has
    patched the same place since; nothing is changed then."""
    covered = [owner for owner, (ours, _) in _replaced.items() if vars(owner).get("apply") is not ours]
    if covered:
        raise RuntimeError(
            f"asked to remove the ring LSE fix, but {covered[0].__name__}.apply was replaced again by someone else; "
            "remove that patch first"
        )
    was_applied = bool(_replaced)
    while _replaced:
        owner, (_, before) = _replaced.popitem()
        if before is None:  # it was inherited
            del owner.apply  # type: ignore[attr-defined]
        else:
            owner.apply = before  # type: ignore[attr-defined]
    return was_applied


def _make_ring(ring: Any, dispatch: ModuleType) -> Callable[..., Any]:
    original = ring.apply
    position = list(inspect.signature(ring.forward).parameters).index("forward_op") - 1  # apply is called without ctx

    def apply(*args: Any) -> Any:
        has_trailing_dim = not dispatch.is_torch_version("<", "2.9.0")  # else the version test adds it

        def attention(*inner: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            out_BSNH, lse, *_ = args[position](*inner, **kwargs)
            lse_BSN1 = lse if lse.ndim == out_BSNH.ndim else lse.unsqueeze(-1)
            if lse_BSN1.shape != (*out_BSNH.shape[:-1], 1):
                raise RuntimeError(
                    f"ring attention needs a log-sum-exp of shape {tuple(out_BSNH.shape[:-1])}, with or without a "
                    f"trailing 1, and its attention op returned {tuple(lse.shape)}; use another attention backend"
                )
            return out_BSNH, lse_BSN1 if has_trailing_dim else lse_BSN1.squeeze(-1)

        return original(*args[:position], attention, *args[position + 1 :])

    return apply


def _make_exchange(exchange: Any) -> Callable[..., Any]:
    """The all-to-all's apply, which takes [B, S, N, H] only: the LSE [B, S, N] gets a trailing dim, which the caller
    takes off again."""
    original = exchange.apply

    def apply(group: Any, tensor: Tensor, *args: Any) -> Tensor:
        return original(group, tensor.unsqueeze(-1) if tensor.ndim == 3 else tensor, *args)

    return apply
