"""What a cache entry is called: a hash of everything that decides its content, and of nothing else.

A renamed image, a moved encoder folder, another device or a second run find their entries again. A changed caption,
setting, weight, resize, crop or type gets a new key, and so does our own code where it changes a result: raise a
version below. What an option adds is in the key only where the option is used, so that older keys stay valid.

The device is left out on purpose: the same encoder on a CPU and a GPU rounds differently but computes the same thing.
So are the versions of torch, transformers, diffusers, Pillow and PyAV: an update would throw away every cache, for
differences that are nearly always none.

Fingerprints of weights. Hashing the 48 GB of a text encoder takes minutes of disk time before every job, so large files
are sampled: the size, the whole safetensors header (every name, type, shape and offset) and `_SAMPLE_BYTES` at the
start, the middle and the end of every tensor. Fine-tuning, merging, quantizing or exchanging a tensor changes it nearly
everywhere, so three samples per tensor see it. What they can miss is an edit by hand of single numbers in between.
Files up to `_WHOLE_FILE_BYTES`, which includes most VAEs and the CLIP encoders, are hashed in full.
Encoders that ComfyUI holds in memory have no file to ask; their weights are sampled in the same way.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..checkpoints.file_header import read_file_header
from ..families.spec import TextEncoderSpec

if TYPE_CHECKING:
    import torch

    from ..data.image import ImageRequest

# Raise when our own code changes what it computes from the same inputs.
TEXT_VERSION = 1
IMAGE_VERSION = 1
CLIP_VERSION = 1  # of how frames are decoded and turned, over and above IMAGE_VERSION
STOCK_VERSION = 1  # how ComfyUI's own encoders are asked, and how their weights are hashed
ROUNDING_VERSION = 1  # of text encoders in 8 bits

_WHOLE_FILE_BYTES = 512 * 2**20
_SAMPLE_BYTES = 4096
_CHUNK_BYTES = 2**20
_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken"})


def text_key(
    text: str,
    spec: TextEncoderSpec,
    *,
    encoder_fingerprint: str,
    tokenizer_fingerprint: str,
    dtype: torch.dtype,
    quantize: str = "none",
) -> str:
    """Key of what one text encoder makes of one text.

    Args:
        text: the caption as the tokenizer gets it, so that cleaning it differently gives another key.
        spec: all of it is in the key; keep_full_precision where something is quantized.
        dtype: type the encoder computes in.
        quantize: what its linears are rounded to; "none" for an encoder that is kept in full precision anyway.
    """
    described = {field.name: getattr(spec, field.name) for field in fields(spec)}
    kept = described.pop("keep_full_precision")
    rounding = {} if quantize == "none" else {"quantize": quantize, "kept": kept, "rounding": ROUNDING_VERSION}
    return settings_fingerprint(
        {
            "what": "text",
            "version": TEXT_VERSION,
            "text": text,
            "spec": described,
            "encoder": encoder_fingerprint,
            "tokenizer": tokenizer_fingerprint,
            "dtype": str(dtype),
            **rounding,
        }
    )


def joint_key(parts: list[str]) -> str:
    """Key of the entry that holds several encoders' results for one caption."""
    return settings_fingerprint({"what": "joint", "parts": parts})


@dataclass(frozen=True)
class LatentSettings:
    """What decides a VAE's latents besides the image."""

    family: str  # families that share a VAE normalise its latents differently
    normalisation_version: int  # of the family's LatentSpec
    vae_fingerprint: str
    dtype: torch.dtype  # the VAE computes in it
    condition: str = "none"  # what the entry holds besides the latents; see Variant


def latent_key(image_fingerprint: str, request: ImageRequest, settings: LatentSettings) -> str:
    """Key of the latents of one image or clip, resized and cropped.

    Args:
        image_fingerprint: hash of the file's bytes, or those of a clip's images; name and place are not in the key.
        request: a clip's frame rate and window are in the key by the frames that they choose.
    """
    return settings_fingerprint(
        {
            "what": "latents",
            "version": IMAGE_VERSION,
            **_request_facts(image_fingerprint, request),
            "family": settings.family,
            "normalisation_version": settings.normalisation_version,
            "vae": settings.vae_fingerprint,
            "dtype": str(settings.dtype),
            **({"condition": settings.condition} if settings.condition != "none" else {}),
        }
    )


def _request_facts(image_fingerprint: str, request: ImageRequest) -> dict[str, Any]:
    clip = {"frames": request.frames, "clip_version": CLIP_VERSION} if request.frames else {}
    return {"image": image_fingerprint, "resize": request.resize, "crop": request.crop, **clip}


def stock_text_key(text: str, fingerprint: str) -> str:
    """Key of what a stock CLIP makes of one text; its fingerprint covers all but the text."""
    return settings_fingerprint({"what": "stock text", "version": STOCK_VERSION, "text": text, "clip": fingerprint})


def stock_latent_key(image_fingerprint: str, request: ImageRequest, fingerprint: str) -> str:
    """Key of what a stock VAE makes of one image or clip; the model's family has no say in it."""
    return settings_fingerprint(
        {
            "what": "stock latents",
            "version": (STOCK_VERSION, IMAGE_VERSION),
            **_request_facts(image_fingerprint, request),
            "vae": fingerprint,
        }
    )


def content_key(tensors: Mapping[str, torch.Tensor]) -> str:
    """Key of tensors that are known by nothing but their content: names, types, shapes and all bytes."""
    return settings_fingerprint({"what": "content", "tensors": _tensor_facts(tensors, math.inf)})


def tensors_fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of weights in memory, on any device: as file_fingerprint samples a file of them. Nothing is moved whole.

    Raises: ValueError naming a tensor that does not show its bytes.
    """
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return settings_fingerprint(_tensor_facts(tensors, math.inf if num_bytes <= _WHOLE_FILE_BYTES else _SAMPLE_BYTES))


def _tensor_facts(tensors: Mapping[str, torch.Tensor], sample_bytes: float) -> dict[str, Any]:
    return {
        name: (str(tensor.dtype), list(tensor.shape), _hash_bytes(name, tensor, sample_bytes))
        for name, tensor in tensors.items()
    }


def _hash_bytes(name: str, tensor: torch.Tensor, sample_bytes: float) -> str:
    """Of all bytes if they are up to 3 * sample_bytes, else of as many at the start, in the middle and at the end."""
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_sparse:
        raise ValueError(
            f"{name} is a {type(tensor).__name__} on {tensor.device}, whose bytes cannot be hashed; load the weights "
            "with a loader that keeps plain tensors, such as ComfyUI's own"
        )
    flat = tensor.detach().reshape(-1)  # a view where the tensor is contiguous
    count = flat.numel()
    length = count if 3 * sample_bytes >= count * flat.element_size() else int(sample_bytes) // flat.element_size()
    starts = {0} if length == count else {0, (count - length) // 2, count - length}
    digest = hashlib.sha256()
    for start in sorted(starts):
        part = flat[start : start + length].to("cpu").contiguous()
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_fingerprint(path: str | Path) -> str:
    """Hash of a file's bytes: all of them, or a sample for large safetensors (see the top of this file).

    Raises: OSError if it cannot be read; ValueError for a large safetensors file with a broken header.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if path.suffix == ".safetensors" and size > _WHOLE_FILE_BYTES:
            return _sample(file, size)
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()


def folder_fingerprint(path: str | Path) -> str:
    """Hash of the weights, configs and tokenizer files lying directly in a folder, by name and content.

    Other files (a README, weights in other formats) are never read by us and do not count.

    Raises: ValueError if the folder is missing or holds no such file.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give one with config and safetensors files")
    counts = [f for f in path.iterdir() if f.suffix in _SUFFIXES and not f.name.startswith(".")]
    files = sorted(file for file in counts if file.is_file())
    if not files:
        raise ValueError(f"{path} holds neither safetensors nor config files")
    return settings_fingerprint({file.name: file_fingerprint(file) for file in files})


def _sample(file: BinaryIO, size: int) -> str:
    header = read_file_header(file)
    digest = hashlib.sha256(f"sampled {size} ".encode() + header.text)
    for entry in sorted(header.tensors.values(), key=lambda entry: entry[2:]):
        start, end = header.data_start + entry.start, header.data_start + entry.end
        last = max(start, end - _SAMPLE_BYTES)
        for position in sorted({start, (start + last) // 2, last}):
            file.seek(position)
            digest.update(file.read(min(_SAMPLE_BYTES, end - position)))
    return digest.hexdigest()


def settings_fingerprint(settings: Any) -> str:
    """Hash of plain values, mappings and dataclasses, whatever the order of their keys."""
    text = json.dumps(_plain(settings), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    """The value as JSON knows it; refuses what has no one spelling, rather than hashing its address."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"a key is made of plain values, not of {type(value).__name__}")
