"""Measured once and then from disk; again if anything in the key is another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from devicebridge.parallel import staged_copies as exchange_module
from devicebridge.parallel.staged_copies import SideStreams, exchange_speed, product_speed
from devicebridge.planning import cards as cards_module
from devicebridge.planning.cards import MachineSpeed, machine_speed, measure_machine
from devicebridge.tests.emulated import CARDS, emulated_cards

SPEED = MachineSpeed((1e12, 1e12), 2e10, "2026-11-23")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where measurements are kept."""
    monkeypatch.setenv("DEVICEBRIDGE_CACHE", str(tmp_path))
    return tmp_path / "calibration"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The cards of every measurement."""
    found: list[Any] = []
    monkeypatch.setattr(cards_module, "measure_machine", lambda devices: found.append(tuple(devices)) or SPEED)
    return found


def _ask(*cards: torch.device) -> MachineSpeed:
    with emulated_cards(4):
        return machine_speed(cards or CARDS[:2])


def test_emulated_cards_are_measured_and_kept(folder) -> None:
    found = _ask(*CARDS[:3])
    assert len(found.flops_per_s) == 3 and found.bytes_per_s > 0
    assert _ask(*CARDS[:3]) == found  # to the last digit: read, not measured
    assert _ask(CARDS[0]).bytes_per_s is None


def test_the_slowest_link_counts(monkeypatch) -> None:
    speeds = {(0, 1): 3e9, (0, 2): 1e9, (1, 2): 2e9}
    monkeypatch.setattr(cards_module, "exchange_speed", lambda one, other: speeds[one.index, other.index])
    with emulated_cards(3):
        assert measure_machine(CARDS[:3]).bytes_per_s == 1e9


def test_a_second_question_measures_nothing(folder, measured) -> None:
    assert _ask() == _ask() == SPEED
    assert measured == [CARDS[:2]]
    assert len(list(folder.iterdir())) == 1  # no temporary file is left
    _ask(CARDS[1], CARDS[0])
    assert measured[1:] == [(CARDS[1], CARDS[0])]


def test_what_the_key_has_is_measured_again_if_it_changes(folder, measured, monkeypatch) -> None:
    (folder.parent / "driver").write_text("NVRM version: 600.1\n")
    _ask()
    changes = {
        "_VERSION": 99, "_DRIVER": folder.parent / "driver", "has_peer_access": lambda source, target: False,
        "total_bytes": lambda device: 2**40,
    }  # fmt: skip
    for number, (name, value) in enumerate(changes.items(), start=2):
        with monkeypatch.context() as changed:
            changed.setattr(cards_module, name, value)
            _ask()
            _ask()
        assert len(measured) == number, name
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "9.9")
        _ask()
    assert len(measured) == 6
    _ask()
    assert len(measured) == 6


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"bytes_per_s": 20000000000.0', '"bytes_per_s": -1.0'),
        lambda text: text.replace('"bytes_per_s": 20000000000.0', '"bytes_per_s": Infinity'),
        lambda text: text.replace('"bytes_per_s": 20000000000.0', '"bytes_per_s": null'),
        lambda text: json.dumps(json.loads(text) | {"value": {}}),
        lambda text: json.dumps(json.loads(text) | {"key": {}}),
        lambda text: text.replace('"date"', '"more": [], "date"'),
    ],
)
def test_a_file_that_cannot_be_used_is_measured_again(folder, measured, damage) -> None:
    _ask()
    (path,) = folder.iterdir()
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    assert _ask() == SPEED and len(measured) == 2
    assert _ask() == SPEED and len(measured) == 2


class _Link:
    """Copies over a time of their own; both directions of an exchange take place at once."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.now, self.sent = bytes_per_s, 0.0, []

    def copy(self, tensor: torch.Tensor, device: torch.device, arrivals: Any) -> torch.Tensor:
        self.sent.append((tensor.device, device))
        self.now += tensor.nbytes / self.bytes_per_s / 2
        return tensor


def test_an_exchange_is_bytes_over_seconds() -> None:
    link: Any = _Link(20e9)
    with emulated_cards(2):
        assert exchange_speed(*CARDS[:2], link, lambda: link.now) == pytest.approx(20e9, rel=1e-6)
    assert link.sent[:2] == [(CARDS[0], CARDS[1]), (CARDS[1], CARDS[0])]


def test_a_product_is_large_enough_to_take_a_while() -> None:
    times = [time for seconds in (9.0, 1e-4, 1e-4, 1e-4, 9.0, 8e-3, 9e-3, 1.0) for time in (0.0, seconds)]
    found = product_speed(torch.device("cpu"), lambda: times.pop(0))
    assert found == pytest.approx(2 * 512**3 / 9e-3)


def test_cards_are_measured_by_the_copies_that_their_blocks_make(monkeypatch) -> None:
    class Counted(SideStreams):
        number = 0

        def copy(self, *args: Any) -> torch.Tensor:
            self.number += 1
            return super().copy(*args)

    copies, cpu = Counted(None), torch.device("cpu")
    monkeypatch.setattr(exchange_module, "copies_between", lambda devices: {(cpu, cpu): copies}[devices])
    exchange_speed(cpu, cpu)
    assert copies.number > 0


def test_no_random_state_is_touched() -> None:
    with emulated_cards(2):
        before = torch.get_rng_state()
        measure_machine(CARDS[:2])
        assert torch.equal(torch.get_rng_state(), before)
