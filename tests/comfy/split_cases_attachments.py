"""Nodes that keep state, write into what they are given, or replace parts of the model: the same bits, or a refusal.

Each of these was once silently wrong on a split MODEL, or failed there with a device error.
"""

import functools
import inspect
import itertools
import logging
import re
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import comfy.controlnet
import comfy.ldm.lumina.controlnet
import comfy.model_patcher
import comfy.ops
import comfy.patcher_extension
import comfy.sample
import comfy.weight_adapter.bypass
import torch
from comfy.ldm.modules.attention import attention_basic, optimized_attention
from comfy_extras.nodes_model_patch import ZImageControlPatch
from devicebridge.families.comfy.registry import find_native
from devicebridge.nodes.host.split.attachments import guard_options
from devicebridge.parallel.local.bridge import Bridge
from devicebridge.tests.comfy.native_cases import CASES as NATIVE_CASES
from devicebridge.tests.comfy.native_cases import PATCHES_BETWEEN
from devicebridge.tests.comfy.split_cases import CPU, Case, case, split
from devicebridge.tests.comfy.split_cases_forward import Change, _changed, _noise, compare
from devicebridge.tests.comfy.split_fuzz_nodes import exchange_block_lists, forward_with_identity, scaled
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD, Host
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights

_KINDS = comfy.patcher_extension.WrappersMP
_FIRST = {"balance": "manual", "split_at": (1,)}  # nearly everything is on the other card


# On two cards, nearly everything on the other one, and by relay.
_compare = functools.partial(compare, settings=(_FIRST, {"transport": "relay"}))


def _bypass(model: Any, key: str) -> None:
    """A LoRA of one layer that ComfyUI computes beside it."""
    manager, weights = comfy.weight_adapter.bypass.BypassInjectionManager(), lora_weights("flux1", 1)
    up, down = weights[f"{key}.lora_B.weight"], weights[f"{key}.lora_A.weight"]
    manager.add_adapter(f"{key}.weight", comfy.weight_adapter.LoRAAdapter(set(), (up, down, *[None] * 4)), strength=1.0)
    model.set_injections("bypass_lora", manager.create_injections(model.model))


def _counted(function: Callable[..., Any], calls: Iterator[int] | None = None) -> Callable[..., Any]:
    """The function, each call a little stronger than the one before."""
    calls = calls or itertools.count(1)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return scaled(function(*args, **kwargs), 1 + 0.01 * next(calls))

    return run


def _count_in_the_attention(model: Any, device: torch.device) -> None:
    model.set_model_optimized_attention(_counted(optimized_attention))


def _count_in_an_object_patch(model: Any, device: torch.device) -> None:
    for key in ("diffusion_model.double_blocks.1", "diffusion_model.single_blocks.3"):
        model.add_object_patch(f"{key}.forward", _counted(model.get_model_object(key).forward))


def _count_in_an_injection(model: Any, device: torch.device) -> None:
    calls = itertools.count(1)
    blocks = [model.model.diffusion_model.get_submodule(name) for name in ("double_blocks.1", "single_blocks.3")]

    def inject(patcher: Any) -> None:
        for block in blocks:
            block.forward = _counted(block.forward, calls)

    def eject(patcher: Any) -> None:
        for block in blocks:
            del block.forward

    model.set_injections("a pack", [comfy.patcher_extension.PatcherInjection(inject, eject)])


def _count_in_a_hook(model: Any, device: torch.device) -> None:
    block = model.model.diffusion_model.get_submodule("single_blocks.2")
    block.register_forward_hook(_counted(lambda module, args, out: out))


def _count_in_the_sampling(model: Any, device: torch.device) -> None:
    kind = type(model.get_model_object("model_sampling"))
    counting = type("Counting", (kind,), {"calculate_denoised": _counted(kind.calculate_denoised)})
    model.add_object_patch("model_sampling", counting(model.model.model_config))


def _count_in_a_class(model: Any, device: torch.device) -> None:
    own = type(model.model)
    counting = {"apply_model": _counted(own.apply_model), "__module__": "a_pack.models"}
    model.model.__class__ = type("Counting", (own,), counting)


@case
def what_keeps_state_turns_overlap_off(case: Case) -> None:
    changes: dict[str, Change] = {
        "an attention override": _count_in_the_attention, "object patches": _count_in_an_object_patch,
        "an injection": _count_in_an_injection, "a hook": _count_in_a_hook,
        "the sampling of a pack": _count_in_the_sampling, "a class of a pack around the model": _count_in_a_class,
    }  # fmt: skip
    for claim, change in changes.items():
        with case.logged("devicebridge", logging.INFO) as messages:
            _compare(case, claim, "flux1", change, cfg=4.0, settings=({}, _FIRST))
        case.check(f"{claim}: the log says so", any("overlap is off" in line for line in messages), messages)


@case
def what_keeps_no_state_leaves_overlap_on(case: Case, host: Host) -> None:
    """ComfyUI's own choice of an attention, its sampling nodes and its bypass LoRA."""

    changes: dict[str, Callable[[Any], None]] = {
        "attention": lambda model: model.set_model_optimized_attention(attention_basic),
        "bypass": lambda model: _bypass(model, "diffusion_model.single_blocks.3.linear1"),
    }
    for claim, change in changes.items():
        model = split(host.load("flux1")).clone()
        change(model)
        with case.logged("devicebridge", logging.INFO) as messages:
            host.sample(model, "flux1", cfg=4.0)
        case.check(claim, not any("overlap is off" in line for line in messages), messages)
        host.unload_all()


@case
def writes_into_what_every_block_gets(case: Case) -> None:
    """A change in place of a loop constant counts for all later blocks, on whichever card."""

    def z_image(model: Any, device: torch.device) -> None:
        def patch(args: dict[str, Any]) -> dict[str, Any]:
            args["vec"].mul_(0.9)
            return args

        model.set_model_double_block_patch(patch)

    def replaced(entry: str, model: Any, device: torch.device) -> None:
        def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            for tensor in args[entry] if isinstance(args[entry], tuple) else (args[entry],):
                tensor.mul_(0.8)
            return extra["original_block"](args)

        for block in (("double_block", 0), ("double_block", 1), ("single_block", 1), ("single_block", 3)):
            model.set_model_patch_replace(replacement, "dit", *block)

    three = ({"devices": (HOME, OTHER, THIRD)}, _FIRST, {"transport": "relay"})
    _compare(case, "vec, between blocks", "z_image", z_image, settings=three)
    for entry in ("vec", "pe"):
        change = functools.partial(replaced, entry)
        _compare(case, f"{entry}, by a replacement", "flux1", change, settings=three)


@case
def writes_into_what_an_attention_patch_gets(case: Case) -> None:
    def flux(model: Any, device: torch.device) -> None:
        def patch(q: Any, k: Any, v: Any, pe: Any, attn_mask: Any, extra_options: Any) -> dict[str, Any]:
            q.mul_(1.3)
            return {"k": k * 0.9}

        model.set_model_attn1_patch(patch)
        model.set_model_attn1_output_patch(lambda output, options: output.mul_(0.7))

    def unet(model: Any, device: torch.device) -> None:
        def patch(n: Any, context: Any, value: Any, extra: Any) -> Any:
            context.mul_(0.8)
            return n, context, value

        model.set_model_attn2_patch(patch)

    _compare(case, "q, which is not returned", "flux1", flux)
    _compare(case, "the context", "sdxl", unet, settings=({}, {"balance": "manual", "split_at": (3,)}), cfg=3.0)

    seen: list[torch.device] = []
    options = {"patches": {"of a pack": [lambda options, x: seen.append(x.device) or x]}}
    (patch,) = guard_options(options, types.SimpleNamespace(main_device=HOME), None)["patches"]["of a pack"]  # type: ignore[arg-type]
    returned = patch({"sigmas": torch.ones(1, device=HOME)}, torch.ones(2, device=OTHER))
    case.check("x, behind options of the main card", (*seen, returned.device) == (HOME, OTHER), (seen, returned.device))


@case
def a_forward_run_twice(case: Case) -> None:
    """A wrapper that computes twice and weakens the context in place between."""

    def change(model: Any, device: torch.device) -> None:
        def twice(executor: Any, x: Any, timesteps: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
            first = executor(x, timesteps, context, *args, **kwargs)
            context.mul_(0.5)
            return first + 0.5 * (executor(x, timesteps, context, *args, **kwargs) - first)

        model.add_wrapper_with_key(_KINDS.DIFFUSION_MODEL, "a pack", twice)

    _compare(case, "sdxl", "sdxl", change, settings=({}, {"balance": "manual", "split_at": (3,)}), cfg=3.0)


@case
def writes_by_layers_of_a_pack(case: Case) -> None:
    """A layer that scales its input, an argument of the block, where nobody sees it run."""

    class Scaling(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, vec: torch.Tensor) -> Any:
            vec.mul_(0.8)
            return self.layer(vec)

    def change(model: Any, device: torch.device) -> None:
        for key in ("diffusion_model.double_blocks.1.img_mod", "diffusion_model.single_blocks.2.modulation"):
            layer = model.get_model_object(key)
            patched = Scaling(layer)
            patched.is_double, patched.multiplier = layer.is_double, layer.multiplier
            model.add_object_patch(key, patched)

    _compare(case, "vec", "flux1", change)


@case
def a_controlnet_that_takes_entries_out(case: Case) -> None:
    """Z-Image Fun ControlNet pops img and txt from its arguments and writes into what they were."""
    config = FAMILIES["z_image"].unet_config

    class Encoder:
        @staticmethod
        def spacial_compression_encode() -> int:
            return 8

        @staticmethod
        def encode(image: torch.Tensor) -> torch.Tensor:
            return _noise(image.shape[0], 16, image.shape[1] // 8, image.shape[2] // 8)

    def change(model: Any, device: torch.device) -> None:
        net = comfy.ldm.lumina.controlnet.ZImage_Control(
            dim=config["dim"], n_heads=config["n_heads"], n_kv_heads=config["n_kv_heads"],
            multiple_of=config["multiple_of"], ffn_dim_multiplier=config["ffn_dim_multiplier"],
            n_control_layers=30,  # the node spreads its layers over 30 blocks
            dtype=torch.float32, operations=comfy.ops.manual_cast,
        )  # fmt: skip
        generator = torch.Generator().manual_seed(8)
        for parameter in net.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        patcher = comfy.model_patcher.ModelPatcher(net, load_device=device, offload_device=CPU)
        patch = ZImageControlPatch(patcher, Encoder(), torch.rand(1, 64, 64, 3, generator=generator), 0.8)
        patch.encoded_image = patch.encoded_image.to(device)
        model.set_model_double_block_patch(patch)

    _compare(case, "z_image", "z_image", change)


@case
def a_replaced_method(case: Case) -> None:
    def by_object_patch(model: Any, device: torch.device) -> None:
        forward = forward_with_identity(_noise(1, 1, 128, device=device), model)
        model.add_object_patch("diffusion_model.forward_orig", forward)

    def on_the_instance(model: Any, device: torch.device) -> None:
        forward = forward_with_identity(_noise(1, 1, 128, device=device), model)
        model.model.diffusion_model.forward_orig = forward

    with case.logged("devicebridge", logging.INFO) as messages:
        _compare(case, "by object patch", "flux1", by_object_patch, cfg=4.0)
    case.check("the log says relay", any("relay instead of stream" in line for line in messages), messages)
    _compare(case, "on the instance", "flux1", on_the_instance, cfg=4.0)


@case
def a_block_list_exchanged_by_a_wrapper(case: Case) -> None:
    """A cache of the first block: all blocks run inside one module that takes the place of both lists."""

    def change(model: Any, device: torch.device) -> None:
        model.set_model_unet_function_wrapper(exchange_block_lists(model.model.diffusion_model))

    _compare(case, "flux1", "flux1", change, cfg=4.0)


@case
def a_layer_with_weights_of_its_own(case: Case, host: Host) -> None:
    """It is loaded to the card of its block, with a LoRA on it, whether the model was loaded before or not."""

    def change(operations: Any, model: Any, device: torch.device) -> None:
        for key in ("diffusion_model.double_blocks.0.img_mlp.0", "diffusion_model.single_blocks.3.linear2"):
            old = model.get_model_object(key)
            new = operations.Linear(old.in_features, old.out_features, dtype=torch.float32)
            new.weight = torch.nn.Parameter(_noise(*old.weight.shape, seed=5) * 0.1, requires_grad=False)
            new.bias = torch.nn.Parameter(_noise(*old.bias.shape, seed=6) * 0.1, requires_grad=False)
            model.add_object_patch(key, new)

    for name, operations in (("torch", torch.nn), ("comfy", comfy.ops.disable_weight_init)):
        on = functools.partial(change, operations)
        clean = host.reference("flux1")
        reference = host.sample(_changed(host.load("flux1", load_device=CPU), on, CPU), "flux1")
        divided = split(host.load("flux1"), **_FIRST)
        case.equal(f"{name}: not loaded", host.sample(_changed(divided, on, HOME), "flux1"), reference)
        case.equal(f"{name}: clean", host.sample(divided, "flux1"), clean)
        case.equal(f"{name}: loaded already", host.sample(_changed(divided, on, HOME), "flux1"), reference)
        case.equal(f"{name}: clean after", host.sample(divided, "flux1"), clean)
        host.unload_all()
        with_lora = host.lora(_changed(host.load("flux1", load_device=CPU), on, CPU), "flux1")
        expected = host.sample(with_lora, "flux1")
        divided = split(host.load("flux1"))
        output = host.sample(host.lora(_changed(divided, on, HOME), "flux1"), "flux1")
        case.equal(f"{name}: with a LoRA", output, expected)
        case.equal(f"{name}: clean after a LoRA", host.sample(divided, "flux1"), clean)
        host.unload_all()


@case
def an_injection_over_an_object_patch(case: Case, host: Host) -> None:
    """The patched layer of the other card is cleared and loaded again under it; without both nothing is left."""
    key = "diffusion_model.single_blocks.3.linear1"

    def change(model: Any, device: torch.device) -> None:
        _count_in_an_injection(model, device)
        forward = model.get_model_object(key).forward
        model.add_object_patch(f"{key}.forward", lambda *args, **kwargs: forward(*args, **kwargs) * 1.1)
        _bypass(model, key)

    with mock.patch.object(comfy.model_management, "get_torch_device", lambda: CPU):
        changed_unsplit = _changed(host.load("flux1", load_device=CPU), change, CPU)
        references = [host.sample(changed_unsplit, "flux1") for _ in range(3)]
    clean = host.reference("flux1")
    divided = split(host.load("flux1"))
    changed = _changed(divided, change, HOME)
    for number, cleared in enumerate((OTHER, HOME, OTHER)):
        case.equal(f"run {number}", host.sample(changed, "flux1"), references[number])
        host.free(cleared)
    case.equal("without", host.sample(divided, "flux1"), clean)


@case
def attention_that_brings_tensors(case: Case, host: Host) -> None:
    """An override runs where its tensors are; a patched layer that brings some is refused by name."""

    def override(model: Any, device: torch.device) -> None:
        bias = _noise(1, 1, 1, 128, device=device)

        def attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            return optimized_attention(q + bias, k, v, *args, **kwargs)

        model.set_model_optimized_attention(attention)

    def layer(model: Any, device: torch.device) -> None:
        bias = _noise(1, 1, 128, device=device)
        key = "diffusion_model.single_blocks.3"
        forward = model.get_model_object(key).forward
        model.add_object_patch(f"{key}.forward", lambda x, *args, **kwargs: forward(x, *args, **kwargs) + bias)

    _compare(case, "an override", "flux1", override)
    for request in ({}, {"transport": "relay"}):
        patched = _changed(split(host.load("flux1"), **request), layer, HOME)
        run = functools.partial(host.sample, patched, "flux1")
        words = ("diffusion_model.single_blocks.3.forward", "split_at", "take the node out")
        case.refused(f"a layer, {request}", run, RuntimeError, *words)
        clean = host.reference("flux1")
        case.equal("and without it all is well", host.sample(split(host.load("flux1"), **request), "flux1"), clean)
        host.unload_all()


@case
def a_model_that_other_code_moves(case: Case, host: Host) -> None:
    """Between two steps, to one of its cards and to host memory."""
    for place in (HOME, CPU):
        divided = split(host.load("flux1"), **_FIRST)

        def change(model: Any, device: torch.device, place: torch.device = place) -> None:
            def wrapper(apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
                model.model.diffusion_model.to(place)
                return apply_model(given["input"], given["timestep"], **given["c"])

            model.set_model_unet_function_wrapper(wrapper)

        run = functools.partial(host.sample, _changed(divided, change, HOME), "flux1")
        case.refused(f"to {place}", run, RuntimeError, "two devices", "load the MODEL anew")
        host.unload_all()


@case
def control_lora(case: Case, host: Host) -> None:
    """A Control-LoRA borrows the UNet's own weights, wherever they are, and computes at home."""
    family = FAMILIES["sdxl"]
    config = {key: value for key, value in family.unet_config.items() if key != "out_channels"}
    net = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, operations=comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(4)
    own = ("input_hint_block", "zero_convs", "middle_block_out")
    weights = {
        name: torch.randn(value.shape, generator=generator) * 0.1
        for name, value in net.state_dict().items()
        if name.startswith(own)
    }
    weights["lora_controlnet"] = torch.tensor([])
    hint = torch.rand(1, 3, 64, 64, generator=generator)

    def sample(model: Any) -> torch.Tensor:
        positive = family.condition(1)
        control = comfy.controlnet.ControlLora(dict(weights)).set_cond_hint(hint, strength=0.9)
        positive[0][1] |= {"control": control, "control_apply_to_uncond": False}
        return host.sample(model, "sdxl", cfg=3.0, positive=positive)

    with mock.patch.object(comfy.model_management, "get_torch_device", lambda: CPU):
        reference = sample(host.load("sdxl", load_device=CPU))
    case.differs("it does something", reference, host.reference("sdxl", cfg=3.0))
    for first in (1, 3):
        divided = split(host.load("sdxl"), balance="manual", split_at=(first,))
        case.equal(f"cut at {first}", sample(divided), reference)
        host.unload_all()


@case
def verify_passes_what_is_right(case: Case, host: Host) -> None:
    for name, options in (("flux1", {"cfg": 4.0, "batch": 2}), ("sdxl", {"cfg": 4.0})):
        plain = host.sample(split(host.load(name)), name, **options)
        with case.logged("devicebridge", logging.INFO) as messages:
            verified = host.sample(split(host.load(name), verify=True), name, **options)
        case.equal(f"{name}: the same picture", verified, plain)
        said = [line for line in messages if "verified" in line]
        case.check(f"{name}: verified once", len(said) == 1 and "same bits" in said[0], messages)
        host.unload_all()


@case
def verify_stops_what_is_wrong(case: Case, host: Host) -> None:
    """With a guard taken out: copies are not forgotten behind a patch that writes into what all blocks get."""

    def change(model: Any, device: torch.device) -> None:
        def patch(args: dict[str, Any]) -> dict[str, Any]:
            args["vec"].mul_(0.9)
            return args

        model.set_model_double_block_patch(patch)

    divided = _changed(split(host.load("z_image"), verify=True), change, HOME)
    forget = Bridge.forget

    def not_in_the_fast_way(bridge: Bridge) -> None:
        if bridge.transport == "relay":
            forget(bridge)

    with mock.patch.object(Bridge, "forget", not_in_the_fast_way):
        run = functools.partial(host.sample, divided, "z_image")
        case.refused("it stops", run, RuntimeError, "verify", "conditioning 0 by up to", "patches")
    reference = host.sample(_changed(host.load("z_image", load_device=CPU), change, CPU), "z_image")
    case.equal("with the guard", host.sample(divided, "z_image"), reference)
    counting = _changed(split(host.load("flux1"), verify=True), _count_in_the_attention, HOME)
    run = functools.partial(host.sample, counting, "flux1", cfg=4.0)
    case.refused("what keeps state", run, RuntimeError, "keeps state", "attention override")


# The names by which a class's code asks for patches.
_ASKS = re.compile(r'patches\["(\w+)"\]|"(\w+)" in \w*patches\b|patches(?:", \{\}\))?\.get\("(\w+)"|"(\w+_patch)"')
_OUTSIDE = {"post_input", "noise_refiner", "emb_patch", *PATCHES_BETWEEN}  # of blocks


def _asked(kind: type) -> set[str]:
    found = set()
    for owner in kind.__mro__:
        methods = vars(owner).items() if owner.__module__.startswith("comfy.ldm") else ()
        for name, method in methods:
            if not isinstance(method, types.FunctionType):
                continue
            if getattr(kind, name) is method or "super()" in inspect.getsource(getattr(kind, name)):
                found |= {name for names in _ASKS.findall(inspect.getsource(method)) for name in names if name}
    return found


@case
def patch_points_of_every_class(case: Case) -> None:
    """What a class's row says of patches in blocks is what its code, and that of its modules, asks for."""
    for native in NATIVE_CASES:
        model = native.build()
        row = find_native(type(model))
        assert row is not None
        found = set[str]().union(*(_asked(type(module)) for module in model.modules())) - _OUTSIDE
        said = row.patches_inside
        case.check(f"{native.name}", found == {*said}, f"asked for {sorted(found)}, said {sorted(said)}")
