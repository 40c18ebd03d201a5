"""Forwards of unequal length in lockstep, each computed by one device alone, against the whole model on the CPU."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.parallel.local import device_workers
from devicebridge.parallel.local.divided_graphs import RECORDED_AFTER
from devicebridge.parallel.local.pictures import Pictures
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.stand_in_recorder import replaying
from devicebridge.tests.unit.parallel.test_divided_graphs import where
from devicebridge.tests.unit.parallel.test_pictures import Told, Writing, expected_of, pictured
from devicebridge.tests.unit.parallel.test_tensor_parallel import (
    NEAR,
    WIDTH,
    Fused,
    Model,
    Separate,
    difference,
    make_model,
    run,
)
from torch import nn

pytestmark = pytest.mark.skipif(device_workers.greenlet is None, reason="greenlet is not installed")
LENGTHS = (7, 4, 9, 2)


def prompts(size: int = 2, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, length, WIDTH, generator=generator) for length in LENGTHS[:size]]


def in_lockstep(parallel: TensorParallel, model: Model, inputs: Sequence[torch.Tensor], *between: Any) -> list[Any]:
    """Modes that a forward changes itself would keep it from waiting for the others."""
    with torch.inference_mode():
        return parallel.run_in_lockstep([functools.partial(run, parallel, model, x + 0, *between) for x in inputs])


def pictures_of(parallel: TensorParallel) -> Pictures:
    assert parallel.pictures is not None
    return parallel.pictures


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("blocks", [(Separate, Separate, Separate), (Fused, Fused), (Separate, Fused, Separate)])
def test_each_forward_is_computed_by_one_device(blocks, size) -> None:
    """The first time it is compared with all devices together, which is more than one block away."""
    model = make_model(*(block() for block in blocks))
    expected = [expected_of(model, x) for x in prompts(size)]
    parallel = pictured(model, size)
    for turn in range(3):
        found = in_lockstep(parallel, model, prompts(size))
        assert max(map(difference, found, expected)) < NEAR, turn
        pictures = pictures_of(parallel)
        assert not pictures.fault and pictures.num_calls == (turn + 1) * size * len(blocks)
        assert len(next(iter(pictures._forms.values()))) == 1
        assert parallel.lockstep is None and not parallel.is_running


@pytest.mark.parametrize("blocks", [(Separate, Separate, Separate), (Fused, Fused)])
def test_replays_are_the_bits_of_what_is_launched(blocks) -> None:
    """Also where the lengths change, and where a forward goes alone in between."""
    model = make_model(*(block() for block in blocks))
    parallel = pictured(model, 2)
    turns = [prompts(4, seed)[:: 3 if seed % 5 == 4 else 1][:2] for seed in range(3 * RECORDED_AFTER + 6)]

    def all_turns() -> list[torch.Tensor]:
        found = []
        for index, inputs in enumerate(turns):
            found += in_lockstep(parallel, model, inputs)
            if index % 3 == 0:
                found.append(run(parallel, model, inputs[0]))
        return found

    launched = all_turns()
    replaying(parallel, where)
    graphs = pictures_of(parallel).graphs
    assert graphs is not None
    assert all(map(torch.equal, all_turns(), launched))
    assert graphs.num_replays >= 5 * len(blocks) and not graphs.fault and not pictures_of(parallel).fault


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("block", [Separate, Fused])
def test_what_is_added_in_place_between_two_blocks_is_seen(block, is_replayed) -> None:
    def add(index: int, stream: torch.Tensor) -> None:
        stream[:, 1:] += 0.7 * index * stream.shape[1]

    model = make_model(block(), block(), block())
    expected = [expected_of(model, x, add) for x in prompts()]
    parallel = pictured(model, 2)
    if is_replayed:
        replaying(parallel, where)
    for _ in range(RECORDED_AFTER + 4):
        assert max(map(difference, in_lockstep(parallel, model, prompts(), add), expected)) < NEAR
    assert not pictures_of(parallel).fault


def test_a_graph_is_told_the_options_of_each_forward() -> None:
    """A block that looks something up which only the second forward has otherwise is not replayed with it."""

    class Scaled(Separate):
        def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
            return super().forward(x, vec) * transformer_options["scale"]

    class Options(Model):
        scale = 1.0

        def forward(self, x: torch.Tensor, between: Callable[[int, torch.Tensor], Any] = lambda *_: None) -> Any:
            x, scale = self.front(x), self.scale if x.shape[1] == LENGTHS[1] else 1.0
            for block in self.blocks:
                x = block(x, vec=x.mean(dim=1, keepdim=True), transformer_options={"scale": scale})
            return self.tail(x)

    Scaled.__name__ = "Separate"  # whose plan it has
    torch.manual_seed(0)
    model = Options([Scaled(), Scaled()]).requires_grad_(False)
    expected = {}
    for scale in (1.0, 2.0, 3.0):
        model.scale = scale
        expected[scale] = [expected_of(model, x) for x in prompts()]
    parallel = pictured(model, 2)
    replaying(parallel, where)
    for scale in (1.0, 1.0, 2.0, 1.0) * (RECORDED_AFTER + 2):
        model.scale = scale
        assert max(map(difference, in_lockstep(parallel, model, prompts()), expected[scale])) < NEAR, scale
    graphs = pictures_of(parallel).graphs
    assert graphs is not None and graphs.num_replays > 0 and not graphs.fault

    def wrong(module: nn.Module, args: Any, kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        return output + (kwargs["transformer_options"]["scale"] == 3.0)

    other = pictures_of(parallel)._wholes._blocks[model.blocks[0]].wholes[1]
    other.register_forward_hook(wrong, with_kwargs=True)
    model.scale = 3.0
    last = in_lockstep(parallel, model, prompts())
    assert "it computes something else" in pictures_of(parallel).fault
    assert max(map(difference, last, expected[3.0])) < NEAR


@pytest.mark.parametrize("kind", [Writing, Told])
def test_blocks_that_devices_cannot_compute_alone_are_computed_together(kind) -> None:
    model = make_model(Separate(), kind(), Separate())
    expected = [expected_of(model, x) for x in prompts()]
    parallel = pictured(model, 2)
    assert parallel.can_run_in_lockstep
    for _ in range(3):
        assert max(map(difference, in_lockstep(parallel, model, prompts()), expected)) < NEAR
    assert kind.__name__ in pictures_of(parallel).fault and not parallel.can_run_in_lockstep


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_forwards_that_part_ways_go_on_one_after_the_other() -> None:
    """One leaves out a block, or has none at all, or is too small for it, or is in another mode."""
    model = make_model(Separate(), Fused(), Separate(), Fused())
    long, short = prompts()

    def skipping(x: torch.Tensor) -> torch.Tensor:
        x = model.front(x)
        vec = x.mean(dim=1, keepdim=True)
        for block in (*model.blocks[:1], *model.blocks[2:]):
            x = block(x, vec=vec, transformer_options={"sizes": [1, 2], "extra": vec * 2})
        return model.tail(x)

    def in_autocast(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    def none(x: torch.Tensor) -> torch.Tensor:
        return x

    ways: list[Callable[[torch.Tensor], torch.Tensor]] = [skipping, none, in_autocast, model]
    with torch.inference_mode():
        expected = [[first(long + 0), second(short + 0)] for first in ways for second in ways]
    parallel = pictured(model, 2)

    def job(way: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with parallel.forward():
            return way(x + 0)

    for turn in range(2):
        with torch.inference_mode():
            found = [
                parallel.run_in_lockstep([functools.partial(job, first, long), functools.partial(job, second, short)])
                for first in ways
                for second in ways
            ]
        for number, (each, wanted) in enumerate(zip(found, expected, strict=True)):
            bound = 0.03 if in_autocast in (ways[number // 4], ways[number % 4]) else NEAR
            assert max(map(difference, each, wanted)) < bound, (turn, number)
    pictures = pictures_of(parallel)
    assert not pictures.fault
    with torch.inference_mode(), mock.patch.object(pictures, "compute", side_effect=pictures.compute) as compute:
        parallel.run_in_lockstep([functools.partial(job, skipping, long), functools.partial(job, model, short)])
    assert compute.call_count == 2  # the block that both compute, and two different ones
    pictures.least_tokens = 5
    assert max(map(difference, in_lockstep(parallel, model, prompts()), expected[-1])) < NEAR


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_error_ends_all_forwards(failing, error, index, is_known) -> None:
    """The next run works, and nothing of this one is kept."""
    model = make_model(Separate(), Fused(), Separate())
    expected = [expected_of(model, x) for x in prompts()]
    parallel = pictured(model, 2)
    if is_known:
        in_lockstep(parallel, model, prompts())
    streams: list[weakref.ref[torch.Tensor]] = []
    ended: list[int] = []
    homes = set(device_workers._HOMES)  # of a test that has failed to end its forward

    def job(rank: int, x: torch.Tensor) -> torch.Tensor:
        def fail(at: int, stream: torch.Tensor) -> None:
            streams.append(weakref.ref(stream))
            if rank == failing and at == index:
                raise error("on purpose")

        try:
            parallel.begin()
            found = model(x + 0, fail)
            parallel.end()  # not behind an error: torch calls no hook for every one of them
            return found
        finally:
            ended.append(rank)

    with pytest.raises(error, match="on purpose"), torch.inference_mode():
        parallel.run_in_lockstep([functools.partial(job, rank, x) for rank, x in enumerate(prompts())])
    assert sorted(ended) == [0, 1] and parallel.lockstep is None
    assert device_workers._HOMES.keys() == homes
    gc.collect()
    assert not parallel.is_running and not any(each() is not None for each in streams)
    for _ in range(2):
        assert max(map(difference, in_lockstep(parallel, model, prompts()), expected)) < NEAR


def test_a_comparison_that_did_not_take_place_is_made_the_next_time(caplog) -> None:
    """The first forward fails behind its own comparison, so that the second one's device was not compared."""
    model = make_model(Separate(), Separate())
    expected = [expected_of(model, x) for x in prompts()]
    parallel = pictured(model, 2)
    other = pictures_of(parallel)._wholes._blocks[model.blocks[0]].wholes[1]
    other.register_forward_hook(lambda module, args, output: output + 1)

    def fail(index: int, stream: torch.Tensor) -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        in_lockstep(parallel, model, prompts(), fail)
    assert not pictures_of(parallel).fault
    for _ in range(2):
        assert max(map(difference, in_lockstep(parallel, model, prompts()), expected)) < NEAR
    assert "it computes something else" in pictures_of(parallel).fault


def test_a_forward_that_changes_modes_does_not_wait_inside() -> None:
    """Others would compute in its modes."""
    model = make_model(Separate(), Separate())
    parallel = pictured(model, 2)
    found: list[bool] = []

    def outside(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad(), parallel.forward():
            return model(x.clone())

    def inside(x: torch.Tensor) -> torch.Tensor:
        return run(parallel, model, x + 0, lambda *_: found.append(torch.is_inference_mode_enabled()))

    long, short = prompts()
    for jobs in ([outside, inside], [inside, outside]):
        with torch.inference_mode():
            parallel.run_in_lockstep([functools.partial(jobs[0], long), functools.partial(jobs[1], short)])
    assert found == [True] * 4


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(TensorParallel, "in_turns", False), (device_workers, "greenlet", None)]
)
def test_it_takes_one_thread_for_all_devices(owner, name, value, monkeypatch) -> None:
    parallel = pictured(make_model(), 2)
    assert parallel.can_run_in_lockstep
    monkeypatch.setattr(owner, name, value)
    assert not parallel.can_run_in_lockstep


def test_another_thread_waits_for_the_whole_run() -> None:
    """As for a single forward: it is refused while any of these is running."""
    model = make_model(Separate(), Separate())
    parallel = pictured(model, 2)
    refused: list[str] = []

    def between(index: int, stream: torch.Tensor) -> None:
        def other() -> None:
            try:
                parallel.begin()
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    pictures = pictures_of(parallel)
    compute = pictures.compute

    def computed(*args: Any, **kwargs: Any) -> bool:
        between(0, torch.empty(0))
        return compute(*args, **kwargs)

    with mock.patch.object(pictures, "compute", computed):
        in_lockstep(parallel, model, prompts(), between)
    assert len(refused) == 6 and "is computing with this model" in refused[0]
    between(0, torch.empty(0))
    assert len(refused) == 6
