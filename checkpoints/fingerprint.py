"""Hashes of files, weights and settings by their content: a moved or renamed file has the same one.

Files up to `_WHOLE_FILE_BYTES` are hashed in full; of larger ones the size, the header, and `_SAMPLE_BYTES` at the
start, the middle and the end of every tensor. An edit by hand of single numbers may be missed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from .header import GGUF_ENDING, read_open_header

_WHOLE_FILE_BYTES = 512 * 2**20
_SAMPLE_BYTES = 4096
_SETTINGS_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken"})


def settings_fingerprint(settings: Any) -> str:
    """Hash of plain values, mappings and dataclasses, whatever the order of their keys."""
    text = json.dumps(_plain(settings), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a key is made of plain values, not of {type(value).__name__}")


def file_fingerprint(path: str | Path) -> str:
    """Hash of a file's bytes, or a sample of them. Raises: OSError if it cannot be read; ValueError for a large
    safetensors file with a broken header."""
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix in (".safetensors", GGUF_ENDING) and size > _WHOLE_FILE_BYTES:
            header = read_open_header(file)
            digest = hashlib.sha256(f"sampled {size} ".encode() + header.text)
            for entry in sorted(header.tensors.values(), key=lambda entry: entry[2:]):
                start, end = header.data_start + entry.start, header.data_start + entry.end
                last = max(start, end - _SAMPLE_BYTES)
                for position in sorted({start, (start + last) // 2, last}):
                    file.seek(position)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - position)))
            return digest.hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def folder_fingerprint(path: str | Path) -> str:
    """Hash of the weights, configs and tokenizer files directly in a folder, by name and content. Raises: ValueError if
    the folder is missing or holds no such file."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give one with config and safetensors files")
    suffixes = {*_SETTINGS_SUFFIXES, ".safetensors"}
    named = (file for file in sorted(path.iterdir()) if file.suffix in suffixes and not file.name.startswith("."))
    files = [file for file in named if file.is_file()]
    if not files:
        raise ValueError(f"{path} holds neither safetensors nor config files")
    return settings_fingerprint({file.name: file_fingerprint(file) for file in files})


def content_facts(tensors: Mapping[str, torch.Tensor], sample_bytes: float = math.inf) -> dict[str, Any]:
    """Type, shape and hash of every tensor, on any device: of all bytes if they are up to 3 * sample_bytes, else of as
    many at the start, in the middle and at the end. Raises: ValueError naming a tensor that does not show its bytes."""
    facts = {}
    for name, tensor in tensors.items():
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_sparse:
            raise ValueError(
                f"{name} is a {type(tensor).__name__} on {tensor.device}, whose bytes cannot be hashed; load the "
                "weights with a loader that keeps plain tensors, such as ComfyUI's own"
            )
        flat = tensor.detach().reshape(-1)  # a view where the tensor is contiguous
        count, size = flat.numel(), flat.element_size()
        length = count if 3 * sample_bytes >= count * size else int(sample_bytes) // size
        digest = hashlib.sha256()
        for start in sorted({0} if length == count else {0, (count - length) // 2, count - length}):
            part = flat[start : start + length].to("cpu").contiguous()
            digest.update(part.view(torch.uint8).numpy().data)
        facts[name] = (str(tensor.dtype), list(tensor.shape), digest.hexdigest())
    return facts


def tensors_fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of weights in memory: as file_fingerprint samples a file of them. Raises: as content_facts."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return settings_fingerprint(content_facts(tensors, math.inf if num_bytes <= _WHOLE_FILE_BYTES else _SAMPLE_BYTES))
