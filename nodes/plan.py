"""Node: say what a training will take of every card, before anything is loaded."""

from __future__ import annotations

from . import host
from .fields import make_part
from .host import io
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel


class PlanTraining(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgePlanTraining",
            display_name="Plan Training",
            category="DeviceBridge/training",
            description="Forecasts what a training takes of every card, and how it would best use them: where the "
            "model is cut, which blocks keep their activations. Loads no weights and needs no GPU. If nothing fits it "
            "says what is missing and what would help.",
            search_aliases=["memory planner", "vram estimate", "out of memory", "will it fit"],
            is_output_node=True,
            inputs=[
                ModelSocket.Input("model", tooltip="The model to train, as it would go into Train LoRA Across GPUs."),
                DatasetSocket.Input("dataset", tooltip="The images; the largest of their sizes is planned for."),
                io.String.Input(
                    "cards",
                    default="",
                    placeholder="24GB, 12GB",
                    tooltip="Plan for these cards instead of this machine's, in decimal GB, in order; with relative "
                    "speeds 24GB@1, 12GB@0.5. Empty takes the model's devices as they are once ComfyUI has let go.",
                ),
                io.Int.Input(
                    "rank",
                    default=16,
                    min=1,
                    max=1024,
                    tooltip="Size of the LoRA, as in Train LoRA Across GPUs. Its weights take 16 bytes each while "
                    "training with adamw.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=1024,
                    tooltip="Images per forward pass. Activations grow with it.",
                ),
                io.Int.Input(
                    "accumulation",
                    default=1,
                    min=1,
                    max=1024,
                    tooltip="Forward passes per step. More than one keeps the gradients in memory between them.",
                ),
                io.Boolean.Input(
                    "gradient_checkpointing",
                    default=True,
                    tooltip="On lets the plan choose which blocks are computed twice; off keeps everything.",
                ),
                io.Combo.Input(
                    "optimizer",
                    options=["adamw", "adamw8bit"],
                    default="adamw",
                    tooltip="adamw8bit keeps its state in a quarter of the memory.",
                ),
                io.Combo.Input(
                    "training_dtype",
                    options=["float32", "bfloat16"],
                    default="float32",
                    optional=True,
                    advanced=True,
                    tooltip="Number type of the LoRA while training, as in Train LoRA Across GPUs.",
                ),
                io.Combo.Input(
                    "offload_activations",
                    options=["auto", "on", "off"],
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="Whether what gradient checkpointing keeps of every block waits in the computer's memory: "
                    "as in Train LoRA Across GPUs. auto lets the plan choose.",
                ),
            ],
            outputs=[
                io.String.Output("text", tooltip="The plan: a line per card, and the reasons."),
                io.Image.Output("picture", tooltip="A bar per card: what its memory is for."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        model: TrainingModel,
        dataset: TrainingDataset,
        cards: str,
        rank: int,
        batch_size: int,
        accumulation: int,
        gradient_checkpointing: bool,
        optimizer: str,
        training_dtype: str = "float32",
        offload_activations: str = "auto",
    ) -> io.NodeOutput:
        from contextlib import nullcontext

        from ..training import config
        from ..training.cards import parse_cards
        from ..training.job import plan_job
        from ..training.plan_view import describe_plan, picture_of

        job = config.JobConfig(
            model=model.model,
            split=model.split,
            data=dataset.data,
            train=make_part(
                config.LoopConfig,
                steps=1,
                batch_size=batch_size,
                accumulation=accumulation,
                gradient_checkpointing=gradient_checkpointing,
                offload_activations=offload_activations,
            ),
            lora=make_part(config.LoraSettings, rank=rank, dtype=training_dtype),
            optimizer=make_part(config.OptimizerConfig, name=optimizer),
            output=make_part(config.OutputConfig, folder=str(host.folder_in_output("devicebridge/plan", "plan"))),
        )
        known = parse_cards(cards) if cards.strip() else []
        with nullcontext() if known else host.host_memory_freed():
            plan = plan_job(job, known)
        text = describe_plan(plan)
        host.NodeView(cls.hidden.unique_id).show_text(text)
        return io.NodeOutput(text, picture_of(plan), ui={"text": (text,)})
