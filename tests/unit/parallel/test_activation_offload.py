"""Block inputs in host memory: the same numbers, as many copies as theory says, a bounded number on the card."""

import contextlib
import gc
import weakref

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.offload import activations, copies
from devicebridge.parallel.offload.activations import ActivationOffload
from devicebridge.parallel.offload.recompute import recompute
from devicebridge.tests.emulated import CARDS, EmulatedTensor, emulated_cards, live_bytes, on_cpu
from devicebridge.tests.streams import Clock, SimulatedMachine, place_of
from devicebridge.tests.tiny_split import assert_same, losses_of, make_micro_batches, make_tiny_split, outcome
from devicebridge.tests.toy import TINY
from torch import nn

NUM_BATCHES = 3
CPU, HOME = torch.device("cpu"), CARDS[0]
pytestmark = pytest.mark.usefixtures("one_thread")


def _step(name, num_cards, ahead, *, offload, kept=()):
    """Losses, gradients, random states; and the copies to and from the host while training."""
    with emulated_cards(4) as machine:
        model, split, lora = make_tiny_split(name, CARDS[:num_cards], kept=kept, dropout=0.3)
        if offload:
            split.offload_inputs(min_bytes=1)
        machine.copies.clear()
        losses = losses_of(split, make_micro_batches(model, name, NUM_BATCHES), ahead)
        return outcome(losses, lora, CARDS[:num_cards]), machine.copies


@pytest.mark.parametrize(
    ("name", "num_cards", "ahead", "kept"),
    [*((each, 2, 1, (1, 0)) for each in FAMILIES), ("flux2", 3, 1, ()), ("wan", 2, None, ()), ("wan", 1, None, ())],
)
def test_numbers_are_those_without(name, num_cards, ahead, kept):
    expected, copies_without = _step(name, num_cards, ahead, offload=False, kept=kept)
    found, copies_made = _step(name, num_cards, ahead, offload=True, kept=kept)
    assert_same(found, expected)
    assert len(copies_made) > len(copies_without)


class _Block(nn.Module):
    """Reads a stream, which it changes, and a table, which it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, table):
        return self.linear(x) + table


STREAM = 16 * 8 * 4  # bytes


def _blocks(count):
    torch.manual_seed(0)
    return [_Block().to(HOME) for _ in range(count)]


def _inputs():
    return torch.randn(16, 8).to(HOME).requires_grad_(), torch.randn(16, 8).to(HOME)


def _forward(blocks, store, inputs=()):
    x, table = inputs or _inputs()
    if isinstance(inputs, list):
        inputs.clear()  # nobody else holds them
    for block in blocks:
        x = recompute(block, (x, table), HOME, store)
    return x.square().sum()


def _out_and_back(machine):
    out = [copy.num_bytes for copy in machine.copies if copy.source == HOME and copy.target == CPU]
    back = [copy.num_bytes for copy in machine.copies if copy.source == CPU and copy.target == HOME]
    return out, back


@pytest.mark.parametrize("num_blocks", [2, 3, 7])
def test_a_forward_and_backward_copies_the_stream_and_never_what_blocks_share(num_blocks):
    """When the backward begins the last two blocks' inputs are on the card: one was not sent, one is there yet."""
    with emulated_cards(1) as machine:
        blocks, store = _blocks(num_blocks), ActivationOffload([HOME], min_bytes=1)
        for _ in range(2):
            inputs = _inputs()
            machine.copies.clear()
            _forward(blocks, store, inputs).backward()
            out, back = _out_and_back(machine)
            assert out == [STREAM] * (num_blocks - 1) and back == [STREAM] * (num_blocks - 2)


def test_micro_batches_in_flight_push_each_other_out():
    """All forwards first: of all blocks of all micro-batches only the very last input is never sent."""
    with emulated_cards(1) as machine:
        blocks, store = _blocks(5), ActivationOffload([HOME], min_bytes=1)
        batches = [_inputs() for _ in range(4)]
        machine.copies.clear()
        losses = [_forward(blocks, store, inputs) for inputs in batches]
        for loss in losses:
            loss.backward()
        out, back = _out_and_back(machine)
        assert out == [STREAM] * (4 * 5 - 1) and back == [STREAM] * (4 * 5 - 2)


def test_a_model_of_every_device_sends_its_hidden_states_only():
    """FLUX.2: two streams of double blocks, one of single ones; no modulation, no rotary table, never the last."""
    found, plain = (_step("flux2", 1, None, offload=offload)[1] for offload in (True, False))
    sent = [copy.shape for copy in found if copy.target == CPU]
    for copy in plain:
        if copy.target == CPU:
            sent.remove(copy.shape)
    config = TINY["flux2"].transformer_config
    width_D = config["num_attention_heads"] * config["attention_head_dim"]
    assert {shape[0] % width_D for shape in sent} == {0}
    assert len(sent) == NUM_BATCHES * (2 * config["num_layers"] + config["num_single_layers"] - 1)


def test_the_card_holds_as_many_inputs_as_promised():
    """In a forward the block's own and two more; in a backward its own and the next to come."""
    with emulated_cards(1):
        blocks, store, held = _blocks(8), ActivationOffload([HOME], min_bytes=1), []
        for block in blocks:
            block.requires_grad_(False).register_forward_pre_hook(lambda *_: held.append(live_bytes(HOME)))
        leaf, table = _inputs()
        gc.collect()
        base = live_bytes(HOME)
        loss = _forward(blocks, store, [leaf * 1, table])
        assert [(each - base) / STREAM for each in held] == [1, 2, 3, 3, 3, 3, 3, 3]
        held.clear()
        loss.backward()
        gradient, scalars = 1, 8 / STREAM  # of the block's output; the loss and its gradient
        expected = [gradient + scalars + inputs for inputs in (2, 2, 2, 2, 2, 2, 2, 1)]
        assert [(each - base) / STREAM for each in held] == expected


def test_tensors_come_back_as_they_were():
    """Strides of any order, flags, types; what has gaps, is small, a parameter or elsewhere stays."""
    with emulated_cards(2):
        store = ActivationOffload([HOME], min_bytes=64)
        dense = torch.randn(4, 6, 5).to(HOME).permute(2, 0, 1)
        half = torch.randn(4, 16).to(HOME).bfloat16()
        gaps, small = torch.randn(8, 8).to(HOME)[:, ::2], torch.randn(4).to(HOME)
        parameter, expanded = nn.Parameter(torch.randn(8, 8).to(HOME)), torch.randn(1, 8).to(HOME).expand(9, 8)
        given = [gaps, dense, small, half, parameter, expanded]
        expected = [on_cpu(tensor).clone() for tensor in given]
        handle, others = store.keep(given, HOME)
        assert [a is b for a, b in zip(others, [gaps, small, parameter, expanded], strict=True)] == [True] * 4
        gone = weakref.ref(dense)
        strides = [tensor.stride() for tensor in given]
        del dense, half, given
        later = [store.keep([torch.randn(8, 8).to(HOME)], HOME)[0] for _ in range(3)]
        assert gone() is None
        found = handle.fetch(others)
        for tensor, value, stride in zip(found, expected, strides, strict=True):
            assert torch.equal(on_cpu(tensor), value) and tensor.dtype == value.dtype and tensor.stride() == stride
        with pytest.raises(RuntimeError, match="run every backward once"):
            handle.fetch(others)
        del later
        assert ActivationOffload([CPU]).keep([torch.randn(64, 64)], CPU)[0] is None


def test_buffers_serve_the_next_step_and_are_freed():
    with emulated_cards(1):
        blocks, store = _blocks(6), ActivationOffload([HOME], min_bytes=1)
        _forward(blocks, store).backward()
        held = store.host_bytes
        assert held == 5 * STREAM
        for _ in range(3):
            _forward(blocks, store).backward()
        assert store.host_bytes == held
        loss = _forward(blocks, store)
        store.close()
        loss.backward()  # what is in use still comes back
        del loss
        gc.collect()
        assert store.host_bytes == 0


def test_an_error_or_a_loss_that_is_dropped_gives_everything_back():
    with emulated_cards(1):
        blocks, store = _blocks(6), ActivationOffload([HOME], min_bytes=1)
        gc.collect()
        before = live_bytes(HOME)
        loss = _forward(blocks, store)
        del loss
        assert live_bytes(HOME) == before
        blocks[3].linear.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            _forward(blocks, store)
        gc.collect()
        assert live_bytes(HOME) == before


def test_an_input_that_is_changed_later_is_refused():
    """On its card or in host memory: a copy taken too late would be another tensor."""
    with emulated_cards(1):
        for late in (1, 2):
            blocks, store = _blocks(4), ActivationOffload([HOME], min_bytes=1)
            x, table = torch.randn(16, 8).to(HOME), torch.randn(16, 8).to(HOME)
            first = x
            with pytest.raises(RuntimeError, match="modified in place"):
                for number, block in enumerate(blocks):
                    x = recompute(block, (x, table), HOME, store)
                    if number == late - 1:
                        first.add_(1)
                x.sum().backward()


def test_a_forward_without_gradients_keeps_nothing():
    with emulated_cards(1) as machine, torch.no_grad():
        blocks, store = _blocks(4), ActivationOffload([HOME], min_bytes=1)
        inputs = _inputs()
        machine.copies.clear()
        _forward(blocks, store, inputs)
        assert machine.copies == [] and store.host_bytes == 0


def test_autocast_is_refused():
    x, table = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        recompute(_Block(), (x, table), CPU)


@pytest.mark.parametrize("outcome_of_registering", [0, 2])
def test_pinned_memory_is_whole_pages_and_unregistered_once_or_refused(monkeypatch, outcome_of_registering):
    calls = []

    class Cudart:
        def cudaHostRegister(self, pointer, size, flags):
            calls.append((pointer, size))
            return outcome_of_registering

        def cudaHostUnregister(self, pointer):
            calls.append(pointer)
            return 0

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(copies, "_forget_last_error", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    if outcome_of_registering:
        with pytest.raises(RuntimeError, match="pinned host memory"):
            activations._make_buffer(5000, torch.device("cuda:0"))
    else:
        buffer = activations._make_buffer(5000, torch.device("cuda:0"))
        buffer.tensor.view(torch.float32).fill_(1.0)
        buffer.close()
        del buffer
        assert calls[1:] == [calls[0][0]]
    assert calls[0][0] % 4096 == 0 and calls[0][1] == 8192


class _Watch(Clock):
    """Copies to and from the host take time on their stream; what is freed while a copy uses it is counted."""

    def __init__(self, machine, copy_cost):
        super().__init__(machine, copy_cost)
        self.host_ready, self.host_read, self.arrives = {}, {}, {}
        self.unsafe = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or args[0].device == args[1].device:
            self.races += self._reads_too_early(func, args)
            return super().__torch_dispatch__(func, types, args, kwargs)
        target, source = args[:2]
        card = target if isinstance(target, EmulatedTensor) else source
        host = (source if card is target else target).untyped_storage().data_ptr()
        stream = self.machine.current_stream(card.device)
        start, end = stream.busy_until, stream.busy_until + self.copy_cost
        if card is target:
            self.races += start < self.host_ready.get(host, 0.0)
            self.unsafe += start < self.machine.default[card.device].busy_until  # its memory may be in use until now
            self.host_read[host] = end
            self.arrives[place_of(card)] = end
        else:
            self.races += start < self.ready.get(card, 0.0)
            self.races += start < self.host_read.get(host, 0.0)  # the buffer is still being read
            self.host_ready[host] = end
        stream.busy_until = end
        weakref.finalize(card.data_on_cpu.untyped_storage(), self._freed, card.device, end, place_of(card))
        return func(*args, **(kwargs or {}))

    def _reads_too_early(self, func, args):
        if func._schema.returns and func._schema.returns[0].alias_info is not None:
            return False  # a view
        read = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, EmulatedTensor)]
        return any(self.machine.current_stream(x.device).busy_until < self.arrives.get(place_of(x), 0.0) for x in read)

    def _freed(self, device, end, place):
        """Memory goes to whatever the compute stream does next."""
        self.unsafe += self.machine.default[device].busy_until < end
        self.arrives.pop(place, None)


def _simulated(copy_cost, *, store=True):
    machine = SimulatedMachine(1)
    with emulated_cards(1), machine.installed():
        blocks, inputs = _blocks(8), _inputs()
        store = ActivationOffload([HOME], min_bytes=1) if store else None
        with _Watch(machine, copy_cost) as clock:
            _forward(blocks, store, inputs).backward()
        return machine.default[HOME].busy_until, clock


@pytest.fixture
def records_streams(monkeypatch):
    monkeypatch.setattr(EmulatedTensor, "record_stream", lambda tensor, stream: 1 / 0, raising=False)


def test_copies_run_beside_the_kernels(records_streams):
    """As long as a copy takes no longer than a block's forward the compute stream waits for none. Else it waits, since
    what is in flight is bounded, and the numbers are right."""
    plain, clock = _simulated(0.0, store=False)
    assert clock.races == 0
    (found, clock), (slow, slow_clock) = _simulated(0.9), _simulated(10.0)
    assert clock.races == clock.unsafe == slow_clock.races == slow_clock.unsafe == 0
    assert found == plain and slow > plain + 8 * 10


def test_what_is_dropped_on_its_way_waits_for_the_copy(records_streams):
    machine = SimulatedMachine(1)
    with emulated_cards(1), machine.installed():
        blocks, store = _blocks(4), ActivationOffload([HOME], min_bytes=1)
        inputs = _inputs()
        with _Watch(machine, 50.0) as clock:
            loss = _forward(blocks, store, inputs)
            del loss, inputs
            gc.collect()
        assert clock.unsafe == 0 and machine.default[HOME].busy_until >= 50


def test_buffers_of_several_sizes_take_no_more_than_the_largest_at_once():
    """In whatever order sizes come: what is too small makes room for what is larger, which serves the small."""
    for sizes in ((100, 25, 60, 100, 10), (10, 25, 60, 100, 45), (25, 100, 25, 60)):
        buffers = copies.BufferPool(lambda num_bytes: copies.PinnedBuffer(num_bytes, CPU))
        for size in sizes:
            held = [buffers.take(size * 1000) for _ in range(4)]
            assert all(buffer.num_bytes >= size * 1000 for buffer in held)
            for buffer in held:
                buffers.give_back(buffer)
        assert 4 * 1000 * max(sizes) <= buffers.num_bytes <= 4 * 1000 * max(sizes)
        buffers.close()
