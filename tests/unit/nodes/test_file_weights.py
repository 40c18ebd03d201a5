"""Tensors of a mapped file that load_state_dict takes over instead of copying."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from devicebridge.tests import comfy_stub
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn


@pytest.fixture
def file_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    comfy_stub.install(monkeypatch, tmp_path)
    return importlib.import_module("devicebridge.nodes.host.split.model_copy")


def _mapped(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(tensors, path)
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_a_parameter_takes_the_mapped_tensor(file_weights: ModuleType, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = _mapped(tmp_path / "w.safetensors", nn.Linear(4, 3).state_dict())
    target = nn.Linear(4, 3).requires_grad_(False)
    target.load_state_dict({name: tensor.as_subclass(file_weights.FileTensor) for name, tensor in weights.items()})
    assert target.weight.data_ptr() == weights["weight"].data_ptr()
    assert type(target.weight) is nn.Parameter
    assert type(target.weight.data) is torch.Tensor
    assert torch.equal(target.bias, weights["bias"])


def test_another_type_is_converted_into_the_parameter(file_weights: ModuleType, tmp_path: Path) -> None:
    weights = _mapped(tmp_path / "w.safetensors", {"weight": torch.randn(3, 4), "bias": torch.randn(3)})
    target = nn.Linear(4, 3, dtype=torch.bfloat16).requires_grad_(False)
    target.load_state_dict({name: tensor.as_subclass(file_weights.FileTensor) for name, tensor in weights.items()})
    assert target.weight.data_ptr() != weights["weight"].data_ptr()
    assert torch.equal(target.weight, weights["weight"].bfloat16())


def test_a_buffer_and_an_ordinary_tensor_are_copied_into(file_weights: ModuleType) -> None:
    source = torch.randn(3).as_subclass(file_weights.FileTensor)
    target = torch.zeros(3)
    target.copy_(other=source)
    assert target.data_ptr() != source.data_ptr()
    assert torch.equal(target, source.as_subclass(torch.Tensor))


def test_whatever_is_made_of_one_is_an_ordinary_tensor(file_weights: ModuleType) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).as_subclass(file_weights.FileTensor)
    made = [tensor[0], tensor.to(torch.float64), tensor.to("cpu"), torch.cat([tensor, tensor]), tensor.t(), tensor * 2]
    assert [type(value) for value in made] == [torch.Tensor] * len(made)
    assert (tensor.shape, tensor.dtype, tensor.numel()) == ((2, 3), torch.float32, 6)
