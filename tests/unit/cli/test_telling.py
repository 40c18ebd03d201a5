"""Whatever becomes of what the command says, it does what it was asked."""

import dataclasses
import io
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from devicebridge.cli.main import main
from devicebridge.config.job import JobConfig, job_to_dict, load_job, save_job
from devicebridge.events import EventLog, EventTail
from devicebridge.jobs.resume import read_result
from devicebridge.runs.record import read_record
from devicebridge.runs.store import RunStore
from devicebridge.system.telling import EscapedLogs, SaidLogs, errors_in, printable, safe_output, say
from devicebridge.tests.tiny_pipeline import make_tiny_job, short_texts
from devicebridge.training.state import list_checkpoints, load_checkpoint

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(os.name == "nt", reason="Windows has no such names"),
]
ODD = "ж\udcff\x85\x9b31m\u202e"  # beyond cp1252; no UTF-8; a terminal's escape; from right to left


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobConfig]:
    folder = tmp_path_factory.mktemp("told")
    made = make_tiny_job(folder, evaluation={"folder": ""}, train={"steps": 2}, output={"save_every_steps": 1})
    (folder / "data").rename(folder / ODD)
    data = dataclasses.replace(made.data.folders[0], path=str(folder / ODD))
    with short_texts():
        yield dataclasses.replace(made, data=dataclasses.replace(made.data, folders=(data,)))


class _Full(io.RawIOBase):
    """A log on a full disk, or a pipe that nobody reads."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise self._error


def _failing(error: OSError) -> io.TextIOWrapper:
    return io.TextIOWrapper(_Full(error), encoding="utf-8", write_through=True)  # type: ignore[arg-type]


STREAMS = {
    "cp1252": lambda: io.TextIOWrapper(io.BytesIO(), encoding="cp1252"),
    "ascii": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"), "none": lambda: None,
    "closed pipe": lambda: _failing(BrokenPipeError(32, "Broken pipe")),
    "full disk": lambda: _failing(OSError(28, "No space left on device")),
}  # fmt: skip


@pytest.mark.parametrize("kind", STREAMS)
def test_a_training_ends_well_whatever_its_output_is(kind, job, tmp_path, monkeypatch):
    run = tmp_path / f"run {ODD}"
    own = dataclasses.replace(job, output=dataclasses.replace(job.output, folder=str(run)))
    save_job(own, tmp_path / "job.toml")
    monkeypatch.setattr(sys, "stdout", STREAMS[kind]())
    monkeypatch.setattr(sys, "stderr", STREAMS[kind]())
    code, said = main(["train", str(tmp_path / "job.toml")]), sys.stdout
    assert code == 0
    assert (run / "lora.safetensors").is_file() and len(list_checkpoints(run / "checkpoints")) == 2
    if kind in ("cp1252", "ascii"):
        text = said.buffer.getvalue().decode(kind)
        assert "LoRA: " in text and "\\udcff" in text and not set("\x85\x9b\u202e") & set(text)


def test_what_a_run_in_a_folder_of_odd_bytes_has_written_is_read_back(job, tmp_path, capsys):
    run = tmp_path / f"run {ODD}"
    own = dataclasses.replace(job, output=dataclasses.replace(job.output, folder=str(run)))
    save_job(own, tmp_path / "job.toml")
    assert main(["train", str(tmp_path / "job.toml")]) == 0 and load_job(tmp_path / "job.toml") == own
    told = EventTail(run, from_start=True)
    assert [event.values["path"] for event in told.new() if event.kind == "saved"][-1] == str(run / "lora.safetensors")
    record = read_record(run)
    assert record is not None and record.job == json.loads(json.dumps(job_to_dict(own)))
    state = load_checkpoint(list_checkpoints(run / "checkpoints")[-1])
    assert read_result(run / "lora.safetensors", state).status == "finished"
    assert RunStore(tmp_path).ids() == [run.name]
    capsys.readouterr()
    assert main(["jobs", str(tmp_path), "--json"]) == 0
    assert [each["run"] for each in json.loads(capsys.readouterr().out)["runs"]] == [run.name]
    assert main(["train", str(tmp_path / "job.toml"), "--resume"]) == 0


def test_a_full_disk_for_events_costs_lines_of_it_and_nothing_else(job, tmp_path, caplog):
    """One line is cut short, the next are refused, and then there is room again."""
    heard: list[int] = []
    with EventLog(tmp_path, lambda event: heard.append(event.step)) as events:
        file = events._file

        class Filling:
            name = file.name
            left = [5, None, 10**6, 10**6]

            def write(self, data: bytes) -> int:
                room = self.left.pop(0)
                if room is None:
                    raise OSError(28, "No space left on device")
                return file.write(data[:room])

            def close(self) -> None:
                file.close()

        events._file = Filling()  # type: ignore[assignment]
        for step in range(4):
            events.emit("step", step, 4, loss=0.5, learning_rate=0.1, elapsed_s=1.0)
    tail = EventTail(tmp_path, from_start=True)
    assert heard == [0, 1, 2, 3] and [event.step for event in tail.new()] == [2, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    progress = RunStore(tmp_path.parent).progress(tmp_path.name)
    assert [point[0] for point in progress.steps] == [2, 3]


def test_a_listener_that_cannot_tell_ends_nothing(job: JobConfig, tmp_path: Path) -> None:
    def gone(event: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with EventLog(tmp_path, gone) as events:
        events.emit("step", 1, 2, loss=0.5)
        events.emit("step", 2, 2, loss=0.5)
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 2


def test_what_a_terminal_would_obey_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J\x9b31m\rb\u202ec\u2028d\udcff\x7f", sys.stderr)
    said = capsys.readouterr().err
    assert said == "a\\u001b[2J\\u009b31m\\u000db\\u202ec\\u2028d\\udcff\\u007f\n"
    assert printable("日本 é\t👩\u200d👩\n") == "日本 é\t👩\u200d👩\n"


def test_logs_reach_other_handlers_escaped(caplog: pytest.LogCaptureFixture) -> None:
    pack, escaping = logging.getLogger("devicebridge"), EscapedLogs()
    pack.addHandler(escaping)
    try:
        logging.getLogger("devicebridge.data").warning("%s and %d", "a\x1b]0;b\x07", 3)
    finally:
        pack.removeHandler(escaping)
    assert caplog.messages == ["a\\u001b]0;b\\u0007 and 3"]


def test_arguments_that_are_refused_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "a.toml", "--\x1b[31m"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["closed pipe", "full disk", "ascii"])
def test_what_a_library_prints_breaks_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", STREAMS[kind]())
    safe_output()
    print("\u0436", flush=True)
    sys.stdout.flush()


def test_output_is_made_safe_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    safe_output()
    made = sys.stdout
    safe_output()
    assert sys.stdout is made and made.fileno() >= 0  # which a started process gets
    print("nowhere", flush=True)


def test_a_tensorboard_that_cannot_be_imported_ends_no_training(tmp_path, caplog, monkeypatch):
    """As one of another protobuf is, whose import raises TypeError."""

    def fail(name: str) -> None:
        raise TypeError("Descriptors cannot be created directly.")

    broken = types.ModuleType("torch.utils.tensorboard")
    monkeypatch.setattr(broken, "__getattr__", fail, raising=False)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", broken)
    tail = EventTail(tmp_path)
    with EventLog(tmp_path, tensorboard=True) as events:
        events.emit("step", 1, 2, loss=0.5)
    assert [event.step for event in tail.new()] == [1] and "Descriptors" in caplog.text


def test_lines_of_a_record_stay_together(capsys: pytest.CaptureFixture[str]) -> None:
    SaidLogs().emit(logging.LogRecord("a", logging.WARNING, "", 0, "2 images:\n a.png\nb.png", (), None))
    assert capsys.readouterr().err == "2 images:\n   a.png\n  b.png\n"


def test_an_error_in_a_log_goes_on_until_somebody_says_something_else() -> None:
    text = (
        "step 1/2\ndevicebridge: 2 images cannot be read:\n a.png\n b.png\nsaved /r\n"
        "devicebridge: rank 1: lost\nsee there\nE1128 12:00:00 torch\nmore\n"
    )
    assert errors_in(text) == ["2 images cannot be read:\n a.png\n b.png", "rank 1: lost\nsee there"]
    assert errors_in("Traceback\n") == []
