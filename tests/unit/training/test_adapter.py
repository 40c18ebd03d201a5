"""The LoRA that is attached: the same however the model is split, gone without a trace, and right in ComfyUI."""

from __future__ import annotations

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.quantization.quantize import SCHEMES, QuantizeSettings, apply_quantization, full_weight
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora

NAMES = sorted(FAMILIES)


def _randomise(handle):
    with torch.no_grad():
        for parameter in handle.parameters().values():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_lora_changes_nothing_and_remove_leaves_no_trace(name):
    model = TINY[name].make_model()
    inputs = TINY[name].make_inputs()
    modules = {n: type(m) for n, m in model.named_modules()}
    attributes = sorted(vars(model))
    before = model(**inputs, return_dict=False)[0]
    handle = apply_lora(model, FAMILIES[name], LoraSettings(rank=3), seed=0)
    assert torch.equal(model(**inputs, return_dict=False)[0], before)
    _randomise(handle)
    assert not torch.equal(model(**inputs, return_dict=False)[0], before)
    handle.remove()
    assert torch.equal(model(**inputs, return_dict=False)[0], before)
    assert {n: type(m) for n, m in model.named_modules()} == modules and sorted(vars(model)) == attributes


def test_seed_decides_the_weights_and_nothing_else_does():
    def weights(seed):
        torch.rand(seed + 1)  # the state of the process does not matter
        handle = apply_lora(TINY["flux2"].make_model(), FAMILIES["flux2"], LoraSettings(rank=3), seed=seed)
        return handle.tensors()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert any(not torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_lora_is_trained_in_the_asked_type(dtype):
    model = TINY["wan"].make_model().to(torch.bfloat16)
    handle = apply_lora(model, FAMILIES["wan"], LoraSettings(rank=3, dtype=dtype), seed=0)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == set(handle.parameters())
    assert {p.dtype for p in handle.parameters().values()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("scheme", ["none", *SCHEMES])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_the_file_gives_comfyui_the_trained_layer(dora, scheme):
    """ComfyUI's arithmetic, written out: (W + alpha / rank BA), times dora_scale / |W| where there is one."""
    model = TINY["flux2"].make_model()
    if scheme != "none":
        apply_quantization(model, FAMILIES["flux2"], QuantizeSettings(scheme))
    handle = apply_lora(model, FAMILIES["flux2"], LoraSettings(rank=3, alpha=6, dora=dora), seed=0)
    _randomise(handle)
    tensors = handle.tensors_for_comfyui()
    for name in handle.targets:
        layer = model.get_submodule(name)
        weight = full_weight(layer.get_base_layer())
        merged = weight + 6 / 3 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]
        if dora:
            merged = merged * (tensors[f"{name}.dora_scale"] / weight.norm(dim=1))[:, None]
        x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1))
        expected = layer(x) - (0 if layer.get_base_layer().bias is None else layer.get_base_layer().bias)
        assert torch.allclose(x @ merged.T, expected, rtol=1e-3, atol=1e-4), name


def test_loading_another_lora_is_refused():
    handle = apply_lora(TINY["flux2"].make_model(), FAMILIES["flux2"], LoraSettings(rank=3), seed=0)
    tensors = handle.tensors()
    tensors.pop(next(iter(tensors)))
    with pytest.raises(ValueError, match="not of this job: 1 names differ"):
        handle.load_tensors(tensors)
