"""Tiny builds of what can be trained natively, beside those of tiny_checkpoints.py: further classes, and classes with
all that their conditioning nodes add."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
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


_QWEN_IMAGE_21 = {
    "image_model": "qwen_image21", "num_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4,
    "context_in_dim": 24, "axes_dims_rope": (4, 6, 6),
}
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


def _sizes(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As CLIPTextEncodeSDXL says them: numbers."""
    return {"width": 1024, "height": 768, "crop_w": 8, "crop_h": 0, "target_width": 1024, "target_height": 768}


def _reference(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As ReferenceLatent gives it, of another size than the picture."""
    return {"reference_latents": [torch.randn(1, 16, 4, 6, generator=generator)]}


def _first_frame(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanImageToVideo gives it without CLIP vision."""
    mask = torch.ones(1, 1, 2, 4, 4)
    mask[:, :, 0] = 0
    return {"concat_latent_image": torch.randn(1, 16, 2, 4, 4, generator=generator), "concat_mask": mask}


def _first_frame_seen(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanImageToVideo gives it with CLIP vision."""
    states = torch.randn(1, 5, 1280, generator=generator)
    seen = Output(penultimate_hidden_states=states, last_hidden_state=states + 1, image_embeds=states[:, 0])
    return {**_first_frame(generator, tokens), "clip_vision_output": seen}


def _tokens_of_t5(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As Anima's text encoder gives them: without a batch."""
    ids = torch.randint(0, 32, (tokens + 2,), generator=generator, dtype=torch.int)
    return {"t5xxl_ids": ids, "t5xxl_weights": torch.rand(tokens + 2, generator=generator)}


def _references(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As two ReferenceLatent and Edit Model Reference Method give them."""
    latents = [torch.randn(1, 128, *sides, generator=generator) for sides in ((2, 3), (4, 2))]
    return {"reference_latents": latents, "reference_latents_method": "index_timestep_zero"}


def _edited(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeQwenImageEditPlus gives them."""
    return {"reference_latents": [torch.randn(1, 16, 1, *sides, generator=generator) for sides in ((4, 6), (8, 4))]}


def _edited_in_text(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeQwenImageEditPlus gives them of Qwen-Image 2.1: where in the text each reference belongs."""
    latents = [torch.randn(1, 64, *sides, generator=generator) for sides in ((2, 3), (3, 2))]
    return {"reference_latents": latents, "image_slots": [2, 4]}


def _direct_context(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As Ming-Image's text encoder gives it: states that are as wide as the model."""
    return {"direct_context": torch.randn(1, 3, 256, generator=generator)}


def _more_frames(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeMingImageEdit gives them beside that: two references as clean frames."""
    latents = [torch.randn(1, 16, 1, 8, 8, generator=generator) for _ in range(2)]
    return {**_direct_context(generator, tokens), "reference_latents": latents}


def _omni(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeZImageOmni gives them of one image: what is in front of it, and what is behind."""
    seen = Output(last_hidden_state=torch.randn(1, 6, 24, generator=generator), image_sizes=[(3, 32, 48)])
    texts = [torch.randn(1, count, 48, generator=generator) for count in (3, 4)]
    latent = torch.randn(1, 16, 4, 6, generator=generator)
    return {"reference_latents": [latent], "reference_latents_text_embeds": texts, "clip_vision_outputs": [seen]}


def _vision(generator: torch.Generator) -> Any:
    return Output(penultimate_hidden_states=torch.randn(1, 5, 1280, generator=generator))


def _controlled(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanVaceToVideo gives it, twice, and not as strong the second time."""
    frames = [torch.randn(1, 32, 2, 4, 4, generator=generator) for _ in range(2)]
    masks = [torch.rand(1, 64, 2, 4, 4, generator=generator).round() for _ in range(2)]
    return {"vace_frames": frames, "vace_mask": masks, "vace_strength": [1.0, 0.5]}


def _fun_control(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanFunControlToVideo gives it."""
    return {
        "concat_latent_image": torch.randn(1, 32, 2, 4, 4, generator=generator),
        "clip_vision_output": _vision(generator),
    }


def _fun_control_22(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As Wan22FunControlToVideo gives it, with a reference."""
    return {
        "concat_latent_image": torch.randn(1, 32, 2, 4, 4, generator=generator),
        "concat_mask": torch.rand(1, 4, 2, 4, 4, generator=generator).round(), "concat_mask_index": 16,
        "reference_latents": [torch.randn(1, 16, 1, 4, 4, generator=generator)],
    }


def _phantom(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanPhantomSubjectToVideo gives it of two subjects."""
    return {"time_dim_concat": torch.randn(1, 16, 2, 4, 4, generator=generator)}


def _camera(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanCameraImageToVideo gives it."""
    image = torch.randn(1, 16, 2, 4, 4, generator=generator)
    poses = torch.randn(1, 24, 2, 32, 32, generator=generator)
    return {"concat_latent_image": image, "camera_conditions": poses, "clip_vision_output": _vision(generator)}


def _sound(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanSoundImageToVideo gives it."""
    return {
        "audio_embed": torch.randn(1, 25, 8, 8, generator=generator),
        "reference_latents": [torch.randn(1, 16, 1, 8, 8, generator=generator)],
        "reference_motion": torch.randn(1, 16, 19, 8, 8, generator=generator),
        "control_video": torch.randn(1, 16, 2, 8, 8, generator=generator),
    }


def _voice(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanHuMoImageToVideo gives it; small_adapter makes the audio narrow."""
    return {
        "audio_embed": torch.randn(1, 3, 2, 1, 4, generator=generator),
        "reference_latents": [torch.randn(1, 16, 1, 4, 4, generator=generator)],
    }


def _animated(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanAnimateToVideo gives it; the latent's first frame is the reference's."""
    return {
        "concat_latent_image": torch.randn(1, 16, 3, 4, 4, generator=generator),
        "concat_mask": torch.rand(1, 4, 3, 4, 4, generator=generator).round(),
        "pose_video_latent": torch.randn(1, 16, 2, 4, 4, generator=generator),
        "face_video_pixels": torch.rand(1, 3, 8, 16, 16, generator=generator) * 2 - 1,
        "clip_vision_output": _vision(generator),
    }


def _posed(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanSCAILToVideo gives it, at every step."""
    return {
        "reference_latents": [torch.randn(1, 16, 1, 4, 4, generator=generator)],
        "pose_video_latent": torch.randn(1, 16, 2, 2, 2, generator=generator),
        "clip_vision_output": _vision(generator), "start_percent": 0.0, "end_percent": 1.0,
    }


def _masked(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanSCAILToVideo gives it of SCAIL-2, with identities."""
    masks = {"driving_mask_28ch": (1, 2, 28, 2, 2), "ref_mask_28ch": (1, 3, 28, 4, 4)}
    drawn = {name: torch.rand(shape, generator=generator).round() for name, shape in masks.items()}
    return {**_posed(generator, tokens), **drawn, "ref_mask_flag": True}


def _danced(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As WanDancerVideo gives it."""
    return {
        **_first_frame(generator, tokens), "clip_vision_output": _vision(generator),
        "clip_vision_output_ref": _vision(generator), "audio_embed": torch.randn(1, 6, 35, generator=generator),
        "fps": 25.0, "audio_inject_scale": 0.5,
    }


def _lyrics(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeAceStepAudio gives them."""
    return {"conditioning_lyrics": torch.randint(0, 20, (1, 4), generator=generator), "lyrics_strength": 0.8}


def _lyrics_and_timbre(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeAceStepAudio1.5 without codes and Set Reference Audio give them."""
    lyrics = torch.randn(1, 3, 12, generator=generator)
    timbre = torch.randn(1, 64, 9, generator=generator)
    return {"conditioning_lyrics": lyrics, "reference_audio_timbre_latents": [timbre]}


def _lyrics_alone(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As TextEncodeAceStepAudio1.5 gives them without codes."""
    return {"conditioning_lyrics": torch.randn(1, 3, 12, generator=generator)}


def _frame_rate(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As LTXVConditioning gives it."""
    return {"frame_rate": 24.0}


def _unprocessed(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As LTX-2.3's text encoder and LTXV Reference Audio give it."""
    tokens_of_sound = torch.randn(1, 3, 128, generator=generator)
    return {"frame_rate": 24.0, "unprocessed_ltxav_embeds": True, "ref_audio": {"tokens": tokens_of_sound}}


def _unprocessed_text(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As LTX-2.5's text encoder gives it."""
    return {"frame_rate": 24.0, "unprocessed_ltxav_embeds": True}


def _keyframes(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As MiniMax H3's text encoder, Image to Video and Add Guide with a sound give them: a first and a last frame."""
    first, last = (torch.randn(1, 24, 1, 4, 6, generator=generator) for _ in range(2))
    sound = torch.randn(1, 32, 2, 1, generator=generator)
    frames = [
        {"resolved_frame_index": 0, "latent": first}, {"resolved_frame_index": 4, "latent": last, "audio_latent": sound}
    ]
    return {"minimax_token_tags": (torch.arange(tokens) > 2).long(), "minimax_keyframes": frames}


def _several_references(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As MiniMax H3 Reference to Video gives them: a picture, a video with its sound, a sound."""
    picture, video = (torch.randn(1, 24, *sides, generator=generator) for sides in ((1, 4, 4), (2, 4, 6)))
    sounds = [torch.randn(1, 32, 2, length, generator=generator) for length in (1, 2)]
    video_sides = {"latent_t": 2, "latent_h": 4, "latent_w": 6, "ref_audio_t": 1}
    return {
        "minimax_token_tags": (torch.arange(tokens) > 2).long(),
        "minimax_refs": [
            {"kind": "image", "latent_h": 4, "latent_w": 4, "latent": picture},
            {"kind": "video_audio", **video_sides, "latent": video, "audio_latent": sounds[0]},
            {"kind": "audio", "ref_audio_t": 2, "audio_latent": sounds[1]},
        ],
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


def _wan(config_class, options, latent=(16, 2, 4, 4), *, is_detected=True, **changes) -> TinyFamily:
    config = {**FAMILIES["wan"].unet_config, **changes}
    return made_of(
        "wan", config_class=config_class, unet_config=config, latent=latent, options=options, is_detected=is_detected
    )


_LTX_2_WITH_SOUND = TinyFamily(
    "LTXAV", _LTX_2, (128, 2, 2, 3), (6, 24), ("transformer_blocks",), is_detected=False, sound=(8, 5, 16),
    options=_frame_rate,
)

# Every class that is trained by the name its row of the table has.
TRAINED: dict[str, TinyFamily] = {
    "FLUX.1": FAMILIES["flux1"], "FLUX.1 Kontext": made_of("flux1", options=_reference), "FLUX.2": FAMILIES["flux2"],
    "Chroma": FAMILIES["chroma"], "Wan 2.1 T2V, 2.2 T2V 14B": FAMILIES["wan"],
    "Wan 2.1 I2V": made_of("wan_i2v", options=_first_frame_seen),
    "Wan 2.2 I2V 14B": made_of("wan", unet_config={**FAMILIES["wan"].unet_config, "in_dim": 36}, options=_first_frame),
    "Wan 2.2 TI2V 5B": made_of("wan", config_class="WAN22_T2V", unet_config=_WAN_22, latent=(48, 2, 4, 4)),
    "Qwen-Image": FAMILIES["qwen_image"],
    "Z-Image": made_of("z_image", unet_config={**FAMILIES["z_image"].unet_config, "n_layers": 2}),
    "Lumina 2": made_of("lumina2", unet_config={**FAMILIES["lumina2"].unet_config, **_NARROW, "n_kv_heads": 1}),
    "SDXL": made_of("sdxl", unet_config=_UNET, options=_sizes),
    "SDXL v-prediction": made_of("sdxl", unet_config=_UNET, options=_sizes),
    "SD 1.5": made_of("sdxl", config_class="SD15", unet_config=_SD15, pooled=0), "SD 3.5": FAMILIES["sd3"],
    "LTX-Video": FAMILIES["ltxv"], "HunyuanVideo": FAMILIES["hunyuan_video"],
    "HunyuanVideo 1.5": made_of(
        "hunyuan_video", config_class="HunyuanVideo15", unet_config=_HUNYUAN_VIDEO_15, latent=(32, 2, 4, 4),
        pooled=16,  # made, and not read
        is_detected=False,
    ),
    "Cosmos-Predict2": FAMILIES["cosmos_predict2"],
    "Anima": made_of(
        "cosmos_predict2", config_class="Anima", unet_config=_ANIMA, context=(6, 48), options=_tokens_of_t5
    ),
    "Krea 2": FAMILIES["krea2"],
    "ERNIE-Image": TinyFamily("ErnieImage", _ERNIE, (128, 4, 4), (6, 12), ("layers",), is_detected=False),
    "HiDream-I1": FAMILIES["hidream"],
    "Wan 2.2 TI2V 5B image-to-video": made_of(
        "wan", config_class="WAN22_T2V", unet_config=_WAN_22, latent=(48, 2, 4, 4), noise_mask=_kept_first_frame
    ),
    "LTX-Video with guides": made_of("ltxv", latent=(128, 4, 4, 4), options=_guides, noise_mask=_guided),
    "FLUX.2 with references": made_of("flux2", options=_references),
    "Qwen-Image-Edit": made_of("qwen_image", options=_edited),
    "Qwen-Image 2.1": TinyFamily(
        "QwenImage21", _QWEN_IMAGE_21, (64, 4, 6), (6, 24), ("transformer_blocks",), is_detected=False, is_calm=True,
        has_bool_masks=True,
    ),
    "Qwen-Image 2.1 edit": TinyFamily(
        "QwenImage21", {**_QWEN_IMAGE_21, "fused_mlp": False}, (64, 4, 6), (6, 24), ("transformer_blocks",),
        is_detected=False, options=_edited_in_text, is_calm=True, has_bool_masks=True,
    ),
    "Z-Image Omni": made_of(
        "z_image", unet_config={**FAMILIES["z_image"].unet_config, "n_layers": 2, "siglip_feat_dim": 24}, options=_omni
    ),
    "Ming-Image": made_of(
        "z_image", config_class="MingImage", unet_config=_MING_IMAGE, latent=(16, 1, 8, 8), options=_direct_context
    ),
    "Ming-Image edit": made_of(
        "z_image", config_class="MingImage", unet_config=_MING_IMAGE, latent=(16, 1, 8, 8), options=_more_frames
    ),
    "Wan VACE": made_of("wan_vace", options=_controlled),
    "Wan 2.1 Fun Control": _wan("WAN21_FunControl2V", _fun_control, model_type="i2v", in_dim=48),
    "Wan 2.2 Fun Control": _wan("WAN21_T2V", _fun_control_22, in_dim=52, in_dim_ref_conv=16),
    "Wan Phantom": made_of("wan", options=_phantom),
    "Wan Camera": _wan("WAN21_Camera", _camera, model_type="camera", in_dim=32),
    "Wan 2.2 S2V": _wan(
        "WAN22_S2V", _sound, (16, 2, 8, 8), model_type="s2v", audio_dim=8, audio_inject_layers=[0, 2], is_detected=False
    ),
    "Wan HuMo": _wan("WAN21_HuMo", _voice, model_type="humo"),
    "Wan 2.2 Animate": _wan("WAN22_Animate", _animated, (16, 3, 4, 4), model_type="animate", in_dim=36, num_layers=5),
    "Wan SCAIL": _wan("WAN21_SCAIL", _posed, model_type="scail", in_dim=20),
    "Wan SCAIL-2": _wan("WAN21_SCAIL2", _masked, model_type="scail2", in_dim=20),
    "Wan Dancer": _wan(
        "WAN22_WanDancer", _danced, (16, 2, 4, 8), model_type="wandancer", in_dim=36, audio_inject_layers=[0, 2],
        is_detected=False,
    ),
    "LTX-2": _LTX_2_WITH_SOUND, "LTX-2 without sound": dataclasses.replace(_LTX_2_WITH_SOUND, sound=()),
    "LTX-2.3 with a voice": dataclasses.replace(
        _LTX_2_WITH_SOUND, unet_config=_LTX_2_3, context=(6, 96), options=_unprocessed
    ),
    "LTX-2.5": dataclasses.replace(_LTX_2_WITH_SOUND, unet_config=_LTX_2_5, context=(6, 96), options=_unprocessed_text),
    "MiniMax H3": made_of("minimax_h3", options=_keyframes),
    "MiniMax H3 pruned, with references": made_of(
        "minimax_h3", unet_config={**FAMILIES["minimax_h3"].unet_config, "adaln_curve_grid": 9},
        options=_several_references,
    ),
    "ACE-Step": TinyFamily(
        "ACEStep", _ACE_STEP, (8, 16, 6), (6, 12), ("transformer_blocks",), is_detected=False, options=_lyrics
    ),
    "ACE-Step 1.5": TinyFamily(
        "ACEStep15", _ACE_STEP_15, (64, 11), (6, 12), ("decoder.layers",), is_detected=False, options=_lyrics_alone
    ),
    "ACE-Step 1.5 with a reference": TinyFamily(
        "ACEStep15", _ACE_STEP_15, (64, 11), (6, 12), ("decoder.layers",), is_detected=False, options=_lyrics_and_timbre
    ),
}

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
