"""Node: say what a training will take of every card, before anything is loaded."""

from __future__ import annotations

from typing import Any

from ..config.job import OutputConfig
from . import host
from .host import folders, io
from .saying import said_on_node, training_schema
from .sockets import read_sections
from .train import training_sockets
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel

# What decides about memory and time.
_SOCKETS = training_sockets(
    *("rank", "batch_size", "accumulation", "gradient_checkpointing", "optimizer", "dora", "targets"),
    *("training_dtype", "offload_activations", "cuda_graphs"),
)
_LATER = training_sockets("lora_kind", "layers", "lokr_factor", "ema_decay", "kahan")  # behind those of saved workflows


class PlanTraining(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgePlanTraining",
        search_aliases=["memory planner", "vram estimate", "out of memory", "will it fit"],
        is_output_node=True,
        inputs=[
            ModelSocket.Input("model"),
            DatasetSocket.Input("dataset"),
            io.String.Input("cards", default="", placeholder="2x3090, 12GB"),
            *_SOCKETS,
            io.Int.Input("steps", default=1000, min=1, max=1_000_000, optional=True),
            *_LATER,
        ],
        outputs=[io.String.Output("text"), io.Image.Output("picture")],
    )

    @classmethod
    @said_on_node
    def execute(cls, model: TrainingModel, dataset: TrainingDataset, cards: str, **sockets: Any) -> io.NodeOutput:
        from contextlib import nullcontext

        import numpy as np
        import torch

        from ..jobs.job import plan_job
        from ..planning.cards import parse_cards
        from ..planning.dry_run import NoForecast
        from ..planning.plan import describe_plan, describe_verdict, draw_plan

        entries, steps = (*_SOCKETS, *_LATER), sockets.get("steps", 1000)
        output = OutputConfig(folder=str(folders.folder_in_output("devicebridge/plan", "plan")))
        job = model.job(dataset, output=output, **read_sections(entries, sockets, train={"steps": steps}))
        known = parse_cards(cards) if cards.strip() else []
        view = host.NodeView(cls.hidden.unique_id)
        try:
            with nullcontext() if known else host.host_memory_freed(), model.prepared() as info:
                plan = plan_job(job, known, info=info, should_stop=host.is_cancelled)
        except NoForecast as error:  # no fault of the workflow's: the training runs
            view.show_text(text := str(error))
            return io.NodeOutput(text, *host.blocked(1), ui={"text": (text,)})
        text = describe_plan(plan, steps)
        view.show_text(". ".join(describe_verdict(plan, steps)))
        picture = draw_plan(plan)
        pixels = torch.from_numpy(np.asarray(picture).copy()).float().div_(255)[None]
        return io.NodeOutput(text, pixels, ui={"text": (text,), "images": [folders.shown_picture(picture)]})
