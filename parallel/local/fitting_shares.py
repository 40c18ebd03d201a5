"""How large each device's share of every block is: even where that fits, else by what each device has room for.

Shares are counted in groups of heads, which stay together: heads, or heads of keys and values where those are fewer.
An even share computes fastest on devices of one kind. Where one of them has no room for it, each takes a share in
proportion to the groups that it has room for, beside all that it holds whatever its share is. So some share fits this
way if any does, and no device is full before the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import permutations

from ...families.tensor_plan import proportional

Sizes = Callable[[Sequence[int]], Sequence[float]]  # groups of each device -> bytes that each holds then


def fit_groups(num_groups: int, most: Sequence[float]) -> list[int]:
    """Groups of each device, at least one. Where nothing fits they are in proportion all the same.

    Args:
        most: how many groups each device has room for; below 0 where all else is too much already.
    """
    even = proportional(num_groups, [1.0] * len(most))
    room = [max(0.0, each) for each in most]
    if not any(room) or all(count <= each for count, each in zip(even, room, strict=True)):
        return even
    whole = [max(1, int(each)) for each in room]
    return proportional(num_groups, room, whole if sum(whole) >= num_groups else ())


def settle_groups(groups: Sequence[int], rooms: Sequence[float], sizes: Sizes, tries: int = 100) -> list[int]:
    """The first groups that fit, looked for from these on, a group moved at a time and the least wrong ones first;
    these if none of so many tried does. Blocks of other kinds round their shares in their own way."""
    start = tuple(groups)
    seen, waiting = {start}, [(_over(start, rooms, sizes), start)]
    if sum(sizes(start)) > sum(rooms):  # which is so of every share
        return list(start)
    while waiting and len(seen) < tries:
        over, found = heappop(waiting)
        if over <= 0:
            return list(found)
        for source, target in permutations(range(len(found)), 2):
            moved = tuple(count - (index == source) + (index == target) for index, count in enumerate(found))
            if moved[source] and moved not in seen:
                seen.add(moved)
                heappush(waiting, (_over(moved, rooms, sizes), moved))
    return list(start)


def _over(groups: Sequence[int], rooms: Sequence[float], sizes: Sizes) -> float:
    """Bytes that the device which is worst off holds above its room."""
    return max(size - room for size, room in zip(sizes(groups), rooms, strict=True))
