"""The page for a new user, for a keyboard, a screen reader, light and dark; a folder of images; what it asks."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.config.job import make_job
from devicebridge.runs.queue import MEMORY, JobQueue
from devicebridge.runs.record import recorded_run
from devicebridge.runs.store import RunStore
from devicebridge.tests.comfy.browser import CONTRASTS, FOCUSABLE, keep_picture, open_page, open_tab
from devicebridge.tests.comfy.server import ROOT, Server
from devicebridge.tests.comfy.small_flux2 import original_weights, save_comfy_sized_pipeline
from devicebridge.tests.comfy.test_templates import FLUX, over_two_cards, with_stand_ins
from devicebridge.tests.tiny_pipeline import save_tiny_dataset, save_tiny_pipeline
from devicebridge.tests.workflows import read_workflow, set_values
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy

TEMPLATE = "train_a_LoRA_over_two_GPUs"
_NAMELESS = re.compile(r"^\s*- (button|link|checkbox|slider|textbox|combobox|img|group|region|progressbar)(:|$| \[)")


@pytest.fixture
def settings(server: Server) -> Iterator[None]:
    """A user who knows ComfyUI, with the canvas."""
    for name, value in (("TutorialCompleted", True), ("VueNodes.Enabled", False)):
        server.post(f"/api/settings/Comfy.{name}", value)
    yield
    server.post("/api/settings/Comfy.ColorPalette", "dark")


def _put_stand_ins(models: Path, pipeline: Path) -> list[Path]:
    """Tiny models under the names that the template's lists say; as diffusers' folders, which tell their sizes."""
    model = models / "diffusers" / "flux2_dev_fp8mixed.safetensors"
    encoder = models / "text_encoders" / "mistral_3_small_flux2_bf16.safetensors"
    vae = models / "vae" / "flux2-vae.safetensors"
    shutil.copytree(pipeline, model)
    shutil.copytree(pipeline, encoder, ignore=shutil.ignore_patterns("transformer", "vae"))
    shutil.copytree(pipeline / "vae", vae)
    return [model, encoder, vae]


_COUNTED = """() => {
  window.counted = { clicks: 0, typed: '' }
  addEventListener('pointerdown', (event) => { window.counted.clicks += event.isTrusted }, true)
  const isLetter = (event) => event.isTrusted && event.key.length === 1
  addEventListener('keydown', (event) => { window.counted.typed += isLetter(event) ? event.key : '' }, true)
}"""
_PLACE = """(name) => {
  const node = window.app.graph.nodes.find((each) => each.type === 'DeviceBridgeTrainLoraSimple')
  const widget = node.widgets.find((each) => each.name === name)
  const place = [node.pos[0] + 0.7 * node.size[0], node.pos[1] + widget.last_y + 10]
  const [x, y] = window.app.canvas.ds.convertOffsetToCanvas(place)
  const corner = window.app.canvas.canvas.getBoundingClientRect()
  return [x + corner.left, y + corner.top]
}"""


def _open_template(page: Any, name: str) -> None:
    """Two clicks, in the dialog that a first start opens by itself."""
    page.evaluate(_COUNTED)
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("DeviceBridge", exact=True).first.click()
    dialog.get_by_text(name, exact=True).first.click()
    dialog.wait_for(state="detached")


@pytest.mark.parametrize(
    ("template", "word", "clicks", "run"),
    [pytest.param(TEMPLATE, "", 3, "my_lora", marks=pytest.mark.long), ("simple_training_FLUX.2", "cat", 4, "cat")],
)
def test_a_new_user_is_few_clicks_and_no_typed_path_from_the_first_training_step(
    chromium: str, server: Server, tmp_path: Path, template: str, word: str, clicks: int, run: str
) -> None:
    """The simple training: a folder of images, four clicks and one typed word."""
    made = _put_stand_ins(server.base / "models", save_tiny_pipeline(tmp_path / "tiny_flux2", "flux2"))
    images = server.base / "input" / "my_images"
    if not images.exists():
        made.append(save_tiny_dataset(images, num_images=3))
    server.post("/api/settings/Comfy.TutorialCompleted", False)
    server.post("/api/settings/Comfy.VueNodes.Enabled", False)
    server.run({"1": {"class_type": "TestSmallModel", "inputs": {"family": "", "file": "", "unet_config": ""}}})
    events = server.base / "output" / "devicebridge" / run / "events.jsonl"
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.route(f"**/workflow_templates/devicebridge/{template}.json", lambda route: _smaller(route, template))
        _open_template(page, template)
        if word:
            page.wait_for_timeout(1000)  # until the canvas has drawn the nodes in their place
            page.mouse.click(*page.evaluate(_PLACE, "trigger_word"))
            page.locator(".graphdialog input").fill("")
            page.keyboard.type(word)
            page.keyboard.press("Enter")
        page.get_by_test_id("queue-button").click()
        _wait_until(lambda: events.exists() and '"kind": "step"' in events.read_text(encoding="utf-8"), server)
        counted = page.evaluate("() => window.counted")
        if word:
            page.locator(".db-node-facts", has_text="running").wait_for()
            keep_picture(page, "simple_training")
    server.post("/interrupt", {})
    assert counted == {"clicks": clicks, "typed": word}
    _wait_until(lambda: not server.get("/queue")["queue_running"], server)
    for path in made:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _smaller(route: Any, template: str) -> None:
    """The template, with pictures that a CPU trains on; all that names files stays, but loaders of encoders, which the
    stand-in for the model brings."""
    small = {"TrainingDataset.resolutions": "32", "TrainLora.accumulation": 1, "LoadModelForTraining.dtype": "float32"}
    graph = read_workflow(ROOT / "example_workflows" / f"{template}.json")
    if template == TEMPLATE:
        route.fulfill(json=set_values(graph, {f"DeviceBridge{name}": value for name, value in small.items()}))
        return
    graph["nodes"] = [node for node in graph["nodes"] if not node["type"].endswith("Loader")]
    graph["links"] = []
    for node in graph["nodes"]:
        node["inputs"] = [{**each, "link": None} for each in node["inputs"]]
    route.fulfill(json=graph)


@pytest.mark.long
def test_a_new_user_is_three_clicks_from_the_first_picture_over_two_cards(chromium, server, tmp_path):
    """The page sends what the template says; emulated cards and tiny encoders stand in for what it names."""
    name, models = "sample_FLUX.2_over_two_GPUs", server.base / "models"
    pipeline = save_comfy_sized_pipeline(tmp_path / "small_flux2")
    (models / "diffusion_models").mkdir(exist_ok=True)
    save_file(original_weights(pipeline / "transformer"), models / "diffusion_models" / FLUX)
    files = {
        models / each["directory"] / each["name"]
        for node in read_workflow(ROOT / "example_workflows" / f"{name}.json")["nodes"]
        for each in node["properties"].get("models", [])
    }
    for file in files:
        file.parent.mkdir(exist_ok=True)
        save_file({"x": torch.zeros(1)}, file)
    server.post("/api/settings/Comfy.TutorialCompleted", False)

    def send(route: Any) -> None:
        asked = json.loads(route.request.post_data)
        asked["prompt"] = over_two_cards(with_stand_ins(asked["prompt"], "flux2"))
        route.continue_(post_data=json.dumps(asked))

    with open_page(chromium, server, tmp_path / "profile") as page:
        page.route("**/api/prompt", send)
        _open_template(page, name)
        page.get_by_test_id("queue-button").click()
        pictures = server.base / "output"
        _wait_until(lambda: list(pictures.glob("template_flux2*.png")), server)
        _wait_until(lambda: not server.get("/queue")["queue_running"], server)
        assert page.evaluate("() => window.counted") == {"clicks": 3, "typed": ""}
        keep_picture(page, "sampling_over_two_cards")
    newest = max(server.get("/history").values(), key=lambda entry: entry["prompt"][0])
    (shown,) = (output["blocks"] for output in newest["outputs"].values() if "blocks" in output)
    assert [card for card, _ in shown] == ["lazy:0", "lazy:1"]
    for file in files:
        file.unlink()


def _wait_until(is_true: Any, server: Server, timeout_s: float = 200.0) -> None:
    end, before = time.monotonic() + timeout_s, _errors(server)
    while not is_true():
        assert time.monotonic() < end and _errors(server) == before, server.log.read_text(encoding="utf-8")[-3000:]
        time.sleep(0.5)


def _errors(server: Server) -> int:
    return sum(entry["status"]["status_str"] == "error" for entry in server.get("/history").values())


# What stands beside the axis of losses that differ little, and the button of a run whose process starts.
_AXIS = """async () => {
  const { makePlot } = await import('/extensions/devicebridge/js/plot.js')
  const plot = makePlot('losses')
  plot.draw([{ name: 'a', points: [[1, 1.3801], [2, 1.3842]] }])
  return [...plot.element.querySelectorAll('text')].slice(0, 3).map((each) => each.textContent)
}"""
_STARTING = """async () => {
  const { state, hear } = await import('/extensions/devicebridge/js/state.js')
  const run = { run: 'again', state: 'stopped', can_resume: true, devices: [], step: 1, total: 2, message: '' }
  hear({ runs: [run], jobs: [{ id: '1', run: 'again', state: 'starting', devices: ['cpu'], why: '' }] })
  state.choice.run = 'again'
  hear({})
}"""
_SIMPLE = """() => {
  const node = window.LiteGraph.createNode('DeviceBridgeTrainLoraSimple')
  window.app.graph.add(node)
  return String(node.id)
}"""
_RUNNING = _STARTING.replace("'stopped'", "'running'")
_TELL = "([kind, detail]) => window.app.api.dispatchEvent(new CustomEvent(kind, { detail }))"


def test_the_tab_shows_what_a_node_does_before_there_is_a_run(chromium, server, settings, tmp_path):
    graph = read_workflow(ROOT / "example_workflows" / f"{TEMPLATE}.json")
    (node,) = (str(each["id"]) for each in graph["nodes"] if each["type"] == "DeviceBridgeCacheCaptionsAndLatents")
    told = {"node": node, "kind": "phase", "step": 0, "total": 0, "values": {"name": "captions"}}
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(graph) => window.app.loadGraphData(graph)", graph)
        open_tab(page)
        page.evaluate(_TELL, ["devicebridge.event", told])
        page.locator(".db-working", has_text="Cache Captions and Latents: captions").wait_for()
        progress = {"kind": "progress", "step": 3, "total": 40, "values": {"what": "captions"}}
        page.evaluate(_TELL, ["devicebridge.event", {**told, **progress}])
        page.locator(".db-working", has_text="captions 3/40").wait_for()
        page.evaluate(_TELL, ["execution_success", {}])
        page.locator(".db-working").wait_for(state="detached")
        for end in ("reconnected", _RUNNING):  # the end was not heard; a run of the node tells more
            page.evaluate(_TELL, ["devicebridge.event", {**told, "node": page.evaluate(_SIMPLE)}])
            page.locator(".db-working", has_text="captions").wait_for()
            page.evaluate(_TELL, [end, {}]) if end == "reconnected" else page.evaluate(end)
            page.locator(".db-working").wait_for(state="detached")
        low, middle, high = page.evaluate(_AXIS)
        assert len({low, middle, high}) == 3
        page.evaluate(_STARTING)
        page.locator(".db-run .db-buttons", has_text="starting").wait_for()
        assert page.locator(".db-run").get_by_role("button", name="Resume").count() == 0


# What a training node's button sends to the queue.
_PLANNED = """async (type) => {
  const { api } = await import('/scripts/api.js')
  const node = window.app.graph.nodes.find((each) => each.type === type)
  const sent = new Promise((done) => {
    api.queuePrompt = async (number, { output }) => done([output[node.id], output])
  })
  node.widgets.find((each) => each.name === 'plan').callback()
  return sent
}"""


def test_a_training_nodes_button_plans_it_without_its_encoders(chromium, server, settings, tmp_path):
    with open_page(chromium, server, tmp_path / "profile") as page:
        for template, node in ((TEMPLATE, "TrainLora"), ("simple_training_SDXL", "TrainLoraSimple")):
            graph = read_workflow(ROOT / "example_workflows" / f"{template}.json")
            page.evaluate("(graph) => window.app.loadGraphData(graph)", graph)
            own, sent = page.evaluate(_PLANNED, f"DeviceBridge{node}")
            kinds = sorted(each["class_type"].removeprefix("DeviceBridge") for each in sent.values())
            if node == "TrainLora":
                assert kinds == ["LoadModelForTraining", "PlanTraining", "Quantize", "TrainingDataset"]
                assert (own["class_type"], own["inputs"]["cards"]) == ("DeviceBridgePlanTraining", "")
                assert own["inputs"]["accumulation"] == 4
            else:
                assert kinds == [node] and own["inputs"]["plan_only"] is True and own["inputs"]["quality"] == "normal"


@contextmanager
def _full_panel(server: Server, name: str, num_waiting: int = 2) -> Iterator[Path]:
    """A run that seems to be under way, with curves, samples and checkpoints; jobs that wait; a folder of images."""
    root = server.base / "output" / "devicebridge"
    store = RunStore(root)
    queue = JobQueue(store, server.base / "user" / MEMORY, lambda job: None)
    run = root / name
    (run / "samples").mkdir(parents=True)
    for step in (0, 50):
        for index in (0, 1):
            Image.new("RGB", (64, 64), (90 + step, 80, 160)).save(run / "samples" / f"{step:06d}_{index}.png")
    folder = run / "checkpoints" / "step-000050"
    folder.mkdir(parents=True)
    (folder / f"{name}.safetensors").write_bytes(b"a lora")
    with recorded_run(run, _job(run), ["cpu", "host"]):
        _tell(run, [{"kind": "phase", "name": "training", "blocks": [["cpu", 4], ["host", 2]]}])
        parts = {"weights": 4e9, "lora": 1e8, "kept": 5e8, "other": 1e8}
        _tell(run, [{"kind": "forecast", "devices": {"host": {"bytes": 5e9}}, "parts": {"host": parts}}])
        _tell(run, [{"kind": "memory", "host": {"allocated": 3.9, "peak": 4.4, "reserved": 4.6}}])
        for step in (0, 50):
            told = [{"file": f"{step:06d}_{index}.png", "prompt": f"prompt {index}"} for index in (0, 1)]
            _tell(run, [{"kind": "sample", "step": step, **each} for each in told])
        _tell(run, [_step(step) for step in range(1, 60)] + [{"kind": "eval", "step": 50, "loss": 0.4}])
        jobs = [_job(root / f"{name}_{number}") for number in range(2, 2 + num_waiting)]
        waiting = [queue.add(job, ["cpu"], is_resumed=False) for job in jobs]
        images = save_tiny_dataset(server.base / "input" / f"{name}_images", num_images=3)
        (images / "image_2.txt").unlink()
        try:
            yield run
        finally:
            for job in waiting:
                queue.remove(job.id)
            shutil.rmtree(images)
    shutil.rmtree(run)


def _job(folder: Path) -> Any:
    return make_job(
        {
            "model": {"path": str(folder / "model")}, "data": {"folders": [{"path": str(folder / "data")}]},
            "train": {"steps": 100}, "output": {"folder": str(folder)},
        }
    )  # fmt: skip


def _step(step: int) -> dict[str, Any]:
    loss = 0.3 + 1 / (step + 1)
    return {"kind": "step", "step": step, "total": 100, "loss": loss, "learning_rate": 1e-4, "elapsed_s": 0.5}


def _tell(run: Path, events: list[dict[str, Any]]) -> None:
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def _open_all(page: Any, run: str) -> None:
    open_tab(page)
    page.locator(f'.db-panel [data-run="{run}"] .db-name').click()
    page.get_by_text("Dataset: captions and buckets").click()
    page.get_by_label("dataset folder").select_option(f"{run}_images")
    page.locator(".db-captions li").nth(2).wait_for()
    page.locator(".db-samples img").first.wait_for()


@pytest.mark.long
def test_every_control_has_a_name_and_a_key_and_every_text_stands_out_in_both_themes(
    chromium: str, server: Server, settings: None, tmp_path: Path
) -> None:
    with _full_panel(server, "everybody"), open_page(chromium, server, tmp_path / "profile") as page:
        _open_all(page, "everybody")
        told = page.locator(".db-panel").aria_snapshot()
        assert [line for line in told.splitlines() if _NAMELESS.match(line)] == []
        for role in ("button", "checkbox", "slider", "textbox", "combobox", "img", "region", "progressbar", "link"):
            assert re.search(rf"- '?{role} ", told), role
        expected = page.evaluate(f"() => document.querySelectorAll(`{FOCUSABLE}`).length")
        assert expected > 20 and _reached_by_tab(page) == expected
        for theme in ("dark", "light"):
            page.evaluate("(theme) => app.extensionManager.setting.set('Comfy.ColorPalette', theme)", theme)
            page.wait_for_timeout(500)
            contrasts = page.evaluate(CONTRASTS)
            assert len(contrasts) > 60
            assert [(text, ratio) for text, ratio in contrasts if ratio < 4.5] == [], theme
            # For somebody who looks at it: PAGE_PICTURES names a folder.
            folder = os.environ.get("PAGE_PICTURES")
            if folder:
                page.screenshot(path=Path(folder) / f"{theme}.png")


def _reached_by_tab(page: Any) -> int:
    """Controls of the panel that Tab comes to, one after the other, each with a visible mark."""
    page.locator(FOCUSABLE).first.focus()
    seen = 0
    inside = "() => !!document.activeElement?.closest('.db-panel')"
    while page.evaluate(inside) and seen < 200:
        seen += 1
        if seen == 2:
            style = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
            assert style != "none"
        page.keyboard.press("Tab")
    return seen


def test_a_caption_is_edited_in_the_page_and_the_next_image_is_ready(chromium, server, settings, tmp_path):
    images = save_tiny_dataset(server.base / "input" / "page_images", num_images=3)
    (images / "image_1.txt").unlink()
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate(
            """(folder) => {
          const node = window.LiteGraph.createNode('DeviceBridgeTrainingDataset')
          window.app.graph.add(node)
          const set = (name, value) => { node.widgets.find((widget) => widget.name === name).value = value }
          set('folder', folder)
          set('trigger_word', 'ohwx')
          set('resolutions', '64')
          node.widgets.find((widget) => widget.name === 'captions').callback()
        }""",
            "page_images",
        )
        page.get_by_text("3 images, 1 without a caption").wait_for()
        assert page.get_by_text(re.compile(r"buckets: 64 × 64 \(2\), 48 × 80 \(1\)")).count() == 1
        rows = page.locator(".db-captions li")
        assert rows.nth(0).get_attribute("data-file") == "image_1.png"
        page.wait_for_function("() => document.querySelector('.db-captions img').naturalWidth > 0")
        page.get_by_label("caption of image_1.png", exact=True).fill("a new picture")
        page.keyboard.press("Enter")
        page.get_by_text("trained as: ohwx, a new picture").wait_for()
        page.get_by_text("3 images, 0 without a caption").wait_for()
        assert (images / "image_1.txt").read_text(encoding="utf-8") == "a new picture\n"
        assert page.evaluate("() => document.activeElement.getAttribute('aria-label')") == "caption of image_0.png"
        (images / "image_0.txt").write_text("somebody else's", encoding="utf-8")
        page.keyboard.type("mine")
        page.get_by_label("save the caption of image_0.png").click()
        page.get_by_text("was changed meanwhile").wait_for()
        assert (images / "image_0.txt").read_text(encoding="utf-8") == "somebody else's"
        assert server.get("/queue")["queue_pending"] == [], "Enter is no shortcut of the canvas here"
    shutil.rmtree(images)


def test_the_page_says_that_a_process_is_gone(chromium: str, server: Server, settings: None, tmp_path: Path) -> None:
    with _full_panel(server, "killed", num_waiting=0) as run, open_page(chromium, server, tmp_path / "profile") as page:
        _open_all(page, "killed")
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
        record["process"]["started"] -= 100  # another process has its number
        (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
        page.get_by_label("killed, crashed").wait_for(timeout=60_000)
        page.get_by_text("Its process is gone. Resume goes on from the newest checkpoint.").wait_for(timeout=10_000)
        assert page.get_by_role("button", name="Resume", exact=True).is_enabled()


@pytest.mark.long
def test_a_run_of_elsewhere_is_resumed_by_whoever_has_seen_its_folders(chromium, server, settings, tmp_path):
    run = server.base / "output" / "devicebridge" / "elsewhere"
    for name in ("model", "data", "checkpoints"):
        (run / name).mkdir(parents=True)
    with recorded_run(run, _job(run), ["cpu"]):
        pass
    with open_page(chromium, server, tmp_path / "profile") as page:
        open_tab(page)
        page.locator('.db-panel [data-run="elsewhere"] .db-name').click()
        for answer in ("Cancel", "Confirm"):
            page.get_by_role("button", name="Resume", exact=True).click()
            dialog = page.get_by_role("dialog")
            for key, name in {"model.path": "model", "data.folders.path": "data"}.items():
                dialog.get_by_text(f"{key}: {run / name}", exact=True).wait_for()
            assert server.get("/devicebridge/state")["jobs"] == []
            dialog.get_by_role("button", name=answer).click()
            dialog.wait_for(state="detached")
        page.get_by_role("button", name="Remove: elsewhere").wait_for()  # there is no such model
        (job,) = server.get("/devicebridge/state")["jobs"]
    assert server.post("/devicebridge/queue", {"job": job["id"], "what": "remove"}) == {"jobs": []}
    shutil.rmtree(run)


@pytest.mark.long
def test_while_training_the_page_asks_for_nothing_again_and_again(chromium, server, settings, tmp_path):
    """Two steps a second, with the tab open."""
    seconds = 12
    with _full_panel(server, "costly") as run, open_page(chromium, server, tmp_path / "profile") as page:
        _open_all(page, "costly")
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for step in range(60, 60 + 2 * seconds):
            memory = {"allocated": 3.9, "peak": 4.4 + step / 1e3, "reserved": 4.6}
            _tell(run, [_step(step), {"kind": "memory", "host": memory}])
            page.wait_for_timeout(500)
        page.locator('.db-panel dd[data-fact="Step"]', has_text="83 of 100").wait_for()
    ours = [url for url in asked if "/devicebridge/" in url]
    assert len(ours) <= seconds / 5 + 1, ours
