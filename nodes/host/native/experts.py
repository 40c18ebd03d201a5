"""Wan 2.2 A14B's two experts as ComfyUI has them: at which noise they meet, and which files are surely one of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Of model_base, those that were published as two experts; a file of Wan 2.1 has the same class, and often its shapes.
_PAIRS = ("WAN21", "WAN21_Camera", "WAN21_Vace")
_FROM_TEXT, _FROM_IMAGES = 0.875, 0.9  # noise level where the published pairs change from high to low noise
_NAMES = re.compile(r"wan[ _-]?2[._-]?2|(high|low)[ _-]?noise", re.IGNORECASE)
_HALVINGS = 40


def boundary_of(base: Any, beside: int) -> float:
    """The time in 0..1, before the model's own shift, where the pair's experts meet; 0.0 for a class without pairs.

    Args:
        beside: channels that it is given beside the noise.
    """
    if type(base).__name__ not in _PAIRS:
        return 0.0
    wanted, low, high = _FROM_IMAGES if beside else _FROM_TEXT, 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_above = float(base.model_sampling.percent_to_sigma(1 - middle)) > wanted
        low, high = (low, middle) if is_above else (middle, high)
    return (low + high) / 2


def is_expert(base: Any, beside: int, path: Path) -> bool:
    """Whether a file is one of two experts: by its name, or as only Wan 2.2 takes an image without CLIP vision."""
    if type(base).__name__ not in _PAIRS:
        return False
    takes_image = bool(beside) and getattr(base.diffusion_model, "img_emb", None) is None
    return takes_image or _NAMES.search(path.name) is not None
