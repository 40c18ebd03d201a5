"""What keeps one of ComfyUI's own models out of a pipeline."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from devicebridge.checkpoints.checkpoint import make_published_info
from devicebridge.checkpoints.load import make_empty_transformer
from devicebridge.families.comfy.native import NativeModel
from devicebridge.families.comfy.registry import NATIVE_MODELS
from devicebridge.jobs import read_job
from devicebridge.jobs.checked_job import ReadJob, Subject
from devicebridge.jobs.resolve import Machine, resolve, why_no_forecast, why_no_stages
from devicebridge.parallel.local.tokens import HERE, RowsError
from devicebridge.planning.cards import parse_cards
from devicebridge.planning.question import make_square
from devicebridge.tests.emulated import CARDS, emulated_cards
from devicebridge.tests.plans import make_plan_job
from devicebridge.tests.token_cases import PLAN, WHOLE_TEXT, make_toy
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
    assert all(why_no_forecast(row) for row in NATIVE_MODELS if row.hooks_children)


def test_a_unet_is_split_by_size_and_no_pipeline_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    """Of a job that leaves everything open, whose microbatches others put into a pipeline."""
    info = make_published_info("flux2-klein-4b")
    assert info.variant is not None
    job = make_plan_job(model={"quantize": "auto"}, train={"gradient_accumulation_steps": 4})
    found = []
    lists = "transformer_blocks", "single_transformer_blocks"
    row = dataclasses.replace(ROWS["UNetModel"], block_lists=lists, optional=())
    for native in (None, row):
        family = dataclasses.replace(info.family, native=native)
        own = dataclasses.replace(info, family=family)
        subject = Subject(own, info.variant, make_empty_transformer(info), (512, 512, 1), frozenset())
        with emulated_cards():
            cards = [dataclasses.replace(c, device=d) for c, d in zip(parse_cards("2x24GB"), CARDS, strict=False)]
            found.append(resolve(job, subject, Machine(CARDS[:2], tuple(cards))))
    plain, unet = found
    assert plain.training is not None and plain.execution.strategy != "none"
    assert unet.training is None and unet.execution.strategy == "none"
    assert len(set(unet.execution.placement.devices)) == 2
    assert len([record for record in caplog.records if record.name == "devicebridge.jobs.resolve"]) == 1


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("LTXVModel", ("scale_shift_table", "unknown"), r"weights of its own \(unknown\) behind its blocks"),
        ("LTXVModel", ("scale_shift_table",), r"has no _prepare_timestep, by which its last card"),
        ("AceStepConditionGenerationModel", ("null_condition_emb",), r"has no decoder.time_embed, by which"),
        ("NextDiT", ("x_pad_token", "unknown"), r"weights of its own \(unknown\)"),
        ("UNetModel", (), "needs its main device"), ("Chroma", (), "needs its main device"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("strategy", "error", "kept"),
    [
        ("tokens", None, {"a": PLAN}), ("tokens", RowsError("of others", WHOLE_TEXT), {"b": WHOLE_TEXT}),
        ("tokens", RowsError("of neither"), {"a": PLAN, "b": WHOLE_TEXT}), ("none", None, {"a": PLAN, "b": WHOLE_TEXT}),
    ],
)  # fmt: skip
def test_of_rows_that_were_derived_a_run_takes_those_of_its_own_inputs(strategy, error, kept, monkeypatch):
    """The forward, as ComfyUI's class says which rows its inputs have; the first ones would be tried for all."""
    info, begun = make_published_info("flux2-klein-4b"), []
    rows = NativeModel("toy.Toy", ("blocks",), (), "a toy", derived_rows={"a": PLAN, "b": WHOLE_TEXT})
    own = dataclasses.replace(info, family=dataclasses.replace(info.family, native=rows))
    job = make_plan_job(parallel={"strategy": strategy})
    assert info.variant is not None
    square = make_square(job.data, info.variant, info.family.latent_of(info.variant))

    def forward(*given: Any) -> None:
        begun.append(HERE.parallel and HERE.parallel.plan)
        if error is not None:
            raise error

    monkeypatch.setattr(read_job, "forward_on_meta", forward)
    monkeypatch.setattr(read_job, "make_empty_transformer", lambda info: make_toy().to("meta"))
    found = read_job._of_own_rows(ReadJob(job, own, info.variant, nn.Module(), (), (square,)))
    native = found.info.family.native
    assert native is not None and native.derived_rows == kept and begun == [PLAN] * (strategy == "tokens")
