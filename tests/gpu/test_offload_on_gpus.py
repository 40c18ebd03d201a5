"""Block inputs in pinned host memory on real GPUs: some tests need one, the jobs two; skipped elsewhere."""

import gc

import pytest
import torch
from devicebridge.jobs.job import run_job
from devicebridge.parallel.local import bridge
from devicebridge.parallel.offload.activations import NUM_WAITING, ActivationOffload
from devicebridge.parallel.offload.recompute import recompute
from devicebridge.tests.gpu.conftest import NUM_GPUS
from devicebridge.tests.tiny_pipeline import make_tiny_job
from torch import nn

_NEEDS_ONE = pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU; torch sees 0 here")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic_algorithms"), _NEEDS_ONE]

NUM_BLOCKS, NUM_BATCHES = 16, 3


class _Block(nn.Module):
    """With is_heavy a matrix product, else kernels that end long before a copy over the bus."""

    def __init__(self, width: int, *, is_heavy: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False) if is_heavy else None
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        y = x if self.linear is None else self.linear(x)
        return torch.sin(y * self.scale + table) + x


def train(device, store, shape, *, is_heavy):
    torch.manual_seed(0)
    blocks = nn.ModuleList(_Block(shape[-1], is_heavy=is_heavy) for _ in range(NUM_BLOCKS)).to(device)
    table = torch.linspace(-1, 1, shape[-1]).expand(shape).contiguous().to(device)
    for _ in range(2):
        losses = []
        for batch in range(NUM_BATCHES):
            x = torch.linspace(-1, 1, shape[-1]).mul(batch + 1).expand(shape).contiguous().to(device)
            for block in blocks:
                x = recompute(block, (x, table), device, store)
            losses.append(x.square().mean())
            del x
        for loss in losses:
            loss.backward()
    return [parameter.grad.cpu() for parameter in blocks.parameters()]


@pytest.mark.parametrize("is_heavy", [False, True])
def test_gradients_are_bitwise_those_without_and_the_peak_is_lower(is_heavy):
    """Light kernels let copies lag behind, so that whatever is freed too early is overwritten."""
    device, shape = torch.device("cuda", 0), (1, 4096, 1024)
    store = ActivationOffload([device])
    found, peaks = {}, {}
    torch.cuda.init()
    for name, each in (("plain", None), ("offloaded", store)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        found[name] = train(device, each, shape, is_heavy=is_heavy)
        torch.cuda.synchronize(device)
        peaks[name] = torch.cuda.max_memory_allocated(device) - before
    assert all(torch.equal(a, b) for a, b in zip(found["plain"], found["offloaded"], strict=True))
    size = 4096 * 1024 * 4
    away = NUM_BATCHES * NUM_BLOCKS - (2 + 2 * NUM_WAITING)
    assert peaks["plain"] - peaks["offloaded"] > 0.8 * away * size
    assert store.host_bytes <= NUM_BATCHES * NUM_BLOCKS * size
    store.close()
    gc.collect()
    assert store.host_bytes == 0


def test_buffers_are_pinned():
    store, device = ActivationOffload([torch.device("cuda", 0)]), torch.device("cuda", 0)
    kept = [store.keep([torch.ones(2**19, device=device)], device)[0] for _ in range(4)]
    (pool,) = (each.pool for each in store._devices.values())
    assert all(buffer.is_pinned for buffer in pool._all) and len(pool._all) == 3
    assert all(torch.equal(handle.fetch([])[0].cpu(), torch.ones(2**19)) for handle in reversed(kept))
    store.close()


@pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two GPUs; torch sees {NUM_GPUS} here")
@pytest.mark.parametrize("name", ["flux2", "wan"])
def test_jobs_over_two_gpus_are_those_without_bit_for_bit(name, tmp_path, monkeypatch):
    """With dropout, in every schedule."""

    class All(ActivationOffload):
        def __init__(self, devices: tuple[torch.device, ...], *, min_bytes: int) -> None:
            super().__init__(devices, min_bytes=1)

    monkeypatch.setattr(bridge, "ActivationOffload", All)
    train = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 4, "seed": 3}
    results = []
    for strategy, asked in (("none", "off"), ("none", "on"), ("pipeline", "on")):
        job = make_tiny_job(
            tmp_path, name,
            split={
                "devices": ["cuda:0", "cuda:1"], "blocks_without_checkpointing": [0, 0], "balance": "manual",
                "split_at": [1],
            },
            train={**train, "offload_activations": asked}, lora={"dropout": 0.3}, parallel={"strategy": strategy},
            output={"folder": str(tmp_path / f"{strategy}-{asked}")},
        )  # fmt: skip
        results.append(run_job(job))
    for found in results[1:]:
        assert found.losses == results[0].losses and found.eval_after == results[0].eval_after
        assert all(torch.equal(found.lora[key], results[0].lora[key]) for key in found.lora)
