"""What a job on text encoders may ask for, told before anything is read."""

from __future__ import annotations

from typing import Any

import pytest
from devicebridge.config.job import make_job

JOB: dict[str, dict[str, Any]] = {
    "model": {"path": "sdxl.safetensors", "family": "comfyui"},
    "data": {"folders": [{"path": "/images"}]},
    "train": {"steps": 1},
    "output": {"folder": "/run"},
    "lora": {"text_encoder": True},
}


def test_a_rank_and_a_rate_of_their_own_are_those_of_the_rest_where_left_out() -> None:
    whole = make_job({**JOB, "lora": {"text_encoder": True, "rank": 8, "alpha": 4.0}})
    assert (whole.lora.text_rank, whole.lora.strength, whole.optimizer.text_rate) == (8, 0.5, 1e-4)
    optimizer = {"text_encoder_learning_rate": 5e-5}
    own = make_job({**JOB, "lora": {"text_encoder": True, "text_encoder_rank": 4}, "optimizer": optimizer})
    assert (own.lora.text_rank, own.optimizer.text_rate) == (4, 5e-5)


@pytest.mark.parametrize("strategy", ["auto", "none"])
def test_one_model_over_any_number_of_devices_is_taken(strategy: str) -> None:
    assert make_job({**JOB, "parallel": {"strategy": strategy}, "split": {"devices": ["cuda:0", "cuda:1"]}})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("model", {"path": "/m", "family": ""}, r'set model\.family = "comfyui" for one of these'),
        (
            "parallel",
            {"strategy": "pipeline"},
            r'parallel\.strategy = "pipeline" has copies or stages.* set it to "none"',
        ),
        ("parallel", {"strategy": "data"}, r'parallel\.strategy = "data" has copies'),
        ("parallel", {"strategy": "tensor"}, r'parallel\.strategy = "tensor" has copies'),
        ("parallel", {"strategy": "fsdp"}, r'parallel\.strategy = "fsdp" has copies'),
        ("parallel", {"processes": 2}, r"parallel\.processes = 2 .* set it to 1"),
        ("data", {"encoded": "/e.json"}, r"data\.encoded holds captions that are encoded already; give folders"),
        ("data", {"folders": [{"path": "/i"}], "condition": "first-frame"}, r'data\.condition = "first-frame"'),
        ("lora", {"text_encoder": True, "kind": "lokr"}, r'kind = "lokr" asks for another; remove one'),
        ("lora", {"text_encoder": True, "dora": True}, r"dora asks for another; remove one"),
        ("lora", {"text_encoder_rank": 4}, r"set text_encoder = true, or remove it"),
        ("lora", {"targets": ["lora_te1*"]}, r"set text_encoder = true to train all layers"),
        ("optimizer", {"name": "prodigy", "text_encoder_learning_rate": 0.5}, r"one learning rate for all"),
    ],
)
def test_what_goes_with_no_text_encoder_is_refused_with_what_does(
    section: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_job({**JOB, section: values})


def test_a_rate_without_text_encoders_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs lora\.text_encoder = true; set it"):
        make_job({**JOB, "lora": {}, "optimizer": {"text_encoder_learning_rate": 0.5}})
