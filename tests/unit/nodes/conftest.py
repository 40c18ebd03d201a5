"""A stand-in for ComfyUI, and the pack's nodes in it."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from devicebridge.tests import comfy_stub


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> comfy_stub.FakeHost:
    return comfy_stub.install(monkeypatch, tmp_path)


@pytest.fixture
def nodes(host: comfy_stub.FakeHost) -> ModuleType:
    return importlib.import_module("devicebridge.nodes")
