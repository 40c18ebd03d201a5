"""Threads that meet: everyone gets everything by rank, and one that cannot come ends it for all."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devicebridge.parallel.local.exchange import Exchange, Tensors, TokenChunks
from torch import nn

pytestmark = pytest.mark.usefixtures("no_thread_left")
LONG = 20.0  # seconds: a thread that is stuck fails the test and does not hang it


def _send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
    """Says for whom a copy is: 1000 for every rank."""
    return [tensor + 1000 * rank for tensor in tensors]


def _hand_over(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
    return tensors


def _together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) in a thread each: its result, or its error."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not any(thread.is_alive() for thread in threads), f"stuck: {results}"
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_everyone_gets_the_parts_of_all_in_the_order_of_ranks(size) -> None:
    exchange = Exchange(size, _send)

    def work(rank: int) -> list[list[float]]:
        return [
            [float(part) for part in exchange.all(rank, f"meeting {number}", torch.tensor(float(10 * number + rank)))]
            for number in range(50)
        ]

    for rank, meetings in enumerate(_together(size, work)):
        expected = [
            [10.0 * number + each + (1000 * rank if each != rank else 0) for each in range(size)]
            for number in range(50)
        ]
        assert meetings == expected


def test_ones_own_part_is_not_copied() -> None:
    exchange, own = Exchange(2, _send), [torch.ones(2), torch.zeros(2)]
    found = _together(2, lambda rank: exchange.all(rank, "here", own[rank]))
    assert found[0][0] is own[0] and found[1][1] is own[1]


def test_a_fast_thread_may_be_a_meeting_ahead() -> None:
    """It brings its next part before the other one has taken this one."""
    exchange, ahead = Exchange(3, _send), threading.Event()

    def work(rank: int) -> list[float]:
        first = exchange.all(rank, "a", torch.tensor(1.0 + rank))
        if rank == 2:
            assert ahead.wait(LONG)
        elif rank == 0:
            threading.Timer(0.05, ahead.set).start()
        second = exchange.all(rank, "b", torch.tensor(11.0 + rank))
        return [float(part) % 1000 for part in first + second]

    assert _together(3, work) == [[1, 2, 3, 11, 12, 13]] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_abort_wakes_all_and_ends_what_follows(failing) -> None:
    exchange = Exchange(3, _send)

    def work(rank: int) -> None:
        exchange.all(rank, "a", torch.zeros(1))
        if rank == failing:
            exchange.abort(MemoryError("card full"))
        exchange.all(rank, "b", torch.zeros(1))

    for error in _together(3, work):
        assert isinstance(error, MemoryError) and str(error) == "card full"
    with pytest.raises(MemoryError, match="card full"):
        exchange.all(0, "c", torch.zeros(1))


def test_the_first_error_counts() -> None:
    exchange = Exchange(2, _send)
    exchange.abort(ValueError("the cause"))
    exchange.abort(RuntimeError("what followed from it"))
    with pytest.raises(ValueError, match="the cause"):
        exchange.all(0, "a", torch.zeros(1))


def test_threads_at_different_places_are_an_error_for_all() -> None:
    exchange = Exchange(3, _send)
    names = ["img_attn.proj", "img_attn.proj", "img_mlp.2"]
    found = _together(3, lambda rank: exchange.all(rank, names[rank], torch.zeros(1)))
    assert {type(error) for error in found} == {RuntimeError}
    text = str(found[0])
    assert "the devices are at different places" in text and "img_attn.proj" in text and "img_mlp.2" in text
    assert {str(error) for error in found} == {text}


def test_a_copy_that_cannot_be_made_reaches_the_one_who_sends_it() -> None:
    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        raise MemoryError("no room for the copy")

    exchange = Exchange(2, send)

    def work(rank: int) -> None:
        try:
            exchange.all(rank, "a", torch.zeros(1))
        except MemoryError as error:
            exchange.abort(error)
            raise

    assert {type(error) for error in _together(2, work)} == {MemoryError}


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_thread_that_has_finished_a_round_is_waited_for_by_nobody(absent) -> None:
    exchange = Exchange(3, _send)

    def work(rank: int) -> None:
        for number in range(3):
            exchange.all(rank, "a", torch.zeros(1))
            if (rank, number) != (absent, 2):
                exchange.all(rank, "b", torch.zeros(1))
            exchange.finish(rank)

    found = _together(3, work)
    assert found[absent] is None
    for rank in {0, 1, 2} - {absent}:
        assert str(found[rank]) == "the devices are at different places: one at the end, one at b"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_several_parts_may_be_brought_before_any_is_collected(size) -> None:
    """The sums are in the order of ranks, whichever rank adds."""
    exchange = Exchange(size, _hand_over)
    parts = [
        [torch.randn(5, generator=torch.Generator().manual_seed(10 * n + r)) for r in range(size)] for n in (0, 1, 2)
    ]

    def work(rank: int) -> list[torch.Tensor]:
        for number in range(3):
            exchange.bring(rank, "a", parts[number][rank])
        first = exchange.collect(rank, "a")
        assert exchange.collect(rank, "a") == []
        return [*first, exchange.sum(rank, "b", parts[0][rank])]

    expected = [functools.reduce(torch.add, parts[number]) for number in (0, 1, 2, 0)]
    for found in _together(size, work):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [2, 3])
def test_parts_in_one_letter_are_added_each_by_itself_and_where_they_belong(size) -> None:
    sent: list[int] = []

    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        sent.append(len(tensors))
        return tensors

    exchange = Exchange(size, send)

    def work(rank: int) -> list[torch.Tensor]:
        place, own = torch.full((3,), torch.nan), torch.full((3,), float(rank))
        exchange.bring(rank, "a", own, torch.full((2, 2), 10.0 * rank))
        first, second = exchange.collect(rank, "a", [place, None])
        assert first is place and torch.equal(own, torch.full((3,), float(rank)))  # it may still be on its way
        return [first, second]

    total = float(sum(range(size)))
    for first, second in _together(size, work):
        assert torch.equal(first, torch.full((3,), total)) and torch.equal(second, torch.full((2, 2), 10 * total))
    assert sent == [2] * size * (size - 1)


@pytest.mark.parametrize("shape", [(1, 11, 4), (2, 5, 3), (12, 2), (1, 2, 3), (7,), (1, 1, 600)])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_large_parts_are_added_slice_by_slice_to_the_same_bits(size, shape) -> None:
    """By each thread a slice of the tokens, which may not divide by their number, and be fewer."""
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    expected = functools.reduce(torch.add, parts)
    sent: list[int] = []

    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        sent.append(sum(each.numel() for each in tensors))
        return [each.clone() for each in tensors]

    for least, is_sliced in ((0, size > 2 and len(shape) > 1), (4 * expected.numel() + 1, False)):
        sent.clear()
        exchange = Exchange(size, send)
        exchange.sliced_from_bytes = least
        found = _together(size, lambda rank, exchange=exchange: exchange.sum(rank, "a", parts[rank]))
        assert all(torch.equal(each, expected) and each.shape == expected.shape for each in found)
        times = 2 if is_sliced else size
        assert sum(sent) == times * (size - 1) * expected.numel()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_large_and_small_parts_travel_together_and_several_before_any_is_collected(size) -> None:
    exchange = Exchange(size, _hand_over)
    exchange.sliced_from_bytes = 4 * 30

    def part(rank: int, number: int, rows: int) -> torch.Tensor:
        return torch.randn(1, rows, 3, generator=torch.Generator().manual_seed(100 * rank + number))

    def work(rank: int) -> list[torch.Tensor]:
        place = torch.full((1, 11, 3), torch.nan)
        exchange.bring(rank, "a", part(rank, 0, 11), part(rank, 1, 2))
        both = exchange.collect(rank, "a", [place, None])
        assert both[0] is place
        for number in (2, 3, 4):
            exchange.bring(rank, "b", part(rank, number, 10 + number - 3))
        return [*both, *exchange.collect(rank, "b"), exchange.all(rank, "c", part(rank, 5, 1))[size - 1]]

    rows = {0: 11, 1: 2, 2: 9, 3: 10, 4: 11}
    expected = [functools.reduce(torch.add, [part(r, n, rows[n]) for r in range(size)]) for n in rows]
    expected.append(part(size - 1, 5, 1))
    for found in _together(size, work):
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_between_the_parts_of_slices_and_their_sums_ends_it_for_all(failing) -> None:
    exchange = Exchange(3, _hand_over)
    exchange.sliced_from_bytes = 0

    def work(rank: int) -> torch.Tensor:
        exchange.bring(rank, "a", torch.ones(6, 2))
        if rank == failing:
            exchange.abort(MemoryError("card full"))
        return exchange.collect(rank, "a")[0]

    assert {str(error) for error in _together(3, work)} == {"card full"}


class _Layer(nn.Linear):
    """Notes the tokens it computes."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__(8, 6)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(f"{x.shape[-2]} tokens computed")
        return super().forward(x)


def _noting(seen: list[str]) -> Any:
    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        seen.append(f"{tensors[0].shape[-2]} tokens sent")
        return tensors

    return send


@pytest.mark.parametrize("is_called_once", [False, True])
@pytest.mark.parametrize("shape", [(1, 11, 8), (2, 11, 8), (11, 8)])
def test_a_chunk_leaves_before_the_next_one_is_computed(shape, is_called_once) -> None:
    """A device that must not call its layer again sends the same chunks of what it has computed at once."""
    seen: list[str] = []
    layer, x = _Layer(seen), torch.randn(shape)
    exchange = Exchange(2, _noting(seen))
    chunks = TokenChunks(4, 3)
    tokens = chunks.tokens(x, 0)
    chunks.bring(exchange, 0, "here", layer, x, tokens=tokens, is_called_once=is_called_once)
    each = ["4 tokens computed", "4 tokens sent"]
    at_once = ["11 tokens computed", "4 tokens sent", "4 tokens sent", "3 tokens sent"]
    assert seen == (at_once if is_called_once else [*each, *each, "3 tokens computed", "3 tokens sent"])
    chunks.bring(exchange, 1, "here", lambda x: 2 * layer(x), x, tokens=tokens, is_called_once=False)
    found = torch.cat(exchange.collect(0, "here"), dim=-2)
    assert found.shape == layer(x).shape and torch.allclose(found, 3 * layer(x), rtol=1e-6)


@pytest.mark.parametrize(("tokens", "most", "each"), [(11, 4, 4), (12, 4, 3), (40, 4, 10), (5, 4, 0), (40, 1, 0)])
def test_few_tokens_are_computed_at_once(tokens, most, each) -> None:
    assert TokenChunks(most, 3).tokens(torch.ones(1, tokens, 8), 0) == each


def test_small_outputs_and_what_is_no_tensor_of_tokens_are_computed_at_once() -> None:
    x = torch.ones(2, 6, 8)
    assert [TokenChunks(4, 1, from_bytes=size).tokens(x, 10) for size in (480, 481)] == [2, 0]
    assert TokenChunks(4, 1).tokens(torch.ones(8), 10) == 0
