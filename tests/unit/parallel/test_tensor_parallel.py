"""Blocks that several devices compute together, against the whole blocks, in float32 on the CPU. The same device stands
for every rank: what one hands another is a copy there, too. The toy blocks have what the described classes have: packed
linears, norms of heads and over all heads, gathered modulation, residuals in place."""

import contextlib
import copy
import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.families.tensor_plan import Divided, TensorPlan
from devicebridge.parallel.local import tensor_parallel
from devicebridge.parallel.local.shards import BlockShard, divide_block, find_plan, shares_of
from devicebridge.parallel.local.tensor_parallel import ForwardWorkers, TensorParallel
from devicebridge.parallel.local.workers import ThreadPool
from devicebridge.tests.placed import forward_of
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("no_thread_left")
CPU = torch.device("cpu")
HEADS, PER_HEAD, HIDDEN = 4, 8, 96
WIDTH = HEADS * PER_HEAD
NEAR = 1e-5

_QKV = ("heads", "kv_heads", "kv_heads")
PLANS = (
    TensorPlan(
        block="Fused",
        linears=(
            Divided("linear1", "column", (*_QKV, "features"), into="linear2"),
            Divided("linear2", "row", ("heads", "features")),
            Divided("modulation.lin", "gathered", ("features",)),
        ),
        num_heads="num_heads",
        num_kv_heads="num_kv_heads",
        width="hidden_size",
        attributes={"hidden_size": "heads", "mlp_hidden_dim_first": "linear1"},
    ),
    TensorPlan(
        block="Separate",
        linears=(
            *(Divided(f"attn.{name}", "column", ("heads",)) for name in "qkv"), Divided("attn.o", "row", ("heads",)),
            Divided("mlp.0", "column", ("features",), into="mlp.2"),
            Divided("mlp.2", "row", ("features",), sum_after="mlp"),
        ),
        num_heads="attn.num_heads",
        norms=("attn.norm_?",),
    ),
)  # fmt: skip


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Rows of all heads in and out."""
    q, k, v = (x.unflatten(-1, (n, -1)).transpose(1, 2) for x, n in ((q, heads), (k, kv_heads), (v, kv_heads)))
    k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Modulation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, vec: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.lin(F.silu(vec)).chunk(3, dim=-1)


class Fused(nn.Module):
    """As FLUX.2's single block: [q | k | v | gate | up] in, [attention | mlp] out, its input is written to."""

    def __init__(self, num_kv_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.hidden_size = HEADS, num_kv_heads, WIDTH
        self.mlp_hidden_dim_first = 2 * HIDDEN
        kv = num_kv_heads * PER_HEAD
        self.linear1 = nn.Linear(WIDTH, WIDTH + 2 * kv + 2 * HIDDEN, bias=False)
        self.linear2 = nn.Linear(WIDTH + HIDDEN, WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(PER_HEAD), nn.RMSNorm(PER_HEAD)
        self.modulation = Modulation()

    def forward(self, x, vec, transformer_options=None):
        shift, scale, gate = self.modulation(vec)
        kv = self.hidden_size // self.num_heads * self.num_kv_heads
        parts = [self.hidden_size, kv, kv, self.mlp_hidden_dim_first]
        q, k, v, mlp = self.linear1(x * (1 + scale) + shift).split(parts, dim=-1)
        q = self.norm_q(q.unflatten(-1, (self.num_heads, -1))).flatten(2)
        k = self.norm_k(k.unflatten(-1, (self.num_kv_heads, -1))).flatten(2)
        one, two = mlp.chunk(2, dim=-1)
        attention = _attention(q, k, v, self.num_heads, self.num_kv_heads)
        x += gate * self.linear2(torch.cat([attention, F.silu(one) * two], dim=-1))
        return x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(WIDTH, eps=1e-3), nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(x))
        return self.o(_attention(q, k, self.v(x), self.num_heads, self.num_heads))


class Separate(nn.Module):
    """As Wan's block: norms over all heads, an MLP whose second linear it may compute without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.width = WIDTH
        self.attn = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x, vec, transformer_options=None):
        x = x + self.attn(x) * vec
        return x + self.mlp(x)


class Model(nn.Module):
    """Code of other people may add to the stream between two blocks."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.front, self.tail = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, between: Callable[[int, torch.Tensor], Any] = lambda *_: None) -> torch.Tensor:
        x = self.front(x)
        vec = x.mean(dim=1, keepdim=True)
        options = {"sizes": [1, 2], "extra": vec * 2}
        for index, block in enumerate(self.blocks):
            x = block(x, vec=vec, transformer_options=options)
            between(index, x)
        return self.tail(x)


def make_model(*blocks: nn.Module) -> Model:
    torch.manual_seed(0)
    model = Model(blocks or (Separate(), Fused(), Fused(), Separate()))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)  # norms and biases as well
    return model.requires_grad_(False)


def divide(model, size, drop=lambda *_: False, plans=PLANS) -> TensorParallel:
    """The blocks divided in place. drop: name of a collective, rank -> whether this rank leaves it out."""
    shards = {}
    for block in model.blocks:  # type: ignore[union-attr]
        plan = find_plan(plans, block)
        assert plan is not None
        shares = shares_of(block, plan, size)
        own, *others = [
            divide_block(block if rank == 0 else copy.deepcopy(block), plan, shares, rank)
            for rank in sorted(range(size), reverse=True)  # the main device last: the others are made of whole blocks
        ][::-1]
        for rank, shard in enumerate((own, *others)):
            shard.collectives[:] = [each for each in shard.collectives if not drop(each.name, rank)]
        shards[own.block] = (own, others)
    parallel = TensorParallel([CPU] * size, shards, per_device=("memory",))
    parallel.attach()
    return parallel


def run(parallel: TensorParallel, model: Model, x: torch.Tensor, *between: Any) -> torch.Tensor:
    with torch.inference_mode(), forward_of(parallel):
        return model(x, *between)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("blocks", [(Fused,), (Separate,), (Separate, Fused, Fused, Separate)], ids=len)
def test_the_blocks_compute_what_the_whole_ones_do_and_the_same_bits_again(blocks, size, mode, x) -> None:
    """With 3 devices one has two of the four heads."""
    model = make_model(*(block() for block in blocks))
    with mode():
        expected = model(x)
    parallel = divide(model, size)
    outputs = []
    for _ in range(2):
        with mode(), forward_of(parallel):
            outputs.append(model(x))
    assert difference(outputs[0], expected) < NEAR and expected.std() > 0.1
    assert torch.equal(outputs[0], outputs[1])


def test_heads_that_share_keys_and_values_stay_together(x) -> None:
    model = make_model(Fused(num_kv_heads=2), Fused(num_kv_heads=2))
    expected = model(x)
    assert difference(run(divide(model, 2), model, x), expected) < NEAR
    block = Fused(num_kv_heads=2)
    with pytest.raises(ValueError, match=r"4 heads \(2 of keys and values\).*2 devices at most"):
        shares_of(block, PLANS[0], 3)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("make", [Fused, Separate])
def test_the_devices_hold_the_divided_weights_once(make, size) -> None:
    torch.manual_seed(0)
    block = make()
    plan = find_plan(PLANS, block)
    shares = shares_of(block, plan, size)
    shards = [divide_block(copy.deepcopy(block), plan, shares, rank) for rank in range(size)]
    for name, part in shards[0].slices.items():
        ranges = [each for shard in shards for each in shard.slices[name].ranges]
        rows = sorted(row for first, last in ranges for row in range(first, last))
        assert rows == list(range(block.get_parameter(name).shape[part.dim])), name
        for shard in shards:
            held = shard.block.get_parameter(name).data
            index = torch.tensor([row for first, last in shard.slices[name].ranges for row in range(first, last)])
            assert torch.equal(held + 0, block.get_parameter(name).index_select(part.dim, index)), name
    whole = {name for name, _ in block.named_parameters()} - set(shards[0].slices)
    for name in whole - {"linear2.bias", "attn.o.bias", "mlp.2.bias"}:
        assert all(torch.equal(shard.block.get_parameter(name), block.get_parameter(name)) for shard in shards)


def test_a_linear_of_other_parts_is_refused_by_name() -> None:
    block = Fused()
    block.linear2 = nn.Linear(WIDTH - 8, WIDTH)
    with pytest.raises(ValueError, match="cannot consist of heads, features"):
        divide_block(block, PLANS[0], shares_of(block, PLANS[0], 2), 0)
    block = Fused()
    block.linear2 = nn.Linear(WIDTH + 100, WIDTH)
    with pytest.raises(ValueError, match="linear1 has 192 features beside its heads, and linear2 takes 100"):
        divide_block(block, PLANS[0], shares_of(block, PLANS[0], 2), 0)
    other = Separate()
    other.attn.k = nn.Linear(WIDTH, WIDTH + 1)
    with pytest.raises(ValueError, match=r"attn\.k cannot be divided: 33 features are no multiple"):
        divide_block(other, PLANS[1], shares_of(other, PLANS[1], 2), 0)
    assert find_plan(PLANS, nn.Linear(1, 1)) is None
    with pytest.raises(ValueError, match=r"this Linear cannot be divided: it has no attn\.num_heads"):
        shares_of(nn.Linear(1, 1), PLANS[1], 2)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_residual_added_in_place_between_two_blocks_is_seen_by_all(mode, size, x) -> None:
    """As a ControlNet does; the devices' own copies of the stream are out of date then."""
    model, residual = make_model(), torch.full((WIDTH,), 0.7)

    def between(index: int, stream: torch.Tensor) -> None:
        if index < 3:
            stream[:, 2:] += residual

    with mode():
        plain, expected = model(x), model(x, between)
    parallel = divide(model, size)
    with mode(), forward_of(parallel):
        found = model(x, between)
    assert difference(found, expected) < NEAR < difference(plain, expected)


def test_a_stream_that_nobody_changed_is_not_copied_again(x, monkeypatch) -> None:
    model, given = make_model(), []
    parallel = divide(model, 2)
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda self, *a, **k: given.append(self.shape) or clone(self, *a, **k))
    run(parallel, model, x)
    # The stream once before the first block; vec and what the options hold once each.
    assert sorted(given) == sorted([x.shape, (2, 1, WIDTH), (2, 1, WIDTH)])


class Failing(nn.Module):
    """A linear whose call of a number fails."""

    def __init__(self, linear: nn.Linear, at: int) -> None:
        super().__init__()
        self.inner, self.at, self.calls = linear, at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError(f"call {self.at} had no room")
        return self.inner(x)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("where", ["home", "last"])
def test_a_devices_error_ends_the_forward_and_the_next_one_works(where, at, size, x) -> None:
    model = make_model()
    expected = model(x)
    parallel = divide(model, size)
    own, others = parallel._shards[model.blocks[3]]
    shard: BlockShard = own if where == "home" else others[-1]
    shard.block.attn.v = Failing(shard.block.attn.v, at)
    outputs = []
    for number in (1, 2, 3):
        if number == at:
            with pytest.raises(MemoryError, match=f"call {at} had no room"):
                run(parallel, model, x)
            assert not parallel.is_running
        else:
            outputs.append(run(parallel, model, x))
    assert difference(outputs[0], expected) < NEAR and torch.equal(*outputs)


def test_an_interrupt_between_two_blocks_leaves_nothing_behind(x) -> None:
    model = make_model()
    expected = model(x)
    parallel = divide(model, 3)

    def stop(index: int, stream: torch.Tensor) -> None:
        if index == 1:
            raise KeyboardInterrupt

    def begin_and_die() -> None:  # torch calls no hook of ours then, so nobody ends the forward
        with torch.inference_mode(), pytest.raises(KeyboardInterrupt):
            parallel.begin()
            model(x, stop)

    for _ in range(2):
        thread = threading.Thread(target=begin_and_die)
        thread.start()
        thread.join()
    assert difference(run(parallel, model, x), expected) < NEAR
    assert {each.name for each in threading.enumerate() if "devicebridge" in each.name} == {"devicebridge-idle"}


def test_a_forward_of_another_thread_is_refused_while_one_runs(x) -> None:
    model, refused = make_model(), list[str]()
    expected, parallel = model(x), divide(model, 3)

    def second() -> None:
        with pytest.raises(RuntimeError) as error:
            run(parallel, model, 2 * x)
        parallel.end()  # a step ends whatever its thread left, also where nothing had begun
        refused.append(str(error.value))

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        thread.join(20)

    assert difference(run(parallel, model, x, meanwhile), expected) < NEAR
    assert len(refused) == len(model.blocks) and all("another thread (MainThread)" in each for each in refused)


def _until_failed(parallel: Any) -> None:
    while parallel._run.collective.error is None:
        time.sleep(0.001)


@pytest.mark.parametrize("fails", ["", "at once", "while home waits"])
def test_nothing_of_a_forward_is_held_when_it_is_over(fails, x, no_collector) -> None:
    model, seen = make_model(), []
    parallel = divide(model, 3)
    for own, others in parallel._shards.values():
        for shard in (own, *others):
            shard.block.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    if fails:
        layer: Any = parallel._shards[model.blocks[2]][1][1].block.linear2
        layer.register_forward_hook(mock.Mock(side_effect=MemoryError))
    if fails == "while home waits":
        home: Any = parallel._shards[model.blocks[2]][0].block.linear2
        home.register_forward_hook(lambda *_: _until_failed(parallel))
    with contextlib.suppress(MemoryError):  # what pytest.raises catches it keeps, with all frames
        run(parallel, model, x)
        assert not fails
    assert len(seen) >= 6 and not [ref for ref in seen if ref() is not None]


def test_a_block_called_outside_its_forward_is_refused(x) -> None:
    model = make_model()
    parallel = divide(model, 2)
    with pytest.raises(RuntimeError, match=r"called outside the model's forward.*way 'blocks'"):
        model.blocks[0](x, x)
    with pytest.raises(RuntimeError, match=r"called outside its block.*way 'blocks'"):
        model.blocks[0].attn.o(x[..., : WIDTH // 2])
    parallel.remove()
    assert model.blocks[0].attn.o(x[..., : WIDTH // 2]).shape == x.shape


def test_a_gradient_through_a_block_is_refused(x) -> None:
    """Each device would have a part of it."""
    model = make_model()
    parallel = divide(model, 2)
    with forward_of(parallel):
        model(x)
    with pytest.raises(RuntimeError, match="a gradient .* was asked for.*way 'blocks'"), forward_of(parallel):
        model(x.clone().requires_grad_(True))


@pytest.mark.parametrize("missed", ["linear2", "attn.o", "mlp"])
def test_a_sum_that_was_left_out_is_found(missed, x) -> None:
    model = make_model()
    parallel = divide(model, 2, drop=lambda name, rank: name == missed)
    with pytest.raises(RuntimeError, match="computed something else on cpu than on cpu"):
        run(parallel, model, x)


@pytest.mark.parametrize("kinds", [("one", "one"), ("one", "another")])
def test_devices_of_one_kind_must_have_the_same_bits(kinds, x, monkeypatch) -> None:
    """A sum that was left out may be a small part of the stream."""
    monkeypatch.setattr(tensor_parallel, "device_title", mock.Mock(side_effect=kinds * 9))
    model = make_model(Fused(), Fused())
    for block in model.blocks:
        block.linear2.weight.mul_(1e-3)
        block.linear2.bias.zero_()
    expected = model(x)
    parallel = divide(model, 2, drop=lambda name, rank: name == "linear2")
    if kinds[0] == kinds[1]:
        with pytest.raises(RuntimeError, match="computed something else on cpu than on cpu"):
            run(parallel, model, x)
    else:  # which round differently
        assert NEAR < difference(run(parallel, model, x), expected) < 0.02


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_on_every_device_is_the_same(odd, x) -> None:
    model = make_model(Fused())
    parallel = divide(model, 2)
    run(parallel, model, torch.full_like(x, odd))
    parallel.check_again()
    own, (other,) = parallel._shards[model.blocks[0]]
    other.block.register_forward_hook(lambda module, args, output: output.index_fill(1, torch.tensor([3]), odd))
    with pytest.raises(RuntimeError, match="computed something else"):
        run(parallel, model, x)


def test_what_the_devices_compute_is_compared_once_for_the_same_weights(x, monkeypatch) -> None:
    model, compared = make_model(), []
    parallel = divide(model, 2)
    monkeypatch.setattr(TensorParallel, "_check", lambda self, block, found: compared.append(id(block)))
    for _ in range(2):
        run(parallel, model, x)
        assert compared == [id(block) for block in model.blocks]
        parallel.remove()
        parallel.attach()
    parallel.check_again()
    run(parallel, model, x)
    assert compared == 2 * [id(block) for block in model.blocks]


def test_every_device_gets_dicts_of_its_own(x) -> None:
    model = make_model(Separate(), Separate())
    parallel = divide(model, 2)
    seen: dict[tuple[int, int], set[str]] = {}
    for index, (own, others) in enumerate(parallel._shards.values()):
        for rank, shard in enumerate((own, *others)):

            def note(module: nn.Module, args: Any, kwargs: Any, at: tuple[int, int] = (index, rank)) -> None:
                options = kwargs["transformer_options"]
                seen[at] = {name for name in options if name.startswith("written")}
                options[f"written by {at[1]}"] = True

            shard.block.register_forward_pre_hook(note, with_kwargs=True)
    run(parallel, model, x)
    # Home's is the caller's own, so the next block finds what was written there.
    assert seen == {(0, 0): set(), (0, 1): set(), (1, 0): {"written by 0"}, (1, 1): {"written by 0"}}


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", ["attn.o", "mlp", "linear2"])
def test_a_device_that_misses_a_meeting_ends_the_forward(name, rank, x) -> None:
    """Also the last one of a block, where no further meeting tells."""
    model = make_model(Separate(), Fused())
    parallel = divide(model, 3, drop=lambda *which: which == (name, rank))
    with pytest.raises(RuntimeError, match=r"the devices are at different places.*"):
        run(parallel, model, x)


class Memory:
    """What blocks share computed tensors through, as SeedVR 2's do."""

    def __init__(self) -> None:
        self.known: dict[str, torch.Tensor] = {}


class Sharing(Separate):
    def forward(self, x: torch.Tensor, vec: torch.Tensor, memory: Memory | None = None, **options: Any) -> torch.Tensor:
        assert memory is not None, "a keyword argument"
        factors = memory.known.setdefault("factors", torch.arange(1.0, self.attn.num_heads + 1))
        if len(factors) != self.attn.num_heads:
            raise RuntimeError("of another device")
        return super().forward(x, vec)


class Remembering(Model):
    def forward(self, x: torch.Tensor, *between: Any) -> torch.Tensor:
        self.memory = Memory()
        for block in self.blocks:
            x = block(x, vec=x * 0.1, memory=self.memory)
        return self.tail(x)


@pytest.mark.parametrize("size", [2, 3])
def test_what_blocks_share_is_each_devices_own_for_one_forward(size, x) -> None:
    """The first of three devices has one of the heads, and the last two."""
    model = Remembering([Sharing(), Sharing()]).requires_grad_(False)
    expected = model(x)
    plans = (dataclasses.replace(PLANS[1], block="Sharing"),)
    parallel = divide(model, size, plans=plans)
    assert difference(run(parallel, model, x), expected) < NEAR
    assert len(model.memory.known["factors"]) == HEADS // size  # the caller's own is home's
    parallel.per_device = ()
    if size == 3:
        with pytest.raises(RuntimeError, match="of another device"):
            run(parallel, model, x)


def test_cancel_that_one_rank_hears_is_not_hidden_by_another_ranks_error() -> None:
    """ComfyUI tells one thread that the user cancelled, and never again."""
    heard = threading.Event()

    def cancelled() -> None:
        heard.set()
        raise KeyboardInterrupt

    def failing() -> None:
        heard.wait(10)
        while workers.collective.error is None:
            pass
        raise ValueError("one row")

    workers = ForwardWorkers(ThreadPool(), [CPU, CPU], lambda tensors, rank, arrivals: tensors)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.run(nn.Module(), [failing, cancelled])
    finally:
        workers.close()
