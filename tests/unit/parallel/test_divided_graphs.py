"""Blocks of several devices that are replayed, against those that are computed, in float32 on the CPU.

There are no CUDA graphs on a CPU. What stands for the recorder computes on the recording's own inputs at every replay:
all that graphs fix is fixed there, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devicebridge.parallel.local import device_workers
from devicebridge.parallel.local.divided_graphs import RECORDED_AFTER, DividedGraphs
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.unit.parallel.test_tensor_parallel import (
    WIDTH,
    Fused,
    Separate,
    divide,
    make_model,
)
from torch import nn

pytestmark = pytest.mark.skipif(device_workers.greenlet is None, reason="greenlet is not installed")


class StandIn:
    """Computes anew what it was given to record; recording leaves its inputs as they were."""

    def __init__(self, owner: list[DividedGraphs]) -> None:
        self.owner, self.num_recorded, self.cards_wait = owner, 0, True

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        staged = self.owner[0]._staged
        before = {key: tensor.clone() for key, tensor in staged.items()}
        compute()
        for key, tensor in before.items():
            staged[key].data.copy_(tensor)
        self.num_recorded += 1
        return compute

    def mark(self) -> Callable[[], bool]:
        return lambda: self.cards_wait


def addresses(layer: nn.Module, device: torch.device) -> tuple[int, ...]:
    return tuple(parameter.data_ptr() for parameter in layer.parameters())


def replaying(parallel: TensorParallel, where: Callable[..., Any] = addresses) -> tuple[DividedGraphs, StandIn]:
    owner: list[DividedGraphs] = []
    recorder = StandIn(owner)
    owner.append(DividedGraphs(parallel.devices, lambda: recorder, where))
    parallel.graphs = owner[0]
    return owner[0], recorder


def inputs(number: int) -> list[torch.Tensor]:
    return [torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(number)]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize(
    "blocks", [(Separate, Fused, Fused, Separate), (Fused, Separate)], ids=["separate first", "fused first"]
)
def test_replays_give_the_bits_of_what_is_computed(blocks, size, mode) -> None:
    """A fused block writes into what it is given; the first one's is the model's own, without a version."""
    model = make_model(*(block() for block in blocks))
    other = copy.deepcopy(model)
    plain, parallel = divide(other, size), divide(model, size)
    graphs, recorder = replaying(parallel)
    for number, x in enumerate(inputs(RECORDED_AFTER + 6)):
        with mode(), parallel.forward():
            found = model(x)
        with mode(), plain.forward():
            expected = other(x)
        assert torch.equal(found, expected), number
    assert recorder.num_recorded == len(blocks) and graphs.num_replays >= 3 * len(blocks) and not graphs.fault
