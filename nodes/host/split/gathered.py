"""Other people's code inside a block that all cards compute together: it is given all heads, once, at home.

A patch of the attention, or a function that replaces it, may mix heads, keep what it saw, or hold tensors of the main
card. So every card sends its heads home, the code runs there as on one card, and every card gets back the part of its
own heads. That is slow, and right whatever the code does with them. How a class calls its patches is data (PatchCall).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ....families.tensor_plan import PatchCall, Shares, Unit
from ....parallel.local.slices import Slice
from ....parallel.local.tensor_parallel import TensorParallel
from ....parallel.transfer import Versioned, with_version

_ATTENTION = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")


class Gathered:
    """Makes stand-ins for other people's functions; outside of blocks they call the function as it is.

    Args:
        bridge: of the model. shares: home's part of each block -> how its heads are shared out.
        calls: names of patches inside blocks -> how the class calls them.
    """

    def __init__(
        self, bridge: TensorParallel, shares: Mapping[nn.Module, Shares], calls: Mapping[str, PatchCall]
    ) -> None:
        self._bridge, self._shares, self.calls = bridge, shares, calls

    def patch(self, name: str, patch: Callable[..., Any]) -> Callable[..., Any]:
        """A patch of one of these names."""
        call = self.calls[name]

        def run(*args: Any, **kwargs: Any) -> Any:
            shares = self._shares_here()
            if shares is None:
                return patch(*args, **kwargs)
            given = args[0] if call.is_dict else dict(zip(call.tensors, args, strict=False))
            brought = {key: given[key] for key, dim in call.tensors.items() if dim is not None}

            def compute(everyone: list[dict[str, torch.Tensor]]) -> list[Any]:
                whole = {
                    key: given[key] if dim is None else _joined([each[key] for each in everyone], dim)
                    for key, dim in call.tensors.items()
                }
                output = _call(patch, call, whole, shares, args, kwargs)
                self._bridge.compare_again()
                return _parts_of_output(name, call, output, whole, _beside(call, output, kwargs), shares)

            return self._bridge.at_home(f"the patch {name}", brought, compute)

        return run

    def attention(self, override: Callable[..., Any]) -> Callable[..., Any]:
        """A function that replaces ComfyUI's attention: override(attention, q, k, v, heads, ...)."""

        def run(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            shares = self._shares_here()
            if shares is None:
                return override(attention, *args, **kwargs)
            given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
            brought = tuple(given[key] for key in _ATTENTION[:4])

            def compute(everyone: list[tuple[Any, ...]]) -> list[torch.Tensor]:
                counts = tuple(each[3] for each in everyone)
                total, is_divided = sum(shares.heads), counts == shares.heads
                if not is_divided and set(counts) != {total}:
                    raise RuntimeError(
                        f"an attention override of another node met an attention of {counts} heads in a block whose "
                        f"{total} heads are shared out as {shares.heads}; use way 'blocks' in the split node"
                    )
                dim = (
                    1 if given.get("skip_reshape") else 2
                )  # else [batch, tokens, heads, features] or the last two as one
                with Versioned():
                    joined = [_joined([each[i] for each in everyone], dim if is_divided else None) for i in range(3)]
                    tensors = [with_version(each) for each in joined]
                before = _versions(tensors)
                whole = {**given, **dict(zip(_ATTENTION, (*tensors, total), strict=False))}
                by_place = [whole[key] for key in _ATTENTION[: len(args)]]
                output = override(attention, *by_place, **{key: whole[key] for key in kwargs})
                if _versions(tensors) != before:
                    raise RuntimeError(
                        "an attention override of another node writes into its queries, keys or values, of which each "
                        "card of this split has some heads; use way 'blocks' in the split node, or take that node out"
                    )
                self._bridge.compare_again()
                along = (1 if given.get("skip_output_reshape") else 2) if is_divided else None
                return _cut("an attention override", output, along, shares)

            return self._bridge.at_home("an attention override", brought, compute)

        return run

    def _shares_here(self) -> Shares | None:
        block = self._bridge.current_block
        return None if block is None else self._shares[block]


def _joined(parts: Sequence[torch.Tensor], dim: int | None) -> torch.Tensor:
    """What all cards have of one tensor; dim None: each has all of it."""
    return parts[0] if dim is None else torch.cat(list(parts), dim)


def _call(
    patch: Callable[..., Any],
    call: PatchCall,
    whole: Mapping[str, torch.Tensor],
    shares: Shares,
    args: Any,
    kwargs: Any,
) -> Any:
    """The patch with all heads and their number, and otherwise what home's block hands it."""
    for name in call.options:  # in the block's own dict, which patches may hand each other things in
        kwargs["extra_options"][name] = sum(shares.heads)
    if call.is_dict:
        return patch({**args[0], **whole}, *args[1:], **kwargs)
    return patch(*whole.values(), *args[len(whole) :], **kwargs)


def _beside(call: PatchCall, output: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What it was handed by name and may have changed in place, or what it returned instead."""
    return {key: output.get(key, kwargs.get(key)) for key in call.beside}


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [each._version for each in tensors]


def _parts_of_output(
    name: str,
    call: PatchCall,
    output: Any,
    whole: Mapping[str, torch.Tensor],
    beside: Mapping[str, Any],
    shares: Shares,
) -> list[Any]:
    """What each card's block is to be given back."""
    what = f"the patch {name!r}"
    if call.returns:
        return _cut(what, output, call.tensors[call.returns], shares, call.unit(call.returns))
    # What it left out it may have changed in place; the cards have not seen that.
    tensors = {key: output.get(key, whole[key]) for key in call.tensors}
    cut = {key: _cut(what, tensor, call.tensors[key], shares, call.unit(key)) for key, tensor in tensors.items()}
    for key, value in beside.items():
        tells_heads = isinstance(value, torch.Tensor) and value.ndim > 3 and value.shape[call.beside[key]] != 1
        cut[key] = _cut(what, value, call.beside[key] if tells_heads else None, shares)
    found = [{key: parts[rank] for key, parts in cut.items()} for rank in range(shares.num_devices)]
    if call.is_dict:  # the next patch is called with what this one returned; home's call of it counts
        found[0] = {**output, **found[0]}
    return found


def _cut(what: str, whole: Any, dim: int | None, shares: Shares, unit: Unit = "heads") -> list[Any]:
    """Each card's part. Raises: RuntimeError if nobody can tell the heads apart."""
    if dim is None:
        return [whole] * shares.num_devices
    dim %= whole.ndim
    size, count = whole.shape[dim], sum(shares.heads if unit == "heads" else shares.kv_heads)
    if size % count:
        raise RuntimeError(
            f"{what} of another node returned a tensor of shape {tuple(whole.shape)}, in which the {count} heads of "
            "this block cannot be told apart; use way 'blocks' in the split node, or take that node out"
        )
    return [Slice(dim, (own,)).copied(whole) for own in shares.ranges(unit, size)]
