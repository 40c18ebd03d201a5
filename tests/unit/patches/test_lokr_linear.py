"""LoKr computed without its weight: the numbers of PEFT's own layer, forwards and backwards."""

from __future__ import annotations

import peft
import pytest
import torch
from devicebridge.patches.lora_linear import apply_fused_lokr
from torch import Tensor, nn

# out_features, in_features, rank, factor; some with a full second matrix, some with a factorised one, none square
SIZES = [(24, 36, 2, -1), (24, 36, 16, -1), (30, 8, 2, 2), (64, 96, 4, 8), (7, 11, 2, -1)]


def _model(out: int, width: int, rank: int, factor: int) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, out)).requires_grad_(False)
    config = peft.LoKrConfig(r=rank, alpha=3 * rank, decompose_factor=factor, target_modules=["0"], init_weights=False)
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
    apply_fused_lokr(model)
    for ours, theirs in zip(_run(model, x), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_weight_is_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(24, 36, 2, -1)
    apply_fused_lokr(model)
    layer = model[0]  # type: ignore[index]
    monkeypatch.setattr(type(layer), "get_delta_weight", lambda *args, **kwargs: pytest.fail("the weight was made"))
    assert model(torch.ones(2, 36)).shape == (2, 24)


def test_a_layer_that_is_merged_or_switched_off_is_left_to_peft() -> None:
    model = _model(24, 36, 2, -1)
    apply_fused_lokr(model)
    layer, x = model[0], torch.ones(2, 36)  # type: ignore[index]
    before = model(x)
    layer.merge()
    assert torch.allclose(model(x), before, atol=1e-5)
    layer.unmerge()
    layer.enable_adapters(False)
    assert torch.equal(model(x), layer.base_layer(x))
