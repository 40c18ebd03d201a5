"""Random histories of code that writes in place, on a MODEL split by blocks or by tensor and on an unsplit one.

Writers sit at every kind of hook. They begin at the first step or, as nodes with a start_percent do, at a later one.
They come before or after the cards have compared their blocks, and before or after blocks are replayed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import comfy.patcher_extension
import torch
from devicebridge.nodes.host.split.model import split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.patches.hooks import tensors_of
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS, Residuals
from devicebridge.tests.comfy.split_cases_replayed import replayed
from devicebridge.tests.comfy.split_fuzz import (
    GUARDS,
    Ended,
    Ground,
    History,
    draw_options,
    draw_request,
    in_words,
    is_same,
    on_one,
    or_refused,
    play_seed,
)
from devicebridge.tests.comfy.split_fuzz_nodes import Setting, every_layer
from devicebridge.tests.comfy.split_host import Host
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

Options = Mapping[str, Any]
# A writer: MODEL, where it works, whether it writes now (by transformer_options), its own random numbers.
Writer = Callable[[Any, Setting, Callable[[Options], bool], random.Random], None]

GROUND = Ground()
_NEAR = 1e-3  # sums are rounded elsewhere, which guidance and a LoRA make more of
_STREAMS = ("flux1_heads", "flux2_heads", "chroma_heads", "hunyuan_video_heads")
_WANS = ("wan_heads", "wan_i2v_heads")
_REPLACED = (*_STREAMS, *_WANS, "qwen_image", "sd3", "ltxv")
FAMILIES_DRAWN = (*_REPLACED, "z_image", "lumina2", "krea2_heads", "cosmos_predict2")


def write(value: Any, factor: float) -> None:
    """Into every tensor in a value."""
    for tensor in tensors_of(value):
        if tensor.is_floating_point():
            tensor.mul_(factor)


def writing_replacement(
    kind: str, entry: str, writes: Callable[[Options], bool], factor: float = 0.7
) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    """A block's stand-in. kind: "before" it calls the block, "after", "twice" with a write between, "thrown away"."""

    def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        call = extra["original_block"]
        if not writes(args["transformer_options"]):
            return call(args)
        if kind == "before":
            write(args.get(entry), factor)
            return call(args)
        if kind == "after":
            out = call(args)
            write(args.get(entry), factor)
            return out
        first = call({**args, "img": args["img"].clone()})
        write(args.get(entry), factor)
        if kind == "thrown away":
            return call(args)
        second = call({**args, "img": args["img"].clone()})
        return {**second, "img": 0.5 * (first["img"] + second["img"])}

    return replaced


def replacement(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    entries = ("vec", "pe", "txt", "img", "attn_mask", "attention_mask")
    lists = ("double_block", "single_block") if setting.name in _STREAMS else ("double_block",)
    kind = chosen.choice(("before", "before", "after", "twice", "thrown away"))
    replaced = writing_replacement(kind, chosen.choice(entries), writes, chosen.choice((0.5, 0.8, 1.2)))
    for _ in range(chosen.randint(1, 2)):
        model.set_model_patch_replace(replaced, "dit", chosen.choice(lists), chosen.randrange(3))


def keeping_replacement(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    """It writes at a later block into what it was given at an earlier one. Not into what blocks write themselves: an
    emulated card returns another tensor than the one written to, where a real one returns the same memory."""
    kept: list[Any] = []
    entry = chosen.choice(("vec", "pe"))

    def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        if kept and writes(args["transformer_options"]):
            write(kept.pop(), 0.8)
        else:
            kept.append(args.get(entry))
        return extra["original_block"](args)

    for index in (0, 1):
        model.set_model_patch_replace(replaced, "dit", "double_block", index)


def joint_attention(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    """A patch of q, k and v, which writes and returns little or nothing."""
    entry, factor = chosen.choice(("q", "k", "v", "pe", "pe", "attn_mask")), chosen.choice((0.6, 1.3))
    returns = chosen.random() < 0.3

    def patch(q: Any, k: Any, v: Any, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
        given = {"q": q, "k": k, "v": v, "pe": pe, "attn_mask": attn_mask}
        if not writes(extra_options):
            return {}
        write(given[entry], factor)
        return {"v": v * 1.1} if returns else {}

    model.set_model_attn1_patch(patch)
    if setting.name == "cosmos_predict2" and chosen.random() < 0.5:
        model.set_model_attn2_patch(patch)


def attention_output(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    def patch(output: torch.Tensor, options: Options) -> torch.Tensor:
        return output.mul_(0.7) if writes(options) else output

    model.set_model_attn1_output_patch(patch)


def patches_of_dicts(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    """Wan's attention and Cosmos' MLP hand their patches one dict."""
    names = ("mlp_patch",) if setting.name == "cosmos_predict2" else ("attn1_patch", "attn2_patch")
    name, entry = chosen.choice(names), chosen.choice(("x", "x", "q", "k"))

    def patch(given: dict[str, Any]) -> Any:
        if writes(given["transformer_options"]):
            write(given.get(entry), 0.7)
        return given if name == "mlp_patch" else given["x"]

    model.set_model_patch(patch, name)


def attention_override(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    kind = chosen.choice(("output", "output", "output", "mask", "mask", "mask", "q", "v"))
    bias = 0.1 * setting.noise(1)
    is_at_home = chosen.random() < 0.4

    def override(attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        options = kwargs.get("transformer_options") or {}
        is_writing = "sigmas" in options and writes(options)
        if is_writing and kind in ("q", "v"):
            write(args["qkv".index(kind)], 0.8)
        if is_writing and kind == "mask":
            write(kwargs.get("mask", args[4] if len(args) > 4 else None), 0.8)
        output: torch.Tensor = attention(*args, **kwargs)
        if is_writing and kind == "output":
            output.mul_(0.8)
        return output

    def with_tensor(attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return override(attention, *args, **kwargs) + bias.to(args[0].dtype)

    found = with_tensor if is_at_home else override
    model.model_options["transformer_options"]["optimized_attention_override"] = found


def between_blocks(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    entry, factor = chosen.choice(("img", "txt", "vec", "pe")), chosen.choice((0.7, 1.2))

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        if writes(args["transformer_options"]):
            write(args.get(entry), factor)
        return args

    model.set_model_double_block_patch(patch)


def before_blocks(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    entry = chosen.choice(("img", "txt"))

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        if writes(args["transformer_options"]):
            write(args[entry], 0.8)
        return args

    model.set_model_post_input_patch(patch)


def around_the_forward(model: Any, setting: Setting, writes: Any, chosen: random.Random) -> None:
    """A wrapper that computes twice and writes into an argument between, or writes into the output."""
    kind = chosen.choice(("context", "x", "output"))

    def wrapper(executor: Any, x: Any, timestep: Any, context: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        options = next((each for each in (*args, *kwargs.values()) if isinstance(each, dict) and "sigmas" in each), {})
        if not options or not writes(options):
            return executor(x, timestep, context, *args, **kwargs)
        first = executor(x, timestep, context, *args, **kwargs)
        if kind == "output":
            return first.mul_(0.9)
        write({"context": context, "x": x}[kind], 0.8)
        return 0.5 * (first + executor(x, timestep, context, *args, **kwargs))

    model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "fuzz", wrapper)


class WritingControl(Residuals):
    """A ControlNet that weakens in place what it handed out before, and what it is given."""

    kept: torch.Tensor | None = None

    def get_control(self, x_noisy: torch.Tensor, t: Any, cond: Any, *args: Any) -> Any:
        found = super().get_control(x_noisy, t, cond, *args)
        for tensor in [each for values in found.values() for each in values if each is not None][:1]:
            if self.kept is not None and self.kept.shape == tensor.shape:
                tensor += 0.5 * self.kept.mul_(0.5)
            self.kept = tensor
        write(cond.get("c_crossattn"), 0.95)
        return found


WRITERS: Mapping[Writer, tuple[str, ...]] = {
    replacement: _REPLACED,
    keeping_replacement: (*_STREAMS, *_WANS, "qwen_image"),
    joint_attention: (*_STREAMS, "qwen_image", "krea2_heads", "cosmos_predict2"),
    attention_output: (*_STREAMS, "krea2_heads"),
    patches_of_dicts: (*_WANS, "cosmos_predict2"),
    attention_override: FAMILIES_DRAWN,
    between_blocks: (*_WANS, "qwen_image", "z_image", "lumina2"),
    before_blocks: ("flux1_heads", "flux2_heads", "qwen_image", "krea2_heads"),
    around_the_forward: ("flux1_heads", "flux2_heads", *_WANS, "qwen_image", "z_image", "sd3"),
}
_ONLY_AT_HOME = (keeping_replacement,)  # where it works on another card it has a copy: a limit that the guide tells


def run_writers(host: Host, seed: int, without: str = "") -> History:
    """One history from its seed, with one of GUARDS taken out; nothing stays loaded."""

    def play(drawn: random.Random, history: History) -> None:
        with GUARDS[without]() if without else contextlib.nullcontext():
            _play(host, drawn, history)

    return play_seed(host, seed, play)


def _play(host: Host, drawn: random.Random, history: History) -> None:
    name, is_tensor = drawn.choice(FAMILIES_DRAWN), drawn.random() < 0.6
    request = _draw_request(drawn, name, is_tensor)
    is_replayed = is_tensor and drawn.random() < 0.5
    history.steps.append(f"{name}, {request}{', replayed' if is_replayed else ''}")
    with replayed() if is_replayed else contextlib.nullcontext():
        plain, divided = host.load(name, load_device=GROUND.one), host.load(name)
        divided = or_refused(lambda: split_model(divided, request))
        models = [(plain, divided)]
        if drawn.random() < 0.6:  # compared, and perhaps recorded, before any code of others comes
            _compare(host, name, drawn, models[0], history, is_tensor)
        for _ in range(drawn.randint(1, 2)):
            pair = _changed(host, name, drawn, drawn.choice(models), history, is_tensor)
            models.append(pair)
            _compare(host, name, drawn, pair, history, is_tensor)
        if drawn.random() < 0.3:
            _compare(host, name, drawn, drawn.choice(models), history, is_tensor)


def _draw_request(drawn: random.Random, name: str, is_tensor: bool) -> SplitRequest:
    if not is_tensor:
        return dataclasses.replace(
            draw_request(drawn, GROUND), verify=False
        )  # what it writes, verify has it write twice
    most = drawn.choice((2, 2, 2, 3))
    return SplitRequest(
        devices=GROUND.cards[: most if name.endswith("_heads") else 2],  # the others have two heads
        way="tensor",
        overlap=drawn.random() < 0.7,
    )


def _changed(
    host: Host, name: str, drawn: random.Random, pair: tuple[Any, Any], history: History, is_tensor: bool
) -> tuple[Any, Any]:
    """Both MODELs with the same writers, and perhaps a LoRA."""
    fitting = [each for each, names in WRITERS.items() if name in names and (is_tensor or each not in _ONLY_AT_HOME)]
    chosen = drawn.sample(fitting, k=min(len(fitting), drawn.choice((1, 1, 2, 3))))
    begins = [(each, drawn.randrange(1000), drawn.choice((0.0, 0.0, 0.4, 0.7))) for each in chosen]
    has_lora = drawn.random() < 0.2
    history.steps += [f"{each.__name__} {salt} from {start}" for each, salt, start in begins]
    history.steps += ["a LoRA"] * has_lora
    found = []
    for model, device in zip(pair, (GROUND.one, GROUND.cards[0]), strict=True):
        changed = model.clone()
        for each, salt, start in begins:
            sigma = float(model.get_model_object("model_sampling").percent_to_sigma(start))
            setting = Setting(host, name, device, salt)
            each(changed, setting, lambda options, sigma=sigma: float(options["sigmas"].max()) <= sigma, setting.random)
        found.append(every_layer(changed, Setting(host, name, device, 3)) if has_lora else changed)
    return found[0], found[1]


def _compare(
    host: Host, name: str, drawn: random.Random, pair: tuple[Any, Any], history: History, is_tensor: bool
) -> None:
    options = draw_options(drawn, name.removesuffix("_heads")) | {"steps": drawn.choice((3, 4))}
    has_control = name.removesuffix("_heads") in _RESIDUALS and drawn.random() < 0.25
    if has_control or name == "cosmos_predict2":  # its residuals fit its own size
        options |= {"latent": FAMILIES[name].latent, "batch": 1}
    history.steps.append(f"sample: {in_words(options)}{', a ControlNet' if has_control else ''}")

    def sample(model: Any) -> torch.Tensor:
        positive = FAMILIES[name].condition(1)
        if has_control:
            positive[0][1] |= {"control": WritingControl(_RESIDUALS[name.removesuffix("_heads")])}
        return host.sample(model, name, positive=positive, **options)

    expected = on_one(GROUND, lambda: sample(pair[0]))
    found = or_refused(lambda: sample(pair[1]))
    far = float((found - expected).norm() / expected.norm().clamp_min(1e-20))
    if is_tensor or options["batch"] > 1 or options["cfg"] > 1:  # rounded elsewhere
        is_right = bool(torch.equal(found.isnan(), expected.isnan())) and (far < _NEAR or far != far)
    else:
        is_right = is_same(found, expected)
    if not is_right:
        raise Ended(f"different: by {far:.3g} of the size")
