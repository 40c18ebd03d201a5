"""Workflow files, in the form that ComfyUI saves or in its API form, with inputs replaced."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def parse_setting(text: str) -> tuple[str, Any]:
    """ "NODE.INPUT=VALUE"; the value is JSON where it can be, else text.

    Raises: ValueError for another form.
    """
    name, is_set, value = text.partition("=")
    if not is_set or "." not in name:
        raise ValueError(f"--set {text!r} is not NODE.INPUT=VALUE; NODE is a node's number, type or title")
    try:
        return name.strip(), json.loads(value)
    except json.JSONDecodeError:
        return name.strip(), value


def read_workflow(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def set_values(graph: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a workflow with inputs replaced.

    Args:
        values: "<node>.<input>" -> value; a node by its id, its type or its title. A type stands for every such node.
    Raises: ValueError for a name that no node has.
    """
    changed = copy.deepcopy(dict(graph))
    for name, value in values.items():
        node_name, _, input_name = name.rpartition(".")
        nodes = _find_nodes(changed, node_name)
        if not nodes:
            raise ValueError(f"{name}: the workflow has no node {node_name!r}; it has {_known(changed)}")
        for node in nodes:
            _set_input(node, input_name, value, name)
    return changed


def _find_nodes(graph: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    if "nodes" in graph:
        return [node for node in graph["nodes"] if name in {str(node["id"]), node["type"], node.get("title")}]
    titled = {node_id: node.get("_meta", {}).get("title") for node_id, node in graph.items()}
    return [node for node_id, node in graph.items() if name in {node_id, node["class_type"], titled[node_id]}]


def _known(graph: Mapping[str, Any]) -> str:
    nodes = graph["nodes"] if "nodes" in graph else graph.values()
    return ", ".join(dict.fromkeys(str(node.get("type") or node.get("class_type")) for node in nodes))


def _set_input(node: dict[str, Any], input_name: str, value: Any, name: str) -> None:
    """In the saved form values are a list in the order of the widgets, and beside it, since 2026, a table by name."""
    if "class_type" in node and input_name in node["inputs"]:
        node["inputs"][input_name] = value
        return
    named = node.get("widgets_values_named", {})
    widgets = list(named) or [entry["name"] for entry in node.get("inputs", []) if "widget" in entry]
    values = node.get("widgets_values", [])
    if input_name not in widgets or len(widgets) != len(values):
        raise ValueError(f"{name}: the node has no such input that can be set")
    values[widgets.index(input_name)] = value
    if named:
        named[input_name] = value
