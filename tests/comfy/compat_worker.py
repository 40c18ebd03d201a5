"""The ComfyUI at hand, as it stands when it loads packs, has all that the pack uses of it, and one that lacks something
is refused by name; cases of test_compat.py."""

import asyncio
import importlib
import inspect
import io
import logging
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from devicebridge.tests.comfy.cases import case, run_cases

ROOT = Path(__file__).resolve().parents[2]
NAMES = Path(__file__).with_name("comfyui_api.txt")


def _start_comfyui() -> None:
    """What main.py does before it loads packs, without listening; fork_host.py has done the first of it."""
    import execution  # noqa: F401
    import server

    import nodes

    server.PromptServer(asyncio.new_event_loop())
    asyncio.run(nodes.init_builtin_extra_nodes())


@case
def comfyui_has_all_that_the_pack_asks_at_its_start() -> None:
    from devicebridge import compat

    before = set(sys.modules)
    assert not [text for _, text in compat.find_faults()]
    assert set(sys.modules) == before


@case
def comfyui_has_everything_else_that_the_code_uses() -> None:
    lines = [line for line in NAMES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert len(lines) > 250
    lacking = [text for line in lines for text in _lacks(line)]
    assert not lacking


# What no ComfyUI has: each must be found out.
WRONG = (
    "comfy.utils.no_such_function", "comfy.model_patcher.ModelPatcher.no_such_attribute",
    "comfy.utils.get_attr(attr, obj)", "comfy.utils.get_attr(obj)", "comfy.sd.load_clip(no_such_keyword=)",
    "comfy.samplers.get_area_and_mult mentions no_such_word",
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL = another", "no_such_module.name",
)  # fmt: skip


@case
def a_line_that_no_comfyui_keeps_is_found() -> None:
    assert not [line for line in WRONG if not list(_lacks(line))]


def _lacks(line: str) -> Iterator[str]:
    from devicebridge import compat

    is_optional = line.endswith(" ?")
    path, relation, told = re.fullmatch(r"([\w.]+)(?: (mentions|=) |\(|$)(.*?)\)?", line.removesuffix(" ?")).groups()
    try:
        module, names = _module_of(path)
        found: Any = module
        for place, name in enumerate(names):
            if place == len(names) - 1 and _is_set_on_objects(found, name):
                return
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        if not is_optional:
            yield f"{line}: {type(error).__name__}: {error}"
        return
    if relation == "mentions":
        source = inspect.getsource(found)
        yield from (f"{line}: {word} is not there" for word in told.split(", ") if word not in source)
    elif relation == "=":
        yield from () if found == told else (f"{line}: it is {found!r}",)
    elif "(" in line:
        place, form = module.__name__, tuple(filter(None, told.split(", ")))
        yield from (text for _, text in compat.find_faults([compat.Need("", place, ".".join(names), form)]))


def _module_of(path: str) -> tuple[Any, list[str]]:
    """The longest part of a dotted name that is a module, and the names behind it."""
    names = path.split(".")
    for length in range(len(names), 0, -1):
        try:
            return importlib.import_module(".".join(names[:length])), names[length:]
        except ModuleNotFoundError:
            continue
    raise ImportError(f"no module of {path}")


def _is_set_on_objects(owner: Any, name: str) -> bool:
    if not isinstance(owner, type) or hasattr(owner, name):
        return False
    functions = [each for cls in owner.__mro__ for each in vars(cls).values() if inspect.isfunction(each)]
    return any(name in each.__code__.co_names for each in functions) or name in _annotations(owner)


def _annotations(owner: type) -> set[str]:
    return {name for cls in owner.__mro__ for name in vars(cls).get("__annotations__", ())}


@case
def every_method_that_stands_in_for_one_of_comfyuis_is_as_compat_says() -> None:
    from comfy.model_patcher import ModelPatcherDynamic
    from devicebridge import compat
    from devicebridge.nodes.host.split import patcher

    told = {need.name: need.form for need in compat.NEEDS if need.is_overridden}
    for cls in (patcher._CardPatcher, patcher.ShardMixin, patcher.SplitMixin):
        for name, function in vars(cls).items():
            if not inspect.isfunction(function) or name.startswith("__") or not hasattr(ModelPatcherDynamic, name):
                continue
            ours = list(inspect.signature(function).parameters.values())[1:]
            takes_more = any(each.kind is each.VAR_POSITIONAL for each in ours)
            names = [each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD]
            form = [each for each in told.get(name, ()) if each != "..."]
            is_covered = name in told and names == form[: len(names)] and (takes_more or "..." not in told[name])
            is_covered = is_covered and (len(names) == len(form) or takes_more)
            assert is_covered, f"{cls.__name__}.{name}{inspect.signature(function)}: compat.py has {told.get(name)}"


@case
def where_a_function_is_gone_its_nodes_refuse_and_look_as_before() -> None:
    """The split nodes, with what is gone in their words and in the log; another node runs."""
    import comfy.utils
    from devicebridge.compat import PARTS

    def listed() -> dict[str, Any]:
        nodes = asyncio.run(asyncio.run(PACK.comfy_entrypoint()).get_node_list())
        return {node.GET_NODE_INFO_V1()["name"]: node for node in nodes}

    function, logged = comfy.utils.repeat_to_batch_size, io.StringIO()
    del comfy.utils.repeat_to_batch_size
    logging.getLogger().addHandler(logging.StreamHandler(logged))
    try:
        named = listed()
    finally:
        comfy.utils.repeat_to_batch_size = function
    after = listed()
    assert [name for name, node in named.items() if node is not after[name]] == list(PARTS["split"])
    assert all(node.GET_NODE_INFO_V1() == after[name].GET_NODE_INFO_V1() for name, node in named.items())
    assert set(named) == {*PARTS["nodes"], "DeviceBridgeRingLseFix"}
    split = named["DeviceBridgeLoadDiffusionModelSplit"]
    try:
        split.execute(unet_name="tiny.safetensors", devices="auto")
        raise AssertionError("nothing was refused")
    except RuntimeError as error:
        said = str(error)
    assert "changed what DeviceBridge relies on here: comfy.utils.repeat_to_batch_size is gone. Update" in said
    (refused,) = re.findall(r"(DeviceBridge[\w, ]+) will not work", logged.getvalue())
    assert refused.split(", ") == list(PARTS["split"])
    assert list(named["DeviceBridgeRingLseFix"].execute(enabled=False).args) == [None, "Off"]


if __name__ == "__main__":
    sys.argv = ["main.py", "--cpu"]
    _start_comfyui()
    PACK = runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    run_cases()
