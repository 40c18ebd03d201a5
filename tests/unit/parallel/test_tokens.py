"""Ranks that share out the rows of a toy with two streams, text and image, joined in its second list of blocks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from devicebridge.families.token_plan import BlockRows, TokenPlan, places
from devicebridge.parallel.local.collectives import Collective
from devicebridge.parallel.local.residuals import Residuals
from devicebridge.parallel.local.tokens import HERE, OneDeviceError, Rows, TokenParallel
from torch import nn

CPU = torch.device("cpu")
PLAN = TokenPlan(
    {
        "doubles": BlockRows("img=img@1 txt=txt@1 pe=txt+img@1", "attn=txt+img"),
        "singles": BlockRows("x=txt+img@1 pe=txt+img@1", "attn=txt+img"),
    },
    out="=txt+img@1",
    own=("txt",),
)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2)
    return (scores if mask is None else scores + mask).softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)

    def forward(self, x: torch.Tensor, attend: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        return attend(attention, *self.qkv(x).chunk(3, -1), mask=mask)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Linear(6, 6)

    def forward(self, img: torch.Tensor, txt: torch.Tensor, pe: torch.Tensor, attend: Any) -> Any:
        both = torch.cat([txt, img], 1) + pe
        both = both + self.attn(both, attend)
        img.add_(self.mlp(img))  # as some classes do; its caller's tensor must not change on a rank that has a view
        return img + both[:, txt.shape[1] :], both[:, : txt.shape[1]]


class Single(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: torch.Tensor, pe: torch.Tensor, attend: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.attn(x + pe, attend, mask)


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.doubles = nn.ModuleList(Double() for _ in range(2))
        self.singles = nn.ModuleList(Single() for _ in range(2))
        self.last = nn.Linear(6, 2)

    def forward(
        self, img: torch.Tensor, txt: torch.Tensor, attend: Any, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        pe = torch.linspace(-1, 1, txt.shape[1] + img.shape[1])[None, :, None]
        for block in self.doubles:
            img, txt = block(img, txt, pe, attend)
        x = torch.cat([txt, img], 1)
        for block in self.singles:
            x = block(x, pe, attend, mask)
        return self.last(x[:, txt.shape[1] :])


def whole(func: Any, *args: Any, **named: Any) -> torch.Tensor:
    """Attention on one card."""
    return func(*args, **named)


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double().eval().requires_grad_(False)


def inputs(num_image: int = 11, num_text: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"img": draw(2, num_image, 6), "txt": draw(2, num_text, 6)}


def shared(
    toy: Toy, shares: Sequence[float], plan: TokenPlan = PLAN, counts: tuple[int, int] = (11, 5), **more: Any
) -> list[torch.Tensor]:
    models = [copy.deepcopy(toy) for _ in shares]
    rows = TokenParallel(models, [CPU] * len(shares), plan, shares, lambda tensors, rank, arrivals: tensors)
    rows.attach()
    calls = [functools.partial(model, **inputs(*counts), attend=rows.attend, **more) for model in models]
    try:
        return rows.run(calls)
    finally:
        rows.remove()


@pytest.mark.parametrize("shares", [(1, 1), (3, 5), (1, 1, 1), (2, 3, 3, 1)])
def test_every_rank_has_the_result_of_one_card(toy: Toy, shares: tuple[int, ...]) -> None:
    expected = toy(**inputs(), attend=whole)
    for output in shared(toy, shares):
        assert output.shape == expected.shape
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def test_a_square_mask_is_cut_to_a_ranks_queries(toy: Toy) -> None:
    mask = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = toy(**inputs(), attend=whole, mask=mask)
    assert not torch.allclose(expected, toy(**inputs(), attend=whole))
    for output in shared(toy, (3, 5), mask=mask):
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def test_a_mask_of_another_size_is_refused(toy: Toy) -> None:
    with pytest.raises(RuntimeError, match=r"singles\.0\.attn.*\(1, 16, 7\)"):
        shared(toy, (1, 1), mask=torch.zeros(1, 16, 7, dtype=torch.float64))


@pytest.mark.parametrize(
    ("counts", "shares", "words"),
    [
        ((11, 1), (1, 1), "1 rows of txt for 2 devices"),
        ((1, 5), (1, 1), "1 rows of img for 2 devices"),
        ((11, 2), (1, 1, 1), "2 rows of txt for 3 devices"),
        ((11, 5), (1, 100), "11 rows of img for 2 devices"),
    ],
)
def test_a_rank_without_rows_is_told(toy: Toy, counts: tuple[int, int], shares: tuple[int, ...], words: str) -> None:
    with pytest.raises(OneDeviceError, match=words):
        shared(toy, shares, counts=counts)


def test_one_row_of_an_axis_that_no_other_tensor_has_is_told(toy: Toy) -> None:
    plan = TokenPlan({"singles": BlockRows("x=x@1 pe=x@1", "attn=y+x")})
    with pytest.raises(OneDeviceError, match=r"one row of y\+x"):
        shared(toy, (1, 1), plan)


def test_a_group_for_each_rank_or_one_device() -> None:
    here = rows_of(0, (1, 1, 1), aligned="e img")
    here.lengths["e"] = 4
    here.check_counts()
    here.lengths |= {"e": 2, "none": 0}
    with pytest.raises(OneDeviceError, match="16 rows of img for 3 devices"):
        here.check_counts()


def test_keys_that_are_read_again_are_gathered_with_the_values_that_are_read_now(toy: Toy) -> None:
    def twice(attend: Any, func: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        return attend(func, q, k, v, **named) + attend(func, q, k, v * 2 + 1, **named)

    expected = toy(**inputs(), attend=functools.partial(twice, whole))
    models = [copy.deepcopy(toy) for _ in range(2)]
    rows = TokenParallel(models, [CPU, CPU], PLAN, (3, 5), lambda tensors, rank, arrivals: tensors)
    rows.attach()
    attend = functools.partial(twice, rows.attend)
    for output in rows.run([functools.partial(model, **inputs(), attend=attend) for model in models]):
        assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


def test_keys_come_in_the_order_of_one_card(toy: Toy) -> None:
    models, keys, expected = [copy.deepcopy(toy) for _ in range(2)], [], []
    rows = TokenParallel(models, [CPU, CPU], PLAN, (3, 5), lambda tensors, rank, arrivals: tensors)
    rows.on_keys = lambda axis, k: keys.append((axis, k))
    rows.attach()
    rows.run([functools.partial(model, **inputs(), attend=rows.attend) for model in models])
    toy(**inputs(), attend=lambda func, q, k, v, **named: expected.append(k) or func(q, k, v, **named))
    assert [axis for axis, _ in keys] == ["txt+img"] * 4
    assert all(torch.allclose(k, one) for (_, k), one in zip(keys, expected, strict=True))


def test_attention_that_goes_past_us_is_an_error(toy: Toy) -> None:
    models = [copy.deepcopy(toy) for _ in range(2)]
    rows = TokenParallel(models, [CPU, CPU], PLAN, (1, 1), lambda tensors, rank, arrivals: tensors)
    rows.attach()
    with pytest.raises(RuntimeError, match=r"no attention of doubles\.0"):
        rows.run([functools.partial(model, **inputs(), attend=whole) for model in models])


def test_the_first_error_of_a_rank_ends_all(toy: Toy) -> None:
    models = [copy.deepcopy(toy) for _ in range(3)]
    models[1].singles[0].attn.qkv.register_forward_pre_hook(lambda *given: (_ for _ in ()).throw(KeyError("here")))
    rows = TokenParallel(models, [CPU] * 3, PLAN, (1, 1, 1), lambda tensors, rank, arrivals: tensors)
    rows.attach()
    with pytest.raises(KeyError, match="here"):
        rows.run([functools.partial(model, **inputs(), attend=rows.attend) for model in models])
    assert rows.rows is None, "this thread's forward is over"


def test_without_a_forward_of_ranks_a_hooked_model_computes_as_before(toy: Toy) -> None:
    expected = toy(**inputs(), attend=whole)
    rows = TokenParallel([toy, copy.deepcopy(toy)], [CPU, CPU], PLAN, (1, 1), lambda tensors, rank, arrivals: tensors)
    rows.attach()
    assert torch.equal(toy(**inputs(), attend=rows.attend), expected)
    rows.remove()
    assert torch.equal(toy(**inputs(), attend=whole), expected)


def test_rows_of_another_number_are_refused(toy: Toy) -> None:
    plan = TokenPlan({"doubles": BlockRows("img=img@1 txt=img@1", "attn=img")})
    with pytest.raises(RuntimeError, match=r"doubles\.0, txt: 5 rows along img.*11.*6"):
        shared(toy, (1, 1), plan)


# ---- one rank's rows


def rows_of(rank: int, shares: Sequence[float] = (3, 5), **plan: Any) -> Rows:
    here = Rows(rank, TokenPlan({}, **plan), shares, Collective(len(shares), lambda tensors, to, arrivals: tensors))
    here.lengths = {"txt": 5, "img": 16}
    return here


def test_shares_cover_all_rows_once() -> None:
    for shares in ((1, 1), (3, 5), (1, 100), (1, 1, 1), (0.3, 0.4, 0.3)):
        for length in (0, 1, 2, 7, 64):
            parts = []
            for rank in range(len(shares)):
                here = rows_of(rank, shares)
                here.lengths["img"] = length
                parts.append(here.share("img"))
            assert parts[0][0] == 0 and sum(count for _, count in parts) == length
            assert all(a[0] + a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))


def test_aligned_shares_end_with_a_group() -> None:
    first, second = (rows_of(rank, aligned="e img") for rank in (0, 1))
    for here in (first, second):
        here.lengths["e"] = 4
    assert (first.share("img"), second.share("img"), first.share("e")) == ((0, 8), (8, 8), (0, 2))
    first.lengths["e"] = 3
    with pytest.raises(OneDeviceError, match="16 rows of img are no whole groups of 3"):
        first.share("img")


@pytest.mark.parametrize("rank", [0, 1])
def test_numbers_of_rows_are_counted_as_a_rank_has_them(rank: int) -> None:
    here = rows_of(rank)
    for axis, row in [("img", 9), ("img", 0), ("img", 16), ("txt+img", 3), ("txt+img", 12)]:
        names = axis.split("+")
        marks = torch.cat([torch.arange(here.lengths[name]) + 100 * index for index, name in enumerate(names)])
        before = marks[:row]
        own = torch.cat(
            [
                torch.arange(here.lengths[name])[slice(here.share(name)[0], sum(here.share(name)))] + 100 * index
                for index, name in enumerate(names)
            ]
        )
        assert here.count(row, axis) == int(torch.isin(own, before).sum())
    low, high = here.count([(2, 9)], "img")[0]
    assert high - low == len({*range(2, 9)} & {*range(here.share("img")[0], sum(here.share("img")))})
    assert here.count(None, "img") is None and here.count([(None, None)], "img") == [(None, None)]


def test_residuals_are_cut_until_rows_are_gathered() -> None:
    here, whole_rows = rows_of(1), torch.arange(12)[None, :, None]  # shorter than the axis
    residuals = Residuals([whole_rows, None], here, "img")
    assert residuals[0].flatten().tolist() == [6, 7, 8, 9, 10, 11] and residuals[1] is None
    assert [each if each is None else each.shape[1] for each in residuals] == [6, None]
    assert [each if each is None else each.shape[1] for each in reversed(residuals)] == [None, 6]
    for act, words in (
        (lambda: residuals[:1], "slice"),
        (residuals.copy, "copy"),
        (lambda: copy.copy(residuals), "copy"),
        (lambda: residuals + [None], "copy"),
        (lambda: [None] + residuals, "copy"),
        (lambda: residuals * 2, "copy"),
        (lambda: 2 * residuals, "copy"),
    ):
        with pytest.raises(RuntimeError, match=f"{words}.*way 'blocks'"):
            act()
    here.is_gathered = True
    assert residuals.pop(0) is whole_rows


def test_a_thread_that_computes_all_rows_is_asked_at_each_block(toy: Toy) -> None:
    rows, calls = TokenParallel([toy], [CPU], PLAN, (1,), lambda tensors, rank, arrivals: tensors), list[int]()
    rows.attach()
    before, HERE.on_block = HERE.on_block, lambda: calls.append(1)
    try:
        toy(**inputs(), attend=whole)
    finally:
        HERE.on_block = before
        rows.remove()
    assert len(calls) == 4


def test_places_are_read_from_text() -> None:
    (first, second) = places("pe.0=txt+img@2 =x")
    assert (first.path, first.axis, first.dim) == (("pe", "0"), "txt+img", 2)
    assert (second.path, second.axis, second.dim) == ((), "x", 0)
