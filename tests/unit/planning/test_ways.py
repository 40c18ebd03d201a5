"""Blocks or tensor: seconds by hand, seconds that were measured, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from devicebridge.parallel.local.collectives import SLICED_FROM_BYTES
from devicebridge.planning import times as ways_module
from devicebridge.planning.times import ForwardWork
from devicebridge.tests.sampling_work import FLUX2, FLUX2_512, QWEN, WAN, machine_of, ways_of


@pytest.mark.parametrize(
    ("work", "count", "blocks", "tensor"),
    [
        (FLUX2, 1, 0.5816, 0.3288),  # blocks: one card's time
        (FLUX2_512, 1, 0.178, 0.1053),
        (WAN, 1, 1.074, 0.658),
        (WAN, 2, 1.594, None),
        (QWEN, 2, 0.302, 0.2278),
    ],
)
def test_forecasts_are_near_what_two_h200_took(work, count, blocks, tensor) -> None:
    """Of short blocks as CUDA graphs; launched by Python they wait for the host, which is left out."""
    found = ways_of(work, machine_of()).seconds(count)
    assert found[0] == pytest.approx(blocks, rel=0.25)
    assert tensor is None or found[1] == pytest.approx(tensor, rel=0.2)


HALF_OF_FLUX2 = replace(FLUX2, flops=FLUX2.flops / 2, sent_bytes=FLUX2.sent_bytes / 2)


@pytest.mark.parametrize(("work", "one_card", "tensor"), [(HALF_OF_FLUX2, 0.271, 0.185), (WAN, 1.041, 0.954)])
def test_over_a_slow_link_a_step_takes_what_was_measured(work, one_card, tensor) -> None:
    """Two H200 that copied through host memory at 39 GB/s, with the time of one card as it was measured."""
    machine = machine_of(flops_per_s=work.flops / one_card / ways_module.BLOCK_RATE, bytes_per_s=39e9)
    assert ways_of(work, machine).seconds(1)[1] == pytest.approx(tensor, rel=0.03)


def test_seconds_are_those_of_the_formulas(monkeypatch) -> None:
    """Three cards; powers of two so that sums are exact."""
    monkeypatch.setattr(ways_module, "BLOCK_RATE", 1.0)
    work = ForwardWork(flops=64.0, sent_bytes=8.0, stream_bytes=4.0, num_exchanges=4)
    machine = machine_of(3, 4.0, 2.0)
    ways = replace(ways_of(work, machine), block_shares=[0.5, 0.25, 0.25], tensor_shares=[0.25, 0.5, 0.25])
    crossings = 3 * 4 / 2
    # 16 s on one card: 8, 4 and 4; the second forward follows behind the slowest
    assert [ways.seconds(count)[0] for count in (1, 2, 3)] == [16 + crossings, 24 + crossings, 32 + crossings]
    alone = replace(ways, can_overlap=False)
    assert alone.seconds(2)[0] == 2 * (16 + crossings)  # one after the other, as one batch
    assert replace(alone, crossings=2 * 5).seconds(2)[0] == 2 * (16 + 2 * 5 * 4 / 2)  # relay to five blocks and back
    copying = 2 * (8 / 2)  # to two others
    assert ways.seconds(1)[1] == 16 * 0.5 + copying
    assert ways.seconds(2)[1] == 2 * (16 * 0.5 + copying)
    # Of 16 s on one card 8 are of layers that every card computes whole.
    half = replace(ways, work=replace(work, whole_flops=32.0))
    assert half.seconds(2)[1] == 2 * (8 * 0.5 + 8 + copying)


@pytest.mark.parametrize(("cards", "times"), [(2, 1.0), (3, 2 * 2 / 3), (4, 2 * 3 / 4)])
def test_large_sums_are_sent_slice_by_slice_between_more_than_two_cards(cards, times) -> None:
    machine = machine_of(cards, 1e30, 1.0)
    for sent, factor in ((4 * SLICED_FROM_BYTES, times), (4 * SLICED_FROM_BYTES - 1, cards - 1)):
        work = ForwardWork(0.0, float(sent), 0.0, num_exchanges=4)
        assert ways_of(work, machine).seconds(1)[1] == pytest.approx(factor * sent)


def test_a_fast_link_with_long_blocks_takes_tensor() -> None:
    for work in (FLUX2, WAN):
        assert ways_of(work, machine_of()).prefers_tensor((1, 2))


def test_a_slow_link_takes_blocks() -> None:
    for work in (FLUX2, WAN):
        assert not ways_of(work, machine_of(bytes_per_s=8e9)).prefers_tensor((1,))


def test_a_slow_link_between_slow_cards_takes_tensor() -> None:
    """What counts is the link beside the computation."""
    assert ways_of(FLUX2, machine_of(2, 65e12, 10e9)).prefers_tensor((1, 2))


def test_every_number_of_forwards_must_gain() -> None:
    """With CFG blocks overlap, so on a middling link tensor gains only without."""
    ways = ways_of(FLUX2, machine_of(bytes_per_s=22e9))
    assert ways.prefers_tensor((1,)) and not ways.prefers_tensor((1, 2))
    assert not replace(ways, can_overlap=True).prefers_tensor((2,))
    assert ways.seconds(1)[1] < ways.seconds(1)[0]


def test_a_gain_that_is_too_small_takes_blocks(monkeypatch) -> None:
    ways = ways_of(WAN, machine_of(bytes_per_s=37e9))
    found = ways.seconds(1)
    assert found[1] < found[0] and not ways.prefers_tensor((1,))
    monkeypatch.setattr(ways_module, "GAIN", 1.0)
    assert ways.prefers_tensor((1,))
