"""Every family by its whole path: file, detection, split, ComfyUI's sampler; bit for bit the unsplit run on the CPU."""

import functools
import logging

from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, split
from devicebridge.tests.comfy.split_classes import FAMILIES as BY_BLOCKS
from devicebridge.tests.comfy.split_host import (
    HOME,
    OTHER,
    THIRD,
    block_devices,
    crossings,
    live_bytes,
    one_condition_at_a_time,
    weights_on,
)
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

STEPS = 2


def _family(name: str, case: Case) -> None:
    host, family = case.host, FAMILIES[name]
    model = host.load(name)
    recognised = type(model.model.model_config).__name__
    case.check("the file is recognised", recognised == family.config_class, recognised)
    unsplit = host.load(name, load_device=CPU)
    reference = host.reference(name, steps=STEPS)
    guided = host.reference(name, steps=STEPS, cfg=4.0)
    case.differs("guidance does something", guided, reference)
    divided = split(model)
    host.machine.cards.copies.clear()
    output = host.sample(divided, name, steps=STEPS)
    case.equal("as unsplit", output, reference)
    _check_placement(case, name, divided)
    crossed = crossings(host.machine, (HOME, OTHER))
    case.check("every step crossed to the other card and back", crossed >= 2 * STEPS, crossed)
    case.check("the MODEL that was split stays off the cards", not weights_on(model, HOME), weights_on(model, HOME))
    in_one_batch = split(model, overlap=False)
    case.equal("cond and uncond in one batch", host.sample(in_one_batch, name, steps=STEPS, cfg=4.0), guided)
    with one_condition_at_a_time(unsplit):
        alone = host.sample(unsplit, name, steps=STEPS, cfg=4.0)
    expected = alone if family.overlaps else guided
    case.equal("cond and uncond overlapping", host.sample(divided, name, steps=STEPS, cfg=4.0), expected)


def _check_placement(case: Case, name: str, divided: object) -> None:
    devices = block_devices(divided, FAMILIES[name])
    places = {next(iter(found)) for found in devices.values()}
    case.check("each block is on one card", all(len(found) == 1 for found in devices.values()), devices)
    case.check("both cards have blocks", places == {str(HOME), str(OTHER)}, devices)
    held, weights = live_bytes(OTHER), weights_on(divided, OTHER)
    case.check("the other card holds its weights and nothing else", held == weights, f"{held} of {weights}")
    whole = sum(parameter.nbytes for parameter in divided.model.diffusion_model.parameters())  # type: ignore[attr-defined]
    held = live_bytes(HOME)
    case.check("home does not hold the whole", held < whole, f"{held} of {whole}")


for _name in BY_BLOCKS:  # hidream_o1 is rounded otherwise on a card than on the CPU
    CASES[f"family_{_name}"] = functools.partial(_family, _name)


@case
def three_cards(case: Case) -> None:
    host, reference = case.host, case.host.reference("flux1")
    divided = split(host.load("flux1"), HOME, OTHER, THIRD)
    case.equal("as unsplit", host.sample(divided, "flux1"), reference)
    shares = {device: live_bytes(device) for device in (HOME, OTHER, THIRD)}
    case.check("all three hold weights", min(shares.values()) > 1e6, shares)
    case.check("the second card sends to the third one", crossings(host.machine, (OTHER, THIRD)) > 0)


@case
def what_a_model_remembers_from_step_to_step(case: Case) -> None:
    """HiDream-O1's keys and values of the prompt, on each block's card, also where the first step is computed twice."""
    host, name = case.host, "hidream_o1"
    model = host.load(name)
    reference = host.sample(model, name, steps=STEPS, cfg=4.0)
    host.unload_all()
    for options in ({}, {"transport": "relay"}, {"verify": True}):
        divided = split(host.load(name), **options)
        with case.logged("devicebridge", logging.INFO) as messages:
            output = host.sample(divided, name, steps=STEPS, cfg=4.0)
        case.equal(f"as unsplit: {options}", output, reference)
        kept = divided.model.diffusion_model._kv_cache_entries
        devices = {str(tensor.device) for entry in kept for pair in entry["kv"] for tensor in pair}
        both = {str(HOME)} if "transport" in options else {str(HOME), str(OTHER)}
        case.check(f"keys and values are kept where they are needed: {options}", devices == both, devices)
        verified = any("verified: the first step" in message for message in messages)
        case.check(f"verified if asked: {options}", verified == ("verify" in options), messages)
        host.unload_all()
