"""What random histories do to a MODEL: one function per kind of node, for the split MODEL and the unsplit one alike.
It changes the clone that it is given, or returns another one.

A node draws what it does from a generator of its own and makes its tensors and its state anew each time, so two MODELs
given the same seed are changed in the same way. Tensors lie on the device it is told, the MODEL's own.
"""

import itertools
import random
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import comfy.ldm.flux.model
import comfy.ops
import comfy.patcher_extension
import comfy.sd
import comfy_extras.nodes_model_merging as merging
import torch
from comfy.ldm.modules.attention import attention_basic, attention_split, optimized_attention
from devicebridge.tests.comfy.split_host import Host
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights, make_weights

_WRAPPERS = comfy.patcher_extension.WrappersMP
_STREAMS = ("flux1", "flux2", "chroma", "hunyuan_video")


@dataclass(frozen=True)
class Setting:
    """Where a node works: the host, the family's name, the device of its tensors, and its own random numbers."""

    host: Host
    name: str
    device: torch.device
    seed: int

    @property
    def random(self) -> random.Random:
        return random.Random(self.seed)

    def noise(self, *shape: int, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 31 + salt)
        return torch.randn(shape, generator=generator).to(self.device)

    @property
    def layers(self) -> list[str]:
        family = FAMILIES[self.name]
        names = [name for name, value in _shapes(self.name).items() if name.endswith(".weight") and len(value) == 2]
        return sorted(name.removesuffix(".weight") for name in names if name.startswith(family.block_lists))


Node = Callable[[Any, Setting], Any]


def _shapes(name: str) -> Mapping[str, tuple[int, ...]]:
    if name not in _SHAPES:
        _SHAPES[name] = {key: tuple(value.shape) for key, value in make_weights(FAMILIES[name]).items()}
    return _SHAPES[name]


_SHAPES: dict[str, Mapping[str, tuple[int, ...]]] = {}


def _adapter(setting: Setting, layer: str, kind: str) -> dict[str, torch.Tensor]:
    rows, columns = _shapes(setting.name)[f"{layer}.weight"]
    base = f"diffusion_model.{layer}"
    generator = torch.Generator().manual_seed(setting.seed + len(layer))

    def draw(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    if kind == "loha":
        parts = {"hada_w1_a": (rows, 2), "hada_w1_b": (2, columns), "hada_w2_a": (rows, 2), "hada_w2_b": (2, columns)}
        return {f"{base}.{part}": draw(*shape) for part, shape in parts.items()}
    if kind == "lokr":
        return {f"{base}.lokr_w1": draw(2, 2), f"{base}.lokr_w2": draw(rows // 2, columns // 2)}
    if kind == "diff":
        return {f"{base}.diff": 0.1 * draw(rows, columns)}
    found = {f"{base}.lora_up.weight": draw(rows, 2), f"{base}.lora_down.weight": draw(2, columns)}
    if kind == "dora":
        found[f"{base}.dora_scale"] = 1 + draw(rows, 1).abs()
    return found | {f"{base}.alpha": torch.tensor(1.0)}


def adapters(model: Any, setting: Setting) -> Any:
    chosen = setting.random
    weights: dict[str, torch.Tensor] = {}
    for layer in chosen.sample(setting.layers, k=min(6, len(setting.layers))):
        weights |= _adapter(setting, layer, chosen.choice(("lora", "dora", "loha", "lokr", "diff")))
    return comfy.sd.load_lora_for_models(model, None, weights, chosen.choice((1.0, 0.5, -0.7)), 0)[0]


def every_layer(model: Any, setting: Setting) -> Any:
    return setting.host.lora(model, setting.name, setting.seed % 1000)


def bypass(model: Any, setting: Setting) -> Any:
    if "fuzz" in model.injections:
        return None  # both would take off what the other put on
    weights = dict(lora_weights(setting.name, setting.seed % 1000))
    return comfy.sd.load_bypass_lora_for_models(model, None, weights, 0.8, 0)[0]


def weight_wrapper(model: Any, setting: Setting) -> None:
    factor = setting.random.uniform(0.5, 1.5)
    for layer in setting.random.sample(setting.layers, k=2):
        model.add_weight_wrapper(f"diffusion_model.{layer}.weight", lambda weight: weight * factor)


def merge(model: Any, setting: Setting) -> Any:
    other = setting.host.lora(setting.host.load(setting.name, load_device=setting.device), setting.name, 5)
    return merging.ModelMergeSimple().merge(model, other, setting.random.choice((0.25, 0.5)))[0]


def scaled(output: Any, factor: float) -> Any:
    return tuple(factor * part for part in output) if isinstance(output, tuple) else output * factor


def replacement(model: Any, setting: Setting) -> None:
    """Block replacements that scale, skip, write in place or count."""
    chosen = setting.random
    kind = chosen.choice(("scale", "skip", "in place", "count"))
    lists = ("double_block", "single_block") if setting.name in _STREAMS else ("double_block",)
    calls = itertools.count(1)

    def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        if kind == "skip":
            return args
        if kind == "in place" and isinstance(args["vec"], torch.Tensor):
            args["vec"].mul_(0.9)
        before = args["img"].clone()
        out = extra["original_block"](args)
        factor = 1 + 0.01 * next(calls) if kind == "count" else 1.1
        return {**out, "img": out["img"] * factor - 0.1 * before}

    for _ in range(2):
        model.set_model_patch_replace(replaced, "dit", chosen.choice(lists), chosen.randrange(2))


def between(model: Any, setting: Setting) -> None:
    kind = setting.random.choice(("img in place", "pop", "keep", "vec in place", "new"))
    kept: list[torch.Tensor] = []

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        if kind == "img in place":
            args["img"] += 0.1 * args["img"].mean()
        elif kind == "vec in place" and isinstance(args.get("vec"), torch.Tensor):
            args["vec"].mul_(0.95)
        elif kind == "pop":
            taken = args.pop("img")
            args.pop("txt", None)
            taken[:, :2] *= 1.2
        elif kind == "keep":
            kept.append(args["img"].mean())
            args["img"] = args["img"] + 0.01 * len(kept) * kept[0]
        else:
            args["img"] = args["img"] * 1.1
        return args

    model.set_model_double_block_patch(patch)


def inside(model: Any, setting: Setting) -> None:
    writes = setting.random.random() < 0.5
    if setting.name == "sdxl":

        def cross(n: Any, context: Any, value: Any, extra: Any) -> Any:
            if writes:
                context.mul_(0.9)
            return n * 1.1, context, value

        model.set_model_attn2_patch(cross)
        return
    bias = setting.noise(1, 1, 1, 128)

    def joint(q: Any, k: Any, v: Any, pe: Any, attn_mask: Any, extra_options: Any) -> dict[str, Any]:
        if writes:
            q.mul_(1.2)
        return {"k": k * 0.9, "v": v + bias.to(v.dtype)}

    model.set_model_attn1_patch(joint)


def unet_patches(model: Any, setting: Setting) -> None:
    bias = 0.3 * setting.noise(1, 1, 1, 1)
    model.set_model_input_block_patch(lambda h, options: h.add_(bias.to(h.dtype)))
    model.set_model_output_block_patch(lambda h, skip, options: (h * 1.1, skip.mul_(0.9)))


def attention(model: Any, setting: Setting) -> None:
    """Another attention: the host's own, one that counts, one that brings a tensor."""
    kind = setting.random.choice(("basic", "split", "count", "tensor"))
    calls = itertools.count(1)
    factor = 1 + 0.1 * setting.noise(1).abs()

    def counting(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return optimized_attention(q, k, v, *args, **kwargs) * (1 + 0.01 * next(calls))

    def with_tensor(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return optimized_attention(q, k, v, *args, **kwargs) * factor.to(q.dtype)

    functions = {"basic": attention_basic, "split": attention_split, "count": counting, "tensor": with_tensor}
    model.set_model_optimized_attention(functions[kind])


def function_wrapper(model: Any, setting: Setting) -> None:
    bias = 0.1 * setting.noise(1)
    calls = itertools.count(1)

    def wrapper(apply_model: Callable[..., torch.Tensor], args: dict[str, Any]) -> torch.Tensor:
        return apply_model(args["input"] + bias, args["timestep"], **args["c"]) * (1 + 0.01 * next(calls))

    model.set_model_unet_function_wrapper(wrapper)


def forward_wrapper(model: Any, setting: Setting) -> None:
    is_twice = setting.random.random() < 0.6

    def wrapper(executor: Any, x: Any, timestep: Any, context: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        first = executor(x, timestep, context, *args, **kwargs)
        if not is_twice:
            return first * 0.9
        context.mul_(0.7)
        return first + 0.5 * (executor(x, timestep, context, *args, **kwargs) - first)

    model.add_wrapper_with_key(_WRAPPERS.DIFFUSION_MODEL, "fuzz", wrapper)


def apply_wrapper(model: Any, setting: Setting) -> None:
    calls = itertools.count(1)
    model.add_wrapper_with_key(
        _WRAPPERS.APPLY_MODEL,
        "fuzz",
        lambda executor, *args, **kwargs: executor(*args, **kwargs) * (1 + 0.01 * next(calls)),
    )


def sampler_functions(model: Any, setting: Setting) -> None:
    model.set_model_sampler_cfg_function(lambda args: args["uncond"] + 2.0 * (args["cond"] - args["uncond"]))
    model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.9 + args["input"] * 0.1)


def object_patch(model: Any, setting: Setting) -> None:
    """A layer with weights of its own, or a block's forward that counts."""
    layer = setting.random.choice(setting.layers)
    key = f"diffusion_model.{layer}"
    if setting.random.random() < 0.5:
        old = model.get_model_object(key)
        weight = model.get_model_object(f"{key}.weight")
        plain = weight.dtype == torch.float32
        operations = comfy.ops.disable_weight_init if plain else comfy.ops.manual_cast
        new = operations.Linear(old.in_features, old.out_features, bias=False, dtype=weight.dtype)
        values = setting.noise(old.out_features, old.in_features).to("cpu", weight.dtype)
        new.weight = torch.nn.Parameter(values * old.in_features**-0.5, requires_grad=False)
        model.add_object_patch(key, new)
        return
    forward, calls = model.get_model_object(key).forward, itertools.count(1)
    model.add_object_patch(f"{key}.forward", lambda *a, **kw: scaled(forward(*a, **kw), 1 + 0.01 * next(calls)))


def injection(model: Any, setting: Setting) -> None:
    if "bypass_lora" in model.injections:
        return
    layer, calls = setting.random.choice(setting.layers), itertools.count(1)
    found: list[Any] = []

    def inject(patcher: Any) -> None:
        module = patcher.model.diffusion_model.get_submodule(layer)
        forward = module.forward
        found.append(forward)
        module.forward = lambda *a, **kw: scaled(forward(*a, **kw), 1.2 if next(calls) % 3 == 0 else 1.0)

    def eject(patcher: Any) -> None:
        if found:
            patcher.model.diffusion_model.get_submodule(layer).forward = found.pop()

    model.set_injections("fuzz", [comfy.patcher_extension.PatcherInjection(inject, eject)])


def replaced_method(model: Any, setting: Setting) -> None:
    """Another forward_orig, which adds a tensor of its own between blocks."""
    forward = forward_with_identity(setting.noise(1, 1, 128), model)
    model.add_object_patch("diffusion_model.forward_orig", forward)


def block_cache(model: Any, setting: Setting) -> None:
    """A function wrapper that puts one module in the place of both lists of blocks."""
    model.set_model_unet_function_wrapper(exchange_block_lists(model.model.diffusion_model))


def forward_with_identity(id_embedding: torch.Tensor, model: Any) -> Callable[..., Any]:
    """A forward of FLUX with a tensor of its own added between blocks, as packs put in the place of forward_orig."""
    embed = comfy.ldm.flux.model.timestep_embedding

    def forward_orig(self, img, img_ids, txt, txt_ids, timesteps, y, guidance, *_, **kw) -> torch.Tensor:
        options = kw["transformer_options"]
        img, txt = self.img_in(img), self.txt_in(txt)
        vec = self.time_in(embed(timesteps, 256).to(img.dtype)) + self.vector_in(y)
        vec = vec + self.guidance_in(embed(guidance, 256).to(img.dtype))
        pe = self.pe_embedder(torch.cat((txt_ids, img_ids), dim=1))
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe, attn_mask=None, transformer_options=options)
            img = img + 0.5 * id_embedding.to(img.dtype)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe, attn_mask=None, transformer_options=options)
            img[:, txt.shape[1] :] = img[:, txt.shape[1] :] + 0.5 * id_embedding.to(img.dtype)
        return self.final_layer(img[:, txt.shape[1] :], vec)

    return types.MethodType(forward_orig, model.model.diffusion_model)


class _Cached(torch.nn.Module):
    def __init__(self, double_blocks: Any, single_blocks: Any) -> None:
        super().__init__()
        self.double_blocks, self.single_blocks = double_blocks, single_blocks

    def forward(self, img: Any, txt: Any, **kwargs: Any) -> Any:
        before = img.clone()
        for number, block in enumerate(self.double_blocks):
            img, txt = block(img=img, txt=txt, **kwargs)
            if number == 0:
                img = img + 0.2 * (img - before)
        joined = before = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            joined = block(joined, **kwargs)
        return joined[:, txt.shape[1] :] - 0.1 * before[:, txt.shape[1] :], txt


class _Nothing(torch.nn.Module):
    def forward(self, img: Any, **kwargs: Any) -> Any:
        return img


def exchange_block_lists(diffusion_model: Any) -> Callable[..., Any]:
    """A function wrapper in the manner of caches of the first block."""

    def wrapper(apply_model: Callable[..., Any], args: dict[str, Any]) -> Any:
        cached = _Cached(diffusion_model.double_blocks, diffusion_model.single_blocks)
        with (
            mock.patch.object(diffusion_model, "double_blocks", torch.nn.ModuleList([cached])),
            mock.patch.object(diffusion_model, "single_blocks", torch.nn.ModuleList([_Nothing()])),
        ):
            return apply_model(args["input"], args["timestep"], **args["c"])

    return wrapper


def clone(model: Any, setting: Setting) -> None:
    pass


def applied(node: Node, model: Any, setting: Setting) -> Any:
    """What a node hands on: a clone that it has changed, or what it returns."""
    changed = model.clone()
    return node(changed, setting) or changed


_ALL = tuple(FAMILIES)
_WITH_REPLACEMENTS = ("flux1", "flux2", "chroma", "hunyuan_video", "wan", "qwen_image")

NODES: Mapping[Node, tuple[str, ...]] = {
    adapters: _ALL, every_layer: _ALL, bypass: _ALL, weight_wrapper: _ALL, merge: _ALL, replacement: _WITH_REPLACEMENTS,
    between: ("wan", "qwen_image", "z_image", "lumina2"), inside: ("flux1", "flux2", "sdxl"), unet_patches: ("sdxl",),
    attention: _ALL, function_wrapper: _ALL,
    forward_wrapper: ("flux1", "flux2", "wan", "sdxl", "qwen_image", "z_image"), apply_wrapper: _ALL,
    sampler_functions: _ALL, object_patch: _ALL, injection: _ALL, replaced_method: ("flux1",), block_cache: ("flux1",),
    clone: _ALL,
}  # fmt: skip

# A second computation of the same step, as the split's own verify does one, makes these go on differently.
STATEFUL = frozenset({replacement, between, attention, function_wrapper, apply_wrapper, object_patch, injection})

# What way tokens takes; the others work inside blocks or in one card's copy, and are refused.
BY_TOKENS: tuple[Node, ...] = (adapters, every_layer, merge, weight_wrapper, attention)
BY_TOKENS += (function_wrapper, forward_wrapper, apply_wrapper, sampler_functions, clone)

# These hold on to the MODEL they were put on, so they come after the split.
AFTER_ONLY = frozenset({bypass, object_patch, injection, replaced_method, block_cache})
