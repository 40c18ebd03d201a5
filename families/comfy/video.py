"""ComfyUI's video models, and Cosmos Predict2 with what is built on it, one row each."""

from __future__ import annotations

import dataclasses

from ..tensor_plan import plan
from .image import FLUX
from .native import Follows, NativeModel

WAN_MODEL = NativeModel(
    path="comfy.ldm.wan.model.WanModel",
    tail=("head",),
    replace_keys={"double_block": "blocks"},
    patches_inside=("attn1_patch", "attn2_patch"),
    text_modules=("cross_attn.k*", "cross_attn.v*"),
    is_joint=False,
    note="Wan 2.1 and 2.2, text and image to video; modulation is a parameter of the block itself",
    # q and k are normalised over all heads, and the MLP may compute its second linear itself
    tensor=plan(
        heads="*_attn.q *_attn.k *_attn.v *_attn.k_img *_attn.v_img",
        back="*_attn.o",
        mlp="ffn.0>ffn.2/ffn",
        num_heads="num_heads",
        norms=("*_attn.norm_*",),
    ),
    fps=16,
)

WAN_S2V = dataclasses.replace(
    WAN_MODEL,
    path="comfy.ldm.wan.model.WanModel_S2V",
    transport="relay",
    in_place=("audio_injector",),
    note="the audio injector on the main device changes the stream after every block it knows",
)

WAN_SCAIL = dataclasses.replace(WAN_MODEL, path="comfy.ldm.wan.model.SCAILWanModel")

WAN_CAUSAL = dataclasses.replace(
    WAN_S2V,
    path="comfy.ldm.wan.ar_model.CausalWanModel",
    in_place=(),
    refusal="its blocks write keys, values and a position into caches they are handed",
    note="on another device the writes would go to a copy and the next frames would not see the earlier ones",
)

LTXV = NativeModel(
    path="comfy.ldm.lightricks.model.LTXVModel",
    block_lists=("transformer_blocks",),
    tail=("norm_out", "proj_out"),
    tail_parameters=("scale_shift_table",),
    read_by_tail={"_prepare_timestep": 1},  # embedded_timestep
    tail_arguments={"_process_output": ("grid_mask",)},
    front_parameters=("keyframes_abs_pos_embedding",),
    replace_keys={"double_block": "transformer_blocks"},
    # q and k are normalised over all heads, and the rotary table has one row per head
    tensor=plan(
        heads="*attn*.to_[qkv] *attn*.to_gate_logits",
        back="*attn*.to_out.0",
        mlp="ff.net.0.proj>ff.net.2/ff audio_ff.net.0.proj>audio_ff.net.2/audio_ff",
        num_heads="attn1.heads",
        norms=("*attn*.[qk]_norm",),
        arguments={"*attn?": {"pe": 2, "k_pe": 2}, "*_attn": {"pe": 2, "k_pe": 2}},
    ),
    fps=25,  # the frame_rate that its positions are scaled by, unless a CONDITIONING says another
    note="the tail mixes a free parameter with the stream; a guide mask is an object with tensors in slots",
)

# Linears of a block of LTX-2 that run over text or sound: its sound has about as few tokens as its text.
LTX_SOUND = (
    *("audio_attn*", "audio_ff*", "attn2.to_k", "attn2.to_v", "audio_to_video_attn.to_k", "audio_to_video_attn.to_v"),
    *("video_to_audio_attn.to_q", "video_to_audio_attn.to_out*"),
)

COSMOS_PREDICT_2 = NativeModel(
    path="comfy.ldm.cosmos.predict2.MiniTrainDIT",
    patches_inside=("attn1_patch", "attn2_patch", "mlp_patch"),
    note="extra positions are an argument of every block; the forward leaves its embeddings on the model, unread",
    # Anima's, too. A patch of the attention is given what q, k and v are made of.
    tensor=plan(
        heads="*_attn.[qkv]_proj", back="*_attn.output_proj", mlp="mlp.layer1>mlp.layer2", num_heads="self_attn.n_heads"
    ),
    text_modules=("cross_attn.[kv]_proj",),
    is_joint=False,
)

COSMOS_1 = NativeModel(
    path="comfy.ldm.cosmos.model.GeneralDIT",
    transport="relay",
    note="blocks are in a ModuleDict; extra positions are added to the stream in place before each",
    # A block is a list of cross-attention, self-attention and MLP
    tensor=plan(
        heads="blocks.*.block.attn.to_[qkv].0",
        back="blocks.*.block.attn.to_out.0",
        features="blocks.*.block.layer1",
        features_back="blocks.*.block.layer2",
        num_heads="blocks.0.block.attn.heads",
    ),
    text_modules=("blocks.1.block.attn.to_[kv].0",),
    is_joint=False,
)

VIDEO_MODELS: tuple[NativeModel, ...] = (
    WAN_MODEL,
    dataclasses.replace(WAN_MODEL, path="comfy.ldm.wan.model.CameraWanModel"),
    dataclasses.replace(
        WAN_MODEL,
        path="comfy.ldm.wan.model.VaceWanModel",
        block_lists=("blocks", "vace_blocks"),
        follows={"vace_blocks": Follows(main="blocks", mapping="vace_layers_mapping")},
        optional=("vace_blocks",),
        is_sequential=True,
        note="a VACE block runs after its main block and is added to it, so it must sit on the same card",
    ),
    WAN_S2V,
    dataclasses.replace(
        WAN_MODEL,
        path="comfy.ldm.wan.model.HumoWanModel",
        patches_inside=("attn1_patch",),
        note="audio is an argument of every block; the block calls no attn2_patch",
    ),
    dataclasses.replace(
        WAN_MODEL,
        path="comfy.ldm.wan.model_animate.AnimateWanModel",
        transport="relay",
        note="a face adapter on the main device is added to the stream after every fifth block",
    ),
    WAN_SCAIL,
    dataclasses.replace(WAN_SCAIL, path="comfy.ldm.wan.model.SCAIL2WanModel"),
    dataclasses.replace(
        WAN_S2V,
        path="comfy.ldm.wan.model_wandancer.WanDancerModel",
        tail=("head", "head_global"),
        in_place=("music_injector",),
        note="the music injector on the main device changes the stream after every block it knows",
    ),
    dataclasses.replace(
        WAN_S2V,
        path="comfy.ldm.wan.model_animate2.WanAnimate2Model",
        in_place=(),
        replace_keys={},
        refusal=(
            "its blocks are run through forward_pose and forward_gen, never called, and share buffers they write into"
        ),
    ),
    WAN_CAUSAL,
    dataclasses.replace(
        FLUX,
        path="comfy.ldm.hunyuan_video.model.HunyuanVideo",
        fps=24,
        note="HunyuanVideo 1 and 1.5, and HunyuanImage; the token refiner's own blocks stay on the main device",
    ),
    LTXV,
    dataclasses.replace(
        LTXV,
        path="comfy.ldm.lightricks.av_model.LTXAVModel",
        text_modules=LTX_SOUND,
        tail=("norm_out", "proj_out", "audio_norm_out", "audio_proj_out"),
        tail_parameters=("scale_shift_table", "audio_scale_shift_table"),
        note="blocks take and return (video, audio); compressed timesteps are objects with tensors in slots",
    ),
    NativeModel(
        path="comfy.ldm.minimax.model.MiniMaxH3Model",
        replace_keys={"double_block": "blocks"},
        note="text, references, audio and video are rows of one sequence, which blocks change in place; batch 1 only",
        # Of an int8 file the MLP computes its second linear itself
        tensor=plan(qkv="attn.qkv_proj", back="attn.out_proj", mlp="mlp.fc1>mlp.fc2/mlp", gathered="adaln_proj.linear"),
        fps=24,
        clip_steps=(17, 5, 2, 5),
        reads_level=True,
        takes_one=True,
    ),
    NativeModel(
        path="comfy.ldm.seedvr.model.NaDiT",
        tail=("vid_out_norm", "vid_out_ada", "vid_out"),
        replace_keys={"block": "blocks"},
        is_sequential=True,
        per_device=("cache",),
        note="SeedVR 2; blocks share window indices, rotary tables and repeated modulation through an object",
        # A layer has two modules, of video and text, or one for both
        tensor=plan(
            qkv="attn.proj_qkv.*", back="attn.proj_out.*", features="mlp.*.proj_in*", features_back="mlp.*.proj_out"
        ),
        text_modules=("*.txt", "*.txt.*"),
        is_joint=False,
    ),
    COSMOS_PREDICT_2,
    dataclasses.replace(COSMOS_PREDICT_2, path="comfy.ldm.anima.model.Anima"),
    COSMOS_1,
    NativeModel(
        path="comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
        replace_keys={"double_block": "blocks"},
        front_parameters=("pos_frequencies",),
        # The rotary table has angles of its own for every head
        tensor=plan(
            qkv="attn.qkv_?",
            back="attn.proj_?",
            mlp="mlp_x.w1>mlp_x.w2 mlp_y.w1>mlp_y.w2",
            gathered="mod_?",
            num_heads="attn.num_heads",
            arguments={"attn": {"rope_cos": 1, "rope_sin": 1}},
        ),
        text_modules=("attn.*_y", "mlp_y.*"),
        is_joint=False,
    ),
    NativeModel(
        path="comfy.ldm.kandinsky5.model.Kandinsky5",
        block_lists=("visual_transformer_blocks",),
        tail=("out_layer",),
        replace_keys={"double_block": "visual_transformer_blocks"},
        tensor=plan(
            heads="*_attention.to_*",
            back="*_attention.out_layer",
            mlp="feed_forward.in_layer>feed_forward.out_layer",
            gathered="visual_modulation.out_layer",
            num_heads="self_attention.num_heads",
        ),
        text_modules=("cross_attention.to_key", "cross_attention.to_value"),
        is_joint=False,
    ),
    NativeModel(
        path="comfy.ldm.prism.model.Prism",
        block_lists=("fusion_blocks", "remaining_video_blocks", "video_dit_2.blocks"),
        tail=("video_dit.head", "video_dit_2.head", "audio_dit.head"),
        evidence="outside",
        refusal="its fused blocks are never called; the model takes them apart and adds their results",
        note="see refusal; a second video model takes the place of one half of each fused block",
    ),
    NativeModel(
        path="comfy.ldm.kandinsky6.model.Kandinsky6NativeAVDiT",
        block_lists=("visual_blocks",),
        tail=("out_layer.norm", "out_layer.out_layer", "audio_outLayer"),
        replace_keys={"double_block": "visual_blocks"},
        is_sequential=True,  # a step cache in transformer_options counts the forwards
        untrained="its modulation takes weights out of its layers and computes with them, and would leave a LoRA out",
        evidence="outside",
        note="blocks take and return video and audio; the text blocks stay on the main device and are never called",
    ),
    NativeModel(
        path="comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
        tail=("norm_final", "norm_out", "proj_out"),
        # Attention and MLP are the block's own
        tensor=plan(
            heads="[qkv]", back="attn_out", mlp="ff_proj>ff_out", gathered="norm?.linear", num_heads="num_heads"
        ),
        sample_modules=("norm?.linear",),
    ),
)
