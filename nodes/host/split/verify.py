"""A step of a split MODEL computed a second time in the plainest way, and device errors said in words.

The plain way has one forward at a time and remembers no copies: nothing is left that could be out of date. Where every
card has blocks of its own, their outputs go home; where all cards compute each block together, they are given anew all
that it is called with. What this computes must be what the fast way computed, bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .attachments import seen_attachments
from .tree import SplitTree

_log = logging.getLogger(__name__)
_Compute = Callable[..., list[torch.Tensor]]

# By whether all cards compute each block together: how the second computation differs, and what a user may set.
_PLAIN = {
    False: "without overlap and by relay",
    True: "without overlap, with every card given all that a block is called with anew",
}
_PLAINER = {False: "transport to relay and overlap off", True: "way to blocks"}


def verified(tree: SplitTree, compute: _Compute, options: Mapping[str, Any]) -> list[torch.Tensor]:
    """What compute() gives, after a comparison with compute(is_plain=True) in the plain way.

    A patch that keeps state from call to call computes something else the second time. A third computation shows that;
    the step then passes with a warning. What the model remembers from step to step is the same for all of them.

    Raises: RuntimeError that says what differs, if the plain way gives the same twice and the fast way something else;
        for a class that was only read also if the plain way gives two things.
    """
    before = _remembered(tree)
    found = compute()
    after = _remembered(tree)
    try:
        expected = _plainly(tree, compute, before)
        return _compared(tree, found, expected, lambda: _plainly(tree, compute, before), options)
    finally:
        _restore(tree, after)


def _compared(
    tree: SplitTree,
    found: list[torch.Tensor],
    expected: list[torch.Tensor],
    plain: Callable[[], list[torch.Tensor]],
    options: Mapping[str, Any],
) -> list[torch.Tensor]:
    differences = _differences(found, expected)
    if not differences:
        _log.info("split: verified: the first step is the same bits %s", _PLAIN[tree.divided is not None])
        return found
    attached = _names(tree.unseen, options)
    if not _differences(expected, plain()):
        raise RuntimeError(
            f"verify: the split computed something else than the same step {_PLAIN[tree.divided is not None]}: "
            f"{'; '.join(differences)}. Attached to this MODEL: {attached}. Take these out one by one, or set "
            f"{_PLAINER[tree.divided is not None]}; please report the one that differs"
        )
    unsteady = (
        "the same step computed twice in the same way differs, so something keeps state from call to call or draws "
        f"random numbers; attached to this MODEL: {attached}"
    )
    if not tree.is_verified:
        raise RuntimeError(
            f"verify: {tree.plan.layout.class_name} was read, not run, and cannot be checked: {unsteady}. Take these "
            "out for the first run, or use the MODEL without the split"
        )
    _log.warning("split: not verified: %s", unsteady)
    return found


def _remembered(tree: SplitTree) -> dict[str, Any]:
    """What a forward of this class leaves on the model for the next one."""
    model = tree.diffusion_model
    return {name: getattr(model, name) for name in tree.plan.layout.remembers if hasattr(model, name)}


def _restore(tree: SplitTree, remembered: Mapping[str, Any]) -> None:
    for name, value in remembered.items():
        setattr(tree.diffusion_model, name, value)


def _plainly(tree: SplitTree, compute: _Compute, remembered: Mapping[str, Any]) -> list[torch.Tensor]:
    _restore(tree, remembered)
    devices = [device for device in tree.plan.used_devices if device.type == "cuda"]
    with tree.plainly(), torch.random.fork_rng(devices):
        return compute(is_plain=True)


def _differences(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> list[str]:
    """One line per conditioning that differs; NaN is the same as NaN."""
    return [
        f"conditioning {number} by up to {float((a.float() - b.float()).abs().max()):.3g} at a std of "
        f"{float(b.float().std()):.3g}"
        for number, (a, b) in enumerate(zip(found, expected, strict=True))
        if not bool(((a == b) | (a.isnan() & b.isnan())).all())
    ]


def explain(error: RuntimeError, unseen: Sequence[str], options: Mapping[str, Any]) -> None:
    """Raises: RuntimeError that says who may have brought tensors of two devices, if that is what the error is."""
    if "same device" in str(error):
        raise RuntimeError(
            f"a layer of this split MODEL met tensors of two devices ({error}). Attached to this MODEL: "
            f"{_names(unseen, options)}. What is attached inside a block must keep its tensors where that block is: "
            "choose split_at so that its blocks are on the first device, take the node out, or use the MODEL without "
            "the split"
        ) from error


def _names(unseen: Sequence[str], options: Mapping[str, Any]) -> str:
    seen = seen_attachments(options.get("transformer_options", {}))
    wrapper = ["a model function wrapper"] if "model_function_wrapper" in options else []
    return ", ".join((*unseen[:8], *seen, *wrapper)) or "nothing"
