"""Node: hold the frozen weights in fewer bits, and say what that costs. The LoRA is never touched."""

from __future__ import annotations

import dataclasses

from . import host
from .captions import DEFAULT_FOLDER
from .fields import AUTO, read_auto
from .host import io
from .types import ModelSocket, TrainingModel


class Quantize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeQuantize",
            display_name="Quantize (skip LoRA)",
            category="DeviceBridge/training",
            description="Holds the model's frozen linear layers in 8 bits while a LoRA is trained on top, and can "
            "multiply in 8 bits too. LoRA weights, norms and embeddings keep their precision. Shows what is "
            "quantized and the memory it takes.",
            search_aliases=["fp8", "float8", "int8", "8 bit", "torchao"],
            inputs=[
                ModelSocket.Input("model", tooltip="The model to train, from Load Model for Training Across GPUs."),
                io.Combo.Input(
                    "quantize",
                    options=[AUTO, "fp8-compute", "int8-compute", "fp8", "int8", "none"],
                    default=AUTO,
                    tooltip="All but none take half the memory of 16 bits. fp8 and int8 only store in 8 bits and work "
                    "everywhere. fp8-compute (RTX 40 or newer) and int8-compute (RTX 20 or newer) multiply in 8 bits "
                    "too, which is faster and a little noisier. auto takes the best that all chosen devices can do. "
                    "none leaves the model as it is.",
                ),
                io.Combo.Input(
                    "rotation",
                    options=["64", "0", "16", "256"],
                    default="64",
                    optional=True,
                    advanced=True,
                    tooltip="For int8-compute: spreads outliers over blocks of so many values, which keeps more of the "
                    "others. Wider blocks spread better and take a little more time; 0 does not rotate.",
                ),
                io.Boolean.Input(
                    "cache",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Keep the quantized weights in ComfyUI's output folder, so that the next run reads half as "
                    "much and rounds nothing. Takes as much disk as the quantized model, 31 GB for FLUX.2-dev.",
                ),
            ],
            outputs=[
                ModelSocket.Output("quantized", display_name="model", tooltip="The same model, to be quantized."),
                io.String.Output("report", tooltip="What is quantized and what is not, and memory."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: TrainingModel, quantize: str, rotation: str = "64", cache: bool = False) -> io.NodeOutput:
        from ..jobs.quantize_preview import choose_scheme, preview_model
        from ..jobs.resolve import find_machine

        config = dataclasses.replace(
            model.model,
            quantize=read_auto(quantize) or choose_scheme(find_machine(model.split.devices).devices),  # type: ignore[arg-type]
            rotation=int(rotation),  # type: ignore[arg-type]
            quantized_cache=str(host.folder_in_output(f"{DEFAULT_FOLDER}/quantized", "cache")) if cache else "",
        )
        report = preview_model(config, model.split).table()
        host.NodeView(cls.hidden.unique_id).show_text(report)
        return io.NodeOutput(dataclasses.replace(model, model=config), report)
