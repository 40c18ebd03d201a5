"""Sample prompts that are no captions: encoded by the CLIP that encoded the captions, before a training begins.

The training itself finds them in the cache, whether it runs here, in the background or in several processes, where no
CLIP of this graph is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.job import JobConfig
from . import host
from .types import TrainingDataset
from .view import JobView

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo

_GONE = (
    "sample_prompts {prompts} are no captions of the dataset, and ComfyUI has let go of the CLIP that encoded those; "
    "empty ComfyUI's cache (Unload Models and Execution Cache) and queue again, or take captions of the dataset"
)


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
            raise ValueError(_GONE.format(prompts=", ".join(map(repr, missing))))
        with host.host_memory_freed(), EventLog(Path(job.cache.folder), view) as events:
            fill_prompts(job, info, ComfyEncoders(clip), events, view.is_cancelled)
    except Stopped:
        host.cancel()
