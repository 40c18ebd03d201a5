"""What the page in ComfyUI asks for, and the answers. Knows nothing of the web server that carries both. Names in a
request are looked for among what is there (store.py). Every answer is JSON, or a file of a run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..config.job import JobConfig, job_to_dict, make_job, paths_of
from ..system.files import write_atomically
from ..system.locks import alone
from ..system.stopping import REQUESTS
from .datasets import dataset_routes
from .guard import Answer as Answer
from .guard import Refused, check_origin, choice_of, read_body, step_of, text_of
from .queue import JobQueue
from .store import SETTINGS, Busy, NotThere, RunStore, run_name

_log = logging.getLogger(__name__)
PREFIX = "/devicebridge/"
_WAIT_S = 10.0  # for another that copies to the same name
_NAMING = ("name", "trigger_word", "images")  # what a node says
_KINDS = {".png": "image/png", ".webp": "image/webp", ".jpg": "image/jpeg", ".mp4": "video/mp4"}


@dataclass(frozen=True)
class Host:
    """What the page needs of the program around it. loras: folder of the LoRAs that its nodes offer.
    cards, free: memory and more of every card, plain values; take the program's models out of them.
    datasets, dataset: names of the folders that datasets may be in; the folder of a name, which lies in a folder of the
    program's own, with all that it holds, or with the one file that is named. Raises: ValueError.
    cards_of: every device that a job will use. Raises: ValueError.
    names: under which the program is meant to be reached; see guard.py."""

    loras: Callable[[], Path]
    cards: Callable[[], list[dict[str, Any]]]
    free: Callable[[], None]
    datasets: Callable[[], list[str]]
    dataset: Callable[[str, str], Path]
    cards_of: Callable[[JobConfig], tuple[str, ...]]
    names: Callable[[], Collection[str]] = tuple


class Api:
    """Answers requests for one store of runs, and for folders of images. For the former in one thread at a time."""

    def __init__(self, store: RunStore, queue: JobQueue, host: Host) -> None:
        self._store, self._queue, self._host = store, queue, host
        self.routes: dict[tuple[str, str], Callable[[dict[str, Any]], Answer]] = {
            ("GET", "state"): lambda values: Answer(values=self.state()),
            ("GET", "run"): lambda values: Answer(values=self._store.details(text_of(values, "run"))),
            ("GET", "name"): lambda given: Answer(values={"name": run_name(*(given.get(key, "") for key in _NAMING))}),
            ("GET", "sample"): self._sample,
            ("GET", "lora"): self._lora,
            ("POST", "ask"): self._ask,
            ("POST", "resume"): self._resume,
            ("POST", "use"): self._use,
            ("POST", "delete"): self._delete,
            ("POST", "queue"): self._change_queue,
            ("POST", "free"): self._free,
            **dataset_routes(host.datasets, host.dataset),
        }

    def answer(self, method: str, name: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Never raises: whatever is wrong with a request is an answer of its own."""
        try:
            check_origin(headers, self._host.names)
            handler = self.routes.get((method, name))
            if handler is None:
                raise Refused(404, "there is nothing of this name")
            return handler(_read_query(query) if method == "GET" else read_body(headers.get("Content-Type", ""), body))
        except (Refused, NotThere, Busy) as error:
            return Answer(error.status, {"error": str(error)})
        except (ValueError, OSError) as error:
            _log.warning("%s: %s", name, error)
            return Answer(400 if isinstance(error, ValueError) else 500, {"error": str(error)})

    def state(self) -> dict[str, Any]:
        runs = [self._store.summary(run) for run in self._store.shown()]
        return {"runs": runs, "jobs": self._queue.describe(), "cards": self._host.cards()}

    def _sample(self, values: dict[str, Any]) -> Answer:
        file = self._store.sample(text_of(values, "run"), text_of(values, "file"))
        return Answer(file=file, kind=_KINDS[file.suffix])

    def _lora(self, values: dict[str, Any]) -> Answer:
        given = values.get("step", "")
        if given != "last" and not (given.isascii() and given.isdecimal() and len(given) < 13):
            raise Refused(400, "step should be a whole number, or last")
        file = self._store.lora(text_of(values, "run"), None if given == "last" else int(given))
        return Answer(file=file, kind="application/octet-stream", is_saved=True)

    def _ask(self, values: dict[str, Any]) -> Answer:
        what = choice_of(values, "what", REQUESTS)
        self._queue.ask(text_of(values, "run"), what)
        return Answer(values={"asked": what})

    def _resume(self, values: dict[str, Any]) -> Answer:
        """Of a run that this program did not start as its record says, the paths are shown first: who can send a file
        may have made that record. The request that repeats the digest starts it, with SETTINGS that it gives."""
        run = text_of(values, "run")
        folder, record = self._store.find(run), self._store.record(run)
        kept = self._queue.kept.find(folder)
        job = make_job(record.job) if record is not None and record.job else kept
        if job is None:
            raise Busy("this run was made before runs kept their job; resume it where it was started")
        if Path(job.output.folder).resolve() != folder.resolve():
            raise Busy("this run was moved since; resume it with its job file")
        if kept is not None and _without_encoders(job) == _without_encoders(kept):
            job = kept
        elif values.get("confirm") != (
            digest := hashlib.sha256(json.dumps(job_to_dict(job), sort_keys=True).encode()).hexdigest()
        ):
            self._queue.check(job)
            return Answer(values={"confirm": digest, "paths": [f"{key}: {path}" for key, path in paths_of(job)]})
        changed, given = job_to_dict(job), [key.split(".") for key in SETTINGS if key in values]
        for section, name in given:
            changed[section][name] = values[f"{section}.{name}"]
        job = make_job(changed) if given else job
        queued = self._queue.add(job, self._host.cards_of(job), is_resumed="continue" if given else True)
        self._queue.tick()
        return Answer(values={"job": queued.id})

    def _use(self, values: dict[str, Any]) -> Answer:
        run, step = text_of(values, "run"), step_of(values, may_be_last=True)
        source = self._store.lora(run, step)
        name = run.replace("/", "_") + ("" if step is None else f"_step_{step:06d}") + ".safetensors"
        target, data = self._host.loras() / name, source.read_bytes()
        with alone(target.with_name(f".{name}.lock"), _WAIT_S) as is_alone:
            if not is_alone or target.is_symlink() or (target.exists() and target.read_bytes() != data):
                raise Busy(f"another {name} is among the LoRAs; rename or remove it first")
            write_atomically(target, data)
        return Answer(values={"name": name})

    def _delete(self, values: dict[str, Any]) -> Answer:
        step = step_of(values)
        if values.get("confirm") is not True:
            raise Refused(400, "confirm should be true")
        self._store.delete_checkpoint(text_of(values, "run"), step)
        return Answer(values={"deleted": step})

    def _change_queue(self, values: dict[str, Any]) -> Answer:
        job, what = text_of(values, "job"), choice_of(values, "what", ("earlier", "later", "remove"))
        if what == "remove":
            self._queue.remove(job)
        else:
            self._queue.move(job, is_earlier=what == "earlier")
        return Answer(values={"jobs": self._queue.describe()})

    def _free(self, values: dict[str, Any]) -> Answer:
        self._host.free()
        return Answer(values={"asked": "free"})


def _without_encoders(job: JobConfig) -> dict[str, Any]:
    """What a record and the job that was started agree on: the record also names the encoders that were found."""
    return {name: section for name, section in job_to_dict(job).items() if name != "cache"}


def _read_query(query: str) -> dict[str, Any]:
    """Raises: Refused for more than a few short values."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError as error:
        raise Refused(400, "the address cannot be read") from error
    if len(query) > 8000 or len(dict(pairs)) != len(pairs):
        raise Refused(400, "the address cannot be read")
    return dict(pairs)


# ---- what has changed since the last look: for pages that are open, so that none needs to ask again and again


_MOST_POINTS = 500  # in one message; a page that gets more asks for the run again


@dataclass
class News:
    """Gathers once a second; looks at running trainings, and at others only as they end or appear."""

    store: RunStore
    queue: JobQueue
    is_busy: bool = False  # a training runs
    _known: dict[str, tuple[str, int, int, int]] = field(default_factory=dict)  # state, last step and evaluation, files
    _jobs: list[dict[str, Any]] = field(default_factory=list)

    def gather(self) -> dict[str, Any]:
        """Look after the queue, and what is new: {} or {"runs": [...], "jobs": [...], "gone": [...]}."""
        self.queue.tick()
        looked = [self._look(run) for run in self.store.shown()]
        news = [values for values in looked if values is not None]
        self.is_busy = any(state == "running" for state, *_ in self._known.values())
        found: dict[str, Any] = {"runs": news} if news else {}
        if gone := [run for run in self._known if run not in self.store.runs]:
            found["gone"] = gone
            for run in gone:
                del self._known[run]
        jobs = self.queue.describe()
        if jobs != self._jobs:
            self._jobs = found["jobs"] = jobs
        return found

    def _look(self, run: str) -> dict[str, Any] | None:
        record, known = self.store.record(run), self._known.get(run)
        if known is not None and known[0] != "running" and (record is None or record.state == known[0]):
            return None
        is_new = self.store.progress_is_new(run)
        summary, progress = self.store.summary(run), self.store.progress(run)
        last_eval, num_files = int(progress.evals[-1][0]) if progress.evals else -1, self.store.num_files(run)
        self._known[run] = now = (summary["state"], progress.step, last_eval, num_files)
        if known == now and not is_new:
            return None
        if known is None:
            return summary
        _, step, evaluated, files = known
        points = [point for point in progress.steps if point[0] > min(step, progress.step - (progress.step < step))]
        evals = [point for point in progress.evals if point[0] > min(evaluated, last_eval - 1)]
        values = {"points": points, "evals": evals} if len(points) <= _MOST_POINTS else {"is_stale": True}
        return {**summary, **values, "memory": progress.memory, "files_changed": num_files != files}
