"""Weight-only float8 for the frozen linears of a model that trains a LoRA, or is only run.

The equation. A weight W [out, in] becomes q = round_to_e4m3(W / s) with one float32 scale per output row, s =
amax(|W_row|) / 448. A forward computes x @ (q * s).T in the activations' dtype: memory is halved against bfloat16,
speed is not gained, and gradients reach x and LoRA as if W were q * s.

The format. float8_e4m3fn: 1 sign, 4 exponent, 3 mantissa bits; largest 448, smallest normal 2^-6, smallest subnormal
2^-9, no infinity. Rounding to 3 mantissa bits errs by up to 1/16 of a value, by 2.65 % rms over a binade (error
uniform over a step of 1/8, mantissas log-uniform), so a linear's output has a signal-to-noise ratio of 31 to 33 dB
whatever the model. The row scale puts the largest weight of a row at 448. Weights below 3.5e-5 of that one lose bits,
below 2.2e-6 they become 0; neither adds to the error one would notice. float8_e5m2 has range we do not need and a
mantissa bit less: not offered.

What stays in full precision: LoRA, what the family names in keep_full_precision (norms, embedders, modulation, the
last projection: few bytes, much harm), and every module that is no nn.Linear.

Traps this file exists for, all seen with torchao 0.18:
- quantize_ without filter_fn also converts the linears inside LoRA, freezes them, and says nothing.
- A quantized weight accepts requires_grad_(True), runs a backward without error and never gets a gradient.
- A row of zeros has scale 0, and 0 / 0 fills it with NaN. We give such rows scale 1.
- Float8WeightOnlyConfig changes torch._inductor's settings for the whole process (in older releases the precision of
  float32 matmuls too) unless set_inductor_config is False.
- model.to(dtype) after quantizing: quantized weights keep their compute dtype while biases, norms and LoRA change,
  and the next forward fails with mixed dtypes. Cast before; move with model.to(device) only.
- peft cannot merge a LoRA into a float8 weight; keep it unmerged, or merge before quantizing.
- safetensors.torch.save cannot write a quantized state dict; our checkpoints hold LoRA only.

Chosen not to do: dynamic activation quantization, which needs float8 matrix units (compute capability 8.9, MI300) and
has no backward; own kernels; quantizing convolutions and embeddings.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NoReturn

import torch
from packaging.version import Version
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..families.spec import ModelFamily
from .lora import (
    TRAINABLE_DTYPES,
    assert_lora_intact,
    is_lora_name,
    is_torchao_tensor,
    lora_parameters,
    matches_any,
)

_log = logging.getLogger(__name__)

OLDEST_TORCHAO = "0.16"  # peft attaches LoRA to the tensors of no older release

QUANTIZED = "quantized"
LORA = "LoRA"
KEPT = "kept in full precision by the family"
NOT_LINEAR = "not a linear layer"


@dataclass(frozen=True)
class LayerGroup:
    """Modules treated alike: fqns of those that hold weights of their own, and the bytes of these weights."""

    names: tuple[str, ...]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizeReport:
    """What apply_fp8 did, by reason: QUANTIZED, LORA, KEPT and NOT_LINEAR, each present even when empty."""

    groups: Mapping[str, LayerGroup]

    @property
    def num_quantized(self) -> int:
        return len(self.groups[QUANTIZED].names)

    @property
    def num_skipped(self) -> int:
        return sum(len(group.names) for group in self.groups.values()) - self.num_quantized

    @property
    def bytes_before(self) -> int:
        return sum(group.bytes_before for group in self.groups.values())

    @property
    def bytes_after(self) -> int:
        return sum(group.bytes_after for group in self.groups.values())

    def summary(self) -> str:
        """One line for a log or a node, sizes in decimal GB."""
        skipped = ", ".join(f"{len(g.names)} {reason}" for reason, g in self.groups.items() if reason != QUANTIZED)
        return (
            f"{self.num_quantized} linears to float8, {self.bytes_before / 1e9:.2f} -> {self.bytes_after / 1e9:.2f} GB"
            f"; left alone: {skipped}"
        )


@dataclass(frozen=True)
class Fp8Handle:
    """Handle of a quantized model; made by apply_fp8."""

    report: QuantizeReport

    def remove(self) -> NoReturn:
        """Raises: RuntimeError always: the full weights are gone."""
        raise RuntimeError(
            f"asked to undo float8 on {self.report.num_quantized} layers, but rounding has replaced their weights; "
            'load the model again with quantize = "none"'
        )


def apply_fp8(model: nn.Module, family: ModelFamily) -> Fp8Handle:
    """Replace the frozen linear weights of model by float8, each on the device it is on, in place.

    LoRA may be attached already or later; its parameters stay the same objects with the same bytes. Converted weights
    are frozen. Patterns in family.keep_full_precision match a module or one it is inside of.
    The cost is one pass over the weights and, for a moment, float32 copies of the largest.

    Raises: ValueError if the model is quantized already, or the family leaves nothing to quantize; RuntimeError if
        torchao is missing or too old, or did not leave the model as promised.
    """
    quantizer = Fp8Quantizer(family)
    _refuse_quantized(model)
    lora_before = _snapshot_lora(model)
    for name, module in _sort_modules(model, family)[QUANTIZED].items():
        quantizer.finish(name, module)
    return quantizer.close(model, lora_before)


class Fp8Quantizer:
    """Quantizes linears one at a time, so that a loader can hand over each layer as it arrives.

    No more than one layer is then in full precision beside what is kept in it, on the layer's own device. The result is
    that of apply_fp8 on the loaded model, bit for bit.

    Raises: RuntimeError if torchao is missing or too old.
    """

    def __init__(self, family: ModelFamily) -> None:
        self._torchao = import_torchao()
        self._family = family
        self._bytes_before: dict[str, int] = {}

    def finish(self, fqn: str, module: nn.Module) -> None:
        """Quantize a module whose tensors have their final values and places, if it is one to quantize.

        Raises: RuntimeError if torchao did not leave the layer as promised.
        """
        if _treatment(fqn, module, self._family) != QUANTIZED:
            return
        self._bytes_before[fqn] = _num_bytes({fqn: module})
        # set_inductor_config would change settings of the whole process; the model is ours, the process is the user's.
        config = self._torchao.Float8WeightOnlyConfig(weight_dtype=torch.float8_e4m3fn, set_inductor_config=False)
        self._torchao.quantize_(module, config, filter_fn=lambda candidate, name: candidate is module)
        if not isinstance(module.weight, self._torchao.Float8Tensor):
            raise RuntimeError(
                f"torchao left layer {fqn} without a Float8Tensor; torchao {version('torchao')} is unknown to this "
                f"pack, use {OLDEST_TORCHAO} or newer"
            )
        _clear_zero_rows(module.weight)

    def close(self, model: nn.Module, lora_before: _LoraState | None = None) -> Fp8Handle:
        """Check the whole and report.

        Raises: ValueError if the family leaves nothing to quantize; RuntimeError if a layer was left out, or LoRA is
            not what it was.
        """
        modules = _sort_modules(model, self._family)
        if not modules[QUANTIZED]:
            raise ValueError(
                f"float8 was asked for, but {self._family.title} keeps every linear of this {type(model).__name__} in "
                'full precision; use quantize = "none"'
            )
        missed = [name for name in modules[QUANTIZED] if name not in self._bytes_before]
        if missed:
            raise RuntimeError(f"{len(missed)} layers were never quantized, {missed[0]} first; load the model again")
        _check_lora(model, lora_before or {})
        report = QuantizeReport({reason: self._group(reason, group) for reason, group in modules.items()})
        _log.info("%s", report.summary())
        return Fp8Handle(report)

    def _group(self, reason: str, modules: Mapping[str, nn.Module]) -> LayerGroup:
        after = _num_bytes(modules)
        before = sum(self._bytes_before[name] for name in modules) if reason == QUANTIZED else after
        return LayerGroup(tuple(modules), before, after)


def stored_bytes(
    model: nn.Module, family: ModelFamily, blocks: Sequence[str], element_size: int
) -> tuple[list[int], int]:
    """Bytes of each block and of everything else once quantized: one per weight and four per row of a quantized linear,
    element_size elsewhere. Works on meta tensors."""
    sizes = dict.fromkeys(blocks, 0)
    home = 0
    for name, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False)) * element_size
        if size and _treatment(name, module, family) == QUANTIZED:
            size -= module.weight.numel() * (element_size - 1) - 4 * module.out_features  # type: ignore[operator,union-attr]
        block = ".".join(name.split(".")[:2])
        if block in sizes:
            sizes[block] += size
        else:
            home += size
    return list(sizes.values()), home


def import_torchao() -> ModuleType:
    """torchao.quantization; imported here because it takes seconds and most jobs do without.

    Raises: RuntimeError naming the version found and the one needed.
    """
    try:
        found = version("torchao")
    except PackageNotFoundError:
        raise RuntimeError(
            f"float8 needs torchao {OLDEST_TORCHAO} or newer, and none is installed; install it, or use "
            'quantize = "none"'
        ) from None
    if Version(found) < Version(OLDEST_TORCHAO):
        raise RuntimeError(
            f'float8 needs torchao {OLDEST_TORCHAO} or newer and found {found}; update it, or use quantize = "none"'
        )
    return importlib.import_module("torchao.quantization")


def _refuse_quantized(model: nn.Module) -> None:
    low = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if is_torchao_tensor(parameter) or (parameter.ndim == 2 and parameter.dtype not in TRAINABLE_DTYPES)
    ]
    if low:
        name, parameter = low[0]
        found = type(parameter).__name__ if is_torchao_tensor(parameter) else str(parameter.dtype)
        raise ValueError(
            f"float8 was asked for, but {len(low)} weights of this {type(model).__name__} are quantized already "
            f'({name}: {found}); leave it so with quantize = "none", or load a bfloat16 checkpoint'
        )


def _sort_modules(model: nn.Module, family: ModelFamily) -> dict[str, dict[str, nn.Module]]:
    """Modules that hold parameters themselves, by what happens to them and why."""
    sorted_modules: dict[str, dict[str, nn.Module]] = {QUANTIZED: {}, LORA: {}, KEPT: {}, NOT_LINEAR: {}}
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            sorted_modules[_treatment(name, module, family)][name] = module
    return sorted_modules


def _treatment(fqn: str, module: nn.Module, family: ModelFamily) -> str:
    if is_lora_name(fqn):
        return LORA
    if not isinstance(module, nn.Linear):
        return NOT_LINEAR
    parts = fqn.split(".")  # every module above counts, so a wrapper's "base_layer" at the end does no harm
    lineage = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return KEPT if any(matches_any(name, family.keep_full_precision) for name in lineage) else QUANTIZED


def _num_bytes(modules: Mapping[str, nn.Module]) -> int:
    return sum(_tensor_bytes(p) for module in modules.values() for p in module.parameters(recurse=False))


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes a tensor occupies; for a tensor made of others (values and scales) those of its parts."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return sum(_tensor_bytes(getattr(tensor, name)) for name in names)


_LoraState = dict[str, tuple[nn.Parameter, int, torch.dtype, bool]]


def _snapshot_lora(model: nn.Module) -> _LoraState:
    """What tells that a LoRA parameter was not touched: the object, its version counter, dtype, requires_grad."""
    return {n: (p, p._version, p.dtype, p.requires_grad) for n, p in lora_parameters(model).items()}


def _clear_zero_rows(weight: Any) -> None:
    """Turn the NaN of rows whose scale is 0 into zeros, in place (torchao 0.14 to 0.18 divide 0 by 0 there).

    Also serves float16 rows so small (amax below 1.4e-5) that their scale underflows: they become zeros.
    """
    is_zero = weight.scale == 0  # [out, 1]
    weight.qdata.view(torch.uint8).masked_fill_(is_zero, 0)
    weight.scale.masked_fill_(is_zero, 1.0)


def _check_lora(model: nn.Module, lora_before: _LoraState) -> None:
    lora_after = _snapshot_lora(model)
    touched = [name for name in lora_before if _differs(lora_before[name], lora_after.get(name))]
    if touched or len(lora_after) != len(lora_before):
        raise RuntimeError(f"quantizing changed LoRA weights: {', '.join(touched[:3])}; load the model again")
    if any(requires_grad for *_, requires_grad in lora_after.values()):  # a LoRA that is only run may be frozen
        assert_lora_intact(model)


def _differs(
    before: tuple[nn.Parameter, int, torch.dtype, bool], after: tuple[nn.Parameter, int, torch.dtype, bool] | None
) -> bool:
    return after is None or before[0] is not after[0] or before[1:] != after[1:]
