"""Optimizers by name, their state as plain tensors and values, and the learning rate as a function of the step."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Iterable
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
_UNFIT = {
    "torch.optim.LBFGS": "computes the loss several times per step, which this loop does once",
    "torch.optim.SparseAdam": "is for sparse gradients, and a LoRA's are dense",
    "torch.optim.Optimizer": "is what optimizers are made from, and none itself",
}


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer of this name over these parameters, which may lie on several devices.

    "adamw" is torch's, "adamw8bit" torchao's (state in 8 bit: a quarter of the memory), anything else the dotted name
    of a torch.optim.Optimizer class, e.g. "prodigyopt.Prodigy". The learning rate is the config's, whatever its options
    say.

    Raises: ValueError if the class is of a package that may not be imported, cannot be found, is no optimizer, cannot
        be used here, or rejects the options.
    """
    cls = _find_class(config.name, config.allow_import)
    options = {**config.options, "lr": config.learning_rate}
    if "weight_decay" in inspect.signature(cls).parameters:
        options.setdefault("weight_decay", config.weight_decay)
    try:
        return cls(list(parameters), **options)
    except TypeError as error:
        raise ValueError(f"optimizer {config.name!r} does not take the options {options}: {error}") from error


def _find_class(name: str, allow_import: bool) -> type[torch.optim.Optimizer]:
    if name == "adamw":
        return torch.optim.AdamW
    if name == "adamw8bit":
        name = "torchao.optim.AdamW8bit"
    module, _, attribute = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f'there is no optimizer {name!r}; use "adamw", "adamw8bit" or a dotted class name')
    if name in _UNFIT:
        raise ValueError(f'optimizer {name!r} {_UNFIT[name]}; use another, such as "adamw"')
    if module not in _MODULES and not allow_import:
        raise ValueError(
            f"optimizer {name!r} is of a module that is not imported by name, because importing runs its code; use a "
            f"class of {', '.join(_MODULES)}, or allow it in the job file with optimizer.allow_import = true"
        )
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"optimizer {name!r} cannot be imported ({error}); install its package: pip install {name.split('.')[0]}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ValueError(f"{name!r} is not a torch.optim.Optimizer class but {cls!r}")
    return cls


def learning_rate_factor(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """What the learning rate is multiplied by in step 0 .. num_steps - 1.

    Rises linearly over warmup_steps, reaching 1 in the step after them; then stays, or falls to min_factor in the last
    step, linearly or along half a cosine.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.name == "constant":
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, num_steps - 1 - schedule.warmup_steps))
    fall = progress if schedule.name == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return 1.0 - (1.0 - schedule.min_factor) * fall


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set it in every group; torchao keeps it as a tensor, which is filled in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


# ---- state ----

_KEY = re.compile(r"(state|group)\.(\d+)\.(.+)")
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"})

_CPU = torch.device("cpu")
Packed = tuple[dict[str, torch.Tensor], dict[str, Any]]  # tensors by name, and what else there is to say


def pack_optimizer(optimizer: torch.optim.Optimizer) -> Packed:
    """State of an optimizer for unpack_optimizer; tensors of torchao's 8-bit optimizers are taken apart.

    Raises: ValueError for an optimizer that keeps something other than tensors and plain values.
    """
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


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: Packed) -> None:
    """Put packed state, bit for bit, into a fresh optimizer over the same parameters in the same order.

    Raises: ValueError if it is of another optimizer or of other parameters; names the first value that shows it.
    """
    tensors, values = packed
    parameters = _parameters(optimizer)
    for key, description in values.items():
        try:
            section, index, name = _KEY.fullmatch(key).groups()  # type: ignore[union-attr]  # AttributeError
            places: Any = optimizer.param_groups if section == "group" else parameters
            place = places[int(index)]
            device = _CPU if section == "group" else place.device
            value = _unpack(key, description, device, tensors)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"{key} is not of this optimizer over {len(parameters)} parameters ({error!r})") from error
        if section == "group":
            place[name] = value
            continue
        if name in _LIKE_PARAMETER and value.shape != place.shape:
            raise ValueError(f"{key} has shape {list(value.shape)}, and its parameter {list(place.shape)}")
        optimizer.state[place][name] = value
    for index in range(len(optimizer.param_groups)):
        if not any(key.startswith(f"group.{index}.") for key in values):
            raise ValueError(f"group.{index} is missing")


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pack(key: str, value: Any, device: torch.device, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        place = "parameter" if value.device == device != _CPU else "cpu"
        if hasattr(value, "__tensor_flatten__"):
            return {"kind": "composite", "place": place, **_pack_composite(key, value, tensors)}
        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {"kind": "tensor", "place": place}
    if isinstance(value, tuple):
        return {"kind": "tuple", "items": list(value)}
    if value is None or isinstance(value, (bool, int, float, str, list, dict)):
        return {"kind": "plain", "value": value}
    raise ValueError(f"the optimizer keeps {key} as {type(value).__name__}, which cannot be saved; use another one")


def _pack_composite(key: str, value: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    names, given = value.__tensor_flatten__()
    context = [{"dtype": str(item).removeprefix("torch.")} if isinstance(item, torch.dtype) else item for item in given]
    for name in names:
        tensors[f"{key}.{name}"] = getattr(value, name).detach().to("cpu", copy=True).contiguous()
    cls = type(value)
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "names": names,
        "context": context,
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


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
