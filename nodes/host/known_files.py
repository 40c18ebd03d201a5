"""Text encoders and VAE of a model that is a single file, by the names that ComfyUI's own templates give them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.checkpoint import CheckpointInfo
from ...families.registry import COMFYUI
from .folders import list_components


class KnownFiles(NamedTuple):
    """What encodes a model's captions and images, by folder: "text_encoders" and "vae".

    Args:
        clip_type: what ComfyUI's CLIP loaders call type; "" for a model that nobody has listed.
        names: in that folder, or a path; "" for one that is not there.
        patterns: of the names, as they were looked for.
    """

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
    from .native.files import parts_of

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
