"""What is said before a model is quantized, against what loading then does."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.checkpoints.load import load_transformer, make_empty_transformer, weight_types
from devicebridge.cli.main import main
from devicebridge.config.job import ModelConfig, save_job
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.resolve import Machine, preview_model
from devicebridge.planning import cards as planned_cards
from devicebridge.quantization import kernel_choice
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.quantize import QUANTIZED, SCHEMES, QuantizeSettings, refusal, sort_modules
from devicebridge.tests.tiny_pipeline import make_tiny_job, save_tiny_pipeline
from safetensors.torch import load_file, save_file

CPU = ("cpu",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: str(save_tiny_pipeline(folder / name, name)) for name in ("flux2", "flux1", "wan")}


@pytest.mark.parametrize("scheme", [*SCHEMES, "none"])
@pytest.mark.parametrize("family", ["flux2", "flux1", "wan"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # some of Wan's stays in float32
def test_the_preview_says_what_the_loaded_model_is(models: dict[str, str], family: str, scheme: str, dtype: Any):
    config, of = ModelConfig(models[family], quantize=scheme, dtype=dtype), getattr(torch, dtype)
    info, settings = read_checkpoint(config.path), config.quantize_settings
    size = of.itemsize * sum(math.prod(record.shape) for record in info.tensors.values()) / 1e9
    if scheme == "none":
        assert preview_model(config, CPU) == f"none: all weights in {dtype}, {size:.2f} GB"
        return
    model, plain = (load_transformer(info, lambda n: torch.device("cpu"), of, each) for each in (settings, None))
    groups = sort_modules(make_empty_transformer(info), info.family, settings, weight_types(model, of))
    found = {name: module for name, module in model.named_modules() if isinstance(module, FrozenLinear8)}
    assert groups[QUANTIZED].keys() == found.keys()
    for name, (before, after) in (each for group in groups.values() for each in group.items()):
        assert before == sum(each.nbytes for each in plain.get_submodule(name).parameters(False)), name
        buffers = found[name].buffers() if name in found else ()
        assert after == sum(each.nbytes for each in (*model.get_submodule(name).parameters(False), *buffers)), name
    assert preview_model(config, CPU).startswith(f"{len(found)} linears to {scheme}, {size:.2f} -> ")


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(*capabilities: tuple[int, int]) -> list[torch.device]:
        devices = [torch.device("cuda", index) for index in range(len(capabilities))]
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(resolve_module, "find_machine", lambda names: Machine(tuple(devices)))
        return devices

    return make


def _able(*devices: torch.device) -> list[str]:
    refused = [frozenset(each for each in SCHEMES if refusal(QuantizeSettings(each), [own])) for own in devices]
    found = [planned_cards.Card(own, 1, 1, refuses=each) for own, each in zip(devices, refused, strict=True)]
    return list(planned_cards.able_schemes(found))


@pytest.mark.parametrize(
    ("capabilities", "scheme"),
    [
        ([(9, 0)], "fp8-compute"), ([(8, 9), (12, 0)], "fp8-compute"), ([(8, 9), (8, 6)], "int8-compute"),
        ([(7, 5)], "int8-compute"), ([(9, 0), (7, 0)], "fp8"), ([(6, 1)], "fp8"),
    ],
)  # fmt: skip
def test_auto_takes_what_every_card_can_do(cards: Any, capabilities: list[tuple[int, int]], scheme: str) -> None:
    assert _able(*cards(*capabilities))[0] == scheme


def test_what_cannot_convert_to_float8_is_given_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "has_float8", lambda device: device.type != "mps")
    assert "fp8" in _able(torch.device("xpu:0")) and "fp8" not in _able(torch.device("xpu:0"), torch.device("mps"))
    assert refusal(QuantizeSettings("fp8"), [torch.device("mps")]) == (
        "fp8 was requested, but there is no float8 to convert to and from (mps); use int8, which only stores in 8 "
        "bits, instead"
    )


def test_a_card_that_cannot_is_named_before_the_file_is_opened(cards: Any) -> None:
    cards((9, 0), (8, 6))
    with pytest.raises(ValueError, match=r"fp8-compute.*8\.9.*8\.6 \(cuda:1\); use int8-compute instead"):
        preview_model(ModelConfig("/nowhere", quantize="fp8-compute"))


@pytest.fixture(scope="module")
def stored(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = Path(save_tiny_pipeline(tmp_path_factory.mktemp("stored") / "model", "flux2"))
    (file,) = (folder / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    for name in [name for name in tensors if name.startswith("single_transformer_blocks") and tensors[name].ndim == 2]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale
    save_file(tensors, file)
    return str(folder)


@pytest.mark.parametrize(
    ("scheme", "is_taken", "ending"),
    [
        ("fp8-compute", True, ""),
        ("int8", False, "become bfloat16, linears to quantize are rounded again"),
        ("none", False, "become bfloat16"),
    ],
)
def test_layers_that_a_file_holds_in_8_bits_stay_or_are_said_to_be_rounded_again(stored, scheme, is_taken, ending):
    count = sum(name.endswith("weight_scale") for name in load_file(next(Path(stored, "transformer").glob("*.s*"))))
    text = preview_model(ModelConfig(stored, quantize=scheme), CPU)
    assert (f"({count} as they were stored)" in text) == is_taken and count > 0
    assert is_taken or f"({count} in float8_e4m3fn): {count} {ending}" in text.splitlines()[1]
    assert text.endswith(ending)


def test_check_prints_the_preview(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = make_tiny_job(tmp_path, model={"quantize": "int8-compute"})
    save_job(job, tmp_path / "job.toml")
    assert main(["check", str(tmp_path / "job.toml")]) == 0
    assert f"quantize: {preview_model(job.model, job.split.devices)}\n" in capsys.readouterr().out
