"""Tiny builds of ComfyUI's model classes with the awkward options on, for native_forwards.py.

Imports nothing of ComfyUI until a case is built. Shapes: batch 2 unless the class wants 1, images 6x8 or 4x6 cells,
videos 3 frames. Parts that are large by construction and have nothing to do with blocks are replaced by stand-ins.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# fmt: off


Inputs = dict[str, Any]
# By these names classes call patches between blocks; any other runs in one.
PATCHES_BETWEEN = ("double_block", "single_block", "input_block_patch", "input_block_patch_after_skip",
                   "middle_block_after_patch", "output_block_patch")


def _leave(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """One build of a native class.

    Args:
        name: of the case. module, class_name, config: of the class, and its keyword arguments.
        given: the arguments of one forward, the latents first; tuples are shapes of what is drawn.
        adjust: called on the fresh model before its parameters are filled.
        cards: how many emulated cards it is split over.
        is_exact: whether one emulated card and the CPU agree in bits. False where the front calls an operation that
            chooses its kernel by the kind of device; such a case is compared with the whole model on one card.
        device: what the class is built on; "meta" for a class of one size, which adjust makes small on the CPU.
        num_steps: forwards one after the other, for a class that remembers something from step to step.
        runs_once: whether one forward runs every block once; else what comes after the last comes before the first.
    """

    name: str
    module: str
    class_name: str
    config: Mapping[str, Any]
    given: Inputs
    adjust: Callable[[nn.Module], None] = _leave
    cards: int = 2
    is_exact: bool = True
    device: str = "cpu"
    num_steps: int = 1
    runs_once: bool = True

    @property
    def model_class(self) -> type[nn.Module]:
        found: type[nn.Module] = getattr(importlib.import_module(self.module), self.class_name)
        return found

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.module.rpartition(".")[0]) is not None

    def inputs(self) -> Inputs:
        """The same at every call."""
        return _drawn(self.given)

    def build(self) -> nn.Module:
        """A new model on the CPU with the same weights every time, in which every layer changes the output; its layers
        are those of ComfyUI that do not cast. Four cards find heads in its blocks, of keys and values too."""
        from devicebridge.tests.comfy.trained_families import small_adapter

        operations = importlib.import_module("comfy.ops").disable_weight_init
        with small_adapter():
            model = self.model_class(**self.config, dtype=torch.float32, device=self.device, operations=operations)
        self.adjust(model)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = noise.ndim > 1
            parameter.data = noise * noise[0].numel() ** -0.5 if is_matrix else 0.2 * noise + name.endswith("weight")
        return model.requires_grad_(False).eval()


def _drawn(value: Any) -> Any:
    if isinstance(value, tuple) and isinstance(value[0], int):
        return rand(*value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_drawn, value))
    if isinstance(value, dict):
        return {name: _drawn(each) for name, each in value.items()}
    return value.clone() if isinstance(value, torch.Tensor) else value


def _case(
    name: str, path: str, given: Inputs, adjust=_leave, cards=2, is_exact=True, device="cpu", num_steps=1, **config: Any
) -> Case:
    module, _, class_name = path.rpartition(".")
    return Case(name, module, class_name, config, given, adjust, cards, is_exact, device, num_steps)


class _StandIn(nn.Module):
    """In the place of a part whose size is fixed; call: what its layer makes of what the part is given."""

    def __init__(self, layer: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self._call = layer, call

    def forward(self, *given: Any, **options: Any) -> Any:
        return self._call(self.layer, *given)


def rand(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def padded(*shape: int) -> torch.Tensor:
    """An integer mask whose last two tokens are padding."""
    mask = torch.ones(shape, dtype=torch.long)
    mask[..., -2:] = 0
    return mask


def steps(scale: float = 1.0) -> torch.Tensor:
    return torch.tensor([0.3, 0.7]) * scale


# ---------------------------------------------------------------------------------------------------------------- FLUX
_FLUX = dict(
    in_channels=4, out_channels=4, hidden_size=32, num_heads=4, depth=2, depth_single_blocks=3, axes_dim=[2, 2, 4],
    theta=100, patch_size=2, qkv_bias=True, mlp_ratio=2.0, context_in_dim=12, txt_ids_dims=[],
)

# Its mask is of 5 text, 12 image and 6 reference tokens.
FLUX_1 = _case(
    "flux1", "comfy.ldm.flux.model.Flux",
    dict(x=(2, 4, 6, 8), timestep=steps(), context=(2, 5, 12), y=(2, 10), guidance=torch.tensor([3.5, 1.0]),
        ref_latents=[(2, 4, 4, 6)], attention_mask=(2, 1, 1, 23),
        control={"input": [(2, 12, 32), rand(2, 12, 32, seed=2)], "output": [None, (2, 12, 32), (2, 12, 32)]}),
    cards=3, **_FLUX, vec_in_dim=10, guidance_embed=True,
)

# Without guidance: references at timestep zero double the batch of all else.
FLUX_2 = _case(
    "flux2", "comfy.ldm.flux.model.Flux",
    dict(x=(2, 4, 6, 8), timestep=steps(), context=(2, 5, 12), ref_latents=[(2, 4, 4, 6)],
        ref_latents_method="index_timestep_zero"),
    cards=3, **_FLUX | dict(axes_dim=[2, 2, 2, 2], txt_ids_dims=[3], qkv_bias=False), vec_in_dim=None,
    guidance_embed=False, global_modulation=True, mlp_silu_act=True, ops_bias=False, txt_norm=True,
    default_ref_method="index",
)

_CHROMA = {**_FLUX, "in_channels": 16, "in_dim": 64, "out_dim": 32, "hidden_dim": 24, "n_layers": 2, "vec_in_dim": None}


def _chroma(channels: int, **more: Any) -> Inputs:
    given = dict(x=(2, channels, 6, 8), timestep=steps(), context=(2, 5, 12), guidance=torch.zeros(2))
    return dict(**given, attention_mask=(2, 1, 1, 17), **more)

CHROMA = _case(
    "chroma", "comfy.ldm.chroma.model.Chroma",
    _chroma(4, control={"input": [(2, 12, 32)], "output": [None, (2, 12, 32)]}),
    **_CHROMA | dict(out_channels=16),
)

CHROMA_RADIANCE = _case(
    "chroma_radiance", "comfy.ldm.chroma_radiance.model.ChromaRadiance", _chroma(3),
    **_CHROMA | dict(in_channels=3, out_channels=3), nerf_hidden_size=8, nerf_mlp_ratio=2, nerf_depth=2,
    nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv", nerf_embedder_dtype=torch.float32, use_x0=True,
    use_sequential_txt_ids=True,
)

# ----------------------------------------------------------------------------------------------------------------- Wan
_WAN = dict(in_dim=4, out_dim=4, dim=48, ffn_dim=64, freq_dim=32, text_dim=12, num_heads=4, num_layers=4)


def _wan(*, height: int = 4, width: int = 6, **more: Any) -> Inputs:
    """x [2, 4, 3, height, width]: 3 frames of patches of 2x2 cells."""
    return dict(x=(2, 4, 3, height, width), timestep=steps(1000.0), context=(2, 5, 12), **more)

WAN = _case(
    "wan", "comfy.ldm.wan.model.WanModel",
    _wan(clip_fea=(2, 3, 1280), reference_latent=(2, 4, 4, 6), context_latents=[(2, 4, 1, 4, 6)]),
    cards=3, **_WAN, model_type="i2v", in_dim_ref_conv=4,
)

WAN_CAMERA = _case(
    "wan_camera", "comfy.ldm.wan.model.CameraWanModel",
    _wan(clip_fea=(2, 3, 1280), camera_conditions=(2, 2, 3, 32, 48)),
    **_WAN, in_dim_control_adapter=2,
)

WAN_VACE = _case(
    "wan_vace", "comfy.ldm.wan.model.VaceWanModel", _wan(vace_context=(2, 2, 6, 3, 4, 6), vace_strength=[1.0, 0.5]),
    **_WAN, vace_layers=2, vace_in_dim=6,
)

WAN_VACE_TO_THE_END = _case(
    "wan_vace_to_the_end", "comfy.ldm.wan.model.VaceWanModel",
    _wan(vace_context=(2, 1, 6, 3, 4, 6), vace_strength=[0.5]),
    **_WAN, vace_layers=4, vace_in_dim=6,
)

WAN_S2V = _case(
    "wan_s2v", "comfy.ldm.wan.model.WanModel_S2V",
    _wan(height=8, width=8, audio_embed=(2, 25, 8, 12), reference_latent=(2, 4, 1, 8, 8),
        control_video=(2, 16, 3, 8, 8), reference_motion=(2, 16, 19, 8, 8)),
    **_WAN, audio_dim=8, audio_inject_layers=[0, 2],
)


WAN_HUMO = _case(
    "wan_humo", "comfy.ldm.wan.model.HumoWanModel",
    _wan(audio_embed=(2, 3, 2, 1, 4), reference_latent=(2, 4, 1, 4, 6)), **_WAN,
)

WAN_ANIMATE = _case(
    "wan_animate", "comfy.ldm.wan.model_animate.AnimateWanModel",
    _wan(clip_fea=(2, 3, 1280), pose_latents=(2, 16, 2, 4, 6), face_pixel_values=(2, 3, 8, 4, 4)),
    **_WAN | dict(num_layers=10),
)

_SCAIL = {name: value for name, value in _WAN.items() if name not in {"in_dim", "dim"}}

WAN_SCAIL = _case(
    "wan_scail", "comfy.ldm.wan.model.SCAILWanModel",
    _wan(clip_fea=(2, 3, 1280), pose_latents=(2, 4, 3, 2, 4), reference_latent=(2, 4, 1, 4, 6)),
    **_SCAIL, in_dim=4, dim=48,
)

WAN_SCAIL_2 = _case(
    "wan_scail2", "comfy.ldm.wan.model.SCAIL2WanModel",
    _wan(clip_fea=(2, 3, 1280), pose_latents=(2, 4, 3, 2, 4), reference_latent=(2, 4, 1, 4, 6),
        ref_mask_latents=(2, 5, 4, 4, 6), sam_latents=(2, 5, 3, 2, 4), ref_mask_flag=False),
    **_SCAIL, in_dim=4, mask_in_dim=5, dim=48,
)


def _with_small_images(model: nn.Module) -> None:
    model.img_emb, model.img_emb_refimage = nn.Linear(1280, 48), nn.Linear(1280, 48)

WAN_DANCER = _case(
    "wan_dancer", "comfy.ldm.wan.model_wandancer.WanDancerModel",
    _wan(height=4, width=8, clip_fea=(2, 3, 1280), clip_fea_ref=(2, 2, 1280), audio_embed=(2, 6, 35), fps=25),
    adjust=_with_small_images, is_exact=False, **_WAN, audio_inject_layers=[0, 2], music_dim=32, music_latent_dim=32,
)

# -------------------------------------------------------------------------------------------------------- other images
QWEN = _case(
    "qwen_image", "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
    dict(x=(2, 4, 1, 6, 8), timestep=steps(), context=(2, 5, 12), attention_mask=padded(2, 5),
        ref_latents=[(2, 4, 1, 4, 6)], ref_latents_method="index_timestep_zero",
        control={"input": [(2, 12, 32), None, (2, 12, 32), rand(2, 12, 32, seed=3)]}),
    in_channels=16, out_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=12,
    axes_dims_rope=(4, 2, 2),
)

_NEXT_DIT = dict(
    in_channels=4, dim=96, n_layers=4, n_refiner_layers=2, n_heads=8, n_kv_heads=4, multiple_of=8, qk_norm=True,
    cap_feat_dim=12, axes_dims=(4, 4, 4),
)

LUMINA = _case(
    "lumina2", "comfy.ldm.lumina.model.NextDiT",
    dict(x=(2, 4, 6, 8), timesteps=steps(), context=(2, 5, 12), num_tokens=5),
    **_NEXT_DIT,
)

# Its modulation wants a width of 256 at least.
Z_IMAGE = _case(
    "z_image", "comfy.ldm.lumina.model.NextDiT",
    dict(x=(1, 4, 6, 8), timesteps=steps()[:1], context=(1, 5, 12), num_tokens=5, ref_latents=[(1, 4, 4, 6)],
        ref_contexts=[(1, 3, 12), (1, 2, 12)], siglip_feats=[(1, 2, 2, 6)]),
    **_NEXT_DIT | dict(dim=256, axes_dims=(8, 12, 12), n_kv_heads=8), z_image_modulation=True, pad_tokens_multiple=4,
    siglip_feat_dim=6,
)

PIXEL_NEXT_DIT = _case(
    "next_dit_pixel", "comfy.ldm.lumina.model.NextDiTPixelSpace",
    dict(x=(2, 4, 6, 8), timesteps=steps(), context=(2, 5, 12), num_tokens=5),
    **_NEXT_DIT, patch_size=2, decoder_hidden_size=16, decoder_num_res_blocks=2,
)


def _with_positions(model: nn.Module) -> None:
    model.pos_embed = rand(*model.pos_embed.shape)

SD3 = _case(
    "sd3", "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
    dict(x=(2, 4, 6, 8), timesteps=steps(1000.0), context=(2, 5, 16), y=(2, 10),
        control={"output": [(2, 12, 256), None, (2, 12, 256), rand(2, 12, 256, seed=3)]}),
    adjust=_with_positions, input_size=None, depth=4, num_blocks=4, adm_in_channels=10,
    context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 16, "out_features": 256}},
    context_size=16, context_processor_layers=1, pos_embed_max_size=8, num_patches=64, qk_norm="rms",
    x_block_self_attn_layers=[0, 1], register_length=1,
)

UNET = _case(
    "unet", "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    dict(x=(2, 4, 8, 8), timesteps=steps(1000.0), context=(2, 5, 12), y=(2, 10),
        control={
            "input": [(2, 64, 4, 4), None, (2, 32, 8, 8), rand(2, 32, 8, 8, seed=2)], "middle": [(2, 64, 4, 4)],
            "output": [(2, 32, 8, 8), (2, 32, 8, 8), (2, 32, 4, 4), (2, 64, 4, 4)],
        }),
    cards=3, image_size=32, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1, 1],
    channel_mult=(1, 2), num_head_channels=16, use_spatial_transformer=True, transformer_depth=[1, 1],
    transformer_depth_output=[1, 1, 1, 1], transformer_depth_middle=1, context_dim=12, num_classes="sequential",
    adm_in_channels=10, use_linear_in_transformer=True, legacy=False,
)

_CASCADE = dict(
    c_in=4, c_out=4, c_r=8, c_cond=16, nhead=[2, 2], blocks=[[1, 1], [1, 1]], c_hidden=[16, 16],
    level_config=["CTA", "CTA"], c_clip_seq=2,
)

CASCADE_C = _case(
    "cascade_c", "comfy.ldm.cascade.stage_c.StageC",
    dict(x=(2, 4, 6, 8), r=steps(), clip_text=(2, 5, 12), clip_text_pooled=(2, 1, 10), clip_img=(2, 1, 6),
        control={"input": [rand(2, 16, 3, 4, seed=seed) for seed in range(4)]}),
    is_exact=False, **_CASCADE, c_clip_text=12, c_clip_text_pooled=10, c_clip_img=6,
)

CASCADE_B = _case(
    "cascade_b", "comfy.ldm.cascade.stage_b.StageB",
    dict(x=(2, 4, 16, 16), r=steps(), effnet=(2, 4, 3, 3), clip=(2, 1, 12)),
    is_exact=False, **_CASCADE | dict(c_hidden=[16, 16, 16], nhead=[-1, 2, 2], blocks=[[1, 1, 1], [1, 1, 1]],
    level_config=["CT", "CTA", "CTA"]), c_clip=12, c_effnet=4, patch_size=2, block_repeat=[[1, 1, 1], [3, 2, 1]],
    dropout=[0.0, 0.0, 0.0],
)

HIDREAM = _case(
    "hidream", "comfy.ldm.hidream.model.HiDreamImageTransformer2DModel",
    dict(x=(2, 4, 6, 8), t=steps(1000.0), y=(2, 10), context=(2, 5, 12), encoder_hidden_states_llama3=(2, 3, 4, 14)),
    patch_size=2, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=8, num_attention_heads=4,
    caption_channels=[12, 14], text_emb_dim=10, num_routed_experts=2, num_activated_experts=1, axes_dims_rope=(4, 2, 2),
    max_resolution=(16, 16), llama_layers=[0, 1, 2, 2],
)

AURA = _case(
    "aura_flow", "comfy.ldm.aura.mmdit.MMDiT", dict(x=(2, 4, 6, 8), timestep=steps(), context=(2, 5, 12)),
    dim=32, n_layers=5, n_double_layers=2, n_heads=4, global_conddim=24, cond_seq_dim=12, max_seq=64,
)

PIXART = _case(
    "pixart", "comfy.ldm.pixart.pixartms.PixArtMS", dict(x=(2, 4, 36, 40), timesteps=steps(1000.0), context=(2, 5, 12)),
    hidden_size=48, depth=4, num_heads=2, caption_channels=12, model_max_length=5,
)

OMNIGEN = _case(
    "omnigen2", "comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel",
    dict(x=(2, 4, 6, 8), timesteps=steps(), context=(2, 5, 12), num_tokens=5, ref_latents=[(2, 4, 4, 6)]),
    in_channels=4, hidden_size=96, num_layers=4, num_refiner_layers=1, num_attention_heads=8, num_kv_heads=4,
    multiple_of=8, axes_dim_rope=(4, 4, 4), text_feat_dim=12,
)

BOOGU = _case(
    "boogu", "comfy.ldm.boogu.model.BooguTransformer2DModel", OMNIGEN.given,
    in_channels=4, hidden_size=96, num_layers=2, num_double_stream_layers=2, num_refiner_layers=1,
    num_attention_heads=8, num_kv_heads=4, multiple_of=8, axes_dim_rope=(4, 4, 4), instruction_feat_dim=12,
)

MAGE_FLOW = _case(
    "mage_flow", "comfy.ldm.mage_flow.model.MageFlowTransformer2DModel",
    dict(x=(2, 4, 3, 4), timestep=steps(), context=(2, 5, 12), attention_mask=padded(2, 5), ref_latents=[(2, 4, 2, 3)],
        control={"input": [(2, 12, 32), None, (2, 12, 32), rand(2, 12, 32, seed=3)]}),
    in_channels=4, out_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=12,
    axes_dims_rope=(4, 2, 2),
)

LENS = _case(
    "lens", "comfy.ldm.lens.model.LensTransformer2DModel",
    dict(x=(2, 16, 3, 4), timestep=steps(), context=(2, 5, 24), attention_mask=padded(2, 5),
        control={"input": [(2, 12, 32), None, (2, 12, 32), rand(2, 12, 32, seed=3)]}),
    in_channels=16, out_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4, enc_hidden_dim=12,
    axes_dims_rope=(4, 2, 2), selected_layer_index=(5, 11),
)

JOY_IMAGE = _case(
    "joyimage", "comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
    dict(hidden_states=(2, 4, 1, 6, 8), timestep=steps(1000.0), context=(2, 5, 12), ref_latents=[(2, 4, 1, 4, 6)]),
    in_channels=4, hidden_size=32, num_attention_heads=4, text_dim=12, num_layers=4, rope_dim_list=[4, 2, 2],
)

KREA_2 = _case(
    "krea2", "comfy.ldm.krea2.model.SingleStreamDiT",
    dict(x=(2, 4, 6, 8), timesteps=steps(), context=(2, 5, 36), ref_latents=[(2, 4, 4, 6)]),
    features=128, tdim=16, txtdim=12, heads=8, kvheads=4, multiplier=2, layers=4, channels=4, txtlayers=3, txtheads=2,
    txtkvheads=2, default_ref_method="index_timestep_zero",
)

ERNIE_IMAGE = _case(
    "ernie_image", "comfy.ldm.ernie.model.ErnieImageModel",
    dict(x=(2, 4, 3, 4), timesteps=steps(1000.0), context=(2, 5, 12)),
    hidden_size=48, num_attention_heads=4, num_layers=4, ffn_hidden_size=64, in_channels=4, out_channels=4,
    text_in_dim=12, rope_axes_dim=(4, 4, 4),
)

IDEOGRAM_4 = _case(
    "ideogram4", "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
    dict(x=(2, 16, 3, 4), timesteps=steps(), context=(2, 5, 12), attention_mask=padded(2, 5)),
    in_channels=16, num_layers=4, num_attention_heads=4, attention_head_dim=16, intermediate_size=64, adaln_dim=16,
    llm_features_dim=12, mrope_section=(4, 2, 2),
)


def _with_small_tower(model: nn.Module) -> None:
    model.visual = _StandIn(nn.Linear(6, 32), lambda layer, pixels, grid: layer(pixels))
    model.language_model.embed_tokens = _StandIn(nn.Embedding(8, 32), lambda layer, ids: layer(ids % 8))


def _hidream_o1(prefix: int) -> Inputs:
    """Four text tokens, of which one stands for a reference and one for time; 2x2 patches and one of a reference."""
    ids = torch.tensor([[5, 151655, 7, 151673]])
    return {
        "x": rand(2, 3, 64, 64), "timesteps": steps(1000.0), "input_ids": ids.expand(2, 4),
        "position_ids": torch.arange(9).expand(1, 3, 9),
        "vinput_mask": torch.tensor([[False] * 4 + [True] * 5]).expand(2, 9), "ar_len": prefix,
        "ref_pixel_values": rand(1, 1, 6), "ref_image_grid_thw": torch.tensor([[[1, 1, 1]]]),
        "ref_patches": rand(2, 1, 3072),
    }


# The second step has the keys and values of the first.
HIDREAM_O1 = _case(
    "hidream_o1", "comfy.ldm.hidream_o1.model.HiDreamO1Transformer", _hidream_o1(prefix=3),
    adjust=_with_small_tower, num_steps=2, is_exact=False,
    text_config_overrides=dict(
        vocab_size=8, hidden_size=32, intermediate_size=600, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, rope_dims=[4, 2, 2],
    ),
    vision_config_overrides=dict(depth=1, hidden_size=32, num_heads=2, intermediate_size=32),
)

HIDREAM_O1_UNCACHED = dataclasses.replace(
    HIDREAM_O1, name="hidream_o1_uncached", given=_hidream_o1(prefix=0), num_steps=1
)

_PIXEL_DIT = dict(
    num_groups=4, hidden_size=32, pixel_hidden_size=8, pixel_attn_hidden_size=32, pixel_num_groups=2, patch_depth=4,
    pixel_depth=2, patch_size=4, txt_embed_dim=12, txt_max_length=6,
)

PIXEL_DIT = _case(
    "pixel_dit", "comfy.ldm.pixeldit.model.PixDiT_T2I",
    dict(x=(2, 3, 11, 16), timesteps=steps(1000.0), context=(2, 5, 12)),
    **_PIXEL_DIT,
)

PID = _case(
    "pid", "comfy.ldm.pixeldit.pid.PidNet",
    dict(x=(2, 3, 12, 16), timesteps=steps(1000.0), context=(2, 5, 12), lq_latent=(2, 4, 3, 4),
        degrade_sigma=torch.tensor([0.4])),
    **_PIXEL_DIT, lq_latent_channels=4, lq_hidden_dim=8, lq_num_res_blocks=1, lq_interval=1, sr_scale=1,
    pit_lq_inject=True,
)

HUNYUAN_DIT = _case(
    "hunyuan_dit", "comfy.ldm.hydit.models.HunYuanDiT",
    dict(x=(2, 4, 6, 8), t=steps(1000.0), context=(2, 4, 12), text_embedding_mask=padded(2, 4),
        encoder_hidden_states_t5=(2, 6, 16), text_embedding_mask_t5=padded(2, 6), image_meta_size=rand(2, 6).abs(),
        control={"output": [rand(2, 12, 32, seed=seed) for seed in range(3)]}),
    is_exact=False, hidden_size=32, depth=8, num_heads=4, text_states_dim=12, text_states_dim_t5=16, text_len=4,
    text_len_t5=6, size_cond=True, use_style_cond=True,
)

HUNYUAN_3D = _case(
    "hunyuan3d_2", "comfy.ldm.hunyuan3d.model.Hunyuan3Dv2",
    dict(x=(2, 4, 7), timestep=steps(), context=(2, 5, 12), guidance=torch.tensor([5.0, 1.0])),
    cards=3, in_channels=4, context_in_dim=12, hidden_size=32, mlp_ratio=2.0, num_heads=4, depth=2,
    depth_single_blocks=3, guidance_embed=True,
)

HUNYUAN_3D_21 = _case(
    "hunyuan3d_2.1", "comfy.ldm.hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain",
    dict(x=(2, 4, 7), t=steps(), context=(2, 5, 12)),
    cards=3, in_channels=4, hidden_size=32, context_dim=12, depth=5, num_heads=2, num_moe_layers=2, num_experts=3,
)

TRIPO_SPLAT = _case(
    "triposplat", "comfy.ldm.triposplat.model.LatentSeqMMFlowModel",
    dict(x=[(2, 7, 4), (2, 1, 5)], t=steps(1000.0), context=(2, 9, 12), ref_latents=[(2, 6, 2, 3)]),
    q_token_length=7, in_channels=4, model_channels=48, cond_channels=12, out_channels=4, num_blocks=4,
    num_refiner_blocks=1, num_head_channels=24, cond2_channels=6,
)

# -------------------------------------------------------------------------------------------------------- other videos
_HUNYUAN = {
    **_FLUX, "patch_size": [1, 2, 2], "vec_in_dim": 10, "guidance_embed": True, "byt5": False, "meanflow": False,
    "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
}
del _HUNYUAN["txt_ids_dims"]

HUNYUAN = _case(
    "hunyuan_video", "comfy.ldm.hunyuan_video.model.HunyuanVideo",
    dict(x=(1, 4, 3, 4, 6), timestep=steps(1000.0)[:1], context=(1, 5, 12), y=(1, 10), guidance=torch.tensor([6.0]),
        attention_mask=padded(1, 5), guiding_frame_index=torch.zeros(1), ref_latent=(1, 4, 1, 4, 6),
        control={"input": [(1, 24, 32), None], "output": [None, (1, 24, 32), rand(1, 24, 32, seed=2)]}),
    **_HUNYUAN,
)


def _with_small_glyphs(model: nn.Module) -> None:
    model.byt5_in = _StandIn(nn.Linear(8, 32), lambda layer, states: layer(states))


HUNYUAN_15 = _case(
    "hunyuan_video_1.5", "comfy.ldm.hunyuan_video.model.HunyuanVideo",
    dict(x=(2, 4, 3, 4, 6), timestep=steps(1000.0), context=(2, 5, 12), txt_byt5=(2, 3, 8), clip_fea=(2, 4, 8),
        transformer_options={"sample_sigmas": torch.tensor([1.0, 0.5, 0.0]), "sigmas": torch.tensor([0.5])}),
    adjust=_with_small_glyphs,
    **_HUNYUAN | dict(vec_in_dim=None, guidance_embed=False, byt5=True, meanflow=True, use_cond_type_embedding=True,
    vision_in_dim=8),
)

_LTX = dict(
    in_channels=4, cross_attention_dim=32, attention_head_dim=8, num_attention_heads=4, caption_channels=12,
    num_layers=4,
)


def _denoise_mask() -> torch.Tensor:
    """The last frame is a guide: its second half is left out. [2, 1, 3, 4, 6]"""
    mask = torch.ones(2, 1, 3, 4, 6)
    mask[:, :, 2, 2:] = -1
    return mask


# A timestep per token.
LTXV = _case(
    "ltxv", "comfy.ldm.lightricks.model.LTXVModel",
    dict(x=(2, 4, 3, 4, 6), timestep=rand(2, 72).abs(), context=(2, 5, 12), attention_mask=padded(2, 5),
        keyframe_idxs=rand(2, 3, 24, 2).abs(), denoise_mask=_denoise_mask(),
        transformer_options={"guide_attention_entries": [{"pre_filter_count": 24, "strength": 0.5}]}),
    **_LTX, cross_attention_adaln=True,
)

LTXAV = _case(
    "ltxav", "comfy.ldm.lightricks.av_model.LTXAVModel",
    dict(x=[(2, 4, 3, 4, 6), (2, 8, 5, 16)], timestep=(steps(), steps()), context=(2, 5, 24),
        attention_mask=padded(2, 5)),
    **_LTX, audio_in_channels=128, audio_cross_attention_dim=16, audio_attention_head_dim=4,
    audio_num_attention_heads=4, connector_attention_head_dim=8, connector_num_attention_heads=2,
    connector_num_layers=1,
)

_COSMOS = dict(
    max_img_h=32, max_img_w=32, max_frames=8, in_channels=4, out_channels=4, patch_spatial=2, patch_temporal=1,
    model_channels=48, num_blocks=4, num_heads=4, crossattn_emb_channels=12, pos_emb_cls="rope3d", use_adaln_lora=True,
    adaln_lora_dim=8, extra_per_block_abs_pos_emb=True,
)


def _cosmos(**more: Any) -> Inputs:
    return dict(x=(2, 4, 3, 4, 6), timesteps=steps(), context=(2, 5, 12), **more)

COSMOS_2 = _case(
    "cosmos_predict2", "comfy.ldm.cosmos.predict2.MiniTrainDIT", _cosmos(fps=torch.tensor([24.0])),
    **_COSMOS,
)


def _with_small_adapter(model: nn.Module) -> None:
    """Its own casts by itself, which emulated cards cannot."""
    model.llm_adapter = _StandIn(nn.Embedding(8, 12), lambda layer, states, ids: layer(ids) + states.mean(1, True))


ANIMA = _case(
    "anima", "comfy.ldm.anima.model.Anima",
    _cosmos(t5xxl_ids=torch.arange(6).reshape(2, 3), t5xxl_weights=(2, 3, 1)),
    adjust=_with_small_adapter, **_COSMOS | dict(extra_per_block_abs_pos_emb=False),
)

COSMOS_1 = _case(
    "cosmos1", "comfy.ldm.cosmos.model.GeneralDIT", _cosmos(fps=torch.tensor([24.0])),
    **_COSMOS, block_x_format="THWBD", extra_per_block_abs_pos_emb_type="learnable", affline_emb_norm=True,
    concat_padding_mask=True,
)

# The class insists on an MLP of 12288.
MOCHI = _case(
    "mochi", "comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
    dict(x=(2, 4, 3, 4, 6), timestep=steps(), context=(2, 5, 16), attention_mask=padded(2, 5), num_tokens=5),
    is_exact=False, hidden_size_x=48, hidden_size_y=24, depth=3, num_heads=4, mlp_ratio_x=256.0, use_t5=True,
    t5_feat_dim=16, t5_token_length=5, learn_sigma=False, qk_norm=True,
)

KANDINSKY = _case(
    "kandinsky5", "comfy.ldm.kandinsky5.model.Kandinsky5",
    dict(x=(2, 4, 3, 4, 6), timestep=steps(1000.0), context=(2, 5, 12), y=(2, 10)),
    in_visual_dim=4, out_visual_dim=4, in_text_dim=12, in_text_dim2=10, time_dim=24, model_dim=96, ff_dim=64,
    visual_embed_dim=16, num_text_blocks=1, num_visual_blocks=4, axes_dims=(8, 8, 8),
)


def _with_rotary(model: nn.Module) -> None:
    model.rope.inv_freq = rand(2).abs()

_MINIMAX = dict(
    hidden_size=32, num_layers=4, token_refiner_num_layers=1, num_attention_heads=4, attention_head_dim=16,
    ffn_hidden_size=48, latents_dim=4, audio_latents_dim=6, text_dim=12, timestep_input_dim=16,
    time_embed_hidden_size=24, time_embed_dim=20, rope_inv_freq_len=2,
)


def _minimax(payload: dict[str, Any], **more: Any) -> Inputs:
    """Two frames of 2x3 patches, three frames of stereo sound; the text tokens are of several kinds."""
    tags = torch.tensor([1, 1, 0, 0, 1])
    return {
        "x": [(1, 4, 2, 4, 5), (1, 6, 2, 3)], "timestep": steps(1000.0)[:1], "context": (1, 5, 12),
        "minimax_payload": {"text_token_tags": tags, "audio_scale": 1.5, "seed": 3, **payload}, **more,
    }


def _minimax_keyframes() -> Inputs:
    """A first frame with sound, and parts of both streams that are kept."""
    frame, sound = rand(1, 4, 1, 4, 6), rand(1, 6, 2, 1)
    mask, audio_mask = torch.ones(1, 1, 2, 4, 5), torch.ones(1, 1, 6)
    mask[..., :2], audio_mask[..., :2] = 0.25, 0.5
    return _minimax(
        {
            "keyframes": [{"resolved_frame_index": 0, "latent": frame, "audio_latent": sound}],
            "cond_video_latents": [frame], "cond_audio_latents": [sound], "visual_cond_noise_aug": 0.9,
        },
        denoise_mask=mask, audio_denoise_mask=audio_mask,
    )


def _minimax_references() -> Inputs:
    """A picture, a sound and a video with its sound as references."""
    picture, video, sounds = rand(1, 4, 1, 4, 4), rand(1, 4, 2, 4, 6), [rand(1, 6, 2, 2), rand(1, 6, 2, 1)]
    refs = [
        {"kind": "image", "latent_h": 4, "latent_w": 4}, {"kind": "audio", "ref_audio_t": 2},
        {"kind": "video_audio", "ref_audio_t": 1, "latent_t": 2, "latent_h": 4, "latent_w": 6},
    ]
    return _minimax({"refs": refs, "cond_video_latents": [picture, video], "cond_audio_latents": sounds})

MINIMAX_H3 = _case(
    "minimax_h3", "comfy.ldm.minimax.model.MiniMaxH3Model", _minimax_keyframes(),
    adjust=_with_rotary, cards=3, **_MINIMAX,
)


def _with_rotary_and_curves(model: nn.Module) -> None:
    _with_rotary(model)
    model.adaln_t_table = rand(*model.adaln_t_table.shape)

MINIMAX_H3_CURVES = dataclasses.replace(
    MINIMAX_H3, name="minimax_h3_curves", config={**_MINIMAX, "adaln_curve_grid": 9}, given=_minimax_references(),
    adjust=_with_rotary_and_curves,
)

_SEEDVR = dict(
    norm_eps=1e-05, num_layers=4, mlp_type="swiglu", vid_dim=48, txt_in_dim=12, heads=4, head_dim=24, mm_layers=2,
    rope_dim=24,
)

SEEDVR_2 = _case(
    "seedvr2", "comfy.ldm.seedvr.model.NaDiT",
    dict(x=(2, 16, 3, 4, 6), timestep=steps(1000.0), context=(2, 5, 12), condition=(2, 17, 3, 4, 6),
        transformer_options={"cond_or_uncond": [0, 1]}),
    **_SEEDVR, vid_out_norm=True,
)

COG_VIDEO_X = _case(
    "cogvideox", "comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
    dict(x=(2, 4, 3, 4, 6), timestep=steps(1000.0), context=(2, 5, 12), ofs=torch.tensor([2.0, 2.0])),
    num_attention_heads=4, attention_head_dim=32, in_channels=4, out_channels=4, time_embed_dim=16, ofs_embed_dim=16,
    text_embed_dim=12, num_layers=4, sample_width=6, sample_height=4, sample_frames=9, max_text_seq_length=5,
    use_rotary_positional_embeddings=True,
)


# --------------------------------------------------------------------------------------------------------------- audio
ACE_STEP = _case(
    "ace_step", "comfy.ldm.ace.model.ACEStepTransformer2DModel",
    dict(x=(2, 8, 16, 6), timestep=steps(), context=(2, 5, 12), speaker_embeds=(2, 6),
        lyric_token_idx=torch.arange(8).reshape(2, 4)),
    num_layers=4, attention_head_dim=16, num_attention_heads=4, max_position=64, speaker_embedding_dim=6,
    text_embedding_dim=12, ssl_latent_dims=[8, 8], lyric_encoder_vocab_size=20, lyric_hidden_size=16,
)


ACE_STEP_15 = _case(
    "ace_step_1.5", "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    dict(x=(2, 4, 11), timestep=steps(), context=(2, 5, 12), lyric_embed=(2, 3, 12), refer_audio=(2, 4, 11),
        is_covers=False),
    in_channels=12, hidden_size=32, text_hidden_dim=12, timbre_hidden_dim=4,
    audio_acoustic_hidden_dim=4, num_dit_layers=4, num_lyric_layers=1, num_timbre_layers=1, num_tokenizer_layers=1,
    num_heads=8, num_kv_heads=4, head_dim=16, intermediate_size=512, sliding_window=2, fsq_dim=32, fsq_levels=[2, 2, 2],
    encoder_hidden_size=32, encoder_intermediate_size=48, encoder_num_heads=8,
)


def _with_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.copy_(rand(*buffer.shape).abs())

_STABLE_AUDIO = dict(io_channels=4, embed_dim=256, cond_token_dim=128, depth=4, num_heads=8)

STABLE_AUDIO = _case(
    "stable_audio", "comfy.ldm.audio.dit.AudioDiffusionTransformer",
    dict(x=(2, 4, 9), timestep=steps(), context=(2, 5, 128), global_embed=(2, 12)),
    adjust=_with_buffers, **_STABLE_AUDIO, global_cond_dim=12,
)

STABLE_AUDIO_3 = _case(
    "stable_audio_3", "comfy.ldm.audio.dit.AudioDiffusionTransformer",
    dict(x=(2, 4, 10), timestep=steps(), context=(2, 5, 16), global_embed=(2, 12), local_add_cond=(2, 5, 5)),
    adjust=_with_buffers, **_STABLE_AUDIO | dict(embed_dim=128, num_heads=4, cond_token_dim=16),
    project_cond_tokens=True, global_cond_dim=12, global_cond_type="adaLN", global_cond_shared_embed=True,
    timestep_features_type="expo", local_add_cond_dim=5, num_memory_tokens=3, patch_size=2, norm_type="rms_norm",
    attn_kwargs={"qk_norm": "rms", "differential": True},
)


def _minimax_music(*, length: int, frames: int) -> Inputs:
    scale = torch.tensor([1.0, 0.5]).reshape(2, 1, 1)
    return dict(x=(2, 128, length), timestep=steps(), context=(2, frames, 8 * 4096), conditioning_scale=scale)


def _with_narrow_music(model: nn.Module) -> None:
    """The class has one size, 2.4 billion parameters: its own blocks, narrow."""
    dit = importlib.import_module("comfy.ldm.minimax_music.dit")
    operations = importlib.import_module("comfy.ops").disable_weight_init
    whole: Any = model.diffusion_transformer
    whole.transformer.layers = nn.ModuleList(
        dit.TransformerBlock(64, 16, 48, torch.float32, "cpu", operations) for _ in range(4)
    )
    whole.transformer.project_in, whole.transformer.project_out = nn.Linear(2304, 64), nn.Linear(64, 128)
    whole.transformer.rotary_pos_emb = dit.RotaryEmbedding(8, torch.float32, "cpu")
    whole.to_timestep_embed = nn.Linear(256, 64)
    whole.preprocess_conv = nn.Conv1d(2304, 2304, 1, groups=256)
    model.latent_conditioners = nn.Conv1d(4096, 2048, 3, padding=1, groups=512)
    _with_buffers(model.to_empty(device="cpu"))

MINIMAX_MUSIC = _case(
    "minimax_music_3", "comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT", _minimax_music(length=9, frames=4),
    adjust=_with_narrow_music, device="meta",
)

MINIMAX_MUSIC_LONG = dataclasses.replace(
    MINIMAX_MUSIC,
    name="minimax_music_3_long",  # two windows
    given=_minimax_music(length=720, frames=210),
    runs_once=False,
)

# Of classes that ComfyUI 0.33.0 lacks. Its prompt's rows are written anew, and the others' after them.
QWEN_IMAGE_21 = _case(
    "qwen_image_2.1", "comfy.ldm.qwen_image21.model.QwenImage21Transformer2DModel",
    dict(x=(2, 4, 4, 6), timestep=steps(), context=(2, 6, 12), ref_latents=[(2, 4, 2, 3)], image_slots=[2],
        transformer_options={"patches_replace": {"dit": {"of no block": None}}}),
    in_channels=4, out_channels=4, num_layers=4, attention_head_dim=16, num_attention_heads=4, context_in_dim=12,
    axes_dims_rope=(4, 6, 6), mlp_ratio=2,
)

NEWER = (QWEN_IMAGE_21,)
CASES = tuple(value for value in list(globals().values()) if isinstance(value, Case) and value not in NEWER)

COUNTED_TOKENS = 192, 5  # of the picture or sound, and of the text


def _counted(case: Case, **given: tuple[int, ...] | None) -> Case:
    """Of which is counted what a forward of batch 2 takes. It has so many tokens of the picture or sound that those of
    the text hardly count where a forecast takes the ones for the others."""
    return dataclasses.replace(case, given={**case.given, **given})


# One of each shape: text tokens in the stream, beside it, and attended to; experts; joined outputs; modules of one kind
# of token and of two; convolutions; heads of keys and values.
COUNTED = (
    _counted(KREA_2, x=(2, 4, 32, 24), ref_latents=None), _counted(LENS, x=(2, 16, 16, 12), control=None),
    _counted(COSMOS_2, x=(2, 4, 3, 16, 16)), _counted(HIDREAM, x=(2, 4, 32, 24)),
    _counted(HUNYUAN_DIT, x=(2, 4, 32, 24), control=None),
    _counted(SEEDVR_2, x=(2, 16, 3, 16, 16), condition=(2, 17, 3, 16, 16)),
    _counted(ACE_STEP, x=(2, 8, 16, 192)), _counted(ACE_STEP_15, x=(2, 4, 384), refer_audio=(2, 4, 384)),
)
