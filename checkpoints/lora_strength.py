"""What multiplies a LoRA's layers where the tensors themselves do not say it.

Diffusers, and SimpleTuner with it, write alpha and rank into the file's metadata alone (`lora_adapter_metadata`, the
values of PEFT's LoraConfig, each behind the name of its component). PEFT itself writes them into adapter_config.json
beside adapter_model.safetensors. The strength is alpha / rank, with use_rslora alpha / sqrt(rank); a pattern names
layers by the end of their names. ComfyUI reads none of this.

kohya's scripts write `ss_network_alpha` beside an alpha for each layer, which counts. Converters to PEFT's names keep
that metadata and multiply alpha into the matrices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.json_file import expect, parse_json_object, read_json_object

_KEY = "lora_adapter_metadata"
_PEFT_FILES = ("adapter_model.safetensors", "adapter_config.json")
_PEFT_PREFIX = "base_model.model."
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that change the model's own weights
_PLAIN = re.compile(r"\^?[\w.-]+\Z")
_REMEDY = "give a LoRA that has an alpha for each layer"


@dataclass(frozen=True)
class Strength:
    """What metadata says of a layer."""

    alpha: float
    rank: int
    is_rslora: bool

    @property
    def value(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.is_rslora else self.rank)

    def __str__(self) -> str:
        return f"alpha {self.alpha:g} for rank {self.rank}{' (rslora)' if self.is_rslora else ''}"


def read_strengths(file: Path, metadata: Mapping[str, str], layers: Sequence[str]) -> dict[str, Strength]:
    """What is said of each of a file's layers; {} where nothing is.

    Args:
        metadata: the file's __metadata__.
        layers: their names in the file.
    Raises: ValueError for metadata that is damaged, leaves layers out, or speaks of other weights than the model's.
    """
    model, beside = _PEFT_FILES
    source, found = f"{file}: {_KEY}", {}
    if metadata.get(_KEY):
        found = parse_json_object(metadata[_KEY], source, _REMEDY)
    elif file.name == model and file.with_name(beside).is_file():
        source, found = str(file.with_name(beside)), read_json_object(file.with_name(beside), _REMEDY)
    components: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        component, _, name = key.rpartition(".")
        components.setdefault(component, {})[name] = value
    known = {name: _Component(f"{source}: {name}", each) for name, each in components.items() if "r" in each}
    strengths = {}
    for layer in layers if known else ():
        component, _, module = layer.partition(".")
        if component not in known:
            component, module = "", layer.removeprefix(_PEFT_PREFIX)
        if component in known:
            strengths[layer] = known[component].strength(module)
        elif not all(each.is_one for each in known.values()):
            raise ValueError(f"{source} gives alpha and rank of {', '.join(known)}, and not of {layer}; {_REMEDY}")
    return strengths


class _Component:
    """One component's values of PEFT's LoraConfig or LoKrConfig."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self._source, self._values = source, values
        way = values.get("init_lora_weights")
        if isinstance(way, str) and way.lower().startswith(_CHANGES_BASE):
            raise ValueError(
                f"{source} says init_lora_weights = {way!r}, which changes the model's own weights, too; let PEFT "
                "save it as a plain LoRA (path_initial_model_for_weight_conversion)"
            )
        self._ranks, self._alphas = self._pattern("rank_pattern"), self._pattern("alpha_pattern")

    def strength(self, module: str) -> Strength:
        rank = _match(self._ranks, module, self._values["r"])
        alpha = _match(self._alphas, module, self._values.get("lora_alpha", self._values.get("alpha")))
        expect(rank, int, f"{self._source} r of {module}", _REMEDY)
        expect(alpha, (int, float), f"{self._source} lora_alpha of {module}", _REMEDY)
        if rank < 1 or not alpha or not math.isfinite(alpha):
            raise ValueError(f"{self._source} gives {module} alpha {alpha} for rank {rank}; {_REMEDY}")
        return Strength(alpha, rank, is_rslora=self._values.get("use_rslora") is True)

    @property
    def is_one(self) -> bool:
        """Whether it gives every layer strength 1, so that the names of layers do not matter."""
        return not self._ranks and not self._alphas and self.strength("").value == 1

    def _pattern(self, key: str) -> dict[str, tuple[int, Any]]:
        """Ends of names, with "^" whole names, and their values in the file's order."""
        found = expect(self._values.get(key) or {}, dict, f"{self._source} {key}", _REMEDY)
        if odd := [name for name in found if not _PLAIN.match(name)]:
            raise ValueError(f"{self._source} {key} has {odd[0][:100]!r}, which is no layer's name; {_REMEDY}")
        return {name: (number, value) for number, (name, value) in enumerate(found.items())}


def _match(pattern: Mapping[str, tuple[int, Any]], module: str, default: Any) -> Any:
    """As PEFT: the first of the file that is the end of the layer's name."""
    parts = module.split(".")
    names = [f"^{module}", *(".".join(parts[start:]) for start in range(len(parts)))]
    return min((pattern[name] for name in names if name in pattern), default=(0, default))[1]


def refuse_lost_alpha(file: Path, metadata: Mapping[str, str], layers: Sequence[str]) -> None:
    """Of layers under kohya's names that have no alpha.

    Raises: ValueError where the metadata says that they were trained with one that counts.
    """
    alpha, rank = (_number(metadata.get(f"ss_network_{key}")) for key in ("alpha", "dim"))
    if layers and alpha and rank and alpha != rank:
        raise ValueError(
            f"{file} has no alpha for {layers[0]} ({len(layers)} such layers), so it is of strength 1, and its "
            f"metadata says ss_network_alpha {alpha:g} for rank {rank:g}, which is {alpha / rank:g}; {_REMEDY}"
        )


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:  # "Dynamic", of a LoRA that was resized
        return None
