"""Batches of cached samples: captions of one length are stacked, others are refused."""

from __future__ import annotations

import pytest
import torch
from devicebridge.training.batches import join_texts

pytestmark = pytest.mark.usefixtures("one_thread")


def _states(*lengths: int) -> list[dict[str, torch.Tensor]]:
    return [{"states": torch.randn(length, 4) + 9, "pooled": torch.randn(8)} for length in lengths]


def test_states_and_pooled_states_are_stacked() -> None:
    entries = _states(2, 2)
    joined = join_texts(entries)
    assert joined.keys() == {"states", "pooled"}
    for name, states in joined.items():
        assert torch.equal(states, torch.stack([entry[name] for entry in entries]))


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"states of one batch have lengths \[2, 3\].*--verify"):
        join_texts(_states(3, 2))
