"""Tiny clips of known colours in every format, written with PyAV and Pillow.

Frame i of a clip is of one colour, COLOURS[i % len(COLOURS)], so what was read tells which frame it was.
"""

import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

COLOURS = np.array(
    [
        (255, 0, 0), (0, 255, 0), (0, 0, 255), (200, 100, 50), (10, 20, 30), (128, 128, 128), (255, 255, 0),
        (0, 255, 255), (90, 0, 160), (255, 150, 200), (0, 90, 60),
    ],
    dtype=np.uint8,
)  # fmt: skip
_ENCODERS: Mapping[str, tuple[str, str]] = {  # suffix -> encoder, pixel format
    **dict.fromkeys((".mp4", ".mov", ".m4v", ".mkv"), ("libx264", "yuv444p")),
    ".webm": ("libvpx-vp9", "yuv420p"),
}


def plain_frames(count: int, size: tuple[int, int] = (32, 48)) -> list[np.ndarray]:
    return [np.broadcast_to(COLOURS[i % len(COLOURS)], (*size, 3)).copy() for i in range(count)]


def save_video(
    path: Path, frames: Sequence[np.ndarray], *, fps: float = 16, times_s: Sequence[float] | None = None,
    encoder: str = "", pixel_format: str = "", key_frame_every: int = 12, pixel_aspect: Fraction | None = None,
    colours: int | None = None, full_range: bool = False, transfer: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Write frames [height, width, 3 or 4] as a video; times_s says when each is shown, else they come at fps. colours:
    FFmpeg's number of the YUV matrix to convert by and to name in the file. full_range: whether Y goes from 0 to 255.
    transfer: number of the brightness curve that is named."""
    usual = _ENCODERS[path.suffix]
    unit = Fraction(1, 90000)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options=dict(options or {})) as container:
        stream: Any = container.add_stream(encoder or usual[0], rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixel_format or usual[1]
        quality = "1" if stream.codec_context.name == "libx264" else "4"
        stream.options = {"crf": quality, "g": str(key_frame_every), "threads": "1"}
        stream.codec_context.time_base = unit
        if pixel_aspect:
            stream.codec_context.sample_aspect_ratio = pixel_aspect
        if colours:
            stream.codec_context.colorspace = colours
            stream.codec_context.color_range = 2 if full_range else 1
        if transfer:
            stream.codec_context.color_trc = transfer
        for index, values in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(values, format="rgba" if values.shape[2] == 4 else "rgb24")
            if colours:
                frame = frame.reformat(
                    format=stream.pix_fmt, src_colorspace=5, dst_colorspace=colours, src_color_range=2,
                    dst_color_range=2 if full_range else 1,
                )  # fmt: skip
                frame.colorspace = colours
                frame.color_range = 2 if full_range else 1
            if transfer:
                frame.color_trc = transfer
            frame.time_base = unit
            frame.pts = round((times_s[index] if times_s else index / fps) / unit)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def save_animation(path: Path, frames: Sequence[np.ndarray], durations_ms: Sequence[int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = (Image.fromarray(values) for values in frames)
    options: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=others, duration=list(durations_ms), loop=0, **options)
    return path


def save_image(path: Path, height: int = 64, width: int = 64, seed: int = 0, caption: str = "", **options: Any) -> None:
    """Of random pixels, in a folder that need not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(values).save(path, **options)
    if caption:
        path.with_suffix(".txt").write_text(caption)


def save_sequence(folder: Path, frames: Sequence[np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    for index, values in enumerate(frames):
        Image.fromarray(values).save(folder / f"frame_{index}.png")
    return folder


def save_clip(path: Path, count: int, fps: float = 16, size: tuple[int, int] = (32, 48)) -> Path:
    """A clip of plain frames in the format that the name says; a name without an ending is a folder of images."""
    frames = plain_frames(count, size)
    if not path.suffix:
        return save_sequence(path, frames)
    if path.suffix in _ENCODERS:
        return save_video(path, frames, fps=fps)
    return save_animation(path, frames, [round(1000 / fps)] * count)


def set_display_matrix(path: Path, a: float, b: float, c: float, d: float) -> None:
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 4 + 40
    fixed = [round(65536 * value) for value in (a, b, 0, c, d, 0, 0, 0)]
    data[start : start + 36] = struct.pack(">9i", *fixed, 1 << 30)
    path.write_bytes(data)


def middle_colours(pixels: torch.Tensor) -> np.ndarray:
    _, _, height, width = pixels.shape
    return ((pixels[:, :, height // 2, width // 2].T + 1) * 127.5).round().numpy().astype(int)
