"""A ComfyUI server for tests: started once, talked to over HTTP and a websocket."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devicebridge.system import processes
from devicebridge.tests.comfy_host import allow_folders, comfy_python

ROOT = Path(__file__).resolve().parents[2]
# One thread: tiny matrices only wait for more, and the command line must compute in the same order.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ARGUMENTS = ["--cpu", "--disable-api-nodes", "--disable-auto-launch", "--database-url", "sqlite:///:memory:"]


@dataclass(frozen=True)
class Finished:
    """How a prompt ended: "success", "error" or "interrupted"; error is the node's message; outputs by node id."""

    status: str
    error: str
    outputs: dict[str, Any]


@dataclass
class Server:
    process: processes.Running
    port: int
    base: Path
    log: Path

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            body = answer.read()
        return json.loads(body) if body.startswith((b"{", b"[")) else body.decode()

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(data).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def queue(self, graph: dict[str, Any], client_id: str = "") -> str:
        answer = self.post("/prompt", {"prompt": graph, "client_id": client_id})
        assert not answer.get("node_errors") and "prompt_id" in answer, answer
        return answer["prompt_id"]

    def wait(self, prompt_id: str, timeout_s: float = 240.0) -> Finished:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert self.process.exit_code is None, self.log.read_text(encoding="utf-8")[-3000:]
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry:
                return _read_history(entry)
            time.sleep(0.1)
        raise AssertionError(f"not done after {timeout_s} s:\n{self.log.read_text(encoding='utf-8')[-3000:]}")

    def run(self, graph: dict[str, Any]) -> Finished:
        return self.wait(self.queue(graph))

    def succeed(self, graph: dict[str, Any]) -> Finished:
        finished = self.run(graph)
        assert finished.status == "success", finished.error
        return finished

    @contextmanager
    def short_texts(self) -> Iterator[None]:
        """Inside, trainings pad texts to few tokens; see tests/tiny_pipeline.py."""
        self._switch("TestShortTexts", is_on=True)
        try:
            yield
        finally:
            self._switch("TestShortTexts", is_on=False)

    def _switch(self, node: str, **inputs: Any) -> None:
        self.succeed({"1": {"class_type": node, "inputs": inputs}})

    def empty_cache(self) -> None:
        """Empty ComfyUI's cache of outputs, as a restart does. ComfyUI obeys /free after the prompt it next takes,
        which may be the caller's: another one goes first."""
        self.post("/free", {"unload_models": True, "free_memory": True})
        image = {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1, "color": 0}}
        preview = {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}
        self.run({"1": image, "2": preview})


def _read_history(entry: dict[str, Any]) -> Finished:
    messages = dict(entry["status"]["messages"])
    if "execution_interrupted" in messages:
        return Finished("interrupted", "", entry["outputs"])
    if "execution_error" in messages:
        return Finished("error", messages["execution_error"]["exception_message"], entry["outputs"])
    return Finished("success", "", entry["outputs"])


@contextmanager
def start_server(comfyui: Path, base: Path) -> Iterator[Server]:
    """ComfyUI with this pack and the tests' own nodes as its custom nodes, and folders of its own below base."""
    for name in ("custom_nodes", "models", "input", "output", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    allow_folders(base / "user", base.parent, Path("/nowhere"))
    packs = {"devicebridge": ROOT, **{name: ROOT / "tests" / "comfy" / name for name in ("stock_nodes", "watching")}}
    for name, folder in packs.items():
        if not (base / "custom_nodes" / name).exists():  # a second server of these folders finds them there
            (base / "custom_nodes" / name).symlink_to(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = comfy_python(comfyui)
    assert python is not None
    command = [python, "main.py", "--port", str(port), "--base-directory", base, *ARGUMENTS]
    if frontend := os.environ.get("COMFYUI_FRONTEND"):  # the folder `static` of another frontend package
        command += ["--front-end-root", frontend]
    log = base / "server.log"
    with log.open("wb") as output:
        process = processes.start(command, folder=comfyui, environment=ENVIRONMENT, output=output)
        with process:
            server = Server(process, port, base, log)
            _wait_until_ready(server)
            yield server


def _wait_until_ready(server: Server) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end and server.process.exit_code is None:
        try:
            server.get("/system_stats")
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"ComfyUI did not start:\n{server.log.read_text(encoding='utf-8')[-3000:]}")


class Messages:
    def __init__(self, port: int, client_id: str, host: str = "127.0.0.1") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET /ws?clientId={client_id} HTTP/1.1", f"Host: {host}:{port}", "Upgrade: websocket"]
        lines += ["Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        self._socket.sendall("\r\n".join(lines).encode())
        self._file = self._socket.makefile("rb")
        while self._file.readline().strip():
            pass

    def __enter__(self) -> Messages:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        self._socket.close()

    def until_done(self) -> list[tuple[str, Any]]:
        return self.until("execution_success", "execution_error", "execution_interrupted")

    def until(self, *kinds: str) -> list[tuple[str, Any]]:
        found = []
        while True:
            kind, data = self._next()
            found.append((kind, data))
            if kind in kinds:
                return found

    def _next(self) -> tuple[str, Any]:
        opcode, payload = self._frame()
        if opcode == 1:
            message = json.loads(payload)
            return message["type"], message["data"]
        if opcode == 2 and struct.unpack(">I", payload[:4])[0] == 3:
            (length,) = struct.unpack(">I", payload[4:8])
            return "text", payload[8 + length :].decode()
        return "other", None

    def _frame(self) -> tuple[int, bytes]:
        first, second = self._file.read(2)
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack(">H", self._file.read(2))
        elif length == 127:
            (length,) = struct.unpack(">Q", self._file.read(8))
        return first & 0x0F, self._file.read(length)
