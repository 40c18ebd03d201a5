"""How layers are shared out among devices: every row is in one device's slices, and what cannot be cut is refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from devicebridge.families.comfy.token_plans import ltx_guides
from devicebridge.families.tensor_plan import QKV, Divided, Shares, TensorPlan, share_heads

DEVICES = range(2, 9)
# Heads, heads of keys and values (0: as many), features per head: of FLUX, Wan, Qwen-Image, LTX, and of grouped heads.
BUILDS = [(24, 0, 128), (48, 0, 128), (40, 0, 128), (12, 0, 64), (32, 8, 128), (9, 0, 8)]
PACKED = [
    ("heads", "heads", "heads"), ("heads", "kv_heads", "kv_heads"),
    ("heads", "kv_heads", "kv_heads", "features", "features"), ("features", "features"), ("heads", "features"),
    ("features",),
]  # fmt: skip


def _size(parts, shares: Shares, features: int) -> int:
    per_head = shares.width // sum(shares.heads)
    lengths = {"heads": shares.width, "kv_heads": per_head * sum(shares.kv_heads), "features": features}
    return sum(lengths[unit] for unit in parts)


def _rows(ranges) -> list[int]:
    return [row for first, last in ranges for row in range(first, last)]


@pytest.mark.parametrize("count", DEVICES)
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_every_row_of_a_packed_layer_is_in_exactly_one_devices_slices(build, count) -> None:
    heads, kv_heads, per_head = build
    shares = share_heads(heads, kv_heads, heads * per_head, count)
    for parts, features in itertools.product(PACKED, (4 * heads * per_head, 1000, 48)):
        size = _size(parts, shares, features)
        slices = [shares.slices(parts, size, rank) for rank in range(count)]
        assert sorted(itertools.chain(*map(_rows, slices))) == list(range(size)), (parts, features)
        assert all(last > first for ranges in slices for first, last in ranges), (parts, features)


@pytest.mark.parametrize("count", DEVICES)
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_a_device_has_the_same_heads_of_queries_keys_and_values(build, count) -> None:
    """By the rows themselves: the head of each row of q, and the group of heads that each row of k serves."""
    heads, kv_heads, per_head = build
    groups = kv_heads or heads
    shares = share_heads(heads, kv_heads, heads * per_head, count)
    size = (heads + 2 * groups) * per_head
    for rank in range(count):
        owned = [row // per_head for row in _rows(shares.slices(("heads", "kv_heads", "kv_heads"), size, rank))]
        queries = {head for head in owned if head < heads}
        keys = {head - heads for head in owned if heads <= head < heads + groups}
        values = {head - heads - groups for head in owned if head >= heads + groups}
        assert keys == values == {head // (heads // groups) for head in queries}
        assert len(queries) == shares.heads[rank] == shares.count("heads", heads, rank)
        assert len(keys) == shares.kv_heads[rank] == shares.count("kv_heads", groups, rank)


def test_a_packed_layer_is_cut_part_by_part() -> None:
    shares = share_heads(4, 0, 32, 2)
    assert shares.slices(("heads", "heads", "heads"), 96, 0) == [(0, 16), (32, 48), (64, 80)]
    assert shares.slices(("heads", "heads", "heads"), 96, 1) == [(16, 32), (48, 64), (80, 96)]
    # The input columns of FLUX's fused block are [attention | mlp].
    assert shares.slices(("heads", "features"), 96, 0) == [(0, 16), (32, 64)]
    assert shares.slices(("heads", "features"), 96, 1) == [(16, 32), (64, 96)]
    assert Shares((4,), (4,), 32).slices(("heads", "heads", "features"), 100, 0) == [(0, 100)]  # neighbours become one


def test_parts_are_repeated_as_often_as_they_fit() -> None:
    """Stable Audio packs [q | k | v], or with differential attention [q | k | v | q | k]."""
    shares = share_heads(8, 4, 64, 2)
    assert shares.repeated(("heads",), 5 * 64) == ("heads",) * 5
    assert shares.repeated(("kv_heads",), 2 * 32) == ("kv_heads",) * 2
    with pytest.raises(ValueError, match="a dimension of 321 cannot consist of heads, heads, heads, heads, heads"):
        shares.slices(shares.repeated(("heads",), 5 * 64 + 1), 5 * 64 + 1, 0)


@pytest.mark.parametrize(
    ("heads", "count", "expected"), [(48, 2, (24, 24)), (24, 5, (4, 5, 5, 5, 5)), (4, 3, (1, 1, 2))]
)
def test_heads_are_shared_evenly_and_a_rest_goes_to_the_last(heads, count, expected) -> None:
    assert share_heads(heads, 0, heads * 8, count).heads == expected


@pytest.mark.parametrize("count", DEVICES)
def test_shares_of_heads_are_whole_groups(count) -> None:
    for heads, kv_heads, per_head in BUILDS:
        shares = share_heads(heads, kv_heads, heads * per_head, count)
        groups = kv_heads or heads
        assert sum(shares.heads) == heads and sum(shares.kv_heads) == groups and len(shares.heads) == count
        for own, own_groups in zip(shares.heads, shares.kv_heads, strict=True):
            assert own == own_groups * (heads // groups) >= 1


@pytest.mark.parametrize("count", DEVICES)
@pytest.mark.parametrize(
    ("size", "step"), [(12288, 128), (13824, 128), (8960, 128), (576, 64), (1000, 8), (999, 1), (64, 8), (40, 1)]
)
def test_features_are_cut_at_multiples_that_kernels_like(size, step, count) -> None:
    """The step is the one of 8 equal devices; fewer devices may have a larger one."""
    ranges = share_heads(8 * count, 0, 64 * count, count).ranges("features", size)
    assert [first for first, _ in ranges] == [0, *(last for _, last in ranges[:-1])] and ranges[-1][1] == size
    assert all(first % step == 0 and last > first for first, last in ranges)


def test_a_small_share_of_heads_gets_features_as_well() -> None:
    """128 at a time would leave the first device none of 256."""
    assert Shares((1, 7), (1, 7), 64).ranges("features", 256) == [(0, 32), (32, 256)]


def test_what_belongs_to_no_head_is_counted() -> None:
    shares = share_heads(8, 2, 64, 2)
    assert shares.without_heads(("heads", "kv_heads", "kv_heads", "features"), 64 + 16 + 16 + 200) == 200
    assert shares.without_heads(("heads",), 64) == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "words"),
    [
        (2, 0, 3, ("2 heads", "3 devices", "2 devices at most")),
        (32, 4, 5, ("32 heads (4 of keys and values)", "5 devices", "4 devices at most")),
        (10, 4, 2, ("10 heads (4 of keys and values)", "2 devices")),
    ],
)
def test_too_few_heads_are_refused(heads, kv_heads, count, words) -> None:
    with pytest.raises(ValueError, match="cannot be divided among") as caught:
        share_heads(heads, kv_heads, heads * 8, count)
    assert all(word in str(caught.value) for word in words)


def test_a_dimension_of_other_parts_is_refused() -> None:
    shares = share_heads(4, 0, 32, 2)
    for size, parts in ((95, QKV), (97, QKV), (65, ("heads", "features", "features"))):
        with pytest.raises(ValueError, match=f"a dimension of {size} cannot consist of {', '.join(parts)}"):
            shares.slices(parts, size, 0)
    with pytest.raises(ValueError, match="30 features are no multiple of 4 heads"):
        shares.ranges("heads", 30)
    with pytest.raises(ValueError, match="1 features cannot be divided among 2 devices"):
        shares.ranges("features", 1)


def test_the_first_matching_pattern_counts() -> None:
    first, second = Divided("*.proj", "row", ("heads",)), Divided("mlp.*", "column", ("features",))
    plan = TensorPlan((first, second), "num_heads", "dim", norms=("*.norm_q",))
    assert plan.find("mlp.proj") is first and plan.find("mlp.up") is second and plan.find("norm") is None
    assert plan.is_norm("attn.norm_q") and not plan.is_norm("norm_q_later")


@pytest.mark.parametrize(("first", "last"), [(0, 32), (32, 64), (0, 40), (40, 64)])
def test_a_rank_without_noisy_rows_calls_ltx_attention_as_often_as_others(first, last):
    """LTX attends noisy rows where there are some, and guides always. Each rank brings its keys to both."""
    mask = SimpleNamespace(guide_start=32, tracked_count=32, tracked_mask=torch.arange(32.0).view(1, 1, 32, 1))
    rows = SimpleNamespace(
        count=lambda number, axis: min(max(number - first, 0), last - first),
        rows_before=lambda number, axis: max(first - number, 0),
    )
    made, queries = ltx_guides(rows, mask), torch.arange(first, last)
    assert made.guide_start > 0 and made.guide_start + made.tracked_count == last - first
    assert torch.equal(queries[: made.guide_start], torch.arange(first, max(min(last, 32), first)))
    assert made.tracked_mask.flatten().tolist() == [each - 32 for each in range(max(first, 32), last)]
