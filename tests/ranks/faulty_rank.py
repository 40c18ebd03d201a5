"""`devicebridge` as one rank of several, with one rank that fails in its first start: FAULT is "what rank step".

"sleep", "oom" and "killed" happen in a step, "compiler" before the first one. "captions" and "loads" fail nothing:
there every caption takes as many seconds as the step's number says, and what is loaded and encoded is told.
"""

from __future__ import annotations

import functools
import logging
import os
import runpy
import signal
import sys
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.cli.main import main  # noqa: E402
from devicebridge.encoding.sources import FolderLatents, FolderTexts  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402

WHAT, RANK, STEP = os.environ["FAULT"].split()
IS_FAULTY = os.environ["RANK"] == RANK and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
FORWARD, ENCODE = Trainer._loss, FolderTexts.encode_batch


def sleep_for_ever():
    while True:
        time.sleep(1000)


def fail_in_a_forward(trainer, *arguments):
    if IS_FAULTY and trainer.step == int(STEP) and torch.is_grad_enabled():
        if WHAT == "sleep":
            sleep_for_ever()
        if WHAT == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise torch.OutOfMemoryError("no memory is left, says the test")
    return FORWARD(trainer, *arguments)


def make_no_code(graph, inputs):
    raise RuntimeError("no code for this graph, says the test")


def encode_slowly(source, texts):
    time.sleep(float(STEP))
    for _ in texts:
        print("1 caption is encoded", flush=True)
    return ENCODE(source, texts)


def load_and_tell(load):
    def told(source):
        print(source.name, "is loaded, says the test", flush=True)
        load(source)

    return told


if WHAT in ("sleep", "oom", "killed"):
    Trainer._loss = fail_in_a_forward
if WHAT == "compiler":
    torch.compile = functools.partial(torch.compile, backend=make_no_code if IS_FAULTY else "eager")
if WHAT in ("captions", "loads"):
    FolderTexts.encode_batch = encode_slowly
if WHAT == "loads":
    logging.getLogger("devicebridge").setLevel(logging.INFO)
    FolderTexts.load, FolderLatents.load = load_and_tell(FolderTexts.load), load_and_tell(FolderLatents.load)
sys.exit(main())
