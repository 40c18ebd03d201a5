"""A frozen linear and its LoRA in one function, against PEFT and against float64."""

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.patches import lora_linear
from devicebridge.patches.lora_linear import apply_fused
from devicebridge.quantization.quantize import QuantizeSettings, full_weight
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

NUM_IN, NUM_OUT, RANK, ALPHA = 64, 96, 8, 3


class Holder(nn.Module):
    def __init__(self, dtype: torch.dtype, *, bias: bool) -> None:
        super().__init__()
        self.to_q = nn.Linear(NUM_IN, NUM_OUT, bias=bias, dtype=dtype).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_q(x)


def make_layer(scheme="none", dtype=torch.float32, lora_dtype=torch.float32, *, bias=True, **options) -> Any:
    """A LoRA layer of PEFT around a linear of the scheme, with a LoRA that is not zero."""
    torch.manual_seed(0)
    model = Holder(dtype, bias=bias)
    if scheme != "none":
        apply_quantization(model, FAMILIES["flux2"], QuantizeSettings(scheme))  # type: ignore[arg-type]
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q"], **{"init_lora_weights": False} | options)
    inject_adapter_in_model(config, model, "default")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(lora_dtype)
    return model.to_q


def make_input(dtype: torch.dtype, *, requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 20, NUM_IN, generator=generator).to(dtype).requires_grad_(requires_grad)
    return x, torch.randn(2, 20, NUM_OUT, generator=generator).to(dtype)


def run(layer: Any, x: torch.Tensor, grad: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    """Output, of the layer or of what calls it, and the gradients of x, A and B."""
    weights = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    out = (layer if call is None else call)(x)
    return [out, *torch.autograd.grad(out, [x, *weights], grad)]


def exact(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64, with the weight the base computes with."""
    parts = [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight]
    x, a, b = (part.detach().double().requires_grad_() for part in parts)
    out = x @ full_weight(layer.base_layer).double().t() + ALPHA / RANK * (x @ a.t()) @ b.t()
    if layer.base_layer.bias is not None:
        out = out + layer.base_layer.bias.double()
    return [out, *torch.autograd.grad(out, [x, a, b], grad.double())]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    found = found.detach().double()
    return float((found - expected.detach()).norm() / expected.detach().norm())


# bfloat16 rounds by 2^-9 at most, 1.7e-3 rms; a gradient of LoRA is a sum of products of two such factors, rounded
# once more. float8 adds 3.7e-2 to what goes through the base, int8 6e-3 at this width (quantization/eight_bit.py).
LORA_BOUND = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
BASE_BOUND = {"none": 0.0, "fp8-compute": 4.5e-2, "int8-compute": 1.5e-2}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("lora_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scheme", BASE_BOUND)
def test_output_and_every_gradient(scheme: str, dtype: torch.dtype, lora_dtype: torch.dtype, bias: bool) -> None:
    layer = make_layer(scheme, dtype, lora_dtype, bias=bias)
    x, grad = make_input(dtype)
    apply_fused(layer)
    found, expected = run(layer, x, grad), exact(layer, x, grad)
    assert found[0].dtype is found[1].dtype is dtype and found[2].dtype is found[3].dtype is lora_dtype
    bound = max(LORA_BOUND[dtype], LORA_BOUND[lora_dtype])
    errors = [error(a, b) for a, b in zip(found, expected, strict=True)]
    assert max(errors[:2]) < bound + BASE_BOUND[scheme] and max(errors[2:]) < bound, errors


def _replaced_forward(layer: Any) -> None:
    layer.base_layer.forward = lambda x: x.sum(-1, keepdim=True).expand(*x.shape[:-1], NUM_OUT)


def _doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 2)


PEFT_DECIDES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "disabled": ({}, lambda layer: layer.enable_adapters(False)),
    "trained base": ({}, lambda layer: layer.base_layer.requires_grad_(True)),
    "hook": ({}, lambda layer: _doubled(layer.base_layer)),
    "hook on LoRA": ({}, lambda layer: _doubled(layer.lora_B["default"])), "replaced forward": ({}, _replaced_forward),
    "dropout": ({"lora_dropout": 0.5}, nn.Module.train), "DoRA": ({"use_dora": True}, nn.Module.train),
}  # fmt: skip


@pytest.mark.parametrize("case", PEFT_DECIDES)
def test_peft_decides_what_is_no_single_plain_lora(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_linear._LoraLinear, "apply", _must_not_run)
    (options, change), (x, _) = PEFT_DECIDES[case], make_input(torch.float32)
    found = []
    for fuse in (lambda layer: None, apply_fused):
        layer = make_layer(**options)
        change(layer)
        fuse(layer)
        torch.manual_seed(2)
        found.append(layer(x))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def _must_not_run(*args: Any) -> None:
    raise AssertionError("the fused function ran")


@pytest.fixture
def fused() -> Any:
    layer = make_layer()
    apply_fused(layer)
    return layer


def test_under_autocast_peft_decides(fused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_linear._LoraLinear, "apply", _must_not_run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused(make_input(torch.float32)[0]).dtype is torch.bfloat16


def test_only_what_needs_a_gradient_gets_one(fused: Any) -> None:
    fused.lora_A["default"].weight.requires_grad_(False)
    x, grad = make_input(torch.float32, requires_grad=False)
    fused(x).backward(grad)
    assert x.grad is None and fused.lora_A["default"].weight.grad is None
    assert fused.lora_B["default"].weight.grad is not None and fused.base_layer.weight.grad is None


def test_the_output_may_be_changed_in_place_and_a_copy_computes_with_its_own_weights(fused: Any) -> None:
    x, grad = make_input(torch.float32)
    expected = torch.autograd.grad(fused(x) * 2, x, grad)
    torch.testing.assert_close(torch.autograd.grad(fused(x).mul_(2), x, grad), expected, rtol=0, atol=0)
    other = copy.deepcopy(fused)
    with torch.no_grad():
        for each in (other.base_layer.weight, other.base_layer.bias, other.lora_B["default"].weight):
            each.zero_()
    assert not other(x).any() and fused(x).any()


def test_compiled_without_a_graph_break() -> None:
    layer = make_layer(dtype=torch.bfloat16)
    apply_fused(layer)
    x, grad = make_input(torch.bfloat16)
    found = run(layer, x, grad, torch.compile(layer, backend="aot_eager", fullgraph=True))
    errors = [error(a, b) for a, b in zip(found, exact(layer, x, grad), strict=True)]
    assert max(errors) < LORA_BOUND[torch.bfloat16]


@pytest.mark.parametrize("name", TINY)
def test_training_uses_it(name: str) -> None:
    model = TINY[name].make_model().requires_grad_(False)
    handle = apply_lora(model, FAMILIES[name], LoraSettings(rank=2), seed=0)
    kinds = {type(model.get_submodule(target)) for target in handle.targets}
    assert kinds == {lora_linear._fused_class(LoraLinear, lora_linear._lora_output)}


# out_features, in_features, rank, factor; some with a full second matrix, some with a factorised one, none square
SIZES = [(24, 36, 2, -1), (24, 36, 16, -1), (30, 8, 2, 2), (64, 96, 4, 8), (7, 11, 2, -1), (7, 11, 3, 0)]


def _model(out: int, width: int, rank: int, factor: int) -> nn.Module:
    """Of LoKr; of LoHa with factor 0."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, out)).requires_grad_(False)
    common = {"r": rank, "alpha": 3 * rank, "target_modules": ["0"], "init_weights": False}
    config = peft.LoKrConfig(decompose_factor=factor, **common) if factor else peft.LoHaConfig(**common)
    peft.inject_adapter_in_model(config, model)
    return model


def _run(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and the adapter."""
    x = x.clone().requires_grad_()
    output = model(x)
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    assert x.grad is not None
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = [each.grad for each in trained if each.grad is not None]
    assert len(gradients) == len(trained)
    for each in trained:
        each.grad = None
    return [output.detach(), x.grad, *gradients]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [(5,), (2, 3)], ids=str)
def test_output_and_gradients_are_those_of_peft(size: tuple[int, int, int, int], shape: tuple[int, ...]) -> None:
    model = _model(*size)
    x = torch.randn(*shape, size[1], generator=torch.Generator().manual_seed(1))
    expected = _run(model, x)
    apply_fused(model)
    for ours, theirs in zip(_run(model, x), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_weight_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(24, 36, 2, -1)
    apply_fused(model)
    layer = model[0]  # type: ignore[index]
    monkeypatch.setattr(type(layer), "get_delta_weight", lambda *args, **kwargs: pytest.fail("the weight was made"))
    assert model(torch.ones(2, 36)).shape == (2, 24)


def test_a_layer_that_is_switched_off_is_left_to_peft() -> None:
    model = _model(24, 36, 2, -1)
    apply_fused(model)
    layer, x = model[0], torch.ones(2, 36)  # type: ignore[index]
    layer.enable_adapters(False)
    assert torch.equal(model(x), layer.base_layer(x))
