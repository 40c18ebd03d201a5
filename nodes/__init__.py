"""The pack's nodes for ComfyUI; imported only when the host loads the pack."""

from __future__ import annotations

from .captions import CacheCaptionsAndLatents
from .dataset import TrainingDatasetNode
from .encoded_dataset import DatasetFromLatents
from .host import ComfyExtension, io
from .load import LoadModelForTraining
from .quantize import Quantize
from .ring_lse import RingLseFix
from .split import LoadDiffusionModelSplit, SplitModel
from .train import TrainLora

NODES: tuple[type[io.ComfyNode], ...] = (
    LoadModelForTraining,
    Quantize,
    TrainingDatasetNode,
    CacheCaptionsAndLatents,
    DatasetFromLatents,
    TrainLora,
    SplitModel,
    LoadDiffusionModelSplit,
    RingLseFix,
)


class DeviceBridgeExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODES)


def make_extension() -> ComfyExtension:
    """What ComfyUI asks the pack for."""
    return DeviceBridgeExtension()
