"""How the blocks of ComfyUI's own classes are divided among cards, one plan per class of block; read in v0.33.0.

tests/comfy/test_native_families.py compares each class, divided among 2 to 4 emulated cards, with the whole one.
"""

from __future__ import annotations

from ..tensor_plan import FEATURES, HEADS, QKV, Divided, PatchCall, TensorPlan, mlp_plan

# A patch of queries, keys and values [batch, heads, tokens, features] returns a dict with some of them.
_QKV_PATCH = PatchCall({"q": 1, "k": 1, "v": 1})

# comfy/ldm/flux/layers.py, also HunyuanVideo's and Chroma's blocks
_FLUX_PATCHES = {"attn1_patch": _QKV_PATCH, "attn1_output_patch": PatchCall({"attn": -1}, returns="attn")}
_FLUX_MLPS = (*mlp_plan("img_mlp.0", "img_mlp.2"), *mlp_plan("txt_mlp.0", "txt_mlp.2"))
_YAK_MLPS = (
    Divided("*_mlp.gate_proj", "column", FEATURES),
    Divided("*_mlp.up_proj", "column", FEATURES),
    Divided("*_mlp.down_proj", "row", FEATURES),
)
FLUX = (
    TensorPlan(
        block="DoubleStreamBlock",
        linears=(
            Divided("*_attn.qkv", "column", QKV),
            Divided("*_attn.proj", "row", HEADS),
            Divided("*_mod.lin", "gathered", FEATURES, of="vec"),
            *_FLUX_MLPS,
            *_YAK_MLPS,
        ),
        num_heads="num_heads",
        width="hidden_size",
        attributes={"num_heads": "heads"},
        patches=_FLUX_PATCHES,
    ),
    TensorPlan(
        block="SingleStreamBlock",
        linears=(
            Divided("linear1", "column", (*QKV, "features"), into="linear2"),
            Divided("linear2", "row", ("heads", "features")),
            Divided("modulation.lin", "gathered", FEATURES, of="vec"),
        ),
        num_heads="num_heads",
        width="hidden_size",
        attributes={"num_heads": "heads", "hidden_size": "heads", "mlp_hidden_dim_first": "linear1"},
        patches=_FLUX_PATCHES,
    ),
)

# comfy/ldm/wan/model.py; q and k are normalised over all heads, and the MLP may compute its second linear itself
_WAN_ATTENTION = tuple(Divided(f"*_attn.{name}", "column", HEADS) for name in ("q", "k", "v", "k_img", "v_img"))
WAN = (
    TensorPlan(
        linears=(*_WAN_ATTENTION, Divided("*_attn.o", "row", HEADS), *mlp_plan("ffn.0", "ffn.2", sum_after="ffn")),
        num_heads="num_heads",
        width="dim",
        attributes={"*_attn.num_heads": "heads"},
        norms=("*_attn.norm_*",),
        together={"cross_attn": ("norm_q", "norm_k", "norm_k_img")},  # self_attn turns q before it computes k
        patches={
            "attn1_patch": PatchCall({"x": -1, "q": 2, "k": 2}, returns="x", is_dict=True),
            "attn2_patch": PatchCall({"x": None}, returns="x", is_dict=True),
        },
    ),
)

# comfy/ldm/qwen_image/model.py
QWEN_IMAGE = (
    TensorPlan(
        linears=(
            *(Divided(f"attn.{name}", "column", HEADS) for name in ("to_[qkv]", "add_[qkv]_proj")),
            Divided("attn.to_out.0", "row", HEADS, sum_after="attn.to_out.1"),  # a dropout may read what it passes on
            Divided("attn.to_add_out", "row", HEADS),
            *mlp_plan("img_mlp.net.0.proj", "img_mlp.net.2"),
            *mlp_plan("txt_mlp.net.0.proj", "txt_mlp.net.2"),
            Divided("*_mod.1", "gathered", FEATURES, of="temb"),  # a third of the model's weights
        ),
        num_heads="attn.heads",
        width="attn.inner_dim",
        attributes={"attn.heads": "heads"},
        together={"attn": ("to_out.1", "to_add_out")},
        patches={"attn1_patch": _QKV_PATCH},
    ),
)

# comfy/ldm/modules/diffusionmodules/mmdit.py; the context's last block has neither projection nor MLP
SD3 = (
    TensorPlan(
        block="JointBlock",
        linears=(
            Divided("*_block.attn*.qkv", "column", QKV),
            Divided("*_block.attn*.proj", "row", HEADS),
            *mlp_plan("x_block.mlp.fc1", "x_block.mlp.fc2"),
            *mlp_plan("context_block.mlp.fc1", "context_block.mlp.fc2"),
            Divided("*_block.adaLN_modulation.1", "gathered", FEATURES, of="c"),
        ),
        num_heads="x_block.attn.num_heads",
        width="x_block.attn.qkv.in_features",
        attributes={"*_block.attn*.num_heads": "heads"},
    ),
)

# comfy/ldm/lumina/model.py: Lumina 2 has fewer heads of keys and values, Z-Image as many
NEXT_DIT = (
    TensorPlan(
        block="JointTransformerBlock",
        linears=(
            Divided("attention.qkv", "column", ("heads", "kv_heads", "kv_heads")),
            Divided("attention.out", "row", HEADS),
            Divided("feed_forward.w[13]", "column", FEATURES),
            Divided("feed_forward.w2", "row", FEATURES),
            Divided("adaLN_modulation.*", "gathered", FEATURES, of="adaln_input"),
        ),
        num_heads="attention.n_local_heads",
        num_kv_heads="attention.n_local_kv_heads",
        width="attention.out.in_features",
        attributes={"attention.n_local_heads": "heads", "attention.n_local_kv_heads": "kv_heads"},
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
        together={"*attn*": ("q_norm", "k_norm")},
        arguments={"*attn?": {"pe": 2, "k_pe": 2}, "*_attn": {"pe": 2, "k_pe": 2}},
    ),
)
