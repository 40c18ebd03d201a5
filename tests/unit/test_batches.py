"""Batches of cached samples: captions of several lengths get a mask, or are refused where nobody would read it."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.batches import LoadedBatch, join_texts
from devicebridge.training.encode_job import cache_job
from devicebridge.training.events import EventLog
from devicebridge.training.job import check_job
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
    seen: list[Mapping[str, torch.Tensor]] = []

    def make_inputs(
        latents: torch.Tensor, sigma: torch.Tensor, text: Mapping[str, torch.Tensor], guidance: None
    ) -> Any:
        seen.append(text)
        return {"states": latents}

    trainer = object.__new__(Trainer)
    trainer._home, trainer._dtype = torch.device("cpu"), torch.bfloat16
    trainer.schedule = types.SimpleNamespace(sigmas=lambda quantiles, num_tokens: quantiles.float())  # type: ignore[assignment]
    trainer.job = types.SimpleNamespace(objective=types.SimpleNamespace(guidance=None))  # type: ignore[assignment]
    trainer.variant = types.SimpleNamespace(training_guidance=None)  # type: ignore[assignment]
    read = types.SimpleNamespace(make_inputs=make_inputs, read_prediction=lambda output, latents: output)
    trainer.family = read  # type: ignore[assignment]
    trainer.model = lambda states, return_dict: (states,)  # type: ignore[assignment]
    text = join_texts(_states(3, 1), {"states"})
    noisy = trainer._noisy(LoadedBatch(torch.ones(2, 1, 1, 4, 4), text, None, 16), torch.ones(2) / 2, torch.Generator())
    assert trainer._loss(noisy, trainer.model, trainer._home).isfinite()
    assert {name: states.dtype for name, states in seen[0].items()} == {
        "states": torch.bfloat16,
        "states_mask": torch.bool,
        "pooled": torch.bfloat16,
    }
    assert torch.equal(seen[0]["states_mask"], text["states_mask"])
