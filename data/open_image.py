"""Opening image files: the one place that asks Pillow to, and only for formats that are named here.

Pillow tells a format by a file's content, whatever the name says, and knows some whose reader starts another program
(PostScript: Ghostscript) or reads other files. A dataset is often somebody else's, so none of those is ever tried.

An image of few bytes may unfold to any number of pixels. Pillow's own limit is a setting of the whole process, which
other packs switch off; ours is not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_PIXELS = 178_956_970  # Pillow's own limit: half a gigabyte of RGB


def broken_image() -> tuple[type[Exception], ...]:
    """What opening or decoding a broken image raises; SyntaxError is a broken PNG chunk's."""
    from PIL import Image

    return (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


@contextmanager
def opened(path: str | Path) -> Iterator[PilImage]:
    """The image file, with its header read and no pixel yet.

    Raises: ValueError if it is no ordinary file, of another format, or holds too many pixels; what Pillow raises for a
        broken one.
    """
    from PIL import Image, UnidentifiedImageError

    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would keep us waiting
        raise ValueError("it is no ordinary file; put an image in its place")
    try:
        file = Image.open(path, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no image of a format that is read here; save it as {_LISTED}") from error
    with file:
        refuse_too_large(*file.size)
        yield file


def refuse_too_large(width: int, height: int) -> None:
    """Raises: ValueError for more pixels than one image or frame may have."""
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width}x{height} pixels, more than {MAX_PIXELS} in all; scale it down")


_LISTED = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
