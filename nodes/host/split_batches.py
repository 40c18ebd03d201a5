"""Both cards at once: the conditionings and the images of a batch go through a split model as micro-batches.

Stock sampling joins cond and uncond into one batch, which a split model computes card after card. Here each of them,
and each image of the batch, becomes a micro-batch of its own: while the second card works on one, the first works on
the next (parallel/local/interleave.py). The host's own function computes each micro-batch, so regions, masks and
default conditionings mean what they always mean; the result is that of one after the other.

Where something could notice the interleaving (patches, wrappers and ControlNets keep state of their own; scheduled LoRA
changes weights between conditionings), the host's way is used and said once (split_attachments.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...parallel.local.interleave import Interleave
from .split_attachments import reason_against_overlap
from .split_options import bring_controls_home
from .split_tree import SplitTree, tree_of
from .split_verify import explain, verified


@dataclass(frozen=True)
class _Part:
    """One micro-batch: conditioning number index, for one image or (image None) the whole batch."""

    index: int
    image: int | None
    conds: list[Any]
    x: torch.Tensor
    timestep: torch.Tensor


def run_overlapped(
    executor: Any,
    model: Any,
    conds: list[Any],
    x_in: torch.Tensor,
    timestep: torch.Tensor,
    model_options: dict[str, Any],
) -> list[torch.Tensor]:
    """Wrapper around the host's evaluation of all conditionings of one step; see the module's docstring."""
    tree = tree_of(model)
    if tree is None:
        return executor(model, conds, x_in, timestep, model_options)
    bring_controls_home(conds, tree.plan.home)
    parts = _parts(tree, model, conds, x_in, timestep, model_options)
    jobs = [_job(executor, model, part, model_options) for part in parts]

    def compute(*, is_plain: bool = False) -> list[torch.Tensor]:
        if len(parts) < 2:
            return executor(model, conds, x_in, timestep, model_options)
        outputs = [job() for job in jobs] if is_plain else Interleave(tree.bridge).run(jobs)
        return _join(parts, outputs, conds, x_in)

    try:
        if tree.is_to_verify:
            tree.is_to_verify = False
            return verified(tree, compute, model_options)
        return compute()
    except RuntimeError as error:
        explain(error, tree.unseen, model_options)
        raise
    finally:
        tree.bridge.end()  # Cancel inside a block of another card unwinds past torch's hooks


def _job(executor: Any, model: Any, part: _Part, model_options: dict[str, Any]) -> Any:
    options = dict(model_options)
    options["transformer_options"] = dict(model_options.get("transformer_options", {}))

    def compute() -> torch.Tensor:
        return executor(model, part.conds, part.x, part.timestep, options)[part.index]

    return compute


def _join(parts: list[_Part], outputs: list[torch.Tensor], conds: list[Any], x_in: torch.Tensor) -> list[torch.Tensor]:
    joined = []
    for index in range(len(conds)):
        mine = [output for part, output in zip(parts, outputs, strict=True) if part.index == index]
        joined.append(torch.cat(mine) if mine else torch.zeros_like(x_in))
    return joined


# ---- cutting


def _parts(
    tree: SplitTree,
    model: Any,
    conds: list[Any],
    x_in: torch.Tensor,
    timestep: torch.Tensor,
    options: Mapping[str, Any],
) -> list[_Part]:
    """The micro-batches of this step; fewer than two where the host's way is to be used."""
    active = [index for index, cond in enumerate(conds) if cond]
    if not tree.plan.overlap or not active or len(active) * x_in.shape[0] < 2:
        return []
    reason = reason_against_overlap(model, tree.unseen, conds, options)
    if reason:
        tree.say_once(f"split: overlap is off: {reason}")
        return []
    cut_images = x_in.shape[0] > 1 and all(_can_cut(entry) for index in active for entry in conds[index])
    images: list[int | None] = list(range(x_in.shape[0])) if cut_images else [None]
    return [_part(conds, x_in, timestep, index, image) for index in active for image in images]


def _part(conds: list[Any], x_in: torch.Tensor, timestep: torch.Tensor, index: int, image: int | None) -> _Part:
    only = [cond if number == index else None for number, cond in enumerate(conds)]
    if image is None:
        return _Part(index, None, only, x_in, timestep)
    only[index] = [_cut(entry, image, x_in.shape[0]) for entry in conds[index]]
    return _Part(index, image, only, x_in[image : image + 1], timestep[image : image + 1])


def _can_cut(entry: Mapping[str, Any]) -> bool:
    """Whether a conditioning can be taken for one image alone: only by the types whose batching is known."""
    import comfy.conds

    known = {
        comfy.conds.CONDRegular,
        comfy.conds.CONDNoiseShape,
        comfy.conds.CONDCrossAttn,
        comfy.conds.CONDConstant,
        comfy.conds.CONDList,
    }
    values = entry.get("model_conds", {})
    return "latent_shapes" not in values and all(type(value) in known for value in values.values())


def _cut(entry: Mapping[str, Any], image: int, num_images: int) -> dict[str, Any]:
    cut = dict(entry)
    cut["model_conds"] = {name: _cut_cond(value, image, num_images) for name, value in entry["model_conds"].items()}
    mask = entry.get("mask")
    if mask is not None and mask.shape[0] > 1:
        cut["mask"] = _one(mask, image, num_images)
    return cut


def _cut_cond(cond: Any, image: int, num_images: int) -> Any:
    import comfy.conds

    if isinstance(cond, comfy.conds.CONDConstant):
        return cond
    if isinstance(cond, comfy.conds.CONDList):
        return cond._copy_with([_one(value, image, num_images) for value in cond.cond])
    return cond._copy_with(_one(cond.cond, image, num_images))


def _one(value: torch.Tensor, image: int, num_images: int) -> torch.Tensor:
    """The part of one image; shorter batches are repeated first, as the host does."""
    from comfy.utils import repeat_to_batch_size

    if value.shape[0] == 1:
        return value
    return repeat_to_batch_size(value, num_images)[image : image + 1]
