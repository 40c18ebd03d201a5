"""A divided MODEL with CFG, whose cards compute one conditioning each: LoRAs, weights that come and go, 8-bit files.

On a card alone both conditionings are one batch, so outputs are near the reference and not its bits.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.model_management
import torch
from devicebridge.parallel.local.pictures import Pictures
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.comfy.emulated_vram import dynamic_vram
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs
from devicebridge.tests.comfy.split_cases_replayed import STEPS, bridge_of, replayed, unwatched
from devicebridge.tests.comfy.split_cases_tensor import near, tensor
from devicebridge.tests.comfy.split_cases_tensor_files import FILES, load_divided
from devicebridge.tests.comfy.split_cases_tensor_nodes import ends
from devicebridge.tests.comfy.split_host import HOME, OTHER, live_bytes
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

CFG = 4.0


def _pictures(case: Case, model: Any) -> Pictures:
    """Of a model that has just been sampled."""
    pictures = bridge_of(model).pictures
    assert pictures is not None
    case.check("each card computed its own pictures", pictures.num_calls > 0 and not pictures.fault, pictures.fault)
    pictures.num_calls = 0
    return pictures


@case
def pictures_with_loras_and_evicted(case: Case) -> None:
    """A LoRA is in what is gathered, and out again; an evicted MODEL leaves no whole blocks."""
    host = case.host
    for name in ("qwen_image", "ltxv"):  # the latter's blocks write into what they are given
        sample = functools.partial(host.sample, name=name, steps=STEPS, cfg=CFG)
        alone = host.load(name, load_device=CPU)
        clean, with_lora = sample(alone), sample(host.lora(alone, name))
        host.unload_all()
        with replayed():
            model = tensor(host.load(name))
            patched = host.lora(model, name)
            for _ in range(2):
                near(case, f"{name} without", sample(model), clean)
                _pictures(case, model)
                near(case, f"{name} with the LoRA", sample(patched), with_lora)
                pictures = _pictures(case, patched)
            graphs = pictures.graphs
            assert graphs is not None
            case.check("replayed", graphs.num_replays > 0 and not graphs.fault, graphs.fault)
            host.unload_all()
            case.check("nothing is kept", not graphs._graphs and not pictures._wholes._places)
            case.check("nothing is on the cards", not live_bytes(OTHER), live_bytes(OTHER))


@case
def pictures_whose_weights_wait_in_host_memory(case: Case) -> None:
    """The bits are the same wherever a weight was when it was gathered."""
    host, name = case.host, "wan_heads"
    with unwatched():
        model = tensor(host.load(name))
        sample = functools.partial(host.sample, model, name, steps=STEPS, cfg=CFG)
        expected = sample()
        _pictures(case, model)
        half = sum(weight.nbytes for weight in model.companions[0].model.parameters()) // 2
        for device in (HOME, OTHER):
            host.unload_all()
            with host.machine.room_for(half, device):
                case.equal(f"half of the weights of {device} in host memory", sample(), expected)
            _pictures(case, model)


@case
def pictures_under_dynamic_vram(case: Case) -> None:
    """Weights are asked for when they are gathered; what has no memory of its own is copied for it."""
    host, name = case.host, "wan_heads"
    with dynamic_vram() as vram:
        with unwatched():
            expected = host.sample(tensor(host.load(name)), name, steps=STEPS, cfg=CFG)
        host.unload_all()
        with replayed():
            model = tensor(host.load(name))
            sample = functools.partial(host.sample, model, name, steps=STEPS, cfg=CFG)
            case.equal("the same bits", sample(), expected)
            graphs = _pictures(case, model).graphs
            assert graphs is not None
            case.check("replayed", graphs.num_replays > 0 and not graphs.fault, (graphs.num_replays, graphs.fault))
            host.unload_all()
            vram.room[OTHER] = 0
            replays = graphs.num_replays
            case.equal("without room, the same bits", sample(), expected)
            _pictures(case, model)
            # Behind the last block nothing is gathered, so nothing is asked for.
            count = graphs.num_replays - replays
            case.check("no other block is replayed", count <= STEPS and not graphs.fault, (count, graphs.fault))


@case
def pictures_of_8_bit_files(case: Case) -> None:
    """Numbers in 8 bits are gathered as they are; with scales they are not, and all cards compute all pictures."""
    host, name = case.host, "wan_heads"
    with unwatched():
        model = load_divided(host.checkpoint(name), name, weight_dtype="fp8_e4m3fn")
        own = host.sample(model, name, steps=STEPS, cfg=CFG)
        _pictures(case, model)
        bridge_of(model).computes_pictures = False
        near(case, "as together", own, host.sample(model, name, steps=STEPS, cfg=CFG), 0.02)
        host.unload_all()
        scaled = load_divided(FILES["scaled_fp8"](host, name), name)
        host.sample(scaled, name, steps=STEPS, cfg=CFG)
        case.check("with scales", bridge_of(scaled).pictures is None)


@case
def pictures_need_room(case: Case) -> None:
    """Cards whose memory is full of weights compute all pictures together, and the log says so."""
    host, name = case.host, "qwen_image"
    with unwatched(), case.logged("devicebridge", level=20) as lines:
        model = tensor(host.load(name), memory_limit_gb=(0.0018, 0.0018))
        assert isinstance(bridge_of(model), TensorParallel)
        host.sample(model, name, steps=STEPS, cfg=CFG)
    found = [line for line in lines if "two whole blocks take" in line]
    case.check("it is said", bridge_of(model).pictures is None and len(found) == 1, lines)


@case
def pictures_with_verify(case: Case) -> None:
    """The first step is compared with one that remembers nothing; each card computes its own pictures behind it."""
    host, name = case.host, "qwen_image"
    expected = host.sample(host.load(name, load_device=CPU), name, steps=STEPS, cfg=CFG)
    host.unload_all()
    with unwatched(), case.logged("devicebridge", level=20) as lines:
        model = tensor(host.load(name), verify=True)
        near(case, "verified", host.sample(model, name, steps=STEPS, cfg=CFG), expected)
        _pictures(case, model)
        for when, number in {"first": 2, "second": 6}.items():  # of 4 blocks
            host.unload_all()
            model = tensor(host.load(name), verify=True)
            failing = _failing("_joined", number, torch.OutOfMemoryError("on purpose"))
            with mock.patch.object(Pictures, "_joined", autospec=True, side_effect=failing):
                near(case, f"no memory in the {when}", host.sample(model, name, steps=STEPS, cfg=CFG), expected)
            pictures = bridge_of(model).pictures
            assert pictures is not None
            case.check("they were given up", bool(pictures.fault), pictures.fault)
    said = [line for line in lines if "verified" in line]
    case.check("it is said", len(said) == 3 and all("first step is the same bits" in line for line in said), said)


@case
def pictures_of_unequal_prompts(case: Case) -> None:
    """ComfyUI makes no batch of them: each is a forward, and each card computes one. So it is with verify."""
    host = case.host
    for name in ("qwen_image", *in_long_runs("lumina2", "z_image")):
        negative = FAMILIES[name].condition(2, 3)
        sample = functools.partial(host.sample, name=name, steps=STEPS, cfg=CFG, negative=negative)
        expected = sample(host.load(name, load_device=CPU))
        host.unload_all()
        for is_verified in (False, True):
            with replayed():
                model = tensor(host.load(name), verify=is_verified)
                for turn in range(2):
                    near(case, f"{name}, turn {turn}", sample(model), expected)
                    _pictures(case, model)
            graphs = bridge_of(model).pictures.graphs  # type: ignore[union-attr]
            case.check("replayed", graphs.num_replays > 0 and not graphs.fault, graphs.fault)  # type: ignore[union-attr]
            host.unload_all()


@case
def pictures_of_unequal_prompts_stopped(case: Case) -> None:
    """Ctrl-C and ComfyUI's Cancel in either forward end the prompt, and the next one has the same bits. Where other
    people's code could notice two forwards at once, they are computed one after the other."""
    host, name = case.host, "qwen_image"
    with unwatched(), case.logged("devicebridge", level=20) as lines:
        model = tensor(host.load(name))
        negative = FAMILIES[name].condition(2, 3)
        sample = functools.partial(host.sample, name=name, steps=STEPS, cfg=CFG, negative=negative)
        reference = sample(model)
        for number in (3, 4):  # one of each forward
            for stop in (KeyboardInterrupt(), comfy.model_management.InterruptProcessingException()):
                _pictures(case, model)
                with mock.patch.object(Pictures, "result", autospec=True, side_effect=_failing("result", number, stop)):
                    ends(case, f"{type(stop).__name__} in call {number}", functools.partial(sample, model), type(stop))
                case.equal("the same bits", sample(model), reference)
        wrapped = model.clone()
        wrapped.set_model_unet_function_wrapper(lambda run, given: run(given["input"], given["timestep"], **given["c"]))
        _pictures(case, model)
        near(case, "with a wrapper", sample(wrapped), reference)
        number = bridge_of(model).pictures.num_calls  # type: ignore[union-attr]
        case.check("computed together", number == 0, number)
        host.unload_all()
        apart = tensor(host.load(name), overlap=False)
        near(case, "overlap off", sample(apart), reference)
        number = bridge_of(apart).pictures.num_calls  # type: ignore[union-attr]
        case.check("without overlap computed together", number == 0, number)
    found = [line for line in lines if "a model function wrapper may keep state" in line]
    case.check("it is said", len(found) == 1 and "all conditionings together" in found[0], lines)


def _failing(name: str, number: int, error: BaseException) -> Callable[..., Any]:
    """What this method of Pictures does, but for the call of this number."""
    result, calls = getattr(Pictures, name), itertools.count(1)

    def failing(*args: Any) -> Any:
        if next(calls) == number:
            raise error
        return result(*args)

    return failing
