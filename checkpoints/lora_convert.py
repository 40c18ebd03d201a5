"""Which model a LoRA file is of, what loaders make of it, and the file in another layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..families.naming import Stack, originals_of
from ..families.registry import FAMILIES, find_family
from ..families.spec import ModelFamily
from ..patches.lora import matches_any
from ..patches.lora_linear import oft_change
from . import lora_file, lora_start
from .lora_change import added_rows, spans_of, title_of
from .lora_file import ALPHA, DIFFUSERS, DORA, KOHYA, MAGNITUDE, OFT, ORIGINAL, A, B, LoraLayout
from .lora_start import LayerNames, has_size, is_text_layer, layer_size
from .lora_tools import LoraFile, Result, Tensors
from .model_class import expected_shapes
from .model_files import first

FileLayout = Literal["original", "diffusers", "both", "kohya"]

_KOHYA = {A: "lora_down.weight", B: "lora_up.weight"}


@dataclass(frozen=True)
class Model:
    """A family whose names a file has."""

    family: ModelFamily
    names: LayerNames
    stacks: Mapping[str, Stack]  # what each layer is
    variants: Sequence[str]  # those of its sizes

    def original(self, layer: str) -> str:
        (name,) = originals_of(self.stacks[layer].members[:1], self.family.renames)
        return name

    def is_original(self, layer: str) -> bool:
        return self.stacks[layer].original == self.original(layer)


def find_models(file: LoraFile, family: str = "") -> list[Model]:
    """The families that have all these layers: those of their sizes, if some are, else by names. Text is left out."""
    sizes = {layer: layer_size(file.parts(layer)) for layer in file.names if not is_text_layer(layer)}
    found = []
    for each in (find_family(family),) if family else FAMILIES.values():
        shapes = {variant.name: expected_shapes(each, variant.transformer_config) for variant in each.variants}
        linears = {n.removesuffix(".weight") for own in shapes.values() for n in own if len(own[n]) == 2}
        names = LayerNames(each, linears)
        stacks = {layer: stack for layer in sizes if (stack := names.find(layer)) is not None}
        if stacks.keys() == sizes.keys() and sizes:
            variants = []
            for name, own in shapes.items():
                cut = {at: [own.get(f"{m}.weight", (0, 0)) for m in stack.members] for at, stack in stacks.items()}
                if all(has_size(sizes[at], (sum(rows for rows, *_ in of), of[0][1])) for at, of in cut.items()):
                    variants.append(name)
            found.append(Model(each, names, stacks, variants))
    return [model for model in found if model.variants] or found


def describe_layer(file: LoraFile, layer: str) -> dict[str, Any]:
    """norm: Frobenius, of what it adds before a magnitude; of OFT, of R - 1 (patches/lora_linear.py)."""
    parts, whole, own = file.parts(layer), lora_start.with_strength(file.layer(layer)), file.names[layer]
    rank = next((len(parts[kind]) for kind in lora_start.RANKED if kind in parts), None)
    alpha = float(parts[ALPHA]) if ALPHA in parts else None
    size = layer_size(parts)
    if OFT in whole:
        norms = [float(oft_change(whole[OFT]).norm())]
    elif A in whole:
        norms = [float(((whole[A] @ whole[A].mT) * (whole[B].mT @ whole[B])).sum().clamp(min=0).sqrt())]
    else:
        norms = [float(added_rows(whole, *each).norm()) for each in spans_of(*size)]
    return {
        "kind": title_of(own),
        "type": str(file.type_of(layer)).removeprefix("torch."),
        "rank": rank,
        "alpha": alpha,
        "strength": (alpha / rank if alpha and rank else 1.0)
        * math.prod(file.strengths.get(n, 1) for n in own.values()),
        "size": size,
        "norm": math.hypot(*norms),
    }


def describe_loaders(file: LoraFile, model: Model) -> dict[str, str]:
    """What ComfyUI 0.33.0 and diffusers 0.42.1 make of a file's layers, as far as their names tell."""
    family, unread = model.family, []
    for layer, stack in model.stacks.items():
        original, name = stack.original, stack.members[0]
        if model.is_original(layer):
            known = [ORIGINAL + original, KOHYA + original.replace(".", "_")]
        elif family.shared_lora_names == "diffusers" and not matches_any(name, family.unread_lora):
            known = [DIFFUSERS + name, name, *(p + name.replace(".", "_") for p in ("lycoris_", "lora_transformer_"))]
        else:
            known = []
        if layer not in known or MAGNITUDE in file.names[layer] and DORA not in file.names[layer]:
            unread.append(layer)
    members = {name for stack in model.stacks.values() for name in stack.members}
    kinds = {title_of(names) for names in file.names.values()}
    others = "not known here; convert it to diffusers"
    if kinds - {"LoRA", "DoRA"}:
        others = "not known here"
    elif {DIFFUSERS + name for name in members} <= model.stacks.keys():
        others = "loads all layers"
    elif all(layer == ORIGINAL + stack.original for layer, stack in model.stacks.items()):
        lost = lora_file.what_is_lost(family, sorted(members), "original", "DoRA" in kinds)
        others = lost.get("diffusers", "loads all layers")
    missed = f", not {first(unread)}" if unread else ""
    return {
        "ComfyUI": f"loads {len(model.stacks) - len(unread)} of {len(model.stacks)} layers{missed}",
        "diffusers": others,
    }


def convert(file: LoraFile, layout: FileLayout, family: str = "", dtype: torch.dtype | None = None) -> Result:
    """The file in another layout. "kohya" is "original" under kohya's names, whose dots are underscores.

    Where only names change, tensors of every kind stay as they are. A family "" is found.

    Raises: ValueError for names that are not known, and for what the layout cannot hold.
    """
    models = find_models(file, family)
    did, layers = f"{file.path.name} converted to {layout}", [each for each in file.names if not is_text_layer(each)]
    alike = [model for model in models if all(map(model.is_original, layers))]
    if layout in ("original", "kohya") and (alike or not models and all(each.startswith(ORIGINAL) for each in layers)):
        named = {each: alike[0].original(each) if alike else each.removeprefix(ORIGINAL) for each in layers}
        return Result(_renamed(file, named, layout, dtype), did, file.reader.header.metadata)
    if len(models) != 1 or not (family or models[0].variants):
        known = ", ".join(each.title for each in FAMILIES.values())
        may_be = f"may be of {' or '.join(each.family.title for each in models)}; name it with --family"
        odd = next(iter(layers or file.names))
        other = f'has {odd}, which is of none of {known}; of other models "original" becomes "kohya" alone'
        raise ValueError(f"{file.path} {may_be if models else other}")
    (model,) = models
    for layer, kinds in file.names.items():
        if (title := title_of(kinds)) != "LoRA":
            raise ValueError(
                f"{file.path}: {layer} is a {title}, which cannot be converted to {layout} from these names; make a "
                "plain LoRA of it with devicebridge lora resize --rank"
            )
    if len(layers) < len(file.names):
        raise ValueError(f"{file.path} also changes a text encoder; give a LoRA of the model alone")
    target: LoraLayout = "original" if layout == "kohya" else layout
    lora_file.check_lora_layout(
        model.family, [m for stack in model.stacks.values() for m in stack.members], target, dora=False
    )
    return Result(_rewritten(file, model, target, layout == "kohya", dtype), did, file.reader.header.metadata)


def _renamed(file: LoraFile, named: Mapping[str, str], layout: FileLayout, dtype: torch.dtype | None) -> Tensors:
    for layer, own in file.names.items():
        if MAGNITUDE in own:
            raise ValueError(f"{file.path}: {layer} has a magnitude of PEFT's, which ComfyUI does not read")
        parts = file.layer(layer)
        if A in own and ALPHA not in own:
            parts[ALPHA] = torch.tensor(float(len(parts[A])))
        for kind, each in parts.items():
            new = f"{ORIGINAL}{named[layer]}.{kind}" if layer in named else ""
            name = _in_layout(new, layout) if new else own.get(kind, f"{layer}.{kind}")
            yield name, file.cast(each, own[kind], kind, dtype) if kind in own else each
        file.reader.release()


def _rewritten(file: LoraFile, model: Model, layout: LoraLayout, is_kohya: bool, dtype: torch.dtype | None) -> Tensors:
    groups: dict[str, list[str]] = {}  # which layers of the file are in one of the makers'
    for layer in model.stacks:
        groups.setdefault(model.original(layer), []).append(layer)
    for layers in groups.values():
        own = {layer: file.layer(layer) for layer in layers}
        placed = lora_start.place_layers(file.path, own, model.family, model.names)
        for parts in placed.values():  # so that what was one layer of the makers' becomes one of the same rank
            parts[A] = next(each[A] for each in placed.values() if torch.equal(each[A], parts[A]))
        trained = {f"{name}.{kind}": each for name, parts in placed.items() for kind, each in parts.items()}
        for name, tensor in lora_file.make_lora_tensors(model.family, layout, trained, trained, 1.0, 1).items():
            each = tensor if name.endswith(f".{ALPHA}") else file.cast(tensor, file.names[layers[0]][B], B, dtype)
            yield _in_layout(name, "kohya" if is_kohya else layout), each
        file.reader.release()


def _in_layout(name: str, layout: FileLayout) -> str:
    part = lora_start.find_part(name) if layout == "kohya" else None
    if part is None:
        return name
    return f"{KOHYA}{part.layer.removeprefix(ORIGINAL).replace('.', '_')}.{_KOHYA.get(part.kind, part.kind)}"
