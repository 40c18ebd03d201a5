"""Checkpoints in every form users have them, against diffusers' from_pretrained; and whatever else a user may pick."""

import dataclasses
import json
import os
import struct
import weakref

import diffusers
import pytest
import safetensors
import torch
from devicebridge.checkpoints.checkpoint import _say_once, read_checkpoint
from devicebridge.checkpoints.load import load_transformer, make_empty_transformer
from devicebridge.checkpoints.weight_file import WeightReader
from devicebridge.families.registry import FAMILIES, find_family
from devicebridge.tests.toy import TINY, stack_tensors
from devicebridge.tests.weight_files import assert_same_model, cpu, write_raw
from safetensors.torch import save_file

FAMILY_NAMES = sorted(FAMILIES)
VARIANTS = [(family.name, variant.name) for family in FAMILIES.values() for variant in family.variants]


def _config(model):
    return json.dumps({k: v for k, v in model.config.items() if not k.startswith("_")}, sort_keys=True)


def _save_pipeline(folder, name, dtype=torch.float32, **options):
    model = TINY[name].make_model().to(dtype)
    model.save_pretrained(folder / "transformer", **options)
    index = {"_class_name": "Any", "transformer": ["diffusers", type(model).__name__]}
    (folder / "model_index.json").write_text(json.dumps(index))
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_folder_loads_as_from_pretrained_loads_it(name, saved, dtype, tmp_path):
    _save_pipeline(tmp_path, name, saved)
    info = read_checkpoint(tmp_path)
    diffusers_class, kept = type(TINY[name].make_model()), {"torch_dtype": dtype, "local_files_only": True}
    reference = diffusers_class.from_pretrained(tmp_path, subfolder="transformer", **kept)
    model = load_transformer(info, cpu, dtype)
    assert_same_model(model, reference)
    assert _config(model) == _config(reference)
    kept = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    if dtype == torch.bfloat16:
        expected = {"scale_shift_table", "blocks.0.norm2.weight", "condition_embedder.time_embedder.linear_1.weight"}
        assert expected <= kept if name == "wan" else not kept
    inputs = {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in TINY[name].make_inputs().items()
    }
    with torch.no_grad():
        assert torch.equal(model(**inputs, return_dict=False)[0], reference(**inputs, return_dict=False)[0])


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_sharded_folder_from_any_of_its_paths(name, tmp_path):
    expected = _save_pipeline(tmp_path, name, max_shard_size="300KB")
    shards = sorted((tmp_path / "transformer").glob("*-of-*.safetensors"))
    assert len(shards) > 2
    for path in (tmp_path, str(tmp_path / "transformer"), shards[1]):
        info = read_checkpoint(path)
        assert info.pipeline_folder == tmp_path and info.layout == "diffusers" and info.family.name == name
        assert_same_model(load_transformer(info, cpu, torch.float32), expected.requires_grad_(False))
    shards[2].unlink()
    for path in (tmp_path, shards[0]):
        with pytest.raises(ValueError, match=f"lacks 1 of the model's files: {shards[2].name}"):
            read_checkpoint(path)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_single_files_of_both_layouts_with_and_without_prefix(name, layout, prefix, tiny_variants, tmp_path):
    expected = TINY[name].make_model().requires_grad_(False)
    tensors = expected.state_dict()
    if layout == "original":
        tensors = stack_tensors(FAMILIES[name], tensors)
    others = {"vae.decoder.conv_in.weight": torch.zeros(2), "text_encoders.t5.logit_scale": torch.zeros(1)}
    bundled = others if prefix == "model.diffusion_model." else {}
    tensors = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file({**tensors, **bundled}, tmp_path / "model.sft")
    info = read_checkpoint(tmp_path / "model.sft")
    assert (info.layout, info.family.name, info.variant.name) == (layout, name, f"tiny-{name}")
    assert info.pipeline_folder is None
    assert_same_model(load_transformer(info, cpu, torch.float32), expected)


def test_norms_in_comfyuis_spelling_and_shards_under_original_names(tiny_variants, tmp_path):
    expected = TINY["flux1"].make_model().requires_grad_(False)
    tensors = stack_tensors(FAMILIES["flux1"], expected.state_dict())
    tensors = {name.replace("_norm.scale", "_norm.weight"): tensor for name, tensor in tensors.items()}
    names = sorted(tensors)
    for index, part in enumerate((names[::2], names[1::2]), 1):
        save_file({n: tensors[n].contiguous() for n in part}, tmp_path / f"x-0000{index}-of-00002.safetensors")
    for path in (tmp_path / "x-00002-of-00002.safetensors", tmp_path):
        assert_same_model(load_transformer(read_checkpoint(path), cpu, torch.float32), expected)
    (tmp_path / "x-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks 1 of the model's files: x-00001-of-00002.safetensors"):
        read_checkpoint(tmp_path / "x-00002-of-00002.safetensors")


def _write_header(file, shapes, dtype="BF16"):
    entries, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * int(torch.Size(shape).numel())
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    write_raw(file, entries)
    return file.stat().st_size + offset


def _full_shapes(family, config, layout):
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**dict(config))
        tensors = model.state_dict()
        tensors = stack_tensors(family, tensors) if layout == "original" else tensors
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("layout", ["original", "diffusers"])
@pytest.mark.parametrize(("family_name", "variant_name"), VARIANTS)
def test_published_models_are_recognised_by_their_header(family_name, variant_name, layout, tmp_path, monkeypatch):
    family = find_family(family_name)
    variant = family.variant(variant_name)
    file = tmp_path / "model.safetensors"
    size = _write_header(file, _full_shapes(family, variant.transformer_config, layout))
    monkeypatch.setattr(os.path, "getsize", lambda _: size)
    info = read_checkpoint(file)
    twin = variant_name.replace("5b-i2v", "5b")  # one file serves both
    if "a14b" in variant_name:  # experts share their shapes
        twin = "wan2.2-i2v-a14b-high" if "i2v" in variant_name else "wan2.1-t2v-14b"
    assert (info.family, info.layout, info.variant.name) == (family, layout, twin)
    assert read_checkpoint(file, variant=variant_name).variant == variant
    sizes = sum(torch.Size(record.shape).numel() for record in info.tensors.values())
    assert sizes == sum(parameter.numel() for parameter in make_empty_transformer(info).parameters())


def test_one_tensor_at_a_time_goes_to_its_device(tmp_path, monkeypatch):
    _save_pipeline(tmp_path, "flux1")
    events, alive = [], []
    real = WeightReader.get_tensor

    def get_tensor(self, name):
        assert not [reference for reference in alive if reference() is not None]
        tensor = real(self, name)
        alive.append(weakref.ref(tensor))
        events.append(("read", name))
        return tensor

    def device_of(name):
        events.append(("placed", name))
        return torch.device("meta") if name.startswith("single_") else cpu(name)

    monkeypatch.setattr(WeightReader, "get_tensor", get_tensor)
    model = load_transformer(read_checkpoint(tmp_path), device_of, torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    assert [kind for kind, _ in events] == ["read", "placed"] * len(names)
    assert events[::2] == [("read", name) for _, name in events[1::2]]
    assert {p.device.type for n, p in model.named_parameters() if n.startswith("single_")} == {"meta"}
    assert {p.device.type for n, p in model.named_parameters() if not n.startswith("single_")} == {"cpu"}


def test_a_file_replaced_after_loading_changes_nothing(tmp_path):
    expected = _save_pipeline(tmp_path, "wan").requires_grad_(False)
    model = load_transformer(read_checkpoint(tmp_path), cpu, torch.float32)
    file = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4096:] = bytes(4096)
    with open(file, "r+b") as stream:
        stream.write(data)
    assert_same_model(model, expected)


def _write_full_folder(folder, family, config, monkeypatch):
    """A transformer folder of full size, header only."""
    folder.mkdir(parents=True)
    config = {k: list(v) if isinstance(v, tuple) else v for k, v in config.items()}
    (folder / "config.json").write_text(json.dumps({"_class_name": family.transformer_class, **config}))
    size = _write_header(folder / "diffusion_pytorch_model.safetensors", _full_shapes(family, config, "diffusers"))
    monkeypatch.setattr(os.path, "getsize", lambda _: size)


@pytest.mark.parametrize(
    ("name", "variant", "num_others"),
    [
        ("wan2.2_t2v_high_noise_14B", "wan2.2-t2v-a14b-high", 0), ("Wan22-lowNoise", "wan2.2-t2v-a14b-low", 0),
        ("Wan2_1-T2V-14B_fp8", "wan2.1-t2v-14b", 0), ("wan2.2_high_noise_low_noise", "wan2.1-t2v-14b", 2),
        ("Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ", "wan2.2-t2v-a14b-low", 0),
        ("wan22_T2V_HIGH-Q8", "wan2.2-t2v-a14b-high", 0), ("Wan-2.2_14B_lowNoise", "wan2.2-t2v-a14b-low", 0),
        ("Wan2.2-HIGH-LOW_merged", "wan2.1-t2v-14b", 2), ("wan 2.2 t2v from wan2.1", "wan2.1-t2v-14b", 2),
        ("Wan2_1-T2V-LOW_vram", "wan2.1-t2v-14b", 0), ("my_wan_LOW_", "wan2.1-t2v-14b", 2),
    ],
)  # fmt: skip
def test_a_file_is_the_expert_that_its_name_says(name, variant, num_others, tmp_path, monkeypatch):
    file, wan = tmp_path / f"{name}.safetensors", FAMILIES["wan"]
    size = _write_header(file, _full_shapes(wan, wan.variant("wan2.1-t2v-14b").transformer_config, "original"))
    monkeypatch.setattr(os.path, "getsize", lambda _: size)
    info = read_checkpoint(file)
    assert (info.variant.name, len(info.others)) == (variant, num_others)


def _write_pair(folder, variant, monkeypatch, **more):
    """Both experts; returns what their model_index.json has without more."""
    index = {each: ["diffusers", "W"] for each in ("transformer", "transformer_2")}
    for each in index:
        config = FAMILIES["wan"].variant(variant).transformer_config
        _write_full_folder(folder / each, FAMILIES["wan"], config, monkeypatch)
    (folder / "model_index.json").write_text(json.dumps({**index, **more}))
    return index


def test_experts_of_a_pair_are_told_apart_by_boundary_and_folder(tmp_path, monkeypatch, caplog):
    index = _write_pair(tmp_path, "wan2.1-t2v-14b", monkeypatch, boundary_ratio=0.875)
    assert read_checkpoint(tmp_path).variant.name == "wan2.2-t2v-a14b-high"
    low = read_checkpoint(tmp_path, variant="wan2.2-t2v-a14b-low")
    assert {record.file.parent.name for record in low.tensors.values()} == {"transformer_2"}
    assert read_checkpoint(tmp_path / "transformer_2").variant.name == "wan2.2-t2v-a14b-low"
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    _say_once.cache_clear()
    for _ in range(2):
        assert read_checkpoint(tmp_path).variant.name == "wan2.1-t2v-14b"
    said = [record.getMessage() for record in caplog.records if "it could also be" in record.getMessage()]
    assert len([message for message in said if str(tmp_path) in message and "wan2.1-t2v-14b;" in message]) == 1
    assert "wan2.2-t2v-a14b-high, wan2.2-t2v-a14b-low" in said[-1]


def test_image_to_video_is_told_from_text_to_video(tmp_path, monkeypatch):
    _write_pair(tmp_path, "wan2.2-i2v-a14b-low", monkeypatch, boundary_ratio=0.9)
    assert read_checkpoint(tmp_path).variant.name == "wan2.2-i2v-a14b-high"
    assert read_checkpoint(tmp_path / "transformer_2").variant.name == "wan2.2-i2v-a14b-low"
    with pytest.raises(ValueError, match=r"36 channels in, 16 out.* wan2\.2-i2v-a14b-low, not wan2\.2-t2v-a14b-high"):
        read_checkpoint(tmp_path, variant="wan2.2-t2v-a14b-high")


def test_a_folder_of_its_own_size_is_not_taken_for_one_with_other_inputs(tmp_path):
    small = tmp_path / "small"
    TINY["wan"].make_model(in_channels=12).save_pretrained(small)
    assert read_checkpoint(small).pipeline_folder is None  # no model folder around it
    assert read_checkpoint(small).variant.name == "wan2.2-i2v-a14b-high"
    TINY["flux1"].make_model(in_channels=24, out_channels=4).save_pretrained(tmp_path / "fill")
    with pytest.raises(ValueError, match=r"takes a condition .*24 channels in, 4 out.* no FLUX\.1 here does"):
        read_checkpoint(tmp_path / "fill")


@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_image_to_video_that_needs_clip_features_is_refused_with_the_reason(layout, tmp_path):
    wan = FAMILIES["wan"]
    names = {"original": "img_emb.proj.1.weight", "diffusers": "condition_embedder.image_embedder.ff.net.2.weight"}
    tensors = TINY["wan"].make_model().state_dict()
    tensors = stack_tensors(wan, tensors) if layout == "original" else tensors
    save_file({**tensors, names[layout]: torch.zeros(2)}, tmp_path / "i2v.safetensors")
    with pytest.raises(ValueError, match=r"i2v\.safetensors is of Wan, but .*Wan 2\.1.*CLIP's features.*i2v-a14b-low"):
        read_checkpoint(tmp_path / "i2v.safetensors")
    folder = tmp_path / "folder"
    TINY["wan"].make_model(in_channels=12, image_dim=8, added_kv_proj_dim=64).save_pretrained(folder)
    with pytest.raises(ValueError, match="CLIP's features of the first frame"):
        read_checkpoint(folder)


def test_folders_of_their_own_size_are_treated_like_the_variant_they_resemble(tmp_path):
    for name, expected in (("flux2", "flux2-dev"), ("flux1", "flux1-dev"), ("wan", "wan2.1-t2v-14b")):
        _save_pipeline(tmp_path / name, name)
        assert read_checkpoint(tmp_path / name).variant.name == expected
    for name, expected in (("flux2", "flux2-klein-4b"), ("flux1", "flux1-schnell")):
        folder = tmp_path / f"{name}-without"
        TINY[name].make_model(**TINY[name].without_guidance).save_pretrained(folder)
        info = read_checkpoint(folder)
        assert info.variant.name == expected and info.variant.training_guidance is None
    assert read_checkpoint(tmp_path / "flux2", variant="flux2-klein-9b").variant.name == "flux2-klein-9b"


def test_distilled_models_are_warned_of_once(tmp_path, monkeypatch, caplog):
    flux2 = FAMILIES["flux2"]
    klein = flux2.variant("flux2-klein-4b")
    _write_full_folder(tmp_path / "transformer", flux2, klein.transformer_config, monkeypatch)
    for is_distilled, count in ((False, 0), (True, 1), (True, 1)):
        index = {"transformer": ["diffusers", "F"], "is_distilled": is_distilled}
        (tmp_path / "model_index.json").write_text(json.dumps(index))
        if not count:
            _say_once.cache_clear()
        assert read_checkpoint(tmp_path).variant == klein
        assert sum("undoes its distillation" in record.getMessage() for record in caplog.records) == count


def _flux1_file(folder, change):
    family = FAMILIES["flux1"]
    shapes = _full_shapes(family, family.variants[0].transformer_config, "original")
    change(shapes)
    return _write_header(folder / "model.safetensors", shapes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda shapes: shapes.update({"img_in.weight": (3072, 384)}),
            r"Against flux1-dev: 1 mismatched: x_embedder.weight is \[3072, 384\] and should be \[3072, 64\]",
        ),
        (lambda shapes: shapes.pop("img_in.bias"), r"Against flux1-dev: 1 missing: x_embedder.bias"),
        (
            lambda shapes: shapes.update({"img_emb.proj.weight": (4, 4)}),
            r"resembles FLUX.1, but 1 of its 781 tensors have no place there: img_emb.proj.weight",
        ),
    ],
)
def test_models_that_only_resemble_a_supported_one(change, message, tmp_path, monkeypatch):
    size = _flux1_file(tmp_path, change)
    monkeypatch.setattr(os.path, "getsize", lambda _: size)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / "model.safetensors")


def _tensors(*names, dtype=torch.float32):
    return {name: torch.zeros(4, 4, dtype=dtype) for name in names}


LORA_NAMES = [f"diffusion_model.blocks.{i}.self_attn.q.lora_{k}.weight" for i in range(3) for k in "AB"]
FOREIGN = {
    "lora": (_tensors(*LORA_NAMES), r"is a LoRA file: 3 lora_A tensors"),
    "kohya": (_tensors("lora_unet_blocks_0_x.lora_down.weight"), r"is a LoRA file: 1 lora_down tensors"),
    "fp8": (_tensors("double_blocks.0.img_attn.qkv.weight", dtype=torch.float8_e4m3fn), "1 tensors of no known model"),
    "nvfp4": (
        {**_tensors("img_in.weight", dtype=torch.uint8), **_tensors("img_in.weight_scale_2")},
        r"quantized weights of nvfp4 \(1 tensors, e.g. img_in.weight_scale_2\); .*use such a file, or the bf16 file",
    ),
    "packed": (_tensors("img_in.weight", dtype=torch.uint8), r"quantized weights \(1 uint8 \(packed 4-bit\) tensors"),
    "nf4": (
        {"img_in.weight": torch.zeros(4, dtype=torch.uint8), "img_in.weight.quant_map": torch.zeros(16)},
        r"quantized weights of bitsandbytes",
    ),
    "vae": (_tensors("encoder.conv_in.weight", "decoder.conv_in.weight"), r"is a VAE: 2 tensors such as"),
    "flux2 vae": (
        {**_tensors("encoder.conv_in.weight"), "bn.num_batches_tracked": torch.zeros((), dtype=torch.int64)},
        r"is a VAE: 1 tensors such as encoder.conv_in.weight",
    ),
    "wan vae": (_tensors("encoder.conv1.weight", "decoder.middle.0.residual.0.gamma"), r"is a VAE"),
    "t5": (_tensors("encoder.block.0.layer.0.SelfAttention.q.weight", "shared.weight"), r"is a text encoder: 2"),
    "qwen": (_tensors("model.layers.0.self_attn.q_proj.weight"), r"is a text encoder"),
    "clip": (_tensors("text_model.encoder.layers.0.mlp.fc1.weight"), r"is a text encoder"),
    "sdxl": (
        _tensors("model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight"),
        r"is a Stable Diffusion checkpoint \(UNet\): 1 tensors such as input_blocks.0.0.weight",
    ),
    "other": (_tensors("layers.0.attention.qkv.weight"), r"of no known model, such as layers.0.attention.qkv.weight"),
    "empty": ({}, r"holds 0 tensors of no known model"),
}


DAMAGED = {
    "head.safetensors": (lambda: safetensors.torch.save(_tensors("img_in.weight"))[:30], "cut short inside its header"),
    "nothing.safetensors": (lambda: b"", r"\(0 bytes\) is not a safetensors file"),
    "noise.safetensors": (lambda: b"\xff" * 200, "is not a safetensors file"),
    "nojson.safetensors": (lambda: struct.pack("<Q", 9) + b"{{{{{{{{{", "its header is no JSON"),
    "zip.safetensors": (lambda: b"PK\x03\x04" + bytes(99), "is a pickle .saved by torch.save.; pickles are not read"),
    "lfs.safetensors": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    "page.safetensors": (lambda: b"<!DOCTYPE html><html>", "is a web page"),
    "gguf.safetensors": (lambda: b"GGUF" + bytes(99), "is no whole GGUF file: it is of version 0"),
    "model.gguf": (lambda: b"GGUF" + bytes(99), "is no whole GGUF file: it is of version 0"),
    "model.pt": (lambda: b"PK", "is a pickle; pickles are not read, convert it to safetensors"),
    "model.ckpt": (lambda: b"", "is a pickle; pickles are not read"),
}


def _folder_with(files):
    def write(folder):
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())

    return write


def _other_class(folder):
    _folder_with({"config.json": {"_class_name": "QwenImageTransformer2DModel"}})(folder)
    save_file(_tensors("transformer_blocks.0.img_mod.1.weight"), folder / "diffusion_pytorch_model.safetensors")


FOLDERS = {
    "empty": (_folder_with({}), "holds no transformer weights; give a diffusers model folder"),
    "pickle": (_folder_with({"diffusion_pytorch_model.bin": b""}), "diffusion_pytorch_model.bin, which is not read"),
    "several": (
        lambda folder: [save_file(_tensors("x"), folder / f"{name}.safetensors") for name in "ab"],
        "holds 2 models: a.safetensors, b.safetensors; name one of them"),
    "no transformer": (_folder_with({"model_index.json": {}, "unet/config.json": {}}), "no transformer folder; it has"),
    "quantized": (
        _folder_with({"config.json": {"quantization_config": {"quant_method": "bitsandbytes"}}}),
        r"is quantized \(bitsandbytes\)",
    ),
    "broken config": (_folder_with({"config.json": b"{"}), "config.json is no JSON"),
    "other class": (_other_class, r"of no known model.*config.json says QwenImageTransformer2DModel"),
}  # fmt: skip


def _file_of(name, content):
    if isinstance(content, dict):
        return lambda folder: save_file(content, folder / name)
    return lambda folder: (folder / name).write_bytes(content())


OTHERS = {
    **{kind: (_file_of("a.safetensors", tensors), "a.safetensors", said) for kind, (tensors, said) in FOREIGN.items()},
    **{name: (_file_of(name, content), name, said) for name, (content, said) in DAMAGED.items()},
    **{kind: (write, ".", said) for kind, (write, said) in FOLDERS.items()},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_files_and_folders_are_refused_by_what_they_are(kind, tmp_path):
    write, name, message = OTHERS[kind]
    write(tmp_path)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / name)


def test_wrong_names_families_and_variants(tmp_path, monkeypatch):
    folder, file = tmp_path / "folder", tmp_path / "model.safetensors"
    _save_pipeline(folder, "flux1")
    size = _flux1_file(tmp_path, lambda shapes: None)
    real = os.path.getsize
    monkeypatch.setattr(os.path, "getsize", lambda path: size if path == str(file) else real(path))
    for path, options, message in (
        (tmp_path / "nowhere", {}, "does not exist; give a model folder"),
        (folder, {"family": "flux3"}, "no family 'flux3'"),
        (folder, {"variant": "flux2-large"}, "no variant 'flux2-large'; the variants are flux2-dev, flux2-klein-4b"),
        (folder, {"family": "wan"}, "holds a FluxTransformer2DModel, not a model of Wan"),
        (folder, {"variant": "flux2-dev"}, "was given as flux2-dev, but it is FLUX.1"),
        (folder, {"variant": "wan2.2-t2v-a14b-low"}, "has no transformer_2 folder; it has"),
        (file, {"variant": "flux1-schnell"}, "was given as flux1-schnell, but it is flux1-dev"),
        (file, {"family": "wan"}, "of no known model|resembles"),
    ):
        with pytest.raises(ValueError, match=message):
            read_checkpoint(path, **options)


def test_a_folder_whose_weights_do_not_fit_its_config(tmp_path):
    _save_pipeline(tmp_path, "wan")
    config = tmp_path / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_layers": 5, "ffn_dim": 100}))
    with pytest.raises(ValueError, match=r"do not fit its config.json: \d+ missing: blocks.4.*mismatched.*\[96, 64\]"):
        read_checkpoint(tmp_path)


def test_loading_checks_again(tmp_path):
    _save_pipeline(tmp_path, "wan")
    info = read_checkpoint(tmp_path)
    tensors = {name: record for name, record in info.tensors.items() if name != "proj_out.bias"}
    with pytest.raises(ValueError, match="does not fit Wan: 1 missing: proj_out.bias"):
        load_transformer(dataclasses.replace(info, tensors=tensors), cpu, torch.float32)
