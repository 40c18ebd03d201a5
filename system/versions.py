"""The versions this pack was tested with: one place for the doctor, the documentation and the continuous tests."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class VersionRange:
    """The versions that were tested, first and last included. "2.13" covers 2.13.1. needed_for: in a user's words."""

    first: str
    last: str
    needed_for: str

    def covers(self, version: str) -> bool:
        """Whether a version such as "2.13.0+cpu" lies in the range."""
        found, first, last = map(_numbers, (version, self.first, self.last))
        return first <= found[: len(first)] and found[: len(last)] <= last

    def __str__(self) -> str:
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def installed_version(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0rc1+cpu"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


TESTED: dict[str, VersionRange] = {
    "python": VersionRange("3.10", "3.13", "everything"),
    "torch": VersionRange("2.11", "2.15", "everything"),
    "diffusers": VersionRange("0.42", "0.42", "loading and training models"),
    "peft": VersionRange("0.21", "0.21", "LoRA training"),
    "transformers": VersionRange("5", "5", "encoding captions"),
    "safetensors": VersionRange("0.8", "0.8", "reading and writing every file"),
    "torchao": VersionRange("0.18", "0.18", "optimizer adamw8bit"),
    "pydantic": VersionRange("2.14", "2.14", "job configs"),
    "tomlkit": VersionRange("0.15", "0.15", "job files"),
    "av": VersionRange("18.1", "19.0", "reading videos"),
}
