"""The types a model family is described with: data, and functions of the family's file. Torch is not imported here. B
batch, C latent channels, F latent frames (1 for images), H/W latent sides after packing, S tokens, D width of states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .tensor_plan import BlockList, TensorPlan
from .token_plan import TokenPlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from .comfy.native import NativeModel


TEXT_ENCODERS = "text_encoders"  # child of a model that is trained together with them


@dataclass(frozen=True)
class LatentSpec:
    """Geometry of the latents the transformer is trained on, after the family's own packing and normalisation."""

    channels: int  # C of a normalised latent as it is cached, [C, F, H, W]
    spatial_stride: int  # pixels per latent cell along height and width, packing included
    frame_stride: int = 1  # video frames by which clips grow; 1 for image families
    # Of the shortest clip its video frames and latent frames, and latent frames by which clips grow. One frame is one
    # latent frame always.
    clip_steps: tuple[int, int, int] = (1, 1, 1)
    size_multiple: int = 16  # height and width in pixels must be multiples of this
    normalisation_version: int = 1  # part of the cache key; raise it when encode_latents changes its result
    num_tokens_per_cell: float = 1.0  # transformer tokens per latent cell (1/4 where the model packs 2x2 cells itself)
    fps: float = 0.0  # frames per second of the videos the model was trained on; 0 for image families
    frame_lengths: tuple[int, ...] = (1,)  # of clips if the user names none, in video frames
    # Of audio, which has no picture's sides: the height of its latents, whose width is time; 0 for pictures and videos.
    audio_rows: int = 0
    sound_rate: float = 0.0  # columns of latents per second of sound, beside a video or alone; 0 for models without

    @property
    def is_video(self) -> bool:
        """Whether the model makes videos; such a model makes images as well."""
        return self.fps > 0

    @property
    def clip_rule(self) -> str:
        """Which lengths clips have: "4n + 1"."""
        return f"{self.frame_stride}n + {self.clip_steps[0]}"

    def is_length(self, frames: int) -> bool:
        """Whether the model takes clips of so many video frames."""
        first = self.clip_steps[0]
        return frames == 1 or frames >= first and not (frames - first) % self.frame_stride

    def nearest_length(self, frames: int) -> int:
        """The longest clip that the model takes and that is no longer than so many video frames."""
        first = self.clip_steps[0]
        return frames - (frames - first) % self.frame_stride if frames >= first else 1

    def num_latent_frames(self, frames: int) -> int:
        """Latent frames of so many video frames."""
        first, latents, growth = self.clip_steps
        return 1 if frames == 1 else latents + (frames - first) // self.frame_stride * growth

    def num_frames(self, latent_frames: int) -> int:
        """Video frames that so many latent frames stand for."""
        first, latents, growth = self.clip_steps
        return 1 if latent_frames == 1 else first + (latent_frames - latents) // growth * self.frame_stride

    def num_tokens(self, height: int, width: int, frames: int = 1) -> int:
        """Image tokens of one sample; height and width in pixels, frames in video frames."""
        cells = self.num_latent_frames(frames) * (height // self.spatial_stride) * (width // self.spatial_stride)
        return int(cells * self.num_tokens_per_cell)


@dataclass(frozen=True)
class TextEncoderSpec:
    """One text encoder of a family and what is kept of its output; encoding/text_encoder.py has a function per kind."""

    # "chat_hidden_states": a language model's, of a conversation, several layers' side by side, [S, layers * D].
    # "last_hidden_state": plain tokens, [S, D]. "pooled": CLIP's pooled output, [D].
    kind: Literal["chat_hidden_states", "last_hidden_state", "pooled"]
    folder: str  # of a diffusers model folder, as is tokenizer_folder
    tokenizer_folder: str
    output: str  # name of the cached tensor, and of the argument the family's make_inputs reads
    max_length: int  # the most tokens that are read, those of the template included
    layers: tuple[int, ...] = ()  # of "chat_hidden_states": indices into hidden_states; k is what layer k - 1 gives
    system_prompt: str | None = None  # first message of the chat template
    template_options: Mapping[str, Any] = field(default_factory=dict)  # of apply_chat_template
    zero_padding: bool = False  # whether states of padding tokens are set to zero after encoding
    keep_full_precision: tuple[str, ...] = ()  # patterns of linears that are never quantized; "*" for all of it


@dataclass(frozen=True)
class ShiftRule:
    """How sampled timesteps t in [0, 1] (1 = noise) are moved towards noise: t' = s t / (1 + (s - 1) t)."""

    kind: Literal["constant", "resolution"]
    value: float = 1.0  # of "constant": s, 1 for none
    # Of "resolution", whose s is exp(mu): two points (tokens, mu), through which mu is linear in image tokens.
    mu_at: tuple[tuple[float, float], tuple[float, float]] = ((256.0, 0.5), (4096.0, 1.15))

    def factor(self, num_tokens: int) -> float:
        """The factor s for a sample with this many image tokens."""
        if self.kind == "constant":
            return self.value
        (x0, y0), (x1, y1) = self.mu_at
        return math.exp(y0 + (num_tokens - x0) * (y1 - y0) / (x1 - x0))


TimestepSampling = Literal["uniform", "logit_normal", "sigmoid"]


@dataclass(frozen=True)
class TimestepSpec:
    """Default timestep sampling of a family and its named shift presets."""

    sampling: TimestepSampling
    shift: str
    shift_presets: Mapping[str, ShiftRule]


@dataclass(frozen=True)
class SamplingSpec:
    """How a model draws a picture: Euler steps along shifted noise levels, as diffusers' pipeline of it does."""

    steps: int  # a usual number
    # A usual value, of the model's guidance input where it has one, else of classifier-free guidance; 1 is none.
    guidance: float
    shift: Callable[[int, int], float]  # s of ShiftRule, by image tokens and steps; a host's levels have the shift


@dataclass(frozen=True)
class Rename:
    """One row of the table between original and diffusers names: of a module, with every parameter below it, or of a
    tensor. "{}" stands for a number."""

    original: str  # name in the original (and ComfyUI's) checkpoint
    diffusers: tuple[str, ...]  # one name, or several whose tensors the original stacks along dim 0 in this order
    swap_halves: bool = False  # dim 0 is [a | b] in one layout and [b | a] in the other
    aliases: tuple[str, ...] = ()  # further original spellings accepted when reading, never written
    proportions: tuple[int, ...] = ()  # relative heights of the stacked tensors; () where all are equal


Condition = Literal["none", "first_frame", "first_latents"]


@dataclass(frozen=True)
class Variant:
    """One published size of a family."""

    name: str  # as the user writes it, e.g. "flux2-dev"
    transformer_config: Mapping[str, Any]  # keyword arguments of the diffusers class, as is vae_config
    text_encoders: tuple[TextEncoderSpec, ...]
    vae_config: Mapping[str, Any] = field(default_factory=dict)  # for single-file VAEs
    training_guidance: float | None = None  # embedded guidance while training; None for a model without that input
    sigma_range: tuple[float, float] = (0.0, 1.0)  # timesteps it is trained on; all unless it is one expert of a pair
    boundary: float = 0.0  # timestep between the experts of such a pair, if its file does not say which one it is
    is_expert: bool = False  # whether its file is surely one of these
    timesteps: TimestepSpec | None = None  # in place of the family's, as are latent and sampling
    latent: LatentSpec | None = None
    sampling: SamplingSpec | None = None
    transformer_folder: str = "transformer"  # in a diffusers model folder; the second expert of a pair lies elsewhere
    partner: str = ""  # the variant that is the other expert of the pair; "" for a model that is whole
    caution: str = ""  # what to know before training it; logged when the variant is chosen
    # What it is given besides text. "first_frame": a video whose first frame is the sample's, encoded by the family's
    # encode_condition and cached with the latents. "first_latents": the first latent frame in place of its noisy one;
    # the loss leaves it out.
    condition: Condition = "none"

    @property
    def encodes_condition(self) -> bool:
        """Whether the cache holds more than latents for it, and its transformer takes more channels than it makes."""
        return self.condition == "first_frame"


UNKNOWN_TEXT = 512  # tokens of a caption that nobody has encoded yet


def longest_text(variant: Variant) -> int:
    """Text tokens to plan for; of one of ComfyUI's own models nobody knows how many there will be."""
    return max((encoder.max_length for encoder in variant.text_encoders), default=UNKNOWN_TEXT)


@dataclass(frozen=True)
class ComfyInputs:
    """What ComfyUI's own model of a family makes of a CONDITIONING and a LATENT before it computes with them, and
    comfy/inputs.py as well. Source: extra_conds (model_base.py) and process_in (latent_formats.py) of ComfyUI 0.33.0.
    """

    states: str  # the text input, as make_inputs names it, that the CONDITIONING's tensor becomes
    width: str  # key of the transformer's config that says how wide this is
    normalise: Callable[[Tensor], Tensor]  # what VAE.encode returns, [C, F, H, W], to normalised latents
    pooled: str = ""  # as states and width, for its pooled_output; "" where the model reads none
    pooled_width: str = ""
    min_tokens: int = 0  # shorter texts get rows of zeros in front, up to this number of tokens
    # Of a LATENT without batch and channels: 1 for audio's [T], 2 for [H, W], 3 for [F, H, W].
    latent_dims: Literal[1, 2, 3] = 2
    sound: tuple[int, ...] = ()  # sides of the sound that goes with a video, 0 for its length; () without
    # Latent frames of a video -> sides of the sound that the model must be given beside it; None if it needs none.
    # Training then noises zeros, and counts no loss of them.
    silence: Callable[[int], tuple[int, ...]] | None = None
    # Whether the model reads all that a CONDITIONING says, rather than states and pooled_output; then width is "".
    reads_all: bool = False
    needs: tuple[str, ...] = ()  # options without which such a model would be given nothing in their place
    refused: Mapping[str, str] = field(default_factory=dict)  # options that would mislead it -> why, and what helps
    beside: int = 0  # channels that it is given beside the noise
    cells_per_token: int = 1  # latent cells that make_inputs packs into one token of the transformer's in_channels


class EulerSteps(Protocol):
    """The steps of one picture from noise to latents, both [1, C, F, H, W]; float32 on the CPU."""

    levels: Tensor  # the noise level of each step, as the model gets it. [steps]

    def start(self, noise: Tensor) -> Tensor:
        """What the first step begins with."""
        return noise

    def step(self, index: int, latents: Tensor, said: Tensor, plain: Tensor | None, scale: float) -> Tensor:
        """The latents after a step. said: by the model. plain: without the prompt, None without guidance by scale."""

    def end(self, latents: Tensor) -> Tensor:
        """Normalised latents, of those that the last step leaves."""
        return latents


class HostModel(Protocol):
    """One of ComfyUI's own models as training asks for it; nodes/host/native/ makes it. Its modules are to the trainer
    what diffusers' are, with enable_gradient_checkpointing(function(block, *args)). Only predict calls them."""

    def make(self, *, is_empty: bool) -> nn.Module:
        """The model with its parameters on meta; buffers too if it is empty."""

    def add_noise(
        self, latents: Tensor, noise: Tensor, times: Tensor, given: Mapping[str, Tensor] = {}
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Noisy latents, what the network should say of them, and their sigmas, float32. latents, noise: float32,
        [B, C, F, H, W]. times: 0..1, 1 is noise, [B]. given: of families/comfy/inputs.py; what a noise mask leaves is
        put in as sampling does, and streams say how packed latents are taken apart."""

    def computing_in(self, dtype: torch.dtype) -> HostModel:
        """The same, to be computed in another type. Raises: ValueError where the host takes its range for too small."""

    def time_of(self, level: float) -> float:
        """The time that add_noise takes for a noise level as objective.lowest_noise counts it, both in 0..1."""

    def predict(
        self, model: nn.Module, noisy: Tensor, sigmas: Tensor, given: Mapping[str, Tensor], guidance: float | None
    ) -> Tensor:
        """What the network says of noisy latents, as sampling calls it. [B, C, F, H, W] given: a CONDITIONING as
        families/comfy/inputs.py reads it from the cache, with a batch, and the noise mask that add_noise was given."""

    @property
    def text_class(self) -> str:
        """ComfyUI's class of its text encoders; "" where no LoRA can be trained on them."""

    def attach_text_encoders(
        self, model: nn.Module, files: Sequence[str], kind: str, path: str, fingerprint: str, device: torch.device
    ) -> None:
        """Load them as the model's child TEXT_ENCODERS; predict then takes tokens in the place of a CONDITIONING.
        files, kind: as cache.stock_clip and stock_clip_type name them. path: of the model's own file. Raises:
        ValueError for others than those of this fingerprint."""

    def euler_steps(self, steps: int) -> EulerSteps:
        """So many steps, as its sampler makes them."""

    def decode(self, path: Path, drawn: Sequence[Tensor], place_for: Callable[[int], torch.device]) -> Iterator[Tensor]:
        """As Decoder.decode of sampling/draw.py, by the VAE of a file on the device for as many bytes as ComfyUI
        estimates. Raises: Stopped where the host's user has pressed Cancel."""

    def read_lora(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Mapping[str, Tensor]]:
        """The layers of a LoRA file, as its loader maps them onto this model; see checkpoints/lora_start.py. Those of
        text encoders that can be trained begin with TEXT_ENCODERS. Raises: ValueError naming what it does not map."""

    def unread_lora(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Tensors of a LoRA file that its loader does not map onto this model. Raises: ValueError for layers twice."""

    def example(self, batch: int, device: torch.device, text: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Something to be given to predict, for sizes. text: of one sample; None takes what its description says of
        such a model. Raises: ValueError where nobody said what such a model is given."""


@dataclass(frozen=True)
class ModelFamily:
    """Everything the rest of the pack needs to know about one architecture. Patterns are of fnmatch."""

    name: str  # in the registry
    title: str  # as people write it
    transformer_class: str  # in diffusers, as is vae_class
    vae_class: str
    block_lists: tuple[BlockList, ...]  # in execution order; a split may cut between any two blocks
    # fqns of the modules after the last block, and of parameters that others hold and that are read there alone; they
    # stay on the main device, in a pipeline on the last device
    tail: tuple[str, ...]
    keep_full_precision: tuple[str, ...]  # patterns of module fqns that are never quantized
    lora_targets: tuple[str, ...]  # patterns of the nn.Linear modules that LoRA adapts by default
    latent: LatentSpec
    timesteps: TimestepSpec
    variants: tuple[Variant, ...]  # published sizes, the default first
    renames: tuple[Rename, ...]  # between original and diffusers names; every parameter of the model is covered
    modelspec_architecture: str  # what LoRA metadata calls this family, as ss_base_model_version
    ss_base_model_version: str
    # (latents [B, C, F, H, W], sigma [B], text, guidance) -> keyword arguments of the transformer's forward. Beside the
    # text there is "image_condition" [B, C', F, H, W] for a variant that is given the first frame, and "first_latents"
    # [B, C, 1, H, W] for one that is given those.
    make_inputs: Callable[[Tensor, Tensor, Mapping[str, Tensor], float | None], dict[str, Any]]
    # (output tensor, latents [B, C, F, H, W]) -> prediction of the latents' shape
    read_prediction: Callable[[Tensor, Tensor], Tensor]
    # (vae, pixels [B, 3, F, height, width] in -1..1) -> normalised latents [B, C, F, H, W], float32
    encode_latents: Callable[[Any, Tensor], Tensor]
    # (vae, normalised latents [B, C, F, H, W]) -> pixels [B, 3, F, height, width]
    decode_latents: Callable[[Any, Tensor], Tensor]
    comfy: ComfyInputs  # how ComfyUI's classes read what its encoders make
    # (vae, pixels) -> what goes beside noisy latents, [B, C', F, H, W], float32
    encode_condition: Callable[[Any, Tensor], Tensor] | None = None
    # Modules before the blocks, and which of the tensors they return the model's own forward mixes into the stream
    # after the last block. No module of the tail is called with it, so it is brought there early.
    read_by_tail: Mapping[str, int] = field(default_factory=dict)
    # The names under which ComfyUI and diffusers' pipelines both load LoRA files, and where those are diffusers',
    # patterns of linears whose LoRA ComfyUI does not find under them.
    shared_lora_names: Literal["original", "diffusers"] = "original"
    unread_lora: tuple[str, ...] = ()
    # Patterns of tensor names, in either layout -> why a checkpoint with such a tensor cannot be trained.
    unsupported: Mapping[str, str] = field(default_factory=dict)
    # What the model predicts at sigma t: noise - data, with x_t = (1-t) data + t noise. Of a host's: ComfyUI's word.
    prediction_target: str = "velocity"
    # How its blocks are divided among devices that all compute each of them, a plan per class of block.
    tensor: tuple[TensorPlan, ...] = ()
    # Of a family that is one of ComfyUI's own classes: where its blocks are, and who builds and calls it. Such a family
    # has the names of that class and no others, and no functions of its own.
    native: NativeModel | None = None
    host: HostModel | None = None
    sampling: SamplingSpec | None = None  # how pictures are drawn while it trains; likewise

    @property
    def token_plan(self) -> TokenPlan | None:
        """Where its rows (tokens) are, for devices that share them out."""
        return self.native.token_plan if self.native else None

    @property
    def why_no_tokens(self) -> str:
        """Why devices cannot share out the rows of a sample; "" if they can."""
        without = "nobody has described where the tokens of diffusers' class are; train ComfyUI's class of the model"
        return self.native.why_no_tokens if self.native else without

    def variant(self, name: str) -> Variant:
        """The one of this name. Users' names are looked up by registry.find_variant."""
        return next(variant for variant in self.variants if variant.name == name)

    def latent_of(self, variant: Variant) -> LatentSpec:
        return variant.latent or self.latent
