"""What a node shows of a job: captions per second and the time left, measured by a clock of the test's own."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from devicebridge.events import Event, EventLog
from devicebridge.jobs.encode_job import tell_progress
from devicebridge.system.pace import Pace
from devicebridge.tests import comfy_stub
from devicebridge.tests.unit.system.test_pace import _Clock
from PIL import Image


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> comfy_stub.FakeHost:
    return comfy_stub.install(monkeypatch, tmp_path)


def test_a_node_shows_captions_per_second_and_the_time_left(host: comfy_stub.FakeHost, tmp_path: Path) -> None:
    clock = _Clock()
    view = importlib.import_module("devicebridge.nodes.view").JobView("7", clock)
    pace = Pace(clock)
    with EventLog(tmp_path, view) as events:
        tell = tell_progress(events, pace)
        events.emit("phase", name="captions")
        clock.now_s += 1
        tell(40, 100, "captions")  # found in the cache
        clock.now_s += 300  # the encoder is loaded
        pace.restart()
        for done in (41, 42):
            clock.now_s += 15
            tell(done, 100, "captions")
        clock.now_s += 0.01
        tell(43, 100, "captions")  # too soon for another line, not for the bar
        clock.now_s += 20
        tell(100, 100, "captions")
    assert host.texts == [
        "Encoding captions",
        "captions 40/100",
        "captions 41/100, 0.067 captions/s, about 15 min left",
        "captions 42/100, 0.067 captions/s, about 14 min left",
        "captions 100/100",
    ]
    assert host.progress == [(40, 100), (41, 100), (42, 100), (43, 100), (100, 100)]
    told = [message for _, message in host.messages if message["kind"] == "progress"]
    assert told[2]["values"] == {"what": "captions", "per_second": pytest.approx(1 / 15), "left_s": pytest.approx(870)}


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
    assert view.is_cancelled()
