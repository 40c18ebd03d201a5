"""Brings what a block is called with to the device of the block (docs/decisions/0001-one-process-many-devices.md).
torch calls no hook for KeyboardInterrupt, so `end` restores what a block left behind. Hooks are not compiled: the
compiler would keep a copy for all forwards."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...families.comfy.native import PASSED_BY, Transport
from ...families.spec import ModelFamily
from ...patches.hooks import AfterHook, BeforeHook, HookSet, map_tensors, tensors_reached
from ..block_lists import called_modules, parts_of_tail
from ..offload.activations import MIN_BYTES, ActivationOffload
from ..offload.recompute import BlockCall, module_of, recompute
from ..placement import Placement, block_names
from ..staged_copies import SideStreams
from ..transfer import Arrivals, Versioned, copy_to, current_device, is_everywhere, settle, version_of
from .workers import ThreadPool

T = TypeVar("T")
Place = torch.device | int  # where a copy is: a device, or the rank of one of several that may be the same


class Traffic:
    """Decides when each of several forwards may go on; the bridge asks wherever they cross."""

    @property
    def arrivals(self) -> Arrivals | None:
        """Copies under way of this thread's forward; None if it is none of the several."""
        raise NotImplementedError

    def arrive(self, device: torch.device) -> None:
        """Return when this thread's forward may compute on device, with its copies ready for use there."""
        raise NotImplementedError

    def crossed(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """What the target has of a tensor: this copy, which is in no graph."""
        return copy


class Bridge:
    """Brings activations to blocks that live on several devices. Args: blocks: block -> its device, in execution order.
    main_device: of everything else. tail: modules after the last block; what they are called with is brought to
    tail_device. tail_device: where the last block's output goes; None for the main device. transport: "stream" leaves
    activations on a device until the next device's first block; "relay" brings every block's output back to the main
    device. passed_by: names of arguments and dict keys whose values are handed over as they are, the same object.
    per_device: names of keyword arguments with an object that blocks share computed tensors through. Any further device
    gets one of its own for the length of a forward: the object's class called without arguments."""

    def __init__(
        self,
        blocks: Mapping[nn.Module, torch.device],
        main_device: torch.device,
        *,
        tail: Sequence[nn.Module] = (),
        tail_device: torch.device | None = None,
        transport: Transport = "stream",
        passed_by: Collection[str] = (),
        per_device: Collection[str] = (),
    ) -> None:
        assert blocks
        self.blocks, self.main_device, self.transport = dict(blocks), main_device, transport
        self.tail, self.tail_device = tuple(tail), tail_device or main_device
        self.passed_by, self.per_device = frozenset(passed_by), tuple(per_device)
        # Whether no other people's code, which may change constants in place at any time, runs between and inside the
        # blocks. Else a copy serves one call of a block, and what the block writes into it is written into its source.
        self.runs_alone = True
        self.traffic: Traffic | None = None  # of interleaved runs
        self.entered: set[nn.Module] = set()  # what was called since it was made, of blocks and tail
        self.side_streams, self.pool = SideStreams(), ThreadPool()
        self._hooks, self._local, self._interleaving = HookSet(), _Local(), threading.Lock()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The main device first, then the others in the order they are reached."""
        return tuple(dict.fromkeys((self.main_device, *self.blocks.values())))

    @property
    def hook_ids(self) -> set[int]:
        return self._hooks.ids

    @property
    def is_running(self) -> bool:
        return self._local.copies is not None

    @property
    def current_device(self) -> torch.device:
        """Where this thread's forward has its activations: the device of the last block entered, else the main one."""
        return self._local.device if self.is_running else self.main_device

    def stay_on(self, device: torch.device) -> None:
        """Say where this thread's forward has its activations now, after a block was replaced or left out."""
        self._local.device = device

    def attach(self) -> None:
        if self._hooks:
            return
        last = next(reversed(self.blocks))
        for block, device in self.blocks.items():
            self._hooks.before(block, self._make_enter(block, device))
            self._hooks.after(block, self._make_leave(is_last=block is last))
            if device != self.main_device:
                self._hooks.after(block, torch.compiler.disable(self._restore_device), also_on_error=True)
        for module in self.tail:
            self._hooks.before(module, self._make_enter(module, self.tail_device, is_block=False))

    def remove(self) -> None:
        self._hooks.remove()

    def begin(self) -> None:
        """Start one forward of this thread, with nothing remembered. Raises: RuntimeError inside another one."""
        if self.is_running:
            raise RuntimeError(
                "a forward of this thread is running already; end it first, or run the second one in another thread"
            )
        self._local.copies = Copies()
        self._local.shared = {}
        self._local.device = self.main_device

    def end(self) -> None:
        """Forget this thread's forward, restore the current device a raising block left; a second call is a no-op."""
        local = self._local
        while local.guards:
            local.guards.pop()[1].__exit__(None, None, None)
        local.calls.clear()
        local.shared.clear()
        if local.copies is not None:
            local.copies.clear()
            local.copies = None

    def forget(self) -> None:
        """Forget the copies of this thread's forward: what they were made of may have changed."""
        if self._local.copies is not None:
            self._local.copies.clear()

    @contextmanager
    def interleaved(self, traffic: Traffic) -> Iterator[None]:
        """Let several threads have a forward each inside, as traffic says. Raises: RuntimeError inside another run."""
        if not self._interleaving.acquire(blocking=False):
            raise RuntimeError("this model runs interleaved forwards already; wait for them, runs do not nest")
        try:
            self.traffic = traffic
            yield
        finally:
            self.traffic = None
            self._interleaving.release()

    def move(self, value: T, device: torch.device) -> T:
        """Value with every tensor on device: itself, this forward's earlier copy, or a new one."""
        moved = self.send(value, device)
        if self.traffic is not None:
            settle(self.traffic.arrivals or {})
        return moved

    def send(self, value: T, device: torch.device) -> T:
        """As move, for use after this thread's forward has gone on to device: until then nothing there waits for it."""
        if not self.runs_alone:
            self.forget()
        return map_tensors(value, functools.partial(self._copy, device), self.passed_by)

    def bring(self, value: T, device: torch.device) -> T:
        """As move, and this thread's forward goes on there."""
        moved = self.send(value, device)
        self._go_on(device)
        return moved

    def _go_on(self, device: torch.device) -> None:
        if self.traffic is not None:
            self.traffic.arrive(device)
        self._local.device = device

    def _copy(self, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device or is_everywhere(tensor):
            return tensor  # the latter mixes with every device
        copies = self._local.copies
        if copies is None:
            return self._transfer(tensor, device)
        copy = copies.find(tensor, device)
        if copy is None:
            copy = copies.keep(tensor, device, self._transfer(tensor, device))
        if self._local.calls:
            self._local.calls[-1].copies.append((tensor, copy, copy._version))
        return copy

    def _transfer(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        arrivals = None if self.traffic is None else self.traffic.arrivals
        with nullcontext() if self.runs_alone else Versioned():
            if self.traffic is None or arrivals is None:
                return copy_to(tensor, device)
            source = tensor.detach() if tensor.requires_grad else tensor
            return self.traffic.crossed(tensor, self.side_streams.copy(source, device, arrivals))

    def _make_enter(self, block: nn.Module, device: torch.device, *, is_block: bool = True) -> BeforeHook:
        try:
            parameters = list(inspect.signature(block.forward).parameters)
        except (TypeError, ValueError):  # a callable written in C tells no names
            parameters = []
        kept = frozenset(index for index, name in enumerate(parameters) if name in self.passed_by)
        change = functools.partial(self._copy, device)

        def enter(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            local = self._local
            self.entered.add(module)
            if not self.runs_alone and local.copies is not None:
                self.forget()
                if is_block:
                    local.calls.append(_Call(module, []))
            if device != self.main_device:
                guard = current_device(device)
                guard.__enter__()
                local.guards.append((module, guard))
            rest = tuple(a if i in kept else map_tensors(a, change, self.passed_by) for i, a in enumerate(args))
            named = map_tensors(self._with_own(kwargs, device), change, self.passed_by)
            self._go_on(device)
            return rest, named

        return torch.compiler.disable(enter)

    def _with_own(self, kwargs: dict[str, Any], place: Place) -> dict[str, Any]:
        names = [name for name in self.per_device if name in kwargs] if place != self.main_device else []
        shared = self._local.shared
        return {**kwargs, **{name: shared.setdefault((name, place), type(kwargs[name])()) for name in names}}

    def _make_leave(self, *, is_last: bool) -> AfterHook:
        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            local = self._local
            goes_to = self.tail_device if is_last else self.main_device if self.transport == "relay" else None
            if local.calls:
                output = self._write_back(module, output, goes_to)
            if local.copies is not None and torch.is_inference_mode_enabled():
                local.copies.forget(output)
            return output if goes_to is None else self.bring(output, goes_to)

        return torch.compiler.disable(leave)

    def _write_back(self, module: nn.Module, output: Any, goes_to: torch.device | None) -> Any:
        """Write what the block wrote into copies of its arguments into what they are copies of. Returns: the block's
        output; where it is such a copy, the original instead, which others may read."""
        calls = self._local.calls
        if not any(call.module is module for call in calls):
            return output  # entered before the forward began
        while calls[-1].module is not module:  # ended by an exception that somebody caught
            calls.pop()
        handed = calls.pop().copies
        for source, copy, version in handed:
            if copy._version != version:
                source.copy_(copy)
        sources = {id(copy): source for source, copy, _ in handed if source.device == goes_to}
        return map_tensors(output, lambda tensor: sources.get(id(tensor), tensor)) if sources else output

    def _restore_device(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        guards = self._local.guards
        # The pre-hook may not have run: another one raised before it.
        if not any(owner is module for owner, _ in guards):
            return
        owner = None
        while owner is not module:
            owner, guard = guards.pop()
            guard.__exit__(None, None, None)


class _Call(NamedTuple):
    """One call of a block, and what it was given: source, copy, and the copy's version then."""

    module: nn.Module
    copies: list[tuple[torch.Tensor, torch.Tensor, int]]


class Copies:
    """The copies made for one forward of constants (modulation, rotary tables, text); each is kept while its source
    lives, under the source's version, which tensors in inference mode lack, and the grad mode."""

    def __init__(self) -> None:
        # By tensor: the version that it had, and its copies by place and grad mode.
        self._known: MutableMapping[torch.Tensor, tuple[int | None, dict[tuple[Place, bool], torch.Tensor]]]
        self._known = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, tensor: torch.Tensor, device: Place) -> torch.Tensor | None:
        version, copies = self._known.get(tensor, (None, {}))
        return copies.get((device, torch.is_grad_enabled())) if version == version_of(tensor) else None

    def keep(self, tensor: torch.Tensor, device: Place, copy: torch.Tensor) -> torch.Tensor:
        """Remember copy as the tensor's on device, and return it."""
        version, copies = self._known.get(tensor, (None, None))
        if copies is None or version != version_of(tensor):
            _, copies = self._known[tensor] = version_of(tensor), {}
        copies[device, torch.is_grad_enabled()] = copy
        return copy

    def forget(self, value: Any) -> None:
        """Copy the tensors in value again when they are next asked for."""
        for tensor in tensors_reached(value) if self._known else ():
            self._known.pop(tensor, None)

    def clear(self) -> None:
        self._known.clear()


class _Local(threading.local):
    """What a thread's forward keeps; copies is None between forwards."""

    def __init__(self) -> None:
        self.copies: Copies | None = None
        self.shared: dict[tuple[str, Place], Any] = {}  # the objects of per_device
        self.device = torch.device("cpu")  # read while a forward runs only, begin() sets it
        self.guards: list[tuple[nn.Module, AbstractContextManager[Any]]] = []
        self.calls: list[_Call] = []  # of blocks, innermost last; none where only the model's own code runs


# ---- one model over several devices: every block computes where its weights are

Recompute = Callable[[nn.Module | BlockCall, tuple[Any, ...], torch.device, ActivationOffload | None], Any]


class BlockSplit:
    """Handle of a model whose blocks are where the placement says, the rest on the main device: one forward runs over
    all, by hooks. Its output is on the placement's tail device. Several threads may call it at once."""

    def __init__(self, model: nn.Module, family: ModelFamily, placement: Placement) -> None:
        self.model, self._family, self.placement = model, family, placement
        assert placement.blocks == block_names(model, family), "it is planned for this model"
        self._called = {name: called_modules(model, family, name) for name in placement.blocks}
        self.bridge = Bridge(
            {module: device for name, device in placement.items() for module in self._called[name]},
            placement.main_device,
            tail=parts_of_tail(model, family)[0],
            tail_device=placement.tail_device,
            transport="stream" if family.native is None else family.native.transport,
            passed_by=() if family.native is None else PASSED_BY,
        )
        self._kept: frozenset[nn.Module] = frozenset()
        self.offload: ActivationOffload | None = None
        self.recompute: Recompute = recompute
        self._hooks = HookSet()
        self.attach()

    @property
    def main_device(self) -> torch.device:
        return self.placement.main_device

    def attach(self) -> None:
        self._hooks.before(self.model, self._start)
        self.bridge.attach()
        if self.bridge.tail_device != self.main_device:
            # What the tail reads past its modules goes there, too. Else a pipeline's last stage would run backwards
            # through the first, whose graph is another microbatch's or has been used.
            native, modules = self._family.native, dict(self.model.named_modules())
            for name, index in self._family.read_by_tail.items():
                if name in modules:
                    self._hooks.after(modules[name], lambda *call, index=index: self._bring_part(index, call[-1]))
                else:
                    self._hooks.around_method(self.model, name, functools.partial(self._bring_result, index))
            for name, arguments in ({} if native is None else native.tail_arguments).items():
                self._hooks.around_method(self.model, name, functools.partial(self._bring_arguments, arguments))
        self._hooks.after(self.model, lambda *call: self.bridge.move(call[-1], self.bridge.tail_device))
        self._hooks.after(self.model, lambda *call: self.bridge.end(), also_on_error=True)

    def remove(self) -> None:
        """Take the hooks off; a second call is a no-op."""
        self._hooks.remove()
        self.bridge.remove()
        self.bridge.end()
        self.stop_offload()

    def checkpoint(self, block: nn.Module | BlockCall, *args: Any) -> Any:
        """Run a block without keeping its activations; for diffusers' enable_gradient_checkpointing. torch's own looks
        for devices among the arguments. Before the first block of a device these are elsewhere, so dropout would be
        drawn anew and the gradient silently wrong."""
        module = module_of(block)
        device = self.bridge.blocks[module]
        moved = self.bridge.bring(args, device) if self._hooks else args
        return block(*moved) if module in self._kept else self.recompute(block, moved, device, self.offload)

    def offload_inputs(self, *, min_bytes: int = MIN_BYTES) -> None:
        """Let what recomputed blocks keep wait in host memory, from the next forward on; see activations.py."""
        self.stop_offload()
        self.offload = ActivationOffload(self.bridge.devices, min_bytes=min_bytes)

    def stop_offload(self) -> None:
        if self.offload is not None:
            self.offload.close()
        self.offload = None

    def keep_activations(self, num_blocks: Sequence[int]) -> None:
        """Let checkpoint recompute all but the last blocks of each device, whose memory its backward frees first.
        num_blocks: as check_kept_and_offloaded allows; () keeps none. [num_devices]"""
        kept: list[str] = []
        for device, count in zip(self.bridge.devices, num_blocks, strict=bool(num_blocks)):
            names = [name for name, place in self.placement.items() if place == device]
            kept += names[len(names) - count :]
        self._kept = frozenset(module for name in kept for module in self._called[name])

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.bridge.end()  # torch calls no hook of ours when KeyboardInterrupt ends a forward
        self.bridge.begin()
        return self.bridge.move((args, kwargs), self.main_device)

    def _bring_result(
        self, index: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        native = self._family.native
        # What the method of the tail will be given too: there it is found, so that no copy waits for later work.
        for name in () if native is None else itertools.chain(*native.tail_arguments.values()):
            if name in kwargs:
                self.bridge.send(kwargs[name], self.bridge.tail_device)
        return self._bring_part(index, own(*args, **kwargs))

    def _bring_part(self, index: int, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """What was returned, with the tail's part of it there. What needs no gradient diffusers' own forwards bring."""
        native = self._family.native
        if native is None and not output[index].requires_grad:
            return output
        bring = self.bridge.move if native is not None and native.mixes_early else self.bridge.send
        return (*output[:index], bring(output[index], self.bridge.tail_device), *output[index + 1 :])

    def _bring_arguments(
        self, names: Collection[str], own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        brought = {name: self.bridge.move(kwargs[name], self.bridge.tail_device) for name in names if name in kwargs}
        return own(*args, **{**kwargs, **brought})
