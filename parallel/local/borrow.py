"""What other people's code borrows on another device, and a ControlNet's residuals, which blocks take one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, SupportsIndex

import torch

from ...patches.hooks import map_tensors
from ..transfer import Versioned, copy_to, is_everywhere
from .tokens import Rows, RowsError


class Borrowed:
    """A value on another device, for a function that may write into its tensors, take entries out of a dict, and return
    what it was given. A write into one of two views does not show in the other before it is settled. Args: value:
    tuples, lists and dicts of tensors; other objects are entered as map_tensors does. is_passed: tells dicts that must
    be handed over as the same object. passed_by: keys of dicts whose values must be."""

    def __init__(
        self,
        value: Any,
        device: torch.device,
        *,
        is_passed: Callable[[dict[Any, Any]], bool] = lambda _: False,
        passed_by: Collection[str] = (),
    ) -> None:
        self._device, self._is_passed, self._passed_by = device, is_passed, passed_by
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}  # by id of the source; version at first
        self._containers: list[tuple[Any, Any, Any]] = []  # the caller's, the borrowed one, what that held at first
        self._sources: dict[int, Any] = {}  # by id of what was borrowed
        self.value = self._borrow(value)

    def settle(self, back: torch.device) -> None:
        """Carry what was written back into the caller's tensors and containers; new tensors in these go to `back`."""
        for source, copy, version in self._copies.values():
            if copy._version != version:
                source.copy_(copy)
        for caller, borrowed, first in self._containers:
            if isinstance(borrowed, list):
                if len(borrowed) != len(first) or any(a is not b for a, b in zip(borrowed, first, strict=True)):
                    caller[:] = [self.returned(item, back) for item in borrowed]
                continue
            for key in first.keys() - borrowed.keys():
                caller.pop(key, None)
            for key, item in borrowed.items():
                if key not in first or first[key] is not item:
                    caller[key] = self.returned(item, back)

    def returned(self, output: Any, back: torch.device) -> Any:
        """What the function returned, for the caller: what it borrowed is the caller's own again, the rest is moved."""
        if id(output) in self._sources:
            return self._sources[id(output)]
        if isinstance(output, dict) and self._is_passed(output):
            return output
        if type(output) is dict:
            return {key: item if key in self._passed_by else self.returned(item, back) for key, item in output.items()}
        if type(output) in (tuple, list):
            return type(output)(self.returned(item, back) for item in output)
        if isinstance(output, torch.Tensor):
            return output if is_everywhere(output) else copy_to(output, back)
        return map_tensors(output, lambda tensor: self.returned(tensor, back))

    def _borrow(self, tree: Any) -> Any:
        if isinstance(tree, dict) and self._is_passed(tree):
            return tree
        if type(tree) is dict:
            items = {key: item if key in self._passed_by else self._borrow(item) for key, item in tree.items()}
            return self._keep(tree, items, dict(items), any(items[key] is not item for key, item in tree.items()))
        if type(tree) is list:
            copies = [self._borrow(item) for item in tree]
            return self._keep(tree, copies, list(copies), any(a is not b for a, b in zip(copies, tree, strict=True)))
        if type(tree) is tuple:
            return tuple(self._borrow(item) for item in tree)
        if not isinstance(tree, torch.Tensor):
            return map_tensors(tree, self._borrow)
        if tree.device == self._device or is_everywhere(tree):
            return tree
        if id(tree) not in self._copies:
            with Versioned():
                if tree.is_contiguous() or 0 in tree.stride():
                    copy = copy_to(tree, self._device)
                else:  # a view, with its strides: a sum over others is rounded otherwise
                    copy = torch.empty_strided(tree.size(), tree.stride(), dtype=tree.dtype, device=self._device)
                    copy.copy_(tree, non_blocking=tree.device.type == self._device.type != "cpu")
            self._copies[id(tree)] = tree, copy, copy._version
            self._sources[id(copy)] = tree
        return self._copies[id(tree)][1]

    def _keep(self, caller: Any, borrowed: Any, first: Any, is_changed: bool) -> Any:
        """A container with copies in it; one without is the caller's own, and what is done to it needs no carrying."""
        if not is_changed:
            return caller
        self._containers.append((caller, borrowed, first))
        self._sources[id(borrowed)] = caller
        return borrowed


class Residuals(list[Any]):
    """A ControlNet's residuals of one key, which are changed when a forward takes them out."""

    def __init__(self, values: Sequence[Any], change: Callable[[Any], Any]) -> None:
        super().__init__(values)
        self._change = change

    def __getitem__(self, index: Any) -> Any:
        return self._change(super().__getitem__(index))

    def pop(self, index: SupportsIndex = -1) -> Any:
        return self._change(super().pop(index))

    def __iter__(self) -> Iterator[Any]:
        return map(self._change, super().__iter__())

    def __reversed__(self) -> Iterator[Any]:
        return map(self._change, super().__reversed__())


class RowResiduals(Residuals):
    """Residuals of which a forward reads this rank's rows; some have fewer than the axis."""

    def __init__(self, values: Sequence[Any], here: Rows, axis: str) -> None:
        def cut(value: Any) -> Any:
            if value is None or here.is_gathered:  # a class may add the last block's behind the gather
                return value
            first, count = here.share(axis)
            return value[:, min(first, value.shape[1]) : min(first + count, value.shape[1])]

        super().__init__(values, cut)

    def __getitem__(self, index: Any) -> Any:
        return self.copy() if isinstance(index, slice) else super().__getitem__(index)

    def copy(self, *other: Any) -> Any:
        raise RowsError(
            "each card computes a share of the tokens, and a copy or slice of a ControlNet's residuals would have all "
            "rows. Read them one by one, or use way 'blocks' in the split node"
        )

    __copy__ = __add__ = __radd__ = __mul__ = __rmul__ = copy
