"""One process with ComfyUI's Python that has imported ComfyUI; runs scripts of this folder, each in a fork of it.

Takes ComfyUI's folder. On standard input, a socket, a request is a line of JSON, {"script", "arguments",
"environment", "has_pack": whether the pack is loaded before the script runs}, with three file descriptors: what is
standard input, output and error of the script. It answers with
{"started": pid}, and when the script has ended with {"ended": pid, "code": exit code}. It ends with the socket.

A script starts in milliseconds and finds torch and ComfyUI as they are after their import; it may change either.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    sys.path[0] = sys.argv[1]  # instead of this folder, whose modules would hide ComfyUI's
    import comfy.cli_args

    comfy.cli_args.args.cpu = True  # ComfyUI looks for a GPU when it is imported
    import comfy.sample
    import comfy.sd

    gc.collect()
    gc.freeze()  # forks leave these objects alone
    assert threading.active_count() == 1, "a fork has the thread alone that forked"
    running: set[int] = set()
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            ready, _, _ = select.select([requests], [], [], 0.02 if running else None)
            if ready:
                data, streams, _, _ = socket.recv_fds(requests, 1 << 20, 3)
                if not data:
                    break
                running.add(pid := _fork(json.loads(data), streams, requests))
                _answer(requests, {"started": pid})
            for pid in sorted(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    running.remove(pid)
                    _answer(requests, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _answer(requests: socket.socket, data: dict[str, int]) -> None:
    requests.sendall(json.dumps(data).encode() + b"\n")


def _fork(request: dict[str, Any], streams: list[int], requests: socket.socket) -> int:
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        return pid
    code = 1
    try:
        requests.close()
        os.setsid()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.update(request["environment"])
        if request["has_pack"]:
            runpy.run_path(str(HERE.parents[1] / "bootstrap.py"))["load_pack"]()
            warnings.simplefilter("ignore")
        script = str(HERE / request["script"])
        sys.argv = [script, *request["arguments"]]
        runpy.run_path(script, run_name="__main__")
        if cases := sys.modules.get("devicebridge.tests.comfy.cases"):
            cases.run_cases()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
