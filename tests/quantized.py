"""Whole models in 8 bits: quantized at once, which the pack does layer by layer, and taken apart to bytes."""

import torch
from devicebridge.families.spec import ModelFamily
from devicebridge.quantization.quantize import QuantizeSettings, is_wanted, round_linear
from devicebridge.tests.emulated import on_cpu
from torch import nn


def apply_quantization(model: nn.Module, family: ModelFamily, settings: QuantizeSettings) -> None:
    for name, module in list(model.named_modules()):
        if is_wanted(module, name, family, settings):
            model.set_submodule(name, round_linear(module, settings))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [on_cpu(tensor).detach().contiguous().view(-1).view(torch.uint8)]
