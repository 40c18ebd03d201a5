"""A ComfyUI as it stands when it loads packs, asked for all that the pack uses. Prints what it lacks, as JSON.

Takes ComfyUI's folder.
"""

import asyncio
import importlib
import inspect
import io
import json
import logging
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMES = Path(__file__).with_name("comfyui_api.txt")


def main() -> None:
    answers, sys.stdout = sys.stdout, io.StringIO()
    sys.argv = ["main.py", "--cpu"]
    _start_comfyui()
    pack = runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()
    json.dump({**_ask(), **_ask_without_a_function(pack)}, answers)


def _start_comfyui() -> None:
    """What main.py does before it loads packs, without listening; fork_host.py has done the first of it."""
    import server

    import execution  # noqa: F401
    import nodes

    server.PromptServer(asyncio.new_event_loop())
    asyncio.run(nodes.init_builtin_extra_nodes())


def _ask() -> dict[str, Any]:
    from devicebridge import compat

    before = set(sys.modules)
    faults = [text for _, text in compat.find_faults()]
    imported = sorted(set(sys.modules) - before)
    lines = [line for line in NAMES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {
        "faults": faults, "imported": imported, "asked": len(lines),
        "lacking": [text for line in lines for text in _lacks(line)],
        "not as lines say": [line for line in WRONG if not list(_lacks(line))],
        "overrides": list(_overrides_that_differ()),
    }  # fmt: skip


# What no ComfyUI has: each must be found out.
WRONG = (
    "comfy.utils.no_such_function", "comfy.model_patcher.ModelPatcher.no_such_attribute",
    "comfy.utils.get_attr(attr, obj)", "comfy.utils.get_attr(obj)", "comfy.sd.load_clip(no_such_keyword=)",
    "comfy.samplers.get_area_and_mult mentions no_such_word",
    "comfy.patcher_extension.WrappersMP.APPLY_MODEL = another", "no_such_module.name",
)  # fmt: skip


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


def _overrides_that_differ() -> Iterator[str]:
    """Methods that stand in for ComfyUI's and are not in compat.py, or take other parameters than it says."""
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
            if not is_covered or (len(names) < len(form) and not takes_more):
                yield f"{cls.__name__}.{name}{inspect.signature(function)}: compat.py has {told.get(name)}"


def _ask_without_a_function(pack: Any) -> dict[str, Any]:
    """What the split nodes, another and the log say where ComfyUI has renamed a function."""
    import comfy.utils

    function, logged = comfy.utils.repeat_to_batch_size, io.StringIO()
    del comfy.utils.repeat_to_batch_size
    logging.getLogger().addHandler(logging.StreamHandler(logged))
    try:
        extension = asyncio.run(pack.comfy_entrypoint())
        listed = asyncio.run(extension.get_node_list())
    finally:
        comfy.utils.repeat_to_batch_size = function
    after = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    infos = [node.GET_NODE_INFO_V1() for node in listed]
    named = {info["name"]: node for info, node in zip(infos, listed, strict=True)}
    try:
        said = named["DeviceBridgeLoadDiffusionModelSplit"].execute(unet_name="tiny.safetensors", devices="auto")
    except RuntimeError as error:
        said = str(error)
    return {
        "log": logged.getvalue(), "said": said, "other": named["DeviceBridgeRingLseFix"].execute(enabled=False).args,
        "same schemas": infos == [node.GET_NODE_INFO_V1() for node in after],
        "refusing": [info["name"] for info, node in zip(infos, listed, strict=True) if node not in after],
        "ids": [info["name"] for info in infos],
    }  # fmt: skip


if __name__ == "__main__":
    main()
