"""Cached samples as batches: latents, text states and masks, ready for the transformer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from ..caching.store import CacheStore
from ..families.comfy_inputs import SAMPLES
from .data import Sample, TrainingSample, load_mask


def _own_latents(entry: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of an entry that our own VAE code made."""
    return entry["latents"]


_LATENTS = frozenset({"latents", SAMPLES})  # what an entry holds besides these are conditions


@dataclass(frozen=True)
class LoadedBatch:
    """One forward's worth of data on the CPU.

    Args:
        latents: clean and normalised, float32. [B, C, F, H, W]
        text: what the text encoders left, by name. [B, S, D] or [B, D]; with NAME also NAME_mask, bool, True for what
            is no padding, where captions of several lengths meet. [B, S]
        mask: loss weight per latent cell, or None. [B, 1, 1 or F, H, W]
        num_tokens: image tokens of one sample.
        conditions: what else the model is given, by name, normalised like the latents. [B, C', F, H, W]
    """

    latents: torch.Tensor
    text: Mapping[str, torch.Tensor]
    mask: torch.Tensor | None
    num_tokens: int
    conditions: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class CachedSamples:
    """Samples with the cache entries that hold their latents and captions.

    Args:
        samples: what the entries are of. latent_keys: one per sample.
        text_keys: by caption; the empty caption is always among them.
        use_masks: whether masks of samples that have one weigh the loss.
        tokens_per_cell: image tokens per latent cell.
        varying: names of text states that are as long as their caption.
        read_latents, read_text: an entry as normalised latents [C, F, H, W], and as the text that make_inputs reads;
            entries of ComfyUI's encoders are made fit here.
        gives_first_latents: whether the model is given the first latent frame, which the loss then leaves out.
    """

    store: CacheStore
    samples: Sequence[TrainingSample]
    latent_keys: Sequence[str]
    text_keys: Mapping[str, str]
    use_masks: bool
    tokens_per_cell: float
    varying: frozenset[str] = frozenset()
    read_latents: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] = _own_latents
    read_text: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = dict
    gives_first_latents: bool = False

    def load(self, indices: Sequence[int], drop_caption: Sequence[bool]) -> LoadedBatch:
        """Read the samples of one batch; all must be of one bucket and length.

        Raises: RuntimeError if an entry is gone from the cache, or its text states are of another length than others.
        """
        entries = [self._entry(self.latent_keys[i]) for i in indices]
        latents = torch.stack([self.read_latents(entry) for entry in entries])
        names = [name for name in entries[0] if name not in _LATENTS]
        conditions = {name: torch.stack([entry[name] for entry in entries]) for name in names}
        captions = ["" if drop else self.samples[i].caption for i, drop in zip(indices, drop_caption, strict=True)]
        texts = [self.read_text(self._entry(self.text_keys[caption])) for caption in captions]
        text = join_texts(texts, self.varying)
        num_tokens = int(latents[0, 0].numel() * self.tokens_per_cell)
        mask = self._masks(indices, latents)
        if self.gives_first_latents:
            conditions["first_latents"] = latents[:, :, :1]
            mask = _without_first_frame(mask, latents)
        return LoadedBatch(latents, text, mask, num_tokens, conditions)

    def _masks(self, indices: Sequence[int], latents: torch.Tensor) -> torch.Tensor | None:
        samples = [self.samples[i] for i in indices]
        if not self.use_masks or not any(sample.mask_path for sample in samples):
            return None
        height, width = latents.shape[-2:]
        full = torch.ones(1, 1, height, width)
        return torch.stack(
            [
                load_mask(sample, (height, width)) if isinstance(sample, Sample) and sample.mask_path else full
                for sample in samples
            ]
        )

    def _entry(self, key: str) -> dict[str, torch.Tensor]:
        entry = self.store.get(key)
        if entry is None:
            raise RuntimeError(
                f"cache entry {key[:16]} is gone from {self.store.folder}; start the job again to refill it"
            )
        return entry


def _without_first_frame(mask: torch.Tensor | None, latents: torch.Tensor) -> torch.Tensor:
    """The mask, or ones, with zeros for the first latent frame. [B, 1, F, H, W]"""
    shape = (latents.shape[0], 1, *latents.shape[2:])
    weights = torch.ones(shape) if mask is None else mask.expand(shape).clone()
    weights[:, :, 0] = 0
    return weights


def join_texts(entries: Sequence[Mapping[str, torch.Tensor]], varying: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """The text states of several captions as one batch; shorter ones get zeros behind, and a mask that says so.

    Args:
        entries: name -> [S, D] or [D], the same names in each.
        varying: names whose S may differ.
    Returns: name -> [B, S, D] or [B, D], and NAME_mask -> [B, S], bool, where something was padded.
    Raises: RuntimeError for lengths that differ under a name that is not among `varying`: its family would not know
        what to do with a mask.
    """
    joined: dict[str, torch.Tensor] = {}
    for name in entries[0]:
        states = [entry[name] for entry in entries]
        lengths = [len(each) for each in states]
        if min(lengths) == max(lengths):
            joined[name] = torch.stack(states)
            continue
        if name not in varying:
            raise RuntimeError(
                f"{name} of one batch have lengths {sorted(set(lengths))} in the cache, and this model's text encoder "
                "makes all equally long; find what does not belong there with devicebridge cache --verify, or choose "
                "another cache.folder"
            )
        joined[name] = pad_sequence(states, batch_first=True)
        joined[f"{name}_mask"] = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return joined
