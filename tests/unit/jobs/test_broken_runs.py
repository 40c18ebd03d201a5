"""What breaks in the middle of a run: what is done is saved first, and the message says what, where and what helps."""

import dataclasses
import errno
import gc
import itertools
import math
import os
import re

import pytest
import torch
from devicebridge.encoding.store import CacheStore
from devicebridge.jobs.encode_job import CACHE_PARTS, cache_entries, prune_caches
from devicebridge.jobs.job import check_job, run_job
from devicebridge.system import files
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training import loop as loop_module
from devicebridge.training import objective as objective_module
from devicebridge.training.state import list_checkpoints
from PIL import Image
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.usefixtures("short_texts")

SAVED_AT_THE_END = {"save_every_steps": 0}

PARTS = CACHE_PARTS[:2]  # such jobs have no conditions


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return run_job(_job(folder)).lora_path.read_bytes()


def _job(folder, **sections):
    sections = {"evaluation": {"folder": ""}, "lora": {"dropout": 0.2}, "output": SAVED_AT_THE_END, **sections}
    return make_tiny_job(folder, **sections)


def _after_step(number, act):
    def listen(event):
        if event.kind == "step" and event.step == number:
            act()

    return listen


def _raise(error):
    raise error


def _after_call(number, monkeypatch, owner, name, act):
    ordinary, calls = getattr(owner, name), itertools.count(1)

    def call(own):
        ordinary(own)
        if next(calls) == number:
            act(own)

    monkeypatch.setattr(owner, name, call)


def _fall_off(own):
    raise RuntimeError("the card fell off")


def _saved(tmp_path):
    return [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]


@pytest.mark.parametrize(
    "error", [RuntimeError("the card fell off"), KeyError("ours")], ids=lambda error: type(error).__name__
)
def test_what_is_done_is_saved_whatever_breaks_and_the_run_goes_on_bit_for_bit(error, straight, tmp_path, caplog):
    job = _job(tmp_path)
    expected = KeyError if isinstance(error, KeyError) else RuntimeError
    with pytest.raises(expected) as caught:
        run_job(job, on_event=_after_step(3, lambda: _raise(error)))
    said = caplog.text + str(caught.value)
    assert f"The steps done are saved in {tmp_path}/run/checkpoints/step-000003. The same job" in said
    assert run_job(job, resume=True).lora_path.read_bytes() == straight


def test_a_step_that_breaks_half_way_is_done_anew(straight, tmp_path, monkeypatch):
    """Its batch was taken and dropout was drawn; the checkpoint stands where it began."""
    job = _job(tmp_path)
    _after_call(4, monkeypatch, torch.Tensor, "backward", _fall_off)
    with pytest.raises(RuntimeError, match="fell off\nThe steps done are saved in .*step-000003"):
        run_job(job)
    assert run_job(job, resume=True).lora_path.read_bytes() == straight


def test_a_step_of_which_half_the_weights_are_changed_is_not_saved(tmp_path, monkeypatch):
    job = _job(tmp_path, output={"save_every_steps": 2})
    _after_call(4, monkeypatch, torch.optim.AdamW, "step", _fall_off)
    with pytest.raises(RuntimeError, match=r"saved in .*step-000002; steps 3 to 3 are not\. The same job goes on"):
        run_job(job)
    assert _saved(tmp_path) == ["step-000002"]


def test_a_run_that_breaks_before_its_first_step_says_that_nothing_is_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module.Trainer, "train_step", lambda self, rate: _raise(RuntimeError("no card")))
    with pytest.raises(RuntimeError, match="no card\nNo step was done yet"):
        run_job(_job(tmp_path))


def _entries(job):
    plan = check_job(job, is_to_train=False)
    return {part: list(cache_entries(plan, part)) for part in CACHE_PARTS}


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("deleted", "latents"), ("damaged", "captions"), pytest.param("deleted", "captions", marks=pytest.mark.long),
        pytest.param("damaged", "latents", marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_cache_entries_that_go_in_the_middle_of_a_run_are_computed_again(how, part, straight, tmp_path, caplog):
    job = _job(tmp_path)

    def spoil():
        for key in _entries(job)[part]:
            path = CacheStore(job.cache.folder).path(key)
            path.write_bytes(path.read_bytes()[:-1] + b"x") if how == "damaged" else path.unlink()

    result = run_job(job, on_event=_after_step(2, spoil))
    assert "was deleted or damaged since this run began; it is computed again" in caplog.text
    assert result.lora_path.read_bytes() == straight


def test_an_entry_that_cannot_be_computed_again_ends_the_run_after_saving(straight, tmp_path, monkeypatch):
    job = _job(tmp_path)

    def spoil():
        for key in _entries(job)["latents"]:
            CacheStore(job.cache.folder).path(key).unlink()
        monkeypatch.setattr("devicebridge.encoding.sources.load_vae", lambda *args: _raise(RuntimeError("no room")))

    step = "step-00000[23]"  # a batch was read ahead
    message = rf"cache entry .*\.safetensors of .*image_\d\.png was deleted .*computed again now: no room\n.*{step}"
    with monkeypatch.context(), pytest.raises(RuntimeError, match=message):
        run_job(job, on_event=_after_step(2, spoil))
    monkeypatch.undo()
    assert run_job(job, resume=True).lora_path.read_bytes() == straight


def _other_job(job, folder):
    folder.mkdir()
    return _job(folder, cache={"folder": job.cache.folder, "dtype": "bfloat16"})


def test_pruning_spares_all_while_a_run_lives_and_takes_it_when_it_has_ended(tmp_path):
    job = _job(tmp_path)
    other = _other_job(job, tmp_path / "other")
    pruned = []

    def prune():
        CacheStore(job.cache.folder).put("ff" * 32, {"x": torch.ones(1)})  # which nobody needs
        pruned.append(prune_caches({"other": check_job(other, is_to_train=False)}, CACHE_PARTS)[0])

    run_job(job, on_event=_after_step(2, prune))
    num_entries = sum(map(len, _entries(job).values()))
    assert "\n0 entries deleted" in pruned[0] and f"and {num_entries + 1} that a run under way may need" in pruned[0]
    prune()
    assert f"\n{num_entries + 1} entries deleted" in pruned[1] and "under way" not in pruned[1]
    assert not (CacheStore(job.cache.folder).folder / ".runs").exists()


def test_pruning_removes_what_a_killed_run_has_left(tmp_path):
    job = _job(tmp_path)
    run_job(job)
    other = _other_job(job, tmp_path / "other")
    plans = {"other": check_job(other, is_to_train=False)}
    folder = CacheStore(job.cache.folder).folder / ".runs"  # of a run that was killed
    folder.mkdir()
    (folder / "x.lock").touch()
    assert "\n0 entries" not in prune_caches(plans, CACHE_PARTS)[0] and not list(folder.iterdir())


@pytest.mark.parametrize("part", PARTS)
def test_samples_that_are_not_finite_are_named_and_no_other_learning_rate_is_advised(part, tmp_path):
    job = _job(tmp_path)
    run_job(dataclasses.replace(job, output=dataclasses.replace(job.output, folder=str(tmp_path / "first"))))
    store = CacheStore(job.cache.folder)

    def spoil():
        for key in _entries(job)[part]:
            entry = store.get(key)
            store.put(key, {name: torch.full_like(tensor, math.nan) for name, tensor in entry.items()})

    what = {"captions": "caption", "latents": "latents"}[part]
    message = rf"step [34] gave a loss of nan.*the {what} of .*image_\d\.png \("
    with pytest.raises(RuntimeError, match=message) as caught:
        run_job(job, on_event=_after_step(2, spoil))  # when a batch was read ahead
    assert "learning_rate" not in str(caught.value) and re.search(r"step-00000[23]\. The same job", str(caught.value))


def _to_infinity(loss):
    for tensor in gc.get_objects():
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            tensor.grad.fill_(math.inf)


@pytest.mark.parametrize("is_gradient", [False, True])
def test_a_step_that_is_not_finite_names_its_samples_and_saves_those_before(tmp_path, monkeypatch, is_gradient):
    ordinary, calls = objective_module.prediction_loss, itertools.count(1)
    if is_gradient:
        _after_call(3, monkeypatch, torch.Tensor, "backward", _to_infinity)
    else:
        spoil = lambda *given: ordinary(*given) * (math.inf if next(calls) == 3 else 1)  # noqa: E731
        monkeypatch.setattr(objective_module, "prediction_loss", spoil)
    message = r"step 3 gave .*samples are finite: .*image_\d\.png, .*lower optimizer\.learning_rate.*\n.*step-000002\."
    with pytest.raises(RuntimeError, match=message):
        run_job(_job(tmp_path))
    assert _saved(tmp_path) == ["step-000002"]
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "adapter.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_a_mask_that_is_deleted_in_the_middle_of_a_run_is_named_after_saving(tmp_path):
    _job(tmp_path)
    masks = [tmp_path / "data" / f"{path.stem}_mask.png" for path in (tmp_path / "data").glob("*.png")]
    for mask in masks:
        with Image.open(mask.with_name(mask.name.replace("_mask", ""))) as image:
            size = image.size
        Image.new("L", size, 200).save(mask)
    job = _job(tmp_path)
    with pytest.raises(RuntimeError, match=r"_mask\.png: cannot be read as a mask.*\n.*saved in .*step-000002\."):
        run_job(job, on_event=_after_step(2, lambda: [mask.unlink() for mask in masks]))


@pytest.mark.parametrize(
    ("file", "number", "message"),
    [
        ("state.json", 2, r"step-000004 cannot be written: No space left on device; make room there and resume"),
        ("lora.safetensors", 4, r"run/lora\.safetensors cannot be written: No space left.*make room there"),
    ],
)
def test_a_full_disk_is_told_with_the_file_and_what_helps(file, number, message, straight, tmp_path, monkeypatch):
    job, calls = _job(tmp_path, output={"save_every_steps": 2}), []
    replace = os.replace

    def refuse(source, target):
        if target.name == file:
            calls.append(target)
            if len(calls) == number:
                raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises((RuntimeError, OSError), match=message) as caught:
        run_job(job)
    monkeypatch.undo()
    if file == "state.json":
        assert "saved in" in str(caught.value) and "step-000002; steps 3 to 4 are not" in str(caught.value)
        assert _saved(tmp_path) == ["step-000002"]
    assert not [path for path in (tmp_path / "run").rglob("*.tmp") if path.exists()]
    assert run_job(job, resume=True).lora_path.read_bytes() == straight


def _spoil_weights(value):
    def spoil(optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.fill_(value)

    return spoil


@pytest.mark.parametrize(("steps", "value"), [(1, math.nan), pytest.param(4, math.inf, marks=pytest.mark.long)])
def test_weights_that_are_not_finite_are_never_saved(steps, value, tmp_path, monkeypatch):
    """In the last step, where no loss shows it, and in another."""
    job = _job(tmp_path, train={"steps": steps, "batch_size": 2, "seed": 3}, output={"save_every_steps": 2})
    _after_call(min(steps, 3), monkeypatch, torch.optim.AdamW, "step", _spoil_weights(value))
    with pytest.raises(RuntimeError, match=f"after step {min(steps, 3)} the LoRA's weights are not finite as float32"):
        run_job(job)
    assert _saved(tmp_path) == ([] if steps == 1 else ["step-000002"])
    assert not (tmp_path / "run" / "lora.safetensors").exists()


def test_weights_beyond_the_type_of_the_file_are_refused_and_another_type_is_written_on_resume(tmp_path, monkeypatch):
    job = _job(tmp_path, train={"steps": 1, "batch_size": 2, "seed": 3}, output={"lora_dtype": "float16"})
    monkeypatch.setattr(torch.optim.AdamW, "step", _spoil_weights(1e5))
    with pytest.raises(RuntimeError, match=r"lora\.safetensors is not written: .* not finite as float16.*lora_dtype"):
        run_job(job)
    assert not (tmp_path / "run" / "lora.safetensors").exists()
    wider = dataclasses.replace(job, output=dataclasses.replace(job.output, lora_dtype="float32"))
    found = load_file(run_job(wider, resume=True).lora_path)
    assert all(torch.isfinite(tensor).all() for tensor in found.values())


def test_a_lora_that_changes_nothing_is_not_called_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda optimizer: None)
    with pytest.raises(RuntimeError, match=r"after 6 steps the LoRA changes nothing, for lora_B.weight is zero"):
        run_job(_job(tmp_path))
