"""What tests of rounded layers measure."""

import math

import torch
from torch import nn


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    exact, found = exact.double(), found.double()
    noise = (found - exact).square().sum().item()
    return 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf


def gradient(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone().requires_grad_(True)
    layer(x).backward(grad)
    return x.grad
