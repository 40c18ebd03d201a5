"""What FLUX.1 and FLUX.2 share: double blocks, then single blocks, the names of their parameters, and a shift rule."""

from __future__ import annotations

from collections.abc import Mapping

from .spec import Rename, ShiftRule

DOUBLE, SINGLE = "double_blocks.{}.", "single_blocks.{}."
TO_DOUBLE, TO_SINGLE = "transformer_blocks.{}.", "single_transformer_blocks.{}."

TEXT_MODULES = ("attn.add_?_proj", "attn.to_add_out", "ff_context.*")
DOUBLE_ATTENTION = (  # patterns of LoRA targets
    "transformer_blocks.*.attn.to_[qkv]",
    "transformer_blocks.*.attn.to_out.0",
    "transformer_blocks.*.attn.add_[qkv]_proj",
    "transformer_blocks.*.attn.to_add_out",
)
# How a double block's attention is divided among devices that compute it together.
DIVIDED_ATTENTION = {
    "heads": "attn.to_[qkv] attn.add_[qkv]_proj",
    "back": "attn.to_out.0 attn.to_add_out",
    "width": "attn.inner_dim",
}
# "resolution" is FLUX.1-dev's own scheduler: mu rises linearly with the number of tokens the transformer sees, so that
# the shift is 1.88 at 512x512 and 3.16 at 1024x1024.
SHIFTS: Mapping[str, ShiftRule] = {
    "none": ShiftRule("constant"),
    "resolution": ShiftRule("resolution"),
}


def flux_renames(embed: str, linear_in: str, linear_out: str) -> tuple[Rename, ...]:
    """The rows that both table have. embed: diffusers' name of the module that embeds timestep and guidance. linear_in,
    linear_out: diffusers' names of the linears of a feed-forward."""
    embedders = [
        Rename(f"{original}_in.{layer}", (f"{embed}.{diffusers}_embedder.{linear}",))
        for original, diffusers in (("time", "timestep"), ("guidance", "guidance"))
        for layer, linear in (("in_layer", "linear_1"), ("out_layer", "linear_2"))
    ]
    return (
        Rename("img_in", ("x_embedder",)),
        Rename("txt_in", ("context_embedder",)),
        *embedders,
        *_stream("img", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0"),
        *_stream("txt", ("add_q_proj", "add_k_proj", "add_v_proj"), ("norm_added_q", "norm_added_k"), "to_add_out"),
        *_feed_forward("img", "ff", linear_in, linear_out),
        *_feed_forward("txt", "ff_context", linear_in, linear_out),
        _norm(SINGLE + "norm.query_norm", TO_SINGLE + "attn.norm_q"),
        _norm(SINGLE + "norm.key_norm", TO_SINGLE + "attn.norm_k"),
        Rename("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),  # shift, scale | scale, shift
        Rename("final_layer.linear", ("proj_out",)),
    )


def _stream(stream: str, qkv: tuple[str, ...], norms: tuple[str, str], out: str) -> tuple[Rename, ...]:
    """The attention of one of a double block's two streams."""
    original, diffusers = f"{DOUBLE}{stream}_attn.", TO_DOUBLE + "attn."
    return (
        Rename(original + "qkv", tuple(diffusers + name for name in qkv)),
        _norm(original + "norm.query_norm", diffusers + norms[0]),
        _norm(original + "norm.key_norm", diffusers + norms[1]),
        Rename(original + "proj", (diffusers + out,)),
    )


def _feed_forward(stream: str, diffusers: str, linear_in: str, linear_out: str) -> tuple[Rename, ...]:
    return (
        Rename(f"{DOUBLE}{stream}_mlp.0", (f"{TO_DOUBLE}{diffusers}.{linear_in}",)),
        Rename(f"{DOUBLE}{stream}_mlp.2", (f"{TO_DOUBLE}{diffusers}.{linear_out}",)),
    )


def _norm(original: str, diffusers: str) -> Rename:
    """A query or key norm: `scale` in the makers' files, `weight` in some that ComfyUI saved."""
    return Rename(f"{original}.scale", (f"{diffusers}.weight",), aliases=(f"{original}.weight",))
