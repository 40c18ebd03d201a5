"""`devicebridge` as one rank of several, with one rank that fails in a step: FAULT is "what rank step"."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.cli.main import main  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402

WHAT, RANK, STEP = os.environ["FAULT"].split()
FORWARD = Trainer._loss


def sleep_for_ever():
    while True:
        time.sleep(1000)


def fail_in_a_forward(trainer, *arguments):
    if os.environ["RANK"] == RANK and trainer.step == int(STEP) and torch.is_grad_enabled():
        if WHAT == "sleep":
            sleep_for_ever()
        raise torch.OutOfMemoryError("no memory is left, says the test")
    return FORWARD(trainer, *arguments)


Trainer._loss = fail_in_a_forward
sys.exit(main())
