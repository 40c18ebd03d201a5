"""What the nodes and the page say in other languages: all of it, and nothing that is gone."""

import json
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LANGUAGES = sorted(folder.name for folder in (ROOT / "locales").iterdir())
_PLACE = re.compile(r"\bt\(\s*'((?:[^'\\]|\\.)*)'")  # of a text in the page's source


@pytest.fixture
def nodes(nodes: ModuleType) -> list[Any]:
    return [node.define_schema() for node in nodes.NODES]


def _read(language: str, name: str) -> dict[str, Any]:
    return json.loads((ROOT / "locales" / language / f"{name}.json").read_text(encoding="utf-8"))


def _texts_of(schema: Any) -> dict[str, Any]:
    """A node's texts in the shape of ComfyUI's nodeDefs.json."""
    inputs = {
        each.id: {"name": each.options.get("display_name") or each.id, "tooltip": each.options["tooltip"]}
        for each in schema.inputs
    }
    outputs = {str(n): {"name": each.display_name, "tooltip": each.tooltip} for n, each in enumerate(schema.outputs)}
    texts = {"display_name": schema.display_name, "description": schema.description}
    return {**texts, "inputs": inputs, "outputs": outputs}


def test_the_english_texts_are_those_of_the_nodes(nodes: list[Any]) -> None:
    """UPDATE_GOLDEN=1 writes them; a file that is older than the nodes would hide what they say now."""
    found = {schema.node_id: _texts_of(schema) for schema in nodes}
    path = ROOT / "locales" / "en" / "nodeDefs.json"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    assert _read("en", "nodeDefs") == found


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_node_has_a_short_help_page(nodes: list[Any], language: str) -> None:
    for schema in nodes:
        name = schema.node_id if language == "en" else f"{schema.node_id}/{language}"
        text = (ROOT / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")
        title = _read(language, "nodeDefs")[schema.node_id]["display_name"]
        assert text.startswith(f"# {title}\n") and len(text.split()) <= 300, name


@pytest.mark.parametrize("language", sorted(set(LANGUAGES) - {"en"}))
def test_every_node_and_socket_is_translated(nodes: list[Any], language: str) -> None:
    found = _read(language, "nodeDefs")
    assert found.keys() == {schema.node_id for schema in nodes}
    for schema in nodes:
        texts = found[schema.node_id]
        assert texts["display_name"] and texts["description"] != schema.description, schema.node_id
        assert list(texts["inputs"]) == [each.id for each in schema.inputs], schema.node_id
        assert list(texts["outputs"]) == [str(index) for index in range(len(schema.outputs))], schema.node_id
        own = {each.id: each.options["tooltip"] for each in schema.inputs}
        own |= {str(index): each.tooltip for index, each in enumerate(schema.outputs)}
        for name, socket in {**texts["inputs"], **texts["outputs"]}.items():
            assert socket["name"] and socket["tooltip"] not in ("", own[name]), f"{schema.node_id}.{name}"


def _said_by_the_page() -> set[str]:
    sources = [ROOT / "web" / "devicebridge.js", *(ROOT / "web" / "js").glob("*.js")]
    return {text.replace("\\'", "'") for path in sources for text in _PLACE.findall(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_of_the_page_is_there_and_no_other(language: str) -> None:
    texts = _read(language, "main")["devicebridge"]
    assert texts.keys() == _said_by_the_page() and all(texts.values())
    if language == "en":
        assert all(text == shown for text, shown in texts.items())
    for text, shown in texts.items():
        assert set(re.findall(r"\{\w+\}", text)) == set(re.findall(r"\{\w+\}", shown)), text


def test_the_templates_are_under_the_packs_name_in_every_language() -> None:
    """Whatever the pack's folder is called; ComfyUI shows that otherwise."""
    for language in LANGUAGES:
        named = _read(language, "main")["templateWorkflows"]["category"]
        assert named == {"devicebridge": "DeviceBridge", "ComfyUI-DeviceBridge": "DeviceBridge"}
