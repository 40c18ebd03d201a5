"""Node: train a LoRA of four choices. It runs the nodes for training, with settings by quality and kind of model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runs.store import run_name
from . import host
from .captions import DEFAULT_FOLDER, CacheCaptionsAndLatents
from .choices import NONE, file_options, lists_pass
from .dataset import TrainingDatasetNode
from .host import folders, io
from .load import LoadModelForTraining, Quantize
from .saying import said_on_node, training_schema
from .train import PlanTraining, TrainLora, run_folder

if TYPE_CHECKING:
    from ..checkpoints.checkpoint import CheckpointInfo


class _Settings(NamedTuple):
    """resolution: pixels along a square. accumulation: pictures or clips per step; with few the cards take turns."""

    steps: int
    resolution: int
    rank: int = 16
    learning_rate: float = 1e-4
    accumulation: int = 4


_PLAN_ONLY = "plan_only"  # what the node's button adds to its inputs in a prompt, see web/js/nodes.js
QUALITIES = ("quick", "normal", "thorough")
_LARGE = 15e9  # parameters: FLUX.2-dev, Qwen-Image
# By kind of model and quality. Two cards of 24 GB take about a day at most; rank and rate are what trainers begin with.
SETTINGS = {
    "image": (_Settings(500, 512, 16, 2e-4, 2), _Settings(1500, 768), _Settings(2500, 1024, 32)),
    "large image": (_Settings(500, 512, 16, 2e-4, 2), _Settings(1500, 512), _Settings(2000, 768, 32)),
    "video": (_Settings(500, 256, 16, 2e-4, 2), _Settings(1500, 384), _Settings(2500, 384, 32)),
    "UNet": (_Settings(500, 768, 16, 2e-4, 2), _Settings(1500, 1024), _Settings(3000, 1024, 32)),
}


def kind_of(info: CheckpointInfo) -> str:
    """A key of SETTINGS."""
    if info.family.transformer_class == "UNetModel":
        return "UNet"
    latent = info.family.latent_of(info.variant) if info.variant else info.family.latent
    if latent.is_video:
        return "video"
    return "large image" if sum(math.prod(each.shape) for each in info.tensors.values()) > _LARGE else "image"


def expert_of(info: CheckpointInfo) -> str:
    """Which of Wan 2.2's experts a model is that ComfyUI builds; "" for others.
    Raises: ValueError for a file that may be one of several which train at other noise levels."""
    from ..checkpoints.checkpoint import expert_by_name

    variant, named = info.variant, expert_by_name(info.path)
    apart = {each.sigma_range for each in (variant, *info.others) if each}
    if info.path.is_file() and len(apart) > 1 or variant and variant.is_expert and not named:
        raise ValueError(
            f"{info.path.name} may be one of Wan 2.2's two experts, which train at noise levels of their own: put "
            "high_noise or low_noise into the file's name (wan2.1 if it is that), or take Load Model for Training "
            "Across GPUs, which has a variant, and Train LoRA Across GPUs, which has an expert"
        )
    return named if variant and variant.boundary else ""


def _inputs() -> list[io.Input]:
    return [
        io.Combo.Input("model", **file_options(*folders.list_models())),
        io.Combo.Input("images", **file_options(*folders.list_input_folders())),
        io.String.Input("trigger_word", default="", placeholder="ohwx"),
        io.Combo.Input("quality", options=list(QUALITIES), default="normal"),
        io.String.Input("name", default="", optional=True, advanced=True),
        io.Clip.Input("stock_clip", optional=True),
        io.Vae.Input("stock_vae", optional=True),
    ]


class TrainLoraSimple(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeTrainLoraSimple",
        search_aliases=["lora trainer", "easy training", "finetune", "multi gpu training", "dreambooth"],
        is_output_node=True,
        inputs=_inputs,
        outputs=[io.LoraModel.Output("lora"), io.String.Output("lora_path")],
        hidden=[io.Hidden.unique_id, io.Hidden.prompt],
    )

    validate_inputs = lists_pass("model", "images")

    @classmethod
    def fingerprint_inputs(cls, images: str | None = None, **others: Any) -> Any:
        """Changed files run the node again."""
        return TrainingDatasetNode.fingerprint_inputs(folder=images, evaluation_folder=NONE)

    @classmethod
    @said_on_node
    def execute(
        cls, model: str, images: str, trigger_word: str, quality: str, name: str = "", **stock: Any
    ) -> io.NodeOutput:
        word, name = trigger_word.strip(), run_name(name, trigger_word, images)
        run_folder(name)  # refuses it before captions are encoded
        (chosen,) = _run(cls, LoadModelForTraining, model=model, path="").args
        (chosen, _) = _run(cls, Quantize, model=chosen).args
        info = chosen.read()
        expert = expert_of(info)
        train: dict[str, Any] = SETTINGS[kind_of(info)][QUALITIES.index(quality)]._asdict()
        shown = ", ".join(f"{key} {value:g}" for key, value in train.items()).replace("_", " ")
        decided = f"{quality}: {shown}"
        words = {"trigger_word": word, "default_caption": word, "resolutions": str(train.pop("resolution"))}
        (dataset,) = _run(cls, TrainingDatasetNode, folder=images, evaluation_folder=NONE, **words).args
        train["alpha"] = float(train["rank"])
        entry = (cls.hidden.prompt or {}).get(cls.hidden.unique_id, {"inputs": {}})
        is_plan = entry["inputs"].get(_PLAN_ONLY, False)
        if is_plan or host.list_gpus():  # what does not fit is refused before captions are encoded
            plan = _run(cls, PlanTraining, model=chosen, dataset=dataset, cards="", **train)
            if is_plan:
                return io.NodeOutput(*host.blocked(2), ui={**plan.ui, "text": (decided, *plan.ui["text"])})
        given = {link: each for link, each in stock.items() if each is not None}
        given |= {"text_encoders": folders.OWN_PART, "vae": folders.OWN_PART, "cache_folder": DEFAULT_FOLDER}
        (dataset,) = _run(cls, CacheCaptionsAndLatents, model=chosen, dataset=dataset, **given).args
        drawn = word if dataset.vae_file or "stock_vae" not in given else ""
        train |= {"name": name, "sample_prompts": drawn, "expert": expert}
        done = _run(cls, TrainLora, model=chosen, dataset=dataset, resume=None, **train)
        ui = {**done.ui, "text": (decided, *done.ui["text"])}
        return io.NodeOutput(done.args[0], done.args[3], ui=ui)


def _run(cls: type[io.ComfyNode], node: type[io.ComfyNode], **sockets: Any) -> io.NodeOutput:
    """Another node in the place of this one; its sockets that are not given have their defaults."""
    made: Any = type(node.__name__, (node,), {"hidden": cls.hidden})
    return made.execute(**sockets)
