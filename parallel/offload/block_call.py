"""Calls of a block that its model makes with keywords, and whose result is no plain tuple, in the form of recompute.py:
block(*values) gives a tensor or a tuple of tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from ...patches.hooks import put_back, taken_out

Checkpoint = Callable[..., Any]  # (block, *values) -> what block(*values) gives


class BlockCall:
    """One call of a block, to be made any number of times with values that it does not hold: autograd holds the call
    until a whole backward has ended.

    Args:
        passed_by: names of keyword arguments that are no values, but the same objects in every call.
    """

    def __init__(self, module: nn.Module, kwargs: dict[str, Any], passed_by: Sequence[str]) -> None:
        self.module = module
        self._names = tuple(name for name in kwargs if name not in passed_by)
        self.others = {name: kwargs[name] for name in kwargs if name in passed_by}
        self._frame: Any = None  # of the output

    def values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What it is called with, of the model's own call."""
        return *args, *(kwargs[name] for name in self._names)

    def __call__(self, *values: Any) -> Any:
        cut = len(values) - len(self._names)
        named = dict(zip(self._names, values[cut:], strict=True))
        own: Any = getattr(self.module, "own_call", self.module)
        output = own(*values[:cut], **named, **self.others)
        tensors, self._frame = taken_out(output)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def whole(self, output: Any) -> Any:
        """The block's own form of what a call gave."""
        return put_back(self._frame, output if isinstance(output, tuple) else (output,))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()


def module_of(block: nn.Module | BlockCall) -> nn.Module:
    """The block that is called."""
    return block.module if isinstance(block, BlockCall) else block


def checkpoint_calls(modules: Iterable[nn.Module], checkpoint: Checkpoint, passed_by: Sequence[str]) -> None:
    """Have calls of these blocks, hooks included, go through checkpoint."""
    for module in modules:
        if "_checkpoint" not in module.__dict__:
            module.__class__ = _intercepted(type(module))  # type: ignore[arg-type]
        module.__dict__["_checkpoint"] = (checkpoint, tuple(passed_by))


@functools.cache
def _intercepted(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass, since Python looks __call__ up in the class."""

    class Intercepted(cls):  # type: ignore[valid-type,misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            checkpoint, passed_by = self.__dict__["_checkpoint"]
            call = BlockCall(self, kwargs, passed_by)
            return call.whole(checkpoint(call, *call.values(args, kwargs)))

        def own_call(self, *args: Any, **kwargs: Any) -> Any:
            """With all hooks, also one around it that was there before."""
            return super().__call__(*args, **kwargs)

    Intercepted.__name__, Intercepted.__qualname__ = cls.__name__, cls.__qualname__
    Intercepted.__module__ = cls.__module__
    return Intercepted
