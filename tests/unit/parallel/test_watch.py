"""What ends a process that would wait for ever."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from devicebridge.parallel.ranks import watch as module
from devicebridge.parallel.ranks.place import RankPlace
from devicebridge.parallel.ranks.watch import Watch
from devicebridge.system import stopping
from devicebridge.tests.ranks.launching import ROOT

CODE = """
import runpy, sys, time
runpy.run_path(sys.argv[1])["load_pack"]()
from devicebridge.parallel.ranks.watch import Watch
watch = Watch(0.5)
def sleep_for_ever():
    time.sleep(1000)
with watch.doing():
    sleep_for_ever()
"""


def test_work_that_takes_too_long_is_ended_where_it_is() -> None:
    command = [sys.executable, "-c", CODE, str(ROOT / "bootstrap.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1 and "in sleep_for_ever" in done.stderr, done.stderr


def test_each_sign_gives_work_its_time_anew_waits_have_none_and_unknown_lengths_half_an_hour_or_more(monkeypatch):
    limits: list[float] = []
    monkeypatch.setattr(module.faulthandler, "dump_traceback_later", lambda limit_s, **options: limits.append(limit_s))
    monkeypatch.setattr(module.faulthandler, "cancel_dump_traceback_later", lambda: limits.append(0))
    for timeout_s, is_first, usual, longest in (
        (900, False, 900, 1800),
        (900, True, 910, 1810),
        (5000, False, 5000, 5000),
    ):
        watch = Watch(timeout_s, is_first=is_first)
        limits.clear()
        with watch.doing(is_long=True):
            with watch.doing():
                stopping.alive()
            with watch.waiting():
                pass
        assert limits == [longest, usual, usual, longest, 0, longest, 0]
        watch.close()


def test_a_rank_that_gives_no_more_signs_is_lost_and_one_that_gives_them_is_not(monkeypatch):
    monkeypatch.setattr(module, "_BEAT_S", 0.1)
    monkeypatch.setattr(module, "_SHORTEST_S", 1.0)
    monkeypatch.setenv("GROUP_RANK", "0")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    watches = [Watch(2.0), Watch(2.0)]
    for rank, watch in enumerate(watches):
        watch.listen(store, RankPlace(rank, 2, rank, 2))
    with mock.patch.object(module.os, "_exit") as ended, mock.patch.object(module.os, "kill") as killed:
        time.sleep(2.5)
        assert [watch.lost for watch in watches] == ["", ""]
        watches[1].close()
        watches[0].leave()
        end = time.monotonic() + 20
        while not watches[0].lost and time.monotonic() < end:
            time.sleep(0.1)
        assert watches[0].lost.startswith("rank 1 gave no sign of life")
        while not killed.called and time.monotonic() < end:
            time.sleep(0.1)
        killed.assert_called_once_with(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # it is of this machine
        watches[0].close()
        ended.assert_not_called()
