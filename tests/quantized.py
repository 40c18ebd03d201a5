"""Quantizes a whole model, which the pack does layer by layer while it loads."""

from __future__ import annotations

from devicebridge.families.spec import ModelFamily
from devicebridge.quantization.quantize import Quantizer, QuantizeReport, QuantizeSettings
from torch import nn


def apply_quantization(model: nn.Module, family: ModelFamily, settings: QuantizeSettings) -> QuantizeReport:
    """Convert and freeze the linears of a model in place, before a LoRA is attached."""
    quantizer = Quantizer(family, settings)
    for name, module in list(model.named_modules()):
        if quantizer.is_wanted(name, module):
            model.set_submodule(name, quantizer.finish(name, module))
    return quantizer.close(model)
