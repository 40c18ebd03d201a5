"""ComfyUI's compiler, simulated on emulated cards: it records allocations, captures blocks, and minds what is foreign.

Written after what was read of comfy/model_prefetch.py and comfy_aimdo (docs/internals/upstream_facts.md). Where the
real process would end, or hand out memory of another card, the graph fails here. `Generation` says which of the host's
shapes it has: 0.33 only captures blocks, 0.35 keeps a graph on the model, later versions keep one per thread.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch

from .emulated import DEVICE_TYPE, EmulatedTensor, live_tensors

Generation = Literal["captures only", "graph per model", "graph per thread"]
ERROR = "aimdo memory compile error"
CAPTURE_ERROR = "CUDA error: operation not permitted when stream is capturing"


class AllocationGraph:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.owner = threading.get_ident()
        self.is_active, self.is_paused, self.has_failed = True, False, False
        self.recorded: list[Any] | None = None
        self.events: list[Any] = []
        self.num_replays = 0
        self._comfy_active = False

    def note(self, event: Any) -> None:
        self._check()
        if self.recorded is not None and self.recorded[len(self.events) : len(self.events) + 1] != [event]:
            self._fail(f"the sequence changed at event {len(self.events)}: {event}")
        self.events.append(event)

    def allocate(self, device: torch.device, num_bytes: int) -> None:
        if device != self.device:
            self._fail(f"memory of {self.device} for a tensor on {device}")
        self.note(num_bytes)

    def iterate(self, name: str | None) -> bool:
        self.note(("scope", name))
        return False

    def push(self) -> None:
        self._check()
        self.is_active, self.num_replays = True, self.num_replays + 1

    def pop(self) -> bool:
        self._check()
        if self.recorded is not None and len(self.events) != len(self.recorded):
            self._fail("the sequence became shorter")
        self.recorded, self.events, self.is_active = self.events, [], False
        return False

    def abort(self) -> None:
        self.is_active = False

    def pause(self, sync: bool = False) -> None:
        self._check()
        self.is_paused = True

    def resume(self, sync: bool = False) -> None:
        self._check()
        self.is_paused = False

    def _check(self) -> None:
        if self.has_failed or threading.get_ident() != self.owner:
            raise RuntimeError(ERROR)

    def _fail(self, why: str) -> None:
        self.has_failed = True
        raise RuntimeError(ERROR) from ValueError(why)


class _Memory:
    """Which storages of emulated tensors live, and which graph gave them out."""

    def __init__(self, active: Callable[[], AllocationGraph | None]) -> None:
        self._active = active
        self._num_holders: dict[int, int] = {}
        self._given_by: dict[int, AllocationGraph] = {}
        for tensor in live_tensors():
            self._hold(tensor)

    def add(self, tensor: EmulatedTensor) -> None:
        address, graph = self._hold(tensor), self._active()
        if self._num_holders.get(address) == 1 and graph is not None and graph.is_active and not graph.is_paused:
            self._given_by[address] = graph
            graph.allocate(tensor.device, tensor.data_on_cpu.untyped_storage().nbytes())

    def _hold(self, tensor: EmulatedTensor) -> int:
        """Address of the tensor's storage; empty ones are not held."""
        address = tensor.data_on_cpu.untyped_storage().data_ptr()
        if address:
            self._num_holders[address] = self._num_holders.get(address, 0) + 1
            weakref.finalize(tensor, self._remove, address).atexit = False
        return address

    def _remove(self, address: int) -> None:
        self._num_holders[address] -= 1
        if self._num_holders[address] == 0:
            del self._num_holders[address]
            graph = self._given_by.pop(address, None)
            if graph is not None and graph.is_active and graph.owner != threading.get_ident():
                graph.has_failed = True


class CompilingHost:
    """The simulated host: its command line, its module `comfy.model_prefetch`, and what it has recorded.

    Args:
        args: comfy.cli_args.args, or a stand-in; its switches are off inside `installed`.
    """

    def __init__(self, args: Any, generation: Generation = "graph per thread") -> None:
        self.args = args
        self.generation = generation
        self.graphs: list[AllocationGraph] = []
        self.num_captures = 0
        self.module = self._make_module()

    @contextlib.contextmanager
    def installed(self, modules: dict[str, Any], comfy: Any) -> Iterator[None]:
        """Inside, this is the host's compiler, and emulated tensors are what it sees."""
        make, memory = EmulatedTensor.__new__, _Memory(self.active)

        def make_and_note(cls: Any, data: torch.Tensor, device: torch.device) -> EmulatedTensor:
            tensor = make(cls, data, device)
            memory.add(tensor)
            return tensor

        with (
            mock.patch.object(EmulatedTensor, "__new__", staticmethod(make_and_note)),
            _entry(modules, "comfy.model_prefetch", self.module),
            mock.patch.object(comfy, "model_prefetch", self.module, create=True),
            mock.patch.object(self.args, "disable_cuda_graphs", False, create=True),
            mock.patch.object(self.args, "disable_comfy_compiler", False, create=True)
            if self.records
            else contextlib.nullcontext(),
        ):
            yield

    @property
    def records(self) -> bool:
        """Whether it knows allocation graphs."""
        return self.generation != "captures only"

    def switches(self) -> list[bool]:
        """What its command line says now."""
        names = ("disable_comfy_compiler", "disable_cuda_graphs")
        return [getattr(self.args, name) for name in names if hasattr(self.args, name)]

    def active(self) -> AllocationGraph | None:
        thread = threading.get_ident()
        if self.generation == "graph per model":
            return self.module.ACTIVE_MALLOC_GRAPHS.get(thread)
        graph = getattr(self.module, "MALLOC_GRAPHS", {}).get(thread)
        return graph if graph is not None and graph._comfy_active else None

    # ---- the module

    def _make_module(self) -> ModuleType:
        module: Any = ModuleType("comfy.model_prefetch")
        module.prefetch_queue_pop = self._pop_queue
        module.make_prefetch_queue = lambda queue, device, options: None
        module.cleanup_prefetch_queues = self._clean_up
        if not self.records:
            return module
        module.malloc_graph_enabled = self._is_enabled
        module.malloc_graph_begin = self._begin
        module.malloc_graph_end = self._end
        if self.generation == "graph per model":
            module.ACTIVE_MALLOC_GRAPHS = {}
        else:
            module.MALLOC_GRAPHS = {}
            module.cleanup_malloc_graph = self._clean_up
            module.pause_malloc_graph = self._pause
        return module

    def _is_enabled(self, device: torch.device) -> bool:
        return not self.args.disable_comfy_compiler and device.type == DEVICE_TYPE

    def _begin(self, *module_and_device: Any) -> None:
        device = module_and_device[-1]
        if not self._is_enabled(device):
            return
        owner = self._owner(*module_and_device)
        graph = owner.get("graph")
        if graph is None:
            if self.active() is not None:
                raise RuntimeError(f"{ERROR}: could not start recording")
            graph = owner["graph"] = AllocationGraph(device)
            self.graphs.append(graph)
        else:
            graph.push()
        graph._comfy_active = True
        names = "ACTIVE_MALLOC_GRAPHS" if self.generation == "graph per model" else "MALLOC_GRAPHS"
        getattr(self.module, names)[threading.get_ident()] = graph

    def _owner(self, *module_and_device: Any) -> dict[str, AllocationGraph]:
        """Where the graph of this call is kept."""
        if self.generation == "graph per model":
            return module_and_device[0].__dict__.setdefault("_comfy_malloc_graph", {})
        graph = self.module.MALLOC_GRAPHS.get(threading.get_ident())
        return {} if graph is None else {"graph": graph}

    def _end(self) -> None:
        graph = self.active()
        if graph is not None:
            graph.pop()
            graph._comfy_active = False
            getattr(self.module, "ACTIVE_MALLOC_GRAPHS", {}).pop(threading.get_ident(), None)

    def _clean_up(self) -> None:
        graphs = getattr(self.module, "MALLOC_GRAPHS", None) or getattr(self.module, "ACTIVE_MALLOC_GRAPHS", {})
        graph = graphs.pop(threading.get_ident(), None)
        if graph is not None and graph._comfy_active:
            graph._comfy_active = False
            graph.abort()

    @contextlib.contextmanager
    def _pause(self, sync: bool = False) -> Iterator[None]:
        graph = self.active()
        if graph is not None:
            graph.pause(sync)
        try:
            yield
        finally:
            if graph is not None:
                graph.resume(sync)

    def _pop_queue(
        self, queue: Any, device: torch.device, module: Any, dtype: torch.dtype | None = None,
        core: Callable[[], None] | None = None, enable_graph: bool = False, generator: Any = None,
        malloc_scope: str | None = None,
    ) -> None:  # fmt: skip
        graph = self.active()
        if graph is not None and malloc_scope is not None:
            graph.iterate(malloc_scope if module is not None else None)
        if core is None:
            return
        if not enable_graph or self.args.disable_cuda_graphs or (self.records and graph is None):
            core()
            return
        if "_comfy_warm" in module.__dict__:
            self._capture(module, device)
        module.__dict__["_comfy_warm"] = True
        core()

    def _capture(self, block: torch.nn.Module, device: torch.device) -> None:
        """A recording of this block's kernels on one card."""
        if "_comfy_graph" not in block.__dict__:
            if any(weight.device != device for weight in block.parameters()):
                raise RuntimeError(CAPTURE_ERROR)
            block.__dict__["_comfy_graph"] = SimpleNamespace(device=device, thread=threading.get_ident())
            self.num_captures += 1


@contextlib.contextmanager
def _entry(modules: dict[str, Any], name: str, module: ModuleType) -> Iterator[None]:
    """modules[name] is this module inside; unlike mock.patch.dict this keeps what is imported meanwhile."""
    before = modules.get(name)
    modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del modules[name]
        else:
            modules[name] = before
