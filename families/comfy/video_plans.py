"""How the blocks of ComfyUI's video models are divided among cards, one plan per class of block; read in v0.33.0.
See image_plans.py."""

from __future__ import annotations

from ..tensor_plan import FEATURES, HEADS, QKV, Divided, TensorPlan, mlp_plan

# comfy/ldm/wan/model.py; q and k are normalised over all heads, and the MLP may compute its second linear itself
_WAN_ATTENTION = tuple(Divided(f"*_attn.{name}", "column", HEADS) for name in ("q", "k", "v", "k_img", "v_img"))
WAN = (
    TensorPlan(
        linears=(*_WAN_ATTENTION, Divided("*_attn.o", "row", HEADS), *mlp_plan("ffn.0", "ffn.2", sum_after="ffn")),
        num_heads="num_heads",
        width="dim",
        attributes={"*_attn.num_heads": "heads"},
        norms=("*_attn.norm_*",),
    ),
)

# comfy/ldm/lightricks: q and k are normalised over all heads, and the rotary table has one row per head
LTX = (
    TensorPlan(
        linears=(
            Divided("*attn*.to_[qkv]", "column", HEADS),
            Divided("*attn*.to_gate_logits", "column", HEADS),
            Divided("*attn*.to_out.0", "row", HEADS),
            *mlp_plan("ff.net.0.proj", "ff.net.2", sum_after="ff"),
            *mlp_plan("audio_ff.net.0.proj", "audio_ff.net.2", sum_after="audio_ff"),
        ),
        num_heads="attn1.heads",
        width="attn1.to_q.out_features",
        attributes={"*attn*.heads": "heads"},
        norms=("*attn*.[qk]_norm",),
        arguments={"*attn?": {"pe": 2, "k_pe": 2}, "*_attn": {"pe": 2, "k_pe": 2}},
    ),
)

# comfy/ldm/cosmos/predict2.py, also Anima's. A patch of the attention is given what q, k and v are made of.
COSMOS_PREDICT_2 = (
    TensorPlan(
        linears=(
            Divided("*_attn.[qkv]_proj", "column", HEADS),
            Divided("*_attn.output_proj", "row", HEADS),
            *mlp_plan("mlp.layer1", "mlp.layer2"),
        ),
        num_heads="self_attn.n_heads",
        width="self_attn._inner_dim",
        attributes={"*_attn.n_heads": "heads"},
    ),
)

# comfy/ldm/cosmos/blocks.py: a block is a list of cross-attention, self-attention and MLP
COSMOS_1 = (
    TensorPlan(
        linears=(
            Divided("blocks.*.block.attn.to_[qkv].0", "column", HEADS),
            Divided("blocks.*.block.attn.to_out.0", "row", HEADS),
            Divided("blocks.*.block.layer1", "column", FEATURES),
            Divided("blocks.*.block.layer2", "row", FEATURES),
        ),
        num_heads="blocks.0.block.attn.heads",
        width="blocks.0.block.attn.to_q.0.out_features",
        attributes={"blocks.*.block.attn.heads": "heads"},
    ),
)

# comfy/ldm/genmo/joint_model/asymm_models_joint.py: the rotary table has angles of its own for every head
MOCHI = (
    TensorPlan(
        linears=(
            Divided("attn.qkv_?", "column", QKV),
            Divided("attn.proj_?", "row", HEADS),
            *mlp_plan("mlp_x.w1", "mlp_x.w2"),
            *mlp_plan("mlp_y.w1", "mlp_y.w2"),
            Divided("mod_?", "gathered", FEATURES),
        ),
        num_heads="attn.num_heads",
        width="attn.dim_x",
        attributes={"attn.num_heads": "heads"},
        arguments={"attn": {"rope_cos": 1, "rope_sin": 1}},
    ),
)

# comfy/ldm/kandinsky5/model.py
KANDINSKY_5 = (
    TensorPlan(
        linears=(
            Divided("*_attention.to_*", "column", HEADS),
            Divided("*_attention.out_layer", "row", HEADS),
            *mlp_plan("feed_forward.in_layer", "feed_forward.out_layer"),
            Divided("visual_modulation.out_layer", "gathered", FEATURES),
        ),
        num_heads="self_attention.num_heads",
        width="self_attention.out_layer.in_features",
        attributes={"*_attention.num_heads": "heads"},
    ),
)

# comfy/ldm/cogvideo/model.py: attention and MLP are the block's own
COG_VIDEO_X = (
    TensorPlan(
        linears=(
            Divided("[qkv]", "column", HEADS),
            Divided("attn_out", "row", HEADS),
            *mlp_plan("ff_proj", "ff_out"),
            Divided("norm?.linear", "gathered", FEATURES),
        ),
        num_heads="num_heads",
        width="dim",
        attributes={"num_heads": "heads"},
    ),
)

# comfy/ldm/minimax/model.py; of an int8 file the MLP computes its second linear itself
MINIMAX_H3 = (
    TensorPlan(
        linears=(
            Divided("attn.qkv_proj", "column", QKV),
            Divided("attn.out_proj", "row", HEADS),
            *mlp_plan("mlp.fc1", "mlp.fc2", sum_after="mlp"),
            Divided("adaln_proj.linear", "gathered", FEATURES),
        ),
        num_heads="attn.heads",
        width="attn.out_proj.in_features",
        attributes={"attn.heads": "heads"},
    ),
)

# comfy/ldm/seedvr/model.py: a layer has two modules, of video and text, or one for both
SEEDVR_2 = (
    TensorPlan(
        linears=(
            Divided("attn.proj_qkv.*", "column", QKV),
            Divided("attn.proj_out.*", "row", HEADS),
            Divided("mlp.*.proj_in*", "column", FEATURES),
            Divided("mlp.*.proj_out", "row", FEATURES),
        ),
        num_heads="attn.heads",
        head_dim="attn.head_dim",
        attributes={"attn.heads": "heads"},
    ),
)
