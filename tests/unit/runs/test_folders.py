"""Thousands of runs that have ended cost next to nothing, and a new one is seen at once."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from devicebridge.cli.main import main
from devicebridge.runs import store as runs_store
from devicebridge.runs.api import Api, Host, News
from devicebridge.runs.queue import JobQueue
from devicebridge.runs.store import NotThere, RunStore
from devicebridge.tests.unit.runs.test_bad_records import MARK, RECORD

NUM_RUNS = 510
_opened: list[str] | None = None


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_hear)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Names of the files that are opened."""
    global _opened
    _opened = []
    yield _opened
    _opened = None


def _write(run: Path, status: str = "finished", **process: Any) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.new").write_text(json.dumps({**RECORD, "status": status, "process": {**MARK, **process}}))
    (run / "run.new").replace(run / "run.json")


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    for number in range(NUM_RUNS):
        run = tmp_path / f"run_{number:03d}"
        _write(run)
        (run / "events.jsonl").touch()
        os.utime(run, (1e9 + number, 1e9 + number))
    return RunStore(tmp_path)


def _queue(store: RunStore) -> JobQueue:
    return JobQueue(store, store.root / ".user")


def _api(store: RunStore) -> Api:
    return Api(store, _queue(store), Host(Path, list, lambda: None, list, lambda *names: Path(), lambda job: ()))


def test_what_has_not_changed_is_not_opened_again(store: RunStore, opened: list[str]) -> None:
    api, news = _api(store), News(store, _queue(store))
    assert [run["run"] for run in api.state()["runs"]] == [f"run_{number}" for number in range(509, 309, -1)]
    news.gather()
    assert {Path(name).name for name in opened} <= {"run.json", "events.jsonl"}
    opened.clear()
    assert len(api.state()["runs"]) == 200
    assert [news.gather() for _ in range(5)] == [{}] * 5
    assert api.state()["jobs"] == []
    with mock.patch.object(runs_store, "find_runs", side_effect=AssertionError("all folders are walked")):
        assert store.find("run_000") == store.root / "run_000"
    assert opened == []


def test_a_new_run_and_an_old_one_that_is_resumed_are_told_at_once(store: RunStore, opened: list[str]) -> None:
    news = News(store, _queue(store))
    news.gather()
    _write(store.root / "new", "running")
    assert [run["run"] for run in news.gather()["runs"]] == ["new"] and news.is_busy
    _write(store.root / "run_001", "running")
    os.utime(store.root / "run_001", (1e9, 1e9))  # by a clock that was set back
    assert [run["run"] for run in news.gather()["runs"]] == ["run_001"]
    shown = [run["run"] for run in _api(store).state()["runs"]]
    assert "run_001" in shown, "what is under way is shown whatever its date"
    assert sum("run_" in name for name in opened) < NUM_RUNS + 2 * 200 + 20


def test_the_command_shows_the_newest_and_counts_the_others(store, capsys):
    _write(store.root / "run_000", "running")
    os.utime(store.root / "run_000", (1, 1))
    assert main(["jobs", str(store.root)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1 + 201 + 1 and told[201].startswith("run_000  running") and "309" in told[-1]
    assert main(["jobs", str(store.root), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (len(values["runs"]), values["left_out"]) == (201, 309)
    assert main(["jobs", str(store.root), "--json", "--all"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (len(values["runs"]), values["left_out"]) == (NUM_RUNS, 0)


def test_runs_that_go_are_told_and_what_becomes_a_link_is_not_there(store: RunStore, tmp_path: Path) -> None:
    news = News(store, _queue(store))
    news.gather()
    (store.root / "run_509").rename(tmp_path.parent / f"{tmp_path.name}_elsewhere")
    with pytest.raises(NotThere):
        store.find("run_509")
    (store.root / "run_509").symlink_to(tmp_path.parent / f"{tmp_path.name}_elsewhere")
    assert news.gather()["gone"] == ["run_509"]
    (store.root / "run_508").rename(store.root / "other")
    (store.root / "run_508").symlink_to(store.root / "other")
    for name in ("run_509", "run_508"):
        with pytest.raises(NotThere):
            store.find(name)


def test_runs_inside_of_runs_come_and_go(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    assert store.ids() == []
    for name in ("a", "a/b", "c/d/e", "c/d/e/f", "cache/g", ".h", "a/samples/i"):
        _write(store.root / name)
    assert sorted(store.ids()) == ["a", "a/b", "c/d/e"]
    assert store.find("c/d/e") == store.root / "c" / "d" / "e"
    (store.root / "c" / "d").rename(store.root / "k")
    assert sorted(store.ids()) == ["a", "a/b", "k/e", "k/e/f"]
    assert "c/d/e" not in store.runs and "k/e" in store.runs
