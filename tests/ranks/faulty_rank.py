"""`devicebridge` as one rank of several, with one rank that fails in its first start: FAULT is "what rank step".

"sleep", "stopped", "oom" and "killed" happen in a step. "evaluates", "saves", "draws" and "ends" sleep where that is
done after a step. "compiler" fails before the first step. "captions" fails nothing: there every caption takes
as many seconds as the step's number says.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.cli.main import main  # noqa: E402
from devicebridge.encoding.sources import FolderTexts  # noqa: E402
from devicebridge.sampling.sampler import Sampler  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402
from devicebridge.training.objective import Objective  # noqa: E402

WHAT, RANK, STEP = os.environ["FAULT"].split()
IS_FAULTY = os.environ["RANK"] == RANK and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
RUN, LOSS, ENCODE = Trainer.run, Objective.loss, FolderTexts.encode_batch
TRAINERS = []
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# What is called while a rank does that, and which step it is.
PLACES = {
    "evaluates": (Objective, "loss", lambda *_: -1 if torch.is_grad_enabled() else TRAINERS[0].step),
    "saves": (Trainer, "save", lambda trainer: trainer.step),
    "ends": (Trainer, "_refuse_spoilt_weights", lambda trainer: trainer.step),
    "draws": (Sampler, "_drawn", lambda sampler, should_stop: sampler.trainer.step),
}


def sleep_for_ever():
    while True:
        time.sleep(1000)


def run(trainer, *arguments):
    TRAINERS.append(trainer)
    return RUN(trainer, *arguments)


def fail_in_a_forward(*arguments):
    if IS_FAULTY and TRAINERS[0].step == int(STEP) and torch.is_grad_enabled():
        if WHAT == "sleep":
            sleep_for_ever()
        if WHAT in SIGNALS:
            os.kill(os.getpid(), SIGNALS[WHAT])
            return LOSS(*arguments)
        raise torch.OutOfMemoryError("no memory is left, says the test")
    return LOSS(*arguments)


def sleep_in(cls, name, step_of):
    own = getattr(cls, name)

    def method(*arguments):
        if IS_FAULTY and step_of(*arguments) == int(STEP):
            sleep_for_ever()
        return own(*arguments)

    setattr(cls, name, method)


def make_no_code(graph, inputs):
    raise RuntimeError("no code for this graph, says the test")


def encode_slowly(source, texts):
    time.sleep(float(STEP))
    return ENCODE(source, texts)


Trainer.run = run
if WHAT in ("sleep", "oom", *SIGNALS):
    Objective.loss = fail_in_a_forward
if WHAT in PLACES:
    sleep_in(*PLACES[WHAT])
COMPILE = torch.compile
if WHAT == "compiler":
    backend = make_no_code if IS_FAULTY else "eager"
    torch.compile = lambda forward, **options: COMPILE(forward, **{**options, "backend": backend})
if WHAT == "captions":
    FolderTexts.encode_batch = encode_slowly
sys.exit(main())
