"""What other nodes do to a split MODEL must leave no trace, and what they did to the MODEL before must not get lost."""

import functools
import logging
import uuid
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.sd
import torch
from comfy.patcher_extension import WrappersMP
from comfy.samplers import calc_cond_batch
from devicebridge.nodes.host.split.attachments import reasons_against_overlap
from devicebridge.tests.comfy.split_cases import CPU, Case, case, split
from devicebridge.tests.comfy.split_host import CAPACITY_BYTES, HOME, OTHER, Host, hooked
from devicebridge.tests.comfy.tiny_checkpoints import lora_weights
from torch import nn

NAME = "wan"


class _Louder(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs) * 1.5


def _louder_block(model: Any, index: int) -> Any:
    changed = model.clone()
    block = model.model.diffusion_model.blocks[index]
    changed.add_object_patch(f"diffusion_model.blocks.{index}", _Louder(block))
    return changed


@case
def a_replaced_block_is_put_back(case: Case, host: Host) -> None:
    """A pack puts a module of its own in the place of a block; without that clone the split is as it was."""
    plain = host.load(NAME, load_device=CPU)
    clean = host.sample(plain, NAME)
    divided = split(host.load(NAME))
    for index in (0, 3):
        reference = host.sample(_louder_block(plain, index), NAME)
        case.differs(f"block {index}: it does something", reference, clean)
        changed = _louder_block(divided, index)
        case.equal(f"block {index}: as unsplit", host.sample(changed, NAME), reference)
        del changed
        case.equal(f"block {index}: without it", host.sample(divided, NAME), clean)
        found = type(divided.model.diffusion_model.blocks[index]).__name__
        case.check(f"block {index} is itself again", found != "_Louder", found)


@case
def what_cannot_be_is_refused(case: Case, host: Host) -> None:
    divided, moved = (split(host.load(NAME)).clone() for _ in range(2))
    plain, blockless = (host.load(NAME).clone() for _ in range(2))
    lists = divided.model.diffusion_model.blocks
    plain.add_object_patch("diffusion_model.blocks", nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
    moved.load_device = CPU
    blockless.model.diffusion_model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    shorter = lambda: divided.clone().add_object_patch("diffusion_model.blocks", nn.ModuleList(lists[:2]))  # noqa: E731
    case.refused("a shorter list", shorter, ValueError, "diffusion_model.blocks", "single blocks")
    case.refused("a list put on before the split", lambda: split(plain), ValueError, "diffusion_model.blocks")
    case.refused("to the CPU", lambda: host.sample(moved, NAME), RuntimeError, "moved it to cpu", "take that node out")
    case.refused("a replica per GPU", divided.deepclone_multigpu, RuntimeError, "split", "MultiGPU CFG Split")
    case.refused("a copy for training", lambda: divided.clone(force_deepcopy=True), RuntimeError, "split", "train")
    case.refused("no blocks to share out", lambda: split(blockless), ValueError, "Sequential", "block")
    for name in ("sdxl", "hidream"):
        stream = functools.partial(split, host.load(name), transport="stream")
        case.refused(f"stream where it is wrong: {name}", stream, ValueError, "relay")


@case
def a_stand_in_keeps_the_original_weights(case: Case, host: Host) -> None:
    """Under DynamicVRAM every sampling with a scheduled LoRA asks for a classic stand-in over the same spare model."""
    reference = host.sample(host.lora(host.load(NAME, load_device=CPU), NAME, 1), NAME)
    divided = host.lora(split(host.load(NAME)), NAME, 1)
    spare = host.load(NAME).get_clone_model_override()
    divided._makes_stand_in = True  # as get_non_dynamic_delegate does, which needs DynamicVRAM
    for run in range(3):
        stand_in = divided.clone(model_override=spare)
        spare = stand_in.get_clone_model_override()
        kept = divided._stand_ins
        case.check(f"run {run}: no chain grows", kept and kept[0].parent is None, kept)
        stand_in.patches_uuid = uuid.uuid4()  # as registering a scheduled LoRA does
        case.equal(f"run {run}", host.sample(stand_in, NAME), reference)
        del stand_in


def _bypass(model: Any) -> Any:
    return comfy.sd.load_bypass_lora_for_models(model, None, dict(lora_weights(NAME, 1)), 1.0, 0)[0]


@case
def bypass_lora(case: Case, host: Host) -> None:
    """The host's LoRA that runs beside the layers: behind a split on each layer's card, before one refused."""
    plain = host.load(NAME, load_device=HOME)
    reference, clean = host.sample(_bypass(plain), NAME), host.sample(plain, NAME)
    case.differs("it does something", reference, clean)
    divided = split(host.load(NAME))
    case.equal("behind the split", host.sample(_bypass(divided), NAME), reference)
    case.equal("without it", host.sample(divided, NAME), clean)
    before = _bypass(host.load(NAME))
    case.refused("before the split", lambda: split(before), ValueError, "before it was split", "after it")


@case
def what_holds_on_to_the_given_model_is_refused(case: Case, host: Host) -> None:

    def wrapped() -> Any:
        model = host.load(NAME).clone()
        inner = model.model.diffusion_model
        model.set_model_unet_function_wrapper(lambda run, args: run(args["input"], inner.dtype, **args["c"]))
        return model

    def with_patch() -> Any:
        model = host.load(NAME).clone()
        model.set_model_patch(lambda args: model.model.diffusion_model and args, "double_block")
        return model

    def with_module() -> Any:
        model = host.load(NAME).clone()
        model.add_object_patch("diffusion_model.blocks.0", _Louder(model.model.diffusion_model.blocks[0]))
        return model

    def with_function() -> Any:
        model = host.load(NAME)
        layer = model.model.diffusion_model.blocks[1].ffn
        first, act, last = layer
        layer.forward = lambda x: last(act(first(x)))
        return model

    for make in (wrapped, with_patch, with_module, with_function):
        case.refused(make.__name__, lambda make=make: split(make()), ValueError, "holds on to", "directly after")  # type: ignore[misc]


@case
def a_large_estimate_is_a_warning(case: Case, host: Host) -> None:
    """The host runs sizes that its own estimate calls too large, and context windows divide them; so do we."""
    divided = split(host.load(NAME))
    reference = host.sample(divided, NAME)
    needed = divided.model.memory_required([1, 16, 2, 4, 4])
    host.machine.capacity_bytes[OTHER] = int(comfy.model_management.minimum_inference_memory()) + (64 << 20)
    divided.model.memory_usage_factor *= (2 << 30) / needed
    with case.logged("devicebridge.nodes.host.split.sampling") as said:
        case.equal("it runs", host.sample(divided, NAME), reference)
    case.check("and says so", any("may run out of memory" in line for line in said), said)
    host.machine.capacity_bytes[OTHER] = CAPACITY_BYTES


@case
def cuts_by_hand_are_checked_against_the_limits(case: Case, host: Host) -> None:
    settings: dict[str, Any] = {"balance": "manual", "split_at": (2,), "memory_limit_gb": (0.0001, 0.0001)}
    act = lambda: split(host.load(NAME), offload=False, **settings)  # noqa: E731
    case.refused("offload off", act, ValueError, "GB", "turn offload on")
    with case.logged("devicebridge.nodes.host.split.tree") as said:
        divided = split(host.load(NAME), **settings)
    case.check("offload on says what is streamed", any("streamed at every step" in line for line in said), said)
    reference = host.reference(NAME)
    case.equal("and is right", host.sample(divided, NAME), reference)


@case
def gradients_and_other_wrappers_turn_overlap_off(case: Case, host: Host) -> None:
    divided = split(host.load(NAME))
    reference = host.sample(split(host.load(NAME), overlap=False), NAME, cfg=4.0)
    counted = divided.clone()
    calls: list[int] = []

    def count(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return executor(*args, **kwargs)

    counted.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "a pack", count)
    case.equal("with another wrapper", host.sample(counted, NAME, cfg=4.0), reference)
    case.check("which is called once a step", len(calls) == 2, len(calls))
    options = {"transformer_options": {}}
    with torch.inference_mode(False), torch.enable_grad():
        reason = next(reasons_against_overlap(divided.model, (), [], options), "")
    case.check("with gradients", reason == "gradients are recorded", reason)


@case
def a_scheduled_lora_in_the_weights_turns_overlap_off(case: Case, host: Host) -> None:
    """Conditionings without one, computed behind those that left it there: the first forward takes it out."""
    left = list[bool]()

    def guide(args: dict[str, Any]) -> torch.Tensor:
        left.append(args["model"].current_patcher.current_hooks is not None)
        clean = [args["cond"], args["cond"]]
        found = calc_cond_batch(args["model"], clean, args["input"], args["sigma"], args["model_options"])
        return args["denoised"] + 0.5 * found[0] - 0.25 * found[1]

    outputs = []
    for model in (host.load(NAME, load_device=CPU), split(host.load(NAME)), split(host.load(NAME), overlap=False)):
        model = model.clone()
        model.set_model_sampler_post_cfg_function(guide)
        with case.logged("devicebridge", logging.INFO) as messages:
            outputs.append(host.sample(model, NAME, cfg=4.0, negative=hooked(NAME, 2)))
        said = [line for line in messages if "overlap is off" in line]
        case.check("each reason is said once", len(said) == 2 * (len(outputs) == 2), said)
    case.check("it is in the weights", all(left), left)
    case.equal("as with overlap off", outputs[1], outputs[2])
    case.differs("it does something", outputs[0], host.reference(NAME, cfg=4.0))
