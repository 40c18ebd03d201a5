"""Published speeds of cards, and what a card of a named size stands for.

Peaks are the makers' own (architecture papers and data sheets): 10^12 dense operations per second in bf16 with sums in
float32, of consumer cards twice their float32 rate. Training reaches a share of it. The one share that was measured is
that of an H200: FLUX.2-dev at 1024², bf16, every block recomputed, one micro-batch in flight, 1.866 s a step
(docs/benchmarks.md, training on 8-bit base weights).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

SHARE_OF_PEAK = 0.46  # 16.9 s of operations at 50 * 10^12 per second are 0.85 s at the H200's peak
SHARE_OF_PRODUCT = 0.66  # the same, of the 690 * 10^12 per second that a large matrix product was measured at there
_FILLERS = re.compile(r"\b(nvidia|geforce|rtx|radeon|rx|amd)\b|[\s-]")
_NEAR = 0.05  # a size in GB stands for a card whose memory differs by no more


class CardKind(NamedTuple):
    """A model of card. has_fp8: whether it multiplies in float8."""

    name: str
    tera_per_s: float
    gib: int
    has_fp8: bool

    @property
    def flops_per_s(self) -> float:
        """Operations per second of a training."""
        return self.tera_per_s * 1e12 * SHARE_OF_PEAK


# In an order in which the first of a size is the one that a bare size stands for.
KINDS = (
    CardKind("RTX 4090", 165.2, 24, True),
    CardKind("RTX 3090", 71.0, 24, False),
    CardKind("RTX 5090", 209.5, 32, True),
    CardKind("RTX 4080", 97.5, 16, True),
    CardKind("RTX 5080", 112.6, 16, True),
    CardKind("RTX 4060 Ti", 44.1, 16, True),
    CardKind("RTX 4070", 58.3, 12, True),
    CardKind("RTX 3080", 59.5, 10, False),
    CardKind("RTX 6000 Ada", 364.2, 48, True),
    CardKind("RTX A6000", 154.8, 48, False),
    CardKind("L40S", 362.0, 48, True),
    CardKind("H100", 989.0, 80, True),
    CardKind("A100", 312.0, 80, False),
    CardKind("H200", 989.0, 141, True),
    CardKind("RTX 3060", 25.5, 12, False),
    CardKind("RTX 4060", 30.2, 8, True),
    CardKind("RTX 3060 Ti", 32.4, 8, False),
    CardKind("RTX 3070", 40.6, 8, False),
    CardKind("RTX 3070 Ti", 43.5, 8, False),
    CardKind("RTX 3080 Ti", 68.2, 12, False),
    CardKind("RTX 3090 Ti", 80.0, 24, False),
    CardKind("RTX 4070 Super", 71.0, 12, True),
    CardKind("RTX 4070 Ti", 80.2, 12, True),
    CardKind("RTX 4070 Ti Super", 88.2, 16, True),
    CardKind("RTX 4080 Super", 104.4, 16, True),
    CardKind("RTX 5060", 38.4, 8, True),
    CardKind("RTX 5060 Ti", 47.4, 16, True),
    CardKind("RTX 5070", 61.7, 12, True),
    CardKind("RTX 5070 Ti", 87.9, 16, True),
)
_BY_NAME: Mapping[str, CardKind] = {_FILLERS.sub("", kind.name.lower()): kind for kind in KINDS}


def kind_called(name: str) -> CardKind | None:
    """The kind of that name, such as "3090", "RTX 3090" or what torch calls the card; None for another."""
    plain = _FILLERS.sub("", name.lower())
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    words = name.lower().replace("-", " ").split()
    return next((kind for kind in KINDS if kind.name.lower() in words), None)  # "H100 80GB HBM3", but no "RTX 4090 D"


def kind_of_size(size_bytes: int) -> CardKind | None:
    """What a card of that memory is taken for; None where no known one has about as much."""
    for kind in KINDS:
        if any(abs(size_bytes / whole - 1) <= _NEAR for whole in (kind.gib * 2**30, kind.gib * 1e9)):
            return kind
    return None
