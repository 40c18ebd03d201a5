"""LoRA files: what they do to the weights, and whose names they use. Who reads them: test_lora_readers.py."""

import pytest
import torch
from devicebridge.checkpoints.lora_file import (
    check_original_layout,
    is_of_text,
    make_lora_tensors,
    text_lora_for_comfyui,
)
from devicebridge.families.naming import originals_of
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.lora import resolve_targets
from devicebridge.tests.full_size import asset, full_file, full_model
from devicebridge.tests.toy import TINY, stack_tensors

FAMILY_NAMES = sorted(FAMILIES)
RANK, ALPHA = 2, 3.0


def _make_lora(model, modules, dora=False, rank=RANK, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in modules:
        weight = model.get_submodule(name).weight
        tensors[f"{name}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator)
        if dora:
            noise = torch.rand(weight.shape[0], generator=generator) + 0.5
            tensors[f"{name}.dora_scale"] = (weight.detach().norm(dim=1) * noise).detach()
    return tensors


def _adapted(weight, a, b, alpha, magnitude=None):
    changed = weight + alpha / a.shape[0] * b @ a
    return changed if magnitude is None else changed * (magnitude.reshape(-1, 1) / changed.norm(dim=1, keepdim=True))


def _adapt_file(weights, tensors, prefix):
    """The state dict with a file's LoRA applied as a loader applies it, knowing nothing of families."""
    result = dict(weights)
    for module in [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")]:
        key = module.removeprefix(prefix) + ".weight"
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        alpha = tensors[f"{module}.alpha"].item() if f"{module}.alpha" in tensors else a.shape[0]
        result[key] = _adapted(weights[key], a, b, alpha, tensors.get(f"{module}.dora_scale"))
    return result


def _expected(model, lora):
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name in [n for n in lora if n.endswith(".lora_A.weight")]:
        module = name.removesuffix(".lora_A.weight")
        a, b = lora[name], lora[f"{module}.lora_B.weight"]
        key = f"{module}.weight"
        weights[key] = _adapted(weights[key], a, b, ALPHA, lora.get(f"{module}.dora_scale"))
    return weights


def _assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-5), name


def _targets(name, which):
    usual, tiny = FAMILIES[name].lora_targets, TINY[name]
    return {"default": usual, "more": usual + tiny.more_targets, "parts": tiny.stack_parts}[which]


@pytest.mark.parametrize(("which", "dora"), [("default", False), ("more", False), ("parts", False), ("more", True)])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_the_original_layout_adapts_the_original_weights_alike(name, which, dora):
    model, family = TINY[name].make_model(), FAMILIES[name]
    lora = _make_lora(model, resolve_targets(model, _targets(name, which)), dora)
    file = make_lora_tensors(family, "original", lora, lora, ALPHA, RANK)
    assert all(t.shape[1] == 1 for n, t in file.items() if n.endswith(".dora_scale"))
    assert all(t.dtype == torch.float32 and t.ndim == 0 for n, t in file.items() if n.endswith(".alpha"))
    weights = stack_tensors(family, {n: t.detach() for n, t in model.state_dict().items()})
    _assert_close(_adapt_file(weights, file, "diffusion_model."), stack_tensors(family, _expected(model, lora)))


def test_refusals():
    family, model = FAMILIES["flux1"], TINY["flux1"].make_model()
    modules = resolve_targets(model, ("transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"))
    lora = _make_lora(model, modules, dora=True)
    message = r"double_blocks.0.img_attn.qkv can be saved only if all of it is trained; transformer_blocks.0.attn.to_v"
    with pytest.raises(ValueError, match=message):
        make_lora_tensors(family, "original", lora, lora, ALPHA, RANK)
    with pytest.raises(ValueError, match=message):
        check_original_layout(family, modules, dora=True)
    check_original_layout(family, modules, dora=False)
    wan = _make_lora(TINY["wan"].make_model(), ["blocks.0.ffn.net.2"], dora=True)
    with pytest.raises(ValueError, match="no DoRA of Wan is read by both"):
        make_lora_tensors(FAMILIES["wan"], "both", wan, wan, ALPHA, RANK)
    for name, message in (
        ("blocks.0.attn1.to_q.lora_A.weight", "no row of the rename table names blocks.0.attn1.to_q"),
        ("transformer_blocks.0.attn.to_q.weight", "is no LoRA tensor"),
    ):
        other = {name: torch.zeros(2, 2), name.replace("_A", "_B"): torch.zeros(2, 2)}
        with pytest.raises(ValueError, match=message):
            make_lora_tensors(family, "original", other, other, ALPHA, RANK)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_names_and_shapes_are_those_that_were_reviewed(name):
    """lora_keys_<family>.json holds what ComfyUI v0.33.0 was seen to map, at full size: modules and [out, in]."""
    file = full_file(name)
    found = {
        n.removesuffix(".lora_A.weight"): [file[n.replace("lora_A", "lora_B")].shape[0], file[n].shape[1]]
        for n in file
        if n.endswith(".lora_A.weight")
    }
    assert found == asset(name)["modules"]
    assert sorted(file) == sorted(f"{module}.{end}" for module in found for end in asset(name)["suffixes"])


def test_stacks_of_the_default_targets_are_whole():
    """So that DoRA can be saved in the original layout with every family's defaults."""
    for name in FAMILY_NAMES:
        modules = resolve_targets(full_model(name), FAMILIES[name].lora_targets)
        check_original_layout(FAMILIES[name], modules, dora=True)
        members = [m for s in originals_of(modules, FAMILIES[name].renames).values() for m in s.members]
        assert sorted(members) == sorted(modules)


_LAYER = "transformer.text_model.encoder.layers.3.self_attn.q_proj"


def _lora(*parts: str) -> dict[str, torch.Tensor]:
    layers = ["input_blocks.1.0.proj", *(f"text_encoders.{part}.{_LAYER}" for part in parts)]
    return {f"{each}.lora_{kind}.weight": torch.randn(4, 4) for each in layers for kind in "AB"}


@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        (("clip_l",), ("lora_te",)), (("clip_h",), ("lora_te",)), (("clip_g",), ("lora_te",)),
        (("clip_l", "clip_g"), ("lora_te1", "lora_te2")),
    ],
)  # fmt: skip
def test_encoders_are_numbered_where_there_are_two(parts: tuple[str, ...], prefixes: tuple[str, ...]) -> None:
    given = _lora(*parts)
    written = text_lora_for_comfyui(given, 0.5)
    assert len(written) == 3 * len(parts)
    for part, prefix in zip(parts, prefixes, strict=True):
        layer = f"{prefix}_text_model_encoder_layers_3_self_attn_q_proj"
        assert torch.equal(written[f"{layer}.lora_down.weight"], given[f"text_encoders.{part}.{_LAYER}.lora_A.weight"])
        assert torch.equal(written[f"{layer}.lora_up.weight"], given[f"text_encoders.{part}.{_LAYER}.lora_B.weight"])
        assert float(written[f"{layer}.alpha"]) == 2.0  # strength 0.5 at rank 4


def test_the_rest_is_that_of_the_diffusion_model() -> None:
    assert {name for name in _lora("clip_l") if not is_of_text(name)} == _lora().keys()
    assert text_lora_for_comfyui(_lora(), 1.0) == {}
