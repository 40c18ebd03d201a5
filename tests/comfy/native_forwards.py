"""ComfyUI's own model classes, tiny and with random weights: a split forward is bit for bit the unsplit one on the CPU,
with the transport its row says. Cases of test_native_families.py.

What a host does around a forward is done here in the plainest way (`_Split`), so that a row's facts (such as
replace_keys) are what is tested, and not the host's code. Everything runs in inference mode, as in ComfyUI.
"""

import contextlib
import copy
import dataclasses
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from devicebridge.families.comfy.native import PASSED_BY, NativeModel, Transport
from devicebridge.families.comfy.registry import NATIVE_MODELS, find_native
from devicebridge.parallel.block_lists import (
    execution_order,
    followers,
    hooked_modules,
    placed_blocks,
    tail_modules,
    transport_for,
)
from devicebridge.parallel.local.borrow import Borrowed
from devicebridge.parallel.local.bridge import Bridge
from devicebridge.parallel.local.interleave import Interleave
from devicebridge.parallel.local.shards import divide_block, find_plan, shares_of
from devicebridge.parallel.local.tensor_parallel import TensorParallel
from devicebridge.parallel.placement import products_of
from devicebridge.patches.hooks import HookSet, map_tensors
from devicebridge.planning import times
from devicebridge.tests.comfy.cases import case_of, long_case, run_cases
from devicebridge.tests.comfy.native_cases import CASES, COUNTED, COUNTED_TOKENS, NEWER, PATCHES_BETWEEN, Case
from devicebridge.tests.emulated import CARDS, EmulatedCards, emulated_cards, factories_on_cards, on_cpu
from devicebridge.tests.placed import arrivals_noted, forward_of
from torch import nn

# Cards of one forward. Heads that do not divide go to the last.
_NUM_CARDS = (2, 3, 4)


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
        self.model, self.row, self.transport, self.main_device = model, row, transport, CARDS[0]
        placed = placed_blocks(model, row)
        self.device = {name: CARDS[index * num_cards // len(placed)] for index, name in enumerate(placed)}
        self.device |= {name: self.device[leader] for name, leader in followers(model, row).items()}
        model.to(self.main_device)
        for name, device in self.device.items():
            model.get_submodule(name).to(device)
        order = execution_order(model, row)
        self.last = order[-1]
        hooked = {m: self.device[name] for name in order for m in hooked_modules(model.get_submodule(name), row)}
        self.bridge = Bridge(
            hooked, self.main_device, tail=tail_modules(model, row), transport=transport, passed_by=PASSED_BY,
            per_device=row.per_device,
        )  # fmt: skip

    def prepare(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = map_tensors(inputs, lambda tensor: tensor.to(self.main_device))
        if control := inputs.get("control"):
            inputs["control"] = {key: self._residuals(values) for key, values in control.items()}
        options = inputs["transformer_options"]
        if self.transport == "stream" and "patches" in options:
            options["patches"] = {name: list(map(self._between, of)) for name, of in options["patches"].items()}
            replace = options["patches_replace"]["dit"]
            for (name, index), patch in replace.items():
                replace[name, index] = self._replace(patch, f"{self.row.replace_keys[name]}.{index}")
        return inputs

    def _residuals(self, values: list[Any]) -> _Residuals:
        residuals = _Residuals(values)
        residuals.bridge = self.bridge
        return residuals

    def _between(self, patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def at_the_stream(args: dict[str, Any]) -> Any:
            tensors = {key: each for key, each in args.items() if _is_tensor(each)}
            return patch({**args, **Borrowed(tensors, args["img"].device).value})  # views keep their strides

        return at_the_stream

    def _replace(self, patch: Callable[..., Any], block: str) -> Callable[..., Any]:
        """The block's stand-in sees one device; what the last block leaves goes home."""
        device = self.device[block]

        def on_the_card(args: dict[str, Any], extra: dict[str, Any]) -> Any:
            original = extra["original_block"]
            here = {"original_block": lambda inner: self.bridge.move(original(inner), device)}
            out = patch(self.bridge.move(args, device), {**extra, **here})
            return self.bridge.move(out, self.main_device) if block == self.last else out

        return on_the_card


def _flat(output: Any) -> list[torch.Tensor]:
    return [on_cpu(tensor) for tensor in (output if isinstance(output, (list, tuple)) else [output])]


def _are_equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _inputs(case: Case, row: NativeModel, *, patched: bool = False) -> dict[str, Any]:
    inputs = case.inputs()
    options = inputs.setdefault("transformer_options", {})
    options.setdefault("sigmas", torch.tensor([0.5]))
    if patched:
        options["patches"] = {name: [_let_all_act_on_the_stream] for name in PATCHES_BETWEEN}
        options["patches_replace"] = {"dit": {(name, 1): _scaled for name in row.replace_keys}}
    return inputs


def _let_all_act_on_the_stream(*args: Any) -> Any:
    """A user's patch between blocks: every tensor it gets changes the stream. Knows nothing of rows."""
    if len(args) == 1:
        stream = "img" if "img" in args[0] else "h"
        others = sum(value.float().mean() for key, value in args[0].items() if key != stream and _is_tensor(value))
        return {**args[0], stream: args[0][stream] * 0.5 + others}
    *tensors, _ = args  # transformer_options come last
    total = sum(tensor.mean() for tensor in tensors)
    changed = [tensor * 0.5 + total for tensor in tensors]
    return changed[0] if len(changed) == 1 else changed


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _scaled(args: dict[str, Any], extra: dict[str, Any]) -> Any:
    """A user's stand-in for a block that mixes what comes in with what goes out."""
    before = {name: value.clone() for name, value in args.items() if _is_tensor(value) and value.is_floating_point()}
    out = extra["original_block"](args)
    if _is_tensor(out):  # of a class that takes and returns the stream alone
        return out * 0.5 + before["x"]
    return {
        name: value * 0.5 + before[name] if isinstance(value, torch.Tensor) and name in before else value
        for name, value in out.items()
    }


def _mixes_devices(act: Callable[[], Any]) -> bool:
    try:
        act()
    except RuntimeError as error:
        return str(error).startswith("Expected all tensors to be on the same device")
    return False


class _Asked(dict[Any, Any]):
    """A dict that remembers which keys it was asked for, with what was going on at the time."""

    def __init__(self, state: Callable[[], str], *args: Any) -> None:
        super().__init__(*args)
        self.asked: set[tuple[str, Any]] = set()
        self._state = state

    def __contains__(self, key: object) -> bool:
        self.asked.add((self._state(), key))
        return super().__contains__(key)

    def __getitem__(self, key: Any) -> Any:
        self.asked.add((self._state(), key))
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked.add((self._state(), key))
        return super().get(key, default)

    def keys_asked(self, state: str | None = None) -> list[Any]:
        return sorted({key for when, key in self.asked if state in (None, when)})


class _Observed:
    def __init__(self, model: nn.Module, row: NativeModel, inputs: dict[str, Any]) -> None:
        self.order: list[nn.Module] = []
        self.between: set[str] = set()
        self.later: set[str] = set()
        self._inside = 0
        self._expected = [m for n in execution_order(model, row) for m in hooked_modules(model.get_submodule(n), row)]
        self._handles: list[Any] = []
        for module in self._expected:
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave))
        for name, child in model.named_children():
            self._watch_child(name, child, row)
        patches, replace = _Asked(self._state), _Asked(self._state)
        residuals = inputs.get("control") or {}
        control = _Asked(self._state, {"input": [], "middle": [], "output": [], **residuals})
        options = {**inputs["transformer_options"], "patches": patches, "patches_replace": {"dit": replace}}
        model(**{**inputs, "control": control, "transformer_options": options})
        for handle in self._handles:
            handle.remove()
        self.facts: dict[str, Any] = {
            "in order": self.order == self._expected, "tail": sorted(self.later - self.between),
            "control": control.keys_asked(), "replace": sorted({name for name, _ in replace.keys_asked()}),
            "between": patches.keys_asked("between"), "inside": patches.keys_asked("inside"),
        }  # fmt: skip

    def _watch_child(self, name: str, child: nn.Module, row: NativeModel) -> None:
        """Watch what is called beside the blocks: each child, or each child of what the lists of blocks are in."""
        if any(each.startswith(f"{name}.") for each in row.block_lists):
            for inner, grandchild in child.named_children():
                self._watch_child(f"{name}.{inner}", grandchild, row)
            return
        members = list(child) if isinstance(child, nn.ModuleList) else [child]
        for module in members if name not in row.block_lists else []:

            def note(module: nn.Module, args: Any) -> None:
                if self._state() == "between":
                    is_last = self.order[-1] is self._expected[-1]
                    (self.later if is_last else self.between).add(name)

            self._handles.append(module.register_forward_pre_hook(note))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside += 1
        if module not in self.order:
            self.order.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1

    def _state(self) -> str:
        if self._inside:
            return "inside"
        return "between" if self.order else "before"


class _Runs:
    def __init__(self, case: Case, row: NativeModel, model: nn.Module | None = None) -> None:
        self.case, self.row = case, row
        self.model = case.build() if model is None else model
        self.transport = transport_for(self.model, row)
        self._expected: dict[bool, list[torch.Tensor]] = {}

    def prove(self) -> None:
        row, case = self.row, self.case
        self.check_calls()
        if case.runs_once:
            self.check_facts()
        assert self.split("relay", 2) and self.split(self.transport, case.cards)
        if case.class_name == "Kandinsky5":  # passes its block an argument by a name that the block does not have
            with contextlib.suppress(TypeError):
                raise AssertionError(self.split(self.transport, 2, patched=True))
        elif not _are_equal(self.whole(patched=True), self.whole()):
            assert self.split(self.transport, 2, patched=True), "with users' patches between blocks"
        if row.follows:
            astray = dataclasses.replace(row, follows={})  # the side list placed like any other
            assert _mixes_devices(lambda: self.split("stream", 2, row=astray))
        if hasattr(self.model, "skip_dit"):
            self.check_last_skipped()
        if row.can_overlap:
            self.check_overlapped()
        if row.tensor:
            # Had any layer other features, fifty times as much would be seen.
            assert max(map(self.divided_by, _NUM_CARDS)) < 1e-5 and self.moved() > 5e-4
        if self.transport == "relay":
            assert _mixes_devices(lambda: self.split("stream", 2))

    def check_overlapped(self) -> None:
        """Two different forwards in flight, each with options of its own, against one after the other on one card."""
        with emulated_cards(2), factories_on_cards():
            alone = _Split(copy.deepcopy(self.model), self.row, 1, self.transport)
            expected = [_flat(alone.model(**alone.prepare(inputs))) for inputs in self._two_inputs()]
            split = _Split(copy.deepcopy(self.model), self.row, 2, self.transport)
            split.bridge.attach()

            def job(inputs: dict[str, Any]) -> Callable[[], list[torch.Tensor]]:
                def forward() -> list[torch.Tensor]:
                    with forward_of(split.bridge):
                        return _flat(split.model(**split.prepare(inputs)))

                return forward

            trace: list[tuple[int, torch.device]] = []
            with arrivals_noted(trace):
                outputs = Interleave(split.bridge).run([job(inputs) for inputs in self._two_inputs()])
        first_of_second = [index for index, _ in trace].index(1)
        assert any(index == 0 for index, _ in trace[first_of_second:]), "the two ran one after the other"
        assert _are_equal([*outputs[0], *outputs[1]], [*expected[0], *expected[1]])

    def _two_inputs(self) -> list[dict[str, Any]]:
        first, second = _inputs(self.case, self.row), _inputs(self.case, self.row)
        latents = next(iter(second))
        return [first, {**second, latents: map_tensors(second[latents], lambda tensor: tensor * 0.5)}]

    def whole(self, *, patched: bool = False) -> list[torch.Tensor]:
        if patched not in self._expected:
            self._expected[patched] = (self._whole_on_cpu if self.case.is_exact else self._whole_on_card)(patched)
        return self._expected[patched]

    def _whole_on_cpu(self, patched: bool) -> list[torch.Tensor]:
        remembered = {name: getattr(self.model, name) for name in self.row.remembers}
        try:
            return self._steps(lambda inputs: self.model(**inputs), patched)
        finally:
            for name, value in remembered.items():
                setattr(self.model, name, value)

    def _steps(self, forward: Callable[[dict[str, Any]], Any], patched: bool) -> list[torch.Tensor]:
        steps = (_inputs(self.case, self.row, patched=patched) for _ in range(self.case.num_steps))
        return [tensor for inputs in steps for tensor in _flat(forward(inputs))]

    def _whole_on_card(self, patched: bool) -> list[torch.Tensor]:
        with emulated_cards(1), factories_on_cards():
            alone = _Split(copy.deepcopy(self.model), self.row, 1, self.transport)
            return self._steps(lambda inputs: alone.model(**alone.prepare(inputs)), patched)

    def check_calls(self) -> None:
        """What hooks are put on is called."""
        order = execution_order(self.model, self.row)
        if self.row.hooks_children:
            order = tuple(f"{name}.{child}" for name in order for child in self.model.get_submodule(name)._modules)
        called, hooks = set[str](), HookSet()
        for name in order:
            hooks.just_before(self.model.get_submodule(name), lambda *call, name=name: called.add(name))
        self._whole_on_cpu(patched=False)
        hooks.remove()
        assert called == set(order)

    def divided_by(self, num_cards: int) -> float:
        """The relative error of two forwards on so many cards."""
        with self._divided_among(num_cards) as (forward, alone, _):
            expected = _flat(alone.model(**alone.prepare(_inputs(self.case, self.row))))
            found = [forward() for _ in range(2)]
        return max(float((a - b).norm() / b.norm()) for each in found for a, b in zip(each, expected, strict=True))

    @contextlib.contextmanager
    def _divided_among(self, num_cards: int) -> Iterator[tuple[Callable[[], Any], _Split, EmulatedCards]]:
        """A forward on so many cards, the whole model on the first of them, and the cards."""
        cards = CARDS[:num_cards]
        with emulated_cards(len(cards)) as machine, factories_on_cards():
            alone = _Split(copy.deepcopy(self.model), self.row, 1, self.transport)
            model, shards = copy.deepcopy(self.model), {}
            for name in execution_order(model, self.row):
                block = model.get_submodule(name)
                plan = find_plan(self.row.tensor, block)
                assert plan is not None, f"no plan for {type(block).__name__}"
                shares = shares_of(block, plan, num_cards)
                others = [divide_block(copy.deepcopy(block), plan, shares, rank) for rank in range(1, len(cards))]
                for card, other in zip(cards[1:], others, strict=True):
                    other.block.to(card)
                shards[block] = divide_block(block, plan, shares, 0), others
            model.to(CARDS[0])
            bridge = TensorParallel(cards, shards, passed_by=PASSED_BY, per_device=self.row.per_device)
            bridge.attach()

            def forward() -> list[torch.Tensor]:
                with forward_of(bridge):
                    return _flat(model(**alone.prepare(_inputs(self.case, self.row))))

            yield forward, alone, machine

    def check_counted(self) -> None:
        """What planning/times.py counts of a forward, as shares of what two cards did: bytes sent, and products."""
        names = execution_order(self.model, self.row)
        blocks = {name: self.model.get_submodule(name) for name in names}
        plans = {name: find_plan(self.row.tensor, block) for name, block in blocks.items()}
        divided = {name: (plan, shares_of(blocks[name], plan, 2)) for name, plan in plans.items() if plan}
        with mock.patch.object(times, "NUM_TEXT_TOKENS", COUNTED_TOKENS[1]):
            work = times.forward_work(self.model, self.row, divided, COUNTED_TOKENS[0])
        side = self.row.linears
        products = sum(sum(products_of(block, side, *COUNTED_TOKENS).values()) for block in blocks.values())
        with _products_watched(blocks.values()) as done:
            self.whole()
        with self._divided_among(2) as (forward, _, machine):
            forward()  # compares outputs, which takes copies
            machine.copies.clear()
            forward()
        sent = [each for each in machine.copies if (each.source, each.target) == (CARDS[1], CARDS[0])]
        squares = sum(each.num_bytes for each in sent if each.shape[-1] == 1)
        num_bytes = (sum(each.num_bytes for each in sent) - squares) / 2 + squares  # numbers of four bytes, not two
        shares = 2 * work.sent_bytes / num_bytes, 2 * products / sum(done)  # two samples
        assert all(abs(share - 1) < 0.04 for share in shares)

    def moved(self) -> float:
        """The smallest change of the output by any divided layer whose features are a quarter of all further on: what
        `divided` would see of wrong slices."""
        expected, changes = self.whole(), {}
        for name in execution_order(self.model, self.row):
            block = self.model.get_submodule(name)
            plan = find_plan(self.row.tensor, block)
            assert plan is not None, f"no plan for {type(block).__name__}"
            shard = divide_block(copy.deepcopy(block), plan, shares_of(block, plan, 2), 0)
            for layer, part in shard.slices.items():
                weight = block.get_parameter(layer)
                kind = type(block), layer, weight.shape
                if kind in changes or layer.endswith("bias"):
                    continue
                kept, weight.data = weight.data, weight.data.roll(weight.shape[part.dim] // 4, part.dim)
                found = self._whole_on_cpu(patched=False)
                weight.data = kept
                changes[kind] = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
        return min(changes.values())

    def check_facts(self) -> None:
        """Against one unsplit forward that was watched: order, tail, and every key that was asked for."""
        row, facts = self.row, _Observed(self.model, self.row, _inputs(self.case, self.row)).facts
        assert facts["in order"] and set(facts["tail"]) <= set(row.tail) and facts["tail"]
        # Pairs of a class and a stand-in for its layers, no patch to be called; in relay it sees everything at home.
        assert {*facts["between"]} <= {*PATCHES_BETWEEN, "forward_timestep_embed_patch"}
        assert (facts["replace"], facts["inside"]) == (sorted(row.replace_keys), sorted(row.patches_inside))

    def check_last_skipped(self) -> None:
        """Chroma leaves blocks out when told to; without the last one only the tail's hooks bring the stream home."""
        model = copy.deepcopy(self.model)
        model.skip_dit = [self.case.config["depth_single_blocks"] - 1]
        runs, without_tail = _Runs(self.case, self.row, model), dataclasses.replace(self.row, tail=())
        assert runs.split("stream", 2) and _mixes_devices(lambda: runs.split("stream", 2, row=without_tail))

    def split(self, transport: Transport, cards: int, *, row: NativeModel | None = None, patched: bool = False) -> bool:
        expected = self.whole(patched=patched)
        with emulated_cards(cards), factories_on_cards():
            split = _Split(copy.deepcopy(self.model), row or self.row, cards, transport)
            split.bridge.attach()

            def forward(inputs: dict[str, Any]) -> Any:
                with forward_of(split.bridge):
                    return split.model(**split.prepare(inputs))

            return _are_equal(self._steps(forward, patched), expected)


@contextlib.contextmanager
def _products_watched(blocks: Iterable[nn.Module]) -> Iterator[list[float]]:
    done: list[float] = []
    handles = []

    def note(layer: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        tokens = output.numel() / layer.weight.shape[0]
        done.append(2.0 * layer.weight.numel() * tokens)

    for block in blocks:
        for module in block.modules():
            if isinstance(module, (nn.Linear, nn.Conv1d)):
                handles.append(module.register_forward_hook(note))
    yield done
    for handle in handles:
        handle.remove()


@long_case
def derived_classes_with_a_forward_of_their_own_relay() -> None:
    """Of classes that ComfyUI derives from described ones, what find_native makes."""
    from comfy.ldm.flux.controlnet import ControlNetFlux
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

    rows = [find_native(cls) for cls in (ControlNetFlux, QwenImageControlNetModel)]
    assert [row is not None and row.transport for row in rows] == ["relay"] * 2


@long_case
def every_row_is_a_class_of_this_comfyui() -> None:
    for row in NATIVE_MODELS:
        found = pkgutil.resolve_name(row.path) if row.evidence == "run" else None
        assert found is None or find_native(found) is row, row.path


_ALL = {case.name: case for case in (*CASES, *NEWER)}
_COUNTED = {f"counted {case.name}": case for case in COUNTED}


@case_of(*_ALL)
def a_split_changes_no_bit(name: str) -> None:
    if not (case := _ALL[name]).is_there:
        return  # of later versions
    runs = _Runs(case, _row_of(case))
    if name.startswith("wan_vace"):  # a build that ends with a side block relays
        assert runs.transport == ("relay" if name == "wan_vace_to_the_end" else "stream")
    runs.prove()


@case_of(*_COUNTED)
def a_forecast_counts_what_cards_do_that_divide_it(name: str) -> None:
    case = _COUNTED[name]
    _Runs(case, _row_of(case)).check_counted()


@contextlib.contextmanager
def endless_memory() -> Iterator[None]:
    """Free memory is the same everywhere: ComfyUI's attention on the CPU cuts its work by it, and asks real cards."""
    import comfy.model_management

    def free(device: Any = None, torch_free_too: bool = False) -> Any:
        return (10**9, 10**9) if torch_free_too else 10**9

    with mock.patch.object(comfy.model_management, "get_free_memory", free):
        yield


def _row_of(case: Case) -> NativeModel:
    row = find_native(case.model_class)
    assert row is not None, f"no row for {case.class_name}"
    return row


if __name__ == "__main__":
    with torch.inference_mode(), endless_memory():
        run_cases()
