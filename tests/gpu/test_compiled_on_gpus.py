"""Gradients of compiled blocks on a real GPU, for every scheme. Needs a CUDA device; skipped elsewhere."""

import contextlib
import dataclasses

import diffusers
import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.attention import sound_attention
from devicebridge.patches.compile_blocks import apply_compile
from devicebridge.quantization.quantize import QuantizeSettings, refusal
from devicebridge.tests.gpu.conftest import NEEDS_CUDA
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from devicebridge.training.compile_check import BlockCheck, worst_of

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]
DEVICE = torch.device("cuda:0")
# Two blocks of each kind whose products are wide and long enough for every 8-bit kernel. bf16 alone is off by 1 %,
# float8's rounding of a gradient by 3 % in each of many layers.
FLUX2 = dataclasses.replace(TINY["flux2"], latent_shape=(16, 1, 32, 32), text_shapes={"prompt_embeds": (64, 64)})
MOST_DIFFERENCE = {"none": 0.05, "fp8": 0.05, "int8": 0.05, "int8-compute": 0.15, "fp8-compute": 0.25}


def _model():
    config = FLUX2.transformer_config | {
        "attention_head_dim": 64, "num_attention_heads": 8, "axes_dims_rope": (16, 16, 16, 16),
        "joint_attention_dim": 64,
    }  # fmt: skip
    torch.manual_seed(0)
    return diffusers.Flux2Transformer2DModel(**config)


def _inputs(tiny):
    return {
        name: value.to(DEVICE, torch.bfloat16 if value.is_floating_point() and name != "timestep" else value.dtype)
        for name, value in tiny.make_inputs(seed=1).items()
    }


def _lora(model, family, rank, size):
    """As if it had been trained."""
    lora = apply_lora(model, family, LoraSettings(rank=rank, alpha=rank, dtype="float32"), seed=1)
    for index, parameter in enumerate(lora.parameters().values()):
        with torch.no_grad():
            parameter.copy_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)))
    model.train()
    return lora


def _gradients(model, lora):
    parameters = lora.parameters()
    inputs = _inputs(FLUX2)
    with sound_attention():
        output = model(**inputs, return_dict=False)[0]
        output.float().square().mean().backward()
    found = [parameter.grad.detach().cpu() for parameter in parameters.values()]
    for parameter in parameters.values():
        parameter.grad = None
    return output.detach().float(), found


@contextlib.contextmanager
def _in_one_order():
    """Attention's fastest backward adds up in no fixed order. A last bit of bfloat16 that differs rounds a gradient to
    the next float8, up to an eighth of it away: gradients of two equal runs are then more than 1 % apart."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _off(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("scheme", "is_dynamic"), [*((scheme, False) for scheme in MOST_DIFFERENCE), ("none", True), ("fp8-compute", True)]
)
def test_gradients_are_those_of_uncompiled_blocks(scheme, is_dynamic):
    family = FAMILIES["flux2"]
    model = _model().to(DEVICE, torch.bfloat16).requires_grad_(False)
    if scheme != "none":
        if refusal(QuantizeSettings(scheme), [DEVICE]):
            pytest.skip(refusal(QuantizeSettings(scheme), [DEVICE]))
        apply_quantization(model, family, QuantizeSettings(scheme))
    lora = _lora(model, family, 16, 0.03)
    with _in_one_order():
        output, expected = _gradients(model, lora)
    torch._dynamo.reset()
    handle = apply_compile(model, family, is_dynamic=is_dynamic)
    compiled_output, found = _gradients(model, lora)
    graphs = handle.num_graphs
    check = BlockCheck(model)
    with handle.watched(check):
        _gradients(model, lora)
    handle.remove()
    torch._dynamo.reset()
    with _in_one_order():
        again, most = _gradients(model, lora)[1], MOST_DIFFERENCE[scheme]
    differences = [_off(one, other) for one, other in zip(found, expected, strict=True)]
    worst = worst_of(check.found)
    print(f"{scheme}: {max(differences):.4f}, output {_off(compiled_output, output):.4f}; of blocks, {worst}")
    assert graphs > 0 and _off(compiled_output, output) <= most and max(differences) <= most
    assert len(check.found) == 4 and worst_of(check.found).excess < 1, check.found
    assert all(map(torch.equal, again, expected))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_block_of_a_family_is_right(name):
    """Compiled and uncompiled attention one after the other in one thread, too."""
    family, tiny = FAMILIES[name], TINY[name]
    model = tiny.make_model(0).to(DEVICE, torch.bfloat16).requires_grad_(False)
    _lora(model, family, 4, 0.1)
    torch._dynamo.reset()
    handle, check = apply_compile(model, family), BlockCheck(model)
    inputs = _inputs(tiny)
    with sound_attention(), handle.watched(check):
        model(**inputs, return_dict=False)[0].float().square().mean().backward()
    handle.remove()
    torch._dynamo.reset()
    print(f"{name}: {worst_of(check.found)}")
    blocks = [block for each in family.block_lists for block in model.get_submodule(each.name)]
    assert len(check.found) == len(blocks) and worst_of(check.found).excess < 1 and not check.is_full, check.found
