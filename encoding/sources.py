"""Who makes the states of a caption and the latents of an image: our own encoders, or somebody else's.

The cache is filled in one way (encode.py), whoever computes: a source says what each result is called, loads when the
first is missing, encodes, and frees. FolderTexts and FolderLatents read folders and files. ComfyTexts and ComfyLatents
ask a CLIP or VAE that ComfyUI has loaded. What these make is kept as ComfyUI hands it on, and is made fit for the model
when it is read (families/comfy/inputs.py).

Somebody else's encoder exists in his process only. What it made has a name that anybody can write down: the source's
fingerprint, in a job's cache.text_source and cache.latent_source. Without the encoder such a source finds its entries
and computes none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ..checkpoints.fingerprint import folder_fingerprint
from ..data.image import ImageRequest
from ..families.spec import ModelFamily, TextEncoderSpec, Variant
from .comfy_data import read_conditioning, read_samples, read_tokens
from .key import LatentSettings, comfy_latent_key, comfy_text_key, comfy_token_key, latent_key, text_key
from .text_encoder import TextEncoder, prepare_text
from .text_place import TextPlace, open_text_encoder, plan_text_place
from .text_weights import TextScheme, applied_scheme
from .vae import load_vae, vae_fingerprint

Entry = Mapping[str, torch.Tensor]


# --- the model's own encoders ----------------------------------------------------------------------------------------


@dataclass
class FolderTexts:
    """What one of the model's own text encoders makes, from its folder; a TextSource.

    Captions that share a pass of a streamed encoder are claimed, and lost by a kill, together.
    """

    spec: TextEncoderSpec
    folder: str | Path
    text_device: torch.device | str  # where it runs, or a setting that text_place.py turns into such a place
    dtype: torch.dtype  # the encoder computes in it, and the states are stored in it
    quantize: TextScheme = "none"  # what the encoder's linears are rounded to as they are read
    window_bytes: int = 0  # the most a streamed encoder may take on its card; 0 for what is free
    place: TextPlace | None = None
    device: torch.device | str = "cpu"
    batch_size: int = 1
    encoder: TextEncoder | None = None

    @property
    def name(self) -> str:
        return f"text encoder {self.spec.folder}"

    @functools.cached_property
    def _fingerprints(self) -> dict[str, str]:
        return {
            "encoder_fingerprint": folder_fingerprint(Path(self.folder, self.spec.folder)),
            "tokenizer_fingerprint": folder_fingerprint(Path(self.folder, self.spec.tokenizer_folder)),
        }

    def text_of(self, caption: str) -> str:
        """The caption as the tokenizer gets it."""
        return prepare_text(caption, self.spec)

    def key_of(self, text: str) -> str:
        scheme = applied_scheme(self.spec, self.quantize)
        return text_key(text, self.spec, **self._fingerprints, dtype=self.dtype, quantize=scheme)

    def plan(self, num_missing: int) -> None:
        """Decide where it runs; device and batch_size are known from here on. Raises: ValueError if it cannot run."""
        settings = self.spec, self.folder, self.dtype, self.quantize, self.window_bytes
        self.place = plan_text_place(self.text_device, *settings)
        self.device, self.batch_size = self.place.device, self.place.captions_per_batch

    def load(self) -> None:
        assert self.place is not None
        self.encoder = open_text_encoder(self.spec, self.folder, self.place, self.dtype, self.quantize)

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Entry]:
        """One entry per text, to be kept unless problem_of says why not."""
        assert self.encoder is not None
        return [{self.spec.output: states} for states in self.encoder.encode_batch(texts)]

    def problem_of(self, entry: Entry, text: str) -> str:
        """Why what encode_batch made of this text must not be kept, and what would help; "" if it may be."""
        assert self.encoder is not None
        return self.encoder.problem_of(entry[self.spec.output], text)

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()
        self.encoder = None


@dataclass
class FolderLatents:
    """What the model's own VAE makes, from a folder or file; a LatentSource. Latents are normalised."""

    family: ModelFamily
    variant: Variant
    path: str | Path
    device: torch.device | str
    dtype: torch.dtype
    vae: Any = None
    name: str = "the VAE"

    @functools.cached_property
    def _settings(self) -> LatentSettings:
        return LatentSettings(
            self.family.name,
            self.family.latent_of(self.variant).normalisation_version,
            vae_fingerprint(self.family, self.variant, self.path),
            self.dtype,
            self.variant.condition if self.variant.encodes_condition else "none",
        )

    def key_of(self, request: ImageRequest, image_fingerprint: str) -> str:
        return latent_key(image_fingerprint, request, self._settings)

    def check(self, missing: Sequence[ImageRequest]) -> None:
        """Raises: ValueError if it cannot be run here, or not on these."""

    def load(self) -> None:
        self.vae = load_vae(self.family, self.variant, self.path, self.dtype).to(self.device)

    def encode(self, pixels: torch.Tensor, path: str) -> Entry:
        """The entry of an image or clip, [3, F, height, width], float32 in -1..1; an image is one frame.

        Raises: RuntimeError naming the file if its latents are not finite, or fewer than its frames make.
        """
        family, variant = self.family, self.variant
        batch = pixels[None].to(device=self.device, dtype=self.dtype)  # [B=1, 3, F, H, W]
        with torch.inference_mode():
            tensors = {"latents": family.encode_latents(self.vae, batch)[0].to(torch.float32)}
            if variant.encodes_condition:
                assert family.encode_condition is not None
                tensors["image_condition"] = family.encode_condition(self.vae, batch)[0].to(torch.float32)
        if not _is_finite(tensors):
            raise RuntimeError(
                f'the latents of {path} are not finite in {self.dtype}; set cache.dtype to "bfloat16" or "float32"'
            )
        num_frames = pixels.shape[1]
        found, expected = tensors["latents"].shape[1], family.latent_of(variant).num_latent_frames(num_frames)
        if found != expected:  # a VAE that leaves frames out would train a clip that is shorter than its caption says
            raise RuntimeError(
                f"the VAE made {found} latent frames of {num_frames} frames of {path}; {variant.name} needs {expected}"
            )
        return tensors

    def close(self) -> None:
        self.vae = None


# --- encoders that ComfyUI holds -------------------------------------------------------------------------------------


class ComfyEncoder(Protocol):
    """An encoder that somebody else holds; release makes room."""

    @property
    def fingerprint(self) -> str: ...

    def release(self) -> None: ...


class ComfyClip(ComfyEncoder, Protocol):
    """A text encoder. encode gives what ComfyUI calls a CONDITIONING, tokens what its tokenizer makes of a text."""

    def encode(self, text: str) -> Any: ...

    def tokens(self, text: str) -> Any: ...


class ComfyVae(ComfyEncoder, Protocol):
    """A VAE. encode takes pixels [F, height, width, 3] in 0..1 and gives samples with their batch; with takes_clips it
    makes one sample of several frames, rather than one of each."""

    @property
    def takes_clips(self) -> bool: ...

    def encode(self, pixels: torch.Tensor) -> torch.Tensor: ...


Shapes = Mapping[str, tuple[int, ...]]
Problem = Callable[[Shapes], str]  # why an entry of these shapes does not fit the model; "" if it does
LatentsProblem = Callable[[Shapes, int], str]  # the same, for an entry of so many video frames


def refuse_embeddings(text: str, weighs: bool) -> None:
    """Raises: ValueError for a caption that pulls in a file which no key knows."""
    if weighs and "embedding:" in text:
        raise ValueError(
            f"the caption {text!r} names a textual inversion (embedding:), whose file is not part of the cache's key; "
            "write it without, or set cache.caption_weights = false, which takes captions literally"
        )


@dataclass(frozen=True)
class ComfyTexts:
    """What ComfyUI's CLIP makes; a TextSource."""

    fingerprint: str  # everything that decides what it makes, from the host
    problem: Problem  # asked after each text, so that a CLIP of another model is refused at the first
    clip: ComfyClip | None = None  # None where only its name is known
    keeps_all: bool = False  # of a CONDITIONING, for a model that reads more than states and pooled output
    weighs: bool = False  # whether texts have ComfyUI's syntax of prompts; else they are literal
    name: str = "stock CLIP"
    device: str = "cpu"  # of the results; the host places the encoder itself
    batch_size: int = 1

    def text_of(self, caption: str) -> str:
        return caption

    def key_of(self, text: str) -> str:
        """Raises: as refuse_embeddings."""
        refuse_embeddings(text, self.weighs)
        return self._key(text)

    def _key(self, text: str) -> str:
        return comfy_text_key(text, self.fingerprint, keeps_all=self.keeps_all, weighs=self.weighs)

    def plan(self, num_missing: int) -> None:
        if self.clip is None:
            raise ValueError(_not_here(num_missing, "captions", self.fingerprint, "text_source"))

    def load(self) -> None:
        pass  # the host does with the first text

    def encode_batch(self, texts: Sequence[str]) -> Sequence[Entry]:
        assert self.clip is not None
        entries = []
        for text in texts:
            entry = self._encode(self.clip, text)
            if reason := self.problem(shapes_of(entry)):
                raise ValueError(f"the stock CLIP does not fit: of the caption {text!r}, {reason}")
            entries.append(entry)
        return entries

    def _encode(self, clip: ComfyClip, text: str) -> Entry:
        return read_conditioning(clip.encode(text), f"the caption {text!r}", keeps_all=self.keeps_all)

    def problem_of(self, entry: Entry, text: str) -> str:
        return _finite_problem(entry, f"the states of {text!r}")

    def close(self) -> None:
        if self.clip is not None:
            self.clip.release()


@dataclass(frozen=True)
class ComfyTokens(ComfyTexts):
    """What the tokenizer of ComfyUI's CLIP makes, where its encoders compute in every step; a TextSource."""

    def _key(self, text: str) -> str:
        return comfy_token_key(text, self.fingerprint, weighs=self.weighs)

    def _encode(self, clip: ComfyClip, text: str) -> Entry:
        return read_tokens(clip.tokens(text), f"the caption {text!r}")


@dataclass(frozen=True)
class ComfyLatents:
    """What ComfyUI's VAE makes; a LatentSource. Arguments as for ComfyTexts."""

    fingerprint: str
    problem: LatentsProblem
    vae: ComfyVae | None = None
    name: str = "the stock VAE"
    device: str = "cpu"

    def key_of(self, request: ImageRequest, image_fingerprint: str) -> str:
        return comfy_latent_key(image_fingerprint, request, self.fingerprint)

    def check(self, missing: Sequence[ImageRequest]) -> None:
        if self.vae is None:
            raise ValueError(_not_here(len(missing), "images", self.fingerprint, "latent_source"))
        clips = [request.path for request in missing if len(request.frames) > 1]
        if clips and not self.vae.takes_clips:
            raise ValueError(
                f"the stock VAE encodes every frame for itself, but {len(clips)} clips are to be encoded, such as "
                f"{clips[0]}; connect the VAE that belongs to the model, or leave stock_vae unconnected"
            )

    def load(self) -> None:
        pass

    def encode(self, pixels: torch.Tensor, path: str) -> Entry:
        assert self.vae is not None
        entries = read_samples(self.vae.encode(host_pixels(pixels)), path)
        if len(entries) != 1:
            raise ValueError(f"the stock VAE does not fit: of {path}, it made {len(entries)} samples, not one")
        if reason := self.problem(shapes_of(entries[0]), pixels.shape[1]):
            raise ValueError(f"the stock VAE does not fit: of {path}, {reason}")
        if not_finite := _finite_problem(entries[0], f"the latents of {path}"):
            raise RuntimeError(not_finite)
        return entries[0]

    def close(self) -> None:
        if self.vae is not None:
            self.vae.release()


def host_pixels(pixels: torch.Tensor) -> torch.Tensor:
    """As ComfyUI's loaders give them: the file's own bytes divided by 255. [3, F, H, W] in -1..1 -> [F, H, W, 3]"""
    return (((pixels + 1) * 127.5).round() / 255).permute(1, 2, 3, 0)


TextSource = FolderTexts | ComfyTexts
LatentSource = FolderLatents | ComfyLatents


def shapes_of(entry: Entry) -> dict[str, tuple[int, ...]]:
    """By tensor name."""
    return {name: tuple(tensor.shape) for name, tensor in entry.items()}


def _finite_problem(entry: Entry, what: str) -> str:
    return "" if _is_finite(entry) else f"{what} are not finite; load the encoder in another number type"


def _is_finite(entry: Entry) -> bool:
    return all(tensor.isfinite().all() for tensor in entry.values())


def _not_here(num_missing: int, what: str, fingerprint: str, key: str) -> str:
    return (
        f"{num_missing} {what} are not in the cache, and cache.{key} says that {fingerprint!r} makes them, which only "
        "ComfyUI can: run the Cache Captions and Latents node on this dataset with the same loader and the same cache "
        f"folder, or remove cache.{key} to use the model's own encoder"
    )
