"""Where a text encoder runs: what may be written, what is picked and why, and that the forecast holds."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.encoding import text_place
from devicebridge.encoding.text_encoder import load_text_encoder
from devicebridge.encoding.text_place import (
    TextDevice,
    TextPlace,
    check_text_device,
    forecast_size,
    parse_text_device,
    plan_text_place,
    text_device_on,
)
from devicebridge.encoding.text_weights import layer_list, tied_names
from devicebridge.families.registry import FAMILIES
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.toy_encoders import save_each
from devicebridge.tests.unit.encoding.test_text_encoder_quantized import SPECS

CPU = torch.device("cpu")
GB = 10**9
HUGE = 10**15


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_each(tmp_path_factory.mktemp("encoders"), SPECS, layers=12, max_length=64)


Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with emulated_cards(4):

        def have(*free: int) -> None:
            monkeypatch.setattr(text_place, "_MARGIN_BYTES", 0)
            monkeypatch.setattr(text_place, "_USABLE", 1.0)
            monkeypatch.setattr(text_place, "available_devices", lambda: list(CARDS[: len(free)]))
            of = dict(zip(CARDS, free, strict=False))
            monkeypatch.setattr(text_place, "free_bytes", lambda device: of[device])

        yield have


def test_settings_are_understood() -> None:
    assert parse_text_device("cpu") == TextDevice("resident", CPU)
    assert parse_text_device(CPU) == TextDevice("resident", CPU)
    assert parse_text_device("stream") == TextDevice("stream", None)
    assert parse_text_device(" auto ") == TextDevice(None, None)
    with emulated_cards(2):
        assert parse_text_device("lazy:1") == TextDevice("resident", CARDS[1])
        assert parse_text_device("stream:lazy:1") == TextDevice("stream", CARDS[1])
        assert parse_text_device("auto:lazy") == TextDevice(None, CARDS[0])


@pytest.mark.parametrize(
    "setting", ["", "gpu", "streams", "stream:gpu", "stream:lazy:7", "lazy:7", "auto:lazy:7", "stream:cpu", "auto:cpu"]
)
def test_other_words_and_missing_cards_are_refused_with_what_exists(setting: str) -> None:
    with emulated_cards(2), pytest.raises(ValueError, match="found here: cpu|for GPUs; use .* or .cpu"):
        parse_text_device(setting)


def test_a_setting_is_confined_to_a_device_of_several_processes() -> None:
    with emulated_cards(2):
        found = [text_device_on(setting, "lazy:1") for setting in ("cpu", "lazy:0", "stream", "stream:lazy:0", "auto")]
        assert found == ["lazy:1", "lazy:1", "stream:lazy:1", "stream:lazy:1", "auto:lazy:1"]
        assert text_device_on("auto", "cpu") == text_device_on("stream", "cpu") == "cpu"


def _plan(folders: dict[str, Path], setting: str, scheme: Any = "none", window: int = 0) -> TextPlace:
    return plan_text_place(setting, SPECS["t5"], folders["t5"], torch.bfloat16, scheme, window)


def test_a_window_gives_no_room_on_a_card_that_is_full(folders: dict[str, Path], machine: Machine) -> None:
    machine(0)
    assert _plan(folders, "auto", window=HUGE).device == CPU
    with pytest.raises(ValueError, match="use another card"):
        _plan(folders, "stream", window=HUGE)


def test_auto_takes_a_card_that_holds_all_then_a_stream_then_the_cpu(folders, machine):
    size = forecast_size(SPECS["t5"], folders["t5"], torch.bfloat16)
    machine(size.resident_bytes - 1, size.resident_bytes)
    place = _plan(folders, "auto")
    assert (place.device, place.captions_per_pass) == (CARDS[1], 0) and "all of it takes" in str(place)
    machine(size.resident_bytes - 2, size.resident_bytes - 1)
    place = _plan(folders, "auto")
    assert place.device == CARDS[1] and place.captions_per_pass
    assert "is streamed through lazy:1, " in str(place) and "room for" in place.reason
    machine(size.streamed_bytes() - 1)
    place = _plan(folders, "auto")
    assert place == TextPlace(CPU, place.reason) and "even streamed it takes" in place.reason
    machine()
    assert _plan(folders, "auto") == TextPlace(CPU, "there is no GPU")
    machine(HUGE, HUGE)
    assert _plan(folders, "auto:lazy:1").device == CARDS[1]
    nowhere = Path("no folder")  # a device that is named needs no forecast
    assert plan_text_place("cpu", SPECS["t5"], nowhere, torch.bfloat16) == TextPlace(CPU, "as requested")


def test_with_8_bits_auto_takes_a_card_or_the_cpu(folders: dict[str, Path], machine: Machine) -> None:
    full, int8 = (forecast_size(SPECS["t5"], folders["t5"], torch.bfloat16, scheme) for scheme in ("none", "int8"))
    assert int8.whole < full.whole
    machine(int8.resident_bytes)
    assert _plan(folders, "auto", "int8").device == CARDS[0]
    machine(int8.resident_bytes - 1)
    place = _plan(folders, "auto", "int8")
    assert place.device == CPU and "8-bit weights are not streamed" in place.reason
    with pytest.raises(ValueError, match='text_quantize = "int8".*"none"'):
        _plan(folders, "stream", "int8")


def test_stream_takes_the_emptiest_card_or_the_one_named(folders: dict[str, Path], machine: Machine) -> None:
    size = forecast_size(SPECS["t5"], folders["t5"], torch.bfloat16)
    room = size.streamed_bytes()
    machine(room, room + 1, room)
    assert _plan(folders, "stream").device == CARDS[1]
    assert _plan(folders, "stream:lazy:2").device == CARDS[2]
    machine()
    with pytest.raises(ValueError, match='no GPU here.*use "cpu"'):
        _plan(folders, "stream")


def test_captions_per_pass_fill_the_window(folders: dict[str, Path], machine: Machine) -> None:
    size = forecast_size(SPECS["t5"], folders["t5"], torch.bfloat16)
    machine(HUGE)
    for number in (1, 2, 5):
        for spare in (0, size.caption - 1):
            window = size.streamed_bytes(number) + spare
            if window < size.resident_bytes:
                place = _plan(folders, "stream", window=window)
                assert place.captions_per_pass == number
    place = _plan(folders, "stream", window=size.resident_bytes)
    assert place.captions_per_pass == 0  # then streaming would only cost
    with pytest.raises(ValueError, match=r"takes .* GB .*two layers.*text_window_gb.*larger window"):
        _plan(folders, "stream", window=size.streamed_bytes() - 1)
    machine(size.streamed_bytes(2))
    assert _plan(folders, "stream", window=HUGE).captions_per_pass == 2  # a window larger than the card


def test_what_cannot_be_is_refused_before_anything_is_loaded(folders, tmp_path, machine):
    specs = (SPECS["t5"],)
    machine()
    check_text_device("auto", specs, folders["t5"])
    with pytest.raises(ValueError, match="no GPU here"):
        check_text_device("stream", specs, folders["t5"])
    machine(HUGE)
    check_text_device("stream", specs, folders["t5"])
    with pytest.raises(ValueError, match="streamed"):
        check_text_device("stream", specs, folders["t5"], "int8")
    check_text_device("stream", (SPECS["clip"],), folders["clip"], "int8")  # stays exact anyway


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("none", torch.float32), ("none", torch.float16), ("int8", torch.bfloat16), ("fp8", torch.float16)],
)
@pytest.mark.parametrize("kind", SPECS)
def test_forecast_counts_the_weights_as_they_are_held(folders, kind, scheme, dtype):
    if "*" in SPECS[kind].keep_full_precision:
        scheme = "none"
    size = forecast_size(SPECS[kind], folders[kind], dtype, scheme)
    model = load_text_encoder(SPECS[kind], folders[kind], CPU, dtype, scheme).model
    held = 0
    for parameter in model.parameters():
        parts = getattr(parameter, "__tensor_flatten__", None)
        tensors = [getattr(parameter, name) for name in parts()[0]] if parts else [parameter]
        held += sum(tensor.nbytes for tensor in tensors)
    assert held <= size.whole <= held + 8 * sum(p.shape[0] for p in model.parameters())
    if scheme == "none":
        assert held == size.whole
        inside = sum(parameter.nbytes for parameter in layer_list(model)[1].parameters())
        assert size.rest == held - inside and inside <= len(layer_list(model)[1]) * size.layer


def test_twins_are_found_in_both_ways_of_declaring_them(folders, monkeypatch):
    """transformers 4 lists names, 5 maps them to their twins."""
    model = load_text_encoder(SPECS["t5"], folders["t5"], CPU, torch.float32).model
    found = tied_names(model)
    assert len(found) == 1 and set(*found.items()) == {"shared.weight", "encoder.embed_tokens.weight"}
    monkeypatch.setattr(type(model), "_tied_weights_keys", ["encoder.embed_tokens.weight"])
    listed = tied_names(model)
    assert set(*listed.items()) <= {"shared.weight", "encoder.embed_tokens.weight"} and len(listed) == 1


def test_forecast_of_flux2_devs_encoder(tmp_path: Path) -> None:
    """From the published dimensions; the help page gives these numbers."""
    sizes = {
        "model_type": "mistral", "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "sliding_window": None,
    }  # fmt: skip
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder" / "config.json").write_text(json.dumps(sizes))
    size = forecast_size(FAMILIES["flux2"].variant("flux2-dev").text_encoders[0], tmp_path, torch.bfloat16)
    attention, feed_forward, norms = 2 * (5120 * 4096 + 5120 * 1024), 3 * 5120 * 32768, 2 * 5120
    assert size.layer == 2 * (attention + feed_forward + norms)
    assert size.rest == 2 * 131072 * 5120 and size.whole == size.rest + 30 * size.layer
    assert 3.5 * GB < size.streamed_bytes() < 4 * GB and size.streamed_bytes(50) < 6 * GB < size.streamed_bytes(64)
