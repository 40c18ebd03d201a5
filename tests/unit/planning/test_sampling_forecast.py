"""What is said of sampling over cards that need not be here, against what was counted and measured elsewhere."""

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from devicebridge.checkpoints.checkpoint import make_published_info
from devicebridge.cli.main import main
from devicebridge.families.comfy.native import NativeModel
from devicebridge.planning import times as forecast_module
from devicebridge.planning.cards import MachineSpeed, parse_cards
from devicebridge.planning.times import CLIP_TOKENS, PICTURE_TOKENS, SampledModel, forecast_sampling


@functools.cache
def _model(name: str) -> SampledModel:
    info = make_published_info(name)
    assert info.variant is not None
    return SampledModel.of(info, info.variant)


@pytest.mark.parametrize(
    ("name", "size", "gigabytes", "parameters"),
    [
        ("flux1-dev", "1024x1024", 1.61, 11.9e9), ("flux2-dev", "1024x1024", 3.17, 32.2e9),
        ("wan2.1-t2v-14b", "832x480x33", 5.75, 14.3e9),
    ],
)  # fmt: skip
def test_keys_travel_as_was_measured_and_weights_are_those_of_the_files(name, size, gigabytes, parameters) -> None:
    found = forecast_sampling(_model(name), size, parse_cards("2x3090"))
    assert found.work.key_bytes / 2 == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert found.model.weight_bytes(16) == pytest.approx(2 * parameters, rel=0.02)
    assert found.model.weight_bytes(8) < 0.55 * found.model.weight_bytes(16)


def test_seconds_are_work_over_cards_and_bytes_over_the_link() -> None:
    """By hand, of FLUX.1: 11.8e9 parameters of blocks that see 4608 tokens but for modulation, and attention."""
    found = forecast_sampling(_model("flux1-dev"), "1024x1024", parse_cards("2x3090"))
    seen = 19 * (12 * 3072**2) + 38 * (12 * 3072**2)
    flops = 2 * 4608 * seen + 57 * 4 * 4608**2 * 3072
    one = flops / (0.8 * 71e12 * 0.46 / 0.66)
    seconds = found.ways().seconds(1)
    assert found.one_card(1) == pytest.approx(one, rel=0.01)
    assert seconds.blocks == pytest.approx(one, rel=0.02)
    assert seconds.tokens == pytest.approx(one / 2 + 1.61e9 / 12e9, rel=0.01)
    assert found.taken(8) == "tokens"


def test_a_card_without_room_for_all_weights_is_told() -> None:
    found = forecast_sampling(_model("wan2.1-t2v-14b"), "832x480x33", parse_cards("2x3060"))
    assert found.taken(8) == "tensor"  # 14.5 GB are too many for 12 GiB, and 7.5 GB are not
    missing = 28.58 - 2 * (12 * 1.073741824 - 1.7)
    assert found.taken(16) == "blocks" and f"; {missing:.3g} GB that do not fit are streamed" in found.verdict(16)
    assert "streamed" not in found.verdict(8)
    rows = [line.split("  ")[0] for line in found.describe().splitlines()]
    assert rows[-4:] == ["one card", "blocks", "tensor", "tokens"]


def test_unlike_cards_share_tokens_by_speed_and_the_fastest_alone_is_the_measure() -> None:
    found = forecast_sampling(_model("flux1-dev"), "1024x1024", parse_cards("5090,4090"))
    alone = forecast_sampling(_model("flux1-dev"), "1024x1024", parse_cards("5090"))
    assert found.one_card(1) == pytest.approx(alone.one_card(1))
    share = 209.5 / (209.5 + 165.2)
    travelling = share * found.work.key_bytes / 12e9  # the faster one sends more
    expected = 1.06 * share * found.one_card(1) + travelling / 2  # by groups of heads, which hide half of it
    assert found.ways().seconds(1).tokens == pytest.approx(expected)
    assert found.counts == (1,)
    assert len(alone.describe().splitlines()) == 6


def test_cards_that_are_here_go_by_what_was_measured(monkeypatch) -> None:
    monkeypatch.setattr(forecast_module, "machine_speed", lambda devices: MachineSpeed((1e12, 1e12), 1e9, "2026-11-28"))
    cards = [replace(card, has_context=True) for card in parse_cards("2x3090")]
    found = forecast_sampling(_model("flux1-dev"), "512x512", cards)
    assert found.is_measured and found.one_card(1) == pytest.approx(found.work.flops / 0.8e12)
    assert "measured" in found.describe() and found.num_tokens == (1024, 512)


FLUX1 = ("plan", "--model", "flux1-dev", "--sample")


def test_the_command_says_the_verdict_first(capsys) -> None:
    assert main([*FLUX1, "1024x1024", "--cards", "2x3090"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("8-bit file: way auto takes tokens, about 1.1 s per step, 1.7 times one card")
    assert "forecast" in lines[2]
    assert main([*FLUX1, "1024x1024", "--cards", "2x3090", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["files"]["8"]["taken"] == "tokens" and found["is_measured"] is False
    assert set(found["files"]["8"]["seconds"]) == {"blocks", "tensor", "tokens"}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("big",), "1024x1024"), (("1024x1024x33",), "x33"), (("4x1024",), "16 pixels"),
        (("1024x1024", "--frames", "5"), "--frames"), (("1024x1024", "job.toml"), "job.toml"),
        (("1024x1024", "--cards", "2x7GB"), "7 GB"), (("1024x1024", "--model", "nothing"), "nothing"),
        (("1024x1024", "--cards", "24GB@1,24GB@0.5"), "24GB@1,24GB@0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_forecast_is_refused(arguments, word, capsys) -> None:
    cards = () if "--cards" in arguments else ("--cards", "2x3090")
    assert main([*FLUX1, *arguments, *cards]) == 2
    assert word in capsys.readouterr().err


def test_the_way_is_that_of_the_usual_size_and_the_seconds_are_of_the_asked_one() -> None:
    """A split is made before anybody knows the size. Of a large picture tokens gain too little here."""
    cards = parse_cards("2x3090")
    usual = forecast_sampling(_model("flux1-dev"), "1024x1024", cards)
    large = forecast_sampling(_model("flux1-dev"), "2048x2048", cards)
    assert large.ways(8).fastest(large.counts) != large.taken(8) == usual.taken(8)
    taken, seconds = large.taken(8), large.values()["files"]["8"]["seconds"]
    assert f"takes {taken}, about {seconds[taken][1]:.2g} s" in large.verdict(8)
    clip = forecast_sampling(_model("wan2.1-t2v-14b"), "832x480x33", cards)
    assert (usual.num_tokens[0], clip.num_tokens[0]) == (PICTURE_TOKENS, CLIP_TOKENS)


@pytest.mark.parametrize("remembers", [(), ("cache",)])
def test_whole_conditionings_are_dealt_where_a_split_deals_them(remembers) -> None:
    model = _model("wan2.1-t2v-14b")
    native = NativeModel("wan.Wan", ("blocks",), (), "a note", remembers=remembers)
    other = replace(model, family=replace(model.family, native=native))
    found = forecast_sampling(other, "832x480x33", parse_cards("2x4090"))
    one, two = (found.ways().seconds(count).tokens for count in (1, 2))
    assert two == pytest.approx(2 * one if remembers else found.one_card(1))


def test_a_card_that_is_a_guess_is_told_and_one_card_without_room_too() -> None:
    named, guessed = (
        forecast_sampling(_model("wan2.1-t2v-14b"), "832x480x33", parse_cards(cards)) for cards in ("2x4090", "2x24GB")
    )
    assert "assumed" not in named.describe() and "RTX 4090, assumed from 24 GB" in guessed.describe()
    assert "assumed" in guessed.values()["cards"][0]
    (row,) = (line for line in named.describe().splitlines() if line.startswith("one card"))
    assert [cell.strip() for cell in row.split("  ") if cell.strip()][-2:] == ["28.6 (no room)", "14.5"]
