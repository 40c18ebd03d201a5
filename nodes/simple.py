"""Node: train a LoRA of four choices. It runs the nodes for training, with settings by quality and kind of model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ..runs.store import run_name
from . import host
from .captions import DEFAULT_FOLDER, CacheCaptionsAndLatents
from .choices import COMES_AND_GOES, NONE, lists_pass
from .dataset import TrainingDatasetNode
from .host import folders, io
from .load import LoadModelForTraining, Quantize
from .plan import PlanTraining
from .saying import said_on_node, training_schema
from .train import TrainLora, run_folder

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


def _listed(id: str, names: list[str], tooltip: str) -> io.Input:
    names = names or [""]
    return io.Combo.Input(id, options=names, default=names[0], extra_dict=COMES_AND_GOES, tooltip=tooltip)


def _inputs() -> list[io.Input]:
    """Made anew each time: the lists show what is there now."""
    found = "from its loaders. Needed only where {0} is not found among ComfyUI's files; the node says so."
    return [
        _listed(
            "model",
            folders.list_models(),
            "The model to train: a file in models/diffusion_models or models/checkpoints, or a folder in "
            "models/diffusers. A file in 8 bits trains as well as one in 16.",
        ),
        _listed(
            "images",
            folders.list_input_folders(),
            "A folder in ComfyUI's input folder with 10 to 50 images, or clips for a video model. A caption is a .txt "
            "file of the same name. Press R after you have made the folder.",
        ),
        io.String.Input(
            "trigger_word",
            default="",
            placeholder="ohwx",
            tooltip="A word that calls what is trained in prompts. It is the caption of what has none, and stands in "
            "front of captions that lack it.",
        ),
        io.Combo.Input(
            "quality",
            options=list(QUALITIES),
            default="normal",
            tooltip="How long it trains. Steps, resolution, rank and learning rate follow; the node shows them.",
        ),
        io.String.Input(
            "name",
            default="",
            optional=True,
            advanced=True,
            tooltip="Name of the LoRA and of its run in output/devicebridge. Empty takes the trigger word, or the "
            "folder's name.",
        ),
        io.Clip.Input(
            "stock_clip",
            display_name="stock CLIP",
            optional=True,
            tooltip=f"ComfyUI's CLIP, {found.format('the text encoder')}",
        ),
        io.Vae.Input(
            "stock_vae", display_name="stock VAE", optional=True, tooltip=f"ComfyUI's VAE, {found.format('the VAE')}"
        ),
    ]


class TrainLoraSimple(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeTrainLoraSimple",
        display_name="Train LoRA (simple)",
        description="Trains a LoRA of a model file, a folder of images or clips, and one word, over all GPUs. Text "
        "encoder and VAE, steps, resolution and how the cards share the work are decided, and shown on the node. "
        "Cancel saves everything; Run again goes on.",
        search_aliases=["lora trainer", "easy training", "finetune", "multi gpu training", "dreambooth"],
        is_output_node=True,
        inputs=_inputs,
        outputs=[
            io.LoraModel.Output("lora", tooltip="The LoRA's tensors, for Load LoRA Model."),
            io.String.Output("lora_path", tooltip="Full path of the LoRA file."),
        ],
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
