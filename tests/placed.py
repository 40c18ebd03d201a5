"""Models that were made on one device, with their weights where a loader would have put them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from devicebridge.families.spec import ModelFamily
from devicebridge.parallel.local.bridge import BlockSplit, Bridge
from devicebridge.parallel.local.interleave import RoundRobin
from devicebridge.parallel.offload.weights import WeightOffload
from devicebridge.parallel.placement import Placement
from torch import nn


def place(model: nn.Module, placement: Placement) -> None:
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                device = placement.device_of(f"{name}.{leaf}" if name else leaf)
                if tensor is None or tensor.device == device:
                    continue
                moved = tensor.detach().to(device)
                is_parameter = isinstance(tensor, nn.Parameter)
                held[leaf] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved  # type: ignore[assignment]


@contextmanager
def forward_of(bridge: Bridge) -> Iterator[None]:
    """Inside, a forward of this thread."""
    bridge.begin()
    try:
        yield
    finally:
        bridge.end()


@contextmanager
def arrivals_noted(trace: list[tuple[int, torch.device]]) -> Iterator[None]:
    """Inside, (job, device) is added for each time a job of an Interleave arrives on a device or enters a block."""
    own = RoundRobin.pass_on

    def pass_on(policy: RoundRobin, job: int, device: torch.device) -> None:
        own(policy, job, device)
        trace.append((job, device))

    with mock.patch.object(RoundRobin, "pass_on", pass_on):
        yield


def apply_block_split(model: nn.Module, family: ModelFamily, placement: Placement) -> BlockSplit:
    """As the pack's, of a model that may be anywhere."""
    place(model, placement)
    return BlockSplit(model, family, placement)


def apply_weight_offload(split: BlockSplit, blocks: Sequence[str]) -> WeightOffload:
    """Have these blocks of a split model, with its LoRA, stream from host memory; remove() leaves them there."""
    offload = WeightOffload({name: device for name, device in split.placement.items() if name in set(blocks)})
    bring_to_host(offload, split.model)
    offload.attach()
    return offload


def bring_to_host(offload: WeightOffload, model: nn.Module) -> None:
    """As a loader does, of a model that is there."""
    layers = [name for name, module in model.named_modules() if module._parameters]
    offload.begin(model, layers)
    for layer in layers:
        offload.finish(layer)
