"""Whole jobs with LoKr, an average of the LoRA, a LoRA to start from, other optimizers and weighted folders."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.config.job import JobConfig, differing_keys
from devicebridge.jobs import job as job_module
from devicebridge.jobs.job import check_job
from devicebridge.jobs.read_job import read_job
from devicebridge.jobs.resume import TrainingResult
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import assert_same_run, make_cards_job, run_on_cards, run_steps, save_tiny_dataset
from devicebridge.training.state import load_checkpoint, save_checkpoint
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("one_thread", "short_texts")

CARDS = {"devices": ["lazy:0", "lazy:1"]}
TRAIN = {"steps": 4, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}
LOKR = {"kind": "lokr", "rank": 2, "alpha": 2, "factor": 4}
KINDS: dict[str, dict[str, Any]] = {
    "lokr": LOKR, "loha": {"kind": "loha", "rank": 2, "alpha": 2}, "dokr": {**LOKR, "dora": True},
    "oft": {"kind": "oft", "rank": 4},
}  # fmt: skip


def _job(tmp_path: Path, folder: str, name: str = "flux2", **sections: Any) -> JobConfig:
    values = {
        "split": {"devices": ["lazy:0"]}, "train": TRAIN, "parallel": {"strategy": "none"}, "lora": {},
        "evaluation": {"folder": ""}, "optimizer": {"learning_rate": 1e-2},
        "output": {"folder": str(tmp_path / folder), "save_every_steps": 0},
    }  # fmt: skip
    merged = {key: {**values.get(key, {}), **sections.get(key, {})} for key in {**values, **sections}}
    return make_cards_job(tmp_path, folder, name, **merged)


def _stopped_and_resumed(job: JobConfig) -> TrainingResult:
    run_steps(job, 2, cards=3)
    return run_on_cards(job, resume=True)


@pytest.mark.usefixtures("tiny_weights_leave")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_alike_in_stages_and_resumes_bit_for_bit(tmp_path: Path, kind: str) -> None:
    sections: dict[str, Any] = {"lora": KINDS[kind]}
    if kind == "lokr":
        sections["model"] = {"quantize": "int8", "rotation": 16}
    plain = run_on_cards(_job(tmp_path, "plain", **sections))
    end = {"lokr": ".lokr_w1", "loha": ".hada_w2_b", "dokr": ".dora_scale", "oft": ".oft_blocks"}[kind]
    assert len(set(plain.losses)) == 4 and any(key.endswith(end) for key in plain.lora)
    for way in ({"parallel": {"strategy": "pipeline"}}, {"split": {**CARDS, "offloaded_blocks": [1, 0]}}):
        found = run_on_cards(_job(tmp_path, str(len(way)) + next(iter(way)), **sections, **{"split": CARDS, **way}))
        assert found.losses == plain.losses and all(torch.equal(found.lora[key], plain.lora[key]) for key in plain.lora)
    copies = run_on_cards(_job(tmp_path, "copies", **sections, split=CARDS, parallel={"strategy": "data"}))
    assert copies.losses == pytest.approx(plain.losses, rel=1e-5)
    resumed = _stopped_and_resumed(_job(tmp_path, "resumed", **sections))
    assert_same_run(resumed, plain)


def test_what_a_file_or_a_layout_has_no_place_for_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    first = str(run_on_cards(_job(tmp_path, "first", train={"steps": 1})).lora_path)
    refused: dict[str, dict[str, Any]] = {
        'is of lora.kind = "lora"': {"lora": {**KINDS["loha"], "start_from": first}},
        r"set lora\.rank to 4 or more": {"lora": {"rank": 2, "start_from": first}},
        'lora_layout = "both" is of plain LoRA': {"lora": LOKR, "output": {"lora_layout": "both"}},
    }
    for message, sections in refused.items():
        with emulated_cards(1), pytest.raises(ValueError, match=message):
            check_job(_job(tmp_path, "again", **sections))


def test_a_run_begins_where_the_file_s_run_ended(tmp_path: Path) -> None:
    """The loss of held-out samples is the same before the first step as it was behind the last one."""
    short = {"evaluation": {"folder": str(tmp_path / "held_out"), "quantiles": [0.3]}, "train": {"steps": 2}}
    first = run_on_cards(_job(tmp_path, "first", **short))
    assert first.eval_after is not None and first.eval_after != first.eval_before
    ways: dict[str, dict[str, Any]] = {
        "rank": {"lora": {"rank": 8, "alpha": 2}}, "dora": {"lora": {"dora": True}},
        "streamed": {"split": {**CARDS, "offloaded_blocks": [1, 0]}, "lora": {"dora": True}},
        "replicas": {"split": CARDS, "parallel": {"strategy": "data"}},
    }  # fmt: skip
    for way, changes in ways.items():
        lora = {**changes.get("lora", {}), "start_from": str(first.lora_path)}
        again = run_on_cards(_job(tmp_path, way, **{**short, **changes, "lora": lora}))
        assert again.eval_before == pytest.approx(first.eval_after, rel=1e-5), way
        assert again.eval_after != again.eval_before, way


def test_a_run_with_an_average_that_started_from_a_file_resumes_without_it(tmp_path: Path) -> None:
    first = run_on_cards(_job(tmp_path, "first"))
    assert first.lora_path is not None
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(first.lora_path.read_bytes())
    sections: dict[str, Any] = {"lora": {"start_from": str(copy)}, "train": {"ema_decay": 0.8}}
    straight = run_on_cards(_job(tmp_path, "straight", **sections))
    job = _job(tmp_path, "resumed", **sections)
    run_steps(job, cards=3)
    copy.unlink()
    resumed = run_on_cards(job, resume=True)
    assert_same_run(resumed, straight)


OPTIMIZERS = [
    {"name": "adamw"}, {"name": "adamw8bit"}, {"name": "adafactor"}, {"name": "prodigy", "learning_rate": 1.0},
    {"name": "came"}, {"name": "bitsandbytes.optim.AdamW8bit"},
]  # fmt: skip
_PACKAGES = {"prodigy": "prodigyopt", "came": "pytorch_optimizer", "bitsandbytes.optim.AdamW8bit": "bitsandbytes"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each["name"])
def test_every_optimizer_by_name_trains_and_resumes_bit_for_bit(tmp_path, optimizer, monkeypatch):
    if (package := _PACKAGES.get(optimizer["name"])) and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # torchao compiles its step
    train = {"steps": 3, "gradient_accumulation_steps": 1}
    sections: dict[str, Any] = {"optimizer": optimizer, "split": {"devices": ["cpu"]}, "train": train}
    straight = run_on_cards(_job(tmp_path, "straight", "wan", **sections))
    assert len(set(straight.losses)) == 3
    resumed = _stopped_and_resumed(_job(tmp_path, "resumed", "wan", **sections))
    assert_same_run(resumed, straight)


def test_a_run_of_an_earlier_version_by_kahans_sums_goes_on_in_float32(tmp_path: Path) -> None:
    """Its checkpoints hold a LoRA in bfloat16, and what rounding took off each weight."""
    sections = {"train": {"steps": 3}, "output": {"lora_layout": "diffusers", "lora_dtype": "float32"}}
    job = _job(tmp_path, "run", lora={"dtype": "bfloat16"}, optimizer={"kahan": True}, **sections)
    assert job.lora.dtype == "float32" and run_on_cards(job).step == 3
    without = dataclasses.replace(job.optimizer, kahan=False)
    assert differing_keys(job, dataclasses.replace(job, optimizer=without)) == []
    folder = tmp_path / "run" / "checkpoints"
    state = load_checkpoint(folder / "step-000003")
    names = [f"{target}.lora_{half}.weight" for target in read_job(job).targets for half in "AB"]
    halves = {name: state.adapter[name].bfloat16() for name in names}
    rests = {f"kahan.{index}": torch.full_like(halves[name], 2e-5 * index) for index, name in enumerate(names)}
    packed = state.optimizer[0] | rests, state.optimizer[1]
    state.facts["config"]["lora"]["dtype"] = "bfloat16"
    save_checkpoint(folder, dataclasses.replace(state, adapter=halves, optimizer=packed), 1)
    found = {name.removeprefix("transformer."): each for name, each in run_on_cards(job, resume=True).lora.items()}
    for name, rest in zip(names, rests.values(), strict=True):
        assert torch.equal(found[name], halves[name].float() + rest.float())


def test_the_average_is_that_of_the_checkpoints_and_in_the_file_if_asked(tmp_path: Path) -> None:
    decay, steps = 0.9, 4
    job = _job(tmp_path, "run", train={"ema_decay": decay}, output={"save_every_steps": 1, "keep_last": 10})
    with_average = run_on_cards(job)
    folder = tmp_path / "run" / "checkpoints"
    values = [load_file(folder / f"step-{step:06d}" / "adapter.safetensors") for step in range(1, steps + 1)]
    names = [name for name in values[0] if not name.startswith("ema.")]
    straight = run_on_cards(_job(tmp_path, "without"))
    assert with_average.losses == straight.losses  # it takes no part in the training
    key = next(name for name in names if name.endswith("lora_B.weight"))
    expected = torch.zeros_like(values[0][key])  # where B begins
    for step, each in enumerate(values, start=1):
        weight = min(decay, (1 + step) / (10 + step))
        expected = weight * expected + (1 - weight) * each[key]
    module = key.removesuffix(".lora_B.weight")
    assert torch.allclose(values[-1][f"ema.{module}.lora_B.default.weight"], expected, atol=1e-7)
    last = dataclasses.replace(job, output=dataclasses.replace(job.output, use_ema=False))
    of_average, of_last = (run_on_cards(each, resume=True) for each in (job, last))
    assert_same_run(of_average, with_average)
    assert all(torch.equal(of_last.lora[name], tensor) for name, tensor in straight.lora.items())
    assert any(not torch.equal(of_average.lora[name], tensor) for name, tensor in straight.lora.items())


@pytest.mark.parametrize("use_ema", [True, False])
def test_pictures_are_drawn_with_the_average_if_asked(tmp_path, use_ema, monkeypatch):
    drawn: list[dict[str, torch.Tensor]] = []

    class Pictures:
        def __init__(self, trainer: Any) -> None:
            self._trainer = trainer

        def is_due(self, *, is_start: bool = False) -> bool:
            return self._trainer.step == 2 and not is_start

        def draw(self, should_stop: Any) -> None:
            drawn.append({name: each.detach().clone() for name, each in self._trainer.lora.parameters().items()})

    monkeypatch.setattr(job_module, "make_sampler", lambda plan, trainer: Pictures(trainer))
    sections = {"train": {"ema_decay": 0.9, "steps": 2}, "samples": {"use_ema": use_ema}}
    run_on_cards(_job(tmp_path, "run", "wan", split={"devices": ["cpu"]}, **sections))
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-000002" / "adapter.safetensors")
    (found,) = drawn
    averages = [torch.equal(tensor, saved[f"ema.{name}"]) for name, tensor in found.items()]
    assert all(averages) if use_ema else not all(averages)


def test_a_folder_s_loss_weight_is_the_factor_of_its_gradients(tmp_path: Path) -> None:
    """One image in the folder, so that the first loss is weighted as a whole."""
    save_tiny_dataset(tmp_path / "one", num_images=1)
    losses = []
    for index, weight in enumerate((1.0, 0.25)):
        folders = [{"path": str(tmp_path / "one"), "loss_weight": weight}]
        losses.append(run_on_cards(_job(tmp_path, f"run{index}", data={"folders": folders})).losses[0])
    assert losses[1] == pytest.approx(0.25 * losses[0], rel=1e-6)
