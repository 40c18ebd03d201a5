"""The command line: what it prints, what it returns, and that a user's mistake is a message and not a traceback."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from devicebridge.cli import cache as cache_module
from devicebridge.cli.jobs import Terminal
from devicebridge.cli.main import main
from devicebridge.config.job import load_job, save_job
from devicebridge.events import Event
from devicebridge.system.stopping import Requests, Stopped
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.version import VERSION

ROOT = Path(__file__).resolve().parents[3]


def _job_file(folder, **sections):
    save_job(make_tiny_job(folder, **sections), folder / "job.toml")
    return str(folder / "job.toml")


def test_check_says_what_would_happen_and_writes_nothing(tmp_path, capsys):
    assert main(["check", _job_file(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "LoRA file: original layout, for ComfyUI: diffusers cannot load these names" in out
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


def test_a_cache_is_stopped_through_the_folder_of_any_job_and_not_by_what_is_left_there(tmp_path, monkeypatch, capsys):
    jobs = []
    for name in ("one", "two"):
        output = {"folder": str(tmp_path / name)}
        jobs.append(shutil.copy(_job_file(tmp_path, output=output), tmp_path / f"{name}.toml"))
    asked = Requests(tmp_path / "one")
    (tmp_path / "one").mkdir()
    asked.ask("stop")
    begun = []

    def fill(plan, part, events, should_stop, encoders):
        begun.append((Path(plan.job.output.folder).name, part))
        if begun[-1] == ("two", "captions"):
            asked.ask("stop")
        if should_stop():
            raise Stopped("stopped, says the test")

    monkeypatch.setattr(cache_module, "fill_cache", fill)
    assert main(["cache", *map(str, jobs)]) == 130
    assert begun == [*(("one", part) for part in ("captions", "latents", "conditions")), ("two", "captions")]


def _progress(done, **values):
    return Event("progress", done, 500, {"what": "captions", **values})


def test_progress_says_pace_and_time_left_in_one_line_of_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show = Terminal()
    show(Event("phase", values={"name": "captions"}))
    show(_progress(12, per_second=None, left_s=None))
    show(_progress(250, per_second=1 / 15, left_s=3750.0))
    show(Event("phase", values={"name": "latents"}))
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "== captions" and lines[2] == "== latents"
    shown = [part.rstrip() for part in lines[1].split("\r") if "captions" in part]
    assert shown[0].startswith("  2%|") and shown[0].endswith("| captions 12/500")
    assert shown[-1].startswith(" 50%|") and shown[-1].endswith("0.067 captions/s, about 62 min left")


def _step(step, **values):
    return Event("step", step, 40, {"loss": 0.5 / step, "learning_rate": 1e-4, "elapsed_s": 2.0, **values})


def test_steps_are_one_line_of_a_terminal_with_loss_and_time_left(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show = Terminal()
    for step in range(1, 11):
        show(_step(step))
    show(Event("saved", 10, 40, {"path": "a"}))
    first, *rest = capsys.readouterr().out.split("\n")
    assert "step 10/40: loss 0.05000, 2.00 s/step, about 60 s left" in first
    assert [line for line in rest if line] == ["saved a"]


def test_quick_steps_in_a_log_are_a_line_now_and_then_with_loss_and_time_left(capsys):
    show = Terminal()
    for step in range(1, 41):
        show(_step(step))
    assert capsys.readouterr().out.splitlines() == [
        "step 1/40: loss 0.50000, 2.00 s/step, about 78 s left", "step 40/40: loss 0.01250, 2.00 s/step, about 0 s left"
    ]  # fmt: skip


def test_progress_of_a_pair_says_whose(capsys):
    Terminal()(_progress(500, per_second=2.0, left_s=0.0, expert="high_noise"))
    assert capsys.readouterr().out.startswith("[high_noise] captions")


def test_progress_in_a_log_is_a_line_now_and_then(capsys):
    show = Terminal()
    for done in range(1, 501):
        show(_progress(done, per_second=20.0, left_s=(500 - done) / 20))
    first, last = "captions 1/500, 20.0 captions/s, about 25 s left", "captions 500/500, 20.0 captions/s"
    assert capsys.readouterr().out.splitlines() == [first, last]


def test_mistakes_are_one_message_and_code_2(tmp_path, capsys):
    (tmp_path / "job.toml").write_text("[model]\npath = 3\n")
    assert main(["train", str(tmp_path / "job.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("devicebridge: ") and "model.path" in error and "Traceback" not in error
    assert main(["check", str(tmp_path / "missing.toml")]) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_the_shipped_job_files_are_valid(path):
    job = load_job(path)
    assert job.split.devices == ("cuda:0", "cuda:1") and job.train.steps > 0
    assert (job.model.quantize, job.train.gradient_accumulation_steps) == ("auto", 4)
    assert (job.cache.text_device, job.output.save_every_steps) == ("auto", 250)


def test_version_is_that_of_the_project_file(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == VERSION
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text()


# Training is a function that waits, and so is every other command, for which nothing of torch is loaded.
_WAITING = """
import runpy, sys, time, types
runpy.run_path(sys.argv[1])["load_pack"]()
from devicebridge.cli import main as cli
def wait(*args, **kwargs):
    print("waiting", flush=True)
    time.sleep(60)
if sys.argv[2] == "train":
    from devicebridge.cli import jobs
    model = types.SimpleNamespace(second_expert="", family="")
    cache = types.SimpleNamespace(needs_stock_encoders=False)
    parallel = types.SimpleNamespace(processes=1)
    found = types.SimpleNamespace(model=model, cache=cache, parallel=parallel, needs_comfyui=False)
    jobs.load_job = lambda path: found
    jobs.run_job = wait
else:
    sys.modules["devicebridge.cli.jobs"] = types.SimpleNamespace(check=wait)
    sys.modules["devicebridge.cli.plan"] = types.SimpleNamespace(plan=wait)
    sys.modules["devicebridge.cli.cache"] = types.SimpleNamespace(cache=wait)
    cli._run = cli._doctor = wait
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals are POSIX")
@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(name, marks=pytest.mark.long) for name in ("check", "plan", "cache", "doctor"))]
)
def test_the_ctrl_c_that_ends_a_command_at_once_is_one_line(command):
    """The second one where the first asks for a checkpoint; test_headless.py has that of `run`."""
    arguments = [command] if command == "doctor" else [command, "file"]
    start = [sys.executable, "-c", _WAITING, str(ROOT / "bootstrap.py"), *arguments]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        if command == "train":
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "stopping; what is done is saved\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == ("", "devicebridge: interrupted\n")
    assert process.returncode == 130
