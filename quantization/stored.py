"""Weights as files hold them in few bits, made plain again a piece at a time: what a frozen layer and a loader share.

"Packed" are blocks of GGUF, uint8 [N, K / values * num_bytes], each a run of weights of one row with its own scales, as
in ggml-common.h and ggml-quants.c (MIT). Arithmetic is float32 and rounded once: a layer has the bits of a plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = "rows"  # in the place of a packing: a number per weight, with a scale per row
_PIECE = 2**24  # weights in float32 at a time: 64 MiB, and as much again for what they are made of


@dataclass(frozen=True)
class Packing:
    """How GGUF packs weights."""

    values: int  # of a block
    num_bytes: int  # of a block
    halves: tuple[int, ...]  # where its float16 scales begin
    # Blocks [B, num_bytes], and [B, values] of any type that it writes the weights to. The last operation computes in
    # float32 and rounds to that type: on a card each pass over the weights counts.
    unpack: Callable[[Tensor, Tensor], object]

    def row_bytes(self, width: int) -> int:
        assert width % self.values == 0, (width, self.values)
        return width // self.values * self.num_bytes


def _half(blocks: Tensor, start: int) -> Tensor:
    """A float16 number of each block. [B, 1] float32"""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of all bytes, then the high ones. [..., n] -> [..., 2 n]"""
    halves = packed.new_empty((*packed.shape[:-1], 2, packed.shape[-1]))
    torch.bitwise_and(packed, 15, out=halves[..., 0, :])
    torch.bitwise_right_shift(packed, 4, out=halves[..., 1, :])
    return halves.flatten(-2)


def _bits(packed: Tensor, count: int) -> Tensor:
    """Bit 0 of every byte, then bit 1 and so on. [B, n] -> [B, count, n]"""
    return torch.stack([(packed >> bit) & 1 for bit in range(count)], 1)


def _fives(packed: Tensor) -> Tensor:
    """32 numbers of 5 bits: 4 bytes with the fifth bits, then the others' nibbles. [B, 20] -> [B, 32]"""
    return _nibbles(packed[:, 4:]) | (_bits(packed[:, :4], 8).transpose(1, 2).flatten(1) << 4)


def _sixes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of the eight parts of a block, 6 bits each in 12 bytes, with the block's own. [B, 8, 1] each"""
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], 1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], 1)
    return (_half(blocks, 0) * scales.float())[..., None], (_half(blocks, 2) * minima.float())[..., None]


def _parts_of_32(packed: Tensor) -> Tensor:
    """Numbers of parts 0 and 1 are in the halves of 32 bytes, of 2 and 3 in the next. [B, 128] -> [B, 8, 32]"""
    return _nibbles(packed.unflatten(1, (4, 32))).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _sixes(blocks)
    torch.sub(scales * _parts_of_32(blocks[:, 16:]), minima, out=out.view(-1, 8, 32))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _sixes(blocks)
    numbers = _parts_of_32(blocks[:, 48:]) | (_bits(blocks[:, 16:48], 8) << 4)
    torch.sub(scales * numbers, minima, out=out.view(-1, 8, 32))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))  # [B, 2, 128]
    pairs = blocks[:, 128:192].unflatten(1, (2, 32))
    high = torch.cat([(pairs >> shift) & 3 for shift in (0, 2, 4, 6)], 2)  # [B, 2, 128]
    numbers = (low | (high << 4)).view(torch.int8) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    torch.mul(scales[..., None], numbers.reshape(-1, 16, 16), out=out.view(-1, 16, 16))


# By GGUF's names. What is not here is refused by checkpoints/header.py.
PACKINGS: Mapping[str, Packing] = {
    "Q4_0": Packing(
        32, 18, (0,), lambda x, out: torch.mul(_half(x, 0), _nibbles(x[:, 2:]).view(torch.int8) - 8, out=out)
    ),
    "Q4_1": Packing(32, 20, (0, 2), lambda x, out: torch.add(_half(x, 0) * _nibbles(x[:, 4:]), _half(x, 2), out=out)),
    "Q5_0": Packing(
        32, 22, (0,), lambda x, out: torch.mul(_half(x, 0), _fives(x[:, 2:]).view(torch.int8) - 16, out=out)
    ),
    "Q5_1": Packing(32, 24, (0, 2), lambda x, out: torch.add(_half(x, 0) * _fives(x[:, 4:]), _half(x, 2), out=out)),
    "Q8_0": Packing(32, 34, (0,), lambda x, out: torch.mul(_half(x, 0), x[:, 2:].view(torch.int8), out=out)),
    "Q4_K": Packing(256, 144, (0, 2), _q4_k),
    "Q5_K": Packing(256, 176, (0, 2), _q5_k),
    "Q6_K": Packing(256, 210, (208,), _q6_k),
}


def make_convrot(block: int) -> Tensor:
    """ComfyUI's rotation: a symmetric Hadamard matrix over sqrt(block), a power of 4. [B, B]"""
    matrix = seed = 1.0 - 2.0 * torch.eye(4).flip(1)
    while matrix.shape[0] < block:
        matrix = torch.kron(matrix, seed)
    return matrix / block**0.5


@torch.no_grad()
def restore(values: Tensor, scale: Tensor | None, rotation: Tensor | None, packing: str, dtype: torch.dtype) -> Tensor:
    """Plain weights [N, K], some rows at a time: float32 copies take 64 MiB or one row.

    Args:
        values: 8-bit [N, K], or packed [N, bytes].    rotation: that the rows were rounded after. [B, B]
        scale: float32 [N, 1] or [1, 1]; None for 1. Not read of what is packed.
    """
    packed = None if packing == ROWS else PACKINGS[packing]
    if packed is None and rotation is None:  # every 8-bit value is exact in dtype, and the product one of float32
        return values.to(dtype) if scale is None else values.to(dtype).mul_(scale)
    rows = values.shape[0]
    width = values.shape[1] if packed is None else values.shape[1] // packed.num_bytes * packed.values
    result = torch.empty((rows, width), dtype=dtype, device=values.device)
    scale = None if scale is None or packed is not None else scale.expand(rows, 1)
    height = max(1, _PIECE // max(1, width))
    for start in range(0, rows, height):
        own = slice(start, start + height)
        out = result[own] if rotation is None else torch.empty_like(result[own], dtype=torch.float32)
        if packed is not None:
            packed.unpack(values[own].reshape(-1, packed.num_bytes), out.view(-1, packed.values))
        else:  # float8, which multiplies with nothing else, is exact in bfloat16
            piece = values[own] if values.dtype is torch.int8 else values[own].bfloat16()
            torch.mul(piece, 1 if scale is None else scale[own], out=out)
        if rotation is not None:
            result[own] = (out.view(-1, rotation.shape[0]) @ rotation.to(out.dtype).t()).view(out.shape)
    return result


def columns(values: Tensor, start: int, end: int, packing: str) -> Tensor:
    """Columns of a weight, as restore takes them; both are a multiple of what a block holds, or the end. [N, ...]"""
    if packing == ROWS:
        return values[:, start:end]
    packed = PACKINGS[packing]
    assert start % packed.values == 0, (start, packing)
    return values[:, start // packed.values * packed.num_bytes : -(-end // packed.values) * packed.num_bytes]


def has_finite_scales(values: Tensor, packing: str) -> bool:
    """Of a packed weight."""
    packed = PACKINGS[packing]
    blocks = values.reshape(-1, packed.num_bytes)
    return all(bool(_half(blocks, start).isfinite().all()) for start in packed.halves)
