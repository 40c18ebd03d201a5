"""8-bit weights for the frozen linears of a model that trains a LoRA: one entry for every scheme.

    fp8, int8                    stored in 8 bits, multiplied in full precision (weight_only.py)
    fp8-compute, int8-compute    stored and multiplied in 8 bits, forwards and backwards (eight_bit.py)

In full precision stay what the family names in keep_full_precision, and every module that is no nn.Linear. LoRA is
attached afterwards.

A loader hands over each layer as it arrives, so that one layer at a time is in full precision. Nothing can be undone.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

import torch
from packaging.version import Version
from torch import Tensor, nn

from ..families.spec import ModelFamily
from ..patches.lora import is_torchao_tensor, matches_any
from . import kernel_choice, weight_only
from .eight_bit import ROTATIONS, make_rotation, rotate, rotation_for
from .frozen_linear import COMPUTE_SCHEMES, FrozenLinear8
from .weight_only import tensor_bytes

_log = logging.getLogger(__name__)

Scheme = Literal["fp8", "int8", "fp8-compute", "int8-compute"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

# The fastest first; the last works wherever torch does.
BEST_FIRST: tuple[Scheme, ...] = ("fp8-compute", "int8-compute", "fp8", "int8")
QUANTIZED = "quantized"
KEPT = "kept in full precision by the family"
NOT_LINEAR = "not a linear layer"
_NUM_SAMPLED_ROWS = 256  # of a weight, to measure its noise by
_OLDEST_PEFT = "0.19"  # older releases create a LoRA in the base weight's type, and float8 would round it


@dataclass(frozen=True)
class QuantizeSettings:
    """How frozen linears are stored.

    Args:
        rotation: for int8-compute: widest block that rows are rotated in (eight_bit.py); a layer takes the widest that
            is no wider and divides its in_features. 0 for none.
    """

    scheme: Scheme
    rotation: int = 64

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise ValueError(f"there is no scheme {self.scheme!r}; the schemes are {', '.join(SCHEMES)}")
        if self.rotation not in (0, *ROTATIONS):
            raise ValueError(f"rotation {self.rotation} was requested; use one of {[0, *ROTATIONS]}")

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.scheme.startswith("fp8") else torch.int8

    @property
    def is_compute(self) -> bool:
        """Whether products are computed in 8 bits, not only weights stored."""
        return self.scheme in COMPUTE_SCHEMES

    def rotation_of(self, in_features: int) -> int:
        """Block that rotates a layer of this width; 0 for none."""
        if self.scheme != "int8-compute":
            return 0
        return max((block for block in ROTATIONS if block <= self.rotation and in_features % block == 0), default=0)


@dataclass(frozen=True)
class Stored8:
    """A linear's weight in 8 bits as files hold it: W = weight * scale, its columns rotated back in blocks.

    Args:
        weight: float8_e4m3fn or int8. [N, K]    scale: float32, on the same device. [N, 1]
        rotation: block of the rotation (eight_bit.py) that the weight was rounded after, 0 for none.
    """

    weight: Tensor
    scale: Tensor
    rotation: int = 0


class Quantizer:
    """Converts linears one at a time, as a loader hands them over.

    Raises: RuntimeError if a package that the scheme needs is missing or too old.
    """

    def __init__(self, family: ModelFamily, settings: QuantizeSettings) -> None:
        check_packages(settings)
        self.settings = settings
        self._family = family
        self._bytes_before: dict[str, int] = {}
        self._num_taken = self._num_unrotated = 0
        self._noise: dict[str, list[Tensor]] = defaultdict(list)  # layer class -> [signal, noise] per layer

    def is_wanted(self, fqn: str, module: nn.Module) -> bool:
        """Whether a module is one to quantize: a linear that the family does not keep."""
        return _treatment(fqn, module, self._family) == QUANTIZED

    def finish(self, fqn: str, module: nn.Module) -> nn.Module:
        """Round a module whose tensors have their final values and places; returns it, or what takes its place.

        Raises: ValueError for weights that are not finite; RuntimeError if torchao did not leave the layer as promised.
        """
        if not self.is_wanted(fqn, module):
            return module
        assert isinstance(module, nn.Linear)
        self._bytes_before[fqn] = _num_bytes([module])
        exact = module.weight.detach()
        done: nn.Linear
        if self.settings.is_compute:
            block = self.settings.rotation_of(module.in_features)
            done = FrozenLinear8.from_linear(module, self.settings.scheme, rotation=block)  # type: ignore[arg-type]
            done.train(module.training)
        else:
            done = weight_only.convert(module, self.settings.scheme)  # type: ignore[arg-type]
        stored = self.store(done)
        self._noise[layer_class(fqn)].append(sampled_noise(exact, stored.weight, stored.scale, stored.rotation))
        return done

    def can_take(self, stored_dtype: torch.dtype) -> bool:
        """Whether an 8-bit weight of this type can be kept as it is."""
        return stored_dtype is self.settings.stored_dtype

    def take(self, fqn: str, module: nn.Linear, stored: Stored8, dtype: torch.dtype) -> nn.Module:
        """Use a weight that is in 8 bits already; returns what takes the module's place.

        Args:
            module: its bias is in place and stays; its weight is not read and may be on meta.
            stored: on the layer's device, taken over without a copy.
            dtype: that the layer computes in, and that the weight would have in full precision.
        Raises: ValueError for a rotated weight that this scheme cannot multiply with.
        """
        assert self.is_wanted(fqn, module) and self.can_take(stored.weight.dtype), (fqn, stored.weight.dtype)
        if stored.weight.dtype is torch.float8_e4m3fn and stored.weight.device.type != "meta":  # int8 has no NaN
            height = max(1, 2**26 // max(1, stored.weight.shape[1]))
            if any(((bits & 0x7F) == 0x7F).any() for bits in stored.weight.view(torch.uint8).split(height)):
                raise ValueError(f"the weight of {fqn} holds NaN; the checkpoint is damaged, load another")
        assert stored.weight.shape == (module.out_features, module.in_features), (fqn, stored.weight.shape)
        if stored.rotation and self.settings.scheme != "int8-compute":
            raise ValueError(
                f"the weight of {fqn} is stored rotated, which {self.settings.scheme} cannot multiply with; use "
                "int8-compute"
            )
        others = sum(tensor_bytes(p) for name, p in module.named_parameters(recurse=False) if name != "weight")
        self._bytes_before[fqn] = stored.weight.numel() * dtype.itemsize + others
        self._num_taken += 1
        self._num_unrotated += bool(self.settings.rotation_of(stored.weight.shape[1])) and not stored.rotation
        if not self.settings.is_compute:
            scheme: Any = self.settings.scheme
            return weight_only.adopt(module, scheme, stored.weight, stored.scale, dtype)
        rotation = rotation_for(stored.weight, stored.weight.dtype, stored.rotation)
        return FrozenLinear8(stored.weight.contiguous(), stored.scale, module.bias, dtype, rotation)

    def store(self, module: nn.Module) -> Stored8:
        """The 8-bit weight of a converted layer, without a copy; the inverse of take."""
        if isinstance(module, FrozenLinear8):
            return Stored8(module.weight.detach(), module.scale, module.rotation_block)
        return Stored8(*weight_only.values_and_scale(module.weight))

    def close(self, model: nn.Module) -> QuantizeReport:
        """Report on the whole model.

        Raises: ValueError if the family leaves nothing to quantize; RuntimeError if a layer was left out.
        """
        modules: dict[str, dict[str, nn.Module]] = {QUANTIZED: {}, KEPT: {}, NOT_LINEAR: {}}
        for name, module in model.named_modules():  # those that hold parameters themselves
            if any(True for _ in module.parameters(recurse=False)):
                modules[_treatment(name, module, self._family)][name] = module
        if not modules[QUANTIZED]:
            raise ValueError(
                f"{self.settings.scheme} was requested, but {self._family.title} keeps every linear of this "
                f'{type(model).__name__} in full precision; use quantize = "none"'
            )
        missed = [name for name in modules[QUANTIZED] if name not in self._bytes_before]
        if missed:
            raise RuntimeError(f"{len(missed)} layers were never quantized, {missed[0]} first; load the model again")
        groups = {}
        for reason, group in modules.items():
            after = _num_bytes(group.values())
            before = sum(self._bytes_before[name] for name in group) if reason == QUANTIZED else after
            groups[reason] = LayerGroup(tuple(group), before, after)
        counts = self._num_taken, self._num_unrotated
        report = QuantizeReport(self.settings.scheme, groups, decibels(self._noise), *counts)
        _log.info("%s", report.summary())
        return report


def check_packages(settings: QuantizeSettings) -> None:
    """Raises: RuntimeError if a package that a scheme needs is missing or too old."""
    if not settings.is_compute:
        weight_only.import_torchao()
        return
    try:
        found = version("peft")
    except PackageNotFoundError:
        return  # then nobody attaches a LoRA with it
    if settings.scheme == "fp8-compute" and Version(found) < Version(_OLDEST_PEFT):
        raise RuntimeError(
            f"fp8-compute needs peft {_OLDEST_PEFT} or newer and found {found}, which would round the LoRA to float8; "
            "update peft, or use int8-compute"
        )


def refusal(settings: QuantizeSettings, devices: Iterable[torch.device]) -> str:
    """Why one of these devices cannot compute in the scheme, and which scheme would work on all; "" if they can."""
    devices = tuple(devices)
    for device in devices:
        fault = _device_fault(settings.scheme, device)
        if fault:
            others = [s for s in BEST_FIRST if not any(_device_fault(s, each) for each in devices)]
            kind = "" if others[0] in COMPUTE_SCHEMES else ", which only stores in 8 bits,"
            return f"{settings.scheme} was requested, but {fault} ({device}); use {others[0]}{kind} instead"
    return ""


def _device_fault(scheme: Scheme, device: torch.device) -> str:
    if scheme in COMPUTE_SCHEMES:
        return kernel_choice.fault(COMPUTE_SCHEMES[scheme], device)  # type: ignore[index]
    return "" if scheme == "int8" or weight_only.has_float8(device) else "there is no float8 to convert to and from"


def stored_bytes(
    model: nn.Module, family: ModelFamily, blocks: Sequence[str], element_size: int, settings: QuantizeSettings
) -> tuple[list[int], int]:
    """Bytes of each block and of everything else once quantized, element_size for what stays. Works on meta tensors."""
    sizes = dict.fromkeys(blocks, 0)
    rest = 0
    for name, module in model.named_modules():
        size = sum(parameter.numel() for parameter in module.parameters(recurse=False)) * element_size
        if size and _treatment(name, module, family) == QUANTIZED:
            assert isinstance(module, nn.Linear)
            size += stored_linear_bytes(module, settings) - module.weight.numel() * element_size
        block = ".".join(name.split(".")[:2])
        if block in sizes:
            sizes[block] += size
        else:
            rest += size
    return list(sizes.values()), rest


def stored_linear_bytes(linear: nn.Linear, settings: QuantizeSettings) -> int:
    """Bytes of a linear's weight once quantized: a byte per weight, its scales, what else the scheme keeps."""
    per_row = 5 if settings.scheme == "int8" else 4  # torchao's int8 keeps a zero point per row beside the scale
    return linear.weight.numel() + per_row * linear.out_features + 4 * settings.rotation_of(linear.in_features) ** 2


def full_weight(linear: nn.Module) -> Tensor:
    """The weight a linear computes with, in full precision; of a plain linear the weight itself. [N, K]"""
    if isinstance(linear, FrozenLinear8):
        return linear.dequantize()
    weight: Any = linear.weight
    return weight.dequantize() if is_torchao_tensor(weight) else weight


def _treatment(fqn: str, module: nn.Module, family: ModelFamily) -> str:
    if not isinstance(module, nn.Linear):
        return NOT_LINEAR
    parts = fqn.split(".")
    lineage = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return KEPT if any(matches_any(name, family.keep_full_precision) for name in lineage) else QUANTIZED


def _num_bytes(modules: Iterable[nn.Module]) -> int:
    tensors: list[Any] = []
    for module in modules:
        tensors += module.parameters(recurse=False)
        if isinstance(module, FrozenLinear8):
            tensors += module.buffers(recurse=False)  # scales and rotation; those of others are no weights
    return sum(map(tensor_bytes, tensors))


# ---- what was done


@dataclass(frozen=True)
class LayerGroup:
    """Modules treated alike: fqns of those that hold weights of their own, and the bytes of these weights."""

    names: tuple[str, ...]
    bytes_before: int
    bytes_after: int


class GroupTotals:
    """Totals of what holds layers by the reason for their treatment."""

    groups: Mapping[str, LayerGroup]

    @property
    def bytes_before(self) -> int:
        return sum(group.bytes_before for group in self.groups.values())

    @property
    def bytes_after(self) -> int:
        return sum(group.bytes_after for group in self.groups.values())


@dataclass(frozen=True)
class QuantizeReport(GroupTotals):
    """What was done, by reason: QUANTIZED, KEPT and NOT_LINEAR, each present even when empty.

    Args:
        scheme: one of quantize.SCHEMES.
        weight_snr_db: signal to noise of the rounded weights by layer class, in dB, over evenly spaced rows of every
            layer. A class whose layers all came in 8 bits from a file is absent: nobody knows what was lost there.
        num_taken: quantized layers that a file, or the cache of an earlier run, held in 8 bits already.
        num_unrotated: those of them that are not rotated although the scheme would have, had it rounded them.
    """

    scheme: str
    groups: Mapping[str, LayerGroup]
    weight_snr_db: Mapping[str, float] = field(default_factory=dict)
    num_taken: int = 0
    num_unrotated: int = 0

    @property
    def num_quantized(self) -> int:
        return len(self.groups[QUANTIZED].names)

    def summary(self) -> str:
        """One line for a log or a node, sizes in decimal GB."""
        skipped = ", ".join(f"{len(g.names)} {reason}" for reason, g in self.groups.items() if reason != QUANTIZED)
        taken = f" ({self.num_taken} as they were stored)" if self.num_taken else ""
        unrotated = f"; {self.num_unrotated} are not rotated, as their file has them" if self.num_unrotated else ""
        return (
            f"{self.num_quantized} linears to {self.scheme}{taken}, {self.bytes_before / 1e9:.2f} -> "
            f"{self.bytes_after / 1e9:.2f} GB; left alone: {skipped}{unrotated}"
        )


def layer_class(fqn: str) -> str:
    """The name that layers alike share: "blocks.3.attn.to_q" -> "blocks.*.attn.to_q"."""
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


@torch.no_grad()
def sampled_noise(exact: Tensor, values: Tensor, scale: Tensor, rotation: int) -> Tensor:
    """Energy of a weight and of its rounding error, over evenly spaced rows; on the weight's device. [2]"""
    step = math.ceil(exact.shape[0] / _NUM_SAMPLED_ROWS)
    wanted = exact[::step].float()
    found = values[::step].float() * scale[::step]
    if rotation:
        found = rotate(found, make_rotation(rotation).to(found.device).t())
    return torch.stack([wanted.square().sum(dtype=torch.float64), (found - wanted).square().sum(dtype=torch.float64)])


def decibels(noise: Mapping[str, Sequence[Tensor]]) -> dict[str, float]:
    """Signal to noise by layer class, of each layer's sampled_noise."""
    found = {}
    for name, pairs in noise.items():
        signal, error = torch.stack([pair.cpu() for pair in pairs]).sum(0).tolist()
        if signal and error:  # weights of zeros, or of few values, round to themselves
            found[name] = round(10 * math.log10(signal / error), 2)
    return found
