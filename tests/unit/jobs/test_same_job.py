"""What machines that train one job must be given alike, and what each of them may have its own way."""

import dataclasses
from pathlib import Path

import pytest
from devicebridge.config.job import STOCK_FILES, job_keys, job_to_dict, make_job, shared_settings
from devicebridge.data.samples import Condition, EncodedSample, Sample
from devicebridge.encoding.store import CacheStore
from devicebridge.jobs.ranks import differing_ranks, order_of
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.batches import CachedSamples

# Of one machine: where files lie, which devices it has, and what each process does by itself.
OWN = {
    "model": {"path": "/elsewhere/model", "quantized_cache": "/elsewhere/kept"},
    "split": {"devices": ["cuda:1", "cuda:0"], "balance": "time", "memory_limit_gb": [20, 14]},
    "parallel": {"processes": 4, "timeout_s": 60.0},
    "cache": {"folder": "/elsewhere/cache", "vae_device": "cuda:1", "text_device": "cpu", "stock_clip": ["/else/a"]},
    "output": {"folder": "/elsewhere/run", "name": "mine", "keep_last": 9},
    "train": {"cuda_graphs": "auto", "offload_activations": "off"},
}


def _changed(job, sections):
    values = job_to_dict(job)
    return make_job({**values, **{name: {**values[name], **section} for name, section in sections.items()}})


def test_machines_may_have_paths_and_devices_of_their_own(tmp_path: Path) -> None:
    job = make_tiny_job(tmp_path)
    moved = dataclasses.replace(job.data.folders[0], path="/elsewhere/data")
    other = _changed(job, OWN | {"data": {"folders": [dataclasses.asdict(moved)]}})
    assert shared_settings(other) == shared_settings(job)


def test_every_setting_that_a_resumed_run_must_keep_is_compared_unless_it_is_a_machines_own(tmp_path: Path) -> None:
    kept = {key.path for key in job_keys().values() if not (key.is_free or key.is_path) and key.section != "split"}
    own = {"cache.vae_device", "data.folders", *STOCK_FILES}
    assert kept - own <= shared_settings(make_tiny_job(tmp_path)).keys()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("evaluation", "folder", ""), ("evaluation", "every_steps", 2), ("output", "save_every_steps", 3),
        ("samples", "prompts", ["a cat"]), ("parallel", "strategy", "fsdp"),
    ],
)  # fmt: skip
def test_what_says_when_ranks_wait_is_compared(section: str, key: str, value: object, tmp_path: Path) -> None:
    job = make_tiny_job(tmp_path)
    found, expected = shared_settings(_changed(job, {section: {key: value}})), shared_settings(job)
    assert [name for name in expected if found[name] != expected[name]] == [f"{section}.{key}"]


def test_a_difference_names_every_kind_once_with_the_first_rank_that_has_it() -> None:
    given = [(f"rank {rank}", {"train.steps": [steps], "model": ["hash"]}) for rank, steps in enumerate((6, 6, 4, 4))]
    assert list(differing_ranks(given)) == ["train.steps: 6 on rank 0, 4 on rank 2"]


def _made_by(folder, samples):
    return CachedSamples(CacheStore(folder), samples, use_masks=True, tokens_per_cell=1)


@pytest.fixture
def samples(tmp_path):
    """Three images, two of them with one caption, the first with a mask and a reference."""
    (tmp_path / "mask.png").write_bytes(b"a mask")
    (tmp_path / "other.png").write_bytes(b"another")
    cut = ((8, 8), (0, 0, 8, 8), (8, 8))
    images = [
        Sample(f"{number}.png", text, None, *cut, latents_key=f"k{number}", text_keys=((text,), ("t0",)))
        for number, text in enumerate(("t1", "t2", "t2"))
    ]
    condition = Condition("reference", ("reference.png",), ((8, 8),))
    mask = str(tmp_path / "mask.png")
    images[0] = dataclasses.replace(images[0], mask_path=mask, condition=condition, text_keys=(("t1", "c0"), ("t0",)))
    return _made_by(tmp_path, images)


@pytest.fixture
def encoded(tmp_path):
    images = [EncodedSample(f"k{number}", ((text,), ()), (8, 8, 77)) for number, text in enumerate(("t1", "t2", "t2"))]
    return _made_by(tmp_path, images)


def _first(**changes):
    return lambda found: dataclasses.replace(
        found, samples=[dataclasses.replace(found.samples[0], **changes), *found.samples[1:]]
    )


def _other_mask(found):
    path = found.samples[0].mask_path.replace("mask", "other")
    return _first(mask_path=path)(found)


OTHERS = {
    "an image fewer": lambda found: dataclasses.replace(found, samples=found.samples[:2]),
    "another order": lambda found: dataclasses.replace(found, samples=[found.samples[n] for n in (1, 0, 2)]),
    "another image": _first(latents_key="k9"),
    "another caption": _first(text_keys=(("t2", "c0"), ("t0",))),
    "another weight of its loss": _first(loss_weight=0.3), "no mask": _first(mask_path=None),
    "another mask": _other_mask, "no reference": _first(condition=None, text_keys=(("t1",), ("t0",))),
    "another reference": _first(text_keys=(("t1", "c1"), ("t0",))),
    "another text encoder": _first(text_keys=(("t9", "c0"), ("t0",))),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_ranks_with_other_samples_are_told_apart(what, samples):
    assert order_of((OTHERS[what](samples), None)) != order_of((samples, None))
    assert order_of((samples, OTHERS[what](samples))) != order_of((samples, samples))  # those held out as well


def test_where_files_lie_is_no_difference(samples, tmp_path):
    mask = tmp_path / "elsewhere.png"
    mask.write_bytes(b"a mask")
    condition = Condition("reference", ("/elsewhere/reference.png",), ((8, 8),))
    moved = [dataclasses.replace(each, path=f"/elsewhere/{each.path}") for each in samples.samples]
    moved[0] = dataclasses.replace(moved[0], mask_path=str(mask), condition=condition)
    there = dataclasses.replace(samples, samples=moved)
    assert order_of((there, None)) == order_of((samples, None))


def test_masks_that_are_not_used_are_no_difference(samples):
    unused = dataclasses.replace(samples, use_masks=False)
    assert order_of((_other_mask(unused), None)) == order_of((unused, None)) != order_of((samples, None))


def test_samples_that_arrived_encoded_are_told_apart(encoded):
    assert order_of((encoded, None)) == order_of((dataclasses.replace(encoded), None))
    for what in ("another order", "another text encoder"):
        assert order_of((OTHERS[what](encoded), None)) != order_of((encoded, None)), what
    assert order_of((_first(alike=(7,))(encoded), None)) != order_of((encoded, None))
