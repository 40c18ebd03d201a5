"""A MODEL of which all cards compute their share of the tokens, by its whole path; the reference is the unsplit run.

Every row has the sums of one card, but kernels are chosen by the number of rows: within 1e-5 of its size in float32
after two steps. Two runs of the same have the same bits.
"""

import contextlib
import copy
import functools
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.ldm.ernie.model as ernie
import comfy.ldm.flux.layers as flux_layers
import comfy.ldm.flux.math as flux_math
import comfy.model_management
import comfy.sd
import torch
from comfy.ldm.modules import attention
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_nag import NAGuidance
from devicebridge.families.comfy.registry import find_native
from devicebridge.families.token_plan import TokenPlan
from devicebridge.nodes.host.split import tokens as tokens_module
from devicebridge.nodes.host.split.deriving import Cards
from devicebridge.nodes.host.split.model import describe_split, load_split_model
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.nodes.host.split.tokens import led_by_name
from devicebridge.parallel.local.borrow import RowResiduals
from devicebridge.parallel.local.heads import Gathered
from devicebridge.parallel.local.tokens import OneDeviceError, TokenParallel
from devicebridge.tests.comfy.native_cases import CASES as NATIVE_CASES
from devicebridge.tests.comfy.native_cases import QWEN_IMAGE_21
from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, in_long_runs, long_case, split
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS
from devicebridge.tests.comfy.split_cases_nodes import context_windows, in_one_batch, stopped_inside_a_block
from devicebridge.tests.comfy.split_cases_tensor import as_unsplit, clones_in_turn, controlnets, loras, near, tensor
from devicebridge.tests.comfy.split_cases_tensor_files import FILES, _eight_bit, _load, _products_in_fp8
from devicebridge.tests.comfy.split_cases_weights import NAME
from devicebridge.tests.comfy.split_classes import DIVIDED, SHARED
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD, Host, hooked, live_bytes
from devicebridge.tests.comfy.split_prompts import faults_of, run_prompts
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights, small_sizes
from devicebridge.tests.emulated import CARDS, on_cpu
from torch.nn import Parameter

NEAR = 1e-5
IN_8_BITS = 0.01


def tokens(model: Any, *devices: torch.device, **options: Any) -> Any:
    return split(model, *devices, way="tokens", **options)


def _family(name: str, case: Case) -> None:
    host, forwards, run = case.host, [], TokenParallel.run
    shared = tokens(host.load(name), overlap=False)  # split_cases_batches.py has the other way

    def note(self: TokenParallel, calls: Any, *replays: Any) -> Any:
        forwards.append(len(calls))
        return run(self, calls, *replays)

    with mock.patch.object(TokenParallel, "run", note):
        output = as_unsplit(case, name, shared, NEAR)
    case.check("both cards computed each step", len(forwards) >= 2 and set(forwards) == {2}, forwards)
    host.unload_all()
    left = {device: live_bytes(device) for device in (HOME, OTHER)}  # Cosmos leaves a step's text on the model
    case.check("nothing more stays than on one card", left[OTHER] <= left[HOME] < 2**17, left)
    case.equal("after it was unloaded", host.sample(shared, name), output)


for _name in SHARED:
    CASES[f"tokens_{_name}"] = functools.partial(_family, _name)


@case
def tokens_shares_by_hand(case: Case, host: Host) -> None:
    """Two to eight cards, each with the share it was given; without any, cards of two kinds go by their speed."""
    name = "flux2"
    reference = host.reference(name)
    given: dict[tuple[float, ...], int] = {(3, 5): 38, (0.5, 1.5, 1): 17, (1, 3, 2, 2): 12}
    for shares, percent in given.items():
        shared = tokens(host.load(name), *CARDS[: len(shares)], shares=shares)
        said, _ = describe_split(shared)
        case.check(f"{shares}: said", f"{percent}% of the tokens" in said, said)
        near(case, str(shares), host.sample(shared, name), reference, NEAR)
        host.unload_all()
    with (
        mock.patch.object(tokens_module, "device_title", str),
        mock.patch.object(tokens_module, "machine_speed", lambda devices: mock.Mock(flops_per_s=(3e12, 1e12))),
    ):
        found = tokens(host.load(name)).model.devicebridge_split.plan.shares
        by_hand = tokens(host.load(name), shares=(1, 2)).model.devicebridge_split.plan.shares
    case.check("by speed, or by hand", (found, by_hand) == ((3e12, 1e12), (1, 2)), (found, by_hand))
    built = native = next(each for each in NATIVE_CASES if each.class_name == "WanModel")
    model, plan = built.build(), find_native(native.model_class).tokens
    for shares in ((2, 1, 1, 3, 1, 1, 2, 1), (1,) * 8):
        worst = max(_apart(each, model(**built.inputs())) for each in _by_tokens(model, plan, built.inputs, shares)[0])
        case.check(f"eight cards {shares}", worst < NEAR, worst)


@case
def tokens_exchange(case: Case, host: Host) -> None:
    """In 8 bits the picture is near; by groups of heads, and with full, it has the bits that it had."""
    for name in ("flux1_heads", *in_long_runs("wan_heads", "qwen_image", "sd3", "ltxv", "minimax_h3", "hidream")):
        for way in ("tokens", "tensor") if name in DIVIDED else ("tokens",):
            made = functools.partial(split, way=way)
            full = host.sample(made(host.load(name)), name)
            host.unload_all()
            shared = made(host.load(name), exchange="8-bit", verify=way == "tokens")
            said, _ = describe_split(shared)
            case.check(f"{name}, {way}: it says so", "exchange 8-bit" in said, said)
            output = host.sample(shared, name)
            case.differs(f"{name}, {way}: it does something", output, full)
            near(case, f"{name}, {way}: in 8 bits", output, full, IN_8_BITS)
            case.equal(f"{name}, {way}: again", host.sample(shared, name), output)
            host.unload_all()
            case.equal(f"{name}, {way}: full as before", host.sample(made(host.load(name)), name), full)
            host.unload_all()
        one, counts, attend = host.sample(tokens(host.load(name)), name), [], Gathered.attend

        def noted(self: Gathered, *args: Any, counts: list[int] = counts, attend: Any = attend) -> Any:
            counts.append(self.num)
            return attend(self, *args)

        with (
            mock.patch.object(tokens_module, "_num_groups", return_value=(4, 4)),
            mock.patch.object(Gathered, "attend", noted),
        ):
            near(case, f"{name}: by groups of heads", host.sample(tokens(host.load(name)), name), one, 1e-6)
        case.check(f"{name}: it was by groups", max(counts) > 1, set(counts))
        host.unload_all()
    said, _ = describe_split(blocks := split(host.load("flux1"), exchange="8-bit"))
    case.check("blocks have no use for it", "exchange 8-bit: of no use" in said, said)
    case.equal("and ignore it", host.sample(blocks, "flux1"), host.sample(split(host.load("flux1")), "flux1"))


# What is done by each way: with models of way blocks, tensor and tokens.
_BY_EACH: dict[str, tuple[Callable[..., None], Any, Any, Any]] = {
    "loras": (
        loras, ("flux1",), ("flux2_heads", *in_long_runs("wan_heads", "qwen_image")),
        ("flux2", *in_long_runs("wan", "qwen_image")),
    ),
    "controlnets": (
        functools.partial(controlnets, cfg=3.0), ("flux1", "sdxl", *in_long_runs(*_RESIDUALS)),
        ("flux1_heads", "qwen_image", "hunyuan_video_heads"),
        ("flux1", *in_long_runs("chroma", "hunyuan_video", "qwen_image", "sd3")),
    ),
    "context_windows": (context_windows, "wan", "wan_heads", "wan"),
}  # fmt: skip
for _what, (_run, _placed, _divided, _shared) in _BY_EACH.items():
    CASES[f"blocks_{_what}"] = lambda case, run=_run, names=_placed: run(case, names, in_one_batch, 0.0)
    CASES[f"tensor_{_what}"] = lambda case, run=_run, names=_divided: run(case, names, tensor)
    CASES[f"tokens_{_what}"] = lambda case, run=_run, names=_shared: run(case, names, tokens, NEAR)


def verified(case: Case, name: str, layer: str, *words: str, **options: Any) -> None:
    """A step is compared with one card, and a wrong one ends the run."""
    host = case.host
    with case.logged("devicebridge", 20) as messages:
        host.sample(tokens(host.load(name), verify=True), name, **options)
    for word in ("on one card", *words):
        case.check(f"it says {word}", any(word in each for each in messages), messages)
    wrong = tokens(host.load(name), verify=True)
    other = wrong.model.devicebridge_split.shards[OTHER].diffusion_model
    other.get_submodule(layer).register_forward_hook(lambda module, args, output: output * 3)
    sample = functools.partial(host.sample, wrong, name, **options)
    case.refused("a wrong card", sample, RuntimeError, "on one card", "way to blocks")


@case
def tokens_verified(case: Case) -> None:
    verified(case, "wan", "blocks.3.ffn")


@case
def tokens_stopped_inside_a_block(case: Case) -> None:
    """In a preview as well."""
    sample = stopped_inside_a_block(case, "flux2", tokens)
    cancel = comfy.model_management.InterruptProcessingException()
    reference = sample()
    case.refused("Cancel of a preview", functools.partial(sample, callback=mock.Mock(side_effect=cancel)), type(cancel))
    case.equal("after it", sample(), reference)


def _scheduled(host: Host, model: Any, strengths: tuple[float, ...]) -> torch.Tensor:
    positive = hooked(NAME, 1, 1, [(strength, index / 5) for index, strength in enumerate(strengths)])
    return host.sample(model, NAME, cfg=3.0, steps=3, positive=positive, negative=hooked(NAME, 2, 2))


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: on_cpu(each).clone() for name, each in model.named_parameters()}


@case
def tokens_scheduled_loras(case: Case, host: Host) -> None:
    """Every card's copy gets the weights that one card has for this conditioning in this step, and its own back."""
    loaded = host.load(NAME)
    given, strengths = _weights(loaded.model.diffusion_model), (1.0, 0.5, 0.0)
    unsplit = host.load(NAME, load_device=CPU)
    reference, clean = _scheduled(host, unsplit, strengths), host.sample(unsplit, NAME)
    shared, seen = tokens(loaded), list[dict[str, torch.Tensor]]()
    models = [shared.model.diffusion_model, shared.model.devicebridge_split.shards[OTHER].diffusion_model]
    run = TokenParallel.run

    def see(self: TokenParallel, calls: Any, *replays: Any) -> Any:
        weights = [_weights(model) for model in models]
        case.check("all cards alike", all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]))
        seen.append(weights[1])
        return run(self, calls, *replays)

    key = "single_blocks.0.linear1.weight"
    with mock.patch.object(TokenParallel, "run", see):
        output = _scheduled(host, shared, strengths)
    near(case, "as unsplit", output, reference, NEAR)
    case.check("two conditionings a step", len(seen) == 6, len(seen))
    kinds = {each[key].double().sum().item() for each in seen}
    case.check("three strengths of one, one of the other", len(kinds) == 4, kinds)
    near(case, "without", host.sample(shared, NAME), clean, NEAR)
    size = sum(parameter.nbytes for parameter in loaded.model.diffusion_model.parameters())
    for seed in in_long_runs(3):
        over = _scheduled(host, host.lora(unsplit, NAME, seed), strengths)
        near(case, "over a LoRA", _scheduled(host, host.lora(shared, NAME, seed), strengths), over, NEAR)
        host.free(OTHER)
        case.equal("after a card was cleared", _scheduled(host, shared, strengths), output)
        host.unload_all()
        with host.machine.room_for(size // 2, HOME), host.machine.room_for(size // 2, OTHER):
            near(case, "streamed to both", _scheduled(host, shared, strengths), reference, NEAR)
        near(case, "without again", host.sample(shared, NAME), clean, NEAR)
    sides = {"positive": FAMILIES[NAME].condition(1), "negative": hooked(NAME, 2, 2)}
    reference = host.sample(unsplit, NAME, cfg=3.0, **sides)
    for part in (shared, *in_long_runs(*shared.companions)):
        unload = functools.partial(part.partially_unload, CPU, size // 2)
        moved = host.sample(shared, NAME, cfg=3.0, callback=lambda *args, unload=unload: unload(), **sides)
        near(case, f"{part.load_device} loses weights between steps", moved, reference, NEAR)
    now = _weights(loaded.model.diffusion_model)
    case.check("the given MODEL is as it was", all(torch.equal(now[name], given[name]) for name in given))
    left = [kept for each in (shared, *shared.companions) for kept in (each.hook_backup, each.cached_hook_patches)]
    case.check("nothing is kept", not any(left), [len(each) for each in left])


@case
def tokens_another_attention(case: Case, host: Host) -> None:
    """Another of ComfyUI's own gets its card's queries and the keys of all; nobody knows what other code reads."""
    name, own, outputs, calls = "flux1", attention.attention_split, [], []
    for model in (host.load(name, load_device=CPU), tokens(host.load(name))):
        model = model.clone()
        model.set_model_optimized_attention(own)
        outputs.append(host.sample(model, name))
    near(case, "as unsplit", outputs[1], outputs[0], NEAR)

    def stronger(func: Any, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((q.shape[-2], k.shape[-2]))
        return func(q, k * 1.5, *args, **kwargs)

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return stronger(*args, **kwargs)

    shared = tokens(host.load(name))
    patched, chosen, unhashable, tensor = (shared.clone() for _ in range(4))
    one = torch.ones(1, device=HOME)
    tensor.set_model_optimized_attention(lambda *args, **kwargs: own(*args, **kwargs) * one)
    unhashable.model_options["transformer_options"]["optimized_attention_override"] = Unhashable()
    patched.model_options["transformer_options"]["optimized_attention_override"] = stronger
    chosen.set_model_optimized_attention(lambda *args, **kwargs: own(*args, **kwargs))
    given = {"an override": patched, "a kernel": chosen, "an unhashable one": unhashable, "with a tensor": tensor}
    for what, model in given.items():
        case.refused(what, functools.partial(host.sample, model, name), RuntimeError, __name__, "way 'blocks'")
    with mock.patch.object(flux_math, "optimized_attention", attention.wrap_attn(stronger)):
        case.refused("put into ComfyUI", lambda: host.sample(shared, name), RuntimeError, __name__, "way 'blocks'")
    block, own_forward = flux_layers.SingleStreamBlock, flux_layers.SingleStreamBlock.forward
    with mock.patch.object(block, "forward", lambda *args, **kwargs: calls.append(1) or own_forward(*args, **kwargs)):
        case.refused("in a class", lambda: host.sample(shared, name), RuntimeError, "the class SingleStreamBlock by")
    case.check("it never ran", not calls, calls)
    near(case, "the next prompt", host.sample(shared, name), host.sample(host.load(name), name), NEAR)


@case
def tokens_patches_of_comfyui(case: Case, host: Host) -> None:
    """Normalized Attention Guidance, ComfyUI's own node: refused where a class tells it rows of all cards."""

    def guided(model: Any) -> Any:
        return NAGuidance.execute(model, 5.0, 0.5, 1.5).args[0]

    for name in ("flux1", *in_long_runs("flux2", "chroma", "hunyuan_video")):
        unsplit = host.load(name, load_device=CPU)
        reference = host.sample(guided(unsplit), name, cfg=3.0)
        case.differs(f"{name}: it does something", reference, host.sample(unsplit, name, cfg=3.0))
        near(case, name, host.sample(guided(tokens(host.load(name))), name, cfg=3.0), reference, NEAR)
        host.unload_all()
    model, words = guided(tokens(host.load("krea2"))), ("attn1_output_patch", "nodes_nag", "way 'blocks'")
    case.refused("another class", lambda: host.sample(model, "krea2", cfg=3.0), RuntimeError, *words)
    model = tokens(host.load("flux1"))
    patch = functools.wraps(guided(model).model_options["transformer_options"]["patches"]["attn1_output_patch"][0])
    model.set_model_attn1_output_patch(patch(lambda out, extra: out))
    case.refused("by that name", lambda: host.sample(model, "flux1"), RuntimeError, __name__, "way 'blocks'")


@case
def tokens_code_in_the_model(case: Case, host: Host) -> None:
    """What is hooked, replaced or exchanged in the main card's model at any time is refused by name."""
    name = "flux1"
    shared, sample = tokens(host.load(name)), functools.partial(host.sample, name=name, steps=1)
    reference, root = sample(shared), shared.model.diffusion_model
    layer = root.single_blocks[0].linear1
    bypass, _ = comfy.sd.load_bypass_lora_for_models(shared, None, dict(lora_weights(name, 1)), 1.0, 0)
    case.refused("bypass", lambda: sample(bypass), RuntimeError, "comfy.weight_adapter.bypass", "'blocks'")
    case.equal("without it", sample(shared), reference)

    def undo(key: str, value: Any, owner: Any = layer) -> Callable[[], None]:
        before = getattr(owner, key)
        setattr(owner, key, value)
        return lambda: setattr(owner, key, before)

    def hooked() -> Callable[[], None]:
        return layer.register_forward_hook(lambda module, args, output: output * 2).remove

    def forward(x: torch.Tensor) -> torch.Tensor:
        return type(layer).forward(layer, x) * 2

    class Twice(type(layer)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    ways: dict[str, tuple[str, Callable[[], Any]]] = {
        "a hook": ("a hook on single_blocks.0.linear1", hooked),
        "a forward": ("forward of single_blocks.0.linear1", lambda: undo("forward", forward)),
        "a weight": ("weight of single_blocks.0.linear1", lambda: undo("weight", Parameter(layer.weight * 2))),
        "a module": ("module in single_blocks.0", lambda: undo("linear1", copy.copy(layer), root.single_blocks[0])),
        "a number": ("mlp_hidden_dim of single_blocks.0", lambda: undo("mlp_hidden_dim", 5, root.single_blocks[0])),
        "a class": ("class of single_blocks.0.linear1", lambda: undo("__class__", Twice)),
        "a weight's function": ("a weight", lambda: undo("weight_function", [lambda weight: weight * 2])),
    }

    def run(act: Callable[[], Any], call: Callable[[], Any]) -> Any:
        taken_back = act()
        try:
            return call()
        finally:
            taken_back()

    for what, (word, act) in ways.items():
        around = shared.clone()
        around.add_wrapper(
            WrappersMP.DIFFUSION_MODEL,
            lambda executor, *a, act=act, **k: run(act, functools.partial(executor, *a, **k)),
        )
        case.refused(f"{what} of a wrapper", functools.partial(sample, around), RuntimeError, word, "way 'blocks'")
        if what != "a weight's function":  # ComfyUI's loading makes these anew
            word = "numbers in single_blocks.0.linear1.weight" if what == "a weight" else word
            ahead = functools.partial(run, act, functools.partial(sample, shared))
            case.refused(f"{what} ahead of sampling", ahead, RuntimeError, word, "way 'blocks'")
        case.equal(f"{what} is gone", sample(shared), reference)
    patched = shared.clone()
    patched.add_object_patch("diffusion_model.txt_in", copy.copy(root.txt_in))
    case.refused("an object patch", lambda: sample(patched), RuntimeError, "exchanged module", "'blocks'")
    case.equal("it is gone", sample(shared), reference)
    host.unload_all()
    taken_back = undo("_forward", functools.partial(type(root)._forward, root), root)
    case.refused("a method", lambda: sample(shared), RuntimeError, "the replaced _forward", "way 'blocks'")
    taken_back()
    case.equal("the class's own is back", sample(shared), reference)
    ours = vars(root)["_forward"]
    wrapper = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs) * 2)
    taken_back = undo("_forward", wrapper, root)
    refused = functools.partial(sample, shared)
    case.refused("a wrapper of ours", refused, RuntimeError, "the replaced _forward", "way 'blocks'")
    host.unload_all()
    case.check("it is left", vars(root)["_forward"] is wrapper)
    case.refused("a wrapper before loading", refused, RuntimeError, "the replaced _forward", "way 'blocks'")
    taken_back()
    case.equal("the wrapper is gone", sample(shared), reference)
    del root._forward
    case.equal("deleted by a node", sample(shared), reference)


@case
def tokens_code_before_loading(case: Case, host: Host) -> None:
    """Weights and buffers that were exchanged before a load are refused by name, with a LoRA on them too."""
    name = "flux1"
    loaded = host.load(name)
    loaded.model.diffusion_model.register_buffer("table", torch.ones(3))
    shared = tokens(loaded)
    root, key = shared.model.diffusion_model, "single_blocks.0.linear1"
    models = {"plain": shared, "with a LoRA": host.lora(shared, name)}
    references = {what: host.sample(model, name) for what, model in models.items()}
    layer = root.get_submodule(key)
    exchanged: dict[str, tuple[Any, Any]] = {
        f"{key}.weight": (layer, lambda weight: Parameter(weight * 2)),
        "table": (root, lambda table: table * 2),
        f"{key}.bias": (layer, lambda bias: Parameter((bias * 2).double())),
    }
    for weight, (owner, change) in exchanged.items():
        for what, model in models.items():
            host.unload_all()
            short = weight.rpartition(".")[2]
            before = getattr(owner, short)
            setattr(owner, short, change(before))
            words = f"numbers in {weight}", "way 'blocks'"
            case.refused(f"{weight}, {what}", functools.partial(host.sample, model, name), RuntimeError, *words)
            host.unload_all()
            setattr(owner, short, before)
            case.equal(f"{weight}, {what}: it is back", host.sample(model, name), references[what])
    patched = shared.clone()
    patched.add_object_patch(f"diffusion_model.{key}.new", 5)
    case.refused("an object patch", lambda: host.sample(patched, name), RuntimeError, f"patch of diffusion_model.{key}")


@case
def tokens_two_at_once(case: Case) -> None:
    """Attention that is led by name: two forwards end one after the other, and ComfyUI's function is there again."""
    own, plan = ernie.optimized_attention, find_native(ernie.ErnieImageModel).tokens
    built = next(each for each in NATIVE_CASES if each.class_name == "ErnieImageModel")
    models, found = [built.build() for _ in range(2)], {}
    expected = models[0](**built.inputs())
    both = threading.Barrier(2)

    def run(index: int) -> None:
        with torch.inference_mode():
            for _ in range(4):
                both.wait(60)
                found[index] = _by_tokens(models[index], plan, built.inputs, (3, 5))[0]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    worst = [_apart(each, expected) for index in range(2) for each in found.get(index, [])]
    case.check("both are equal to one card", len(worst) == 4 and max(worst) < NEAR, worst)
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(led_by_name(models[0]))
    second.enter_context(led_by_name(models[1]))
    first.close()
    case.check("the second is led on", ernie.optimized_attention is not own)
    case.check("what is no rank is passed on", _apart(models[1](**built.inputs()), expected) == 0)
    second.close()
    case.check("ComfyUI's own is back", ernie.optimized_attention is own)
    with mock.patch.object(ernie, "optimized_attention", own):
        with led_by_name(models[0]):
            ernie.optimized_attention = others = functools.partial(own)
        case.check("what another node has set stays", ernie.optimized_attention is others)


@case
def tokens_refusals(case: Case, host: Host) -> None:
    """What works between or inside the blocks is refused by name, with the way that takes it."""
    name = "flux1"
    shared = tokens(host.load(name))
    for patch in ("attn1_patch", "post_input", "of another version"):
        patched = shared.clone()
        patched.set_model_patch(lambda *args, **kwargs: {}, patch)
        case.refused(patch, functools.partial(host.sample, patched, name), RuntimeError, patch, "way 'blocks'")
    replaced = shared.clone()
    replaced.set_model_patch_replace(lambda args, extra: extra["original_block"](args), "dit", "double_block", 0)
    case.refused("a block", lambda: host.sample(replaced, name), RuntimeError, "the replacement 'dit'", "way 'blocks'")
    near(case, "the model is as before", host.sample(shared, name), host.sample(host.load(name), name), NEAR)
    case.refused("a class", lambda: tokens(host.load("sdxl")), ValueError, "UNetModel", "way 'blocks'")
    case.refused("twice", lambda: tokens(shared), ValueError, "split with way 'tokens'")


@case
def tokens_fewer_rows_than_cards(case: Case, host: Host) -> None:
    """One card computes a forward of which a card would have no row, and the log says so once."""
    name = "flux1"
    small, short = {"latent": (16, 2, 2)}, {"positive": FAMILIES[name].condition(1, 1)}
    given = {"an image of one row": (small, (HOME, OTHER)), "a text of one row": (short, (HOME, OTHER))}
    given["an image of two rows on three cards"] = {"latent": (16, 2, 4)}, (HOME, OTHER, THIRD)
    for what, (options, devices) in given.items():
        reference = host.reference(name, **options)
        shared = tokens(host.load(name), *devices)
        with case.logged("devicebridge", logging.INFO) as messages:
            near(case, what, host.sample(shared, name, **options), reference, NEAR)
        said = [each for each in messages if "one card computes" in each]
        case.check(f"{what}: said once", len(said) == 1, said)
        near(case, f"{what}: then a usual one", host.sample(shared, name), host.sample(host.load(name), name), NEAR)
    shared = tokens(host.load("wan"), HOME, OTHER, THIRD)  # shares end with frames in the 5B alone
    reference = host.reference("wan", latent=(16, 1, 4, 4))
    near(case, "a clip of one frame", host.sample(shared, "wan", latent=(16, 1, 4, 4)), reference, NEAR)


@case
def tokens_scaled_fp8_files(case: Case, host: Host) -> None:
    """Files in 8 bits: every card has the file's own numbers, with a LoRA those that one card rounds to."""
    kinds = {"fp8": "wan", **dict(in_long_runs(("scaled_fp8", "flux1"), ("int8", "flux1"), ("int8_rows", "wan")))}
    for kind, name in kinds.items():
        path, most = FILES[kind](host, name), NEAR if "fp8" in kind else IN_8_BITS  # activations round to int8, too
        one = _load(path, name, load_device=CPU)
        plain, with_lora = host.sample(one, name), host.sample(host.lora(one, name), name)
        case.differs(f"{kind}: 8 bits do something", plain, host.reference(name))
        shared = tokens(_load(path, name))
        near(case, kind, host.sample(shared, name), plain, most)
        case.check(f"{kind}: each card holds 8 bits", min(map(len, _eight_bit(shared).values())) > 5)
        near(case, f"{kind}: with a LoRA", host.sample(host.lora(shared, name), name), with_lora, most)
        near(case, f"{kind}: without it", host.sample(shared, name), plain, most)
        host.unload_all()
    path, name = FILES["fp8"](host, "wan"), "wan"
    plain = host.sample(_load(path, name), name)
    with _products_in_fp8():
        one, shared = _load(path, name), tokens(_load(path, name))
    # Sums in another order round a few activations to other numbers, and others follow. The CPU decides how many.
    found, expected = host.sample(shared, name), host.sample(one, name)
    near(case, "products in 8 bits", found, expected, 2 * IN_8_BITS)
    apart = [float((found - each).norm()) for each in (expected, plain)]
    case.check("products in 8 bits on all cards", apart[0] < 0.75 * apart[1], apart)


@case
def tokens_clones_and_eviction(case: Case, host: Host) -> None:
    """Clones with different LoRAs in turn, a card that another model takes between prompts and steps, little room."""
    name = "flux2"
    shared = tokens(host.load(name))
    clones, references = clones_in_turn(case, name, shared, NEAR)
    size = sum(parameter.nbytes for parameter in shared.model.diffusion_model.parameters())
    for device in (HOME, OTHER):
        part = next(each for each in (clones[1], *clones[1].companions) if each.load_device == device)
        unloaded = functools.partial(part.partially_unload, CPU, size // 2)
        output = host.sample(clones[1], name, callback=lambda *args, unloaded=unloaded: unloaded())
        near(case, f"{device} loses some at each step", output, references[1], NEAR)
        case.check(f"{device} lost them", part.loaded_size() <= size // 2, f"{part.loaded_size()} of {size}")
        host.unload_all()
        with host.machine.room_for(size // 2, device):
            near(case, f"streamed on {device}", host.sample(clones[1], name), references[1], NEAR)
        host.unload_all()


@long_case
def tokens_many_prompts(case: Case) -> None:
    """This way and the others in turn, through Cancel and errors: the same bits, and nothing grows."""
    found = run_prompts(case.host, 100, seed=1)
    case.check("no output differs, and nothing grows", not faults_of(found), (faults_of(found), found))
    ended = found["ended"]
    case.check("prompts were cancelled and failed", ended["was cancelled"] and ended["failed"], ended)


@case
def tokens_come_back_to_the_same_host_memory(case: Case, host: Host) -> None:
    """Each card has the whole model, and host memory has it once: as loaded, unloaded, and with a LoRA."""
    name = "flux1_heads"
    with small_sizes(FAMILIES[name]):
        model = load_split_model(host.checkpoint(name), "default", SplitRequest((HOME, OTHER), way="tokens"))
    for what, each in (("as loaded", None), ("unloaded", model), ("with a LoRA", host.lora(model, name))):
        if each is not None:
            host.sample(each, name)
            host.unload_all()
        weights = [weight for card in (model, *model.companions) for weight in card.model.parameters()]
        found = {weight.data_ptr(): weight.nbytes for weight in weights if weight.device == CPU}
        once = sum(weight.nbytes for weight in model.model.parameters())
        case.check(what, sum(found.values()) == once > 0, (sum(found.values()), once))


@case
def tokens_of_one_card_remember_no_lora(case: Case, host: Host) -> None:
    """HiDream-O1 keeps a prompt's keys for its next forward, also where one card has to compute it."""
    name = "hidream_o1"
    clean, model = (split(host.load(name), way="tokens", shares=(1.0, 9.0)) for _ in range(2))
    with case.logged("devicebridge", logging.INFO) as messages:
        expected = host.sample(clean, name)
    case.check("one card computes", any("one card computes" in each for each in messages), messages)
    case.differs("with a LoRA", host.sample(host.lora(model, name), name), expected)
    case.equal("then without", host.sample(model, name), expected)


@case
def tokens_see_a_hook_that_comes_in_the_middle_of_a_run(case: Case, host: Host) -> None:
    """Behind a run's first forward the host looks while the cards compute."""
    name = "flux1_heads"
    model = split(host.load(name), way="tokens")
    expected, handles = host.sample(model, name), list[Any]()
    layer = model.model.diffusion_model.double_blocks[0].img_mlp[0]

    def hook_it(step: int, *_: Any) -> None:
        if step == 0:
            handles.append(layer.register_forward_hook(lambda module, args, output: output * 2))

    case.refused("a hook", functools.partial(host.sample, model, name, callback=hook_it), RuntimeError, "way 'blocks'")
    handles[0].remove()
    case.equal("without it", host.sample(model, name), expected)


_WAYS: tuple[tuple[tuple[int, ...], int, Any], ...] = (  # shares, groups of heads, exchange
    *((shares, 1, "full") for shares in ((1, 1), (3, 5), (2, 3, 3), (1, 1, 1, 1), (4, 3, 5, 4))),
    ((1, 1, 1), 4, "full"),
    ((2, 1), 4, "8-bit"),
)
_FEW_ROWS = {"cosmos_predict2", "anima", "stable_audio_3", "hidream_o1", "hidream_o1_uncached"}  # in these builds
_PIXELS = {"PixDiT_T2I": 3e-6, "PidNet": 1e-5}  # their decoders multiply differences
# As the executor has it, so that no keys of earlier forwards are read.
_CACHES = {"hidream_o1": {"patches_replace": {"dit": {"of no block": None}}}}


def _whole(model: torch.nn.Module, plan: TokenPlan, inputs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
    """The forward of one card, and the keys of its attentions in their order."""
    cards: Any = Cards((model,), (model,), (CPU,), tuple(plan.blocks), None)  # type: ignore[arg-type]
    output, notes = cards.whole(inputs)
    return output, notes.keys_seen(by_options=plan.passes_options)


def _with_attention(inputs: dict[str, Any], rows: Any) -> dict[str, Any]:
    options = {**(inputs.get("transformer_options") or {}), "optimized_attention_override": rows.attend}
    return {**inputs, "transformer_options": options}


def _by_tokens(model, plan, inputs, shares, groups=1, exchange="full") -> tuple[list[Any], list[torch.Tensor]]:
    """What every rank's forward returns, and the gathered keys on the first."""
    models, keys = [copy.deepcopy(model) for _ in shares], []
    devices, send = [CPU] * len(shares), lambda tensors, rank, arrivals: tensors
    rows = TokenParallel(models, devices, plan, shares, send, groups, exchange)
    rows.on_keys = lambda rank, axis, k: rank or axis == "-" or keys.append(k.detach().clone())
    rows.attach()

    def run(rank: int) -> Any:
        given = inputs()
        if given.get("control") and plan.control:
            here = rows.rows
            assert here is not None
            given["control"] = {name: RowResiduals(each, here, plan.control) for name, each in given["control"].items()}
        return models[rank](**(_with_attention(given, rows) if plan.passes_options else given))

    with contextlib.nullcontext() if plan.passes_options else led_by_name(model):
        outputs = rows.run([functools.partial(run, rank) for rank in range(len(shares))])
    rows.remove()
    return outputs, keys


def _apart(found: Any, expected: Any) -> float:
    pairs = zip(*(list(each) if isinstance(each, (list, tuple)) else [each] for each in (found, expected)), strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)) for a, b in pairs)


def _in_order(keys: list[torch.Tensor], whole: list[torch.Tensor]) -> bool:
    """Whether all of these keys are among one card's, in its order, row by row."""
    left = iter(whole)
    return all(
        any(
            each.shape == key.shape and float((each - key).abs().max()) <= 1e-4 * float(each.abs().max())
            for each in left
        )
        for key in keys
    )


@long_case
def tokens_every_class(case: Case) -> None:
    """Each class that has a plan, in a build whose every layer changes the output: equal, with the keys of one card. In
    8 bits it is near, by a hundredth of the largest value at most, and mostly by a thousandth."""
    for native in NATIVE_CASES:
        row = find_native(native.model_class)
        plan = row.tokens
        if not plan.blocks:
            case.check(f"{native.name}: a reason", row.no_tokens, row)
            continue
        model = native.build()
        if native.name in _CACHES:
            refused = functools.partial(_by_tokens, model, plan, native.inputs, (3, 5))
            case.refused(f"{native.name}: keys of earlier forwards", refused, RuntimeError, "past_key_value")

        def inputs(native: Any = native) -> dict[str, Any]:
            given = native.inputs()
            options = {**given.get("transformer_options", {}), **_CACHES.get(native.name, {})}
            return {**given, "transformer_options": options}

        expected, whole = _whole(model, plan, inputs())
        for way in _WAYS:
            try:
                outputs, keys = _by_tokens(model, plan, inputs, *way)
            except OneDeviceError as error:
                case.check(f"{native.name} {way}: one card", native.name in _FEW_ROWS, error)
                continue
            worst = max(_apart(each, expected) for each in outputs)
            if way[2] == "8-bit":
                case.check(f"{native.name} {way}: near", 0 < worst < 0.01, worst)
                continue
            case.check(f"{native.name} {way}: equal", worst < _PIXELS.get(native.class_name, 1e-6), worst)
            case.check(f"{native.name} {way}: keys of one card", bool(keys) and _in_order(keys, whole), len(keys))


@long_case
def tokens_of_a_causal_condition(case: Case) -> None:
    """Qwen-Image 2.1's: a prompt's rows see those before them. ComfyUI's attention for CPUs adds masks of truth values
    to the scores, so torch's is in its place."""
    built = QWEN_IMAGE_21
    if not built.is_there:
        case.check(f"skipped: this ComfyUI has no {built.class_name}", True)
        return
    plan, model = find_native(built.model_class).tokens, built.build()
    with mock.patch.object(importlib.import_module(built.module), "optimized_attention", attention.attention_pytorch):
        expected, _ = _whole(model, plan, built.inputs())
        for way in _WAYS:
            worst = max(_apart(each, expected) for each in _by_tokens(model, plan, built.inputs, *way)[0])
            case.check(f"{way}: equal", worst < (0.01 if way[2] == "8-bit" else 1e-6), worst)
