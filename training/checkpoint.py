"""The full state of a run on disk, complete or not there at all.

A checkpoint is a folder that is written under a temporary name, synced and renamed, so one that carries its final name
is whole. Tensors are safetensors, everything else is JSON: nothing is pickled, so a checkpoint from anywhere can be
opened safely. Optimizer tensors are kept bit for bit, those of torchao's 8-bit optimizers by their components.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ..files import save_tensors_atomically, sync_folder, write_atomically

_FOLDER = re.compile(r"^step-(\d{6,})$")
_VERSION = 1


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to continue.

    Args:
        step: optimizer steps done.
        adapter: LoRA tensors. optimizer: what pack_optimizer returned. random: generator states by device name.
        facts: plain values: job config, dataset fingerprint, position in the data, losses so far.
    """

    step: int
    adapter: dict[str, torch.Tensor]
    optimizer: tuple[dict[str, torch.Tensor], dict[str, Any]]
    random: dict[str, torch.Tensor]
    facts: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(folder: Path, state: TrainingState, keep_last: int) -> Path:
    """Write folder/step-NNNNNN and delete older ones beyond keep_last; returns the new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{state.step:06d}"
    working = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    tensors, description = state.optimizer
    save_tensors_atomically(working / "adapter.safetensors", state.adapter, {})
    save_tensors_atomically(working / "optimizer.safetensors", tensors, {})
    save_tensors_atomically(working / "random.safetensors", state.random, {})
    facts = {"version": _VERSION, "step": state.step, "optimizer": description, **state.facts}
    write_atomically(working / "state.json", json.dumps(facts).encode())
    sync_folder(working)
    _replace_folder(working, final)
    for old in list_checkpoints(folder)[:-keep_last]:
        _discard(old)
    _sweep(folder)
    return final


def _replace_folder(working: Path, final: Path) -> None:
    """Give working its final name. One that has it already is of the same step of the same run; it goes last."""
    if final.exists():
        _discard(final)
    working.rename(final)
    sync_folder(final.parent)


def _discard(path: Path) -> None:
    """Delete a checkpoint so that it is either there and whole or not listed, whenever this is interrupted."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sweep(folder: Path) -> None:
    """Delete what runs that were killed while saving have left."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; [] if there are none."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FOLDER.match(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_checkpoint(path: Path) -> TrainingState:
    """Read a checkpoint back.

    Raises: ValueError if it was written by another version of this format.
    """
    facts = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if facts.pop("version") != _VERSION:
        raise ValueError(f"{path} was written by another version of DeviceBridge; it can only be resumed with that one")
    return TrainingState(
        step=facts.pop("step"),
        adapter=load_file(path / "adapter.safetensors"),
        optimizer=(load_file(path / "optimizer.safetensors"), facts.pop("optimizer")),
        random=load_file(path / "random.safetensors"),
        facts=facts,
    )


def pack_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State of an optimizer as (tensors by name, plain description); unpack_optimizer puts it back bit for bit.

    Raises: ValueError for an optimizer that keeps something other than tensors and plain values.
    """
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for name, value in optimizer.state.get(parameter, {}).items():
            values[f"state.{index}.{name}"] = _pack(f"state.{index}.{name}", value, parameter.device, tensors)
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                values[f"group.{index}.{name}"] = _pack(f"group.{index}.{name}", value, None, tensors)
    return tensors, values


def unpack_optimizer(optimizer: torch.optim.Optimizer, packed: tuple[dict[str, torch.Tensor], dict[str, Any]]) -> None:
    """Put packed state into a fresh optimizer over the same parameters in the same order."""
    tensors, values = packed
    parameters = _parameters(optimizer)
    for key, description in values.items():
        section, index, name = key.split(".", 2)
        if section == "state":
            parameter = parameters[int(index)]
            optimizer.state[parameter][name] = _unpack(key, description, parameter.device, tensors)
        else:
            optimizer.param_groups[int(index)][name] = _unpack(key, description, torch.device("cpu"), tensors)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _pack(key: str, value: Any, device: torch.device | None, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        place = "parameter" if device is not None and value.device == device and device.type != "cpu" else "cpu"
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
    names, context = value.__tensor_flatten__()
    for name in names:
        tensors[f"{key}.{name}"] = getattr(value, name).detach().to("cpu", copy=True).contiguous()
    cls = type(value)
    return {
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "names": names,
        "context": [_pack_dtype(item) for item in context],
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


def _pack_dtype(item: Any) -> Any:
    return {"dtype": str(item).removeprefix("torch.")} if isinstance(item, torch.dtype) else item


def _unpack_dtype(item: Any) -> Any:
    return getattr(torch, item["dtype"]) if isinstance(item, dict) else item


def _unpack(key: str, description: dict[str, Any], device: torch.device, tensors: dict[str, torch.Tensor]) -> Any:
    kind = description["kind"]
    if kind == "plain":
        return description["value"]
    if kind == "tuple":
        return tuple(description["items"])
    target = device if description["place"] == "parameter" else torch.device("cpu")
    if kind == "tensor":
        return tensors[key].to(target, copy=True)
    module, _, name = description["class"].partition(":")
    if not module.startswith("torchao."):
        raise ValueError(f"{key} is a {description['class']}; only torchao's 8-bit optimizer states can be restored")
    parts = {part: tensors[f"{key}.{part}"].to(target) for part in description["names"]}
    cls = getattr(importlib.import_module(module), name)
    return cls.__tensor_unflatten__(
        parts,
        [_unpack_dtype(item) for item in description["context"]],
        torch.Size(description["shape"]),
        tuple(description["stride"]),
    )
