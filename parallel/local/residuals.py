"""A ControlNet's residuals, of which each rank's forward reads its own rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .tokens import Rows, RowsError


class Residuals(list[Any]):
    """A ControlNet's residuals of one key, of which a forward reads this rank's rows; some have fewer than the axis."""

    def __init__(self, items: Sequence[Any], here: Rows, axis: str) -> None:
        super().__init__(items)
        self._rows, self._axis = here, axis

    def _cut(self, value: Any) -> Any:
        if value is None or self._rows.is_gathered:  # a class may add the last block's behind the gather
            return value
        first, count = self._rows.share(self._axis)
        return value[:, min(first, value.shape[1]) : min(first + count, value.shape[1])]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            raise self._refused(f"the slice {index}")
        return self._cut(super().__getitem__(index))

    def __iter__(self) -> Iterator[Any]:
        return map(self._cut, super().__iter__())

    def __reversed__(self) -> Iterator[Any]:
        return map(self._cut, super().__reversed__())

    def copy(self, *other: Any) -> Any:
        raise self._refused("a copy")

    __copy__ = __add__ = __radd__ = __mul__ = __rmul__ = copy

    @staticmethod
    def _refused(found: str) -> RowsError:
        return RowsError(
            f"each card computes a share of the tokens, and {found} of a ControlNet's residuals would have all rows. "
            "Read them one by one, or use way 'blocks' in the split node"
        )

    def pop(self, index: Any = -1) -> Any:
        return self._cut(super().pop(index))
