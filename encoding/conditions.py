"""What ComfyUI's nodes make of the files that a sample's model is given beside its caption.

An entry holds what the node adds to a CONDITIONING; where the text encoder is shown the pictures, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..checkpoints.fingerprint import settings_fingerprint
from ..data.image import ImageRequest
from ..data.samples import Condition
from ..data.video import read_frames
from ..families.comfy.conditions import WAYS
from ..families.comfy.inputs import COND, NOISE_MASK, OPTION, POOLED
from .comfy_data import read_conditioning
from .key import CLIP_VERSION, COMFY_VERSION, CONDITION_VERSION, IMAGE_VERSION, prompt_facts
from .sources import Entry, Problem, host_pixels, refuse_embeddings, shapes_of


@dataclass(frozen=True)
class ConditionParts:
    """One sample's files as ComfyUI's nodes take them: pixels [F, height, width, 3] in 0..1.

    Args:
        references: whole pictures, F = 1. control: what the sample follows, as large as the sample.
        first: of the sample itself, F = 1. size: height, width and frames of the sample; () where it has no say.
        megapixels: that condition reference scales to.
    """

    way: str
    caption: str
    references: tuple[torch.Tensor, ...]
    control: torch.Tensor | None
    first: torch.Tensor | None
    size: tuple[int, ...]
    megapixels: float


class ComfyConditioner(Protocol):
    """ComfyUI's encoders and conditioning nodes; release makes room."""

    @property
    def sees_with(self) -> str:
        """Name of the CLIP vision model; "" without one."""
        ...

    def make(self, parts: ConditionParts) -> Any:
        """A CONDITIONING; a noise mask, which nodes put beside a latent, is among its options."""
        ...

    def release(self) -> None: ...


@dataclass(frozen=True)
class ComfyConditions:
    """What ComfyUI's nodes make of files; a source of the cache.

    Args:
        way: a name of families/comfy/conditions.py. encoders: names of those that take part.
        problem: asked after each, so that what does not fit the model is refused at the first.
        conditioner: None where only the encoders' names are known. weighs: as of ComfyTexts.
    """

    way: str
    encoders: tuple[str, ...]
    problem: Problem
    megapixels: float = 1.0
    conditioner: ComfyConditioner | None = None
    weighs: bool = False
    name: str = "the stock encoders"
    device: str = "cpu"

    def key_of(self, caption: str, condition: Condition, content: Mapping[str, str]) -> str:
        """Args: content: hash of each file. Raises: as refuse_embeddings."""
        way = WAYS[self.way]
        if way.reads_text:
            refuse_embeddings(caption, self.weighs)
        facts = {
            "what": "condition",
            "version": (CONDITION_VERSION, COMFY_VERSION, IMAGE_VERSION, CLIP_VERSION),
            "files": condition.named_by(content),
            "encoders": self.encoders,
            **(prompt_facts("caption", caption, self.weighs) if way.reads_text else {}),
            **({"megapixels": self.megapixels} if self.way == "reference" else {}),
        }
        return settings_fingerprint(facts)

    def check(self, num_missing: int) -> None:
        """Raises: ValueError where nobody can make what is missing."""
        if self.conditioner is None:
            raise ValueError(
                f"what conditions {num_missing} samples is not in the cache, and only ComfyUI can make it: run the "
                "Cache Captions and Latents node on this dataset with the same loaders and the same cache folder"
            )

    def load(self) -> None:
        pass  # the host does with the first

    def encode(self, caption: str, condition: Condition) -> Entry:
        """Raises: ValueError naming a file that cannot be read, or why it does not fit the model."""
        assert self.conditioner is not None
        what = f"the condition of {condition.paths[0]}"
        made = self.conditioner.make(self._parts(caption, condition))
        entry = read_conditioning(made, what, keeps_all=True)
        if (mask := entry.pop(f"{OPTION}{NOISE_MASK}", None)) is not None:
            entry[NOISE_MASK] = mask
        if not WAYS[self.way].reads_text:
            entry = {name: tensor for name, tensor in entry.items() if name not in (COND, POOLED)}
        if reason := self.problem(shapes_of(entry)):
            raise ValueError(f"{what} does not fit: {reason}")
        if not all(tensor.isfinite().all() for tensor in entry.values()):
            raise RuntimeError(f"{what} is not finite; load the encoders in another number type")
        return entry

    def _parts(self, caption: str, condition: Condition) -> ConditionParts:
        def whole(path: str, size: tuple[int, int]) -> torch.Tensor:
            return host_pixels(read_frames(ImageRequest(path, size, (0, 0, *size))))

        cut = condition.control or condition.clip
        first = condition.clip and ImageRequest(
            condition.clip.path, condition.clip.resize, condition.clip.crop, condition.clip.frames[:1]
        )
        return ConditionParts(
            way=self.way,
            caption=caption,
            references=tuple(map(whole, condition.references, condition.sizes)),
            control=host_pixels(read_frames(condition.control)) if condition.control else None,
            first=host_pixels(read_frames(first)) if first else None,
            size=(*cut.crop[2:], len(cut.frames) or 1) if cut else (),
            megapixels=self.megapixels,
        )

    def close(self) -> None:
        if self.conditioner is not None:
            self.conditioner.release()
