"""Blocks that are computed again for the backward, instead of keeping their activations (gradient checkpointing).
torch.utils.checkpoint has Python hooks on every saved tensor, and sets the CPU's generator, which all threads share.
Here a block is one autograd node. Only tensors among the positional arguments get gradients, at any depth."""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from ...patches.hooks import map_tensors, surrounded, tensors_reached
from ..devices import CPU, random_state, set_random_state
from ..local.workers import autocast_of
from ..transfer import version_of
from .activations import ActivationOffload

_local = threading.local()  # is_recomputing, of a thread that is
_PLACE = torch.empty(0)  # stands where a tensor was


def recompute(
    block: nn.Module | BlockCall, args: tuple[Any, ...], device: torch.device, store: ActivationOffload | None = None
) -> Any:
    """What block(*args) returns, its activations not kept; args are on the block's device, or in a store. Raises:
    TypeError if the block returns something else than a tensor or a tuple of tensors; RuntimeError under autocast,
    without which the second forward would compute in other types."""
    if not torch.is_grad_enabled():
        return block(*args)
    if autocast_of(device.type) is not None:
        raise RuntimeError("autocast is on, and blocks that are computed again are trained without it")
    tensors, frame = taken_out(args)
    anchor = None
    if not any(tensor.requires_grad for tensor in tensors):
        if not any(parameter.requires_grad for parameter in block.parameters()):
            return block(*args)
        anchor = torch.empty(0, device=device, requires_grad=True)  # else autograd would see nothing to do
    return _Recomputed.apply(anchor, block, device, frame, store, *tensors)


def is_recomputing() -> bool:
    """Whether this thread is inside a block's second forward, whose backward follows at once."""
    return getattr(_local, "is_recomputing", False)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        block: nn.Module | BlockCall,
        device: torch.device,
        frame: Any,
        store: ActivationOffload | None,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.block, ctx.frame, ctx.device = block, frame, device
        ctx.set_materialize_grads(False)
        before, versions = random_state(device), [version_of(tensor) for tensor in tensors]
        output = block(*put_back(frame, tensors))
        if versions != [version_of(tensor) for tensor in tensors]:
            raise RuntimeError(
                f"{type(module_of(block)).__name__} changes what it is called with in place, so it cannot be computed "
                "again; switch gradient checkpointing off for this model"
            )
        ctx.needs_grad = [tensor.requires_grad for tensor in tensors]
        ctx.handle, others = (None, tensors) if store is None else store.keep(tensors, device)
        ctx.save_for_backward(*others)
        after = random_state(device)
        has_drawn = before is not None and after is not None and not torch.equal(before, after)
        ctx.random = before if has_drawn else None
        if not all(isinstance(part, torch.Tensor) for part in (output if isinstance(output, tuple) else (output,))):
            raise TypeError(
                f"{type(module_of(block)).__name__} returns {type(output).__name__} with something else than tensors; "
                "gradient checkpointing needs a tensor or a tuple of tensors. Switch it off for this model"
            )
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors if ctx.handle is None else ctx.handle.fetch(ctx.saved_tensors)
        inputs = [tensor.detach().requires_grad_(flag) for tensor, flag in zip(saved, ctx.needs_grad, strict=True)]
        now = None if ctx.random is None else random_state(ctx.device)
        if ctx.random is not None:
            set_random_state(ctx.device, ctx.random)
        _local.is_recomputing = True
        try:
            with torch.enable_grad():
                output = ctx.block(*put_back(ctx.frame, inputs))
                outputs = output if isinstance(output, tuple) else (output,)
                pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
                seed = HandOut.apply([g for _, g in pairs], *(o for o, _ in pairs)) if pairs else None
        finally:
            _local.is_recomputing = False
            if now is not None:
                set_random_state(ctx.device, now)
        del output, outputs, pairs  # nobody needs what the block returns
        if seed is not None:
            torch.autograd.backward([seed], [seed.detach()])  # any value: nobody reads it
        return (None, None, None, None, None, *(tensor.grad for tensor in inputs))


class HandOut(torch.autograd.Function):
    """A scalar whose backward hands out these gradients of a block's outputs, and empties their list."""

    @staticmethod
    def forward(ctx: Any, grads: list[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.grads = grads
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        handed = tuple(ctx.grads)
        ctx.grads.clear()
        return None, *handed


def taken_out(value: Any, passed_by: Sequence[str] = ()) -> tuple[list[torch.Tensor], Any]:
    """Every tensor in value, in order, and value without them."""
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor)
        return _PLACE

    return tensors, map_tensors(value, take, passed_by)


def put_back(frame: Any, tensors: Iterable[torch.Tensor], passed_by: Sequence[str] = ()) -> Any:
    """The inverse of taken_out."""
    remaining = iter(tensors)
    return map_tensors(frame, lambda place: next(remaining), passed_by)


_CHECKPOINT = "_checkpoint"  # where a module has what its calls go through
Checkpoint = Callable[..., Any]  # (block, *values) -> what block(*values) gives


class BlockCall:
    """One call of a block, to be made any number of times with values that it does not hold: autograd holds the call
    until a whole backward has ended. Keyword arguments in passed_by are no values, but the same objects in every call.
    """

    def __init__(
        self, module: nn.Module, kwargs: dict[str, Any], passed_by: Sequence[str], own: Callable[..., Any] | None = None
    ) -> None:
        self.module, self._own = module, own or module
        self._names = tuple(name for name in kwargs if name not in passed_by)
        self.others = {name: kwargs[name] for name in kwargs if name in passed_by}
        self._frame: Any = None  # of the output

    def values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """What it is called with, of the model's own call."""
        return *args, *(kwargs[name] for name in self._names)

    def __call__(self, *values: Any) -> Any:
        cut = len(values) - len(self._names)
        named = dict(zip(self._names, values[cut:], strict=True))
        output = self._own(*values[:cut], **named, **self.others)
        tensors, self._frame = taken_out(output)
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    def whole(self, output: Any) -> Any:
        """The block's own form of what a call gave."""
        return put_back(self._frame, output if isinstance(output, tuple) else (output,))

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.module.parameters()


def module_of(block: nn.Module | BlockCall) -> nn.Module:
    return block.module if isinstance(block, BlockCall) else block


def checkpoint_calls(modules: Iterable[nn.Module], checkpoint: Checkpoint, passed_by: Sequence[str]) -> None:
    """Have calls of these blocks go through checkpoint, with all hooks that they have."""

    def around(own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = BlockCall(own.__self__, kwargs, passed_by, own)
        return call.whole(checkpoint(call, *call.values(args, kwargs)))

    for module in modules:
        if _CHECKPOINT not in module.__dict__:
            module.__class__ = surrounded(type(module), _CHECKPOINT)  # type: ignore[arg-type]
        module.__dict__[_CHECKPOINT] = around


# ---- blocks that write in place (x += ...) where autograd has saved the old values: gradients made right, or refused.
# Each block is watched once per way of being called, for one forward more. From then on it gets copies of the arguments
# that it writes into, and of what autograd saves those tensors are copied that are written to later.

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

    def compiled(self, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> InPlaceGuard:
        """This guard around a forward compiled with OutOfPlace, whose graphs write into nothing that they saved."""
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
