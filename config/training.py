"""Sections of a job: the LoRA, how it is trained, and what is written."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from .ranges import LORA_ENDING, MOST_STEPS, STRICT, PathText, Range, RequiredPath, Seed, StepCount, check_file_name
from .setting import setting

MOST_MICRO_BATCHES = 1024  # of a step
_TEXT_ENCODERS = ("text_encoder", "text_model", "lora_te", "clip_l", "clip_g", "te1", "te2", "t5xxl")


@dataclass(frozen=True, config=STRICT)
class LoraSettings:
    """The adapter.

    Args:
        rank: Size of the LoRA. Higher learns more detail, takes more memory and gives a larger file.
        alpha: Strength is alpha / rank. Leave it equal to rank unless a recipe says otherwise.
        dropout: Probability that a LoRA input is left out. Against learning few images by heart.
        dora: Train DoRA, which learns size and direction of weights apart. Slower, and takes memory. With lokr: DoKr.
        targets: Layers that get a LoRA: patterns over diffusers names, with *; !pattern leaves out. Left out: as
            layers.
        dtype: Number type of the LoRA while training. bfloat16 takes half the memory and loses small steps.
        kind: lora, or lokr (LyCORIS), which multiplies two small matrices into a large one (Kronecker product): a
            smaller file for the same size of change. loha (LyCORIS) multiplies two LoRAs value by value: a change of up
            to rank squared, slower and with more memory. oft rotates a layer's outputs in blocks of rank rows, and
            keeps angles and lengths within them; alpha is not used. All are read by ComfyUI's stock LoRA loaders, of
            which OFT counts another strength than 1 squared (0.33.0).
        layers: Layers by a preset: attention takes those of the attention, all every one in blocks. Left out: the
            family's.
        factor: With lokr: size of the smaller of the two matrices, as far as a layer can be cut so. Left out: about the
            root of a layer's width. Smaller makes a larger file that learns more.
        start_from: LoRA file to train on, of any trainer; its layers and rank must fit. Left out: a fresh LoRA.
        text_encoder: Train a LoRA on the CLIP text encoders, too, into the same file: SD 1.5, SD 2 and SDXL as ComfyUI
            builds them. They stay in memory then, on the first device.
        text_encoder_rank: Size of the LoRA on the text encoders, whose strength stays that of the rest. Left out: rank.
    """

    rank: Annotated[int, Range(1, 1024)] = 16
    alpha: Annotated[float, Range(1e-3, 1e5)] = 16.0
    dropout: Annotated[float, Range(0.0, 0.99)] = 0.0
    dora: bool = False
    targets: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    kind: Literal["lora", "lokr", "loha", "oft"] = "lora"
    layers: Literal["", "attention", "all"] = ""
    factor: Annotated[int, Range(2, 4096, or_zero=True)] = 0
    start_from: PathText = ""
    text_encoder: bool = False
    text_encoder_rank: Annotated[int, Range(1, 1024, or_zero=True)] = 0

    @property
    def strength(self) -> float:
        """What the product of both matrices is multiplied by, in every layer."""
        return self.alpha / self.rank

    @property
    def text_rank(self) -> int:
        """Of the layers of text encoders."""
        return self.text_encoder_rank or self.rank

    def __post_init__(self) -> None:
        if self.text_encoder_rank and not self.text_encoder:
            raise ValueError("text_encoder_rank is of a LoRA on text encoders; set text_encoder = true, or remove it")
        if self.text_encoder and (self.kind != "lora" or self.dora):
            other = "dora" if self.dora else f'kind = "{self.kind}"'
            raise ValueError(f"text_encoder trains a plain LoRA, and {other} asks for another; remove one of the two")
        if self.layers and any(not pattern.startswith("!") for pattern in self.targets):
            raise ValueError(f'layers = "{self.layers}" and targets both say what is trained; remove one of the two')
        if found := [pattern for pattern in self.targets if pattern.lstrip("!").startswith(_TEXT_ENCODERS)]:
            helps = "remove the pattern, and set text_encoder = true to train all layers of the text encoders"
            raise ValueError(f"targets are of the diffusion model alone, and {found[0]} is of a text encoder; {helps}")
        if self.kind != "lora" and self.dropout:
            raise ValueError(f'dropout is of kind = "lora" alone, and kind is "{self.kind}"; remove one of the two')
        if self.kind == "oft" and self.dora:
            raise ValueError('dora is of kinds lora, lokr and loha, and kind is "oft"; remove one of the two')
        if self.factor and self.kind != "lokr":
            raise ValueError('factor belongs to kind = "lokr"; remove one of the two')


@dataclass(frozen=True, config=STRICT)
class ObjectiveConfig:
    """What the model is trained to say, and how much each noise level counts.

    Args:
        timestep_sampling: How noise levels are drawn. Left out: what the model was trained with.
        shift: Moves noise levels towards noise: a number as 3.0, or a preset of the family. Left out: the family's.
        logit_mean: With logit_normal: mean of the normal distribution. Above 0 draws more noise.
        logit_std: With logit_normal: standard deviation of the normal distribution.
        sigmoid_scale: With sigmoid: factor of the normal number before the logistic function.
        guidance: Guidance value while training, for models that take one as an input (FLUX.1-dev, FLUX.2-dev). Left
            out: the model's usual value. Leave it there for all other models.
        expert: Which of Wan 2.2's two experts a file is that ComfyUI loads: high_noise or low_noise. It is trained at
            the noise levels that it draws. Left out: every level, as for all other models.
        loss_weighting: How much each noise level counts in the loss of SD 1.5, SDXL and other models that predict noise
            (eps) or v. min_snr counts levels with little noise less (Min-SNR, Hang et al. 2023). debiased counts those
            with much noise more (debiased estimation, Yu et al. 2023). Left out: all alike.
        min_snr_gamma: With min_snr: ratio of signal to noise from which on a level counts less. 5 is usual.
        lowest_noise: Least noise that is trained on, 0 to 1: of flow models the share of noise (sigma), of SD and
            others the timestep / 1000. Above 0 leaves fine detail as it is.
        highest_noise: Most noise that is trained on, counted likewise. Below 1 leaves composition as it is. An expert
            keeps to its own part of the range, and evaluation.quantiles count within it.
        masked_prior: How much the black of a loss mask is held to what the model says without the LoRA (masked prior
            preservation): so many times the loss there is added, for one more forward in each step. 0 leaves it free.
    """

    timestep_sampling: Literal["", "uniform", "logit_normal", "sigmoid"] = ""
    shift: str | Annotated[float, Range(0.01, 100.0)] = ""
    logit_mean: Annotated[float, Range(-10.0, 10.0)] = 0.0
    logit_std: Annotated[float, Range(0.01, 10.0)] = 1.0
    sigmoid_scale: Annotated[float, Range(0.01, 10.0)] = 1.0
    guidance: Annotated[float, Range(0.0, 1000.0)] | None = None
    expert: Literal["", "high_noise", "low_noise"] = ""
    loss_weighting: Literal["", "min_snr", "debiased"] = ""
    min_snr_gamma: Annotated[float, Range(0.01, 1000.0)] = 5.0
    lowest_noise: Annotated[float, Range(0.0, 1.0)] = 0.0
    highest_noise: Annotated[float, Range(0.0, 1.0)] = 1.0
    masked_prior: Annotated[float, Range(0.0, 100.0)] = 0.0

    def __post_init__(self) -> None:
        if self.lowest_noise >= self.highest_noise:
            found = f"lowest_noise = {self.lowest_noise:g} is not below highest_noise = {self.highest_noise:g}"
            raise ValueError(f"{found}, so no noise level lies between them; change one of the two")


# Options that torch's optimizers take and that train nothing here -> why.
_NOT_FOR_LOOP = {
    "maximize": "would raise the loss, not lower it",
    "differentiable": "is for gradients of the optimizer itself, which nobody takes here",
    "capturable": "is for steps recorded as CUDA graphs, and the optimizer's is not",
}


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """How weights are changed.

    Args:
        name: adamw, or adamw8bit, which keeps its state in 8 bits. The state of a LoRA is small, so this seldom
            matters. prodigy finds the learning rate by itself (needs the package prodigyopt), adafactor and came (needs
            pytorch-optimizer) keep a small state. A job file may also say auto (adamw where it fits, else adamw8bit) or
            the dotted name of an optimizer class, such as bitsandbytes.optim.AdamW8bit.
        learning_rate: Size of a step. 0.0001 is a good start for AdamW; lower it when the loss jumps. For prodigy
            usually 1.
        text_encoder_learning_rate: The same for the LoRA on text encoders, with lora.text_encoder. Half of
            learning_rate or less is usual. Left out: learning_rate.
        weight_decay: How strongly weights are pulled towards zero at each step.
        options: Further keyword arguments of the optimizer class.
        allow_import: Whether the class may be of a package that the pack does not list. Importing a package runs its
            code: allow it only in a job file that you wrote or read. Such a job starts on the command line only.
        kahan: Of earlier versions: now the same as lora.dtype float32, which takes as much memory and rounds nothing.
    """

    name: str = "adamw"
    learning_rate: Annotated[float, Range(1e-10, 1.0)] = 1e-4
    weight_decay: Annotated[float, Range(0.0, 10.0)] = 0.01
    options: dict[str, Any] = field(default_factory=dict)
    allow_import: bool = setting(False, is_free=True)
    kahan: bool = setting(False, is_free=True)
    text_encoder_learning_rate: Annotated[float, Range(1e-10, 1.0, or_zero=True)] = 0.0

    @property
    def text_rate(self) -> float:
        """Learning rate of the LoRA on text encoders."""
        return self.text_encoder_learning_rate or self.learning_rate

    def __post_init__(self) -> None:
        if self.text_encoder_learning_rate and self.name.lower().endswith("prodigy"):
            raise ValueError("prodigy finds one learning rate for all; remove text_encoder_learning_rate")
        for name, value in self.options.items():
            if name in _NOT_FOR_LOOP and value:
                raise ValueError(f"options.{name} = {value!r} {_NOT_FOR_LOOP[name]}; leave it out")
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
                raise ValueError(f"options.{name} = {value!r} is not finite; give a number that is, or leave it out")


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """The learning rate over the steps.

    Args:
        name: Learning rate over the steps: unchanged, or falling along a line or a half cosine.
        warmup_steps: Steps over which the learning rate rises from zero. 0 starts at full rate.
        min_factor: Share of the learning rate that linear and cosine end at.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: StepCount = 0
    min_factor: Annotated[float, Range(0.0, 1.0)] = 0.0


@dataclass(frozen=True, config=STRICT)
class LoopConfig:
    """The loop.

    Args:
        steps: Optimizer steps in all. 500 to 3000 is usual for a LoRA.
        batch_size: Images per forward pass. More takes more memory on every device.
        gradient_accumulation_steps: Forward passes per optimizer step: acts like a larger batch without its memory.
            Over several GPUs 4 to 16 keep all of them busy at once; with 1 one computes while the others wait.
        clip_norm: Largest length of the gradient; longer ones are shortened to it. 0 never shortens.
        seed: Start of all random numbers: LoRA weights, order, noise. The same seed gives the same LoRA.
        gradient_checkpointing: Computes each block twice and keeps no activations: far less memory, a third more time.
        compile: auto compiles each kind of transformer block, once for all sizes. The first steps take a minute or two
            longer, all others are faster: for long runs on fast cards. Compiled blocks are compared with plain ones
            first. Where one is wrong, or no compiler is found, the log says so and training goes on without.
        cuda_graphs: Has no effect; jobs and workflows that were saved with it still run.
        offload_activations: Whether what gradient checkpointing keeps of every block waits in the computer's memory,
            not on the GPUs. auto does it where nothing as good fits without. Matters for video. The LoRA is the same.
        ema_decay: Share that an average of the LoRA over the steps (EMA) keeps at each step, such as 0.99 for some
            hundred steps and 0.999 for thousands. 0 keeps none. It takes 4 bytes per trained value.
    """

    steps: Annotated[int, Range(1, MOST_STEPS)]
    batch_size: Annotated[int, Range(1, 1024)] = 1
    gradient_accumulation_steps: Annotated[int, Range(1, MOST_MICRO_BATCHES)] = setting(1, was=("train.accumulation",))
    clip_norm: Annotated[float, Range(1e-4, 1e6, or_zero=True)] = 1.0
    seed: Seed = 0
    gradient_checkpointing: bool = True
    compile: Literal["off", "auto"] = "off"
    cuda_graphs: Literal["off", "auto"] = setting("off", is_free=True)
    offload_activations: Literal["auto", "on", "off"] = setting("auto", is_free=True)
    ema_decay: Annotated[float, Range(0.5, 0.999999, or_zero=True)] = 0.0

    def __post_init__(self) -> None:
        if self.offload_activations == "on" and not self.gradient_checkpointing:
            found = 'offload_activations = "on" moves what recomputed blocks keep'
            raise ValueError(f"{found}, and by gradient_checkpointing = false none is; change one of the two")


@dataclass(frozen=True, config=STRICT)
class OutputConfig:
    """Where results go, and how often everything is saved.

    Args:
        folder: Run folder: checkpoints, events, TensorBoard scalars, the LoRA.
        name: File name of the LoRA, without extension.
        save_every_steps: Steps between checkpoints with a LoRA, which a crash can cost; 0 saves at the end or a stop.
        keep_last: Checkpoints kept; older ones are deleted.
        lora_layout: Names in the LoRA file: original loads in ComfyUI, diffusers in diffusers and peft, both in ComfyUI
            and in diffusers' pipelines. both is refused for DoRA of Wan.
        lora_dtype: Number type in the LoRA file. float32 doubles its size.
        tensorboard: Also write losses for TensorBoard into the run folder. Needs the tensorboard package.
        use_ema: Whether the LoRA file holds the average where train.ema_decay keeps one; the checkpoints hold both.
    """

    folder: RequiredPath
    name: str = setting("lora", is_free=True)
    save_every_steps: StepCount = setting(250, is_free=True)
    keep_last: Annotated[int, Range(1, 10_000)] = setting(2, is_free=True)
    lora_layout: Literal["original", "diffusers", "both"] = setting("original", is_free=True)
    lora_dtype: Literal["bfloat16", "float16", "float32"] = setting("bfloat16", is_free=True)
    tensorboard: bool = setting(True, is_free=True)
    use_ema: bool = setting(True, is_free=True)

    def __post_init__(self) -> None:
        check_file_name(self.name)

    @property
    def file_name(self) -> str:
        """Of the LoRA, whether or not its name was given with the extension."""
        return f"{self.name.removesuffix(LORA_ENDING)}{LORA_ENDING}"


# ---- section of a job: pictures drawn while it trains


_Prompt = Annotated[str, Field(min_length=1, max_length=10_000)]
_Side = Annotated[int, Range(16, 8192, or_zero=True)]


@dataclass(frozen=True, config=STRICT)
class SamplesConfig:
    """Pictures while training: prompts drawn with the LoRA as it is. They change nothing of the LoRA.

    Args:
        prompts: Texts to draw, one picture or clip each. They are encoded with the captions. Left out: no pictures.
        every_steps: Draw every so many steps, and after the last one; 0 only before the first and after the last.
        before_first: Also draw before the first step, what the model makes without the LoRA.
        seed: Start of each picture's noise, the same for every prompt and every time.
        steps: Steps per picture; a distilled model takes few, such as 4 or 8. Left out: what is usual for the model.
        guidance: Guidance of the pictures. Left out: the model's usual value. FLUX.1-dev and FLUX.2-dev take it as an
            input. Others compute each step twice where it is above 1. Set 1 for a distilled model.
        width: Width in pixels. Left out: the largest resolution of the dataset, as a square. More may take more memory.
        height: Height in pixels. Left out: as width.
        frames: Length of a clip in frames; 1 is a picture. Left out: that of the longest training sample.
        vae: VAE folder or file that makes pictures of latents; with family comfyui a name in models/vae, too. Left out:
            the one that encodes the images. Needed where ComfyUI's VAE encodes them for another family's model.
        use_ema: Whether the average of the LoRA draws them where train.ema_decay keeps one.
    """

    prompts: Annotated[tuple[_Prompt, ...], Field(max_length=100)] = setting((), is_free=True)
    every_steps: StepCount = setting(250, is_free=True)
    before_first: bool = setting(True, is_free=True)
    seed: Seed = setting(0, is_free=True)
    steps: Annotated[int, Range(1, 1000, or_zero=True)] = setting(0, is_free=True)
    guidance: Annotated[float, Range(0.0, 100.0)] | None = setting(None, is_free=True)
    width: _Side = setting(0, is_free=True)
    height: _Side = setting(0, is_free=True)
    frames: Annotated[int, Range(1, 10_000, or_zero=True)] = setting(0, is_free=True)
    vae: PathText = setting("", is_free=True)
    use_ema: bool = setting(True, is_free=True)

    def __post_init__(self) -> None:
        blank = [number for number, prompt in enumerate(self.prompts, start=1) if not prompt.strip()]
        if blank:
            raise ValueError(f"prompt {blank[0]} is blank; write what to draw, or take it out of the list")
        if self.height and not self.width:
            raise ValueError(f"a height of {self.height} belongs to a width; give both, or neither")
