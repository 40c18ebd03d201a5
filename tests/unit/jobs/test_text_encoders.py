"""Text encoders that are trained: which models have them, and what they take by the headers of their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.config.job import JobConfig, make_job
from devicebridge.encoding.comfy_data import read_tokens
from devicebridge.encoding.key import comfy_token_key
from devicebridge.encoding.store import CacheStore
from devicebridge.families.flux2 import FLUX2
from devicebridge.jobs.comfy_entries import EncodedSample
from devicebridge.jobs.ranks import open_ranks
from devicebridge.jobs.text_encoders import refuse_text_encoders, text_encoders_held
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.planning.text_layers import LayerSize, kept_of_window
from safetensors.torch import save_file

_LAYER = "text_model.encoder.layers.0"


def _job(clip: tuple[str, ...], model: str = "/model.safetensors", **lora: Any) -> JobConfig:
    return make_job(
        {
            "model": {"path": model, "family": "comfyui"},
            "data": {"folders": [{"path": "/images"}]},
            "train": {"steps": 1},
            "output": {"folder": "/run"},
            "lora": {"text_encoder": True, "rank": 16, **lora},
            "cache": {"stock_clip": list(clip), "stock_clip_type": "sdxl"},
        }
    )


def _info(text_class: str, *needs: str) -> Any:
    family = SimpleNamespace(
        title="ComfyUI's UNetModel", host=SimpleNamespace(text_class=text_class), comfy=SimpleNamespace(needs=needs)
    )
    return SimpleNamespace(family=family, variant=SimpleNamespace(name="comfyui-Some"))


def test_both_kinds_of_files_are_counted_in_float32_with_their_lora(tmp_path: Path) -> None:
    half = torch.float16
    first = {f"{_LAYER}.mlp.fc1.weight": (8, 4), f"{_LAYER}.mlp.fc1.bias": (8,), "text_model.embeddings.weight": (5, 4)}
    second = {"transformer.resblocks.0.attn.in_proj_weight": (12, 4), "ln_final.weight": (4,)}
    for name, shapes in (("l", first), ("g", second)):
        save_file({key: torch.zeros(shape, dtype=half) for key, shape in shapes.items()}, tmp_path / name)
    held = text_encoders_held(_job((str(tmp_path / "l"), str(tmp_path / "g")), text_encoder_rank=2), FLUX2, ())
    assert held.weights == 4 * (32 + 8 + 20 + 48 + 4)
    num_trained = 2 * (8 + 4) + 3 * 2 * (4 + 4)  # q, k and v are one tensor of the file, and three layers of the model
    assert (held.num_trained, held.lora) == (num_trained, 4 * num_trained)


def test_of_a_whole_checkpoint_only_the_encoders_count(tmp_path: Path) -> None:
    path = str(tmp_path / "whole.safetensors")
    names = ("model.diffusion_model.out.weight", "conditioner.embedders.0.transformer.text_model.final.weight")
    save_file({name: torch.zeros(3, 5) for name in names}, path)
    assert text_encoders_held(_job((path,), model=path), FLUX2, ()) == (4 * 15, 0, 0, 0, 0)


def test_without_them_nothing_is_held() -> None:
    assert text_encoders_held(_job(("/nowhere",), text_encoder=False), FLUX2, ()) == (0, 0, 0, 0, 0)


def _tokens(parts: int, weight: float = 1.0) -> dict[str, list[list[tuple[int, float]]]]:
    return {"l": [[(1, weight), (2, 1.0)]] * parts, "g": [[(1, 1.0), (2, 1.0)]] * parts}


@pytest.mark.parametrize(
    ("captions", "windows"),
    [
        ({}, 1),
        ({"a cat": _tokens(1), "a long text": _tokens(3)}, 3),
        ({"a (red) cat": _tokens(2, weight=1.1), "a cat": _tokens(1)}, 3),  # one more, without words
    ],
)
def test_the_longest_caption_s_windows_count_as_far_as_its_tokens_are_known(
    captions: dict[str, Any], windows: int, tmp_path: Path
) -> None:
    """What one layer of CLIP-L keeps of a window is compared with arithmetic in test_text_layers.py."""
    width, inner = 768, 3072
    named = {f"{_LAYER}.mlp.fc1.weight": torch.zeros(inner, width, dtype=torch.float16)}
    save_file(named | {f"{_LAYER}.mlp.fc2.weight": torch.zeros(width, inner, dtype=torch.float16)}, tmp_path / "l")
    job = _job((str(tmp_path / "l"),))
    source = f"comfyui 1 CLIP {'a' * 64}"
    job = replace(job, cache=replace(job.cache, folder=str(tmp_path / "cache"), text_source=source))
    for caption, tokens in captions.items():
        CacheStore(tmp_path / "cache").put(comfy_token_key(caption, source), read_tokens(tokens, caption))
    samples = [EncodedSample("latents", caption, (8, 8)) for caption in (*captions, "not encoded yet")]
    held = text_encoders_held(job, FLUX2, samples)
    one = kept_of_window(LayerSize(width, inner, is_quick=True), job.lora, FLUX2)
    assert (held.inputs, held.kept) == (windows * 2 * one.inputs, windows * one.kept)  # of a layer, and the last norm


@pytest.mark.parametrize(
    ("info", "clip", "message"),
    [
        (_info(""), ("/clip",), r"trains the CLIP of SD 1\.5, SD 2 and SDXL, and /model.* is ComfyUI's UNetModel"),
        (_info("SDXLClipModel", "concat_latent_image"), ("/clip",), "trains the CLIP of"),
        (_info("SDXLClipModel"), (), r"name their files with cache\.stock_clip in a job file"),
    ],
)
def test_models_without_clip_and_jobs_that_do_not_name_it_are_refused(
    info: Any, clip: tuple[str, ...], message: str
) -> None:
    job = _job(clip or ("/clip",))
    if not clip:
        cache = {"text_source": f"comfyui 1 CLIP {'a' * 64}"}
        job = make_job(
            {
                "model": {"path": "/m", "family": "comfyui"},
                "data": {"folders": [{"path": "/i"}]},
                "train": {"steps": 1},
                "output": {"folder": "/run"},
                "lora": {"text_encoder": True},
                "cache": cache,
            }
        )
    with pytest.raises(ValueError, match=message):
        refuse_text_encoders(job, info)


def test_a_process_that_another_program_has_started_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"trains in one process.* start without parallel\.processes, --nproc"),
        open_ranks(_job(("/clip",)), RankPlace(1, 2, 1, 2), lambda: False),
    ):
        pass


def test_a_model_with_clip_that_is_named_is_taken() -> None:
    refuse_text_encoders(_job(("/clip",)), _info("SDXLClipModel"))
