"""Node: the ring LSE fix, on or off for the whole process."""

from __future__ import annotations

from typing import Any

from .host import io
from .saying import schema


class RingLseFix(io.ComfyNode):
    define_schema = schema(
        node_id="DeviceBridgeRingLseFix",
        display_name="ROCm LSE Fix (ring attention)",
        category="DeviceBridge/fixes",
        description="Corrects the ring attention of diffusers 0.37 to 0.39, which merges partial results "
        "wrongly with torch 2.9 and newer (first seen on AMD GPUs). It holds for the whole ComfyUI process until "
        "turned off, and changes nothing where the installed diffusers is right, as 0.40 and newer are.",
        search_aliases=["amd", "rocm", "context parallel", "ring attention"],
        is_output_node=True,
        is_experimental=True,
        hidden=[],
        inputs=[
            io.Boolean.Input(
                "enabled",
                default=True,
                tooltip="Apply the fix where it is needed; off takes it away again. Matters only with ring "
                "attention through diffusers.",
            ),
            io.AnyType.Input(
                "anything",
                optional=True,
                tooltip="Passed through unchanged, so that the fix runs before whatever uses the output.",
            ),
        ],
        outputs=[
            io.AnyType.Output("passed", display_name="anything", tooltip="What came in, unchanged."),
            io.String.Output("status", tooltip="Whether the fix is active, and why."),
        ],
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
