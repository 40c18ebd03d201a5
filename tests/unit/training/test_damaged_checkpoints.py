"""Checkpoints: whole or not there; those that are not what was written are found, and the one before takes over."""

import json
import random
import shutil

import pytest
import torch
from devicebridge.jobs.job import run_job
from devicebridge.jobs.resume import find_state
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training import state as checkpoint_module
from devicebridge.training.optimizer import pack_optimizer, unpack_optimizer
from devicebridge.training.state import (
    DamagedCheckpoint,
    TrainingState,
    list_checkpoints,
    load_checkpoint,
    load_newest,
    save_checkpoint,
)
from safetensors.torch import load_file, save_file
from torch import nn

pytestmark = pytest.mark.usefixtures("short_texts")

NAMES = ("state.json", "adapter.safetensors", "optimizer.safetensors", "random.safetensors")


def _state(step=4, value=0.5):
    return TrainingState(
        step=step, adapter={"a.lora_A.weight": torch.full((2, 3), value), "a.lora_B.weight": torch.ones(3, 2)},
        optimizer=({"state.0.exp_avg": torch.ones(2)}, {"state.0.exp_avg": {"kind": "tensor", "place": "cpu"}}),
        random={"cpu": torch.get_rng_state()}, facts={"config": {"x": "é"}, "losses": [0.1, 0.25, float("nan"), 1e-30]},
    )  # fmt: skip


def _as_version_1(path):
    """As it was written before there were digests."""
    facts = json.loads((path / "state.json").read_text())
    del facts["digest"], facts["files"]
    (path / "state.json").write_text(json.dumps({**facts, "version": 1}))


def _change(path, **values):
    _as_version_1(path)
    facts = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**facts, **values}))


def test_round_trip_and_pruning(tmp_path):
    for step in (5, 10, 15, 15):  # a step that is saved again is replaced
        save_checkpoint(tmp_path, _state(step, value=step), keep_last=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000010", "step-000015"]
    state = load_checkpoint(list_checkpoints(tmp_path)[-1])
    assert state.step == 15 and state.facts["config"] == {"x": "é"} and state.facts["losses"][:2] == [0.1, 0.25]
    assert torch.equal(state.adapter["a.lora_A.weight"], torch.full((2, 3), 15.0))
    assert torch.equal(state.random["cpu"], torch.get_rng_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000015"]  # nothing temporary


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, _state(5), keep_last=2)

    def crash(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr("devicebridge.training.state.write_atomically", crash)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path, _state(10), keep_last=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000005"]
    assert load_checkpoint(tmp_path / "step-000005").step == 5


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_at_any_place_is_found(name, tmp_path):
    path = save_checkpoint(tmp_path, _state(), keep_last=1)
    whole = (path / name).read_bytes()
    draw = random.Random(name)
    for _ in range(150):
        data = bytearray(whole)
        position = draw.randrange(len(data))
        data[position] ^= 1 << draw.randrange(8)
        (path / name).write_bytes(data)
        with pytest.raises(DamagedCheckpoint, match=name):
            load_checkpoint(path)
    (path / name).write_bytes(whole)
    assert load_checkpoint(path).step == 4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["missing", "empty", "short", "long", "other step's"])
def test_a_file_that_is_not_the_one_written_is_found(how, name, tmp_path):
    other = save_checkpoint(tmp_path / "other", _state(5, 0.7), keep_last=1)
    path = save_checkpoint(tmp_path, _state(), keep_last=1)
    torch.rand(1)
    data = (path / name).read_bytes()
    changed = {"empty": b"", "short": data[:-1], "long": data + b" ", "other step's": (other / name).read_bytes()}
    if how == "missing":
        (path / name).unlink()
    elif changed[how] == data:  # random numbers and optimizer may be the same
        return
    else:
        (path / name).write_bytes(changed[how])
    with pytest.raises(DamagedCheckpoint, match=name):
        load_checkpoint(path)


def test_a_checkpoint_of_the_version_before_is_read_and_what_can_be_checked_is(tmp_path):
    path = save_checkpoint(tmp_path, _state(), keep_last=1)
    _as_version_1(path)
    found = load_checkpoint(path)
    assert found.step == 4 and found.facts["config"] == {"x": "é"}
    assert torch.equal(found.adapter["a.lora_B.weight"], torch.ones(3, 2))
    for values, message in (
        ({"step": 5}, r"state\.json is of step 5, and its folder says step-000004"),
        ({"step": None}, "is of step None"),
        ({"optimizer": []}, r"state\.json: optimizer is a list"),
    ):
        _change(save_checkpoint(tmp_path, _state(), keep_last=1), **values)
        with pytest.raises(DamagedCheckpoint, match=message):
            load_checkpoint(path)
    _as_version_1(save_checkpoint(tmp_path, _state(), keep_last=1))
    save_file({"a.lora_A.weight": torch.full((2, 3), torch.nan)}, path / "adapter.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"adapter\.safetensors: a\.lora_A\.weight is not finite"):
        load_checkpoint(path)


@pytest.mark.parametrize("version", [0, 3, "2", None, 1.5])
def test_another_version_is_refused(version, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_module, "_VERSION", version)
    path = save_checkpoint(tmp_path, _state(), keep_last=1)
    with pytest.raises(ValueError, match=rf"state\.json is of version {version!r}.*reads 1 and 2; resume with the"):
        load_checkpoint(path)
    save_checkpoint(tmp_path, _state(3), keep_last=2)
    with pytest.raises(ValueError, match="is of version"):  # nothing is thrown away for that
        load_newest(tmp_path, vars)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"', "{}", '{"version": 2}', '{"version": 1}', "", "\x00"])
def test_a_state_that_is_no_object_of_ours_is_damaged(text, tmp_path):
    path = save_checkpoint(tmp_path, _state(), keep_last=1)
    (path / "state.json").write_text(text)
    with pytest.raises(DamagedCheckpoint, match=r"state\.json"):
        load_checkpoint(path)


def test_a_damaged_newest_is_kept_aside_and_the_one_before_it_taken(tmp_path, caplog):
    for step in (2, 4, 6):
        save_checkpoint(tmp_path, _state(step), keep_last=3)
    for step in (4, 6):
        (tmp_path / f"step-{step:06d}" / "adapter.safetensors").write_bytes(b"")
    assert load_newest(tmp_path, vars).step == 2
    assert "step-000006/adapter.safetensors is damaged" in caplog.text
    assert "Training goes on from" in caplog.text and "repeats the steps after it" in caplog.text
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000002"]
    assert (tmp_path / "damaged-step-000006").is_dir()
    save_checkpoint(tmp_path, _state(4), keep_last=1)  # which must not take a damaged one for the newest
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000004"]


def test_where_none_is_whole_nothing_is_changed_and_all_is_said(tmp_path):
    path = save_checkpoint(tmp_path, _state(), keep_last=1)
    (path / "random.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"random\.safetensors is damaged.*No checkpoint in .* is whole.*start anew"):
        load_newest(tmp_path, vars)
    assert list_checkpoints(tmp_path) == [path] and load_newest(tmp_path / "none", vars) is None


def test_a_checkpoint_goes_under_another_name_so_that_no_half_is_listed(tmp_path, monkeypatch):
    """Killed while the older one is being deleted: what is listed then is whole."""
    save_checkpoint(tmp_path, _state(2), keep_last=1)

    class Killed(BaseException):
        pass

    def kill(path, **options):
        if not options:
            next(path.rglob("adapter.safetensors")).unlink()
            raise Killed

    monkeypatch.setattr(shutil, "rmtree", kill)
    with pytest.raises(Killed):
        save_checkpoint(tmp_path, _state(4), keep_last=1)
    monkeypatch.undo()
    assert [load_checkpoint(path).step for path in list_checkpoints(tmp_path)] == [4]
    save_checkpoint(tmp_path, _state(6), keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000006"]  # swept


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of six steps with checkpoints of the fourth and sixth, and the bytes of its LoRA."""
    folder = tmp_path_factory.mktemp("finished")
    lora = run_job(_job(folder)).lora_path.read_bytes()
    (folder / "run").rename(folder / "kept")
    return folder, lora


def _job(folder, **sections):
    return make_tiny_job(folder, lora={"dropout": 0.2}, evaluation={"folder": ""}, **sections)


@pytest.fixture
def job(finished):
    """That run, in its own folder and as it ended."""
    shutil.rmtree(finished[0] / "run", ignore_errors=True)
    shutil.copytree(finished[0] / "kept", finished[0] / "run")
    return _job(finished[0])


def _last(job):
    return find_state(job, resume=True).path


def test_a_run_of_the_version_before_is_resumed(job, finished):
    shutil.rmtree(_last(job))
    _as_version_1(_last(job))
    assert run_job(job, resume=True).lora_path.read_bytes() == finished[1]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("adapter", lambda key, t: t[:1] if "lora_A" in key else t, r".*is float32 \[1, \d+\], not float32 \[4"),
        ("adapter", lambda key, t: t.double(), r".*is float64"),
        ("optimizer", lambda key, t: t[:1] if key.endswith("exp_avg") else t, r".*exp_avg has shape \[1, \d+\]"),
        ("optimizer", lambda key, t: None, r"state\.0\.\w+ is not of this optimizer"),
        ("random", lambda key, t: t[:7], ""),
    ],
    ids=["one row", "other type", "optimizer: one row", "optimizer: emptied", "random: short"],
)
def test_tensors_of_another_shape_are_not_spread(name, change, message, job):
    """In a checkpoint without digests; one with digests is damaged then."""
    path = _last(job)
    _as_version_1(path)
    file = path / f"{name}.safetensors"
    changed = {key: change(key, tensor) for key, tensor in load_file(file).items()}
    save_file({key: tensor.contiguous() for key, tensor in changed.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=rf"{name}\.safetensors is not of this run: {message}"):
        run_job(job, resume=True)


@pytest.mark.parametrize(
    "values",
    [
        {"losses": [0.5]}, {"losses": ["x"] * 6}, {"losses": None}, {"order": {"epoch": "x", "index": 0}},
        {"order": []}, {"evaluations": {"x": 1.0}}, {"evaluations": {"0": None}}, {"config": None}, {"dataset": 3},
        {"model": {}}, {"placement": "cpu"}, {"what": 3}, {"what": [1]}, {"order": {"epoch": 1}},
        {"order": {"epoch": 0, "index": -1}}, {"replicas": 1}, {"row_shares": ["1"]}, {"loss_scale": [1.0]},
        {"rounding": [2]}, {"start": 0}, {"model": [1]}, {"placement": [None]},
    ],
    ids=str,
)  # fmt: skip
def test_facts_of_another_kind_are_damage(values, job, caplog):
    _change(_last(job), **values)
    assert find_state(job, resume=True).step == 4
    assert "step-000006" in caplog.text and next(iter(values)) in caplog.text


def test_a_job_that_cannot_be_read_is_told_with_the_checkpoint(job):
    _change(_last(job), config={"steps": []})
    with pytest.raises(ValueError, match="step-000006 holds a job that cannot be read"):
        run_job(job, resume=True)


def test_a_run_killed_between_checkpoint_and_lora_writes_the_lora_on_resume(job, finished):
    folder = _last(job)
    good = (folder / "lora.safetensors").read_bytes()
    (folder / "lora.safetensors").unlink()
    (folder.parents[1] / "lora.safetensors").unlink()
    result = run_job(job, resume=True)
    assert (folder / "lora.safetensors").read_bytes() == good == result.lora_path.read_bytes() == finished[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: {k: v for k, v in values.items() if not k.startswith("group")}, "group.0 is missing"),
        (lambda values: {**values, "state.9.exp_avg": values["state.0.exp_avg"]}, "state.9.exp_avg is not of this"),
        (lambda values: {**values, "what": 3}, "what is not of this optimizer over 1 parameters"),
        (lambda values: {**values, "state.0.exp_avg": []}, "state.0.exp_avg is not of this optimizer"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(change, message):
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(2, 2)
    optimizer.step()
    tensors, values = pack_optimizer(optimizer)
    with pytest.raises(ValueError, match=message):
        unpack_optimizer(torch.optim.AdamW([parameter]), (tensors, change(values)))
