"""Which weights are LoRA, which layers LoRA adapts, and whether it is fit to train."""

import pytest
import torch
from devicebridge.patches.lora import is_lora_name, lora_parameters, resolve_targets
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

TARGETS = ("*.to_q", "*.to_out.0")


class Attention(nn.Module):
    def __init__(self, has_list: bool) -> None:
        super().__init__()
        self.to_q = nn.Linear(8, 8)
        self.norm_q = nn.LayerNorm(8)
        # The same name is a ModuleList in one kind of block and a linear in the other, as in FLUX.2.
        self.to_out = nn.ModuleList([nn.Linear(8, 8), nn.Dropout(0.0)]) if has_list else nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.joint = nn.ModuleList(Attention(has_list=True) for _ in range(2))
        self.image = nn.ModuleList(Attention(has_list=False) for _ in range(1))
        self.embed = nn.Embedding(4, 8)
        self.requires_grad_(False)


def attach(model: nn.Module, targets: list[str] | None = None, **options) -> nn.Module:
    targets = targets or resolve_targets(model, TARGETS)
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, **options), model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.0.to_q.lora_A.default.weight", True), ("blocks.0.to_q.lora_magnitude_vector.default.weight", True),
        ("embed.lora_embedding_A.default", True), ("to_q.lora_layer.down.weight", True),
        ("diffusion_model.blocks.0.q.lora_B.weight", True), ("blocks.0.to_q.dora_scale", True),
        ("blocks.0.to_q.base_layer.weight", False), ("blocks.0.flora_A.weight", False),
        ("blocks.0.explora.weight", False), ("", False),
    ],
)  # fmt: skip
def test_lora_is_known_by_its_name(name, expected):
    assert is_lora_name(name) is expected


def test_lora_parameters_are_exactly_what_peft_added_in_order():
    model = Model()
    base = {id(parameter) for parameter in model.parameters()}
    attach(model, use_dora=True)
    added = [name for name, parameter in model.named_parameters() if id(parameter) not in base]
    assert list(lora_parameters(model)) == added
    assert len(added) == 5 * 3  # five linears, each with A, B and DoRA's magnitude


def test_targets_are_exact_names_and_the_same_after_lora_was_attached():
    model = Model()
    expected = ["joint.0.to_q", "joint.0.to_out.0", "joint.1.to_q", "joint.1.to_out.0", "image.0.to_q"]
    assert resolve_targets(model, TARGETS) == expected
    attach(model)
    assert resolve_targets(model, TARGETS) == expected
    assert resolve_targets(model, ("*",)) == [*expected, "image.0.to_out"]  # no lora_A, no base_layer


def test_patterns_that_match_nothing_are_named_with_what_they_match_instead():
    model = Model()
    with pytest.raises(ValueError, match=r"'joint.*.to_out' \(matches ModuleList\); '\*.to_k'") as error:
        resolve_targets(model, ("*.to_q", "joint.*.to_out", "*.to_k"))
    assert "'*.to_q'" not in str(error.value)
    with pytest.raises(ValueError, match=r"'\*.TO_Q'"):
        resolve_targets(model, ("*.TO_Q",))
