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


def _forward(host: CompilingHost, device: torch.device = HOME) -> torch.Tensor:
    """A forward as the host records one, over both cards."""
    host.module.malloc_graph_begin(device)
    x = torch.ones(4, device=HOME).to(OTHER) + 1
    output = x.to(HOME).cpu()
    del x
    host.module.malloc_graph_end()
    return output


def test_a_forward_over_two_cards_fails_in_a_graph_and_not_outside(host: CompilingHost, compiler: ModuleType) -> None:
    with compiler.outside([HOME, OTHER]):
        assert torch.equal(_forward(host), torch.full((4,), 2.0))
    assert not host.graphs
    with pytest.raises(RuntimeError, match=ERROR):
        _forward(host)


def test_a_forward_on_one_card_is_recorded_and_replayed_before_and_after(host, compiler):
    def forward() -> None:
        host.module.malloc_graph_begin(HOME)
        del_me = torch.ones(4, device=HOME) * 2
        del del_me
        host.module.malloc_graph_end()

    forward()
    with compiler.outside():
        forward()
    forward()
    assert [graph.num_replays for graph in host.graphs] == [1]


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


def test_a_user_who_switched_the_compiler_off_keeps_it_off(host: CompilingHost, compiler: ModuleType) -> None:
    host.args.disable_comfy_compiler = True
    with compiler.outside(), compiler.outside():
        assert host.switches() == [True, True]
    assert host.switches() == [True, False]


def test_a_switch_that_another_pack_has_put_back_meanwhile_stays_so(host: CompilingHost, compiler: ModuleType) -> None:
    host.args.disable_comfy_compiler = True  # by a pack whose own forward is running
    with compiler.outside():
        host.args.disable_comfy_compiler = False  # it is over
    assert host.switches() == [False, False]


def test_a_stay_that_nobody_ends_is_over_when_it_is_dropped(host, compiler):
    stay = compiler.outside([HOME, OTHER])
    stay.__enter__()
    assert host.switches() == [True, True]
    del stay
    assert host.switches() == [False, False]


def test_an_interrupt_brings_the_switches_back(host: CompilingHost, compiler: ModuleType) -> None:
    with pytest.raises(KeyboardInterrupt), compiler.outside():
        raise KeyboardInterrupt
    assert host.switches() == [False, False]


def test_an_old_host_gets_no_switches(compiler: ModuleType, args: SimpleNamespace) -> None:
    with compiler.outside([HOME, OTHER]):
        assert vars(args) == {"cpu": True}
    assert vars(args) == {"cpu": True}


def test_a_host_with_block_graphs_alone_has_those_switched_off(compiler: ModuleType, args: SimpleNamespace) -> None:
    args.disable_cuda_graphs = False
    with compiler.outside([HOME, OTHER]):
        assert args.disable_cuda_graphs
    assert vars(args) == {"cpu": True, "disable_cuda_graphs": False}


def test_a_graph_that_is_active_is_ended_by_the_hosts_own_way(host: CompilingHost, compiler: ModuleType) -> None:
    host.module.malloc_graph_begin(HOME)
    kept = torch.ones(4, device=HOME)
    with compiler.outside():
        moved = kept.to(OTHER)
    assert torch.equal(moved.cpu(), torch.ones(4))
    assert not host.graphs[0].is_active
    host.module.malloc_graph_end()  # by whoever began it


def test_another_threads_graph_stays_active(host: CompilingHost, compiler: ModuleType) -> None:
    thread = threading.Thread(target=host.module.malloc_graph_begin, args=(HOME,))
    thread.start()
    thread.join(10)
    with compiler.outside():
        assert torch.equal(torch.ones(4, device=OTHER).cpu(), torch.ones(4))
    assert host.graphs[0].is_active


@pytest.mark.parametrize("text", [ERROR, f"{ERROR}: could not start recording"])
def test_an_error_of_an_allocation_graph_names_the_launch_flag(compiler: ModuleType, text: str) -> None:
    with pytest.raises(RuntimeError, match=rf"{text}.*--disable-comfy-compiler") as caught, compiler.outside():
        raise RuntimeError(text)
    assert "\n" not in str(caught.value)
    assert str(caught.value.__cause__) == text


def test_an_error_of_a_capture_names_its_launch_flag(compiler: ModuleType) -> None:
    text = "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be ..."
    with pytest.raises(RuntimeError, match="capturing.*--disable-cuda-graphs") as caught, compiler.outside():
        raise RuntimeError(text)
    assert "\n" not in str(caught.value)


def test_an_error_is_explained_once_and_says_what_ran(compiler: ModuleType) -> None:
    text = "CUDA error: operation not permitted when stream is capturing"
    with pytest.raises(RuntimeError) as caught, compiler.outside(), compiler.outside(about="this VAE"):
        raise RuntimeError(text)
    assert str(caught.value).startswith("ComfyUI's own compiler does not go with this VAE: it fails with 'CUDA")
    assert str(caught.value).count("--disable-cuda-graphs") == 1


def test_other_errors_pass(compiler: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="^out of memory$"), compiler.outside():
        raise RuntimeError("out of memory")


def test_a_host_that_records_although_it_is_switched_off_is_refused(host, compiler, monkeypatch):
    monkeypatch.setattr(host.module, "malloc_graph_enabled", lambda device: True)
    with pytest.raises(RuntimeError, match=f"{OTHER}.*update the pack"), compiler.outside([OTHER]):
        pass
    assert host.switches() == [False, False]


def test_a_host_that_records_and_has_no_switch_is_refused(host, compiler, monkeypatch):
    monkeypatch.delattr(host.module, "malloc_graph_enabled")
    monkeypatch.delattr(host.args, "disable_comfy_compiler")
    with pytest.raises(RuntimeError, match="update the pack"), compiler.outside([HOME]):
        pass
    host.args.disable_comfy_compiler = False  # for the fixture
