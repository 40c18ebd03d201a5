"""LoRA, scheduled LoRA, clones and saving: what is done to weights arrives on the card where they are, and goes again.

Every reference is the same request made of a MODEL loaded anew on the CPU and never split.
"""

import gc
from typing import Any
from unittest import mock

import comfy.hooks
import comfy.sd
import comfy.utils
import torch
from devicebridge.tests.comfy.split_cases import CPU, Case, case, split
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, hooked, live_bytes, weights_on
from devicebridge.tests.emulated import on_cpu

NAME = "flux1"


def _with_loras(host: Host, model: Any, *seeds: int, name: str = NAME) -> Any:
    for seed in seeds:
        model = host.lora(model, name, seed)
    return model


@case
def clones_of_a_split_with_different_loras(case: Case, host: Host) -> None:
    divided = split(host.load(NAME))
    models = {seeds: _with_loras(host, divided, *seeds) for seeds in ((1,), (2,))}
    copy = models[()] = divided.clone()
    case.check("is a split too", type(copy) is type(divided) and len(copy.companions) == 1, type(copy).__name__)
    case.check("of the same model", copy.is_clone(divided) and copy.model is divided.model)
    for seeds in ((1,), (2,), (), (1,)):
        case.equal(f"LoRAs {seeds}", host.sample(models[seeds], NAME), host.reference(NAME, *seeds))
        case.check("one set of weights on the other card", live_bytes(OTHER) == weights_on(divided, OTHER))
    del divided, models
    gc.collect()
    case.equal("a clone alone", host.sample(copy, NAME), host.reference(NAME))


@case
def split_after_plain_has_run(case: Case, host: Host) -> None:
    """A MODEL that is on the card, with a LoRA baked in, is taken off it and then split."""
    plain = host.load(NAME)
    host.sample(host.lora(plain, NAME, 1), NAME)
    case.check("the plain one is on the card", weights_on(plain, HOME) > 0)
    divided = split(plain)
    case.check("and leaves it", weights_on(plain, HOME) == 0, weights_on(plain, HOME))
    case.equal("split, clean", host.sample(divided, NAME), host.reference(NAME))
    case.equal("plain again, clean", host.sample(plain, NAME), host.reference(NAME))


@case
def split_outlives_its_source(case: Case, host: Host) -> None:
    plain = host.load(NAME)
    divided = split(plain)
    host.sample(host.lora(plain, NAME, 1), NAME)
    del plain
    gc.collect()
    case.equal("after the plain one is gone", host.sample(divided, NAME), host.reference(NAME))
    host.unload_all()
    case.equal("and after unloading", host.sample(divided, NAME), host.reference(NAME))


def _sample_scheduled(host: Host, model: Any, *, keyframes: bool, negative: Any = None) -> torch.Tensor:
    positive = hooked(NAME, 1, strengths=((0.25, 0.0), (1.0, 0.4)) if keyframes else ())
    return host.sample(model, NAME, cfg=3.0, steps=4, positive=positive, negative=negative)


@case
def scheduled_loras(case: Case, host: Host) -> None:
    """A hook on one condition: weights change between cond and uncond, and by the step. Or on each, or over a LoRA."""
    other = hooked(NAME, 2, 2)
    for what, seeds, negative in (("on one", (), None), ("on each", (), other), ("over a LoRA", (2,), None)):
        unsplit = _with_loras(host, host.load(NAME, load_device=CPU), *seeds)
        divided = _with_loras(host, split(host.load(NAME)), *seeds)
        reference = _sample_scheduled(host, unsplit, keyframes=True, negative=negative)
        clean = host.sample(divided, NAME, cfg=3.0, steps=4)
        case.differs(f"{what}: it does something", reference, clean)
        for when in ("as unsplit", "after the other card was cleared"):
            output = _sample_scheduled(host, divided, keyframes=True, negative=negative)
            case.equal(f"{what}: {when}", output, reference)
            host.free(OTHER)
        case.equal(f"{what}: clean afterwards", host.sample(divided, NAME, cfg=3.0, steps=4), clean)
        host.unload_all()


@case
def all_keys_are_seen(case: Case, host: Host) -> None:
    """Whoever asks a split MODEL for its weights gets every one of them, also while it is loaded."""
    plain, divided = host.load(NAME), split(host.load(NAME))
    for when in ("before", "while loaded"):
        case.check(f"state dict {when}", set(divided.model_state_dict()) == set(plain.model_state_dict()))
        case.check(f"key patches {when}", set(divided.get_key_patches()) == set(plain.get_key_patches()))
        keys = divided.add_patches({"diffusion_model.single_blocks.3.linear1.weight": (torch.zeros(1),)})
        case.check(f"a key on the other card can be patched {when}", len(keys) == 1, keys)
        divided = split(plain)
        host.sample(divided, NAME)


@case
def saving(case: Case, host: Host) -> None:
    """ModelSave with a LoRA baked in: what goes into the file is what the unsplit MODEL gives."""
    plain = _saved(host.lora(host.load(NAME, load_device=CPU), NAME, 1))
    divided = _saved(host.lora(split(host.load(NAME)), NAME, 1))
    case.check("the same keys", set(plain) == set(divided) and len(plain) > 50, len(plain))
    wrong = [key for key, tensor in plain.items() if not torch.equal(tensor, divided[key])]
    case.check("the same weights", not wrong, wrong)


def _saved(model: Any) -> dict[str, torch.Tensor]:
    files: list[dict[str, torch.Tensor]] = []
    with mock.patch.object(comfy.utils, "save_torch_file", lambda weights, *args, **kwargs: files.append(weights)):
        comfy.sd.save_checkpoint("", model)
    return {key: on_cpu(tensor).clone() for key, tensor in files[0].items()}


def _other_layers(model: Any) -> Any:
    """Packs replace layers and methods of blocks by name; each goes where the block is and comes off again."""
    for key in ("double_blocks.0.img_mlp.1", "single_blocks.3.mlp_act"):
        model.add_object_patch(f"diffusion_model.{key}", torch.nn.SiLU())
    return model


def _other_weights(model: Any) -> Any:
    """A function of a pack that is applied to a weight at every use, on whichever card it is."""
    for key in ("double_blocks.0.img_mlp.0", "single_blocks.3.linear2"):
        model.add_weight_wrapper(f"diffusion_model.{key}.weight", lambda weight: weight * 1.5)
    return model


@case
def patches_of_layers_and_of_weights(case: Case, host: Host) -> None:
    clean = host.reference(NAME)
    for change in (_other_layers, _other_weights):
        reference = host.sample(change(host.load(NAME, load_device=CPU)), NAME)
        case.differs(f"{change.__name__}: it does something", reference, clean)
        divided = split(host.load(NAME))
        for when in ("first", "again"):
            output = host.sample(change(divided.clone()), NAME)
            case.equal(f"{change.__name__}: after the split, {when}", output, reference)
            case.equal(f"{change.__name__}: without it, {when}", host.sample(divided, NAME), clean)
        before = split(change(host.load(NAME)))
        case.equal(f"{change.__name__}: before the split", host.sample(before, NAME), reference)


@case
def split_of_a_split(case: Case, host: Host) -> None:
    once = host.lora(split(host.load(NAME)), NAME, 1)
    host.sample(once, NAME)
    for patcher in (once, *once.companions):
        places = {str(backup.weight.device) for backup in patcher.backup.values()}
        case.check(f"clean weights of {patcher.load_device} wait in host memory", places == {"cpu"}, places)
    twice = split(once, balance="manual", split_at=(1,))
    for number in range(2):
        case.equal(f"twice, run {number}", host.sample(twice, NAME), host.reference(NAME, 1))
        case.equal(f"once, run {number}", host.sample(once, NAME), host.reference(NAME, 1))
    case.equal("with one more LoRA", host.sample(host.lora(twice, NAME, 2), NAME), host.reference(NAME, 1, 2))


@case
def split_of_a_model_for_another_card(case: Case, host: Host) -> None:
    """Select Model Device put it on card 1, where it ran with little memory and a LoRA; home is card 0 now."""
    plain = host.lora(host.load(NAME, load_device=OTHER), NAME, 1)
    with host.machine.room_for(int(plain.model_size()) // 2, OTHER):
        case.equal("plain", host.sample(plain, NAME), host.reference(NAME, 1))
        divided = split(plain)
    case.equal("split", host.sample(divided, NAME), host.reference(NAME, 1))
    case.check("home is card 0", divided.load_device == HOME and live_bytes(HOME) > 0, divided.load_device)
    case.equal("plain again", host.sample(plain, NAME), host.reference(NAME, 1))
