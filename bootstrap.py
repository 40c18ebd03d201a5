"""Gives the pack one import name, `devicebridge`, wherever its folder lies and whatever it is called: ComfyUI names a
pack by its folder path. Other processes load this file by path and call `load_pack()`. The pack's root never joins
sys.path, where its `nodes` would hide ComfyUI's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "devicebridge"
ROOT = Path(__file__).resolve().parent


def load_pack() -> ModuleType:
    """Register this folder as the package `devicebridge` and return it; a second call returns the same module."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load the pack from {ROOT}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    return module
