"""Peak host memory of every tool of `devicebridge lora` on files of FLUX.1 (12 billion weights, 24 GB in bf16) or, with
--family flux2, of FLUX.2 (32 billion, 64 GB).

The two models are files with a hole: base is zeros, and tuned has random numbers in the layers of some blocks, the
largest among them. The LoRA files have random numbers in every layer. Each tool runs in a process of its own, whose
greatest resident memory Linux says (VmHWM), pages of mapped files included. Needs about 6 GB of disk at --rank 128:

    python benchmarks/lora_memory.py --rank 128
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from devicebridge.checkpoints.header import read_header
from devicebridge.checkpoints.model_class import expected_shapes
from devicebridge.families.naming import originals_of
from devicebridge.families.registry import FAMILIES
from random_checkpoint import write_hollow
from safetensors.torch import save_file

TUNED = ("double_blocks.0.", "single_blocks.0.", "single_blocks.37.")  # what differs between the two


CHILD = """import sys
from devicebridge.cli.main import main
assert main(sys.argv[1:]) == 0
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).strip())
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=128, help="of the LoRA files; that of extract is a quarter")
    parser.add_argument("--folder", type=Path, help="for the files")
    parser.add_argument("--family", default="flux1", choices=FAMILIES)
    parser.add_argument("--tools", nargs="*", help="these alone")
    arguments = parser.parse_args()
    sizes, family = {}, FAMILIES[arguments.family]
    shapes = expected_shapes(family, family.variants[0].transformer_config)
    for original, stack in originals_of(shapes, family.renames).items():
        members = [shapes[member] for member in stack.members]
        sizes[original] = (sum(shape[0] for shape in members), *members[0][1:])
    with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
        base, tuned, lora, dokr = (Path(made) / f"{name}.safetensors" for name in ("base", "tuned", "lora", "dokr"))
        num_bytes = write_hollow(base, sizes)
        write_hollow(tuned, sizes)
        _fill(tuned)
        save_file(dict(_factors(sizes, arguments.rank)), lora)
        save_file(dict(_dokr(sizes)), dokr)
        less = str(arguments.rank // 4)
        tools = {
            "merge": [str(lora), f"{lora}:0.5"],
            "extract": [str(tuned), str(base), "--rank", less],
            "convert": [str(lora), "--to", "both"],
            "scale": [str(lora), "--by", "0.5"],
            "inspect": [str(lora)],
            "resize": [str(lora), "--rank", less],
            "merge dokr": [str(dokr), f"{dokr}:0.5", "--base", str(tuned), "--rank", less],
        }
        found = {"model_gb": num_bytes / 1e9, "lora_gb": lora.stat().st_size / 1e9, "rank": arguments.rank}
        for tool, options in tools.items():
            if arguments.tools and tool not in arguments.tools:
                continue
            output = Path(made) / "out.safetensors"
            found[tool] = _measured(
                ["lora", tool.split()[0], *options, *([] if tool == "inspect" else ["-o", str(output)])]
            )
            output.unlink(missing_ok=True)
    print(json.dumps(found, indent=1))


def _fill(file: Path) -> None:
    header, generator = read_header(file), torch.Generator().manual_seed(0)
    with file.open("r+b") as stream:
        for name, entry in header.tensors.items():
            if name.startswith(TUNED):
                values = torch.randn(prod(entry.shape), generator=generator).to(torch.bfloat16)
                stream.seek(header.data_start + entry.start)
                stream.write(values.view(torch.uint8).numpy().data)


def _factors(sizes: dict[str, tuple[int, ...]], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in sizes.items():
        if len(shape) == 2 and "_blocks." in name:
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            yield f"{layer}.lora_A.weight", torch.randn(rank, shape[1]).to(torch.bfloat16)
            yield f"{layer}.lora_B.weight", torch.randn(shape[0], rank).to(torch.bfloat16)
            yield f"{layer}.alpha", torch.tensor(float(rank))


def _dokr(sizes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of the layers that tuned has numbers in."""
    for name, shape in sizes.items():
        if len(shape) == 2 and name.startswith(TUNED):
            layer = f"diffusion_model.{name.removesuffix('.weight')}"
            yield f"{layer}.lokr_w1", torch.randn(64, 64).to(torch.bfloat16)
            yield f"{layer}.lokr_w2", torch.randn(shape[0] // 64, shape[1] // 64).to(torch.bfloat16)
            yield f"{layer}.dora_scale", torch.ones(shape[0], 1)


def _measured(arguments: list[str]) -> dict[str, float]:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, check=True)
    peak = int(done.stdout.splitlines()[-1].split()[1]) * 1024
    found = {"peak_gb": round(peak / 1e9, 2), "seconds": round(time.monotonic() - began)}
    print(arguments[1], found, file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
