"""Node: the ring LSE fix, on or off for the whole process."""

from __future__ import annotations

from typing import Any

from .host import io
from .saying import schema


class RingLseFix(io.ComfyNode):
    define_schema = schema(
        node_id="DeviceBridgeRingLseFix",
        category="DeviceBridge/fixes",
        search_aliases=["amd", "rocm", "context parallel", "ring attention"],
        is_output_node=True,
        is_experimental=True,
        hidden=[],
        inputs=[io.Boolean.Input("enabled", default=True), io.AnyType.Input("anything", optional=True)],
        outputs=[io.AnyType.Output("passed"), io.String.Output("status")],
    )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Runs every time: what it changes is the process."""
        return float("nan")

    @classmethod
    def execute(cls, enabled: bool, anything: Any = None) -> io.NodeOutput:
        from ..patches.ring_lse import apply_ring_lse_fix, remove_ring_lse_fix

        status = apply_ring_lse_fix() if enabled else "Taken away" if remove_ring_lse_fix() else "Off"
        return io.NodeOutput(anything, status, ui={"text": (status,)})
