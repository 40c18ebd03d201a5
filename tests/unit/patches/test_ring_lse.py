"""The ring LSE fix where nothing needs fixing, and its bookkeeping on a small module with diffusers 0.37's fault.

What it does to real releases of diffusers is shown in tests/ranks/test_ring_lse.py.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import diffusers.models.attention_dispatch as installed
import pytest
import torch
from devicebridge.patches import ring_lse
from devicebridge.patches.ring_lse import apply_ring_lse_fix
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[3]

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


def load(folder: Path, source: str) -> ModuleType:
    path = folder / "old_dispatch.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("old_dispatch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def use_dispatch(tmp_path, monkeypatch):
    """Put a module of this source in the place of diffusers', with bookkeeping of its own."""
    monkeypatch.setattr(ring_lse, "_fix", ring_lse._SharedFix())

    def use(source: str) -> ModuleType:
        module = load(tmp_path, source)
        monkeypatch.setattr(ring_lse, "_import_dispatch", lambda: module)
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
    handle = apply_ring_lse_fix()
    during = snapshot(installed)
    handle.remove()
    handle.remove()
    assert before == snapshot(installed)
    is_old = Version(diffusers.__version__) < Version("0.40")
    assert handle.is_needed == is_old == (before != during)
    how = "by torch's version, not by the rank of the LSE," if is_old else "by the rank of the LSE"
    assert f"decides {how} in TemplatedRingAttention" in handle.reason


def test_torch_gives_the_trailing_dim_to_cudnn_only():
    """The registered shapes hold for every backend that implements the op: the fault is not ROCm's."""
    query = torch.empty(1, 3, 6, 8, device="meta", dtype=torch.bfloat16)  # [B, N, S, H]
    assert torch.ops.aten._scaled_dot_product_flash_attention(query, query, query)[1].shape == (1, 3, 6)
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention(query, query, query, None, True)
    assert cudnn[1].shape == (1, 3, 6, 1)


def test_importing_the_file_changes_nothing_and_does_not_import_diffusers():
    code = (
        "import importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('bootstrap', {str(ROOT / 'bootstrap.py')!r})\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module); module.load_pack()\n"
        "import devicebridge.patches.ring_lse\n"
        "sys.exit('diffusers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("op", [attention, attention_with_trailing_dim])
@pytest.mark.parametrize("is_old_torch", [False, True])
def test_every_rank_of_lse_is_right_whatever_the_version_test_says(use_dispatch, qkv, op, is_old_torch):
    dispatch = use_dispatch(OLD_DISPATCH)
    dispatch.is_torch_version = lambda operation, number: is_old_torch
    expected_out, expected_lse = attention(None, *qkv)
    handle = apply_ring_lse_fix()
    assert handle.is_needed
    for found_out, found_lse in (
        dispatch.TemplatedRingAttention.apply(*qkv, True, op, None, None),
        dispatch._templated_unified_attention(*qkv, op),
    ):
        torch.testing.assert_close(found_out, expected_out)
        torch.testing.assert_close(found_lse, expected_lse)
    handle.remove()


def test_removal_leaves_the_fault_as_it_was(use_dispatch, qkv):
    dispatch = use_dispatch(OLD_DISPATCH)
    dispatch.is_torch_version = lambda operation, number: False
    before = snapshot(dispatch)
    handle = apply_ring_lse_fix()
    assert snapshot(dispatch) != before
    handle.remove()
    assert snapshot(dispatch) == before
    with pytest.raises(RuntimeError, match="must match the size of tensor"):
        dispatch.TemplatedRingAttention.apply(*qkv, True, attention, None, None)


def test_the_fix_stays_until_its_last_holder_lets_go(use_dispatch):
    dispatch = use_dispatch(OLD_DISPATCH)
    before = snapshot(dispatch)
    first, second = apply_ring_lse_fix(), apply_ring_lse_fix()
    during = snapshot(dispatch)
    first.remove()
    first.remove()
    assert snapshot(dispatch) == during != before
    second.remove()
    assert snapshot(dispatch) == before


def test_threads_may_apply_and_remove_at_once(use_dispatch, qkv):
    dispatch = use_dispatch(OLD_DISPATCH)
    before = snapshot(dispatch)
    expected, _ = attention(None, *qkv)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            handle = apply_ring_lse_fix()
            found = dispatch.TemplatedRingAttention.apply(*qkv, False, attention, None, None)
            if not torch.allclose(found, expected, atol=1e-5):
                wrong.append(number)
            handle.remove()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert snapshot(dispatch) == before


def test_a_patch_on_top_is_not_torn_out(use_dispatch):
    dispatch = use_dispatch(OLD_DISPATCH)
    before = snapshot(dispatch)
    handle = apply_ring_lse_fix()
    ours = vars(dispatch.TemplatedRingAttention)["apply"]
    dispatch.TemplatedRingAttention.apply = staticmethod(lambda *args: None)
    with pytest.raises(RuntimeError, match=r"TemplatedRingAttention.apply was replaced again"):
        handle.remove()
    dispatch.TemplatedRingAttention.apply = ours
    handle.remove()
    assert snapshot(dispatch) == before


def test_gradients_pass_the_exchange(use_dispatch):
    dispatch = use_dispatch(OLD_DISPATCH)
    handle = apply_ring_lse_fix()
    lse = torch.randn(2, 6, 3, requires_grad=True)
    dispatch.SeqAllToAllDim.apply(None, lse, 1, 2).sum().backward()
    handle.remove()
    assert lse.grad is not None and lse.grad.shape == lse.shape


def test_an_lse_of_the_wrong_shape_is_refused(use_dispatch, qkv):
    dispatch = use_dispatch(OLD_DISPATCH)

    def transposed(*args: Any) -> tuple[torch.Tensor, ...]:
        out, lse = attention(*args)
        return out, lse.transpose(1, 2)

    handle = apply_ring_lse_fix()
    with pytest.raises(RuntimeError, match=r"shape \(2, 6, 3\).*returned \(2, 3, 6\)"):
        dispatch.TemplatedRingAttention.apply(*qkv, True, transposed, None, None)
    handle.remove()


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('is_torch_version("<", "2.9.0")', 'is_torch_version("<", "2.10.0")', "in a way this pack does not know"),
        ("lse = lse.unsqueeze(-1)", "lse = lse[..., None]", "in a way this pack does not know"),
        ("class SeqAllToAllDim", "class Renamed", "has no SeqAllToAllDim"),
    ],
)
def test_code_of_an_unknown_kind_is_refused_and_left_alone(use_dispatch, old, new, complaint):
    dispatch = use_dispatch(OLD_DISPATCH.replace(old, new))
    before = snapshot(dispatch)
    with pytest.raises(RuntimeError, match=complaint):
        apply_ring_lse_fix()
    assert snapshot(dispatch) == before
