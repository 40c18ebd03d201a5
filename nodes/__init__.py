"""The pack's nodes for ComfyUI; imported only when the host loads the pack."""

from __future__ import annotations

import logging
import sys
from typing import Any, NoReturn

from .. import compat
from ..system.telling import EscapedLogs
from .captions import CacheCaptionsAndLatents
from .dataset import DatasetFromLatents, ImagesToCaption, TrainingDatasetNode, WriteCaptions
from .host import ComfyAPI, ComfyExtension, io
from .load import LoadModelForTraining, Quantize
from .ring_lse import RingLseFix
from .saying import PACK
from .simple import TrainLoraSimple
from .split import LoadDiffusionModelSplit, SplitModel
from .successor import replacements
from .train import PlanTraining, TrainLora

NODES: tuple[type[io.ComfyNode], ...] = (
    LoadModelForTraining,
    Quantize,
    TrainingDatasetNode,
    ImagesToCaption,
    WriteCaptions,
    CacheCaptionsAndLatents,
    DatasetFromLatents,
    PlanTraining,
    TrainLora,
    TrainLoraSimple,
    SplitModel,
    LoadDiffusionModelSplit,
    RingLseFix,
)


_log = logging.getLogger(__name__)


class DeviceBridgeExtension(ComfyExtension):
    async def on_load(self) -> None:
        """Say what stands in for another pack's nodes; a ComfyUI that asks otherwise has the nodes alone."""
        try:
            for each in replacements():
                await ComfyAPI().node_replacement.register(each)
        except (AttributeError, ImportError, TypeError) as error:
            _log.warning("workflows of ComfyUI-MultiGPU will not open: %s", error)

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes; one whose part of ComfyUI has changed is there, too, and refuses to run."""
        refused = compat.refusals(compat.find_faults())
        for text in dict.fromkeys(refused.values()):
            _log.warning("%s will not work: %s", ", ".join(name for name in refused if refused[name] == text), text)
        found = ((node, refused.get(node.define_schema().node_id, "")) for node in NODES)
        return [_refusing(node, why) if why else node for node, why in found]


def _refusing(node: type[io.ComfyNode], why: str) -> type[io.ComfyNode]:
    """A node with the same sockets that says when it is run why it cannot."""

    def execute(cls: type[io.ComfyNode], **sockets: Any) -> NoReturn:
        raise RuntimeError(why)

    return type(node.__name__, (node,), {"execute": classmethod(execute), "__module__": node.__module__})


def add_page() -> None:
    """Give ComfyUI's page what it asks this pack for. A ComfyUI that has changed there has the nodes alone."""
    if not hasattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance"):
        return  # no server: a test, or a script
    try:
        compat.check("page")
        from .host.page import add_page

        add_page()
    except (RuntimeError, ImportError, AttributeError) as error:
        _log.warning("the page DeviceBridge is not there: %s", error)


def make_extension() -> ComfyExtension:
    logging.getLogger(PACK).addHandler(EscapedLogs())
    return DeviceBridgeExtension()
