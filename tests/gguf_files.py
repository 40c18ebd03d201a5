"""GGUF files written by hand, and what their blocks mean: a number at a time, as the format is published.

ggml-common.h has the layouts and ggml-quants.c the formulas (dequantize_row_*); nothing of the pack is used here.
"""

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

F = np.float32


class Kind(NamedTuple):
    """number: GGML's. values, size: of a block and its bytes. halves: where its float16 numbers are."""

    number: int
    values: int
    size: int
    halves: tuple[int, ...]
    meaning: Callable[[bytes], list[Any]]


def _half(block: bytes, start: int) -> Any:
    return F(np.frombuffer(block, np.float16, 1, start)[0])


def _of_32(bits: int, has_minimum: bool) -> Callable[[bytes], list[Any]]:
    """Q4_0, Q4_1, Q5_0 and Q5_1."""

    def meaning(block: bytes) -> list[Any]:
        place = 4 if has_minimum else 2
        fifths = 0
        if bits == 5:
            fifths, place = struct.unpack_from("<I", block, place)[0], place + 4
        numbers = [block[place + j] & 15 for j in range(16)] + [block[place + j] >> 4 for j in range(16)]
        numbers = [number | ((fifths >> j) & 1) << 4 for j, number in enumerate(numbers)]
        if has_minimum:
            return [_half(block, 0) * F(number) + _half(block, 2) for number in numbers]
        return [_half(block, 0) * F(number - 2 ** (bits - 1)) for number in numbers]

    return meaning


def _q8_0(block: bytes) -> list[Any]:
    return [_half(block, 0) * F(number) for number in struct.unpack_from("<32b", block, 2)]


def _scale_min(scales: bytes, j: int) -> tuple[int, int]:
    """get_scale_min_k4."""
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return (scales[j + 4] & 15) | (scales[j - 4] >> 6) << 4, (scales[j + 4] >> 4) | (scales[j] >> 6) << 4


def _of_k(block: bytes, numbers: bytes, fifths: bytes) -> list[Any]:
    """Q4_K and Q5_K: runs of 64, the low halves of 32 bytes and then the high ones."""
    found = []
    for part in range(8):
        scale, minimum = _scale_min(block[4:16], part)
        for j in range(32):
            byte = numbers[32 * (part // 2) + j]
            number = (byte >> 4 if part % 2 else byte & 15) | ((fifths[j] >> part) & 1) << 4
            found.append(_half(block, 0) * F(scale) * F(number) - _half(block, 2) * F(minimum))
    return found


def _q6_k(block: bytes) -> list[Any]:
    found = [F(0)] * 256
    scales = struct.unpack_from("<16b", block, 192)
    for half in range(2):
        low, high = block[64 * half : 64 * half + 64], block[128 + 32 * half : 160 + 32 * half]
        for j in range(32):
            numbers = (low[j] & 15, low[j + 32] & 15, low[j] >> 4, low[j + 32] >> 4)
            for quarter, number in enumerate(numbers):
                whole = (number | ((high[j] >> 2 * quarter) & 3) << 4) - 32
                scale = scales[8 * half + j // 16 + 2 * quarter]
                found[128 * half + 32 * quarter + j] = _half(block, 208) * F(scale) * F(whole)
    return found


KINDS: Mapping[str, Kind] = {
    "Q4_0": Kind(2, 32, 18, (0,), _of_32(4, False)), "Q4_1": Kind(3, 32, 20, (0, 2), _of_32(4, True)),
    "Q5_0": Kind(6, 32, 22, (0,), _of_32(5, False)), "Q5_1": Kind(7, 32, 24, (0, 2), _of_32(5, True)),
    "Q8_0": Kind(8, 32, 34, (0,), _q8_0),
    "Q4_K": Kind(12, 256, 144, (0, 2), lambda block: _of_k(block, block[16:], bytes(32))),
    "Q5_K": Kind(13, 256, 176, (0, 2), lambda block: _of_k(block, block[48:], block[16:48])),
    "Q6_K": Kind(14, 256, 210, (208,), _q6_k),
}  # fmt: skip
_PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


def random_blocks(kind: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    """Of a tensor of this shape: all bits random, its float16 numbers of a size that makes weights of about 0.1."""
    rng, form = np.random.default_rng(seed), KINDS[kind]
    blocks = rng.integers(0, 256, (math.prod(shape) // form.values, form.size), dtype=np.uint8)
    step = 2.0 ** -(10 if form.values == 32 and kind != "Q8_0" else 14)
    for start in form.halves:
        scales = rng.uniform(0.5, 1.5, (len(blocks), 1)) * step
        blocks[:, start : start + 2] = scales.astype(np.float16).view(np.uint8)
    return blocks.tobytes()


def meaning(kind: str, data: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """float32, a block at a time."""
    form = KINDS[kind]
    blocks = (data[start : start + form.size] for start in range(0, len(data), form.size))
    return torch.tensor(np.array([form.meaning(block) for block in blocks], np.float32)).reshape(shape)


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def setting(name: str, value: Any) -> bytes:
    """A text, a number (uint32) or a list of numbers (int32) by its name."""
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    if isinstance(value, int):
        return text(name) + struct.pack("<II", 4, value)
    return text(name) + struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def write_gguf(
    path: Path, tensors: Mapping[str, torch.Tensor | tuple[str, tuple[int, ...], bytes]],
    settings: Mapping[str, Any] | None = None, version: int = 3,
) -> Path:  # fmt: skip
    """A file of plain tensors, and of packed ones given as kind, stored shape and blocks. Tensors with more than four
    sides are folded, as ComfyUI-GGUF's converter does."""
    folded = {n: each for n, each in tensors.items() if isinstance(each, torch.Tensor) and each.ndim > 4}
    tensors = {**tensors, **{name: each.flatten(1) for name, each in folded.items()}}
    sides = {f"comfy.gguf.orig_shape.{name}": tuple(each.shape) for name, each in folded.items()}
    said = {"general.architecture": "flux", **sides, **(settings or {})}
    head, infos, data = b"".join(setting(name, each) for name, each in said.items()), b"", b""
    for name, given in tensors.items():
        if isinstance(given, torch.Tensor):
            shape, number = tuple(given.shape), _PLAIN[given.dtype]
            own = given.contiguous().view(torch.uint8).numpy().tobytes()
        else:
            kind, shape, own = given
            number = KINDS[kind].number if kind in KINDS else int(kind)
        infos += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, len(data))
        data += own + bytes(-len(own) % 32)
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(said)) + head + infos
    path.write_bytes(start + bytes(-len(start) % 32) + data)
    return path


def pack(name: str, weight: torch.Tensor, kind: str, seed: int) -> tuple[Any, torch.Tensor]:
    """A tensor for write_gguf, and what it means: random blocks where rows are whole ones, else float16."""
    if weight.ndim == 2 and name.endswith(".weight") and weight.shape[1] % KINDS[kind].values == 0:
        shape = tuple(weight.shape)
        data = random_blocks(kind, shape, seed)
        return (kind, shape, data), meaning(kind, data, shape)
    plain = weight.half() if weight.ndim > 1 else weight.float()
    return plain, plain.float()
