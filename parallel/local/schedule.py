"""Which micro-batch a pipeline's stage works on when: plain lists, no devices and no models.

A step has m micro-batches, each of which goes forwards through n stages (F) and backwards through them (B). Every
stage has a fixed order; each entry waits for its input only: F for the same micro-batch's F one stage earlier, B for
its B one stage later (on the last stage: its F).

The order is 1f1b: a stage takes as many F as it may hold, then B and F in turns, then the remaining B. The last stage
takes every B at once and holds one; stage k holds n - k, or `ahead` more, which fills the gaps that uneven stages
leave.

The B of a stage follow each other as the micro-batches do, so a parameter's gradient is summed in the order of plain
accumulation. It takes (m + n - 1) / m of the time of a full pipeline when stages are equally fast. All F before all B
(GPipe, arXiv 1811.06965) would take as long and hold all m. Source: PipeDream-Flush in Megatron-LM, arXiv 2104.04473.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One entry of a stage's order."""

    is_backward: bool
    microbatch: int


def num_held(num_stages: int, num_microbatches: int, ahead: int = 0) -> list[int]:
    """How many micro-batches each stage holds at once, between their F and their B. [num_stages]

    Args:
        ahead: micro-batches that every stage but the last may hold beyond what 1f1b needs.
    """
    last = num_stages - 1
    held = [num_stages - stage + (ahead if stage < last else 0) for stage in range(num_stages)]
    return [min(count, num_microbatches) for count in held]


def plan_order(num_stages: int, num_microbatches: int, ahead: int = 0) -> list[list[Work]]:
    """Every stage's order. [num_stages][2 * num_microbatches]"""
    return [_order(held, num_microbatches) for held in num_held(num_stages, num_microbatches, ahead)]


def _order(held: int, num_microbatches: int) -> list[Work]:
    order = [Work(False, index) for index in range(held)]
    for index in range(num_microbatches):
        order.append(Work(True, index))
        if held + index < num_microbatches:
            order.append(Work(False, held + index))
    return order
