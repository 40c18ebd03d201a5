"""ComfyUI's audio models, one row each."""

from __future__ import annotations

from .native import NativeModel

AUDIO_MODELS: tuple[NativeModel, ...] = (
    NativeModel(
        class_name="ACEStepTransformer2DModel",
        module="comfy.ldm.ace.model",
        block_lists=("transformer_blocks",),
        tail=("final_layer",),
        note="ACE-Step 1; the lyric encoder's own layers stay at home",
    ),
)
