"""Blocks that two cards compute together, recorded as one CUDA graph and replayed."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from devicebridge.parallel.local.graphs import RECORDED_AFTER
from devicebridge.parallel.local.shards import Slice, divide_block, find_plan, shares_of
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.placed import forward_of
from devicebridge.tests.unit.parallel.test_graphs import where
from devicebridge.tests.unit.parallel.test_tensor_parallel import PLANS, WIDTH, Fused, Separate, make_model

ROOT = Path(__file__).resolve().parents[2]
CARDS = [torch.device("cuda", index) for index in range(2)]

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or torch.version.hip is not None, reason="needs two NVIDIA GPUs"
)

RECORDED = """
import functools, runpy, sys
runpy.run_path("bootstrap.py")["load_pack"]()
import torch
from torch import nn
from devicebridge.parallel.local.tensor_parallel import ForwardWorkers
from devicebridge.parallel.local.graph_recorder import GraphRecorder
from devicebridge.parallel.local.workers import ThreadPool
from devicebridge.parallel.staged_copies import SideStreams

cards = [torch.device("cuda", index) for index in range(2)]
side, rows, width = SideStreams(), 512, 1024
given = [torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(card) for card in cards]
weights = [torch.randn(width, width, generator=torch.Generator().manual_seed(1 + i)).to(card) / 32
           for i, card in enumerate(cards)]
found = [torch.empty_like(each) for each in given]

def send(tensors, rank, arrivals):
    return side.copies(tensors, cards[rank], arrivals)

def compute(rank):
    now = given[rank]
    for number in range(4):
        now = workers.collective.all_reduce(rank, f"sum {number}", torch.tanh(now @ weights[rank]))
    found[rank].copy_(now)

with torch.inference_mode():
    workers = ForwardWorkers(ThreadPool(), cards, send, sys.argv[1])
    run = functools.partial(workers.run, nn.Identity())
    work = [functools.partial(compute, rank) for rank in range(2)]
    run(work)
    expected = [each.clone() for each in found]
    recorder = GraphRecorder(cards, side)
    replays = [recorder.record(run, work) for _ in range(3)]
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
    workers.close()
"""


@pytest.mark.parametrize("exchange", ["full", "8-bit"])
@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync"])
def test_a_replay_gives_the_bits_of_what_was_launched_on_both_cards(backend, exchange, monkeypatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"backend:{backend}")
    subprocess.run([sys.executable, "-c", RECORDED, exchange], cwd=ROOT, check=True, timeout=300)


def _copied(weight: torch.Tensor, part: Slice) -> torch.Tensor:
    return part.copied(weight)


@pytest.mark.usefixtures("cards_wait")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_model_with_replayed_blocks_gives_the_bits_of_launched_ones(mode) -> None:
    model = make_model(Separate(), Fused(), Fused(), Separate())
    shards = {}
    for block in model.blocks:
        plan = find_plan(PLANS, block)
        assert plan is not None
        shares = shares_of(block, plan, 2)
        other = divide_block(copy.deepcopy(block), plan, shares, 1, _copied)
        own = divide_block(block, plan, shares, 0, _copied)
        for card, part in zip(CARDS, (own, other), strict=True):
            part.block.to(card)
        shards[block] = own, [other]
    model.to(CARDS[0])
    parallel = TensorParallel(CARDS, shards, addresses=where)
    parallel.attach()
    graphs = parallel.graphs
    if graphs is None:
        pytest.skip("these cards do not copy to each other directly")
    for seed in range(RECORDED_AFTER + 6):
        x = torch.randn(2, 700, WIDTH, generator=torch.Generator().manual_seed(seed)).to(CARDS[0])
        outputs = []
        for parallel.graphs in (graphs, None):
            with mode(), forward_of(parallel):
                outputs.append(model(x))
        parallel.graphs = graphs
        assert torch.equal(*outputs), seed
    assert graphs.num_replays >= 8 and not graphs.fault, graphs.fault
    parallel.remove()
