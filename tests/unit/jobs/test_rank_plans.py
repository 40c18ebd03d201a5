"""How many blocks keep their activations where processes share the weights, by full-size forecasts."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import make_published_info
from devicebridge.checkpoints.load import make_empty_transformer
from devicebridge.cli.main import main
from devicebridge.config.job import JobConfig, save_job
from devicebridge.jobs.checked_job import Subject, held_bytes
from devicebridge.jobs.job import plan_job, run_job
from devicebridge.jobs.ranks import plan_shared, resolve_here, share_of
from devicebridge.parallel.devices import CPU
from devicebridge.planning.cards import Card, parse_cards
from devicebridge.planning.plan import TrainingPlan
from devicebridge.planning.search import HEADROOM
from devicebridge.tests.plans import make_plan_job
from devicebridge.tests.ranks.launching import ROOT
from devicebridge.tests.tiny_pipeline import make_tiny_job
from torch.torch_version import TorchVersion

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread")
BLOCKS = 28
RUN = ROOT / "benchmarks" / "results" / "ranks_fp8_keep_2xh200_2026-11-27.json"
EARLIER = ROOT / "benchmarks" / "results" / "ranks_2xh200_2026-11-24.json"


@pytest.fixture(scope="module")
def subject() -> Subject:
    """FLUX.2 with 28 of its 56 blocks, as benchmarks/ranks.py --layers 4 24 has it."""
    published = make_published_info("flux2-dev")
    info = dataclasses.replace(published, config={**published.config, "num_layers": 4, "num_single_layers": 24})
    size = (512, 512, 1)
    assert info.variant is not None
    return Subject(info, info.variant, make_empty_transformer(info), size, train=frozenset({size}))


def _job(scheme: str = "fp8-compute", **sections: dict) -> JobConfig:
    return make_plan_job(model={"quantize": scheme}, lora={"rank": 32, "dtype": "bfloat16"}, **sections)


def test_sharing_out_tokens_is_refused_in_several_processes(subject: Subject) -> None:
    ranks: Any = SimpleNamespace(is_launched=True, count=2)
    with pytest.raises(ValueError, match=r'"tokens" is of one process, and 2 were started'):
        resolve_here(_job(parallel={"strategy": "tokens"}), subject, ranks, 1, None)


def test_torch_2_11_shares_no_weights_in_int8(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: Any = SimpleNamespace(is_launched=True, is_first=True, count=2, devices=(CPU,))
    ranks.place, ranks.on_all = SimpleNamespace(num_local=2, local_rank=0), lambda compute: compute()
    ranks.from_first, ranks.gather = ranks.on_all, lambda value: [value, value]
    job = _job("int8-compute", parallel={"strategy": "fsdp"})
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ValueError, match=r"torch 2\.11.* int8.* torch 2\.12"):
        resolve_here(job, subject, ranks, 1, None)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.0"))
    assert resolve_here(job, subject, ranks, 1, None).execution.strategy == "fsdp"


def _card(size: str) -> Card:
    return parse_cards(size)[0]


def _asked(kept: int) -> dict:
    return {"split": {"blocks_without_checkpointing": [kept]}}


def _needed(plan: TrainingPlan) -> int:
    (device,) = plan.devices
    return device.needed


@pytest.mark.parametrize("size", ["18GB", pytest.param("20GB", marks=pytest.mark.long), "24GB", "141GB"])
def test_as_many_of_the_last_blocks_keep_their_activations_as_leave_the_headroom_and_one_block(size, subject):
    found = plan_shared(_job(), subject, _card(size), 2)
    (kept,), block = found.uncheckpointed, max(held_bytes(_job().model, subject)[0])
    room = (1 - HEADROOM) * _card(size).usable_bytes - block
    assert _needed(found) == _needed(plan_shared(_job(**_asked(kept)), subject, _card(size), 2)) <= room
    if size == "141GB":
        assert kept == BLOCKS
    else:
        assert 0 < kept < BLOCKS
        assert _needed(plan_shared(_job(**_asked(kept + 1)), subject, _card(size), 2)) > room


def test_more_processes_that_share_leave_more_room(subject):
    kept = [plan_shared(_job(), subject, _card("18GB"), degree).uncheckpointed[0] for degree in (2, 4, 8)]
    assert kept == sorted({*kept})


def test_a_step_takes_a_third_less_where_no_block_is_computed_again(subject):
    """The base is frozen, so a backward takes as long as a forward: two passes instead of three."""
    none, half, every = (plan_shared(_job(**_asked(kept)), subject, _card("80GB"), 2) for kept in (0, 14, 28))
    assert every.step_s == pytest.approx(2 / 3 * none.step_s) and every.step_s < half.step_s < none.step_s
    chosen = plan_shared(_job(), subject, _card("80GB"), 2)
    assert chosen.step_s == every.step_s and chosen.uncheckpointed == (28,)


def test_what_the_user_asks_for_is_planned_also_where_it_does_not_fit(subject):
    small, every = _card("16GB"), {"train": {"gradient_checkpointing": False}}
    assert plan_shared(_job(**_asked(3)), subject, _card("141GB"), 2).uncheckpointed == (3,)
    asked = plan_shared(_job(**every), subject, small, 2)
    assert asked.uncheckpointed == (BLOCKS,)
    assert asked.warning == f"cuda:0 needs {_needed(asked) / 1e9:.1f} GB by the forecast, of 16.0 GB"
    assert not plan_shared(_job(), subject, small, 2).warning
    tiny = plan_shared(_job(), subject, _card("8GB"), 2)
    assert tiny.uncheckpointed == (0,) and "of 8.0 GB" in tiny.warning


def test_settings_of_one_process_alone_do_not_reach_the_plan(subject):
    """Block inputs and weights stay on the card, limits are of weights that one card has."""
    settings = {"train": {"offload_activations": "on"}, "split": {"memory_limit_gb": [1]}}
    plain, found = (plan_shared(_job(**each), subject, _card("24GB"), 2) for each in ({}, settings))
    assert found.devices == plain.devices and found.offloaded == (0,)


def test_a_card_holds_its_share_of_the_weights_and_two_gathered_blocks(subject):
    blocks, rest = held_bytes(_job("none").model, subject)
    device = plan_shared(_job("none"), subject, _card("141GB"), 2).devices[0]
    expected = (sum(blocks) + rest) / 2 + rest + 2 * max(blocks)
    assert device.weights == pytest.approx(expected, rel=1e-3)
    assert share_of(blocks, rest, 2) == (sum(blocks) + rest, pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    ("scheme", "kept", "mode", "least", "most"),
    [
        ("fp8-compute", 0, "fsdp_fp8_compile", 0.96, 1.0),
        ("fp8-compute", BLOCKS, "fsdp_fp8_keep_compile", 1.0, 1.12),  # compiled blocks keep less
        ("none", 0, "fsdp", 0.96, 1.0),
        ("none", BLOCKS, "fsdp_keep", 1.0, 1.06),
    ],
)
def test_the_forecast_is_near_what_two_cards_held(scheme, kept, mode, least, most, subject):
    runs = [json.loads(each.read_text(encoding="utf-8")) for each in (RUN, EARLIER)]
    runs.append(runs[1]["with activations kept, compiled (cut short)"])
    (measured,) = [part["modes"][mode]["peak_gb"][0] for run in runs for part in run["parts"] if mode in part["modes"]]
    device = plan_shared(_job(scheme, **_asked(kept)), subject, _card("141GB"), 2).devices[0]
    assert least < device.allocated / 1e9 / measured < most


def test_a_job_whose_weights_are_shared_is_checked_and_no_plan_of_one_process(tmp_path, capsys):
    """By one process it is refused, with what its own number of processes makes true."""
    file, found = tmp_path / "job.toml", {}
    for processes in (1, 2):
        job = make_tiny_job(tmp_path, parallel={"strategy": "fsdp", "processes": processes})
        save_job(job, file)
        found[processes] = main(["check", str(file)]), capsys.readouterr()
        with pytest.raises(ValueError, match=r"parallel\.strategy"):
            plan_job(job, parse_cards("24GB"))
    assert (found[1][0], found[2][0]) == (2, 0)
    assert "set parallel.processes to 2 or more" in found[1][1].err
    assert "the weights are shared by 2 processes (fsdp)" in found[2][1].out
    with pytest.raises(ValueError, match='start the job with "devicebridge train"'):
        run_job(job)
    assert main(["plan", str(file), "--cards", "2x24GB"]) == 2
