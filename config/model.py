"""Sections of a job: the model, which device holds what of it, and how devices share a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic.dataclasses import dataclass

from .ranges import STRICT, PathText, Range, RequiredPath
from .setting import requested, setting

if TYPE_CHECKING:
    from ..quantization.quantize import QuantizeSettings

ModelScheme = Literal["none", "fp8", "int8", "fp8-compute", "int8-compute", "stored", "auto"]
_BlockCount = Annotated[int, Range(0, 10_000)]
COMFYUI = "comfyui"  # as model.family: one of ComfyUI's own classes, whichever ComfyUI finds in the file


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """What to train.

    Args:
        path: The model: a diffusers folder, a .safetensors or .gguf file, or one shard of several. With family comfyui
            one such file, or its name in ComfyUI's models/diffusion_models or models/checkpoints.
        family: Model family, such as flux2. Left out: what the file is recognised as. comfyui trains any model that
            ComfyUI itself can build, with ComfyUI's own code; it needs a ComfyUI on this machine.
        variant: Published model. Left out: what the file is recognised as. Name it where two have the same shapes.
        second_expert: The other one of a pair of experts (Wan 2.2 A14B), trained at the same time on cards of its own.
            One folder may hold both. Without it the model at path is trained alone.
        dtype: Number type of the frozen weights and of the computation. On cards without bfloat16 (V100, RTX 20) it
            stands for float16 with a scaled loss. float32 takes twice the memory, for models that float16 is not for.
        quantize: How the frozen linear layers are held; the LoRA keeps its precision. fp8 and int8 store in 8 bits,
            half the memory of 16. fp8-compute (RTX 40 or newer) and int8-compute (RTX 20 or newer) also multiply in 8
            bits: faster and a little noisier. stored keeps a quantized file (GGUF, fp8, int8) as it is. auto takes what
            suits the devices and the file; none holds 16 bits.
        rotation: For int8-compute: spreads outliers over blocks of so many values. Wider is better, slower; 0 is off.
        quantized_cache: Folder of the quantized weights, which the next run reads. They take 31 GB for FLUX.2-dev.
    """

    path: RequiredPath
    family: str = ""
    variant: str = ""
    second_expert: PathText = ""
    # float16 is not asked of the user: jobs/resolve.py takes it where a card has no bfloat16
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantize: ModelScheme = "none"
    rotation: Literal[64, 0, 16, 256] = 64
    quantized_cache: PathText = setting("", is_free=True)

    @property
    def quantize_settings(self) -> QuantizeSettings | None:
        """For the code that quantizes; None where nothing is. "auto" must have ended before (jobs/resolve.py)."""
        from ..quantization.quantize import QuantizeSettings  # brings torch, which reading a config does without

        return None if self.quantize == "none" else QuantizeSettings(self.quantize, self.rotation)  # type: ignore[arg-type]


@dataclass(frozen=True, config=STRICT)
class SplitConfig:
    """Which devices hold the blocks.

    Args:
        devices: Devices that hold the blocks, in order, such as cuda:0, cuda:1. The first also holds the embeddings,
            the last layers and the loss. Left out: every GPU, or the CPU. A device that is named must exist.
        balance: How blocks are shared out: by equal memory, by equal computing time, or where split_at says (manual).
        split_at: First block of each device after the first, such as 12, 30 for three. Only with balance manual.
        memory_limit_gb: Decimal GB that weights may take on each device, such as 20, 14. Left out: what is free.
        blocks_without_checkpointing: Last blocks of each device that keep their activations instead of being computed
            again, with gradient_checkpointing. Left out: what the planner chooses; none where memory is unknown.
        offloaded_blocks: Blocks per device whose weights wait in host memory and stream to the device whenever they
            compute. Left out: what the planner chooses, which is none unless the job would not fit. Only with
            gradient_checkpointing. They are spread over the blocks that are computed again.
        calibrate: Without effect, kept for older job files: blocks are not timed any more.
    """

    devices: tuple[str, ...] = ()
    balance: Literal["memory", "time", "manual"] = setting("memory", old_words={"bytes": "memory"})
    split_at: tuple[_BlockCount, ...] = ()
    memory_limit_gb: tuple[Annotated[float, Range(0, 100_000)], ...] = setting((), is_free=True)
    blocks_without_checkpointing: tuple[_BlockCount, ...] = setting((), is_free=True, was=("split.kept_blocks",))
    offloaded_blocks: tuple[_BlockCount, ...] = setting((), is_free=True, was=("split.swapped_blocks",))
    calibrate: Literal["auto", "on", "off"] = setting("auto", is_free=True)

    def __post_init__(self) -> None:
        first = "the first block of each device after the first"
        if self.split_at and self.balance != "manual":
            raise ValueError(f'split_at = {list(self.split_at)} belongs to balance = "manual", not "{self.balance}"')
        if self.balance == "manual" and not self.split_at:
            raise ValueError(f'balance = "manual" needs split_at, {first}, such as [20] for two')
        count = len(self.devices)
        if self.devices and self.split_at and len(self.split_at) != count - 1:
            raise ValueError(f"split_at has {len(self.split_at)} cuts for {count} devices; give {count - 1}, {first}")
        if self.memory_limit_gb and self.devices and (found := len(self.memory_limit_gb)) != count:
            raise ValueError(f"memory_limit_gb has {found} values for {count} devices; give one each")


PER_DEVICE = ("memory_limit_gb", "blocks_without_checkpointing", "offloaded_blocks")  # of split, beside its devices


# With a new name the type checker reports each `match` that does not know it.
Strategy = Literal["none", "pipeline", "data", "tokens", "fsdp"]


# Where each says what it is, or no job with it is read: all questions below go by it.
_KINDS: dict[Strategy, str] = {
    "none": "whole",
    "pipeline": "stages",
    "data": "copies",
    "tokens": "rows",
    "fsdp": "shards",
}


def holds_copies(strategy: Strategy) -> bool:
    """Whether every device has a copy of the whole model."""
    return _KINDS[strategy] in ("copies", "rows")


def shares_rows(strategy: Strategy) -> bool:
    """Whether all devices compute each microbatch together, every one its share of the rows (tokens)."""
    return _KINDS[strategy] == "rows"


def has_stages(strategy: Strategy) -> bool:
    """Whether several microbatches are in one model at once, each in the stage of another device."""
    return _KINDS[strategy] == "stages"


def shards_weights(strategy: Strategy | None) -> bool:
    """Whether every process keeps a share of the weights, and has a block whole only while it computes it; not where
    the strategy is left open."""
    return strategy is not None and _KINDS[strategy] == "shards"


@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How several devices share the microbatches of a step.

    Args:
        strategy: How devices share the microbatches of a step. none: one microbatch at a time, one device computing.
            pipeline: microbatches follow each other through the devices, with the same numbers. data: each device holds
            the whole model and trains its share of them. tokens: each device holds the whole model, and all compute
            each microbatch, each a share of its tokens; for ComfyUI's classes. It halves what two cards keep of a long
            clip. auto takes the fastest of none, pipeline, data and tokens. Needs two or more GPUs of one kind, and all
            but tokens gradient_accumulation_steps above 1. A run with data or tokens is resumed as it began, unless it
            is continued. fsdp: several processes with one device each keep a share of the weights; auto takes it where
            one device does not hold the model.
        microbatches_ahead: Microbatches that a device of a pipeline may hold beyond what 1F1B needs; more takes memory.
        processes: Processes of this machine that train the job, as --nproc says. No effect where torchrun starts them.
        shard_degree: Without effect, kept for older job files: fsdp shares weights among all processes.
        timeout_s: Seconds that a microbatch, a save and the like may take one of several processes until it is ended.
        hang_timeout_s: Without effect, kept for older job files: timeout_s says it.
    """

    strategy: Literal["auto", Strategy] = setting(
        "auto",
        is_free=True,
        was=("pipeline.schedule",),
        old_words={"1f1b": "pipeline", "gpipe": "pipeline", "replicas": "data"},
        gone={"tensor": "training by tensor parallel", "hsdp": "sharing by machine"},
    )
    microbatches_ahead: Annotated[int, Range(0, 1000)] = setting(1, is_free=True, was=("pipeline.ahead",))
    processes: Annotated[int, Range(1, 1000)] = setting(1, is_free=True)
    shard_degree: Annotated[int, Range(0, 100_000)] = setting(0, is_free=True)
    timeout_s: Annotated[float, Range(1, 1_000_000)] = setting(900.0, is_free=True)
    hang_timeout_s: Annotated[float, Range(1, 1_000_000)] = setting(20.0, is_free=True)

    @property
    def requested(self) -> Strategy | None:
        """The strategy that is asked for by name; None where it is left open."""
        return requested(self.strategy)  # type: ignore[arg-type]  # "auto" is what it takes away
