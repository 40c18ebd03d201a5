"""Tiny builds beside those of tiny_checkpoints.py: further classes, and classes with all their conditioning."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import comfy.ldm.ace.ace_step15
import comfy.ldm.ace.model
import comfy.ldm.anima.model
import comfy.ldm.wan.model
import comfy.ldm.wan.model_animate
import torch
from comfy_extras import nodes_lt
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, TinyFamily, make_weights
from safetensors.torch import save_file
from torch import nn

# fmt: off


_UNET = {**FAMILIES["sdxl"].unet_config, "channel_mult": [1, 1]}
_SD15 = {
    **{name: value for name, value in _UNET.items() if name not in ("num_classes", "adm_in_channels")},
    "use_linear_in_transformer": False, "num_head_channels": -1, "num_heads": 8, "adm_in_channels": None,
}
_NARROW = {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "axes_dims": [8, 12, 12]}
_WAN_22 = {**FAMILIES["wan"].unet_config, "in_dim": 48, "out_dim": 48}
_HUNYUAN_VIDEO_15 = {
    **FAMILIES["hunyuan_video"].unet_config, "in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1],
    "vec_in_dim": None, "guidance_embed": False, "use_cond_type_embedding": True, "vision_in_dim": 24, "depth": 4,
    "depth_single_blocks": 0, "meanflow_sum": True,
}
_ERNIE = {
    "image_model": "ernie", "hidden_size": 48, "num_attention_heads": 2, "num_layers": 4, "ffn_hidden_size": 64,
    "in_channels": 128, "out_channels": 128, "text_in_dim": 12, "rope_axes_dim": (8, 8, 8),
}
_ANIMA = {**FAMILIES["cosmos_predict2"].unet_config, "image_model": "anima", "crossattn_emb_channels": 48}


_QWEN_21 = TinyFamily(
    "QwenImage21",
    {
        "image_model": "qwen_image21", "num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4,
        "context_in_dim": 24, "axes_dims_rope": (4, 6, 6),
    },
    (64, 4, 6), (6, 24), ("transformer_blocks",), is_detected=False, is_calm=True, has_bool_masks=True,
)
# Its padding is zeros that nothing sees, or tokens that are learned; the former only shifts positions.
_MING_IMAGE = {
    **{name: value for name, value in FAMILIES["z_image"].unet_config.items() if name != "pad_tokens_multiple"},
    "image_model": "ming_image", "n_layers": 2, "masked_pad_multiple": 32,
}
_ACE_STEP = {
    "audio_model": "ace", "in_channels": 8, "out_channels": 8, "num_layers": 4, "attention_head_dim": 16,
    "num_attention_heads": 2, "inner_dim": 32, "max_position": 64, "mlp_ratio": 2.5, "patch_size": [16, 1],
    "max_height": 16, "text_embedding_dim": 12, "ssl_latent_dims": [8, 8], "lyric_encoder_vocab_size": 20,
    "lyric_hidden_size": 16,
}
_ACE_STEP_15 = {
    "audio_model": "ace1.5", "hidden_size": 32, "text_hidden_dim": 12, "num_dit_layers": 4, "num_lyric_layers": 1,
    "num_timbre_layers": 1, "num_tokenizer_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
    "intermediate_size": 64, "sliding_window": 2, "fsq_dim": 32, "fsq_levels": [2, 2, 2], "encoder_hidden_size": 32,
    "encoder_intermediate_size": 48, "encoder_num_heads": 2,
}


_LTX_2 = {
    "image_model": "ltxav", "num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4,
    "cross_attention_dim": 64, "audio_cross_attention_dim": 32, "audio_attention_head_dim": 8,
    "audio_num_attention_heads": 4, "caption_channels": 12, "connector_attention_head_dim": 16,
    "connector_num_attention_heads": 4, "audio_connector_attention_head_dim": 8, "connector_num_layers": 1,
}
# Its text goes through connectors that the model itself holds.
_LTX_2_3 = {
    **_LTX_2, "caption_proj_before_connector": True, "caption_projection_first_linear": False,
    "cross_attention_adaln": True, "apply_gated_attention": True,
}


# Without biases in the video's feed-forward, and with an embedding of frames that are given.
_LTX_2_5 = {**_LTX_2_3, "ff_bias": False, "use_keyframes_abs_pos_embedding": True}


class Output:
    """What CLIP Vision Encode gives: attributes, some of them tensors."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Numbers of this shape; of a mask zeros and ones. Integers below `below`, where that is not 0."""

    shape: tuple[int, ...]
    is_mask: bool = False
    below: int = 0

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        if self.below:
            return torch.randint(0, self.below, self.shape, generator=generator)
        if self.is_mask:
            return torch.rand(self.shape, generator=generator).round()
        return torch.randn(self.shape, generator=generator)


def one(*shape: int) -> Drawn:
    """Of a batch of one."""
    return Drawn((1, *shape))


def mask(*shape: int) -> Drawn:
    return Drawn((1, *shape), is_mask=True)


def given(**what: Any) -> Callable[[torch.Generator, int], dict[str, Any]]:
    """TinyFamily.options: what is Drawn is drawn, in lists and dicts, too, and what is a function is called."""

    return lambda generator, tokens: {name: _made(value, generator, tokens) for name, value in what.items()}


def _made(value: Any, *how: Any) -> Any:
    if isinstance(value, Drawn):
        return value.draw(how[0])
    if isinstance(value, dict):
        return {name: _made(each, *how) for name, each in value.items()}
    if isinstance(value, list):
        return [_made(each, *how) for each in value]
    return value(*how) if callable(value) else value


def _seen(generator: torch.Generator, tokens: int) -> Any:
    return Output(penultimate_hidden_states=torch.randn(1, 5, 1280, generator=generator))


def _all_seen(generator: torch.Generator, tokens: int) -> Any:
    states = torch.randn(1, 5, 1280, generator=generator)
    return Output(penultimate_hidden_states=states, last_hidden_state=states + 1, image_embeds=states[:, 0])


def _omni_seen(generator: torch.Generator, tokens: int) -> Any:
    return [Output(last_hidden_state=torch.randn(1, 6, 24, generator=generator), image_sizes=[(3, 32, 48)])]


def but_the_first_frame(*_: Any) -> torch.Tensor:
    frames = torch.ones(1, 1, 2, 4, 4)
    frames[:, :, 0] = 0
    return frames


def _of_t5(draw: Callable[..., torch.Tensor]) -> Callable[[torch.Generator, int], torch.Tensor]:
    """Without a batch, and longer than the text."""
    return lambda generator, tokens: draw(tokens + 2, generator)


def _token_tags(generator: torch.Generator, tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) > 2).long()


_FIRST_FRAME = {"concat_latent_image": one(16, 2, 4, 4), "concat_mask": but_the_first_frame}
_CONTROL = {"concat_latent_image": one(32, 2, 4, 4)}
_POSED = {  # as WanSCAILToVideo gives it, at every step
    "reference_latents": [one(16, 1, 4, 4)], "pose_video_latent": one(16, 2, 2, 2), "clip_vision_output": _seen,
    "start_percent": 0.0, "end_percent": 1.0,
}
_DIRECT = {"direct_context": one(3, 256)}  # as Ming-Image's text encoder gives it: states that are as wide as the model
_UNPROCESSED = {"frame_rate": 24.0, "unprocessed_ltxav_embeds": True}
_LYRICS = {"conditioning_lyrics": one(3, 12)}
# What nodes add to the text of a build, by its name.
_GIVEN: dict[str, Callable[[torch.Generator, int], dict[str, Any]]] = {
    **dict.fromkeys(
        ("SDXL", "SDXL v-prediction"),  # CLIPTextEncodeSDXL
        given(width=1024, height=768, crop_w=8, crop_h=0, target_width=1024, target_height=768),
    ),
    "FLUX.1 Kontext": given(reference_latents=[one(16, 4, 6)]),  # ReferenceLatent, of another size than the picture
    "Wan 2.2 I2V 14B": given(**_FIRST_FRAME),  # WanImageToVideo without CLIP vision
    "Wan 2.1 I2V": given(**_FIRST_FRAME, clip_vision_output=_all_seen),
    "Anima": given(  # its text encoder
        t5xxl_ids=_of_t5(lambda count, g: torch.randint(0, 32, (count,), generator=g, dtype=torch.int)),
        t5xxl_weights=_of_t5(lambda count, g: torch.rand(count, generator=g)),
    ),
    "FLUX.2 with references": given(  # two ReferenceLatent and Edit Model Reference Method
        reference_latents=[one(128, 2, 3), one(128, 4, 2)], reference_latents_method="index_timestep_zero"
    ),
    "Qwen-Image-Edit": given(reference_latents=[one(16, 1, 4, 6), one(16, 1, 8, 4)]),  # TextEncodeQwenImageEditPlus
    "Qwen-Image 2.1 edit": given(  # the same, with where in the text each reference belongs
        reference_latents=[one(64, 2, 3), one(64, 3, 2)], image_slots=[2, 4]
    ),
    "Ming-Image": given(**_DIRECT),
    "Ming-Image edit": given(reference_latents=[one(16, 1, 8, 8)] * 2, **_DIRECT),  # TextEncodeMingImageEdit
    "Z-Image Omni": given(  # TextEncodeZImageOmni of one image: what is in front of it, and what is behind
        clip_vision_outputs=_omni_seen, reference_latents_text_embeds=[one(3, 48), one(4, 48)],
        reference_latents=[one(16, 4, 6)],
    ),
    "Wan VACE": given(  # WanVaceToVideo, twice, and not as strong the second time
        vace_frames=[one(32, 2, 4, 4)] * 2, vace_mask=[mask(64, 2, 4, 4)] * 2, vace_strength=[1.0, 0.5]
    ),
    "Wan 2.1 Fun Control": given(**_CONTROL, clip_vision_output=_seen),  # WanFunControlToVideo
    "Wan 2.2 Fun Control": given(  # Wan22FunControlToVideo with a reference
        **_CONTROL, concat_mask=mask(4, 2, 4, 4), concat_mask_index=16, reference_latents=[one(16, 1, 4, 4)]
    ),
    "Wan Phantom": given(time_dim_concat=one(16, 2, 4, 4)),  # WanPhantomSubjectToVideo of two subjects
    "Wan Camera": given(  # WanCameraImageToVideo
        concat_latent_image=one(16, 2, 4, 4), camera_conditions=one(24, 2, 32, 32), clip_vision_output=_seen
    ),
    "Wan 2.2 S2V": given(  # WanSoundImageToVideo
        audio_embed=one(25, 8, 8), reference_latents=[one(16, 1, 8, 8)], reference_motion=one(16, 19, 8, 8),
        control_video=one(16, 2, 8, 8),
    ),
    # WanHuMoImageToVideo; small_adapter makes the audio narrow.
    "Wan HuMo": given(audio_embed=one(3, 2, 1, 4), reference_latents=[one(16, 1, 4, 4)]),
    "Wan 2.2 Animate": given(  # WanAnimateToVideo; the latent's first frame is the reference's
        concat_latent_image=one(16, 3, 4, 4), concat_mask=mask(4, 3, 4, 4), pose_video_latent=one(16, 2, 4, 4),
        face_video_pixels=lambda g, tokens: torch.rand(1, 3, 8, 16, 16, generator=g) * 2 - 1, clip_vision_output=_seen,
    ),
    "Wan SCAIL": given(**_POSED),
    "Wan SCAIL-2": given(  # with identities
        **_POSED, driving_mask_28ch=mask(2, 28, 2, 2), ref_mask_28ch=mask(3, 28, 4, 4), ref_mask_flag=True
    ),
    "Wan Dancer": given(  # WanDancerVideo
        **_FIRST_FRAME, clip_vision_output=_seen, clip_vision_output_ref=_seen, audio_embed=one(6, 35), fps=25.0,
        audio_inject_scale=0.5,
    ),
    "ACE-Step": given(conditioning_lyrics=Drawn((1, 4), below=20), lyrics_strength=0.8),  # TextEncodeAceStepAudio
    "ACE-Step 1.5": given(**_LYRICS),  # TextEncodeAceStepAudio1.5 without codes
    "ACE-Step 1.5 with a reference": given(**_LYRICS, reference_audio_timbre_latents=[one(64, 9)]),
    **dict.fromkeys(("LTX-2", "LTX-2 without sound"), given(frame_rate=24.0)),  # LTXVConditioning
    "LTX-2.3 with a voice": given(**_UNPROCESSED, ref_audio={"tokens": one(3, 128)}),  # LTXV Reference Audio
    "LTX-2.5": given(**_UNPROCESSED),
    "MiniMax H3": given(  # Image to Video and Add Guide with a sound: a first and a last frame
        minimax_token_tags=_token_tags,
        minimax_keyframes=[
            {"resolved_frame_index": 0, "latent": one(24, 1, 4, 6)},
            {"resolved_frame_index": 4, "latent": one(24, 1, 4, 6), "audio_latent": one(32, 2, 1)},
        ],
    ),
    "MiniMax H3 pruned, with references": given(  # Reference to Video: a picture, a video with its sound, a sound
        minimax_token_tags=_token_tags,
        minimax_refs=[
            {"kind": "image", "latent_h": 4, "latent_w": 4, "latent": one(24, 1, 4, 4)},
            {
                "kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 6, "ref_audio_t": 1,
                "latent": one(24, 2, 4, 6), "audio_latent": one(32, 2, 1),
            },
            {"kind": "audio", "ref_audio_t": 2, "audio_latent": one(32, 2, 2)},
        ],
    ),
}


def _kept_first_frame() -> torch.Tensor:
    """As Wan22ImageToVideoLatent gives it, and a corner that is noised less; samplers make it larger."""
    mask = torch.ones(1, 1, 2, 2, 2)
    mask[:, :, 0], mask[:, :, 1, 0, 0] = 0, 0.5
    return mask


def _guides(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As two LTXVAddGuide give them: a frame that is kept, and one on a wide grid, of which every other place is there,
    and which the clip attends to less."""
    node = nodes_lt.LTXVAddGuide
    conditions: Any = ([[torch.empty(0), {}]],) * 2
    latent, mask = torch.zeros(1, 128, 2, 4, 4), torch.ones(1, 1, 2, 1, 1)
    for frame, is_wide, strength in ((0, False, 1.0), (8, True, 0.75)):
        guide = torch.zeros(1, 128, 1, *((2, 2) if is_wide else (4, 4)))
        guide, there = node.dilate_latent(guide, 2 if is_wide else 1)
        *conditions, latent, mask = node.append_keyframe(
            *conditions, frame, latent, mask, guide, strength, (8, 32, 32), there, latent_downscale_factor=1 + is_wide
        )
        conditions = nodes_lt._append_guide_attention_entry(*conditions, 16, [1, 4, 4], strength=strength)
    return {**FAMILIES["ltxv"].options(generator, tokens), **conditions[0][0][1]}


def _guided() -> torch.Tensor:
    """The noise mask that the same nodes give: a first frame that is noised a little, and what the guides leave."""
    mask = torch.ones(1, 1, 4, 4, 4)
    mask[:, :, 0] = 0.25
    mask[:, :, 2] = 0
    mask[:, :, 3] = -1.75
    mask[:, :, 3, ::2, ::2] = 0.25
    return mask


def made_of(name: str, **changes: Any) -> TinyFamily:
    return dataclasses.replace(FAMILIES[name], **changes)


def _wan(config_class, latent=(16, 2, 4, 4), *, is_detected=True, **changes) -> TinyFamily:
    config = {**FAMILIES["wan"].unet_config, **changes}
    return made_of("wan", config_class=config_class, unet_config=config, latent=latent, is_detected=is_detected)


_LTX_2_WITH_SOUND = TinyFamily(
    "LTXAV", _LTX_2, (128, 2, 2, 3), (6, 24), ("transformer_blocks",), is_detected=False, sound=(8, 5, 16),
)

# Every class that is trained by the name its row of the table has.
TRAINED: dict[str, TinyFamily] = {
    "FLUX.1": FAMILIES["flux1"], "FLUX.1 Kontext": FAMILIES["flux1"], "FLUX.2": FAMILIES["flux2"],
    "Chroma": FAMILIES["chroma"], "Wan 2.1 T2V, 2.2 T2V 14B": FAMILIES["wan"], "Wan 2.1 I2V": FAMILIES["wan_i2v"],
    "Wan 2.2 I2V 14B": made_of("wan", unet_config={**FAMILIES["wan"].unet_config, "in_dim": 36}),
    "Wan 2.2 TI2V 5B": made_of("wan", config_class="WAN22_T2V", unet_config=_WAN_22, latent=(48, 2, 4, 4)),
    "Qwen-Image": FAMILIES["qwen_image"],
    "Z-Image": made_of("z_image", unet_config={**FAMILIES["z_image"].unet_config, "n_layers": 2}),
    "Lumina 2": made_of("lumina2", unet_config={**FAMILIES["lumina2"].unet_config, **_NARROW, "n_kv_heads": 1}),
    **dict.fromkeys(("SDXL", "SDXL v-prediction"), made_of("sdxl", unet_config=_UNET)),
    "SD 1.5": made_of("sdxl", config_class="SD15", unet_config=_SD15, pooled=0), "SD 3.5": FAMILIES["sd3"],
    "LTX-Video": FAMILIES["ltxv"], "HunyuanVideo": FAMILIES["hunyuan_video"],
    "HunyuanVideo 1.5": made_of(
        "hunyuan_video", config_class="HunyuanVideo15", unet_config=_HUNYUAN_VIDEO_15, latent=(32, 2, 4, 4),
        pooled=16,  # made, and not read
        is_detected=False,
    ),
    "Cosmos-Predict2": FAMILIES["cosmos_predict2"],
    "Anima": made_of("cosmos_predict2", config_class="Anima", unet_config=_ANIMA, context=(6, 48)),
    "Krea 2": FAMILIES["krea2"],
    "ERNIE-Image": TinyFamily("ErnieImage", _ERNIE, (128, 4, 4), (6, 12), ("layers",), is_detected=False),
    "HiDream-I1": FAMILIES["hidream"],
    "Wan 2.2 TI2V 5B image-to-video": made_of(
        "wan", config_class="WAN22_T2V", unet_config=_WAN_22, latent=(48, 2, 4, 4), noise_mask=_kept_first_frame
    ),
    "LTX-Video with guides": made_of("ltxv", latent=(128, 4, 4, 4), options=_guides, noise_mask=_guided),
    "FLUX.2 with references": FAMILIES["flux2"], "Qwen-Image-Edit": FAMILIES["qwen_image"],
    "Qwen-Image 2.1": _QWEN_21, "Qwen-Image 2.1 edit": dataclasses.replace(
        _QWEN_21, unet_config={**_QWEN_21.unet_config, "fused_mlp": False}
    ),
    "Z-Image Omni": made_of(
        "z_image", unet_config={**FAMILIES["z_image"].unet_config, "n_layers": 2, "siglip_feat_dim": 24}
    ),
    **dict.fromkeys(
        ("Ming-Image", "Ming-Image edit"),
        made_of("z_image", config_class="MingImage", unet_config=_MING_IMAGE, latent=(16, 1, 8, 8)),
    ),
    "Wan VACE": FAMILIES["wan_vace"],
    "Wan 2.1 Fun Control": _wan("WAN21_FunControl2V", model_type="i2v", in_dim=48),
    "Wan 2.2 Fun Control": _wan("WAN21_T2V", in_dim=52, in_dim_ref_conv=16), "Wan Phantom": FAMILIES["wan"],
    "Wan Camera": _wan("WAN21_Camera", model_type="camera", in_dim=32),
    "Wan 2.2 S2V": _wan(
        "WAN22_S2V", (16, 2, 8, 8), model_type="s2v", audio_dim=8, audio_inject_layers=[0, 2], is_detected=False
    ),
    "Wan HuMo": _wan("WAN21_HuMo", model_type="humo"),
    "Wan 2.2 Animate": _wan("WAN22_Animate", (16, 3, 4, 4), model_type="animate", in_dim=36, num_layers=5),
    "Wan SCAIL": _wan("WAN21_SCAIL", model_type="scail", in_dim=20),
    "Wan SCAIL-2": _wan("WAN21_SCAIL2", model_type="scail2", in_dim=20),
    "Wan Dancer": _wan(
        "WAN22_WanDancer", (16, 2, 4, 8), model_type="wandancer", in_dim=36, audio_inject_layers=[0, 2],
        is_detected=False,
    ),
    "LTX-2": _LTX_2_WITH_SOUND, "LTX-2 without sound": dataclasses.replace(_LTX_2_WITH_SOUND, sound=()),
    "LTX-2.3 with a voice": dataclasses.replace(_LTX_2_WITH_SOUND, unet_config=_LTX_2_3, context=(6, 96)),
    "LTX-2.5": dataclasses.replace(_LTX_2_WITH_SOUND, unet_config=_LTX_2_5, context=(6, 96)),
    "MiniMax H3": FAMILIES["minimax_h3"],
    "MiniMax H3 pruned, with references": made_of(
        "minimax_h3", unet_config={**FAMILIES["minimax_h3"].unet_config, "adaln_curve_grid": 9}
    ),
    "ACE-Step": TinyFamily("ACEStep", _ACE_STEP, (8, 16, 6), (6, 12), ("transformer_blocks",), is_detected=False),
    **dict.fromkeys(
        ("ACE-Step 1.5", "ACE-Step 1.5 with a reference"),
        TinyFamily("ACEStep15", _ACE_STEP_15, (64, 11), (6, 12), ("decoder.layers",), is_detected=False),
    ),
}
TRAINED |= {name: dataclasses.replace(TRAINED[name], options=options) for name, options in _GIVEN.items()}

# What a file says beside its weights.
_SAYS = {"SDXL v-prediction": {"v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}}


def save_trained(name: str, path: Path, family: TinyFamily | None = None) -> Path:
    family = family or TRAINED[name]
    weights = {key: tensor.contiguous() for key, tensor in family.as_published(make_weights(family)).items()}
    save_file({**weights, **_SAYS.get(name, {})}, path)
    return path


class _Faces(nn.Module):
    """Stands for Animate's motion encoder, which wants faces of 512x512 pixels."""

    def __init__(self, *, operations: Any, style_dim: int = 0, motion_dim: int = 0, **place: Any) -> None:
        super().__init__()
        self.linear = operations.Linear(3, 16, **place)

    def get_motion(self, faces: torch.Tensor) -> torch.Tensor:
        return self.linear(faces.mean(dim=(-2, -1)))


class _FaceTokens(nn.Module):
    """Stands for Animate's face encoder, whose width is fixed: [B, T, 16] -> [B, T / 4, 5 tokens, D]."""

    def __init__(self, *, operations: Any, in_dim: int, hidden_dim: int, num_heads: int, **place: Any) -> None:
        super().__init__()
        self.linear = operations.Linear(16, 5 * hidden_dim, **place)

    def forward(self, motion: torch.Tensor) -> torch.Tensor:
        return self.linear(motion[:, ::4].contiguous()).unflatten(-1, (5, -1))


class _LyricEncoder(nn.Module):
    """Stands for ACE-Step 1's encoder of lyrics, whose width is fixed."""

    def __init__(self, *, operations: Any, input_size: int, static_chunk_size: int, **place: Any) -> None:
        super().__init__()
        self.linear = operations.Linear(input_size, input_size, **place)

    def forward(self, tokens: torch.Tensor, mask: Any, **how: Any) -> tuple[torch.Tensor, None]:
        return self.linear(tokens), None


@contextlib.contextmanager
def small_adapter() -> Iterator[None]:
    """Inside, parts of fixed size are small: Anima's text adapter, whose table of tokens is as long as ever, HuMo's
    audio projection, Animate's encoders of faces, ACE-Step's encoder of lyrics and its rotary tables."""
    own = comfy.ldm.anima.model.LLMAdapter
    sizes = {"source_dim": 48, "target_dim": 48, "model_dim": 48, "num_layers": 1, "num_heads": 2}
    audio = comfy.ldm.wan.model.AudioProjModel
    narrow = {"seq_len": 2, "blocks": 1, "channels": 4, "intermediate_dim": 8}
    animate = comfy.ldm.wan.model_animate
    rotary = comfy.ldm.ace.ace_step15.RotaryEmbedding
    with (
        mock.patch.object(comfy.ldm.anima.model, "LLMAdapter", functools.partial(own, **sizes)),
        mock.patch.object(comfy.ldm.wan.model, "AudioProjModel", lambda **given: audio(**{**given, **narrow})),
        mock.patch.object(animate, "Generator", _Faces), mock.patch.object(animate, "FaceEncoder", _FaceTokens),
        mock.patch.object(comfy.ldm.ace.model, "LyricEncoder", _LyricEncoder),
        mock.patch.object(
            comfy.ldm.ace.ace_step15, "RotaryEmbedding", functools.partial(rotary, max_position_embeddings=64)
        ),
    ):
        yield
