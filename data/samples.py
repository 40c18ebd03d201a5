"""What is trained on: an image or a window of a clip, with its caption and how it is cut.

Sizes are (height, width) in pixels, after EXIF rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ..checkpoints.fingerprint import settings_fingerprint
from .image import ImageRequest
from .video import media_fingerprint


class TrainingSample(Protocol):
    """What batches are made of: an image or clip with its caption, or a sample that arrived encoded."""

    @property
    def caption(self) -> str: ...

    @property
    def mask_path(self) -> str | None: ...

    @property
    def bucket(self) -> tuple[int, ...]:
        """Samples of one bucket and length can share a batch."""
        ...

    @property
    def num_frames(self) -> int:
        """Video frames; 1 for an image."""
        ...


@dataclass(frozen=True)
class Sample:
    """One image, or one window of a clip, as it is trained on."""

    path: str  # image, video file, or folder of images
    caption: str
    mask_path: str | None  # loss mask; of a clip it counts for all frames
    resize: tuple[int, int]  # size of the whole image after resizing
    crop: tuple[int, int, int, int]  # (top, left, height, width) in pixels, inside `resize`
    bucket: tuple[int, int]  # size of what is left
    frames: tuple[int, ...] = ()  # of a clip, which of its frames; () for an image
    loss_weight: float = 1.0

    @property
    def num_frames(self) -> int:
        """Video frames; 1 for an image."""
        return len(self.frames) or 1

    def image_request(self) -> ImageRequest:
        """The pixels to encode; equal for samples that differ in caption or mask only."""
        return ImageRequest(self.path, self.resize, self.crop, self.frames)


def dataset_fingerprint(samples: Sequence[Sample]) -> str:
    """Hash of what is trained on, in order: image and mask bytes, captions, crops, frames; not where the files lie.

    Raises: OSError if a file has gone.
    """
    paths = dict.fromkeys(path for sample in samples for path in (sample.path, sample.mask_path) if path)
    with ThreadPoolExecutor() as pool:
        content = dict(zip(paths, pool.map(media_fingerprint, paths), strict=True))
    return settings_fingerprint(
        [
            [content[s.path], s.caption, s.mask_path and content[s.mask_path], s.resize, s.crop]
            + ([s.frames] if s.frames else [])  # images alone hash as they did before there were clips
            + ([{"loss_weight": s.loss_weight}] if s.loss_weight != 1 else [])
            for s in samples
        ]
    )
