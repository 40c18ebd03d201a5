"""Entries that hold what ComfyUI's encoders made: a LATENT or a CONDITIONING without the batch. What a model makes of
them is done when they are read, so one entry serves every model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn.functional import interpolate, pad

from ..spec import ComfyInputs, LatentSpec
from .conditions import VISION

SAMPLES = "samples"  # [C, H, W], of a video [C, F, H, W], of audio [C, T] or [C, H, T]
# With a number behind: the further streams of a LATENT of several, such as a video's sound, [C, T, bins].
MORE_SAMPLES = "samples."
# With a number behind, in a batch: a stream of packed latents. Its sides are the stream's, [B, 0, C, ...], and it has
# no numbers: sides are read without waiting for a device, and are the same on meta.
STREAM = "stream."
# How much of each place sampling denoises: 1 all, 0 nothing. [1 or C, H, W], of a video [1 or C, F, H, W]; any sides.
NOISE_MASK = "noise_mask"
COND = "cond"  # [S, D]
POOLED = "pooled_output"  # [D]
# In front of what else a CONDITIONING says: tensors of one sample, and numbers as tensors without sides. Tensors of a
# list, or of an object, have their index or name behind a point.
OPTION = "option."
WHOLE = "whole."  # likewise, in front of tensors that a CONDITIONING has without a batch
WORDS = "words."  # likewise, in front of strings, as bytes of UTF-8
# In place of COND and POOLED, where text encoders are trained: what the tokenizer made of a caption for each of them.
TOKENS = "tokens."  # [parts, length]
WEIGHTS = "weights."  # of the tokens, as the prompt says them. [parts, length]

# Of LTX-Video's guides: where the last frames of the latents belong. They mean those latents and their noise mask.
GUIDE_ATTENTION = "guide_attention_entries"  # of each guide, how much the others attend to it
GUIDES = frozenset({"keyframe_idxs", GUIDE_ATTENTION})
VOICE = "ref_audio"  # of LTX-2: sound that its own is to be like

# Without attention_mask_img_shape no model of our own families reads the mask.
WITHOUT_EFFECT = frozenset({"attention_mask"})

MASK_WITH_SOUND = (
    "it has a noise_mask, which is read for pictures and videos alone, not for sound; take out the node that adds it "
    "(LTXVImgToVideoInplace, say), or train the video without its sound (without Concat AV Latent); MiniMax H3, which "
    "computes a sound beside every video, is given frames by Add Guide for MiniMax H3 (MiniMaxH3AddGuide) instead"
)

Shape = tuple[int, ...]
_SONG = "\x1e"  # behind a song's tags, in front of what else its text encode node is given; no prompt has it


def option_path(name: str) -> tuple[str, ...]:
    """Of a tensor of an entry: the option's name in the CONDITIONING, and what of it this is; () if it is no option."""
    for prefix in (OPTION, WHOLE, WORDS):
        if name.startswith(prefix):
            return tuple(name.removeprefix(prefix).split("."))
    return ()


def song_text(tags: str, said: Mapping[str, str | float]) -> str:
    """The caption of a song as one text, with what ComfyUI's text encode node of its model takes beside the tags."""
    return f"{tags.replace(_SONG, ' ')}{_SONG}{json.dumps(said, sort_keys=True)}"


def read_song(text: str) -> tuple[str, dict[str, Any]]:
    """The tags of such a text, or of a plain one, and what is said beside them."""
    tags, _, said = text.partition(_SONG)
    return tags, json.loads(said) if said else {}


def negative_prompt() -> dict[str, torch.Tensor]:
    """What says in a batch of one that its text is the negative one; of ComfyUI's own models SDXL's refiner asks."""
    return {f"{WORDS}prompt_type": torch.tensor([list(b"negative")], dtype=torch.uint8)}


def read_text(comfy: ComfyInputs, entry: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What make_inputs takes as text, of one sample; see ComfyInputs."""
    if comfy.reads_all:
        return dict(entry)
    states = entry[COND]
    text = {comfy.states: pad(states, (0, 0, max(0, comfy.min_tokens - states.shape[0]), 0))}
    if comfy.pooled:
        text[comfy.pooled] = entry[POOLED]
    return text


def is_samples(name: str) -> bool:
    """Whether a tensor of an entry is a LATENT's samples, of any stream."""
    return name == SAMPLES or name.startswith(MORE_SAMPLES)


def _streams(entry: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The samples in their order."""
    return [entry[name] for name in sorted(entry) if is_samples(name)]


def read_latents(comfy: ComfyInputs, entry: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Normalised latents of one sample, float32. [C, F, H, W]; several streams packed as ComfyUI does, [1, 1, 1, N]"""
    first, *others = (each.float() for each in _streams(entry))
    if others:
        return comfy.normalise(torch.cat([first.flatten(), *(each.flatten() for each in others)]).view(1, 1, 1, -1))
    channels, *sides = first.shape
    return comfy.normalise(first.view(channels, *[1] * (3 - len(sides)), *sides))


def with_silence(comfy: ComfyInputs, entry: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """An entry of latents with zeros for the sound that the model must be given, where it has none."""
    sound = f"{MORE_SAMPLES}1"
    if comfy.silence is None or sound in entry:
        return entry
    return {**entry, sound: torch.zeros(comfy.silence(entry[SAMPLES].shape[1]))}


def streams_of(entries: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What says in a batch how its packed latents are taken apart; {} for latents of one stream. See STREAM."""
    streams = _streams(entries[0])
    if len(streams) == 1:
        return {}
    return {f"{STREAM}{n}": torch.empty(len(entries), 0, *each.shape) for n, each in enumerate(streams)}


def stream_shapes(given: Mapping[str, torch.Tensor]) -> list[Shape]:
    """Of one sample's streams, as streams_of said them; [] for latents of one stream."""
    return [tuple(given[name].shape[2:]) for name in sorted(given) if name.startswith(STREAM)]


def fit_mask(mask: torch.Tensor, sides: Sequence[int]) -> torch.Tensor:
    """A noise mask in the size of latents, as ComfyUI's sampler resizes it, float32. [1 or C, F, H, W] mask: [1 or C,
    h, w] or [1 or C, f, h, w]. sides: frames, height and width of the latents."""
    wide, is_still = mask.float(), mask.ndim == 3
    wanted = tuple(sides[1:] if is_still else sides)
    if wide.shape[1:] != wanted:
        wide = interpolate(wide[None], size=wanted, mode="bilinear" if is_still else "trilinear")[0]
    return wide.unsqueeze(1) if is_still else wide


def is_tokens(name: str) -> bool:
    """Whether a tensor of an entry says what a text encoder will be given; it is read on the CPU."""
    return name.startswith((TOKENS, WEIGHTS))


def num_tokens(comfy: ComfyInputs, shapes: Mapping[str, Shape]) -> int:
    """Text tokens that the model sees of an entry of these shapes."""
    if COND not in shapes:  # encoders' states are joined as far as all of them reach
        return min(prod(shape) for name, shape in shapes.items() if name.startswith(TOKENS))
    return max(shapes[COND][0], comfy.min_tokens)


_KINDS = {2: "an image, [channels, height, width]", 3: "a video, [channels, frames, height, width]"}
_AUDIO = {1: "audio, [channels, time]", 2: "audio, [channels, height, time]"}
_OWN_VAE, _OWN_CLIP = (f"connect the {each} that belongs to the model" for each in ("VAE", "CLIP"))


@dataclass(frozen=True)
class ComfyReader:
    """What a model asks of entries that ComfyUI's encoders made. config: of the transformer. title: for messages."""

    comfy: ComfyInputs
    config: Mapping[str, Any]
    latent: LatentSpec
    title: str

    def text_problem(self, shapes: Mapping[str, Shape]) -> str:
        """Why an entry of these shapes cannot condition the model; "" if it can."""
        comfy, config, title = self.comfy, self.config, self.title
        options = sorted({path[0] for path in map(option_path, shapes) if path})
        if comfy.reads_all:
            for name in options:
                if name in comfy.refused:
                    return f"its CONDITIONING has {name}, {comfy.refused[name]}"
            missing = [name for name in comfy.needs if name not in options]
            if missing[:1] == [VISION]:
                return (
                    f"its CONDITIONING has no {VISION}, which the image embedder of {title} reads; name its CLIP "
                    "vision model with cache.stock_vision, or put CLIP Vision Encode (CLIPVisionEncode) into the graph"
                )
            return f"its CONDITIONING has no {missing[0]}, which {title} is given beside the noise" if missing else ""
        if extra := ", ".join(name for name in options if name not in WITHOUT_EFFECT):
            return f"its CONDITIONING has {extra}, which training of {title} does not read; take out what adds it"
        width, found = config[comfy.width], shapes[COND][-1]
        if found != width:
            return f"its states are {found} wide, but {title} takes {width}; {_OWN_CLIP}"
        if not comfy.pooled:
            return f"it has a pooled_output, which {title}'s text encoder does not make" if POOLED in shapes else ""
        if POOLED not in shapes:
            return f"it has no pooled_output, which {title} needs; {_OWN_CLIP}"
        width, found = config[comfy.pooled_width], shapes[POOLED][-1]
        return f"its pooled_output is {found} wide, but {title} takes {width}" if found != width else ""

    def _sound_problem(self, shapes: Mapping[str, Shape]) -> str:
        """Why further streams of these shapes do not fit; "" if they do, or there are none."""
        others = [shape for name, shape in shapes.items() if name.startswith(MORE_SAMPLES)]
        if not others:
            return ""
        if not self.comfy.sound:
            return f"it has {len(others) + 1} streams, but {self.title} takes one; give what was encoded of one alone"
        sound = self.comfy.sound
        known = [tuple(side and own for side, own in zip(sound, shape, strict=False)) for shape in others]
        if known != [sound] or len(others[0]) != len(sound):
            return (
                f"beside the video it has {', '.join(str(list(shape)) for shape in others)}, but {self.title} takes "
                f"one stream of sound, {[side or 'time' for side in sound]}; encode it with the audio VAE of the model"
            )
        return ""

    def latents_problem(self, shapes: Mapping[str, Shape], num_frames: int = 0) -> str:
        """Why latents of these shapes cannot be trained on; "" if they can. num_frames: of their clip; 0 if unknown."""
        comfy, latent, title = self.comfy, self.latent, self.title
        if NOISE_MASK in shapes and not comfy.reads_all:
            return f"it has a noise_mask, which training of {title} does not read; take it out"
        has_sound = latent.audio_rows or comfy.silence or any(name.startswith(MORE_SAMPLES) for name in shapes)
        if NOISE_MASK in shapes and has_sound:
            return MASK_WITH_SOUND
        channels, *sides = shapes[SAMPLES]
        if len(sides) != comfy.latent_dims:
            kind = _AUDIO[comfy.latent_dims] if latent.audio_rows else _KINDS[comfy.latent_dims]
            return f"its shape is {[channels, *sides]}, but {title}'s VAE makes that of {kind}; {_OWN_VAE}"
        if reason := self._sound_problem(shapes):
            return reason
        wanted = self.config["in_channels"] // comfy.cells_per_token
        if channels != wanted:
            return f"it has {channels} channels, but {title} takes {wanted}; {_OWN_VAE}"
        frames = latent.num_latent_frames(num_frames)
        if num_frames and comfy.latent_dims == 3 and sides[0] != frames:
            return f"it has {sides[0]} latent frames of {num_frames} frames, but {title} takes {frames}; {_OWN_VAE}"
        if latent.audio_rows and sides[:-1] not in ([], [latent.audio_rows]):
            return f"it is {sides[0]} high, but {title}'s VAE makes {latent.audio_rows} rows of audio; {_OWN_VAE}"
        multiple = latent.size_multiple // latent.spatial_stride
        if not latent.audio_rows and any(side % multiple for side in sides[-2:]):
            return (
                f"it is {sides[-2]} high and {sides[-1]} wide, but {title} takes multiples of {multiple}; make the "
                f"image's sides multiples of {latent.size_multiple} pixels"
            )
        return ""
