"""A second module tree over the same storages: independent in everything but the weights."""

from __future__ import annotations

import functools
import importlib
import threading
import types
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain + self.offset

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.first = self.blocks[0]  # a second name for the same module
        self.sizes = [1, 2, 3]
        self.act = self.blocks[1].forward  # a bound method as a plain attribute
        self.model_config = object()
        self.current_patcher = "the patcher that ran last"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def model_copy(host: Any) -> ModuleType:
    return importlib.import_module("devicebridge.nodes.host.split.model_copy")


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False)


def test_the_copy_computes_the_same_from_the_same_storages(model_copy: ModuleType, model: Model) -> None:
    copied, _ = model_copy.copy_structure(model)
    x = torch.randn(2, 4)
    assert torch.equal(copied(x), model(x))
    assert list(copied.state_dict()) == list(model.state_dict())
    pairs = list(zip(copied.parameters(), model.parameters(), strict=True))
    assert pairs
    assert all(new is not old and new.data_ptr() == old.data_ptr() for new, old in pairs)
    assert not {id(m) for m in copied.modules()} & {id(m) for m in model.modules()}


def test_a_move_or_a_patch_of_one_tree_is_not_seen_by_the_other(model_copy: ModuleType, model: Model) -> None:
    copied, _ = model_copy.copy_structure(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied.to(torch.float64)
    copied.blocks[1].gain = nn.Parameter(torch.zeros(4), requires_grad=False)
    copied.blocks._modules.pop("2")
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_references_inside_the_model_lead_inside_the_copy(model_copy: ModuleType, model: Model) -> None:
    model.blocks[1].forward = functools.partial(lambda layer, x: layer.linear(x), model.blocks[1])
    copied, _ = model_copy.copy_structure(model)
    assert copied.first is copied.blocks[0] and copied.act.__self__ is copied.blocks[1]
    assert copied.blocks[1].forward.args == (copied.blocks[1],)
    assert copied.sizes == [1, 2, 3] and copied.sizes is not model.sizes
    assert copied.model_config is model.model_config


def test_load_state_stays_behind(model_copy: ModuleType, model: Model) -> None:
    model.blocks[0]._v = ("an address", 1, 2)
    model.blocks[0].comfy_patched_weights = True
    model.model_loaded_weight_memory = 77
    model._comfy_malloc_graph = object()  # a copy would free the original's memory
    model.blocks[0]._comfy_graph = {"graph": threading.Lock()}  # as a CUDA graph, it cannot be copied
    model.blocks[1].weight_function = ["a patch"]
    copied, _ = model_copy.copy_structure(model)
    assert not {"_v", "comfy_patched_weights", "_comfy_graph"} & vars(copied.blocks[0]).keys()
    assert not {"model_loaded_weight_memory", "_comfy_malloc_graph"} & vars(copied).keys()
    assert copied.current_patcher is None
    assert (copied.blocks[1].weight_function, model.blocks[1].weight_function) == ([], ["a patch"])


def test_what_cannot_be_copied_is_named(model_copy: ModuleType, model: Model) -> None:
    model.blocks[2].reader = (line for line in "text")
    with pytest.raises(RuntimeError, match=r"blocks\.2 \(Layer\).*cannot be copied.*Load Diffusion Model Across GPUs"):
        model_copy.copy_structure(model)


def test_bound_methods_and_modules_follow_to_the_copy_and_what_is_around_an_old_layer_is_refused(model_copy, model):
    copied, copies = model_copy.copy_structure(model)
    followed = lambda value: model_copy.follow_copy(value, copies, copies, "a patch")  # noqa: E731
    assert followed(model.blocks[1].scaled).__self__ is copied.blocks[1]
    assert followed(model.blocks[2]) is copied.blocks[2]
    for foreign in (types.MethodType(Layer.scaled, Layer()), nn.Sequential(Layer())):
        assert followed(foreign) is foreign
    with pytest.raises(ValueError, match=r"a patch was applied .*\(Layer layer\)"):
        followed(nn.Sequential(model.blocks[0]))


def _closure(layer: nn.Module) -> Any:
    return lambda x: layer(x)


class _Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layers = [layer]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


def _long_way(layer: nn.Module) -> Any:
    holder = _Holder(layer)
    return types.SimpleNamespace(a=types.SimpleNamespace(a=types.SimpleNamespace(a=types.SimpleNamespace(a=holder))))


@pytest.mark.parametrize(
    "capture",
    [
        lambda layer: functools.partial(lambda held, x: held(x), layer), _Holder, lambda layer: _Holder(layer).__call__,
        lambda layer: {"key": [_closure(layer)]},
        lambda layer: {"key": [types.SimpleNamespace(inject=_closure(layer), eject=lambda patcher: None)]},
        lambda layer: [_long_way(layer), _Holder(layer)],
    ],
    ids=["partial", "object", "bound method", "registry", "injection", "a longer way to it first"],
)  # fmt: skip
def test_what_captured_a_layer_is_refused(model_copy: ModuleType, model: Model, capture: Any) -> None:
    _, copies = model_copy.copy_structure(model)
    with pytest.raises(ValueError, match=r"a patch .* holds on to it \(Layer layer\).*directly after the loader"):
        model_copy.check_independent(capture(model.blocks[0]), copies, "a patch")
    model_copy.check_independent(capture(Layer()), copies, "a patch")  # a layer of its own is none of our business


def test_an_origin_is_used_only_where_it_is_the_same_kind_of_tensor(model_copy: ModuleType) -> None:
    weight = torch.ones(3)
    original, cpu = functools.partial(model_copy.original_of, {"a": weight}.get), torch.device("cpu")
    assert original("a", torch.zeros(3), cpu).data_ptr() == weight.data_ptr()
    of_another_type, meta = torch.zeros(3, dtype=torch.float16), torch.device("meta")
    others = ("b", torch.zeros(3), cpu), ("a", torch.zeros(4), cpu), ("a", of_another_type, cpu)
    assert not any(original(*each) is not None for each in (*others, ("a", torch.zeros(3), meta)))


class Packed(torch.Tensor):
    """A weight as some packs have them: it gives itself back, and has attributes that a patcher changes."""

    def detach(self) -> Packed:  # type: ignore[override]
        return self

    def clone(self) -> Packed:  # type: ignore[override]
        return self


def _packed() -> Any:
    weight: Any = torch.arange(4.0).as_subclass(Packed)
    weight.kind, weight.patches = "Q8_0", []
    return weight


def test_a_weight_that_gives_itself_back_is_another_tensor_over_the_same_storage(model_copy, model):
    model.blocks[0].gain = nn.Parameter(_packed(), requires_grad=False)
    copied, _ = model_copy.copy_structure(model)
    old, new = model.blocks[0].gain, copied.blocks[0].gain
    returned = model_copy.original_of({"gain": old}.get, "gain", new, torch.device("cpu"))
    for other in (new, returned):
        assert type(other) is Packed and other is not old and other.data_ptr() == old.data_ptr()
        other.patches.append("a LoRA")
        assert (other.kind, old.patches) == ("Q8_0", [])
    assert isinstance(new, nn.Parameter)


def test_an_own_copy_of_a_weight_that_gives_itself_back_has_its_own_storage(model_copy: ModuleType) -> None:
    for weight in (_packed(), torch.arange(4.0)):
        own = model_copy.alias(weight, is_copy=True)
        assert type(own) is type(weight)
        assert vars(own) == vars(weight)
        own.zero_()
        assert weight.tolist() == [0, 1, 2, 3]


def test_an_object_that_answers_to_nothing_is_passed_by(model_copy: ModuleType, model: Model) -> None:
    class Shy:
        __slots__ = ()

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    _, copies = model_copy.copy_structure(model)
    model_copy.check_independent({"option": Shy()}, copies, "an option")
