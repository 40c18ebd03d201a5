"""The LoRA that is attached: the same however the model is split, gone without a trace, and right in ComfyUI."""

from typing import Any

import pytest
import torch
from devicebridge.checkpoints.lora_file import lycoris_for_comfyui
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from devicebridge.quantization.quantize import SCHEMES, QuantizeSettings, full_weight
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora, find_targets, without_lora

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
        ({"kind": "oft", "dora": True}, 'kind is "oft"'), ({"kind": "lokr", "dropout": 0.5}, "dropout is of kind"),
        ({"factor": 4}, 'belongs to kind = "lokr"'),
        ({"targets": ("text_encoder.*",)}, "set text_encoder = true"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        LoraSettings(**values)


KINDS = {
    "LoHa": {"kind": "loha"}, "LoKr": {"kind": "lokr"}, "LoKr, cut": {"kind": "lokr", "factor": 4},
    "DoKr": {"kind": "lokr", "dora": True}, "LoHa with DoRA": {"kind": "loha", "dora": True}, "OFT": {"kind": "oft"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "scheme"), [("flux1", "none"), ("wan", "int8"), ("wan", "int8-compute")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_begins_with_no_change_and_its_file_gives_comfyui_the_trained_layer(kind, name, scheme):
    """ComfyUI's arithmetic, written out, of what the base computes: products, dora_scale / |W|, and rotated rows."""
    model, inputs = TINY[name].make_model(), TINY[name].make_inputs()
    if scheme != "none":
        apply_quantization(model, FAMILIES[name], QuantizeSettings(scheme))
    before = model(**inputs, return_dict=False)[0]
    settings = LoraSettings(**{"rank": 4 if kind == "OFT" else 2, "alpha": 4, **KINDS[kind]})
    handle = apply_lora(model, FAMILIES[name], settings, seed=0)
    assert torch.equal(model(**inputs, return_dict=False)[0], before)
    _randomise(handle)
    with without_lora(model):
        assert torch.equal(model(**inputs, return_dict=False)[0], before)
    file = lycoris_for_comfyui(ModelFamily(**{**vars(FAMILIES[name]), "renames": ()}), handle.tensors_for_comfyui(), 2)
    for target in handle.targets:
        layer = model.get_submodule(target)
        base, parts = layer.base_layer, {
            key.rpartition(".")[2]: each.double() for key, each in file.items()
            if key.rpartition(".")[0] == f"diffusion_model.{target}"
        }  # fmt: skip
        x = torch.randn(3, base.in_features, generator=torch.Generator().manual_seed(1))
        bias = 0 if base.bias is None else base.bias.double()
        expected = base(x).double() - bias
        if "hada_w1_a" in parts:
            factors = (parts[f"hada_w{each}"] for each in ("1_a", "1_b", "2_a", "2_b"))
            expected += x.double() @ torch.einsum("or,ri,os,si->oi", *factors).T
        elif "lokr_w1" in parts:
            second = parts["lokr_w2"] if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
            expected += x.double() @ torch.kron(parts["lokr_w1"], second).T
        if "dora_scale" in parts:
            assert parts["dora_scale"].shape == (base.out_features, 1)
            expected *= parts["dora_scale"][:, 0] / full_weight(base).double().norm(dim=1)
        if "oft_blocks" in parts:
            (count, size, _), skew = parts["oft_blocks"].shape, parts["oft_blocks"] - parts["oft_blocks"].mT
            turned = (torch.eye(size) + skew) @ torch.linalg.inv(torch.eye(size) - skew)
            assert size == 4 and torch.allclose(turned @ turned.mT, torch.eye(size).double(), atol=1e-10)
            expected = torch.einsum("xkn,knm->xkm", expected.view(-1, count, size), turned).flatten(1)
        assert torch.allclose(layer(x).double(), expected + bias, rtol=1e-3, atol=1e-3), target
        assert ("dora_scale" in parts) == settings.dora and not torch.allclose(layer(x), base(x), atol=1e-2)


def test_oft_of_rows_that_cannot_be_cut_is_refused_by_name():
    with pytest.raises(ValueError, match=r"cut the rows of .*blocks of 2 to 1; set another lora\.rank"):
        find_targets(TINY["wan"].make_model(), FAMILIES["wan"], LoraSettings(kind="oft", rank=1))


@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "oft"])
def test_an_adapter_is_on_the_card_of_its_layer(kind: Any) -> None:
    model = TINY["flux2"].make_model().requires_grad_(False)
    with emulated_cards():
        model.single_transformer_blocks.to(CARDS[1])
        handle = apply_lora(model, FAMILIES["flux2"], LoraSettings(kind=kind, rank=2, dora=kind != "oft"), seed=0)
        for name in handle.targets:
            layer = model.get_submodule(name)
            device = CARDS[1] if name.startswith("single_") else torch.device("cpu")
            assert {each.device for each in layer.parameters()} == {device}, name
