"""Random histories of a MODEL: nodes, clones, evictions and samplings, split and unsplit side by side.

A history is drawn from its seed alone. It ends well if every sampling of the split MODEL has the bits of the unsplit
one, or is refused in words; an error of torch is no refusal. What fails unsplit is skipped. Where overlap is on, each
picture and each conditioning is computed by itself, so the bits may also be those of an unsplit MODEL that does that.

With way tokens the shares of the cards are drawn, and samplings are near. Sums of products are mostly rounded once,
from float64: then their bits do not depend on the number of rows, and only a fault can make a difference. Behind a
refusal the MODEL from before computes what one card computes.
"""

import contextlib
import random
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import comfy.model_management
import comfy.sample
import torch
from devicebridge.nodes.host.split.model import split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.tests.comfy.split_cases import CPU
from devicebridge.tests.comfy.split_classes import FAMILIES as FAMILIES_SPLIT
from devicebridge.tests.comfy.split_classes import SHARED
from devicebridge.tests.comfy.split_fuzz_nodes import (
    AFTER_ONLY,
    BY_TOKENS,
    NODES,
    STATEFUL,
    Node,
    Setting,
    applied,
    weight_wrapper,
)
from devicebridge.tests.comfy.split_host import CARDS, NUM_CARDS, Host, one_condition_at_a_time
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES
from devicebridge.tests.emulated import exact_products

_REFUSALS = ("split", "across GPUs", "verify:", "cannot run")
_NUM_BLOCKS = 3  # every family has as many, so a cut before any of them is possible
_NEAR = 2e-5  # of the largest value, where kernels are chosen by the rows; of 1,000 histories the worst was 1.4e-5
_EXACT = 5e-6  # what is no product may still take another kernel


@dataclass(frozen=True)
class Ground:
    """The cards of the split and the device of the unsplit MODEL: on GPUs the first one, for a CPU rounds otherwise."""

    cards: tuple[torch.device, ...] = CARDS[:NUM_CARDS]
    one: torch.device = CPU

    @property
    def is_emulated(self) -> bool:
        return self.one == CPU


def ground(is_emulated: bool) -> Ground:
    """Emulated cards, or the GPUs of this machine."""
    if is_emulated:
        return Ground()
    gpus = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return Ground(gpus, gpus[0])


@dataclass
class History:
    """What one seed came to ("equal", "refused: ...", "skipped, ...", "different: ...") and what was done."""

    seed: int
    steps: list[str] = field(default_factory=list)
    verdict: str = "equal"


@dataclass
class _Pair:
    """A split MODEL, its unsplit twin, and how both are sampled."""

    divided: Any
    unsplit: Any
    options: dict[str, Any]
    nodes: tuple[Node, ...] = ()


def run_history(host: Host, seed: int, ground: Ground = Ground(), *, by_tokens: bool = False) -> History:
    """One history from its seed; nothing stays loaded."""
    history = History(seed)
    try:
        _play(host, random.Random(seed), history, ground, by_tokens)
    except Ended as ended:
        history.verdict = str(ended)
    finally:
        host.unload_all()
    return history


_BY_BLOCKS = tuple(name for name in FAMILIES_SPLIT if name not in ("krea2", "minimax_h3"))


class Ended(Exception):
    """The history is over; its text is the verdict."""


def _play(host: Host, drawn: random.Random, history: History, ground: Ground, by_tokens: bool) -> None:
    name = drawn.choice(SHARED if by_tokens else _BY_BLOCKS)
    dtype = drawn.choice((torch.float32, torch.float32, torch.bfloat16))
    request = _draw_shares(drawn, ground) if by_tokens else _draw_request(drawn, ground)
    is_exact = by_tokens and (dtype != torch.float32 or drawn.random() < 0.7)
    bound = (_EXACT if is_exact else _NEAR) if by_tokens else 0.0
    history.steps.append(f"{name}, {dtype}, {request}{', exact products' if is_exact else ''}")
    some = BY_TOKENS if by_tokens and drawn.random() < 0.9 else tuple(NODES)
    nodes = [node for node in some if name in NODES[node] and not (request.verify and node in STATEFUL)]
    before = [(node, drawn.randrange(1000)) for node in _draw(drawn, nodes, 2) if node not in AFTER_ONLY]
    history.steps += [f"before: {node.__name__} {salt}" for node, salt in before]
    with exact_products() if is_exact else contextlib.nullcontext():
        unsplit = host.load(name, load_device=ground.one, file_dtype=dtype)
        divided = host.load(name, file_dtype=dtype, load_device=ground.cards[0])
        for node, salt in before:
            unsplit = _on_one(ground, lambda: applied(node, unsplit, Setting(host, name, ground.one, salt)))  # noqa: B023
            divided = applied(node, divided, Setting(host, name, ground.cards[0], salt))
        divided = _or_refused(lambda: split_model(divided, request))
        pairs = [_Pair(divided, unsplit, _draw_options(drawn, name), tuple(node for node, _ in before))]
        for _ in range(drawn.randint(1, 3)):
            pair = drawn.choice(pairs)
            changed = _Pair(pair.divided, pair.unsplit, _draw_options(drawn, name), pair.nodes)
            try:
                for node in _draw(drawn, nodes, 3):
                    salt = drawn.randrange(1000)
                    history.steps.append(f"{node.__name__} {salt}")
                    changed = _changed(host, name, changed, node, salt, ground)
                pairs.append(changed)
                _compare(host, name, drawn, pairs, history, ground, bound)
            except Ended as ended:
                if by_tokens and str(ended).startswith("refused") and not STATEFUL.intersection(pairs[0].nodes):
                    history.steps.append("after the refusal")
                    _compare(host, name, drawn, pairs[:1], history, ground, bound)
                raise


def _draw(drawn: random.Random, nodes: list[Node], most: int) -> list[Node]:
    return drawn.sample(nodes, k=drawn.randint(0, min(most, len(nodes))))


def _draw_shares(drawn: random.Random, ground: Ground) -> SplitRequest:
    devices = ground.cards[: drawn.choice((2, 2, 2, 3, 3, 4))]
    shares = tuple(float(drawn.choice((1, 1, 2, 3, 5))) for _ in devices)
    return SplitRequest(devices=devices, way="tokens", shares=shares, verify=drawn.random() < 0.1)


def _draw_request(drawn: random.Random, ground: Ground) -> SplitRequest:
    devices = ground.cards[: drawn.randint(2, len(ground.cards))]
    options: dict[str, Any] = {"balance": drawn.choice(("memory", "time"))}
    if len(devices) <= _NUM_BLOCKS and drawn.random() < 0.5:
        cuts = sorted(drawn.sample(range(1, _NUM_BLOCKS), k=min(len(devices) - 1, _NUM_BLOCKS - 1)))
        if len(cuts) == len(devices) - 1:
            options = {"balance": "manual", "split_at": tuple(cuts)}
    return SplitRequest(
        devices=devices, transport=drawn.choice((None, None, "relay")), overlap=drawn.random() < 0.7,
        verify=drawn.random() < 0.2, **options,
    )  # fmt: skip


def _draw_options(drawn: random.Random, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    latent = list(family.latent)
    if drawn.random() < 0.4 and name not in ("wan_vace", "hunyuan_video", "hidream_o1"):
        latent[-1] += drawn.choice((1, 2, 3))
        latent[-2] += drawn.choice((0, 1, 2))
    options: dict[str, Any] = {
        "cfg": drawn.choice((1.0, 4.0, 4.0)), "batch": 1 if family.sound else drawn.choice((1, 1, 2, 3)), "steps": 2,
        "seed": drawn.randrange(100), "latent": tuple(latent),
    }  # fmt: skip
    if drawn.random() < 0.3:
        options["negative"] = family.condition(2, tokens=family.context[0] + 3)
    return options


def _changed(host: Host, name: str, pair: _Pair, node: Node, salt: int, ground: Ground) -> _Pair:
    unsplit = _on_one(ground, lambda: applied(node, pair.unsplit, Setting(host, name, ground.one, salt)))
    divided = _or_refused(lambda: applied(node, pair.divided, Setting(host, name, ground.cards[0], salt)))
    return _Pair(divided, unsplit, pair.options, (*pair.nodes, node))


def _compare(
    host: Host, name: str, drawn: random.Random, pairs: list[_Pair], history: History, ground: Ground, bound: float
) -> None:
    """Sample the newest pair, perhaps an older one, and disturb memory in between. bound: of the largest value."""
    chosen = [pairs[-1], *([drawn.choice(pairs)] if drawn.random() < 0.5 else [])]
    for pair in chosen:
        with contextlib.ExitStack() as stack:
            # ComfyUI's own faults, unsplit as well. Of weights that leave a card it computes a wrapper's part and a
            # LoRA's in the other order, and leaves out a LoRA on HiDream's choice of experts. HiDream-O1 keeps another
            # LoRA's keys. With little memory it computes conditionings one by one, which what counts would notice.
            if not bound or (weight_wrapper not in pair.nodes and name != "hidream"):
                _disturb(host, drawn, ground, history, stack, not (bound and STATEFUL.intersection(pair.nodes)))
            history.steps.append(f"sample {pairs.index(pair)}: {_in_words(pair.options)}")
            _take_off_the_card(pair.unsplit)
            pair.unsplit.model.diffusion_model._kv_cache_entries = []
            expected = _on_one(ground, lambda: host.sample(pair.unsplit, name, **pair.options))  # noqa: B023
            found = _or_refused(lambda: host.sample(pair.divided, name, **pair.options))  # noqa: B023
        if _far(found, expected) <= bound:
            continue
        if _far(found, _on_one(ground, lambda: _apart(host, name, pair))) > bound:  # noqa: B023
            raise Ended(f"different: by {_far(found, expected):.3g} of {float(expected.abs().max()):.3g}")


def _take_off_the_card(model: Any) -> None:
    """Have the host load the unsplit MODEL anew: one that was loaded with other layers in it keeps their weights."""
    loaded_models = comfy.model_management.current_loaded_models
    for loaded in [each for each in loaded_models if each.model is not None and each.model.model is model.model]:
        loaded.model_unload()
        loaded_models.remove(loaded)


def _in_words(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items() if key != "negative")


def _disturb(
    host: Host, drawn: random.Random, ground: Ground, history: History, stack: contextlib.ExitStack, may_be_tight: bool
) -> None:
    kind = drawn.choice(("nothing", "nothing", "free", "unload", "tight"))
    card = drawn.choice(ground.cards)
    history.steps.append(f"memory: {kind} {card}")
    if kind == "free":
        host.free(card)
    elif kind == "unload":
        host.unload_all()
    elif kind == "tight" and ground.is_emulated and may_be_tight:
        stack.enter_context(host.machine.room_for(drawn.randrange(4_000_000, 9_000_000), card))


def _apart(host: Host, name: str, pair: _Pair) -> torch.Tensor:
    options = dict(pair.options)
    if FAMILIES[name].sound:
        with one_condition_at_a_time(pair.unsplit):
            return host.sample(pair.unsplit, name, **options)
    batch, latent, seed = options.pop("batch"), options["latent"], options["seed"]
    noise = comfy.sample.prepare_noise(torch.zeros(batch, *latent), seed)
    with one_condition_at_a_time(pair.unsplit):
        return torch.cat([host.sample(pair.unsplit, name, noise=one, **options) for one in noise.split(1)])


def _far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest value; NaN is the same as NaN."""
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    a, b = (each.double().nan_to_num() for each in (found, expected))
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))


def _on_one(ground: Ground, act: Any) -> Any:
    """What the unsplit MODEL gives; where it fails there is nothing to compare with."""
    try:
        with mock.patch.object(comfy.model_management, "get_torch_device", lambda: ground.one):
            return act()
    except Exception as error:
        raise Ended(f"skipped, unsplit it fails: {type(error).__name__}: {error}") from error


def _or_refused(act: Any) -> Any:
    try:
        return act()
    except (ValueError, RuntimeError) as error:
        if "two devices" in str(error) or not any(word in str(error) for word in _REFUSALS):
            raise Ended(f"different: {type(error).__name__}: {error}") from error
        raise Ended(f"refused: {error}") from error
