"""Name -> family: an explicit list, so that a reader sees what is supported and nothing is discovered at run time."""

from __future__ import annotations

from .flux1 import FLUX1
from .flux2 import FLUX2
from .spec import ModelFamily
from .wan import WAN

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in (FLUX2, FLUX1, WAN)}


def find_family(name: str) -> ModelFamily:
    """The family of this name.

    Raises: ValueError that lists the families there are.
    """
    if name not in FAMILIES:
        raise ValueError(f"there is no family {name!r}; the families are {', '.join(FAMILIES)}")
    return FAMILIES[name]
