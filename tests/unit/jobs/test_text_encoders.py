"""Text encoders that are trained: which models have them, and what they take by the headers of their files."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.config.job import JobConfig, make_job
from devicebridge.jobs.ranks import open_ranks
from devicebridge.jobs.read_job import refuse_text_encoders, text_encoder_bytes
from devicebridge.parallel.ranks.place import RankPlace
from safetensors.torch import save_file

_LAYER = "text_model.encoder.layers.0"


def _job(clip: tuple[str, ...], model: str = "/model.safetensors", **lora: Any) -> JobConfig:
    return make_job(
        {
            "model": {"path": model, "family": "comfyui"}, "data": {"folders": [{"path": "/images"}]},
            "train": {"steps": 1}, "output": {"folder": "/run"}, "lora": {"text_encoder": True, "rank": 16, **lora},
            "cache": {"stock_clip": list(clip), "stock_clip_type": "sdxl"},
        }
    )  # fmt: skip


def _info(text_class: str, *needs: str) -> Any:
    family = SimpleNamespace(
        title="ComfyUI's UNetModel", host=SimpleNamespace(text_class=text_class), comfy=SimpleNamespace(needs=needs)
    )
    return SimpleNamespace(family=family, variant=SimpleNamespace(name="comfyui-Some"))


def test_both_kinds_of_files_are_counted_in_float32(tmp_path: Path) -> None:
    half = torch.float16
    first = {f"{_LAYER}.mlp.fc1.weight": (8, 4), f"{_LAYER}.mlp.fc1.bias": (8,), "text_model.embeddings.weight": (5, 4)}
    second = {"transformer.resblocks.0.attn.in_proj_weight": (12, 4), "ln_final.weight": (4,)}
    for name, shapes in (("l", first), ("g", second)):
        save_file({key: torch.zeros(shape, dtype=half) for key, shape in shapes.items()}, tmp_path / name)
    assert text_encoder_bytes(_job((str(tmp_path / "l"), str(tmp_path / "g")))) == 4 * (32 + 8 + 20 + 48 + 4)


def test_of_a_whole_checkpoint_only_the_encoders_count(tmp_path: Path) -> None:
    path = str(tmp_path / "whole.safetensors")
    names = ("model.diffusion_model.out.weight", "conditioner.embedders.0.transformer.text_model.final.weight")
    save_file({name: torch.zeros(3, 5) for name in names}, path)
    assert text_encoder_bytes(_job((path,), model=path)) == 4 * 15


def test_without_them_nothing_is_held() -> None:
    assert text_encoder_bytes(_job(("/nowhere",), text_encoder=False)) == 0


@pytest.mark.parametrize(
    ("info", "clip", "message"),
    [
        (_info(""), ("/clip",), r"trains the CLIP of SD 1\.5, SD 2 and SDXL, and this is ComfyUI's UNetModel"),
        (_info("SDXLClipModel", "concat_latent_image"), ("/clip",), "trains the CLIP of"),
        (_info("SDXLClipModel"), (), r"name their files with cache\.stock_clip"),
    ],
)
def test_models_without_clip_and_jobs_that_do_not_name_it_are_refused(info, clip, message):
    job = _job(clip or ("/clip",))
    if not clip:
        cache = replace(job.cache, stock_clip=(), stock_clip_type="", text_source=f"comfyui 1 CLIP {'a' * 64}")
        job = replace(job, cache=cache)
    with pytest.raises(ValueError, match=message):
        refuse_text_encoders(job, info)


def test_a_process_that_another_program_has_started_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"lora\.text_encoder.* one process.* without parallel\.processes, --nproc"),
        open_ranks(_job(("/clip",)), RankPlace(1, 2, 1, 2), lambda: False),
    ):
        pass


def test_a_model_with_clip_that_is_named_is_taken() -> None:
    refuse_text_encoders(_job(("/clip",)), _info("SDXLClipModel"))
