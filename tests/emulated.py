"""Several emulated cards on a CPU build of torch, with real numbers, forward and backward.

A tensor subclass holds CPU data and reports the device `lazy:k`. Every operation is checked the way a CUDA build would
(tensors of two devices do not mix; 0-dim CPU tensors and CPU indices do) and then run on the CPU data, so a split model
computes real numbers and a missing bridge raises. Copies between devices are listed with their sizes, and `live_bytes`
says what a card holds.

Why `lazy`: torch registers a device guard for that type and the autograd engine runs it on the CPU queue, so backward
works over several devices. The types `cuda` and `privateuseone` abort in the engine; `meta` lets mixed in-place
operations pass with garbage. What makes tensors without asking a dispatch mode (torch.tensor, generators, lists as
indices) is led over the CPU; tensors made of others, as quantised ones are, see emulated tensors inside. Not emulated:
streams, peer access, low-precision kernels, speed; and torch.compile lets everything run as it is.
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
from torch._tensor import _convert
from torch.overrides import get_default_nowrap_functions
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
DEVICE_TYPE = "lazy"
CARDS = tuple(torch.device(DEVICE_TYPE, index) for index in range(4))

_LIVE = WeakIdKeyDictionary()  # every emulated tensor that somebody still holds

_COPIES_BETWEEN_DEVICES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default, aten.copy.default}
_RETURNS_HOST_VALUE = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
_TAKES_INDICES = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
_GENERATORS = [torch.Generator() for _ in CARDS]  # each card has its own, as on GPUs
_SIMPLE: set[Any] = set()  # operations that are not made of others


@dataclass(frozen=True)
class Copy:
    source: torch.device
    target: torch.device
    num_bytes: int
    shape: tuple[int, ...]


class EmulatedTensor(torch.Tensor):
    """CPU data that claims to be on an emulated card."""

    data_on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor, device: torch.device) -> EmulatedTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            data.shape,
            dtype=data.dtype,
            layout=data.layout,
            device=device,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
        )
        self.data_on_cpu = data
        _LIVE[self] = None
        return self

    def __init__(self, *args: Any) -> None:
        pass

    __hash__ = torch.Tensor.__hash__
    __torch_function__ = torch._C._disabled_torch_function_impl

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
        kwargs = kwargs or {}
        if _is_for_another_subclass(_values(args, kwargs)):
            return NotImplemented
        out = NotImplemented if func in _SIMPLE else _run_composite(func, args, kwargs)
        return _run(func, args, kwargs, []) if out is NotImplemented else out


@functools.cache
def _on_cards(library_class: type) -> type:
    """A library's tensor class, on an emulated card; what its operations return is of that class again, anywhere."""

    def run(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out if func in get_default_nowrap_functions() else _convert(out, library_class)

    name, members = f"Emulated{library_class.__name__}", {"__torch_function__": classmethod(run)}
    return type(name, (library_class, EmulatedTensor), members)


_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, EmulatedTensor})


class EmulatedCards(TorchDispatchMode):
    """While active, factories and copies aimed at `lazy:k` make emulated tensors, and copies are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Copy] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = _values(args, kwargs)
        if _is_for_another_subclass(values):
            return NotImplemented
        if not any(_is_ours(value) for value in values):
            return func(*args, **kwargs)
        if func not in _SIMPLE:
            with self:  # under inference mode `to` and the like come here whole, with the device among the arguments
                out = _run_composite(func, args, kwargs)
            if out is not NotImplemented:
                return out
        return _run(func, args, kwargs, self.copies)


def _is_ours(x: Any) -> bool:
    return isinstance(x, EmulatedTensor) or (isinstance(x, (torch.device, str)) and str(x).startswith(DEVICE_TYPE))


def _values(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Arguments of an operation, lists of tensors taken apart; operations nest no deeper."""
    values: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            values.extend(value)
        else:
            values.append(value)
    return values


def _is_for_another_subclass(values: list[Any]) -> bool:
    """Whether a quantised tensor is among them: its own dispatch comes back here with the tensors it is made of."""
    return any(
        isinstance(value, torch.Tensor) and type(value) not in _PLAIN_TYPES and is_traceable_wrapper_subclass(value)
        for value in values
    )


def _lists_as_indices(index: Any) -> Any:
    """torch would make a list's tensor on the card without asking a dispatch mode."""
    if isinstance(index, tuple):
        return tuple(_lists_as_indices(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _run_composite(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation made of others, run as those; NotImplemented for a simple one, which is remembered."""
    if func is aten._has_compatible_shallow_copy_type.default:
        return False  # asked by Module.to under inference mode; the data lies beside the tensor
    with _versions_are_kept(func):
        out = func.decompose(*args, **kwargs)
    if out is NotImplemented:
        _SIMPLE.add(func)
    return out


def _versions_are_kept(func: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside a dispatch the key that keeps versions and views is left out; what an operation is made of needs it.

    Not where that key has the operation itself: then it makes a view of what comes back.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView"):
        return contextlib.nullcontext()
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def _run(func: Any, args: Any, kwargs: dict[str, Any], copies: list[Copy]) -> Any:
    tensors = [value for value in _values(args, kwargs) if isinstance(value, torch.Tensor)]
    devices = _devices(func, tensors)
    if len(devices) > 1 and func not in _COPIES_BETWEEN_DEVICES:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{devices[0]} and {devices[1]}! (emulated; {func})"
        )
    target = _target(func, args, kwargs, devices, tensors)
    _count(func, args, target, copies)
    plain_kwargs = {k: v for k, v in kwargs.items() if k not in {"device", "pin_memory", "non_blocking"}}
    if target.type == DEVICE_TYPE and _draws(func) and plain_kwargs.get("generator") is None:
        plain_kwargs["generator"] = _GENERATORS[target.index]
    if "device" in kwargs:
        plain_kwargs["device"] = torch.device("cpu")
    run = functools.partial(_dropout, _GENERATORS[target.index]) if func is aten.native_dropout.default else func
    out = run(*map(_plain, args), **{key: _plain(value) for key, value in plain_kwargs.items()})
    if func in _RETURNS_HOST_VALUE:
        return out
    if _is_in_place(func):
        return kwargs.get("out", args[0])
    if target.type == "cpu":
        return out
    with _as_its_base(func, tensors):
        return _on_card(out, target)


def _as_its_base(func: Any, tensors: list[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """In inference mode, too, a view of an ordinary tensor is ordinary: both have one version, which counts writes."""
    if torch.is_inference_mode_enabled() and func.is_view and tensors and not tensors[0].is_inference():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def _dropout(
    generator: torch.Generator, x: torch.Tensor, p: float, is_training: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """native_dropout, which takes no generator."""
    kept = torch.empty(x.shape).bernoulli_(1 - p, generator=generator).bool() if is_training else x.bool() | True
    return (x * kept / (1 - p) if is_training else x.clone()), kept


@functools.cache
def _draws(func: Any) -> bool:
    """Whether an operation draws random numbers and can be told from which generator."""
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return is_random and any(argument.name == "generator" for argument in func._schema.arguments)


def _on_card(value: Any, device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_on_card(item, device) for item in value)
    return EmulatedTensor(value, device) if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return value.data_on_cpu if isinstance(value, EmulatedTensor) else value


def _is_in_place(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write


def _devices(func: Any, tensors: list[torch.Tensor]) -> list[torch.device]:
    found: dict[torch.device, None] = {}
    for position, tensor in enumerate(tensors):
        mixes = tensor.device.type == "cpu" and (tensor.ndim == 0 or (func in _TAKES_INDICES and position > 0))
        if not mixes:
            found[tensor.device] = None
    return list(found)


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


def _count(func: Any, args: Any, target: torch.device, copies: list[Copy]) -> None:
    moved = {aten._to_copy.default: 0, aten.copy_.default: 1}.get(func)
    if moved is not None and args[moved].device != target:
        tensor = args[moved]
        copies.append(Copy(tensor.device, target, tensor.numel() * tensor.element_size(), tuple(tensor.shape)))


@contextlib.contextmanager
def emulated_cards(num_cards: int = 2) -> Iterator[EmulatedCards]:
    """A machine with this many emulated cards: `torch.device("lazy:k")` works, and `torch.lazy` is their module."""
    module = types.SimpleNamespace(
        _initialized=False,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: num_cards,
        device=lambda index: contextlib.nullcontext(),
        synchronize=lambda *device: None,
        get_rng_state=lambda device: _GENERATORS[torch.device(device).index].get_state(),
        set_rng_state=lambda state, device: _GENERATORS[torch.device(device).index].set_state(state),
    )
    for index, generator in enumerate(_GENERATORS):
        generator.manual_seed(index)
    with device_module(module), EmulatedCards() as cards:
        yield cards


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
    """While active torch.tensor, torch.as_tensor and torch.Generator take emulated cards, too.

    For processes of their own: libraries that are imported meanwhile keep the stand-ins (transformers then leaves
    buffers of models that it loads uninitialised).
    """
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
    for tensor in live_tensors():
        if tensor.device == device:
            storage = tensor.data_on_cpu.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def live_tensors() -> list[EmulatedTensor]:
    """Every emulated tensor that somebody holds."""
    while True:
        try:
            return list(_LIVE)
        except RuntimeError:  # another thread made or dropped one meanwhile
            continue
