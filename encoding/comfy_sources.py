"""Sources that ask encoders which ComfyUI has loaded, and keep what they make as it is (families/comfy/inputs.py makes
it fit the model). A job names them by fingerprints: without the encoder a source finds its entries and computes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checkpoints.fingerprint import settings_fingerprint
from ..data.image import ImageRequest
from ..data.samples import Wanted
from ..data.sounds import read_sound
from ..data.video import read_frames
from ..families.comfy.conditions import WAYS
from ..families.comfy.inputs import COND, MORE_SAMPLES, NOISE_MASK, OPTION, POOLED, SAMPLES
from .comfy_data import read_conditioning, read_samples, read_tokens
from .key import (
    CLIP_VERSION,
    COMFY_VERSION,
    CONDITION_VERSION,
    IMAGE_VERSION,
    comfy_latent_key,
    comfy_text_key,
    prompt_facts,
)
from .sources import Entry, LatentSource, Shapes, Source, shapes_of

Problem = Callable[[Shapes], str]  # why an entry of these shapes does not fit the model; "" if it does
_MOST_SPARE_CELLS = 4  # of a clip's sound, which is padded to what its VAE encodes at once
LatentsProblem = Callable[[Shapes, int], str]  # the same, for an entry of so many video frames


def refuse_embeddings(text: str, weighs: bool) -> None:
    """Raises: ValueError for a caption that pulls in a file which no key knows."""
    if weighs and "embedding:" in text:
        raise ValueError(
            f"the caption {text!r} names a textual inversion (embedding:), whose file is not part of the cache's key; "
            "write it without, or set cache.caption_weights = false, which takes captions literally"
        )


@dataclass(frozen=True)
class ComfyTexts(Source[str]):
    """What ComfyUI's CLIP makes; or its tokenizer, where its encoders compute in every step."""

    fingerprint: str  # everything that decides what it makes, from the host
    problem: Problem  # called after each text, so that a CLIP of another model is refused at the first
    clip: Any = None  # HostClip of nodes/host/comfy_encoders.py; None where only its name is known
    keeps_all: bool = False  # of a CONDITIONING, for a model that reads more than states and pooled output
    weighs: bool = False  # whether texts have ComfyUI's syntax of prompts; else they are literal
    of_tokens: bool = False

    name = "stock CLIP"
    what = "captions"

    def key(self, item: str, content: Mapping[str, str]) -> str:
        """Raises: as refuse_embeddings."""
        refuse_embeddings(item, self.weighs)
        what = "stock tokens" if self.of_tokens else "stock text"
        keeps_all = self.keeps_all and not self.of_tokens  # there is nothing else to keep
        return comfy_text_key(item, self.fingerprint, what=what, keeps_all=keeps_all, weighs=self.weighs)

    def plan(self, missing: Sequence[str]) -> None:
        if self.clip is None:
            raise ValueError(_not_here(len(missing), "captions", self.fingerprint, "text_source"))

    def encode(self, given: str) -> Entry:
        what = f"the caption {given!r}"
        if self.of_tokens:
            entry = read_tokens(self.clip.tokens(given), what)
        else:
            entry = read_conditioning(self.clip.encode(given), what, keeps_all=self.keeps_all)
        if reason := self.problem(shapes_of(entry)):
            raise ValueError(f"the stock CLIP does not fit: of {what}, {reason}")
        return entry

    def close(self) -> None:
        if self.clip is not None:
            self.clip.release()


@dataclass(frozen=True)
class ComfyLatents(LatentSource):
    """What ComfyUI's VAE makes of images, clips or sounds, and another of the sound of clips. As for ComfyTexts."""

    fingerprint: str
    problem: LatentsProblem
    vae: Any = None  # HostVae, as is audio_vae
    audio_fingerprint: str = ""  # "" where clips have no sound
    audio_vae: Any = None
    sound: tuple[int, ...] = ()  # sides of that, as of ComfyInputs

    name = "the stock VAE"

    def key(self, item: ImageRequest, content: Mapping[str, str]) -> str:
        has_both = item.sound is not None and not item.is_sound
        beside = (content[item.paths[-1]], self.audio_fingerprint) if has_both else ()
        return comfy_latent_key(content[item.path], item, self.fingerprint, beside)

    def plan(self, missing: Sequence[ImageRequest]) -> None:
        if self.vae is None:
            raise ValueError(_not_here(len(missing), "images", self.fingerprint, "latent_source"))
        if self.audio_vae is None and any(each.sound and not each.is_sound for each in missing):
            raise ValueError(_not_here(len(missing), "clips with sound", self.audio_fingerprint, "audio_source"))
        clips = [request.path for request in missing if len(request.frames) > 1]
        if clips and not self.vae.takes_clips:
            raise ValueError(
                f"the stock VAE encodes every frame for itself, but {len(clips)} clips are to be encoded, such as "
                f"{clips[0]}; connect the VAE that belongs to the model, or leave stock_vae unconnected"
            )

    def read(self, item: ImageRequest) -> Any:
        """Its path, pixels, and sound with its rate, in the place of what it has not None; and the request."""
        is_track = item.sound is not None and item.sound.path == item.path and not item.is_sound
        heard = item.sound and read_sound(item.sound, is_track=is_track, is_alone=item.is_sound)
        return item.path, None if item.is_sound else read_frames(item), heard, item

    def encode(self, given: Any) -> Entry:
        path, pixels, heard, request = given
        try:
            made = self.vae.encode_sound(*heard) if pixels is None else self.vae.encode(host_pixels(pixels))
            (entry, *others) = read_samples(made, path)
            if others:
                raise ValueError(f"it made {1 + len(others)} samples, not one")
            if request.is_sound and entry[SAMPLES].shape[-1] != request.sound.cells:
                raise ValueError(f"it made {entry[SAMPLES].shape[-1]} columns in place of {request.sound.cells}")
            if heard and not request.is_sound:
                # As much of the clip's sound as sampling would make beside it.
                (sound,) = read_samples(self.audio_vae.encode_sound(*heard, is_padded=True), path)
                axis, cells = self.sound.index(0), request.sound.cells
                found = sound[SAMPLES].shape[axis] if sound[SAMPLES].ndim == len(self.sound) else 0
                if not cells <= found <= cells + _MOST_SPARE_CELLS:
                    raise ValueError(
                        f"the VAE of its sound made {found} columns of {request.sound.length_s:.2f} s, and the "
                        f"model takes {cells}; name the model's own with cache.stock_audio_vae"
                    )
                entry[f"{MORE_SAMPLES}1"] = sound[SAMPLES].narrow(axis, 0, cells).clone()
            if reason := self.problem(shapes_of(entry), 0 if pixels is None else pixels.shape[1]):
                raise ValueError(reason)
        except ValueError as error:
            raise ValueError(f"the stock VAE does not fit: of {path}, {error}") from error
        return entry

    def close(self) -> None:
        for each in filter(None, (self.vae, self.audio_vae)):
            each.release()


@dataclass(frozen=True)
class ConditionParts:
    """One sample's files as ComfyUI's nodes take them: pixels [F, height, width, 3] in 0..1."""

    way: str
    caption: str
    references: tuple[torch.Tensor, ...]  # whole pictures, F = 1
    control: torch.Tensor | None  # what the sample follows, as large as the sample
    first: torch.Tensor | None  # of the sample itself, F = 1
    size: tuple[int, ...]  # height, width and frames of the sample; () where it has no say
    megapixels: float  # that condition reference scales to


@dataclass(frozen=True)
class ComfyConditions(Source[Wanted]):
    """What ComfyUI's nodes add to a CONDITIONING of files; where the text encoder is shown them, all of it."""

    way: str  # a name of families/comfy/conditions.py
    encoders: tuple[str, ...]  # names of those that take part
    problem: Problem  # as of ComfyTexts
    megapixels: float = 1.0
    conditioner: Any = None  # HostConditioner of nodes/host/native/conditions.py; None where only names are known
    weighs: bool = False

    name = "the stock encoders"
    what = "conditions"

    def paths(self, item: Wanted) -> Iterable[str]:
        return item[1].paths

    def key(self, item: Wanted, content: Mapping[str, str]) -> str:
        """Raises: as refuse_embeddings, too."""
        caption, condition = item
        version = CONDITION_VERSION, COMFY_VERSION, IMAGE_VERSION, CLIP_VERSION
        facts: dict[str, Any] = {"what": "condition", "version": version, "encoders": self.encoders}
        if WAYS[self.way].reads_text:
            refuse_embeddings(caption, self.weighs)
            facts |= prompt_facts("caption", caption, self.weighs)
        if self.way == "reference":
            facts["megapixels"] = self.megapixels
        return settings_fingerprint({**facts, "files": condition.named_by(content)})

    def plan(self, missing: Sequence[Wanted]) -> None:
        if self.conditioner is None:
            raise ValueError(
                f"what conditions {len(missing)} samples is not in the cache, and only ComfyUI can make it: run the "
                "Cache Captions and Latents node on this dataset with the same loaders and the same cache folder"
            )

    def read(self, item: Wanted) -> tuple[str, ConditionParts]:
        def whole(path: str, size: tuple[int, int]) -> torch.Tensor:
            return host_pixels(read_frames(ImageRequest(path, size, (0, 0, *size))))

        caption, condition = item
        cut = condition.control or condition.clip
        first = condition.clip and replace(condition.clip, frames=condition.clip.frames[:1])
        return condition.paths[0], ConditionParts(
            way=self.way,
            caption=caption,
            references=tuple(map(whole, condition.references, condition.sizes)),
            control=host_pixels(read_frames(condition.control)) if condition.control else None,
            first=host_pixels(read_frames(first)) if first else None,
            size=(*cut.crop[2:], len(cut.frames) or 1) if cut else (),
            megapixels=self.megapixels,
        )

    def encode(self, given: tuple[str, ConditionParts]) -> Entry:
        what = f"the condition of {given[0]}"
        entry = read_conditioning(self.conditioner.make(given[1]), what, keeps_all=True)
        if (mask := entry.pop(f"{OPTION}{NOISE_MASK}", None)) is not None:
            entry[NOISE_MASK] = mask
        if not WAYS[self.way].reads_text:
            entry = {name: tensor for name, tensor in entry.items() if name not in (COND, POOLED)}
        if reason := self.problem(shapes_of(entry)):
            raise ValueError(f"{what} does not fit: {reason}")
        return entry

    def close(self) -> None:
        if self.conditioner is not None:
            self.conditioner.release()


def host_pixels(pixels: torch.Tensor) -> torch.Tensor:
    """As ComfyUI's loaders give them: the file's own bytes divided by 255. [3, F, H, W] in -1..1 -> [F, H, W, 3]"""
    return (((pixels + 1) * 127.5).round() / 255).permute(1, 2, 3, 0)


def _not_here(num_missing: int, what: str, fingerprint: str, key: str) -> str:
    return (
        f"{num_missing} {what} are not in the cache, and cache.{key} says that {fingerprint!r} makes them, which only "
        "ComfyUI can: run the Cache Captions and Latents node on this dataset with the same loader and the same cache "
        f"folder, or remove cache.{key} to use the model's own encoder"
    )
