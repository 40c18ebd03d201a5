"""The page in the real ComfyUI and a real browser, in both of its renderers: a training watched, stopped, resumed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.server import ROOT, Server
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from devicebridge.tests.workflows import from_folder, read_workflow, set_values

pytestmark = pytest.mark.comfy

EXAMPLE = ROOT / "example_workflows" / "train_a_LoRA_over_two_GPUs.json"
STEPS = 400
_READY = "() => !!(window.app?.extensionManager && window.LiteGraph?.registered_node_types?.DeviceBridgeTrainLora)"


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("page_models") / "tiny_flux2", "flux2")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dataset(tmp_path_factory.mktemp("page_data") / "tiny_images")


@pytest.fixture(scope="session")
def chromium() -> str:
    """A Chromium, and the library that drives it."""
    pytest.importorskip("playwright", reason="needs playwright: pip install playwright")
    found = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("needs chromium: install it, or name it in CHROMIUM")
    return found


@contextmanager
def _open_page(chromium: str, server: Server, profile: Path) -> Iterator[Any]:
    """ComfyUI's page, ready; afterwards nothing of this pack has failed in it."""
    from playwright.sync_api import sync_playwright

    faults: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            str(profile),
            executable_path=chromium,
            headless=True,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            viewport={"width": 1600, "height": 1000},
        )
        page = browser.pages[0]
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: _note(line, faults))
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_function(_READY)
        try:
            yield page
        finally:
            page.screenshot(path=profile.with_suffix(".png"))  # as it was when something failed
            browser.close()
    assert faults == []


def _note(line: Any, faults: list[str]) -> None:
    if line.type == "error" and "/extensions/devicebridge/" in f"{line.text} {line.location}":
        faults.append(line.text)


def _workflow(pipeline: Path, dataset: Path, name: str) -> dict[str, Any]:
    values = {
        **from_folder(pipeline),
        "TrainingDataset.folder": str(dataset),
        "TrainingDataset.resolutions": "32",
        "CacheCaptionsAndLatents.dtype": "float32",
        "TrainLora.rank": 2,
        "TrainLora.alpha": 2.0,
        "TrainLora.learning_rate": 0.01,
        "TrainLora.steps": STEPS,
        "TrainLora.name": name,
    }
    return set_values(read_workflow(EXAMPLE), {f"DeviceBridge{key}": value for key, value in values.items()})


def _open_tab(page: Any, run: str) -> Any:
    page.locator(".devicebridge-tab-button").click()
    panel = page.locator(".db-panel")
    panel.wait_for()
    return panel


def _fact(page: Any, name: str) -> str:
    return page.locator(f'.db-panel dd[data-fact="{name}"]').inner_text()


def _wait_for_state(page: Any, run: str, state: str) -> None:
    page.locator(f'.db-panel [data-run="{run}"] button[aria-label="{run}, {state}"]').wait_for(timeout=120_000)


def _wait_for_change(page: Any, script: str) -> None:
    before = page.evaluate(script)
    page.wait_for_function(f"(before) => {{ const now = {script}; return now && now !== before }}", arg=before)


@pytest.mark.parametrize("has_vue_nodes", [False, True], ids=["canvas", "vue"])
def test_a_template_is_run_watched_stopped_reloaded_resumed_and_finished(
    chromium: str, server: Server, pipeline: Path, dataset: Path, tmp_path: Path, has_vue_nodes: bool
) -> None:
    server.post("/api/settings/Comfy.TutorialCompleted", True)
    server.post("/api/settings/Comfy.VueNodes.Enabled", has_vue_nodes)
    run = f"page_{'vue' if has_vue_nodes else 'canvas'}"
    loss, memory = (
        "document.querySelector('.db-panel dd[data-fact=Loss]')?.textContent",
        "document.querySelector('[data-card=host] .db-bar')?.getAttribute('aria-label')",
    )
    with _open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(graph) => window.app.loadGraphData(graph)", _workflow(pipeline, dataset, run))
        _open_tab(page, run)
        page.get_by_test_id("queue-button").click()
        _wait_for_state(page, run, "running")
        _wait_for_change(page, loss)
        _wait_for_change(page, memory)
        on_node = page.locator(".db-node-facts", has_text=f"{run}: running")
        on_node.wait_for()
        assert page.locator(".db-node svg path.db-line").first.get_attribute("d")
        page.get_by_role("button", name="Stop (saves)").click()
        _wait_for_state(page, run, "stopped")
        step = int(_fact(page, "Step").split()[0])
        assert 0 < step < STEPS

        page.reload()
        page.wait_for_function(_READY)
        if not page.locator(".db-panel").is_visible():
            _open_tab(page, run)
        _wait_for_state(page, run, "stopped")
        assert _fact(page, "Step") == f"{step} of {STEPS}"
        assert page.locator(".db-loss svg path.db-line").get_attribute("d")
        page.get_by_role("button", name="Resume").click()
        _wait_for_state(page, run, "running")
        _wait_for_state(page, run, "finished")
        assert _fact(page, "Step") == f"{STEPS} of {STEPS}"

        page.get_by_role("button", name="use the LoRA of as the run ended").click()
        page.get_by_text(f"{run}.safetensors is among the LoRAs").wait_for()
        last = f"step {STEPS}"
        page.get_by_role("button", name=f"delete the checkpoint of {last}").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        page.get_by_role("button", name=f"delete the checkpoint of {last}").wait_for(state="detached")
    folder = server.base / "output" / "devicebridge" / run
    used = server.base / "models" / "loras" / f"{run}.safetensors"
    assert used.read_bytes() == (folder / f"{run}.safetensors").read_bytes()
    assert not (folder / "checkpoints" / f"step-{STEPS:06d}").exists()
    steps = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps if event["kind"] == "step"] == list(range(1, STEPS + 1))
