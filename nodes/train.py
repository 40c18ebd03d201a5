"""Nodes: train a LoRA, and say before anything is loaded what that will take of every card."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import job as config
from ..config.ranges import check_file_name
from ..runs.store import NO_RUNS, plain_name
from . import host
from .captions import DEFAULT_FOLDER, encode_texts
from .host import folders, io
from .host.page import background_queue, cards_of, refuse_cards_of_others, seen_queue
from .saying import said_on_node, training_schema
from .sockets import LATER, Socket, read_lines, read_number_or_name, read_sections
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel
from .view import JobView

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo
    from ..jobs.checked_job import JobPlan
    from ..jobs.job import TrainingResult
    from ..jobs.resume import NextRun

_log = logging.getLogger(__name__)
_MOST_STEPS = 1_000_000
_OPTIMIZERS = ["adamw", "adamw8bit", "prodigy", "adafactor", "came"]
_find_lora = partial(folders.find_component, "loras")


# A socket added after a release goes at the end, with optional=True: workflows saved before do not know it.
_INPUTS = (
    ModelSocket.Input("model"),
    DatasetSocket.Input("dataset"),
    Socket("name", "output.name", None, read=plain_name, default="my_lora"),
    Socket("steps", "train.steps", default=1000, max=_MOST_STEPS),
    Socket("learning_rate", "optimizer.learning_rate", min=1e-8, step=1e-6, round=1e-9, advanced=True),
    Socket("rank", "lora.rank", advanced=True),
    Socket("alpha", "lora.alpha", min=0.01, max=1024.0, step=0.5, advanced=True),
    Socket("batch_size", "train.batch_size", advanced=True),
    # with 1 the cards take turns
    Socket("accumulation", "train.gradient_accumulation_steps", default=4, advanced=True),
    # the interface changes one called seed after every run: no run would resume
    Socket("random_seed", "train.seed", advanced=True),
    io.Boolean.Input("resume", default=False),
    Socket("gradient_checkpointing", "train.gradient_checkpointing", advanced=True),
    Socket("optimizer", "optimizer.name", None, options=_OPTIMIZERS, advanced=True),
    Socket("weight_decay", "optimizer.weight_decay", max=1.0, step=0.001, round=1e-6, advanced=True),
    Socket("schedule", "schedule.name", advanced=True),
    Socket("warmup_steps", "schedule.warmup_steps", max=_MOST_STEPS, advanced=True),
    Socket("clip_norm", "train.clip_norm", max=1000.0, step=0.1, advanced=True),
    Socket("dropout", "lora.dropout", step=0.01, advanced=True),
    Socket("dora", "lora.dora", advanced=True),
    Socket("targets", "lora.targets", "One pattern per line.", example="*.attn.to_q", advanced=True),
    Socket("training_dtype", "lora.dtype", advanced=True),
    Socket("timestep_sampling", "objective.timestep_sampling", advanced=True),
    Socket("shift", "objective.shift", read=read_number_or_name, advanced=True),
    Socket("guidance", "objective.guidance", default=-1.0, min=-1.0, max=100.0, step=0.1, advanced=True),
    Socket("save_every", "output.save_every_steps", max=_MOST_STEPS, advanced=True),
    Socket("keep_last", "output.keep_last", max=1000, advanced=True),
    Socket("lora_layout", "output.lora_layout", "The lora output follows it.", advanced=True),
    Socket("lora_dtype", "output.lora_dtype", advanced=True),
    Socket("tensorboard", "output.tensorboard", default=False, advanced=True),
    Socket("compile_blocks", "train.compile", **LATER),
    Socket("offload_activations", "train.offload_activations", **LATER),
    Socket("cuda_graphs", "train.cuda_graphs", **LATER),
    io.Boolean.Input("background", default=False, **LATER),
    Socket("sample_prompts", "samples.prompts", None, read_lines, "a photo of my subject on a beach", optional=True),
    Socket("sample_every", "samples.every_steps", max=_MOST_STEPS, **LATER),
    Socket("lora_kind", "lora.kind", **LATER),
    Socket("layers", "lora.layers", **LATER),
    Socket("lokr_factor", "lora.factor", **LATER),
    Socket("start_from", "lora.start_from", None, _find_lora, default="", placeholder="my_lora.safetensors", **LATER),
    Socket("ema_decay", "train.ema_decay", step=0.0001, round=1e-6, **LATER),
    Socket("kahan", "optimizer.kahan", **LATER),
    Socket("processes", "parallel.processes", None, max=64, **LATER),
    Socket("strategy", "parallel.strategy", None, **LATER),
    Socket("text_encoder", "lora.text_encoder", **LATER),
    Socket("text_encoder_rank", "lora.text_encoder_rank", **LATER),
    Socket("text_encoder_learning_rate", "optimizer.text_encoder_learning_rate", step=1e-6, round=1e-9, **LATER),
    Socket("expert", "objective.expert", **LATER),
    Socket("sample_steps", "samples.steps", **LATER),
    Socket("sample_guidance", "samples.guidance", default=0.0, step=0.1, **LATER),
    io.Boolean.Input("continue_changed", default=False, **LATER),
    *(Socket(f"sample_{name}", f"samples.{name}", **LATER) for name in ("width", "height", "seed")),
)


class TrainLora(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeTrainLora",
        search_aliases=["lora trainer", "multi gpu training", "finetune", "dreambooth", "lokr", "dora"],
        is_output_node=True,
        inputs=_INPUTS,
        is_named=True,
        outputs=[
            io.LoraModel.Output("lora"),
            io.LossMap.Output("loss_map"),
            io.Int.Output("steps_done"),
            io.String.Output("lora_path"),
        ],
    )

    @classmethod
    def validate_inputs(cls, strategy: Any = None) -> bool | str:
        """Workflows of older versions may have a strategy that is gone, of which execute tells; a link gives None."""
        key = config.job_keys()["parallel.strategy"]
        if strategy is None or key.in_todays_words(strategy)[0] in key.choices:
            return True
        return f"strategy: {strategy!r} is none of {', '.join(key.choices)}"

    @classmethod
    @said_on_node
    def execute(
        cls, model: TrainingModel, dataset: TrainingDataset, resume: bool | None, **sockets: Any
    ) -> io.NodeOutput:
        from ..jobs.job import check_job
        from ..jobs.resume import next_run

        job = make_job(model, dataset, sockets)
        how: config.Resume | None = "continue" if sockets.get("continue_changed") else resume
        view, in_background = JobView(cls.hidden.unique_id), sockets.get("background", False)
        with host.training_allowed():
            with model.prepared() as info:
                run = next_run(job, info=info, resume=how, should_stop=host.is_cancelled)
                if run.note:
                    view.show_text(run.note)
            folders.refuse_job(run.job)
            if run.finished is None:

                def check() -> JobPlan:
                    """Refuse before a text encoder is loaded. Other processes, and resumed runs, forecast alone."""
                    if not in_background:
                        refuse_cards_of_others(run.job)
                    is_forecast = not (in_background or run.resume or run.job.parallel.processes > 1)
                    with model.prepared(info), host.host_memory_freed():
                        return check_job(run.job, info=info, is_to_train=is_forecast, should_stop=host.is_cancelled)

                encode_texts(dataset, model, run.job, info, view, check)
            with model.prepared(info):
                if run.finished is None and in_background:
                    return _start_in_background(run, info, view)
                result = run.finished or _train(run, info, view)
        text = "\n".join(filter(None, [run.note, describe_result(result, how)]))
        view.show_text(text)
        if result.status == "stopped":
            host.cancel()
        assert result.lora_path is not None
        entry = folders.output_entry(result.lora_path)
        shown: dict[str, Any] = {"text": (text,), "lora": [entry] if entry else []}
        if pictures := list(filter(None, map(folders.output_entry, view.pictures.values()))):
            shown["images"] = pictures
        if any(each["filename"].endswith(".webp") for each in pictures):
            shown["animated"] = (True,)
        return io.NodeOutput(result.lora, {"loss": result.losses}, result.step, str(result.lora_path), ui=shown)


def _train(run: NextRun, info: CheckpointInfo | None, view: JobView) -> TrainingResult:
    from ..jobs.in_processes import run_in_processes
    from ..jobs.job import run_job

    refuse_cards_of_others(run.job)
    try:
        seen_queue().kept.keep(run.job)  # what the run is resumed from, though no queue started it
    except (OSError, ValueError) as error:
        _log.warning("the sidebar's tab will ask before it resumes %s: %s", run.job.output.folder, error)
    how: dict[str, Any] = {"resume": run.resume, "on_event": view, "should_stop": host.is_cancelled}
    with host.host_memory_freed():
        if run.job.parallel.processes > 1:
            return run_in_processes(run.job, **how)
        return run_job(run.job, info=info, **how)


def _start_in_background(run: NextRun, info: CheckpointInfo | None, view: JobView) -> io.NodeOutput:
    """Put the job into the queue, in the place of one of its run that still waits.
    Raises: ValueError if its run is under way or was started, or for a job that cannot be run as written."""
    from ..jobs.read_job import read_job

    read_job(run.job, info)  # a fault of headers or images is said here, not in a log
    queue = background_queue()
    waiting = {each.run for each in queue.jobs() if each.state == "waiting"}
    queued = queue.add(run.job, cards_of(run.job), is_resumed=run.resume)
    note = "It takes the place of the one that waited under this name." if queued.run in waiting else ""
    queue.tick()
    reasons = (each["why"] for each in queue.describe() if each["id"] == queued.id and each["why"])
    state = next((f"waits: {why}" for why in reasons), "trains in the background; see the sidebar's tab DeviceBridge")
    text = "\n".join(filter(None, [run.note, note, f"{queued.run} {state}"]))
    view.show_text(text)
    return io.NodeOutput(*host.blocked(4), ui={"text": (text,)})


def run_folder(name: str) -> Path:
    """Raises: ValueError for a name that is refused, or leads out of the output folder."""
    if name.casefold() in NO_RUNS:
        raise ValueError(f"name {name!r} is that of a folder of other files in output/devicebridge; choose another")
    folder = folders.folder_in_output(f"devicebridge/{name}", "name")
    check_file_name(name)
    return folder


def make_job(model: TrainingModel, dataset: TrainingDataset, sockets: Mapping[str, Any]) -> config.JobConfig:
    """The job that these sockets describe.
    Raises: ValueError for a setting that is refused, a name that leads out of the output folder, or a CLIP to be
    trained whose files nobody knows."""
    folder = run_folder(plain_name(sockets["name"]))
    draws = bool(sockets.get("sample_prompts", "").strip())
    decided = {"output": {"folder": str(folder)}, "samples": {"vae": dataset.vae_file if draws else ""}}
    made = read_sections(_INPUTS, sockets, **decided)
    cache = dataset.cache or config.CacheConfig(folder=str(folders.folder_in_output(DEFAULT_FOLDER, "cache")))
    if made["lora"].text_encoder:  # the files of the CLIP that is trained
        if cache.text_source and not dataset.clip_files:
            raise ValueError(
                "text_encoder trains the CLIP itself, and the file of the one that encoded the captions is not known; "
                "connect stock CLIP of Cache Captions and Latents straight to Load Checkpoint with the trained model, "
                "Load CLIP or DualCLIPLoader, or switch text_encoder off"
            )
        cache = replace(cache, stock_clip=dataset.clip_files, stock_clip_type=dataset.clip_type)
    return model.job(dataset, evaluation=dataset.evaluation, cache=cache, **made)


def describe_result(result: TrainingResult, resume: config.Resume | None) -> str:
    """One or two lines for the node and the log. resume: as of next_run."""
    if result.status == "stopped":
        needs_resume = result.checkpoint and resume is False
        hint = "Turn on resume and run again to continue." if needs_resume else "Run again to continue."
        return f"Cancelled after {result.step} steps; everything is saved. {hint}"
    text = f"{result.step} steps, last loss {result.losses[-1]:.5f}"
    if result.eval_before is not None and result.eval_after is not None:
        text += f", evaluation loss {result.eval_before:.5f} before and {result.eval_after:.5f} after"
    return "\n".join([text, *result.memory, *filter(None, [result.pace]), str(Path(result.lora_path or ""))])


# ---- the same training, planned


_OWN = {each.id: each for each in _INPUTS if isinstance(each, Socket)}
# What decides about memory and time.
_FIRST = "rank batch_size accumulation gradient_checkpointing optimizer dora targets "
_FIRST += "training_dtype offload_activations cuda_graphs"
_PLANNED = [_OWN[each] for each in _FIRST.split()]
_LATER = [_OWN[each] for each in ("lora_kind", "layers", "lokr_factor", "ema_decay", "kahan")]  # since saved workflows


class PlanTraining(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgePlanTraining",
        search_aliases=["memory planner", "vram estimate", "out of memory", "will it fit"],
        is_output_node=True,
        inputs=[
            ModelSocket.Input("model"),
            DatasetSocket.Input("dataset"),
            io.String.Input("cards", default="", placeholder="2x3090, 12GB"),
            *_PLANNED,
            io.Int.Input("steps", default=1000, min=1, max=1_000_000, optional=True),
            *_LATER,
        ],
        outputs=[io.String.Output("text"), io.Image.Output("picture")],
    )

    @classmethod
    @said_on_node
    def execute(cls, model: TrainingModel, dataset: TrainingDataset, cards: str, **sockets: Any) -> io.NodeOutput:
        import numpy as np
        import torch

        from ..jobs.job import plan_job
        from ..planning.cards import parse_cards
        from ..planning.dry_run import NoForecast
        from ..planning.plan import describe_plan, describe_verdict, draw_plan

        entries, steps = (*_PLANNED, *_LATER), sockets.get("steps", 1000)
        output = config.OutputConfig(folder=str(folders.folder_in_output("devicebridge/plan", "plan")))
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
