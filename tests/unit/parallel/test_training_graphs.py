"""Blocks that devices train together and that are replayed, against those that are computed, on the CPU.

There are no CUDA graphs on a CPU. What stands for the recorder computes on the recording's own inputs at every replay:
all that graphs fix is fixed there, too.
"""

from __future__ import annotations

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.local.divided_calls import Part
from devicebridge.parallel.local.training_graphs import TrainingGraphs
from devicebridge.parallel.offload.in_place import InPlaceGuard
from devicebridge.patches.hooks import map_tensors
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
    assert graphs.num_recorded == recorder.num_recorded
    assert not graphs.fault and recorder.num_recorded >= 4 and graphs.num_replays > 4 * recorder.num_recorded


def ready(recorder, name="flux2", **settings):
    """A runner whose blocks were recorded, and its LoRA."""
    runner, lora = make_divided(name, [CPU] * 2, recorder=recorder, **settings)
    steps(runner, lora, name, count=4)
    return runner, lora, runner.model.graphs


def test_blocks_are_launched_while_the_first_card_is_busy():
    recorder = TogetherStandIn()
    recorder.cards_wait = False
    _, _, graphs = ready(recorder)
    assert recorder.num_recorded == graphs.num_replays == 0 and not graphs.fault


@pytest.mark.parametrize("settings", [{"checkpointing": False}, {"kept": 4}, {"offload": True}], ids=str)
def test_blocks_that_keep_their_activations_or_have_them_on_the_host_are_launched(settings):
    recorder = TogetherStandIn()
    _, _, graphs = ready(recorder, **settings)
    assert recorder.num_recorded == graphs.num_replays == 0 and not graphs.fault


@pytest.mark.parametrize("rank", [0, 1])
def test_a_device_that_cannot_be_recorded_ends_recording_and_not_the_step(rank, caplog):
    """The step is that of launched blocks, and so are all that follow."""
    plain = steps(*make_divided("flux2", [CPU] * 2), "flux2")
    recorder = TogetherStandIn()
    recorder.fails_on = rank
    runner, lora = make_divided("flux2", [CPU] * 2, recorder=recorder)
    assert all(map(torch.equal, steps(runner, lora, "flux2"), plain))
    graphs = runner.model.graphs
    assert f"device {rank} cannot be recorded" in graphs.fault and graphs.num_replays == 0
    assert recorder.num_recorded == 1 and caplog.text.count("are not replayed as CUDA graphs") == 1


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_what_a_replay_finds_otherwise_is_not_used(what, monkeypatch):
    """As where a kernel in the graph reads what is not there any more."""
    plain = steps(*make_divided("flux2", [CPU] * 2), "flux2")
    own, calls = getattr(Part, f"compute_{what}"), []

    def bent(part):
        own(part)
        calls.append(part)
        if calls.count(part) == 2:  # the first replay
            next(each for each in (part.outputs if what == "forward" else part.found) if each is not None).mul_(1.1)

    monkeypatch.setattr(Part, f"compute_{what}", bent)
    runner, lora = make_divided("flux2", [CPU] * 2, recorder=TogetherStandIn())
    assert all(map(torch.equal, steps(runner, lora, "flux2"), plain))
    assert "gives something else when it is replayed" in runner.model.graphs.fault


def test_weights_that_have_moved_are_recorded_anew():
    recorder = TogetherStandIn()
    runner, lora, graphs = ready(recorder)
    before = recorder.num_recorded
    other, other_lora = make_divided("flux2", [CPU] * 2)
    steps(other, other_lora, "flux2", count=4)
    for each in (runner, other):
        for tree in each.model.trees:
            weight = next(p for n, p in tree.named_parameters() if n.endswith("attn.to_q.base_layer.weight"))
            weight.data = 2 * weight.data
    assert all(map(torch.equal, steps(runner, lora, "flux2", count=4), steps(other, other_lora, "flux2", count=4)))
    assert recorder.num_recorded == 2 * before and not graphs.fault


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_a_device_in_a_replayed_step_ends_it_for_all_and_the_next_step_works(rank):
    recorder = TogetherStandIn()
    runner, lora, graphs = ready(recorder)
    failing = runner.model.trees[rank].norm_out
    handle = failing.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        steps(runner, lora, "flux2", count=1)
    handle.remove()
    other, other_lora = make_divided("flux2", [CPU] * 2)
    steps(other, other_lora, "flux2", count=4)
    assert all(map(torch.equal, steps(runner, lora, "flux2", count=2), steps(other, other_lora, "flux2", count=2)))
    assert not graphs.fault and graphs.num_replays


def test_nothing_of_a_step_is_held_when_it_is_over():
    _, _, graphs = ready(TogetherStandIn())
    assert graphs.num_replays and not any(graphs._held)


def test_random_numbers_are_not_recorded():
    """Of a block that draws some beside its dropout, which divided models refuse."""
    recorder = TogetherStandIn()
    runner, lora = make_divided("flux2", [CPU] * 2, recorder=recorder)
    for tree in runner.model.trees:
        for name, module in tree.named_modules():
            if name.endswith("attn.to_q"):
                module.register_forward_hook(lambda module, args, output: output + 0 * torch.rand(()))
    steps(runner, lora, "flux2", count=6)
    graphs = runner.model.graphs
    assert {call.name.partition(".")[0] for call in graphs._calls.values() if call.forward.replay is None} == {
        "transformer_blocks"
    }
    assert {call.name.partition(".")[0] for call in graphs._calls.values() if call.forward.replay is not None} == {
        "single_transformer_blocks"
    }


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["x_embedder", "norm_out", "single_transformer_blocks.0.attn.to_out"])
def test_an_error_in_the_first_step_leaves_no_device_knowing_more_than_another(rank, where):
    runner, lora = make_divided("flux2", [CPU] * 2, recorder=TogetherStandIn())
    failing = runner.model.trees[rank].get_submodule(where)
    handle = failing.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        steps(runner, lora, "flux2", count=1)
    handle.remove()
    plain = steps(*make_divided("flux2", [CPU] * 2), "flux2")
    assert all(map(torch.equal, steps(runner, lora, "flux2"), plain))
    assert runner.model.graphs.num_replays and not runner.model.graphs.fault


def test_calls_that_differ_between_devices_are_computed(monkeypatch):
    """What one is given has other strides, as a copy on another card may."""
    own = TrainingGraphs.recompute

    def strided(tensor):
        return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor

    def recompute(self, rank, block, args, *more):
        return own(self, rank, block, map_tensors(args, strided) if rank else args, *more)

    monkeypatch.setattr(TrainingGraphs, "recompute", recompute)
    recorder = TogetherStandIn()
    runner, lora, graphs = ready(recorder)
    assert recorder.num_recorded == graphs.num_replays == 0 and not graphs.fault


def test_guards_of_in_place_blocks_learn_nothing_inside_a_recording(monkeypatch):
    """They compare tensors then, which no graph can hold."""
    recorder, inside, learned = TogetherStandIn(), [], []
    record, learn = recorder.record, InPlaceGuard._learn

    def noted_record(*args):
        inside.append(None)
        try:
            return record(*args)
        finally:
            inside.pop()

    def noted_learn(*args):
        learned.append(bool(inside))
        return learn(*args)

    monkeypatch.setattr(recorder, "record", noted_record)
    monkeypatch.setattr(InPlaceGuard, "_learn", noted_learn)
    runner, lora = make_divided("flux2", [CPU] * 2, recorder=recorder)
    for block in (block for names in runner.model.graphs._names for block in names):
        block.forward = InPlaceGuard(block, ())
    steps(runner, lora, "flux2")
    assert recorder.num_recorded and learned and not any(learned) and not runner.model.graphs.fault
