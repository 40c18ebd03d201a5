"""Node: folders of images and clips with captions, and how they are used."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from . import host
from .fields import folder_state, make_part, read_auto, read_list, read_number_or_name
from .host import io
from .types import DatasetSocket, TrainingDataset

if TYPE_CHECKING:
    from ..config.job import DataConfig, EvaluationConfig


class TrainingDatasetNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeTrainingDataset",
            display_name="Training Dataset",
            category="DeviceBridge/training",
            description="A folder of images, and of clips for models that make videos, each with a caption in a .txt "
            "file of the same name and, where wanted, a mask in name_mask.png. Chain several of these nodes to train "
            "on several folders.",
            search_aliases=["image folder", "video folder", "clips", "captions", "buckets"],
            inputs=[
                io.String.Input(
                    "folder",
                    default="",
                    placeholder="my_images",
                    tooltip="Name of a folder in ComfyUI's input folder, or a full path.",
                ),
                io.Int.Input(
                    "repeats",
                    default=1,
                    min=1,
                    max=10000,
                    tooltip="How often each image or clip of this folder is used per epoch. Matters when folders of "
                    "different size are mixed.",
                ),
                io.String.Input(
                    "resolutions",
                    default="512",
                    tooltip="Size in pixels; images and clips are scaled to about this squared, keeping their shape. "
                    "Several, such as 512, 768, use each once per size.",
                ),
                io.Float.Input(
                    "caption_dropout",
                    default=0.0,
                    min=0.0,
                    max=0.9,
                    step=0.01,
                    tooltip="Probability that an image is trained with the empty caption. 0.05 to 0.1 helps a LoRA "
                    "that is used with guidance.",
                ),
                io.Boolean.Input(
                    "use_masks",
                    default=True,
                    tooltip="Weigh the loss by name_mask.png (white counts, black does not) where that file exists.",
                ),
                io.String.Input(
                    "evaluation_folder",
                    default="",
                    tooltip="Images kept out of training, on which the loss is measured before and after: a folder in "
                    "ComfyUI's input folder, or a full path. Empty measures nothing.",
                ),
                io.Int.Input(
                    "evaluate_every",
                    default=0,
                    min=0,
                    max=1000000,
                    advanced=True,
                    tooltip="Also measure every so many steps; 0 only before and after. Matters with an evaluation "
                    "folder, and takes time.",
                ),
                io.Float.Input(
                    "max_aspect_ratio",
                    default=2.0,
                    min=1.0,
                    max=8.0,
                    step=0.1,
                    advanced=True,
                    tooltip="Longest side over shortest side; images beyond it are cropped to it.",
                ),
                io.Int.Input(
                    "bucket_step",
                    default=0,
                    min=0,
                    max=1024,
                    advanced=True,
                    tooltip="Sides become multiples of this many pixels; 0 takes the smallest the model allows. A "
                    "larger step puts images of different shape into one batch, at the price of more cropping.",
                ),
                DatasetSocket.Input(
                    "previous",
                    optional=True,
                    tooltip="Another dataset, whose folders come first. Every setting but folder and repeats is then "
                    "taken from this node.",
                ),
                io.String.Input(
                    "frames",
                    default="auto",
                    optional=True,
                    tooltip="Lengths in frames that clips may be cut to; each gets the longest that fits, and a clip "
                    "that is shorter than all is refused by name. Wan takes 4n + 1, such as 17, 33, 81. auto takes the "
                    "model's. Matters with clips, and decides the memory a step needs.",
                ),
                io.String.Input(
                    "fps",
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="Frames per second taken from a clip. auto takes what the model was trained on, source "
                    "takes every frame there is, whatever its speed. Matters with clips.",
                ),
                io.Combo.Input(
                    "window",
                    options=["start", "centre", "uniform"],
                    default="start",
                    optional=True,
                    advanced=True,
                    tooltip="Which part of a clip that is longer: its start, its centre, or several parts spread "
                    "evenly (uniform), each a sample with the same caption. Matters with clips.",
                ),
                io.Int.Input(
                    "num_windows",
                    default=1,
                    optional=True,
                    min=1,
                    max=1000,
                    advanced=True,
                    tooltip="Parts per clip. Above 1 with window = uniform only.",
                ),
            ],
            outputs=[DatasetSocket.Output("dataset", tooltip="The images and clips, and how they are used.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, folder: str, evaluation_folder: str, **others: Any) -> Any:
        """Changed files run the node again, which an unchanged folder name would not."""
        names = [name for name in (folder, evaluation_folder) if name]
        try:
            return [folder_state(host.folder_in_input(name, "folder", _ask), _ask) for name in names]
        except (ValueError, OSError, _Cancelled) as error:
            return str(error)  # execute says it where the user sees it; here the host would only log a traceback

    @classmethod
    def execute(
        cls,
        folder: str,
        repeats: int,
        resolutions: str,
        caption_dropout: float,
        use_masks: bool,
        evaluation_folder: str,
        evaluate_every: int,
        max_aspect_ratio: float,
        bucket_step: int,
        previous: TrainingDataset | None = None,
        frames: str = "auto",
        fps: str = "auto",
        window: str = "start",
        num_windows: int = 1,
    ) -> io.NodeOutput:
        from ..config.job import DataConfig, EvaluationConfig, FolderConfig
        from ..encoding.encode import Stopped

        if previous and previous.data.encoded:
            raise ValueError("previous is a dataset that arrived encoded, which folders of images cannot be added to")
        earlier = previous.data.folders if previous else ()
        try:
            place = host.folder_in_input(folder, "folder", _ask)
            held_out = host.folder_in_input(evaluation_folder, "evaluation_folder", _ask) if evaluation_folder else ""
        except _Cancelled:
            host.cancel()
        own = make_part(FolderConfig, path=str(place), repeats=repeats)
        data = make_part(
            DataConfig,
            folders=(*earlier, own),
            resolutions=read_list(resolutions, int, "resolutions"),
            max_aspect_ratio=max_aspect_ratio,
            bucket_step=bucket_step,
            caption_dropout=caption_dropout,
            use_masks=use_masks,
            frames=read_list(read_auto(frames), int, "frames"),
            fps=_read_fps(fps),
            window=window,
            num_windows=num_windows,
        )
        evaluation = make_part(EvaluationConfig, folder=str(held_out), every_steps=evaluate_every)
        try:
            host.NodeView(cls.hidden.unique_id).show_text(_describe(data, evaluation))
        except Stopped:
            host.cancel()
        return io.NodeOutput(TrainingDataset(data, evaluation))


class _Cancelled(Exception):
    """The user has pressed Cancel while a folder was looked through."""


def _ask() -> None:
    if host.is_cancelled():
        raise _Cancelled("cancelled")


def _read_fps(text: str) -> float | str:
    fps = read_number_or_name(text) or 0.0
    if isinstance(fps, str) and fps != "source":
        raise ValueError(f"fps: {text!r} is neither a number, auto nor source")
    return fps


def _describe(data: DataConfig, evaluation: EvaluationConfig) -> str:
    """Reads every image, and every clip as far as scan_folders does, so that a broken one is named at once.

    Raises: ValueError naming everything that cannot be used; Stopped when the user cancels.
    """
    from ..config.job import FolderConfig
    from ..data.folders import scan_folders
    from ..families.spec import LatentSpec

    # No model is known here; the files are looked at as a model would that takes any clip.
    latent = LatentSpec(channels=16, spatial_stride=16, fps=16.0)
    samples = scan_folders(data, latent, host.is_cancelled)
    num_clips = sum(bool(sample.frames) for sample in samples)
    text = f"{len(samples)} samples per epoch" + (f" ({num_clips} of clips)" if num_clips else "")
    if evaluation.folder:
        held_out = dataclasses.replace(data, folders=(FolderConfig(evaluation.folder),))
        text += f", {len(scan_folders(held_out, latent, host.is_cancelled))} for evaluation"
    return text
