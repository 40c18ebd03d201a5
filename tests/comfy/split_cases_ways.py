"""Way auto of a split: which one is taken for what reason, in the real host; speeds of cards and links are made up."""

import dataclasses
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import comfy.model_management as management
import comfy.ops
import torch
from comfy.ldm.flux import math as flux_math
from comfy.ldm.flux.model import Flux
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.modules import attention
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.ldm.wan.model import WanModel
from devicebridge.families.comfy import registry
from devicebridge.families.token_plan import TokenPlan
from devicebridge.nodes.host.split import bench
from devicebridge.nodes.host.split import model as split_module
from devicebridge.nodes.host.split import tokens as tokens_module
from devicebridge.nodes.host.split.plan import layout_of
from devicebridge.nodes.host.split.tensor import DividedPlan
from devicebridge.nodes.host.split.tokens import TokensPlan
from devicebridge.nodes.host.split.tree import tree_of
from devicebridge.parallel.block_lists import execution_order
from devicebridge.planning import times
from devicebridge.planning.cards import MachineSpeed
from devicebridge.tests.comfy.split_cases import CPU, Case, case, split
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host

FAST_LINK, SLOW_LINK = 1e6, 1e3  # bytes per second, beside cards as slow as _machine's callers say


@contextmanager
def _machine(flops_per_s: float, bytes_per_s: float) -> Iterator[None]:
    speed = MachineSpeed((flops_per_s, flops_per_s), bytes_per_s, "2026-11-23")
    with (
        mock.patch.object(split_module, "machine_speed", lambda devices: speed),
        mock.patch.object(split_module, "module_with_streams", lambda *pair: torch),
    ):
        yield


def _way_of(model: Any) -> str:
    ways = {DividedPlan: "tensor", TokensPlan: "tokens"}
    return ways.get(type(tree_of(model.model).plan), "blocks")


def _limits(model: Any) -> tuple[float, float]:
    return (0.7 * management.module_size(model.model.diffusion_model) / 1e9,) * 2


def _auto(case: Case, model: Any, link: float = FAST_LINK, **options: Any) -> tuple[Any, str, str]:
    """A split by way auto over this link, the way that it takes, and the line that says why; nothing stays loaded."""
    with _machine(1e9, link), case.logged("", logging.INFO) as messages:
        found = split(model, way=None, **options)
    case.host.unload_all()
    said = [line for line in messages if line.startswith("split: way auto takes")]
    case.check("one line says it", len(said) == 1, messages)
    return found, _way_of(found), said[0]


@case
def way_auto_goes_by_link_and_memory(case: Case, host: Host) -> None:
    """Tokens on a fast link; tensor where a card lacks the room for all weights; blocks on a slow link."""
    name = "flux2_heads"
    reference = host.reference(name)
    for what, link, is_limited, expected in (
        ("a fast link", FAST_LINK, False, "tokens"),
        ("a fast link and little memory", FAST_LINK, True, "tensor"),
        ("a slow link", SLOW_LINK, False, "blocks"),
    ):
        loaded = host.load(name)
        model, way, said = _auto(case, loaded, link, memory_limit_gb=_limits(loaded) if is_limited else ())
        case.check(what, way == expected and "at 4096 tokens blocks about" in said and "tensor" in said, said)
        case.check(f"{what}: why not", ("may hold" in said, "offload on" in said) == (is_limited, False), said)
        output = host.sample(model, name)
        case.check(f"{what}: it samples", float((output - reference).norm() / reference.norm()) < 1e-4)
        host.unload_all()


@case
def way_auto_knows_the_exchange(case: Case) -> None:
    """Over a link that alone counts, tokens and tensor take half as long in 8 bits."""
    seconds = {}
    for exchange in ("full", "8-bit"):
        _, _, said = _auto(case, case.host.load("flux2_heads"), 1e-9, exchange=exchange)
        seconds[exchange] = {way: float(re.search(rf"{way} (?:about )?([0-9.e+]+) s", said)[1]) for way in _FORECAST}
    ratios = {way: seconds["full"][way] / seconds["8-bit"][way] for way in _FORECAST}
    case.check("half", all(abs(ratios[way] - 2) < 0.05 for way in ("tokens", "tensor")), (ratios, seconds))
    case.check("blocks as ever", ratios["blocks"] == 1, ratios)


_FORECAST = ("blocks", "tensor", "tokens")


@case
def way_auto_leaves_tokens_to_models_that_others_left_alone(case: Case, host: Host) -> None:
    """Patches and object patches, which tokens would refuse at the first step; a class without a plan of tokens."""
    name = "flux2_heads"

    def patched(model: Any) -> None:
        model.set_model_patch(lambda args: args, "double_block")

    def replaced(model: Any) -> None:
        model.set_model_patch_replace(lambda args, more: more["original_block"](args), "dit", "double_block", 0)

    def object_patched(model: Any) -> None:
        model.add_object_patch("diffusion_model.double_blocks.0.marked", torch.nn.Identity())

    def attended(model: Any) -> None:
        options = model.model_options["transformer_options"]
        options["optimized_attention_override"] = lambda func, *args, **kw: func(*args, **kw)

    for change, word in (
        (patched, "the patch 'double_block'"), (replaced, "the replacement 'dit'"),
        (object_patched, "the object patch of diffusion_model.double_blocks.0.marked"), (attended, "the attention of"),
    ):  # fmt: skip
        model = host.load(name)
        change(model)
        _, way, said = _auto(case, model)
        case.check(change.__name__, way != "tokens" and word in said, said)
    row = registry._BY_CLASS["comfy.ldm.flux.model.Flux"]
    with mock.patch.dict(registry._BY_CLASS, {row.path: dataclasses.replace(row, tokens=TokenPlan({}))}):
        _, way, said = _auto(case, host.load(name))
    case.check("no plan", way == "tensor" and "not tokens: Flux cannot be shared out" in said, said)


@case
def way_auto_has_one_card_compute_what_tokens_refuse(case: Case, host: Host) -> None:
    """Nodes behind the split, that blocks would take: the picture is that of one card, and the log says why once."""
    name = "flux2_heads"

    def patched(model: Any) -> None:
        model.set_model_patch(lambda args: {**args, "img": args["img"] * 1.1}, "double_block")

    def hooked(model: Any) -> None:
        halve = lambda module, args, output: output * 0.5  # noqa: E731
        model.model.diffusion_model.final_layer.register_forward_hook(halve)

    def replaced(model: Any) -> None:
        root = model.model.diffusion_model
        own = root._forward
        root._forward = lambda *args, **kwargs: own(*args, **kwargs) * 0.5

    for change, word in (
        (patched, "the patch 'double_block'"),
        (hooked, "final_layer"),
        (replaced, "the replaced _forward"),
    ):
        for way, expected in ((None, 1), ("tokens", 0)):
            whole = host.load(name, load_device=CPU)
            change(whole)
            reference = host.sample(whole, name)
            host.unload_all()
            with _machine(1e9, FAST_LINK):
                model = split(host.load(name), way=way)
            case.check(f"{change.__name__}: tokens", _way_of(model) == "tokens")
            change(model)
            if not expected:
                case.refused(f"{change.__name__} by name", partial(host.sample, model, name), RuntimeError, "'blocks'")
            else:
                with case.logged("", logging.INFO) as messages:
                    case.equal(f"{change.__name__}: one card's", host.sample(model, name), reference)
                said = [line for line in messages if "the first card computes alone" in line]
                case.check(f"{change.__name__}: said once", len(said) == 1 and word in said[0], said or messages)
            host.unload_all()


@case
def way_auto_has_one_card_compute_what_is_refused_inside_a_forward(case: Case, host: Host) -> None:
    """Attention that another pack puts into ComfyUI behind the split, for one picture and for two conditionings."""
    name = "flux2_heads"

    def stronger(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return attention.attention_pytorch(q, k * 1.5, *args, **kwargs)

    with _machine(1e9, FAST_LINK):
        model = split(host.load(name), way=None)
    case.check("tokens", _way_of(model) == "tokens")
    plain = host.sample(model, name)
    for cfg in (1.0, 4.0):
        with mock.patch.object(flux_math, "optimized_attention", attention.wrap_attn(stronger)):
            with case.logged("", logging.INFO) as messages:
                found = host.sample(model, name, cfg=cfg)
            host.unload_all()
            expected = host.sample(host.load(name), name, cfg=cfg)
            host.unload_all()
        apart = float((found - expected).abs().max() / expected.abs().max())
        case.check(f"cfg {cfg}", apart < (1e-5 if cfg > 1 else 1e-9), apart)
        if cfg == 1.0:
            case.check("said", any("computes alone" in line and __name__ in line for line in messages), messages)
    case.equal("the next prompt", host.sample(model, name), plain)


@case
def way_auto_leaves_tokens_to_cards_and_modules_that_are_alike(case: Case, host: Host) -> None:
    """A first card that is slow would compute alone what is refused; a module of other code may read across tokens."""
    name = "flux2_heads"

    class Pooled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x - x.mean(1, keepdim=True))

    def of_other_code(model: Any) -> None:
        block = model.model.diffusion_model.double_blocks[0]
        block.img_mlp = Pooled(block.img_mlp)

    for what, change, shares, word in (
        ("a module", of_other_code, (1.0, 1.0), "Pooled"),
        ("a slow card", lambda model: None, (1.0, 3.0), "slower than the others"),
    ):
        model = host.load(name)
        change(model)
        plan = tokens_module.plan_tokens
        given = lambda root, request, plan=plan, to=shares: dataclasses.replace(plan(root, request), shares=to)  # noqa: E731
        with mock.patch.object(split_module, "plan_tokens", given):
            _, way, said = _auto(case, model)
        case.check(what, way != "tokens" and word in said, said)


@case
def keys_travel_as_was_measured(case: Case) -> None:
    """Bytes each way per step between two cards, of published models at full size on meta, with their own texts."""
    flux: dict[str, Any] = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096}
    flux |= {"hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19, "depth_single_blocks": 38}
    flux |= {"axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True}
    flux |= {"txt_ids_dims": []}
    flux2 = {**bench.SUBJECTS[0].kwargs, "depth": 8, "depth_single_blocks": 48}
    z_image: dict[str, Any] = {"in_channels": 16, "dim": 3840, "n_layers": 30, "n_heads": 30, "n_kv_heads": 30}
    z_image |= {
        "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512], "cap_feat_dim": 2560, "z_image_modulation": True,
    }  # fmt: skip
    wan = {**bench.SUBJECTS[2].kwargs, "num_layers": 40}
    for name, kind, given, tokens, num_text, expected in (
        ("FLUX.1", Flux, flux, 4096, 512, 1.61e9), ("FLUX.2", Flux, flux2, 4096, 512, 3.17e9),
        ("Qwen-Image", QwenImageTransformer2DModel, {"num_layers": 60}, 4096, 128, 1.56e9),
        ("Z-Image", NextDiT, z_image, 4096, 512, 1.10e9), ("Wan 14B", WanModel, wan, 14040, 512, 5.75e9),
    ):  # fmt: skip
        model = kind(**given, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)
        layout = layout_of(model)
        blocks = dict.fromkeys(execution_order(model, layout))
        with mock.patch.object(times, "NUM_TEXT_TOKENS", num_text):
            work = times.forward_work(model, layout, blocks, tokens, layout.tokens)
        case.check(name, abs(work.key_bytes / 2 / expected - 1) < 0.04, work.key_bytes / 2)


@case
def way_auto_asks_for_a_gain_with_cfg_too(case: Case, host: Host) -> None:
    """Of a model that is not told its guidance. With CFG blocks overlap; a link between the two gains only without."""
    for name, uses in (("flux2_heads", 1), ("wan_heads", 2)):
        model = host.load(name)
        told = getattr(getattr(model.model.diffusion_model, "params", None), "guidance_embed", False)
        case.check(f"{name}: is told its guidance", told == (uses == 1), told)
        _, _, said = _auto(case, model)
        case.check(f"{name}: forecasts", said.count("blocks about") == uses, said)
    case.check("a clip's tokens", "at 14040 tokens" in said, said)


@case
def way_auto_takes_blocks_where_others_would_be_refused(case: Case, host: Host) -> None:
    name = "flux2_heads"

    def unmeasurable(devices: Any) -> None:
        raise RuntimeError("no room on cuda:1\nand more")

    asked: list[tuple[str, dict[str, Any], str]] = [
        ("offload off", {"offload": False}, "offload off is"), ("transport", {"transport": "relay"}, "transport is"),
        ("balance", {"balance": "time"}, "balance is"), ("limits", {"memory_limit_gb": (1e-6, 1e-6)}, "may hold"),
    ]  # fmt: skip
    with _machine(1e9, FAST_LINK):
        with case.logged("", logging.INFO) as messages:
            found = split(host.load(name), way=None, verify=True)
            host.sample(found, name)
        said = [line for line in messages if "split: verified" in line]
        case.check("what auto takes is verified", _way_of(found) != "blocks" and len(said) == 1, messages)
        host.unload_all()
        for what, options, words in asked:
            _takes_blocks(case, what, host.load(name), words, **options)
        limits = _limits(host.load("wan"))
        _takes_blocks(case, "one head and little memory", host.load("wan"), "1 heads", memory_limit_gb=limits)
        with mock.patch.object(split_module, "machine_speed", unmeasurable):
            _takes_blocks(case, "not measured", host.load(name), "no room on cuda:1")
    _takes_blocks(case, "cards without streams", host.load(name), "cannot copy beside")


def _takes_blocks(case: Case, what: str, model: Any, words: str, **options: Any) -> None:
    with case.logged("", logging.INFO) as messages:
        found = split(model, way=None, **options)
    said = [line for line in messages if line.startswith("split: way auto")]
    case.check(what, _way_of(found) == "blocks" and len(said) == 1 and words in said[0], said)
    case.host.unload_all()


@case
def doctor_measures_blocks_with_random_weights(case: Case) -> None:
    """Small ones, on one card and over two by each way; a way that fails has its reason, and the others go on."""
    unknown, small = (each._replace(latent=(16, 1, 4, 4), text=(8, each.text[1])) for each in bench.SUBJECTS[1:])
    unknown = unknown._replace(class_name="NoSuchClass")
    small = small._replace(kwargs={**small.kwargs, "dim": 512, "ffn_dim": 512, "num_heads": 4})
    times = iter((10.0, 11.0, 13.0, 19.0))  # one for each step's call of the model, and none behind the last
    no_tensor = mock.patch.object(split_module, "plan_tensor", side_effect=ValueError("not on these cards"))
    with mock.patch.multiple(bench, _BUDGET_S=math.inf, _STEPS=4):  # however slow these cards are
        with no_tensor:
            missing, found = bench.measure_blocks((HOME, OTHER), (unknown, small))
        (alone,) = bench.measure_blocks((HOME,), (small,))
        with mock.patch.object(bench, "time", SimpleNamespace(perf_counter=lambda: next(times))):
            seconds = bench._sample(bench._load(small, HOME), small, (HOME,))[1]
    case.check("seconds", set(found["seconds"]) == {"one card", "tokens"}, found)
    case.check("the same result", 0 <= found["difference"]["tokens"] < 0.05, found)
    case.check("why not", found["why"] == {"tensor": "not on these cards"}, found)
    case.check("a class that is not there", list(missing["why"]) == ["all"] and not missing["seconds"], missing)
    case.check("between two calls of the model", seconds == 2.0, seconds)
    case.check("one card", set(alone["seconds"]) == {"one card"} and not alone["why"], alone)
