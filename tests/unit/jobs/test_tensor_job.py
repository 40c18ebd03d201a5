"""Whole jobs whose blocks are divided among emulated cards: what they train, how they resume, what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from devicebridge.config.job import ParallelConfig
from devicebridge.jobs import place_by_size
from devicebridge.jobs.job import check_job, run_job
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.tiny_pipeline import encoded_before, make_tiny_job
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("dry_runs_once", "one_thread", "short_texts")


def _job(tmp_path, folder, name="flux2", **sections):
    values = {
        "split": {"devices": ["lazy:0", "lazy:1"]},
        "cache": {"folder": encoded_before(tmp_path), "vae_device": "cpu"},
        "train": {"steps": 2, "batch_size": 1, "seed": 3},
        "parallel": {"strategy": "tensor"},
        "evaluation": {"folder": ""},
        "output": {"folder": str(tmp_path / folder), "save_every_steps": 0},
    }
    return make_tiny_job(tmp_path, name, **{**values, **sections})


def _run(job, **arguments):
    with emulated_cards(4):
        return run_job(job, **arguments)


@pytest.mark.parametrize(
    ("scheme", "tolerance"),
    [("none", 1e-5), pytest.param("int8", 1e-5, marks=pytest.mark.long), ("int8-compute", 3e-2)],
)
def test_a_job_trains_as_on_one_card_and_leaves_the_same_file(tmp_path, scheme, tolerance):
    """Optimizer steps, clipping, evaluation before and after; only sums are made in another order. Products in 8 bits
    round the features of each card by themselves."""
    held_out = {"folder": str(tmp_path / "held_out"), "quantiles": [0.5]}
    train = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 2, "seed": 3, "clip_norm": 1e-3}
    sections = {"model": {"quantize": scheme, "rotation": 16}, "evaluation": held_out, "train": train}
    one = _run(_job(tmp_path, "one", **sections, split={"devices": ["lazy:0"]}, parallel={"strategy": "none"}))
    two = _run(_job(tmp_path, "two", **sections))
    assert two.losses == pytest.approx(one.losses, rel=tolerance) and len(set(two.losses)) == 2
    assert two.eval_before == pytest.approx(one.eval_before, rel=tolerance)
    assert two.eval_after == pytest.approx(one.eval_after, rel=tolerance) and two.eval_after != two.eval_before
    found, expected = load_file(two.lora_path), load_file(one.lora_path)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape and found[key].dtype == tensor.dtype
        if scheme == "none" and key.endswith("A.weight"):
            assert (found[key] - tensor).norm() <= 1e-2 * tensor.norm(), key


@pytest.mark.parametrize("name", [pytest.param("flux1", marks=pytest.mark.long), "wan"])
def test_a_run_resumes_bit_for_bit(tmp_path, name):
    split = {"devices": ["lazy:0", "lazy:1", "lazy:2"], "blocks_without_checkpointing": [1, 1, 1]}
    train = {"steps": 3, "batch_size": 1, "seed": 3, "gradient_accumulation_steps": 2}
    seen = []
    straight = _run(_job(tmp_path, "straight", name, split=split, train=train), on_event=seen.append)
    loading = next(event.values for event in seen if event.values.get("name") == "loading")
    assert loading["placement"].endswith("blocks divided among lazy:0, lazy:1, lazy:2")
    steps = []
    job = _job(tmp_path, "stopped", name, split=split, train=train)
    stopped = _run(job, on_event=steps.append, should_stop=lambda: any(e.kind == "step" for e in steps))
    assert stopped.step == 1
    # "auto" keeps what the run began with
    resumed = _run(dataclasses.replace(job, parallel=ParallelConfig(strategy="auto")), resume=True)
    assert resumed.losses == straight.losses
    assert resumed.lora_path.read_bytes() == straight.lora_path.read_bytes()


def test_a_run_of_an_earlier_version_goes_on_in_the_unequal_shares_it_began_in(tmp_path, monkeypatch):
    """Even shares are another order of sums."""
    train = {"steps": 2, "batch_size": 1, "seed": 3}
    with monkeypatch.context() as patch:
        plan = place_by_size.plan_shards
        patch.setattr(place_by_size, "plan_shards", lambda *args: dataclasses.replace(plan(*args), shares=(3, 1)))
        straight = _run(_job(tmp_path, "straight", "wan", train=train))
        steps: list = []
        job = _job(tmp_path, "stopped", "wan", train=train)
        assert _run(job, on_event=steps.append, should_stop=lambda: any(e.kind == "step" for e in steps)).step == 1
    resumed = _run(job, resume=True)
    assert resumed.losses == straight.losses
    assert resumed.lora_path.read_bytes() == straight.lora_path.read_bytes()
    even = _run(_job(tmp_path, "even", "wan", train=train))
    assert even.lora_path.read_bytes() != straight.lora_path.read_bytes()


@pytest.mark.parametrize(("first", "second"), [("tensor", "none"), ("none", "tensor"), ("tensor", "data")])
def test_a_run_is_resumed_as_it_began_or_not_at_all(tmp_path, first, second):
    train = {"steps": 2, "batch_size": 1, "gradient_accumulation_steps": 2}
    job = _job(tmp_path, "run", parallel={"strategy": first}, train=train)
    steps = []
    _run(job, on_event=steps.append, should_stop=lambda: any(e.kind == "step" for e in steps))
    with pytest.raises(ValueError, match="would not be the same run"):
        _run(dataclasses.replace(job, parallel=ParallelConfig(strategy=second)), resume=True)


def test_the_lora_begins_with_the_values_of_one_card(tmp_path):
    """Drawn whole, and sliced then."""
    train = {"steps": 1, "batch_size": 1, "seed": 3}
    optimizer = {"learning_rate": 1e-10, "weight_decay": 0.0}
    one, two = (
        _run(_job(tmp_path, folder, train=train, optimizer=optimizer, split={"devices": devices}, parallel=parallel))
        for folder, devices, parallel in (
            ("one", ["lazy:0"], {"strategy": "none"}),
            ("two", ["lazy:0", "lazy:1", "lazy:2"], {"strategy": "tensor"}),
        )
    )
    found, expected = load_file(two.lora_path), load_file(one.lora_path)
    downs = [key for key in expected if "down" in key or "lora_A" in key]
    assert downs and all(torch.allclose(found[key], expected[key], rtol=0, atol=1e-8) for key in downs)


@pytest.mark.parametrize("devices", [["lazy:0"], ["lazy:0", "cpu"]])
def test_where_blocks_cannot_be_divided_a_warning_says_so(tmp_path, caplog, devices):
    with emulated_cards():
        plan = check_job(_job(tmp_path, "run", split={"devices": devices}))
    assert plan.execution.strategy == "none" and plan.placement.shards == () and "left out" in caplog.text


def test_what_is_checked_is_what_the_cards_get(tmp_path):
    with emulated_cards():
        plan = check_job(_job(tmp_path, "run"))
    assert plan.execution.strategy == "tensor" and plan.placement.shards == CARDS[:2]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"split": {"balance": "manual", "split_at": [2]}}, "says where to cut the model"),
        ({"split": {"offloaded_blocks": [1, 1]}}, "each device holds a share of every block"),
        ({"split": {"blocks_without_checkpointing": [0, 1]}}, "give each the same number"),
        ({"split": {"blocks_without_checkpointing": [50, 50]}}, "asks 50 blocks of lazy:0"),
        ({"split": {"memory_limit_gb": [1.0, 1e-6]}}, "of weights on lazy:1, which may hold 0.00 GB"),
        ({"lora": {"dropout": 0.1}}, "set it to 0"),
        ({"lora": {"dora": True}}, "set it to false"),
        ({"model": {"quantize": "int8-compute", "rotation": 64}}, "use model.rotation = 16"),
    ],
)
def test_what_contradicts_it_is_refused_before_anything_is_loaded(tmp_path, sections, message):
    sections["split"] = {"devices": ["lazy:0", "lazy:1"], **sections.get("split", {})}
    with emulated_cards(), pytest.raises(ValueError, match=message):
        check_job(_job(tmp_path, "run", **sections))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({}, r'strategy = "tokens" was asked for, but .* the tokens of diffusers'),
        ({"blocks_without_checkpointing": [0, 1]}, "give each the same number"),
        ({"offloaded_blocks": [1, 1]}, 'strategy = "tokens" puts the whole model'),
        ({"balance": "manual", "split_at": [2]}, "says where to cut the model"),
    ],
)
def test_what_tokens_cannot_do_is_refused_before_anything_is_loaded(tmp_path, split, message):
    split = {"devices": ["lazy:0", "lazy:1"], **split}
    with emulated_cards(), pytest.raises(ValueError, match=message):
        check_job(_job(tmp_path, "run", split=split, parallel={"strategy": "tokens"}))


def test_more_cards_than_heads_are_refused_with_how_many_would_do(tmp_path):
    devices = [f"lazy:{index}" for index in range(5)]
    with (
        emulated_cards(5),
        pytest.raises(ValueError, match="4 heads .* cannot be divided among 5 devices; 4 devices at"),
    ):
        check_job(_job(tmp_path, "run", split={"devices": devices}))


def test_compiling_is_left_out_with_a_word(tmp_path, caplog):
    train = {"steps": 1, "batch_size": 1, "compile": "auto"}
    with emulated_cards():
        plan = check_job(_job(tmp_path, "run", train=train))
    assert plan.execution.compiled_shapes is None
    assert "blocks are not compiled" in caplog.text


def test_block_inputs_may_wait_on_the_host(tmp_path):
    plain = _run(_job(tmp_path, "plain"))
    train = {"steps": 2, "batch_size": 1, "seed": 3, "offload_activations": "on"}
    assert _run(_job(tmp_path, "offloaded", train=train)).losses == plain.losses
