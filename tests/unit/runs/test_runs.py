"""Runs on the disk: what their events say, how they ended, the queue and its cards, and the page's answers."""

import errno
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devicebridge.cli.main import main
from devicebridge.config.job import job_to_dict, make_job
from devicebridge.events import Event, EventLog, EventTail
from devicebridge.jobs.job import run_job
from devicebridge.runs.api import News
from devicebridge.runs.progress import Progress, thinned
from devicebridge.runs.queue import MEMORY, JobQueue, explain
from devicebridge.runs.record import read_record, recorded_run, run_lock
from devicebridge.runs.store import Busy, NotThere, RunStore, list_checkpoints, settings_of
from devicebridge.system.locks import is_locked, take_claim
from devicebridge.system.processes import ProcessMark, start_detached
from devicebridge.system.stopping import Requests
from devicebridge.tests.tiny_pipeline import encoded_before, make_tiny_job
from devicebridge.tests.unit.runs.test_bad_records import MARK as OWN
from devicebridge.tests.unit.runs.test_bad_records import RECORD
from devicebridge.tests.waiting import until
from devicebridge.training.state import list_checkpoints as full_checkpoints


def _write_events(folder: Path, *events: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def _step(step: int, loss: float, total: int = 9) -> dict[str, Any]:
    return {"kind": "step", "step": step, "total": total, "loss": loss, "learning_rate": 1e-3, "elapsed_s": 0.5}


def _job(folder: Path, steps: int = 9, devices: tuple[str, ...] = ("cpu",)) -> Any:
    return make_job(
        {
            "model": {"path": str(folder / "model")}, "data": {"folders": [{"path": str(folder / "data")}]},
            "split": {"devices": list(devices)}, "train": {"steps": steps}, "output": {"folder": str(folder)},
        }
    )  # fmt: skip


def test_a_resumed_run_replaces_the_steps_that_were_given_up(tmp_path: Path) -> None:
    _write_events(tmp_path, *(_step(step, 1.0) for step in range(1, 6)), _step(3, 0.5), _step(4, 0.25))
    progress = Progress(tmp_path / "events.jsonl")
    assert progress.update() and not progress.update()
    assert [(step, loss) for step, loss, *_ in progress.steps] == [(1, 1.0), (2, 1.0), (3, 0.5), (4, 0.25)]
    assert (progress.step, progress.step_s, progress.left_s) == (4, 0.5, 2.5)
    _write_events(tmp_path, {"kind": "stopped", "step": 3, "total": 9})  # before its first step, at its checkpoint
    assert progress.update() and progress.step == 3


def test_what_a_run_went_on_with_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "a"
    lines = ["optimizer.learning_rate: 0.001 -> 0.002", {"no": "text"}, "x" * 2000, *[""] * 200]
    with recorded_run(folder, _job(folder), ["cpu"]) as recording:
        recording.status = "stopped"
    _write_events(folder, _step(3, 1.0), {"kind": "continued", "step": 3, "total": 9, "what": lines}, _step(4, 1.0))
    summary = RunStore(tmp_path / "runs").summary("a")
    ((step, shown),) = summary["changes"]
    assert step == 3 and shown[:2] == [lines[0], ""] and len(shown) == 100 and len(shown[2]) == 1000
    assert summary["settings"] == {"train.steps": 9, "optimizer.learning_rate": 1e-4, "schedule.name": "constant"}
    assert main(["jobs", str(tmp_path / "runs")]) == 0
    assert "after step 3: optimizer.learning_rate: 0.001 -> 0.002" in capsys.readouterr().out
    assert settings_of({"train": 5, "optimizer": {"learning_rate": [1]}, "schedule": {"name": "x" * 99}}) == {}


def test_memory_of_ranks_is_that_of_their_cards_the_first_machines_first(tmp_path: Path) -> None:
    names = ["rank 0 cuda:0", "rank 1 cuda:1", "rank 2 cuda:0", "rank 10 cuda:1"]
    event = {"kind": "memory", "step": 1, "total": 2, **{name: {"peak": index} for index, name in enumerate(names)}}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    progress = Progress(tmp_path / "events.jsonl")
    progress.update()
    assert progress.memory == {"cuda:0": {"peak": 0}, "cuda:1": {"peak": 1}}


def test_a_tail_hears_whole_lines_that_come_after_its_beginning(tmp_path: Path) -> None:
    assert EventTail(tmp_path).new() == []
    with EventLog(tmp_path) as events:
        events.emit("phase", name="before")
        tail = EventTail(tmp_path)
        events.emit("step", 1, 2, loss=0.5, rank_losses=[0.25, 0.75])
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('{"kind": "st')
        assert tail.new() == [Event("step", 1, 2, {"loss": 0.5, "rank_losses": [0.25, 0.75]})]
        assert tail.new() == []
        with (tmp_path / "events.jsonl").open("a") as file:
            file.write('ep", "step": 2, "total": 2, "loss": 0.4}\n')
        assert [(event.step, event.values["loss"]) for event in tail.new()] == [(2, 0.4)]


def test_a_thinned_curve_keeps_its_mean_and_its_last_point() -> None:
    points = [(float(step), float(step)) for step in range(1, 1002)]
    thin = thinned(points, 100)
    assert len(thin) <= 100 and thin[-1] == (1001.0, 1001.0)
    sizes = [11] * (len(thin) - 2) + [1000 - 11 * (len(thin) - 2)]
    assert sum(size * value for size, (_, value) in zip(sizes, thin, strict=False)) == sum(range(1, 1001))
    assert thinned(points[:50], 100) == points[:50]


def test_a_run_is_running_then_finished_and_failed_with_its_reason(tmp_path: Path) -> None:
    with recorded_run(tmp_path, _job(tmp_path), ["cpu"]):
        record = read_record(tmp_path)
        assert record is not None and record.state == "running" and record.process.pid == os.getpid()
    assert (read_record(tmp_path) or record).state == "finished"
    with pytest.raises(RuntimeError), recorded_run(tmp_path, _job(tmp_path), ["cpu"]):
        raise RuntimeError("the card is gone\nsecond line")
    failed = read_record(tmp_path)
    assert failed is not None and (failed.state, failed.message) == ("failed", "the card is gone")
    assert make_job(failed.job) == _job(tmp_path)


@pytest.mark.parametrize("changed", [{"started": OWN["started"] - 3600}, {"host": "its name then"}])
def test_a_clock_that_was_set_and_a_host_that_was_renamed_end_no_process(tmp_path: Path, changed: Any) -> None:
    _record(tmp_path, changed)
    with run_lock(tmp_path):
        record = read_record(tmp_path)
        assert record is not None and record.state == "running"


ELSEWHERE = {
    "its container was made anew": {"host": "0123456789ab"},
    "its computer was started again": {"started": 1.0},
    "an earlier version wrote it": {"host": "0123456789ab", "birth": "of-another-kernel pid:[7] 400"},
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_of_a_process_that_cannot_be_seen_the_lock_of_its_run_tells(tmp_path: Path, where: str) -> None:
    run, queue = tmp_path / "a", _queue(tmp_path)
    _record(run, ELSEWHERE[where], devices=["cuda:0"])
    with run_lock(run):
        assert queue.store.summary("a")["state"] == "running" and "cuda:0" in queue.held()
        with pytest.raises(Busy, match="under way"):
            _add(queue, "a", "cuda:0")
    assert queue.store.summary("a")["state"] == "crashed" and queue.held() == {}
    assert _add(queue, "a", "cuda:0").run == "a"


def test_without_locks_another_computers_run_counts_as_under_way(tmp_path, monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    (tmp_path / ".run.lock").touch()
    monkeypatch.setattr("fcntl.flock", refuse)
    states = []
    for where in ELSEWHERE.values():
        _record(tmp_path, where)
        record = read_record(tmp_path)
        states.append(record and record.state)
    assert states == ["running", "crashed", "running"]


def _record(folder: Path, process: dict[str, Any], **values: Any) -> None:
    """The record of a run under way, as another process has written it."""
    folder.mkdir(exist_ok=True)
    record = {**RECORD, "process": {**OWN, **process}, "devices": ["cpu"], **values}
    (folder / "run.json").write_text(json.dumps(record))


def test_a_lock_that_somebody_looks_at_is_still_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looking = take_claim(tmp_path / ".run.lock")
    assert looking is not None
    monkeypatch.setattr("devicebridge.system.locks.time.sleep", lambda seconds: looking.release())
    with run_lock(tmp_path):
        assert is_locked(tmp_path / ".run.lock")
    assert not is_locked(tmp_path / ".run.lock")


def test_a_detached_process_leads_a_session_of_its_own_and_is_told_from_its_successors(tmp_path: Path) -> None:
    code = "import os, time; print(os.getsid(0), flush=True); time.sleep(60)"
    mark = start_detached([sys.executable, "-c", code], tmp_path / "log")
    assert mark.is_alive()
    assert not ProcessMark(mark.pid, mark.started - 60, mark.host).is_alive()
    assert ProcessMark(1, 0.0, "another computer").is_alive()
    until(lambda: (tmp_path / "log").read_text().strip() == str(mark.pid))
    unseen = replace(mark, host="another container")
    assert unseen.is_alive(tmp_path / "log")
    os.kill(mark.pid, 9)
    until(lambda: not mark.is_alive())
    assert not unseen.is_alive(tmp_path / "log")


def test_a_run_saves_and_stops_as_it_is_asked_and_the_store_shows_it(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    steps: list[int] = []

    def hear(event: Event) -> None:
        if event.kind == "step":
            steps.append(event.step)
            if event.step == 1:
                Requests(tmp_path / "run").ask("save")
            if event.step == 3:
                Requests(tmp_path / "run").ask("stop")
                assert store.summary("run")["state"] == "running"

    cache = {"folder": encoded_before(tmp_path), "dtype": "float32"}
    job = make_tiny_job(tmp_path, cache=cache, output={"save_every_steps": 0, "keep_last": 5})
    result = run_job(job, on_event=hear)
    assert (result.status, result.step, steps) == ("stopped", 3, [1, 2, 3])
    assert [path.name for path in full_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000001", "step-000003"]
    assert store.ids() == ["run"]
    details = store.details("run")
    assert (details["state"], details["step"], details["total"], details["can_resume"]) == ("stopped", 3, 6, True)
    assert [step for step, *_ in details["steps"]] == steps
    assert [loss for _, loss, *_ in details["steps"]] == result.losses
    assert details["evals"][0] == (0, result.eval_before)
    found = [(each["step"], each["is_final"]) for each in details["checkpoints"]]
    assert found == [(1, False), (3, False), (3, True)]
    assert {each["lora"] for each in details["checkpoints"]} == {"lora.safetensors"}
    assert details["blocks"] and details["blocks"][0][0] == "cpu"
    assert not list((tmp_path / "run").glob("*_now"))
    assert run_job(job, resume=True).status == "finished"
    assert store.summary("run")["state"] == "finished"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run `a` with two checkpoints and a sample, and a secret outside."""
    run = tmp_path / "runs" / "a"
    with recorded_run(run, _job(run), ["cuda:0"]):
        pass
    _write_events(run, _step(1, 1.0), {"kind": "sample", "step": 1, "file": "samples/1_0.png", "prompt": "a cat"})
    for step in (1, 2):
        folder = run / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        for name in ("lora", "adapter", "optimizer", "random"):
            (folder / f"{name}.safetensors").write_bytes(f"{name} {step}".encode())
    (run / "samples").mkdir()
    (run / "samples" / "1_0.png").write_bytes(b"picture")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "1_1.png").write_bytes(b"secret")
    (tmp_path / "secret" / "run.json").write_bytes((run / "run.json").read_bytes())
    return RunStore(tmp_path / "runs")


def test_what_lies_behind_links_is_not_there(store: RunStore, tmp_path: Path) -> None:
    (store.root / "linked").symlink_to(tmp_path / "secret")
    (store.root / "a" / "samples" / "1_1.png").symlink_to(tmp_path / "secret" / "1_1.png")
    (store.root / "a" / "checkpoints" / "step-000003").symlink_to(tmp_path / "secret")
    assert store.ids() == ["a"]
    for name in ("linked", "../secret", "/", "", ".", "a/..", "a/../a", None, 1, str(tmp_path / "secret")):
        with pytest.raises(NotThere):
            store.find(name)
    for name in ("1_1.png", "../run.json", "../../../secret/1_1.png", "1_0.png/", "", None):
        with pytest.raises(NotThere):
            store.sample("a", name)
    assert store.sample("a", "1_0.png").read_bytes() == b"picture"
    assert [each.step for each in list_checkpoints(store.root / "a")] == [1, 2]


def test_samples_come_with_their_prompts_and_checkpoints_with_the_lora_for_users(store: RunStore) -> None:
    details = store.details("a")
    assert details["samples"] == [{"file": "1_0.png", "step": 1, "index": 0, "prompt": "a cat"}]
    assert store.lora("a", 2).read_bytes() == b"lora 2"
    with pytest.raises(NotThere):
        store.lora("a", None)


def test_a_checkpoint_is_deleted_but_never_the_newest_of_a_running_training(store: RunStore) -> None:
    run = store.root / "a"
    with recorded_run(run, _job(run), ["cuda:0"]):
        with pytest.raises(Busy, match="stop it first"):
            store.delete_checkpoint("a", 2)
        store.delete_checkpoint("a", 1)
    assert [each.step for each in list_checkpoints(run)] == [2]
    store.delete_checkpoint("a", 2)
    assert list_checkpoints(run) == [] and not list((run / "checkpoints").iterdir())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the run folders for which a process was started; each is a program that waits."""
    found: list[str] = []
    marks: list[ProcessMark] = []

    def start(command: Any, log: Path, environment: Any = None) -> ProcessMark:
        found.append(log.name.rpartition("-")[0])
        marks.append(start_detached([sys.executable, "-c", "import time; time.sleep(60)"], log))
        return marks[-1]

    monkeypatch.setattr("devicebridge.runs.queue.start_detached", start)
    yield found
    for mark in marks:
        if mark.is_alive():
            os.kill(mark.pid, 9)


def _queue(root: Path, others: Any = dict) -> JobQueue:
    return JobQueue(RunStore(root), root / ".user" / MEMORY, lambda job: None, others)


def _add(queue: JobQueue, name: str, *devices: str) -> Any:
    job = _job(queue.store.root / name, devices=devices)
    return queue.add(job, devices, is_resumed=False)


def test_jobs_start_in_order_when_their_cards_are_free_and_no_later_one_takes_them(tmp_path, started):
    queue = _queue(tmp_path)
    cards = {"first": ("cuda:0",), "both": ("cuda:0", "cuda:1"), "other": ("cuda:1",), "free": ("cuda:2",)}
    first, both, other, free = (_add(queue, name, *devices) for name, devices in cards.items())
    queue.tick()
    assert started == ["first", "free"]
    described = {each["run"]: (each["state"], each["why"]) for each in queue.describe()}
    assert described["first"] == ("starting", "") and free.run == "free"
    assert "the run first is starting on cuda:0" in described["both"][1]
    assert "the queued run both comes first on cuda:1" in described["other"][1]
    assert "choose other cards" in described["other"][1]
    queue.move(other.id, is_earlier=True)
    queue.tick()
    assert started == ["first", "free", "other"]
    assert both.run == "both" and first.run == "first"
    with pytest.raises(Busy, match="stop its run"):
        queue.remove(first.id)
    queue.remove(both.id)
    assert [each.run for each in queue.jobs()] == ["first", "other", "free"]


def test_models_on_a_card_keep_a_job_waiting_and_are_named(tmp_path: Path, started: list[str]) -> None:
    held = {"cuda:0": "ComfyUI holds models of 12.0 GB on"}
    queue = _queue(tmp_path, lambda: held)
    _add(queue, "one", "cuda:0")
    queue.tick()
    assert started == []
    (job,) = queue.describe()
    assert job["why"].startswith("ComfyUI holds models of 12.0 GB on cuda:0. Wait until it is free, free it, or")
    held.clear()
    queue.tick()
    assert started == ["one"]


def test_a_process_that_ends_without_a_record_has_failed_with_its_last_words(tmp_path, monkeypatch):
    code = "import sys; sys.exit('log line\\ndevicebridge: no model there\\nlook again')"

    def start(command: Any, log: Path, environment: Any = None) -> ProcessMark:
        return start_detached([sys.executable, "-c", code], log)

    monkeypatch.setattr("devicebridge.runs.queue.start_detached", start)
    queue = _queue(tmp_path)
    _add(queue, "one", "cuda:0")
    until(lambda: queue.tick() is not None and queue.jobs()[0].state == "failed")
    assert queue.jobs()[0].message == "no model there\nlook again"
    _add(queue, "one", "cuda:0")  # again, in its place
    assert len(queue.jobs()) == 1
    code = "import sys; sys.exit('killed')"  # which says nothing of its own, behind what the first one said
    until(lambda: queue.tick() is not None and queue.jobs()[0].state == "failed")
    log = queue.kept.file(tmp_path / "one").with_suffix(".log")
    assert "no model there" in log.read_text() and str(log) in queue.jobs()[0].message


def test_a_job_whose_run_has_begun_leaves_the_queue_and_its_record_holds_the_cards(tmp_path, started, monkeypatch):
    queue = _queue(tmp_path)
    job = _add(queue, "one", "cuda:0")
    queue.tick()
    queue.ask("one", "stop")
    with recorded_run(tmp_path / "one", _job(tmp_path / "one"), ["cuda:0"]):
        queue.tick()
        assert [each.id for each in queue.jobs()] == [job.id], "that was not the process of this job"
    monkeypatch.setenv("DEVICEBRIDGE_QUEUED", job.id)
    with recorded_run(tmp_path / "one", _job(tmp_path / "one"), ["cuda:0"]):
        queue.tick()
        assert queue.jobs() == []
        assert Requests(tmp_path / "one").is_asked("stop"), "a stop that came too early is passed on"
        assert explain(["cuda:0"], queue.held()).startswith("the run one trains on cuda:0")
    assert queue.held() == {}


def test_a_started_process_knows_which_job_of_the_queue_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys; sys.stdout.write(os.environ['DEVICEBRIDGE_QUEUED'])")
    monkeypatch.setattr("devicebridge.runs.queue._MAIN", program)
    queue = _queue(tmp_path)
    job = _add(queue, "one", "cuda:0")
    queue.tick()
    log = queue.kept.file(tmp_path / "one").with_suffix(".log")
    until(lambda: log.read_text() == f"== job {job.id}\n{job.id}")


def test_what_is_asked_is_written_over_no_link(tmp_path: Path) -> None:
    (tmp_path / "stop_now").symlink_to(tmp_path / "outside")
    requests = Requests(tmp_path)
    requests.ask("stop")
    assert requests.is_asked("stop") and not (tmp_path / "outside").exists()
    assert requests.take("stop") and not requests.is_asked("stop")


def test_news_are_told_once_and_hold_what_is_new_only(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    news = News(store, _queue(tmp_path))
    assert news.gather() == {}
    run = tmp_path / "a"
    with recorded_run(run, _job(run), ["cpu"]):
        _write_events(run, _step(1, 1.0), _step(2, 0.5))
        (first,) = news.gather()["runs"]
        assert (first["state"], first["step"]) == ("running", 2) and news.is_busy
        assert news.gather() == {}
        _write_events(run, _step(3, 0.25))
        (second,) = news.gather()["runs"]
        assert second["points"] == [(3, 0.25, 1e-3, 0.5)]
        _write_events(run, _step(2, 0.75))  # resumed
        (third,) = news.gather()["runs"]
        assert third["points"] == [(2, 0.75, 1e-3, 0.5)]
    (last,) = news.gather()["runs"]
    assert last["state"] == "finished"
    assert news.gather() == {} and not news.is_busy
    _record(run, {"started": OWN["started"] - 100}, job=job_to_dict(_job(run)))  # and gone
    (crashed,) = news.gather()["runs"]
    assert crashed["state"] == "crashed" and crashed["can_resume"]


def test_the_command_shows_runs_and_queue_and_stops_a_run(tmp_path, capsys, started):
    run, command = tmp_path / "a", ["jobs", str(tmp_path), "--user-directory", str(tmp_path / ".user")]
    queue = _queue(tmp_path)
    with recorded_run(run, _job(run), ["cuda:0"]):
        _write_events(run, _step(3, 0.25))
        _add(queue, "b", "cuda:0")
        assert main(command) == 0
        told = capsys.readouterr().out
        assert "a  running  step 3/9  loss 0.25000  0.50 s/step, about 3 s left  on cuda:0" in told
        assert "queue 1. b  waiting for cuda:0: the run a trains on cuda:0." in told
        assert main([*command, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["run"] == "a"
        assert main([*command, "--stop", "a"]) == 0
        assert Requests(run).is_asked("stop")
    assert main([*command, "--stop", "a"]) == 2
    assert "a is not under way" in capsys.readouterr().err
    assert main(["jobs", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("disk", ["comfy", "big_disk"])
def test_the_command_finds_the_queue_beside_the_output_folder_also_where_that_is_a_link(tmp_path, capsys, disk):
    comfy, root = tmp_path / "comfy", tmp_path / disk / "output" / "devicebridge"
    root.mkdir(parents=True)
    if not (comfy / "output").exists():
        comfy.mkdir()
        (comfy / "output").symlink_to(root.parent)
    _add(JobQueue(RunStore(root), comfy / "user" / MEMORY, lambda job: None), "a", "cpu")
    command = ["jobs", str(comfy / "output" / "devicebridge"), "--json"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert [each["run"] for each in json.loads(told.out)["jobs"]] == ["a"] and told.err == ""
    (comfy / "user").rename(tmp_path / "elsewhere")
    assert main(command) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["jobs"] == [] and "--user-directory" in told.err
    assert main([*command, "--user-directory", str(tmp_path / "elsewhere")]) == 0
    assert len(json.loads(capsys.readouterr().out)["jobs"]) == 1


def test_before_the_first_training_there_are_no_runs(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A ComfyUI that was just installed has no output folder."""
    monkeypatch.setattr("devicebridge.headless.run.find_comfyui", lambda: SimpleNamespace(base=tmp_path))
    assert main(["jobs"]) == 0
    assert capsys.readouterr().out == f"runs in {tmp_path.resolve() / 'output' / 'devicebridge'}\nnone\n"
    assert not (tmp_path / "output").exists()


def test_two_that_look_after_one_queue_start_a_job_once(tmp_path: Path, started: list[str]) -> None:
    queues = [_queue(tmp_path) for _ in range(4)]
    for name in ("one", "two", "three"):
        _add(queues[0], name, f"cuda:{name}")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(JobQueue.tick, queues))
    assert sorted(started) == ["one", "three", "two"]
