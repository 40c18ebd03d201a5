"""Headers of safetensors files: what is broken is refused with the file's name, before a tensor is read."""

import json
import pickle

import pytest
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.weight_file import load_tensors, open_weights
from devicebridge.tests.weight_files import write_raw

WEIGHT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


CASES = {
    "no_entry": ({"w": 3}, 0, "its entry 'w' is malformed"),
    "no_offsets": ({"w": {"dtype": "F32", "shape": [2]}}, 8, "its entry 'w' is malformed"),
    "three_offsets": ({"w": {**WEIGHT, "data_offsets": [0, 4, 8]}}, 8, "its entry 'w' is malformed"),
    "text_in_shape": ({"w": {**WEIGHT, "shape": ["2"]}}, 8, "its entry 'w' is malformed"),
    "negative": ({"w": {**WEIGHT, "shape": [-2]}}, 8, "its entry 'w' is malformed"),
    "true": ({"w": {**WEIGHT, "shape": [True, 2]}}, 8, "its entry 'w' is malformed"),
    "huge_beside_0": ({"w": {**WEIGHT, "shape": [2**70, 0], "data_offsets": [0, 0]}}, 0, "its entry 'w' is malformed"),
    "huge_product": ({"w": {**WEIGHT, "shape": [2**40] * 2 + [0], "data_offsets": [0, 0]}}, 0, "'w' is malformed"),
    "number_as_type": ({"w": {**WEIGHT, "dtype": 3}}, 8, "its entry 'w' is malformed"),
    "other_size": ({"w": {**WEIGHT, "shape": [3]}}, 8, r"'w' should be F32 \[3\], and has 8 bytes"),
    "backwards": ({"w": {**WEIGHT, "shape": [0], "data_offsets": [8, 0]}}, 0, "damaged"),
    "gap": ({"w": {**WEIGHT, "data_offsets": [4, 12]}}, 12, "'w' begins at byte 4, not 0"),
    "overlap": ({"v": WEIGHT, "w": {**WEIGHT, "data_offsets": [4, 12]}}, 12, "'w' begins at byte 4, not 8"),
    "short": ({"w": WEIGHT}, 7, "is cut short: its header promises 8"),
    "long": ({"w": WEIGHT}, 9, "is damaged: its header promises 8"),
    "twice": (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":3}', 8, "says 'w' twice"),
    "metadata_list": ({"__metadata__": [1], "w": WEIGHT}, 8, "its __metadata__ is a list"),
    "metadata_number": ({"__metadata__": {"a": 1}, "w": WEIGHT}, 8, "a of its __metadata__ is a number"),
    "list": ([], 0, "its header is a list"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_with_a_header_is_said_with_the_name_of_the_file(name, tmp_path):
    header, num_bytes, message = CASES[name]
    file = write_raw(tmp_path / f"{name}.safetensors", header, num_bytes)
    for read in (load_tensors, lambda path: open_weights(path).__enter__()):
        with pytest.raises(ValueError, match=rf"{name}\.safetensors.*{message}.*download it again"):
            read(file)


def test_a_type_that_nobody_knows_is_refused_with_the_name_of_the_file(tmp_path):
    file = write_raw(tmp_path / "x.safetensors", {"w": {**WEIGHT, "dtype": "F99"}}, 8)
    for read in (load_tensors, lambda path: open_weights(path).__enter__().get_tensor("w")):
        with pytest.raises(ValueError, match=r"w of .*x\.safetensors has type F99"):
            read(file)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_is_told_from_its_first_bytes_whatever_its_protocol(protocol, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(pickle.dumps({"state_dict": list(range(20))}, protocol))
    with pytest.raises(ValueError, match=r"x\.safetensors is a pickle \(saved by torch\.save\)"):
        read_header(file)


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580])
def test_a_header_whose_length_looks_like_a_pickle_is_read(length, tmp_path):
    text = json.dumps({"w": WEIGHT}).encode().ljust(length)
    file = write_raw(tmp_path / "x.safetensors", text, 8)
    assert read_header(file).tensors["w"].shape == (2,)


def test_more_tensors_than_any_model_has_are_refused_before_they_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("devicebridge.checkpoints.header.parse_json_object", None)
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    file = write_raw(tmp_path / "a.safetensors", {str(number): empty for number in range(50_001)}, 0)
    with pytest.raises(ValueError, match=r"a.safetensors has 50001 tensors"):
        read_header(file)
