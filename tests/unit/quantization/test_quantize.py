"""Whole models in 8 bits, then with LoRA: every scheme, on one card and on several.

The arithmetic of one layer is in test_stored.py and test_eight_bit.py. Net is a small model whose forward, with
LoRA, is written out again here in float32; "tiny" are the families' own classes with random weights.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.placement import block_names, plan_manual
from devicebridge.patches.lora import lora_parameters
from devicebridge.quantization.eight_bit import make_rotation, rotate
from devicebridge.quantization.frozen_linear import FrozenLinear8, refuse_merge
from devicebridge.quantization.quantize import (
    KEPT,
    NOT_LINEAR,
    QUANTIZED,
    SCHEMES,
    FileFormat,
    Quantizer,
    QuantizeSettings,
    Stored8,
    full_weight,
    is_taken,
    refusal,
    stored_bytes,
    total_bytes,
)
from devicebridge.quantization.stored import ROWS
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.noise import decibels
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

VARIANTS = {
    "fp8": QuantizeSettings("fp8"), "int8": QuantizeSettings("int8"), "fp8-compute": QuantizeSettings("fp8-compute"),
    "int8-compute": QuantizeSettings("int8-compute", rotation=0),
    "int8-compute rotated": QuantizeSettings("int8-compute"),
}  # fmt: skip
EVERY_VARIANT = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
BY_NAME = {"ids": lambda settings: f"{settings.scheme} {settings.rotation}"}
# Energy a float8 factor loses: error uniform over a step of 1/8 of a mantissa m in [1, 2), E[m^2] = 3 / (2 ln 2) when
# log-uniform: 32.2 dB. Normal and uniform values fill binades unevenly, which moves that by less than 1 dB.
FLOAT8_LOSS = (1 / 8) ** 2 / 12 / (3 / (2 * math.log(2)))
TOLERANCE_DB = 1.0


@dataclass(frozen=True)
class Family:
    """As much of a family as quantizing reads."""

    title: str = "Net"
    keep_full_precision: tuple[str, ...] = ("proj_out",)


class Net(nn.Module):
    """Two linears to quantize (the second without a bias, and of a width that 64 does not divide), one to keep."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 96), nn.LayerNorm(96)
        self.second, self.proj_out = nn.Linear(96, 64, bias=False), nn.Linear(64, 32)
        self.to(dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj_out(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))


TARGETS = ("first", "second")
RANK, ALPHA = 4, 6


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored_weight(layer: nn.Module) -> torch.Tensor:
    """The weight a layer holds, in float32, from its plain tensors: values, scales, rotation. [N, K]"""
    weight: Any = layer.weight
    if not isinstance(layer, FrozenLinear8):
        return weight.detach().float()
    plain = weight.float() * layer.scale
    if layer.rotation is None:
        return plain
    block = layer.rotation.shape[0]
    return plain @ torch.block_diag(*[make_rotation(block)] * (plain.shape[1] // block)).T


def raw(tensor: torch.Tensor) -> bytes:
    return on_cpu(tensor).contiguous().view(torch.uint8).numpy().tobytes()


def contents(model: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, byte for byte."""
    return {name: raw(tensor.detach()) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def num_bytes(module: nn.Module) -> int:
    """What the parameters of a module occupy, and the buffers of its 8-bit layers."""
    held = {name for name, _ in module.named_parameters()}
    held |= {
        f"{prefix}.{name}"
        for prefix, layer in module.named_modules()
        if isinstance(layer, FrozenLinear8)
        for name, _ in layer.named_buffers()
    }
    return sum(
        len(data) for name, data in contents(module).items() if any(name == h or name.startswith(h + ".") for h in held)
    )


def is_eight_bit(layer: nn.Module, settings: QuantizeSettings) -> bool:
    """Whether a layer is of the class and of the type that the scheme promises, and frozen."""
    if not isinstance(layer, FrozenLinear8) or any(p.requires_grad for p in layer.parameters()):
        return False
    dtype = torch.float8_e4m3fn if settings.scheme in ("fp8", "fp8-compute") else torch.int8
    return layer.weight.dtype is dtype and bool(layer.packing) != settings.is_compute


def attach(model: nn.Module, name: str = "default", dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """A LoRA that is not zero at the start, so that every factor has a gradient in the first step."""
    torch.manual_seed(3 + len(name))
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS), init_lora_weights=False, **options)
    inject_adapter_in_model(config, model, adapter_name=name)
    for parameter in lora_parameters(model).values():
        parameter.data = parameter.data.to(dtype)


Run = Callable[[], None]


def after(model: nn.Module, quantize_it: Run, dtype: torch.dtype, **options: Any) -> None:
    quantize_it()
    attach(model, dtype=dtype, **options)


HISTORIES: dict[str, Callable[[nn.Module, Run, torch.dtype], None]] = {
    "after": after,
    "DoRA after": lambda *args: after(*args, use_dora=True),
}


def reference_gradients(model: nn.Module, x: torch.Tensor, direction: torch.Tensor) -> dict[str, torch.Tensor]:
    """LoRA's gradients with the base weights as they are stored, all of it float32 and written out by hand. y = W x + b
    + s B A x, and with DoRA y = m / |W + s B A| (W + s B A) x + b; |.| by rows, a constant to the gradient."""
    leaves = {n: p.detach().float().requires_grad_(True) for n, p in lora_parameters(model).items() if p.requires_grad}

    def adapted(name: str, x: torch.Tensor) -> torch.Tensor:
        layer = model.get_submodule(name)
        base = layer.get_base_layer()
        weight = stored_weight(base)
        for adapter in layer.active_adapters:
            config = model.peft_config[adapter]
            scaling = ALPHA / (math.sqrt(RANK) if config.use_rslora else RANK)
            a, b = (leaves[f"{name}.lora_{factor}.{adapter}.weight"] for factor in "AB")
            weight = weight + scaling * b @ a
            if config.use_dora:
                magnitude = leaves[f"{name}.lora_magnitude_vector.{adapter}.weight"]
                weight = weight * (magnitude / weight.detach().norm(dim=1))[:, None]
        bias = 0 if base.bias is None else base.bias.float()
        return x @ weight.T + bias

    hidden = torch.tanh(adapted("first", x.float()))
    hidden = nn.functional.layer_norm(hidden, (96,), model.norm.weight.float(), model.norm.bias.float())
    out = torch.tanh(adapted("second", hidden)) @ model.proj_out.weight.float().T
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), direction.float()), strict=True))


def least_decibels(settings: QuantizeSettings, dtype: torch.dtype, lora_dtype: torch.dtype) -> float:
    """How exact the gradients must be, from what is rounded between the stored weights and a gradient. float32: a
    hundred roundings at 2^-24 leave 130 dB. bfloat16: each rounding to 8 bits of mantissa costs 2^-14 / 12 / E[m^2],
    56.3 dB; per layer some fifteen lie in the way, forwards (weight, product, both factors, their sum, tanh, norm) and
    again backwards: sixty leave 38.5 dB. 8-bit products round three factors more: the input of either layer and the
    gradient that comes back. float8: 3 * 6e-4, 27.4 dB. int8: 3 c^2 / (12 * 127^2) with amax c times the rms of a row,
    c at most 4 in rows of 64 to 96 values: 36 dB."""
    limits = [110.0]
    if torch.bfloat16 in (dtype, lora_dtype):
        limits.append(-10 * math.log10(60 * 2**-14 / 12 * 2 * math.log(2) / 3))
    if settings.is_compute:
        loss = FLOAT8_LOSS if settings.scheme == "fp8-compute" else 4**2 / (12 * 127**2)
        limits.append(-10 * math.log10(3 * loss) - TOLERANCE_DB)
    return min(limits)


DTYPES = {  # of the base and of LoRA
    "float32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
@EVERY_VARIANT
def test_lora_trains_whatever_its_history(settings, history, dtypes):
    dtype, lora_dtype = dtypes
    model = Net(dtype)
    history(model, lambda: apply_quantization(model, Family(), settings), lora_dtype)
    assert type(model.first).__name__ == "Linear"  # PEFT's own
    layers = {name: model.get_submodule(name).get_base_layer() for name in TARGETS}
    assert all(is_eight_bit(layer, settings) for layer in layers.values())
    assert model.proj_out.weight.dtype is dtype
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    active = {name for name in lora_parameters(model) if name.split(".")[-2] in model.first.active_adapters}
    assert set(trained) == active and {p.dtype for p in lora_parameters(model).values()} == {lora_dtype}
    x, direction = random(48, 64).to(dtype), random(48, 32, seed=2).to(dtype)
    expected = reference_gradients(model, x, direction)
    model(x).backward(direction)
    found = {name: parameter.grad for name, parameter in trained.items()}
    noise = {name: decibels(expected[name], gradient.float()) for name, gradient in found.items()}
    assert noise.keys() == trained.keys() and all(gradient.abs().sum() > 0 for gradient in found.values())
    assert min(noise.values()) > least_decibels(settings, dtype, lora_dtype), noise
    held = contents(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    optimizer.step()
    stepped = contents(model)
    assert {name for name in held if held[name] != stepped[name]} == set(trained)


@EVERY_VARIANT
@pytest.mark.parametrize("is_safe", [False, True])
def test_merging_is_refused_and_changes_nothing(settings, is_safe):
    model = Net()
    after(model, lambda: apply_quantization(model, Family(), settings), torch.float32)
    refuse_merge(model)  # as apply_lora does
    held = contents(model)
    message = "merge a LoRA into 8-bit weights.*keep the LoRA beside the model"
    for layer in (model.first, copy.deepcopy(model.first)):
        with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=message):
            layer.merge(safe_merge=is_safe)
    assert contents(model) == held


FLUX2 = FAMILIES["flux2"]


def make_tiny(dtype: torch.dtype = torch.bfloat16, name: str = "flux2") -> nn.Module:
    return TINY[name].make_model().to(dtype).requires_grad_(False)


def run(model: nn.Module, dtype: torch.dtype = torch.bfloat16, device: Any = "cpu", name: str = "flux2") -> Any:
    inputs = TINY[name].make_inputs()
    for key, value in inputs.items():
        if isinstance(value, torch.Tensor):
            inputs[key] = value.to(device, dtype if value.is_floating_point() else None)
    return model(**inputs, return_dict=False)[0]


@EVERY_VARIANT
def test_a_split_model_is_quantized_where_it_is_and_trains_the_same(settings):
    """On one emulated card and on two: the same numbers, bit for bit, for products and roundings are the same."""

    def gradients(num_cards: int) -> dict[str, torch.Tensor]:
        model = make_tiny(torch.float32)
        names = block_names(model, FLUX2)
        placement = plan_manual(names, CARDS[:num_cards], [len(names) // 2][: num_cards - 1])
        apply_block_split(model, FLUX2, placement)
        apply_quantization(model, FLUX2, settings)
        apply_lora(model, FLUX2, LoraSettings(rank=2), seed=1)
        for name, module in model.named_modules():
            if name.endswith("base_layer"):
                parts = [*module.parameters(), *module.buffers()]
                wrapper = model.get_submodule(name.rpartition(".")[0])
                parts += lora_parameters(wrapper).values()
                assert {part.device for part in parts} == {placement.device_of(name)}
        for index, parameter in enumerate(lora_parameters(model).values()):
            with torch.no_grad():  # B starts at zero, which would hide a wrong gradient of A
                parameter.copy_(0.1 * random(*parameter.shape, seed=index))
        run(model, torch.float32, CARDS[0]).square().mean().backward()
        return {name: on_cpu(parameter.grad) for name, parameter in lora_parameters(model).items()}

    with emulated_cards():
        one, two = gradients(1), gradients(2)
    assert one.keys() == two.keys() and len(one) == 56
    assert all(torch.equal(two[name], gradient) and gradient.abs().sum() > 0 for name, gradient in one.items())


@EVERY_VARIANT
def test_state_dicts_and_copies_carry_the_8_bit_model(settings):
    model, x = Net(), random(48, 64)
    after(model, lambda: apply_quantization(model, Family(), settings), torch.float32)
    expected = model(x)
    other = copy.deepcopy(model)
    fresh = Net().requires_grad_(False)
    fresh.first.weight.data.mul_(3)  # so that nothing is equal by accident
    after(fresh, lambda: apply_quantization(fresh, Family(), settings), torch.float32)
    assert not torch.equal(fresh(x), expected)
    fresh.load_state_dict(model.state_dict())
    for found in (other, fresh):
        assert contents(found) == contents(model) and torch.equal(found(x), expected)
        assert is_eight_bit(found.first.get_base_layer(), settings)
        assert {n for n, p in found.named_parameters() if p.requires_grad} == lora_parameters(found).keys()
        found(x).square().sum().backward()
        assert all(p.grad.abs().sum() > 0 for p in lora_parameters(found).values())


@EVERY_VARIANT
def test_a_model_moves_to_a_card_and_back(settings):
    model, x, direction = Net(), random(48, 64), random(48, 32, seed=2)
    after(model, lambda: apply_quantization(model, Family(), settings), torch.float32)
    held = contents(model)
    model(x).backward(direction)
    expected = {name: p.grad.clone() for name, p in lora_parameters(model).items()}
    with emulated_cards():
        for device in (CARDS[1], torch.device("cpu")):
            model.zero_grad()
            model.to(device)
            assert contents(model) == held
            assert all(is_eight_bit(model.get_submodule(name).get_base_layer(), settings) for name in TARGETS)
            model(x.to(device)).backward(direction.to(device))
            assert all(torch.equal(on_cpu(p.grad), expected[n]) for n, p in lora_parameters(model).items())


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_is_taken_as_it_is(settings, dtype, tmp_path):
    """finish -> store -> a file -> take: the same layer, bit for bit, and the same report but for the noise."""
    first, second = Net(dtype), Net(dtype).requires_grad_(True)
    report = apply_quantization(first, Family(), settings)
    quantizer, tensors = Quantizer(Family(), settings), {}
    rotations = {}
    for name in TARGETS:
        stored = quantizer.store(first.get_submodule(name))
        assert stored.weight.dtype is settings.stored_dtype and stored.scale.dtype is torch.float32
        assert stored.scale.shape == (stored.weight.shape[0], 1)
        tensors |= {f"{name}.weight": stored.weight, f"{name}.scale": stored.scale}
        rotations[name] = stored.rotation
    assert rotations == ({"first": 64, "second": 16} if settings.rotation_of(64) else {"first": 0, "second": 0})
    save_file(tensors, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in TARGETS:
        module = second.get_submodule(name)
        module.weight = nn.Parameter(module.weight.to("meta"), requires_grad=False)
        stored = Stored8(tensors[f"{name}.weight"], tensors[f"{name}.scale"], rotations[name])
        taken = quantizer.take(name, module, stored, dtype)
        assert quantizer.store(taken).weight.data_ptr() == stored.weight.data_ptr()
        assert is_eight_bit(taken, settings)  # its bias frozen, too
        second.set_submodule(name, taken)
    found = quantizer.close(second)
    assert contents(second) == contents(first)
    assert found.groups == report.groups
    x, direction = random(48, 64).to(dtype), random(48, 32, seed=2).to(dtype)
    for model in (first, second):
        attach(model)
        model(x).backward(direction)
    assert torch.equal(first(x), second(x))
    gradients = [{name: raw(p.grad) for name, p in lora_parameters(model).items()} for model in (first, second)]
    assert gradients[0] == gradients[1]


KINDS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def test_a_type_or_a_rotation_the_scheme_cannot_use_is_refused():
    rows = torch.ones(96, 1)
    for settings in VARIANTS.values():
        quantizer = Quantizer(Family(), settings)
        other = torch.int8 if settings.stored_dtype is torch.float8_e4m3fn else torch.float8_e4m3fn
        taken = [kind for kind in KINDS if is_taken(FileFormat(kind, 0, False, ROWS), settings)]
        assert taken == [settings.stored_dtype]
        rotated = Stored8(torch.zeros(96, 64, dtype=settings.stored_dtype), rows, rotation=64)
        if settings.scheme == "int8-compute":
            assert quantizer.take("first", Net().first, rotated, torch.float32).rotation_block == 64
        else:
            with pytest.raises(ValueError, match=f"first is stored rotated, which {settings.scheme} cannot"):
                quantizer.take("first", Net().first, rotated, torch.float32)
        with pytest.raises(AssertionError, match="first"):
            quantizer.take("first", Net().first, Stored8(torch.zeros(96, 64, dtype=other), rows), torch.float32)
        with pytest.raises(AssertionError, match="first"):
            turned = Stored8(torch.zeros(64, 96, dtype=settings.stored_dtype), torch.ones(64, 1))
            quantizer.take("first", Net().first, turned, torch.float32)
        with pytest.raises(AssertionError, match="proj_out"):
            quantizer.take("proj_out", Net().proj_out, Stored8(rotated.weight[:32], rows[:32]), torch.float32)


@EVERY_VARIANT
def test_closing_catches_a_layer_that_was_left_out(settings):
    model, quantizer = Net(), Quantizer(Family(), settings)
    for name, module in list(model.named_modules()):
        if quantizer.is_wanted(name, module) and name != "second":
            model.set_submodule(name, quantizer.finish(name, module))
    with pytest.raises(RuntimeError, match="1 layers were never quantized, second first; load the model again"):
        quantizer.close(model)
    quantizer.finish("second", model.second)
    quantizer.close(model)


def row_loss(rows: torch.Tensor, settings: QuantizeSettings) -> float:
    """Energy that rounding costs these rows, as a part of theirs. int8: step^2 / 12 a value, step = amax / 127."""
    if settings.stored_dtype is torch.float8_e4m3fn:
        return FLOAT8_LOSS
    lost = (rows.abs().amax(1) / 127).square() / 12 * rows.shape[1]
    return (lost.sum() / rows.square().sum()).item()


def expected_noise(layer, exact, x, grad, settings):
    """dB. Weight-only: the weight's loss in all three; 8-bit products add that of the other factor."""
    if not settings.is_compute:
        weight = row_loss(exact, settings)
        losses = {"weight": weight, "output": weight, "grad_input": weight}
    else:
        turn = torch.eye(1) if layer.rotation is None else layer.rotation
        weight = row_loss(rotate(exact, turn), settings)
        losses = {
            "weight": weight,
            "output": weight + row_loss(rotate(x, turn), settings),
            "grad_input": weight + row_loss(grad * layer.scale.view(-1), settings),
        }
    return {name: -10 * math.log10(loss) for name, loss in losses.items()}


@EVERY_VARIANT
def test_noise_of_every_layer_type_is_as_derived(settings):
    model, plain = make_tiny(torch.float32), make_tiny(torch.float32)
    report = apply_quantization(model, FLUX2, settings)
    for name in report.groups[QUANTIZED]:
        layer, exact = model.get_submodule(name), plain.get_submodule(name).weight
        x = random(64, exact.shape[1]).requires_grad_(True)
        grad = random(64, exact.shape[0], seed=2)
        out = layer(x) - (0 if layer.bias is None else layer.bias)
        out.backward(grad)
        found = {
            "weight": decibels(exact, stored_weight(layer)),
            "output": decibels(x.detach() @ exact.T, out.detach()),
            "grad_input": decibels(grad @ exact, x.grad),
        }
        expected = expected_noise(layer, exact, x.detach(), grad, settings)
        assert all(abs(found[kind] - expected[kind]) < TOLERANCE_DB for kind in found), (name, found, expected)


@EVERY_VARIANT
def test_the_report_accounts_for_every_layer_and_byte(settings):
    model = make_tiny()
    expected_before = num_bytes(model)
    report = apply_quantization(model, FLUX2, settings)
    groups = report.groups
    assert list(groups) == [QUANTIZED, KEPT, NOT_LINEAR]
    assert total_bytes(groups) == (expected_before, num_bytes(model))
    assert all(is_eight_bit(model.get_submodule(name), settings) for name in groups[QUANTIZED])
    quantized = [model.get_submodule(name) for name in groups[QUANTIZED]]
    rotations = [64 * 64 * 4 if settings.rotation_of(layer.in_features) else 0 for layer in quantized]
    expected = sum(q.in_features * q.out_features + 4 * q.out_features for q in quantized) + sum(rotations)
    plain = sum(2 * layer.in_features * layer.out_features for layer in quantized)
    assert total_bytes({QUANTIZED: groups[QUANTIZED]}) == (plain, expected)
    assert all(before == after for r in (KEPT, NOT_LINEAR) for before, after in groups[r].values())
    assert "transformer_blocks.0.attn.to_q" in groups[QUANTIZED]
    assert {"norm_out.linear", "proj_out", "x_embedder"} <= set(groups[KEPT])
    for reason, is_linear in ((KEPT, True), (NOT_LINEAR, False)):
        assert {isinstance(model.get_submodule(name), nn.Linear) for name in groups[reason]} == {is_linear}
    assert report.num_quantized == 28
    assert f"28 linears to {settings.scheme}, " in report.summary()


ROTATED = [QuantizeSettings("int8-compute", rotation) for rotation in (16, 256)]


@pytest.mark.parametrize("settings", [*VARIANTS.values(), *ROTATED], **BY_NAME)
@pytest.mark.parametrize(
    ("name", "dtype"), [("flux1", torch.bfloat16), ("flux2", torch.float32), ("wan", torch.bfloat16)], ids=str
)
def test_planned_bytes_are_those_of_the_quantized_model(settings, name, dtype):
    family, model = FAMILIES[name], make_tiny(dtype, name)
    blocks = block_names(model, family)
    with torch.device("meta"):
        blueprint = type(model).from_config(model.config)  # as planning has it
    planned, main_device = stored_bytes(blueprint, family, blocks, dtype.itemsize, settings)
    report = apply_quantization(model, family, settings)
    found = [num_bytes(model.get_submodule(block)) for block in blocks]
    assert planned == found
    assert main_device == num_bytes(model) - sum(found)
    assert sum(planned) + main_device == total_bytes(report.groups)[1]


@EVERY_VARIANT
def test_a_family_that_keeps_everything_is_refused(settings):
    with pytest.raises(ValueError, match=r"Net keeps every linear of this Net in full precision"):
        apply_quantization(Net(), Family(keep_full_precision=("*",)), settings)


@EVERY_VARIANT
def test_damaged_weights_are_refused(settings):
    model = Net()
    model.second.weight[3, 3], model.second.weight[7, 3], model.second.weight[9, 0] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(ValueError, match="3 of 64 rows of a weight hold infinities or NaN.*the checkpoint is damaged"):
        apply_quantization(model, Family(), settings)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="no scheme 'fp4'; the schemes are fp8, int8, fp8-compute, int8-compute"):
        QuantizeSettings("fp4")
    with pytest.raises(ValueError, match=r"rotation 32 was requested; use one of \[0, 16, 64, 256\]"):
        QuantizeSettings("int8-compute", rotation=32)


def test_a_layer_takes_the_widest_rotation_that_fits():
    cases = {(256, 6144): 256, (64, 6144): 64, (64, 96): 16, (256, 80): 16, (16, 6144): 16, (64, 40): 0, (0, 6144): 0}
    for (rotation, width), expected in cases.items():
        assert QuantizeSettings("int8-compute", rotation).rotation_of(width) == expected
        assert all(QuantizeSettings(s, rotation).rotation_of(width) == 0 for s in SCHEMES if s != "int8-compute")


@pytest.fixture
def cards_of(monkeypatch):
    """cuda:k has the k-th compute capability."""

    def pretend(*capabilities: tuple[int, int]) -> list[torch.device]:
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device.index])
        return [torch.device("cuda", index) for index in range(len(capabilities))]

    return pretend


@pytest.mark.parametrize(
    ("capabilities", "scheme", "expected"),
    [
        ([(8, 9)], "fp8-compute", ""), ([(8, 6), (7, 5)], "int8-compute", ""), ([(9, 0), (12, 0)], "fp8-compute", ""),
        ([(7, 0)], "fp8", ""), ([(7, 0)], "int8", ""),
        ([(8, 6)], "fp8-compute", "compute capability 8.9 and the card has 8.6 (cuda:0); use int8-compute instead"),
        ([(8, 6), (8, 9)], "fp8-compute", "capability 8.9 and the card has 8.6 (cuda:0); use int8-compute instead"),
        ([(8, 9), (8, 6)], "fp8-compute", "capability 8.9 and the card has 8.6 (cuda:1); use int8-compute instead"),
        ([(8, 6), (8, 9)], "int8-compute", ""),
        ([(8, 6), (7, 0)], "fp8-compute", "(cuda:0); use fp8, which only stores in 8 bits, instead"),
        ([(8, 9), (7, 0)], "fp8-compute", "(cuda:1); use fp8, which only stores in 8 bits, instead"),
        ([(7, 0), (8, 9)], "int8-compute", "capability 7.5 and the card has 7.0 (cuda:0); use fp8, which only stores"),
    ],
)  # fmt: skip
def test_what_cards_cannot_do_is_refused_with_what_all_of_them_can(capabilities, scheme, expected, cards_of):
    found = refusal(QuantizeSettings(scheme), cards_of(*capabilities))
    if not expected:
        assert found == ""
    else:
        assert found.startswith(f"{scheme} was requested, but ") and expected in found


def test_the_cpu_and_unknown_devices_are_answered():
    assert all(refusal(QuantizeSettings(s), [torch.device("cpu")]) == "" for s in SCHEMES)
    assert "mps has no 8-bit products" in refusal(QuantizeSettings("int8-compute"), [torch.device("mps")])
    assert "use int8, which only stores" in refusal(QuantizeSettings("int8-compute"), [torch.device("mps")])


@EVERY_VARIANT
def test_the_full_weight_is_the_one_computed_with(settings):
    for dtype, least in ((torch.float32, 110), (torch.bfloat16, 50)):  # bfloat16: 56 dB a rounding, two when rotated
        model = Net(dtype)
        assert full_weight(model.first) is model.first.weight
        apply_quantization(model, Family(), settings)
        found = full_weight(model.first)
        assert found.dtype is dtype and decibels(stored_weight(model.first), found) > least


@pytest.mark.parametrize("scheme", ["fp8", "fp8-compute"])
def test_a_stored_weight_with_nan_is_refused(scheme):
    quantizer = Quantizer(Family(), QuantizeSettings(scheme))
    values = torch.zeros(32, 64).to(torch.float8_e4m3fn)
    values.view(torch.uint8)[31, 5] = 0xFF
    linear = nn.Linear(64, 32, bias=False)
    with pytest.raises(ValueError, match=r"the weight of blocks.0 holds NaN; the checkpoint is damaged"):
        quantizer.take("blocks.0", linear, Stored8(values, torch.ones(32, 1)), torch.bfloat16)
