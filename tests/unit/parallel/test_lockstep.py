"""Forwards of unequal length in lockstep, each computed by one device alone, against the whole model on the CPU."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
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
from devicebridge.tests.unit.parallel.test_pictures import Mixing, Telling, Told, Writing, expected_of, pictured
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
def test_forwards_that_are_not_alike() -> None:
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
        assert compute.call_count == 3  # one block is computed for the second one alone
        parallel.run_in_lockstep([functools.partial(job, none, long), functools.partial(job, model, short)])
    assert compute.call_count == 3
    pictures.least_tokens = 5
    assert max(map(difference, in_lockstep(parallel, model, prompts()), expected[-1])) < NEAR


def test_a_small_block_in_front_is_computed_together() -> None:
    """Of one prompt only, such as that of a block for text."""
    model = make_model(Separate(), Separate(), Separate())
    picture = torch.randn(1, 8, WIDTH, generator=torch.Generator().manual_seed(9))

    def with_text(x: torch.Tensor) -> torch.Tensor:
        x = model.front(x)
        options = {"sizes": [1, 2], "extra": x, "vec": x.mean(dim=1, keepdim=True)}
        x = torch.cat([model.blocks[0](x, vec=options["vec"], transformer_options={}), picture], dim=1)
        for block in model.blocks[1:]:
            x = block(x, vec=options["vec"], transformer_options={})
        return model.tail(x)

    with torch.inference_mode():
        expected = [with_text(x) for x in prompts()]
    parallel = pictured(model, 2, least_tokens=5)  # of 7 and 4

    def job(x: torch.Tensor) -> torch.Tensor:
        with parallel.forward():
            return with_text(x + 0)

    for turn in range(2):
        with torch.inference_mode():
            found = parallel.run_in_lockstep([functools.partial(job, x) for x in prompts()])
        assert max(map(difference, found, expected)) < NEAR
        assert pictures_of(parallel).num_calls == (turn + 1) * 4 and not pictures_of(parallel).fault


class Texted(Separate):
    """Reads vec as tokens of each picture."""

    def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> torch.Tensor:
        return super().forward(x, vec.reshape(len(x), -1, WIDTH).mean(dim=1, keepdim=True))


Texted.__name__ = "Separate"  # whose plan it has


@pytest.mark.parametrize("block", [Separate, Fused, Texted])
@pytest.mark.parametrize("is_known", [False, True])
def test_rows_that_a_device_has_of_a_whole_forward_are_not_those_of_a_batch(block, is_known) -> None:
    """The first forward has two pictures, which the devices share out once the second one has ended."""
    model = make_model(block(), block(), block())
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, length, WIDTH, generator=generator) for length in LENGTHS[:2]]

    def forward(num_blocks: int, x: torch.Tensor) -> torch.Tensor:
        x = model.front(x)
        vec = x.mean(dim=1, keepdim=True)
        for each in model.blocks[:num_blocks]:
            x = each(x, vec=vec, transformer_options={}) + 0.5
        return model.tail(x)

    with torch.inference_mode():
        expected = [forward(3, inputs[0]), forward(1, inputs[1])]
    parallel = pictured(model, 2)

    def job(num_blocks: int, x: torch.Tensor) -> torch.Tensor:
        with parallel.forward():
            return forward(num_blocks, x + 0)

    with torch.inference_mode():
        if is_known:
            job(3, inputs[0])
        found = parallel.run_in_lockstep([functools.partial(job, 3, inputs[0]), functools.partial(job, 1, inputs[1])])
    assert max(map(difference, found, expected)) < NEAR and not pictures_of(parallel).fault
    assert pictures_of(parallel).num_calls == 3 + 3 * is_known  # two of the first block, a batch of the last one


@pytest.mark.parametrize("waits", [False, True])
def test_what_one_device_may_compute_alone_several_may_not(waits) -> None:
    """Pictures that see each other are right on one device, and none of a batch that devices share out."""
    model = make_model(Separate(), Mixing())
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(2, length, WIDTH, generator=generator) for length in LENGTHS[:2]]
    expected = [expected_of(model, x) for x in inputs]
    parallel = pictured(model, 2)
    with torch.inference_mode():
        found = parallel.run_in_lockstep([functools.partial(run, parallel, model, x + 0) for x in inputs], waits=waits)
    assert max(map(difference, found, expected)) < NEAR and not pictures_of(parallel).fault
    for x, each in zip(inputs, expected, strict=True):
        assert difference(run(parallel, model, x), each) < NEAR
    assert "Mixing: it computes something else" in pictures_of(parallel).fault


@pytest.mark.parametrize("is_replayed", [False, True])
def test_what_a_block_returns_beside_tensors_is_each_forwards_own(is_replayed) -> None:
    class Measuring(Separate):
        def forward(self, x: torch.Tensor, vec: torch.Tensor, transformer_options: Any = None) -> Any:
            return super().forward(x, vec), x.shape[1], None

    Measuring.__name__ = "Separate"  # whose plan it has
    torch.manual_seed(0)
    model = Telling([Measuring(), Measuring()]).requires_grad_(False)
    expected = [expected_of(model, x) for x in prompts()]
    parallel = pictured(model, 2)
    if is_replayed:
        replaying(parallel, where)
    for _ in range(RECORDED_AFTER + 4):
        assert max(map(difference, in_lockstep(parallel, model, prompts()), expected)) < NEAR
    assert not pictures_of(parallel).fault


def test_what_two_forwards_at_once_change_shows_where_they_do_not_wait() -> None:
    """As in a computation with which verify compares: each forward is computed by its own device alone."""

    class Keeping(Model):
        def forward(self, x: torch.Tensor, between: Callable[[int, torch.Tensor], Any] = lambda *_: None) -> Any:
            self.length = x.shape[1]
            x = self.front(x)
            for block in self.blocks:
                x = block(x, vec=x.mean(dim=1, keepdim=True), transformer_options={})
            return self.tail(x) * self.length

    torch.manual_seed(0)
    model = Keeping([Separate(), Fused()]).requires_grad_(False)
    plain = make_model(Separate(), Fused())
    for each, is_same in ((model, False), (plain, True)):
        expected = [expected_of(each, x) for x in prompts()]
        parallel = pictured(each, 2)
        found = in_lockstep(parallel, each, prompts())
        replaying(parallel, where)
        for turn in range(RECORDED_AFTER + 2):
            with torch.inference_mode():
                jobs = [functools.partial(run, parallel, each, x + 0) for x in prompts()]
                apart = parallel.run_in_lockstep(jobs, waits=False)
            assert max(map(difference, apart, expected)) < NEAR
            assert pictures_of(parallel).num_calls == 4 * (turn + 2)
            assert all(map(torch.equal, found, apart)) == is_same


def test_a_second_interrupt_while_forwards_end() -> None:
    """The first error is raised, and every forward is ended."""
    model = make_model(Separate(), Separate())
    parallel = pictured(model, 2)
    homes = set(device_workers._HOMES)

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        try:
            parallel.begin()
            return model(x + 0)
        finally:
            raise KeyboardInterrupt

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    long, short = prompts()
    with pytest.raises(ValueError, match="on purpose"), torch.inference_mode():
        parallel.run_in_lockstep([functools.partial(interrupted, long), functools.partial(failing, short)])
    assert device_workers._HOMES.keys() == homes and not parallel.is_running


def test_code_around_a_run_still_counts_as_running() -> None:
    """What keeps a forward outside ComfyUI's compiler ends when its frame has left the thread."""
    model = make_model(Separate(), Separate())
    here, seen = sys._getframe(), []

    def look(index: int, stream: torch.Tensor) -> None:
        frames = device_workers.suspended_frames(threading.get_ident())
        seen.append(any(each is here for frame in frames for each in _stack(frame)))

    in_lockstep(pictured(model, 2), model, prompts(), look)
    assert seen == [True] * 4


def _stack(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


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
            for begin in (parallel.begin, functools.partial(parallel.run_in_lockstep, [lambda: None] * 2)):
                try:
                    begin()
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
    assert len(refused) == 12 and all("is computing with this model" in each for each in refused)
    between(0, torch.empty(0))
    assert len(refused) == 12
