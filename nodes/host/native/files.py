"""Which files of ComfyUI's folders a job or a model means, and the text encoders and VAE that ComfyUI makes of them."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....checkpoints.checkpoint import CheckpointInfo
from ....checkpoints.header import read_header
from ....config.job import JobConfig
from ....config.model import COMFYUI
from ....families.comfy.text_sizes import CLIP_PARTS
from ....jobs.encode_job import ComfyEncoders
from ..comfy_encoders import HostClip, HostVae, HostVision
from ..folders import find_file, list_components
from .conditions import HostConditioner

# What code raises that takes a file's tensors for granted.
_OF_DAMAGE: tuple[type[Exception], ...] = (LookupError, TypeError, ValueError, AttributeError, NameError)
_OF_DAMAGE += (ArithmeticError, AssertionError, RuntimeError)
AGAIN = "download it again, and join it if it is one of several files"
_WITH_HEADER = (".safetensors", ".sft", ".gguf")  # other files have pickled tensors
_VAE_PARTS = ("first_stage_model.", "vae.")  # what a checkpoint's tensors of its VAE begin with


def with_files(job: JobConfig) -> JobConfig:
    """The job with full paths in the place of names. Reads headers only. Raises: ValueError for a name that is in none
    of ComfyUI's folders, a file that is cut short, a type that ComfyUI does not know, or encoders without a name."""
    model, cache = job.model, job.cache
    if model.family == COMFYUI:
        model = replace(model, path=str(_find("model.path", model.path, "diffusion_models", "checkpoints")))
    clip = tuple(_find_encoder("cache.stock_clip", name, "text_encoders") for name in cache.stock_clip)
    if clip and not _is_own(clip, model.path):
        _clip_type(cache.stock_clip_type)
    vae = _find_encoder("cache.stock_vae", cache.stock_vae, "vae")
    if model.family == COMFYUI and job.data.folders:
        parts = set(parts_of(Path(model.path)))
        if not cache.has_stock_text:
            clip = (_own("cache.stock_clip and stock_clip_type", "text encoders", model.path, "clip" in parts),)
        if not cache.has_stock_latents:
            vae = _own("cache.stock_vae", "VAE", model.path, "vae" in parts)
    samples = job.samples
    if model.family == COMFYUI and samples.vae:
        samples = replace(samples, vae=str(_find("samples.vae", samples.vae, "vae", "checkpoints")))
    vision = _find_encoder("cache.stock_vision", cache.stock_vision, "clip_vision")
    audio = _find_encoder("cache.stock_audio_vae", cache.stock_audio_vae, "vae", "checkpoints")
    cache = replace(cache, stock_clip=clip, stock_vae=vae, stock_audio_vae=audio, stock_vision=vision)
    return replace(job, model=model, cache=cache, samples=samples)


def _find(key: str, name: str, *kinds: str) -> Path:
    """A file by its full path, or as find_file. Raises: ValueError where there is none."""
    path = Path(name).expanduser()
    path = path if path.is_absolute() else find_file(key, name, kinds, {}, "; a file elsewhere needs its full path")
    if not path.is_file():
        raise ValueError(f"{key} names {path}, and there is no such file")
    return path


def _find_encoder(key: str, name: str, *kinds: str) -> str:
    """As _find; "" for none. Raises: ValueError for a file that is cut short, too, and for GGUF."""
    if not name:
        return ""
    path = _find(key, name, *kinds)
    if path.suffix in _WITH_HEADER:
        read_header(path)
    return str(path)


def parts_of(path: Path) -> Iterator[str]:
    """Which of "clip" and "vae" a checkpoint holds beside its diffusion model."""
    names = read_header(path, is_model=True).tensors
    for part, prefixes in {"clip": CLIP_PARTS, "vae": _VAE_PARTS}.items():
        if any(name.startswith(prefixes) for name in names):
            yield part


def _own(key: str, what: str, path: str, is_there: bool) -> str:
    if not is_there:
        raise ValueError(f"{path} holds no {what}; name the {what} of the model with {key}")
    return path


def ask_comfyui(path: Path | str, what: str, call: Callable[[], Any]) -> Any:
    """What ComfyUI's code makes of a file, whose tensors it takes for granted. Raises: ValueError if it lacks some."""
    try:
        return call()
    except torch.cuda.OutOfMemoryError:
        raise
    except _OF_DAMAGE as error:
        fault = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        missing = f"it lacks {error.args[0]}" if isinstance(error, KeyError) and error.args else fault
        raise ValueError(f"ComfyUI cannot {what} {path} ({missing}). It is incomplete or damaged: {AGAIN}") from error


def load_encoders(job: JobConfig) -> ComfyEncoders:
    """Those that the job names by files, loaded into memory. Raises: ValueError for a file that holds none."""
    cache, vision = job.cache, None
    made = load_clip_files(cache.stock_clip, cache.stock_clip_type, job.model.path) if cache.stock_clip else None
    clip = HostClip(made, weighs=cache.caption_weights) if made is not None else None
    vae = HostVae(load_vae(cache.stock_vae)) if cache.stock_vae else None
    audio_vae = HostVae(load_vae(cache.stock_audio_vae, of_clips=True)) if cache.stock_audio_vae else None
    if path := cache.stock_vision:
        import comfy.clip_vision

        loaded = ask_comfyui(path, "make a CLIP vision model of", lambda: comfy.clip_vision.load(path))
        vision = HostVision(_there(loaded, "CLIP vision model", path))
    return ComfyEncoders(clip, vae, HostConditioner(clip, vae, vision) if job.data.condition else None, audio_vae)


def load_clip_files(paths: Sequence[str], kind: str, model_path: str) -> Any:
    import comfy.sd
    import folder_paths

    embeddings = folder_paths.get_folder_paths("embeddings")
    if _is_own(paths, model_path):
        found = comfy.sd.load_checkpoint_guess_config(
            model_path, output_vae=False, output_clip=True, output_model=False, embedding_directory=embeddings
        )
        return _there(found[1], "text encoders", model_path)
    load = functools.partial(comfy.sd.load_clip, list(paths), embedding_directory=embeddings)
    clip_type = _clip_type(kind)
    made = ask_comfyui(", ".join(paths), "make text encoders of", lambda: load(clip_type=clip_type))
    return _there(made, "text encoders", ", ".join(paths))


def _clip_type(kind: str) -> Any:
    """What a CLIP loader of ComfyUI's makes of its type; "sdxl" is one of DualCLIPLoader alone. Raises: ValueError."""
    import comfy.sd

    kinds = {str(each).rpartition(".")[2].lower(): each for each in comfy.sd.CLIPType}
    kinds["sdxl"] = kinds["stable_diffusion"]
    if kind not in kinds:
        asked = f"is {kind!r}" if kind else "is not set"
        raise ValueError(f"cache.stock_clip_type {asked}; ComfyUI knows {', '.join(kinds)}")
    return kinds[kind]


def _is_own(files: Sequence[str], model_path: str) -> bool:
    """Whether these are one file, the model's checkpoint; also by another name, through a link."""
    return len(files) == 1 and bool(model_path) and Path(files[0]).resolve() == Path(model_path).resolve()


def load_vae(path: str, *, of_clips: bool = False) -> Any:
    """A VAE of its own file, or of a checkpoint that holds one. Raises: ValueError for a file without.
    of_clips: whether it is that of their sound, which Load LTXV Audio VAE takes out of LTX-2's checkpoint."""
    import comfy.sd
    import comfy.utils

    if not of_clips and path.endswith(_WITH_HEADER) and "vae" in parts_of(Path(path)):
        found = comfy.sd.load_checkpoint_guess_config(path, output_vae=True, output_clip=False, output_model=False)
        return _there(found[2], "VAE", path)
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    if of_clips and any(name.startswith("audio_vae.") for name in weights):
        names = {"audio_vae.": "autoencoder.", "vocoder.": "vocoder."}
        weights = comfy.utils.state_dict_prefix_replace(weights, names, filter_keys=True)
    vae = ask_comfyui(path, "make a VAE of", lambda: comfy.sd.VAE(sd=weights, metadata=metadata))
    vae.throw_exception_if_invalid()
    return vae


def given_to_loader(patcher: Any, *loaders: str) -> Any:
    """What one of these functions of comfy.sd made a patcher of; None for one that another made."""
    loader, given, *_ = getattr(patcher, "cached_patcher_init", None) or ("", None)
    return given if loader in [getattr(sys.modules.get("comfy.sd"), name, None) for name in loaders] else None


def path_of_vae(vae: Any) -> str:
    """The file that a stock VAE was loaded from; "" where nobody knows."""
    given = given_to_loader(getattr(vae, "patcher", None), "load_vae_patcher", "load_checkpoint_vae_patcher")
    return str(given[0]) if given else ""


def files_of_clip(clip: Any, model_path: str) -> tuple[tuple[str, ...], str]:
    """The files that a stock CLIP was loaded from, and their type; ((), "") where nobody knows, or for another
    checkpoint than the diffusion model's."""
    patcher = getattr(clip, "patcher", None)
    if patcher is None or clip.layer_idx is not None:  # a node behind its loader has chosen a layer
        return (), ""
    if given := given_to_loader(patcher, "load_clip_model_patcher"):
        return tuple(map(str, given[0])), str(given[2].name).lower()
    given = given_to_loader(patcher, "load_checkpoint_clip_patcher")
    files = (str(given[0]),) if given else ()
    return (files, "") if _is_own(files, model_path) else ((), "")


def _there(value: Any, what: str, path: str) -> Any:
    if value is None:
        raise ValueError(f"ComfyUI finds no {what} in {path}")
    return value


class KnownFiles(NamedTuple):
    """What encodes a model's captions and images, by folder: "text_encoders" and "vae". clip_type: "" for a model that
    nobody has listed. names: in that folder, or a path; "" for one that is not there. patterns: looked for."""

    clip_type: str
    names: dict[str, tuple[str, ...]]
    patterns: dict[str, tuple[str, ...]]


# Variant's name -> type, stems of the text encoders' files, stem of the VAE's. The first one that fits counts.
# Separators alone stand between its words (*), and behind it how weights are kept: other words are of other models.
_FLUX_VAE, _FLUX_2_VAE, _WAN_VAE, _WAN_5B_VAE = "ae", "flux2*vae", "wan*2[._]1*vae", "wan*2[._]2*vae"
_KEPT = r"([_.-](fp16|bf16|fp32|fp8(mixed)?|fp4(mixed|_flux2)?|scaled|mixed|e4m3fn|e5m2))*\.(safetensors|sft)"
_PUBLISHED = {
    "flux2-klein-9b": ("flux2", ("qwen_3_8b",), _FLUX_2_VAE),
    "flux2-klein-4b": ("flux2", ("qwen_3_4b",), _FLUX_2_VAE),
    "flux2*": ("flux2", ("mistral_3_small_flux2",), _FLUX_2_VAE),
    "flux1*": ("flux", ("clip_l", "t5xxl"), _FLUX_VAE),
    "wan2.2-ti2v-5b*": ("wan", ("umt5_xxl",), _WAN_5B_VAE),
    "wan*": ("wan", ("umt5_xxl",), _WAN_VAE),
    "comfyui-WAN22_T2V": ("wan", ("umt5_xxl",), _WAN_5B_VAE),
    "comfyui-WAN21_*": ("wan", ("umt5_xxl",), _WAN_VAE),
    "comfyui-Flux": ("flux", ("clip_l", "t5xxl"), _FLUX_VAE),
    "comfyui-Chroma": ("chroma", ("t5xxl",), _FLUX_VAE),
    "comfyui-ZImage": ("lumina2", ("qwen_3_4b",), _FLUX_VAE),
    "comfyui-QwenImage": ("qwen_image", ("qwen_2.5_vl_7b",), "qwen_image_vae"),
    "comfyui-SD3": ("sd3", ("clip_l", "clip_g", "t5xxl"), "sd3*vae"),
    "comfyui-SDXL": ("sdxl", ("clip_l", "clip_g"), "sdxl*vae"),
}


def known_files(info: CheckpointInfo) -> KnownFiles:
    """Those in a checkpoint itself, else those in ComfyUI's folders; 16 bits before fewer where there are several."""
    variant = info.variant.name if info.variant else info.family.name
    clip_type, clip, vae = next((row for each, row in _PUBLISHED.items() if fnmatchcase(variant, each)), ("", (), ""))
    patterns = {"text_encoders": clip, "vae": (vae,) if vae else ()}
    names = {kind: tuple(_first(kind, pattern) for pattern in each) for kind, each in patterns.items()}
    parts = parts_of(info.path) if info.family.name == COMFYUI else ()
    own = {"clip": "text_encoders", "vae": "vae"}
    return KnownFiles(clip_type, names | {own[part]: (str(info.path),) for part in parts}, patterns)


def _first(kind: str, pattern: str) -> str:
    fits = re.compile(pattern.replace("*", r"[\W_]*") + _KEPT)
    names = [name for name in list_components(kind) if fits.fullmatch(Path(name).name.lower())]
    return min(names, key=lambda name: ("fp8" in name.lower() or "fp4" in name.lower(), name), default="")
