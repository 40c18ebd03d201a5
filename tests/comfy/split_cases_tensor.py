"""A MODEL whose blocks all cards compute together, by its whole path; the reference is the unsplit run on the CPU.

The cards add partial sums, so an output is near the reference and not its bits: within 1e-4 of its size in float32
after two steps. Two runs of the same have the same bits.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import comfy.lora
import comfy.sd
import comfy.weight_adapter
import torch
from devicebridge.nodes.host.split.plan import SplitRequest
from devicebridge.nodes.host.split.tensor import plan_tensor
from devicebridge.nodes.host.split.tree import SplitTree
from devicebridge.parallel.local import tensor_parallel
from devicebridge.parallel.local.collectives import Collective
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, long_case, split
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS, Residuals
from devicebridge.tests.comfy.split_classes import DIVIDED
from devicebridge.tests.comfy.split_host import HOME, OTHER, THIRD, Host, live_bytes
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, lora_weights

NEAR = 1e-4


def near(case: Case, claim: str, output: torch.Tensor, reference: torch.Tensor, bound: float = NEAR) -> None:
    """bound: of the reference's size; 0 for the same bits."""
    if not bound:
        return case.equal(claim, output, reference)
    difference = float((output - reference).norm() / reference.norm())
    case.check(claim, difference < bound and bool(reference.std() > 1e-3), f"{difference:.3g} of the size")


def clones_in_turn(case: Case, name: str, model: Any, bound: float = NEAR) -> tuple[list[Any], list[torch.Tensor]]:
    """Clones of a split MODEL with two LoRAs in turn, from which another model takes a card; and unsplit latents."""
    host = case.host
    references = [host.reference(name, seed) for seed in (1, 2)]
    clones = [host.lora(model, name, seed=seed) for seed in (1, 2)]
    for turn in range(2):
        for index, clone in enumerate(clones):
            near(case, f"clone {index}, turn {turn}", host.sample(clone, name), references[index], bound)
        host.free((HOME, OTHER)[turn])
    near(case, "after it lost a card", host.sample(clones[0], name), references[0], bound)
    return clones, references


def tensor(model: Any, *devices: torch.device, **options: Any) -> Any:
    return split(model, *devices, way="tensor", **options)


def as_unsplit(case: Case, name: str, divided: Any, bound: float = NEAR) -> torch.Tensor:
    """By itself, again, with guidance and in a batch; the first output."""
    host = case.host
    reference, guided = host.reference(name), host.reference(name, cfg=4.0)
    output = host.sample(divided, name)
    near(case, "as unsplit", output, reference, bound)
    case.equal("again, with the same bits", host.sample(divided, name), output)
    near(case, "with guidance", host.sample(divided, name, cfg=4.0), guided, bound)
    if not FAMILIES[name].sound:  # MiniMax H3 takes one video at a time
        near(case, "a batch", host.sample(divided, name, batch=2), host.reference(name, batch=2), bound)
    return output


def _family(name: str, case: Case) -> None:
    host = case.host
    model = host.load(name)
    whole = sum(parameter.nbytes for parameter in model.model.diffusion_model.parameters())
    divided = tensor(model)
    output = as_unsplit(case, name, divided)
    held = {device: live_bytes(device) for device in (HOME, OTHER)}
    case.check("no card holds the whole", max(held.values()) < whole, f"{held} of {whole}")
    host.unload_all()
    case.check("nothing stays on the cards", not live_bytes(OTHER), live_bytes(OTHER))
    case.equal("after it was unloaded", host.sample(divided, name), output)


for _name in DIVIDED:
    CASES[f"tensor_{_name}"] = functools.partial(_family, _name)


@case
def tensor_compared_once(case: Case, host: Host) -> None:
    """What the cards compute is compared for the first prompt, and again with other weights."""
    name = "flux1_heads"
    divided = tensor(host.load(name))
    with_lora = host.lora(divided, name)
    compared, check = [], TensorParallel._check

    def note(self: TensorParallel, *args: Any) -> None:
        compared.append(self)
        check(self, *args)

    with mock.patch.object(TensorParallel, "_check", note):
        for model, times in ((divided, 1), (divided, 1), (with_lora, 2), (with_lora, 2), (divided, 3)):
            host.sample(model, name)
            blocks = len(model.model.devicebridge_split.bridge.blocks)
            case.check(f"{times} times", len(compared) == times * blocks > 0, len(compared))


@case
def tensor_of_a_model_that_is_not_in_host_memory(case: Case) -> None:
    """A prompt may have loaded it before; it is unloaded, or stays there, only after all cards' bytes are planned."""
    base = case.host.load("flux2_heads").model
    plan = plan_tensor(base.diffusion_model, SplitRequest((HOME, OTHER), way="tensor"))
    expected = plan.bytes_on(base.diffusion_model)
    base.diffusion_model.to("meta")  # weights on emulated cards have a type of their own, which is not divided
    found = plan.bytes_on(base.diffusion_model)
    case.check("as many bytes", found == expected and min(found.values()) > 0, (found, expected))
    case.refused("where it stays", lambda: SplitTree(base, plan), ValueError, "stay on meta", "--highvram")


@case
def tensor_three_cards(case: Case, host: Host) -> None:
    for name in ("flux2_heads", "wan_heads"):
        reference = host.reference(name)
        near(case, name, host.sample(tensor(host.load(name), HOME, OTHER, THIRD), name), reference)
        host.unload_all()
    case.refused("too few heads", lambda: tensor(host.load("wan")), ValueError, "1 heads", "1 devices at most")


def loras(case: Case, names: tuple[str, ...], divide: Callable[[Any], Any], bound: float = NEAR) -> None:
    """LoRAs before and after the split, two at once, and back to none."""
    host = case.host
    for name in names:
        clean, reference = host.reference(name), host.reference(name, 1)
        one = host.lora(host.load(name, load_device=CPU), name)
        both = host.sample(host.lora(one, name, seed=2, strength=0.7), name)
        case.differs(f"{name}: it does something", reference, clean)
        divided = divide(host.load(name))
        near(case, f"{name}: after", host.sample(host.lora(divided, name), name), reference, bound)
        near(case, f"{name}: none again", host.sample(divided, name), clean, bound)
        before = divide(host.lora(host.load(name), name))
        near(case, f"{name}: before", host.sample(before, name), reference, bound)
        two = host.lora(before, name, seed=2, strength=0.7)
        near(case, f"{name}: before and after", host.sample(two, name), both, bound)
        host.unload_all()


@long_case
def tensor_other_patches(case: Case, host: Host) -> None:
    """Patches that depend on the whole weight: DoRA, LoKr, a plain difference, a change of strength."""
    name = "flux1_heads"
    key = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    row = "diffusion_model.single_blocks.1.linear2.weight"
    unsplit = host.load(name, load_device=CPU)
    for what, patches in _patches(unsplit, (key, row)).items():
        outputs = []
        for model in (unsplit, tensor(host.load(name))):
            patched = model.clone()
            for strength_patch, strength_model, patch in patches:
                patched.add_patches(patch, strength_patch, strength_model)
            outputs.append(host.sample(patched, name))
        near(case, what, outputs[1], outputs[0])
        case.differs(f"{what}: it does something", outputs[0], host.sample(unsplit, name))
        host.unload_all()


def _patches(model: Any, keys: tuple[str, ...]) -> dict[str, list[tuple[float, float, dict[Any, Any]]]]:
    adapters = comfy.weight_adapter
    shapes = {key: model.model.state_dict()[key].shape for key in keys}
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.1

    def lora(rows: int, columns: int, dora: torch.Tensor | None = None) -> Any:
        return adapters.LoRAAdapter(set(), (noise(rows, 4), noise(4, columns), 4.0, None, dora, None))

    def lokr(rows: int, columns: int) -> Any:
        weights = (noise(2, 2), noise(rows // 2, columns // 2), None, None, None, None, None, None, None)
        return adapters.LoKrAdapter(set(), weights)

    third = {key: (0, shape[0] // 3, shape[0] // 3) for key, shape in shapes.items()}
    half = {key: (1, shape[1] // 4, shape[1] // 2) for key, shape in shapes.items()}
    return {
        "DoRA": [(1.0, 1.0, {k: lora(*s, dora=noise(s[0], 1).abs() + 1) for k, s in shapes.items()})],
        "LoKr": [(1.0, 1.0, {k: lokr(*s) for k, s in shapes.items()})],
        "a difference": [(1.0, 1.0, {k: (noise(*s),) for k, s in shapes.items()})],
        "a change of strength": [(0.5, 0.8, {k: (noise(*s),) for k, s in shapes.items()})],
        "LoRA of some rows": [(1.0, 1.0, {(k, third[k]): lora(third[k][2], s[1]) for k, s in shapes.items()})],
        "LoRA of some columns": [(1.0, 1.0, {(k, half[k]): lora(s[0], half[k][2]) for k, s in shapes.items()})],
    }


def controlnets(
    case: Case, names: tuple[str, ...], divide: Callable[[Any], Any], bound: float = NEAR, cfg: float = 1.0
) -> None:
    """Residuals are computed once, on the main card, and added between two blocks, wherever those are. With way tensor
    every card's copy of the stream is out of date then; with way tokens each card adds those of its rows; a UNet
    silently leaves out one that is elsewhere."""
    host = case.host
    for name in names:
        outputs = []
        for model in (host.load(name, load_device=CPU), divide(host.load(name))):
            sides, control = [FAMILIES[name].condition(seed) for seed in (1, 2)], Residuals(_RESIDUALS[name])
            for condition in sides:
                condition[0][1] |= {"control": control, "control_apply_to_uncond": True}
            outputs.append(host.sample(model, name, cfg=cfg, positive=sides[0], negative=sides[1]))
            places = control.asked_on
            case.check(f"{name}: asked on the main card", len(places) == 1 and str(OTHER) not in places, places)
        near(case, name, outputs[1], outputs[0], bound)
        case.differs(f"{name}: it does something", outputs[0], host.reference(name, cfg=cfg))
        host.unload_all()


@case
def tensor_replaced_blocks(case: Case, host: Host) -> None:
    """A node's stand-in for a block calls the block, and changes what goes in and comes out."""
    name = "flux1_heads"

    def stand_in(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"]({**args, "img": args["img"] * 0.9})
        out["img"] += 0.1 * args["img"]
        return out  # type: ignore[no-any-return]

    outputs = []
    for model in (host.load(name, load_device=CPU), tensor(host.load(name))):
        patched = model.clone()
        patched.set_model_patch_replace(stand_in, "dit", "double_block", 1)
        outputs.append(host.sample(patched, name))
    near(case, "as unsplit", outputs[1], outputs[0])


@case
def tensor_refusals(case: Case, host: Host) -> None:
    """What would see some of the heads only is refused, in words; the MODEL works without it."""
    name = "flux1_heads"
    divided = tensor(host.load(name))
    replaced = divided.clone()
    replaced.set_model_attn1_replace(lambda *args: args[0], "double_block", 0, 0)
    case.refused("a replaced attention", lambda: host.sample(replaced, name), RuntimeError, "'attn1'", "blocks")
    layer = divided.clone()
    key = "diffusion_model.double_blocks.0.img_attn.proj"
    layer.add_object_patch(key, torch.nn.Linear(128, 128))
    case.refused("a layer replaced", lambda: host.sample(layer, name), RuntimeError, key, "blocks")
    reference = host.reference(name)
    near(case, "without them", host.sample(divided, name), reference)
    case.refused("a class nobody described", lambda: tensor(host.load("sdxl")), ValueError, "UNetModel", "blocks")
    case.refused("cuts", lambda: tensor(host.load(name), balance="manual", split_at=(1,)), ValueError, "split_at [1]")


@case
def tensor_an_error_on_one_card(case: Case, host: Host) -> None:
    """In a collective, while a card is handed its arguments, or before its worker begins: one prompt ends."""
    name = "flux1_heads"
    divided, full = tensor(host.load(name)), mock.Mock(side_effect=RuntimeError("injected"))
    reference = host.sample(divided, name)
    for where, broken in {
        "the main card's first collective": _failing_meeting(0, 1),
        "the other card's ninth": _failing_meeting(1, 9),
        "handing over": mock.patch.object(TensorParallel, "give", full),
        "the worker": mock.patch.object(tensor_parallel, "current_device", full),
    }.items():
        with broken:
            case.refused(where, lambda: host.sample(divided, name), RuntimeError, "injected")
        case.equal(f"after {where}", host.sample(divided, name), reference)


@contextmanager
def _failing_meeting(rank: int, at: int, error: BaseException | None = None) -> Iterator[None]:
    """While active one rank fails in its collective of this number."""
    post, count = Collective.post, 0

    def failing(self: Any, here: int, *args: Any, **more: Any) -> None:
        nonlocal count
        count += here == rank
        if here == rank and count == at:
            raise error or RuntimeError("injected")
        post(self, here, *args, **more)

    with mock.patch.object(Collective, "post", failing):
        yield


@case
def tensor_a_card_too_small_for_its_largest_layer(case: Case, host: Host) -> None:
    """Each card must hold its own slice of a layer while it computes; said before anything is loaded."""
    name = "flux1_heads"
    divided = tensor(host.load(name), HOME, OTHER, THIRD)
    least = comfy.model_management.minimum_inference_memory()
    columns = divided.model.diffusion_model.single_blocks[0].linear1.in_features
    for device in (OTHER, THIRD):
        slices = divided.model.devicebridge_split.executor.shards[device]["single_blocks.0"].slices["linear1.weight"]
        layer = 4 * columns * sum(last - first for first, last in slices.ranges)
        with mock.patch.dict(host.machine.capacity_bytes, {device: int(least + layer - 1)}):
            case.refused(f"{device}", lambda: host.sample(divided, name), RuntimeError, str(device), "largest layer")
        with mock.patch.dict(host.machine.capacity_bytes, {device: int(least + layer + 1)}):
            output = host.sample(divided, name)
        near(case, f"{device}, a byte more", output, host.reference(name))
        host.unload_all()


@case
def tensor_clones_and_eviction(case: Case, host: Host) -> None:
    """Clones with different LoRAs in turn, another model that takes the card, and a card that holds only some."""
    name = "qwen_image"
    divided = tensor(host.load(name))
    clones, references = clones_in_turn(case, name, divided)
    host.unload_all()
    size = sum(p.nbytes for p in divided.model.diffusion_model.parameters())
    with host.machine.room_for(size // 2, OTHER):
        near(case, "streamed on one card", host.sample(clones[1], name), references[1])


@case
def tensor_verified_and_not_offloaded(case: Case, host: Host) -> None:
    """verify computes the first step again with nothing remembered; with offload off a part must fit its card."""
    name = "flux1_heads"
    reference = host.sample(tensor(host.load(name)), name)
    with case.logged("", logging.INFO) as messages:
        case.equal("verified", host.sample(tensor(host.load(name), verify=True), name), reference)
    case.check("and said so", any("verified: the first step" in message for message in messages), messages[-8:])
    limits = {"memory_limit_gb": (1.0, 0.0001), "offload": False}
    case.refused("no room", lambda: tensor(host.load(name), **limits), ValueError, "lazy:1 would hold", "offload on")
    case.equal("with room", host.sample(tensor(host.load(name), offload=False), name), reference)


@case
def tensor_is_not_split_again_nor_saved(case: Case, host: Host) -> None:
    """Another split, a saved file or an extracted LoRA would take a card's slices for whole weights."""
    name = "wan_heads"
    divided = tensor(host.load(name))
    case.refused("blocks behind it", lambda: split(divided, way="blocks"), ValueError, "tensor", "in the node before")
    case.refused("tensor behind tensor", lambda: tensor(divided), ValueError, "tensor", "in the node before")
    blocks = split(host.load(name), way="blocks")
    reference = host.reference(name)
    near(case, "tensor behind blocks", host.sample(tensor(blocks), name), reference)
    case.refused("saved", divided.state_dict_for_saving, RuntimeError, "tensor", "blocks")
    key = "diffusion_model.blocks.0.self_attn.q.weight"
    extract = functools.partial(divided.patch_weight_to_device, key, return_weight=True)
    case.refused("a weight taken out", extract, RuntimeError, "tensor", "blocks")


@case
def tensor_loras_that_do_not_fit(case: Case, host: Host) -> None:
    """ComfyUI says that such a LoRA is not applied, and leaves the weight alone; so it is with slices."""
    name = "flux1_heads"
    key = "diffusion_model.double_blocks.0.img_attn.qkv.weight"
    reference = host.reference(name)
    for what, rows, columns in (("too many rows", 500, 128), ("too few rows", 100, 128), ("other columns", 384, 64)):
        patched = tensor(host.load(name)).clone()
        factors = (torch.ones(rows, 2), torch.ones(2, columns), 2.0, None, None, None)
        patched.add_patches({key: comfy.weight_adapter.LoRAAdapter(set(), factors)})
        near(case, what, host.sample(patched, name), reference)
        host.unload_all()


@case
def tensor_beside_a_bypass_lora(case: Case, host: Host) -> None:
    name = "flux1_heads"
    divided = tensor(host.load(name))
    weights = {f"{key}": value for key, value in lora_weights(name, 1).items()}
    bypassed, _ = comfy.sd.load_bypass_lora_for_models(divided, None, weights, 1.0, 0)
    reference = host.reference(name)
    for turn in (1, 2):
        near(case, f"without it, {turn}", host.sample(divided, name), reference)
        case.refused(f"bypass, {turn}", lambda: host.sample(bypassed, name), RuntimeError, "bypass LoRA", "blocks")
