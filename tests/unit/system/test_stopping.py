"""Which signals ask for a stop."""

import os
import signal
import threading

import pytest
from devicebridge.system.stopping import interrupt_on_signal, stop_on_signal, stop_signals

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGHUP")


def test_each_signal_asks_once_and_all_is_as_before_afterwards(capsys):
    before = [signal.getsignal(number) for number in stop_signals()]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with stop_on_signal() as stop:
            assert not stop()
            signal.raise_signal(number)
            assert stop()
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == "stopping; what is done is saved\n" * 3
    assert [signal.getsignal(number) for number in stop_signals()] == before


def test_a_closing_session_interrupts_once():
    with interrupt_on_signal():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
            signal.raise_signal(signal.SIGTERM)
            assert stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone():
    found = []

    def ask():
        with stop_on_signal() as stop, interrupt_on_signal():
            found.append(stop())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [False]
