"""The bridge on emulated cards: a split model is the unsplit one, number for number."""

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.placement import Placement, block_names, plan_manual
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.placed import apply_block_split, place
from devicebridge.tests.tiny_split import random_lora
from devicebridge.tests.toy import TINY

FAMILY_NAMES = sorted(FAMILIES)
HOME, NEXT = CARDS[:2]


def _forward(model, name, device="cpu", seed=0):
    family, inputs = FAMILIES[name], TINY[name].make_inputs(seed=seed)
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    return family.read_prediction(model(**inputs, return_dict=False)[0], TINY[name].make_latents(seed=seed))


def _make(name, *, lora=False, checkpointing=False, cards=CARDS[:2]):
    model, family = TINY[name].make_model(seed=0), FAMILIES[name]
    names = block_names(model, family)
    cuts = [len(names) * (i + 1) // len(cards) for i in range(len(cards) - 1)]
    split = apply_block_split(model, family, plan_manual(names, list(cards), cuts))
    if lora:
        random_lora(model, family)
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing(split.checkpoint)
    return model, split


def _gradients(model):
    return {n: on_cpu(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_output_and_gradients_equal_the_unsplit_model_bit_for_bit(name, checkpointing):
    results = []
    for cards in (CARDS[:1], CARDS[:2], CARDS[:3]):
        with emulated_cards(4):
            model, _ = _make(name, lora=True, checkpointing=checkpointing, cards=cards)
            output = _forward(model, name, cards[0])
            assert output.device == cards[0]
            output.square().mean().backward()
            results.append((on_cpu(output), _gradients(model)))
    plain = TINY[name].make_model(seed=0)
    assert len(results[0][1]) > 0 and all(g.abs().sum() > 0 for g in results[0][1].values())
    for output, gradients in results[1:]:
        assert torch.equal(output, results[0][0])
        assert gradients.keys() == results[0][1].keys()
        assert all(torch.equal(gradient, results[0][1][n]) for n, gradient in gradients.items())
    assert _forward(plain, name).shape == results[0][0].shape


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_remove_leaves_no_trace(name):
    untouched = TINY[name].make_model(seed=0).train()
    hooks = {n: _hook_counts(m) for n, m in untouched.named_modules()}
    attributes = {n: sorted(vars(m)) for n, m in untouched.named_modules()}
    with emulated_cards():
        model, split = _make(name)
        assert {str(p.device) for p in model.parameters()} == {"lazy:0", "lazy:1"}
        split.remove()
        split.remove()
    assert {n: _hook_counts(m) for n, m in model.named_modules()} == hooks
    assert {n: sorted(vars(m)) for n, m in model.named_modules()} == attributes
    place(model, Placement((), (), torch.device("cpu")))
    assert torch.equal(_forward(model, name), _forward(untouched, name))


def _hook_counts(module):
    return {name: len(value) for name, value in vars(module).items() if name.endswith(("hooks", "kwargs", "called"))}


def test_dropout_is_the_same_in_the_recomputation():
    """The first block of a card gets its arguments from elsewhere; its random state must be saved all the same."""
    with emulated_cards():
        model, split = _make("flux2", checkpointing=True)
        first_on_next = split.placement.blocks[split.placement.devices.index(NEXT)]
        devices = []
        model.get_submodule(first_on_next).register_forward_pre_hook(
            lambda module, args, kwargs: devices.append({tensor.device for tensor in _tensors((args, kwargs))}),
            with_kwargs=True,
            prepend=True,
        )
        _forward(model, "flux2", HOME).mean().backward()
        assert devices == [{NEXT}, {NEXT}]  # forward and recomputation: checkpoint saw, and saved, this card only


def _tensors(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
