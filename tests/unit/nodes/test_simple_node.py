"""Few inputs, and the node that trains of four choices: what it decides, and that it trains as the nodes it runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from devicebridge.tests import comfy_stub
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from safetensors.torch import load_file

MOST_VISIBLE = 6  # links among them: no page folds those


def test_a_node_shows_at_most_six_inputs(nodes: ModuleType) -> None:
    shown = {
        schema.node_id: [each.id for each in schema.inputs if not each.options.get("advanced")]
        for schema in (node.define_schema() for node in nodes.NODES)
    }
    assert {name: ids for name, ids in shown.items() if len(ids) > MOST_VISIBLE} == {}
    links = ("MODEL", "CLIP", "VAE", "CLIP_VISION", "DEVICEBRIDGE_MODEL", "DEVICEBRIDGE_DATASET")
    for schema in (node.define_schema() for node in nodes.NODES):
        assert not [each.id for each in schema.inputs if each.options.get("advanced") and each.io_type in links]


@pytest.fixture
def simple(nodes: ModuleType, host: comfy_stub.FakeHost, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The node, with few small steps."""
    module = nodes.simple
    small = module._Settings(2, 32, 2, 1e-2, 1)
    monkeypatch.setattr(module, "SETTINGS", {kind: (small, small, small) for kind in module.SETTINGS})
    save_tiny_pipeline(host.root / "models" / "diffusers" / "tiny", "flux2")
    images = save_tiny_dataset(host.root / "input" / "dogs", num_images=3)
    (images / "image_1.txt").unlink()
    return module


def _sockets(**others: Any) -> dict[str, Any]:
    return {"model": "tiny", "images": "dogs", "trigger_word": "ohwx dog", "quality": "normal", **others}


def test_four_choices_train_the_lora_that_the_five_nodes_train(
    nodes: ModuleType, simple: Any, host: comfy_stub.FakeHost
) -> None:
    lora, path = simple.TrainLoraSimple.execute(**_sockets()).args
    assert Path(path) == host.root / "output/devicebridge/ohwx_dog/ohwx_dog.safetensors"
    (model,) = nodes.load.LoadModelForTraining.execute(model="tiny", path="").args
    folder = {
        "folder": "dogs",
        "evaluation_folder": "[none]",
        "trigger_word": "ohwx dog",
        "default_caption": "ohwx dog",
    }
    (dataset,) = nodes.dataset.TrainingDatasetNode.execute(**folder, resolutions="32").args
    own = {"text_encoders": "[model folder]", "vae": "[model folder]", "cache_folder": "other"}
    model = nodes.load.Quantize.execute(model=model).args[0]
    (dataset,) = nodes.captions.CacheCaptionsAndLatents.execute(model=model, dataset=dataset, **own).args
    train = {"steps": 2, "rank": 2, "alpha": 2.0, "learning_rate": 1e-2, "accumulation": 1, "name": "by_hand"}
    expected = nodes.train.TrainLora.execute(model=model, dataset=dataset, resume=False, **train).args[0]
    assert lora.keys() == expected.keys() and all(torch.equal(lora[name], expected[name]) for name in expected)
    assert load_file(path).keys() == lora.keys()
