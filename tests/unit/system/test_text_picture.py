"""Text as a picture: every line and every letter of it is there, and none is cut."""

from __future__ import annotations

import numpy as np
import pytest
from devicebridge.system.telling import draw_text
from PIL import Image


def _ink(image: Image.Image) -> np.ndarray:
    grey = np.asarray(image.convert("L")).astype(int)
    return np.abs(grey - grey[0, 0]) > 32


@pytest.mark.parametrize("lines", [1, 2, 7])
def test_each_line_is_drawn_below_the_one_before(lines: int) -> None:
    rows = _ink(draw_text("\n".join(["card *one* holds 24 GB"] * lines))).any(axis=1)
    begun = int(rows[0]) + int((rows[1:] & ~rows[:-1]).sum())
    assert begun == lines


def test_a_long_line_goes_on_below_and_nothing_is_cut() -> None:
    short, long = (draw_text("word " * count) for count in (15, 40))
    assert _ink(long).sum() == pytest.approx(_ink(short).sum() * 40 / 15, rel=0.02)
    for image in (short, long):
        ink = _ink(image)
        assert not ink[:, :4].any() and not ink[:, -4:].any() and not ink[-4:].any()
