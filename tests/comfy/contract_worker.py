"""A ComfyUI as it stands when it loads packs, asked for every row of the contract. Prints what was found, as JSON.

Takes ComfyUI's folder.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    answers, sys.stdout = sys.stdout, io.StringIO()
    checkout = Path(sys.argv[1])
    sys.path.insert(0, str(checkout))
    sys.argv = ["main.py", "--cpu"]
    _start_comfyui()
    pack = _load_pack()
    found = {**_ask(checkout), **_ask_without_a_function(pack)}
    json.dump(found, answers)


def _start_comfyui() -> None:
    """What main.py does before it loads packs, without listening."""
    import comfy.options

    comfy.options.enable_args_parsing()
    import server

    import execution  # noqa: F401
    import nodes

    server.PromptServer(asyncio.new_event_loop())
    asyncio.run(nodes.init_builtin_extra_nodes())


def _load_pack() -> Any:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    return bootstrap.load_pack()


def _ask(checkout: Path) -> dict[str, Any]:
    from devicebridge.contract.check import find_faults, pending_nodes
    from devicebridge.contract.living import Living
    from devicebridge.contract.rows import ROWS
    from devicebridge.contract.written import Written

    before = set(sys.modules)
    living = Living()
    faults, pending = find_faults(living), pending_nodes(living)
    imported = sorted(set(sys.modules) - before)
    from comfy.model_patcher import ModelPatcherDynamic
    from devicebridge.nodes.host.split import patcher

    mixins = (patcher._CardPatcher, patcher.ShardMixin, patcher.SplitMixin)
    ours = {name for cls in mixins for name, each in vars(cls).items() if callable(each) and name[:2] != "__"}
    rows = {row.path.rpartition(".")[2] for row in ROWS if row.use == "override"}
    return {
        "version": living.version,
        "living": [fault.text for fault in faults],
        "pending": sorted(pending),
        "imported": imported,
        "written": [fault.text for fault in find_faults(Written(checkout, tuple(sys.path)))],
        "overrides without a row": sorted({name for name in ours if hasattr(ModelPatcherDynamic, name)} - rows),
    }


def _ask_without_a_function(pack: Any) -> dict[str, Any]:
    """What the split node and another say where ComfyUI has renamed a function."""
    import comfy.utils

    function = comfy.utils.repeat_to_batch_size
    del comfy.utils.repeat_to_batch_size
    try:
        extension = asyncio.run(pack.comfy_entrypoint())
        listed = asyncio.run(extension.get_node_list())
    finally:
        comfy.utils.repeat_to_batch_size = function
    after = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    infos = [node.GET_NODE_INFO_V1() for node in listed]
    return {
        "same schemas": infos == [node.GET_NODE_INFO_V1() for node in after],
        "guarded": [info["name"] for info, node in zip(infos, listed, strict=True) if node not in after],
    }


if __name__ == "__main__":
    main()
