"""Regional compilation: the forward of every kind of block is compiled once, without the call and the hooks around it.

A job of one shape is compiled for it alone. Where there are several, or nobody can tell, numbers of tokens are unknowns
of the graphs. How many graphs that may take is torch's limit: beyond it a job ends with an error.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import operator
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..families.spec import ModelFamily
from ..quantization.eight_bit_kernels import fault

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
Compiler = Callable[[Forward], Forward]
Watch = Callable[[nn.Module, Forward, Forward, Arguments], None]


class CompiledBlocks:
    """Handle of apply_compile."""

    def __init__(self, settings: ExitStack) -> None:
        self._own: dict[nn.Module, Forward] = {}
        self._settings = settings
        self._graphs_before = _count_graphs()

    def compile(self, block: nn.Module, compiler: Compiler, out_of_place: Compiler | None = None) -> None:
        """What stands in the place of a block's forward (InPlaceGuard) stays there, around what is compiled by the
        second of these, which all blocks share: graphs are of one backend."""
        own: Any = block.forward
        block.forward = own.compiled(out_of_place) if hasattr(own, "compiled") else compiler(own)
        self._own[block] = own

    @property
    def num_graphs(self) -> int:
        """That this process has compiled since, of all kinds and devices."""
        return _count_graphs() - self._graphs_before

    def watched(self, watch: Watch) -> AbstractContextManager[None]:
        """Inside, every call of a block is preceded by watch(block, its compiled forward, its own, (args, kwargs))."""

        def preceded(block: nn.Module, compiled: Forward) -> Forward:
            def forward(*args: Any, **kwargs: Any) -> Any:
                watch(block, compiled, self._own[block], (args, kwargs))
                return compiled(*args, **kwargs)

            return forward

        return self._replaced(preceded)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, blocks compute by their own forwards: shapes that come now make no graphs."""
        return self._replaced(lambda block, compiled: self._own[block])

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
            if hasattr(own, "compiled"):
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
    """Compile the forward of every block of a model, in place; the work is done at the first calls. max_graphs: of a
    class of block, before torch 2.13 a limit of the process until remove(). is_dynamic: for any number of tokens."""
    blocks = _called_blocks(model, family)
    settings = ExitStack()
    handle = CompiledBlocks(settings)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options = {"recompile_limit": max_graphs, **options}
    else:
        settings.enter_context(torch._dynamo.config.patch(recompile_limit=max_graphs))
    options = {"backend": "inductor", "fullgraph": True, "dynamic": is_dynamic, **options}
    compiler = partial(torch.compile, **options)
    out_of_place = partial(torch.compile, **options | {"backend": OutOfPlace(options["backend"])})
    try:
        for block in blocks:
            handle.compile(block, compiler, out_of_place)
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
    found = [part for each in lists for part in each.modules() if hasattr(part.__dict__.get("forward"), "compiled")]
    return [part for part in found if _is_of_others(type(part))]


def _is_of_others(cls: type) -> bool:
    return any(not each.__module__.startswith("torch.") for each in cls.__mro__ if each is not object)


def compile_if_possible(
    model: nn.Module, family: ModelFamily, devices: Sequence[torch.device], num_shapes: int
) -> CompiledBlocks | None:
    """apply_compile, or None and one line in the log that says why not. Args: num_shapes: different shapes of batches
    to come; 0 if nobody can tell."""
    is_dynamic = num_shapes != 1
    # How many blocks of one class, which share torch's limit of graphs, need graphs of their own, at most: those whose
    # weights have other shapes, and of UNets those that look where they are.
    is_unet = family.native is not None and family.native.hooks_children
    found: set[tuple[type, Any]] = set()
    for each in _called_blocks(model, family):
        looks = is_unet and "transformer_options" in inspect.signature(type(each).forward).parameters
        found.add((type(each), each if looks else tuple(weight.shape for weight in each.parameters())))
    num_kinds = max(Counter(cls for cls, _ in found).values(), default=1)
    max_graphs = _GRAPHS_PER_SHAPE * num_kinds * len(devices) * (_SHAPES_IF_UNKNOWN if is_dynamic else 1)
    reason = compile_fault(devices)
    if not reason and max_graphs > _MOST_GRAPHS:
        kinds = f" with {num_kinds} kinds of block of one class" if num_kinds > 1 else ""
        reason = f"{len(devices)} devices{kinds} may need {max_graphs} graphs per class, torch keeps {_MOST_GRAPHS}"
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


# ---- graphs in which x += y makes a new tensor

AUGMENTED: dict[Any, Any] = {  # what x += y and the like compute
    operator.iadd: torch.add,
    operator.isub: torch.sub,
    operator.imul: torch.mul,
    operator.itruediv: torch.true_divide,
}
_ROWS = "devicebridge_rows"  # in a node's meta: of which tensor it is some rows, and which
_METHODS: dict[Any, Any] = {f"{name}_": name for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv")}


class OutOfPlace:
    """A backend of torch.compile that has x += y, x.mul_(y) and the like make a new tensor, for another backend.

    Torch.compile traces through autograd, which refuses writes into what an operation was given. Here the assignment
    becomes an operation that makes a tensor, before autograd sees the graph, and what reads x afterwards reads that. It
    stays what it was where a view of x, or what x is a view of, is read afterwards. Rows x[a:b] are renewed together
    with x, unless another write to the same storage has to stay, such as x[0] = y or one by out=. The graph computes
    with a copy of an argument that it writes into, which is written into when the graph is done.
    """

    def __init__(self, backend: str | Callable[..., Any]) -> None:
        self._backend = backend

    def __call__(self, module: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        backend = torch._dynamo.lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        (end,) = module.graph.find_nodes(op="output")
        num_outputs = len(end.args[0])
        nodes = module.graph.nodes
        assigned = Counter(_storage(node.args[0]) for node in nodes if _operation(node) is not None and node.args)
        kept = {  # of which no rows are renewed: there are other writes, or nobody can tell
            storage
            for node in nodes
            if (storage := _storage(node)) is not None
            and (_value(node).is_inference() or _value(node)._version > assigned[storage])
        }
        # Have the graph return those arguments it writes into, too; one that has two names stays out.
        places = list(module.graph.find_nodes(op="placeholder"))
        targets, names = assigned.keys() - {None}, Counter(map(_storage, places))
        written = [at for at, each in enumerate(map(_storage, places)) if each in targets and names[each] == 1]
        end.args = ((*end.args[0], *(places[at] for at in written)),)
        while torn := _renew_all(copy.deepcopy(module.graph), kept):
            kept |= torn
        _renew_all(module.graph, kept)
        module.recompile()
        compiled = backend(module, inputs, **options)

        def write_behind(*inputs: Any) -> Any:
            """Run a graph that returns what arguments are to hold as well. It has copies: what it saves stays."""
            given = [each.clone() if index in written else each for index, each in enumerate(inputs)]
            outputs = compiled(*given)
            for index, value in zip(written, outputs[num_outputs:], strict=True):
                inputs[index].copy_(value)
            return outputs[:num_outputs]

        return write_behind if written else compiled


def _operation(node: Node) -> Any:
    """What makes a new tensor in the place of an assignment; None for other nodes."""
    return (AUGMENTED if node.op == "call_function" else _METHODS).get(node.target)


def _renew_all(graph: Graph, kept: set[int]) -> set[int]:
    """Have assignments make new tensors, in place, but not those to rows of storages in `kept`. Returns: a storage that
    has to be in `kept`, too, if there is one: a later write would reach the renewed rows, or the new tensor of all
    rows, alone."""
    apart: set[int] = set()
    for node in list(graph.nodes):
        storage, new = _renew(node, kept)
        if storage in apart and not new:
            return {storage}
        if new > 1:
            apart.add(storage)
    return set()


def _renew(node: Node, kept: set[int]) -> tuple[int, int]:
    """Have an assignment make a new tensor, if no other name of the old one is read behind it; of rows of a tensor that
    is read behind it, a new one of all rows as well. Returns the storage, 0 of other nodes, and how many are new."""
    operation = _operation(node)
    old = node.args[0] if operation is not None and node.args else None
    storage = _storage(old)
    if not isinstance(old, Node) or storage is None:
        return 0, 0
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    behind = {*nodes[at + 1 :]}
    read = {name for each in behind for name in each.all_input_nodes}
    others = {each for each in nodes[:at] if each is not old and _storage(each) == storage} & read
    whole, rows = _rows_of(old)
    if others - {whole} or others and storage in kept:
        return storage, 0
    node.target = operation
    with node.graph.inserting_after(node):  # the type stays; a tensor of this type is not copied
        made = node.graph.call_method("to", (node, _value(old).dtype))
    made.meta = dict(node.meta)
    names = {node: made, old: made}
    if others:
        with node.graph.inserting_after(made):
            names[whole] = node.graph.call_function(torch.slice_scatter, (whole, made, *rows))
        names[whole].meta = dict(whole.meta)
        made.meta[_ROWS] = names[whole], rows
    for name, new in names.items():
        name.replace_all_uses_with(new, delete_user_cb=behind.__contains__)
    return storage, 2 if others else 1


def _rows_of(node: Node) -> tuple[Any, Any]:
    """The tensor of which this node is rows such as x[:, a:b], and their dimension, first and end; else None, None."""
    if _ROWS in node.meta:
        return node.meta[_ROWS]  # type: ignore[no-any-return]
    places: Any = node.args[1] if node.target is operator.getitem else None
    parts = places if isinstance(places, tuple) else (places,)
    cut = [dim for dim, each in enumerate(parts) if each != slice(None)]
    if len(cut) != 1 or not isinstance(rows := parts[cut[0]], slice) or rows.step is not None:
        return None, None
    return node.args[0], (cut[0], rows.start, rows.stop)


def _value(node: Any) -> Any:
    """What it was while the graph was made; a constant is itself."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _storage(node: Any) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
