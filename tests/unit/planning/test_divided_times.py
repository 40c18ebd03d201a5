"""What the host takes for divided blocks: launches and exchanges as they are counted, and what each was measured at."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of
from devicebridge.planning.divided_times import EXCHANGE_S, LAUNCH_S, count_exchanges
from devicebridge.tests.plans import full_size, make_cards, make_question
from devicebridge.tests.toy import TINY
from devicebridge.tests.unit.planning.test_forecast import LORA, _dry_run
from devicebridge.training.adapter import apply_lora
from torch.utils._python_dispatch import TorchDispatchMode

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
pytestmark = pytest.mark.usefixtures("one_thread")


class _Launches(TorchDispatchMode):
    """Counts operations that compute, of real tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.__name__ and "_unsafe_view" not in func.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_launches_are_those_that_blocks_make(name: str) -> None:
    """Of each block's forward and backward. Attention is one operation on the CPU, and several on tensors without data
    that are to be as on emulated cards."""
    model = TINY[name].make_model(seed=0)
    apply_lora(model, FAMILIES[name], LORA, seed=0)
    found: list[tuple[int, int]] = []

    def measured(block: Any, *args: Any) -> Any:
        given = [
            each.detach().requires_grad_(each.is_floating_point()) if isinstance(each, torch.Tensor) else each
            for each in args
        ]
        with _Launches() as forward:
            outputs = block(*given)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        with _Launches() as backward:
            torch.autograd.backward(tensors, [torch.ones_like(each) for each in tensors])
        found.append((forward.count, backward.count))
        return outputs

    model.train()
    model.enable_gradient_checkpointing(measured)
    model(**TINY[name].make_inputs(batch=1), return_dict=False)
    blocks = _dry_run(TINY[name], TINY[name].latent_shape, "none").blocks
    assert len(found) == len(blocks) > 1
    for (forward, backward), block in zip(found, blocks, strict=True):
        assert block.launches[0] == pytest.approx(forward, rel=0.2) and forward > 20
        assert block.launches[1] == pytest.approx(backward, rel=0.2) and backward > 30


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_exchanges_are_the_meetings_of_a_divided_block(name: str) -> None:
    family, model = FAMILIES[name], TINY[name].make_model(seed=0)
    found = []
    for block_list in family.block_lists:
        for block in getattr(model, block_list.name):
            plan = find_plan(family.tensor, block)
            assert plan is not None
            shares = shares_of(block, plan, (1, 1))
            shard = divide_block(copy.deepcopy(block), plan, shares, 0)
            found.append(len(shard.meetings))
    assert count_exchanges(model, family) == found and all(found)


def test_a_launch_takes_what_it_took_where_the_host_was_the_limit() -> None:
    """Two cards that trained FLUX.1 at 512x512, which ought to need less than half of what they took."""
    measured = json.loads((RESULTS / "train_step_flux1-512_2xh200_2026-11-22.json").read_text(encoding="utf-8"))
    ways = measured["sections"]["flux1-512, bf16"]["ways"]
    question = make_question(full_size("flux1"), make_cards(200, 200), model={"quantize": "none"})
    blocks = question.alone(0)._cost("none").blocks
    forward, backward = (sum(each) for each in zip(*(block.launches for block in blocks), strict=True))
    counts = {"": 2 * forward + backward, ", keep": forward + backward}
    each = [
        ways[f"{way} 8{kept}"]["s_per_sample"] / count
        for way in ("pipeline", "replicas")
        for kept, count in counts.items()
    ]
    assert 25e-6 < min(each) < LAUNCH_S < max(each) < 30e-6


def test_a_step_that_waits_for_the_host_takes_what_was_measured() -> None:
    """FLUX.2 at 512x512 in bf16, every block recomputed."""
    measured = json.loads((RESULTS / "train_step_tensor_2xh200_2026-11-24.json").read_text(encoding="utf-8"))
    step_s = measured["sections"]["flux2-512, bf16"]["ways"]["tensor"]["s_per_sample"]
    question = make_question(full_size(), make_cards(200, 200), model={"quantize": "none"})
    times = question.divided(0, (1, 1)).times
    assert times.exchanged  # type: ignore[attr-defined]
    host = 0.0
    for block, (forward, backward) in enumerate(times.launches("none")):  # type: ignore[attr-defined]
        meetings = 3 * times.num_exchanges[block] * EXCHANGE_S  # type: ignore[attr-defined]
        host += 2 * ((2 * forward + backward) * LAUNCH_S + meetings)
    assert host == pytest.approx(step_s, rel=0.02)
