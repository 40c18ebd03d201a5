"""A text as a picture, for places that show pictures better than lines."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

_COLUMNS, _SIZE, _LINE, _MARGIN = 84, 15, 21, 12  # characters; pixels


def draw_text(text: str) -> Picture:
    """Dark on white, long lines wrapped. RGB"""
    from PIL import Image, ImageDraw, ImageFont

    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, _COLUMNS) or [""]]
    font = ImageFont.load_default(_SIZE)
    width = max((int(font.getlength(line)) for line in lines), default=0)
    sheet = Image.new("RGB", (width + 2 * _MARGIN, len(lines) * _LINE + 2 * _MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for number, line in enumerate(lines):
        draw.text((_MARGIN, _MARGIN + number * _LINE), line, fill="black", font=font)
    return sheet
