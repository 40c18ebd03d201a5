"""Sections of a job: images and clips, where their encodings are kept, and what is held out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from .ranges import STRICT, NameText, PathText, Range, RequiredPath, Seed, StepCount
from .setting import setting

_Quantiles = Annotated[tuple[Annotated[float, Range(0.001, 0.999)], ...], Field(min_length=1, max_length=1000)]
_Sizes = Annotated[tuple[Annotated[int, Range(1, 8192)], ...], Field(max_length=100)]
_Text = Annotated[str, Field(max_length=10_000)]
MOST_REPEATS = 10_000


def _check_template(text: str) -> str:
    """Raises: ValueError for braces that stand for nothing."""
    rest = text.replace("{trigger}", "").replace("{caption}", "")
    if "{" in rest or "}" in rest:
        raise ValueError("knows {trigger} and {caption}, and no other braces")
    return text


_Template = Annotated[_Text, AfterValidator(_check_template)]


def _source_pattern(kind: str) -> str:
    """Of "comfyui <version> <kind> <fingerprint>", or nothing."""
    return rf"^(comfyui \S+ {kind} [0-9a-f]{{64}})?$"


@dataclass(frozen=True, config=STRICT)
class FolderConfig:
    """One dataset folder.

    Args:
        path: Folder of images and clips, each with a caption of the same name (.txt) and, if wanted, name_mask.png.
        repeats: How often each image or clip of this folder is used per epoch. Matters with several folders.
        loss_weight: Factor of the loss of this folder's images and clips, such as 0.5 for regularisation images.
        regularisation: Whether these are images of the class in general, such as other people, so that the model does
            not forget it (prior preservation). Their captions get no trigger word.
        resolutions: Sizes in pixels, as data.resolutions. Left out: those of the dataset.
        caption: Caption of images and clips of this folder that have no caption file, such as: a photo of a person.
        caption_template: As data.caption_template. Left out: the dataset's.
        references: Folders with pictures that images of this folder were made from, under the names of these, or with
            _1, _2 and so on behind them. Of several folders each has one or more. With data.condition.
        control: Folder with clips or images that show what those of this folder follow, such as depth or poses, under
            the same names and with as many frames. With data.condition.
    """

    path: RequiredPath
    repeats: Annotated[int, Range(1, MOST_REPEATS)] = 1
    loss_weight: Annotated[float, Range(0.001, 100.0)] = 1.0
    regularisation: bool = False
    resolutions: _Sizes = ()
    caption: _Text = ""
    caption_template: _Template = ""
    references: Annotated[tuple[RequiredPath, ...], Field(max_length=10)] = ()
    control: PathText = ""

    def __post_init__(self) -> None:
        if self.regularisation and "{trigger}" in self.caption_template:
            raise ValueError("caption_template has {trigger}, which captions of regularisation images do not get")


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """The images and clips.

    Args:
        folders: Dataset folders, one section each.
        resolutions: Sizes in pixels. Images and clips are scaled to about this squared and keep their shape. Several,
            such as 512, 768, use each image once per size.
        max_aspect_ratio: Longest side over shortest side; images beyond it are cropped to it.
        bucket_step: Sides become multiples of this many pixels. Left out: the smallest that the model allows. A larger
            step puts images of different shape into one batch, at the price of more cropping.
        caption_dropout: Probability that a sample is trained with the empty caption. 0.05 to 0.1 helps with guidance.
        caption_lines: Whether each line of a caption is a caption of its own, of which one is drawn each time.
        shuffle_tags: Whether tags, which stand between commas, are trained in changing order.
        keep_tags: So many first tags keep their place and are never dropped. A trigger word that is put in front is not
            counted. Where a caption has |||, what stands before it is kept instead, and what stands behind a second.
        tag_dropout: Probability that a tag is left out.
        tag_variants: So many texts are made of each caption ahead, and one of them is drawn each time. More are more
            varied, and take as much more encoding time and disk. With shuffle_tags or tag_dropout.
        use_masks: Weigh the loss by name_mask.png (white counts, black does not) where that file exists.
        frames: Lengths in frames that clips may be cut to, such as 1, 33, 81: each gets the longest that fits; a
            shorter one is refused. 1 is for images. Left out: the model's. Decides a step's memory. Wan takes 4n + 1.
        fps: Frames per second that are taken from clips; source takes all. Left out: what the model was trained on.
        window: Part of a longer clip: its start, its centre, or several spread evenly (uniform), each a sample.
        num_windows: Parts per clip. Above 1 with window uniform only.
        seconds: Length of the parts that window cuts of sounds that are trained alone; shorter ones stay whole. Left
            out: all of each, up to 600. Decides the memory of a step.
        encoded: In place of folders: a list of samples that arrived as latents and text states. Dataset from Latents
            and Conditioning writes it. What is about images has no effect then.
        trigger_word: Word that calls what is trained, such as ohwx: in place of [trigger] in captions, else before
            them.
        caption_template: How captions are made, with {trigger} for the trigger word and {caption} for what the file
            says, such as: a photo of {trigger}, {caption}. Left out: as trigger_word says.
        condition: What a model of ComfyUI's is given beside caption and noise, made of files by ComfyUI's node of that
            kind. reference, kontext, qwen-image-edit, qwen-image-edit-plus and z-image-omni take the references of a
            folder; vace, fun-control and fun-control-2.2 its control; first-frame that of each clip. Left out: nothing.
        reference_megapixels: Size that condition reference scales each picture to; other kinds have their own.
    """

    folders: tuple[FolderConfig, ...] = ()
    resolutions: Annotated[_Sizes, Field(min_length=1)] = (512,)
    max_aspect_ratio: Annotated[float, Range(1.0, 100.0)] = 2.0
    bucket_step: Annotated[int, Range(0, 1024)] = 0
    caption_dropout: Annotated[float, Range(0.0, 0.9)] = 0.0
    caption_lines: bool = False
    shuffle_tags: bool = False
    keep_tags: Annotated[int, Range(0, 1000)] = 0
    tag_dropout: Annotated[float, Range(0.0, 0.9)] = 0.0
    tag_variants: Annotated[int, Range(1, 100)] = 8
    use_masks: bool = True
    frames: tuple[Annotated[int, Range(1, 10_000)], ...] = ()
    fps: Annotated[float, Range(0.1, 1000.0, or_zero=True)] | Literal["source"] = 0.0
    window: Literal["start", "centre", "uniform"] = "start"
    num_windows: Annotated[int, Range(1, 1000)] = 1
    seconds: Annotated[float, Range(0.1, 600.0, or_zero=True)] = 0.0
    encoded: PathText = ""
    trigger_word: Annotated[str, Field(max_length=200)] = ""
    caption_template: _Template = ""
    condition: Literal[
        "",
        "reference",
        "kontext",
        "qwen-image-edit",
        "qwen-image-edit-plus",
        "z-image-omni",
        "first-frame",
        "vace",
        "fun-control",
        "fun-control-2.2",
    ] = ""
    reference_megapixels: Annotated[float, Range(0.01, 16.0)] = 1.0

    @property
    def largest_resolution(self) -> int:
        """Of all folders, in pixels along a square's side."""
        return max(max(folder.resolutions or self.resolutions) for folder in self.folders or (FolderConfig("-"),))

    def __post_init__(self) -> None:
        templates = [self.caption_template, *(folder.caption_template for folder in self.folders)]
        if not self.trigger_word and any("{trigger}" in each for each in templates):
            raise ValueError("caption_template has {trigger}, but there is no trigger_word; give one, or take it out")
        if bool(self.folders) == bool(self.encoded):
            raise ValueError("data needs folders of images, or encoded, and not both")
        if self.encoded and self.caption_dropout:
            raise ValueError("caption_dropout needs the empty caption's states, which data.encoded has not; use 0")
        if self.encoded and self.condition:
            raise ValueError("condition is for images; what arrived encoded has its conditions in its CONDITIONING")
        for folder, key in itertools.product(self.folders, ("references", "control")):
            if vars(folder)[key] and not self.condition:
                raise ValueError(
                    f"{key} of {folder.path} needs condition, which says how the model is given it; set it"
                )
        if (self.window == "uniform") != (self.num_windows > 1):
            raise ValueError('num_windows above 1 belongs to window = "uniform", and uniform needs it')


@dataclass(frozen=True, config=STRICT)
class CacheConfig:
    """Captions and latents computed once.

    Args:
        folder: Folder of encoded captions and images, for any number of models and datasets. Left out: the run folder.
        text_encoders: Folder of the folders text_encoder and tokenizer. Left out: the model folder; a file has none.
        vae: VAE folder or file. Left out: the model folder, which a single file lacks.
        text_device: Where the text encoder runs. auto picks by size, and the log says why. cpu is slow and always has
            room; cuda:0 holds all of it there; stream passes its layers through a card that could not hold it.
        text_window_gb: The most decimal GB of its card that a streamed text encoder may take. Left out: what is free.
            With text_device stream or auto. More allows more captions per pass; FLUX.2-dev's encoder needs about 4.
        vae_device: Device of the VAE, such as cuda:0. Left out: the model's first device.
        dtype: Number type that text encoder and VAE compute in. Some VAEs give black images in float16.
        text_quantize: Holds the text encoder's linear layers in 8 bits: half the memory (FLUX.2-dev's 18 instead of 35
            GB), no speed. int8 is the more exact. On the CPU a caption takes longer, with fp8 much longer.
        text_source: Name of the CLIP of ComfyUI that encoded the captions, as Cache Captions and Latents shows it. Left
            out: the model's own text encoders. What is missing in the cache can be computed in ComfyUI only.
        latent_source: Name of ComfyUI's VAE that encoded the images, shown likewise. Left out: the model's own VAE.
        stock_clip: Files of ComfyUI's text encoders that encode the captions: names in models/text_encoders, or full
            paths. With family comfyui a checkpoint that holds them needs none. Needs a ComfyUI on this machine.
        stock_clip_type: The type that ComfyUI's CLIP loader takes for stock_clip, such as flux2, qwen_image or lumina2.
        stock_vae: File of ComfyUI's VAE that encodes the images: a name in models/vae, or a full path. With family
            comfyui a checkpoint that holds one needs none. Needs a ComfyUI on this machine.
        stock_audio_vae: File of ComfyUI's VAE that encodes the sound of clips, for models that make video with sound
            (LTX-2, MiniMax H3): a name in models/vae or models/checkpoints, or a full path. Left out: clips are trained
            without their sound. A model of sound alone takes stock_vae.
        audio_source: Name of the VAE that did.
        stock_vision: File of ComfyUI's CLIP vision model for first frames or references: a name in models/clip_vision,
            or a full path. Wan 2.1's image-to-video and Fun Control need one. With data.condition.
        vision_source: Name of the CLIP vision model that did, as Cache Captions and Latents shows it.
        caption_weights: Whether captions and sample prompts have the syntax of ComfyUI's prompts, where (word) and
            (word:1.3) weigh words. Else every character is taken as it stands. Matters with ComfyUI's text encoders.
    """

    folder: PathText = ""
    text_encoders: PathText = ""
    vae: PathText = ""
    text_device: str = setting("auto", is_free=True)
    text_window_gb: Annotated[float, Range(0.0, 100_000)] = setting(0.0, is_free=True)
    vae_device: str = ""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    text_quantize: Literal["none", "int8", "fp8"] = "none"
    text_source: Annotated[str, Field(pattern=_source_pattern("CLIP"))] = ""
    latent_source: Annotated[str, Field(pattern=_source_pattern("VAE"))] = ""
    stock_clip: Annotated[tuple[Annotated[NameText, Field(min_length=1)], ...], Field(max_length=4)] = ()
    stock_clip_type: str = ""
    stock_vae: NameText = ""
    stock_audio_vae: NameText = ""
    audio_source: Annotated[str, Field(pattern=_source_pattern("VAE"))] = ""
    stock_vision: NameText = ""
    vision_source: Annotated[str, Field(pattern=_source_pattern("VISION"))] = ""
    caption_weights: bool = False

    def __post_init__(self) -> None:
        if self.has_stock_text and (self.text_encoders or self.text_quantize != "none"):
            name = "text_source" if self.text_source else "stock_clip"
            raise ValueError(f"{name} says that ComfyUI's CLIP encodes; remove text_encoders and text_quantize")
        if self.has_stock_latents and self.vae:
            name = "latent_source" if self.latent_source else "stock_vae"
            raise ValueError(f"{name} says that ComfyUI's VAE encodes; remove vae")
        if self.stock_clip_type and not self.stock_clip:
            raise ValueError("stock_clip_type says what the files of stock_clip are, and there are none")

    @property
    def has_stock_text(self) -> bool:
        """Whether ComfyUI's CLIP encodes the captions, or has encoded them."""
        return bool(self.text_source or self.stock_clip)

    @property
    def has_stock_latents(self) -> bool:
        """The same of the images and its VAE."""
        return bool(self.latent_source or self.stock_vae)

    @property
    def needs_stock_encoders(self) -> bool:
        """Whether files are named that only ComfyUI can load."""
        return bool(self.stock_clip or self.stock_vae or self.stock_audio_vae or self.stock_vision)

    @property
    def has_sound(self) -> bool:
        """Whether ComfyUI's VAE encodes the sound of clips, or has encoded it."""
        return bool(self.stock_audio_vae or self.audio_source)


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig:
    """Loss on held-out images, at fixed timestep quantiles and with fixed noise.

    Args:
        folder: Folder of images kept out of training, whose loss is measured before and after.
        every_steps: Also measure every so many steps; 0 only before and after. Takes time.
        quantiles: Quantiles of the noise levels that the loss is measured at.
        seed: Start of the noise that evaluation adds.
        references: Folders with references of these images, as those of a dataset folder. With data.condition.
        control: Folder with what these clips or images follow, likewise.
    """

    folder: PathText = ""
    every_steps: StepCount = setting(0, is_free=True)
    quantiles: _Quantiles = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    seed: Seed = 0
    references: Annotated[tuple[RequiredPath, ...], Field(max_length=10)] = ()
    control: PathText = ""

    def __post_init__(self) -> None:
        for key in ("references", "control"):
            if vars(self)[key] and not self.folder:
                raise ValueError(f"evaluation.{key} belongs to the images of evaluation.folder; set that")

    @property
    def folders(self) -> tuple[str, ...]:
        """All that are read for it."""
        return tuple(filter(None, (self.folder, *self.references, self.control)))

    def as_data(self, trained: DataConfig) -> DataConfig:
        """The images that are held out, cut and conditioned as those that are trained.
        Raises: ValueError for references or control without a condition."""
        folder = FolderConfig(self.folder, references=self.references, control=self.control)
        return replace(trained, folders=(folder,), caption_dropout=0.0, shuffle_tags=False, tag_dropout=0.0)
