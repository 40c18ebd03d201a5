"""What a training needs of the CLIP that encoded the captions, computed before it begins.

That is sample prompts that are no captions, or where the CLIP is trained itself, tokens of all texts. The training
finds it in the cache, whether it runs here, in the background or in several processes, where no CLIP of this graph is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.job import JobConfig
from . import host
from .types import TrainingDataset, TrainingModel
from .view import JobView

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo

_GONE = (
    "ComfyUI has let go of the CLIP that encoded the captions; empty ComfyUI's cache (Unload Models and Execution "
    "Cache) and queue again"
)
_NO_CAPTIONS = "sample_prompts {prompts} are no captions of the dataset, and {gone}, or take captions of the dataset"


def remember_clip(sockets: Mapping[str, Any], load: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    """A function that gives the CLIP of a cache node's sockets again; None where it is gone.

    A connected one is held by ComfyUI, as long as it likes: a dataset must not keep a text encoder in memory. One of
    files is loaded anew.

    Args:
        load: a CLIP of the files that these sockets name.
    """
    if sockets.get("stock_clip") is not None:
        return weakref.ref(sockets["stock_clip"])
    return partial(load, {name: sockets[name] for name in ("text_encoders", "text_encoder_2") if name in sockets})


def encode_prompts(
    dataset: TrainingDataset,
    job: JobConfig,
    info: CheckpointInfo | None,
    view: JobView,
    check: Callable[[], object],
) -> None:
    """Have the job's sample prompts in its cache, where a CLIP of ComfyUI's encoded the captions.

    To be called outside of TrainingModel.prepared, as captions are encoded: there ComfyUI's kernels are others.

    Args:
        info: the job's model, if only ComfyUI can read it.
        check: raises what refuses the training; called before a text encoder is loaded, if one is needed.
    Raises: ValueError where the CLIP is gone; what check raises.
    """
    from ..encoding.encode import Stopped
    from ..events import EventLog
    from ..jobs.comfy_entries import ComfyEncoders
    from ..jobs.encode_job import fill_prompts, missing_prompts

    missing = missing_prompts(job)
    if not missing or dataset.find_clip is None:
        return
    try:
        check()
        if (clip := dataset.find_clip()) is None:
            raise ValueError(_NO_CAPTIONS.format(prompts=", ".join(map(repr, missing)), gone=_GONE))
        with host.host_memory_freed(), EventLog(Path(job.cache.folder), view) as events:
            fill_prompts(job, info, ComfyEncoders(clip), events, view.is_cancelled)
    except Stopped:
        host.cancel()


def encode_tokens(
    dataset: TrainingDataset, model: TrainingModel, job: JobConfig, info: CheckpointInfo | None, view: JobView
) -> None:
    """Have the tokens of all captions and prompts in the job's cache, for a CLIP that is trained itself.

    Args:
        info: as of encode_prompts.
    Raises: ValueError where the CLIP is gone; as check_job.
    """
    from ..encoding.encode import Stopped
    from ..events import EventLog
    from ..jobs.comfy_entries import ComfyEncoders
    from ..jobs.encode_job import cache_entries, cache_store, fill_cache
    from ..jobs.job import check_job

    try:
        with model.prepared(info):
            plan = check_job(job, info=info, is_to_train=False, should_stop=view.is_cancelled)
        store = cache_store(job)
        if all(key in store for key in cache_entries(plan, "captions")):
            return
        if dataset.find_clip is None or (clip := dataset.find_clip()) is None:
            raise ValueError(_GONE)
        with EventLog(Path(job.cache.folder), view) as events:
            fill_cache(plan, "captions", events, view.is_cancelled, ComfyEncoders(clip))
    except Stopped:
        host.cancel()
