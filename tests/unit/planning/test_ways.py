"""Blocks, tensor or tokens: seconds by hand, seconds that were measured, and what follows from them.

The work is what planning/times.py says of ComfyUI's classes at full size, which needs ComfyUI. The speeds are those of
docs/internals/experiments.md, 2026-11-23.
"""

from dataclasses import replace

import pytest
from devicebridge.planning import times as ways_module
from devicebridge.planning.cards import MachineSpeed
from devicebridge.planning.times import ForwardWork, Ways

FLUX2 = ForwardWork(286.5e12, 3.72e9, 56.6e6, 80)  # 4096 picture tokens: 1024 x 1024
FLUX2_512 = ForwardWork(91.6e12, 1.24e9, 18.9e6, 80)
WAN = ForwardWork(581e12, 17.9e9, 149e6, 280)  # 14040: 832 x 480, 33 frames
QWEN = ForwardWork(85.2e12, 3.78e9, 28.3e6, 360)


def machine_of(num_cards: int = 2, flops_per_s: float = 660e12, bytes_per_s: float = 300e9) -> MachineSpeed:
    """Cards that are all alike."""
    return MachineSpeed((flops_per_s,) * num_cards, bytes_per_s, "2026-11-23")


def ways_of(work: ForwardWork, machine: MachineSpeed, can_overlap: bool = True) -> Ways:
    count = len(machine.flops_per_s)
    return Ways(work, machine, [1 / count] * count, [1 / count] * count, can_overlap, count)


@pytest.mark.parametrize(
    ("work", "count", "blocks", "tensor"),
    [
        (FLUX2, 1, 0.5816, 0.3288), (FLUX2_512, 1, 0.178, 0.1053), (WAN, 1, 1.074, 0.658),  # blocks: one card's time
        (WAN, 2, 1.594, None), (QWEN, 2, 0.302, 0.2278),
    ],
)  # fmt: skip
def test_forecasts_are_near_what_two_h200_took(work, count, blocks, tensor) -> None:
    """Of short blocks as CUDA graphs; launched by Python they wait for the host, which is left out."""
    found = ways_of(work, machine_of()).seconds(count)
    assert found[0] == pytest.approx(blocks, rel=0.25)
    assert tensor is None or found[1] == pytest.approx(tensor, rel=0.2)


def test_seconds_are_those_of_the_formulas(monkeypatch) -> None:
    """Three cards; powers of two so that sums are exact."""
    monkeypatch.setattr(ways_module, "BLOCK_RATE", 1.0)
    work = ForwardWork(flops=64.0, sent_bytes=8.0, stream_bytes=4.0)
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


@pytest.mark.parametrize(
    ("work", "machine", "counts", "way"),
    [
        (FLUX2, machine_of(), (1, 2), "tensor"), (WAN, machine_of(), (1, 2), "tensor"),
        (FLUX2, machine_of(bytes_per_s=8e9), (1,), "blocks"), (WAN, machine_of(bytes_per_s=8e9), (1,), "blocks"),
        (FLUX2, machine_of(2, 65e12, 10e9), (1, 2), "tensor"),  # what counts is the link beside the computation
        # With CFG blocks overlap, so on a middling link tensor gains only without.
        (FLUX2, machine_of(bytes_per_s=22e9), (1,), "tensor"), (FLUX2, machine_of(bytes_per_s=22e9), (1, 2), "blocks"),
    ],
)  # fmt: skip
def test_tensor_is_taken_where_the_link_suffices_with_every_number_of_forwards(work, machine, counts, way) -> None:
    assert ways_of(work, machine).fastest(counts) == way


def test_a_gain_that_is_too_small_takes_blocks(monkeypatch) -> None:
    ways = ways_of(WAN, machine_of(bytes_per_s=37e9))
    found = ways.seconds(1)
    assert found[1] < found[0] and ways.fastest((1,)) == "blocks"
    monkeypatch.setattr(ways_module, "GAIN", 1.0)
    assert ways.fastest((1,)) == "tensor"


def test_seconds_of_tokens_are_those_of_the_formula(monkeypatch) -> None:
    """Three cards; the second is faster, and has more of the rows."""
    monkeypatch.setattr(ways_module, "BLOCK_RATE", 1.0)
    work = ForwardWork(flops=64.0, sent_bytes=8.0, stream_bytes=4.0, key_bytes=24.0)
    machine = MachineSpeed((4.0, 8.0, 4.0), 2.0, "2026-11-28")
    ways = replace(ways_of(work, machine), token_shares=[3, 6, 3], can_deal=True)
    # 16, 8 and 16 s on one card. The second card sends half of 24 bytes to each of two others; the first gets 3/4.
    one = 16 / 4 + 24 / 2
    assert [ways.seconds(count).tokens for count in (1, 2)] == [one, 2 * one]
    assert ways.seconds(3).tokens == 16  # a whole forward each, as the slowest has 3/4 of a third; nothing travels
    assert ways.seconds(5).tokens == 16 + 2 * one
    assert replace(ways, can_deal=False).seconds(3).tokens == 3 * one
    uneven = replace(ways, token_shares=[2, 7, 3])
    assert uneven.seconds(3).tokens == 3 * (8 * 7 / 12 + 24 * 2 * 7 / 12 / 2)  # it would be waited for too long
    few = replace(ways, token_shares=[6, 1, 1])
    assert few.seconds(1).tokens == 16 * 6 / 8 + 24 * max(7 / 8, 2 * 6 / 8) / 2
    assert ways_of(work, machine).seconds(1).tokens == float("inf")
    assert replace(ways, tensor_shares=()).seconds(1).tensor == float("inf")


def _with_keys(work: ForwardWork, key_bytes: float, machine: MachineSpeed) -> ways_module.Ways:
    ways = ways_of(replace(work, key_bytes=key_bytes), machine)
    return replace(ways, token_shares=machine.flops_per_s, can_deal=True)


def test_the_fastest_way_is_taken() -> None:
    """Stated speeds; with one forward and with two."""
    pcie = machine_of(2, 65e12, 12e9)
    assert _with_keys(WAN, 11.5e9, pcie).fastest((1, 2)) == "tokens"
    assert _with_keys(FLUX2, 6.34e9, machine_of(2, 65e12, 3e9)).fastest((1,)) == "tokens"
    # Beside a slow link tokens lose where tensor does not, by what each sends.
    assert _with_keys(FLUX2, 200e9, pcie).fastest((1,)) == "tensor"
    assert _with_keys(FLUX2, 200e9, machine_of(2, 65e12, 1e9)).fastest((1, 2)) == "blocks"
    assert replace(_with_keys(WAN, 11.5e9, pcie), token_shares=()).fastest((1,)) == "tensor"
    assert replace(_with_keys(FLUX2, 6.34e9, pcie), tensor_shares=()).fastest((1, 2)) == "tokens"


def test_tokens_must_be_faster_with_one_forward_and_with_two() -> None:
    """Whole forwards are dealt out, so two always gain; one does not where keys take too long."""
    ways = replace(_with_keys(WAN, 11.5e9, machine_of(2, 660e12, 2e9)), tensor_shares=())
    assert ways.fastest((2,)) == "tokens" and ways.fastest((1, 2)) == "blocks"


def test_a_tie_leaves_tensor_and_a_small_gain_leaves_blocks() -> None:
    """On two H200: the forecasts of FLUX.2 differ by less than a hundredth, and Wan gained with tokens."""
    assert _with_keys(WAN, 11.5e9, machine_of()).fastest((1, 2)) == "tokens"
    ways = _with_keys(FLUX2, 6.34e9, machine_of())
    found = ways.seconds(1)
    assert 0.97 * found.tensor < found.tokens < found.tensor and ways.fastest((1,)) == "tensor"
    # What tokens forbid is worth no gain of a twentieth over blocks.
    alone = replace(ways, tensor_shares=(), work=replace(ways.work, key_bytes=0.9 * found.blocks * 300e9))
    assert 0.9 * found.blocks < alone.seconds(1).tokens < found.blocks and alone.fastest((1,)) == "blocks"


@pytest.mark.parametrize(("link", "measured"), [(31.7, 0.645), (21.7, 0.666), (11.1, 0.879)])
def test_wan_by_groups_of_heads_takes_as_long_as_was_measured(link: float, measured: float) -> None:
    """GB/s of two H200; one card took 1.041 s per step (benchmarks/results/native_links_2xh200_2026-11-29.json)."""
    machine = MachineSpeed((1e12, 1e12), link * 1e9, "2026-11-29")
    work = ForwardWork(1.041 * 1e12 * 0.8, 0.0, 0.0, key_bytes=2 * 5.75e9)
    ways = Ways(work, machine, (0.5, 0.5), (), False, 2, (1.0, 1.0), groups=4)
    assert ways.seconds(1).tokens == pytest.approx(measured, rel=0.08)
