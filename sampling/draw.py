"""How pictures are drawn, in Euler steps of the model that trains; from latents to pixels, and to a picture file.

What is drawn is kept on the CPU in float32, so a split changes nothing of it. The noise is what diffusers' pipelines
and ComfyUI draw from the same seed. The VAE goes to a device of the run if decoding, whole or in tiles, stays below
what training was forecast to reserve there, so pictures raise no peak. Else the CPU decodes, in float32.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..config.job import JobConfig
from ..data.samples import bucket_step, make_buckets
from ..encoding.vae import load_vae
from ..families.spec import EulerSteps, ModelFamily, Variant
from ..parallel.devices import CPU, device_module, free_bytes, release_cached_memory
from ..planning.dry_run import META, Kernels, MemoryMeter, as_on_card

_TILE = 512  # pixels; diffusers' tiles overlap by a quarter
# What convolutions take besides tensors, and what the allocator loses: not measured, guesses on the safe side.
_WORKSPACE_BYTES, _LOSSES = 256_000_000, 1.25
_CLIP_QUALITY = 90


@dataclass(frozen=True)
class Drawing:
    """How every picture of a job is drawn."""

    guidance: float | None  # for the model's input; None for a model without one
    cfg_scale: float  # of classifier-free guidance; 1 computes a step once
    begin: Callable[[int], EulerSteps]  # the steps of a picture, by its image tokens


def make_drawing(job: JobConfig, family: ModelFamily, variant: Variant) -> Drawing:
    """The job's settings, else what is usual for the model; a guidance input of one of ComfyUI's own models gets what
    the job trains with. Raises: ValueError where nobody has said what is usual."""
    usual, settings = variant.sampling or family.sampling, job.samples
    if usual is None:
        raise ValueError(f"samples.prompts: how {family.title} draws pictures is not described; remove them")
    has_input, host, steps = variant.training_guidance is not None, family.host, settings.steps or usual.steps
    trained = job.objective.guidance if has_input and host is not None else None
    guidance = next(each for each in (settings.guidance, trained, usual.guidance) if each is not None)

    def begin(num_tokens: int) -> EulerSteps:
        return ScheduledSteps(steps, usual.shift(num_tokens, steps)) if host is None else host.euler_steps(steps)

    return Drawing(guidance if has_input else None, 1.0 if has_input else guidance, begin)


class ScheduledSteps(EulerSteps):
    """diffusers' scheduler for models of velocity; see EulerSteps. Levels evenly from 1 to 1 / steps, shifted by s of
    families/spec.py's ShiftRule, then 0."""

    def __init__(self, steps: int, shift: float) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(sigmas=[1 - index / steps for index in range(steps)])
        scheduler.set_begin_index(0)
        self._scheduler = scheduler
        self.levels: torch.Tensor = scheduler.sigmas[:-1]

    def step(
        self, index: int, latents: torch.Tensor, said: torch.Tensor, plain: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        velocity = said if plain is None else plain + scale * (said - plain)
        time = self._scheduler.timesteps[index]
        stepped: torch.Tensor = self._scheduler.step(velocity, time, latents, return_dict=False)[0]
        return stepped


def picture_size(job: JobConfig, family: ModelFamily, variant: Variant, frames: int) -> tuple[int, int, int] | None:
    """Height and width in pixels and frames of every picture, of which the job may leave open the sides and frames.
    None where none are drawn, or as large as the samples that are trained on. frames: of the longest of these.
    Raises: ValueError naming the setting that the model does not take."""
    settings, latent = job.samples, family.latent_of(variant)
    if not settings.prompts:
        return None
    if variant.condition != "none":
        if settings.width or settings.frames:
            why = f"{variant.name} starts from the first frame of a training clip, and its sample clips are as large"
            raise ValueError(f"samples.width, height and frames: {why}; leave them out")
        return None
    ((side, _),) = make_buckets(job.data.largest_resolution, bucket_step(job.data, latent), 1.0)
    width = settings.width or side
    height = settings.height or width
    num_frames = settings.frames or (frames if latent.is_video else 1)
    for name, value in (("width", width), ("height", height)):
        if value % latent.size_multiple:
            near = max(1, round(value / latent.size_multiple)) * latent.size_multiple
            raise ValueError(
                f"samples.{name} = {value} was set, and sides of {variant.name} are multiples of "
                f"{latent.size_multiple}; {near} works"
            )
    if num_frames > 1 and not latent.is_video:
        raise ValueError(f"samples.frames = {num_frames} was set, and {variant.name} makes pictures; leave it out")
    if not latent.is_length(num_frames):
        raise ValueError(
            f"samples.frames = {num_frames} was set, and clips of {variant.name} have {latent.clip_rule} frames; "
            f"{latent.nearest_length(num_frames)} works"
        )
    return height, width, num_frames


# ---- pixels and files


@dataclass
class Decoder:
    """Makes pixels of latents with the VAE at path, on a GPU in dtype; of a family with a host it does. limits: bytes
    that may be reserved on each device that may decode, in order; {} leaves the CPU."""

    family: ModelFamily
    variant: Variant
    path: Path
    dtype: torch.dtype
    limits: Mapping[torch.device, int] = field(default_factory=dict)
    _needs: dict[Any, int] = field(default_factory=dict)

    def decode(self, drawn: Sequence[torch.Tensor]) -> Generator[torch.Tensor, None, None]:
        """Pixels of each, 0..255; every entry of drawn is [1, C, F, H, W]. Yields [F, height, width, 3], uint8, on the
        CPU. Raises: ValueError or OSError for a VAE that cannot be read."""
        if self.family.host is not None:
            yield from self.family.host.decode(self.path, drawn, lambda held: _first_with_room(self.limits, held))
            return
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
    """Bytes of a VAE and of the tensors of its decoding at their peak, counted without data. shape: of the latents,
    [B, C, F, H, W]. kernels: the way operations take; None for that of cards."""
    with META:
        twin = type(vae).from_config(vae.config).to(vae.dtype).eval().requires_grad_(False)
    if is_tiled:
        _use_tiles(twin)
    held = sum(tensor.numel() * tensor.element_size() for tensor in (*twin.parameters(), *twin.buffers()))
    meter = MemoryMeter()
    with torch.no_grad(), as_on_card(kernels or Kernels()), meter:
        family.decode_latents(twin, torch.empty(shape, device=META))
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
