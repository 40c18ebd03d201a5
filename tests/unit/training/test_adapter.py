"""The LoRA that is attached: the same however the model is split, gone without a trace, and right in ComfyUI."""

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.quantization.quantize import SCHEMES, QuantizeSettings, full_weight
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora, find_targets

NAMES = sorted(FAMILIES)


def _randomise(handle):
    with torch.no_grad():
        for parameter in handle.parameters().values():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_lora_changes_nothing(name):
    model = TINY[name].make_model()
    inputs = TINY[name].make_inputs()
    before = model(**inputs, return_dict=False)[0]
    handle = apply_lora(model, FAMILIES[name], LoraSettings(rank=3), seed=0)
    assert torch.equal(model(**inputs, return_dict=False)[0], before)
    _randomise(handle)
    assert not torch.equal(model(**inputs, return_dict=False)[0], before)


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


@pytest.mark.parametrize("name", NAMES)
def test_presets_name_the_attention_or_every_linear_of_the_blocks(name):
    model, family = TINY[name].make_model(), FAMILIES[name]
    lists = tuple(f"{blocks.name}." for blocks in family.block_lists)
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    assert find_targets(model, family, LoraSettings(layers="all")) == [n for n in linears if n.startswith(lists)]
    attention = find_targets(model, family, LoraSettings(layers="attention"))
    expected = [n for n in linears if n.startswith(lists) and "attn" in n]
    assert attention == expected and 0 < len(attention) < len(linears)
    apply_lora(model, family, LoraSettings(layers="attention", rank=2), seed=0)
    assert find_targets(model, family, LoraSettings(layers="attention")) == attention


def test_a_pattern_behind_an_exclamation_mark_leaves_layers_out():
    model, family = TINY["flux2"].make_model(), FAMILIES["flux2"]
    usual = find_targets(model, family, LoraSettings())
    fewer = find_targets(model, family, LoraSettings(targets=("!*.ff*",)))
    assert fewer == [name for name in usual if ".ff" not in name] and len(fewer) < len(usual)
    with pytest.raises(ValueError, match="match no linear"):
        find_targets(model, family, LoraSettings(targets=("!*.nothing",)))
    with pytest.raises(ValueError, match="leave no linear"):
        find_targets(model, family, LoraSettings(targets=("!*",)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": "all", "targets": ("*.to_q",)}, "both say what is trained"),
        ({"kind": "lokr", "dora": True}, "dora is of kind"), ({"kind": "lokr", "dropout": 0.5}, "dropout is of kind"),
        ({"kind": "loha", "dora": True}, 'kind is "loha"'), ({"factor": 4}, 'belongs to kind = "lokr"'),
        ({"targets": ("text_encoder.*",)}, "set text_encoder = true"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(**values)


@pytest.mark.parametrize(("name", "scheme"), [("flux1", "none"), ("wan", "int8-compute")])
def test_loha_begins_with_no_change_and_is_a_product_of_two_loras(name, scheme):
    model, inputs = TINY[name].make_model(), TINY[name].make_inputs()
    if scheme != "none":
        apply_quantization(model, FAMILIES[name], QuantizeSettings(scheme))
    before = model(**inputs, return_dict=False)[0]
    handle = apply_lora(model, FAMILIES[name], LoraSettings(rank=2, alpha=4, kind="loha"), seed=0)
    assert torch.equal(model(**inputs, return_dict=False)[0], before)
    _randomise(handle)
    tensors = handle.tensors()
    for target in handle.targets:
        layer = model.get_submodule(target)
        a1, b1, a2, b2 = (tensors[f"{target}.hada_w{part}"].double() for part in ("1_a", "1_b", "2_a", "2_b"))
        change = 4 / 2 * torch.einsum("or,ri,os,si->oi", a1, b1, a2, b2).float()
        x = torch.randn(3, change.shape[1], generator=torch.Generator().manual_seed(1))
        assert torch.allclose(layer(x) - layer.base_layer(x), x @ change.T, rtol=1e-3, atol=1e-3), target


@pytest.mark.parametrize(
    ("name", "factor", "scheme"),
    [("flux1", 0, "none"), ("flux2", 4, "none"), ("wan", 0, "int8-compute"), ("wan", 4, "int8-compute")],
)
def test_lokr_begins_with_no_change_and_is_its_kronecker_product(name, factor, scheme):
    model, inputs = TINY[name].make_model(), TINY[name].make_inputs()
    if scheme != "none":
        apply_quantization(model, FAMILIES[name], QuantizeSettings(scheme))
    before = model(**inputs, return_dict=False)[0]
    handle = apply_lora(model, FAMILIES[name], LoraSettings(rank=2, alpha=4, kind="lokr", factor=factor), seed=0)
    assert torch.equal(model(**inputs, return_dict=False)[0], before)
    _randomise(handle)
    tensors = handle.tensors()
    for target in handle.targets:
        layer = model.get_submodule(target)
        second = tensors.get(f"{target}.lokr_w2")
        if second is None:
            second = tensors[f"{target}.lokr_w2_a"] @ tensors[f"{target}.lokr_w2_b"]
        change = 4 / 2 * torch.kron(tensors[f"{target}.lokr_w1"], second)
        x = torch.randn(3, change.shape[1], generator=torch.Generator().manual_seed(1))
        assert torch.allclose(layer(x) - layer.base_layer(x), x @ change.T, rtol=1e-3, atol=1e-3), target
