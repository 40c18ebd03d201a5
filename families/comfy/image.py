"""ComfyUI's image models, one row each; a row that others are made from has a name."""

from __future__ import annotations

from dataclasses import replace

from ..tensor_plan import QKV, Divided, plan
from ..token_plan import BlockRows, TokenPlan
from .native import NativeModel, runs_over
from .token_plans import after_prompt, block_causal, one

_SELF_ATTENTION = ("attn1_patch", "attn1_output_patch")

FLUX = NativeModel(
    path="comfy.ldm.flux.model.Flux",
    block_lists=("double_blocks", "single_blocks"),
    replace_keys={"double_block": "double_blocks", "single_block": "single_blocks"},
    patches_inside=_SELF_ATTENTION,
    note="FLUX.1 and FLUX.2; FLUX.2 passes modulation as dataclasses, and blocks change img and txt in place",
    fused_attention=("single_blocks.*.linear1", "single_blocks.*.linear2"),
    tensor=plan(
        block="DoubleStreamBlock",
        qkv="*_attn.qkv",
        back="*_attn.proj",
        gathered="*_mod.lin",
        mlp="img_mlp.0>img_mlp.2 txt_mlp.0>txt_mlp.2",
        features="*_mlp.gate_proj *_mlp.up_proj",  # Yak's
        features_back="*_mlp.down_proj",
        num_heads="num_heads",
        width="hidden_size",
    )
    + plan(
        Divided("linear1", "column", (*QKV, "features"), into="linear2"),
        Divided("linear2", "row", ("heads", "features")),
        block="SingleStreamBlock",
        gathered="modulation.lin",
        num_heads="num_heads",
        width="hidden_size",
        attributes={"hidden_size": "heads", "mlp_hidden_dim_first": "linear1"},
    ),
    tokens=TokenPlan(
        {
            "double_blocks": BlockRows(
                "img=img@1 txt=txt@1 pe=txt+img@2", "=txt+img", "modulation_dims_img=img", out="0=img@1"
            ),
            "single_blocks": BlockRows("x=txt+img@1 pe=txt+img@2", "=txt+img", "modulation_dims=~txt+img"),
        },
        out="=txt+img@1",
        own=("txt",),
        control="img",
    ),
)

CHROMA = replace(
    FLUX,
    path="comfy.ldm.chroma.model.Chroma",
    is_sequential=True,
    note="the main device sends each block its slices of the modulation; skip_mmdit and skip_dit may skip blocks",
)

QWEN_IMAGE = NativeModel(
    path="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    block_lists=("transformer_blocks",),
    tail=("norm_out", "proj_out"),
    replace_keys={"double_block": "transformer_blocks"},
    patches_inside=("attn1_patch",),
    note="blocks return text first; with references at timestep zero their modulation has twice the batch",
    tensor=plan(
        heads="attn.to_[qkv] attn.add_[qkv]_proj",
        back="attn.to_out.0/attn.to_out.1 attn.to_add_out",  # a dropout may read what it passes on
        mlp="img_mlp.net.0.proj>img_mlp.net.2 txt_mlp.net.0.proj>txt_mlp.net.2",
        gathered="*_mod.1",  # a third of the model's weights
    ),
    tokens=one(
        "hidden_states=img@1 encoder_hidden_states=txt@1 image_rotary_emb=txt+img@2 encoder_hidden_states_mask=txt@1",
        "attn=txt+img",
        "transformer_blocks",
        "timestep_zero_index=img",
        out="1=img@1",
        control="img",
        cuts_masks=True,
    ),
)

SD3 = NativeModel(
    path="comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    block_lists=("joint_blocks",),
    replace_keys={"double_block": "joint_blocks"},
    note="SD3 and SD3.5; the last block returns no context",
    # the context's last block has neither projection nor MLP
    tensor=plan(
        block="JointBlock",
        qkv="*_block.attn*.qkv",
        back="*_block.attn*.proj",
        mlp="x_block.mlp.fc1>x_block.mlp.fc2 context_block.mlp.fc1>context_block.mlp.fc2",
        gathered="*_block.adaLN_modulation.1",
        num_heads="x_block.attn.num_heads",
    ),
    tokens=one("args.0=txt@1 args.1=x@1", "=txt+x/x", "joint_blocks", out="1=x@1", control="x"),
)

NEXT_DIT = NativeModel(
    path="comfy.ldm.lumina.model.NextDiT",
    block_lists=("layers",),
    front_parameters=("x_pad_token", "cap_pad_token", "siglip_pad_token"),
    note="Lumina 2 and Z-Image; the refiners stay on the main device; a patch may write to its img and txt in place",
    # Lumina 2 has fewer heads of keys and values, Z-Image as many
    tensor=plan(
        Divided("attention.qkv", "column", ("heads", "kv_heads", "kv_heads")),
        block="JointTransformerBlock",
        back="attention.out",
        features="feed_forward.w[13]",
        features_back="feed_forward.w2",
        gathered="adaLN_modulation.*",
        num_heads="attention.n_local_heads",
        num_kv_heads="attention.n_local_kv_heads",
    ),
    tokens=one("x=x@1 freqs_cis=x@1", "attention=x", "layers", "timestep_zero_index=x"),
)

OMNIGEN_2 = NativeModel(
    path="comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel",
    block_lists=("layers",),
    tail=("norm_out",),
    front_parameters=("image_index_embedding",),
    tensor=plan(
        block="OmniGen2TransformerBlock",
        heads="attn.to_q",
        kv_heads="attn.to_[kv]",
        back="attn.to_out.0",
        mlp="feed_forward.linear_[13]>feed_forward.linear_2",
        gathered="norm1.linear",
        num_kv_heads="attn.kv_heads",
    ),
    linears=runs_over(sample=("*norm?.linear",)),
    tokens=one("hidden_states=x@1 image_rotary_emb=x@1", "attn=x", "layers"),
)

PIXEL_DIT = NativeModel(
    path="comfy.ldm.pixeldit.model.PixDiT_T2I",
    block_lists=("patch_blocks",),
    tail=("pixel_embedder", "pixel_blocks", "final_layer"),
    note="the pixel blocks stay on the main device: time is added to the stream before them",
    front_parameters=("y_pos_embedding",),
    ends_on_main_device=True,
    in_place=("pixel_blocks.0", "pixel_blocks.1"),
    # PiD's blocks, too
    tensor=plan(
        qkv="attn.qkv_?",
        back="attn.proj_?",
        mlp="mlp_x.w[13]>mlp_x.w2 mlp_y.w[13]>mlp_y.w2",
        gathered="adaLN_*.0",
        num_heads="attn.num_heads",
    ),
    linears=runs_over(text=("attn.*_y", "mlp_y.*"), is_joint=False),
    tokens=one("x=x@1 y=y@1 pos_img=x@0 pos_txt=y@0", "attn=y+x", "patch_blocks", out="0=x@1"),
)

_DOWN, _UP = (tuple(f"{name}.{level}" for level in range(4)) for name in ("down_blocks", "up_blocks"))

CASCADE_C = NativeModel(
    path="comfy.ldm.cascade.stage_c.StageC",
    block_lists=(*_DOWN, *_UP),
    tail=("clf",),
    transport="relay",
    optional=(*_DOWN[2:], *_UP[2:]),
    # No plan for divided blocks: most of them are convolutions.
    note="Stable Cascade; between levels, and before the way up's skips, the stream is resized on the main device",
    no_tokens="it is made of convolutions",
)

IMAGE_MODELS: tuple[NativeModel, ...] = (
    FLUX,
    CHROMA,
    replace(
        CHROMA,
        path="comfy.ldm.chroma_radiance.model.ChromaRadiance",
        tail=("nerf_image_embedder", "nerf_blocks", "nerf_final_layer", "nerf_final_layer_conv"),
    ),
    QWEN_IMAGE,
    NativeModel(
        path="comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel",
        block_lists=("transformer_blocks",),
        tail=("norm_out", "proj_out"),
        replace_keys={"single_block": "transformer_blocks"},
        patches_inside=("attn1_patch",),
        is_sequential=True,
        evidence="outside",
        remembers=("prefix_cache",),
        forgets_if_patched=True,
        # Newer than 0.33.0; gate and what it gates are one layer or two
        tensor=plan(
            Divided("img_mlp.gate_up", "column", ("features",), into="img_mlp.out"),
            heads="attn.to_[qkv]",
            back="attn.to_out.0",
            features="img_mlp.gate_layer img_mlp.proj",
            features_back="img_mlp.out/img_mlp",
        ),
        note="blocks are handed an attention function that holds masks, or keys and values kept from the first step",
        tokens=one("x=x@1 pe=x@1", "attn=x", "transformer_blocks", "prefix_len=x", changes={"attn_fn": block_causal}),
    ),
    replace(QWEN_IMAGE, path="comfy.ldm.mage_flow.model.MageFlowTransformer2DModel"),
    replace(
        QWEN_IMAGE,
        path="comfy.ldm.lens.model.LensTransformer2DModel",
        patches_inside=(),
        tensor=plan(
            qkv="attn.*_qkv",
            back="attn.to_out.0 attn.to_add_out",
            mlp="img_mlp.w[13]>img_mlp.w2 txt_mlp.w[13]>txt_mlp.w2",
            gathered="*_mod.1",
        ),
        linears=runs_over(is_joint=False),
        tokens=one(
            "hidden_states=img@1 encoder_hidden_states=txt@1 freqs_cis=img+txt@2 attention_mask=img+txt@3",
            "attn=img+txt",
            "transformer_blocks",
            out="1=img@1",
            control="img",
            cuts_masks=True,
        ),
    ),
    SD3,
    replace(SD3, path="comfy.ldm.modules.diffusionmodules.mmdit.MMDiT"),
    NativeModel(
        path="comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
        block_lists=("input_blocks", "middle_block", "output_blocks"),
        tail=("out", "id_predictor"),
        transport="relay",
        patches_inside=(*_SELF_ATTENTION, "middle_patch", "attn2_patch", "attn2_output_patch"),
        hooks_children=True,
        optional=("middle_block",),
        # No plan for divided blocks: most of them are convolutions.
        note="skips of the way down are joined on the way up; a control that does not fit is skipped without an error",
        no_tokens="it is made of convolutions",
    ),
    CASCADE_C,
    replace(
        CASCADE_C,
        path="comfy.ldm.cascade.stage_b.StageB",
        note="Stable Cascade's second model; the levels of the way up run their blocks several times",
    ),
    NEXT_DIT,
    replace(NEXT_DIT, path="comfy.ldm.lumina.model.NextDiTPixelSpace", tail=("dec_net",), ends_on_main_device=True),
    NativeModel(
        path="comfy.ldm.hidream.model.HiDreamImageTransformer2DModel",
        block_lists=("double_stream_blocks", "single_stream_blocks"),
        transport="relay",
        note="before every block that layer's text states are joined to the stream, and they are on the main device",
        # q and k are normalised over all heads. Experts and the shared one add up, and which token goes to which
        # expert is chosen before them. A build without experts has the names of one.
        tensor=plan(
            heads="block.attn1.to_[qkv] block.attn1.to_[qkv]_t",
            back="block.attn1.to_out block.attn1.to_out_t",
            features="block.ff_[it].*w[13]",
            features_back="block.ff_i.*w2/block.ff_i block.ff_t.w2",
            gathered="block.adaLN_modulation.1",
            num_heads="block.attn1.heads",
            norms=("block.attn1.[qk]_rms_norm*",),
            decided=("block.ff_i.gate",),
        ),
        no_forecast="its experts are chosen by the numbers that they compute with",
        linears=runs_over(text=("*_t", "*.ff_t.*"), routed_modules={"*.experts.*": 0.5}),  # two of four
        tokens=TokenPlan(
            {
                "double_stream_blocks": BlockRows(
                    "image_tokens=img@1 text_tokens=txt@1 rope=img+txt@1", "block.attn1=img+txt"
                ),
                "single_stream_blocks": BlockRows("image_tokens=img+txt@1 rope=img+txt@1", "block.attn1=img+txt"),
            },
            out="",
            tail="final_layer=img@1",
            whole=("txt",),  # each block's own states of the text are joined to it between blocks
        ),
    ),
    NativeModel(
        path="comfy.ldm.aura.mmdit.MMDiT",
        block_lists=("double_layers", "single_layers"),
        tail=("modF", "final_linear"),
        front_parameters=("positional_encoding", "register_tokens"),
        replace_keys={"double_block": "double_layers", "single_block": "single_layers"},
        note="the final modulation is applied to the stream outside any module",
        # both kinds of block
        tensor=plan(
            heads="attn.w[12][qkv]",
            back="attn.w[12]o",
            features="mlp*.c_fc[12]",
            features_back="mlp*.c_proj",
            gathered="mod*.1",
            num_heads="attn.n_heads",
        ),
        linears=runs_over(text=("mlpC.*",)),
        tokens=TokenPlan(
            {
                "double_layers": BlockRows("c=txt@1 x=img@1", "attn=txt+img"),
                "single_layers": BlockRows("cx=txt+img@1", "attn=txt+img"),
            },
            out="=txt+img@1",
            own=("txt",),
        ),
    ),
    NativeModel(
        path="comfy.ldm.pixart.pixartms.PixArtMS",
        # No plan for divided blocks: attention gives its output the width of its input, which is that of all heads.
        note="PixArt alpha and sigma; the forward knows no patches at all",
        tokens=one("x=x@1", "attn=x", passes_options=False),
    ),
    OMNIGEN_2,
    replace(
        OMNIGEN_2,
        path="comfy.ldm.boogu.model.BooguTransformer2DModel",
        block_lists=("double_stream_layers", "single_stream_layers"),
        # img_instruct_attn.to_out.0 takes whole sums and is whole: one of 24 such matrices of a block
        tensor=(
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
            )
            + OMNIGEN_2.tensor
        ),
        linears=replace(OMNIGEN_2.linears, text_modules=("instruct_*", "*.instruct_*")),
        tokens=TokenPlan(
            {
                "double_stream_layers": BlockRows(
                    "img_hidden_states=img@1 instruct_hidden_states=txt@1 joint_rotary_emb=txt+img@1 "
                    "img_rotary_emb=img@1",
                    "img_instruct_attn.processor=txt+img img_self_attn=img",
                ),
                "single_stream_layers": BlockRows("hidden_states=txt+img@1 image_rotary_emb=txt+img@1", "attn=txt+img"),
            },
            out="=txt+img@1",
        ),
    ),
    NativeModel(
        path="comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
        block_lists=("double_blocks",),
        tail=("norm_out", "proj_out"),
        replace_keys={"double_block": "double_blocks"},
        # Modulation is a table of the block.
        tensor=plan(
            qkv="attn.*_attn_qkv",
            back="attn.*_attn_proj",
            mlp="img_mlp.net.0.proj>img_mlp.net.2 txt_mlp.net.0.proj>txt_mlp.net.2",
            num_heads="attn.num_attention_heads",
        ),
        linears=runs_over(is_joint=False),
        tokens=one(
            "hidden_states=img@1 encoder_hidden_states=txt@1 image_rotary_emb=img@1",
            "attn=img+txt",
            "double_blocks",
            out="0=img@1",
        ),
    ),
    NativeModel(
        path="comfy.ldm.krea2.model.SingleStreamDiT",
        tail=("last",),
        patches_inside=_SELF_ATTENTION,
        # The gate is one number per feature of every head of queries
        tensor=plan(
            heads="attn.wq attn.gate",
            kv_heads="attn.w[kv]",
            back="attn.wo",
            mlp="mlp.gate,mlp.up>mlp.down",
            num_kv_heads="attn.kvheads",
        ),
        tokens=one("x=x@1 freqs=x@2", "attn=x", counts="timestep_zero_index=x"),
    ),
    NativeModel(
        path="comfy.ldm.ernie.model.ErnieImageModel",
        block_lists=("layers",),
        tail=("final_norm", "final_linear"),
        # all blocks share one modulation
        tensor=plan(
            heads="self_attention.to_[qkv]",
            back="self_attention.to_out.0",
            mlp="mlp.gate_proj,mlp.up_proj>mlp.linear_fc2",
            num_heads="self_attention.heads",
        ),
        tokens=one("x=x@1 rotary_pos_emb=x@1", "self_attention=x", "layers", passes_options=False),
    ),
    NativeModel(
        path="comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
        block_lists=("layers",),
        tensor=plan(
            qkv="attention.qkv",
            back="attention.o",
            mlp="feed_forward.w[13]>feed_forward.w2",
            gathered="adaln_modulation",
            num_heads="attention.num_heads",
        ),
        tokens=one("x=x@1 freqs_cis=x@1", "attention=x", "layers"),
    ),
    NativeModel(
        path="comfy.ldm.hidream_o1.model.HiDreamO1Transformer",
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
        tokens=TokenPlan(
            {
                "language_model.layers": BlockRows(
                    "x=x@1 freqs_cis.0=x@1 freqs_cis.1=x@1 freqs_cis.2=x@1",
                    "self_attn=x",
                    changes={"optimized_attention": after_prompt},
                    refused=("past_key_value",),
                )
            },
            out="0=x@1",
        ),
    ),
    NativeModel(
        path="comfy.ldm.sensenova.model.SenseNovaU15",
        block_lists=("language_model.model.layers",),
        tail=("language_model.model.norm_mot_gen", "fm_modules"),
        evidence="outside",
        refusal="its layers are run through forward_prefix, forward_generation and forward_decode, never called",
        note="see refusal; the prompt is run through the layers before sampling, outside of any forward, as well",
    ),
    PIXEL_DIT,
    replace(
        PIXEL_DIT,
        path="comfy.ldm.pixeldit.pid.PidNet",
        tail=(*PIXEL_DIT.tail, "pit_lq_gate"),
        transport="relay",
        note="a gate on the main device mixes the low resolution into the stream before blocks",
        untrained="it draws a larger picture of a small one, and no dataset here holds both",
        tokens=replace(PIXEL_DIT.tokens, between="lq_proj.gate_modules=x@1"),
    ),
    NativeModel(
        path="comfy.ldm.hydit.models.HunYuanDiT",
        transport="relay",
        replace_keys={"double_block": "blocks"},
        note="HunyuanDiT; a ControlNet is added to a skip, and the two are on different cards otherwise",
        # skip_linear takes the stream and a skip, normalised together, and gives half as much
        tensor=plan(
            Divided("attn2.kv_proj", "column", ("heads", "heads")),
            qkv="attn1.Wqkv",
            heads="attn2.q_proj",
            back="attn?.out_proj",
            mlp="mlp.fc1>mlp.fc2",
            gathered="default_modulation.1 skip_linear",
            num_heads="attn1.num_heads",
        ),
        linears=runs_over(text=("attn2.kv_proj",), is_joint=False),
        tokens=one(
            "x=x@1 skip=x@1 freq_cis_img.0=x@0 freq_cis_img.1=x@0", "attn1=x", control="x", passes_options=False
        ),
    ),
    replace(
        FLUX,
        path="comfy.ldm.hunyuan3d.model.Hunyuan3Dv2",
        note="Hunyuan3D 2; FLUX's blocks without positions",
        tokens=TokenPlan(
            {
                "double_blocks": BlockRows("img=img@1 txt=txt@1", "=txt+img"),
                "single_blocks": BlockRows("x=txt+img@1", "=txt+img"),
            },
            out="=txt+img@1",
            own=("txt",),
        ),
    ),
    NativeModel(
        path="comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
        replace_keys={"block": "blocks"},
        is_sequential=True,
        # No plan for divided blocks: attention joins q, k and v before it takes heads, so that a head has parts of all.
        # The MLPs alone would not pay.
        note="Hunyuan3D 2.1; skips are arguments of the later blocks; the forward swaps the halves of a batch",
        tokens=one("hidden_states=x@1 skip_tensor=x@1", "attn1=x", passes_options=False),
    ),
    NativeModel(
        path="comfy.ldm.triposplat.model.LatentSeqMMFlowModel",
        tail=("out_layer", "cam_out_layer"),
        transport="relay",
        # No plan for divided blocks: attention gives its output the width of its input, which is that of all heads.
        note="TripoSplat; before every block a module on the main device makes its rotary table from the stream",
        tokens=one("x=x@1 rotary_emb=x@1", "attn=x"),
    ),
)
