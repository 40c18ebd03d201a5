"""Several emulated cards on a CPU build of torch, with real numbers, forward and backward.

A tensor subclass holds CPU data and reports the device `lazy:k`. Every operation is checked the way a CUDA build would
(tensors of two devices do not mix; 0-dim CPU tensors and CPU indices do) and then run on the CPU data, so a split model
computes real numbers and a missing bridge raises. Copies between devices are listed with their sizes, and `live_bytes`
says what a card holds.

Why `lazy`: torch registers a device guard for that type and the autograd engine runs it on the CPU queue. The types
`cuda` and `privateuseone` abort in the engine; `meta` lets mixed in-place operations pass with garbage. What makes
tensors without asking a dispatch mode is led over the CPU. Not emulated: streams, peer access, low-precision kernels,
speed; and torch.compile lets everything run as it is.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo.variables  # which remembers functions of torch that are others inside device_module
from torch._tensor import _convert
from torch.overrides import get_default_nowrap_functions
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
DEVICE_TYPE = "lazy"
CARDS = tuple(torch.device(DEVICE_TYPE, index) for index in range(8))

_LIVE = WeakIdKeyDictionary()  # every emulated tensor that somebody still holds, with its card and its data

_COPIES_BETWEEN_DEVICES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default, aten.copy.default}
_COUNTED_COPIES = {aten._to_copy.default: 0, aten.copy_.default: 1}  # which argument is copied
_RETURNS_HOST_VALUE = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_TAKES_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_OF_DEVICES = frozenset({"device", "pin_memory", "non_blocking"})
_GENERATORS = [torch.Generator() for _ in CARDS]  # each card has its own, as on GPUs


@dataclass(frozen=True)
class Copy:
    source: torch.device
    target: torch.device
    num_bytes: int
    shape: tuple[int, ...]


class _Facts:
    """What is asked of an operation whenever it runs, and is slow to find out."""

    def __init__(self, func: Any) -> None:
        self.func = func  # held, for operations are known by their id
        self.run = func._op  # which a call of func runs
        self.names_device = any("Device" in str(argument.type) for argument in func._schema.arguments)
        returns = func._schema.returns
        alias = returns[0].alias_info if len(returns) == 1 else None
        self.is_in_place = alias is not None and alias.is_write
        self.is_view = func.is_view
        self.is_copy = func in _COPIES_BETWEEN_DEVICES
        self.copied = _COUNTED_COPIES.get(func)
        self.returns_host_value = func in _RETURNS_HOST_VALUE
        self.takes_indices = func in _TAKES_INDICES
        self.has_own_versions = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.draws = is_random and any(argument.name == "generator" for argument in func._schema.arguments)
        # Not made of others; or composites that compute, which the CPU's data goes through with the same bits.
        self.is_simple = func in (aten.linear.default, aten.matmul.default)


_FACTS: dict[int, _Facts] = {}
_PRODUCTS = (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.einsum)
_PRODUCTS += (aten.scaled_dot_product_attention,)
_IN_DOUBLES: dict[int, Any] = {}  # by an operation's id: what computes it inside exact_products


def _facts(func: Any) -> _Facts:
    found = _FACTS.get(id(func))
    if found is None:
        found = _FACTS[id(func)] = _Facts(func)
    return found


class EmulatedTensor(torch.Tensor):
    """CPU data that claims to be on an emulated card."""

    data_on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device) -> EmulatedTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=data.dtype, layout=data.layout, device=device, strides=data.stride(),
            storage_offset=data.storage_offset(),
        )  # fmt: skip
        self.data_on_cpu = data
        _LIVE[self] = device, data
        return self

    def __init__(self, *args: Any) -> None:
        pass

    __hash__ = torch.Tensor.__hash__
    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """As Module.to does with parameters, which it keeps."""
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        if isinstance(value, EmulatedTensor):
            self.data_on_cpu = value.data_on_cpu
            _LIVE[self] = value.device, value.data_on_cpu

    def __repr__(self) -> str:
        return f"EmulatedTensor({self.device}, {tuple(self.shape)}, {self.dtype})"

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_lists_as_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_lists_as_indices(index), value)

    def tolist(self) -> Any:
        return self.data_on_cpu.tolist()

    def as_subclass(self, cls: type) -> Any:  # type: ignore[override]
        """On a card, too, a tensor of a class that a library made to hang its own attributes and methods on."""
        if issubclass(type(self), cls):
            return self
        return EmulatedTensor.__new__(_on_cards(cls), self.data_on_cpu, self.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {}, [], None)


@functools.cache
def _on_cards(library_class: type) -> type:
    """A library's tensor class, on an emulated card; its operations return that class, unless it says otherwise."""

    def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out if func in get_default_nowrap_functions() else _convert(out, library_class)

    has_its_own = library_class.__torch_function__.__func__ is not torch.Tensor.__torch_function__.__func__
    name, members = f"Emulated{library_class.__name__}", {} if has_its_own else {"__torch_function__": classmethod(run)}
    return type(name, (library_class, EmulatedTensor), members)


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_OTHER_TYPES = frozenset({int, float, bool, type(None), torch.dtype, torch.layout, torch.memory_format})


class EmulatedCards(TorchDispatchMode):
    """While active, factories and copies aimed at `lazy:k` make emulated tensors, and copies are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, which is called a million times, for torch.compile

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not types and not _facts(func).names_device:  # as most are: no tensor of a subclass, no card
            return _IN_DOUBLES.get(id(func), _facts(func).run)(*args, **(kwargs or {}))
        # Under inference mode `to` and the like come here whole, with the device among the arguments.
        return _dispatch(func, args, kwargs or {}, self.copies, self)


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any], copies: list[Copy], mode: EmulatedCards | None) -> Any:
    found = _Arguments(args, kwargs)
    if found.is_for_another_subclass:
        return NotImplemented
    if mode is not None and not found.is_ours:
        return _IN_DOUBLES.get(id(func), func)(*args, **kwargs)
    facts = _facts(func)
    if not (facts.is_simple or id(func) in _IN_DOUBLES):
        if mode is None:
            out = _run_composite(facts, args, kwargs)
        else:
            with mode:
                out = _run_composite(facts, args, kwargs)
        if out is not NotImplemented:
            return out
    return _run(facts, args, kwargs, found.tensors, copies)


class _Arguments:
    """Tensors among an operation's arguments; whether one is emulated or a card is named; whether one is quantised. A
    quantised tensor's own dispatch comes back here with the tensors it is made of."""

    __slots__ = ("is_for_another_subclass", "is_ours", "tensors")

    def __init__(self, args: Any, kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.is_ours = self.is_for_another_subclass = False
        for value in args:
            self._take(value)
        for value in kwargs.values():
            self._take(value)

    def _take(self, value: Any) -> None:
        kind = type(value)
        if kind is EmulatedTensor:
            self.is_ours = True
            self.tensors.append(value)
        elif kind in _PLAIN_TYPES:
            self.tensors.append(value)
        elif kind in _OTHER_TYPES:
            pass
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._take(each)
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self.is_ours |= isinstance(value, EmulatedTensor)
            self.is_for_another_subclass |= is_traceable_wrapper_subclass(value)
        elif isinstance(value, torch.device):
            self.is_ours |= value.type == DEVICE_TYPE
        elif isinstance(value, str):
            self.is_ours |= value.startswith(DEVICE_TYPE)


def _lists_as_indices(index: Any) -> Any:
    """torch would make a list's tensor on the card without asking a dispatch mode."""
    if isinstance(index, tuple):
        return tuple(_lists_as_indices(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _run_composite(facts: _Facts, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation made of others, run as those; NotImplemented for a simple one, which is remembered."""
    if facts.func is aten._has_compatible_shallow_copy_type.default:
        return False  # asked by Module.to under inference mode; the data lies beside the tensor
    # Inside a dispatch the key that keeps versions and views is left out; what an operation is made of needs it. Not
    # where that key has the operation itself: then it makes a view of what comes back.
    if facts.has_own_versions:
        out = facts.func.decompose(*args, **kwargs)
    else:
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            out = facts.func.decompose(*args, **kwargs)
    facts.is_simple = out is NotImplemented
    return out


def _run(facts: _Facts, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor], copies: list[Copy]) -> Any:
    devices = _devices(facts, tensors)
    if len(devices) > 1 and not facts.is_copy:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{devices[0]} and {devices[1]}! (emulated; {facts.func})"
        )
    target = _target(facts.func, args, kwargs, devices, tensors)
    if facts.copied is not None:
        _count(args[facts.copied], target, copies)
    plain_kwargs = {k: _plain(v) for k, v in kwargs.items() if k not in _OF_DEVICES}
    if facts.draws and target.type == DEVICE_TYPE and plain_kwargs.get("generator") is None:
        plain_kwargs["generator"] = _GENERATORS[target.index]
    if "device" in kwargs:
        plain_kwargs["device"] = torch.device("cpu")
    run = _IN_DOUBLES.get(id(facts.func), facts.run)
    run = functools.partial(_dropout, _GENERATORS[target.index]) if facts.func is aten.native_dropout.default else run
    out = run(*map(_plain, args), **plain_kwargs)
    if facts.returns_host_value:
        return out
    if facts.is_in_place:
        return kwargs.get("out", args[0])
    if target.type == "cpu":
        return out
    if facts.is_view and torch.is_inference_mode_enabled() and tensors and not tensors[0].is_inference():
        # In inference mode, too, a view of an ordinary tensor is ordinary: both have one version, which counts writes.
        with torch.inference_mode(False):
            return _on_card(out, target)
    return _on_card(out, target)


def _dropout(
    generator: torch.Generator, x: torch.Tensor, p: float, is_training: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """native_dropout, which takes no generator."""
    kept = torch.empty(x.shape).bernoulli_(1 - p, generator=generator).bool() if is_training else x.bool() | True
    return (x * kept / (1 - p) if is_training else x.clone()), kept


def _on_card(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return EmulatedTensor(value, device)
    if isinstance(value, (list, tuple)):
        return type(value)(_on_card(item, device) for item in value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, EmulatedTensor):
        return value.data_on_cpu
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value


def _devices(facts: _Facts, tensors: list[torch.Tensor]) -> list[torch.device]:
    found: list[torch.device] = []
    for position, tensor in enumerate(tensors):
        device = tensor.device
        if device in found or (
            device.type == "cpu" and (tensor.ndim == 0 or (facts.takes_indices and position > 0))  # these mix
        ):
            continue
        found.append(device)
    return found


def _target(
    func: Any, args: Any, kwargs: dict[str, Any], devices: list[torch.device], tensors: list[torch.Tensor]
) -> torch.device:
    if kwargs.get("device") is not None:
        target = torch.device(kwargs["device"])
        return torch.device(DEVICE_TYPE, target.index or 0) if target.type == DEVICE_TYPE else target
    if func is aten.copy_.default:
        return args[0].device
    if devices:
        return devices[0]
    return tensors[0].device if tensors else torch.device("cpu")


def _count(tensor: torch.Tensor, target: torch.device, copies: list[Copy]) -> None:
    if tensor.device != target:
        copies.append(Copy(tensor.device, target, tensor.numel() * tensor.element_size(), tuple(tensor.shape)))


@contextlib.contextmanager
def emulated_cards(num_cards: int = 2) -> Iterator[EmulatedCards]:
    """A machine with this many emulated cards: `torch.device("lazy:k")` works, and `torch.lazy` is their module."""
    module = types.SimpleNamespace(
        _initialized=False, is_available=lambda: True, current_device=lambda: 0, device_count=lambda: num_cards,
        device=lambda index: contextlib.nullcontext(), synchronize=lambda *device: None,
        get_rng_state=lambda device: _GENERATORS[torch.device(device).index].get_state(),
        set_rng_state=lambda state, device: _GENERATORS[torch.device(device).index].set_state(state),
    )  # fmt: skip
    for index, generator in enumerate(_GENERATORS):
        generator.manual_seed(index)
    with device_module(module), EmulatedCards() as cards:
        yield cards


def _in_doubles(func: Any, *args: Any, **kwargs: Any) -> Any:
    dtypes: list[torch.dtype] = []

    def widened(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(widened, value))
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            dtypes.append(value.dtype)
            return value.double()
        return value

    output = func(*map(widened, args), **{name: widened(value) for name, value in kwargs.items()})
    return output.to(dtypes[0])


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Inside emulated_cards, sums of products are rounded once, from float64: their bits do not depend on how many rows
    there are, by which kernels are chosen otherwise. Also of tensors on the CPU, in the thread of the cards."""
    _IN_DOUBLES.update((id(each.default), functools.partial(_in_doubles, each.default)) for each in _PRODUCTS)
    try:
        yield
    finally:
        _IN_DOUBLES.clear()


@contextlib.contextmanager
def device_module(module: Any) -> Iterator[None]:
    """Inside, `torch.lazy` is this module. Torch looks a device type's module up once and remembers it for the process:
    it is made to forget, so that what comes before or after finds its own. Autocast is off there, as torch would say of
    a GPU; for this type, which knows none, it raises."""
    torch.get_device_module.cache_clear()
    try:
        with (
            mock.patch.object(torch, DEVICE_TYPE, module, create=True),
            mock.patch.object(torch, "is_autocast_enabled", _autocast_is_enabled),
        ):
            yield
    finally:
        torch.get_device_module.cache_clear()


def _autocast_is_enabled(*device_type: str, ask: Callable[..., bool] = torch.is_autocast_enabled) -> bool:
    return device_type != (DEVICE_TYPE,) and ask(*device_type)


@contextlib.contextmanager
def factories_on_cards() -> Iterator[None]:
    """While active torch.tensor, torch.as_tensor and torch.Generator take emulated cards, too. For processes of their
    own: libraries that are imported meanwhile keep the stand-ins (transformers then leaves buffers of models that it
    loads uninitialised)."""
    with (
        mock.patch.object(torch, "tensor", _by_way_of_the_cpu(torch.tensor)),
        mock.patch.object(torch, "as_tensor", _by_way_of_the_cpu(torch.as_tensor)),
        mock.patch.object(torch, "Generator", _Generator),
    ):
        yield


class _Generator(torch.Generator):
    """Random numbers of an emulated card are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == DEVICE_TYPE else device)


def _by_way_of_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory that no dispatch mode sees: its tensor is made on the CPU and then put on the card."""

    def make_there(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != DEVICE_TYPE:
            return make(data, *args, device=device, **kwargs)
        return make(data, *args, **kwargs).to(device)

    return make_there


def on_cpu(value: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, wherever it is, as an ordinary CPU tensor without history."""
    value = value.detach()
    return value.data_on_cpu if isinstance(value, EmulatedTensor) else value


def live_bytes(device: torch.device) -> int:
    """Bytes of all storages of this emulated device that some tensor still holds; views count once."""
    storages = {}
    for card, data in list(_LIVE.data.values()):  # asked after every operation: tensors' own properties would be slow
        if card == device:
            storage = data.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def live_tensors() -> list[EmulatedTensor]:
    while True:
        try:
            return list(_LIVE)
        except RuntimeError:  # another thread made or dropped one meanwhile
            continue
