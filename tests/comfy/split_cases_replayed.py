"""A MODEL whose blocks all cards compute, replayed: what is fixed in a recording, in every class, by tensor and tokens.

Emulated cards record nothing. What stands for the recorder computes on the recording's inputs, so that a class whose
blocks read anything else, or write elsewhere, gives other bits than the launched ones.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import comfy.ops
import torch
from comfy.ldm.flux import math as flux_math
from comfy.ldm.modules.attention import attention_basic
from comfy.model_management import InterruptProcessingException
from devicebridge.nodes.host.split import tokens as tokens_module
from devicebridge.nodes.host.split.tensor import addresses_on
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.parallel.local import graphs as graphs_module
from devicebridge.parallel.local import tensor_parallel as tensor_module
from devicebridge.parallel.local.graphs import Graphs
from devicebridge.tests.comfy import split_host
from devicebridge.tests.comfy.emulated_vram import dynamic_vram
from devicebridge.tests.comfy.split_cases import CASES, Case, case, split
from devicebridge.tests.comfy.split_cases_tensor import controlnets, tensor
from devicebridge.tests.comfy.split_classes import DIVIDED, SHARED
from devicebridge.tests.comfy.split_host import OTHER, Host, live_bytes
from devicebridge.tests.stand_in_recorder import stand_in

STEPS = 4


@contextmanager
def unwatched() -> Iterator[None]:
    """As on cards: here a mode emulates them, which counts as other people's."""
    with mock.patch.object(graphs_module, "watching_modes", lambda: 0):
        yield


@contextmanager
def replayed() -> Iterator[None]:
    """Splits made inside are replayed, from a call's second time on."""
    with (
        mock.patch.object(tensor_module, "graphs_on", stand_in),
        mock.patch.object(tokens_module, "graphs_on", stand_in),
        mock.patch.object(graphs_module, "RECORDED_AFTER", 1),
        unwatched(),
    ):
        yield


def graphs_of(model: Any) -> Graphs:
    tree: Any = tree_of(model.model)
    graphs = getattr(tree.bridge, "graphs", None) or getattr(tree.executor, "graphs", None)
    assert isinstance(graphs, Graphs)
    return graphs


def together(model: Any) -> Any:
    return split(model, way="tokens", overlap=False)


def _family(name: str, way: Callable[[Any], Any], case: Case) -> None:
    host = case.host
    with unwatched():
        launched = {cfg: host.sample(way(host.load(name)), name, steps=STEPS, cfg=cfg) for cfg in (1.0, 4.0)}
    host.unload_all()
    with replayed():
        model = way(host.load(name))
        for cfg, expected in launched.items():
            case.equal(f"bits of what is launched, cfg {cfg}", host.sample(model, name, steps=STEPS, cfg=cfg), expected)
        graphs = graphs_of(model)
        is_replayed = (name, way) != ("hidream_o1", together)  # its blocks are handed a function
        found = graphs.num_replays, graphs.fault
        case.check("replayed", (graphs.num_replays > 0) == is_replayed and not graphs.fault, found)


for _name in DIVIDED:
    CASES[f"replayed_{_name}"] = functools.partial(_family, _name, tensor)
for _name in SHARED:
    CASES[f"replayed_tokens_{_name}"] = functools.partial(_family, _name, together)


@case
def replayed_with_loras_and_evicted(case: Case, host: Host) -> None:
    """A LoRA is in what is replayed, and out again; an evicted MODEL leaves no graphs."""
    name = "flux2_heads"
    for way in (tensor, together):
        with unwatched():
            clean = host.sample(way(host.load(name)), name, steps=STEPS)
            with_lora = host.sample(host.lora(way(host.load(name)), name), name, steps=STEPS)
        host.unload_all()
        with replayed():
            model = way(host.load(name))
            patched = host.lora(model, name)
            for _ in range(2):
                case.equal("without", host.sample(model, name, steps=STEPS), clean)
                case.equal("with the LoRA", host.sample(patched, name, steps=STEPS), with_lora)
            graphs = graphs_of(model)
            case.check("replayed", graphs.num_replays > 0 and not graphs.fault, graphs.fault)
            host.unload_all()
            case.check("no graphs are kept", not graphs._graphs and not graphs._staged, len(graphs._staged))
            case.check("nothing is kept", way is together or not live_bytes(OTHER), live_bytes(OTHER))
            case.equal("after it was unloaded", host.sample(model, name, steps=STEPS), clean)


@case
def replayed_with_a_controlnet(case: Case) -> None:
    """Its residuals are written into what a block has returned, which is what that block was given."""
    longer = mock.patch.object(case.host, "sample", functools.partial(case.host.sample, steps=STEPS))
    with replayed(), longer, mock.patch.dict(split_host._REFERENCES, clear=True):  # references take as many steps
        for way in (tensor, together):
            controlnets(case, ("flux1_heads",), way)


@case
def replayed_under_dynamic_vram(case: Case, host: Host) -> None:
    """Weights are asked for at every replay; what is not there, or was taken away, is computed without."""
    name = "wan_heads"
    for way in (tensor, together):
        with dynamic_vram() as vram:
            with unwatched():
                expected = host.sample(way(host.load(name)), name, steps=STEPS)
            host.unload_all()
            with replayed():
                model = way(host.load(name))
                case.equal("the same bits", host.sample(model, name, steps=STEPS), expected)
                graphs = graphs_of(model)
                case.check("replayed", graphs.num_replays > 0 and not graphs.fault, (graphs.num_replays, graphs.fault))
                host.unload_all()
                vram.room[OTHER] = 0
                replays = graphs.num_replays
                case.equal("without room, the same bits", host.sample(model, name, steps=STEPS), expected)
                case.check("nothing is replayed", graphs.num_replays == replays and not graphs.fault, graphs.fault)
            host.unload_all()


@case
def replayed_until_somebody_hooks_a_layer(case: Case, host: Host) -> None:
    """A hook that comes to a layer after the blocks were recorded is seen before the next forward."""
    name = "wan_heads"
    with replayed():
        model = tensor(host.load(name))
        expected = host.sample(model, name, steps=STEPS)
        replays = graphs_of(model).num_replays
        layer = model.model.diffusion_model.blocks[0].ffn[0]
        handles: list[Any] = []

        def hook_it(step: int, *_: Any) -> None:
            if step == 1:
                handles.append(layer.register_forward_hook(lambda module, args, output: output * 2))

        sample = functools.partial(host.sample, model, name, steps=STEPS, callback=hook_it)
        case.refused("in the middle of a run", sample, RuntimeError, "way 'blocks'")
        blocks = len(graphs_of(model)._graphs)
        case.check("nothing is replayed with it", graphs_of(model).num_replays == replays + 2 * blocks > 2 * blocks)
        handles[0].remove()
        case.equal("without it", host.sample(model, name, steps=STEPS), expected)


@case
def replayed_without_what_a_hook_did_while_blocks_were_recorded(case: Case, host: Host) -> None:
    """By tokens the host looks at the model behind a forward, unless that is cancelled: no graph of it is kept."""
    name = "wan_heads"

    def cancel(*_: Any) -> None:
        raise InterruptProcessingException

    for error, last in ((RuntimeError, None), (InterruptProcessingException, cancel)):
        with replayed():
            model = together(host.load(name))
            blocks = model.model.diffusion_model.blocks

            def hook_it(*_: Any, blocks: Any = blocks, last: Any = last) -> None:
                blocks[0].ffn[0].register_forward_hook(lambda module, args, output: output * 2)
                blocks[-1].ffn[0].register_forward_hook(last or (lambda *_: None))

            case.refused(f"{error}", functools.partial(host.sample, model, name, callback=hook_it), error)
            case.check(f"no graph is kept after {error}", not graphs_of(model)._graphs)
        host.unload_all()


@case
def replayed_until_somebody_replaces_attention(case: Case, host: Host) -> None:
    """FLUX's blocks call it in a module that has none of their classes."""
    name = "flux1_heads"
    for way in (together, tensor):
        with replayed():
            model = way(host.load(name))
            host.sample(model, name, steps=STEPS)
            replays = graphs_of(model).num_replays
            with mock.patch.object(flux_math, "optimized_attention", attention_basic):
                host.sample(model, name, steps=1)
            case.check(f"nothing is replayed with another, {way}", graphs_of(model).num_replays == replays > 0)
        host.unload_all()


@case
def replayed_where_weights_lie(case: Case) -> None:
    """Every tensor of a block counts, at any depth; one that is away, or is not used as it is, is an answer, too."""
    cpu, ops = torch.device("cpu"), comfy.ops.disable_weight_init
    inner = torch.nn.Sequential(ops.Linear(3, 4, bias=False), torch.nn.SiLU(), ops.Linear(4, 3))
    block = torch.nn.ModuleDict({"in": torch.nn.ModuleList([inner, torch.nn.LayerNorm(3)]), "last": ops.Linear(3, 3)})
    block["in"].register_module("left_out", None)
    block.register_buffer("scale", torch.ones(3))
    tensors = [*block.parameters(), *block.buffers()]
    found = addresses_on(block, cpu)
    case.check("all", found is not None and sorted(found) == sorted(each.data_ptr() for each in tensors), found)
    moved = inner[2].bias
    inner[2].bias = torch.nn.Parameter(moved.clone())
    case.check("one has moved", addresses_on(block, cpu) not in (None, found))
    inner[2].bias = torch.nn.Parameter(moved.to("meta"))
    case.check("one is away", addresses_on(block, cpu) is None)
    inner[2].bias = moved
    case.check("back", addresses_on(block, cpu) == found)
    for name in ("weight_function", "bias_function"):
        with mock.patch.object(inner[0], name, [lambda weight: weight]):
            case.check(f"with a {name}", addresses_on(block, cpu) is None)
