"""What several files need: simulated streams for emulated cards, and a collector that frees nothing."""

import gc
from collections.abc import Iterator

import pytest
from devicebridge.tests.emulated import EmulatedTensor
from devicebridge.tests.streams import SimulatedMachine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimulatedMachine:
    made = SimulatedMachine(4)
    monkeypatch.setattr(
        EmulatedTensor, "record_stream", lambda tensor, stream: made.used_on.append((tensor, stream)), raising=False
    )
    return made


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()
