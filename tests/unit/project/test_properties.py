"""What must hold of any job, header, checkpoint and cache entry, tried on examples that hypothesis finds.

The examples are the same in every run: derandomized, and without a database of earlier ones.
"""

import json
import string
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tomlkit
import torch
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.weight_file import load_tensors
from devicebridge.config.job import JobConfig, job_keys, job_to_dict, load_job, make_job
from devicebridge.tests.unit.config.test_ranges import MINIMAL
from devicebridge.tests.weight_files import are_equal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save

pytestmark = pytest.mark.usefixtures("one_thread")

stable = settings(
    derandomize=True, database=None, deadline=None, max_examples=120, suppress_health_check=list(HealthCheck)
)
WORDS = st.sampled_from(["auto", "cpu", "cuda:0", "../..", "nan", "\0", "int8"])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | WORDS
ANY = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NAMES = st.text(string.ascii_letters + ".0", min_size=1, max_size=12)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])


@st.composite
def tensors(draw: Any, finite: bool = False) -> dict[str, torch.Tensor]:
    found = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
        found[name] = values.to(torch.float32 if finite else draw(DTYPES))
    return found


@st.composite
def damages(draw: Any) -> Any:
    """bytes -> other bytes."""
    place, length = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    put = draw(st.binary(max_size=40))

    def damage(data: bytes) -> bytes:
        start = int(place * len(data))
        return data[:start] + put + data[start + length :]

    return damage


@stable
@given(st.sampled_from(sorted(job_keys())), ANY)
def test_any_value_of_any_key_makes_a_job_or_is_refused_with_its_section(key: str, value: Any) -> None:
    values = json.loads(json.dumps(MINIMAL))
    *sections, name = key.split(".")
    section: Any = values
    for part in sections:
        section = section.setdefault(part, {})
        section = section[0] if isinstance(section, list) else section
    section[name] = value
    try:
        job = make_job(values)
    except ValueError as error:
        assert sections[0] in str(error)
    else:
        assert isinstance(job, JobConfig) and make_job(job_to_dict(job)) == job


@stable
@given(damages())
def test_any_damage_to_a_job_file_is_read_or_refused_with_its_name(damage: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_bytes(damage(tomlkit.dumps(MINIMAL).encode()))
        try:
            load_job(file)
        except ValueError as error:
            assert "job.toml" in str(error)


_FIELDS = {
    "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", "X", ""]) | PLAIN,
    "shape": st.lists(st.integers(-1, 5), max_size=3) | ANY,
    "data_offsets": st.lists(st.integers(-1, 64), min_size=1, max_size=3) | ANY,
}
ENTRY = st.fixed_dictionaries({}, optional=_FIELDS)


@stable
@given(st.dictionaries(NAMES | st.just("__metadata__"), ENTRY | ANY, max_size=3), st.integers(0, 64))
def test_any_header_that_is_read_is_read_alike_by_the_library(header: dict[str, Any], num_bytes: int) -> None:
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(num_bytes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(data)
        try:
            found = load_tensors(file)
        except ValueError as error:
            assert "x.safetensors" in str(error)
        else:
            assert are_equal(found, load(data))


@stable
@given(tensors(), damages())
def test_any_damage_to_weights_is_refused_with_the_file_or_leaves_a_sound_file(found: Any, damage: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        file.write_bytes(save(found))
        assert are_equal(load_tensors(file), found) and read_header(file).tensors.keys() == found.keys()
        data = damage(file.read_bytes())
        file.write_bytes(data)
        try:
            read = load_tensors(file)
        except ValueError as error:
            assert "x.safetensors" in str(error)
        else:
            assert are_equal(read, load(data)), SafetensorError
