"""Blocks or tensor: seconds by hand, seconds that were measured, and what follows from them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from devicebridge.planning import ways as ways_module
from devicebridge.planning.machine_speed import CardSpeed, ExchangeSpeed, MachineSpeed
from devicebridge.planning.ways import Ways, Work, WorkBySize

# What planning/divided_work.py says of the published sizes, at 4096 picture tokens.
FLUX2 = Work(286.5e12, 79.2e12, 3.72e9, 56.6e6, 288, 80)
FLUX2_512 = Work(91.6e12, 26.4e12, 1.24e9, 18.9e6, 288, 80)
WAN = Work(581e12, 143e12, 17.9e9, 149e6, 640, 280)  # at 14040: 832 x 480, 33 frames
QWEN = Work(85.2e12, 29.0e12, 3.78e9, 28.3e6, 1080, 360)


def _machine(
    flops_per_s: float = 660e12,
    bytes_per_s: float = 300e9,
    *,
    num_cards: int = 2,
    latency_s: float = 3e-5,
    launch_s: float = 5e-6,
    is_direct: bool = True,
) -> MachineSpeed:
    cards = tuple(CardSpeed(f"card {index}", flops_per_s, launch_s) for index in range(num_cards))
    pairs = combinations(range(num_cards), 2)
    links = tuple(ExchangeSpeed(pair, latency_s, bytes_per_s, is_direct) for pair in pairs)
    return MachineSpeed(cards, links, 0.1, "2026-11-23")


class _Always(WorkBySize):
    """The same work for any number of tokens."""

    def at(self, num_tokens: int) -> Work:
        return self.given[0]


def _ways(work: Work, machine: MachineSpeed, can_overlap: bool = True) -> Ways:
    count = len(machine.cards)
    return Ways(_Always(1, (work,) * 3), machine, [1 / count] * count, [1 / count] * count, can_overlap)


def test_a_copy_per_card_takes_what_cores_own_split_of_cfg_took() -> None:
    """1.97 times as fast as one card's 2.11 s. Each card computes whole conds, and of each all pictures."""
    ways = _ways(WAN, _machine())
    assert ways.copies_s(14040, 2, 1) == pytest.approx(2.108 / 1.97, rel=0.25)
    for num_conds, batch, factor in ((1, 1, 1), (3, 1, 2), (4, 1, 2), (2, 3, 3)):
        assert ways.copies_s(14040, num_conds, batch) == pytest.approx(factor * ways.copies_s(14040, 2, 1))


@pytest.mark.parametrize(
    ("work", "count", "blocks", "tensor"),
    [
        (FLUX2, 1, 0.5816, 0.3288),  # blocks: one card's time
        (FLUX2_512, 1, 0.178, 0.132),
        (WAN, 1, 1.074, 0.658),
        (WAN, 2, 1.594, None),
        (QWEN, 2, 0.302, 0.475),
    ],
)
def test_forecasts_are_near_what_two_h200_took(work, count, blocks, tensor) -> None:
    found = _ways(work, _machine()).seconds(4096, count)
    assert found.blocks == pytest.approx(blocks, rel=0.25)
    assert tensor is None or found.tensor == pytest.approx(tensor, rel=0.1)


def test_seconds_are_those_of_the_formulas(monkeypatch) -> None:
    """Three cards; powers of two so that sums are exact."""
    for name, value in {"BLOCK_RATE": 1.0, "WHOLE_SHARE": 0.25, "LAUNCHES_PER_MODULE": 2.0}.items():
        monkeypatch.setattr(ways_module, name, value)
    work = Work(flops=64.0, row_flops=16.0, sent_bytes=8.0, stream_bytes=4.0, num_modules=2, num_exchanges=4)
    machine = _machine(4.0, 2.0, num_cards=3, latency_s=0.5, launch_s=2**-20)
    ways = replace(_ways(work, machine), block_shares=[0.5, 0.25, 0.25], tensor_shares=[0.25, 0.5, 0.25])
    crossings = 3 * (0.5 + 4 / 2)
    # 16 s on one card: 8, 4 and 4; the second forward follows behind the slowest
    assert [ways.seconds(1, count).blocks for count in (1, 2, 3)] == [16 + crossings, 24 + crossings, 32 + crossings]
    alone = replace(ways, can_overlap=False)
    assert alone.seconds(1, 2).blocks == 32 + crossings
    copying = 2 * (8 / 2)  # to two others
    assert ways.seconds(1, 1).tensor == 16 * (0.5 * 0.75 + 0.25) + copying + 4 * 0.5
    assert ways.seconds(1, 2).tensor == 2 * (16 * 0.625 + copying) + 4 * 0.5
    staged = replace(ways, machine=_machine(4.0, 2.0, num_cards=3, latency_s=0.5, launch_s=2**-20, is_direct=False))
    # the card that waits longest has a quarter of the products: 0.75 * 0.25 * 16 / 4 = 0.75 s of 8 are hidden
    assert staged.seconds(1, 1).tensor == 10 + 7.25 + 2
    slow_host = replace(ways, machine=_machine(4.0, 2.0, num_cards=3, latency_s=0.5, launch_s=16.0))
    assert slow_host.seconds(1, 1).blocks == 16 * 2 * 2 / 2
    assert slow_host.seconds(1, 2).blocks == 2 * 16 * 2 * 2 / 2
    assert slow_host.seconds(1, 1).tensor == 3 * 16 * (2 * 2 + 4 * ways_module.LAUNCHES_PER_EXCHANGE)


def test_a_fast_link_with_long_blocks_takes_tensor() -> None:
    for work in (FLUX2, WAN):
        assert _ways(work, _machine()).prefers_tensor(4096, (1, 2))


def test_a_slow_link_takes_blocks() -> None:
    for work in (FLUX2, WAN):
        assert not _ways(work, _machine(bytes_per_s=8e9, is_direct=False)).prefers_tensor(4096, (1,))


def test_a_slow_link_between_slow_cards_takes_tensor() -> None:
    """What counts is the link beside the computation."""
    assert _ways(FLUX2, _machine(65e12, 10e9, is_direct=False)).prefers_tensor(4096, (1, 2))


def test_short_blocks_wait_for_the_host_and_take_blocks() -> None:
    assert not _ways(QWEN, _machine()).prefers_tensor(4096, (1,))
    assert _ways(QWEN, _machine(launch_s=5e-7)).prefers_tensor(4096, (1,))


def test_every_number_of_forwards_must_gain() -> None:
    """With CFG blocks overlap, so on a middling link tensor gains only without."""
    ways = _ways(FLUX2, _machine(bytes_per_s=22e9, is_direct=False))
    assert ways.prefers_tensor(4096, (1,)) and not ways.prefers_tensor(4096, (1, 2))
    assert not replace(ways, can_overlap=True).prefers_tensor(4096, (2,))
    near = ways.seconds(4096, 1)
    assert near.tensor < near.blocks


def test_a_gain_that_is_too_small_takes_blocks(monkeypatch) -> None:
    ways = _ways(WAN, _machine(bytes_per_s=37e9))
    found = ways.seconds(4096, 1)
    assert found.tensor < found.blocks and not ways.prefers_tensor(4096, (1,))
    monkeypatch.setattr(ways_module, "GAIN", 1.0)
    assert ways.prefers_tensor(4096, (1,))


def test_work_of_three_sizes_gives_that_of_every_size() -> None:
    def work(tokens: int) -> Work:
        return Work(3.0 * tokens**2 + 7 * tokens + 11, 5.0 * tokens + 1, 2.0 * tokens, 1.0 * tokens + 512, 4, 2)

    by_size = WorkBySize(4096, (work(0), work(4096), work(8192)))
    for tokens in (0, 1, 1024, 4096, 14040, 75600):
        for found, expected in zip(vars(by_size.at(tokens)).values(), vars(work(tokens)).values(), strict=True):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-3)


def test_both_forecasts_are_said() -> None:
    found: Any = _ways(FLUX2, _machine()).seconds(4096, 1)
    assert str(found) == "blocks about 0.543 s per step, tensor 0.313 s"
