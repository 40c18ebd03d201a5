"""The bridge alone, on emulated cards: what crosses and how often, what is left alone, and what is put back."""

import collections
import contextlib
import dataclasses
import threading
import weakref

import pytest
import torch
from devicebridge.parallel import transfer as transfer_module
from devicebridge.parallel.local.bridge import Bridge
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.placed import forward_of
from torch import nn

HOME, NEXT, THIRD = CARDS[:3]
WIDTH = 4
Rope = collections.namedtuple("Rope", "cos sin")


@dataclasses.dataclass
class Modulation:
    shift: torch.Tensor
    scale: torch.Tensor


class Compressed:
    __slots__ = ("data",)

    def __init__(self, data):
        self.data = data


class Block(nn.Module):
    """Takes its constants in every wrapping native models use, and computes with all of them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen = None

    def forward(self, x, vec, options=None, *, modulation=None, rope=None, timestep=None, extra=None):
        self.seen = {"x": x, "options": options, "extra": extra}
        shift, scale = modulation[0].shift, modulation[0].scale
        return x + self.linear(x * (1 + scale) + shift) * vec + rope.cos * timestep.data - rope.sin * extra["table"]


class Model(nn.Module):
    """Constants at home, computed once, a loop of blocks, a tail with a free parameter."""

    def __init__(self, num_blocks=4):
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.between = None

    def forward(self, x, options=None, skip=()):
        vec = self.front(x).sigmoid()
        modulation = (Modulation(vec * 2, vec * 3),)
        rope, timestep, extra = Rope(vec.cos(), vec.sin()), Compressed(vec + 1), {"table": vec + 2, "kept": vec + 3}
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x, vec, options, modulation=modulation, rope=rope, timestep=timestep, extra=extra)
                if self.between is not None:
                    x = self.between(x, vec)
        return self.tail(x * self.scale)


NUM_CONSTANTS = 7  # vec, two of the modulation, two of rope, timestep, the table


def _make(devices, *, num_blocks=None, tail=True, **settings):
    torch.manual_seed(0)
    model = Model(len(devices) if num_blocks is None else num_blocks).to(HOME)
    blocks = {block.to(device): device for block, device in zip(model.blocks, devices, strict=True)}
    bridge = Bridge(blocks, HOME, tail=[model.tail] if tail else [], passed_by={"options", "kept"}, **settings)
    bridge.attach()
    return model, bridge


def _input(seed=0):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(HOME)


def _expected(num_blocks=4, between=None, **inputs):
    model, _ = _make([HOME] * num_blocks)
    model.between = between
    with torch.no_grad():
        return on_cpu(model(_input(), **inputs))


def _run(model, bridge, mode=torch.no_grad, **inputs):
    with mode(), forward_of(bridge):
        return on_cpu(model(_input(), **inputs))


def _crossings(cards):
    return [copy for copy in cards.copies if copy.source.type != "cpu"]


MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
TRANSPORTS = pytest.mark.parametrize("transport", ["stream", "relay"])
PLACES = [HOME, HOME, NEXT, NEXT]
ROUND = [HOME, NEXT, HOME, NEXT]
THREE = [HOME, NEXT, THIRD, NEXT]
PLANS = pytest.mark.parametrize("devices", [PLACES, ROUND, THREE, [NEXT] * 4], ids=["runs", "round", "three", "away"])


@MODES
@TRANSPORTS
@PLANS
def test_result_is_that_of_one_card_bit_for_bit(devices, transport, mode):
    with emulated_cards(4):
        model, bridge = _make(devices, transport=transport)
        assert torch.equal(_run(model, bridge, mode), _expected())


@MODES
@PLANS
def test_each_constant_crosses_once_per_device_and_forward(devices, mode):
    with emulated_cards(4) as cards:
        model, bridge = _make(devices)
        borders = sum(a != b for a, b in zip([HOME, *devices], [*devices, HOME], strict=True))
        foreign = len(set(devices) - {HOME})
        for _ in range(2):
            cards.copies.clear()
            _run(model, bridge, mode)
            assert len(_crossings(cards)) == NUM_CONSTANTS * foreign + borders


def test_relay_bears_arithmetic_between_blocks_and_stream_does_not():
    def between(x, vec):
        return x + vec

    with emulated_cards():
        model, bridge = _make(PLACES, transport="relay")
        model.between = between
        assert torch.equal(_run(model, bridge), _expected(between=between))
        model, bridge = _make(PLACES)
        model.between = between
        with pytest.raises(RuntimeError, match="at least two devices"):
            _run(model, bridge)


def test_what_is_passed_by_stays_the_same_object():
    """By keyword, by position and as a dict's key; and a dict that holds such a key is copied, not changed."""
    with emulated_cards():
        model, bridge = _make(PLACES)
        options = {"sigmas": torch.ones(1).to(HOME)}
        _run(model, bridge, options=options)  # by position: named after the block's parameter
        seen = model.blocks[-1].seen
        assert seen["options"] is options and options["sigmas"].device == HOME
        assert seen["extra"]["kept"].device == HOME and seen["extra"]["table"].device == NEXT
        home_seen = model.blocks[0].seen
        assert home_seen["extra"]["kept"] is seen["extra"]["kept"] and home_seen["extra"]["table"].device == HOME

        class ByKeyword(nn.Module):
            def forward(self, x, **kwargs):
                return kwargs["options"]

        block = ByKeyword()
        keyword = Bridge({block: NEXT}, HOME, passed_by={"options"})
        keyword.attach()
        assert block(_input(), options=options) is options


class Shared:
    """What blocks share: computed by the first that asks, on its device."""

    def __init__(self):
        self.values = {}

    def __call__(self, key, make):
        if key not in self.values:
            self.values[key] = make()
        return self.values[key]


class Sharing(nn.Module):
    def forward(self, x, *, shared):
        return x * shared("table", lambda: torch.full_like(x, 2.0))


@pytest.mark.parametrize("transport", ["stream", "relay"])
def test_each_device_has_an_object_of_its_own_to_share_tensors_through(transport):
    with emulated_cards(), torch.no_grad():
        places = [HOME, NEXT, NEXT, THIRD]
        blocks = [Sharing() for _ in places]
        devices = dict(zip(blocks, places, strict=True))
        bridge = Bridge(devices, HOME, transport=transport, per_device=("shared", "absent"))
        bridge.attach()
        for _ in range(2):  # what one forward shared is not the next one's
            shared, x = Shared(), torch.ones(WIDTH).to(HOME)
            with forward_of(bridge):
                for block in blocks:
                    x = block(x, shared=shared)
                own = [bridge._local.shared["shared", device] for device in (NEXT, THIRD)]
            assert torch.equal(on_cpu(x), torch.full((WIDTH,), 16.0))
            assert [each.values["table"].device for each in (shared, *own)] == [HOME, NEXT, THIRD]
        assert not bridge._local.shared
        bridge.remove()
        bridge.per_device = ()
        bridge.attach()
        with forward_of(bridge), pytest.raises(RuntimeError, match="same device"):
            for block in blocks:
                x = block(x, shared=shared)


def test_a_function_handed_to_a_block_is_made_anew_around_its_tensors():
    class Calling(nn.Module):
        def forward(self, x, attend):
            return attend(x)

    with emulated_cards(), torch.no_grad():
        mask, inputs = torch.full((WIDTH,), 3.0).to(HOME), torch.ones(WIDTH).to(HOME)

        def attend(x):
            return x * mask

        block = Calling()
        bridge = Bridge({block: NEXT}, HOME)
        bridge.attach()
        with forward_of(bridge):
            assert torch.equal(on_cpu(block(inputs, attend)), torch.full((WIDTH,), 3.0))
        assert mask.device == HOME


def test_a_skipped_last_block_is_answered_by_the_tail():
    def without_free_parameter(devices, **settings):
        model, bridge = _make(devices, **settings)
        del model.scale
        model.scale = 1.5
        return model, bridge

    with emulated_cards():
        expected = _run(*without_free_parameter([HOME] * 4), skip=(3,))
        assert torch.equal(_run(*without_free_parameter(PLACES), skip=(3,)), expected)
        with pytest.raises(RuntimeError, match="at least two devices"):
            _run(*without_free_parameter(PLACES, tail=False), skip=(3,))


@MODES
def test_hidden_states_do_not_pile_up(mode, no_collector):
    """Twelve borders; of the hidden states handed to blocks only those in use and the ones just left are alive."""
    with emulated_cards(4):
        model, bridge = _make([HOME, NEXT] * 6)
        handed, alive = [], []

        def watch(module, args, kwargs):
            handed.append(weakref.ref(args[0]))
            alive.append(sum(ref() is not None for ref in handed))

        for block in model.blocks:
            block.register_forward_pre_hook(watch, with_kwargs=True)  # behind ours: it sees the copy
            block.register_forward_hook(lambda module, args, output: setattr(module, "seen", None))
        _run(model, bridge, mode)
        assert len(alive) == 12 and max(alive) <= 2


def test_a_copy_lives_as_long_as_its_source():
    with emulated_cards(), torch.no_grad():
        _, bridge = _make(PLACES)
        with forward_of(bridge):
            source = _input()
            copy = weakref.ref(bridge.move(source, NEXT))
            assert len(bridge._local.copies) == 1 and copy() is not None
            del source
            assert copy() is None and len(bridge._local.copies) == 0


def test_a_source_changed_in_place_is_copied_again():
    with emulated_cards(), torch.no_grad():
        _, bridge = _make(PLACES)
        source = torch.ones(3).to(HOME)
        with forward_of(bridge):
            first = bridge.move(source, NEXT)
            source.add_(1)
            second = bridge.move(source, NEXT)
            assert on_cpu(second).tolist() == [2, 2, 2] and on_cpu(first).tolist() == [1, 1, 1]
            assert bridge.move(source, NEXT) is second


def test_in_inference_mode_what_a_block_returns_counts_as_new():
    """A home block that changes its argument in place and returns it; inference tensors have no version."""

    class InPlace(nn.Module):
        def forward(self, x):
            return x.add_(1)

    class Look(nn.Module):
        def forward(self, x):
            return x * 1

    with emulated_cards(), torch.inference_mode():
        look, change = Look(), InPlace()
        bridge = Bridge({look: NEXT, change: HOME, nn.Identity(): HOME}, HOME)
        bridge.attach()
        with forward_of(bridge):
            x = torch.ones(2).to(HOME)
            assert x.is_inference()
            assert on_cpu(look(x)).tolist() == [1, 1]
            assert change(x) is x
            assert on_cpu(look(x)).tolist() == [2, 2]


def test_grad_modes_do_not_share_copies():
    with emulated_cards():
        _, bridge = _make(PLACES)
        source = torch.ones(2).to(HOME).requires_grad_()
        with forward_of(bridge):
            with torch.no_grad():
                quiet = bridge.move(source, NEXT)
            loud = bridge.move(source, NEXT)
            assert loud.requires_grad and not quiet.requires_grad
            loud.sum().backward()
        assert source.grad.device == HOME and on_cpu(source.grad).tolist() == [1, 1]


def test_current_device_follows_the_forward():
    with emulated_cards(4):
        places = [HOME, NEXT, THIRD, THIRD]
        for transport, expected in (("stream", [HOME, NEXT, THIRD, HOME]), ("relay", [HOME] * 4)):
            model, bridge = _make(places, transport=transport)
            inside, after = [], []
            for block in model.blocks:
                block.register_forward_pre_hook(lambda module, args, b=bridge, i=inside: i.append(b.current_device))
            model.between = lambda x, vec, b=bridge, a=after: (a.append(b.current_device), x)[1]
            assert bridge.current_device == HOME
            _run(model, bridge)
            assert inside == places and after == expected and bridge.current_device == HOME


class _Machine:
    """A device module with a current device, and what was entered and left."""

    current = entered = left = 0

    @contextlib.contextmanager
    def device(self, index):
        before, self.current = self.current, index
        self.entered += 1
        try:
            yield
        finally:
            self.current = before
            self.left += 1


@pytest.fixture
def machine(monkeypatch):
    machine = _Machine()
    monkeypatch.setattr(transfer_module, "device_module", lambda device: machine)
    return machine


@TRANSPORTS
def test_current_device_of_torch_is_the_blocks_while_a_foreign_block_runs(machine, transport):
    with emulated_cards(4):
        model, bridge = _make([HOME, NEXT, THIRD, HOME], transport=transport)
        seen = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda module, args: seen.append(machine.current))
        _run(model, bridge)
        assert seen == [0, 1, 2, 0]
        assert (machine.current, machine.entered, machine.left) == (0, 2, 2)


class _Interrupt(BaseException):
    """As ComfyUI's InterruptProcessingException: torch calls no hook for it."""


@pytest.mark.parametrize("error", [KeyError, _Interrupt])
@pytest.mark.parametrize("raising", [0, 2, 3])
def test_an_error_in_a_block_leaves_nothing_behind(machine, error, raising):
    with emulated_cards():
        model, bridge = _make(PLACES)
        expected = _run(model, bridge)

        def fail(module, args):
            raise error("in a block")

        handle = model.blocks[raising].register_forward_pre_hook(fail)
        with pytest.raises(error, match="in a block"):
            _run(model, bridge)
        assert machine.current == 0 and machine.entered == machine.left
        assert not bridge.is_running and bridge.current_device == HOME and bridge._local.guards == []
        handle.remove()
        assert torch.equal(_run(model, bridge), expected)


def test_another_packs_hook_that_raises_before_ours_leaves_the_device_alone(machine):
    """Its block never entered; the hook that runs on error must not restore for another block."""
    with emulated_cards():
        model, bridge = _make(PLACES)
        inner = model.blocks[3]

        class Outer(nn.Module):
            def forward(self, x):
                with pytest.raises(KeyError):
                    inner(x)
                return torch.full_like(x, machine.current)

        outer = Outer()
        around = Bridge({outer: NEXT}, HOME)
        around.attach()
        around._local = bridge._local  # one forward, one thread: as if both were blocks of one bridge

        def fail(module, args):
            raise KeyError("before ours")

        inner.register_forward_pre_hook(fail, prepend=True)
        with torch.no_grad(), forward_of(bridge):
            assert on_cpu(outer(_input())).unique().tolist() == [1]
        assert machine.current == 0 and machine.entered == machine.left == 1


def test_forwards_of_one_thread_do_not_nest_and_those_of_two_do_not_meet():
    with emulated_cards():
        _, bridge = _make(PLACES)
        source, states = _input(), []
        with forward_of(bridge):
            with pytest.raises(RuntimeError, match="running already"):
                bridge.begin()
            mine = bridge.move(source, NEXT)
            thread = threading.Thread(target=lambda: states.append(bridge.is_running))
            thread.start()
            thread.join()
            assert bridge.move(source, NEXT) is mine
        assert states == [False] and not bridge.is_running
        bridge.end()


def test_hooks_are_not_compiled_into_a_block():
    """They run in every forward with that forward's tensors; what is compiled starts on the block's device."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    meta = torch.device("meta")
    blocks = [nn.Linear(WIDTH, WIDTH, device=meta) for _ in range(3)]
    bridge = Bridge(dict.fromkeys(blocks, meta), torch.device("cpu"), transport="stream")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_module, "device_module", lambda device: None)
        bridge.attach()
    last = blocks[-1]._forward_hooks
    last.clear()  # what is on meta cannot come home
    compiled = [torch.compile(block, backend=backend) for block in blocks]
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))
            with forward_of(bridge):
                for block in compiled:
                    x = block(x)
                    assert bridge.current_device == meta and x.device == meta
                assert len(bridge._local.copies) == 0  # of the input, which nobody holds any more
    assert graphs and all(targets == [torch._C._nn.linear] for targets in graphs)


def test_attach_and_remove_leave_no_trace():
    with emulated_cards():
        model, bridge = _make(PLACES)
        count = _num_hooks(model)
        bridge.attach()
        assert _num_hooks(model) == count and bridge.hook_ids
        bridge.remove()
        bridge.remove()
        assert _num_hooks(model) == 0 and not bridge.hook_ids
        bridge.attach()
        assert torch.equal(_run(model, bridge), _expected())


def _num_hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def _weakening(block, entry):
    """The block, writing into one of its arguments before it computes."""
    forward = type(block).forward

    def run(x, vec, options=None, *, rope, **constants):
        {"x": x, "vec": vec, "a view of vec": vec[:, 1:], "rope": rope.cos}[entry].mul_(0.5)
        return forward(block, x, vec, options, rope=rope, **constants)

    return run


def _with_writers(devices, entry, **settings):
    model, bridge = _make(devices, num_blocks=4, **settings)
    for block in model.blocks[1::2]:
        block.forward = _weakening(block, entry)
    return model, bridge


@MODES
@TRANSPORTS
@PLANS
@pytest.mark.parametrize("entry", ["x", "vec", "a view of vec", "rope"])
def test_what_blocks_write_into_their_arguments_is_seen_by_all(devices, transport, mode, entry):
    with emulated_cards(4):
        reference, alone = _with_writers([HOME] * 4, entry)
        expected = _run(reference, alone, mode)
        model, bridge = _with_writers(devices, entry, transport=transport)
        bridge.runs_alone = False
        for _ in range(2):
            assert torch.equal(_run(model, bridge, mode), expected)


@MODES
@PLANS
def test_a_block_that_returns_what_it_was_given_leaves_the_caller_one_tensor(devices, mode):
    """As on one card: what the caller kept of its argument changes with every block that writes into it."""

    def in_place(x, vec, *args, **kwargs):
        return x.mul_(vec)

    def make(devices, **settings):
        model, bridge = _make(devices, num_blocks=4, **settings)
        for block in model.blocks:
            block.forward = in_place
        kept = []

        def between(x, vec):
            kept.append(x)
            return x if len(kept) % 4 else x + kept[-4]

        model.between = between
        return model, bridge

    with emulated_cards(4):
        expected = _run(*make([HOME] * 4), mode)
        model, bridge = make(devices, transport="relay")
        bridge.runs_alone = False
        assert torch.equal(_run(model, bridge, mode), expected)


def test_beside_other_peoples_code_a_copy_serves_one_call():
    with emulated_cards(2) as cards:
        model, bridge = _make(PLACES)
        bridge.runs_alone = False
        cards.copies.clear()
        _run(model, bridge, torch.inference_mode)
        away = [copy for copy in _crossings(cards) if copy.target == NEXT]
        assert len(away) == 2 * NUM_CONSTANTS + 1  # both blocks get every constant anew, the stream crosses once
