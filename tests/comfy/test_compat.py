"""The ComfyUI at hand has all that the pack uses of it, and one that lacks something is refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
from devicebridge.compat import PARTS
from devicebridge.tests.comfy.workers import run_worker

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def told(comfyui: Path) -> dict[str, Any]:
    return run_worker("compat_worker.py", comfyui)[-1]


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


def test_the_node_concerned_refuses_the_log_names_it_and_another_runs(told: dict[str, Any]) -> None:
    assert "changed what DeviceBridge relies on here: comfy.utils.repeat_to_batch_size is gone. Update" in told["said"]
    (refused,) = re.findall(r"(DeviceBridge[\w, ]+) will not work", told["log"])
    assert refused.split(", ") == list(PARTS["split"])
    assert told["other"] == [None, "Off"]
