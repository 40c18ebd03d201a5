"""Way tokens where a step has enough conditionings or pictures: each card computes whole ones, with one card's bits.

The reference is one card that computes each conditioning of each picture by itself.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import comfy.model_management
import torch
from comfy.model_base import BaseModel
from comfy.patcher_extension import WrappersMP
from devicebridge.parallel.local.interleave import Wholes
from devicebridge.parallel.local.tokens import TokenParallel
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs
from devicebridge.tests.comfy.split_cases_batches import CFG, _combined, _each_side_alone, _one_image_at_a_time
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS, Residuals
from devicebridge.tests.comfy.split_cases_tensor import near
from devicebridge.tests.comfy.split_cases_tokens import NEAR, tokens, verified
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD, Host, live_bytes, one_condition_at_a_time
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

NAME = "flux1"


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    """Counts whole forwards that cards were dealt, and those that all share."""
    found, deal, share = {"dealt": 0, "shared": 0}, Wholes.run, TokenParallel.run

    def dealt(self: Wholes, jobs: Any) -> Any:
        found["dealt"] += len(jobs)
        return deal(self, jobs)

    def shared(self: TokenParallel, calls: Any, *replays: Any) -> Any:
        found["shared"] += 1
        return share(self, calls, *replays)

    with mock.patch.object(Wholes, "run", dealt), mock.patch.object(TokenParallel, "run", shared):
        yield found


def _apart(host: Host, **options: Any) -> Any:
    unsplit = host.load(NAME, load_device=CPU)
    with one_condition_at_a_time(unsplit):
        return host.sample(unsplit, NAME, **options)


@case
def wholes_of_every_kind(case: Case) -> None:
    """Guidance with prompts of unequal length, batches of both, on two and three cards."""
    host = case.host
    for name in (NAME, *in_long_runs("wan", "qwen_image", "ltxv", "krea2", "hidream", "cosmos_predict2")):
        unequal: dict[str, Any] = {"cfg": CFG, "negative": FAMILIES[name].condition(2, tokens=9)}
        unsplit = host.load(name, load_device=CPU)
        with one_condition_at_a_time(unsplit):
            reference = host.sample(unsplit, name, **unequal)
        shared, seen = tokens(host.load(name)), set()
        root = shared.model.devicebridge_split.shards[OTHER].diffusion_model
        block = root.get_submodule(shared.model.devicebridge_split.plan.blocks[0])
        handle = block.register_forward_hook(lambda *args, seen=seen: seen.add(threading.get_ident()))
        with _counted() as found:
            case.equal(f"{name}: guidance", host.sample(shared, name, **unequal), reference)
        case.check(f"{name}: all dealt", found == {"dealt": 4, "shared": 0}, found)
        case.check(f"{name}: the other card computed", bool(seen) and threading.get_ident() not in seen, seen)
        handle.remove()
        if FAMILIES[name].sound:
            continue
        apart = _one_image_at_a_time(host, name, 2, cfg=CFG)
        with _counted() as found:
            case.equal(f"{name}: a batch with guidance", host.sample(shared, name, cfg=CFG, batch=2), apart)
        case.check(f"{name}: rounds of two", found == {"dealt": 8, "shared": 0}, found)
        host.unload_all()
        left = {device: live_bytes(device) for device in (HOME, OTHER)}  # Cosmos leaves a step's text on the model
        case.check(f"{name}: nothing more stays than on one card", max(left.values()) < 2**17, left)
        three = tokens(host.load(name), HOME, OTHER, THIRD)
        with _counted() as found:
            near(case, f"{name}: four for three", host.sample(three, name, cfg=CFG, batch=2), apart, NEAR)
        case.check(f"{name}: the fourth is shared out", found == {"dealt": 6, "shared": 2}, found)
        host.unload_all()


@case
def wholes_of_regions_and_masks(case: Case) -> None:
    """Regions, masks and times: each side has several forwards, of other numbers; a default makes both sides one."""
    host, options = case.host, {"cfg": CFG, "positive": _combined()}
    unsplit = host.load(NAME, load_device=CPU).clone()
    unsplit.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "test", _each_side_alone)
    shared = tokens(host.load(NAME))
    with _counted() as found:
        case.equal("as each side alone", host.sample(shared, NAME, **options), host.sample(unsplit, NAME, **options))
    case.check("all dealt", found == {"dealt": 4, "shared": 0}, found)
    positive = _combined()
    positive[2][1]["default"] = True
    reference = host.reference(NAME, cfg=CFG, positive=positive)
    with _counted() as found:
        near(case, "a default", host.sample(shared, NAME, cfg=CFG, positive=positive), reference, NEAR)
    case.check("none dealt", found["dealt"] == 0 < found["shared"], found)


@case
def wholes_that_are_shared_out(case: Case) -> None:
    """What may keep state, has no room or would wait for a slow card is computed by all cards, as one batch."""
    host = case.host
    reference = host.reference(NAME, cfg=CFG)
    shared = tokens(host.load(NAME))
    seen = shared.clone()
    seen.add_wrapper(WrappersMP.APPLY_MODEL, lambda executor, *args, **kw: executor(*args, **kw))
    slow = tokens(host.load(NAME), shares=(1, 3))
    ways = {
        "a wrapper": (seen, "around apply_model"),
        "a slow card": (slow, "slower"),
        "off": (tokens(host.load(NAME), overlap=False), ""),
    }
    for what, (model, word) in ways.items():
        with _counted() as found, case.logged("devicebridge", 20) as messages:
            near(case, what, host.sample(model, NAME, cfg=CFG), reference, NEAR)
        case.check(f"{what}: none dealt", found == {"dealt": 0, "shared": 2}, found)
        case.check(f"{what}: said", any(word in each for each in messages), messages)
    own = BaseModel.apply_model
    with mock.patch.object(BaseModel, "apply_model", lambda *args, **kwargs: own(*args, **kwargs)), _counted() as found:
        near(case, "a replaced method", host.sample(shared, NAME, cfg=CFG), reference, NEAR)
    case.check("a replaced method: none dealt", found == {"dealt": 0, "shared": 2}, found)
    with one_condition_at_a_time(shared), _counted() as found:
        near(case, "no room", host.sample(shared, NAME, cfg=CFG), reference, NEAR)
    case.check("no room: each by itself, by both cards", found == {"dealt": 0, "shared": 4}, found)
    outputs = []
    for model in (host.load(NAME, load_device=CPU), shared):
        positive = FAMILIES[NAME].condition(1)
        positive[0][1] |= {"control": Residuals(_RESIDUALS[NAME]), "control_apply_to_uncond": True}
        outputs.append(host.sample(model, NAME, cfg=CFG, positive=positive))
    near(case, "a ControlNet", outputs[1], outputs[0], NEAR)
    three, reference = tokens(host.load(NAME), HOME, OTHER, THIRD), _apart(host, cfg=CFG)
    with _counted() as found:
        near(case, "two for three", host.sample(three, NAME, cfg=CFG), reference, NEAR)
    case.check("two for three: none dealt", found["dealt"] == 0, found)


@case
def wholes_of_a_changed_model(case: Case) -> None:
    """What one copy alone has is refused before anything is dealt; where auto took tokens, its card computes alone."""
    host = case.host
    unsplit, shared, taken = host.load(NAME, load_device=CPU), tokens(host.load(NAME)), tokens(host.load(NAME))
    executor = taken.model.devicebridge_split.executor
    executor._plan = dataclasses.replace(executor._plan, may_run_alone=True)
    for model in (unsplit, shared, taken):
        layer = model.model.diffusion_model.single_blocks[0].linear1
        layer.weight = torch.nn.Parameter(layer.weight * 2)
    sample = functools.partial(host.sample, shared, NAME, cfg=CFG)
    case.refused("by name", sample, RuntimeError, "numbers in single_blocks.0.linear1.weight", "way 'blocks'")
    with _counted() as found:
        outputs = [host.sample(model, NAME, cfg=CFG) for model in (taken, unsplit)]
    case.equal("alone", *outputs)
    case.check("none dealt", found == {"dealt": 0, "shared": 0}, found)


@case
def wholes_that_end(case: Case) -> None:
    """An error of either card, Ctrl-C and Cancel end all of them at their next block; the next prompt is as before."""
    host = case.host
    shared = tokens(host.load(NAME))
    sample = functools.partial(host.sample, shared, NAME, cfg=CFG)
    reference, threads = sample(), threading.active_count()
    block = shared.model.devicebridge_split.shards[OTHER].diffusion_model.single_blocks[0]
    cancel = comfy.model_management.InterruptProcessingException()

    def fail(stop: BaseException, *args: Any) -> None:
        raise stop

    ways = {type(stop).__name__: (stop, fail) for stop in (ValueError("fails"), cancel, KeyboardInterrupt())}
    ways["Cancel pressed"] = cancel, lambda *args: comfy.model_management.interrupt_current_processing()
    for what, (stop, act) in ways.items():
        handle = block.register_forward_pre_hook(functools.partial(act, stop))
        case.refused(what, sample, type(stop))
        handle.remove()
        case.equal(f"after {what}", sample(), reference)
    case.check("no thread is left", threading.active_count() <= threads, threading.active_count())


@case
def wholes_verified(case: Case) -> None:
    verified(case, NAME, "single_blocks.3.linear2", "all of its activations", cfg=CFG)
