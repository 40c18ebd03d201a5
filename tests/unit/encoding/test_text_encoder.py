"""Text encoders against diffusers' own pipelines, bitwise, on tiny random models of every kind."""

import dataclasses
import json
import logging
import re
import sys
import types

import pytest
import torch
import transformers
from devicebridge.encoding import text_encoder
from devicebridge.encoding.text_encoder import load_text_encoder, prepare_text, render_chat
from devicebridge.families.spec import TextEncoderSpec
from devicebridge.tests.toy_encoders import copy_parts, save_tiny_text_encoder
from packaging.version import Version
from safetensors.torch import load_file, save_file

LENGTH = 64
SYSTEM = "You look.\nYou tell."
CAPTIONS = ["a cat", "", "  two  spaces &amp;amp; ümläut ", "x" * 200, "an [IMG] in the text", "</s> <s>"]

MISTRAL3 = TextEncoderSpec(
    kind="chat_hidden_states", folder="text_encoder", tokenizer_folder="tokenizer", output="text_states",
    max_length=LENGTH, layers=(1, 2, 3), system_prompt=SYSTEM,
)  # fmt: skip
QWEN3 = dataclasses.replace(
    MISTRAL3, system_prompt=None, template_options={"add_generation_prompt": True, "enable_thinking": False}
)
T5 = TextEncoderSpec("last_hidden_state", "text_encoder_2", "tokenizer_2", "text_states", LENGTH)
UMT5 = TextEncoderSpec("last_hidden_state", "text_encoder", "tokenizer", "text_states", LENGTH, zero_padding=True)
CLIP = TextEncoderSpec("pooled", "text_encoder", "tokenizer", "pooled", LENGTH)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("encoders")
    save_tiny_text_encoder(root / "flux2", "mistral3", max_length=LENGTH)
    save_tiny_text_encoder(root / "klein", "qwen3", max_length=LENGTH)
    save_tiny_text_encoder(root / "flux1", "clip", max_length=LENGTH)
    names = {"encoder_name": "text_encoder_2", "tokenizer_name": "tokenizer_2"}
    save_tiny_text_encoder(root / "flux1", "t5", max_length=LENGTH, **names)
    save_tiny_text_encoder(root / "wan", "umt5", max_length=LENGTH)
    return {name: root / name for name in ("flux2", "klein", "flux1", "wan")}


def _whole(class_name, folder, dtype):
    """The whole model as a pipeline would hold it, loaded by transformers. Transformers 5.0 leaves T5's wo in float32
    in bfloat16, too, which is meant for float16 and is so before and after."""
    name = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    model = getattr(transformers, class_name).from_pretrained(folder, **{name: dtype}).eval()
    if dtype is torch.bfloat16:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def _flux2(folder, caption, dtype, layers):
    from diffusers import Flux2Pipeline

    pipeline = Flux2Pipeline(
        scheduler=None, vae=None,
        text_encoder=_whole("Mistral3ForConditionalGeneration", folder / "text_encoder", dtype),
        tokenizer=_tokenizer(folder / "tokenizer"), transformer=None,
    )  # fmt: skip
    pipeline.system_message = SYSTEM
    return pipeline.encode_prompt(caption, "cpu", max_sequence_length=LENGTH, text_encoder_out_layers=layers)[0][0]


@torch.no_grad()
def _klein(folder, caption, dtype, layers):
    from diffusers import Flux2KleinPipeline

    pipeline = Flux2KleinPipeline(
        scheduler=None, vae=None, text_encoder=_whole("Qwen3ForCausalLM", folder / "text_encoder", dtype),
        tokenizer=_tokenizer(folder / "tokenizer"), transformer=None,
    )  # fmt: skip
    return pipeline.encode_prompt(caption, "cpu", max_sequence_length=LENGTH, text_encoder_out_layers=layers)[0][0]


@torch.no_grad()
def _flux1(folder, caption, dtype):
    from diffusers import FluxPipeline

    pipeline = FluxPipeline(
        scheduler=None, vae=None, text_encoder=_whole("CLIPTextModel", folder / "text_encoder", dtype),
        tokenizer=_tokenizer(folder / "tokenizer"),
        text_encoder_2=_whole("T5EncoderModel", folder / "text_encoder_2", dtype),
        tokenizer_2=_tokenizer(folder / "tokenizer_2"), transformer=None,
    )  # fmt: skip
    states, pooled, _ = pipeline.encode_prompt(caption, device="cpu", max_sequence_length=LENGTH)
    return states[0], pooled[0]


@torch.no_grad()
def _wan(folder, caption, dtype):
    from diffusers import AutoencoderKLWan, WanPipeline

    vae = AutoencoderKLWan(base_dim=4, z_dim=2, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True])
    pipeline = WanPipeline(
        tokenizer=_tokenizer(folder / "tokenizer"),
        text_encoder=_whole("UMT5EncoderModel", folder / "text_encoder", dtype), vae=vae, scheduler=None,
    )  # fmt: skip
    options = {"do_classifier_free_guidance": False, "max_sequence_length": LENGTH, "device": "cpu"}
    return pipeline.encode_prompt(caption, **options)[0][0]


def _ours(folder, spec, caption, dtype):
    encoder = load_text_encoder(spec, folder, "cpu", dtype)
    return encoder.encode_batch([prepare_text(caption, spec)])[0]


def _assert_equal(ours, theirs, dtype):
    assert ours.dtype == theirs.dtype == dtype
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("layers", "dtype"),
    [((1, 2, 3), torch.float32), ((1, 2, 3), torch.bfloat16), ((1, 2, 4), torch.float16), ((3, 1), torch.float32)],
)
def test_mistral3_equals_flux2_pipeline(folders, layers, dtype):
    spec = dataclasses.replace(MISTRAL3, layers=layers)
    for caption in CAPTIONS if layers == (1, 2, 3) else CAPTIONS[:1]:
        ours = _ours(folders["flux2"], spec, caption, dtype)
        assert ours.shape == (LENGTH, 32 * len(layers))
        _assert_equal(ours, _flux2(folders["flux2"], caption, dtype, layers), dtype)


@pytest.mark.parametrize(("layers", "dtype"), [((1, 2, 3), torch.float32), ((2, 4), torch.bfloat16)])
def test_qwen3_equals_flux2_klein_pipeline(folders, layers, dtype):
    spec = dataclasses.replace(QWEN3, layers=layers)
    for caption in CAPTIONS if layers == (1, 2, 3) else CAPTIONS[:1]:
        ours = _ours(folders["klein"], spec, caption, dtype)
        _assert_equal(ours, _klein(folders["klein"], caption, dtype, layers), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_t5_and_clip_equal_flux_pipeline(folders, dtype):
    for caption in CAPTIONS:
        states, pooled = _flux1(folders["flux1"], caption, dtype)
        _assert_equal(_ours(folders["flux1"], T5, caption, dtype), states, dtype)
        _assert_equal(_ours(folders["flux1"], CLIP, caption, dtype), pooled, dtype)
        assert states.shape == (LENGTH, 32) and pooled.shape == (32,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_umt5_equals_wan_pipeline(folders, dtype):
    for caption in CAPTIONS:
        ours = _ours(folders["wan"], UMT5, caption, dtype)
        _assert_equal(ours, _wan(folders["wan"], caption, dtype), dtype)
    assert ours.shape == (LENGTH, 32) and ours[-1].abs().max() == 0 and ours[0].abs().max() > 0


def test_only_the_language_model_up_to_the_last_layer_is_loaded(folders):
    model = load_text_encoder(dataclasses.replace(MISTRAL3, layers=(2,)), folders["flux2"], "cpu", torch.float32).model
    names = [name for name, _ in model.named_parameters()]
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1"}
    assert not [name for name in names if "vision" in name or "lm_head" in name or name.startswith("norm")]
    assert not any(parameter.is_meta or parameter.requires_grad for parameter in model.parameters())


def test_every_way_of_naming_the_language_model_is_found(folders, tmp_path):
    """transformers before 4.52, since, and a checkpoint of the language model alone."""
    expected = _ours(folders["flux2"], MISTRAL3, "a cat", torch.float32)
    tensors = load_file(folders["flux2"] / "text_encoder" / "model.safetensors")
    bare = {re.split(r"language_model\.model\.|model\.language_model\.", name)[-1]: t for name, t in tensors.items()}
    for prefix in ("language_model.model.", "model.language_model.", "model.", ""):
        folder = tmp_path / (prefix or "none")
        copy_parts(folders["flux2"], folder)
        language = {prefix + name: t for name, t in bare.items() if "vision" not in name and "projector" not in name}
        save_file(language, folder / "text_encoder" / "model.safetensors")
        assert torch.equal(_ours(folder, MISTRAL3, "a cat", torch.float32), expected)


def test_shards_are_read_through_their_index(folders, tmp_path):
    _, tensors = copy_parts(folders["klein"], tmp_path / "klein")
    target, names = tmp_path / "klein" / "text_encoder", sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, target / "one.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, target / "two.safetensors")
    weight_map = {name: ("one" if name in names[::2] else "two") + ".safetensors" for name in names}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    ours = _ours(tmp_path / "klein", QWEN3, "a cat", torch.float32)
    assert torch.equal(ours, _ours(folders["klein"], QWEN3, "a cat", torch.float32))


def _break(folders, name, tmp_path, change):
    _, tensors = copy_parts(folders[name], tmp_path)
    save_file(change(tensors), tmp_path / "text_encoder" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("name, spec", [("klein", QWEN3), ("wan", UMT5)])
def test_missing_weights_are_refused_and_never_random(folders, tmp_path, name, spec):
    def drop(tensors):
        return {key: t for key, t in tensors.items() if "up_proj" not in key and "block.1.layer.1" not in key}

    folder = _break(folders, name, tmp_path, drop)
    with pytest.raises(ValueError, match=r"lacks weights.*(up_proj|block\.1)"):
        load_text_encoder(spec, folder, "cpu", torch.float32)


def test_missing_folders_files_and_layers_are_named(folders, tmp_path):
    with pytest.raises(ValueError, match="no tokenizer folder"):
        load_text_encoder(UMT5, tmp_path, "cpu", torch.float32)
    copy_parts(folders["wan"], tmp_path)
    with pytest.raises(ValueError, match=r"lacks model\.safetensors"):
        load_text_encoder(UMT5, tmp_path, "cpu", torch.float32)
    index = tmp_path / "text_encoder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks one\.safetensors, two\.safetensors; download"):
        load_text_encoder(UMT5, tmp_path, "cpu", torch.float32)
    for layers in ((), (0, 1), (1, 5)):
        with pytest.raises(ValueError, match=r"text encoder of 4 layers, .*set model\.variant"):
            load_text_encoder(dataclasses.replace(QWEN3, layers=layers), folders["klein"], "cpu", torch.float32)


def test_a_clip_with_a_projection_is_not_what_was_described(folders, tmp_path):
    copy_parts(folders["flux1"], tmp_path)
    config = tmp_path / "text_encoder" / "config.json"
    found = {**json.loads(config.read_text()), "architectures": ["CLIPTextModelWithProjection"]}
    config.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="holds a CLIPTextModelWithProjection, and a CLIPTextModel was expected"):
        load_text_encoder(CLIP, tmp_path, "cpu", torch.float32)


def test_clip_weights_under_their_older_names_load(folders, tmp_path):
    """Published CLIP folders have the prefix text_model. before every name; newer transformers save without it."""

    def with_prefix(tensors):
        return {"text_model." + key.removeprefix("text_model."): t for key, t in tensors.items()}

    folder = _break(folders, "flux1", tmp_path, with_prefix)
    expected = _ours(folders["flux1"], CLIP, "a cat", torch.float32)
    assert torch.equal(_ours(folder, CLIP, "a cat", torch.float32), expected)
    streamed = load_text_encoder(CLIP, folder, "cpu", torch.float32, captions_per_pass=1)
    assert torch.equal(streamed.encode_batch(["a cat"])[0], expected)
    streamed.close()


def test_a_processors_chat_template_goes_before_the_tokenizers(folders, tmp_path):
    copy_parts(folders["flux2"], tmp_path)
    template = "{{ messages[0]['content'][0]['text'] }}!{{ messages[1]['content'][0]['text'] }}!"
    (tmp_path / "tokenizer" / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    tokenizer = text_encoder._load_tokenizer(tmp_path / "tokenizer")
    assert render_chat(tokenizer, "a cat", MISTRAL3) == f"{SYSTEM}!a cat!"


def test_chat_content_takes_the_form_the_template_shows(folders):
    mistral, qwen = (_tokenizer(folders[name] / "tokenizer") for name in ("flux2", "klein"))
    assert render_chat(mistral, "a cat", MISTRAL3) == f"<s>[SYSTEM_PROMPT]{SYSTEM}[/SYSTEM_PROMPT][INST]a cat[/INST]"
    expected = "<|im_start|>user\na cat<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render_chat(qwen, "a cat", QWEN3) == expected
    qwen.chat_template = "{{ messages[0]['content'] }}"  # would print a list as it is
    assert render_chat(qwen, "a cat", QWEN3) == "a cat"
    qwen.chat_template = "{{ 'say ' + messages[0]['content'] }}"  # cannot add a list
    assert render_chat(qwen, "a cat", QWEN3) == "say a cat"
    qwen.chat_template = "nothing"
    with pytest.raises(ValueError, match="leaves out the caption"):
        render_chat(qwen, "a cat", QWEN3)


def test_captions_that_do_not_fit_are_named_once_each(folders, caplog):
    encoder = load_text_encoder(T5, folders["flux1"], "cpu", torch.float32)
    with caplog.at_level(logging.WARNING, logger=text_encoder.logger.name):
        encoder.encode_batch(["y" * (LENGTH - 1)])
        assert not caplog.records
        encoder.encode_batch(["y" * LENGTH])
    (record,) = caplog.records
    assert f"the caption '{'y' * 59} needs {LENGTH + 1}" in record.getMessage()


def test_texts_are_cleaned_where_the_padding_is_zeroed_only(monkeypatch):
    assert prepare_text("  a\n\tb &amp;lt; ", UMT5) == "a b <"
    assert prepare_text("  a\n\tb &amp;lt; ", T5) == "  a\n\tb &amp;lt; "
    ftfy = types.ModuleType("ftfy")
    ftfy.fix_text = lambda text: text.replace("Ã¤", "ä")
    monkeypatch.setitem(sys.modules, "ftfy", ftfy)
    assert prepare_text("Ã¤", UMT5) == "ä"


def test_a_model_type_that_transformers_does_not_know_is_not_downloaded_again(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "not-yet-known", "architectures": ["T5EncoderModel"]}')
    spec = dataclasses.replace(T5, folder=".")
    with pytest.raises(ValueError, match=r"cannot be read as .*not-yet-known.*(update|upgrade)") as caught:
        text_encoder.make_empty_encoder(spec, tmp_path)
    assert "download" not in str(caught.value)
