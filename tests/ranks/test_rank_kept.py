"""Two ranks of fsdp on CPUs that are planned as cards: how many blocks keep their activations, and that it changes no
number."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from devicebridge.config.job import JobConfig, save_job
from devicebridge.jobs.rank_plans import plan_shared, shared_weights
from devicebridge.jobs.read_job import read_job
from devicebridge.planning.cards import Card
from devicebridge.planning.search import HEADROOM
from devicebridge.tests.ranks.launching import run_jobs
from devicebridge.tests.tiny_pipeline import make_tiny_job
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs gloo over a loopback device"),
    pytest.mark.usefixtures("short_texts"),
]
STEPS = 4
SETTINGS = {
    "recomputed": {},
    "chosen": {},
    "resumed": {},
    "asked": {"split": {"blocks_without_checkpointing": [1, 1]}},
    "all asked": {"train": {"gradient_checkpointing": False}},
    "too small": {},
}


def _job(folder: Path, name: str) -> JobConfig:
    sections = {key: dict(value) for key, value in SETTINGS[name].items()}
    train = {"steps": STEPS, "batch_size": 1, "gradient_accumulation_steps": 2, **sections.pop("train", {})}
    output = {"folder": str(folder / name), "save_every_steps": 2}
    return make_tiny_job(folder, train=train, output=output, parallel={"strategy": "fsdp"}, **sections)


def _room_for(job: JobConfig, kept: int) -> int:
    """Bytes of the smallest card on which so many blocks may keep their activations."""
    split = dataclasses.replace(job.split, blocks_without_checkpointing=(kept,))
    optimizer = dataclasses.replace(job.optimizer, name="adamw")
    train = dataclasses.replace(job.train, gradient_accumulation_steps=1)
    one = dataclasses.replace(job, split=split, optimizer=optimizer, train=train)
    one = dataclasses.replace(one, model=dataclasses.replace(one.model, quantize="none"))
    card = Card(torch.device("cpu"), 10**12, 10**12)
    subject = read_job(job).subject
    (device,) = plan_shared(one, subject, card, 2).devices
    return int((device.needed + max(shared_weights(one, subject).blocks)) / (1 - HEADROOM)) + 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What each job did; "recomputed" has no room that anybody knows."""
    folder = tmp_path_factory.mktemp("kept")
    jobs = {name: _job(folder, name) for name in SETTINGS}
    for name, job in jobs.items():
        save_job(job, folder / f"{name}.toml")
    rooms = {kept: _room_for(jobs["chosen"], kept) for kept in (2, 3)}
    assert rooms[2] < rooms[3], "a block that keeps its activations needs more"
    plan = [
        {"job": folder / "recomputed.toml"},
        {"job": folder / "chosen.toml", "rooms": [rooms[3], rooms[2]]},
        {"job": folder / "resumed.toml", "rooms": [rooms[2], rooms[3]], "stop": 2},
        {"job": folder / "resumed.toml", "rooms": [rooms[3], rooms[3]], "resume": True},
        {"job": folder / "asked.toml", "rooms": [rooms[3], rooms[3]]},
        {"job": folder / "all asked.toml", "rooms": [rooms[3], rooms[3]]},
        {"job": folder / "too small.toml", "rooms": [10**8, rooms[3]]},
    ]
    results = run_jobs(folder, plan, count=2)
    names = ["recomputed", "chosen", "stopped", "resumed", "asked", "all asked", "too small"]
    loras = {name: load_file(f"{jobs[name].output.folder}/{jobs[name].output.file_name}") for name in SETTINGS}
    return {name: {**each, "lora": loras.get(name)} for name, each in zip(names, results, strict=True)}


@pytest.mark.parametrize(
    ("name", "kept"),
    [("recomputed", []), ("chosen", [2]), ("stopped", [2]), ("resumed", [3]), ("asked", [1]), ("too small", [0])],
)
def test_all_ranks_keep_what_the_smallest_card_has_room_for_or_what_was_asked(name, kept, found):
    assert found[name]["kept"] == [kept, kept]


@pytest.mark.parametrize("name", ["chosen", "resumed", "asked", "all asked", "too small"])
def test_blocks_that_are_not_computed_again_train_the_same_lora_bit_for_bit(name, found):
    expected, lora = found["recomputed"]["lora"], found[name]["lora"]
    assert found[name]["status"] == "finished" and found[name]["losses"] == found["recomputed"]["losses"]
    assert lora.keys() == expected.keys()
    assert all(torch.equal(lora[key], expected[key]) for key in expected)


def test_the_forecast_of_a_run_counts_the_kept_activations(found):
    assert not found["recomputed"]["forecast"]
    names = ("too small", "chosen", "resumed", "all asked")
    recomputed, two, three, whole = (found[name]["forecast"][0] for name in names)
    assert recomputed["kept"] == 0 < two["kept"] < three["kept"] < whole["kept"]
    assert recomputed["weights"] == two["weights"] == whole["weights"]


def test_what_does_not_fit_by_the_forecast_is_said_and_tried(found):
    (told,) = [line for line in found["too small"]["log"] if "by the forecast" in line]
    assert "of 0.1 GB" in told and not any("by the forecast" in line for line in found["chosen"]["log"])
