"""Both cards at once: the conditionings and the images of a batch go through a split model as micro-batches.

ComfyUI joins cond and uncond into one batch, which a split model computes card after card. Here each of them, and each
image of the batch, becomes a micro-batch: while the second card works on one, the first works on the next
(parallel/local/interleave.py). ComfyUI's own function computes each, so regions, masks and default conditionings mean
what they always mean.

Where all cards compute each block together, that is no gain, and ComfyUI's way is used.

Patches, wrappers and ControlNets may keep state; scheduled LoRA changes weights between conditionings. Where something
could notice the interleaving, ComfyUI's way is used and the log says so once (attachments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from comfy.conds import CONDConstant, CONDCrossAttn, CONDList, CONDNoiseShape, CONDRegular
from comfy.utils import repeat_to_batch_size

from ....parallel.local.interleave import Interleave
from .attachments import reason_against_overlap
from .options import bring_controls_home
from .tree import SplitTree, tree_of
from .verify import explain, verified


@dataclass(frozen=True)
class _Part:
    """One micro-batch: conditioning number index, for one image or the whole batch."""

    index: int
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
    """Wrapper around ComfyUI's evaluation of all conditionings of one step; see the module's docstring."""
    tree = tree_of(model)
    if tree is None:
        return executor(model, conds, x_in, timestep, model_options)
    advise, tree.advise = tree.advise, None
    if advise is not None:
        advise(tree, sum(bool(cond) for cond in conds))
    bring_controls_home(conds, tree.plan.home)
    parts = _parts(tree, model, conds, x_in, timestep, model_options)

    def job(part: _Part) -> Callable[[], torch.Tensor]:
        options = {**model_options, "transformer_options": dict(model_options.get("transformer_options", {}))}
        return lambda: executor(model, part.conds, part.x, part.timestep, options)[part.index]

    jobs = [job(part) for part in parts]

    def compute(*, is_plain: bool = False) -> list[torch.Tensor]:
        if len(parts) < 2:
            return executor(model, conds, x_in, timestep, model_options)
        outputs = [run() for run in jobs] if is_plain else Interleave(tree.bridge).run(jobs)
        return _join(parts, outputs, conds, x_in)

    with tree.step():
        try:
            if tree.is_to_verify:
                tree.is_to_verify = False
                outputs = verified(tree, compute, model_options)
                tree.is_verified = True
                return outputs
            return compute()
        except RuntimeError as error:
            explain(error, tree.unseen, model_options)
            raise


def _join(parts: list[_Part], outputs: list[torch.Tensor], conds: list[Any], x_in: torch.Tensor) -> list[torch.Tensor]:
    of_cond: list[list[torch.Tensor]] = [[] for _ in conds]
    for part, output in zip(parts, outputs, strict=True):
        of_cond[part.index].append(output)
    return [torch.cat(images) if images else torch.zeros_like(x_in) for images in of_cond]


# ---- cutting


def _parts(
    tree: SplitTree,
    model: Any,
    conds: list[Any],
    x_in: torch.Tensor,
    timestep: torch.Tensor,
    options: Mapping[str, Any],
) -> list[_Part]:
    """The micro-batches of this step; fewer than two where ComfyUI's way is to be used."""
    active, num_images = [index for index, cond in enumerate(conds) if cond], x_in.shape[0]
    if not tree.plan.overlap or len(active) * num_images < 2:
        return []
    reason = reason_against_overlap(model, tree.unseen, conds, options)
    if reason:
        tree.say_once(f"split: overlap is off: {reason}")
        return []
    is_cut = num_images > 1 and all(_can_cut(entry) for index in active for entry in conds[index])
    parts = []
    for index in active:
        for image in [slice(i, i + 1) for i in range(num_images)] if is_cut else [slice(None)]:
            only: list[Any] = [None] * len(conds)
            only[index] = [_cut(entry, image, num_images) for entry in conds[index]] if is_cut else conds[index]
            parts.append(_Part(index, only, x_in[image], timestep[image]))
    return parts


def _can_cut(entry: Mapping[str, Any]) -> bool:
    """Whether a conditioning can be taken for one image alone: only by the types whose batching is known."""
    known = {CONDConstant, CONDCrossAttn, CONDList, CONDNoiseShape, CONDRegular}
    values = entry.get("model_conds", {})
    return "latent_shapes" not in values and all(type(value) in known for value in values.values())


def _cut(entry: Mapping[str, Any], image: slice, num_images: int) -> dict[str, Any]:
    cut = dict(entry)
    cut["model_conds"] = {name: _cut_cond(value, image, num_images) for name, value in entry["model_conds"].items()}
    mask = entry.get("mask")
    if mask is not None and mask.shape[0] > 1:
        cut["mask"] = _one(mask, image, num_images)
    return cut


def _cut_cond(cond: Any, image: slice, num_images: int) -> Any:
    if isinstance(cond, CONDConstant):
        return cond
    if isinstance(cond, CONDList):
        return cond._copy_with([_one(value, image, num_images) for value in cond.cond])
    return cond._copy_with(_one(cond.cond, image, num_images))


def _one(value: torch.Tensor, image: slice, num_images: int) -> torch.Tensor:
    """The part of one image; shorter batches are repeated first, as ComfyUI does."""
    return value if value.shape[0] == 1 else repeat_to_batch_size(value, num_images)[image]
