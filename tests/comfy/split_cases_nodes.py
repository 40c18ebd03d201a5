"""ComfyUI's own model nodes before and after the split: each does to a split MODEL what it does to a plain one."""

import functools
import importlib
import random
from collections.abc import Callable
from typing import Any

from devicebridge.tests.comfy.split_cases import Case, case, long_case, split
from devicebridge.tests.comfy.split_cases_tensor import near
from devicebridge.tests.comfy.split_cases_tensor_files import no_worse

Node = tuple[str, str, dict[str, Any]]  # module of comfy_extras, class, arguments

_ALL_STEPS = {"start_percent": 0.0, "end_percent": 1.0}
_SKIPPED = {**_ALL_STEPS, "double_layers": "1", "single_layers": "0, 3"}
_CACHED = {**_ALL_STEPS, "reuse_threshold": 5.0, "verbose": False}
FLUX: tuple[Node, ...] = (
    ("nodes_slg", "SkipLayerGuidanceDiT", {**_SKIPPED, "scale": 2.0}),
    ("nodes_slg", "SkipLayerGuidanceDiTSimple", _SKIPPED),
    (
        "nodes_rope",
        "ScaleROPE",
        {"scale_x": 1.5, "shift_x": 0.0, "scale_y": 0.7, "shift_y": 1.0, "scale_t": 1.0, "shift_t": 0.0},
    ),
    ("nodes_model_advanced", "ModelSamplingFlux", {"max_shift": 1.3, "base_shift": 0.4, "width": 512, "height": 512}),
    ("nodes_model_advanced", "RescaleCFG", {"multiplier": 0.7}),
    ("nodes_model_advanced", "ModelComputeDtype", {"dtype": "bf16"}),
    ("nodes_apg", "APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": 0.1}),
    ("nodes_cfg", "CFGZeroStar", {}),
    ("nodes_nag", "NAGuidance", {"nag_scale": 3.0, "nag_alpha": 0.5, "nag_tau": 1.5}),
    ("nodes_easycache", "EasyCacheNode", _CACHED),
    ("nodes_easycache", "LazyCacheNode", _CACHED),
)
SD3: tuple[Node, ...] = (
    ("nodes_sd3", "SkipLayerGuidanceSD3", {**_ALL_STEPS, "layers": "0, 2", "scale": 3.0}),
    ("nodes_model_advanced", "ModelSamplingSD3", {"shift": 5.0}),
)
WINDOWS: Node = (
    "nodes_context_windows",
    "WanContextWindowsManualNode",
    {
        "context_length": 5, "context_overlap": 1, "context_schedule": "standard_static", "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False,
    },
)  # fmt: skip


def _apply(node: Node, model: Any) -> Any:
    module, name, arguments = node
    node_class = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
    if hasattr(node_class, "define_schema"):
        return node_class.execute(model, **arguments)[0]
    return getattr(node_class(), node_class.FUNCTION)(model, **arguments)[0]


def each_node(
    case: Case, name: str, nodes: tuple[Node, ...], divide: Callable[[Any], Any], bound: float = 0.0, steps: int = 2
) -> None:
    """Behind the split, and where the bits are one card's before it, too. bound: as of near."""
    host = case.host
    sample = functools.partial(host.sample, name=name, cfg=4.0, steps=steps)
    plain = host.load(name)  # on one of the cards: resizing takes another kernel there than on the CPU
    divided, clean = divide(host.load(name)), sample(plain)
    for node in nodes:
        made: dict[str, Callable[[], Any]] = {"plain": lambda: _apply(node, plain)}  # noqa: B023
        made["after"] = lambda: _apply(node, divided)  # noqa: B023
        if not bound:
            made["before"] = lambda: divide(_apply(node, host.load(name)))  # noqa: B023
        outputs = {}
        for what, make in made.items():
            random.seed(0)
            outputs[what] = sample(make())
        reference = outputs.pop("plain")
        case.differs(f"{node[1]}: it does something", reference, clean)
        for what, output in outputs.items():
            if bound and node[1] == "ModelComputeDtype":  # cards round partial sums to bfloat16, one card whole sums
                no_worse(case, node[1], output, reference, clean)
            else:
                near(case, f"{node[1]}: {what}", output, reference, bound)
        host.unload_all()
    near(case, "and without them", sample(divided), clean, bound)


def in_one_batch(model: Any) -> Any:
    return split(model, overlap=False)


@long_case
def nodes_for_flux(case: Case) -> None:
    each_node(case, "flux1", FLUX, in_one_batch, steps=3)  # caches skip the third


@case
def nodes_for_sd3(case: Case) -> None:
    each_node(case, "sd3", SD3, in_one_batch)
