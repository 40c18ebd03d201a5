"""Optimizers by name, and the learning rate as a function of the step, so that a schedule has no state to save."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable

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
        raise ValueError(f"optimizer {name!r} cannot be imported ({error}); is its package installed?") from error
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
