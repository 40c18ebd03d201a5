"""Cached samples as batches: latents, text states and masks, ready for the transformer."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch

from ..checkpoints.fingerprint import file_fingerprint
from ..data.samples import DROPPED, Batch, Sample, TrainingSample, load_mask
from ..encoding.store import CacheStore
from ..families.comfy import inputs
from ..families.spec import ComfyInputs

_log = logging.getLogger(__name__)


_LATENTS = "latents"
_NO_CONDITIONS = (_LATENTS, inputs.NOISE_MASK)  # nor samples; what else an entry of latents holds is one


@dataclass(frozen=True)
class LoadedBatch:
    """One forward's worth of data on the CPU. conditions: what else the model is given, by name, normalised like the
    latents, [B, C', F, H, W]; how packed latents are taken apart; a noise mask, [B, 1 or C, F, H, W]."""

    latents: torch.Tensor  # clean, normalised, float32. [B, C, F, H, W]; of several streams packed, [B, 1, 1, 1, N]
    text: Mapping[str, torch.Tensor]  # states by name. [B, S, D] or [B, D]
    mask: torch.Tensor | None  # loss weight per latent cell. [B, 1, 1 or F, H, W]
    num_tokens: int  # image tokens of one sample
    conditions: Mapping[str, torch.Tensor] = field(default_factory=dict)
    weights: torch.Tensor | None = None  # of each sample's loss, [B], or each value's, [B or 1, 1, 1, 1, N]
    outside: torch.Tensor | None = None  # what files' masks leave out of what the model could learn, as mask


@dataclass(frozen=True)
class CachedSamples:
    """Samples with the cache entries that hold their latents and captions. comfy: how the model takes those that
    ComfyUI's encoders made; ours make normalised latents [C, F, H, W], and text as make_inputs reads it. recompute:
    makes an entry that is gone."""

    store: CacheStore
    samples: Sequence[TrainingSample]  # with their keys
    use_masks: bool  # whether files' masks weigh the loss
    tokens_per_cell: float  # image tokens per latent cell
    comfy: ComfyInputs | None = None
    gives_first_latents: bool = False  # to the model, and the loss leaves them out
    recompute: Callable[[str], None] | None = None
    prompt_keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of texts that pictures are drawn of
    read: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict, compare=False)  # ahead, by key

    def keys(self) -> set[str]:
        """All entries that may be read."""
        of_texts = [keys for each in self.samples for keys in each.text_keys]
        return {each.latents_key for each in self.samples} | {
            key for keys in (*of_texts, *self.prompt_keys.values()) for key in keys
        }

    def name_of(self, index: int) -> str:
        """A sample, for a message."""
        return str(getattr(self.samples[index], "path", f"sample {index + 1} of the encoded dataset"))

    def text(self, prompt: str) -> Mapping[str, torch.Tensor]:
        """What the text encoders left of one prompt, as a batch of one."""
        return join_texts([self._read_text(self.prompt_keys[prompt])])

    def not_finite(self, index: int, caption: int, dtype: torch.dtype) -> str:
        """What of a sample is not finite in this type; "" if all is."""
        latents, texts = self.samples[index].latents_key, self._text_keys(index, caption)
        for part, keys in (("latents", [latents]), ("caption", texts)):
            entry = self._entry(latents) if part == "latents" else self._read_text(keys)
            if not all(torch.isfinite(t.to(dtype)).all() for t in entry.values() if t.is_floating_point()):
                return f"the {part} of {self.name_of(index)} (cache entry {self.store.path(keys[-1])})"
        return ""

    def trained_on(self, index: int) -> list[Any]:
        """Plain values that decide what is computed of a sample. Raises: OSError if its mask has gone."""
        sample = self.samples[index]
        mask = file_fingerprint(sample.mask_path) if self.use_masks and sample.mask_path else ""
        entries = [sample.latents_key, *sample.text_keys[0], *sample.text_keys[1:-1]]
        return [entries, mask, sample.loss_weight, sample.bucket, sample.num_frames, sample.alike]

    def _text_keys(self, index: int, caption: int) -> tuple[str, ...]:
        keys = self.samples[index].text_keys[caption]
        assert keys, f"{self.name_of(index)} has no text {'without' if caption == DROPPED else 'with'} its caption"
        return keys

    def _read_text(self, keys: Sequence[str]) -> Mapping[str, torch.Tensor]:
        found = {name: each for key in keys for name, each in self._entry(key).items()}
        return inputs.read_text(self.comfy, found) if self.comfy and inputs.COND in found else found

    def _read_latents(self, entry: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return inputs.read_latents(self.comfy, entry) if self.comfy and _LATENTS not in entry else entry[_LATENTS]

    def load(self, indices: Sequence[int], captions: Sequence[int]) -> LoadedBatch:
        """Read the samples of one batch, as Batch has them, of one bucket and length. Raises: RuntimeError for an entry
        that is gone, or text states of several lengths."""
        stored = [self._entry(self.samples[i].latents_key) for i in indices]
        entries = [inputs.with_silence(self.comfy, entry) for entry in stored] if self.comfy else stored
        is_silent = all(len(entry) > len(own) for entry, own in zip(entries, stored, strict=True))
        latents = _stacked([self._read_latents(entry) for entry in entries])
        names = [name for name in entries[0] if name not in _NO_CONDITIONS and not inputs.is_samples(name)]
        conditions = {name: _stacked([entry[name] for entry in entries]) for name in names}
        if _LATENTS not in entries[0]:
            conditions |= inputs.streams_of(entries)
        keys = [self._text_keys(*each) for each in zip(indices, captions, strict=True)]
        texts = [dict(self._read_text(each)) for each in keys]
        noise_masks = _noise_masks(entries, texts, latents)
        text = join_texts(texts)
        num_tokens = int(latents[0, 0].numel() * self.tokens_per_cell)
        mask, outside, samples = None, None, [self.samples[i] for i in indices]
        if self.use_masks and any(sample.mask_path for sample in samples):
            shapes = inputs.stream_shapes(conditions)
            height, width = (shapes[0] if shapes else latents.shape)[-2:]
            masks = [
                load_mask(each, (height, width)) if isinstance(each, Sample) and each.mask_path else None
                for each in samples
            ]
            mask = torch.stack([torch.ones(1, 1, height, width) if each is None else each for each in masks])
            outside = 1 - mask
            if shapes:
                mask, outside = _packed(mask, shapes, 1.0 - is_silent), _packed(outside, shapes, 0.0)
        learned: list[torch.Tensor] = []
        if self.gives_first_latents:
            conditions["first_latents"] = latents[:, :, :1]
            learned.append(torch.ones(latents.shape[0], 1, *latents.shape[2:]))
            learned[0][:, :, 0] = 0
        if noise_masks is not None:  # what sampling does not denoise, training does not learn
            conditions[inputs.NOISE_MASK] = noise_masks
            learned.append(noise_masks.clamp(0, 1))
        for each in learned:
            mask, outside = each if mask is None else mask * each, None if outside is None else outside * each
        factors = [sample.loss_weight for sample in samples]
        of_samples = None if all(each == 1 for each in factors) else torch.tensor(factors)
        weights = loss_weights(of_samples, conditions, mask, is_silent=is_silent)
        return LoadedBatch(latents, text, mask, num_tokens, conditions, weights, outside)

    def read_ahead(self, batch: Batch) -> None:
        """Read the entries of the batch that will probably be loaded next; what cannot be read is left to load()."""
        self.read.clear()
        for index, caption in zip(batch.indices, batch.captions, strict=True):
            for key in (self.samples[index].latents_key, *self._text_keys(index, caption)):
                with contextlib.suppress(OSError):
                    entry = self.store.get(key) if key not in self.read else None
                    if entry is not None:
                        self.read[key] = entry

    def _entry(self, key: str) -> dict[str, torch.Tensor]:
        entry = self.read.pop(key, None) or self.store.get(key)
        if entry is None and self.recompute is not None:
            _log.warning("cache entry %s was deleted or damaged since this run began; it is computed again", key)
            try:
                self.recompute(key)
            except (ValueError, RuntimeError, OSError) as error:
                raise RuntimeError(f"{self._gone(key)}, and it cannot be computed again now: {error}") from error
            entry = self.store.get(key)
        if entry is None:
            raise RuntimeError(f"{self._gone(key)}; start the job again, with resume, to compute it again")
        return entry

    def _gone(self, key: str) -> str:
        of = [self.name_of(index) for index, each in enumerate(self.samples) if each.latents_key == key]
        of += [f"the prompt {shorten(prompt, 80)!r}" for prompt, keys in self.prompt_keys.items() if key in keys]
        texts = [{key for keys in each.text_keys for key in keys} for each in self.samples]
        of += [f"the text of {self.name_of(index)}" for index, keys in enumerate(texts) if key in keys]
        return f"cache entry {self.store.path(key)} of {of[0]} was deleted or damaged since this run began"


def loss_weights(
    of_samples: torch.Tensor | None,
    given: Mapping[str, torch.Tensor],
    mask: torch.Tensor | None = None,
    *,
    is_silent: bool = False,
) -> torch.Tensor | None:
    """Weights of a batch's losses, of those of its samples, [B], or None; given: how packed latents are taken apart.
    The loss of several streams is the sum of their means (LTX-2's own trainer). mask: weighs each mean. [B, 1, 1, 1, N]
    is_silent: whether the first stream alone counts."""
    sizes = [math.prod(shape) for shape in inputs.stream_shapes(given)]
    if not sizes:
        return of_samples
    counted = [1.0, *([0.0 if is_silent else 1.0] * (len(sizes) - 1))]
    parts = [float(size) for size in sizes]
    if mask is not None:
        parts = [float(each.sum()) for each in mask.flatten(1).double().split(sizes, dim=1)]
    shares = [sum(parts) / part * count if part else 0.0 for part, count in zip(parts, counted, strict=True)]
    each = [torch.full((size,), share) for size, share in zip(sizes, shares, strict=True)]
    factors = torch.cat(each).view(1, 1, 1, 1, -1)
    return factors if of_samples is None else of_samples.view(-1, 1, 1, 1, 1) * factors


def _packed(mask: torch.Tensor, shapes: Sequence[tuple[int, ...]], others: float) -> torch.Tensor:
    """A mask of the first stream, [B, 1, 1, H, W], for latents packed of several. [B, 1, 1, 1, N]"""
    first = mask.expand(len(mask), *shapes[0]).flatten(1)
    rest = torch.full((len(mask), sum(map(math.prod, shapes[1:]))), others)
    return torch.cat([first, rest], dim=1).view(len(mask), 1, 1, 1, -1)


def _noise_masks(
    entries: Sequence[Mapping[str, torch.Tensor]], texts: Sequence[dict[str, torch.Tensor]], latents: torch.Tensor
) -> torch.Tensor | None:
    """Of the latents' entries, or taken from those of what conditions them; None without. [B, 1 or C, F, H, W]"""
    found = [
        texts[i].pop(inputs.NOISE_MASK, None) if (own := each.get(inputs.NOISE_MASK)) is None else own
        for i, each in enumerate(entries)
    ]
    if all(each is None for each in found):
        return None
    sides = latents.shape[2:]
    masks = [torch.ones(1, *sides) if each is None else inputs.fit_mask(each, sides) for each in found]
    channels = max(each.shape[0] for each in masks)
    return _stacked([each.expand(channels, *sides) for each in masks])


def join_texts(entries: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As one batch: name -> [S, D] or [D] of each to [B, S, D] or [B, D]. Raises: RuntimeError for other lengths."""
    joined: dict[str, torch.Tensor] = {}
    for name in entries[0]:
        states = [entry[name] for entry in entries]
        lengths = sorted({each.shape[0] if each.ndim else 1 for each in states})
        if len(lengths) > 1:
            found = f"{name} of one batch have lengths {lengths} in the cache, and this model's are equally long"
            helps = "find what does not belong there with devicebridge cache --verify, or choose another cache.folder"
            raise RuntimeError(f"{found}; {helps}")
        joined[name] = _stacked(states)
    return joined


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As torch.stack; of one no copy is made, since text states may be large."""
    return torch.stack(list(tensors)) if len(tensors) > 1 else tensors[0].unsqueeze(0)
