"""Training must not get cuDNN's attention, whose gradient may be wrong; on a CPU that is a setting to watch."""

from __future__ import annotations

import pytest
import torch
from devicebridge.patches.attention import sound_attention
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.job import run_job
from devicebridge.training.loop import Trainer


@pytest.fixture(params=[True, False], ids=["cudnn allowed", "cudnn forbidden"])
def before(request):
    """What this process allows, before and after."""
    found = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(found)


def test_the_setting_is_what_it_was_afterwards(before):
    with sound_attention():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() is before
    with pytest.raises(ZeroDivisionError), sound_attention():
        raise ZeroDivisionError
    assert torch.backends.cuda.cudnn_sdp_enabled() is before


@pytest.fixture
def watched(monkeypatch):
    """What cuDNN's setting was at every call of attention in a step or an evaluation: (method, setting)."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    found, inside = [], []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        if inside:
            found.append((inside[-1], torch.backends.cuda.cudnn_sdp_enabled()))
        return attend(*args, **kwargs)

    def watch(name):
        method = getattr(Trainer, name)

        def call(self, *args):
            inside.append(name)
            try:
                return method(self, *args)
            finally:
                inside.pop()

        monkeypatch.setattr(Trainer, name, call)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    watch("train_step")
    watch("evaluate")
    return found


def test_no_forward_of_a_run_may_choose_it_and_everybody_else_may(tmp_path, watched):
    run_job(make_tiny_job(tmp_path, "flux1", train={"steps": 2}))
    assert {name for name, _ in watched} == {"train_step", "evaluate"}
    assert not any(is_allowed for _, is_allowed in watched)
    steps = sum(name == "train_step" for name, _ in watched)
    assert steps % 4 == 0 and steps > 4, "two steps, each block forwards twice: recomputed"
    assert torch.backends.cuda.cudnn_sdp_enabled()
