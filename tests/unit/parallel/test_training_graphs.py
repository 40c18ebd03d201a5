"""Blocks that devices train together and that are replayed, against those that are computed, on the CPU.

There are no CUDA graphs on a CPU. What stands for the recorder computes on the recording's own inputs at every replay:
all that graphs fix is fixed there, too.
"""

from __future__ import annotations

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.tests.shard_cases import make_divided
from devicebridge.tests.stand_in_recorder import TogetherStandIn
from devicebridge.tests.tiny_split import make_batches_for

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")


def steps(runner, lora, name, count=6, microbatches=1):
    """Losses and gradients of some steps, the LoRA changed between them as an optimizer does it, in place."""
    found = []
    for number in range(count):
        losses = runner.run(make_batches_for(runner.replica_for, name, microbatches, 10 * number))
        parameters = lora.parameters().values()
        found += [*losses, *(each.grad.clone() for each in parameters)]
        with torch.no_grad():
            for each in parameters:
                each.sub_(0.05 * each.grad)
                each.grad = None
        runner.sync()
    return found


@pytest.mark.parametrize("num_cards", [2, 3])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_replays_give_the_bits_of_what_is_computed(name, num_cards):
    recorder = TogetherStandIn()
    plain = steps(*make_divided(name, [CPU] * num_cards), name, microbatches=2)
    runner, lora = make_divided(name, [CPU] * num_cards, recorder=recorder)
    found = steps(runner, lora, name, microbatches=2)
    assert all(map(torch.equal, found, plain)) and len(found) == len(plain) > 100
    graphs = runner.model.graphs
    assert not graphs.fault and recorder.num_recorded >= 4 and graphs.num_replays > 4 * recorder.num_recorded
