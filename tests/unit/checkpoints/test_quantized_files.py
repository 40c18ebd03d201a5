"""Checkpoints in 8 bits, against the same numbers written out in float32, which the plain path reads."""

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import CheckpointInfo, read_checkpoint
from devicebridge.checkpoints.header import TensorRecord
from devicebridge.checkpoints.load import load_transformer, make_empty_transformer
from devicebridge.checkpoints.quantized_files import dequantize
from devicebridge.families.registry import FAMILIES
from devicebridge.quantization import stored
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.quantize import SCHEMES, QuantizeSettings, describe_quantized, full_weight, is_wanted
from devicebridge.quantization.stored import make_convrot
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.gguf_files import pack, write_gguf
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY, stack_tensors
from devicebridge.tests.weight_files import assert_same_model, cpu
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.usefixtures("tiny_variants")
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
Tensors = dict[str, torch.Tensor]


def _round(weight: torch.Tensor, dtype: torch.dtype, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    amax = weight.abs().amax(1, keepdim=True) if per_row else weight.abs().max()
    scale = amax / LARGEST[dtype] * 1.03  # no scale of ours would be this one
    values = weight / scale
    return (values.round() if dtype is torch.int8 else values).to(dtype), scale


def _note(**fields: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)


@dataclasses.dataclass(frozen=True)
class Format:
    """How a file says it, for one weight and for the file."""

    dtype: torch.dtype
    per_row: bool
    scale_name: str
    note: str = ""  # of each layer
    marker: bool = False
    in_metadata: bool = False


FORMATS = {
    "fp8_scaled": Format(torch.float8_e4m3fn, False, "scale_weight", marker=True),
    "comfy_quant": Format(torch.float8_e4m3fn, False, "weight_scale", "float8_e4m3fn"),
    "comfy_quant rows": Format(torch.float8_e4m3fn, True, "weight_scale", "float8_e4m3fn"),
    "metadata": Format(torch.float8_e4m3fn, False, "weight_scale", "float8_e4m3fn", in_metadata=True),
    "e5m2": Format(torch.float8_e5m2, True, "weight_scale", "float8_e5m2"),
    "int8": Format(torch.int8, False, "weight_scale", "int8_tensorwise"),
    "int8 rows": Format(torch.int8, True, "weight_scale", "int8_tensorwise"),
    "no note": Format(torch.float8_e4m3fn, True, "weight_scale"),
}


def _write(file, tensors, how, prefix="", wanted=lambda name: True) -> Tensors:
    written: Tensors = {}
    meaning: Tensors = {}
    layers = {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or tensor.ndim != 2 or not wanted(name):
            written[prefix + name] = tensor.bfloat16()
            meaning[name] = written[prefix + name].float()
            continue
        values, scale = _round(tensor, how.dtype, how.per_row)
        meaning[name] = values.float() * scale
        written |= {prefix + name: values, f"{prefix}{layer}.{how.scale_name}": scale}
        written[f"{prefix}{layer}.{'scale_input' if how.marker else 'input_scale'}"] = torch.tensor(0.5)
        if how.note and how.in_metadata:
            layers[prefix + layer] = {"format": how.note}
        elif how.note:
            written[f"{prefix}{layer}.comfy_quant"] = _note(format=how.note, full_precision_matrix_mult=True)
    if how.marker:
        written[prefix + "scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})} if layers else None
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, file, metadata)
    return meaning


def _tensors(name: str, layout: str) -> Tensors:
    tensors = TINY[name].make_model().state_dict()
    return stack_tensors(FAMILIES[name], tensors) if layout == "original" else dict(tensors)


def _write_plain(file: Path, meaning: Tensors) -> CheckpointInfo:
    save_file({name: tensor.contiguous() for name, tensor in meaning.items()}, file)
    return read_checkpoint(file)


# Scales of rows are cut and turned with the layers that a family stacks; how a file notes scales is the same for all.
FILES = [(name, how) for name in TINY for how in FORMATS if name == "flux1" or how in ("comfy_quant rows", "int8 rows")]


@pytest.mark.parametrize(
    ("layout", "prefix", "dtype"),
    [
        ("original", "", torch.bfloat16),
        ("original", "model.diffusion_model.", torch.float32),
        ("diffusers", "", torch.bfloat16),
    ],
)
@pytest.mark.parametrize(("name", "how"), FILES)
def test_without_settings_it_is_weight_times_scale(name, how, layout, prefix, dtype, tmp_path):
    meaning = _write(tmp_path / "model.safetensors", _tensors(name, layout), FORMATS[how], prefix)
    info = read_checkpoint(tmp_path / "model.safetensors")
    assert (info.layout, info.family.name, info.variant and info.variant.name) == (layout, name, f"tiny-{name}")
    plain = _write_plain(tmp_path / "plain.safetensors", meaning)
    assert plain.quantized_types == {}
    num_linears = sum(len(r.shape) == 2 and n.endswith(".weight") for n, r in info.tensors.items())
    assert info.quantized_types == {str(FORMATS[how].dtype).removeprefix("torch."): num_linears}
    assert sum(info.quantized_types.values()) == num_linears > 20
    assert_same_model(load_transformer(info, cpu, dtype), load_transformer(plain, cpu, dtype))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_plain_casts_of_everything_have_the_scale_one(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    cast = {key: tensor.to(dtype) for key, tensor in _tensors(name, "original").items()}
    save_file(cast, tmp_path / "model.safetensors")
    info = read_checkpoint(tmp_path / "model.safetensors")
    assert sum(info.quantized_types.values()) == len(info.tensors)
    plain = _write_plain(tmp_path / "plain.safetensors", {key: tensor.float() for key, tensor in cast.items()})
    assert_same_model(load_transformer(info, cpu, torch.bfloat16), load_transformer(plain, cpu, torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "how", "scheme"),
    [(*file, scheme) for number, file in enumerate(FILES) for scheme in (SCHEMES[number % 2], SCHEMES[2 + number % 2])],
)
def test_a_layer_keeps_the_bytes_its_scheme_can_take(name: str, how: str, scheme: Any, tmp_path: Path) -> None:
    """Half of the layers are in 8 bits: those stay bit for bit or are dequantized, and all others are rounded."""
    names = iter(range(10**6))
    chosen = {key for key in _tensors(name, "original") if next(names) % 3}
    file = tmp_path / "model.safetensors"
    meaning = _write(file, _tensors(name, "original"), FORMATS[how], wanted=chosen.__contains__)
    info = read_checkpoint(file)
    plain = _write_plain(tmp_path / "plain.safetensors", meaning)
    exact = load_transformer(plain, cpu, torch.bfloat16)
    rounded = load_transformer(plain, cpu, torch.bfloat16)
    family, settings = FAMILIES[name], QuantizeSettings(scheme, rotation=16)
    apply_quantization(rounded, family, settings)
    model = load_transformer(info, cpu, torch.bfloat16, settings)
    num_taken = num_wanted = 0
    for fqn, module in model.named_modules():
        record = info.tensors.get(f"{fqn}.weight")
        if not is_wanted(module, fqn, family, settings) or record is None:
            continue
        num_wanted += 1
        stored, reference = module, rounded.get_submodule(fqn)
        if record.is_quantized and FORMATS[how].dtype is settings.stored_dtype:
            num_taken += 1
            assert stored.rotation is None and stored.scale.dtype is torch.float32
            values = stored.weight.float() * stored.scale
            assert torch.equal(values.bfloat16(), exact.get_submodule(fqn).weight), fqn
            assert torch.allclose(full_weight(module), exact.get_submodule(fqn).weight, rtol=2**-7, atol=0), fqn
        else:
            assert torch.equal(stored.weight.view(torch.uint8), reference.weight.view(torch.uint8)), fqn
            assert torch.equal(stored.scale, reference.scale), fqn
            assert (stored.rotation is None) == (reference.rotation is None), fqn
            assert not any(each.requires_grad for each in module.parameters()), fqn
        if module.bias is not None:
            assert torch.equal(module.bias, exact.get_submodule(fqn).bias)
    assert (num_taken > 3) == (FORMATS[how].dtype is settings.stored_dtype)
    assert num_taken < num_wanted
    assert describe_quantized(make_empty_transformer(info), family, settings, lambda n: torch.bfloat16)[1] == num_taken
    inputs = {
        k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in TINY[name].make_inputs().items()
    }
    with torch.no_grad():
        assert model(**inputs, return_dict=False)[0].isfinite().all()


def test_kept_bytes_reach_the_device_they_belong_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meaning = _write(tmp_path / "model.safetensors", _tensors("flux2", "original"), FORMATS["comfy_quant rows"])
    info = read_checkpoint(tmp_path / "model.safetensors")
    plain = load_transformer(_write_plain(tmp_path / "plain.safetensors", meaning), cpu, torch.bfloat16)

    def device_of(name: str) -> torch.device:
        return CARDS[1] if name.startswith("single_") else CARDS[0]

    with emulated_cards(2), caplog.at_level(logging.INFO):
        settings = QuantizeSettings("fp8-compute")
        model = load_transformer(info, device_of, torch.bfloat16, settings)
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            assert parameter.device == device_of(name), name
        for name, module in model.named_modules():
            if is_wanted(module, name, info.family, settings):
                values = on_cpu(module.weight).float() * on_cpu(module.scale)
                assert torch.equal(values.bfloat16(), plain.get_submodule(name).weight), name
    num_kept = sum(isinstance(module, FrozenLinear8) for module in model.modules())
    num_others = sum(info.quantized_types.values()) - num_kept
    said = [record.getMessage() for record in caplog.records if "kept as they are" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith(f"{num_kept} kept as they are, {num_others} dequantized") and num_others > 0


def test_shards_whose_scales_lie_in_another_file(tmp_path: Path) -> None:
    meaning = _write(tmp_path / "whole.safetensors", _tensors("wan", "original"), FORMATS["comfy_quant rows"])
    whole = load_file(tmp_path / "whole.safetensors")
    (tmp_path / "whole.safetensors").unlink()
    scales = {name: tensor for name, tensor in whole.items() if name.endswith(("_scale", "comfy_quant"))}
    save_file(scales, tmp_path / "x-00001-of-00002.safetensors")
    save_file({n: t for n, t in whole.items() if n not in scales}, tmp_path / "x-00002-of-00002.safetensors")
    model = load_transformer(read_checkpoint(tmp_path), cpu, torch.bfloat16)
    plain = _write_plain(tmp_path / "plain.safetensors", meaning)
    assert_same_model(model, load_transformer(plain, cpu, torch.bfloat16))


def test_dequantizing_in_pieces_is_dequantizing_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record = TensorRecord(Path(), "x", (10, 6, 2, 1), "F8_E5M2")
    values = torch.randn(10, 6, 2, 1).to(torch.float8_e5m2)
    scale = torch.rand(10) + 0.1
    expected = (values.float() * scale.view(10, 1, 1, 1)).half()
    monkeypatch.setattr(stored, "_PIECE", 36)
    assert torch.equal(dequantize(values, scale, record, torch.float16), expected)
    assert torch.equal(dequantize(values[:, 0, 0, 0], scale, record, torch.float16), expected[:, 0, 0, 0])
    assert torch.equal(dequantize(values, None, record, torch.float32), values.float())


def _convrot(block: int) -> torch.Tensor:
    """ComfyUI's matrix, written out from its definition."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < block:
        rows = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]
        matrix = torch.cat([torch.cat([sign * matrix for sign in row], 1) for row in rows])
    return matrix / block**0.5


def test_int8_rotated_by_comfyui_is_rotated_back_and_rounded_again(tmp_path: Path) -> None:
    for block in (4, 16, 64, 256):
        assert torch.equal(make_convrot(block).double(), _convrot(block))
    _write(tmp_path / "model.safetensors", _tensors("wan", "original"), FORMATS["int8 rows"])
    written = load_file(tmp_path / "model.safetensors")
    layer, name = "blocks.0.ffn.0", "blocks.0.ffn.net.0.proj"
    written[f"{layer}.comfy_quant"] = _note(format="int8_tensorwise", convrot=True, convrot_groupsize=16)
    save_file(written, tmp_path / "model.safetensors")
    info = read_checkpoint(tmp_path / "model.safetensors")
    exact = load_transformer(info, cpu, torch.float32).get_submodule(name)
    plain = (written[f"{layer}.weight"] * written[f"{layer}.weight_scale"]).double()
    turned = torch.cat([piece @ _convrot(16).t() for piece in plain.split(16, 1)], 1)
    assert torch.allclose(exact.weight.double(), turned, atol=1e-6)
    settings = QuantizeSettings("int8")
    rounded = load_transformer(info, cpu, torch.float32, settings)
    expected = FrozenLinear8.from_linear(exact, settings.scheme)
    assert torch.equal(rounded.get_submodule(name).weight, expected.weight)


@pytest.mark.parametrize("name", ["flux1", "wan"])
def test_a_gguf_file_is_the_model_that_its_plain_weights_are(name: str, tmp_path: Path) -> None:
    """Under its maker's names, so that rows of q, k and v are cut from one packed matrix, and halves change places."""
    written, meaning = {}, {}
    for number, (key, tensor) in enumerate(_tensors(name, "original").items()):
        kind = ("Q8_0", "Q4_1")[number // 2 % 2]
        written[f"model.diffusion_model.{key}"], meaning[key] = pack(key, tensor, kind, number)
    info = read_checkpoint(write_gguf(tmp_path / "model.gguf", written))
    assert info.family.name == name and {"Q8_0", "Q4_1"} == info.quantized_types.keys()
    plain = _write_plain(tmp_path / "plain.safetensors", meaning)
    exact = load_transformer(plain, cpu, torch.float32)
    assert_same_model(load_transformer(info, cpu, torch.float32), exact)
    model = load_transformer(info, cpu, torch.float32, QuantizeSettings("stored"))
    assert sum(isinstance(module, FrozenLinear8) for module in model.modules()) > 5
    for fqn, module in exact.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(full_weight(model.get_submodule(fqn)), module.weight), fqn
    with torch.no_grad():
        found, expected = (each(**TINY[name].make_inputs(), return_dict=False)[0] for each in (model, exact))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


QKV = "blocks.0.self_attn.q"


def _change(**changes: torch.Tensor | None) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for leaf, tensor in changes.items():
            if tensor is None:
                del tensors[f"{QKV}.{leaf}"]
            else:
                tensors[f"{QKV}.{leaf}"] = tensor

    return change


def _weight(tensors: Tensors, dtype: torch.dtype) -> None:
    tensors[f"{QKV}.weight"] = tensors[f"{QKV}.weight"].to(torch.float32).to(dtype)


NUM = 48
BAD: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "no weight": (_change(weight=None), rf"has the scale {QKV}.weight_scale, but no {QKV}.weight that it belongs to"),
    "two scales": (
        _change(scale_weight=torch.ones(())),
        rf"two scales for {QKV}.weight, {QKV}.\w+ and {QKV}.\w+; which one is meant is not known",
    ),
    "odd size": (_change(weight_scale=torch.ones(7)), rf"the scale {QKV}.weight_scale is \[7\] for a weight of \["),
    "noted and no scale": (_change(weight_scale=None), rf"says that {QKV}.weight is float8_e4m3fn, but has no scale"),
    "not in 8 bits": (lambda t: _weight(t, torch.bfloat16), rf"that {QKV}.weight is float8_e4m3fn, and it is BF16"),
    "nvfp4": (_change(comfy_quant=_note(format="nvfp4")), rf"quantized weights in nvfp4 \({QKV}\); .*or the bf16 file"),
    "scales in bytes": (
        _change(weight_scale=torch.ones(NUM, dtype=torch.uint8)), "mxfp8 or another format with scales in U8"
    ),
    "no format": (_change(comfy_quant=_note(full_precision_matrix_mult=True)), "which names no format"),
    "no json": (_change(comfy_quant=torch.zeros(4, dtype=torch.uint8)), f"{QKV}.comfy_quant is no JSON"),
    "int8 without note": (
        lambda t: (_weight(t, torch.int8), t.pop(f"{QKV}.comfy_quant"))[0],
        rf"the int8 tensor {QKV}.weight and nothing that names its format",
    ),
    "int8 without scale": (
        lambda t: (_weight(t, torch.int8), t.pop(f"{QKV}.comfy_quant"), t.pop(f"{QKV}.weight_scale"))[0],
        rf"the int8 tensor {QKV}.weight and no scale",
    ),
    "rotated oddly": (
        lambda t: (
            _weight(t, torch.int8),
            _change(comfy_quant=_note(format="int8_tensorwise", convrot=True, convrot_groupsize=32))(t),
        )[0],
        "is rotated in blocks of 32; blocks are powers of 4",
    ),
    "scale of a plain weight": (
        lambda t: (_weight(t, torch.bfloat16), t.pop(f"{QKV}.comfy_quant"))[0],
        rf"has the scale {QKV}.weight_scale, but {QKV}.weight is BF16 and not in 8 bits",
    ),
    "gptq": (_change(qweight=torch.zeros(4, dtype=torch.int32)), "quantized weights of GPTQ or AWQ"),
    "svdquant": (_change(wscales=torch.zeros(4)), "quantized weights of SVDQuant"),
    "bitsandbytes": (_change(absmax=torch.zeros(4)), "quantized weights of bitsandbytes"),
    "block float8": (_change(weight_scale_inv=torch.zeros(4)), "float8 with a scale per block"),
}  # fmt: skip


def _bad_file(folder: Path, change: Callable[[Tensors], None]) -> Path:
    file = folder / "model.safetensors"
    _write(file, _tensors("wan", "original"), FORMATS["comfy_quant rows"])
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("kind", BAD)
def test_what_does_not_add_up_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    change, message = BAD[kind]
    with pytest.raises(ValueError, match=message):
        read_checkpoint(_bad_file(tmp_path, change))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_stops_before_a_weight_is_read(value, tmp_path, caplog):
    def change(tensors: Tensors) -> None:
        tensors[f"{QKV}.weight_scale"][3] = value

    info = read_checkpoint(_bad_file(tmp_path, change))
    caplog.set_level(logging.INFO)
    with pytest.raises(ValueError, match=rf"the scale {QKV}.weight_scale holds {value}; scales are positive"):
        load_transformer(info, cpu, torch.bfloat16)
    assert not [record for record in caplog.records if "reading" in record.getMessage()]


def test_damaged_and_contradicting_metadata(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    _write(file, _tensors("wan", "original"), FORMATS["comfy_quant rows"])
    tensors = load_file(file)
    for text in ("{", "[]", '{"layers": 3}'):
        save_file(tensors, file, {"_quantization_metadata": text})
        with pytest.raises(ValueError, match="model.safetensors: its _quantization_metadata"):
            read_checkpoint(file)
    save_file(tensors, file, {"_quantization_metadata": json.dumps({"layers": {QKV: {"format": "float8_e5m2"}}})})
    with pytest.raises(ValueError, match=f"float8_e5m2.*of {QKV} in its header and .*float8_e4m3fn.* in"):
        read_checkpoint(file)


def test_metadata_may_name_layers_without_the_prefix(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    _write(file, _tensors("wan", "original"), FORMATS["int8"], "model.diffusion_model.")
    tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("comfy_quant")}
    prefix = "model.diffusion_model."
    layers = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype is torch.int8]
    for cut in (0, len(prefix)):
        noted = {name[cut:]: {"format": "int8_tensorwise"} for name in layers}
        other = {"text_encoders.t5.block": {"format": "nvfp4"}}  # a bundled encoder is not our business
        text = json.dumps({"format_version": "1.0", "layers": noted | other})
        save_file(tensors, file, {"_quantization_metadata": text})
        assert read_checkpoint(file).quantized_types == {"int8": len(layers)}
