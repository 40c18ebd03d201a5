"""Code of others that writes in place what blocks are given, before, between and inside them: each was once silently
another picture where all cards compute each block together."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import comfy.patcher_extension
import torch
from devicebridge.patches.hooks import tensors_reached
from devicebridge.tests.comfy.split_cases import CPU, Case, case, in_long_runs, split
from devicebridge.tests.comfy.split_cases_replayed import graphs_of, replayed
from devicebridge.tests.comfy.split_cases_tensor import near, tensor
from devicebridge.tests.comfy.split_host import HOME, OTHER, Host

_Change = Callable[[Any], None]
_STEPS = 2


def _always(options: Any) -> bool:
    return True


def _later(model: Any) -> Callable[[Any], bool]:
    """From the second step on, as a node with a start_percent."""
    sigma = float(model.get_model_object("model_sampling").percent_to_sigma(0.4))
    return lambda options: float(options["sigmas"].max()) <= sigma


def _changed(model: Any, change: _Change) -> Any:
    changed = model.clone()
    change(changed)
    return changed


def _compare(case: Case, name: str, changes: dict[str, _Change], ways: Sequence[str] = ("tensor",)) -> None:
    """On a MODEL whose blocks were compared before the node came, which would else notice some of these."""
    host = case.host
    plain = host.load(name, load_device=CPU)
    divided = {way: split(host.load(name), way=way) for way in ways}
    clean = host.sample(plain, name, steps=_STEPS)
    for way, model in divided.items():
        near(case, f"{name}: without: {way}", host.sample(model, name, steps=_STEPS), clean)
    for claim, change in changes.items():
        reference = host.sample(_changed(plain, change), name, steps=_STEPS)
        changed_by = float((reference - clean).norm() / clean.norm())
        case.check(f"{name}: {claim}: it does something", changed_by > 1e-3, changed_by)
        for way, model in divided.items():
            found = host.sample(_changed(model, change), name, steps=_STEPS)
            near(case, f"{name}: {claim}: {way}", found, reference)
    host.unload_all()


def _write(value: Any, factor: float) -> None:
    """Into every tensor in a value."""
    for each in tensors_reached(value):
        if each.is_floating_point():
            each.mul_(factor)


def _writing_before(entry: str, *blocks: tuple[str, int], is_late: bool = False) -> _Change:
    """Stand-ins for these blocks that write into what each is given."""

    def change(model: Any) -> None:
        writes = _later(model) if is_late else _always

        def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            if writes(args["transformer_options"]):
                _write(args.get(entry), 0.5)
            return extra["original_block"](args)

        for block in blocks:
            model.set_model_patch_replace(replaced, "dit", *block)

    return change


_SECOND = ("double_block", 1)
_SINGLE = ("single_block", 1)


@case
def writers_before_blocks(case: Case) -> None:
    """A replacement writes into this before it calls the block; other cards had copies from the block before."""
    more = (("chroma_heads", "pe", "pe"), ("hunyuan_video_heads", "pe", "vec"), ("qwen_image", "pe", "vec"))
    for name, entry, late in (("flux1_heads", "pe", "vec"), ("wan_heads", "txt", "vec"), *in_long_runs(*more)):
        blocks = (_SECOND,) if name in ("wan_heads", "qwen_image") else (_SECOND, _SINGLE)
        changes = {
            f"{entry}, before the block": _writing_before(entry, *blocks),
            f"{late}, from the second step on": _writing_before(late, *blocks, is_late=True),
        }
        _compare(case, name, changes)


@case
def writers_between_two_calls_of_a_block(case: Case) -> None:
    """The very first block is called twice, with a write into what it is given between."""
    for name in ("flux1_heads", "wan_heads"):
        _compare(case, name, {"img, between two calls": _calling_twice}, ("tensor", "blocks"))


def _calling_twice(model: Any) -> None:
    def replaced(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        first = extra["original_block"]({**args, "txt": args["txt"].clone()})
        img = first["img"].clone()
        _write(args["img"], 0.5)
        second = extra["original_block"](args)
        return {**second, "img": 0.5 * (img + second["img"])}

    model.set_model_patch_replace(replaced, "dit", "double_block", 0)


@case
def writers_of_tables_inside_the_attention(case: Case) -> None:
    """An attn1_patch writes `pe`, which it does not return."""

    def change(is_late: bool) -> _Change:
        def apply(model: Any) -> None:
            writes = _later(model) if is_late else _always

            def patch(q: Any, k: Any, v: Any, pe: Any = None, extra_options: Any = None, **_: Any) -> dict[str, Any]:
                if writes(extra_options):
                    _write(pe, 0.9)
                return {}

            model.set_model_attn1_patch(patch)

        return apply

    _compare(case, "qwen_image", {"pe, not returned": change(is_late=False)}, ("blocks",))
    _compare(case, "flux1_heads", {"pe, not returned, from the second step on": change(is_late=True)}, ("blocks",))


@case
def writers_that_tensor_refuses(case: Case, host: Host) -> None:
    """By name, where each card has some of the heads; a patch also where a wrapper attaches it to its forward."""
    name = "flux1_heads"

    def override(attention: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = attention(q.mul_(0.5), *args, **kwargs)
        return output

    def patch(q: Any, k: Any, v: Any, **_: Any) -> dict[str, Any]:
        return {"v": v * (1 + v.abs().mean())}

    def with_patch(value: Any) -> Any:
        is_options = isinstance(value, dict) and "sigmas" in value
        return {**value, "patches": {"attn1_patch": [patch]}} if is_options else value

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*map(with_patch, args), **{key: with_patch(value) for key, value in kwargs.items()})

    divided = tensor(host.load(name))
    patched, overridden, wrapped = (divided.clone() for _ in range(3))
    patched.set_model_attn1_patch(patch)
    overridden.model_options["transformer_options"]["optimized_attention_override"] = override
    wrapped.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "a pack", wrapper)
    for word, model in (("attn1_patch", patched), ("attention override", overridden), ("'attn1_patch'", wrapped)):
        case.refused(word, functools.partial(host.sample, model, name), RuntimeError, word, "way 'blocks'")


@case
def writers_after_blocks_were_recorded(case: Case, host: Host) -> None:
    """Graphs stand for the model's own code alone: not beside a writer, and again behind it."""
    name = "flux1_heads"
    plain = host.load(name, load_device=CPU)
    change = _writing_before("vec", _SECOND, _SINGLE, is_late=True)
    clean = host.sample(plain, name, steps=4)
    reference = host.sample(_changed(plain, change), name, steps=4)
    with replayed():
        divided = tensor(host.load(name), HOME, OTHER)
        near(case, "recorded", host.sample(divided, name, steps=4), clean)
        graphs = graphs_of(divided)
        assert graphs is not None
        before = graphs.num_replays
        near(case, "with the writer", host.sample(_changed(divided, change), name, steps=4), reference)
        case.check("nothing is replayed", before > 0 and graphs.num_replays == before, (before, graphs.num_replays))
        near(case, "without it", host.sample(divided, name, steps=4), clean)
        case.check("replayed again", graphs.num_replays > before, graphs.num_replays)
