"""Node: a dataset of latents and conditionings that other nodes have made."""

from __future__ import annotations

from typing import Any

from ..config.job import CacheConfig, DataConfig, EvaluationConfig
from . import host
from .captions import CACHE_FOLDER
from .host import io
from .saying import said_on_node
from .types import DatasetSocket, TrainingDataset


class DatasetFromLatents(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DeviceBridgeDatasetFromLatents",
            display_name="Dataset from Latents and Conditioning",
            category="DeviceBridge/training",
            description="Trains on lists of latents and conditionings, as core's Make Training Dataset, Resolution "
            "Bucket and Load Training Dataset give them. They are kept on disk, so that training, and resuming it, "
            "needs no text encoder and no VAE.",
            search_aliases=["encoded dataset", "latent list", "conditioning list", "make training dataset"],
            is_output_node=True,
            is_input_list=True,
            inputs=[
                io.Latent.Input(
                    "latents",
                    tooltip="List of latents as VAE Encode makes them: images or batches, of one size or of several.",
                ),
                io.Conditioning.Input(
                    "conditioning",
                    tooltip="List of conditionings in the order of the latents; for a batch, one item per sample.",
                ),
                CACHE_FOLDER.make_input(),
            ],
            outputs=[DatasetSocket.Output("dataset", tooltip="The dataset, for the training node.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs: Any) -> float:
        """Always looks again: the folder may have been deleted, and what is there is not written twice."""
        return float("nan")

    @classmethod
    @said_on_node
    def execute(cls, latents: list[Any], conditioning: list[Any], cache_folder: list[str]) -> io.NodeOutput:
        from ..encoding.comfy_data import read_pairs
        from ..encoding.encoded import save_encoded
        from ..encoding.store import CacheStore

        folder = host.folder_in_output(cache_folder[0], "cache_folder")
        pairs = list(read_pairs(latents, conditioning))
        view = host.NodeView(cls.hidden.unique_id)

        def tell(done: int) -> None:
            view.show_progress(done, len(pairs))
            if view.is_cancelled():
                view.show_text("Cancelled. What was written is kept; run again to continue.")
                host.cancel()

        path = save_encoded(pairs, CacheStore(folder), tell)
        view.show_text(f"{len(pairs)} samples are kept\n{path}")
        return io.NodeOutput(
            TrainingDataset(DataConfig(encoded=str(path)), EvaluationConfig(), CacheConfig(folder=str(folder)))
        )
