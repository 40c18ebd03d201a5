"""Replayed blocks: the numbers of plain ones, slots for what is in flight, and what is refused. Recordings are run anew
here; what only a card does is in tests/gpu/test_cuda_graphs_on_gpus.py."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
from devicebridge import assembly
from devicebridge.jobs import checked_job as job_plan
from devicebridge.jobs.job import plan_job, run_job
from devicebridge.parallel.local.pipeline import Pipeline
from devicebridge.patches import cuda_graphs
from devicebridge.patches.cuda_graphs import apply_cuda_graphs, cuda_graphs_fault, graph_if_possible
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.report import describe_plan, plan_values
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.tiny_pipeline import encoded_before, make_tiny_job
from devicebridge.tests.tiny_split import make_micro_batches, make_tiny_split
from torch import nn

pytestmark = pytest.mark.usefixtures("short_texts")

CPU = torch.device("cpu")


class RunsAnew:
    """A recorder for devices without graphs: a replay computes once more, from the tensors that a graph would read."""

    def __init__(self, device=CPU):
        self.num_recorded = self.num_replayed = 0

    def make_pool(self):
        return object()

    def aside(self):
        return contextlib.nullcontext()

    def record(self, compute, pool):
        self.num_recorded += 1
        compute = weakref.WeakMethod(compute)  # a graph does not refer to what it was recorded by

        def replay():
            self.num_replayed += 1
            compute()()

        return replay


def _graphed(split):
    handle = apply_cuda_graphs(split.kept_blocks, RunsAnew)
    handle.is_on = True
    return handle


def _steps(name, cards, count, *, kind=None, graphs=False, num_steps=3, **settings):
    """Losses and gradients of several steps, between which the LoRA changes."""
    with emulated_cards(4):
        model, split, lora = make_tiny_split(name, cards, **settings)
        handle = _graphed(split) if graphs else None
        found, slots = [], []
        for step in range(num_steps):
            batches = make_micro_batches(model, name, count)
            if handle is not None:
                handle.start_step()
            if kind is None:
                losses = []
                for batch in batches:
                    losses.append(batch.forward(batch.prepare()))
                    losses[-1].backward()
            else:
                losses = Pipeline(model, split.bridge).run(batches)
            gradients = {key: on_cpu(parameter.grad) for key, parameter in lora.parameters().items()}
            found.append(([on_cpu(loss.detach()) for loss in losses], gradients))
            for parameter in lora.parameters().values():
                with torch.no_grad():
                    parameter.add_(0.1 * (step + 1) * torch.ones_like(parameter))
                parameter.grad = None
        if handle is not None:
            assert handle.fault == ""
            slots = list(handle.num_slots.values())
            recorders = [card.recorder for card in handle._cards.values()]
            assert all(r.num_recorded > 0 and r.num_replayed > r.num_recorded for r in recorders)
            handle.remove()
        return found, slots


def _assert_equal(found, expected):
    for (losses, gradients), (others, other_gradients) in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
        assert all(torch.equal(gradients[key], other_gradients[key]) for key in other_gradients)
        assert all(gradient.abs().sum() > 0 for gradient in other_gradients.values())


@pytest.mark.parametrize("name", ["flux2", "wan", pytest.param("flux1", marks=pytest.mark.long)])
def test_losses_and_gradients_of_every_family_are_those_of_plain_blocks_bit_for_bit(name):
    settings = {"checkpointing": False}
    expected, _ = _steps(name, CARDS[:2], 4, **settings)
    found, slots = _steps(name, CARDS[:2], 4, kind="1f1b", graphs=True, **settings)
    _assert_equal(found, expected)
    assert slots == [3, 1]


@pytest.mark.parametrize(
    ("kind", "settings", "slots"),
    [
        (None, {"checkpointing": False}, [1, 1]),
        ("1f1b", {"checkpointing": False}, [3, 1]),
        ("1f1b", {"kept": (1, 2)}, [3, 1]),
        ("1f1b", {"kept": (0, 2)}, [1]),
    ],
    ids=str,
)
def test_any_schedule_and_any_number_of_kept_blocks(kind, settings, slots):
    expected, _ = _steps("flux2", CARDS[:2], 4, **settings)
    found, made = _steps("flux2", CARDS[:2], 4, kind=kind, graphs=True, **settings)
    _assert_equal(found, expected)
    assert made == slots


# ---- blocks of our own, on the CPU


class Block(nn.Module):
    """Two streams, one of which may go no further; a constant; a parameter that is trained and one that is not."""

    def __init__(self, seed, passes_text=True):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.trained = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.frozen = nn.Parameter(torch.randn(4, 4, generator=generator), requires_grad=False)
        self.text = nn.Parameter(torch.randn(4, generator=generator))
        self.passes_text = passes_text

    def forward(self, image, text, constant=None, scale=1.0):
        mixed = torch.tanh(image @ self.trained + text @ self.frozen) * constant * scale
        return image + mixed, (text * self.text if self.passes_text else None), constant.sum()


class Chain(nn.Module):
    def __init__(self, num_blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, passes_text=True) for index in range(num_blocks))

    def forward(self, image, text):
        constant = torch.linspace(0.5, 1.5, 4)
        for block in self.blocks:
            image, text, _ = block(image, text, constant=constant)
        return image


def _chain(num_blocks=3, recorder=RunsAnew):
    chain = Chain(num_blocks)
    handle = apply_cuda_graphs(dict.fromkeys(chain.blocks, CPU), recorder)
    handle.is_on = True
    return chain, handle


def _inputs(seed=0, rows=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 4, generator=generator, requires_grad=True) for _ in range(2)]


def _gradients_of(chain, inputs):
    """By plain blocks if the chain is none's."""
    leaves = [*inputs, *(p for p in chain.parameters() if p.requires_grad)]
    return torch.autograd.grad(chain(*inputs).square().sum(), leaves, allow_unused=True)


def _assert_alike(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


def _expected(seed=0, rows=5, num_blocks=3):
    return _gradients_of(Chain(num_blocks), _inputs(seed, rows))


def test_gradients_of_inputs_and_parameters_and_none_where_there_is_none():
    """The last text goes nowhere: what only it needs has no gradient, replayed or not."""
    chain, handle = _chain()
    for seed in range(3):
        handle.start_step()
        expected = _expected(seed)
        assert expected[-1] is None
        _assert_alike(_gradients_of(chain, _inputs(seed)), expected)
    assert list(handle.num_slots.values()) == [1] and handle.fault == ""


def test_nothing_that_is_handed_out_is_written_by_the_next_replay():
    chain, handle = _chain()
    outputs, gradients = [], []
    for seed in range(3):
        handle.start_step()
        inputs = _inputs(seed)
        outputs.append(chain(*inputs))
        gradients.append(torch.autograd.grad(outputs[-1].sum(), [*inputs, chain.blocks[0].trained]))
    plain = Chain()
    for seed in range(3):
        inputs = _inputs(seed)
        output = plain(*inputs)
        assert torch.equal(outputs[seed], output)
        _assert_alike(gradients[seed], torch.autograd.grad(output.sum(), [*inputs, plain.blocks[0].trained]))


def test_accumulated_gradients_are_sums():
    """A gradient that autograd takes over must be nobody else's."""
    chain, handle = _chain()
    plain = Chain()
    for seed in range(3):
        for each in (chain, plain):
            each(*_inputs(seed)).square().sum().backward()
    for one, other in zip(chain.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None) and (one.grad is None or torch.equal(one.grad, other.grad))


@pytest.mark.parametrize(
    "kind", ["another shape", "no input has gradients", "another constant", "no gradients", "autocast"]
)
def test_other_calls_run_as_ever(kind):
    chain, handle = _chain()
    _gradients_of(chain, _inputs())
    num_replayed = handle._cards[CPU].recorder.num_replayed
    if kind == "another shape":
        _assert_alike(_gradients_of(chain, _inputs(rows=7)), _expected(rows=7))
    elif kind == "no input has gradients":
        detached = [each.detach() for each in _inputs()]
        assert torch.equal(chain(*detached), Chain()(*detached))
    elif kind == "another constant":
        image, text = _inputs()
        found = chain.blocks[0](image, text, constant=torch.ones(4), scale=2.0)[0]
        assert torch.equal(found, Block(0)(image, text, constant=torch.ones(4), scale=2.0)[0])
    elif kind == "no gradients":
        with torch.no_grad():
            assert torch.equal(chain(*_inputs()), Chain()(*_inputs()))
    else:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(chain(*_inputs()), Chain()(*_inputs()))
    assert handle._cards[CPU].recorder.num_replayed == num_replayed
    handle.start_step()
    _assert_alike(_gradients_of(chain, _inputs(1)), _expected(1))
    assert handle._cards[CPU].recorder.num_replayed > num_replayed


def test_micro_batches_in_flight_have_slots_of_their_own():
    chain, handle = _chain()
    for _ in range(2):
        handle.start_step()
        inputs = [_inputs(seed) for seed in range(3)]
        outputs = [chain(*each) for each in inputs]
        for seed in (1, 0, 2):  # in whatever order they come back
            leaves = [*inputs[seed], *(p for p in chain.parameters() if p.requires_grad)]
            _assert_alike(torch.autograd.grad(outputs[seed].square().sum(), leaves, allow_unused=True), _expected(seed))
    assert list(handle.num_slots.values()) == [3]


class GivesSomethingElse(RunsAnew):
    """From one recording on, what is replayed is off."""

    at = 0

    def record(self, compute, pool):
        replay = super().record(compute, pool)
        number, call, is_forward = self.num_recorded - 1, weakref.ref(compute.__self__), "forward" in compute.__name__

        def off():
            replay()
            if number == self.at:
                (call()._outputs if is_forward else call()._found)[0].mul_(1.1)

        return off


class CannotRecord(RunsAnew):
    at = 0

    def record(self, compute, pool):
        if self.num_recorded == self.at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(compute, pool)


@pytest.mark.parametrize("at", range(6))  # three forwards, three backwards
@pytest.mark.parametrize("recorder", [GivesSomethingElse, CannotRecord])
def test_what_cannot_be_recorded_or_comes_out_wrong_is_not_replayed(recorder, at, caplog, monkeypatch):
    monkeypatch.setattr(recorder, "at", at)
    chain, handle = _chain(recorder=recorder)
    for seed in range(3):
        handle.start_step()
        _assert_alike(_gradients_of(chain, _inputs(seed)), _expected(seed))
    words = "something else" if recorder is GivesSomethingElse else "not permitted"
    assert words in handle.fault and caplog.text.count("no longer replayed") == 1


def test_another_order_than_the_recorded_one_is_refused():
    chain, handle = _chain()
    _gradients_of(chain, _inputs())
    handle.start_step()
    output = chain(*_inputs())
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="another order"):
        output.sum().backward()


def test_a_constant_that_blocks_no_longer_share_is_refused():
    chain, handle = _chain()
    _gradients_of(chain, _inputs())
    handle.start_step()
    image, text, _ = chain.blocks[0](*_inputs(), constant=torch.linspace(0.5, 1.5, 4))
    with pytest.raises(RuntimeError, match="other tensors"):
        chain.blocks[1](image, text, constant=torch.ones(4))


def test_a_constant_that_is_changed_between_two_blocks_is_two():
    """Recorded as two where it was; refused where it was not."""
    constant = torch.ones(4)

    def forward(chain, changes):
        constant.fill_(1.0)
        image, text, _ = chain.blocks[0](*_inputs(), constant=constant)
        if changes:
            constant.mul_(2)
        return chain.blocks[1](image, text, constant=constant)[0]

    chain, handle = _chain(2)
    for _ in range(2):
        handle.start_step()
        found = forward(chain, True)
        found.sum().backward()
        assert torch.equal(found, forward(Chain(2), True))
    other, handle = _chain(2)
    forward(other, False).sum().backward()
    handle.start_step()
    with pytest.raises(RuntimeError, match="other tensors"):
        forward(other, True)


@pytest.mark.parametrize("order", [(1, 0), (0, 1)])
def test_other_gradients_than_when_it_was_recorded_are_refused(order):
    """One more has nowhere to go; one less would be that of the call before."""
    chain, handle = _chain(1)
    for is_second, has_text in enumerate(order):
        handle.start_step()
        image, text, _ = chain.blocks[0](*_inputs(), constant=torch.ones(4))
        loss = image.sum() + text.sum() if has_text else image.sum()
        with pytest.raises(RuntimeError, match="other outputs") if is_second else contextlib.nullcontext():
            loss.backward()


def test_a_step_that_was_left_half_way_is_forgotten():
    chain, handle = _chain()
    for seed in range(2):
        chain(*_inputs(7))  # no backward follows
        handle.start_step()
        _assert_alike(_gradients_of(chain, _inputs(seed)), _expected(seed))
    assert list(handle.num_slots.values()) == [1] and handle.fault == ""


def test_weights_that_have_moved_are_recorded_anew():
    chain, handle = _chain()
    _gradients_of(chain, _inputs())
    before = handle._cards[CPU].recorder.num_recorded
    handle.start_step()
    _gradients_of(chain, _inputs())
    assert handle._cards[CPU].recorder.num_recorded == before
    for count in (2, 3):  # twice in a row
        chain.blocks[1].frozen.data = chain.blocks[1].frozen.data.clone()
        handle.start_step()
        _assert_alike(_gradients_of(chain, _inputs(count)), _expected(count))
        assert handle._cards[CPU].recorder.num_recorded == count * before


def test_weights_made_of_others_have_addresses_too():
    """torchao's tensors have none themselves."""
    torchao = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64, bias=False).requires_grad_(False).bfloat16()
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    handle = apply_cuda_graphs({linear: CPU}, RunsAnew)
    handle.is_on = True
    for _ in range(2):
        handle.start_step()
        linear(torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
        assert len(handle._cards[CPU].slots) == 1
    assert handle.fault == "" and linear.weight.data_ptr() == 0
    linear.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    handle.start_step()
    assert handle._cards[CPU].slots == []


def test_forwards_that_never_come_back_end_it(caplog):
    chain, handle = _chain(1)
    kept = [chain(*_inputs(seed)) for seed in range(20)]
    assert list(handle.num_slots.values()) == [16] and "more than 16" in handle.fault
    assert all(torch.equal(found, Chain(1)(*_inputs(seed))) for seed, found in enumerate(kept))


def test_blocks_get_their_forwards_back():
    chain = Chain()
    own = chain.blocks[0].forward = lambda *args, **kwargs: Block.forward(chain.blocks[0], *args, **kwargs)
    handle = apply_cuda_graphs(dict.fromkeys(chain.blocks, CPU), RunsAnew)
    handle.is_on = True
    _gradients_of(chain, _inputs())
    handle.remove()
    handle.remove()
    assert chain.blocks[0].forward is own and "forward" not in chain.blocks[1].__dict__
    assert not any(card.slots for card in handle._cards.values())
    _assert_alike(_gradients_of(chain, _inputs()), _expected())


def test_parameters_are_the_blocks_own_after_a_recording_that_raises(monkeypatch):
    """Aliases stand in for them while it is recorded."""
    chain, handle = _chain(1)
    before, seen = dict(chain.named_parameters()), []
    handle.remove()
    plain = Block.forward

    def broken(self, *args, **kwargs):
        if self.trained is not before["blocks.0.trained"]:
            seen.append(self.trained)
            raise ZeroDivisionError("an alias")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Block, "forward", broken)
    handle = apply_cuda_graphs(dict.fromkeys(chain.blocks, CPU), RunsAnew)
    handle.is_on = True
    handle._cards[CPU].recorder.record = lambda compute, pool: compute() or compute
    found = _gradients_of(chain, _inputs())
    assert len(seen) == 1 and "an alias" in handle.fault
    assert all(parameter is before[name] for name, parameter in chain.named_parameters())
    handle.remove()
    _assert_alike(found, _gradients_of(chain, _inputs()))


def test_what_has_no_gradient_has_none_when_replayed():
    chain, handle = _chain(1)
    for _ in range(2):
        handle.start_step()
        image, text, total = chain.blocks[0](*_inputs(), constant=torch.ones(4))
        assert image.requires_grad and text.requires_grad and not total.requires_grad
        (image.sum() + text.sum()).backward()


def test_constants_are_let_go_with_the_backward_of_their_micro_batch():
    chain, handle = _chain(1)
    for _ in range(2):
        handle.start_step()
        constant = torch.ones(4)
        watch = weakref.ref(constant)
        output = chain.blocks[0](*_inputs(), constant=constant)[0]
        del constant
        assert watch() is not None
        output.sum().backward()
        assert watch() is None


def test_a_constant_may_be_expanded_and_other_strides_are_another_call():
    chain, handle = _chain(1)
    plain = Chain(1)
    for rows in range(2):
        handle.start_step()
        constant = torch.full((1,), 2.0 + rows).expand(4)
        found = chain.blocks[0](*_inputs(), constant=constant)[0]
        assert torch.equal(found, plain.blocks[0](*_inputs(), constant=constant)[0])
        found.sum().backward()
    replayed = handle._cards[CPU].recorder.num_replayed
    dense = torch.full((4,), 3.0)
    assert torch.equal(chain.blocks[0](*_inputs(), constant=dense)[0], plain.blocks[0](*_inputs(), constant=dense)[0])
    assert handle._cards[CPU].recorder.num_replayed == replayed


def test_a_block_that_is_given_nothing_of_its_own():
    """Only constants, which the block before has had."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x):
            return self.blocks[0](x) * self.blocks[1](x)

    torch.manual_seed(0)
    pair = Pair()
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(pair(x).sum(), list(pair.parameters()))
    handle = apply_cuda_graphs(dict.fromkeys(pair.blocks, CPU), RunsAnew)
    handle.is_on = True
    for _ in range(2):
        handle.start_step()
        pair(x).sum().backward()
        _assert_alike([parameter.grad for parameter in pair.parameters()], expected)
        pair.zero_grad()
    assert handle.fault == "" and handle._cards[CPU].slots[0].order


def test_tensors_elsewhere_and_unknown_objects_are_not_recorded():
    here, elsewhere = torch.ones(4), torch.ones(4, device="meta")
    _, spec = torch.utils._pytree.tree_flatten(((here,), {}))
    assert cuda_graphs._kind_of([here, 1, None, "a"], spec, CPU) is not None
    assert cuda_graphs._kind_of([elsewhere], spec, CPU) is None
    assert cuda_graphs._kind_of([object()], spec, CPU) is None


def test_blocks_without_any_gradient_have_no_backward_to_wait_for():
    chain, handle = _chain()
    for parameter in chain.blocks[0].parameters():
        parameter.requires_grad_(False)
    for seed in range(3):
        handle.start_step()
        recorded = handle._cards[CPU].recorder.num_recorded
        inputs = [each.detach() for each in _inputs(seed)]
        trained = [p for p in chain.parameters() if p.requires_grad]
        found = torch.autograd.grad(chain(*inputs).square().sum(), trained, allow_unused=True)
        plain = Chain()
        others = [p for block in plain.blocks[1:] for p in block.parameters() if p.requires_grad]
        _assert_alike(found, torch.autograd.grad(plain(*inputs).square().sum(), others, allow_unused=True))
    assert handle._cards[CPU].recorder.num_recorded == recorded
    assert list(handle.num_slots.values()) == [1]


@pytest.mark.parametrize("recorder", [GivesSomethingElse, CannotRecord])
def test_recordings_are_freed_at_once(recorder, monkeypatch):
    """Without the garbage collector: their memory is wanted by what follows."""
    monkeypatch.setattr(recorder, "at", 5)
    chain, handle = _chain(recorder=recorder)
    _gradients_of(chain, _inputs())
    calls = [weakref.ref(call) for call in handle._cards[CPU].slots[0].calls.values()]
    assert len(calls) == 3 and handle.fault
    gc.collect()
    gc.disable()
    try:
        handle.start_step()
        assert handle._cards[CPU].slots == []
        assert not [call for call in calls if call() is not None]
    finally:
        gc.enable()


def test_devices_that_cannot(monkeypatch, caplog):
    assert "no CUDA device" in cuda_graphs_fault([CPU])
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    cards = [torch.device("cuda", index) for index in range(2)]
    assert "cudaMallocAsync" in cuda_graphs_fault(cards)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    assert cuda_graphs_fault(cards) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "AMD" in cuda_graphs_fault(cards)
    assert graph_if_possible({}) is None and "none of them keeps" in caplog.text
    assert graph_if_possible({Block(0): CPU}) is None and "no CUDA device" in caplog.text


# ---- whole jobs

TRAIN = {"steps": 3, "batch_size": 1, "gradient_accumulation_steps": 4, "seed": 3, "cuda_graphs": "auto"}
SPLIT = {"devices": ["lazy:0", "lazy:1"], "blocks_without_checkpointing": [1, 2]}


def _job(tmp_path, folder, **sections):
    values = {
        "split": SPLIT,
        "cache": {"folder": encoded_before(tmp_path), "vae_device": "cpu"},
        "train": TRAIN,
        "output": {"folder": str(tmp_path / folder), "save_every_steps": 0},
    }
    return make_tiny_job(tmp_path, "flux2", **{**values, **sections})


@pytest.fixture
def graphs(monkeypatch):
    """What jobs made, on cards that have no graphs."""
    made = []

    def make(blocks):
        made.append(apply_cuda_graphs(blocks, RunsAnew))
        return made[-1]

    monkeypatch.setattr(assembly, "graph_if_possible", make)
    monkeypatch.setattr(job_plan, "cuda_graphs_fault", lambda devices: "")
    return made


def test_a_job_writes_the_same_lora(tmp_path, graphs, monkeypatch):
    released = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(True))
    with emulated_cards():
        plain = run_job(_job(tmp_path, "plain", train={**TRAIN, "cuda_graphs": "off"}))
        assert graphs == []
        found = run_job(_job(tmp_path, "graphs"))
    assert found.losses == plain.losses and found.eval_after == plain.eval_after
    assert found.lora_path.read_bytes() == plain.lora_path.read_bytes()
    (handle,) = graphs
    recorders = [card.recorder for card in handle._cards.values()]
    assert handle.fault == "" and not handle.is_on  # removed
    assert all(r.num_recorded > 0 and r.num_replayed > 2 * r.num_recorded for r in recorders)
    assert len(released) == len(recorders)


def test_a_stopped_job_resumes_with_and_without(tmp_path, graphs):
    with emulated_cards():
        plain = run_job(_job(tmp_path, "plain", train={**TRAIN, "cuda_graphs": "off"}))
        seen = []
        job = _job(tmp_path, "stopped")
        run_job(job, on_event=seen.append, should_stop=lambda: any(e.kind == "step" for e in seen))
        off = dataclasses.replace(job, train=dataclasses.replace(job.train, cuda_graphs="off"))
        resumed = run_job(off, resume=True)
    assert resumed.losses == plain.losses and resumed.lora_path.read_bytes() == plain.lora_path.read_bytes()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"dropout": 0.3}}, "lora.dropout draws random numbers"),
        ({"data": {"resolutions": [32, 64]}}, "samples come in 3 sizes"),
        ({"train": {**TRAIN, "batch_size": 2}}, "train.batch_size is 2, 1 works"),
        ({}, "no CUDA device"),
    ],
)
def test_jobs_that_cannot_say_why_and_train(sections, words, tmp_path, caplog):
    with emulated_cards():
        found = run_job(_job(tmp_path, "graphs", **sections))
    assert found.status == "finished" and words in caplog.text
    assert caplog.text.count("not replayed as CUDA graphs") == 1


def _planned(tmp_path, **sections):
    """For cards that have room for everything."""
    sections = {"train": TRAIN, "split": {"devices": []}, **sections}
    plan = plan_job(make_tiny_job(tmp_path, "flux2", **sections), parse_cards("2x24GB"))
    lines = [line for line in describe_plan(plan).splitlines() if line.startswith("CUDA graphs")]
    return lines, plan_values(plan)["setting"]["cuda_graphs"], plan


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"parallel": {"strategy": "pipeline"}}, "CUDA graphs: the last 2 + 2 blocks are replayed"),
        ({"train": {**TRAIN, "gradient_checkpointing": False}}, "CUDA graphs: all blocks are replayed"),
        ({"split": {"blocks_without_checkpointing": [0, 0]}}, "CUDA graphs: not used, no block keeps its activations"),
        ({"lora": {"dropout": 0.3}}, "CUDA graphs: not used, lora.dropout draws random numbers"),
        ({"data": {"resolutions": [32, 64]}}, "CUDA graphs: not used, samples come in 3 sizes"),
        ({"train": {**TRAIN, "cuda_graphs": "off"}}, None),
    ],
)
def test_plans_say_and_count_what_runs_do(sections, line, tmp_path):
    lines, has_graphs, plan = _planned(tmp_path, **sections)
    assert lines == ([line] if line else [])
    assert has_graphs == ("replayed" in str(line))
    train = {**sections.get("train", TRAIN), "cuda_graphs": "off"}
    off = _planned(tmp_path, **{**sections, "train": train})[2]
    more = [a.reserved - b.reserved for a, b in zip(plan.devices, off.devices, strict=True)]
    assert all(each > 0 for each in more) if has_graphs else more == [0, 0]
