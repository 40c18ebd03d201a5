"""Node: train a LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import host
from .captions import DEFAULT_FOLDER
from .fields import AUTO, make_part, read_auto, read_number_or_name, read_patterns
from .host import io
from .types import DatasetSocket, ModelSocket, TrainingDataset, TrainingModel
from .view import JobView

if TYPE_CHECKING:
    from ..config.job import JobConfig, LoopConfig, LoraSettings
    from ..jobs.job import TrainingResult

_MODELS_OWN_GUIDANCE = -1.0


class TrainLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeTrainLora",
            display_name="Train LoRA Across GPUs",
            category="DeviceBridge/training",
            description="Trains a LoRA on a model split over several GPUs. Cancel finishes the step, saves everything "
            "and can be continued later with resume. The LoRA file is written to the run folder in ComfyUI's output "
            "folder.",
            search_aliases=["lora trainer", "finetune", "fine-tune", "flux lora", "dreambooth"],
            is_output_node=True,
            inputs=[*_main_inputs(), *_advanced_inputs()],
            outputs=[
                io.LoraModel.Output("lora", tooltip="The LoRA's tensors, for Save LoRA Weights or Load LoRA Model."),
                io.LossMap.Output("loss_map", tooltip="The loss of every step, for Plot Loss Graph."),
                io.Int.Output(
                    "steps_done", display_name="steps", tooltip="Optimizer steps done, resumed ones included."
                ),
                io.String.Output("lora_path", tooltip="Full path of the LoRA file."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model: TrainingModel, dataset: TrainingDataset, resume: bool, **settings: Any) -> io.NodeOutput:
        from ..jobs.job import run_job

        job = make_job(model, dataset, settings)
        view = JobView(cls.hidden.unique_id)
        with host.training_allowed(), host.host_memory_freed():
            result = run_job(job, resume=resume, on_event=view, should_stop=view.is_cancelled)
        text = describe_result(result)
        view.show_text(text)
        if result.status == "stopped":
            host.cancel()
        assert result.lora_path is not None
        entry = host.output_entry(result.lora_path)
        return io.NodeOutput(
            result.lora,
            {"loss": result.losses},
            result.step,
            str(result.lora_path),
            ui={"text": (text,), "lora": [entry] if entry else []},
        )


def training_inputs(*ids: str) -> list[io.Input]:
    """Some inputs of Train LoRA Across GPUs, for a node that asks for the same."""
    known = {entry.id: entry for entry in (*_main_inputs(), *_advanced_inputs())}
    return [known[each] for each in ids]


def _main_inputs() -> list[io.Input]:
    return [
        ModelSocket.Input("model", tooltip="The model to train, from Load Model for Training Across GPUs."),
        DatasetSocket.Input("dataset", tooltip="The images; encoded first if they are not yet."),
        io.String.Input(
            "name",
            default="my_lora",
            tooltip="File name of the LoRA without extension. The run folder is devicebridge/<name> in ComfyUI's "
            "output folder; another name starts another run.",
        ),
        io.Int.Input(
            "steps",
            default=1000,
            min=1,
            max=1000000,
            tooltip="Optimizer steps in all. 500 to 3000 is usual for a LoRA.",
        ),
        io.Float.Input(
            "learning_rate",
            default=1e-4,
            min=1e-8,
            max=1.0,
            step=1e-6,
            round=1e-9,
            tooltip="Size of a step, without unit. 0.0001 is a good start for AdamW; lower it when the loss jumps.",
        ),
        io.Int.Input(
            "rank",
            default=16,
            min=1,
            max=1024,
            tooltip="Size of the LoRA. Higher learns more detail, takes more memory and gives a larger file.",
        ),
        io.Float.Input(
            "alpha",
            default=16.0,
            min=0.01,
            max=1024.0,
            step=0.5,
            tooltip="Strength is alpha / rank. Leave it equal to rank unless a recipe says otherwise.",
        ),
        io.Int.Input(
            "batch_size",
            default=1,
            min=1,
            max=1024,
            tooltip="Images per forward pass. More takes more memory on every device.",
        ),
        io.Int.Input(
            "accumulation",
            default=1,
            min=1,
            max=1024,
            tooltip="Forward passes per step: acts like a larger batch without its memory. Over several GPUs 4 to 16 "
            "keep all of them busy at once; with 1 they take turns.",
        ),
        io.Int.Input(
            "random_seed",  # one called seed would be changed after every run by the interface, and resume refuse
            default=0,
            min=0,
            max=0x7FFFFFFFFFFFFFFF,
            tooltip="Start of all random numbers: LoRA weights, order, noise. The same seed gives the same LoRA.",
        ),
        io.Boolean.Input(
            "resume",
            default=False,
            tooltip="Continue from the newest checkpoint of the run folder, exactly as if it had not stopped. Turn it "
            "on after Cancel or a crash; the other settings must be as they were.",
        ),
    ]


def _advanced_inputs() -> list[io.Input]:
    """Rarely changed ones.

    A socket added after a release goes at the end, with optional=True: workflows saved before do not know it.
    """
    return [
        io.Boolean.Input(
            "gradient_checkpointing",
            default=True,
            advanced=True,
            tooltip="Computes each block twice instead of keeping its intermediate results: far less memory, about a "
            "third more time. Turn it off only with memory to spare.",
        ),
        io.Combo.Input(
            "optimizer",
            options=["adamw", "adamw8bit"],
            default="adamw",
            advanced=True,
            tooltip="adamw8bit keeps its state in 8 bits. The state of a LoRA is small, so this seldom matters.",
        ),
        io.Float.Input(
            "weight_decay",
            default=0.01,
            min=0.0,
            max=1.0,
            step=0.001,
            round=1e-6,
            advanced=True,
            tooltip="How strongly weights are pulled towards zero at each step, without unit.",
        ),
        io.Combo.Input(
            "schedule",
            options=["constant", "linear", "cosine"],
            default="constant",
            advanced=True,
            tooltip="Learning rate over the steps: unchanged, or falling to zero along a line or a half cosine.",
        ),
        io.Int.Input(
            "warmup_steps",
            default=0,
            min=0,
            max=1000000,
            advanced=True,
            tooltip="Steps over which the learning rate rises from zero. 0 starts at full rate.",
        ),
        io.Float.Input(
            "clip_norm",
            default=1.0,
            min=0.0,
            max=1000.0,
            step=0.1,
            advanced=True,
            tooltip="Largest length of the gradient; longer ones are shortened to it. 0 never shortens.",
        ),
        io.Float.Input(
            "dropout",
            default=0.0,
            min=0.0,
            max=0.99,
            step=0.01,
            advanced=True,
            tooltip="Probability that a LoRA input is left out. Against learning few images by heart.",
        ),
        io.Boolean.Input(
            "dora",
            default=False,
            advanced=True,
            tooltip="Train DoRA, which learns the size and the direction of weights apart. Slower, more memory.",
        ),
        io.String.Input(
            "targets",
            default="",
            multiline=True,
            placeholder="*.attn.to_q",
            advanced=True,
            tooltip="Which linear layers get a LoRA: one pattern per line over diffusers names, with * for anything. "
            "Empty takes the model family's usual ones.",
        ),
        io.Combo.Input(
            "training_dtype",
            options=["float32", "bfloat16"],
            default="float32",
            advanced=True,
            tooltip="Number type of the LoRA while training. bfloat16 takes half the memory and loses small steps.",
        ),
        io.Combo.Input(
            "timestep_sampling",
            options=[AUTO, "uniform", "logit_normal", "sigmoid"],
            default=AUTO,
            advanced=True,
            tooltip="How noise levels are drawn. auto takes what the model was trained with.",
        ),
        io.String.Input(
            "shift",
            default=AUTO,
            advanced=True,
            tooltip="Moves noise levels towards noise: a number such as 3.0, or the name of one of the model family's "
            "presets. auto takes the family's. Matters more at high resolution.",
        ),
        io.Float.Input(
            "guidance",
            default=_MODELS_OWN_GUIDANCE,
            min=_MODELS_OWN_GUIDANCE,
            max=100.0,
            step=0.1,
            advanced=True,
            tooltip="Guidance value while training, for models that take one as an input (FLUX.1-dev, FLUX.2-dev). -1 "
            "takes the model's usual value; leave it there for all other models.",
        ),
        io.Int.Input(
            "save_every",
            default=250,
            min=0,
            max=1000000,
            advanced=True,
            tooltip="Save a checkpoint and a LoRA every so many steps; 0 saves at the end and on Cancel only.",
        ),
        io.Int.Input(
            "keep_last",
            default=2,
            min=1,
            max=1000,
            advanced=True,
            tooltip="Checkpoints kept; older ones are deleted.",
        ),
        io.Combo.Input(
            "lora_layout",
            options=["original", "diffusers", "both"],
            default="original",
            advanced=True,
            tooltip="Names in the LoRA file: original loads in ComfyUI, diffusers in diffusers and peft, both in "
            "ComfyUI and in diffusers' pipelines (not DoRA of Wan). The lora output follows it.",
        ),
        io.Combo.Input(
            "lora_dtype",
            options=["bfloat16", "float16", "float32"],
            default="bfloat16",
            advanced=True,
            tooltip="Number type in the LoRA file. float32 doubles its size.",
        ),
        io.Boolean.Input(
            "tensorboard",
            default=False,
            advanced=True,
            tooltip="Also write losses for TensorBoard into the run folder. Needs the tensorboard package.",
        ),
        io.Combo.Input(
            "compile_blocks",
            options=["off", "auto"],
            default="off",
            optional=True,
            advanced=True,
            tooltip="auto compiles each kind of transformer block, once for all sizes: the first steps take a minute "
            "or two longer, all others are faster. Worth it for long runs on fast cards. Where no compiler is found "
            "the log says so, and training goes on without.",
        ),
        io.Combo.Input(
            "offload_activations",
            options=["auto", "on", "off"],
            default="auto",
            optional=True,
            advanced=True,
            tooltip="Whether what gradient checkpointing keeps of every block waits in the computer's memory, not on "
            "the GPUs. auto does it where nothing as good fits without. Matters for video. The LoRA is the same.",
        ),
        io.Combo.Input(
            "cuda_graphs",
            options=["off", "auto"],
            default="off",
            optional=True,
            advanced=True,
            tooltip="auto records blocks that keep their activations once and replays them, so that fast GPUs need not "
            "wait for Python. Matters for 8-bit models on GPUs with memory to spare. The LoRA is the same. Needs "
            "NVIDIA GPUs, images of one size, batch_size 1 and dropout 0; else the log says so and training goes on "
            "without.",
        ),
    ]


def make_job(model: TrainingModel, dataset: TrainingDataset, settings: dict[str, Any]) -> JobConfig:
    """The job that these sockets describe; settings by input id.

    Raises: ValueError for a setting that is refused, or a name that leads out of the output folder.
    """
    from ..config import job as config

    name = settings["name"].strip()
    folder = host.folder_in_output(f"devicebridge/{name}", "name")
    guidance = settings["guidance"]
    return config.JobConfig(
        model=model.model,
        split=model.split,
        data=dataset.data,
        evaluation=dataset.evaluation,
        cache=dataset.cache or config.CacheConfig(folder=str(host.folder_in_output(DEFAULT_FOLDER, "cache"))),
        train=loop_part(
            settings,
            **_pick(settings, "steps", "clip_norm"),
            seed=settings["random_seed"],
            compile=settings.get("compile_blocks", "off"),
        ),
        lora=lora_part(settings, **_pick(settings, "alpha", "dropout")),
        objective=make_part(
            config.ObjectiveConfig,
            timestep_sampling=read_auto(settings["timestep_sampling"]),
            shift=read_number_or_name(settings["shift"]),
            guidance=None if guidance == _MODELS_OWN_GUIDANCE else guidance,
        ),
        optimizer=make_part(
            config.OptimizerConfig, name=settings["optimizer"], **_pick(settings, "learning_rate", "weight_decay")
        ),
        schedule=make_part(config.ScheduleConfig, name=settings["schedule"], **_pick(settings, "warmup_steps")),
        output=make_part(
            config.OutputConfig,
            folder=str(folder),
            name=name,
            save_every_steps=settings["save_every"],
            **_pick(settings, "keep_last", "lora_layout", "lora_dtype", "tensorboard"),
        ),
    )


def loop_part(settings: dict[str, Any], **more: Any) -> LoopConfig:
    """The loop that these sockets describe, as far as it takes memory; more: the rest of it."""
    from ..config.job import LoopConfig

    return make_part(
        LoopConfig,
        **_pick(settings, "batch_size", "gradient_checkpointing"),
        gradient_accumulation_steps=settings["accumulation"],
        offload_activations=settings.get("offload_activations", "auto"),
        cuda_graphs=settings.get("cuda_graphs", "off"),
        **more,
    )


def lora_part(settings: dict[str, Any], **more: Any) -> LoraSettings:
    """The LoRA that these sockets describe, as far as it takes memory; more: the rest of it."""
    from ..config.job import LoraSettings

    return make_part(
        LoraSettings,
        **_pick(settings, "rank", "dora"),
        targets=read_patterns(settings["targets"]),
        dtype=settings["training_dtype"],
        **more,
    )


def _pick(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: settings[name] for name in names}


def describe_result(result: TrainingResult) -> str:
    """One or two lines for the node and the log."""
    if result.status == "stopped":
        hint = "Turn on resume and run again to continue." if result.checkpoint else "Run again to continue."
        return f"Cancelled after {result.step} steps; everything is saved. {hint}"
    text = f"{result.step} steps, last loss {result.losses[-1]:.5f}"
    if result.eval_before is not None and result.eval_after is not None:
        text += f", evaluation loss {result.eval_before:.5f} before and {result.eval_after:.5f} after"
    return "\n".join([text, *result.memory, *filter(None, [result.pace]), str(Path(result.lora_path or ""))])
