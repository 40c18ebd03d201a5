"""ComfyUI's video models, and Cosmos Predict2 with what is built on it, one row each."""

from __future__ import annotations

from dataclasses import replace

from ..tensor_plan import plan
from ..token_plan import BlockRows, TokenPlan
from .image import FLUX
from .native import NativeModel, runs_over
from .token_plans import ltx_guides, one

_WAN_TOKENS = one("x=x@1 freqs=x@1 e=e@1", "self_attn=x", aligned="e x")  # the 5B's e has a row per frame

WAN_MODEL = NativeModel(
    path="comfy.ldm.wan.model.WanModel",
    tail=("head",),
    replace_keys={"double_block": "blocks"},
    patches_inside=("attn1_patch", "attn2_patch"),
    linears=runs_over(text=("cross_attn.k*", "cross_attn.v*"), is_joint=False),
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
    tokens=replace(_WAN_TOKENS, released="x"),
)

WAN_S2V = replace(
    WAN_MODEL,
    path="comfy.ldm.wan.model.WanModel_S2V",
    transport="relay",
    in_place=("audio_injector",),
    note="the audio injector on the main device changes the stream after every block it knows",
    tokens=replace(_WAN_TOKENS, out="", tail="head=x@1", between="audio_injector=x@1"),
)

WAN_SCAIL = replace(WAN_MODEL, path="comfy.ldm.wan.model.SCAILWanModel", tokens=_WAN_TOKENS)

WAN_CAUSAL = replace(
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
    tokens=one(
        "x=x@1 timestep=x@1 pe.0=x@1", "attn1=x", "transformer_blocks", changes={"self_attention_mask": ltx_guides}
    ),
)

# Linears of a block of LTX-2 that run over text or sound: its sound has about as few tokens as its text.
LTX_SOUND = (
    *("audio_attn*", "audio_ff*", "attn2.to_k", "attn2.to_v", "audio_to_video_attn.to_k", "audio_to_video_attn.to_v"),
    *("video_to_audio_attn.to_q", "video_to_audio_attn.to_out*"),
)

_LTX_TIMES = ("v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep")  # with a row per frame
_LTX_ROWS = (
    "x.0=v@1 x.1=a@1 v_pe.0=v@1 a_pe.0=a@1 v_cross_pe.0=v@1 a_cross_pe.0=a@1",
    *(f"{name}.data=f@1 a{name[1:]}=a@1" for name in _LTX_TIMES),
)

_COSMOS_FRAMES = "x_B_T_H_W_D=t@1 emb_B_T_D=t@1 adaln_lora_B_T_3D=t@1 extra_per_block_pos_emb=t@1 rope_emb_L_1_1_D=x@1"
_COSMOS_ROWS = "x_B_T_H_W_D=t@2 extra_per_block_pos_emb=t@2 rope_emb_L_1_1_D=x@1"  # of patches, of one frame

COSMOS_PREDICT_2 = NativeModel(
    path="comfy.ldm.cosmos.predict2.MiniTrainDIT",
    patches_inside=("attn1_patch", "attn2_patch", "mlp_patch"),
    note="extra positions are an argument of every block; the forward leaves its embeddings on the model, unread",
    # Anima's, too. A patch of the attention is given what q, k and v are made of.
    tensor=plan(
        heads="*_attn.[qkv]_proj", back="*_attn.output_proj", mlp="mlp.layer1>mlp.layer2", num_heads="self_attn.n_heads"
    ),
    linears=runs_over(text=("cross_attn.[kv]_proj",), is_joint=False),
    tokens=one(
        _COSMOS_FRAMES,
        "self_attn=x",
        aligned="t x",
        out="=t@1",
        one_frame=one(_COSMOS_ROWS, "self_attn=x", aligned="t x", out="=t@2"),
    ),
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
    linears=runs_over(text=("blocks.1.block.attn.to_[kv].0",), is_joint=False),
    no_tokens="it adds positions of all rows between its blocks, outside of any module",
)

VIDEO_MODELS: tuple[NativeModel, ...] = (
    WAN_MODEL,
    replace(WAN_MODEL, path="comfy.ldm.wan.model.CameraWanModel", tokens=one("x=x@1 freqs=x@1", "self_attn=x")),
    replace(
        WAN_MODEL,
        path="comfy.ldm.wan.model.VaceWanModel",
        block_lists=("blocks", "vace_blocks"),
        follows={"vace_blocks": ("blocks", "vace_layers_mapping")},
        optional=("vace_blocks",),
        is_sequential=True,
        note="a VACE block runs after its main block and is added to it, so it must sit on the same card",
        tokens=TokenPlan(
            {
                "blocks": BlockRows("x=x@1 freqs=x@1", "self_attn=x"),
                "vace_blocks": BlockRows("c=x@1 x=x@1 kwargs.freqs=x@1", "self_attn=x"),
            },
            out="",
            tail="head=x@1",  # a block of vace may follow the last main one
        ),
    ),
    WAN_S2V,
    replace(
        WAN_MODEL,
        path="comfy.ldm.wan.model.HumoWanModel",
        patches_inside=("attn1_patch",),
        note="audio is an argument of every block; the block calls no attn2_patch",
        tokens=one("x=x@1 freqs=x@1 e=e@1 audio=a@1", "self_attn=x", aligned="a:16 x e"),
    ),
    replace(
        WAN_MODEL,
        path="comfy.ldm.wan.model_animate.AnimateWanModel",
        transport="relay",
        note="a face adapter on the main device is added to the stream after every fifth block",
        tokens=replace(WAN_S2V.tokens, between="face_adapter.fuser_blocks=x@1"),
    ),
    WAN_SCAIL,
    replace(WAN_SCAIL, path="comfy.ldm.wan.model.SCAIL2WanModel"),
    replace(
        WAN_S2V,
        path="comfy.ldm.wan.model_wandancer.WanDancerModel",
        tail=("head", "head_global"),
        in_place=("music_injector",),
        note="the music injector on the main device changes the stream after every block it knows",
        tokens=replace(WAN_S2V.tokens, tail="head=x@1 head_global=x@1", between="music_injector=x@1"),
    ),
    replace(
        WAN_S2V,
        path="comfy.ldm.wan.model_animate2.WanAnimate2Model",
        in_place=(),
        replace_keys={},
        refusal=(
            "its blocks are run through forward_pose and forward_gen, never called, and share buffers they write into"
        ),
    ),
    WAN_CAUSAL,
    replace(
        FLUX,
        path="comfy.ldm.hunyuan_video.model.HunyuanVideo",
        fps=24,
        note="HunyuanVideo 1 and 1.5, and HunyuanImage; the token refiner's own blocks stay on the main device",
        tokens=replace(
            FLUX.tokens,
            blocks={
                **FLUX.tokens.blocks,
                "single_blocks": replace(FLUX.tokens.blocks["single_blocks"], counts="modulation_dims=txt+img"),
            },
        ),
    ),
    LTXV,
    replace(
        LTXV,
        path="comfy.ldm.lightricks.av_model.LTXAVModel",
        linears=runs_over(text=LTX_SOUND),
        tail=("norm_out", "proj_out", "audio_norm_out", "audio_proj_out"),
        tail_parameters=("scale_shift_table", "audio_scale_shift_table"),
        note="blocks take and return (video, audio); compressed timesteps are objects with tensors in slots",
        tokens=one(
            " ".join(_LTX_ROWS),
            "attn1=v audio_attn1=a audio_to_video_attn=a video_to_audio_attn=v",
            "transformer_blocks",
            " ".join(f"{name}.num_frames=f" for name in _LTX_TIMES),
            out="0=v@1 1=a@1",
            aligned="f v",
        ),
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
        tokens=one("x=x@0 rope_freqs=x@1", "attn=x", counts="mod_segments=x", out="=x@0"),
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
        linears=runs_over(text=("*.txt", "*.txt.*"), is_joint=False),
        no_tokens="it attends in windows over a grid of frames, rows and columns",
    ),
    COSMOS_PREDICT_2,
    replace(COSMOS_PREDICT_2, path="comfy.ldm.anima.model.Anima"),
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
        linears=runs_over(text=("attn.*_y", "mlp_y.*"), is_joint=False),
        tokens=one(
            "x=x@1 attn_kwargs.rope_cos=x@0 attn_kwargs.rope_sin=x@0 attn_kwargs.crop_y=crop@0",
            "attn=x+crop",
            out="0=x@1",
            whole=("crop",),
        ),
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
        linears=runs_over(text=("cross_attention.to_key", "cross_attention.to_value"), is_joint=False),
        tokens=one("visual_embed=x@1 freqs=x@1", "self_attention=x", "visual_transformer_blocks"),
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
        linears=runs_over(sample=("norm?.linear",)),
        tokens=one(
            "hidden_states=img@1 encoder_hidden_states=txt@1 image_rotary_emb.0=img@0 image_rotary_emb.1=img@0",
            "=txt+img",
            out="0=img@1",
        ),
    ),
)
