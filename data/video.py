"""One clip: from a video (PyAV), an animation (Pillow) or a folder of images to frames, upright and with square pixels.
The times of all packets, sorted, are a video's frames: a wanted one is what is on screen at its time, for VP8 shows
nothing for some packets. AVI and MPEG-PS have no such times: all is decoded, and its frames are shown evenly."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.Image import Image as PilImage
from PIL.ImageOps import exif_transpose

from ..checkpoints.fingerprint import settings_fingerprint
from ..system.files import Looked
from .containers import CONTAINER_SUFFIXES, find_kind, open_container
from .image import (
    ANIMATED,
    BROKEN_IMAGE,
    MAX_PIXELS,
    ImageRequest,
    among_open,
    cut_out,
    image_fingerprint,
    image_suffixes,
    naming,
    open_image,
    opened,
    read_size,
    refuse_too_large,
    to_rgb,
)

CLIP_SUFFIXES = (*CONTAINER_SUFFIXES, ".gif")  # clips by their names

_FRAMES_AT_ONCE = 4  # that a decoder is taken to hold
_SHORTEST_S = 0.01  # browsers show a frame that asks for this or less for a tenth of a second, and so do we
_DEFAULT_S = 0.1
_HDR_TRANSFERS = (16, 18)  # FFmpeg's AVCOL_TRC of PQ and HLG
_SWS_MATRICES = {1: 1, 4: 4, 7: 7, 9: 9}  # FFmpeg's AVCOL_SPC -> swscale's: BT.709, FCC, SMPTE 240M, BT.2020
_SWS_DEFAULT = 5  # BT.601, also for files that name none
_LIMITED_RANGE, _FULL_RANGE = 1, 2  # AVCOL_RANGE
_WITHOUT_TIMES = ("avi", "mpeg")  # FFmpeg's names of containers
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # FFmpeg's own decoders leave the transparency out


@dataclass(frozen=True)
class ClipInfo:
    """What a clip is, before anything is chosen from it."""

    size: tuple[int, int]  # (height, width) as it is looked at: turned, with square pixels
    num_frames: int
    times_s: tuple[float, ...] = ()  # when each frame is shown, from 0; () for a folder of images, which has no times
    end_s: float = 0.0  # when the last frame ends
    first_s: float = 0.0  # when the first is shown, in the file's own time
    is_hdr: bool = False  # whether its brightness is coded for HDR screens


def media_suffixes() -> tuple[str, ...]:
    """The endings of images and clips that are read here, in lower case."""
    return (*image_suffixes(), *CLIP_SUFFIXES)


def is_clip(path: Path) -> bool:
    """Whether this is a video, a folder, or an animation of more than one frame; not what cannot be opened."""
    if path.is_dir() or path.suffix.lower() in CONTAINER_SUFFIXES:
        return True
    if path.suffix.lower() not in image_suffixes(ANIMATED):
        return False
    try:
        with opened(path) as file:
            return getattr(file, "n_frames", 1) > 1
    except BROKEN_IMAGE:
        return False


def probe_clip(path: Path) -> ClipInfo:
    """What the clip holds. Of a video all packets are read and the first frame is decoded; others are decoded whole.
    Raises: ValueError naming the file and what is wrong with it; RuntimeError without PyAV."""
    with naming(path, "a clip"):
        if path.is_dir():
            return _probe_sequence(path)
        if path.suffix.lower() in image_suffixes(ANIMATED):
            return _probe_animation(path)
        if _has_times(path):
            return _read_track(path)[1]
        with _opened(path) as (container, stream):
            frames = _decode(container, stream)  # all of a clip without times is decoded
            first, rate = next(frames, None), stream.average_rate
            if first is None or not rate:
                raise ValueError("it does not say how fast it is shown" if first else "no frame of it can be decoded")
            times = tuple(float(number / rate) for number in range(1 + sum(1 for _ in frames)))
            return _clip_info(stream, first, times, float(len(times) / rate))


def size_of_clip(path: Path, most: int) -> tuple[int, int]:
    """(height, width) from headers, or a video's first frame of up to `most` pixels. Raises: as probe_clip."""
    with naming(path, "a clip"):
        if path.is_dir():
            return _probe_sequence(path, is_decoded=False).size
        if path.suffix.lower() in image_suffixes(ANIMATED):
            return read_size(path, is_decoded=False)
        with _opened(path, most) as (container, stream):
            return _clip_info(stream, _first_frame(container, stream), (), 0.0).size


def read_frames(request: ImageRequest) -> torch.Tensor:
    """The requested pixels of an image (F = 1) or clip, float32 in -1..1. [3, F, crop height, crop width] Raises:
    ValueError naming the file if it cannot be read, or ends before the last wanted frame."""
    path, frames = Path(request.path), request.frames or (0,)
    wanted = sorted(set(frames))
    pixels = np.empty((len(wanted), *request.crop[2:], 3), dtype=np.uint8)
    with naming(path, "a clip"):
        found = 0
        for found, image in enumerate(_images(path, wanted) if request.frames else [open_image(path)], 1):
            pixels[found - 1] = cut_out(image, request)
        if found < len(wanted):
            raise ValueError(f"it ends before its frame {wanted[found] + 1}")
    order = [wanted.index(frame) for frame in frames]  # slow sources show a frame more than once
    return torch.from_numpy(pixels[order]).permute(3, 0, 1, 2).to(torch.float32).div_(127.5).sub_(1.0)


def first_picture(path: Path, side: int, most: int = 0) -> PilImage:
    """An image, or a clip's first frame, in RGB, upright, at most `side` pixels long. most: pixels that may be decoded,
    0 as for any image. Raises: ValueError naming the file if it cannot be read; RuntimeError without PyAV."""
    with naming(path, "a clip"):
        if path.suffix.lower() in CONTAINER_SUFFIXES and not path.is_dir():
            with _opened(path, most) as (container, stream):
                image = _to_image(_first_frame(container, stream), stream.sample_aspect_ratio)
        else:
            image = open_image(sequence_files(path)[0] if path.is_dir() else path, side, most)
    image.thumbnail((side, side))
    return image


def media_fingerprint(path: str | Path) -> str:
    """Hash of a file's bytes, or of all images of a folder in their order, not of their names. Raises: OSError."""
    path = Path(path)
    if not path.is_dir():
        return image_fingerprint(path)
    return settings_fingerprint([image_fingerprint(file) for file in sequence_files(path)])


def sequence_files(folder: Path) -> list[Path]:
    """The images of a folder as the frames of a clip: 2 comes before 10. Raises: ValueError for a folder without."""

    def natural(file: Path) -> tuple[Any, ...]:
        """A key that compares runs of digits as numbers."""
        parts = re.findall(r"[0-9]+|[^0-9]+", file.stem)
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts], file.name

    files = [file for file in Looked().entries(folder) if file.suffix.lower() in image_suffixes()]
    if not files:
        raise ValueError(f"{folder}: has no image in it ({', '.join(image_suffixes())}); take it out of the dataset")
    return sorted(files, key=natural)


def _images(path: Path, wanted: Sequence[int]) -> Iterator[PilImage]:
    """The wanted frames in RGB, upright, in rising order; fewer if the clip ends before."""
    if path.is_dir():
        files = sequence_files(path)
        return (open_image(files[index]) for index in wanted if index < len(files))
    if path.suffix.lower() not in image_suffixes(ANIMATED):
        return _container_images(path, wanted)
    frames = islice(enumerate(_animation_frames(path)), wanted[-1] + 1)
    return (to_rgb(exif_transpose(file)) for index, (file, _) in frames if index in wanted)


# --- folders of images -----------------------------------------------------------------------------------------------


def _probe_sequence(folder: Path, *, is_decoded: bool = True) -> ClipInfo:
    files = sequence_files(folder)
    sizes = [read_size(file, is_decoded=is_decoded) for file in files]
    for file, size in zip(files, sizes, strict=True):
        if size != sizes[0]:
            raise ValueError(
                f"{file.name} is {size[1]}x{size[0]}, but {files[0].name} is {sizes[0][1]}x{sizes[0][0]}; "
                "the frames of a clip have one size"
            )
    return ClipInfo(sizes[0], len(files))


# --- animations ------------------------------------------------------------------------------------------------------


def _animation_frames(path: Path) -> Iterator[tuple[Any, float]]:
    """Every frame, loaded, with the seconds it is shown."""
    with opened(path) as file:
        if file.format == "GIF":
            with open(path, "rb") as data:  # Pillow takes the frames before a cut for all there are
                data.seek(max(0, path.stat().st_size - 1024))
                if not data.read().rstrip(b"\0").endswith(b";"):
                    raise ValueError("it is cut off: its last byte is not that of a GIF")
        first = 1 if file.info.get("default_image") else 0  # an APNG may have a still that is no part of it
        for index in range(first, getattr(file, "n_frames", 1)):
            file.seek(index)
            file.load()
            duration = file.info.get("duration", 0) / 1000
            yield file, duration if duration > _SHORTEST_S else _DEFAULT_S


def _probe_animation(path: Path) -> ClipInfo:
    times: list[float] = []
    end, size = 0.0, (0, 0)
    for file, duration in _animation_frames(path):
        if not times:
            width, height = exif_transpose(file).size
            size = (height, width)
        times.append(end)
        end += duration
    return ClipInfo(size, len(times), tuple(times), end)


# --- containers ------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, most: int = 0) -> Iterator[tuple[Any, Any]]:
    """The file's container and its video stream."""
    with open_container(path) as container:
        stream: Any = container.streams.best("video")
        if stream is None:
            raise ValueError("there is no video in it")
        if stream.codec_context is None:
            raise ValueError("there is no decoder for its codec; save it as H.264 or VP9")
        size = (stream.codec_context.width, stream.codec_context.height)
        refuse_too_large(*size, most)
        stream.thread_type = "AUTO"
        stream.codec_context.options = {"max_pixels": str(most or MAX_PIXELS)}  # also of frames that come later
        with among_open(_FRAMES_AT_ONCE * size[0] * size[1]):
            yield container, stream


def _read_track(path: Path) -> tuple[list[int], ClipInfo]:
    """When each frame is shown, in the stream's own unit, and what the clip is; reads all packets and one frame."""
    duration_at: dict[int, int] = {}
    with _opened(path) as (container, stream):
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_discard:
                continue
            if packet.is_corrupt or packet.pts is None:
                raise ValueError("a part of it is damaged" if packet.is_corrupt else "its frames carry no times")
            duration_at[packet.pts] = packet.duration or 0
    if not duration_at:
        raise ValueError("there is no frame in it")
    times = sorted(duration_at)
    usual = times[-1] - times[-2] if len(times) > 1 else 1
    end = times[-1] + (duration_at[times[-1]] or usual)
    with _opened(path) as (container, stream):
        frame = _first_frame(container, stream)
        if frame.pts is None:
            raise ValueError("its frames carry no times")
        times = [time for time in times if time >= frame.pts]  # what precedes the first key frame is never shown
        times_s = tuple(float((time - times[0]) * stream.time_base) for time in times)
        return times, _clip_info(stream, frame, times_s, float((end - times[0]) * stream.time_base))


def _clip_info(stream: Any, frame: Any, times_s: tuple[float, ...], end_s: float) -> ClipInfo:
    image = _to_image(frame, stream.sample_aspect_ratio)
    is_hdr = int(stream.codec_context.color_trc) in _HDR_TRANSFERS
    first_s = float((frame.pts or 0) * stream.time_base)
    return ClipInfo((image.height, image.width), len(times_s), times_s, end_s, first_s, is_hdr)


def _has_times(path: Path) -> bool:
    with open(path, "rb") as file:
        return find_kind(file) not in _WITHOUT_TIMES


def _first_frame(container: Any, stream: Any) -> Any:
    """Raises: ValueError."""
    stream.thread_type = "SLICE"  # of one frame; AUTO begins as many as there are cores
    frame = next(_decode(container, stream), None)
    if frame is None:
        raise ValueError("no frame of it can be decoded")
    return frame


def _decode(container: Any, stream: Any) -> Iterator[Any]:
    """All frames from where the container stands."""
    import av

    decoder = stream.codec_context
    if stream.metadata.get("alpha_mode") == "1" and decoder.name in _ALPHA_DECODERS:
        decoder = av.CodecContext.create(_ALPHA_DECODERS[decoder.name], "r")
        if stream.codec_context.extradata:
            decoder.extradata = stream.codec_context.extradata
    for packet in container.demux(stream):
        for frame in decoder.decode(packet if packet.size else None):
            if frame.is_corrupt:
                raise ValueError(f"the frame at {float((frame.pts or 0) * stream.time_base):.2f} s is damaged")
            yield frame


def _container_images(path: Path, wanted: Sequence[int]) -> Iterator[PilImage]:
    if not _has_times(path):
        with _opened(path) as (container, stream):
            for number, frame in islice(enumerate(_decode(container, stream)), wanted[-1] + 1):
                if number in wanted:
                    yield _to_image(frame, stream.sample_aspect_ratio)
        return
    times, _ = _read_track(path)
    targets = [times[index] for index in wanted if index < len(times)]
    start = targets[0] if targets and targets[0] > times[0] and _seeks_before(path, targets[0]) else None
    with _opened(path) as (container, stream):
        if start is not None:
            container.seek(start, stream=stream)
        for frame in _on_screen(_decode(container, stream), targets):
            yield _to_image(frame, stream.sample_aspect_ratio)


def _seeks_before(path: Path, time: int) -> bool:
    """Whether a seek lands at or before this time; in files with a poor index it may land behind it."""
    with _opened(path) as (container, stream):
        container.seek(time, stream=stream)
        frame = next(_decode(container, stream), None)
        return frame is not None and frame.pts <= time


def _on_screen(frames: Iterator[Any], times: Sequence[int]) -> Iterator[Any]:
    """The frame that is shown at each of the rising times; ends where the frames do."""
    remaining, shown = deque(times), None
    for frame in chain(frames, [None]):
        while remaining and shown is not None and remaining[0] < (frame.pts if frame else shown.pts + 1):
            yield shown
            remaining.popleft()
        if not remaining:
            return
        shown = frame


def _to_image(frame: Any, pixel_aspect: Any) -> PilImage:
    """A frame in RGB, upright, with square pixels."""
    is_transparent = any(component.is_alpha for component in frame.format.components)
    # PyAV before 17 converts by BT.601 and limited range unless source and target differ; RGB has no range.
    values = frame.to_ndarray(
        format="rgba" if is_transparent else "rgb24",
        src_colorspace=_SWS_MATRICES.get(int(frame.colorspace), _SWS_DEFAULT),
        dst_colorspace=_SWS_DEFAULT,
        src_color_range=_FULL_RANGE if int(frame.color_range) == _FULL_RANGE else _LIMITED_RANGE,
        dst_color_range=0,
    )
    image = to_rgb(Image.fromarray(values))
    if pixel_aspect and pixel_aspect != 1:
        width = max(1, round(image.width * pixel_aspect))
        image = image.resize((width, image.height), Image.Resampling.LANCZOS)
    return _turn(image, frame)


def _turn(image: PilImage, frame: Any) -> PilImage:
    """Turn and mirror as the display matrix says: column, row -> a column + c row, b column + d row."""
    stored = frame.side_data.get("DISPLAYMATRIX")
    if stored is None:
        return image
    a, b, _, c, d = np.frombuffer(stored, dtype=np.int32)[:5] / 65536
    is_turned = a == 0
    if {abs(a), abs(d), abs(b), abs(c)} != {0, 1} or (abs(a), abs(b)) != (abs(d), abs(c)):
        raise ValueError("it is to be shown at an angle; only quarter turns are read")
    if is_turned:
        image = image.transpose(Image.Transpose.TRANSPOSE)
    if (c if is_turned else a) < 0:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if (b if is_turned else d) < 0:
        image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    return image
