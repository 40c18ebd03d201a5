"""What quantizing a model will do to it, said from the checkpoint's header: sizes and layers left alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from ..checkpoints.load import make_empty_transformer
from ..checkpoints.quantized_files import is_kept
from ..config.job import ModelConfig, ModelScheme
from ..planning.cards import able_schemes
from ..quantization.quantize import (
    KEPT,
    NOT_LINEAR,
    NOTHING_STORED,
    QUANTIZED,
    Groups,
    QuantizeSettings,
    refusal,
    sort_modules,
    total_bytes,
)
from .resolve import Machine, find_machine


@dataclass(frozen=True)
class QuantizePreview:
    """What will become of a model's weights.

    Args:
        settings: None where nothing is quantized. dtype: that the model computes in and holds the rest in.
        groups: modules with weights of their own by what happens to them: QUANTIZED, KEPT, NOT_LINEAR.
        num_stored: tensors that the file holds in 8 bits already, by type. num_taken: those that are kept as they are.
    """

    settings: QuantizeSettings | None
    dtype: str
    groups: Groups
    num_stored: Mapping[str, int] = field(default_factory=dict)
    num_taken: int = 0

    def summary(self) -> str:
        """One line, sizes in decimal GB."""
        before, after = total_bytes(self.groups)
        if self.settings is None:
            return f"none: all weights in {self.dtype}, {_gb(before)}"
        how = "as the file has them" if self.settings.scheme == "stored" else "in 8 bits"
        return (
            f"{self.settings.scheme}: {len(self.groups[QUANTIZED])} linears {how}, {before / 1e9:.2f} -> "
            f"{_gb(after)} of weights"
        )

    def table(self) -> str:
        """summary, what is left alone and why, and what the file holds in 8 bits already."""
        lines = [self.summary()]
        if self.settings is not None:
            for group, what in ((KEPT, "linears the family keeps"), (NOT_LINEAR, "layers that are no linears")):
                found = self.groups[group]
                lines.append(f"{self.dtype}: {len(found)} {what}, {_gb(total_bytes({group: found})[1])}")
            lines.append("LoRA: attached later, never quantized")
        if self.num_stored:
            types = ", ".join(f"{count} in {name}" for name, count in self.num_stored.items())
            does = [f"{self.num_taken} kept as they are"] if self.num_taken else []
            if again := sum(self.num_stored.values()) - self.num_taken:
                rounded = ", linears to quantize are rounded again" if self.settings else ""
                does.append(f"{again} become {self.dtype}{rounded}")
            lines.append(f"the file holds quantized tensors ({types}): {', '.join(does)}")
        return "\n".join(lines)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def foresee_scheme(machine: Machine, info: CheckpointInfo) -> ModelScheme:
    """What "auto" will most likely be on this machine: as resolve.py, none where nothing is planned."""
    return next(iter(able_schemes(machine.cards, info.quantized_types)), "none") if machine.cards else "none"


def preview_model(
    config: ModelConfig, devices: Sequence[str] = (), info: CheckpointInfo | None = None
) -> QuantizePreview:
    """The preview of a model on these devices, () for all; info if it was read already.
    Raises: ValueError for a file that is no such model, or a device that cannot compute in the scheme, naming one that
    works."""
    settings, used = config.quantize_settings, find_machine(devices).devices
    if settings and (reason := refusal(settings, used)):
        raise ValueError(reason)
    info = info or read_checkpoint(config.path, config.family, config.variant)
    groups = sort_modules(make_empty_transformer(info), info.family, settings, getattr(torch, config.dtype).itemsize)
    if settings and settings.scheme == "stored" and not groups[QUANTIZED]:
        raise ValueError(NOTHING_STORED)
    weights = [info.tensors[f"{name}.weight"] for name in groups[QUANTIZED]]
    return QuantizePreview(
        settings=settings,
        dtype=config.dtype,
        groups=groups,
        num_stored=info.quantized_types,
        num_taken=sum(is_kept(record, settings) for record in weights) if settings else 0,
    )
