"""The checkpoints of a run: folders that are written under a temporary name, synced and renamed, with the digests of
all files in state.json. Tensors are safetensors, everything else is JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..checkpoints.weight_file import load_tensors, tensors_in_pieces
from ..config.ranges import STATE_FILES
from ..system.files import (
    expect,
    parse_json_object,
    read_ordinary,
    remove_leftovers,
    sync_folder,
    what_helps,
    write_atomically,
)

_log = logging.getLogger(__name__)

_FOLDER = re.compile(r"^step-(\d{6,})$")
_VERSION = 2  # 1 had no digests
_READ_VERSIONS = (1, 2)
_STATE = "state.json"
_MOST_BYTES = 1 << 40
_DIGEST = "digest"  # of everything else in state.json
_CHANGED = "continued.json"  # in a checkpoint: what a run that goes on from it with other settings says in place of it


class DamagedCheckpoint(ValueError):
    """A checkpoint is not what was written; the message names the file and says what was found."""


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to continue."""

    step: int  # optimizer steps done
    adapter: dict[str, torch.Tensor]
    optimizer: tuple[dict[str, torch.Tensor], dict[str, Any]]  # of pack_optimizer
    random: dict[str, torch.Tensor]  # generator states by device name
    facts: dict[str, Any] = field(default_factory=dict)  # plain values: job, dataset, position in the data, losses
    path: Path | None = None  # where it was read from
    own: dict[str, Any] = field(default_factory=dict)  # facts saved with it, under those of change_facts


def save_checkpoint(folder: Path, state: TrainingState, keep_last: int) -> Path:
    """Write folder/step-NNNNNN and delete older ones beyond keep_last; returns it. Raises: OSError naming the file."""
    final = folder / f"step-{state.step:06d}"
    working = folder / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(working, ignore_errors=True)
    try:
        working.mkdir(parents=True)
        tensors, description = state.optimizer
        digests = {}
        for name, content in zip(STATE_FILES, (state.adapter, tensors, state.random), strict=True):
            data = b"".join(tensors_in_pieces(content))
            digests[name] = hashlib.sha256(data).hexdigest()
            write_atomically(working / name, data)
        facts = {"version": _VERSION, "step": state.step, "files": digests, "optimizer": description, **state.facts}
        write_atomically(working / _STATE, _sealed(facts))
        sync_folder(working)
        if final.exists():  # of the same step of the same run
            _discard(final)
        working.rename(final)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(working, ignore_errors=True)  # on a full disk it is in the way of the next attempt
        raise unsaved(final, error) from error
    for old in list_checkpoints(folder)[:-keep_last]:
        _discard(old)
    sweep_checkpoints(folder)
    return final


def unsaved(path: Path, error: OSError) -> OSError:
    """The same error with what could not be saved, and what would help."""
    return OSError(error.errno, f"{path} cannot be written: {error.strerror or error}; {what_helps(error)} and resume")


def change_facts(state: TrainingState, facts: Mapping[str, Any]) -> TrainingState:
    """The state with these facts over its own, from now on; {} takes them back. Raises: OSError naming the file."""
    assert state.path is not None
    if facts:
        write_atomically(state.path / _CHANGED, _sealed(facts))
    else:
        (state.path / _CHANGED).unlink(missing_ok=True)
    return replace(state, facts={**state.own, **facts})


def _sealed(facts: Mapping[str, Any]) -> bytes:
    """The facts as JSON, with the digest of themselves in front."""
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps({_DIGEST: digest, **facts}).encode()


def _discard(path: Path) -> None:
    """Delete a checkpoint; whenever this is interrupted, it is whole or not listed."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def sweep_checkpoints(folder: Path) -> None:
    """Delete what runs that were killed while saving have left. No other run may be using the folder."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in list_checkpoints(folder):
        remove_leftovers(path)


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first; [] if there are none."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _FOLDER.match(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def load_newest(folder: Path, check: Callable[[TrainingState], None]) -> TrainingState | None:
    """The newest checkpoint of a run that is whole and that check accepts; None if there is none. Damaged ones that are
    newer are kept under another name. Raises: ValueError if none is whole, or the newest is of another version."""
    damaged: list[tuple[Path, DamagedCheckpoint]] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            state = load_checkpoint(path)
            check(state)
        except DamagedCheckpoint as error:
            damaged.append((path, error))
            continue
        for broken, why in damaged:
            kept = broken.with_name(f"damaged-{broken.name}")
            shutil.rmtree(kept, ignore_errors=True)
            broken.rename(kept)
            text = "%s. Training goes on from %s, which is whole, and repeats the steps after it; what is left of the"
            _log.warning(f"{text} damaged one is kept as %s", why, path, kept.name)
        return state
    if damaged:
        found = f"No checkpoint in {folder} is whole, so this run cannot be resumed"
        raise ValueError(f"{damaged[0][1]}. {found}; start anew with another output.folder")
    return None


def load_checkpoint(path: Path) -> TrainingState:
    """Read a checkpoint back, and compare it with its digests (version 1 had none). Raises: DamagedCheckpoint naming
    the file; ValueError for another version of this format."""
    file, changed = path / _STATE, path / _CHANGED
    facts, over = _read_sealed(file), _read_sealed(changed) if os.path.lexists(changed) else {}
    version, digests = facts.pop("version", None), facts.pop("files", {})
    if version not in _READ_VERSIONS:
        known = f"this DeviceBridge reads {' and '.join(map(str, _READ_VERSIONS))}"
        helps = "resume with the version of DeviceBridge that wrote it"
        raise ValueError(f"{file} is of version {version!r} of this format, and {known}; {helps}")
    if facts.get("step") != int(path.name.removeprefix("step-")):
        raise DamagedCheckpoint(f"{file} is of step {facts.get('step')!r}, and its folder says {path.name}")
    if version > 1 and digests.keys() != set(STATE_FILES):
        raise DamagedCheckpoint(f"{file} has no digests of {', '.join(STATE_FILES)}")
    tensors = []
    for name in STATE_FILES:
        with _as_damage(path / name):
            if name in digests and hashlib.sha256(_read_bytes(path / name)).hexdigest() != digests[name]:
                raise ValueError(f"{path / name} is damaged: it is not what its digest in {_STATE} says")
            tensors.append(load_tensors(path / name, "it is damaged"))
    adapter, optimizer, random = tensors
    for name, tensor in adapter.items():
        if not torch.isfinite(tensor).all():
            raise DamagedCheckpoint(f"{path / STATE_FILES[0]}: {name} is not finite")
    with _as_damage(file):
        description = expect(facts.pop("optimizer", None), dict, f"{file}: optimizer", "it is damaged")
    return TrainingState(facts.pop("step"), adapter, (optimizer, description), random, facts | over, path, facts)


def _read_sealed(file: Path) -> dict[str, Any]:
    """Raises: DamagedCheckpoint."""
    with _as_damage(file):
        data = _read_bytes(file)
        facts = parse_json_object(data, str(file), "it is damaged")
        if _DIGEST in facts:
            del facts[_DIGEST]
            if _sealed(facts) != data:
                raise ValueError(f"{file} is damaged: it is not what its digest says")
        elif facts.get("version") != 1 or "files" in facts:
            raise ValueError(f"{file} is damaged: it has no digest of itself")
    return facts


@contextmanager
def _as_damage(file: Path) -> Iterator[None]:
    """Whatever is wrong with a file is damage, for it was whole when it was written."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{file} is missing") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DamagedCheckpoint(str(error)) from error


def _read_bytes(file: Path) -> bytes:
    """Raises: ValueError for a pipe, a device or a folder in the file's place; OSError."""
    try:
        return read_ordinary(file, _MOST_BYTES, "the file that was written")
    except ValueError as error:
        raise ValueError(f"{file} is damaged: it {error}") from error
