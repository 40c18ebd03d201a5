"""Several machines, as several torchruns on one: who encodes captions and latents."""

import contextlib
import dataclasses
import sys

import pytest
from devicebridge.config.job import save_job
from devicebridge.tests.ranks.launching import HERE, start_machines
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.loop import checkpoint_folder
from devicebridge.training.state import list_checkpoints

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs gloo over a loopback device"),
    pytest.mark.long,  # short ones are in test_rank_jobs.py
]


def _files(folder, name, *, steps=4, caches=2, **sections):
    """A job, and its file on each of two machines, with a cache folder of its own or the same one."""
    train = {"steps": steps, "batch_size": 1, "gradient_accumulation_steps": 2}
    output = {"folder": str(folder / name), "save_every_steps": 2}
    job = make_tiny_job(folder, "wan", train=train, output=output, evaluation={"folder": ""}, **sections)
    files = [folder / f"{name}-{index}.toml" for index in range(2)]
    for index, file in enumerate(files):
        cache = dataclasses.replace(job.cache, folder=str(folder / f"{name}-cache-{index % caches}"))
        save_job(dataclasses.replace(job, cache=cache), file)
    return job, files


@contextlib.contextmanager
def _running(files, fault):
    started = start_machines(HERE / "faulty_rank.py", files, environment={"FAULT": fault})
    try:
        yield started
    finally:
        for each in started:
            each.kill()
            each.stdout.close()
            each.wait()


def _ended(started):
    """What each printed, when all have ended."""
    return [each.communicate(timeout=200)[0] for each in started]


def _entries(folder, name):
    kept = [folder / f"{name}-cache-{index}" for index in range(2)]
    return [{path.name: path.read_bytes() for path in each.glob("??/*")} for each in kept]


@pytest.mark.parametrize("caches", [1, 2])
def test_machines_share_the_work_where_they_share_a_folder(caches, tmp_path):
    job, files = _files(tmp_path, "once", caches=caches)
    with _running(files, "loads 0 0") as started:
        outputs = _ended(started)
    assert [each.returncode for each in started] == [0, 0], outputs
    loads = [output.count("is loaded, says the test") for output in outputs]
    first, other = _entries(tmp_path, "once")
    assert len(first) > 10 and list_checkpoints(checkpoint_folder(job))
    if caches == 2:
        assert loads == [2, 2] and other == first
    else:
        assert sum(output.count("1 caption is encoded") for output in outputs) == 6  # five captions and the empty one
        assert not other
