"""A tiny model over emulated cards, ready to train, and micro-batches for it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from devicebridge.config.job import LoraSettings
from devicebridge.families.registry import FAMILIES
from devicebridge.families.spec import ModelFamily
from devicebridge.parallel.local.bridge import BlockSplit
from devicebridge.parallel.local.pipeline import Pipeline
from devicebridge.parallel.placement import Placement, block_names, plan_manual
from devicebridge.parallel.runner import MicroBatch, Runner
from devicebridge.quantization.quantize import QuantizeSettings
from devicebridge.tests.emulated import CARDS, on_cpu
from devicebridge.tests.placed import apply_block_split
from devicebridge.tests.quantized import apply_quantization
from devicebridge.tests.toy import TINY
from devicebridge.training.adapter import LoraHandle, apply_lora


def make_tiny_split(
    name: str, cards: Sequence[torch.device], *, cuts: Sequence[int] | None = None, scheme: str | None = None,
    checkpointing: bool = True, kept: Sequence[int] = (), changes: dict[str, Any] | None = None, **lora: Any,
) -> tuple[torch.nn.Module, BlockSplit, LoraHandle]:  # fmt: skip
    """A family's tiny model with a LoRA that is not zero, its tail on the last card. Args: cuts: None for even ones.
    changes: to the model's config. lora: settings of it."""
    family = FAMILIES[name]
    model = TINY[name].make_model(seed=0, **(changes or {}))
    names = block_names(model, family)
    cuts = cuts or [len(names) * (i + 1) // len(cards) for i in range(len(cards) - 1)]
    manual = plan_manual(names, list(cards), cuts)
    placement = Placement(manual.blocks, manual.devices, manual.main_device, tail=tuple(family.tail))
    split = apply_block_split(model, family, placement)
    if scheme is not None:
        model.requires_grad_(False)
        apply_quantization(model, family, QuantizeSettings(scheme))  # type: ignore[arg-type]
    handle = random_lora(model, family, **lora)
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing(split.checkpoint)  # type: ignore[operator]
        split.keep_activations(kept)
    return model, split, handle


def random_lora(model: torch.nn.Module, family: ModelFamily, seed: int = 1, **settings: Any) -> LoraHandle:
    """One that is not zero: a fresh B would hide a wrong gradient of A."""
    handle = apply_lora(model, family, LoraSettings(rank=2, alpha=3, **settings), seed=seed)
    with torch.no_grad():
        for parameter in handle.parameters().values():
            generator = torch.Generator().manual_seed(parameter.numel() + seed)
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul_(0.1))
    return handle


def make_batches_for(
    replica_for: Callable[[int], tuple[Any, torch.device]], name: str, count: int, first: int = 0
) -> list[MicroBatch[dict[str, Any]]]:
    """Micro-batches numbered from first on, each with its own inputs; replica_for: index -> model and its home."""
    family, tiny = FAMILIES[name], TINY[name]

    def make(index: int) -> MicroBatch[dict[str, Any]]:
        model, main_device = replica_for(index)

        def forward(inputs: dict[str, Any]) -> torch.Tensor:
            inputs = {k: v.to(main_device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
            output = model(**inputs, return_dict=False)[0]
            return family.read_prediction(output, tiny.make_latents(seed=first + index)).square().mean() / count

        return MicroBatch(lambda: tiny.make_inputs(seed=first + index), forward)

    return [make(index) for index in range(count)]


def make_micro_batches(
    model: torch.nn.Module, name: str, count: int, main_device: torch.device = CARDS[0]
) -> list[MicroBatch[dict[str, Any]]]:
    """All through one model."""
    return make_batches_for(lambda index: (model, main_device), name, count)


def losses_of(split: BlockSplit, batches: Sequence[MicroBatch[Any]], ahead: int | None = None) -> list[torch.Tensor]:
    """Of a step, through a pipeline with so many ahead, or one micro-batch after the other; gradients are added up."""
    one = Runner(split.model, split.main_device)
    runner = one if ahead is None else Pipeline(split.model, split.bridge, ahead=ahead)
    return [on_cpu(loss) for loss in runner.run(batches)]


Outcome = tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor]]


def outcome(losses: list[torch.Tensor], lora: LoraHandle, cards: Sequence[torch.device]) -> Outcome:
    """Losses, gradients, and the cards' random states."""
    gradients = {name: on_cpu(parameter.grad) for name, parameter in lora.parameters().items()}
    return losses, gradients, [torch.lazy.get_rng_state(card) for card in cards]


def assert_same(found: Outcome, expected: Outcome) -> None:
    """The very bits, and gradients that are not zero."""
    assert all(map(torch.equal, found[0], expected[0])) and len(found[0]) == len(expected[0])
    assert found[1].keys() == expected[1].keys() and all(each.abs().sum() > 0 for each in expected[1].values())
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in found[1].items())
    assert all(map(torch.equal, found[2], expected[2])) and len(found[2]) == len(expected[2])


class BrokenBackward(torch.autograd.Function):
    """The identity, whose backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError
