"""Finding blocks: by a row, and in models nobody described."""

import dataclasses
import re

import pytest
from devicebridge.families.comfy.native import NativeModel
from devicebridge.parallel.block_lists import (
    block_fqns,
    execution_order,
    find_block_lists,
    followers,
    hooked_modules,
    placed_blocks,
    tail_modules,
    transport_for,
)
from torch import nn


def _blocks(count: int, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class _Model(nn.Module):
    """Two lists, a dict, a block on its own, a side list that follows the first, a tail."""

    def __init__(self, mapping: dict[int, int] | None = None) -> None:
        super().__init__()
        self.front = nn.Linear(8, 8)
        self.first = _blocks(3)
        self.second = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
        self.middle: nn.Module | None = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.side = _blocks(2)
        self.mapping = {0: 0, 2: 1} if mapping is None else mapping
        self.tail = nn.Linear(8, 8)
        self.tail_list = _blocks(2)


_ROW = NativeModel("_Model", ("first", "middle", "second"), ("tail", "tail_list", "absent"), "for tests")
_WITH_SIDE = dataclasses.replace(_ROW, block_lists=("first", "side"), follows={"side": ("first", "mapping")})


def test_lists_dicts_and_single_blocks_are_named_in_order() -> None:
    assert placed_blocks(_Model(), _ROW) == ("first.0", "first.1", "first.2", "middle", "second.a", "second.b")


def test_an_optional_list_may_be_none_or_absent() -> None:
    model = _Model()
    model.middle = None
    row = dataclasses.replace(_ROW, block_lists=("first", "middle", "gone"), optional=("middle", "gone"))
    assert placed_blocks(model, row) == ("first.0", "first.1", "first.2")
    with pytest.raises(ValueError, match="should be in 'middle'; this one has front, first, second, side, tail"):
        placed_blocks(model, _ROW)


def test_a_model_without_blocks_is_an_error() -> None:
    with pytest.raises(ValueError, match="_Model has no block in gone"):
        block_fqns(_Model(), ("gone",), ("gone",))


def test_a_side_block_runs_right_after_the_block_it_follows() -> None:
    model = _Model()
    assert placed_blocks(model, _WITH_SIDE) == ("first.0", "first.1", "first.2")
    assert followers(model, _WITH_SIDE) == {"side.0": "first.0", "side.1": "first.2"}
    assert execution_order(model, _WITH_SIDE) == ("first.0", "side.0", "first.1", "first.2", "side.1")


def test_a_model_that_ends_with_a_side_block_relays() -> None:
    assert transport_for(_Model(), _ROW) == "stream"
    assert transport_for(_Model({0: 0, 1: 1}), _WITH_SIDE) == "stream"
    assert transport_for(_Model({0: 0, 2: 1}), _WITH_SIDE) == "relay"


def test_hooks_go_on_the_children_where_only_those_are_called() -> None:
    model = _Model()
    assert hooked_modules(model.middle, _ROW) == (model.middle,)
    assert isinstance(model.middle, nn.Sequential)
    row = dataclasses.replace(_ROW, hooks_children=True)
    assert hooked_modules(model.middle, row) == (model.middle[0], model.middle[1])


def test_a_list_in_the_tail_stands_for_its_members() -> None:
    model = _Model()
    assert tail_modules(model, _ROW) == (model.tail, *model.tail_list)


class _Unknown(nn.Module):
    """Children are given by name, in order."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_lists_of_alike_blocks_or_with_most_of_the_weights_are_found_in_registration_order() -> None:
    mixed, front = nn.ModuleList([nn.Linear(32, 32), nn.Conv1d(32, 32, 3)]), nn.Linear(8, 8)
    trunk = nn.ModuleDict({"x": nn.Linear(8, 8), "y": nn.Linear(8, 8)})
    assert find_block_lists(_Unknown(front=front, trunk=trunk, late=_blocks(3))) == ("trunk", "late")
    assert find_block_lists(_Unknown(front=front, trunk=mixed)) == ("trunk",)
    with pytest.raises(ValueError, match="so there is nothing to split"):
        find_block_lists(_Unknown(front=nn.Linear(128, 128), trunk=mixed))
    assert find_block_lists(_Unknown(embedders=_blocks(4, width=2), trunk=_blocks(4, width=16))) == ("trunk",)
    inner = _Unknown(embed=nn.Linear(8, 8), layers=_blocks(4, width=32))  # a model inside the model is searched
    assert find_block_lists(_Unknown(front=front, decoder=inner)) == ("decoder.layers",)


def test_works_on_meta_tensors_and_counts_buffers() -> None:
    trunk = _blocks(2, width=64)
    for block in trunk:
        weight = block._parameters.pop("weight")
        assert weight is not None
        block.register_buffer("weight", weight.data)
    assert find_block_lists(_Unknown(front=nn.Linear(16, 16), trunk=trunk).to("meta")) == ("trunk",)


def test_what_is_there_is_said_when_nothing_is_found() -> None:
    model = _Unknown(encoder=nn.Linear(8, 8), only=_blocks(1), head=nn.Linear(8, 8))
    expected = "its children are encoder (Linear), only (ModuleList), head (Linear)"
    with pytest.raises(ValueError, match=re.escape(expected)):
        find_block_lists(model)
    with pytest.raises(ValueError, match="its children are none"):
        find_block_lists(nn.Linear(8, 8))
