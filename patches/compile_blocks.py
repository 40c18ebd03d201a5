"""Regional compilation: every kind of transformer block is compiled once and reused for all blocks of its kind.

Only a block's forward is compiled, never the call around it. So hooks that move activations, gradient checkpointing and
LoRA bookkeeping stay Python and cause no graph break. Weights enter the graphs as inputs, so blocks alike share one.
Torch compiles anew per device, per input shape, and once more for the first block, whose input needs no gradient.

A job of one shape is compiled for it alone. Where there are several, or nobody can tell, numbers of tokens are unknowns
of the graphs, which then serve every bucket and caption. A batch of one and larger batches have graphs of their own,
and sizes that happen to be equal when a graph is made may cost another one. That number is torch's limit, so that a
model which compiles anew for every shape ends with an error instead of spending its time on it.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ..families.spec import ModelFamily
from ..quantization.eight_bit_kernels import fault
from .out_of_place_graph import OutOfPlace

_log = logging.getLogger(__name__)

# Of one kind of block, device and shape, with some to spare: recomputed blocks run without gradients and once more with
# them, kept ones with them, all in evaluation without; the first block's input needs no gradient, the others' do.
_GRAPHS_PER_SHAPE = 8
# What unknown sizes may cost, counted as shapes: a batch of one and larger ones, each once more for sizes that were
# equal in the first shape that came.
_SHAPES_IF_UNKNOWN = 4
_MOST_GRAPHS = 256  # per class; torch keeps no more (accumulated_recompile_limit)


Forward = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Watch = Callable[[nn.Module, Forward, Forward, Arguments], None]


class Compiler:
    """torch.compile with options that all blocks share, since graphs are of one backend."""

    def __init__(self, backend: str | Callable[..., Any], **options: Any) -> None:
        self._backend, self._options = backend, options
        self._out_of_place = {keeps: OutOfPlace(backend, keeps_arguments=keeps) for keeps in (False, True)}

    def __call__(self, forward: Forward) -> Forward:
        return torch.compile(forward, backend=self._backend, **self._options)

    def out_of_place(self, forward: Forward, *, keeps_arguments: bool) -> Forward:
        """Of one that writes into tensors; see OutOfPlace."""
        return torch.compile(forward, backend=self._out_of_place[keeps_arguments], **self._options)


@runtime_checkable
class Around(Protocol):
    """Stands in the place of a block's forward and calls it."""

    def compiled(self, compiler: Compiler) -> Forward:
        """The same around the forward inside, compiled."""
        ...


class CompiledBlocks:
    """Handle of apply_compile."""

    def __init__(self, settings: ExitStack) -> None:
        self._own: dict[nn.Module, Forward] = {}
        self._settings = settings
        self._graphs_before = _count_graphs()

    def compile(self, block: nn.Module, compiler: Compiler) -> None:
        """What stands in the place of a block's forward stays there, around what is compiled."""
        own = block.forward
        block.forward = own.compiled(compiler) if isinstance(own, Around) else compiler(own)
        self._own[block] = own

    @property
    def num_graphs(self) -> int:
        """That this process has compiled since, of all kinds and devices."""
        return _count_graphs() - self._graphs_before

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[None]:
        """Inside, every call of a block is preceded by watch(block, its compiled forward, its own, (args, kwargs))."""

        def preceded(block: nn.Module, compiled: Forward) -> Forward:
            own = self._own[block]

            def forward(*args: Any, **kwargs: Any) -> Any:
                watch(block, compiled, own, (args, kwargs))
                return compiled(*args, **kwargs)

            return forward

        with self._replaced(preceded):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, blocks compute by their own forwards: shapes that come now make no graphs."""
        with self._replaced(lambda block, compiled: self._own[block]):
            yield

    @contextmanager
    def _replaced(self, other: Callable[[nn.Module, Forward], Forward]) -> Iterator[None]:
        compiled = {block: block.forward for block in self._own}
        for block, forward in compiled.items():
            block.forward = other(block, forward)
        try:
            yield
        finally:
            for block, forward in compiled.items():
                block.forward = forward

    def remove(self) -> None:
        """Give every block its own forward back; a second call is a no-op."""
        if self._own:
            _log.info("%d graphs were compiled", self.num_graphs)
        for block, own in self._own.items():
            if isinstance(own, Around):
                block.forward = own
            else:
                del block.__dict__["forward"]
        self._own = {}
        self._settings.close()


def remove_compiled(handles: Sequence[CompiledBlocks]) -> None:
    """Remove a run's, given as they were made: each holds settings of the process, so the last one goes first."""
    for handle in reversed(handles):
        handle.remove()


def _count_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compile_fault(devices: Sequence[torch.device]) -> str:
    """Why torch.compile cannot work on these devices; "" if nothing speaks against it."""
    for device in devices:
        if device.type == "cuda" and fault(device):
            return fault(device)
        if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
            return "no C++ compiler was found"
        if device.type not in ("cuda", "cpu"):
            return f"nothing is known of compiling for {device.type}"
    return "" if importlib.util.find_spec("torch._inductor") else "this build of torch has no compiler"


def apply_compile(
    model: nn.Module, family: ModelFamily, max_graphs: int = 64, *, is_dynamic: bool = False, **options: Any
) -> CompiledBlocks:
    """Compile the forward of every block of a model, in place; the work is done at the first calls.

    Before torch 2.13 the limit of graphs is one of the process: it is raised until remove().

    Args:
        max_graphs: that torch may keep per class of block; beyond it a call raises. Torch's own 8 are soon spent.
        is_dynamic: compile for any number of tokens instead of those that come.
        options: of torch.compile.
    """
    blocks = _called_blocks(model, family)
    settings = ExitStack()
    handle = CompiledBlocks(settings)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options = {"recompile_limit": max_graphs, **options}
    else:
        settings.enter_context(torch._dynamo.config.patch(recompile_limit=max_graphs))
    compiler = Compiler(**{"backend": "inductor", "fullgraph": True, "dynamic": is_dynamic, **options})
    try:
        for block in blocks:
            handle.compile(block, compiler)
    except BaseException:
        handle.remove()
        raise
    return handle


def _called_blocks(model: nn.Module, family: ModelFamily) -> list[nn.Module]:
    """The blocks, or of ComfyUI's own classes what they are called by: of UNets the blocks' parts. Torch traces none of
    its own modules alone."""
    lists = [model.get_submodule(each.name) for each in family.block_lists]
    if family.native is None:
        return [block for each in lists for block in each.children()]
    found = [part for each in lists for part in each.modules() if isinstance(part.__dict__.get("forward"), Around)]
    return [part for part in found if _is_of_others(type(part))]


def _is_of_others(cls: type) -> bool:
    """Whether torch has not made a class, or only added to it, as FSDP does."""
    return any(not each.__module__.startswith("torch.") for each in cls.__mro__ if each is not object)


def _num_kinds(blocks: Sequence[nn.Module], family: ModelFamily) -> int:
    """How many blocks of one class, which share torch's limit of graphs, need graphs of their own, at most: those whose
    weights have other shapes, and of UNets those that look where they are."""
    asks = family.native is not None and family.native.hooks_children
    kinds = {(type(each), each if asks and _sees_options(each) else _shapes(each)) for each in blocks}
    return max(Counter(cls for cls, _ in kinds).values(), default=1)


def _sees_options(block: nn.Module) -> bool:
    return "transformer_options" in inspect.signature(type(block).forward).parameters


def _shapes(block: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(each.shape for each in block.parameters())


def compile_if_possible(
    model: nn.Module, family: ModelFamily, devices: Sequence[torch.device], num_shapes: int
) -> CompiledBlocks | None:
    """apply_compile, or None and one line in the log that says why not.

    Args:
        num_shapes: different shapes of batches to come; 0 if nobody can tell.
    """
    is_dynamic = num_shapes != 1
    num_kinds = _num_kinds(_called_blocks(model, family), family)
    max_graphs = _GRAPHS_PER_SHAPE * num_kinds * len(devices) * (_SHAPES_IF_UNKNOWN if is_dynamic else 1)
    reason = compile_fault(devices) or _count_fault(max_graphs, len(devices), num_kinds)
    if reason:
        _log.warning("blocks are not compiled: %s", reason)
        return None
    sizes = "any number of tokens" if is_dynamic else "one shape of batches"
    _log.info("blocks are compiled for %s, at most %d graphs per class", sizes, max_graphs)
    try:
        return apply_compile(model, family, max_graphs, is_dynamic=is_dynamic)
    except RuntimeError as error:  # a Python or a machine that torch.compile does not know
        _log.warning("blocks are not compiled: %s", error)
        return None


def _count_fault(max_graphs: int, num_devices: int, num_kinds: int) -> str:
    if max_graphs <= _MOST_GRAPHS:
        return ""
    of_kinds = f" with {num_kinds} kinds of block of one class" if num_kinds > 1 else ""
    return (
        f"{num_devices} devices{of_kinds} may need {max_graphs} graphs per class of block, torch keeps {_MOST_GRAPHS}"
    )
