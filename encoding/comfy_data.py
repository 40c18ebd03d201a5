"""ComfyUI's CONDITIONING and LATENT taken apart: plain lists, dicts and tensors, of which nothing is imported.

A CONDITIONING is a list of [states [1, S, D], options]. Of the options the families of our own read pooled_output; one
of ComfyUI's own models reads what it likes, so tensors, numbers and strings are kept for it, and lists, dicts and CLIP
vision outputs of them. What is neither kept nor read (areas, guidance, hooks) is refused rather than lost.
A LATENT is {"samples": [B, C, H, W] or [B, C, F, H, W]}, as the VAE made it: samplers normalise it, so it is not yet.

Core's convention for lists of both (Make Training Dataset, Resolution Bucket): entry by entry they belong together, and
where a LATENT is a batch, its CONDITIONING has one item per sample of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, TypeGuard

import torch

from ..families.comfy.inputs import (
    COND,
    OPTION,
    POOLED,
    SAMPLES,
    TOKENS,
    WEIGHTS,
    WHOLE,
    WITHOUT_EFFECT,
    WORDS,
    option_path,
)

Entry = dict[str, torch.Tensor]

# What ComfyUI's nodes note beside the samples, without changing them.
_LATENT_NOTES = frozenset({"batch_index", "downscale_ratio_spacial", "downscale_ratio_temporal"})
# What ComfyUI's sampler does something with, beside handing it to the model.
_FOR_SAMPLERS = frozenset(
    (
        *("area", "mask", "mask_strength", "set_area_to_bounds", "strength", "default", "model_conds", "uuid"),
        *("start_percent", "end_percent", "timestep_start", "timestep_end", "clip_start_percent", "clip_end_percent"),
        *("control", "control_apply_to_uncond", "gligen", "hooks", "guidance", "noise_augmentation"),
        # Noise is drawn for them, and parts of the latent are left as they are.
        *("unclip_conditioning", "keyframe_idxs", "guide_attention_entries", "denoise_mask"),
    )
)
_WHOLE_RANGE = {"start_percent": 0.0, "end_percent": 1.0}  # what some nodes write of every step
# What models read of what CLIP Vision Encode gives.
_SEEN = ("penultimate_hidden_states", "last_hidden_state", "image_embeds", "image_sizes")
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
_REMEDIES = {
    "guidance": "take the FluxGuidance node out, and set guidance on the training node",
    "hooks": "take the hooks off the CLIP",
}


def read_conditioning(conditioning: Any, what: str, *, keeps_all: bool = False) -> Entry:
    """The states and the pooled output of a CONDITIONING with one item, without their batch.

    Args:
        what: names it in a message.
        keeps_all: also its other tensors and numbers, under names that begin with OPTION or WHOLE.
    Raises: ValueError if it is none, or says more than that.
    """
    if not isinstance(conditioning, (list, tuple)) or len(conditioning) != 1:
        raise ValueError(
            f"{what}: a CONDITIONING with one item is needed, found {_describe(conditioning)}; training knows no "
            "combined or scheduled prompts"
        )
    return _read_item(conditioning[0], what, keeps_all=keeps_all)


def read_tokens(tokens: Any, what: str) -> Entry:
    """What a tokenizer of ComfyUI's makes of one text: for each text encoder, parts of (token, weight, ...).

    Raises: ValueError for parts of several lengths, or a token that is no number.
    """
    if not isinstance(tokens, Mapping) or not tokens:
        raise ValueError(f"{what}: tokens by text encoder are needed, found {_describe(tokens)}")
    found: Entry = {}
    for name, parts in tokens.items():
        if not parts or len({len(part) for part in parts}) != 1:
            raise ValueError(f"{what}: its tokens for {name} are in parts of several lengths, which is not trained")
        if any(type(token) is not int for part in parts for token, *_ in part):
            raise ValueError(f"{what}: it holds an embedding, which is not trained; take it out")
        found[f"{TOKENS}{name}"] = torch.tensor([[each[0] for each in part] for part in parts])
        found[f"{WEIGHTS}{name}"] = torch.tensor([[each[1] for each in part] for part in parts], dtype=torch.float64)
    return found


def token_lists(entries: Mapping[str, torch.Tensor]) -> list[dict[str, list[list[tuple[int, float]]]]]:
    """Of a batch of such entries: each sample's tokens as the tokenizer gave them."""
    found: list[dict[str, list[list[tuple[int, float]]]]] = []
    for name in [name for name in entries if name.startswith(TOKENS)]:
        own = name.removeprefix(TOKENS)
        batch = zip(entries[name].tolist(), entries[f"{WEIGHTS}{own}"].tolist(), strict=True)
        for index, (ids, weights) in enumerate(batch):
            parts = [list(zip(*each, strict=True)) for each in zip(ids, weights, strict=True)]
            if index == len(found):
                found.append({})
            found[index][own] = parts
    return found


def _read_item(item: Any, what: str, *, keeps_all: bool) -> Entry:
    is_pair = isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[1], Mapping)
    states = item[0] if is_pair else None
    if not isinstance(states, torch.Tensor) or states.ndim != 3 or states.shape[0] != 1 or not states.numel():
        raise ValueError(f"{what}: a CONDITIONING is a list of [states [1, S, D], options], found {_describe(item)}")
    options = _plain_options(item[1]) if keeps_all else {}
    _refuse_options(item[1], what, {option_path(name)[0] for name in options} if keeps_all else WITHOUT_EFFECT)
    entry = {COND: states[0], **options}
    pooled = item[1].get(POOLED)
    if pooled is not None:
        if not isinstance(pooled, torch.Tensor) or pooled.ndim != 2 or pooled.shape[0] != 1:
            raise ValueError(f"{what}: pooled_output is a tensor [1, D], found {_describe(pooled)}")
        entry[POOLED] = pooled[0]
    return entry


def _plain_options(options: Mapping[str, Any]) -> Entry:
    """What else a model of ComfyUI's may read: tensors of one sample, and numbers as tensors without sides."""
    found: Entry = {}
    for name, value in options.items():
        if name != POOLED and name not in _FOR_SAMPLERS:
            found |= _tensors_of(name, value)
    return found


def _tensors_of(path: str, value: Any) -> Entry:
    """One option, or a part of one, as tensors; {} for what cannot be kept."""
    if isinstance(value, torch.Tensor):
        if _has_batch(value):
            return {f"{OPTION}{path}": value[0].clone()}
        return {} if "." in path else {f"{WHOLE}{path}": value.clone()}
    if type(value) in _NUMBERS:
        return {f"{OPTION}{path}": torch.tensor(value, dtype=_NUMBERS[type(value)])}
    if isinstance(value, str):
        return {f"{WORDS}{path}": torch.tensor(list(value.encode()), dtype=torch.uint8)} if value else {}
    found: Entry = {}
    for name, part in _parts_of(value).items():
        tensors = {} if "." in name else _tensors_of(f"{path}.{name}", part)
        if not tensors:
            return {}
        found |= tensors
    return found


def _parts_of(value: Any) -> Mapping[str, Any]:
    """By index or name; {} for what is neither list, dict nor CLIP vision output."""
    if isinstance(value, (list, tuple)):
        return {str(index): each for index, each in enumerate(value)}
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items() if each is not None}
    seen = {name: getattr(value, name, None) for name in _SEEN}
    return {name: each for name, each in seen.items() if each is not None}


def must_be_equal(name: str, tensor: torch.Tensor) -> bool:
    """Whether the model is given this once for all samples of a batch: numbers, strings, and what has no batch."""
    is_number = not tensor.ndim and tensor.dtype in _NUMBERS.values()
    return bool(option_path(name)) and (is_number or not name.startswith(OPTION))


def _has_batch(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor of one sample with its batch."""
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[0] == 1


def _refuse_options(options: Mapping[str, Any], what: str, others: Set[str]) -> None:
    known = {POOLED, *others}
    known |= {name for name, value in _WHOLE_RANGE.items() if options.get(name) == value}
    extra = sorted(str(name) for name, value in options.items() if name not in known and value is not None)
    if extra:
        remedy = _REMEDIES.get(extra[0], f"take out the node that adds {'it' if len(extra) == 1 else 'them'}")
        raise ValueError(f"{what}: its CONDITIONING has {', '.join(extra)}, which training does not read; {remedy}")


def read_samples(samples: Any, what: str) -> list[Entry]:
    """The samples of a batch, one entry each.

    Raises: ValueError if this is no tensor of that form.
    """
    if not isinstance(samples, torch.Tensor) or samples.ndim not in (4, 5) or samples.numel() == 0:
        raise ValueError(f"{what}: samples are a tensor [B, C, H, W] or [B, C, F, H, W], found {_describe(samples)}")
    return [{SAMPLES: sample} for sample in samples]


def read_pairs(latents: Sequence[Any], conditioning: Sequence[Any]) -> Iterator[tuple[Entry, Entry]]:
    """Latents and text of every sample, in order.

    Raises: ValueError naming the first entry of the lists that cannot be used.
    """
    if len(latents) != len(conditioning):
        raise ValueError(f"found {len(latents)} latents and {len(conditioning)} conditionings; give as many of each")
    for number, (latent, texts) in enumerate(zip(latents, conditioning, strict=True), start=1):
        what = f"entry {number} of {len(latents)}"
        samples = _read_latent(latent, what)
        if not isinstance(texts, (list, tuple)) or len(texts) != len(samples):
            raise ValueError(
                f"{what}: a latent of {len(samples)} samples needs a conditioning of as many items, found "
                f"{_describe(texts)}; training knows no combined prompts"
            )
        for sample, item in zip(samples, texts, strict=True):
            text = _read_item(item, what, keeps_all=True)
            if broken := [name for name, tensor in (sample | text).items() if not tensor.isfinite().all()]:
                names = ", ".join(broken)
                raise ValueError(f"{what}: {names} holds NaN or infinity; encode it again, in another number type")
            yield sample, text


def _read_latent(latent: Any, what: str) -> list[Entry]:
    if not isinstance(latent, Mapping) or "samples" not in latent:
        raise ValueError(f'{what}: a LATENT is {{"samples": tensor}}, found {_describe(latent)}')
    extra = sorted(name for name in latent.keys() - {"samples", *_LATENT_NOTES} if latent[name] is not None)
    if extra:
        raise ValueError(f"{what}: its LATENT has {', '.join(extra)}, which training does not read; take it out")
    return read_samples(latent["samples"], what)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)} items"
    return f"a {type(value).__name__}"
