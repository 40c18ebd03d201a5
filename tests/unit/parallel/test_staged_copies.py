"""Copies between cards, also through host memory: their bits, and the order in which simulated streams work."""

from typing import Any

import pytest
import torch
from devicebridge.parallel import staged_copies as staged_module
from devicebridge.parallel.staged_copies import SideStreams, copies_between
from devicebridge.parallel.transfer import Versioned, settle
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.streams import Clock, HostClock

HOME, NEXT, THIRD = CARDS[:3]
COPY_S, KERNEL_S = 1.0, 10.0  # of a piece to the host, and of a matrix product
PIECE_BYTES = 64


def _product(rows: int = 16, device: torch.device = HOME) -> torch.Tensor:
    return torch.randn(rows, 4).to(device) @ torch.randn(4, 4).to(device)


@pytest.mark.parametrize("shape", [(1,), (7,), (16, 4), (3, 5, 7), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_what_arrives_has_the_bits_of_what_was_sent(machine, shape, dtype) -> None:
    with emulated_cards(2), machine.installed(), torch.inference_mode():
        tensor = torch.randint(-99, 99, shape).to(dtype).to(HOME)
        copies, arrivals = SideStreams(None, PIECE_BYTES), {}
        for sent in (tensor, tensor.transpose(0, -1), tensor[..., :1]):
            found = copies.copy(sent, NEXT, arrivals)
            settle(arrivals)
            assert found.device == NEXT and found.dtype == dtype and torch.equal(on_cpu(found), on_cpu(sent))
        assert not arrivals


def test_both_directions_of_the_host_are_in_use_at_once(machine) -> None:
    """Four pieces take the time of five: while one is written to the target, the next one is read."""
    with emulated_cards(2), machine.installed(), HostClock(machine, COPY_S, KERNEL_S) as clock:
        tensor, arrivals = _product(), {}
        copies = SideStreams(None, PIECE_BYTES)
        found = copies.copy(tensor, NEXT, arrivals)
        assert machine.default[NEXT].busy_until == 0.0  # nobody waits yet
        settle(arrivals)
        assert machine.default[NEXT].busy_until == KERNEL_S + 5 * COPY_S
        assert machine.default[HOME].busy_until == KERNEL_S  # the source computes on
        _ = found + 1
        again = copies.copy(tensor, NEXT, arrivals)
        settle(arrivals)
        _ = again + 1
        assert clock.races == 0 and torch.equal(on_cpu(again), on_cpu(tensor))


def test_a_buffer_is_filled_again_only_when_the_target_has_read_it(machine) -> None:
    """Where reading from the host is the slower direction."""
    with emulated_cards(2), machine.installed(), HostClock(machine, 3 * COPY_S, KERNEL_S) as clock:
        tensor, arrivals = _product(), {}
        SideStreams(None, PIECE_BYTES).copy(tensor, NEXT, arrivals)
        settle(arrivals)
        assert clock.races == 0 and machine.default[NEXT].busy_until == KERNEL_S + COPY_S + 4 * 3 * COPY_S


@pytest.mark.parametrize("from_host_s", [COPY_S, 3 * COPY_S])
def test_messages_that_are_sent_at_once_both_ways_do_not_overwrite_each_other(machine, from_host_s) -> None:
    """As keys and values of four groups of heads: tensors of two sizes, computed with when their message is there."""
    with emulated_cards(2), machine.installed(), HostClock(machine, from_host_s, KERNEL_S) as clock:
        copies, under_way = SideStreams(None, PIECE_BYTES), []
        there, back = ([[_product(16, each), _product(3, each)] for _ in range(4)] for each in (HOME, NEXT))
        for home, away in zip(there, back, strict=True):
            for message, target in ((home, NEXT), (away, HOME)):
                arrivals: dict[Any, Any] = {}
                under_way.append((message, copies.copies(message, target, arrivals), arrivals))
        first, last = machine.default[NEXT].busy_until, copies.pairs[HOME, NEXT][1].busy_until
        made = []
        for _, found, arrivals in under_way:
            settle(arrivals)
            made += [each @ each.mT for each in found]
        assert clock.races == 0
        expected = [on_cpu(each) for sent, _, _ in under_way for each in sent]
        assert all(torch.equal(on_cpu(each), one @ one.mT) for each, one in zip(made, expected, strict=True))
        assert first < last, "the target computes before the last message is there"


def test_devices_without_streams_copy_as_ever() -> None:
    with emulated_cards(2):
        tensor, arrivals = torch.ones(3).to(HOME), {}
        assert torch.equal(on_cpu(SideStreams(None).copy(tensor, NEXT, arrivals)), torch.ones(3)) and not arrivals


@pytest.mark.parametrize("access", [True, False, None])
def test_only_pairs_that_are_known_to_have_no_access_go_through_the_host(monkeypatch, access) -> None:
    """Of four cards on two bridges, say, or where access works one way only."""
    cards = [torch.device("cuda", index) for index in range(3)]
    lacking = {(cards[1], cards[2])} if access is False else set()
    monkeypatch.setattr(
        staged_module, "has_peer_access", lambda *pair: access if pair == (cards[1], cards[2]) else True
    )
    assert copies_between(cards)._staged == lacking and not copies_between(cards[:2])._staged


def test_pairs_with_access_copy_directly_beside_one_that_has_none(machine, monkeypatch) -> None:
    monkeypatch.setattr(staged_module, "has_peer_access", lambda *pair: pair != (HOME, NEXT))
    with emulated_cards(3) as cards, machine.installed():
        tensor, arrivals, copies = _product(), {}, copies_between(CARDS[:3])
        cards.copies.clear()
        found = [copies.copy(tensor, device, arrivals) for device in (NEXT, THIRD)]
        back = copies.copy(found[0], HOME, arrivals)
        settle(arrivals)
        assert all(torch.equal(on_cpu(each), on_cpu(tensor)) for each in (*found, back))
        routes = {(each.source, each.target) for each in cards.copies}
    cpu = torch.device("cpu")
    assert routes == {(HOME, cpu), (cpu, NEXT), (HOME, THIRD), (NEXT, HOME)}
    assert set(copies._buffers) == {(HOME, NEXT)}


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_what_is_made_with_a_version_leaves_the_modes_as_they_were(around) -> None:
    with around():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        for _ in range(2):
            with pytest.raises(KeyError), Versioned():
                assert not torch.is_inference_mode_enabled()
                assert torch.is_grad_enabled() is (around is torch.enable_grad)
                made = torch.ones(2, requires_grad=around is torch.enable_grad) * 2
                version = made._version
                made.detach().add_(1)
                assert made._version == version + 1 and made.requires_grad is (around is torch.enable_grad)
                raise KeyError
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before


def test_several_tensors_wait_once_and_are_waited_for_together(machine) -> None:
    with emulated_cards(2), machine.installed(), Clock(machine, copy_cost=1.0) as clock:
        tensors = [torch.randn(4, 4).to(HOME) @ torch.randn(4, size).to(HOME) for size in (2, 3)]
        copies, arrivals = SideStreams(), {}
        busy = machine.default[HOME].busy_until
        found = copies.copies(tensors, NEXT, arrivals)
        assert machine.default[HOME].busy_until == busy and list(arrivals) == [(HOME, NEXT)]
        settle(arrivals)
        assert machine.default[NEXT].busy_until == busy + 2.0 and not arrivals
        _ = [each + 1 for each in found]
        assert clock.races == 0
    assert all(torch.equal(on_cpu(each), on_cpu(tensor)) for each, tensor in zip(found, tensors, strict=True))
