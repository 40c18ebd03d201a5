"""One rank of the tests: runs several jobs one after the other, and the first rank writes how each went.

torchrun ... jobs_worker.py PLAN.json RESULTS.json; the plan is a list of jobs: {"job": file, "resume": bool, "stop":
the step after which the last rank, and no other, is asked to stop, or 0, "compiler": of compiled blocks, "works", which
traces them and generates no code, or "fails", on the last rank alone, "spread": whether each rank is a machine of its
own, with a cache folder of its own, "others": settings of the last rank alone, {section: {key: value}}, "rooms": bytes
that each rank's CPU is taken to have free as a card has, [] for a CPU as it is}.
"""

import contextlib
import dataclasses
import json
import logging
import runpy
import sys
import weakref
from pathlib import Path
from unittest import mock

runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.config.job import job_to_dict, load_job, make_job  # noqa: E402
from devicebridge.encoding.sources import FolderLatents, FolderTexts  # noqa: E402
from devicebridge.jobs import ranks as job_ranks  # noqa: E402
from devicebridge.jobs import resolve  # noqa: E402
from devicebridge.jobs.job import run_job  # noqa: E402
from devicebridge.parallel.devices import CPU, find_devices  # noqa: E402
from devicebridge.parallel.local.bridge import BlockSplit  # noqa: E402
from devicebridge.parallel.ranks import sharded  # noqa: E402
from devicebridge.parallel.ranks.group import RankFailed, Ranks, joined  # noqa: E402
from devicebridge.parallel.ranks.place import find_place, own_devices  # noqa: E402
from devicebridge.patches import compile_blocks  # noqa: E402
from devicebridge.planning.cards import Card  # noqa: E402
from devicebridge.tests.emulated import emulated_cards  # noqa: E402
from devicebridge.tests.tiny_pipeline import short_texts  # noqa: E402
from devicebridge.training.loop import Trainer  # noqa: E402


def run(item, joined_ranks):
    """What the first rank saw of a job."""
    job, place, seen, steps = load_job(item["job"]), joined_ranks.place, [], []
    if place.rank == place.num_ranks - 1:
        values = job_to_dict(job)
        job = make_job({**values, **{name: {**values[name], **given} for name, given in item["others"].items()}})
    is_on_cards = job.split.devices[:1] == ("lazy:0",)
    train_step = Trainer.train_step

    def counted(trainer, rate):
        steps.append(trainer.step)
        return train_step(trainer, rate)

    def should_stop():
        return bool(item["stop"]) and place.rank == place.num_ranks - 1 and len(steps) >= item["stop"]

    with (
        emulated_cards(4) if is_on_cards else contextlib.nullcontext(),
        compiler(item["compiler"], place) as num_graphs,
        loaded_encoders() as loaded,
        rows_read() as read,
        free_on_cards(item["rooms"], place.rank),
        kept_blocks() as kept_here,
        mock.patch.object(resolve, "has_bf16", lambda device: place.rank < place.num_ranks - 1),
    ):
        devices = own_devices(find_devices(job.split.devices), place) if is_on_cards else (CPU,)
        if item["spread"]:
            place = dataclasses.replace(place, local_rank=0, num_local=1)
            cache = dataclasses.replace(job.cache, folder=f"{job.cache.folder}-{place.rank}")
            job = dataclasses.replace(job, cache=cache)
        ranks = Ranks(place, devices, should_stop, joined_ranks._control, joined_ranks.watch)
        Trainer.train_step, kept = counted, Kept()
        logging.getLogger("devicebridge").addHandler(kept)
        try:
            result = run_job(job, resume=item["resume"], on_event=seen.append, should_stop=should_stop, ranks=ranks)
        except (ValueError, RankFailed) as error:
            return {"refused": joined_ranks.gather(str(error))}
        finally:
            Trainer.train_step = train_step
            logging.getLogger("devicebridge").removeHandler(kept)
        graphs = joined_ranks.gather(num_graphs())
    return {
        "graphs": graphs, "loaded": joined_ranks.gather(loaded), "read": joined_ranks.gather(read),
        "kept": joined_ranks.gather(kept_here),
        "forecast": [parts for event in seen for parts in event.values.get("parts", {}).values()], "log": kept.lines,
        "status": result.status, "step": result.step, "losses": result.losses, "before": result.eval_before,
        "after": result.eval_after,
        "placements": [each.values["placement"] for each in seen if "placement" in each.values],
    }  # fmt: skip


class Kept(logging.Handler):
    """Keeps the warnings of the pack."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def loaded_encoders():
    names = []

    def counted(load):
        def and_told(source):
            names.append(source.name)
            return load(source)

        return and_told

    with (
        mock.patch.object(FolderTexts, "load", counted(FolderTexts.load)),
        mock.patch.object(FolderLatents, "load", counted(FolderLatents.load)),
    ):
        yield names


@contextlib.contextmanager
def rows_read():
    """Yields bytes of the weights that this rank reads of shared ones, in all and those in memory at once at most."""
    found, kept, read_rows = {"all": 0, "at_once": 0}, [], sharded.read_rows

    def counted(*arguments):
        rows = read_rows(*arguments)
        kept[:] = [each for each in kept if each() is not None] + [weakref.ref(rows)]
        found["all"] += rows.nbytes
        found["at_once"] = max(found["at_once"], sum(each().nbytes for each in kept))
        return rows

    with mock.patch.object(sharded, "read_rows", counted):
        yield found


@contextlib.contextmanager
def free_on_cards(rooms, rank):
    """Inside, this rank's CPU is planned as a card with so many bytes free."""
    if not rooms:
        yield
        return
    card = Card(CPU, rooms[rank], rooms[rank])
    with mock.patch.object(job_ranks, "cards_of", lambda devices: [card]):
        yield


@contextlib.contextmanager
def kept_blocks():
    """Yields how many blocks keep their activations on this rank, a number per device and model."""
    found, keep = [], BlockSplit.keep_activations

    def noted(split, num_blocks):
        found.extend(num_blocks)
        keep(split, num_blocks)

    with mock.patch.object(BlockSplit, "keep_activations", noted):
        yield found


@contextlib.contextmanager
def compiler(what, place):
    """Inside, torch.compile takes seconds instead of minutes, or fails on the last rank."""

    def fail(graph, inputs):
        raise RuntimeError("no code for this graph, says the test")

    is_broken = what == "fails" and place.rank == place.num_ranks - 1
    real, backend = torch.compile, fail if is_broken else "eager"

    def compile_fast(forward, **options):
        return real(forward, **{**options, "backend": backend})

    with mock.patch.object(torch, "compile", compile_fast):
        before = compile_blocks._count_graphs()
        yield lambda: compile_blocks._count_graphs() - before
    torch._dynamo.reset()


def main(plan, results):
    place = find_place()
    with short_texts(), joined(place, (CPU,), 300.0, lambda: False) as ranks:
        found = [run(item, ranks) for item in json.loads(Path(plan).read_text())]
        if ranks.is_first:
            Path(results).write_text(json.dumps(found))


main(*sys.argv[1:])
