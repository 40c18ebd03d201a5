"""Runs ComfyUI's own model classes, tiny and with random weights, whole and split over emulated cards.

Started by test_native_families.py with ComfyUI's Python and the checkout as its argument; prints one line of JSON:
{case: {run: result}}. A result is "equal" or "differs", in bits, from the unsplit forward on the CPU, else the error.

What a host does around a forward is done here in the plainest way (`_Host`), so that a row's facts (control_keys,
replace_keys, patches_between) are what is tested, and not the host's code. Everything runs in inference mode, as in
ComfyUI.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

if TYPE_CHECKING:
    from devicebridge.families.spec import NativeModel, Transport
    from devicebridge.parallel.bridge import Bridge
    from devicebridge.tests.comfy.native_cases import Case

ROOT = Path(__file__).resolve().parent.parent.parent


class _Residuals(list[Any]):
    """A list of ControlNet residuals that hands each over where the activations are."""

    bridge: Bridge

    def __getitem__(self, index: Any) -> Any:
        return self.bridge.move(super().__getitem__(index), self.bridge.current_device)

    def pop(self, index: Any = -1) -> Any:
        return self.bridge.move(super().pop(index), self.bridge.current_device)


class _Split:
    """A model cut into equal runs of blocks, one per card, and what a host adds to its forward."""

    def __init__(self, model: nn.Module, row: NativeModel, num_cards: int, transport: Transport) -> None:
        from devicebridge.parallel.block_lists import (
            execution_order,
            followers,
            hooked_modules,
            placed_blocks,
            tail_modules,
        )
        from devicebridge.parallel.bridge import Bridge
        from devicebridge.tests.emulated import CARDS

        self.model, self.row, self.transport, self.home = model, row, transport, CARDS[0]
        placed = placed_blocks(model, row)
        self.device = {name: CARDS[index * num_cards // len(placed)] for index, name in enumerate(placed)}
        self.device |= {name: self.device[leader] for name, leader in followers(model, row).items()}
        model.to(self.home)
        for name, device in self.device.items():
            model.get_submodule(name).to(device)
        order = execution_order(model, row)
        self.last = order[-1]
        hooked = {module: self.device[name] for name in order for module in hooked_modules(model, row, name)}
        self.bridge = Bridge(
            hooked, self.home, tail=tail_modules(model, row), transport=transport, passed_by=row.passed_by
        )

    def prepare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Inputs at home, with the objects a forward meets between blocks made aware of the cards."""
        from devicebridge.patches.hooks import map_tensors

        inputs = map_tensors(inputs, lambda tensor: tensor.to(self.home))
        for key in self.row.control_keys if inputs.get("control") else ():
            if key in inputs["control"]:
                inputs["control"][key] = self._residuals(inputs["control"][key])
        options = inputs["transformer_options"]
        if self.transport == "stream" and "patches" in options:
            for name, keys in self.row.patches_between.items():
                options["patches"][name] = [self._between(patch, keys) for patch in options["patches"][name]]
            replace = options["patches_replace"]["dit"]
            for (name, index), patch in replace.items():
                replace[name, index] = self._replace(patch, f"{self.row.replace_keys[name]}.{index}")
        return inputs

    def _residuals(self, values: list[Any]) -> _Residuals:
        residuals = _Residuals(values)
        residuals.bridge = self.bridge
        return residuals

    def _between(self, patch: Callable[[Any], Any], keys: Sequence[str]) -> Callable[[Any], Any]:
        def at_the_stream(args: dict[str, Any]) -> Any:
            device = args[keys[0]].device
            return patch({**args, **{key: self.bridge.move(args[key], device) for key in keys}})

        return at_the_stream

    def _replace(self, patch: Callable[..., Any], block: str) -> Callable[..., Any]:
        """The block's stand-in sees one device; what the last block leaves goes home."""
        device = self.device[block]

        def on_the_card(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            original = extra["original_block"]
            here = {"original_block": lambda inner: self.bridge.move(original(inner), device)}
            out = patch(self.bridge.move(args, device), {**extra, **here})
            return self.bridge.move(out, self.home) if block == self.last else out

        return on_the_card


def _flat(output: Any) -> list[torch.Tensor]:
    from devicebridge.tests.emulated import on_cpu

    return [on_cpu(tensor) for tensor in (output if isinstance(output, (list, tuple)) else [output])]


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> str:
    is_equal = len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    return "equal" if is_equal else "differs"


def _inputs(case: Case, row: NativeModel, *, patched: bool = False) -> dict[str, Any]:
    inputs = case.inputs()
    options = inputs.setdefault("transformer_options", {})
    options.setdefault("sigmas", torch.tensor([0.5]))
    if patched:
        options["patches"] = {name: [_add_others(keys)] for name, keys in row.patches_between.items()}
        options["patches_replace"] = {"dit": {(name, 1): _scaled for name in row.replace_keys}}
    return inputs


def _add_others(keys: Sequence[str]) -> Callable[..., Any]:
    """A user's patch between blocks that lets every tensor it gets act on the stream."""

    def of_dict(args: dict[str, Any]) -> dict[str, Any]:
        others = sum(args[key].float().mean() for key in keys[1:] if args[key] is not None)
        return {**args, keys[0]: args[keys[0]] * 0.5 + others}

    def of_tensors(*args: Any) -> Any:
        *tensors, _ = args  # transformer_options come last
        total = sum(tensor.mean() for tensor in tensors)
        changed = [tensor * 0.5 + total for tensor in tensors]
        return changed[0] if len(changed) == 1 else changed

    return of_dict if keys else of_tensors


def _scaled(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """A user's stand-in for a block that mixes what comes in with what goes out."""
    before = {name: value.clone() for name, value in args.items() if isinstance(value, torch.Tensor)}
    out = extra["original_block"](args)
    return {
        name: value * 0.5 + before[name] if isinstance(value, torch.Tensor) and name in before else value
        for name, value in out.items()
    }


def _attempt(run: Callable[[], str]) -> str:
    try:
        return run()
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"


class _Runs:
    """All runs of one case."""

    def __init__(self, case: Case) -> None:
        from devicebridge.families.native import find_native
        from devicebridge.parallel.block_lists import transport_for

        row = find_native(case.model_class)
        assert row is not None, f"no row for {case.class_name}"
        self.case, self.row = case, row
        self.model = case.build()
        self.transport = transport_for(self.model, row)

    def results(self) -> dict[str, str]:
        done = {
            "called": _attempt(self.calls),
            "split": _attempt(lambda: self.split(self.transport, self.case.cards)),
            "relay": _attempt(lambda: self.split("relay", 2)),
            "searched": _attempt(self.searched),
            "without hooks": _attempt(lambda: self.split(self.transport, 2, is_bridged=False)),
        }
        if self.row.replace_keys or self.row.patches_between:
            done["patched"] = _attempt(lambda: self.split(self.transport, 2, patched=True))
        if self.row.follows:
            done["followers astray"] = _attempt(lambda: self.split("stream", 2, row=_without_follows(self.row)))
        if self.transport == "relay":
            done["stream"] = _attempt(lambda: self.split("stream", 2))
        return {"transport": self.transport, **done}

    def whole(self, *, patched: bool = False) -> list[torch.Tensor]:
        return _flat(self.model(**_inputs(self.case, self.row, patched=patched)))

    def calls(self) -> str:
        """Whether the forward really calls each thing that hooks are put on."""
        from devicebridge.parallel.block_lists import BlockCalls, execution_order

        order = execution_order(self.model, self.row)
        if self.row.hooks_children:
            order = tuple(f"{name}.{child}" for name in order for child in self.model.get_submodule(name)._modules)
        calls = BlockCalls(self.model, order)
        self.whole()
        calls.check()
        return "equal" if not calls.silent else f"silent: {calls.silent}"

    def searched(self) -> str:
        """Relay over the lists that a search without a row finds, after a look at one forward."""
        from devicebridge.families.spec import NativeModel
        from devicebridge.parallel.block_lists import BlockCalls, block_fqns, find_block_lists

        lists = find_block_lists(self.model)
        calls = BlockCalls(self.model, block_fqns(self.model, lists))
        self.whole()
        calls.check()
        unknown = NativeModel(self.case.class_name, self.case.module, lists, (), "relay", "found", can_overlap=False)
        return self.split("relay", 2, row=unknown)

    def split(
        self,
        transport: Transport,
        num_cards: int,
        *,
        row: NativeModel | None = None,
        patched: bool = False,
        is_bridged: bool = True,
    ) -> str:
        from devicebridge.tests.emulated import emulated_cards

        expected = self.whole(patched=patched)
        with emulated_cards(num_cards), contextlib.ExitStack() as stack:
            split = _Split(copy.deepcopy(self.model), row or self.row, num_cards, transport)
            if is_bridged:
                split.bridge.attach()
            inputs = split.prepare(_inputs(self.case, self.row, patched=patched))
            stack.enter_context(split.bridge.forward())
            return _same(_flat(split.model(**inputs)), expected)


def _without_follows(row: NativeModel) -> NativeModel:
    """The side list as one more list of blocks, behind the main one."""
    return dataclasses.replace(row, follows={})


class _Strange(nn.Module):
    """A class nobody described: blocks under names of its own, a tensor of its own added between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedders = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])  # too small to be worth a card
        self.position = nn.Parameter(torch.ones(1, 3, 16))
        self.up = nn.Linear(2, 16)
        self.trunk = nn.ModuleDict({f"step{index}": nn.Linear(16, 16) for index in range(4)})
        self.refiners = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        for embedder in self.embedders:
            x = embedder(x)
        x = self.up(x)
        for step in self.trunk.values():
            x = step(x + self.position)
        for refiner in self.refiners:
            x = refiner(x) + self.position
        return x


def _strange() -> Any:
    from devicebridge.tests.comfy.native_cases import Case, rand

    class Made(Case):
        def build(self) -> nn.Module:
            torch.manual_seed(0)
            return _Strange().requires_grad_(False).eval()

    return Made("unknown class", __name__, "_Strange", {}, lambda: {"x": rand(2, 3, 2)})


def _unknown_class() -> dict[str, str]:
    from devicebridge.families.native import find_native
    from devicebridge.families.spec import NativeModel

    runs = _Runs.__new__(_Runs)
    runs.case, runs.model = _strange(), _strange().build()
    runs.row = NativeModel("_Strange", "", ("trunk", "refiners"), (), "relay", "made up", can_overlap=False)
    return {
        "row": str(find_native(_Strange)),
        "searched": _attempt(runs.searched),
        "stream": _attempt(lambda: runs.split("stream", 2)),
    }


def main(checkout: str) -> None:
    sys.path.insert(0, checkout)
    sys.argv = sys.argv[:1]  # ComfyUI reads the command line when its options are imported
    from comfy.cli_args import args

    args.cpu = True
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    from devicebridge.families.native import NATIVE_MODELS, find_native
    from devicebridge.tests.comfy.native_cases import CASES

    torch.set_num_threads(1)
    with torch.inference_mode(), _endless_memory():
        results = {case.name: _Runs(case).results() for case in CASES}
        results["unknown class"] = _unknown_class()
    results["rows"] = {
        f"{row.module}.{row.class_name}": "found" if find_native(_class_of(row)) is row else "not found"
        for row in NATIVE_MODELS
    }
    print(json.dumps(results))


@contextlib.contextmanager
def _endless_memory() -> Iterator[None]:
    """Free memory is the same everywhere: ComfyUI's attention on the CPU cuts its work by it, and asks real cards."""
    import comfy.model_management

    def free(device: Any = None, torch_free_too: bool = False) -> Any:
        return (10**9, 10**9) if torch_free_too else 10**9

    with mock.patch.object(comfy.model_management, "get_free_memory", free):
        yield


def _class_of(row: NativeModel) -> type:
    found: type = getattr(importlib.import_module(row.module), row.class_name)
    return found


if __name__ == "__main__":
    main(sys.argv[1])
