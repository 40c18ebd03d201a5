"""Kills one of two processes of a job at random moments, again and again; the run must end whole each time.

Every round starts `devicebridge train --nproc 2 --resume`, kills a random rank with SIGKILL after a random time, and
looks whether all processes are gone within 30 s. At the end the run is finished by one process, and its losses must be
those of a run that nobody disturbed. About a minute per round on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "bootstrap.py"))["load_pack"]()

from devicebridge.config.job import save_job  # noqa: E402
from devicebridge.jobs.job import run_job  # noqa: E402
from devicebridge.tests.ranks.launching import none_left, ranks_of, read_until, start_cli  # noqa: E402
from devicebridge.tests.tiny_pipeline import make_tiny_job  # noqa: E402
from devicebridge.training.loop import checkpoint_folder  # noqa: E402
from devicebridge.training.state import list_checkpoints  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train = {"steps": 100_000, "batch_size": 1, "gradient_accumulation_steps": 2}
        sections = {"evaluation": {"folder": ""}, "parallel": {"strategy": options.strategy}}
        job = make_tiny_job(folder, "wan", train=train, **sections)
        save_job(job, folder / "job.toml")
        for index in range(options.rounds):
            before = _newest(job)
            _round(folder / "job.toml", chance)
            print(f"round {index + 1}: steps saved {before} -> {_newest(job)}", flush=True)
        steps = _newest(job) + 1
        job = dataclasses.replace(job, parallel=dataclasses.replace(job.parallel, strategy="auto"))
        job = dataclasses.replace(job, train=dataclasses.replace(job.train, steps=steps))
        found = run_job(job, resume=True).losses
        whole = dataclasses.replace(job, output=dataclasses.replace(job.output, folder=str(folder / "whole")))
        worst = max(abs(a / b - 1) for a, b in zip(found, run_job(whole).losses, strict=True))
        print(f"{steps} steps, losses differ by {worst:.1e} from an undisturbed run")
        return int(worst > 1e-4)


def _newest(job: object) -> int:
    found = list_checkpoints(checkpoint_folder(job))  # type: ignore[arg-type]
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _round(file: Path, chance: random.Random) -> None:
    process = start_cli("train", file, "--nproc", 2, "--resume")
    if chance.random() < 0.7:  # else somewhere between the start and the first step
        read_until(process, "step ")
    time.sleep(chance.uniform(0, 4))
    victims = ranks_of(file)
    if victims:
        victims[chance.choice(sorted(victims))].send_signal(signal.SIGKILL)
    else:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=300)
    assert none_left(file), "processes are left"


if __name__ == "__main__":
    sys.exit(main())
