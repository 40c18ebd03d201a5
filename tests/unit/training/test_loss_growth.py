"""A loss that grows without end is told of, one that jumps is not."""

from __future__ import annotations

import random

from devicebridge.jobs.job import run_job
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.objective import describe_growth


def _said(losses):
    return [step for step in range(1, len(losses) + 1) if describe_growth(losses[:step])]


def test_a_loss_that_grows_is_told_of_and_one_that_only_jumps_is_not():
    draw = random.Random(0)
    jumping = [draw.choice([0.03, 0.1, 0.4, 1.5]) for _ in range(1000)]
    assert _said(jumping) == [] and _said([0.5 - step / 1000 for step in range(400)]) == []
    growing = [loss * 1.02**step for step, loss in enumerate(jumping)]
    assert _said(growing)[0] == 200 and "over steps 1 to 50, and is" in describe_growth(growing[:200])
    high = [*jumping[:200], *(loss * 50 for loss in jumping[:50])]
    assert _said(high) == []  # one window is no rise yet


def test_a_run_whose_loss_grows_says_so_once(tmp_path, monkeypatch, caplog):
    grown = []
    monkeypatch.setattr(
        "devicebridge.training.loop.describe_growth", lambda losses: grown.append(len(losses)) or "the loss grows"
    )
    run_job(make_tiny_job(tmp_path, evaluation={"folder": ""}))
    assert grown == [1] and caplog.text.count("the loss grows") == 1
