"""Training with several micro-batches in flight: the gradients, random numbers and errors of plain accumulation."""

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.local.bridge import Bridge
from devicebridge.parallel.local.pipeline import Pipeline
from devicebridge.parallel.local.workers import StageOrder, Work, num_held, plan_order
from devicebridge.parallel.offload.recompute import recompute
from devicebridge.parallel.runner import MicroBatch, Runner
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.placed import forward_of
from devicebridge.tests.streams import Clock, SimulatedMachine
from devicebridge.tests.tiny_split import assert_same, losses_of, make_micro_batches, make_tiny_split, outcome
from torch import nn

pytestmark = pytest.mark.usefixtures("no_thread_left")
FAMILY_NAMES = sorted(FAMILIES)
HOME, NEXT, THIRD = CARDS[:3]


def _step(name, cards, count, *, piped=False, ahead=0, **settings):
    with emulated_cards(4):
        model, split, lora = make_tiny_split(name, cards, **settings)
        losses = losses_of(split, make_micro_batches(model, name, count), ahead if piped else None)
        return outcome(losses, lora, cards)


@pytest.mark.parametrize(("name", "num_cards"), [*((name, 2) for name in FAMILY_NAMES), ("flux2", 1), ("flux2", 3)])
def test_losses_and_gradients_are_those_of_plain_accumulation_bit_for_bit(name, num_cards):
    cards = CARDS[:num_cards]
    assert_same(_step(name, cards, 4, piped=True), _step(name, cards, 4))


@pytest.mark.parametrize(
    ("count", "ahead"), [(1, 0), (2, 1), (3, 5), (5, 0), pytest.param(8, 1, marks=pytest.mark.long)]
)
def test_any_number_of_micro_batches_and_any_number_ahead(count, ahead):
    assert_same(_step("flux2", CARDS[:2], count, piped=True, ahead=ahead), _step("flux2", CARDS[:2], count))


@pytest.mark.parametrize(
    "settings",
    [{"checkpointing": False}, {"kept": (0, 2), "cuts": [1]}, pytest.param({"kept": (1, 0)}, marks=pytest.mark.long)],
    ids=str,
)
def test_without_recomputation_with_some_of_it_and_with_uneven_cuts(settings):
    plain = _step("flux2", CARDS[:2], 4, **settings)
    assert_same(_step("flux2", CARDS[:2], 4, piped=True, **settings), plain)
    assert_same(plain, _step("flux2", CARDS[:2], 4, **{**settings, "checkpointing": True, "kept": ()}))


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.long), True])
def test_dropout_draws_the_same_numbers_and_leaves_the_same_states(checkpointing):
    settings = {"dropout": 0.5, "checkpointing": checkpointing}
    expected = _step("flux2", CARDS[:2], 4, **settings)
    assert_same(_step("flux2", CARDS[:2], 4, piped=True, **settings), expected)
    without = _step("flux2", CARDS[:2], 4, checkpointing=checkpointing)
    assert not torch.equal(without[0][0], expected[0][0])


@pytest.mark.parametrize(
    ("name", "cards", "checkpointing", "trained"),
    [("flux2", 3, True, "stream_modulation*.linear"), ("wan", 2, False, "time_*"), ("wan", 3, True, "time_*")],
)
def test_what_crosses_to_several_devices_or_to_the_tail_gets_all_its_gradients(name, cards, checkpointing, trained):
    """FLUX.2 makes its modulation on the first card, and uses it on all. Wan mixes the time embedding into the stream
    after the last block. Sums are in another order."""
    settings = {"targets": (f"*{trained}*", "*to_q"), "checkpointing": checkpointing}
    expected = _step(name, CARDS[:1], 4, **settings)
    for piped in (True, False):
        found = _step(name, CARDS[:cards], 4, piped=piped, **settings)
        assert all(map(torch.equal, found[0], expected[0]))
        assert found[1].keys() == expected[1].keys() and sum("to_q" not in each for each in found[1]) >= 4
        for each, gradient in expected[1].items():
            assert gradient.abs().sum() > 0
            torch.testing.assert_close(found[1][each], gradient, rtol=1e-5, atol=1e-6 * gradient.abs().max().item())


def test_the_stages_follow_the_plan_and_two_work_at_once(monkeypatch):
    """Each microbatch leaves a stage for the next to enter: with 1f1b the second card is never ahead of its input."""
    with emulated_cards(4):
        model, split, _ = make_tiny_split("flux2", CARDS[:2])
        trace, begin = [], StageOrder.begin

        def note(order, stage, work, is_alone):
            begin(order, stage, work, is_alone)
            trace.append((stage, work))

        monkeypatch.setattr(StageOrder, "begin", note)
        Pipeline(model, split.bridge, ahead=0).run(make_micro_batches(model, "flux2", 4))
    plan = plan_order(2, 4, 0)
    for stage in (0, 1):
        assert [work for at, work in trace if at == stage] == plan[stage]


def test_a_micro_batch_that_must_be_alone_is():
    """Nobody else computes while it does, forwards or backwards; the numbers are the same."""
    with emulated_cards(2):
        model, bridge = _chain([HOME, NEXT])
        inside, most, at = [], {}, threading.local()
        lock = threading.Lock()

        def enter(module, args):
            with lock:
                inside.append(at.index)
                for index in inside:
                    most[index] = max(most.get(index, 0), len(set(inside)))
            time.sleep(0.01)

        def leave(module, args, output):
            with lock:
                inside.remove(at.index)

        def named(index, batch):
            def forward(x):
                at.index = index
                return batch.forward(x)

            return replace(batch, forward=forward)

        for block in model.blocks:
            block.register_forward_pre_hook(enter)
            block.register_forward_hook(leave)
        batches = [named(index, batch) for index, batch in enumerate(_chain_batches(model, bridge, 6))]
        Pipeline(model, bridge).run([replace(batch, is_alone=lambda x: True) for batch in batches])
        assert set(most.values()) == {1}
        most.clear()
        mixed = [replace(batch, is_alone=lambda x, i=i: i == 2) for i, batch in enumerate(batches)]
        Pipeline(model, bridge).run(mixed)
        assert most[2] == 1 and max(most.values()) == 2


def test_micro_batches_are_prepared_one_ahead_and_threads_are_few():
    """However many there are: a step of many video clips would else fill the host's pinned memory."""
    with emulated_cards(2):
        model, bridge = _chain([HOME, NEXT])
        prepared, begun, waiting, alive = [], [], [], []

        def prepare():
            prepared.append(1)
            waiting.append(len(prepared) - len(begun))
            alive.append(threading.active_count())
            return torch.ones(2, 4)

        model.blocks[0].register_forward_pre_hook(lambda module, args: begun.append(1))
        batches = [replace(batch, prepare=prepare) for batch in _chain_batches(model, bridge, 40)]
        before = threading.active_count()
        losses = Pipeline(model, bridge, ahead=0).run(batches)
        assert len(losses) == 40 and max(waiting) <= 3 and max(alive) - before <= 3 + 3


def test_another_generator_than_the_blocks_is_left_alone():
    """Somebody draws on the CPU between a block's forward and backward, and while it runs."""
    with emulated_cards(1):
        linear = nn.Linear(4, 4).to(HOME)
        linear.register_forward_hook(lambda *_: torch.rand(1) * 0 and None)
        out = recompute(linear, (torch.ones(2, 4).to(HOME),), HOME)
        before = torch.get_rng_state()
        expected = torch.rand(3), torch.rand(1)
        torch.set_rng_state(before)
        torch.rand(3)
        out.sum().backward()  # the hook draws once more
        assert not torch.equal(torch.rand(1), expected[1])


class _Chain(nn.Module):
    """reads: brings what the first block made to the tail, which takes it past its modules."""

    def __init__(self, blocks, reads=None):
        super().__init__()
        self.blocks, self.tail, self.reads = nn.ModuleList(blocks), nn.Identity(), reads

    def forward(self, x):
        first = None
        for block in self.blocks:
            x = block(x)
            if first is None and self.reads is not None:
                first = self.reads(x)
        return self.tail(x) if first is None else self.tail(x) * first


def _chain(devices):
    torch.manual_seed(0)
    model = _Chain([nn.Linear(4, 4) for _ in devices])
    blocks = {block.to(device): device for block, device in zip(model.blocks, devices, strict=True)}
    bridge = Bridge(blocks, devices[0], tail=[model.tail], tail_device=devices[-1])
    bridge.attach()
    return model, bridge


def _chain_batches(model, bridge, count, fail_at=None):
    def forward(x):
        with forward_of(bridge):
            loss = model(bridge.move(x, bridge.main_device)).square().mean()
        if fail_at is not None:
            raise fail_at
        return loss

    return [MicroBatch(lambda: torch.ones(2, 4), forward) for _ in range(count)]


def _makespan(machine, devices, count, *, pipelined, copy_cost=0.0, reads=None):
    """Time until all streams are idle, and races seen, of one step; a block's forward takes 1, its backward 2. reads:
    how the bridge brings what the first block made to the tail."""
    with emulated_cards(4), machine.installed():
        model, bridge = _chain(devices)
        if reads is not None:
            model.reads = lambda x: reads(bridge, x, devices[-1])
        batches = _chain_batches(model, bridge, count)
        with Clock(machine, copy_cost) as clock:
            runner = Pipeline(model, bridge, ahead=0) if pipelined else Runner(model, HOME)
            runner.run(batches)
        return max(stream.busy_until for stream in machine.default.values()), clock.races


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_step_takes_the_time_of_a_pipeline(machine, count):
    alone, races = _makespan(SimulatedMachine(4), [HOME, HOME, NEXT, NEXT], count, pipelined=False)
    assert races == 0 and alone == 11 * count  # 12, but nobody needs the gradient of the input
    together, races = _makespan(machine, [HOME, HOME, NEXT, NEXT], count, pipelined=True)
    assert races == 0 and together == 2 + 6 * count + 3  # first in, the slower card all the time, last out


def test_what_is_sent_to_the_tail_is_there_in_time_and_holds_up_no_card(machine):
    """To be settled at once would have the last card wait for the first, which is at a later micro-batch."""
    devices, step = [HOME, HOME, NEXT, NEXT, THIRD, THIRD], {"pipelined": True}
    without, races = _makespan(SimulatedMachine(4), devices, 8, **step)
    sent, more_races = _makespan(machine, devices, 8, reads=Bridge.send, **step)
    assert races == more_races == 0 and sent == without


def test_an_error_of_one_worker_is_raised_and_nothing_is_left():
    with emulated_cards(2):
        model, bridge = _chain([HOME, NEXT])
        with pytest.raises(ZeroDivisionError):
            Pipeline(model, bridge).run(_chain_batches(model, bridge, 4, fail_at=ZeroDivisionError()))
        assert bridge.traffic is None and not bridge.is_running
        Pipeline(model, bridge).run(_chain_batches(model, bridge, 4))  # and it can be used again


def test_a_model_that_comes_back_to_a_device_or_leaves_the_last_one_out_is_refused(monkeypatch):
    wait_for = threading.Condition.wait_for  # accepted, it would wait for ever
    monkeypatch.setattr(threading.Condition, "wait_for", lambda *args: wait_for(*args, timeout=5))
    with emulated_cards(2):
        model, bridge = _chain([HOME, NEXT, HOME, NEXT])
        with pytest.raises(RuntimeError, match="every device follows the one before it"):
            Pipeline(model, bridge).run(_chain_batches(model, bridge, 2))
        model, bridge = _chain([HOME, NEXT])
        model.blocks, model.tail = model.blocks[:1], nn.Sequential()
        with pytest.raises(RuntimeError, match="the forward ended on lazy:0"):
            Pipeline(model, bridge).run(_chain_batches(model, bridge, 2))


def test_memory_is_given_back_and_held_as_the_schedule_says():
    """Between forward and backward a stage holds what its micro-batches need; afterwards nothing."""
    with emulated_cards(4):
        model, split, _ = make_tiny_split("flux2", CARDS[:2], checkpointing=False)
        gc.collect()
        before = [live_bytes(card) for card in CARDS[:2]]
        refs = []

        def watch(module, args, kwargs, output):
            refs.append(weakref.ref(output[0] if isinstance(output, tuple) else output))

        handle = next(iter(split.bridge.blocks)).register_forward_hook(watch, with_kwargs=True)
        losses = Pipeline(model, split.bridge, ahead=0).run(make_micro_batches(model, "flux2", 6))
        handle.remove()
        model.zero_grad(set_to_none=True)
        del losses
        gc.collect()
        assert all(ref() is None for ref in refs) and len(refs) == 6
        assert [live_bytes(card) for card in CARDS[:2]] == before


CASES = [(n, m, ahead) for n in (1, 2, 3, 8) for m in (1, 2, 5, 8) for ahead in (0, 1)]


def _simulate(order):
    """Time at which each entry ends if F takes 1 and B takes 2, (stage, work) -> time; raises if nothing can go on."""
    ends, position, free_at = {}, [0] * len(order), [0.0] * len(order)
    while any(p < len(o) for p, o in zip(position, order, strict=True)):
        is_stuck = True
        for stage, entries in enumerate(order):
            if position[stage] == len(entries):
                continue
            work = entries[position[stage]]
            if work.is_backward:
                last = stage == len(order) - 1
                before = (stage, Work(False, work.microbatch)) if last else (stage + 1, work)
            else:
                before = (stage - 1, work) if stage else None
            if before is not None and before not in ends:
                continue
            start = max(free_at[stage], ends[before] if before else 0.0)
            ends[stage, work] = free_at[stage] = start + (2 if work.is_backward else 1)
            position[stage] += 1
            is_stuck = False
        assert not is_stuck, "the orders wait for each other"
    return ends


@pytest.mark.parametrize(("stages", "microbatches", "ahead"), CASES)
def test_every_micro_batch_goes_through_every_stage_once_in_order(stages, microbatches, ahead):
    order = plan_order(stages, microbatches, ahead)
    _simulate(order)
    assert len(order) == stages
    for entries in order:
        for is_backward in (False, True):
            assert [w.microbatch for w in entries if w.is_backward == is_backward] == list(range(microbatches))
    held = num_held(stages, microbatches, ahead)
    for entries, expected in zip(order, held, strict=True):
        count = most = 0
        for work in entries:
            count += -1 if work.is_backward else 1
            most = max(most, count)
        assert most == expected
    if not ahead:
        assert held == [min(stages - stage, microbatches) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (3, 8), (8, 16)])
def test_equal_stages_take_the_time_of_a_full_pipeline(stages, microbatches):
    ends = _simulate(plan_order(stages, microbatches))
    assert max(ends.values()) == 3 * (microbatches + stages - 1)
