"""Gives every test the import name `devicebridge`, from this checkout."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parent.parent
_spec = importlib.util.spec_from_file_location("devicebridge_bootstrap", ROOT / "bootstrap.py")
assert _spec is not None and _spec.loader is not None
_bootstrap = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_bootstrap)
_bootstrap.load_pack()
