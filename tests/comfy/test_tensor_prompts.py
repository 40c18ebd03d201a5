"""A fixed, short part of what scripts/soak.py plays: prompts that alternate way, LoRA, size, Cancel and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from devicebridge.tests.comfy.server import Server
from devicebridge.tests.comfy.tensor_prompts import make_files, run_tensor_prompts

pytestmark = pytest.mark.comfy


@pytest.mark.long
def test_prompts_of_both_ways_keep_their_bits_through_cancels_and_errors(server: Server, comfyui: Path) -> None:
    make_files(server, comfyui)
    found = run_tensor_prompts(server, 12, 4, seed=4)
    assert not found.faults
    assert (found.prompts, found.failed) == (12, 4) and found.cancelled
