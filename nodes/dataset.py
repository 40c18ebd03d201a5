"""Nodes: folders of images and clips with captions, or to be given some; and latents and conditionings that other nodes
have made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config.job import CacheConfig, DataConfig, EvaluationConfig, FolderConfig, job_keys
from ..system.stopping import Stopped
from . import host
from .captions import CACHE_FOLDER
from .choices import NONE, file_options, lists_pass, read_file
from .host import folders, io
from .saying import said_on_node, training_schema
from .sockets import AUTO, LATER, Socket, read_lines, read_number_or_name, read_section
from .types import DatasetSocket, TrainingDataset


def _read_fps(text: str) -> float | str:
    fps = read_number_or_name(text) or 0.0
    if isinstance(fps, str) and fps != "source":
        raise ValueError(f"fps: {text!r} is neither a number, auto nor source")
    return fps


_IN_INPUT = "A folder in ComfyUI's input folder, or one that you allow; press R after you have made one."
_PLACE = "In ComfyUI's input folder."
_LINES = f"One per line. {_PLACE}"


def _inputs() -> list[Socket | io.Input]:
    there = folders.list_input_folders()
    ways = [NONE, *filter(None, job_keys()["data.condition"].choices)]
    return [
        Socket("folder", "data.folders.path", _IN_INPUT, **file_options(*there)),
        Socket("repeats", "data.folders.repeats", advanced=True),
        Socket("resolutions", "data.resolutions", default="512"),
        Socket("caption_dropout", "data.caption_dropout", step=0.01, advanced=True),
        Socket("use_masks", "data.use_masks", advanced=True),
        Socket("evaluation_folder", "evaluation.folder", _IN_INPUT, **file_options(NONE, *there)),
        Socket("evaluate_every", "evaluation.every_steps", max=1_000_000, advanced=True),
        Socket("max_aspect_ratio", "data.max_aspect_ratio", max=8.0, step=0.1, advanced=True),
        Socket("bucket_step", "data.bucket_step", advanced=True),
        DatasetSocket.Input("previous", optional=True),
        Socket("frames", "data.frames", default=AUTO, optional=True),
        Socket("fps", "data.fps", read=_read_fps, default=AUTO, **LATER),
        Socket("window", "data.window", **LATER),
        Socket("num_windows", "data.num_windows", **LATER),
        Socket("trigger_word", "data.trigger_word", placeholder="ohwx", optional=True),
        Socket("caption_template", "data.caption_template", default="", placeholder="{trigger}, {caption}", **LATER),
        Socket("loss_weight", "data.folders.loss_weight", step=0.01, **LATER),
        Socket("regularisation", "data.folders.regularisation", **LATER),
        Socket("default_caption", "data.folders.caption", **LATER),
        Socket("folder_resolutions", "data.folders.resolutions", default=AUTO, **LATER),
        Socket("condition", "data.condition", read=read_file, **LATER, options=ways, default=NONE),
        Socket("references", "data.folders.references", _LINES, read=read_lines, example="my_photos_before", **LATER),
        Socket("control", "data.folders.control", _PLACE, default="", **LATER),
        Socket("reference_megapixels", "data.reference_megapixels", max=16.0, step=0.01, **LATER),
        Socket("evaluation_references", "evaluation.references", _LINES, read_lines, "my_held_out_before", **LATER),
        Socket("evaluation_control", "evaluation.control", _PLACE, default="", **LATER),
        Socket("caption_lines", "data.caption_lines", **LATER),
        Socket("shuffle_tags", "data.shuffle_tags", **LATER),
        Socket("keep_tags", "data.keep_tags", **LATER),
        Socket("tag_dropout", "data.tag_dropout", step=0.01, **LATER),
        Socket("tag_variants", "data.tag_variants", **LATER),
    ]


class TrainingDatasetNode(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeTrainingDataset",
        search_aliases=["image folder", "video folder", "clips", "captions", "buckets"],
        inputs=_inputs,
        is_named=True,
        outputs=[DatasetSocket.Output("dataset")],
    )

    validate_inputs = lists_pass("folder", "evaluation_folder")

    @classmethod
    def fingerprint_inputs(cls, folder: str | None = None, evaluation_folder: str | None = None, **others: Any) -> Any:
        """Changed files run the node again, as a linked name does."""
        names = ("references", "control", "evaluation_references", "evaluation_control")
        beside = [others.get(name, "") for name in names]
        if folder is None or evaluation_folder is None or None in beside:
            return float("nan")
        given = (folder, read_file(evaluation_folder), *(name for each in beside if each for name in read_lines(each)))
        try:
            return [folders.state_of(folders.folder_in_input(name, "folder", _ask), _ask) for name in given if name]
        except (ValueError, OSError, Stopped) as error:
            return str(error)  # execute says it where the user sees it; here the host would only log a traceback

    @classmethod
    @said_on_node
    def execute(cls, previous: TrainingDataset | None = None, **sockets: Any) -> io.NodeOutput:
        from ..data.caption_files import ANY_MODEL
        from ..data.folders import scan_folders
        from ..data.samples import as_evaluated, describe_samples
        from ..families.comfy.conditions import evaluation_problem

        if previous and previous.data.encoded:
            raise ValueError("previous is a dataset that arrived encoded, which folders of images cannot be added to")
        earlier = previous.data.folders if previous else ()
        place = str(folders.folder_in_input(sockets["folder"], "folder", _ask))
        name = read_file(sockets["evaluation_folder"])
        held_out = str(folders.folder_in_input(name, "evaluation_folder", _ask)) if name else ""
        read = partial(read_section, entries=_inputs(), given=sockets)
        data = read(DataConfig, folders=(*earlier, read(FolderConfig, path=place, **_folders_beside(sockets, ""))))
        evaluation = read(EvaluationConfig, folder=held_out, **_folders_beside(sockets, "evaluation_"))
        if reason := evaluation_problem(data.condition, evaluation):
            raise ValueError(reason)
        # A broken file is named at once.
        samples = scan_folders(data, ANY_MODEL, host.is_cancelled, others=evaluation.folders)
        num_clips = sum(bool(sample.frames) for sample in samples)
        text = f"{len(samples)} samples per epoch" + (f" ({num_clips} of clips)" if num_clips else "")
        if evaluation.folder:
            evaluated = as_evaluated(scan_folders(evaluation.as_data(data), ANY_MODEL, host.is_cancelled))
            text += f", {len(evaluated)} for evaluation"
        host.NodeView(cls.hidden.unique_id).show_text(f"{text}\n{describe_samples(samples)}")
        return io.NodeOutput(TrainingDataset(data, evaluation))


def _folders_beside(sockets: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The folders of references and control, by their full paths. prefix: of the sockets' names."""
    names = read_lines(sockets.get(f"{prefix}references", ""))
    control = sockets.get(f"{prefix}control", "").strip()
    return {
        "references": tuple(str(folders.folder_in_input(name, f"{prefix}references", _ask)) for name in names),
        "control": str(folders.folder_in_input(control, f"{prefix}control", _ask)) if control else "",
    }


def _ask() -> None:
    """Raises: Stopped when the user cancels while a folder is looked through."""
    if host.is_cancelled():
        raise Stopped("cancelled")


class DatasetFromLatents(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeDatasetFromLatents",
        search_aliases=["encoded dataset", "latent list", "conditioning list", "make training dataset"],
        is_output_node=True,
        is_input_list=True,
        inputs=[io.Latent.Input("latents"), io.Conditioning.Input("conditioning"), CACHE_FOLDER],
        outputs=[DatasetSocket.Output("dataset")],
    )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Always looks again: the folder may be gone."""
        return float("nan")

    @classmethod
    @said_on_node
    def execute(cls, latents: list[Any], conditioning: list[Any], cache_folder: list[str]) -> io.NodeOutput:
        from ..encoding.comfy_data import read_pairs, save_encoded
        from ..encoding.store import CacheStore

        folder = folders.folder_in_output(cache_folder[0], "cache_folder")
        pairs = list(read_pairs(latents, conditioning))
        view = host.NodeView(cls.hidden.unique_id)

        def tell(done: int) -> None:
            view.show_progress(done, len(pairs))
            if host.is_cancelled():
                view.show_text("Cancelled. What was written is kept; run again to continue.")
                host.cancel()

        path = save_encoded(pairs, CacheStore(folder), tell)
        view.show_text(f"{len(pairs)} samples are kept\n{path}")
        data, cache = DataConfig(encoded=str(path)), CacheConfig(folder=str(folder))
        return io.NodeOutput(TrainingDataset(data, EvaluationConfig(), cache))


# ---- images without a caption for whatever captioning node a graph has, and its texts back beside the images


class ImagesToCaption(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeImagesToCaption",
        search_aliases=["auto caption", "captioning", "florence", "tagger", "describe images"],
        inputs=[
            DatasetSocket.Input("dataset"),
            io.Int.Input("longest_side", default=1024, min=64, max=4096),
            io.Int.Input("at_most", default=100, min=1, max=5000),
        ],
        outputs=[io.Image.Output("image", is_output_list=True), io.String.Output("file", is_output_list=True)],
    )

    @classmethod
    @said_on_node
    def execute(cls, dataset: TrainingDataset, longest_side: int, at_most: int) -> io.NodeOutput:
        from ..data.caption_files import whole_picture

        paths = list(_to_caption(dataset))
        chosen = paths[:at_most]
        text = f"{len(chosen)} of {len(paths)} images without a caption" if paths else "Every image has a caption."
        host.NodeView(cls.hidden.unique_id).show_text(text)
        if not paths:
            return io.NodeOutput(host.blocked(1), host.blocked(1))
        return io.NodeOutput([whole_picture(path, longest_side) for path in chosen], list(map(str, chosen)))


class WriteCaptions(io.ComfyNode):
    define_schema = training_schema(
        node_id="DeviceBridgeWriteCaptions",
        search_aliases=["auto caption", "save captions", "caption files"],
        is_output_node=True,
        is_input_list=True,
        inputs=[
            DatasetSocket.Input("dataset"),
            io.String.Input("caption", force_input=True, lazy=True),
            io.String.Input("file", force_input=True, lazy=True),
        ],
        outputs=[DatasetSocket.Output("captioned")],
    )

    @classmethod
    def check_lazy_status(cls, dataset: list[TrainingDataset], **inputs: Any) -> list[str]:
        """ComfyUI computes the texts only where one is missing: a captioning model takes its time."""
        return ["caption", "file"] if any(_to_caption(dataset[0])) else []

    @classmethod
    @said_on_node
    def execute(cls, dataset: list[TrainingDataset], caption: Sequence[Any], file: Sequence[Any]) -> io.NodeOutput:
        from ..data.caption_files import CaptionChanged, media_files, write_caption

        (found,) = dataset
        missing = {str(path): path for path in _to_caption(found)}
        if list(file) == [None]:
            file = caption = ()
        if len(file) != len(caption):
            raise ValueError(f"{len(caption)} captions came for {len(file)} images; give one for each")
        pairs = zip(file, caption, strict=True)
        given = {str(name): "" if text is None else str(text).strip() for name, text in pairs}
        if strange := given.keys() - missing.keys():  # which may have a caption
            folders = (replace(found.data, folders=(each,)) for each in found.data.folders)
            strange -= {str(path) for each in folders for path in media_files(each)}
        if strange:
            raise ValueError(f"file {min(strange)!r} is none of this dataset; connect the files of Images to Caption")
        written, kept, problems = 0, 0, []
        for name in (name for name, text in given.items() if text and name in missing):
            try:
                write_caption(missing[name], given[name], (None, ""))
                written += 1
            except CaptionChanged:  # from elsewhere meanwhile
                kept += 1
            except (ValueError, OSError) as error:  # all others are written
                problems.append(f"  {missing[name]}: {error}")
        if problems:
            raise ValueError("\n".join([f"{written} captions were written, {len(problems)} could not be:", *problems]))
        text = f"{written} captions were written, {len(missing) - written - kept} images have none"
        text += f"; {kept} got another meanwhile, which stays" if kept else ""
        host.NodeView(cls.hidden.unique_id).show_text(text)
        return io.NodeOutput(found, ui={"text": (text,)})


def _to_caption(dataset: TrainingDataset) -> Iterator[Path]:
    """Images and clips without a caption, of the folders that have no caption for such.
    Raises: ValueError for a folder in which captions may not be written, if some are missing."""
    from ..data.caption_files import without_caption

    if dataset.data.encoded:
        raise ValueError("this dataset arrived encoded; captions are of folders of images")
    for folder in dataset.data.folders:
        if not folder.caption:
            found = without_caption(replace(dataset.data, folders=(folder,)))
            if found:
                folders.refuse_writing(Path(folder.path))
            yield from found
