"""One model twice: ComfyUI's class and diffusers', trained by our two ways from the same weights, noise and text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from devicebridge.checkpoints.checkpoint import read_checkpoint
from devicebridge.checkpoints.load import load_transformer
from devicebridge.config.training import LoraSettings
from devicebridge.encoding.comfy_data import read_pairs
from devicebridge.families.comfy.inputs import read_latents, read_text
from devicebridge.families.naming import Stack, find_by_original
from devicebridge.families.registry import find_family
from devicebridge.families.spec import ModelFamily
from devicebridge.tests.toy import stack_tensors
from devicebridge.training.adapter import apply_lora
from devicebridge.training.objective import noise_latents, predict, prediction_loss
from safetensors.torch import save_file
from torch import nn

_HEAD = {"num_attention_heads": 1, "attention_head_dim": 128}
_FLUX = {"num_layers": 2, "num_single_layers": 4, "joint_attention_dim": 48, "guidance_embeds": True, **_HEAD}
# The diffusers configs of the native models in tiny_checkpoints.py.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "flux1": {**_FLUX, "in_channels": 64, "pooled_projection_dim": 32, "axes_dims_rope": (16, 56, 56)},
    "flux2": {**_FLUX, "in_channels": 128, "timestep_guidance_channels": 256, "axes_dims_rope": (32, 32, 32, 32)},
    "wan": {
        **_HEAD, "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "ffn_dim": 192,
        "num_layers": 4, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads",
    },
}  # fmt: skip


def make_twin(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model: nn.Module = getattr(diffusers, find_family(name).transformer_class)(**CONFIGS[name]).eval()
        _shake(model)
    return model


@torch.no_grad()
def _shake(model: nn.Module) -> None:
    """Norms of a fresh model are ones and biases zeros, with which exchanging two would not show."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.randn(parameter.shape))


class Twin:
    """Diffusers' side: loaded from a folder, as a job loads it, with the native model's LoRA in its own layout.

    Args:
        folder: where the weights are written, in both layouts.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.family, self.native_file = find_family(name), folder / "native.safetensors"
        model = make_twin(name)
        model.save_pretrained(folder / "twin")
        weights = stack_tensors(self.family, model.state_dict())
        save_file({key: tensor.contiguous() for key, tensor in weights.items()}, self.native_file)
        info = read_checkpoint(folder / "twin")
        self.guidance = info.variant.training_guidance if info.variant else None
        self.model = load_transformer(info, lambda name: torch.device("cpu"), torch.float32)

    def take(self, lora: Mapping[str, torch.Tensor]) -> None:
        """The native LoRA: every part of a stacked linear has its A, and its rows of B."""
        self.stacks = _stacks(self.family, lora)
        members = tuple(each for stack in self.stacks.values() for each in stack.members)
        settings = LoraSettings(rank=2, alpha=2.0, targets=members)
        handle = apply_lora(self.model, self.family, settings, seed=0)
        tensors = {}
        for name, stack in self.stacks.items():
            b = _swapped(lora[f"{name}.lora_B.weight"], stack)
            for member, (start, end) in stack.rows(len(b)).items():
                tensors[f"{member}.lora_A.weight"] = lora[f"{name}.lora_A.weight"].clone()
                tensors[f"{member}.lora_B.weight"] = b[start:end].clone()
        handle.load_tensors(tensors)
        self.parameters = handle.parameters()

    def loss(self, samples: Any, condition: Any, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
        latents, text = next(iter(read_pairs([{"samples": samples}], [condition])))
        clean = read_latents(self.family.comfy, latents)[None]
        made = noise_latents(self.family, clean, noise.view(clean.shape), sigmas)
        batch = {name: each[None] for name, each in read_text(self.family.comfy, text).items()}
        guidance = None if self.guidance is None else 1.0
        return prediction_loss(predict(self.family, self.model, made.noisy, made.sigmas, batch, guidance), made.target)

    def gradients(self) -> dict[str, torch.Tensor]:
        """As the native LoRA has them: those of shared numbers are added, rows are stacked."""
        found = {}
        for name, stack in self.stacks.items():
            of = {kind: [self._grad(member, kind) for member in stack.members] for kind in ("lora_A", "lora_B")}
            found[f"{name}.lora_A.default.weight"] = torch.stack(of["lora_A"]).sum(0)
            found[f"{name}.lora_B.default.weight"] = _swapped(torch.cat(of["lora_B"]), stack)
        return found

    def _grad(self, member: str, kind: str) -> torch.Tensor:
        gradient = self.parameters[f"{member}.{kind}.default.weight"].grad
        assert gradient is not None, f"{member} has no gradient"
        return gradient


def _stacks(family: ModelFamily, lora: Mapping[str, torch.Tensor]) -> dict[str, Stack]:
    names = [name.removesuffix(".lora_A.weight") for name in lora if name.endswith(".lora_A.weight")]
    found = {name: find_by_original(name, family.renames) for name in names}
    unknown = [name for name, stack in found.items() if stack is None]
    assert not unknown, f"the rename table has no {unknown[0]}"
    return {name: stack for name, stack in found.items() if stack is not None}


def _swapped(tensor: torch.Tensor, stack: Stack) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1]) if stack.swap_halves else tensor
