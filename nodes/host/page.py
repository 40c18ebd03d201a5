"""What ComfyUI's own page asks this pack for, below /devicebridge/, and what it receives once a second."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths

from ...config.job import JobConfig
from ...parallel.devices import describe_cards
from ...runs.api import PREFIX, Answer, Api, Host, News
from ...runs.datasets import FREE_ROUTES
from ...runs.guard import MOST_BODY, Refused, check_origin
from ...runs.queue import Held, JobQueue, explain
from ...runs.store import RunStore
from .folders import allowed_hosts, memory_folder, own_dataset, own_datasets, refuse_job, refuse_uploads_to, runs_folder

if TYPE_CHECKING:
    from aiohttp import web

_log = logging.getLogger(__name__)
_EVERY_S = 1.0
_CARDS_EVERY = 2  # turns
_MESSAGE = "devicebridge.page"
_lock = threading.Lock()  # of the store: requests come in several threads
_drawing = ThreadPoolExecutor(4, "devicebridge-pictures")  # so that pictures keep no other request waiting
_listeners: weakref.WeakSet[web.StreamResponse] = weakref.WeakSet()  # websockets of pages that may receive what is new


def add_page() -> None:
    """Add the routes to ComfyUI's server and start the thread; to be called before the server starts."""
    from server import PromptServer

    queue, loras = background_queue(), lambda: Path(folder_paths.get_folder_paths("loras")[0])
    api = Api(queue.store, queue, Host(loras, describe_cards, _free, own_datasets, own_dataset, cards_of, _names))
    if any((left := runs_folder() / ".jobs").glob("*.json")):  # where browsers can write
        _log.warning("the jobs in %s, a queue of an earlier version, are not started; queue them again", left)

    async def handle(request: web.Request) -> web.StreamResponse:
        body = bytearray()
        while request.method == "POST" and len(body) <= MOST_BODY and (chunk := await request.content.readany()):
            body += chunk  # as far as it takes to see that it is too long
        name, sent = request.match_info["name"], bytes(body[: MOST_BODY + 1])

        def answer() -> Answer:
            with nullcontext() if name in FREE_ROUTES else _lock:
                return api.answer(request.method, name, request.query_string, request.headers, sent)

        pool = _drawing if name == "picture" else None
        return _to_response(await asyncio.get_running_loop().run_in_executor(pool, answer))

    PromptServer.instance.app.on_response_prepare.append(_note_listener)
    for add in (PromptServer.instance.routes.get, PromptServer.instance.routes.post):
        add(f"{PREFIX}{{name}}")(handle)
    threading.Thread(target=_tell, args=(News(queue.store, queue),), name="devicebridge-page", daemon=True).start()


def background_queue() -> JobQueue:
    """The queue of trainings in processes of their own."""

    def check(job: JobConfig) -> None:
        refuse_uploads_to(memory_folder())
        refuse_job(job)

    return JobQueue(RunStore(runs_folder()), memory_folder(), check, _held_by_models)


def seen_queue() -> JobQueue:
    """The same queue for whoever starts nothing."""
    return JobQueue(RunStore(runs_folder()), memory_folder())


def cards_of(job: JobConfig) -> tuple[str, ...]:
    """Every device that the job will use, by name."""
    from ...jobs.job import used_devices
    from ...jobs.resolve import find_machine

    return used_devices(job, find_machine(job.split.devices).devices)


def refuse_cards_of_others(job: JobConfig) -> None:
    """Raises: RuntimeError if a training in the background, or another ComfyUI's, uses one of the job's cards."""
    if why := explain(cards_of(job), seen_queue().held()):
        raise RuntimeError(why)


def _to_response(answer: Answer) -> web.StreamResponse:
    from aiohttp import web

    headers = {"X-Content-Type-Options": "nosniff"}
    if answer.body:
        headers["Cache-Control"] = "private, max-age=3600"
        return web.Response(body=answer.body, content_type=answer.kind, headers=headers)
    if answer.file is None:
        return web.json_response(answer.values, status=answer.status, headers={**headers, "Cache-Control": "no-store"})
    headers["Content-Type"] = answer.kind
    if answer.is_saved:
        name = "".join(each if each.isalnum() or each in "-_." else "_" for each in answer.file.name)
        headers["Content-Disposition"] = f'attachment; filename="{name.encode("ascii", "replace").decode()}"'
    return web.FileResponse(answer.file, headers=headers)


async def _note_listener(request: web.Request, response: web.StreamResponse) -> None:
    """Only a page that may ask receives news: ComfyUI opens a websocket to anybody."""
    from aiohttp import web

    if isinstance(response, web.WebSocketResponse):
        with suppress(Refused):
            check_origin(request.headers, _names)
            _listeners.add(response)


def _tell(news: News) -> None:
    """To the end of the process: look after the queue, and send what is new to whoever has a page open."""
    from server import PromptServer

    server, pause, turn = PromptServer.instance, threading.Event(), 0
    while not pause.wait(_EVERY_S):
        turn += 1
        try:
            with _lock:
                found = news.gather()
            listening = [each for each, line in list(server.sockets.items()) if line in _listeners]
            has_work = news.is_busy or server.prompt_queue.get_tasks_remaining() > 0
            if turn % _CARDS_EVERY == 0 and listening and has_work:
                found["cards"] = describe_cards()
            for each in listening if found else ():
                server.send_sync(_MESSAGE, found, each)
        except Exception:
            _log.exception("the page is not told what is new")
            pause.wait(30 * _EVERY_S)


def _names() -> set[str]:
    """Names of this machine, those that ComfyUI listens on, and those that the user allows."""
    from comfy.cli_args import args

    own, listens = socket.gethostname(), str(vars(args).get("listen", "")).split(",")
    first = own.partition(".")[0]
    return {each.lower() for each in (own, first, f"{first}.local", *listens, *allowed_hosts())}


def _held_by_models() -> Held:
    import comfy.model_management as management

    sizes = Counter[str]()
    for loaded in list(management.current_loaded_models):
        if loaded.model is not None and not management.is_device_cpu(loaded.device):
            sizes[f"{loaded.device.type}:{loaded.device.index or 0}"] += loaded.model_loaded_memory()
    return {card: f"ComfyUI holds models of {size / 1e9:.1f} GB on" for card, size in sizes.items() if size}


def _free() -> None:
    """Ask for what ComfyUI's own button does: it takes its models out when no workflow runs."""
    from server import PromptServer

    for flag in ("unload_models", "free_memory"):
        PromptServer.instance.prompt_queue.set_flag(flag, True)
