"""What others changed in a tree of modules is named, whatever way they took; what its owner does is not."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.patches.changes import Unchanged, foreign_methods
from devicebridge.patches.hooks import HookSet
from torch import nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.table = nn.Linear(2, 2), 2.0, torch.ones(2)
        self.bare = nn.Linear(2, 2, bias=False)
        self.register_buffer("steps", torch.ones(2))
        self.sizes, self.tables, self.kinds = [1, [2]], {"a": torch.ones(2)}, {"x", "y"}
        self.options = types.SimpleNamespace(scale=1.0, inner=types.SimpleNamespace(shift=2))
        self.options.itself = self.options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.table

    def helper(self) -> None: ...


class Other(Layer): ...


@pytest.fixture
def tree() -> nn.Module:
    return nn.ModuleDict({"a": Layer(), "b": Layer()})


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "hook": ("a hook on b.inner", lambda layer: layer.inner.register_forward_hook(lambda *given: None)),
    "pre-hook": ("a hook on b", lambda layer: layer.register_forward_pre_hook(lambda *given: None)),
    "forward": ("the replaced forward of b", lambda layer: setattr(layer, "forward", lambda x: x)),
    "bound": ("the replaced forward of b", lambda layer: setattr(layer, "forward", functools.partial(print))),
    "method": ("the replaced helper of b", lambda layer: setattr(layer, "helper", print)),
    "module": ("an exchanged module in b", lambda layer: setattr(layer, "inner", nn.Linear(2, 2))),
    "copy": ("an exchanged module in b", lambda layer: setattr(layer, "inner", copy.copy(layer.inner))),
    "no module": ("an exchanged module in b", lambda layer: setattr(layer, "inner", None)),
    "class": ("the exchanged class of b", lambda layer: setattr(layer, "__class__", Other)),
    "weight": (
        "the replaced weight of b.inner",
        lambda layer: setattr(layer.inner, "weight", nn.Parameter(layer.inner.weight.detach().clone())),
    ),
    "its data": ("weight of b.inner", lambda layer: setattr(layer.inner.weight, "data", torch.ones(2, 2))),
    "new bias": ("the replaced bias of b.bare", lambda layer: setattr(layer.bare, "bias", nn.Parameter(torch.ones(2)))),
    "no bias": ("the replaced bias of b.inner", lambda layer: setattr(layer.inner, "bias", None)),
    "buffer": ("the replaced steps of b", lambda layer: setattr(layer, "steps", torch.ones(2))),
    "tensor": ("the replaced table of b", lambda layer: setattr(layer, "table", torch.ones(2))),
    "number": ("the replaced scale of b", lambda layer: setattr(layer, "scale", 3.0)),
    "item": ("a change inside sizes of b", lambda layer: layer.sizes[1].append(3)),
    "key": ("a change inside tables of b", lambda layer: layer.tables.update(a=torch.ones(2))),
    "in place": ("a change inside tables of b", lambda layer: layer.tables["a"].mul_(2)),
    "tensor in place": ("a change inside table of b", lambda layer: layer.table.mul_(2)),
    "set": ("a change inside kinds of b", lambda layer: layer.kinds.add("z")),
    "attribute": ("a change inside options of b", lambda layer: setattr(layer.options.inner, "shift", 3)),
    "no number": ("the deleted scale of b", lambda layer: delattr(layer, "scale")),
    "no weight": ("the deleted bias of b.inner", lambda layer: delattr(layer.inner, "bias")),
    "no buffer": ("the deleted steps of b", lambda layer: delattr(layer, "steps")),
    "module gone": ("an exchanged module in b", lambda layer: delattr(layer, "inner")),
    "hidden": ("the replaced inner of b", lambda layer: layer.__dict__.update(inner=print)),
    "compiled": ("_compiled_call_impl of b", lambda layer: setattr(layer, "_compiled_call_impl", print)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(tree: nn.ModuleDict, change: str) -> None:
    words, act = CHANGES[change]
    seen = Unchanged(tree)
    assert not list(seen.changes())
    act(tree["b"])
    assert words in next(seen.changes(), "nothing")


def test_a_function_of_an_instance_counts_from_the_beginning(tree: nn.ModuleDict) -> None:
    tree["a"].forward = lambda x: x
    assert f"the replaced forward of a by {__name__}" in next(Unchanged(tree).changes())


def test_what_functools_wraps_makes_of_our_function_is_of_another_node(tree: nn.ModuleDict) -> None:
    hooks, seen, layer = HookSet(), Unchanged(tree), tree["b"]
    hooks.around_method(layer, "helper", lambda own, args, kwargs: own(*args, **kwargs))
    wrapper = functools.wraps(ours := layer.helper)(lambda *args: ours(*args))
    vars(wrapper).update(vars(ours))
    layer.helper = wrapper
    assert list(seen.changes()) == [f"the replaced helper of b by {__name__}"]
    hooks.remove()
    assert vars(layer)["helper"] is wrapper
    del layer.helper
    hooks.around_method(layer, "helper", lambda own, args, kwargs: None)
    del layer.helper
    hooks.remove()


def test_what_the_owner_does_is_none(tree: nn.ModuleDict) -> None:
    layer: Any = tree["a"]
    hooks, seen = HookSet(), Unchanged(tree, ignored=("state",))
    hooks.before(layer, lambda module, args, kwargs: (args, kwargs))
    hooks.around(tree["b"], lambda call, args, kwargs: call(*args, **kwargs))
    hooks.around_method(layer, "helper", lambda own, args, kwargs: own(*args, **kwargs))
    layer.forward = layer.forward  # the class's own, put back
    layer.scale = float("2.0")
    layer.new = torch.ones(2)  # nobody's code reads it
    layer.state = 5
    layer.inner.weight = nn.Parameter(torch.ones(2, 2))
    seen.note_weights()
    assert not list(seen.changes(hooks.ids))
    assert "a hook on a" in list(seen.changes())


def test_functions_of_other_code_in_a_class_are_named() -> None:
    class Own(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with mock.patch.object(nn.Module, "of_a_library", lambda module: None, create=True):
        assert list(foreign_methods([Own, nn.Linear, nn.Module])) == []
    with mock.patch.object(nn.Linear, "forward", Own.forward):
        assert list(foreign_methods([nn.Linear])) == [f"the replaced forward of the class Linear by {__name__}"]
    Own.__module__ = "comfy.ldm.model"
    assert list(foreign_methods([Own])) == [f"the replaced forward of the class Own by {__name__}"]


@pytest.mark.parametrize("wrap", [staticmethod, classmethod, property, functools.partialmethod, torch.no_grad()])
def test_other_code_inside_a_descriptor_of_a_class_is_named(wrap: Callable[..., Any]) -> None:
    with mock.patch.object(nn.Linear, "forward", wrap(lambda *given: None)):
        assert list(foreign_methods([nn.Linear])) == [f"the replaced forward of the class Linear by {__name__}"]


def test_a_weight_without_numbers_may_become_zeros(tree: nn.ModuleDict) -> None:
    layer: Any = tree["a"]
    layer.inner = nn.Linear(2, 2, device="meta")
    seen = Unchanged(tree)
    layer.inner.weight = nn.Parameter(torch.zeros(2, 2))
    assert not list(seen.changes())
    layer.inner.weight = nn.Parameter(torch.zeros(2, 2))
    layer.inner.bias = nn.Parameter(torch.ones(2))
    assert list(seen.changes()) == ["the replaced weight of a.inner", "the replaced bias of a.inner"]


def test_weights_are_not_held(tree: nn.ModuleDict) -> None:
    seen = Unchanged(tree)
    layer: Any = tree["a"]
    for _ in range(50):  # another one may get the place of the one that is gone
        layer.inner.weight = nn.Parameter(torch.ones(2, 2))
        assert next(seen.changes(), "") == "the replaced weight of a.inner"
