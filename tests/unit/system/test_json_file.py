"""JSON objects from files of others: read, or refused with the file's name and what it holds instead."""

import json

import pytest
import torch
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.checkpoints.header import read_weight_map
from devicebridge.encoding.comfy_data import load_encoded
from devicebridge.encoding.text_encoder import load_text_encoder
from devicebridge.families.registry import find_variant
from devicebridge.system.files import expect, read_json_object
from devicebridge.tests.tiny_pipeline import make_tiny_job

WRONG = {
    "list": ("[]", "a list"), "null": ("null", "null"), "number": ("3", "a number"), "text": ('"x"', "a text"),
    "twice": ('{"a": 1, "a": 2}', "says 'a' twice"), "torn": ('{"a": ', "is no JSON"),
    "deep": ("[" * 100_000, "is no JSON"), "bytes": ("\udcff", "is no JSON"), "digits": ("9" * 10_000, "is no JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_file_without_an_object_is_named_with_what_it_holds(name, tmp_path):
    text, found = WRONG[name]
    file = tmp_path / f"{name}.json"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=rf"{name}\.json.*{found}.*; mend it"):
        read_json_object(file, "mend it")


def test_an_object_is_read_as_it_is(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"a": [1, None, {"b": 2.5}]}))
    assert read_json_object(tmp_path / "x.json") == {"a": [1, None, {"b": 2.5}]}
    with pytest.raises(ValueError, match="x is true or false in JSON, not a number"):
        expect(True, (int, float), "x")


def test_a_config_with_values_of_the_wrong_kind_names_the_file(tmp_path):
    make_tiny_job(tmp_path)
    file = tmp_path / "model" / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_layers": 2.5}))
    with pytest.raises(ValueError, match=r"transformer/config\.json gives values that no Flux2.* can be made with"):
        read_checkpoint(tmp_path / "model")


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("tokenizer_config.json", "model_max_length", "x"),
        ("tokenizer.json", "model", []),
        ("tokenizer.json", "added_tokens", None),
    ],
)
def test_a_tokenizer_with_values_of_the_wrong_kind_names_its_folder(file, key, value, tmp_path):
    make_tiny_job(tmp_path)
    path = tmp_path / "model" / "tokenizer" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    spec = find_variant("flux2-dev")[1].text_encoders[0]
    with pytest.raises(ValueError, match=r"model/tokenizer cannot be read as a tokenizer"):
        load_text_encoder(spec, tmp_path / "model", "cpu", torch.float32)


@pytest.mark.parametrize("found", [None, [], {}, {"a": 3}, {"a": "../../secret.safetensors"}, {"a": "/etc/passwd"}])
def test_an_index_names_files_beside_it(found, tmp_path):
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": found}))
    with pytest.raises(ValueError, match=r"x\.index\.json"):
        read_weight_map(tmp_path / "x.index.json")


@pytest.mark.parametrize("key", ["latents", "text", "latents_shapes"])
def test_a_list_of_encoded_samples_with_wrong_values_is_refused(key, tmp_path):
    sample = {"latents": "ab12", "text": "cd34", "latents_shapes": {"x": [1]}, "text_shapes": {"x": [1]}}
    (tmp_path / "x.json").write_text(json.dumps({"version": 1, "samples": [{**sample, key: {"x": ["y"]}}]}))
    with pytest.raises(ValueError, match=r"x\.json is no list of encoded samples"):
        load_encoded(tmp_path / "x.json")
