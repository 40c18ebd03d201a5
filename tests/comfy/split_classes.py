"""Which tiny families of tiny_checkpoints.py are split in which way by the cases of split_cases_*.py."""

# fmt: off

FAMILIES = (
    "chroma", "cosmos_predict2", "flux1", "flux2", "hidream", "hunyuan_video", "krea2", "ltxv", "lumina2",
    "minimax_h3", "qwen_image", "sd3", "sdxl", "wan", "wan_i2v", "wan_vace", "z_image",
)
SHARED = (*(name for name in FAMILIES if name != "sdxl"), "hidream_o1")
DIVIDED = (
    "flux1_heads", "flux2_heads", "chroma_heads", "hunyuan_video_heads", "qwen_image", "wan_heads", "wan_i2v_heads",
    "wan_vace_heads", "ltxv", "lumina2", "z_image", "sd3", "krea2_heads", "cosmos_predict2", "hidream", "minimax_h3",
)
EIGHT_BITS = (  # format, family
    *((kind, name) for kind in ("fp8", "scaled_fp8", "int8", "int8_rows") for name in ("flux1_heads", "wan_heads")),
    ("scaled_fp8", "qwen_image"),
)
DERIVED = (
    "flux1_heads", "chroma_heads", "qwen_image", "lumina2", "wan_heads", "ltxv", "hunyuan_video_heads", "sd3",
    "krea2_heads", "cosmos_predict2",
)
# fmt: on

WAYS = ("blocks", "tensor", "tokens")
# One mechanism with every class: a case's name -> its classes, and those of a short run.
EVERY = {
    "family_{}": (FAMILIES, ("flux2", "wan_vace", "sdxl", "z_image", "hidream", "minimax_h3")),
    "tensor_{}": (DIVIDED, ("wan_heads", "z_image")), "tokens_{}": (SHARED, ("flux2", "wan", "hidream_o1")),
    "derived_{}": (DERIVED, ("flux1_heads",)), "replayed_{}": (DIVIDED, ("flux2_heads", "qwen_image")),
    "replayed_tokens_{}": (SHARED, ("flux2", "qwen_image")),
    "tensor_{0[0]}_file_of_{0[1]}": (EIGHT_BITS, (("int8", "flux1_heads"),)), "{}_loras": (WAYS, WAYS),
    "{}_controlnets": (WAYS, WAYS), "{}_context_windows": (WAYS, WAYS), "{}_merges": (WAYS[:2], WAYS[:1]),
}  # fmt: skip
