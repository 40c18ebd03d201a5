"""FSDP and data parallel of this pack beside torch's own FSDP2 by itself, on the same model and the same cards.

    torchrun --nproc-per-node 2 benchmarks/ranks.py CHECKPOINT [--modes data,fsdp,fsdp_fp8,plain_fsdp] [--size 512]
    torchrun --nproc-per-node 2 benchmarks/ranks.py --tiny          on CPUs, to see that it runs

"plain" modes are diffusers, PEFT and `fully_shard` and nothing of ours, with the same LoRA, weights and sizes. One line
of JSON per mode from the first rank: seconds per sample, GB of each card at its peak, MB of each process's own host
memory at its peak (files that are mapped left out) while loading.
"""

from __future__ import annotations

import argparse
import gc
import json
import runpy
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).resolve().parents[1] / "bootstrap.py"))["load_pack"]()

import psutil  # noqa: E402
import torch  # noqa: E402
from devicebridge.assembly import assemble_for_training, assemble_sharded  # noqa: E402
from devicebridge.checkpoints.checkpoint import read_checkpoint  # noqa: E402
from devicebridge.config.job import LoraSettings  # noqa: E402
from devicebridge.execution import ExecutionPlan  # noqa: E402
from devicebridge.parallel.devices import CPU, available_devices, memory_in_use, reset_peaks  # noqa: E402
from devicebridge.parallel.placement import Placement, block_names  # noqa: E402
from devicebridge.parallel.ranks.across import AcrossRanks  # noqa: E402
from devicebridge.parallel.ranks.group import joined  # noqa: E402
from devicebridge.parallel.ranks.place import find_place  # noqa: E402
from devicebridge.parallel.runner import MicroBatch, PlainAccumulation  # noqa: E402
from devicebridge.quantization.quantize import QuantizeSettings  # noqa: E402
from devicebridge.tests.tiny_pipeline import save_tiny_pipeline  # noqa: E402
from devicebridge.training.adapter import apply_lora  # noqa: E402
from torch import nn  # noqa: E402

MODES = {
    "data": ("none", None),
    "data_fp8": ("none", "fp8-compute"),
    "data_int8": ("none", "int8-compute"),
    "fsdp": ("fsdp", None),
    "fsdp_keep": ("fsdp", None),
    "fsdp_compile": ("fsdp", None),
    "fsdp_fp8": ("fsdp", "fp8-compute"),
    "fsdp_int8": ("fsdp", "int8-compute"),
}
PLAIN = ("plain_fsdp", "plain_fsdp_compile", "plain_fsdp_keep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--modes", default=",".join([*MODES, *PLAIN]))
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rank", type=int, default=32)
    options = parser.parse_args()
    place = find_place()
    assert place is not None, "start it with torchrun"
    device = CPU if options.tiny else available_devices()[place.local_rank]
    with joined(place, (device,), 1800.0, lambda: False) as ranks, tempfile.TemporaryDirectory() as name:
        if options.tiny:
            folder = ranks.from_first(lambda: str(save_tiny_pipeline(Path(name) / "model", "flux2")))
            options.checkpoint, options.size, options.rank = folder, 64, 4
        for mode in options.modes.split(","):
            _measure(mode, options, ranks, device)
            gc.collect()
            torch._dynamo.reset()
        ranks.wait()


def _measure(mode: str, options: argparse.Namespace, ranks: Any, device: torch.device) -> None:
    reset_peaks([device])
    before = _own_mb()
    peak = [before]
    info = read_checkpoint(options.checkpoint)
    is_plain = mode in PLAIN
    dtype = torch.float32 if device == CPU else torch.bfloat16
    model, parameters, step = (_plain if is_plain else _ours)(mode, info, options, ranks, device, dtype)
    peak.append(_own_mb())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, foreach=False)

    def whole() -> None:
        step()
        optimizer.step()
        optimizer.zero_grad()

    seconds = _timed(whole, options.steps, device)
    memory = ranks.gather(memory_in_use([device]))
    told = {
        "mode": mode,
        "s_per_sample": round(seconds / ranks.count, 4),
        "peak_gb": [round(values["peak"], 1) for each in memory for values in each.values()],
        "host_mb_while_loading": ranks.gather(round(max(peak) - before)),
    }
    if ranks.is_first:
        print(json.dumps(told), flush=True)


def _own_mb() -> float:
    found = psutil.Process().memory_info()
    return (found.rss - getattr(found, "shared", 0)) / 1e6


def _timed(step: Callable[[], None], count: int, device: torch.device) -> float:
    times = []
    for index in range(count + 2):
        start = time.perf_counter()
        step()
        if device != CPU:
            torch.accelerator.synchronize(device)
        if index > 1:
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def _loss(model: nn.Module, info: Any, size: int, device: torch.device, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    channels, side = info.config.get("in_channels", 128), size // 16
    tokens, width = side * side, info.config["joint_attention_dim"]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    output = model(
        hidden_states=draw(1, tokens, channels),
        encoder_hidden_states=draw(1, 512 if size > 64 else 8, width),
        timestep=torch.full((1,), 0.5, device=device, dtype=dtype),
        guidance=torch.ones(1, device=device, dtype=dtype),
        img_ids=torch.zeros(1, tokens, 4, device=device),
        txt_ids=torch.zeros(1, 512 if size > 64 else 8, 4, device=device),
        return_dict=False,
    )[0]
    return (output.float() - draw(1, tokens, channels).float()).square().mean()


def _ours(
    mode: str, info: Any, options: argparse.Namespace, ranks: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    strategy, scheme = MODES[mode]
    from devicebridge.checkpoints.load import make_empty_transformer

    names = block_names(make_empty_transformer(info), info.family)
    plan = ExecutionPlan(
        placement=Placement(names, (device,) * len(names), device),
        dtype=dtype,
        quantize=None if scheme is None else QuantizeSettings(scheme),  # type: ignore[arg-type]
        strategy=strategy,  # type: ignore[arg-type]
        gradient_checkpointing="keep" not in mode,
        compiled_shapes=1 if "compile" in mode else None,
    )

    def attach(model: nn.Module) -> Any:
        settings = LoraSettings(rank=options.rank, alpha=options.rank)
        return apply_lora(model, info.family, settings, seed=1)

    if strategy == "fsdp":
        mesh = init_device_mesh(device.type, (ranks.count,))
        assembled = assemble_sharded(info, plan, attach, mesh)
    else:
        assembled = assemble_for_training(info, plan, attach)
    model, parameters = assembled.model, list(assembled.adapter.parameters().values())  # type: ignore[attr-defined]
    inner = PlainAccumulation(model, device)
    runner = AcrossRanks(inner, parameters, ranks, 0, in_lockstep=strategy == "fsdp")
    count = [0]

    def step() -> None:
        count[0] += 1
        runner.run(
            [
                MicroBatch(
                    lambda: None,
                    lambda _, seed=100 * count[0] + index: _loss(model, info, options.size, device, dtype, seed),
                    name=f"{count[0]} {index}",
                )
                for index in range(ranks.count)
            ]
        )

    return model, parameters, step


def _plain(
    mode: str, info: Any, options: argparse.Namespace, ranks: Any, device: torch.device, dtype: torch.dtype
) -> Any:
    """diffusers, PEFT and FSDP2 alone; random weights of the same shapes."""
    import diffusers
    from peft import LoraConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model: Any = getattr(diffusers, info.family.transformer_class).from_config(dict(info.config)).to(dtype)
    model.requires_grad_(False)
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".attn." in n]
    model.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=names))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    if "keep" not in mode:
        model.enable_gradient_checkpointing()
    model.train()
    if "compile" in mode:
        model.compile_repeated_blocks()
    mesh = init_device_mesh(device.type, (ranks.count,))
    for name in block_names(model, replace(info.family)):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
    parameters = [each for each in model.parameters() if each.requires_grad]
    count = [0]

    def step() -> None:
        count[0] += 1
        _loss(model, info, options.size, device, dtype, 100 * count[0] + ranks.place.rank).backward()

    return model, parameters, step


main()
