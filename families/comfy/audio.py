"""ComfyUI's audio models, one row each."""

from __future__ import annotations

from ..tensor_plan import KV_HEADS, Divided, plan
from .native import NativeModel, runs_over
from .token_plans import one, sliding_window

AUDIO_MODELS: tuple[NativeModel, ...] = (
    NativeModel(
        path="comfy.ldm.ace.model.ACEStepTransformer2DModel",
        block_lists=("transformer_blocks",),
        # The MLP is of convolutions and stays whole: half of the products of a block.
        tensor=plan(heads="*attn.to_[qkv]", back="*attn.to_out.0"),
        # Nothing calls the last of these.
        linears=runs_over(("cross_attn.to_[kv]", "cross_attn.add_?_proj", "cross_attn.to_add_out"), is_joint=False),
        no_tokens="its linear attention sums over all rows, and its feed-forward is a convolution",
    ),
    NativeModel(
        path="comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
        block_lists=("decoder.layers",),
        tail=("decoder.norm_out", "decoder.proj_out"),
        front_parameters=("null_condition_emb",),
        tail_parameters=("decoder.scale_shift_table",),
        read_by_tail={"decoder.time_embed": 0, "decoder.time_embed_r": 0},
        mixes_early=True,  # it adds the two
        note="ACE-Step 1.5; the tail mixes a free parameter with the stream, and the forward knows no patches",
        tensor=plan(
            heads="*_attn.q_proj",
            kv_heads="*_attn.[kv]_proj",
            back="*_attn.o_proj",
            mlp="mlp.gate_proj,mlp.up_proj>mlp.down_proj",
            num_heads="self_attn.num_heads",
            num_kv_heads="self_attn.num_kv_heads",
        ),
        no_forecast="its forward depends on numbers of text and reference; a dry run has shapes",
        linears=runs_over(text=("cross_attn.[kv]_proj",), is_joint=False),
        tokens=one(
            "hidden_states=x@1 position_embeddings.0=x@0 position_embeddings.1=x@0",
            "self_attn=x",
            "decoder.layers",
            makes_mask=sliding_window,
            passes_options=False,
        ),
    ),
    NativeModel(
        path="comfy.ldm.audio.dit.AudioDiffusionTransformer",
        block_lists=("transformer.layers",),
        tail=("transformer.project_out", "postprocess_conv"),
        replace_keys={"double_block": "transformer.layers"},
        note="Stable Audio 1 and 3; a stand-in for a block of 3 is not handed local_add_cond",
        # The cross-attention has fewer heads of keys and values where its text is narrower. Differential attention
        # packs queries and keys twice.
        tensor=plan(
            Divided("self_attn.to_qkv", "column", ("heads",), repeats=True),
            Divided("cross_attn.to_q", "column", ("heads",), repeats=True),
            Divided("cross_attn.to_kv", "column", KV_HEADS, repeats=True),
            back="*_attn.to_out",
            mlp="ff.ff.0.proj>ff.ff.2",
            num_heads="self_attn.num_heads",
            num_kv_heads="cross_attn.kv_heads",
            attributes={"self_attn.kv_heads": "heads"},
        ),
        linears=runs_over(text=("cross_attn.to_kv",), sample=("to_scale_shift_gate.*",), is_joint=False),
        tokens=one(
            "local_add_cond=a@1 x=m?+a@1 rotary_pos_emb.0=m?+a@0", "self_attn=m?+a", "transformer.layers", out="=m?+a@1"
        ),
    ),
    NativeModel(
        path="comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT",
        block_lists=("diffusion_transformer.transformer.layers",),
        tail=("diffusion_transformer.transformer.project_out", "diffusion_transformer.postprocess_conv"),
        note="long pieces run all blocks once per window; the windows are added up on the main device",
        tensor=plan(
            qkv="self_attn.to_qkv", back="self_attn.to_out", mlp="ff.ff.0.proj>ff.ff.2", num_heads="self_attn.num_heads"
        ),
        linears=runs_over(is_joint=False),
        tokens=one(
            "x=x@1 rotation_matrix=x@2", "self_attn=x", "diffusion_transformer.transformer.layers", passes_options=False
        ),
    ),
    NativeModel(
        path="comfy.ldm.yue2.model.YuE2",
        block_lists=("model.layers",),
        tail=("model.norm", "llm2vae"),
        is_sequential=True,
        evidence="outside",
        note="the main device sends each block its own keys and values of the conditioning, once per chunk",
    ),
)
