"""What a split does around ComfyUI's sampling: a forecast before it, micro-batches in each step, a comparison.

Each conditioning of each image is a micro-batch (interleave.py), unless something could notice that.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_management as management
import torch
from comfy.conds import CONDConstant, CONDCrossAttn, CONDList, CONDNoiseShape, CONDRegular
from comfy.patcher_extension import WrappersMP
from comfy.sampler_helpers import estimate_memory
from comfy.utils import repeat_to_batch_size

from .attachments import ROOT, bring_controls_to_main, is_compiled, reasons_against_overlap, seen_attachments
from .plan import GB
from .tree import SplitTree, tree_of

_log = logging.getLogger(__name__)
_Compute = Callable[..., list[torch.Tensor]]


def prepare_with_forecast(executor: Any, model: Any, noise_shape: Any, conds: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around ComfyUI's loading for sampling: say what each card needs. Raises: ValueError for a compiled whole
    model; RuntimeError for a card that cannot compute even with all of its weights streamed."""
    if (tree := tree_of(model.model)) is not None:
        compiled = [key for key, value in model.object_patches.items() if is_compiled(value)]
        for wrapper in model.get_wrappers(WrappersMP.APPLY_MODEL, "torch.compile"):
            for cell in wrapper.__closure__ or ():
                compiled += list(cell.cell_contents) if isinstance(cell.cell_contents, dict) else []
        if ROOT in compiled:
            found = "torch.compile of the whole model (ComfyUI's TorchCompileModel) cannot span several cards"
            single = f"compiles single blocks, such as {ROOT}.{tree.plan.blocks[0]}"
            raise ValueError(f"{found}; take it out, or use a node behind the split that {single}")
        _forecast(model, tree, noise_shape, conds)
        tree.executor.looks_first = True
        tree.is_to_verify = tree.plan.request.verify
    return executor(model, noise_shape, conds, *args, **kwargs)


def _forecast(model: Any, tree: SplitTree, noise_shape: Any, conds: Any) -> None:
    limits, minimum, problems = tree.plan.request.limit_bytes, management.minimum_inference_memory(), []
    activations = estimate_memory(model, noise_shape, conds)[1]
    for device, size in tree.weight_bytes().items():
        total, free = management.get_total_memory(device), management.get_free_memory(device)
        parts = tree.executor.parts[device].values()
        streamed = max((each.nbytes for part in parts for each in part.parameters()), default=0)
        limit = f", limit {limits[device] / GB:.2f} GB" if device in limits else ""
        needs = f"weights {size / GB:.2f} GB, activations about {activations / GB:.2f} GB"
        _log.info("split: %s %s, free %.2f of %.2f GB%s", device, needs, free / GB, total / GB, limit)
        if streamed + minimum > total:
            needed = f"{streamed / GB:.2f} GB for its largest layer and {minimum / GB:.2f} GB to compute"
            problems.append(f"{device} has {total / GB:.2f} GB in all, and needs {needed}")
        elif activations + streamed > total:  # ComfyUI's estimate is no bound, and context windows divide it
            _log.warning("split: %s may run out of memory, as ComfyUI expects", device)
    if problems:
        raise RuntimeError(f"this model cannot run: {'; '.join(problems)}. Leave that card out, or use smaller weights")


def run_overlapped(
    executor: Any, model: Any, conds: list[Any], x_in: torch.Tensor, timestep: torch.Tensor, options: dict[str, Any]
) -> list[torch.Tensor]:
    """Wrapper around ComfyUI's evaluation of all conditionings of one step; see the module's docstring."""
    if (tree := tree_of(model)) is None:
        return executor(model, conds, x_in, timestep, options)
    bring_controls_to_main(conds, tree.plan.main_device)
    parts = _parts(tree, model, (conds, x_in, timestep), options)

    def job(number: int, *part: Any) -> Callable[[], torch.Tensor]:
        own = {**options, "transformer_options": dict(options.get("transformer_options", {}))}
        return lambda: executor(model, *part, own)[number]

    def compute() -> list[torch.Tensor]:
        if len(parts) < 2:
            return executor(model, conds, x_in, timestep, options)
        jobs = [job(*part) for part in parts]
        outputs = [run() for run in jobs] if tree.is_plain else tree.executor.run_parts(tree, jobs)
        of_cond: list[list[torch.Tensor]] = [[] for _ in conds]
        for (number, *_), output in zip(parts, outputs, strict=True):
            of_cond[number].append(output)
        return [torch.cat(images) if images else torch.zeros_like(x_in) for images in of_cond]

    with tree.step():
        try:
            if not tree.is_to_verify:
                return compute()
            tree.is_to_verify = False
            return _verified(tree, compute, options)
        except (RuntimeError, ValueError) as error:
            if "same device" not in str(error):
                raise
            raise RuntimeError(
                f"a layer of this split MODEL met tensors of two devices ({error}). Attached to this MODEL: "
                f"{_names(tree, options)}. What is attached inside a block needs its tensors where that block is: put "
                "its blocks on the first device by split_at, or take the node out and load the MODEL anew"
            ) from error


def _parts(tree: SplitTree, model: Any, step: tuple[Any, ...], options: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """The micro-batches of this step, for one image or the whole batch: number of the conditioning, conditionings,
    latents, timestep. Fewer than two where ComfyUI's way is to be used."""
    conds, x_in, timestep = step
    active, num_images = [index for index, cond in enumerate(conds) if cond], x_in.shape[0]
    if not tree.plan.overlap or len(active) * num_images < 2:
        return []
    # For one image alone only conditionings are taken whose types' batching is known.
    known = {CONDConstant, CONDCrossAttn, CONDList, CONDNoiseShape, CONDRegular}
    values = [entry.get("model_conds", {}) for index in active for entry in conds[index]]
    is_cut = num_images > 1 and all({*map(type, each.values())} <= known for each in values)
    is_cut = is_cut and not any("latent_shapes" in each for each in values)
    parts: list[tuple[Any, ...]] = []
    for index in active:
        for image in [slice(i, i + 1) for i in range(num_images)] if is_cut else [slice(None)]:
            only: list[Any] = [None] * len(conds)
            only[index] = [_cut(entry, image, num_images) for entry in conds[index]] if is_cut else conds[index]
            parts.append((index, only, x_in[image], timestep[image]))

    def has_room() -> bool:
        """As ComfyUI expects each part to need memory beside the weights."""
        free = model.current_patcher.get_free_memory(x_in.device)
        for number, only, x, _ in parts:
            shapes: dict[str, list[Any]] = defaultdict(list)
            for entry in only[number]:
                for name, value in entry.get("model_conds", {}).items():
                    shapes[name].append(value.size())
            if model.memory_required(list(x.shape), cond_shapes=shapes) >= free:
                return False
        return True

    reason = next(reasons_against_overlap(model, tree.unseen(), conds, options), "")
    reason = reason or tree.executor.reason_against_parts(tree, len(parts), has_room)
    if reason:
        tree.say_once(f"split: overlap is off: {reason}")
        return []
    return parts


def _cut(entry: Mapping[str, Any], image: slice, num_images: int) -> dict[str, Any]:
    """A conditioning for one image; shorter batches are repeated first, as ComfyUI does."""

    def one(value: Any) -> Any:
        if isinstance(value, CONDConstant):
            return value
        if isinstance(value, list):
            return [one(each) for each in value]
        if not isinstance(value, torch.Tensor):
            return value._copy_with(one(value.cond))
        return value if value.shape[0] == 1 else repeat_to_batch_size(value, num_images)[image]

    cut = {**entry, "model_conds": {name: one(value) for name, value in entry["model_conds"].items()}}
    return cut if cut.get("mask") is None else {**cut, "mask": one(cut["mask"])}


def _verified(tree: SplitTree, compute: _Compute, options: Mapping[str, Any]) -> list[torch.Tensor]:
    """What compute() gives, after a comparison with the plainest way. Raises: RuntimeError that says what differs."""
    model, bound = tree.diffusion_model, tree.executor.tolerance

    def remembered() -> dict[str, Any]:
        return {name: getattr(model, name) for name in tree.plan.layout.remembers if hasattr(model, name)}

    before, found, after = remembered(), compute(), remembered()
    try:
        vars(model).update(before)
        tree.is_plain = True
        with torch.random.fork_rng([device for device in tree.plan.devices if device.type == "cuda"]):
            pairs = enumerate(zip(found, compute(), strict=True))
    finally:
        tree.is_plain = False
        vars(model).update(after)
    differences = [
        f"conditioning {number} by up to {float((a.float() - b.float()).abs().max()):.3g} at a std of "
        f"{float(b.float().std()):.3g}"
        for number, (a, b) in pairs
        if not bool((((a - b).abs() <= bound * b.float().std()) | (a == b) | (a.isnan() & b.isnan())).all())
    ]
    if differences:
        raise RuntimeError(
            f"verify: the split computed something else than the same step {tree.executor.plain}: "
            f"{'; '.join(differences)}. Attached to this MODEL: {_names(tree, options)}. What keeps state from call to "
            f"call or draws random numbers cannot be verified. Take these out one by one, or set "
            f"{tree.executor.plainer}; please report the one that differs"
        )
    same = f"the same within {bound:g} of a standard deviation" if bound else "the same bits"
    _log.info("split: verified: the first step is %s %s", same, tree.executor.plain)
    return found


def _names(tree: SplitTree, options: Mapping[str, Any]) -> str:
    seen = seen_attachments(options.get("transformer_options", {}))
    wrapper = ["a model function wrapper"] * ("model_function_wrapper" in options)
    return ", ".join((*tree.unseen()[:8], *seen, *wrapper)) or "nothing"
