"""What is trained on: an image or a window of a clip, with its caption and how it is cut.

Sizes are (height, width) in pixels, after EXIF rotation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ..checkpoints.fingerprint import settings_fingerprint
from .image import ImageRequest
from .video import media_fingerprint


class TrainingSample(Protocol):
    """What batches are made of: an image or clip with its caption, or a sample that arrived encoded."""

    @property
    def latents_key(self) -> str:
        """Cache entry of its latents; "" until the job's cache is filled."""
        ...

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Cache entries of its text, of which later ones count over earlier ones."""
        ...

    @property
    def empty_text_keys(self) -> tuple[str, ...]:
        """The same where its caption is dropped; () if it never is."""
        ...

    @property
    def mask_path(self) -> str | None: ...

    @property
    def loss_weight(self) -> float: ...

    @property
    def bucket(self) -> tuple[int, ...]:
        """Samples of one bucket and length can share a batch."""
        ...

    @property
    def num_frames(self) -> int:
        """Video frames; 1 for an image."""
        ...

    @property
    def alike(self) -> tuple[int, ...]:
        """What else must be equal in a batch."""
        ...


@dataclass(frozen=True)
class Condition:
    """The files that a sample's model is given beside caption and noise.

    Args:
        way: a name of families/comfy/conditions.py. references: whole images. sizes: of them.
        control, clip: the sample's own cut of the clip that it follows, and of the image or clip itself.
    """

    way: str
    references: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    control: ImageRequest | None = None
    clip: ImageRequest | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """Of all its files."""
        return (*self.references, *(each.path for each in (self.control, self.clip) if each))

    def named_by(self, content: Mapping[str, str]) -> list[Any]:
        """What decides what is made of it, with the content of each path in its place."""
        requests = (self.control, self.clip)
        cuts = [each and [content[each.path], each.resize, each.crop, each.frames] for each in requests]
        return [self.way, [content[path] for path in self.references], *cuts]


Wanted = tuple[str, Condition]  # a caption, and what is beside it


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
    condition: Condition | None = None
    latents_key: str = ""
    text_keys: tuple[str, ...] = ()
    empty_text_keys: tuple[str, ...] = ()

    @property
    def alike(self) -> tuple[int, ...]:
        """The sizes of its references; () without."""
        return tuple(side for size in (self.condition.sizes if self.condition else ()) for side in size)

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
    paths = dict.fromkeys(path for sample in samples for path in _paths_of(sample))
    with ThreadPoolExecutor() as pool:
        content = dict(zip(paths, pool.map(media_fingerprint, paths), strict=True))
    return settings_fingerprint(
        [
            [content[s.path], s.caption, s.mask_path and content[s.mask_path], s.resize, s.crop]
            + ([s.frames] if s.frames else [])  # images alone hash as they did before there were clips
            + ([{"loss_weight": s.loss_weight}] if s.loss_weight != 1 else [])
            + ([{"condition": s.condition.named_by(content)}] if s.condition else [])
            for s in samples
        ]
    )


def _paths_of(sample: Sample) -> list[str]:
    mask = (sample.mask_path,) if sample.mask_path else ()
    return [sample.path, *mask, *(sample.condition.paths if sample.condition else ())]
