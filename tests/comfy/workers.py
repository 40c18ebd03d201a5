"""Scripts of this folder that ComfyUI's Python runs, all in forks of one process; see fork_host.py."""

import atexit
import functools
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from devicebridge.tests.comfy.conftest import names_that_run
from devicebridge.tests.comfy.server import ENVIRONMENT
from devicebridge.tests.comfy_host import comfy_python

HERE = Path(__file__).resolve().parent


class ForkHost:
    def __init__(self, comfyui: Path) -> None:
        ours, its = socket.socketpair()
        command = [str(comfy_python(comfyui)), str(HERE / "fork_host.py"), str(comfyui)]
        with its:
            # No new session: Ctrl-C in a terminal ends it, too.
            self._process = subprocess.Popen(command, stdin=its, env={**os.environ, **ENVIRONMENT})
        self._socket, self._answers = ours, ours.makefile("r", encoding="utf-8")
        self._codes: dict[int, int] = {}
        atexit.register(self.stop)

    def start(
        self, script: str, *arguments: str | Path, streams: tuple[int, int, int], environment: Mapping[str, str] = {},
        has_pack: bool = False,
    ) -> int:  # fmt: skip
        """Run a script of this folder; its process id. Streams: its standard input, output and error. has_pack: whether
        it finds the pack loaded."""
        request = {"script": script, "arguments": list(map(str, arguments)), "environment": dict(environment)}
        request["has_pack"] = has_pack
        self._socket.settimeout(120)
        socket.send_fds(self._socket, [json.dumps(request).encode()], list(streams))
        while "started" not in (answer := self._read()):
            pass
        return answer["started"]

    def wait(self, pid: int, timeout: float) -> int:
        """The exit code of a script; one that takes longer is killed."""
        self._socket.settimeout(timeout)
        try:
            while pid not in self._codes:
                self._read()
        except TimeoutError:
            os.killpg(pid, signal.SIGKILL)
            raise
        return self._codes.pop(pid)

    def _read(self) -> dict[str, int]:
        line = self._answers.readline()
        assert line, "the process that has imported ComfyUI has ended"
        answer: dict[str, int] = json.loads(line)
        if "ended" in answer:
            self._codes[answer["ended"]] = answer["code"]
        return answer

    def stop(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(timeout=60)


@functools.cache
def fork_host(comfyui: Path) -> ForkHost:
    return ForkHost(comfyui)


def run_script(
    name: str, comfyui: Path, *arguments: str | Path, timeout: float = 400, has_pack: bool = False
) -> subprocess.CompletedProcess[str]:
    host = fork_host(comfyui)
    with open(os.devnull) as nothing, tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as log:
        streams = nothing.fileno(), printed.fileno(), log.fileno()
        code = host.wait(host.start(name, comfyui, *arguments, streams=streams, has_pack=has_pack), timeout)
        return subprocess.CompletedProcess(name, code, _text(printed), _text(log))


def run_worker(name: str, comfyui: Path, *arguments: str | Path, timeout: float = 400) -> list[dict[str, Any]]:
    """The lines of JSON that such a script prints, each an object; the test fails where the script does."""
    done = run_script(name, comfyui, *arguments, timeout=timeout, has_pack=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]


def case_tests(
    script: str, always: Iterable[str] = (), long: Iterable[str] = (), timeout: float = 400
) -> Callable[..., None]:
    """A test for each case of a script (see cases.py), beside those of @case these; all run in one process."""
    found = re.findall(r"^@(long_)?case\ndef (\w+)", (HERE / script).read_text(encoding="utf-8"), re.MULTILINE)
    is_long = {name: bool(mark) for mark, name in found} | dict.fromkeys(always, False) | dict.fromkeys(long, True)
    marked = [pytest.param(name, marks=[pytest.mark.long] * is_long[name]) for name in is_long]
    faults: dict[str, str] = {}

    @pytest.mark.comfy
    @pytest.mark.parametrize("name", marked)
    def test_case(
        name: str, request: pytest.FixtureRequest, comfyui: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        if not faults:
            names = names_that_run(request)
            faults.update(dict.fromkeys(names, "the process ended before it"))
            lines = run_worker(script, comfyui, tmp_path_factory.mktemp("cases"), *names, timeout=timeout)
            faults.update({each["name"]: each["fault"] for each in lines})
        assert not faults[name], faults[name]

    return test_case


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
