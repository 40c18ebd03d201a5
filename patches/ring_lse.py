"""Makes the ring attention of diffusers 0.37 to 0.39 right with torch 2.9 and newer ("ROCm LSE fix").

Ring attention merges partial results with their log-sum-exp (LSE), which diffusers needs as [B, S, N, 1] beside an
output [B, S, N, H]. Up to 0.39 torch's version decides whether it adds the last dim, and not the LSE's rank. The merge
then fails, or gives wrong pictures without a word. Which release does what: docs/decisions/0003-ring-lse-fix.md.

The fix wraps the attention op that a ring function is given, so that the LSE has the rank which the version test
expects. What unified attention exchanges gets its trailing dim where it is exchanged. Places that test the rank are
left alone. The backward of ring attention before 0.40 is not fixed.

Legend: B batch, S tokens (local shard), N heads, H head dim.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
import threading
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

_DISPATCH = "diffusers.models.attention_dispatch"
_RINGS = ("TemplatedRingAttention", "TemplatedRingAnythingAttention")  # the second since 0.38
_UNIFIED = "_templated_unified_attention"
_EXCHANGE = "SeqAllToAllDim"

_ADDS_DIM = "lse = lse.unsqueeze(-1)"
_RANK_TEST = "lse.ndim == 3"
_VERSION_TEST = "is_torch_version('<', '2.9.0')"

_Test = Literal["rank", "version"]
_Attention = Callable[..., tuple[Tensor, Tensor]]
_ABSENT = object()


class _SharedFix:
    """What is replaced in diffusers while somebody holds a handle; one per process, as diffusers' module is.

    A forward that has started keeps the functions it started with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_holders = 0
        # class -> its "apply": ours, and what was in the class's own dict, _ABSENT if it was inherited
        self._replaced: dict[type, tuple[Any, Any]] = {}

    def acquire(self, dispatch: ModuleType, places: list[str]) -> None:
        with self._lock:
            if self._num_holders == 0:
                self._replaced = dict(_make_replacement(dispatch, place) for place in places)
                for owner, (ours, _) in self._replaced.items():
                    owner.apply = ours  # type: ignore[attr-defined]
            self._num_holders += 1

    def release(self) -> None:
        with self._lock:
            if self._num_holders == 1:
                self._take_off()
            self._num_holders -= 1

    def _take_off(self) -> None:
        covered = [owner for owner, (ours, _) in self._replaced.items() if vars(owner).get("apply") is not ours]
        if covered:
            raise RuntimeError(
                f"asked to remove the ring LSE fix, but {covered[0].__name__}.apply was replaced again by someone "
                "else; remove that patch first"
            )
        for owner, (_, before) in self._replaced.items():
            if before is _ABSENT:
                del owner.apply  # type: ignore[attr-defined]
            else:
                owner.apply = before  # type: ignore[attr-defined]
        self._replaced = {}


_fix = _SharedFix()


class LseFixHandle:
    """is_needed: whether the installed diffusers has the fault, so that something was changed. reason: why."""

    def __init__(self, is_needed: bool, reason: str) -> None:
        self.is_needed = is_needed
        self.reason = reason
        self._lock = threading.Lock()
        self._is_held = is_needed

    def remove(self) -> None:
        """Give the fix up; the last handle to do so leaves diffusers as it was found. A second call is a no-op.

        Raises: RuntimeError if someone else has patched the same place since; nothing is changed then.
        """
        with self._lock:
            if self._is_held:
                _fix.release()
                self._is_held = False


def apply_ring_lse_fix() -> LseFixHandle:
    """Make diffusers' ring attention give its LSE the right rank, for the whole process, until every handle is removed.

    Does nothing where the installed diffusers decides by rank.

    Raises: RuntimeError if diffusers' code is of neither known kind; nothing is changed then.
    """
    dispatch = _import_dispatch()
    found = version("diffusers")
    tests = _read_tests(dispatch, found)
    places = [place for place, test in tests.items() if test == "version"]
    if not places:
        return LseFixHandle(False, f"diffusers {found} decides by the rank of the LSE in {', '.join(tests)}")
    _fix.acquire(dispatch, places)
    return LseFixHandle(
        True, f"diffusers {found} decides by torch's version, not by the rank of the LSE, in {', '.join(places)}"
    )


def _import_dispatch() -> ModuleType:
    try:
        return importlib.import_module(_DISPATCH)
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"the ring LSE fix is for {_DISPATCH}, and {error.name} is not installed; it needs diffusers 0.37 to 0.39, "
            "and from 0.40 on there is nothing to fix"
        ) from error


def _read_tests(dispatch: ModuleType, found: str) -> dict[str, _Test]:
    """For each place that may add the trailing dim, by what it decides; read from the source that is installed."""
    missing = [name for name in (_RINGS[0], _UNIFIED, _EXCHANGE) if not hasattr(dispatch, name)]
    if missing:
        raise RuntimeError(_unknown(found, f"has no {', '.join(missing)}"))
    functions = {name: getattr(dispatch, name).forward for name in _RINGS if hasattr(dispatch, name)}
    functions[_UNIFIED] = getattr(dispatch, _UNIFIED)
    return {name: _read_test(name, function, found) for name, function in functions.items()}


def _read_test(place: str, function: Callable[..., Any], found: str) -> _Test:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError as error:
        raise RuntimeError(_unknown(found, f"has no source for {place}")) from error
    adding = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and ast.unparse(node) == _ADDS_DIM]
    tests = [
        ast.unparse(node.test)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and not node.orelse and [ast.unparse(line) for line in node.body] == [_ADDS_DIM]
    ]
    if len(adding) == 1 and tests == [_RANK_TEST]:
        return "rank"
    if len(adding) == 1 and tests == [_VERSION_TEST]:
        return "version"
    raise RuntimeError(_unknown(found, f"adds the trailing dim of the LSE in {place} in a way this pack does not know"))


def _unknown(found: str, what: str) -> str:
    return (
        f"the ring LSE fix knows the ring attention of diffusers 0.37 to 0.42; diffusers {found} {what}. Use a version "
        "from 0.40 on that it knows, where nothing needs fixing, or leave the fix off and compare with one GPU"
    )


def _make_replacement(dispatch: ModuleType, place: str) -> tuple[type, tuple[Any, Any]]:
    owner = getattr(dispatch, _EXCHANGE if place == _UNIFIED else place)
    apply = _make_exchange_apply(owner) if place == _UNIFIED else _make_ring_apply(owner, dispatch)
    return owner, (staticmethod(apply), vars(owner).get("apply", _ABSENT))


def _make_ring_apply(ring: Any, dispatch: ModuleType) -> Callable[..., Any]:
    """The ring function's apply, with the attention op it is given wrapped."""
    original = ring.apply
    position = list(inspect.signature(ring.forward).parameters).index("forward_op") - 1  # apply is called without ctx

    def apply(*args: Any) -> Any:
        adds_dim = dispatch.is_torch_version("<", "2.9.0")  # what the version test will say
        op = _with_lse_rank(args[position], has_trailing_dim=not adds_dim)
        return original(*args[:position], op, *args[position + 1 :])

    return apply


def _with_lse_rank(attention: _Attention, *, has_trailing_dim: bool) -> _Attention:
    """An attention op whose LSE is [B, S, N, 1], or [B, S, N] without the trailing dim, whichever attention returns."""

    def normalised(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out_BSNH, lse, *_ = attention(*args, **kwargs)
        lse_BSN1 = lse if lse.ndim == out_BSNH.ndim else lse.unsqueeze(-1)
        if lse_BSN1.shape != (*out_BSNH.shape[:-1], 1):
            raise RuntimeError(
                f"ring attention needs a log-sum-exp of shape {tuple(out_BSNH.shape[:-1])}, with or without a trailing "
                f"1, and its attention op returned {tuple(lse.shape)}; use another attention backend"
            )
        return out_BSNH, lse_BSN1 if has_trailing_dim else lse_BSN1.squeeze(-1)

    return normalised


def _make_exchange_apply(exchange: Any) -> Callable[..., Any]:
    """The all-to-all's apply, which takes [B, S, N, H] only; the LSE [B, S, N] gets a trailing dim, which the caller
    takes off again."""
    original = exchange.apply

    def apply(group: Any, tensor: Tensor, *args: Any) -> Tensor:
        return original(group, tensor.unsqueeze(-1) if tensor.ndim == 3 else tensor, *args)

    return apply
