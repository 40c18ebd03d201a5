"""Threads that meet: everyone gets everything by rank, and one that cannot come ends it for all."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from devicebridge.parallel.local.collectives import Collective, Tensors, decode, encode, uncounted

pytestmark = pytest.mark.usefixtures("no_thread_left")
LONG = 20.0  # seconds: a thread that is stuck fails the test and does not hang it


def _send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
    """Says for whom a copy is: 1000 for every rank."""
    return [tensor + 1000 * rank for tensor in tensors]


def _hand_over(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
    return tensors


def _together(size: int, work: Callable[[int], Any]) -> list[Any]:
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
    group = Collective(size, _send)

    def work(rank: int) -> list[list[float]]:
        return [
            [float(part) for part in group.all_gather(rank, f"{number}", torch.tensor(float(10 * number + rank)))]
            for number in range(50)
        ]

    for rank, gathered in enumerate(_together(size, work)):
        ranks = [each + (1000 * rank if each != rank else 0) for each in range(size)]
        assert gathered == [[10.0 * number + each for each in ranks] for number in range(50)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_abort_wakes_all_and_ends_what_follows(failing) -> None:
    group = Collective(3, _send)

    def work(rank: int) -> None:
        group.all_gather(rank, "a", torch.zeros(1))
        if rank == failing:
            group.abort(MemoryError("card full"))
            group.abort(RuntimeError("what followed from it"))
        group.all_gather(rank, "b", torch.zeros(1))

    for error in _together(3, work):
        assert isinstance(error, MemoryError) and str(error) == "card full"
    with pytest.raises(MemoryError, match="card full"):
        group.all_gather(0, "c", torch.zeros(1))


def test_threads_at_different_places_are_an_error_for_all() -> None:
    group = Collective(3, _send)
    names = ["img_attn.proj", "img_attn.proj", "img_mlp.2"]
    found = _together(3, lambda rank: group.all_gather(rank, names[rank], torch.zeros(1)))
    assert {type(error) for error in found} == {RuntimeError}
    text = str(found[0])
    assert "the devices are at different places" in text and "img_attn.proj" in text and "img_mlp.2" in text
    assert {str(error) for error in found} == {text}


@pytest.mark.parametrize("shape", [(1, 11, 4), (7,)])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_are_added_in_the_order_of_ranks(size, shape) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(size)]
    expected, group = functools.reduce(torch.add, parts), Collective(size, _hand_over)
    found = _together(size, lambda rank: group.all_reduce(rank, "a", parts[rank]))
    assert all(torch.equal(each, expected) for each in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "run"), [((2, 5, 256), None), ((3, 40), None), ((2, 3, 4, 8), None), ((4, 24), 8)])
def test_8_bits_are_off_by_half_a_step_of_their_scale(shape, run, dtype) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    tensor[0] *= 1000  # other rows do not lose by it
    codes, scales = encode(tensor, run)
    assert codes.dtype == torch.int8 and codes.shape == tensor.shape and int(codes.abs().max()) == 127
    steps = scales.repeat_interleave(shape[-1] // scales.shape[-1], -1).double()
    assert scales.shape[-1] == {256: 2, 40: 1, 8: 1, 24: 3}[shape[-1]]
    found = decode(codes, scales)
    assert found.dtype == torch.float32
    assert bool(((found.double() - tensor.double()).abs() <= steps * (0.5 + 1e-3)).all())


@pytest.mark.parametrize("run", [None, 4])
def test_8_bits_keep_zeros_and_show_what_is_no_number(run) -> None:
    tensor = torch.tensor([[0.0] * 8, [1e-42] * 8, [torch.inf, *[1.0] * 7], [torch.nan, *[1.0] * 7]])
    found = decode(*encode(tensor, run))
    assert not found[0].any() and float(found[1].max()) < 1e-41
    assert not found[2:, 0].isfinite().any()
    assert encode(tensor[:0], run)[0].shape == (0, 8)


def test_means_travel_apart() -> None:
    tensor = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)) + torch.linspace(-500, 500, 16)
    plain, apart = (float((decode(*encode(tensor, 8, dim)) - tensor).abs().max()) for dim in (None, 1))
    assert apart < 0.03 < plain


@pytest.mark.parametrize("shape", [(1, 11, 256), (2, 5, 48), (1, 2, 16)])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_8_bits_has_the_same_bits_everywhere(size, shape, dtype) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(size)]
    expected = functools.reduce(torch.add, [part.float() for part in parts])
    worst = max(float(part.float().abs().max()) for part in parts) * size * 2
    num_scales = -(-shape[-1] // 128) if shape[-1] % 128 == 0 else 1
    num_bytes = parts[0].numel() // shape[-1] * (shape[-1] + 4 * num_scales)
    sent: list[Tensors] = []

    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        sent.append(tensors)
        return [each.clone() for each in tensors]

    group = Collective(size, send, "8-bit")
    found = _together(size, lambda rank: group.all_reduce(rank, "a", parts[rank]))
    assert all(each.dtype == dtype and torch.equal(each, found[0]) for each in found)
    off = float((found[0].float() - expected).abs().max())
    assert 0 < off <= worst * (1 / 254 + (2**-8 if dtype == torch.bfloat16 else 0))
    assert {len(each) for each in sent} == {1}, "codes and scales travel as one"
    assert sum(each[0].nbytes for each in sent) == size * (size - 1) * num_bytes


def test_what_travels_as_one_arrives_as_what_it_was() -> None:
    shapes = {torch.int8: (3, 5), torch.float32: (2, 0), torch.bfloat16: (1, 3), torch.float64: (), torch.uint8: (7,)}
    given = [torch.full(shape, 1 + index, dtype=dtype) for index, (dtype, shape) in enumerate(shapes.items())]
    sent: list[int] = []

    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        sent.append(len(tensors))
        return [each.clone() for each in tensors]

    group = Collective(2, send)

    def work(rank: int) -> list[Tensors]:
        group.post(rank, "a", [each * (rank + 1) for each in given], as_one=True)
        return group.take(rank, "a", given)

    for rank, found in enumerate(_together(2, work)):
        for each, one in zip(found[1 - rank], given, strict=True):
            assert each.dtype == one.dtype and torch.equal(each, one * (2 - rank))
    assert sent == [1, 1]


@pytest.mark.parametrize("tensor", [torch.rand(3, 1), torch.ones(4, 32, dtype=torch.int64), torch.tensor(2.5)])
def test_sums_that_8_bits_would_not_shorten_are_exact(tensor) -> None:
    group = Collective(2, _hand_over, "8-bit")
    assert all(torch.equal(each, tensor + tensor) for each in _together(2, lambda r: group.all_reduce(r, "a", tensor)))
    gathered = _together(2, lambda rank: group.all_gather(rank, "b", tensor))
    assert all(torch.equal(each, tensor) for found in gathered for each in found)


@pytest.mark.parametrize("use", [torch.square, lambda y: y.mul_(3), lambda y: y[1:].mul_(3)])
def test_a_result_that_does_not_count_has_no_gradient(use: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(3, requires_grad=True)
    found = uncounted(2 * x)
    use(found)
    found.square().sum().backward()
    assert torch.equal(x.grad, torch.zeros(3))
