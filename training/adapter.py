"""LoRA on a family's linears: attached with PEFT, named, saved. patches/lora.py answers which weights are LoRA."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config.job import LoraSettings
from ..families.spec import ModelFamily
from ..patches.lora import assert_lora_intact, lora_parameters, place_lora_with_base, resolve_targets
from ..patches.lora_linear import apply_fused_lora
from ..quantization.frozen_linear import refuse_merge
from ..quantization.quantize import full_weight

_ADAPTER = "default"
_PARAMETER = re.compile(rf"^(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_magnitude_vector)\.{_ADAPTER}\.weight$")
_SUFFIX = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude_vector": "dora_scale"}


@dataclass(frozen=True)
class LoraHandle:
    """A LoRA attached to a model; made by apply_lora."""

    model: nn.Module
    targets: tuple[str, ...]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by fqn, in the model's order."""
        return lora_parameters(self.model)

    def tensors(self) -> dict[str, Tensor]:
        """The adapter on the CPU: "<linear>.lora_A.weight" [R, in], ".lora_B.weight" [out, R], ".dora_scale" [out]."""
        return {_file_name(name): parameter.detach().cpu() for name, parameter in self.parameters().items()}

    def tensors_for_comfyui(self) -> dict[str, Tensor]:
        """As tensors(), with DoRA's magnitude restated so that ComfyUI computes the trained layer.

        DoRA is m (W + sBA) / |W + sBA|, row by row; ComfyUI (0.33) divides by |W| instead. m |W| / |W + sBA| in place
        of m makes both the same at strength 1. Without DoRA this is tensors().
        """
        tensors = self.tensors()
        for name in [name for name in tensors if name.endswith(".dora_scale")]:
            layer: Any = self.model.get_submodule(name.removesuffix(".dora_scale"))
            tensors[name] = (tensors[name].float() * _norm_ratio(layer).cpu()).to(tensors[name].dtype)
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put saved tensors back, bit for bit.

        Raises: ValueError if they are not exactly this adapter's; names the first difference.
        """
        parameters = {_file_name(name): parameter for name, parameter in self.parameters().items()}
        if parameters.keys() != tensors.keys():
            differing = sorted(parameters.keys() ^ tensors.keys())
            raise ValueError(f"the saved LoRA is not of this job: {len(differing)} names differ, first {differing[0]}")
        for name, parameter in parameters.items():
            found, wanted = _kind_of(tensors[name]), _kind_of(parameter)
            if found != wanted:  # copy_ would spread one row over all, and round
                raise ValueError(f"the saved LoRA is not of this job: {name} is {found}, not {wanted}")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name].to(parameter.device))

    def remove(self) -> None:
        """Put the plain linears back; what was trained is lost unless tensors() was kept."""
        for name in self.targets:
            parent, _, child = name.rpartition(".")
            wrapper = self.model.get_submodule(name)
            setattr(self.model.get_submodule(parent), child, wrapper.base_layer)
        if hasattr(self.model, "peft_config"):
            del self.model.peft_config


def _kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@torch.no_grad()
def _norm_ratio(layer: Any) -> Tensor:
    """|W| / |W + sBA| of each row of an adapted linear, float32. [out]"""
    a, b = layer.lora_A[_ADAPTER].weight.float(), layer.lora_B[_ADAPTER].weight.float()
    weight = full_weight(layer.get_base_layer()).to(a.device).float()  # of a block that streams it may be on the host
    return weight.norm(dim=1) / (weight + layer.scaling[_ADAPTER] * (b @ a)).norm(dim=1)


def _file_name(parameter_name: str) -> str:
    match = _PARAMETER.match(parameter_name)
    assert match is not None, parameter_name
    return f"{match['module']}.{_SUFFIX[match['kind']]}"


def apply_lora(model: nn.Module, family: ModelFamily, settings: LoraSettings, *, seed: int) -> LoraHandle:
    """Attach a fresh LoRA in place: A random, B zero, so the model's output does not change yet.

    A is drawn on the CPU from seed alone, so it is the same however the model is split. Every LoRA weight is in
    settings.dtype, on the device of the layer it adapts, and the only thing that requires gradients afterwards.

    Raises: ValueError for target patterns that match no linear.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = resolve_targets(model, settings.targets or family.lora_targets)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # PEFT only divides by the rank; fractions work
        lora_dropout=settings.dropout,
        use_dora=settings.dora,
        target_modules="|".join(re.escape(name) for name in targets),
    )
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*merge", category=UserWarning)  # none is asked for here
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU of the process
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    place_lora_with_base(model)
    refuse_merge(model)
    dtype = getattr(torch, settings.dtype)
    for name in lora_parameters(model):
        model.get_submodule(name.rpartition(".")[0]).to(dtype)
    assert_lora_intact(model)
    apply_fused_lora(model)
    return LoraHandle(model, tuple(targets))
