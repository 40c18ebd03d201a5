"""How the blocks of ComfyUI's audio models are divided among cards, one plan per class of block; read in v0.33.0.
See image_plans.py."""

from __future__ import annotations

from ..tensor_plan import FEATURES, HEADS, KV_HEADS, QKV, Divided, TensorPlan, mlp_plan

# comfy/ldm/ace/attention.py. The MLP is of convolutions and stays whole: half of the products of a block.
ACE_STEP = (
    TensorPlan(
        linears=(
            Divided("*attn.to_[qkv]", "column", HEADS),
            Divided("*attn.to_out.0", "row", HEADS),
        ),
        num_heads="attn.heads",
        width="attn.inner_dim",
        attributes={"*attn.heads": "heads"},
    ),
)

# comfy/ldm/ace/ace_step15.py
ACE_STEP_15 = (
    TensorPlan(
        linears=(
            Divided("*_attn.q_proj", "column", HEADS),
            Divided("*_attn.[kv]_proj", "column", KV_HEADS),
            Divided("*_attn.o_proj", "row", HEADS),
            Divided("mlp.gate_proj", "column", FEATURES, into="mlp.down_proj"),
            *mlp_plan("mlp.up_proj", "mlp.down_proj"),
        ),
        num_heads="self_attn.num_heads",
        num_kv_heads="self_attn.num_kv_heads",
        width="self_attn.q_proj.out_features",
        attributes={"*_attn.num_heads": "heads", "*_attn.num_kv_heads": "kv_heads"},
    ),
)

# comfy/ldm/audio/dit.py: the cross-attention has fewer heads of keys and values where its text is narrower.
# Differential attention packs queries and keys twice.
STABLE_AUDIO = (
    TensorPlan(
        linears=(
            Divided("self_attn.to_qkv", "column", HEADS, repeats=True),
            Divided("cross_attn.to_q", "column", HEADS, repeats=True),
            Divided("cross_attn.to_kv", "column", KV_HEADS, repeats=True),
            Divided("*_attn.to_out", "row", HEADS),
            *mlp_plan("ff.ff.0.proj", "ff.ff.2"),
        ),
        num_heads="self_attn.num_heads",
        num_kv_heads="cross_attn.kv_heads",
        width="self_attn.dim",
        attributes={"*_attn.num_heads": "heads", "self_attn.kv_heads": "heads", "cross_attn.kv_heads": "kv_heads"},
    ),
)

# comfy/ldm/minimax_music/dit.py
MINIMAX_MUSIC_3 = (
    TensorPlan(
        linears=(
            Divided("self_attn.to_qkv", "column", QKV),
            Divided("self_attn.to_out", "row", HEADS),
            *mlp_plan("ff.ff.0.proj", "ff.ff.2"),
        ),
        num_heads="self_attn.num_heads",
        width="self_attn.to_out.in_features",
        attributes={"self_attn.num_heads": "heads"},
    ),
)
