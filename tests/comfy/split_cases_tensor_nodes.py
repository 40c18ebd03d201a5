"""ComfyUI's own nodes around a MODEL whose blocks all cards compute: what patches it, windows, merges, stops."""

import functools
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.model_management
import comfy_extras.nodes_model_merging as merging
from comfy.ldm.modules import attention
from comfy_extras.nodes_model_advanced import ModelAttentionBackend
from devicebridge.parallel.local.collectives import Collective
from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, in_long_runs, long_case
from devicebridge.tests.comfy.split_cases_nodes import FLUX, SD3, WINDOWS, _apply, each_node, in_one_batch
from devicebridge.tests.comfy.split_cases_replayed import STEPS, replayed, unwatched
from devicebridge.tests.comfy.split_cases_tensor import NEAR, _failing_meeting, near, tensor


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
def tensor_another_attention(case: Case) -> None:
    """Attention of ComfyUI's own gets the heads of its card. A replay of another one would have other bits."""
    host = case.host

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
