"""Keys: same inputs, same key; changed inputs, new key."""

import dataclasses
import hashlib
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devicebridge.checkpoints import fingerprint as fingerprint_module
from devicebridge.checkpoints.fingerprint import file_fingerprint, folder_fingerprint, tensors_fingerprint
from devicebridge.data.image import ImageRequest, SoundRequest
from devicebridge.data.samples import Condition
from devicebridge.encoding import key as key_module
from devicebridge.encoding.comfy_sources import ComfyConditions, ComfyLatents, ComfyTexts
from devicebridge.encoding.key import comfy_latent_key, comfy_text_key, content_key, latent_key, text_key
from devicebridge.encoding.sources import FolderTexts, fill
from devicebridge.encoding.store import CacheStore
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import TextEncoderSpec
from PIL import Image
from safetensors.torch import save_file

SPEC = TextEncoderSpec(
    kind="chat_hidden_states", folder="text_encoder", tokenizer_folder="tokenizer", output="states", max_length=512,
    layers=(10, 20, 30), system_prompt="You are", template_options={"add_generation_prompt": False, "other": [1, 2]},
)  # fmt: skip
TEXT = {"encoder_fingerprint": "e", "tokenizer_fingerprint": "t", "dtype": torch.bfloat16}
LATENT = {"family": "example", "normalisation_version": 1, "vae": "v", "dtype": "torch.bfloat16"}
IMAGE = ImageRequest("a.png", (64, 96), (0, 16, 64, 64))
CLIP = dataclasses.replace(IMAGE, frames=(0, 2, 4))

SPEC_CHANGES = {
    "kind": "pooled", "folder": "text_encoder_2", "tokenizer_folder": "tokenizer_2", "output": "pooled",
    "max_length": 256, "layers": (10, 20, 29), "system_prompt": None,
    "template_options": {"add_generation_prompt": True, "other": [1, 2]}, "zero_padding": True,
    "keep_full_precision": ("*.wo",),
}  # fmt: skip
# Of the caption "a cat", made before encoders could be quantized; caches hold entries under such names.
STORED_KEYS = {
    ("flux2-dev", "prompt_embeds"): "6f8906a9eee3eb3f5042ec1ffe83d65d03baefe29586746ae0ed2dafba240a01",
    ("flux2-klein-4b", "prompt_embeds"): "d125ff6760ee69b23eb62f29cdbb53448ec0f8c5c52012f7293e4f452eb79ad2",
    ("flux1-dev", "pooled_prompt_embeds"): "f26ec3fa705836c8d36ee899b70d62988a22302cbe5865b2ec2a98bbcaaca229",
    ("flux1-dev", "prompt_embeds"): "5534bbf6a4e91163b3955ca09851dbe10901beeec587c229d2922dd62d1559df",
    ("wan2.1-t2v-14b", "prompt_embeds"): "f44097e217f31e381fcb2335d2d082d20307ac2eb9d9afbc4b69bccbb12b65c6",
}


def test_every_field_of_the_spec_is_in_the_text_key():
    names = {field.name for field in dataclasses.fields(TextEncoderSpec)}
    assert SPEC_CHANGES.keys() == names
    changed = [SPEC, *(dataclasses.replace(SPEC, **{name: new}) for name, new in SPEC_CHANGES.items())]
    assert len({text_key("a", each, **TEXT, quantize="int8") for each in changed}) == 1 + len(names)
    turned = dataclasses.replace(SPEC, template_options={"other": [1, 2], "add_generation_prompt": False})
    assert text_key("a", turned, **TEXT) == text_key("a", SPEC, **TEXT)
    with pytest.raises(TypeError, match="plain values"):
        text_key("a", dataclasses.replace(SPEC, template_options={"x": object()}), **TEXT)


def test_caches_from_before_there_were_schemes_stay_valid():
    found = {
        (variant.name, spec.output): text_key("a cat", spec, **TEXT)
        for family in FAMILIES.values()
        for variant in family.variants
        for spec in variant.text_encoders
    }
    assert {name: found[name] for name in STORED_KEYS} == STORED_KEYS


def test_the_scheme_and_its_version_are_in_the_text_key_and_only_with_a_scheme(monkeypatch):
    exact = text_key("a", SPEC, **TEXT)
    kept = dataclasses.replace(SPEC, keep_full_precision=("*.wo",))
    keys = {exact, *(text_key("a", SPEC, **TEXT, quantize=scheme) for scheme in ("int8", "fp8"))}
    monkeypatch.setattr(key_module, "ROUNDING_VERSION", 99)
    keys.add(text_key("a", SPEC, **TEXT, quantize="int8"))
    assert len(keys) == 4
    assert text_key("a", SPEC, **TEXT, quantize="none") == text_key("a", kept, **TEXT) == exact


def test_text_fingerprints_type_and_version_are_in_the_text_key(monkeypatch):
    keys = {text_key("a", SPEC, **TEXT), text_key("a ", SPEC, **TEXT), text_key("A", SPEC, **TEXT)}
    for change in ({"encoder_fingerprint": "x"}, {"tokenizer_fingerprint": "x"}, {"dtype": torch.float32}):
        keys.add(text_key("a", SPEC, **{**TEXT, **change}))
    monkeypatch.setattr(key_module, "TEXT_VERSION", 99)
    keys.add(text_key("a", SPEC, **TEXT))
    assert len(keys) == 7


def test_files_types_and_schemes_of_an_encoder_are_in_the_keys_of_its_captions(tmp_path):
    for name in ("text_encoder", "tokenizer"):
        (tmp_path / name).mkdir()
    keys = set()
    for name in ("text_encoder/config.json", "tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"):
        (tmp_path / name).write_text(name)
        for options in ((torch.bfloat16,), (torch.float32,), (torch.float32, "int8")):
            with suppress(ValueError):  # for the tokenizer is not there yet
                keys |= set(FolderTexts(SPEC, tmp_path, "cpu", *options).keys_of(["a cat"]).values())
    assert len(keys) == 2 * 3


def test_everything_about_an_image_is_in_the_latent_key(monkeypatch):
    keys = {latent_key("i", IMAGE, LATENT), latent_key("j", IMAGE, LATENT)}
    for change in ({"resize": (64, 97)}, {"crop": (0, 17, 64, 64)}, {"frames": (0,)}, {"frames": (0, 1)}):
        keys.add(latent_key("i", dataclasses.replace(IMAGE, **change), LATENT))
    keys.add(latent_key("i", dataclasses.replace(IMAGE, frames=(1, 0)), LATENT))
    for field, value in (
        ("family", "other"), ("normalisation_version", 2), ("vae", "x"), ("dtype", "torch.float32"),
        ("condition", "first_frame"),
    ):  # fmt: skip
        keys.add(latent_key("i", IMAGE, {**LATENT, field: value}))
    assert latent_key("i", dataclasses.replace(IMAGE, path="b.png"), LATENT) in keys
    monkeypatch.setattr(key_module, "CLIP_VERSION", 99)
    keys.add(latent_key("i", dataclasses.replace(IMAGE, frames=(0,)), LATENT))
    assert latent_key("i", IMAGE, LATENT) in keys  # clips have no say in an image's key
    monkeypatch.setattr(key_module, "IMAGE_VERSION", 99)
    keys.add(latent_key("i", IMAGE, LATENT))
    assert len(keys) == 14


def test_caches_of_images_and_clips_stay_valid():
    """Names under which caches hold entries."""
    wan = {**LATENT, "family": "wan"}
    assert [
        latent_key("i", IMAGE, {**LATENT, "family": "flux2"}),
        latent_key("i", CLIP, wan),
        latent_key("i", dataclasses.replace(IMAGE, frames=(3,)), {**wan, "condition": "first_frame"}),
        comfy_latent_key("i", dataclasses.replace(IMAGE, frames=(1, 2)), "v"),
        comfy_text_key("a", "b"),
    ] == [
        "9cad649011a9ac8d9ce298c45331af9e9f14bb8bc3511ce885d1572ef5f168a1",
        "b1ba44687929fb0358d806b684d38b8d4ade2e6f63b06c5ca76d50a1c2c7bd02",
        "be3911de04677f241a37f908bc706b766c32c00e6b028e6b20a66b60a3923e42",
        "3de9f6a5fd0a48969ab91c06f860db5a1650a610cd5315d9780d944499e80f78",
        "807bfe6cb5caecc4dbc820a0c6d20bee5222f3f10e79fd4fa22a59b2071937f5",
    ]


def test_what_stock_encoders_make_has_keys_of_its_own(monkeypatch):
    plain = "a cat, 2 < 3 [x] {y} \\n"
    for key in (comfy_text_key, partial(comfy_text_key, what="stock tokens")):
        assert key(plain, "clip") == key(plain, "clip", weighs=True)
        for text in ("a (cat)", "a cat)", "embedding:x"):
            assert key(text, "clip") != key(text, "clip", weighs=True)
    keys = {comfy_text_key(text, clip) for text in "ab" for clip in ("clip", "clip 2")}
    keys |= {comfy_latent_key(image, IMAGE, vae) for image in "ij" for vae in ("vae", "vae 2")}
    monkeypatch.setattr(key_module, "IMAGE_VERSION", 99)
    keys.add(comfy_latent_key("i", IMAGE, "vae"))
    monkeypatch.setattr(key_module, "COMFY_VERSION", 99)
    keys |= {comfy_latent_key("i", IMAGE, "vae"), comfy_text_key("a", "clip")}
    assert len(keys) == 11


@pytest.mark.parametrize("whole_file_bytes", [fingerprint_module._WHOLE_FILE_BYTES, 0], ids=["whole", "sampled"])
def test_weights_in_memory_are_told_by_their_content(monkeypatch, whole_file_bytes):
    monkeypatch.setattr(fingerprint_module, "_WHOLE_FILE_BYTES", whole_file_bytes)
    weights = {
        "one": torch.arange(9000, dtype=torch.float32).view(90, 100), "two": torch.arange(5).to(torch.float8_e4m3fn),
        "none": torch.empty(0), "scalar": torch.tensor(True),
    }  # fmt: skip
    name = tensors_fingerprint(weights)
    assert tensors_fingerprint(dict(reversed(weights.items()))) == name
    turned = {**weights, "one": torch.nn.Parameter(weights["one"].T.contiguous().T)}
    assert tensors_fingerprint(turned) == name, "how it lies in memory does not count"
    names = {name}
    for position in ((0, 0), (45, 0), (89, 99)):  # the start, the middle and the end
        changed = weights["one"].clone()
        changed[position] += 1
        names.add(tensors_fingerprint({**weights, "one": changed}))
    names.add(tensors_fingerprint({**weights, "one": weights["one"].view(100, 90)}))
    names.add(tensors_fingerprint({**weights, "one": weights["one"].view(torch.int32)}))
    names.add(tensors_fingerprint({**weights, "two": (torch.arange(5) + 1).to(torch.float8_e4m3fn)}))
    names.add(tensors_fingerprint({"eins" if key == "one" else key: value for key, value in weights.items()}))
    assert len(names) == 8


def test_content_is_hashed_whole(monkeypatch):
    monkeypatch.setattr(fingerprint_module, "_WHOLE_FILE_BYTES", 0)
    tensor = torch.zeros(100_000)
    keys = {content_key({"a": tensor}), content_key({"b": tensor})}
    for index in range(0, 100_000, 9_999):
        changed = tensor.clone()
        changed[index] = 1
        keys.add(content_key({"a": changed}))
    assert len(keys) == 2 + 11


def test_weights_that_hide_their_bytes_are_refused():
    class Packed(torch.Tensor):
        pass

    for tensor in (torch.ones(2).as_subclass(Packed), torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="layer.weight is a .*whose bytes cannot be hashed"):
            tensors_fingerprint({"layer.weight": tensor})


def _model_folder(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 2}')
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(64, 64, generator=generator) for name in ("one", "two", "three")}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("whole_file_bytes", [fingerprint_module._WHOLE_FILE_BYTES, 0], ids=["whole", "sampled"])
def test_a_folder_is_told_by_its_content(tmp_path, monkeypatch, whole_file_bytes):
    monkeypatch.setattr(fingerprint_module, "_WHOLE_FILE_BYTES", whole_file_bytes)
    folder = _model_folder(tmp_path / "text_encoder")
    before = folder_fingerprint(folder)
    (folder / "README.md").write_text("read me")
    (folder / ".hidden.json").write_text("{}")
    (folder / "onnx").mkdir()
    os.utime(folder / "config.json", (1, 1))
    assert folder_fingerprint(folder) == before
    shutil.move(folder, tmp_path / "elsewhere")
    assert folder_fingerprint(tmp_path / "elsewhere") == before
    (tmp_path / "elsewhere" / "config.json").write_text('{"layers": 3}')
    assert folder_fingerprint(tmp_path / "elsewhere") != before


def test_the_sample_reads_both_ends_and_the_middle_of_each_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint_module, "_WHOLE_FILE_BYTES", 0)
    file = tmp_path / "x.safetensors"
    fingerprints = set()
    for index in (None, 0, 2**14 // 2 + 100, 2**14 - 1):
        values = torch.zeros(2**14)
        if index is not None:
            values[index] = 1
        save_file({"values": values, "other": torch.zeros(3)}, file)
        fingerprints.add(file_fingerprint(file))
    assert len(fingerprints) == 4


def test_folders_without_a_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        folder_fingerprint(tmp_path / "missing")
    with pytest.raises(ValueError, match="neither safetensors nor config"):
        folder_fingerprint(tmp_path)


# Beginnings of names, and of the SHA-256 of the files' bytes, as version 0.1 of November 2026 wrote them.
WRITTEN = {
    "16169bbaff7a3ddac3f8": "bb9be1209c88fdc3", "4dd4cdc6b2af63f4397d": "e56d721f6d8b49c8",
    "7c05f81db0d3fccf2b74": "d927d18dea81bdc5", "8a4004c22108d9934161": "7ba16db24976938d",
    "c7d249a39b29ffc33873": "186ad53da71f0fd3", "da118f32f4019327aae0": "5d3779dfcdc765bf",
    "de84de26a0f61807fa5b": "4b42833cc80c7e7e", "fddd825b006fac831c84": "ecc28249b21afae4",
}  # fmt: skip


class _Encoders:
    takes_clips, sees_with = False, ""

    def __init__(self, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint

    def encode(self, given: Any) -> Any:
        if isinstance(given, str):
            return [[torch.full((1, 2, 3), float(len(given))), {"pooled_output": torch.ones(1, 4)}]]
        return given.movedim(-1, 1)[:, :, ::4, ::4].contiguous()

    def tokens(self, text: str) -> Any:
        return {"l": [[(len(text), 1.0), (2, 1.5)]]}

    def make(self, parts: Any) -> Any:
        return [[torch.ones(1, 2, 3) * len(parts.caption), {"reference_latents": [torch.ones(1, 3, 2, 2)]}]]

    def release(self) -> None:
        pass


def test_entries_have_the_names_and_bytes_that_earlier_versions_wrote(tmp_path: Path) -> None:
    path = str(tmp_path / "a.bmp")
    Image.fromarray(np.arange(12 * 8 * 3, dtype=np.uint8).reshape(12, 8, 3)).save(path)
    clip, vae = _Encoders("comfyui-clip:" + "a" * 64), _Encoders("comfyui-vae:" + "b" * 64)
    store = CacheStore(tmp_path / "cache")

    def fits(*shapes: Any) -> str:
        return ""

    texts, tokens = (ComfyTexts(clip.fingerprint, fits, clip, keeps_all=is_so, of_tokens=is_so) for is_so in (0, 1))
    weighing = ComfyTexts(clip.fingerprint, fits, clip, keeps_all=True, weighs=True)
    fill(["a cat", "a (red:1.3) dog"], texts, store)
    fill(["a (red:1.3) dog"], weighing, store)
    fill(["a cat"], tokens, store)
    other = _Encoders("comfyui-clip:" + "c" * 64)
    fill(["a cat"], ComfyTexts(other.fingerprint, fits, other), store)
    fill([ImageRequest(path, (12, 8), (2, 0, 8, 8))], ComfyLatents(vae.fingerprint, fits, vae), store)
    for way, captions, megapixels in (("reference", ("a cat", ""), 0.5), ("qwen-image-edit", ("a (big) cat",), 1.0)):
        source = ComfyConditions(way, ("enc",), fits, megapixels, _Encoders())
        fill([(caption, Condition(way, (path,), ((12, 8),))) for caption in captions], source, store)
    files = (tmp_path / "cache").glob("??/*.safetensors")
    found = {file.name[:20]: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}
    assert found == WRITTEN


def test_the_sound_of_a_clip_and_its_vae_are_in_the_key(tmp_path: Path) -> None:
    for name in "abv":
        (tmp_path / name).write_text(name)

    def key(name: str, vae: str) -> str:
        sound = SoundRequest(str(tmp_path / name), 0.0, 1.0, 1) if name else None
        request = ImageRequest(str(tmp_path / "v"), (8, 8), (0, 0, 8, 8), (0, 1), sound)
        return ComfyLatents("vae", lambda *shapes: "", audio_fingerprint=vae).keys_of([request])[request]

    assert len({key("a", "x"), key("b", "x"), key("a", "y"), key("v", "x"), key("", "x")}) == 5
    assert key("", "x") == key("", "y")
