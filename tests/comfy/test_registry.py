"""What the registry's tools say of the pack, and what its archive holds."""

import json
import os
import re
import runpy
import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import pytest
import tomlkit
from devicebridge.tests.comfy.browser import open_page
from devicebridge.tests.comfy.server import ROOT, Server

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that would be committed, in a repository of their own: the tools look at what git tracks."""
    if shutil.which("comfy") is None:
        pytest.skip("needs comfy-cli: pip install comfy-cli")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout of the pack")
    listed = _run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], ROOT).stdout
    copy = tmp_path_factory.mktemp("registry") / "devicebridge"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "all"]):
        _run(["git", *command], copy)
    return copy


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DO_NOT_TRACK": "1", "NO_COLOR": "1", "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, env=environment)


def test_the_registrys_check_finds_nothing(repository: Path) -> None:
    done = _run(["comfy", "--skip-prompt", "--no-json", "node", "validate"], repository)
    assert "All validation checks passed" in done.stdout, done.stdout + done.stderr
    assert "arning" not in done.stdout + done.stderr, done.stdout + done.stderr


def test_the_archive_holds_the_pack_and_nothing_else(repository: Path) -> None:
    _run(["comfy", "--skip-prompt", "--no-json", "node", "pack"], repository)
    with zipfile.ZipFile(repository / "node.zip") as archive:
        names = set(archive.namelist())
    needed = {"__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md", "nodes/train.py"}
    needed |= {"web/docs/DeviceBridgeTrainLora.md", "example_workflows/train_a_LoRA_over_two_GPUs.json", "bootstrap.py"}
    assert not needed - names, needed - names
    kinds = {path.parent.name: {".py"} for path in ROOT.glob("*/__init__.py")}
    kinds = {name: each for name, each in kinds.items() if name not in ("tests", "benchmarks", "scripts")}
    kinds |= {"web": {".js", ".css", ".md"}, "locales": {".json"}, "subgraphs": {".json"}, "examples": {".toml"}}
    kinds |= {"example_workflows": {".json", ".jpg"}, "cli": {".py", ".toml"}}
    found: dict[str, set[str]] = {}
    for path in (Path(name) for name in names if not name.endswith("/")):
        found.setdefault("/".join(path.parts[:-1][:1]), set()).add(path.suffix or path.name)
    top = found.pop("")
    assert top == {".py", ".toml", ".txt", ".md", "LICENSE"}
    assert {name for name in names if "/" not in name and name.endswith(".md")} == {"README.md"}
    assert found == kinds


def test_the_registry_is_told_what_people_look_for(repository: Path) -> None:
    told = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    name, text = told["tool"]["comfy"]["DisplayName"].lower(), told["project"]["description"].lower()
    for words in ("multi-gpu", "two gpus", "lora training"):
        assert words in name and words in text


def test_workflows_of_the_repository_test_both_systems_and_publish_a_new_version() -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml: pip install pyyaml")
    folder = ROOT / ".github" / "workflows"
    tests, publish = (yaml.safe_load((folder / f"{name}.yml").read_text()) for name in ("tests", "publish"))
    assert tests["jobs"]["unit"]["strategy"]["matrix"]["os"] == ["ubuntu-latest", "windows-latest"]
    steps = publish["jobs"]["publish"]["steps"]
    assert publish[True]["push"]["paths"] == ["pyproject.toml"]  # "on" is a truth value in YAML
    assert re.fullmatch(r"Comfy-Org/publish-node-action@[0-9a-f]{40}", steps[-1]["uses"])
    assert "version" in steps[-1]["if"]
    assert "event.before" in steps[1]["env"]["BEFORE"] and steps[0]["with"]["fetch-depth"] == 0  # all that was pushed


def test_the_picture_holds_the_workflow_that_it_shows() -> None:
    """As the page reads it: the text chunk named "workflow"."""
    script = runpy.run_path(str(ROOT / "scripts" / "workflow_picture.py"))
    data, texts, at = script["PICTURE"].read_bytes(), {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"tEXt":
            key, _, text = data[at + 8 : at + 8 + size].partition(b"\0")
            texts[key.decode("latin-1")] = text.decode("latin-1")
        at += size + 12
    template = ROOT / "example_workflows" / f"{script['NAME']}.json"
    assert json.loads(texts["workflow"]) == json.loads(template.read_text(encoding="utf-8"))
    assert len(data) < 60_000


def test_a_blueprint_is_offered_and_has_the_sockets_of_its_nodes(server: Server) -> None:
    offered = {each["name"]: (key, each) for key, each in server.get("/global_subgraphs").items()}
    files = sorted((ROOT / "subgraphs").glob("*.json"))
    known = server.get("/object_info")
    for path in files:
        key, entry = offered[path.stem]
        assert entry["info"] == {"node_pack": "custom_nodes.devicebridge"}
        (inner,) = json.loads(server.get(f"/global_subgraphs/{key}")["data"])["definitions"]["subgraphs"]
        for node in inner["nodes"]:
            sockets = known[node["type"]]["input"]
            assert len(node["widgets_values"]) <= sum(map(len, sockets.values())), node["type"]
            assert {each["name"] for each in node["inputs"]} <= {*sockets["required"], *sockets.get("optional", {})}
            assert [each["type"] for each in node["outputs"]] == known[node["type"]]["output"]
    assert files


@pytest.mark.long
def test_the_page_opens_blueprint_and_app(server: Server, chromium: str, tmp_path: Path) -> None:
    (path,) = (ROOT / "subgraphs").glob("*.json")
    blueprint = json.loads(path.read_text(encoding="utf-8"))
    template = json.loads((ROOT / "example_workflows/train_a_LoRA_over_two_GPUs.json").read_text(encoding="utf-8"))
    server.post("/api/settings/Comfy.TutorialCompleted", True)
    with open_page(chromium, server, tmp_path / "profile") as page:
        page.evaluate("(workflow) => window.app.loadGraphData(workflow)", blueprint)
        prompt = page.evaluate("async () => (await window.app.graphToPrompt()).output")
        kinds = {each["class_type"]: each["inputs"] for each in prompt.values()}
        assert set(kinds) == {"DeviceBridgeLoadDiffusionModelSplit", "CLIPLoader", "VAELoader"}
        assert kinds["DeviceBridgeLoadDiffusionModelSplit"]["way"] == "auto" and kinds["CLIPLoader"]["type"] == "flux2"
        page.evaluate("(workflow) => window.app.loadGraphData(workflow)", template)
        page.evaluate("() => window.app.extensionManager.command.execute('Comfy.ToggleLinear')")
        for _, name in template["extra"]["linearData"]["inputs"]:
            page.get_by_text(name, exact=True).first.wait_for()
