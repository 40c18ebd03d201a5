"""Blocks divided among cards that train together: losses and gradients of one card, the same bits in every run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.runner import PlainAccumulation
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.shard_cases import cut_as_one, make_divided
from devicebridge.tests.tiny_split import make_batches_for, make_tiny_split
from devicebridge.tests.toy import TINY
from devicebridge.training.objective import predict

pytestmark = pytest.mark.usefixtures("one_thread", "no_thread_left")


def _on_one_card(name, count=1, **settings):
    with emulated_cards(4):
        model, split, lora = make_tiny_split(name, CARDS[:1], **settings)
        plain = PlainAccumulation(model, split.main_device)
        losses = [on_cpu(loss) for loss in plain.run(make_batches_for(plain.replica_for, name, count))]
        return losses, {key: on_cpu(value.grad) for key, value in lora.parameters().items()}


def _divided(name, num_cards, count=1, **settings):
    with emulated_cards(4):
        runner, lora = make_divided(name, CARDS[:num_cards], **settings)
        losses = [on_cpu(loss) for loss in runner.run(make_batches_for(runner.replica_for, name, count))]
        return losses, {key: on_cpu(value.grad).clone() for key, value in lora.parameters().items()}


def _assert_close(found, expected, tolerance=1e-5):
    for loss, other in zip(found[0], expected[0], strict=True):
        assert abs(loss - other) <= tolerance * abs(other)
    assert found[1].keys() == expected[1].keys() and len(expected[1]) > 8
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0, name
        assert (found[1][name] - gradient).norm() <= tolerance * gradient.norm(), name


@pytest.mark.parametrize("num_cards", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_losses_and_gradients_are_those_of_one_card(name, num_cards):
    """4 heads on 3 cards are divided unevenly."""
    _assert_close(_divided(name, num_cards), _on_one_card(name))


@pytest.mark.parametrize("shares", [(3, 1), (1, 3), (1, 2, 1)], ids=str)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_in_uneven_shares_they_are_too(name, shares):
    _assert_close(_divided(name, len(shares), shares=shares), _on_one_card(name))


def test_uneven_shares_are_another_order_of_sums_and_repeat_themselves():
    """So a run goes on in the shares that it began in."""
    even, uneven = (_divided("flux2", 2, shares=shares) for shares in ((), (3, 1)))
    again = _divided("flux2", 2, shares=(3, 1))
    assert not all(torch.equal(value, even[1][name]) for name, value in uneven[1].items())
    assert uneven[0] == again[0] and all(torch.equal(value, again[1][name]) for name, value in uneven[1].items())


def test_a_card_holds_its_share_of_the_divided_weights():
    """Three quarters of the heads; of features, which are cut at multiples that kernels like, about as many."""
    with emulated_cards(4):
        whole = dict(make_tiny_split("wan", CARDS[:1])[0].named_parameters())
        runner, _ = make_divided("wan", CARDS[:2], shares=(3, 1))
        trees = [dict(tree.named_parameters()) for tree in runner.replica_for(0)[0].trees]
    divided = {name for name, value in whole.items() if value.shape != trees[0].get(name, value).shape}
    assert len(divided) > 12
    for name in divided:
        first, second = (tree[name].numel() for tree in trees)
        assert first + second == whole[name].numel(), name
        assert first == 3 * second or ("ffn" in name and 2 < first / second < 6), name


@pytest.mark.parametrize(
    "settings", [{"checkpointing": False}, {"kept": 2}, {"offload": True}, {"count": 3}], ids=lambda each: str(each)
)
def test_without_recomputation_and_with_inputs_on_the_host_and_with_several_microbatches(settings):
    count = settings.get("count", 1)
    _assert_close(_divided("flux2", 2, **settings), _on_one_card("flux2", count))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("flux1", "*.norm1.linear"),  # gathered
        ("flux1", "single_transformer_blocks.*.norm.linear"),
        ("flux1", "time_text_embed.*.linear_1"),  # whole, and its gradient comes through every block
        ("flux2", "x_embedder"),
        ("flux2", "norm_out.linear"),
        ("wan", "condition_embedder.text_embedder.linear_1"),
    ],
)
def test_a_lora_outside_the_divided_linears_gets_the_gradient_of_one_card(name, target):
    targets = (*FAMILIES[name].lora_targets, target)
    _assert_close(_divided(name, 3, targets=targets), _on_one_card(name, targets=targets))


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_weights_that_are_stored_in_8_bits_are_those_of_one_card(name, scheme):
    """Rounded whole and cut afterwards, so only the order of summation differs."""
    _assert_close(_divided(name, 2, scheme=scheme), _on_one_card(name, scheme=scheme))


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_so_they_are_in_uneven_shares(scheme):
    _assert_close(_divided("flux2", 2, scheme=scheme, shares=(1, 3)), _on_one_card("flux2", scheme=scheme))


@pytest.mark.parametrize("scheme", ["fp8-compute", "int8-compute"])
def test_products_in_8_bits_round_each_cards_features_by_themselves(scheme):
    """Rows of inputs are scaled per card, which rounds them otherwise than on one card, and no worse."""
    exact = _on_one_card("flux2")[1]
    one = _on_one_card("flux2", scheme=scheme)[1]
    found = _divided("flux2", 2, scheme=scheme, rotation=0)[1]
    for name, gradient in exact.items():
        noise = (one[name] - gradient).norm()
        assert (found[name] - gradient).norm() <= 2 * noise + 0.02 * gradient.norm(), name


@pytest.mark.parametrize("settings", [{}, {"scheme": "int8-compute", "rotation": 16}], ids=str)
def test_it_repeats_itself_bit_for_bit(settings):
    first, second = (_divided("wan", 3, 2, **settings) for _ in range(2))
    assert first[0] == second[0] and first[1].keys() == second[1].keys()
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


# ---- faults


class _Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("in the backward")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_on_one_card_ends_the_step_of_all_and_the_next_step_works(rank, where):
    def fail(module, args, output):
        if where == "forward":
            raise ZeroDivisionError("in the forward")
        return _Broken.apply(output)

    with emulated_cards(4):
        runner, lora = make_divided("flux2", CARDS[:2])
        batches = make_batches_for(runner.replica_for, "flux2", 1)
        tree = runner.replica_for(0)[0].trees[rank]
        handle = tree.get_submodule("transformer_blocks.1.ff.linear_in").register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError, match=where):
            runner.run(batches)
        assert all(parameter.grad is None for parameter in tree.parameters())
        handle.remove()
        loss = on_cpu(runner.run(batches)[0])
    assert loss == _divided("flux2", 2)[0][0]


def test_cards_that_come_to_different_places_are_told_so():
    """Where one recomputes a block and the other does not, each would wait for something else."""
    with emulated_cards(4):
        runner, _ = make_divided("flux2", CARDS[:2])
        trees = runner.replica_for(0)[0].trees
        trees[1].disable_gradient_checkpointing()
        with pytest.raises(RuntimeError, match="at different places"):
            runner.run(make_batches_for(runner.replica_for, "flux2", 1))


def test_a_block_that_is_called_by_itself_is_refused():
    with emulated_cards(4):
        runner, _ = make_divided("wan", CARDS[:2])
        norm = runner.replica_for(0)[0].trees[0].get_submodule("blocks.0.attn1.norm_q")
        with pytest.raises(RuntimeError, match="was called by itself"):
            norm(torch.randn(1, 3, 32).to(CARDS[0]))


def test_without_gradients_all_cards_compute_the_output_of_one():
    with emulated_cards(4):
        model, _, _ = make_tiny_split("wan", CARDS[:1])
        inputs = {k: v.to(CARDS[0]) if isinstance(v, torch.Tensor) else v for k, v in TINY["wan"].make_inputs().items()}
        runner, _ = make_divided("wan", CARDS[:3])
        with torch.no_grad():
            expected = on_cpu(model(**inputs, return_dict=False)[0])
            found = on_cpu(runner.replica_for(0)[0](**inputs, return_dict=False)[0])
    assert (found - expected).norm() <= 1e-5 * expected.norm()


# ---- slices that are wrong: what the comparisons above would see


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("flux2", "attn.to_qkv_mlp_proj"),  # rows of [q | k | v | gate | up]: one card would have all queries
        ("flux2", "attn.to_out"),  # columns of [attention | mlp]: one card would take all of the attention
        ("flux2", "ff.linear_in"),  # the gate's half to one card
        ("flux1", "proj_out"),
    ],
)
def test_a_packed_linear_that_is_cut_in_a_row_gives_another_loss_and_other_gradients(name, linear):
    """Slices as long as they should be, so that every layer fits; the comparisons allow 1e-5."""
    (expected,), gradients = _on_one_card(name)
    with cut_as_one(linear) as replaced:
        (found,), others = _divided(name, 2)
    assert replaced and all(right != wrong for right, wrong in replaced)
    assert abs(found - expected) > 3e-5 * abs(expected)
    assert all((others[each] - value).norm() > 0.01 * value.norm() for each, value in gradients.items())


class _Host:
    """Computes with weights of a model that it does not call, as ComfyUI does for some conditions."""

    def predict(self, model, noisy, sigmas, given, guidance):
        return noisy * sigmas.view(-1, 1, 1, 1, 1) * given["scale"] * model.x_embedder.weight.mean() * guidance


@pytest.mark.parametrize("inside", [False, True])
def test_a_host_is_given_its_inputs_where_each_cards_weights_are(inside):
    family = dataclasses.replace(FAMILIES["flux2"], host=_Host())
    with emulated_cards(4):
        runner, _ = make_divided("flux2", CARDS[:3])
        model, main_device = runner.replica_for(0)
        noisy, sigmas, scale = (torch.ones(size, device=main_device) for size in ((1, 2, 1, 2, 2), (1,), (1,)))

        def work():
            return predict(family, model, noisy, sigmas, {"scale": scale}, 2.0)

        found = model.together(work) if inside else [work()]
        expected = on_cpu(2 * noisy * model.trees[0].x_embedder.weight.mean())
        assert [each.device for each in found] == list(CARDS[: len(found)])
        assert all(torch.equal(on_cpu(each), expected) for each in found) and len(found) == (3 if inside else 1)
