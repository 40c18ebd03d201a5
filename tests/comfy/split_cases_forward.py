"""What other nodes hang into a forward: ControlNets, patches, replacements and wrappers, written for one device.

Whatever a node brings along lies on the model's own device, so it is made there here: at home for a split MODEL, on the
CPU for the unsplit reference.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.model_management
import comfy.ops
import comfy.patcher_extension
import torch
from comfy.ldm.flux.layers import DoubleStreamBlock
from comfy.ldm.modules.attention import SpatialTransformer
from comfy.ldm.modules.diffusionmodules.openaimodel import ResBlock
from comfy_api.torch_helpers import set_torch_compile_wrapper
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs, split
from devicebridge.tests.comfy.split_host import HOME, Host
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

Change = Callable[[Any, torch.device], None]


def compare(
    case: Case, claim: str, name: str, change: Change, *, settings: Any = ({},), is_before: bool = False, **options: Any
) -> None:
    """A split MODEL, then changed, computes as the unsplit one changed the same way; and the change does something.
    settings: of splits. is_before: also twice, and changed before the split. options: of samplings."""
    host, clean = case.host, case.host.reference(name, **options)
    reference = host.sample(_changed(host.load(name, load_device=CPU), change, CPU), name, **options)
    case.differs(f"{claim}: it does something", reference, clean)
    for request in settings:
        divided = _split_by(request, host.load(name))
        for when in ("after the split", "again")[: 1 + is_before]:
            output = host.sample(_changed(divided, change, HOME), name, **options)
            case.equal(f"{claim}, {request}: {when}", output, reference)
        if is_before:
            before = _split_by(request, _changed(host.load(name), change, HOME))
            case.equal(f"{claim}, {request}: before the split", host.sample(before, name, **options), reference)
        host.unload_all()


_compare = functools.partial(compare, is_before=True)


def _split_by(request: Mapping[str, Any], model: Any) -> Any:
    return split(model, *request.get("devices", ()), **{key: each for key, each in request.items() if key != "devices"})


def _changed(model: Any, change: Change, device: torch.device) -> Any:
    model = model.clone()
    change(model, device)
    return model


def _noise(*shape: int, device: torch.device = CPU, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device)


class Residuals(comfy.controlnet.ControlBase):
    """A ControlNet that needs no model: the same residuals at every step, on the device it is asked from."""

    def __init__(self, shapes: Mapping[str, Sequence[tuple[int, ...]]]) -> None:
        super().__init__()
        self.shapes = shapes
        self.asked_on: set[str] = set()

    def get_control(self, x_noisy: torch.Tensor, *args: Any) -> dict[str, list[torch.Tensor | None]]:
        self.asked_on.add(str(x_noisy.device))
        residuals: dict[str, list[torch.Tensor | None]] = {"input": [], "middle": [], "output": []}
        for key, shapes in self.shapes.items():
            for number, shape in enumerate(shapes):
                one = _noise(1, *shape, device=x_noisy.device, seed=number)
                residuals[key].append(one.repeat(x_noisy.shape[0], *(1 for _ in shape)))
        return residuals


_RESIDUALS: dict[str, Mapping[str, Sequence[tuple[int, ...]]]] = {
    "flux1": {"input": [(16, 128)] * 2, "output": [(16, 128)] * 4},
    "chroma": {"input": [(16, 128)] * 2, "output": [(16, 128)] * 4},
    "hunyuan_video": {"input": [(8, 128)] * 2, "output": [(8, 128)] * 3},
    "qwen_image": {"input": [(16, 64)] * 4},
    "sd3": {"output": [(16, 192)] * 3},
    "sdxl": {  # the UNet takes them from the end
        "input": [(128, 4, 4), (64, 4, 4), (64, 8, 8), (64, 8, 8)],
        "middle": [(128, 4, 4)],
        "output": [(64, 8, 8), (64, 8, 8), (64, 4, 4), (128, 4, 4)],
    },
}
_RESIDUALS |= {f"{name}_heads": _RESIDUALS[name] for name in ("flux1", "hunyuan_video")}


def _real_controlnet(device: torch.device) -> Any:
    config = dict(FAMILIES["flux1"].unet_config)
    net = comfy.ldm.flux.controlnet.ControlNetFlux(
        **config, dtype=torch.float32, operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    control = comfy.controlnet.ControlNet(net, load_device=device, extra_conds=["y", "guidance"])
    return control.set_cond_hint(torch.rand(1, 3, 64, 64, generator=generator), strength=0.7)


@case
def a_real_controlnet(case: Case, host: Host) -> None:
    """ComfyUI's ControlNet for FLUX with a model of its own, loaded beside the split one."""
    family = FAMILIES["flux1"]
    outputs = {}
    for device, model in ((CPU, host.load("flux1", load_device=CPU)), (HOME, split(host.load("flux1")))):
        control = _real_controlnet(device)
        positive = family.condition(1)
        positive[0][1] |= {"control": control, "control_apply_to_uncond": False}
        outputs[device] = host.sample(model, "flux1", cfg=3.0, positive=positive)
        case.differs("it does something", outputs[device], host.sample(model, "flux1", cfg=3.0))
    case.equal("as unsplit", outputs[HOME], outputs[CPU])


@case
def patches_between_blocks(case: Case) -> None:
    """double_block patches with a tensor of their own, which write in place and return."""

    def change(model: Any, device: torch.device, shape: tuple[int, ...]) -> None:
        bias = 0.5 * _noise(*shape, device=device)

        def patch(args: dict[str, Any]) -> dict[str, Any]:
            args["img"] += bias
            return {**args, "img": args["img"] * 1.1}

        model.set_model_double_block_patch(patch)

    more = in_long_runs(("qwen_image", (1, 16, 64)), ("z_image", (1, 1, 256)))
    for name, shape in (("wan", (1, 8, 128)), *more):
        _compare(case, name, name, lambda model, device: change(model, device, shape), cfg=3.0)  # noqa: B023


@case
def patches_of_a_unet(case: Case) -> None:
    def change(model: Any, device: torch.device) -> None:
        bias = 0.3 * _noise(1, 1, 1, 1, device=device)
        model.set_model_input_block_patch(lambda h, options: h + bias)
        model.set_model_input_block_patch_after_skip(lambda h, options: h * 0.9 + bias)
        model.set_model_output_block_patch(lambda h, skip, options: (h * 1.1, skip + bias))
        model.set_model_middle_block_after_patch(lambda args: {"h": args["h"] - bias})
        model.set_model_emb_patch(lambda emb, channels, options: emb + bias.flatten())

    _compare(case, "sdxl", "sdxl", change, cfg=3.0)


@case
def layers_run_by_a_patch(case: Case) -> None:
    """forward_timestep_embed patches are pairs (class, handler), and the handler calls the layer itself."""

    def change(model: Any, device: torch.device) -> None:
        bias = 0.3 * _noise(1, 1, 1, 1, device=device)
        model.set_model_forward_timestep_embed_patch((ResBlock, lambda layer, x, emb, *rest: layer(x, emb) + bias))
        model.set_model_forward_timestep_embed_patch(
            (SpatialTransformer, lambda layer, x, emb, context, options, *rest: layer(x, context, options) * 0.9)
        )

    _compare(case, "sdxl", "sdxl", change)


@case
def what_is_around_the_model(case: Case) -> None:
    def change(model: Any, device: torch.device) -> None:
        bias = _noise(1, 16, 8, 8, device=device)
        model.set_model_unet_function_wrapper(
            lambda run, given: run(given["input"] + 0.1 * bias, given["timestep"], **given["c"]) * 1.01
        )
        model.set_model_rope_options(1.5, 0.0, 0.7, 2.0, 1.0, 0.0)

    _compare(case, "flux1", "flux1", change, cfg=3.0)


@case
def injections_and_callbacks(case: Case, host: Host) -> None:
    """What a pack installs when a MODEL is loaded sees every block, and is gone when it is unloaded."""
    extension = comfy.patcher_extension
    seen: dict[str, list[int]] = {"inject": [], "eject": [], "load": []}

    def count(patcher: Any) -> int:
        return len(patcher.model.diffusion_model.single_blocks)

    def change(model: Any) -> Any:
        model = model.clone()
        injection = extension.PatcherInjection(
            inject=lambda patcher: seen["inject"].append(count(patcher)),
            eject=lambda patcher: seen["eject"].append(count(patcher)),
        )
        model.set_injections("test", [injection])
        model.add_callback(extension.CallbacksMP.ON_LOAD, lambda patcher, *args: seen["load"].append(count(patcher)))
        return model

    divided = change(split(host.load("flux1")))
    reference = host.reference("flux1")
    case.equal("as unsplit", host.sample(divided, "flux1"), reference)
    host.unload_all()
    for name, counts in seen.items():
        case.check(f"{name} saw all four single blocks", bool(counts) and set(counts) == {4}, counts)
    seen_before = {name: list(counts) for name, counts in seen.items()}
    host.sample(split(host.load("flux1")), "flux1")
    case.check("another MODEL has none of it", seen == seen_before, seen)


@case
def an_unknown_class(case: Case, host: Host) -> None:
    """A class nobody described: its blocks are found, relayed, and it computes the same."""
    reference = host.reference("flux1")
    model = host.load("flux1")
    known = type(model.model.diffusion_model)
    stranger = type("Stranger", known.__bases__, dict(known.__dict__, __module__="tests"))
    model.model.diffusion_model.__class__ = stranger
    with case.logged("devicebridge") as messages:
        divided = split(model)
    case.check("a note says so", any("Stranger" in message for message in messages), messages)
    case.equal("as unsplit", host.sample(divided, "flux1"), reference)
    case.equal("again", host.sample(divided, "flux1"), reference)
    case.equal("with cfg", host.sample(divided, "flux1", cfg=3.0), host.reference("flux1", cfg=3.0))
    host.unload_all()
    past_hooks = mock.patch.object(DoubleStreamBlock, "__call__", lambda self, *args, **kw: self.forward(*args, **kw))
    model = host.load("flux1", dtype=torch.float8_e4m3fn)  # such weights are cast to where their inputs are
    model.model.diffusion_model.__class__ = stranger
    with past_hooks:
        sample = functools.partial(host.sample, split(model), "flux1")
        case.refused("blocks that are no modules to it", sample, RuntimeError, "double_blocks", "without a split")


@case
def compiling_the_whole_is_refused(case: Case, host: Host) -> None:
    divided = split(host.load("flux1"))
    set_torch_compile_wrapper(divided, backend="eager")
    case.refused("at sampling", lambda: host.sample(divided, "flux1"), ValueError, "compile", "single blocks")
    whole = host.load("flux1")
    set_torch_compile_wrapper(whole, backend="eager")
    case.refused("at the split", lambda: split(whole), ValueError, "compile", "behind the split")


@case
def compiling_block_by_block(case: Case, host: Host) -> None:
    """Compile nodes swap modules for the time of a forward; emulated cards keep them from being compiled as well."""
    reference = host.reference("flux1")
    divided = split(host.load("flux1"))
    compiled = divided.clone()
    keys = [f"diffusion_model.double_blocks.{i}" for i in range(2)]
    keys += [f"diffusion_model.single_blocks.{i}" for i in range(4)]
    set_torch_compile_wrapper(compiled, backend="eager", keys=keys)
    for number in range(2):
        case.equal(f"compiled, run {number}", host.sample(compiled, "flux1"), reference)
    case.equal("not compiled", host.sample(divided, "flux1"), reference)


@case
def an_error_inside_a_block(case: Case, host: Host) -> None:
    """A forward that fails leaves a MODEL that works."""
    reference = host.reference("flux1")
    divided = split(host.load("flux1"))
    broken = divided.clone()

    def fail(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        extra["original_block"](args)
        raise stop

    broken.set_model_patch_replace(fail, "dit", "single_block", 3)
    # Cancel is no Exception, so torch runs no hooks behind it.
    for stop in (InterruptedError("stopped by the user"), comfy.model_management.InterruptProcessingException()):
        case.refused(type(stop).__name__, functools.partial(host.sample, broken, "flux1"), type(stop))
        bridge = divided._tree.bridge
        case.check("no forward is left running", not bridge.is_running and not bridge._local.guards)
        case.equal("the next one is right", host.sample(divided, "flux1"), reference)


@case
def reference_latents(case: Case, host: Host) -> None:
    """Edit models take further latents into their sequence."""
    extra = {"flux1": (1, 16, 6, 6), "flux2": (1, 128, 2, 4), "qwen_image": (1, 16, 1, 6, 8)}
    for name, shape in extra.items():
        positive = FAMILIES[name].condition(1)
        positive[0][1]["reference_latents"] = [_noise(*shape, device=CPU)]
        reference = host.reference(name, positive=positive)
        case.differs(f"{name}: it does something", reference, host.reference(name))
        case.equal(name, host.sample(split(host.load(name)), name, positive=positive), reference)


@case
def without_inference_mode(case: Case, host: Host) -> None:
    for name in ("flux1", "wan"):
        reference = host.reference(name, cfg=3.0)
        with torch.inference_mode(False), torch.no_grad():
            divided = split(host.load(name), overlap=False)
            case.equal(name, host.sample(divided, name, cfg=3.0), reference)
            overlapping = host.sample(split(host.load(name)), name, cfg=3.0)
        case.equal(f"{name}, overlapping", overlapping, host.sample(split(host.load(name)), name, cfg=3.0))
        host.unload_all()


@case
def options_are_not_written_to(case: Case, host: Host) -> None:
    """What the user's nodes put into the MODEL's options is still there, and the same, after a run."""
    divided = split(host.load("wan")).clone()

    def patch(args: dict[str, Any]) -> dict[str, Any]:
        return args

    def replacement(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return extra["original_block"](args)

    divided.set_model_double_block_patch(patch)
    divided.set_model_patch_replace(replacement, "dit", "double_block", 3)
    options = divided.model_options["transformer_options"]
    host.sample(divided, "wan", cfg=3.0)
    case.check("the patch", options["patches"]["double_block"] == [patch], options["patches"])
    case.check("the replacement", options["patches_replace"]["dit"][("double_block", 3)] is replacement)
    case.check("the options", divided.model_options["transformer_options"] is options)
