"""Opening image files: the one place that asks Pillow to, and only for formats that are named here.

Pillow tells a format by a file's content, whatever the name says, and knows some whose reader starts another program
(PostScript: Ghostscript) or reads other files. A dataset is often somebody else's, so none of those is ever tried.
Which of the named formats are read here, and under which endings, Pillow says: HEIC and JPEG XL need a plugin.

A file is handed to Pillow open. Given its name, Pillow maps uncompressed images into memory, and of a TIFF that is to
be turned it maps the rows in the wrong length.

An image of few bytes may unfold to any number of pixels. Pillow's own limit is a setting of the whole process, which
other packs switch off; ours is not. However many threads and requests ask, those that are open at once hold no more
pixels than the largest single one may have; others wait.
"""

from __future__ import annotations

import importlib
import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

_EVERYWHERE = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_FORMATS = (*_EVERYWHERE, "AVIF", "JPEG2000", "HEIF", "JXL")
_ANIMATED = ("PNG", "WEBP", "GIF", "AVIF", "JXL")  # one frame or many: the name does not tell
PLUGINS = {"HEIF": "pillow-heif", "JXL": "pillow-jxl-plugin"}  # packages, whose import tells Pillow
MAX_PIXELS = 178_956_970  # Pillow's own limit: half a gigabyte of RGB
_TILE = (322, 323)  # tags of TIFF: width and height
_turn, _changed = threading.Lock(), threading.Condition()
_open_now = 0  # pixels


def broken_image() -> tuple[type[Exception], ...]:
    """What opening or decoding a broken image raises; SyntaxError is a broken PNG chunk's."""
    from PIL import Image

    return (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """What Pillow reads here. Its init is not thread-safe: to be asked before threads open images."""
    from PIL import Image

    for module in ("pillow_heif.HeifImagePlugin", "pillow_jxl"):
        with suppress(ImportError):
            importlib.import_module(module)
    Image.init()
    return tuple(each for each in _FORMATS if each in Image.OPEN)


@lru_cache(maxsize=1)
def image_suffixes() -> tuple[str, ...]:
    """The endings of images that are read here, in lower case and with their dot; a GIF counts as a clip."""
    return _suffixes_of(tuple(each for each in _FORMATS if each != "GIF"))


@lru_cache(maxsize=1)
def animation_suffixes() -> tuple[str, ...]:
    """Those of image_suffixes whose files may be clips."""
    return _suffixes_of(_ANIMATED)


def _suffixes_of(wanted: tuple[str, ...]) -> tuple[str, ...]:
    from PIL import Image

    known = _formats()
    found = {suffix: kind for suffix, kind in Image.registered_extensions().items() if kind in known}
    return tuple(sorted((each for each, kind in found.items() if kind in wanted), key=lambda s: wanted.index(found[s])))


@contextmanager
def opened(path: str | Path) -> Iterator[PilImage]:
    """The image file, with its header read and no pixel yet. A thread has one open at a time, or may wait for itself.

    Raises: ValueError if it is no ordinary file, of another format, of numbers that mean no brightness, or holds too
        many pixels; what Pillow raises for a broken one.
    """
    from PIL import Image, UnidentifiedImageError

    if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would keep us waiting
        raise ValueError("it is no ordinary file; put an image in its place")
    with open(path, "rb") as data:
        try:
            file = Image.open(data, formats=_formats())
            with file:
                size = decoded_size(file)
                refuse_too_large(*size)
                _refuse_unknown_range(file)
                with among_open(size[0] * size[1]):
                    yield file
        except UnidentifiedImageError as error:
            raise ValueError(f"it is no image of a format that is read here; save it as {_LISTED}") from error
        except RuntimeError as error:  # a plugin's, of a broken file
            raise ValueError(str(error).partition("\n")[0]) from error


def decoded_size(file: PilImage) -> tuple[int, int]:
    """Width and height of what is decoded of an image: of a TIFF a tile may be larger than the whole."""
    tags = getattr(file, "tag_v2", {})
    width, height = (tags.get(each) for each in _TILE)
    tile = (width, height) if isinstance(width, int) and isinstance(height, int) else (0, 0)
    return max(file.size, tile, key=math.prod)


_BITS, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339  # of TIFF


def _refuse_unknown_range(image: Any) -> None:
    """Raises: ValueError for pixels of which nobody can say what is white, or Pillow does not ask."""
    tags = image.tag_v2 if image.format == "TIFF" else {}
    is_deep = image.mode.startswith("I;16")
    reasons = (
        (image.mode == "F", "its values are floats"),
        (image.mode == "I" and image.format != "PNG", "its values are signed, or of 32 bits,"),  # PNG: 16 bits
        (tags.get(_SAMPLE_FORMAT, (1,))[0] == 2, "its values are signed"),
        (is_deep and tags.get(_BITS, (16,)) != (16,), "its values are neither of 8 nor of 16 bits,"),
        (is_deep and tags.get(_PHOTOMETRIC, 1) == 0, "its values of 16 bits count from white,"),
    )
    reason = next((each for is_so, each in reasons if is_so), "")
    if reason:
        raise ValueError(f"{reason} without a known range; save it with 8 or 16 bits")


@contextmanager
def among_open(pixels: int) -> Iterator[None]:
    """Wait until so many pixels may be decoded beside those that others have open, in the order of asking."""
    global _open_now
    pixels = min(pixels, MAX_PIXELS)
    with _turn, _changed:
        _changed.wait_for(lambda: _open_now + pixels <= MAX_PIXELS)
        _open_now += pixels
    try:
        yield
    finally:
        with _changed:
            _open_now -= pixels
            _changed.notify_all()


def refuse_too_large(width: int, height: int, most: int = 0) -> None:
    """Raises: ValueError for more pixels than one image or frame may have. most: left out, MAX_PIXELS."""
    most = most or MAX_PIXELS
    if width * height > most:
        raise ValueError(f"it has {width}x{height} pixels, more than {most} in all; scale it down")


_LISTED = f"{', '.join(_EVERYWHERE[:-1])} or {_EVERYWHERE[-1]}"
