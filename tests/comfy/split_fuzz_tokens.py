"""Random histories of a MODEL that all cards compute by their tokens, beside the unsplit one.

Shares of the cards are drawn. Sums of products are rounded once, from float64, where the seed says so: then their bits
do not depend on the number of rows, and only a fault can make a difference. What is refused ends a history, after the
MODEL from before has computed what one card computes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch
from devicebridge.nodes.host.split.model import split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS, Residuals
from devicebridge.tests.comfy.split_fuzz import (
    Ended,
    Ground,
    History,
    disturb,
    draw_options,
    in_words,
    on_one,
    or_refused,
    play_seed,
    take_off_the_card,
)
from devicebridge.tests.comfy.split_fuzz_nodes import (
    AFTER_ONLY,
    NODES,
    STATEFUL,
    Node,
    Setting,
    adapters,
    apply_wrapper,
    attention,
    clone,
    every_layer,
    forward_wrapper,
    function_wrapper,
    merge,
    object_patch,
    sampler_functions,
    weight_wrapper,
)
from devicebridge.tests.comfy.split_fuzz_writers import WritingControl
from devicebridge.tests.comfy.split_host import Host, one_condition_at_a_time
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES
from devicebridge.tests.emulated import exact_products

GROUND = Ground()
NEAR = 2e-5  # of the largest value, where kernels are chosen by the rows; of 1,000 histories the worst was 1.4e-5
EXACT = 5e-6  # what is no product may still take another kernel
FAMILIES_DRAWN = (
    "chroma",
    "cosmos_predict2",
    "flux1",
    "flux2",
    "hidream",
    "hidream_o1",
    "hunyuan_video",
    "krea2",
    "ltxv",
    "lumina2",
    "minimax_h3",
    "qwen_image",
    "sd3",
    "wan",
    "wan_i2v",
    "wan_vace",
    "z_image",
)
# The others of NODES work inside blocks or in one card's copy, and are refused.
_TAKEN: tuple[Node, ...] = (
    adapters,
    every_layer,
    merge,
    weight_wrapper,
    attention,
    function_wrapper,
    forward_wrapper,
    apply_wrapper,
    sampler_functions,
    clone,
)


@dataclasses.dataclass
class _Pair:
    divided: Any
    unsplit: Any
    nodes: list[Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Play:
    """A history that is being played. bound: relative to the largest value."""

    host: Host
    drawn: random.Random
    history: History
    name: str
    bound: float
    is_verified: bool
    pairs: list[_Pair] = dataclasses.field(default_factory=list)
    worst: float = 0.0

    def setting(self, device: torch.device, salt: int) -> Setting:
        return Setting(self.host, self.name, device, salt)


def run_tokens(host: Host, seed: int) -> History:
    """One history from its seed; nothing stays loaded."""
    return play_seed(host, seed, lambda drawn, history: _play(host, drawn, history))


def _play(host: Host, drawn: random.Random, history: History) -> None:
    name, dtype = drawn.choice(FAMILIES_DRAWN), drawn.choice((torch.float32, torch.float32, torch.bfloat16))
    is_exact = dtype != torch.float32 or drawn.random() < 0.7
    devices = GROUND.cards[: drawn.choice((2, 2, 2, 3, 3, 4))]
    shares = tuple(float(drawn.choice((1, 1, 2, 3, 5))) for _ in devices)
    request = SplitRequest(devices=devices, way="tokens", shares=shares, verify=drawn.random() < 0.1)
    history.steps.append(f"{name}, {dtype}, {shares}, {request}{', exact products' if is_exact else ''}")
    played = _Play(host, drawn, history, name, EXACT if is_exact else NEAR, request.verify)
    before = [(node, drawn.randrange(1000)) for node in _draw(played, request, 2) if node not in AFTER_ONLY]
    history.steps += [f"before: {node.__name__} {salt}" for node, salt in before]
    with exact_products() if is_exact else contextlib.nullcontext():
        unsplit = host.load(name, load_device=GROUND.one, file_dtype=dtype)
        divided = host.load(name, file_dtype=dtype)
        for node, salt in before:
            unsplit = on_one(GROUND, lambda: node(unsplit, played.setting(GROUND.one, salt)))  # noqa: B023
            divided = node(divided, played.setting(GROUND.cards[0], salt))
        nodes = [node for node, _ in before]
        played.pairs.append(_Pair(or_refused(lambda: split_model(divided, request)), unsplit, nodes))
        for _ in range(drawn.randint(1, 2)):
            pair = drawn.choice(played.pairs)
            try:
                played.pairs.append(pair := _changed(played, pair, _draw(played, request, 3)))
                _compare(played, pair)
                if drawn.random() < 0.3:
                    _compare(played, drawn.choice(played.pairs))
            except Ended as ended:
                if str(ended).startswith("refused"):
                    _compare_after(played)
                raise
    if played.worst:
        raise Ended(f"near: {played.worst:.1e}")


def _compare_after(played: _Play) -> None:
    """The next prompt, after a refusal: the MODEL as it was split. What counts calls has counted those of one only."""
    if STATEFUL.intersection(played.pairs[0].nodes):
        return
    try:
        _compare(played, played.pairs[0], is_disturbed=False)
    except Ended as ended:
        if str(ended).startswith("different"):
            raise Ended(f"{ended}, after a refusal") from ended


def _draw(played: _Play, request: SplitRequest, most: int) -> list[Node]:
    """Mostly what runs by tokens."""
    chosen = played.drawn
    some = tuple(NODES) if chosen.random() < 0.12 else _TAKEN
    fitting = [node for node in some if played.name in NODES[node] and not (request.verify and node in STATEFUL)]
    return chosen.sample(fitting, k=chosen.randint(0, min(most, len(fitting))))


def _changed(played: _Play, pair: _Pair, nodes: list[Node]) -> _Pair:
    for node in nodes:
        salt = played.drawn.randrange(1000)
        played.history.steps.append(f"{node.__name__} {salt}")
        unsplit = on_one(GROUND, lambda: node(pair.unsplit, played.setting(GROUND.one, salt)))  # noqa: B023
        divided = or_refused(lambda: node(pair.divided, played.setting(GROUND.cards[0], salt)))  # noqa: B023
        pair = _Pair(divided, unsplit, [*pair.nodes, node])
    return pair


def _options(played: _Play) -> dict[str, Any]:
    """What is sampled: draw_options, and frames, regions and ControlNets."""
    chosen, name, family = played.drawn, played.name, FAMILIES[played.name]
    options = draw_options(chosen, name)
    if name == "minimax_h3":
        options["batch"] = 1
    if name == "hidream_o1":  # patches of 32 pixels
        options["latent"] = (3, 64, chosen.choice((64, 96, 256)))
    if len(family.latent) == 4 and family.latent[1] > 1 and chosen.random() < 0.4:
        latent = list(options["latent"])
        latent[1] = chosen.choice((1, 3, 4))
        options["latent"] = tuple(latent)
    positive: Callable[[], Any] = lambda: family.condition(1)  # noqa: E731
    if name in _RESIDUALS and chosen.random() < 0.3:
        options |= {"latent": family.latent, "batch": 1}  # its residuals fit its own size
        kind = chosen.choice((Residuals, Residuals if played.is_verified else WritingControl))

        def positive() -> Any:
            made = family.condition(1)
            made[0][1] |= {"control": kind(_RESIDUALS[name])}
            return made

        played.history.steps.append(f"with {kind.__name__}")
    elif len(family.latent) == 3 and chosen.random() < 0.2:
        area = chosen.choice(((4, 8, 0, 0), (6, 4, 2, 4)))

        def positive() -> Any:
            made, other = family.condition(1), family.condition(3, tokens=family.context[0] + 2)
            other[0][1] |= {"area": area, "strength": 0.7}
            return [*made, *other]

        played.history.steps.append(f"with the area {area}")
    return {**options, "positive": positive}


def _compare(played: _Play, pair: _Pair, *, is_disturbed: bool = True) -> None:
    host, chosen, history = played.host, played.drawn, played.history
    options = _options(played)
    make_positive = options.pop("positive")
    # ComfyUI's own faults, unsplit as well. Of weights that leave a card it computes a wrapper's part and a LoRA's in
    # the other order, and leaves out a LoRA on HiDream's choice of experts. HiDream-O1 keeps another LoRA's keys.
    is_disturbed = is_disturbed and weight_wrapper not in pair.nodes and played.name != "hidream"
    pair.unsplit.model.diffusion_model._kv_cache_entries = []
    with contextlib.ExitStack() as stack:
        if is_disturbed:
            # With little memory ComfyUI computes conditionings one by one, which what counts calls would notice.
            counts = STATEFUL.intersection(pair.nodes) or isinstance(
                make_positive()[0][1].get("control"), WritingControl
            )
            disturb(host, chosen, GROUND, history, stack, may_be_tight=not counts)
        history.steps.append(f"sample {played.pairs.index(pair)}: {in_words(options)}")
        if object_patch in pair.nodes:
            take_off_the_card(pair.unsplit)

        def sample(model: Any, **more: Any) -> torch.Tensor:
            return host.sample(model, played.name, positive=make_positive(), **options, **more)

        more = {}
        if is_disturbed and chosen.random() < 0.2:
            more["callback"] = _evicted(played, pair.divided)
        expected = on_one(GROUND, lambda: sample(pair.unsplit))
        found = or_refused(lambda: sample(pair.divided, **more))
    far = _far(found, expected)
    if far > played.bound and options["cfg"] > 1:  # texts of unequal length are repeated where they share a batch
        with one_condition_at_a_time(pair.unsplit):
            far = min(far, _far(found, on_one(GROUND, lambda: sample(pair.unsplit))))
    played.worst = max(played.worst, far)
    if not far <= played.bound:
        raise Ended(f"different: by {far:.3g} of the largest value {float(expected.abs().max()):.3g}")


def _evicted(played: _Play, divided: Any) -> Callable[..., None]:
    """Behind each step one card loses some of its weights."""
    card = played.drawn.choice((divided, *divided.companions))
    size = sum(parameter.nbytes for parameter in divided.model.diffusion_model.parameters())
    part = played.drawn.choice((3, 10))
    played.history.steps.append(f"{card.load_device} loses a part of {part} at each step")
    return lambda *args: card.partially_unload(GROUND.one, size // part)


def _far(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, of the largest value; NaN is the same as NaN."""
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    a, b = found.double().nan_to_num(), expected.double().nan_to_num()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
