"""The pack's nodes for ComfyUI; imported only when the host loads the pack."""

from __future__ import annotations

import logging
import sys
from typing import Any

from ..contract.check import check_parts, find_faults, pending_nodes, refusals
from ..contract.living import Living
from ..contract.rows import NODES as PARTS_OF
from ..contract.rows import PAGE
from ..system.telling import EscapedLogs
from .caption_images import ImagesToCaption, WriteCaptions
from .captions import CacheCaptionsAndLatents
from .dataset import TrainingDatasetNode
from .encoded_dataset import DatasetFromLatents
from .host import ComfyExtension, io
from .load import LoadModelForTraining
from .plan import PlanTraining
from .quantize import Quantize
from .ring_lse import RingLseFix
from .saying import PACK
from .split import LoadDiffusionModelSplit, SplitModel
from .train import TrainLora

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
    SplitModel,
    LoadDiffusionModelSplit,
    RingLseFix,
)


_log = logging.getLogger(__name__)


class DeviceBridgeExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The nodes; one whose part of ComfyUI has changed is there, too, and refuses to run."""
        try:
            doubtful = _doubtful_nodes(Living())
        except Exception:
            _log.exception("what this ComfyUI has changed cannot be told; the nodes are there as they are")
            doubtful = set()
        return [_guarded(node) if node.define_schema().node_id in doubtful else node for node in NODES]


def _doubtful_nodes(host: Living) -> set[str]:
    """Ids of nodes whose part of ComfyUI has changed, or is not imported yet."""
    told = refusals(host.version, find_faults(host))
    for node_id, text in told.items():
        _log.warning("%s will refuse to run: %s", node_id, text)
    return {*told, *pending_nodes(host)}


def _guarded(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """The same node, which asks ComfyUI again whenever it is run."""

    def execute(cls: type[io.ComfyNode], **sockets: Any) -> io.NodeOutput:
        check_parts(Living(may_import=True), PARTS_OF[node.define_schema().node_id])
        return node.execute.__func__(cls, **sockets)

    return type(node.__name__, (node,), {"execute": classmethod(execute), "__module__": node.__module__})


def add_page() -> None:
    """Give ComfyUI's page what it asks this pack for. A ComfyUI that has changed there has the nodes alone."""
    if not hasattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance"):
        return  # no server: a test, or a script
    try:
        check_parts(Living(may_import=True), [PAGE])
    except RuntimeError as error:
        _log.warning("the page DeviceBridge is not there: %s", error)
        return
    from .host.page import add_page

    add_page()


def make_extension() -> ComfyExtension:
    """What ComfyUI asks the pack for."""
    logging.getLogger(PACK).addHandler(EscapedLogs())
    return DeviceBridgeExtension()
