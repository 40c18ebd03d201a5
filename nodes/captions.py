"""Node: compute captions and latents once, before training."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from ..config.job import CacheConfig, LoopConfig, OutputConfig
from . import host
from .host import io
from .sockets import Socket, make_inputs, read_section
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel
from .view import JobView

if TYPE_CHECKING:
    from ..jobs.comfy_entries import ComfyEncoders

_log = logging.getLogger(__name__)

DEFAULT_FOLDER = "devicebridge/cache"
_WHERE = "It is inside ComfyUI's output folder."
CACHE_FOLDER = Socket("cache_folder", "cache.folder", _WHERE, default=DEFAULT_FOLDER, advanced=True)
_HERE = "in the model folder"
_IN_MODELS = "A name in models/{}, or a full path."
_INPUTS = (
    ModelSocket.Input("model", tooltip="The model that will be trained; it decides what is encoded how."),
    DatasetSocket.Input("dataset", tooltip="The images and captions."),
    Socket("text_encoders", "cache.text_encoders", _IN_MODELS.format("text_encoders"), default="", placeholder=_HERE),
    Socket("vae", "cache.vae", _IN_MODELS.format("vae"), default="", placeholder=_HERE),
    Socket("text_device", "cache.text_device", read=lambda text: text.strip() or "cpu"),
    Socket("vae_device", "cache.vae_device"),
    Socket("dtype", "cache.dtype", advanced=True),
    CACHE_FOLDER,
    Socket("text_quantize", "cache.text_quantize", optional=True, advanced=True),
    Socket("text_window_gb", "cache.text_window_gb", max=1000.0, step=0.5, optional=True, advanced=True),
    io.Clip.Input(
        "stock_clip",
        display_name="stock CLIP",
        optional=True,
        tooltip="ComfyUI's CLIP, from its loaders. Connected, it encodes the captions as CLIP Text Encode does, and "
        "text_encoders, text_device, text_window_gb and text_quantize have no effect. Choose it when the LoRA will be "
        "used in ComfyUI: FLUX.2's prompts are padded differently there.",
    ),
    io.Vae.Input(
        "stock_vae",
        display_name="stock VAE",
        optional=True,
        tooltip="ComfyUI's VAE, from its loaders. Connected, it encodes images and clips as VAE Encode does, and the "
        "vae name and vae_device have no effect. Handy when the model is a single file.",
    ),
)


class CacheCaptionsAndLatents(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeCacheCaptionsAndLatents",
            display_name="Cache Captions and Latents",
            category="DeviceBridge/training",
            description="Encodes every caption and image once and keeps the results on disk, so that neither text "
            "encoder nor VAE is in memory while training. What is there already is not computed again; Cancel keeps "
            "what is done. By default the model's own encoders are used; connect ComfyUI's CLIP and VAE to train on "
            "exactly what your workflows feed the model.",
            search_aliases=["encode dataset", "precompute", "text encoder cache", "latent cache"],
            is_output_node=True,
            inputs=make_inputs(_INPUTS),
            outputs=[DatasetSocket.Output("cached", display_name="dataset", tooltip="The same dataset, encoded.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Always looks again: the cache may have been deleted, and a complete one is passed quickly."""
        return float("nan")

    @classmethod
    def execute(cls, model: TrainingModel, dataset: TrainingDataset, **sockets: Any) -> io.NodeOutput:
        from ..encoding.encode import Stopped
        from ..events import EventLog
        from ..jobs.encode_job import cache_job
        from ..jobs.job import check_job

        if dataset.data.encoded:
            raise ValueError("this dataset arrived encoded; connect it to the training node directly")
        folder = host.folder_in_output(sockets["cache_folder"], "cache_folder")
        encoders = _stock_encoders(sockets)
        cache = read_section(CacheConfig, _INPUTS, sockets, folder=str(folder), **_who_encodes(encoders, sockets))
        output = OutputConfig(folder=str(folder))
        job = model.job(dataset, evaluation=dataset.evaluation, cache=cache, train=LoopConfig(steps=1), output=output)
        view = JobView(cls.hidden.unique_id)
        with host.training_allowed(), host.host_memory_freed(), EventLog(folder, view) as events:
            try:
                with model.prepared() as info:
                    plan = check_job(job, info=info, is_to_train=False, should_stop=view.is_cancelled)
                data, _ = cache_job(plan, events, view.is_cancelled, encoders)
            except Stopped:
                view.show_text("Cancelled. What was encoded is kept; run again to continue.")
                host.cancel()
        view.show_text(_describe(len(data.samples), cache))
        return io.NodeOutput(dataclasses.replace(dataset, cache=cache))


def _stock_encoders(sockets: dict[str, Any]) -> ComfyEncoders:
    """Those that are connected, with their names.

    Raises: ValueError for one that was not in its loader's file, or that has no name.
    """
    from ..jobs.comfy_entries import ComfyEncoders

    for socket in ("stock_clip", "stock_vae"):
        if socket in sockets and sockets[socket] is None:
            raise ValueError(f"{socket} is connected, but its loader found none in its file; use another loader")
    return ComfyEncoders(
        clip=host.HostClip(sockets["stock_clip"]) if "stock_clip" in sockets else None,
        vae=host.HostVae(sockets["stock_vae"]) if "stock_vae" in sockets else None,
    )


def _who_encodes(encoders: ComfyEncoders, sockets: dict[str, Any]) -> dict[str, str]:
    """The part of the cache's settings that names the encoders; says which sockets have no effect."""
    settings = {"text_quantize": "none"} if encoders.clip else {}
    sources = {"text_encoders": (encoders.clip, "text_source"), "vae": (encoders.vae, "latent_source")}
    for socket, (encoder, source) in sources.items():
        name = sockets[socket].strip()
        settings |= {source: encoder.fingerprint} if encoder else {}
        settings[socket] = "" if encoder else host.find_component(socket, name)
        if encoder and name:
            _log.warning("%s %r has no effect: what is connected to the node encodes in its place", socket, name)
    return settings


def _describe(num_samples: int, cache: CacheConfig) -> str:
    """With what a job file needs to find the entries of stock encoders."""
    sources = {"text_source": cache.text_source, "latent_source": cache.latent_source}
    lines = (f'{name} = "{source}"' for name, source in sources.items() if source)
    return "\n".join([f"{num_samples} samples are encoded", *lines])
