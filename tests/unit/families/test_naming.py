"""The rename tables against diffusers' own converters, tensor by tensor."""

import copy

import pytest
import torch
from devicebridge.families.naming import Stack, find_by_diffusers, find_by_original, originals_of
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import Rename
from devicebridge.tests.toy import TINY, stack_tensors
from diffusers.loaders import single_file_utils

EACH_VARIANT = pytest.mark.parametrize(
    ("family", "variant"),
    [pytest.param(family, each, id=each.name) for family in FAMILIES.values() for each in family.variants],
)


def _shapes(family, variant):
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**dict(variant.transformer_config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@EACH_VARIANT
def test_every_published_checkpoint_converts_as_diffusers_converts_it(family, variant):
    # Every tensor at full height and depth, one column wide: names and rows are all that conversion touches. Bare
    # tables ([1, 6, D]) keep their first two dims.
    shapes = _shapes(family, variant)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(
            shape[0], *(1 if i > 1 or shape[0] > 1 else s for i, s in enumerate(shape[1:], 1)), generator=generator
        )
        for name, shape in shapes.items()
    }
    original = stack_tensors(family, tensors)
    assert len(original) < len(tensors) or family.name == "wan"
    _assert_equal(getattr(single_file_utils, TINY[family.name].converter)(copy.copy(original)), tensors)


@EACH_VARIANT
def test_the_table_names_every_tensor_once_both_ways(family, variant):
    shapes = _shapes(family, variant)
    stacks = originals_of(shapes, family.renames)
    members = [member for stack in stacks.values() for member in stack.members]
    assert sorted(members) == sorted(shapes)
    for original, stack in stacks.items():
        assert find_by_original(original, family.renames) == stack
        heights = [shapes[member][0] for member in stack.members]
        assert [end - start for start, end in stack.rows(sum(heights)).values()] == heights


@pytest.mark.parametrize("name", ["flux2", "flux1"])
def test_norms_are_found_under_both_spellings(name):
    renames = FAMILIES[name].renames
    for module in ("double_blocks.1.txt_attn.norm.key_norm", "single_blocks.0.norm.query_norm"):
        assert find_by_original(f"{module}.scale", renames) == find_by_original(f"{module}.weight", renames) is not None
        assert find_by_original(f"{module}.weight", renames).original == f"{module}.scale"


def test_modules_and_tensors_are_found_alike():
    renames = FAMILIES["flux1"].renames
    module = find_by_diffusers("single_transformer_blocks.12.proj_mlp", renames)
    assert module == Stack(
        original="single_blocks.12.linear1",
        members=tuple(f"single_transformer_blocks.12.{m}" for m in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        proportions=(1, 1, 1, 4),
        swap_halves=False,
    )
    assert (
        find_by_diffusers("single_transformer_blocks.12.proj_mlp.bias", renames).original
        == "single_blocks.12.linear1.bias"
    )
    assert module.rows(7 * 5)[module.members[3]] == (15, 35)
    assert find_by_original("final_layer.adaLN_modulation.1", renames).swap_halves


@pytest.mark.parametrize(
    "name", ["double_blocks.x.img_mlp.0.weight", "img_in2.weight", "blocks.0.img_in.weight", "img_in.", "double_blocks"]
)
def test_names_that_only_resemble_are_not_found(name):
    assert find_by_original(name, FAMILIES["flux2"].renames) is None


def test_refusals_say_what_was_found():
    with pytest.raises(ValueError, match=r"names controlnet_x_embedder.weight \(1 names"):
        originals_of(["x_embedder.weight", "controlnet_x_embedder.weight"], FAMILIES["flux1"].renames)
    stack = find_by_original("qkv.weight", (Rename("qkv", ("q", "k", "v")),))
    with pytest.raises(ValueError, match="qkv.weight has 8 rows, which cannot be cut 1:1:1"):
        stack.rows(8)
