"""The command line: what it prints, what it returns, and that a user's mistake is a message and not a traceback."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from devicebridge.cli import main
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.config import load_job, save_job
from devicebridge.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


def _job_file(folder, **sections):
    save_job(make_tiny_job(folder, **sections), folder / "job.toml")
    return str(folder / "job.toml")


def test_check_says_what_would_happen_and_writes_nothing(tmp_path, capsys):
    assert main(["check", _job_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "FLUX.2" in out and "placement: cpu: 4 blocks" in out and "images: 5 for training, 2 for evaluation" in out
    assert not (tmp_path / "run").exists()


def test_cache_then_train(tmp_path, capsys):
    job = _job_file(tmp_path, train={"steps": 2, "batch_size": 2})
    assert main(["cache", job]) == 0
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert main(["train", job]) == 0
    out = capsys.readouterr().out
    assert re.search(r"evaluation loss: \d\.\d+ before, \d\.\d+ after 2 steps", out)
    assert f"LoRA: {tmp_path / 'run' / 'lora.safetensors'}" in out


def test_mistakes_are_one_message_and_code_2(tmp_path, capsys):
    (tmp_path / "job.toml").write_text("[model]\npath = 3\n")
    assert main(["train", str(tmp_path / "job.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("devicebridge: ") and "model.path" in error and "Traceback" not in error
    assert main(["check", str(tmp_path / "missing.toml")]) == 2


def test_a_device_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["check", _job_file(tmp_path, split={"devices": ["cuda:7"]})]) == 2
    assert "device 'cuda:7' does not exist on this machine; found here: cpu" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["flux2", "flux1", "wan"])
def test_the_shipped_job_files_are_valid(name):
    job = load_job(ROOT / "examples" / f"{name}.toml")
    assert job.split.devices == ("cuda:0", "cuda:1") and job.train.steps > 0


def test_version_is_that_of_the_project_file(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == VERSION
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text()
