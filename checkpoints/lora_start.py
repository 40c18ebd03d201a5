"""An existing LoRA file, of any trainer, as the layers of one model: what training goes on from.

Names are known as ComfyUI and diffusers' pipelines know them: the makers' and diffusers', with the prefixes of both and
of kohya, OneTrainer, LyCORIS and PEFT, where dots may be underscores. Of one of ComfyUI's own models ComfyUI itself is
asked (HostModel.read_lora). Whatever is not understood is refused by its name: a layer that was left out would be
another LoRA.

A LoRA of a layer that the makers stack (qkv) is cut into those of its members. Each has all of A and its own rows of B;
ranks that are zero in these rows go, so that a file of ours becomes what it was made of.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config.job import LoraSettings
from ..families.naming import Stack, find_by_diffusers, find_by_original
from ..families.spec import TEXT_ENCODERS, ModelFamily
from .header import read_header
from .lokr_file import FIRST
from .lora_parts import DORA, EXTRAS, MAGNITUDE, A, B, Names, find_part, refuse_unsound
from .lora_strength import read_strengths, refuse_lost_alpha
from .weight_file import load_tensors

_log = logging.getLogger(__name__)
_RANKED = (A, "lokr_w2_b", "lokr_w1_b")  # whose rows are the rank; the first that a layer has
_PREFIXES = ("base_model.model.", "diffusion_model.", "model.diffusion_model.", "transformer.", "unet.", "lora_unet_")
_MORE_PREFIXES = ("lora_transformer_", "lycoris_")
_TEXT = re.compile(r"^(base_model\.model\.)?(lora_te|text_encoder|lora_prior_te|clip_)")

Layer = dict[str, Tensor]


def read_start(
    path: Path, family: ModelFamily, linears: Mapping[str, tuple[int, int]], *, trains_text: bool = False
) -> dict[str, Layer]:
    """The layers of a LoRA file by fqn: A [R, in], B [out, R] with the strength in it, and of DoRA its magnitude.

    Of LoKr the factors, with the strength in the first. All are float32.

    Args:
        linears: out_features and in_features of each of the model's linears.
        trains_text: whether text encoders get a LoRA, too; nobody knows their sizes here.
    Raises: ValueError naming what is not understood, or belongs to another model.
    """
    header = read_header(path)
    tensors = load_tensors(path)
    if not trains_text and (found := [name for name in tensors if _TEXT.match(name)]):
        raise ValueError(
            f"{path} also changes a text encoder ({found[0]}, {len(found)} tensors), and without these the LoRA would "
            "be another; set lora.text_encoder = true to train them, too (SD 1.5, SD 2 and SDXL as ComfyUI has them), "
            "or give a LoRA of the diffusion model alone"
        )
    names, others = _grouped(path, tensors)
    if others and family.host is None:
        raise ValueError(
            f"{path} has {others[0]}, which is no tensor of a LoRA, DoRA or LoKr of linear layers ({len(others)} of "
            f"{len(tensors)} tensors); give another file"
        )
    refuse_unsound(path, tensors, {layer: own for layer, own in names.items() if not others or own.keys() - EXTRAS})
    tensors = _with_metadata(path, header.metadata, {name: each.float() for name, each in tensors.items()}, names)
    if family.host is not None:
        try:
            layers = {name: dict(layer) for name, layer in family.host.read_lora(tensors).items()}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    else:
        named = {layer: {kind: tensors[name] for kind, name in own.items()} for layer, own in names.items()}
        layers = _read_layers(path, named, family, linears)
    if not layers:
        raise ValueError(f"{path} holds no LoRA: {len(tensors)} tensors, none of a layer that is known")
    for name, layer in layers.items():
        _refuse_other_shapes(path, name, layer, _size(layer) if is_of_text(name) else linears.get(name))
    return layers


def _grouped(path: Path, tensors: Iterable[str]) -> tuple[dict[str, Names], list[str]]:
    """The names of each layer's tensors by the name of the layer in the file, and the names of no such tensor.

    Diffusers' come first, for PEFT's magnitude is the trained one.

    Raises: ValueError for a tensor that is there in two spellings.
    """
    layers: dict[str, Names] = {}
    others = []
    for name in sorted(tensors, key=lambda name: not name.startswith("transformer.")):
        part = find_part(name)
        if part is None:
            others.append(name)
            continue
        first = layers.setdefault(part.layer, {}).setdefault(part.kind, name)
        if first != name:
            raise ValueError(f"{path} has one tensor twice, as {first} and as {name}; give a file with one of them")
    return layers, others


def _with_metadata(
    path: Path, metadata: Mapping[str, str], tensors: dict[str, Tensor], names: Mapping[str, Names]
) -> dict[str, Tensor]:
    """With the strength in them that is in metadata alone.

    Raises: ValueError where metadata says otherwise than the tensors.
    """
    strengths = read_strengths(path, metadata, list(names))
    multiplied = {}
    for layer, own in names.items():
        said, ranked = strengths.get(layer), next((own[kind] for kind in _RANKED if kind in own), None)
        if said is None:
            continue
        rank = said.rank if ranked is None else tensors[ranked].shape[0]
        if "alpha" not in own and rank == said.rank:
            multiplied[next(own[kind] for kind in (B, *FIRST) if kind in own)] = said
            continue
        alpha = float(tensors[own["alpha"]]) if "alpha" in own else math.nan
        if ranked is not None and not math.isclose(alpha / rank, said.value, rel_tol=1e-3):
            found = f"rank {rank}" + ("" if math.isnan(alpha) else f" and alpha {alpha:g}")
            raise ValueError(f"{path}: {layer} has {found}, and its metadata says {said}; give another file")
    if any(not math.isclose(said.value, 1.0) for said in multiplied.values()):
        said = next(iter(multiplied.values()))
        _log.warning(
            "%s has %s in its metadata alone (%d layers); the LoRA begins with that strength, %g, and ComfyUI's loader "
            "takes the file with 1",
            *(path, said, len(multiplied), said.value),
        )
    bare = [layer for layer, own in names.items() if "alpha" not in own and ".lora_down." in own.get(A, "")]
    refuse_lost_alpha(path, metadata, [layer for layer in bare if layer not in strengths])
    return {name: each * multiplied[name].value if name in multiplied else each for name, each in tensors.items()}


def _read_layers(
    path: Path, named: Mapping[str, Layer], family: ModelFamily, linears: Mapping[str, tuple[int, int]]
) -> dict[str, Layer]:
    known = _Names(family, linears)
    layers: dict[str, Layer] = {}
    origin: dict[str, str] = {}
    for name, layer in named.items():
        stack = known.find(name)
        if stack is None:
            raise ValueError(f"{path} changes {name}, which {family.title} does not have; give a LoRA of this model")
        for member, own in _cut(name, _with_strength(layer), stack, known.is_original).items():
            if member not in layers:
                layers[member], origin[member] = own, name
            elif not _is_same(layers[member], own):  # a file of ours for both loaders has some layers twice, alike
                raise ValueError(
                    f"{path} changes {member} twice and not alike, as {origin[member]} and as {name}; give a file "
                    "with one of them"
                )
    return layers


def _is_same(one: Layer, other: Layer) -> bool:
    """But for DoRA's magnitudes, which each loader reads in its own way."""
    kinds = (one.keys() | other.keys()) - {DORA, MAGNITUDE}
    return all(kind in one and kind in other and torch.equal(one[kind], other[kind]) for kind in kinds)


def _with_strength(layer: Layer) -> Layer:
    """With alpha / rank multiplied into B, or into LoKr's first matrix, and no alpha."""
    alpha = layer.pop("alpha", None)
    factor = next((layer[kind] for kind in _RANKED if kind in layer), None)
    strength = 1.0 if alpha is None or factor is None else float(alpha) / factor.shape[0]
    if "lokr_w1_a" in layer:
        layer["lokr_w1"] = layer.pop("lokr_w1_a") @ layer.pop("lokr_w1_b")
    flat = {kind: tensor.flatten(1) if kind in (A, B) else tensor for kind, tensor in layer.items()}
    return {kind: tensor * strength if kind in (B, *FIRST) else tensor for kind, tensor in flat.items()}


def _cut(name: str, layer: Layer, stack: Stack, is_original: bool) -> dict[str, Layer]:
    """The members' own parts.

    Raises: ValueError for LoKr of a stack.
    """
    if not is_original:
        return {stack.members[0]: layer}
    if B not in layer:
        if len(stack.members) > 1 or stack.swap_halves:
            raise ValueError(f"LoKr of {name} cannot be cut into {', '.join(stack.members)}; give plain LoRA")
        return {stack.members[0]: layer}
    if stack.swap_halves:
        layer = {k: torch.cat(t.chunk(2)[::-1]) if k in (B, DORA, MAGNITUDE) else t for k, t in layer.items()}
    if len(stack.members) == 1:
        return {stack.members[0]: layer}
    cut = {}
    for member, (start, end) in stack.rows(layer[B].shape[0]).items():
        up = layer[B][start:end]
        used = up.abs().amax(0) > 0
        magnitudes = {k: t.reshape(-1)[start:end] for k, t in layer.items() if k in (DORA, MAGNITUDE)}
        if used.any() or magnitudes:
            cut[member] = {A: layer[A][used], B: up[:, used]} | magnitudes
    return cut


class _Names:
    """What a file may call a model's linears."""

    def __init__(self, family: ModelFamily, linears: Iterable[str]) -> None:
        self._family, self._linears = family, set(linears)
        self._underscored = {name.replace(".", "_"): name for name in self._linears}
        stacks = (find_by_diffusers(name, family.renames) for name in self._linears)
        self._originals = {s.original.replace(".", "_"): s.original for s in stacks if s is not None}
        self.is_original = False  # of what was found last

    def find(self, name: str) -> Stack | None:
        """What a name stands for; None if nothing does."""
        for each in _without_prefixes(name):
            dotted = self._underscored.get(each, each)
            if dotted in self._linears:
                self.is_original = False
                return Stack(dotted, (dotted,), (1,), swap_halves=False)
            stack = find_by_original(self._originals.get(each, each), self._family.renames)
            if stack is not None and self._linears.issuperset(stack.members):
                self.is_original = True
                return stack
        return None


def _without_prefixes(name: str) -> list[str]:
    found = [name]
    for _ in range(2):  # "base_model.model.transformer."
        longer = [name.removeprefix(p) for name in found for p in (*_PREFIXES, *_MORE_PREFIXES) if name.startswith(p)]
        found += longer
    return found


def _refuse_other_shapes(path: Path, name: str, layer: Layer, linear: tuple[int, int] | None) -> None:
    """Raises: ValueError for a layer of another model."""
    found = _size(layer)
    if linear is None or found != linear:
        has = "none" if linear is None else f"{linear[0]} by {linear[1]}"
        raise ValueError(f"{path} is of another model: its {name} is {found[0]} by {found[1]}, and the model has {has}")


def _size(layer: Layer) -> tuple[int, int]:
    """Rows and columns of the weight that a layer changes."""
    if A in layer:
        return layer[B].shape[0], layer[A].shape[1]
    rows, columns = (layer.get("lokr_w2", layer.get(kind)) for kind in ("lokr_w2_a", "lokr_w2_b"))
    assert rows is not None and columns is not None, layer.keys()
    first = layer["lokr_w1"]
    return first.shape[0] * rows.shape[0], first.shape[1] * columns.shape[1]


def refuse_start(path: Path, layers: Mapping[str, Layer], targets: Sequence[str], settings: LoraSettings) -> None:
    """Whether a job can go on from these layers.

    Raises: ValueError saying which setting would have to change.
    """
    left_out = [name for name in layers if name not in set(targets) and not is_of_text(name)]
    if left_out:
        raise ValueError(
            f"lora.start_from = {path} changes {left_out[0]} ({len(left_out)} such layers), which is not trained; add "
            "it with lora.targets, or choose other lora.layers"
        )
    is_lokr = any("lokr_w1" in layer for layer in layers.values())
    if is_lokr != (settings.kind == "lokr"):
        kind = "lokr" if is_lokr else "lora"
        raise ValueError(f'lora.start_from = {path} is of lora.kind = "{kind}"; set it, or give another file')
    if not settings.dora and any(DORA in layer or MAGNITUDE in layer for layer in layers.values()):
        raise ValueError(f"lora.start_from = {path} is a DoRA; set lora.dora = true, or give another file")
    if is_lokr:
        return
    text = [name for name in layers if is_of_text(name)]
    _refuse_larger(path, [layers[name] for name in layers if name not in text], "lora.rank", settings.rank)
    key = "lora.text_encoder_rank" if settings.text_encoder_rank else "lora.rank"
    _refuse_larger(path, [layers[name] for name in text], key, settings.text_rank)


def is_of_text(name: str) -> bool:
    """Whether a layer or parameter of this fqn is of text encoders that are trained with a model."""
    return name.startswith(f"{TEXT_ENCODERS}.")


def _refuse_larger(path: Path, layers: Sequence[Layer], key: str, rank: int) -> None:
    most = max((layer[A].shape[0] for layer in layers), default=0)
    if most > rank:
        raise ValueError(
            f"lora.start_from = {path} has rank {most}, and {key} = {rank} would lose part of it; set {key} to {most} "
            "or more"
        )
