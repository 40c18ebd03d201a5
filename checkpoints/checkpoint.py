"""A transformer's checkpoint, recognised by names and shapes: which family, which variant, under whose names.

A diffusers folder brings its own config, so any size works there; elsewhere the shapes must be those of a published
variant. Nothing is guessed: every tensor of the file must have a place in the model and the other way round.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..families.naming import any_of, find_by_original
from ..families.registry import FAMILIES, find_family, find_variant
from ..families.spec import ModelFamily, Variant
from . import model_class
from .header import FileHeader, TensorRecord, read_header
from .model_class import described, differences, expected_shapes, with_defaults
from .model_files import LORA_NAME, UNET, Source, describe_other, find_source, first
from .quantized_files import TYPE_NAMES, pair_scales

_log = logging.getLogger(__name__)

Layout = Literal["diffusers", "original"]

_LAYOUTS: tuple[Layout, ...] = ("diffusers", "original")
OF_PAIR = re.compile(r"(high|low)[ _-]?noise", re.IGNORECASE)  # in the name of a file of one of Wan 2.2's two experts
WAN_22 = re.compile(r"wan[ _-]?v?2[ ._-]?2", re.IGNORECASE)
_OF_22 = re.compile(r"[-_](HIGH|LOW)(?=[-_.])")  # the same in names that say Wan 2.2
_WAN_21 = re.compile(r"wan[ _-]?2[._-]?1(?!4b)", re.IGNORECASE)
_PREFIXES = ("model.diffusion_model.", "diffusion_model.")  # what ComfyUI's files carry in front of every name


class OtherModel(ValueError):
    """A file of none of these families. kind: what it looks like; "" for a diffusion model."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class CheckpointInfo:
    """A folder of its own size has the variant it resembles most, for text encoders and noise schedule."""

    path: Path  # as the user gave it
    family: ModelFamily
    variant: Variant | None
    config: Mapping[str, Any]  # keyword arguments of the transformer class
    layout: Layout  # whose names the file uses
    tensors: Mapping[str, TensorRecord]  # every tensor by its diffusers name; those in 8 bits with their scales
    pipeline_folder: Path | None  # the diffusers model folder with text encoders and VAE, if the transformer is in one
    others: tuple[Variant, ...] = ()  # which it could be as well, by all that is known

    @property
    def files(self) -> tuple[Path, ...]:
        records = self.tensors.values()
        return tuple(sorted({r.file for r in records} | {r.scale.file for r in records if r.scale is not None}))

    @property
    def quantized_types(self) -> dict[str, int]:
        """How many tensors are quantized, by type ("float8_e4m3fn", "int8", GGUF's "Q4_K"); {} for a plain file."""
        types = (record.dtype for record in self.tensors.values() if record.is_quantized)
        return dict(Counter(TYPE_NAMES.get(each, each) for each in types))


def read_tensor_records(
    path: Path, wanted: Variant | None = None
) -> tuple[Source, list[FileHeader], dict[str, TensorRecord]]:
    """The tensors of a diffusion model by their names without its prefix, and where they lie; what else a bundled file
    holds is in the headers alone. Raises: ValueError for a LoRA, and for a path that is no model."""
    source = find_source(path, wanted)
    headers = [read_header(file, is_model=True) for file in source.files]
    records = {name: record for header in headers for name, record in header.records().items()}
    if found := [match[2] for match in map(LORA_NAME.search, records) if match]:
        what = f"{source.path} is a LoRA file: {len(found)} {found[0]} tensors"
        raise ValueError(f"{what}; give the model it belongs to instead")
    for prefix in _PREFIXES:
        if own := {name[len(prefix) :]: record for name, record in records.items() if name.startswith(prefix)}:
            return source, headers, own
    return source, headers, records


def read_checkpoint(path: str | Path, family: str = "", variant: str = "") -> CheckpointInfo:
    """Recognise a checkpoint from its header and config; reads no weights and no network.

    Args:
        path: model folder, transformer folder, single file, or one shard of several.
        family, variant: "" recognises them. A variant is needed where several share their shapes, the file's name
            does not tell them apart (Wan 2.2's experts), and the first is not meant.
    Raises: OtherModel for another model. ValueError for a LoRA, or a number format that is not read.
    """
    families = (find_family(family),) if family else tuple(FAMILIES.values())
    wanted = find_variant(variant, families)[1] if variant else None
    source, headers, records = read_tensor_records(Path(path).expanduser(), wanted)
    records = pair_scales(source.path, records, [header.metadata for header in headers])
    class_name = source.config.get("_class_name")
    if any(class_name == each.transformer_class for each in FAMILIES.values()):
        info = _read_folder(source, records, families)
    else:
        info = _read_by_names(source, records, families)
    return _choose_variant(info, source, wanted)


def make_published_info(name: str) -> CheckpointInfo:
    """A published variant by its name, for planning. Raises: ValueError that lists the variants there are."""
    family, variant = find_variant(name)
    return CheckpointInfo(Path(name), family, variant, dict(variant.transformer_config), "diffusers", {}, None)


def _read_folder(source: Source, records: dict[str, TensorRecord], families: Sequence[ModelFamily]) -> CheckpointInfo:
    class_name, file = source.config["_class_name"], source.folder / "config.json"
    family = next((family for family in families if family.transformer_class == class_name), None)
    if family is None:
        raise ValueError(f"{source.folder} holds a {class_name}, not a model of {families[0].title}")
    _refuse_unsupported(source.folder, records, family)
    config = {name: value for name, value in source.config.items() if not name.startswith("_")}
    ignored = getattr(model_class.transformer_class(family), "_keys_to_ignore_on_load_unexpected", None) or ()
    tensors = {name: r for name, r in records.items() if not any(re.search(pattern, name) for pattern in ignored)}
    model_class.refuse_absurd_sizes(file, config)
    model_class.refuse_other_kinds(file, class_name, config)
    try:
        shapes = expected_shapes(family, config)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{file} gives values that no {class_name} can be made with ({type(error).__name__}: {error}); download it "
            "again"
        ) from error
    if found := differences(shapes, tensors):
        raise ValueError(f"the weights in {source.folder} do not fit its config.json: {described(found)}")
    return CheckpointInfo(source.path, family, None, config, "diffusers", tensors, source.pipeline_folder)


def _refuse_unsupported(path: Path, names: Iterable[str], family: ModelFamily) -> None:
    for name in names:
        for pattern, reason in family.unsupported.items():
            if fnmatch.fnmatchcase(name, pattern):
                raise OtherModel(
                    f"{path} is of {family.title}, but {reason} (it has {name}). Supported: {_names(family.variants)}"
                )


def _read_by_names(source: Source, records: dict[str, TensorRecord], families: Sequence[ModelFamily]) -> CheckpointInfo:
    ways = [(family, layout, *_translate(records, family, layout)) for family in families for layout in _LAYOUTS]
    family, layout, tensors, unknown = min(ways, key=lambda way: len(way[3]))
    if len(unknown) > len(records) // 2 or not records:
        kind = describe_other(records)
        found = f"is {kind}" if kind else f"holds {len(records)} tensors of no known model, such as {first(records)}"
        if class_name := source.config.get("_class_name"):
            found += f" (its config.json says {class_name})"
        supported = "; ".join(f"{family.title}: {_names(family.variants)}" for family in families)
        raise OtherModel(
            f"{source.path} {found}; give a transformer of {supported}. A .safetensors file of another model that "
            'ComfyUI can build is trained with model.family = "comfyui"',
            "" if kind.startswith(UNET) else kind,
        )
    _refuse_unsupported(source.path, records, family)
    if unknown:
        raise OtherModel(
            f"{source.path} resembles {family.title}, but {len(unknown)} of its {len(records)} tensors have no "
            f"place there: {first(unknown)}. Supported: {_names(family.variants)}"
        )
    faults = {v.name: differences(expected_shapes(family, v.transformer_config), tensors) for v in family.variants}
    closest = min(family.variants, key=lambda variant: sum(map(len, faults[variant.name].values())))
    if faults[closest.name]:
        raise OtherModel(
            f"{source.path} is of {family.title}, but none of the supported models ({_names(family.variants)}). "
            f"Against {closest.name}: {described(faults[closest.name])}. If it is a size of its own, give its "
            "diffusers folder, which has a config"
        )
    config = dict(closest.transformer_config)
    return CheckpointInfo(source.path, family, closest, config, layout, tensors, source.pipeline_folder)


def _translate(
    records: Mapping[str, TensorRecord], family: ModelFamily, layout: Layout
) -> tuple[dict[str, TensorRecord], list[str]]:
    tensors: dict[str, TensorRecord] = {}
    unknown: list[str] = []
    rows = family.renames
    known = any_of(p for r in rows for p in (r.diffusers if layout == "diffusers" else (r.original, *r.aliases)))
    for name, record in records.items():
        stack = find_by_original(name, rows) if layout == "original" and known.match(name) else None
        if layout == "diffusers" and known.match(name):
            tensors[name] = record
        elif stack is None or not record.shape or record.shape[0] % sum(stack.proportions):
            unknown.append(name)
        elif len(stack.members) == 1:
            tensors[stack.members[0]] = record.swapped() if stack.swap_halves else record
        else:
            tensors |= {member: record.cut(*ends) for member, ends in stack.rows(record.shape[0]).items()}
    return tensors, unknown


def _choose_variant(info: CheckpointInfo, source: Source, wanted: Variant | None) -> CheckpointInfo:
    """The requested variant, else the first that fits what is known."""
    own = with_defaults(info.family, info.config)
    alike = _with_equal_inputs(info, own, wanted)
    configs = {variant.name: with_defaults(info.family, variant.transformer_config) for variant in alike}
    possible = [variant for variant in alike if configs[variant.name] == own]
    if wanted is not None:
        if possible and wanted not in possible or wanted not in info.family.variants:
            raise ValueError(
                f"{source.path} was given as {wanted.name}, but it is {_names(possible) or info.family.title}"
            )
        chosen = wanted
    elif possible:
        boundary = source.pipeline.get("boundary_ratio")  # between two experts, if the model folder names one
        if boundary is not None:
            possible = [variant for variant in possible if boundary in variant.sigma_range] or possible
        if source.path.is_file():  # a model folder may hold both
            ending = expert_by_name(source.path).removesuffix("_noise")
            is_21 = not ending and _WAN_21.search(source.path.name) and not WAN_22.search(source.path.name)
            named = [v for v in possible if ending and v.name.endswith(f"-{ending}") or is_21 and not v.partner]
            possible = named or possible
        in_folder = (each for each in possible if each.transformer_folder == source.folder.name)
        chosen = next(in_folder, possible[0])
        info = replace(info, others=tuple(variant for variant in possible if variant is not chosen))
        if info.others:
            _say_once(f"{source.path} is taken for {chosen.name}; it could also be {_names(info.others)}, then name it")
    else:
        chosen = max(alike, key=lambda v: sum(configs[v.name][key] == own[key] for key in own))
        _say_once(f"{source.path} is a {info.family.title} of a size of its own; it is treated like {chosen.name}")
    is_known = wanted is not None or bool(possible)
    if is_known and chosen.caution and source.pipeline.get("is_distilled") is not False:
        _say_once(f"{chosen.name}: {chosen.caution}")
    return replace(info, variant=chosen)


def expert_by_name(path: Path) -> str:
    """Which of Wan 2.2's experts a file is, "high_noise" or "low_noise"; "" if its name says neither, or both."""
    named = OF_PAIR.findall(path.name) or WAN_22.search(path.name) and _OF_22.findall(path.name) or ()
    said = {each.lower() for each in named}
    return f"{said.pop()}_noise" if len(said) == 1 else ""


def _with_equal_inputs(info: CheckpointInfo, config: Mapping[str, str], wanted: Variant | None) -> list[Variant]:
    """The family's variants that are given a condition beside the noise, if this model takes one; else the others."""
    num_in, num_out = config.get("in_channels"), config.get("out_channels", "null")
    takes_condition = num_out not in ("null", num_in)
    alike = [v for v in info.family.variants if v.encodes_condition == takes_condition]
    is_wrong = wanted in info.family.variants and wanted not in alike
    if is_wrong or not alike:
        what = "a condition beside the noise" if takes_condition else "noise only, no condition"
        raise ValueError(
            f"{info.path} takes {what} ({num_in} channels in, {num_out} out); "
            + (f"for {info.family.title} that is {_names(alike)}" if alike else f"no {info.family.title} here does")
            + (f", not {wanted.name}" if wanted and is_wrong else "")
        )
    return alike


@functools.lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    _log.warning(message)


def _names(variants: Iterable[Variant]) -> str:
    return ", ".join(variant.name for variant in variants)
