"""Blocks whose weights stream from host memory: the numbers of a resident model, as few copies as theory has."""

import contextlib
import dataclasses
import gc

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.offload import weights as weights_module
from devicebridge.parallel.offload.copies import CopyStreams
from devicebridge.parallel.placement import block_names, place_offloaded, plan_manual, spread_offloaded
from devicebridge.patches.compile_blocks import apply_compile
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes, on_cpu
from devicebridge.tests.placed import apply_block_split, apply_weight_offload, place
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.streams import HostClock, SimulatedMachine
from devicebridge.tests.tiny_split import assert_same, losses_of, make_micro_batches, make_tiny_split, outcome
from devicebridge.training.adapter import apply_lora
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_weights_leave")
HOME, NEXT = CARDS[:2]
CPU = torch.device("cpu")
LAYERS = {"flux2": {"num_layers": 2, "num_single_layers": 4}, "flux1": {}, "wan": {"num_layers": 6}}


@dataclasses.dataclass
class _Built:
    model: nn.Module
    split: object
    lora: object
    offload: object = None


def _build(name, cards, *, offloaded=(), kept=(), cuts=None, scheme=None, dropout=0.0, dora=False, checkpointing=True):
    """A tiny model over cards with a LoRA that is not zero, its tail on the last card."""
    model, split, lora = make_tiny_split(
        name, cards, cuts=cuts, scheme=scheme, checkpointing=checkpointing, kept=kept, changes=LAYERS[name],
        dropout=dropout, dora=dora,
    )  # fmt: skip
    built = _Built(model, split, lora)
    if any(offloaded):
        built.offload = apply_weight_offload(split, list(place_offloaded(split.placement, kept, offloaded)))
    return built


def _run(built, name, count, ahead=None):
    batches = make_micro_batches(built.model, name, count, built.split.main_device)
    return losses_of(built.split, batches, ahead)


def _evaluate(built, name):
    with torch.no_grad():
        return [
            on_cpu(batch.forward(batch.prepare()))
            for batch in make_micro_batches(built.model, name, 2, built.split.main_device)
        ]


_KNOWN = {}


def _step(name, cards, *, ahead=None, count=2, **settings):
    """Two steps with an evaluation between -> losses, gradients and the cards' random states."""
    with emulated_cards(4):
        built = _build(name, cards, **settings)
        losses = [*_run(built, name, count, ahead), *_evaluate(built, name), *_run(built, name, count, ahead)]
        return outcome(losses, lora=built.lora, cards=cards)


def _resident(name, cards, **settings):
    key = name, cards, str(settings)
    if key not in _KNOWN:
        _KNOWN[key] = _step(name, cards, **settings)
    return _KNOWN[key]


def test_offloaded_blocks_are_spread_over_those_that_are_recomputed():
    assert spread_offloaded(8, 0, 8) == tuple(range(8)) and spread_offloaded(8, 2, 0) == ()
    assert spread_offloaded(9, 0, 3) == (1, 4, 7) and spread_offloaded(12, 3, 3) == (1, 4, 7)
    for num_blocks in range(1, 14):
        for num_offloaded in range(1, num_blocks + 1):
            chosen = spread_offloaded(num_blocks, 0, num_offloaded)
            gaps = [b - a for a, b in zip(chosen, chosen[1:], strict=False)]
            assert len(set(chosen)) == num_offloaded and min(chosen) >= 0 and max(chosen) < num_blocks
            assert not gaps or max(gaps) - min(gaps) <= 1 and min(gaps) >= 1


@pytest.mark.parametrize(
    ("name", "cards", "ahead", "settings"),
    [
        ("flux2", 1, None, {"offloaded": (6,)}), ("flux2", 1, None, {"offloaded": (3,), "kept": (2,)}),
        pytest.param("flux2", 2, None, {"offloaded": (3, 2), "dropout": 0.5}, marks=pytest.mark.long),
        ("flux2", 2, 1, {"offloaded": (3, 2), "dropout": 0.5}),
        ("flux2", 2, 1, {"offloaded": (0, 4), "kept": (1, 0), "cuts": [2]}),
        ("flux2", 3, 1, {"offloaded": (1, 0, 3), "cuts": [1, 3]}), ("wan", 2, 1, {"offloaded": (3, 3)}),
        pytest.param("flux1", 1, None, {"offloaded": (4,)}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_losses_and_gradients_are_those_of_resident_blocks_bit_for_bit(name, cards, ahead, settings):
    found = _step(name, CARDS[:cards], ahead=ahead, **settings)
    assert_same(found, _resident(name, CARDS[:cards], dropout=settings.get("dropout", 0.0), cuts=settings.get("cuts")))


@pytest.mark.parametrize("scheme", [pytest.param("fp8-compute", marks=pytest.mark.long), "int8-compute", "fp8"])
def test_8_bit_linears_stream(scheme):
    expected = _resident("flux2", CARDS[:2], scheme=scheme)
    assert_same(_step("flux2", CARDS[:2], ahead=1, offloaded=(3, 3), scheme=scheme), expected)


def test_dora_is_exported_from_weights_in_host_memory():
    exported = []
    for offloaded in ((), (2, 3)):
        with emulated_cards(2):
            built = _build("flux2", CARDS[:2], dora=True, scheme="int8-compute", offloaded=offloaded)
            _run(built, "flux2", 1)
            exported.append({n: on_cpu(t) for n, t in built.lora.tensors_for_comfyui().items()})
    assert exported[0].keys() == exported[1].keys() and any("dora_scale" in name for name in exported[0])
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


def _fewest(accesses):
    """Loads of two slots that go for the least recently used."""
    slots, count = [], 0
    for index in accesses:
        count += index not in slots
        slots = [*[s for s in slots if s != index], index][-2:]
    return count


@pytest.mark.parametrize(("ahead", "stage", "turns"), [(None, 1, "fbfbfb"), (1, 1, "fbfbfb"), (1, 0, "fffbbb")])
def test_copies_are_those_of_theory(ahead, stage, turns):
    """A forward and a backward together copy 2 (n - 2) blocks: those at the turns are there already."""
    with emulated_cards(2) as cards:
        built = _build("flux2", CARDS[:2], offloaded=((4, 0), (0, 4))[stage], cuts=[(4, 2)[stage]])
        before = len(cards.copies)
        _run(built, "flux2", 3, ahead)
        accesses = [i for turn in turns for i in (range(4) if turn == "f" else reversed(range(4)))]
        assert built.offload.num_copies == _fewest(accesses)
        sizes = {block.host.tensor.nbytes for block in built.offload._blocks.values()}
        seen = [copy for copy in cards.copies[before:] if copy.num_bytes in sizes and len(copy.shape) == 1]
        assert len(seen) == built.offload.num_copies
        assert {(copy.source, copy.target) for copy in seen} == {(CPU, CARDS[stage])}  # nothing comes back
        if ahead is None:
            already = built.offload.num_copies
            _run(built, "flux2", 1)
            assert built.offload.num_copies - already == 2 * (4 - 2)


def test_what_is_there_already_is_not_evicted_for_what_is_missing():
    """Where a forward broke off and the next one begins."""
    with emulated_cards(1):
        _, _, offload = _chain(4, 4)
        (device,) = offload._devices
        device.enter(1, is_backward=False)
        device.enter(0, is_backward=False)
        assert offload.num_copies == 3 and {slot.index for slot in device.slots.slots} == {0, 1}
        device.enter(3, is_backward=True)
        assert offload.num_copies == 5 and {slot.index for slot in device.slots.slots} == {2, 3}


def test_a_card_holds_two_slots_and_what_stays():
    with emulated_cards(1):
        gc.collect()
        built = _build("flux2", CARDS[:1])
        gc.collect()
        before = live_bytes(HOME)
        names = [f"single_transformer_blocks.{i}" for i in range(4)]
        offload = apply_weight_offload(built.split, names)
        gc.collect()
        size = {block.host.tensor.nbytes for block in offload._blocks.values()}
        assert len(size) == 1 and offload.host_bytes == 4 * min(size)
        freed = before - live_bytes(HOME)
        assert 2 * min(size) - 4 * 32 * 256 <= freed <= 2 * min(size)  # less the gaps between pieces
        offload.remove()
        gc.collect()
        assert offload.host_bytes == 0
        place(built.model, built.split.placement)
        assert live_bytes(HOME) == before


class Chain(nn.Module):
    def __init__(self, count, width=32):
        super().__init__()
        self.transformer_blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(count)])

    def forward(self, x, checkpoint=None):
        for block in self.transformer_blocks:
            x = block(x) if checkpoint is None else checkpoint(block, x)
        return x


CHAIN = dataclasses.replace(
    FAMILIES["wan"], block_lists=(dataclasses.replace(FAMILIES["wan"].block_lists[0], name="transformer_blocks"),),
    tail=(), read_by_tail={},
)  # fmt: skip


def _chain(count, offloaded):
    model = Chain(count).requires_grad_(False)
    placement = plan_manual(block_names(model, CHAIN), [HOME], [])
    split = apply_block_split(model, CHAIN, placement)
    return model, split, apply_weight_offload(split, list(place_offloaded(placement, (), (offloaded,))))


def _time_of_a_step(cost, count=12, offloaded=6):
    """After a first one, of a forward and a backward, and of a forward alone -> time, races."""
    machine = SimulatedMachine(1)
    with emulated_cards(1), machine.installed():
        model, split, _ = _chain(count, offloaded)
        with HostClock(machine, cost) as timed:
            for _ in range(2):
                start = max(stream.busy_until for stream in [*machine.default.values(), *machine.streams_made])
                x = torch.ones(4, 32).to(HOME).requires_grad_(True)
                model(x, split.checkpoint).sum().backward()
            return machine.default[HOME].busy_until - start, timed.races


def test_copies_run_beside_the_computation():
    """12 linears: forward 12, again 12, backward 12; 4 + 4 copies in windows of 2 kernels and of 4."""
    alone, races = _time_of_a_step(0.0)
    assert races == 0 and alone == 36
    hidden, races = _time_of_a_step(2.0)
    assert races == 0 and hidden == alone
    waiting, races = _time_of_a_step(6.0)  # per window of 2 or 4 kernels a copy of 6
    assert races == 0 and alone < waiting <= alone + 8 * 6


@pytest.mark.parametrize("broken", ["copy", "wait"])
def test_the_simulation_sees_a_wait_that_is_missing(broken, monkeypatch):
    plain = CopyStreams.copy
    stand_in = {"copy": lambda self, *tensors_and_events: plain(self, *tensors_and_events[:2]), "wait": lambda *_: None}
    monkeypatch.setattr(CopyStreams, broken, stand_in[broken])
    assert _time_of_a_step(6.0)[1] > 0


@pytest.mark.parametrize("how", ["no checkpointing", "kept"])
def test_a_graph_that_would_hold_weights_is_refused(how):
    built = _build("flux2", [CPU], offloaded=(4,), checkpointing=how == "kept")
    if how == "kept":
        built.split.keep_activations([6])
    with pytest.raises(RuntimeError, match="was called with gradients"):
        _run(built, "flux2", 1)
    _evaluate(built, "flux2")  # nothing to remember


@pytest.mark.parametrize("at", ["forward", "backward", "copy"])
def test_after_an_error_the_next_step_is_right(at, monkeypatch):
    with emulated_cards(1):
        built = _build("flux2", CARDS[:1], offloaded=(6,))
        expected = outcome(_run(built, "flux2", 1), built.lora, ())
        for parameter in built.lora.parameters().values():
            parameter.grad = None
        calls = []

        def fail(*args, **kwargs):
            calls.append(1)
            if len(calls) == {"forward": 3, "backward": 11, "copy": 5}[at]:
                raise RuntimeError("out of memory")
            return plain(*args, **kwargs)

        with monkeypatch.context() as patch, contextlib.ExitStack() as stack:
            if at == "copy":
                plain = CopyStreams.copy
                patch.setattr(CopyStreams, "copy", fail)
            else:
                plain = lambda *args: None  # noqa: E731
                for name in built.offload.places:
                    handle = built.model.get_submodule(name).register_forward_hook(fail)
                    stack.callback(handle.remove)
            with pytest.raises(RuntimeError, match="out of memory"):
                _run(built, "flux2", 1)
        for parameter in built.lora.parameters().values():
            parameter.grad = None
        assert_same(outcome(_run(built, "flux2", 1), built.lora, ()), expected)


def test_memory_that_cannot_be_pinned_is_asked_for_once(monkeypatch):
    asked = []

    class Refusing(weights_module.PinnedBuffer):
        def __init__(self, num_bytes, device, *, is_wanted=True):
            asked.append(is_wanted)
            super().__init__(num_bytes, CPU)

    monkeypatch.setattr(weights_module, "PinnedBuffer", Refusing)
    offload = weights_module.WeightOffload({f"blocks.{i}": torch.device("cuda:0") for i in range(3)})
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(32, 32).requires_grad_(False) for _ in range(3)])
    offload.begin(model, [f"blocks.{i}" for i in range(3)])
    for index in range(3):
        offload.finish(f"blocks.{index}")
    assert asked == [True, False, False]


def test_remove_leaves_the_model_as_it_was():
    with emulated_cards(2):
        built = _build("flux2", CARDS[:2])
        before = {name: (p.device, on_cpu(p).clone()) for name, p in built.model.named_parameters()}
        expected = _evaluate(built, "flux2")
        offload = apply_weight_offload(built.split, list(place_offloaded(built.split.placement, (), (3, 3))))
        assert all(torch.equal(a, b) for a, b in zip(_evaluate(built, "flux2"), expected, strict=True))
        offload.remove()
        offload.remove()
        place(built.model, built.split.placement)
        after = {name: (p.device, on_cpu(p)) for name, p in built.model.named_parameters()}
        assert list(after) == list(before)
        assert all(after[n][0] == d and torch.equal(after[n][1], values) for n, (d, values) in before.items())
        assert all(torch.equal(a, b) for a, b in zip(_evaluate(built, "flux2"), expected, strict=True))
        built.split.remove()
        assert all(not module._forward_pre_hooks for module in built.model.modules())


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_out = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.to_out(torch.tanh(self.to_q(x)))


@pytest.mark.parametrize("scheme", [None, pytest.param("int8-compute", marks=pytest.mark.long)])
def test_compiled_blocks_are_compiled_no_more_often(scheme):
    """Weights are exchanged between calls; graphs are shared as those of resident blocks are."""
    counts, results = [], []

    def compile_counted(graph, inputs):
        counts[-1] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for offloaded in (0, 5):
        torch._dynamo.reset()
        torch.manual_seed(0)
        counts.append(0)
        model = Chain(0).requires_grad_(False)
        model.transformer_blocks.extend([_Block() for _ in range(5)])
        split = apply_block_split(model, CHAIN, plan_manual(block_names(model, CHAIN), [CPU], []))
        if scheme is not None:
            apply_quantization(model, CHAIN, QuantizeSettings(scheme))
        lora = apply_lora(model, CHAIN, LoraSettings(rank=2, targets=("*.to_q", "*.to_out")), seed=0)
        offload = apply_weight_offload(split, list(split.placement.blocks)) if offloaded else None
        handle = apply_compile(model, CHAIN, backend=compile_counted)
        x = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1))
        losses = []
        for _ in range(2):
            losses.append(model(x, split.checkpoint).square().sum())
            losses[-1].backward()
            with torch.no_grad():
                losses.append(model(x).sum())
        results.append((losses, {n: p.grad for n, p in lora.parameters().items() if "lora_B" in n}, []))
        handle.remove()
    assert counts[0] == counts[1] > 0
    assert_same(results[1], results[0])
    assert offload.num_copies > 20
