"""What a plan says of itself, where it is more than its numbers."""

import re
from dataclasses import replace

import pytest
from devicebridge.planning.cards import PCIE_BYTES_PER_S, Card, kind_called, parse_cards
from devicebridge.planning.costs import BlockCost
from devicebridge.planning.plan import (
    TrainingPlan,
    describe_plan,
    describe_verdict,
    describe_work,
    plan_training,
    plan_values,
    step_seconds,
)
from devicebridge.tests.plans import MadeUpCosts, make_cards, make_question

BLOCK = BlockCost(10**9, 0, 0, 10**7, {}, 10**7, 10**8, 10**7, 10**8, 2 * 10**8, 2 * 10**8, input_sizes=(10**7,))


def _plan(cards: list[Card], **sections: dict[str, object]) -> TrainingPlan:
    """Of ten blocks of 1 GB."""
    return plan_training(make_question(MadeUpCosts(BLOCK), cards, link=1e12, **sections))


@pytest.mark.parametrize(
    ("scheme", "is_asked", "is_said"),
    [("fp8-compute", False, True), ("fp8-compute", True, False), ("none", False, False)],
)
def test_a_plan_for_cards_that_nobody_could_ask_says_what_fp8_needs(scheme, is_asked, is_said):
    plan = _plan(make_cards(80), model={"quantize": scheme})
    question = plan.question.changed(cards=(replace(plan.question.cards[0], has_context=is_asked),))
    assert ("RTX 40" in describe_plan(replace(plan, question=question))) is is_said


def test_a_plan_says_first_whether_it_fits_how_fast_and_how_full_the_cards_are():
    plan = _plan(parse_cards("24GB"), model={"quantize": "fp8-compute"})
    lines = describe_plan(plan, 500).splitlines()
    rows = dict(re.split("  +", line, maxsplit=1) for line in lines[: lines.index("")])
    assert [*rows][:3] == ["verdict", "step", "peak"] and rows["verdict"] == "fits"
    seconds = plan.step_s * 50 / (165.2 * 0.46)  # estimates are in seconds at 50e12 a second
    assert rows["step"].startswith(f"{seconds:.2g} s, 500 steps about ") and "published speeds" in rows["step"]
    assert rows["peak"] == f"cuda:0 {plan.devices[0].needed / 1e9:.2f} of 24.00 GB"
    assert "RTX 4090 or newer, as fp8-compute needs" in rows["assumed"]
    assert describe_verdict(plan, 500) == ["fits", f"step: {rows['step']}", f"assumed: {rows['assumed']}"]


def test_a_plan_that_streams_says_so_first():
    plan = _plan(make_cards(5, 12, speeds=(1.0, 0.1)))
    verdict, step, *_ = describe_verdict(plan)
    assert verdict == f"fits with streaming: {sum(plan.offloaded)} blocks wait in host memory"
    assert "unknown" in step, "5 GB is no card of the table"
    assert plan_values(plan)["verdict"].startswith("fits with streaming")


def test_all_that_was_looked_at_is_listed_behind_what_was_chosen():
    plan = _plan(parse_cards("2x3090"), model={"quantize": "auto"}, optimizer={"name": "auto"})
    rows = [re.split("  +", line) for line in describe_plan(plan).split("\n\n")[-1].splitlines()[1:]]
    assert rows[0][0] == plan.setting.describe() and len(rows) == min(8, len(plan.looked_at))
    assert describe_verdict(plan)[1].startswith(f"step: {rows[0][1]}, ")


def test_cards_named_by_their_model_are_not_assumed():
    model = {"quantize": "int8-compute"}
    plan = _plan(parse_cards("2x3090"), model=model)
    assert "assumed" not in describe_plan(plan)
    assert plan_values(plan)["assumed"] == [] and plan_values(plan)["estimated_step_s"] > 0
    slow, fast = (step_seconds(_plan(parse_cards(name), model=model))[0] for name in ("RTX 3090", "4090"))
    assert slow / fast == pytest.approx(165.2 / 71.0)


@pytest.mark.parametrize(
    ("text", "name", "gib", "refuses"),
    [
        ("3090", "RTX 3090", 24, {"fp8-compute"}), ("RTX 4090", "RTX 4090", 24, set()),
        ("2xGeForce RTX 5090", "RTX 5090", 32, set()), ("4x a100", "A100", 80, {"fp8-compute"}),
        ("RTX 6000 Ada", "RTX 6000 Ada", 48, set()), ("2x RTX 3060", "RTX 3060", 12, {"fp8-compute"}),
        ("4070 Ti", "RTX 4070 Ti", 12, set()),
    ],
)  # fmt: skip
def test_a_card_is_known_by_its_model(text, name, gib, refuses):
    card = parse_cards(text)[-1]
    assert card.kind.name == name and not card.is_assumed
    assert (card.total_bytes, card.refuses) == (gib * 2**30, refuses)
    (less,) = parse_cards(f"{name}: {gib - 1}GiB")
    assert replace(less, usable_bytes=card.total_bytes) == replace(card, device=less.device)
    assert less.usable_bytes == (gib - 1) * 2**30
    for size in (f"{gib + 1}GiB", "0GB"):
        with pytest.raises(ValueError, match="is no card; write"):
            parse_cards(f"{name}:{size}")


def test_what_torch_calls_a_card_is_recognised_and_its_cousins_are_not():
    for name in ("NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA H100 80GB HBM3 MIG 3g.40gb"):
        assert (found := kind_called(name)) is not None and found.link_bytes_per_s == PCIE_BYTES_PER_S, name
    known = {name: kind_called(name) for name in ("NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA H200")}
    assert [kind.name for kind in known.values()] == ["RTX 4090", "H100", "H200"]
    for name in (
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3080 Ti Laptop GPU",
        "cpu",
    ):  # fmt: skip
        assert kind_called(name) is None, name


@pytest.mark.parametrize(
    ("cards", "forward", "said"),
    [
        ("2x3090", (1e13, 10), "a step takes about 3.7 s, 1000 steps about 61 min"),  # 3 * 4e13 / (0.46 * 71e12)
        ("4090,3090", (1e13, 10), "a step takes about 3.7 s, 1000 steps about 61 min"),
        ("2x3090", (1e9, 4945), "a step takes about 2.7 s, 1000 steps about 45 min"),  # 4 * 0.676
        ("7GB", (1e13, 10), ""),
    ],
)
def test_without_a_plan_a_step_takes_its_operations_or_the_launches_of_its_kernels(cards, forward, said):
    assert describe_work(parse_cards(cards), forward, 12, 1000).startswith(said)
