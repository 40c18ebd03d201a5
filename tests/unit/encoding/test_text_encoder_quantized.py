"""Text encoders in 8 bits: what is rounded, how well it works, and that no more than a layer is ever in full; and where
encoders run: what may be written, what is picked and why, and that the forecast holds."""

import dataclasses
import gc
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from devicebridge.encoding import text_place, text_weights
from devicebridge.encoding.store import CacheStore
from devicebridge.encoding.text_encoder import TextEncoder, check_encoder, load_text_encoder
from devicebridge.encoding.text_place import (
    TextPlace,
    check_text_device,
    forecast_size,
    parse_text_device,
    plan_text_place,
    text_device_on,
)
from devicebridge.encoding.text_weights import TextScheme, check_scheme, is_rounded, layer_list, tied_names
from devicebridge.events import EventLog
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import TextEncoderSpec
from devicebridge.jobs.encode_job import cache_job
from devicebridge.jobs.job import check_job
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.tests.emulated import CARDS, emulated_cards, live_bytes
from devicebridge.tests.encoding import encode_captions
from devicebridge.tests.noise import decibels
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.tests.toy_encoders import copy_parts, save_each
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

LENGTH = 64
CAPTIONS = ("a cat", "An old ship at sea, painted in oil.", "x" * 200)
CPU = torch.device("cpu")


def _shortened(spec: TextEncoderSpec, **changes: Any) -> TextEncoderSpec:
    """A family's own spec for the tiny folders, which hold one encoder each."""
    names = {"folder": "text_encoder", "tokenizer_folder": "tokenizer", "max_length": LENGTH}
    return dataclasses.replace(spec, **names, **changes)


_CLIP, _T5 = FAMILIES["flux1"].variants[0].text_encoders
SPECS = {
    "mistral3": _shortened(
        FAMILIES["flux2"].variant("flux2-dev").text_encoders[0], layers=(1, 2, 3), system_prompt="Eh",
    ),
    "qwen3": _shortened(FAMILIES["flux2"].variant("flux2-klein-4b").text_encoders[0], layers=(1, 2, 3)),
    "t5": _shortened(_T5), "umt5": _shortened(FAMILIES["wan"].variants[0].text_encoders[0]), "clip": _shortened(_CLIP),
}  # fmt: skip
ROUNDED = [kind for kind, spec in SPECS.items() if "*" not in spec.keep_full_precision]
SCHEMES: tuple[TextScheme, ...] = ("int8", "fp8")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_each(tmp_path_factory.mktemp("encoders"), SPECS, max_length=LENGTH)


def _load(folders, kind, scheme, dtype=torch.float32, **changes):
    return load_text_encoder(dataclasses.replace(SPECS[kind], **changes), folders[kind], CPU, dtype, scheme)


def _int8_step(weight: np.ndarray) -> np.ndarray:
    """A row's largest value is 127 steps."""
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    return np.broadcast_to(step, weight.shape)


def _fp8_step(weight: np.ndarray) -> np.ndarray:
    """The largest value of a row is 448; 3 bits of mantissa, and below 2**-6 steps of 2**-9."""
    scale = np.abs(weight).max(axis=1, keepdims=True) / 448
    _, exponent = np.frexp(weight / scale)  # of a mantissa in 0.5 .. 1
    return 2.0 ** np.maximum(exponent - 4, -9) * scale


_STEP = {"int8": _int8_step, "fp8": _fp8_step}


def _write_out(encoder: TextEncoder, found: TextEncoder, scheme: TextScheme) -> float:
    """Give `encoder` the weights that `found` holds in 8 bits; returns the sum of noise over signal of its linears.
    Each must be a multiple of its step, and the nearest one."""
    total = 0.0
    for name, module in encoder.model.named_modules():
        if is_rounded(module, name, encoder.spec.keep_full_precision):
            exact = module.weight.detach().double().numpy()
            held = found.model.get_submodule(name).dequantize()
            rounded, step = held.double().numpy(), _STEP[scheme](exact)
            assert np.abs(exact - rounded).max() > 0, name
            assert (np.abs(exact - rounded) <= 0.5 * step * (1 + 1e-4)).all(), name
            assert np.abs(rounded / step - np.rint(rounded / step)).max() < 1e-3, name
            total += float(np.square(exact - rounded).sum() / np.square(exact).sum())
            module.weight.data = held
    return total


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", SPECS)
def test_states_are_those_of_the_rounded_weights_and_no_noisier_than_these(folders, kind, scheme):
    """Two bounds. Against an encoder with the nearest weights of the 8-bit grids above, written out in float32, only
    float32's own rounding is left: 100 dB and more. Against the exact encoder: each linear adds noise of its own,
    independent of the others', by its weights' noise over their signal. Residual sums and norms behind it do not raise
    noise over signal, so that all of it together cannot exceed the sum. For 24 linears of float8, 31.5 dB each, that is
    17.7 dB; for int8 of these widths about 30."""
    kept = () if kind == "clip" else SPECS[kind].keep_full_precision  # CLIP too, though its family keeps it exact
    exact, written = (_load(folders, kind, "none", keep_full_precision=kept) for _ in range(2))
    found = _load(folders, kind, scheme, keep_full_precision=kept)
    bound_db = -10 * math.log10(_write_out(written, found, scheme))
    for caption in CAPTIONS:
        assert decibels(written.encode_batch([caption])[0], found.encode_batch([caption])[0]) > 100
        assert decibels(exact.encode_batch([caption])[0], found.encode_batch([caption])[0]) > bound_db


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ROUNDED)
def test_linears_are_rounded_and_nothing_else(folders: dict[str, Path], kind: str, scheme: TextScheme) -> None:
    model = _load(folders, kind, scheme, torch.bfloat16).model
    rounded = [f"{name}.weight" for name, each in model.named_modules() if isinstance(each, FrozenLinear8)]
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    kept = [name for name in linears if name.endswith(".wo")]
    assert bool(kept) == kind.endswith("t5")
    assert rounded == [f"{name}.weight" for name in linears if name not in kept] and len(rounded) >= 21
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    held = {parameter.dtype for name, parameter in model.named_parameters() if name not in rounded}
    assert held == {torch.bfloat16}


@pytest.mark.parametrize("left_out", ["shared.weight", "encoder.embed_tokens.weight", None])
def test_the_embedding_is_found_under_either_name(folders, tmp_path, left_out):
    folder, tensors = copy_parts(folders["t5"], tmp_path)
    (embedding,) = (tensors.pop(name) for name in ("shared.weight", "encoder.embed_tokens.weight") if name in tensors)
    names = {"shared.weight", "encoder.embed_tokens.weight"} - {left_out}
    save_file({**tensors, **{name: embedding.clone() for name in names}}, folder / "text_encoder/model.safetensors")
    expected = _load(folders, "t5", "int8")
    found = load_text_encoder(SPECS["t5"], folder, CPU, torch.float32, "int8")
    assert torch.equal(*(each.encode_batch(["a cat"])[0] for each in (expected, found)))
    assert found.model.shared.weight is found.model.encoder.embed_tokens.weight  # type: ignore[union-attr]


class _Peak(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, live_bytes(CARDS[0]))
        return out


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ROUNDED)
def test_a_card_never_holds_more_than_the_result_and_the_rounding_of_one_linear(folders, kind, scheme):
    """Rounding a bfloat16 linear takes 2 bytes a weight, and for a moment float32 copies of 12 bytes."""
    gc.collect()
    with emulated_cards(1):
        with _Peak() as peak:
            encoder = load_text_encoder(SPECS[kind], folders[kind], CARDS[0], torch.bfloat16, scheme)
        held = live_bytes(CARDS[0])
        assert held == sum(each.nbytes for each in (*encoder.model.parameters(), *encoder.model.buffers()))
        largest = max(module.weight.numel() for module in encoder.model.modules() if isinstance(module, nn.Linear))
        assert held < peak.bytes <= held + 14 * largest


def _encode(folder: Path, store: CacheStore, device: torch.device = CPU, **options: Any) -> dict[str, str]:
    return encode_captions(CAPTIONS, (SPECS[folder.name],), folder, device, torch.float32, store, **options)


def test_an_exact_encoder_keeps_its_entries_whatever_the_scheme(folders: dict[str, Path], tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    keys = _encode(folders["clip"], store)
    assert _encode(folders["clip"], store, quantize="fp8") == keys


def test_a_job_encodes_in_the_scheme_it_names(tmp_path: Path) -> None:
    plan = check_job(make_tiny_job(tmp_path, cache={"text_quantize": "int8", "dtype": "bfloat16"}))
    with EventLog(tmp_path / "run", None, tensorboard=False) as events:
        data, _ = cache_job(plan, events)
    spec = plan.variant.text_encoders[0]
    caption = plan.samples[0].caption
    expected = load_text_encoder(spec, tmp_path / "model", CPU, torch.bfloat16, "int8").encode_batch([caption])[0]
    entry = data.store.get(data.samples[0].text_keys[0][0])
    assert entry is not None and torch.equal(entry[spec.output], expected)


def test_a_device_without_float8_is_told_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scheme("fp8", CPU)
    monkeypatch.setattr(text_weights, "has_float8", lambda device: False)
    check_scheme("int8", CPU)
    with pytest.raises(ValueError, match='"fp8" was requested, but cpu cannot convert .* use "int8"'):
        check_scheme("fp8", CPU)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("scheme", ["none", "int8"])
@pytest.mark.parametrize("kind", ["qwen3", "t5", "clip"])
def test_encoders_in_8_bits_already_are_refused_with_what_works(folders, tmp_path, kind, scheme, dtype):
    folder, tensors = copy_parts(folders[kind], tmp_path)
    name = next(name for name in sorted(tensors) if "q" in name)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "text_encoder" / "model.safetensors")
    message = r"model.safetensors is in 8 bits already \(.*q.* is (F8_E4M3|I8)\); use one in bfloat16.*text_quantize"
    with pytest.raises(ValueError, match=message):
        load_text_encoder(SPECS[kind], folder, CPU, torch.float32, scheme)
    with pytest.raises(ValueError, match=message):
        check_encoder(SPECS[kind], folder, None)


def test_a_single_file_and_a_quantized_config_are_refused_with_what_works(folders, tmp_path):
    single = folders["t5"] / "text_encoder" / "model.safetensors"
    with pytest.raises(ValueError, match="a single file without config and tokenizer; .*bfloat16.*text_quantize"):
        check_text_device("cpu", (SPECS["t5"],), single)
    with pytest.raises(ValueError, match="a single file"):
        check_job(make_tiny_job(tmp_path, cache={"text_encoders": str(single)}))
    folder, tensors = copy_parts(folders["t5"], tmp_path / "copy")
    save_file(tensors, folder / "text_encoder" / "model.safetensors")
    config = folder / "text_encoder" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "x"}}))
    with pytest.raises(ValueError, match="is quantized; use one in bfloat16.*text_quantize"):
        load_text_encoder(SPECS["t5"], folder, CPU, torch.float32, "int8")


GB = 10**9
HUGE = 10**15


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
    assert parse_text_device("cpu") == ("resident", CPU)
    assert parse_text_device(CPU) == ("resident", CPU)
    assert parse_text_device("stream") == ("stream", None)
    assert parse_text_device(" auto ") == (None, None)
    with emulated_cards(2):
        assert parse_text_device("lazy:1") == ("resident", CARDS[1])
        assert parse_text_device("stream:lazy:1") == ("stream", CARDS[1])
        assert parse_text_device("auto:lazy") == (None, CARDS[0])


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
    with pytest.raises(ValueError, match='text_quantize = "int8".*streamed.*"none"'):
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
