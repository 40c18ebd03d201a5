"""The queue as what it must never do: lose a job, start one twice, or start what somebody else has written."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devicebridge.config.job import JobConfig, make_job
from devicebridge.runs.api import Api, Host
from devicebridge.runs.queue import JobQueue
from devicebridge.runs.record import recorded_run
from devicebridge.runs.store import Busy, RunStore
from devicebridge.system.files import write_atomically
from devicebridge.system.locks import alone, is_locked
from devicebridge.system.processes import ProcessMark, start_detached

_GONE = ProcessMark(1 << 30, 1.0, "")


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those of the processes that were started, of which each is gone at once."""
    found: list[list[str]] = []

    def start(command: Any, log: Path, environment: Any) -> ProcessMark:
        found.append(list(map(str, command)))
        return _GONE

    monkeypatch.setattr("devicebridge.runs.queue.start_detached", start)
    return found


def _queue(folder: Path, check: Any = lambda job: None, root: str = "runs") -> JobQueue:
    return JobQueue(RunStore(folder / root), folder / "memory", check, lambda: {"cuda:7": "somebody trains on"})


def _job(folder: Path, **sections: Any) -> JobConfig:
    values = {"model": {"path": "/m"}, "data": {"folders": [{"path": "/d"}]}, "train": {"steps": 9}}
    return make_job({**values, "output": {"folder": str(folder)}, **sections})


def _add(queue: JobQueue, name: str, device: str = "cuda:7", **sections: Any) -> Any:
    return queue.add(_job(queue.store.root / name, **sections), [device], is_resumed=False)


CHANGES: dict[str, Any] = {
    "add": lambda queue, job: _add(queue, "new"),
    "replace": lambda queue, job: _add(queue, "b", train={"steps": 20}),
    "remove": lambda queue, job: queue.remove(job.id),
    "earlier": lambda queue, job: queue.move(job.id, is_earlier=True),
    "later": lambda queue, job: queue.move(job.id, is_earlier=False),
}  # fmt: skip


def _runs(queue: JobQueue) -> list[tuple[str, int]]:
    return [(job.run, job.job["train"]["steps"]) for job in queue.jobs()]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before it writes", "after it has written"])
def test_whoever_is_killed_in_a_change_leaves_the_queue_as_before_or_as_after(tmp_path, monkeypatch, change, when):
    queue = _queue(tmp_path)
    for name in ("a", "b", "c"):
        _add(queue, name)
    before, job, writes = _runs(queue), queue.jobs()[1], []

    def write(path: Path, data: bytes) -> None:
        writes.append(path)
        if when == "after it has written":
            write_atomically(path, data)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("devicebridge.runs.queue.write_atomically", write)
        CHANGES[change](queue, job)
    assert len(writes) == 1 and not is_locked(tmp_path / "memory" / ".lock")
    found = _runs(_queue(tmp_path))
    done = {
        "add": [*before, ("new", 9)], "replace": [("a", 9), ("b", 20), ("c", 9)], "remove": [("a", 9), ("c", 9)],
        "earlier": [("b", 9), ("a", 9), ("c", 9)], "later": [("a", 9), ("c", 9), ("b", 9)],
    }  # fmt: skip
    assert found == (before if when == "before it writes" else done[change])


@pytest.mark.parametrize("change", CHANGES)
def test_nobody_changes_the_queue_while_another_does(tmp_path, monkeypatch, change):
    """So two moves at once are one after the other, and of none is what the other has done undone."""
    queue, held = _queue(tmp_path), []
    for name in ("a", "b", "c"):
        _add(queue, name)

    def read_all(self: JobQueue, read: Any = JobQueue._all) -> Any:
        held.append(is_locked(tmp_path / "memory" / ".lock"))
        return read(self)

    job = queue.jobs()[1]
    monkeypatch.setattr(JobQueue, "_all", read_all)
    monkeypatch.setattr(JobQueue, "jobs", lambda self: [each for each in self._all()])
    CHANGES[change](queue, job)
    assert held and all(held), "what a change goes by was read under the lock that it is written under"


def test_a_job_whose_start_was_cut_short_is_shown_and_not_started_again(tmp_path, monkeypatch, commands):
    def die(*arguments: Any) -> None:
        raise KeyboardInterrupt

    _add(_queue(tmp_path), "a", "cpu")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("devicebridge.runs.queue.start_detached", die)
        _queue(tmp_path).tick()
    again = _queue(tmp_path)
    again.tick()
    assert [(job.run, job.state) for job in again.jobs()] == [("a", "failed")] and commands == []


@pytest.mark.skipif(os.name == "nt", reason="a log is not locked there")
def test_a_process_that_was_started_but_not_noted_holds_its_cards(tmp_path, monkeypatch):
    """As where ComfyUI is killed between the two."""
    found: list[ProcessMark] = []

    def start(command: Any, log: Path, environment: Any) -> None:
        found.append(start_detached([sys.executable, "-c", "import time; time.sleep(600)"], log))
        raise KeyboardInterrupt

    monkeypatch.setattr("devicebridge.runs.queue.start_detached", start)
    _add(_queue(tmp_path), "a", "cpu")
    with pytest.raises(KeyboardInterrupt):
        _queue(tmp_path).tick()
    queue = _queue(tmp_path)
    try:
        assert queue.tick() == [] and "a is starting" in queue.held()["cpu"]
        with pytest.raises(Busy):
            _add(queue, "a", "cpu")
    finally:
        os.kill(found[0].pid, signal.SIGKILL)
    while found[0].is_alive():
        time.sleep(0.01)
    assert queue.tick() == ["a"] and [job.state for job in queue.jobs()] == ["failed"]


def test_what_is_refused_is_asked_again_as_a_job_starts(tmp_path: Path, commands: list[list[str]]) -> None:
    allowed = {"/m", "/m2"}

    def check(job: JobConfig) -> None:
        if job.model.path not in allowed:
            raise ValueError(f"{job.model.path} is not read")

    queue = _queue(tmp_path, check)
    with pytest.raises(ValueError, match="/other is not read"):
        _add(queue, "a", "cpu", model={"path": "/other"})
    _add(queue, "a", "cpu", model={"path": "/m2"})
    allowed.remove("/m2")
    queue.tick()
    assert [(job.state, job.message) for job in queue.jobs()] == [("failed", "/m2 is not read")] and commands == []


def test_a_program_that_was_not_told_what_to_refuse_starts_nothing(tmp_path: Path, commands: list[list[str]]) -> None:
    _add(_queue(tmp_path), "a", "cpu")
    looking = JobQueue(RunStore(tmp_path / "runs"), tmp_path / "memory")
    looking.tick()
    assert looking.jobs()[0].state == "failed" and commands == []


@pytest.mark.parametrize("run", ["..", "../x", "a/../../x", ".", "linked", "linked/x", "a/linked"])
def test_a_run_whose_name_leads_out_of_the_store_is_neither_queued_nor_started(tmp_path, commands, run):
    queue = _queue(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for link in ("linked", "a/linked"):
        (tmp_path / "runs" / link).symlink_to(tmp_path)
    with pytest.raises(ValueError):
        queue.add(_job(Path(f"{queue.store.root}/{run}")), ["cpu"], is_resumed=False)
    job = _add(queue, "fine", "cpu")
    queue._change(job, run=run)
    queue.tick()
    assert [each.state for each in queue.jobs()] == ["failed"] and commands == []
    assert not (tmp_path / "x").exists()


def test_a_store_behind_a_link_takes_jobs_by_either_name(tmp_path: Path, commands: list[list[str]]) -> None:
    """As where ComfyUI's output folder is a link to a larger disk."""
    queue, link = _queue(tmp_path), tmp_path / "link"
    link.symlink_to(tmp_path / "runs")
    for name in ("a", "a/b"):
        job = _job(link / name)
        assert queue.add(job, ["cpu"], is_resumed=False).run == name
        assert name in queue.tick() and queue.kept.find(queue.store.root / name) == job
    assert len(commands) == 2


def test_two_stores_that_are_remembered_in_one_place_keep_to_their_own_jobs(tmp_path, commands):
    """Two ComfyUIs of one user folder, with output folders of their own."""
    one, other = _queue(tmp_path), _queue(tmp_path, root="others")
    for queue in (one, other):
        for name in ("a", "b"):
            _add(queue, name)
    one.move(one.jobs()[0].id, is_earlier=False)
    one.remove(one.jobs()[0].id)
    assert _runs(one) == [("a", 9)] and _runs(other) == [("a", 9), ("b", 9)]
    _add(other, "c", "cpu")
    assert one.tick() == [] and other.tick() == ["c"]
    assert one.kept.find(tmp_path / "others" / "c") == _job(tmp_path / "others" / "c")
    assert one.kept.find(tmp_path / "runs" / "c") is None


class Page:
    """The page's requests for one run, whose record says what the last caller of record() gave."""

    def __init__(self, folder: Path) -> None:
        self.run, self.refused = folder / "runs" / "a", ""
        self.queue = _queue(folder, self.check)
        host = Host(Path, list, lambda: None, list, lambda name, file: Path(), lambda job: ("cpu",))
        self._api = Api(self.queue.store, self.queue, host)

    def check(self, job: JobConfig) -> None:
        if self.refused:
            raise ValueError(self.refused)

    def record(self, **sections: Any) -> JobConfig:
        job = _job(self.run, **sections)
        with recorded_run(self.run, job, ["cpu"]):
            pass
        return job

    def resume(self, **more: Any) -> tuple[int, dict[str, Any]]:
        body = json.dumps({"run": "a", **more}).encode()
        answer = self._api.answer("POST", "resume", "", {"Content-Type": "application/json"}, body)
        return answer.status, answer.values


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


def test_a_run_that_was_started_elsewhere_is_resumed_as_it_was_shown(page: Page, commands: list[list[str]]) -> None:
    job = page.record(cache={"folder": "/c", "vae": "/v"})
    status, shown = page.resume()
    assert status == 200 and shown["paths"] == [
        "model.path: /m", "data.folders.path: /d", f"output.folder: {page.run}", "cache.folder: /c", "cache.vae: /v",
    ]  # fmt: skip
    page.record(cache={"folder": "/c", "vae": "/other"})
    status, other = page.resume(confirm=shown["confirm"])
    assert status == 200 and other["confirm"] != shown["confirm"] and "cache.vae: /other" in other["paths"]
    page.record(cache={"folder": "/c", "vae": "/v"}, optimizer={"options": {"eps": 1e-7}})  # not shown, counts, too
    assert "job" not in page.resume(confirm=shown["confirm"])[1]
    page.record(cache={"folder": "/c", "vae": "/v"})
    assert page.queue.jobs() == [] and commands == []
    status, started = page.resume(confirm=shown["confirm"])
    assert status == 200 and started["job"] == page.queue.jobs()[0].id
    assert commands[0][-3:] == ["train", str(page.queue.kept.file(page.run)), "--resume"]
    assert page.queue.kept.find(page.run) == job


def test_what_must_not_be_started_is_refused_before_it_is_shown_and_after(page, commands):
    page.record()
    shown = page.resume()[1]
    page.refused = "data is not read from there"
    for more in ({}, {"confirm": shown["confirm"]}):
        assert page.resume(**more) == (400, {"error": page.refused})
    assert page.queue.jobs() == [] and commands == []


def test_a_run_of_this_comfyui_is_resumed_at_once_while_its_record_says_the_same(page, commands):
    job = page.record()
    page.queue.kept.keep(job)
    found = replace(job.cache, text_source=f"comfyui 0.33.0 CLIP {'0' * 64}")  # what a record names besides
    with recorded_run(page.run, replace(job, cache=found), ["cpu"]):
        pass
    assert "job" in page.resume()[1] and len(commands) == 1
    page.queue.tick()
    page.record(data={"folders": [{"path": "/somebody/elses"}]})
    assert "data.folders.path: /somebody/elses" in page.resume()[1]["paths"] and len(commands) == 1
    (page.run / "run.json").write_text("{}")
    (page.run / "checkpoints").mkdir()
    assert "job" in page.resume()[1], "its own job is known, whatever became of the record"
    assert page.queue.kept.find(page.run) == job


def test_a_run_goes_on_with_what_the_page_says(page, commands):
    job = page.record()
    page.queue.kept.keep(job)
    status, refused = page.resume(**{"train.steps": 0})
    assert status == 400 and "train.steps" in refused["error"] and page.queue.kept.find(page.run) == job
    given = {"train.steps": 90, "optimizer.learning_rate": 3e-5, "schedule.name": "cosine", "output.folder": "/other"}
    assert "job" in page.resume(**given)[1] and page.queue.jobs()[0].is_resumed == "continue"
    assert commands[0][-1] == "--continue"
    optimizer, schedule = replace(job.optimizer, learning_rate=3e-5), replace(job.schedule, name="cosine")
    wanted = replace(job, train=replace(job.train, steps=90), optimizer=optimizer, schedule=schedule)
    assert page.queue.kept.find(page.run) == wanted


def test_while_another_looks_after_the_queue_the_page_is_told_to_wait(page, monkeypatch, commands):
    monkeypatch.setattr("devicebridge.runs.queue._WAIT_S", 0.0)
    job = _add(page.queue, "b")
    with alone(page.run.parent.parent / "memory" / ".lock"):
        for change in (lambda: page.queue.move(job.id, is_earlier=True), lambda: page.queue.remove(job.id)):
            with pytest.raises(Busy):
                change()
    page.queue.remove(job.id)
