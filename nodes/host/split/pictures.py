"""Whether each card of a divided MODEL may compute its own pictures, such as one conditioning of CFG each."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from ....parallel.local.tensor_parallel import TensorParallel
from ....parallel.transfer import module_with_streams
from ....planning.machine_speed import machine_speed
from ....planning.ways import least_tokens
from .division import DividedBlocks, weights_on
from .plan import GB, SplitPlan, card_budgets

_log = logging.getLogger(__name__)


def allow_pictures(
    bridge: TensorParallel, divided: DividedBlocks, plan: SplitPlan, weights: Mapping[torch.device, int]
) -> None:
    """Let each card compute its own pictures, where it has room for whole blocks and they come to it fast enough.

    Args: weights: bytes of them that each card has.
    """
    blocks = divided.whole_blocks()
    if not blocks or not bridge.copies_directly:
        return
    devices = divided.division.devices
    needed = bridge.compute_pictures(blocks, weights_on, _least_tokens(devices))
    for device, room in card_budgets(devices, plan.limit_bytes).items():
        left = (room or 0) - weights[device]
        if left < needed:
            bridge.pictures = None
            _log.info(
                "split: all cards compute all pictures of a batch together, also with CFG: beside its weights %s has "
                "room for %.2f GB, and two whole blocks take %.2f GB",
                device,
                left / GB,
                needed / GB,
            )
            return
    assert bridge.pictures is not None, "it was just made"
    _log.info(
        "split: where there are as many pictures for each of the %d cards, as with CFG on two, each computes its own, "
        "from %d tokens on",
        len(devices),
        bridge.pictures.least_tokens,
    )


def _least_tokens(devices: tuple[torch.device, ...]) -> int:
    """0 for cards that are emulated."""
    return 0 if module_with_streams(*devices[:2]) is None else least_tokens(machine_speed(devices))
