"""Sound files, and the sound of clips, as ComfyUI's Load Audio has them: float32 at the file's own rate, two channels.
A clip's own track has the file's time, with its holes; a sound file begins with its clip, and ends in silence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..families.spec import LatentSpec
from .captions import stem_of
from .containers import CONTAINER_SUFFIXES, SOUND_SUFFIXES, open_container
from .image import SoundRequest, naming
from .samples import ClipPlan
from .video import ClipInfo

_LONGEST_S = 600.0  # of a part: what the models of today make
_LONGEST_FILE_S = 4 * 3600
_RATES = range(4_000, 192_001)
_MOST_CHANNELS = 64
_KEPT_CHANNELS = 2
_SAY_LENGTH = ("flac", "wav")  # FFmpeg's names of containers that do, exactly
_SPARE = 1  # sample that the rounding of a part's ends may want beyond a sound
_ROUNDING = 1e-6  # of a sample or cell, in products of seconds and rates
_HOLE_S = 0.04  # by which times of a track differ from its count of samples, where they count


def probe_sound(path: Path) -> float | None:
    """Seconds of a sound, all of it decoded; None without any. Raises: ValueError naming a file that is not taken."""
    with naming(path, "sound"), _opened(path) as (container, stream):
        if stream is None:
            return None
        count = sum(values.shape[1] for _, values in _decoded(container, stream))
        said = int((stream.duration or 0) * stream.time_base * stream.codec_context.sample_rate)
        if not count or container.format.name in _SAY_LENGTH and count < said:
            raise ValueError(f"it is cut off or damaged: {count} of {said} samples are there")
        return count / int(stream.codec_context.sample_rate)


def read_sound(request: SoundRequest, *, is_track: bool = False, is_alone: bool = False) -> tuple[torch.Tensor, int]:
    """The wanted part, float32 [channels, samples], and its rate in Hz. is_track: it is a clip's own, in whose time it
    begins. is_alone: silence is no part of it. Raises: ValueError naming a file that cannot be read, or ends early."""
    path = Path(request.path)
    with naming(path, "sound"), _opened(path) as (container, stream):
        if stream is None:
            raise ValueError("there is no sound in it")
        rate = int(stream.codec_context.sample_rate)
        wanted = math.ceil(request.length_s * rate - _ROUNDING)
        start, made, end = round(request.start_s * rate), None, 0
        for time_s, values in _decoded(container, stream):
            if is_track and (made is None or abs(time_s * rate - end) > _HOLE_S * rate):
                end = round(time_s * rate)
            if made is None:
                made = np.zeros((min(len(values), _KEPT_CHANNELS), wanted), dtype=np.float32)
            begin, end = end, end + values.shape[1]
            own = values[: len(made), max(0, start - begin) : max(0, start + wanted - begin)]
            at = max(0, begin - start)
            if own.shape[1] and at < wanted:
                made[:, at : at + own.shape[1]] = own
            if end >= start + wanted:
                break
        if made is None or is_alone and end + _SPARE < start + wanted:
            raise ValueError(f"it ends {(start + wanted - end) / rate:.2f} s before the part that is wanted of it")
        return torch.from_numpy(made), rate


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file's container and the stream of its sound; None for that without any."""
    with open_container(path) as container:
        stream: Any = container.streams.best("audio")
        if stream is not None:
            if stream.codec_context is None:
                raise ValueError("there is no decoder for its sound; save it as FLAC or WAV")
            rate, channels = stream.codec_context.sample_rate, stream.codec_context.channels
            if rate not in _RATES or not 0 < channels <= _MOST_CHANNELS:
                raise ValueError(
                    f"it has {channels} channels at {rate} Hz; up to {_MOST_CHANNELS} are taken, at {_RATES.start} to "
                    f"{_RATES.stop - 1} Hz"
                )
        yield container, stream


def _decoded(container: Any, stream: Any) -> Iterator[tuple[float, Any]]:
    """Time of each part in seconds, and its values, float32 [channels, samples]."""
    import av

    resampler, count = av.AudioResampler(format="flt"), 0  # of planes PyAV reads beyond those of a damaged file
    shape = stream.codec_context.sample_rate, stream.codec_context.channels
    for frame in container.decode(stream):
        if frame.is_corrupt or (frame.sample_rate, frame.layout.nb_channels) != shape:
            raise ValueError(f"the part at {frame.time or 0:.2f} s is damaged, or has another rate or more channels")
        time_s = count / frame.sample_rate if frame.time is None else float(frame.time)
        count += frame.samples
        if count > _LONGEST_FILE_S * stream.codec_context.sample_rate:
            raise ValueError(f"it is longer than {_LONGEST_FILE_S // 3600} hours; cut it")
        for part in resampler.resample(frame):
            yield time_s, part.to_ndarray().reshape(-1, shape[1]).T


# --- what is taken of them --------------------------------------------------------------------------------------------


def cut_sound(path: Path, plan: ClipPlan, latent: LatentSpec) -> tuple[int, tuple[SoundRequest, ...]]:
    """Columns of latents of a whole sound, and the part of each sample made of it. Raises: ValueError naming the file
    if it cannot be read, is too short for one column, or too long for a whole."""
    seconds, rate = probe_sound(path) or 0.0, latent.sound_rate
    total = math.floor(seconds * rate + _ROUNDING)
    length = min(total, max(1, math.floor((plan.seconds or _LONGEST_S) * rate + _ROUNDING)))
    if not total or length < total and not plan.seconds:
        raise ValueError(f"{path}: lasts {seconds:.2f} s; give {1 / rate:.2f} to {_LONGEST_S:g} s, or set data.seconds")
    parts = replace(plan, lengths=(length,), fps=None).cut(ClipInfo((1, total), total))
    return total, tuple(SoundRequest(str(path), start / rate, length / rate, length) for start in parts)


def sounds_of_clip(path: Path, clip: ClipInfo, plan: ClipPlan, latent: LatentSpec) -> tuple[SoundRequest, ...]:
    """Of each part of a clip: of the file beside it, else of its own track; () without either, and for stills. Raises:
    ValueError naming a file that cannot be read, or a sound file that ends before a part begins."""
    named = [path.with_name(f"{stem_of(path)}{end}") for each in SOUND_SUFFIXES for end in (each, each.upper())]
    beside = {each.resolve(): each for each in named if each.is_file()}
    if len(beside) > 1:
        names = " and ".join(sorted(each.name for each in beside.values()))
        raise ValueError(f"{path}: has several sounds, {names}; leave the one that belongs to it")
    file = next(iter(beside.values()), path)
    cuts = plan.cut(clip)  # by the tick at which a part begins, not by its first frame, which may be older
    if len(next(iter(cuts.values()))) < 2:  # a still of a clip
        return ()
    is_sounding = file.suffix.lower() in (*SOUND_SUFFIXES, *CONTAINER_SUFFIXES) and not file.is_dir()
    lasts_s = probe_sound(file) if is_sounding else None
    if lasts_s is None and file == path:
        return ()
    first, made = clip.first_s if file == path else 0.0, []
    for tick, frames in cuts.items():
        start, length = first + tick / latent.fps, len(frames) / latent.fps
        if file != path and start >= (lasts_s or 0.0):  # a wrong file, and not the silence of a clip
            raise ValueError(f"{file}: lasts {lasts_s or 0.0:.2f} s, and a part of {path.name} begins at {start:.2f} s")
        made.append(SoundRequest(str(file), start, length, round(length * latent.sound_rate)))
    return tuple(made)
