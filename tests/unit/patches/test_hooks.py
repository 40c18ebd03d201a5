"""Hooks attach and detach without a trace, and map_tensors reaches every tensor a block can be handed."""

import collections
import dataclasses

import pytest
import torch
from devicebridge.patches.hooks import HookSet, map_tensors, parameters_on_meta
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

Named = collections.namedtuple("Named", "first second")


@dataclasses.dataclass(frozen=True)
class Frozen:
    shift: torch.Tensor
    name: str


@dataclasses.dataclass
class Open:
    gate: torch.Tensor


class Slotted:
    __slots__ = ("data", "frames")

    def __init__(self, data: torch.Tensor, frames: int) -> None:
        self.data, self.frames = data, frames


class Ordinary:
    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


ONE = torch.ones(2)
TWO = torch.full((2,), 2.0)


def test_map_tensors_reaches_every_container_and_leaves_the_original_alone():
    value = {
        "tuple": (ONE, 3), "named": Named(ONE, "x"), "list": [ONE, [ONE]], "frozen": Frozen(ONE, "n"),
        "open": Open(ONE), "slotted": Slotted(ONE, 5), "ordered": collections.OrderedDict(a=ONE), "none": None,
    }  # fmt: skip
    out = map_tensors(value, double)
    assert torch.equal(out["tuple"][0], TWO) and out["tuple"][1] == 3
    assert isinstance(out["named"], Named) and torch.equal(out["named"].first, TWO) and out["named"].second == "x"
    assert torch.equal(out["list"][0], TWO) and torch.equal(out["list"][1][0], TWO)
    assert torch.equal(out["frozen"].shift, TWO) and out["frozen"].name == "n"
    assert torch.equal(out["open"].gate, TWO)
    assert torch.equal(out["slotted"].data, TWO) and out["slotted"].frames == 5
    assert isinstance(out["ordered"], collections.OrderedDict) and torch.equal(out["ordered"]["a"], TWO)
    assert out["none"] is None
    assert value["frozen"].shift is ONE and value["slotted"].data is ONE and value["list"][1] == [ONE]
    assert torch.equal(map_tensors(Transformer2DModelOutput(sample=ONE), double).sample, TWO)
    assert torch.equal(map_tensors(BaseModelOutput(last_hidden_state=ONE), double).last_hidden_state, TWO)


def test_what_does_not_change_keeps_its_identity():
    cache = Ordinary(ONE)
    value = ([ONE], {"a": ONE}, Frozen(ONE, "n"), Slotted(ONE, 1), cache)
    assert map_tensors(value, lambda tensor: tensor) is value
    assert map_tensors((ONE, cache), double)[1] is cache  # ordinary objects are passed through


def test_map_tensors_passes_by_what_dicts_hold_under_a_name():
    shared = {"sigmas": ONE}
    value = {"options": shared, "x": ONE, "inner": [{"options": ONE, "y": ONE}]}
    out = map_tensors(value, double, {"options"})
    assert out["options"] is shared and out["inner"][0]["options"] is ONE and value["x"] is ONE
    assert torch.equal(out["x"], TWO) and torch.equal(out["inner"][0]["y"], TWO)
    kept = {"options": ONE}
    assert map_tensors(kept, double, {"options"}) is kept


def test_map_tensors_reaches_what_a_function_holds():
    def make(mask: torch.Tensor, parts: list[tuple[int, torch.Tensor]], options: dict[str, torch.Tensor]):
        def attend(x: torch.Tensor, *, scale: float = 3.0) -> torch.Tensor:
            local = x * scale
            return (lambda: local)() * mask * parts[0][1] * options["kept"]  # it shares a variable of its own

        return attend

    attend = make(ONE, [(0, ONE)], {"kept": ONE})
    attend.__module__, attend.__qualname__ = "another.pack", "Pack.attend"
    made = map_tensors(attend, double)
    assert (made.__module__, made.__qualname__) == ("another.pack", "Pack.attend")
    assert torch.equal(map_tensors({"fn": attend}, double)["fn"](ONE), 12 * ONE)
    assert torch.equal(map_tensors(attend, double, {"mask"})(ONE, scale=1.0), TWO)
    assert torch.equal(attend(ONE), 3 * ONE)
    assert map_tensors(attend, lambda tensor: tensor) is attend
    assert map_tensors(double, double) is double


@pytest.mark.parametrize("is_nested", [False, True])
def test_map_tensors_leaves_a_function_alone_that_sets_a_variable_of_its_maker(is_nested):
    def make():
        total = ONE

        def add(x: torch.Tensor) -> None:
            nonlocal total
            total = total + x

        def add_inside(x: torch.Tensor) -> None:
            def inner() -> None:
                nonlocal total
                total = total + x

            inner()

        return (add_inside if is_nested else add), lambda: total

    add, total = make()
    map_tensors(add, double)(ONE)
    assert torch.equal(total(), TWO)


def test_map_tensors_leaves_functions_that_hold_each_other_alone():
    callbacks = []

    def call() -> list[object]:
        return callbacks

    callbacks.append(call)
    assert map_tensors(call, double) is call


def test_hook_set_is_outermost_and_leaves_no_trace():
    layer = nn.Linear(2, 2)
    before = {name: dict(value) for name, value in vars(layer).items() if name.endswith("hooks")}
    order = []
    layer.register_forward_pre_hook(lambda module, args: order.append("theirs"))
    hooks = HookSet()
    hooks.before(layer, lambda module, args, kwargs: (order.append("ours"), (args, kwargs))[1])
    hooks.after(layer, lambda module, args, kwargs, output: order.append("after"))
    layer(ONE)
    assert order == ["ours", "theirs", "after"] and len(hooks) == 2
    hooks.remove()
    hooks.remove()
    order.clear()
    layer(ONE)
    assert order == ["theirs"]
    layer._forward_pre_hooks.clear()
    assert {name: dict(value) for name, value in vars(layer).items() if name.endswith("hooks")} == before


def test_after_hook_also_runs_when_the_forward_raises():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("inside")

    seen, module, hooks = [], Failing(), HookSet()
    hooks.after(module, lambda module, args, kwargs, output: seen.append(1), also_on_error=True)
    with pytest.raises(KeyError, match="inside"):
        module(ONE)
    assert seen == [1]


def test_a_hook_around_a_module_stands_in_for_its_call_and_leaves_no_trace():
    """Also where an earlier change has left a forward of its own on the module."""
    layer, order = nn.Linear(2, 2), []
    layer.forward = layer.forward
    layer.register_forward_pre_hook(lambda module, args: order.append("theirs"))
    before, expected = dict(vars(layer)), layer(ONE)
    order.clear()
    hooks = HookSet()

    def around(call, args, kwargs):
        order.append("ours")
        return 2 * call(*args, **kwargs)

    hooks.around(layer, around)
    assert torch.equal(layer(input=ONE), 2 * expected) and order == ["ours", "theirs"] and len(hooks) == 1
    assert isinstance(layer, nn.Linear) and type(layer).__name__ == "Linear"
    with pytest.raises(AssertionError, match="one at a time"):
        HookSet().around(layer, around)
    hooks.remove()
    hooks.remove()
    assert type(layer) is nn.Linear and vars(layer) == before and len(hooks) == 0
    assert torch.equal(layer(ONE), expected)


def test_a_hook_around_a_method_is_of_one_object_and_leaves_no_trace():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before, hooks = dict(vars(layer)), HookSet()
    hooks.around_method(layer, "extra_repr", lambda own, args, kwargs: f"ours: {own(*args, **kwargs)}")
    assert layer.extra_repr() == f"ours: {other.extra_repr()}" and len(hooks) == 1
    with pytest.raises(AssertionError, match="one at a time"):
        HookSet().around_method(layer, "extra_repr", lambda own, args, kwargs: "")
    hooks.remove()
    hooks.remove()
    assert vars(layer) == before and len(hooks) == 0


def test_parameters_take_no_memory_inside_and_buffers_are_real() -> None:
    with pytest.raises(KeyError), parameters_on_meta():
        layer = nn.BatchNorm1d(4)
        frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        layer.register_parameter("frozen", frozen)
        raise KeyError
    assert {str(each.device) for each in layer.parameters()} == {"meta"}
    assert layer.weight.requires_grad and not layer.frozen.requires_grad
    assert {str(each.device) for each in layer.buffers()} == {"cpu"}
    assert str(nn.Linear(2, 2).weight.device) == "cpu"
