"""Gradients of attention on a real GPU, one layout after another. Needs a CUDA device; skipped elsewhere."""

import itertools

import diffusers
import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.attention import sound_attention
from devicebridge.patches.compile_blocks import apply_compile
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.version.hip is not None, reason="needs a CUDA GPU; torch sees none here"
    ),
]

HEADS, WIDTH, MLP = 24, 128, 12288  # of FLUX.1
ORDERS = list(itertools.permutations(["slice of wider rows", "rows", "heads"]))


def _gradients(dtype, grad):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, grad.shape[2], HEADS, WIDTH)
    drawn = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    inputs = [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in drawn]
    output = torch.nn.functional.scaled_dot_product_attention(*inputs)
    return torch.autograd.grad(output, inputs, grad.to(dtype))


def _grads(num_tokens):
    generator = torch.Generator("cuda").manual_seed(1)
    wide = torch.randn(1, num_tokens, HEADS * WIDTH + MLP, device="cuda", generator=generator).bfloat16()
    sliced = wide[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    rows = sliced.transpose(1, 2).contiguous().transpose(1, 2)
    return {"slice of wider rows": sliced, "rows": rows, "heads": sliced.contiguous()}


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_right_whatever_layout_came_before(order):
    grads = _grads(1024 + 64 * ORDERS.index(order))  # each order makes a plan of its own
    expected = _gradients(torch.float32, grads["rows"])
    for name in order:
        with sound_attention(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = _gradients(torch.bfloat16, grads[name])
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).norm() <= 1e-2 * other.norm(), f"{name} in {order}"


def test_a_plan_that_somebody_left_behind_is_refused():
    """By torch as it is; once this torch tells layouts apart, patches/attention.py can go."""
    grads = _grads(1984)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        _gradients(torch.bfloat16, grads["heads"])
        with sound_attention(), pytest.raises(RuntimeError, match="wrong gradient"):
            _gradients(torch.bfloat16, grads["rows"])


def _flux1_gradients(model, kernel):
    """Of what goes into the blocks: double ones give attention another layout of gradient than single ones."""
    generator = torch.Generator("cuda").manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    image, text = draw(1, 1024, 64).requires_grad_(), draw(1, 512, 4096).requires_grad_()
    with sdpa_kernel(kernel):
        output = model(
            hidden_states=image, encoder_hidden_states=text, pooled_projections=draw(1, 768),
            timestep=torch.full((1,), 0.5, device="cuda"), guidance=torch.ones(1, device="cuda"),
            img_ids=torch.randn(1024, 3, device="cuda", generator=generator),
            txt_ids=torch.zeros(512, 3, device="cuda"), return_dict=False,
        )[0]  # fmt: skip
        return torch.autograd.grad(output, (image, text), draw(*output.shape))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_flux1_has_the_gradients_of_flash_attention(is_compiled):
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True).bfloat16()
    model.requires_grad_(False)
    expected = _flux1_gradients(model, SDPBackend.FLASH_ATTENTION)
    handle = apply_compile(model, FAMILIES["flux1"]) if is_compiled else None
    with sound_attention():
        for _ in range(2):
            found = _flux1_gradients(model, SDPBackend.CUDNN_ATTENTION)
            for one, other in zip(found, expected, strict=True):
                assert (one.float() - other.float()).norm() <= 3e-2 * other.float().norm()
    if handle is not None:
        handle.remove()
