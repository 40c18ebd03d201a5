"""Node: compute captions and latents once, before training."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.job import CacheConfig, JobConfig, LoopConfig, OutputConfig
from ..config.model import COMFYUI
from ..system.stopping import Stopped
from . import host
from .choices import NONE, device_options, file_options, lists_pass, plain_device, read_file
from .host import folders, io
from .host.comfy_encoders import HostClip, HostVae, HostVision
from .host.native.conditions import HostConditioner
from .saying import said_on_node, training_schema
from .sockets import AUTO, LATER, Socket, read_lines, read_section
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel
from .view import JobView

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo
    from ..jobs.checked_job import JobPlan
    from ..jobs.encode_job import ComfyEncoders

_log = logging.getLogger(__name__)

DEFAULT_FOLDER = "devicebridge/cache"
_WHERE = "It is inside ComfyUI's output folder."
CACHE_FOLDER = Socket("cache_folder", "cache.folder", _WHERE, default=DEFAULT_FOLDER, advanced=True)
_GONE = "ComfyUI has let go of the CLIP that encoded the captions; use Unload Models and Execution Cache, and run again"
_LINK_OF = {"text_encoders": "stock_clip", "vae": "stock_vae"}
_CLASS_OF = {"stock_clip": "Load CLIP", "stock_vae": "Load VAE", "stock_vision": "Load CLIP Vision"}


def _inputs() -> list[Socket | io.Input]:
    files, vaes = map(folders.list_components, ("text_encoders", "vae"))
    return [
        ModelSocket.Input("model"),
        DatasetSocket.Input("dataset"),
        Socket("text_encoders", "cache.text_encoders", None, **file_options(folders.OWN_PART, *files)),
        Socket("vae", "cache.vae", None, read=read_file, advanced=True, **file_options(folders.OWN_PART, *vaes)),
        Socket(
            "text_device",
            "cache.text_device",
            read=lambda text: plain_device(text) or (AUTO if text.strip() else "cpu"),
            advanced=True,
            **device_options(AUTO, "cpu", "stream"),
        ),
        Socket("vae_device", "cache.vae_device", read=plain_device, advanced=True, **device_options(AUTO)),
        Socket("dtype", "cache.dtype", advanced=True),
        CACHE_FOLDER,
        Socket("text_quantize", "cache.text_quantize", **LATER),
        Socket("text_window_gb", "cache.text_window_gb", max=1000.0, step=0.5, **LATER),
        io.Clip.Input("stock_clip", optional=True),
        io.Vae.Input("stock_vae", optional=True),
        io.Combo.Input("text_encoder_2", **LATER, **file_options(NONE, *files)),
        io.ClipVision.Input("stock_vision", optional=True),
        Socket("caption_weights", "cache.caption_weights", **LATER),
    ]


# Entries that this process has made or found, by their folder: ComfyUI asks for a fingerprint without the dataset.
KEPT = defaultdict[str, set[Path]](set)


class CacheCaptionsAndLatents(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeCacheCaptionsAndLatents",
        search_aliases=["encode dataset", "precompute", "text encoder cache", "latent cache"],
        is_output_node=True,
        inputs=_inputs,
        is_named=True,
        outputs=[DatasetSocket.Output("cached")],
    )

    validate_inputs = lists_pass("text_encoders", "vae", "text_device", "vae_device", "text_encoder_2")

    @classmethod
    def fingerprint_inputs(cls, text_encoders: str | None = None, vae: str | None = None, **others: Any) -> Any:
        """Other where an entry is gone or an encoder's file has changed; always where a link names one, whose text is
        not known yet."""
        if text_encoders is None or vae is None:
            return float("nan")
        try:
            second = others.get("text_encoder_2", "")
            chosen = (("text_encoders", text_encoders), ("text_encoders", second), ("vae", vae))
            paths = [folders.find_component(kind, read_file(name)) for kind, name in chosen]
            kept = KEPT[str(folders.folder_in_output(others.get("cache_folder", ""), "cache_folder"))]
            states = (folders.state_of(Path(path)) for path in paths if path)
            return [sum(not each.is_file() for each in kept), *paths, *states]
        except (ValueError, OSError) as error:
            return str(error)  # execute says it where the user sees it

    @classmethod
    @said_on_node
    def execute(cls, model: TrainingModel, dataset: TrainingDataset, **sockets: Any) -> io.NodeOutput:
        from ..events import EventLog
        from ..jobs.encode_job import cache_job
        from ..jobs.job import check_job
        from .host.native.files import files_of_clip, path_of_vae

        if dataset.data.encoded:
            raise ValueError("this dataset arrived encoded; connect it to the training node directly")
        folder = folders.folder_in_output(sockets["cache_folder"], "cache_folder")
        given, sockets = sockets, _with_files(model, sockets)
        encoders, own = find_encoders(model, sockets, dataset.data.condition)
        cache = encoders.named_in(read_section(CacheConfig, _inputs(), sockets, folder=str(folder), **own))
        output = OutputConfig(folder=str(folder))
        job = model.job(dataset, evaluation=dataset.evaluation, cache=cache, train=LoopConfig(steps=1), output=output)
        view = JobView(cls.hidden.unique_id)
        with host.training_allowed(), host.host_memory_freed(), EventLog(folder, view) as events:
            try:
                with model.prepared() as info:
                    plan = check_job(job, info=info, is_to_train=False, should_stop=host.is_cancelled)
                data, held_out = cache_job(plan, events, host.is_cancelled, encoders)
            except Stopped:
                view.show_text("Cancelled. What was encoded is kept; run again to continue.")
                raise
        for each in filter(None, (data, held_out)):
            KEPT[str(folder)].update(map(each.store.path, each.keys()))
        # With what a job file needs to find the entries of stock encoders.
        sources = {name: getattr(cache, name) for name in ("text_source", "latent_source", "vision_source")}
        lines = (f'{name} = "{source}"' for name, source in sources.items() if source)
        decided = [Path(sockets[name]).name for name in _LINK_OF if sockets[name] != given[name]]
        by = f" by {' and '.join(decided)}" if decided else ""
        view.show_text("\n".join([f"{len(data.samples)} samples are encoded{by}", *lines]))
        stock_vae, own_vae = sockets.get("stock_vae"), partial(folders.find_component, "vae", read_file(sockets["vae"]))
        vae_file = path_of_vae(stock_vae) if stock_vae is not None else own_vae()
        clip_files, clip_type = files_of_clip(sockets.get("stock_clip"), model.model.path)
        load = partial(_clip_of_files, model)
        find = remember_clip(sockets, load, weighs=cache.caption_weights) if encoders.clip else None
        made = dataclasses.replace(dataset, cache=cache, vae_file=vae_file, clip_files=clip_files, clip_type=clip_type)
        return io.NodeOutput(dataclasses.replace(made, find_clip=find))


def find_encoders(
    model: TrainingModel, sockets: dict[str, Any], condition: str = ""
) -> tuple[ComfyEncoders, dict[str, str]]:
    """ComfyUI's encoders, connected or of files that only ComfyUI reads; and the settings that name the model's own.
    Says which sockets have no effect. Raises: ValueError for one that was not in its loader's file, or that has no
    name, or a file too few."""
    from ..jobs.encode_job import ComfyEncoders
    from .host.native.files import load_vae

    for socket, loader in _CLASS_OF.items():
        if socket in sockets and sockets[socket] is None:
            raise ValueError(f"{socket} is connected, but its loader found none in its file; use another ({loader})")
    given = sockets["stock_clip"] if "stock_clip" in sockets else _clip_of_files(model, sockets)
    clip = None if given is None else HostClip(given, weighs=sockets.get("caption_weights", False))
    stock_vae, named = sockets.get("stock_vae"), read_file(sockets["vae"])
    if stock_vae is None and named and model.model.family == COMFYUI:
        stock_vae = load_vae(folders.find_component("vae", named))
    vae = None if stock_vae is None else HostVae(stock_vae)
    vision = HostVision(sockets["stock_vision"]) if "stock_vision" in sockets else None
    own = {"text_quantize": "none"} if clip else {}
    for socket, encoder in (("text_encoders", clip), ("vae", vae)):
        name = read_file(sockets[socket])
        own[socket] = "" if encoder else folders.find_component(socket, name)
        if encoder and name and _LINK_OF[socket] in sockets:
            _log.warning("%s %r has no effect: what is connected to the node encodes in its place", socket, name)
    return ComfyEncoders(clip, vae, HostConditioner(clip, vae, vision) if condition else None), own


def _clip_of_files(model: TrainingModel, sockets: dict[str, Any]) -> Any:
    """A CLIP, loaded by ComfyUI; None where the model's own text encoders are chosen.
    Raises: ValueError for a family whose CLIP is not known, or another number of files than it takes."""
    from .host.native.files import known_files, load_clip_files

    names = [read_file(sockets["text_encoders"]), *map(read_file, read_lines(sockets.get("text_encoder_2") or ""))]
    paths = [folders.find_component("text_encoders", name) for name in names]
    files = [path for path in paths if Path(path).is_file()]
    if not files or files[0] != paths[0]:
        return None  # the others are beside the first
    if files == [model.model.path]:
        return load_clip_files(files, "", model.model.path)
    info = model.read()
    known = known_files(info)
    if not known.clip_type:
        raise ValueError(f"{info.family.title} takes no files of text encoders here; connect its CLIP to stock_clip")
    if len(files) != (wanted := len(known.patterns["text_encoders"])):
        raise ValueError(
            f"{info.family.title} takes {wanted} files of text encoders, and {len(files)} are chosen; choose them in "
            "text_encoders and text_encoder_2, or connect Load CLIP to stock_clip"
        )
    return load_clip_files(files, known.clip_type, model.model.path if model.model.family == COMFYUI else "")


def _with_files(model: TrainingModel, sockets: dict[str, Any]) -> dict[str, Any]:
    """The sockets, with files of ComfyUI's folders where the model is a file and nobody named its encoders.
    Raises: ValueError where one of them is not there."""
    from .host.native.files import known_files

    open_ones = [name for name, link in _LINK_OF.items() if link not in sockets and not read_file(sockets[name])]
    if not open_ones or Path(model.model.path).is_dir() or (info := model.read()).pipeline_folder is not None:
        return sockets
    known, chosen = known_files(info), dict(sockets)
    for name in open_ones:
        if not (files := known.names[name]) or not all(files):
            looked_for = f" ({', '.join(known.patterns[name])})" if known.patterns[name] else ""
            raise ValueError(
                f"{info.family.title} needs files in models/{name} that are not there{looked_for}; put them there, "
                f"choose others in {name}, or connect {_CLASS_OF[_LINK_OF[name]]} to {_LINK_OF[name]}"
            )
        chosen[name], *others = files
        if name == "text_encoders":
            chosen["text_encoder_2"] = "\n".join(others)
    return chosen


# ---- what a training needs of the CLIP, computed before it begins: in the background no CLIP of this graph is there


def remember_clip(
    sockets: Mapping[str, Any], load: Callable[[dict[str, Any]], Any], *, weighs: bool
) -> Callable[[], HostClip | None]:
    """A function that gives the CLIP of a cache node's sockets again; None where it is gone. A connected one is held by
    ComfyUI alone: a dataset must not keep a text encoder in memory."""
    files = {name: sockets[name] for name in ("text_encoders", "text_encoder_2") if name in sockets}
    connected = sockets.get("stock_clip")
    find = partial(load, files) if connected is None else weakref.ref(connected)
    return lambda: None if (clip := find()) is None else HostClip(clip, weighs=weighs)


def encode_texts(
    dataset: TrainingDataset,
    model: TrainingModel,
    job: JobConfig,
    info: CheckpointInfo | None,
    view: JobView,
    check: Callable[[], JobPlan],
) -> None:
    """Have in the job's cache what a CLIP of ComfyUI's makes: sample prompts, or all tokens for a CLIP that is trained.
    To be called outside of TrainingModel.prepared, in which ComfyUI's kernels are others.
    info: the job's model, if only ComfyUI can read it. check: checks the job before a CLIP is loaded for prompts.
    Raises: ValueError where the CLIP is gone; what check and check_job raise."""
    from ..events import EventLog
    from ..jobs import encode_job
    from ..jobs.encode_job import ComfyEncoders
    from ..jobs.job import check_job

    if job.lora.text_encoder:
        with model.prepared(info):
            plan = check_job(job, info=info, is_to_train=False, should_stop=host.is_cancelled)
        store, fault = encode_job.cache_store(job), _GONE
        if all(key in store for key in encode_job.cache_entries(plan, "captions")):
            return
    else:
        if not (missing := encode_job.missing_prompts(job)) or dataset.find_clip is None:
            return
        plan = check()
        prompts = ", ".join(map(repr, missing))
        fault = f"sample_prompts {prompts} are no captions of the dataset, and {_GONE}, or take captions of the dataset"
    if dataset.find_clip is None or (clip := dataset.find_clip()) is None:
        raise ValueError(fault)
    with host.host_memory_freed(), EventLog(Path(job.cache.folder), view) as events:
        encode_job.fill_cache(plan, "captions", events, host.is_cancelled, ComfyEncoders(clip))
