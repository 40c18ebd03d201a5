"""Modes and streams in which copies are made, and those that are there again afterwards."""

import pytest
import torch
from devicebridge.parallel.staged_copies import SideStreams
from devicebridge.parallel.transfer import CurrentStreams, Versioned, settle
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.streams import Clock

HOME, NEXT, THIRD = CARDS[:3]


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


@pytest.mark.parametrize("current", [0, 1, 2])
def test_streams_and_the_current_card_are_those_from_before(machine, current) -> None:
    """Whether a copy begins on the source's card, as most do, on the target's or on another one."""
    with machine.installed():
        ours = machine.Stream(HOME), machine.Stream(NEXT)
        theirs = machine.Stream(NEXT)
        machine.set_stream(theirs)
        machine.set_device(current)
        with CurrentStreams(machine, *ours) as before:
            assert machine.current_device() == current
            assert [machine.current_stream(index) for index in (0, 1)] == list(ours)
        assert before == [machine.default[HOME], theirs] and machine.current_device() == current
        assert [machine.current_stream(index) for index in (0, 1, 2)] == [*before, machine.default[THIRD]]


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
