"""ComfyUI's image models, one row each; a row that others are made from has a name."""

from __future__ import annotations

import dataclasses

from . import block_plans
from .native import NativeModel

_SELF_ATTENTION = ("attn1_patch", "attn1_output_patch")

FLUX = NativeModel(
    class_name="Flux",
    module="comfy.ldm.flux.model",
    block_lists=("double_blocks", "single_blocks"),
    tail=("final_layer",),
    replace_keys={"double_block": "double_blocks", "single_block": "single_blocks"},
    control_keys=("input", "output"),
    patches_inside=_SELF_ATTENTION,
    note="FLUX.1 and FLUX.2; FLUX.2 passes modulation as dataclasses, and blocks change img and txt in place",
    fused_attention=("single_blocks.*.linear1", "single_blocks.*.linear2"),
    tensor=block_plans.FLUX,
)

CHROMA = dataclasses.replace(
    FLUX,
    class_name="Chroma",
    module="comfy.ldm.chroma.model",
    is_sequential=True,
    note="the main device sends each block its slices of the modulation; skip_mmdit and skip_dit may skip blocks",
)

QWEN_IMAGE = NativeModel(
    class_name="QwenImageTransformer2DModel",
    module="comfy.ldm.qwen_image.model",
    block_lists=("transformer_blocks",),
    tail=("norm_out", "proj_out"),
    replace_keys={"double_block": "transformer_blocks"},
    control_keys=("input",),
    patches_between={"double_block": ("img", "txt", "x")},
    patches_inside=("attn1_patch",),
    note="blocks return text first; with references at timestep zero their modulation has twice the batch",
    tensor=block_plans.QWEN_IMAGE,
)

SD3 = NativeModel(
    class_name="OpenAISignatureMMDITWrapper",
    module="comfy.ldm.modules.diffusionmodules.mmdit",
    block_lists=("joint_blocks",),
    tail=("final_layer",),
    replace_keys={"double_block": "joint_blocks"},
    control_keys=("output",),
    note="SD3 and SD3.5; the last block returns no context",
    tensor=block_plans.SD3,
)

NEXT_DIT = NativeModel(
    class_name="NextDiT",
    module="comfy.ldm.lumina.model",
    block_lists=("layers",),
    tail=("final_layer",),
    patches_between={"double_block": ("img", "img_input", "txt", "pe", "vec", "x")},
    front_parameters=("x_pad_token", "cap_pad_token", "siglip_pad_token"),
    note="Lumina 2 and Z-Image; the refiners stay on the main device; a patch may write to its img and txt in place",
    tensor=block_plans.NEXT_DIT,
)

OMNIGEN_2 = NativeModel(
    class_name="OmniGen2Transformer2DModel",
    module="comfy.ldm.omnigen.omnigen2",
    block_lists=("layers",),
    tail=("norm_out",),
    front_parameters=("image_index_embedding",),
    note="the three refiners, two blocks each, stay on the main device",
    tensor=block_plans.OMNIGEN_2,
    sample_modules=("*norm?.linear",),
)

PIXEL_DIT = NativeModel(
    class_name="PixDiT_T2I",
    module="comfy.ldm.pixeldit.model",
    block_lists=("patch_blocks",),
    tail=("pixel_embedder", "pixel_blocks", "final_layer"),
    note="the pixel blocks stay on the main device: time is added to the stream before them",
    front_parameters=("y_pos_embedding",),
    ends_on_main_device=True,
    in_place=("pixel_blocks.0", "pixel_blocks.1"),
    tensor=block_plans.PIXEL_DIT,
    text_modules=("attn.*_y", "mlp_y.*"),
    is_joint=False,
)

_DOWN, _UP = (tuple(f"{name}.{level}" for level in range(4)) for name in ("down_blocks", "up_blocks"))

CASCADE_C = NativeModel(
    class_name="StageC",
    module="comfy.ldm.cascade.stage_c",
    block_lists=(*_DOWN, *_UP),
    tail=("clf",),
    transport="relay",
    control_keys=("input",),
    optional=(*_DOWN[2:], *_UP[2:]),
    # No plan for divided blocks: most of them are convolutions.
    note="Stable Cascade; between levels, and before the way up's skips, the stream is resized on the main device",
)

IMAGE_MODELS: tuple[NativeModel, ...] = (
    FLUX,
    CHROMA,
    dataclasses.replace(
        CHROMA,
        class_name="ChromaRadiance",
        module="comfy.ldm.chroma_radiance.model",
        tail=("nerf_image_embedder", "nerf_blocks", "nerf_final_layer", "nerf_final_layer_conv"),
        note="Chroma's blocks, then a pixel decoder of its own blocks, which stay on the main device",
    ),
    QWEN_IMAGE,
    NativeModel(
        class_name="QwenImage21Transformer2DModel",
        module="comfy.ldm.qwen_image21.model",
        block_lists=("transformer_blocks",),
        tail=("norm_out", "proj_out"),
        replace_keys={"single_block": "transformer_blocks"},
        patches_between={"single_block": ("img", "x")},
        patches_inside=("attn1_patch",),
        is_sequential=True,
        evidence="outside",
        remembers=("prefix_cache",),
        forgets_if_patched=True,
        tensor=block_plans.QWEN_IMAGE_21,
        note="blocks are handed an attention function that holds masks, or keys and values kept from the first step",
    ),
    dataclasses.replace(
        QWEN_IMAGE,
        class_name="MageFlowTransformer2DModel",
        module="comfy.ldm.mage_flow.model",
        note="Qwen-Image's blocks on unpacked latents",
    ),
    dataclasses.replace(
        QWEN_IMAGE,
        class_name="LensTransformer2DModel",
        module="comfy.ldm.lens.model",
        patches_inside=(),
        note="blocks return text first, as Qwen-Image's do",
        tensor=block_plans.LENS,
        is_joint=False,
    ),
    SD3,
    dataclasses.replace(SD3, class_name="MMDiT", note="what SD3's class is derived from"),
    NativeModel(
        class_name="UNetModel",
        module="comfy.ldm.modules.diffusionmodules.openaimodel",
        block_lists=("input_blocks", "middle_block", "output_blocks"),
        tail=("out", "id_predictor"),
        transport="relay",
        control_keys=("input", "middle", "output"),
        patches_between={
            "input_block_patch": (),
            "input_block_patch_after_skip": (),
            "middle_block_after_patch": ("h", "x", "emb", "context", "y", "timesteps"),
            "output_block_patch": (),
        },
        patches_inside=(*_SELF_ATTENTION, "middle_patch", "attn2_patch", "attn2_output_patch"),
        hooks_children=True,
        optional=("middle_block",),
        # No plan for divided blocks: most of them are convolutions.
        note="skips of the way down are joined on the way up; a control that does not fit is skipped without an error",
    ),
    CASCADE_C,
    dataclasses.replace(
        CASCADE_C,
        class_name="StageB",
        module="comfy.ldm.cascade.stage_b",
        control_keys=(),
        note="Stable Cascade's second model; the levels of the way up run their blocks several times",
    ),
    NEXT_DIT,
    dataclasses.replace(
        NEXT_DIT,
        class_name="NextDiTPixelSpace",
        tail=("dec_net",),
        note="NextDiT with a pixel decoder for a tail",
        ends_on_main_device=True,
    ),
    NativeModel(
        class_name="HiDreamImageTransformer2DModel",
        module="comfy.ldm.hidream.model",
        block_lists=("double_stream_blocks", "single_stream_blocks"),
        tail=("final_layer",),
        transport="relay",
        note="before every block that layer's text states are joined to the stream, and they are on the main device",
        tensor=block_plans.HIDREAM,
        no_forecast="its experts are chosen by the numbers that they compute with",
        text_modules=("*_t", "*.ff_t.*"),
        routed_modules={"*.experts.*": 0.5},  # two of four
    ),
    NativeModel(
        class_name="MMDiT",
        module="comfy.ldm.aura.mmdit",
        block_lists=("double_layers", "single_layers"),
        tail=("modF", "final_linear"),
        front_parameters=("positional_encoding", "register_tokens"),
        replace_keys={"double_block": "double_layers", "single_block": "single_layers"},
        note="the final modulation is applied to the stream outside any module",
        tensor=block_plans.AURA_FLOW,
        text_modules=("mlpC.*",),
    ),
    NativeModel(
        class_name="PixArtMS",
        module="comfy.ldm.pixart.pixartms",
        block_lists=("blocks",),
        tail=("final_layer",),
        # No plan for divided blocks: attention gives its output the width of its input, which is that of all heads.
        note="PixArt alpha and sigma; the forward knows no patches at all",
    ),
    OMNIGEN_2,
    dataclasses.replace(
        OMNIGEN_2,
        class_name="BooguTransformer2DModel",
        module="comfy.ldm.boogu.model",
        block_lists=("double_stream_layers", "single_stream_layers"),
        note="OmniGen 2 with double blocks before the single ones; the refiners stay on the main device",
        tensor=block_plans.BOOGU,
        text_modules=("instruct_*", "*.instruct_*"),
    ),
    NativeModel(
        class_name="JoyImageTransformer3DModel",
        module="comfy.ldm.joyimage.model",
        block_lists=("double_blocks",),
        tail=("norm_out", "proj_out"),
        replace_keys={"double_block": "double_blocks"},
        note="nothing but the stream between blocks",
        tensor=block_plans.JOY_IMAGE,
        is_joint=False,
    ),
    NativeModel(
        class_name="SingleStreamDiT",
        module="comfy.ldm.krea2.model",
        block_lists=("blocks",),
        tail=("last",),
        patches_inside=_SELF_ATTENTION,
        note="the text fusion's own blocks stay on the main device",
        tensor=block_plans.KREA_2,
    ),
    NativeModel(
        class_name="ErnieImageModel",
        module="comfy.ldm.ernie.model",
        block_lists=("layers",),
        tail=("final_norm", "final_linear"),
        note="one modulation, a list of tensors, for all blocks",
        tensor=block_plans.ERNIE_IMAGE,
    ),
    NativeModel(
        class_name="Ideogram4Transformer2DModel",
        module="comfy.ldm.ideogram4.model",
        block_lists=("layers",),
        tail=("final_layer",),
        note="one packed sequence of text and image",
        tensor=block_plans.IDEOGRAM_4,
    ),
    NativeModel(
        class_name="HiDreamO1Transformer",
        module="comfy.ldm.hidream_o1.model",
        block_lists=("language_model.layers",),
        tail=("language_model.norm", "final_layer2"),
        replace_keys={"double_block": "language_model.layers"},
        is_sequential=True,
        remembers=("_kv_cache_entries", "_visual_cache"),
        forgets_if_patched=True,
        ends_on_main_device=True,
        has_out=True,
        reads_first=("reference_latents",),
        # No plan for divided blocks: they return keys and values, of which a card would have some heads only.
        note="keys and values of the prompt stay on each block's card from step to step",
    ),
    NativeModel(
        class_name="SenseNovaU15",
        module="comfy.ldm.sensenova.model",
        block_lists=("language_model.model.layers",),
        tail=("language_model.model.norm_mot_gen", "fm_modules"),
        evidence="read",
        refusal="its layers are run through forward_prefix, forward_generation and forward_decode, never called",
        note="see refusal; the prompt is run through the layers before sampling, outside of any forward, as well",
    ),
    PIXEL_DIT,
    dataclasses.replace(
        PIXEL_DIT,
        class_name="PidNet",
        module="comfy.ldm.pixeldit.pid",
        tail=(*PIXEL_DIT.tail, "pit_lq_gate"),
        transport="relay",
        note="a gate on the main device mixes the low resolution into the stream before blocks",
        untrained="it draws a larger picture of a small one, and no dataset here holds both",
    ),
    NativeModel(
        class_name="HunYuanDiT",
        module="comfy.ldm.hydit.models",
        block_lists=("blocks",),
        tail=("final_layer",),
        transport="relay",
        replace_keys={"double_block": "blocks"},
        control_keys=("output",),
        note="HunyuanDiT; a ControlNet is added to a skip, and the two are on different cards otherwise",
        tensor=block_plans.HUNYUAN_DIT,
        text_modules=("attn2.kv_proj",),
        is_joint=False,
    ),
    dataclasses.replace(
        FLUX,
        class_name="Hunyuan3Dv2",
        module="comfy.ldm.hunyuan3d.model",
        control_keys=(),
        note="Hunyuan3D 2; FLUX's blocks without positions",
    ),
    NativeModel(
        class_name="HunYuanDiTPlain",
        module="comfy.ldm.hunyuan3dv2_1.hunyuandit",
        block_lists=("blocks",),
        tail=("final_layer",),
        replace_keys={"block": "blocks"},
        is_sequential=True,
        # No plan for divided blocks: attention joins q, k and v before it takes heads, so that a head has parts of all.
        # The MLPs alone would not pay.
        note="Hunyuan3D 2.1; skips are arguments of the later blocks; the forward swaps the halves of a batch",
    ),
    NativeModel(
        class_name="LatentSeqMMFlowModel",
        module="comfy.ldm.triposplat.model",
        block_lists=("blocks",),
        tail=("out_layer", "cam_out_layer"),
        transport="relay",
        # No plan for divided blocks: attention gives its output the width of its input, which is that of all heads.
        note="TripoSplat; before every block a module on the main device makes its rotary table from the stream",
    ),
)
