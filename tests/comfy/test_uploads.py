"""What a browser can send into ComfyUI's folders starts nothing: a real server, its own routes, its queue looked after.

A turn of the page's thread is waited for by what it tells of a run that was sent behind all others, twice: the second
is told by a turn that began when everything was there.
"""

import http.client
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from devicebridge.config.job import job_to_dict, make_job, save_job
from devicebridge.runs.queue import MEMORY
from devicebridge.runs.record import KeptJobs
from devicebridge.tests.comfy.server import Messages, Server
from devicebridge.tests.waiting import until

pytestmark = pytest.mark.comfy

_CODE = b"import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\n"


class Sender:
    """A browser with no rights but those of ComfyUI's routes; outside: a folder that nothing may touch."""

    def __init__(self, server: Server, outside: Path) -> None:
        self.server, self.outside = server, outside
        self.runs = server.base / "output" / "devicebridge"

    def upload(self, subfolder: str, name: str, content: bytes, kind: str = "output", overwrite: str = "true") -> int:
        """By /upload/image; the status."""
        mark = uuid.uuid4().hex
        fields = {"type": kind, "subfolder": subfolder, "overwrite": overwrite}
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'
            for key, value in fields.items()
        ]
        head = f'--{mark}\r\nContent-Disposition: form-data; name="image"; filename="{name}"\r\n\r\n'
        body = ("".join(parts) + head).encode() + content + f"\r\n--{mark}--\r\n".encode()
        return self.ask("POST", "/upload/image", body, {"Content-Type": f"multipart/form-data; boundary={mark}"})[0]

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def resume(self, run: str, **more: Any) -> dict[str, Any]:
        return self.server.post("/devicebridge/resume", {"run": run, **more})

    def job(self, folder: Path, **sections: Any) -> Any:
        """One that reads outside, and asks for an uploaded module."""
        values: dict[str, Any] = {
            "model": {"path": str(self.outside / "model")}, "data": {"folders": [{"path": str(self.outside / "data")}]},
            "cache": {"folder": str(self.outside / "cache")}, "split": {"devices": ["cpu"]}, "train": {"steps": 3},
            "optimizer": {"name": "output.devicebridge.evil.Evil", "allow_import": True},
            "output": {"folder": str(folder)},
        }  # fmt: skip
        return make_job({**values, **sections})

    def record(self, job: Any) -> bytes:
        process = {"pid": 2**22 + 1, "started": 1.0, "host": "nowhere"}
        values = {"status": "stopped", "process": process, "devices": ["cpu"], "steps": 3, "message": "", "since": 1.0}
        return json.dumps({**values, "job": job_to_dict(job)}).encode()

    def send_run(self, run: str, folder: Path | None = None, **sections: Any) -> None:
        record = self.record(self.job(folder or self.runs / run, **sections))
        assert self.upload(f"devicebridge/{run}", "run.json", record) == 200

    def queued(self, run: str) -> dict[str, bytes]:
        """A job of the queue, as every version wrote it, by the name of its file."""
        name, root = uuid.uuid4().hex, str(self.runs)
        job: dict[str, Any] = {"id": name, "run": run, "devices": ["cpu"], "order": 1.0, "is_resumed": False}
        job |= {"state": "waiting", "process": None, "started": 0.0, "message": "", "is_stopped": False}
        job |= {"root": root, "job": job_to_dict(self.job(self.runs / run))}
        return {f"{name}.json": json.dumps(job).encode(), "queue.json": json.dumps({"jobs": [job]}).encode()}

    def send_queue(self, subfolder: str, run: str, kind: str = "output") -> set[int]:
        return {self.upload(subfolder, name, data, kind) for name, data in self.queued(run).items()}


@pytest.fixture
def sender(server: Server, tmp_path: Path) -> Iterator[Sender]:
    """With uploaded code and job files in place, and everything watched; nothing of it stays."""
    outside = Path("/nowhere") if os.name == "nt" else tmp_path / "outside"
    for name in ("model", "data", "cache"):
        (outside / name).mkdir(parents=True)
    allowed = server.base / "user" / "devicebridge.toml"  # by which the tests' own folders may be read
    allowed.rename(tmp_path / "allowed")
    sender = Sender(server, outside)
    assert sender.upload("devicebridge", "evil.py", _CODE) == 200
    save_job(sender.job(sender.runs / "victim"), tmp_path / "job.toml")
    for name in ("background.toml", "processes.toml", "job.toml", "queue.json"):
        assert sender.upload("devicebridge/victim", name, (tmp_path / "job.toml").read_bytes()) == 200
    watched = server.post("/watching", {"folders": [str(outside)]})
    assert Path(watched["memory"]) == server.base / "user" / MEMORY
    yield sender
    server.post("/watching", {"folders": []})
    (tmp_path / "allowed").rename(allowed)


def _turn(sender: Sender) -> None:
    with Messages(sender.server.port, uuid.uuid4().hex) as messages:
        for _ in range(2):
            run = f"told_{uuid.uuid4().hex[:8]}"
            sender.send_run(run)
            while True:
                kind, data = messages._next()
                if kind == "devicebridge.page" and run in [each["run"] for each in data.get("runs", ())]:
                    break


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}


VARIANTS: dict[str, Any] = {
    "a job of the queue": lambda sender: sender.send_queue("devicebridge/.jobs", "victim"),
    "in capitals": lambda sender: sender.send_queue("devicebridge/.JOBS", "victim"),
    "in mixed case": lambda sender: sender.send_queue("DeviceBridge/.Jobs", "victim"),
    "backslashes": lambda sender: sender.send_queue("devicebridge\\.jobs", "victim"),
    "percent signs": lambda sender: sender.send_queue("devicebridge/%2ejobs", "victim"),
    "dots and slashes": lambda sender: sender.send_queue("./devicebridge//victim/.././.jobs/", "victim"),
    "a full-width dot": lambda sender: sender.send_queue("devicebridge/\uff0ejobs", "victim"),
    "a path as file name": lambda sender: [
        sender.upload("devicebridge/victim", f"../.jobs/{name}", data) for name, data in sender.queued("victim").items()
    ],
    "a run above the store": lambda sender: sender.send_queue("devicebridge/.jobs", "../../input/x"),
    "a run elsewhere": lambda sender: sender.send_queue("devicebridge/.jobs", str(sender.outside)),
    "our memory in output": lambda sender: sender.send_queue(f"devicebridge/{MEMORY}", "victim"),
    "our memory in input": lambda sender: sender.send_queue(MEMORY, "victim", "input"),
    "our memory in temp": lambda sender: sender.send_queue(MEMORY, "victim", "temp"),
    "our memory over two dots": lambda sender: _refused(sender.send_queue(f"../user/{MEMORY}", "victim")),
    "our memory over encoded dots": lambda sender: sender.send_queue(f"%2e%2e/user/{MEMORY}", "victim"),
    "our memory by its full path": lambda sender: _refused(
        sender.send_queue(str(sender.server.base / "user" / MEMORY), "victim")
    ),
    "user data": lambda sender: _user_data(sender, f"{MEMORY}/queue.json"),
    "user data over two dots": lambda sender: _user_data(sender, f"../{MEMORY}/queue.json"),
    "user data of a made-up user": lambda sender: _user_data(sender, "queue.json", {"comfy-user": MEMORY}),
    "a run that reads outside": lambda sender: sender.send_run("reads", optimizer={}),
    "a run that writes outside": lambda sender: sender.send_run(
        "writes", sender.outside, model={"path": str(sender.runs)}
    ),
    "a run that imports": lambda sender: sender.send_run("imports", **_own(sender)),
    "a run whose folder leads out": lambda sender: sender.send_run("up", sender.runs / "up" / ".." / ".." / ".." / "x"),
    "an unpacked link to a run": lambda sender: _unpack(sender, "linked_run", sender.outside),
    "an unpacked link in a run": lambda sender: (
        sender.send_run("with_a_link", **{**_own(sender), "optimizer": {}}),
        _unpack(sender, "with_a_link/checkpoints", sender.outside),
    ),
    "an unpacked queue behind a link": lambda sender: (
        _unpack(sender, ".jobs_of_mine", sender.runs / "victim"),
        sender.send_queue("devicebridge/.jobs_of_mine", "victim"),
    ),
}


def _own(sender: Sender) -> dict[str, Any]:
    """Sections of a job whose folders nodes may read and write."""
    for name in ("own_data", "own_model"):
        (sender.server.base / "input" / name).mkdir(exist_ok=True)
    return {
        "model": {"path": str(sender.server.base / "input" / "own_model")},
        "data": {"folders": [{"path": str(sender.server.base / "input" / "own_data")}]},
        "cache": {},
    }


def _refused(statuses: set[int]) -> None:
    assert statuses == {400}


def _user_data(sender: Sender, path: str, headers: dict[str, str] | None = None) -> None:
    data = sender.queued("victim")["queue.json"]
    sender.ask("POST", f"/userdata/{quote(path, safe='')}?overwrite=true", data, headers or {})


def _unpack(sender: Sender, name: str, target: Path) -> None:
    """What an archive with a link leaves, for which other packs have nodes."""
    (sender.runs / name).symlink_to(target)


def test_nothing_that_was_sent_starts_a_process_or_is_read_or_written_elsewhere(sender: Sender) -> None:
    server = sender.server
    assert len(VARIANTS) >= 20
    memory, outside = _files(server.base / "user" / MEMORY), _files(sender.outside)
    (sender.outside / "run.json").write_bytes(sender.record(sender.job(sender.outside)))
    outside = _files(sender.outside)
    sender.server.post("/watching", {"folders": [str(sender.outside)]})
    of_others = {each["run"] for each in server.get("/devicebridge/state")["runs"]}  # what other tests left there
    wrong: dict[str, Any] = {}
    for send in VARIANTS.values():
        send(sender)
    _turn(sender)
    sent = {each["run"] for each in server.get("/devicebridge/state")["runs"]} - of_others
    for run in [*sent, "linked_run", ".jobs", "../../x"]:
        answer = sender.resume(run)
        if "confirm" in answer:
            wrong[run] = [answer, sender.resume(run, confirm=answer["confirm"])]
        elif "job" in answer:
            wrong[run] = answer
    _turn(sender)
    told = server.post("/watching", {"folders": []})["told"]
    assert wrong == {}
    assert told == []
    assert server.get("/devicebridge/state")["jobs"] == []
    assert _files(sender.outside) == outside and _files(server.base / "user" / MEMORY) == memory
    assert not list(server.base.rglob("*.ran"))


def test_an_old_run_is_listed_and_resumed_only_by_the_request_that_repeats_what_was_shown(sender: Sender) -> None:
    server, own = sender.server, {**_own(sender), "optimizer": {}}
    sender.send_run("older", **own)
    state = {each["run"]: each for each in server.get("/devicebridge/state")["runs"]}
    assert state["older"]["can_resume"] and state["older"]["state"] == "stopped"
    shown = sender.resume("older")
    data, model = own["data"]["folders"][0]["path"], own["model"]["path"]
    assert {f"data.folders.path: {data}", f"model.path: {model}"} <= set(shown["paths"])
    for other in (None, True, "", shown["confirm"][:-1], "x" * 64):
        assert sender.resume("older", confirm=other) == shown
    sender.send_run("older", **own, train={"steps": 4})  # another job in its place, between question and answer
    assert sender.resume("older", confirm=shown["confirm"])["confirm"] != shown["confirm"]
    assert server.post("/watching", {"folders": []})["told"] == []
    sender.send_run("older", **own)
    assert "job" in sender.resume("older", confirm=shown["confirm"])
    ((event, started),) = server.post("/watching", {"folders": []})["told"]
    assert event == "subprocess.Popen" and str(server.base / "user" / MEMORY / "jobs") in started
    # There is no such model.
    until(lambda: [job["state"] for job in server.get("/devicebridge/state")["jobs"]] == ["failed"])
    (job,) = server.get("/devicebridge/state")["jobs"]
    assert server.post("/devicebridge/queue", {"job": job["id"], "what": "remove"}) == {"jobs": []}
    kept = KeptJobs(server.base / "user" / MEMORY / "jobs").find(sender.runs / "older")
    assert kept == sender.job(sender.runs / "older", **own), "from now on it is this ComfyUI's own run"
