"""Classes that nobody described: their rows are derived, proved, kept and used, or refused by name.

The exam takes the written rows of ten classes out.
"""

import contextlib
import copy
import functools
import inspect
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from devicebridge.families.comfy import registry
from devicebridge.families.comfy.native import NativeModel
from devicebridge.nodes.host.native.model import native_training, plain_attention
from devicebridge.nodes.host.split import deriving
from devicebridge.nodes.host.split import examine as gradients
from devicebridge.nodes.host.split.attachments import OVERRIDE
from devicebridge.nodes.host.split.deriving import Cards, find_rows, small_forwards, with_derived_rows
from devicebridge.nodes.host.split.examine import examine, gradient_fault, gradients_of, trained_blocks, worst
from devicebridge.nodes.host.split.model import describe_split
from devicebridge.nodes.host.split.shown_inputs import ShownInputs
from devicebridge.parallel.block_lists import find_block_lists
from devicebridge.parallel.local import deriving as guesses
from devicebridge.parallel.local import token_training
from devicebridge.parallel.local.token_training import TokenModel
from devicebridge.parallel.local.tokens import RowsError, TokenParallel
from devicebridge.planning.derived_rows import Verdict
from devicebridge.tests.comfy.derived_classes import (
    MUTATIONS,
    SEEN_LATER,
    TEXT,
    WIDTH,
    Flux3Like,
    Keeping,
    Late,
    Mutated,
    Mutation,
    filled,
    in_bfloat16,
)
from devicebridge.tests.comfy.native_cases import CASES as NATIVE_CASES
from devicebridge.tests.comfy.native_cases import rand
from devicebridge.tests.comfy.split_cases import CASES, CPU, Case, case, in_long_runs, long_case, split
from devicebridge.tests.comfy.split_cases_formats import quantised_checkpoint
from devicebridge.tests.comfy.split_cases_forward import _RESIDUALS, Residuals
from devicebridge.tests.comfy.split_cases_tensor import near
from devicebridge.tests.comfy.split_cases_ways import FAST_LINK, _machine, _way_of
from devicebridge.tests.comfy.split_classes import DERIVED
from devicebridge.tests.comfy.split_host import Host
from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES, small_sizes
from torch import nn

NEAR = 1e-5


@contextlib.contextmanager
def nobody_described() -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(registry._BY_CLASS, clear=True),
        mock.patch.dict("os.environ", {"DEVICEBRIDGE_CACHE": folder}),
    ):
        yield


def _exam(name: str, case: Case) -> None:
    host = case.host
    reference, guided = host.reference(name), host.reference(name, cfg=4.0)
    with nobody_described():
        case.equal("by blocks", host.sample(split(host.load(name)), name), reference)
        host.unload_all()
        shared = split(host.load(name), way="tokens")
        with mock.patch.object(deriving, "find_rows", wraps=deriving.find_rows) as found:
            near(case, "by tokens", host.sample(shared, name), reference, NEAR)
            case.check("derived once", found.call_count == 1, found.call_count)
            near(case, "again", host.sample(shared, name), reference, NEAR)
            near(case, "with guidance", host.sample(shared, name, cfg=4.0), guided, NEAR)
            host.unload_all()
            count = found.call_count
            near(case, "loaded again", host.sample(shared, name), reference, NEAR)
            case.check("still proved", found.call_count == count, found.call_count)
            host.sample(host.lora(shared, name), name)
            case.check("proved again with a LoRA", found.call_count == count + 1, found.call_count)
            host.unload_all()
            count = found.call_count
            shared = split(host.load(name), way="tokens")
            near(case, "of another loading", host.sample(shared, name), reference, NEAR)
            case.check("proved again", found.call_count > count, found.call_count)
            case.check("the kept one first", found.call_args.args[2] is not None)
        said, _ = describe_split(shared)
        case.check("said", "of the tokens" in said, said)


for _name in DERIVED:
    CASES[f"derived_{_name}"] = functools.partial(_exam, _name)


def _cards(model: nn.Module, count: int = 2) -> Cards:
    models = [model, *(copy.deepcopy(model) for _ in range(count - 1))]
    method = "_forward" if hasattr(type(model), "_forward") else "forward"
    forwards = [getattr(each, method) for each in models]
    return Cards(models, forwards, [CPU] * count, find_block_lists(model), lambda tensors, rank, arrivals: tensors)


def _given(height: int = 12, width: int = 16, text: int = 9) -> dict[str, Any]:
    """Of the classes in derived_classes.py."""
    x, context = rand(1, 4, height, width), rand(1, text, TEXT)
    return {"x": x, "timestep": torch.tensor([0.4]), "context": context, "transformer_options": {}}


@case
def derived_mutations(case: Case) -> None:
    """What no rows may be derived for is refused, each in words of its own; without its change the class has rows."""
    plan = find_rows(_cards(filled(Mutated())), _given())
    case.check("unchanged it has rows", set(plan.blocks) == {"blocks"}, plan)
    for name, mutation in MUTATIONS.items():
        case.refused(name, functools.partial(find_rows, _cards(filled(Mutated(mutation))), _given()), RowsError)
        for half in in_long_runs(in_bfloat16):
            made = _cards(half(filled(Mutated(mutation))))
            case.refused(f"{name} in half", functools.partial(find_rows, made, half(_given())), RowsError)
    for half in in_long_runs(in_bfloat16):
        plan = find_rows(_cards(half(filled(Flux3Like()))), half(_given()))
        case.check("in half it has rows", len(plan.blocks) == 3, plan)
    case.check("enough of them", len(MUTATIONS) > 20, len(MUTATIONS))
    hiding, keeping = filled(Mutated(MUTATIONS["the row before, in the last block"])), filled(Keeping())
    hiding.out.weight.data.zero_()
    hiding.out.bias.data.zero_()
    case.refused("a result of zeros", functools.partial(find_rows, _cards(hiding), _given()), RowsError, "hides")
    find_rows(_cards(keeping), _given())
    left = (keeping.kept.tolist(), keeping._texts, dict(keeping.named_buffers()).keys())
    case.check("nothing is left of small forwards", left == ([0.0] * 3, {"of": []}, {"kept"}), left)
    # Without what refuses it, each of these would have rows.
    shown_by = {"keys": ("_keys_differ", lambda *keys: (0, "")), "the row before, in": ("apart", lambda *results: 0.0)}
    for beginning, (guard, blind) in shown_by.items():
        with mock.patch.object(deriving, guard, blind):
            for name in (each for each in MUTATIONS if each.startswith(f"{beginning} ")):
                plan = find_rows(_cards(filled(Mutated(MUTATIONS[name]))), _given())
                case.check(f"{name}: without {guard}", bool(plan.blocks), plan)


# What a row of plain inputs does not know.
_REFERENCES = ("control", "ref_latents", "ref_latents_method", "ref_latent", "guiding_frame_index", "keyframe_idxs")
_OWN = (*_REFERENCES, "attention_mask", "denoise_mask", "transformer_options")
_NATIVE = ("chroma", "qwen_image", "lumina2", "ltxv", "hunyuan_video", "sd3", "krea2", "cosmos_predict2")


def _native(name: str) -> tuple[nn.Module, dict[str, Any]]:
    built = next(each for each in NATIVE_CASES if each.name == name)
    model, given = built.build(), {key: value for key, value in built.inputs().items() if key not in _OWN}
    method = "_forward" if hasattr(type(model), "_forward") else "forward"
    own, seen = getattr(model, method), dict[str, Any]()
    if name == "ltxv":
        given["attention_mask"] = None

    def note(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(own).bind(*args, **kwargs)
        seen.update({key: value for key, value in bound.arguments.items() if key != "kwargs"}, **bound.kwargs)
        return own(*args, **kwargs)

    with mock.patch.object(model, method, note):
        model(**given, transformer_options={"sigmas": torch.tensor([0.5])})
    return model, seen


@case
def derived_in_halves(case: Case) -> None:
    """Small pictures are in float32, so kernels that round halves by their number of rows hide and invent no fault."""
    linear = torch.nn.functional.linear

    def by_rows(x: torch.Tensor, *args: Any) -> torch.Tensor:
        return linear(x, *args) * (1 + 0.1 * (x.shape[-2] % 7) * (x.dtype is torch.bfloat16))

    with torch.no_grad(), mock.patch.object(torch.nn.functional, "linear", by_rows):
        model, given = _native("flux1")
        plan = find_rows(_cards(model.bfloat16()), in_bfloat16(given))
    case.check("it has rows", len(plan.blocks) == 2, plan)
    left = [name for name, each in model.named_modules() if "comfy_cast_weights" in vars(each)]
    case.check("layers cast no more than before", not left, left[:3])


@case
def derived_gradients(case: Case) -> None:
    """Results and gradients of derived rows are those of one card; gradients counted on every card are not."""
    with torch.inference_mode(False), torch.no_grad():  # as a training has it
        _compare_gradients(case)


def _compare_gradients(case: Case) -> None:
    made = {name: functools.partial(_native, name) for name in ("flux1", *in_long_runs("wan", *_NATIVE))}
    made["flux3"] = lambda: (filled(Flux3Like()), _given())
    for name, make in made.items():
        model, given = make()
        cards = _cards(model)
        with mock.patch.dict(guesses._NEAR, {torch.float32: 1e-6}):
            plan = find_rows(cards, given)
        case.check(f"{name}: nothing differs", not gradient_fault(cards, plan, given))
        small = small_forwards(cards, given)[0].given
        with native_training():
            expected, found = (gradients_of(cards, each, small) for each in (None, plan))
        inputs = [key for key, each in expected.items() if key.startswith("input ") and each.ndim > 2]
        apart = worst(*({key: of[key] for key in inputs} for of in (found, expected)))[0]
        case.check(f"{name}: gradients", apart < 1e-6, apart)
        apart = worst(found, expected)[0]
        case.check(f"{name}: gradients of a LoRA", apart < NEAR, apart)
        lora = [key for key in expected if not key.startswith("input ")]
        whole, one = (torch.cat([of[key].flatten() for key in lora]) for of in (found, expected))
        case.check(
            f"{name}: all of its gradient", (whole - one).norm() < 1e-6 * one.norm(), (whole - one).norm() / one.norm()
        )
    _compare_sizes(case)
    with mock.patch.object(token_training, "map_tensors", lambda output, change: output):
        case.check("counted twice", "differ" in gradient_fault(cards, plan, given))


def _compare_sizes(case: Case) -> None:
    """A training sees what no small picture shows in the first sample of a size where it is."""
    cards = _cards(filled(Mutated(SEEN_LATER)))
    rows = TokenParallel(cards.models, cards.devices, find_rows(cards, _given()), (1.0, 1.0))
    rows.attach()
    model = TokenModel(rows, is_derived=True)
    for size, is_refused in ((12, False), (32, True)):
        given = _given(size, size)

        def forward(one: nn.Module, device: torch.device, given: dict[str, Any] = given) -> torch.Tensor:
            return one(**{**given, "transformer_options": {OVERRIDE: plain_attention}})

        def act(size: int = size, forward: Any = forward) -> Any:
            with native_training():
                return model.through(forward, size=size)

        if is_refused:
            case.refused(f"{size}", act, RowsError, "of this size")
        else:
            case.check(f"{size}", bool(act().isfinite().all()))
    rows.remove()


class _Wrong(torch.autograd.Function):
    """Its gradient is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 1.1 * gradient


class _Scaled(nn.Linear):
    """Its output is not its weight's alone, so a LoRA in the weight is another one than beside the layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


# What blocks do beside -> what is said of it.
_UNTRAINED = {
    "a part without a gradient": (lambda x: x + 0.5 * x.detach(), "slopes"),
    "no gradient": (lambda x: x.detach(), "has no gradient"),
    "a wrong gradient": (_Wrong.apply, "slopes"),
}


@case
def derived_trainings(case: Case) -> None:
    """What gradients are right is trained by blocks, a pipeline where only its tail is behind them; no other is."""
    with torch.inference_mode(False), torch.no_grad():
        _compare_trainings(case)


def _compare_trainings(case: Case) -> None:
    def found(model: nn.Module) -> Any:
        return trained_blocks(_cards(model), _given())

    plain = found(filled(Mutated()))
    case.check("unchanged it trains", (plain.lists, plain.tail, plain.refused) == (("blocks",), ("out",), ""), plain)
    in_turn = found(filled(Flux3Like()))
    case.check("lists in turn have no pipeline", (in_turn.tail, in_turn.refused) == ((), ""), in_turn)
    for name, (mix, word) in _UNTRAINED.items():
        refused = found(filled(Mutated(Mutation(mix=mix)))).refused
        case.check(name, word in refused, refused)
    with mock.patch.object(gradients, "_slope_fault", lambda *given: ""):
        case.check("unseen without slopes", not found(filled(Mutated(Mutation(mix=_Wrong.apply)))).refused)
    taking, writing, behind, scaling = (filled(Mutated()) for _ in range(4))
    scaling.blocks[1].out.__class__ = _Scaled
    case.check("a linear of a kind of its own", "blocks.1.out" in (said := found(scaling).refused), said)
    first = taking.blocks[0]
    first.__dict__["mutation"] = Mutation(mix=lambda x: x + x @ first.out.weight)
    large = filled(Mutated())
    large.blocks[0].__dict__["mutation"] = Mutation(
        mix=lambda x: x + x @ large.blocks[0].out.weight if x.shape[1] == 57 else x
    )
    case.check("or of another size alone", "LoRA" in (said := found(large).refused), said)
    case.check("weights out of their layers", "first" not in (said := found(taking).refused) and "LoRA" in said, said)
    with mock.patch.object(gradients, "_weights_in_their_layers", lambda model: contextlib.nullcontext()):
        case.check("unseen where they stay", "LoRA" not in (said := found(taking).refused), said)
    writing.blocks[0].register_forward_hook(lambda module, args, output: (args[2].mul_(0.5), None)[1])
    case.check("what other blocks have is written into", bool(said := found(writing).refused), said)
    behind.of_blocks = lambda *given: Mutated.of_blocks(behind, *given) + given[2][..., :WIDTH]
    case.check(
        "no pipeline computes at home behind its blocks", (made := found(behind)).tail == () and not made.refused, made
    )


@case
def derived_other_inputs(case: Case, host: Host) -> None:
    """References are derived anew, as they are inputs of their own; a ControlNet is refused by name."""
    name = "flux1"
    plain, beside = FAMILIES[name].condition(1), FAMILIES[name].condition(1)
    beside[0][1]["reference_latents"] = [rand(1, 16, 4, 6)]
    unsplit = host.load(name, load_device=CPU)
    expected = [host.sample(unsplit, name, positive=each) for each in (plain, beside)]
    case.differs("they do something", *expected)
    host.unload_all()
    controlled = FAMILIES[name].condition(1)
    controlled[0][1] |= {"control": Residuals(_RESIDUALS[name]), "control_apply_to_uncond": True}
    with nobody_described():
        shared = split(host.load(name), way="tokens")
        with mock.patch.object(deriving, "find_rows", wraps=deriving.find_rows) as found:
            for what, positive, wanted in zip(("plain", "with a reference"), (plain, beside), expected, strict=True):
                near(case, what, host.sample(shared, name, positive=positive), wanted, NEAR)
        case.check("each derived", found.call_count == 2, found.call_count)
        refused = functools.partial(host.sample, shared, name, positive=controlled)
        case.refused("a ControlNet", refused, RuntimeError, "ControlNet", "way 'blocks'")


def _unseen(host: Host, model: nn.Module) -> Any:
    loaded = host.load("flux1")
    loaded.model.diffusion_model = filled(model)
    return loaded


@contextlib.contextmanager
def _on(model: Any, device: torch.device) -> Iterator[None]:
    with mock.patch.object(model, "load_device", device):
        yield


@long_case
def derived_unseen(case: Case, host: Host) -> None:
    """A class that nobody here has seen: by blocks the same bits, by tokens near, each by ComfyUI's sampler."""
    model = Flux3Like(channels=16, text=48)
    with _on(unsplit := _unseen(host, model), CPU):
        reference = host.sample(unsplit, "flux1", steps=1)
    host.unload_all()
    with nobody_described():
        case.equal("by blocks", host.sample(split(_unseen(host, model)), "flux1", steps=1), reference)
        host.unload_all()
        for way, taken in ((None, "blocks"), ("tokens", "tokens"), (None, "tokens")):
            with _machine(1e9, FAST_LINK), case.logged("", logging.INFO) as said:
                found = split(_unseen(host, model), way=way)
            case.check(f"{way} takes {taken}", _way_of(found) == taken, said)
            does_without = any("one run with way 'tokens'" in line for line in said)
            case.check("it says why", does_without == (taken == "blocks"), said)
            if way:
                near(case, "by tokens", host.sample(found, "flux1", steps=1), reference, 1e-6)
                near(case, "again", host.sample(found, "flux1", steps=1), reference, 1e-6)
                host.unload_all()


@case
def derived_sizes(case: Case, host: Host) -> None:
    """What no small picture shows is seen in the first step of a size where it is, and the row is one no more."""
    with nobody_described():
        shared = split(_unseen(host, Mutated(SEEN_LATER, channels=16, text=48)), way="tokens")
        sample = functools.partial(host.sample, shared, "flux1")
        small = sample()
        case.check("small ones are computed", bool(small.isfinite().all()))
        larger = functools.partial(sample, latent=(16, 16, 16))
        case.refused("a larger one", larger, RuntimeError, "of this size", "way 'blocks'")
        case.refused("a small one, too", sample, RuntimeError, "of this size", "way 'blocks'")
        host.unload_all()
        late = split(_unseen(host, Late(channels=16, text=48)), way="tokens")
        case.refused("late steps", functools.partial(host.sample, late, "flux1"), RuntimeError, "of this size")
        host.unload_all()
        again = split(_unseen(host, Mutated(SEEN_LATER, channels=16, text=48)), way="tokens")
        refused = functools.partial(host.sample, again, "flux1")
        case.refused("of another loading", refused, RuntimeError, "of this size", "way 'blocks'")
        with _machine(1e9, FAST_LINK):
            by_auto = split(_unseen(host, Mutated(SEEN_LATER, channels=16, text=48)), way=None)
        case.check("auto takes another way", _way_of(by_auto) != "tokens", _way_of(by_auto))


@case
def derived_rows_are_kept(case: Case) -> None:
    """By source, structure and kind of inputs; what is no such file is derived again."""
    model = filled(Mutated())
    with nobody_described():
        rows, kinds = deriving.rows_of(model), ShownInputs(_given())
        rows.keep(kinds.signature, Verdict(find_rows(_cards(model), _given())))
        case.check("kept", deriving.rows_of(model).verdicts().keys() == {kinds.signature}, rows.path)
        rows.keep(kinds.signature, replace(rows.verdicts()[kinds.signature], has_gradients=True))
        rows.keep(kinds.signature, replace(rows.verdicts()[kinds.signature], has_gradients=False))
        case.check("compared gradients stay so", rows.verdicts()[kinds.signature].has_gradients)
        rows.keep("other", Verdict(None, "differs"))
        rows.keep("other", rows.verdicts()[kinds.signature])
        case.check("what was refused stays so", rows.verdicts()["other"].refused == "differs")
        case.check("as it was", rows.verdicts()[kinds.signature].row == find_rows(_cards(model), _given()))
        others = {"wider": Mutated(text=80), "deeper": Mutated()}
        others["deeper"].blocks.append(copy.deepcopy(others["deeper"].blocks[0]))
        for what, other in others.items():
            case.check(f"not for a {what} one", not deriving.rows_of(other).verdicts())
        sizes = ShownInputs(_given(24, 32, 40))
        case.check("sizes are of one kind", (sizes.signature, sizes.size != kinds.size) == (kinds.signature, True))
        masked = ShownInputs({**_given(), "attention_mask": torch.ones(1, 9)})
        case.check("another input is not", masked.signature != kinds.signature)
        values = (0.0, 0.3, 0.4, torch.half, torch.int)
        unlike = {ShownInputs({**_given(), "strength": each}).signature for each in values}
        case.check("nor a strength of zero, nor another type", len(unlike) == len(values) - 1, unlike)
        for spoilt in (b"{}", b"[", rows.path.read_bytes().replace(b"img=img@1", b"__import__('os')")):
            rows.path.write_bytes(spoilt)
            case.check("what is spoilt is not used", not rows.verdicts(), spoilt[:30])


@case
def derived_rows_are_not_refused_for_what_other_code_did(case: Case, host: Host) -> None:
    """A hook that comes in the middle of a run is named, and no verdict is kept of the class with it."""
    name, handles = "flux1_heads", list[Any]()
    with nobody_described():
        model = split(host.load(name), way="tokens")
        layer = model.model.diffusion_model.double_blocks[0].img_mlp[0]

        def hook_it(step: int, *_: Any) -> None:
            handles.append(layer.register_forward_hook(lambda module, args, output: output * 2))

        run = functools.partial(host.sample, model, name, callback=hook_it)
        case.refused("a hook", run, RuntimeError, "a hook on double_blocks.0.img_mlp.0")
        kept = deriving.rows_of(host.load(name).model.diffusion_model).verdicts().values()
        case.check("its rows stay", bool(kept) and not any(each.refused for each in kept), kept)


@case
def derived_examine(case: Case, host: Host) -> None:
    """`devicebridge examine FILE` says the row as it is written, and a split takes it without deriving again."""
    name = "flux1"
    reference = host.reference(name)
    host.unload_all()
    for each in (name, *in_long_runs("sd3", "lumina2", "ltxv")):
        with nobody_described(), small_sizes(FAMILIES[each]):
            said = examine(host.checkpoint(each))
        kind = FAMILIES[each].config_class
        case.check(f"{kind}: a row", "TokenPlan(" in said and "NativeModel(" in said, said)
        host.unload_all()
    with nobody_described(), torch.inference_mode(False):
        said = examine(quantised_checkpoint(host, "int8_tensorwise", name))
        plain = host.load(name).model.diffusion_model
        row = with_derived_rows(NativeModel(name, (), (), "", is_derived=True), plain)
    case.check("of 8 bits, kept for other files, too", "card, and slopes" in said and bool(row.trained_inputs), said)
    host.unload_all()
    are_one, devices, management = [], set[str](), deriving.management

    def find_and_write(cards: Cards, given: Any) -> Any:
        for one, other in zip(*(model.parameters() for model in cards.models), strict=True):
            before = one.clone()
            devices.add(one.device.type)
            one.zero_()
            are_one.append(not bool(other.any()))
            one.copy_(before)
        return find_rows(cards, given)

    as_a_command = torch.inference_mode(False), mock.patch(f"{examine.__module__}.find_rows", find_and_write)
    with contextlib.ExitStack() as stack:
        for each in (nobody_described(), small_sizes(FAMILIES[name]), *as_a_command):
            stack.enter_context(each)
        said = examine(host.checkpoint(name))
        case.check("gradients too", "those of one card" in said and devices == {"lazy"}, [devices, said])
        host.unload_all()
        with mock.patch.object(management, "vram_state", management.VRAMState.NO_VRAM):
            streamed = examine(host.checkpoint(name))
        case.check("and where weights stream", streamed == said and "cpu" in devices, [devices, streamed])
        case.check("a card has the weights once", all(are_one), are_one)
        host.unload_all()
        plan = split(host.load(name), way="tokens").model.devicebridge_split.plan
        case.check("a split has it", deriving.written(plan.tokens) in said, plan)
    row = registry._BY_CLASS["comfy.ldm.flux.model.Flux"]
    with mock.patch.dict(registry._BY_CLASS, {row.path: replace(row, tokens=plan.tokens)}):
        near(case, "used as a written one", host.sample(split(host.load(name), way="tokens"), name), reference, NEAR)
    host.unload_all()
    with small_sizes(FAMILIES["sdxl"]):
        said = examine(host.checkpoint("sdxl"))
    case.check("one that has none", "convolutions" in said and "TokenPlan" not in said, said)
