"""Node: compute captions and latents once, before training."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from . import host
from .fields import AUTO, make_part, read_auto
from .host import io
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel
from .view import JobView

if TYPE_CHECKING:
    from ..config.job import CacheConfig
    from ..jobs.comfy_entries import ComfyEncoders

_log = logging.getLogger(__name__)

DEFAULT_FOLDER = "devicebridge/cache"
_UNCONNECTED = "unconnected"  # None is what a loader gives that found no CLIP or VAE in its file


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
            inputs=[
                ModelSocket.Input("model", tooltip="The model that will be trained; it decides what is encoded how."),
                DatasetSocket.Input("dataset", tooltip="The images and captions."),
                io.String.Input(
                    "text_encoders",
                    default="",
                    placeholder="in the model folder",
                    tooltip="Folder that holds text_encoder and tokenizer folders: a name in models/text_encoders, or "
                    "a full path. Empty takes the model folder; needed when the model is a single file.",
                ),
                io.String.Input(
                    "vae",
                    default="",
                    placeholder="in the model folder",
                    tooltip="VAE folder or file: a name in models/vae, or a full path. Empty takes the model folder; "
                    "needed when the model is a single file.",
                ),
                io.String.Input(
                    "text_device",
                    default="cpu",
                    tooltip="Where the text encoder runs. cpu is slow but always has room; cuda:0 has all of it on "
                    "that card; stream passes its layers through a card that could not hold it, many captions at a "
                    "time; auto picks by size and says why in the log.",
                ),
                io.String.Input(
                    "vae_device",
                    default=AUTO,
                    tooltip="Device of the VAE, such as cuda:0; auto takes the model's first device.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=["bfloat16", "float16", "float32"],
                    default="bfloat16",
                    advanced=True,
                    tooltip="Number type that text encoder and VAE compute in. Some VAEs give black images in float16.",
                ),
                io.String.Input(
                    "cache_folder",
                    default=DEFAULT_FOLDER,
                    advanced=True,
                    tooltip="Where results are kept, inside ComfyUI's output folder. One folder may serve any number "
                    "of models and datasets.",
                ),
                io.Combo.Input(
                    "text_quantize",
                    options=["none", "int8", "fp8"],
                    default="none",
                    optional=True,
                    advanced=True,
                    tooltip="Holds the text encoder's linear layers in 8 bits: about half the memory, no speed. Choose "
                    "it when the encoder does not fit its device otherwise; FLUX.2-dev's takes about 18 instead of "
                    "35 GB. int8 is the more exact. On the CPU a caption takes longer, with fp8 much longer.",
                ),
                io.Float.Input(
                    "text_window_gb",
                    default=0.0,
                    min=0.0,
                    max=1000.0,
                    step=0.5,
                    optional=True,
                    advanced=True,
                    tooltip="With text_device stream or auto: the most GB of its card that a streamed text encoder may "
                    "take. 0 takes what is free. Raise it for more captions per pass, lower it when something else "
                    "needs the card; FLUX.2-dev's encoder needs about 4.",
                ),
                io.Clip.Input(
                    "stock_clip",
                    display_name="stock CLIP",
                    optional=True,
                    tooltip="ComfyUI's CLIP, from its loaders. Connected, it encodes the captions as CLIP Text Encode "
                    "does, and text_encoders, text_device, text_window_gb and text_quantize have no effect. Choose it "
                    "when the LoRA will be used in ComfyUI: FLUX.2's prompts are padded differently there.",
                ),
                io.Vae.Input(
                    "stock_vae",
                    display_name="stock VAE",
                    optional=True,
                    tooltip="ComfyUI's VAE, from its loaders. Connected, it encodes images and clips as VAE Encode "
                    "does, and the vae name and vae_device have no effect. Handy when the model is a single file.",
                ),
            ],
            outputs=[DatasetSocket.Output("cached", display_name="dataset", tooltip="The same dataset, encoded.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Always looks again: the cache may have been deleted, and a complete one is passed quickly."""
        return float("nan")

    @classmethod
    def execute(
        cls,
        model: TrainingModel,
        dataset: TrainingDataset,
        text_encoders: str,
        vae: str,
        text_device: str,
        vae_device: str,
        dtype: str,
        cache_folder: str,
        text_quantize: str = "none",
        text_window_gb: float = 0.0,
        stock_clip: Any = _UNCONNECTED,
        stock_vae: Any = _UNCONNECTED,
    ) -> io.NodeOutput:
        from ..config.job import CacheConfig, JobConfig, LoopConfig, OutputConfig
        from ..encoding.encode import Stopped
        from ..events import EventLog
        from ..jobs.encode_job import cache_job
        from ..jobs.job import check_job

        if dataset.data.encoded:
            raise ValueError("this dataset arrived encoded; connect it to the training node directly")
        folder = host.folder_in_output(cache_folder, "cache_folder")
        encoders = _stock_encoders(stock_clip, stock_vae)
        cache = make_part(
            CacheConfig,
            folder=str(folder),
            text_device=text_device.strip() or "cpu",
            vae_device=read_auto(vae_device),
            dtype=dtype,
            text_window_gb=text_window_gb,
            **_who_encodes(encoders, text_encoders, vae, text_quantize),
        )
        job = JobConfig(
            model=model.model,
            split=model.split,
            data=dataset.data,
            evaluation=dataset.evaluation,
            cache=cache,
            train=LoopConfig(steps=1),
            output=OutputConfig(folder=str(folder)),
        )
        view = JobView(cls.hidden.unique_id)
        with host.training_allowed(), host.host_memory_freed(), EventLog(folder, view) as events:
            try:
                plan = check_job(job, is_to_train=False, should_stop=view.is_cancelled)
                data, _ = cache_job(plan, events, view.is_cancelled, encoders)
            except Stopped:
                view.show_text("Cancelled. What was encoded is kept; run again to continue.")
                host.cancel()
        view.show_text(_describe(len(data.samples), cache))
        return io.NodeOutput(dataclasses.replace(dataset, cache=cache))


def _stock_encoders(clip: Any, vae: Any) -> ComfyEncoders:
    """Those that are connected, with their names.

    Raises: ValueError for one that was not in its loader's file, or that has no name.
    """
    from ..jobs.comfy_entries import ComfyEncoders

    for socket, value in (("stock_clip", clip), ("stock_vae", vae)):
        if value is None:
            raise ValueError(f"{socket} is connected, but its loader found none in its file; use another loader")
    return ComfyEncoders(
        clip=None if clip is _UNCONNECTED else host.HostClip(clip),
        vae=None if vae is _UNCONNECTED else host.HostVae(vae),
    )


def _who_encodes(encoders: ComfyEncoders, text_encoders: str, vae: str, text_quantize: str) -> dict[str, str]:
    """The part of the cache's settings that names the encoders; says which sockets have no effect."""
    settings: dict[str, str] = {}
    if encoders.clip:
        settings["text_source"] = encoders.clip.fingerprint
    else:
        settings["text_encoders"] = host.find_component("text_encoders", text_encoders)
        settings["text_quantize"] = text_quantize
    if encoders.vae:
        settings["latent_source"] = encoders.vae.fingerprint
    else:
        settings["vae"] = host.find_component("vae", vae)
    if encoders.clip and text_encoders.strip():
        _log.warning("text_encoders %r has no effect: the connected CLIP encodes the captions", text_encoders)
    if encoders.vae and vae.strip():
        _log.warning("the vae name %r has no effect: the connected VAE encodes the images", vae)
    return settings


def _describe(num_samples: int, cache: CacheConfig) -> str:
    """With what a job file needs to find the entries of stock encoders."""
    lines = [f"{num_samples} samples are encoded"]
    lines += [f'text_source = "{cache.text_source}"'] if cache.text_source else []
    lines += [f'latent_source = "{cache.latent_source}"'] if cache.latent_source else []
    return "\n".join(lines)
