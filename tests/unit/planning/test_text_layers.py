"""What a layer of a text encoder keeps of a caption, against arithmetic on its sizes."""

from __future__ import annotations

import pytest
from devicebridge.config.job import LoraSettings
from devicebridge.families.flux2 import FLUX2
from devicebridge.planning.text_layers import NUM_TOKENS, LayerSize, kept_of_window

_ROUNDING = 512  # of every tensor, as cards have it
SIZES = {"CLIP-L": LayerSize(768, 3072, is_quick=True), "CLIP-G": LayerSize(1280, 5120, is_quick=False)}


def _bytes(values: float) -> float:
    return 4 * NUM_TOKENS * values


@pytest.mark.parametrize("name", SIZES)
def test_a_layer_keeps_what_its_norms_attention_and_lora_read(name: str) -> None:
    """Of a token: the normalised states twice, q, k, v, what attention makes, and the sum between; of the MLP what goes
    in and out of its activation, and the sigmoid of a quick one. Two figures a norm and one a head of attention."""
    size, rank = SIZES[name], 4
    found = kept_of_window(size, LoraSettings(rank=16, text_encoder=True, text_encoder_rank=rank), FLUX2)
    assert found.inputs == _bytes(size.width)
    values = 7 * size.width + (3 if size.is_quick else 2) * size.inner
    small = 2 * 2 + size.width // 64 + 6 * rank
    assert _bytes(values + small) <= found.kept <= _bytes(values + small) + 30 * _ROUNDING


def test_dropout_keeps_what_each_lora_was_given_and_drew() -> None:
    size = SIZES["CLIP-G"]
    plain, dropping = (
        kept_of_window(size, LoraSettings(rank=16, text_encoder=True, dropout=dropout), FLUX2).kept
        for dropout in (0.0, 0.1)
    )
    inputs = _bytes(5 * size.width + size.inner)  # of q, k, v, out and fc1; and of fc2
    assert dropping - plain > inputs
