"""The cases of test_split_model.py: what a case may claim, and all of them by name."""

import contextlib
import gc
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from devicebridge.nodes.host.split.model import split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, largest_difference

CPU = torch.device("cpu")


@dataclass
class Case:
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

    @contextlib.contextmanager
    def logged(self, name: str, level: int = logging.WARNING) -> Iterator[list[str]]:
        messages: list[str] = []
        handler = logging.Handler(level)
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger(name).addHandler(handler)
        try:
            yield messages
        finally:
            logging.getLogger(name).removeHandler(handler)

    def refused(self, claim: str, act: Callable[[], Any], error: type[BaseException], *words: str) -> None:
        """act raises this error, and its message has all the words."""
        try:
            act()
        except error as raised:
            missing = [word for word in words if word not in str(raised)]
            self.check(claim, not missing, f"{raised} (missing: {missing})")
        else:
            self.check(claim, False, "nothing was raised")


Run = Callable[..., None]  # is given a Case, and its host where it has a parameter for that
CASES: dict[str, Run] = {}


def case(run: Run) -> Run:
    CASES[run.__name__] = run
    return run


def long_case(run: Run) -> Run:
    return case(run)


def in_long_runs(*more: Any) -> tuple[Any, ...]:
    """What a case does again with other models, by the same mechanism: with LONG_TESTS=1, else nothing."""
    return more if os.environ.get("LONG_TESTS") else ()


def split(model: Any, *devices: torch.device, **options: Any) -> Any:
    return split_model(model, SplitRequest(devices=devices or (HOME, OTHER), **options))


def run_case(run: Run, host: Host) -> list[list[Any]]:
    """The claims of one case, on a machine where nothing is loaded; as the host runs nodes, under inference mode."""
    case = Case(host)
    try:
        with case.logged("", logging.INFO) as messages, torch.inference_mode():
            run(case, host) if "host" in inspect.signature(run).parameters else run(case)
            host.unload_all()
    finally:
        gc.collect()
    leaks = [message for message in messages if "memory leak" in message]
    case.check("ComfyUI found no leak", not leaks, leaks)
    return case.claims
