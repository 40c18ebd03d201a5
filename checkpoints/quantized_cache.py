"""Quantized weights kept on disk, so that the next run reads half the bytes and rounds nothing.

An entry is a safetensors file of the weights that we rounded ourselves, with their scales; a hash of all that decides
its content is in its metadata. What fails about the cache is one line in the log, and the weights are rounded as if
there were none. Header and scales are checked before use; flipped bits among the weights are not looked for.
"""

from __future__ import annotations

import contextlib
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
from typing import IO, Any

import torch

from ..quantization.quantize import ROUNDINGS, QuantizeSettings, Stored8
from ..system.files import TEMPORARY_SUFFIX, sync_folder
from .checkpoint import CheckpointInfo
from .fingerprint import file_fingerprint, settings_fingerprint
from .header import FILE_TYPES, TensorRecord, read_header
from .quantized_files import read_scales

_log = logging.getLogger(__name__)

_ENTRY_BYTES = 140  # of the header, for a tensor besides its name
_UNFINISHED = re.compile(rf"^\.[\w.-]+-[0-9a-f]{{20}}(\.safetensors)?\.[0-9a-f]{{32}}{re.escape(TEMPORARY_SUFFIX)}$")
_ABANDONED_S = 3600  # a run adds a layer within seconds
FOREIGN = (OSError, ValueError, KeyError)  # what reading a file raises that is not what we wrote


def open_cached(
    folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype
) -> CheckpointInfo | None:
    """The same model, its rounded weights those of the cache; None if that has no whole entry."""
    file, key = _file_and_key(folder, info, settings, dtype)
    if not file.exists():
        return None
    records: dict[str, TensorRecord] = {}
    try:
        header = read_header(file)
        if header.metadata.get("key") != key:
            raise ValueError("it is of another model or of other settings")
        found = header.records()
        for name, record in found.items():
            if not name.endswith("_scale"):
                shape, scale = info.tensors[name].shape, found[f"{name}_scale"]
                wanted = shape, FILE_TYPES[settings.stored_dtype], (shape[0], 1)
                if (record.shape, record.dtype, scale.shape) != wanted:
                    raise ValueError(f"its {name} is {record.dtype} {list(record.shape)}")
                records[name] = replace(record, scale=scale, rotation=settings.rotation_of(shape[1]))
        read_scales(records)
    except FOREIGN as error:
        _log.warning("%s is damaged and its weights are rounded again (%s)", file, error)
        return None
    _log.info("%d quantized weights are read from %s", len(records), file)
    return replace(info, tensors={**info.tensors, **records})


def _file_and_key(
    folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype
) -> tuple[Path, str]:
    """The entry's file and the whole key."""
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
    return folder / f"{info.family.name}-{settings.scheme}-{key[:20]}.safetensors", key


def _described(record: TensorRecord, fingerprints: Mapping[Path, str]) -> Any:
    scale = None if record.scale is None else _described(record.scale, fingerprints)
    return [fingerprints[record.file], *astuple(replace(record, file=Path(), scale=None))[1:], scale]


class QuantizedWriter:
    """Writes an entry while a model is being quantized; as a context manager it commits, or abandons on an error. After
    the first failure, which the log tells, it does nothing. What a killed run has left a later one removes."""

    def __init__(self, folder: Path, info: CheckpointInfo, settings: QuantizeSettings, dtype: torch.dtype) -> None:
        self._file, self._key = _file_and_key(folder, info, settings, dtype)
        self._temporary = folder / f".{self._file.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"
        self._room = 8 * (32 + sum(len(name) + _ENTRY_BYTES for name in info.tensors) // 4)  # for the header
        self._entries: dict[str, Any] = {}
        self._stream: IO[bytes] | None = None
        self._is_off = False
        with contextlib.suppress(OSError):  # no such folder, or none that we may change
            for path in folder.iterdir():
                if _UNFINISHED.match(path.name) and time.time() - path.stat().st_mtime > _ABANDONED_S:
                    _log.info("removing %s, which a run left behind", path)
                    shutil.rmtree(path) if path.is_dir() else path.unlink()  # a folder: of earlier versions

    def __enter__(self) -> QuantizedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._stream is not None:
            self._try(self._publish)
        self._abandon()

    def expect(self, num_bytes: int) -> None:
        """Say how much will come, so that a disk too small for it is not filled first."""

        def require_room() -> None:
            folder = self._file.parent
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(self._file.with_suffix(""), ignore_errors=True)  # of earlier versions, which needs its room
            missing = num_bytes - shutil.disk_usage(folder).free
            if missing > 0:
                raise OSError(f"{folder} has {missing} bytes ({missing / 1e9:.2f} GB) too little room")

        if num_bytes:
            self._try(require_room)

    def add(self, fqn: str, stored: Stored8) -> None:
        self._try(lambda: self._write({f"{fqn}.weight": stored.weight, f"{fqn}.weight_scale": stored.scale}))

    def _try(self, step: Callable[[], None]) -> None:
        if self._is_off:
            return
        try:
            step()
        except OSError as error:
            _log.warning("%s: the quantized weights are not kept for the next run: %s", self._file, error)
            self._abandon()

    def _abandon(self) -> None:
        self._is_off = True
        with contextlib.suppress(OSError):
            if self._stream is not None:
                self._stream.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self._stream is None:
            self._stream = open(self._temporary, "xb")  # noqa: SIM115  (closed by _abandon)
            self._stream.seek(8 + self._room)
        for name, tensor in tensors.items():
            start = self._stream.tell() - 8 - self._room
            self._stream.write(tensor.detach().to("cpu").contiguous().view(torch.uint8).numpy().data)
            ends = [start, start + tensor.nbytes]
            self._entries[name] = {"dtype": FILE_TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}

    def _publish(self) -> None:
        assert self._stream is not None
        text = json.dumps({"__metadata__": {"key": self._key}, **self._entries}).encode().ljust(self._room)
        assert len(text) == self._room, (len(text), self._room)
        num_bytes = self._stream.tell()
        self._stream.seek(0)
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._stream.flush()
        os.fsync(self._stream)
        self._stream.close()
        os.replace(self._temporary, self._file)
        sync_folder(self._file.parent)
        num_layers = len(self._entries) // 2
        _log.info("%d quantized weights are kept in %s (%.2f GB)", num_layers, self._file, num_bytes / 1e9)
