"""The ComfyUI at hand has all that the pack uses of it, and one that lacks something is refused by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from devicebridge.compat import PARTS
from devicebridge.tests.comfy.server import Server, start_server
from devicebridge.tests.comfy_host import comfy_python

pytestmark = pytest.mark.comfy

WORKER = Path(__file__).with_name("compat_worker.py")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def told(comfyui: Path) -> dict[str, Any]:
    command = [str(comfy_python(comfyui)), str(WORKER), str(comfyui)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(command, cwd=comfyui, env={**os.environ, **ENVIRONMENT}, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_comfyui_has_all_that_the_pack_asks_at_its_start(told: dict[str, Any]) -> None:
    assert (told["faults"], told["imported"]) == ([], [])


def test_comfyui_has_everything_else_that_the_code_uses(told: dict[str, Any]) -> None:
    assert told["lacking"] == []
    assert told["asked"] > 250


def test_a_line_that_no_comfyui_keeps_is_found(told: dict[str, Any]) -> None:
    assert told["not as lines say"] == []


def test_every_method_that_stands_in_for_one_of_comfyuis_is_as_compat_says(told: dict[str, Any]) -> None:
    assert told["overrides"] == []


def test_where_a_function_is_gone_its_nodes_refuse_and_look_as_before(told: dict[str, Any]) -> None:
    assert told["refusing"] == list(PARTS["split"])
    assert told["same schemas"]
    assert set(told["ids"]) == {*PARTS["nodes"], "DeviceBridgeRingLseFix"}


# ---- a server whose ComfyUI has renamed a function

_RENAMES = """
import comfy.utils

comfy.utils.repeat_to_size = comfy.utils.repeat_to_batch_size
del comfy.utils.repeat_to_batch_size
"""


@pytest.fixture(scope="module")
def changed(comfyui: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp("changed")
    (base / "custom_nodes" / "renames").mkdir(parents=True)
    (base / "custom_nodes" / "renames" / "prestartup_script.py").write_text(_RENAMES, encoding="utf-8")
    (base / "models" / "diffusion_models").mkdir(parents=True)
    (base / "models" / "diffusion_models" / "tiny.safetensors").write_bytes(b"")
    with start_server(comfyui, base) as server:
        yield server


def test_a_changed_comfyui_starts_and_its_log_names_the_nodes_that_refuse(changed: Server) -> None:
    log = changed.log.read_text(encoding="utf-8")
    (refused,) = re.findall(r"(DeviceBridge[\w, ]+) will not work", log)
    assert refused.split(", ") == list(PARTS["split"])
    assert {*PARTS["nodes"], "DeviceBridgeRingLseFix"} <= set(changed.get("/object_info"))


def test_the_node_concerned_refuses_and_another_runs(changed: Server) -> None:
    split = {"unet_name": "tiny.safetensors", "weight_dtype": "default", "devices": "auto", "balance": "memory"}
    split |= {"split_at": "", "memory_limit_gb": "", "transport": "auto", "overlap": True, "offload": True}
    shown = {"class_type": "PreviewAny", "inputs": {"source": ["split", 0]}}
    refused = changed.run(
        {"split": {"class_type": "DeviceBridgeLoadDiffusionModelSplit", "inputs": split}, "shown": shown}
    )
    assert refused.status == "error"
    assert "changed what DeviceBridge relies on here: comfy.utils.repeat_to_batch_size is gone. Update" in refused.error
    other = changed.run({"fix": {"class_type": "DeviceBridgeRingLseFix", "inputs": {"enabled": False}}})
    assert other.status == "success", other.error
