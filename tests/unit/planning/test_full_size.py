"""Every published size, at full size, split over two fake cards: no numbers, but every operation's devices are checked.

FakeTensorMode on the device type `lazy` runs FLUX.2's forward in about a second and raises on a missing bridge. The
model and its LoRA are built on meta and their parameters replaced by fake ones: Module.to fails inside the mode.
"""

import json

import diffusers
import pytest
import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.offload import recompute
from devicebridge.parallel.placement import block_names, parameter_bytes, plan_placement
from devicebridge.tests.emulated import device_module
from devicebridge.tests.placed import apply_block_split
from devicebridge.training.adapter import apply_lora
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CARDS = [torch.device("lazy", index) for index in range(2)]
# One variant of each size: those that differ in training only make the same model.
VARIANTS = list(
    {
        (family.name, json.dumps(variant.transformer_config, sort_keys=True)): (family.name, variant.name)
        for family in FAMILIES.values()
        for variant in reversed(family.variants)
    }.values()
)
_DEPTHS = ("num_layers", "num_single_layers")


def _build(family, variant, *, lora):
    """The model on meta, bf16: of full size, or with a LoRA of rank 32 and of full width only; its placement by bytes.
    A training step treats every block alike, and the forwards are of all of them."""
    config = dict(variant.transformer_config)
    if lora:
        config |= {name: min(config[name], 4) for name in _DEPTHS if name in config}
    with torch.device("meta"):
        model = getattr(diffusers, family.transformer_class)(**config).to(torch.bfloat16)
    names = block_names(model, family)
    sizes, main_device = parameter_bytes(model, names, 2)
    placement = plan_placement(names, CARDS, block_cost=sizes, main_cost=main_device)
    if lora:
        apply_lora(model, family, LoraSettings(rank=32, dtype="bfloat16"), seed=0)
    return model, placement


def _place_fakes(model, placement):
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        fake = torch.empty(parameter.shape, dtype=parameter.dtype, device=placement.device_of(name))
        model.get_submodule(owner)._parameters[leaf] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        fake = torch.empty(buffer.shape, dtype=buffer.dtype, device=placement.device_of(name))
        model.get_submodule(owner)._buffers[leaf] = fake


def _inputs(family, variant, side, num_text_tokens=512):
    latent = family.latent_of(variant)
    latents = torch.empty(1, latent.channels, 1, side, side, dtype=torch.bfloat16, device=CARDS[0])
    widths = {"prompt_embeds": _text_width(variant)}
    text = {}
    for encoder in variant.text_encoders:
        is_pooled = encoder.kind == "pooled"
        shape = (1, variant.transformer_config["pooled_projection_dim"]) if is_pooled else (1, num_text_tokens)
        width = () if is_pooled else (widths.get(encoder.output, _text_width(variant)),)
        text[encoder.output] = torch.empty(*shape, *width, dtype=torch.bfloat16, device=CARDS[0])
    if variant.condition == "first_latents":
        text["first_latents"] = latents
    if variant.condition == "first_frame":
        extra = variant.transformer_config["in_channels"] - latent.channels
        shape = (1, extra, *latents.shape[2:])
        text["image_condition"] = torch.empty(*shape, dtype=torch.bfloat16, device=CARDS[0])
    sigma = torch.empty(1, device=CARDS[0])
    return family.make_inputs(latents, sigma, text, variant.training_guidance), latents


def _text_width(variant):
    return variant.transformer_config.get("joint_attention_dim") or variant.transformer_config["text_dim"]


@pytest.fixture(autouse=True)
def _device_module():
    with device_module(torch.cpu):
        yield


LONG = ("flux2-klein-9b", "flux1-schnell", "wan2.1-t2v-1.3b")  # as others, but for their size or one module


@pytest.mark.parametrize(
    ("family_name", "variant_name"),
    [pytest.param(*each, marks=[pytest.mark.long] * (each[1] in LONG)) for each in VARIANTS],
)
def test_forward_of_every_variant(family_name, variant_name):
    family = FAMILIES[family_name]
    variant = family.variant(variant_name)
    model, placement = _build(family, variant, lora=False)
    with FakeTensorMode(), torch.no_grad():
        _place_fakes(model, placement)
        split = apply_block_split(model, family, placement)
        inputs, latents = _inputs(family, variant, 32)
        output = family.read_prediction(model(**inputs, return_dict=False)[0], latents)
        assert output.shape == latents.shape and output.device == CARDS[0]
        assert {p.device for p in model.parameters()} == set(CARDS)
        first_there = next(name for name in placement.blocks if placement.device_of(name) == CARDS[1])
        model.get_submodule(first_there)._forward_pre_hooks.clear()
        with pytest.raises(RuntimeError, match="same device"):
            model(**inputs, return_dict=False)
        assert split.main_device == CARDS[0]


@pytest.mark.parametrize("family_name", sorted(FAMILIES))
def test_training_step_of_every_family(family_name, monkeypatch):
    monkeypatch.setattr(recompute, "random_state", lambda device: None)  # fake cards draw no numbers
    family = FAMILIES[family_name]
    variant = family.variants[0]
    model, placement = _build(family, variant, lora=True)
    with FakeTensorMode():
        _place_fakes(model, placement)
        split = apply_block_split(model, family, placement)
        model.train()
        model.enable_gradient_checkpointing(split.checkpoint)
        inputs, latents = _inputs(family, variant, 32)
        output = family.read_prediction(model(**inputs, return_dict=False)[0], latents)
        output.float().square().mean().backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert trained and all(p.grad is not None and p.grad.device == p.device for p in trained.values())
        assert {p.device for p in trained.values()} == set(CARDS)
        torch.optim.AdamW(trained.values(), lr=1e-4, foreach=False).step()
