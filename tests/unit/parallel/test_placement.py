"""Placement is arithmetic: checked against brute force over every possible cut."""

import itertools
import random

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.placement import (
    Placement,
    block_flops,
    block_names,
    blocks_with_lists,
    check_budgets,
    parameter_bytes,
    plan_manual,
    plan_placement,
)

DEVICES = [torch.device("cuda", i) for i in range(4)]


def _brute_force(cost, limits, main_cost, main_bytes):
    """Smallest possible maximum over all consecutive cuts that give every device a block and fit the limits."""
    best = None
    for cuts in itertools.combinations(range(1, len(cost)), len(limits) - 1):
        bounds = [0, *cuts, len(cost)]
        parts = [sum(cost[a:b]) for a, b in itertools.pairwise(bounds)]
        sizes = [part + (main_bytes if i == 0 else 0) for i, part in enumerate(parts)]
        if any(limit is not None and size > limit for size, limit in zip(sizes, limits, strict=True)):
            continue
        worst = max(part + (main_cost if i == 0 else 0) for i, part in enumerate(parts))
        best = worst if best is None else min(best, worst)
    return best


def _loads(placement, cost, devices, main_cost):
    loads = [sum(c for c, d in zip(cost, placement.devices, strict=True) if d == device) for device in devices]
    loads[0] += main_cost
    return loads


@pytest.mark.parametrize("seed", range(40))
def test_plan_is_as_good_as_the_best_cut(seed):
    rng = random.Random(seed)
    cost = [rng.randint(1, 30) for _ in range(rng.randint(4, 11))]
    devices = DEVICES[: rng.randint(1, 4)]
    main_device = rng.randint(0, 20)
    limits = [rng.choice([None, sum(cost), sum(cost) // 2 + main_device]) for _ in devices]
    expected = _brute_force(cost, limits, main_device, main_device)
    names = [f"blocks.{i}" for i in range(len(cost))]
    budget = dict(zip(devices, limits, strict=True))
    arguments = dict(block_cost=cost, main_cost=main_device, main_bytes=main_device, budget_bytes=budget)
    if expected is None:
        with pytest.raises(ValueError, match="no cut fits the limits"):
            plan_placement(names, devices, **arguments)
        return
    placement = plan_placement(names, devices, **arguments)
    assert max(_loads(placement, cost, devices, main_device)) == expected
    assert list(placement.devices) == sorted(placement.devices, key=lambda device: device.index)
    assert set(placement.devices) == set(devices)


def test_uneven_devices_are_filled_in_proportion():
    placement = plan_placement([f"b.{i}" for i in range(30)], DEVICES[:2], block_cost=[1] * 30, capacity=[24, 12])
    assert placement.devices.count(DEVICES[0]) == 20
    tied = plan_placement(["b.0", "b.1", "b.2"], DEVICES[:2], block_cost=[1] * 3)
    assert tied.devices.count(DEVICES[0]) == 1  # which has the activations of front and tail


def test_a_cut_by_hand_must_fit_too():
    placement = plan_manual(["b.0", "b.1", "b.2"], DEVICES[:2], [1])
    sizes, limits = [3_000_000_000] * 3, {DEVICES[0]: 9_000_000_000, DEVICES[1]: 5_000_000_000}
    with pytest.raises(ValueError, match=r"6\.00 GB of weights on cuda:1, which may hold 5\.00 GB"):
        check_budgets(placement, sizes, 1_000_000_000, limits)
    check_budgets(placement, sizes, 1_000_000_000, {})


def test_more_devices_than_blocks_leaves_the_rest_empty():
    placement = plan_placement(["blocks.0", "blocks.1"], DEVICES, block_cost=[1, 1])
    assert placement.used_devices == tuple(DEVICES[:2])


def test_refusal_names_need_and_limits():
    budget = {DEVICES[0]: 5_000_000_000, DEVICES[1]: 5_000_000_000}
    with pytest.raises(ValueError, match=r"need 12\.00 GB.*cuda:0 5\.00 GB, cuda:1 5\.00 GB"):
        plan_placement(["b.0", "b.1"], DEVICES[:2], block_cost=[6_000_000_000] * 2, budget_bytes=budget)


def test_manual_cuts():
    names = [f"blocks.{i}" for i in range(5)]
    placement = plan_manual(names, DEVICES[:3], [1, 4])
    assert [device.index for device in placement.devices] == [0, 1, 1, 1, 2]
    assert placement.describe() == "cuda:0: 1 blocks, cuda:1: 3 blocks, cuda:2: 1 blocks"


@pytest.mark.parametrize(
    ("cuts", "message"), [([0], "between 1 and 4"), ([5], "between 1 and 4"), ([2, 3], "one cut less")]
)
def test_impossible_cuts_say_what_works(cuts, message):
    with pytest.raises(ValueError, match=message):
        plan_manual([f"blocks.{i}" for i in range(5)], DEVICES[:2], cuts)


def test_device_of_parameters():
    placement = Placement(("blocks.1", "blocks.10"), (DEVICES[1], DEVICES[2]), DEVICES[0])
    assert placement.device_of("blocks.1.attn.to_q.weight") == DEVICES[1]
    assert placement.device_of("blocks.10.attn.to_q.weight") == DEVICES[2]
    assert placement.device_of("proj_out.weight") == DEVICES[0]
    assert placement.device_of("blocks.1") == DEVICES[1]


def _full_size(family, variant):
    import diffusers

    with torch.device("meta"):
        return getattr(diffusers, family.transformer_class)(**dict(variant.transformer_config))


def test_flux2_double_block_has_twice_the_bytes_and_the_same_time_as_a_single_block():
    family = FAMILIES["flux2"]
    model = _full_size(family, family.variant("flux2-dev"))
    names = block_names(model, family)
    assert len(names) == 56
    sizes, main_device = parameter_bytes(model, names, 2)
    flops = [block_flops(*each, 1024, 512) for each in blocks_with_lists(model, family)]
    assert sizes[0] / sizes[-1] == pytest.approx(2, rel=1e-3)
    assert flops[0] / flops[-1] == pytest.approx(1, rel=1e-3)
    assert sum(sizes) + main_device == sum(p.numel() for p in model.parameters()) * 2
    # one linear of a single block sees every token: 2 * 55296 * 6144 * 1536 operations, the largest part
    assert flops[-1] == pytest.approx(2 * 6144 * (55296 + 24576) * 1536 + 4 * 1536**2 * 6144, rel=1e-6)


def test_a_model_without_the_family_blocks_is_refused():
    with pytest.raises(ValueError, match="this one has other"):
        block_names(torch.nn.ModuleDict({"other": torch.nn.ModuleList()}), FAMILIES["flux2"])
