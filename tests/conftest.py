"""Gives every test the import name `devicebridge`, from this checkout."""

import collections
import functools
import gc
import hashlib
import os
import runpy
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tiny models gain nothing from threads, and sums in another order are other bits: tests compare processes byte by byte.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # tests start many processes: compiling all sources takes each a second
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # lets the GPU tests ask for deterministic algorithms


def _as_in_a_terminal() -> None:
    """Have programs that tests start obey signals, also where the tests run in the background or under nohup. A program
    passes on what it ignores, but not what it handles. So a hangup, which nohup is for, is handled by doing nothing."""
    usual = {"SIGINT": signal.default_int_handler, "SIGTERM": signal.SIG_DFL, "SIGHUP": lambda number, frame: None}
    for name, handler in usual.items():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


_as_in_a_terminal()
ROOT = Path(__file__).resolve().parent.parent
runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()


@pytest.fixture(scope="module", autouse=True)
def _what_lives_now_is_left_alone() -> None:
    """Jobs and tests collect garbage often; among the libraries' objects alone, a third of a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What jobs keep for this machine (times of blocks) stays out of the user's folder, and is forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVICEBRIDGE_CACHE", str(tmp_path_factory.mktemp("user_cache")))
        yield


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """What a test made ends with it; threads that waited for more end with those that kept them."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    until = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left


@pytest.fixture
def only_two_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The system has no more threads than two; those that were started."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def failing_start(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", failing_start)
    return started


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread, whatever the environment says: tiny matrices only wait for more."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def short_texts() -> Iterator[None]:
    """For jobs on tiny models that are about everything but the length of texts."""
    from devicebridge.tests import tiny_pipeline

    with tiny_pipeline.short_texts():
        yield


@pytest.fixture
def tiny_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of offloaded tiny blocks leave their card, too."""
    monkeypatch.setattr("devicebridge.parallel.offload.weights.SMALLEST_BYTES", 1024)


@pytest.fixture(scope="module")
def dry_runs_once() -> Iterator[None]:
    """Models of the same sizes are run dry once for all plans of a file."""
    from devicebridge.families.registry import FAMILIES
    from devicebridge.families.spec import longest_text
    from devicebridge.planning.costs import ModelCosts

    run, known = ModelCosts.dry_run, dict[Any, Any]()

    def run_once(costs: ModelCosts, work: Any, kernels: Any) -> Any:
        family, variant = costs.family, costs.variant
        if FAMILIES.get(family.name) is not family:
            return run(costs, work, kernels)
        sizes = family.name, variant.name, longest_text(variant), repr(sorted(costs.info.config.items()))
        key = sizes, costs.info.layout, work, repr(kernels)
        if key not in known:
            known[key] = run(costs, work, kernels)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelCosts, "dry_run", run_once)
        yield


# Their long tests need each other, or take too long together.
_NIGHTLY = ("ranks/test_rank_jobs.py", "comfy/test_native_ranks.py", "comfy/test_native_families.py")
_TAKES_LONG = "takes long"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of tests marked "long" every one runs with LONG_TESTS=1, and with LONG_SHARE=40 one of forty, by the commit."""
    if os.environ.get("LONG_TESTS"):
        return
    share = int(os.environ.get("LONG_SHARE", 0))
    for item in items:
        if item.get_closest_marker("long") and not (share and is_chosen(item, share, _commit())):
            item.add_marker(pytest.mark.skip(reason=_TAKES_LONG))


def is_chosen(item: pytest.Item, share: int, commit: str) -> bool:
    """One of so many, others for each commit. Tests of a file with the same first parameter share a fixture, and are
    chosen at once; so are those of a file whose every test is long."""
    file, _, test = item.nodeid.partition("::")
    if not commit or file.endswith(_NIGHTLY):
        return False
    parent = item.getparent(pytest.Module)
    name, _, parameters = test.partition("[")
    unit = "" if parent and parent.get_closest_marker("long") else parameters.partition("-")[0] or name
    digest = hashlib.sha256(f"{commit} {file} {unit}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % share == 0


@functools.cache
def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile a file stays in one process, and so do all that ask the one ComfyUI of tests/comfy."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            is_asking = scope.startswith("tests/comfy/") and b"server: Server" in (ROOT / scope).read_bytes()
            return "tests/comfy" if is_asking else scope

    return ByFile(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line of all says what was skipped and what would run it, so that a green run cannot hide it."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput") or config.option.collectonly:
        return
    reasons = _skipped(reporter)
    num_long = reasons.pop(_TAKES_LONG, 0)
    share = os.environ.get("LONG_SHARE")
    chosen = f"; one of {share} of them ran, chosen by commit {_commit()}" if share and num_long else ""
    parts = [f"{num_long} that take long (LONG_TESTS=1 bash scripts/test.sh runs them{chosen})"] * bool(num_long)
    parts += [f"{count}: {reason}" for reason, count in reasons.most_common()]
    reporter.write_line(f"skipped: {'; '.join(parts) or 'nothing'}")


def _skipped(reporter: pytest.TerminalReporter) -> collections.Counter[str]:
    reasons: collections.Counter[str] = collections.Counter()
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    return reasons
