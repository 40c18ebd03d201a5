"""Blocks that write in place (x += ...) where autograd has saved the old values: gradients made right, or refused. Each
block is watched once per way of being called, for one forward more. From then on it gets copies of the arguments that
it writes into, and of what autograd saves those tensors are copied that are written to later."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...patches.compile_blocks import Compiler
from ...patches.hooks import tensors_reached
from ..devices import CPU, random_state, set_random_state
from ..transfer import version_of
from .recompute import put_back

_Kind = tuple[torch.dtype, int]  # of a saved tensor: type and number of dimensions


class Writes(NamedTuple):
    """What one block writes into when it is called in one way."""

    arguments: frozenset[int]  # which of the tensors it is called with, by number, it needs copies of
    saved: tuple[tuple[_Kind, bool], ...]  # of each that autograd saves: its kind, and whether it is written to later


class InPlaceGuard:
    """Takes the place of a block's forward. Args: passed_by: names of arguments and dict keys that are handed on as
    they are. has_out: whether the block names a tensor that an operation writes into (out=), which autograd refuses:
    the result is copied into it."""

    def __init__(self, block: nn.Module, passed_by: Sequence[str] = (), *, has_out: bool = False) -> None:
        self.block, self.passed_by, self.has_out = block, tuple(passed_by), has_out
        self.known: dict[Any, Writes] = {}
        self._compiled: Callable[..., Any] | None = None

    def compiled(self, compiler: Compiler) -> InPlaceGuard:
        """This guard around a forward compiled with OutOfPlace, whose graphs write into nothing that they have saved:
        nothing is copied of that."""
        made = InPlaceGuard(self.block, self.passed_by, has_out=self.has_out)
        made.known = self.known
        # What a graph returns has been compared before every run.
        made._compiled = compiler(self._forward_of(is_written=False))
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_reached((args, kwargs), self.passed_by)
        is_none = tuple([each is None for each in (*args, *kwargs.values())])
        numbers = tuple([each for each in args if type(each) is int])  # a block's own, where one module serves all
        forms = tuple([(t.requires_grad, t.ndim, t.dtype) for t in tensors])
        key = (len(args), numbers, tuple(kwargs), is_none, forms)
        writes = self.known.get(key)
        if writes is None:
            writes = self.known[key] = self._learn(tensors, args, kwargs)
        before = [version_of(tensor) for tensor in tensors]
        if writes.arguments:
            given = [each.clone() if index in writes.arguments else each for index, each in enumerate(tensors)]
            args, kwargs = put_back((args, kwargs), given, self.passed_by)
        if self._compiled is not None:
            output = self._compiled(*args, **kwargs)
        else:
            needs_copies = torch.is_grad_enabled() and any(is_written for _, is_written in writes.saved)
            with _copies(writes, type(self.block).__name__) if needs_copies else nullcontext():
                output = self._forward_of(is_written=True)(*args, **kwargs)
        if before != [version_of(tensor) for tensor in tensors]:
            raise RuntimeError(
                f"{type(self.block).__name__} changed an argument in place that it did not change before, so its "
                "gradients cannot be trusted; this model cannot be trained here"
            )
        return output

    def _forward_of(self, *, is_written: bool) -> Callable[..., Any]:
        """The block's own. is_written: whether what it names by out= gets the result."""
        own = types.MethodType(type(self.block).forward, self.block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _WithoutOut(is_written=is_written):
                return own(*args, **kwargs)

        return forward if self.has_out else own

    def _learn(self, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Writes:
        """What one forward writes into."""
        saved: list[tuple[Tensor, int]] = []

        def note(tensor: Tensor) -> Tensor:
            same = tensor.detach()
            saved.append((same, same._version))
            return same

        device = next((tensor.device for tensor in tensors), CPU)
        state = random_state(device)
        with torch.enable_grad(), contextlib.ExitStack() as at_end:
            if state is not None:
                at_end.callback(set_random_state, device, state)  # also where memory ends, or Cancel comes
            copies = [tensor.detach().requires_grad_(tensor.requires_grad).clone() for tensor in tensors]
            before = [copy._version for copy in copies]
            args, kwargs = put_back((args, kwargs), copies, self.passed_by)
            with saved_tensors_hooks(note, lambda tensor: tensor):
                self._forward_of(is_written=True)(*args, **kwargs)
        changed = frozenset(index for index, copy in enumerate(copies) if copy._version != before[index])
        return Writes(changed, tuple((_kind(tensor), tensor._version != version) for tensor, version in saved))


class _WithoutOut(TorchFunctionMode):
    """Inside, what an operation is to write into (out=) gets its result by a copy, which has a backward, or not."""

    def __init__(self, *, is_written: bool) -> None:
        super().__init__()
        self._is_written = is_written

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        out = given.pop("out", None)
        result = func(*args, **given)
        return out.copy_(result) if out is not None and self._is_written else result


@contextmanager
def _copies(writes: Writes, name: str) -> Iterator[None]:
    """Inside, of what autograd saves a copy is kept where it is written to later."""
    number = itertools.count()

    def pack(tensor: Tensor) -> Any:
        index = next(number)
        if isinstance(tensor, nn.Parameter):
            return tensor, None
        same = tensor.detach()
        is_known = index < len(writes.saved) and writes.saved[index][0] == _kind(tensor)
        if not is_known or writes.saved[index][1]:
            return same.clone(), None
        return same, same._version

    def unpack(packed: tuple[Tensor, int | None]) -> Tensor:
        tensor, version = packed
        if version is not None and tensor._version != version:
            raise RuntimeError(
                f"a tensor that the backward of {name} needs was changed in place after it was saved, which did not "
                "happen before; its gradients would be wrong, so this model cannot be trained here"
            )
        return tensor

    with saved_tensors_hooks(pack, unpack):
        yield


def _kind(tensor: Tensor) -> _Kind:
    return tensor.dtype, tensor.ndim
