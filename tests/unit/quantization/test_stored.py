"""Frozen linears that keep what their file has: the numbers, bytes and gradients of the plain weights it means."""

from typing import Any, cast

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from devicebridge.patches.lora_linear import apply_fused, fit_loha
from devicebridge.quantization import eight_bit, stored
from devicebridge.quantization.eight_bit import make_rotation
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.quantize import (
    QUANTIZED,
    FileFormat,
    QuantizeSettings,
    Stored8,
    auto_schemes,
    describe_quantized,
    full_weight,
    is_wanted,
    sort_modules,
    take_stored,
)
from devicebridge.quantization.stored import ROWS, make_convrot
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.gguf_files import KINDS, meaning, random_blocks
from peft import LoHaConfig, LoraConfig, inject_adapter_in_model
from torch import nn
from torch.nn import functional as F

N, K = 48, 512
FORMATS = (*KINDS, "float8_e4m3fn", "float8_e5m2", "int8", "int8 convrot", "int8 rotated")
SETTINGS = QuantizeSettings("stored")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.proj = nn.ModuleList([nn.Linear(K, N)]), nn.Linear(N, 8)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(torch.tanh(self.blocks[0](x)))


FAMILY: ModelFamily = FAMILIES["wan"]  # whose list is called blocks


def _make(form: str) -> tuple[Stored8, torch.Tensor]:
    """A weight as a file of this format has it, and what it means. [N, K]"""
    if form in KINDS:
        data = random_blocks(form, (N, K))
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(N, -1)
        return Stored8(values, torch.empty(N, 0), FileFormat(torch.uint8, packing=form)), meaning(form, data, (N, K))
    torch.manual_seed(1)
    kind, _, how = form.partition(" ")
    dtype = getattr(torch, kind)
    scale, values = torch.rand(N, 1) / 50 + 0.01, torch.randn(N, K) * (20 if dtype is torch.int8 else 4)
    values = (values.round() if dtype is torch.int8 else values).to(dtype)
    plain = values.float() * scale
    if not how:
        return Stored8(values, scale, FileFormat(dtype)), plain
    matrix = make_convrot(64) if how == "convrot" else make_rotation(64)
    plain = plain @ torch.block_diag(*[matrix] * (K // 64)).T
    return Stored8(values, scale, FileFormat(dtype, 64, how == "convrot")), plain


def _taken(form: str) -> tuple[Net, Net]:
    """A net that keeps the weight as it is stored, and one that has what it means."""
    (given, plain), kept, exact = _make(form), Net(), Net()
    exact.blocks[0].weight = nn.Parameter(plain, requires_grad=False)
    linear = cast(nn.Linear, kept.blocks[0])
    linear.file_format = given.form  # type: ignore[assignment]
    assert is_wanted(linear, "blocks.0", FAMILY, SETTINGS) and not is_wanted(kept.proj, "proj", FAMILY, SETTINGS)
    kept.blocks[0] = take_stored("blocks.0", linear, given, torch.float32, SETTINGS)
    return kept, exact


def _with_lora(net: Net, **options: Any) -> dict[str, torch.Tensor]:
    """The trained weights by name, of equal values for every net."""
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["blocks.0"], init_lora_weights=False, **options)
    torch.manual_seed(2)
    inject_adapter_in_model(config, net)
    apply_fused(net)
    return {name: each for name, each in net.named_parameters() if each.requires_grad}


@pytest.mark.parametrize("form", FORMATS)
def test_forward_and_gradients_are_those_of_the_plain_weight(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the weight is made plain in pieces, of rows forwards and of columns backwards."""
    kept, exact = _taken(form)
    layer = cast(FrozenLinear8, kept.blocks[0])
    atol = 0 if layer.rotation is None else 1e-6
    assert torch.allclose(full_weight(layer), exact.blocks[0].weight, rtol=0, atol=atol)
    monkeypatch.setattr(eight_bit, "_PIECE", 256 * 20)
    monkeypatch.setattr(stored, "_PIECE", K * 3)
    trained, expected = _with_lora(kept), _with_lora(exact)
    assert trained.keys() == expected.keys() and len(trained) == 2
    assert all(each.dtype is torch.float32 for each in trained.values())
    x = torch.randn(2, 20, K)
    results = []
    for net in (kept, exact):
        own = x.clone().requires_grad_()
        out = net(own)
        out.square().sum().backward()
        results.append((out, own.grad))
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.detach().abs().max()))
    for name, each in expected.items():
        assert each.grad.abs().max() > 0
        assert torch.allclose(trained[name].grad, each.grad, rtol=1e-4, atol=1e-5 * float(each.grad.abs().max())), name


def test_products_of_pieces_begin_where_cards_are_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """At multiples of 16 columns; CUDA's products are several times as slow at others."""
    monkeypatch.setattr(eight_bit, "_PIECE", 256 * 37)
    linear, widths = F.linear, list[int]()

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        widths.append(weight.shape[0])
        return linear(x, weight)

    monkeypatch.setattr(F, "linear", noted)
    x, weight, scale = torch.randn(3, 256), torch.ones(100, 256, dtype=torch.int8), torch.ones(100, 1)
    assert torch.equal(eight_bit.linear8(x, weight, scale, None, None, ROWS), linear(x, weight.float()))
    assert widths == [32, 32, 32, 4]


@pytest.mark.parametrize("form", ["Q4_K", "int8 convrot"])
def test_a_layer_keeps_its_bytes_whatever_moves_it_and_tells_their_number(form: str) -> None:
    given, _ = _make(form)
    kept, _ = _taken(form)
    layer, linear = kept.blocks[0].to(torch.bfloat16), nn.Linear(K, N, device="meta")
    assert layer.weight.dtype is given.weight.dtype and torch.equal(layer.weight, given.weight)
    assert (layer.in_features, layer.out_features) == (K, N)
    assert layer.dequantize().dtype is torch.bfloat16
    linear.file_format = given.form  # type: ignore[assignment]
    net, held = Net(), [layer.weight, *layer.buffers()]
    net.blocks[0] = linear
    groups = sort_modules(net, FAMILY, SETTINGS, lambda name: torch.float32)
    assert groups[QUANTIZED]["blocks.0"][1] == sum(each.nbytes for each in held) + 4 * N


def test_dora_and_what_is_no_number() -> None:
    kept, exact = _taken("Q6_K")
    for net in (kept, exact):
        _with_lora(net, use_dora=True)
    x = torch.randn(5, K)
    assert torch.allclose(kept(x), exact(x), atol=1e-5)
    with pytest.raises(RuntimeError, match="uint8"):  # what some model casts to the type of the weight
        kept.blocks[0].base_layer(x.to(torch.uint8))


@pytest.mark.parametrize("form", [*KINDS, "float8_e4m3fn", "float8_e5m2"])
def test_scales_and_numbers_that_are_none_are_refused_by_the_layers_name(form: str) -> None:
    for bits in (0x7C00, 0x7E00) if form in KINDS else (0x7F, 0xFF):  # infinity and NaN, or NaN twice
        given, _ = _make(form)
        if form in KINDS:
            start = KINDS[form].halves[-1]
            given.weight[7, start : start + 2] = torch.tensor([bits & 255, bits >> 8])
        else:
            given.weight.view(torch.uint8)[7, 9] = bits
        linear = Net().blocks[0]
        linear.file_format = given.form  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"blocks\.0"):
            take_stored("blocks.0", linear, given, torch.float32, SETTINGS)  # type: ignore[arg-type]


def test_a_model_without_quantized_linears_is_refused() -> None:
    with pytest.raises(ValueError, match=r'quantize = "stored" keeps .* this file has none in its blocks; use "auto" '):
        describe_quantized(Net(), FAMILY, SETTINGS, lambda name: torch.float32)


def test_int8_that_comfyui_has_rotated_is_multiplied_in_8_bits_as_it_is() -> None:
    """The noise of rounding x to 8 bits, beside products with the plain weight."""
    given, plain = _make("int8 convrot")
    net, settings = Net(), QuantizeSettings("int8-compute")
    layer = take_stored("blocks.0", net.blocks[0], given, torch.float32, settings)  # type: ignore[arg-type]
    assert isinstance(layer, FrozenLinear8) and not layer.packing and len(layer.rotation) == 64
    assert layer.weight.data_ptr() == given.weight.data_ptr()
    x = torch.randn(64, K)
    x[:, 3] *= 30  # an outlier, which rotation spreads
    exact = x @ plain.T + layer.bias
    assert (layer(x) - exact).norm() < 0.02 * exact.norm()
    assert torch.allclose(layer.dequantize(), plain, atol=1e-5)


def test_auto_rounds_nothing_again_where_it_can() -> None:
    able: Any = ["fp8-compute", "int8-compute", "fp8", "int8"]
    assert auto_schemes({}, able) == able
    assert auto_schemes({"Q4_K": 90, "Q6_K": 10}, able) == ["stored"]
    assert auto_schemes({"int8": 5}, able) == ["int8-compute", "stored"]
    assert auto_schemes({"float8_e4m3fn": 5}, able) == ["fp8-compute", "stored"]
    assert auto_schemes({"float8_e4m3fn": 5}, able[1:]) == ["int8-compute", "stored"]
    assert auto_schemes({"float8_e5m2": 5}, able[2:]) == ["stored"]
    assert LoraSettings().dtype and ROWS not in KINDS


def test_a_loha_of_packed_weights_is_drawn_in_float32_and_is_on_their_card() -> None:
    kept, _ = _taken("Q4_K")
    with emulated_cards():
        kept.blocks[0].to(CARDS[1]).to(torch.bfloat16)
        inject_adapter_in_model(LoHaConfig(r=2, alpha=2, target_modules=["blocks.0"]), kept)
        fit_loha([kept.blocks[0]], "default", 2)
        drawn = kept.blocks[0].hada_w1_b["default"]
        assert drawn.device == CARDS[1] and drawn.shape == (2, K)
        assert not torch.equal(on_cpu(drawn), on_cpu(drawn).bfloat16().float())
