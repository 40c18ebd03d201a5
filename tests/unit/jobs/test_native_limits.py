"""What keeps one of ComfyUI's own models out of a pipeline."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from devicebridge.families.comfy.registry import NATIVE_MODELS
from devicebridge.jobs.native_limits import why_no_forecast, why_no_stages
from torch import nn

ROWS = {row.class_name: row for row in NATIVE_MODELS}


def _model(*names: str) -> nn.Module:
    model = nn.Module()
    for name in names:
        model.register_parameter(name, nn.Parameter(torch.zeros(1)))
    model.register_parameter("left_out", None)
    return model


def test_weights_that_are_read_before_the_blocks_do_not_matter() -> None:
    assert not why_no_stages(ROWS["NextDiT"], _model("x_pad_token", "cap_pad_token"))
    assert not why_no_stages(ROWS["WanModel"], _model())
    assert not why_no_stages(None, _model("scale_shift_table"))


def test_blocks_in_lists_inside_others_have_no_forecast() -> None:
    """A dry run would look for a list of the model's by a name with a point."""
    assert "lists inside other lists" in why_no_forecast(ROWS["StageC"])
    assert not why_no_forecast(ROWS["Flux"]) and not why_no_forecast(None)


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("LTXVModel", ("scale_shift_table", "unknown"), r"weights of its own \(unknown\) behind its blocks"),
        ("LTXVModel", ("scale_shift_table",), r"has no _prepare_timestep, by which its last card"),
        ("AceStepConditionGenerationModel", ("null_condition_emb",), r"has no decoder.time_embed, by which"),
        ("NextDiT", ("x_pad_token", "unknown"), r"weights of its own \(unknown\)"),
        ("UNetModel", (), "needs its home card"),
        ("Chroma", (), "needs its home card"),
    ],
)
def test_others_and_work_at_home_do(name: str, own: tuple[str, ...], words: str) -> None:
    assert re.search(words, why_no_stages(ROWS[name], _model(*own)))


def test_a_row_names_only_what_it_knows() -> None:
    row = dataclasses.replace(ROWS["NextDiT"], front_parameters=())
    assert "x_pad_token" in why_no_stages(row, _model("x_pad_token"))


def test_weights_of_the_tail_and_what_it_is_given_do_not_matter() -> None:
    model: Any = _model("scale_shift_table")
    model._prepare_timestep = model._process_output = lambda: None
    assert not why_no_stages(ROWS["LTXVModel"], model)
    audio = _model("null_condition_emb")
    audio.decoder = decoder = _model("scale_shift_table")
    decoder.time_embed, decoder.time_embed_r = nn.Identity(), nn.Identity()
    assert not why_no_stages(ROWS["AceStepConditionGenerationModel"], audio)
    decoder.register_parameter("unknown", nn.Parameter(torch.zeros(1)))
    assert r"(decoder.unknown)" in why_no_stages(ROWS["AceStepConditionGenerationModel"], audio)
