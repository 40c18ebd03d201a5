"""The list of models for users says what the rows in families/comfy/ say."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from devicebridge.families.comfy.registry import NATIVE_MODELS

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "split_models.md"
_SPLIT = re.compile(r"^\| `(\w+)` \| .+ \| (stream|relay) \| (yes|no) \| (yes|no) \|$", re.MULTILINE)
_REFUSED = re.compile(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def test_every_class_is_listed_with_its_transport_overlap_and_tensor() -> None:
    """Counted, since two classes share a name."""
    found = Counter(_SPLIT.findall(PAGE.read_text(encoding="utf-8").partition("## Refused")[0]))
    rows = [row for row in NATIVE_MODELS if not row.refusal]
    facts = ((row.class_name, row.transport, row.can_overlap, bool(row.tensor)) for row in rows)
    assert found == Counter((name, way, *("yes" if each else "no" for each in rest)) for name, way, *rest in facts)


def test_every_refused_class_is_listed_with_a_reason() -> None:
    found = _REFUSED.findall(PAGE.read_text(encoding="utf-8").partition("## Refused")[2])
    assert sorted(found) == sorted(row.class_name for row in NATIVE_MODELS if row.refusal)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_the_number_of_classes_is_true(name: str) -> None:
    count = sum(not row.refusal for row in NATIVE_MODELS)
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    assert re.findall(r"(\d+) (?:native|of its) model classes", text) == [str(count)]


def test_the_number_of_models_that_train_is_true() -> None:
    rows = json.loads((ROOT / "tests" / "assets" / "native_training.json").read_text(encoding="utf-8"))
    found = re.findall(r"\[(\d+) models\]\(docs/families", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert found == [str(sum("newer" not in row for row in rows.values()))]


def test_every_class_that_trains_is_on_the_page_of_families() -> None:
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert not [row.class_name for row in NATIVE_MODELS if f"`{row.class_name}`" not in page]
    seen = json.loads((ROOT / "tests" / "assets" / "native_training.json").read_text(encoding="utf-8"))
    assert not [name for name in seen if f"| {name} |" not in page]
