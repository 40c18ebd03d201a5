"""What a job is about, read from headers and images: its model without weights, and its data."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from ..checkpoints.fingerprint import settings_fingerprint
from ..checkpoints.header import FLOAT_TYPES, read_header
from ..checkpoints.load import make_empty_transformer
from ..checkpoints.lora_file import check_lora_layout, check_lycoris_layout, is_of_text
from ..checkpoints.lora_start import read_start, refuse_start
from ..config.job import JobConfig
from ..config.model import shares_rows
from ..data.folders import scan_folders
from ..data.samples import EncodedSample, TrainingSample, as_evaluated
from ..encoding.comfy_data import EncodedPair, load_encoded
from ..families.comfy import inputs
from ..families.comfy.conditions import evaluation_problem, vision_problem, way_problem
from ..families.comfy.text_sizes import CLIP_PARTS
from ..families.spec import LatentSpec, Variant
from ..parallel.local.tokens import RowsError
from ..planning.costs import latent_shape_of, sharing_rows
from ..planning.dry_run import BY_FOREIGN_CODE, META, NoForecast, SampleText, Work, forward_on_meta, make_text
from ..planning.question import make_square
from ..system.stopping import never
from ..training.adapter import find_targets
from .checked_job import ReadJob, Subject
from .encode_job import ONE_EACH, cache_store, captions_of, comfy_conditions, comfy_texts, text_keys, wanted_conditions
from .resolve import refuse_block_settings, sizes_of

_log = logging.getLogger(__name__)
_MUCH_BYTES = 10**9  # of a disk
_MOST_PROBLEMS = 5  # spelt out in a message
_ELEMENT_SIZE = 4  # of text encoders that are trained: they compute in float32, and are held so


def subject_of(read: ReadJob) -> Subject:
    """What decides how it is trained."""
    text = _longest_text(read)
    return Subject(
        read.info,
        read.variant,
        read.model,
        largest=_largest(read),
        train=sizes_of(read.training_samples),
        alone=sizes_of(read.eval_samples),
        text=text,
        picture=read.picture_size,
        disk_note=_disk_note(read, text),
        beside_bytes=text_encoder_bytes(read.job),
        has_empty_caption=read.job.data.caption_dropout > 0
        or not all(caption.strip() for each in read.samples for caption in each.captions),
    )


def _longest_text(read: ReadJob) -> SampleText | None:
    """As far as it is encoded, for one of ComfyUI's own models; nobody asks it of others."""
    if read.family.host is None or read.job.lora.text_encoder:
        return None
    store = cache_store(read.job)
    texts = [each.text_keys[0] for each in read.encoded]
    if read.job.cache.text_source:
        samples, wanted = (*read.samples, *read.eval_samples), wanted_conditions(read)
        made = comfy_conditions(read).keys_of(wanted) if wanted else {}
        keys = {text: (key,) for text, key in comfy_texts(read).keys_of(captions_of(read)).items()}
        texts += [text_keys(text, each.condition, keys, made) for each in samples for text in each.captions]

    def size(keys: tuple[str, ...]) -> int:
        """Of entries that are all there."""
        shapes = [store.shapes(key) for key in keys]
        return sum(math.prod(shape) for each in shapes for shape in each.values()) if all(shapes) else 0

    largest = max(dict.fromkeys(texts), key=size, default=())
    entries = [store.get(key) or {} for key in largest]
    is_known = bool(entries) and all(entries)
    tensors = {name: each for entry in entries for name, each in entry.items()} if is_known else {}
    # what guides say goes by the sides of the sample's own latents; their frames are among the latents'
    tensors = {name: each for name, each in tensors.items() if inputs.GUIDES.isdisjoint(inputs.option_path(name))}
    masked = next((each.latents_key for each in read.encoded if each.has_mask), "")  # which takes more memory
    entry = (store.get(masked) if masked and is_known else None) or {}
    tensors |= {name: each for name, each in entry.items() if name == inputs.NOISE_MASK}
    sounds = [each.sound for each in read.encoded]  # beside videos
    heard = [each.sound for each in read.samples if each.sound and each.frames]
    sounds += [tuple(side or each.cells for side in read.family.comfy.sound) for each in heard]
    if sound := max(sounds, key=math.prod, default=()):
        tensors[f"{inputs.STREAM}1"] = torch.empty(0, *sound)
    return SampleText(tensors) if tensors else None


def _disk_note(read: ReadJob, text: SampleText | None) -> str:
    """How much of the disk its texts take, where that is much; "" also where nobody knows how large one is."""
    if read.encoded or read.job.lora.text_encoder:
        return ""
    count, store = len(captions_of(read)) + len(wanted_conditions(read)), cache_store(read.job).folder
    try:
        made = make_text(read.info, read.variant, text, getattr(torch, read.job.cache.dtype), META)
    except (ValueError, *BY_FOREIGN_CODE):
        return ""
    size = sum(each.nbytes for each in made.values())
    if count * size < _MUCH_BYTES:
        return ""
    there = next(each for each in (store, *store.absolute().parents) if each.is_dir())
    found = f"{count} texts of about {size / 1e6:.1f} MB each take {count * size / 1e9:.1f} GB of the disk in {store}"
    return f"{found}, where {shutil.disk_usage(there).free / 1e9:.1f} GB are free"


def _largest(read: ReadJob) -> tuple[int, int, int]:
    """Height and width in pixels and frames of the samples that take the most."""
    latent = read.family.latent_of(read.variant)
    if latent.audio_rows:
        return read.resolution, read.resolution, 1
    if not read.encoded:
        return max(((*sample.bucket, sample.num_frames) for sample in read.samples), key=math.prod)
    frames = max(sample.num_frames for sample in read.encoded)
    *_, rows, columns, _ = max((sample.bucket for sample in read.encoded), key=lambda each: each[-3] * each[-2])
    return rows * latent.spatial_stride, columns * latent.spatial_stride, frames


def read_job(
    job: JobConfig,
    info: CheckpointInfo | None = None,
    *,
    has_data: bool = True,
    should_stop: Callable[[], bool] = never,
) -> ReadJob:
    """Read headers and images. info: the job's model if it was read already, or another in its place. has_data: False
    takes one square of the job's settings in place of its data.
    Raises: ValueError for settings that contradict each other or the model, or files that cannot be read; Stopped."""
    refuse_block_settings(job)
    info = info or read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = info.variant or info.family.variants[0]
    if job.objective.guidance is not None and variant.training_guidance is None:
        raise ValueError(f"objective.guidance is set, but {variant.name} has no guidance input; remove the setting")
    model = make_empty_transformer(info)
    targets = tuple(find_targets(model, info.family, job.lora))
    if job.lora.kind != "lora":
        check_lycoris_layout(info.family, targets, job.output.lora_layout, job.lora.kind)
    else:
        check_lora_layout(info.family, targets, job.output.lora_layout, job.lora.dora)
    read = ReadJob(job, info, variant, model, targets)
    latent = _with_sound(read, has_data)
    _refuse_condition(read)
    if info.family.native is not None and info.family.native.takes_one and job.train.batch_size > 1:
        helps = "set batch_size 1 (gradient_accumulation_steps does the same)"
        found = f"train.batch_size is {job.train.batch_size}, but {info.family.title} computes one sample at a time"
        raise ValueError(f"{found}; {helps}")
    refuse_text_encoders(job, info)
    if not has_data:
        return replace(read, samples=(make_square(job.data, variant, latent),))
    trained = [folder.path for folder in job.data.folders]
    others = [*filter(None, (*trained, *job.evaluation.folders, job.output.folder, job.cache.folder))]
    if job.data.encoded:
        refuse_condition(variant)
        read = replace(read, encoded=read_encoded_samples(job.data.encoded, read.reader))
    else:
        read = replace(read, samples=tuple(scan_folders(job.data, latent, should_stop, others=others)))
    refuse_batches_with_sound(read.training_samples, job.train.batch_size)
    if job.evaluation.folder:
        held_out = scan_folders(job.evaluation.as_data(job.data), latent, should_stop, others=others)
        read = replace(read, eval_samples=as_evaluated(held_out))
    return _of_own_rows(read)


def _of_own_rows(read: ReadJob) -> ReadJob:
    """With those of a class's derived rows that the inputs of this job have, where a run by tokens has to choose."""
    family, strategy = read.info.family, read.job.parallel.requested
    native = family.native
    if native is None or strategy is None or not shares_rows(strategy):
        return read
    if all(each == native.token_plan for each in native.derived_rows.values()):
        return read
    height, width, frames = _largest(read)
    shape = latent_shape_of(read.info, read.variant, (height, width), frames)
    dtype = getattr(torch, read.job.model.dtype)
    work = Work(shape, read.job.train.batch_size, dtype, None, read.job.lora, _longest_text(read), (1.0, 1.0))
    model, plan = make_empty_transformer(read.info), native.token_plan
    try:
        with sharing_rows(work, model, family):
            forward_on_meta(model, read.info, read.variant, work)
    except (RowsError, NoForecast) as error:
        if (plan := getattr(error, "plan", None)) is None:  # the first sample will tell
            return read
    rows = {kind: each for kind, each in native.derived_rows.items() if each == plan}
    return replace(read, info=replace(read.info, family=replace(family, native=replace(native, derived_rows=rows))))


def _with_sound(read: ReadJob, has_data: bool) -> LatentSpec:
    """The model's latents, of clips with sound only if the job names who encodes that.
    Raises: ValueError for sound that the model does not take, or that a plan without data would need."""
    job, title, latent = read.job, read.family.title, read.family.latent_of(read.variant)
    if latent.audio_rows and not has_data:
        raise ValueError(f"{title} is trained on sound of a length of its own; plan it with its dataset")
    if job.cache.has_sound and not (latent.is_video and latent.sound_rate):
        remedy = "name its VAE with cache.stock_vae" if latent.audio_rows else "remove it"
        raise ValueError(f"{title} takes no sound beside clips, as cache.stock_audio_vae makes; {remedy}")
    if job.cache.has_sound and job.objective.masked_prior:
        raise ValueError("objective.masked_prior weighs pictures, and beside sound nobody has compared it; remove it")
    if latent.is_video and not job.cache.has_sound:
        return replace(latent, sound_rate=0.0)
    return latent


def _refuse_condition(read: ReadJob) -> None:
    """Raises: ValueError for files that this model cannot be conditioned on, or that it or evaluation would lack."""
    job, family, name = read.job, read.family, read.job.data.condition
    if not name:
        return
    channels = family.latent_of(read.variant).channels
    names_vision = bool(job.cache.stock_vision or job.cache.vision_source)
    reason = way_problem(name, family.transformer_class, channels, family.comfy.beside)
    reason = reason or vision_problem(name, family.comfy.needs, is_named=names_vision)
    if reason := reason or evaluation_problem(name, job.evaluation):
        raise ValueError(reason)


def refuse_condition(variant: Variant) -> None:
    """Raises: ValueError for a variant whose entries hold more than a LATENT does."""
    if variant.encodes_condition:
        why = f"{variant.name} is also given the first frame as its own VAE encodes it, and not ComfyUI's"
        raise ValueError(f"{why}; leave stock_vae unconnected (cache.latent_source), and give clips, no latents")


def read_encoded_samples(path: str, reader: inputs.ComfyReader) -> tuple[EncodedSample, ...]:
    """The samples of a list, by their shapes only. Raises: ValueError naming those that do not fit the model."""
    pairs = load_encoded(path)
    problems = []
    for number, pair in enumerate(pairs, start=1):
        if reason := reader.latents_problem(pair.latents_shapes):
            problems.append(f"the latents of sample {number}: {reason}")
        if reason := reader.text_problem(pair.text_shapes):
            problems.append(f"the text of sample {number}: {reason}")
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise ValueError("\n".join(["the encoded dataset does not fit the model:", *problems[:_MOST_PROBLEMS], *more]))
    return tuple(_encoded_sample(pair, reader) for pair in pairs)


def _encoded_sample(pair: EncodedPair, reader: inputs.ComfyReader) -> EncodedSample:
    sides = pair.latents_shapes[inputs.SAMPLES][1:]
    num_frames = reader.latent.num_frames(sides[0]) if reader.comfy.latent_dims == 3 else 1
    flat = (1,) if len(sides) == 1 else ()  # audio without height
    bucket = (*flat, *sides, inputs.num_tokens(reader.comfy, pair.text_shapes))
    sound = next((shape for name, shape in pair.latents_shapes.items() if name.startswith(inputs.MORE_SAMPLES)), ())
    has_voice = any(inputs.option_path(name)[:1] == (inputs.VOICE,) for name in pair.text_shapes)
    # What tells apart samples that cannot share a batch: options of their CONDITIONING, noise masks, further streams.
    shapes = {name: list(shape) for name, shape in pair.text_shapes.items() if inputs.option_path(name)}
    streams = {name: list(shape) for name, shape in pair.latents_shapes.items() if name != inputs.SAMPLES}
    has_mask = streams.pop(inputs.NOISE_MASK, None) is not None
    shapes |= streams | ({inputs.NOISE_MASK: []} if has_mask else {})
    return EncodedSample(
        pair.latents,
        ((pair.text,), ()),
        bucket,
        num_frames,
        alike=(int(settings_fingerprint([pair.same, shapes])[:8], 16),) if shapes else (),
        has_sound=bool(sound) or has_voice,
        sound=sound,
        has_mask=has_mask,
    )


def refuse_batches_with_sound(samples: Sequence[TrainingSample], batch_size: int) -> None:
    """Raises: ValueError for several samples with sound: LTX-2 gates by the largest noise level of a batch."""
    if batch_size > 1 and any(sample.has_sound for sample in samples):
        raise ValueError(ONE_EACH.format("there is sound, whose noise levels are mixed and whose lyrics differ"))


def find_start(read: ReadJob) -> Mapping[str, Mapping[str, Tensor]]:
    """The layers that the job's LoRA begins with; {} if it begins afresh.
    Raises: ValueError for a file that is not of this model, or that the job's LoRA cannot hold in full."""
    settings = read.job.lora
    if not settings.start_from:
        return {}
    path = Path(settings.start_from)
    linears = {n: (m.out_features, m.in_features) for n, m in read.model.named_modules() if isinstance(m, nn.Linear)}
    layers = read_start(path, read.info.family, linears, trains_text=settings.text_encoder)
    refuse_start(path, layers, read.targets, settings)
    of_text, count = sum(map(is_of_text, layers)), len(read.targets)
    known = f"with {of_text} layers of {path.name}, the rest" if of_text else "all of it"
    text = f"; on the text encoders {known} afresh" if settings.text_encoder else ""
    afresh = count - len(layers) + of_text
    _log.warning("the LoRA begins with %s, %d of its %d layers afresh%s", path.name, afresh, count, text)
    return layers


def refuse_text_encoders(job: JobConfig, info: CheckpointInfo) -> None:
    """Raises: ValueError for a model without text encoders that can be trained, or a job that does not name them."""
    if not job.lora.text_encoder:
        return
    host = info.family.host
    if host is None or not host.text_class or info.family.comfy.needs:
        found = f"{info.family.title} ({(info.variant or info.family.variants[0]).name})"
        raise ValueError(f"lora.text_encoder trains the CLIP of SD 1.5, SD 2 and SDXL, and this is {found}; remove it")
    if not job.cache.stock_clip:
        raise ValueError("lora.text_encoder needs the text encoders; name their files with cache.stock_clip")


def text_encoder_bytes(job: JobConfig) -> int:
    """What their frozen weights take on the first device; 0 where none is trained."""
    if not job.lora.text_encoder:
        return 0
    count = 0
    for path in map(Path, job.cache.stock_clip):
        is_whole = path.resolve() == Path(job.model.path).resolve()  # a checkpoint, with the model in it
        for name, record in read_header(path).records().items():
            if record.dtype in FLOAT_TYPES and (not is_whole or name.startswith(CLIP_PARTS)):
                count += math.prod(record.shape)
    return _ELEMENT_SIZE * count
