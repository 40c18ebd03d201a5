"""ComfyUI's memory management over a split MODEL: each card's part is counted, evicted and offloaded where it is."""

import contextlib
import functools
import gc
import weakref
from typing import Any
from unittest import mock

import comfy.controlnet
import comfy.hooks
import comfy.model_management
import torch
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.tests.comfy.split_cases import Case, case, split
from devicebridge.tests.comfy.split_host import (
    CAPACITY_BYTES,
    HOME,
    OTHER,
    Host,
    hooked,
    live_bytes,
    offloaded_layers,
    pinning,
    weights_on,
)
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

NAME = "flux1"
LORA = 1


def _reference(host: Host, lora: bool = False, **options: Any) -> torch.Tensor:
    return host.reference(NAME, *[LORA] * lora, **options)


def _weights(host: Host, model: Any) -> dict[torch.device, int]:
    host.sample(model, NAME)
    return {device: weights_on(model, device) for device in (HOME, OTHER)}


@case
def partial_unload_of_one_card(case: Case, host: Host) -> None:
    for lora in (False, True):
        divided = split(host.load(NAME))
        divided = host.lora(divided, NAME, LORA) if lora else divided
        reference = _reference(host, lora=lora)
        case.equal("before", host.sample(divided, NAME), reference)
        before = live_bytes(OTHER)
        wanted = comfy.model_management.get_free_memory(OTHER) + before // 3
        comfy.model_management.free_memory(wanted, OTHER)
        case.check("some is gone, some stays", 0 < live_bytes(OTHER) < before, (live_bytes(OTHER), before))
        case.equal("after", host.sample(divided, NAME), reference)
        held = live_bytes(HOME)
        host.free(OTHER)
        left = live_bytes(OTHER), live_bytes(HOME)
        case.check("cleared, it is empty, and home keeps its part", left == (0, held), (left, held))
        case.equal("after that", host.sample(divided, NAME), reference)
        host.unload_all()


def _low_memory(case: Case, tight: tuple[torch.device, ...], lora: bool) -> None:
    """The tight cards have room for half of their part; the rest is streamed from host memory by ComfyUI."""
    host = case.host
    model = split(host.load(NAME))
    shares = _weights(host, model)
    host.unload_all()
    model = host.lora(model, NAME, LORA) if lora else model
    with contextlib.ExitStack() as stack:
        for device in tight:
            stack.enter_context(host.machine.room_for(shares[device] // 2, device))
        output = host.sample(model, NAME)
        for device in (HOME, OTHER):
            streamed = offloaded_layers(model, device)
            case.check(f"{device}: streamed layers as expected", bool(streamed) == (device in tight), streamed)
    case.equal("as unsplit", output, _reference(host, lora=lora))
    case.equal("and with room again", host.sample(model, NAME), _reference(host, lora=lora))


@case
def low_memory_on_one_card(case: Case) -> None:
    _low_memory(case, (HOME,), lora=False)
    _low_memory(case, (OTHER,), lora=True)


@case
def the_same_graph_twice(case: Case, host: Host) -> None:
    """Executed again with cached nodes, and executed again from the split node on."""
    plain, reference = host.load(NAME), _reference(host)
    divided = split(plain)
    for number in range(2):
        case.equal(f"cached, run {number}", host.sample(divided, NAME), reference)
    once = live_bytes(OTHER)
    case.check("no second set of weights", once == weights_on(divided, OTHER), once)
    for number in range(3):
        divided = split(plain)
        case.equal(f"split anew, run {number}", host.sample(divided, NAME), reference)
    gc.collect()
    case.check("what was split before is gone", live_bytes(OTHER) == once, live_bytes(OTHER))


@case
def forgetting_a_split_frees_both_cards(case: Case, host: Host) -> None:
    for kind in ("plain", "with a LoRA", "a clone too", "source too"):
        source = host.load(NAME)
        divided = split(source)
        if kind == "with a LoRA":
            divided = host.lora(divided, NAME, LORA)
        copy = divided.clone() if kind == "a clone too" else None
        host.sample(divided, NAME)
        base, tree = weakref.ref(divided.model), weakref.ref(tree_of(divided.model))
        del divided, copy
        if kind == "source too":
            del source
        gc.collect()
        comfy.model_management.cleanup_models_gc()
        held = (live_bytes(HOME), live_bytes(OTHER))
        case.check(f"{kind}: nothing is held", held == (0, 0), held)
        case.check(f"{kind}: the tree is gone", base() is None and tree() is None, (base(), tree()))
        case.check(f"{kind}: nothing is listed", not comfy.model_management.loaded_models())


@case
def a_refused_forward_keeps_no_model(case: Case, host: Host) -> None:
    """A MODEL that waits for the collector may die while ComfyUI unloads another, whose list of models shrinks then."""
    model = split(host.load(NAME), way="tokens").clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = lambda own, *args, **kw: own(*args)
    gc.disable()
    try:
        sample, known = functools.partial(host.sample, model, NAME), weakref.ref(model)
        case.refused("of its attention", sample, RuntimeError, __name__, "way 'blocks'")
        del model, sample
        case.check("it is gone at once", known() is None, gc.get_referrers(known()))
    finally:
        gc.enable()


@case
def limits_refused_before_loading(case: Case, host: Host) -> None:
    plain = host.load(NAME)
    host.machine.cards.copies.clear()
    limits = {"memory_limit_gb": (0.001, 0.002), "offload": False}
    case.refused("limits below the weights", lambda: split(plain, **limits), ValueError, str(OTHER), "0.00")
    held = (live_bytes(HOME), live_bytes(OTHER), len(host.machine.cards.copies))
    case.check("nothing moved", held == (0, 0, 0), held)


@case
def limits_kept(case: Case, host: Host) -> None:
    """A card holds no more weights than the user allows; the rest is streamed."""
    limit = 1_500_000
    for lora in (False, True):
        divided = split(host.load(NAME), memory_limit_gb=(limit / 1e9 * 4, limit / 1e9))
        divided = host.lora(divided, NAME, LORA) if lora else divided
        for run in (1, 2):
            case.equal(f"run {run}, LoRA {lora}", host.sample(divided, NAME), _reference(host, lora=lora))
            case.check("the limit is kept", 0 < live_bytes(OTHER) <= limit * 1.01, live_bytes(OTHER))
        host.unload_all()


@case
def a_card_too_small_is_refused(case: Case, host: Host) -> None:
    divided = split(host.load(NAME))
    host.machine.capacity_bytes[OTHER] = 1 << 20
    host.machine.cards.copies.clear()
    case.refused("sampling", lambda: host.sample(divided, NAME), RuntimeError, str(OTHER), "GB", "smaller")
    case.check("nothing was loaded", live_bytes(OTHER) == 0 and live_bytes(HOME) == 0)
    host.machine.capacity_bytes[OTHER] = CAPACITY_BYTES
    case.equal("on a larger card", host.sample(divided, NAME), _reference(host))


@case
def free_memory_is_that_of_the_fullest_card(case: Case, host: Host) -> None:
    """ComfyUI sizes its batches by the free memory of the patcher's card; every card holds activations."""
    divided = split(host.load(NAME))
    with host.machine.room_for(0, OTHER):
        free = comfy.model_management.get_free_memory(OTHER)
        found = divided.get_free_memory(HOME)
        case.check("it is the other card's", found == free < comfy.model_management.get_free_memory(HOME), found)


@case
def accounting_per_card(case: Case, host: Host) -> None:
    divided = split(host.load(NAME))
    shares = _weights(host, divided)
    loaded = {entry.device: entry.model_loaded_memory() for entry in comfy.model_management.current_loaded_models}
    case.check("ComfyUI lists a part on each card", set(loaded) == {HOME, OTHER}, loaded)
    case.check("of the size it has there", loaded[OTHER] == shares[OTHER], (loaded, shares))
    case.check("home without what is elsewhere", abs(loaded[HOME] - shares[HOME]) < 1e5, (loaded, shares))


@case
def weights_exist_once_in_host_memory(case: Case, host: Host) -> None:
    """A split shares the weights of the MODEL it was made of; with or without LoRA, loading it makes no second copy."""
    plain = host.load(NAME)
    divided = split(plain)
    originals = {parameter.data_ptr() for parameter in plain.model.parameters()}
    for lora in (False, True):
        host.sample(host.lora(divided, NAME, LORA) if lora else divided, NAME)
        host.unload_all()
        apart = [name for name, parameter in divided.model.named_parameters() if parameter.data_ptr() not in originals]
        case.check(f"LoRA {lora}: nothing exists twice", not apart, apart)


@case
def two_split_models_in_turn(case: Case, host: Host) -> None:
    models = {name: split(host.load(name)) for name in (NAME, "wan")}
    references = {name: host.reference(name) for name in models}
    largest = dict.fromkeys((HOME, OTHER), 0)
    for name, model in models.items():
        host.sample(model, name)
        largest = {device: max(size, weights_on(model, device)) for device, size in largest.items()}
        host.unload_all()
    with contextlib.ExitStack() as stack:
        for device, size in largest.items():
            stack.enter_context(host.machine.room_for(int(size * 1.15), device))
        for number in range(2):
            for name, model in models.items():
                case.equal(f"{name}, round {number}", host.sample(model, name), references[name])
                for device in (HOME, OTHER):
                    held = [weights_on(other, device) for other in models.values()]
                    case.check(f"{device} holds little more than one", sum(held) <= largest[device] * 1.2, held)


class Interrupting(comfy.controlnet.ControlBase):
    """Before every forward, what a ControlNet with a VAE may cause: cards are cleared and all is loaded again."""

    def __init__(self, *cleared: torch.device) -> None:
        super().__init__()
        self.cleared = cleared
        self.left: list[int] = []

    def get_control(self, x_noisy: torch.Tensor, *args: Any) -> None:
        loaded = comfy.model_management.loaded_models(only_currently_used=True)
        for device in self.cleared:
            comfy.model_management.free_memory(1e30, device)
        self.left += [int(part.loaded_size()) for part in loaded if part.load_device in self.cleared]
        comfy.model_management.load_models_gpu(loaded)


def _interrupted(host: Host, model: Any, *cleared: torch.device, positive: Any = None) -> tuple[Any, list[int]]:
    positive, control = positive or FAMILIES[NAME].condition(1), Interrupting(*cleared)
    positive[0][1]["control"] = control
    return host.sample(model, NAME, positive=positive), control.left


@case
def unloaded_and_loaded_in_the_middle(case: Case, host: Host) -> None:
    for lora in (False, True):
        divided = split(host.load(NAME))
        divided = host.lora(divided, NAME, LORA) if lora else divided
        for cleared in ((OTHER, HOME), (OTHER,), (HOME,)):
            output, left = _interrupted(host, divided, *cleared)
            case.equal(f"LoRA {lora}, {cleared} cleared", output, _reference(host, lora=lora))
            case.check("they were cleared", len(left) == 2 * len(cleared) and not any(left), left)


@case
def unloaded_in_the_middle_of_a_scheduled_lora(case: Case, host: Host) -> None:
    """A part that is evicted while a LoRA is written into its weights must not keep it."""
    positive, clean = hooked(NAME, 1, LORA), _reference(host)
    plain = host.load(NAME)
    reference, _ = _interrupted(host, plain, HOME, positive=positive)
    case.equal("plain, clean afterwards", host.sample(plain, NAME), clean)
    host.unload_all()
    divided = split(host.load(NAME))
    output, _ = _interrupted(host, divided, OTHER, HOME, positive=positive)
    case.equal("both cleared, as plain on one card", output, reference)
    for cleared in ((OTHER,), (HOME,), (OTHER, HOME)):
        _interrupted(host, divided, *cleared, positive=positive)
        case.equal(f"{cleared} cleared: clean afterwards", host.sample(divided, NAME), clean)


@case
def a_card_full_while_loading(case: Case, host: Host) -> None:
    """An out-of-memory error while one part is loaded, before or after its weights moved, leaves a MODEL that works."""
    reference = _reference(host, lora=True)
    for late in (False, True):
        divided = host.lora(split(host.load(NAME)), NAME, LORA)
        for patcher in (divided.companions[0], divided):
            load = patcher.load

            def fail(*args: Any, load: Any = load, **kwargs: Any) -> None:
                if late:  # noqa: B023
                    load(*args, **kwargs)
                raise torch.OutOfMemoryError("no room left")

            with mock.patch.object(patcher, "load", fail):
                claim = f"{patcher.load_device}, late {late}"
                case.refused(claim, lambda: host.sample(divided, NAME), torch.OutOfMemoryError, "no room")  # noqa: B023
            case.equal(f"after {claim}", host.sample(divided, NAME), reference)
            host.unload_all()
            held = (live_bytes(HOME), live_bytes(OTHER))
            case.check("nothing stays behind", held == (0, 0), held)


@case
def nothing_is_left_on_the_modules(case: Case, host: Host) -> None:
    plain = host.load(NAME)
    divided = host.lora(split(plain), NAME, LORA)
    host.sample(divided, NAME, cfg=3.0)
    hooked = [name for name, module in divided.model.named_modules() if module._forward_pre_hooks]
    case.check("loaded, its blocks have hooks", len(hooked) >= 6, hooked)
    host.unload_all()
    for kind, model in (("plain", plain), ("split", divided)):
        modules = list(model.model.modules())
        hooks = [m for m in modules if m._forward_pre_hooks or m._forward_hooks]
        case.check(f"{kind}: no hooks", not hooks, hooks)
        patched = [m for m in modules if getattr(m, "comfy_patched_weights", 0) or getattr(m, "weight_function", [])]
        case.check(f"{kind}: no patched layers", not patched, patched)


@case
def unloading_a_model_and_its_clones(case: Case, host: Host) -> None:
    """What ComfyUI's multi-GPU nodes call takes every part of a split MODEL off the cards, and nothing of another."""
    divided, other = split(host.load(NAME)), host.load("wan", load_device=OTHER)
    host.sample(divided, NAME)
    host.sample(other, "wan")
    held = weights_on(other, OTHER)
    comfy.model_management.unload_model_and_clones(divided, all_devices=True)
    left = (weights_on(divided, HOME), weights_on(divided, OTHER))
    case.check("every part is off its card", left == (0, 0), left)
    case.check("the other MODEL stays", weights_on(other, OTHER) == held > 0, weights_on(other, OTHER))
    case.equal("and back", host.sample(divided, NAME), _reference(host))


@case
def low_memory_with_a_scheduled_lora(case: Case, host: Host) -> None:
    """Weight hooks write into weights in host memory, which the plain MODEL shares."""
    positive = hooked(NAME, 1, LORA)
    plain = host.load(NAME)
    divided = split(plain, overlap=False)
    shares = _weights(host, divided)
    host.unload_all()
    scheduled, clean = _reference(host, cfg=3.0, positive=positive), _reference(host, cfg=3.0)
    with contextlib.ExitStack() as stack:
        for device in (HOME, OTHER):
            stack.enter_context(host.machine.room_for(shares[device] // 2, device))
        for number in range(2):
            output = host.sample(divided, NAME, cfg=3.0, positive=positive)
            case.equal(f"split, scheduled, round {number}", output, scheduled)
            case.equal(f"plain, clean, round {number}", host.sample(plain, NAME, cfg=3.0), clean)
            case.equal(f"split, clean, round {number}", host.sample(divided, NAME, cfg=3.0), clean)
            output = host.sample(plain, NAME, cfg=3.0, positive=positive)
            case.equal(f"plain, scheduled, round {number}", output, scheduled)


@case
def a_scheduled_lora_leaves_no_memory_pinned(case: Case, host: Host) -> None:
    """ComfyUI pins weights that it streams. A split gives those that the LoRA is written into a storage of their own,
    and ComfyUI would unpin that one later."""
    positive = hooked(NAME, 1, LORA)
    for way in ("blocks", "tokens"):
        divided = split(host.load(NAME), overlap=False, way=way)
        sizes = divided.model.devicebridge_split.weight_bytes()
        with (
            pinning() as (registered, pinned),
            host.machine.room_for(sizes[HOME] // 2, HOME),
            host.machine.room_for(sizes[OTHER] // 2, OTHER),
        ):
            host.sample(divided, NAME, cfg=3.0, positive=positive)
            host.unload_all()
        case.check(f"{way}: some were pinned", len(registered) > 8, len(registered))
        case.check(f"{way}: none is left", not pinned, pinned)
