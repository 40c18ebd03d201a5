"""Every family by its whole path: file, detection, split, ComfyUI's sampler; bit for bit the unsplit run on the CPU."""

from __future__ import annotations

import functools

from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, split
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

STEPS = 3


def _family(name: str, case: Case) -> None:
    host, family = case.host, FAMILIES[name]
    model = host.load(name)
    recognised = type(model.model.model_config).__name__
    case.check("the file is recognised", recognised == family.config_class, recognised)
    unsplit = host.load(name, load_device=CPU)
    reference = host.sample(unsplit, name, steps=STEPS)
    guided = host.sample(unsplit, name, steps=STEPS, cfg=4.0)
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


for _name in FAMILIES:
    CASES[f"family_{_name}"] = functools.partial(_family, _name)


def three_cards(case: Case) -> None:
    """Each of three cards has its share."""
    host = case.host
    reference = host.sample(host.load("flux1", load_device=CPU), "flux1")
    divided = split(host.load("flux1"), HOME, OTHER, THIRD)
    case.equal("as unsplit", host.sample(divided, "flux1"), reference)
    shares = {device: live_bytes(device) for device in (HOME, OTHER, THIRD)}
    case.check("all three hold weights", min(shares.values()) > 1e6, shares)
    case.check("home is not passed by", crossings(host.machine, (OTHER, THIRD)) > 0)


CASES["three_cards"] = three_cards
