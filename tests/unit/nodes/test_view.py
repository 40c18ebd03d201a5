"""What a node shows of a job: captions per second and the time left, measured by a clock of the test's own."""

import importlib
from pathlib import Path

import pytest
from devicebridge.events import Event, EventLog
from devicebridge.jobs.encode_job import tell_progress
from devicebridge.system.progress import Pace
from devicebridge.tests import comfy_stub
from devicebridge.tests.unit.system.test_pace import _Clock
from PIL import Image


def test_a_node_shows_captions_per_second_and_the_time_left(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    clock = _Clock()
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", clock)
    pace = Pace(clock)
    with EventLog(tmp_path, view) as events:
        events.emit("phase", name="captions")
        clock.now_s += 1
        tell_progress(events, pace, 40, 100, "captions")  # found in the cache
        clock.now_s += 300  # the encoder is loaded
        pace.restart()
        for done in (41, 42):
            clock.now_s += 15
            tell_progress(events, pace, done, 100, "captions")
        clock.now_s += 0.01
        tell_progress(events, pace, 43, 100, "captions")  # too soon for another line, not for the bar
        clock.now_s += 20
        tell_progress(events, pace, 100, 100, "captions")
    assert host.texts == [
        "Encoding captions", "captions 40/100", "captions 41/100, 0.067 captions/s, about 15 min left",
        "captions 42/100, 0.067 captions/s, about 14 min left", "captions 100/100",
    ]  # fmt: skip
    assert host.progress == [(0, 1), (40, 100), (41, 100), (42, 100), (43, 100), (100, 100)]
    told = [message for _, message in host.messages if message["kind"] == "progress"]
    assert told[2]["values"] == {"what": "captions", "per_second": pytest.approx(1 / 15), "left_s": pytest.approx(870)}


def test_the_hours_of_a_run_are_shown_before_its_first_step(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", _Clock())
    with EventLog(tmp_path, view) as events:
        events.emit("phase", name="loading", placement="cuda:0: 8 blocks")
        events.emit("forecast", devices={}, parts={}, pace="step: 56 s, 1500 steps about 23 h")
        events.emit("forecast", 3, 3, devices={}, pace="step: forecast 56 s, measured 57 s")
    assert host.texts[-1].splitlines() == [
        "Loading the model onto its devices: cuda:0: 8 blocks",
        "step: 56 s, 1500 steps about 23 h",
    ]


def test_every_phase_has_a_bar_of_its_own(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    """ComfyUI's bar drops values smaller than it has shown, so one for all phases would stay at 100 %."""
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", _Clock())
    with EventLog(tmp_path, view) as events:
        for phase, total in (("captions", 5), ("latents", 20)):
            events.emit("phase", name=phase)
            for done in (1, total):
                events.emit("progress", done, total, what=phase)
        events.emit("phase", name="training")
        for step in (1, 2):
            events.emit("step", step, 40, loss=0.5, learning_rate=1e-4, elapsed_s=1.0)
    assert host.shown == [(0, 1), (1, 5), (5, 5), (0, 1), (1, 20), (20, 20), (0, 1), (1, 40), (2, 40)]


def test_a_node_shows_loss_and_memory_of_every_rank(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", _Clock())
    peaks = {f"rank {rank} cuda:{rank}": {"allocated": 1.0, "peak": 20.25 + rank, "reserved": 22.0} for rank in (0, 1)}
    with EventLog(tmp_path, view) as events:
        events.emit("memory", 1, 2, **peaks)
        events.emit("step", 2, 2, loss=0.5, learning_rate=1e-4, elapsed_s=1.0, rank_losses=[0.25, 0.75])
    assert host.texts[-1].splitlines()[1:] == [
        "loss: rank 0 0.25000, rank 1 0.75000",
        "peak memory: rank 0 cuda:0 20.2 GB, rank 1 cuda:1 21.2 GB",
    ]


def test_a_log_has_a_line_of_progress_now_and_then(host, tmp_path, caplog):
    clock = _Clock()
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", clock)
    with caplog.at_level("INFO"), EventLog(tmp_path, view) as events:
        for step in range(1, 41):
            clock.now_s += 1
            events.emit("step", step, 40, loss=0.5, learning_rate=1e-4, elapsed_s=1.0)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("training: ")]
    assert lines[1] == "training: Step 11/40: loss 0.50000, 1.00 s/step, about 29 s left"
    assert [line.split()[2] for line in lines] == [f"{step}/40:" for step in (1, 11, 21, 31, 40)]


def test_a_node_previews_the_newest_picture_and_its_progress_stays(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", _Clock())
    for index, (name, colour) in enumerate([("0.png", "red"), ("1.webp", "blue")]):
        Image.new("RGB", (8, 4), colour).save(tmp_path / name, lossless=True)
        values = {"index": index, "prompt": "a", "seed": 0, "file": name, "path": str(tmp_path / name)}
        view(Event("sample", 250, 1000, values))
    assert host.progress == [(250, 1000), (250, 1000)]
    (_, red, _), (kind, blue, side) = host.previews
    assert (kind, side) == ("JPEG", 512) and blue.size == (8, 4)
    assert red.getpixel((0, 0)) == (255, 0, 0) and blue.getpixel((0, 0)) == (0, 0, 255)
    assert view.pictures == {0: tmp_path / "0.png", 1: tmp_path / "1.webp"}


def test_cancel_while_a_picture_is_shown_is_seen_by_the_run(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", _Clock())
    Image.new("RGB", (8, 4)).save(tmp_path / "0.png")
    host.is_interrupted = True
    view.show_picture(tmp_path / "0.png", 1, 2)
    assert importlib.import_module("devicebridge.nodes.host").is_cancelled()
