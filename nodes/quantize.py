"""Node: hold the frozen weights in fewer bits. The LoRA is never touched."""

from __future__ import annotations

import dataclasses

from .host import io
from .types import ModelSocket, TrainingModel


class Quantize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeQuantize",
            display_name="Quantize (skip LoRA)",
            category="DeviceBridge/training",
            description="Holds the model's frozen linear layers in fewer bits while a LoRA is trained on top. LoRA "
            "weights, norms and embeddings keep their precision.",
            search_aliases=["fp8", "float8", "torchao"],
            inputs=[
                ModelSocket.Input("model", tooltip="The model to train, from Load Model for Training Across GPUs."),
                io.Combo.Input(
                    "quantize",
                    options=["fp8", "none"],
                    default="fp8",
                    tooltip="fp8 stores weights in 8 instead of 16 bits: about half the memory, at a small loss of "
                    "precision. none leaves the model as it is. Choose fp8 when the model does not fit otherwise.",
                ),
            ],
            outputs=[ModelSocket.Output("quantized", display_name="model", tooltip="The same model, to be quantized.")],
        )

    @classmethod
    def execute(cls, model: TrainingModel, quantize: str) -> io.NodeOutput:
        config = dataclasses.replace(model.model, quantize=quantize)  # type: ignore[arg-type]
        return io.NodeOutput(dataclasses.replace(model, model=config))
