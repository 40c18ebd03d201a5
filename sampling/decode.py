"""From latents to pixels, with a VAE that is in memory only meanwhile, and to the bytes of a picture file.

The VAE goes to a device of the run if all that decoding takes there stays below what training was forecast to reserve;
so the peak of a run is the same with pictures and without. Where the whole picture is too much, tiles may fit. Else
the CPU decodes, in float32.
"""

from __future__ import annotations

import io
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..encoding.vae import load_vae
from ..families.spec import HostModel, ModelFamily, Variant
from ..parallel.devices import CPU, device_module, free_bytes, release_cached_memory
from ..planning.dry_run import Kernels, MemoryMeter, as_on_card

_TILE = 512  # pixels; diffusers' tiles overlap by a quarter
# What convolutions take besides tensors, and what the allocator loses: not measured, guesses on the safe side.
_WORKSPACE_BYTES, _LOSSES = 256_000_000, 1.25
_CLIP_QUALITY = 90
_META = torch.device("meta")


@dataclass
class Decoder:
    """Makes pixels of latents.

    Args:
        path: of the VAE. dtype: that it computes in on a GPU.
        limits: bytes that may be reserved on each device that may decode, in order; {} leaves the CPU.
    """

    family: ModelFamily
    variant: Variant
    path: Path
    dtype: torch.dtype
    limits: Mapping[torch.device, int] = field(default_factory=dict)
    _needs: dict[Any, int] = field(default_factory=dict)

    def decode(self, drawn: Sequence[torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        """Pixels of each, 0..255; every entry of drawn is [1, C, F, H, W]. Yields [F, height, width, 3], uint8.

        Raises: ValueError or OSError for a VAE that cannot be read.
        """
        vae = load_vae(self.family, self.variant, self.path, self.dtype)
        try:
            place, is_tiled = self._find_place(vae, max((tuple(each.shape) for each in drawn), key=math.prod))
            vae = vae.to(place) if place != CPU else vae.float()
            if is_tiled:
                _use_tiles(vae)
            for latents in drawn:
                yield self._pixels(vae, latents.to(place))
        finally:
            del vae
            release_cached_memory()

    @torch.no_grad()
    def _pixels(self, vae: Any, latents: torch.Tensor) -> torch.Tensor:
        """Raises: RuntimeError for a picture that is not finite."""
        pixels = self.family.decode_latents(vae, latents)[0].float()
        if not torch.isfinite(pixels).all():
            raise RuntimeError(
                f'the VAE makes numbers of it that are not finite in {vae.dtype}; try cache.dtype = "float32"'
            )
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return levels.permute(1, 2, 3, 0).cpu()

    def _find_place(self, vae: Any, shape: tuple[int, ...]) -> tuple[torch.device, bool]:
        """The device that decodes, and whether in tiles."""
        for is_tiled in (False, True) if self.limits else ():
            if (shape, is_tiled) not in self._needs:
                self._needs[shape, is_tiled] = decoding_bytes(self.family, vae, shape, is_tiled=is_tiled)
            place = _first_with_room(self.limits, self._needs[shape, is_tiled])
            if place != CPU:
                return place, is_tiled
        return CPU, False


@dataclass(frozen=True)
class HostDecoder:
    """As Decoder, with a VAE that ComfyUI loads and runs; it takes tiles by itself where a picture is too much.

    Args:
        path: of the VAE, or of a checkpoint that holds one.
    """

    host: HostModel
    path: Path
    limits: Mapping[torch.device, int] = field(default_factory=dict)

    def decode(self, drawn: Sequence[torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        """See Decoder.decode. Raises: Stopped where the host's user has pressed Cancel."""
        vae = self.host.open_vae(self.path)
        try:
            shape = max((tuple(each.shape) for each in drawn), key=math.prod)
            place = _first_with_room(self.limits, vae.needed_bytes(shape))
            for latents in drawn:
                pixels = vae.decode(latents, place)
                if not torch.isfinite(pixels).all():
                    raise RuntimeError(f"the VAE {self.path} makes numbers of it that are not finite")
                yield (pixels * 255).clamp(0, 255).to(torch.uint8)  # as ComfyUI's Save Image rounds
        finally:
            vae.close()
            release_cached_memory()


def _first_with_room(limits: Mapping[torch.device, int], held: int) -> torch.device:
    """The first device on which so many bytes, and what nobody can count, may still be reserved; else the CPU."""
    needed = int(held * _LOSSES) + _WORKSPACE_BYTES
    for device, limit in limits.items():
        module: Any = device_module(device)
        free = free_bytes(device)
        if module is not None and free is not None and needed <= min(limit - module.memory_reserved(device), free):
            return device
    return CPU


def decoding_bytes(
    family: ModelFamily, vae: Any, shape: tuple[int, ...], *, is_tiled: bool, kernels: Kernels | None = None
) -> int:
    """Bytes of a VAE and of the tensors of its decoding at their peak, counted without data.

    Args:
        shape: of the latents, [B, C, F, H, W].
        kernels: the way operations take; None for that of cards.
    """
    with _META:
        twin = type(vae).from_config(vae.config).to(vae.dtype).eval().requires_grad_(False)
    if is_tiled:
        _use_tiles(twin)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*twin.parameters(), *twin.buffers()))
    meter = MemoryMeter()
    with torch.no_grad(), as_on_card(kernels or Kernels()), meter:
        family.decode_latents(twin, torch.empty(shape, device=_META))
    return held + meter.peak


def _use_tiles(vae: Any) -> None:
    vae.enable_tiling()
    if hasattr(vae, "tile_latent_min_size"):  # as large as the picture by default
        vae.tile_sample_min_size = _TILE
        vae.tile_latent_min_size = _TILE // 2 ** (len(vae.config.block_out_channels) - 1)


def as_file(pixels: torch.Tensor, fps: float) -> tuple[str, bytes]:
    """Ending and content of a file: PNG for one frame, else an animated WebP. pixels: [F, height, width, 3], uint8."""
    frames = [Image.fromarray(frame.numpy()) for frame in pixels]
    file = io.BytesIO()
    if len(frames) == 1:
        frames[0].save(file, "PNG")
        return "png", file.getvalue()
    options = {"save_all": True, "append_images": frames[1:], "duration": round(1000 / fps), "loop": 0}
    frames[0].save(file, "WEBP", quality=_CLIP_QUALITY, **options)
    return "webp", file.getvalue()
