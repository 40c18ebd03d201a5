"""The page's routes in the real server: hostile requests, and trainings in the background that nothing takes along."""

import contextlib
import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from devicebridge.runs.record import read_record
from devicebridge.tests.comfy.server import Messages, Server, start_server
from devicebridge.tests.hostile_requests import hostile_requests
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
