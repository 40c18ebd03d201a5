"""What a file of weights is that is no transformer we can train, as far as its names tell."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

_LORA_NAME = re.compile(r"(\.|_)(lora_A|lora_down|lora\.down|hada_w1_a|lokr_w1|lokr_w1_a|oft_blocks)(\.|$)")
# What it is, and the pattern of the names that tell; the first match wins.
_KINDS = {
    "a Stable Diffusion checkpoint (UNet)": r"(^|\.)(input_blocks|output_blocks|down_blocks\.\d+\.resnets)\.",
    "a ControlNet": r"^(controlnet_|control_model\.|input_hint_block\.)",
    "a VAE": (
        r"^(vae\.|first_stage_model\.)?(encoder|decoder)\."
        r"(conv_in|conv1|down|up|down_blocks|up_blocks|downsamples|upsamples)\."
    ),
    "a text encoder": (
        r"^(text_model|text_projection|encoder\.block|shared|token_embedding|(language_model\.)?model\.layers"
        r"|(language_model\.)?model\.embed_tokens|model\.language_model)\."
    ),
    "an image encoder": r"^(vision_model|visual)\.",
}


def refuse_lora(path: Path, names: Collection[str]) -> None:
    """Raises: ValueError if these are the tensors of a LoRA."""
    found = [match for match in map(_LORA_NAME.search, names) if match]
    if found:
        raise ValueError(
            f"{path} is a LoRA file: {len(found)} {found[0][2]} tensors; give the model it belongs to instead"
        )


def describe_other(names: Collection[str]) -> str:
    """What a file of no supported family is; "" if its names do not tell."""
    for what, pattern in _KINDS.items():
        found = [name for name in names if re.search(pattern, name)]
        if found:
            return f"{what}: {len(found)} tensors such as {found[0]}"
    return ""
