"""Tiny builds of further classes and models that are trained by the mechanisms of those in trained_families.py, and of
some that are refused. ROWS are rows of the table."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import comfy.supported_models
import torch
from devicebridge.tests.comfy import native_cases
from devicebridge.tests.comfy.tiny_checkpoints import (
    _CHROMA,
    _COSMOS_PREDICT_2,
    _FLUX_1,
    _HUNYUAN_VIDEO,
    FAMILIES,
    TinyFamily,
    _mask,
)
from devicebridge.tests.comfy.trained_families import (
    _SD15,
    _UNET,
    TRAINED,
    but_the_first_frame,
    given,
    made_of,
    mask,
    one,
)

# fmt: off


def _whole(generator: torch.Generator, tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.long)


def _seen(generator: torch.Generator, tokens: int) -> dict[str, Any]:
    """As HiDreamO1ReferenceImages gives it: a picture, [1, height, width, 3]."""
    given = FAMILIES["hidream_o1"].options(generator, tokens)
    return {**given, "reference_latents": [torch.rand(1, 64, 96, 3, generator=generator)]}


_all_tokens = given(attention_mask=_whole)
_referred = given(reference_latents=[one(16, 4, 6)], attention_mask=_whole)
_two_texts = given(  # of HunyuanDiT's text encoders
    conditioning_mt5xl=one(6, 16), attention_mask=_whole, attention_mask_mt5xl=lambda generator, _: _whole(generator, 6)
)


def _image(*latent: int, of: tuple[int, ...] = ()) -> Any:
    """As InstructPixToPixConditioning gives it; with a mask of these sides as InpaintModelConditioning."""
    masks = {"concat_mask": mask(1, *of)} if of else {}
    return given(concat_latent_image=one(*latent), **masks)


def _of(case, config_class, image_model, latent, context, blocks, *, more=None, options=None, pooled=0) -> TinyFamily:
    """A build with the sizes that test_native_families.py has, which no file says."""
    named = {"image_model": image_model} if image_model else {}
    config = {**case.config, **named, **(more or {})}
    given = {} if options is None else {"options": options}
    return TinyFamily(config_class, config, latent, context, blocks, is_detected=False, pooled=pooled, **given)


def _beside(name: str, config_class: str, config: dict[str, Any], options: Any = None, **more: Any) -> TinyFamily:
    """A build that is given channels beside the noise."""
    given = more if options is None else {"options": options, **more}
    return made_of(name, config_class=config_class, unet_config=config, is_detected=False, **given)


def _one_modulation(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As PixelDiT's files have it: for each pixel of a patch one modulation of attention and MLP together."""
    width = weights["pixel_embedder.proj.weight"].shape[0]
    found = dict(weights)
    for name in [each for each in weights if ".adaLN_modulation_msa." in each]:
        parts = [found.pop(each) for each in (name, name.replace("_msa.", "_mlp."))]
        joined = torch.cat([each.unflatten(0, (-1, 3, width)) for each in parts], dim=1)
        found[name.replace("_msa.", ".0.")] = joined.flatten(0, 2)
    return {f"core.{name}": each for name, each in found.items()}


def joined(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Stable Cascade was published: queries, keys and values are one tensor."""
    found = dict(weights)
    for to_q in [each for each in weights if ".to_q." in each]:
        parts = [found.pop(to_q.replace(".to_q.", f".{part}.")) for part in ("to_q", "to_k", "to_v")]
        found[to_q.replace(".to_q.", ".in_proj_")] = torch.cat(parts)
    return found


_FOUR_HEADS = {"num_heads": 4, "axes_dim": [8, 12, 12]}
_OF_FLUX = {**_FLUX_1, **_FOUR_HEADS}
_OF_OMNIGEN = {"in_channels": 16, "num_attention_heads": 4, "axes_dim_rope": (8, 8, 8)}
_WIDER_HEADS = {"attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
_OF_VIDEO = {**_HUNYUAN_VIDEO, **_FOUR_HEADS}


OTHERS: dict[str, TinyFamily] = {
    "Ideogram 4": _of(
        native_cases.IDEOGRAM_4, "Ideogram4", "ideogram4", (128, 4, 4), (6, 12), ("layers",),
        more={"in_channels": 128, "attention_head_dim": 32, "mrope_section": (6, 5, 5)}, options=_all_tokens,
    ),
    "Lens": _of(
        native_cases.LENS, "Lens", "lens", (128, 4, 4), (6, 24), ("transformer_blocks",),
        more={"in_channels": 128, "out_channels": 32, **_WIDER_HEADS}, options=_mask,
    ),
    "MageFlow": _of(
        native_cases.MAGE_FLOW, "MageFlow", "mage_flow", (128, 4, 4), (6, 12), ("transformer_blocks",),
        more={"in_channels": 128, "out_channels": 128, **_WIDER_HEADS}, options=_all_tokens,
    ),
    "PixArt": _of(native_cases.PIXART, "PixArtSigma", "pixart_sigma", (4, 36, 40), (5, 12), ("blocks",)),
    "Cosmos 1": _of(
        native_cases.COSMOS_1, "CosmosT2V", "cosmos", (16, 2, 4, 4), (6, 12), ("blocks",),
        more={"in_channels": 16, "out_channels": 16, "model_channels": 96},
    ),
    "HunyuanDiT": _of(
        native_cases.HUNYUAN_DIT, "HunyuanDiT", "hydit", (4, 8, 8), (4, 12), ("blocks",),
        more={"size_cond": False, "use_style_cond": False, "input_size": None, "hidden_size": 64},
        options=_two_texts,
    ),
    "HunyuanImage 2.1": made_of(
        "hunyuan_video", config_class="HunyuanImage21",
        unet_config={
            **_OF_VIDEO, "in_channels": 64, "out_channels": 64, "patch_size": [1, 1], "vec_in_dim": None,
            "axes_dim": [16, 16],
        },
        latent=(64, 4, 4), pooled=0, is_detected=False,
    ),
    "LTX-2 unprocessed": dataclasses.replace(
        TRAINED["LTX-2 without sound"],
        unet_config={
            **TRAINED["LTX-2 without sound"].unet_config, "connector_num_attention_heads": 3,
            "connector_attention_head_dim": 4, "audio_connector_num_attention_heads": 3,
            "audio_connector_attention_head_dim": 4,
        },
        context=(6, 12),
    ),
    "Cosmos-Predict2 image-to-video": made_of(
        "cosmos_predict2", config_class="CosmosI2VPredict2",
        unet_config={**_COSMOS_PREDICT_2, "in_channels": 17, "num_heads": 4}, latent=(16, 2, 4, 4),
        noise_mask=but_the_first_frame,
    ),
    "Kandinsky 5": dataclasses.replace(
        _of(
            native_cases.KANDINSKY, "Kandinsky5", "kandinsky5", (16, 2, 4, 4), (6, 12), ("visual_transformer_blocks",),
            more={"in_visual_dim": 16, "out_visual_dim": 16, "visual_embed_dim": 33 * 4}, pooled=10,
        ),
        is_calm=True,
    ),
    "Stable Cascade C": _of(
        native_cases.CASCADE_C, "Stable_Cascade_C", "", (16, 6, 8), (5, 12), ("down_blocks",),
        more={"c_in": 16, "c_out": 16, "c_clip_img": 768, "stable_cascade_stage": "c"}, pooled=10,
    ),
    "Stable Cascade B": _of(
        native_cases.CASCADE_B, "Stable_Cascade_B", "", (4, 16, 16), (1, 12), ("down_blocks",),
        more={"c_in": 4, "c_out": 4, "c_effnet": 16, "stable_cascade_stage": "b"}, pooled=12,
    ),
    "FLUX.1 Fill": _beside("flux1", "FluxInpaint", {**_OF_FLUX, "in_channels": 96}, _image(16, 8, 8, of=(64, 64))),
    "FLUX.1 Schnell": _beside("flux1", "FluxSchnell", {**_OF_FLUX, "guidance_embed": False}),
    "LongCat-Image": TinyFamily(
        "LongCatImage", {**_OF_FLUX, "guidance_embed": False, "vec_in_dim": None, "txt_ids_dims": [1, 2]}, (16, 8, 8),
        (6, 48), ("double_blocks", "single_blocks"), is_detected=False,
    ),
    "Chroma Radiance": TinyFamily(
        "ChromaRadiance",
        {
            **_CHROMA, **native_cases.CHROMA_RADIANCE.config, "image_model": "chroma_radiance", "axes_dim": [4, 6, 6],
            "patch_size": 2, "hidden_size": 64, "out_dim": 64,
        },
        (3, 8, 8), (6, 12), ("double_blocks", "single_blocks"), is_detected=False,
    ),
    "HunyuanVideo I2V": _beside(
        "hunyuan_video", "HunyuanVideoI2V", {**_OF_VIDEO, "in_channels": 33}, _image(16, 2, 4, 4, of=(2, 4, 4))
    ),
    "SkyReels I2V": _beside(
        "hunyuan_video", "HunyuanVideoSkyreelsI2V", {**_OF_VIDEO, "in_channels": 32}, _image(16, 2, 4, 4)
    ),
    "SD 1.5 inpainting": _beside("sdxl", "SD15", {**_SD15, "in_channels": 9}, _image(4, 8, 8, of=(8, 8)), pooled=0),
    "SD 1.5 InstructPix2Pix": _beside(
        "sdxl", "SD15_instructpix2pix", {**_SD15, "in_channels": 8}, _image(4, 8, 8), pooled=0
    ),
    "SD 2 v-prediction": made_of(
        "sdxl", config_class="SD20",
        unet_config={**_SD15, "num_head_channels": 32, "num_heads": -1, "use_linear_in_transformer": True}, pooled=0,
    ),
    "SDXL refiner": made_of(
        "sdxl", config_class="SDXLRefiner", unet_config={**_UNET, "adm_in_channels": 2560},
        options=given(aesthetic_score=7.5, width=1024, height=768),  # CLIPTextEncodeSDXLRefiner
    ),
    "AuraFlow": _of(
        native_cases.AURA, "AuraFlow", "", (4, 8, 8), (6, 12), ("double_layers", "single_layers"),
        more={"dim": 64},
    ),
    "OmniGen2": _of(
        native_cases.OMNIGEN, "Omnigen2", "omnigen2", (16, 8, 8), (6, 12), ("layers",), more=_OF_OMNIGEN,
        options=_referred,
    ),
    "Boogu-Image": _of(
        native_cases.BOOGU, "Boogu", "boogu", (16, 8, 8), (6, 12), ("double_stream_layers", "single_stream_layers"),
        more=_OF_OMNIGEN, options=_referred,
    ),
    "JoyImage": _of(
        native_cases.JOY_IMAGE, "JoyImage", "joyimage", (16, 1, 8, 8), (6, 12), ("double_blocks",),
        more={"in_channels": 16, "hidden_size": 64, "rope_dim_list": [4, 6, 6]},
        options=given(reference_latents=[one(16, 1, 4, 6)]),
    ),
    "Mochi": _of(
        native_cases.MOCHI, "GenmoMochi", "mochi_preview", (12, 2, 4, 4), (5, 16), ("blocks",),
        more={"in_channels": 12, "hidden_size_x": 96, "hidden_size_y": 48, "mlp_ratio_x": 128.0},
        options=_mask,
    ),
    "Kandinsky 5 Image": dataclasses.replace(
        _of(
            native_cases.KANDINSKY, "Kandinsky5Image", "kandinsky5", (16, 8, 8), (6, 12),
            ("visual_transformer_blocks",),
            more={"in_visual_dim": 16, "out_visual_dim": 16, "visual_embed_dim": 64}, pooled=10,
        ),
        is_calm=True,
    ),
    "CogVideoX": _of(
        native_cases.COG_VIDEO_X, "CogVideoX_T2V", "cogvideox", (16, 3, 4, 4), (5, 12), ("blocks",),
        more={"in_channels": 16, "out_channels": 16, "ofs_embed_dim": None, "sample_width": 4, "sample_height": 4},
    ),
    "SD x4 upscaler": _beside(
        "sdxl", "SD_X4Upscaler",
        {**_SD15, "in_channels": 7, "num_classes": 1000, "disable_self_attentions": [True, False]},
    ),
    "SVD": _beside(
        "sdxl", "SVD_img2vid",
        {
            **_UNET, "in_channels": 8, "adm_in_channels": 768, "use_temporal_attention": True,
            "use_temporal_resblock": True, "video_kernel_size": [3, 1, 1], "extra_ff_mix_layer": True,
            "merge_strategy": "learned_with_images", "merge_factor": 0.0, "num_head_channels": 32, "num_heads": -1,
        },
    ),
    "CogVideoX image-to-video": _of(
        native_cases.COG_VIDEO_X, "CogVideoX_I2V", "cogvideox", (16, 3, 4, 4), (5, 12), ("blocks",),
        more={"in_channels": 32, "out_channels": 16, "sample_width": 4, "sample_height": 4},
        options=_image(16, 3, 4, 4),
    ),
    "Z-Image in pixel space": made_of(
        "z_image", config_class="ZImagePixelSpace",
        unet_config={
            **FAMILIES["z_image"].unet_config, "image_model": "zimage_pixel", "n_layers": 2, "in_channels": 3,
            "patch_size": 4, "decoder_hidden_size": 16, "decoder_num_res_blocks": 2, "decoder_max_freqs": 4,
            "use_x0": True,
        },
        latent=(3, 16, 16),
    ),
    "PixelDiT": dataclasses.replace(
        _of(
            native_cases.PIXEL_DIT, "PixelDiTT2I", "pixeldit_t2i", (3, 16, 16), (6, 12), ("patch_blocks",),
            more={"hidden_size": 64, "patch_size": 2},
        ),
        is_calm=True, as_published=_one_modulation,
    ),
    "HiDream-O1": FAMILIES["hidream_o1"], "HiDream-O1 with a reference": made_of("hidream_o1", options=_seen),
}

# Rows of the table; the others are refused, or fail in a step.
ROWS = (
    "FLUX.1 Schnell", "FLUX.1 Fill", "LongCat-Image", "HunyuanVideo I2V", "SkyReels I2V", "HunyuanImage 2.1", "Lens",
    "MageFlow", "JoyImage", "CogVideoX", "SD 1.5 inpainting", "Ideogram 4", "OmniGen2", "Boogu-Image", "Mochi",
    "AuraFlow", "Stable Cascade C", "SD 2 v-prediction", "Cosmos-Predict2 image-to-video", "Kandinsky 5",
    "Kandinsky 5 Image", "SDXL refiner", "HunyuanDiT", "SD 1.5 InstructPix2Pix", "CogVideoX image-to-video", "PixArt",
    "Cosmos 1", "Chroma Radiance", "Z-Image in pixel space", "PixelDiT", "HiDream-O1", "HiDream-O1 with a reference",
)


# All builds whose training the table tells, by name.
BUILDS = {**TRAINED, **{name: OTHERS[name] for name in ROWS}}


@contextlib.contextmanager
def other_sizes() -> Iterator[None]:
    """Inside, classes that have one published size can be small."""
    with contextlib.ExitStack() as patches:
        for name in ("Ideogram4", "JoyImage", "SD_X4Upscaler"):
            patches.enter_context(mock.patch.object(getattr(comfy.supported_models, name), "unet_extra_config", {}))
        yield
