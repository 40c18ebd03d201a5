"""How blocks of ComfyUI's image and video models are divided among cards, one plan per class of block; read in v0.33.0.

tests/comfy/test_native_families.py compares each class, divided among 2 to 4 emulated cards, with the whole one. Why a
class has no plan is said in the note of its row.
"""

from __future__ import annotations

from ..tensor_plan import FEATURES, HEADS, KV_HEADS, QKV, Divided, TensorPlan, mlp_plan

# A patch of queries, keys and values [batch, heads, tokens, features] returns a dict with some of them.

# comfy/ldm/flux/layers.py, also HunyuanVideo's and Chroma's blocks
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
            Divided("*_mod.lin", "gathered", FEATURES),
            *_FLUX_MLPS,
            *_YAK_MLPS,
        ),
        num_heads="num_heads",
        width="hidden_size",
    ),
    TensorPlan(
        block="SingleStreamBlock",
        linears=(
            Divided("linear1", "column", (*QKV, "features"), into="linear2"),
            Divided("linear2", "row", ("heads", "features")),
            Divided("modulation.lin", "gathered", FEATURES),
        ),
        num_heads="num_heads",
        width="hidden_size",
        attributes={"num_heads": "heads", "hidden_size": "heads", "mlp_hidden_dim_first": "linear1"},
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
            Divided("*_mod.1", "gathered", FEATURES),  # a third of the model's weights
        ),
        width="attn.inner_dim",
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
            Divided("*_block.adaLN_modulation.1", "gathered", FEATURES),
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
            Divided("adaLN_modulation.*", "gathered", FEATURES),
        ),
        num_heads="attention.n_local_heads",
        num_kv_heads="attention.n_local_kv_heads",
        width="attention.out.in_features",
    ),
)

# comfy/ldm/lens/model.py
LENS = (
    TensorPlan(
        linears=(
            Divided("attn.*_qkv", "column", QKV),
            Divided("attn.to_out.0", "row", HEADS),
            Divided("attn.to_add_out", "row", HEADS),
            *mlp_plan("img_mlp.w[13]", "img_mlp.w2"),
            *mlp_plan("txt_mlp.w[13]", "txt_mlp.w2"),
            Divided("*_mod.1", "gathered", FEATURES),
        ),
        width="attn.inner_dim",
    ),
)

# comfy/ldm/hidream/model.py; q and k are normalised over all heads. Experts and the shared one add up, and which token
# goes to which expert is chosen before them. A build without experts has the names of one.
HIDREAM = (
    TensorPlan(
        linears=(
            Divided("block.attn1.to_[qkv]", "column", HEADS),
            Divided("block.attn1.to_[qkv]_t", "column", HEADS),
            Divided("block.attn1.to_out", "row", HEADS),
            Divided("block.attn1.to_out_t", "row", HEADS),
            Divided("block.ff_[it].*w[13]", "column", FEATURES),
            Divided("block.ff_i.*w2", "row", FEATURES, sum_after="block.ff_i"),
            Divided("block.ff_t.w2", "row", FEATURES),
            Divided("block.adaLN_modulation.1", "gathered", FEATURES),
        ),
        num_heads="block.attn1.heads",
        width="block.attn1.inner_dim",
        norms=("block.attn1.[qk]_rms_norm*",),
        decided=("block.ff_i.gate",),
    ),
)

# comfy/ldm/aura/mmdit.py, both kinds of block
AURA_FLOW = (
    TensorPlan(
        linears=(
            Divided("attn.w[12][qkv]", "column", HEADS),
            Divided("attn.w[12]o", "row", HEADS),
            Divided("mlp*.c_fc[12]", "column", FEATURES),
            Divided("mlp*.c_proj", "row", FEATURES),
            Divided("mod*.1", "gathered", FEATURES),
        ),
        num_heads="attn.n_heads",
        width="attn.w1q.out_features",
    ),
)

# comfy/ldm/omnigen/omnigen2.py
OMNIGEN_2 = (
    TensorPlan(
        block="OmniGen2TransformerBlock",
        linears=(
            Divided("attn.to_q", "column", HEADS),
            Divided("attn.to_[kv]", "column", KV_HEADS),
            Divided("attn.to_out.0", "row", HEADS),
            *mlp_plan("feed_forward.linear_[13]", "feed_forward.linear_2"),
            Divided("norm1.linear", "gathered", FEATURES),
        ),
        num_kv_heads="attn.kv_heads",
        width="attn.to_q.out_features",
    ),
)

# comfy/ldm/boogu/model.py; img_instruct_attn.to_out.0 takes whole sums and is whole: one of 24 such matrices of a block
BOOGU = (
    TensorPlan(
        block="BooguDoubleStreamBlock",
        linears=(
            Divided("img_instruct_attn.processor.*_to_q", "column", HEADS),
            Divided("img_instruct_attn.processor.*_to_[kv]", "column", KV_HEADS),
            Divided("img_instruct_attn.processor.*_out", "row", HEADS),
            Divided("img_self_attn.to_q", "column", HEADS),
            Divided("img_self_attn.to_[kv]", "column", KV_HEADS),
            Divided("img_self_attn.to_out.0", "row", HEADS),
            *mlp_plan("img_feed_forward.linear_[13]", "img_feed_forward.linear_2"),
            *mlp_plan("instruct_feed_forward.linear_[13]", "instruct_feed_forward.linear_2"),
            Divided("*_norm?.linear", "gathered", FEATURES),
        ),
        num_heads="img_self_attn.heads",
        num_kv_heads="img_self_attn.kv_heads",
        width="img_self_attn.to_q.out_features",
        attributes={"img_*attn.heads": "heads", "img_*attn.kv_heads": "kv_heads"},
    ),
    *OMNIGEN_2,
)

# comfy/ldm/joyimage/model.py; modulation is a table of the block
JOY_IMAGE = (
    TensorPlan(
        linears=(
            Divided("attn.*_attn_qkv", "column", QKV),
            Divided("attn.*_attn_proj", "row", HEADS),
            *mlp_plan("img_mlp.net.0.proj", "img_mlp.net.2"),
            *mlp_plan("txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ),
        num_heads="attn.num_attention_heads",
        width="attn.img_attn_proj.in_features",
    ),
)

# comfy/ldm/qwen_image21/model.py, newer than 0.33.0; gate and what it gates are one layer or two
QWEN_IMAGE_21 = (
    TensorPlan(
        linears=(
            Divided("attn.to_[qkv]", "column", HEADS),
            Divided("attn.to_out.0", "row", HEADS),
            Divided("img_mlp.gate_up", "column", FEATURES, into="img_mlp.out"),
            Divided("img_mlp.gate_layer", "column", FEATURES),
            Divided("img_mlp.proj", "column", FEATURES),
            Divided("img_mlp.out", "row", FEATURES, sum_after="img_mlp"),
        ),
        width="attn.to_out.0.in_features",
    ),
)

# comfy/ldm/krea2/model.py; the gate is one number per feature of every head of queries
KREA_2 = (
    TensorPlan(
        linears=(
            Divided("attn.wq", "column", HEADS),
            Divided("attn.gate", "column", HEADS),
            Divided("attn.w[kv]", "column", KV_HEADS),
            Divided("attn.wo", "row", HEADS),
            Divided("mlp.gate", "column", FEATURES, into="mlp.down"),
            *mlp_plan("mlp.up", "mlp.down"),
        ),
        num_kv_heads="attn.kvheads",
        width="attn.wq.out_features",
    ),
)

# comfy/ldm/ernie/model.py; all blocks share one modulation
ERNIE_IMAGE = (
    TensorPlan(
        linears=(
            Divided("self_attention.to_[qkv]", "column", HEADS),
            Divided("self_attention.to_out.0", "row", HEADS),
            Divided("mlp.gate_proj", "column", FEATURES, into="mlp.linear_fc2"),
            *mlp_plan("mlp.up_proj", "mlp.linear_fc2"),
        ),
        num_heads="self_attention.heads",
        width="self_attention.inner_dim",
    ),
)

# comfy/ldm/ideogram4/model.py
IDEOGRAM_4 = (
    TensorPlan(
        linears=(
            Divided("attention.qkv", "column", QKV),
            Divided("attention.o", "row", HEADS),
            *mlp_plan("feed_forward.w[13]", "feed_forward.w2"),
            Divided("adaln_modulation", "gathered", FEATURES),
        ),
        num_heads="attention.num_heads",
        width="attention.hidden_size",
    ),
)

# comfy/ldm/pixeldit/model.py, also PiD's blocks
PIXEL_DIT = (
    TensorPlan(
        linears=(
            Divided("attn.qkv_?", "column", QKV),
            Divided("attn.proj_?", "row", HEADS),
            *mlp_plan("mlp_x.w[13]", "mlp_x.w2"),
            *mlp_plan("mlp_y.w[13]", "mlp_y.w2"),
            Divided("adaLN_*.0", "gathered", FEATURES),
        ),
        num_heads="attn.num_heads",
        width="attn.proj_x.in_features",
    ),
)

# comfy/ldm/hydit/models.py; skip_linear takes the stream and a skip, normalised together, and gives half as much
HUNYUAN_DIT = (
    TensorPlan(
        linears=(
            Divided("attn1.Wqkv", "column", QKV),
            Divided("attn2.q_proj", "column", HEADS),
            Divided("attn2.kv_proj", "column", ("heads", "heads")),
            Divided("attn?.out_proj", "row", HEADS),
            *mlp_plan("mlp.fc1", "mlp.fc2"),
            Divided("default_modulation.1", "gathered", FEATURES),
            Divided("skip_linear", "gathered", FEATURES),
        ),
        num_heads="attn1.num_heads",
        width="attn1.dim",
        attributes={"attn?.num_heads": "heads"},
    ),
)


# ---- video


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
        width="attn.out_proj.in_features",
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
        head_dim="attn.head_dim",
    ),
)
