"""What loss masks leave black is held to the model without its LoRA, wherever the model lies."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from devicebridge.families.registry import FAMILIES
from devicebridge.jobs.job import check_job
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_cards_job, run_on_cards
from devicebridge.training.objective import NoisyBatch, Objective, predict
from diffusers import Flux2Transformer2DModel
from torch import nn

pytestmark = pytest.mark.usefixtures("one_thread", "short_texts")
TWO = ["lazy:0", "lazy:1"]


_job = partial(
    make_cards_job, train={"steps": 4, "batch_size": 2, "gradient_accumulation_steps": 2, "seed": 3},
    split={"devices": ["cpu"]}, lora={}, optimizer={"learning_rate": 3e-2}, objective={"masked_prior": 50.0},
    parallel={"strategy": "none"}, evaluation={"folder": ""},
)  # fmt: skip


def test_black_is_held_to_the_model_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = Objective.loss, []

    def watched(self: Objective, batch: NoisyBatch, model: nn.Module, device: torch.device) -> torch.Tensor:
        loss = own(self, batch, model, device)
        given = self.family, model, batch.noisy, batch.sigmas, batch.text, self.variant.training_guidance
        with torch.no_grad():
            seen.append((loss.item(), batch, given, predict(*given)))
        return loss

    monkeypatch.setattr(Objective, "loss", watched)
    trained = run_on_cards(_job(tmp_path, "watched"))
    base = Flux2Transformer2DModel.from_pretrained(tmp_path / "model" / "transformer")
    held = False
    for loss, batch, (_, _, *given), said in seen:
        with torch.no_grad():
            plain = predict(FAMILIES["flux2"], base, *given)
        white = torch.ones_like(said) if batch.mask is None else batch.mask.expand_as(said)
        black = 1 - white
        expected = float((white * (said - batch.target) ** 2).sum() / white.sum())
        if black.any():
            apart = float((black * (said - plain) ** 2).sum() / black.sum())
            expected, held = expected + 50 * apart, held or 50 * apart > 0.01
        assert loss == pytest.approx(expected, rel=1e-4)
    assert held
    monkeypatch.undo()
    assert trained.losses[0] == pytest.approx(run_on_cards(_job(tmp_path, "free", objective={})).losses[0])


def test_it_is_the_same_on_copies_and_over_several_cards(tmp_path: Path) -> None:
    one = run_on_cards(_job(tmp_path, "one"))
    for name, strategy in (("split", "none"), ("copies", "data")):
        other = run_on_cards(_job(tmp_path, name, split={"devices": TWO}, parallel={"strategy": strategy}))
        assert other.losses == pytest.approx(one.losses, rel=1e-5), name
    with emulated_cards(2):
        chosen = check_job(_job(tmp_path, "auto", split={"devices": TWO}, parallel={"strategy": "auto"}))
    assert chosen.execution.strategy in ("none", "data")


@pytest.mark.parametrize("strategy", ["pipeline", "tokens", "fsdp"])
def test_strategies_that_have_others_in_the_model_are_refused(tmp_path: Path, strategy: str) -> None:
    with pytest.raises(ValueError, match=f'objective.masked_prior = 50 is .* "{strategy}"'):
        _job(tmp_path, "refused", parallel={"strategy": strategy})
