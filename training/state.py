"""The full state of a run on disk, complete or not there at all.

A checkpoint is a folder that is written under a temporary name, synced and renamed, so one that carries its final name
is whole. What a disk does to it later is found when it is read: state.json holds the digests of the other files, and of
itself. Tensors are safetensors, everything else is JSON: nothing is pickled, so a checkpoint from anywhere can be
opened safely. Optimizer tensors are kept bit for bit, those of torchao's 8-bit optimizers by their components.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from ..checkpoints.weight_file import load_tensors
from ..system.files import remove_leftovers, sync_folder, tensors_as_bytes, what_helps, write_atomically
from ..system.json_file import expect, parse_json_object

_log = logging.getLogger(__name__)

_FOLDER = re.compile(r"^step-(\d{6,})$")
_VERSION = 2  # 1 had no digests
_READ_VERSIONS = (1, 2)
_STATE = "state.json"
_FILES = ("adapter.safetensors", "optimizer.safetensors", "random.safetensors")
_DIGEST = "digest"  # of everything else in state.json
_CHUNK_BYTES = 1 << 22
_KEY = re.compile(r"(state|group)\.(\d+)\.(.+)")
_LIKE_PARAMETER = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg"})


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written; the message names the file and says what was found."""


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to continue.

    Args:
        step: optimizer steps done.
        adapter: LoRA tensors. optimizer: what pack_optimizer returned. random: generator states by device name.
        facts: plain values: job config, dataset fingerprint, position in the data, losses so far.
        path: where it was read from.
    """

    step: int
    adapter: dict[str, torch.Tensor]
    optimizer: tuple[dict[str, torch.Tensor], dict[str, Any]]
    random: dict[str, torch.Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    path: Path | None = None


def save_checkpoint(folder: Path, state: TrainingState, keep_last: int) -> Path:
    """Write folder/step-NNNNNN and delete older ones beyond keep_last; returns the new folder.

    Raises: OSError naming the file if the disk refuses; the checkpoints that are there stay whole.
    """
    final = folder / f"step-{state.step:06d}"
    working = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir(parents=True)
        _write_state(working, state)
        sync_folder(working)
        _replace_folder(working, final)
    except OSError as error:
        shutil.rmtree(working, ignore_errors=True)  # on a full disk it is in the way of the next attempt
        raise unsaved(final, error) from error
    for old in list_checkpoints(folder)[:-keep_last]:
        _discard(old)
    _sweep(folder)
    return final


def unsaved(path: Path, error: OSError) -> OSError:
    """The same error with what could not be saved, and what would help."""
    return OSError(error.errno, f"{path} cannot be written: {error.strerror or error}; {what_helps(error)} and resume")


def _write_state(working: Path, state: TrainingState) -> None:
    tensors, description = state.optimizer
    digests = {}
    for name, content in zip(_FILES, (state.adapter, tensors, state.random), strict=True):
        data = tensors_as_bytes(content)
        digests[name] = hashlib.sha256(data).hexdigest()
        write_atomically(working / name, data)
    facts = {"version": _VERSION, "step": state.step, "files": digests, "optimizer": description, **state.facts}
    write_atomically(working / _STATE, _sealed(facts))


def _sealed(facts: Mapping[str, Any]) -> bytes:
    """The facts as JSON, with the digest of themselves in front."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps({_DIGEST: digest, **facts}).encode()


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


def sweep_checkpoints(folder: Path) -> None:
    """Delete what runs that were killed while saving have left. No other run may be using the folder."""
    _sweep(folder)
    for path in list_checkpoints(folder):
        remove_leftovers(path)


def _sweep(folder: Path) -> None:
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; [] if there are none."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FOLDER.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_newest(folder: Path, check: Callable[[TrainingState], None]) -> TrainingState | None:
    """The newest checkpoint of a run; None if there is none.

    Damaged ones that are newer are kept under another name, and a warning says which steps are trained again.

    Args:
        check: raises DamagedCheckpoint for facts that a run cannot continue from.
    Raises: ValueError if none is whole, or the newest is of another version of this format.
    """
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            state = load_checkpoint(path)
            check(state)
        except DamagedCheckpoint as error:
            damaged.append((path, error))
            continue
        for broken, why in damaged:
            kept = _set_aside(broken)
            _log.warning(
                "%s. Training goes on from %s, which is whole, and repeats the steps after it; what is left of the "
                "damaged one is kept as %s",
                why,
                path,
                kept.name,
            )
        return state
    if damaged:
        raise ValueError(
            f"{damaged[0][1]}. No checkpoint in {folder} is whole, so this run cannot be resumed; start anew in "
            "another output folder"
        )
    return None


def _set_aside(path: Path) -> Path:
    kept = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(kept, ignore_errors=True)
    path.rename(kept)
    return kept


def load_checkpoint(path: Path) -> TrainingState:
    """Read a checkpoint back, and compare it with the digests that were written with it (version 1 had none).

    Raises: DamagedCheckpoint naming the file if it is not what was written; ValueError if it was written by another
        version of this format.
    """
    facts = _read_facts(path / _STATE)
    version, digests = facts.pop("version", None), facts.pop("files", {})
    if version not in _READ_VERSIONS:
        raise ValueError(
            f"{path / _STATE} is of version {version!r} of this format, and this DeviceBridge reads "
            f"{' and '.join(map(str, _READ_VERSIONS))}; resume with the version of DeviceBridge that wrote it"
        )
    if facts.get("step") != int(path.name.removeprefix("step-")):
        raise DamagedCheckpoint(f"{path / _STATE} is of step {facts.get('step')!r}, and its folder says {path.name}")
    if version > 1 and digests.keys() != set(_FILES):
        raise DamagedCheckpoint(f"{path / _STATE} has no digests of {', '.join(_FILES)}")
    adapter, optimizer, random = (_read_tensors(path / name, digests.get(name)) for name in _FILES)
    for name, tensor in adapter.items():
        if not torch.isfinite(tensor).all():
            raise DamagedCheckpoint(f"{path / _FILES[0]}: {name} is not finite")
    return TrainingState(
        step=facts.pop("step"),
        adapter=adapter,
        optimizer=(optimizer, _in_file(path / _STATE, "optimizer", facts.pop("optimizer", None), dict)),
        random=random,
        facts=facts,
        path=path,
    )


def _read_facts(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        facts = parse_json_object(data, str(file), "it is damaged")
    except (ValueError, FileNotFoundError) as error:
        raise DamagedCheckpoint(_first_part(error, file)) from error
    if _DIGEST not in facts:
        if facts.get("version") != 1 or "files" in facts:
            raise DamagedCheckpoint(f"{file} is damaged: it has no digest of itself")
        return facts
    del facts[_DIGEST]
    if _sealed(facts) != data:
        raise DamagedCheckpoint(f"{file} is damaged: it is not what its digest says")
    return facts


def _read_tensors(file: Path, digest: str | None) -> dict[str, torch.Tensor]:
    try:
        if digest is not None:
            with open(file, "rb") as stream:
                if _digest_of(stream) != digest:
                    raise DamagedCheckpoint(f"{file} is damaged: it is not what its digest in {_STATE} says")
        return load_tensors(file, "it is damaged")
    except FileNotFoundError as error:
        raise DamagedCheckpoint(_first_part(error, file)) from error
    except DamagedCheckpoint:
        raise
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from error


def _digest_of(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _first_part(error: Exception, file: Path) -> str:
    return f"{file} is missing" if isinstance(error, FileNotFoundError) else str(error)


def _in_file(file: Path, name: str, value: Any, kind: type) -> Any:
    try:
        return expect(value, kind, f"{file}: {name}", "it is damaged")
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from error


def check_facts(state: TrainingState, kinds: Mapping[str, type]) -> None:
    """Whether a checkpoint says everything a run continues from.

    Raises: DamagedCheckpoint naming the file and the fact that is missing, or of another kind.
    """
    assert state.path is not None
    file = state.path / _STATE
    for name, kind in kinds.items():
        _in_file(file, name, state.facts.get(name), kind)


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
    """Put packed state into a fresh optimizer over the same parameters in the same order.

    Raises: ValueError if it is of another optimizer or of other parameters; names the first value that shows it.
    """
    tensors, values = packed
    parameters = _parameters(optimizer)
    for key, description in values.items():
        try:
            section, index, name = _KEY.fullmatch(key).groups()  # type: ignore[union-attr]  # AttributeError
            places: Any = optimizer.param_groups if section == "group" else parameters
            place = places[int(index)]
            device = torch.device("cpu") if section == "group" else place.device
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
