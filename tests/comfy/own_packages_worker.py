"""The split nodes where nothing is installed but what ComfyUI requires; see test_nodes_in_comfyui.py.

Takes ComfyUI's folder, one for a checkpoint and the names of what the pack asks beside that, which are not found.
"""

import asyncio
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMFYUI, FOLDER, *ABSENT = sys.argv[1:]


class Without(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, *given: Any, **more: Any) -> Any:
        return None if fullname.partition(".")[0] in ABSENT else super().find_spec(fullname, *given, **more)


def main() -> None:
    sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
    sys.path[0] = COMFYUI
    import comfy.cli_args

    comfy.cli_args.args.cpu = True
    import comfy.sample
    import comfy.sd
    import torch

    sys.path.append(str(ROOT))
    import bootstrap

    pack = bootstrap.load_pack()
    from devicebridge.tests.comfy.split_host import Host, emulated_machine, small_sizes
    from devicebridge.tests.comfy.tiny_checkpoints import FAMILIES

    nodes = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    for node in nodes:
        node.GET_NODE_INFO_V1()
    from devicebridge.nodes import split

    with emulated_machine() as machine, torch.inference_mode():
        host = Host(machine, Path(FOLDER))
        whole = host.load("flux1", load_device=torch.device("cpu"))
        reference = host.sample(whole, "flux1")
        sockets = {each.id: each.default for each in split.SplitModel.define_schema().inputs[1:]}
        sockets["devices"] = "lazy:0,lazy:1"
        split.SplitModel.hidden = SimpleNamespace(unique_id=None)
        with small_sizes(FAMILIES["flux1"]):
            (model,) = split.SplitModel.execute(host.load("flux1"), **sockets).args
            same = torch.equal(host.sample(model, "flux1"), reference)
    loaded = sorted(name for name in sys.modules if name.partition(".")[0] in ABSENT)
    print(json.dumps({"same": same, "loaded": loaded}))


if __name__ == "__main__":
    main()
