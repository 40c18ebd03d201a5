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


def training_values(pipeline: Path, dataset: Path | str, **train: Any) -> dict[str, Any]:
    """Values of a training template that a CPU trains in seconds. train: of its training node."""
    values = {**from_folder(pipeline), "TrainingDataset.folder": str(dataset), "TrainingDataset.resolutions": "32"}
    small = {"rank": 2, "alpha": 2.0, "learning_rate": 0.01, "accumulation": 1, **train}
    values["CacheCaptionsAndLatents.dtype"] = "float32"
    values |= {f"TrainLora.{name}": each for name, each in small.items()}
    return {f"DeviceBridge{name}": value for name, value in values.items()}


def node_of(graph: dict[str, Any], name: str) -> dict[str, Any]:
    """The one node of DeviceBridge that is called so."""
    (node,) = (node for node in graph.values() if node["class_type"] == f"DeviceBridge{name}")
    return node
