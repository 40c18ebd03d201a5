"""Name -> family: an explicit list, so that a reader sees what is supported and nothing is discovered at run time."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..config.model import COMFYUI as COMFYUI
from .flux import FLUX1, FLUX2
from .spec import ModelFamily, Variant
from .wan import WAN

FAMILIES: dict[str, ModelFamily] = {family.name: family for family in (FLUX2, FLUX1, WAN)}


def find_family(name: str) -> ModelFamily:
    """The family of this name. Raises: ValueError that lists the families there are."""
    if name == COMFYUI:
        raise ValueError(
            'family = "comfyui" is a model that only ComfyUI can build: give the job file to `devicebridge train`, '
            "which runs it with the ComfyUI that is installed, or connect the MODEL to Load Model for Training Across "
            "GPUs"
        )
    if name not in FAMILIES:
        raise ValueError(f"there is no family {name!r}; the families are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def find_variant(name: str, families: Iterable[ModelFamily] = ()) -> tuple[ModelFamily, Variant]:
    """The published variant of this name, and its family. families: where to look; () looks in all. Raises: ValueError
    that lists the variants there are, and the one whose name is nearest."""
    variants = {each.name: (family, each) for family in families or FAMILIES.values() for each in family.variants}
    if name not in variants:
        near = difflib.get_close_matches(name.lower(), variants, n=1)
        others = "" if families else '; other models are planned from a job file with model.family = "comfyui"'
        hint = f"; did you mean {near[0]}?" if near else others
        raise ValueError(f"there is no variant {name!r}; the variants are {', '.join(variants)}{hint}")
    return variants[name]
