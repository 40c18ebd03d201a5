"""Guidance and batches: with overlap off ComfyUI's own batch, with overlap on as one forward after the other."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import comfy.patcher_extension
import comfy.sample
import torch
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs, split
from devicebridge.tests.comfy.split_host import HOME, Host, live_bytes, one_condition_at_a_time
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, Condition

CFG = 4.0


def _one_image_at_a_time(host: Host, name: str, batch: int, **options: Any) -> torch.Tensor:
    """A batch as that many single pictures, cond and uncond one after the other, unsplit on the CPU."""
    unsplit = host.load(name, load_device=CPU)
    noise = _noise(name, batch)
    with one_condition_at_a_time(unsplit):
        return torch.cat([host.sample(unsplit, name, noise=one, **options) for one in noise.split(1)])


def _noise(name: str, batch: int) -> torch.Tensor:
    return comfy.sample.prepare_noise(torch.zeros(batch, *FAMILIES[name].latent), 7)


@case
def batches(case: Case) -> None:
    host = case.host
    more = in_long_runs(("flux1", 2, 1.0), ("qwen_image", 2, CFG))
    for name, batch, cfg in (("flux1", 4, CFG), ("wan", 2, CFG), *more):
        claim = f"{name}, batch {batch}, cfg {cfg}"
        together = host.reference(name, batch=batch, cfg=cfg)
        output = host.sample(split(host.load(name), overlap=False), name, batch=batch, cfg=cfg)
        case.equal(f"{claim}: overlap off", output, together)
        apart = _one_image_at_a_time(host, name, batch, cfg=cfg)
        output = host.sample(split(host.load(name)), name, batch=batch, cfg=cfg)
        case.equal(f"{claim}: overlap on", output, apart)
        host.unload_all()


def _combined() -> Condition:
    """Two prompts for two halves of the picture, one of them for the first step only, and one everywhere."""
    family = FAMILIES["flux1"]
    left, right, everywhere = family.condition(11), family.condition(12), family.condition(13)
    left[0][1] |= {"area": (8, 4, 0, 0), "strength": 0.8, "set_area_to_bounds": False}
    mask = torch.zeros(1, 8, 8)
    mask[..., 3:] = 1
    right[0][1] |= {"mask": mask, "mask_strength": 0.7, "start_percent": 0.0, "end_percent": 0.4}
    return left + right + everywhere


def _each_side_alone(executor: Any, model: Any, conds: list[Any], *args: Any) -> list[torch.Tensor]:
    """ComfyUI's evaluation, asked for the positive and for the negative side by itself."""
    sides = [[cond if number == side else None for number, cond in enumerate(conds)] for side in range(len(conds))]
    return [executor(model, side, *args)[number] for number, side in enumerate(sides)]


@contextlib.contextmanager
def _seen_in(divided: Any, names: Sequence[str], see: Callable[[str], None]) -> Iterator[None]:
    """While active the classes of these blocks tell when one of them computes; a hook on a block would end overlap."""
    model = divided.model.diffusion_model
    blocks = {model.get_submodule(name): name for name in names}
    with contextlib.ExitStack() as stack:
        for cls in dict.fromkeys(map(type, blocks)):
            stack.enter_context(mock.patch.object(cls, "forward", _telling(cls.forward, blocks, see)))
        yield


def _telling(forward: Callable[..., Any], blocks: Mapping[Any, str], see: Callable[[str], None]) -> Callable[..., Any]:
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module in blocks:
            see(blocks[module])
        return forward(module, *args, **kwargs)

    return run


@case
def forwards_in_flight(case: Case) -> None:
    host = case.host
    entries: dict[bool, list[tuple[int, str]]] = {}
    for overlap in (False, True):
        divided = split(host.load("flux1"), overlap=overlap)
        entered = entries[overlap] = []
        see = functools.partial(_note, entered)
        with _seen_in(divided, ("double_blocks.0", "single_blocks.3"), see):
            host.sample(divided, "flux1", cfg=CFG, steps=1)
    threads = [{thread for thread, _ in entered} for entered in entries.values()]
    case.check("off: one forward, in this thread", threads[0] == {threading.get_ident()} and len(entries[False]) == 2)
    case.check("on: two forwards in threads of their own", len(threads[1]) == 2 and len(entries[True]) == 4)
    order = [name for _, name in entries[True]]
    case.check("on: both begin before either ends", order == sorted(order), order)
    case.check("no thread is left at work", not _forward_threads(), threading.enumerate())


def _note(entered: list[tuple[int, str]], name: str) -> None:
    entered.append((threading.get_ident(), name))


def _forward_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("devicebridge-forward")]


@case
def an_error_while_overlapping(case: Case) -> None:
    host = case.host
    divided = split(host.load("flux1"))
    expected = host.sample(divided, "flux1", cfg=CFG)
    calls = []

    def fail(name: str) -> None:
        calls.append(name)
        if len(calls) == 2:
            raise InterruptedError("stopped by the user")

    with _seen_in(divided, ("single_blocks.2",), fail):
        case.refused("the error arrives", lambda: host.sample(divided, "flux1", cfg=CFG), InterruptedError, "stopped")
    case.check("no thread is left", not _forward_threads(), _forward_threads())
    case.equal("afterwards", host.sample(divided, "flux1", cfg=CFG), expected)
    main_device = live_bytes(HOME)
    case.equal("again", host.sample(divided, "flux1", cfg=CFG), expected)
    case.check("nothing was left on the card", live_bytes(HOME) == main_device, (live_bytes(HOME), main_device))
