"""How blocks of ComfyUI's models are divided among cards, one plan per class of block; read in v0.33.0.

tests/comfy/test_native_families.py compares each class, divided among 2 to 4 emulated cards, with the whole one. Why a
class has no plan is said in the note of its row.
"""

from __future__ import annotations

from ..tensor_plan import KV_HEADS, QKV, Divided, plan

# A patch of queries, keys and values [batch, heads, tokens, features] returns a dict with some of them.

# comfy/ldm/flux/layers.py, also HunyuanVideo's and Chroma's blocks
_FLUX_SINGLE = {"num_heads": "heads", "hidden_size": "heads", "mlp_hidden_dim_first": "linear1"}
FLUX = plan(
    block="DoubleStreamBlock",
    qkv="*_attn.qkv",
    back="*_attn.proj",
    gathered="*_mod.lin",
    mlp="img_mlp.0>img_mlp.2 txt_mlp.0>txt_mlp.2",
    features="*_mlp.gate_proj *_mlp.up_proj",  # Yak's
    features_back="*_mlp.down_proj",
    num_heads="num_heads",
    width="hidden_size",
) + plan(
    Divided("linear1", "column", (*QKV, "features"), into="linear2"),
    Divided("linear2", "row", ("heads", "features")),
    block="SingleStreamBlock",
    gathered="modulation.lin",
    num_heads="num_heads",
    width="hidden_size",
    attributes=_FLUX_SINGLE,
)

# comfy/ldm/qwen_image/model.py
QWEN_IMAGE = plan(
    heads="attn.to_[qkv] attn.add_[qkv]_proj",
    back="attn.to_out.0/attn.to_out.1 attn.to_add_out",  # a dropout may read what it passes on
    mlp="img_mlp.net.0.proj>img_mlp.net.2 txt_mlp.net.0.proj>txt_mlp.net.2",
    gathered="*_mod.1",  # a third of the model's weights
    width="attn.inner_dim",
)

# comfy/ldm/modules/diffusionmodules/mmdit.py; the context's last block has neither projection nor MLP
SD3 = plan(
    block="JointBlock",
    qkv="*_block.attn*.qkv",
    back="*_block.attn*.proj",
    mlp="x_block.mlp.fc1>x_block.mlp.fc2 context_block.mlp.fc1>context_block.mlp.fc2",
    gathered="*_block.adaLN_modulation.1",
    num_heads="x_block.attn.num_heads",
    width="x_block.attn.qkv.in_features",
    attributes={"*_block.attn*.num_heads": "heads"},
)

# comfy/ldm/lumina/model.py: Lumina 2 has fewer heads of keys and values, Z-Image as many
NEXT_DIT = plan(
    Divided("attention.qkv", "column", ("heads", "kv_heads", "kv_heads")),
    block="JointTransformerBlock",
    back="attention.out",
    features="feed_forward.w[13]",
    features_back="feed_forward.w2",
    gathered="adaLN_modulation.*",
    num_heads="attention.n_local_heads",
    num_kv_heads="attention.n_local_kv_heads",
    width="attention.out.in_features",
)

# comfy/ldm/lens/model.py
LENS = plan(
    qkv="attn.*_qkv",
    back="attn.to_out.0 attn.to_add_out",
    mlp="img_mlp.w[13]>img_mlp.w2 txt_mlp.w[13]>txt_mlp.w2",
    gathered="*_mod.1",
    width="attn.inner_dim",
)

# comfy/ldm/hidream/model.py; q and k are normalised over all heads. Experts and the shared one add up, and which token
# goes to which expert is chosen before them. A build without experts has the names of one.
HIDREAM = plan(
    heads="block.attn1.to_[qkv] block.attn1.to_[qkv]_t",
    back="block.attn1.to_out block.attn1.to_out_t",
    features="block.ff_[it].*w[13]",
    features_back="block.ff_i.*w2/block.ff_i block.ff_t.w2",
    gathered="block.adaLN_modulation.1",
    num_heads="block.attn1.heads",
    width="block.attn1.inner_dim",
    norms=("block.attn1.[qk]_rms_norm*",),
    decided=("block.ff_i.gate",),
)

# comfy/ldm/aura/mmdit.py, both kinds of block
AURA_FLOW = plan(
    heads="attn.w[12][qkv]",
    back="attn.w[12]o",
    features="mlp*.c_fc[12]",
    features_back="mlp*.c_proj",
    gathered="mod*.1",
    num_heads="attn.n_heads",
    width="attn.w1q.out_features",
)

# comfy/ldm/omnigen/omnigen2.py
OMNIGEN_2 = plan(
    block="OmniGen2TransformerBlock",
    heads="attn.to_q",
    kv_heads="attn.to_[kv]",
    back="attn.to_out.0",
    mlp="feed_forward.linear_[13]>feed_forward.linear_2",
    gathered="norm1.linear",
    num_kv_heads="attn.kv_heads",
    width="attn.to_q.out_features",
)

# comfy/ldm/boogu/model.py; img_instruct_attn.to_out.0 takes whole sums and is whole: one of 24 such matrices of a block
BOOGU = (
    plan(
        block="BooguDoubleStreamBlock",
        heads="img_instruct_attn.processor.*_to_q img_self_attn.to_q",
        kv_heads="img_instruct_attn.processor.*_to_[kv] img_self_attn.to_[kv]",
        back="img_instruct_attn.processor.*_out img_self_attn.to_out.0",
        mlp="img_feed_forward.linear_[13]>img_feed_forward.linear_2 "
        "instruct_feed_forward.linear_[13]>instruct_feed_forward.linear_2",
        gathered="*_norm?.linear",
        num_heads="img_self_attn.heads",
        num_kv_heads="img_self_attn.kv_heads",
        width="img_self_attn.to_q.out_features",
        attributes={"img_*attn.heads": "heads", "img_*attn.kv_heads": "kv_heads"},
    )
    + OMNIGEN_2
)

# comfy/ldm/joyimage/model.py; modulation is a table of the block
JOY_IMAGE = plan(
    qkv="attn.*_attn_qkv",
    back="attn.*_attn_proj",
    mlp="img_mlp.net.0.proj>img_mlp.net.2 txt_mlp.net.0.proj>txt_mlp.net.2",
    num_heads="attn.num_attention_heads",
    width="attn.img_attn_proj.in_features",
)

# comfy/ldm/qwen_image21/model.py, newer than 0.33.0; gate and what it gates are one layer or two
QWEN_IMAGE_21 = plan(
    Divided("img_mlp.gate_up", "column", ("features",), into="img_mlp.out"),
    heads="attn.to_[qkv]",
    back="attn.to_out.0",
    features="img_mlp.gate_layer img_mlp.proj",
    features_back="img_mlp.out/img_mlp",
    width="attn.to_out.0.in_features",
)

# comfy/ldm/krea2/model.py; the gate is one number per feature of every head of queries
KREA_2 = plan(
    heads="attn.wq attn.gate",
    kv_heads="attn.w[kv]",
    back="attn.wo",
    mlp="mlp.gate,mlp.up>mlp.down",
    num_kv_heads="attn.kvheads",
    width="attn.wq.out_features",
)

# comfy/ldm/ernie/model.py; all blocks share one modulation
ERNIE_IMAGE = plan(
    heads="self_attention.to_[qkv]",
    back="self_attention.to_out.0",
    mlp="mlp.gate_proj,mlp.up_proj>mlp.linear_fc2",
    num_heads="self_attention.heads",
    width="self_attention.inner_dim",
)

# comfy/ldm/ideogram4/model.py
IDEOGRAM_4 = plan(
    qkv="attention.qkv",
    back="attention.o",
    mlp="feed_forward.w[13]>feed_forward.w2",
    gathered="adaln_modulation",
    num_heads="attention.num_heads",
    width="attention.hidden_size",
)

# comfy/ldm/pixeldit/model.py, also PiD's blocks
PIXEL_DIT = plan(
    qkv="attn.qkv_?",
    back="attn.proj_?",
    mlp="mlp_x.w[13]>mlp_x.w2 mlp_y.w[13]>mlp_y.w2",
    gathered="adaLN_*.0",
    num_heads="attn.num_heads",
    width="attn.proj_x.in_features",
)

# comfy/ldm/hydit/models.py; skip_linear takes the stream and a skip, normalised together, and gives half as much
HUNYUAN_DIT = plan(
    Divided("attn2.kv_proj", "column", ("heads", "heads")),
    qkv="attn1.Wqkv",
    heads="attn2.q_proj",
    back="attn?.out_proj",
    mlp="mlp.fc1>mlp.fc2",
    gathered="default_modulation.1 skip_linear",
    num_heads="attn1.num_heads",
    width="attn1.dim",
    attributes={"attn?.num_heads": "heads"},
)


# ---- video


# comfy/ldm/wan/model.py; q and k are normalised over all heads, and the MLP may compute its second linear itself
WAN = plan(
    heads="*_attn.q *_attn.k *_attn.v *_attn.k_img *_attn.v_img",
    back="*_attn.o",
    mlp="ffn.0>ffn.2/ffn",
    num_heads="num_heads",
    width="dim",
    attributes={"*_attn.num_heads": "heads"},
    norms=("*_attn.norm_*",),
)

# comfy/ldm/lightricks: q and k are normalised over all heads, and the rotary table has one row per head
LTX = plan(
    heads="*attn*.to_[qkv] *attn*.to_gate_logits",
    back="*attn*.to_out.0",
    mlp="ff.net.0.proj>ff.net.2/ff audio_ff.net.0.proj>audio_ff.net.2/audio_ff",
    num_heads="attn1.heads",
    width="attn1.to_q.out_features",
    attributes={"*attn*.heads": "heads"},
    norms=("*attn*.[qk]_norm",),
    arguments={"*attn?": {"pe": 2, "k_pe": 2}, "*_attn": {"pe": 2, "k_pe": 2}},
)

# comfy/ldm/cosmos/predict2.py, also Anima's. A patch of the attention is given what q, k and v are made of.
COSMOS_PREDICT_2 = plan(
    heads="*_attn.[qkv]_proj",
    back="*_attn.output_proj",
    mlp="mlp.layer1>mlp.layer2",
    num_heads="self_attn.n_heads",
    width="self_attn._inner_dim",
    attributes={"*_attn.n_heads": "heads"},
)

# comfy/ldm/cosmos/blocks.py: a block is a list of cross-attention, self-attention and MLP
COSMOS_1 = plan(
    heads="blocks.*.block.attn.to_[qkv].0",
    back="blocks.*.block.attn.to_out.0",
    features="blocks.*.block.layer1",
    features_back="blocks.*.block.layer2",
    num_heads="blocks.0.block.attn.heads",
    width="blocks.0.block.attn.to_q.0.out_features",
    attributes={"blocks.*.block.attn.heads": "heads"},
)

# comfy/ldm/genmo/joint_model/asymm_models_joint.py: the rotary table has angles of its own for every head
MOCHI = plan(
    qkv="attn.qkv_?",
    back="attn.proj_?",
    mlp="mlp_x.w1>mlp_x.w2 mlp_y.w1>mlp_y.w2",
    gathered="mod_?",
    num_heads="attn.num_heads",
    width="attn.dim_x",
    arguments={"attn": {"rope_cos": 1, "rope_sin": 1}},
)

# comfy/ldm/kandinsky5/model.py
KANDINSKY_5 = plan(
    heads="*_attention.to_*",
    back="*_attention.out_layer",
    mlp="feed_forward.in_layer>feed_forward.out_layer",
    gathered="visual_modulation.out_layer",
    num_heads="self_attention.num_heads",
    width="self_attention.out_layer.in_features",
    attributes={"*_attention.num_heads": "heads"},
)

# comfy/ldm/cogvideo/model.py: attention and MLP are the block's own
COG_VIDEO_X = plan(
    heads="[qkv]", back="attn_out", mlp="ff_proj>ff_out", gathered="norm?.linear", num_heads="num_heads", width="dim"
)

# comfy/ldm/minimax/model.py; of an int8 file the MLP computes its second linear itself
MINIMAX_H3 = plan(
    qkv="attn.qkv_proj",
    back="attn.out_proj",
    mlp="mlp.fc1>mlp.fc2/mlp",
    gathered="adaln_proj.linear",
    width="attn.out_proj.in_features",
)

# comfy/ldm/seedvr/model.py: a layer has two modules, of video and text, or one for both
SEEDVR_2 = plan(
    qkv="attn.proj_qkv.*",
    back="attn.proj_out.*",
    features="mlp.*.proj_in*",
    features_back="mlp.*.proj_out",
    head_dim="attn.head_dim",
)


# ---- audio


# comfy/ldm/ace/attention.py. The MLP is of convolutions and stays whole: half of the products of a block.
ACE_STEP = plan(
    heads="*attn.to_[qkv]", back="*attn.to_out.0", width="attn.inner_dim", attributes={"*attn.heads": "heads"}
)

# comfy/ldm/ace/ace_step15.py
ACE_STEP_15 = plan(
    heads="*_attn.q_proj",
    kv_heads="*_attn.[kv]_proj",
    back="*_attn.o_proj",
    mlp="mlp.gate_proj,mlp.up_proj>mlp.down_proj",
    num_heads="self_attn.num_heads",
    num_kv_heads="self_attn.num_kv_heads",
    width="self_attn.q_proj.out_features",
    attributes={"*_attn.num_heads": "heads", "*_attn.num_kv_heads": "kv_heads"},
)

# comfy/ldm/audio/dit.py: the cross-attention has fewer heads of keys and values where its text is narrower.
# Differential attention packs queries and keys twice.
STABLE_AUDIO = plan(
    Divided("self_attn.to_qkv", "column", ("heads",), repeats=True),
    Divided("cross_attn.to_q", "column", ("heads",), repeats=True),
    Divided("cross_attn.to_kv", "column", KV_HEADS, repeats=True),
    back="*_attn.to_out",
    mlp="ff.ff.0.proj>ff.ff.2",
    num_heads="self_attn.num_heads",
    num_kv_heads="cross_attn.kv_heads",
    width="self_attn.dim",
    attributes={"*_attn.num_heads": "heads", "self_attn.kv_heads": "heads", "cross_attn.kv_heads": "kv_heads"},
)

# comfy/ldm/minimax_music/dit.py
MINIMAX_MUSIC_3 = plan(
    qkv="self_attn.to_qkv",
    back="self_attn.to_out",
    mlp="ff.ff.0.proj>ff.ff.2",
    num_heads="self_attn.num_heads",
    width="self_attn.to_out.in_features",
)
