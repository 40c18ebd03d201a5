"""A fixed, short part of what scripts/soak.py plays: prompts that alternate way, LoRA, size, Cancel and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from devicebridge.tests.comfy.server import Server
from devicebridge.tests.comfy.tensor_prompts import make_files, run_tensor_prompts

pytestmark = pytest.mark.comfy


def test_prompts_keep_their_bits_when_one_of_their_replays_or_meetings_fails(server: Server, comfyui: Path) -> None:
    make_files(server, comfyui)
    found = run_tensor_prompts(server, 3, 2, seed=4, replays=True)
    assert not found.faults
    assert (found.prompts, found.failed) == (3, {"replay": 1, "meeting": 1})


@pytest.mark.long
@pytest.mark.parametrize("replays", [False, True])
def test_prompts_of_both_ways_keep_their_bits_through_cancels_and_errors(
    replays: bool, server: Server, comfyui: Path
) -> None:
    make_files(server, comfyui)
    found = run_tensor_prompts(server, 12, 4, seed=4, replays=replays)
    assert not found.faults
    failed = {"replay": 2, "meeting": 2} if replays else {"meeting": 4}
    assert (found.prompts, found.failed) == (12, failed) and found.cancelled
