"""Pictures that each of two cards computes alone, launched and replayed, with each of torch's allocators."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import pytest
import torch
from devicebridge.parallel.local.divided_graphs import RECORDED_AFTER
from devicebridge.tests.unit.parallel.test_divided_graphs import where
from devicebridge.tests.unit.parallel.test_pictures import fetch, fetch_copies, pictured
from devicebridge.tests.unit.parallel.test_tensor_parallel import WIDTH, Fused, Separate, difference, make_model, run

pytestmark = [
    pytest.mark.usefixtures("cards_wait"),
    pytest.mark.skipif(torch.cuda.device_count() < 2 or torch.version.hip is not None, reason="needs two NVIDIA GPUs"),
]
CARDS = [torch.device("cuda", index) for index in range(2)]


@pytest.mark.parametrize("fetched", [fetch, fetch_copies])
@pytest.mark.parametrize("blocks", [(Separate, Separate, Separate), (Fused, Fused, Fused, Fused)])
def test_each_card_computes_its_own_pictures(blocks, fetched) -> None:
    """A block that was not whole when it was computed, or was still read when the next one came, gives other bits."""
    model = make_model(*(block() for block in blocks)).to(CARDS[0])
    generator = torch.Generator(CARDS[0]).manual_seed(1)
    inputs = [torch.randn(2, 2048, WIDTH, device=CARDS[0], generator=generator) for _ in range(RECORDED_AFTER + 30)]
    with torch.inference_mode():
        alone = [torch.cat([model(x[:1] + 0), model(x[1:] + 0)]) for x in inputs]
    parallel = pictured(model, 2, devices=CARDS, fetch=fetched)
    pictures = parallel.pictures
    assert pictures is not None
    launched = [run(parallel, model, x + 0) for x in inputs]
    for found, expected in zip(launched, alone, strict=True):
        assert difference(found, expected) < 1e-5
    parallel.replay(where)
    assert pictures.graphs is not None
    for turn, (x, expected) in enumerate(zip(inputs, launched, strict=True)):
        assert torch.equal(run(parallel, model, x + 0), expected), turn
    assert pictures.graphs.num_replays > 10 * len(blocks) and not pictures.graphs.fault and not pictures.fault


@pytest.mark.parametrize("block", [Separate, Fused])
@pytest.mark.parametrize("what", ["nothing", "adds", "skips", "two forwards of unequal length"])
def test_its_own_pictures_while_the_others_are_still_to_come_home(block, what, monkeypatch) -> None:
    """Home and the stream on which pictures leave the other card are kept busy behind every block, the latter for
    longer: what a block reads too early, or writes to before it was copied, is something else then. So is what is read
    at home between blocks."""
    model = make_model(*(block() for _ in range(4))).to(CARDS[0])
    generator = torch.Generator(CARDS[0]).manual_seed(2)
    inputs = [torch.randn(2, 2048, WIDTH, device=CARDS[0], generator=generator) for _ in range(RECORDED_AFTER + 6)]
    parallel = pictured(model, 2, devices=CARDS)
    pictures = parallel.pictures
    assert pictures is not None
    seen: list[torch.Tensor] = []

    def between(index: int, stream: torch.Tensor) -> None:
        seen.append(stream + 0)
        leaving, _ = parallel.side_streams.pairs[CARDS[1], CARDS[0]]
        for busy, cycles in ((torch.cuda.current_stream(CARDS[0]), 10_000_000), (leaving, 40_000_000)):
            with torch.cuda.stream(busy):
                torch.cuda._sleep(cycles)  # about five milliseconds and twenty
        if what not in ("nothing", "skips") and index != 1:
            stream[:, 5:] += 0.5

    def both(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            jobs = [functools.partial(run, parallel, model, each + 0, between) for each in (x[:1], x[1:, :1200])]
            return torch.cat([each.flatten() for each in (*parallel.run_in_lockstep(jobs), *seen)])

    def outputs(x: torch.Tensor) -> torch.Tensor:
        blocks = model.blocks
        if what == "skips":
            run(parallel, model, x + 0)
            model.blocks = blocks[:1] + blocks[2:]
        seen.clear()
        if what == "two forwards of unequal length":
            return both(x)
        try:
            return torch.cat([run(parallel, model, x + 0, between), *seen], dim=-1)
        finally:
            model.blocks = blocks

    launched = [outputs(x) for x in inputs]
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: torch.cuda.synchronize())
    for x, found in zip(inputs, launched, strict=True):
        assert torch.equal(found, outputs(x))
    monkeypatch.undo()
    parallel.replay(where)
    torch.cuda.synchronize()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    for x in inputs:  # blocks are recorded where cards wait for the host
        outputs(x)
    monkeypatch.undo()
    for turn, (x, expected) in enumerate(zip(inputs, launched, strict=True)):
        assert torch.equal(outputs(x), expected), turn
    assert pictures.graphs is not None
    assert pictures.graphs.num_replays > 20 and not pictures.graphs.fault and not pictures.fault


def test_so_they_do_with_the_drivers_allocator() -> None:
    """Which ComfyUI chooses; it is chosen when torch starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "own_pictures"]
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0 and "12 passed" in found.stdout, found.stdout[-3000:] + found.stderr[-3000:]
