"""Runs that an older version trained by tensor parallel go on without it; and shares of rows that runs keep."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.config.job import ParallelConfig, load_job, save_job
from devicebridge.jobs import resolve as resolve_module
from devicebridge.jobs.checked_job import Subject
from devicebridge.jobs.job import check_job
from devicebridge.jobs.resolve import placement_of
from devicebridge.jobs.resume import placement_facts
from devicebridge.parallel.placement import Placement
from devicebridge.planning.costs import BlockCost, StepCost
from devicebridge.planning.dry_run import Work
from devicebridge.planning.plan import TrainingPlan
from devicebridge.tests.emulated import emulated_cards
from devicebridge.tests.plans import GB, MadeUpCosts, make_cards, make_plan_job, published_info
from devicebridge.tests.tiny_pipeline import assert_same_run, make_cards_job, run_on_cards
from devicebridge.training.state import list_checkpoints, load_checkpoint, save_checkpoint
from torch import nn

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts")
_CARDS = ["lazy:0", "lazy:1"]


_job = partial(
    make_cards_job, train={"steps": 3, "batch_size": 1, "seed": 3, "gradient_accumulation_steps": 2}, lora={},
    evaluation={"folder": ""},
)  # fmt: skip


@pytest.mark.parametrize("strategy", ["auto", "pipeline"])
def test_a_run_by_tensor_goes_on_over_the_same_cards(tmp_path, strategy, caplog):
    """Its LoRA is whole in the checkpoint: losses and file are those of a run that was never stopped."""
    job = replace(_job(tmp_path, "stopped"), parallel=ParallelConfig(strategy=strategy))
    straight = run_on_cards(_job(tmp_path, "straight", parallel={"strategy": strategy}))
    steps: list[Any] = []
    stopped = run_on_cards(job, on_event=steps.append, should_stop=lambda: any(each.kind == "step" for each in steps))
    assert stopped.step == 1
    # What such a run's newest checkpoint said of itself.
    path = list_checkpoints(Path(job.output.folder) / "checkpoints")[-1]
    state = load_checkpoint(path)
    state.facts["config"]["parallel"]["strategy"] = "tensor"
    state.facts.update(placement=["lazy:0"] * len(state.facts["placement"]), shards=_CARDS, shares=[])
    save_checkpoint(path.parent, state, keep_last=1)
    caplog.clear()
    seen: list[Any] = []
    resumed = run_on_cards(job, resume=True, on_event=seen.append)
    lines = [record.getMessage() for record in caplog.records if "tensor parallel" in record.getMessage()]
    assert len(lines) == 1 and job.output.folder in lines[0] and f'"{strategy}"' in lines[0]
    loading = next(each.values for each in seen if each.values.get("name") == "loading")
    assert [device for device, _ in loading["blocks"]] == _CARDS
    assert_same_run(resumed, straight)


def test_a_job_file_that_asks_for_tensor_is_run_by_auto(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, file = _job(tmp_path, "run"), tmp_path / "job.toml"
    save_job(job, file)
    file.write_text(file.read_text().replace('strategy = "auto"', 'strategy = "tensor"'))
    read = load_job(file)
    (line,) = [record.getMessage() for record in caplog.records]
    assert read == job and 'parallel.strategy = "tensor"' in line and '"auto" is taken' in line
    with emulated_cards():
        assert check_job(read).execution.strategy == "pipeline"


@pytest.mark.parametrize(
    ("kept", "shares"),
    [({}, (2.25, 1.0)), ({"row_shares": [1, 1]}, (1, 1)), ({"row_shares": None, "shares_rows": True}, (1, 1))],
    ids=["unequal", "equal", "of an earlier version"],
)
def test_a_resumed_run_has_the_shares_that_it_had(tmp_path: Path, kept: dict[str, Any], shares: Any) -> None:
    with emulated_cards():
        cards = tuple(map(torch.device, _CARDS))
        before = Placement(("a", "b"), (cards[0],) * 2, cards[0], replicas=cards, row_shares=(2.25, 1.0))
        facts = {key: each for key, each in (placement_facts(before) | kept).items() if each is not None}
        found = placement_of(_job(tmp_path, "run"), facts)
    assert found is not None and found.row_shares == shares and found.strategy == "tokens"


@pytest.mark.parametrize("shares", [[1.0], [1.0, 0.0], [1.0, float("inf")], [1.0, float("nan")], [1.0, "1"]])
def test_shares_that_no_run_has_are_refused(tmp_path: Path, shares: list[Any]) -> None:
    facts = {"placement": ["lazy:0"], "replicas": _CARDS, "row_shares": shares}
    with emulated_cards(), pytest.raises(ValueError) as error:
        placement_of(_job(tmp_path, "run"), facts)
    assert str(shares) in str(error.value) and "lazy:0, lazy:1" in str(error.value)


class _Activations(MadeUpCosts):
    """Each block takes as much more as the first card has of the rows."""

    def dry_run(self, work: Work, kernels: Any) -> StepCost:
        found, shares = super().dry_run(work, kernels), work.row_shares
        moving = int(30 * GB * shares[0] / sum(shares))
        return replace(found, blocks=(replace(found.blocks[0], recompute=moving, backward=moving),) * 10)


def test_a_resumed_run_is_planned_for_the_shares_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """By cards of unequal speed as by cards of equal speed, where the run shared out its rows equally."""
    block = BlockCost(GB, GB // 10, GB // 40, GB // 100, {}, GB, GB, GB, GB, GB, GB)
    monkeypatch.setattr(resolve_module, "_refuse_without_rows", lambda subject: None)
    monkeypatch.setattr(resolve_module, "ModelCosts", lambda *args: _Activations(block))
    info, size, cards = published_info(), (512, 512, 1), tuple(map(torch.device, ("cuda:0", "cuda:1")))
    assert info.variant is not None
    subject = Subject(info, info.variant, nn.Module(), size, frozenset({size}))
    before = Placement(("a",), cards[:1], cards[0], replicas=cards, row_shares=(1.0, 1.0))

    def plan(speeds: tuple[float, ...], before: Placement | None) -> TrainingPlan:
        machine = resolve_module.Machine(cards, tuple(make_cards(100, 22, speeds=speeds)))
        job = make_plan_job(parallel={"strategy": "tokens"}, model={"quantize": "none"})
        found = resolve_module._plan_as_before(job, subject, machine, before)
        assert found is not None
        return found

    resumed, new, equal = plan((2.0, 1.0), before), plan((2.0, 1.0), None), plan((1.0, 1.0), None)
    assert resumed.placement.row_shares == (1.0, 1.0) and new.placement.row_shares == (2.0, 1.0)
    assert [each.needed for each in resumed.devices] == [each.needed for each in equal.devices]
    assert resumed.offloaded == equal.offloaded != new.offloaded


@pytest.mark.parametrize(
    ("section", "has_empty_caption", "looks_at_tokens"),
    [({}, False, True), ({}, True, False), ({"strategy": "tokens"}, True, True), ({"processes": 2}, False, False)],
)
def test_auto_shares_out_no_rows_of_a_job_with_samples_that_cards_compute_whole(
    section: dict[str, Any], has_empty_caption: bool, looks_at_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty caption may have one token, which two cards cannot share: each would compute the sample whole."""
    asked: list[Any] = []
    monkeypatch.setattr(resolve_module, "plan_training", asked.append)
    monkeypatch.setattr(resolve_module, "_refuse_without_rows", lambda subject: None)
    monkeypatch.setattr(resolve_module, "ModelCosts", lambda *args: SimpleNamespace(names=("a", "b")))
    monkeypatch.setattr(resolve_module, "_left_out", lambda subject: frozenset())
    info = published_info()
    assert info.variant is not None
    size, model = (512, 512, 1), nn.Module()
    subject = Subject(info, info.variant, model, size, frozenset({size}), has_empty_caption=has_empty_caption)
    machine = resolve_module.Machine(tuple(map(torch.device, ("cuda:0", "cuda:1"))), tuple(make_cards(24, 24)))
    resolve_module.plan_on(make_plan_job(parallel=section), subject, machine)
    assert ("tokens" in asked[0].open.strategies) == looks_at_tokens
