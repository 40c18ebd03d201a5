"""Host memory of loading a diffusion model file in ComfyUI: its own loader against loading it split, DynamicVRAM off.

Writes a file of the Wan architecture with random bf16 weights, loads it in a fresh process each way and reads how much
memory of its own the process holds afterwards; pages of the mapped file are the system's and are not counted. No GPU is
needed: the cards are emulated, and nothing is sampled. Run it with ComfyUI's Python:

    python benchmarks/host_memory.py --comfyui ~/comfy/ComfyUI --num-layers 8
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HIDDEN = 5120, 13824  # Wan 14B, which has 40 layers


def main() -> None:
    arguments = _read_arguments()
    sys.path.insert(0, str(arguments.comfyui))
    if arguments.way:
        print(json.dumps(_load(arguments.file, arguments.way)))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "wan.safetensors"
        _write_model(file, arguments.num_layers)
        command = [sys.executable, __file__, "--comfyui", str(arguments.comfyui), "--file", str(file), "--way"]
        found = {way: json.loads(_run([*command, way])) for way in ("stock", "split")}
    own = {way: result["own_memory_gb"] for way, result in found.items()}
    print(json.dumps({"split_over_stock": own["split"] / own["stock"], **found}, indent=1))


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfyui", type=Path, default=os.environ.get("COMFYUI_PATH"), required=False)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument("--way", choices=["stock", "split"], help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(command: list[str]) -> str:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return finished.stdout.splitlines()[-1]


def _write_model(file: Path, num_layers: int) -> None:
    _start_comfyui()
    import comfy.ops
    import torch
    from comfy.ldm.wan.model import WanModel
    from safetensors.torch import save_file

    model = WanModel(
        model_type="t2v",
        in_dim=16,
        out_dim=16,
        dim=WIDTH,
        ffn_dim=HIDDEN,
        num_heads=WIDTH // 128,
        num_layers=num_layers,
        operations=comfy.ops.manual_cast,
        device=torch.device("meta"),
        dtype=torch.bfloat16,
    )
    save_file({name: torch.full(t.shape, 0.01, dtype=torch.bfloat16) for name, t in model.state_dict().items()}, file)


def _start_comfyui() -> None:
    from comfy.cli_args import args

    args.cpu = True
    runpy.run_path(str(ROOT / "bootstrap.py"))["load_pack"]()


def _load(file: Path, way: str) -> dict[str, float]:
    _start_comfyui()
    import comfy.sd
    import torch
    from devicebridge.nodes.host.split.model_copy import load_over_file
    from devicebridge.tests.comfy.split_host import emulated_machine

    before = _own_memory_gb()
    with emulated_machine():
        options = {"dtype": torch.bfloat16}  # as the file; a processor alone would be given float32
        if way == "stock":
            model = comfy.sd.load_diffusion_model(str(file), model_options=options)
        else:
            model, _ = load_over_file(file, options)
        weights = sum(parameter.nbytes for parameter in model.model.parameters()) / 1e9
        return {"weights_gb": round(weights, 3), "own_memory_gb": round(_own_memory_gb() - before, 3)}


def _own_memory_gb() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1e6


if __name__ == "__main__":
    main()
