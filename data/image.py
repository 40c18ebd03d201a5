"""One training image: rotated as EXIF says, made RGB, resized with Lanczos to `resize`, and `crop` cut out of it.
Transparency is laid on white; 16-bit grey is scaled to 8 bit, and colour profiles are not applied."""

from __future__ import annotations

import importlib
import math
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.Image import Image as PilImage
from PIL.ImageOps import exif_transpose

from ..checkpoints.fingerprint import file_fingerprint, settings_fingerprint

_PER_PIXEL = 8  # along a side: pixels of the file that a small picture is made of
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # of EXIF
_TURNING_VERSION = 1  # raise when images that are to be turned come out otherwise
_MAPPED = ("L", "P", "RGBA", "CMYK", "I;16", "I;16L", "I;16B")


@dataclass(frozen=True)
class SoundRequest:
    """A sound, and the part wanted of it."""

    path: str  # sound file, or a clip with its own track
    start_s: float
    length_s: float
    cells: int  # columns of latents that the part is to become


@dataclass(frozen=True)
class ImageRequest:
    """An image or clip and the pixels wanted of it; or a sound alone, whose sides are rows and columns of latents."""

    path: str  # image, video file, folder of images, or sound file
    resize: tuple[int, int]  # (height, width) in pixels of the whole image, after rotation
    crop: tuple[int, int, int, int]  # (top, left, height, width) in pixels, inside `resize`
    frames: tuple[int, ...] = ()  # of a clip, the numbers of the wanted frames, in the order of showing
    sound: SoundRequest | None = None  # beside a clip, or alone

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all files that are read."""
        return (self.path, self.sound.path) if self.sound else (self.path,)

    @property
    def is_sound(self) -> bool:
        """Whether there are no pixels."""
        return self.sound is not None and not self.frames


def open_image(path: str | Path, side: int = 0, most: int = 0) -> PilImage:
    """The whole image, turned as EXIF says, in RGB. side: pixels of the longer side that suffice, 0 for all. most: that
    may be decoded, 0 for MAX_PIXELS. Raises: ValueError naming a file that is no image, or has too many pixels."""
    with naming(path), opened(path) as file:
        if side:
            largest = (_PER_PIXEL * side, _PER_PIXEL * side)
            if file.info.get("default_image"):
                file.seek(1)  # an APNG may have a still that is no part of it
            file.draft(file.mode, largest)
            refuse_too_large(*decoded_size(file), most)
            file.load()
            file.thumbnail(largest, Image.Resampling.NEAREST)
        return to_rgb(exif_transpose(file))


def cut_out(image: PilImage, request: ImageRequest) -> np.ndarray:
    """Resize an RGB image and cut the crop out of it. uint8, [crop height, crop width, 3]"""
    height, width = request.resize
    down, right = image.height / height, image.width / width
    top, left, rows, columns = request.crop
    if height * width > MAX_PIXELS:  # of a long strip, of which little is cut out: the same but for rounding
        box = (left * right, top * down, (left + columns) * right, (top + rows) * down)
        return np.asarray(image.resize((columns, rows), Image.Resampling.LANCZOS, box=box))
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.asarray(image)[top : top + rows, left : left + columns]


def read_size(path: Path, *, is_decoded: bool = True) -> tuple[int, int]:
    """(height, width) of an image, turned as EXIF says; as look_at."""
    return look_at(path, is_decoded=is_decoded)[0]


def look_at(path: Path, *, is_decoded: bool = True) -> tuple[tuple[int, int], PilImage]:
    """As read_size, and what was decoded: of a JPEG an eighth of each side. is_decoded: all is read, which finds
    damage; else what stands before the pixels, but for a TIFF. Raises: ValueError naming the file if it is broken."""
    with naming(path), opened(path) as image:
        width, height = image.size
        seen: PilImage = image
        if image.format == "TIFF":  # Pillow turns it while it decodes it; what the header says depends on Pillow
            seen = exif_transpose(image)
            width, height = seen.size
        elif is_decoded:  # JPEG: all of the file is read, an eighth is computed
            image.draft("RGB", (max(1, width // 8), max(1, height // 8)))
            image.load()
        exif = image.getexif() if is_decoded else Image.Image.getexif(image)
        is_turned = image.format != "TIFF" and exif.get(_ORIENTATION, 1) in _QUARTER_TURNS
    return ((width, height) if is_turned else (height, width)), seen


def is_blank(image: PilImage) -> bool:
    """Whether all pixels are alike, as of a picture that is all black or all transparent."""
    few = (math.ceil(image.width / _PER_PIXEL), math.ceil(image.height / _PER_PIXEL))
    looks = (image.resize(few, Image.Resampling.NEAREST), image)  # in nearly all images a few pixels differ already
    return all(np.ptp(np.asarray(to_rgb(look)), axis=(0, 1)).max() <= 2 for look in looks)


def image_fingerprint(path: str | Path) -> str:
    """Hash of a file's bytes; of an image that was once read in another way, another. Raises: OSError."""
    content = file_fingerprint(path)
    with open(path, "rb") as data, suppress(*BROKEN_IMAGE):
        if data.read(2) in (b"II", b"MM"):
            with opened(path) as opened_file:
                # An uncompressed TIFF to be turned by a quarter, of a kind whose rows were once cut wrongly.
                file: Any = opened_file
                is_mapped = file.mode in _MAPPED and len(file.tile) == 1 and file.tile[0][0] == "raw"
                if is_mapped and file.format == "TIFF" and file.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS:
                    return settings_fingerprint([content, _TURNING_VERSION])
    return content


def to_rgb(image: PilImage) -> Any:
    """Any kind of image as 8-bit RGB; see the top of this file."""
    if image.mode.startswith("I"):  # 16 bit; PIL would clip at 255 and leave nearly white
        values = np.asarray(image).astype(np.int64)
        return Image.fromarray((values.clip(0, 65535) // 257).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


_STILL = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF", "JPEG2000", "HEIF", "JXL")
ANIMATED = ("PNG", "WEBP", "GIF", "AVIF", "JXL")  # one frame or many: the name does not tell
PLUGINS = {"HEIF": "pillow-heif", "JXL": "pillow-jxl-plugin"}  # packages, whose import tells Pillow
MAX_PIXELS = 178_956_970  # Pillow's own limit: half a gigabyte of RGB
_TILE = (322, 323)  # tags of TIFF: width and height
# What opening or decoding a broken image raises; SyntaxError is a broken PNG chunk's.
BROKEN_IMAGE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
_turn, _changed = threading.Lock(), threading.Condition()
_open_now = 0  # pixels


@contextmanager
def naming(path: str | Path, what: str = "an image") -> Iterator[None]:
    """Say which file it was, and what would help. Raises: ValueError."""
    try:
        yield
    except BROKEN_IMAGE as error:
        if str(error).startswith(str(path)):  # an image inside a folder says its own name
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ValueError(
            f"{path}: cannot be read as {what} ({reason}); repair it or take it out of the dataset"
        ) from error


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    """What Pillow reads here. Its init is not thread-safe: call it before threads open images."""
    for module in ("pillow_heif.HeifImagePlugin", "pillow_jxl"):
        with suppress(ImportError):
            importlib.import_module(module)
    Image.init()
    return tuple(each for each in (*_STILL, "GIF") if each in Image.OPEN)


@lru_cache(maxsize=2)
def image_suffixes(wanted: tuple[str, ...] = _STILL) -> tuple[str, ...]:
    """The endings, in lower case, of images of these formats that are read here; a GIF counts as a clip."""
    known = _formats()
    found = {suffix: kind for suffix, kind in Image.registered_extensions().items() if kind in known}
    return tuple(sorted((each for each, kind in found.items() if kind in wanted), key=lambda s: wanted.index(found[s])))


@contextmanager
def opened(path: str | Path) -> Iterator[PilImage]:
    """The image file, with its header read and no pixel yet; a thread with two open may wait for itself. Raises:
    ValueError for what is no image that is read here, or too large; what Pillow raises for a broken one."""
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
            raise ValueError("it is no image of a format that is read here; save it as PNG, JPEG or WEBP") from error
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
