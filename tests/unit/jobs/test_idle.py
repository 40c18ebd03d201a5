"""Settings that would pass and mean nothing: refused, or named before anything is computed."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from devicebridge.config.job import JobConfig, job_keys, make_job
from devicebridge.data.image import SoundRequest
from devicebridge.data.samples import Sample
from devicebridge.families.spec import Variant
from devicebridge.jobs.checks import _IDLE, _REPEATS, _of_settings, describe_idle, refuse_overlaps, refuse_repeats
from devicebridge.jobs.job import _resolve_and_check, check_job
from devicebridge.jobs.read_job import read_job
from devicebridge.tests.tiny_pipeline import make_tiny_job

VALUES: dict[str, Any] = {
    "data.resolutions": 256, "data.folders.resolutions": 256, "data.frames": 33, "evaluation.quantiles": 0.5,
    "data.folders.references": "/r", "evaluation.references": "/r", "samples.prompts": "a cat",
    "cache.stock_clip": "clip.safetensors",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("data", "held", "model", "run/samples", "vae"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "model" / "a.safetensors").touch()
    return tmp_path


def _job(folder: Path, **values: Any) -> JobConfig:
    made: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "family": "comfyui"},
        "data": {"folders": [{"path": str(folder / "data")}], "condition": "reference"},
        "evaluation": {"folder": str(folder / "held")}, "train": {"steps": 5},
        "output": {"folder": str(folder / "run")}, "cache": {"folder": str(folder / "cache")},
    }  # fmt: skip
    for path, value in values.items():
        *sections, name = path.split("__")
        section = made
        for each in sections:
            inner = section.setdefault(each, {})
            section = inner[0] if isinstance(inner, list) else inner
        section[name] = value
    return make_job(made)


@pytest.mark.parametrize("key", _REPEATS)
def test_a_value_that_a_list_has_twice_is_refused_by_name(key: str, folder: Path) -> None:
    value, path = VALUES[key], key.replace(".", "__")
    refuse_repeats(_job(folder, **{path: [value]}))
    with pytest.raises(ValueError, match=f"^{key} has .* twice"):
        refuse_repeats(_job(folder, **{path: [value, value]}))


def test_a_folder_twice_is_refused_unless_its_settings_differ(folder: Path) -> None:
    one = {"path": str(folder / "data"), "caption": "a cat"}
    refuse_repeats(_job(folder, data__folders=[one, {**one, "resolutions": [256]}]))
    with pytest.raises(ValueError, match=r"data\.folders.*repeats = 2"):
        refuse_repeats(_job(folder, data__folders=[one, one]))


@pytest.mark.parametrize("ours", ["output.folder", "cache.folder", "model.quantized_cache"])
@pytest.mark.parametrize("theirs", ["data", "held", "model"])
@pytest.mark.parametrize("way", ["itself", "a clip", "a link", "a link inside", "with dots"])
def test_what_is_written_lies_in_no_folder_that_is_read(ours: str, theirs: str, way: str, folder: Path) -> None:
    given = folder / theirs
    (given / "x.txt").touch()
    (folder / "link").symlink_to(given)
    place = {
        "itself": given, "a clip": given / "x" / "not there yet", "a link": folder / "link",
        "a link inside": folder / "link" / "x", "with dots": Path(f"{given}/x/../../{theirs}"),
    }[way]  # fmt: skip
    with pytest.raises(ValueError, match=f"^{ours} ") as refused:
        refuse_overlaps(_job(folder, **{ours.replace(".", "__"): str(place)}))
    assert str(given) in str(refused.value)


def test_a_folder_that_is_read_by_a_link_is_what_it_leads_to(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "data")
    with pytest.raises(ValueError, match=r"^cache\.folder .*link"):
        refuse_overlaps(_job(folder, data__folders=[{"path": f"{folder}/link"}], cache__folder=str(folder / "data")))


@pytest.mark.parametrize("ours", ["output.folder", "cache.folder"])
@pytest.mark.parametrize("theirs", ["data", "held"])
def test_a_sub_folder_of_a_dataset_that_is_no_clip_is_not_read(ours: str, theirs: str, folder: Path) -> None:
    """As where other trainers keep latents, or where a folder of ComfyUI's pictures has the runs in it."""
    for place in (folder / theirs / "_latent_cache", folder / theirs / "runs" / "a"):
        refuse_overlaps(_job(folder, **{ours.replace(".", "__"): str(place)}))
    with pytest.raises(ValueError, match=f"^{ours} "):
        refuse_overlaps(
            _job(
                folder,
                data__folders=[{"path": str(folder / "data"), "control": str(folder / "held")}],
                **{ours.replace(".", "__"): str(folder / "held" / "a")},
            )
        )


@pytest.mark.parametrize("theirs", ["data", "held"])
def test_a_sub_folder_that_is_a_concept_is_read(theirs: str, folder: Path) -> None:
    for image in (folder / theirs).glob("*.png"):
        image.unlink()
    (folder / theirs / "10_cat").mkdir()
    (folder / theirs / "10_cat" / "a.png").touch()
    refuse_overlaps(_job(folder, output__folder=str(folder / theirs / "other")))
    with pytest.raises(ValueError, match=r"^output\.folder "):
        refuse_overlaps(_job(folder, output__folder=str(folder / theirs / "10_cat" / "run")))


def test_other_spellings_of_a_folder_are_that_folder_where_the_disk_says_so(folder: Path) -> None:
    if not (folder / "DATA").exists():
        os.symlink(folder / "data", folder / "DATA")  # as a disk without case would have it
    with pytest.raises(ValueError, match=r"^output\.folder "):
        refuse_overlaps(_job(folder, output__folder=str(folder / "DATA")))


def test_a_dataset_is_no_folder_of_the_run_itself(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.folders\.path .*samples"):
        refuse_overlaps(_job(folder, data__folders=[{"path": str(folder / "run" / "samples")}]))
    (folder / "run" / "mine").mkdir()
    refuse_overlaps(_job(folder, data__folders=[{"path": str(folder / "run" / "mine")}]))


@pytest.mark.parametrize("key", ["lora.start_from", "samples.vae", "model.path"])
def test_the_lora_is_not_written_over_a_file_that_is_read(key: str, folder: Path) -> None:
    (folder / "run" / "a.safetensors").touch()
    values = {key.replace(".", "__"): str(folder / "run" / "a.safetensors")}
    refuse_overlaps(_job(folder, **values))
    with pytest.raises(ValueError, match=f"over {key}"):
        refuse_overlaps(_job(folder, **values, output__name="a"))


def test_folders_beside_each_other_are_taken(folder: Path) -> None:
    refuse_overlaps(_job(folder, model__path=f"{folder}/model/a.safetensors", cache__folder=str(folder / "model")))
    refuse_overlaps(_job(folder, model__path="name.safetensors", output__folder=str(folder)))


def test_what_has_no_effect_is_named_with_the_reason(folder: Path) -> None:
    assert not describe_idle(_job(folder))
    for key, value in (("parallel.hang_timeout_s", 60.0), ("train.cuda_graphs", "auto"), ("split.calibrate", "on")):
        assert f"{key} (nothing reads" in describe_idle(_job(folder, **{key.replace(".", "__"): value}))
    tags = {"data__keep_tags": 1}
    assert "data.tag_dropout is 0.0" in describe_idle(_job(folder, **tags))
    assert not describe_idle(_job(folder, **tags, data__tag_dropout=0.1))
    idle = {"schedule__min_factor": 0.5, "samples__width": 64, "cache__text_window_gb": 3, "cache__text_device": "cpu"}
    said = describe_idle(_job(folder, **idle, schedule__warmup_steps=5))
    for key in ("schedule.min_factor", "samples.width", "cache.text_window_gb", "schedule.warmup_steps"):
        assert key in said
    used = {"schedule__name": "cosine", "samples__prompts": ["a"], "cache__text_device": "stream"}
    assert not describe_idle(_job(folder, **(idle | used)))


def test_each_thing_that_is_odd_about_a_rate_is_named(folder: Path) -> None:
    given = {"optimizer__name": "prodigy", "optimizer__learning_rate": 1e-4, "optimizer__options": {"lr": 1.0}}
    ignored, factor = _of_settings(_job(folder, **given), (), Variant("whole", {}, ()))
    assert ignored.startswith("optimizer.options.lr = 1.0 is ignored") and "is a factor of the rate" in factor


def test_a_vae_of_sound_without_any_sound_is_told(folder: Path) -> None:
    job = _job(folder, cache__stock_audio_vae="/a.safetensors")
    sample = Sample("a.mp4", "", None, (2, 2), (0, 0, 2, 2), (2, 2))
    samples = [sample, replace(sample, sound=SoundRequest("a.wav", 0.0, 1.0, 1))]
    for given, is_idle in ((samples[:1], True), (samples, False)):
        found = list(_of_settings(job, given, Variant("whole", {}, ())))
        assert ["cache.stock_audio_vae" in each for each in found] == [True] * is_idle


def test_every_key_of_the_table_is_one(folder: Path) -> None:
    assert {key for keys in _IDLE for key in keys.split()} | set(_REPEATS) <= set(job_keys())


def test_a_run_that_was_begun_goes_on(tmp_path: Path) -> None:
    """With settings that would be refused today."""
    job = make_tiny_job(tmp_path, "flux2", data={"resolutions": [32, 32]}, evaluation={"folder": ""})
    with pytest.raises(ValueError, match=r"data\.resolutions has 32 twice"):
        check_job(job)
    assert _resolve_and_check(read_job(job), None, 1, is_new=False).samples
