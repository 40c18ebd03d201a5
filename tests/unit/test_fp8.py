"""Weight-only float8 beside LoRA, on a tiny FLUX.2 transformer of diffusers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch._inductor.config as inductor
from devicebridge.patches import fp8
from devicebridge.patches.fp8 import KEPT, LORA, NOT_LINEAR, QUANTIZED, apply_fp8
from devicebridge.patches.lora import (
    assert_lora_intact,
    is_lora_name,
    lora_parameters,
    place_lora_with_base,
    resolve_targets,
)
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from diffusers import Flux2Transformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torchao.quantization import Float8Tensor, Float8WeightOnlyConfig, quantize_

# 3 mantissa bits: error variance step^2 / 12 with step 1/8, against the energy of a mantissa m in [1, 2), which is
# E[m^2] = 3 / (2 ln 2) when log-uniform: 32.2 dB. Uniform mantissas give 32.5, normal weights measure 32; hence 1 dB.
DB_EXPECTED = 10 * math.log10(3 / (2 * math.log(2)) / ((1 / 8) ** 2 / 12))
DB_TOLERANCE = 1.0


@dataclass(frozen=True)
class Family:
    """As much of a family as quantizing reads."""

    title: str = "FLUX.2"
    keep_full_precision: tuple[str, ...] = (
        "time_guidance_embed.*",
        "*modulation*",
        "x_embedder",
        "context_embedder",
        "norm_out",  # a container: what is inside it stays too
        "proj_out",
    )


TARGETS = ("*.to_q", "*.to_out.0", "*.to_qkv_mlp_proj", "single_transformer_blocks.*.attn.to_out")


def make_model(dtype: torch.dtype = torch.bfloat16) -> Flux2Transformer2DModel:
    torch.manual_seed(0)
    model = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=48,
        axes_dims_rope=(8, 8, 8, 8),
    )
    return model.to(dtype).requires_grad_(False)


def attach_lora(model: Flux2Transformer2DModel, dtype: torch.dtype = torch.float32, **options) -> None:
    torch.manual_seed(1)
    targets = resolve_targets(model, TARGETS)
    # Not zero at the start, so that every factor has a gradient in the first step.
    model.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options))
    for parameter in lora_parameters(model).values():
        parameter.data = parameter.data.to(dtype)


def make_inputs(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.zeros(1, 16, 4)
    ids[0, :, 1], ids[0, :, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return {
        "hidden_states": torch.randn(1, 16, 16, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, 6, 48, generator=generator).to(dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "guidance": torch.tensor([4.0], dtype=dtype),
        "img_ids": ids,
        "txt_ids": torch.zeros(1, 6, 4),
    }


def run(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return model(**make_inputs(dtype), return_dict=False)[0]


def train(model: nn.Module, num_steps: int) -> None:
    parameters = list(lora_parameters(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(num_steps):
        run(model).float().square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)
        optimizer.step()
        optimizer.zero_grad()


def contents(model: nn.Module) -> dict[str, bytes]:
    """Every weight, byte for byte; of a float8 weight the values and the scales."""
    found = {}
    for name, parameter in model.named_parameters():
        parts = {"": parameter.detach()}
        if isinstance(parameter, Float8Tensor):
            parts = {".qdata": parameter.qdata, ".scale": parameter.scale}
        found |= {name + part: t.contiguous().view(torch.uint8).numpy().tobytes() for part, t in parts.items()}
    return found


def hold(parameter: nn.Parameter) -> nn.Module:
    holder = nn.Module()
    holder.register_parameter("p", parameter)
    return holder


def signal_to_noise(exact: torch.Tensor, found: torch.Tensor) -> float:
    """dB."""
    exact, found = exact.double(), found.double()
    return 10 * math.log10((exact.square().sum() / (found - exact).square().sum()).item())


def test_unfiltered_quantize_freezes_lora_without_a_word():
    """Why apply_fp8 exists."""
    model = make_model()
    attach_lora(model)
    quantize_(model, Float8WeightOnlyConfig(set_inductor_config=False))
    caught = lora_parameters(model).values()
    assert caught and all(isinstance(p, Float8Tensor) and not p.requires_grad for p in caught)
    with pytest.raises(RuntimeError, match=r"8 of 8 LoRA weights cannot train: .* was quantized to Float8Tensor"):
        assert_lora_intact(model)
    for parameter in caught:
        parameter.requires_grad_(True)  # accepted, and of no use
    inputs = make_inputs()
    inputs["hidden_states"].requires_grad_(True)  # something must, or not even a backward would run
    model(**inputs, return_dict=False)[0].float().square().mean().backward()
    assert inputs["hidden_states"].grad is not None
    assert all(parameter.grad is None for parameter in caught)
    with pytest.raises(RuntimeError, match="was quantized to Float8Tensor"):
        assert_lora_intact(model)


@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"use_dora": True}], ids=str)
@pytest.mark.parametrize("lora_first", [False, True], ids=["quantize first", "LoRA first"])
def test_both_orders_train_lora_and_leave_the_base_alone(lora_first, options):
    model = make_model()
    if lora_first:
        attach_lora(model, **options)
    lora_before = {name: (id(p), p.dtype, contents(hold(p))) for name, p in lora_parameters(model).items()}
    handle = apply_fp8(model, Family())
    assert {n: (id(p), p.dtype, contents(hold(p))) for n, p in lora_parameters(model).items()} == lora_before
    if not lora_first:
        attach_lora(model, **options)
        assert type(model.transformer_blocks[0].attn.to_q).__name__ == "TorchaoLoraLinear"
    assert_lora_intact(model)
    assert handle.report.num_quantized == 14

    before = contents(model)
    train(model, num_steps=2)
    after = contents(model)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == set(lora_parameters(model))
    assert any(".qdata" in name for name in before)


def test_both_orders_give_the_same_losses():
    outputs = []
    for lora_first in (False, True):
        model = make_model()
        if lora_first:
            attach_lora(model)
        apply_fp8(model, Family())
        if not lora_first:
            attach_lora(model)
        train(model, num_steps=2)
        outputs.append(run(model).detach())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_the_report_accounts_for_every_layer_and_byte():
    model = make_model()
    attach_lora(model, use_dora=True)
    expected_before = sum(p.numel() * p.element_size() for p in model.parameters())
    report = apply_fp8(model, Family()).report
    groups = report.groups
    assert list(groups) == [QUANTIZED, LORA, KEPT, NOT_LINEAR]
    assert report.bytes_before == expected_before
    quantized = [model.get_submodule(name) for name in groups[QUANTIZED].names]
    assert all(isinstance(layer.weight, Float8Tensor) and not layer.weight.requires_grad for layer in quantized)
    # one byte a weight and a float32 scale a row
    expected_after = sum(layer.in_features * layer.out_features + 4 * layer.out_features for layer in quantized)
    assert groups[QUANTIZED].bytes_after == expected_after
    assert groups[QUANTIZED].bytes_before == sum(2 * layer.in_features * layer.out_features for layer in quantized)
    assert all(groups[r].bytes_before == groups[r].bytes_after for r in (LORA, KEPT, NOT_LINEAR))
    assert report.bytes_after == expected_before - groups[QUANTIZED].bytes_before + expected_after
    assert "transformer_blocks.0.attn.to_q.base_layer" in groups[QUANTIZED].names
    assert {"norm_out.linear", "proj_out", "x_embedder"} <= set(groups[KEPT].names)
    assert all(is_lora_name(name) for name in groups[LORA].names) and len(groups[LORA].names) == 12
    assert report.num_skipped == sum(len(groups[r].names) for r in (LORA, KEPT, NOT_LINEAR))
    assert "14 linears to float8" in report.summary()


def test_kept_layers_are_kept_under_a_wrapper_too():
    model = make_model()
    model.add_adapter(LoraConfig(r=2, target_modules=["proj_out", "x_embedder"]))
    report = apply_fp8(model, Family()).report
    assert {"proj_out.base_layer", "x_embedder.base_layer"} <= set(report.groups[KEPT].names)
    assert model.proj_out.base_layer.weight.dtype is torch.bfloat16


def test_noise_of_every_layer_type_is_that_of_three_mantissa_bits():
    model, exact = make_model(), make_model()
    report = apply_fp8(model, Family()).report
    torch.manual_seed(3)
    found = {}
    for name in report.groups[QUANTIZED].names:
        layer, reference = model.get_submodule(name), exact.get_submodule(name)
        x = torch.randn(64, layer.in_features)
        y = x @ layer.weight.dequantize().float().T
        found[name] = signal_to_noise(x @ reference.weight.float().T, y)
    assert all(abs(db - DB_EXPECTED) < DB_TOLERANCE for db in found.values()), found


def test_noise_of_the_whole_model_is_no_worse_than_that_of_one_layer():
    """Errors of the layers are independent and each is diluted by a residual stream that stays exact."""
    model, exact = make_model(torch.float32), make_model(torch.float32)
    apply_fp8(model, Family())
    with torch.no_grad():
        assert signal_to_noise(run(exact, torch.float32), run(model, torch.float32)) > DB_EXPECTED - DB_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_zeros_stay_zero(dtype):
    model = nn.Sequential(nn.Linear(32, 4, dtype=dtype).requires_grad_(False))
    model[0].weight[1] = 0.0
    model[0].bias.zero_()
    expected = model[0].weight.clone()
    apply_fp8(model, Family())
    found = model[0].weight.dequantize()
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found, expected, rtol=1 / 16, atol=1e-3)
    assert model(torch.ones(2, 32, dtype=dtype)).isfinite().all()


def test_a_large_range_within_a_row_survives():
    weight = torch.logspace(0, -4, 64).repeat(2, 1) * torch.tensor([[100.0], [1e-3]])
    model = nn.Sequential(nn.Linear(64, 2, bias=False))
    model[0].weight = nn.Parameter(weight.clone(), requires_grad=False)
    apply_fp8(model, Family())
    torch.testing.assert_close(model[0].weight.dequantize(), weight, rtol=1 / 16 + 1e-6, atol=0)


class TwoCards(nn.Module):
    """Two layers that may be on two cards; the activations travel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 16), nn.Linear(16, 8)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = layer(x.to(next(layer.parameters()).device)).tanh()
        return x


@pytest.mark.parametrize("lora_first", [False, True], ids=["quantize first", "LoRA first"])
def test_a_split_model_is_quantized_where_it_is_and_trains(lora_first):
    def quantized_with_lora(model: nn.Module) -> nn.Module:
        config = LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
        steps = [lambda: apply_fp8(model, Family()), lambda: inject_adapter_in_model(config, model)]
        for step in reversed(steps) if lora_first else steps:
            torch.manual_seed(1)
            step()
        return model

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        model(torch.linspace(-1, 1, 96).reshape(3, 32)).square().sum().backward()
        return {name: on_cpu(p.grad) for name, p in lora_parameters(model).items()}

    expected = gradients(quantized_with_lora(TwoCards()))
    with emulated_cards():
        model = TwoCards()
        model.first.to(CARDS[0])
        model.second.to(CARDS[1])
        quantized_with_lora(model)
        for layer, card in ((model.first, CARDS[0]), (model.second, CARDS[1])):
            weight = layer.base_layer.weight
            assert weight.device == weight.qdata.device == weight.scale.device == card
        assert place_lora_with_base(model) == 0
        torch.testing.assert_close(gradients(model), expected)


def test_settings_of_the_process_are_left_alone():
    with inductor.patch(coordinate_descent_tuning=False, force_fuse_int_mm_with_mul=False):
        precision = torch.get_float32_matmul_precision()
        apply_fp8(make_model(), Family())
        assert not inductor.coordinate_descent_tuning and not inductor.force_fuse_int_mm_with_mul
        assert torch.get_float32_matmul_precision() == precision


def test_a_frozen_lora_is_quantized_around_and_stays_frozen():
    model = make_model()
    attach_lora(model)
    for parameter in lora_parameters(model).values():
        parameter.requires_grad_(False)
    apply_fp8(model, Family())
    assert all(p.dtype is torch.float32 and not p.requires_grad for p in lora_parameters(model).values())


def test_removal_is_refused_with_a_way_out():
    handle = apply_fp8(make_model(), Family())
    with pytest.raises(RuntimeError, match=r'undo float8 on 14 layers.*load the model again with quantize = "none"'):
        handle.remove()


def test_a_second_quantization_is_refused():
    model = make_model()
    apply_fp8(model, Family())
    before = contents(model)
    with pytest.raises(ValueError, match=r"14 weights of this Flux2.* are quantized already .*Float8Tensor\)"):
        apply_fp8(model, Family())
    assert contents(model) == before


def test_a_float8_checkpoint_is_refused():
    model = make_model()
    layer = model.transformer_blocks[0].attn.to_q
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"to_q.weight: torch.float8_e4m3fn\); .*load a bfloat16 checkpoint"):
        apply_fp8(model, Family())


def test_a_family_that_keeps_everything_is_refused():
    with pytest.raises(ValueError, match=r"FLUX.2 keeps every linear of this Flux2Transformer2DModel"):
        apply_fp8(make_model(), Family(keep_full_precision=("*",)))


def test_an_old_torchao_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(fp8, "version", lambda package: "0.13.0")
    model = make_model()
    with pytest.raises(RuntimeError, match=r"needs torchao 0.16 or newer and found 0.13.0"):
        apply_fp8(model, Family())
    assert model.transformer_blocks[0].attn.to_q.weight.dtype is torch.bfloat16


def test_a_missing_torchao_is_refused(monkeypatch):
    def missing(package: str) -> str:
        raise fp8.PackageNotFoundError(package)

    monkeypatch.setattr(fp8, "version", missing)
    with pytest.raises(RuntimeError, match="none is installed"):
        apply_fp8(make_model(), Family())
