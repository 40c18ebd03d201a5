"""Gradients of attention on a real GPU, one layout after another. Needs a CUDA or ROCm device; skipped elsewhere."""

from __future__ import annotations

import itertools

import pytest
import torch
from devicebridge.patches.attention import sound_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch sees none here"),
]

TOKENS, HEADS, WIDTH, MLP = 1536, 24, 128, 12288  # FLUX.1 at 512 px


def _gradients(dtype, grad):
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, TOKENS, HEADS, WIDTH)
    drawn = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3)]
    inputs = [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in drawn]
    output = torch.nn.functional.scaled_dot_product_attention(*inputs)
    return torch.autograd.grad(output, inputs, grad.to(dtype))


@pytest.mark.parametrize("order", list(itertools.permutations(["slice of wider rows", "rows", "heads"])))
def test_gradients_are_right_whatever_layout_came_before(order):
    generator = torch.Generator("cuda").manual_seed(1)
    wide = torch.randn(1, TOKENS, HEADS * WIDTH + MLP, device="cuda", generator=generator).bfloat16()
    sliced = wide[..., : HEADS * WIDTH].unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
    rows = sliced.transpose(1, 2).contiguous().transpose(1, 2)
    grads = {"slice of wider rows": sliced, "rows": rows, "heads": sliced.contiguous()}
    expected = _gradients(torch.float32, sliced)
    for name in order:
        with sound_attention():
            found = _gradients(torch.bfloat16, grads[name])
        for one, other in zip(found, expected, strict=True):
            assert (one.float() - other).norm() <= 1e-2 * other.norm(), f"{name} in {order}"
