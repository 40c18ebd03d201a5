"""Which block lives on which device: pure arithmetic, no GPU and no weights needed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import nn

from ..config.model import Strategy, shares_rows
from ..families.spec import ModelFamily
from ..families.tensor_plan import BlockList
from ..patches.lora import matches_any
from .block_lists import block_fqns, members

Stage = TypeVar("Stage")


@dataclass(frozen=True)
class Placement:
    """One device per block; everything else is on the main device. Names are fqns in execution order. [num_blocks]
    tail: modules and parameters behind the last block that live on its device instead, for pipelines.
    replicas: devices that each hold a copy of all of it, the main device first; () for one model over all devices.
    row_shares: of each microbatch's rows, relative to each other; () if replicas compute microbatches of their own."""

    blocks: tuple[str, ...]
    devices: tuple[torch.device, ...]
    main_device: torch.device
    tail: tuple[str, ...] = ()
    replicas: tuple[torch.device, ...] = ()
    row_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.blocks) == len(self.devices), "one device per block"
        if self.row_shares and (
            len(self.row_shares) != len(self.replicas)
            or not all(isinstance(each, int | float) and 0 < each < math.inf for each in self.row_shares)
        ):
            raise ValueError(
                f"the shares of the tokens are {list(self.row_shares)} for {', '.join(map(str, self.replicas))}; they "
                "are positive numbers, one per device"
            )
        assert not self.replicas or {self.main_device, *self.devices} == {self.replicas[0]} and not self.tail

    def runs(self) -> list[tuple[str, int]]:
        """Device and number of blocks, in the order in which a sample goes through them."""
        return [(name, len(list(blocks))) for name, blocks in itertools.groupby(map(str, self.devices))]

    def items(self) -> list[tuple[str, torch.device]]:
        return list(zip(self.blocks, self.devices, strict=True))

    @property
    def strategy(self) -> Strategy | None:
        """The one that places blocks so; None where they are on different devices, or all on one."""
        if not self.replicas:
            return None
        return "tokens" if self.row_shares else "data"

    @cached_property
    def _device_by_block(self) -> dict[str, torch.device]:
        return dict(self.items()) | dict.fromkeys(self.tail, self.tail_device)

    @property
    def tail_device(self) -> torch.device:
        """Where the model's output is."""
        return self.devices[-1] if self.tail else self.main_device

    @property
    def used_devices(self) -> tuple[torch.device, ...]:
        """The main device first, then the others in the order they are reached."""
        return tuple(dict.fromkeys((self.main_device, *self.devices, *self.replicas)))

    def on(self, device: torch.device) -> Placement:
        return Placement(self.blocks, (device,) * len(self.blocks), device)

    def num_blocks_on(self, device: torch.device) -> int:
        return len(self.blocks) if device in self.replicas else self.devices.count(device)

    def device_of(self, fqn: str) -> torch.device:
        """Device of a module or parameter by its name in the model: its block's or the tail's, else the main device."""
        return self._device_by_block.get(owner_of(fqn, self._device_by_block), self.main_device)

    def describe(self) -> str:
        """ "cuda:0: 20 blocks, cuda:1: 36 blocks"."""
        if self.replicas:
            shared = ", which share out the tokens" * bool(self.row_shares)
            shared += f" {ratio(self.row_shares)}" * (len({*self.row_shares}) > 1)
            return f"all {len(self.blocks)} blocks on each of {', '.join(map(str, self.replicas))}{shared}"
        return ", ".join(f"{device}: {self.devices.count(device)} blocks" for device in self.used_devices)


def owner_of(fqn: str, names: Container[str]) -> str:
    """The first of these names that a module or parameter is in; "" for none."""
    return next((name for name in accumulate(fqn.split("."), "{}.{}".format) if name in names), "")


def ratio(shares: Sequence[float]) -> str:
    """ "3:5" for a message."""
    return ":".join(f"{share:g}" for share in shares)


def check_one_each(name: str, values: Sequence[object], devices: Sequence[object]) -> None:
    """Raises: ValueError for values of a setting that are not one per device; () stands for none."""
    if values and len(values) != len(devices):
        raise ValueError(
            f"{name} has {len(values)} values, but the devices are {', '.join(map(str, devices))}; give one each"
        )


def check_kept_and_offloaded(kept_blocks: Sequence[int], offloaded_blocks: Sequence[int], placement: Placement) -> None:
    """Raises: ValueError for more blocks that keep activations, or stream from host memory, than a device has."""
    devices, none = placement.used_devices, (0,) * len(placement.used_devices)
    check_one_each("split.blocks_without_checkpointing", kept_blocks, devices)
    check_one_each("split.offloaded_blocks", offloaded_blocks, devices)
    for device, kept, count in zip(devices, kept_blocks or none, offloaded_blocks or none, strict=True):
        if not 0 <= kept <= (there := placement.num_blocks_on(device)):
            raise ValueError(
                f"split.blocks_without_checkpointing asks {kept} blocks of {device} to keep their activations, "
                f"it has {there}; give a number up to that, or leave the setting out"
            )
        if count and device.type == "cpu":
            raise ValueError(
                "split.offloaded_blocks asks for blocks of the CPU, whose weights are in host memory anyway"
            )
        if not 0 <= count <= (there := there - kept):
            raise ValueError(
                f"split.offloaded_blocks asks {count} blocks of {device} to stream from host memory, it has {there} "
                "that do not keep their activations; lower the number, or leave the setting out"
            )


def block_names(model: nn.Module, family: ModelFamily) -> tuple[str, ...]:
    """fqns of all blocks in execution order. Raises: ValueError if the model lacks one of the family's block lists."""
    return block_fqns(model, [each.name for each in family.block_lists])


def plan_placement(
    blocks: Sequence[str],
    devices: Sequence[torch.device],
    *,
    block_cost: Sequence[float],
    main_cost: float = 0.0,
    block_bytes: Sequence[int] | None = None,
    main_bytes: int = 0,
    budget_bytes: Mapping[torch.device, int | None] | None = None,
    capacity: Sequence[float | None] = (),
) -> Placement:
    """Cut the blocks into consecutive runs, one per device, so that the most loaded device has the least to carry.
    Args: blocks, devices: in execution order. Each device gets at least one block while there are enough. block_cost:
    what is balanced, bytes or FLOPs per block. main_cost: what the main device carries besides. block_bytes,
    main_bytes: weights, checked against the budget; the cost is taken for bytes if left out. capacity: how much each
    device can carry, in any unit; loads are compared relative to it. () is all alike. Raises: ValueError if no cut fits
    the budgets; it names need and limit in GB."""
    sizes = [int(cost) for cost in block_cost] if block_bytes is None else list(block_bytes)
    assert devices and blocks and len(blocks) == len(block_cost) == len(sizes), "a cost and a size for each block"
    used = list(devices[: len(blocks)])
    limits = [(budget_bytes or {}).get(device) for device in used]
    shares = [float(value or 1) for value in capacity[: len(used)]] or [1.0] * len(used)
    cost_before, bytes_before = list(accumulate(block_cost, initial=0.0)), list(accumulate(sizes, initial=0))

    def load(index: int, start: int, end: int) -> tuple[float, int, int] | None:
        limit, own_cost, own_bytes = limits[index], *((float(main_cost), main_bytes) if index == 0 else (0.0, 0))
        if limit is not None and bytes_before[end] - bytes_before[start] + own_bytes > limit:
            return None
        return (cost_before[end] - cost_before[start] + own_cost) / shares[index], start, end

    # Of cuts with the same maximum the first card gets least: it has activations of front and tail, too.
    runs = find_cuts(len(blocks), len(used), load, lambda runs: max(cost for cost, _, _ in runs))
    if runs is None:
        named = ("unlimited" if limit is None else f"{limit / 1e9:.2f} GB" for limit in limits)
        limited = ", ".join(map(" ".join, zip(map(str, used), named, strict=True)))
        raise ValueError(
            f"the weights need {(sum(sizes) + main_bytes) / 1e9:.2f} GB in all and no cut fits the limits: {limited} "
            f"(embeddings and last layers take {main_bytes / 1e9:.2f} GB, always on {used[0]}; the largest block "
            f"{max(sizes) / 1e9:.2f} GB). Raise memory_limit_gb, name another device"
        )
    return _cut(blocks, used, [(start, end) for _, start, end in runs])


def find_cuts(
    num_blocks: int,
    num_devices: int,
    stage_of: Callable[[int, int, int], Stage | None],
    cost: Callable[[Sequence[Stage]], Any],
    bounds: Sequence[int] = (),
) -> list[Stage] | None:
    """The stages of the cheapest cut into one run of blocks per device; None if no cut fits. A dynamic programme. Args:
    stage_of: what a device does with blocks [start, end); None if they do not fit it. cost: of the first stages, to be
    compared. It may not fall with one more, nor turn the order of two beginnings. bounds: where the user cuts, ends
    included."""
    best: dict[int, tuple[Any, list[Stage]]] = {0: (None, [])}  # by blocks placed
    for index in range(num_devices):
        last = num_blocks - (num_devices - 1 - index)
        ends = bounds[index + 1 : index + 2] or range(index + 1 if index < num_devices - 1 else last, last + 1)
        options: dict[int, tuple[Any, list[Stage]]] = {}
        for start, (_, stages) in best.items():
            for end in ends:
                if end > start and (stage := stage_of(index, start, end)) is not None:
                    value = cost(found := [*stages, stage])
                    if end not in options or value < options[end][0]:
                        options[end] = value, found
        best = options
    return best[num_blocks][1] if num_blocks in best else None


def plan_replicas(
    blocks: Sequence[str],
    devices: Sequence[torch.device],
    num_bytes: int,
    budget_bytes: Mapping[torch.device, int | None],
    strategy: Strategy = "data",
) -> Placement:
    """A copy of the whole model on every device. Raises: ValueError naming the first that may not hold num_bytes."""
    for device in devices:
        if (limit := budget_bytes.get(device)) is not None and num_bytes > limit:
            raise ValueError(
                f'parallel.strategy = "{strategy}" puts all {num_bytes / 1e9:.2f} GB of weights on {device}, which may '
                f'hold {limit / 1e9:.2f} GB; set it to "auto" or "pipeline", which split the model'
            )
    whole, shares = (devices[0],) * len(blocks), (1.0,) * len(devices) if shares_rows(strategy) else ()
    return Placement(tuple(blocks), whole, devices[0], replicas=tuple(devices), row_shares=shares)


def plan_manual(blocks: Sequence[str], devices: Sequence[torch.device], split_at: Sequence[int]) -> Placement:
    """Cut where the user says: split_at[i] is the first block of devices[i + 1]. Raises: ValueError if a cut is out of
    range or out of order; it says what would work."""
    if len(split_at) != len(devices) - 1:
        raise ValueError(
            f"split_at {list(split_at)} has {len(split_at)} cuts for {', '.join(map(str, devices))}; it needs one cut "
            "less than there are devices"
        )
    bounds = [0, *split_at, len(blocks)]
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"split_at {list(split_at)} leaves a device without blocks; the model has {len(blocks)} blocks, so "
            f"the cuts must rise and lie between 1 and {len(blocks) - 1}"
        )
    return _cut(blocks, devices, pairwise(bounds))


def _cut(blocks: Sequence[str], devices: Sequence[torch.device], cuts: Iterable[tuple[int, int]]) -> Placement:
    placed = [device for device, (start, end) in zip(devices, cuts, strict=True) for _ in range(start, end)]
    return Placement(tuple(blocks), tuple(placed), devices[0])


def check_budgets(
    placement: Placement, block_bytes: Sequence[int], main_bytes: int, budget_bytes: Mapping[torch.device, int | None]
) -> None:
    """Raises: ValueError naming the first device that a placement made by hand would overfill, in GB."""
    for device in placement.used_devices:
        load = sum(size for size, place in zip(block_bytes, placement.devices, strict=True) if place == device)
        load += main_bytes if device == placement.main_device else 0
        if (limit := budget_bytes.get(device)) is not None and load > limit:
            raise ValueError(
                f"split_at puts {load / 1e9:.2f} GB of weights on {device}, which may hold {limit / 1e9:.2f} GB; move "
                "the cuts, raise memory_limit_gb, or let balance choose"
            )


def spread_offloaded(num_blocks: int, num_kept: int, num_offloaded: int) -> tuple[int, ...]:
    """Which of a device's blocks stream from host memory, as indices: spread evenly over those that do not keep their
    activations, as the last num_kept do. [num_offloaded]"""
    candidates = num_blocks - num_kept
    assert 0 <= num_offloaded <= candidates, "check_kept_and_offloaded refuses others"
    return tuple((2 * index + 1) * candidates // (2 * num_offloaded) for index in range(num_offloaded))


def place_offloaded(
    placement: Placement, kept_blocks: Sequence[int], offloaded_blocks: Sequence[int]
) -> dict[str, torch.device]:
    """The blocks that stream from host memory, with their devices, in execution order."""
    places: dict[str, torch.device] = {}
    devices = placement.used_devices
    for kept, count, device in zip(kept_blocks or (0,) * len(devices), offloaded_blocks, devices, strict=True):
        names = [name for name, place in placement.items() if place == device]
        places |= {names[index]: device for index in spread_offloaded(len(names), kept, count)}
    return places


def parameter_bytes(model: nn.Module, blocks: Sequence[str], element_size: int) -> tuple[list[int], int]:
    """Bytes of each block and of everything else if every parameter took element_size bytes. Works on meta tensors."""
    modules = (*map(model.get_submodule, blocks), model)
    *sizes, whole = (element_size * sum(each.numel() for each in module.parameters()) for module in modules)
    return sizes, whole - sum(sizes)


def blocks_with_lists(model: nn.Module, family: ModelFamily) -> list[tuple[nn.Module, BlockList]]:
    """Every block in execution order, with what its linears run over."""
    return [(block, each) for each in family.block_lists for _, block in members(model, each.name)]


def block_flops(block: nn.Module, block_list: BlockList, num_image_tokens: int, num_text_tokens: int) -> float:
    """Floating-point operations of one forward, batch 1: 2 * weights * tokens for linears and convolutions, 4 S² D for
    attention over all tokens. Works on meta tensors."""
    layers = products_of(block, block_list, num_image_tokens, num_text_tokens)
    return 4.0 * (num_image_tokens + num_text_tokens) ** 2 * attention_width(block, block_list) + sum(layers.values())


def attention_width(block: nn.Module, block_list: BlockList) -> int:
    """Features of the states that a block attends with: the narrowest of those with tokens."""
    others = (*block_list.sample_modules, *block_list.text_modules)
    widths = (
        module.in_features
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not matches_any(name, others)
    )
    return min(widths, default=0)  # the others read wider states


def products_of(
    block: nn.Module, block_list: BlockList, num_image_tokens: int, num_text_tokens: int
) -> dict[str, float]:
    """Name of each linear in a block, and of each convolution along the tokens -> its operations, batch 1."""
    return {
        name: 2.0 * module.weight.numel() * tokens_seen(name, block_list, num_image_tokens, num_text_tokens)
        for name, module in block.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d))
    }


def tokens_seen(name: str, block_list: BlockList, num_image_tokens: int, num_text_tokens: int) -> float:
    """How many tokens a linear of a block runs over, by its name in the block."""
    if matches_any(name, block_list.sample_modules):
        return 1
    share = next((each for pattern, each in block_list.routed_modules.items() if matches_any(name, (pattern,))), 1)
    if matches_any(name, block_list.text_modules):
        return num_text_tokens * share
    return (num_image_tokens + num_text_tokens * block_list.is_joint) * share
