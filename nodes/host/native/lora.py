"""A LoRA file as ComfyUI's own loader maps it onto one of its models."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.lora_file import ALPHA, DORA, OFT, A, B
from ....checkpoints.lora_start import find_part, with_strength
from ....families.naming import find_by_original
from ....families.spec import TEXT_ENCODERS, Rename

_PREFIX, _SUFFIX = "diffusion_model.", ".weight"
_MOST_LAYERS = 32  # of CLIP-G
# What the weights of ComfyUI's adapters are; "" for what is not trained here: of convolutions, or a rescale.
_WEIGHTS = {
    "lora": (B, A, ALPHA, "", DORA, ""),
    "loha": ("hada_w1_a", "hada_w1_b", ALPHA, "hada_w2_a", "hada_w2_b", "", "", DORA),
    "lokr": ("lokr_w1", "lokr_w2", ALPHA, "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", "", DORA),
    "oft": (OFT, "", ALPHA, ""),
}

# Diffusers' names of layers, in LoRA files that ComfyUI's loader does not map, by class. Of MiniMax H3 as published:
# gate and value lie the other way round, and queries, keys and values are layers of their own.
_H3_LAYERS = {
    "attn.qkv_proj": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "attn.out_proj": ("attn.to_out.0",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
    "adaln_proj.linear": ("adaln_proj.linear",),
}
_H3_LISTS = {"blocks": "transformer_blocks", "token_refiner.blocks": "token_refiner.refiner_blocks"}
_OF_DIFFUSERS = {
    "MiniMaxH3Model": tuple(
        Rename(f"{own}.{{}}.{layer}", tuple(f"{their}.{{}}.{each}" for each in theirs), swap_halves=layer == "mlp.fc1")
        for own, their in _H3_LISTS.items()
        for layer, theirs in _H3_LAYERS.items()
    )
}


def map_lora(
    base: Any, tensors: Mapping[str, Tensor], encoders: Sequence[str] = (), renames: Sequence[Rename] = ()
) -> tuple[Any, list[str]]:
    """What ComfyUI's loader makes of a file: adapters by place, and names that it does not map. encoders: such as
    "clip_l". renames: diffusers' names, which the loader may not know. Raises: ValueError for a layer there twice."""
    import comfy.lora
    import comfy.lora_convert

    named = comfy.lora_convert.convert_lora(dict(tensors))
    places = comfy.lora.model_lora_keys_unet(base, {})
    if encoders:
        layer = "{}.transformer.text_model.encoder.layers.{}.{}.weight"
        each_layer = itertools.product(encoders, range(_MOST_LAYERS), comfy.lora.LORA_CLIP_MAP)
        names = {layer.format(*of): None for of in each_layer}  # all that the loader looks for; some have fewer layers
        places = comfy.lora.model_lora_keys_clip(SimpleNamespace(state_dict=lambda: names), places)
    for name, weight in base.diffusion_model.named_parameters() if renames else ():
        if (stack := find_by_original(name.removesuffix(_SUFFIX), renames)) is not None:
            change = (lambda rows: torch.cat(rows.chunk(2)[::-1]),) if stack.swap_halves else ()
            for member, (first, end) in stack.rows(len(weight)).items():
                place = (f"{_PREFIX}{name}", (0, first, end - first), *change)
                places |= {f"{prefix}{member}": place for prefix in ("", "transformer.", _PREFIX)}
    layers: dict[Any, str] = {}
    for part in filter(None, map(find_part, named)):
        if part.layer in places and (other := layers.setdefault(places[part.layer], part.layer)) != part.layer:
            # ComfyUI takes one of two, and drops the other without a word.
            raise ValueError(f"one layer is there twice, as {other} and as {part.layer}; give a file with one of them")
    found: dict[Any, Any] = comfy.lora.load_lora(named, places, log_missing=False)
    read = {key for adapter in found.values() for key in getattr(adapter, "loaded_keys", ())}
    return found, sorted(set(named) - read)


def read_lora(base: Any, tensors: Mapping[str, Tensor], encoders: Sequence[str] = ()) -> dict[str, dict[str, Tensor]]:
    """See HostModel.read_lora. Raises: as map_lora; ValueError for what ComfyUI does not map or is not trained here."""
    renames = _OF_DIFFUSERS.get(type(base.diffusion_model).__name__, ())
    found, unread = map_lora(base, tensors, encoders, renames)
    if unread:
        others = f" and {len(unread) - 1} more" if unread[1:] else ""
        raise ValueError(f"ComfyUI does not map {unread[0]}{others} onto this model; give a LoRA of this model")
    shapes = {name: each.shape for name, each in base.named_parameters()}
    parts: dict[str, list[tuple[Any, dict[str, Tensor]]]] = {}
    for place, adapter in found.items():
        key = place if isinstance(place, str) else place[0]
        parts.setdefault(key, []).append((place, _layer_of(key, adapter)))
    made = {}
    for key, own in parts.items():
        fqn = key.removeprefix(_PREFIX) if key.startswith(_PREFIX) else f"{TEXT_ENCODERS}.{key}"
        made[fqn.removesuffix(_SUFFIX)] = _joined(key, own, shapes[key][0] if key in shapes else 0)
    return made


def _layer_of(key: str, adapter: Any) -> dict[str, Tensor]:
    """Raises: ValueError for an adapter that is no LoRA, DoRA, LoKr, LoHa or OFT of a linear layer."""
    name = adapter[0] if isinstance(adapter, tuple) else adapter.name  # a tuple is "diff" or "set", of a bias too
    values = itertools.zip_longest(_WEIGHTS.get(name, ()), getattr(adapter, "weights", ()))
    layer = {kind: each for kind, each in values if each is not None}
    if not layer or not all(layer):
        raise ValueError(f"{key} has an adapter of the kind {name}, not trained here; give a LoRA, LoKr, LoHa or OFT")
    return dict(with_strength(layer))


def _joined(key: str, parts: Sequence[tuple[Any, dict[str, Tensor]]], num_rows: int) -> dict[str, Tensor]:
    """One layer of what a file has for rows of it (q, k and v of a qkv). Raises: ValueError where that is no LoRA."""
    if len(parts) == 1 and isinstance(parts[0][0], str):
        return parts[0][1]
    downs, ups = [], []
    for place, layer in parts:
        if set(layer) != {A, B}:
            raise ValueError(f"{key} has DoRA, LoKr, LoHa or OFT of some rows, which is not read; give plain LoRA")
        _, offset, *function = (place,) * 2 if isinstance(place, str) else place
        up = function[0](layer[B]) if function and function[0] is not None else layer[B]
        offset = (0, 0, num_rows) if isinstance(offset, str) or offset is None else offset
        if offset[0] != 0:
            raise ValueError(f"{key} has a LoRA of some of its columns, which is not read; give one of whole layers")
        whole = torch.zeros(num_rows, up.shape[1], dtype=up.dtype)
        whole.narrow(0, offset[1], offset[2]).copy_(up)
        downs.append(layer[A])
        ups.append(whole)
    return {A: torch.cat(downs), B: torch.cat(ups, dim=1)}
