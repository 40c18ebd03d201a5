"""Ways to condition one of ComfyUI's own models on files, by their names in data.condition; nodes/host/native/
conditions.py calls the nodes. What a model reads of their CONDITIONING: comfy/model_base.py of ComfyUI 0.33.0."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...config.data import EvaluationConfig

VISION = "clip_vision_output"  # what CLIP vision saw, as a CONDITIONING calls it


@dataclass(frozen=True)
class ConditionWay:
    """What a way takes and makes."""

    model: str  # ComfyUI's class that takes it
    channels: int = 0  # of its latents; 0 for any
    beside: Callable[[int], int] = lambda channels: 0  # channels beside the noise, from those of the latents
    masked: int = 0  # channels of the latents of a model that is given a noise mask in place of that; 0 for none
    least: int = 0  # reference pictures of a sample, as is most
    most: int = 0
    takes_control: bool = False  # a clip, or of a picture a picture, that shows what the sample follows
    takes_first_frame: bool = False  # of the clip itself
    reads_text: bool = False  # whether the text encoder is shown the references
    sees: bool = False  # whether CLIP vision sees it, where the job names one; of a video it sees the first frame


WAYS: dict[str, ConditionWay] = {
    "reference": ConditionWay("Flux", least=1, most=10),
    "kontext": ConditionWay("Flux", channels=16, least=1, most=10),
    "qwen-image-edit": ConditionWay("QwenImageTransformer2DModel", least=1, most=1, reads_text=True),
    "qwen-image-edit-plus": ConditionWay("QwenImageTransformer2DModel", least=1, most=3, reads_text=True),
    "z-image-omni": ConditionWay("NextDiT", least=1, most=3, reads_text=True, sees=True),
    "first-frame": ConditionWay(  # 48 channels are Wan 2.2's 5B, which begins with the frame's own latents
        "WanModel", beside=lambda channels: channels + 4, masked=48, takes_first_frame=True, sees=True
    ),
    "vace": ConditionWay("VaceWanModel", takes_control=True),
    "fun-control": ConditionWay(
        "WanModel", channels=16, beside=lambda channels: 2 * channels, takes_control=True, sees=True
    ),
    "fun-control-2.2": ConditionWay("WanModel", beside=lambda channels: 2 * channels + 4, most=1, takes_control=True),
}


def way_problem(name: str, model: str, channels: int, beside: int) -> str:
    """Why a model cannot be conditioned in this way; "" if it can. model: its class. channels: of its latents. beside:
    channels it is given beside the noise."""
    way = WAYS[name]
    fits = [each for each in WAYS if _fits(WAYS[each], model, channels, beside)]
    if _fits(way, model, channels, beside):
        return ""
    others = f"it takes {' or '.join(fits)}" if fits else "nothing of folders conditions it"
    return (
        f'data.condition = "{name}" is for a {way.model}, but this model is a {model} with {channels} latent '
        f"channels and {beside} beside the noise; {others}"
    )


def vision_problem(name: str, needs: Collection[str], *, is_named: bool) -> str:
    """Why a model with an image embedder would be given no CLIP vision in this way; "" if it has none, or is given it.
    needs: options of a CONDITIONING that the model needs. is_named: whether the job names a CLIP vision model."""
    if VISION not in needs or WAYS[name].sees and is_named:
        return ""
    found = "the job names no CLIP vision model" if WAYS[name].sees else f'data.condition = "{name}" gives it none'
    by_file = "name its CLIP vision model with cache.stock_vision, or " if WAYS[name].sees else ""
    return (
        f"this model has an image embedder, which reads CLIP vision, and {found}; {by_file}train it by Dataset from "
        "Latents and Conditioning, with CLIP Vision Encode (CLIPVisionEncode) in the graph"
    )


def evaluation_problem(name: str, held_out: EvaluationConfig) -> str:
    """Why images that are held out cannot be conditioned in this way; "" if they can, or there is neither."""
    way = WAYS.get(name)
    needs = {"references": way.least, "control": way.takes_control} if way and held_out.folder else {}
    for missing in (each for each, is_needed in needs.items() if is_needed and not getattr(held_out, each)):
        return (
            f'data.condition = "{name}" needs {missing} of the images in evaluation.folder, too; name their folder '
            f"with evaluation.{missing}, or remove evaluation.folder"
        )
    return ""


def _fits(way: ConditionWay, model: str, channels: int, beside: int) -> bool:
    if way.model != model:
        return False
    is_masked = way.masked == channels and not beside
    return is_masked or way.channels in (0, channels) and way.beside(channels) == beside
