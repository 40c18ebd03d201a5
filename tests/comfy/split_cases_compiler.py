"""A split beside ComfyUI's compiler: a simulated one (tests/compiling_host.py) around FLUX.2's real forward."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, get_args
from unittest import mock

import comfy
import comfy.model_prefetch
import torch
from comfy.cli_args import args
from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock
from comfy.ldm.flux.model import Flux
from comfy.model_management import InterruptProcessingException
from devicebridge.nodes.host.split import patcher as split_patcher
from devicebridge.nodes.host.split import tree as split_tree
from devicebridge.tests.comfy.split_cases import Case, case, split
from devicebridge.tests.comfy.split_host import HOME
from devicebridge.tests.compiling_host import CAPTURE_ERROR, ERROR, CompilingHost, Generation

# The models of a host that records itself ask for what its own module has.
GENERATIONS: tuple[Generation, ...] = (
    ("graph per thread",) if hasattr(comfy.model_prefetch, "malloc_graph_begin") else get_args(Generation)
)


@contextlib.contextmanager
def compiling(generation: Generation = "graph per thread") -> Iterator[CompilingHost]:
    """Inside, FLUX.2's forward is recorded as MiniMax H3's is, and its blocks are captured as a text encoder's are."""
    host = CompilingHost(args, generation)
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.installed(sys.modules, comfy))
        stack.enter_context(mock.patch.object(Flux, "forward", _recorded(host, Flux.forward)))
        for block in (DoubleStreamBlock, SingleStreamBlock):
            stack.enter_context(mock.patch.object(block, "forward", _captured(host, block.forward)))
        yield host


def _recorded(host: CompilingHost, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not host.records or not host.module.malloc_graph_enabled(x.device):
            return forward(self, x, *args, **kwargs)
        out = torch.empty_like(x)
        host.module.malloc_graph_begin(*([self] if host.generation == "graph per model" else []), x.device)
        result = forward(self, x, *args, **kwargs)
        out.copy_(result)
        del result
        host.module.malloc_graph_end()
        return out

    return run


def _captured(host: CompilingHost, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        host.module.prefetch_queue_pop(
            None, HOME, self, core=lambda: found.append(forward(self, *args, **kwargs)), enable_graph=True,
            malloc_scope="block",
        )  # fmt: skip
        return found.pop()

    return run


@contextlib.contextmanager
def without_the_guard() -> Iterator[None]:
    with (
        mock.patch.object(split_tree, "outside", lambda devices: contextlib.nullcontext()),
        mock.patch.object(split_patcher, "outside", lambda devices: contextlib.nullcontext()),
    ):
        yield


def _sample(case: Case, compiling_host: CompilingHost, model: Any, **options: Any) -> torch.Tensor:
    """One node: ComfyUI cleans up behind each."""
    try:
        return case.host.sample(model, "flux2", **options)
    finally:
        compiling_host.module.cleanup_prefetch_queues()


@case
def beside_the_compiler(case: Case) -> None:
    one = case.host.load("flux2")
    expected = case.host.sample(one, "flux2")
    overlapped = case.host.sample(split(one), "flux2", cfg=5.0)
    for generation in GENERATIONS:
        with compiling(generation) as host:
            case.equal(f"{generation}: compiled on one card", _sample(case, host, one), expected)
            compiled = _compiled(host)
            holds = compiled[1] > 0 and (compiled[2] > 0) == host.records
            case.check(f"{generation}: it compiles", holds, compiled)
            case.equal(f"{generation}: split", _sample(case, host, split(one)), expected)
            case.equal(f"{generation}: two in flight", _sample(case, host, split(one), cfg=5.0), overlapped)
            case.check(f"{generation}: the split is not compiled", _compiled(host) == compiled, _compiled(host))
            case.check(f"{generation}: the switches are as they were", not any(host.switches()), host.switches())
            case.equal(f"{generation}: compiled again", _sample(case, host, one), expected)
            holds = (_compiled(host)[2] > compiled[2]) == host.records
            case.check(f"{generation}: without the split it compiles as before", holds, _compiled(host))
        _forget_recordings(one)


def _compiled(host: CompilingHost) -> tuple[int, int, int]:
    """Graphs, captured blocks, replays so far."""
    return len(host.graphs), host.num_captures, sum(graph.num_replays for graph in host.graphs)


def _forget_recordings(model: Any) -> None:
    for module in model.model.modules():
        for name in ("_comfy_graph", "_comfy_malloc_graph", "_comfy_warm"):
            module.__dict__.pop(name, None)


@case
def without_its_guard_the_compiler_fails(case: Case) -> None:
    divided = split(case.host.load("flux2"))
    for generation in GENERATIONS:
        words = ERROR if generation != "captures only" else CAPTURE_ERROR
        with compiling(generation) as host, without_the_guard():
            case.refused(generation, lambda: _sample(case, host, divided), RuntimeError, words)
        divided.cleanup()


@case
def a_graph_around_a_split(case: Case) -> None:
    divided = split(case.host.load("flux2"))
    expected = case.host.sample(divided, "flux2")
    with compiling() as host:
        host.module.malloc_graph_begin(HOME)
        case.equal("a graph that was left active", _sample(case, host, divided), expected)
        case.check("it was ended", not host.graphs[0].is_active, host.active())
        host.module.malloc_graph_begin(HOME)
        case.host.unload_all()
        divided.partially_load(HOME, 1e30)
        case.check("loading ends one, too", not host.graphs[1].is_active, host.active())
    with compiling("graph per model") as host:
        host.module.malloc_graph_begin(divided.model.diffusion_model, HOME)
        case.refused(
            "where the host cannot end it", lambda: _sample(case, host, divided), RuntimeError,
            "--disable-comfy-compiler",
        )  # fmt: skip
    _forget_recordings(divided)


@case
def an_interrupt_brings_the_compiler_back(case: Case) -> None:
    """In the sampler at once; else when ComfyUI cleans up or unloads, or with the end of the thread."""
    divided, load = split(case.host.load("flux2")), comfy.model_management.load_models_gpu
    expected, model = case.host.sample(divided, "flux2"), divided.model.diffusion_model
    forward = functools.partial(_forward, model)

    def cancelled(act: Callable[[], Any]) -> None:
        interrupt = mock.patch.object(model.single_blocks[-1], "forward", side_effect=InterruptProcessingException)
        with interrupt, contextlib.suppress(InterruptProcessingException):
            act()

    with compiling() as host:
        cancelled(lambda: _sample(case, host, divided))
        case.check("Cancel in a block of another card", not any(host.switches()), host.switches())
        for what, end in {"cleaning up": divided.cleanup, "unloading": case.host.unload_all}.items():
            load([divided])
            cancelled(forward)
            case.check(f"{what}: it is off until then", all(host.switches()), host.switches())
            end()
            case.check(f"Cancel outside the sampler, then {what}", not any(host.switches()), host.switches())
        load([divided])
        thread = threading.Thread(target=cancelled, args=(forward,))
        thread.start()
        thread.join()
        case.check("the end of the thread", not any(host.switches()), host.switches())
        forward()
        case.check("a forward that no sampler runs is not compiled", not host.graphs, len(host.graphs))
        case.check("and leaves the switches", not any(host.switches()), host.switches())
        case.equal("the next sampling", _sample(case, host, divided), expected)


def _forward(diffusion_model: Any) -> None:
    """One forward as a pack might call it."""
    width = diffusion_model.txt_in.weight.shape[1]
    channels = diffusion_model.params.in_channels
    x, text = torch.ones(1, channels, 4, 4).to(HOME), torch.ones(1, 8, width).to(HOME)
    diffusion_model(x, torch.ones(1).to(HOME), text, None, torch.ones(1).to(HOME))
