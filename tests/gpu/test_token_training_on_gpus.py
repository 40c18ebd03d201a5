"""Copies on two GPUs that share out the rows of each microbatch; autograd runs the backward in threads of its own."""

import pytest
import torch
from devicebridge.families.token_plan import TokenPlan
from devicebridge.parallel.runner import Runner
from devicebridge.tests.gpu.conftest import CARDS, NEEDS_TWO
from devicebridge.tests.token_cases import PLAN, WHOLE_TEXT, make_toy, make_training, microbatches

pytestmark = [pytest.mark.gpu, NEEDS_TWO]


@pytest.mark.parametrize("plan", [PLAN, WHOLE_TEXT], ids=["text shared out", "text whole"])
@pytest.mark.parametrize("recomputes", [True, False])
def test_gradients_are_those_of_one_card(recomputes: bool, plan: TokenPlan) -> None:
    toy = make_toy()
    losses = Runner(toy, torch.device("cpu")).run(microbatches(toy, 3))
    training = make_training(make_toy(), CARDS, plan, recomputes=recomputes)
    found = training.run(microbatches(training.model, 3))
    assert torch.allclose(torch.stack([each.cpu() for each in found]), torch.stack(losses), rtol=1e-12)
    for one, shared in zip(toy.parameters(), training.model.copies[0].parameters(), strict=True):
        assert torch.allclose(shared.grad.cpu(), one.grad, rtol=1e-10, atol=1e-14)
