"""Blocks that two cards train together, recorded as CUDA graphs and replayed, against the same without graphs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from devicebridge.tests.shard_cases import make_divided
from devicebridge.tests.unit.parallel.test_training_graphs import steps

pytestmark = [
    pytest.mark.usefixtures("cards_wait"),
    pytest.mark.skipif(torch.cuda.device_count() < 2 or torch.version.hip is not None, reason="needs two NVIDIA GPUs"),
]
CARDS = [torch.device("cuda", index) for index in range(2)]


@pytest.mark.parametrize("name", ["flux2", "wan"])
def test_replays_give_what_is_computed(name: str) -> None:
    found, replays = [], []
    for is_replayed in (False, True):
        runner, lora = make_divided(name, CARDS, replays=True)
        runner.model.replays = is_replayed
        found.append(steps(runner, lora, name, count=10, microbatches=2))
        assert not runner.model.graphs.fault
        replays.append(runner.model.graphs.num_replays)
    assert replays[0] == 0 < replays[1]
    for plain, replayed in zip(*found, strict=True):
        assert (replayed - plain).norm() <= 1e-4 * plain.norm()


def test_so_they_do_with_the_drivers_allocator() -> None:
    """Which ComfyUI chooses; it is chosen when torch starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "flux2"]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0 and "1 passed" in found.stdout, found.stdout[-3000:] + found.stderr[-3000:]
