"""One process with ComfyUI's Python: what is read off tiny models of ComfyUI's own; run by test_native_reading.py.

Takes ComfyUI's folder, a folder for files, 1 for all builds, and names of builds. Prints one line of JSON: {"tokens": {build: [tokens per cell as read, as
its blocks are given]}, "needs": {build: what its CONDITIONING must hold}}.
"""

from __future__ import annotations

import dataclasses
import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

CHECKOUT, FOLDER, IS_LONG, *NEEDS = sys.argv[1:]
sys.path[0] = CHECKOUT
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = True
runpy.run_path(str(Path(__file__).resolve().parents[2] / "bootstrap.py"))["load_pack"]()

import torch  # noqa: E402
from devicebridge.checkpoints.load import load_transformer  # noqa: E402
from devicebridge.encoding.comfy_data import read_conditioning  # noqa: E402
from devicebridge.nodes.host.native.context import native_training  # noqa: E402
from devicebridge.nodes.host.native.source import read_native  # noqa: E402
from devicebridge.parallel.block_lists import placed_blocks  # noqa: E402
from devicebridge.tests.comfy.native_forwards import endless_memory  # noqa: E402
from devicebridge.tests.comfy.other_families import OTHERS, other_sizes  # noqa: E402
from devicebridge.tests.comfy.tiny_checkpoints import TinyFamily, small_sizes  # noqa: E402
from devicebridge.tests.comfy.trained_families import TRAINED, save_trained, small_adapter  # noqa: E402
from devicebridge.training.objective import predict  # noqa: E402

CPU = torch.device("cpu")
PACKED = ("Ideogram 4", "Lens", "MageFlow", "PixArt Sigma", "Cosmos 1", "HunyuanImage 2.1")
PATCHED = ("FLUX.1", "LTX-Video", "ERNIE-Image", "Krea 2", "Cosmos-Predict2", "Wan 2.1 T2V, 2.2 T2V 14B")
# Z-Image pads its tokens.
LONG = ("FLUX.2", "Chroma", "Qwen-Image", "Lumina 2", "SD 3.5", "HunyuanVideo", "HunyuanVideo 1.5", "Anima")
BUILDS = {**TRAINED, **OTHERS}


def read(name: str, family: TinyFamily) -> Any:
    path = Path(FOLDER) / f"{name.replace(' ', '_')}.safetensors"
    return read_native(save_trained(name, path, family), "float32")


def tokens_per_cell(name: str) -> list[float]:
    """As read, and by how many tokens the largest output of a block grows with a latent of twice the width."""
    family = BUILDS[name]
    wider = dataclasses.replace(family, latent=(*family.latent[:-1], 2 * family.latent[-1]))
    with small_sizes(family):
        info = read(name, family)
        model = load_transformer(info, lambda name: CPU, torch.float32)
        narrow, wide = (_largest(info, model, each) for each in (family, wider))
    cells = [math.prod(each.latent[1:]) for each in (family, wider)]
    return [info.family.latent.num_tokens_per_cell, (wide - narrow) / (cells[1] - cells[0])]


def needs(name: str) -> list[str]:
    with small_sizes(BUILDS[name]):
        return list(read(name, BUILDS[name]).family.comfy.needs)


@torch.no_grad()
def _largest(info: Any, model: Any, family: TinyFamily) -> int:
    seen: list[int] = []

    def hook(module: Any, given: Any, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        seen.extend(each.numel() // each.shape[-1] for each in outputs if isinstance(each, torch.Tensor))

    hooks = [model.get_submodule(each).register_forward_hook(hook) for each in placed_blocks(model, info.family.native)]
    front = (1,) if len(family.latent) == 3 else ()
    noisy = torch.randn(1, family.latent[0], *front, *family.latent[1:])
    given = {n: each[None] for n, each in read_conditioning(family.condition(1), "text", keeps_all=True).items()}
    predict(info.family, model, noisy, torch.tensor([0.5]), given, info.variant.training_guidance)
    for each in hooks:
        each.remove()
    return max(seen)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with small_adapter(), endless_memory(), other_sizes(), native_training():
        names = (*PATCHED, *PACKED, *(LONG if int(IS_LONG) else ()))
        tokens = {name: tokens_per_cell(name) for name in names}
        found = {"tokens": tokens, "needs": {name: needs(name) for name in NEEDS}}
        print(json.dumps(found), flush=True)
