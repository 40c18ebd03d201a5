"""A split MODEL under DynamicVRAM, where layers ask for their weights while they compute."""

from collections.abc import Callable
from typing import Any

from devicebridge.tests.comfy.emulated_vram import dynamic_vram
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs, split
from devicebridge.tests.comfy.split_cases_tensor import near, tensor
from devicebridge.tests.comfy.split_cases_tokens import NAME, _scheduled, tokens
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host, live_bytes


@case
def dynamic_blocks(case: Case, host: Host) -> None:
    """The emulation itself: what is known to work on cards works here, with the bits of one card."""
    name = "flux1_heads"
    reference = host.reference(name)
    with dynamic_vram() as vram:
        model = host.load(name)
        case.check("it is dynamic", model.is_dynamic())
        divided = split(model)
        case.equal("as on one card", host.sample(divided, name), reference)
        case.check("both cards were asked", bool(vram.faults.get(HOME) and vram.faults.get(OTHER)), vram.faults)
        host.unload_all()


def _by_all(case: Case, name: str, divide: Callable[..., Any]) -> None:
    """Every card's part asks for its own weights; a card without room copies some for one use, as with a limit."""
    host, reference = case.host, case.host.reference(name)
    with dynamic_vram() as vram:
        given = host.load(name)
        whole = sum(parameter.nbytes for parameter in given.model.diffusion_model.parameters())
        divided = divide(given)
        output = host.sample(divided, name)
        near(case, f"{name}: as unsplit", output, reference)
        case.check(f"{name}: both cards were asked", vram.faults.keys() == {HOME, OTHER}, vram.faults)
        held, before = {device: live_bytes(device) for device in (HOME, OTHER)}, dict(vram.faults)
        is_less = divide is tokens or max(held.values()) < whole
        case.check(f"{name}: no card holds the whole", is_less, f"{held} of {whole}")
        case.equal(f"{name}: again, the same bits", host.sample(divided, name), output)
        case.check(f"{name}: the second time they are there", vram.faults == before, vram.faults)
        host.unload_all()
        left = [vram.held(device) for device in (HOME, OTHER)]
        case.check(f"{name}: nothing stays", left == [0, 0], left)
        vram.room[OTHER] = 200_000
        case.equal(f"{name}: with little room", host.sample(divided, name), output)
        case.check(f"{name}: some were refused", vram.refused.get(OTHER, 0) > 0, vram.refused)
        host.unload_all()
        vram.room.clear()
        limited = divide(host.load(name), memory_limit_gb=(0.0002, 1.0))
        near(case, f"{name}: with a limit", host.sample(limited, name), reference)
        case.check(f"{name}: the limit was kept", vram.refused.get(HOME, 0) > 0, vram.refused)
        host.unload_all()


@case
def dynamic_tensor(case: Case) -> None:
    """Packed and quantized slices as well."""
    for name in ("flux1_heads", *in_long_runs("wan_heads", "lumina2")):
        _by_all(case, name, tensor)


@case
def dynamic_tokens(case: Case, host: Host) -> None:
    _by_all(case, "wan", tokens)
    reference = _scheduled(host, host.load(NAME, load_device=CPU), (0.5, 1.0))
    with dynamic_vram():
        near(case, "a scheduled LoRA", _scheduled(host, tokens(host.load(NAME)), (0.5, 1.0)), reference)


@case
def dynamic_tensor_refuses_a_scheduled_lora(case: Case, host: Host) -> None:
    """Before its stand-in, a whole second model, is read from the file."""
    name = "flux1_heads"
    with dynamic_vram():
        divided = tensor(host.load(name))
        case.refused("the stand-in", divided.get_non_dynamic_delegate, RuntimeError, "hook", "blocks")
