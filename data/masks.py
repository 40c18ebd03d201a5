"""Loss masks: from their file to the latent grid."""

from __future__ import annotations

from pathlib import Path

import torch

from .image import upright
from .open_image import broken_image, opened
from .samples import Sample


def load_mask(sample: Sample, latent_hw: tuple[int, int]) -> torch.Tensor:
    """The sample's mask on its latent grid, float32 in 0..1. [1, 1, H, W]

    Every cell is the exact mean of the mask over the area the cell covers in the image, so the mask may have another
    resolution than its image.
    """
    assert sample.mask_path is not None
    mask = read_mask(Path(sample.mask_path)).double()
    top, left, height, width = sample.crop
    rows = _cell_weights(mask.shape[0], sample.resize[0], top, height, latent_hw[0])
    columns = _cell_weights(mask.shape[1], sample.resize[1], left, width, latent_hw[1])
    return (rows @ mask @ columns.T).clamp(0, 1).float()[None, None]


def _cell_weights(num_source: int, resized: int, start: int, length: int, num_cells: int) -> torch.Tensor:
    """How much each of num_source pixels counts in each cell, when they are stretched to `resized` pixels of which
    [start, start + length) is cut into num_cells. Rows add up to 1. [num_cells, num_source], float64"""
    cells = torch.arange(num_cells + 1, dtype=torch.float64) / num_cells
    edges = (start + length * cells) * num_source / resized
    pixels = torch.arange(num_source, dtype=torch.float64)
    overlap = torch.minimum(edges[1:, None], pixels + 1) - torch.maximum(edges[:-1, None], pixels)
    return overlap.clamp_min(0) * resized * num_cells / (length * num_source)


def is_in_alpha(path: Path) -> bool:
    """Whether a mask says something by its transparency alone, which is not looked at."""
    with opened(path) as file:
        if file.mode.startswith("I") or not file.has_transparency_data:
            return False
        brightness, transparency = (band.getextrema() for band in upright(file).convert("LA").split())
        return brightness[0] == brightness[1] and transparency != (255, 255)


def read_mask(path: Path) -> torch.Tensor:
    """Brightness of the mask's pixels, 0 black to 1 white; transparency and colour profiles are not looked at. [h, w]

    Raises: ValueError naming the file if it is broken.
    """
    import numpy as np

    try:
        with opened(path) as file:
            image = upright(file)
            is_16_bit = image.mode.startswith("I")
            values = np.asarray(image if is_16_bit else image.convert("L"), dtype=np.float32)
    except broken_image() as error:
        raise ValueError(f"{path}: cannot be read as a mask ({error})") from error
    return torch.from_numpy(values / (65535 if is_16_bit else 255))
