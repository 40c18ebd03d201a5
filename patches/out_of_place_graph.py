"""Graphs of torch.compile in which x += y, x.mul_(y) and the like make a new tensor.

Inference code writes into tensors that an operation was given before. Autograd refuses that, and torch.compile traces
through autograd, so such a block fails to compile though a graph could keep both values. Here the assignment becomes an
operation that makes a tensor, before autograd sees the graph, and what reads x afterwards reads that. It stays what it
was where a view of x, or what x is a view of, is read afterwards.

What is written into an argument never reaches it then. A caller that reads it there, or a block that returns its
argument, needs `keeps_arguments`: the graph computes with a copy of such an argument, which is written into when the
graph is done. Which block needs that is for others to know (../parallel/offload/in_place.py).
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

AUGMENTED: dict[Any, Any] = {  # what x += y and the like compute
    operator.iadd: torch.add,
    operator.isub: torch.sub,
    operator.imul: torch.mul,
    operator.itruediv: torch.true_divide,
}
_METHODS: dict[Any, Any] = {f"{name}_": name for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv")}


class OutOfPlace:
    """A backend of torch.compile that hands such graphs to another one, given by name or as a function."""

    def __init__(self, backend: str | Callable[..., Any], *, keeps_arguments: bool) -> None:
        self._backend, self._keeps_arguments = backend, keeps_arguments

    def __call__(self, module: GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        backend = torch._dynamo.lookup_backend(self._backend) if isinstance(self._backend, str) else self._backend
        num_outputs = len(_output(module.graph).args[0])
        written = _returned_too(module.graph) if self._keeps_arguments else []
        make_out_of_place(module.graph)
        module.recompile()
        compiled = backend(module, inputs, **options)
        return functools.partial(_write_behind, compiled, written, num_outputs) if written else compiled


def _write_behind(compiled: Callable[..., Any], written: list[int], num_outputs: int, *inputs: Any) -> Any:
    """Run a graph that returns what arguments are to hold as well. It has copies, so that what it saves stays."""
    given = [each.clone() if index in written else each for index, each in enumerate(inputs)]
    outputs = compiled(*given)
    for index, value in zip(written, outputs[num_outputs:], strict=True):
        inputs[index].copy_(value)
    return outputs[:num_outputs]


def make_out_of_place(graph: Graph) -> int:
    """Have assignments make new tensors, in place; returns how many do."""
    nodes = list(graph.nodes)
    return sum(_renew(node, nodes[:at], nodes[at + 1 :]) for at, node in enumerate(nodes))


def _returned_too(graph: Graph) -> list[int]:
    """Have a graph return the arguments it writes into, behind its own outputs; which of its inputs these are. One that
    has two names stays out."""
    inputs = list(graph.find_nodes(op="placeholder"))
    targets = {_storage(node.args[0]) for node in graph.nodes if _operation(node) is not None and node.args} - {None}
    names = Counter(map(_storage, inputs))
    found = [at for at, node in enumerate(inputs) if _storage(node) in targets and names[_storage(node)] == 1]
    end = _output(graph)
    end.args = ((*end.args[0], *(inputs[at] for at in found)),)
    return found


def _output(graph: Graph) -> Any:
    (end,) = graph.find_nodes(op="output")
    return end


def _operation(node: Node) -> Any:
    """What makes a new tensor in the place of an assignment; None for other nodes."""
    return (AUGMENTED if node.op == "call_function" else _METHODS).get(node.target)


def _renew(node: Node, before: Sequence[Node], behind: Sequence[Node]) -> bool:
    """Whether this is an assignment and makes a new tensor now."""
    operation = _operation(node)
    old = node.args[0] if operation is not None and node.args else None
    storage = _storage(old)
    if not isinstance(old, Node) or storage is None:
        return False
    others = {each for each in before if each is not old and _storage(each) == storage}
    if any(others.intersection(each.all_input_nodes) for each in behind):
        return False
    node.target = operation
    with node.graph.inserting_after(node):  # the type stays; a tensor of this type is not copied
        made = node.graph.call_method("to", (node, _value(old).dtype))
    made.meta = dict(node.meta)
    readers = {*behind}
    for name in (node, old):
        name.replace_all_uses_with(made, delete_user_cb=readers.__contains__)
    return True


def _value(node: Any) -> Any:
    """What it was while the graph was made; a constant is itself."""
    return node.meta.get("example_value") if isinstance(node, Node) else node


def _storage(node: Any) -> int | None:
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
