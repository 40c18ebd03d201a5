"""Cards without bfloat16: the model is computed in float16 with a scaled loss, or the job is refused by name."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.jobs.job import check_job, run_job
from devicebridge.jobs.resume import TrainingResult
from devicebridge.parallel import devices
from devicebridge.parallel.ranks.group import AcrossRanks, Ranks
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.parallel.ranks.watch import Watch
from devicebridge.parallel.runner import MicroBatch
from devicebridge.parallel.transfer import module_with_streams
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.tiny_pipeline import make_cards_job, run_steps
from devicebridge.training import loop
from devicebridge.training.optimizer import LossScale

pytestmark = pytest.mark.usefixtures("one_thread", "short_texts")
TWO = {"devices": ["lazy:0", "lazy:1"]}


def _job(tmp_path: Path, run: str, dtype: str = "bfloat16", **sections: Any) -> Any:
    values: dict[str, Any] = {
        "model": {"dtype": dtype}, "lora": {}, "split": {"devices": ["lazy:0"]}, "parallel": {"strategy": "none"},
        "train": {"steps": 1, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3, "clip_norm": 0},
        "optimizer": {"name": "torch.optim.SGD", "learning_rate": 1.0}, "evaluation": {"folder": ""},
        # Diffusers rounds timesteps to the model's type, and this one is the same in all.
        "objective": {"lowest_noise": 0.49999, "highest_noise": 0.50001},
    }  # fmt: skip
    return make_cards_job(tmp_path, run, **{**values, **sections})


def _run(job: Any, count: int = 0, **arguments: Any) -> TrainingResult:
    with emulated_cards(2):
        torch.lazy.is_bf16_supported = lambda: False  # type: ignore[attr-defined]
        return run_steps(job, count) if count else run_job(job, **arguments)


def _moved(result: TrainingResult) -> torch.Tensor:
    """What one step of SGD at rate 1 has moved from zero: less the gradient."""
    found = [each.flatten() for name, each in sorted(result.lora.items()) if "lora_B" in name]
    return torch.cat(found)


def _scale(result: TrainingResult) -> Any:
    return json.loads((result.checkpoint / "state.json").read_text())["loss_scale"]  # type: ignore[operator]


def test_gradients_are_those_of_float32_within_rounding(tmp_path: Path) -> None:
    exact = _run(_job(tmp_path, "exact", "float32"))
    ways: dict[str, dict[str, Any]] = {
        "stages": {"split": TWO, "parallel": {"strategy": "pipeline"}},
        "copies": {"split": TWO, "parallel": {"strategy": "data"}},
    }
    for way, sections in ways.items():
        found = _run(_job(tmp_path, way, **sections))
        assert found.losses == pytest.approx(exact.losses, rel=5e-3), way
        apart = (_moved(found) - _moved(exact)).norm() / _moved(exact).norm()
        assert 1e-5 < apart < 1e-2, way  # it was rounded, to 11 bits
        assert _scale(found) == [2.0**16, 1]


class _Overflows(LossScale):
    """Gradients of the first factor are beyond every range."""

    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.inf if self.factor == 2.0**16 else super().scaled(gradient)


def test_a_step_that_overflows_is_left_out_and_a_resumed_run_goes_on_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "LossScale", _Overflows)
    train = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}
    sections = {"train": train, "split": TWO, "parallel": {"strategy": "data"}}
    straight = _run(_job(tmp_path, "straight", **sections))
    assert _scale(straight) == [2.0**15, 1] and _moved(straight).any()
    job = _job(tmp_path, "stopped", **sections)
    stopped = _run(job, 1)
    assert _scale(stopped) == [2.0**15, 0] and not _moved(stopped).any()
    resumed = _run(job, resume=True)
    assert resumed.losses == straight.losses and _scale(resumed) == _scale(straight)
    assert torch.equal(_moved(resumed), _moved(straight))


@pytest.mark.parametrize("strategy", ["none", "pipeline", "data"])
def test_a_forward_beyond_the_range_ends_the_run_by_name_and_float32_goes_on(tmp_path, monkeypatch, strategy):
    """As activations do: 70000 is inf in float16, and the scale cannot help."""
    own, calls = loop.Objective.loss, itertools.count(1)

    def grown(self: Any, *given: Any) -> torch.Tensor:
        factor = torch.tensor(70000.0).to(self.dtype).float() if next(calls) == 3 else 1
        return own(self, *given) * factor

    monkeypatch.setattr(loop.Objective, "loss", grown)
    train = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3}
    sections = {"train": train, "parallel": {"strategy": strategy}, **({} if strategy == "none" else {"split": TWO})}
    with pytest.raises(RuntimeError, match=r"2 .*in its forward.*image_\d\.png.*--continue(.|\n)*step-000001"):
        _run(_job(tmp_path, "run", **sections))
    assert _run(_job(tmp_path, "run", "float32", **sections), resume="continue").step == 2


def test_a_forward_beyond_the_range_on_another_rank_is_this_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank sees the losses of all, and so ends at the same step."""
    ranks = Ranks(RankPlace(0, 2, 0, 2), watch=Watch(60.0))
    other = torch.tensor([0.0, 1.0, 0.0, math.inf])  # a gradient, that it is there, and two losses, of the other's

    class Inner:
        num_replicas = 1

        def run(self, microbatches: Any) -> list[torch.Tensor]:
            return [each.forward(None) for each in microbatches]

    monkeypatch.setattr(ranks, "add_up", lambda flat: flat + other)
    monkeypatch.setattr(ranks, "wait", lambda: None)
    runner = AcrossRanks(Inner(), [torch.nn.Parameter(torch.zeros(1))], ranks, 0, in_lockstep=False)  # type: ignore[arg-type]
    losses = runner.run([MicroBatch(lambda: None, lambda given: torch.ones(()))] * 2)
    ranks.watch.close()
    assert [float(each) for each in losses] == [1.0, math.inf]


def test_the_scale_follows_torch_s_rules() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2000)
    parameter = torch.nn.Parameter(torch.ones(1))
    step = torch.optim.SGD([parameter], lr=0.0)
    for index in range(4010):
        is_finite = index % 2005 != 2003
        theirs.scale(parameter.sum() * (1.0 if is_finite else float("inf"))).backward()
        theirs.step(step)
        theirs.update()
        parameter.grad = None
        assert ours.allows(is_finite) == is_finite
        assert ours.factor == theirs.get_scale(), index
    lowest = LossScale(1.0)
    assert lowest.allows(False)  # the loop then says what is wrong


def test_what_float16_is_not_for_is_refused_by_name(tmp_path: Path) -> None:
    with emulated_cards(2):
        torch.lazy.is_bf16_supported = lambda: False  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"lazy:0 does not compute in bfloat16, .* lora.dtype is"):
            check_job(_job(tmp_path, "a", lora={"dtype": "bfloat16"}))
        assert check_job(_job(tmp_path, "b", "float32")).execution.dtype is torch.float32
        torch.lazy.is_bf16_supported = lambda: True  # type: ignore[attr-defined]
        assert check_job(_job(tmp_path, "c")).execution.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "major", "arch", "bf16", "fp16"),
    [
        ("Tesla V100-SXM2-16GB", 7, "", False, True), ("NVIDIA GeForce RTX 2080 Ti", 7, "", False, True),
        ("NVIDIA GeForce GTX 1660 Ti", 7, "", False, False), ("NVIDIA GeForce GTX 1080", 6, "", False, False),
        ("NVIDIA GeForce RTX 3090", 8, "", True, True), ("AMD Radeon RX 6800", 10, "gfx1030", False, True),
        ("AMD Radeon RX 7900 XTX", 11, "gfx1100", True, True),
    ],
)  # fmt: skip
def test_cards_say_what_they_compute_in(name, major, arch, bf16, fp16, monkeypatch):
    properties = SimpleNamespace(name=name, major=major, gcnArchName=arch)
    monkeypatch.setattr(devices, "device_module", lambda _: SimpleNamespace(get_device_properties=lambda _: properties))
    monkeypatch.setattr(torch.version, "hip", "6.4" if arch else None)
    card = torch.device("cuda", 0)
    assert (devices.has_bf16(card), devices.has_fp16(card)) == (bf16, fp16)


def test_torch_s_module_of_intel_cards_has_what_copies_between_cards_need() -> None:
    cards = torch.device("xpu", 0), torch.device("xpu", 1)
    assert module_with_streams(*cards) is torch.xpu and hasattr(torch.xpu, "is_bf16_supported")
