"""Training on what ComfyUI's own encoders made, now or earlier, or arrived encoded: does it fit, how is it read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoints.fingerprint import settings_fingerprint
from ..config.job import CacheConfig, JobConfig
from ..data.image import ImageRequest
from ..data.samples import EncodedSample, Sample, TrainingSample, Wanted
from ..encoding.comfy_data import EncodedPair, load_encoded
from ..encoding.comfy_sources import ComfyConditions, ComfyTexts, ComfyTokens
from ..encoding.sources import Shapes
from ..encoding.store import CacheStore
from ..families.comfy.conditions import WAYS
from ..families.comfy.inputs import (
    MORE_SAMPLES,
    NOISE_MASK,
    SAMPLES,
    VOICE,
    ComfyReader,
    num_tokens,
    option_path,
)
from ..families.spec import LatentSpec, ModelFamily, Variant

_MAX_NAMES = 5  # problems spelt out in a message
_ONE_EACH = (
    "train.batch_size is above 1, but {}, so they cannot share a batch; set batch_size 1 (gradient_accumulation_steps "
    "does the same)"
)


@dataclass(frozen=True)
class ComfyEncoders:
    """Encoders that ComfyUI holds in this process (nodes/host/comfy_encoders.py); None where none is needed."""

    clip: Any = None
    vae: Any = None
    conditioner: Any = None  # has both, and what sees
    audio_vae: Any = None

    def named_in(self, cache: CacheConfig) -> CacheConfig:
        """The settings with the names of these encoders."""
        own = {"text_source": self.clip, "latent_source": self.vae, "audio_source": self.audio_vae}
        names = {key: each.fingerprint for key, each in own.items() if each is not None}
        names |= {"vision_source": seen} if (seen := getattr(self.conditioner, "sees_with", "")) else {}
        return replace(cache, **names)


NO_ENCODERS = ComfyEncoders()


def make_comfy_reader(family: ModelFamily, variant: Variant, config: Mapping[str, Any]) -> ComfyReader:
    """Raises: ValueError for a family without a description of ComfyUI's inputs."""
    if family.comfy is None:
        raise ValueError(f"{family.title} cannot be trained on what ComfyUI's encoders make; leave them unconnected")
    return ComfyReader(family.comfy, config, family.latent_of(variant), variant.name)


def refuse_condition(variant: Variant) -> None:
    """Raises: ValueError for a variant whose entries hold more than a LATENT does."""
    if variant.encodes_condition:
        why = f"{variant.name} is also given the first frame as its own VAE encodes it, and not ComfyUI's"
        raise ValueError(f"{why}; leave stock_vae unconnected (cache.latent_source), and give clips, no latents")


def comfy_texts(
    settings: CacheConfig, reader: ComfyReader, encoders: ComfyEncoders, *, of_tokens: bool = False
) -> ComfyTexts:
    """The source that settings.text_source names; of_tokens keeps what encoders are given that compute in every step.
    Raises: ValueError if another CLIP is given than is named."""
    refuse_other(settings.text_source, encoders.clip, "text_source")
    source = ComfyTokens if of_tokens else ComfyTexts
    keeps_all, weighs = reader.comfy.reads_all, settings.caption_weights
    return source(settings.text_source, reader.text_problem, encoders.clip, keeps_all=keeps_all, weighs=weighs)


def comfy_conditions(job: JobConfig, reader: ComfyReader, encoders: ComfyEncoders) -> ComfyConditions:
    """The source of what a job's model is given beside captions."""
    data, cache = job.data, job.cache
    way, size = WAYS[data.condition], data.reference_megapixels
    names = ((cache.text_source, way.reads_text), (cache.latent_source, True), (cache.vision_source, way.sees))
    used = tuple(name for name, takes_part in names if takes_part)
    options = reader.text_problem, size, encoders.conditioner, cache.caption_weights
    return ComfyConditions(data.condition, used, *options)


def refuse_unfit_conditions(
    reader: ComfyReader, store: CacheStore, keys: Mapping[Wanted, str], sharing: Set[Wanted]
) -> None:
    """Refuse entries of another model, and those of sharing that cannot share a batch, by their headers.
    Raises: ValueError."""
    seen: dict[Any, Shapes] = {}
    for wanted, key in keys.items():
        _, condition = wanted
        shapes = store.shapes(key)
        if reason := reader.text_problem(shapes):
            raise ValueError(f"the condition of {condition.paths[0]} does not fit: {reason}")
        cut = condition.control or condition.clip
        group = condition.sizes, cut and (cut.crop[2:], len(cut.frames))
        if wanted in sharing and seen.setdefault(group, shapes) != shapes:
            raise ValueError(_ONE_EACH.format(f"{condition.paths[0]} has conditions of other sizes than another"))


def refuse_other(named: str, given: Any, key: str) -> None:
    """Raises: ValueError if another encoder is given than cache.<key> names."""
    if given is not None and given.fingerprint != named:
        raise ValueError(f"cache.{key} names {named!r}, but the encoder given is {given.fingerprint!r}; give that one")


def refuse_unfit_texts(reader: ComfyReader, store: CacheStore, keys: Mapping[str, str], sharing: Set[str]) -> None:
    """Refuse entries of another model, by caption, and captions of sharing that cannot share a batch, by their headers.
    Raises: ValueError."""
    lengths = {}
    for caption, key in keys.items():
        shapes = store.shapes(key)
        if reason := reader.text_problem(shapes):
            raise ValueError(f"ComfyUI's CLIP does not fit: of the caption {caption!r}, {reason}")
        lengths[caption] = num_tokens(reader.comfy, shapes)
    shared = {caption: lengths[caption] for caption in sharing}
    if len(set(shared.values())) > 1:
        longest = max(shared, key=lambda caption: (shared[caption], caption))
        found = f"ComfyUI's CLIP encodes the captions to {min(shared.values())} to {shared[longest]} tokens"
        raise ValueError(f"{_ONE_EACH.format(found)}, or shorten the longest, {longest[:80]!r}")


def refuse_unfit_latents(reader: ComfyReader, store: CacheStore, keys: Mapping[ImageRequest, str]) -> None:
    """Refuse entries of another model's VAE; reads headers only. Raises: ValueError."""
    for request, key in keys.items():
        if reason := reader.latents_problem(store.shapes(key), len(request.frames) or 1):
            raise ValueError(f"ComfyUI's VAE does not fit: of {request.path}, {reason}")


def read_encoded_samples(path: str, reader: ComfyReader) -> tuple[EncodedSample, ...]:
    """The samples of a list, by their shapes only. Raises: ValueError naming those that do not fit the model."""
    pairs = load_encoded(path)
    problems = []
    for number, pair in enumerate(pairs, start=1):
        if reason := reader.latents_problem(pair.latents_shapes):
            problems.append(f"the latents of sample {number}: {reason}")
        if reason := reader.text_problem(pair.text_shapes):
            problems.append(f"the text of sample {number}: {reason}")
    if problems:
        more = [f"and {len(problems) - _MAX_NAMES} more"] if len(problems) > _MAX_NAMES else []
        raise ValueError("\n".join(["the encoded dataset does not fit the model:", *problems[:_MAX_NAMES], *more]))
    return tuple(_encoded_sample(pair, reader) for pair in pairs)


def _encoded_sample(pair: EncodedPair, reader: ComfyReader) -> EncodedSample:
    sides = pair.latents_shapes[SAMPLES][1:]
    num_frames = reader.latent.num_frames(sides[0]) if reader.comfy.latent_dims == 3 else 1
    flat = (1,) if len(sides) == 1 else ()  # audio without height
    bucket = (*flat, *sides, num_tokens(reader.comfy, pair.text_shapes))
    sound = next((shape for name, shape in pair.latents_shapes.items() if name.startswith(MORE_SAMPLES)), ())
    has_voice = any(option_path(name)[:1] == (VOICE,) for name in pair.text_shapes)
    # What tells apart samples that cannot share a batch: options of their CONDITIONING, noise masks, further streams.
    shapes = {name: list(shape) for name, shape in pair.text_shapes.items() if option_path(name)}
    shapes |= {name: list(shape) for name, shape in pair.latents_shapes.items() if name not in (SAMPLES, NOISE_MASK)}
    if NOISE_MASK in pair.latents_shapes:
        shapes[NOISE_MASK] = []
    return EncodedSample(
        pair.latents,
        (pair.text,),
        bucket,
        num_frames,
        alike=(int(settings_fingerprint([pair.same, shapes])[:8], 16),) if shapes else (),
        has_sound=bool(sound) or has_voice,
        sound=sound,
        has_mask=NOISE_MASK in pair.latents_shapes,
    )


def refuse_batches_with_sound(samples: Sequence[TrainingSample], batch_size: int) -> None:
    """LTX-2 gates what goes between a video and its sound by the largest noise level of a batch; songs have lyrics.
    Raises: ValueError for batches of several samples with sound."""
    if batch_size > 1 and any(sample.has_sound for sample in samples):
        raise ValueError(_ONE_EACH.format("there is sound, whose noise levels are mixed and whose lyrics differ"))


def refuse_missing(samples: Sequence[EncodedSample], store: CacheStore) -> None:
    """Raises: ValueError if an entry of these samples is not in the store."""
    keys = dict.fromkeys(key for sample in samples for key in (sample.latents_key, *sample.text_keys))
    missing = [key for key in keys if key not in store]
    if missing:
        gone = f"{len(missing)} of {len(keys)} entries of the encoded dataset are gone from {store.folder}"
        raise ValueError(f"{gone}; run the Dataset from Latents and Conditioning node again")


def resolution_of(samples: Sequence[TrainingSample], latent: LatentSpec) -> int:
    """Side in pixels of a square as large as the largest encoded sample or sound; of the latter, whose stride is 1, in
    latent cells."""
    cells = max(math.prod(each.bucket if isinstance(each, Sample) else each.bucket[-3:-1]) for each in samples)
    return round(math.sqrt(cells) * latent.spatial_stride)
