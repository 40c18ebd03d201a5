"""Batches of cached samples: captions of several lengths get a mask, or are refused where nobody would read it."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.batches import join_texts
from devicebridge.training.events import EventLog
from devicebridge.training.job import cache_job, check_job
from devicebridge.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def _states(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [{"states": torch.randn(length, 4) + 9, "pooled": torch.randn(8)} for length in lengths]


def test_shorter_states_get_zeros_behind_and_a_mask_says_so() -> None:
    entries = _states(3, 1, 2)
    joined = join_texts(entries, {"states"})
    assert joined.keys() == {"states", "states_mask", "pooled"}
    assert joined["states_mask"].tolist() == [[True, True, True], [True, False, False], [True, True, False]]
    for row, mask, entry in zip(joined["states"], joined["states_mask"], entries, strict=True):
        assert torch.equal(row[mask], entry["states"]) and not row[~mask].any()
    assert torch.equal(joined["pooled"], torch.stack([entry["pooled"] for entry in entries]))


@pytest.mark.parametrize("varying", [(), ("states",)])
def test_equal_lengths_need_no_mask(varying: tuple[str, ...]) -> None:
    entries = _states(2, 2)
    joined = join_texts(entries, varying)
    assert joined.keys() == {"states", "pooled"} and torch.equal(joined["states"][1], entries[1]["states"])
    assert join_texts(entries[:1], varying).keys() == {"states", "pooled"}


def test_lengths_that_should_not_differ_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"states of one batch have lengths \[2, 3\].*--verify"):
        join_texts(_states(3, 2), {"other"})


def test_a_job_knows_which_of_its_encoders_make_states_as_long_as_the_caption(tmp_path: Path) -> None:
    job = make_tiny_job(tmp_path)
    (tmp_path / "data" / "image_1.txt").write_text("a longer caption than the others")
    plan = check_job(job)
    spec = dataclasses.replace(plan.variant.text_encoders[0], max_length=256, drop_padding=True)
    plan = dataclasses.replace(plan, variant=dataclasses.replace(plan.variant, text_encoders=(spec,)))
    with EventLog(tmp_path / "events") as events:
        data, _ = cache_job(plan, events)
    lengths = [len(data.load([index], [False]).text[spec.output][0]) for index in (0, 1)]
    assert lengths[1] == lengths[0] + len("a longer caption than the others") - len("picture 0")
    text = data.load([0, 1], [False, False]).text
    assert text[f"{spec.output}_mask"].sum(dim=1).tolist() == lengths
    with pytest.raises(RuntimeError, match="have lengths"):
        dataclasses.replace(data, varying=frozenset()).load([0, 1], [False, False])


def test_masks_stay_masks_on_their_way_to_the_model() -> None:
    trainer = types.SimpleNamespace(_home=torch.device("cpu"), _dtype=torch.bfloat16)
    states, mask = (Trainer._at_home(trainer, tensor) for tensor in (torch.ones(1, 2, 3), torch.ones(1, 2).bool()))  # type: ignore[arg-type]
    assert states.dtype == torch.bfloat16 and mask.dtype == torch.bool
