"""A copy of the model per card: the gradients of plain accumulation up to the order of summation, run after run."""

import gc
import threading
import time
from dataclasses import replace

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.local.data_parallel import DataParallel, Replica, copy_model
from devicebridge.parallel.runner import MicroBatch, Runner
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes, on_cpu
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.replica_cases import make_replica, make_replicas
from devicebridge.tests.tiny_split import BrokenBackward, make_batches_for
from devicebridge.tests.toy import TINY
from torch import nn

HOME, NEXT, THIRD = CARDS[:3]
pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")


def _plainly(name, count, **settings):
    with emulated_cards(4):
        (one,) = make_replicas(name, CARDS[:1], **settings)
        plain = Runner(one.model, one.device)
        losses = [on_cpu(loss) for loss in plain.run(make_batches_for(plain.replica_for, name, count))]
        return losses, [on_cpu(parameter.grad) for parameter in one.parameters]


def _copied(name, num_cards, count, **settings):
    with emulated_cards(4):
        made = make_replicas(name, CARDS[:num_cards], **settings)
        replicas = DataParallel(made)
        losses = [on_cpu(loss) for loss in replicas.run(make_batches_for(replicas.replica_for, name, count))]
        assert all(parameter.grad is None for other in made[1:] for parameter in other.parameters)
        gradients = [on_cpu(parameter.grad).clone() for parameter in made[0].parameters]
        return losses, gradients, [torch.lazy.get_rng_state(card) for card in CARDS[:num_cards]]


def _assert_close(found, expected):
    assert len(found[0]) == len(expected[0]) and all(map(torch.equal, found[0], expected[0]))
    assert len(found[1]) == len(expected[1]) > 0
    for gradient, other in zip(found[1], expected[1], strict=True):
        assert other.abs().max() > 0
        assert (gradient - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize(
    ("name", "num_cards", "count"),
    [*((name, 2, 2) for name in sorted(FAMILIES)), *(("flux1", *each) for each in [(3, 5), (3, 2)])],
)
def test_losses_and_gradients_are_those_of_plain_accumulation(name, num_cards, count):
    _assert_close(_copied(name, num_cards, count), _plainly(name, count))


@pytest.mark.parametrize("settings", [{"checkpointing": False}, {"kept": 2}], ids=str)
def test_without_recomputation_and_with_some_of_it(settings):
    _assert_close(_copied("flux2", 2, 2, **settings), _plainly("flux2", 2))


@pytest.mark.parametrize("scheme", ["int8", "fp8-compute"])
def test_8_bit_weights_are_copied_as_they_are(scheme):
    _assert_close(_copied("flux2", 2, 2, scheme=scheme), _plainly("flux2", 2, scheme=scheme))


def test_sums_are_added_in_the_order_of_the_devices():
    """By hand: each replica's micro-batches first, then replica after replica, the very same bits."""
    with emulated_cards(4):
        (one,) = make_replicas("flux2", CARDS[:1])
        batches = make_batches_for(lambda index: (one.model, one.device), "flux2", 4)
        expected = None
        for share in range(3):
            for batch in batches[share::3]:
                batch.forward(batch.prepare()).backward()
            sums = [on_cpu(parameter.grad).clone() for parameter in one.parameters]
            expected = sums if expected is None else [a + b for a, b in zip(expected, sums, strict=True)]
            one.model.zero_grad(set_to_none=True)
    found = _copied("flux2", 3, 4)[1]
    assert all(map(torch.equal, found, expected))


def test_it_repeats_itself_bit_for_bit_whatever_the_timing(monkeypatch):
    """With dropout, once with each thread held up in turn."""
    first = _copied("flux2", 2, 3, dropout=0.5)
    plain = MicroBatch.compute

    def slow(microbatch, prepared):
        if threading.current_thread().name.endswith("-0"):
            time.sleep(0.02)
        return plain(microbatch, prepared)

    monkeypatch.setattr(MicroBatch, "compute", slow)
    second = _copied("flux2", 2, 3, dropout=0.5)
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))
    without = _copied("flux2", 2, 1)
    assert not torch.equal(first[0][0], without[0][0])


def test_trained_values_are_made_equal_at_once_and_by_sync():
    with emulated_cards(4):
        model = TINY["flux2"].make_model(seed=0).to(HOME)
        other = copy_model(model, NEXT)
        pair = [make_replica(model, "flux2", HOME), make_replica(other, "flux2", NEXT, seed=5)]
        replicas = DataParallel(pair)
        for _ in range(2):
            for a, b in zip(*(replica.parameters for replica in pair), strict=True):
                assert a.device == HOME and b.device == NEXT and torch.equal(on_cpu(a), on_cpu(b))
            with torch.no_grad():
                for parameter in pair[0].parameters:
                    parameter.add_(1)
            replicas.sync()


def test_a_copy_is_the_same_model_elsewhere_and_shares_nothing():
    with emulated_cards(2):
        model = TINY["flux2"].make_model(seed=0)
        apply_quantization(model, FAMILIES["flux2"], QuantizeSettings("int8-compute"))
        model.to(HOME)
        gc.collect()
        before = live_bytes(HOME)
        copied = copy_model(model, NEXT)
        gc.collect()
        assert live_bytes(HOME) == before and live_bytes(NEXT) == before
        found, expected = copied.state_dict(), model.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].device == NEXT and torch.equal(on_cpu(found[name]), on_cpu(tensor))
        assert [p.requires_grad for p in copied.parameters()] == [p.requires_grad for p in model.parameters()]


def _linear(card):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(card)
    return Replica(model, card, tuple(model.parameters()))


def _batches(replicas, count, inside=lambda index: None, prepare=lambda index: None):
    def make(index):
        model, device = replicas.replica_for(index)

        def forward(x):
            inside(index)
            return model(x.to(device)).square().mean()

        return MicroBatch(lambda: prepare(index) or torch.ones(2, 4), forward)

    return [make(index) for index in range(count)]


def test_batches_are_prepared_in_order_and_one_ahead():
    prepared, begun, waiting = [], [], []

    def prepare(index):
        prepared.append(index)
        waiting.append(len(prepared) - len(begun))

    with emulated_cards(2):
        replicas = DataParallel([_linear(HOME), _linear(NEXT)])
        assert len(replicas.run(_batches(replicas, 30, begun.append, prepare))) == 30
    assert prepared == list(range(30)) and max(waiting) <= 5


def test_a_micro_batch_that_must_be_alone_is():
    inside, most, lock = set(), {}, threading.Lock()

    def enter(index):
        with lock:
            inside.add(index)
            for each in inside:
                most[each] = max(most.get(each, 0), len(inside))
        time.sleep(0.02)
        with lock:
            inside.remove(index)

    with emulated_cards(3):
        replicas = DataParallel([_linear(card) for card in CARDS[:3]])
        batches = _batches(replicas, 9, enter)
        replicas.run([replace(each, is_alone=lambda x, i=i: i in (0, 1, 5)) for i, each in enumerate(batches)])
    assert most[0] == most[1] == most[5] == 1 and max(most.values()) > 1


@pytest.mark.parametrize("where", ["prepare", "forward", "backward"])
def test_the_first_error_is_raised_and_nothing_is_left(where):
    def fail(index):
        if index == 3:
            raise ZeroDivisionError

    with emulated_cards(2):
        pair = [_linear(HOME), _linear(NEXT)]
        replicas = DataParallel(pair)
        broken = BrokenBackward.apply if where == "backward" else lambda output: None
        hook = pair[1].model.register_forward_hook(lambda module, args, output: broken(output))
        arguments = {"inside" if where == "forward" else "prepare": fail} if where != "backward" else {}
        with pytest.raises(ZeroDivisionError):
            replicas.run(_batches(replicas, 8, **arguments))
        hook.remove()
        assert all(parameter.grad is None for parameter in pair[1].parameters)
        assert len(replicas.run(_batches(replicas, 4))) == 4  # and it can be used again


def test_parameters_that_got_no_gradient_keep_none():
    """A LoRA that some inputs pass by: AdamW leaves alone what has no gradient, and would decay what has zeros."""
    with emulated_cards(2):
        pair = [_linear(HOME), _linear(NEXT)]
        for replica in pair:
            replica.model.unused = nn.Linear(1, 1).to(replica.device)
        pair = [replace(each, parameters=tuple(each.model.parameters())) for each in pair]
        replicas = DataParallel(pair)
        replicas.run(_batches(replicas, 1))
        once = on_cpu(pair[0].model.weight.grad).clone()
        replicas.run(_batches(replicas, 2))
        assert torch.equal(on_cpu(pair[0].model.weight.grad), once + 2 * once)
        assert pair[0].model.unused.weight.grad is None


def test_what_cannot_be_replicas_is_refused():
    with emulated_cards(2):
        first = _linear(HOME)
        with pytest.raises(ValueError, match="a GPU of its own"):
            DataParallel([first, first])
        with pytest.raises(ValueError, match="a GPU of its own"):
            DataParallel([first, _linear(torch.device("cpu"))])
