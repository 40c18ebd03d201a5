"""The demo draws the same over two emulated cards as on one."""

import pytest
import torch
from devicebridge.families.flux import FLUX2
from devicebridge.scripts.demo_pictures import sample_images
from devicebridge.scripts.demo_report import split_is_equal

LATENT_SHAPE = (8, 1, 3, 5)


def test_the_demo_says_whether_two_cards_draw_the_bits_of_one():
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, timestep_guidance_channels=16, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip
    text = {"prompt_embeds": torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1))}
    settings = {"num_images": 1, "steps": 2, "shift_factor": 2.5, "seed": 3, "guidance": 1.5, "dtype": torch.float32}

    def draw(home):
        return sample_images(model, FLUX2, text, LATENT_SHAPE, home=home, **settings)

    assert split_is_equal(model, FLUX2, draw).endswith("the bits of one card")
    numbers = iter(range(2))
    with pytest.raises(RuntimeError, match="other bits"):
        split_is_equal(model, FLUX2, lambda home: draw(home) + next(numbers))
