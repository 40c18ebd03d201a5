"""The page's routes in the real server: hostile requests, and trainings in the background that nothing takes along."""

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.runs.record import read_record
from devicebridge.tests.comfy.server import Messages, Server, start_server
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from devicebridge.tests.waiting import until
from devicebridge.tests.workflows import read_workflow, set_values, training_values
from PIL import Image

pytestmark = pytest.mark.comfy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE_API = ROOT / "tests" / "assets" / "train_a_LoRA_over_two_GPUs_api.json"


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below, links not followed, with its time and size."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(place, name))
            found[os.path.join(place, name)] = (status.st_mtime_ns, status.st_size)
    return found


def test_every_hostile_request_is_refused_and_touches_nothing(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (secret / "checkpoints" / "step-000001").mkdir(parents=True)
    for name in ("1_1.png", "lora.safetensors", "checkpoints/step-000001/lora.safetensors"):
        (secret / name).write_bytes(b"a secret")
    runs = server.base / "output" / "devicebridge"
    checkpoint = runs / "a" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "lora.safetensors").write_bytes(b"a lora")
    (runs / "a" / "samples").mkdir()
    (runs / "a" / "samples" / "000009_0.png").symlink_to(secret / "1_1.png")
    (runs / "linked").symlink_to(secret)
    dogs = server.base / "input" / "dogs"
    dogs.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(dogs / f"{name}.png")
    (dogs / "a.txt").write_text("a dog", encoding="utf-8")
    (secret / "1_1.txt").write_text("a secret", encoding="utf-8")
    (dogs / "b.txt").symlink_to(secret / "1_1.txt")
    (dogs / "linked.png").symlink_to(secret / "1_1.png")
    (server.base / "input" / "linked_images").symlink_to(secret)
    folders = (runs / "a", secret, server.base / "models", server.base / "user", server.base / "input")
    before = [_files(folder) for folder in folders]
    wrong = {}
    for number, (method, path, headers, body) in enumerate(hostile_requests(str(secret / "1_1.png"), server.port)):
        status, answer = _ask(server.port, method, path, headers, body)
        if not 400 <= status < 500 or b"secret" in answer.replace(str(secret).encode(), b""):
            wrong[number, method, path[:80]] = (status, answer[:200])
    assert wrong == {}
    assert [_files(folder) for folder in folders] == before
    assert _ask(server.port, "GET", "/devicebridge/lora?run=a&step=1", {}, b"") == (200, b"a lora")
    for link in (dogs / "b.txt", dogs / "linked.png", server.base / "input" / "linked_images"):
        link.unlink()
    assert _ask(server.port, "GET", "/devicebridge/picture?folder=dogs&file=a.png", {}, b"")[1][:2] == b"\xff\xd8"
    shown = server.get("/devicebridge/dataset?folder=dogs&resolutions=64")["files"]
    assert [(each["file"], each["caption"]) for each in shown] == [("b.png", None), ("a.png", "a dog")]


def test_what_is_new_is_told_only_to_whoever_may_ask_for_it(server: Server) -> None:
    """A page whose name leads here may open ComfyUI's websocket."""
    with (
        Messages(server.port, "own") as own,
        Messages(server.port, "named", "localhost") as named,
        Messages(server.port, "stranger", "evil.example") as stranger,
    ):
        (server.base / "output" / "devicebridge" / "heard" / "checkpoints").mkdir(parents=True)
        for page in (own, named):
            assert "heard" in str(page.until("devicebridge.page")[-1][1])
        image = {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}
        preview = {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}
        server.queue({"1": image, "2": preview}, "stranger")
        assert "devicebridge.page" not in {kind for kind, _ in stranger.until_done()}


def _ask(port: int, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
    """The path as it is, which clients would tidy. A body that the server stops reading may break the line."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
    for name, value in {**headers, "Content-Length": str(len(body))}.items():
        connection.putheader(name, value)
    connection.endheaders()
    with contextlib.suppress(OSError):
        connection.send(body)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.long
def test_a_training_in_the_background_survives_comfyui_and_its_own_kill_is_seen(comfyui: Path, tmp_path: Path) -> None:
    base, steps = tmp_path / "comfy", 1500
    pipeline = save_tiny_pipeline(tmp_path / "model", "flux2")
    dataset = save_tiny_dataset(tmp_path / "data")
    train = {"steps": steps, "save_every": 20, "name": "background", "background": True, "accumulation": 4}
    graph = set_values(read_workflow(EXAMPLE_API), training_values(pipeline, dataset, **train))
    folder = base / "output" / "devicebridge" / "background"
    left = folder.parent / ".jobs" / "0.json"  # of a queue as earlier versions kept it
    left.parent.mkdir(parents=True)
    left.touch()
    with start_server(comfyui, base) as server:
        assert server.log.read_text(encoding="utf-8").count(f"in {left.parent}, ") == 1
        server.succeed(graph)
        first = _wait_for(server, "running", 3)
        again = server.run(
            set_values(graph, {"DeviceBridgeCacheCaptionsAndLatents.cache_folder": "devicebridge/cache/"})
        )
        assert again.status == "error" and "under way" in again.error
        blocking = {"DeviceBridgeTrainLora.background": False, "DeviceBridgeTrainLora.name": "other"}
        refused = server.run(set_values(graph, blocking))
        assert refused.status == "error" and "the run background trains on cpu" in refused.error
        listening = _listener(server.port)
        os.kill(listening, signal.SIGKILL)
        step = _step(folder)
    until(lambda: _step(folder) > step + 3)
    record = read_record(folder)
    assert record is not None and record.process.pid == first["pid"] and record.state == "running"
    with start_server(comfyui, base) as server:
        found = _wait_for(server, "running", step)
        assert found["pid"] == first["pid"]
        os.kill(found["pid"], signal.SIGKILL)
        killed = time.monotonic()
        crashed = _wait_for(server, "crashed", 0)
        assert time.monotonic() - killed < 10 and crashed["can_resume"]
        answer = server.post("/devicebridge/resume", {"run": "background"})
        assert "job" in answer, answer
        resumed = _wait_for(server, "running", 0)
        assert resumed["pid"] != found["pid"]
        server.post("/devicebridge/ask", {"run": "background", "what": "stop"})
        stopped = _wait_for(server, "stopped", 1)
        assert (folder / "checkpoints" / f"step-{stopped['step']:06d}").is_dir()


def _listener(port: int) -> int:
    """The process that listens on this port."""
    import psutil

    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise AssertionError(f"nobody listens on {port}")


def _step(folder: Path) -> int:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return max((event["step"] for event in map(json.loads, lines) if event["kind"] == "step"), default=0)


def _wait_for(server: Server, state: str, step: int) -> dict[str, Any]:
    """The run's summary, once it is in this state and has done so many steps."""

    def found() -> Any:
        runs = server.get("/devicebridge/state")["runs"]
        return [each for each in runs if (each["run"], each["state"]) == ("background", state) and each["step"] >= step]

    return until(found, said=lambda: server.get("/devicebridge/state"))[0]


Hostile = tuple[str, str, dict[str, str], bytes]
_JSON = {"Content-Type": "application/json"}
_CAPTION = {"folder": "dogs", "file": "a.png", "caption": "x", "was": "a dog"}


def _get(path: str, **headers: str) -> Hostile:
    return "GET", f"/devicebridge/{path}", {name.replace("_", "-"): value for name, value in headers.items()}, b""


def _post(path: str, values: Any, **headers: str) -> Hostile:
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    return "POST", f"/devicebridge/{path}", _JSON | {n.replace("_", "-"): each for n, each in headers.items()}, body


def _places(outside: str) -> Iterator[str]:
    """Names that lead elsewhere."""
    asked: dict[str, tuple[str, ...]] = {
        "run?run={}": (
            "..", "../..", "%2e%2e%2f%2e%2e", "/", "/etc", "a/..", ".", "a/../a", "a%00", "%00", "a%5c..", "linked",
            "", "%ff", ".jobs", outside,
        ),
        "sample?run=a&file={}": (
            "../run.json", "..%2f..%2f..%2fsecret%2f1_1.png", outside, "000009_0.png", "%00", "", "run.json",
        ),
        "lora?run=a&step={}": ("..", "-1", "1e3", "%D9%A1", "9" * 40, "", "1/../2"),
        "{}": (
            "run", "run?run=a&run=b", "run?" + "&".join(f"x{number}=1" for number in range(50)),
            "../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "state/../run", "%00",
        ),
        "dataset?folder={}": (
            "..", "dogs/..", "%2e%2e", "/etc", "linked_images", "", "%00", "../output", outside,
            "dogs&resolutions=99999999", "dogs&resolutions=__import__('os')",
        ),
        "picture?folder=dogs&file={}": (
            "..%2f..%2fsecret%2f1_1.png", "linked.png", outside, "a.txt", "", "%00", "a.png%00", "..", ".",
        ),
        "picture?folder={}&file=a.png": ("..", "dogs/..", "/etc", "linked_images", "", "%00", "../output"),
    }  # fmt: skip
    for path, names in asked.items():
        yield from map(path.format, names)


def _changes(outside: str) -> Iterator[tuple[str, Any]]:
    """Bodies, among them too large and malformed ones, of what changes something."""
    captions: tuple[dict[str, Any], ...] = (
        {"folder": "../../secret"}, {"folder": "linked_images"}, {"file": "linked.png"}, {"was": "another"},
        {"file": "../../../secret/1_1.png"}, {"file": outside}, {"caption": ["x"]}, {"caption": "x" * 9000},
        {"file": "b.png", "was": None},  # whose caption is a link
        {"was": {}}, {"resolutions": 512}, {"trigger_word": None}, {"max_aspect_ratio": True},
    )  # fmt: skip
    large = b"x" * 10_000_000
    asked: dict[str, tuple[Any, ...]] = {
        "caption": (*(_CAPTION | values for values in captions), large),
        "use": (
            {"run": "../..", "step": 1}, {"run": "linked", "step": None}, {"run": "a", "step": "../1"},
            {"run": "a", "step": True},
        ),
        "delete": (
            {"run": "a", "step": 1}, {"run": "a", "step": 1, "confirm": "true"},
            {"run": "../a", "step": 1, "confirm": True}, {"run": "a", "step": [1], "confirm": True},
        ),
        "ask": (
            {"run": "a", "what": "../../x"}, {"run": "a", "what": "__import__('os').system('id')"},
            {"run": ["a"], "what": "stop"}, {"run": "a\0", "what": "stop"}, large,
            b'{"run": "' + b"a" * 10_000_000 + b'", "what": "stop"}', b"[" * 15_000, [1], b"", b"\xff\xfe",
        ),
        "resume": ({"run": "linked"}, {"run": "/" + "a" * 400}),
        "queue": ({"job": "../x", "what": "remove"}, {"job": {"$ne": 1}, "what": "remove"}),
        "eval": ({"code": "1"},), "state": ({},),
    }  # fmt: skip
    for path, bodies in asked.items():
        yield from ((path, body) for body in bodies)


def hostile_requests(outside: str, port: int) -> list[Hostile]:
    """About 130 of them.

    Args:
        outside: absolute path of a file that nobody may read, outside ComfyUI's folders; the run `linked`, the sample
            000009_0.png of the run `a`, the dataset `linked_images`, and linked.png and b.txt of the dataset `dogs` are
            links to what is beside it.
    """
    step = {"run": "a", "step": 1}
    found = [*map(_get, _places(outside)), *(_post(*each) for each in _changes(outside))]
    found += [
        _post("caption", _CAPTION, Origin="http://evil.example"),
        _post("ask", {"run": "a", "what": "stop"}, Content_Type="text/plain"),
        _post("free", {}, Content_Type="multipart/form-data; boundary=x"),
        # other origins, of which tests/unit/runs/test_guard.py has each kind
        _get("state", Sec_Fetch_Site="cross-site"), _get("state", Host=""),
        _post("free", {}, Origin="http://evil.example"), _post("free", {}, Origin=f"http://127.0.0.1:{port + 1}"),
        _post("free", {}, Host="evil.example", Origin=f"http://127.0.0.1:{port}"),
        # methods
        ("PUT", "/devicebridge/free", _JSON, b"{}"), _get("free"),
        ("DELETE", "/devicebridge/delete", _JSON, json.dumps(step | {"confirm": True}).encode()),
    ]  # fmt: skip
    # A name that its owner leads to this machine.
    shown = ("state", "run?run=a", "lora?run=a&step=1", "datasets", "picture?folder=dogs&file=a.png")
    found += [_get(name, Host=f"evil.example:{port}") for name in shown]
    changing = {"delete": step | {"confirm": True}, "caption": _CAPTION, "use": step, "free": {}}
    hosts = (f"evil.example:{port}", f"localhost.evil.example.:{port}", f"127.0.0.1.evil.example:{port}")
    found += [
        _post(name, body, Host=host, Origin=f"http://{host}") for name, body in changing.items() for host in hosts
    ]
    return found
