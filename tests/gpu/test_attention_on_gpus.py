"""Gradients of FLUX.1 on a real GPU, by the attention that training has. Needs a CUDA device; skipped elsewhere."""

from contextlib import nullcontext

import diffusers
import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.patches.attention import sound_attention
from devicebridge.patches.compile_blocks import apply_compile
from devicebridge.tests.gpu.conftest import NEEDS_CUDA
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


def _flux1_gradients(model, kernel=None):
    """Of what goes into the blocks: double ones give attention another layout of gradient than single ones."""
    generator = torch.Generator("cuda").manual_seed(2)

    def draw(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    image, text = draw(1, 1024, 64).requires_grad_(), draw(1, 512, 4096).requires_grad_()
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
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
            found = _flux1_gradients(model)
            for one, other in zip(found, expected, strict=True):
                assert (one.float() - other.float()).norm() <= 3e-2 * other.float().norm()
    if handle is not None:
        handle.remove()
