"""The cases of test_split_model.py: what a case may claim, and all of them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from devicebridge.tests.comfy.split_host import Host, largest_difference

Run = Callable[["Case"], None]


@dataclass
class Case:
    """Collects what a case claims, whether it holds, and what was found."""

    host: Host
    claims: list[list[Any]] = field(default_factory=list)

    def check(self, claim: str, holds: bool, found: Any = "") -> None:
        self.claims.append([claim, bool(holds), str(found)])

    def equal(self, claim: str, output: torch.Tensor, reference: torch.Tensor) -> None:
        """Bit by bit, and not for want of numbers."""
        difference = largest_difference(output, reference)
        holds = torch.equal(output, reference) and bool(reference.std() > 1e-3)
        self.check(claim, holds, f"largest difference {difference}, std {float(reference.std()):.3g}")

    def differs(self, claim: str, output: torch.Tensor, reference: torch.Tensor) -> None:
        self.check(claim, not torch.equal(output, reference), largest_difference(output, reference))


CASES: dict[str, Run] = {}


def case(run: Run) -> Run:
    """Register a case under its function's name."""
    CASES[run.__name__] = run
    return run


def run_case(run: Run, host: Host | None) -> list[list[Any]]:
    """The claims of one case, on a machine where nothing is loaded."""
    case = Case(host)  # type: ignore[arg-type]
    try:
        with torch.inference_mode():
            run(case)
    finally:
        if host is not None:
            host.clear()
    return case.claims
