"""Other people's code inside blocks that all cards compute together; each is compared with the unsplit MODEL.

All of these mix heads: given the heads of one card only, each would compute something else, without an error.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs
from devicebridge.tests.comfy.split_cases_tensor import DIVIDED, near, tensor
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

_Change = Callable[[Any], None]


def _compare(case: Case, what: str, name: str, change: _Change, *cards: torch.device, **options: Any) -> None:
    """A changed MODEL, unsplit and divided among the cards; the change is made anew for each."""
    host, outputs = case.host, []
    for model in (host.load(name, load_device=CPU), tensor(host.load(name), *cards)):
        patched = model.clone()
        change(patched)
        outputs.append(host.sample(patched, name, **options))
    near(case, f"{name}: {what}", outputs[1], outputs[0])
    clean = host.sample(host.load(name, load_device=CPU), name, **options)
    case.check(f"{name}: {what} does something", _relative(outputs[0], clean) > 1e-3, _relative(outputs[0], clean))
    host.unload_all()


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _mixing_override(model: Any) -> None:
    """An attention that adds to every head the one on the other side, more of it the more heads there are."""

    def override(attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = attention(*args, **kwargs)
        heads = args[3] if len(args) > 3 else kwargs["heads"]
        return output + output.flip(-1) * (0.1 * heads)

    model.model_options["transformer_options"]["optimized_attention_override"] = override


@case
def gathered_attention(case: Case) -> None:
    """An override of the attention sees all heads and their number, in a long run in every family."""
    some = ("flux1_heads", "wan_heads", "z_image")
    for name in (*some, *in_long_runs(*(each for each in DIVIDED if each not in some))):
        _compare(case, "an override", name, _mixing_override)
    _compare(case, "an override on three cards", "flux2_heads", _mixing_override, HOME, OTHER, THIRD)


@case
def gathered_nodes(case: Case) -> None:
    """ComfyUI's own nodes: Normalized Attention Guidance has norms over all heads, Flux KV Cache keeps keys."""
    arguments = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}
    module = importlib.import_module("comfy_extras.nodes_nag")

    def guide(model: Any) -> None:
        patched = module.NAGuidance.execute(model, **arguments)[0]
        model.model_options = patched.model_options

    for name in ("flux1_heads", *in_long_runs("chroma_heads", "hunyuan_video_heads")):
        _compare(case, "NAGuidance", name, guide, cfg=4.0)


@case
def gathered_keys_kept_from_step_to_step(case: Case) -> None:
    """Flux KV Cache: it keeps the keys of a reference picture, and changes an attribute of the model."""
    host, name = case.host, "flux2_heads"
    positive = FAMILIES[name].condition(1)
    positive[0][1] |= {"reference_latents": [torch.randn(1, *FAMILIES[name].latent)]}
    module, outputs = importlib.import_module("comfy_extras.nodes_flux"), []
    for model in (host.load(name, load_device=CPU), tensor(host.load(name))):
        outputs.append(host.sample(module.FluxKVCache.execute(model)[0], name, positive=positive))
    near(case, "as unsplit", outputs[1], outputs[0])
    clean = host.sample(host.load(name, load_device=CPU), name, positive=positive)
    case.check("it does something", _relative(outputs[0], clean) > 1e-3, _relative(outputs[0], clean))


@case
def attached_outside_of_blocks(case: Case) -> None:
    """A layer before the blocks replaced, a hook behind them: that is at home, on whole tensors."""

    def change(model: Any) -> None:
        layer = model.model.diffusion_model.txt_in
        fresh = torch.nn.Linear(layer.in_features, layer.out_features)
        torch.nn.init.normal_(fresh.weight, std=0.1, generator=torch.Generator().manual_seed(5))
        torch.nn.init.zeros_(fresh.bias)
        model.add_object_patch("diffusion_model.txt_in", fresh)

    _compare(case, "a layer before the blocks", "flux1_heads", change)


def _mixing_patches(model: Any) -> None:
    """A patch of q, k and v: one in place, one anew with more tokens; and one of the output."""

    def before(q: Any, k: Any, v: Any, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
        q.mul_(1 + k.abs().mean())
        return {"v": v * (1 + v.flip(1).mean(dim=1, keepdim=True))}

    model.set_model_attn1_patch(before)


@case
def gathered_patches_of_q_k_v(case: Case) -> None:
    """Heads are looked at together, q is changed in place and not returned."""
    for name in ("flux1_heads", "qwen_image", "hunyuan_video_heads"):
        _compare(case, "a patch of q, k and v", name, _mixing_patches)
    _compare(case, "on three cards", "flux1_heads", _mixing_patches, HOME, OTHER, THIRD)


@case
def gathered_patches_of_wan(case: Case) -> None:
    """They are handed one dict: of the self-attention with q and k, behind the cross-attention with the stream."""

    def change(model: Any) -> None:
        def first(given: dict[str, Any]) -> torch.Tensor:
            weight = given["q"].abs().mean(dim=(2, 3)) + given["k"].abs().mean(dim=(2, 3))
            return given["x"] * (1 + weight[..., None])  # type: ignore[no-any-return]

        def second(given: dict[str, Any]) -> torch.Tensor:
            return given["x"] * (1 + 0.1 * given["x"].std())  # type: ignore[no-any-return]

        model.set_model_patch(first, "attn1_patch")
        model.set_model_patch(second, "attn2_patch")

    for name in ("wan_heads", "wan_i2v_heads"):
        _compare(case, "both patches", name, change)


@case
def gathered_patches_of_grouped_heads(case: Case) -> None:
    """Krea 2: keys and values have fewer heads than queries, and both are given all of theirs."""

    def change(model: Any) -> None:
        def before(q: Any, k: Any, v: Any, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
            v.mul_(1 + 0.1 * q.abs().mean())
            mixed = k * (1 + 0.1 * k.flip(1).mean(dim=1, keepdim=True))
            return {"q": q + 0.1 * q.flip(1), "k": mixed, "pe": pe, "attn_mask": attn_mask}

        model.set_model_attn1_patch(before)
        model.set_model_attn1_output_patch(lambda output, options: output + output.flip(-1) * 0.1)

    _compare(case, "patches of the attention", "krea2_heads", change)
    _compare(case, "on three cards", "krea2_heads", change, HOME, OTHER, THIRD)


@case
def gathered_patches_before_q_k_v(case: Case) -> None:
    """Cosmos Predict2: they are given what queries, keys and values are made of, and the number of all heads. Those of
    the MLP are given a dict, and the next one what this one returned."""

    def change(model: Any) -> None:
        def before(q: Any, k: Any, v: Any, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
            return {"q": q * (1 + 0.1 * extra_options["n_heads"]), "v": v + v.flip(1), "pe": pe, "attn_mask": None}

        def first(given: dict[str, Any]) -> dict[str, Any]:
            given["x"] = given["x"] * (1 + given["x"].std())
            return {**given, "said": 1.5}

        def second(given: dict[str, Any]) -> dict[str, Any]:
            index = given["transformer_options"]["block_index"]
            return {"x": given["x"] * given["said"] + 0.1 * index}

        model.set_model_attn1_patch(before)
        model.set_model_attn2_patch(before)
        for patch in (first, second):
            model.set_model_patch(patch, "mlp_patch")

    _compare(case, "all of its patches", "cosmos_predict2", change)


@case
def gathered_tables_as_long_as_there_are_heads(case: Case) -> None:
    """Cosmos Predict2 and Anima: a picture of as many tokens as heads, whose rotary tables a patch returns as given, as
    ControlNet-LLLite does. What a table's dimensions mean does not follow from their lengths."""

    def change(model: Any) -> None:
        def patch(q: Any, k: Any, v: Any, pe: Any = None, attn_mask: Any = None, extra_options: Any = None) -> Any:
            return {"q": q, "k": k, "v": v * 1.5, "pe": pe, "attn_mask": attn_mask}

        model.set_model_attn1_patch(patch)

    name = "cosmos_predict2"
    num_heads = int(FAMILIES[name].unet_config["num_heads"])
    _compare(case, "as many tokens", name, change, latent=(16, 1, 2, 2 * num_heads))


@case
def gathered_masks_of_heads(case: Case) -> None:
    """A patch returns a mask for every head, as rows of one tensor."""

    def change(model: Any) -> None:
        def patch(q: Any, k: Any, v: Any, **_: Any) -> dict[str, Any]:
            weights = torch.linspace(-2, 2, q.shape[1] * q.shape[2], device=q.device, dtype=q.dtype)
            return {"attn_mask": weights.reshape(1, q.shape[1], 1, q.shape[2]).expand(-1, -1, q.shape[2], -1)}

        model.set_model_attn1_patch(patch)

    _compare(case, "a mask of each head", "flux1_heads", change)


@case
def gathered_code_runs_once_at_home(case: Case) -> None:
    """One call per block and step, in ComfyUI's own thread, with tensors of the first card: it may keep what it saw."""
    host, name, calls = case.host, "flux1_heads", []

    def note(q: Any, k: Any, v: Any, extra_options: Any = None, **_: Any) -> dict[str, Any]:
        calls.append((threading.get_ident(), q.device, q.shape[1], extra_options["block_index"]))
        return {}

    model = tensor(host.load(name)).clone()
    model.set_model_attn1_patch(note)
    host.sample(model, name, steps=2)
    blocks = len(model.model.diffusion_model.double_blocks) + len(model.model.diffusion_model.single_blocks)
    case.check("once per block and step", len(calls) == 2 * blocks, len(calls))
    expected = {(threading.get_ident(), HOME, 4)}
    case.check("at home, all heads", {call[:3] for call in calls} == expected, {call[:3] for call in calls})


@case
def gathered_errors(case: Case) -> None:
    """An error of such code, and an output nobody can divide, ends the prompt; the next one works."""
    host, name = case.host, "flux1_heads"
    divided = tensor(host.load(name))
    reference = host.sample(divided, name)

    def wrong(attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **kwargs)[..., :-1]  # type: ignore[no-any-return]

    def failing(attention: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise ValueError("a bug of another node")

    for override, error, words in ((wrong, RuntimeError, ("heads", "blocks")), (failing, ValueError, ("a bug",))):
        broken = divided.clone()
        broken.model_options["transformer_options"]["optimized_attention_override"] = override
        case.refused(words[0], functools.partial(host.sample, broken, name), error, *words)
        case.equal(f"after {words[0]}", host.sample(divided, name), reference)
