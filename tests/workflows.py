"""Workflow files with inputs replaced, as `devicebridge run --set` does it."""

from pathlib import Path
from typing import Any

from devicebridge.headless.run import read_workflow as read_workflow
from devicebridge.headless.run import set_values as set_values


def from_folder(pipeline: Path) -> dict[str, Any]:
    """Values of a training template, without the nodes' prefix: a diffusers folder in place of ComfyUI's files."""
    return {
        "LoadModelForTraining.model": "[path below]", "LoadModelForTraining.path": str(pipeline),
        "LoadModelForTraining.devices": "cpu", "LoadModelForTraining.dtype": "float32",
        "CacheCaptionsAndLatents.text_encoders": "[model folder]", "CacheCaptionsAndLatents.vae": "[model folder]",
    }  # fmt: skip


def node_of(graph: dict[str, Any], name: str) -> dict[str, Any]:
    """The one node of DeviceBridge that is called so."""
    (node,) = (node for node in graph.values() if node["class_type"] == f"DeviceBridge{name}")
    return node
