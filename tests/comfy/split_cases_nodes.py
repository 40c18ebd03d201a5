"""ComfyUI's own model nodes before and after the split: each does to a split MODEL what it does to a plain one."""

import importlib
import random
from typing import Any

from devicebridge.tests.comfy.split_cases import CPU, Case, case, long_case, split

Node = tuple[str, str, dict[str, Any]]  # module of comfy_extras, class, arguments

_FLUX: tuple[Node, ...] = (
    (
        "nodes_slg",
        "SkipLayerGuidanceDiT",
        {"scale": 2.0, "start_percent": 0.0, "end_percent": 1.0, "double_layers": "1", "single_layers": "0, 3"},
    ),
    (
        "nodes_slg",
        "SkipLayerGuidanceDiTSimple",
        {"start_percent": 0.0, "end_percent": 1.0, "double_layers": "1", "single_layers": "0, 3"},
    ),
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
    (
        "nodes_easycache",
        "EasyCacheNode",
        {"reuse_threshold": 5.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False},
    ),
    (
        "nodes_easycache",
        "LazyCacheNode",
        {"reuse_threshold": 5.0, "start_percent": 0.0, "end_percent": 1.0, "verbose": False},
    ),
)
_SD3: tuple[Node, ...] = (
    ("nodes_sd3", "SkipLayerGuidanceSD3", {"layers": "0, 2", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}),
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


def _each(case: Case, name: str, nodes: tuple[Node, ...], *, cfg: float = 4.0, steps: int = 2) -> None:
    host = case.host
    plain = host.load(name)  # on one of the cards: resizing takes another kernel there than on the CPU
    clean = host.sample(plain, name, cfg=cfg, steps=steps)
    divided = split(host.load(name), overlap=False)
    for node in nodes:
        random.seed(0)
        reference = host.sample(_apply(node, plain), name, cfg=cfg, steps=steps)
        case.differs(f"{node[1]}: it does something", reference, clean)
        random.seed(0)
        case.equal(f"{node[1]}: after", host.sample(_apply(node, divided), name, cfg=cfg, steps=steps), reference)
        random.seed(0)
        before = split(_apply(node, host.load(name)), overlap=False)
        case.equal(f"{node[1]}: before", host.sample(before, name, cfg=cfg, steps=steps), reference)
        host.unload_all()
    case.equal("and without them", host.sample(divided, name, cfg=cfg, steps=steps), clean)


@long_case
def nodes_for_flux(case: Case) -> None:
    _each(case, "flux1", _FLUX, steps=3)  # caches skip the third


@case
def nodes_for_sd3(case: Case) -> None:
    _each(case, "sd3", _SD3)


@case
def context_windows(case: Case) -> None:
    """A long video in overlapping windows of frames, each a batch entry of its own."""
    host = case.host
    plain = host.load("wan", load_device=CPU)
    latent = (16, 4, 4, 4)
    clean = host.sample(plain, "wan", cfg=3.0, latent=latent)
    reference = host.sample(_apply(WINDOWS, plain), "wan", cfg=3.0, latent=latent)
    case.differs("it does something", reference, clean)
    divided = split(host.load("wan"), overlap=False)
    case.equal("as unsplit", host.sample(_apply(WINDOWS, divided), "wan", cfg=3.0, latent=latent), reference)
