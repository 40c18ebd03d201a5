"""How large the text of a model is before anything is encoded."""

from __future__ import annotations

from typing import Any

from devicebridge.families.comfy.text_sizes import usual_text
from torch import nn


class UNetModel(nn.Module):
    """Its attention is in another block in each build."""

    def __init__(self, label: int) -> None:
        super().__init__()
        inner: Any = nn.Module()
        inner.attn2 = nn.Module()
        inner.attn2.to_k = nn.Linear(2048, 8)
        self.input_blocks = nn.ModuleList([nn.Conv2d(4, 4, 3), inner])
        if label:
            self.label_emb = nn.Sequential(nn.Sequential(nn.Linear(label, 8)))


def test_a_unet_reads_one_window_of_clip_and_sdxls_a_pooled_text_beside_sizes() -> None:
    shapes = {name: tuple(each.shape) for name, each in usual_text(UNetModel(2816)).items()}
    assert sorted(shapes.values()) == [(77, 2048), (1280,)]
    assert [tuple(each.shape) for each in usual_text(UNetModel(0)).values()] == [(77, 2048)]
    assert usual_text(nn.Linear(2, 2)) == {}
