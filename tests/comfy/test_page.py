"""The page in the real ComfyUI and a real browser, in both of its renderers: a training watched, stopped, resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from devicebridge.tests.comfy.browser import READY, keep_picture, open_page, open_tab
from devicebridge.tests.comfy.server import ROOT, Server
from devicebridge.tests.comfy.small_flux2 import original_weights, save_comfy_sized_pipeline
from devicebridge.tests.tiny_pipeline import save_tiny_dataset
from devicebridge.tests.waiting import until
from devicebridge.tests.workflows import read_workflow, set_values, training_values
from safetensors.torch import save_file

pytestmark = [pytest.mark.comfy, pytest.mark.usefixtures("short_texts_there")]

EXAMPLE = ROOT / "example_workflows" / "train_a_LoRA_over_two_GPUs.json"
TEMPLATES = sorted((ROOT / "example_workflows").glob("*.json"))
STEPS = 240  # enough for all that is looked at before Stop on a busy machine
SAMPLE_EVERY = 120
HEIGHT = "() => window.app.graph.nodes.find((each) => each.type === 'DeviceBridgeTrainingDataset').size[1]"
# Nodes of the template that lie over each other, by their titles.
OVERLAPS = """() => {
  const nodes = window.app.graph.nodes.filter((node) => node.type !== 'LoraLoaderModelOnly')
  const boxes = nodes.map((node) => [node.title, node.pos[0], node.pos[1] - 30, node.size[0], node.size[1] + 30])
  return boxes.flatMap(([a, x, y, w, h], i) => boxes.slice(i + 1)
    .filter(([, p, q, v, u]) => x < p + v && p < x + w && y < q + u && q < y + h).map(([b]) => `${a} / ${b}`))
}"""
PROMPTS_IN_A_HIGH_NODE = """async () => {
  const node = window.app.graph.nodes.find((each) => each.type === 'DeviceBridgeTrainLora')
  node.setSize([node.size[0], 1200])
  await new Promise((done) => setTimeout(done, 1000))
  return node.widgets.find((widget) => widget.name === 'sample_prompts').computedHeight ?? 0
}"""
# Whether a Load LoRA that was in the graph before offers a file.
LISTED = """(file) => {
  const loader = window.app.graph.nodes.find((node) => node.type === 'LoraLoaderModelOnly')
  return loader.widgets.find((widget) => widget.name === 'lora_name').options.values.includes(file)
}"""


IN_BOTH_RENDERERS = pytest.mark.parametrize(
    "has_vue_nodes", [pytest.param(False, id="canvas"), pytest.param(True, id="vue", marks=pytest.mark.long)]
)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_comfy_sized_pipeline(tmp_path_factory.mktemp("page_models") / "small_flux2")


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_dataset(tmp_path_factory.mktemp("page_data") / "tiny_images")


def _workflow(pipeline: Path, dataset: Path, name: str, steps: int = STEPS) -> dict[str, Any]:
    train = {"sample_prompts": "a red house", "sample_every": SAMPLE_EVERY, "name": name, "steps": steps}
    return set_values(read_workflow(EXAMPLE), training_values(pipeline, dataset, **train))


def _fact(page: Any, name: str) -> str:
    return page.locator(f'.db-panel dd[data-fact="{name}"]').inner_text()


def _wait_for_state(page: Any, run: str, state: str) -> None:
    page.locator(f'.db-panel [data-run="{run}"] button[aria-label="{run}, {state}"]').wait_for(timeout=400_000)


def _wait_for_change(page: Any, script: str) -> None:
    before = page.evaluate(script)
    page.wait_for_function(f"(before) => {{ const now = {script}; return now && now !== before }}", arg=before)


@IN_BOTH_RENDERERS
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
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(graph) => window.app.loadGraphData(graph)", _workflow(pipeline, dataset, run))
        open_tab(page)
        page.get_by_test_id("queue-button").click()
        _wait_for_state(page, run, "running")
        _wait_for_change(page, loss)
        _wait_for_change(page, memory)
        on_node = page.locator(".db-node-facts", has_text=f"{run}: running")
        on_node.wait_for()
        assert page.locator(".db-node svg path.db-line").first.get_attribute("d")
        first = "document.querySelector('.db-samples img')?.src"
        page.wait_for_function(f"() => {first}")
        page.get_by_role("button", name="Sample now").click()
        _wait_for_change(page, first)
        page.wait_for_function("() => document.querySelector('.db-samples img').naturalWidth > 0")
        page.locator(".db-samples figcaption", has_text="a red house").wait_for()
        keep_picture(page, f"training_{'vue' if has_vue_nodes else 'canvas'}")
        assert page.evaluate(HEIGHT) < 400, "of what is shown, not of all inputs"
        page.get_by_role("button", name="Stop (saves)").click()
        _wait_for_state(page, run, "stopped")
        step = int(_fact(page, "Step").split()[0])
        assert 0 < step < STEPS
        page.reload()
        page.wait_for_function(READY)
        open_tab(page)
        _wait_for_state(page, run, "stopped")
        assert _fact(page, "Step") == f"{step} of {STEPS}"
        assert page.locator(".db-loss svg path.db-line").get_attribute("d")
        assert page.get_by_role("spinbutton", name="Steps").input_value() == str(STEPS)
        last = STEPS if has_vue_nodes else step + 5
        page.get_by_role("spinbutton", name="Steps").fill(str(last))
        page.get_by_role("button", name="Resume" if has_vue_nodes else "Continue with these settings").click()
        _wait_for_state(page, run, "running")
        _wait_for_state(page, run, "finished")
        assert _fact(page, "Step") == f"{last} of {last}"
        page.evaluate("(graph) => window.app.loadGraphData(graph)", _workflow(pipeline, dataset, run, last))
        page.get_by_test_id("queue-button").click()
        until(lambda: not any(server.get("/queue").values()), 60)
        assert _last_texts(server)[-1].startswith("Finished before: nothing was trained.")
        assert [each["run"] for each in server.get("/devicebridge/state")["runs"] if run in each["run"]] == [run]
        page.evaluate("() => window.app.graph.add(window.LiteGraph.createNode('LoraLoaderModelOnly'))")
        page.get_by_role("button", name="use the LoRA of final LoRA").click()
        page.get_by_text(f"Copied to models/loras: {run}.safetensors").first.wait_for()
        page.wait_for_function(LISTED, arg=f"{run}.safetensors")
        if not has_vue_nodes:  # which draws advanced inputs, too
            assert page.evaluate(OVERLAPS) == []
        assert page.evaluate(PROMPTS_IN_A_HIGH_NODE) <= 100
        deletes = page.get_by_role("button", name=f"delete the checkpoint of step {last}")
        deletes.click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        deletes.wait_for(state="detached")
    folder = server.base / "output" / "devicebridge" / run
    used = server.base / "models" / "loras" / f"{run}.safetensors"
    assert used.read_bytes() == (folder / f"{run}.safetensors").read_bytes()
    assert not (folder / "checkpoints" / f"step-{last:06d}").exists()
    _load_in_a_stock_graph(server, pipeline, used.name)
    steps = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in steps if event["kind"] == "step"] == list(range(1, last + 1))


def _last_texts(server: Server) -> list[str]:
    newest = max(server.get("/history").values(), key=lambda entry: entry["prompt"][0])
    assert newest["status"]["status_str"] == "success", newest["status"]
    return [output["text"][0] for output in newest["outputs"].values() if "lora" in output]


def _load_in_a_stock_graph(server: Server, pipeline: Path, lora: str) -> None:
    """Core's own loaders take the file, with every key of it."""
    models = server.base / "models" / "diffusion_models"
    models.mkdir(parents=True, exist_ok=True)
    save_file(original_weights(pipeline / "transformer"), models / "page_flux2.safetensors")
    unet = {"unet_name": "page_flux2.safetensors", "weight_dtype": "default"}
    graph = {
        "load": {"class_type": "UNETLoader", "inputs": unet},
        "lora": {
            "class_type": "LoraLoaderModelOnly",
            "inputs": {"model": ["load", 0], "lora_name": lora, "strength_model": 1.0},
        },
        "save": {"class_type": "ModelSave", "inputs": {"model": ["lora", 0], "filename_prefix": "page_merged"}},
    }
    seen = server.log.stat().st_size
    server.succeed(graph)
    assert b"lora key not loaded" not in server.log.read_bytes()[seen:]


_LOADED = """async (address) => {
  const graph = await (await fetch(address)).json()
  await window.app.loadGraphData(graph)
  const { output } = await window.app.graphToPrompt()
  const known = window.LiteGraph.registered_node_types
  return { output, unknown: window.app.graph.nodes.map((node) => node.type).filter((type) => !known[type]) }
}"""


def test_every_template_is_shown_with_its_picture_and_opens_as_what_the_suite_runs(chromium, server, tmp_path):
    server.post("/api/settings/Comfy.TutorialCompleted", True)
    server.post("/api/settings/Comfy.VueNodes.Enabled", False)
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("() => window.app.extensionManager.setting.set('Comfy.Workflow.ShowMissingModelsWarning', false)")
        for path in TEMPLATES:
            found = page.evaluate(_LOADED, f"/api/workflow_templates/devicebridge/{path.name}")
            twin = json.loads((ROOT / "tests" / "assets" / f"{path.stem}_api.json").read_text(encoding="utf-8"))
            assert found["unknown"] == []
            for node in found["output"].values():
                node["inputs"].pop("codec", None)  # SaveVideo's hidden one, which comfy-cli does not send
            assert {key: (node["class_type"], node["inputs"]) for key, node in found["output"].items()} == {
                key: (node["class_type"], node["inputs"]) for key, node in twin.items()
            }, path.stem
        page.evaluate("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
        dialog = page.get_by_role("dialog")
        dialog.get_by_text("DeviceBridge", exact=True).first.click()
        for path in TEMPLATES:
            dialog.get_by_text(path.stem, exact=True).first.wait_for()
        pictures = "[...document.querySelectorAll('[role=dialog] img')]"  # from blobs: the address tells nothing
        loaded = f"{pictures}.filter((each) => each.naturalWidth === 480).length"
        page.wait_for_function(f"(count) => {loaded} >= count", arg=len(TEMPLATES))


def test_advanced_inputs_fold_on_the_canvas_and_every_field_of_text_has_its_name(
    chromium: str, server: Server, pipeline: Path, dataset: Path, tmp_path: Path
) -> None:
    server.post("/api/settings/Comfy.TutorialCompleted", True)
    server.post("/api/settings/Comfy.VueNodes.Enabled", False)
    visible = "window.app.graph.nodes.find((node) => node.type === 'DeviceBridgeTrainLora')"
    count = f"{visible}.widgets.filter((widget) => {visible}.isWidgetVisible(widget)).length"
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(graph) => window.app.loadGraphData(graph)", _workflow(pipeline, dataset, "folded"))
        assert page.evaluate(count) <= 16
        before = page.evaluate("async () => (await window.app.graphToPrompt()).output")
        page.evaluate(f"{visible}.widgets.find((widget) => widget.name === 'advanced').callback()")
        assert page.evaluate(count) >= 33
        assert page.evaluate("async () => (await window.app.graphToPrompt()).output") == before
        for name in ("targets", "sample_prompts"):
            assert page.locator(f"textarea[placeholder^='{name}']").count() >= 1


_LINKED = """async (kind) => {
  const text = window.LiteGraph.createNode(kind)
  window.app.graph.add(text)
  const node = window.app.graph.nodes.find((each) => each.type === 'DeviceBridgeTrainingDataset')
  text.connect(0, node, node.inputs.findIndex((input) => input.name === 'folder'))
  const saved = window.app.graph.serialize()
  await window.app.loadGraphData(saved)
  return (await window.app.graphToPrompt()).output[node.id].inputs.folder
}"""


@IN_BOTH_RENDERERS
def test_a_text_is_connected_to_a_list_of_folders_and_a_number_is_not(
    chromium: str, server: Server, pipeline: Path, dataset: Path, tmp_path: Path, has_vue_nodes: bool
) -> None:
    server.post("/api/settings/Comfy.TutorialCompleted", True)
    server.post("/api/settings/Comfy.VueNodes.Enabled", has_vue_nodes)
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(graph) => window.app.loadGraphData(graph)", _workflow(pipeline, dataset, "linked"))
        assert page.evaluate(_LINKED, "PrimitiveInt") == str(dataset)
        assert isinstance(page.evaluate(_LINKED, "PrimitiveString"), list), "the link is still there after a reload"


def test_nodes_and_page_speak_chinese_where_comfyui_does(chromium, server, pipeline, dataset, tmp_path):
    server.post("/api/settings/Comfy.TutorialCompleted", True)
    server.post("/api/settings/Comfy.Locale", "zh")
    try:
        with open_page(chromium, server, tmp_path / "profile") as page:
            page.evaluate("(graph) => window.app.loadGraphData(graph)", _workflow(pipeline, dataset, "chinese"))
            open_tab(page)
            page.get_by_role("heading", name="显卡").wait_for()
            titles = page.evaluate("() => window.app.graph.nodes.map((node) => node.title)")
            assert "训练 LoRA（多 GPU）" in titles
    finally:
        server.post("/api/settings/Comfy.Locale", "en")
