"""Records, events and process marks that others have written: a bad one is shown as such, and hides no other."""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from devicebridge.cli.queue import jobs
from devicebridge.runs.api import Api, Host, News
from devicebridge.runs.queue import JobQueue
from devicebridge.runs.record import read_record
from devicebridge.runs.store import RunStore
from devicebridge.system import processes
from devicebridge.system.files import expect
from devicebridge.system.processes import mark_of
from devicebridge.tests.bad_inputs import make_pipe

MARK = asdict(mark_of())
RECORD = {"status": "running", "process": MARK, "devices": ["cuda:0"], "steps": 9, "job": {}, "message": "", "since": 1}
EVENTS: list[dict[str, Any]] = [
    {"kind": "phase", "name": "loading", "blocks": [["cuda:0", 2]]},
    {"kind": "progress", "what": "captions", "step": 1, "total": 2, "left_s": 0.5},
    {"kind": "forecast", "devices": {"cuda:0": {"forecast": 1.0, "measured": None}}, "parts": {"cuda:0": {"kept": 1}}},
    {"kind": "step", "step": 3, "total": 9, "loss": 0.5, "learning_rate": 1e-3, "elapsed_s": 0.5},
    {"kind": "eval", "step": 3, "loss": 0.5}, {"kind": "memory", "step": 3, "cuda:0": {"peak": 1.0}},
    {"kind": "sample", "step": 3, "file": "samples/3_0.png", "prompt": "a cat"},
]  # fmt: skip
NUMBERS = [-1, 0, 1 << 31, 1 << 70, 10**400, 1e300, float("nan"), float("inf"), -0.5, True]
TEXTS = ["", "x", "..", "\0", "a\nb\x1b[2J", "\ud800"]
WRONG = [*NUMBERS, *TEXTS, None, [], {}, [[]], [["cuda:0", float("nan")]], [["cuda:0", 10**9]], {"x": {}}]


def _store(root: Path) -> RunStore:
    """A good run that goes on, and a folder for a bad one."""
    _write(root / "good", json.dumps(RECORD).encode(), json.dumps(EVENTS[3]).encode() + b"\n")
    return RunStore(root)


def _write(folder: Path, record: bytes, events: bytes) -> None:
    folder.mkdir(parents=True)
    (folder / "run.json").write_bytes(record)
    (folder / "events.jsonl").write_bytes(events)


def _seen(store: RunStore) -> dict[str, dict[str, Any]]:
    """Runs as page, news, queue and terminal show them; what a browser cannot read fails."""
    queue = JobQueue(store, store.root / ".user")
    api = Api(store, queue, Host(Path, list, lambda: None, list, lambda *names: Path(), lambda job: ()))
    for run in store.ids():
        json.dumps(store.details(run), allow_nan=False)
    json.dumps(News(store, queue).gather(), allow_nan=False)
    assert "cuda:0" in queue.held()
    assert jobs(Namespace(folder=store.root, user_directory=None, stop=None, all=False, json=False)) == 0
    return {run["run"]: run for run in json.loads(json.dumps(api.state(), allow_nan=False))["runs"]}


def _every_wrong(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The values with each of them, and each inside of them, replaced by whatever else JSON can say."""
    found = [{**values, name: wrong} for name in values for wrong in WRONG]
    inside = [(name, each) for name, each in values.items() if isinstance(each, dict)]
    return found + [{**values, name: wrong} for name, each in inside for wrong in _every_wrong(each)]


def test_every_wrong_value_of_a_record_leaves_the_others_shown(tmp_path: Path) -> None:
    store = _store(tmp_path)
    records = _every_wrong(RECORD)
    for number, record in enumerate(records):
        _write(tmp_path / f"bad_{number}", json.dumps(record).encode(), b"")
    assert _seen(store)["good"]["step"] == 3
    assert store.record("good") is not None and len(store.ids()) == len(records) + 1
    json.dumps([store.summary(run) for run in store.ids()], allow_nan=False)


@pytest.mark.parametrize("kind", range(len(EVENTS)), ids=lambda number: EVENTS[number]["kind"])
def test_every_wrong_value_of_an_event_leaves_the_others_heard(tmp_path: Path, kind: int) -> None:
    store, last = _store(tmp_path), {**EVENTS[3], "step": 5}
    for number, event in enumerate(_every_wrong(EVENTS[kind])):
        lines = [json.dumps(each) for each in (event, last)]
        _write(tmp_path / f"bad_{number}", json.dumps(RECORD).encode(), "\n".join([*lines, ""]).encode())
    seen = _seen(store)
    assert {run["step"] for name, run in seen.items() if name != "good"} == {5} and seen["good"]["step"] == 3


DEEP = b"[" * 200_000
CASES: dict[str, Callable[[Path], None]] = {
    "brackets": lambda run: _write(run, b'{"job": ' + DEEP, b'{"kind": "step", "step": ' + DEEP + b"\n"),
    "no text": lambda run: _write(run, b"\xff\xfe\0", b"\xff\0\n" * 9),
    "a long line": lambda run: _write(run, b"{}", b"x" * (40 << 20)),
    "folders": lambda run: [(run / f).mkdir(parents=True) for f in ("run.json", "events.jsonl", "samples/1_0.png")],
    "pipes": lambda run: [run.mkdir(), *(make_pipe(run / name) for name in ("run.json", "events.jsonl"))],
    "devices": lambda run: [run.mkdir(), *((run / f).symlink_to("/dev/zero") for f in ("run.json", "events.jsonl"))],
    "links to nothing": lambda run: [run.mkdir(), *((run / f).symlink_to(f) for f in ("run.json", "samples"))],
}
NAMES = ["a\nb", "\x1b[2J", "-", "stop", "\udcff", "x" * 255, "a b", "'\"`$", "a..", "%2e%2e"]


@pytest.mark.parametrize("case", CASES)
def test_whatever_lies_in_a_runs_place_is_named_and_the_others_are_shown(tmp_path: Path, case: str) -> None:
    store = _store(tmp_path)
    CASES[case](tmp_path / "bad")
    seen = _seen(store)
    assert (seen["good"]["state"], seen["good"]["step"]) == ("running", 3)
    assert (seen["bad"]["state"], seen["bad"]["step"]) == ("stopped", 0)
    assert "run.json is no record" in seen["bad"]["message"] and seen["good"]["message"] == ""


@pytest.mark.parametrize("text", [b"", b"[]", b'{"jobs": 7}', b'{"jobs": ' + DEEP, b"\xff", None])
def test_a_queue_that_cannot_be_read_is_named_and_runs_are_shown_and_stopped(tmp_path: Path, text: Any) -> None:
    store = _store(tmp_path)
    file = tmp_path / ".user" / "queue.json"
    file.parent.mkdir()
    file.mkdir() if text is None else file.write_bytes(text)
    queue = JobQueue(store, file.parent)
    news = News(store, queue).gather()
    assert [run["run"] for run in news["runs"]] == ["good"]
    assert [(job["state"], str(file) in job["why"]) for job in news["jobs"]] == [("failed", True)]
    queue.ask("good", "stop")
    assert (store.root / "good" / "stop_now").is_file()
    pytest.raises(ValueError, queue.held)


def test_runs_of_any_name_are_shown(tmp_path: Path) -> None:
    store = _store(tmp_path)
    for name in NAMES:
        _write(tmp_path / name, json.dumps(RECORD).encode(), b"")
    assert set(_seen(store)) == {"good", *NAMES}
    assert [store.find(name) for name in NAMES] == [tmp_path / name for name in NAMES]


@pytest.mark.parametrize(
    "mark",
    ["4711", None, [], 7, *({**MARK, "pid": each} for each in [-1, 0, True, 1.0, "1", None, 1 << 40, 10**400])]
    + [{**MARK, name: each} for name in ("started", "host") for each in (None, [], float("nan"), 10**400)],
)
def test_what_names_no_process_is_refused_and_never_signalled(mark: Any, tmp_path: Path) -> None:
    _write(tmp_path / "run", json.dumps({**RECORD, "process": mark}).encode(), b"")
    assert read_record(tmp_path / "run") is None


def test_no_process_has_such_a_number() -> None:
    assert [processes._process(pid) is not None for pid in (-1, -(1 << 70), 1 << 31, 1 << 70)] == [False] * 4


@pytest.mark.parametrize(
    "number", [float("nan"), float("inf"), -float("inf"), 10**400, 1e200], ids=["nan", "inf", "-inf", "huge", "large"]
)
def test_a_number_that_cannot_be_counted_with_is_refused(number: Any) -> None:
    with pytest.raises(ValueError, match="x is a number that is not finite, or too large"):
        expect(number, (int, float), "x")
