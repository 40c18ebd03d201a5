"""Whole models in 8 bits, then with LoRA: every scheme, on one card and on several.

The arithmetic of one layer: test_stored.py, test_eight_bit.py; with LoRA tests/unit/patches/test_lora_linear.py.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.placement import block_names, plan_manual
from devicebridge.patches.lora import lora_parameters
from devicebridge.quantization.frozen_linear import FrozenLinear8
from devicebridge.quantization.quantize import (
    KEPT,
    NOT_LINEAR,
    QUANTIZED,
    SCHEMES,
    FileFormat,
    QuantizeSettings,
    Stored8,
    describe_quantized,
    is_taken,
    refusal,
    sort_modules,
    stored_bytes,
    take_stored,
)
from devicebridge.quantization.stored import ROWS
from devicebridge.tests.emulated import CARDS, emulated_cards, on_cpu
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import apply_lora
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

VARIANTS = {
    "fp8": QuantizeSettings("fp8"), "int8": QuantizeSettings("int8"), "fp8-compute": QuantizeSettings("fp8-compute"),
    "int8-compute": QuantizeSettings("int8-compute", rotation=0),
    "int8-compute rotated": QuantizeSettings("int8-compute"),
}  # fmt: skip
EVERY_VARIANT = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)


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


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def raw(tensor: torch.Tensor) -> bytes:
    return on_cpu(tensor).contiguous().view(torch.uint8).numpy().tobytes()


def contents(model: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, byte for byte."""
    return {name: raw(tensor.detach()) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def num_bytes(module: nn.Module) -> int:
    """What the parameters of a module occupy, and the buffers of its 8-bit layers."""
    frozen = [layer for layer in module.modules() if isinstance(layer, FrozenLinear8)]
    return sum(each.nbytes for each in (*module.parameters(), *(b for layer in frozen for b in layer.buffers())))


def is_eight_bit(layer: nn.Module, settings: QuantizeSettings) -> bool:
    """Whether a layer is of the class and of the type that the scheme promises, and frozen."""
    if not isinstance(layer, FrozenLinear8) or any(p.requires_grad for p in layer.parameters()):
        return False
    dtype = torch.float8_e4m3fn if settings.scheme in ("fp8", "fp8-compute") else torch.int8
    return layer.weight.dtype is dtype and bool(layer.packing) != settings.is_compute


def lora_net(settings: QuantizeSettings, times: float = 1.0) -> nn.Module:
    """A quantized net with a LoRA that is not zero, so that every factor has a gradient in the first step."""
    model = Net()
    model.first.weight.data.mul_(times)
    apply_quantization(model, Family(), settings)
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=list(TARGETS), init_lora_weights=False)
    inject_adapter_in_model(config, model)
    return model


def gradients_of(model: nn.Module, x: torch.Tensor, direction: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x).backward(direction)
    return {name: parameter.grad.clone() for name, parameter in lora_parameters(model).items()}


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
def test_copies_state_dicts_and_cards_carry_the_8_bit_model(settings):
    model, x, direction = lora_net(settings), random(48, 64), random(48, 32, seed=2)
    fresh = lora_net(settings, times=3)  # so that nothing is equal by accident
    assert not torch.equal(fresh(x), model(x))
    fresh.load_state_dict(model.state_dict())
    held, expected = contents(model), gradients_of(model, x, direction)
    assert all(float(each.abs().sum()) > 0 for each in expected.values())
    with emulated_cards():
        for found, device in ((copy.deepcopy(model), "cpu"), (fresh, "cpu"), (model, CARDS[1]), (model, "cpu")):
            found.to(device)
            assert contents(found) == held and is_eight_bit(found.first.get_base_layer(), settings)
            assert {n for n, p in found.named_parameters() if p.requires_grad} == expected.keys()
            again = gradients_of(found, x.to(device), direction.to(device))
            assert all(torch.equal(on_cpu(again[name]), each) for name, each in expected.items())


KINDS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def test_a_type_or_a_rotation_the_scheme_cannot_use_is_refused():
    rows = torch.ones(96, 1)
    for settings in VARIANTS.values():
        other = torch.int8 if settings.stored_dtype is torch.float8_e4m3fn else torch.float8_e4m3fn
        known = [kind for kind in KINDS if is_taken(FileFormat(kind, 0, False, ROWS), settings)]
        assert known == [settings.stored_dtype]
        kind = settings.stored_dtype
        rotated = Stored8(torch.zeros(96, 64, dtype=kind), rows, FileFormat(kind, 64, is_comfys=True))
        foreign = Stored8(torch.zeros(96, 64, dtype=other), rows, FileFormat(other))
        turned = Stored8(torch.zeros(64, 96, dtype=kind), torch.ones(64, 1), FileFormat(kind))
        for stored in (foreign, turned) if settings.scheme == "int8-compute" else (foreign, turned, rotated):
            with pytest.raises(AssertionError, match="first"):
                take_stored("first", Net().first, stored, torch.float32, settings)


def total_bytes(groups):
    return tuple(map(sum, zip(*(each for group in groups.values() for each in group.values()), strict=True)))


@EVERY_VARIANT
def test_what_is_said_accounts_for_every_layer_and_byte(settings):
    model = make_tiny()
    expected_before, said = num_bytes(model), describe_quantized(model, FLUX2, settings, lambda name: torch.bfloat16)
    groups = sort_modules(model, FLUX2, settings, lambda name: torch.bfloat16)
    apply_quantization(model, FLUX2, settings)
    assert list(groups) == [QUANTIZED, KEPT, NOT_LINEAR]
    assert total_bytes(groups) == (expected_before, num_bytes(model))
    assert said[0].startswith(f"28 linears to {settings.scheme}, {expected_before / 1e9:.2f} -> ") and said[1] == 0
    assert all(is_eight_bit(model.get_submodule(name), settings) for name in groups[QUANTIZED])
    assert all(before == after for r in (KEPT, NOT_LINEAR) for before, after in groups[r].values())
    assert "transformer_blocks.0.attn.to_q" in groups[QUANTIZED]
    assert {"norm_out.linear", "proj_out", "x_embedder"} <= set(groups[KEPT])
    for reason, is_linear in ((KEPT, True), (NOT_LINEAR, False)):
        assert {isinstance(model.get_submodule(name), nn.Linear) for name in groups[reason]} == {is_linear}


ROTATED = [QuantizeSettings("int8-compute", rotation) for rotation in (16, 256)]


@pytest.mark.parametrize("settings", [*VARIANTS.values(), *ROTATED], ids=lambda each: f"{each.scheme} {each.rotation}")
@pytest.mark.parametrize(
    ("name", "dtype"), [("flux1", torch.bfloat16), ("flux2", torch.float32), ("wan", torch.bfloat16)], ids=str
)
def test_planned_bytes_are_those_of_the_quantized_model(settings, name, dtype):
    family, model = FAMILIES[name], make_tiny(dtype, name)
    blocks = block_names(model, family)
    with torch.device("meta"):
        blueprint = type(model).from_config(model.config)  # as planning has it
    planned, main_device = stored_bytes(blueprint, family, blocks, dtype, settings)
    apply_quantization(model, family, settings)
    found = [num_bytes(model.get_submodule(block)) for block in blocks]
    assert planned == found
    assert main_device == num_bytes(model) - sum(found)


@EVERY_VARIANT
def test_a_family_that_keeps_everything_is_refused(settings):
    with pytest.raises(ValueError, match=r"Net keeps every linear of this Net in full precision"):
        describe_quantized(Net(), Family(keep_full_precision=("*",)), settings, lambda name: torch.float32)


@EVERY_VARIANT
def test_damaged_weights_are_refused(settings):
    model = Net()
    model.second.weight[3, 3], model.second.weight[7, 3], model.second.weight[9, 0] = torch.nan, torch.inf, -torch.inf
    with pytest.raises(ValueError, match="3 of 64 rows of a weight hold infinities or NaN.*the checkpoint is damaged"):
        apply_quantization(model, Family(), settings)


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
        ([(8, 9), (12, 0)], "fp8-compute", ""), ([(8, 6), (7, 5)], "int8-compute", ""), ([(7, 0)], "fp8", ""),
        ([(7, 0)], "int8", ""),
        ([(8, 9), (8, 6)], "fp8-compute", "capability 8.9 and the card has 8.6 (cuda:1); use int8-compute instead"),
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
