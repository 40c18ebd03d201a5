"""Blocks that write in place where autograd has saved the old values: gradients made right, and refused where they are
not.

Inference code may write into what a block is called with, and into what an operation of the block was given before
(x += ...). Autograd raises an error then; where a block is computed again for its backward, torch's own checkpoint says
nothing, and the gradients are wrong. Here each block is watched once per way of being called: one or two forwards more,
whose graphs are dropped. From then on

- an argument that it writes into by x += y alone is one whose assignments make new tensors, which takes no
  copy. That was tried while watching: nothing was written, nobody read what was left behind, and the output
  had the same bits;
- of other arguments that it writes into it gets copies;
- of what autograd saves those tensors are copied that are written to later. The others keep their version: if it has
  changed at the backward, that is an error, not a gradient.

That callers use what a block returns, and not what it wrote into its arguments, is what makes copies right; the split
of ComfyUI's classes rests on it, too.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ...patches.compile_blocks import AUGMENTED, Compiler
from ...patches.hooks import map_tensors, tensors_reached
from ..devices import CPU, random_state, set_random_state
from ..transfer import version_of

_Kind = tuple[torch.dtype, int]  # of a saved tensor: type and number of dimensions


@dataclass(frozen=True)
class Writes:
    """What one block writes into when it is called in one way.

    Args:
        arguments: which of the tensors it is called with, by number, it needs copies of.
        renewed: which of them it is to make new tensors of instead.
        saved: of every tensor that autograd saves meanwhile, in order: its kind, and whether it is written to later.
    """

    arguments: frozenset[int]
    renewed: frozenset[int]
    saved: tuple[tuple[_Kind, bool], ...]

    @property
    def num_copied(self) -> int:
        """Saved tensors that are copied."""
        return sum(is_written for _, is_written in self.saved)


class InPlaceGuard:
    """Takes the place of a block's forward.

    Args:
        passed_by: names of arguments and dict keys that are handed on as they are.
        has_out: whether the block names a tensor that an operation writes into (out=), which autograd refuses: the
            result is copied into it.
    """

    def __init__(self, block: nn.Module, passed_by: Sequence[str] = (), *, has_out: bool = False) -> None:
        self.block, self.passed_by, self.has_out = block, tuple(passed_by), has_out
        self.known: dict[Any, Writes] = {}
        self._compiled: dict[bool, Callable[..., Any]] = {}  # by whether what is written reaches the arguments

    def compiled(self, compiler: Compiler) -> InPlaceGuard:
        """This guard around a compiled forward. A graph writes into nothing that it has saved, so nothing is copied of
        that."""
        made = InPlaceGuard(self.block, self.passed_by, has_out=self.has_out)
        made.known = self.known
        forward = self._forward_of(is_written=False)  # what a graph returns has been compared before every run
        made._compiled = {keeps: compiler.out_of_place(forward, keeps_arguments=keeps) for keeps in (False, True)}
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
        if self._compiled:
            # A graph in which nothing reaches an argument will do where all that is written into are made anew. Torch
            # refuses to trace what writes into a leaf of autograd, or into a view such as FSDP makes of all arguments:
            # those are copied.
            keeps = bool(writes.arguments)
            written = {index: tensors[index] for index in writes.arguments | writes.renewed}
            copies = {
                index: t.clone()
                for index, t in written.items()
                if keeps or (t.requires_grad and (t.is_leaf or t._is_view()))
            }
            args, kwargs = self._placed(args, kwargs, copies)
            output = self._compiled[keeps](*args, **kwargs)
        else:
            copies = {index: tensors[index].clone() for index in writes.arguments}
            needs_copies = torch.is_grad_enabled() and writes.num_copied
            with _copies(writes, type(self.block).__name__) if needs_copies else nullcontext():
                output = self._forward(args, kwargs, copies, {index: tensors[index] for index in writes.renewed})
        if before != [version_of(tensor) for tensor in tensors]:
            raise RuntimeError(
                f"{type(self.block).__name__} changed an argument in place that it did not change before, so its "
                "gradients cannot be trusted; this model cannot be trained here"
            )
        return output

    def _forward(self, args: Any, kwargs: Any, others: dict[int, Tensor], renewed: dict[int, Tensor]) -> Any:
        """Args: others, renewed: by number, tensors in the place of those among args and kwargs; what assignments to
        the latter make are new ones."""
        given = {index: out_of_place(tensor) for index, tensor in renewed.items()}
        if others or renewed:
            args, kwargs = self._placed(args, kwargs, {**others, **given})
        output = self._forward_of(is_written=True)(*args, **kwargs)
        return in_place(output, {id(given[index]): renewed[index] for index in given}) if renewed else output

    def _forward_of(self, *, is_written: bool) -> Callable[..., Any]:
        """The block's own. is_written: whether what it names by out= gets the result."""
        own = types.MethodType(type(self.block).forward, self.block)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _WithoutOut(is_written=is_written):
                return own(*args, **kwargs)

        return forward if self.has_out else own

    def _placed(self, args: Any, kwargs: Any, places: dict[int, Tensor]) -> tuple[Any, Any]:
        """The same arguments, with other tensors in some places, by number."""
        numbers, given = itertools.count(), (args, kwargs)
        return map_tensors(given, lambda own: places.get(next(numbers), own), self.passed_by) if places else given

    def _learn(self, tensors: Sequence[Tensor], args: Any, kwargs: Any) -> Writes:
        found, output = self._watched(tensors, args, kwargs, frozenset())
        if not found.arguments:
            return found
        renewing, same = self._watched(tensors, args, kwargs, found.arguments)
        if renewing.arguments:
            return found
        pairs = list(zip(output, same, strict=True))
        if all(a.shape == b.shape and (a.is_meta or torch.equal(a, b)) for a, b in pairs):  # bit for bit
            return renewing
        _, again = self._watched(tensors, args, kwargs, frozenset())  # some kernels give other bits each time

        def distance(a: Tensor, b: Tensor) -> float:
            return float((a.double() - b.double()).norm())

        triples = zip(same, again, output, strict=True)  # the latter two differ by rounding alone
        is_close = all(distance(a, c) <= 2 * distance(b, c) for a, b, c in triples)
        return renewing if is_close else found

    def _watched(
        self, tensors: Sequence[Tensor], args: Any, kwargs: Any, renewed: frozenset[int]
    ) -> tuple[Writes, list[Tensor]]:
        """What one forward writes into, and what it returns.

        Args:
            renewed: arguments to be made anew. They are among those written into if somebody saw the difference.
        """
        saved: list[tuple[Tensor, int]] = []

        def note(tensor: Tensor) -> Tensor:
            same = tensor.detach()
            saved.append((same, same._version))
            return same

        device = next((tensor.device for tensor in tensors), CPU)
        state = random_state(device)
        with torch.enable_grad(), LateReads() as reads, contextlib.ExitStack() as at_end:
            if state is not None:
                at_end.callback(set_random_state, device, state)  # also where memory ends, or Cancel comes
            copies = [tensor.detach().requires_grad_(tensor.requires_grad).clone() for tensor in tensors]
            before = [copy._version for copy in copies]
            others = {index: copy for index, copy in enumerate(copies) if index not in renewed}
            with saved_tensors_hooks(note, lambda tensor: tensor):
                output = self._forward(args, kwargs, others, {index: copies[index] for index in renewed})
            outputs = tensors_reached(output, self.passed_by)
            reads.look(outputs)
        changed = {index for index, copy in enumerate(copies) if copy._version != before[index]}
        written = tuple((_kind(tensor), tensor._version != version) for tensor, version in saved)
        found = Writes(frozenset(changed | renewed if reads.found else changed), renewed, written)
        return found, [tensor.detach() for tensor in outputs]


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


# ---- arguments that x += y leaves as they are: the sum is a new tensor there, which the name x stands for. That is the
# same as long as nobody looks at the old tensor, or at a view of it, afterwards.

_local = threading.local()  # reads: the LateReads of this thread, if any


def out_of_place(tensor: Tensor) -> Tensor:
    """A view of a tensor whose +=, -=, *= and /= make another such tensor. Operations on it give ordinary ones."""
    view = tensor.view_as(tensor)
    view.__class__ = _kind_like(getattr(type(tensor), "_is_like", type(tensor)))
    return view


def in_place(value: Any, given: dict[int, Tensor]) -> Any:
    """A block's output with ordinary tensors.

    Args:
        given: id of what out_of_place returned -> what it is a view of, which takes its place.
    """

    def ordinary(tensor: Tensor) -> Tensor:
        original = given.get(id(tensor))
        if original is None and (cls := getattr(type(tensor), "_is_like", None)) is not None:
            tensor.__class__ = cls
        return tensor if original is None else original

    return map_tensors(value, ordinary)


class LateReads(TorchDispatchMode):
    """While entered, notes whether an operation of this thread is given what an assignment to another name has left
    behind."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._left: dict[int, Tensor] = {}  # address of a storage -> a tensor in it, so that no other takes its place

    def __enter__(self) -> LateReads:
        self._before, _local.reads = getattr(_local, "reads", None), self
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _local.reads = self._before

    def leave(self, tensor: Tensor) -> None:
        """From now on nobody may read this."""
        self._left[_address(tensor)] = tensor

    def look(self, value: Any) -> None:
        """Note it if there is such a tensor in value."""
        self.found = self.found or any(_address(tensor) in self._left for tensor in tensors_reached(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left:
            self.look((args, kwargs))
        return func(*args, **(kwargs or {}))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@functools.cache
def _kind_like(cls: type[Tensor]) -> type[Tensor]:
    named = {f"__{augmented.__name__}__": operation for augmented, operation in AUGMENTED.items()}
    members = {name: _assignment(name, operation) for name, operation in named.items()}
    plain = {"__torch_function__": torch._C._disabled_torch_function_impl, "_is_like": cls}
    return type(f"OutOfPlace{cls.__name__}", (cls,), {**members, **plain})


def _assignment(name: str, operation: Callable[..., Tensor]) -> Callable[[Tensor, Any], Tensor]:
    """The method of an augmented assignment: the type stays, as does the shape."""

    def assign(tensor: Tensor, other: Any) -> Tensor:
        made = operation(tensor, other)
        if made.dtype is not tensor.dtype and torch.can_cast(made.dtype, tensor.dtype):
            made = made.to(tensor.dtype)
        if made.dtype is not tensor.dtype or made.shape != tensor.shape:
            return getattr(Tensor, name)(tensor, other)  # type: ignore[no-any-return]  # raises what it would raise
        made.__class__ = type(tensor)
        reads: LateReads | None = getattr(_local, "reads", None)
        if reads is not None:
            reads.leave(tensor)
        return made

    return assign
