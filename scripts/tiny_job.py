"""Writes a tiny model of random weights, images and a job over them: FOLDER/job.toml, for trials on any machine."""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "bootstrap.py"))["load_pack"]()

from devicebridge.config.job import save_job  # noqa: E402
from devicebridge.tests.tiny_pipeline import make_tiny_job  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--family", default="flux2")
parser.add_argument("--strategy", default="auto")
parser.add_argument("--accumulation", type=int, default=4)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
options.folder.mkdir(parents=True, exist_ok=True)
train = {"steps": options.steps, "batch_size": 1, "gradient_accumulation_steps": options.accumulation}
job = make_tiny_job(options.folder, options.family, train=train, parallel={"strategy": options.strategy})
save_job(job, options.folder / "job.toml")
print(options.folder / "job.toml")
