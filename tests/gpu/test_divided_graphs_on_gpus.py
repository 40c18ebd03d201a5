"""What two cards compute together, recorded as one CUDA graph and replayed, with each of torch's allocators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or torch.version.hip is not None, reason="needs two NVIDIA GPUs"
)

RECORDED = """
import runpy
runpy.run_path("bootstrap.py")["load_pack"]()
import torch
from devicebridge.parallel.local.graph_recorder import CardsRecorder
from devicebridge.parallel.transfer import SideStreams, settle

cards = [torch.device("cuda", index) for index in range(2)]
side, rows, width = SideStreams(), 512, 1024
given = [torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(card) for card in cards]
weights = [torch.randn(width, width, generator=torch.Generator().manual_seed(1 + i)).to(card) / 32
           for i, card in enumerate(cards)]
found = [torch.empty_like(each) for each in given]

def compute():
    now = list(given)
    for _ in range(4):
        parts, copies = [], []
        for rank, card in enumerate(cards):
            with torch.cuda.device(card):
                parts.append(torch.tanh(now[rank] @ weights[rank]))
                arrivals = {}
                copies.append((side.copy(parts[rank], cards[1 - rank], arrivals), arrivals))
        for rank, card in enumerate(cards):
            with torch.cuda.device(card):
                theirs, arrivals = copies[1 - rank]
                settle(arrivals, card)
                now[rank] = parts[0] + theirs if rank == 0 else theirs + parts[1]
    for rank, card in enumerate(cards):
        with torch.cuda.device(card):
            found[rank].copy_(now[rank])

with torch.inference_mode():
    compute()
    expected = [each.clone() for each in found]
    recorder = CardsRecorder(cards, side)
    replays = [recorder.record(compute) for _ in range(3)]
    for replay in replays * 2:
        for each in found:
            each.zero_()
        replay()
        assert all(map(torch.equal, found, expected))
    for each in given:
        each.mul_(2)
    replays[0]()
    assert not torch.equal(found[0], expected[0])
    assert torch.equal(found[0].cpu(), found[1].cpu())
"""


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_a_replay_gives_the_bits_of_what_was_launched_on_both_cards(backend, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"backend:{backend}")
    subprocess.run([sys.executable, "-c", RECORDED], cwd=ROOT, check=True, timeout=300)
