"""Whole models in 8 bits: quantized at once, which the pack does layer by layer, and taken apart to bytes."""

import torch
from devicebridge.families.spec import ModelFamily
from devicebridge.quantization.quantize import Quantizer, QuantizeSettings
from devicebridge.tests.emulated import on_cpu
from torch import nn


def apply_quantization(model: nn.Module, family: ModelFamily, settings: QuantizeSettings) -> None:
    quantizer = Quantizer(family, settings)
    for name, module in list(model.named_modules()):
        if quantizer.is_wanted(name, module):
            model.set_submodule(name, quantizer.finish(module))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [on_cpu(tensor).detach().contiguous().view(-1).view(torch.uint8)]
