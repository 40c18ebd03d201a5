"""Cards of which this process may take so much and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from devicebridge.parallel.devices import release_cached_memory, total_bytes


@contextmanager
def limited(card: torch.device, num_bytes: float) -> Iterator[None]:
    """torch raises when it would take more than this of the card; the CPU and emulated cards have no limit."""
    if card.type != "cuda":
        yield
        return
    release_cached_memory()
    total = total_bytes(card)
    assert total is not None
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), card)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, card)
