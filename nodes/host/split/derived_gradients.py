"""Whether derived rows have the gradients of one card, which a training by tokens needs to know before it begins.

Gradients of the inputs are compared: they went through every block, and through the keys of all cards. What a weight
gets is made of the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.model_management as management
import torch

from ....events import first_line
from ....families.token_plan import TokenPlan
from ....parallel.local.token_training import TokenModel
from ....parallel.local.tokens import TokenParallel
from ....parallel.local.watching import apart
from ....patches.hooks import map_tensors, tensors_reached
from ..native.model import native_training, plain_attention
from .attachments import OVERRIDE
from .deriving import Cards, left_as_it_was, small_forwards
from .shown_inputs import FUNCTIONS, OPTIONS


def gradient_fault(cards: Cards, plan: TokenPlan, given: Mapping[str, Any]) -> str:
    """What differs between gradients of all cards, added up, and those of one; "" if nothing does."""
    with left_as_it_was(cards.models):
        small = small_forwards(cards, given)[0].given
        try:
            with native_training():
                expected, found = (gradients_of(cards, each, small) for each in (None, plan))
        except (management.InterruptProcessingException, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a class may compute what has no backward
            return first_line(error)
    if not any(float(each.abs().max()) for each in expected):
        return "nothing that it is given has a gradient"
    far = apart(found, expected)
    return "" if far <= 1 else f"gradients differ {far:.3g} times as much as rounding may"


def gradients_of(cards: Cards, plan: TokenPlan | None, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Of every tensor of floats that the forward is given; by the plan the sum of what the cards have.

    Not of a number for each sample, such as its timestep: all rows add up to it, and nearly cancel each other.
    """
    found: dict[int, list[torch.Tensor]] = {}

    def of_card(index: int) -> torch.Tensor:
        leaves = found.setdefault(index, [])

        def own(tensor: torch.Tensor) -> torch.Tensor:
            made = tensor.detach().to(cards.devices[index]).clone()
            if not made.is_floating_point() or made.ndim < 2:
                return made
            leaves.append(made.requires_grad_())
            return made * 1  # a forward may write into it, as it may not into what gradients are asked of

        made = {name: map_tensors(value, own, FUNCTIONS) for name, value in given.items()}
        made[OPTIONS] = {**(made.get(OPTIONS) or {}), OVERRIDE: plain_attention}
        # What a forward writes into a tensor that it has kept would be lost for its backward.
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept):
            outputs = tensors_reached(cards.forwards[index](**made))
        # Every number counts otherwise.
        counts = [torch.linspace(-1, 1, each.numel(), device=each.device).reshape(each.shape) for each in outputs]
        return torch.stack([(each * count).sum() for each, count in zip(outputs, counts, strict=True)]).sum()

    if plan is None:
        of_card(0).backward()
    else:
        rows = TokenParallel(cards.models, cards.devices, plan, (1.0,) * len(cards.models))
        rows.attach()
        whole, indices = TokenModel(cards.models, cards.devices, rows), list(map(id, cards.models))
        try:
            whole.together(lambda: whole.through(lambda model, device: of_card(indices.index(id(model)))).backward())
        finally:
            rows.remove()
    device, of_cards = cards.devices[0], [leaves for _, leaves in sorted(found.items())]
    gradients = [[torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in each] for each in of_cards]
    return [torch.stack([part.to(device) for part in each]).sum(0) for each in zip(*gradients, strict=True)]
