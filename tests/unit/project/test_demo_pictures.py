"""The sampler steps as diffusers' scheduler does, also over two emulated cards."""

import numpy as np
import pytest
import torch
from devicebridge.families.flux2 import FLUX2
from devicebridge.scripts.demo_pictures import sample_images
from devicebridge.scripts.demo_report import split_is_equal
from devicebridge.training.objective import make_generator

LATENT_SHAPE = (8, 1, 3, 5)


@pytest.fixture(scope="module")
def model():
    from diffusers import Flux2Transformer2DModel

    torch.manual_seed(0)
    return Flux2Transformer2DModel(
        in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=6, timestep_guidance_channels=16, axes_dims_rope=(2, 2, 2, 2),
    )  # fmt: skip


def test_the_result_is_that_of_diffusers_scheduler(model):
    """The reference packs tokens and positions by itself and lets the scheduler step."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    text = {"prompt_embeds": torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1))}
    expected = torch.stack([torch.randn(*LATENT_SHAPE, generator=make_generator(3, "preview", i)) for i in range(2)])
    channels, _, height, width = LATENT_SHAPE
    ids = torch.tensor([[0, row, column, 0] for row in range(height) for column in range(width)])[None]
    scheduler = FlowMatchEulerDiscreteScheduler(shift=2.5)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / 5, 5))
    for timestep in scheduler.timesteps:
        tokens = torch.stack([sample.reshape(channels, -1).T for sample in expected])
        with torch.no_grad():
            (velocity,) = model.eval()(
                hidden_states=tokens, encoder_hidden_states=text["prompt_embeds"].repeat(2, 1, 1),
                timestep=timestep.expand(2) / 1000, guidance=torch.full((2,), 1.5), img_ids=ids,
                txt_ids=torch.tensor([[[0, 0, 0, i] for i in range(4)]]), return_dict=False,
            )  # fmt: skip
        velocity = torch.stack([sample.T.reshape(LATENT_SHAPE) for sample in velocity])
        expected = scheduler.step(velocity, timestep, expected, return_dict=False)[0]
    settings = {"num_images": 2, "steps": 5, "shift_factor": 2.5, "seed": 3, "guidance": 1.5}
    result = sample_images(model, FLUX2, text, LATENT_SHAPE, home=torch.device("cpu"), dtype=torch.float32, **settings)
    assert result.shape == (2, *LATENT_SHAPE) and result.dtype == torch.float32
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=1e-5)


def test_the_demo_says_whether_two_cards_draw_the_bits_of_one(model):
    text = {"prompt_embeds": torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(1))}
    settings = {"num_images": 1, "steps": 2, "shift_factor": 2.5, "seed": 3, "guidance": 1.5, "dtype": torch.float32}

    def draw(home):
        return sample_images(model, FLUX2, text, LATENT_SHAPE, home=home, **settings)

    assert split_is_equal(model, FLUX2, draw).endswith("the bits of one card")
    numbers = iter(range(2))
    with pytest.raises(RuntimeError, match="other bits"):
        split_is_equal(model, FLUX2, lambda home: draw(home) + next(numbers))
