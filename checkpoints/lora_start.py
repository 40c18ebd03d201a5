"""An existing LoRA file, of any trainer, as the layers of one model: what training goes on from.

Names are known as ComfyUI and diffusers' pipelines know them: the makers' and diffusers', with the prefixes of both and
of kohya, OneTrainer, LyCORIS and PEFT, where dots may be underscores. Of one of ComfyUI's own models ComfyUI itself is
asked (HostModel.read_lora). Whatever is not understood is refused by its name: a layer that was left out would be
another LoRA.

A LoRA of a layer that the makers stack (qkv) is cut into those of its members. Each has all of A and its own rows of B;
ranks that are zero in these rows go, so that a file of ours becomes what it was made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config.job import LoraSettings
from ..families.naming import Stack, find_by_diffusers, find_by_original
from ..families.spec import TEXT_ENCODERS, ModelFamily
from .lokr_file import FIRST
from .weight_file import load_tensors

A, B, DORA, MAGNITUDE = "lora_A.weight", "lora_B.weight", "dora_scale", "lora_magnitude_vector"
_SPELLINGS = {
    A: r"\.lora_A(\.default)?(\.weight)?|\.lora_down\.weight|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight",
    B: r"\.lora_B(\.default)?(\.weight)?|\.lora_up\.weight|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight",
    "alpha": r"\.alpha",
    DORA: r"\.dora_scale",
    MAGNITUDE: r"\.lora_magnitude_vector(\.default)?(\.weight)?",
    **{kind: rf"\.{kind}" for kind in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
}
_SUFFIXES = {kind: re.compile(rf"^(.+?)({spelling})$") for kind, spelling in _SPELLINGS.items()}
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
    tensors = {name: tensor.float() for name, tensor in load_tensors(path).items()}
    if not trains_text and (found := [name for name in tensors if _TEXT.match(name)]):
        raise ValueError(
            f"{path} also changes a text encoder ({found[0]}, {len(found)} tensors), and without these the LoRA would "
            "be another; set lora.text_encoder = true to train them, too (SD 1.5, SD 2 and SDXL as ComfyUI has them), "
            "or give a LoRA of the diffusion model alone"
        )
    if family.host is not None:
        layers = {name: dict(layer) for name, layer in family.host.read_lora(tensors).items()}
    else:
        layers = _read_layers(path, tensors, family, linears)
    if not layers:
        raise ValueError(f"{path} holds no LoRA: {len(tensors)} tensors, none of a layer that is known")
    for name, layer in layers.items():
        _refuse_other_shapes(path, name, layer, _size(layer) if is_of_text(name) else linears.get(name))
    return layers


def _read_layers(
    path: Path, tensors: Mapping[str, Tensor], family: ModelFamily, linears: Mapping[str, tuple[int, int]]
) -> dict[str, Layer]:
    known = _Names(family, linears)
    layers: dict[str, Layer] = {}
    for name, layer in _grouped(path, tensors).items():
        stack = known.find(name)
        if stack is None:
            raise ValueError(f"{path} changes {name}, which {family.title} does not have; give a LoRA of this model")
        for member, own in _cut(name, _with_strength(layer), stack, known.is_original).items():
            layers.setdefault(member, own)  # a file of ours for both loaders has some layers twice
    return layers


def _grouped(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Layer]:
    """By the name of the layer as the file has it; diffusers' names first, for PEFT's magnitude is the trained one."""
    layers: dict[str, Layer] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: not item[0].startswith("transformer.")):
        for kind, pattern in _SUFFIXES.items():
            if match := pattern.match(name):
                layers.setdefault(match[1], {})[kind] = tensor
                break
        else:
            raise ValueError(
                f"{path} has {name}, which is no tensor of a LoRA, DoRA or LoKr of linear layers; give another file"
            )
    return layers


def _with_strength(layer: Layer) -> Layer:
    """With alpha / rank multiplied into B, or into LoKr's first matrix, and no alpha."""
    alpha = layer.pop("alpha", None)
    factor = next((layer[kind] for kind in (A, "lokr_w2_b", "lokr_w1_b") if kind in layer), None)
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
        if used.any():
            own = {A: layer[A][used], B: up[:, used]}
            cut[member] = own | {k: t.reshape(-1)[start:end] for k, t in layer.items() if k in (DORA, MAGNITUDE)}
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
    """Raises: ValueError for a layer of another model, or numbers that are not finite."""
    if wrong := [kind for kind, tensor in layer.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"{path}: {wrong[0]} of {name} is not finite; the file is damaged")
    found = _size(layer)
    if linear is None or found != linear or not all(found):
        has = "none" if linear is None else f"{linear[0]} by {linear[1]}"
        raise ValueError(f"{path} is of another model: its {name} is {found[0]} by {found[1]}, and the model has {has}")


def _size(layer: Layer) -> tuple[int, int]:
    """Rows and columns of the weight that a layer changes; (0, 0) if parts are missing."""
    if A in layer and B in layer:
        return (layer[B].shape[0], layer[A].shape[1]) if layer[A].shape[0] == layer[B].shape[1] else (0, 0)
    rows, columns = (layer.get("lokr_w2_a"), layer.get("lokr_w2_b"))
    whole = layer.get("lokr_w2")
    first = layer.get("lokr_w1")
    if first is None or (whole is None and (rows is None or columns is None)):
        return 0, 0
    second = (rows.shape[0], columns.shape[1]) if whole is None else whole.shape  # type: ignore[union-attr]
    return first.shape[0] * second[0], first.shape[1] * second[1]


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
