"""How far an output is off where cards exchange activations in 8 bits, beside what 8-bit weights cost.

    python benchmarks/exchange_error.py [--width 3072] [--heads 24] [--rows 256] [--blocks 4] [--ranks 2] [--out FILE]

Blocks as Wan's and FLUX's at their width, random weights, float32 on the CPU; under two minutes. "outliers" has what
trained models have and random ones lack: a few channels of the stream, and of the keys, that are far larger.
Errors are relative, of the output of all blocks against one card's; "units" divides them by that of int8 weights.

- "weights int8": each weight rounded to 8 bits with a scale per output feature. "weights fp8": to e4m3, one scale.
- "tokens": keys and values travel in 8 bits. "without means": keys with what their channels have in common.
- "tensor": partial sums travel in 8 bits, a scale per 128 numbers. "scale per row": one for each row.
"""

from __future__ import annotations

import argparse
import copy
import functools
import runpy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.families.token_plan import BlockRows, TokenPlan  # noqa: E402
from devicebridge.parallel.local import collectives, heads  # noqa: E402
from devicebridge.parallel.local.collectives import Collective  # noqa: E402
from devicebridge.parallel.local.tokens import TokenParallel  # noqa: E402
from devicebridge.parallel.transfer import Tensors  # noqa: E402
from provenance import describe_run, print_or_write, say  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

CPU = torch.device("cpu")
PLAN = TokenPlan({"blocks": BlockRows("x=x@1", "=x")})
Attend = Callable[..., torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *, skip_reshape: bool) -> torch.Tensor:
    """As ComfyUI's functions. [batch, heads, tokens, width] in, [batch, tokens, heads * width] out"""
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def on_one_card(func: Attend, *args: Any, **kwargs: Any) -> torch.Tensor:
    return func(*args, **kwargs)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.of_queries, self.of_keys = (nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(attend(attention, self.of_queries(q), self.of_keys(k), v, self.heads, skip_reshape=True))
        return x + self.down(F.gelu(self.up(F.layer_norm(x, x.shape[-1:])), approximate="tanh"))


class Blocks(nn.Module):
    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))

    def forward(self, x: torch.Tensor, attend: Attend = on_one_card) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, attend)
        return x


def make_model(width: int, heads: int, blocks: int, *, has_outliers: bool) -> Blocks:
    torch.manual_seed(0)
    model = Blocks(width, heads, blocks).requires_grad_(False)
    if has_outliers:
        for block in model.blocks:
            for layer in (block.proj, block.down):
                layer.weight[:: width // 6] *= 30  # six channels of the stream
            block.of_keys.weight[::32] *= 8  # four of each head
            block.qkv.bias[width : 2 * width] = 2 * torch.randn(width)
    return model


@contextmanager
def rounded_weights(model: nn.Module, how: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    kept = [each.weight.data for each in linears]
    for each in linears:
        each.weight.data = how(each.weight.data)
    try:
        yield
    finally:
        for each, weight in zip(linears, kept, strict=True):
            each.weight.data = weight


def to_int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def to_fp8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def hand_over(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
    return tensors


def by_tokens(model: Blocks, x: torch.Tensor, ranks: int, exchange: Any) -> torch.Tensor:
    models = [copy.deepcopy(model, {id(each): each for each in model.parameters()}) for _ in range(ranks)]
    rows = TokenParallel(models, [CPU] * ranks, PLAN, [1] * ranks, hand_over, 4, exchange)
    rows.attach()
    return rows.run([functools.partial(each, x, rows.attend) for each in models])[0]


class Summed(nn.Module):
    """A row-parallel linear: every rank has some of its features and adds up the partial sums of all."""

    def __init__(self, linear: nn.Linear, ranks: int, exchange: Any) -> None:
        super().__init__()
        self.linear, self.ranks, self.exchange = linear, ranks, exchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group, sums = Collective(self.ranks, hand_over, self.exchange), [x] * self.ranks
        pairs = zip(x.chunk(self.ranks, -1), self.linear.weight.chunk(self.ranks, 1), strict=True)
        parts = [F.linear(some, weight) for some, weight in pairs]

        def reduce(rank: int) -> None:
            with torch.inference_mode():
                sums[rank] = group.all_reduce(rank, "sum", parts[rank])

        threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(self.ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert all(torch.equal(each, sums[0]) for each in sums)
        return sums[0] + self.linear.bias


def by_tensor(model: Blocks, x: torch.Tensor, ranks: int, exchange: Any) -> torch.Tensor:
    divided = copy.deepcopy(model, {id(each): each for each in model.parameters()})
    for block in divided.blocks:
        block.proj, block.down = (Summed(each, ranks, exchange) for each in (block.proj, block.down))
    return divided(x)


def measure(model: Blocks, x: torch.Tensor, ranks: int) -> dict[str, float]:
    reference = model(x)

    def error(found: torch.Tensor) -> float:
        return float((found - reference).norm() / reference.norm())

    found = {}
    for name, how in {"int8": to_int8, "fp8": to_fp8}.items():
        with rounded_weights(model, how):
            found[f"weights {name}"] = error(model(x))
    found["tokens, full"] = error(by_tokens(model, x, ranks, "full"))
    found["tokens"] = error(by_tokens(model, x, ranks, "8-bit"))

    def plain(tensor: torch.Tensor, run: int | None = None, mean_along: int | None = None) -> list[torch.Tensor]:
        zeros = [] if mean_along is None else [torch.zeros_like(tensor.mean(mean_along, keepdim=True))]
        return [*collectives.encode(tensor, run), *zeros]

    with mock.patch.object(heads, "encode", plain):
        found["tokens, without means"] = error(by_tokens(model, x, ranks, "8-bit"))
    found["tensor, full"] = error(by_tensor(model, x, ranks, "full"))
    found["tensor"] = error(by_tensor(model, x, ranks, "8-bit"))
    with mock.patch.object(collectives, "_RUN", x.shape[-1]):
        found["tensor, scale per row"] = error(by_tensor(model, x, ranks, "8-bit"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"width": 3072, "heads": 24, "rows": 256, "blocks": 4, "ranks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sizes = {name: getattr(given, name) for name in ("width", "heads", "rows", "blocks", "ranks")}
    results: dict[str, Any] = {"setup": describe_run(), "sizes": sizes}
    x = torch.randn(1, given.rows, given.width, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for kind in ("random", "outliers"):
            model = make_model(given.width, given.heads, given.blocks, has_outliers=kind == "outliers")
            found = measure(model, x, given.ranks)
            units = {name: float(f"{error / found['weights int8']:.3g}") for name, error in found.items()}
            results[kind] = {"error": {name: float(f"{error:.3g}") for name, error in found.items()}, "units": units}
            say(f"{kind}: {results[kind]}")
    print_or_write(results, given.out)


if __name__ == "__main__":
    main()
