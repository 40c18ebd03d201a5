"""Claims: one process at a time has an entry, and a killed one no longer has any."""

import errno
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from devicebridge.encoding import store as store_module
from devicebridge.encoding.store import CacheStore, claimed_batches
from devicebridge.system import locks
from devicebridge.system.locks import NoLocks

KEYS = [f"{number:02x}" * 32 for number in range(40)]
ROOT = Path(__file__).resolve().parents[3]

_HOLD = """
import runpy, sys, time
runpy.run_path(sys.argv[1])["load_pack"]()
from devicebridge.encoding.store import CacheStore
claim = CacheStore(sys.argv[2]).claim(sys.argv[3])
print(claim is not None, flush=True)
time.sleep(600)
"""


@pytest.fixture
def store(tmp_path):
    return CacheStore(tmp_path / "cache")


def _batches(store, keys=KEYS, found=None, stop=lambda: None, size=1):
    on_found = (lambda: None) if found is None else (lambda: found.append(1))
    return claimed_batches(store, keys, size, on_found, stop)


def _hold_elsewhere(store, key):
    command = [sys.executable, "-c", _HOLD, str(ROOT / "bootstrap.py"), str(store.folder), key]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    return process


def test_an_entry_is_claimed_by_one_at_a_time(store):
    first, second = CacheStore(store.folder), CacheStore(store.folder)
    claim = first.claim(KEYS[0])
    assert claim is not None and second.claim(KEYS[0]) is None and first.claim(KEYS[0]) is None
    other = second.claim(KEYS[1])
    assert other is not None
    claim.release()
    claim.release()
    again = second.claim(KEYS[0])
    assert again is not None
    again.release()
    other.release()
    assert not list(first.claims_folder.iterdir())


def test_a_killed_process_holds_nothing_and_what_it_left_is_removed(store):
    process = _hold_elsewhere(store, KEYS[0])
    try:
        assert store.claim(KEYS[0]) is None
        store.put(KEYS[0], {"x": torch.ones(3)})
        temporary = store.path(KEYS[0]).with_name(f".{KEYS[0]}.safetensors.{'0' * 32}.tmp")
        temporary.write_bytes(b"half")
        others = store.path(KEYS[1]).with_name(f".{KEYS[1]}.safetensors.{'0' * 32}.tmp")
        others.parent.mkdir()
        others.write_bytes(b"half")
        store.remove_left()
        assert temporary.exists(), "its writer is alive"
    finally:
        process.kill()
        process.wait()
    store.remove_left()
    assert not temporary.exists() and others.exists() and not list(store.claims_folder.iterdir())
    assert KEYS[0] in store
    os.utime(others, (1000, 1000))
    store.remove_left()
    assert not others.exists(), "written long ago, and nobody has a claim on it"


def test_what_others_have_is_left_for_later_and_taken_over_when_they_die(store, monkeypatch):
    monkeypatch.setattr(store_module, "POLL_S", 0.01)
    process = _hold_elsewhere(store, KEYS[3])
    order = []
    try:
        for batch in _batches(store, KEYS[:6]):
            order += batch
            store.put(batch[0], {"x": torch.ones(1)})
            if len(order) == 5:
                process.kill()
    finally:
        process.kill()
        process.wait()
    assert order == [*KEYS[:3], *KEYS[4:6], KEYS[3]]


def test_waiting_for_others_can_be_stopped(store, monkeypatch):
    monkeypatch.setattr(store_module, "POLL_S", 0.01)
    claim, asked = store.claim(KEYS[0]), []

    def stop():
        asked.append(1)
        if len(asked) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(_batches(store, KEYS[:1], stop=stop))
    claim.release()


@pytest.mark.parametrize("size", [1, 7])
def test_several_at_once_compute_every_entry_once(store, monkeypatch, size):
    """A lock belongs to an open file, so threads stand for processes; benchmarks/killed_caches.py has processes."""
    monkeypatch.setattr(store_module, "POLL_S", 0.01)
    computed, found = [], []

    def work():
        for batch in _batches(store, found=found, size=size):
            assert len(batch) <= size
            for key in batch:
                computed.append(key)
                time.sleep(0.002)
                store.put(key, {"x": torch.ones(1)})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: work(), range(4)))
    assert sorted(computed) == KEYS and len(found) == 3 * len(KEYS)
    assert not list(store.claims_folder.iterdir())


def test_leaving_early_or_by_an_error_gives_claims_back(store):
    batches = _batches(store, size=5)
    assert next(batches) == KEYS[:5] and store.claim(KEYS[4]) is None
    batches.close()
    claim = store.claim(KEYS[4])
    assert claim is not None
    claim.release()


def test_a_claim_gives_its_name_back_while_it_is_locked(store, monkeypatch):
    """Unlocked first, another could take the file by its name, and lose that name to the one before it."""
    if os.name == "nt":
        pytest.skip("an open file cannot be removed there")
    claim, ordinary, others = store.claim(KEYS[0]), Path.unlink, []

    def take_first(path, **options):
        others.append(store.claim(KEYS[0]))
        ordinary(path, **options)

    monkeypatch.setattr(Path, "unlink", take_first)
    claim.release()
    assert others == [None] and claim.file.closed and not claim.path.exists()


def test_a_lock_on_a_file_that_lost_its_name_does_not_count(store, monkeypatch):
    """Between opening and locking, the former holder removes the file, and a third process claims anew."""
    thirds = []
    real = locks.try_lock

    def lock_late(file):
        monkeypatch.setattr(locks, "try_lock", real)
        (store.claims_folder / f"{KEYS[0]}.lock").unlink()
        thirds.append(store.claim(KEYS[0]))
        return real(file)

    monkeypatch.setattr(locks, "try_lock", lock_late)
    assert store.claim(KEYS[0]) is None
    thirds[0].release()


@pytest.mark.parametrize("where", ["try_lock", "fstat"])
def test_a_lock_file_that_another_machine_removed_is_no_error_and_no_lack_of_locks(store, monkeypatch, caplog, where):
    """NFS answers ESTALE for a file that is open here and was removed there."""
    fcntl = pytest.importorskip("fcntl")
    owner, name = (fcntl, "flock") if where == "try_lock" else (locks.os, "fstat")
    real = getattr(owner, name)

    def stale_once(*args):
        monkeypatch.setattr(owner, name, real)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(owner, name, stale_once)
    claim = store.claim(KEYS[0]) or store.claim(KEYS[0])
    assert claim is not None and not caplog.text
    assert store.claim(KEYS[0]) is None
    claim.release()


def test_a_lock_file_that_is_being_removed_is_opened_again_on_windows(store, monkeypatch):
    monkeypatch.setattr(locks, "_TRY_AGAIN_S", 0)
    refusals = []

    def refuse_twice(path, mode):
        if len(refusals) < 2:
            refusals.append(PermissionError(errno.EACCES, "Access is denied"))
            refusals[-1].winerror = 5
            raise refusals[-1]
        return open(path, mode)

    monkeypatch.setattr(locks, "open", refuse_twice, raising=False)
    claim = store.claim(KEYS[0])
    assert claim is not None and len(refusals) == 2
    claim.release()


@pytest.mark.parametrize("lacking", ["locks", "numbers of open files"])
def test_without_locks_work_is_done_all_the_same_and_one_warning_says_so(store, monkeypatch, caplog, lacking):
    def refuse(file):
        raise NoLocks(95, "Operation not supported")

    if lacking == "locks":
        monkeypatch.setattr(locks, "try_lock", refuse)
    else:
        monkeypatch.setattr(locks.os.path, "samestat", lambda status, other: False)
    assert [batch[0] for batch in _batches(store)] == KEYS
    assert caplog.text.count("file system without locks") == 1


@pytest.mark.long  # one killed process is in test_claims.py
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_killed_fillers_damage_nothing_and_nothing_finished_is_computed_again():
    script = str(ROOT / "benchmarks" / "killed_caches.py")
    command = [sys.executable, script, "--kills", "4", "--samples", "14", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] >= 4 and found["encoded"] >= found["entries_per_folder"] // 2
    assert found["training"] == "finished"
