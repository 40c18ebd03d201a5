"""What `check` finds about encoders, configs and folders, before hours of captions are encoded."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from devicebridge.checkpoints.model_class import refuse_absurd_sizes, refuse_other_kinds
from devicebridge.config.job import JobConfig
from devicebridge.encoding.text_encoder import load_text_encoder
from devicebridge.families.registry import FAMILIES, find_variant
from devicebridge.jobs.checks import check_places
from devicebridge.jobs.job import check_job
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.toy import TINY
from devicebridge.tests.toy_encoders import save_tiny_text_encoder
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("one_thread")

Spoil = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: tmp_path_factory.mktemp(name) for name in TINY}
    for name, folder in folders.items():
        make_tiny_job(folder, name)
    return folders


def _copy(made: dict[str, Path], name: str, tmp_path: Path, **sections: Any) -> JobConfig:
    shutil.copytree(made[name], tmp_path / name)
    return make_tiny_job(tmp_path / name, name, **sections)


def _config(part: str, **changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        file = folder / "model" / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def _weights(part: str, change: Callable[[Tensors], Tensors]) -> Spoil:
    def spoil(folder: Path) -> None:
        (path,) = (folder / "model" / part).glob("*.safetensors")
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return spoil


def _cut_short(part: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (path,) = (folder / "model" / part).glob("*.safetensors")
        path.write_bytes(path.read_bytes()[:-100])

    return spoil


def _of_shape(part: str, name: str, *shape: int) -> Spoil:
    def change(tensors: Tensors) -> Tensors:
        unread = ("vision", "language_model.norm")
        one = next(key for key in sorted(tensors) if name in key and not any(each in key for each in unread))
        return {**tensors, one: torch.ones(shape)}

    return _weights(part, change)


def _as_pipe(folder: Path) -> None:
    (folder / "data" / "image_1.txt").unlink()
    os.mkfifo(folder / "data" / "image_1.txt") if hasattr(os, "mkfifo") else pytest.skip("there are no pipes")


def _zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(each) for name, each in tensors.items()}


_ABSURD = r"config\.json says {} = \d+, and no model has more than"
_NO_MODEL = r"transformer(/config\.json(: num_attention_heads is| gives values that)| do not fit its config\.json)"
_KIND = r"config\.json: {}; use the config.json publ"
_SHAPE = r"model\.safetensors do(es)? not fit .*config\.json: .*{} is \[{}\] and should be"
# Of tiny FLUX.2, or of the family in the name.
REFUSED: dict[str, tuple[Spoil, str]] = {
    "a short encoder": (_cut_short("text_encoder"), r"model\.safetensors is cut short.*download it again"),
    "a short VAE": (_cut_short("vae"), r"vae/.*\.safetensors is cut short.*download it again"),
    "axes": (_config("transformer", axes_dims_rope=[10**9]), _ABSURD.format("axes_dims_rope")),
    "vocabulary": (_config("text_encoder", vocab_size=10**15), _ABSURD.format("vocab_size")),
    "many heads": (_config("transformer", num_attention_heads="many"), _NO_MODEL),
    "negative heads": (_config("transformer", num_attention_heads=-3), _NO_MODEL),
    "axes in words": (_config("transformer", axes_dims_rope="x"), _KIND.format(".*a text in JSON, not.*")),
    "no channels": (_config("vae", block_out_channels=None), _KIND.format(".* is null in JSON, not a list")),
    "a norm": (_of_shape("text_encoder", "norm", 1), _SHAPE.format(".*norm.*", "1")),  # spread over all
    "words": (_of_shape("text_encoder", "embed_tokens", 9, 16), _SHAPE.format("embed_tokens.*", "9, 16")),
    "a norm of wan": (_of_shape("text_encoder", "layer_norm", 1), _SHAPE.format("layer_norm.*", "1")),
    "a flat matrix of the VAE": (
        _weights("vae", lambda given: {**given, "quant_conv.weight": given["quant_conv.weight"].reshape(-1)}),
        r"1 weights in .*vae are of other shapes .*: quant_conv\.weight is \[64\] and should be \[8, 8, 1, 1\]; give",
    ),
    "no VAE": (
        lambda folder: (folder / "model" / "vae" / "diffusion_pytorch_model.safetensors").unlink(),
        "vae has no safetensors file; give the VAE file or folder",
    ),
    "no VAE's config": (
        _config("vae", norm_num_groups=7), r"vae cannot be read as an AutoencoderKLFlux2 \(\w+: .*; give the VAE",
    ),
    "no tokenizer": (lambda folder: shutil.rmtree(folder / "model" / "tokenizer"), "tokenizer is not a folder; give"),
    "an encoder with fewer layers": (
        _weights("text_encoder", lambda given: {name: each for name, each in given.items() if "layers.3" not in name}),
        "text_encoder lacks weights of the .* its config describes",
    ),
    "a transformer of zeros": (_weights("transformer", _zeros), "transformer.* holds nothing but zeros; down"),
    "an encoder of zeros": (_weights("text_encoder", _zeros), "text_encoder.* holds nothing but zeros; down"),
    "a VAE of zeros": (_weights("vae", _zeros), "vae.* holds nothing but zeros; download it again"),
    "a caption that is a pipe": (_as_pipe, r"image_1\.txt: is no ordinary file; give a caption"),
    "a caption of a megabyte": (
        lambda folder: (folder / "data" / "image_1.txt").write_bytes(b"x" * 1_000_001),
        r"image_1\.txt: has 1000001 bytes, too many; give a caption",
    ),
}  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="there are no named pipes in folders")
@pytest.mark.parametrize("what", REFUSED)
def test_files_that_no_run_can_read_are_named(made: dict[str, Path], tmp_path: Path, what: str) -> None:
    (spoil, message), family = REFUSED[what], "wan" if what.endswith("wan") else "flux2"
    job = _copy(made, family, tmp_path)
    spoil(tmp_path / family)
    with pytest.raises(ValueError, match=message):
        check_job(job)


def test_an_encoder_that_was_exchanged_after_the_check_is_refused_as_it_is_loaded(made, tmp_path):
    _copy(made, "wan", tmp_path)
    spoil, message = REFUSED["a norm of wan"]
    spoil(tmp_path / "wan")
    spec = find_variant("wan2.1-t2v-1.3b")[1].text_encoders[0]
    with pytest.raises(ValueError, match=message):
        load_text_encoder(spec, tmp_path / "wan" / "model", "cpu", torch.float32)


LEGAL = [
    ("AutoencoderKLFlux2", "sample_size", [1024, 1024]), ("AutoencoderKLFlux2", "patch_size", 2),
    ("AutoencoderKLFlux2", "mid_block_add_attention", 1), ("AutoencoderKLFlux2", "use_quant_conv", 1.0),
    ("AutoencoderKLFlux2", "decoder_block_out_channels", None), ("AutoencoderKLWan", "scale_factor_spatial", None),
    ("Flux2Transformer2DModel", "guidance_embeds", None), ("WanTransformer3DModel", "qk_norm", None),
]  # fmt: skip
ILLEGAL = [
    ("AutoencoderKLFlux2", "sample_size", ["1024"]), ("AutoencoderKLFlux2", "patch_size", "2"),
    ("AutoencoderKLFlux2", "use_quant_conv", 2), ("AutoencoderKLFlux2", "latent_channels", [32]),
    ("WanTransformer3DModel", "num_layers", None),
]  # fmt: skip


def test_a_value_is_taken_if_the_class_declares_it_legal() -> None:
    for class_name, key, value in LEGAL:
        refuse_other_kinds(Path("config.json"), class_name, {key: value})
    for class_name, key, value in ILLEGAL:
        with pytest.raises(ValueError, match=rf"config\.json: {key} is .*; use the config.json published with the mo"):
            refuse_other_kinds(Path("config.json"), class_name, {key: value})


def test_sizes_of_published_models_are_taken() -> None:
    for family in FAMILIES.values():
        for variant in family.variants:
            for config in (variant.transformer_config, variant.vae_config):
                plain = json.loads(json.dumps(dict(config)))
                refuse_absurd_sizes(Path("config.json"), plain)
                is_vae = config is variant.vae_config
                refuse_other_kinds(Path("x"), family.vae_class if is_vae else family.transformer_class, plain)
    refuse_absurd_sizes(Path("config.json"), {"rope_theta": 1_000_000_000, "vocab_size": 262_208, "eps": 1e-6})


@pytest.mark.parametrize("other", ["flux1", "wan"])
def test_a_vae_of_another_family_is_refused(made: dict[str, Path], tmp_path: Path, other: str) -> None:
    vae = made[other] / "model" / "vae"
    with pytest.raises(ValueError, match=rf"{vae} is an Autoencoder\w+; FLUX\.2 needs an AutoencoderKLFlux2"):
        check_job(_copy(made, "flux2", tmp_path, cache={"vae": str(vae)}))


@pytest.mark.parametrize("is_file", [False, True])
def test_a_vae_of_the_same_class_with_other_latents_is_refused(made, tmp_path, is_file):
    """Stable Diffusion's VAE is FLUX.1's class."""
    config = {**TINY["flux1"].vae_config, "latent_channels": 8}
    vae = diffusers.AutoencoderKL(**config)
    vae.save_pretrained(tmp_path / "vae")
    path = tmp_path / "vae"
    if is_file:
        path = tmp_path / "vae.safetensors"
        save_file(vae.state_dict(), path)
    message = "cannot be read as an|has unknown|lacks" if is_file else "latents of 8 channels.*takes 4"
    with pytest.raises(ValueError, match=rf"{path}.*({message})"):
        check_job(_copy(made, "flux1", tmp_path, cache={"vae": str(path)}))


@pytest.mark.parametrize(("family", "found", "wanted"), [("flux2", 96, 48), ("flux1", 32, 16), ("wan", 32, 16)])
def test_a_text_encoder_of_another_width_is_refused(made, tmp_path, family, found, wanted):
    for kind, layers, encoder, tokenizer in TINY[family].encoders:
        names = {"encoder_name": encoder, "tokenizer_name": tokenizer}
        save_tiny_text_encoder(tmp_path / "other", kind, 32, layers, max_length=77, **names)  # type: ignore[arg-type]
    other = tmp_path / "other"
    folder = other / TINY[family].encoders[0][2]
    message = rf"{folder} makes text states of width {found}, but this .* takes {wanted}; use the text encoders"
    with pytest.raises(ValueError, match=message):
        check_job(_copy(made, family, tmp_path, cache={"text_encoders": str(other)}))


@pytest.mark.parametrize("place", ["taken", "taken/run"])
def test_an_output_folder_that_is_a_file_is_refused(made: dict[str, Path], tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").touch()
    job = _copy(made, "flux2", tmp_path, output={"folder": str(tmp_path / place)})
    with pytest.raises(ValueError, match=rf"output\.folder .*{tmp_path}/taken is a file; choose a folder"):
        check_job(job)


def test_a_folder_of_which_nothing_is_there_is_no_file(made: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    """As on Windows one on a drive that is not there; the run says that it cannot write."""
    monkeypatch.setattr("os.path.lexists", lambda path: False)
    check_places(_copy(made, "flux2", tmp_path, output={"folder": str(tmp_path / "run")}))


@pytest.mark.parametrize(("key", "value"), [("text_device", ""), ("text_device", "stream:x"), ("vae_device", "x")])
def test_a_device_of_an_encoder_that_is_none_is_named_with_its_key(made, tmp_path, key, value):
    with pytest.raises(ValueError, match=rf"cache\.{key} = '{value}': "):
        check_job(_copy(made, "flux2", tmp_path, cache={key: value}))


def _said(job: JobConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    with caplog.at_level("WARNING"):
        check_job(job)
    return [record.getMessage() for record in caplog.records]


def test_a_job_without_fault_is_given_no_caution(made, tmp_path, caplog):
    words = ("all zeros", "trained on as well", "is ignored", "links to nothing", "each the caption")
    assert not [line for line in _said(_copy(made, "flux2", tmp_path), caplog) if any(word in line for word in words)]


@pytest.mark.parametrize("is_copy", [False, True])
def test_evaluation_on_what_is_trained_is_said(made, tmp_path, caplog, is_copy):
    job = _copy(made, "flux2", tmp_path)
    folder = tmp_path / "flux2" / "data"
    if is_copy:
        folder = tmp_path / "copy"
        shutil.copytree(tmp_path / "flux2" / "held_out", folder)
        shutil.copy(tmp_path / "flux2" / "data" / "image_1.png", folder / "other.png")
    job = dataclasses.replace(job, evaluation=dataclasses.replace(job.evaluation, folder=str(folder)))
    (line,) = [line for line in _said(job, caplog) if "trained on as well" in line]
    assert line.startswith("1 of 3 " if is_copy else "5 of 5 ") and ("other.png" if is_copy else "image_0.png") in line


def test_weights_that_are_all_zeros_are_named(made, tmp_path, caplog):
    job = _copy(made, "flux2", tmp_path)
    file = tmp_path / "flux2" / "model" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    zeros = [name for name in tensors if name.startswith("transformer_blocks.0.attn.to_") and tensors[name].ndim > 1]
    tensors |= {name: torch.zeros_like(tensors[name]) for name in zeros}
    one = next(name for name in tensors if name.startswith("transformer_blocks.1.attn.to_"))
    tensors[one] = torch.zeros_like(tensors[one])
    tensors[one][1, 2] = 1.0  # not all
    save_file(tensors, file, metadata={"format": "pt"})
    (line,) = [line for line in _said(job, caplog) if "all zeros" in line]
    assert line.startswith(f"{len(zeros)} of {len(tensors)} weights") and zeros[0] in line and one not in line


@pytest.mark.skipif(os.name == "nt", reason="there are no named pipes in folders")
def test_images_that_share_a_caption_links_to_nothing_and_pipes_are_named(made, tmp_path, caplog):
    job = _copy(made, "flux2", tmp_path)
    folder = tmp_path / "flux2" / "data"
    shutil.copy(folder / "image_1.png", folder / "image_1.webp")
    (folder / "gone.png").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe.png")
    said = _said(job, caplog)
    assert any("image_1.txt of image_1.png and image_1.webp" in line for line in said)
    assert any("2 are no ordinary files, or links to nothing, and are not used: gone.png, pipe.png" in x for x in said)
