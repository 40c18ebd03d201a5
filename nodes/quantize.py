"""Node: hold the frozen weights in fewer bits, and say what that costs. The LoRA is never touched."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..config.job import ModelConfig
from ..config.open import asked
from . import host
from .captions import DEFAULT_FOLDER
from .host import io
from .saying import said_on_node
from .sockets import AUTO, Socket, make_inputs, read_section, setting_names
from .types import ModelSocket, TrainingModel

_TITLE = "Quantize (skip LoRA)"

_SCHEMES = [AUTO, "fp8-compute", "int8-compute", "fp8", "int8", "none"]
_INPUTS = (
    ModelSocket.Input("model", tooltip="The model to train, from Load Model for Training Across GPUs."),
    Socket("quantize", "model.quantize", options=_SCHEMES, default=AUTO),
    Socket("rotation", "model.rotation", optional=True, advanced=True),
    io.Boolean.Input(
        "cache",
        default=False,
        optional=True,
        advanced=True,
        tooltip="Keep the quantized weights in ComfyUI's output folder. The next run then reads half as much and "
        "rounds nothing. They take 31 GB of disk for FLUX.2-dev.",
    ),
)


class Quantize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeQuantize",
            display_name=_TITLE,
            category="DeviceBridge/training",
            description="Holds the model's frozen linear layers in 8 bits while a LoRA is trained on top, and can "
            "multiply in 8 bits too. LoRA weights, norms and embeddings keep their precision. Shows what is "
            "quantized and the memory it takes.",
            search_aliases=["fp8", "float8", "int8", "8 bit", "torchao"],
            inputs=make_inputs(_INPUTS, _TITLE),
            outputs=[
                ModelSocket.Output("quantized", display_name="model", tooltip="The same model, to be quantized."),
                io.String.Output("report", tooltip="What is quantized and what is not, and memory."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @said_on_node
    def execute(cls, model: TrainingModel, **sockets: Any) -> io.NodeOutput:
        from ..jobs.quantize_preview import foresee_scheme, preview_model
        from ..jobs.resolve import find_machine

        own = read_section(ModelConfig, _INPUTS, sockets, path=model.model.path)
        folder = host.folder_in_output(f"{DEFAULT_FOLDER}/quantized", "cache") if sockets.get("cache") else ""
        changes = {name: getattr(own, name) for name in setting_names(_INPUTS)} | {
            "quantized_cache": str(folder),
        }
        config = dataclasses.replace(model.model, **changes)
        scheme = asked(own.quantize) or foresee_scheme(find_machine(model.split.devices))
        with model.prepared() as info:
            report = preview_model(dataclasses.replace(config, quantize=scheme), model.split, info).table()
        if own.quantize != scheme:
            report += f"\nauto: the training's plan decides, and takes {scheme} on these devices if it fits"
        from ..system.text_picture import draw_text

        host.NodeView(cls.hidden.unique_id).show_text(report.splitlines()[0])
        shown = {"text": (report,), "images": [host.shown_picture(draw_text(report))]}
        return io.NodeOutput(dataclasses.replace(model, model=config), report, ui=shown)
