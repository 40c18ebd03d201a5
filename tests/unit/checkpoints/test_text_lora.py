"""LoRA of text encoders by the names of kohya's trainer."""

from __future__ import annotations

import pytest
import torch
from devicebridge.checkpoints.lora_file import is_of_text, text_lora_for_comfyui

_LAYER = "transformer.text_model.encoder.layers.3.self_attn.q_proj"


def _lora(*parts: str) -> dict[str, torch.Tensor]:
    """Of one layer of each encoder, and one of the diffusion model; rank 4."""
    layers = ["input_blocks.1.0.proj", *(f"text_encoders.{part}.{_LAYER}" for part in parts)]
    return {f"{each}.lora_{kind}.weight": torch.randn(4, 4) for each in layers for kind in "AB"}


@pytest.mark.parametrize(
    ("parts", "prefixes"),
    [
        (("clip_l",), ("lora_te",)),
        (("clip_h",), ("lora_te",)),
        (("clip_g",), ("lora_te",)),
        (("clip_l", "clip_g"), ("lora_te1", "lora_te2")),
    ],
)
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
