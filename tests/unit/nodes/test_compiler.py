"""Standing outside ComfyUI's compiler: its switches, its graphs and its errors, on old and new hosts."""

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from devicebridge.tests import comfy_stub
from devicebridge.tests.compiling_host import ERROR, CompilingHost
from devicebridge.tests.emulated import CARDS, emulated_cards

HOME, OTHER = CARDS[:2]


@pytest.fixture
def args() -> SimpleNamespace:
    return SimpleNamespace(cpu=True)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: SimpleNamespace) -> ModuleType:
    comfy_stub.install(monkeypatch, tmp_path)
    monkeypatch.delitem(sys.modules, "comfy.model_prefetch", raising=False)
    arguments: Any = ModuleType("comfy.cli_args")
    arguments.args = args
    monkeypatch.setitem(sys.modules, "comfy.cli_args", arguments)
    return importlib.import_module("devicebridge.nodes.host.compiler")


@pytest.fixture
def host(compiler: ModuleType, args: SimpleNamespace) -> Iterator[CompilingHost]:
    host = CompilingHost(args)
    with emulated_cards(2), host.installed(sys.modules, sys.modules["comfy"]):
        yield host


def test_the_switches_return_when_the_last_of_several_threads_has_left(host, compiler):
    inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with compiler.outside():
            inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=stay)
    with compiler.outside():
        thread.start()
        assert inside.wait(10)
    assert host.switches() == [True, True]
    may_leave.set()
    thread.join(10)
    assert host.switches() == [False, False]


def test_a_switch_that_was_off_or_is_put_back_meanwhile_stays_so(host: CompilingHost, compiler: ModuleType) -> None:
    for is_put_back in (False, True):
        host.args.disable_comfy_compiler = True  # by the user, or by a pack whose own forward is running
        with compiler.outside(), compiler.outside():
            assert host.switches() == [True, True]
            host.args.disable_comfy_compiler = not is_put_back
        assert host.switches() == [not is_put_back, False]


@pytest.mark.parametrize("switches", [{}, {"disable_cuda_graphs": False}])
def test_a_host_has_those_switches_set_that_it_knows(compiler, args, switches):
    vars(args).update(switches)
    with compiler.outside([HOME, OTHER]):
        assert vars(args) == {"cpu": True, **dict.fromkeys(switches, True)}
    assert vars(args) == {"cpu": True, **switches}


def test_another_threads_graph_stays_active(host: CompilingHost, compiler: ModuleType) -> None:
    thread = threading.Thread(target=host.module.malloc_graph_begin, args=(HOME,))
    thread.start()
    thread.join(10)
    with compiler.outside():
        assert torch.equal(torch.ones(4, device=OTHER).cpu(), torch.ones(4))
    assert host.graphs[0].is_active


CAPTURING = "CUDA error: operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("text", "flag"),
    [(ERROR, "compiler"), (f"{ERROR}: could not start", "compiler"), (f"{CAPTURING}\nCUDA kernel", "cuda-graphs")],
)
def test_an_error_of_the_compiler_names_the_launch_flag(compiler: ModuleType, text: str, flag: str) -> None:
    named, outer, inner = text.partition("\n")[0], compiler.outside(), compiler.outside(about="this VAE")
    with pytest.raises(RuntimeError, match=f"{named}.*--disable-.*{flag}") as caught, outer, inner:
        raise RuntimeError(text)
    said = str(caught.value)
    assert "\n" not in said and said.count("--disable-") == 1 and "go with this VAE: " in said
    assert str(caught.value.__cause__) == text


def test_other_errors_pass(compiler: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="^out of memory$"), compiler.outside():
        raise RuntimeError("out of memory")


def test_a_host_that_records_although_it_is_switched_off_or_has_no_switch_is_refused(host, compiler, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(host.module, "malloc_graph_enabled", lambda device: True)
        with pytest.raises(RuntimeError, match=f"{OTHER}.*update the pack"), compiler.outside([OTHER]):
            pass
    assert host.switches() == [False, False]
    with monkeypatch.context() as patches:
        patches.delattr(host.module, "malloc_graph_enabled")
        patches.delattr(host.args, "disable_comfy_compiler")
        with pytest.raises(RuntimeError, match="update the pack"), compiler.outside([HOME]):
            pass
