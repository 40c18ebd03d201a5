"""Simulated streams for emulated cards: each has a time up to which it is busy. Kernels and copies add to it the way
torch orders them. So a test sees what overlaps, and a kernel that reads what is not there yet is counted as a race."""

import contextlib
import threading
from unittest import mock

import torch
from devicebridge.parallel import transfer as transfer_module
from devicebridge.parallel.local import workers as workers_module
from devicebridge.tests.emulated import CARDS, EmulatedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class SimulatedStream:
    def __init__(self, machine, device):
        self.machine, self.device, self.busy_until = machine, torch.device(device), 0.0

    def record_event(self):
        return self.busy_until

    def wait_event(self, event):
        self.busy_until = max(self.busy_until, event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class SimulatedMachine:
    """What torch.cuda is to two cards: streams per card, a current one per card and thread, a current card."""

    def __init__(self, num_cards):
        self.streams_made = []
        self.default = {CARDS[index]: SimulatedStream(self, CARDS[index]) for index in range(num_cards)}
        self.local = threading.local()
        self.used_on = []  # (device, stream) of record_stream

    def Stream(self, device):
        self.streams_made.append(SimulatedStream(self, device))
        return self.streams_made[-1]

    def current_stream(self, device):
        device = CARDS[device] if isinstance(device, int) else device
        return self._current().get(device, self.default[device])

    def _current(self):
        if not hasattr(self.local, "streams"):
            self.local.streams, self.local.device = {}, 0
        return self.local.streams

    def set_stream(self, stream):
        self._current()[stream.device] = stream
        self.local.device = stream.device.index

    @contextlib.contextmanager
    def stream(self, stream):
        before, device = self.current_stream(stream.device), self.current_device()
        self.set_stream(stream)
        yield
        self.set_stream(before)
        self.set_device(device)

    @contextlib.contextmanager
    def device(self, index):
        before = self.current_device()
        self.set_device(index)
        yield
        self.set_device(before)

    def current_device(self):
        self._current()
        return self.local.device

    def set_device(self, index):
        self._current()
        self.local.device = index

    @contextlib.contextmanager
    def installed(self):
        """The module of the emulated cards, as far as our code asks for it; torch remembers its own answer."""
        with (
            mock.patch.object(workers_module, "device_module", lambda device: self),
            mock.patch.object(transfer_module, "device_module", lambda device: self),
        ):
            yield


# What takes a unit of time: linears (the first in inference mode), and in a backward each of their gradients.
KERNELS = {torch.ops.aten.linear.default, torch.ops.aten.addmm.default, torch.ops.aten.mm.default}


class Clock(TorchDispatchMode):
    """Gives a linear one unit on its card's current stream, and orders copies between cards as torch does. What a
    tensor holds is ready at a time; a kernel or copy that starts earlier is a race."""

    def __init__(self, machine, copy_cost):
        super().__init__()
        self.machine, self.copy_cost, self.races = machine, copy_cost, 0
        self.ready = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, EmulatedTensor)]
        if not tensors or not isinstance(out, EmulatedTensor):
            return out
        if is_view(func) and out.device == tensors[0].device:  # no kernel; aten.to may be a view, too, or a copy
            self.ready[out] = self.ready.get(tensors[0], 0.0)
            return out
        source, target = tensors[0].device, out.device
        streams = {self.machine.current_stream(source), self.machine.current_stream(target)}
        start = max(stream.busy_until for stream in streams)
        self.races += any(self.ready.get(tensor, 0.0) > start for tensor in tensors)
        cost = self.copy_cost if source != target else float(func in KERNELS)
        for stream in streams:
            stream.busy_until = start + cost
        self.ready[out] = start + cost
        return out


class HostClock(TorchDispatchMode):
    """A time for every copy to the host (1), from the host, and for products; counts what begins to read before it is
    there, or overwrites what is being read."""

    def __init__(self, machine, from_host_s, product_s=1.0):
        super().__init__()
        self.machine, self.races = machine, 0
        self.from_host_s, self.product_s = from_host_s, product_s
        self.held = []  # or other tensors would get the places of those that are gone
        self.there, self.read_until = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.held += [out, *args]
        given = args[1:] if func is torch.ops.aten.copy_.default else args
        read = [x for x in torch.utils._pytree.tree_leaves((given, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        cards = [x.device for x in (*read, *made) if isinstance(x, EmulatedTensor)]
        if not cards or is_view(func):
            return out
        stream = self.machine.current_stream(cards[0])
        start = stream.busy_until
        self.races += any(self.there.get(place_of(x), 0.0) > start for x in read)
        self.races += any(self.read_until.get(place_of(x), 0.0) > start for x in made)
        if func is torch.ops.aten.copy_.default and args[0].device != args[1].device:
            stream.busy_until += 1.0 if out.device.type == "cpu" else self.from_host_s
        stream.busy_until += self.product_s * (func in KERNELS)
        self.there |= dict.fromkeys(map(place_of, made), stream.busy_until)
        self.read_until |= dict.fromkeys(map(place_of, read), stream.busy_until)
        return out


def place_of(tensor):
    data = tensor.data_on_cpu if isinstance(tensor, EmulatedTensor) else tensor
    return data.untyped_storage().data_ptr()


def is_view(func):
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
