"""For tests of what a request makes the server do: the processes it starts, and what it touches below some folders.

ComfyUI loads this folder as a custom node pack of its own. Python's own audit events tell, so nothing is left out.
"""

import os
import sys
from typing import Any

import folder_paths
from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS: dict[str, Any] = {}
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile")
_told: list[tuple[str, str]] = []
_folders: list[str] = []  # that nothing may be read or written below


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        _told.append((event, repr(arguments)[:2000]))
    elif _folders and (event == "open" or event.startswith(("os.", "shutil."))):
        for each in arguments:
            if isinstance(each, (str, bytes, os.PathLike)) and os.fsdecode(each).startswith(tuple(_folders)):
                _told.append((event, os.fsdecode(each)))


@PromptServer.instance.routes.post("/watching")
async def watch(request: web.Request) -> web.Response:
    """What was told since the last request; from now on of these folders."""
    told, _told[:] = list(_told), []
    _folders[:] = (await request.json())["folders"]
    return web.json_response({"told": told, "memory": folder_paths.get_system_user_directory("devicebridge")})


sys.addaudithook(_hear)
