"""What tests of checkpoints share."""

import dataclasses

import pytest
from devicebridge.families.registry import FAMILIES
from devicebridge.tests.toy import TINY


@pytest.fixture
def tiny_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single files have no config, so their shapes must be those of a variant: make the tiny models variants."""
    for name, tiny in TINY.items():
        family, config = FAMILIES[name], tiny.transformer_config
        variant = dataclasses.replace(family.variants[0], name=f"tiny-{name}", transformer_config=config, caution="")
        monkeypatch.setitem(FAMILIES, name, dataclasses.replace(family, variants=(variant,)))
