"""Training does without cuDNN's attention, whoever comes and goes."""

import pytest
import torch
from devicebridge.jobs.job import run_job
from devicebridge.patches.attention import sound_attention
from devicebridge.tests.tiny_pipeline import make_tiny_job
from devicebridge.training.loop import Trainer
from torch.nn.attention import SDPBackend, sdpa_kernel


@pytest.fixture(params=[True, False])
def is_allowed(request):
    found = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(found)


def test_torch_does_without_cudnn_inside_and_is_as_before_afterwards(is_allowed):
    allowed = torch.backends.cuda.cudnn_sdp_enabled
    one, other = sound_attention(), sound_attention()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)  # not in the order they came
    assert not allowed()
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):  # as ComfyUI's attention does
        assert not allowed() and torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    other.__exit__(None, None, None)
    assert allowed() is is_allowed
    with pytest.raises(ZeroDivisionError), sound_attention():
        assert not allowed()
        raise ZeroDivisionError
    assert allowed() is is_allowed


def test_steps_and_evaluations_do_without_cudnn(tmp_path, monkeypatch):
    """What has no graph makes no gradients, but must be computed by the kernel that training has."""
    inside, was_allowed = [], {"train_step": [], "evaluate": []}
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(*args, **kwargs):
        for name in inside:
            was_allowed[name].append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    def noted(name, method):
        def call(self, *args):
            inside.append(name)
            try:
                return method(self, *args)
            finally:
                inside.pop()

        return call

    for name in was_allowed:
        monkeypatch.setattr(Trainer, name, noted(name, getattr(Trainer, name)))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    found = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        run_job(make_tiny_job(tmp_path, "flux1", train={"steps": 1}))
    finally:
        torch.backends.cuda.enable_cudnn_sdp(found)
    assert all(was_allowed.values()) and not any(sum(was_allowed.values(), []))
