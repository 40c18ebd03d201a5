"""How keys and values travel between ranks: by groups of heads, and in 8 bits where links are slow. Heads are computed
one by one, so the sums are those of one group; a kernel that is chosen by the number of heads may round others. In 8
bits a rank's own rows stay exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ...families.token_plan import Place
from .collectives import Exchange, decode, encode

Pair = tuple[torch.Tensor, torch.Tensor]  # keys, values
Rows = Any  # of tokens.py, which imports this

_NUM_GROUPS = 4  # the transfer of the first one is not hidden
_BLOCK = 12 * 5120 + 2 * 14040  # width and rows of Wan 14B, as in groups_for
# Of a block's time, from where four groups gain. They take 4 to 8 %, as kernels of fewer heads leave more of a card
# idle at their end, and hide about half of the transfer (measured on two H200).
_LEAST_SHARE = 0.15
# A card computes a block for so long at least, or the host launches too much for groups: each takes it about 1 ms for
# two H200, on hosts of 32 cores.
_LONG_S = 8e-3


def groups_for(flops_per_s: float, bytes_per_s: float, exchange: Exchange = "full", block_s: float = math.inf) -> int:
    """In how many groups of heads keys and values are to travel. A row sends 2 * bytes * width, and takes a block
    24 * width**2 + 4 * rows * width operations; Wan stands for all. Args: block_s: seconds that a card computes of a
    block whose kernels the host launches, else nothing."""
    num_bytes = 1 if exchange == "8-bit" else 2
    share = flops_per_s / bytes_per_s * num_bytes / _BLOCK
    return _NUM_GROUPS if share > _LEAST_SHARE and block_s >= _LONG_S else 1


class Heads(NamedTuple):
    """The heads of an attention. Args: dim: along which they follow one another: 1 of [batch, heads, tokens, width]; 2
    of [batch, tokens, heads, width], and of the same with heads and width in one. output_dim: of the result."""

    number: int  # of queries, keys and values alike
    dim: int
    output_dim: int


_ATTENTION = ("heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")  # of ComfyUI, behind the values


def find_heads(tensors: Sequence[torch.Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Heads | None:
    """Where an attention that is called as ComfyUI's are has its heads; None where that is not clear. Args: tensors:
    queries, keys, values. args, kwargs: what it is called with behind these."""
    given = {**dict(zip(_ATTENTION, args, strict=False)), **kwargs}
    if len(args) > len(_ATTENTION) or type(number := given.get("heads")) is not int or given.get("enable_gqa"):
        return None
    of_input, of_output = (1 if given.get(name) else 2 for name in _ATTENTION[3:])
    found = Heads(number, of_input, of_output)
    of_queries, of_keys, _ = (each.shape[found.dim] if each.ndim > 2 else 0 for each in tensors)
    is_flat = [each.ndim == 3 and found.dim == 2 and each.shape[2] % found.number == 0 for each in tensors]
    is_apart = [each.ndim == 4 and each.shape[found.dim] == found.number for each in tensors]
    fits = of_queries == of_keys and all(map(any, zip(is_flat, is_apart, strict=True)))
    return found if fits else None


class Gathered:
    """Keys and values of all ranks for one attention, by groups of heads: this rank's are sent as it is made, all
    groups at once. A group is let go when it was attended to. What needs gradients is gathered as a whole and as it is.
    Args: axis: of the keys. own: this rank's. heads: None if unknown, which makes one group. most: groups at most."""

    def __init__(self, rows: Rows, name: str, axis: str, own: Pair, heads: Heads | None, most: int) -> None:
        (keys, values), self._heads = own, heads
        self._has_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in own)
        most = 1 if heads is None or self._has_gradients else most
        self.num = max(num for num in range(1, most + 1) if heads is None or heads.number % num == 0)
        self._arriving: Iterable[Pair]
        of_keys = Place((), axis, keys.ndim - 2)
        of_values = Place((), axis, values.ndim - 2 if values.ndim == keys.ndim else 1)
        if self._has_gradients:
            gathered = rows.gather(keys, of_keys, f"keys of {name}")
            self._arriving = [(gathered, rows.gather(values, of_values, f"values of {name}"))]
            return
        sent: Sequence[torch.Tensor] = own
        if rows.group.exchange == "8-bit":
            width = [each.shape[2] // heads.number if heads and each.ndim == 3 else None for each in own]
            sent, name = [*encode(keys, width[0], of_keys.dim), *encode(values, width[1])], f"{name} in 8 bits"
        name = f"keys and values of {name}, one of {self.num}"
        # A tensor's groups of heads, each contiguous, by one copy at most.
        dim = 0 if heads is None else heads.dim

        def groups_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
            if self.num == 1:  # each call of torch takes the host some microseconds, twice a block
                return (tensor.contiguous(),)
            return tensor.unflatten(dim, (self.num, -1)).movedim(dim, 0).contiguous().unbind(0)

        for message in zip(*map(groups_of, sent), strict=True):
            rows.group.post(rows.rank, name, message, as_one=len(message) > 2)
        owns = [own] if self.num == 1 else list(zip(*(each.chunk(self.num, dim) for each in own), strict=True))
        self._arriving = self._take(rows, name, owns, (of_keys, of_values))

    @staticmethod
    def _take(rows: Rows, name: str, owns: Sequence[Pair], places: tuple[Place, Place]) -> Iterator[Pair]:
        """All rows of the groups, one after the other; this rank's are exact."""
        for own in owns:
            pairs = []
            for found in rows.group.take(rows.rank, name, own):
                if len(found) > 2:
                    keys, values = (each.dtype for each in own)
                    found = decode(found[0], found[1], found[2], keys), decode(found[3], found[4], None, values)
                pairs.append(found)
            keys_of_ranks, values_of_ranks = map(list, zip(*pairs, strict=True))
            del pairs, found
            # What was joined is let go: these parts before the values are joined, and the rest while it is attended to.
            joined = [rows.join(keys_of_ranks, places[0])]
            keys_of_ranks.clear()
            joined.append(rows.join(values_of_ranks, places[1]))
            del values_of_ranks
            yield joined.pop(0), joined.pop()

    def attend(
        self,
        func: Callable[..., torch.Tensor],
        q: torch.Tensor,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_keys: Callable[[torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """What func(q, keys, values, *args, **kwargs) returns, computed by each group of heads when it has come. Args:
        on_keys: is called with the keys of all heads."""
        heads, arriving, self._arriving = self._heads, self._arriving, ()  # which hold keys
        if on_keys is not None:
            arriving = list(arriving)
            keys = [each for each, _ in arriving]
            on_keys(torch.cat(keys, heads.dim) if heads is not None else keys[0])
        if not q.shape[-2]:  # kernels refuse no queries
            pairs = list(arriving)
            # Other ranks wait for this one's gradients of the keys.
            nothing = sum(each.sum() for each in pairs[0]) if self._has_gradients else 0
            return q.new_zeros(*q.shape[:1], 0, q.shape[-1] * (q.shape[1] if q.ndim == 4 else 1)) + nothing
        if heads is None or self.num == 1:
            (pair,) = arriving
            return func(q, *pair, *args, **kwargs)
        outputs, arriving = [], iter(arriving)
        for index, queries in enumerate(q.chunk(self.num, heads.dim)):
            pair = next(arriving)

            def part(value: Any, index: int = index) -> Any:
                """The group's part of a mask that has one for each head."""
                is_mask = isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] > 1
                return value.chunk(self.num, 1)[index] if is_mask else value

            rest, named = [part(value) for value in args], {name: part(value) for name, value in kwargs.items()}
            if rest:
                rest[0] = heads.number // self.num
            else:
                named["heads"] = heads.number // self.num
            outputs.append(func(queries, *pair, *rest, **named))
            del pair  # while the next one comes
        return torch.cat(outputs, heads.output_dim)
