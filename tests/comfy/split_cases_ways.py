"""Way auto of a split: which one is taken for what reason, in the real host; speeds of cards and links are made up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from devicebridge.nodes.host.split import model as split_module
from devicebridge.nodes.host.split.tensor import DividedPlan
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.planning.cards import MachineSpeed
from devicebridge.tests.comfy.split_cases import CPU, Case, case, split

FAST_LINK, SLOW_LINK = 1e12, 1e3  # bytes per second


@contextmanager
def _machine(flops_per_s: float, bytes_per_s: float) -> Iterator[None]:
    """Cards with streams that were measured so."""
    speed = MachineSpeed((flops_per_s, flops_per_s), bytes_per_s, "2026-11-23")
    with (
        mock.patch.object(split_module, "machine_speed", lambda devices: speed),
        mock.patch.object(split_module, "module_with_streams", lambda *pair: torch),
    ):
        yield


def _is_divided(model: Any) -> bool:
    return isinstance(tree_of(model.model).plan, DividedPlan)


@case
def way_auto_goes_by_the_link(case: Case) -> None:
    """Tensor on a fast link with long blocks, blocks on a slow one."""
    host, name = case.host, "flux2_heads"
    reference = host.sample(host.load(name, load_device=CPU), name)
    for what, speeds, expected in (
        ("a fast link", (1e9, FAST_LINK), "tensor"),
        ("a slow link", (1e9, SLOW_LINK), "blocks"),
    ):
        with _machine(*speeds), case.logged("", logging.INFO) as messages:
            model = split(host.load(name), way=None)
        case.check(what, _is_divided(model) == (expected == "tensor"))
        said = [line for line in messages if f"way auto takes {expected}: at 4096 tokens blocks about" in line]
        case.check(f"{what}: one line says it", len(said) == 1 and "tensor" in said[0], messages)
        output = host.sample(model, name)
        case.check(f"{what}: it samples", float((output - reference).norm() / reference.norm()) < 1e-4)
        host.unload_all()


@case
def way_auto_asks_for_a_gain_with_cfg_too(case: Case) -> None:
    """Of a model that is not told its guidance. With CFG blocks overlap; a link between the two gains only without."""
    host = case.host
    for name, uses in (("flux2_heads", 1), ("wan_heads", 2)):
        model = host.load(name)
        told = getattr(getattr(model.model.diffusion_model, "params", None), "guidance_embed", False)
        case.check(f"{name}: is told its guidance", told == (uses == 1), told)
        with _machine(1e9, FAST_LINK), case.logged("", logging.INFO) as messages:
            split(model, way=None)
        said = [line for line in messages if "way auto" in line]
        case.check(f"{name}: forecasts", said[0].count("blocks about") == uses, said)
        host.unload_all()
    with _machine(1e9, FAST_LINK), case.logged("", logging.INFO) as messages:
        split(host.load("wan_heads"), way=None)
    case.check("a clip's tokens", any("at 14040 tokens" in line for line in messages), messages)


@case
def way_auto_takes_blocks_where_tensor_would_be_refused(case: Case) -> None:
    host, name = case.host, "flux2_heads"

    def unmeasurable(devices: Any) -> None:
        raise RuntimeError("no room on cuda:1\nand more")

    asked: list[tuple[str, dict[str, Any], str]] = [
        ("verify", {"verify": True}, "verify is a setting"),
        ("offload off", {"offload": False}, "offload off is"),
        ("transport", {"transport": "relay"}, "transport is"),
        ("balance", {"balance": "time"}, "balance is"),
        ("limits", {"memory_limit_gb": (1e-6, 1e-6)}, "no room for all weights"),
    ]
    with _machine(1e9, FAST_LINK):
        for what, options, words in asked:
            _takes_blocks(case, what, host.load(name), words, **options)
        _takes_blocks(case, "one head", host.load("wan"), "1 heads")
        with mock.patch.object(split_module, "machine_speed", unmeasurable):
            _takes_blocks(case, "not measured", host.load(name), "no room on cuda:1")
    _takes_blocks(case, "cards without streams", host.load(name), "cannot copy beside")


def _takes_blocks(case: Case, what: str, model: Any, words: str, **options: Any) -> None:
    with case.logged("", logging.INFO) as messages:
        found = split(model, way=None, **options)
    said = [line for line in messages if line.startswith("split: way auto")]
    case.check(what, not _is_divided(found) and len(said) == 1 and words in said[0], said)
    case.host.unload_all()


@case
def with_cfg_a_copy_per_card_is_named_where_it_is_faster(case: Case) -> None:
    """Both ways say so. Not at cfg 1, which leaves the negative out."""
    host, name = case.host, "wan_heads"
    for way in ("tensor", "blocks"):
        with _machine(1e9, FAST_LINK):
            model = split(host.load(name), way=way)
        for cfg, expected in ((1.0, 0), (4.0, 1), (4.0, 0)):
            with case.logged("", logging.INFO) as messages:
                host.sample(model, name, cfg=cfg)
            said = [line for line in messages if "MultiGPU CFG Split" in line]
            case.check(f"{way}, cfg {cfg}: {expected}", len(said) == expected, said)
        host.unload_all()
    model = split(host.load(name), way="tensor", memory_limit_gb=(20.0, 20.0))
    with case.logged("", logging.INFO) as messages:
        host.sample(model, name, cfg=4.0)
    case.check("a limit was asked for", not [line for line in messages if "MultiGPU CFG Split" in line], messages)
