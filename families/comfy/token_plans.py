"""What rows of ComfyUI's classes need to say where their tokens are (families/token_plan.py), and what arguments become
that are no tensors."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch

from ..token_plan import BlockRows, TokenPlan


def one(
    rows: str, keys: str, name: str = "blocks", counts: str = "", changes: dict[str, Any] | None = None, **more: Any
) -> TokenPlan:
    return TokenPlan({name: BlockRows(rows, keys, counts, changes or {})}, **more)


class _Rows(int):
    """A number of rows that LTX attends by itself: none, too, for each rank has to bring its keys to each attention."""

    def __gt__(self, other: int) -> bool:
        return True


def ltx_guides(rows: Any, mask: Any) -> Any:
    """LTX's object with the masks of noisy and of guide rows: where guides begin among the rank's rows, and theirs."""
    if not hasattr(mask, "guide_start"):
        return mask
    made, end = copy.copy(mask), mask.guide_start + mask.tracked_count
    made.guide_start = _Rows(rows.count(mask.guide_start, "x"))
    made.tracked_count = rows.count(end, "x") - made.guide_start
    before = rows.rows_before(mask.guide_start, "x")
    made.tracked_mask = mask.tracked_mask[:, :, before : before + made.tracked_count]
    return made


def after_prompt(rows: Any, attention: Any) -> Any:
    """HiDream-O1's function: the first ar_len rows, the prompt's, attend to each other; the first rank has them."""
    ar_len = attention.__closure__[attention.__code__.co_freevars.index("ar_len")].cell_contents
    return attention if rows.has_first(ar_len, "x") else _with_variable(attention, "ar_len", 0)


def block_causal(rows: Any, attention: Any) -> Any:
    """Qwen-Image 2.1's function: rows of a text attend to those before them, a picture's to its own and all before it.
    segments: (start, end, mask) of all rows, which become one of the rank's rows with a mask against all."""
    segments = attention.__closure__[attention.__code__.co_freevars.index("segments")].cell_contents
    first, count = rows.share("x")
    mask = None
    if first < segments[-1][0]:
        device = next(each for *_, each in segments if each is not None).device
        mask = torch.zeros(count, rows.lengths["x"], dtype=torch.bool, device=device)
        for start, end, own in segments:
            begin, until = max(start, first), min(end, first + count)
            if begin < until:
                seen = True if own is None else own[begin - start : until - start]
                mask[begin - first : until - first, :end] = seen
    return _with_variable(attention, "segments", [(0, count, mask)])


def _with_variable(function: Any, name: str, value: Any) -> Any:
    """A function with another value of a variable that it has from around it."""
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    closure = tuple(types.CellType(value) if own == name else cell for own, cell in cells)
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )


def sliding_window(rows: Any, module: Any, mask: torch.Tensor, axis: str) -> torch.Tensor:
    """ACE-Step 1.5 makes a mask of the length that a layer sees: here of the rank's rows against all. [1, 1, q, k]"""
    first, count = rows.share(axis)
    everywhere = torch.arange(rows.lengths[axis], device=mask.device)
    is_far = (everywhere[first : first + count, None] - everywhere[None]).abs() > module.sliding_window
    made = torch.zeros(is_far.shape, dtype=mask.dtype, device=mask.device)
    return made.masked_fill_(is_far, torch.finfo(mask.dtype).min)[None, None]
