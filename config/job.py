"""The job a user describes, as frozen dataclasses, and its TOML form.

Every section rejects unknown keys and contradictions when it is built, so the code below need not check again. The same
config is what the nodes assemble, what `devicebridge train job.toml` reads and what a LoRA's metadata records.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tomlkit
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..system.files import write_atomically
from .ranges import PathText, Range, RequiredPath, check_file_name, problems_of

if TYPE_CHECKING:
    from ..quantization.quantize import QuantizeSettings

_log = logging.getLogger(__name__)
_STRICT = ConfigDict(extra="forbid")
_MOST_STEPS = 10_000_000
_MOST_BLOCKS = 10_000
_NO_CAPTIONS = "to train without captions, leave out their files"
Seed = Annotated[int, Range(0, 2**63 - 1)]
_Quantiles = Annotated[tuple[Annotated[float, Range(0.001, 0.999)], ...], Field(min_length=1, max_length=1000)]


def _source_pattern(kind: str) -> str:
    """Of "comfyui <version> <kind> <fingerprint>", or nothing."""
    return rf"^(comfyui \S+ {kind} [0-9a-f]{{64}})?$"


ModelScheme = Literal["none", "fp8", "int8", "fp8-compute", "int8-compute", "auto"]


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """What to train.

    Args:
        path: diffusers folder (pipeline or transformer), single-file checkpoint, or one shard of several.
        family, variant: "" recognises them from the file.
        second_expert: of a model that is a pair of experts (Wan 2.2 A14B), the other one, which is trained at the same
            time on cards of its own; the same model folder where both lie in one. "" trains the one at path alone.
        dtype: type of the frozen weights in memory and of the computation; files of any type are converted. float16 is
            not offered: its range is too small for the gradients of these models without loss scaling.
        quantize: "none", or how the linears that the family allows are held (LoRA is left alone): "fp8" and "int8"
            store in 8 bits, "fp8-compute" and "int8-compute" multiply in 8 bits too, forwards and backwards; "auto"
            lets the planner choose among all of these.
        rotation: for int8-compute: block of the rotation that spreads outliers, 0 for none.
        quantized_cache: folder that keeps the quantized weights for the next run, which then loads at the disk's speed;
            "" keeps none.
    """

    path: RequiredPath
    family: str = ""
    variant: str = ""
    second_expert: PathText = ""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantize: ModelScheme = "none"
    rotation: Literal[0, 16, 64, 256] = 64
    quantized_cache: PathText = ""

    @property
    def quantize_settings(self) -> QuantizeSettings | None:
        """For the code that quantizes; None where nothing is. "auto" must have ended before (jobs/resolve.py)."""
        from ..quantization.quantize import QuantizeSettings  # brings torch, which reading a config does without

        return None if self.quantize == "none" else QuantizeSettings(self.quantize, self.rotation)  # type: ignore[arg-type]


@dataclass(frozen=True, config=_STRICT)
class SplitConfig:
    """Which devices hold the blocks.

    Args:
        devices: in execution order, the first is home (embedders, tail, loss); () takes every GPU, or the CPU.
        balance: "bytes" equalises memory, "time" equalises estimated compute, "manual" cuts at split_at.
        split_at: for manual, the index of the first block of each further device, counted over all block lists.
        memory_limit_gb: per device, decimal GB for weights; () means what is free.
        kept_blocks: with gradient checkpointing, how many blocks of each device keep their activations instead of being
            computed again, the last ones of each; () lets the planner choose where it knows the devices' memory, and
            keeps none elsewhere.
        swapped_blocks: with gradient checkpointing, how many blocks of each device stream from host memory whenever
            they compute, spread evenly over those that do not keep their activations; () lets the planner choose where
            it knows the devices' memory (none, unless the job would not fit), and swaps none elsewhere.
        calibrate: where the planner knows the devices' memory, whether a training times its blocks on them first, for
            some seconds and once per kind of job: "auto" where the cut or the scheme depends on it, "on" always, "off"
            never; times are estimated from operations then.
    """

    devices: tuple[str, ...] = ()
    balance: Literal["bytes", "time", "manual"] = "bytes"
    split_at: tuple[Annotated[int, Range(0, _MOST_BLOCKS)], ...] = ()
    memory_limit_gb: tuple[Annotated[float, Range(0, 100_000)], ...] = ()
    kept_blocks: tuple[Annotated[int, Range(0, _MOST_BLOCKS)], ...] = ()
    swapped_blocks: tuple[Annotated[int, Range(0, _MOST_BLOCKS)], ...] = ()
    calibrate: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        if (self.balance == "manual") != bool(self.split_at):
            if self.split_at:
                found = f"split_at = {list(self.split_at)}"
                raise ValueError(f'{found} belongs to balance = "manual", not "{self.balance}"')
            raise ValueError(
                'balance = "manual" needs split_at, the index of the first block of each device after the first, such '
                "as [20] for two"
            )
        if self.devices and self.split_at and len(self.split_at) != len(self.devices) - 1:
            raise ValueError(
                f"split_at has {len(self.split_at)} cuts for {len(self.devices)} devices; "
                f"give {len(self.devices) - 1}, the first block of each device after the first"
            )
        if self.memory_limit_gb and self.devices and len(self.memory_limit_gb) != len(self.devices):
            raise ValueError(
                f"memory_limit_gb has {len(self.memory_limit_gb)} values for {len(self.devices)} devices; give one each"
            )


def _without_gpipe(schedule: Any) -> Any:
    """Jobs of older versions may name a schedule that is gone."""
    if schedule != "gpipe":
        return schedule
    _log.warning('pipeline.schedule = "gpipe" is gone; "1f1b" is used, which gives the same numbers in less memory')
    return "1f1b"


@dataclass(frozen=True, config=_STRICT)
class PipelineConfig:
    """How several devices share the micro-batches of a step (train.accumulation).

    Args:
        schedule: "none": one micro-batch at a time, one device computing; "1f1b" keeps all devices busy, with the same
            numbers. "replicas": every device holds the whole model
            and computes its share of the micro-batches, the same numbers up to the order of summation, with dropout
            masks of each device's own; a run is resumed as it began. "auto" takes what the planner finds
            fastest, and where none plans 1f1b, if there are several devices and micro-batches.
        ahead: micro-batches that every device but the last may hold beyond what 1f1b needs.
    """

    schedule: Annotated[Literal["auto", "none", "1f1b", "replicas"], BeforeValidator(_without_gpipe)] = "auto"
    ahead: Annotated[int, Range(0, 1000)] = 1


@dataclass(frozen=True, config=_STRICT)
class LoraSettings:
    """The adapter. targets are fnmatch patterns of linear layers; () takes the family's.

    dtype is that of the trained weights; float32 trains more steadily at small learning rates.
    """

    rank: Annotated[int, Range(1, 1024)] = 16
    alpha: Annotated[float, Range(1e-3, 1e5)] = 16.0
    dropout: Annotated[float, Range(0.0, 0.99)] = 0.0
    dora: bool = False
    targets: tuple[str, ...] = ()
    dtype: Literal["bfloat16", "float32"] = "float32"


@dataclass(frozen=True, config=_STRICT)
class FolderConfig:
    """One dataset folder: images and clips with captions of the same name (.txt) and optional masks (name_mask.png)."""

    path: RequiredPath
    repeats: Annotated[int, Range(1, 10_000)] = 1


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """The images and clips.

    Args:
        folders: dataset folders.
        resolutions: pixels; each image or clip is used once per resolution, at an area of about resolution squared.
        max_aspect_ratio: widest bucket, long side over short side.
        bucket_step: bucket sides are multiples of this many pixels; 0 takes the family's smallest.
        caption_dropout: probability that a sample is trained with the empty caption.
        use_masks: weigh the loss by name_mask.png where it exists.
        frames: lengths a clip may be cut to; it gets the longest that fits. () takes the family's. 1 is for images, and
            for clips only if it is the only length.
        fps: frames per second that are taken from a clip; 0 takes the family's, "source" every frame there is.
        window: which part of a longer clip: its "start", its "centre", or num_windows of them, spread evenly from start
            to end ("uniform"), each a sample of its own.
        encoded: in place of folders, a list of samples that arrived as latents and text states, see
            encoding/encoded.py. Everything that is about images has no effect then.
    """

    folders: tuple[FolderConfig, ...] = ()
    resolutions: Annotated[tuple[Annotated[int, Range(1, 8192)], ...], Field(min_length=1, max_length=100)] = (512,)
    max_aspect_ratio: Annotated[float, Range(1.0, 100.0)] = 2.0
    bucket_step: Annotated[int, Range(0, 1024)] = 0
    caption_dropout: Annotated[float, Range(0.0, 0.9, hint=_NO_CAPTIONS)] = 0.0
    use_masks: bool = True
    frames: tuple[Annotated[int, Range(1, 10_000)], ...] = ()
    fps: Annotated[float, Range(0.1, 1000.0, or_zero=True)] | Literal["source"] = 0.0
    window: Literal["start", "centre", "uniform"] = "start"
    num_windows: Annotated[int, Range(1, 1000)] = 1
    encoded: PathText = ""

    def __post_init__(self) -> None:
        if bool(self.folders) == bool(self.encoded):
            raise ValueError("data needs folders of images, or encoded, and not both")
        if self.encoded and self.caption_dropout:
            raise ValueError("caption_dropout needs the empty caption's states, which data.encoded has not; use 0")
        if (self.window == "uniform") != (self.num_windows > 1):
            raise ValueError('num_windows above 1 belongs to window = "uniform", and uniform needs it')


@dataclass(frozen=True, config=_STRICT)
class CacheConfig:
    """Captions and latents computed once.

    Args:
        folder: cache folder; "" puts it into the output folder.
        text_encoders: folder that holds the text encoder folders; "" takes the model folder.
        vae: VAE folder or single file; "" takes the model folder.
        text_device: where the text encoders run: "cpu"; a card that holds all of one ("cuda:1"); "stream" or
            "stream:cuda:1", whose layers pass through the card while they compute; or "auto", which picks by size.
        text_window_gb: decimal GB of its card that a streamed text encoder may take; 0 for what is free.
        vae_device: where the VAE runs; "" takes the model's first device.
        dtype: type the encoders compute in; results are stored in the same type, latents in float32.
        text_quantize: "int8" or "fp8" hold the text encoders' linears in 8 bits, each rounded as it is read: half the
            memory of bfloat16, no speed. int8 is the more exact and, on a CPU, the faster of the two.
        text_source: "" for the model's own text encoders. Else the name of a CLIP of ComfyUI's whose states are in the
            cache folder already, as the caching node shows it; what is missing cannot be computed without ComfyUI.
        latent_source: the same for the VAE.
    """

    folder: PathText = ""
    text_encoders: PathText = ""
    vae: PathText = ""
    text_device: str = "cpu"
    text_window_gb: Annotated[float, Range(0.0, 100_000)] = 0.0
    vae_device: str = ""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    text_quantize: Literal["none", "fp8", "int8"] = "none"
    text_source: Annotated[str, Field(pattern=_source_pattern("CLIP"))] = ""
    latent_source: Annotated[str, Field(pattern=_source_pattern("VAE"))] = ""

    def __post_init__(self) -> None:
        if self.text_source and (self.text_encoders or self.text_quantize != "none"):
            raise ValueError("text_source says that ComfyUI's CLIP encodes; remove text_encoders and text_quantize")
        if self.latent_source and self.vae:
            raise ValueError("latent_source says that ComfyUI's VAE encodes; remove vae")


@dataclass(frozen=True, config=_STRICT)
class ObjectiveConfig:
    """Flow matching. Empty strings and None take the family's default.

    Args:
        timestep_sampling: "uniform", "logit_normal" or "sigmoid" (logistic of a normal scaled by sigmoid_scale).
        shift: name of one of the family's presets, or a number.
        guidance: embedded guidance value while training, for models that have the input.
    """

    timestep_sampling: Literal["", "uniform", "logit_normal", "sigmoid"] = ""
    shift: str | Annotated[float, Range(0.01, 100.0)] = ""
    logit_mean: Annotated[float, Range(-10.0, 10.0)] = 0.0
    logit_std: Annotated[float, Range(0.01, 10.0)] = 1.0
    sigmoid_scale: Annotated[float, Range(0.01, 10.0)] = 1.0
    guidance: Annotated[float, Range(0.0, 1000.0)] | None = None


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """How weights are changed.

    Args:
        name: "adamw", "adamw8bit" or the dotted name of an optimizer class of a package that optimizer.py lists; "auto"
            is adamw where that fits, else adamw8bit.
        options: keyword arguments of the class.
        allow_import: whether the class may be of any other package. Importing a package runs its code, so say it only
            in a job file that you wrote or read.
    """

    name: str = "adamw"
    learning_rate: Annotated[float, Range(1e-10, 1.0)] = 1e-4
    weight_decay: Annotated[float, Range(0.0, 10.0)] = 0.01
    options: dict[str, Any] = Field(default_factory=dict)
    allow_import: bool = False

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if name in _NOT_FOR_LOOP and value:
                raise ValueError(f"options.{name} = {value!r} {_NOT_FOR_LOOP[name]}; leave it out")
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"options.{name} = {value!r} is not finite; give a number that is, or leave it out")


# Options that torch's optimizers take and that train nothing here -> why.
_NOT_FOR_LOOP = {
    "maximize": "would raise the loss, not lower it",
    "differentiable": "is for gradients of the optimizer itself, which nobody takes here",
    "capturable": "is for steps recorded as CUDA graphs, and the optimizer's is not",
}


@dataclass(frozen=True, config=_STRICT)
class ScheduleConfig:
    """Learning rate over the steps, after warmup_steps of linear rise; min_factor is the end of cosine and linear."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Range(0, _MOST_STEPS)] = 0
    min_factor: Annotated[float, Range(0.0, 1.0)] = 0.0


@dataclass(frozen=True, config=_STRICT)
class EvaluationConfig:
    """Loss on a held-out folder at fixed timestep quantiles with fixed noise; folder "" turns it off.

    every_steps 0 evaluates before the first and after the last step only.
    """

    folder: PathText = ""
    every_steps: Annotated[int, Range(0, _MOST_STEPS)] = 0
    quantiles: _Quantiles = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    seed: Seed = 0


@dataclass(frozen=True, config=_STRICT)
class LoopConfig:
    """The loop: steps are optimizer steps; batch_size is per forward, accumulation forwards make one step.

    clip_norm: the largest length of a gradient, to which longer ones are shortened; 0 shortens none.
    compile: "auto" compiles each kind of transformer block once per device, where a compiler is found: for the one
        shape of all batches, or for any number of tokens. The first steps take minutes, the others are faster. Numbers
        differ in the last bits from those without. Before the first step every block is compared with what it
        is uncompiled; where one is wrong, or the compiler fails, the run goes on uncompiled and says so.
    cuda_graphs: "auto" records the blocks that keep their activations in the first step and replays them from then on,
        so that fast cards need not wait for Python; numbers are the same. Where that cannot be done the log says why:
        NVIDIA cards, batches of one shape and no dropout are needed.
    offload_activations: whether what recomputed blocks keep for their backward waits in pinned host memory instead of
        on the cards; numbers are the same. "auto" lets the planner choose it where nothing as good fits without, and is
        "off" where no planner knows the devices' memory.
    """

    steps: Annotated[int, Range(1, _MOST_STEPS)]
    batch_size: Annotated[int, Range(1, 1024)] = 1
    accumulation: Annotated[int, Range(1, 1024)] = 1
    clip_norm: Annotated[float, Range(1e-4, 1e6, or_zero=True)] = 1.0
    seed: Seed = 0
    gradient_checkpointing: bool = True
    compile: Literal["off", "auto"] = "off"
    cuda_graphs: Literal["off", "auto"] = "off"
    offload_activations: Literal["auto", "on", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.offload_activations == "on" and not self.gradient_checkpointing:
            raise ValueError(
                'offload_activations = "on" is about what recomputed blocks keep, but gradient_checkpointing is false, '
                "so none is recomputed; change one of the two"
            )


@dataclass(frozen=True, config=_STRICT)
class OutputConfig:
    """Where results go and how often the full state is saved.

    Args:
        folder: run folder: checkpoints, events, TensorBoard scalars, the LoRA.
        name: file name of the LoRA, without extension.
        save_every_steps: how much a crash can cost; 0 saves at the end and when stopped only.
        keep_last: checkpoints kept.
        lora_layout: "original" names load in ComfyUI for every family; "diffusers" is for diffusers and peft; "both"
            is read by ComfyUI and by diffusers' pipelines, and refused where no file is (DoRA of Wan).
        lora_dtype: type of the tensors in the LoRA file.
    """

    folder: RequiredPath
    name: str = "lora"
    save_every_steps: Annotated[int, Range(0, _MOST_STEPS)] = 250
    keep_last: Annotated[int, Range(1, 10_000)] = 2
    lora_layout: Literal["original", "diffusers", "both"] = "original"
    lora_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    tensorboard: bool = True

    def __post_init__(self) -> None:
        check_file_name(self.name)


@dataclass(frozen=True, config=_STRICT)
class JobConfig:
    """One training job."""

    model: ModelConfig
    data: DataConfig
    train: LoopConfig
    output: OutputConfig
    split: SplitConfig = Field(default_factory=SplitConfig)
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    lora: LoraSettings = Field(default_factory=LoraSettings)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if self.data.encoded and self.evaluation.folder:
            raise ValueError("evaluation.folder holds images, but a job on data.encoded has no encoders; remove it")
        if self.model.second_expert and self.split.balance == "manual":
            raise ValueError(
                'split.balance = "manual" cuts one model, but model.second_expert gives each of two experts cards of '
                "its own; remove one of the two"
            )
        if self.pipeline.schedule == "replicas" and self.split.balance != "bytes":
            raise ValueError(
                f'split.balance = "{self.split.balance}" says where to cut the model, but pipeline.schedule = '
                '"replicas" puts all of it on every device; remove one of the two'
            )
        if self.data.encoded and (self.cache.text_source or self.cache.latent_source):
            raise ValueError("cache.text_source and latent_source are for images; data.encoded is encoded already")


# Settings that change neither what is trained nor in which order; everything else must match for --resume.
FREE_ON_RESUME = frozenset(
    {
        "output.save_every_steps",
        "output.keep_last",
        "output.tensorboard",
        "output.lora_layout",
        "output.lora_dtype",
        "output.name",
        "optimizer.allow_import",
        "evaluation.every_steps",
        "cache.text_device",
        "cache.text_window_gb",
        "model.quantized_cache",
        "pipeline.schedule",
        "pipeline.ahead",
        "split.calibrate",
        "train.offload_activations",
        "train.cuda_graphs",
        "split.kept_blocks",
        "split.swapped_blocks",
        "split.memory_limit_gb",
    }
)

_ADAPTER = TypeAdapter(JobConfig)


def make_job(values: dict[str, Any]) -> JobConfig:
    """Build a job from nested plain values, e.g. parsed TOML or JSON.

    Raises: ValueError with one line per problem, each naming its key as "section.key".
    """
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        lines = [_describe(problem) for problem in problems_of(error)]
        raise ValueError("the job config has problems:\n" + "\n".join(f"  {line}" for line in lines)) from error


def _describe(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"]) or "job"
    if problem["type"] in {"extra_forbidden", "unexpected_keyword_argument"}:
        near = difflib.get_close_matches(str(problem["loc"][-1]), _keys_beside(problem["loc"]), n=1)
        return f"{key}: there is no such key" + (f"; did you mean {near[0]}?" if near else "")
    if problem["type"] in {"missing", "missing_argument"}:
        return f"{key}: is required"
    if problem["type"] == "dataclass_type" and isinstance(problem["input"], list):
        return f"{key}: is one section, [{key}], and not a list of sections, [[{key}]]"
    if problem["type"] == "tuple_type" and isinstance(problem["input"], dict):
        return f"{key}: is a list of sections, [[{key}]], and not one, [{key}]"
    if problem["type"] == "tuple_type":
        return f"{key}: is a list, such as [{problem['input']!r}] (found {problem['input']!r})"
    values = problem["input"] if isinstance(problem["input"], list) else [problem["input"]]
    is_plain = all(isinstance(each, (str, int, float, type(None))) for each in values)  # no section, nor the whole job
    found = f" (found {problem['input']!r})" if is_plain else ""
    return f"{key}: {problem['msg'].removeprefix('Value error, ')}{found}"


def _keys_beside(place: tuple[Any, ...]) -> list[str]:
    """Names that are known where an unknown one stands: sections, or keys of a section."""
    kinds = get_type_hints(JobConfig)
    if len(place) == 1:
        return list(kinds)
    return [each.name for each in dataclasses.fields(kinds[place[0]])] if len(place) == 2 else []


def job_to_dict(job: JobConfig) -> dict[str, Any]:
    """Plain nested values; make_job of them gives an equal job."""
    return json.loads(json.dumps(dataclasses.asdict(job)))  # type: ignore[call-overload]


def load_job(path: str | Path) -> JobConfig:
    """Read a TOML job. Relative paths in it are taken relative to the file's folder.

    Raises: ValueError naming the file, for TOML errors and config problems alike.
    """
    path = Path(path)
    try:
        values = tomlkit.parse(path.read_text(encoding="utf-8-sig")).unwrap()
        return make_job(_anchor_paths(values, path.resolve().parent))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); give the path of a job file (TOML)") from error
    except (tomlkit.exceptions.ParseError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def save_job(job: JobConfig, path: str | Path) -> None:
    """Write the job as TOML; load_job reads it back equal when its paths are absolute."""
    text = tomlkit.dumps(_without_none(job_to_dict(job)))
    write_atomically(Path(path), text.encode("utf-8"))


def differing_keys(old: JobConfig, new: JobConfig) -> list[str]:
    """ "section.key: old -> new" for every setting that differs and matters to a resumed run."""
    free = FREE_ON_RESUME
    if old.schedule.name == "constant":  # the steps done so far are the same in a longer or shorter run
        free = free | {"train.steps"}
    if "int8-compute" not in (old.model.quantize, new.model.quantize):  # nothing else is rotated
        free = free | {"model.rotation"}
    before, after = _flatten(job_to_dict(old)), _flatten(job_to_dict(new))
    keys = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k)]
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if k not in free]


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _without_none(values: Any) -> Any:
    if isinstance(values, dict):
        return {k: _without_none(v) for k, v in values.items() if v is not None}
    return values


_PATH_KEYS = (
    ("model", "path"),
    ("model", "second_expert"),
    ("model", "quantized_cache"),
    ("data", "encoded"),
    ("cache", "folder"),
    ("cache", "text_encoders"),
    ("cache", "vae"),
    ("evaluation", "folder"),
    ("output", "folder"),
)


def _anchor_paths(values: dict[str, Any], base: Path) -> dict[str, Any]:
    def anchor(section: Any, key: str) -> None:
        if isinstance(section, dict) and isinstance(section.get(key), str) and section[key]:
            section[key] = _anchored(section[key], base)

    for section, key in _PATH_KEYS:
        anchor(values.get(section), key)
    folders = values.get("data", {}).get("folders", []) if isinstance(values.get("data"), dict) else []
    for folder in folders if isinstance(folders, list) else []:
        anchor(folder, "path")
    return values


def _anchored(text: str, base: Path) -> str:
    if "\0" in text:  # which the field's own check refuses, by name
        return text
    return str((base / Path(text).expanduser()).resolve())
