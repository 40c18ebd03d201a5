"""VAEs from folders and from single files in their makers' layout, against the model they were saved from."""

import errno
import json
import re

import diffusers
import pytest
import torch
import transformers
from devicebridge.encoding.text_encoder import _load_tokenizer
from devicebridge.encoding.vae import check_vae, find_vae, load_vae, vae_fingerprint
from devicebridge.tests.encoding import example_family
from safetensors.torch import save_file

KL_CONFIG = {
    "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
    "block_out_channels": [8, 16], "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4, "sample_size": 32,
}  # fmt: skip
FLUX1_CONFIG = {**KL_CONFIG, "use_quant_conv": False, "use_post_quant_conv": False}
# The Wan conversion knows the published depth only: four levels, two residual blocks each.
WAN_CONFIG = {"base_dim": 4, "z_dim": 4, "num_res_blocks": 2}
CASES = {
    "flux1": ("AutoencoderKL", FLUX1_CONFIG), "flux2": ("AutoencoderKLFlux2", KL_CONFIG),
    "wan": ("AutoencoderKLWan", WAN_CONFIG),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=CASES)
def case(request):
    vae_class, config = CASES[request.param]
    torch.manual_seed(0)
    vae = getattr(diffusers, vae_class)(**config).eval()
    for name, buffer in vae.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 2)
    return request.param, example_family(vae_class, config), vae


def _original_names(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(({"wan": _wan_name}.get(name, _ldm_name))(key, tensor) for key, tensor in tensors.items())


def _ldm_name(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Written from the reference layout (encoder.down.i.block.j, decoder.up counted backwards), not from our table."""
    if ".attentions." in key and "group_norm" not in key and key.endswith("weight"):
        tensor = tensor[:, :, None, None].contiguous()
    if found := re.match(r"(encoder\.down|decoder\.up)_blocks\.(\d)\.(.*)", key):
        level = int(found[2]) if found[1] == "encoder.down" else 1 - int(found[2])
        rest = found[3].replace("resnets.", "block.").replace("samplers.0.", "sample.")
        key = f"{found[1]}.{level}.{rest}"
    for new, old in (
        ("mid_block.resnets.0", "mid.block_1"), ("mid_block.resnets.1", "mid.block_2"),
        ("mid_block.attentions.0.group_norm", "mid.attn_1.norm"),
        ("mid_block.attentions.0.to_out.0", "mid.attn_1.proj_out"), ("mid_block.attentions.0.to_", "mid.attn_1."),
        ("conv_norm_out", "norm_out"), ("conv_shortcut", "nin_shortcut"),
    ):  # fmt: skip
        key = key.replace(new, old)
    key = re.sub(r"^quant_conv", "encoder.quant_conv", key)
    return re.sub(r"^post_quant_conv", "decoder.post_quant_conv", key), tensor


_WAN_CONVOLUTIONS = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6"}


def _wan_name(key: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The reference layout: one flat list of blocks per side, three residual blocks and an upsampler per level."""
    if found := re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.*)", key):
        place = 4 * int(found[1]) + (int(found[3]) if found[2] == "resnets" else 3)
        key = f"decoder.upsamples.{place}.{found[4]}"
    key = key.replace("encoder.down_blocks.", "encoder.downsamples.")
    for new, old in (("resnets.0", "0"), ("attentions.0", "1"), ("resnets.1", "2")):
        key = key.replace(f"mid_block.{new}", f"middle.{old}")
    if not re.search(r"\.(resample|time_conv)\.", key):
        for new, old in _WAN_CONVOLUTIONS.items():
            key = key.replace(f".{new}.", f".{old}.")
    key = key.replace("conv_shortcut", "shortcut").replace("norm_out", "head.0").replace("conv_out", "head.2")
    key = key.replace(".conv_in.", ".conv1.")
    key = re.sub(r"^quant_conv", "conv1", key)
    return re.sub(r"^post_quant_conv", "conv2", key), tensor


def _assert_same_weights(loaded, vae, dtype=torch.float32):
    ours, theirs, parameters = loaded.state_dict(), vae.state_dict(), dict(vae.named_parameters())
    assert ours.keys() == theirs.keys()
    for name in theirs:
        expected = theirs[name].to(dtype) if name in parameters else theirs[name]
        assert ours[name].dtype == expected.dtype and torch.equal(ours[name], expected), name
    assert loaded.dtype == dtype
    assert not loaded.training and not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folders_load(tmp_path, case, dtype):
    _, family, vae = case
    vae.save_pretrained(tmp_path / "pipeline" / "vae")
    for path in (tmp_path / "pipeline" / "vae", str(tmp_path / "pipeline")):
        _assert_same_weights(load_vae(family, None, path, dtype), vae, dtype)


@pytest.mark.parametrize("layout", ["original", "diffusers", "vae.", "first_stage_model."])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_files_load_in_both_layouts(tmp_path, case, layout, dtype):
    """And with a prefix in the file of a whole model, as in ComfyUI's flux1-dev-fp8.safetensors."""
    name, family, vae = case
    is_whole, tensors = layout.endswith("."), _original_names(name, vae.state_dict())
    assert not tensors.keys() <= vae.state_dict().keys()
    if layout == "diffusers" or (is_whole and name == "wan"):
        tensors = vae.state_dict()
    if is_whole:
        tensors = {**{f"{layout}{key}": each for key, each in tensors.items()}, "model.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "vae.safetensors")
    check_vae(family, None, tmp_path / "vae.safetensors", vae.config.get("latent_channels") or vae.config["z_dim"])
    loaded = load_vae(family, family.variants[0], tmp_path / "vae.safetensors", dtype)
    _assert_same_weights(loaded, vae, dtype)
    pixels = torch.randn(1, 3, 16, 16, dtype=dtype) if name != "wan" else torch.randn(1, 3, 1, 16, 16, dtype=dtype)
    with torch.no_grad():
        expected = vae.to(dtype).encode(pixels).latent_dist.mode()
        assert torch.equal(loaded.encode(pixels).latent_dist.mode(), expected)


def test_incomplete_and_foreign_single_files_are_refused(tmp_path, case):
    name, family, vae = case
    tensors = _original_names(name, vae.state_dict())
    dropped = next(key for key in tensors if key.endswith(("residual.2.weight", "conv1.weight")))
    kept = {key: tensor for key, tensor in tensors.items() if key != dropped}
    longer = {**tensors, dropped: torch.cat([tensors[dropped], tensors[dropped]])}
    for broken in (kept, longer, {"blocks.0.weight": torch.zeros(2, 2)}):
        save_file(broken, tmp_path / "broken.safetensors")
        with pytest.raises(ValueError, match=r"broken\.safetensors (lacks|cannot be read as)\b.*published with"):
            load_vae(family, None, tmp_path / "broken.safetensors", torch.float32)


def test_the_vae_of_another_family_is_refused(tmp_path):
    for name, (vae_class, config) in CASES.items():
        vae = getattr(diffusers, vae_class)(**config)
        save_file(_original_names(name, vae.state_dict()), tmp_path / f"{name}.safetensors")
    for name, (vae_class, config) in CASES.items():
        for other in CASES.keys() - {name}:
            with pytest.raises(ValueError, match=f"{other}.safetensors"):
                load_vae(example_family(vae_class, config), None, tmp_path / f"{other}.safetensors", torch.float32)


def test_paths_without_a_vae_are_refused(tmp_path):
    vae = diffusers.AutoencoderKL(**FLUX1_CONFIG)
    vae.save_pretrained(tmp_path / "vae")
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    for path in (tmp_path, tmp_path / "missing", tmp_path / "vae" / "config.json"):
        with pytest.raises(ValueError, match="is no VAE; give a diffusers VAE folder"):
            find_vae(path)


def test_the_fingerprint_follows_content_and_config_of_a_file_but_not_its_name(tmp_path):
    family = example_family("AutoencoderKL", FLUX1_CONFIG)
    save_file({"a": torch.zeros(3)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(3)}, tmp_path / "two.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "three.safetensors")
    one, two, three = (vae_fingerprint(family, None, tmp_path / f"{n}.safetensors") for n in ("one", "two", "three"))
    assert one == two != three
    other = example_family("AutoencoderKL", {**FLUX1_CONFIG, "norm_num_groups": 2})
    assert vae_fingerprint(other, None, tmp_path / "one.safetensors") != one


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("no memory"), MemoryError("none"), ImportError("LlamaTokenizer requires sentencepiece"),
    OSError(errno.EIO, "disk"), PermissionError(errno.EACCES, "locked"),
])  # fmt: skip
def test_what_no_other_files_would_mend_is_raised_as_it_is(error, tmp_path, monkeypatch):
    family = example_family("AutoencoderKL", KL_CONFIG)
    diffusers.AutoencoderKL(**KL_CONFIG).save_pretrained(tmp_path)

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(diffusers.AutoencoderKL, "from_pretrained", fail)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    for load in (lambda: load_vae(family, None, tmp_path, torch.float32), lambda: _load_tokenizer(tmp_path)):
        with pytest.raises(type(error)) as caught:
            load()
        assert caught.value is error
