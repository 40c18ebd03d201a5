"""What a job is about, read from headers and images: its model without weights, and its data."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from ..checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from ..checkpoints.load import make_empty_transformer
from ..checkpoints.lokr_file import check_lokr_layout
from ..checkpoints.lora_layouts import check_lora_layout
from ..checkpoints.lora_start import read_start, refuse_start
from ..config.job import FolderConfig, JobConfig
from ..data.folders import scan_folders
from ..data.samples import Sample
from ..encoding.encode import never
from ..encoding.key import comfy_text_key
from ..families.comfy.inputs import COND
from ..families.spec import Variant
from ..planning.request import make_square
from ..planning.short_model import SampleText
from ..training.adapter import find_targets
from .comfy_entries import EncodedSample, make_comfy_reader, read_encoded_samples, refuse_condition, resolution_of
from .encode_job import cache_store
from .place_by_size import Subject
from .resolve import refuse_block_settings, sizes_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadJob:
    """A job as planning and training both need it.

    Args:
        targets: fqns of the linears that LoRA adapts.
        samples: images and clips; () where the dataset arrived encoded.
        encoded: then, its samples.
    """

    job: JobConfig
    info: CheckpointInfo
    variant: Variant
    model: nn.Module
    targets: tuple[str, ...]
    samples: tuple[Sample, ...]
    encoded: tuple[EncodedSample, ...] = ()
    eval_samples: tuple[Sample, ...] = ()

    @property
    def subject(self) -> Subject:
        """What decides how it is trained."""
        return Subject(
            self.info,
            self.variant,
            self.model,
            largest=self._largest(),
            is_encoded=bool(self.encoded),
            train=sizes_of(self.encoded or self.samples),
            alone=sizes_of(self.eval_samples),
            text=self._longest_text(),
        )

    def _longest_text(self) -> SampleText | None:
        """As far as it is encoded, for one of ComfyUI's own models; nobody asks it of others."""
        if self.info.family.host is None:
            return None
        source, store = self.job.cache.text_source, cache_store(self.job)
        captions = {each.caption for each in (*self.samples, *self.eval_samples)} if source else set()
        keys = {each.caption for each in self.encoded} or {
            comfy_text_key(caption, source, keeps_all=True) for caption in captions
        }
        lengths = {key: store.shapes(key).get(COND, (0,))[0] for key in sorted(keys)}
        longest = store.get(max(lengths, key=lambda key: lengths[key])) if any(lengths.values()) else None
        return None if longest is None else SampleText(longest)

    def _largest(self) -> tuple[int, int, int]:
        """Height and width in pixels and frames of the samples that take the most."""
        if not self.encoded:
            return max(((*sample.bucket, sample.num_frames) for sample in self.samples), key=math.prod)
        side = resolution_of(self.encoded, self.info.family.latent_of(self.variant))
        return side, side, max(sample.num_frames for sample in self.encoded)


def read_job(
    job: JobConfig,
    info: CheckpointInfo | None = None,
    *,
    has_data: bool = True,
    should_stop: Callable[[], bool] = never,
) -> ReadJob:
    """Read headers and images.

    Args:
        info: the job's model if it was read already, or another in its place.
        has_data: False takes one square of the job's settings in place of its data.
    Raises: ValueError for settings that contradict each other or the model, or files that cannot be read; Stopped when
        should_stop() became true while images were looked at.
    """
    refuse_block_settings(job)
    info = info or read_checkpoint(job.model.path, job.model.family, job.model.variant)
    variant = info.variant or info.family.variants[0]
    if job.objective.guidance is not None and variant.training_guidance is None:
        raise ValueError(f"objective.guidance is set, but {variant.name} has no guidance input; remove the setting")
    model = make_empty_transformer(info)
    targets = tuple(find_targets(model, info.family, job.lora))
    if job.lora.kind == "lokr":
        check_lokr_layout(info.family, targets, job.output.lora_layout)
    check_lora_layout(info.family, targets, job.output.lora_layout, job.lora.dora)
    latent = info.family.latent_of(variant)
    if not has_data:
        return ReadJob(job, info, variant, model, targets, (make_square(job.data, variant, latent),))
    samples: Sequence[Sample] = ()
    encoded: tuple[EncodedSample, ...] = ()
    if job.data.encoded:
        refuse_condition(variant)
        encoded = read_encoded_samples(job.data.encoded, make_comfy_reader(info.family, variant, info.config))
    else:
        samples = scan_folders(job.data, latent, should_stop)
    evaluated: Sequence[Sample] = ()
    if job.evaluation.folder:
        data = replace(job.data, folders=(FolderConfig(job.evaluation.folder),), caption_dropout=0.0)
        evaluated = scan_folders(data, latent, should_stop)
    return ReadJob(job, info, variant, model, targets, tuple(samples), encoded, tuple(evaluated))


def find_start(read: ReadJob) -> Mapping[str, Mapping[str, Tensor]]:
    """The layers that the job's LoRA begins with; {} if it begins afresh.

    Raises: ValueError for a file that is not of this model, or that the job's LoRA cannot hold in full.
    """
    settings = read.job.lora
    if not settings.start_from:
        return {}
    path = Path(settings.start_from)
    linears = {n: (m.out_features, m.in_features) for n, m in read.model.named_modules() if isinstance(m, nn.Linear)}
    layers = read_start(path, read.info.family, linears)
    refuse_start(path, layers, read.targets, settings)
    _log.warning(
        "the LoRA begins with %s, %d of its %d layers afresh",
        path.name,
        len(read.targets) - len(layers),
        len(read.targets),
    )
    return layers
