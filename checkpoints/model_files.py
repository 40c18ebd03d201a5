"""Which files a path means, and what a file of weights is that is no transformer, as far as its names tell."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..families.spec import Variant
from ..system.files import expect, read_json_object
from .header import FILE_ENDINGS, OTHER_ENDINGS, read_weight_map

_SHARD = re.compile(r"^(?P<stem>.+)-(?P<index>\d+)-of-(?P<count>\d+)(?P<ending>\.\w+)$")
_WEIGHTS = "diffusion_pytorch_model"
LORA_NAME = re.compile(r"(\.|_)(lora_A|lora_down|lora\.down|hada_w1_a|lokr_w1|lokr_w1_a|oft_blocks)(\.|$)")
UNET = "a Stable Diffusion checkpoint (UNet)"
# What it is, and the pattern of the names that tell; the first match wins.
_KINDS = {
    UNET: r"(^|\.)(input_blocks|output_blocks|down_blocks\.\d+\.resnets)\.",
    "a ControlNet": r"^(controlnet_|control_model\.|input_hint_block\.)",
    "a VAE": (
        r"^(vae\.|first_stage_model\.)?(encoder|decoder)\."
        r"(conv_in|conv1|down|up|down_blocks|up_blocks|downsamples|upsamples)\."
    ),
    "a text encoder": (
        r"^(text_model|text_projection|encoder\.block|shared|token_embedding|(language_model\.)?model\.layers"
        r"|(language_model\.)?model\.embed_tokens|model\.language_model)\."
    ),
    "an image encoder": r"^(vision_model|visual)\.",
}


@dataclass(frozen=True)
class Source:
    path: Path
    files: tuple[Path, ...]
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json of a folder
    pipeline_folder: Path | None = None
    pipeline: Mapping[str, Any] = field(default_factory=dict)  # its model_index.json


def find_source(path: Path, wanted: Variant | None) -> Source:
    """The files a path means. Raises: ValueError if there are none, or more than one model."""
    if path.is_dir():
        folder = path
        if (path / "model_index.json").is_file():
            folder = path / (wanted.transformer_folder if wanted else "transformer")
            if not folder.is_dir():
                raise ValueError(f"{path} has no {folder.name} folder; it has {first(p.name for p in path.iterdir())}")
        return _find_in_folder(path, folder)
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a model folder or a .safetensors file")
    if path.name.startswith(_WEIGHTS) and (path.parent / "config.json").is_file():
        return _find_in_folder(path, path.parent)
    return Source(path, _shards_of(path), path.parent)


def _find_in_folder(path: Path, folder: Path) -> Source:
    config = _read_json(folder / "config.json")
    if "quantization_config" in config:
        settings = expect(config["quantization_config"], dict, f"{folder / 'config.json'}: quantization_config")
        method = settings.get("quant_method", "unknown")
        raise ValueError(f"{folder} is quantized ({method}); use the model in bfloat16, float16 or float32")
    pipeline = _read_json(folder.parent / "model_index.json")
    if folder.name not in pipeline:
        pipeline = {}
    return Source(path, _weight_files(folder), folder, config, folder.parent if pipeline else None, pipeline)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    for index in (folder / f"{_WEIGHTS}.safetensors.index.json", *sorted(folder.glob("*.safetensors.index.json"))):
        if index.is_file():
            return _all_there(folder, sorted(set(read_weight_map(index).values())))
    plain = folder / f"{_WEIGHTS}.safetensors"
    if plain.is_file():
        return (plain,)
    found = sorted(file for ending in FILE_ENDINGS for file in folder.glob(f"*{ending}"))
    sets = {_shards_of(file) for file in found}
    if len(sets) == 1:
        return sets.pop()
    if sets:
        raise ValueError(f"{folder} holds {len(sets)} models: {first(file.name for file in found)}; name one of them")
    if others := [file.name for file in folder.iterdir() if file.suffix in OTHER_ENDINGS]:
        raise ValueError(
            f"{folder} holds {first(others)}, which is not read; only safetensors files are, and a .gguf file that is "
            "named itself"
        )
    raise ValueError(
        f"{folder} holds no transformer weights; give a diffusers model folder (with model_index.json), its "
        "transformer folder, or a .safetensors file"
    )


def _shards_of(file: Path) -> tuple[Path, ...]:
    """All of the set that this one belongs to; itself if it belongs to none."""
    match = _SHARD.match(file.name)
    if match is None or match["ending"] not in FILE_ENDINGS:
        return (file,)
    width = len(match["index"])
    numbers = range(1, int(match["count"]) + 1)
    names = [f"{match['stem']}-{number:0{width}d}-of-{match['count']}{match['ending']}" for number in numbers]
    return _all_there(file.parent, names)


def _all_there(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {len(missing)} of the model's files: {first(missing)}; download them too")
    return tuple(folder / name for name in names)


def _read_json(file: Path) -> dict[str, Any]:
    """{} if there is no such file."""
    return read_json_object(file) if file.is_file() else {}


def first(names: Iterable[str], most: int = 3) -> str:
    """Some names, for a message, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def describe_other(names: Collection[str]) -> str:
    """What a file of no supported family is; "" if its names do not tell."""
    for what, pattern in _KINDS.items():
        if found := [name for name in names if re.search(pattern, name)]:
            return f"{what}: {len(found)} tensors such as {found[0]}"
    return ""
