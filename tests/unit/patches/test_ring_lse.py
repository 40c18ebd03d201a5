"""The ring LSE fix where nothing needs fixing, and on a small module with the faults of diffusers 0.37 to 0.39."""

import importlib
import sys
from types import ModuleType
from typing import Any

import diffusers
import diffusers.models.attention_dispatch as installed
import pytest
import torch
from devicebridge.patches import ring_lse
from devicebridge.patches.ring_lse import apply_ring_lse_fix, remove_ring_lse_fix
from packaging.version import Version

# A ring over two halves of the keys in one process; the merge and its version test are what 0.37 does.
OLD_DISPATCH = """
import torch

def is_torch_version(operation, number):
    return tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 9)

class SeqAllToAllDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, input, scatter_id=2, gather_id=1):
        batch, tokens, heads, width = input.shape
        return input.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, grad, None, None

class TemplatedRingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, return_lse, forward_op, backward_op, config=None):
        prev_out = prev_lse = None
        for k, v in zip(key.chunk(2, 1), value.chunk(2, 1)):
            out, lse = forward_op(ctx, query, k, v)
            if is_torch_version("<", "2.9.0"):
                lse = lse.unsqueeze(-1)
            if prev_out is not None:
                out = prev_out - torch.sigmoid(lse - prev_lse) * (prev_out - out)
                lse = prev_lse - torch.nn.functional.logsigmoid(prev_lse - lse)
            prev_out, prev_lse = out, lse
        lse = lse.squeeze(-1)
        return (out, lse) if return_lse else out

class TemplatedRingAnythingAttention(TemplatedRingAttention):
    @staticmethod
    def forward(ctx, query, key, value, mask, return_lse, forward_op, backward_op, config=None):
        return TemplatedRingAttention.forward(ctx, query, key, value, return_lse, forward_op, backward_op, config)

def _templated_unified_attention(query, key, value, forward_op):
    out, lse = TemplatedRingAttention.apply(query, key, value, True, forward_op, None, None)
    if is_torch_version("<", "2.9.0"):
        lse = lse.unsqueeze(-1)
    lse = SeqAllToAllDim.apply(None, lse, 1, 2)
    lse = lse.squeeze(-1)
    return out, lse
"""


def attention(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output [B, S, N, H] and log-sum-exp [B, S, N], as `_native_flash` returns them."""
    scores = torch.einsum("bqnh,bknh->bnqk", query, key)
    return torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), value), scores.logsumexp(-1).transpose(1, 2)


def attention_with_trailing_dim(*args: Any) -> tuple[torch.Tensor, ...]:
    out, lse = attention(*args)
    return out, lse.unsqueeze(-1)


@pytest.fixture
def use_dispatch(tmp_path, monkeypatch):
    """Put a module of this source in the place of diffusers', with bookkeeping of its own."""
    monkeypatch.setattr(ring_lse, "_replaced", {})
    monkeypatch.setattr(ring_lse, "version", lambda package: "0.37.1")

    def use(source: str) -> Any:
        (tmp_path / "old_dispatch.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "old_dispatch", raising=False)
        module = importlib.import_module("old_dispatch")
        monkeypatch.setitem(sys.modules, "diffusers.models.attention_dispatch", module)
        return module

    return use


def snapshot(module: ModuleType) -> dict[str, int]:
    """Identity of every global of the module and of every attribute of its classes."""
    found = {name: id(value) for name, value in vars(module).items()}
    for cls in [value for value in vars(module).values() if isinstance(value, type)]:
        found |= {f"{cls.__module__}.{cls.__qualname__}.{name}": id(value) for name, value in vars(cls).items()}
    return found


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(2, 6, 3, 5) for _ in range(3)]


def test_changes_the_installed_diffusers_only_where_it_is_older_than_0_40_and_says_so():
    before = snapshot(installed)
    said = apply_ring_lse_fix()
    during = snapshot(installed)
    assert remove_ring_lse_fix() == (before != during) == (Version(diffusers.__version__) < Version("0.40"))
    assert not remove_ring_lse_fix()
    assert before == snapshot(installed)
    assert said.startswith("Active" if before != during else "Not needed")


@pytest.mark.parametrize("op", [attention, attention_with_trailing_dim])
@pytest.mark.parametrize("is_old_torch", [False, True])
def test_every_rank_of_lse_is_right_whatever_the_version_test_says(use_dispatch, qkv, op, is_old_torch):
    dispatch = use_dispatch(OLD_DISPATCH)
    dispatch.is_torch_version = lambda operation, number: is_old_torch
    expected_out, expected_lse = attention(None, *qkv)
    assert apply_ring_lse_fix().startswith("Active")
    for found_out, found_lse in (
        dispatch.TemplatedRingAttention.apply(*qkv, True, op, None, None),
        dispatch.TemplatedRingAnythingAttention.apply(*qkv, None, True, op, None, None),
        dispatch._templated_unified_attention(*qkv, op),
    ):
        torch.testing.assert_close(found_out, expected_out)
        torch.testing.assert_close(found_lse, expected_lse)
    remove_ring_lse_fix()


def test_removal_leaves_the_fault_as_it_was_and_tears_out_no_patch_on_top(use_dispatch, qkv):
    dispatch = use_dispatch(OLD_DISPATCH)
    dispatch.is_torch_version = lambda operation, number: False
    before = snapshot(dispatch)
    apply_ring_lse_fix()
    apply_ring_lse_fix()  # changes nothing more
    assert snapshot(dispatch) != before
    ours = vars(dispatch.TemplatedRingAttention)["apply"]
    dispatch.TemplatedRingAttention.apply = staticmethod(lambda *args: None)
    with pytest.raises(RuntimeError, match=r"TemplatedRingAttention.apply was replaced again"):
        remove_ring_lse_fix()
    dispatch.TemplatedRingAttention.apply = ours
    remove_ring_lse_fix()
    assert snapshot(dispatch) == before
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        dispatch.TemplatedRingAttention.apply(*qkv, True, attention, None, None)


def test_an_lse_of_the_wrong_shape_is_refused(use_dispatch, qkv):
    dispatch = use_dispatch(OLD_DISPATCH)

    def transposed(*args: Any) -> tuple[torch.Tensor, ...]:
        out, lse = attention(*args)
        return out, lse.transpose(1, 2)

    apply_ring_lse_fix()
    with pytest.raises(RuntimeError, match=r"shape \(2, 6, 3\).*returned \(2, 3, 6\)"):
        dispatch.TemplatedRingAttention.apply(*qkv, True, transposed, None, None)
    remove_ring_lse_fix()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("class SeqAllToAllDim", "class Renamed", pytest.raises(RuntimeError, match="SeqAllToAllDim")),
        ("mask, return_lse, forward_op", "mask, return_lse, op", pytest.raises(ValueError, match="forward_op")),
    ],
)
def test_a_diffusers_without_these_places_is_refused_and_left_alone(use_dispatch, old, new, error):
    dispatch = use_dispatch(OLD_DISPATCH.replace(old, new))
    before = snapshot(dispatch)
    with error:
        apply_ring_lse_fix()
    assert snapshot(dispatch) == before
