"""Runs diffusers' own ring attention on CPU ranks and prints, as one line of JSON, how far it is from plain attention.

Started by test_ring_lse.py with the diffusers to examine first on PYTHONPATH. For every phase (before the fix, with it,
after removing it) and every case the result is {"out": largest absolute difference of the output over all ranks,
"lse": that of the log-sum-exp} or {"error": text}. Shapes: B batch, S tokens (all ranks), N heads, H head dim.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import diffusers.models.attention_dispatch as dispatch
import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

ROOT = Path(__file__).resolve().parent.parent.parent
PHASES = ("before", "fixed", "after")


@dataclass(frozen=True)
class Case:
    """tokens: S_local of each rank. has_trailing_dim: the kernel returns its LSE with one more dim, as cuDNN's does."""

    name: str
    tokens: tuple[int, ...]
    heads: int = 4
    head_dim: int = 16
    ulysses: int = 1
    anything: bool = False
    has_trailing_dim: bool = False
    is_old_torch: bool = False

    @property
    def world_size(self) -> int:
        return len(self.tokens)


CASES = (
    Case("ring", (24, 24)),
    Case("ring, sizes equal", (40, 40), heads=40, head_dim=40),  # [B, S, N] broadcasts against [B, S, N, H]
    Case("ring, trailing dim", (24, 24), has_trailing_dim=True),
    Case("ring, old torch", (24, 24), is_old_torch=True),
    Case("ring anything", (24, 17), anything=True),
    Case("ring anything, sizes equal", (40, 40), heads=40, head_dim=40, anything=True),
    Case("unified", (12, 12, 12, 12), ulysses=2),
)


def main() -> None:
    torch.set_num_threads(1)
    load_pack()
    results: dict[str, Any] = {phase: {} for phase in PHASES}
    for world_size in sorted({case.world_size for case in CASES}):
        found = run_ranks(world_size)
        for phase in PHASES:
            results[phase] |= found[phase]
        results["said"] = found["said"]
    results |= {"diffusers": diffusers.__version__, "torch": torch.__version__}
    sys.stdout.write(json.dumps(results) + "\n")


def load_pack() -> None:
    spec = importlib.util.spec_from_file_location("devicebridge_bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    bootstrap.load_pack()


def run_ranks(world_size: int) -> dict[str, Any]:
    """Results of rank 0. The ranks are forked, so that they share one import of diffusers."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run_rank, args=(rank, world_size, folder)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}")
        return json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))


def run_rank(rank: int, world_size: int, folder: str) -> None:
    from devicebridge.patches.ring_lse import apply_ring_lse_fix, remove_ring_lse_fix

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    results: dict[str, Any] = {"before": run_cases(rank, world_size)}
    results["said"] = apply_ring_lse_fix()
    results["fixed"] = run_cases(rank, world_size)
    remove_ring_lse_fix()
    results["after"] = run_cases(rank, world_size)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def run_cases(rank: int, world_size: int) -> dict[str, Any]:
    has_anything = hasattr(dispatch, "TemplatedRingAnythingAttention")
    cases = [case for case in CASES if case.world_size == world_size and (has_anything or not case.anything)]
    return {case.name: run_case(case, rank) for case in cases}


def run_case(case: Case, rank: int) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = difference_from_plain_attention(case, rank)
    except (RuntimeError, ValueError) as error:  # the same on every rank: the merge is local
        outcome = {"error": f"{type(error).__name__}: {error}"}
    outcomes: list[Any] = [None] * case.world_size
    dist.all_gather_object(outcomes, outcome)
    failed = [found for found in outcomes if "error" in found]
    return failed[0] if failed else {name: max(found[name] for found in outcomes) for name in outcome}


def difference_from_plain_attention(case: Case, rank: int) -> dict[str, float]:
    torch.manual_seed(0)
    shape = (1, sum(case.tokens), case.heads, case.head_dim)
    query, key, value = (torch.randn(shape) for _ in range(3))
    shards = [tensor.split(case.tokens, dim=1)[rank].contiguous() for tensor in (query, key, value)]
    config = make_parallel_config(case, rank)
    with flash_on_cpu(case):
        out, lse = dispatch._native_flash_attention(*shards, return_lse=True, _parallel_config=config)
    expected_out, expected_lse = (t.split(case.tokens, dim=1)[rank] for t in plain_attention(query, key, value))
    return {"out": (out - expected_out).abs().max().item(), "lse": (lse - expected_lse).abs().max().item()}


def plain_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k / sqrt(H)) v written out in float64; returns [B, S, N, H] and the log-sum-exp [B, S, N]."""
    query, key, value = (tensor.double() for tensor in (query, key, value))
    scores = torch.einsum("bqnh,bknh->bnqk", query, key) / query.shape[-1] ** 0.5
    out = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), value)
    return out.float(), scores.logsumexp(-1).transpose(1, 2).float()


def make_parallel_config(case: Case, rank: int) -> ParallelConfig:
    ring = case.world_size // case.ulysses
    options = {"ring_anything": True} if case.anything else {}
    context = ContextParallelConfig(ring_degree=ring, ulysses_degree=case.ulysses, **options)
    mesh = dist.device_mesh.init_device_mesh("cpu", (ring, case.ulysses), mesh_dim_names=("ring", "ulysses"))
    context.setup(rank, case.world_size, torch.device("cpu"), mesh)
    return ParallelConfig(context_parallel_config=context)


@contextlib.contextmanager
def flash_on_cpu(case: Case) -> Iterator[None]:
    """`_native_flash` calls an op that has no CPU kernel; give it the CPU's own, with as many results."""
    is_torch_version = dispatch.is_torch_version

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, options["dropout_p"], options["is_causal"], scale=options["scale"]
        )
        return out, lse.unsqueeze(-1) if case.has_trailing_dim else lse, None, None, 0, 0, None, None, None

    def is_version(operation: str, number: str) -> bool:
        return case.is_old_torch if (operation, number) == ("<", "2.9.0") else is_torch_version(operation, number)

    class Torch:
        ops = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_flash_attention=flash))

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with mock.patch.multiple(dispatch, torch=Torch(), is_torch_version=is_version):
        yield


if __name__ == "__main__":
    main()
