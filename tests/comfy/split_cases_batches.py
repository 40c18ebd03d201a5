"""Guidance and batches: with overlap off ComfyUI's own batch, with overlap on as one forward after the other. By way
tokens each card computes whole conditionings or pictures where a step has enough, with the bits of one card."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import comfy.model_management
import comfy.patcher_extension
import comfy.sample
import torch
from comfy.model_base import BaseModel
from comfy.patcher_extension import WrappersMP
from devicebridge.parallel.local.interleave import Wholes
from devicebridge.parallel.local.tokens import TokenParallel
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs, split
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS, Residuals
from devicebridge.tests.comfy.split_cases_tensor import near
from devicebridge.tests.comfy.split_cases_tokens import NEAR, tokens, verified
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD, Host, live_bytes, one_condition_at_a_time
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, Condition

CFG = 4.0


def _one_image_at_a_time(host: Host, name: str, batch: int, **options: Any) -> torch.Tensor:
    """A batch as that many single pictures, cond and uncond one after the other, unsplit on the CPU."""
    unsplit = host.load(name, load_device=CPU)
    noise = _noise(name, batch)
    with one_condition_at_a_time(unsplit):
        return torch.cat([host.sample(unsplit, name, noise=one, **options) for one in noise.split(1)])


def _noise(name: str, batch: int) -> torch.Tensor:
    return comfy.sample.prepare_noise(torch.zeros(batch, *FAMILIES[name].latent), 7)


@case
def batches(case: Case, host: Host) -> None:
    more = in_long_runs(("flux1", 2, 1.0), ("qwen_image", 2, CFG))
    for name, batch, cfg in (("flux1", 4, CFG), ("wan", 2, CFG), *more):
        claim = f"{name}, batch {batch}, cfg {cfg}"
        together = host.reference(name, batch=batch, cfg=cfg)
        output = host.sample(split(host.load(name), overlap=False), name, batch=batch, cfg=cfg)
        case.equal(f"{claim}: overlap off", output, together)
        apart = _one_image_at_a_time(host, name, batch, cfg=cfg)
        output = host.sample(split(host.load(name)), name, batch=batch, cfg=cfg)
        case.equal(f"{claim}: overlap on", output, apart)
        host.unload_all()


def _combined() -> Condition:
    """Two prompts for two halves of the picture, one of them for the first step only, and one everywhere."""
    family = FAMILIES["flux1"]
    left, right, everywhere = family.condition(11), family.condition(12), family.condition(13)
    left[0][1] |= {"area": (8, 4, 0, 0), "strength": 0.8, "set_area_to_bounds": False}
    mask = torch.zeros(1, 8, 8)
    mask[..., 3:] = 1
    right[0][1] |= {"mask": mask, "mask_strength": 0.7, "start_percent": 0.0, "end_percent": 0.4}
    return left + right + everywhere


def _each_side_alone(executor: Any, model: Any, conds: list[Any], *args: Any) -> list[torch.Tensor]:
    """ComfyUI's evaluation, asked for the positive and for the negative side by itself."""
    sides = [[cond if number == side else None for number, cond in enumerate(conds)] for side in range(len(conds))]
    return [executor(model, side, *args)[number] for number, side in enumerate(sides)]


@contextlib.contextmanager
def _seen_in(divided: Any, names: Sequence[str], see: Callable[[str], None]) -> Iterator[None]:
    """While active the classes of these blocks tell when one of them computes; a hook on a block would end overlap."""
    model = divided.model.diffusion_model
    blocks = {model.get_submodule(name): name for name in names}
    with contextlib.ExitStack() as stack:
        for cls in dict.fromkeys(map(type, blocks)):
            stack.enter_context(mock.patch.object(cls, "forward", _telling(cls.forward, blocks, see)))
        yield


def _telling(forward: Callable[..., Any], blocks: Mapping[Any, str], see: Callable[[str], None]) -> Callable[..., Any]:
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module in blocks:
            see(blocks[module])
        return forward(module, *args, **kwargs)

    return run


@case
def forwards_in_flight(case: Case, host: Host) -> None:
    entries: dict[bool, list[tuple[int, str]]] = {}
    for overlap in (False, True):
        divided = split(host.load("flux1"), overlap=overlap)
        entered = entries[overlap] = []
        see = functools.partial(_note, entered)
        with _seen_in(divided, ("double_blocks.0", "single_blocks.3"), see):
            host.sample(divided, "flux1", cfg=CFG, steps=1)
    threads = [{thread for thread, _ in entered} for entered in entries.values()]
    case.check("off: one forward, in this thread", threads[0] == {threading.get_ident()} and len(entries[False]) == 2)
    case.check("on: two forwards in threads of their own", len(threads[1]) == 2 and len(entries[True]) == 4)
    order = [name for _, name in entries[True]]
    case.check("on: both begin before either ends", order == sorted(order), order)
    case.check("no thread is left at work", not _forward_threads(), threading.enumerate())


def _note(entered: list[tuple[int, str]], name: str) -> None:
    entered.append((threading.get_ident(), name))


def _forward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("devicebridge-forward")]


@case
def an_error_while_overlapping(case: Case, host: Host) -> None:
    divided = split(host.load("flux1"))
    expected = host.sample(divided, "flux1", cfg=CFG)
    calls = []

    def fail(name: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise InterruptedError("stopped by the user")

    with _seen_in(divided, ("single_blocks.2",), fail):
        case.refused("the error arrives", lambda: host.sample(divided, "flux1", cfg=CFG), InterruptedError, "stopped")
    case.check("no thread is left", not _forward_threads(), _forward_threads())
    case.equal("afterwards", host.sample(divided, "flux1", cfg=CFG), expected)
    main_device = live_bytes(HOME)
    case.equal("again", host.sample(divided, "flux1", cfg=CFG), expected)
    case.check("nothing was left on the card", live_bytes(HOME) == main_device, (live_bytes(HOME), main_device))


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
def wholes_of_every_kind(case: Case, host: Host) -> None:
    """Guidance with prompts of unequal length, batches of both, on two and three cards."""
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
def wholes_of_regions_and_masks(case: Case, host: Host) -> None:
    """Regions, masks and times: each side has several forwards, of other numbers; a default makes both sides one."""
    options = {"cfg": CFG, "positive": _combined()}
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
def wholes_that_are_shared_out(case: Case, host: Host) -> None:
    """What may keep state, has no room or would wait for a slow card is computed by all cards, as one batch."""
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
def wholes_of_a_changed_model(case: Case, host: Host) -> None:
    """What one copy alone has is refused before anything is dealt; where auto took tokens, its card computes alone."""
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
def wholes_that_end(case: Case, host: Host) -> None:
    """An error of either card, Ctrl-C and Cancel end all of them at their next block; the next prompt is as before."""
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
