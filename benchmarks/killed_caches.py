"""kill -9 at random moments while two processes fill one cache: nothing may be damaged, nothing computed in vain.

Tiny random encoders of FLUX.1 (CLIP and T5, so entries link to others), a small dataset, no GPU. Two processes fill
one folder; at random moments one of them, or both, are killed and replaced, and when the folder is full before there
were enough kills, it is emptied and filled anew. Each process writes down what it begins to encode and what it has
stored. When a folder is full:

    `devicebridge cache --verify` would find every entry whole;
    the files are, byte by byte, those of one process that nobody disturbed;
    what was begun twice was in the hands of a killed process the first time;
    pruning deletes no entry and leaves neither locks nor temporary files behind.

At the end a job trains on the last folder. Needs os.fork, so no Windows.

    python benchmarks/killed_caches.py --kills 20
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_WORKERS = 2
ENCODE_S = 0.02  # what an encoder would at least take; without it most kills would hit the loading
MOMENT_S = (0.05, 0.7)


@dataclass
class Worker:
    """A process that fills the cache, and what it has written down."""

    pid: int
    log: Path
    was_killed: bool = False

    def notes(self) -> list[tuple[str, str]]:
        """("begin" or "stored", what), in order; a line torn by a kill is left out."""
        text = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        lines = text.split("\n")[:-1]
        return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def main() -> None:
    arguments = _read_arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")  # threads do not survive a fork
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    # Progress bars share a lock between processes, and a worker that is killed while it has it keeps it for all others.
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_Trial(Path(folder), arguments.samples, random.Random(arguments.seed)).run(arguments.kills)))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=60, help="images with a caption each")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class _Trial:
    def __init__(self, folder: Path, num_samples: int, chance: random.Random) -> None:
        from devicebridge.jobs.job import check_job
        from devicebridge.tests.tiny_pipeline import make_tiny_job, save_tiny_dataset

        self.folder, self.chance = folder, chance
        make_tiny_job(folder, "flux1")
        save_tiny_dataset(folder / "data", num_images=num_samples)
        self.job = make_tiny_job(folder, "flux1", train={"steps": 2, "batch_size": 2})
        self.plan = check_job(self.job)
        self.cache = Path(self.job.cache.folder)
        self.expected = self._fill_undisturbed()
        self.counts = collections.Counter(kills=0, folders_filled=0, encoded=0, begun_twice=0)

    def run(self, num_kills: int) -> dict[str, Any]:
        from devicebridge.jobs.job import run_job

        while self.counts["kills"] < num_kills:
            shutil.rmtree(self.cache, ignore_errors=True)
            self._check(self._fill_and_kill(num_kills))
        result = run_job(self.job)
        assert result.status == "finished" and result.step == 2, result
        return {**self.counts, "entries_per_folder": len(self.expected), "training": result.status}

    def _fill_undisturbed(self) -> dict[str, bytes]:
        """Also loads every module that a worker needs, before there are any."""
        job = replace(self.job, cache=replace(self.job.cache, folder=str(self.folder / "undisturbed")))
        _fill(replace(self.plan, job=job), self.folder / "events")
        return _files(Path(job.cache.folder))

    def _fill_and_kill(self, num_kills: int) -> list[Worker]:
        """Fill an empty folder, killing as often as that allows; returns all workers there were."""
        workers = [self._start(number) for number in range(NUM_WORKERS)]
        running = list(workers)
        while running:
            if self.counts["kills"] < num_kills:
                time.sleep(self.chance.uniform(*MOMENT_S))
                for worker in self._choose(running):
                    running.remove(worker)
                    if self._kill(worker):
                        running.append(self._start(len(workers)))
                        workers.append(running[-1])
            else:
                worker = running.pop()
                _, status = os.waitpid(worker.pid, 0)
                assert status == 0, f"a worker ended with {status}"
        self.counts["folders_filled"] += 1
        return workers

    def _choose(self, running: list[Worker]) -> list[Worker]:
        return list(running) if self.chance.random() < 0.25 else [self.chance.choice(running)]

    def _kill(self, worker: Worker) -> bool:
        """Whether it was still at work."""
        os.kill(worker.pid, signal.SIGKILL)  # a child that has ended waits as a zombie, so the pid is still its own
        _, status = os.waitpid(worker.pid, 0)
        worker.was_killed = os.WIFSIGNALED(status)
        assert worker.was_killed or status == 0, f"a worker ended with {status}"
        self.counts["kills"] += worker.was_killed
        return worker.was_killed

    def _start(self, number: int) -> Worker:
        log = self.folder / f"log-{self.counts['folders_filled']}-{number}"
        pid = os.fork()
        if pid:
            return Worker(pid, log)
        code = 1
        try:
            _write_down(log)
            _fill(self.plan, self.folder / "events")
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _check(self, workers: list[Worker]) -> None:
        from devicebridge.jobs.encode_job import CACHE_PARTS, prune_caches, verify_cache

        lines, num_unsound = verify_cache(self.plan, CACHE_PARTS)
        assert not num_unsound, lines
        assert _files(self.cache) == self.expected, "the files are not those of an undisturbed run"
        self._check_notes(workers)
        (pruned,) = prune_caches({"job": self.plan}, CACHE_PARTS)
        assert "\n0 entries deleted" in pruned and f"; {len(self.expected)} entries that" in pruned, pruned
        left = [path for path in self.cache.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
        assert not left, f"left behind: {left}"

    def _check_notes(self, workers: list[Worker]) -> None:
        begun: collections.Counter[str] = collections.Counter()
        lost: collections.Counter[str] = collections.Counter()
        for worker in workers:
            notes = worker.notes()
            begun.update(what for kind, what in notes if kind == "begin")
            unfinished = [what for (kind, what) in notes[-1:] if kind == "begin"]
            assert worker.was_killed or not unfinished, f"{worker.log} ended with {unfinished} unfinished"
            lost.update(unfinished)
        again = {what: (count, lost[what]) for what, count in begun.items() if count - lost[what] > 1}
        assert not again, f"computed again although nobody who had it was killed (begun, lost): {again}"
        self.counts["encoded"] += sum(begun.values())
        self.counts["begun_twice"] += sum(count - 1 for count in begun.values())


def _fill(plan: Any, events_folder: Path) -> None:
    from devicebridge.events import EventLog
    from devicebridge.jobs.encode_job import cache_job

    with EventLog(events_folder) as events:
        cache_job(plan, events)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*.safetensors")}


def _write_down(log: Path) -> None:
    """From here on this process notes what it begins to encode and what it has stored."""
    from devicebridge.encoding import sources, text_encoder
    from devicebridge.encoding.store import CacheStore

    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def note(kind: str, what: str) -> None:
        os.write(file, f"{kind} {what}\n".encode())

    def begin(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            note("begin", name(*args))
            time.sleep(ENCODE_S)
            return function(*args)

        return noted

    put = CacheStore.put

    def put_and_note(store: CacheStore, key: str, tensors: Any) -> None:
        put(store, key, tensors)
        note("stored", key)

    CacheStore.put = put_and_note  # type: ignore[method-assign]
    text_encoder._encode = begin(
        text_encoder._encode, lambda encoder, texts: f"{encoder.spec.folder} {' '.join(texts)}"
    )
    sources.read_frames = begin(sources.read_frames, lambda request: f"{request.path}")


if __name__ == "__main__":
    sys.exit(main())
