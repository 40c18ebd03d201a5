"""Ranks that share out the rows of a toy with two streams, text and image, joined in its second list of blocks."""

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devicebridge.families.token_plan import BlockRows, TokenPlan
from devicebridge.parallel.local.borrow import RowResiduals
from devicebridge.parallel.local.collectives import Collective, Tensors
from devicebridge.parallel.local.graphs import RECORDED_AFTER
from devicebridge.parallel.local.heads import find_heads, groups_for
from devicebridge.parallel.local.token_graphs import Replays, _led
from devicebridge.parallel.local.tokens import HERE, OneDeviceError, Rows, RowsError, TokenParallel
from devicebridge.tests.stand_in_recorder import stand_in
from devicebridge.tests.unit.parallel.test_graphs import where
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

    def forward(self, img: torch.Tensor, txt: torch.Tensor, pe: torch.Tensor, attend: Any, transformer_options: Any):
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

    def forward(self, img, txt, attend, mask=None, options=None):
        pe = torch.linspace(-1, 1, txt.shape[1] + img.shape[1])[None, :, None]
        for block in self.doubles:
            img, txt = block(img, txt, pe, attend, options)
        x = torch.cat([txt, img], 1)
        for block in self.singles:
            x = block(x, pe, attend, mask)
        return self.last(x[:, txt.shape[1] :])


def whole(func: Any, *args: Any, **named: Any) -> torch.Tensor:
    return func(*args, **named)


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().double().eval().requires_grad_(False)


def inputs(num_image: int = 11, num_text: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"img": draw(2, num_image, 6), "txt": draw(2, num_text, 6)}


def hand_over(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
    return tensors


def ranks(toy: nn.Module, shares: Sequence[float] = (3, 5), plan: TokenPlan = PLAN) -> TokenParallel:
    return TokenParallel([copy.deepcopy(toy) for _ in shares], [CPU] * len(shares), plan, shares, hand_over)


def forwards(rows: TokenParallel, counts: Sequence[int] = (11, 5), attend: Any = None, **more: Any) -> list[Any]:
    """What all ranks return of the same inputs."""
    rows.attach()
    attend = attend or rows.attend
    try:
        return rows.run([functools.partial(each, **inputs(*counts), attend=attend, **more) for each in rows.modules])
    finally:
        rows.remove()


def shared(toy: nn.Module, shares: Sequence[float], plan: TokenPlan = PLAN, **more: Any) -> list[Any]:
    return forwards(ranks(toy, shares, plan), **more)


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shares", [(1, 1), (3, 5), (1, 100), (1, 1, 1), (2, 3, 3, 1)])
def test_every_rank_has_the_result_of_one_card(toy: Toy, shares: tuple[int, ...]) -> None:
    expected = toy(**inputs(), attend=whole)
    assert all(near(output, expected) for output in shared(toy, shares))


@pytest.mark.parametrize(
    ("with_gradients", "options", "kept"),
    [(False, None, [4, 7]), (True, None, [11, 11]), (False, {"patches_replace": {"dit": {}}}, [11, 11])],
)
def test_what_the_forward_keeps_is_released_if_nobody_may_read_it(toy: Toy, with_gradients, options, kept) -> None:
    """A block's caller holds the stream of all rows until the block returns."""
    expected, given = toy(**inputs(), attend=whole), [inputs(), inputs()]
    rows = ranks(toy, (4, 7), replace(PLAN, released="img"))
    rows.attach()

    def run(model: Toy, img: torch.Tensor, txt: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(with_gradients):
            return model(img, txt, rows.attend, options=options)

    outputs = rows.run([functools.partial(run, each, **mine) for each, mine in zip(rows.modules, given, strict=True)])
    assert all(near(output, expected) for output in outputs)
    assert [each["img"].shape[1] for each in given] == kept


def test_a_square_mask_is_cut_to_a_ranks_queries(toy: Toy) -> None:
    mask = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected = toy(**inputs(), attend=whole, mask=mask)
    assert not torch.allclose(expected, toy(**inputs(), attend=whole))
    assert all(near(output, expected) for output in shared(toy, (3, 5), mask=mask))


SINGLES = TokenPlan({"singles": BlockRows("x=x@1 pe=x@1", "attn=y+x")})
LAYERS = TokenPlan({"layers": BlockRows("x=x@1", "attn=x")})
IMAGES = TokenPlan({"doubles": BlockRows("img=img@1 txt=img@1", "attn=img")})


@pytest.mark.parametrize(
    ("error", "words", "more"),
    [
        (OneDeviceError, "1 rows of txt for 2 devices", {"counts": (11, 1)}),
        (OneDeviceError, "1 rows of img for 2 devices", {"counts": (1, 5)}),
        (OneDeviceError, "2 rows of txt for 3 devices", {"counts": (11, 2), "shares": (1, 1, 1)}),
        (OneDeviceError, "2 rows of txt for 3 devices", {"counts": (11, 2), "shares": (1, 1, 100)}),
        (OneDeviceError, r"one row of y\+x", {"plan": SINGLES}), (AttributeError, "Toy.*layers", {"plan": LAYERS}),
        (RowsError, r"doubles\.0, txt: 5 rows along img.*11.*6", {"plan": IMAGES}),
        (RowsError, r"singles\.0\.attn.*\(1, 16, 7\)", {"mask": torch.zeros(1, 16, 7).double()}),
        (RowsError, r"no attention of doubles\.0", {"attend": whole}),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_by_rows_is_said(toy: Toy, error: Any, words: str, more: dict[str, Any]) -> None:
    with pytest.raises(error, match=words):
        shared(toy, **{"shares": (1, 1), **more})


class Mixer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.linspace(1, 2, x.shape[1])[:, None] * x.cumsum(1)


class Windows(nn.Module):
    """Blocks that run once per window, with the whole text behind each and all rows mixed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.mixer, self.tail = nn.ModuleList(Texted() for _ in range(2)), Mixer(), Mixer()

    def forward(self, img: torch.Tensor, txt: torch.Tensor, attend: Any, mask: torch.Tensor) -> torch.Tensor:
        found = []
        for window in (img[:, :7], img):
            x = torch.cat([window, txt], 1)
            for block in self.blocks:
                x = self.mixer(block(x, len(txt[0]), attend, mask[:, : window.shape[1]]))
            found.append(self.tail(x))
        return torch.cat(found, 1)


class Texted(Single):
    """Its mask has the columns of the keys that it sees."""

    def forward(self, x: torch.Tensor, num_text: int, attend: Any, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        columns = torch.cat([mask, mask.new_zeros(len(mask), num_text)], 1)
        return x + self.attn(x, attend, columns[:, None])


WINDOWS = TokenPlan(
    {"blocks": BlockRows("num_text=txt x=img+txt@1 mask=img@1", "attn=img+txt")}, out="", tail="tail=img+txt@1",
    between="mixer=img+txt@1", whole=("txt",), cuts_masks=True,
)  # fmt: skip


@pytest.mark.parametrize("shares", [(1, 1), (3, 5), (2, 3, 3)])
def test_windows_with_a_whole_text_and_modules_that_read_all_rows(shares: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Windows().double().eval().requires_grad_(False)
    mask = torch.randn(2, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = model(**inputs(), attend=whole, mask=mask)
    assert not torch.allclose(expected, model(**inputs(), attend=whole, mask=0 * mask))
    assert all(near(output, expected) for output in shared(model, shares, WINDOWS, mask=mask))


def test_a_group_for_each_rank_or_one_device() -> None:
    here = rows_of(0, (1, 1, 1), aligned="e img")
    here.lengths["e"] = 4
    here.check_counts()
    here.lengths |= {"e": 2, "none": 0}
    with pytest.raises(OneDeviceError, match="16 rows of img for 3 devices"):
        here.check_counts()
    here.lengths["e"] = 3
    with pytest.raises(OneDeviceError, match="16 rows of img are no whole groups of 3"):
        here.share("img")


def test_keys_that_are_read_again_are_gathered_with_the_values_that_are_read_now(toy: Toy) -> None:
    def twice(attend: Any, func: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        return attend(func, q, k, v, **named) + attend(func, q, k, v * 2 + 1, **named)

    expected, rows = toy(**inputs(), attend=functools.partial(twice, whole)), ranks(toy)
    assert all(near(output, expected) for output in forwards(rows, attend=functools.partial(twice, rows.attend)))


def test_keys_come_in_the_order_of_one_card(toy: Toy) -> None:
    rows, keys, expected = ranks(toy), [], []
    rows.on_keys = lambda rank, axis, k: rank or keys.append((axis, k))
    forwards(rows)
    toy(**inputs(), attend=lambda func, q, k, v, **named: expected.append(k) or func(q, k, v, **named))
    assert [axis for axis, _ in keys] == ["txt+img"] * 4
    assert all(torch.allclose(k, one) for (_, k), one in zip(keys, expected, strict=True))


def test_an_error_while_hooks_are_attached_leaves_none(toy: Toy) -> None:
    rows = ranks(toy)
    one, two = rows.modules
    block, two.singles[1] = two.singles[1], nn.Identity()  # without what the plan names in it
    with pytest.raises(AttributeError):
        rows.attach()
    assert all(type(each) in (Double, Single) for each in (*one.doubles, *one.singles))
    two.singles[1] = block
    assert all(near(each, toy(**inputs(), attend=whole)) for each in forwards(rows))


def test_the_first_error_of_a_rank_ends_all(toy: Toy) -> None:
    rows = ranks(toy, (1, 1, 1))
    rows.modules[1].singles[0].attn.qkv.register_forward_pre_hook(mock.Mock(side_effect=KeyError("here")))
    with pytest.raises(KeyError, match="here"):
        forwards(rows)
    assert rows.rows is None, "this thread's forward is over"


def test_without_a_forward_of_ranks_a_hooked_model_computes_as_before_and_is_asked_at_each_block(toy: Toy) -> None:
    expected, calls = toy(**inputs(), attend=whole), list[int]()
    rows = ranks(toy)
    rows.attach()
    with mock.patch.object(HERE, "on_block", lambda: calls.append(1)):
        assert torch.equal(rows.modules[0](**inputs(), attend=rows.attend), expected)
    assert len(calls) == 4
    rows.remove()
    assert torch.equal(rows.modules[0](**inputs(), attend=whole), expected)


def heads_one_by_one(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False):
    """As ComfyUI's attention functions are called; no kernel of its sees how many heads there are."""
    if not skip_reshape:
        q, k, v = (each.reshape(*each.shape[:2], heads, -1).transpose(1, 2) for each in (q, k, v))
    assert q.shape[1] == heads
    masks = [None] * heads if mask is None else mask.expand(-1, heads, -1, -1).unbind(1)
    out = torch.stack(
        [attention(*each, mask=one) for *each, one in zip(*(x.unbind(1) for x in (q, k, v)), masks, strict=True)], 1
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


class Headed(nn.Module):
    """A block whose attention has heads, in each of the layouts that ComfyUI's functions take."""

    def __init__(self, heads: int, layout: str) -> None:
        super().__init__()
        self.heads, self.layout = heads, layout
        self.qkv = nn.Linear(6, 3 * 4 * heads)
        self.out = nn.Linear(4 * heads, 6)

    def forward(self, x: torch.Tensor, attend: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        named: dict[str, Any] = {"mask": mask}
        if "apart" in self.layout:
            q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
            named["skip_reshape"] = True
        elif "values" in self.layout:  # as SD3 has them
            v = v.unflatten(-1, (self.heads, -1))
        if "out" in self.layout:
            named["skip_output_reshape"] = True
        by_position = attend(heads_one_by_one, q, k, v, self.heads, **named)
        again = attend(heads_one_by_one, q, k, v, heads=self.heads, **named)  # with the same keys
        assert torch.equal(by_position, again)
        return x + self.out(again.transpose(1, 2).flatten(2) if "out" in self.layout else again)


class HeadedModel(nn.Module):
    def __init__(self, heads: int, layout: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Headed(heads, layout) for _ in range(2))

    def forward(self, x: torch.Tensor, attend: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, attend, mask)
        return x


HEADED = TokenPlan({"blocks": BlockRows("x=x@1", "=x")})


def headed(model, shares, groups, exchange="full", batch=2, **more):
    """Every rank's output, and of the first its keys, its messages for the second, and its attentions."""
    events: list[str] = []
    keys: list[torch.Tensor] = []

    def send(tensors: Tensors, rank: int, arrivals: Any) -> Tensors:
        if rank == 1 and rows.rows is not None and rows.rows.rank == 0:
            events.append(f"sent {len(tensors)}")
        return [each.clone() for each in tensors]

    models = [copy.deepcopy(model) for _ in shares]
    rows = TokenParallel(models, [CPU] * len(shares), HEADED, shares, send, groups, exchange)
    rows.on_keys = lambda rank, axis, k: rank or keys.append(k)
    rows.attach()
    x = torch.randn(batch, 13, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def attend(func: Any, *args: Any, **named: Any) -> torch.Tensor:
        def noted(*given: Any, **rest: Any) -> Any:
            if rows.rows is not None and rows.rows.rank == 0 and given[1].shape[-2] == 13:
                events.append(f"attends by {given[3] if len(given) > 3 else rest['heads']}")
            return func(*given, **rest)

        return rows.attend(noted, *args, **named)

    return rows.run([functools.partial(each, x, attend, **more) for each in models]), keys, events


@pytest.mark.parametrize("layout", ["flat", "apart", "flat, out", "apart, out", "flat, values"])
@pytest.mark.parametrize(("heads", "num"), [(4, 4), (6, 3), (5, 1)])
def test_groups_of_heads_have_the_bits_of_all_heads_at_once(heads: int, num: int, layout: str) -> None:
    torch.manual_seed(0)
    model = HeadedModel(heads, layout).double().requires_grad_(False)
    mask = torch.randn(2, heads, 13, 13, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for shares, batch, more in (((1, 1), 2, {}), ((3, 5), 1, {}), ((2, 3, 3), 2, {"mask": mask})):
        (one, keys, _), (several, same, events) = (headed(model, shares, n, batch=batch, **more) for n in (1, 4))
        assert all(torch.equal(a, b) for a, b in zip(several, one, strict=True))
        assert len(keys) == 4 and all(torch.equal(a, b) for a, b in zip(same, keys, strict=True))
        if layout == "apart":  # each group is sent before the first one is computed
            assert events[: 2 * num : 1][-num:] == [f"attends by {heads // num}"] * num
            assert events[:num] == ["sent 2"] * num


def test_heads_are_not_looked_for_where_they_are_not_clear() -> None:
    flat, apart = torch.zeros(1, 7, 24), torch.zeros(1, 4, 7, 6)
    assert find_heads((flat,) * 3, (4,), {}) == (4, 2, 2)
    assert find_heads((apart,) * 3, (4, None, None, True), {}) == (4, 1, 2)
    for tensors, args, named in (
        ((flat,) * 3, (), {"mask": flat}),  # not ComfyUI's
        ((flat,) * 3, (flat,), {}),
        ((flat,) * 3, (5,), {}),
        ((apart,) * 3, (8, None, None, True), {}),
        ((apart, apart[:, :2], apart[:, :2]), (4,), {"skip_reshape": True}),
        ((flat, flat[..., :12], flat[..., :12]), (4,), {}),
        ((flat,) * 3, (4,), {"enable_gqa": True}),
        ((flat,) * 3, (4, None, None, False, False, 1), {}),
    ):
        assert find_heads(tensors, args, named) is None


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("layout", ["flat", "apart", "flat, values"])
def test_in_8_bits_a_ranks_own_rows_stay_exact_and_the_result_is_near(layout: str, groups: int) -> None:
    torch.manual_seed(0)
    model = HeadedModel(4, layout).double().requires_grad_(False)
    (full, keys, _), (short, coded, events) = (headed(model, (3, 5), groups, how) for how in ("full", "8-bit"))
    assert events.count("sent 1") == 4 * groups + 1 and "sent 2" not in events  # and the output
    dim = 1 if layout.startswith("flat") else 2
    own, others = (0, 5), (5, 8)
    assert torch.equal(coded[0].narrow(dim, *own), keys[0].narrow(dim, *own))
    assert 0 < float((coded[0].narrow(dim, *others) - keys[0].narrow(dim, *others)).abs().max()) < 0.02
    for a, b in zip(short, full, strict=True):
        assert 0 < float((a - b).norm() / b.norm()) < 0.005


@pytest.mark.parametrize("groups", [1, 4])
def test_keys_of_a_block_are_let_go_without_the_collector(groups: int, no_collector: None) -> None:
    class Kept(Headed):
        def forward(self, x: torch.Tensor, attend: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
            q, k, v = (each.contiguous() for each in self.qkv(x).chunk(3, -1))
            seen.extend(map(weakref.ref, (k, v)))
            return x + self.out(attend(heads_one_by_one, q, k, v, self.heads))

    seen: list[weakref.ref[torch.Tensor]] = []
    model = HeadedModel(4, "flat").double().requires_grad_(False)
    model.blocks = nn.ModuleList(Kept(4, "flat").double().requires_grad_(False) for _ in range(2))
    headed(model, (1, 1), groups)
    assert len(seen) == 8 and not any(each() is not None for each in seen)


def test_what_needs_gradients_travels_whole() -> None:
    model = HeadedModel(4, "flat").double()
    _, _, events = headed(model, (1, 1), 4, "8-bit")
    assert [each for each in events if each.startswith("sent")][:2] == ["sent 1", "sent 1"]


def test_groups_are_taken_where_a_link_is_slow_for_its_cards_and_the_host_launches_fast_enough() -> None:
    """On two H200 of 744e12 operations per second, one group was measured to be faster over NVLink, four at 39 GB/s.
    Blocks of Wan, FLUX.2 and FLUX.1 take one of two H200 13, 4.8 and 4 ms."""
    assert [groups_for(744e12, link) for link in (182e9, 39e9, 20e9)] == [1, 4, 4]
    assert groups_for(71e12, 50e9) == 1 and groups_for(165e12, 13e9) == 4
    assert groups_for(744e12, 80e9) == 4 and groups_for(744e12, 80e9, "8-bit") == 1  # half the bytes
    assert [groups_for(744e12, 20e9, block_s=each) for each in (13e-3, 4.8e-3, 4e-3)] == [4, 1, 1]
    assert groups_for(744e12, 182e9, block_s=13e-3) == 1


def rows_of(rank: int, shares: Sequence[float] = (3, 5), **plan: Any) -> Rows:
    here = Rows(rank, TokenPlan({}, **plan), shares, Collective(len(shares), hand_over))
    here.lengths = {"txt": 5, "img": 16}
    return here


def test_shares_cover_all_rows_once_and_each_rank_has_some() -> None:
    for shares in ((1, 1), (3, 5), (1, 100), (1, 1, 1), (0.3, 0.4, 0.3), (3.5, 1), (8, 1), (100, 1, 1, 100), (1,) * 8):
        for length, groups in itertools.product((0, 1, 2, 3, 4, 7, 8, 9, 64), (1, 2, 3)):
            parts = []
            for rank in range(len(shares)):
                here = rows_of(rank, shares, aligned="e img")
                here.lengths = {"img": length * groups, "e": length}
                parts.append(here.share("img"))
                if length > 1:
                    assert parts[-1] == tuple(groups * each for each in here.share("e"))
            length *= groups
            assert parts[0][0] == 0 and sum(count for _, count in parts) == length
            assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(parts))
            counts = [count for _, count in parts]
            if length >= groups * len(shares):
                assert min(counts) >= groups
            if len({*shares}) == 1 and length > groups:
                starts = [round(length // groups * rank / len(shares)) * groups for rank in range(len(shares))]
                assert [first for first, _ in parts] == starts


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
    both = sorted({*range(2, 9)} & {*range(here.share("img")[0], sum(here.share("img")))})
    assert high - low == len(both)
    assert here.count([(2, 9, torch.arange(2, 9))], "img")[0][2].tolist() == both, "its values go with the rows"
    assert here.count(None, "img") is None and here.count([(None, None)], "img") == [(None, None)]


def test_residuals_are_cut_until_rows_are_gathered() -> None:
    here, whole_rows = rows_of(1), torch.arange(12)[None, :, None]  # shorter than the axis
    residuals = RowResiduals([whole_rows, None], here, "img")
    assert residuals[0].flatten().tolist() == [6, 7, 8, 9, 10, 11] and residuals[1] is None
    assert [each if each is None else each.shape[1] for each in residuals] == [6, None]
    assert [each if each is None else each.shape[1] for each in reversed(residuals)] == [None, 6]
    for act, words in (
        (lambda: residuals[:1], "slice"), (residuals.copy, "copy"), (lambda: copy.copy(residuals), "copy"),
        (lambda: residuals + [None], "copy"), (lambda: [None] + residuals, "copy"), (lambda: residuals * 2, "copy"),
        (lambda: 2 * residuals, "copy"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"{words}.*way 'blocks'"):
            act()
    here.is_gathered = True
    assert residuals.pop(0) is whole_rows


class Led(nn.Module):
    """Blocks that find attention in the options, as ComfyUI's do; `raising` raises in a recording on the last rank.
    They write into what they are given, and so does what is between them, as FLUX's and the residuals of a
    ControlNet."""

    def __init__(self, raising: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Finding() for _ in range(3))
        self.raising = raising

    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        for block in self.blocks:
            block.raising = self.raising
            x = block(x, transformer_options=transformer_options)
            x += 0.5
        return x


class Finding(Single):
    def forward(self, x: torch.Tensor, transformer_options: Any) -> torch.Tensor:
        if self.raising and type(transformer_options) is not dict and HERE.rows.rank == 1:
            raise ValueError("refused")
        return x.copy_(super().forward(x, torch.zeros(()), transformer_options["attend"]))


def replayed(raising: bool, counts: Sequence[int], groups: int = 0) -> tuple[Any, list[int]]:
    """The graphs of forwards of so many rows each, whose results are those of one card; the groups that were seen."""
    torch.manual_seed(0)
    model, seen = Led(raising).double().requires_grad_(False), []
    rows = ranks(model, (1, 1), TokenPlan({"blocks": BlockRows("x=x@1", "attn=x")}))

    def attend(*args: Any, **named: Any) -> torch.Tensor:
        seen.append(HERE.rows.groups)
        return rows.attend(*args, **named)

    graphs = stand_in([CPU] * 2, None, where)
    graphs._recording.cards_wait = not groups
    rows.attach()
    try:
        for index, count in enumerate(counts):
            x = torch.randn(1, count, 6, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            with torch.inference_mode():
                calls = [functools.partial(each, x.clone(), {"attend": attend}) for each in rows.modules]
                found = rows.run(calls, Replays(graphs, None, groups))
            expected = model(x, {"attend": whole})
            assert all(near(each, expected) for each in found), index
            assert not graphs._held, "activations are held between forwards"
    finally:
        rows.remove()
    return graphs, seen


def test_blocks_are_replayed_for_the_rows_of_all_ranks() -> None:
    """Of eleven rows and of twelve the first rank has six; each number is recorded by itself."""
    graphs, _ = replayed(False, [11, 12] * (RECORDED_AFTER + 3))
    assert graphs._recording.num_recorded == 6 and graphs.num_replays >= 6 and not graphs.fault


def test_an_error_of_another_rank_in_a_recording_ends_recording_alone() -> None:
    graphs, _ = replayed(True, [9] * (RECORDED_AFTER + 3))
    assert "refused" in graphs.fault and not graphs.num_replays


def test_where_replays_have_other_groups_of_heads_cards_need_not_wait_to_be_recorded() -> None:
    graphs, seen = replayed(False, [9] * (RECORDED_AFTER + 3), groups=3)
    assert graphs.num_replays == 6 and seen[: 6 * RECORDED_AFTER] == [0] * 6 * RECORDED_AFTER
    assert set(seen[6 * RECORDED_AFTER :]) == {3}


def test_an_interrupt_of_the_first_rank_ends_what_others_wait_for() -> None:
    """It comes when the other one has its work, and waits for a rank that will compute nothing."""
    outer, is_waiting = Collective(2, hand_over), threading.Event()
    both = [SimpleNamespace(rank=rank, group=outer, groups=0) for rank in range(2)]
    send = outer.send

    def interrupted(rank: int, *given: Any) -> None:
        send(rank, *given)
        if rank == 0:
            is_waiting.wait()
            raise KeyboardInterrupt

    def wait() -> None:
        is_waiting.set()
        both[1].group.receive(0, 1, "keys")

    def compute(given: Any, run: Any) -> Any:
        return run([lambda: None, wait])

    def follow() -> None:
        with suppress(RuntimeError):
            _led(both[1], "block", None, compute)  # type: ignore[arg-type]

    outer.send = interrupted  # type: ignore[method-assign]
    other = threading.Thread(target=follow, daemon=True)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        _led(both[0], "block", None, compute)  # type: ignore[arg-type]
    outer.abort(RuntimeError("ended"))
    other.join(60)
    assert not other.is_alive()
