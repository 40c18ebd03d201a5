"""How FLUX.2's heads are shared out among cards of unequal memory: against every share there is, at full size."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.tensor_plan import TensorPlan, Unit
from devicebridge.parallel.local.shards import find_plan, shares_of
from devicebridge.tests import comfy_stub
from devicebridge.tests.plans import full_size
from devicebridge.tests.unit.parallel.test_fitting_shares import every_share
from torch import nn

HEADS = 48
Plan = Callable[..., Any]


@pytest.fixture
def division_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    comfy_stub.install(monkeypatch, tmp_path)
    return importlib.import_module("devicebridge.nodes.host.split.division_plan")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """64.4 GB that are not there."""
    return copy.deepcopy(full_size()._model).to(torch.bfloat16)


@pytest.fixture(scope="module")
def layout() -> NativeModel:
    lists = tuple(each.name for each in full_size().family.block_lists)
    return NativeModel("", "", lists, (), "relay", tensor=full_size().family.tensor)


@pytest.fixture
def plan(division_plan: ModuleType, model: nn.Module, layout: NativeModel) -> Plan:
    """Rooms in GB -> heads and GB of each card, home first."""

    def planned(*rooms_gb: float) -> tuple[tuple[int, ...], list[float]]:
        devices = tuple(torch.device("cuda", index) for index in range(len(rooms_gb)))
        division = division_plan.plan_division(model, layout, devices, [int(room * 1e9) for room in rooms_gb])
        heads = {shares.heads for _, shares in division.blocks.values()}
        assert len(heads) == 1
        return heads.pop(), [size / 1e9 for size in division.bytes_on(model).values()]

    return planned


class _Sizes:
    """GB of each card from the slices themselves: of one block of each kind, as often as there are of it."""

    def __init__(self, model: nn.Module) -> None:
        family = full_size().family
        self.kinds: list[tuple[nn.Module, TensorPlan, list[tuple[float, tuple[Unit, ...], int]]]] = []
        self.rest = sum(parameter.nbytes for parameter in model.parameters())
        for block_list in family.block_lists:
            blocks = getattr(model, block_list.name)
            plan = find_plan(family.tensor, blocks[0])
            assert plan is not None
            self.kinds.append((blocks[0], plan, list(self._parameters(blocks[0], plan, len(blocks)))))
            self.rest -= sum(parameter.nbytes for parameter in blocks.parameters())

    @staticmethod
    def _parameters(block: nn.Module, plan: TensorPlan, count: int) -> Iterator[tuple[float, tuple[Unit, ...], int]]:
        """Bytes, and what the divided dimension consists of; FLUX.2's gates are packed beside what they gate."""
        for name, module in block.named_modules():
            divided = plan.find(name) if hasattr(module, "in_features") else None
            for parameter in module.parameters(recurse=False):
                parts: tuple[Unit, ...] = ()
                length = 0
                if divided is not None:
                    twice = 2 if divided.into else 1
                    parts = tuple(u for u in divided.parts for _ in range(twice if u == "features" else 1))
                    length = int(module.in_features if divided.by == "row" else module.out_features)  # type: ignore[arg-type]
                yield count * parameter.nbytes, parts, length

    def __call__(self, groups: Sequence[int]) -> list[float]:
        found = [0.0] * len(groups)
        for block, plan, parameters in self.kinds:
            shares = shares_of(block, plan, groups)
            for (size, parts, length), rank in itertools.product(parameters, range(len(groups))):
                ranges = shares.slices(parts, length, rank) if parts else [(0, 1)]
                found[rank] += size * sum(last - first for first, last in ranges) / max(1, length)
        found[0] += self.rest
        return [size / 1e9 for size in found]


@pytest.fixture(scope="module")
def sizes_of(model: nn.Module) -> _Sizes:
    return _Sizes(model)


@pytest.mark.parametrize(
    ("rooms", "before"),
    [((20, 46), (15, 33)), ((32.6, 40), (24, 24)), ((12, 30, 30), (8, 20, 20)), ((34, 32), (25, 23))],
    ids=str,
)
def test_home_gets_fewer_heads_for_what_it_holds_beside_the_blocks(plan, sizes_of, rooms, before) -> None:
    """before: evenly if the model fits half by half, else in proportion to the whole rooms; which does not fit home."""
    assert any(size > room for size, room in zip(sizes_of(before), rooms, strict=True))
    heads, sizes = plan(*rooms)
    assert all(size <= room for size, room in zip(sizes, rooms, strict=True)), (heads, sizes)
    assert sizes == pytest.approx(sizes_of(heads), rel=1e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_a_share_fits_if_any_does(plan, sizes_of, count) -> None:
    total, draw, outcomes = sum(sizes_of((HEADS // count,) * count)), random.Random(count), set()
    every = {each: sizes_of(each) for each in every_share(HEADS, count)}
    for _ in range(25):
        weights = [draw.uniform(0.2, 1) for _ in range(count)]
        rooms = [total * draw.choice((0.99, 1.005, 1.02, 1.2)) * each / sum(weights) for each in weights]
        fitting = [each for each, sizes in every.items() if all(a < b for a, b in zip(sizes, rooms, strict=True))]
        heads, _ = plan(*rooms)
        outcomes.add(bool(fitting))
        assert not fitting or heads in fitting, (rooms, heads)
    assert outcomes == {True, False}


def test_cards_with_room_for_it_take_even_shares(plan) -> None:
    """Also where one has less: the more heads a card has, the longer the others wait."""
    assert plan(80, 80)[0] == plan(40, 80)[0] == (24, 24)
    assert plan(30, 80)[0] == (13, 35) and plan(20, 46)[0] == (14, 34)
