"""A transformer's checkpoint: recognised from its header, then read tensor by tensor onto the devices it will live on.

What is read: a diffusers model folder or transformer folder, sharded or not; a single safetensors file or any one of a
set of shards, under the makers' names or diffusers', with or without the prefix ComfyUI's files carry. Recognition uses
names and shapes only, offline. A diffusers folder brings its own config, so any size works there; elsewhere the shapes
must be those of a published variant.

What is never done: guess. Every tensor of the file must have a place in the model and the other way round.

Files whose weights are in 8 bits are read too (quantized_files.py says which). A layer keeps its 8-bit weight if it is
to be quantized anyway and the scheme can multiply with that type; all others are dequantized.

Number types follow diffusers' from_pretrained, so that both give equal models: weights become the asked type, except
those of the modules that the class itself lists in _keep_in_fp32_modules (of Wan: time embedder, norms with weights,
modulation tables), which become float32.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from ..families.naming import find_by_diffusers, find_by_original
from ..families.registry import FAMILIES, find_family, find_variant
from ..families.spec import ModelFamily, Variant
from ..quantization.quantize import Stored8, replace_module
from ..system.json_file import expect, read_json_object
from .config_sizes import refuse_absurd_sizes
from .file_header import read_weight_map
from .header import FILE_ENDINGS, TensorRecord, describe_other, read_header, refuse_lora
from .quantized_files import (
    by_file,
    count_types,
    dequantize,
    pair_scales,
    read_formats,
    read_records,
    read_scales,
    stays_in_8_bits,
)

__all__ = [
    "CheckpointInfo",
    "TensorRecord",
    "load_transformer",
    "make_empty_transformer",
    "make_published_info",
    "read_checkpoint",
]

_log = logging.getLogger(__name__)

Layout = Literal["diffusers", "original"]

_LAYOUTS: tuple[Layout, ...] = ("diffusers", "original")
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d+)-of-(?P<count>\d+)(?P<ending>\.\w+)$")
_WEIGHTS = "diffusion_pytorch_model"
_NUM_NAMED = 3  # offenders an error message names


@dataclass(frozen=True)
class CheckpointInfo:
    """A recognised checkpoint.

    Args:
        path: as the user gave it.
        variant: the published variant it is, or for a folder of its own size the one it resembles most; text encoders
            and noise schedule are taken from there.
        config: keyword arguments of the transformer class.
        layout: whose names the file uses.
        tensors: every tensor of the model by its diffusers name; those in 8 bits with their scales.
        pipeline_folder: the diffusers model folder with text encoders and VAE, if the transformer lies in one.
    """

    path: Path
    family: ModelFamily
    variant: Variant | None
    config: Mapping[str, Any]
    layout: Layout
    tensors: Mapping[str, TensorRecord]
    pipeline_folder: Path | None

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that a tensor or its scale lies in, sorted."""
        records = self.tensors.values()
        return tuple(sorted({r.file for r in records} | {r.scale.file for r in records if r.scale is not None}))

    @property
    def quantized_types(self) -> dict[str, int]:
        """How many tensors are in 8 bits, by type ("float8_e4m3fn", "float8_e5m2", "int8"); {} for a plain file."""
        return count_types(self.tensors.values())

    @property
    def num_quantized(self) -> int:
        """How many tensors are in 8 bits."""
        return sum(self.quantized_types.values())


class LayerQuantizer(Protocol):
    """What converts layers as they arrive; quantization/quantize.py's Quantizer is one."""

    def is_wanted(self, fqn: str, module: torch.nn.Module) -> bool: ...
    def finish(self, fqn: str, module: torch.nn.Module) -> torch.nn.Module: ...
    def can_take(self, stored_dtype: torch.dtype) -> bool: ...
    def take(self, fqn: str, module: torch.nn.Linear, stored: Stored8, dtype: torch.dtype) -> torch.nn.Module: ...
    def store(self, module: torch.nn.Module) -> Stored8: ...


class LayerWriter(Protocol):
    """Who wants to know the layers that were rounded here; quantized_cache.py's QuantizedWriter is one."""

    def expect(self, num_bytes: int) -> None: ...
    def add(self, fqn: str, stored: Stored8) -> None: ...


class LayerKeeper(Protocol):
    """Who takes layers away as soon as they are final; parallel/offload/weights.py's WeightOffload is one."""

    def begin(self, model: torch.nn.Module, layers: Collection[str]) -> None: ...
    def finish(self, layer: str) -> None: ...


@dataclass(frozen=True)
class _Source:
    """What lies at a path: the weight files, and what its folder says about them."""

    path: Path
    files: tuple[Path, ...]
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of a folder; {} for a bare file
    pipeline_folder: Path | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict)  # its model_index.json


# --- recognising -----------------------------------------------------------------------------------------------------


def read_checkpoint(path: str | Path, family: str = "", variant: str = "") -> CheckpointInfo:
    """Recognise a checkpoint from its header and config; reads no weights and no network.

    Args:
        path: model folder, transformer folder, single file, or one shard of several.
        family, variant: "" recognises them. A variant is needed where several share their shapes and the first is not
            meant (Wan 2.2's experts).
    Raises: ValueError if it is no transformer of these families, or in a number format that is not read; it says what
        it is instead.
    """
    families = (find_family(family),) if family else tuple(FAMILIES.values())
    wanted = find_variant(variant, families)[1] if variant else None
    source = _find_source(Path(path).expanduser(), wanted)
    headers = [read_header(file) for file in source.files]
    records = {name: record for header in headers for name, record in header.tensors.items()}
    refuse_lora(source.path, records)
    records = _without_prefix(records)
    formats = read_formats(source.path, records, [header.metadata for header in headers])
    records = pair_scales(source.path, records, formats)
    class_name = source.config.get("_class_name")
    if any(class_name == each.transformer_class for each in FAMILIES.values()):
        info = _read_folder(source, records, families)
    else:
        info = _read_by_names(source, records, families)
    return _choose_variant(info, source, wanted)


def make_published_info(name: str) -> CheckpointInfo:
    """A published variant by its name, no file of which need be there: sizes for planning, without a tensor to load.

    Raises: ValueError that lists the variants there are.
    """
    family, variant = find_variant(name)
    return CheckpointInfo(Path(name), family, variant, dict(variant.transformer_config), "diffusers", {}, None)


def _without_prefix(records: Mapping[str, TensorRecord]) -> dict[str, TensorRecord]:
    """The transformer's tensors without ComfyUI's prefix; what else a bundled file holds (VAE, text encoders) goes."""
    prefixes = dict.fromkeys(prefix for family in FAMILIES.values() for prefix in family.original_prefixes if prefix)
    for prefix in prefixes:
        found = {name[len(prefix) :]: record for name, record in records.items() if name.startswith(prefix)}
        if found:
            return found
    return dict(records)


def _read_folder(source: _Source, records: dict[str, TensorRecord], families: Sequence[ModelFamily]) -> CheckpointInfo:
    """A diffusers folder: its config says what it is. The variant is chosen later."""
    class_name = source.config["_class_name"]
    family = next((family for family in families if family.transformer_class == class_name), None)
    if family is None:
        raise ValueError(f"{source.folder} holds a {class_name}, not a model of {families[0].title}")
    _refuse_unsupported(source.folder, records, family)
    config = {name: value for name, value in source.config.items() if not name.startswith("_")}
    ignored = getattr(_class_of(family), "_keys_to_ignore_on_load_unexpected", None) or ()
    tensors = {name: r for name, r in records.items() if not any(re.search(pattern, name) for pattern in ignored)}
    refuse_absurd_sizes(source.folder / "config.json", config)
    differences = _differences(_shapes_of_config(source.folder, family, config), tensors)
    if differences:
        raise ValueError(f"the weights in {source.folder} do not fit its config.json: {differences}")
    return CheckpointInfo(source.path, family, None, config, "diffusers", tensors, source.pipeline_folder)


def _shapes_of_config(folder: Path, family: ModelFamily, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Raises: ValueError for values that the model's class cannot be made with."""
    try:
        return _expected_shapes(family, config)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'config.json'} gives values that no {family.transformer_class} can be made with "
            f"({type(error).__name__}: {error}); download it again"
        ) from error


def _read_by_names(
    source: _Source, records: dict[str, TensorRecord], families: Sequence[ModelFamily]
) -> CheckpointInfo:
    """A file without a config of ours: its names say which family, its shapes which variant."""
    attempts = [_translate(records, family, layout) for family in families for layout in _LAYOUTS]
    best = min(attempts, key=lambda attempt: len(attempt.unknown))
    if best.unknown and len(best.unknown) > len(records) // 2 or not records:
        raise ValueError(_nothing_known(source, records, families))
    family = best.family
    _refuse_unsupported(source.path, records, family)
    if best.unknown:
        raise ValueError(
            f"{source.path} resembles {family.title}, but {len(best.unknown)} of its {len(records)} tensors have no "
            f"place there: {_first(best.unknown)}. Supported: {_names(family.variants)}"
        )
    differences = {
        variant.name: _differences(_expected_shapes(family, variant.transformer_config), best.tensors)
        for variant in family.variants
    }
    fitting = [variant for variant in family.variants if not differences[variant.name]]
    if not fitting:
        closest = min(family.variants, key=lambda variant: len(_misfits(family, variant, best.tensors)))
        raise ValueError(
            f"{source.path} is of {family.title}, but none of the supported models ({_names(family.variants)}). "
            f"Against {closest.name}: {differences[closest.name]}. If it is a size of its own, give its diffusers "
            "folder, which has a config"
        )
    config = dict(fitting[0].transformer_config)
    return CheckpointInfo(source.path, family, fitting[0], config, best.layout, best.tensors, source.pipeline_folder)


def _refuse_unsupported(path: Path, names: Iterable[str], family: ModelFamily) -> None:
    for name in names:
        for pattern, reason in family.unsupported.items():
            if fnmatch.fnmatchcase(name, pattern):
                raise ValueError(
                    f"{path} is of {family.title}, but {reason} (it has {name}). Supported: {_names(family.variants)}"
                )


@dataclass(frozen=True)
class _Translation:
    """A file's tensors under diffusers names, and the names that have none, for one family and layout."""

    family: ModelFamily
    layout: Layout
    tensors: dict[str, TensorRecord]
    unknown: list[str]


def _translate(records: Mapping[str, TensorRecord], family: ModelFamily, layout: Layout) -> _Translation:
    tensors: dict[str, TensorRecord] = {}
    unknown: list[str] = []
    for name, record in records.items():
        if layout == "diffusers":
            pieces = {name: record} if find_by_diffusers(name, family.renames) else {}
        else:
            pieces = _pieces(name, record, family)
        tensors.update(pieces)
        if not pieces:
            unknown.append(name)
    return _Translation(family, layout, tensors, unknown)


def _pieces(name: str, record: TensorRecord, family: ModelFamily) -> dict[str, TensorRecord]:
    """The diffusers tensors that an original tensor holds; {} if the family does not know it."""
    stack = find_by_original(name, family.renames)
    if stack is None or not record.shape or record.shape[0] % sum(stack.proportions):
        return {}
    if len(stack.members) == 1:
        return {stack.members[0]: record.swapped() if stack.swap_halves else record}
    bounds = stack.bounds(record.shape[0])
    return {
        member: record.cut(start, end) for member, start, end in zip(stack.members, bounds, bounds[1:], strict=False)
    }


def _nothing_known(source: _Source, records: Mapping[str, TensorRecord], families: Sequence[ModelFamily]) -> str:
    kind = describe_other(records)
    class_name = source.config.get("_class_name")
    found = f"is {kind}" if kind else f"holds {len(records)} tensors of no known model, such as {_first(records)}"
    if class_name:
        found += f" (its config.json says {class_name})"
    supported = "; ".join(f"{family.title}: {_names(family.variants)}" for family in families)
    return f"{source.path} {found}; give a transformer of {supported}"


def _choose_variant(info: CheckpointInfo, source: _Source, wanted: Variant | None) -> CheckpointInfo:
    """Settle which variant it is: the one asked for, else the first that fits what is known."""
    alike = _with_equal_inputs(info, wanted)
    possible = [v for v in alike if _same_config(info.family, v.transformer_config, info.config)]
    if wanted is not None:
        if possible and wanted not in possible or wanted not in info.family.variants:
            raise ValueError(
                f"{source.path} was given as {wanted.name}, but it is {_names(possible) or info.family.title}"
            )
        chosen = wanted
    elif possible:
        chosen = _likeliest(possible, source)
        others = [variant for variant in possible if variant is not chosen]
        if others:
            _say_once(f"{source.path} is taken for {chosen.name}; it could also be {_names(others)}, then name it")
    else:
        chosen = max(alike, key=lambda v: _num_equal(info.family, v.transformer_config, info.config))
        _say_once(f"{source.path} is a {info.family.title} of a size of its own; it is treated like {chosen.name}")
    if chosen.caution and source.pipeline.get("is_distilled") is not False:
        _say_once(f"{chosen.name}: {chosen.caution}")
    return replace(info, variant=chosen)


def _with_equal_inputs(info: CheckpointInfo, wanted: Variant | None) -> list[Variant]:
    """The family's variants that are given a condition beside the noise, if this model takes one; else the others.

    Raises: ValueError if there are none, or the variant asked for is not among them.
    """
    config = _with_defaults(info.family, info.config)
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


def _likeliest(possible: Sequence[Variant], source: _Source) -> Variant:
    """By the boundary between two experts, if the model folder names one, and the folder the transformer lies in."""
    boundary = source.pipeline.get("boundary_ratio")
    if boundary is not None:
        possible = [variant for variant in possible if boundary in variant.sigma_range] or possible
    return next((variant for variant in possible if variant.transformer_folder == source.folder.name), possible[0])


@functools.lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    _log.warning(message)


# --- files and folders -----------------------------------------------------------------------------------------------


def _find_source(path: Path, wanted: Variant | None) -> _Source:
    """The files a path means.

    Raises: ValueError if there are none, or more than one model.
    """
    if path.is_dir():
        if (path / "model_index.json").is_file():
            return _find_in_pipeline(path, wanted)
        return _find_in_folder(path, path)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a model folder or a .safetensors file")
    if path.name.startswith(_WEIGHTS) and (path.parent / "config.json").is_file():
        return _find_in_folder(path, path.parent)
    return _Source(path, _shards_of(path), path.parent)


def _find_in_pipeline(path: Path, wanted: Variant | None) -> _Source:
    folder = path / (wanted.transformer_folder if wanted else "transformer")
    if not folder.is_dir():
        raise ValueError(f"{path} has no {folder.name} folder; it has {_first(p.name for p in path.iterdir())}")
    return _find_in_folder(path, folder)


def _find_in_folder(path: Path, folder: Path) -> _Source:
    """A folder with weights and perhaps a config, perhaps inside a model folder."""
    config = _read_json(folder / "config.json")
    if "quantization_config" in config:
        settings = expect(config["quantization_config"], dict, f"{folder / 'config.json'}: quantization_config")
        method = settings.get("quant_method", "unknown")
        raise ValueError(f"{folder} is quantized ({method}); use the model in bfloat16, float16 or float32")
    pipeline = _read_json(folder.parent / "model_index.json")
    if folder.name not in pipeline:
        pipeline = {}
    pipeline_folder = folder.parent if pipeline else None
    return _Source(path, _weight_files(folder), folder, config, pipeline_folder, pipeline)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    for index in (folder / f"{_WEIGHTS}.safetensors.index.json", *sorted(folder.glob("*.safetensors.index.json"))):
        if index.is_file():
            names = sorted(set(read_weight_map(index).values()))
            _refuse_missing(folder, [name for name in names if not (folder / name).is_file()])
            return tuple(folder / name for name in names)
    plain = folder / f"{_WEIGHTS}.safetensors"
    if plain.is_file():
        return (plain,)
    found = sorted(file for ending in FILE_ENDINGS for file in folder.glob(f"*{ending}"))
    sets = {_shards_of(file) for file in found}
    if len(sets) == 1:
        return sets.pop()
    if sets:
        raise ValueError(f"{folder} holds {len(sets)} models: {_first(file.name for file in found)}; name one of them")
    others = [file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt", ".gguf")]
    if others:
        raise ValueError(f"{folder} holds {_first(others)}, which is not read; only safetensors files are")
    raise ValueError(
        f"{folder} holds no transformer weights; give a diffusers model folder (with model_index.json), its "
        "transformer folder, or a .safetensors file"
    )


def _shards_of(file: Path) -> tuple[Path, ...]:
    """All files of the set this one belongs to; itself if it belongs to none."""
    match = _SHARD.match(file.name)
    if match is None or match["ending"] not in FILE_ENDINGS:
        return (file,)
    width = len(match["index"])
    names = [
        f"{match['stem']}-{index:0{width}d}-of-{match['count']}{match['ending']}"
        for index in range(1, int(match["count"]) + 1)
    ]
    _refuse_missing(file.parent, [name for name in names if not (file.parent / name).is_file()])
    return tuple(file.parent / name for name in names)


def _refuse_missing(folder: Path, names: Sequence[str]) -> None:
    if names:
        raise ValueError(f"{folder} lacks {len(names)} of the model's files: {_first(names)}; download them too")


def _read_json(file: Path) -> dict[str, Any]:
    """{} if there is no such file."""
    if not file.is_file():
        return {}
    return read_json_object(file)


# --- comparing -------------------------------------------------------------------------------------------------------


def _class_of(family: ModelFamily) -> Any:
    import diffusers

    return getattr(diffusers, family.transformer_class)


def _plain(config: Mapping[str, Any]) -> str:
    """A config as text, lists and tuples alike."""
    return json.dumps(dict(config), sort_keys=True)


def _expected_shapes(family: ModelFamily, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    return _shapes_of(family.transformer_class, _plain(config))


@functools.lru_cache(maxsize=32)
def _shapes_of(transformer_class: str, config: str) -> Mapping[str, tuple[int, ...]]:
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, transformer_class).from_config(json.loads(config))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _misfits(family: ModelFamily, variant: Variant, tensors: Mapping[str, TensorRecord]) -> set[str]:
    expected = _expected_shapes(family, variant.transformer_config)
    return {n for n in expected.keys() | tensors.keys() if n not in tensors or expected.get(n) != tensors[n].shape}


def _differences(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, TensorRecord]) -> str:
    """What keeps these tensors from being exactly the model's; "" if nothing does."""
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected]
    mismatched = [
        f"{name} is {list(tensors[name].shape)} and should be {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    parts = (("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched))
    return "; ".join(f"{len(names)} {what}: {_first(names)}" for what, names in parts if names)


def _with_defaults(family: ModelFamily, config: Mapping[str, Any]) -> dict[str, str]:
    """Every argument of the class as text, lists and tuples alike."""
    parameters = inspect.signature(_class_of(family).__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return {name: json.dumps(config.get(name, default)) for name, default in defaults.items()}


def _num_equal(family: ModelFamily, one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    a, b = _with_defaults(family, one), _with_defaults(family, other)
    return sum(a[name] == b[name] for name in a)


def _same_config(family: ModelFamily, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return _with_defaults(family, one) == _with_defaults(family, other)


def _names(variants: Iterable[Variant]) -> str:
    return ", ".join(variant.name for variant in variants)


def _first(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NUM_NAMED]) + (f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else "")


# --- loading ---------------------------------------------------------------------------------------------------------


def make_empty_transformer(info: CheckpointInfo) -> torch.nn.Module:
    """The transformer on meta, buffers included: sizes without weights, for planning."""
    with torch.device("meta"):
        return _class_of(info.family).from_config(dict(info.config))


def make_unfilled_transformer(info: CheckpointInfo) -> torch.nn.Module:
    """The transformer with its parameters on meta, and real buffers and tables on the CPU."""
    from accelerate import init_empty_weights

    # Buffers that no file holds (Wan's rotary tables) must be real; they are computed in the constructor.
    with init_empty_weights(include_buffers=False):
        return _class_of(info.family).from_config(dict(info.config))


def load_transformer(
    info: CheckpointInfo,
    device_of: Callable[[str], torch.device],
    dtype: torch.dtype,
    quantizer: LayerQuantizer | None = None,
    writer: LayerWriter | None = None,
    keeper: LayerKeeper | None = None,
) -> torch.nn.Module:
    """The transformer with every parameter on its device, frozen and in eval mode.

    One tensor is in host memory at a time, besides what the system keeps of the file. On the CPU too, weights are
    copies, so that a file replaced later changes nothing. A layer is quantized as soon as the last of its own tensors
    is in place, before the next one is read.

    Args:
        device_of: from a parameter's or buffer's fqn to its device.
        dtype: of the weights, except those the class keeps in float32.
        quantizer: converts layers, or takes them over as a file in 8 bits has them; with None such a file is
            dequantized.
        writer: is given every layer that was rounded, and not those that were in 8 bits already.
        keeper: is told of every layer that is final, before the next one is read.
    Raises: ValueError if the file's tensors are not exactly the model's, or its scales are no scales.
    """
    model = make_unfilled_transformer(info)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    differences = _differences(shapes, info.tensors)
    if differences:
        raise ValueError(f"{info.path} does not fit {info.family.title}: {differences}")
    _Loader(model, info, device_of, dtype, quantizer, writer, keeper).load()
    for name, buffer in list(model.named_buffers()):
        owner, leaf = _owner(model, name)
        owner._buffers[leaf] = buffer.to(device_of(name))
    return model.requires_grad_(False).eval()


class _Loader:
    """Fills an empty model, tensor by tensor."""

    def __init__(
        self,
        model: torch.nn.Module,
        info: CheckpointInfo,
        device_of: Callable[[str], torch.device],
        dtype: torch.dtype,
        quantizer: LayerQuantizer | None,
        writer: LayerWriter | None,
        keeper: LayerKeeper | None,
    ) -> None:
        self._keeper = keeper
        self._model = model
        self._info = info
        self._device_of = device_of
        self._dtype = dtype
        self._quantizer = quantizer
        self._writer = writer
        self._kept_in_float32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        self._wanted = {n for n, m in model.named_modules() if quantizer is not None and quantizer.is_wanted(n, m)}
        self._scales = read_scales(info.tensors)
        self._waiting = Counter(name.rpartition(".")[0] for name in info.tensors)
        self._taken: dict[str, Stored8] = {}  # weights of layers whose other tensors have not all arrived
        self._num_taken = self._num_dequantized = 0

    def load(self) -> None:
        if self._writer is not None:
            self._writer.expect(sum(self._stored_bytes(name) for name in self._wanted if not self._is_taken(name)))
        if self._keeper is not None:
            self._keeper.begin(self._model, self._waiting.keys())
        for file, records in by_file(self._info.tensors).items():
            _log.info("reading %d tensors from %s", len(records), file.name)
            for name, tensor in read_records(records):
                self._place(name, tensor)
                del tensor  # before its layer is converted and the next one read: no second copy, here or on its device
                self._finish_layer_of(name)
        if self._info.num_quantized:
            found = ", ".join(f"{count} {kind}" for kind, count in self._info.quantized_types.items())
            message = "read %s tensors for %s: %d kept in 8 bits, %d dequantized"
            _log.info(message, found, self._info.path, self._num_taken, self._num_dequantized)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor where it belongs, or lay it by until its layer takes it over."""
        layer, _, leaf = name.rpartition(".")
        device, dtype = self._device_of(name), self._dtype_of(name)
        record = self._info.tensors[name]
        if leaf == "weight" and self._is_taken(layer):
            self._taken[layer] = self._keep(name, tensor.to(device, copy=True))
            self._num_taken += 1
        elif record.is_quantized:
            scale = self._scales.get(name)
            self._num_dequantized += 1
            values = tensor.to(device)
            self._set(name, dequantize(values, None if scale is None else scale.to(device), record, dtype))
        else:
            self._set(name, tensor.to(device, dtype, copy=True))

    def _finish_layer_of(self, name: str) -> None:
        """Convert the layer of a tensor that has been placed, if all of the layer is there now."""
        layer = name.rpartition(".")[0]
        self._waiting[layer] -= 1
        if self._waiting[layer]:
            return
        if layer in self._wanted:
            self._convert(layer)
        if self._keeper is not None:
            self._keeper.finish(layer)

    def _convert(self, layer: str) -> None:
        assert self._quantizer is not None
        module = self._model.get_submodule(layer)
        if layer in self._taken:
            assert isinstance(module, torch.nn.Linear)
            stored, dtype = self._taken.pop(layer), self._dtype_of(f"{layer}.weight")
            replace_module(self._model, layer, self._quantizer.take(layer, module, stored, dtype))
            return
        done = self._quantizer.finish(layer, module)
        replace_module(self._model, layer, done)
        if self._writer is not None:
            self._writer.add(layer, self._quantizer.store(done))

    def _is_taken(self, layer: str) -> bool:
        """Whether a layer's weight stays as the file has it."""
        if self._quantizer is None or layer not in self._wanted:
            return False
        return stays_in_8_bits(self._info.tensors[f"{layer}.weight"], self._quantizer.can_take)

    def _keep(self, name: str, values: torch.Tensor) -> Stored8:
        scale = self._scales.get(name, torch.ones(1)).reshape(-1, 1).expand(values.shape[0], 1)
        return Stored8(values, scale.contiguous().to(values.device, copy=True), self._info.tensors[name].rotation)

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        owner, leaf = _owner(self._model, name)
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor

    def _dtype_of(self, name: str) -> torch.dtype:
        # diffusers' own test for which weights stay float32: a dotted part of the name, not a piece of text
        return self._dtype if self._kept_in_float32.isdisjoint(name.split(".")) else torch.float32

    def _stored_bytes(self, layer: str) -> int:
        """A byte per weight and a float32 per row."""
        shape = self._info.tensors[f"{layer}.weight"].shape
        return prod(shape) + 4 * shape[0]


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    parent, _, leaf = name.rpartition(".")
    return model.get_submodule(parent), leaf
