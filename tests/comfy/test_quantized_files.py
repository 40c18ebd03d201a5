"""Weights in ComfyUI's 8-bit formats, written by ComfyUI: we read the numbers that ComfyUI reads."""

from pathlib import Path

import pytest
import torch
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.quantized_files import dequantize, pair_scales, read_formats, read_scales
from devicebridge.checkpoints.weight_file import read_records
from devicebridge.tests.comfy.workers import run_worker
from safetensors.torch import load_file

pytestmark = pytest.mark.comfy

# Rotating back sums 16 or 256 float32 products in an order of its own; nothing else differs.
ROUNDING = {"int8_convrot": 1e-5, "int8_convrot_16": 1e-5}
NAMES = ("fp8", "e5m2", "int8", "int8_rows", "int8_convrot", "int8_convrot_16", "fp8_scaled")


@pytest.fixture(scope="module")
def folder(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    run_worker("quantized_layers.py", comfyui, folder)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_what_comfyui_takes_it_for(name: str, folder: Path) -> None:
    file = folder / f"{name}.safetensors"
    header = read_header(file)
    given = header.records()
    records = pair_scales(file, given, read_formats(file, given, [header.metadata]))
    assert records.keys() == {"x.weight"} and records["x.weight"].is_quantized
    ((_, values),) = read_records(records)
    found = dequantize(values, read_scales(records)["x.weight"], records["x.weight"], torch.float32)
    expected = load_file(folder / f"{name}.found")["x.weight"]
    assert expected.std() > 0.9
    assert torch.allclose(found, expected, rtol=0, atol=ROUNDING.get(name, 0))
