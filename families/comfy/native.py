"""ComfyUI's own model classes, one row each: where the blocks are and what happens between them.

Read in ComfyUI v0.33.0 (comfy/ldm/...), forward by forward; tests/comfy/test_native_families.py builds every class and
compares a split with an unsplit forward. A class that is not listed is no mistake: relay is right for any model whose
blocks are called as modules, and parallel/block_lists.py finds those blocks.

What decides between stream and relay is the code between two calls of blocks. Cutting the stream, joining text to it
and adding a ControlNet residual (which the host hands over on the right card) keep it where it is. Adding or joining
another tensor of the forward's own does not: that tensor is at home.

Two things no transport can mend, and such a class is refused: blocks that are run through other methods than their
call, and blocks that write into what they were handed without returning it, for the copy on a card is what they get.
"""

from __future__ import annotations

import dataclasses
import types

from ..spec import Follows, NativeModel

_ATTENTION_1 = ("attn1_patch", "attn1_output_patch")

FLUX = NativeModel(
    class_name="Flux",
    module="comfy.ldm.flux.model",
    block_lists=("double_blocks", "single_blocks"),
    tail=("final_layer",),
    transport="stream",
    replace_keys={"double_block": "double_blocks", "single_block": "single_blocks"},
    control_keys=("input", "output"),
    patches_inside=_ATTENTION_1,
    note="FLUX.1 and FLUX.2; FLUX.2 passes modulation as dataclasses, and blocks change img and txt in place",
)

CHROMA = NativeModel(
    class_name="Chroma",
    module="comfy.ldm.chroma.model",
    block_lists=("double_blocks", "single_blocks"),
    tail=("final_layer",),
    transport="stream",
    replace_keys={"double_block": "double_blocks", "single_block": "single_blocks"},
    control_keys=("input", "output"),
    patches_inside=_ATTENTION_1,
    can_overlap=False,
    note="each block gets fresh slices of the modulation from home; skip_mmdit and skip_dit may leave blocks out",
)

CHROMA_RADIANCE = dataclasses.replace(
    CHROMA,
    class_name="ChromaRadiance",
    module="comfy.ldm.chroma_radiance.model",
    tail=("nerf_image_embedder", "nerf_blocks", "nerf_final_layer", "nerf_final_layer_conv"),
    note="Chroma's blocks, then a pixel decoder of its own blocks, which stay at home",
)

_WAN_PATCHES = {"double_block": ("img", "x", "vec")}

WAN_MODEL = NativeModel(
    class_name="WanModel",
    module="comfy.ldm.wan.model",
    block_lists=("blocks",),
    tail=("head",),
    transport="stream",
    replace_keys={"double_block": "blocks"},
    patches_between=_WAN_PATCHES,
    patches_inside=("attn1_patch", "attn2_patch"),
    note="Wan 2.1 and 2.2, text and image to video; modulation is a parameter of the block itself",
)

WAN_CAMERA = dataclasses.replace(
    WAN_MODEL, class_name="CameraWanModel", note="camera poses are added before the blocks"
)

WAN_VACE = dataclasses.replace(
    WAN_MODEL,
    class_name="VaceWanModel",
    block_lists=("blocks", "vace_blocks"),
    follows={"vace_blocks": Follows(main="blocks", mapping="vace_layers_mapping")},
    optional=("vace_blocks",),
    can_overlap=False,
    note="a VACE block runs after its main block and is added to it, so it must sit on the same card",
)

WAN_S2V = dataclasses.replace(
    WAN_MODEL,
    class_name="WanModel_S2V",
    transport="relay",
    can_overlap=False,
    note="the audio injector at home changes the stream after every block it knows",
)

WAN_HUMO = dataclasses.replace(
    WAN_MODEL,
    class_name="HumoWanModel",
    patches_inside=("attn1_patch",),
    note="audio is an argument of every block; the block calls no attn2_patch",
)

WAN_ANIMATE = dataclasses.replace(
    WAN_MODEL,
    class_name="AnimateWanModel",
    module="comfy.ldm.wan.model_animate",
    transport="relay",
    can_overlap=False,
    note="a face adapter at home is added to the stream after every fifth block",
)

WAN_SCAIL = dataclasses.replace(
    WAN_MODEL, class_name="SCAILWanModel", note="poses and references are joined to the stream before the blocks"
)

WAN_SCAIL_2 = dataclasses.replace(WAN_SCAIL, class_name="SCAIL2WanModel", note="SCAIL with a mask added at the front")

WAN_DANCER = dataclasses.replace(
    WAN_S2V,
    class_name="WanDancerModel",
    module="comfy.ldm.wan.model_wandancer",
    tail=("head", "head_global"),
    note="the music injector at home changes the stream after every block it knows",
)

WAN_ANIMATE_2 = dataclasses.replace(
    WAN_S2V,
    class_name="WanAnimate2Model",
    module="comfy.ldm.wan.model_animate2",
    replace_keys={},
    refusal="its blocks are run through forward_pose and forward_gen, never called, and share buffers they write into",
    note="see refusal",
)

WAN_CAUSAL = dataclasses.replace(
    WAN_S2V,
    class_name="CausalWanModel",
    module="comfy.ldm.wan.ar_model",
    refusal="its blocks write keys, values and a position into caches they are handed",
    note="on another device the writes would go to a copy and the next frames would not see the earlier ones",
)

QWEN_IMAGE = NativeModel(
    class_name="QwenImageTransformer2DModel",
    module="comfy.ldm.qwen_image.model",
    block_lists=("transformer_blocks",),
    tail=("norm_out", "proj_out"),
    transport="stream",
    replace_keys={"double_block": "transformer_blocks"},
    control_keys=("input",),
    patches_between={"double_block": ("img", "txt", "x")},
    patches_inside=("attn1_patch",),
    note="blocks return text first; with references at timestep zero their modulation has twice the batch",
)

SD3 = NativeModel(
    class_name="OpenAISignatureMMDITWrapper",
    module="comfy.ldm.modules.diffusionmodules.mmdit",
    block_lists=("joint_blocks",),
    tail=("final_layer",),
    transport="stream",
    replace_keys={"double_block": "joint_blocks"},
    control_keys=("output",),
    note="SD3 and SD3.5; the last block returns no context",
)

MMDIT = dataclasses.replace(SD3, class_name="MMDiT", note="what SD3's class is derived from")

UNET = NativeModel(
    class_name="UNetModel",
    module="comfy.ldm.modules.diffusionmodules.openaimodel",
    block_lists=("input_blocks", "middle_block", "output_blocks"),
    tail=("out", "id_predictor"),
    transport="relay",
    control_keys=("input", "middle", "output"),
    patches_between={
        "input_block_patch": (),
        "input_block_patch_after_skip": (),
        "middle_block_after_patch": ("h", "x", "emb", "context", "y", "timesteps"),
        "output_block_patch": (),
    },
    patches_inside=(
        "attn1_patch",
        "attn1_output_patch",
        "middle_patch",
        "attn2_patch",
        "attn2_output_patch",
    ),
    hooks_children=True,
    optional=("middle_block",),
    can_overlap=False,
    note="skips of the way down are joined on the way up; a control that does not fit is skipped without an error",
)

HUNYUAN_VIDEO = NativeModel(
    class_name="HunyuanVideo",
    module="comfy.ldm.hunyuan_video.model",
    block_lists=("double_blocks", "single_blocks"),
    tail=("final_layer",),
    transport="stream",
    replace_keys={"double_block": "double_blocks", "single_block": "single_blocks"},
    control_keys=("input", "output"),
    patches_inside=_ATTENTION_1,
    note="HunyuanVideo 1 and 1.5, and HunyuanImage; the token refiner's own blocks stay at home",
)

LTXV = NativeModel(
    class_name="LTXVModel",
    module="comfy.ldm.lightricks.model",
    block_lists=("transformer_blocks",),
    tail=("norm_out", "proj_out"),
    transport="stream",
    replace_keys={"double_block": "transformer_blocks"},
    note="the tail mixes a free parameter with the stream; a guide mask is an object with tensors in slots",
)

LTXAV = dataclasses.replace(
    LTXV,
    class_name="LTXAVModel",
    module="comfy.ldm.lightricks.av_model",
    tail=("norm_out", "proj_out", "audio_norm_out", "audio_proj_out"),
    note="blocks take and return (video, audio); compressed timesteps are objects with tensors in slots",
)

NEXT_DIT = NativeModel(
    class_name="NextDiT",
    module="comfy.ldm.lumina.model",
    block_lists=("layers",),
    tail=("final_layer",),
    transport="stream",
    patches_between={"double_block": ("img", "img_input", "txt", "pe", "vec", "x")},
    note="Lumina 2 and Z-Image; the refiners stay at home; a patch may write to its img and txt in place",
)

NEXT_DIT_PIXEL = dataclasses.replace(
    NEXT_DIT, class_name="NextDiTPixelSpace", tail=("dec_net",), note="NextDiT with a pixel decoder for a tail"
)

COSMOS_PREDICT_2 = NativeModel(
    class_name="MiniTrainDIT",
    module="comfy.ldm.cosmos.predict2",
    block_lists=("blocks",),
    tail=("final_layer",),
    transport="stream",
    patches_inside=("attn1_patch", "attn2_patch", "mlp_patch"),
    note="extra positions are an argument of every block; the forward leaves its embeddings on the model, unread",
)

ANIMA = dataclasses.replace(
    COSMOS_PREDICT_2,
    class_name="Anima",
    module="comfy.ldm.anima.model",
    note="Cosmos Predict2 behind a text adapter, whose own blocks stay at home",
)

COSMOS_1 = NativeModel(
    class_name="GeneralDIT",
    module="comfy.ldm.cosmos.model",
    block_lists=("blocks",),
    tail=("final_layer",),
    transport="relay",
    can_overlap=False,
    note="blocks are in a ModuleDict; extra positions are added to the stream in place before each",
)

HIDREAM = NativeModel(
    class_name="HiDreamImageTransformer2DModel",
    module="comfy.ldm.hidream.model",
    block_lists=("double_stream_blocks", "single_stream_blocks"),
    tail=("final_layer",),
    transport="relay",
    can_overlap=False,
    note="before every block that layer's text states are joined to the stream, and they are at home",
)

AURA_FLOW = NativeModel(
    class_name="MMDiT",
    module="comfy.ldm.aura.mmdit",
    block_lists=("double_layers", "single_layers"),
    tail=("modF", "final_linear"),
    transport="stream",
    replace_keys={"double_block": "double_layers", "single_block": "single_layers"},
    note="the final modulation is applied to the stream outside any module",
)

PIXART = NativeModel(
    class_name="PixArtMS",
    module="comfy.ldm.pixart.pixartms",
    block_lists=("blocks",),
    tail=("final_layer",),
    transport="stream",
    note="PixArt alpha and sigma; the forward knows no patches at all",
)

MOCHI = NativeModel(
    class_name="AsymmDiTJoint",
    module="comfy.ldm.genmo.joint_model.asymm_models_joint",
    block_lists=("blocks",),
    tail=("final_layer",),
    transport="stream",
    replace_keys={"double_block": "blocks"},
    note="the last block leaves the text alone",
)

OMNIGEN_2 = NativeModel(
    class_name="OmniGen2Transformer2DModel",
    module="comfy.ldm.omnigen.omnigen2",
    block_lists=("layers",),
    tail=("norm_out",),
    transport="stream",
    note="the three refiners, two blocks each, stay at home",
)

KANDINSKY_5 = NativeModel(
    class_name="Kandinsky5",
    module="comfy.ldm.kandinsky5.model",
    block_lists=("visual_transformer_blocks",),
    tail=("out_layer",),
    transport="stream",
    replace_keys={"double_block": "visual_transformer_blocks"},
    note="the two text blocks stay at home",
)

BOOGU = dataclasses.replace(
    OMNIGEN_2,
    class_name="BooguTransformer2DModel",
    module="comfy.ldm.boogu.model",
    block_lists=("double_stream_layers", "single_stream_layers"),
    note="OmniGen 2 with double blocks before the single ones; the refiners stay at home",
)

MAGE_FLOW = dataclasses.replace(
    QWEN_IMAGE,
    class_name="MageFlowTransformer2DModel",
    module="comfy.ldm.mage_flow.model",
    note="Qwen-Image's blocks on unpacked latents",
)

LENS = dataclasses.replace(
    QWEN_IMAGE,
    class_name="LensTransformer2DModel",
    module="comfy.ldm.lens.model",
    patches_inside=(),
    note="blocks return text first, as Qwen-Image's do",
)

JOY_IMAGE = NativeModel(
    class_name="JoyImageTransformer3DModel",
    module="comfy.ldm.joyimage.model",
    block_lists=("double_blocks",),
    tail=("norm_out", "proj_out"),
    transport="stream",
    replace_keys={"double_block": "double_blocks"},
    note="nothing but the stream between blocks",
)

KREA_2 = NativeModel(
    class_name="SingleStreamDiT",
    module="comfy.ldm.krea2.model",
    block_lists=("blocks",),
    tail=("last",),
    transport="stream",
    patches_inside=_ATTENTION_1,
    note="the text fusion's own blocks stay at home",
)

ERNIE_IMAGE = NativeModel(
    class_name="ErnieImageModel",
    module="comfy.ldm.ernie.model",
    block_lists=("layers",),
    tail=("final_norm", "final_linear"),
    transport="stream",
    note="one modulation, a list of tensors, for all blocks",
)

IDEOGRAM_4 = NativeModel(
    class_name="Ideogram4Transformer2DModel",
    module="comfy.ldm.ideogram4.model",
    block_lists=("layers",),
    tail=("final_layer",),
    transport="stream",
    note="one packed sequence of text and image",
)

COG_VIDEO_X = NativeModel(
    class_name="CogVideoXTransformer3DModel",
    module="comfy.ldm.cogvideo.model",
    block_lists=("blocks",),
    tail=("norm_final", "norm_out", "proj_out"),
    transport="stream",
    note="nothing but the stream between blocks",
)

ACE_STEP = NativeModel(
    class_name="ACEStepTransformer2DModel",
    module="comfy.ldm.ace.model",
    block_lists=("transformer_blocks",),
    tail=("final_layer",),
    transport="stream",
    note="ACE-Step 1; the lyric encoder's own layers stay at home",
)

NATIVE_MODELS: tuple[NativeModel, ...] = (
    FLUX,
    CHROMA,
    CHROMA_RADIANCE,
    WAN_MODEL,
    WAN_CAMERA,
    WAN_VACE,
    WAN_S2V,
    WAN_HUMO,
    WAN_ANIMATE,
    WAN_SCAIL,
    WAN_SCAIL_2,
    WAN_DANCER,
    WAN_ANIMATE_2,
    WAN_CAUSAL,
    QWEN_IMAGE,
    HUNYUAN_VIDEO,
    LTXV,
    LTXAV,
    NEXT_DIT,
    NEXT_DIT_PIXEL,
    SD3,
    MMDIT,
    UNET,
    COSMOS_PREDICT_2,
    ANIMA,
    COSMOS_1,
    HIDREAM,
    AURA_FLOW,
    PIXART,
    MOCHI,
    OMNIGEN_2,
    KANDINSKY_5,
    BOOGU,
    MAGE_FLOW,
    LENS,
    JOY_IMAGE,
    KREA_2,
    ERNIE_IMAGE,
    IDEOGRAM_4,
    COG_VIDEO_X,
    ACE_STEP,
)

_BY_CLASS = {(row.module, row.class_name): row for row in NATIVE_MODELS}
_METHODS = (types.FunctionType, staticmethod, classmethod, property)


def find_native(model_class: type) -> NativeModel | None:
    """The row of this class or of the nearest class it is derived from; None if there is none.

    A derived class that replaces any method of the described one may do anything between two blocks, so its row is the
    described one with relay transport. New methods and a new __init__ change nothing between blocks.
    """
    for depth, base in enumerate(model_class.__mro__):
        row = _BY_CLASS.get((base.__module__, base.__name__))
        if row is not None:
            replaced = _replaced_methods(model_class.__mro__[:depth], base)
            return _as_relay(row, model_class, replaced) if replaced else row
    return None


def _replaced_methods(derived: tuple[type, ...], base: type) -> list[str]:
    """Names of base's own behaviour that one of the derived classes defines anew."""
    return sorted(
        {
            name
            for cls in derived
            for name, value in vars(cls).items()
            if isinstance(value, _METHODS) and _is_behaviour(name) and _is_described(name, base)
        }
    )


def _is_behaviour(name: str) -> bool:
    return name == "__call__" or not (name.startswith("__") and name.endswith("__"))


def _is_described(name: str, base: type) -> bool:
    """Whether base has this method from code of the model; what it has from torch is loading and moving of weights."""
    owner = next((cls for cls in base.__mro__ if name in vars(cls)), None)
    return owner is not None and (not owner.__module__.startswith("torch.") or name in {"forward", "__call__"})


def _as_relay(row: NativeModel, model_class: type, replaced: list[str]) -> NativeModel:
    return dataclasses.replace(
        row,
        class_name=model_class.__name__,
        module=model_class.__module__,
        transport="relay",
        can_overlap=False,
        is_derived=True,
        note=f"derived from {row.class_name} with a {', '.join(replaced)} of its own",
    )
