"""Copies that share out the rows of each microbatch: losses and gradients of one card, the same bits in every run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from devicebridge.families.token_plan import TokenPlan
from devicebridge.parallel.local.data_parallel import copy_model
from devicebridge.parallel.local.token_training import TokenTraining
from devicebridge.parallel.offload import weights as weights_module
from devicebridge.parallel.offload.recompute import InPlaceGuard
from devicebridge.parallel.offload.weights import WeightOffload
from devicebridge.parallel.runner import Runner
from devicebridge.tests.emulated import CARDS, emulated_cards, factories_on_cards, on_cpu
from devicebridge.tests.placed import bring_to_host
from devicebridge.tests.tiny_split import BrokenBackward
from devicebridge.tests.token_cases import PLAN, WHOLE_TEXT, Block, Toy, make_toy, make_training, microbatches
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")


def _plainly(num_steps: int = 1, toy: nn.Module | None = None, **counts: int) -> Any:
    toy = toy or make_toy()
    losses = Runner(toy, torch.device("cpu")).run(microbatches(toy, num_steps, **counts))
    return losses, {name: each.grad for name, each in toy.named_parameters() if each.grad is not None}


def _shared(shares: Sequence[float], count: int = 1, plan: TokenPlan = PLAN, *, recomputes: bool = True) -> Any:
    with emulated_cards(4), factories_on_cards():
        training = make_training(make_toy(), CARDS[: len(shares)], plan, recomputes=recomputes, shares=shares)
        losses = [on_cpu(loss) for loss in training.run(microbatches(training.model, count))]
        first, *others = training.model.copies
        assert all(parameter.grad is None for other in others for parameter in other.parameters())
        return losses, {name: on_cpu(each.grad).clone() for name, each in first.named_parameters()}


@pytest.mark.parametrize("plan", [PLAN, WHOLE_TEXT], ids=["text shared out", "text whole"])
@pytest.mark.parametrize(("shares", "recomputes"), [((1, 1), True), ((1, 1, 1), False), ((2.25, 1), True)])
def test_losses_and_gradients_are_those_of_one_card(shares: Sequence[float], recomputes: bool, plan: TokenPlan) -> None:
    losses, expected = _plainly(2)
    found, gradients = _shared(shares, 2, plan, recomputes=recomputes)
    assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-12)
    for name, gradient in gradients.items():
        assert expected[name].abs().max() > 0
        assert (gradient - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_every_run_has_the_same_bits() -> None:
    first, second = _shared((1, 1, 1)), _shared((1, 1, 1))
    assert all(map(torch.equal, first[0], second[0]))
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_copies_follow_the_first_one() -> None:
    with emulated_cards(2), factories_on_cards():
        training = make_training(make_toy(), CARDS[:2], PLAN, recomputes=True)
        training.run(microbatches(training.model, 1))
        first, second = training.model.copies
        with torch.no_grad():
            for each in first.parameters():
                each.sub_(0.1 * each.grad)
        training.sync()
        pairs = zip(first.parameters(), second.parameters(), strict=True)
        assert all(torch.equal(on_cpu(a), on_cpu(b)) for a, b in pairs)


def _run(training: TokenTraining, **counts: int) -> None:
    training.run(microbatches(training.model, 1, **counts))


def _check(training: TokenTraining, toy: nn.Module, **counts: int) -> None:
    expected_losses, expected = _plainly(1, toy, **counts)
    for parameter in training.model.copies[0].parameters():
        parameter.grad = None
    losses = [on_cpu(each) for each in training.run(microbatches(training.model, 1, **counts))]
    assert torch.allclose(torch.stack(losses), torch.stack(expected_losses), rtol=1e-12)
    for name, each in training.model.copies[0].named_parameters():
        assert (on_cpu(each.grad) - expected[name]).norm() <= 1e-12 * expected[name].norm() > 0, name


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("plan", [PLAN, WHOLE_TEXT], ids=["text shared out", "text whole"])
def test_a_sample_with_fewer_rows_than_cards_is_computed_whole(plan, recomputes, caplog) -> None:
    with emulated_cards(3), factories_on_cards():
        training = make_training(make_toy(), CARDS[:3], plan, recomputes=recomputes)
        for counts in ({"num_image": 2}, {"num_image": 1}, {}):
            _check(training, make_toy(), **counts)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "2 rows of img for 3 devices" in caplog.text


class _Windows(Toy):
    """Runs all blocks once for each window of the picture, of different lengths."""

    def forward(self, img: torch.Tensor, txt: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(_Windows, self).forward(each, txt) for each in img.split(8, 1)], 1)


@pytest.mark.parametrize("num_image", [11, 12, 16])
def test_blocks_are_computed_again_with_the_lengths_of_their_own_call(num_image: int) -> None:
    """Of 12 rows the second window has 4, of 11 it has 3."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return _Windows().double()

    with emulated_cards(2), factories_on_cards():
        _check(make_training(made(), CARDS[:2], PLAN, recomputes=True), made(), num_image=num_image)


class _Counting(Block):
    def forward(self, img: torch.Tensor, txt: torch.Tensor, pe: torch.Tensor, vec: torch.Tensor, index: int = 0) -> Any:
        img, txt = super().forward(img, txt, pe, vec)
        return torch.cat([img[:, :index], img[:, index:] * 0.5], 1), txt


class _Counted(Toy):
    index = 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Counting() for _ in range(3))

    def forward(self, img: torch.Tensor, txt: torch.Tensor) -> torch.Tensor:
        return super().forward(img, txt, index=self.index)


def test_a_number_of_rows_that_differs_by_card_is_no_other_way_of_being_called(monkeypatch) -> None:
    """Of 12 rows the second card has 0 and 2 of the first 6 and 8; the first card has 6 of both."""
    plan = replace(PLAN, blocks={"blocks": replace(PLAN.blocks["blocks"], counts="index=img")})

    def made() -> nn.Module:
        torch.manual_seed(0)
        return _Counted().double()

    with emulated_cards(2), factories_on_cards():
        training = make_training(made(), CARDS[:2], plan, recomputes=True)
        for each in training.model.copies:
            for block in each.blocks:
                block.forward = InPlaceGuard(block)
        for index in (6, 8):
            monkeypatch.setattr(_Counted, "index", index)
            _check(training, made(), num_image=12)


def _on_host(model: nn.Module) -> set[int]:
    return {id(each) for each in model.parameters() if each.device.type == "cpu"}


def test_copies_stream_one_set_of_weights_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through two slots of each card, from one place in host memory."""
    monkeypatch.setattr(weights_module, "SMALLEST_BYTES", 1)

    def run(places: Sequence[str]) -> Any:
        toy = make_toy()
        toy.blocks.requires_grad_(False)
        for block in toy.blocks:
            block.mod.requires_grad_(True)  # in the place of a LoRA
        with emulated_cards(2), factories_on_cards():
            first = toy.to(CARDS[0])
            offload = WeightOffload(dict.fromkeys(places, CARDS[0]))
            bring_to_host(offload, first)
            copies = [first, copy_model(first, CARDS[1], offload.holds)]
            offloads = [offload, offload.of_copy(copies[1], CARDS[1])] if places else []
            held = [_on_host(each) for each in copies]
            training = make_training(toy, CARDS[:2], PLAN, recomputes=True, copies=copies)
            for each in offloads:
                each.attach()
            losses = [on_cpu(each) for each in training.run(microbatches(training.model, 2))]
            gradients = {name: on_cpu(each.grad) for name, each in first.named_parameters() if each.grad is not None}
            copied = [each.num_copies for each in offloads]
            for each in reversed(offloads):
                each.remove()
            assert [_on_host(each) for each in copies] == held
            return losses, gradients, held, copied

    losses, gradients, held, copied = run([f"blocks.{index}" for index in range(3)])
    expected_losses, expected, on_no_host, _ = run(())
    assert all(map(torch.equal, losses, expected_losses))
    assert gradients.keys() == expected.keys() and all(torch.equal(gradients[n], expected[n]) for n in expected)
    assert held[0] == held[1] and len(held[0]) == 6 and on_no_host == [set(), set()]
    assert copied == [6, 6]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("at", ["blocks.1.mod", "last"])
def test_a_card_that_fails_ends_the_others_and_the_next_step_works(at: str, where: str) -> None:
    def fail(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if where == "forward":
            raise ZeroDivisionError
        return BrokenBackward.apply(output)

    with emulated_cards(3), factories_on_cards():
        training = make_training(make_toy(), CARDS[:3], PLAN, recomputes=True)
        handle = training.model.copies[1].get_submodule(at).register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            _run(training)
        assert not training.model._rows.newest  # nothing of a step is held
        handle.remove()
        _check(training, make_toy())
