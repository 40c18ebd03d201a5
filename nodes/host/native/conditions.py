"""What ComfyUI's nodes make of files: each way of families/comfy/conditions.py calls its nodes, as workflows do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ....families.comfy.conditions import WAYS
from ....families.comfy.inputs import NOISE_MASK
from ..comfy_encoders import HostClip, HostVae, HostVision, release_models
from ..compiler import outside

if TYPE_CHECKING:
    from ....encoding.comfy_sources import ConditionParts

_STEPS = 16  # pixels; sides of a scaled reference are multiples of them, as FLUX's VAEs and patches want


class HostConditioner:
    """ComfyUI's encoders as encoding/comfy_sources.py asks for them; those that a way does not need may be None."""

    def __init__(self, clip: HostClip | None, vae: HostVae | None, vision: HostVision | None) -> None:
        self._clip: Any = clip and clip.given
        self._vae: Any = vae and vae.stock
        self._vision: Any = vision and vision.stock
        self.sees_with = vision.fingerprint if vision else ""

    def make(self, parts: ConditionParts) -> Any:
        """A CONDITIONING of one sample; where the text encoder is shown nothing, its states are a placeholder.
        Raises: ValueError for a ComfyUI without these nodes, or an encoder that is missing."""
        way = WAYS[parts.way]
        for value, is_needed, key in ((self._vae, True, "stock_vae"), (self._clip, way.reads_text, "stock_clip")):
            if is_needed and value is None:
                raise ValueError(f'data.condition = "{parts.way}" needs cache.{key}')
        with torch.inference_mode(), outside(about="what conditions this sample"):
            try:
                if parts.way in ("reference", "kontext"):
                    return self._with_references(parts)
                return self._read_with_text(parts) if way.reads_text else self._video(parts)
            except (ImportError, AttributeError) as error:
                missing = f'this ComfyUI lacks what data.condition = "{parts.way}" asks of it ({error}); update it'
                raise ValueError(missing) from error

    def _with_references(self, parts: ConditionParts) -> Any:
        from comfy_extras.nodes_edit_model import ReferenceLatent
        from comfy_extras.nodes_flux import FluxKontextImageScale
        from comfy_extras.nodes_post_processing import ImageScaleToTotalPixels

        conditioning, node, how = _placeholder(), FluxKontextImageScale, dict[str, Any]()
        if parts.way != "kontext":
            node = ImageScaleToTotalPixels
            how = {"upscale_method": "area", "megapixels": parts.megapixels, "resolution_steps": _STEPS}
        for image in parts.references:
            latent = {"samples": self._vae.encode(node.execute(image=image, **how)[0])}
            (conditioning,) = ReferenceLatent.execute(conditioning=conditioning, latent=latent).args
        return conditioning

    def _read_with_text(self, parts: ConditionParts) -> Any:
        from comfy_extras.nodes_qwen import TextEncodeQwenImageEdit, TextEncodeQwenImageEditPlus
        from comfy_extras.nodes_zimage import TextEncodeZImageOmni

        given = {"clip": self._clip, "prompt": parts.caption, "vae": self._vae}
        if parts.way == "qwen-image-edit":
            (image,) = parts.references
            return TextEncodeQwenImageEdit.execute(**given, image=image)[0]
        given |= {f"image{number}": image for number, image in enumerate(parts.references, start=1)}
        if parts.way == "qwen-image-edit-plus":
            return TextEncodeQwenImageEditPlus.execute(**given)[0]
        return TextEncodeZImageOmni.execute(**given, image_encoder=self._vision)[0]

    def _video(self, parts: ConditionParts) -> Any:
        from comfy_extras import nodes_wan

        given: dict[str, Any] = dict(zip(("height", "width", "length"), parts.size, strict=True))
        given |= {"vae": self._vae, "batch_size": 1}
        if parts.way == "first-frame" and self._vae.latent_channels == WAYS[parts.way].masked:
            (latent,) = nodes_wan.Wan22ImageToVideoLatent.execute(**given, start_image=parts.first).args
            return _placeholder({NOISE_MASK: latent["noise_mask"]})
        given |= {"positive": _placeholder(), "negative": _placeholder()}
        if WAYS[parts.way].sees and self._vision is not None:
            given["clip_vision_output"] = self._vision.encode_image(parts.first, crop=False)
        if parts.way == "first-frame":
            return nodes_wan.WanImageToVideo.execute(**given, start_image=parts.first)[0]
        given["control_video"] = parts.control
        if parts.way == "vace":
            return nodes_wan.WanVaceToVideo.execute(**given, strength=1.0)[0]
        if parts.way == "fun-control":
            return nodes_wan.WanFunControlToVideo.execute(**given)[0]
        (image,) = parts.references or (None,)
        return nodes_wan.Wan22FunControlToVideo.execute(**given, ref_image=image)[0]

    release = staticmethod(release_models)


def _placeholder(options: Mapping[str, Any] = {}) -> Any:
    """A CONDITIONING whose states nobody reads."""
    return [[torch.zeros(1, 1, 1), dict(options)]]
