"""An existing LoRA file, of any trainer, as the layers of one model: what training goes on from.

What is not understood is refused by its name: a layer that was left out would be another LoRA. A LoRA of a layer that
the makers stack (qkv) is cut into those of its members: all of A, their own rows of B, without ranks that are zero.

Strength is alpha / rank, with use_rslora alpha / sqrt(rank). diffusers and SimpleTuner write it into the metadata alone
(`lora_adapter_metadata`, PEFT's LoraConfig by component), PEFT into adapter_config.json; ComfyUI reads neither. kohya's
`ss_network_alpha` stands beside an alpha for each layer, which counts; converters to PEFT's names multiply that in.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..config.job import LoraSettings
from ..families.naming import Stack, find_by_diffusers, find_by_original
from ..families.spec import ModelFamily
from ..system.files import expect, parse_json_object, read_json_object
from .header import refuse_no_file
from .lora_file import DORA, EXACT, FIRST, LOHA, LOKR, MAGNITUDE, OFT, TITLES, A, B, Layer, is_of_text, swap_halves
from .weight_file import open_weights

_log = logging.getLogger(__name__)

_PAIRS = (
    (A, B),
    *((f"{each}_b", f"{each}_a") for each in ("lokr_w1", "lokr_w2", "hada_w1", "hada_w2")),
)  # [R, in] and [out, R]
RANKED = (A, "lokr_w2_b", "lokr_w1_b", "hada_w1_b")  # whose rows are the rank; the first that a layer has
_OF_KIND = {"lora": (A, B), "lokr": LOKR, "loha": LOHA, "oft": (OFT,)}  # matrices, by lora.kind
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_SPELLINGS = {
    A: r"\.lora_A(\.default)?(\.weight)?|\.lora_down\.weight|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight",
    B: r"\.lora_B(\.default)?(\.weight)?|\.lora_up\.weight|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight",
    "alpha": r"\.alpha",
    MAGNITUDE: r"\.lora_magnitude_vector(\.default)?(\.weight)?",
    **{kind: rf"\.{kind}" for kind in (DORA, *LOKR, *LOHA, OFT)},
}
_SUFFIXES = {kind: re.compile(rf"^(.+?)({spelling})$") for kind, spelling in _SPELLINGS.items()}
_PEFT_PREFIX = "base_model.model."
_PREFIXES: tuple[str, ...] = (_PEFT_PREFIX, "diffusion_model.", "model.diffusion_model.", "transformer.", "unet.")
_PREFIXES += ("lora_unet_", "lora_transformer_", "lycoris_")  # of names with underscores
_TEXT = re.compile(r"^(base_model\.model\.)?(lora_te|text_encoder|lora_prior_te|clip_)")

_METADATA = "lora_adapter_metadata"
_PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model's own weights
_PLAIN = re.compile(r"\^?[\w.-]+\Z")
_REMEDY = "give a LoRA that has an alpha for each layer"

Names = dict[str, str]  # of one layer's tensors in the file, by kind


class Part(NamedTuple):
    layer: str  # as the file calls it
    kind: str  # which of its tensors it is


def find_part(name: str) -> Part | None:
    """None for a tensor that is no part of a LoRA, DoRA, LoKr, LoHa or OFT."""
    found = ((kind, end.match(name)) for kind, end in _SUFFIXES.items())
    return next((Part(match[1], kind) for kind, match in found if match), None)


def is_text_layer(name: str) -> bool:
    """Of a file's layer or tensor."""
    return _TEXT.match(name) is not None


def read_start(
    path: Path, family: ModelFamily, linears: Mapping[str, tuple[int, int]], *, trains_text: bool = False
) -> dict[str, Layer]:
    """The layers of a LoRA file by fqn, float32: A [R, in], B [out, R] with the strength in it, and of DoRA its
    magnitude; of LoKr and LoHa the factors, with the strength in the first, of OFT the blocks.

    Args:
        linears: out_features and in_features of each of the model's linears.
        trains_text: whether text encoders get a LoRA, too; nobody knows their sizes here.
    Raises: ValueError naming what is not understood, or belongs to another model.
    """
    refuse_no_file(path)
    with open_weights(path) as reader:
        metadata, tensors = reader.header.metadata, reader.all_tensors()
    if not trains_text and (found := [name for name in tensors if is_text_layer(name)]):
        raise ValueError(
            f"{path} also changes a text encoder ({found[0]}, {len(found)} tensors), and without these the LoRA would "
            "be another; set lora.text_encoder = true to train them, too (SD 1.5, SD 2 and SDXL as ComfyUI has them), "
            "or give a LoRA of the diffusion model alone"
        )
    names, others = group_parts(path, tensors)
    if others and family.host is None:
        raise ValueError(
            f"{path} has {others[0]}, which is no tensor of a LoRA, DoRA, LoKr, LoHa or OFT of linear layers "
            f"({len(others)} of {len(tensors)} tensors); give another file"
        )
    _refuse_unsound(path, tensors, {layer: own for layer, own in names.items() if not others or own.keys() - {*EXACT}})
    strengths = read_strengths(path, metadata, tensors, names)
    tensors = {name: each.float() * strengths.get(name, 1) for name, each in tensors.items()}
    if family.host is not None:
        try:
            layers = {name: dict(layer) for name, layer in family.host.read_lora(tensors).items()}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    else:
        named = {layer: {kind: tensors[name] for kind, name in own.items()} for layer, own in names.items()}
        layers = place_layers(path, named, family, LayerNames(family, linears))
    if not layers:
        raise ValueError(f"{path} holds no LoRA: {len(tensors)} tensors, none of a layer that is known")
    for name, layer in layers.items():
        size = layer_size(layer)
        if not is_of_text(name) and not has_size(size, linears.get(name, (0, 0))):
            has = f"{linears[name][0]} by {linears[name][1]}" if name in linears else "none"
            raise ValueError(
                f"{path} is of another model: its {name} is {size[0]} by {size[1]}, and the model has {has}"
            )
    return layers


def group_parts(path: Path, tensors: Iterable[str]) -> tuple[dict[str, Names], list[str]]:
    """The names of each layer's tensors by its name in the file, and the names of no such tensor. Diffusers' come
    first, for PEFT's magnitude is the trained one."""
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


def _refuse_unsound(path: Path, tensors: Mapping[str, Tensor], names: Mapping[str, Names]) -> None:
    changes = False
    for layer, own in names.items():
        parts = {kind: tensors[name] for kind, name in own.items()}
        refuse_unsound_layer(path, layer, parts)
        matrices = [each for kind, each in parts.items() if kind != "alpha"]  # a trained magnitude may change it alone
        changes = changes or DORA in own or MAGNITUDE in own or all(bool(each.float().any()) for each in matrices)
    if names and not changes:
        raise ValueError(
            f"{path} changes nothing: of each of its {len(names)} layers one matrix is all zero, as in a LoRA that was "
            "never trained; leave lora.start_from out to begin afresh, or give another file"
        )


def refuse_unsound_layer(path: Path, layer: str, parts: Layer) -> None:
    """Raises: ValueError naming the tensor, and what is wrong with it."""
    for fault in _faults(parts):
        raise ValueError(f"{path}: {layer} {fault}; give another file")


def _faults(parts: Layer) -> Iterator[str]:
    """Each looks at what those before it have let pass."""
    titles = [TITLES[kind] for kind, own in _OF_KIND.items() if not parts.keys().isdisjoint(own)]
    if len(titles) > 1:
        yield f"has both a {' and a '.join(titles)}"
    kind = kind_of(parts)
    if MAGNITUDE in parts and kind != "lora" or DORA in parts and kind == "oft":
        yield f"has a magnitude beside a {TITLES[kind]}, which is not trained here"
    missing = [other for pair in _PAIRS for one, other in (pair, pair[::-1]) if one in parts and other not in parts]
    if missing := missing or [each for each in LOHA if kind == "loha" and each not in parts]:
        yield f"lacks {missing[0]}, the other half of a pair"
    if kind == "oft" and "alpha" in parts and bool((parts["alpha"] > 0).any()):
        yield f"has an OFT with a constraint (alpha {parts['alpha'].tolist()}), which is not trained here"
    for each in {"lokr": ("lokr_w1", "lokr_w2"), "lora": (A,)}.get(kind, ()):
        if (each in parts) == (f"{each}_a" in parts):
            both = f"both {each} and {each}_a" if each in parts else f"no {'lora_A and lora_B' if each == A else each}"
            yield f"has {', '.join(sorted(parts))}, and {both}"
    for each, tensor in parts.items():
        if (each, kind) != ("alpha", "oft") and (fault := _fault_of_numbers(each, tensor)):
            yield f"has {each} of type {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {fault}"
    shapes = {kind: list(tensor.shape) for kind, tensor in parts.items()}
    if OFT in parts and (len(shapes[OFT]) != 3 or shapes[OFT][1] != shapes[OFT][2]):
        yield f"has {OFT} {shapes[OFT]}, and square blocks are read"
    for each, shape in shapes.items():
        is_flat = len(shape) == 2 or len(shape) > 2 and each in (A, B) and all(side == 1 for side in shape[2:])
        if each not in (*EXACT, OFT) and not is_flat:
            what = "a convolution's" if len(shape) > 2 else "no matrix"
            yield f"has {each} {shape}, which is {what}; linear layers are trained here"
    for down, up in _PAIRS:
        if down in shapes and shapes[down][0] != shapes[up][1]:
            yield f"has {down} of rank {shapes[down][0]} and {up} of rank {shapes[up][1]}"
    for each in (DORA, MAGNITUDE):
        rows = layer_size(parts)[0]
        if each in parts and not shapes[each][:1] == [rows] == [parts[each].numel()]:
            yield f"has {each} {shapes[each]}, and not one number for each of its {rows} rows"


def _fault_of_numbers(kind: str, tensor: Tensor) -> str:
    is_number = kind == "alpha" and not tensor.is_complex() and tensor.dtype is not torch.bool
    if tensor.dtype not in _FLOATS and not is_number:
        return "and a LoRA's are floating-point numbers"
    if not tensor.numel():
        return "which is empty"
    if kind == "alpha" and tensor.numel() > 1:
        return "which is not one number"
    if not torch.isfinite(tensor.float()).all():
        return "which is not finite"
    return "which is 0 and takes the layer away" if kind == "alpha" and not float(tensor) else ""


class _Strength(NamedTuple):
    alpha: float
    rank: int
    value: float

    def __str__(self) -> str:
        rslora = "" if math.isclose(self.value, self.alpha / self.rank) else " (rslora)"
        return f"alpha {self.alpha:g} for rank {self.rank}{rslora}"


def read_strengths(
    path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], names: Mapping[str, Names]
) -> dict[str, float]:
    """What tensors are to be multiplied by, for metadata alone say so. Raises: ValueError where tensors and metadata do
    not agree, or nobody knows which was meant."""
    strengths = _strengths_of_layers(path, metadata, list(names))
    multiplied = {}
    for layer, own in names.items():
        said, ranked = strengths.get(layer), next((own[kind] for kind in RANKED if kind in own), None)
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
            "%s has %s in its metadata alone (%d layers); it is taken with that strength, %g, and ComfyUI's loader "
            "takes the file with 1",
            *(path, said, len(multiplied), said.value),
        )
    bare = [name for name, own in names.items() if "alpha" not in own and ".lora_down." in own.get(A, "")]
    if bare := [name for name in bare if name not in strengths]:  # kohya's names
        alpha, dim = (_number(metadata.get(f"ss_network_{key}")) for key in ("alpha", "dim"))
        if alpha and dim and alpha != dim:
            raise ValueError(
                f"{path} has no alpha for {bare[0]} ({len(bare)} such layers), so it is of strength 1, and its "
                f"metadata says ss_network_alpha {alpha:g} for rank {dim:g}, which is {alpha / dim:g}; {_REMEDY}"
            )
    return {name: said.value for name, said in multiplied.items()}


def _number(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:  # "Dynamic", of a LoRA that was resized
        return 0.0


def _strengths_of_layers(file: Path, metadata: Mapping[str, str], layers: Sequence[str]) -> dict[str, _Strength]:
    model, beside = _PEFT_FILES
    source, found = f"{file}: {_METADATA}", {}
    if metadata.get(_METADATA):
        found = parse_json_object(metadata[_METADATA], source, _REMEDY)
    elif file.name == model and file.with_name(beside).is_file():
        source, found = str(file.with_name(beside)), read_json_object(file.with_name(beside), _REMEDY)
    components: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        component, _, name = key.rpartition(".")
        components.setdefault(component, {})[name] = value
    known = {name: values for name, values in components.items() if "r" in values}
    for name, values in known.items():
        way = values.get("init_lora_weights")
        if isinstance(way, str) and way.lower().startswith(_CHANGES_BASE):
            raise ValueError(
                f"{source}: {name} says init_lora_weights = {way!r}, which changes the model's own weights, too; let "
                "PEFT save it as a plain LoRA (path_initial_model_for_weight_conversion)"
            )
    strengths = {}
    for layer in layers if known else ():
        component, _, module = layer.partition(".")
        if component not in known:
            component, module = "", layer.removeprefix(_PEFT_PREFIX)
        if component in known:
            strengths[layer] = _peft_strength(f"{source}: {component}", known[component], module)
        elif any(  # unless all layers have strength 1, so that names do not matter
            values.get("rank_pattern") or values.get("alpha_pattern") or _peft_strength(source, values, "").value != 1
            for values in known.values()
        ):
            raise ValueError(f"{source} gives alpha and rank of {', '.join(known)}, and not of {layer}; {_REMEDY}")
    return strengths


def _peft_strength(source: str, values: Mapping[str, Any], module: str) -> _Strength:
    """Of a LoraConfig or LoKrConfig. As in PEFT, a pattern is the end of a layer's name, with "^" the whole of it, and
    the first counts."""
    found, parts = [], module.split(".")
    ends = {f"^{module}", *(".".join(parts[start:]) for start in range(len(parts)))}
    default = values.get("lora_alpha", values.get("alpha"))
    needed: Any = (("r", "rank_pattern", int, values["r"]), ("lora_alpha", "alpha_pattern", (int, float), default))
    for key, which, kind, usual in needed:
        patterns = expect(values.get(which) or {}, dict, f"{source} {which}", _REMEDY)
        if odd := [name for name in patterns if not _PLAIN.match(name)]:
            raise ValueError(f"{source} {which} has {odd[0][:100]!r}, which is no layer's name; {_REMEDY}")
        value = next((value for name, value in patterns.items() if name in ends), usual)
        found.append(expect(value, kind, f"{source} {key} of {module}", _REMEDY))
    rank, alpha = found
    if rank < 1 or not alpha or not math.isfinite(alpha):
        raise ValueError(f"{source} gives {module} alpha {alpha} for rank {rank}; {_REMEDY}")
    is_rslora = values.get("use_rslora") is True
    return _Strength(alpha, rank, alpha / (math.sqrt(rank) if is_rslora else rank))


class LayerNames:
    """How files name the linears of a model: as diffusers or the makers do, with dots or underscores."""

    def __init__(self, family: ModelFamily, linears: Iterable[str]) -> None:
        self._underscored = {name.replace(".", "_"): name for name in linears}
        self._known = set(self._underscored.values())
        self._renames = family.renames
        stacks = (find_by_diffusers(name, family.renames) for name in self._known)
        self._originals = {stack.original.replace(".", "_"): stack.original for stack in stacks if stack is not None}

    def find(self, name: str) -> Stack | None:
        """The linears that a layer of a file changes, under its name there; None if there are none."""
        bare = [name]
        for _ in range(2):  # "base_model.model.transformer."
            bare += [n.removeprefix(p) for n in bare for p in _PREFIXES if n.startswith(p)]
        for each in bare:
            dotted = self._underscored.get(each, each)
            if dotted in self._known:
                return Stack(dotted, (dotted,), (1,), swap_halves=False)
            stack = find_by_original(self._originals.get(each, each), self._renames)
            if stack is not None and self._known.issuperset(stack.members):
                return stack
        return None


def with_strength(layer: Layer) -> Layer:
    """The matrices with alpha / rank in B, or in the first matrix of LoKr, which becomes one, and of LoHa."""
    layer = dict(layer)
    alpha = layer.pop("alpha", None)
    factor = next((layer[kind] for kind in RANKED if kind in layer), None)
    strength = 1.0 if alpha is None or factor is None else float(alpha) / factor.shape[0]
    if "lokr_w1_a" in layer:
        layer["lokr_w1"] = layer.pop("lokr_w1_a") @ layer.pop("lokr_w1_b")
    flat = {kind: tensor.flatten(1) if kind in (A, B) else tensor for kind, tensor in layer.items()}
    return {kind: tensor * strength if kind in (B, *FIRST) else tensor for kind, tensor in flat.items()}


def place_layers(path: Path, named: Mapping[str, Layer], family: ModelFamily, names: LayerNames) -> dict[str, Layer]:
    """The model's linears that layers of a file change, with the strength in them. Raises: ValueError for a layer that
    is not the model's, or that is there twice and not alike."""
    layers: dict[str, Layer] = {}
    origin: dict[str, str] = {}
    for name, layer in named.items():
        stack = names.find(name)
        if stack is None:
            raise ValueError(f"{path} changes {name}, which {family.title} does not have; give a LoRA of this model")
        for member, own in _cut(name, with_strength(layer), stack).items():
            known = layers.setdefault(member, own)
            origin.setdefault(member, name)
            # A file of ours for both loaders has some layers twice, alike but for DoRA's magnitudes, which each loader
            # reads in its own way.
            kinds = (known.keys() | own.keys()) - {DORA, MAGNITUDE} if known is not own else ()
            if not all(kind in known and kind in own and torch.equal(known[kind], own[kind]) for kind in kinds):
                raise ValueError(
                    f"{path} changes {member} twice and not alike, as {origin[member]} and as {name}; give a file "
                    "with one of them"
                )
    return layers


def _cut(name: str, layer: Layer, stack: Stack) -> dict[str, Layer]:
    """The members' own parts; where all ranks of A are theirs, they share it."""
    if B not in layer and (len(stack.members) > 1 or stack.swap_halves):
        title = TITLES[kind_of(layer)]
        raise ValueError(f"{title} of {name} cannot be cut into {', '.join(stack.members)}; give plain LoRA")
    layer = swap_halves(layer, stack)
    if len(stack.members) == 1:
        return {stack.members[0]: layer}
    cut = {}
    for member, (start, end) in stack.rows(layer[B].shape[0]).items():
        up = layer[B][start:end]
        used = up.abs().amax(0) > 0
        magnitudes = {k: t.reshape(-1)[start:end] for k, t in layer.items() if k in (DORA, MAGNITUDE)}
        if used.any() or magnitudes:
            cut[member] = {A: layer[A] if used.all() else layer[A][used], B: up[:, used]} | magnitudes
    return cut


def layer_size(layer: Layer) -> tuple[int, int]:
    """Rows and columns of the weight that a layer changes; of OFT the columns are not known, 0."""
    if OFT in layer:
        return layer[OFT].shape[0] * layer[OFT].shape[1], 0
    for down, up in ((A, B), ("hada_w1_b", "hada_w1_a")):
        if down in layer:
            return layer[up].shape[0], layer[down].shape[1]
    rows = [layer[kind if kind in layer else f"{kind}_a"].shape[0] for kind in ("lokr_w1", "lokr_w2")]
    columns = [layer[kind if kind in layer else f"{kind}_b"].shape[1] for kind in ("lokr_w1", "lokr_w2")]
    return rows[0] * rows[1], columns[0] * columns[1]


def has_size(size: tuple[int, int], wanted: tuple[int, int]) -> bool:
    """Whether a layer of this size (see layer_size) changes a weight of that one."""
    return size[0] == wanted[0] and size[1] in (0, wanted[1])


def kind_of(layer: Iterable[str]) -> str:
    """Its lora.kind, by the kinds of its tensors."""
    own = set(layer)
    return next((kind for kind, kinds in _OF_KIND.items() if not own.isdisjoint(kinds)), "lora")


def refuse_start(path: Path, layers: Mapping[str, Layer], targets: Sequence[str], settings: LoraSettings) -> None:
    """Raises: ValueError saying which setting would have to change."""
    left_out = [name for name in layers if name not in set(targets) and not is_of_text(name)]
    if left_out:
        raise ValueError(
            f"lora.start_from = {path} changes {left_out[0]} ({len(left_out)} such layers), which is not trained; add "
            "it with lora.targets, or choose other lora.layers"
        )
    if kind := next((kind for kind in map(kind_of, layers.values()) if kind != settings.kind), ""):
        raise ValueError(f'lora.start_from = {path} is of lora.kind = "{kind}"; set it, or give another file')
    if not settings.dora and any(DORA in layer or MAGNITUDE in layer for layer in layers.values()):
        raise ValueError(f"lora.start_from = {path} is a DoRA; set lora.dora = true, or give another file")
    text_key = "lora.text_encoder_rank" if settings.text_encoder_rank else "lora.rank"
    for of_text, key, rank in ((False, "lora.rank", settings.rank), (True, text_key, settings.text_rank)):
        ranks = [layer[A].shape[0] for name, layer in layers.items() if A in layer and is_of_text(name) == of_text]
        if (most := max(ranks, default=0)) > rank:
            raise ValueError(
                f"lora.start_from = {path} has rank {most}, and {key} = {rank} would lose part of it; set {key} to "
                f"{most} or more"
            )
