"""Runs that go on with other settings, other pictures or on other cards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.config.job import JobConfig, OptimizerConfig, job_to_dict, make_job
from devicebridge.jobs import job as job_module
from devicebridge.jobs.job import run_job
from devicebridge.jobs.resume import next_run
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import (
    assert_same_run,
    encoded_before,
    make_tiny_job,
    plain_losses,
    run_on_cards,
    run_steps,
    save_tiny_dataset,
)
from devicebridge.training import optimizer as optimizer_module
from devicebridge.training.optimizer import clip_gradients, make_optimizer, pack_optimizer, unpack_optimizer
from devicebridge.training.state import DamagedCheckpoint, load_checkpoint, save_checkpoint
from safetensors.torch import load_file
from torch import nn

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts")
BEGUN = 2  # steps


def _merged(own, others):
    return {name: own.get(name, {}) | others.get(name, {}) for name in own | others}


def _changed(job: JobConfig, **sections: dict[str, Any]) -> JobConfig:
    return make_job(_merged(job_to_dict(job), sections))


def _job(tmp_path: Path, **sections: dict[str, Any]) -> JobConfig:
    values: dict[str, dict[str, Any]] = {
        "train": {"steps": 4, "batch_size": 2, "seed": 3}, "evaluation": {"folder": ""},
        "cache": {"folder": encoded_before(tmp_path)}, "output": {"save_every_steps": 0},
    }  # fmt: skip
    return make_tiny_job(tmp_path, "wan", **_merged(values, sections))


@pytest.fixture
def begun(tmp_path):
    """Stopped after its second step, with all that a continued run must carry over."""
    job = _job(tmp_path, evaluation={"folder": str(tmp_path / "held_out")})
    run_steps(job, BEGUN)
    return job


def _newest(job: JobConfig) -> Path:
    return max((Path(job.output.folder) / "checkpoints").glob("step-*"))


def _what(job: JobConfig) -> list[str]:
    lines = (json.loads(line) for line in (Path(job.output.folder) / "events.jsonl").read_text().splitlines())
    return [each for event in lines if event["kind"] == "continued" for each in event["what"]]


def _position(checkpoint: Path) -> tuple[int, int]:
    order = json.loads((checkpoint / "state.json").read_text())["order"]
    return order["epoch"], order["index"]


def _begin(job: JobConfig) -> None:
    """Continue a run, and end before its first step."""
    seen: list[Any] = []
    run_job(job, resume="continue", on_event=seen.append, should_stop=lambda: "continued" in [e.kind for e in seen])


# --- other settings and other pictures --------------------------------------------------------------------------------


def test_more_steps_at_another_rate_have_the_losses_of_a_fresh_run_from_there(begun):
    changes: dict[str, Any] = {
        "train": {"steps": 6, "gradient_accumulation_steps": 2, "clip_norm": 0.5},
        "optimizer": {"learning_rate": 4e-3, "weight_decay": 0.3},
        "schedule": {"name": "linear"},
    }
    job, start = _changed(begun, **changes), _newest(begun)
    files = {file.name: file.read_bytes() for file in start.iterdir()}
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate: 0\.001 -> 0\.004(.|\n)*--continue"):
        run_job(job, resume=True)
    expected = plain_losses(job, start, _position(start))
    found = run_job(job, resume="continue")
    assert found.step == 6 and found.losses[BEGUN:] == pytest.approx(expected, rel=1e-5)
    keys = ["optimizer.learning_rate", "optimizer.weight_decay", "schedule.name", "train.clip_norm"]
    assert [line.partition(":")[0] for line in _what(job)] == [*keys, "train.gradient_accumulation_steps"]
    assert {name: (start / name).read_bytes() for name in files} == files, "what was saved stays"
    again = run_job(job, resume=True)
    assert again.losses == found.losses


def test_new_pictures_are_encoded_alone_and_drawn_anew_from_the_step_on(tmp_path):
    job = _job(tmp_path, cache={"folder": str(tmp_path / "cache")})
    run_steps(job, BEGUN)
    start = _newest(job)
    save_tiny_dataset(tmp_path / "more", num_images=6, seed=1)
    (tmp_path / "more" / "image_5.png").rename(tmp_path / "data" / "new.png")
    (tmp_path / "data" / "new.txt").write_text("a new picture")
    (tmp_path / "data" / "image_1.txt").write_text("another caption")
    with pytest.raises(ValueError, match="data: images, captions or masks have changed"):
        run_job(job, resume=True)
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.safetensors")}
    found = run_job(job, resume="continue")
    now = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.safetensors")}
    assert len(kept) == 11 and len(now.items() - kept.items()) == 3, "two captions and a picture"
    assert any("drawn anew from step 3 on" in line for line in _what(job))
    epoch = _position(start)[0] + 1
    assert found.losses[BEGUN:] == pytest.approx(plain_losses(job, start, (epoch, 0)), rel=1e-5)


def test_a_crash_of_a_continued_run_is_resumed_as_that_run_and_the_old_one_is_still_there(begun):
    straight = run_job(_changed(begun, output={"folder": f"{begun.output.folder}_straight"}))
    job = _changed(begun, optimizer={"learning_rate": 3e-3})
    _begin(job)
    with pytest.raises(ValueError, match="optimizer.learning_rate: 0.003 -> 0.002"):
        run_job(_changed(begun, optimizer={"learning_rate": 2e-3}), resume=True)
    found = run_job(_changed(job, train={"steps": 3}), resume=True)
    assert found.step == 3 and found.losses[BEGUN] == straight.losses[BEGUN], "one step at the old rate came before"
    (_newest(job) / "state.json").unlink()  # the newest is gone: the one before is of both runs
    back = run_job(begun, resume=True)
    assert_same_run(back, straight)


def test_what_a_lora_is_and_its_base_model_cannot_be_changed(begun):
    others = {"lora.rank": 8, "lora.alpha": 2, "lora.targets": ["*to_q"], "lora.kind": "lokr"}
    for key, value in {**others, "model.variant": "wan2.1-t2v-1.3b"}.items():
        section, _, name = key.partition(".")
        with pytest.raises(ValueError, match=rf"cannot go on with these settings(.|\n)*{key}: .* -> "):
            run_job(_changed(begun, **{section: {name: value}}), resume="continue")
    with pytest.raises(ValueError, match="train.steps = 1, but .* has done 2"):
        run_job(_changed(begun, train={"steps": 1}), resume="continue")
    file = next((Path(begun.model.path) / "transformer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="cannot go on with these settings(.|\n)*model: the weights in the file have"):
        run_job(begun, resume="continue")
    assert not (_newest(begun) / "continued.json").exists()


@pytest.mark.parametrize("levels", [{"evaluation": {"quantiles": [0.5]}}, {"objective": {"highest_noise": 0.9}}])
def test_another_optimizer_begins_anew_and_an_average_where_the_weights_stand(begun, monkeypatch, levels):
    settings = {"optimizer": {"name": "adafactor"}, "train": {"ema_decay": 0.9}, **levels}
    job, made, make = _changed(begun, **settings), [], job_module.Trainer
    monkeypatch.setattr(job_module, "Trainer", lambda **values: made.append(make(**values)) or made[-1])
    found = run_job(job, resume="continue", should_stop=lambda: len(made) > 0)
    (trainer,) = made
    saved = load_file(_newest(begun) / "adapter.safetensors")
    average = {name[4:].replace(".default", ""): each for name, each in trainer._average.tensors().items()}
    assert average.keys() == saved.keys() and all(torch.equal(average[name], each) for name, each in saved.items())
    assert not trainer._optimizer.state and found.step == BEGUN
    assert "optimizer.name: 'adamw' -> 'adafactor'; the optimizer's state begins anew" in _what(job)
    assert run_job(job, resume=True).step == 4
    evaluations = json.loads((_newest(job) / "state.json").read_text())["evaluations"]
    assert evaluations.keys() == {"2", "4"}, "those at other noise levels are not compared with these"


# --- other cards ------------------------------------------------------------------------------------------------------


def _on_cards(tmp_path: Path, run: str, count: int, **sections: dict[str, Any]) -> JobConfig:
    values: dict[str, dict[str, Any]] = {
        "split": {"devices": [f"lazy:{index}" for index in range(count)]}, "cache": {"vae_device": "cpu"},
        "train": {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 3},
        "output": {"folder": str(tmp_path / run)},
    }  # fmt: skip
    return _job(tmp_path, **_merged(values, sections))


@pytest.mark.parametrize("first", [2, *(pytest.param(count, marks=pytest.mark.long) for count in (1, 3))])
def test_a_split_by_blocks_resumes_on_other_cards_with_the_same_bytes(tmp_path, first):
    """Also where the cards of before are gone, and with another schedule of microbatches."""
    straight = run_on_cards(_on_cards(tmp_path, "straight", first))
    for count in {1, 2, 3} - {first}:
        run_steps(_on_cards(tmp_path, f"to_{count}", first), cards=3)
        other = _on_cards(tmp_path, f"to_{count}", count)
        seen: list[Any] = []
        found = run_on_cards(other, count, resume=True, on_event=seen.append)
        loading = next(each.values for each in seen if each.values.get("name") == "loading")
        assert {device for device, _ in loading["blocks"]} == {f"lazy:{index}" for index in range(count)}
        assert_same_run(found, straight)
        assert len(_what(other)) == 1 + (count < first) and all("bit for bit" in line for line in _what(other))


@pytest.mark.parametrize(
    "sections",
    [{"lora": {"dropout": 0.3}}, {"lora": {"targets": ["*time_embedder*", "*to_q"]}}],
    ids=["draws on the cards", "layers that all blocks read"],
)
def test_other_bits_on_other_cards_are_refused_until_they_are_asked_for(tmp_path, sections):
    run_steps(_on_cards(tmp_path, "run", 2, **sections), cards=3)
    job = _on_cards(tmp_path, "run", 3, **sections)
    with pytest.raises(ValueError, match="split.devices: "):
        run_on_cards(job, resume=True)
    assert run_on_cards(job, resume="continue").step == 2
    assert any(line.startswith("split.devices: ") for line in _what(job))


@pytest.mark.parametrize("shares", [[], [1.0, 1.0]], ids=["data", "tokens"])
def test_a_run_of_copies_continues_by_another_strategy(tmp_path, shares):
    run_steps(_on_cards(tmp_path, "run", 2, parallel={"strategy": "data"}), cards=3)
    job = _on_cards(tmp_path, "run", 2, parallel={"strategy": "pipeline"})
    path = _newest(job)
    state = load_checkpoint(path)
    state.facts["row_shares"] = shares  # as of a run by tokens, which only ComfyUI's classes have
    save_checkpoint(path.parent, state, keep_last=1)
    before = "shares of the tokens" if shares else "data parallelism"
    with pytest.raises(ValueError, match=f"parallel.strategy: {before} -> one model over all cards"):
        run_on_cards(job, resume=True)
    assert run_on_cards(job, resume="continue").step == 2
    (line,) = _what(job)
    assert line.startswith(f"parallel.strategy: {before} -> one model over all cards; the last bits")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_a_damaged_change_is_noticed(begun):
    _begin(_changed(begun, train={"clip_norm": 2.0}))
    file = _newest(begun) / "continued.json"
    file.write_text(file.read_text().replace("2.0", "3.0"))
    with pytest.raises(DamagedCheckpoint, match="continued.json"):
        load_checkpoint(file.parent)


def test_a_base_that_is_rounded_otherwise_now_is_gone_on_with_only_where_that_is_asked_for(tmp_path):
    job = _job(tmp_path, model={"quantize": "int8"})
    run_steps(job, BEGUN)
    state = load_checkpoint(_newest(job))
    kept = {name: value for name, value in state.own.items() if name != "rounding"}  # as states were before
    save_checkpoint(_newest(job).parent, replace(state, facts=kept), 1)
    with pytest.raises(ValueError, match=r"model\.quantize: int8(.|\n)*--continue"):
        run_job(job, resume=True)
    found = run_job(job, resume="continue")
    assert [line.partition(":")[0] for line in _what(job)] == ["model.quantize"] and found.step == 4
    assert load_checkpoint(_newest(job)).facts["rounding"]["int8"] > 1


def test_a_graph_continues_its_newest_run_and_says_what_changes(begun):
    job = _changed(begun, optimizer={"learning_rate": 2e-3})
    run = next_run(job, resume="continue")
    assert (run.job, run.resume) == (job, "continue") and "optimizer.learning_rate: 0.001 -> 0.002" in run.note
    done = run_job(job, resume="continue")
    again = next_run(job, resume="continue").finished
    assert again is not None and again.losses == done.losses


class _Finds(torch.optim.SGD):
    """Finds a factor of its rate, as prodigy does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["d"] = 7.0
        return super().step(closure)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adafactor", "finds"])
@pytest.mark.parametrize("rates", [(0.0, 1e-4), (1e-4, 0.0), (1e-4, 3e-4)])
def test_an_optimizer_keeps_what_it_found_and_takes_new_rates(name, rates, monkeypatch):
    """One group or two before and after: text encoders have a rate of their own or not."""
    monkeypatch.setitem(optimizer_module._CLASSES, "finds", f"{__name__}._Finds")

    def make(rate: float, decay: float) -> tuple[list[nn.Parameter], Any]:
        parameters = [nn.Parameter(torch.full((64, 64), float(index + 1))) for index in range(3)]
        settings = OptimizerConfig(name, 1e-3, decay, allow_import=True, text_encoder_learning_rate=rate)
        return parameters, make_optimizer(parameters, settings, num_of_text=1)

    parameters, before = make(rates[0], 0.1)
    for each in parameters:
        each.grad = torch.ones_like(each)
    with torch.compiler.set_stance("force_eager"):
        before.step()
    after, fresh = make(rates[1], 0.2)[1], make(rates[1], 0.2)[1]
    unpack_optimizer(after, pack_optimizer(before), keeps_rates=True)
    for found, wanted in zip(after.param_groups, fresh.param_groups, strict=True):
        assert all(found.get(key) == wanted.get(key) for key in ("weight_decay", "lr_share", "lr"))
        assert name != "finds" or found["d"] == 7.0
    kept, was = pack_optimizer(after)[0], pack_optimizer(before)[0]
    states = [key for key in was if key.startswith("state.")]
    assert bool(states) == (name != "finds") and all(torch.equal(kept[key], was[key]) for key in states)


def test_gradients_have_one_length_however_cards_share_them():
    """Summed by card, or as torch sums them, it differs in its last bits."""
    generator = torch.Generator().manual_seed(6)
    gradients = [torch.randn(5, 7, generator=generator) for _ in range(90)]
    lengths = torch.stack([each.norm() for each in gradients])
    assert lengths.norm() != torch.cat([lengths[card::3] for card in range(3)]).norm(), "else this could not fail"

    def clipped(cards: int) -> tuple[float, list[torch.Tensor]]:
        parameters = [nn.Parameter(torch.zeros(5, 7)) for _ in gradients]
        with emulated_cards(3):
            parameters = [nn.Parameter(each.to(f"lazy:{index % cards}")) for index, each in enumerate(parameters)]
            for each, gradient in zip(parameters, gradients, strict=True):
                each.grad = gradient.to(each.device)
            length = clip_gradients(parameters, 0.5)
            return length, [each.grad.cpu() for each in parameters if each.grad is not None]

    (one, alone), (three, shared) = clipped(1), clipped(3)
    assert one == three and one == pytest.approx(sum(each.double().square().sum() for each in gradients) ** 0.5)
    assert all(map(torch.equal, alone, shared))
    assert sum(each.double().square().sum() for each in shared) ** 0.5 == pytest.approx(0.5, rel=1e-5)
