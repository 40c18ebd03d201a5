"""ComfyUI's own model nodes before and after the split: each does to a split MODEL what it does to a plain one. Where
all cards compute each block also windows, merges and stops."""

import functools
import importlib
import random
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.model_management
import comfy_extras.nodes_model_merging as merging
from comfy.ldm.modules import attention
from comfy_extras.nodes_model_advanced import ModelAttentionBackend
from devicebridge.parallel.local.collectives import Collective
from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, in_long_runs, long_case, split
from devicebridge.tests.comfy.split_cases_replayed import STEPS, replayed, unwatched
from devicebridge.tests.comfy.split_cases_tensor import NEAR, _failing_meeting, near, tensor
from devicebridge.tests.comfy.split_cases_tensor_files import no_worse

Node = tuple[str, str, dict[str, Any]]  # module of comfy_extras, class, arguments

_ALL_STEPS = {"start_percent": 0.0, "end_percent": 1.0}
_SKIPPED = {**_ALL_STEPS, "double_layers": "1", "single_layers": "0, 3"}
_CACHED = {**_ALL_STEPS, "reuse_threshold": 5.0, "verbose": False}
FLUX: tuple[Node, ...] = (
    ("nodes_slg", "SkipLayerGuidanceDiT", {**_SKIPPED, "scale": 2.0}),
    ("nodes_slg", "SkipLayerGuidanceDiTSimple", _SKIPPED),
    (
        "nodes_rope", "ScaleROPE",
        {"scale_x": 1.5, "shift_x": 0.0, "scale_y": 0.7, "shift_y": 1.0, "scale_t": 1.0, "shift_t": 0.0},
    ),
    ("nodes_model_advanced", "ModelSamplingFlux", {"max_shift": 1.3, "base_shift": 0.4, "width": 512, "height": 512}),
    ("nodes_model_advanced", "RescaleCFG", {"multiplier": 0.7}),
    ("nodes_model_advanced", "ModelComputeDtype", {"dtype": "bf16"}),
    ("nodes_apg", "APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": 0.1}), ("nodes_cfg", "CFGZeroStar", {}),
    ("nodes_nag", "NAGuidance", {"nag_scale": 3.0, "nag_alpha": 0.5, "nag_tau": 1.5}),
    ("nodes_easycache", "EasyCacheNode", _CACHED), ("nodes_easycache", "LazyCacheNode", _CACHED),
)  # fmt: skip
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


@long_case
def tensor_nodes_for_flux(case: Case) -> None:
    nodes = tuple(node for node in FLUX if node[1] != "NAGuidance")  # which is refused
    each_node(case, "flux1_heads", nodes, tensor, NEAR, steps=3)


@case
def tensor_nodes_for_sd3(case: Case) -> None:
    each_node(case, "sd3", SD3, tensor, NEAR, steps=3)


def context_windows(case: Case, name: str, divide: Callable[[Any], Any], bound: float = NEAR) -> None:
    host, latent = case.host, (16, 4, 4, 4)
    plain, divided = host.load(name, load_device=CPU), divide(host.load(name))
    reference = host.sample(_apply(WINDOWS, plain), name, cfg=3.0, latent=latent)
    case.differs("it does something", reference, host.sample(plain, name, cfg=3.0, latent=latent))
    near(case, "as unsplit", host.sample(_apply(WINDOWS, divided), name, cfg=3.0, latent=latent), reference, bound)


def merges(name: str, divide: Callable[[Any], Any], bound: float, case: Case) -> None:
    """ModelMergeSimple with a divided MODEL on either side, and on both, loaded on its cards or not; it reads the
    weights of the file, also while a LoRA is baked into the loaded ones."""
    host = case.host

    def merged(first: Any, second: Any) -> Any:
        return host.sample(merging.ModelMergeSimple().merge(first, second, 0.3)[0], name)

    def load(seed: int, is_divided: bool) -> Any:
        model = host.load(name, **({} if is_divided else {"load_device": CPU}))
        patched = host.lora(model, name, seed) if seed else model
        return divide(patched) if is_divided else patched

    reference, other = merged(load(0, False), load(3, False)), merged(load(3, False), load(0, False))
    case.differs("the order does something", reference, other)
    for what, kinds in {"first": (True, False), "second": (False, True), "both": (True, True)}.items():
        first, second = (load(seed, is_divided) for seed, is_divided in zip((0, 3), kinds, strict=True))
        near(case, f"the {what} divided", merged(first, second), reference, bound)
        for model in (first, second):
            host.sample(model, name, steps=1)
        near(case, f"the {what} divided, and loaded", merged(first, second), reference, bound)
        near(case, f"the {what} divided, the other way", merged(second, first), other, bound)
        host.unload_all()


CASES["blocks_merges"] = functools.partial(merges, "flux1", in_one_batch, 0.0)
CASES["tensor_merges"] = functools.partial(merges, "flux1_heads", tensor, NEAR)


def stopped_inside_a_block(case: Case, name: str, divide: Callable[[Any], Any]) -> Callable[..., Any]:
    """Ctrl-C, and ComfyUI's Cancel, in a collective of either card end the prompt. The next one has the same bits."""
    sample = functools.partial(case.host.sample, divide(case.host.load(name)), name)
    reference, threads = sample(), threading.active_count()
    cancel = comfy.model_management.InterruptProcessingException()
    for what, stop in {"Ctrl-C": KeyboardInterrupt(), "Cancel": cancel}.items():
        for rank in (0, 1):
            with _failing_meeting(rank, 7, stop):
                case.refused(f"{what} on card {rank}", sample, type(stop))
            case.equal(f"after {what} on card {rank}", sample(), reference)
    case.refused("Cancel pressed meanwhile", functools.partial(_cancelled, sample), type(cancel))
    case.equal("after Cancel was pressed", sample(), reference)
    case.check("no thread is left", threading.active_count() <= threads, threading.active_count())
    return sample


@case
def tensor_stopped_inside_a_block(case: Case) -> None:
    stopped_inside_a_block(case, "flux1_heads", tensor)


@case
def tensor_another_attention(case: Case, host: Any) -> None:
    """Attention of ComfyUI's own gets the heads of its card. A replay of another one would have other bits."""

    def sampled(model: Any, name: str) -> dict[str, Any]:
        outputs = {"as it is": host.sample(model, name, steps=STEPS)}
        for kind in ("split", "sub_quad"):
            chosen = model.clone()
            chosen.set_model_optimized_attention(attention.get_attention_function(kind))
            outputs[kind] = host.sample(chosen, name, steps=STEPS)
        chosen = ModelAttentionBackend().patch(model, "pytorch attention")[0]
        return outputs | {"by the node": host.sample(chosen, name, steps=STEPS)}

    for name in ("flux1_heads", *in_long_runs("wan_heads", "lumina2")):
        with unwatched():
            launched = sampled(tensor(host.load(name)), name)
        host.unload_all()
        with replayed():
            model = tensor(host.load(name))
            outputs = sampled(model, name)
            graphs = model.model.devicebridge_split.bridge.graphs
            case.check(f"{name}: replayed", graphs.num_replays > 0 and not graphs.fault, graphs.fault)
        host.unload_all()
        for kind, reference in sampled(host.load(name, load_device=CPU), name).items():
            near(case, f"{name}, {kind}", launched[kind], reference)
            case.equal(f"{name}, {kind}, replayed", outputs[kind], launched[kind])
        case.differs(f"{name}: kinds differ", launched["split"], launched["by the node"])


def _cancelled(sample: Any) -> None:
    """Cancel is pressed while a block runs; ComfyUI looks for it between operations and steps."""
    post, count = Collective.post, 0

    def pressing(self: Any, *args: Any, **more: Any) -> None:
        nonlocal count
        count += 1
        if count == 9:
            comfy.model_management.interrupt_current_processing()
        post(self, *args, **more)

    with mock.patch.object(Collective, "post", pressing):
        sample()
