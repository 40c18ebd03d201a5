"""What each way to split a native MODEL gains over links of 39, 20 and 10 GB/s, against one card in a real ComfyUI.

    python benchmarks/native_links.py --comfyui ~/ComfyUI --case wan --case wan_cfg --steps 3 --rounds 1 --out out.json

Options, sampler and timing are those of native_split.py; `--tiny` runs the same code on emulated cards on the CPU,
where figures mean nothing. Two cards of 80 GB hold what a case needs. A shape's random weights are drawn on the first
card, once for all of its cases that follow each other. One card, tokens and blocks share them there. Nothing is
evicted.

Links: "direct" is the real one, the others are simulated (slow_link.py). `link_gb_per_s` says what a turn had. `links`
says what the pack's own measurement finds while the cards rest.

Rivals: one_gpu; blocks, tensor, tokens; tokens_4_groups and _2_, where keys and values travel in groups of heads; with
_8bit what travels in 8 bits; _launched without CUDA graphs; behind @ the link. Settings that this checkout lacks are
named and left out. The first rival of each way has a turn of two steps that does not count, pictures with tensor, and
all that replay tokens, one of seven. `ways` has for each link
the choice of auto, in how many groups tokens would send, and how much longer that takes than the fastest there.

Cases, and about how many seconds they take on two H100 with --steps 3 --rounds 1 (ComfyUI's start takes 25 more):
  wan         80  Wan 14B, 832 x 480, 33 frames, without CFG: every way over every link
  flux1       35  FLUX.1-dev at 1536 x 1536
  qwen        50  Qwen-Image at 1536 x 1536
  flux1_1024, qwen_1024: both at 1024 x 1024
  flux2       30  FLUX.2-dev at 1024 x 1024, half of its blocks: tensor with partial sums in 8 bits
  wan_cfg     60  Wan with CFG 5: tokens gives each card whole conditionings; in tokens_together both compute each
  wan_memory  12  one step of 81 frames: the peak of each card above its weights, tokens over one card
  wan_shares  20  the second card computes every linear and attention twice: tokens by equal shares and by 2:1
  derived_flux1, derived_wan: a few blocks by tokens whose row is taken out, so that the pack derives and proves one
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from native_split import (  # starts ComfyUI; torch comes after it  # isort: skip
    CARDS,
    FLUX1,
    FLUX2_SMALL,
    OPTIONS,
    QWEN_IMAGE,
    WAN_14B,
    Shape,
    Work,
    _difference,
    compare,
    emulated_host,
    forget,
    load,
    management,
    one_after_the_other,
    sample,
    say,
    setup,
    split,
    synchronize,
    tensor_with,
    write_json,
)

import torch
from devicebridge.families.comfy import registry
from devicebridge.families.token_plan import TokenPlan
from devicebridge.nodes.host.split import deriving as deriving_module
from devicebridge.nodes.host.split import model as split_module
from devicebridge.nodes.host.split import tensor as tensor_module
from devicebridge.nodes.host.split import tokens as tokens_module
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.nodes.host.split.tensor import addresses_on
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.parallel.local import tensor_parallel
from devicebridge.parallel.local.deriving import written
from devicebridge.parallel.local.graph_recorder import graphs_on
from devicebridge.parallel.local.graphs import Graphs
from devicebridge.parallel.local.shards import divide_block
from devicebridge.parallel.local.tokens import HERE
from devicebridge.planning.cards import machine_speed
from slow_link import LINKS, SlowLink, link_name

_REQUESTED = {each.name for each in dataclasses.fields(SplitRequest)}
_RECORDED_BY = 7  # steps, where cards wait for the host
_ONE = "one_gpu"


# ---- models


class Models:
    """A stock MODEL of one shape and its splits, made when they are asked for.

    All weights begin on the first card. So one card's MODEL, that of tokens and what blocks has there are the same
    memory. Tensor's slices are copies, each made on its own card.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape, self.link = shape, SlowLink(CARDS)
        self.speeds = self.link.calibrate()
        self.machine = machine_speed(CARDS)
        self.one = load(shape, on=CARDS[0])
        self.made: dict[str, Any] = {}
        self.graphs: dict[str, Graphs] = {}  # of tokens, by rival: a graph has the waits of its link

    @property
    def is_short(self) -> bool:
        """Whether steps are so short that cards may wait for the host."""
        return self.shape.class_name != "WanModel"

    def reserved_gb(self) -> dict[str, Any]:
        """What each card's graphs take, and of how many; they are let go."""
        found = [sum(map(len, each._graphs.values())) for each in self.graphs.values()]
        taken = _taken_gb()
        for each in self.graphs.values():
            each.release()
        self.graphs.clear()
        return {"graphs": found, "gb": [before - now for before, now in zip(taken, _taken_gb(), strict=True)]}

    def split(self, way: str) -> Any:
        if way not in self.made:
            with contextlib.ExitStack() as stack:
                for module in (tokens_module, tensor_parallel):
                    stack.enter_context(mock.patch.object(module, "copies_between", lambda devices: self.link))
                stack.enter_context(mock.patch.object(tensor_module, "divide_block", _divided_on_cards))
                if OPTIONS.tiny:  # an emulated tensor is none of the formats that it knows
                    stack.enter_context(mock.patch.object(tensor_module, "_check_formats", lambda *args: None))
                made = self.made[way] = split(self.one, way=way)
            _tree(made).bridge.side_streams = self.link
        return self.made[way]

    def drop(self, *ways: str) -> None:
        """Give their memory back."""
        for way in ways:
            self.made.pop(way, None)

    def chosen(self, gb_per_s: float) -> dict[str, Any]:
        """Over such a link: the way that auto takes and what it says, and the groups of heads that tokens takes."""
        said: list[str] = []
        handler = logging.Handler(logging.INFO)
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        machine = replace(self.machine, bytes_per_s=gb_per_s * 1e9) if gb_per_s else self.machine
        log = logging.getLogger(split_module.__name__)
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            with contextlib.ExitStack() as stack:
                for module in (each for each in (split_module, tokens_module) if hasattr(each, "machine_speed")):
                    stack.enter_context(mock.patch.object(module, "machine_speed", lambda devices: machine))
                plan = split_module.plan_split(self.one, SplitRequest(CARDS, way=None))
                tokens = split_module.plan_split(self.one, SplitRequest(CARDS, way="tokens"))
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
        return {
            "auto_takes": _WAYS[type(plan).__name__],
            "auto_says": " | ".join(said),
            "groups_of_tokens": getattr(tokens, "replayed_groups", getattr(tokens, "groups", 1)),
        }


_WAYS = {"BlockPlan": "blocks", "DividedPlan": "tensor", "TokensPlan": "tokens"}


def _divided_on_cards(block: Any, how: Any, shares: Any, rank: int, cut: Any) -> Any:
    """divide_block with every slice in memory of its own on its card: the pack cuts slices of host memory alone."""
    return divide_block(block, how, shares, rank, lambda weight, part: part.copied(weight).to(CARDS[rank]))


def _tree(model: Any) -> Any:
    tree = tree_of(model.model)
    assert tree is not None
    return tree


@dataclass(frozen=True)
class Rival:
    """Args: way: "" for one card. settings: of the split, as the attributes of its executor have them. slowed: ranks
    that compute every linear and attention twice; None is one card. replays: blocks as CUDA graphs, where cards wait
    for the host."""

    way: str = ""
    gb_per_s: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    slowed: frozenset[int | None] = frozenset()
    replays: bool = True

    def owners(self, model: Any) -> list[tuple[Any, str, Any]]:
        """Objects, their attributes, and what these are to be. Raises: AttributeError for a setting that is missing."""
        tree, found = _tree(model), list[tuple[Any, str, Any]]()
        for name, value in self.settings.items():
            if name == "replayed_groups":
                continue  # see set_for
            if name == "overlap":
                if not tree.plan.overlap:
                    raise AttributeError("this checkout gives no card whole conditionings")
                found.append((tree, "plan", replace(tree.plan, overlap=value)))
                continue
            if name != "groups" and name not in _REQUESTED:
                raise AttributeError(f"this checkout lacks the setting {name}")
            on_tensor = self.way == "tensor"
            owners = [tree.bridge] if on_tensor else list(tree.executor._rows.values())
            key = f"_{name}" if on_tensor else name
            for owner in owners:
                if (name, value) == ("groups", 1) and not hasattr(owner, key):
                    continue  # it has no others
                if not hasattr(owner, key):
                    raise AttributeError(f"this checkout lacks the setting {name} of {type(owner).__name__}")
                found.append((owner, key, value))
        return found


def _taken_gb() -> list[float]:
    forget()
    for card in CARDS if CARDS[0].type == "cuda" else ():
        torch.cuda.synchronize(card)
        torch.cuda.empty_cache()
    infos = map(torch.cuda.mem_get_info, CARDS if CARDS[0].type == "cuda" else ())
    return [(total - free) / 1e9 for free, total in infos]


@contextlib.contextmanager
def set_for(models: Models, name: str, model: Any, rival: Rival) -> Iterator[None]:
    """While active the model is as this rival has it. Tensor is replayed as CUDA graphs over the real link alone: a
    graph has the waits, and the exchange, that it was recorded with."""
    link = models.link
    with contextlib.ExitStack() as stack:
        if rival.way == "tokens" and hasattr(_tree(model).executor, "graphs"):
            if rival.replays and name not in models.graphs and (made := graphs_on(CARDS, link, addresses_on)):
                models.graphs[name] = made
            graphs, executor = models.graphs.get(name) if rival.replays else None, _tree(model).executor
            groups = rival.settings.get("replayed_groups", rival.settings["groups"])
            stack.enter_context(mock.patch.object(executor, "graphs", graphs))
            stack.enter_context(mock.patch.object(executor, "_plan", replace(executor._plan, replayed_groups=groups)))
        owners = rival.owners(model) if rival.way else []
        for owner, key, value in owners:
            stack.enter_context(mock.patch.object(owner, key, value))
        stack.enter_context(tensor_with(replays=not rival.gb_per_s and "exchange" not in rival.settings))
        if rival.slowed:
            stack.enter_context(_twice(rival.slowed))
        stack.callback(setattr, link, "gb_per_s", 0.0)
        link.gb_per_s = rival.gb_per_s
        yield


@contextlib.contextmanager
def _twice(ranks: frozenset[int | None]) -> Iterator[None]:
    """While active these ranks compute linears and attention twice: most of a block's time."""

    def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if (None if HERE.rows is None else HERE.rows.rank) in ranks:
                function(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    functional = torch.nn.functional
    with contextlib.ExitStack() as stack:
        for name in ("linear", "scaled_dot_product_attention"):
            stack.enter_context(mock.patch.object(functional, name, doubled(getattr(functional, name))))
        yield


def race(models: Models, rivals: Mapping[str, Rival], **work: Any) -> dict[str, Any]:
    """Turns of one card and all rivals that this checkout can make; the gain of each, and the links they had."""
    taking_part: dict[str, Rival] = {_ONE: Rival()}
    left_out: dict[str, str] = {}
    for name, rival in rivals.items():
        if OPTIONS.rivals and rival.way and name.partition("@")[0] not in OPTIONS.rivals:
            continue
        try:
            if rival.way:
                rival.owners(models.split(rival.way))
            taking_part[name] = rival
        except (AttributeError, ValueError) as error:
            left_out[name] = str(error)
            say(f"    {name} is left out: {error}")
    taking_part |= {f"{_ONE}_again": Rival()}
    seen, replays = dict[str, Any](), dict[str, Any]()
    of_models = {name: models.split(each.way) if each.way else models.one for name, each in taking_part.items()}

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        with set_for(models, name, of_models[name], taking_part[name]):
            yield
            synchronize()
            if graphs := models.graphs.get(name):
                replays[name] = graphs.fault or graphs.num_replays
            if found := models.link.seen_gb_per_s():
                seen[name] = found

    firsts = {rival.way: name for name, rival in reversed(taking_part.items())}
    replayed = [name for name, each in taking_part.items() if each.way == "tokens" and each.replays]
    warm_up = dict.fromkeys(firsts.values(), 2)
    if models.is_short:
        warm_up |= dict.fromkeys([*replayed, *(firsts[way] for way in firsts if way == "tensor")], _RECORDED_BY)
    report = compare(of_models, Work(models.shape, **work), _ONE, around=around, warm_up=warm_up)
    report |= {"links": models.speeds, "link_gb_per_s": seen, "left_out": left_out}
    report |= {"replays": replays, "graphs_reserve": models.reserved_gb()}
    base = report[_ONE]["s_per_step_median"]
    say(f"    one card {base:.4f} s/step, and at the end {report[f'{_ONE}_again']['s_per_step_median']:.4f}")
    for name in taking_part:
        if name != _ONE:
            same = report[f"{name}_equals_{_ONE}"]
            gain = base / report[name]["s_per_step_median"]
            say(f"    {name}: {gain:.3f} times one card; equal: {same}; replays: {replays.get(name)}")
    return report


def over_links(models: Models, rivals: Mapping[str, tuple[Rival, Sequence[float]]], **work: Any) -> dict[str, Any]:
    """A race of rivals, each over several links, and what auto would take over each."""
    each_link = {
        f"{name}@{link_name(gb_per_s)}{'_launched' * (not rival.replays)}": replace(rival, gb_per_s=gb_per_s)
        for name, (each, links) in rivals.items()
        for rival in (each, replace(each, replays=False))[: 1 + (name == "tokens")]
        for gb_per_s in links
    }
    report = race(models, each_link, **work)
    report["ways"] = {}
    for gb_per_s in dict.fromkeys(rival.gb_per_s for rival in each_link.values()):
        chosen = models.chosen(gb_per_s)
        taken, seconds = (chosen["auto_takes"], chosen["groups_of_tokens"]), dict[str, float]()
        at_auto: float | None = None
        for name, rival in each_link.items():
            # Blocks send little: what they take over the real link stands for all.
            at_link = rival.gb_per_s == gb_per_s or rival.way == "blocks"
            if name in report and at_link and "exchange" not in rival.settings:
                seconds[name.partition("@")[0] + "_launched" * (not rival.replays)] = found = report[name][
                    "s_per_step_median"
                ]
                groups = rival.settings.get("replayed_groups", rival.settings.get("groups", taken[1]))
                if (rival.way, groups) == taken and rival.replays:
                    at_auto = found
        over_best = at_auto / min(seconds.values()) if at_auto else None
        report["ways"][link_name(gb_per_s)] = chosen | {"s_per_step": seconds, "auto_over_best": over_best}
        say(f"    {link_name(gb_per_s)}: auto takes {taken}, {over_best} times the fastest of {seconds}")
    if any(report.get(f"{name}_equals_{_ONE}", True) is not True for name in each_link if name.startswith("tokens@")):
        job = Work(models.shape, steps=2, **work)
        first, second = (sample(models.one, replace(job, batch=batch)).latents[:1] for batch in (1, 2))
        report["one_gpu_batch_2_against_batch_1"] = _difference(first, second)
        say(f"    one card, batch 2 against batch 1: {report['one_gpu_batch_2_against_batch_1']}")
    return report


# ---- cases


_TOKENS, _TENSOR, _BLOCKS = Rival("tokens", settings={"groups": 1}), Rival("tensor"), Rival("blocks")
_PAIR, _GROUPS = (Rival("tokens", settings={"groups": groups}) for groups in (2, 4))
_WHERE_REPLAYED = Rival("tokens", settings={"groups": 1, "replayed_groups": 4})  # as plans have it for pictures
_SHORT = Rival("tokens", settings={"groups": 4, "exchange": "8-bit"})
_SHORT_SUMS = Rival("tensor", settings={"exchange": "8-bit"})


def wan(models: Models) -> dict[str, Any]:
    rivals = {"tokens": (_TOKENS, LINKS), "tokens_4_groups": (_GROUPS, LINKS), "tensor": (_TENSOR, LINKS)}
    short = {"tokens_4_groups_8bit": (_SHORT, LINKS[1:]), "blocks": (_BLOCKS, LINKS[:1])}
    return over_links(models, rivals | short)


def picture(models: Models) -> dict[str, Any]:
    slow = LINKS[1:]
    rivals = {"tokens": (_TOKENS, LINKS), "tokens_4_groups": (_WHERE_REPLAYED, slow), "tensor": (_TENSOR, LINKS[:3])}
    more = {"tokens_2_groups": (_PAIR, LINKS[:3])}
    return over_links(
        models, rivals | more | {"tokens_4_groups_8bit": (_SHORT, LINKS[2:]), "blocks": (_BLOCKS, LINKS[:1])}
    )


def flux2(models: Models) -> dict[str, Any]:
    links = LINKS[:3]
    rivals = {"tensor": (_TENSOR, links), "tensor_8bit": (_SHORT_SUMS, links), "tokens": (_TOKENS, links)}
    groups = {"tokens_2_groups": (_PAIR, links[1:]), "tokens_4_groups": (_WHERE_REPLAYED, links[1:])}
    return over_links(models, rivals | groups | {"blocks": (_BLOCKS, links[:1])})


def wan_cfg(models: Models) -> dict[str, Any]:
    links = LINKS[0], LINKS[2]
    together = Rival("tokens", settings={"overlap": False})
    rivals = {"tokens": (_TOKENS, links), "tokens_together": (together, links), "tensor": (_TENSOR, links)}
    report = over_links(models, rivals | {"blocks": (_BLOCKS, links[:1])}, cfg=5.0)
    step = Work(models.shape, cfg=5.0, steps=1)
    apart, tokens = (sample(each, step).latents for each in (one_after_the_other(models.one), models.split("tokens")))
    report["tokens_equals_one_gpu_one_after_the_other"] = found = _difference(apart, tokens)
    say(f"    tokens and one card that takes one conditioning after the other: equal: {found}")
    return report


def wan_memory(models: Models) -> dict[str, Any]:
    """GB at the peak of one step, above the weights, which a short clip has brought to the cards before."""
    models.drop("tensor", "blocks")
    short = Work(replace(models.shape, latent=(16, 3, 60, 104)), steps=1)
    long = Work(replace(models.shape, latent=(16, 21, 60, 104)), steps=1)
    report: dict[str, Any] = {}
    tokens = models.split("tokens")
    rivals = {_ONE: (models.one, Rival()), "tokens": (tokens, _TOKENS), "tokens_4_groups": (tokens, _GROUPS)}
    for name, (model, rival) in rivals.items():
        with set_for(models, name, model, rival):
            sample(model, short)
            turn = sample(model, long)
        above = [peak - before for before, peak in zip(turn.before_gb, turn.peak_gb, strict=False)]
        report[name] = {"peak_above_weights_gb": above, "step_with_its_end_s": turn.until_first_step_s}
        report[f"{name}_latents"] = turn.latents
    own = report.pop(f"{_ONE}_latents")
    peaks = {name: max(report[name]["peak_above_weights_gb"], default=0.0) for name in rivals}
    for name in tuple(rivals)[1:]:
        report[name]["equal"] = _difference(own, report.pop(f"{name}_latents"))
        report[f"{name}_over_{_ONE}"] = peaks[name] / peaks[_ONE] if peaks[_ONE] else None
    say(f"    peak above the weights in GB: {peaks}; tokens {report['tokens_over_one_gpu']} of one card")
    return report


def wan_shares(models: Models) -> dict[str, Any]:
    """The best that shares can give adds both cards' speeds: 1 / (1 / one_gpu + 1 / one_gpu_slowed) seconds."""
    models.drop("tensor", "blocks")
    second = frozenset((1,))
    rivals = {
        "one_gpu_slowed": Rival(slowed=frozenset((None,))),
        "tokens_1_to_1": Rival("tokens", settings={"shares": (1.0, 1.0)}, slowed=second),
        "tokens_2_to_1": Rival("tokens", settings={"shares": (2.0, 1.0)}, slowed=second),
    }
    report = race(models, rivals)
    own, slowed = (report[name]["s_per_step_median"] for name in (_ONE, "one_gpu_slowed"))
    report["best_s_per_step"] = 1 / (1 / own + 1 / slowed)
    say(f"    the slowed card takes {slowed / own:.2f} times as long; both at best {report['best_s_per_step']:.4f} s")
    return report


def derived(models: Models) -> dict[str, Any]:
    """Seconds of deriving and proving; of a step of one card, by the written row and by the derived one; latents."""
    work, report = Work(models.shape), dict[str, Any]()
    turns = {}
    for name, model in ((_ONE, models.one), ("written", models.split("tokens"))):
        sample(model, replace(work, steps=2))
        turns[name] = sample(model, work)
    models.drop("tokens")
    found: list[tuple[float, Any]] = []

    def find_rows(*args: Any) -> Any:
        synchronize()
        start = time.perf_counter()
        row = own(*args)
        synchronize()
        found.append((time.perf_counter() - start, row))
        return row

    own = deriving_module.find_rows
    row = registry.find_native(type(models.one.model.diffusion_model))
    undescribed = mock.patch.dict(registry._BY_CLASS, {row.path: replace(row, tokens=TokenPlan({}))})
    with undescribed, mock.patch.object(deriving_module, "find_rows", find_rows):
        model = models.split("tokens")
        with contextlib.suppress(OSError):
            deriving_module.rows_of(models.one.model.diffusion_model).path.unlink()  # of an earlier run
        report["first_s"] = sample(model, work).until_first_step_s
        turns["derived"] = sample(model, work)
    models.drop("tokens")
    report["rows"] = {"written": written(row.tokens), **{f"derived in {s:.2f} s": written(each) for s, each in found}}
    for name, turn in turns.items():
        report[name] = {"s_per_step": turn.step_s, "equal": _difference(turns[_ONE].latents, turn.latents)}
    say(f"    {report}")
    return report


CASES: dict[str, tuple[Shape, Callable[[Models], dict[str, Any]]]] = {
    "wan": (WAN_14B, wan),
    "flux1": (replace(FLUX1, latent=(16, 192, 192)), picture),
    "flux1_1024": (FLUX1, picture),
    "qwen": (replace(QWEN_IMAGE, latent=(16, 1, 192, 192)), picture),
    "qwen_1024": (QWEN_IMAGE, picture),
    "flux2": (FLUX2_SMALL, flux2),
    "wan_cfg": (WAN_14B, wan_cfg),
    "wan_memory": (WAN_14B, wan_memory),
    "wan_shares": (WAN_14B, wan_shares),
    "derived_flux1": (replace(FLUX1, kwargs={**FLUX1.kwargs, "depth": 4, "depth_single_blocks": 8}), derived),
    "derived_wan": (replace(WAN_14B, kwargs={**WAN_14B.kwargs, "num_layers": 6}), derived),
}


@contextlib.contextmanager
def nothing_evicted() -> Iterator[None]:
    """All fits, and most weights lie on the cards before ComfyUI loads them: it would count them once more, and bring
    some to the host."""

    def get_free_memory(dev: Any = None, torch_free_too: bool = False) -> Any:
        return (2**36, 2**36) if torch_free_too else 2**36

    with (
        mock.patch.object(management, "free_memory", lambda *args, **kwargs: []),
        mock.patch.object(management, "get_free_memory", get_free_memory),
    ):
        yield


def main() -> None:
    logging.getLogger().setLevel(logging.WARNING)
    unknown = set(OPTIONS.case) - set(CASES)
    if unknown:
        raise SystemExit(f"there is no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    report: dict[str, Any] = {"setup": setup(), "cases": {}}
    models: Models | None = None
    with emulated_host() if OPTIONS.tiny else contextlib.nullcontext():
        for name in OPTIONS.case:
            shape, run = CASES[name]
            say(name)
            start = time.perf_counter()
            # Emulated tensors know no inference mode, in which ComfyUI runs its nodes.
            with torch.no_grad() if OPTIONS.tiny else torch.inference_mode():
                try:
                    if models is None or replace(models.shape, latent=shape.latent) != shape:
                        models = None
                        forget()
                        models = Models(shape)
                    models.shape = shape
                    if not models.made:
                        say(f"    weights after {time.perf_counter() - start:.1f} s; links in GB/s {models.speeds}")
                    with nothing_evicted():
                        report["cases"][name] = run(models)
                except Exception as error:  # one case that fails must not cost the others
                    traceback.print_exc()
                    report["cases"][name] = {"failed": f"{type(error).__name__}: {error}"}
            report["cases"][name]["case_took_s"] = time.perf_counter() - start
            say(f"    the case took {report['cases'][name]['case_took_s']:.1f} s")
            write_json(report, OPTIONS.out)


if __name__ == "__main__":
    main()
