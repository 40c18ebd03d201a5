"""ComfyUI's CONDITIONING, a list of [states [1, S, D], options], and LATENT, {"samples": [B, C, (F,) H, W], of audio
[B, C, (H,) T]} not normalised, of several streams one object with a tensor of each, taken apart; what is not kept is
refused. In core's lists they make pairs, and a CONDITIONING has one item per sample of a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import torch

from ..checkpoints.fingerprint import settings_fingerprint
from ..families.comfy.inputs import (
    COND,
    GUIDE_ATTENTION,
    GUIDES,
    MASK_WITH_SOUND,
    MORE_SAMPLES,
    NOISE_MASK,
    OPTION,
    POOLED,
    SAMPLES,
    TOKENS,
    WEIGHTS,
    WHOLE,
    WITHOUT_EFFECT,
    WORDS,
    fit_mask,
    option_path,
)
from ..system.files import read_json_object, write_atomically
from .key import content_key
from .sources import Shapes, shapes_of
from .store import CacheStore, unwritable

Entry = dict[str, torch.Tensor]

# What ComfyUI's nodes note beside the samples, without changing them.
_LATENT_NOTES = frozenset({NOISE_MASK, "batch_index", "downscale_ratio_spacial", "downscale_ratio_temporal", "type"})
# What ComfyUI's sampler does something with, beside handing it to the model.
_FOR_SAMPLERS = frozenset(
    (
        *("area", "mask", "mask_strength", "set_area_to_bounds", "strength", "default", "model_conds", "uuid"),
        *("start_percent", "end_percent", "timestep_start", "timestep_end", "clip_start_percent", "clip_end_percent"),
        *("control", "control_apply_to_uncond", "gligen", "hooks", "guidance", "noise_augmentation"),
        *("unclip_conditioning", "denoise_mask"),  # noise is drawn for it; a mask belongs to the LATENT
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
    """States and pooled output of a CONDITIONING with one item, without their batch; with keeps_all its other tensors
    and numbers, too, as OPTION or WHOLE. Raises: ValueError naming `what` if it is none, or says more."""
    if not isinstance(conditioning, (list, tuple)) or len(conditioning) != 1:
        raise ValueError(
            f"{what}: a CONDITIONING with one item is needed, found {_describe(conditioning)}; training knows no "
            "combined or scheduled prompts"
        )
    return _read_item(conditioning[0], what, keeps_all=keeps_all)


def read_tokens(tokens: Any, what: str) -> Entry:
    """What ComfyUI's tokenizer makes of a text: by text encoder, parts of (token, weight, ...). Raises: ValueError for
    parts of several lengths, or a token that is no number."""
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


def _read_item(item: Any, what: str, *, keeps_all: bool, takes_guides: bool = False) -> Entry:
    is_pair = isinstance(item, (list, tuple)) and len(item) == 2 and isinstance(item[1], Mapping)
    states = item[0] if is_pair else None
    if not isinstance(states, torch.Tensor) or states.ndim != 3 or states.shape[0] != 1 or not states.numel():
        raise ValueError(f"{what}: a CONDITIONING is a list of [states [1, S, D], options], found {_describe(item)}")
    left_out = _FOR_SAMPLERS if takes_guides else _FOR_SAMPLERS | GUIDES
    options: Entry = {}  # what else a model of ComfyUI's may read
    for name, value in item[1].items() if keeps_all else ():
        if name != POOLED and name not in left_out:
            options |= _tensors_of(name, value)
    known = {POOLED, *({option_path(name)[0] for name in options} if keeps_all else WITHOUT_EFFECT)}
    known |= {name for name, value in _WHOLE_RANGE.items() if item[1].get(name) == value}
    extra = sorted(str(name) for name, value in item[1].items() if name not in known and value is not None)
    if extra:
        remedy = _REMEDIES.get(extra[0], f"take out the node that adds {'it' if len(extra) == 1 else 'them'}")
        raise ValueError(f"{what}: its CONDITIONING has {', '.join(extra)}, which training does not read; {remedy}")
    entry = {COND: states[0], **options}
    pooled = item[1].get(POOLED)
    if pooled is not None:
        if not isinstance(pooled, torch.Tensor) or pooled.ndim != 2 or pooled.shape[0] != 1:
            raise ValueError(f"{what}: pooled_output is a tensor [1, D], found {_describe(pooled)}")
        entry[POOLED] = pooled[0]
    return entry


def _tensors_of(path: str, value: Any) -> Entry:
    """One option, or a part of one, as tensors; {} for what cannot be kept."""
    if isinstance(value, torch.Tensor):
        if value.ndim > 1 and value.shape[0] == 1:
            return {f"{OPTION}{path}": value[0].clone()}
        return {} if "." in path else {f"{WHOLE}{path}": value.clone()}
    if type(value) in _NUMBERS:
        return {f"{OPTION}{path}": torch.tensor(value, dtype=_NUMBERS[type(value)])}
    if isinstance(value, str):
        return {f"{WORDS}{path}": torch.tensor(list(value.encode()), dtype=torch.uint8)} if value else {}
    if isinstance(value, (list, tuple)):
        parts = {str(index): each for index, each in enumerate(value)}
    elif isinstance(value, Mapping):
        parts = {str(name): each for name, each in value.items() if each is not None}
    else:
        parts = {name: each for name in _SEEN if (each := getattr(value, name, None)) is not None}
    found: Entry = {}
    for name, part in parts.items():
        tensors = {} if "." in name else _tensors_of(f"{path}.{name}", part)
        if not tensors:
            return {}
        found |= tensors
    return found


def shared_in_batch(latents: Mapping[str, torch.Tensor], text: Mapping[str, torch.Tensor]) -> Entry:
    """What the model is given once for all samples of a batch, so that it must be equal in them. Of noise masks LTX-2
    looks at the first sample's alone for whether noise levels are per frame or per place."""
    shared = {}
    for name, tensor in {**latents, **text}.items():
        path, is_number = option_path(name), not tensor.ndim and tensor.dtype in _NUMBERS.values()
        # Numbers, strings, what has no batch, and what says how guides are attended to
        is_shared = bool(path) and (is_number or not name.startswith(OPTION) or path[0] == GUIDE_ATTENTION)
        # LTX-Video's guides mark places that are not there by numbers below zero.
        if bool((tensor < 0).any()) if name == NOISE_MASK else is_shared:
            shared[name] = tensor
    if NOISE_MASK in latents:
        frames = fit_mask(latents[NOISE_MASK], _sides(latents[SAMPLES]))[0].flatten(1)
        rounded = [frames.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
        # Whether a frame has several values, in each type that a model may compute in. [3], bool
        varies = torch.stack([(each.amin(1) != each.amax(1)).any() for each in rounded])
        shared[f"{NOISE_MASK}.varies"] = varies
    return shared


def _sides(samples: torch.Tensor) -> tuple[int, ...]:
    """Frames, height and width of one sample."""
    return tuple(samples.shape[1:]) if samples.ndim == 4 else (1, *samples.shape[1:])


def read_samples(samples: Any, what: str) -> list[Entry]:
    """The samples of a batch, further streams as MORE_SAMPLES. Raises: ValueError for other forms or lengths."""
    streams = samples.unbind() if _is_nested(samples) else [samples]
    for each in streams:
        if not isinstance(each, torch.Tensor) or each.ndim not in (3, 4, 5) or each.numel() == 0:
            raise ValueError(
                f"{what}: samples are a tensor [B, C, H, W] or [B, C, F, H, W], of audio [B, C, T], found "
                f"{_describe(each)}"
            )
    counts = [len(each) for each in streams]
    if len(set(counts)) > 1:
        raise ValueError(f"{what}: its LATENT has streams of {counts} samples; give a sound for every video")
    names = [SAMPLES, *(f"{MORE_SAMPLES}{number}" for number in range(1, len(streams)))]
    return [dict(zip(names, parts, strict=True)) for parts in zip(*streams, strict=True)]


def _is_nested(samples: Any) -> bool:
    """Whether this is ComfyUI's object of several streams."""
    is_tensor = isinstance(samples, torch.Tensor)
    return not is_tensor and getattr(samples, "is_nested", False) and hasattr(samples, "unbind")


def read_pairs(latents: Sequence[Any], conditioning: Sequence[Any]) -> Iterator[tuple[Entry, Entry]]:
    """Latents and text of every sample, in order. Raises: ValueError naming the first entry that cannot be used."""
    if len(latents) != len(conditioning):
        raise ValueError(f"found {len(latents)} latents and {len(conditioning)} conditionings; give as many of each")
    for number, (latent, texts) in enumerate(zip(latents, conditioning, strict=True), start=1):
        what = f"entry {number} of {len(latents)}"
        if not isinstance(latent, Mapping) or "samples" not in latent:
            raise ValueError(f'{what}: a LATENT is {{"samples": tensor}}, found {_describe(latent)}')
        extra = sorted(name for name in latent.keys() - {"samples", *_LATENT_NOTES} if latent[name] is not None)
        if extra:
            raise ValueError(f"{what}: its LATENT has {', '.join(extra)}, which training does not read; take it out")
        samples = read_samples(latent["samples"], what)
        if (mask := latent.get(NOISE_MASK)) is not None:
            masks = _read_masks(mask, samples[0][SAMPLES].shape, what)
            for index, sample in enumerate(samples):
                sample[NOISE_MASK] = masks[index % len(masks)].clone()
        if not isinstance(texts, (list, tuple)) or len(texts) != len(samples):
            raise ValueError(
                f"{what}: a latent of {len(samples)} samples needs a conditioning of as many items, found "
                f"{_describe(texts)}; training knows no combined prompts"
            )
        for sample, item in zip(samples, texts, strict=True):
            text = _read_item(item, what, keeps_all=True, takes_guides=True)
            _settle_mask(sample, text, what)
            if broken := [name for name, tensor in (sample | text).items() if not tensor.isfinite().all()]:
                names = ", ".join(broken)
                raise ValueError(f"{what}: {names} holds NaN or infinity; encode it again, in another number type")
            yield sample, text


def _read_masks(mask: Any, shape: torch.Size, what: str) -> torch.Tensor:
    """A noise mask as samplers read it, which begin again with the first for more samples. shape: of one."""
    if _is_nested(mask):
        raise ValueError(f"{what}: {MASK_WITH_SOUND}")
    if not isinstance(mask, torch.Tensor) or mask.ndim < 2 or not mask.numel():
        raise ValueError(f"{what}: noise_mask is a tensor [..., H, W], found {_describe(mask)}")
    if len(shape) == 3:
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
    elif mask.ndim < 5:
        mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    if mask.ndim != len(shape) + 1 or mask.shape[1] not in (1, shape[0]):
        raise ValueError(
            f"{what}: its noise_mask is {list(mask.shape)}, but its samples have {shape[0]} channels; a mask has one, "
            "or as many"
        )
    return mask.float()


def _settle_mask(sample: Entry, text: Entry, what: str) -> None:
    """Leave out a noise mask that changes nothing: a sampler denoises everything without one."""
    mask, guided = sample.get(NOISE_MASK), sorted({option_path(name)[0] for name in text if option_path(name)} & GUIDES)
    if mask is None and guided:
        raise ValueError(
            f"{what}: its CONDITIONING has {', '.join(guided)}, but its LATENT has no noise_mask; connect the latent "
            "of the node that added the guide"
        )
    if mask is None:
        return
    samples, sides = sample[SAMPLES], _sides(sample[SAMPLES])
    is_denoised = fit_mask(mask, sides) > 0
    if mask.isfinite().all() and not is_denoised.any():
        raise ValueError(
            f"{what}: its noise_mask is zero in every cell of the latent, so that sampling denoises nothing of it, and "
            "there is nothing to learn; leave places to denoise, such as all frames after the first, or a larger spot"
        )
    where = is_denoised.expand(samples.shape[0], *sides)
    values = [one.reshape(sides)[places] for one, places in zip(samples, where, strict=True)]  # of each channel
    if all(each.numel() > 1 and bool((each == each[0]).all()) for each in values):
        raise ValueError(
            f"{what}: its samples are empty where its noise_mask denoises, so there is nothing to learn: such a latent "
            "is made to begin a sampling with. Encode the whole clip with VAE Encode, and put the mask on that latent "
            "by LTXVImgToVideoInplace, LTXVAddGuide or Set Latent Noise Mask; folders with Wan 2.2's 5B take "
            'data.condition = "first-frame"'
        )
    if not guided and bool((mask == 1).all()):
        del sample[NOISE_MASK]


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)} items"
    return f"a {type(value).__name__}"


# --- a dataset that arrived encoded: entries named by their content, and a list of them with their shapes -------------

_FOLDER = "datasets"
_VERSION = 1
_DIGITS = 32  # of the hash, in the file's name


@pydantic.dataclasses.dataclass(frozen=True)
class EncodedPair:
    """Latents and text of one sample: keys of their entries, and the shapes of the tensors in these."""

    latents: str
    text: str
    latents_shapes: Shapes
    text_shapes: Shapes
    same: str = ""  # names what of it samples of one batch must share; "" for nothing, or in an older list


_PAIRS = pydantic.TypeAdapter(list[EncodedPair])


def save_encoded(
    pairs: Iterable[tuple[Entry, Entry]], store: CacheStore, on_saved: Callable[[int], None] = lambda count: None
) -> Path:
    """Keep the entries (latents, text) that the store has not, and list them at last; returns the list's file.
    on_saved: called after each with their number; raises to stop. Raises: ValueError for no pairs; OSError naming the
    file."""
    listed = []
    for latents, text in pairs:
        keys = []
        for entry in (latents, text):
            plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in entry.items()}
            keys.append(content_key(plain))
            if keys[-1] not in store:
                store.put(keys[-1], plain)
        shared = shared_in_batch(latents, text)
        same = content_key(shared) if shared else ""
        listed.append(EncodedPair(keys[0], keys[1], shapes_of(latents), shapes_of(text), same))
        on_saved(len(listed))
    if not listed:
        raise ValueError("the dataset has no samples; give lists of at least one latent and conditioning")
    samples = [{name: value for name, value in vars(pair).items() if value or name != "same"} for pair in listed]
    content = {"version": _VERSION, "samples": samples}
    path = store.folder / _FOLDER / f"{settings_fingerprint(content)[:_DIGITS]}.json"
    data = json.dumps(content).encode("ascii")
    try:
        if not path.is_file() or path.read_bytes() != data:  # a complete folder may be read-only
            write_atomically(path, data)
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def load_encoded(path: str | Path) -> list[EncodedPair]:
    """The samples that save_encoded listed. Raises: ValueError naming the file if it is missing or no such list."""
    path = Path(path)
    try:
        content = read_json_object(path)
        if content["version"] != _VERSION:
            raise ValueError(f"it is of version {content['version']}, this pack reads {_VERSION}")
        return _PAIRS.validate_python(content["samples"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"data.encoded: {path} is no list of encoded samples ({error}); run the Dataset from Latents and "
            "Conditioning node again"
        ) from error


def store_of_encoded(path: str | Path) -> CacheStore:
    """Where the entries of a list are: the list lies among them."""
    return CacheStore(Path(path).parent.parent)
