"""Where the rows of ComfyUI's classes are, for ranks that share them out (families/token_plan.py); by class."""

from __future__ import annotations

import copy
import types
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from ..token_plan import BlockRows, TokenPlan
from .native import NativeModel


def _one(
    rows: str, keys: str, name: str = "blocks", counts: str = "", changes: dict[str, Any] | None = None, **more: Any
) -> TokenPlan:
    return TokenPlan({name: BlockRows(rows, keys, counts, changes or {})}, **more)


class _Rows(int):
    """A number of rows that LTX attends by itself: none, too, for each rank has to bring its keys to each attention."""

    def __gt__(self, other: int) -> bool:
        return True


def _ltx_guides(rows: Any, mask: Any) -> Any:
    """LTX's object with the masks of noisy and of guide rows: where guides begin among the rank's rows, and theirs."""
    if not hasattr(mask, "guide_start"):
        return mask
    made, end = copy.copy(mask), mask.guide_start + mask.tracked_count
    made.guide_start = _Rows(rows.count(mask.guide_start, "x"))
    made.tracked_count = rows.count(end, "x") - made.guide_start
    before = rows.rows_before(mask.guide_start, "x")
    made.tracked_mask = mask.tracked_mask[:, :, before : before + made.tracked_count]
    return made


def _after_prompt(rows: Any, attention: Any) -> Any:
    """HiDream-O1's function: the first ar_len rows, the prompt's, attend to each other; the first rank has them."""
    ar_len = attention.__closure__[attention.__code__.co_freevars.index("ar_len")].cell_contents
    return attention if rows.has_first(ar_len, "x") else _with_variable(attention, "ar_len", 0)


def _block_causal(rows: Any, attention: Any) -> Any:
    """Qwen-Image 2.1's function: rows of a text attend to those before them, a picture's to its own and all before it.
    segments: (start, end, mask) of all rows, which become one of the rank's rows with a mask against all."""
    segments = attention.__closure__[attention.__code__.co_freevars.index("segments")].cell_contents
    first, count = rows.share("x")
    mask = None
    if first < segments[-1][0]:
        device = next(each for *_, each in segments if each is not None).device
        mask = torch.zeros(count, rows.lengths["x"], dtype=torch.bool, device=device)
        for start, end, own in segments:
            begin, until = max(start, first), min(end, first + count)
            if begin < until:
                seen = True if own is None else own[begin - start : until - start]
                mask[begin - first : until - first, :end] = seen
    return _with_variable(attention, "segments", [(0, count, mask)])


def _with_variable(function: Any, name: str, value: Any) -> Any:
    """A function with another value of a variable that it has from around it."""
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    closure = tuple(types.CellType(value) if own == name else cell for own, cell in cells)
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )


def _sliding_window(rows: Any, module: Any, mask: torch.Tensor, axis: str) -> torch.Tensor:
    """ACE-Step 1.5 makes a mask of the length that a layer sees: here of the rank's rows against all. [1, 1, q, k]"""
    first, count = rows.share(axis)
    everywhere = torch.arange(rows.lengths[axis], device=mask.device)
    is_far = (everywhere[first : first + count, None] - everywhere[None]).abs() > module.sliding_window
    made = torch.zeros(is_far.shape, dtype=mask.dtype, device=mask.device)
    return made.masked_fill_(is_far, torch.finfo(mask.dtype).min)[None, None]


FLUX = TokenPlan(
    {
        "double_blocks": BlockRows(
            "img=img@1 txt=txt@1 pe=txt+img@2", "=txt+img", "modulation_dims_img=img", out="0=img@1"
        ),
        "single_blocks": BlockRows("x=txt+img@1 pe=txt+img@2", "=txt+img", "modulation_dims=~txt+img"),
    },
    out="=txt+img@1",
    own=("txt",),
    control="img",
)
WAN = _one("x=x@1 freqs=x@1 e=e@1", "self_attn=x", aligned="e x")  # the 5B's e has a row per frame
QWEN_IMAGE = _one(
    "hidden_states=img@1 encoder_hidden_states=txt@1 image_rotary_emb=txt+img@2 encoder_hidden_states_mask=txt@1",
    "attn=txt+img",
    "transformer_blocks",
    "timestep_zero_index=img",
    out="1=img@1",
    control="img",
    cuts_masks=True,
)
NEXT_DIT = _one("x=x@1 freqs_cis=x@1", "attention=x", "layers", "timestep_zero_index=x")
HIDREAM_O1 = TokenPlan(
    {
        "language_model.layers": BlockRows(
            "x=x@1 freqs_cis.0=x@1 freqs_cis.1=x@1 freqs_cis.2=x@1",
            "self_attn=x",
            changes={"optimized_attention": _after_prompt},
            refused=("past_key_value",),
        )
    },
    out="0=x@1",
)
PIXEL_DIT = _one("x=x@1 y=y@1 pos_img=x@0 pos_txt=y@0", "attn=y+x", "patch_blocks", out="0=x@1")
_LTX_TIMES = ("v_timestep", "v_cross_scale_shift_timestep", "v_cross_gate_timestep")  # with a row per frame
_LTXAV_ROWS = (
    "x.0=v@1 x.1=a@1 v_pe.0=v@1 a_pe.0=a@1 v_cross_pe.0=v@1 a_cross_pe.0=a@1",
    *(f"{name}.data=f@1 a{name[1:]}=a@1" for name in _LTX_TIMES),
)
_COSMOS_FRAMES = "x_B_T_H_W_D=t@1 emb_B_T_D=t@1 adaln_lora_B_T_3D=t@1 extra_per_block_pos_emb=t@1 rope_emb_L_1_1_D=x@1"
_COSMOS_ROWS = "x_B_T_H_W_D=t@2 extra_per_block_pos_emb=t@2 rope_emb_L_1_1_D=x@1"  # of patches, of one frame
COSMOS_2 = _one(
    _COSMOS_FRAMES,
    "self_attn=x",
    aligned="t x",
    out="=t@1",
    one_frame=_one(_COSMOS_ROWS, "self_attn=x", aligned="t x", out="=t@2"),
)

TOKEN_PLANS: dict[str, TokenPlan] = {
    **dict.fromkeys(("Flux", "Chroma", "ChromaRadiance"), FLUX),
    "HunyuanVideo": replace(
        FLUX,
        blocks={
            **FLUX.blocks,
            "single_blocks": replace(FLUX.blocks["single_blocks"], counts="modulation_dims=txt+img"),
        },
    ),
    "Hunyuan3Dv2": TokenPlan(
        {
            "double_blocks": BlockRows("img=img@1 txt=txt@1", "=txt+img"),
            "single_blocks": BlockRows("x=txt+img@1", "=txt+img"),
        },
        out="=txt+img@1",
        own=("txt",),
    ),
    "WanModel": replace(WAN, released="x"),
    **dict.fromkeys(("SCAILWanModel", "SCAIL2WanModel"), WAN),
    "CameraWanModel": _one("x=x@1 freqs=x@1", "self_attn=x"),
    "VaceWanModel": TokenPlan(
        {
            "blocks": BlockRows("x=x@1 freqs=x@1", "self_attn=x"),
            "vace_blocks": BlockRows("c=x@1 x=x@1 kwargs.freqs=x@1", "self_attn=x"),
        },
        out="",
        tail="head=x@1",  # a block of vace may follow the last main one
    ),
    "WanModel_S2V": replace(WAN, out="", tail="head=x@1", between="audio_injector=x@1"),
    "HumoWanModel": _one("x=x@1 freqs=x@1 e=e@1 audio=a@1", "self_attn=x", aligned="a:16 x e"),
    "AnimateWanModel": replace(WAN, out="", tail="head=x@1", between="face_adapter.fuser_blocks=x@1"),
    "WanDancerModel": replace(WAN, out="", tail="head=x@1 head_global=x@1", between="music_injector=x@1"),
    **dict.fromkeys(("QwenImageTransformer2DModel", "MageFlowTransformer2DModel"), QWEN_IMAGE),
    "QwenImage21Transformer2DModel": _one(
        "x=x@1 pe=x@1", "attn=x", "transformer_blocks", "prefix_len=x", changes={"attn_fn": _block_causal}
    ),
    "LensTransformer2DModel": _one(
        "hidden_states=img@1 encoder_hidden_states=txt@1 freqs_cis=img+txt@2 attention_mask=img+txt@3",
        "attn=img+txt",
        "transformer_blocks",
        out="1=img@1",
        control="img",
        cuts_masks=True,
    ),
    "OpenAISignatureMMDITWrapper": _one(
        "args.0=txt@1 args.1=x@1", "=txt+x/x", "joint_blocks", out="1=x@1", control="x"
    ),
    **dict.fromkeys(("NextDiT", "NextDiTPixelSpace"), NEXT_DIT),
    "HiDreamImageTransformer2DModel": TokenPlan(
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
    "HiDreamO1Transformer": HIDREAM_O1,
    "MMDiT": TokenPlan(
        {
            "double_layers": BlockRows("c=txt@1 x=img@1", "attn=txt+img"),
            "single_layers": BlockRows("cx=txt+img@1", "attn=txt+img"),
        },
        out="=txt+img@1",
        own=("txt",),
    ),
    "PixArtMS": _one("x=x@1", "attn=x", passes_options=False),
    "OmniGen2Transformer2DModel": _one("hidden_states=x@1 image_rotary_emb=x@1", "attn=x", "layers"),
    "BooguTransformer2DModel": TokenPlan(
        {
            "double_stream_layers": BlockRows(
                "img_hidden_states=img@1 instruct_hidden_states=txt@1 joint_rotary_emb=txt+img@1 img_rotary_emb=img@1",
                "img_instruct_attn.processor=txt+img img_self_attn=img",
            ),
            "single_stream_layers": BlockRows("hidden_states=txt+img@1 image_rotary_emb=txt+img@1", "attn=txt+img"),
        },
        out="=txt+img@1",
    ),
    "JoyImageTransformer3DModel": _one(
        "hidden_states=img@1 encoder_hidden_states=txt@1 image_rotary_emb=img@1",
        "attn=img+txt",
        "double_blocks",
        out="0=img@1",
    ),
    "SingleStreamDiT": _one("x=x@1 freqs=x@2", "attn=x", counts="timestep_zero_index=x"),
    "ErnieImageModel": _one("x=x@1 rotary_pos_emb=x@1", "self_attention=x", "layers", passes_options=False),
    "Ideogram4Transformer2DModel": _one("x=x@1 freqs_cis=x@1", "attention=x", "layers"),
    "PixDiT_T2I": PIXEL_DIT,
    "PidNet": replace(PIXEL_DIT, between="lq_proj.gate_modules=x@1"),
    "HunYuanDiT": _one(
        "x=x@1 skip=x@1 freq_cis_img.0=x@0 freq_cis_img.1=x@0", "attn1=x", control="x", passes_options=False
    ),
    "HunYuanDiTPlain": _one("hidden_states=x@1 skip_tensor=x@1", "attn1=x", passes_options=False),
    "LatentSeqMMFlowModel": _one("x=x@1 rotary_emb=x@1", "attn=x"),
    "LTXVModel": _one(
        "x=x@1 timestep=x@1 pe.0=x@1", "attn1=x", "transformer_blocks", changes={"self_attention_mask": _ltx_guides}
    ),
    "LTXAVModel": _one(
        " ".join(_LTXAV_ROWS),
        "attn1=v audio_attn1=a audio_to_video_attn=a video_to_audio_attn=v",
        "transformer_blocks",
        " ".join(f"{name}.num_frames=f" for name in _LTX_TIMES),
        out="0=v@1 1=a@1",
        aligned="f v",
    ),
    "MiniMaxH3Model": _one("x=x@0 rope_freqs=x@1", "attn=x", counts="mod_segments=x", out="=x@0"),
    **dict.fromkeys(("MiniTrainDIT", "Anima"), COSMOS_2),
    "AsymmDiTJoint": _one(
        "x=x@1 attn_kwargs.rope_cos=x@0 attn_kwargs.rope_sin=x@0 attn_kwargs.crop_y=crop@0",
        "attn=x+crop",
        out="0=x@1",
        whole=("crop",),
    ),
    "Kandinsky5": _one("visual_embed=x@1 freqs=x@1", "self_attention=x", "visual_transformer_blocks"),
    "CogVideoXTransformer3DModel": _one(
        "hidden_states=img@1 encoder_hidden_states=txt@1 image_rotary_emb.0=img@0 image_rotary_emb.1=img@0",
        "=txt+img",
        out="0=img@1",
    ),
    "AceStepConditionGenerationModel": _one(
        "hidden_states=x@1 position_embeddings.0=x@0 position_embeddings.1=x@0",
        "self_attn=x",
        "decoder.layers",
        makes_mask=_sliding_window,
        passes_options=False,
    ),
    "AudioDiffusionTransformer": _one(
        "local_add_cond=a@1 x=m?+a@1 rotary_pos_emb.0=m?+a@0", "self_attn=m?+a", "transformer.layers", out="=m?+a@1"
    ),
    "MiniMaxMusic3DiT": _one(
        "x=x@1 rotation_matrix=x@2", "self_attn=x", "diffusion_transformer.transformer.layers", passes_options=False
    ),
}
# Why a class does not run by its rows.
NO_TOKENS: dict[str, str] = {
    "GeneralDIT": "it adds positions of all rows between its blocks, outside of any module",
    "NaDiT": "it attends in windows over a grid of frames, rows and columns",
    "ACEStepTransformer2DModel": "its linear attention sums over all rows, and its feed-forward is a convolution",
    "UNetModel": "it is made of convolutions",
    "StageC": "it is made of convolutions",
    "StageB": "it is made of convolutions",
    "WanAnimate2Model": "its blocks run through methods of their own, with caches",
    "CausalWanModel": "its blocks write keys and values into caches",
    "SenseNovaU15": "its layers are never called",
    "Prism": "its blocks are never called",
}


NO_TOKENS_OF_DIFFUSERS = (
    "nobody has described where the tokens of diffusers' class are; train ComfyUI's class of the model"
)


def plan_of(native: NativeModel) -> TokenPlan | None:
    """Where the rows of a class are: as written, else as derived for the first inputs."""
    return TOKEN_PLANS.get(native.class_name) or next(iter(native.derived_rows.values()), None)


def why_no_tokens(class_name: str, derived: Collection[str] = ()) -> str:
    """Why a class cannot be shared out by its tokens; "" if it can. derived: kinds of inputs with rows."""
    if class_name in TOKEN_PLANS or derived:
        return ""
    reason = NO_TOKENS.get(class_name, "nobody has described where its tokens are")
    return f"{class_name} cannot be shared out by tokens: {reason}"
