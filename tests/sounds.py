"""Short sounds in every format, written with PyAV, alone and as tracks of clips."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from devicebridge.tests.clips import plain_frames

_CODECS = {".wav": "pcm_s16le", ".flac": "flac", ".mp3": "libmp3lame", ".ogg": "libopus", ".m4a": "aac"}
_CODECS |= {".opus": "libopus", ".mp4": "aac", ".mkv": "pcm_s16le"}


def wave(seconds: float, rate: int, channels: int = 2, seed: int = 0) -> np.ndarray:
    """Noise, 16 bits. [samples, channels]"""
    values = np.random.default_rng(seed).integers(-8000, 8000, (round(seconds * rate), channels))
    return values.astype(np.int16)


def save_sound(
    path: Path, values: np.ndarray, rate: int, *, num_frames: int = 0, fps: int = 25, late_s: float = 0.0
) -> Path:
    """With num_frames as the track of a clip, behind its first frame by late_s."""
    with av.open(str(path), "w") as container:
        video: Any = None
        if num_frames:
            video = container.add_stream("libx264", rate=fps, width=64, height=64, pix_fmt="yuv420p")
        stream: Any = container.add_stream(_CODECS[path.suffix], rate=rate)
        stream.layout = "mono" if values.shape[1] == 1 else "stereo"
        for pixels in plain_frames(num_frames, (64, 64)):
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        if video:
            container.mux(video.encode(None))
        frame = av.AudioFrame.from_ndarray(values.reshape(1, -1), format="s16", layout=stream.layout.name)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), round(late_s * rate)
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.codec_context.format, stream.layout, rate, size)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return path
