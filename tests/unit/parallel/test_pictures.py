"""Pictures that each device computes alone, with weights gathered from all, against the whole model on the CPU."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.parallel.local import whole_blocks
from devicebridge.parallel.local.divided_graphs import RECORDED_AFTER, DividedGraphs
from devicebridge.parallel.local.pictures import Pictures
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of
from devicebridge.parallel.local.slices import Slice
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.parallel.local.whole_blocks import WholeBlock
from devicebridge.tests.stand_in_recorder import StandIn, replaying
from devicebridge.tests.unit.parallel.test_divided_graphs import where
from devicebridge.tests.unit.parallel.test_tensor_parallel import (
    CPU,
    NEAR,
    PLANS,
    WIDTH,
    Fused,
    Model,
    Separate,
    difference,
    make_model,
    run,
)
from torch import nn

PICTURES = ("x", "vec")


class Writing(Separate):
    """Writes into something that it does not return."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        vec += 1
        return super().forward(x, vec)


class Told(Separate):
    """Is told of each picture by the options."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return super().forward(x, vec * transformer_options["extra"].mean())


class Flat(Separate):
    """Pictures are not told from one another in what it returns."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return super().forward(x, vec).flatten(0, 1)


class Mixing(Separate):
    """Each picture sees the other one."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return super().forward(x, vec) + x.mean(dim=0, keepdim=True)


class Blending(Separate):
    """So it does in place: whoever computes it twice has something else."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        x += super().forward(x, vec) + x.mean(dim=0, keepdim=True)
        return x


class Faint(Separate):
    """Adds little to a picture, and most of that is of the other one."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return x + 0.001 * (super().forward(x, vec) - x) + 0.01 * x.flip(0)


class Small(Separate):
    """Adds little to a picture."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return x + 0.001 * (super().forward(x, vec) - x)


class Late(Separate):
    """Asks what each picture is where it is told to."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        if transformer_options["is_late"]:
            x = x + torch.tensor(transformer_options["cond_or_uncond"][: len(x)])[:, None, None]
        return super().forward(x, vec)


class Looking(Separate):
    look = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        Looking.look()
        return super().forward(x, vec)


class Telling(Model):
    """Its blocks return a number beside their tensor."""

    def forward(self, x: torch.Tensor, between: Any = None) -> torch.Tensor:
        x = self.front(x)
        for block in self.blocks:
            x, number, *_ = block(x, vec=x.mean(dim=1, keepdim=True), transformer_options={})
            x = x * number
        return self.tail(x)


KINDS = (Fused, Separate, Writing, Told, Flat, Mixing, Blending, Faint, Small, Late, Looking)


def fetch(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any]:
    return {name: each.data for name, each in layer._parameters.items() if each is not None}, lambda: None


def fetch_copies(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any]:
    """As of weights that wait in host memory: what is gathered has no other owner."""
    return {name: weight.clone() for name, weight in fetch(layer, device, dtype)[0].items()}, lambda: None


def cut(weight: torch.Tensor, part: Slice) -> torch.Tensor:
    """As a card has it, which has taken its slice."""
    return part.copied(weight)


def pictured(
    model: Model,
    size: int,
    *,
    devices: Sequence[torch.device] = (),
    least_tokens: int = 0,
    fetch: Callable[..., Any] = fetch,
    pictures: Any = PICTURES,
) -> TensorParallel:
    """The model's blocks divided in place; devices may compute pictures of their own."""
    devices = tuple(devices) or (CPU,) * size
    shards, wholes = {}, {}
    for block in model.blocks:
        plan = find_plan((*PLANS, *(replace(PLANS[1], block=kind.__name__) for kind in KINDS[2:])), block)
        assert plan is not None
        shares = shares_of(block, plan, (1.0,) * size)
        whole = [copy.deepcopy(block) for _ in range(size)]
        others = [divide_block(copy.deepcopy(block), plan, shares, rank, cut) for rank in range(1, size)]
        own = divide_block(block, plan, shares, 0, cut)
        for shard, device in zip((own, *others), devices, strict=True):
            shard.block.to(device)
        shards[own.block] = own, others
        wholes[own.block] = WholeBlock([own, *others], whole, pictures)
    parallel = TensorParallel(devices, shards)
    parallel.compute_pictures(wholes, fetch, least_tokens)
    parallel.attach()
    return parallel


def recorded(model: Model) -> tuple[TensorParallel, Pictures, DividedGraphs]:
    """On two devices, whose blocks are replayed from the next forward on."""
    parallel = pictured(model, 2)
    replaying(parallel, where)
    for _ in range(RECORDED_AFTER + 6):
        run(parallel, model, images(2))
    assert parallel.pictures is not None and parallel.pictures.graphs is not None
    return parallel, parallel.pictures, parallel.pictures.graphs


def images(number: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(number, 7, WIDTH, generator=torch.Generator().manual_seed(seed))


def expected_of(model: Model, x: torch.Tensor, *between: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(x.clone(), *between)


@pytest.mark.parametrize(("size", "number"), [(2, 2), (2, 4), (3, 3), (4, 4)])
@pytest.mark.parametrize("blocks", [(Separate, Separate, Separate), (Fused, Fused), (Separate, Fused, Separate)])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_pictures_have_the_bits_that_one_device_computes_of_them(blocks, size, number, mode) -> None:
    """The first forward compares with all devices together, the others do not."""
    model = make_model(*(block() for block in blocks))
    x, each = images(number), number // size
    # A batch of another size may take another kernel.
    expected = torch.cat([expected_of(model, rows) for rows in x.split(each)])
    parallel = pictured(model, size)
    for turn in range(3):
        with mode(), parallel.forward():
            found = model(x)
        assert difference(found, expected) < NEAR, turn
        pictures = parallel.pictures
        assert pictures is not None and not pictures.fault and pictures.num_calls == (turn + 1) * len(blocks)


@pytest.mark.parametrize("blocks", [(Separate, Separate, Separate), (Fused, Fused)])
def test_replays_are_the_bits_of_what_is_launched(blocks) -> None:
    model = make_model(*(block() for block in blocks))
    parallel = pictured(model, 2)
    launched = [run(parallel, model, images(2, seed)) for seed in range(RECORDED_AFTER + 6)]
    replaying(parallel, where)
    pictures = parallel.pictures
    assert pictures is not None and pictures.graphs is not None
    for seed, expected in enumerate(launched):
        assert torch.equal(run(parallel, model, images(2, seed)), expected), seed
    assert pictures.graphs.num_replays >= 3 * len(blocks) and not pictures.graphs.fault


@pytest.mark.parametrize("is_replayed", [False, True])
def test_what_is_added_in_place_between_two_blocks_is_seen_by_all(is_replayed) -> None:
    def add(index: int, stream: torch.Tensor) -> None:
        stream[:, 2:] += 0.7 * index

    for block in (Separate, Fused):
        model = make_model(block(), block(), block())
        x = images(2)
        plain, expected = expected_of(model, x), expected_of(model, x, add)
        parallel = pictured(model, 2)
        if is_replayed:
            replaying(parallel, where)
        for _ in range(RECORDED_AFTER + 4):
            found = run(parallel, model, x, add)
            assert difference(found, expected) < NEAR < difference(plain, expected)
        assert parallel.pictures is not None and not parallel.pictures.fault


@pytest.mark.parametrize("block", [Separate, Fused])
def test_a_replay_waits_for_what_it_reads_that_no_replay_wrote(block) -> None:
    """Between two of them others read the pictures. What they write, or what is gathered meanwhile, is waited for, and
    so are they before anything is written to memory that they may read."""

    def add(index: int, stream: torch.Tensor) -> None:
        if index == 1:
            stream += 1

    model = make_model(block(), block(), block(), block())
    parallel, _, graphs = recorded(model)
    launched = graphs._recording.launched  # type: ignore[attr-defined]

    def launches(*between: Any) -> list[str]:
        launched.clear()
        run(parallel, model, images(2), *between)
        return list(launched)

    gathered, one = ["wait", "replay", "wait"], ["replay", "wait"]
    assert launches() == [*gathered, "wait", *one, *one, *one, *one]
    assert launches(add) == [*gathered, "wait", *one, *one, "wait", *one, *one]
    assert launches() == [*gathered, "wait", *one, *one, *one, *one]

    def compute_together(index: int, stream: torch.Tensor) -> None:
        if index == 1:
            model.blocks[3](images(3), vec=images(3)[:, :1], transformer_options={"sizes": [1], "extra": images(3)})

    assert launches(compute_together) == [*gathered, "wait", *one, *one, "wait", *one, *one]
    model.blocks = model.blocks[:1] + model.blocks[2:]
    assert launches() == [*gathered, "wait", *one, "wait", *one, *one]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_tensor_that_a_block_wrote_to_has_all_pictures(mode) -> None:
    """Also for a caller that goes on with the tensor it had, whose writes nobody counts in inference mode."""

    def through(blocks: nn.ModuleList) -> torch.Tensor:
        stream = images(2) + 0
        vec = stream.mean(dim=1, keepdim=True)
        found = blocks[0](stream, vec)
        assert torch.equal(found, stream) and not torch.equal(stream, images(2))
        blocks[1](stream, vec)
        return stream

    model = make_model(Fused(), Fused())
    with mode():
        expected = through(model.blocks)
    parallel = pictured(model, 2)
    for _ in range(3):
        with mode(), parallel.forward():
            assert difference(through(model.blocks), expected) < NEAR
    assert parallel.pictures is not None and parallel.pictures.num_calls == 6


def test_what_a_block_returns_beside_tensors_must_be_that_of_all_pictures() -> None:
    class Counting(Separate):
        def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> Any:
            return super().forward(x, vec), len(x)

    Counting.__name__ = "Separate"  # whose plan it has
    torch.manual_seed(0)
    model = Telling([Counting(), Counting()]).requires_grad_(False)
    expected = expected_of(model, images(2))
    parallel = pictured(model, 2)
    for _ in range(2):
        assert difference(run(parallel, model, images(2)), expected) < NEAR
    assert parallel.pictures is not None
    assert parallel.pictures.fault == "Separate: it returns something else beside tensors"


def test_an_error_before_a_block_is_computed(monkeypatch) -> None:
    """Of a form that was compared it is raised; any other form is computed by all devices together."""
    model = make_model(Separate(), Separate())
    parallel = pictured(model, 2)
    pictures = parallel.pictures
    assert pictures is not None
    run(parallel, model, images(2))
    failing = mock.Mock(side_effect=LookupError("on purpose"))
    monkeypatch.setattr(pictures, "_rows", failing)
    with pytest.raises(LookupError, match="on purpose"):
        run(parallel, model, images(2))
    other = images(4)
    assert difference(run(parallel, model, other), expected_of(make_model(Separate(), Separate()), other)) < NEAR
    assert pictures.fault == "Separate: on purpose"


def test_other_batches_and_small_pictures_are_computed_together() -> None:
    model = make_model()
    expected = {number: expected_of(model, images(number)) for number in (1, 3, 4)}
    parallel = pictured(model, 2, least_tokens=10)
    pictures = parallel.pictures
    assert pictures is not None
    for number, calls in ((1, 0), (3, 0), (4, 4)):  # 14 tokens for each of two devices
        assert difference(run(parallel, model, images(number)), expected[number]) < NEAR
        assert pictures.num_calls == calls and not pictures.fault


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (Writing, "Writing: it writes into what it is given, and does not return it"),
        (Told, "Told: it changes the transformer_options, or reads tensors there"),
        (Flat, "Flat: it does not return a row for each picture"),
        (Mixing, "Mixing: it computes something else, "),
        (Blending, "Blending: it computes something else, "),
        (Faint, "Faint: it computes something else, "),
    ],
)
def test_blocks_whose_pictures_are_not_alone_are_computed_together(kind, fault, caplog) -> None:
    model = make_model(Separate(), kind())
    x = images(2)
    if kind is Flat:
        model.tail = nn.Identity()
    expected = expected_of(model, x)
    parallel = pictured(model, 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert difference(run(parallel, model, x), expected) < NEAR
    assert parallel.pictures is not None and fault in parallel.pictures.fault
    assert len(caplog.messages) == 1 and fault in caplog.messages[0]


@pytest.mark.parametrize("kind", [Small, Separate, Fused])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_no_reason_to_compute_together(kind, dtype) -> None:
    """Of 16 bits, where what a block adds may be less than the last one of the whole."""
    model = make_model(kind(), kind(), kind()).to(dtype)
    parallel = pictured(model, 2)
    with torch.inference_mode(), parallel.forward():
        model(images(2).to(dtype))
    assert parallel.pictures is not None and not parallel.pictures.fault and parallel.pictures.num_calls == 3


def test_what_is_faintly_mixed_is_noticed_in_16_bits() -> None:
    model = make_model(Faint()).to(torch.bfloat16)
    parallel = pictured(model, 2)
    with torch.inference_mode(), parallel.forward():
        model(images(2).bfloat16())
    assert parallel.pictures is not None and "something else" in parallel.pictures.fault


def test_a_call_with_other_options_is_compared_by_itself() -> None:
    model = make_model(Late())
    block, other = model.blocks[0], copy.deepcopy(model.blocks[0])
    parallel = pictured(model, 2)
    for is_late in (False, True, True):
        options = {"is_late": is_late, "cond_or_uncond": [0, 1]}
        x = images(2)
        with torch.inference_mode(), parallel.forward():
            found = block(x, x.mean(dim=1, keepdim=True), transformer_options=options)
        with torch.inference_mode():
            expected = other(x, x.mean(dim=1, keepdim=True), transformer_options=options)
        assert difference(found, expected) < NEAR
        assert parallel.pictures is not None and ("cond_or_uncond" in parallel.pictures.fault) is is_late


def test_an_argument_that_nobody_named_is_noticed() -> None:
    model = make_model(Separate(), Separate())
    expected = expected_of(model, images(2))
    parallel = pictured(model, 2, pictures=("x",))
    assert difference(run(parallel, model, images(2)), expected) < NEAR
    assert parallel.pictures is not None and "row for each picture" in parallel.pictures.fault


@pytest.mark.parametrize("turn", [0, 2])
def test_without_room_for_whole_blocks_all_are_computed_together(turn, monkeypatch) -> None:
    model = make_model()
    expected = expected_of(model, images(2))
    parallel = pictured(model, 2)
    for _ in range(turn):
        run(parallel, model, images(2))
    parallel.release()
    assert parallel.pictures is not None and not parallel.pictures._wholes._places
    with mock.patch.object(whole_blocks.WholeBlocks, "_kept", side_effect=torch.OutOfMemoryError("none left")):
        assert difference(run(parallel, model, images(2)), expected) < NEAR
    assert "none left" in parallel.pictures.fault and not parallel.pictures._wholes._places


@pytest.mark.parametrize("fails_in", ["_kept", "outputs"])
@pytest.mark.parametrize("blocks", [(Separate, Separate, Separate), (Fused, Fused, Fused)])
def test_memory_that_runs_out_later_ends_no_forward(blocks, fails_in, monkeypatch) -> None:
    """For the second slot, or behind a block that has written into its pictures."""
    model = make_model(*(block() for block in blocks))
    expected = expected_of(model, images(2))
    parallel = pictured(model, 2)
    pictures, original, calls = parallel.pictures, getattr(whole_blocks.WholeBlocks, fails_in), []
    assert pictures is not None

    def fail(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(first)
        found = original(self, first, *args, **kwargs)
        if len(calls) == 2 if fails_in == "outputs" else first[1] == 1:  # of places the number of the slot
            raise torch.OutOfMemoryError("none left")
        return found

    run(parallel, model, images(2))
    parallel.release()
    with monkeypatch.context() as patched:
        patched.setattr(whole_blocks.WholeBlocks, fails_in, fail)
        assert difference(run(parallel, model, images(2)), expected) < NEAR
    assert "none left" in pictures.fault
    parallel.release()  # there may be room now
    assert difference(run(parallel, model, images(2)), expected) < NEAR and not pictures.fault


@pytest.mark.parametrize("missed", [0, 2])
@pytest.mark.parametrize("which", ["the only one", "of moved weights", "of other switches"])
@pytest.mark.parametrize("found", ["nothing", "zeros"])
def test_a_graph_that_gathers_something_else_is_noticed(missed, which, found, monkeypatch) -> None:
    """Each is compared when it is recorded, also if one of the same block and form was right, and no forward computes
    with what it gathered. A single block's weights still lie there from the forward before."""
    model = make_model(*(Separate() for _ in range(missed + 1)))
    is_bad, misses = False, False
    record, gather = StandIn.record, whole_blocks.WholeBlocks._gather

    def record_noting(self: StandIn, compute: Callable[[], None]) -> Callable[[], None]:
        def noting(is_bad: bool = is_bad) -> None:
            nonlocal misses
            misses = is_bad
            compute()
            misses = False

        return record(self, noting)

    def gather_most(self: Any, block: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
        if not misses or block is not model.blocks[missed]:
            return gather(self, block, dtype)
        if found == "zeros":
            gather(self, block, dtype)()
            for each in (each for parameters in self._parameters[block] for each in parameters):
                each[1]._parameters[each[2]].data.zero_()
        return lambda: None

    def run_often(times: int = RECORDED_AFTER + 6) -> None:
        for _ in range(times):
            assert difference(run(parallel, model, images(2)), expected) < NEAR

    monkeypatch.setattr(StandIn, "record", record_noting)
    monkeypatch.setattr(whole_blocks.WholeBlocks, "_gather", gather_most)
    expected = expected_of(model, images(2))
    parallel = pictured(model, 2)
    replaying(parallel, where)
    pictures = parallel.pictures
    assert pictures is not None and pictures.graphs is not None
    if which != "the only one":
        run_often()
        assert pictures.graphs.num_replays
    is_bad = True
    if which == "of moved weights":
        query = model.blocks[missed].attn.q
        query.weight = nn.Parameter(query.weight.clone(), requires_grad=False)
    before = torch.backends.cudnn.allow_tf32
    try:
        if which == "of other switches":
            torch.backends.cudnn.allow_tf32 = not before
        run_often()
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert "gathers something else" in pictures.graphs.fault and not pictures.fault


def test_weights_are_let_go_of_whatever_happens() -> None:
    held: list[str] = []

    def counted(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any]:
        held.append(type(layer).__name__)
        if len(held) == fails_at:
            raise KeyboardInterrupt
        return fetch(layer, device, dtype)[0], held.pop

    model = make_model()
    parallel = pictured(model, 2, fetch=counted)
    fails_at = 0
    first = run(parallel, model, images(2))
    assert not held
    fails_at = 5
    with pytest.raises(KeyboardInterrupt):
        run(parallel, model, images(2))
    held.pop()  # the one that failed
    assert not held
    fails_at = 0
    assert torch.equal(run(parallel, model, images(2)), first)


def test_what_was_made_to_be_gathered_is_kept_until_the_devices_have_it(monkeypatch) -> None:
    """A weight that was cast, or fetched for this, has no other owner. Its memory must not be another one's before."""
    made: list[weakref.ref[torch.Tensor]] = []
    seen: list[int] = []

    def num_alive() -> int:
        return sum(each() is not None for each in made)

    def cast(layer: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], Any]:
        found = {name: weight.clone() for name, weight in fetch(layer, device, dtype)[0].items()}
        made.extend(map(weakref.ref, found.values()))
        return found, lambda: None

    monkeypatch.setattr(Looking, "look", lambda: seen.append(num_alive()))
    model = make_model(Looking(), Looking())
    parallel = pictured(model, 2, fetch=cast)
    run(parallel, model, images(2))
    assert seen[0] == len(made) // 2 > 0 and not num_alive()  # the first one's are copied, the second one's under way


def test_other_weights_are_gathered_and_compared_again() -> None:
    model = make_model(Separate(), Separate())
    parallel = pictured(model, 2)
    replaying(parallel, where)
    for _ in range(RECORDED_AFTER + 4):
        before = run(parallel, model, images(2))
    for block in model.blocks:
        block.attn.q.weight.data *= 1.5  # home's part, where it lies
    assert not torch.equal(run(parallel, model, images(2)), before)
    parallel.computes_pictures = False
    together = run(parallel, model, images(2))
    parallel.computes_pictures = True
    parallel.check_again()
    assert difference(run(parallel, model, images(2)), together) < NEAR
    assert parallel.pictures is not None and not parallel.pictures.fault


@pytest.mark.parametrize("moved", [0, 1])
def test_a_graph_does_not_gather_weights_from_where_they_were(moved) -> None:
    """The first block is gathered by a graph of its own, the second one by that of the first, and nothing by the
    second's."""
    model = make_model(Separate(), Separate())
    parallel, _, graphs = recorded(model)
    assert graphs.num_replays >= 4
    before, query = run(parallel, model, images(2)), model.blocks[moved].attn.q
    query.weight = nn.Parameter(query.weight * 1.5, requires_grad=False)
    replays = graphs.num_replays
    found = run(parallel, model, images(2))
    assert graphs.num_replays == replays + 2
    parallel.computes_pictures = False
    assert difference(found, run(parallel, model, images(2))) < NEAR < difference(found, before)


def test_a_graph_does_not_compute_with_weights_where_they_were_gathered_before() -> None:
    """As after some were gathered in another type, which have memory of their own."""
    model = make_model(Separate(), Separate())
    parallel, pictures, graphs = recorded(model)
    before = run(parallel, model, images(2))
    replays, old = graphs.num_replays, dict(pictures._wholes._places)
    pictures._wholes._places.clear()
    assert torch.equal(run(parallel, model, images(2)), before)
    assert graphs.num_replays == replays + 1 and old.keys() == pictures._wholes._places.keys()  # the beginning
