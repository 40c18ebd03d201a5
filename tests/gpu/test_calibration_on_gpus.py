"""Blocks and links timed on real GPUs. Needs two CUDA or ROCm devices; skipped, with the reason, elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo
from devicebridge.config.job import LoraSettings
from devicebridge.parallel.stopwatch import EventStopwatch, link_speed, make_stopwatch
from devicebridge.planning.block_clock import time_blocks
from devicebridge.planning.calibration import describe_card, describe_slot
from devicebridge.planning.short_model import Work
from devicebridge.quantization.quantize import QuantizeSettings, refusal
from devicebridge.tests.toy import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < 2,
        reason=f"needs two GPUs; torch sees {torch.cuda.device_count() if torch.cuda.is_available() else 0} here",
    ),
]


@pytest.mark.parametrize("scheme", ["none", "fp8", "int8", "fp8-compute", "int8-compute"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_blocks_are_timed_on_the_second_card_and_leave_nothing_behind(name, scheme):
    device = torch.device("cuda:1")
    quantize = None if scheme == "none" else QuantizeSettings(scheme)
    if quantize is not None and refusal(quantize, [device]):
        pytest.skip(refusal(quantize, [device]))
    tiny = TINY[name]
    variant = tiny.family.variants[0]
    config = {**tiny.transformer_config, **tiny.encoder_widths}
    info = CheckpointInfo(Path("x"), tiny.family, variant, config, "diffusers", {}, None)
    work = Work(tiny.latent_shape, 1, torch.bfloat16, quantize, LoraSettings(rank=4))
    time_blocks(info, variant, work, device)  # libraries keep a workspace from their first call on
    held, state = torch.cuda.memory_allocated(device), torch.cuda.get_rng_state(device)
    current, others = torch.cuda.current_device(), torch.cuda.memory_allocated("cuda:0")
    found = time_blocks(info, variant, work, device)
    assert torch.cuda.memory_allocated(device) == held and torch.cuda.memory_allocated("cuda:0") == others
    assert torch.cuda.current_device() == current and torch.equal(torch.cuda.get_rng_state(device), state)
    assert found.front_s > 0 and found.tail_s > 0 and found.peak_gb
    assert all(0 < kind.forward_s < 1 and 0 < kind.backward_s < 1 for kind in found.kinds)


def test_links_and_cards_are_told_apart():
    one, other = torch.device("cuda:0"), torch.device("cuda:1")
    assert isinstance(make_stopwatch(other), EventStopwatch)
    assert link_speed(torch.device("cpu"), other) > 1e8 and link_speed(one, other) > 1e8
    assert describe_card(one)["name"] == torch.cuda.get_device_name(one) and describe_card(one)["total_bytes"] > 1e9
    assert describe_slot(one) != describe_slot(other)
