"""What machines that train one job must be given alike, and what each of them may have its own way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from devicebridge.config.job import job_keys, job_to_dict, make_job, shared_settings
from devicebridge.jobs.ranks import differing_ranks
from devicebridge.tests.tiny_pipeline import make_tiny_job

# Of one machine: where files lie, which devices it has, and what each process does by itself.
OWN = {
    "model": {"path": "/elsewhere/model", "quantized_cache": "/elsewhere/kept"},
    "split": {"devices": ["cuda:1", "cuda:0"], "balance": "time", "memory_limit_gb": [20, 14]},
    "parallel": {"processes": 4, "timeout_s": 60.0},
    "cache": {"folder": "/elsewhere/cache", "vae_device": "cuda:1", "text_device": "cpu", "stock_clip": ["/else/a"]},
    "output": {"folder": "/elsewhere/run", "name": "mine", "keep_last": 9},
    "train": {"cuda_graphs": "auto", "offload_activations": "off"},
}


def _changed(job, sections):
    values = job_to_dict(job)
    return make_job({**values, **{name: {**values[name], **section} for name, section in sections.items()}})


def test_machines_may_have_paths_and_devices_of_their_own(tmp_path: Path) -> None:
    job = make_tiny_job(tmp_path)
    moved = dataclasses.replace(job.data.folders[0], path="/elsewhere/data")
    other = _changed(job, OWN | {"data": {"folders": [dataclasses.asdict(moved)]}})
    assert shared_settings(other) == shared_settings(job)


def test_every_setting_that_a_resumed_run_must_keep_is_compared_unless_it_is_a_machines_own(tmp_path: Path) -> None:
    kept = {key.path for key in job_keys().values() if not (key.is_free or key.is_path) and key.section != "split"}
    own = {"cache.vae_device", "cache.stock_clip", "cache.stock_vae", "cache.stock_vision", "data.folders"}
    assert kept - own <= shared_settings(make_tiny_job(tmp_path)).keys()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("evaluation", "folder", ""),
        ("evaluation", "every_steps", 2),
        ("output", "save_every_steps", 3),
        ("samples", "prompts", ["a cat"]),
        ("parallel", "strategy", "fsdp"),
    ],
)
def test_what_says_when_ranks_wait_is_compared(section: str, key: str, value: object, tmp_path: Path) -> None:
    job = make_tiny_job(tmp_path)
    found, expected = shared_settings(_changed(job, {section: {key: value}})), shared_settings(job)
    assert [name for name in expected if found[name] != expected[name]] == [f"{section}.{key}"]


def test_a_difference_names_every_kind_once_with_the_first_rank_that_has_it() -> None:
    given = [(f"rank {rank}", {"train.steps": [steps], "model": ["hash"]}) for rank, steps in enumerate((6, 6, 4, 4))]
    assert list(differing_ranks(given)) == ["train.steps: 6 on rank 0, 4 on rank 2"]
    given[3] = ("rank 3", {"train.steps": [6], "model": ["other"]})
    (line,) = (line for line in differing_ranks(given) if line.startswith("model"))
    assert line == "model: the weights at model.path are not on rank 3 what they are on rank 0"
