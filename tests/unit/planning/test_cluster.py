"""What a cluster's plan calculates, against the same by hand."""

from __future__ import annotations

import json

import pytest
from devicebridge.cli.main import main
from devicebridge.config.job import save_job
from devicebridge.jobs.cluster import plan_cluster
from devicebridge.jobs.job import plan_job, run_job
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.cluster import (
    Cluster,
    Option,
    Part,
    Weights,
    best_of,
    describe_cluster,
    parse_link,
    with_copies,
    with_shares,
)
from devicebridge.tests.tiny_pipeline import make_tiny_job

GB = 10**9
PART = Part(needed=70 * GB, usable=24 * GB, step_s=2.0, lora_bytes=GB, setting="weights in full precision")
WEIGHTS = Weights([5 * GB] * 12, 4 * GB)  # 64 GB


def _cluster(nodes=2, link="25Gbit"):
    return Cluster(tuple(parse_cards("4x24GB")), nodes, parse_link(link), card_link=100 * GB)


@pytest.mark.parametrize(("text", "speed"), [("25Gbit", 3.125e9), ("100 gbit/s", 12.5e9), ("3.1GB", 3.1e9)])
def test_links_are_read_in_bits_and_bytes(text, speed):
    assert parse_link(text) == speed


@pytest.mark.parametrize("text", ["", "25", "0Gbit", "fast", "25Gbit2"])
def test_what_is_no_speed_is_refused(text):
    with pytest.raises(ValueError, match="is no speed"):
        parse_link(text)


def test_copies_exchange_gradients_once_a_step_over_the_slowest_link():
    found = with_copies(_cluster(), "data", 8, PART)
    assert found.exchange_s == pytest.approx(2 * GB * 7 / 8 / 3.125e9)
    assert found.step_s == pytest.approx(2.0 + found.exchange_s)
    alone = with_copies(_cluster(nodes=1), "data", 4, PART)
    assert alone.exchange_s == pytest.approx(2 * GB * 3 / 4 / 100e9)


def test_shares_hold_a_part_of_the_blocks_and_wait_for_what_computing_does_not_hide():
    found = with_shares(_cluster(), "hsdp", PART, WEIGHTS, microbatches=1)
    # a quarter of 64 GB, what is outside the blocks, two blocks, and what one card needs besides weights
    assert found.needed == 16 * GB + 4 * GB + 10 * GB + 6 * GB
    assert found.gathered_s == pytest.approx(2 * 60 * 3 / 4 / 100)  # shorter than the 2 s of computing
    assert found.exchange_s == pytest.approx(5 * 3 / 4 / 100 + 2 * 7 / 8 / 3.125)
    slow = with_shares(_cluster(), "fsdp", PART, WEIGHTS, microbatches=1)
    assert slow.needed == 8 * GB + 4 * GB + 10 * GB + 6 * GB
    assert slow.gathered_s == pytest.approx(2 * 60 * 7 / 8 / 3.125)
    assert slow.exchange_s == pytest.approx(slow.gathered_s - 2 + 5 * 7 / 8 / 3.125 + 2 * 7 / 8 / 3.125)
    assert slow.step_s is None and "28.0 GB of 24.0 GB" in slow.why


def test_the_fastest_that_fits_is_taken_and_the_text_says_that_it_is_a_calculation():
    options = [
        Option("data", 8, "", step_s=None, why="no"),
        Option("fsdp", 8, "", 1, 2, 3.0),
        Option("hsdp", 8, "", 1, 2, 2.0),
    ]
    assert best_of(options) == options[2] and best_of(options[:1]) is None
    text = describe_cluster(_cluster(), options, 4)
    assert "-> hsdp" in text and "a calculation and no measurement" in text and "data: no" in text
    assert "set train.gradient_accumulation_steps to 8" in text


def test_the_command_answers_for_machines_and_refuses_half_a_question(capsys):
    flags = ["plan", "--model", "flux2-klein-4b", "--quantize", "none", "--resolution", "256"]
    assert main([*flags, "--cards", "2x24GB", "--nodes", "2", "--link", "100Gbit", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["strategy"] for each in found["options"]} > {"data", "fsdp", "hsdp"}
    assert main([*flags, "--cards", "2x24GB", "--nodes", "2"]) == 2
    assert "--link 25Gbit" in capsys.readouterr().err
    assert main([*flags, "--cards", "2x24GB", "--nodes", "-1"]) == 2
    assert "--nodes -1 is no number of machines; give 1 to 1024" in capsys.readouterr().err
    assert main([*flags, "--cards", "2x24GB", "--nodes", "2", "--link", "100Gbit"]) == 0
    text = capsys.readouterr().out  # without a job file there is no setting of one to correct
    assert "4 microbatches in a step" in text and "gradient_accumulation_steps" not in text


def test_cards_that_cannot_multiply_in_a_scheme_are_planned_without_it(capsys):
    """RTX 3090 have no products in float8."""
    flags = ["plan", "--model", "flux2-klein-4b", "--resolution", "256", "--cards", "2x3090"]
    assert main([*flags, "--nodes", "2", "--link", "100Gbit", "--json"]) == 0
    options = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)["options"]}
    assert not any("fp8" in each["inside"] for each in options.values())
    assert main([*flags[:-1], "3090", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["estimated_step_s"]
    assert options["data"]["step_s"] - options["data"]["exchange_s"] == pytest.approx(alone)
    assert main([*flags, "--quantize", "fp8-compute"]) == 2
    assert "cuda:0 (RTX 3090) has no products in it; use int8-compute instead" in capsys.readouterr().err


def test_cards_that_share_the_weights_keep_as_many_blocks_as_the_smallest_has_room_for(capsys, tmp_path):
    found = {}
    flags = ["plan", "--model", "flux2-dev", "--quantize", "fp8-compute", "--resolution", "512", "--card-link", "100GB"]
    for cards in ("2x32GB", "24GB,32GB", "32GB,24GB"):
        assert main([*flags, "--cards", cards, "--json"]) == 0
        options = json.loads(capsys.readouterr().out)["options"]
        (found[cards],) = [each for each in options if each["strategy"] == "fsdp"]
    assert found["24GB,32GB"]["kept_blocks"] == found["32GB,24GB"]["kept_blocks"]
    (few,), (many,) = found["24GB,32GB"]["kept_blocks"], found["2x32GB"]["kept_blocks"]
    assert 0 <= few < many < 56
    assert found["2x32GB"]["needed"] <= 0.95 * 32 * GB and found["24GB,32GB"]["usable"] == 24 * GB
    assert main([*flags, "--cards", "2x32GB"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "  fsdp  " in line.replace("->", "  ")]
    assert f"  {many}  " in row


@pytest.mark.parametrize(
    ("sections", "kept"),
    [
        ({"split": {"blocks_without_checkpointing": [3]}}, [3]),
        ({"split": {"blocks_without_checkpointing": [0, 0]}}, [0]),
        ({"train": {"gradient_checkpointing": False}}, [4]),
        ({}, [4]),
    ],
)
def test_a_plan_keeps_the_blocks_that_a_job_asks_for(sections, kept, tmp_path):
    job = make_tiny_job(tmp_path, parallel={"strategy": "fsdp"}, model={"quantize": "none"}, **sections)
    (found,) = [each for each in plan_cluster(job, _two_cards()) if each.strategy == "fsdp"]
    assert list(found.kept_blocks) == kept


def test_cards_that_keep_different_numbers_are_no_plan_of_shares_and_one_of_a_split(tmp_path):
    job = make_tiny_job(tmp_path, split={"blocks_without_checkpointing": [1, 2]})
    options = {each.strategy: each for each in plan_cluster(job, _two_cards())}
    assert "= [1, 2] differs between cards" in options["fsdp"].why and options["fsdp"].step_s is None
    assert options["none in each machine"].kept_blocks == (1, 2)


def _two_cards():
    return Cluster(tuple(parse_cards("2x24GB")), 1, GB)


def test_a_job_whose_weights_are_shared_is_checked_and_planned_as_one(tmp_path, capsys):
    """By one process it is refused, with what its own number of processes makes true."""
    file, found = tmp_path / "job.toml", {}
    for processes in (1, 2):
        job = make_tiny_job(tmp_path, parallel={"strategy": "fsdp", "processes": processes})
        save_job(job, file)
        found[processes] = main(["check", str(file)]), capsys.readouterr()
        with pytest.raises(ValueError, match="compare both with devicebridge plan --cards"):
            plan_job(job, parse_cards("24GB"))
    assert (found[1][0], found[2][0]) == (2, 0)
    assert "set parallel.processes to 2 or more" in found[1][1].err
    assert "the weights are shared by 2 processes (fsdp)" in found[2][1].out
    with pytest.raises(ValueError, match='start the job with "devicebridge train"'):
        run_job(job)
    assert main(["plan", str(file), "--cards", "2x24GB"]) == 0
    assert "fsdp" in capsys.readouterr().out
    assert main(["plan", str(file)]) == 2
    assert "--cards 4x24GB" in capsys.readouterr().err


def test_gradients_travel_in_float32_whatever_the_lora_is_in(tmp_path):
    found = []
    for dtype in ("float32", "bfloat16"):
        job = make_tiny_job(tmp_path, lora={"dtype": dtype})
        found.append({each.strategy: each.exchange_s for each in plan_cluster(job, _cluster())})
    assert found[0]["data"] > 0 and found[0] == pytest.approx(found[1])
