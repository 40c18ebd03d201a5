"""Optimizers by name, their state as plain tensors and values, the learning rate of a step, and the LoRA's average."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..config.job import OptimizerConfig, ScheduleConfig

# Modules of optimizers that a job may name. Any other is imported only if the job says so.
_MODULES = (
    "torch.optim",
    "torchao.optim",
    "bitsandbytes.optim",
    "prodigyopt",
    "pytorch_optimizer",
    "lion_pytorch",
    "dadaptation",
    "came_pytorch",
)
# Names that a job may say in place of a class.
_CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "torchao.optim.AdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
    "came": "pytorch_optimizer.CAME",
}
AVERAGE = "ema."  # in front of the names of its tensors
_GROWTH_INTERVAL = 2000
_SHARE = "lr_share"  # of a group whose rate is so much of the others'
_OF_JOB = ("lr", "weight_decay", _SHARE)  # values of a group that the job says; others are the optimizer's own
_UNFIT = {
    "torch.optim.LBFGS": "computes the loss several times per step, which this loop does once",
    "torch.optim.SparseAdam": "is for sparse gradients, and a LoRA's are dense",
    "torch.optim.Optimizer": "is what optimizers are made from, and none itself",
}


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, num_of_text: int = 0
) -> torch.optim.Optimizer:
    """The optimizer of a name of _CLASSES or a dotted one over these parameters, of which the last num_of_text have the
    config's rate for text encoders. Raises: ValueError if the class is of a package that may not be imported, cannot be
    found or used here, is no optimizer, or rejects the options."""
    cls = _find_class(_CLASSES.get(config.name, config.name), config.allow_import)
    options = {**config.options, "lr": config.learning_rate}
    if "weight_decay" in inspect.signature(cls).parameters:
        options.setdefault("weight_decay", config.weight_decay)
    groups: list[Any] = list(parameters)
    share = config.text_rate / config.learning_rate
    if num_of_text and share != 1:  # text encoders have a rate of their own
        cut = len(groups) - num_of_text
        groups = [{"params": groups[:cut]}, {"params": groups[cut:], "lr": config.text_rate, _SHARE: share}]
    try:
        return cls(groups, **options)
    except TypeError as error:
        raise ValueError(f"optimizer {config.name!r} does not take the options {options}: {error}") from error


def _find_class(name: str, allow_import: bool) -> type[torch.optim.Optimizer]:
    module, _, attribute = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"there is no optimizer {name!r}; use {', '.join(_CLASSES)} or a dotted class name")
    if name in _UNFIT:
        raise ValueError(f'optimizer {name!r} {_UNFIT[name]}; use another, such as "adamw"')
    if module not in _MODULES and not allow_import:
        found = f"optimizer {name!r} is of a module that is not imported by name, because importing runs its code"
        helps = f"use a class of {', '.join(_MODULES)}, or allow it in the job file with optimizer.allow_import = true"
        raise ValueError(f"{found}; {helps}")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        package = module.partition(".")[0]
        remedy = f'run: "{sys.executable}" -m pip install --upgrade {package.replace("_", "-")}'
        if module not in _MODULES or package == "torch":  # which pip may not have, or in another build
            remedy = f"install the package that {package} is of"
        raise ValueError(f"optimizer {name!r} cannot be imported ({error}); {remedy}") from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"{name!r} is not a torch.optim.Optimizer class but {cls!r}")
    return cls


@dataclass
class LossScale:
    """What gradients are multiplied by, so that float16 holds the small ones, by the rules and numbers of torch's
    GradScaler: a step that overflows is left out and halves the factor, so many good ones in a row double it."""

    factor: float = 2.0**16
    num_good: int = 0

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.factor

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients in place, which is exact."""
        for each in parameters:
            if each.grad is not None:
                each.grad.div_(self.factor)

    def allows(self, is_finite: bool) -> bool:
        """Whether a step is made, or refused since gradients are not finite and the factor is as low as it gets."""
        if is_finite:
            self.num_good += 1
            if self.num_good == _GROWTH_INTERVAL:
                self.factor, self.num_good = self.factor * 2, 0
        elif self.factor > 1:
            self.factor, self.num_good = self.factor / 2, 0
            return False
        return True


class LoraAverage:
    """The exponential moving average (EMA) of a LoRA's parameters, in float32. A step keeps min(decay, (1 + t) / (10 +
    t)) of it, so that the fresh LoRA is soon forgotten."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = dict(parameters), decay
        self._values = {name: each.detach().float().clone() for name, each in parameters.items()}
        self._by_device: dict[torch.device, list[str]] = {}  # foreach takes tensors of one
        for name, each in parameters.items():
            self._by_device.setdefault(each.device, []).append(name)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the parameters after this step, counted from 1."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        for names in self._by_device.values():
            now = [self._parameters[name].detach().float() for name in names]
            torch._foreach_lerp_([self._values[name] for name in names], now, weight)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters are the average."""
        trained = {name: each.detach().clone() for name, each in self._parameters.items()}
        try:
            self._set(self._values)
            yield
        finally:
            self._set(trained)

    @torch.no_grad()
    def _set(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, each in self._parameters.items():
            each.copy_(values[name])

    def tensors(self) -> dict[str, torch.Tensor]:
        """The average on the CPU, by "ema.<name>"."""
        return {f"{AVERAGE}{name}": each.cpu() for name, each in self._values.items()}

    def load_tensors(self, tensors: Mapping[str, torch.Tensor], *, may_begin: bool = False) -> None:
        """Put back those of a checkpoint's LoRA that are of the average, bit for bit; of none it may begin with the
        parameters. Raises: ValueError for others."""
        saved = {name: each for name, each in tensors.items() if name.startswith(AVERAGE)}
        if not saved and may_begin:
            saved = {f"{AVERAGE}{name}": each.detach() for name, each in self._parameters.items()}
        expected = {f"{AVERAGE}{name}": each for name, each in self._values.items()}
        if {name: each.shape for name, each in saved.items()} != {n: each.shape for n, each in expected.items()}:
            raise ValueError("the saved average is not of this LoRA")
        for name, each in expected.items():
            each.copy_(saved[name])


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Of step 0 .. num_steps - 1: rises linearly over warmup_steps, is 1 in the step after them, then stays, or falls
    to min_factor in the last step, linearly or along half a cosine."""
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, num_steps - 1 - schedule.warmup_steps))
    fall = progress if schedule.name == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - schedule.min_factor) * fall


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> float:
    """Scale gradients down to a length of `limit`; returns theirs, of the same bits however devices share them."""
    given = [each for each in parameters if each.grad is not None]
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(given):
        by_device.setdefault(each.device, []).append(index)
    lengths = torch.empty(len(given))
    for indices in by_device.values():
        found = torch._foreach_norm([given[index].grad for index in indices])  # type: ignore[misc]
        lengths[indices] = torch.stack([each.float() for each in found]).cpu()
    length = torch.linalg.vector_norm(lengths)
    nn.utils.clip_grads_with_norm_(given, limit, length)
    return length.item()


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set it in every group, or its share of it; torchao keeps it as a tensor, which is filled in place."""
    for group in optimizer.param_groups:
        own = value * group.get(_SHARE, 1)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(own)
        else:
            group["lr"] = own


_KEY = re.compile(r"(state|group)\.(\d+)\.(.+)")
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"})

_CPU = torch.device("cpu")
Packed = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors by name, and what else there is to say


def pack_optimizer(optimizer: torch.optim.Optimizer) -> Packed:
    """State of an optimizer for unpack_optimizer. Raises: ValueError for other than tensors and plain values."""
    entries = [
        (f"state.{index}.{name}", value, parameter.device)
        for index, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    ]
    entries += [
        (f"group.{index}.{name}", value, _CPU)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    ]
    tensors: dict[str, torch.Tensor] = {}
    values = {key: _pack(key, value, device, tensors) for key, value, device in entries}
    return tensors, values


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: Packed, *, keeps_rates: bool = False) -> None:
    """Put packed state, bit for bit, into a fresh optimizer over the same parameters in the same order. keeps_rates: it
    keeps its own rates, weight decay and number of groups, of which further ones begin with what the last had found.
    Raises: ValueError naming the first value of another optimizer or other parameters."""
    tensors, values = packed
    parameters, groups = _parameters(optimizer), optimizer.param_groups
    own = [{name: group[name] for name in _OF_JOB if name in group} for group in groups]
    last = max((int(key.split(".")[1]) for key in values if re.match(r"group\.\d+\.", key)), default=0)
    for key, description in values.items():
        try:
            section, number, name = _KEY.fullmatch(key).groups()  # type: ignore[union-attr]  # AttributeError
            if section == "group" and keeps_rates and int(number) >= len(groups):
                continue
            places: Any = groups if section == "group" else parameters
            place = places[int(number)]
            device = _CPU if section == "group" else place.device
            value = _unpack(key, description, device, tensors)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"{key} is not of this optimizer over {len(parameters)} parameters ({error!r})") from error
        if section == "group":
            for group in groups[int(number) :] if keeps_rates and int(number) == last else [place]:
                group[name] = value
            continue
        if name in _LIKE_PARAMETER and value.shape != place.shape:
            raise ValueError(f"{key} has shape {list(value.shape)}, and its parameter {list(place.shape)}")
        optimizer.state[place][name] = value
    for index, group in enumerate(groups):
        if not any(key.startswith(f"group.{min(index, last) if keeps_rates else index}.") for key in values):
            raise ValueError(f"group.{index} is missing")
        if keeps_rates:
            group |= own[index]
            if _SHARE not in own[index]:
                group.pop(_SHARE, None)


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pack(key: str, value: Any, device: torch.device, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        place = "parameter" if value.device == device and (device != _CPU or value.dim()) else "cpu"
        if hasattr(value, "__tensor_flatten__"):
            names, given = value.__tensor_flatten__()
            for name in names:
                tensors[f"{key}.{name}"] = getattr(value, name).detach().to("cpu", copy=True).contiguous()
            cls = type(value)
            return {
                "kind": "composite",
                "place": place,
                "class": f"{cls.__module__}:{cls.__qualname__}",
                "names": names,
                "context": [
                    {"dtype": str(item).removeprefix("torch.")} if isinstance(item, torch.dtype) else item
                    for item in given
                ],
                "shape": list(value.shape),
                "stride": list(value.stride()),
            }
        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {"kind": "tensor", "place": place}
    if isinstance(value, tuple):
        return {"kind": "tuple", "items": list(value)}
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return {"kind": "plain", "value": value}
    raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}, which cannot be saved; use another one")


def _unpack(key: str, description: dict[str, Any], device: torch.device, tensors: dict[str, torch.Tensor]) -> Any:
    kind = description["kind"]
    if kind == "plain":
        return description["value"]
    if kind == "tuple":
        return tuple(description["items"])
    target = device if description["place"] == "parameter" else _CPU
    if kind == "tensor":
        return tensors[key].to(target, copy=True)
    module, _, name = description["class"].partition(":")
    if not module.startswith("torchao."):
        raise ValueError(f"{key} is a {description['class']}; only torchao's 8-bit optimizer states can be restored")
    parts = {part: tensors[f"{key}.{part}"].to(target) for part in description["names"]}
    cls = getattr(importlib.import_module(module), name)
    context = [getattr(torch, item["dtype"]) if isinstance(item, dict) else item for item in description["context"]]
    return cls.__tensor_unflatten__(parts, context, torch.Size(description["shape"]), tuple(description["stride"]))
