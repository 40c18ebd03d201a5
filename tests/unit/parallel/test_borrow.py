"""Arguments borrowed to a function on another device: what it does to them is done to the caller's."""

import pytest
import torch
from devicebridge.parallel.local.borrow import Borrowed
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu

HOME, AWAY = CARDS[:2]
MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


def _away(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(AWAY)


@MODES
def test_a_write_reaches_the_callers_tensor_and_nothing_else_is_copied_back(mode):
    with emulated_cards(2) as cards, mode():
        q, k = _away(2, 3), _away(2, 3, seed=1)
        before = on_cpu(q).clone(), on_cpu(k).clone()
        borrowed = Borrowed([q, {"k": k}], HOME)
        borrowed.value[0].mul_(2)
        assert borrowed.value[0].device == borrowed.value[1]["k"].device == HOME
        cards.copies.clear()
        borrowed.settle(AWAY)
        assert torch.equal(on_cpu(q), 2 * before[0])
        assert torch.equal(on_cpu(k), before[1])
        assert [copy.shape for copy in cards.copies] == [(2, 3)]


@MODES
def test_a_write_into_a_view_of_what_was_lent_counts(mode):
    with emulated_cards(2), mode():
        whole = _away(4, 6)
        before = on_cpu(whole).clone()
        borrowed = Borrowed((whole[:, 2:],), HOME)
        borrowed.value[0][:, :1].zero_()
        borrowed.settle(AWAY)
        before[:, 2:3] = 0
        assert torch.equal(on_cpu(whole), before)


def test_a_dict_loses_gains_and_changes_what_the_function_did_to_its_own():
    with emulated_cards(2), torch.inference_mode():
        taken, kept, changed, number = _away(2), _away(3), _away(4), 7
        args = {"taken": taken, "kept": kept, "changed": changed, "number": number}
        borrowed = Borrowed(args, HOME)
        mine = borrowed.value
        assert mine is not args
        taken_there = mine.pop("taken")
        taken_there.add_(1)
        mine["changed"] = mine["changed"] * 2
        mine["new"] = torch.ones(1).to(HOME)
        mine["same"] = mine["kept"]
        mine["number"] = 8
        before = on_cpu(taken).clone(), on_cpu(changed).clone()
        borrowed.settle(AWAY)
        assert set(args) == {"kept", "changed", "new", "same", "number"}
        assert args["kept"] is kept and args["same"] is kept and args["number"] == 8
        assert args["changed"].device == args["new"].device == AWAY
        assert torch.equal(on_cpu(args["changed"]), 2 * before[1])
        assert torch.equal(on_cpu(taken), before[0] + 1)  # the tensor it took out was still the caller's


def test_a_list_follows():
    with emulated_cards(2), torch.inference_mode():
        first, second = _away(2), _away(3)
        args = [first, second]
        borrowed = Borrowed(args, HOME)
        borrowed.value.reverse()
        borrowed.value.append(torch.ones(1).to(HOME))
        borrowed.settle(AWAY)
        assert args[0] is second and args[1] is first and args[2].device == AWAY


def test_what_comes_back_is_the_callers_own_or_moved():
    with emulated_cards(2), torch.inference_mode():
        x, args = _away(2), {"img": _away(3)}
        borrowed = Borrowed([x, args], HOME)
        there, mine = borrowed.value
        new = there + 1
        back = borrowed.returned((there, mine, {"out": new, "x": there}, None), AWAY)
        assert back[0] is x and back[1] is args and back[2]["x"] is x and back[3] is None
        assert back[2]["out"].device == AWAY and torch.equal(on_cpu(back[2]["out"]), on_cpu(x) + 1)


def test_the_same_tensor_twice_is_lent_once_and_what_is_there_not_at_all():
    with emulated_cards(2) as cards, torch.inference_mode():
        x, here = _away(2), torch.ones(2).to(HOME)
        cards.copies.clear()
        borrowed = Borrowed([x, {"x": x}, here, [here]], HOME)
        assert borrowed.value[0] is borrowed.value[1]["x"] and borrowed.value[2] is here
        assert len(cards.copies) == 1
        assert Borrowed([here], HOME)._containers == []


def test_passed_dicts_and_keys_stay_the_same_objects():
    with emulated_cards(2), torch.inference_mode():
        options, control = {"sigmas": _away(1)}, {"input": [_away(2)]}
        args = {"options": options, "control": control, "x": _away(2)}
        borrowed = Borrowed(args, HOME, is_passed=lambda value: "sigmas" in value, passed_by=("control",))
        assert borrowed.value["options"] is options and borrowed.value["control"] is control
        assert borrowed.value["x"].device == HOME


def test_views_keep_their_strides():
    """A sum over other strides is rounded otherwise."""
    with emulated_cards(2), torch.inference_mode():
        view = _away(4, 6, 8)[:, 2:].transpose(0, 1)
        borrowed = Borrowed(view, HOME)
        assert borrowed.value.stride() == view.stride()
        assert torch.equal(on_cpu(borrowed.value), on_cpu(view))
        expanded = _away(1, 6).expand(3, 6)
        assert torch.equal(on_cpu(Borrowed(expanded, HOME).value), on_cpu(expanded))
