"""Quantized weights kept on disk, so that the next run reads half the bytes and rounds nothing.

An entry is a folder of safetensors shards and an index. It holds the 8-bit weights that we rounded ourselves, with
their scales; everything else is read from the checkpoint as ever. Loading through it gives the same bits as rounding
again. Its name is a hash of all that decides its content, wherever the checkpoint lies.

A cache must never cost a run: what fails about it is one line in the log, and the weights are rounded as if there were
none. An entry is written beside its name and renamed when whole. Sizes and checksums of the shards' headers, and the
values of all scales, are checked before it is used; single flipped bits among the weights are not looked for.

Two runs may write the same entry: each in a folder of its own, and the first rename wins. What a killed run has left is
removed by a later one, once no shard was added to it for an hour.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ..quantization.quantize import ROUNDINGS, QuantizeSettings, Stored8
from ..system.files import TEMPORARY_SUFFIX, sync_folder
from .checkpoint import CheckpointInfo
from .fingerprint import file_fingerprint, settings_fingerprint
from .header import TensorRecord, read_header
from .quantized_files import read_scales

_log = logging.getLogger(__name__)

_SHARD_BYTES = 10**9  # older safetensors hold a shard twice while they write it
_INDEX = "index.json"
_TYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}
_UNFINISHED = re.compile(rf"^\.[\w.-]+-[0-9a-f]{{20}}\.[0-9a-f]{{32}}{re.escape(TEMPORARY_SUFFIX)}$")
# What reading an index and shards raises that are not what we wrote.
FOREIGN = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, SafetensorError)
_ABANDONED_S = 3600  # without a new shard: a run that writes one adds them within seconds or minutes


def open_cached(
    folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype
) -> CheckpointInfo | None:
    """The same model with the records of its rounded weights pointing into the cache; None if that has no whole entry.

    Reads samples of the checkpoint's files and the scales of the entry. Of a damaged entry one line in the log says so.
    """
    name, key = _name_and_key(info, settings, dtype)
    entry = folder / name
    if not entry.exists():
        return None
    try:
        records = _read_entry(entry, key)
        for tensor, record in records.items():
            shape = info.tensors[tensor].shape
            is_fitting = record.shape == shape and record.scale is not None and record.scale.shape == (shape[0], 1)
            if not is_fitting or record.dtype != _TYPES[settings.stored_dtype]:
                raise ValueError(f"its {tensor} is {record.dtype} {list(record.shape)}")
    except FOREIGN as error:
        _log.warning("%s is damaged and its weights are rounded again (%s)", entry, error)
        return None
    _log.info("%d quantized weights are read from %s", len(records), entry)
    return replace(info, tensors={**info.tensors, **records})


def _name_and_key(info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype) -> tuple[str, str]:
    """The entry's folder, which a user can tell from others, and the whole key."""
    fingerprints = {file: file_fingerprint(file) for file in info.files}
    key = settings_fingerprint(
        {
            "version": ROUNDINGS.get(settings.scheme, 1),
            "tensors": {name: _described(record, fingerprints) for name, record in info.tensors.items()},
            "family": info.family.name,
            "config": info.config,
            "kept": info.family.keep_full_precision,
            "scheme": settings.scheme,
            "rotation": settings.rotation if settings.scheme == "int8-compute" else 0,
            "dtype": str(dtype),
        }
    )
    return f"{info.family.name}-{settings.scheme}-{key[:20]}", key


def _described(record: TensorRecord, fingerprints: Mapping[Path, str]) -> Any:
    """All of a record as plain values, with the file's content in the place of its name."""
    scale = None if record.scale is None else _described(record.scale, fingerprints)
    return [fingerprints[record.file], *astuple(replace(record, file=Path(), scale=None))[1:], scale]


# --- reading ---------------------------------------------------------------------------------------------------------


def _read_entry(entry: Path, key: str) -> dict[str, TensorRecord]:
    """The 8-bit weights of an entry by name."""
    index = json.loads((entry / _INDEX).read_text(encoding="utf-8"))
    if index["key"] != key or index["checksum"] != _checksum(index):
        raise ValueError("its index is damaged, or of another model or of other settings")
    found: dict[str, TensorRecord] = {}
    for file, expected in index["files"].items():
        shard = entry / Path(file).name
        if _measure(shard) != expected:
            raise ValueError(f"{file} is not the file that was written")
        found.update(read_header(shard).records())
    records: dict[str, TensorRecord] = {}
    for layer, rotation in index["rotations"].items():
        weight, scale = found[f"{layer}.weight"], found[f"{layer}.weight_scale"]
        records[f"{layer}.weight"] = replace(weight, scale=scale, rotation=int(rotation))
    read_scales(records)
    return records


def _checksum(index: Mapping[str, Any]) -> str:
    content = {name: value for name, value in index.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _measure(file: Path) -> dict[str, Any]:
    """Size and checksum of the header, which names every tensor, type and offset."""
    with open(file, "rb") as stream:
        length = stream.read(8)
        header = stream.read(min(int.from_bytes(length, "little"), 2**27))
    return {"size": file.stat().st_size, "header": hashlib.sha256(length + header).hexdigest()}


# --- writing ---------------------------------------------------------------------------------------------------------


class QuantizedWriter:
    """Writes an entry while a model is being quantized; as a context manager it commits, or abandons on an error.

    Host memory holds one shard of 1 GB (twice that with safetensors before 0.8) and one layer. After the first failure,
    which the log tells, it does nothing.
    """

    def __init__(self, folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype) -> None:
        name, self._key = _name_and_key(info, settings, dtype)
        self._entry = folder / name
        self._temporary = folder / f".{name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        self._waiting: dict[str, torch.Tensor] = {}
        self._rotations: dict[str, int] = {}
        self._files: dict[str, dict[str, Any]] = {}
        self._is_off = False
        with contextlib.suppress(OSError):  # no such folder, or none that we may change
            for path in folder.iterdir():
                if _UNFINISHED.match(path.name) and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    _log.info("removing %s, which a run left behind", path)
                    shutil.rmtree(path, ignore_errors=True)

    def __enter__(self) -> QuantizedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._waiting:
            self._try(self._write_shard)
        if kind is None and self._files and not self._is_off:
            self._try(self._publish)
        self._abandon()

    def expect(self, num_bytes: int) -> None:
        """Say how much will come, so that a disk too small for it is not filled first."""
        if num_bytes:
            self._try(lambda: self._require_room(num_bytes))

    def add(self, fqn: str, stored: Stored8) -> None:
        """Take a rounded layer; its tensors are copied to the host, and to the disk when a shard is full."""
        if self._is_off:
            return
        tensors = {f"{fqn}.weight": stored.weight, f"{fqn}.weight_scale": stored.scale}
        num_bytes = sum(tensor.nbytes for tensor in (*self._waiting.values(), *tensors.values()))
        if self._waiting and num_bytes > _SHARD_BYTES:
            self._try(self._write_shard)
        if self._is_off:
            return
        self._waiting |= {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        self._rotations[fqn] = stored.rotation

    def _abandon(self) -> None:
        """Remove what was written and not committed."""
        self._is_off = True
        self._waiting.clear()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _try(self, step: Callable[[], None]) -> None:
        """Run a step that may fail without anyone being harmed but the next run."""
        if self._is_off:
            return
        try:
            step()
        except (OSError, SafetensorError) as error:  # its library turns a full disk into an error of its own
            _log.warning("the quantized weights are not kept for the next run: %s", error)
            self._abandon()

    def _require_room(self, num_bytes: int) -> None:
        """Raises: OSError naming the folder and the bytes missing."""
        folder = self._entry.parent
        folder.mkdir(parents=True, exist_ok=True)
        missing = num_bytes - shutil.disk_usage(folder).free
        if missing > 0:
            raise OSError(f"{folder} has {missing} bytes ({missing / 1e9:.2f} GB) too little room")

    def _write_shard(self) -> None:
        from safetensors.torch import save_file

        self._require_room(sum(tensor.nbytes for tensor in self._waiting.values()))
        if not self._files:
            self._temporary.mkdir()
        file = self._temporary / f"weights-{len(self._files) + 1:05d}.safetensors"
        save_file(self._waiting, file)
        self._waiting.clear()
        _flush(file)
        self._files[file.name] = _measure(file)

    def _publish(self) -> None:
        """Write the index and rename; whoever comes second keeps what is there, unless it is damaged."""
        index = {"key": self._key, "files": self._files, "rotations": self._rotations}
        index["checksum"] = _checksum(index)
        file = self._temporary / _INDEX
        file.write_text(json.dumps(index, indent=1), encoding="utf-8")
        _flush(file)
        sync_folder(self._temporary)
        if self._is_written():
            return
        if self._entry.exists():  # damaged: it goes under another name first, so that nobody reads half of it
            aside = self._entry.parent / f".{self._entry.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
            self._entry.rename(aside)
            if aside.is_dir():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink()
        try:
            self._temporary.rename(self._entry)
        except OSError:
            if not self._is_written():
                raise
            return
        sync_folder(self._entry.parent)
        num_bytes = sum(each["size"] for each in self._files.values())
        _log.info("%d quantized weights are kept in %s (%.2f GB)", len(self._rotations), self._entry, num_bytes / 1e9)

    def _is_written(self) -> bool:
        """Whether a whole entry lies at our name."""
        try:
            return bool(_read_entry(self._entry, self._key))
        except FOREIGN:
            return False


def _flush(file: Path) -> None:
    """Wait until the disk holds a file's content."""
    with open(file, "rb+") as stream:
        os.fsync(stream)
