"""Nodes: images without a caption for whatever captioning node a graph has, and its texts back beside the images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import host
from .host import folders, io
from .saying import said_on_node, training_schema
from .types import DatasetSocket, TrainingDataset


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
            folders = (dataclasses.replace(found.data, folders=(each,)) for each in found.data.folders)
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
            found = without_caption(dataclasses.replace(dataset.data, folders=(folder,)))
            if found:
                folders.refuse_writing(Path(folder.path))
            yield from found
